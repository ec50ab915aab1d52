//! Controllers and their queues.
//!
//! An association begins with its admin queue ([`Shared::attach_admin`]), gets I/O queues
//! ([`Shared::attach_io`]), and ends when its admin queue ends: [`Shared::begin_detach`] closes its
//! other queues, and [`Shared::detach`] removes each queue when it is drained.

use alloc::collections::BTreeMap;
use alloc::string::String;
use alloc::sync::Arc;
use alloc::vec::Vec;
use core::sync::atomic::AtomicU64;

use riopipe_order::region::Region;

use super::notices::Notice;
use super::{ConnEntry, Shared};
use crate::target::error_log::ErrorLog;
use crate::target::events::Events;
use crate::target::ids::ConnId;
use crate::target::limits::{CAPSULES_TO_MEMORY, CONTROLLERS_MAX, IN_CAPSULE_BYTES};
use crate::target::reserved_access::ReservedAccess;
use crate::target::rights::Rights;

/// One controller: an association of a host with the subsystem.
#[derive(Debug)]
pub struct Controller {
    /// The number of the association, unique in an incarnation of the target. Controller ids are
    /// used again.
    pub association: u64,
    /// The host's name.
    pub hostnqn: String,
    /// The host's id.
    pub hostid: [u8; 16],
    /// Whether it is a discovery controller, which has no I/O queues.
    pub discovery: bool,
    /// Whether the host has enabled the controller (CC.EN).
    pub enabled: bool,
    /// The association must end: it gets no new queues, and ends when all of its queues are
    /// drained.
    pub dying: bool,
    /// The port through which its admin queue was connected. The other queues are connected through it,
    /// too.
    pub port: u16,
    /// The admin queue's connection.
    pub admin: ConnId,
    /// The time at which a queue of the controller last received from the host, ns.
    pub last_received: Arc<AtomicU64>,
    /// Whether the queues may make plain reads and writes.
    pub rights: Arc<Rights>,
    /// The access that reservations of namespaces, and the ANA states of the port, allow to the host.
    pub access: Arc<ReservedAccess>,
    /// Its asynchronous events.
    pub events: Events,
    /// Its newest errors.
    pub errors: ErrorLog,
    /// The connections of the I/O queues, by queue id.
    pub queues: BTreeMap<u16, ConnId>,
}

/// The association that a new connection belongs to, and the state that all its connections share.
#[derive(Debug)]
pub(in crate::target) struct Attached {
    pub(in crate::target) cntlid: u16,
    pub(in crate::target) association: u64,
    pub(in crate::target) last_received: Arc<AtomicU64>,
    pub(in crate::target) rights: Arc<Rights>,
    pub(in crate::target) access: Arc<ReservedAccess>,
}

/// The I/O queue that a host asks for.
#[derive(Clone, Copy, Debug)]
pub(in crate::target) struct IoQueue {
    /// The queue id.
    pub(in crate::target) qid: u16,
    /// How many entries the submission queue has.
    pub(in crate::target) entries: u16,
    /// The port through which the host has connected.
    pub(in crate::target) port: u16,
}

/// Why a queue cannot be connected.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum AttachError {
    /// The host was removed from the allowed ones meanwhile.
    #[error("the host is not on the list of allowed hosts")]
    NotAllowed,
    /// The target is being drained.
    #[error("the target is being drained: it takes no new hosts")]
    Draining,
    /// The target does not serve the port any more.
    #[error("the target does not serve this port any more")]
    PortRemoved,
    /// Too many controllers.
    #[error("too many controllers ({CONTROLLERS_MAX}): disconnect one first")]
    Full,
    /// Too many I/O queues for the memory of their in-capsule data.
    #[error(
        "no memory for what another queue of this size may bring in its capsules: ask for fewer or \
         shorter queues, or raise `memory_mib` in the target's configuration"
    )]
    Memory,
    /// No such controller.
    #[error("no controller with this id")]
    NoController,
    /// The controller belongs to another host.
    #[error("the controller belongs to another host")]
    OtherHost,
    /// The controller belongs to another port: a controller is bound to one, and a host connects all of
    /// its queues there (Base §2.2.2). Else the ANA states of two ports would hold for it.
    #[error("the admin queue was connected at port {admin}, and this queue at port {io}")]
    OtherPort {
        /// The port of the controller.
        admin: u16,
        /// The port of the connection.
        io: u16,
    },
    /// CC.EN is not set.
    #[error("the controller is not enabled")]
    NotEnabled,
    /// A discovery controller has no I/O queues.
    #[error("a discovery controller has no I/O queues")]
    Discovery,
    /// The queue id is beyond the granted number of queues.
    #[error("the queue id is 0 or beyond the number of queues granted")]
    QueueId,
    /// The queue is connected already.
    #[error("the queue is connected already")]
    Taken,
}

impl<R: Region> Shared<R> {
    /// The controllers, each with its id.
    pub fn controllers(&self) -> impl Iterator<Item = (u16, &Controller)> {
        self.controllers.iter().map(|(id, controller)| (*id, controller))
    }

    /// The controller with this id.
    #[must_use]
    pub fn controller(&self, cntlid: u16) -> Option<&Controller> {
        self.controllers.get(&cntlid)
    }

    pub(in crate::target) fn controller_mut(&mut self, cntlid: u16) -> Option<&mut Controller> {
        self.controllers.get_mut(&cntlid)
    }

    /// Chooses the id of a new controller.
    pub(in crate::target) fn choose_cntlid(&mut self) -> u16 {
        // Ids are used again as late as possible. So the late Connect of an I/O queue of an old
        // association does not find the controller of a new association.
        while self.controllers.contains_key(&self.next_cntlid) {
            self.next_cntlid = next_cntlid_after(self.next_cntlid);
        }
        let cntlid = self.next_cntlid;
        self.next_cntlid = next_cntlid_after(cntlid);
        cntlid
    }

    /// Makes a new controller with `conn` as its admin queue. Its id has come from
    /// [`choose_cntlid`](Self::choose_cntlid). The host has connected through `port`. `now` is in ns.
    ///
    /// # Errors
    /// [`AttachError::Full`], [`AttachError::NotAllowed`], [`AttachError::Draining`],
    /// [`AttachError::PortRemoved`].
    pub(in crate::target) fn attach_admin(
        &mut self,
        conn: ConnId,
        cntlid: u16,
        host: (&str, [u8; 16]),
        (port, discovery): (u16, bool),
        now: u64,
    ) -> Result<Attached, AttachError> {
        // A change of the ports ends the controllers that it finds.
        if self.removed_ports.contains(&port) {
            return Err(AttachError::PortRemoved);
        }
        // A change of the allowed hosts ends the controllers that it finds.
        if !discovery && !self.allows(host.0) {
            return Err(AttachError::NotAllowed);
        }
        if !discovery && !self.takes_host(host.0, now) {
            return Err(AttachError::Draining);
        }
        // The id may have been used meanwhile only if all others have been used since.
        if self.controllers.len() >= CONTROLLERS_MAX || self.controllers.contains_key(&cntlid) {
            return Err(AttachError::Full);
        }
        let (hostnqn, hostid) = host;
        let association = self.next_association;
        self.next_association += 1;
        let last_received = Arc::new(AtomicU64::new(now));
        let rights = Arc::<Rights>::default();
        let access = Arc::new(self.initial_access(hostid));
        self.apply_ana(port, &access);
        self.controllers.insert(
            cntlid,
            Controller {
                association,
                hostnqn: hostnqn.into(),
                hostid,
                discovery,
                enabled: false,
                dying: false,
                port,
                admin: conn,
                last_received: Arc::clone(&last_received),
                rights: Arc::clone(&rights),
                access: Arc::clone(&access),
                events: Events::default(),
                errors: ErrorLog::default(),
                queues: BTreeMap::new(),
            },
        );
        self.conns
            .insert(conn, ConnEntry { cntlid, qid: 0, capsule_bytes: 0, notices: Vec::new() });
        Ok(Attached { cntlid, association, last_received, rights, access })
    }

    /// Adds an I/O queue with the id `qid` and `entries` entries to a controller.
    ///
    /// # Errors
    /// Why the queue can't be connected.
    pub(in crate::target) fn attach_io(
        &mut self,
        conn: ConnId,
        cntlid: u16,
        IoQueue { qid, entries, port }: IoQueue,
        hostnqn: &str,
        hostid: [u8; 16],
    ) -> Result<Attached, AttachError> {
        let io_queues = self.identity.io_queues;
        let controller = self
            .controllers
            .get_mut(&cntlid)
            .filter(|controller| !controller.dying)
            .ok_or(AttachError::NoController)?;
        if controller.hostnqn != hostnqn || controller.hostid != hostid {
            return Err(AttachError::OtherHost);
        }
        if controller.port != port {
            return Err(AttachError::OtherPort { admin: controller.port, io: port });
        }
        if controller.discovery {
            return Err(AttachError::Discovery);
        }
        if !controller.enabled {
            return Err(AttachError::NotEnabled);
        }
        if qid == 0 || qid > io_queues {
            return Err(AttachError::QueueId);
        }
        if let Some(&old) = controller.queues.get(&qid) {
            // A host connects a queue again only if it has given up the old connection. So the old
            // connection is closed. The queue id is free when the operations of the old connection
            // have come back (trap T8, promise P7).
            self.leave_notice(old, Notice::Close("its host has connected the queue anew"));
            return Err(AttachError::Taken);
        }
        let capsule_bytes = usize::from(entries) * IN_CAPSULE_BYTES as usize;
        let max_bytes = self.budget.max_bytes().saturating_mul(CAPSULES_TO_MEMORY);
        if self.capsule_bytes.saturating_add(capsule_bytes) > max_bytes {
            return Err(AttachError::Memory);
        }
        self.capsule_bytes += capsule_bytes;
        controller.queues.insert(qid, conn);
        let attached = Attached {
            cntlid,
            association: controller.association,
            last_received: Arc::clone(&controller.last_received),
            rights: Arc::clone(&controller.rights),
            access: Arc::clone(&controller.access),
        };
        self.conns.insert(conn, ConnEntry { cntlid, qid, capsule_bytes, notices: Vec::new() });
        Ok(attached)
    }

    /// Notes that a connection has ended and begins no operation any more. If it was an admin
    /// queue, its association ends, and the leases of the association's volumes begin to run.
    pub(in crate::target) fn begin_detach(&mut self, conn: ConnId, now: u64) {
        let Some(entry) = self.conns.get(&conn) else {
            return;
        };
        if entry.qid != 0 {
            return;
        }
        let cntlid = entry.cntlid;
        self.end_queues(cntlid);
        if let Some(controller) = self.controllers.get(&cntlid) {
            let association = controller.association;
            self.volumes.on_association_lost(association, &self.namespaces, now);
        }
    }

    /// Closes the I/O queues of a controller, and allows no new queues.
    pub(super) fn end_queues(&mut self, cntlid: u16) {
        let Some(controller) = self.controllers.get_mut(&cntlid) else { return };
        controller.dying = true;
        // A queue may read its notice late. A claim does not wait for a queue that has not written
        // yet. So the rights of the queue end now: the queue can't begin to write as a plain host,
        // not even after the volume is released (trap T8).
        controller.rights.end();
        let queues: Vec<ConnId> = controller.queues.values().copied().collect();
        for queue in queues {
            self.leave_notice(queue, Notice::Close("its association has ended"));
        }
    }

    /// Removes a connection that is drained: all of its device operations have come back. Removes
    /// the controller, too, if its association has ended and this was its last connection.
    pub(in crate::target) fn detach(&mut self, conn: ConnId) {
        let Some(entry) = self.conns.remove(&conn) else {
            return;
        };
        for id in self.fences_of(conn) {
            self.acknowledge(id, conn);
        }
        // An Abort that the connection has not read ends, too (promise P8).
        for notice in entry.notices {
            if let Notice::Abort { id, admin, .. } = notice {
                self.end_abort(admin, id, false);
            }
        }
        self.writers.remove(conn);
        self.retirements.forget(conn);
        self.unlock_all_of(conn);
        self.forget_waiting_commands(conn);
        self.capsule_bytes -= entry.capsule_bytes;
        for conns in self.conns_awaiting_change.values_mut() {
            conns.retain(|other| *other != conn);
        }
        let cntlid = entry.cntlid;
        let Some(controller) = self.controllers.get_mut(&cntlid) else {
            return;
        };
        if entry.qid != 0 {
            controller.queues.remove(&entry.qid);
        }
        let is_admin_gone = controller.dying && !self.conns.contains_key(&controller.admin);
        if is_admin_gone && controller.queues.is_empty() {
            let association = controller.association;
            self.controllers.remove(&cntlid);
            self.volumes.on_association_drained(association, &self.namespaces);
        }
    }
}

/// The highest controller id: NVMe reserves FFF0h and all above.
const CNTLID_MAX: u16 = 0xffef;

/// The controller id that follows this one. After the highest id, the ids begin at 1 again.
const fn next_cntlid_after(cntlid: u16) -> u16 {
    if cntlid >= CNTLID_MAX { 1 } else { cntlid + 1 }
}

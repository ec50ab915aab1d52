//! Controllers and their queues: associations begin, get queues, and end.

use alloc::collections::BTreeMap;
use alloc::string::String;
use alloc::sync::Arc;
use alloc::vec::Vec;
use core::sync::atomic::AtomicU64;

use riopipe_order::region::Region;

use super::notices::Notice;
use super::{ConnEntry, Shared};
use crate::target::ids::ConnId;
use crate::target::limits::{CAPSULES_TO_MEMORY, CONTROLLERS_MAX, IN_CAPSULE_BYTES};
use crate::target::rights::Rights;

/// One controller: an association of a host with the subsystem.
#[derive(Debug)]
pub struct Controller {
    /// Unique in an incarnation of the target. Controller ids are used again.
    pub association: u64,
    /// The host's name.
    pub hostnqn: String,
    /// The host's id.
    pub hostid: [u8; 16],
    /// A discovery controller has no I/O queues.
    pub discovery: bool,
    /// Enabled by CC.EN.
    pub enabled: bool,
    /// The admin queue's connection is gone: the association ends once all queues are drained.
    pub dying: bool,
    /// The admin queue's connection.
    pub admin: ConnId,
    /// The time at which any of its queues last received from the host, nanoseconds.
    pub last_received: Arc<AtomicU64>,
    /// Whether its queues may write as those of any plain host.
    pub rights: Arc<Rights>,
    /// Connected I/O queues.
    pub queues: BTreeMap<u16, ConnId>,
}

/// The association that a new connection belongs to, and the state that all its connections share.
#[derive(Debug)]
pub(in crate::target) struct Attached {
    pub(in crate::target) cntlid: u16,
    pub(in crate::target) association: u64,
    pub(in crate::target) last_received: Arc<AtomicU64>,
    pub(in crate::target) rights: Arc<Rights>,
}

/// Why a queue cannot be connected.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum AttachError {
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
    /// The live controllers, by id.
    pub fn controllers(&self) -> impl Iterator<Item = (u16, &Controller)> {
        self.controllers.iter().map(|(id, c)| (*id, c))
    }

    /// The controller with this id.
    #[must_use]
    pub fn controller(&self, cntlid: u16) -> Option<&Controller> {
        self.controllers.get(&cntlid)
    }

    pub(in crate::target) fn controller_mut(&mut self, cntlid: u16) -> Option<&mut Controller> {
        self.controllers.get_mut(&cntlid)
    }

    /// A new controller with `conn` as its admin queue; returns its id and association.
    ///
    /// # Errors
    /// [`AttachError::Full`].
    pub(in crate::target) fn attach_admin(
        &mut self,
        conn: ConnId,
        hostnqn: &str,
        hostid: [u8; 16],
        discovery: bool,
        now: u64,
    ) -> Result<Attached, AttachError> {
        if self.controllers.len() >= CONTROLLERS_MAX {
            return Err(AttachError::Full);
        }
        // Ids FFF0h and up are reserved. A new id each time distinguishes a late I/O connect of a
        // dead association from one of its successor.
        while self.controllers.contains_key(&self.next_cntlid) {
            self.next_cntlid = next_id(self.next_cntlid);
        }
        let cntlid = self.next_cntlid;
        self.next_cntlid = next_id(cntlid);
        let association = self.next_assoc;
        self.next_assoc += 1;
        let last_received = Arc::new(AtomicU64::new(now));
        let rights = Arc::<Rights>::default();
        self.controllers.insert(
            cntlid,
            Controller {
                association,
                hostnqn: hostnqn.into(),
                hostid,
                discovery,
                enabled: false,
                dying: false,
                admin: conn,
                last_received: Arc::clone(&last_received),
                rights: Arc::clone(&rights),
                queues: BTreeMap::new(),
            },
        );
        self.conns.insert(conn, ConnEntry { cntlid, qid: 0, capsules: 0, notices: Vec::new() });
        Ok(Attached { cntlid, association, last_received, rights })
    }

    /// Adds an I/O queue to a controller; returns the association.
    ///
    /// # Errors
    /// [`AttachError`].
    pub(in crate::target) fn attach_io(
        &mut self,
        conn: ConnId,
        cntlid: u16,
        (qid, entries): (u16, u16),
        hostnqn: &str,
        hostid: [u8; 16],
    ) -> Result<Attached, AttachError> {
        let io_queues = self.identity.io_queues;
        let controller = self
            .controllers
            .get_mut(&cntlid)
            .filter(|c| !c.dying)
            .ok_or(AttachError::NoController)?;
        if controller.hostnqn != hostnqn || controller.hostid != hostid {
            return Err(AttachError::OtherHost);
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
            // The host has given up that connection, or it would not connect again. Once its
            // operations have come back, the place is free (P7, T8).
            self.leave_notice(old, Notice::Close("its host has connected the queue anew"));
            return Err(AttachError::Taken);
        }
        let capsules = usize::from(entries) * IN_CAPSULE_BYTES as usize;
        let max = self.budget.max().saturating_mul(CAPSULES_TO_MEMORY);
        if self.capsules.saturating_add(capsules) > max {
            return Err(AttachError::Memory);
        }
        self.capsules += capsules;
        controller.queues.insert(qid, conn);
        let result = Attached {
            cntlid,
            association: controller.association,
            last_received: Arc::clone(&controller.last_received),
            rights: Arc::clone(&controller.rights),
        };
        self.conns.insert(conn, ConnEntry { cntlid, qid, capsules, notices: Vec::new() });
        Ok(result)
    }

    /// Notes that a connection does nothing more. If it was an admin queue, its association ends
    /// with it, and the leases of its volumes begin to run.
    pub(in crate::target) fn begin_detach(&mut self, conn: ConnId, now: u64) {
        let Some(entry) = self.conns.get(&conn) else {
            return;
        };
        if entry.qid != 0 {
            return;
        }
        let cntlid = entry.cntlid;
        self.end_queues(cntlid);
        if let Some(association) = self.controllers.get(&cntlid).map(|c| c.association) {
            self.volumes.on_association_lost(association, &self.namespaces, now);
        }
    }

    /// Ends an association's I/O queues, and lets it connect no more.
    pub(super) fn end_queues(&mut self, cntlid: u16) {
        if let Some(controller) = self.controllers.get_mut(&cntlid) {
            controller.dying = true;
            // A claim asks only queues that may have written, and a queue may read its notice late.
            // Until then this keeps the queue from writing as a plain host, also once the volume is
            // released (T8).
            controller.rights.end();
            let queues: Vec<ConnId> = controller.queues.values().copied().collect();
            for queue in queues {
                self.leave_notice(queue, Notice::Close("its association has ended"));
            }
        }
    }

    /// Notes that a connection has been drained: none of its device operations is left.
    pub(in crate::target) fn detach(&mut self, conn: ConnId) {
        let Some(entry) = self.conns.remove(&conn) else {
            return;
        };
        for id in self.fences_of(conn) {
            self.acknowledge(id, conn);
        }
        self.writers.remove(conn);
        self.capsules -= entry.capsules;
        self.in_doubt.values_mut().for_each(|conns| conns.retain(|other| *other != conn));
        let cntlid = entry.cntlid;
        let Some(controller) = self.controllers.get_mut(&cntlid) else {
            return;
        };
        if entry.qid != 0 {
            controller.queues.remove(&entry.qid);
        }
        let admin_gone = controller.dying && !self.conns.contains_key(&controller.admin);
        if admin_gone && controller.queues.is_empty() {
            let association = controller.association;
            self.controllers.remove(&cntlid);
            self.volumes.on_association_drained(association, &self.namespaces);
        }
    }
}

const fn next_id(cntlid: u16) -> u16 {
    if cntlid >= 0xffef { 1 } else { cntlid + 1 }
}

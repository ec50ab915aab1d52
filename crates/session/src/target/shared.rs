//! What all connections of a target share: the subsystem, its controllers, who is connected, and
//! the notices that cross from one connection to another.
//!
//! It is touched when queues come and go and by admin commands, never on the hot path. The host
//! keeps it behind a lock; whatever another connection must do about a change is left here as a
//! [`Notice`], and the connection is woken ([`TargetEnv::notify`](super::TargetEnv::notify)), on whichever
//! core it lives.

use alloc::collections::{BTreeMap, BTreeSet};
use alloc::string::String;
use alloc::sync::Arc;
use alloc::vec::Vec;
use core::sync::atomic::{AtomicBool, AtomicU64, Ordering};

use riopipe_order::attribute::VolumeId;
use riopipe_order::entry::{PartitionId, Position};
use riopipe_order::probe::{self, Plant};
use riopipe_order::region::{Region, RegionError};

use super::binding::{Binding, Bound};
use super::budget::{Budget, Loan};
use super::claims::{Owner, Refusal, Volumes};
use super::limits::{CAPSULES_TO_MEMORY, CONTROLLERS_MAX, IN_CAPSULE_BYTES, MEMORY_BYTES};
use super::namespace::Namespaces;
use super::writers::Writers;
use crate::wire::list::{Page, Settle};
use crate::wire::{self, Claim};

/// One connection, unique for the life of the target.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct ConnId(pub u64);

/// What the subsystem says of itself.
#[derive(Clone, Debug)]
pub struct Identity {
    /// The subsystem's NQN.
    pub subnqn: String,
    /// Serial number, at most 20 ASCII characters.
    pub serial: String,
    /// Model, at most 40 ASCII characters.
    pub model: String,
    /// Firmware revision, at most 8 ASCII characters.
    pub firmware: String,
    /// Which hosts may connect; `None` for any.
    pub allowed_hosts: Option<Vec<String>>,
    /// Refuse connections without header digests.
    pub require_header_digest: bool,
    /// Refuse connections without data digests.
    pub require_data_digest: bool,
    /// Where the subsystem can be found: the records of the discovery log.
    pub ports: Vec<DiscoveryPort>,
    /// I/O queues per controller at most.
    pub io_queues: u16,
}

/// An address of the subsystem, as discovery tells it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct DiscoveryPort {
    /// Port id.
    pub portid: u16,
    /// The address, as text.
    pub traddr: String,
    /// The TCP port, as text.
    pub trsvcid: String,
    /// Whether the address is IPv6.
    pub ipv6: bool,
    /// Only the discovery service answers there.
    pub discovery_only: bool,
}

/// Something that a connection must do, because of what happened on another.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Notice {
    /// The association ends.
    Close(&'static str),
    /// Give up the stream of this volume if bound to one, and say so once every device operation
    /// that is under way now has come back (T8).
    Fence {
        /// The fence to acknowledge.
        id: u64,
        /// The volume that changes hands, or is given back.
        volume: VolumeId,
        /// It changes hands.
        claimed: bool,
    },
    /// Everything that a fence of this connection waited for has come back.
    Fenced {
        /// The fence.
        id: u64,
    },
    /// FLUSHes of a drive have been accounted for: one of this connection's may be believed (T29).
    Flushes,
}

/// One controller: an association of a host with the subsystem.
#[derive(Debug)]
pub struct Controller {
    /// Unique for the life of the target, where controller ids are used again.
    pub assoc: u64,
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
    /// When any of its queues last heard from the host, nanoseconds.
    pub heard: Arc<AtomicU64>,
    /// Another owner has taken over a volume that it had: it is no plain host as any other, but one
    /// that may not know (T8). Until it claims a volume itself.
    pub overtaken: Arc<AtomicBool>,
    /// Connected I/O queues.
    pub queues: BTreeMap<u16, ConnId>,
}

/// The association that a new connection belongs to, and what all of its connections share.
#[derive(Debug)]
pub(super) struct Attached {
    pub(super) cntlid: u16,
    pub(super) assoc: u64,
    pub(super) heard: Arc<AtomicU64>,
    pub(super) overtaken: Arc<AtomicBool>,
}

#[derive(Debug)]
struct ConnEntry {
    cntlid: u16,
    qid: u16,
    /// Bytes set aside for what it brings in capsules (T28).
    capsules: usize,
    notices: Vec<Notice>,
}

#[derive(Debug)]
struct Fence {
    waiting: BTreeSet<ConnId>,
    claimant: ConnId,
}

/// The state that connections share.
pub struct Shared<R: Region> {
    identity: Arc<Identity>,
    namespaces: Arc<Namespaces>,
    controllers: BTreeMap<u16, Controller>,
    conns: BTreeMap<ConnId, ConnEntry>,
    fences: BTreeMap<u64, Fence>,
    writers: Writers,
    budget: Arc<Budget>,
    /// Bytes set aside for what I/O queues bring in capsules.
    capsules: usize,
    next_cntlid: u16,
    next_assoc: u64,
    next_fence: u64,
    /// By namespace: connections with a FLUSH whose success is in doubt (T29).
    doubting: BTreeMap<usize, Vec<ConnId>>,
    /// Connections to wake once the lock is released.
    wake: Vec<ConnId>,
    /// Volumes, their owners and logs.
    pub(super) volumes: Volumes<R>,
    discovery_generation: u64,
}

/// Why a queue cannot be connected.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum AttachError {
    /// Too many controllers.
    #[error("too many controllers ({CONTROLLERS_MAX}): disconnect one first")]
    Full,
    /// Too many I/O queues, for what their commands may bring in capsules.
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
    /// The queue id is beyond what was granted.
    #[error("the queue id is 0 or beyond the number of queues granted")]
    QueueId,
    /// The queue is connected already.
    #[error("the queue is connected already")]
    Taken,
}

impl<R: Region> Shared<R> {
    /// A target without connections, that begins to serve `now` (ns of the clock of its
    /// [`TargetEnv`](super::TargetEnv)s): the leases of volumes that were owned when it last stopped begin
    /// (T25).
    #[must_use]
    pub fn new(
        identity: Identity,
        namespaces: Namespaces,
        mut volumes: Volumes<R>,
        now: u64,
    ) -> Self {
        let namespaces = Arc::new(namespaces);
        volumes.begin(&namespaces, now);
        Self {
            identity: Arc::new(identity),
            namespaces,
            controllers: BTreeMap::new(),
            conns: BTreeMap::new(),
            fences: BTreeMap::new(),
            writers: Writers::default(),
            budget: Budget::new(MEMORY_BYTES),
            capsules: 0,
            next_cntlid: 1,
            next_assoc: 1,
            next_fence: 1,
            doubting: BTreeMap::new(),
            wake: Vec::new(),
            volumes,
            discovery_generation: 1,
        }
    }

    /// What the subsystem says of itself.
    #[must_use]
    pub fn identity(&self) -> &Arc<Identity> {
        &self.identity
    }

    /// Where the subsystem can be found, once the listeners know their ports.
    pub fn set_ports(&mut self, ports: Vec<DiscoveryPort>) {
        let mut identity = Identity::clone(&self.identity);
        identity.ports = ports;
        self.identity = Arc::new(identity);
        self.discovery_generation += 1;
    }

    /// How many bytes of data connections may hold together, beyond a share that each has
    /// ([`CONNECTION_BYTES`](super::limits::CONNECTION_BYTES)). For connections from now on.
    pub fn set_memory(&mut self, bytes: usize) {
        self.budget = Budget::new(bytes);
    }

    pub(super) fn loan(&self) -> Loan {
        Loan::of(Arc::clone(&self.budget))
    }

    /// Changes whenever the discovery log does.
    #[must_use]
    pub const fn discovery_generation(&self) -> u64 {
        self.discovery_generation
    }

    /// The namespaces.
    #[must_use]
    pub fn namespaces(&self) -> &Arc<Namespaces> {
        &self.namespaces
    }

    /// The volumes and their logs.
    #[must_use]
    pub fn volumes(&self) -> &Volumes<R> {
        &self.volumes
    }

    /// Ends service in good order: volumes whose owners' leases have run out are noted as closed,
    /// as far as they need no recovery (T25); then [`Volumes::end_service`]. Everything has come
    /// back.
    ///
    /// # Errors
    /// The log could not be written back: it is good for this boot only.
    pub fn end_service(
        &mut self,
        now: u64,
        write_back: impl FnOnce() -> Result<(), RegionError>,
    ) -> Result<(), RegionError> {
        self.volumes.free_all(&self.namespaces, now);
        self.volumes.end_service(write_back)
    }

    /// Somebody wants to write to a namespace that is guarded for a lease (T25).
    pub(super) fn free_namespace(&mut self, nsid: u32, now: u64) {
        self.volumes.free_namespace(nsid, &self.namespaces, now);
    }

    /// Live controllers by id.
    pub fn controllers(&self) -> impl Iterator<Item = (u16, &Controller)> {
        self.controllers.iter().map(|(id, c)| (*id, c))
    }

    /// The controller with this id.
    #[must_use]
    pub fn controller(&self, cntlid: u16) -> Option<&Controller> {
        self.controllers.get(&cntlid)
    }

    pub(super) fn controller_mut(&mut self, cntlid: u16) -> Option<&mut Controller> {
        self.controllers.get_mut(&cntlid)
    }

    /// Whether the host may connect.
    #[must_use]
    pub fn allows(&self, hostnqn: &str) -> bool {
        match &self.identity.allowed_hosts {
            None => true,
            Some(hosts) => hosts.iter().any(|h| h == hostnqn),
        }
    }

    /// A new controller with `conn` as its admin queue; returns its id and association.
    ///
    /// # Errors
    /// [`AttachError::Full`].
    pub(super) fn attach_admin(
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
        // Ids FFF0h and up are reserved; a fresh id each time tells a late I/O connect of a dead
        // association from one of its successor.
        while self.controllers.contains_key(&self.next_cntlid) {
            self.next_cntlid = next_id(self.next_cntlid);
        }
        let cntlid = self.next_cntlid;
        self.next_cntlid = next_id(cntlid);
        let assoc = self.next_assoc;
        self.next_assoc += 1;
        let heard = Arc::new(AtomicU64::new(now));
        let overtaken = Arc::<AtomicBool>::default();
        self.controllers.insert(
            cntlid,
            Controller {
                assoc,
                hostnqn: hostnqn.into(),
                hostid,
                discovery,
                enabled: false,
                dying: false,
                admin: conn,
                heard: Arc::clone(&heard),
                overtaken: Arc::clone(&overtaken),
                queues: BTreeMap::new(),
            },
        );
        self.conns.insert(conn, ConnEntry { cntlid, qid: 0, capsules: 0, notices: Vec::new() });
        Ok(Attached { cntlid, assoc, heard, overtaken })
    }

    /// Adds an I/O queue to a controller; returns the association.
    ///
    /// # Errors
    /// [`AttachError`].
    pub(super) fn attach_io(
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
            // The host has given that connection up, or it would not ask: once its operations
            // have come back, the place is free (P7, T8).
            self.leave(old, Notice::Close("its host has connected the queue anew"));
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
            assoc: controller.assoc,
            heard: Arc::clone(&controller.heard),
            overtaken: Arc::clone(&controller.overtaken),
        };
        self.conns.insert(conn, ConnEntry { cntlid, qid, capsules, notices: Vec::new() });
        Ok(result)
    }

    /// A connection will do nothing more. If it was an admin queue, its association ends with it,
    /// and the lease of what it owns begins to run.
    pub(super) fn detach_begin(&mut self, conn: ConnId, now: u64) {
        let Some(entry) = self.conns.get(&conn) else {
            return;
        };
        if entry.qid != 0 {
            return;
        }
        let cntlid = entry.cntlid;
        self.end_queues(cntlid);
        if let Some(assoc) = self.controllers.get(&cntlid).map(|c| c.assoc) {
            self.volumes.lose(assoc, &self.namespaces, now);
        }
    }

    /// Ends an association's I/O queues, and lets it have no more.
    fn end_queues(&mut self, cntlid: u16) {
        if let Some(controller) = self.controllers.get_mut(&cntlid) {
            controller.dying = true;
            // A queue that has not written yet is asked by no claim. Should it be late with its
            // notice, it is no plain host either when the volume is given back (T8).
            controller.overtaken.store(true, Ordering::SeqCst);
            let queues: Vec<ConnId> = controller.queues.values().copied().collect();
            for queue in queues {
                self.leave(queue, Notice::Close("its association has ended"));
            }
        }
    }

    /// A connection has been drained: none of its device operations is left.
    pub(super) fn detach(&mut self, conn: ConnId) {
        let Some(entry) = self.conns.remove(&conn) else {
            return;
        };
        for id in self.fences_of(conn) {
            self.acknowledge(id, conn);
        }
        self.fences.retain(|_, fence| fence.claimant != conn);
        self.writers.gone(conn);
        self.capsules -= entry.capsules;
        self.doubting.values_mut().for_each(|conns| conns.retain(|other| *other != conn));
        let cntlid = entry.cntlid;
        let Some(controller) = self.controllers.get_mut(&cntlid) else {
            return;
        };
        if entry.qid != 0 {
            controller.queues.remove(&entry.qid);
        }
        let admin_gone = controller.dying && !self.conns.contains_key(&controller.admin);
        if admin_gone && controller.queues.is_empty() {
            let assoc = controller.assoc;
            self.controllers.remove(&cntlid);
            self.volumes.drained(assoc, &self.namespaces);
        }
    }

    /// Gives a volume to `who`; see [`Volumes`]. Returns which claim of the volume it was.
    pub(super) fn claim(&mut self, claim: &Claim, who: Owner, now: u64) -> Result<u64, Refusal> {
        let claimant = who.assoc;
        let claimed = self.volumes.claim(claim, who, &self.namespaces, now)?;
        for controller in self.controllers.values() {
            if claimed.overtaken == Some(controller.assoc) {
                controller.overtaken.store(true, Ordering::SeqCst);
            } else if claimant == controller.assoc {
                controller.overtaken.store(false, Ordering::SeqCst);
            }
        }
        if let Some(assoc) = claimed.replaced {
            let old = self.controllers.iter().find(|(_, c)| c.assoc == assoc);
            if let Some((cntlid, admin)) = old.map(|(cntlid, c)| (*cntlid, c.admin)) {
                self.end_queues(cntlid);
                let why = match claim.resume {
                    true => "its host has come back with another association",
                    false => "another owner has taken its volume over",
                };
                self.leave(admin, Notice::Close(why));
            }
        }
        Ok(claimed.claim)
    }

    /// `conn` is about to look at the guard of namespace `ns` for the first time (T8).
    pub(super) fn note_writer(&mut self, ns: usize, conn: ConnId) {
        if self.conns.contains_key(&conn) {
            self.writers.note(ns, conn);
        }
    }

    /// Hands the log of a stream to a connection, which writes to its namespaces from now on.
    pub(super) fn bind(
        &mut self,
        conn: ConnId,
        assoc: u64,
        id: PartitionId,
        binding: Binding,
    ) -> Result<Bound<R>, Refusal> {
        let bound = self.volumes.bind(conn, assoc, id, binding);
        if let Ok(bound) = &bound {
            for member in &bound.members {
                if let Some((ns, _)) = self.namespaces.find(member.nsid) {
                    self.writers.note(ns, conn);
                }
            }
        }
        self.ask_back(bound, [id])
    }

    /// A page of a partition; see [`Volumes::list`].
    pub(super) fn list(
        &mut self,
        id: PartitionId,
        assoc: u64,
        from: Position,
        len: usize,
    ) -> Result<Page, Refusal> {
        let page = self.volumes.list(id, assoc, from, len);
        self.ask_back(page, [id])
    }

    /// Settles streams of a volume; see [`Volumes::settle`].
    pub(super) fn settle(&mut self, settle: &Settle, assoc: u64) -> Result<(), Refusal> {
        let settled = self.volumes.settle(settle, assoc);
        self.ask_back(settled, settle.partitions())
    }

    /// The owner (nobody else gets as far as *busy*) needs streams that are still carried by a
    /// connection: it has given that one up, whether or not the connection knows. It ends, and the
    /// owner asks again (P7, P8).
    fn ask_back<T>(
        &mut self,
        result: Result<T, Refusal>,
        streams: impl IntoIterator<Item = PartitionId>,
    ) -> Result<T, Refusal> {
        if matches!(result, Err((wire::status::STREAM_BUSY, _))) {
            for id in streams {
                if let Some(conn) = self.volumes.carrier(id) {
                    self.leave(conn, Notice::Close("its owner needs the stream elsewhere"));
                }
            }
        }
        result
    }

    /// Gives a volume back, if `assoc` may still do that.
    pub(super) fn release(
        &mut self,
        volume: VolumeId,
        assoc: u64,
        forget: bool,
    ) -> Result<(), Refusal> {
        self.volumes.may_release(volume, assoc, forget)?;
        self.volumes.release(volume, forget, &self.namespaces)
    }

    /// Leaves a notice for a connection.
    pub(super) fn leave(&mut self, conn: ConnId, notice: Notice) {
        if let Some(entry) = self.conns.get_mut(&conn) {
            entry.notices.push(notice);
            self.wake.push(conn);
        }
    }

    /// The notices left for a connection.
    pub(super) fn take_notices(&mut self, conn: ConnId) -> Vec<Notice> {
        self.conns.get_mut(&conn).map(|e| core::mem::take(&mut e.notices)).unwrap_or_default()
    }

    /// Has every connection of association `of` drained that may have writes under way to the
    /// volume's namespaces, for `claimant`; of all associations if `None`, the claimant's own queues
    /// among them: what an earlier attempt of its own to recover has begun is a ghost, too (T8).
    /// Returns the fence, or `None` if there is nothing to wait for.
    pub(super) fn raise_fence(
        &mut self,
        claimant: ConnId,
        volume: VolumeId,
        of: Option<u64>,
    ) -> Option<u64> {
        let Self { conns, controllers, namespaces, volumes, writers, .. } = self;
        let members = volumes.find(volume).into_iter().flat_map(|v| &v.members);
        let members = members.filter_map(|m| namespaces.find(m.nsid)).map(|(ns, _)| ns);
        let mut waiting = writers.of(members);
        waiting.retain(|conn| {
            *conn != claimant
                && conns.get(conn).is_some_and(|entry| match of {
                    None => true,
                    Some(assoc) => controllers.get(&entry.cntlid).is_some_and(|c| c.assoc == assoc),
                })
        });
        if waiting.is_empty() {
            return None;
        }
        let id = self.next_fence;
        self.next_fence += 1;
        for conn in &waiting {
            self.leave(*conn, Notice::Fence { id, volume, claimed: of.is_none() });
        }
        if of.is_none() && probe::planted(Plant::T8ClaimNoWait) {
            return None;
        }
        self.fences.insert(id, Fence { waiting, claimant });
        Some(id)
    }

    /// `conn` has nothing left that fence `id` waits for.
    pub(super) fn acknowledge(&mut self, id: u64, conn: ConnId) {
        let Some(fence) = self.fences.get_mut(&id) else {
            return;
        };
        fence.waiting.remove(&conn);
        if fence.waiting.is_empty() {
            let claimant = fence.claimant;
            self.fences.remove(&id);
            self.leave(claimant, Notice::Fenced { id });
        }
    }

    fn fences_of(&self, conn: ConnId) -> Vec<u64> {
        self.fences.iter().filter(|(_, f)| f.waiting.contains(&conn)).map(|(id, _)| *id).collect()
    }

    /// `conn` is to look again at the next end of a round of FLUSHes of a drive (T29).
    pub(super) fn await_flushes(&mut self, ns: usize, conn: ConnId) {
        let conns = self.doubting.entry(ns).or_default();
        if !conns.contains(&conn) {
            conns.push(conn);
        }
    }

    /// A round of FLUSHes of a drive has ended.
    pub(super) fn flushes_accounted(&mut self, ns: usize) {
        for conn in self.doubting.remove(&ns).unwrap_or_default() {
            self.leave(conn, Notice::Flushes);
        }
    }

    /// The connections to wake because of what was just done.
    pub(super) fn take_wake(&mut self) -> Vec<ConnId> {
        core::mem::take(&mut self.wake)
    }

    /// Every connection of every association, to end them all.
    pub fn close_all(&mut self, why: &'static str) -> Vec<ConnId> {
        let all: Vec<ConnId> = self.conns.keys().copied().collect();
        for conn in all {
            self.leave(conn, Notice::Close(why));
        }
        self.take_wake()
    }

    /// Connections that have not been drained.
    #[must_use]
    pub fn connections(&self) -> usize {
        self.conns.len()
    }
}

/// Notes that a host has been heard from.
pub(super) fn heard(at: &AtomicU64, now: u64) {
    at.store(now, Ordering::Relaxed);
}

const fn next_id(cntlid: u16) -> u16 {
    if cntlid >= 0xffef { 1 } else { cntlid + 1 }
}

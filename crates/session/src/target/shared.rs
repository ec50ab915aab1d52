//! The state that all connections of a target share: the subsystem, its volumes, its controllers
//! (`controllers.rs`), and the notices from one connection to another (`notices.rs`).
//!
//! Connections use it when queues begin and end, and for admin commands, but never on the hot path.
//! The environment keeps it behind a lock. If another connection must react to a change, a
//! [`Notice`] is left here, and the environment wakes that connection on its core
//! ([`TargetEnv::notify`](super::TargetEnv::notify)).

mod ana;
mod change;
mod controllers;
mod draining;
mod eventful;
mod locking;
mod notices;
mod reserving;

use alloc::collections::{BTreeMap, BTreeSet};
use alloc::sync::Arc;
use alloc::vec::Vec;
use core::sync::atomic::{AtomicU64, Ordering};

use riopipe_order::attribute::VolumeId;
use riopipe_order::entry::{PartitionId, Position};
use riopipe_order::region::{Region, RegionError};

use self::change::Retirements;
pub use self::change::{Change, ChangeError, PortChange, PortInUse};
pub use self::controllers::{AttachError, Controller};
pub(super) use self::controllers::{Attached, IoQueue};
pub use self::draining::OpenVolume;
pub(super) use self::notices::DriveChange;
use self::notices::Fence;
pub use self::notices::{FenceScope, Notice};
use super::access::{Access, Admission};
use super::ana::AnaStates;
use super::block_locks::BlockLocks;
use super::budget::{Budget, Reservation};
use super::epoch_streams::EpochStreams;
use super::identity::{DiscoveryPort, Identity};
use super::ids::ConnId;
use super::limits::MEMORY_BYTES;
use super::namespace::Namespaces;
use super::reservations::Reservations;
use super::volumes::{Binding, Bound, Owner, Refusal, Volume, Volumes};
use super::writers::Writers;
use crate::auth::dh::DhDone;
use crate::wire::list::{Page, Settle};
use crate::wire::{self, Claim, ReleaseRequest};

/// A connection that Connect has made a queue.
#[derive(Debug)]
struct ConnEntry {
    /// The controller of the queue.
    cntlid: u16,
    /// The id of the queue; 0 for an admin queue.
    qid: u16,
    /// Bytes of memory reserved for the in-capsule data of the queue's commands (trap T28).
    capsule_bytes: usize,
    /// The notices that the connection has not read yet.
    notices: Vec<Notice>,
}

/// The state that connections share.
pub struct Shared<R: Region> {
    identity: Arc<Identity>,
    /// The hosts that may connect, and their secrets.
    access: Arc<Access>,
    /// The ANA states of the ports.
    ana: AnaStates,
    /// The exponentiations that connections wait for. Each has its result once it has ended.
    exponentiations: BTreeMap<ConnId, Option<DhDone>>,
    pub(super) namespaces: Arc<Namespaces>,
    /// The controllers, by controller id. There is one for each association.
    controllers: BTreeMap<u16, Controller>,
    /// The connections that are queues.
    conns: BTreeMap<ConnId, ConnEntry>,
    /// The fences that wait for operations in flight, by fence id (trap T8).
    fences: BTreeMap<u64, Fence>,
    /// By namespace: the connections that may have writes in flight there (trap T8).
    writers: Writers,
    /// The memory that connections share (trap T28).
    budget: Arc<Budget>,
    /// Bytes of memory reserved for the in-capsule data of all I/O queues.
    capsule_bytes: usize,
    next_cntlid: u16,
    next_association: u64,
    next_fence_id: u64,
    next_abort_id: u64,
    /// By namespace index: the connections that wait for a change of the drive.
    conns_awaiting_change: BTreeMap<(usize, DriveChange), Vec<ConnId>>,
    /// By namespace index: the locks of blocks.
    block_locks: BTreeMap<usize, BlockLocks>,
    next_lock: u64,
    /// By namespace index: the reservations of hosts.
    reservations: BTreeMap<usize, Reservations>,
    /// The connections to wake when the lock is released.
    conns_to_wake: Vec<ConnId>,
    /// Volumes, their owners and logs.
    pub(super) volumes: Volumes<R>,
    discovery_generation: u64,
    /// By namespace index: the streams of its drive, if the drive keeps their order.
    epoch_streams: Vec<EpochStreams>,
    /// The epoch with which streams of drives begin.
    first_epoch: u16,
    /// The connections that may still use removed namespaces.
    retirements: Retirements,
    /// The target is being drained: it takes no new hosts.
    is_draining: bool,
    /// The ids of the ports that the target does not serve any more.
    removed_ports: BTreeSet<u16>,
}

impl<R: Region> Shared<R> {
    /// A target without connections that begins to serve at time `now`, in ns of the clock of its
    /// [`TargetEnv`](super::TargetEnv)s. The leases of the volumes that had an owner when the
    /// target last stopped begin to run (trap T25).
    #[must_use]
    pub fn new(
        identity: Identity,
        namespaces: Namespaces,
        mut volumes: Volumes<R>,
        now: u64,
    ) -> Self {
        let namespaces = Arc::new(namespaces);
        volumes.begin_service(&namespaces, now);
        Self {
            identity: Arc::new(identity),
            access: Arc::default(),
            ana: AnaStates::default(),
            exponentiations: BTreeMap::new(),
            namespaces,
            controllers: BTreeMap::new(),
            conns: BTreeMap::new(),
            fences: BTreeMap::new(),
            writers: Writers::default(),
            budget: Budget::new(MEMORY_BYTES),
            capsule_bytes: 0,
            next_cntlid: 1,
            next_association: 1,
            next_fence_id: 1,
            next_abort_id: 1,
            conns_awaiting_change: BTreeMap::new(),
            block_locks: BTreeMap::new(),
            next_lock: 1,
            reservations: BTreeMap::new(),
            conns_to_wake: Vec::new(),
            volumes,
            discovery_generation: 1,
            epoch_streams: Vec::new(),
            first_epoch: 0,
            retirements: Retirements::default(),
            is_draining: false,
            removed_ports: BTreeSet::new(),
        }
    }

    /// Sets the epoch with which all streams of the drives begin. A drive that has got its power
    /// begins all with epoch 0.
    pub fn set_first_epoch(&mut self, epoch: u16) {
        self.first_epoch = epoch;
    }

    /// The streams of a namespace's drive.
    pub(super) fn epoch_streams(&mut self, ns_index: usize) -> &mut EpochStreams {
        let first = self.first_epoch;
        if self.epoch_streams.len() <= ns_index {
            self.epoch_streams.resize_with(ns_index + 1, || EpochStreams::new(first));
        }
        &mut self.epoch_streams[ns_index]
    }

    /// The identity and the settings of the subsystem.
    #[must_use]
    pub fn identity(&self) -> &Arc<Identity> {
        &self.identity
    }

    /// Sets the addresses of the subsystem, when the listeners know their ports. Persistent discovery
    /// controllers inform their hosts. Returns the connections to wake.
    pub fn set_ports(&mut self, ports: Vec<DiscoveryPort>) -> Vec<ConnId> {
        self.list_ports(ports);
        self.take_conns_to_wake()
    }

    fn list_ports(&mut self, ports: Vec<DiscoveryPort>) {
        let mut identity = Identity::clone(&self.identity);
        identity.ports = ports;
        self.identity = Arc::new(identity);
        self.note_discovery_change();
    }

    /// Sets how many bytes of data all connections together may hold, in addition to the
    /// [`CONNECTION_BYTES`](super::limits::CONNECTION_BYTES) of each. Connections that exist
    /// already keep the old limit.
    pub fn set_memory(&mut self, bytes: usize) {
        self.budget = Budget::new(bytes);
    }

    /// An empty reservation in the shared memory, for a new connection.
    pub(super) fn reservation(&self) -> Reservation {
        Reservation::of(Arc::clone(&self.budget))
    }

    /// A number that changes whenever the discovery log page changes.
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

    /// Ends the service by a clean stop. First records as closed the volumes whose lease has run
    /// out and that need no recovery (trap T25). Then calls [`Volumes::end_service`]. Every
    /// operation must have come back before.
    ///
    /// # Errors
    /// The log could not be written back: it is valid in this boot only.
    pub fn end_service(
        &mut self,
        now: u64,
        write_back: impl FnOnce() -> Result<(), RegionError>,
    ) -> Result<(), RegionError> {
        self.volumes.free_all(&self.namespaces, now);
        self.volumes.end_service(write_back)
    }

    /// Frees the volume of a namespace if its lease has run out, because a host is about to write
    /// the namespace (trap T25).
    pub(super) fn free_namespace(&mut self, nsid: u32, now: u64) {
        self.volumes.free_namespace(nsid, &self.namespaces, now);
    }

    /// The hosts that may connect, and their secrets. At first every host may.
    #[must_use]
    pub fn access(&self) -> &Arc<Access> {
        &self.access
    }

    /// Sets the hosts that may connect, and their secrets. Connections that are admitted already stay; they
    /// need the new secret when they authenticate again. The discovery log depends on the hosts, so
    /// persistent discovery controllers inform theirs. Returns the connections to wake.
    pub fn set_access(&mut self, access: Arc<Access>) -> Vec<ConnId> {
        self.access = access;
        self.discovery_changed()
    }

    /// Whether the host with this NQN may connect. It may have to authenticate.
    #[must_use]
    pub fn allows(&self, hostnqn: &str) -> bool {
        !matches!(self.access.admission(hostnqn), Admission::Refused)
    }

    /// Notes that a connection waits for the result of an exponentiation.
    pub(super) fn await_dh(&mut self, conn: ConnId) {
        self.exponentiations.insert(conn, None);
    }

    /// Leaves the result of an exponentiation for a connection. The caller then wakes the connection
    /// ([`TargetEnv::notify`](super::TargetEnv::notify)), which may have ended by then.
    pub fn leave_dh_done(&mut self, conn: ConnId, done: DhDone) {
        if let Some(result) = self.exponentiations.get_mut(&conn) {
            *result = Some(done);
        }
    }

    /// Takes the result that a connection waits for, if there is one.
    pub(super) fn take_dh_done(&mut self, conn: ConnId) -> Option<DhDone> {
        self.exponentiations.get_mut(&conn)?.take()
    }

    /// Notes that a connection waits for no exponentiation any more.
    pub(super) fn forget_dh(&mut self, conn: ConnId) {
        self.exponentiations.remove(&conn);
    }

    /// Makes `host` the owner of a volume: calls [`Volumes::claim`]. Then fences the association of
    /// the former owner, or ends it. Returns the number of this claim among the claims of the
    /// volume.
    pub(super) fn claim(&mut self, claim: &Claim, host: Owner, now: u64) -> Result<u64, Refusal> {
        let claimant = host.association;
        let claimed = self.volumes.claim(claim, host, &self.namespaces, now)?;
        // A former owner that is fenced loses its rights. The claimant gets its rights back, in
        // case another owner has fenced it before (trap T8).
        for controller in self.controllers.values() {
            if claimed.fenced_association == Some(controller.association) {
                controller.rights.fence();
            } else if claimant == controller.association {
                controller.rights.restore();
            }
        }
        if let Some(association) = claimed.association_to_end {
            let why = if claim.resume {
                "its host has come back with another association"
            } else {
                "another owner has taken its volume over"
            };
            self.end_association(association, why);
        }
        Ok(claimed.claim_number)
    }

    /// Closes all queues of an association, for the reason `why`.
    fn end_association(&mut self, association: u64, why: &'static str) {
        let controller =
            self.controllers.iter().find(|(_, controller)| controller.association == association);
        let Some((&cntlid, controller)) = controller else { return };
        let admin = controller.admin;
        self.end_queues(cntlid);
        self.leave_notice(admin, Notice::Close(why));
    }

    /// Notes that `conn` is about to read the guard of namespace `ns_index` for the first time
    /// (trap T8).
    pub(super) fn note_writer(&mut self, ns_index: usize, conn: ConnId) {
        if self.conns.contains_key(&conn) {
            self.writers.note(ns_index, conn);
        }
    }

    /// Binds a stream to a connection: calls [`Volumes::bind`]. Notes the connection as a writer of
    /// the volume's namespaces.
    pub(super) fn bind(
        &mut self,
        conn: ConnId,
        association: u64,
        id: PartitionId,
        binding: Binding,
    ) -> Result<Bound<R>, Refusal> {
        let bound = self.volumes.bind(conn, association, id, binding);
        if let Ok(bound) = &bound {
            for member in &bound.members {
                if let Some((ns_index, _)) = self.namespaces.find(member.nsid) {
                    self.writers.note(ns_index, conn);
                }
            }
        }
        self.end_old_carriers(bound, [id])
    }

    /// Returns a page of a partition: calls [`Volumes::list`].
    pub(super) fn list(
        &mut self,
        id: PartitionId,
        association: u64,
        from: Position,
        len: usize,
    ) -> Result<Page, Refusal> {
        let page = self.volumes.list(id, association, from, len);
        self.end_old_carriers(page, [id])
    }

    /// Settles streams of a volume: calls [`Volumes::settle`].
    pub(super) fn settle(&mut self, settle: &Settle, association: u64) -> Result<(), Refusal> {
        let settled = self.volumes.settle(settle, association);
        self.end_old_carriers(settled, settle.partitions())
    }

    /// If the result is `STREAM_BUSY`, closes the connections that still carry these streams.
    ///
    /// The owner needs the streams on other connections, or forgets the volume. So the owner has
    /// given up these connections, although their end was not noticed here yet. The owner repeats
    /// its command, which succeeds when the connections have ended (promises P7, P8).
    fn end_old_carriers<T>(
        &mut self,
        result: Result<T, Refusal>,
        streams: impl IntoIterator<Item = PartitionId>,
    ) -> Result<T, Refusal> {
        if matches!(result, Err(Refusal { status: wire::status::STREAM_BUSY, .. })) {
            for id in streams {
                if let Some(conn) = self.volumes.carrier(id) {
                    self.leave_notice(conn, Notice::Close("its owner needs the stream elsewhere"));
                }
            }
        }
        result
    }

    /// Releases a volume, if the host with this association may still do that. With `forget`, drops
    /// the volume and its log.
    pub(super) fn release(
        &mut self,
        volume: VolumeId,
        association: u64,
        request: ReleaseRequest,
        now: u64,
    ) -> Result<(), Refusal> {
        self.volumes.may_release(volume, association, request, now)?;
        let was_owner =
            self.volumes.owner(volume).is_some_and(|owner| owner.association == association);
        let released = self.volumes.release(volume, request.forget, &self.namespaces);
        if was_owner && released == Ok(false) {
            // A plain command of the owner may still arrive, such as a Write Zeroes of a recovery
            // that the owner has given up. It must not land over data that is written from now on
            // (trap T8).
            for controller in self.controllers.values() {
                if controller.association == association {
                    controller.rights.fence();
                }
            }
        }
        let released = released.map(drop);
        let volume = self.volumes.find(volume).into_iter();
        let carried_streams: Vec<PartitionId> = volume.flat_map(Volume::carried_streams).collect();
        self.end_old_carriers(released, carried_streams)
    }

    /// The number of connections that are queues and are not drained yet.
    #[must_use]
    pub fn connections(&self) -> usize {
        self.conns.len()
    }
}

/// Notes in `last_received` that a host has sent something at time `now`, ns.
pub(super) fn note_received(last_received: &AtomicU64, now: u64) {
    last_received.store(now, Ordering::Relaxed);
}

//! The shared state of all connections of a target: the subsystem, its volumes, its controllers
//! (`controllers.rs`), and the notices from one connection to another (`notices.rs`).
//!
//! It is used when queues begin and end and by admin commands, never on the hot path. The
//! environment keeps it behind a lock. If another connection must react to a change, a [`Notice`]
//! is left here, and the connection is woken ([`TargetEnv::notify`](super::TargetEnv::notify)), on
//! any core.

mod controllers;
mod notices;

use alloc::collections::BTreeMap;
use alloc::sync::Arc;
use alloc::vec::Vec;
use core::sync::atomic::{AtomicU64, Ordering};

use riopipe_order::attribute::VolumeId;
use riopipe_order::entry::{PartitionId, Position};
use riopipe_order::region::{Region, RegionError};

pub(super) use self::controllers::Attached;
pub use self::controllers::{AttachError, Controller};
use self::notices::Fence;
pub use self::notices::{FenceScope, Notice};
use super::budget::{Budget, Reservation};
use super::identity::{DiscoveryPort, Identity};
use super::ids::ConnId;
use super::limits::MEMORY_BYTES;
use super::namespace::Namespaces;
use super::volumes::{Binding, Bound, Owner, Refusal, Volume, Volumes};
use super::writers::Writers;
use crate::wire::list::{Page, Settle};
use crate::wire::{self, Claim};

/// A connection that has become a queue.
#[derive(Debug)]
struct ConnEntry {
    cntlid: u16,
    qid: u16,
    /// Bytes of memory set aside for the in-capsule data of its commands (T28).
    capsules: usize,
    notices: Vec<Notice>,
}

/// The state that connections share.
pub struct Shared<R: Region> {
    identity: Arc<Identity>,
    pub(super) namespaces: Arc<Namespaces>,
    /// The controllers, by controller id. There is one for each association.
    controllers: BTreeMap<u16, Controller>,
    /// The connections that have become queues.
    conns: BTreeMap<ConnId, ConnEntry>,
    /// The fences that wait for operations in flight (T8).
    fences: BTreeMap<u64, Fence>,
    /// By namespace: the connections that may have writes in flight there (T8).
    writers: Writers,
    /// The memory that connections share (T28).
    budget: Arc<Budget>,
    /// Bytes set aside for the in-capsule data of I/O queues.
    capsules: usize,
    next_cntlid: u16,
    next_assoc: u64,
    next_fence: u64,
    /// By namespace: connections with a FLUSH whose success is in doubt (T29).
    in_doubt: BTreeMap<usize, Vec<ConnId>>,
    /// Connections to wake once the lock is released.
    wake: Vec<ConnId>,
    /// Volumes, their owners and logs.
    pub(super) volumes: Volumes<R>,
    discovery_generation: u64,
}

impl<R: Region> Shared<R> {
    /// A target without connections that begins to serve at `now`, ns of the clock of its
    /// [`TargetEnv`](super::TargetEnv)s. The leases of volumes that were owned when it last stopped
    /// begin (T25).
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
            in_doubt: BTreeMap::new(),
            wake: Vec::new(),
            volumes,
            discovery_generation: 1,
        }
    }

    /// The identity and the settings of the subsystem.
    #[must_use]
    pub fn identity(&self) -> &Arc<Identity> {
        &self.identity
    }

    /// Sets the addresses of the subsystem, once the listeners know their ports.
    pub fn set_ports(&mut self, ports: Vec<DiscoveryPort>) {
        let mut identity = Identity::clone(&self.identity);
        identity.ports = ports;
        self.identity = Arc::new(identity);
        self.discovery_generation += 1;
    }

    /// Sets how many bytes of data connections may hold together, beyond a share that each has
    /// ([`CONNECTION_BYTES`](super::limits::CONNECTION_BYTES)). For connections from now on.
    pub fn set_memory(&mut self, bytes: usize) {
        self.budget = Budget::new(bytes);
    }

    /// A reservation of no bytes yet in the shared memory, for a new connection.
    pub(super) fn reservation(&self) -> Reservation {
        Reservation::of(Arc::clone(&self.budget))
    }

    /// A number that changes whenever the discovery log does.
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

    /// Ends service by a clean stop. Volumes whose owners' leases have run out are recorded as
    /// closed, if they need no recovery (T25). Then calls [`Volumes::end_service`]. Every operation
    /// must have come back.
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

    /// Frees the volume of a namespace that is guarded for a lease, for a host that wants to write
    /// it (T25).
    pub(super) fn free_namespace(&mut self, nsid: u32, now: u64) {
        self.volumes.free_namespace(nsid, &self.namespaces, now);
    }

    /// Whether the host may connect.
    #[must_use]
    pub fn allows(&self, hostnqn: &str) -> bool {
        match &self.identity.allowed_hosts {
            None => true,
            Some(hosts) => hosts.iter().any(|h| h == hostnqn),
        }
    }

    /// Gives a volume to `host`; see [`Volumes`]. Returns the number of this claim among
    /// the volume's claims.
    pub(super) fn claim(&mut self, claim: &Claim, host: Owner, now: u64) -> Result<u64, Refusal> {
        let claimant = host.association;
        let claimed = self.volumes.claim(claim, host, &self.namespaces, now)?;
        // A former owner that is fenced loses its rights. The claimant may have lost its own
        // before, and gets them back (T8).
        for controller in self.controllers.values() {
            if claimed.fenced_association == Some(controller.association) {
                controller.rights.fence();
            } else if claimant == controller.association {
                controller.rights.restore();
            }
        }
        if let Some(association) = claimed.association_to_end {
            let old = self.controllers.iter().find(|(_, c)| c.association == association);
            if let Some((cntlid, admin)) = old.map(|(cntlid, c)| (*cntlid, c.admin)) {
                self.end_queues(cntlid);
                let why = match claim.resume {
                    true => "its host has come back with another association",
                    false => "another owner has taken its volume over",
                };
                self.leave_notice(admin, Notice::Close(why));
            }
        }
        Ok(claimed.claim_number)
    }

    /// Notes that `conn` is about to read the guard of namespace `ns_index` for the first time (T8).
    pub(super) fn note_writer(&mut self, ns_index: usize, conn: ConnId) {
        if self.conns.contains_key(&conn) {
            self.writers.note(ns_index, conn);
        }
    }

    /// Binds a stream to a connection, which may write to the volume's namespaces from now on; see
    /// [`Volumes::bind`].
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

    /// A page of a partition; see [`Volumes::list`].
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

    /// Settles streams of a volume; see [`Volumes::settle`].
    pub(super) fn settle(&mut self, settle: &Settle, association: u64) -> Result<(), Refusal> {
        let settled = self.volumes.settle(settle, association);
        self.end_old_carriers(settled, settle.partitions())
    }

    /// If the result is `STREAM_BUSY`, ends the connections that still carry these streams. The
    /// owner needs the streams elsewhere, or forgets the volume. So it has given up these
    /// connections, although they have not ended here yet. It sends the command again after their
    /// end (P7, P8).
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

    /// Releases a volume, if `association` may still do that.
    pub(super) fn release(
        &mut self,
        volume: VolumeId,
        association: u64,
        forget: bool,
    ) -> Result<(), Refusal> {
        self.volumes.may_release(volume, association, forget)?;
        let was_owner =
            self.volumes.owner(volume).is_some_and(|owner| owner.association == association);
        let released = self.volumes.release(volume, forget, &self.namespaces);
        if was_owner && released == Ok(false) {
            // A plain command of the owner may still arrive, such as the zeroing of a recovery that
            // the owner has given up. It must not land over what is written from now on (T8).
            let owners = self.controllers.values().filter(|c| c.association == association);
            owners.for_each(|controller| controller.rights.fence());
        }
        let released = released.map(drop);
        let carried = self.volumes.find(volume).into_iter().flat_map(Volume::carried_streams);
        let carried: Vec<PartitionId> = carried.collect();
        self.end_old_carriers(released, carried)
    }

    /// Connections that have not been drained.
    #[must_use]
    pub fn connections(&self) -> usize {
        self.conns.len()
    }
}

/// Notes in `last_received` that a host has sent something at time `now`, ns.
pub(super) fn note_received(last_received: &AtomicU64, now: u64) {
    last_received.store(now, Ordering::Relaxed);
}

//! The namespaces of a target: their sizes and names, and the state that all cores share. A
//! namespace has one number here, its *index*, and another one in commands, its *namespace id*
//! (NSID).

use alloc::sync::Arc;
use alloc::vec::Vec;
use core::sync::atomic::{AtomicU64, Ordering};

use riopipe_order::write_order::DriveOrder;

use super::drive_order::EpochSequence;
use super::flushes::DriveFlushes;
use super::lba::LbaSize;

/// The properties of a namespace.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct NamespaceConfig {
    /// Namespace id, 1 to [`NSID_MAX`].
    pub nsid: u32,
    /// The size in blocks of 4096 bytes, also if hosts see smaller ones.
    pub blocks: u64,
    /// The size of the logical blocks that hosts see.
    pub lba_size: LbaSize,
    /// The ANA group, 1 to [`ANA_GROUP_MAX`](super::ANA_GROUP_MAX).
    pub ana_group: u32,
    /// Globally unique id; all zero if it has none.
    pub nguid: [u8; 16],
    /// The UUID. It must stay the same over restarts.
    pub uuid: [u8; 16],
    /// Whether the drive has a volatile write cache, so that only flushed writes are durable.
    pub volatile: bool,
    /// The order among writes that the drive itself keeps.
    pub order: DriveOrder,
}

/// Largest namespace id.
pub const NSID_MAX: u32 = 1024;
/// The most namespaces that a target may have had since it was started, the removed ones included:
/// the index of a namespace has 16 bits.
const INDICES_MAX: usize = u16::MAX as usize - 1;

/// A namespace and its shared state.
#[derive(Clone, Debug)]
pub struct Namespace {
    /// Its properties.
    pub config: NamespaceConfig,
    /// The state that all connections share.
    pub state: Arc<NamespaceState>,
}

/// The state of a namespace that all cores share. The guard is read on the hot path, and changed
/// only by claims and releases.
#[derive(Debug)]
pub struct NamespaceState {
    /// The association that may make plain writes, or [`OPEN_TO_ALL`], or
    /// [`GUARDED_WITHOUT_OWNER`].
    guard: AtomicU64,
    /// The end of the lease for which the namespace is guarded, ns of the environment's clock; or
    /// [`NO_LEASE_END`] (trap T25).
    lease_end_ns: AtomicU64,
    pub(super) flushes: DriveFlushes,
    /// How many exclusive locks of blocks are held or waited for. Changed under the lock of
    /// [`Shared`](super::Shared).
    lock_count: AtomicU64,
    /// The sequence of epochs, for a drive with a cache barrier.
    pub(super) sequence: EpochSequence,
}

impl Default for NamespaceState {
    fn default() -> Self {
        Self {
            guard: AtomicU64::new(OPEN_TO_ALL),
            lease_end_ns: AtomicU64::new(NO_LEASE_END),
            flushes: DriveFlushes::new(),
            lock_count: AtomicU64::new(0),
            sequence: EpochSequence::default(),
        }
    }
}

/// The guard of a namespace to which every host may write. No association has this number.
const OPEN_TO_ALL: u64 = 0;
/// The guard of a namespace to which no host may make plain writes: the owner of its volume is not
/// present, or the log of the volume is not recovered.
const GUARDED_WITHOUT_OWNER: u64 = u64::MAX;
/// The end of the lease of a namespace that is guarded for no lease.
const NO_LEASE_END: u64 = u64::MAX;

impl NamespaceState {
    /// Whether this association may make plain writes, outside of ordered streams (trap T21).
    #[inline]
    #[must_use]
    pub fn may_write(&self, association: u64) -> bool {
        let guard = self.guard.load(Ordering::Acquire);
        guard == OPEN_TO_ALL || guard == association
    }

    /// Whether the namespace is guarded for this association, which is the owner's.
    #[inline]
    pub(super) fn is_guarded_for(&self, association: u64) -> bool {
        self.guard.load(Ordering::Acquire) == association
    }

    /// Whether the namespace is guarded for a lease that has run out. Then
    /// [`Shared::free_namespace`](super::Shared) may remove the guard.
    pub(super) fn is_lease_over(&self, now: u64) -> bool {
        self.lease_end_ns.load(Ordering::Acquire) <= now
    }

    /// Guards the namespace: only the association `owner` may make plain writes, or no host if
    /// `owner` is `None`. `lease_end_ns` is the end of the lease for which the namespace is
    /// guarded.
    pub(super) fn guard_for(&self, owner: Option<u64>, lease_end_ns: Option<u64>) {
        self.lease_end_ns.store(lease_end_ns.unwrap_or(NO_LEASE_END), Ordering::SeqCst);
        self.guard.store(owner.unwrap_or(GUARDED_WITHOUT_OWNER), Ordering::SeqCst);
    }

    /// Removes the guard: every host may write.
    pub(super) fn open_to_all(&self) {
        self.lease_end_ns.store(NO_LEASE_END, Ordering::SeqCst);
        self.guard.store(OPEN_TO_ALL, Ordering::SeqCst);
    }

    /// Whether any block is locked, so that a command which changes blocks may have to wait.
    #[inline(always)]
    pub(super) fn has_locks(&self) -> bool {
        self.lock_count.load(Ordering::Acquire) > 0
    }

    /// Publishes the number of exclusive locks.
    pub(super) fn set_lock_count(&self, count: usize) {
        self.lock_count.store(count as u64, Ordering::SeqCst);
    }

    /// How many FLUSHes of this drive have failed (trap T22), as far as the cores that sent them
    /// have received the results. A core uses the success of a FLUSH only when every failure that
    /// concerns it has been counted (trap T29).
    #[inline]
    #[must_use]
    pub fn flush_failures(&self) -> u64 {
        self.flushes.failures()
    }
}

/// All namespaces of the subsystem, found by id without a search.
///
/// A change makes a new value ([`changed`](Self::changed)), in which the namespaces that stay keep
/// their indices. A namespace that was removed keeps its index, too, for the commands that were
/// begun before: it is *retired*.
#[derive(Debug, Default)]
pub struct Namespaces {
    /// By namespace index, with those that are retired.
    list: Vec<Namespace>,
    /// By namespace id: the index of the namespace in `list` plus 1; 0 if there is none with this
    /// id.
    index_plus_1_of: Vec<u16>,
    /// Whether any of them has, or had, logical blocks smaller than those of its drive.
    has_small_blocks: bool,
}

impl Namespaces {
    /// The namespaces with these properties. A namespace's index is its place in `configs`.
    ///
    /// # Errors
    /// An id is used twice, or is 0 or above [`NSID_MAX`].
    pub fn new(configs: Vec<NamespaceConfig>) -> Result<Self, NamespaceIdError> {
        Self::default().changed(&[], configs)
    }

    /// These namespaces without those with the ids in `removed`, and with those in `added`, which
    /// get the next free indices. Ids that no namespace has are ignored.
    ///
    /// # Errors
    /// An id of an added namespace is used already, or is 0 or above [`NSID_MAX`]; or too many
    /// namespaces have come and gone.
    pub fn changed(
        &self,
        removed: &[u32],
        added: Vec<NamespaceConfig>,
    ) -> Result<Self, NamespaceIdError> {
        let mut namespaces = Self {
            list: self.list.clone(),
            index_plus_1_of: self.index_plus_1_of.clone(),
            has_small_blocks: self.has_small_blocks,
        };
        for &nsid in removed {
            if let Some(index_plus_1) = namespaces.index_plus_1_of.get_mut(nsid as usize) {
                *index_plus_1 = 0;
            }
        }
        for config in added {
            let nsid = config.nsid;
            if nsid == 0 || nsid > NSID_MAX {
                return Err(NamespaceIdError::OutOfRange(nsid));
            }
            let at = nsid as usize;
            if namespaces.index_plus_1_of.len() <= at {
                namespaces.index_plus_1_of.resize(at + 1, 0);
            }
            if namespaces.index_plus_1_of[at] != 0 {
                return Err(NamespaceIdError::Twice(nsid));
            }
            if namespaces.list.len() >= INDICES_MAX {
                return Err(NamespaceIdError::TooManyChanges);
            }
            namespaces.has_small_blocks |= config.lba_size.is_small();
            namespaces.list.push(Namespace { config, state: Arc::default() });
            namespaces.index_plus_1_of[at] = namespaces.list.len() as u16;
        }
        Ok(namespaces)
    }

    /// The namespace with this id, and its index.
    #[inline]
    #[must_use]
    pub fn find(&self, nsid: u32) -> Option<(usize, &Namespace)> {
        let index = usize::from(*self.index_plus_1_of.get(nsid as usize)?).checked_sub(1)?;
        Some((index, &self.list[index]))
    }

    /// Whether commands may have to be translated into those of larger blocks.
    #[inline(always)]
    pub(super) const fn has_small_blocks(&self) -> bool {
        self.has_small_blocks
    }

    /// The namespace with this index.
    ///
    /// # Panics
    /// If the index is beyond the last namespace.
    #[inline]
    #[must_use]
    pub fn at(&self, index: usize) -> &Namespace {
        &self.list[index]
    }

    /// The number of indices that namespaces have had. The next added one gets this index.
    #[must_use]
    pub fn index_count(&self) -> usize {
        self.list.len()
    }

    /// Whether the namespace with this index was removed.
    #[must_use]
    pub fn is_retired(&self, index: usize) -> bool {
        let found = self.list.get(index).and_then(|retired| self.find(retired.config.nsid));
        found.is_none_or(|(other, _)| other != index)
    }

    /// All namespaces, without the retired ones.
    pub fn iter(&self) -> impl Iterator<Item = &Namespace> {
        let active = self.list.iter().enumerate().filter(|(index, _)| !self.is_retired(*index));
        active.map(|(_, namespace)| namespace)
    }

    /// The ANA group of each namespace, by its index, without the retired ones.
    pub(super) fn groups(&self) -> impl Iterator<Item = (usize, u32)> {
        let active = self.list.iter().enumerate().filter(|(index, _)| !self.is_retired(*index));
        active.map(|(index, namespace)| (index, namespace.config.ana_group))
    }

    /// The namespace ids, in ascending order.
    pub fn ids(&self) -> impl Iterator<Item = u32> {
        let used = self.index_plus_1_of.iter().enumerate().filter(|(_, index)| **index != 0);
        used.map(|(nsid, _)| nsid as u32)
    }

    /// The highest valid id: the number that Identify Controller gives as NN (Base §3.2.1.2). NVMe
    /// does not allow 0, so id 1 is valid although there is no namespace.
    #[must_use]
    pub fn highest_valid_id(&self) -> u32 {
        self.ids().last().unwrap_or(1)
    }

    /// Whether an id that names no namespace is valid all the same. NVMe calls such an id
    /// *inactive* (Base §3.2.1.4).
    #[must_use]
    pub fn is_inactive(&self, nsid: u32) -> bool {
        (1..=self.highest_valid_id()).contains(&nsid) && self.find(nsid).is_none()
    }

    /// Whether any drive has a volatile write cache.
    #[must_use]
    pub fn any_volatile(&self) -> bool {
        self.iter().any(|namespace| namespace.config.volatile)
    }
}

/// A namespace id that cannot be served.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum NamespaceIdError {
    /// The id is not 1 to [`NSID_MAX`].
    #[error("namespace id {0} is out of range: choose 1 to {NSID_MAX}")]
    OutOfRange(u32),
    /// Two namespaces have this id.
    #[error("namespace id {0} is used twice: give each namespace its own")]
    Twice(u32),
    /// The target has had 65,534 namespaces since it was started.
    #[error("{INDICES_MAX} namespaces have come and gone since the target was started: restart it")]
    TooManyChanges,
}

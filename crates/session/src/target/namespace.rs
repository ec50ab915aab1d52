//! Namespaces as connections use them: geometry, names, and the state that all cores share.

use alloc::sync::Arc;
use alloc::vec::Vec;
use core::sync::atomic::{AtomicU64, Ordering};

use super::flushes::DriveFlushes;

/// The properties of a namespace.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct NamespaceConfig {
    /// Namespace id, 1 to [`NSID_MAX`].
    pub nsid: u32,
    /// Blocks of 4096 bytes.
    pub blocks: u64,
    /// Globally unique id; all zero if it has none.
    pub nguid: [u8; 16],
    /// UUID; stable over restarts.
    pub uuid: [u8; 16],
    /// The drive has a volatile write cache: only flushed writes are durable.
    pub volatile: bool,
}

/// Largest namespace id.
pub const NSID_MAX: u32 = 1024;

/// A namespace and its shared state.
#[derive(Clone, Debug)]
pub struct Namespace {
    /// Its properties.
    pub config: NamespaceConfig,
    /// The state that all connections share.
    pub state: Arc<NamespaceState>,
}

/// The state of a namespace that all cores share. The first two fields are read on the hot path,
/// and written only by claims and releases. The rest is for FLUSHes.
#[derive(Debug)]
pub struct NamespaceState {
    /// The guard: 0 if every host may write; the association of the owner if only that may write; or
    /// [`GUARDED_WITHOUT_OWNER`].
    guard: AtomicU64,
    /// The end of the lease for which the namespace is guarded, ns of the environment's clock;
    /// `u64::MAX` if it is guarded for no lease (T25).
    until: AtomicU64,
    pub(super) flushes: DriveFlushes,
}

impl Default for NamespaceState {
    fn default() -> Self {
        let (guard, until) = (AtomicU64::new(0), AtomicU64::new(u64::MAX));
        Self { guard, until, flushes: DriveFlushes::new() }
    }
}

/// Guard value of a namespace whose volume has no owner present, or whose log is unrecovered.
const GUARDED_WITHOUT_OWNER: u64 = u64::MAX;

impl NamespaceState {
    /// Whether association `association` may write here outside of ordered streams (T21).
    #[inline]
    #[must_use]
    pub fn may_write(&self, association: u64) -> bool {
        let guard = self.guard.load(Ordering::Acquire);
        guard == 0 || guard == association
    }

    /// Whether it is guarded for the association `association` of its owner.
    #[inline]
    pub(super) fn is_of(&self, association: u64) -> bool {
        self.guard.load(Ordering::Acquire) == association
    }

    /// Whether the namespace is guarded for a lease that has run out. Then a connection that wants
    /// to write asks [`Shared`](super::Shared) again.
    pub(super) fn lease_is_over(&self, now: u64) -> bool {
        self.until.load(Ordering::Acquire) <= now
    }

    /// Guards the namespace: until the next call, only the association `owner` may write. `until`: the
    /// end of the lease for which it is guarded, if it is.
    pub(super) fn guard_for(&self, owner: Option<u64>, until: Option<u64>) {
        self.until.store(until.unwrap_or(u64::MAX), Ordering::SeqCst);
        self.guard.store(owner.unwrap_or(GUARDED_WITHOUT_OWNER), Ordering::SeqCst);
    }

    /// Removes the guard: every host may write.
    pub(super) fn open_to_all(&self) {
        self.until.store(u64::MAX, Ordering::SeqCst);
        self.guard.store(0, Ordering::SeqCst);
    }

    /// How many FLUSHes of this drive have failed (T22), as far as the cores that issued them have
    /// received their results. A success is used only when no other FLUSH may have failed without
    /// having been counted (T29).
    #[inline]
    #[must_use]
    pub fn flush_failures(&self) -> u64 {
        self.flushes.failures()
    }
}

/// All namespaces of the subsystem, found by id without a search.
#[derive(Debug, Default)]
pub struct Namespaces {
    list: Vec<Namespace>,
    /// Index + 1 by nsid; 0 for none.
    by_nsid: Vec<u16>,
}

impl Namespaces {
    /// The namespaces, in the order of the environment's indices.
    ///
    /// # Errors
    /// The id that is used twice, or is 0 or above [`NSID_MAX`].
    pub fn new(configs: Vec<NamespaceConfig>) -> Result<Self, NamespaceIdError> {
        let mut namespaces = Self::default();
        for config in configs {
            let nsid = config.nsid;
            if nsid == 0 || nsid > NSID_MAX {
                return Err(NamespaceIdError::OutOfRange(nsid));
            }
            let at = nsid as usize;
            if namespaces.by_nsid.len() <= at {
                namespaces.by_nsid.resize(at + 1, 0);
            }
            if namespaces.by_nsid[at] != 0 {
                return Err(NamespaceIdError::Twice(nsid));
            }
            namespaces.list.push(Namespace { config, state: Arc::default() });
            namespaces.by_nsid[at] = namespaces.list.len() as u16;
        }
        Ok(namespaces)
    }

    /// The namespace with this id, and its index.
    #[inline]
    #[must_use]
    pub fn find(&self, nsid: u32) -> Option<(usize, &Namespace)> {
        let index = usize::from(*self.by_nsid.get(nsid as usize)?).checked_sub(1)?;
        Some((index, &self.list[index]))
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

    /// All namespaces.
    pub fn iter(&self) -> impl Iterator<Item = &Namespace> {
        self.list.iter()
    }

    /// Ids in ascending order.
    pub fn ids(&self) -> impl Iterator<Item = u32> {
        self.by_nsid.iter().enumerate().filter(|(_, index)| **index != 0).map(|(id, _)| id as u32)
    }

    /// The highest id, 0 if there are none.
    #[must_use]
    pub fn highest_id(&self) -> u32 {
        self.ids().last().unwrap_or(0)
    }

    /// Whether any drive has a volatile write cache.
    #[must_use]
    pub fn any_volatile(&self) -> bool {
        self.list.iter().any(|namespace| namespace.config.volatile)
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
}

//! The access of an association to each namespace, as reservations allow it. All of its queues read
//! it before each command. [`Shared`](super::Shared) changes it, under its lock.

use alloc::boxed::Box;
use core::sync::atomic::{AtomicU8, Ordering};

use super::namespace::NSID_MAX;
use super::reservations::Access;

/// The host may not read.
const NO_READ: u8 = 1 << 0;
/// The host may not write.
const NO_WRITE: u8 = 1 << 1;

/// The access of one association, by namespace index.
#[derive(Debug)]
pub struct ReservedAccess(Box<[AtomicU8]>);

impl Default for ReservedAccess {
    fn default() -> Self {
        Self((0..NSID_MAX).map(|_| AtomicU8::new(0)).collect())
    }
}

impl ReservedAccess {
    /// Whether reservations allow the host to change blocks of the namespace.
    #[inline(always)]
    pub(super) fn may_write(&self, ns_index: usize) -> bool {
        self.denied(ns_index) & NO_WRITE == 0
    }

    /// Whether reservations allow the host to read the namespace.
    #[inline(always)]
    pub(super) fn may_read(&self, ns_index: usize) -> bool {
        self.denied(ns_index) & NO_READ == 0
    }

    #[inline(always)]
    fn denied(&self, ns_index: usize) -> u8 {
        // There is a byte for each namespace that can exist.
        self.0.get(ns_index).map_or(0, |denied| denied.load(Ordering::Acquire))
    }

    /// Sets the access to a namespace. Returns whether the host has lost any.
    pub(super) fn set(&self, ns_index: usize, access: Access) -> bool {
        let Some(denied) = self.0.get(ns_index) else { return false };
        let mut now = 0;
        if !access.may_read {
            now |= NO_READ;
        }
        if !access.may_write {
            now |= NO_WRITE;
        }
        let before = denied.swap(now, Ordering::SeqCst);
        now & !before != 0
    }
}

//! The access of an association to each namespace, as reservations and the ANA state of its port allow
//! it. All of its queues read it before each command. [`Shared`](super::Shared) changes it, under its
//! lock.

use alloc::boxed::Box;
use core::sync::atomic::{AtomicU8, Ordering};

use riopipe_nvme::ana::AnaState;
use riopipe_nvme::command::Status;

use super::namespace::NSID_MAX;
use super::reservations::{Access, CONFLICT};

/// The host may not read, because of a reservation.
const NO_READ: u8 = 1 << 0;
/// The host may not write, because of a reservation.
const NO_WRITE: u8 = 1 << 1;
/// The bits above these two are the ANA state, as in the log page, if it refuses commands; otherwise 0.
const ANA_SHIFT: u8 = 4;
const RESERVATION: u8 = NO_READ | NO_WRITE;

/// The access of one association, by namespace index.
#[derive(Debug)]
pub struct ReservedAccess(Box<[AtomicU8]>);

impl Default for ReservedAccess {
    fn default() -> Self {
        Self((0..NSID_MAX).map(|_| AtomicU8::new(0)).collect())
    }
}

impl ReservedAccess {
    /// Whether the host may change blocks of the namespace.
    #[inline(always)]
    pub(super) fn may_write(&self, ns_index: usize) -> bool {
        self.denied(ns_index) & !NO_READ == 0
    }

    /// Whether the host may read the namespace.
    #[inline(always)]
    pub(super) fn may_read(&self, ns_index: usize) -> bool {
        self.denied(ns_index) & !NO_WRITE == 0
    }

    /// Whether reservations allow the host to change blocks of the namespace.
    pub(super) fn reservations_allow_writes(&self, ns_index: usize) -> bool {
        self.denied(ns_index) & NO_WRITE == 0
    }

    /// The status with which every I/O command is refused because of the ANA state of the port.
    pub(super) fn path_refusal(&self, ns_index: usize) -> Option<Status> {
        AnaState::from_code(self.denied(ns_index) >> ANA_SHIFT)?.refusal()
    }

    /// The status with which a command is refused that has not the access which it needs.
    #[cold]
    pub(super) fn refusal(&self, ns_index: usize) -> Status {
        self.path_refusal(ns_index).unwrap_or(CONFLICT)
    }

    /// Sets the ANA state of the namespace at the port of the association.
    pub(super) fn set_ana(&self, ns_index: usize, state: AnaState) {
        let Some(denied) = self.0.get(ns_index) else { return };
        let bits = state.refusal().map_or(0, |_| state.code() << ANA_SHIFT);
        // Only the holder of the lock writes.
        let before = denied.load(Ordering::SeqCst);
        denied.store(before & RESERVATION | bits, Ordering::SeqCst);
    }

    #[inline(always)]
    fn denied(&self, ns_index: usize) -> u8 {
        // There is a byte for each namespace that can exist.
        self.0.get(ns_index).map_or(0, |denied| denied.load(Ordering::Acquire))
    }

    /// Sets the access to a namespace that reservations allow. Returns whether the host has lost any.
    pub(super) fn set(&self, ns_index: usize, access: Access) -> bool {
        let Some(denied) = self.0.get(ns_index) else { return false };
        let mut now = 0;
        if !access.may_read {
            now |= NO_READ;
        }
        if !access.may_write {
            now |= NO_WRITE;
        }
        // Only the holder of the lock writes.
        let before = denied.load(Ordering::SeqCst);
        denied.store(before & !RESERVATION | now, Ordering::SeqCst);
        now & !before != 0
    }
}

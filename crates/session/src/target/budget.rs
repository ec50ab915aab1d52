//! Memory for the data of all connections together (T28).
//!
//! The budget counts the data of reads and R2T transfers that a connection holds, and the bytes
//! that wait to be sent. The first [`CONNECTION_BYTES`] belong to the connection and are not
//! counted. More than that is reserved from one [`Budget`], in whole [`CHUNK_BYTES`], so that
//! counting is rare. A connection that gets no reservation waits until one of its own commands
//! ends, and asks again then. Its own share is enough for any one command, so one of its own
//! commands is in flight. Therefore no connection waits for others only, and none has to be woken.

use alloc::sync::Arc;
use core::sync::atomic::{AtomicUsize, Ordering};

use super::limits::CONNECTION_BYTES;

/// Size of the pieces in which memory is reserved, bytes.
const CHUNK_BYTES: usize = 1 << 20;

/// The memory that all connections may reserve together.
#[derive(Debug)]
pub(super) struct Budget {
    max: usize,
    reserved: AtomicUsize,
}

impl Budget {
    pub(super) fn new(max: usize) -> Arc<Self> {
        Arc::new(Self { max, reserved: AtomicUsize::new(0) })
    }

    pub(super) const fn max(&self) -> usize {
        self.max
    }
}

/// The memory that one connection has reserved. Dropping it frees all of it.
///
/// Relaxed is enough: the count orders nothing else, and no change of it gets lost.
#[derive(Debug, Default)]
pub(super) struct Reservation {
    /// None before Connect: an unknown host gets only the connection's own share.
    budget: Option<Arc<Budget>>,
    reserved: usize,
}

impl Reservation {
    pub(super) fn of(budget: Arc<Budget>) -> Self {
        Self { budget: Some(budget), reserved: 0 }
    }

    /// Whether the connection may hold `used` bytes in all. Reserves the missing bytes.
    #[inline]
    pub(super) fn grow(&mut self, used: usize) -> bool {
        used <= CONNECTION_BYTES + self.reserved || self.borrow(needed(used) - self.reserved)
    }

    /// Notes that the connection holds `used` bytes now.
    #[inline]
    pub(super) fn shrink(&mut self, used: usize) {
        if self.reserved > 0 {
            let needed = needed(used);
            if needed < self.reserved {
                self.free(self.reserved - needed);
            }
        }
    }

    fn borrow(&mut self, more: usize) -> bool {
        let Some(budget) = &self.budget else { return false };
        let fits = |reserved: usize| reserved.checked_add(more).filter(|sum| *sum <= budget.max);
        if budget.reserved.fetch_update(Ordering::Relaxed, Ordering::Relaxed, fits).is_err() {
            return false;
        }
        self.reserved += more;
        true
    }

    fn free(&mut self, less: usize) {
        self.reserved -= less;
        if let Some(budget) = &self.budget {
            budget.reserved.fetch_sub(less, Ordering::Relaxed);
        }
    }
}

impl Drop for Reservation {
    fn drop(&mut self) {
        self.free(self.reserved);
    }
}

/// The bytes to reserve in order to hold `used` bytes.
const fn needed(used: usize) -> usize {
    used.saturating_sub(CONNECTION_BYTES).next_multiple_of(CHUNK_BYTES)
}

#[cfg(test)]
mod tests {
    use super::*;

    const MIB: usize = 1 << 20;

    #[test]
    fn t28_reservations_never_exceed_the_budget() {
        let budget = Budget::new(3 * MIB);
        let mut reservations: [Reservation; 3] =
            core::array::from_fn(|_| Reservation::of(Arc::clone(&budget)));
        for reservation in &mut reservations {
            assert!(reservation.grow(CONNECTION_BYTES), "its own");
        }
        assert_eq!(budget.reserved.load(Ordering::Relaxed), 0);
        let [first, second, third] = &mut reservations;
        assert!(first.grow(CONNECTION_BYTES + 1) && first.grow(CONNECTION_BYTES + MIB));
        assert!(second.grow(CONNECTION_BYTES + 2 * MIB));
        assert!(!third.grow(CONNECTION_BYTES + 1) && !first.grow(CONNECTION_BYTES + MIB + 1));
        assert_eq!(budget.reserved.load(Ordering::Relaxed), 3 * MIB);
        second.shrink(CONNECTION_BYTES + MIB);
        assert!(third.grow(CONNECTION_BYTES + 1));
        third.shrink(0);
        assert_eq!(budget.reserved.load(Ordering::Relaxed), 2 * MIB);
        drop(reservations);
        assert_eq!(budget.reserved.load(Ordering::Relaxed), 0);
    }
}

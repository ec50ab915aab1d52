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
    lent: AtomicUsize,
}

impl Budget {
    pub(super) fn new(max: usize) -> Arc<Self> {
        Arc::new(Self { max, lent: AtomicUsize::new(0) })
    }

    pub(super) const fn max(&self) -> usize {
        self.max
    }
}

/// The memory that one connection has reserved. Dropping it frees all of it.
///
/// Relaxed is enough: the count orders nothing else, and no change of it gets lost.
#[derive(Debug, Default)]
pub(super) struct Loan {
    /// None before Connect: an unknown host gets only the connection's own share.
    budget: Option<Arc<Budget>>,
    lent: usize,
}

impl Loan {
    pub(super) fn of(budget: Arc<Budget>) -> Self {
        Self { budget: Some(budget), lent: 0 }
    }

    /// Whether the connection may hold `used` bytes in all. Reserves the missing bytes.
    #[inline]
    pub(super) fn grow(&mut self, used: usize) -> bool {
        used <= CONNECTION_BYTES + self.lent || self.borrow(needed(used) - self.lent)
    }

    /// Notes that the connection holds `used` bytes now.
    #[inline]
    pub(super) fn shrink(&mut self, used: usize) {
        if self.lent > 0 {
            let needed = needed(used);
            if needed < self.lent {
                self.give_back(self.lent - needed);
            }
        }
    }

    fn borrow(&mut self, more: usize) -> bool {
        let Some(budget) = &self.budget else { return false };
        let fits = |lent: usize| lent.checked_add(more).filter(|sum| *sum <= budget.max);
        if budget.lent.fetch_update(Ordering::Relaxed, Ordering::Relaxed, fits).is_err() {
            return false;
        }
        self.lent += more;
        true
    }

    fn give_back(&mut self, less: usize) {
        self.lent -= less;
        if let Some(budget) = &self.budget {
            budget.lent.fetch_sub(less, Ordering::Relaxed);
        }
    }
}

impl Drop for Loan {
    fn drop(&mut self) {
        self.give_back(self.lent);
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
    fn t28_what_is_lent_is_never_more_than_the_budget() {
        let budget = Budget::new(3 * MIB);
        let mut loans: [Loan; 3] = core::array::from_fn(|_| Loan::of(Arc::clone(&budget)));
        for loan in &mut loans {
            assert!(loan.grow(CONNECTION_BYTES), "its own");
        }
        assert_eq!(budget.lent.load(Ordering::Relaxed), 0);
        let [first, second, third] = &mut loans;
        assert!(first.grow(CONNECTION_BYTES + 1) && first.grow(CONNECTION_BYTES + MIB));
        assert!(second.grow(CONNECTION_BYTES + 2 * MIB));
        assert!(!third.grow(CONNECTION_BYTES + 1) && !first.grow(CONNECTION_BYTES + MIB + 1));
        assert_eq!(budget.lent.load(Ordering::Relaxed), 3 * MIB);
        second.shrink(CONNECTION_BYTES + MIB);
        assert!(third.grow(CONNECTION_BYTES + 1));
        third.shrink(0);
        assert_eq!(budget.lent.load(Ordering::Relaxed), 2 * MIB);
        drop(loans);
        assert_eq!(budget.lent.load(Ordering::Relaxed), 0);
    }
}

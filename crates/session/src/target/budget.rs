//! The memory for the data of all connections together (trap T28).
//!
//! A connection holds the data of its reads and R2T transfers, and the bytes that wait to be sent.
//! The first [`CONNECTION_BYTES`] are its own share. It reserves more from the [`Budget`] that all
//! connections share, in whole chunks of [`CHUNK_BYTES`], so that the shared counter seldom
//! changes.
//!
//! A connection that gets no reservation tries again when one of its own commands ends. Such a
//! command always exists, because the own share is enough for any one command. So no connection
//! waits only for others, and none has to be woken when memory becomes free.

use alloc::sync::Arc;
use core::sync::atomic::{AtomicUsize, Ordering};

use super::limits::CONNECTION_BYTES;

/// The size of the chunks in which memory is reserved, bytes.
const CHUNK_BYTES: usize = 1 << 20;

/// The memory that all connections may reserve together.
#[derive(Debug)]
pub(super) struct Budget {
    max_bytes: usize,
    reserved_bytes: AtomicUsize,
}

impl Budget {
    pub(super) fn new(max_bytes: usize) -> Arc<Self> {
        Arc::new(Self { max_bytes, reserved_bytes: AtomicUsize::new(0) })
    }

    pub(super) const fn max_bytes(&self) -> usize {
        self.max_bytes
    }
}

/// The memory that one connection has reserved. Dropping the reservation frees all of it.
///
/// `Ordering::Relaxed` is enough, because the shared counter orders no other memory access, and
/// atomic updates of it are never lost.
#[derive(Debug, Default)]
pub(super) struct Reservation {
    /// The shared budget. `None` before Connect, because an unknown host gets only the own share of
    /// its connection.
    budget: Option<Arc<Budget>>,
    reserved_bytes: usize,
}

impl Reservation {
    /// An empty reservation in a budget.
    pub(super) fn of(budget: Arc<Budget>) -> Self {
        Self { budget: Some(budget), reserved_bytes: 0 }
    }

    /// Reserves the memory that the connection needs to hold `used_bytes` bytes in all. Returns
    /// false, without a change, if there is not enough memory.
    #[inline]
    pub(super) fn grow(&mut self, used_bytes: usize) -> bool {
        used_bytes <= CONNECTION_BYTES + self.reserved_bytes
            || self.reserve(bytes_to_reserve(used_bytes) - self.reserved_bytes)
    }

    /// Frees the memory that the connection does not need to hold `used_bytes` bytes.
    #[inline]
    pub(super) fn shrink(&mut self, used_bytes: usize) {
        if self.reserved_bytes > 0 {
            let needed_bytes = bytes_to_reserve(used_bytes);
            if needed_bytes < self.reserved_bytes {
                self.free(self.reserved_bytes - needed_bytes);
            }
        }
    }

    fn reserve(&mut self, bytes: usize) -> bool {
        let Some(budget) = &self.budget else { return false };
        let add_within_limit = |reserved_bytes: usize| {
            reserved_bytes.checked_add(bytes).filter(|sum| *sum <= budget.max_bytes)
        };
        let updated = budget.reserved_bytes.fetch_update(
            Ordering::Relaxed,
            Ordering::Relaxed,
            add_within_limit,
        );
        if updated.is_err() {
            return false;
        }
        self.reserved_bytes += bytes;
        true
    }

    fn free(&mut self, bytes: usize) {
        self.reserved_bytes -= bytes;
        if let Some(budget) = &self.budget {
            budget.reserved_bytes.fetch_sub(bytes, Ordering::Relaxed);
        }
    }
}

impl Drop for Reservation {
    fn drop(&mut self) {
        self.free(self.reserved_bytes);
    }
}

/// How many bytes a connection must reserve to hold `used_bytes` bytes.
const fn bytes_to_reserve(used_bytes: usize) -> usize {
    used_bytes.saturating_sub(CONNECTION_BYTES).next_multiple_of(CHUNK_BYTES)
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
        assert_eq!(budget.reserved_bytes.load(Ordering::Relaxed), 0);
        let [first, second, third] = &mut reservations;
        assert!(first.grow(CONNECTION_BYTES + 1) && first.grow(CONNECTION_BYTES + MIB));
        assert!(second.grow(CONNECTION_BYTES + 2 * MIB));
        assert!(!third.grow(CONNECTION_BYTES + 1) && !first.grow(CONNECTION_BYTES + MIB + 1));
        assert_eq!(budget.reserved_bytes.load(Ordering::Relaxed), 3 * MIB);
        second.shrink(CONNECTION_BYTES + MIB);
        assert!(third.grow(CONNECTION_BYTES + 1));
        third.shrink(0);
        assert_eq!(budget.reserved_bytes.load(Ordering::Relaxed), 2 * MIB);
        drop(reservations);
        assert_eq!(budget.reserved_bytes.load(Ordering::Relaxed), 0);
    }
}

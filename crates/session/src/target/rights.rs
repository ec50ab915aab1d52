//! The rights of an association: whether its queues may make plain reads and writes (trap T8).
//!
//! ```text
//! GOOD ──another owner has taken over a volume──→ FENCED ──claims a volume itself──→ GOOD
//!   └──────────────────── the association ends ────┴──────────→ ENDED
//! ```

use core::sync::atomic::{AtomicU8, Ordering};

/// The association may read and write like any plain host.
const GOOD: u8 = 0;
/// Another owner has taken over a volume of the association.
const FENCED: u8 = 1;
/// The association has ended.
const ENDED: u8 = 2;

/// The rights of an association. All of its I/O queues read them.
#[derive(Debug, Default)]
pub struct Rights(AtomicU8);

impl Rights {
    /// Whether the association may read and write like any plain host.
    #[inline]
    pub(super) fn is_good(&self) -> bool {
        self.0.load(Ordering::SeqCst) == GOOD
    }

    /// Whether the association has ended, so that its queues end one after the other.
    pub(super) fn has_ended(&self) -> bool {
        self.0.load(Ordering::SeqCst) == ENDED
    }

    /// Notes that another owner has taken over a volume of the association. The host may not know
    /// that yet, so its queues must not read and write like those of a plain host.
    pub(super) fn fence(&self) {
        self.change(GOOD, FENCED);
    }

    /// Notes that the association has claimed a volume itself, so its queues may read and write
    /// again.
    pub(super) fn restore(&self) {
        self.change(FENCED, GOOD);
    }

    /// Ends the rights for good, because the association ends.
    pub(super) fn end(&self) {
        self.0.store(ENDED, Ordering::SeqCst);
    }

    /// Changes the state to `to`, if it is `from`.
    fn change(&self, from: u8, to: u8) {
        // A failed exchange is right: an association in another state stays in that state. An
        // association that has ended never gets its rights back.
        let _ = self.0.compare_exchange(from, to, Ordering::SeqCst, Ordering::SeqCst);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_association_that_has_ended_stays_so() {
        let rights = Rights::default();
        assert!(rights.is_good());
        rights.fence();
        assert!(!rights.is_good() && !rights.has_ended());
        rights.restore();
        assert!(rights.is_good());
        rights.end();
        rights.restore();
        rights.fence();
        assert!(rights.has_ended() && !rights.is_good());
    }
}

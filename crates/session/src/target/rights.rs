//! The rights of an association: whether its queues may read and write as those of any plain host
//! (T8).

use core::sync::atomic::{AtomicU8, Ordering};

/// It may read and write as any plain host.
const GOOD: u8 = 0;
/// Another owner has taken over a volume of it.
const FENCED: u8 = 1;
/// It has ended.
const ENDED: u8 = 2;

/// The rights of an association. All of its I/O queues read them.
#[derive(Debug, Default)]
pub struct Rights(AtomicU8);

impl Rights {
    /// Whether it may read and write as any plain host.
    #[inline]
    pub(super) fn is_good(&self) -> bool {
        self.0.load(Ordering::SeqCst) == GOOD
    }

    /// Whether it has ended: its queues end, one after the other.
    pub(super) fn has_ended(&self) -> bool {
        self.0.load(Ordering::SeqCst) == ENDED
    }

    /// Notes that another owner has taken over a volume that it had. It may not know that yet. So
    /// its queues may not read and write as those of a plain host.
    pub(super) fn fence(&self) {
        self.change(GOOD, FENCED);
    }

    /// Notes that it has claimed a volume itself: its queues may read and write again.
    pub(super) fn restore(&self) {
        self.change(FENCED, GOOD);
    }

    /// Ends it for good.
    pub(super) fn end(&self) {
        self.0.store(ENDED, Ordering::SeqCst);
    }

    /// Changes the state to `to`, if it is `from`.
    fn change(&self, from: u8, to: u8) {
        // An association in another state stays there; above all, one that has ended.
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

//! Whether the queues of an association may write as any plain host's (T8).

use core::sync::atomic::{AtomicU8, Ordering};

const GOOD: u8 = 0;
const OVERTAKEN: u8 = 1;
const ENDED: u8 = 2;

/// What an association may do on its I/O queues, as all of them see it at once.
#[derive(Debug, Default)]
pub struct Standing(AtomicU8);

impl Standing {
    /// Whether it may write as any plain host.
    #[inline]
    pub(super) fn is_good(&self) -> bool {
        self.0.load(Ordering::SeqCst) == GOOD
    }

    /// Whether it is over: its queues end, one after the other.
    pub(super) fn has_ended(&self) -> bool {
        self.0.load(Ordering::SeqCst) == ENDED
    }

    /// Whether another owner has taken over a volume that it had.
    pub(super) fn is_overtaken(&self) -> bool {
        self.0.load(Ordering::SeqCst) == OVERTAKEN
    }

    /// Another owner has taken over a volume that it had: it is no plain host as any other, but one
    /// that may not know.
    pub(super) fn overtake(&self) {
        self.change(GOOD, OVERTAKEN);
    }

    /// It has claimed a volume itself, and knows its standing.
    pub(super) fn restore(&self) {
        self.change(OVERTAKEN, GOOD);
    }

    /// It is over, for good.
    pub(super) fn end(&self) {
        self.0.store(ENDED, Ordering::SeqCst);
    }

    fn change(&self, from: u8, to: u8) {
        // One that is in another state stays there: above all, one that has ended.
        let _ = self.0.compare_exchange(from, to, Ordering::SeqCst, Ordering::SeqCst);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_association_that_has_ended_stays_so() {
        let standing = Standing::default();
        assert!(standing.is_good());
        standing.overtake();
        assert!(!standing.is_good() && !standing.has_ended() && standing.is_overtaken());
        standing.restore();
        assert!(!standing.is_overtaken());
        assert!(standing.is_good());
        standing.end();
        standing.restore();
        standing.overtake();
        assert!(standing.has_ended() && !standing.is_good());
    }
}

//! The rights of an association to write: whether its queues may write as those of any plain host (T8).

use core::sync::atomic::{AtomicU8, Ordering};

const GOOD: u8 = 0;
const FENCED: u8 = 1;
const ENDED: u8 = 2;

/// The rights of an association to write. All of its I/O queues read it.
#[derive(Debug, Default)]
pub struct WriteRights(AtomicU8);

impl WriteRights {
    /// Whether it may write as any plain host.
    #[inline]
    pub(super) fn is_good(&self) -> bool {
        self.0.load(Ordering::SeqCst) == GOOD
    }

    /// Whether it has ended: its queues end, one after the other.
    pub(super) fn has_ended(&self) -> bool {
        self.0.load(Ordering::SeqCst) == ENDED
    }

    /// Whether another owner has taken over a volume that it had.
    pub(super) fn is_fenced_owner(&self) -> bool {
        self.0.load(Ordering::SeqCst) == FENCED
    }

    /// Notes that another owner has taken over a volume that it had. It is not like any other plain
    /// host, because it may not know that.
    pub(super) fn fence(&self) {
        self.change(GOOD, FENCED);
    }

    /// Notes that it has claimed a volume itself, and so knows its rights.
    pub(super) fn restore(&self) {
        self.change(FENCED, GOOD);
    }

    /// Ends it for good.
    pub(super) fn end(&self) {
        self.0.store(ENDED, Ordering::SeqCst);
    }

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
        let write_rights = WriteRights::default();
        assert!(write_rights.is_good());
        write_rights.fence();
        assert!(
            !write_rights.is_good() && !write_rights.has_ended() && write_rights.is_fenced_owner()
        );
        write_rights.restore();
        assert!(!write_rights.is_fenced_owner());
        assert!(write_rights.is_good());
        write_rights.end();
        write_rights.restore();
        write_rights.fence();
        assert!(write_rights.has_ended() && !write_rights.is_good());
    }
}

//! The ownership checker: it checks whether the caller keeps its duties of T11 and T15, over all
//! streams of a volume.

use alloc::collections::BTreeMap;

use riopipe_order::attribute::{Seq, StreamId};
use riopipe_order::ownership::{BlockWrite, OwnershipChecker, Violation};

/// The stream that wrote each block last, and the released mark of each stream.
#[derive(Debug, Default)]
pub struct BlockOwnershipChecker {
    checker: OwnershipChecker,
    released: BTreeMap<StreamId, Seq>,
}

impl BlockOwnershipChecker {
    /// Checks a group before it is submitted. A write is given by its first volume block, its
    /// number of blocks, and whether the caller declares them fresh.
    ///
    /// # Errors
    /// The first [`Violation`] found.
    pub fn check(
        &self,
        stream: StreamId,
        writes: impl Iterator<Item = (u64, u32, bool)>,
    ) -> Result<(), Violation> {
        for (lba, blocks, fresh) in writes {
            self.checker.check_write(stream, lba, blocks, fresh, |of| self.released_mark(of))?;
        }
        Ok(())
    }

    /// Records a group that was submitted as `seq`.
    pub fn note(&mut self, stream: StreamId, writes: impl Iterator<Item = (u64, u32)>, seq: Seq) {
        for (lba, blocks) in writes {
            self.checker.record_write(stream, lba, blocks, seq);
        }
    }

    /// Records that a stream is released up to and including group `released`.
    pub fn on_released(&mut self, stream: StreamId, released: Seq) {
        if self.released.insert(stream, released) != Some(released) {
            self.checker.remove_released(stream, released);
        }
    }

    /// Records that a stream has been recovered up to group `last`. Its later writes will be neither
    /// undone nor sent again, so their blocks belong to no stream.
    pub fn on_recovered(&mut self, stream: StreamId, last: Seq) {
        self.released.insert(stream, last);
        self.checker.remove_released(stream, Seq(u64::MAX));
    }

    /// The stream that has written a volume block and not released it, if there is one.
    #[must_use]
    pub fn holder(&self, block: u64) -> Option<StreamId> {
        let BlockWrite { stream, seq } = self.checker.last_write(block)?;
        (seq > self.released_mark(stream)).then_some(stream)
    }

    /// The seq of the last released group of a stream.
    fn released_mark(&self, stream: StreamId) -> Seq {
        self.released.get(&stream).copied().unwrap_or(Seq::ZERO)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn t15_groups_that_recovery_dropped_block_no_stream() {
        let mut checker = BlockOwnershipChecker::default();
        checker.note(StreamId(0), [(5, 1)].into_iter(), Seq(3));
        let check = |checker: &BlockOwnershipChecker| {
            checker.check(StreamId(1), [(5, 1, true)].into_iter()).is_ok()
        };
        checker.on_released(StreamId(0), Seq(2));
        assert!(!check(&checker));
        assert_eq!(checker.holder(5), Some(StreamId(0)));
        checker.on_recovered(StreamId(0), Seq(2));
        assert!(check(&checker));
        assert_eq!(checker.holder(5), None);
    }

    #[test]
    fn t15_a_released_group_holds_no_block_and_takes_no_memory() {
        let mut checker = BlockOwnershipChecker::default();
        checker.note(StreamId(0), [(5, 1)].into_iter(), Seq(2));
        checker.note(StreamId(0), [(6, 1)].into_iter(), Seq(3));
        checker.on_released(StreamId(0), Seq(2));
        assert_eq!([5, 6].map(|block| checker.holder(block)), [None, Some(StreamId(0))]);
        assert_eq!(checker.checker.last_write(5), None, "it is not kept");
        // The same holds for a group that is noted only after its release.
        checker.note(StreamId(0), [(7, 1)].into_iter(), Seq(2));
        assert_eq!(checker.holder(7), None);
        assert_eq!(checker.check(StreamId(1), [(7, 1, true)].into_iter()), Ok(()));
    }
}

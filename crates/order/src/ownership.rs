//! The ownership checker: it finds a stream that writes a block too early (traps T15, T11).
//!
//! The caller must keep two rules about the blocks of a volume:
//!
//! - A block passes from one stream to another only after the first stream's write is *released*.
//!   Until then, the undo or the replay of the old write would destroy the new content.
//! - A write declared [`Fresh`](crate::engine::Place::Fresh) goes only to blocks whose old content
//!   no state needs. The content of the stream's own group that is not released may be needed.
//!
//! Debug builds and the simulator check each write before it is admitted. Release builds check if
//! an option asks for it.

use alloc::collections::BTreeMap;

use crate::attribute::{Seq, StreamId};

/// A violation of one of the two rules.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum Violation {
    /// Another stream's write to the block is not released yet.
    #[error(
        "block {block} was written by stream {holder} in group {seq}, which is not released: \
         stream {stream} may not write it yet"
    )]
    HandedOverTooEarly {
        /// The block of the volume.
        block: u64,
        /// The stream that is about to write the block.
        stream: StreamId,
        /// The stream that wrote the block last.
        holder: StreamId,
        /// The group of that last write.
        seq: Seq,
    },
    /// A block declared fresh holds the content of the stream's own earlier group, and the stream
    /// may still recover to that state.
    #[error(
        "block {block} is written as fresh by stream {stream}, but its group {seq} wrote it and \
         is not released: the volume may recover to a state that needs it"
    )]
    FalseFresh {
        /// The block of the volume.
        block: u64,
        /// The stream.
        stream: StreamId,
        /// The earlier group of the stream that wrote the block.
        seq: Seq,
    },
}

/// Remembers for each block the last write, as long as that write is not released.
#[derive(Debug, Default)]
pub struct OwnershipChecker {
    /// The last write of each block, by volume block.
    last_writes: BTreeMap<u64, BlockWrite>,
}

/// The write that a block holds.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct BlockWrite {
    /// The stream that wrote the block.
    pub stream: StreamId,
    /// The group of the write.
    pub seq: Seq,
}

impl OwnershipChecker {
    /// A checker without writes.
    #[must_use]
    pub const fn new() -> Self {
        Self { last_writes: BTreeMap::new() }
    }

    /// Checks a write of `blocks` blocks at volume block `lba` by `stream`, before it is admitted.
    ///
    /// `is_fresh` is the value of [`Op::is_fresh`](crate::engine::Op::is_fresh) for the write. A
    /// write in place and an extension may follow any write of their own stream. `released` returns
    /// the released seq of a stream.
    ///
    /// # Errors
    /// The first [`Violation`] found.
    pub fn check_write(
        &self,
        stream: StreamId,
        lba: u64,
        blocks: u32,
        is_fresh: bool,
        released: impl Fn(StreamId) -> Seq,
    ) -> Result<(), Violation> {
        for (&block, last) in self.last_writes.range(lba..lba + u64::from(blocks)) {
            let BlockWrite { stream: holder, seq } = *last;
            if seq <= released(holder) {
                continue;
            }
            if holder != stream {
                return Err(Violation::HandedOverTooEarly { block, stream, holder, seq });
            }
            if is_fresh {
                return Err(Violation::FalseFresh { block, stream, seq });
            }
        }
        Ok(())
    }

    /// The last write of a volume block; `None` if there was none, or if it was removed because it
    /// is released.
    #[must_use]
    pub fn last_write(&self, block: u64) -> Option<BlockWrite> {
        self.last_writes.get(&block).copied()
    }

    /// Records a write of `blocks` blocks at volume block `lba` that was admitted as `seq`.
    pub fn record_write(&mut self, stream: StreamId, lba: u64, blocks: u32, seq: Seq) {
        for block in lba..lba + u64::from(blocks) {
            self.last_writes.insert(block, BlockWrite { stream, seq });
        }
    }

    /// Removes the released writes of a stream. The caller calls it from time to time, to free
    /// memory.
    pub fn remove_released(&mut self, stream: StreamId, released: Seq) {
        self.last_writes.retain(|_, last| last.stream != stream || last.seq > released);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn t15_a_block_changes_hands_only_after_release() {
        let mut checker = OwnershipChecker::new();
        checker.record_write(StreamId(1), 10, 2, Seq(5));
        let at = |released: u64| move |_| Seq(released);
        assert!(matches!(
            checker.check_write(StreamId(2), 11, 4, true, at(4)),
            Err(Violation::HandedOverTooEarly { block: 11, holder: StreamId(1), seq: Seq(5), .. })
        ));
        assert_eq!(checker.check_write(StreamId(2), 12, 4, true, at(4)), Ok(()));
        assert_eq!(checker.check_write(StreamId(2), 11, 4, true, at(5)), Ok(()), "released");
        checker.record_write(StreamId(1), 20, 1, Seq(6));
        checker.record_write(StreamId(3), 30, 1, Seq(4));
        checker.remove_released(StreamId(1), Seq(5));
        assert_eq!(checker.check_write(StreamId(2), 11, 4, true, at(0)), Ok(()), "pruned");
        for block in [20, 30] {
            assert!(
                checker.check_write(StreamId(2), block, 1, true, at(3)).is_err(),
                "{block}: kept"
            );
        }
    }

    #[test]
    fn t11_an_extension_keeps_the_block_needed() {
        use crate::engine::{Op, Place};
        let mut checker = OwnershipChecker::new();
        let write = |place| Op::Write(place, ()).is_fresh();
        let check = |checker: &OwnershipChecker, fresh, released| {
            checker.check_write(StreamId(1), 10, 1, fresh, |_| Seq(released))
        };
        assert!(write(Place::Fresh) && Op::<()>::Discard.is_fresh());
        assert!(!write(Place::InPlace) && !write(Place::Extend));
        checker.record_write(StreamId(1), 10, 1, Seq(5));
        for seq in 6..9 {
            assert_eq!(check(&checker, write(Place::Extend), 4), Ok(()), "over its own stream's");
            checker.record_write(StreamId(1), 10, 1, Seq(seq));
        }
        // Group 5 is released, its extensions are not: the volume may recover to 6 or 7.
        let false_fresh =
            Err(Violation::FalseFresh { block: 10, stream: StreamId(1), seq: Seq(8) });
        assert_eq!(check(&checker, write(Place::Fresh), 7), false_fresh);
        assert_eq!(check(&checker, write(Place::Fresh), 8), Ok(()));
        let (other, extends) = (StreamId(2), write(Place::Extend));
        assert!(matches!(
            checker.check_write(other, 10, 1, extends, |_| Seq(7)),
            Err(Violation::HandedOverTooEarly { block: 10, holder: StreamId(1), seq: Seq(8), .. })
        ));
    }

    #[test]
    fn t11_a_false_fresh_is_caught() {
        let mut checker = OwnershipChecker::new();
        checker.record_write(StreamId(1), 10, 1, Seq(5));
        assert!(matches!(
            checker.check_write(StreamId(1), 10, 1, true, |_| Seq(4)),
            Err(Violation::FalseFresh { block: 10, seq: Seq(5), .. })
        ));
        assert_eq!(checker.check_write(StreamId(1), 10, 1, false, |_| Seq(4)), Ok(()), "in place");
        assert_eq!(checker.check_write(StreamId(1), 10, 1, true, |_| Seq(5)), Ok(()), "released");
    }
}

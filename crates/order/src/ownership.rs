//! The ownership checker: when a stream may write a block that another stream wrote (T15).
//!
//! A block passes from one stream to another (or to unordered use) only after the first stream's
//! write is *released*: until then, undoing or replaying the old write would destroy the new one.
//! This is the caller's duty. The checker checks it: always in debug builds and in simulation, else
//! as an option. It also finds a false [`Fresh`](crate::engine::Place::Fresh) (T11): a block that
//! is declared fresh although its newest content was written by a stream and is not released.

use alloc::collections::BTreeMap;

use crate::attribute::{Seq, StreamId};

/// A violation of T11 or T15.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum Violation {
    /// Another stream's write to the block is not released yet.
    #[error(
        "block {block} was written by stream {holder} in group {seq}, which is not released: \
         stream {stream} may not write it yet"
    )]
    HandedOverTooEarly {
        /// The volume block.
        block: u64,
        /// The stream that is about to write it.
        stream: StreamId,
        /// The stream that wrote it.
        holder: StreamId,
        /// The group of that earlier write.
        seq: Seq,
    },
    /// A block declared fresh holds the content of the stream's own earlier group, and the stream
    /// may still recover to that state.
    #[error(
        "block {block} is written as fresh by stream {stream}, but its group {seq} wrote it and \
         is not released: the volume may recover to a state that needs it"
    )]
    FalseFresh {
        /// The volume block.
        block: u64,
        /// The stream.
        stream: StreamId,
        /// Its earlier group.
        seq: Seq,
    },
}

/// For each block, the stream that wrote it last, as long as that write is not released.
#[derive(Debug, Default)]
pub struct OwnershipChecker {
    blocks: BTreeMap<u64, (StreamId, Seq)>,
}

impl OwnershipChecker {
    /// A checker that knows of no write.
    #[must_use]
    pub const fn new() -> Self {
        Self { blocks: BTreeMap::new() }
    }

    /// Checks a write of `blocks` at `lba` (volume blocks) by `stream`, before it is admitted.
    ///
    /// `fresh` is whether the old content is lost for good: see
    /// [`Op::is_fresh`](crate::engine::Op::is_fresh). An update in place and an extension may
    /// follow any write of their own stream. `released` returns the released seq of a stream.
    ///
    /// # Errors
    /// The first [`Violation`] found.
    pub fn check(
        &self,
        stream: StreamId,
        lba: u64,
        blocks: u32,
        fresh: bool,
        released: impl Fn(StreamId) -> Seq,
    ) -> Result<(), Violation> {
        for (block, (holder, seq)) in self.blocks.range(lba..lba + u64::from(blocks)) {
            if *seq <= released(*holder) {
                continue;
            }
            if *holder != stream {
                let (block, holder, seq) = (*block, *holder, *seq);
                return Err(Violation::HandedOverTooEarly { block, stream, holder, seq });
            }
            if fresh {
                return Err(Violation::FalseFresh { block: *block, stream, seq: *seq });
            }
        }
        Ok(())
    }

    /// The stream that wrote a volume block last, and its group, unless that has been pruned.
    #[must_use]
    pub fn writer(&self, block: u64) -> Option<(StreamId, Seq)> {
        self.blocks.get(&block).copied()
    }

    /// Notes a write that was admitted as `seq`.
    pub fn note(&mut self, stream: StreamId, lba: u64, blocks: u32, seq: Seq) {
        for block in lba..lba + u64::from(blocks) {
            self.blocks.insert(block, (stream, seq));
        }
    }

    /// Forgets the released writes of a stream. To be called now and then.
    pub fn prune(&mut self, stream: StreamId, released: Seq) {
        self.blocks.retain(|_, (holder, seq)| *holder != stream || *seq > released);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn t15_a_block_changes_hands_only_after_release() {
        let mut checker = OwnershipChecker::new();
        checker.note(StreamId(1), 10, 2, Seq(5));
        let at = |released: u64| move |_| Seq(released);
        assert!(matches!(
            checker.check(StreamId(2), 11, 4, true, at(4)),
            Err(Violation::HandedOverTooEarly { block: 11, holder: StreamId(1), seq: Seq(5), .. })
        ));
        assert_eq!(checker.check(StreamId(2), 12, 4, true, at(4)), Ok(()));
        assert_eq!(checker.check(StreamId(2), 11, 4, true, at(5)), Ok(()), "released");
        checker.note(StreamId(1), 20, 1, Seq(6));
        checker.note(StreamId(3), 30, 1, Seq(4));
        checker.prune(StreamId(1), Seq(5));
        assert_eq!(checker.check(StreamId(2), 11, 4, true, at(0)), Ok(()), "pruned");
        for block in [20, 30] {
            assert!(checker.check(StreamId(2), block, 1, true, at(3)).is_err(), "{block}: kept");
        }
    }

    #[test]
    fn t11_an_extension_keeps_the_block_needed() {
        use crate::engine::{Op, Place};
        let mut checker = OwnershipChecker::new();
        let write = |place| Op::Write(place, ()).is_fresh();
        let check = |checker: &OwnershipChecker, fresh, released| {
            checker.check(StreamId(1), 10, 1, fresh, |_| Seq(released))
        };
        assert!(write(Place::Fresh) && Op::<()>::Discard.is_fresh());
        assert!(!write(Place::InPlace) && !write(Place::Extend));
        checker.note(StreamId(1), 10, 1, Seq(5));
        for seq in 6..9 {
            assert_eq!(check(&checker, write(Place::Extend), 4), Ok(()), "over its own stream's");
            checker.note(StreamId(1), 10, 1, Seq(seq));
        }
        // Group 5 is released, its extensions are not: the volume may recover to 6 or 7.
        let false_fresh =
            Err(Violation::FalseFresh { block: 10, stream: StreamId(1), seq: Seq(8) });
        assert_eq!(check(&checker, write(Place::Fresh), 7), false_fresh);
        assert_eq!(check(&checker, write(Place::Fresh), 8), Ok(()));
        let (other, extends) = (StreamId(2), write(Place::Extend));
        assert!(matches!(
            checker.check(other, 10, 1, extends, |_| Seq(7)),
            Err(Violation::HandedOverTooEarly { block: 10, holder: StreamId(1), seq: Seq(8), .. })
        ));
    }

    #[test]
    fn t11_a_false_fresh_is_caught() {
        let mut checker = OwnershipChecker::new();
        checker.note(StreamId(1), 10, 1, Seq(5));
        assert!(matches!(
            checker.check(StreamId(1), 10, 1, true, |_| Seq(4)),
            Err(Violation::FalseFresh { block: 10, seq: Seq(5), .. })
        ));
        assert_eq!(checker.check(StreamId(1), 10, 1, false, |_| Seq(4)), Ok(()), "in place");
        assert_eq!(checker.check(StreamId(1), 10, 1, true, |_| Seq(5)), Ok(()), "released");
    }
}

//! The storage below the file system: blocks are read, and written in ordered groups on streams.

use alloc::string::String;
use alloc::sync::Arc;
use alloc::vec::Vec;

use crate::block::{Block, BlockNo};

/// A stream of ordered groups. There is no order between two streams, unless a group names one that
/// [follows](WriteGroup::follower) it.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct StreamNo(pub u16);

/// The number of a group in its stream, from 1.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct GroupSeq(pub u64);

/// Whether the old content of a block may still be needed (trap T11).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Placement {
    /// No state to which the storage may recover needs the old content. Such a block may read as
    /// zeroes after a crash.
    Fresh,
    /// The old content may be needed. After a crash the block has the old content or the new.
    InPlace,
}

/// The write of one block.
#[derive(Clone, Debug)]
pub struct BlockWrite {
    /// The block.
    pub at: BlockNo,
    /// Its new content.
    pub data: Arc<Block>,
    /// Whether the old content may still be needed.
    pub placement: Placement,
}

/// The purpose of a group's blocks. It changes nothing: measurements divide an `fsync` by it.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Content {
    /// Data of a file.
    #[default]
    Data,
    /// A file-level record.
    Record,
    /// Blocks of the main journal, apart from the commit block.
    Journal,
    /// The commit block of a main commit.
    Commit,
    /// Blocks in place that belong to no commit: checkpoints, superblocks, the table of the areas.
    Home,
}

/// A group of writes, ordered after all earlier groups of its stream.
#[derive(Clone, Debug, Default)]
pub struct WriteGroup {
    /// The writes; they have no order among themselves, and no two have the same block.
    pub writes: Vec<BlockWrite>,
    /// Whether the group and all earlier ones of the stream shall be made durable now. Without it
    /// the storage makes them durable some time later.
    pub flush: bool,
    /// The purpose of its blocks.
    pub content: Content,
    /// Another stream that follows the group: what is submitted to it later is behind the group. None
    /// of that is there after a crash without the group and all groups before it in its stream, and
    /// when some of that is durable, they are.
    pub follower: Option<StreamNo>,
}

impl WriteGroup {
    /// The group as writes of adjacent blocks with one placement, each of at most `blocks_max`
    /// blocks, by ascending block.
    #[must_use]
    pub fn runs(&self, blocks_max: usize) -> Vec<Run<'_>> {
        let mut writes: Vec<&BlockWrite> = self.writes.iter().collect();
        writes.sort_unstable_by_key(|write| write.at);
        let mut runs: Vec<Run<'_>> = Vec::new();
        for write in writes {
            match runs.last_mut() {
                Some(run) if run.is_continued_by(write) && run.blocks.len() < blocks_max => {
                    run.blocks.push(&write.data);
                }
                _ => {
                    let (first, placement) = (write.at, write.placement);
                    runs.push(Run { first, placement, blocks: alloc::vec![&*write.data] });
                }
            }
        }
        runs
    }

    /// Whether the group is submitted as a durable one. Only a durable group may have no writes.
    #[must_use]
    pub fn is_durable(&self) -> bool {
        self.flush || self.writes.is_empty()
    }
}

/// A write of adjacent blocks.
#[derive(Clone, Debug)]
pub struct Run<'g> {
    /// The first block.
    pub first: BlockNo,
    /// The placement of all of them.
    pub placement: Placement,
    /// The contents of the blocks, at least one.
    pub blocks: Vec<&'g Block>,
}

impl Run<'_> {
    fn is_continued_by(&self, write: &BlockWrite) -> bool {
        let next = self.first.0 + self.blocks.len() as u64;
        write.at.0 == next && write.placement == self.placement
    }
}

/// The numbers of a stream's groups: a volume counts on from mount to mount, and a file system
/// counts from 1 at each mount.
#[derive(Clone, Copy, Debug)]
pub struct Numbering {
    /// The number that the volume gave the last group before the mount.
    pub base: u64,
}

impl Numbering {
    /// The file system's number of a group of the volume; 0 for one of an earlier mount.
    #[must_use]
    pub const fn of_file_system(self, seq: u64) -> GroupSeq {
        GroupSeq(seq.saturating_sub(self.base))
    }

    /// The volume's number of a group of the file system.
    #[must_use]
    pub const fn of_volume(self, seq: GroupSeq) -> u64 {
        self.base.saturating_add(seq.0)
    }
}

/// The number of streams that a file system uses of a volume: not more than 64, and the main stream
/// and one for data at least. `None` if the volume has too few.
#[must_use]
pub const fn streams_used(of_volume: u16) -> Option<u16> {
    match of_volume {
        0 | 1 => None,
        2..=64 => Some(of_volume),
        _ => Some(64),
    }
}

/// How far the groups of a stream are.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct StreamMarks {
    /// All groups up to this one are complete: reads return their data.
    pub complete: GroupSeq,
    /// All groups up to this one are durable.
    pub durable: GroupSeq,
    /// All groups up to this one are durable, and no recovery undoes them and no replay sends them
    /// again. Another stream may write their blocks (trap T15).
    pub released: GroupSeq,
}

/// The storage has failed. What was not durable may be lost.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{0}")]
pub struct StorageError(pub String);

/// Blocks that are read, and written in ordered groups on streams. All calls may be made by any
/// thread at any time.
pub trait Storage: Send + Sync {
    /// The number of blocks.
    fn blocks(&self) -> u64;

    /// The number of streams, at least 2.
    fn streams(&self) -> u16;

    /// Reads consecutive blocks from `first` on into `into`, a whole number of blocks. A read
    /// returns the data of each group that was complete when it began, and of groups in flight the
    /// old data or the new.
    ///
    /// # Errors
    /// The blocks can't be read.
    fn read(&self, first: BlockNo, into: &mut [u8]) -> Result<(), StorageError>;

    /// Submits a group on a stream, and returns its number. It waits for space, not for the group.
    ///
    /// # Errors
    /// The stream has failed.
    fn submit(&self, stream: StreamNo, group: WriteGroup) -> Result<GroupSeq, StorageError>;

    /// How far the groups of a stream are.
    fn marks(&self, stream: StreamNo) -> StreamMarks;

    /// Waits until the groups of a stream up to `seq` are complete.
    ///
    /// # Errors
    /// The stream has failed.
    fn wait_complete(&self, stream: StreamNo, seq: GroupSeq) -> Result<(), StorageError>;

    /// Waits until the groups of a stream up to `seq` are durable, and makes them durable if no
    /// group from `seq` on asked for that.
    ///
    /// # Errors
    /// The stream has failed.
    fn wait_durable(&self, stream: StreamNo, seq: GroupSeq) -> Result<(), StorageError>;

    /// Waits until the groups of a stream up to `seq` are released. What is durable may not be
    /// released yet, while a replay is in progress. A storage without replay need not implement it.
    ///
    /// # Errors
    /// The stream has failed.
    fn wait_released(&self, stream: StreamNo, seq: GroupSeq) -> Result<(), StorageError> {
        self.wait_durable(stream, seq)
    }

    /// The file system was recovered, and can be changed now: all that its recovery has written is
    /// durable. What the storage knows of a crash before, it may forget. It is called once for a
    /// mount, and not for a read-only one.
    ///
    /// # Errors
    /// The storage has failed.
    fn recovered(&self) -> Result<(), StorageError> {
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use alloc::vec;

    #[test]
    fn adjacent_blocks_with_one_placement_become_one_write() {
        use Placement::{Fresh, InPlace};
        let write = |at, placement| BlockWrite {
            at: BlockNo(at),
            data: Arc::new([at as u8; crate::BLOCK_BYTES]),
            placement,
        };
        let writes = vec![
            write(7, Fresh),
            write(3, InPlace),
            write(6, Fresh),
            write(8, InPlace),
            write(5, Fresh),
            write(10, InPlace),
        ];
        let group = WriteGroup { writes, ..WriteGroup::default() };
        let shape = |most| -> Vec<(u64, usize, Placement)> {
            let runs = group.runs(most);
            let firsts = |run: &Run<'_>| {
                run.blocks.iter().zip(0..).all(|(block, n)| block[0] == run.first.0 as u8 + n)
            };
            assert!(runs.iter().all(firsts), "the contents have the order of the blocks");
            runs.iter().map(|run| (run.first.0, run.blocks.len(), run.placement)).collect()
        };
        let all = [(3, 1, InPlace), (5, 3, Fresh), (8, 1, InPlace), (10, 1, InPlace)];
        assert_eq!(shape(256), all);
        assert_eq!(shape(2)[1..3], [(5, 2, Fresh), (7, 1, Fresh)]);
        assert!(!group.is_durable() && WriteGroup::default().is_durable());
    }

    #[test]
    fn a_mount_counts_its_groups_from_one() {
        let numbering = Numbering { base: 41 };
        assert_eq!(numbering.of_file_system(42), GroupSeq(1));
        assert_eq!(numbering.of_file_system(7), GroupSeq(0));
        assert_eq!(numbering.of_volume(GroupSeq(1)), 42);
        let used = [0, 1, 2, 64, 65].map(streams_used);
        assert_eq!(used, [None, None, Some(2), Some(64), Some(64)]);
    }
}

//! The storage below the file system: blocks are read, and written in ordered groups on streams.

use alloc::string::String;
use alloc::sync::Arc;
use alloc::vec::Vec;

use crate::block::{Block, BlockNo};

/// A stream of ordered groups. There is no order between two streams.
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
}

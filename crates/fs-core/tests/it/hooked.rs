//! A storage in memory with something added to its calls.

use std::sync::Arc;

use riopipe_fs_core::BlockNo;
use riopipe_fs_core::storage::{
    GroupSeq, Storage, StorageError, StreamMarks, StreamNo, WriteGroup,
};

use crate::memory::{Image, Memory};

/// The addition. By default there is none.
pub(crate) trait Hooks: Send + Sync {
    /// Before a group is submitted to a stream, or waited for.
    fn before(&self, _stream: StreamNo) -> Result<(), StorageError> {
        Ok(())
    }

    /// After blocks from `first` on were read.
    fn on_read(&self, _first: BlockNo, _into: &mut [u8]) {}

    /// Before the file system gets the marks of a stream.
    fn change_marks(&self, _stream: StreamNo, _marks: &mut StreamMarks) {}

    /// The storage may forget a crash.
    fn on_recovered(&self, _memory: &Memory) {}
}

/// The storage. See the [module](self).
pub(crate) struct Hooked<H> {
    pub(crate) memory: Memory,
    pub(crate) hooks: H,
}

impl<H: Default> Hooked<H> {
    /// With three streams.
    pub(crate) fn new(image: Image, blocks: u64) -> Arc<Self> {
        Arc::new(Self { memory: Memory::new(image, blocks, 3), hooks: H::default() })
    }
}

impl<H: Hooks> Storage for Hooked<H> {
    fn blocks(&self) -> u64 {
        self.memory.blocks()
    }

    fn streams(&self) -> u16 {
        self.memory.streams()
    }

    fn read(&self, first: BlockNo, into: &mut [u8]) -> Result<(), StorageError> {
        self.memory.read(first, into)?;
        self.hooks.on_read(first, into);
        Ok(())
    }

    fn submit(&self, stream: StreamNo, group: WriteGroup) -> Result<GroupSeq, StorageError> {
        self.hooks.before(stream)?;
        self.memory.submit(stream, group)
    }

    fn marks(&self, stream: StreamNo) -> StreamMarks {
        let mut marks = self.memory.marks(stream);
        self.hooks.change_marks(stream, &mut marks);
        marks
    }

    fn wait_complete(&self, stream: StreamNo, seq: GroupSeq) -> Result<(), StorageError> {
        self.hooks.before(stream)?;
        self.memory.wait_complete(stream, seq)
    }

    fn wait_durable(&self, stream: StreamNo, seq: GroupSeq) -> Result<(), StorageError> {
        self.hooks.before(stream)?;
        self.memory.wait_durable(stream, seq)
    }

    fn recovered(&self) -> Result<(), StorageError> {
        self.hooks.on_recovered(&self.memory);
        Ok(())
    }
}

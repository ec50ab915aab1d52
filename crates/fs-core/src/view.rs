//! The metadata blocks as a reader sees them.

use alloc::sync::Arc;

use crate::block::{Block, BlockKind, BlockNo, MetaBlocks};
use crate::error::FsError;
use crate::format::layout::Layout;
use crate::fs::Fs;

/// The metadata blocks as the finished operations have left them. They can't be changed.
pub(crate) struct View<'fs>(pub(crate) &'fs Fs);

impl Fs {
    /// The metadata blocks for reading.
    pub(crate) fn view(&self) -> View<'_> {
        View(self)
    }
}

impl MetaBlocks for View<'_> {
    fn layout(&self) -> &Layout {
        &self.0.layout
    }

    fn get(&self, at: BlockNo, kind: BlockKind) -> Result<Arc<Block>, FsError> {
        self.0.read_meta(at, kind)
    }

    fn edit(&mut self, _: BlockNo, _: BlockKind) -> Result<&mut Block, FsError> {
        Err(FsError::ReadOnly)
    }

    fn create(&mut self, _: BlockNo, _: BlockKind) -> Result<&mut Block, FsError> {
        Err(FsError::ReadOnly)
    }

    fn allocate(&mut self, _: BlockNo) -> Result<BlockNo, FsError> {
        Err(FsError::ReadOnly)
    }

    fn free_meta(&mut self, _: BlockNo) {}

    fn free_data(&mut self, _: BlockNo, _: u32) {}
}

//! The metadata blocks as they are on the drive, before the file system is mounted.

use alloc::sync::Arc;
use alloc::vec::Vec;
use core::ops::ControlFlow;

use crate::block::{BLOCK_BYTES, Block, BlockKind, BlockNo, Ino, MetaBlocks};
use crate::error::FsError;
use crate::extents;
use crate::format::checksum;
use crate::format::group_desc::GroupDesc;
use crate::format::inode::{DiskInode, INODE_BYTES};
use crate::format::layout::Layout;
use crate::storage::Storage;

/// The metadata blocks as they are on the drive. They can't be changed.
pub(crate) struct Raw<'a> {
    pub(crate) storage: &'a dyn Storage,
    pub(crate) layout: &'a Layout,
}

impl Raw<'_> {
    /// Reads a block.
    pub(crate) fn block(&self, at: BlockNo) -> Result<Block, FsError> {
        if !self.layout.contains(at) {
            return Err(FsError::DamagedBlock { what: "pointer (out of range)", block: at });
        }
        let mut block = [0; BLOCK_BYTES];
        self.storage.read(at, &mut block)?;
        Ok(block)
    }

    /// Reads an inode.
    pub(crate) fn inode(&self, ino: Ino) -> Result<DiskInode, FsError> {
        if ino.0 == 0 || ino.0 > self.layout.inodes {
            return Err(FsError::DamagedInode { what: "number", ino });
        }
        let (group, index) = self.layout.group_of_inode(ino);
        let (at, offset) = self.layout.descriptor_at(group);
        let block = self.block(at)?;
        let raw = &block[offset..offset + usize::from(self.layout.descriptor_bytes)];
        if !GroupDesc::verify(self.layout, group, raw) {
            return Err(FsError::DamagedBlock { what: "group descriptor", block: at });
        }
        let table = GroupDesc::decode(self.layout, raw).inode_table;
        let per_block = self.layout.inodes_per_block();
        let inode_at = table.0.checked_add(u64::from(index / per_block));
        let damaged = FsError::DamagedBlock { what: "group descriptor", block: at };
        let block = self.block(BlockNo(inode_at.ok_or(damaged)?))?;
        let (inodes, _) = block.as_chunks::<INODE_BYTES>();
        DiskInode::decode(&inodes[(index % per_block) as usize], self.layout, ino)
    }

    /// The blocks of a file that has no holes.
    pub(crate) fn blocks_of(&self, ino: Ino, disk: &DiskInode) -> Result<Vec<BlockNo>, FsError> {
        let len = u32::try_from(disk.size / BLOCK_BYTES as u64);
        let len = len.map_err(|_| FsError::DamagedInode { what: "size", ino })?;
        let mut blocks = Vec::new();
        let _ = extents::for_each(ino, disk, self, 0..u64::from(len), &mut |extent| {
            if extent.logical as usize != blocks.len() {
                return ControlFlow::Break(());
            }
            let end = (extent.logical + extent.len).min(len);
            let count = u64::from(end - extent.logical);
            blocks.extend((0..count).map(|index| BlockNo(extent.physical.0 + index)));
            ControlFlow::Continue(())
        })?;
        if blocks.len() == len as usize {
            Ok(blocks)
        } else {
            Err(FsError::DamagedInode { what: "block list (it has a hole)", ino })
        }
    }
}

impl MetaBlocks for Raw<'_> {
    fn layout(&self) -> &Layout {
        self.layout
    }

    fn get(&self, at: BlockNo, kind: BlockKind) -> Result<Arc<Block>, FsError> {
        let block = self.block(at)?;
        checksum::verify(self.layout, at, kind, &block)?;
        if let BlockKind::ExtentNode(_) = kind {
            extents::check_node(self.layout, at, &block, &|_, _| true)?;
        }
        Ok(Arc::new(block))
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

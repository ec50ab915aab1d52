//! A directory as one operation sees it: its size, its form, its blocks by their place in it.

use alloc::sync::Arc;

use super::index::{Node, Root};
use super::leaf::Leaf;
use crate::block::{BLOCK_BYTES, Block, BlockKind, BlockNo, Ino, MetaBlocks};
use crate::error::FsError;
use crate::extents::{self, Extent, Run};
use crate::format::inode::{DiskInode, InodeFlags};
use crate::open_inode::OpenInode;

/// A directory, to be read.
#[derive(Clone, Copy)]
pub(super) struct View<'a> {
    pub(super) ino: Ino,
    disk: &'a DiskInode,
    pub(super) blocks: &'a dyn MetaBlocks,
    seed: u32,
    /// The number of blocks, at least 1.
    pub(super) len: u32,
}

/// A block of entries, with its place on the drive.
pub(super) struct LeafBlock {
    pub(super) at: BlockNo,
    pub(super) block: Arc<Block>,
}

impl LeafBlock {
    /// The entries.
    pub(super) fn leaf(&self, view: &View<'_>) -> Leaf<'_> {
        Leaf::new(view.blocks.layout(), self.at, &self.block)
    }
}

impl<'a> View<'a> {
    pub(super) fn new(
        ino: Ino,
        disk: &'a DiskInode,
        blocks: &'a dyn MetaBlocks,
    ) -> Result<Self, FsError> {
        if !disk.is_dir() {
            return Err(FsError::NotDirectory);
        }
        // Without `large_dir`, the size of a directory has 32 bits.
        let bytes = u32::try_from(disk.size).unwrap_or(0);
        if bytes == 0 || !bytes.is_multiple_of(BLOCK_BYTES as u32) {
            return Err(FsError::DamagedInode { what: "size of the directory", ino });
        }
        let layout = blocks.layout();
        if disk.flags.contains(InodeFlags::INDEX) && !layout.dir_index {
            return Err(FsError::DamagedInode { what: "flag for a hash tree", ino });
        }
        let seed = layout.inode_seed(ino, disk.generation);
        Ok(Self { ino, disk, blocks, seed, len: bytes / BLOCK_BYTES as u32 })
    }

    /// Whether the directory has a hash tree.
    pub(super) const fn is_tree(&self) -> bool {
        self.disk.flags.contains(InodeFlags::INDEX)
    }

    /// Whether the directory has a hash tree, or gets one when it grows.
    pub(super) fn is_hashed(&self) -> bool {
        self.is_tree() || (self.len == 1 && self.blocks.layout().dir_index)
    }

    /// The kind of its blocks of entries.
    pub(super) const fn leaf_kind(&self) -> BlockKind {
        BlockKind::DirLeaf(self.seed)
    }

    /// The kind of its index blocks.
    pub(super) const fn index_kind(&self) -> BlockKind {
        BlockKind::DirIndex(self.seed)
    }

    /// The place of block `logical` on the drive.
    pub(super) fn place(&self, logical: u32) -> Result<BlockNo, FsError> {
        if logical >= self.len {
            return Err(FsError::DamagedInode { what: "directory", ino: self.ino });
        }
        match extents::lookup(self.ino, self.disk, self.blocks, logical)? {
            Run::Mapped(extent) if !extent.unwritten && extent.logical == logical => {
                Ok(extent.physical)
            }
            _ => Err(FsError::DamagedInode { what: "hole in the directory", ino: self.ino }),
        }
    }

    /// Block `logical` as a block of entries.
    pub(super) fn leaf(&self, logical: u32) -> Result<LeafBlock, FsError> {
        let at = self.place(logical)?;
        Ok(LeafBlock { at, block: self.blocks.get(at, self.leaf_kind())? })
    }

    /// The root of the hash tree.
    pub(super) fn root(&self) -> Result<Root, FsError> {
        let at = self.place(0)?;
        Root::decode(self, at, self.blocks.get(at, self.index_kind())?)
    }

    /// Block `logical` as a node of the hash tree below the root.
    pub(super) fn node(&self, logical: u32) -> Result<Node, FsError> {
        let at = self.place(logical)?;
        Node::decode(self, at, self.blocks.get(at, self.index_kind())?)
    }

    /// The place and the kind of block 0.
    pub(super) fn first_block(&self) -> Result<(BlockNo, BlockKind), FsError> {
        let kind = if self.is_tree() { self.index_kind() } else { self.leaf_kind() };
        Ok((self.place(0)?, kind))
    }

    /// The inode of `..`.
    pub(super) fn parent(&self) -> Result<Ino, FsError> {
        if self.is_tree() {
            return Ok(self.root()?.parent);
        }
        self.leaf(0)?.leaf(self).parent()
    }
}

/// Adds a block to a directory. Returns its number in the directory and its place. The caller
/// creates its content.
pub(super) fn append(
    inode: &mut OpenInode<'_>,
    blocks: &mut dyn MetaBlocks,
) -> Result<(u32, BlockNo), FsError> {
    let size = inode.disk.size + BLOCK_BYTES as u64;
    if u32::try_from(size).is_err() {
        return Err(FsError::NoSpace);
    }
    // The size was checked to have 32 bits.
    let logical = (inode.disk.size / BLOCK_BYTES as u64) as u32;
    let goal = match logical.checked_sub(1) {
        None => {
            let layout = blocks.layout();
            let (group, _) = layout.group_of_inode(inode.ino);
            BlockNo(u64::from(group) * u64::from(layout.blocks_per_group))
        }
        Some(last) => {
            let place = View::new(inode.ino, inode.disk, &*blocks)?.place(last)?;
            BlockNo(place.0 + 1)
        }
    };
    let physical = blocks.allocate(goal)?;
    extents::insert(inode, blocks, Extent { logical, len: 1, physical, unwritten: false })?;
    inode.disk.size = size;
    Ok((logical, physical))
}

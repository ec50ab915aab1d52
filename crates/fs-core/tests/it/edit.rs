//! Changes of the metadata blocks of an image that no program has mounted, of one group.

use std::collections::BTreeMap;
use std::sync::Arc;

use riopipe_fs_core::format::checksum::{seal, verify};
use riopipe_fs_core::format::group_desc::GroupDesc;
use riopipe_fs_core::format::inode::{DiskInode, INODE_BYTES};
use riopipe_fs_core::format::layout::Layout;
use riopipe_fs_core::open_inode::OpenInode;
use riopipe_fs_core::{Block, BlockKind, BlockNo, FsError, Ino, MetaBlocks, extents};
use riopipe_nvme::digest::soft;

use crate::image::Image;

/// The metadata blocks of an image.
pub(crate) struct Edit<'a> {
    image: &'a Image,
    layout: Layout,
    edited: BTreeMap<BlockNo, (BlockKind, Arc<Block>)>,
    bitmap: Box<Block>,
    desc: GroupDesc,
}

impl<'a> Edit<'a> {
    pub(crate) fn new(image: &'a Image) -> Self {
        let layout = image.layout();
        assert_eq!(layout.groups, 1, "the image is small");
        let (at, offset) = layout.descriptor_at(0);
        let desc = GroupDesc::decode(&layout, &image.read(at)[offset..]);
        let bitmap = image.read(desc.block_bitmap);
        Self { image, layout, edited: BTreeMap::new(), bitmap, desc }
    }

    fn is_used(&self, at: u64) -> bool {
        self.bitmap[(at / 8) as usize] & 1 << (at % 8) != 0
    }

    fn flip(&mut self, at: u64, to_used: bool) {
        assert_ne!(self.is_used(at), to_used, "block {at}");
        self.bitmap[(at / 8) as usize] ^= 1 << (at % 8);
        if to_used {
            self.desc.free_blocks -= 1;
        } else {
            self.desc.free_blocks += 1;
        }
    }

    /// Allocates blocks for data that lie one after the other.
    pub(crate) fn data(&mut self, len: u32) -> BlockNo {
        let len = u64::from(len);
        let mut free = (0..=self.layout.blocks - len)
            .filter(|first| (*first..first + len).all(|at| !self.is_used(at)));
        let first = free.next().expect("free blocks");
        (first..first + len).for_each(|at| self.flip(at, true));
        BlockNo(first)
    }

    /// The block of an inode, and the offset in it.
    fn place(&self, ino: Ino) -> (BlockNo, usize) {
        let index = self.layout.group_of_inode(ino).1;
        let per_block = self.layout.inodes_per_block();
        let at = BlockNo(self.desc.inode_table.0 + u64::from(index / per_block));
        (at, (index % per_block) as usize * INODE_BYTES)
    }

    pub(crate) fn inode(&self, ino: Ino) -> DiskInode {
        let (at, offset) = self.place(ino);
        let block = self.image.read(at);
        let raw = block[offset..].first_chunk().expect("in the block");
        DiskInode::decode(raw, &self.layout, ino).expect("a valid inode")
    }

    /// Reads an inode, changes it, and writes it.
    pub(crate) fn change<T>(
        &mut self,
        ino: Ino,
        change: impl FnOnce(&mut OpenInode<'_>, &mut Self) -> T,
    ) -> T {
        let mut disk = self.inode(ino);
        let result = change(&mut OpenInode { ino, disk: &mut disk }, self);
        let (at, offset) = self.place(ino);
        let mut block = self.image.read(at);
        let raw = block[offset..].first_chunk_mut().expect("in the block");
        disk.encode(raw, &self.layout, ino);
        self.image.write(at, &block);
        result
    }

    /// Writes all blocks, the bitmap and the counts of free blocks.
    pub(crate) fn finish(mut self) {
        for (at, (kind, block)) in &self.edited {
            let mut block = **block;
            seal(&self.layout, *at, *kind, &mut block);
            self.image.write(*at, &block);
        }
        self.desc.seal_block_bitmap(&self.layout, &self.bitmap);
        self.image.write(self.desc.block_bitmap, &self.bitmap);
        let (at, offset) = self.layout.descriptor_at(0);
        let mut block = self.image.read(at);
        self.desc.encode(&self.layout, 0, &mut block[offset..]);
        self.image.write(at, &block);
        let mut superblock = self.image.superblock();
        superblock.set_free_blocks(u64::from(self.desc.free_blocks));
        let mut block = self.image.read(BlockNo(0));
        superblock.encode(&mut block, soft);
        self.image.write(BlockNo(0), &block);
    }
}

impl MetaBlocks for Edit<'_> {
    fn layout(&self) -> &Layout {
        &self.layout
    }

    fn get(&self, at: BlockNo, kind: BlockKind) -> Result<Arc<Block>, FsError> {
        if let Some((_, block)) = self.edited.get(&at) {
            return Ok(Arc::clone(block));
        }
        let block = self.image.read(at);
        verify(&self.layout, at, kind, &block)?;
        if let BlockKind::ExtentNode(_) = kind {
            extents::check_node(&self.layout, at, &block, &|_, _| true)?;
        }
        Ok(Arc::new(*block))
    }

    fn edit(&mut self, at: BlockNo, kind: BlockKind) -> Result<&mut Block, FsError> {
        let block = self.get(at, kind)?;
        let (_, block) = self.edited.entry(at).or_insert((kind, block));
        Ok(Arc::make_mut(block))
    }

    fn create(&mut self, at: BlockNo, kind: BlockKind) -> Result<&mut Block, FsError> {
        self.edited.insert(at, (kind, Arc::new([0; 4096])));
        self.edit(at, kind)
    }

    fn allocate(&mut self, goal: BlockNo) -> Result<BlockNo, FsError> {
        let free = (goal.0..self.layout.blocks).chain(0..goal.0).find(|at| !self.is_used(*at));
        let at = free.ok_or(FsError::NoSpace)?;
        self.flip(at, true);
        Ok(BlockNo(at))
    }

    fn free_meta(&mut self, at: BlockNo) {
        self.edited.remove(&at);
        self.flip(at.0, false);
    }

    fn free_data(&mut self, first: BlockNo, blocks: u32) {
        (first.0..first.0 + u64::from(blocks)).for_each(|at| self.flip(at, false));
    }
}

//! Metadata blocks in memory, for unit tests.

use alloc::collections::{BTreeMap, BTreeSet};
use alloc::sync::Arc;

use crate::block::{BLOCK_BYTES, Block, BlockKind, BlockNo, Ino, MetaBlocks};
use crate::error::FsError;
use crate::format::checksum;
use crate::format::layout::Layout;

/// The layout of a small file system: 64 groups of 32,768 blocks.
pub(crate) fn layout() -> Layout {
    Layout {
        crc32c: riopipe_nvme::digest::soft,
        blocks: 64 * 32_768,
        inodes: 64 * 8192,
        blocks_per_group: 32_768,
        inodes_per_group: 8192,
        groups: 64,
        inode_bytes: 256,
        descriptor_bytes: 64,
        first_ino: Ino(11),
        want_extra_isize: 32,
        flex_groups: 16,
        reserved_blocks: 0,
        reserved_gdt_blocks: 100,
        journal_ino: Ino(8),
        orphan_file: None,
        uuid: *b"0123456789abcdef",
        csum_seed: Some(0x1234_5678),
        gdt_csum: false,
        hash_seed: [1, 2, 3, 4],
        hash_version: 1,
        dir_index: true,
        dir_nlink: true,
        huge_file: true,
        is_64bit: true,
    }
}

/// Block 0 of the file system of [`layout`], with its superblock.
pub(crate) fn superblock() -> Block {
    let layout = layout();
    let mut block = [0; BLOCK_BYTES];
    // Bytes that have no field in this crate, or any content.
    block[2048..].fill(7);
    block[1024 + 0x78..1024 + 0x88].fill(b'l');
    for (at, value) in [
        (0x0, layout.inodes),
        (0x4, layout.blocks as u32),
        (0x18, 2),
        (0x1c, 2),
        (0x20, layout.blocks_per_group),
        (0x24, layout.blocks_per_group),
        (0x28, layout.inodes_per_group),
        (0x38, 0x0001_ef53),
        (0x4c, 1),
        (0x54, layout.first_ino.0),
        (0x58, u32::from(layout.inode_bytes)),
        (0x5c, 0x3c),
        (0x60, 0x22c2),
        (0x64, 0x46b),
        (0xcc, layout.reserved_gdt_blocks << 16),
        (0xe0, layout.journal_ino.0),
        (0xec, 1),
        (0xf0, 2),
        (0xf4, 3),
        (0xf8, 4),
        (0xfc, 0x40_0001),
        (0x15c, 0x0020_0020),
        (0x160, 1),
        (0x174, 0x0104),
        (0x270, layout.csum_seed.expect("metadata_csum")),
    ] {
        block[1024 + at..1024 + at + 4].copy_from_slice(&value.to_le_bytes());
    }
    block[1024 + 0x68..1024 + 0x78].copy_from_slice(&layout.uuid);
    let sum = !(layout.crc32c)(0, &block[1024..1024 + 0x3fc]);
    block[1024 + 0x3fc..2048].copy_from_slice(&sum.to_le_bytes());
    block
}

/// Metadata blocks in memory. Blocks are sealed when they are taken out by
/// [`sealed`](Self::sealed), and allocated from block 1000 on, the lowest free one first.
#[derive(Clone)]
pub(crate) struct MemBlocks {
    pub(crate) layout: Layout,
    blocks: BTreeMap<BlockNo, (BlockKind, Arc<Block>)>,
    free: BTreeSet<BlockNo>,
    next: u64,
    /// Whether a block may be used as another kind than it was written, as it happens with damaged
    /// pointers without checksums.
    pub(crate) any_kind: bool,
    /// How many more blocks may be allocated.
    pub(crate) budget: u64,
    /// The blocks of data that were freed.
    pub(crate) freed_data: BTreeSet<BlockNo>,
}

impl MemBlocks {
    pub(crate) fn new() -> Self {
        Self {
            layout: layout(),
            blocks: BTreeMap::new(),
            free: BTreeSet::new(),
            next: 1000,
            any_kind: false,
            budget: u64::MAX,
            freed_data: BTreeSet::new(),
        }
    }

    /// The number of metadata blocks that exist.
    pub(crate) fn len(&self) -> usize {
        self.blocks.len()
    }

    /// The kind of a block.
    pub(crate) fn kind(&self, at: BlockNo) -> BlockKind {
        self.blocks[&at].0
    }

    /// A block as it would be written.
    pub(crate) fn sealed(&self, at: BlockNo) -> Block {
        let (kind, block) = &self.blocks[&at];
        let mut block = **block;
        checksum::seal(&self.layout, at, *kind, &mut block);
        block
    }

    /// Sets the content of a block, as read from a drive.
    pub(crate) fn set(&mut self, at: BlockNo, kind: BlockKind, block: Block) {
        self.blocks.insert(at, (kind, Arc::new(block)));
    }
}

impl MetaBlocks for MemBlocks {
    fn layout(&self) -> &Layout {
        &self.layout
    }

    fn get(&self, at: BlockNo, kind: BlockKind) -> Result<Arc<Block>, FsError> {
        let (had, block) =
            self.blocks.get(&at).ok_or(FsError::DamagedBlock { what: "pointer", block: at })?;
        assert!(self.any_kind || *had == kind, "block {at} is used as two kinds");
        Ok(Arc::clone(block))
    }

    fn edit(&mut self, at: BlockNo, kind: BlockKind) -> Result<&mut Block, FsError> {
        let (had, block) =
            self.blocks.get_mut(&at).ok_or(FsError::DamagedBlock { what: "pointer", block: at })?;
        assert!(self.any_kind || *had == kind, "block {at} is used as two kinds");
        Ok(Arc::make_mut(block))
    }

    fn create(&mut self, at: BlockNo, kind: BlockKind) -> Result<&mut Block, FsError> {
        self.blocks.insert(at, (kind, Arc::new([0; BLOCK_BYTES])));
        Ok(Arc::make_mut(&mut self.blocks.get_mut(&at).expect("just inserted").1))
    }

    fn allocate(&mut self, _goal: BlockNo) -> Result<BlockNo, FsError> {
        self.budget = self.budget.checked_sub(1).ok_or(FsError::NoSpace)?;
        Ok(self.free.pop_first().unwrap_or_else(|| {
            self.next += 1;
            BlockNo(self.next - 1)
        }))
    }

    fn free_meta(&mut self, at: BlockNo) {
        assert!(self.blocks.remove(&at).is_some(), "block {at} is freed twice");
        self.free.insert(at);
    }

    fn free_data(&mut self, first: BlockNo, blocks: u32) {
        for block in first.0..first.0 + u64::from(blocks) {
            assert!(self.freed_data.insert(BlockNo(block)), "block {block} is freed twice");
        }
    }
}

//! The parameters of a file system that do not change while it is mounted.

use crate::block::{BLOCK_BYTES, BlockNo, Ino};
use riopipe_nvme::digest::Crc32c;

/// The parameters of a file system that do not change while it is mounted.
#[derive(Clone, Debug)]
pub struct Layout {
    /// The function for CRC32C.
    pub crc32c: Crc32c,
    /// The number of blocks.
    pub blocks: u64,
    /// The number of inodes.
    pub inodes: u32,
    /// Blocks of each group; the last one may have fewer.
    pub blocks_per_group: u32,
    /// Inodes of each group.
    pub inodes_per_group: u32,
    /// The number of groups.
    pub groups: u32,
    /// The size of an inode on the drive, in bytes.
    pub inode_bytes: u16,
    /// The size of a group descriptor, in bytes: 32 or 64.
    pub descriptor_bytes: u16,
    /// The first inode for files.
    pub first_ino: Ino,
    /// The bytes of an inode after the first 128 that new inodes use for fields.
    pub want_extra_isize: u16,
    /// Groups in a flexible group, a power of two; 1 without `flex_bg`.
    pub flex_groups: u32,
    /// Blocks that only root may use.
    pub reserved_blocks: u64,
    /// Blocks after the group descriptors that are kept for more descriptors, in each group with a
    /// copy of the superblock.
    pub reserved_gdt_blocks: u32,
    /// The inode of the journal.
    pub journal_ino: Ino,
    /// The file that lists orphans: `orphan_file`.
    pub orphan_file: Option<Ino>,
    /// The UUID.
    pub uuid: [u8; 16],
    /// The seed of metadata checksums; `None` without `metadata_csum`.
    pub csum_seed: Option<u32>,
    /// Whether group descriptors have a CRC16: `uninit_bg` without `metadata_csum`.
    pub gdt_csum: bool,
    /// The seed of the hashes of names.
    pub hash_seed: [u32; 4],
    /// The version of the hash that new directories use: 0 legacy, 1 half MD4, 2 TEA. 3 is added
    /// for bytes without sign.
    pub hash_version: u8,
    /// Whether directories may have a hash tree: `dir_index`.
    pub dir_index: bool,
    /// Whether a directory may have more than 64,998 subdirectories: `dir_nlink`.
    pub dir_nlink: bool,
    /// Whether an inode may count its blocks in blocks instead of sectors: `huge_file`.
    pub huge_file: bool,
    /// Whether there are block and inode numbers beyond 32 bits in descriptors: `64bit`.
    pub is_64bit: bool,
}

impl Layout {
    /// Whether `at` is a block of the file system.
    #[must_use]
    pub const fn contains(&self, at: BlockNo) -> bool {
        at.0 < self.blocks
    }

    /// The group of a block.
    #[must_use]
    pub fn group_of_block(&self, at: BlockNo) -> u32 {
        u32::try_from(at.0 / u64::from(self.blocks_per_group)).unwrap_or(u32::MAX)
    }

    /// The group of an inode, and its index in the group.
    ///
    /// Panics for inode 0, which is none.
    #[must_use]
    pub const fn group_of_inode(&self, ino: Ino) -> (u32, u32) {
        let index = ino.0 - 1;
        (index / self.inodes_per_group, index % self.inodes_per_group)
    }

    /// The first block of a group.
    #[must_use]
    pub fn first_block(&self, group: u32) -> BlockNo {
        BlockNo(u64::from(group) * u64::from(self.blocks_per_group))
    }

    /// The number of blocks of a group, of which only the last may have fewer than the others; 0
    /// for a group that does not exist.
    #[must_use]
    pub fn blocks_in_group(&self, group: u32) -> u32 {
        let left = self.blocks.saturating_sub(self.first_block(group).0);
        u32::try_from(left).unwrap_or(u32::MAX).min(self.blocks_per_group)
    }

    /// The number of blocks of the table of all group descriptors. The first one is block 1.
    #[must_use]
    pub const fn gdt_blocks(&self) -> u32 {
        self.groups.div_ceil(self.descriptors_per_block())
    }

    /// Group descriptors in a block.
    #[must_use]
    pub const fn descriptors_per_block(&self) -> u32 {
        BLOCK_BYTES as u32 / self.descriptor_bytes as u32
    }

    /// The block of a group's descriptor, and its offset in that block in bytes.
    #[must_use]
    pub fn descriptor_at(&self, group: u32) -> (BlockNo, usize) {
        let per_block = self.descriptors_per_block();
        let offset = (group % per_block) as usize * usize::from(self.descriptor_bytes);
        (BlockNo(1 + u64::from(group / per_block)), offset)
    }

    /// The number of blocks of the inode table of a group.
    #[must_use]
    pub const fn inode_table_blocks(&self) -> u32 {
        self.inodes_per_group.div_ceil(self.inodes_per_block())
    }

    /// Whether a group has a copy of the superblock and of the group descriptors: groups 0 and 1, and
    /// the powers of 3, 5 and 7.
    #[must_use]
    pub const fn has_superblock(&self, group: u32) -> bool {
        const fn is_power(of: u32, mut n: u32) -> bool {
            while n > 1 && n.is_multiple_of(of) {
                n /= of;
            }
            n == 1
        }
        group == 0 || is_power(3, group) || is_power(5, group) || is_power(7, group)
    }

    /// The blocks at the start of a group that have copies of the superblock and of the group
    /// descriptors, with the space for more descriptors; 0 in groups without.
    #[must_use]
    pub const fn superblock_blocks(&self, group: u32) -> u32 {
        if self.has_superblock(group) {
            1 + self.gdt_blocks() + self.reserved_gdt_blocks
        } else {
            0
        }
    }

    /// Whether groups may have parts that are not initialised: `metadata_csum` or `uninit_bg`.
    #[must_use]
    pub const fn has_group_csum(&self) -> bool {
        self.csum_seed.is_some() || self.gdt_csum
    }

    /// The most sectors of 512 bytes that an inode can count.
    #[must_use]
    pub const fn max_sectors(&self) -> u64 {
        if self.huge_file { ((1 << 48) - 1) * (BLOCK_BYTES as u64 / 512) } else { (1 << 32) - 1 }
    }

    /// Inodes in a block.
    #[must_use]
    pub const fn inodes_per_block(&self) -> u32 {
        BLOCK_BYTES as u32 / self.inode_bytes as u32
    }

    /// The seed of the checksums of an inode and of the blocks that belong to it; 0 without
    /// `metadata_csum`.
    #[must_use]
    pub fn inode_seed(&self, ino: Ino, generation: u32) -> u32 {
        self.csum_seed.map_or(0, |seed| {
            let seed = self.crc(seed, &ino.0.to_le_bytes());
            self.crc(seed, &generation.to_le_bytes())
        })
    }

    /// CRC32C as ext4 has it: continues from `seed`, without the complement at the beginning and at
    /// the end.
    #[must_use]
    pub fn crc(&self, seed: u32, data: &[u8]) -> u32 {
        !(self.crc32c)(!seed, data)
    }
}

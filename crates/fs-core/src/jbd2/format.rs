//! The blocks of jbd2's format. Numbers are big endian.

use alloc::boxed::Box;
use alloc::vec::Vec;

use crate::block::{BLOCK_BYTES, Block, BlockNo};
use crate::format::layout::Layout;

/// The magic number of all blocks of the journal but those of data (`JBD2_MAGIC_NUMBER`).
pub const MAGIC: u32 = 0xc03b_3998;

/// The types of blocks (`h_blocktype`).
pub mod block_type {
    /// The blocks that follow, and where they belong.
    pub const DESCRIPTOR: u32 = 1;
    /// The end of a transaction.
    pub const COMMIT: u32 = 2;
    /// A superblock without features.
    pub const SUPERBLOCK_V1: u32 = 3;
    /// The superblock.
    pub const SUPERBLOCK_V2: u32 = 4;
    /// Blocks of which older copies are not replayed.
    pub const REVOKE: u32 = 5;
}

/// Incompatible features of a journal.
pub mod feature {
    /// There may be revoke blocks.
    pub const REVOKE: u32 = 0x1;
    /// Block numbers have 64 bits.
    pub const IS_64BIT: u32 = 0x2;
    /// A commit block may be written before the blocks of its transaction.
    pub const ASYNC_COMMIT: u32 = 0x4;
    /// Checksums of 16 bits.
    pub const CSUM_V2: u32 = 0x8;
    /// Checksums of 32 bits.
    pub const CSUM_V3: u32 = 0x10;
    /// Fast commits.
    pub const FAST_COMMIT: u32 = 0x20;
    /// All that RioFS reads.
    pub const KNOWN: u32 = REVOKE | IS_64BIT | ASYNC_COMMIT | CSUM_V2 | CSUM_V3;
}

/// Flags of a tag.
pub mod tag_flag {
    /// The block begins with the magic number, which is zeroed in the journal.
    pub const ESCAPE: u32 = 1;
    /// No UUID follows.
    pub const SAME_UUID: u32 = 2;
    /// The block was deleted later in the transaction.
    pub const DELETED: u32 = 4;
    /// The last tag of the block.
    pub const LAST_TAG: u32 = 8;
}

/// The length of the header of a block, in bytes.
pub const HEADER_BYTES: usize = 12;
/// The length of the header of a revoke block, in bytes.
pub const REVOKE_HEADER_BYTES: usize = 16;
/// The length of the checksum at the end of descriptor and revoke blocks, in bytes.
pub const TAIL_BYTES: usize = 4;

const SUPERBLOCK_BYTES: usize = 1024;
const SUPERBLOCK_CHECKSUM: usize = 0xfc;
const CRC32C_TYPE: u8 = 4;

pub(super) fn u32_at(data: &[u8], at: usize) -> u32 {
    u32::from_be_bytes([data[at], data[at + 1], data[at + 2], data[at + 3]])
}

pub(super) fn u16_at(data: &[u8], at: usize) -> u16 {
    u16::from_be_bytes([data[at], data[at + 1]])
}

pub(super) fn set_u32(data: &mut [u8], at: usize, value: u32) {
    data[at..at + 4].copy_from_slice(&value.to_be_bytes());
}

pub(super) fn set_u16(data: &mut [u8], at: usize, value: u16) {
    data[at..at + 2].copy_from_slice(&value.to_be_bytes());
}

/// Why a journal can't be used.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum JournalError {
    /// The first block is no superblock of a journal.
    #[error("its superblock is damaged: run e2fsck")]
    NoSuperblock,
    /// It has no features, as of ext3 before 2001.
    #[error("its format is version 1, which RioFS does not support")]
    Version1,
    /// The checksum of the superblock is wrong.
    #[error("the checksum of its superblock is wrong: run e2fsck")]
    Checksum,
    /// Its blocks have another size.
    #[error("its blocks have {0} bytes instead of 4096")]
    BlockBytes(u32),
    /// A feature is not supported.
    #[error("it has the unsupported feature {0}")]
    Feature(&'static str),
    /// It has unknown features.
    #[error("it has unknown features: {0:#x}")]
    UnknownFeatures(u32),
    /// A number is out of range.
    #[error("its superblock has a wrong {0}: run e2fsck")]
    Damaged(&'static str),
    /// A block of a committed transaction is damaged.
    #[error("block {block} of committed transaction {tid} is damaged: run e2fsck")]
    DamagedBlock {
        /// The block of the file system.
        block: BlockNo,
        /// The transaction.
        tid: u32,
    },
    /// The journal is too short.
    #[error(
        "it has {blocks} blocks, and RioFS needs {needed} at least: make it larger (tune2fs -J)"
    )]
    TooSmall {
        /// The blocks of the journal.
        blocks: u32,
        /// The blocks that are needed.
        needed: u32,
    },
}

/// The superblock of a journal: a copy of its bytes.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct JournalSuperblock {
    raw: Box<Block>,
}

macro_rules! fields {
    ($($(#[$doc:meta])* $name:ident / $set_name:ident at $at:literal;)*) => {
        impl JournalSuperblock {
            $(
                $(#[$doc])*
                #[must_use]
                pub fn $name(&self) -> u32 {
                    u32_at(&self.raw[..], $at)
                }

                /// Sets the field; see the reader of the same name.
                pub fn $set_name(&mut self, value: u32) {
                    set_u32(&mut self.raw[..], $at, value);
                }
            )*
        }
    };
}

fields! {
    /// The blocks of the journal (`s_maxlen`).
    maxlen / set_maxlen at 0x10;
    /// The first block of the log (`s_first`).
    first / set_first at 0x14;
    /// The first transaction in the log (`s_sequence`).
    sequence / set_sequence at 0x18;
    /// Where the log begins; 0: it is empty (`s_start`).
    start / set_start at 0x1c;
    /// The error that has aborted the journal (`s_errno`).
    errno / set_errno at 0x20;
    /// Incompatible features; see [`feature`].
    incompat / set_incompat at 0x28;
    /// Blocks for fast commits (`s_num_fc_blks`).
    fast_commit_blocks / set_fast_commit_blocks at 0x54;
}

impl JournalSuperblock {
    /// Reads the first block of a journal with `blocks` blocks.
    ///
    /// # Errors
    /// The journal can't be used.
    pub fn decode(layout: &Layout, block: &Block, blocks: u32) -> Result<Self, JournalError> {
        if u32_at(block, 0) != MAGIC {
            return Err(JournalError::NoSuperblock);
        }
        match u32_at(block, 4) {
            block_type::SUPERBLOCK_V2 => {}
            block_type::SUPERBLOCK_V1 => return Err(JournalError::Version1),
            _ => return Err(JournalError::NoSuperblock),
        }
        let superblock = Self { raw: Box::new(*block) };
        if superblock.has_csum() {
            let checksum = u32_at(block, SUPERBLOCK_CHECKSUM);
            if superblock.checksum(layout) != checksum || block[0x50] != CRC32C_TYPE {
                return Err(JournalError::Checksum);
            }
        }
        let bytes = u32_at(block, 0x0c);
        if bytes as usize != BLOCK_BYTES {
            return Err(JournalError::BlockBytes(bytes));
        }
        let incompat = superblock.incompat();
        if incompat & feature::FAST_COMMIT != 0 {
            return Err(JournalError::Feature("fast_commit"));
        }
        if incompat & !feature::KNOWN != 0 {
            return Err(JournalError::UnknownFeatures(incompat & !feature::KNOWN));
        }
        if u32_at(block, 0x2c) != 0 {
            return Err(JournalError::UnknownFeatures(u32_at(block, 0x2c)));
        }
        let (first, maxlen, start) = (superblock.first(), superblock.maxlen(), superblock.start());
        if maxlen > blocks || maxlen <= first {
            return Err(JournalError::Damaged("length"));
        }
        if first == 0 {
            return Err(JournalError::Damaged("first block"));
        }
        if start != 0 && !(first..maxlen).contains(&start) {
            return Err(JournalError::Damaged("start of the log"));
        }
        Ok(superblock)
    }

    /// The superblock as a block, with its checksum.
    #[must_use]
    pub fn encode(&self, layout: &Layout) -> Block {
        let mut block = *self.raw;
        if self.has_csum() {
            block[0x50] = CRC32C_TYPE;
            let sealed = Self { raw: Box::new(block) };
            set_u32(&mut block, SUPERBLOCK_CHECKSUM, sealed.checksum(layout));
        }
        block
    }

    fn checksum(&self, layout: &Layout) -> u32 {
        let mut raw = *self.raw;
        set_u32(&mut raw, SUPERBLOCK_CHECKSUM, 0);
        layout.crc(!0, &raw[..SUPERBLOCK_BYTES])
    }

    /// Whether blocks have checksums.
    #[must_use]
    pub fn has_csum(&self) -> bool {
        self.incompat() & (feature::CSUM_V2 | feature::CSUM_V3) != 0
    }

    /// The shape of the blocks of this journal.
    #[must_use]
    pub fn shape(&self, layout: &Layout) -> Shape {
        let incompat = self.incompat();
        Shape {
            csum_v2: incompat & feature::CSUM_V2 != 0 && incompat & feature::CSUM_V3 == 0,
            csum_v3: incompat & feature::CSUM_V3 != 0,
            is_64bit: incompat & feature::IS_64BIT != 0,
            seed: layout.crc(!0, &self.raw[0x30..0x40]),
        }
    }
}

/// The shape of the blocks of a journal, which its features decide.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Shape {
    /// Checksums of 16 bits.
    pub csum_v2: bool,
    /// Checksums of 32 bits.
    pub csum_v3: bool,
    /// Block numbers of 64 bits.
    pub is_64bit: bool,
    /// The seed of all checksums.
    pub seed: u32,
}

/// A tag of a descriptor block.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Tag {
    /// The block of the file system.
    pub block: BlockNo,
    /// See [`tag_flag`].
    pub flags: u32,
    /// The checksum of the block in the journal: 32 bits, or 16, or none.
    pub checksum: u32,
}

impl Shape {
    /// Whether blocks have checksums.
    #[must_use]
    pub const fn has_csum(&self) -> bool {
        self.csum_v2 || self.csum_v3
    }

    /// The length of a tag without a UUID, in bytes.
    #[must_use]
    pub const fn tag_bytes(&self) -> usize {
        match (self.csum_v3, self.csum_v2, self.is_64bit) {
            (true, ..) => 16,
            (_, true, true) => 14,
            (_, true, false) => 10,
            (_, _, true) => 12,
            (_, _, false) => 8,
        }
    }

    /// The end of the tags or revoked blocks, in bytes.
    #[must_use]
    pub const fn end(&self) -> usize {
        BLOCK_BYTES - if self.has_csum() { TAIL_BYTES } else { 0 }
    }

    /// The number of tags of a descriptor block. The first one has a UUID.
    #[must_use]
    pub const fn tags_max(&self) -> usize {
        (self.end() - HEADER_BYTES - 16) / self.tag_bytes()
    }

    /// The length of a revoked block's number, in bytes.
    #[must_use]
    pub const fn revoked_bytes(&self) -> usize {
        if self.is_64bit { 8 } else { 4 }
    }

    /// The number of revoked blocks of a revoke block.
    #[must_use]
    pub const fn revoked_max(&self) -> usize {
        (self.end() - REVOKE_HEADER_BYTES) / self.revoked_bytes()
    }

    /// The checksum of a block of data in the journal.
    #[must_use]
    pub fn data_checksum(&self, layout: &Layout, sequence: u32, data: &Block) -> u32 {
        let crc = layout.crc(layout.crc(self.seed, &sequence.to_be_bytes()), data);
        if self.csum_v3 { crc } else { crc & 0xffff }
    }

    /// The tags of a descriptor block; those before damage.
    #[must_use]
    pub fn tags(&self, block: &Block) -> Vec<Tag> {
        let mut tags = Vec::new();
        let mut at = HEADER_BYTES;
        while at + self.tag_bytes() <= self.end() {
            let low = u64::from(u32_at(block, at));
            let (flags, high, checksum) = if self.csum_v3 {
                (u32_at(block, at + 4), u32_at(block, at + 8), u32_at(block, at + 12))
            } else {
                let high = if self.is_64bit { u32_at(block, at + 8) } else { 0 };
                let checksum = u32::from(u16_at(block, at + 4));
                (u32::from(u16_at(block, at + 6)), high, checksum)
            };
            let high = if self.is_64bit { u64::from(high) << 32 } else { 0 };
            tags.push(Tag { block: BlockNo(low | high), flags, checksum });
            if flags & tag_flag::LAST_TAG != 0 {
                break;
            }
            at += self.tag_bytes() + if flags & tag_flag::SAME_UUID == 0 { 16 } else { 0 };
        }
        tags
    }

    /// A descriptor block. There are [`tags_max`](Self::tags_max) tags at most.
    #[must_use]
    pub fn descriptor(
        &self,
        layout: &Layout,
        sequence: u32,
        tags: &[Tag],
        uuid: &[u8; 16],
    ) -> Block {
        let mut block = header(block_type::DESCRIPTOR, sequence);
        let mut at = HEADER_BYTES;
        for (index, tag) in tags.iter().enumerate() {
            let mut flags = tag.flags;
            if index > 0 {
                flags |= tag_flag::SAME_UUID;
            }
            if index + 1 == tags.len() {
                flags |= tag_flag::LAST_TAG;
            }
            set_u32(&mut block, at, tag.block.0 as u32);
            let high = (tag.block.0 >> 32) as u32;
            if self.csum_v3 {
                set_u32(&mut block, at + 4, flags);
                set_u32(&mut block, at + 8, high);
                set_u32(&mut block, at + 12, tag.checksum);
            } else {
                set_u16(&mut block, at + 4, tag.checksum as u16);
                set_u16(&mut block, at + 6, flags as u16);
                if self.is_64bit {
                    set_u32(&mut block, at + 8, high);
                }
            }
            at += self.tag_bytes();
            if index == 0 {
                block[at..at + 16].copy_from_slice(uuid);
                at += 16;
            }
        }
        self.seal_tail(layout, &mut block);
        block
    }

    /// A revoke block. There are [`revoked_max`](Self::revoked_max) blocks at most.
    #[must_use]
    pub fn revoke(&self, layout: &Layout, sequence: u32, revoked: &[BlockNo]) -> Block {
        let mut block = header(block_type::REVOKE, sequence);
        let mut at = REVOKE_HEADER_BYTES;
        for revoked in revoked {
            if self.is_64bit {
                block[at..at + 8].copy_from_slice(&revoked.0.to_be_bytes());
            } else {
                set_u32(&mut block, at, revoked.0 as u32);
            }
            at += self.revoked_bytes();
        }
        set_u32(&mut block, HEADER_BYTES, at as u32);
        self.seal_tail(layout, &mut block);
        block
    }

    /// The blocks of a revoke block; `None` if it is damaged.
    #[must_use]
    pub fn revoked(&self, block: &Block) -> Option<Vec<BlockNo>> {
        let used = block.get(REVOKE_HEADER_BYTES..u32_at(block, HEADER_BYTES) as usize)?;
        if used.len() > self.end() - REVOKE_HEADER_BYTES {
            return None;
        }
        let entries = used.chunks_exact(self.revoked_bytes());
        let number =
            |entry: &[u8]| entry.iter().fold(0, |number, &byte| number << 8 | u64::from(byte));
        Some(entries.map(|entry| BlockNo(number(entry))).collect())
    }

    /// A commit block.
    #[must_use]
    pub fn commit(&self, layout: &Layout, sequence: u32, seconds: u64) -> Block {
        let mut block = header(block_type::COMMIT, sequence);
        block[0x30..0x38].copy_from_slice(&seconds.to_be_bytes());
        if self.has_csum() {
            let crc = layout.crc(self.seed, &block);
            set_u32(&mut block, 0x10, crc);
        }
        block
    }

    /// Whether the checksum of a commit block is right.
    #[must_use]
    pub fn is_commit_sound(&self, layout: &Layout, block: &Block) -> bool {
        let mut copy = *block;
        set_u32(&mut copy, 0x10, 0);
        !self.has_csum() || layout.crc(self.seed, &copy) == u32_at(block, 0x10)
    }

    fn seal_tail(&self, layout: &Layout, block: &mut Block) {
        if self.has_csum() {
            let crc = layout.crc(self.seed, &block[..]);
            set_u32(block, BLOCK_BYTES - TAIL_BYTES, crc);
        }
    }

    /// Whether the checksum of a descriptor or revoke block is right.
    #[must_use]
    pub fn is_tail_sound(&self, layout: &Layout, block: &Block) -> bool {
        let mut copy = *block;
        set_u32(&mut copy, BLOCK_BYTES - TAIL_BYTES, 0);
        let tail = u32_at(block, BLOCK_BYTES - TAIL_BYTES);
        !self.has_csum() || layout.crc(self.seed, &copy) == tail
    }
}

fn header(block_type: u32, sequence: u32) -> Block {
    let mut block = [0; BLOCK_BYTES];
    set_u32(&mut block, 0, MAGIC);
    set_u32(&mut block, 4, block_type);
    set_u32(&mut block, 8, sequence);
    block
}

/// Whether a block begins with the magic number, and must be escaped in the journal.
#[must_use]
pub fn needs_escape(block: &Block) -> bool {
    u32_at(block, 0) == MAGIC
}

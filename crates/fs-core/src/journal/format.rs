//! The blocks of a journal. Numbers are big endian.
//!
//! Each block but the copies of metadata begins with a header: the magic number, the type of the
//! block, the number of the transaction. A copy that happens to begin with the magic number is
//! *escaped*: its first four bytes are zeroed, and its tag has a flag.

use alloc::vec::Vec;

use crate::block::{BLOCK_BYTES, Block, BlockNo};
use crate::error::FsError;
use riopipe_nvme::digest::Crc32c;

mod superblock;

pub use superblock::{JournalSuperblock, compat, incompat};

#[cfg(test)]
pub(super) use superblock::tests as tests_support;

/// The magic number (`JBD2_MAGIC_NUMBER`).
pub const MAGIC: u32 = 0xc03b_3998;

/// The types of blocks (`h_blocktype`).
pub mod block_type {
    /// The blocks whose copies follow.
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

/// The flags of a tag.
mod tag_flag {
    /// The copy is escaped.
    pub(super) const ESCAPE: u32 = 1;
    /// No UUID follows.
    pub(super) const SAME_UUID: u32 = 2;
    /// The last tag of the block.
    pub(super) const LAST_TAG: u32 = 8;
    // 4 stands for a block that was deleted. No program writes it, and all ignore it.
}

/// The length of a header, in bytes.
const HEADER_BYTES: usize = 12;
/// The length of a header with the number of used bytes, of a revoke block.
const REVOKE_HEADER_BYTES: usize = 16;
/// The length of the checksum at the end of descriptor and revoke blocks.
const TAIL_BYTES: usize = 4;
const UUID_BYTES: usize = 16;

const COMMIT_CHECKSUM: usize = 0x10;
const COMMIT_SECONDS: usize = 0x30;

/// Why a journal can't be used.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum JournalError {
    /// The first block is no superblock of a journal.
    #[error("the journal has no superblock")]
    NoSuperblock,
    /// The superblock has no features, as of kernels before 2001.
    #[error(
        "the journal has the old format v1: make a new one with tune2fs -O ^has_journal, \
             then tune2fs -j"
    )]
    Version1,
    /// The checksum of the superblock is wrong.
    #[error("the checksum of the journal's superblock is wrong")]
    Checksum,
    /// Its blocks have another size.
    #[error("the journal has blocks of {0} bytes instead of 4096")]
    BlockBytes(u32),
    /// A feature is not supported.
    #[error(
        "the journal has the feature {0}, which RioFS does not support: mount and unmount it \
             with Linux, or run e2fsck"
    )]
    Feature(&'static str),
    /// Features without a name here.
    #[error("the journal has unknown features: incompat {incompat:#x}, ro_compat {ro_compat:#x}")]
    UnknownFeatures {
        /// The unknown incompatible features.
        incompat: u32,
        /// The unknown features that forbid writing.
        ro_compat: u32,
    },
    /// A field of the superblock has a value that can't be.
    #[error("the journal's {0} can't be right")]
    Damaged(&'static str),
    /// A block of a committed transaction is damaged, so that what it and later ones have changed
    /// can't be recovered.
    #[error("{what} of committed transaction {sequence} is damaged in the journal")]
    DamagedTransaction {
        /// The block.
        what: DamagedPart,
        /// The number of the transaction.
        sequence: u32,
    },
    /// The journal is too short.
    #[error(
        "the journal has {blocks} blocks, and {needed} are needed: make a larger one with \
             tune2fs -O ^has_journal, then tune2fs -J size="
    )]
    TooSmall {
        /// The blocks that it has.
        blocks: u32,
        /// The blocks that are needed.
        needed: u32,
    },
    /// A transaction does not fit into the whole journal.
    #[error("a transaction needs {needed} blocks of the journal, which has {blocks}")]
    TooLarge {
        /// The blocks that can be used.
        blocks: usize,
        /// The blocks that are needed.
        needed: usize,
    },
    /// A block of the journal can't be read.
    #[error("the journal can't be read: {0}")]
    Read(#[from] FsError),
}

impl JournalError {
    /// Whether a structure on the drive is damaged.
    #[must_use]
    pub const fn is_damage(&self) -> bool {
        match self {
            Self::NoSuperblock
            | Self::Checksum
            | Self::BlockBytes(_)
            | Self::Damaged(_)
            | Self::DamagedTransaction { .. } => true,
            Self::Read(error) => error.is_damage(),
            Self::Version1
            | Self::Feature(_)
            | Self::UnknownFeatures { .. }
            | Self::TooSmall { .. }
            | Self::TooLarge { .. } => false,
        }
    }
}

/// A damaged part of a transaction.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum DamagedPart {
    /// A descriptor block, in block `.0` of the journal.
    Descriptor(u32),
    /// A revoke block, in block `.0` of the journal.
    Revoke(u32),
    /// The commit block, in block `.0` of the journal.
    Commit(u32),
    /// The copy of block `.0` of the file system.
    Copy(BlockNo),
    /// The tag of block `.0`, which is not a block of the file system.
    Tag(BlockNo),
}

impl core::fmt::Display for DamagedPart {
    fn fmt(&self, f: &mut core::fmt::Formatter<'_>) -> core::fmt::Result {
        match self {
            Self::Descriptor(at) => write!(f, "descriptor block {at}"),
            Self::Revoke(at) => write!(f, "revoke block {at}"),
            Self::Commit(at) => write!(f, "commit block {at}"),
            Self::Copy(at) => write!(f, "the copy of block {at}"),
            Self::Tag(at) => write!(f, "the number of block {at}"),
        }
    }
}

/// The 32-bit number at `at`. The caller knows that it lies in `data`.
pub(super) fn u32_at(data: &[u8], at: usize) -> u32 {
    u32::from_be_bytes([data[at], data[at + 1], data[at + 2], data[at + 3]])
}

fn u16_at(data: &[u8], at: usize) -> u16 {
    u16::from_be_bytes([data[at], data[at + 1]])
}

fn u64_at(data: &[u8], at: usize) -> u64 {
    u64::from(u32_at(data, at)) << 32 | u64::from(u32_at(data, at + 4))
}

/// Writes the 32-bit number at `at`. The caller knows that it lies in `data`.
fn set_u32(data: &mut [u8], at: usize, value: u32) {
    data[at..at + 4].copy_from_slice(&value.to_be_bytes());
}

fn set_u16(data: &mut [u8], at: usize, value: u16) {
    data[at..at + 2].copy_from_slice(&value.to_be_bytes());
}

fn set_u64(data: &mut [u8], at: usize, value: u64) {
    data[at..at + 8].copy_from_slice(&value.to_be_bytes());
}

/// The checksums of a journal.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Checksums {
    /// None.
    None,
    /// 32 bits, but 16 for copies of metadata (`csum_v2`). Only read.
    V2,
    /// 32 bits (`csum_v3`).
    V3,
}

/// The shape of a journal's blocks, which its features decide.
#[derive(Clone, Copy, Debug)]
pub struct Shape {
    /// The checksums.
    pub checksums: Checksums,
    /// Block numbers have 64 bits.
    pub is_64bit: bool,
    /// The UUID of the journal, with which descriptor blocks begin.
    pub uuid: [u8; 16],
    crc32c: Crc32c,
    /// The seed of all checksums.
    seed: u32,
}

/// A header.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Header {
    /// See [`block_type`].
    pub block_type: u32,
    /// The number of the transaction.
    pub sequence: u32,
}

impl Header {
    /// The header of a block; `None` if the block has none.
    #[must_use]
    pub fn decode(block: &Block) -> Option<Self> {
        (u32_at(block, 0) == MAGIC)
            .then(|| Self { block_type: u32_at(block, 4), sequence: u32_at(block, 8) })
    }

    fn block(self) -> Block {
        let mut block = [0; BLOCK_BYTES];
        set_u32(&mut block, 0, MAGIC);
        set_u32(&mut block, 4, self.block_type);
        set_u32(&mut block, 8, self.sequence);
        block
    }
}

/// A tag: the block of which a copy follows its descriptor block.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Tag {
    /// The block of the file system.
    pub at: BlockNo,
    /// The copy is escaped.
    pub is_escaped: bool,
    /// The checksum of the copy: 32 bits, or 16, or 0 without checksums.
    pub checksum: u32,
}

/// Whether a block begins with the magic number, so that its copy must be escaped.
#[must_use]
pub fn needs_escape(block: &Block) -> bool {
    u32_at(block, 0) == MAGIC
}

/// Escapes a copy.
pub fn escape(block: &mut Block) {
    set_u32(block, 0, 0);
}

/// Makes the block of an escaped copy.
pub fn unescape(block: &mut Block) {
    set_u32(block, 0, MAGIC);
}

impl Shape {
    pub(super) fn new(
        checksums: Checksums,
        is_64bit: bool,
        uuid: [u8; 16],
        crc32c: Crc32c,
    ) -> Self {
        let mut shape = Self { checksums, is_64bit, uuid, crc32c, seed: 0 };
        shape.seed = shape.crc(!0, &uuid);
        shape
    }

    /// CRC32C without the complement at the beginning and at the end, as in the rest of ext4.
    fn crc(&self, seed: u32, data: &[u8]) -> u32 {
        !(self.crc32c)(!seed, data)
    }

    /// Whether blocks have checksums.
    #[must_use]
    pub fn has_checksums(&self) -> bool {
        self.checksums != Checksums::None
    }

    /// The length of a tag without a UUID, in bytes.
    const fn tag_bytes(&self) -> usize {
        match (self.checksums, self.is_64bit) {
            (Checksums::V3, _) => 16,
            (Checksums::V2, true) => 14,
            (Checksums::V2, false) => 10,
            (Checksums::None, true) => 12,
            (Checksums::None, false) => 8,
        }
    }

    /// The length of a revoked block's number, in bytes.
    const fn revoked_bytes(&self) -> usize {
        if self.is_64bit { 8 } else { 4 }
    }

    /// The end of the tags, or of the revoked blocks, in a block.
    const fn content_end(&self) -> usize {
        match self.checksums {
            Checksums::None => BLOCK_BYTES,
            Checksums::V2 | Checksums::V3 => BLOCK_BYTES - TAIL_BYTES,
        }
    }

    /// The most tags in a descriptor block: as many as the kernel puts there. It leaves space for
    /// another UUID.
    #[must_use]
    pub const fn tags_max(&self) -> usize {
        (self.content_end() - HEADER_BYTES - 2 * UUID_BYTES) / self.tag_bytes()
    }

    /// The most revoked blocks in a revoke block.
    #[must_use]
    pub const fn revoked_max(&self) -> usize {
        (self.content_end() - REVOKE_HEADER_BYTES) / self.revoked_bytes()
    }

    /// The checksum of a copy, which is escaped if need be; 0 without checksums.
    #[must_use]
    pub fn copy_checksum(&self, sequence: u32, copy: &Block) -> u32 {
        let crc = || self.crc(self.crc(self.seed, &sequence.to_be_bytes()), copy);
        match self.checksums {
            Checksums::None => 0,
            Checksums::V2 => crc() & 0xffff,
            Checksums::V3 => crc(),
        }
    }

    /// The descriptor block of these tags.
    ///
    /// Panics for more than [`tags_max`](Self::tags_max).
    #[must_use]
    pub fn descriptor(&self, sequence: u32, tags: &[Tag]) -> Block {
        assert!(tags.len() <= self.tags_max(), "the tags fit");
        let mut block = Header { block_type: block_type::DESCRIPTOR, sequence }.block();
        let mut at = HEADER_BYTES;
        for (index, tag) in tags.iter().enumerate() {
            let mut flags = 0;
            if tag.is_escaped {
                flags |= tag_flag::ESCAPE;
            }
            if index > 0 {
                flags |= tag_flag::SAME_UUID;
            }
            if index + 1 == tags.len() {
                flags |= tag_flag::LAST_TAG;
            }
            let [low, high] = [tag.at.0 as u32, (tag.at.0 >> 32) as u32];
            set_u32(&mut block, at, low);
            if self.checksums == Checksums::V3 {
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
                block[at..at + UUID_BYTES].copy_from_slice(&self.uuid);
                at += UUID_BYTES;
            }
        }
        self.seal(&mut block);
        block
    }

    /// The tags of a descriptor block. Without an end they fill the block.
    #[must_use]
    pub fn tags(&self, block: &Block) -> Vec<Tag> {
        let mut tags = Vec::new();
        let mut at = HEADER_BYTES;
        while at + self.tag_bytes() <= self.content_end() {
            let low = u64::from(u32_at(block, at));
            // All flags are in the same 16 bits in each shape.
            let flags = u32::from(u16_at(block, at + 6));
            let high = if self.is_64bit { u64::from(u32_at(block, at + 8)) << 32 } else { 0 };
            let checksum = match self.checksums {
                Checksums::None => 0,
                Checksums::V2 => u32::from(u16_at(block, at + 4)),
                Checksums::V3 => u32_at(block, at + 12),
            };
            let is_escaped = flags & tag_flag::ESCAPE != 0;
            tags.push(Tag { at: BlockNo(low | high), is_escaped, checksum });
            if flags & tag_flag::LAST_TAG != 0 {
                break;
            }
            at += self.tag_bytes();
            if flags & tag_flag::SAME_UUID == 0 {
                at += UUID_BYTES;
            }
        }
        tags
    }

    /// The revoke block of these blocks.
    ///
    /// Panics for more than [`revoked_max`](Self::revoked_max).
    #[must_use]
    pub fn revoke(&self, sequence: u32, revoked: &[BlockNo]) -> Block {
        assert!(revoked.len() <= self.revoked_max(), "the revoked blocks fit");
        let mut block = Header { block_type: block_type::REVOKE, sequence }.block();
        let mut at = REVOKE_HEADER_BYTES;
        for revoked in revoked {
            if self.is_64bit {
                set_u64(&mut block, at, revoked.0);
            } else {
                set_u32(&mut block, at, revoked.0 as u32);
            }
            at += self.revoked_bytes();
        }
        set_u32(&mut block, HEADER_BYTES, at as u32);
        self.seal(&mut block);
        block
    }

    /// The blocks of a revoke block; `None` if their number can't be right.
    #[must_use]
    pub fn revoked(&self, block: &Block) -> Option<Vec<BlockNo>> {
        let used = u32_at(block, HEADER_BYTES) as usize;
        if used > self.content_end() {
            return None;
        }
        let entries = block.get(REVOKE_HEADER_BYTES..used)?.chunks_exact(self.revoked_bytes());
        let number = |entry| if self.is_64bit { u64_at(entry, 0) } else { u32_at(entry, 0).into() };
        Some(entries.map(|entry| BlockNo(number(entry))).collect())
    }

    /// The commit block of a transaction that ends at this time.
    #[must_use]
    pub fn commit(&self, sequence: u32, seconds: u64) -> Block {
        let mut block = Header { block_type: block_type::COMMIT, sequence }.block();
        set_u64(&mut block, COMMIT_SECONDS, seconds);
        if self.has_checksums() {
            let checksum = self.crc(self.seed, &block);
            set_u32(&mut block, COMMIT_CHECKSUM, checksum);
        }
        block
    }

    /// The time in a commit block, in seconds.
    #[must_use]
    pub fn commit_seconds(block: &Block) -> u64 {
        u64_at(block, COMMIT_SECONDS)
    }

    /// Whether the checksum of a commit block is right. It is without checksums.
    #[must_use]
    pub fn is_sound_commit(&self, block: &Block) -> bool {
        self.is_sound(block, COMMIT_CHECKSUM)
    }

    /// Whether the checksum of a descriptor or revoke block is right. It is without checksums.
    #[must_use]
    pub fn is_sealed(&self, block: &Block) -> bool {
        self.is_sound(block, BLOCK_BYTES - TAIL_BYTES)
    }

    /// Whether the checksum at `at` is the one of the block with zeroes in its place.
    fn is_sound(&self, block: &Block, at: usize) -> bool {
        if !self.has_checksums() {
            return true;
        }
        let crc = self.crc(self.seed, &block[..at]);
        let crc = self.crc(self.crc(crc, &[0; 4]), &block[at + 4..]);
        crc == u32_at(block, at)
    }

    /// Sets the checksum of a descriptor or revoke block.
    fn seal(&self, block: &mut Block) {
        if self.has_checksums() {
            let checksum = self.crc(self.seed, block);
            set_u32(block, BLOCK_BYTES - TAIL_BYTES, checksum);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;
    use riopipe_nvme::digest::soft;

    fn shapes() -> Vec<Shape> {
        let mut shapes = Vec::new();
        for checksums in [Checksums::None, Checksums::V2, Checksums::V3] {
            for is_64bit in [false, true] {
                shapes.push(Shape::new(checksums, is_64bit, *b"the journal uuid", soft));
            }
        }
        shapes
    }

    /// The numbers of tags and revoked blocks that the kernel puts into a block.
    #[test]
    fn blocks_have_as_many_entries_as_those_of_the_kernel() {
        let max = |shape: &Shape| (shape.tags_max(), shape.revoked_max());
        let max: Vec<_> = shapes().iter().map(max).collect();
        assert_eq!(
            max,
            [(506, 1020), (337, 510), (404, 1019), (289, 509), (253, 1019), (253, 509)]
        );
    }

    proptest! {
        #[test]
        fn descriptors_and_revokes_survive(
            shape in 0usize..6,
            numbers in proptest::collection::vec((any::<u64>(), any::<bool>(), any::<u32>()), 1..253),
            sequence in any::<u32>(),
            flip in 0usize..BLOCK_BYTES,
        ) {
            let shape = shapes()[shape];
            let tags: Vec<Tag> = numbers
                .iter()
                .map(|&(at, is_escaped, checksum)| Tag {
                    at: BlockNo(if shape.is_64bit { at } else { at & 0xffff_ffff }),
                    is_escaped,
                    checksum: match shape.checksums {
                        Checksums::None => 0,
                        Checksums::V2 => checksum & 0xffff,
                        Checksums::V3 => checksum,
                    },
                })
                .collect();
            let mut block = shape.descriptor(sequence, &tags);
            prop_assert!(shape.is_sealed(&block));
            let header = Header { block_type: block_type::DESCRIPTOR, sequence };
            prop_assert_eq!(Header::decode(&block), Some(header));
            prop_assert_eq!(shape.tags(&block), tags.clone());
            block[flip] ^= 0x10;
            prop_assert_eq!(shape.is_sealed(&block), !shape.has_checksums());

            let revoked: Vec<BlockNo> = tags.iter().map(|tag| tag.at).collect();
            let mut block = shape.revoke(sequence, &revoked);
            prop_assert!(shape.is_sealed(&block));
            prop_assert_eq!(shape.revoked(&block), Some(revoked));
            block[flip] ^= 0x10;
            prop_assert_eq!(shape.is_sealed(&block), !shape.has_checksums());

            let mut block = shape.commit(sequence, 1 << 33);
            prop_assert!(shape.is_sound_commit(&block));
            prop_assert_eq!(Shape::commit_seconds(&block), 1 << 33);
            block[flip] ^= 0x10;
            prop_assert_eq!(shape.is_sound_commit(&block), !shape.has_checksums());
        }

        #[test]
        fn no_content_panics(
            shape in 0usize..6,
            fill in proptest::collection::vec((0usize..BLOCK_BYTES, any::<u8>()), 0..60),
            base in prop_oneof![Just(0u8), Just(0xff), any::<u8>()],
            used in 0u32..5000,
        ) {
            let shape = shapes()[shape];
            let mut block = [base; BLOCK_BYTES];
            for (at, byte) in fill {
                block[at] = byte;
            }
            prop_assert!(shape.tags(&block).len() <= BLOCK_BYTES / 8);
            let _ = shape.revoked(&block);
            set_u32(&mut block, HEADER_BYTES, used);
            if let Some(revoked) = shape.revoked(&block) {
                prop_assert!(revoked.len() <= shape.revoked_max());
            }
        }
    }

    #[test]
    fn a_block_with_the_magic_number_is_escaped() {
        let mut block = [1; BLOCK_BYTES];
        assert!(!needs_escape(&block));
        unescape(&mut block);
        assert!(needs_escape(&block));
        let original = block;
        escape(&mut block);
        assert!(!needs_escape(&block));
        unescape(&mut block);
        assert!(block == original);
    }
}

//! The superblock of a journal.

use alloc::boxed::Box;

use super::{Checksums, JournalError, MAGIC, Shape, block_type, set_u32, u32_at};
use crate::block::{BLOCK_BYTES, Block};
use crate::format::layout::Layout;

/// Features that a program may ignore.
pub mod compat {
    /// Commit blocks have a checksum of their transaction (`journal_checksum`, v1). RioFS does not
    /// verify it, and switches it off.
    pub const CHECKSUM: u32 = 0x1;
}

/// Features that a program must know.
pub mod incompat {
    /// There may be revoke blocks (`journal_incompat_revoke`).
    pub const REVOKE: u32 = 0x1;
    /// Block numbers have 64 bits (`journal_64bit`).
    pub const IS_64BIT: u32 = 0x2;
    /// A commit block may be there without all of its transaction (`journal_async_commit`). A log
    /// with it is refused unless it is empty.
    pub const ASYNC_COMMIT: u32 = 0x4;
    /// Checksums (`journal_checksum_v2`). RioFS reads it, and writes version 3.
    pub const CSUM_V2: u32 = 0x8;
    /// Checksums (`journal_checksum_v3`).
    pub const CSUM_V3: u32 = 0x10;
    /// There may be fast commits behind the log (`fast_commit`). Refused.
    pub const FAST_COMMIT: u32 = 0x20;
}

const KNOWN: u32 = incompat::REVOKE
    | incompat::IS_64BIT
    | incompat::ASYNC_COMMIT
    | incompat::CSUM_V2
    | incompat::CSUM_V3
    | incompat::FAST_COMMIT;

/// The part of the block that has a checksum.
const SUPERBLOCK_BYTES: usize = 1024;
const COMPAT: usize = 0x24;
const INCOMPAT: usize = 0x28;
const RO_COMPAT: usize = 0x2c;
const UUID: usize = 0x30;
const CHECKSUM_TYPE: usize = 0x50;
const CHECKSUM: usize = 0xfc;
/// The type of checksums: CRC32C.
const CRC32C_TYPE: u8 = 4;

/// The superblock of a journal: a copy of its block, of which fields are read and changed. The other
/// bytes are kept.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct JournalSuperblock {
    raw: Box<Block>,
}

/// Fields: documentation, name of the reader, name of the writer, offset.
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
    /// The blocks that the journal uses of its file (`s_maxlen`).
    maxlen / set_maxlen at 0x10;
    /// The first block of the log (`s_first`).
    first / set_first at 0x14;
    /// The first transaction that may be in the log (`s_sequence`).
    sequence / set_sequence at 0x18;
    /// The block of the journal where the log begins; 0 for an empty log (`s_start`).
    start / set_start at 0x1c;
    /// The negative error number with which a kernel has aborted the journal (`s_errno`).
    errno / set_errno at 0x20;
    /// The number of file systems that use the journal (`s_nr_users`).
    users / set_users at 0x40;
    /// The number of blocks for fast commits, 0 for the default (`s_num_fc_blks`).
    fast_commit_blocks / set_fast_commit_blocks at 0x54;
    /// Where the next transaction may begin, of an empty log (`s_head`).
    head / set_head at 0x58;
}

impl JournalSuperblock {
    /// The superblock in the first block of a journal of `blocks` blocks.
    ///
    /// # Errors
    /// RioFS does not support the journal, or the superblock is damaged.
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
        superblock.check_features()?;
        if superblock.has_checksum() {
            if block[CHECKSUM_TYPE] != CRC32C_TYPE {
                return Err(JournalError::Damaged("type of checksums"));
            }
            if superblock.checksum(layout) != u32_at(block, CHECKSUM) {
                return Err(JournalError::Checksum);
            }
        }
        let bytes = u32_at(block, 0x0c);
        if bytes as usize != BLOCK_BYTES {
            return Err(JournalError::BlockBytes(bytes));
        }
        let (first, maxlen, start) = (superblock.first(), superblock.maxlen(), superblock.start());
        if maxlen > blocks {
            return Err(JournalError::Damaged("number of blocks"));
        }
        // The ring needs two blocks; a journal in use needs many more.
        if first == 0 || first >= maxlen.saturating_sub(1) {
            return Err(JournalError::Damaged("first block"));
        }
        if start != 0 && !(first..maxlen).contains(&start) {
            return Err(JournalError::Damaged("start"));
        }
        Ok(superblock)
    }

    fn check_features(&self) -> Result<(), JournalError> {
        let (features, ro_compat) = (self.incompat(), u32_at(&self.raw[..], RO_COMPAT));
        if features & !KNOWN != 0 || ro_compat != 0 {
            return Err(JournalError::UnknownFeatures { incompat: features & !KNOWN, ro_compat });
        }
        if features & incompat::FAST_COMMIT != 0 {
            return Err(JournalError::Feature("fast_commit"));
        }
        if features & incompat::ASYNC_COMMIT != 0 && self.start() != 0 {
            return Err(JournalError::Feature("journal_async_commit"));
        }
        // A journal in its own file system has one user, and 0 in some old ones.
        if self.users() > 1 {
            return Err(JournalError::Feature("journal_dev"));
        }
        let versions = [
            self.compat() & compat::CHECKSUM,
            features & incompat::CSUM_V2,
            features & incompat::CSUM_V3,
        ];
        if versions.iter().filter(|&&version| version != 0).count() > 1 {
            return Err(JournalError::Damaged("set of checksums"));
        }
        Ok(())
    }

    /// The superblock as a block, with its checksum.
    #[must_use]
    pub fn encode(&self, layout: &Layout) -> Block {
        let mut block = *self.raw;
        if self.has_checksum() {
            set_u32(&mut block, CHECKSUM, self.checksum(layout));
        }
        block
    }

    fn checksum(&self, layout: &Layout) -> u32 {
        let crc = layout.crc(!0, &self.raw[..CHECKSUM]);
        let crc = layout.crc(crc, &[0; 4]);
        layout.crc(crc, &self.raw[CHECKSUM + 4..SUPERBLOCK_BYTES])
    }

    fn has_checksum(&self) -> bool {
        self.incompat() & (incompat::CSUM_V2 | incompat::CSUM_V3) != 0
    }

    /// The features that a program may ignore; see [`compat`].
    #[must_use]
    pub fn compat(&self) -> u32 {
        u32_at(&self.raw[..], COMPAT)
    }

    /// The features that a program must know; see [`incompat`].
    #[must_use]
    pub fn incompat(&self) -> u32 {
        u32_at(&self.raw[..], INCOMPAT)
    }

    /// Sets the features as the kernel does when it mounts the file system: revokes, block numbers
    /// of 64 bits with `64bit`, checksums (version 3) with `metadata_csum` and else none. The log
    /// must be empty, since its blocks have the shape of the old features.
    ///
    /// Panics if it is not.
    pub fn use_features_of(&mut self, layout: &Layout) {
        assert_eq!(self.start(), 0, "the log is empty");
        let mut features = self.incompat() | incompat::REVOKE;
        features &= !(incompat::ASYNC_COMMIT | incompat::CSUM_V2 | incompat::CSUM_V3);
        if layout.is_64bit {
            features |= incompat::IS_64BIT;
        }
        self.raw[CHECKSUM_TYPE] = 0;
        if layout.csum_seed.is_some() {
            features |= incompat::CSUM_V3;
            self.raw[CHECKSUM_TYPE] = CRC32C_TYPE;
        }
        let others = self.compat() & !compat::CHECKSUM;
        set_u32(&mut self.raw[..], COMPAT, others);
        set_u32(&mut self.raw[..], INCOMPAT, features);
    }

    /// The shape of the blocks of the log.
    #[must_use]
    pub fn shape(&self, layout: &Layout) -> Shape {
        let features = self.incompat();
        let checksums = if features & incompat::CSUM_V3 != 0 {
            Checksums::V3
        } else if features & incompat::CSUM_V2 != 0 {
            Checksums::V2
        } else {
            Checksums::None
        };
        let uuid = core::array::from_fn(|n| self.raw[UUID + n]);
        Shape::new(checksums, features & incompat::IS_64BIT != 0, uuid, layout.crc32c)
    }
}

#[cfg(test)]
pub(in crate::journal) mod tests {
    use super::*;
    use crate::testing::layout;
    use proptest::prelude::*;

    /// The superblock of an empty journal of `blocks` blocks, as mke2fs makes it.
    pub(in crate::journal) fn superblock(blocks: u32) -> JournalSuperblock {
        let mut block = [0; BLOCK_BYTES];
        for (at, value) in [
            (0, MAGIC),
            (4, block_type::SUPERBLOCK_V2),
            (0xc, BLOCK_BYTES as u32),
            (0x10, blocks),
            (0x14, 1),
            (0x18, 1),
            (0x40, 1),
        ] {
            set_u32(&mut block, at, value);
        }
        block[UUID..UUID + 16].copy_from_slice(b"the journal uuid");
        JournalSuperblock { raw: Box::new(block) }
    }

    fn refusal(change: impl FnOnce(&mut Block)) -> JournalError {
        let mut superblock = superblock(2000);
        superblock.use_features_of(&layout());
        change(&mut superblock.raw);
        let block = superblock.encode(&layout());
        JournalSuperblock::decode(&layout(), &block, 2000).expect_err("refused")
    }

    #[test]
    fn each_unusable_journal_is_refused_by_name() {
        let set = |at: usize, value: u32| move |block: &mut Block| set_u32(block, at, value);
        assert_eq!(refusal(set(0, 0)), JournalError::NoSuperblock);
        assert_eq!(refusal(set(4, 3)), JournalError::Version1);
        assert_eq!(refusal(set(4, 1)), JournalError::NoSuperblock);
        assert_eq!(refusal(set(0xc, 1024)), JournalError::BlockBytes(1024));
        assert_eq!(refusal(set(0x10, 2001)), JournalError::Damaged("number of blocks"));
        assert_eq!(refusal(set(0x10, 2)), JournalError::Damaged("first block"));
        assert_eq!(refusal(set(0x14, 0)), JournalError::Damaged("first block"));
        assert_eq!(refusal(set(0x14, 1999)), JournalError::Damaged("first block"));
        assert_eq!(refusal(set(0x1c, 2000)), JournalError::Damaged("start"));
        assert_eq!(refusal(set(0x28, 0x30)), JournalError::Feature("fast_commit"));
        assert_eq!(refusal(set(0x28, 0x18)), JournalError::Damaged("set of checksums"));
        assert_eq!(refusal(set(0x24, 1)), JournalError::Damaged("set of checksums"));
        let unknown = JournalError::UnknownFeatures { incompat: 0x40, ro_compat: 0 };
        assert_eq!(refusal(set(0x28, 0x50)), unknown);
        let unknown = JournalError::UnknownFeatures { incompat: 0, ro_compat: 1 };
        assert_eq!(refusal(set(0x2c, 1)), unknown);
        assert_eq!(refusal(set(0x40, 2)), JournalError::Feature("journal_dev"));
        assert_eq!(refusal(set(0x50, 0)), JournalError::Damaged("type of checksums"));
        let asynchronous = |block: &mut Block| {
            set_u32(block, 0x28, 0x14);
            set_u32(block, 0x1c, 1);
        };
        assert_eq!(refusal(asynchronous), JournalError::Feature("journal_async_commit"));

        let mut block = superblock(2000);
        block.use_features_of(&layout());
        let mut block = block.encode(&layout());
        block[0x18] ^= 1;
        let damaged = JournalSuperblock::decode(&layout(), &block, 2000);
        assert_eq!(damaged, Err(JournalError::Checksum));
    }

    #[test]
    fn the_features_follow_those_of_the_file_system() {
        let mut superblock = superblock(2000);
        set_u32(&mut superblock.raw[..], COMPAT, compat::CHECKSUM);
        superblock.use_features_of(&layout());
        assert_eq!((superblock.compat(), superblock.incompat()), (0, 0x13));
        let block = superblock.encode(&layout());
        assert_eq!(
            JournalSuperblock::decode(&layout(), &block, 2000),
            Ok(JournalSuperblock { raw: Box::new(block) })
        );
        superblock.use_features_of(&Layout { csum_seed: None, is_64bit: false, ..layout() });
        // A journal stays with 64 bits, as with the kernel.
        assert_eq!(superblock.incompat(), 0x3);
        assert_eq!(superblock.raw[CHECKSUM_TYPE], 0);
    }

    proptest! {
        #[test]
        fn no_superblock_panics(
            words in proptest::collection::vec((0usize..64, any::<u32>()), 0..6),
            blocks in any::<u32>(),
        ) {
            let mut superblock = superblock(2000);
            for (word, value) in words {
                set_u32(&mut superblock.raw[..], word * 4, value);
            }
            let block = superblock.encode(&layout());
            if let Ok(superblock) = JournalSuperblock::decode(&layout(), &block, blocks) {
                prop_assert!(superblock.first() + 2 <= superblock.maxlen());
            }
        }
    }
}

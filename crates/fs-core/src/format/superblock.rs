//! The superblock: the parameters and the state of a file system.

use alloc::boxed::Box;

use crate::block::{BLOCK_BYTES, Block, BlockNo, Ino};
use crate::format::bytes::{
    high32, low32, set_u16, set_u32, set_u64, u16_at, u32_at, u32_pair, u64_at,
};
use crate::format::features::{Features, UnsupportedFeatures, compat, incompat, ro_compat};
use crate::format::inode::I_BLOCK_BYTES;
use crate::format::layout::Layout;
use riopipe_nvme::digest::Crc32c;

/// The length of a superblock, in bytes.
pub const SUPERBLOCK_BYTES: usize = 1024;

/// The offset of the superblock in block 0. A copy in another block lies at its start.
pub const SUPERBLOCK_OFFSET: usize = 1024;

const MAGIC: u16 = 0xef53;
const CHECKSUM: usize = 0x3fc;

bitflags::bitflags! {
    /// The state of a file system (`s_state`).
    #[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
    pub struct State: u16 {
        /// Cleanly unmounted, or it has a journal to replay.
        const VALID = 0x1;
        /// An error was found; e2fsck shall check everything.
        const ERROR = 0x2;
        /// Orphans are being recovered.
        const ORPHAN = 0x4;
        /// Other bits are kept.
        const _ = !0;
    }
}

/// Why a superblock is refused.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum SuperblockError {
    /// The magic number is missing.
    #[error("no ext4 file system: make one with mke2fs -t ext4 -b 4096 -I 256")]
    NotExt4,
    /// The checksum is wrong.
    #[error("the superblock's checksum is wrong: run e2fsck")]
    Checksum,
    /// The features are not supported.
    #[error(transparent)]
    Features(#[from] UnsupportedFeatures),
    /// Blocks have another size.
    #[error("blocks of {0} bytes: RioFS needs 4096, so make the file system with mke2fs -b 4096")]
    BlockBytes(u64),
    /// Inodes have another size.
    #[error("inodes of {0} bytes: RioFS needs 256, so make the file system with mke2fs -I 256")]
    InodeBytes(u16),
    /// A field has a value that can't be.
    #[error("the superblock's {0} can't be right: run e2fsck")]
    Damaged(&'static str),
}

/// A superblock: a copy of its bytes, of which fields are read and changed. Bytes of other fields
/// are kept.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Superblock {
    raw: Box<[u8; SUPERBLOCK_BYTES]>,
}

/// Fields of one type: documentation, name of the reader, name of the writer, offset.
macro_rules! fields {
    ($type:ty, $get:ident, $set:ident:
     $($(#[$doc:meta])* $name:ident / $set_name:ident at $at:literal;)*) => {
        impl Superblock {
            $(
                $(#[$doc])*
                #[must_use]
                pub fn $name(&self) -> $type {
                    $get(&self.raw[..], $at)
                }

                /// Sets the field; see the reader of the same name.
                pub fn $set_name(&mut self, value: $type) {
                    $set(&mut self.raw[..], $at, value);
                }
            )*
        }
    };
}

fields! { u16, u16_at, set_u16:
    /// The mounts since the last check (`s_mnt_count`).
    mount_count / set_mount_count at 0x34;
    /// The behaviour after an error: 1 continue, 2 read-only, 3 panic (`s_errors`).
    errors / set_errors at 0x3c;
    /// The user that may use the reserved blocks (`s_def_resuid`).
    reserved_uid / set_reserved_uid at 0x50;
    /// The group that may use the reserved blocks (`s_def_resgid`).
    reserved_gid / set_reserved_gid at 0x52;
}

fields! { u32, u32_at, set_u32:
    /// Free inodes (`s_free_inodes_count`).
    free_inodes / set_free_inodes at 0x10;
    /// The inode of the journal (`s_journal_inum`).
    journal_ino / set_journal_ino at 0xe0;
    /// The first inode of the list of orphans, 0 if it is empty (`s_last_orphan`).
    last_orphan / set_last_orphan at 0xe8;
    /// The default options of a mount (`s_default_mount_opts`).
    default_mount_options / set_default_mount_options at 0x100;
    /// Flags: 1 for a signed hash of names, 2 for an unsigned one (`s_flags`).
    flags / set_flags at 0x160;
    /// The number of errors since the last check (`s_error_count`).
    error_count / set_error_count at 0x194;
    /// The inode of the first error (`s_first_error_ino`).
    first_error_ino / set_first_error_ino at 0x19c;
    /// The inode of the last error (`s_last_error_ino`).
    last_error_ino / set_last_error_ino at 0x1d0;
    /// The blocks that files can't use, 0 if not known (`s_overhead_clusters`).
    overhead / set_overhead at 0x248;
    /// The seed of metadata checksums, with `metadata_csum_seed` (`s_checksum_seed`).
    checksum_seed / set_checksum_seed at 0x270;
    /// The inode of the orphan file (`s_orphan_file_inum`).
    orphan_file_ino / set_orphan_file_ino at 0x280;
}

fields! { u64, u64_at, set_u64:
    /// KiB written since the file system was made (`s_kbytes_written`).
    kib_written / set_kib_written at 0x178;
    /// The block of the first error (`s_first_error_block`).
    first_error_block / set_first_error_block at 0x1a0;
    /// The block of the last error (`s_last_error_block`).
    last_error_block / set_last_error_block at 0x1d8;
}

/// The times of a superblock, as offsets of their low 32 bits and high 8 bits.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum SuperblockTime {
    /// The last mount.
    Mount,
    /// The last write.
    Write,
    /// The last check.
    Check,
    /// The first error.
    FirstError,
    /// The last error.
    LastError,
}

impl SuperblockTime {
    const fn offsets(self) -> (usize, usize) {
        match self {
            Self::Mount => (0x2c, 0x275),
            Self::Write => (0x30, 0x274),
            Self::Check => (0x40, 0x277),
            Self::FirstError => (0x198, 0x278),
            Self::LastError => (0x1cc, 0x279),
        }
    }
}

impl Superblock {
    /// The superblock in block 0 of a file system. Its magic number, its features, the sizes of
    /// blocks and inodes, and its checksum are checked; [`layout`](Self::layout) checks the rest.
    ///
    /// # Errors
    /// RioFS does not support the file system, or the superblock is damaged.
    pub fn decode(block: &Block, crc32c: Crc32c) -> Result<Self, SuperblockError> {
        let mut raw = Box::new([0; SUPERBLOCK_BYTES]);
        raw.copy_from_slice(&block[SUPERBLOCK_OFFSET..SUPERBLOCK_OFFSET + SUPERBLOCK_BYTES]);
        let sb = Self { raw };
        if u16_at(&sb.raw[..], 0x38) != MAGIC {
            return Err(SuperblockError::NotExt4);
        }
        let features = sb.features();
        let has_checksums = features.has_ro_compat(ro_compat::METADATA_CSUM);
        // The only type of checksums is CRC32C. Without checksums, mke2fs and tune2fs write 0. Else
        // one wrong bit in the features would be no damage, and all checksums would not count.
        if sb.raw[0x175] != u8::from(has_checksums) {
            return Err(SuperblockError::Damaged("type of checksums"));
        }
        if has_checksums && u32_at(&sb.raw[..], CHECKSUM) != sb.checksum(crc32c) {
            return Err(SuperblockError::Checksum);
        }
        features.check()?;
        let log_block = sb.u32(0x18);
        if log_block != 2 {
            if log_block > 6 {
                return Err(SuperblockError::Damaged("size of blocks"));
            }
            return Err(SuperblockError::BlockBytes(1024 << log_block));
        }
        // The first revision has inodes of 128 bytes.
        let inode_bytes = if sb.u32(0x4c) == 0 { 128 } else { sb.u16(0x58) };
        if inode_bytes != 256 {
            return Err(SuperblockError::InodeBytes(inode_bytes));
        }
        Ok(sb)
    }

    /// Writes the superblock into block 0, with its checksum. The rest of the block stays.
    pub fn encode(&mut self, block: &mut Block, crc32c: Crc32c) {
        if self.features().has_ro_compat(ro_compat::METADATA_CSUM) {
            let checksum = self.checksum(crc32c);
            set_u32(&mut self.raw[..], CHECKSUM, checksum);
        }
        block[SUPERBLOCK_OFFSET..SUPERBLOCK_OFFSET + SUPERBLOCK_BYTES]
            .copy_from_slice(&self.raw[..]);
    }

    fn checksum(&self, crc32c: Crc32c) -> u32 {
        !crc32c(0, &self.raw[..CHECKSUM])
    }

    fn u16(&self, at: usize) -> u16 {
        u16_at(&self.raw[..], at)
    }

    fn u32(&self, at: usize) -> u32 {
        u32_at(&self.raw[..], at)
    }

    fn bytes16(&self, at: usize) -> [u8; 16] {
        core::array::from_fn(|n| self.raw[at + n])
    }

    /// A number of blocks, which has 64 bits with the feature `64bit`.
    fn blocks_at(&self, low: usize, high: usize) -> u64 {
        if self.features().has_incompat(incompat::IS_64BIT) {
            u32_pair(&self.raw[..], low, high)
        } else {
            u64::from(self.u32(low))
        }
    }

    /// The features.
    #[must_use]
    pub fn features(&self) -> Features {
        Features { compat: self.u32(0x5c), incompat: self.u32(0x60), ro_compat: self.u32(0x64) }
    }

    /// Sets the features.
    pub fn set_features(&mut self, features: Features) {
        set_u32(&mut self.raw[..], 0x5c, features.compat);
        set_u32(&mut self.raw[..], 0x60, features.incompat);
        set_u32(&mut self.raw[..], 0x64, features.ro_compat);
    }

    /// The number of blocks.
    #[must_use]
    pub fn blocks(&self) -> u64 {
        self.blocks_at(4, 0x150)
    }

    /// The number of inodes.
    #[must_use]
    pub fn inodes(&self) -> u32 {
        self.u32(0)
    }

    /// Free blocks.
    #[must_use]
    pub fn free_blocks(&self) -> u64 {
        self.blocks_at(0xc, 0x158)
    }

    /// Sets the number of free blocks.
    pub fn set_free_blocks(&mut self, blocks: u64) {
        set_u32(&mut self.raw[..], 0xc, low32(blocks));
        if self.features().has_incompat(incompat::IS_64BIT) {
            set_u32(&mut self.raw[..], 0x158, high32(blocks));
        }
    }

    /// Blocks that only root may use.
    #[must_use]
    pub fn reserved_blocks(&self) -> u64 {
        self.blocks_at(8, 0x154)
    }

    /// The state.
    #[must_use]
    pub fn state(&self) -> State {
        State::from_bits_retain(self.u16(0x3a))
    }

    /// Sets the state.
    pub fn set_state(&mut self, state: State) {
        set_u16(&mut self.raw[..], 0x3a, state.bits());
    }

    /// A time, in seconds since 1970.
    #[must_use]
    pub fn time(&self, which: SuperblockTime) -> u64 {
        let (low, high) = which.offsets();
        u64::from(self.u32(low)) | u64::from(self.raw[high]) << 32
    }

    /// Sets a time, in seconds since 1970; the format has 40 bits.
    pub fn set_time(&mut self, which: SuperblockTime, seconds: u64) {
        let (low, high) = which.offsets();
        set_u32(&mut self.raw[..], low, low32(seconds));
        self.raw[high] = (seconds >> 32 & 0xff) as u8;
    }

    /// The UUID.
    #[must_use]
    pub fn uuid(&self) -> [u8; 16] {
        self.bytes16(0x68)
    }

    /// The label, up to its first zero byte.
    #[must_use]
    pub fn label(&self) -> &[u8] {
        let label = &self.raw[0x78..0x88];
        label.split(|byte| *byte == 0).next().unwrap_or(label)
    }

    /// The path of the last mount, up to its first zero byte.
    #[must_use]
    pub fn last_mounted(&self) -> &[u8] {
        let path = &self.raw[0x88..0xc8];
        path.split(|byte| *byte == 0).next().unwrap_or(path)
    }

    /// Sets the path of the last mount. Its first 63 bytes are kept.
    pub fn set_last_mounted(&mut self, path: &[u8]) {
        let path = &path[..path.len().min(63)];
        self.raw[0x88..0xc8].fill(0);
        self.raw[0x88..0x88 + path.len()].copy_from_slice(path);
    }

    /// The UUID of the journal.
    #[must_use]
    pub fn journal_uuid(&self) -> [u8; 16] {
        self.bytes16(0xd0)
    }

    /// The copy of `i_block` and of the size of the journal's inode (`s_jnl_blocks`).
    #[must_use]
    pub fn journal_copy(&self) -> ([u8; I_BLOCK_BYTES], u64) {
        let mut i_block = [0; I_BLOCK_BYTES];
        i_block.copy_from_slice(&self.raw[0x10c..0x10c + I_BLOCK_BYTES]);
        let [high, low] = [0x148, 0x14c].map(|at| u64::from(u32_at(&self.raw[..], at)));
        (i_block, high << 32 | low)
    }

    /// Records an error: the function that found it (31 bytes at most), the inode or 0, the block or
    /// 0, and the time in seconds since 1970. The state gets [`State::ERROR`].
    pub fn record_error(&mut self, function: &[u8], ino: u32, block: u64, now: u64) {
        let function = &function[..function.len().min(31)];
        if self.error_count() == 0 {
            self.set_time(SuperblockTime::FirstError, now);
            self.set_first_error_ino(ino);
            self.set_first_error_block(block);
            set_u32(&mut self.raw[..], 0x1c8, 0);
            self.raw[0x1a8..0x1c8].fill(0);
            self.raw[0x1a8..0x1a8 + function.len()].copy_from_slice(function);
        }
        self.set_time(SuperblockTime::LastError, now);
        self.set_last_error_ino(ino);
        self.set_last_error_block(block);
        set_u32(&mut self.raw[..], 0x1d4, 0);
        self.raw[0x1e0..0x200].fill(0);
        self.raw[0x1e0..0x1e0 + function.len()].copy_from_slice(function);
        self.set_error_count(self.error_count().saturating_add(1));
        self.set_state(self.state() | State::ERROR);
    }

    /// Clears the record of errors, as e2fsck does after a check.
    pub fn clear_errors(&mut self) {
        // From the number of errors to the last function.
        self.raw[0x194..0x200].fill(0);
        // The high bits of both times, and the codes of both errors.
        self.raw[0x278..0x27c].fill(0);
        self.set_state(self.state() - State::ERROR);
    }

    /// The parameters that do not change while the file system is mounted, checked.
    ///
    /// # Errors
    /// A field has a value that can't be.
    pub fn layout(&self, crc32c: Crc32c) -> Result<Layout, SuperblockError> {
        use SuperblockError::Damaged;
        let check = |good: bool, what| if good { Ok(()) } else { Err(Damaged(what)) };
        let features = self.features();
        let is_64bit = features.has_incompat(incompat::IS_64BIT);
        let blocks_per_group = self.u32(0x20);
        let inodes_per_group = self.u32(0x28);
        let bits = 8 * BLOCK_BYTES as u32;
        check(self.u32(0x1c) == 2 && self.u32(0x24) == blocks_per_group, "size of clusters")?;
        check(
            (256..=bits).contains(&blocks_per_group) && blocks_per_group.is_multiple_of(8),
            "number of blocks in a group",
        )?;
        check(
            (16..=bits).contains(&inodes_per_group) && inodes_per_group.is_multiple_of(8),
            "number of inodes in a group",
        )?;
        check(self.u32(0x14) == 0, "first data block")?;
        let blocks = self.blocks();
        // A physical block of an extent has 48 bits.
        check(blocks > 0 && blocks < 1 << 48, "number of blocks")?;
        let groups = u32::try_from(blocks.div_ceil(u64::from(blocks_per_group)))
            .map_err(|_| Damaged("number of blocks"))?;
        let inodes = self.inodes();
        check(
            u64::from(inodes) == u64::from(groups) * u64::from(inodes_per_group),
            "number of inodes",
        )?;
        let descriptor_bytes = if is_64bit { self.u16(0xfe) } else { 32 };
        check(matches!((is_64bit, descriptor_bytes), (true, 64) | (false, 32)), "descriptor size")?;
        let is_ino = |ino: u32| ino > 0 && ino <= inodes;
        let first_ino = self.u32(0x54);
        check((11..=inodes_per_group).contains(&first_ino), "first inode")?;
        let reserved_blocks = self.reserved_blocks();
        check(reserved_blocks <= blocks, "number of reserved blocks")?;
        check(self.u32(0xe4) == 0, "device of the journal")?;
        let journal_ino = self.journal_ino();
        check(is_ino(journal_ino) && journal_ino != Ino::ROOT.0, "inode of the journal")?;
        let orphan_file = if features.has_compat(compat::ORPHAN_FILE) {
            let ino = self.orphan_file_ino();
            check(is_ino(ino) && ino != Ino::ROOT.0, "inode of the orphan file")?;
            Some(Ino(ino))
        } else {
            None
        };
        let log_flex = if features.has_incompat(incompat::FLEX_BG) { self.raw[0x174] } else { 0 };
        check(log_flex < 32, "size of flexible groups")?;
        let hash_version = match (self.raw[0xfc], self.flags() & 2 != 0) {
            (version @ 0..=2, false) | (version @ 3..=5, _) => version,
            (version @ 0..=2, true) => version + 3,
            _ => return Err(Damaged("version of the hash")),
        };
        let want_extra_isize = match self.u16(0x15e) {
            // New inodes need at least the fields up to the project.
            0..32 => 32,
            wanted if wanted <= 128 && wanted.is_multiple_of(4) => wanted,
            _ => return Err(Damaged("length of the inodes' fields")),
        };
        let csum_seed = features.has_ro_compat(ro_compat::METADATA_CSUM).then(|| {
            if features.has_incompat(incompat::CSUM_SEED) {
                self.checksum_seed()
            } else {
                !crc32c(0, &self.uuid())
            }
        });
        let layout = Layout {
            crc32c,
            blocks,
            inodes,
            blocks_per_group,
            inodes_per_group,
            groups,
            inode_bytes: 256,
            descriptor_bytes,
            first_ino: Ino(first_ino),
            want_extra_isize,
            flex_groups: 1 << log_flex,
            reserved_blocks,
            reserved_gdt_blocks: u32::from(self.u16(0xce)),
            journal_ino: Ino(journal_ino),
            orphan_file,
            uuid: self.uuid(),
            csum_seed,
            gdt_csum: csum_seed.is_none() && features.has_ro_compat(ro_compat::GDT_CSUM),
            hash_seed: core::array::from_fn(|n| self.u32(0xec + 4 * n)),
            hash_version,
            dir_index: features.has_compat(compat::DIR_INDEX),
            dir_nlink: features.has_ro_compat(ro_compat::DIR_NLINK),
            huge_file: features.has_ro_compat(ro_compat::HUGE_FILE),
            is_64bit,
        };
        // The groups with a copy of the superblock have the descriptors of all groups, too.
        let head = 1 + u64::from(layout.gdt_blocks()) + u64::from(layout.reserved_gdt_blocks);
        check(head < u64::from(blocks_per_group) && head < blocks, "number of descriptor blocks")?;
        Ok(layout)
    }
}

/// The block of the primary superblock.
pub const SUPERBLOCK: BlockNo = BlockNo(0);

#[cfg(test)]
mod tests {
    use super::*;
    use crate::testing::superblock;
    use alloc::string::ToString;
    use proptest::prelude::*;
    use riopipe_nvme::digest::soft;

    fn decoded() -> Superblock {
        Superblock::decode(&superblock(), soft).expect("a superblock")
    }

    #[test]
    fn a_superblock_survives_with_its_unknown_bytes() {
        let block = superblock();
        let mut sb = decoded();
        let mut again = block;
        again[1024..2048].fill(0);
        sb.encode(&mut again, soft);
        assert!(block == again);
        sb.set_free_blocks(1 << 33 | 5);
        sb.set_mount_count(9);
        sb.set_time(SuperblockTime::Write, 1 << 34 | 7);
        sb.set_last_mounted(&[b'x'; 100]);
        sb.encode(&mut again, soft);
        let sb = Superblock::decode(&again, soft).expect("valid");
        assert_eq!(sb.free_blocks(), 1 << 33 | 5);
        assert_eq!(sb.mount_count(), 9);
        assert_eq!(sb.time(SuperblockTime::Write), 1 << 34 | 7);
        assert_eq!(sb.last_mounted(), &[b'x'; 63]);
    }

    #[test]
    fn errors_are_counted_and_the_first_and_last_are_kept() {
        let mut sb = decoded();
        sb.record_error(b"first", 12, 100, 5);
        sb.record_error(&[b'f'; 40], 13, 101, 6);
        assert_eq!(sb.error_count(), 2);
        assert_eq!((sb.first_error_ino(), sb.first_error_block()), (12, 100));
        assert_eq!((sb.last_error_ino(), sb.last_error_block()), (13, 101));
        assert_eq!(sb.time(SuperblockTime::FirstError), 5);
        assert!(sb.state().contains(State::ERROR));
    }

    #[test]
    fn a_cleared_record_of_errors_leaves_nothing() {
        let before = decoded();
        let mut sb = before.clone();
        sb.record_error(b"first", 12, 100, 5 << 32 | 5);
        sb.record_error(b"last", 13, 101, 6 << 32 | 6);
        assert_ne!(sb, before);
        sb.clear_errors();
        assert!(sb == before);
    }

    #[test]
    fn a_wrong_superblock_is_refused_with_a_reason() {
        type Edit = fn(&mut Block);
        let cases: [(Edit, &str); 11] = [
            (|b| b[1024 + 0x38] = 0, "no ext4 file system: make one with"),
            (|b| b[1024 + 0x18] = 0, "blocks of 1024 bytes: RioFS needs 4096"),
            (|b| b[1024 + 0x18] = 200, "size of blocks can't be right"),
            (|b| set_u16(b, 1024 + 0x58, 128), "inodes of 128 bytes: RioFS needs 256"),
            (|b| set_u32(b, 1024 + 0x28, 0), "number of inodes in a group can't"),
            (|b| set_u32(b, 1024 + 0x20, 0), "size of clusters can't"),
            (|b| set_u32(b, 1024 + 4, 0), "number of blocks can't"),
            (|b| set_u32(b, 1024, 7), "number of inodes can't"),
            (|b| b[1024 + 0x65] &= !4, "type of checksums can't"),
            (|b| set_u16(b, 1024 + 0xfe, 128), "descriptor size can't"),
            (|b| set_u32(b, 1024 + 0xe0, 2), "inode of the journal can't"),
        ];
        for (edit, text) in cases {
            let mut block = superblock();
            edit(&mut block);
            let sum = !soft(0, &block[1024..1024 + CHECKSUM]);
            set_u32(&mut block, 1024 + CHECKSUM, sum);
            let error = Superblock::decode(&block, soft)
                .and_then(|sb| sb.layout(soft))
                .expect_err("refused")
                .to_string();
            assert!(error.contains(text), "{error}");
        }
        let mut block = superblock();
        block[1024 + 0x90] ^= 1;
        assert_eq!(Superblock::decode(&block, soft), Err(SuperblockError::Checksum));
    }

    proptest! {
        #[test]
        fn no_content_panics(edits in proptest::collection::vec((0usize..0x284, any::<u8>()), 0..9)) {
            let mut block = superblock();
            for (at, byte) in edits {
                block[1024 + at] = byte;
            }
            let sum = !soft(0, &block[1024..1024 + CHECKSUM]);
            set_u32(&mut block, 1024 + CHECKSUM, sum);
            if let Ok(layout) = Superblock::decode(&block, soft).and_then(|sb| sb.layout(soft)) {
                prop_assert!(layout.groups > 0);
                prop_assert!(layout.blocks_in_group(layout.groups - 1) > 0);
            }
        }
    }
}

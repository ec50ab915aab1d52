//! Namespaces with logical blocks of 512 bytes, over drives that have blocks of 4096 bytes.
//!
//! ```text
//! host:   |…|3|4|5|6|7|0|1|2|3|4|5|6|7|0|1|2|…|      a command of the blocks 5 to 18
//! drive:  |       0       |       1       |   2   …|  covers the blocks 0 to 2
//!                 [head→  [ the data    ]    ←tail]
//! ```
//!
//! A command of such a namespace is *translated* when it comes: it becomes a command of the drive's
//! blocks that its own blocks touch, and gets a [`Trim`], which has its own bytes in these blocks.
//! From then on it is a command like any other one: locks, fences and the check of the size find the
//! blocks of the drive. A command whose blocks fill those of the drive has an
//! empty trim, and costs nothing more.
//!
//! A write that fills a block of the drive in part reads that block and writes it whole
//! ([`modify`](super::modify)).

use riopipe_nvme::command::{Sqe, Status, opcode};

use super::limits::BLOCK_SIZE;

/// The size of a logical block of a namespace.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum LbaSize {
    /// 4096 bytes: the blocks of the drive.
    #[default]
    Bytes4096,
    /// 512 bytes, for hosts that need them. Such a namespace can't be a member of a Rio volume.
    Bytes512,
}

impl LbaSize {
    /// The size with this many bytes; `None` if the target does not serve it.
    #[must_use]
    pub const fn from_bytes(bytes: u32) -> Option<Self> {
        match bytes {
            4096 => Some(Self::Bytes4096),
            512 => Some(Self::Bytes512),
            _ => None,
        }
    }

    /// Bytes of a logical block.
    #[must_use]
    pub const fn bytes(self) -> u32 {
        1 << self.log2()
    }

    /// The exponent of the size as a power of two (LBADS).
    #[must_use]
    pub const fn log2(self) -> u8 {
        match self {
            Self::Bytes4096 => 12,
            Self::Bytes512 => 9,
        }
    }

    /// Logical blocks in a block of the drive.
    #[must_use]
    pub const fn per_drive_block(self) -> u32 {
        BLOCK_SIZE / self.bytes()
    }

    /// Whether the logical blocks are smaller than those of the drive.
    #[inline]
    #[must_use]
    pub const fn is_small(self) -> bool {
        !matches!(self, Self::Bytes4096)
    }
}

/// The bytes of the drive's blocks of a command that are not its own. Both numbers are smaller than
/// a block of the drive, and 0 for a command that has these blocks whole.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct Trim {
    /// Bytes before those of the command, in the first block.
    pub(super) head: u16,
    /// Bytes behind those of the command, in the last block.
    pub(super) tail: u16,
}

impl Trim {
    /// Whether the command has a block of the drive in part.
    #[inline]
    pub(super) const fn is_some(self) -> bool {
        self.head | self.tail != 0
    }

    /// How many bytes of data a translated command has.
    #[inline]
    pub(super) fn data_len(self, sqe: &Sqe) -> u32 {
        sqe.nlb() * BLOCK_SIZE - u32::from(self.head) - u32::from(self.tail)
    }

    /// The first logical block of a translated command, as its host counts.
    pub(super) fn host_lba(self, sqe: &Sqe, size: LbaSize) -> u64 {
        let in_first_block = u32::from(self.head) / size.bytes();
        sqe.slba() * u64::from(size.per_drive_block()) + u64::from(in_first_block)
    }
}

/// Whether dwords 10 to 12 of an I/O command name blocks that are translated. (Those of a Copy and of
/// a Dataset Management are in a list.)
pub(super) const fn is_translated(code: u8) -> bool {
    matches!(
        code,
        opcode::READ | opcode::WRITE | opcode::COMPARE | opcode::VERIFY | opcode::WRITE_ZEROES
    )
}

/// Translates a command of a namespace with blocks of this size into one of the drive's blocks.
///
/// # Errors
/// LBA Out of Range, if the blocks have numbers that do not exist.
pub(super) fn translate(sqe: &Sqe, size: LbaSize) -> Result<(Sqe, Trim), Status> {
    let per_block = u64::from(size.per_drive_block());
    let (first, count) = (sqe.slba(), u64::from(sqe.nlb()));
    let end = first.checked_add(count).ok_or(Status::LBA_OUT_OF_RANGE.with_dnr())?;
    let (first_block, end_block) = (first / per_block, end.div_ceil(per_block));
    // Each count is smaller than the blocks of one drive block, so the bytes are below 4096.
    let bytes = |blocks: u64| (blocks * u64::from(size.bytes())) as u16;
    let trim = Trim {
        head: bytes(first % per_block),
        tail: bytes((per_block - end % per_block) % per_block),
    };
    let mut translated = *sqe;
    translated.set_blocks(first_block, (end_block - first_block) as u32);
    Ok((translated, trim))
}

/// The whole drive blocks in a range of logical blocks: those that a Dataset Management may deallocate.
/// A part of a drive block stays as it is, which NVMe allows.
pub(super) fn whole_blocks(lba: u64, blocks: u32, size: LbaSize) -> (u64, u32) {
    let per_block = u64::from(size.per_drive_block());
    let start = lba.div_ceil(per_block);
    let end = lba.saturating_add(blocks.into()) / per_block;
    (start, end.saturating_sub(start) as u32)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Every position in a block, and every length that matters.
    #[test]
    fn a_translated_command_covers_its_bytes_and_no_block_more() {
        for first in (0..20).chain([u64::MAX - 65_536, (1 << 61) - 3]) {
            for count in (1..40).chain([65_535, 65_536]) {
                let sqe = Sqe::read(1, first, count);
                let (translated, trim) = translate(&sqe, LbaSize::Bytes512).unwrap();
                let start = u128::from(translated.slba()) * 4096;
                let end = start + u128::from(translated.nlb()) * 4096;
                assert_eq!(start + u128::from(trim.head), u128::from(first) * 512);
                let own_end = (u128::from(first) + u128::from(count)) * 512;
                assert_eq!(end - u128::from(trim.tail), own_end);
                assert!(trim.head < 4096 && trim.tail < 4096);
                assert_eq!(trim.data_len(&translated), count * 512);
                assert_eq!(trim.host_lba(&translated, LbaSize::Bytes512), first);
                assert_eq!(trim.is_some(), first % 8 != 0 || count % 8 != 0);
            }
        }
        let beyond = Sqe::read(1, u64::MAX - 3, 5);
        let status = translate(&beyond, LbaSize::Bytes512).unwrap_err();
        assert_eq!(status, Status::LBA_OUT_OF_RANGE.with_dnr());
    }

    #[test]
    fn only_whole_blocks_are_deallocated() {
        let of = |lba, blocks| whole_blocks(lba, blocks, LbaSize::Bytes512);
        assert_eq!(of(0, 8), (0, 1));
        assert_eq!(of(0, 7), (0, 0));
        assert_eq!(of(1, 7), (1, 0));
        assert_eq!(of(1, 15), (1, 1));
        assert_eq!(of(7, 18), (1, 2));
        assert_eq!(of(3, 2), (1, 0));
        assert_eq!(whole_blocks(3, 5, LbaSize::Bytes4096), (3, 5));
    }
}

//! The content of a drive that is no volume's label: a file system, a partition table, a member of a
//! RAID, and the like. A volume is not created over it, unless the caller accepts its loss.
//!
//! The initiator reads the first and the last blocks of the drive over the network (`ContentProbe`),
//! and compares them with the signatures by which libblkid recognises such content. Most lie in the first
//! 256 KiB, and some at the end. Content without a known signature counts too: the first blocks of
//! an unused drive are all zero.
//!
//! When such content is given up, its signatures must not remain, or another program takes the drive
//! of the volume for what it was before. So the blocks around the labels and at the end of the drive
//! are zeroed (`wiped_ranges`).

#[cfg(test)]
mod tests;

use core::fmt;
use core::ops::Range;

use alloc::vec::Vec;

use riopipe_nvme::digest::Crc32c;

use crate::drive_identity::{self, RECORD_BLOCK, Record, RecordError};
use crate::label::DATA_START;
use crate::wire::{BLOCK_BYTES, u32_at};

/// The content of a drive that is no volume's label.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum ForeignContent {
    /// Content with a known signature. The text names it, with an article.
    Known(&'static str),
    /// Blocks that are not all zero, and have no known signature.
    Unknown,
}

impl fmt::Display for ForeignContent {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Known(name) => name,
            Self::Unknown => "data of an unknown kind",
        })
    }
}

/// The number of blocks at the start of a drive that are read: 256 KiB, as much as ZFS reserves.
const HEAD_BLOCKS: u64 = 64;
/// The number of blocks at the end of a drive that are read: 128 KiB. The superblock of an MD RAID of
/// version 0.90 lies there, at most 128 KiB from the end.
const TAIL_BLOCKS: u64 = 32;
/// The number of blocks at the end of a drive that are zeroed: 768 KiB. ZFS has two labels there.
const WIPED_TAIL_BLOCKS: u64 = 192;
/// The number of blocks that both copies of a label have.
const LABEL_BLOCKS: u64 = 2;

/// The most blocks of one read or write.
const CHUNK_BLOCKS_MAX: u64 = 32;

/// The reading of a drive, and the content found so far.
#[derive(Clone, Debug)]
pub(super) struct ContentProbe {
    /// The number of blocks of the drive.
    drive_blocks: u64,
    /// The most blocks of one read.
    chunk_blocks: u64,
    /// The first block that has not been read.
    next: u64,
    /// The known content, with the place in [`SIGNATURES`] that decides which of several counts.
    found: Option<(usize, &'static str)>,
    /// Whether a block at the start of the drive is not all zero.
    is_head_used: bool,
    /// The reserved block if it has the identity of a drive, which is no content.
    identity: Option<Vec<u8>>,
}

impl ContentProbe {
    /// The reading of a drive with so many blocks. The target transfers `max_bytes` at a time.
    pub(super) fn new(drive_blocks: u64, max_bytes: u32) -> Self {
        let chunk_blocks = chunk_blocks(max_bytes);
        Self {
            drive_blocks,
            chunk_blocks,
            next: 0,
            found: None,
            is_head_used: false,
            identity: None,
        }
    }

    /// The blocks to be read next; `None` if all have been read.
    pub(super) fn next_read(&self) -> Option<Range<u64>> {
        let (head, tail) = self.ranges();
        let rest = if self.next < head.end { self.next..head.end } else { self.next..tail.end };
        (!rest.is_empty()).then(|| rest.start..rest.end.min(rest.start + self.chunk_blocks))
    }

    /// Finds content in the blocks that were read, those of [`next_read`](Self::next_read).
    pub(super) fn add(&mut self, blocks: &[u8]) {
        let (head, tail) = self.ranges();
        for block in blocks.chunks_exact(BLOCK_BYTES) {
            let start = self.next * BLOCK_BYTES as u64;
            let found =
                signature_in(start, self.drive_blocks.saturating_mul(BLOCK_BYTES as u64), block);
            self.found = match (self.found, found) {
                (Some(old), Some(new)) => Some(if new.0 < old.0 { new } else { old }),
                (old, new) => old.or(new),
            };
            let is_identity = self.next == RECORD_BLOCK && drive_identity::is_record(block);
            if is_identity {
                self.identity = Some(block.into());
            }
            let is_used = !is_identity && block.iter().any(|byte| *byte != 0);
            self.is_head_used |= self.next < head.end && is_used;
            self.next += 1;
            if self.next == head.end {
                self.next = tail.start;
            }
        }
    }

    /// The content, if there is any.
    pub(super) fn content(&self) -> Option<ForeignContent> {
        match self.found {
            Some((_, name)) => Some(ForeignContent::Known(name)),
            None => self.is_head_used.then_some(ForeignContent::Unknown),
        }
    }

    /// The identity that is stored on the drive, unless it can't be used; `None` if there is none.
    pub(super) fn identity(&self, crc32c: Crc32c) -> Option<Result<[u8; 16], RecordError>> {
        let record = Record::decode(self.identity.as_deref()?, crc32c).transpose()?;
        Some(record.map(|record| record.id.nguid))
    }

    /// The blocks that are read, at the start and at the end of the drive.
    fn ranges(&self) -> (Range<u64>, Range<u64>) {
        let head_end = HEAD_BLOCKS.min(self.drive_blocks);
        (
            0..head_end,
            self.drive_blocks.saturating_sub(TAIL_BLOCKS).max(head_end)..self.drive_blocks,
        )
    }
}

/// The blocks of a drive that are zeroed when its content is given up, in pieces for one write each:
/// all that are reserved beside the labels, and those at the end of the drive. The labels themselves
/// replace the other blocks. With `keeps_identity`, the block with the drive's identity remains: the
/// labels name that identity.
pub(super) fn wiped_ranges(
    drive_blocks: u64,
    max_bytes: u32,
    keeps_identity: bool,
) -> impl Iterator<Item = Range<u64>> {
    let start = if keeps_identity { RECORD_BLOCK + 1 } else { LABEL_BLOCKS };
    let tail = drive_blocks.saturating_sub(WIPED_TAIL_BLOCKS).max(DATA_START);
    let chunk = chunk_blocks(max_bytes);
    let pieces = move |range: Range<u64>| {
        let end = range.end;
        range.step_by(chunk as usize).map(move |start| start..end.min(start + chunk))
    };
    pieces(start..DATA_START).chain(pieces(tail..drive_blocks))
}

/// The blocks of one read or write, where the target transfers `max_bytes` at a time.
fn chunk_blocks(max_bytes: u32) -> u64 {
    (u64::from(max_bytes) / BLOCK_BYTES as u64).clamp(1, CHUNK_BLOCKS_MAX)
}

/// The place of a signature.
#[derive(Clone, Copy)]
enum At {
    /// So many bytes from the start of the drive.
    Start(u64),
    /// So many bytes before the end of the drive.
    End(u64),
    /// At the start of the last whole 64 KiB but one: the superblock of an MD RAID of version 0.90.
    Md090,
}

impl At {
    /// The offset on a drive of `len` bytes; `None` if the drive is too small.
    const fn offset(self, len: u64) -> Option<u64> {
        match self {
            Self::Start(offset) => Some(offset),
            Self::End(distance) => len.checked_sub(distance),
            Self::Md090 => (len / MD_RESERVED * MD_RESERVED).checked_sub(MD_RESERVED),
        }
    }
}

/// The size of the space for a superblock of an MD RAID of version 0.90, bytes.
const MD_RESERVED: u64 = 64 << 10;

const LVM: &str = "an LVM2 physical volume";
const MD: &str = "a member of a Linux MD RAID";
const BCACHE: &str = "a bcache device";
const ZFS: &str = "a member of a ZFS pool";
const GPT: &str = "a GPT partition table";
const SWAP: &str = "swap space";
const FAT: &str = "a FAT file system";
const UDF: &str = "a UDF file system";
const REISER: &str = "a ReiserFS file system";
const OCFS: &str = "an OCFS2 file system";

const MD_MAGIC: &[u8] = &[0xfc, 0x4e, 0x2b, 0xa9];
const BCACHE_MAGIC: &[u8] = b"\xc6\x85\x73\xf6\x4e\x1a\x45\xca\x82\x65\xf5\x7f\x48\xba\x6d\x81";
const BCACHEFS_MAGIC: &[u8] = b"\x18\x1f\x50\x4c\x92\x88\x4c\x1f\x97\xe4\x35\x9b\x2f\xa1\xf1\x63";

/// The known signatures: place, bytes, and the name of the content. If a drive has several, the
/// earliest in this list counts: what encloses other content comes before it. Each lies within one
/// block. Content that takes more than equal bytes to recognise is in [`signature_in`].
const SIGNATURES: &[(At, &[u8], &str)] = &[
    // Containers, and members of a larger whole.
    (At::Start(0), b"LUKS\xba\xbe\x00\x01", "a LUKS1 encrypted volume"),
    (At::Start(0), b"LUKS\xba\xbe\x00\x02", "a LUKS2 encrypted volume"),
    (At::Start(0x4000), b"SKUL\xba\xbe\x00\x02", "a LUKS2 encrypted volume"),
    (At::Start(24), b"LVM2 001", LVM),
    (At::Start(512 + 24), b"LVM2 001", LVM),
    (At::Start(1024 + 24), b"LVM2 001", LVM),
    (At::Start(1536 + 24), b"LVM2 001", LVM),
    (At::Start(0), MD_MAGIC, MD),
    (At::Start(4096), MD_MAGIC, MD),
    (At::End(8192), MD_MAGIC, MD),
    (At::Md090, MD_MAGIC, MD),
    (At::End(1024), b"Intel Raid ISM Cfg Sig. ", "a member of an Intel RAID"),
    (At::End(512), b"\x11\xde\x11\xde", "a member of a DDF RAID"),
    (At::End(512), b"\xde\x11\xde\x11", "a member of a DDF RAID"),
    (At::Start(4096 + 24), BCACHE_MAGIC, BCACHE),
    (At::Start(4096 + 24), BCACHEFS_MAGIC, "a bcachefs file system"),
    (At::Start(0), b"bluestore block device", "a Ceph BlueStore device"),
    (At::Start(0), b"dmvdo001", "a VDO device"),
    (At::Start(512 + 4), b"!Stra0tis\x86\xff\x02^\x41rh", "a Stratis device"),
    (At::Start(0), b"verity\0\0", "a dm-verity hash device"),
    (At::Start(0), b"integrt\0", "a dm-integrity device"),
    (At::Start(3), b"-FVE-FS-", "a BitLocker volume"),
    // The table is in the second logical block, its backup in the last.
    (At::Start(512), b"EFI PART", GPT),
    (At::Start(4096), b"EFI PART", GPT),
    (At::End(512), b"EFI PART", GPT),
    (At::End(4096), b"EFI PART", GPT),
    // This project's own.
    (At::Start(0), b"RIO LOG\0", "an ordering log of Rio"),
    (At::Start(0), b"RWLA", "a log of records (riopipe-wal)"),
    (At::Start(0), b"RWLB", "a log of records (riopipe-wal)"),
    (At::Start(0), b"RIOFILE\0", "a file that was copied by `rio volume write`"),
    // File systems and swap space.
    (At::Start(0), b"XFSB", "an XFS file system"),
    (At::Start(0x1_0040), b"_BHRfS_M", "a btrfs file system"),
    (At::Start(1024), b"\x10\x20\xf5\xf2", "an F2FS file system"),
    (At::Start(1024), b"\xe2\xe1\xf5\xe0", "an EROFS file system"),
    (At::Start(1024), b"\x02\0\0\0\0\0\x34\x34", "a NILFS2 file system"),
    (At::Start(1024), b"H+\0\x04", "an HFS+ file system"),
    (At::Start(1024), b"HX\0\x05", "an HFS+ file system"),
    (At::Start(32), b"NXSB", "an APFS container"),
    (At::Start(0), b"hsqs", "a squashfs file system"),
    (At::Start(0x8000), b"JFS1", "a JFS file system"),
    (At::Start(8192 + 52), b"ReIsEr", REISER),
    (At::Start(0x1_0000 + 52), b"ReIsEr", REISER),
    (At::Start(0x1_0000), b"\x01\x16\x19\x70", "a GFS2 file system"),
    (At::Start(1024), b"OCFSV2", OCFS),
    (At::Start(2048), b"OCFSV2", OCFS),
    (At::Start(4096), b"OCFSV2", OCFS),
    (At::Start(0x8001), b"CD001", "an ISO 9660 file system"),
    (At::Start(0x8001), b"BEA01", UDF),
    (At::Start(0x8001), b"NSR02", UDF),
    (At::Start(0x8001), b"NSR03", UDF),
    (At::Start(3), b"NTFS    ", "an NTFS file system"),
    (At::Start(3), b"EXFAT   ", "an exFAT file system"),
    (At::Start(3), b"ReFS\0\0\0\0", "a ReFS file system"),
    (At::Start(54), b"FAT12   ", FAT),
    (At::Start(54), b"FAT16   ", FAT),
    (At::Start(82), b"FAT32   ", FAT),
    // The signature of swap space is at the end of the first page, whose size the machine decides.
    (At::Start(0x1000 - 10), b"SWAPSPACE2", SWAP),
    (At::Start(0x1000 - 10), b"SWAP-SPACE", SWAP),
    (At::Start(0x2000 - 10), b"SWAPSPACE2", SWAP),
    (At::Start(0x4000 - 10), b"SWAPSPACE2", SWAP),
    (At::Start(0x8000 - 10), b"SWAPSPACE2", SWAP),
    (At::Start(0x1_0000 - 10), b"SWAPSPACE2", SWAP),
    (At::Start(0), b"\x0b\xe5\xa9\x41", "an SGI partition table"),
];

/// The first signature of [`SIGNATURES`] in a block, or another known content, with its place in the
/// order of the list. The block begins `start` bytes from the start of a drive of `len` bytes.
fn signature_in(start: u64, len: u64, block: &[u8]) -> Option<(usize, &'static str)> {
    let has = |(at, magic, _): &&(At, &[u8], &str)| {
        let offset = at.offset(len).and_then(|offset| offset.checked_sub(start));
        let offset = offset.and_then(|offset| usize::try_from(offset).ok());
        offset.and_then(|offset| block.get(offset..offset.checked_add(magic.len())?)) == Some(magic)
    };
    let in_list = SIGNATURES.iter().position(|signature| has(&signature));
    if let Some(at) = in_list {
        return Some((at, SIGNATURES[at].2));
    }
    let other = if start == 0 {
        ext(block).or_else(|| partition_table(block))
    } else {
        zfs(start, len, block)
    };
    other.map(|name| (SIGNATURES.len(), name))
}

/// An ext2, ext3 or ext4 file system, or a journal of one, whose superblock is 1024 bytes from the
/// start. Its features decide which it is.
fn ext(block: &[u8]) -> Option<&'static str> {
    const SUPERBLOCK: usize = 1024;
    const HAS_JOURNAL: u32 = 0x4;
    const JOURNAL_DEVICE: u32 = 0x8;
    /// The features that ext3 has: file types, recovery, meta block groups.
    const EXT3_INCOMPATIBLE: u32 = 0x2 | 0x4 | 0x10;
    /// The features that ext3 has: sparse superblocks, large files, directories as trees.
    const EXT3_READ_ONLY: u32 = 0x1 | 0x2 | 0x4;
    if block.get(SUPERBLOCK + 56..SUPERBLOCK + 58)? != [0x53, 0xef] {
        return None;
    }
    let [compatible, incompatible, read_only] =
        [92, 96, 100].map(|offset| u32_at(block, SUPERBLOCK + offset));
    Some(if incompatible & JOURNAL_DEVICE != 0 {
        "an external journal of an ext4 file system"
    } else if incompatible & !EXT3_INCOMPATIBLE != 0 || read_only & !EXT3_READ_ONLY != 0 {
        "an ext4 file system"
    } else if compatible & HAS_JOURNAL != 0 {
        "an ext3 file system"
    } else {
        "an ext2 file system"
    })
}

/// A partition table of a Sun, or in the form of a PC's boot record (MBR).
fn partition_table(block: &[u8]) -> Option<&'static str> {
    const ENTRIES: Range<usize> = 446..510;
    const ENTRY_LEN: usize = 16;
    /// The type of the only entry in front of a GPT.
    const GPT_PROTECTION: u8 = 0xee;
    if block.get(508..510)? == [0xda, 0xbe] {
        return Some("a Sun partition table");
    }
    if block.get(510..512)? != [0x55, 0xaa] {
        return None;
    }
    let mut entries = block[ENTRIES].chunks_exact(ENTRY_LEN);
    let is_table = entries.clone().all(|entry| entry[0] & 0x7f == 0);
    if is_table && entries.clone().any(|entry| entry[4] == GPT_PROTECTION) {
        Some(GPT)
    } else if is_table && entries.any(|entry| entry[4] != 0) {
        Some("a DOS partition table (MBR)")
    } else {
        Some("a boot sector")
    }
}

/// A label of ZFS. In each label of 256 KiB, the second half is a ring of uberblocks. Two labels are
/// at the start of the drive and two at its end.
fn zfs(start: u64, len: u64, block: &[u8]) -> Option<&'static str> {
    const LABEL: u64 = 256 << 10;
    const UBERBLOCK_ALIGN: usize = 1024;
    const MAGIC: [[u8; 8]; 2] = [0x00ba_b10c_u64.to_le_bytes(), 0x00ba_b10c_u64.to_be_bytes()];
    let (first, last_label) = (LABEL / 2..LABEL, (len / LABEL * LABEL).checked_sub(LABEL / 2)?);
    if !first.contains(&start) && !(last_label..last_label + LABEL / 2).contains(&start) {
        return None;
    }
    let mut uberblocks = block.chunks(UBERBLOCK_ALIGN);
    let is_ring =
        uberblocks.any(|uberblock| MAGIC.iter().any(|magic| uberblock.starts_with(magic)));
    is_ring.then_some(ZFS)
}

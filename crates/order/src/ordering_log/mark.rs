//! The mark: the 128 bytes that decide which entries of a partition are live (`docs/log-format.md`,
//! "Mark").
//!
//! A partition has two copies of the mark. They are written alternately, so that a crash in the
//! middle of one leaves the other whole.

use crate::attribute::{GroupTag, Seq, StreamId, VolumeId};
use crate::bytes::{bytes_at, put, u16_at, u32_at, u64_at};
use crate::entry::{Origin, PartitionId};
use crate::probe::{self, Plant};
use crate::region::Crc32c;

/// Size of one copy of the mark in bytes.
pub(crate) const MARK_BYTES: usize = 128;
/// The flag of a settled partition.
const SETTLED: u64 = 1 << 0;
/// The version of the partition's layout (mark and entries).
pub(crate) const VERSION: u16 = 1;
/// The bytes that show that a mark is there.
const MAGIC: u32 = u32::from_le_bytes(*b"RIOm");

/// Byte offsets of the fields in a mark.
mod mark_at {
    pub(super) const CHECKSUM: usize = 0;
    pub(super) const VERSION: usize = 4;
    pub(super) const STREAM: usize = 6;
    pub(super) const NUMBER: usize = 8;
    pub(super) const RELEASED: usize = 16;
    pub(super) const HEAD: usize = 24;
    pub(super) const GENERATION: usize = 32;
    pub(super) const INCARNATION: usize = 36;
    pub(super) const VOLUME: usize = 40;
    pub(super) const SLOTS: usize = 56;
    pub(super) const MAGIC: usize = 60;
    pub(super) const TAG_SEQ: usize = 64;
    pub(super) const TAG: usize = 72;
    pub(super) const FLAGS: usize = 80;
}

/// The checksum covers the bytes from here to the end of the mark.
const CHECKED_FROM: usize = mark_at::CHECKSUM + 4;

/// The content of the mark.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Mark {
    /// The number of marks that were written before. The mark is written to copy `number % 2`.
    pub(crate) number: u64,
    /// The last group that is released.
    pub(crate) released: Seq,
    /// The first position that may be live. The slots of older positions may be used again.
    pub(crate) head: u64,
    /// The generation and the incarnation of the last binding. Entries of a smaller generation are
    /// dead.
    pub(crate) origin: Origin,
    /// The identity of the partition.
    pub(crate) id: PartitionId,
    /// The number of slots of the partition.
    pub(crate) slots: u32,
    /// The newest released group before `head`, with the caller's tag.
    pub(crate) newest_tag: GroupTag,
    /// Whether recovery has undone the groups beyond `released`.
    pub(crate) settled: bool,
}

/// The content of one copy.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum MarkCopy {
    /// Only zeroes.
    Blank,
    /// Bytes that are not a whole mark.
    Torn,
    /// A whole mark that another version of this program has written.
    Newer { version: u16 },
    /// A whole mark of this version.
    Whole(Mark),
}

impl Mark {
    /// The bytes of one copy of the mark.
    pub(crate) fn encode(&self, crc: Crc32c) -> [u8; MARK_BYTES] {
        let mut bytes = [0; MARK_BYTES];
        let flags = if self.settled { SETTLED } else { 0 };
        put(&mut bytes, mark_at::VERSION, &VERSION.to_le_bytes());
        put(&mut bytes, mark_at::STREAM, &self.id.stream.0.to_le_bytes());
        put(&mut bytes, mark_at::NUMBER, &self.number.to_le_bytes());
        put(&mut bytes, mark_at::RELEASED, &self.released.0.to_le_bytes());
        put(&mut bytes, mark_at::HEAD, &self.head.to_le_bytes());
        put(&mut bytes, mark_at::GENERATION, &self.origin.generation.to_le_bytes());
        put(&mut bytes, mark_at::INCARNATION, &self.origin.incarnation.to_le_bytes());
        put(&mut bytes, mark_at::VOLUME, &self.id.volume.0);
        put(&mut bytes, mark_at::SLOTS, &self.slots.to_le_bytes());
        put(&mut bytes, mark_at::MAGIC, &MAGIC.to_le_bytes());
        put(&mut bytes, mark_at::TAG_SEQ, &self.newest_tag.seq.0.to_le_bytes());
        put(&mut bytes, mark_at::TAG, &self.newest_tag.tag.to_le_bytes());
        put(&mut bytes, mark_at::FLAGS, &flags.to_le_bytes());
        let checksum = crc(0, &bytes[CHECKED_FROM..]);
        put(&mut bytes, mark_at::CHECKSUM, &checksum.to_le_bytes());
        bytes
    }

    /// Reads one copy of the mark.
    pub(crate) fn decode(bytes: &[u8; MARK_BYTES], crc: Crc32c) -> MarkCopy {
        if bytes.iter().all(|&byte| byte == 0) {
            return MarkCopy::Blank;
        }
        let checksum_matches = crc(0, &bytes[CHECKED_FROM..]) == u32_at(bytes, mark_at::CHECKSUM)
            || probe::is_bug_planted(Plant::T19MarkUnchecked);
        if u32_at(bytes, mark_at::MAGIC) != MAGIC || !checksum_matches {
            return MarkCopy::Torn;
        }
        let version = u16_at(bytes, mark_at::VERSION);
        if version != VERSION {
            return MarkCopy::Newer { version };
        }
        let released = Seq(u64_at(bytes, mark_at::RELEASED));
        let newest_tag =
            GroupTag::new(Seq(u64_at(bytes, mark_at::TAG_SEQ)), u64_at(bytes, mark_at::TAG));
        let flags = u64_at(bytes, mark_at::FLAGS);
        // A checksum of 32 bits can match by accident. So a mark that no writer of this version
        // writes is not accepted.
        if newest_tag.seq > released || flags & !SETTLED != 0 {
            return MarkCopy::Torn;
        }
        MarkCopy::Whole(Self {
            number: u64_at(bytes, mark_at::NUMBER),
            released,
            head: u64_at(bytes, mark_at::HEAD),
            origin: Origin {
                generation: u32_at(bytes, mark_at::GENERATION),
                incarnation: u32_at(bytes, mark_at::INCARNATION),
            },
            id: PartitionId {
                volume: VolumeId(bytes_at(bytes, mark_at::VOLUME)),
                stream: StreamId(u16_at(bytes, mark_at::STREAM)),
            },
            slots: u32_at(bytes, mark_at::SLOTS),
            newest_tag,
            settled: flags & SETTLED != 0,
        })
    }
}

//! The mark: the 128 bytes that define which entries of a partition are live (`docs/log-format.md`,
//! "Mark").
//!
//! Two copies are written alternately, so that a crash in the middle of one leaves the other.

use crate::attribute::{Seq, StreamId, VolumeId};
use crate::entry::{Origin, PartitionId, u16_at, u32_at, u64_at};
use crate::probe::{self, Plant};
use crate::region::Crc32c;

/// Size of one copy of the mark in bytes.
pub(crate) const MARK_BYTES: usize = 128;
/// The mark belongs to a settled partition (T9).
const SETTLED: u64 = 1 << 0;
/// Version of the partition's layout (mark and entries).
pub(crate) const VERSION: u16 = 1;
const MAGIC: u32 = u32::from_le_bytes(*b"RIOm");

/// The content of the mark.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Mark {
    /// How many times a mark was written before. The mark is written to copy `number % 2`.
    pub(crate) number: u64,
    /// The last group that is released (T1).
    pub(crate) released: Seq,
    /// The first position that may be alive. Slots of older positions may be reused (T1).
    pub(crate) head: u64,
    /// The generation and incarnation last bound. Entries of a smaller generation are dead (T7).
    pub(crate) origin: Origin,
    /// The identity of the partition.
    pub(crate) id: PartitionId,
    /// The number of slots that follow.
    pub(crate) slots: u32,
    /// The newest group before `head` that is released, and the caller's tag of it.
    pub(crate) tag: (Seq, u64),
    /// Recovery has undone the groups beyond `released` (T9).
    pub(crate) settled: bool,
}

/// The content of one copy.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum MarkCopy {
    /// Only zeroes.
    Blank,
    /// Bytes that are no whole mark.
    Torn,
    /// A mark that a later version of this program has written.
    Newer { version: u16 },
    /// A whole mark.
    Whole(Mark),
}

impl Mark {
    pub(crate) fn encode(&self, crc: Crc32c) -> [u8; MARK_BYTES] {
        let mut bytes = [0; MARK_BYTES];
        bytes[4..6].copy_from_slice(&VERSION.to_le_bytes());
        bytes[6..8].copy_from_slice(&self.id.stream.0.to_le_bytes());
        bytes[8..16].copy_from_slice(&self.number.to_le_bytes());
        bytes[16..24].copy_from_slice(&self.released.0.to_le_bytes());
        bytes[24..32].copy_from_slice(&self.head.to_le_bytes());
        bytes[32..36].copy_from_slice(&self.origin.generation.to_le_bytes());
        bytes[36..40].copy_from_slice(&self.origin.incarnation.to_le_bytes());
        bytes[40..56].copy_from_slice(&self.id.volume.0);
        bytes[56..60].copy_from_slice(&self.slots.to_le_bytes());
        bytes[60..64].copy_from_slice(&MAGIC.to_le_bytes());
        bytes[64..72].copy_from_slice(&self.tag.0.0.to_le_bytes());
        bytes[72..80].copy_from_slice(&self.tag.1.to_le_bytes());
        bytes[80..88].copy_from_slice(&(u64::from(self.settled) * SETTLED).to_le_bytes());
        let check = crc(0, &bytes[4..]);
        bytes[..4].copy_from_slice(&check.to_le_bytes());
        bytes
    }

    pub(crate) fn decode(bytes: &[u8; MARK_BYTES], crc: Crc32c) -> MarkCopy {
        if bytes.iter().all(|&byte| byte == 0) {
            return MarkCopy::Blank;
        }
        let checked =
            crc(0, &bytes[4..]) == u32_at(bytes, 0) || probe::planted(Plant::T19MarkUnchecked);
        if u32_at(bytes, 60) != MAGIC || !checked {
            return MarkCopy::Torn;
        }
        let version = u16_at(bytes, 4);
        if version != VERSION {
            return MarkCopy::Newer { version };
        }
        let (released, tag_seq) = (Seq(u64_at(bytes, 16)), Seq(u64_at(bytes, 64)));
        let flags = u64_at(bytes, 80);
        // A checksum is only 32 bits. A mark that no writer of this version writes is not accepted.
        if tag_seq > released || flags & !SETTLED != 0 {
            return MarkCopy::Torn;
        }
        MarkCopy::Whole(Self {
            number: u64_at(bytes, 8),
            released,
            head: u64_at(bytes, 24),
            origin: Origin { generation: u32_at(bytes, 32), incarnation: u32_at(bytes, 36) },
            id: PartitionId {
                volume: VolumeId(bytes[40..56].try_into().expect("16 bytes were sliced")),
                stream: StreamId(u16_at(bytes, 6)),
            },
            slots: u32_at(bytes, 56),
            tag: (tag_seq, u64_at(bytes, 72)),
            settled: flags & SETTLED != 0,
        })
    }
}

//! The 64-byte log entry: one ordering attribute at rest (`docs/log-format.md`, "Entry").
//!
//! An entry fills one cache line. The numbers are byte offsets:
//!
//! ```text
//!       0        1        2        3        4        5        6        7
//!     +--------+--------+--------+--------+--------+--------+--------+---------------+
//!   0 | persist word                                                                 |
//!   8 | checksum of bytes 12..64          | generation                               |
//!  16 | position                                                                     |
//!  24 | seq                                                                          |
//!  32 | tag                                                                          |
//!  40 | lba                                                 | member | kind, unfenced |
//!  48 | ordinal                           | num             | index                  |
//!  56 | blocks - 1      | span-1 | flags  | incarnation                              |
//!     +--------+--------+--------+--------+--------+--------+--------+---------------+
//! ```
//!
//! The append writes all words but the *persist word*, and the checksum covers them. The persist
//! word is stored alone, when the data of the entry is durable. Half an entry, an entry of an older
//! lap in a reused slot, and an entry of another partition are never valid (trap T7).

use crate::attribute::{Attribute, Flags, Kind, Member, Seq, StreamId, VolumeId};
use crate::bytes::{put, u16_at, u32_at, u64_at};
use crate::probe::{self, Plant};
use crate::region::{Crc32c, mix};

/// Size of a log entry in bytes.
pub const ENTRY_BYTES: usize = 64;

/// The number of an append in its partition, counted from 0 without end. The number of a durable
/// entry is never used again. The slot is `position % slots`, so the position also shows the lap.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Position(pub u64);

/// The identity of a partition. The checksums start from it, so that bytes of another partition are
/// never valid entries of this one.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub struct PartitionId {
    /// The volume.
    pub volume: VolumeId,
    /// The stream of the volume.
    pub stream: StreamId,
}

impl PartitionId {
    /// The value from which the entry checksums of this partition start.
    #[must_use]
    pub fn seed(&self, crc: Crc32c) -> u32 {
        crc(crc(0, &self.volume.0), &self.stream.0.to_le_bytes())
    }
}

/// The ownership and the incarnation of the target in which an entry was appended.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub struct Origin {
    /// The volume's generation. It identifies the owner.
    pub generation: u32,
    /// The target's incarnation.
    pub incarnation: u32,
}

impl Origin {
    /// The persist word of the entry at `position`. It is never 0. It differs from the persist word
    /// of every other lap of the same slot, so a word that an older lap left is not valid (trap
    /// T7).
    #[must_use]
    #[inline]
    pub const fn stamp(self, position: Position) -> u64 {
        let origin = mix((self.generation as u64) << 32 | self.incarnation as u64);
        match mix(position.0 ^ origin) {
            0 => 1,
            stamp => stamp,
        }
    }
}

/// The content of one entry.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Entry {
    /// The position of the append.
    pub position: Position,
    /// The owner and the incarnation of the target that appended it.
    pub origin: Origin,
    /// How many appends before this one may not have been durable when this entry was written.
    pub unfenced: Unfenced,
    /// The attribute.
    pub attribute: Attribute,
}

/// An upper bound of how many appends before an entry were not fenced when that entry was written.
///
/// All older appends were durable by then. If one of them is unreadable, the medium has damaged it,
/// because a crash tears only appends that are not fenced. Such a log is refused. It must not be
/// read as a shorter one, because then the undo of the lost entries would be missing (trap T19).
///
/// The value is an exponent n of 4 bits: fewer than 2ⁿ appends were not fenced.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Unfenced(u8);

/// The exponent that stands for "no bound".
const UNKNOWN_EXPONENT: u8 = 15;

impl Unfenced {
    /// No bound: 2¹⁴ or more appends were not fenced.
    pub const UNKNOWN: Self = Self(UNKNOWN_EXPONENT);

    /// The bound for `count` unfenced appends.
    #[must_use]
    #[inline]
    pub const fn of(count: u64) -> Self {
        let bits = 64 - count.leading_zeros() as u8;
        if bits < UNKNOWN_EXPONENT { Self(bits) } else { Self::UNKNOWN }
    }
}

impl Entry {
    /// The first position that may not have been durable when this entry was written.
    #[must_use]
    pub const fn fenced_before(&self) -> Position {
        match self.unfenced.0 {
            UNKNOWN_EXPONENT => Position(0),
            exponent => Position(self.position.0.saturating_add(1).saturating_sub(1 << exponent)),
        }
    }
}

/// The bytes of an entry whose persist word is not set.
///
/// The attribute must be [`loggable`].
#[must_use]
#[inline]
pub fn encode(entry: &Entry, seed: u32, crc: Crc32c) -> [u8; ENTRY_BYTES] {
    let a = &entry.attribute;
    debug_assert!(loggable(a), "{a:?}");
    // The entry is stored word by word, because the checksum reads it word by word right after. In
    // the processor, a load that spans several stores must wait for all of them.
    let words = [
        // Word 0: the persist word.
        0,
        // Word 1: the checksum (written below), generation.
        u64::from(entry.origin.generation) << 32,
        // Words 2 to 4.
        entry.position.0,
        a.seq.0,
        a.tag,
        // Word 5: lba, member, kind and the bound of unfenced appends.
        a.lba | u64::from(a.member.0) << 48 | u64::from(a.kind as u8 | entry.unfenced.0 << 4) << 56,
        // Word 6: ordinal, num, index.
        u64::from(a.ordinal) | u64::from(a.num) << 32 | u64::from(a.index) << 48,
        // Word 7: blocks less one, span less one, flags, incarnation.
        u64::from(a.blocks.saturating_sub(1) as u16)
            | u64::from((a.span - 1) as u8) << 16
            | u64::from(a.flags.0) << 24
            | u64::from(entry.origin.incarnation) << 32,
    ];
    let mut bytes = [0; ENTRY_BYTES];
    for (bytes, word) in bytes.chunks_exact_mut(8).zip(words) {
        bytes.copy_from_slice(&word.to_le_bytes());
    }
    let checksum = crc(seed, &bytes[CHECKED_FROM..]);
    put(&mut bytes, CHECKSUM_AT, &checksum.to_le_bytes());
    bytes
}

/// The byte offset of the checksum.
const CHECKSUM_AT: usize = 8;
/// The checksum covers the bytes from here to the end of the entry.
const CHECKED_FROM: usize = 12;

/// The content of a slot.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Decoded {
    /// Nothing was ever written here.
    Blank,
    /// Bytes that are no entry of this partition: torn, damaged or foreign.
    Torn,
    /// A whole entry of a version that knows more than this one.
    Newer {
        /// The position of its append.
        position: Position,
        /// Its kind code.
        kind: u8,
        /// Its flags.
        flags: u8,
    },
    /// A whole entry.
    Whole {
        /// Its content.
        entry: Entry,
        /// The state of its persist word.
        persist: Persist,
    },
}

/// The state of the persist word of an entry.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Persist {
    /// The word is 0: the data may not be durable.
    No,
    /// The word is the stamp of exactly this entry: the data is durable.
    Yes,
    /// The word is neither. An older lap has left it, because a crash lost the word that overwrote
    /// it, or the word is damaged. It is not valid.
    Invalid,
}

/// Reads a slot.
#[must_use]
pub fn decode(bytes: &[u8; ENTRY_BYTES], seed: u32, crc: Crc32c) -> Decoded {
    if bytes.iter().all(|&byte| byte == 0) {
        return Decoded::Blank;
    }
    let checksum_matches = crc(seed, &bytes[CHECKED_FROM..]) == u32_at(bytes, CHECKSUM_AT);
    if !checksum_matches && !probe::is_bug_planted(Plant::T7NoChecksum) {
        return Decoded::Torn;
    }
    let position = Position(u64_at(bytes, 16));
    let origin = Origin { generation: u32_at(bytes, 12), incarnation: u32_at(bytes, 60) };
    let (code, flags) = (bytes[47] & 0x0f, Flags(bytes[59]));
    let kind = match Kind::from_code(code) {
        Some(kind) if flags.are_known(kind) => kind,
        _ if !checksum_matches => return Decoded::Torn,
        _ => return Decoded::Newer { position, kind: code, flags: flags.0 },
    };
    let blocks = u32::from(u16_at(bytes, 56)) + 1;
    let attribute = Attribute {
        seq: Seq(u64_at(bytes, 24)),
        span: u16::from(bytes[58]) + 1,
        num: u16_at(bytes, 52),
        index: u16_at(bytes, 54),
        ordinal: u32_at(bytes, 48),
        member: Member(bytes[46]),
        kind,
        flags,
        lba: u64_at(bytes, 40) & LBA_MASK,
        blocks: if kind == Kind::Flush { 0 } else { blocks },
        tag: u64_at(bytes, 32),
    };
    // A checksum of 32 bits can match by accident. So an attribute that no writer of this version
    // writes is not accepted.
    if !loggable(&attribute) {
        return Decoded::Torn;
    }
    Decoded::Whole {
        entry: Entry { position, origin, unfenced: Unfenced(bytes[47] >> 4), attribute },
        persist: match u64_at(bytes, 0) {
            0 => Persist::No,
            word if word == origin.stamp(position) => Persist::Yes,
            _ if probe::is_bug_planted(Plant::T7AnyPersistWord) => Persist::Yes,
            _ => Persist::Invalid,
        },
    }
}

/// The largest LBA, which has 48 bits in the entry.
const LBA_MASK: u64 = (1 << 48) - 1;
/// The most blocks of an entry: the entry stores one less in 16 bits.
const ENTRY_BLOCKS_MAX: u32 = 1 << 16;

/// Whether an attribute fits the fields of an entry:
///
/// - all blocks are below LBA 2⁴⁸, and there are 1 to 65536 of them (none for [`Kind::Flush`]),
/// - the span is 1 to 256 groups, and the last group is below 2⁶⁴,
/// - the index is below `num`,
/// - this version gives these flags to an entry of this kind.
#[must_use]
#[inline]
pub const fn loggable(a: &Attribute) -> bool {
    let extent_fits = match a.kind {
        Kind::Flush => a.blocks == 0 && a.lba == 0,
        Kind::Write | Kind::Discard => {
            a.blocks >= 1 && a.blocks <= ENTRY_BLOCKS_MAX && a.lba <= LBA_MASK + 1 - a.blocks as u64
        }
    };
    extent_fits
        && a.span >= 1
        && a.span <= crate::attribute::SPAN_MAX
        && a.seq.0.checked_add(a.span as u64).is_some()
        && a.index < a.num
        && a.flags.are_known(a.kind)
}

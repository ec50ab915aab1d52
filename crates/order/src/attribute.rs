//! The ordering attribute: the identity of one ordered request (Rio paper §4.2).
//!
//! One attribute describes one *entry*: a request as it travels to one target. A group that the
//! volume's stripes, merging or the drive's transfer limit turn into several requests has several
//! entries; each carries their count ([`Attribute::num`]) and its own place among them
//! ([`Attribute::index`]). So recovery counts distinct entries and notices an entry that never
//! arrived (T6).

use core::fmt;

/// The number of a group in its stream. 64 bits in memory and in the log, 32 on the wire (T5).
///
/// The first group of a stream is 1; 0 means "before the first".
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Seq(pub u64);

impl Seq {
    /// Before the first group.
    pub const ZERO: Self = Self(0);

    /// The seq `n` groups later.
    #[must_use]
    pub const fn plus(self, n: u64) -> Self {
        Self(self.0 + n)
    }

    /// The next seq.
    #[must_use]
    pub const fn next(self) -> Self {
        Self(self.0 + 1)
    }

    /// The low 32 bits of the seq. They travel on the wire.
    #[must_use]
    pub const fn wire(self) -> u32 {
        self.0 as u32
    }

    /// Widens a wire value to the 64-bit seq nearest to `near` (T5). Values up to 2³¹ ahead and 2³¹
    /// − 1 behind are distinguished. A value that would lie before 0 counts as ahead.
    #[must_use]
    pub const fn widen(wire: u32, near: Self) -> Self {
        let delta = wire.wrapping_sub(near.0 as u32) as i32 as i64;
        match near.0.checked_add_signed(delta) {
            Some(seq) => Self(seq),
            None => Self(near.0.wrapping_add(wire.wrapping_sub(near.0 as u32) as u64)),
        }
    }
}

impl fmt::Display for Seq {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Display::fmt(&self.0, f)
    }
}

/// A stream of a volume: one sequence of ordered writes. Ids survive restarts.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct StreamId(pub u16);

impl fmt::Display for StreamId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Display::fmt(&self.0, f)
    }
}

/// A drive's index in its volume's member list.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Member(pub u8);

/// The name of an ordered volume across restarts.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct VolumeId(pub [u8; 16]);

impl fmt::Display for VolumeId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        for (i, byte) in self.0.iter().enumerate() {
            if matches!(i, 4 | 6 | 8 | 10) {
                f.write_str("-")?;
            }
            write!(f, "{byte:02x}")?;
        }
        Ok(())
    }
}

/// The effect of an entry on its drive.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[repr(u8)]
pub enum Kind {
    /// Writes `blocks` blocks from `lba` on.
    Write = 1,
    /// Makes `blocks` blocks from `lba` on read as zeroes.
    Discard = 2,
    /// Writes nothing: the entry that a joint FLUSH gives to each device it reaches (T3).
    Flush = 3,
}

impl Kind {
    /// The kind with this code, if this version knows it.
    ///
    /// Codes 4 (payload carried inside the log) and 5 (dependency on another stream) are left free
    /// for later versions. A log with such a code is refused as newer (T19).
    #[must_use]
    pub const fn from_code(code: u8) -> Option<Self> {
        match code {
            1 => Some(Self::Write),
            2 => Some(Self::Discard),
            3 => Some(Self::Flush),
            _ => None,
        }
    }
}

/// Flags of an entry; the same bits on the wire and in the log.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub struct Flags(pub u8);

impl Flags {
    /// The last entry of its group, in submission order.
    pub const BOUNDARY: Self = Self(1 << 0);
    /// FLUSH the device after this entry. When the FLUSH is done, the entry covers the stream's
    /// earlier writes on the same device in the same incarnation (T4).
    pub const FLUSH: Self = Self(1 << 1);
    /// In-place update. Undo leaves its blocks alone; recovery lists it after a crash (T11).
    pub const IN_PLACE: Self = Self(1 << 2);
    /// One of several fragments of a request that was split.
    pub const SPLIT: Self = Self(1 << 3);
    /// Extension of the content of the blocks. Undo leaves its blocks alone, and recovery does not
    /// list it after a crash (T11). Only for [`Kind::Write`], and never with
    /// [`IN_PLACE`](Self::IN_PLACE).
    pub const EXTEND: Self = Self(1 << 4);
    /// The bits that decide what undo does with the blocks. A fresh write has none of them.
    pub const PLACE: Self = Self(Self::IN_PLACE.0 | Self::EXTEND.0);

    /// Bits that this version defines.
    pub const KNOWN: u8 = 0x1f;

    /// Whether this version gives an entry of this kind these flags. It does if it defines all of
    /// them and they do not contradict each other.
    #[must_use]
    #[inline]
    pub const fn are_known(self, kind: Kind) -> bool {
        let place = match kind {
            Kind::Write => !self.has(Self::PLACE),
            Kind::Discard | Kind::Flush => !self.has(Self::EXTEND),
        };
        place && self.0 & !Self::KNOWN == 0
    }

    /// Whether all bits of `other` are set.
    #[must_use]
    pub const fn has(self, other: Self) -> bool {
        self.0 & other.0 == other.0
    }

    /// These bits and `other`'s.
    #[must_use]
    pub const fn with(self, other: Self) -> Self {
        Self(self.0 | other.0)
    }

    /// These bits, and `other`'s if `on`.
    #[must_use]
    pub const fn with_if(self, other: Self, on: bool) -> Self {
        if on { self.with(other) } else { self }
    }
}

/// Most entries of one group (`num` is 16 bits).
pub const GROUP_ENTRIES_MAX: u16 = u16::MAX;
/// Most groups that one merged request covers (`span` is 8 bits, stored less one).
pub const SPAN_MAX: u16 = 256;

/// The record of one ordered request (Rio paper §4.2, Table 1), in memory form.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Attribute {
    /// The (first) group.
    pub seq: Seq,
    /// How many whole groups the entry covers, 1 unless merged across groups (T16). If more than
    /// one, `num` is 1.
    pub span: u16,
    /// How many entries the group has, on all targets, flush entries and fragments included.
    pub num: u16,
    /// Which of the group's entries this one is, `0..num` (T6).
    pub index: u16,
    /// The entry's place among the stream's entries on this server, counted densely from 1 in
    /// each binding: the paper's `prev` plus one (T5).
    pub ordinal: u32,
    /// The drive, by its index in the volume's member list.
    pub member: Member,
    /// The effect of the entry on its drive.
    pub kind: Kind,
    /// The flags: boundary, flush, in place, split, extend.
    pub flags: Flags,
    /// First block on the drive; 0 for [`Kind::Flush`]. Below 2⁴⁸.
    pub lba: u64,
    /// Blocks, 0 for [`Kind::Flush`], else 1 to 65536.
    pub blocks: u32,
    /// The caller's tag of the (last) group: an LSN, a transaction id.
    pub tag: u64,
}

impl Attribute {
    /// The last group that the entry belongs to.
    #[must_use]
    pub const fn seq_end(&self) -> Seq {
        Seq(self.seq.0 + self.span as u64 - 1)
    }

    /// Whether a device FLUSH follows this entry.
    #[must_use]
    pub const fn is_flush(&self) -> bool {
        self.flags.has(Flags::FLUSH)
    }

    /// Whether two entries touch a common block of one drive.
    #[must_use]
    pub const fn overlaps(&self, other: &Self) -> bool {
        self.member.0 == other.member.0
            && self.lba < other.lba + other.blocks as u64
            && other.lba < self.lba + self.blocks as u64
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn t5_wire_seq_is_widened_to_the_nearest() {
        let near = Seq(0x1_ffff_fff0);
        assert_eq!(Seq::widen(0xffff_fff0, near), near);
        assert_eq!(Seq::widen(0x0000_0005, near), Seq(0x2_0000_0005), "ahead, over the wrap");
        let near = Seq(0x2_0000_0003);
        assert_eq!(Seq::widen(0xffff_ffff, near), Seq(0x1_ffff_ffff), "behind, over the wrap");
        assert_eq!(Seq::widen(near.wire(), near), near);
        assert_eq!(Seq::widen(7, Seq(0)), Seq(7));
        assert_eq!(Seq::widen(0xffff_ffff, Seq(0)), Seq(0xffff_ffff), "nothing lies before 0");
    }

    #[test]
    fn t11_places_that_contradict_each_other_are_not_known() {
        let both = Flags::IN_PLACE.with(Flags::EXTEND);
        for kind in [Kind::Write, Kind::Discard, Kind::Flush] {
            assert!(Flags::default().are_known(kind));
            assert!(!both.are_known(kind), "{kind:?}");
            assert!(!Flags(1 << 5).are_known(kind), "{kind:?}: of a later version");
            assert_eq!(Flags::EXTEND.are_known(kind), kind == Kind::Write, "{kind:?}");
            assert!(Flags::IN_PLACE.with(Flags::SPLIT).are_known(kind));
        }
    }

    #[test]
    fn volume_id_prints_as_a_uuid() {
        let id = VolumeId(*b"\x01\x23\x45\x67\x89\xab\xcd\xef\x01\x23\x45\x67\x89\xab\xcd\xef");
        assert_eq!(alloc::format!("{id}"), "01234567-89ab-cdef-0123-456789abcdef");
    }
}

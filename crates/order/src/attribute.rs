//! The ordering attribute: the identity of one ordered request (Rio paper §4.2).
//!
//! One attribute describes one *entry*: a request as it travels to one target. The initiator sends
//! the attribute with the request, and the target appends it to its ordering log.
//!
//! A group may have several entries, because it has several writes, or because a write was split at
//! a stripe unit or a transfer limit. Each entry has the number of entries of its group
//! ([`Attribute::num`]) and its own place among them ([`Attribute::index`]). So recovery can notice
//! that an entry never arrived.

use core::fmt;

/// The number of a group in its stream. It has 64 bits in memory and in the log, and 32 on the
/// wire.
///
/// The first group of a stream is 1. The number 0 means "before the first".
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

    /// The low 32 bits of the seq, which travel on the wire.
    #[must_use]
    pub const fn wire(self) -> u32 {
        self.0 as u32
    }

    /// The seq nearest to `near` whose low 32 bits are `wire`. It lies at most 2³¹ ahead of `near`,
    /// or less than 2³¹ behind. If it would lie before 0, the one ahead is returned.
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

/// The identity of an ordered volume. It stays the same across restarts.
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
    /// Writes nothing. A joint FLUSH has such an entry for each drive that its group does not
    /// write.
    Flush = 3,
}

impl Kind {
    /// The kind with this code, if this version knows it.
    ///
    /// Codes 4 (payload carried inside the log) and 5 (dependency on another stream) are left free
    /// for later versions. A log with such a code is refused as newer (trap T19).
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
    /// FLUSH the drive after this entry. When the FLUSH is done, the entry covers the stream's
    /// earlier writes on the same drive: they are durable, too.
    pub const FLUSH: Self = Self(1 << 1);
    /// In-place update. Undo does not touch the blocks, and recovery lists them after a crash.
    pub const IN_PLACE: Self = Self(1 << 2);
    /// One of several fragments of a request that was split.
    pub const SPLIT: Self = Self(1 << 3);
    /// Extension of the content of the blocks. Undo does not touch the blocks, and recovery does
    /// not list them after a crash. Only for [`Kind::Write`], and never with
    /// [`IN_PLACE`](Self::IN_PLACE).
    pub const EXTEND: Self = Self(1 << 4);
    /// Redirected update: the data is in the prepare area of the drive, and is written home later.
    /// The entry has the number of the first block there. Only for a [`Kind::Write`] that is in
    /// place or extends.
    pub const REDIRECTED: Self = Self(1 << 5);
    /// The bits that decide what undo does with the blocks. A fresh write has none of them.
    pub const PLACE: Self = Self(Self::IN_PLACE.0 | Self::EXTEND.0);

    /// Bits that this version defines.
    pub const KNOWN: u8 = 0x3f;

    /// Whether this version gives an entry of this kind these flags. It does if it defines all of
    /// them and they do not contradict each other.
    #[must_use]
    #[inline]
    pub const fn are_known(self, kind: Kind) -> bool {
        let is_place_possible = match kind {
            Kind::Write => !self.has(Self::PLACE),
            Kind::Discard | Kind::Flush => !self.has(Self::EXTEND),
        };
        let is_update = matches!(kind, Kind::Write) && self.0 & Self::PLACE.0 != 0;
        let is_redirection_possible = !self.has(Self::REDIRECTED) || is_update;
        is_place_possible && is_redirection_possible && self.0 & !Self::KNOWN == 0
    }

    /// Whether all bits of `other` are set.
    #[must_use]
    pub const fn has(self, other: Self) -> bool {
        self.0 & other.0 == other.0
    }

    /// These flags and those of `other`.
    #[must_use]
    pub const fn with(self, other: Self) -> Self {
        Self(self.0 | other.0)
    }

    /// These flags, and those of `other` if `on` is set.
    #[must_use]
    pub const fn with_if(self, other: Self, on: bool) -> Self {
        if on { self.with(other) } else { self }
    }
}

/// The most entries of one group: `num` has 16 bits.
pub const GROUP_ENTRIES_MAX: u16 = u16::MAX;
/// The most groups that one merged request covers: a log entry stores `span` less one in 8 bits.
pub const SPAN_MAX: u16 = 256;

/// A group, and the tag that the caller has given to it.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct GroupTag {
    /// The group; 0 for "no group is known".
    pub seq: Seq,
    /// The caller's tag of the group.
    pub tag: u64,
}

impl GroupTag {
    /// No group is known.
    pub const NONE: Self = Self { seq: Seq::ZERO, tag: 0 };

    /// The group `seq` with this tag.
    #[must_use]
    pub const fn new(seq: Seq, tag: u64) -> Self {
        Self { seq, tag }
    }

    /// The last group of an entry.
    #[must_use]
    pub const fn of_last_group(attribute: &Attribute) -> Self {
        Self { seq: attribute.seq_end(), tag: attribute.tag }
    }

    /// Replaces this group by `other`, if `other` is newer and released.
    #[inline]
    pub(crate) fn advance_to(&mut self, other: Self, released: Seq) {
        if other.seq <= released && other.seq > self.seq {
            *self = other;
        }
    }
}

/// The record of one ordered request (Rio paper §4.2, Table 1), in memory form.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Attribute {
    /// The group of the entry; the first one if the entry covers several groups.
    pub seq: Seq,
    /// The number of whole groups that the entry covers. It is above 1 if requests of several
    /// groups were merged. Then `num` is 1.
    pub span: u16,
    /// The number of entries of the group on all targets, flush entries and fragments included.
    pub num: u16,
    /// The place of this entry among the entries of the group, `0..num`.
    pub index: u16,
    /// The place of this entry among the stream's entries on this server. Each binding counts from
    /// 1 without gaps. This is the paper's `prev` plus one. A
    /// [redirected](Flags::REDIRECTED) entry in a log, and in a list of it, has the number of its
    /// [first block in the prepare area](Self::prepared_block) here instead.
    pub ordinal: u32,
    /// The drive, by its index in the volume's member list.
    pub member: Member,
    /// The effect of the entry on its drive.
    pub kind: Kind,
    /// The flags: boundary, flush, in place, split, extend, redirected.
    pub flags: Flags,
    /// The first block on the drive, below 2⁴⁸; 0 for [`Kind::Flush`].
    pub lba: u64,
    /// The number of blocks, 1 to 65536; 0 for [`Kind::Flush`].
    pub blocks: u32,
    /// The caller's tag of the last group of the entry, such as an LSN or a transaction id.
    pub tag: u64,
}

impl Attribute {
    /// The last group that the entry belongs to.
    #[must_use]
    pub const fn seq_end(&self) -> Seq {
        Seq(self.seq.0 + self.span as u64 - 1)
    }

    /// The first block of the entry's data in the prepare area of its drive, counted from the start
    /// of that area; `None` if the entry is not redirected. Only for an entry of a log or a list.
    #[must_use]
    pub const fn prepared_block(&self) -> Option<u32> {
        if self.flags.has(Flags::REDIRECTED) { Some(self.ordinal) } else { None }
    }

    /// Whether a FLUSH of the drive follows this entry.
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
            assert!(!Flags(1 << 6).are_known(kind), "{kind:?}: of a later version");
            assert!(!Flags::REDIRECTED.are_known(kind), "{kind:?}: only updates are redirected");
            let redirected = Flags::REDIRECTED.with(Flags::IN_PLACE);
            assert_eq!(redirected.are_known(kind), kind == Kind::Write, "{kind:?}");
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

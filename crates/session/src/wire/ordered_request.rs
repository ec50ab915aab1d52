//! The ordering attribute in an ordered request. It lies in command dwords that NVMe leaves free.
//!
//! The initiator writes it with [`put_attribute`], the target reads and checks it with
//! [`attribute`].

use riopipe_nvme::command::Sqe;
use riopipe_order::attribute::{Attribute, Flags, Kind, Member, Seq};
use riopipe_order::probe::{self, Plant};

/// The directive type of an ordered request: "vendor specific".
pub const DTYPE_ORDERED: u32 = 0xf;
/// The place of the directive type in CDW12: bits 23:20.
const DTYPE_SHIFT: u32 = 20;
/// The bits of the directive type in CDW12.
const DTYPE_MASK: u32 = 0xf << DTYPE_SHIFT;

/// Puts an attribute and the released mark into an ordered request (Write, Write Zeroes, Flush).
///
/// | dword | bits | field |
/// |---|---|---|
/// | CDW2 | 31:0 | seq, low 32 bits |
/// | CDW3 | 31:0 | ordinal |
/// | CDW4 | 31:0 | released mark, low 32 bits |
/// | CDW5 | 15:0 | num |
/// | CDW5 | 31:16 | index |
/// | CDW12 | 23:20 | directive type = Fh |
/// | CDW13 | 31:24 | span − 1 (directive specific) |
/// | CDW13 | 23:16 | flags (directive specific) |
/// | CDW13 | 15:8 | member |
/// | CDW14–15 | | tag |
///
/// The first block, the number of blocks and the kind of the request are in the command itself,
/// where NVMe has them.
#[inline]
pub fn put_attribute(sqe: &mut Sqe, attribute: &Attribute, released: Seq) {
    // Two dwords are stored at a time. The caller then copies the whole command with loads of 8
    // bytes or more. The processor would wait if these loads met smaller stores.
    let counts = u32::from(attribute.num) | u32::from(attribute.index) << 16;
    let span_flags_member = sqe.dword(13) & 0xff
        | u32::from(attribute.member.0) << 8
        | u32::from(attribute.flags.0) << 16
        | u32::from(attribute.span - 1) << 24;
    sqe.set_dwords(2, attribute.seq.wire(), attribute.ordinal);
    sqe.set_dwords(4, released.wire(), counts);
    let dword_12 = sqe.dword(12) & !DTYPE_MASK | DTYPE_ORDERED << DTYPE_SHIFT;
    sqe.set_dwords(12, dword_12, span_flags_member);
    sqe.set_dwords(14, attribute.tag as u32, (attribute.tag >> 32) as u32);
}

/// Puts the first block of a redirected request in the prepare area, counted from the start of that
/// area, into its order command. It lies where other commands have the released mark (CDW4).
pub fn put_prepared_block(sqe: &mut Sqe, block: u32) {
    sqe.set_dword(4, block);
}

/// The directive type of a Write, Write Zeroes or Flush command. Other commands use these bits
/// differently: bind, for example, has a part of a volume's id there.
#[inline]
pub(crate) fn directive_type(sqe: &Sqe) -> u32 {
    (sqe.dword(12) & DTYPE_MASK) >> DTYPE_SHIFT
}

/// Whether a command is an ordered request, so that it carries an attribute.
#[must_use]
#[inline]
pub fn is_ordered(sqe: &Sqe) -> bool {
    use riopipe_nvme::command::opcode::{FLUSH, WRITE, WRITE_ZEROES};
    matches!(sqe.opcode(), WRITE | WRITE_ZEROES | FLUSH) && directive_type(sqe) == DTYPE_ORDERED
}

/// The same request as a plain one, without an attribute. Only a plant, which removes a defence on
/// purpose, uses this function.
#[must_use]
pub(crate) fn without_attribute(sqe: &Sqe) -> Sqe {
    let mut plain = *sqe;
    plain.set_dwords(2, 0, 0);
    plain.set_dword(12, sqe.dword(12) & !DTYPE_MASK);
    plain
}

/// Reads the attribute and the released mark of an ordered request. [`put_attribute`] shows the
/// layout.
///
/// The command has only the lower 32 bits of its seq. This function returns the whole seq that has
/// these bits and is nearest to `near`, the highest seq that has arrived on the stream. In the same
/// way, the released mark becomes the one nearest to the request's seq (trap T5).
///
/// # Errors
/// [`BadAttribute`] names the field that is not valid (trap T18).
#[inline]
pub fn attribute(sqe: &Sqe, near: Seq) -> Result<(Attribute, Seq), BadAttribute> {
    use riopipe_nvme::command::opcode;
    let kind = match sqe.opcode() {
        opcode::WRITE => Kind::Write,
        opcode::WRITE_ZEROES => Kind::Discard,
        opcode::FLUSH => Kind::Flush,
        _ => return Err(BadAttribute::Opcode),
    };
    let attribute = attribute_of(sqe, kind, near)?;
    if attribute.flags.has(Flags::REDIRECTED) {
        return Err(BadAttribute::Flags);
    }
    Ok((attribute, released_of(sqe, &attribute)?))
}

/// The ordering metadata in an order command.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct OrderMetadata {
    /// The attribute of the request.
    pub attribute: Attribute,
    /// The released mark. The command of a redirected request has none.
    pub released: Option<Seq>,
    /// The first block of a redirected request in the prepare area.
    pub prepared_block: Option<u32>,
}

/// Reads the metadata of an order command, as [`attribute`] reads that of an ordered request.
///
/// # Errors
/// [`BadAttribute`] names the field that is not valid (trap T18).
pub fn order_metadata(sqe: &Sqe, near: Seq) -> Result<OrderMetadata, BadAttribute> {
    let kind = Kind::from_code(sqe.dword(13) as u8).ok_or(BadAttribute::Kind)?;
    let attribute = attribute_of(sqe, kind, near)?;
    if attribute.flags.has(Flags::REDIRECTED) {
        let prepared_block = Some(sqe.dword(4));
        return Ok(OrderMetadata { attribute, released: None, prepared_block });
    }
    let released = Some(released_of(sqe, &attribute)?);
    Ok(OrderMetadata { attribute, released, prepared_block: None })
}

/// Reads the released mark of a request with this attribute.
#[inline]
fn released_of(sqe: &Sqe, attribute: &Attribute) -> Result<Seq, BadAttribute> {
    let released = Seq::widen(sqe.dword(4), attribute.seq);
    // A group that is not submitted yet can't be released.
    if released >= attribute.seq {
        return Err(BadAttribute::Released);
    }
    Ok(released)
}

/// Reads the attribute of a request of this kind.
#[inline]
fn attribute_of(sqe: &Sqe, kind: Kind, near: Seq) -> Result<Attribute, BadAttribute> {
    let (counts, span_flags_member) = (sqe.dword(5), sqe.dword(13));
    let flags = Flags((span_flags_member >> 16) as u8);
    let is_flush = matches!(kind, Kind::Flush);
    let attribute = Attribute {
        seq: match probe::is_bug_planted(Plant::T5NotWidened) {
            false => Seq::widen(sqe.dword(2), near),
            true => Seq(u64::from(sqe.dword(2))),
        },
        span: (span_flags_member >> 24) as u16 + 1,
        num: counts as u16,
        index: (counts >> 16) as u16,
        ordinal: sqe.dword(3),
        member: Member((span_flags_member >> 8) as u8),
        kind,
        flags,
        lba: if is_flush { 0 } else { sqe.slba() },
        blocks: if is_flush { 0 } else { sqe.nlb() },
        tag: u64::from(sqe.dword(14)) | u64::from(sqe.dword(15)) << 32,
    };
    if !flags.are_known(kind) {
        return Err(BadAttribute::Flags);
    }
    if attribute.seq == Seq::ZERO {
        return Err(BadAttribute::Seq);
    }
    if attribute.num == 0 || attribute.index >= attribute.num {
        return Err(BadAttribute::Index);
    }
    if attribute.span > 1 && attribute.num != 1 {
        return Err(BadAttribute::Span);
    }
    if is_flush && !attribute.is_flush() {
        return Err(BadAttribute::Flags);
    }
    Ok(attribute)
}

/// The field of an ordered request that is not valid.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum BadAttribute {
    /// Only Write, Write Zeroes and Flush may be ordered.
    #[error("a command that cannot be ordered carries an attribute")]
    Opcode,
    /// An order command for an unknown kind of request.
    #[error("ordering metadata of an unknown kind")]
    Kind,
    /// Unknown flags, or a flush entry without the flush flag.
    #[error("unknown or contradictory flags")]
    Flags,
    /// Seq 0 is before the first group.
    #[error("seq 0")]
    Seq,
    /// `index` is not below `num`.
    #[error("an index that is not below num")]
    Index,
    /// A span over several groups in a group of several entries.
    #[error("an entry that spans groups in a group of several entries")]
    Span,
    /// A released mark at or beyond the request's own seq.
    #[error("a released mark that is not before the request's own seq")]
    Released,
}

#[cfg(test)]
mod tests {
    use riopipe_order::attribute::{StreamId, VolumeId};

    use super::*;
    use crate::wire::bind_command;

    fn sample() -> Attribute {
        Attribute {
            seq: Seq(0x1_0000_0007),
            span: 1,
            num: 3,
            index: 2,
            ordinal: 9,
            member: Member(4),
            kind: Kind::Write,
            flags: Flags::BOUNDARY.with(Flags::FLUSH),
            lba: 0x1234_5678_9abc,
            blocks: 8,
            tag: 0xdead_beef_0000_0001,
        }
    }

    #[test]
    fn an_attribute_survives_the_wire() {
        let a = sample();
        let mut sqe = Sqe::write(1, a.lba, a.blocks);
        assert!(!is_ordered(&sqe));
        put_attribute(&mut sqe, &a, Seq(0xffff_fff0));
        assert!(is_ordered(&sqe));
        assert_eq!(sqe.dword(12) >> 16 & 0xf, 0, "CETYPE stays clear (T17)");
        assert_eq!(attribute(&sqe, Seq(0xffff_ffff)), Ok((a, Seq(0xffff_fff0))));
    }

    #[test]
    fn the_metadata_of_each_kind_survives_an_order_command() {
        use crate::wire::{IO_ORDER, order_command};
        for kind in [Kind::Write, Kind::Discard, Kind::Flush] {
            let mut a = Attribute { kind, ..sample() };
            if kind == Kind::Flush {
                (a.lba, a.blocks) = (0, 0);
            }
            let mut sqe = order_command(3, kind, a.lba, a.blocks);
            put_attribute(&mut sqe, &a, Seq(0xffff_fff0));
            assert_eq!((sqe.opcode(), sqe.nsid()), (IO_ORDER, 3));
            assert!(!is_ordered(&sqe), "it has no effect on a drive");
            let released = Some(Seq(0xffff_fff0));
            let found = OrderMetadata { attribute: a, released, prepared_block: None };
            assert_eq!(order_metadata(&sqe, Seq(0xffff_ffff)), Ok(found));
            sqe.set_dword(13, sqe.dword(13) & !0xff | 9);
            assert_eq!(order_metadata(&sqe, Seq(0)), Err(BadAttribute::Kind), "T18");
        }
    }

    #[test]
    fn the_block_of_a_redirected_update_survives_an_order_command() {
        use crate::wire::order_command;
        let flags = Flags::IN_PLACE.with(Flags::REDIRECTED);
        let a = Attribute { flags, ..sample() };
        let mut sqe = order_command(3, Kind::Write, a.lba, a.blocks);
        put_attribute(&mut sqe, &a, Seq(0xffff_fff0));
        put_prepared_block(&mut sqe, 0xf1e2_d3c4);
        let (released, prepared_block) = (None, Some(0xf1e2_d3c4));
        let found = OrderMetadata { attribute: a, released, prepared_block };
        assert_eq!(order_metadata(&sqe, Seq(0xffff_ffff)), Ok(found));
        assert_eq!(sqe.dword(4), 0xf1e2_d3c4);
        let mut write = Sqe::write(3, a.lba, a.blocks);
        put_attribute(&mut write, &a, Seq(0xffff_fff0));
        let refused = attribute(&write, Seq(0xffff_ffff));
        assert_eq!(refused, Err(BadAttribute::Flags), "T18: only metadata can be redirected");
    }

    #[test]
    fn an_attribute_has_its_place_in_the_wire_format() {
        let a = Attribute {
            seq: Seq(0x1_8293_a4b5),
            num: 0x9182,
            index: 0x8070,
            ordinal: 0xa1b2_c3d4,
            member: Member(0xe5),
            flags: Flags::BOUNDARY.with(Flags::IN_PLACE),
            tag: 0xf1e2_d3c4_b5a6_9788,
            ..sample()
        };
        let mut sqe = Sqe::write(1, a.lba, a.blocks);
        let length = sqe.dword(12);
        put_attribute(&mut sqe, &a, Seq(0x1_8293_a4b4));
        let dwords = [2, 3, 4, 5, 12, 13, 14, 15].map(|i| sqe.dword(i));
        let flags = u32::from(a.flags.0) << 16;
        assert_eq!(
            dwords,
            [
                0x8293_a4b5,
                0xa1b2_c3d4,
                0x8293_a4b4,
                0x8070_9182,
                length | 0xf << 20,
                0xe5 << 8 | flags,
                0xb5a6_9788,
                0xf1e2_d3c4
            ]
        );
        assert_eq!(attribute(&sqe, a.seq), Ok((a, Seq(0x1_8293_a4b4))));
        // Several groups in one entry, and the other kinds.
        let span = Attribute { span: 256, num: 1, index: 0, ..sample() };
        put_attribute(&mut sqe, &span, Seq(1 << 32));
        assert_eq!(sqe.dword(13) >> 24, 255);
        let write = Sqe::write(1, span.lba, span.blocks);
        let zeroes = Sqe::write_zeroes(1, span.lba, span.blocks, true);
        let flush = Attribute { kind: Kind::Flush, lba: 0, blocks: 0, ..span };
        let discard = Attribute { kind: Kind::Discard, ..span };
        for (mut sqe, a) in [(write, span), (zeroes, discard), (Sqe::flush(1), flush)] {
            put_attribute(&mut sqe, &a, Seq(1 << 32));
            assert!(is_ordered(&sqe));
            assert_eq!(attribute(&sqe, a.seq), Ok((a, Seq(1 << 32))));
        }
    }

    #[test]
    fn t18_attributes_that_are_not_valid_are_refused() {
        let refused = |change: fn(&mut Attribute), released: u64| {
            let mut a = sample();
            change(&mut a);
            let mut sqe = Sqe::write(1, a.lba, a.blocks);
            put_attribute(&mut sqe, &a, Seq(released));
            attribute(&sqe, Seq(0x1_0000_0000)).unwrap_err()
        };
        assert_eq!(refused(|a| a.index = 3, 1 << 32), BadAttribute::Index);
        assert_eq!(refused(|a| a.num = 0, 1 << 32), BadAttribute::Index);
        assert_eq!(refused(|a| a.span = 2, 1 << 32), BadAttribute::Span);
        assert_eq!(refused(|a| a.flags = Flags(0x80), 1 << 32), BadAttribute::Flags);
        assert_eq!(refused(|a| a.flags = Flags(Flags::KNOWN + 1), 1 << 32), BadAttribute::Flags);
        assert_eq!(refused(|a| a.flags = Flags::PLACE, 1 << 32), BadAttribute::Flags);
        assert_eq!(refused(|_| (), 0x1_0000_0007), BadAttribute::Released);
        assert_eq!(refused(|_| (), 0x1_0000_0008), BadAttribute::Released);
        let mut sqe = Sqe::flush(1);
        let plain = Attribute { flags: Flags::BOUNDARY, ..sample() };
        put_attribute(&mut sqe, &plain, Seq(1 << 32));
        assert_eq!(attribute(&sqe, plain.seq), Err(BadAttribute::Flags), "a flush entry flushes");
        let mut sqe = Sqe::write(1, 0, 1);
        put_attribute(&mut sqe, &Attribute { seq: Seq::ZERO, ..sample() }, Seq::ZERO);
        assert_eq!(attribute(&sqe, Seq::ZERO), Err(BadAttribute::Seq));
        let mut sqe = Sqe::read(1, 0, 1);
        put_attribute(&mut sqe, &sample(), Seq(1));
        assert!(!is_ordered(&sqe));
        assert_eq!(attribute(&sqe, Seq(1)), Err(BadAttribute::Opcode));
        let bind = bind_command(VolumeId([0xff; 16]), StreamId(1), 1, Seq(0));
        assert!(!is_ordered(&bind), "a volume id is no directive");
    }
}

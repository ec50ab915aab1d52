//! Ordering attributes.

use riopipe_order::attribute::{Attribute, Flags, Kind, Member, Seq};

/// The attribute of an ordered write of one block of member 0, in a group of its own; `seq` is its
/// ordinal, too.
#[must_use]
pub fn attribute(seq: u64, lba: u64) -> Attribute {
    Attribute {
        seq: Seq(seq),
        span: 1,
        num: 1,
        index: 0,
        ordinal: seq as u32,
        member: Member(0),
        kind: Kind::Write,
        flags: Flags::BOUNDARY,
        lba,
        blocks: 1,
        tag: 0,
    }
}

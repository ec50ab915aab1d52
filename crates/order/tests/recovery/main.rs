//! The decisions of recovery, against oracles far simpler than the code: which entries are durable
//! (T4), how far each stream reaches (T1, T6), which blocks are undone and which are listed (T11),
//! and that an interrupted recovery finds the same prefix again (T9).

#[path = "../common/mod.rs"]
mod common;
mod decide;
mod decide_oracle;
mod validate;
mod validate_gate;

use riopipe_order::attribute::{Attribute, Flags, Kind, Member, Seq};

/// A one-block write on member 0 that is a group of its own.
fn write(seq: u64) -> Attribute {
    common::write(seq, seq as u32)
}

/// A write of `blocks` at `lba` of a member.
fn write_at(seq: u64, member: u8, lba: u64, blocks: u32) -> Attribute {
    Attribute { member: Member(member), lba, blocks, ..write(seq) }
}

/// The flush entry of a joint FLUSH (T3).
fn flush(seq: u64, member: u8) -> Attribute {
    let flags = Flags::BOUNDARY.with(Flags::FLUSH);
    Attribute { kind: Kind::Flush, flags, ..write_at(seq, member, 0, 0) }
}

/// A request merged over whole groups.
fn merged(seq: u64, span: u16) -> Attribute {
    Attribute { span, blocks: u32::from(span), tag: !(seq + u64::from(span) - 1), ..write(seq) }
}

fn seqs<'a>(entries: impl IntoIterator<Item = &'a Attribute>) -> Vec<Seq> {
    entries.into_iter().map(|a| a.seq).collect()
}

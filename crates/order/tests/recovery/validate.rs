//! Which of a partition's entries are durable (T4, T12).

use proptest::prelude::*;
use riopipe_order::attribute::{Attribute, Flags, Kind};
use riopipe_order::entry::{Origin, Position};
use riopipe_order::ordering_log::LoggedEntry;
use riopipe_order::recovery::validate;

use crate::common::Choices;
use crate::{flush, seqs, write, write_at};

/// Entries as logged one after the other; those with `true` are persisted.
fn logged(entries: &[(Attribute, bool)]) -> Vec<LoggedEntry> {
    let entry = |(at, &(attribute, persisted)): (usize, &(Attribute, bool))| LoggedEntry {
        position: Position(100 + at as u64),
        attribute,
        origin: Origin { generation: 3, incarnation: 1 },
        persisted,
    };
    entries.iter().enumerate().map(entry).collect()
}

/// The seqs of the durable ones.
fn durable(entries: &[(Attribute, bool)]) -> Vec<u64> {
    let logged = logged(entries);
    let durable = validate(&logged);
    assert_eq!(durable.len(), logged.len());
    let kept = logged.iter().zip(durable).filter(|(_, durable)| *durable);
    seqs(kept.map(|(entry, _)| &entry.attribute)).into_iter().map(|seq| seq.0).collect()
}

#[test]
fn what_is_persisted_is_durable_and_nothing_else_by_itself() {
    assert_eq!(durable(&[(write(1), true), (write(2), false), (write(3), true)]), [1, 3]);
    assert_eq!(durable(&[]), [] as [u64; 0]);
}

#[test]
fn t4_a_flush_covers_earlier_writes_on_its_own_drive_only() {
    let on = |seq, member| (write_at(seq, member, seq, 1), false);
    let history = |persisted| [on(1, 0), on(2, 1), (flush(3, 0), persisted), on(4, 0)];
    assert_eq!(durable(&history(true)), [1, 3], "not for another drive, not for what came later");
    assert_eq!(
        durable(&history(false)),
        [] as [u64; 0],
        "a flush that has not ended covers nothing"
    );
}

#[test]
fn t4_a_flushed_write_covers_as_a_flush_does() {
    let flags = Flags::BOUNDARY.with(Flags::FLUSH);
    let last = Attribute { flags, ..write(3) };
    assert_eq!(durable(&[(write(1), false), (write(2), false), (last, true)]), [1, 2, 3]);
    let plain = write(3);
    assert_eq!(durable(&[(write(1), false), (write(2), false), (plain, true)]), [3]);
}

#[test]
fn t4_within_a_group_the_index_is_the_order() {
    let part = |index, member| Attribute { num: 3, index, ..write_at(7, member, 9, 1) };
    let last = Attribute { num: 3, index: 2, ..flush(7, 0) };
    let logged = logged(&[(part(1, 0), false), (part(0, 1), false), (last, true)]);
    assert_eq!(validate(&logged), [true, false, true]);
    let first = Attribute { index: 0, ..last };
    let late = Attribute { index: 2, ..part(1, 0) };
    let logged = self::logged(&[(first, true), (late, false)]);
    assert_eq!(validate(&logged), [true, false]);
}

#[test]
fn t4_replay_may_have_logged_an_earlier_entry_behind_a_later_one() {
    // W1 was torn by a crash and came again when W2 and the flush were logged already.
    let history = [(write(2), false), (flush(3, 0), true), (write(1), false)];
    assert_eq!(durable(&history), [2, 3, 1], "stream order counts, not position");
    let history = [(flush(2, 0), true), (write(3), false), (write(1), false)];
    assert_eq!(durable(&history), [2, 1]);
}

#[test]
fn t12_a_later_durable_write_over_it_proves_an_earlier_one_complete() {
    let at = |seq, lba, blocks, persisted| (write_at(seq, 2, lba, blocks), persisted);
    assert_eq!(durable(&[at(1, 10, 1, false), at(2, 10, 1, true)]), [1, 2]);
    assert_eq!(durable(&[at(1, 10, 1, true), at(2, 10, 1, false)]), [1], "not the other way");
    assert_eq!(
        durable(&[at(1, 10, 1, false), at(2, 11, 1, true)]),
        [2],
        "adjacent blocks do not overlap"
    );
    assert_eq!(durable(&[at(1, 10, 4, false), at(2, 13, 9, true)]), [1, 2]);
    assert_eq!(durable(&[at(1, 10, 4, false), at(2, 14, 9, true)]), [2]);
    assert_eq!(durable(&[at(1, 10, 4, false), at(2, 2, 8, true)]), [2]);
    assert_eq!(durable(&[at(1, 10, 4, false), at(2, 2, 9, true)]), [1, 2]);
    let chain = [at(1, 10, 2, false), at(2, 11, 2, false), at(3, 12, 2, true)];
    assert_eq!(durable(&chain), [1, 2, 3], "one covers the next");
    let apart = [at(1, 10, 2, false), at(2, 12, 2, false), at(3, 11, 1, true)];
    assert_eq!(durable(&apart), [1, 3]);
}

#[test]
fn t12_overlap_proves_nothing_by_what_is_not_durable_or_on_another_drive() {
    let at = |seq, member, persisted| (write_at(seq, member, 10, 1), persisted);
    let none: [u64; 0] = [];
    assert_eq!(durable(&[at(1, 0, false), at(2, 0, false)]), none, "perhaps in the cache, both");
    assert_eq!(durable(&[at(1, 2, false), at(2, 3, true)]), [2]);
}

/// The rules as they are written, again and again until nothing changes.
fn oracle(entries: &[LoggedEntry]) -> Vec<bool> {
    let later = |a: &Attribute, b: &Attribute| (b.seq, b.index) > (a.seq, a.index);
    let touch = |a: &Attribute, b: &Attribute| {
        (a.lba..a.lba + u64::from(a.blocks))
            .any(|block| (b.lba..b.lba + u64::from(b.blocks)).contains(&block))
    };
    let mut durable: Vec<bool> = entries.iter().map(|entry| entry.persisted).collect();
    loop {
        let mut changed = false;
        for (i, one) in entries.iter().enumerate() {
            let a = &one.attribute;
            let proven = entries.iter().enumerate().any(|(j, other)| {
                let b = &other.attribute;
                let flushed = other.persisted && b.flags.has(Flags::FLUSH);
                let over = durable[j] && touch(a, b);
                a.member == b.member && later(a, b) && (flushed || over)
            });
            changed |= proven && !durable[i];
            durable[i] |= proven;
        }
        if !changed {
            return durable;
        }
    }
}

fn random_partition(choices: &mut Choices) -> Vec<(Attribute, bool)> {
    let mut entries = Vec::new();
    let mut seq = 1 + choices.below(3) as u64;
    while entries.len() < 40 && choices.below(24) > 0 {
        let num = 1 + choices.below(3) as u16;
        for index in 0..num {
            let member = choices.below(4) as u8;
            let span = if num == 1 && choices.below(4) == 0 { 3 } else { 1 };
            let mut a = match choices.below(6) {
                0 => flush(seq, member),
                _ => write_at(seq, member, choices.below(12) as u64, 1 + choices.below(4) as u32),
            };
            if a.kind != Kind::Flush && choices.below(6) == 0 {
                a.flags = a.flags.with(Flags::FLUSH);
            }
            entries.push((Attribute { num, index, span, ..a }, choices.below(4) == 0));
            seq += if index + 1 == num { u64::from(span) } else { 0 };
        }
    }
    // Replay puts some behind others.
    for _ in 0..choices.below(4) {
        let from = choices.below(entries.len());
        if from < entries.len() {
            let entry = entries.remove(from);
            entries.insert(choices.below(entries.len() + 1), entry);
        }
    }
    entries
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 500, ..ProptestConfig::default() })]

    #[test]
    fn t4_durable_entries_are_those_of_the_rules(bytes in prop::collection::vec(any::<u16>(), 0..300)) {
        let entries = logged(&random_partition(&mut Choices::new(bytes)));
        prop_assert_eq!(validate(&entries), oracle(&entries));
    }
}

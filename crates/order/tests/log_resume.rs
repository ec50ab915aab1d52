//! Resuming a log after a lost connection or a target's restart: the entries that stay, the entries
//! that a replay finds again, and the result of a crash in the middle of it (P7).

mod common;

use common::{
    ID, MARKS, ORIGIN, append_all, crc32c, fresh, lose, old_or_new, reopen, seqs, torn, write,
};
use riopipe_order::attribute::{Attribute, Flags, Kind, Member, Seq};
use riopipe_order::entry::{Origin, Position};
use riopipe_order::ordering_log::{AppendError, BindError, Damage, LogError, StreamLog};
use riopipe_order::region::MemRegion;

fn origin(incarnation: u32) -> Origin {
    Origin { incarnation, ..ORIGIN }
}

/// Sends groups again, in order, with new ordinals. Returns their positions.
fn replay(log: &mut StreamLog<MemRegion>, range: std::ops::RangeInclusive<u64>) -> Vec<Position> {
    let again = |(seq, ordinal)| log.append(&write(seq, ordinal)).unwrap();
    let positions = range.zip(1..).map(again).collect();
    log.fence().unwrap();
    positions
}

#[test]
fn a_resumed_log_is_cut_at_its_first_hole_and_knows_old_holes_from_new_damage() {
    let mut log = fresh(8);
    append_all(&mut log, 1..=2);
    for seq in 3..=5 {
        log.append(&write(seq, seq as u32)).unwrap();
    }
    // Of the unfenced batch 3, 4, 5 only 4 arrived.
    let mut region = log.into_region();
    region.bytes_mut()[MARKS + 2 * 64..][..64].fill(0);
    region.bytes_mut()[MARKS + 4 * 64 + 30] ^= 4;
    let (mut log, scan) = reopen(region);
    assert_eq!((seqs(&scan), scan.torn), (vec![1, 2, 4], 1));
    assert_eq!(log.resume(origin(8)), Err(BindError::Incarnation { given: 8, current: 9 }));
    log.resume(origin(10)).unwrap();
    assert_eq!(seqs(&log.scan().unwrap()), [1, 2], "nothing was submitted for 4");
    let positions = replay(&mut log, 1..=6);
    assert_eq!(positions, [0, 1, 2, 3, 4, 5].map(Position));
    let (_, scan) = reopen(log.region().crash(7));
    assert_eq!((seqs(&scan), scan.torn), (vec![1, 2, 3, 4, 5, 6], 0));
    assert_eq!(
        scan.entries[1].origin, ORIGIN,
        "an entry keeps the incarnation it was appended in (T4)"
    );
    assert_eq!(scan.entries[2].origin, origin(10));
    append_all(&mut log, 7..=7);
    // The same loss again is damage: the next batch proves that it was durable.
    let mut region = log.into_region();
    region.bytes_mut()[MARKS + 2 * 64..][..64].fill(0);
    let lost = Damage::EntryLost(Position(2));
    assert!(matches!(StreamLog::open(region, ID, crc32c),
        Err(LogError::Damaged { what, .. }) if what == lost));
}

#[test]
fn t6_a_replayed_entry_is_adopted_and_not_logged_again() {
    let group = |index| Attribute { num: 3, index, lba: 100 * u64::from(index), ..write(7, 0) };
    let merged = Attribute { span: 4, ..write(8, 0) };
    let flush = Attribute {
        kind: Kind::Flush,
        flags: Flags::FLUSH.with(Flags::BOUNDARY),
        lba: 0,
        blocks: 0,
        ..write(12, 0)
    };
    let sent = [group(0), group(1), group(2), merged, flush];
    let mut log = fresh(16);
    let first = sent.map(|a| log.append(&a).unwrap());
    log.fence().unwrap();
    let (mut log, _) = reopen(log.into_region().crash(0));
    log.resume(origin(10)).unwrap();
    let before = log.region().bytes().to_vec();
    let again = [1, 2, 3, 4, 5].map(|ordinal| Attribute { ordinal, ..sent[ordinal as usize - 1] });
    for (sent, position) in again.iter().zip(first) {
        assert_eq!(log.append(sent), Ok(position));
    }
    assert_eq!(log.region().bytes(), before, "nothing was written");
    assert_eq!(log.free_slots(), 16 - 5);
    // An entry that was never in the log is appended.
    let new = log.append(&Attribute { num: 4, index: 3, ..group(0) });
    assert_eq!(new, Ok(Position(5)));
}

#[test]
fn t6_a_replayed_entry_of_another_shape_is_refused() {
    let mut log = fresh(8);
    append_all(&mut log, 1..=3);
    let (mut log, _) = reopen(log.into_region());
    log.resume(ORIGIN).unwrap();
    let before = log.region().bytes().to_vec();
    let sent = write(2, 9);
    let others = [
        Attribute { span: 2, ..sent },
        Attribute { num: 2, ..sent },
        Attribute { member: Member(1), ..sent },
        Attribute { kind: Kind::Discard, ..sent },
        Attribute { flags: sent.flags.with(Flags::IN_PLACE), ..sent },
        Attribute { flags: sent.flags.with(Flags::EXTEND), ..sent },
        Attribute { lba: sent.lba + 1, ..sent },
        Attribute { blocks: 2, ..sent },
        Attribute { tag: sent.tag + 1, ..sent },
    ];
    for other in others {
        let refused = Err(AppendError::OtherShape { seq: Seq(2), index: 0 });
        assert_eq!(log.append(&other), refused, "{other:?}");
    }
    assert_eq!(log.region().bytes(), before);
    assert_eq!(log.append(&sent), Ok(Position(1)));
}

#[test]
fn t13_a_full_log_can_be_replayed() {
    // The crash takes any part of a batch that filled the log. All of the batch fits again.
    for durable in [0, 3] {
        let mut log = fresh(durable + 5);
        append_all(&mut log, 1..=u64::from(durable));
        let before = log.region().clone();
        let all = 1..=u64::from(durable) + 5;
        for seq in u64::from(durable) + 1..=*all.end() {
            log.append(&write(seq, seq as u32)).unwrap();
        }
        let after = log.into_region();
        let batch: Vec<_> = (durable as usize..durable as usize + 5).collect();
        for outcome in 0..3_u32.pow(5) {
            let (mut log, _) = reopen(lose(&before, &after, &batch, outcome));
            log.resume(origin(10)).unwrap();
            let positions = replay(&mut log, all.clone());
            assert_eq!(positions, (0..*all.end()).map(Position).collect::<Vec<_>>(), "{outcome}");
            let full = AppendError::Full { slots: durable + 5, released: Seq::ZERO };
            assert_eq!(log.append(&write(9, 9)), Err(full));
            let (_, scan) = reopen(log.into_region().crash(0));
            assert_eq!((seqs(&scan), scan.torn), (all.clone().collect(), 0));
        }
    }
}

#[test]
fn t7_an_adopted_entry_is_persisted_in_the_incarnation_it_was_appended_in() {
    let mut log = fresh(16);
    let mut origins = Vec::new();
    for incarnation in 9..=13 {
        // Two more groups in each incarnation.
        let last = 2 * (u64::from(incarnation) - 8);
        replay(&mut log, 1..=last);
        origins.extend([origin(incarnation); 2]);
        log = reopen(log.into_region().crash(0)).0;
        log.resume(origin(incarnation + 1)).unwrap();
    }
    let positions = replay(&mut log, 1..=10);
    for position in positions {
        log.persist(position);
    }
    log.fence().unwrap();
    let (_, scan) = reopen(log.into_region().crash(0));
    let found: Vec<_> = scan.entries.iter().map(|e| e.origin).collect();
    assert_eq!(found, origins);
    assert!(scan.entries.iter().all(|e| e.persisted), "{scan:#?}");
}

#[test]
fn t7_a_released_entry_does_not_affect_the_next_lap() {
    let mut log = fresh(4);
    append_all(&mut log, 1..=4);
    let (mut log, _) = reopen(log.into_region());
    log.resume(origin(10)).unwrap();
    let positions = replay(&mut log, 1..=4);
    log.release(Seq(4));
    append_all(&mut log, 5..=6);
    for position in positions {
        log.persist(position);
    }
    // The next batch proves the one before: a word that is none of its own would be damage.
    append_all(&mut log, 7..=7);
    let (_, scan) = reopen(log.into_region());
    let found: Vec<_> = scan.entries.iter().map(|e| (e.attribute.seq.0, e.persisted)).collect();
    assert_eq!(found, [(5, false), (6, false), (7, false)]);
}

#[test]
#[should_panic(expected = "is not of this binding")]
fn an_entry_of_an_older_binding_is_persisted_only_when_resumed() {
    let mut log = fresh(8);
    append_all(&mut log, 1..=3);
    log.start(ORIGIN, Seq(3)).unwrap();
    log.persist(Position(2));
}

#[test]
fn a_lost_connection_alone_loses_nothing() {
    let mut log = fresh(8);
    append_all(&mut log, 1..=3);
    // Not fenced yet when the connection was lost. The target lives on.
    log.append(&write(4, 4)).unwrap();
    log.release(Seq(1));
    for round in 0..3 {
        log.resume(ORIGIN).unwrap();
        assert_eq!(log.free_slots(), 8 - 3, "what is released in memory stays so");
        assert_eq!(replay(&mut log, 2..=4), [1, 2, 3].map(Position), "round {round}");
    }
    let (_, scan) = reopen(log.into_region().crash(1));
    assert_eq!((seqs(&scan), scan.released), (vec![2, 3, 4], Seq(1)));
}

#[test]
fn what_is_released_is_not_adopted_any_more() {
    let mut log = fresh(8);
    append_all(&mut log, 1..=4);
    let (mut log, _) = reopen(log.into_region());
    log.resume(ORIGIN).unwrap();
    log.release(Seq(2));
    // No initiator sends these. The point is that nothing is kept for them.
    assert_eq!(log.append(&write(2, 1)), Ok(Position(4)));
    assert_eq!(log.append(&write(3, 2)), Ok(Position(2)));
    log.release(Seq(4));
    assert_eq!(log.append(&write(3, 3)), Ok(Position(5)));
}

#[test]
fn t7_a_log_started_anew_adopts_nothing() {
    let mut log = fresh(8);
    append_all(&mut log, 1..=3);
    let (mut log, _) = reopen(log.into_region());
    log.resume(ORIGIN).unwrap();
    log.start(ORIGIN, Seq::ZERO).unwrap();
    assert_eq!(replay(&mut log, 1..=2), [3, 4].map(Position));
    let (_, scan) = reopen(log.into_region());
    let found: Vec<_> = scan.entries.iter().map(|e| (e.position.0, e.attribute.seq.0)).collect();
    assert_eq!(found, [(3, 1), (4, 2)]);
}

#[test]
fn t13_nothing_is_adopted_after_a_fault() {
    let mut log = fresh(8);
    append_all(&mut log, 1..=3);
    let mut region = log.into_region();
    region.fail_fences_after(3);
    let (mut log, _) = reopen(region);
    log.resume(ORIGIN).unwrap();
    log.append(&write(1, 1)).unwrap();
    assert!(log.fence().is_err());
    assert!(matches!(log.append(&write(2, 2)), Err(AppendError::Region(_))));
}

#[test]
fn t7_a_resumed_log_forgets_persist_words_of_older_laps() {
    let mut log = fresh(4);
    for seq in 1..=4 {
        let position = log.append(&write(seq, seq as u32)).unwrap();
        log.fence().unwrap();
        log.persist(position);
    }
    log.release_now(Seq(4)).unwrap();
    let stale = log.region().bytes()[MARKS..MARKS + 8].to_vec();
    log.append(&write(5, 5)).unwrap();
    let mut region = log.into_region();
    region.bytes_mut()[MARKS..MARKS + 8].copy_from_slice(&stale);
    let (mut log, _) = reopen(region);
    log.resume(ORIGIN).unwrap();
    append_all(&mut log, 6..=6);
    let scan = reopen(log.into_region()).1;
    assert_eq!(seqs(&scan), [5, 6], "not taken for damage once a later entry covers it");
    assert!(!scan.entries[0].persisted);
}

#[test]
fn t1_a_resumed_log_reuses_a_slot_only_after_the_mark_is_durable() {
    for seed in 0..100 {
        let mut log = fresh(8);
        append_all(&mut log, 1..=8);
        let (mut log, _) = reopen(log.into_region().crash(seed));
        log.resume(origin(10)).unwrap();
        replay(&mut log, 1..=8);
        log.release(Seq(2));
        log.append(&write(9, 9)).unwrap();
        let (_, scan) = reopen(log.into_region().crash(seed));
        let expected = scan.released.0 + 1..=8;
        let found = seqs(&scan);
        assert!(expected.clone().all(|seq| found.contains(&seq)), "seed {seed}: {found:?}");
    }
}

#[test]
fn t9_a_crash_while_resuming_leaves_the_old_log_or_the_new() {
    for outcome in 0..81 {
        let fences = old_or_new(&torn(outcome), |log| log.resume(origin(10)));
        assert!(fences >= 3, "the clean-up, and both copies of the mark");
    }
}

#[test]
fn t7_cleaning_up_completes_no_torn_entry() {
    // All of entry 5 has arrived over entry 1, but for its tag, which is 0.
    let mut log = fresh(4);
    append_all(&mut log, 1..=4);
    log.release_now(Seq(4)).unwrap();
    let before = log.region().clone();
    log.append(&Attribute { tag: 0, ..write(5, 5) }).unwrap();
    let mut torn = lose(&before, log.region(), &[0], 1);
    let tag = MARKS + 32..MARKS + 40;
    torn.bytes_mut()[tag.clone()].copy_from_slice(&before.bytes()[tag]);
    assert_eq!(reopen(torn.clone()).1.torn, 1);
    for fences in 0..2 {
        let mut faulty = torn.clone();
        faulty.fail_fences_after(fences);
        let (mut log, _) = reopen(faulty);
        assert!(log.resume(origin(10)).is_err());
        for seed in 0..4000 {
            let scan = reopen(log.region().crash(seed)).1;
            assert_eq!(seqs(&scan), [], "{fences} fences, seed {seed}");
        }
    }
}

//! The records of recovery in a log: how far the prefix reaches, its tag, and that nothing is to be
//! undone from it any more (T9).

mod common;

use common::{
    ID, MARK, MARKS, ORIGIN, State, append_all, crc32c, fresh, old_or_new, reopen, seqs, torn,
    write,
};
use riopipe_order::attribute::{Attribute, GroupTag, Seq};
use riopipe_order::entry::{Origin, Position};
use riopipe_order::ordering_log::{
    AppendError, BindError, ForgetError, LogError, SettleError, StreamLog, partition_bytes,
};
use riopipe_order::region::MemRegion;

const NEW_OWNER: Origin = Origin { generation: ORIGIN.generation + 1, incarnation: 10 };

/// The tag that [`write`] gives a group.
fn tagged(seq: u64) -> GroupTag {
    GroupTag::new(Seq(seq), write(seq, 0).tag)
}

#[test]
fn t9_settling_records_k_and_keeps_what_lies_beyond_listed() {
    let mut log = fresh(16);
    append_all(&mut log, 1..=6);
    log.release_now(Seq(2)).unwrap();
    let (mut log, _) = reopen(log.into_region());
    assert!(!log.is_settled());
    log.settle(Seq(4), 0x44).unwrap();
    assert_eq!(
        (log.released(), log.newest_tag(), log.is_settled()),
        (Seq(4), GroupTag::new(Seq(4), 0x44), true)
    );
    let (mut log, scan) = reopen(log.into_region().crash(0));
    assert_eq!(
        (scan.released, scan.newest_tag, scan.settled),
        (Seq(4), GroupTag::new(Seq(4), 0x44), true)
    );
    assert_eq!(seqs(&scan), [5, 6]);
    assert_eq!(scan.origin, ORIGIN, "no stream is bound to it");
    assert_eq!(
        (log.released(), log.newest_tag(), log.is_settled()),
        (Seq(4), GroupTag::new(Seq(4), 0x44), true)
    );
    // Nothing is added to it, and k stays.
    assert_eq!(log.append(&write(7, 1)), Err(AppendError::Unbound));
    log.release_now(Seq(5)).unwrap();
    assert_eq!(log.released(), Seq(4));
    assert_eq!(seqs(&log.scan().unwrap()), [5, 6]);
}

#[test]
fn t9_settled_again_it_must_be_at_the_same_group() {
    let mut log = fresh(16);
    append_all(&mut log, 1..=6);
    log.release(Seq(2));
    let early = SettleError::Released { k: Seq(1), released: Seq(2) };
    assert_eq!(log.settle(Seq(1), 0), Err(early));
    assert!(!log.is_settled());
    log.settle(Seq(4), 0x44).unwrap();
    for k in [3, 5] {
        let other = SettleError::Settled { k: Seq(k), settled: Seq(4) };
        assert_eq!(log.settle(Seq(k), 0x55), Err(other));
    }
    log.settle(Seq(4), 0x55).unwrap();
    assert_eq!(log.newest_tag(), GroupTag::new(Seq(4), 0x44), "as first recorded");
    let (_, scan) = reopen(log.into_region().crash(0));
    assert_eq!((scan.released, scan.newest_tag), (Seq(4), GroupTag::new(Seq(4), 0x44)));
}

#[test]
fn t9_a_settled_log_is_not_resumed() {
    let mut log = fresh(16);
    append_all(&mut log, 1..=3);
    log.settle(Seq(1), 0).unwrap();
    let settled = Err(BindError::Settled { released: Seq(1) });
    assert_eq!(log.resume(ORIGIN), settled);
    let (mut log, _) = reopen(log.into_region());
    assert_eq!(log.resume(ORIGIN), settled);
    assert_eq!(log.append(&write(2, 1)), Err(AppendError::Unbound), "nothing is adopted either");
    log.start(ORIGIN, Seq(1)).unwrap();
    log.resume(ORIGIN).unwrap();
}

#[test]
fn t9_a_binding_that_is_settled_under_its_owner_takes_nothing_more() {
    let mut log = fresh(8);
    append_all(&mut log, 1..=3);
    log.resume(ORIGIN).unwrap();
    log.settle(Seq(2), 0).unwrap();
    assert_eq!(log.append(&write(3, 1)), Err(AppendError::Unbound), "it would have been adopted");
    assert_eq!(log.append(&write(4, 1)), Err(AppendError::Unbound));
}

#[test]
fn t11_only_a_settled_log_is_emptied_and_it_stays_settled() {
    let mut log = fresh(16);
    append_all(&mut log, 1..=6);
    let before = log.region().bytes().to_vec();
    assert_eq!(log.remove_entries(), Err(ForgetError::NotSettled));
    assert_eq!(log.region().bytes(), before);
    log.settle(Seq(4), 0x44).unwrap();
    for _ in 0..2 {
        log.remove_entries().unwrap();
        assert_eq!(log.free_slots(), 16);
        let (_, scan) = reopen(log.region().crash(0));
        assert!(scan.is_clean());
        assert_eq!(
            (scan.released, scan.newest_tag, scan.settled),
            (Seq(4), GroupTag::new(Seq(4), 0x44), true)
        );
        assert_eq!(scan.origin, ORIGIN);
    }
}

#[test]
fn t9_a_log_started_anew_is_settled_no_more_and_keeps_the_tag() {
    for forget in [false, true] {
        let mut log = fresh(16);
        append_all(&mut log, 1..=6);
        log.settle(Seq(4), 0x44).unwrap();
        if forget {
            log.remove_entries().unwrap();
        }
        log.start(NEW_OWNER, Seq(4)).unwrap();
        let (_, scan) = reopen(log.region().crash(0));
        assert!(scan.is_clean());
        assert_eq!(
            (scan.released, scan.newest_tag, scan.settled),
            (Seq(4), GroupTag::new(Seq(4), 0x44), false)
        );
        assert_eq!(scan.origin, NEW_OWNER);
        append_all(&mut log, 5..=5);
        assert_eq!(seqs(&log.scan().unwrap()), [5]);
        // The next recovery may come to another k.
        log.settle(Seq(5), 0x55).unwrap();
        assert_eq!(log.newest_tag(), GroupTag::new(Seq(5), 0x55));
    }
}

#[test]
fn t9_torn_appends_are_gone_once_a_settled_log_is_emptied() {
    for outcome in 0..81 {
        let (mut log, scan) = reopen(torn(outcome));
        log.settle(scan.released, 0).unwrap();
        assert_eq!(log.scan().unwrap().entries, scan.entries, "settling changes no list");
        log.remove_entries().unwrap();
        let (mut log, scan) = reopen(log.into_region().crash(0));
        assert!(scan.is_clean(), "outcome {outcome}: {scan:?}");
        log.start(NEW_OWNER, scan.released).unwrap();
        append_all(&mut log, 6..=13);
        assert_eq!(seqs(&log.scan().unwrap()), (6..=13).collect::<Vec<_>>());
    }
}

#[test]
fn t9_a_crash_while_settling_leaves_the_old_log_or_the_new() {
    for outcome in 0..81 {
        let region = torn(outcome);
        for k in [5, 7] {
            assert_eq!(old_or_new(&region, |log| log.settle(Seq(k), 0x77)), 2);
        }
        let (mut log, _) = reopen(region);
        log.settle(Seq(7), 0x77).unwrap();
        let settled = log.into_region();
        assert_eq!(old_or_new(&settled, |log| log.settle(Seq(7), 0x77)), 2);
        old_or_new(&settled, StreamLog::remove_entries);
        old_or_new(&settled, |log| log.start(NEW_OWNER, Seq(7)));
        let (mut log, _) = reopen(settled);
        log.remove_entries().unwrap();
        let emptied = log.into_region();
        old_or_new(&emptied, StreamLog::remove_entries);
        old_or_new(&emptied, |log| log.start(NEW_OWNER, Seq(7)));
    }
}

#[test]
fn t9_a_change_that_a_crash_undid_never_comes_back() {
    // A settled log is started anew, and the power fails when all of the new mark has arrived but
    // one word. The next recovery finds it settled, and settles it once more; the power fails in
    // the middle of that, too.
    let mut log = fresh(8);
    append_all(&mut log, 1..=6);
    log.settle(Seq(4), 0x44).unwrap();
    let settled = log.into_region();
    let mut faulty = settled.clone();
    faulty.fail_fences_after(1);
    let (mut log, _) = reopen(faulty);
    assert!(log.start(NEW_OWNER, Seq(4)).is_err());
    let started = log.into_region();
    let written = (0..2 * MARK / 8).map(|word| 8 * word..8 * word + 8);
    let written: Vec<_> =
        written.filter(|w| settled.bytes()[w.clone()] != started.bytes()[w.clone()]).collect();
    assert!(written.len() >= 4, "checksum, number, head, origin, settled: {written:?}");
    for missing in written {
        let mut torn = started.crash(0);
        torn.bytes_mut()[..MARKS].copy_from_slice(&started.bytes()[..MARKS]);
        torn.bytes_mut()[missing.clone()].copy_from_slice(&settled.bytes()[missing.clone()]);
        let old = State::of(&reopen(torn.clone()).1);
        assert!(reopen(torn.clone()).1.settled);
        for fences in 0..3 {
            let mut faulty = torn.clone();
            faulty.fail_fences_after(fences);
            let (mut log, _) = reopen(faulty);
            assert!(log.settle(Seq(4), 0x44).is_err());
            for seed in 0..4000 {
                let found = State::of(&reopen(log.region().crash(seed)).1);
                assert_eq!(found, old, "without {missing:?}, {fences} fences, seed {seed}");
            }
        }
    }
}

#[test]
fn t9_a_region_that_fails_while_settling_ends_the_log() {
    for fences in 0..2 {
        let mut log = fresh(8);
        append_all(&mut log, 1..=3);
        let mut region = log.into_region();
        region.fail_fences_after(fences);
        let (mut log, _) = reopen(region);
        assert!(matches!(log.settle(Seq(2), 0), Err(SettleError::Region(_))));
        assert!(matches!(log.settle(Seq(2), 0), Err(SettleError::Region(_))));
        assert!(matches!(log.remove_entries(), Err(ForgetError::Region(_))));
        assert!(matches!(log.start(ORIGIN, Seq(2)), Err(BindError::Region(_))));
        assert!(matches!(log.scan(), Err(LogError::Region(_))), "its content may not last");
        assert_eq!(log.is_settled(), fences == 1, "it shows only what is surely durable");
        let durable = reopen(log.into_region().crash(0)).1;
        assert!(durable.settled || fences == 0);
    }
}

#[test]
fn t19_no_single_copy_of_the_mark_decides_whether_a_log_is_settled() {
    let mut log = fresh(8);
    append_all(&mut log, 1..=6);
    log.settle(Seq(2), 0x22).unwrap();
    let settled = log.region().clone();
    log.remove_entries().unwrap();
    for region in [settled, log.into_region()] {
        let truth = reopen(region.clone()).1;
        for bit in 0..8 * MARKS {
            let mut damaged = region.clone();
            damaged.bytes_mut()[bit / 8] ^= 1 << (bit % 8);
            assert_eq!(reopen(damaged).1, truth, "bit {bit}");
        }
    }
}

#[test]
fn t19_a_mark_that_no_program_writes_is_not_accepted() {
    let mut log = fresh(8);
    append_all(&mut log, 1..=2);
    log.settle(Seq(2), 0x22).unwrap();
    let region = log.into_region();
    // A tag of a group beyond the released ones; flags of a later version.
    for (at, value) in [(64, 3_u64), (80, 2), (80, 3), (87, 1 << 7)] {
        let mut wrong = region.clone();
        for copy in [0, MARK] {
            let mark = &mut wrong.bytes_mut()[copy..copy + MARK];
            mark[at] = value as u8;
            let check = crc32c(0, &mark[4..]);
            mark[..4].copy_from_slice(&check.to_le_bytes());
        }
        assert!(StreamLog::open(wrong, ID, crc32c).is_err(), "{value:#x} at {at}");
    }
    // Each in the other's place.
    let mut wrong = region;
    wrong.bytes_mut()[..MARKS].rotate_left(MARK);
    assert!(StreamLog::open(wrong, ID, crc32c).is_err());
}

#[test]
fn the_tag_of_the_newest_released_group_is_never_lost() {
    let mut log = fresh(8);
    assert_eq!(log.newest_tag(), GroupTag::NONE);
    append_all(&mut log, 1..=6);
    assert_eq!(log.newest_tag(), GroupTag::NONE, "nothing is released");
    log.release(Seq(2));
    assert_eq!(log.newest_tag(), tagged(2), "as far as memory knows");
    assert_eq!(reopen(log.region().crash(0)).1.newest_tag, GroupTag::NONE);
    log.release_now(Seq(3)).unwrap();
    assert_eq!(reopen(log.region().crash(0)).1.newest_tag, tagged(3));
    // Its entry is overwritten two laps later, long before anything newer is released.
    append_all(&mut log, 7..=11);
    log.release_now(Seq(11)).unwrap();
    let last = tagged(11);
    for origin in [ORIGIN, NEW_OWNER] {
        // Released is further than this server's last group: another has the rest.
        log.start(origin, Seq(20)).unwrap();
        assert_eq!((log.newest_tag(), log.scan().unwrap().newest_tag), (last, last));
        let (mut next, scan) = reopen(log.into_region().crash(0));
        assert_eq!((next.newest_tag(), scan.newest_tag), (last, last));
        next.start(origin, Seq(20)).unwrap();
        append_all(&mut next, 21..=28);
        assert_eq!(next.newest_tag(), last);
        log = next;
    }
    // It keeps nothing of groups that never existed.
    log.start(NEW_OWNER, Seq(10)).unwrap();
    assert_eq!(log.newest_tag(), GroupTag::NONE);
}

#[test]
fn the_tag_is_found_whatever_the_order_in_the_ring() {
    // No target appends in this order. A log must give the right tag nevertheless.
    let mut log = fresh(8);
    for seq in [5, 3, 4, 9, 7] {
        log.append(&write(seq, 1)).unwrap();
    }
    log.fence().unwrap();
    for (mark, newest) in [(3, 3), (4, 4), (5, 5), (6, 5), (7, 7), (8, 7), (9, 9)] {
        log.release(Seq(mark));
        assert_eq!(log.newest_tag(), tagged(newest), "in memory, at {mark}");
        let mut durable = reopen(log.region().clone()).0;
        durable.resume(ORIGIN).unwrap();
        durable.release_now(Seq(mark)).unwrap();
        let (log, scan) = reopen(durable.into_region().crash(0));
        assert_eq!(
            (scan.newest_tag, log.newest_tag()),
            (tagged(newest), tagged(newest)),
            "durably, at {mark}"
        );
    }
}

#[test]
fn a_merged_request_has_the_tag_of_its_last_group() {
    let mut log = fresh(8);
    log.append(&Attribute { span: 3, tag: 0x33, ..write(1, 1) }).unwrap();
    log.fence().unwrap();
    log.release(Seq(2));
    assert_eq!(log.newest_tag(), GroupTag::NONE, "only whole groups of it are released, not all");
    log.release(Seq(3));
    assert_eq!(log.newest_tag(), GroupTag::new(Seq(3), 0x33));
}

#[test]
fn a_settled_log_of_a_volume_that_never_wrote() {
    let region = MemRegion::forgetful(partition_bytes(4));
    let mut log = StreamLog::format(region, ID, 1, crc32c).unwrap();
    log.settle(Seq::ZERO, 0).unwrap();
    let (mut log, scan) = reopen(log.into_region().crash(0));
    assert!(scan.is_clean() && scan.settled);
    assert_eq!((scan.released, scan.newest_tag), (Seq::ZERO, GroupTag::NONE));
    log.start(ORIGIN, Seq::ZERO).unwrap();
    assert_eq!(log.append(&write(1, 1)), Ok(Position(0)));
}

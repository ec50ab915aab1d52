//! Engines with drives that end requests in any order, judged by far simpler rules.

use alloc::collections::{BTreeMap, BTreeSet};
use alloc::vec;
use alloc::vec::Vec;

use proptest::prelude::*;

use super::*;
use crate::attribute::{GROUP_ENTRIES_MAX, SPAN_MAX};
use crate::topology::{MemberInfo, ServerInfo};

mod barrier_paths;
mod horae_paths;
mod horae_redirects;
mod linux_journal;
mod opimq_epochs;
mod opimq_followers;
mod replay;

/// Payload handle: (first block's number, blocks).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Piece(u32, u32);

impl Payload for Piece {
    fn part(&self, first: u32, blocks: u32) -> Self {
        assert!(first + blocks <= self.1);
        Self(self.0 + first, blocks)
    }
}

fn topology(volatile: &[bool], per_server: usize, slots: u32, unit: u32) -> Topology {
    let members = volatile
        .iter()
        .enumerate()
        .map(|(i, volatile)| MemberInfo {
            server: (i / per_server) as u16,
            start: 8,
            blocks: 256,
            request_blocks_max: 8,
            volatile: *volatile,
        })
        .collect::<Vec<_>>();
    let servers = vec![ServerInfo { slots }; volatile.len().div_ceil(per_server)];
    Topology::new(members, servers, unit).unwrap()
}

fn write(lba: u64, blocks: u32) -> Write<Piece> {
    Write { lba, blocks, op: Op::Write(Place::Fresh, Piece(lba as u32, blocks)) }
}

/// Takes all requests that may be sent, also over the second queue of each server if the engine has
/// one.
fn drain(engine: &mut dyn Engine<Piece>, servers: u16) -> Vec<Dispatch> {
    (0..servers * engine.queues_per_server())
        .flat_map(|s| core::iter::from_fn(|| engine.next_request(s)).collect::<Vec<_>>())
        .collect()
}

/// Takes all data requests that may be sent, once the metadata of engine `horae` is confirmed.
fn drain_data(engine: &mut dyn Engine<Piece>, servers: u16) -> Vec<Dispatch> {
    let mut data = Vec::new();
    loop {
        let (control, rest): (Vec<Dispatch>, Vec<Dispatch>) = drain(engine, servers)
            .into_iter()
            .partition(|d| engine.request(d.id).path == Path::Control);
        data.extend(rest);
        if control.is_empty() {
            return data;
        }
        for d in control {
            engine.on_request_done(d.id, Ok(()));
        }
    }
}

#[test]
fn p3_completion_is_in_order_whatever_the_drives_do() {
    let mut engine = rio::Rio::new(topology(&[false, false], 1, 64, 4), Limits::default());
    for lba in [0, 4, 8] {
        engine.admit(&mut [write(lba, 1)], lba, false).unwrap();
    }
    let sent = drain(&mut engine, 2);
    assert_eq!(sent.len(), 3, "nothing waits: the requests of all groups are out together");
    let by_seq = |engine: &rio::Rio<Piece>, seq| {
        sent.iter().find(|d| engine.request(d.id).seq == Seq(seq)).unwrap().id
    };
    let (one, two, three) = (by_seq(&engine, 1), by_seq(&engine, 2), by_seq(&engine, 3));
    engine.on_request_done(three, Ok(()));
    assert_eq!(engine.poll().complete, Seq(0));
    engine.on_request_done(one, Ok(()));
    assert_eq!(engine.poll().complete, Seq(1));
    engine.on_request_done(two, Ok(()));
    assert_eq!(engine.poll(), Marks { complete: Seq(3), durable: Seq(3) });
}

#[test]
fn t1_released_needs_complete_everywhere_durable_and_delivered() {
    let mut engine = rio::Rio::new(topology(&[true, true], 1, 64, 4), Limits::default());
    engine.admit(&mut [write(0, 1)], 0, false).unwrap();
    engine.admit(&mut [write(4, 1)], 0, false).unwrap();
    for d in drain(&mut engine, 2) {
        engine.on_request_done(d.id, Ok(()));
    }
    engine.poll();
    assert_eq!(engine.released(), Seq(0), "complete and delivered, but not durable");
    engine.admit(&mut [write(8, 1)], 0, true).unwrap();
    let sent = drain(&mut engine, 2);
    assert_eq!(sent.len(), 2, "the write, and a flush entry for the other dirty drive (T3)");
    engine.on_request_done(sent[0].id, Ok(()));
    assert_eq!(engine.poll().durable, Seq(0), "one of the two FLUSHes is still out");
    engine.on_request_done(sent[1].id, Ok(()));
    assert_eq!(engine.released(), Seq(2), "the third is durable, but not delivered");
    assert_eq!(engine.poll(), Marks { complete: Seq(3), durable: Seq(3) });
    assert_eq!(engine.released(), Seq(3));
}

#[test]
fn t3_a_joint_flush_reaches_each_dirty_drive_and_is_counted() {
    let mut engine = rio::Rio::new(topology(&[true, true, true], 1, 64, 4), Limits::default());
    engine.admit(&mut [write(0, 1)], 0, false).unwrap(); // drive 0
    engine.admit(&mut [write(4, 1)], 0, false).unwrap(); // drive 1
    drain(&mut engine, 3);
    engine.admit(&mut [write(5, 1)], 0, true).unwrap(); // drive 1, durable
    let sent = drain(&mut engine, 3);
    let mut entries: Vec<_> = sent
        .iter()
        .map(|d| engine.request(d.id))
        .map(|r| (r.member.0, r.kind, r.num, r.flags.has(Flags::FLUSH)))
        .collect();
    entries.sort_by_key(|e| e.0);
    assert_eq!(entries, [(0, Kind::Flush, 2, true), (1, Kind::Write, 2, true)]);
    // A clean drive gets no flush entry.
    engine.admit(&mut [write(6, 1)], 0, true).unwrap();
    assert_eq!(drain(&mut engine, 3).len(), 1);
}

#[test]
fn t13_a_full_log_pushes_back_and_a_forced_flush_frees_space() {
    let mut engine =
        rio::Rio::new(topology(&[true], 1, 9, 64), Limits { merge: false, ..Limits::default() });
    let mut admitted = 0;
    while engine.admit(&mut [write(admitted, 1)], 7, false).is_ok() {
        admitted += 1;
        assert!(admitted < 20, "credits bound what is out");
    }
    assert_eq!(
        engine.admit(&mut [write(0, 1)], 7, false),
        Err(Refusal::Full(Bound::Log { server: 0 }))
    );
    let sent = drain(&mut engine, 1);
    assert!(sent.len() <= 9, "never more entries than slots");
    assert!(
        sent.iter()
            .any(|d| engine.request(d.id).kind == Kind::Flush && engine.request(d.id).tag == 7),
        "a flush was put in, with the caller's last tag"
    );
    for d in sent {
        engine.on_request_done(d.id, Ok(()));
    }
    engine.poll();
    assert!(engine.admit(&mut [write(0, 1)], 7, false).is_ok(), "no deadlock");
    assert_eq!(
        engine.admit(&mut (0..9).map(|i| write(2 * i, 1)).collect::<Vec<_>>(), 0, false),
        Err(Refusal::TooLarge(Bound::Log { server: 0 })),
        "a group that can never fit is refused at submit"
    );
}

#[test]
fn t13_a_half_full_log_presses_for_a_flush_where_one_is_of_use() {
    let limits = Limits { merge: false, ..Limits::default() };
    for volatile in [true, false] {
        let mut engine = rio::Rio::new(topology(&[volatile], 1, 9, 64), limits);
        for lba in 0..7 {
            engine.admit(&mut [write(2 * lba, 1)], 0, false).unwrap();
            let forced = u64::from(volatile && lba >= 4);
            assert_eq!(engine.forced_flush_count(), forced, "at group {lba}, volatile: {volatile}");
        }
        let sent = drain(&mut engine, 1);
        assert_eq!(sent.len() as u64, 7 + engine.forced_flush_count());
    }
}

#[test]
fn t13_a_group_may_take_all_but_the_reserve_and_what_is_full_holds_up_no_other() {
    let limits = Limits { merge: false, ..Limits::default() };
    let mut engine = rio::Rio::new(topology(&[true, true], 1, 9, 4), limits);
    let mut group: Vec<_> = (0..8).map(|i| write(i % 4 / 2 * 8 + i % 2 * 2, 1)).collect();
    assert_eq!(engine.admit(&mut group, 0, false), Ok(Seq(1)), "eight of drive 0");
    assert_eq!(
        engine.admit(&mut [write(0, 1)], 0, false),
        Err(Refusal::Full(Bound::Log { server: 0 })),
        "the ninth is the flush's"
    );
    assert_eq!(engine.forced_flush_count(), 1);
    assert_eq!(
        engine.admit(&mut [write(4, 1)], 0, false),
        Ok(Seq(3)),
        "the other server has space"
    );
}

#[test]
fn t14_half_the_memory_presses_for_a_flush() {
    let limits = Limits { merge: false, kept_bytes_max: 8 * 4096, ..Limits::default() };
    let mut engine = rio::Rio::new(topology(&[true], 1, 64, 64), limits);
    for (lba, blocks, forced) in [(0, 3, 0), (10, 1, 0), (20, 1, 1)] {
        engine.admit(&mut [write(lba, blocks)], 0, false).unwrap();
        assert_eq!(engine.forced_flush_count(), forced, "with the write at {lba}");
    }
}

#[test]
fn t3_a_flush_behind_a_forced_one_covers_only_with_it() {
    let mut engine = rio::Rio::new(topology(&[true, true], 1, 64, 4), Limits::default());
    engine.admit(&mut [write(0, 1)], 0, false).unwrap(); // drive 0
    engine.ask_durable(Seq(1)); // a forced flush of drive 0: group 2
    engine.admit(&mut [write(4, 1)], 0, true).unwrap(); // drive 1, durable, group 3
    let sent = drain(&mut engine, 2);
    let forced = sent.iter().find(|d| engine.request(d.id).seq == Seq(2)).unwrap().id;
    for d in sent.iter().filter(|d| d.id != forced) {
        engine.on_request_done(d.id, Ok(()));
    }
    let marks = engine.poll();
    assert_eq!(marks.complete, Seq(3), "a forced flush holds up no completion");
    assert_eq!(marks.durable, Seq(0), "but drive 0 is not flushed yet");
    assert_eq!(engine.released(), Seq(0));
    engine.on_request_done(forced, Ok(()));
    assert_eq!(engine.poll().durable, Seq(3));
}

#[test]
fn p8_durability_asked_for_during_a_forced_flush_comes_too() {
    let mut engine = rio::Rio::new(topology(&[true], 1, 64, 64), Limits::default());
    engine.admit(&mut [write(0, 1)], 0, false).unwrap();
    engine.ask_durable(Seq(1));
    engine.admit(&mut [write(9, 1)], 0, false).unwrap(); // behind the forced flush, group 2
    engine.ask_durable(Seq(3));
    for _ in 0..4 {
        for d in drain(&mut engine, 1) {
            engine.on_request_done(d.id, Ok(()));
        }
        engine.poll();
    }
    assert!(engine.poll().durable >= Seq(3));
}

#[test]
fn p8_durability_of_what_a_flush_covers_already_asks_for_no_other() {
    let limits = Limits { merge: false, ..Limits::default() };
    let mut engine = rio::Rio::new(topology(&[true], 1, 64, 64), limits);
    engine.admit(&mut [write(0, 1)], 0, true).unwrap();
    engine.admit(&mut [write(9, 1)], 0, false).unwrap();
    engine.ask_durable(Seq(1));
    assert_eq!((engine.forced_flush_count(), engine.last_admitted()), (0, Seq(2)));
    engine.ask_durable(Seq(2));
    assert_eq!((engine.forced_flush_count(), engine.last_admitted()), (1, Seq(3)));
}

#[test]
fn p8_a_durable_group_without_writes_ends() {
    for kind in EngineKind::ALL {
        let mut engine = engine::<Piece>(kind, topology(&[true], 1, 64, 64), Limits::default());
        assert_eq!(engine.admit(&mut [], 0, true), Ok(Seq(1)), "{kind}");
        // `horae` has two steps: the entry, and the record of `flushed`.
        for _ in 0..2 {
            for d in drain(&mut *engine, 1) {
                engine.on_request_done(d.id, Ok(()));
            }
        }
        assert_eq!(engine.poll(), Marks { complete: Seq(1), durable: Seq(1) }, "{kind}");
    }
}

#[test]
fn t13_a_group_that_does_not_fit_now_frees_its_own_space() {
    let limits = Limits { merge: false, ..Limits::default() };
    let mut engine = rio::Rio::new(topology(&[true], 1, 9, 64), limits);
    for lba in 0..3 {
        engine.admit(&mut [write(lba * 2, 1)], 0, false).unwrap();
    }
    // Three of eight slots are used, so there is no need for a flush yet, and the caller never asks
    // for one.
    let group: Vec<_> = (0..6).map(|i| write(20 + 2 * i, 1)).collect();
    assert_eq!(
        engine.admit(&mut group.clone(), 0, false),
        Err(Refusal::Full(Bound::Log { server: 0 }))
    );
    for d in drain(&mut engine, 1) {
        engine.on_request_done(d.id, Ok(()));
    }
    engine.poll();
    assert!(engine.admit(&mut group.clone(), 0, false).is_ok(), "no deadlock");
}

#[test]
fn t14_unflushed_memory_is_flushed_for_a_group_that_needs_it() {
    let limits = Limits { merge: false, kept_bytes_max: 10 * 4096, ..Limits::default() };
    let mut engine = rio::Rio::new(topology(&[true], 1, 64, 64), limits);
    engine.admit(&mut [write(0, 4)], 0, false).unwrap(); // less than half: no flush is needed
    assert_eq!(engine.admit(&mut [write(20, 7)], 0, false), Err(Refusal::Full(Bound::Memory)));
    for d in drain(&mut engine, 1) {
        engine.on_request_done(d.id, Ok(()));
    }
    engine.poll();
    assert!(engine.admit(&mut [write(20, 7)], 0, false).is_ok(), "P8");
}

#[test]
fn t14_groups_without_payload_are_bounded_too() {
    for kind in EngineKind::ALL {
        let limits = Limits { merge: false, ..Limits::default() };
        let mut engine = engine::<Piece>(kind, topology(&[true], 1, 64, 64), limits);
        let discard = |n: u64| Write { lba: n * 2 % 200, blocks: 1, op: Op::Discard };
        let taken = (0..300_000).take_while(|n| engine.admit(&mut [discard(*n)], 0, false).is_ok());
        assert!(taken.count() < 200_000, "{kind}");
    }
}

#[test]
fn t14_groups_without_requests_are_bounded_too() {
    for kind in [EngineKind::None, EngineKind::Sync, EngineKind::Linux] {
        let mut engine = engine::<Piece>(kind, topology(&[true], 1, 64, 64), Limits::default());
        let taken = (0..100_000).take_while(|_| engine.admit(&mut [], 0, true).is_ok()).count();
        assert_eq!(taken, 1 << 16, "{kind}: no caller reads how far it is");
        engine.poll();
        assert!(engine.admit(&mut [], 0, true).is_ok(), "{kind}");
    }
}

#[test]
fn t14_a_huge_group_is_refused_before_it_costs_anything() {
    let member =
        MemberInfo { server: 0, start: 8, blocks: 1 << 40, request_blocks_max: 32, volatile: true };
    let topology = Topology::new(vec![member], vec![ServerInfo { slots: 64 }], 64).unwrap();
    let mut engine = rio::Rio::<Piece>::new(topology, Limits::default());
    let discard = Write { lba: 0, blocks: u32::MAX, op: Op::Discard };
    assert_eq!(engine.admit(&mut [discard], 0, false), Err(Refusal::TooManyEntries));
    assert!(engine.is_idle());
}

#[test]
fn t14_a_group_as_large_as_the_bound_is_taken() {
    let limits = Limits { kept_bytes_max: 4 * 4096, ..Limits::default() };
    for kind in EngineKind::ALL {
        let mut engine = engine::<Piece>(kind, topology(&[true], 1, 64, 64), limits);
        assert_eq!(
            engine.admit(&mut [write(0, 5)], 0, false),
            Err(Refusal::TooLarge(Bound::Memory)),
            "{kind}"
        );
        assert_eq!(engine.admit(&mut [write(0, 4)], 0, false), Ok(Seq(1)), "{kind}");
    }
}

/// A write that is checked before is refused there, and only there, where its admission is.
#[test]
fn t13_a_check_of_a_write_answers_as_its_admission() {
    let limits = Limits { kept_bytes_max: 60 * 4096, ..Limits::default() };
    let mut refusals = BTreeSet::new();
    for kind in EngineKind::ALL {
        for (volatile, per_server) in
            [(&[true][..], 1), (&[false; 3][..], 1), (&[true, false, true, true][..], 2)]
        {
            for (slots, unit, blocks) in [(4, 4, 48), (9, 4, 64), (9, 16, 64), (64, 1, 64)] {
                for (lba, blocks) in (0..9).flat_map(|lba| (1..=blocks).map(move |n| (lba, n))) {
                    let topology = topology(volatile, per_server, slots, unit);
                    let mut engine = engine::<Piece>(kind, topology, limits);
                    let checked = engine.check_write(lba, blocks, false);
                    let admitted = engine.admit(&mut [write(lba, blocks)], 0, false).map(drop);
                    assert_eq!(
                        checked, admitted,
                        "{kind} {volatile:?} {slots} {unit}: {lba} {blocks}"
                    );
                    refusals.extend(checked.err().map(|refusal| alloc::format!("{refusal:?}")));
                }
            }
        }
    }
    assert!(refusals.len() >= 3, "memory, and the log of either server: {refusals:?}");

    // A durable group may have to flush a drive that it does not write.
    for (slots, expected) in [(3, Err(Refusal::TooLarge(Bound::Log { server: 0 }))), (4, Ok(()))] {
        let topology = topology(&[true, true], 2, slots, 4);
        let engine = rio::Rio::<Piece>::new(topology, Limits::default());
        assert_eq!(engine.check_write(0, 1, true), expected);
    }

    let member =
        MemberInfo { server: 0, start: 8, blocks: 1 << 40, request_blocks_max: 1, volatile: true };
    let topology = Topology::new(vec![member], vec![ServerInfo { slots: 64 }], 64).unwrap();
    let limits = Limits { kept_bytes_max: u64::MAX, ..Limits::default() };
    let mut engine = rio::Rio::<Piece>::new(topology, limits);
    assert_eq!(engine.check_write(0, 1 << 20, false), Err(Refusal::TooManyEntries));
    let failure = Failure { seq: Seq(1), member: Member(0), flush: false, cause: Cause::Changed };
    engine.poison(failure);
    assert_eq!(engine.check_write(0, 1, false), Err(Refusal::Poisoned(failure)));
}

#[test]
fn t6_a_group_has_as_many_entries_as_can_be_numbered() {
    let limits = Limits { merge: false, ..Limits::default() };
    let most = usize::from(GROUP_ENTRIES_MAX);
    let discard = |lba| Write { lba, blocks: 1, op: Op::Discard };
    let new = || rio::Rio::<Piece>::new(topology(&[true, true], 1, 1 << 17, 4), limits);

    let mut engine = new();
    assert_eq!(
        engine.admit(&mut vec![discard(0); most + 1], 0, false),
        Err(Refusal::TooManyEntries)
    );
    assert_eq!(
        engine.admit(&mut vec![discard(0); most], 0, true),
        Ok(Seq(1)),
        "its last one flushes"
    );
    let sent = drain(&mut engine, 2);
    let last = engine.request(sent[most - 1].id);
    assert_eq!((last.num, last.index), (u16::MAX, u16::MAX - 1));

    let mut engine = new();
    engine.admit(&mut [discard(4)], 0, false).unwrap(); // the other drive
    assert_eq!(
        engine.admit(&mut vec![discard(0); most], 0, true),
        Err(Refusal::TooManyEntries),
        "the FLUSH there would be one more"
    );
    assert_eq!(drain(&mut engine, 2).len(), 1, "nothing of it goes out");
    assert_eq!(engine.last_admitted(), Seq(1));
}

#[test]
fn p9_a_write_that_is_out_is_known_by_its_blocks() {
    for kind in EngineKind::ALL {
        let mut engine =
            engine::<Piece>(kind, topology(&[true, true], 1, 64, 4), Limits::default());
        assert!(!engine.has_pending_write(0, 20), "{kind}: nothing is out");
        assert!(!engine.is_replaying(0), "{kind}: nor out again");
        engine.admit(&mut [write(2, 1)], 0, false).unwrap(); // drive 0
        engine.admit(&mut [write(5, 2)], 0, true).unwrap(); // drive 1
        for (lba, blocks, pending) in
            [(0, 2, false), (2, 1, true), (3, 2, false), (0, 5, true), (3, 3, true), (7, 20, false)]
        {
            assert_eq!(engine.has_pending_write(lba, blocks), pending, "{kind}: {blocks} at {lba}");
        }
        let first = drain_data(&mut *engine, 2)[0].id;
        engine.on_request_done(first, Ok(()));
        assert!(!engine.has_pending_write(2, 1), "{kind}: it has ended");
        assert!(engine.has_pending_write(6, 1), "{kind}: the other has not");
    }
}

#[test]
fn t22_a_flush_that_ends_after_the_failure_covers_nothing() {
    for kind in EngineKind::ALL {
        let mut engine = engine::<Piece>(kind, topology(&[true], 1, 64, 4), Limits::default());
        engine.admit(&mut [write(0, 1)], 0, false).unwrap();
        engine.ask_durable(Seq(1));
        let mut sent = drain_data(&mut *engine, 1);
        engine.on_request_done(sent.remove(0).id, Ok(()));
        engine.poll();
        sent.extend(drain(&mut *engine, 1));
        assert_eq!(sent.len(), 1, "{kind}: the FLUSH");
        engine.on_flush_failed_elsewhere(Member(0));
        engine.on_request_done(sent[0].id, Ok(()));
        assert_eq!(engine.poll().durable, Seq(0), "{kind}: the other one lost it");
    }
}

#[test]
fn p6_what_a_lost_flush_may_have_affected_is_never_reported() {
    let mut engine = rio::Rio::new(topology(&[true, true], 1, 64, 4), Limits::default());
    engine.admit(&mut [write(0, 1)], 0, false).unwrap();
    engine.admit(&mut [write(4, 1)], 0, true).unwrap();
    let sent = drain(&mut engine, 2);
    engine.on_flush_failed_elsewhere(Member(0));
    for d in sent {
        engine.on_request_done(d.id, Ok(()));
    }
    assert_eq!(engine.poll(), Marks::default(), "they ended well, but after the failure");
}

#[test]
fn t14_replay_memory_is_bounded_and_never_forgotten() {
    let limits = Limits { kept_bytes_max: 4 * 4096, merge: false, ..Limits::default() };
    let mut engine = rio::Rio::new(topology(&[true], 1, 64, 64), limits);
    for lba in 0..4 {
        engine.admit(&mut [write(lba, 1)], 0, false).unwrap();
    }
    assert_eq!(engine.admit(&mut [write(9, 1)], 0, false), Err(Refusal::Full(Bound::Memory)));
    let sent = drain(&mut engine, 1);
    let (flush, writes): (Vec<Dispatch>, Vec<Dispatch>) =
        sent.iter().copied().partition(|d| engine.request(d.id).kind == Kind::Flush);
    for d in writes {
        engine.on_request_done(d.id, Ok(()));
    }
    engine.poll();
    assert_eq!(engine.payload_freed_up_to(), Seq(0), "complete, but not durable: the bytes stay");
    assert_eq!(engine.admit(&mut [write(9, 1)], 0, false), Err(Refusal::Full(Bound::Memory)));
    for d in flush {
        engine.on_request_done(d.id, Ok(()));
    }
    engine.poll();
    assert!(engine.payload_freed_up_to() >= Seq(2), "what the forced flush covers may go");
    assert!(engine.admit(&mut [write(9, 1)], 0, false).is_ok());
    assert_eq!(
        engine.admit(&mut [write(9, 5)], 0, false),
        Err(Refusal::TooLarge(Bound::Memory)),
        "a group beyond the bound is refused as such"
    );
}

#[test]
fn p6_after_a_failure_nothing_later_is_reported() {
    for kind in EngineKind::ALL {
        let limits = Limits { merge: false, ..Limits::default() };
        let mut engine = engine::<Piece>(kind, topology(&[true, true], 1, 64, 4), limits);
        engine.admit(&mut [write(0, 1)], 0, false).unwrap();
        engine.admit(&mut [write(4, 1)], 0, false).unwrap();
        engine.admit(&mut [write(1, 1)], 0, false).unwrap();
        let mut failed = false;
        for _ in 0..20 {
            for d in drain(&mut *engine, 2) {
                let (seq, kind) = (engine.request(d.id).seq, engine.request(d.id).kind);
                let fails = seq == Seq(2) && kind == Kind::Write;
                failed |= fails;
                engine
                    .on_request_done(d.id, if fails { Err(Cause::Status(0x280)) } else { Ok(()) });
            }
            assert!(engine.poll().complete < Seq(2), "{kind}");
        }
        assert!(failed);
        let failure = engine.failure().unwrap();
        assert_eq!((failure.seq, failure.member), (Seq(2), Member(1)));
        assert_eq!(
            engine.admit(&mut [write(0, 1)], 0, false),
            Err(Refusal::Poisoned(failure)),
            "one clear error from then on"
        );
    }
}

#[test]
fn t22_a_failed_flush_stops_a_stream_with_unflushed_writes_there() {
    let mut engine = rio::Rio::new(topology(&[true, true], 1, 64, 4), Limits::default());
    engine.admit(&mut [write(0, 1)], 0, true).unwrap();
    let sent = drain(&mut engine, 2);
    engine.on_flush_failed_elsewhere(Member(1));
    assert_eq!(engine.failure(), None, "no write on that drive");
    engine.on_request_done(sent[0].id, Ok(()));
    engine.poll();
    engine.on_flush_failed_elsewhere(Member(0));
    assert_eq!(engine.failure(), None, "all durable there");
    engine.admit(&mut [write(1, 1)], 0, false).unwrap();
    engine.on_flush_failed_elsewhere(Member(0));
    assert_eq!(engine.failure().unwrap().cause, Cause::SharedFlush);
}

#[test]
fn t16_whole_groups_merge_and_only_where_allowed() {
    let mut engine = rio::Rio::new(topology(&[true], 1, 64, 64), Limits::default());
    // The journal workload of §3.1: two blocks, then one, adjacent.
    engine.admit(&mut [write(0, 1), write(1, 1)], 1, false).unwrap();
    engine.admit(&mut [write(2, 1)], 2, false).unwrap();
    engine.admit(&mut [write(4, 1)], 3, false).unwrap(); // a hole before it
    engine.admit(&mut [write(5, 1)], 4, true).unwrap(); // a flush, last
    engine.admit(&mut [write(6, 1)], 5, false).unwrap(); // not behind a flush
    engine.admit(&mut [write(7, 4)], 6, false).unwrap(); // fits
    engine.admit(&mut [write(11, 4)], 7, false).unwrap(); // beyond the transfer limit of 8
    engine.admit(&mut [write(15, 10)], 8, false).unwrap(); // split: never merged
    engine.admit(&mut [write(25, 1)], 9, false).unwrap(); // not into a split one
    let sent = drain(&mut engine, 1);
    let shape: Vec<_> = sent
        .iter()
        .map(|d| engine.request(d.id))
        .map(|r| (r.seq.0, r.span, r.num, r.blocks, r.tag, r.pieces.len()))
        .collect();
    assert_eq!(
        shape,
        [
            (1, 2, 1, 3, 2, 3),
            (3, 2, 1, 2, 4, 2),
            (5, 2, 1, 5, 6, 2),
            (7, 1, 1, 4, 7, 1),
            (8, 1, 2, 8, 8, 1),
            (8, 1, 2, 2, 8, 1),
            (9, 1, 1, 1, 9, 1),
        ]
    );
    let last = engine.request(sent[1].id);
    assert!(last.flags.has(Flags::FLUSH) && last.flags.has(Flags::BOUNDARY));
    assert!(engine.request(sent[4].id).flags.has(Flags::SPLIT));
    engine.on_request_done(sent[0].id, Ok(()));
    assert_eq!(engine.poll().complete, Seq(2), "a merged request completes all its groups");
}

#[test]
fn merging_stops_at_what_goes_with_a_command() {
    let limits = Limits { merged_blocks_max: 3, ..Limits::default() };
    let mut engine = rio::Rio::new(topology(&[true], 1, 64, 64), limits);
    for lba in 0..7 {
        engine.admit(&mut [write(lba, 1)], lba, false).unwrap();
    }
    engine.admit(&mut [write(7, 2), write(9, 2)], 7, false).unwrap();
    engine.admit(&mut [write(11, 5)], 8, false).unwrap();
    let blocks: Vec<_> =
        drain(&mut engine, 1).iter().map(|d| engine.request(d.id).blocks).collect();
    assert_eq!(blocks, [3, 3, 1, 2, 2, 5], "larger ones are not cut");
}

#[test]
fn whole_groups_merge_only_while_enough_requests_are_in_flight() {
    let limits = Limits { merge_from: 3, ..Limits::default() };
    let mut engine = rio::Rio::new(topology(&[true], 1, 64, 64), limits);
    for lba in 0..3 {
        engine.admit(&mut [write(lba, 1)], lba, false).unwrap();
    }
    // Two adjacent writes of one group are one request in any case. The group itself continues the
    // last one of three in flight.
    engine.admit(&mut [write(3, 1), write(4, 1)], 3, false).unwrap();
    let sent = drain(&mut engine, 1);
    let blocks = |engine: &rio::Rio<Piece>, sent: &[Dispatch]| -> Vec<_> {
        sent.iter().map(|d| engine.request(d.id).blocks).collect()
    };
    assert_eq!(blocks(&engine, &sent), [1, 1, 3]);

    // Two are left in flight, so the next one is a request of its own, and the third one is merged.
    engine.on_request_done(sent[0].id, Ok(()));
    for lba in 5..7 {
        engine.admit(&mut [write(lba, 1)], lba, false).unwrap();
    }
    let sent = drain(&mut engine, 1);
    assert_eq!(blocks(&engine, &sent), [2]);
}

#[test]
fn t16_as_many_groups_merge_as_an_entry_can_span() {
    let member =
        MemberInfo { server: 0, start: 8, blocks: 4096, request_blocks_max: 4096, volatile: true };
    let topology = Topology::new(vec![member], vec![ServerInfo { slots: 64 }], 64).unwrap();
    let mut engine = rio::Rio::<Piece>::new(topology, Limits::default());
    for lba in 0..u64::from(SPAN_MAX) + 3 {
        engine.admit(&mut [Write { lba, blocks: 1, op: Op::Discard }], lba, false).unwrap();
    }
    let spans: Vec<_> = drain(&mut engine, 1).iter().map(|d| engine.request(d.id).span).collect();
    assert_eq!(spans, [SPAN_MAX, 3]);
}

#[test]
fn t16_what_must_not_be_merged_is_not() {
    let shapes = |unit, volatile: &[bool], groups: &[&[Write<Piece>]]| {
        let mut engine = rio::Rio::new(topology(volatile, 1, 64, unit), Limits::default());
        for group in groups {
            engine.admit(&mut group.to_vec(), 0, false).unwrap();
        }
        drain(&mut engine, volatile.len() as u16)
            .iter()
            .map(|d| engine.request(d.id))
            .map(|r| (r.seq.0, r.member.0, r.lba - 8, r.blocks))
            .collect::<Vec<_>>()
    };
    assert_eq!(
        shapes(4, &[true, true], &[&[write(3, 1)], &[write(8, 1)]]),
        [(1, 0, 3, 1), (2, 0, 4, 1)],
        "adjacent on the drive, but of two stripe units"
    );
    assert_eq!(
        shapes(64, &[true], &[&[write(0, 10), write(10, 1)]]),
        [(1, 0, 0, 8), (1, 0, 8, 2), (1, 0, 10, 1)],
        "behind a fragment of a split write"
    );
    assert_eq!(
        shapes(4, &[true, true], &[&[write(0, 2), write(2, 4)]]),
        [(1, 0, 0, 2), (1, 0, 2, 2), (1, 1, 0, 2)],
        "a fragment of a split write"
    );
    assert_eq!(
        shapes(64, &[true], &[&[write(0, 1), write(8, 1)], &[write(9, 1)]]),
        [(1, 0, 0, 1), (1, 0, 8, 1), (2, 0, 9, 1)],
        "behind part of a group"
    );
    let in_place_at =
        |lba: u64| Write { op: Op::Write(Place::InPlace, Piece(lba as u32, 1)), ..write(lba, 1) };
    assert_eq!(
        shapes(64, &[true], &[&[write(0, 1)], &[in_place_at(1)]]),
        [(1, 0, 0, 1), (2, 0, 1, 1)],
        "undo treats the two differently (T11)"
    );
    let extend =
        |lba: u64| Write { op: Op::Write(Place::Extend, Piece(lba as u32, 1)), ..write(lba, 1) };
    for first in [write(0, 1), in_place_at(0)] {
        for group in [
            vec![vec![first.clone()], vec![extend(1)]],
            vec![vec![extend(0)], vec![Write { lba: 1, ..first.clone() }]],
        ] {
            let groups: Vec<&[Write<Piece>]> = group.iter().map(Vec::as_slice).collect();
            let two = [(1, 0, 0, 1), (2, 0, 1, 1)];
            assert_eq!(shapes(64, &[true], &groups), two, "an extension is neither (T11)");
        }
    }
    assert_eq!(
        shapes(64, &[true], &[&[extend(0)], &[extend(1)]]),
        [(1, 0, 0, 2)],
        "extensions of adjacent blocks"
    );
    assert_eq!(
        shapes(64, &[true], &[&[extend(0)], &[extend(0)]]),
        [(1, 0, 0, 1), (2, 0, 0, 1)],
        "the same block again: two requests, in order (T12)"
    );
    let discard = Write { lba: 1, blocks: 1, op: Op::Discard };
    assert_eq!(
        shapes(64, &[true], &[&[write(0, 1)], &[discard]]),
        [(1, 0, 0, 1), (2, 0, 1, 1)],
        "two kinds"
    );
}

#[test]
fn t16_nothing_is_merged_where_nothing_may_be_and_each_write_has_its_own_place() {
    let limits = Limits { merge: false, ..Limits::default() };
    let mut engine = rio::Rio::new(topology(&[true], 1, 64, 64), limits);
    let in_place = Write { op: Op::Write(Place::InPlace, Piece(2, 1)), ..write(2, 1) };
    let extend = Write { op: Op::Write(Place::Extend, Piece(3, 1)), ..write(3, 1) };
    engine.admit(&mut [write(0, 1), write(1, 1), in_place, extend], 0, false).unwrap();
    let sent = drain(&mut engine, 1);
    let places: Vec<_> =
        sent.iter().map(|d| engine.request(d.id).flags.0 & Flags::PLACE.0).collect();
    let [none, in_place, extend] = [0, Flags::IN_PLACE.0, Flags::EXTEND.0];
    assert_eq!(places, [none, none, in_place, extend], "T11");
}

#[test]
fn every_engine_reports_how_far_it_is_and_takes_a_lost_flush() {
    for kind in EngineKind::ALL {
        let limits = Limits { merge: false, ..Limits::default() };
        let mut engine = engine::<Piece>(kind, topology(&[true], 1, 64, 64), limits);
        assert!(engine.is_idle(), "{kind}");
        engine.admit(&mut [write(0, 1)], 0, false).unwrap();
        engine.admit(&mut [write(9, 1)], 0, false).unwrap();
        assert_eq!((engine.is_idle(), engine.last_admitted()), (false, Seq(2)), "{kind}");
        engine.ask_durable(Seq(2));
        for _ in 0..8 {
            for d in drain(&mut *engine, 1) {
                engine.on_request_done(d.id, Ok(()));
            }
            engine.poll();
        }
        assert!(engine.is_idle() && engine.poll().durable >= Seq(2), "{kind}");
        assert!(engine.released() >= Seq(2) && engine.payload_freed_up_to() >= Seq(2), "{kind}");
        engine.admit(&mut [write(20, 1)], 0, false).unwrap();
        engine.on_flush_failed_elsewhere(Member(0));
        assert_eq!(engine.failure().unwrap().cause, Cause::SharedFlush, "{kind}");
    }
}

#[test]
fn sync_sends_nothing_before_the_flush_of_the_group_before() {
    let mut engine = sync::Sync::new(topology(&[true, false], 1, 0, 4), Limits::default());
    engine.admit(&mut [write(0, 1), write(4, 1)], 0, false).unwrap();
    engine.admit(&mut [write(1, 1)], 0, false).unwrap();
    let sent = drain(&mut engine, 2);
    assert_eq!(sent.len(), 2, "the writes of one group go together");
    assert!(sent.iter().all(|d| d.ordered.is_none()), "no attribute (T17)");
    engine.on_request_done(sent[0].id, Ok(()));
    assert!(drain(&mut engine, 2).is_empty());
    engine.on_request_done(sent[1].id, Ok(()));
    let flush = drain(&mut engine, 2);
    assert_eq!(flush.len(), 1, "only the drive without PLP is flushed");
    assert_eq!(engine.request(flush[0].id).kind, Kind::Flush);
    assert_eq!(engine.poll().complete, Seq(0));
    engine.on_request_done(flush[0].id, Ok(()));
    assert_eq!(engine.poll(), Marks { complete: Seq(1), durable: Seq(1) });
    assert_eq!(drain(&mut engine, 2).len(), 1);
}

#[test]
fn a_drive_written_to_while_it_is_flushed_is_not_clean() {
    let mut engine = none::NoOrder::new(topology(&[true], 1, 0, 4), Limits::default());
    engine.admit(&mut [write(0, 1)], 0, false).unwrap();
    let first = drain(&mut engine, 1)[0].id;
    engine.on_request_done(first, Ok(()));
    engine.admit(&mut [write(4, 1)], 0, false).unwrap();
    engine.ask_durable(Seq(1));
    let [second, flush] = drain(&mut engine, 1)[..] else { panic!("a write and a FLUSH") };
    assert_eq!(engine.request(flush.id).kind, Kind::Flush);
    // The second write ends, and is wanted durable, while a FLUSH that may not cover it is in
    // flight.
    engine.on_request_done(second.id, Ok(()));
    engine.ask_durable(Seq(2));
    assert!(engine.next_request(0).is_none(), "one round at a time");
    assert!(!engine.is_idle());
    engine.on_request_done(flush.id, Ok(()));
    assert_eq!(engine.poll().durable, Seq(1));
    let another = engine.next_request(0).expect("a FLUSH that covers the second write");
    assert_eq!(engine.request(another.id).kind, Kind::Flush);
    engine.on_request_done(another.id, Ok(()));
    assert_eq!(engine.poll().durable, Seq(2));
    assert!(engine.is_idle());
}

#[test]
fn a_stream_that_failed_comes_to_rest() {
    let (topology, limits) = (topology(&[true], 1, 0, 4), Limits::default());
    for kind in [EngineKind::Sync, EngineKind::Linux, EngineKind::None] {
        let mut engine = engine::<Piece>(kind, topology.clone(), limits);
        engine.admit(&mut [write(0, 1)], 0, true).unwrap();
        engine.admit(&mut [write(4, 1)], 0, true).unwrap();
        assert!(!engine.is_idle());
        for dispatch in drain(&mut *engine, 1) {
            engine.on_request_done(dispatch.id, Err(Cause::Disconnected));
        }
        assert!(engine.failure().is_some());
        assert!(engine.is_idle(), "nothing is in flight any more");
    }
}

#[test]
fn none_flushes_only_what_has_completed() {
    let mut engine = none::NoOrder::new(topology(&[true], 1, 0, 64), Limits::default());
    engine.admit(&mut [write(0, 1)], 0, false).unwrap();
    engine.admit(&mut [write(9, 1)], 0, true).unwrap();
    let sent = drain(&mut engine, 1);
    assert_eq!(sent.len(), 2);
    engine.on_request_done(sent[1].id, Ok(()));
    assert!(drain(&mut engine, 1).is_empty(), "the first write is still out (T2)");
    engine.on_request_done(sent[0].id, Ok(()));
    let flush = drain(&mut engine, 1);
    assert_eq!(engine.request(flush[0].id).kind, Kind::Flush);
    assert_eq!(engine.poll(), Marks { complete: Seq(2), durable: Seq(0) });
    engine.on_request_done(flush[0].id, Ok(()));
    assert_eq!(engine.poll().durable, Seq(2));
}

/// The judge's record of a request in flight.
#[derive(Clone, Debug)]
struct Out {
    dispatch: Dispatch,
    attribute: Attribute,
}

#[derive(Clone, Debug)]
enum Step {
    Submit { writes: Vec<(u64, u32, bool)>, durable: bool },
    Send(u16),
    End(usize),
    Poll,
}

fn step() -> impl Strategy<Value = Step> {
    prop_oneof![
        4 => (proptest::collection::vec((0u64..180, 1u32..12, any::<bool>()), 1..4), prop::bool::weighted(0.2))
            .prop_map(|(writes, durable)| Step::Submit { writes, durable }),
        3 => (0u64..180).prop_map(|lba| Step::Submit { writes: vec![(lba, 1, true)], durable: false }),
        4 => (0u16..2).prop_map(Step::Send),
        8 => (0usize..64).prop_map(Step::End),
        2 => Just(Step::Poll),
    ]
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(400))]

    /// Random groups, random ends. Checks: numbering (trap T6), dense ordinals (trap T5), credits
    /// (trap T13), marks never ahead of the drives (trap T1, promise P3), durable only behind
    /// FLUSHes of all dirty drives (trap T3), merging keeps every block (trap T16), and that all
    /// ends well (promise P8).
    #[test]
    fn rio_keeps_its_promises(steps in proptest::collection::vec(step(), 1..200), volatile in any::<[bool; 3]>()) {
        let slots = 24;
        let topology = topology(&volatile, 2, slots, 4);
        let mut engine = rio::Rio::new(topology.clone(), Limits { kept_bytes_max: 64 * 4096, ..Limits::default() });
        let mut out: Vec<Out> = vec![];
        let mut groups: BTreeMap<u64, BTreeSet<u16>> = BTreeMap::new();
        let mut nums: BTreeMap<u64, u16> = BTreeMap::new();
        let mut blocks_of: BTreeMap<u64, Vec<(u8, u64)>> = BTreeMap::new();
        let mut ended: BTreeMap<u64, BTreeSet<u16>> = BTreeMap::new();
        let mut last_ordinal = [0u32; 2];
        let mut in_log: [Vec<Seq>; 2] = [vec![], vec![]];
        // Per member, in dispatch order: (ordinal, seq_end, is_flush, ended).
        let mut history: BTreeMap<u8, Vec<(Seq, bool, bool, u32)>> = BTreeMap::new();
        let mut durable_seen = Seq::ZERO;

        let all = steps.into_iter().chain((0..400).flat_map(|i| [Step::Send(0), Step::Send(1), Step::End(i), Step::Poll]));
        for step in all {
            match step {
                Step::Submit { writes, durable } => {
                    let writes: Vec<_> = writes.iter().map(|(lba, blocks, fresh)| Write {
                        lba: *lba, blocks: *blocks,
                        op: Op::Write(if *fresh { Place::Fresh } else { Place::InPlace }, Piece(*lba as u32, *blocks)),
                    }).collect();
                    if let Ok(seq) = engine.admit(&mut writes.clone(), 1, durable) {
                        let list = blocks_of.entry(seq.0).or_default();
                        for w in &writes {
                            topology.for_each_extent(w.lba, w.blocks, |e| for b in 0..u64::from(e.blocks) { list.push((e.member.0, e.lba + b)); });
                        }
                    }
                }
                Step::Send(server) => while let Some(dispatch) = engine.next_request(server) {
                    let OrderedDispatch { ordinal, released: mark } = dispatch.ordered.unwrap();
                    let request = engine.request(dispatch.id);
                    let attribute = request.attribute(ordinal);
                    prop_assert_eq!(ordinal, last_ordinal[usize::from(server)] + 1);
                    last_ordinal[usize::from(server)] = ordinal;
                    prop_assert!(attribute.span == 1 || attribute.num == 1);
                    prop_assert!(mark < attribute.seq);
                    prop_assert_eq!(request.pieces.iter().map(|p| p.1).sum::<u32>(), attribute.blocks);
                    let mut at = attribute.lba;
                    for piece in &request.pieces { // each block's bytes go where they belong
                        for b in 0..piece.1 {
                            let mut place = None;
                            topology.for_each_extent(u64::from(piece.0 + b), 1, |e| place = Some((e.member, e.lba)));
                            prop_assert_eq!(place, Some((attribute.member, at)));
                            at += 1;
                        }
                    }
                    for seq in attribute.seq.0..=attribute.seq_end().0 {
                        prop_assert!(groups.entry(seq).or_default().insert(attribute.index));
                        prop_assert_eq!(*nums.entry(seq).or_insert(attribute.num), attribute.num);
                    }
                    let log = &mut in_log[usize::from(server)];
                    log.retain(|s| *s > mark);
                    log.push(attribute.seq_end());
                    prop_assert!(log.len() <= slots as usize, "T13");
                    history.entry(attribute.member.0).or_default().push((attribute.seq_end(), attribute.is_flush(), false, ordinal));
                    out.push(Out { dispatch, attribute });
                },
                Step::End(at) => if !out.is_empty() {
                    let o = out.swap_remove(at % out.len());
                    engine.on_request_done(o.dispatch.id, Ok(()));
                    for seq in o.attribute.seq.0..=o.attribute.seq_end().0 {
                        ended.entry(seq).or_default().insert(o.attribute.index);
                    }
                    let h = history.get_mut(&o.attribute.member.0).unwrap();
                    h.iter_mut().find(|e| e.3 == o.attribute.ordinal).unwrap().2 = true;
                },
                Step::Poll => {
                    let marks = engine.poll();
                    prop_assert!(marks.durable <= marks.complete);
                    prop_assert!(marks.durable >= durable_seen);
                    durable_seen = marks.durable;
                    for seq in 1..=marks.complete.0 {
                        // A flush that the engine put in delays durability, not completion.
                        if seq <= marks.durable.0 || blocks_of.contains_key(&seq) {
                            let done = ended.get(&seq).map_or(0, BTreeSet::len);
                            prop_assert_eq!(done, usize::from(nums[&seq]), "complete means all entries ended");
                        }
                    }
                    for (member, history) in &history {
                        if !volatile[usize::from(*member)] { continue; }
                        for (i, (seq, ..)) in history.iter().enumerate() {
                            if *seq <= marks.durable {
                                prop_assert!(history[i..].iter().any(|(_, flush, done, _)| *flush && *done),
                                    "T3: durable without a FLUSH behind it");
                            }
                        }
                    }
                }
            }
        }
        prop_assert!(out.is_empty() && engine.is_idle());
        prop_assert_eq!(engine.poll().complete, engine.last_admitted(), "P8");
        for (seq, blocks) in &blocks_of {
            prop_assert!(*seq <= engine.last_admitted().0 && (blocks.is_empty() || groups.contains_key(seq)));
        }
    }
}

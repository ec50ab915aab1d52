//! Engine `horae`: redirected updates, and their commit.

use alloc::vec::Vec;

use super::horae_paths::{Horae, end, step, steps};
use super::*;
use crate::topology::PreparePart;

/// The first block of the data area, behind a prepare area of 8 blocks.
const DATA: u64 = 16;

/// A stream on drives of a server each, with a part of `blocks` blocks from block 8 of each drive on.
fn redirecting(volatile: &[bool], slots: u32, blocks: u32) -> Horae {
    let members = volatile.iter().enumerate().map(|(server, volatile)| MemberInfo {
        server: server as u16,
        start: DATA,
        blocks: 256,
        request_blocks_max: 8,
        volatile: *volatile,
    });
    let servers = vec![ServerInfo { slots }; volatile.len()];
    let topology = Topology::new(members.collect(), servers, 4).unwrap().with_prepare_area(8, 1);
    let prepare = PreparePart { first: 0, blocks };
    let limits = Limits { merge: false, prepare, ..Limits::default() };
    let mut engine = Horae::new(topology, limits);
    engine.note_oldest_read(None);
    engine
}

fn update(lba: u64, blocks: u32) -> Write<Piece> {
    Write { op: Op::Write(Place::InPlace, Piece(100 + lba as u32, blocks)), ..write(lba, blocks) }
}

fn extension(lba: u64) -> Write<Piece> {
    Write { op: Op::Write(Place::Extend, Piece(200, 1)), ..write(lba, 1) }
}

fn changes(engine: &mut Horae) -> Vec<Redirection<Piece>> {
    core::iter::from_fn(|| engine.next_redirection()).collect()
}

#[test]
fn an_update_goes_home_only_when_it_is_durable_and_is_released_then() {
    let mut engine = redirecting(&[true], 16, 8);
    engine.admit(&mut [update(3, 1)], 0, true).unwrap();
    let all = steps(&mut engine, 1);
    assert_eq!(all, ["Order#1 Write 0", "Write 0@8", "Flush 0@0", "Persisted 1"]);
    assert_eq!(engine.poll(), Marks { complete: Seq(1), durable: Seq(1) });
    assert_eq!(engine.released(), Seq(0), "its entry is needed until it is home (T1)");
    assert!(engine.oldest_redirected().is_some());
    assert_eq!(engine.payload_freed_up_to(), Seq(0), "its payload, too");
    let (id, member) = ((Seq(1), 0), Member(0));
    let (lba, prepared_lba, pieces) = (DATA + 3, 8, vec![Piece(103, 1)]);
    let prepared = Redirection::Prepared { id, member, lba, prepared_lba, blocks: 1, pieces };
    assert_eq!(changes(&mut engine), [prepared]);
    engine.ask_home(Seq(1));
    assert_eq!(steps(&mut engine, 1), ["Home Write 0@19", "Home Flush 0@0", "Released 1"]);
    assert_eq!(changes(&mut engine), [Redirection::Home(Seq(1))]);
    assert_eq!(engine.released(), Seq(1));
    assert!(engine.oldest_redirected().is_none());
    assert!(engine.awaits_reads());
    engine.note_oldest_read(None);
    engine.poll();
    assert_eq!(engine.payload_freed_up_to(), Seq(1));
    assert!(engine.is_idle());
}

#[test]
fn the_metadata_of_an_update_has_its_block_in_the_area() {
    let mut engine = redirecting(&[true], 16, 8);
    engine.admit(&mut [update(3, 2), write(40, 1)], 0, false).unwrap();
    let sent = drain(&mut engine, 1);
    let redirected: Vec<_> = sent
        .iter()
        .map(|dispatch| {
            let request = engine.request(dispatch.id);
            (request.is_redirected(), request.data_lba(), request.lba)
        })
        .collect();
    assert_eq!(redirected, [(true, 8, 19), (false, 56, 56)]);
    let flags = engine.request(sent[0].id).attribute(1).flags;
    assert!(flags.has(Flags::REDIRECTED.with(Flags::IN_PLACE)));
}

#[test]
fn without_updates_nothing_is_different() {
    let mut engine = redirecting(&[true], 16, 8);
    engine.admit(&mut [write(3, 1)], 0, true).unwrap();
    assert_eq!(steps(&mut engine, 1), ["Order#1 Write 0", "Write 0@19", "Flush 0@0", "Flushed 1"]);
    engine.poll();
    assert_eq!(engine.released(), Seq(1));
}

#[test]
fn of_several_updates_of_a_block_the_newest_goes_home() {
    let mut engine = redirecting(&[true], 16, 8);
    engine.admit(&mut [update(3, 1)], 0, false).unwrap();
    engine.admit(&mut [update(5, 1)], 0, false).unwrap();
    engine.admit(&mut [update(3, 1)], 0, true).unwrap();
    let all = steps(&mut engine, 1);
    // No update waits for the one before of the same block.
    assert_eq!(all[3], "Write 0@10");
    engine.ask_home(Seq(3));
    let home = steps(&mut engine, 1);
    assert_eq!(home, ["Home Write 0@21, Home Write 0@19", "Home Flush 0@0", "Released 3"]);
}

#[test]
fn t12_an_update_that_its_group_overwrites_at_home_is_not_redirected() {
    let mut engine = redirecting(&[false], 16, 8);
    // The first update is below the second one, and that one below the fresh write. The last one is
    // behind it.
    let mut writes = [update(2, 2), update(3, 2), write(4, 1), update(4, 1)];
    engine.admit(&mut writes, 0, true).unwrap();
    let (_, ids) = step(&mut engine, 1);
    end(&mut engine, &ids);
    let (text, ids) = step(&mut engine, 1);
    assert_eq!(text, "Write 0@18, Write 0@8", "the others wait for the first one");
    end(&mut engine, &ids);
    assert_eq!(steps(&mut engine, 1), ["Write 0@19", "Write 0@20", "Persisted 1"]);
    engine.poll();
    engine.ask_home(Seq(1));
    assert_eq!(steps(&mut engine, 1), ["Home Write 0@20", "Released 1"]);
}

#[test]
fn p9_after_a_failure_readers_get_only_what_is_durable() {
    let mut engine = redirecting(&[true], 16, 8);
    engine.admit(&mut [update(3, 1)], 0, true).unwrap();
    steps(&mut engine, 1);
    engine.admit(&mut [update(3, 1)], 0, false).unwrap();
    steps(&mut engine, 1);
    engine.poll();
    changes(&mut engine);
    let cause = Cause::Disconnected;
    engine.poison(Failure { seq: Seq(2), member: Member(0), flush: false, cause });
    let (id, member) = ((Seq(1), 0), Member(0));
    let (lba, prepared_lba, pieces) = (DATA + 3, 8, vec![Piece(103, 1)]);
    let durable = Redirection::Prepared { id, member, lba, prepared_lba, blocks: 1, pieces };
    assert_eq!(changes(&mut engine), [Redirection::RolledBack(Seq(1)), durable]);
}

#[test]
fn t12_updates_that_overlap_in_part_go_home_in_their_order() {
    let mut engine = redirecting(&[false], 16, 8);
    engine.admit(&mut [update(0, 2)], 0, false).unwrap();
    engine.admit(&mut [update(1, 2)], 0, true).unwrap();
    steps(&mut engine, 1);
    engine.poll();
    engine.ask_home(Seq(2));
    let (text, ids) = step(&mut engine, 1);
    assert_eq!(text, "Home Write 0@16");
    end(&mut engine, &ids);
    assert_eq!(steps(&mut engine, 1), ["Home Write 0@17", "Released 2"]);
}

#[test]
fn a_commit_covers_only_what_is_durable() {
    let mut engine = redirecting(&[true], 16, 8);
    engine.admit(&mut [update(3, 1)], 0, true).unwrap();
    steps(&mut engine, 1);
    engine.admit(&mut [update(3, 1)], 0, false).unwrap();
    steps(&mut engine, 1);
    assert_eq!(engine.poll(), Marks { complete: Seq(2), durable: Seq(1) });
    engine.ask_home(Seq(1));
    assert_eq!(steps(&mut engine, 1), ["Home Write 0@19", "Home Flush 0@0", "Released 1"]);
    assert_eq!(engine.released(), Seq(1));
    assert!(engine.oldest_redirected().is_some());
}

#[test]
fn a_half_full_area_is_drained_and_a_full_one_pushes_back() {
    let mut engine = redirecting(&[true], 64, 4);
    for seq in 1..=4 {
        assert_eq!(engine.admit(&mut [update(seq, 1)], 0, false), Ok(Seq(seq)));
    }
    let full = Refusal::Full(Bound::PrepareArea { member: Member(0) });
    assert_eq!(engine.admit(&mut [update(9, 1)], 0, false), Err(full));
    let too_large = Refusal::TooLarge(Bound::PrepareArea { member: Member(0) });
    assert_eq!(engine.admit(&mut [update(9, 3), update(20, 2)], 0, false), Err(too_large));
    assert_eq!(engine.check_write(9, 4, false), Ok(()));
    assert_eq!(engine.check_write(9, 5, false), Err(too_large), "it may be an update");
    let extended = &mut [update(9, 4), extension(9)];
    assert_eq!(engine.admit(extended, 0, false), Err(too_large), "an extension takes blocks, too");
    assert_eq!(engine.admit(&mut [update(9, 4), extension(20)], 0, false), Err(full));
    let all = steps(&mut engine, 1);
    assert_eq!(all.last().unwrap(), "Released 2", "half of it was full then");
    engine.poll();
    let refused = engine.admit(&mut [update(9, 1)], 0, false);
    assert_eq!(refused, Err(full), "the old blocks may be being read");
    engine.note_oldest_read(Some(Seq(2)));
    assert_eq!(engine.admit(&mut [update(9, 1)], 0, false), Ok(Seq(5)));
    assert_eq!(engine.admit(&mut [update(9, 1)], 0, false), Err(full));
    engine.note_oldest_read(None);
    assert_eq!(engine.admit(&mut [update(9, 1)], 0, false), Ok(Seq(6)));
}

#[test]
fn blocks_of_the_area_are_adjacent_across_the_end_of_the_ring() {
    let mut engine = redirecting(&[false], 64, 4);
    engine.admit(&mut [update(0, 3)], 0, false).unwrap();
    steps(&mut engine, 1);
    engine.ask_home(Seq(1));
    steps(&mut engine, 1);
    engine.poll();
    engine.admit(&mut [update(8, 1)], 0, false).unwrap();
    assert_eq!(steps(&mut engine, 1)[1], "Write 0@11", "the first blocks may be being read");
    engine.note_oldest_read(None);
    engine.admit(&mut [update(0, 2)], 0, false).unwrap();
    assert_eq!(steps(&mut engine, 1)[1], "Write 0@8");
    let full = Refusal::Full(Bound::PrepareArea { member: Member(0) });
    assert_eq!(engine.admit(&mut [update(0, 2)], 0, false), Err(full));
}

#[test]
fn an_extension_of_redirected_blocks_is_redirected() {
    let mut engine = redirecting(&[false], 16, 8);
    engine.admit(&mut [update(3, 1), extension(3), extension(4)], 0, false).unwrap();
    engine.admit(&mut [extension(3)], 0, false).unwrap();
    let all = steps(&mut engine, 1);
    assert_eq!(all[1], "Order#4 Write 0, Write 0@8, Write 0@9, Write 0@20");
    assert_eq!(all[2], "Write 0@10");
}

#[test]
fn a_fresh_write_over_redirected_blocks_waits_until_they_are_released() {
    let mut engine = redirecting(&[true], 16, 8);
    engine.admit(&mut [update(3, 1)], 0, false).unwrap();
    engine.admit(&mut [write(3, 1)], 0, false).unwrap();
    engine.admit(&mut [write(9, 1)], 0, false).unwrap();
    let all = steps(&mut engine, 1);
    let expected = [
        "Order#1 Write 0",
        "Write 0@8",
        "Flush 0@0",
        "Persisted 1",
        "Home Write 0@19",
        "Home Flush 0@0",
        "Released 1",
        "Order#2 Write 0",
        "Order#3 Write 0, Write 0@19",
        "Write 0@25",
    ];
    assert_eq!(all, expected);
    assert_eq!(engine.poll().complete, Seq(3));
}

#[test]
fn t1_a_log_half_full_of_durable_updates_is_drained() {
    let mut engine = redirecting(&[true], 8, 8);
    for seq in 1..=3 {
        engine.admit(&mut [update(seq, 1)], 0, true).unwrap();
        steps(&mut engine, 1);
    }
    engine.admit(&mut [write(9, 1)], 0, true).unwrap();
    let all = steps(&mut engine, 1);
    assert_eq!(all.last().unwrap(), "Persisted 4");
    assert!(!all.iter().any(|step| step.starts_with("Home")));
    // Half of the slots are taken.
    engine.admit(&mut [write(10, 1)], 0, true).unwrap();
    let all = steps(&mut engine, 1);
    assert!(all.iter().any(|step| step.contains("Released 4")), "{all:?}");
    engine.poll();
    assert_eq!(engine.released(), Seq(5));
}

#[test]
fn a_log_is_drained_also_when_a_joint_flush_ends_beside_a_commit() {
    let mut engine = redirecting(&[true], 4, 8);
    engine.admit(&mut [update(1, 1)], 0, true).unwrap();
    steps(&mut engine, 1);
    engine.ask_home(Seq(1));
    let (text, home) = step(&mut engine, 1);
    assert_eq!(text, "Home Write 0@17");
    engine.admit(&mut [write(2, 1), write(40, 1)], 0, true).unwrap();
    let beside = steps(&mut engine, 1);
    assert_eq!(beside.last().unwrap(), "Persisted 2", "the update is not released yet");
    end(&mut engine, &home);
    assert_eq!(steps(&mut engine, 1), ["Home Flush 0@0", "Released 1"]);
    engine.poll();
    let groups = [write(60, 1), write(70, 1), write(80, 1)];
    let full = Refusal::Full(Bound::Log { server: 0 });
    assert_eq!(engine.admit(&mut groups.clone(), 0, false), Err(full));
    assert_eq!(steps(&mut engine, 1), ["Released 2"]);
    assert_eq!(engine.admit(&mut groups.clone(), 0, false), Ok(Seq(3)));
}

#[test]
fn t22_a_flush_that_fails_elsewhere_stops_a_commit() {
    let mut engine = redirecting(&[true], 16, 8);
    engine.admit(&mut [update(3, 1)], 0, true).unwrap();
    steps(&mut engine, 1);
    engine.poll();
    engine.on_flush_failed_elsewhere(Member(0));
    assert_eq!(engine.failure(), None, "the update is durable in the area");
    engine.ask_home(Seq(1));
    let (_, ids) = step(&mut engine, 1);
    end(&mut engine, &ids);
    engine.on_flush_failed_elsewhere(Member(0));
    let failure = engine.failure().unwrap();
    assert_eq!((failure.seq, failure.cause), (Seq(2), Cause::SharedFlush));
    assert_eq!(engine.poll().durable, Seq(1), "recovery copies it home");
}

#[test]
fn p6_a_write_home_that_fails_stops_the_stream_behind_what_is_durable() {
    let mut engine = redirecting(&[true], 16, 8);
    engine.admit(&mut [update(3, 1)], 0, true).unwrap();
    steps(&mut engine, 1);
    engine.poll();
    engine.admit(&mut [update(4, 1)], 0, false).unwrap();
    engine.ask_home(Seq(1));
    let ids = drain(&mut engine, 1);
    for dispatch in ids {
        let is_home = engine.request(dispatch.id).path == Path::Home;
        engine.on_request_done(dispatch.id, if is_home { Err(Cause::Status(6)) } else { Ok(()) });
    }
    assert_eq!(engine.failure().unwrap().seq, Seq(2));
    assert_eq!(engine.poll().durable, Seq(1));
    assert!(engine.oldest_redirected().is_none() && engine.is_idle());
}

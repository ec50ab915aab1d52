//! Engine `linux`: the steps of a transaction.

use alloc::string::String;
use alloc::vec::Vec;

use super::*;

type Linux = linux::Linux<Piece>;

/// The requests that may be sent now, as text: kind, drive, FUA.
fn step(engine: &mut Linux, servers: u16) -> (String, Vec<RequestId>) {
    let sent = drain(engine, servers);
    let text = sent.iter().map(|dispatch| {
        assert!(dispatch.ordered.is_none(), "no attribute (T17)");
        let request = engine.request(dispatch.id);
        let fua = if request.fua { " FUA" } else { "" };
        alloc::format!("{:?} {}{fua}", request.kind, request.member.0)
    });
    let text: Vec<String> = text.collect();
    (text.join(", "), sent.iter().map(|dispatch| dispatch.id).collect())
}

/// Ends requests in this order, and checks that no request may be sent before the last has ended.
fn end(engine: &mut Linux, ids: &[RequestId]) {
    for (at, id) in ids.iter().enumerate() {
        assert!(at == 0 || engine.next_request(0).is_none(), "the step has not ended");
        engine.on_request_done(*id, Ok(()));
    }
}

/// Runs the engine until nothing is in flight. Returns the steps.
fn steps(engine: &mut Linux, servers: u16) -> Vec<String> {
    let mut steps = Vec::new();
    loop {
        let (text, ids) = step(engine, servers);
        if ids.is_empty() {
            return steps;
        }
        steps.push(text);
        end(engine, &ids);
    }
}

fn new(volatile: &[bool]) -> Linux {
    Linux::new(topology(volatile, 1, 0, 4), Limits::default())
}

#[test]
fn a_durable_group_is_a_transaction() {
    let mut engine = new(&[true, true, false]);
    // Data and journal on three drives, and the commit block on drive 0, behind a journal block
    // with which it could be merged.
    let mut writes = [write(4, 1), write(8, 1), write(0, 1), write(1, 1)];
    engine.admit(&mut writes, 7, true).unwrap();
    let expected = ["Write 0, Write 1, Write 2", "Flush 0, Flush 1", "Write 0 FUA"];
    let (body, ids) = step(&mut engine, 3);
    assert_eq!(body, expected[0]);
    end(&mut engine, &ids);
    let (flushes, ids) = step(&mut engine, 3);
    assert_eq!(flushes, expected[1], "only drives with a volatile cache");
    end(&mut engine, &ids);
    let (commit, ids) = step(&mut engine, 3);
    assert_eq!(commit, expected[2]);
    assert_eq!(engine.poll(), Marks::default());
    end(&mut engine, &ids);
    assert_eq!(engine.poll(), Marks { complete: Seq(1), durable: Seq(1) }, "FUA needs no FLUSH");
    assert!(engine.is_idle());
}

#[test]
fn a_drive_without_a_volatile_cache_gets_neither_preflush_nor_fua() {
    let mut engine = new(&[false, false]);
    engine.admit(&mut [write(0, 1), write(4, 1)], 0, true).unwrap();
    engine.admit(&mut [write(5, 1)], 0, false).unwrap();
    assert_eq!(steps(&mut engine, 2), ["Write 0", "Write 1", "Write 1"]);
    assert_eq!(engine.poll(), Marks { complete: Seq(2), durable: Seq(2) });
}

#[test]
fn the_next_group_carries_the_flush_of_a_group_that_is_not_durable() {
    let mut engine = new(&[true, true]);
    engine.admit(&mut [write(0, 1)], 0, false).unwrap();
    assert_eq!(steps(&mut engine, 2), ["Write 0"], "without a next group there is no FLUSH");
    assert_eq!(engine.poll(), Marks { complete: Seq(1), durable: Seq(0) });
    // A commit block alone: the FLUSH before it is its PREFLUSH.
    engine.admit(&mut [write(4, 1)], 0, true).unwrap();
    assert_eq!(steps(&mut engine, 2), ["Flush 0", "Write 1 FUA"]);
    assert_eq!(engine.poll(), Marks { complete: Seq(2), durable: Seq(2) });
}

#[test]
fn the_caller_may_ask_for_a_flush() {
    let mut engine = new(&[true]);
    engine.admit(&mut [write(0, 1)], 0, false).unwrap();
    engine.ask_durable(Seq(9));
    assert_eq!(steps(&mut engine, 1), ["Write 0", "Flush 0"]);
    assert_eq!(engine.poll(), Marks { complete: Seq(1), durable: Seq(1) });
    engine.ask_durable(Seq(1));
    assert!(steps(&mut engine, 1).is_empty(), "it is durable");
}

#[test]
fn a_durable_group_that_ends_with_a_discard_has_no_commit_block() {
    let mut engine = new(&[true]);
    let discard = Write { lba: 2, blocks: 1, op: Op::Discard };
    engine.admit(&mut [write(0, 1), discard], 0, true).unwrap();
    assert_eq!(steps(&mut engine, 1), ["Write 0, Discard 0", "Flush 0"]);
    assert_eq!(engine.poll(), Marks { complete: Seq(1), durable: Seq(1) });
}

#[test]
fn a_commit_block_on_two_drives_has_fua_on_both() {
    let mut engine = new(&[true, true]);
    engine.admit(&mut [write(3, 2)], 0, true).unwrap();
    assert_eq!(steps(&mut engine, 2), ["Write 0 FUA, Write 1 FUA"]);
    assert_eq!(engine.poll().durable, Seq(1));
}

#[test]
fn a_failure_in_any_step_stops_the_stream() {
    for failing in 0..4 {
        let mut engine = new(&[true]);
        engine.admit(&mut [write(9, 1)], 0, false).unwrap();
        engine.admit(&mut [write(0, 1), write(2, 1)], 0, true).unwrap();
        engine.admit(&mut [write(5, 1)], 0, true).unwrap();
        for _ in 0..failing {
            let ids = step(&mut engine, 1).1;
            end(&mut engine, &ids);
        }
        let (text, ids) = step(&mut engine, 1);
        let durable = engine.poll().durable;
        engine.on_request_done(ids[0], Err(Cause::Status(0x280)));
        let failure = engine.failure().unwrap();
        assert_eq!(failure.flush, text.starts_with("Flush") || text.ends_with("FUA"), "{text}");
        assert!(failure.seq > durable, "{text}");
        assert!(steps(&mut engine, 1).is_empty() && engine.is_idle(), "{text}");
        assert_eq!(engine.poll().durable, durable, "{text}");
    }
}

#[test]
fn t6_a_transaction_has_as_many_requests_as_can_be_numbered() {
    let limits = Limits { merge: false, ..Limits::default() };
    let most = usize::from(GROUP_ENTRIES_MAX);
    let discard = |lba| Write { lba, blocks: 1, op: Op::Discard };
    let mut engine = Linux::new(topology(&[true], 1, 0, 64), limits);
    let mut group = alloc::vec![discard(0); most];
    group.push(write(9, 1));
    assert_eq!(engine.admit(&mut group, 0, true), Err(Refusal::TooManyEntries));
    assert!(engine.is_idle() && engine.next_request(0).is_none(), "nothing is left of it");
    assert_eq!(engine.last_admitted(), Seq(0));
}

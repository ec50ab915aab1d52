//! Engine `horae`: control path, data path and joint FLUSH.

use alloc::string::String;
use alloc::vec::Vec;

use super::*;

pub(super) type Horae = horae::Horae<Piece>;

/// The requests that may be sent now, as text, and their ids.
pub(super) fn step(engine: &mut Horae, servers: u16) -> (String, Vec<RequestId>) {
    let sent = drain(engine, servers);
    let text = sent.iter().map(|dispatch| {
        let request = engine.request(dispatch.id);
        assert_eq!(dispatch.ordered.is_some(), request.path == Path::Control);
        let lba = request.data_lba();
        let ordinal = dispatch.ordered.map(|ordered| alloc::format!("#{}", ordered.ordinal));
        match request.path {
            Path::Flushed => alloc::format!("Flushed {}", request.seq),
            Path::Persisted => alloc::format!("Persisted {}", request.seq),
            Path::Released => alloc::format!("Released {}", request.seq),
            Path::Home => alloc::format!("Home {:?} {}@{lba}", request.kind, request.member.0),
            Path::Data => alloc::format!("{:?} {}@{lba}", request.kind, request.member.0),
            Path::Control => {
                let ordinal = ordinal.unwrap_or_default();
                alloc::format!("Order{ordinal} {:?} {}", request.kind, request.member.0)
            }
        }
    });
    let text: Vec<String> = text.collect();
    (text.join(", "), sent.iter().map(|dispatch| dispatch.id).collect())
}

pub(super) fn end(engine: &mut Horae, ids: &[RequestId]) {
    for id in ids {
        engine.on_request_done(*id, Ok(()));
    }
}

/// Runs the engine until nothing is in flight. Returns the steps.
pub(super) fn steps(engine: &mut Horae, servers: u16) -> Vec<String> {
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

fn with_slots(volatile: &[bool], slots: u32) -> Horae {
    Horae::new(topology(volatile, 1, slots, 4), Limits { merge: false, ..Limits::default() })
}

fn new(volatile: &[bool]) -> Horae {
    with_slots(volatile, 64)
}

#[test]
fn the_metadata_of_a_group_is_durable_before_its_data_is_sent() {
    let mut engine = new(&[true, true]);
    engine.admit(&mut [write(0, 1), write(4, 1)], 0, false).unwrap();
    engine.admit(&mut [write(1, 1)], 0, false).unwrap();
    let (text, ids) = step(&mut engine, 2);
    assert_eq!(text, "Order#1 Write 0, Order#1 Write 1", "one group at a time");
    engine.on_request_done(ids[0], Ok(()));
    assert!(step(&mut engine, 2).1.is_empty(), "an entry is not confirmed yet");
    engine.on_request_done(ids[1], Ok(()));
    let (text, ids) = step(&mut engine, 2);
    assert_eq!(text, "Order#2 Write 0, Write 0@8, Write 1@8", "data, and the next metadata");
    engine.on_request_done(ids[0], Ok(()));
    assert_eq!(step(&mut engine, 2).0, "Write 0@9", "the data of the first group delays nothing");
    assert_eq!(engine.poll(), Marks::default());
}

#[test]
fn t3_a_joint_flush_reaches_each_dirty_drive_and_is_then_recorded() {
    let mut engine = new(&[true, true, false]);
    engine.admit(&mut [write(0, 1)], 0, false).unwrap(); // drive 0
    engine.admit(&mut [write(4, 1)], 0, false).unwrap(); // drive 1
    engine.admit(&mut [write(8, 1)], 0, true).unwrap(); // drive 2, with power-loss protection
    let all = steps(&mut engine, 3);
    let flush = all.len() - 2;
    assert_eq!(all[flush], "Flush 0@0, Flush 1@0");
    assert_eq!(all[flush + 1], "Flushed 3, Flushed 3, Flushed 3", "each log with an entry");
    assert_eq!(engine.poll(), Marks { complete: Seq(3), durable: Seq(3) });
    assert_eq!(engine.released(), Seq(3));
    assert!(engine.is_idle());
}

#[test]
fn a_group_is_durable_when_that_is_recorded_also_without_a_volatile_cache() {
    let mut engine = new(&[false]);
    engine.admit(&mut [write(0, 1)], 0, false).unwrap();
    assert_eq!(steps(&mut engine, 1), ["Order#1 Write 0", "Write 0@8"]);
    assert_eq!(engine.poll(), Marks { complete: Seq(1), durable: Seq(0) });
    engine.ask_durable(Seq(1));
    let (text, ids) = step(&mut engine, 1);
    assert_eq!((text.as_str(), engine.poll().durable), ("Flushed 1", Seq(0)));
    end(&mut engine, &ids);
    assert_eq!(engine.poll().durable, Seq(1));
}

#[test]
fn t2_a_joint_flush_waits_for_the_writes_that_it_covers() {
    let mut engine = new(&[true]);
    engine.admit(&mut [write(0, 1)], 0, true).unwrap();
    let ids = step(&mut engine, 1).1;
    end(&mut engine, &ids);
    let (text, ids) = step(&mut engine, 1);
    assert_eq!(text, "Write 0@8");
    engine.ask_durable(Seq(1));
    assert!(step(&mut engine, 1).1.is_empty());
    // A later group makes the drive dirty again while the FLUSH is in flight.
    end(&mut engine, &ids);
    let (text, flush) = step(&mut engine, 1);
    assert_eq!(text, "Flush 0@0");
    engine.admit(&mut [write(1, 1)], 0, true).unwrap();
    for _ in 0..2 {
        let ids = step(&mut engine, 1).1;
        end(&mut engine, &ids);
    }
    end(&mut engine, &flush);
    assert_eq!(steps(&mut engine, 1), ["Flushed 1", "Flush 0@0", "Flushed 2"]);
    assert_eq!(engine.poll(), Marks { complete: Seq(2), durable: Seq(2) });
}

#[test]
fn a_durable_group_without_writes_is_in_a_log() {
    let mut engine = new(&[true]);
    engine.admit(&mut [], 7, true).unwrap();
    let (text, ids) = step(&mut engine, 1);
    assert_eq!((text.as_str(), engine.request(ids[0]).tag), ("Order#1 Flush 0", 7));
    assert_eq!(engine.poll().complete, Seq(0), "it is not in the log yet");
    end(&mut engine, &ids);
    assert_eq!(steps(&mut engine, 1), ["Flushed 1"]);
    assert_eq!(engine.poll(), Marks { complete: Seq(1), durable: Seq(1) });
}

#[test]
fn t12_data_waits_for_earlier_data_of_the_same_blocks() {
    let mut engine = new(&[true]);
    let extend = |lba, blocks| Write {
        lba,
        blocks,
        op: Op::Write(Place::Extend, Piece(lba as u32, blocks)),
    };
    for group in [write(0, 1), extend(0, 2), write(3, 1)] {
        engine.admit(&mut [group], 0, false).unwrap();
    }
    let mut first = None;
    for _ in 0..3 {
        for id in step(&mut engine, 1).1 {
            let request = engine.request(id);
            match (request.path, request.seq) {
                (Path::Data, Seq(1)) => first = Some(id),
                (Path::Data, seq) => assert_eq!(seq, Seq(3), "the second group waits"),
                _ => engine.on_request_done(id, Ok(())),
            }
        }
    }
    assert!(engine.has_pending_write(1, 1));
    let third = step(&mut engine, 1);
    assert!(third.0.is_empty() || third.0 == "Write 0@11");
    engine.on_request_done(first.unwrap(), Ok(()));
    assert_eq!(step(&mut engine, 1).0, "Write 0@8");
}

#[test]
fn t12_the_last_write_of_a_block_in_a_group_is_the_last_one_there() {
    let mut engine = new(&[true]);
    engine.admit(&mut [write(0, 1), write(1, 1), write(0, 1)], 0, false).unwrap();
    let entries = step(&mut engine, 1);
    assert_eq!(entries.0, "Order#1 Write 0, Order#2 Write 0, Order#3 Write 0");
    end(&mut engine, &entries.1);
    let (text, ids) = step(&mut engine, 1);
    assert_eq!(text, "Write 0@8, Write 0@9");
    engine.on_request_done(ids[1], Ok(()));
    assert!(step(&mut engine, 1).1.is_empty());
    engine.on_request_done(ids[0], Ok(()));
    assert_eq!(step(&mut engine, 1).0, "Write 0@8");
}

#[test]
fn t13_a_half_full_log_presses_for_a_joint_flush_and_a_full_one_refuses() {
    let mut engine = with_slots(&[false], 4);
    for lba in 0..4 {
        engine.admit(&mut [write(lba, 1)], 0, false).unwrap();
    }
    let full = Err(Refusal::Full(Bound::Log { server: 0 }));
    assert_eq!(engine.admit(&mut [write(9, 1)], 0, false), full);
    let all = steps(&mut engine, 1);
    assert!(all.iter().any(|step| step.contains("Flushed 2")), "nobody asked for it: {all:?}");
    assert_eq!(engine.poll(), Marks { complete: Seq(4), durable: Seq(2) });
    engine.admit(&mut [write(9, 1)], 0, false).unwrap();
    let group: Vec<_> = (0..5).map(|lba| write(2 * lba, 1)).collect();
    let too_large = Err(Refusal::TooLarge(Bound::Log { server: 0 }));
    assert_eq!(engine.admit(&mut group.clone(), 0, false), too_large);
}

/// A joint FLUSH that is in flight already covers the groups for which space is wanted. The next
/// shortage still presses for one.
#[test]
fn p8_each_shortage_of_slots_presses_for_a_joint_flush() {
    let mut engine = with_slots(&[false], 4);
    for _ in 0..5 {
        for lba in 0..2 {
            engine.admit(&mut [write(lba, 1)], 0, false).unwrap();
        }
        let last = engine.last_admitted();
        engine.ask_durable(last);
        for _ in 0..3 {
            let ids = step(&mut engine, 1).1;
            end(&mut engine, &ids);
        }
        // The record of `flushed` is in flight now.
        for lba in 2..4 {
            let _ = engine.admit(&mut [write(lba, 1)], 0, false);
        }
        steps(&mut engine, 1);
        engine.poll();
        let last = engine.last_admitted();
        engine.ask_durable(last);
        steps(&mut engine, 1);
        assert_eq!(engine.poll().durable, last);
    }
    // Without a wish of the caller, a stream that writes all the time goes on, too.
    let mut admitted = 0;
    for _ in 0..400 {
        admitted += u32::from(engine.admit(&mut [write(admitted.into(), 1)], 0, false).is_ok());
        let ids = step(&mut engine, 1).1;
        end(&mut engine, &ids);
        engine.poll();
        if admitted == 60 {
            return;
        }
    }
    panic!("only {admitted} groups");
}

#[test]
fn p6_a_failure_on_any_path_stops_the_stream() {
    for failing in 0..5 {
        let mut engine = new(&[true]);
        engine.admit(&mut [write(0, 1)], 0, true).unwrap();
        for _ in 0..failing.min(3) {
            let ids = step(&mut engine, 1).1;
            end(&mut engine, &ids);
        }
        // Behind the step that fails, a group waits for the control path, and another one for that.
        engine.admit(&mut [write(1, 1)], 0, true).unwrap();
        engine.admit(&mut [write(2, 1)], 0, true).unwrap();
        let (text, ids) = step(&mut engine, 1);
        assert!(!ids.is_empty());
        engine.on_request_done(ids[0], Err(Cause::Status(0x280)));
        assert!(engine.failure().is_some_and(|failure| failure.seq >= Seq(1)), "{text}");
        for id in &ids[1..] {
            engine.on_request_done(*id, Ok(()));
        }
        assert!(step(&mut engine, 1).1.is_empty() && engine.is_idle(), "{text}");
        assert_eq!(engine.poll().durable, Seq(0), "{text}");
    }
}

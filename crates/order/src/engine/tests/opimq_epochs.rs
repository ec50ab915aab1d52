//! Engine `opimq`: what each queue gets, and when a group is durable.

use alloc::collections::VecDeque;
use alloc::string::String;

use super::*;
use crate::engine::base::HasBase as _;
use crate::engine::opimq::{Opimq, QUEUES_PER_SERVER};
use crate::write_order::{EpochId, WriteOrder};

fn new(volatile: &[bool]) -> Opimq<Piece> {
    let limits = Limits { stream_number: 5, ..Limits::default() };
    Opimq::new(topology(volatile, 1, 0, 4), limits)
}

/// Takes all requests that may be sent, each as text with its queue.
pub(super) fn step(engine: &mut Opimq<Piece>) -> (Vec<String>, Vec<RequestId>) {
    let mut sent = Vec::new();
    let queues = engine.base().topology.servers().len() as u16 * QUEUES_PER_SERVER;
    loop {
        let count = sent.len();
        for queue in 0..queues {
            while let Some(d) = engine.next_request(queue) {
                sent.push((text(engine.request(d.id), queue), d.id));
            }
        }
        if sent.len() == count {
            return sent.into_iter().unzip();
        }
    }
}

fn text(request: &Request<Piece>, queue: u16) -> String {
    let what = match (request.kind, request.order, request.flush_before) {
        (Kind::Flush, _, Some(EpochId { stream: 5, epoch })) => alloc::format!("flush<{epoch}"),
        (Kind::Flush, _, Some(EpochId { stream, epoch })) => {
            alloc::format!("flush<{stream}.{epoch}")
        }
        (Kind::Flush, _, None) => "flush".into(),
        (Kind::Discard, WriteOrder::Orderless, _) => alloc::format!("discard {}", request.lba),
        (_, WriteOrder::Orderless, _) => alloc::format!("plain {}", request.lba),
        (_, WriteOrder::Epochs(order), _) => {
            let barrier = if order.barrier { "|" } else { "" };
            let own = order.own;
            let stream =
                if own.stream == 5 { String::new() } else { alloc::format!("{}.", own.stream) };
            let follower = order.follower.map_or(String::new(), |follower| {
                alloc::format!("&{}.{}", follower.stream, follower.epoch)
            });
            alloc::format!("{}@{stream}{}{follower}{barrier}", request.lba, own.epoch)
        }
        other => panic!("{other:?}"),
    };
    alloc::format!("q{queue} {what}")
}

pub(super) fn end(engine: &mut Opimq<Piece>, ids: &[RequestId]) {
    for id in ids {
        engine.on_request_done(*id, Ok(()));
    }
}

#[test]
fn groups_on_a_drive_are_epochs_and_do_not_wait() {
    let mut engine = new(&[true]);
    engine.admit(&mut [write(0, 1), write(20, 1)], 0, false).unwrap();
    engine.admit(&mut [write(8, 1)], 0, false).unwrap();
    engine.admit(&mut [write(9, 1)], 0, true).unwrap();
    let (texts, ids) = step(&mut engine);
    // The drive begins at block 8. Adjacent groups are not merged. The FLUSH follows at once.
    assert_eq!(texts, ["q0 8@0", "q0 28@0|", "q0 16@1|", "q0 17@2|", "q0 flush<3"]);
    // The FLUSH may be answered before the writes.
    end(&mut engine, &ids[4..]);
    assert_eq!(engine.poll(), Marks::default());
    end(&mut engine, &ids[..2]);
    assert_eq!(engine.poll(), Marks { complete: Seq(1), durable: Seq(1) });
    end(&mut engine, &ids[2..4]);
    assert_eq!(engine.poll(), Marks { complete: Seq(3), durable: Seq(3) });
    assert!(engine.is_idle());
}

#[test]
fn an_epoch_stays_in_its_queue_when_its_stream_moves() {
    let mut engine = new(&[true]);
    engine.admit(&mut [write(0, 1), write(8, 1), write(16, 1)], 0, false).unwrap();
    engine.admit(&mut [write(30, 1)], 0, false).unwrap();
    let first = engine.next_request(0).unwrap();
    engine.set_core(3);
    assert_eq!(engine.next_request(1), None, "its epoch began in queue 0");
    let (texts, ids) = step(&mut engine);
    assert_eq!(texts, ["q0 16@0", "q0 24@0|", "q1 38@1|"]);
    end(&mut engine, &[first.id]);
    end(&mut engine, &ids);
    assert_eq!(engine.poll(), Marks { complete: Seq(2), durable: Seq(0) });
    engine.ask_durable(Seq(2));
    assert_eq!(step(&mut engine).0, ["q1 flush<2"]);
}

#[test]
fn writes_of_the_same_block_have_epochs_of_their_own() {
    let mut engine = new(&[true]);
    let mut group = [write(0, 2), write(30, 1), write(1, 1), write(4, 1), write(0, 1)];
    engine.admit(&mut group, 0, false).unwrap();
    assert_eq!(step(&mut engine).0, ["q0 8@0", "q0 38@0|", "q0 9@1", "q0 12@1|", "q0 8@2|"]);
    // Without an overlap the order of the blocks does not matter.
    engine.admit(&mut [write(40, 1), write(20, 1), write(30, 1)], 0, false).unwrap();
    assert_eq!(step(&mut engine).0, ["q0 48@3", "q0 28@3", "q0 38@3|"]);
}

#[test]
fn a_group_for_another_drive_waits_until_the_groups_before_it_are_durable() {
    let mut engine = new(&[true, true]);
    engine.admit(&mut [write(0, 1)], 0, false).unwrap();
    engine.admit(&mut [write(1, 1)], 0, false).unwrap();
    engine.admit(&mut [write(4, 1)], 0, false).unwrap(); // drive 1
    engine.admit(&mut [write(2, 1)], 0, false).unwrap(); // drive 0 again
    let (texts, ids) = step(&mut engine);
    assert_eq!(texts, ["q0 8@0|", "q0 9@1|", "q0 flush<2"]);
    end(&mut engine, &ids[2..]);
    assert!(step(&mut engine).0.is_empty(), "the writes have not ended");
    end(&mut engine, &ids[..2]);
    let (texts, ids) = step(&mut engine);
    assert_eq!(texts, ["q2 8@0|", "q2 flush<1"], "the group behind it has asked for the FLUSH");
    end(&mut engine, &ids);
    assert_eq!(step(&mut engine).0, ["q0 10@2|"], "the epochs of the first drive go on");
    assert_eq!(engine.poll(), Marks { complete: Seq(3), durable: Seq(3) });
}

#[test]
fn a_group_on_several_drives_or_with_a_discard_is_sent_apart() {
    let discard = Write { lba: 2, blocks: 1, op: Op::Discard };
    for (mut group, apart, flushes) in [
        (vec![write(0, 1), write(4, 1)], vec!["q0 plain 8", "q2 plain 8"], 2),
        (vec![write(0, 1), discard], vec!["q0 plain 8", "q0 discard 10"], 1),
    ] {
        let mut engine = new(&[true, true]);
        engine.admit(&mut [write(1, 1)], 0, false).unwrap();
        engine.admit(&mut group, 0, false).unwrap();
        engine.admit(&mut [], 0, true).unwrap();
        engine.admit(&mut [write(3, 1)], 0, false).unwrap();
        let (texts, ids) = step(&mut engine);
        assert_eq!(texts, ["q0 9@0|", "q0 flush<1"]);
        end(&mut engine, &ids);
        let (texts, ids) = step(&mut engine);
        assert_eq!(texts, apart);
        end(&mut engine, &ids[..1]);
        assert!(step(&mut engine).0.is_empty());
        end(&mut engine, &ids[1..]);
        let (texts, ids) = step(&mut engine);
        assert_eq!(texts.len(), flushes, "{texts:?}");
        assert!(texts.iter().all(|text| text.ends_with("flush")), "{texts:?}");
        assert!(engine.poll().durable < Seq(2));
        end(&mut engine, &ids);
        assert_eq!(engine.poll(), Marks { complete: Seq(3), durable: Seq(3) });
        assert_eq!(step(&mut engine).0, ["q0 11@1|"]);
    }
}

#[test]
fn a_drive_with_power_loss_protection_needs_no_flush() {
    let mut engine = new(&[false, true]);
    engine.admit(&mut [write(0, 1)], 0, true).unwrap();
    engine.admit(&mut [], 0, true).unwrap();
    engine.admit(&mut [write(4, 1)], 0, false).unwrap(); // drive 1, with a volatile cache
    let (texts, ids) = step(&mut engine);
    assert_eq!(texts, ["q0 8@0|"]);
    end(&mut engine, &ids);
    assert_eq!(engine.poll(), Marks { complete: Seq(2), durable: Seq(2) });
    assert_eq!(step(&mut engine).0, ["q2 8@0|"]);
}

#[test]
fn t22_a_flush_behind_a_failure_of_another_covers_nothing() {
    let mut engine = new(&[true]);
    engine.admit(&mut [write(0, 1)], 0, true).unwrap();
    let (_, ids) = step(&mut engine);
    end(&mut engine, &ids[..1]);
    engine.on_flush_failed_elsewhere(Member(0));
    end(&mut engine, &ids[1..]);
    assert_eq!(engine.poll(), Marks { complete: Seq(1), durable: Seq(0) });
}

#[test]
fn a_failed_write_ends_the_groups_that_wait() {
    let mut engine = new(&[true, true]);
    engine.admit(&mut [write(0, 1)], 0, false).unwrap();
    engine.admit(&mut [write(4, 1)], 0, false).unwrap();
    let (_, ids) = step(&mut engine);
    engine.on_request_done(ids[0], Err(Cause::Status(0x280)));
    let failure = engine.failure().unwrap();
    assert_eq!((failure.seq, failure.member, failure.flush), (Seq(1), Member(0), false));
    engine.on_request_done(ids[1], Err(Cause::Status(0x280)));
    assert!(engine.is_idle() && step(&mut engine).0.is_empty());
}

/// Without a limit, an epoch could be taken for one of the lap before.
#[test]
fn epochs_wrap_and_never_run_far_ahead_of_the_oldest_in_flight() {
    let mut engine = new(&[true]);
    let mut oldest = VecDeque::new();
    let mut sent_count = 0u32;
    let mut furthest = 0;
    for round in 0..150_000u32 {
        // Groups are admitted faster than the oldest ones end.
        if engine.admit(&mut [write(u64::from(round % 200), 1)], 0, round % 1000 == 0).is_err() {
            engine.poll();
        }
        for id in step(&mut engine).1 {
            if let WriteOrder::Epochs(order) = engine.request(id).order {
                assert_eq!(order.own.epoch, sent_count as u16);
                sent_count += 1;
            }
            oldest.push_back(id);
        }
        furthest = furthest.max(oldest.len());
        let ends = if round < 20_000 { 0 } else { 2 };
        for id in oldest.drain(..ends.min(oldest.len())).collect::<Vec<_>>() {
            engine.on_request_done(id, Ok(()));
        }
        engine.poll();
    }
    assert!(sent_count > 1 << 16, "the numbers have wrapped: {sent_count}");
    assert!(furthest > 8000 && furthest < 1 << 14, "{furthest} in flight");
}

/// A stream that moves while its groups are sent piece by piece, and queues that a drive reads in
/// any order: judged by what the drive needs to know.
#[test]
fn a_drive_sees_whole_epochs_in_any_interleaving_of_the_queues() {
    let mut random = 1u64;
    let mut below = move |n: u64| {
        random ^= random << 13;
        random ^= random >> 7;
        random ^= random << 17;
        random % n
    };
    for _ in 0..300 {
        let mut engine = new(&[true]);
        // The barrier of each epoch, and the number of its other writes that have not arrived.
        let mut queues: [VecDeque<RequestId>; 2] = [VecDeque::new(), VecDeque::new()];
        let mut missing: BTreeMap<u16, (u32, bool)> = BTreeMap::new();
        let mut groups: BTreeMap<u16, Seq> = BTreeMap::new();
        let mut moves = 0;
        for _ in 0..60 {
            match below(4) {
                0 => {
                    let mut group: Vec<_> =
                        (0..1 + below(4)).map(|n| write(n * 9 + below(8), 1)).collect();
                    engine.admit(&mut group, 0, below(5) == 0).unwrap();
                }
                1 => {
                    engine.set_core(below(4) as u32);
                    moves += 1;
                }
                _ => {
                    let queue = below(2) as u16;
                    let Some(d) = engine.next_request(queue) else { continue };
                    let request = engine.request(d.id);
                    if let WriteOrder::Epochs(order) = request.order {
                        let epoch = missing.entry(order.own.epoch).or_default();
                        assert!(!epoch.1, "no write behind the barrier of its epoch");
                        epoch.0 += 1;
                        epoch.1 |= order.barrier;
                        groups.insert(order.own.epoch, request.seq);
                    }
                    queues[usize::from(queue)].push_back(d.id);
                }
            }
        }
        // Now all arrives, in any order of the queues.
        while queues.iter().any(|queue| !queue.is_empty()) {
            let Some(id) = queues[below(2) as usize].pop_front() else { continue };
            if let WriteOrder::Epochs(order) = engine.request(id).order {
                let epoch = missing.get_mut(&order.own.epoch).unwrap();
                epoch.0 -= 1;
                assert!(!order.barrier || epoch.0 == 0, "the barrier is the last of its epoch");
            }
        }
        assert!(groups.values().is_sorted(), "epochs follow the groups");
        assert!(moves > 0);
    }
}

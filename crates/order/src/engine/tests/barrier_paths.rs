//! Engine `barrier`: epochs on one drive, and the switch to another one.

use alloc::string::String;
use alloc::vec::Vec;

use super::super::base::HasBase;
use super::*;
use crate::write_order::WriteOrder;

type Barrier = barrier::Barrier<Piece>;

/// The requests that may be sent now, as text, and their ids. `|` is a barrier.
fn step(engine: &mut Barrier) -> (String, Vec<RequestId>) {
    let servers = engine.base().topology.servers().len() as u16;
    let sent = drain(engine, servers);
    let text = sent.iter().map(|dispatch| {
        let request = engine.request(dispatch.id);
        let order = match request.order {
            WriteOrder::Orderless => "",
            WriteOrder::Ordered { barrier: false } => " in order",
            WriteOrder::Ordered { barrier: true } => " in order |",
            WriteOrder::Epochs(_) => panic!("an order of another kind of drive"),
        };
        alloc::format!("{:?} {}@{}{order}", request.kind, request.member.0, request.lba)
    });
    let text: Vec<String> = text.collect();
    (text.join(", "), sent.iter().map(|dispatch| dispatch.id).collect())
}

fn end(engine: &mut Barrier, ids: &[RequestId]) {
    for id in ids {
        engine.on_request_done(*id, Ok(()));
    }
}

/// Runs the engine until nothing is in flight. Returns the steps.
fn steps(engine: &mut Barrier) -> Vec<String> {
    core::iter::from_fn(|| {
        let (text, ids) = step(engine);
        end(engine, &ids);
        (!ids.is_empty()).then_some(text)
    })
    .collect()
}

fn new(volatile: &[bool]) -> Barrier {
    Barrier::new(topology(volatile, 1, 64, 4), Limits { merge: false, ..Limits::default() })
}

#[test]
fn groups_on_one_drive_are_epochs_and_wait_for_nothing() {
    let mut engine = new(&[true]);
    engine.admit(&mut [write(9, 1), write(2, 1), write(5, 1)], 0, false).unwrap();
    engine.admit(&mut [write(0, 1)], 0, false).unwrap();
    let (text, ids) = step(&mut engine);
    // The elevator goes from block 8 of the drive on, where the volume begins. The last one to leave
    // is the barrier.
    let first = "Write 0@10 in order, Write 0@13 in order, Write 0@17 in order |";
    assert_eq!(text, [first, "Write 0@8 in order |"].join(", "));
    end(&mut engine, &ids);
    assert_eq!(engine.poll(), Marks { complete: Seq(2), durable: Seq(0) });
    engine.ask_durable(Seq(2));
    assert_eq!(steps(&mut engine), ["Flush 0@0"]);
    assert_eq!(engine.poll().durable, Seq(2));
}

#[test]
fn a_group_for_another_drive_waits_until_all_before_it_are_durable() {
    let mut engine = new(&[true, true]);
    for lba in [0, 1, 4, 5, 2] {
        engine.admit(&mut [write(lba, 1)], 0, false).unwrap();
    }
    let expected = [
        "Write 0@8 in order |, Write 0@9 in order |",
        "Flush 0@0",
        "Write 1@8 in order |, Write 1@9 in order |",
        "Flush 1@0",
        "Write 0@10 in order |",
    ];
    assert_eq!(steps(&mut engine), expected);
    assert_eq!(engine.poll(), Marks { complete: Seq(5), durable: Seq(4) });
}

#[test]
fn with_power_loss_protection_a_switch_needs_no_flush() {
    let mut engine = new(&[false, false]);
    for lba in [0, 4] {
        engine.admit(&mut [write(lba, 1)], 0, false).unwrap();
    }
    assert_eq!(steps(&mut engine), ["Write 0@8 in order |", "Write 1@8 in order |"]);
    assert_eq!(engine.poll().durable, Seq(2));
}

#[test]
fn a_group_on_several_drives_or_with_a_discard_is_alone() {
    let mut engine = new(&[true, true]);
    engine.admit(&mut [write(0, 1)], 0, false).unwrap();
    engine.admit(&mut [write(1, 1), write(4, 1)], 0, false).unwrap();
    let discard = Write { lba: 2, blocks: 1, op: Op::Discard };
    engine.admit(&mut [discard], 0, false).unwrap();
    engine.admit(&mut [], 0, true).unwrap();
    let expected = [
        "Write 0@8 in order |",
        "Flush 0@0",
        "Write 0@9, Write 1@8",
        "Flush 0@0, Flush 1@0",
        "Discard 0@10",
        "Flush 0@0",
    ];
    assert_eq!(steps(&mut engine), expected);
    assert_eq!(engine.poll().durable, Seq(4), "also the group without writes");
}

#[test]
fn t12_two_writes_of_a_block_in_one_group_are_two_epochs() {
    let mut engine = new(&[true]);
    engine.admit(&mut [write(4, 2), write(3, 2)], 0, false).unwrap();
    assert_eq!(steps(&mut engine), ["Write 0@12 in order |, Write 0@11 in order |"]);
}

#[test]
fn p6_a_failure_frees_what_is_not_sent() {
    let mut engine = new(&[true, true]);
    for lba in [0, 1, 4] {
        engine.admit(&mut [write(lba, 1)], 0, false).unwrap();
    }
    let (_, ids) = step(&mut engine);
    engine.on_request_done(ids[0], Err(Cause::Disconnected));
    end(&mut engine, &ids[1..]);
    assert!(engine.is_idle() && steps(&mut engine).is_empty());
    assert_eq!((engine.poll().complete, engine.failure().unwrap().seq), (Seq(0), Seq(1)));
    let refused = engine.admit(&mut [write(0, 1)], 0, false);
    assert!(matches!(refused, Err(Refusal::Poisoned(_))));
}

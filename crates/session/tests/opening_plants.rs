//! The plants of an opening do what they promise: without the defence, model targets are left in
//! the state that the trap describes.
#![cfg(feature = "probe")]

#[path = "opening/world.rs"]
#[allow(dead_code, reason = "the other tests of openings use the rest")]
mod world;

use std::sync::{Mutex, MutexGuard, PoisonError};

use riopipe_nvme::command::opcode;
use riopipe_order::attribute::{Attribute, Seq};
use riopipe_order::probe::{self, Plant, Rare};
use riopipe_session::claim::{ClaimError, Intent};
use riopipe_session::initiator::opening::{Mode, Opening, OpeningError, Phase};
use riopipe_session::wire;

use world::{Driver, JUNK, Past, Random, START, World, entry, in_place, open, sqe_of};

/// One plant at a time in this process; taken out at the end.
struct Planted {
    _one: MutexGuard<'static, ()>,
}

fn planted(plant: Option<Plant>) -> Planted {
    static ONE: Mutex<()> = Mutex::new(());
    let one = ONE.lock().unwrap_or_else(PoisonError::into_inner);
    probe::plant(plant);
    Planted { _one: one }
}

impl Drop for Planted {
    fn drop(&mut self) {
        probe::plant(None);
    }
}

/// A group over both servers, durable, and one beyond a hole on each.
fn crashed() -> World {
    let mut world = World::new(2, 1, |_| true);
    let past = |attribute: Attribute, durable| Past { stream: 0, attribute, durable };
    let part = |index, member| Attribute { num: 2, index, ..entry(1, member, 5, 1) };
    let history = [
        past(part(0, 0), true),
        past(part(1, 2), true),
        past(entry(3, 0, 6, 1), true),
        past(in_place(entry(4, 2, 7, 1)), true),
    ];
    world.play(&history, &mut Random(1));
    world
}

fn driver(world: &World) -> Driver {
    Driver::new(world, 1, Mode::Open(world.intent()))
}

fn steps(driver: &Driver) -> Vec<u8> {
    let opcodes = driver.log.iter().map(|(_, call)| sqe_of(call).opcode());
    let shown = [opcode::WRITE_ZEROES, opcode::FLUSH, wire::ADMIN_SETTLE];
    let mut steps: Vec<u8> = opcodes.filter(|opcode| shown.contains(opcode)).collect();
    steps.dedup();
    steps
}

fn count(rare: Rare) -> u64 {
    probe::counts()[rare as usize]
}

#[test]
fn without_a_plant_everything_is_in_order() {
    let _none = planted(None);
    let before = count(Rare::Undo);
    let mut world = crashed();
    let mut driver = driver(&world);
    driver.go(&mut world).unwrap();
    assert_eq!(steps(&driver), [opcode::WRITE_ZEROES, opcode::FLUSH, wire::ADMIN_SETTLE]);
    assert_eq!(driver.opening.outcome().streams[0].plan.k, Seq(1));
    assert_eq!(count(Rare::Undo), before + 1);
}

#[test]
fn t9_settle_early() {
    let _plant = planted(Some(Plant::T9SettleEarly));
    let mut world = crashed();
    let mut driver = driver(&world);
    driver.go(&mut world).unwrap();
    assert_eq!(steps(&driver), [wire::ADMIN_SETTLE, opcode::WRITE_ZEROES, opcode::FLUSH]);
    assert_eq!(driver.opening.phase(), Phase::Over);
}

#[test]
fn t9_undo_not_flushed() {
    let _plant = planted(Some(Plant::T9UndoNotFlushed));
    let mut world = crashed();
    open(&mut world, 1).unwrap();
    assert_eq!(world.drive(0).reads(START + 6), 0);
    assert_ne!(world.drive(0).medium.get(&(START + 6)), Some(&0), "a power cut brings it back");
}

#[test]
fn t9_restart_early() {
    let _plant = planted(Some(Plant::T9RestartEarly));
    let mut world = crashed();
    open(&mut world, 1).unwrap();
    let settled: Vec<bool> = world.targets.iter().map(|t| t.partitions[0].settled).collect();
    assert_eq!(settled, [true, false]);
}

#[test]
fn t9_forget_in_place() {
    let _plant = planted(Some(Plant::T9ForgetInPlace));
    let mut world = crashed();
    let outcome = open(&mut world, 1).unwrap();
    assert!(outcome.streams[0].pending);
    assert!(world.targets.iter().all(|target| target.partitions[0].entries.is_empty()));
}

#[test]
fn t10_deallocate() {
    let _plant = planted(Some(Plant::T10Deallocate));
    let mut world = crashed();
    open(&mut world, 1).unwrap();
    assert_eq!(world.drive(0).reads(START + 6), JUNK);
}

#[test]
fn t19_blank_log() {
    let blank = || {
        let mut world = crashed();
        world.targets[1].known = false;
        world.targets[1].partitions.clear();
        world
    };
    {
        let _none = planted(None);
        let before = count(Rare::LogRefused);
        let error = open(&mut blank(), 1).unwrap_err();
        assert_eq!(error, OpeningError::Claim(ClaimError::LogMissing { target: 1 }));
        assert_eq!(count(Rare::LogRefused), before + 1);
    }
    let _plant = planted(Some(Plant::T19BlankLog));
    let mut world = blank();
    let outcome = open(&mut world, 1).unwrap();
    assert_eq!(outcome.streams[0].plan.k, Seq(0), "the half that is left counts for nothing");
}

#[test]
fn t24_label_unchecked() {
    let older = || {
        let mut world = crashed();
        world.targets[1].generation = world.intent().label_generation - 1;
        world
    };
    {
        let _none = planted(None);
        let before = count(Rare::LogBehind);
        let error = open(&mut older(), 1).unwrap_err();
        let OpeningError::Claim(ClaimError::LogBehind { target: 1, .. }) = error else {
            panic!("{error}")
        };
        assert_eq!(count(Rare::LogBehind), before + 1);
    }
    let _plant = planted(Some(Plant::T24LabelUnchecked));
    assert!(open(&mut older(), 1).is_ok());
}

#[test]
fn t20_missing_server() {
    let world = crashed();
    let mut config = world.config();
    config.servers[1].present = false;
    let mode = || Mode::Open(Intent { ..world.intent() });
    {
        let _none = planted(None);
        let before = count(Rare::MemberMissing);
        let error = Opening::new(config.clone(), mode(), 0).unwrap_err();
        assert_eq!(error, OpeningError::Missing { server: 1 });
        assert_eq!(count(Rare::MemberMissing), before + 1);
    }
    let _plant = planted(Some(Plant::T20MissingServer));
    let mut without = world.clone();
    let outcome = Driver::with(config, 1, mode()).unwrap().run(&mut without).unwrap();
    assert_eq!(outcome.streams[0].plan.k, Seq(0));
    assert_eq!(without.targets[1], world.targets[1]);
    // Where all are there, one list is left out.
    let mut all = world.clone();
    let outcome = open(&mut all, 1).unwrap();
    assert_eq!((outcome.streams[0].plan.k, outcome.counts.entries), (Seq(0), 2));
    assert!(all.targets.iter().all(|target| target.partitions[0].settled));
}

#[test]
fn t23_late_answers() {
    let world = crashed();
    let attempt =
        |number| Opening::new(world.config(), Mode::Open(world.intent()), number).unwrap();
    let mut first = attempt(1);
    let (late, call) = first.next_command(0).unwrap();
    let reported = world.clone().handle(1, 0, &call).unwrap();
    let accepted = |second: &mut Opening| {
        let (own, _) = second.next_command(0).unwrap();
        assert_eq!((own.number, own.attempt), (late.number, 2));
        second.on_answer(late, Ok(&reported)).unwrap();
        second.in_flight(0) == 0
    };
    {
        let _none = planted(None);
        let before = count(Rare::LateAnswer);
        assert!(!accepted(&mut attempt(2)));
        assert_eq!(count(Rare::LateAnswer), before + 1);
    }
    let _plant = planted(Some(Plant::T23LateAnswers));
    assert!(accepted(&mut attempt(2)));
}

//! Each plant of the gate does what its name promises, and no other check fails over it.
#![cfg(feature = "probe")]

mod common;

use common::table_gate::TableGate;
use common::write;
use riopipe_order::attribute::{Attribute, Flags, Kind, Member};
use riopipe_order::gate::{Cause, MemberCache, Step, Ticket};
use riopipe_order::probe::{self, Plant, Rare};

use Step::{Append, Flush, Write};

/// A gate with one volatile drive, whose tickets are the entries' ordinals.
struct Bench(TableGate);

impl Bench {
    fn new(plant: Plant) -> Self {
        probe::plant(Some(plant));
        Self(TableGate::new(&[MemberCache { member: Member(0), volatile: true }], 16))
    }

    fn arrive(&mut self, attribute: Attribute) -> Vec<Step> {
        let mut steps = Vec::new();
        self.0.arrive(Ticket(attribute.ordinal), &attribute, &mut steps).unwrap();
        steps
    }

    fn written(&mut self, ordinal: u32, ok: bool) -> Vec<Step> {
        let mut steps = Vec::new();
        self.0.written(Ticket(ordinal), ok, &mut steps);
        steps
    }

    fn flushed(&mut self, ordinal: u32, ok: bool) -> Vec<Step> {
        let mut steps = Vec::new();
        self.0.flushed(Ticket(ordinal), ok, &mut steps);
        steps
    }
}

fn plain(ordinal: u32) -> Attribute {
    Attribute { lba: 100 * u64::from(ordinal), ..write(u64::from(ordinal), ordinal) }
}

fn flushing(ordinal: u32) -> Attribute {
    Attribute { flags: Flags::FLUSH, ..plain(ordinal) }
}

fn bare_flush(ordinal: u32) -> Attribute {
    Attribute { kind: Kind::Flush, lba: 0, blocks: 0, ..flushing(ordinal) }
}

fn done(ordinal: u32, persist: bool) -> Step {
    Step::Complete { ticket: Ticket(ordinal), persist }
}

fn refused(ordinal: u32, why: Cause) -> Step {
    Step::Refuse { ticket: Ticket(ordinal), why }
}

fn write_failed(ordinal: u32) -> Cause {
    Cause::WriteFailed { member: Member(0), ordinal }
}

/// One test, because a plant is set for the whole process.
#[test]
fn each_plant_removes_its_defence() {
    flush_early();
    no_overlap();
    cover_after_failure();
    failed_write();
    own_flush();
    probe::plant(None);
    rare_paths_are_counted();
}

fn flush_early() {
    let mut gate = Bench::new(Plant::T2FlushEarly);
    gate.arrive(plain(1));
    assert_eq!(gate.arrive(bare_flush(2)), [Append(Ticket(2)), Flush(Ticket(2))]);
    gate.arrive(flushing(3));
    assert_eq!(gate.flushed(2, true), [done(2, true)], "its own write is still waited for");
    assert_eq!(gate.written(3, true), [Flush(Ticket(3))]);
    assert_eq!(gate.flushed(3, true), [done(3, true)]);
    assert_eq!(gate.written(1, true), [done(1, false)]);
    assert!(gate.0.is_idle());
}

fn no_overlap() {
    let mut gate = Bench::new(Plant::T12NoOverlap);
    let same = |ordinal| Attribute { lba: 7, ..plain(ordinal) };
    gate.arrive(same(1));
    assert_eq!(gate.arrive(same(2)), [Append(Ticket(2)), Write(Ticket(2))]);
    assert_eq!(gate.written(2, true), [done(2, false)]);
    assert_eq!(gate.written(1, true), [done(1, false)]);
    assert!(gate.0.is_idle());
}

fn cover_after_failure() {
    let mut gate = Bench::new(Plant::T4CoverAfterFailure);
    let why = write_failed(1);
    gate.arrive(plain(1));
    gate.arrive(flushing(2));
    gate.arrive(plain(3));
    gate.arrive(bare_flush(4));
    // Waits for the failed one, and is refused with it.
    gate.arrive(Attribute { lba: 100, ..flushing(5) });
    assert_eq!(gate.written(2, true), []);
    assert_eq!(gate.written(1, false), [refused(1, why), refused(5, why), Flush(Ticket(2))]);
    assert_eq!(gate.written(3, true), [refused(3, why)]);
    assert_eq!(gate.flushed(2, true), [done(2, true), Flush(Ticket(4))], "it covers entry 1");
    assert_eq!(gate.flushed(4, true), [done(4, true)]);
    assert_eq!(gate.arrive(plain(6)), [refused(6, why)], "the stream is stopped all the same");
    assert!(gate.0.is_idle());
}

fn failed_write() {
    let mut gate = Bench::new(Plant::T22FailedWrite);
    gate.arrive(plain(1));
    gate.arrive(Attribute { lba: 100, ..plain(2) });
    gate.arrive(flushing(3));
    gate.arrive(bare_flush(4));
    assert_eq!(gate.written(1, false), [refused(1, write_failed(1)), Write(Ticket(2))]);
    assert_eq!(gate.written(3, false), [refused(3, write_failed(3))]);
    assert_eq!(gate.written(2, true), [done(2, false), Flush(Ticket(4))]);
    assert_eq!(gate.flushed(4, true), [done(4, true)]);
    assert_eq!(gate.arrive(plain(5)), [Append(Ticket(5)), Write(Ticket(5))]);
    assert_eq!((gate.0.poison_cause(), gate.0.entry_count()), (None, 1));
}

fn own_flush() {
    let mut gate = Bench::new(Plant::T22OwnFlush);
    let why = Cause::FlushFailed { member: Member(0) };
    gate.arrive(flushing(1));
    gate.arrive(flushing(2));
    gate.arrive(flushing(3));
    gate.written(2, true);
    assert_eq!(gate.written(1, true), [Flush(Ticket(2))]);
    gate.written(3, true);
    // The caller informs the gate of every failure on the drive, its own as well.
    assert!(!gate.0.flush_failed_on(Member(0), &mut Vec::new()));
    assert_eq!(gate.flushed(2, false), [refused(1, why), refused(2, why), Flush(Ticket(3))]);
    assert_eq!(gate.flushed(3, true), [done(3, true)], "it covers what that one lost");
    assert_eq!(gate.0.poison_cause(), None);
    assert!(gate.0.is_idle());
}

fn rare_paths_are_counted() {
    let before = probe::counts();
    let mut gate = Bench(TableGate::new(&[MemberCache { member: Member(0), volatile: true }], 16));
    gate.arrive(Attribute { lba: 100, ..plain(2) });
    gate.arrive(plain(1));
    gate.arrive(bare_flush(3));
    gate.written(1, true);
    gate.written(2, true);
    gate.flushed(3, false);
    let mut affected =
        Bench(TableGate::new(&[MemberCache { member: Member(0), volatile: true }], 16));
    affected.arrive(plain(1));
    affected.0.flush_failed_on(Member(0), &mut Vec::new());
    affected.written(1, false);
    let after = probe::counts();
    for rare in [
        Rare::GateEarly,
        Rare::GateOverlap,
        Rare::GateFlush,
        Rare::FlushFailed,
        Rare::FlushFailedElsewhere,
        Rare::WriteFailed,
    ] {
        assert!(after[rare as usize] > before[rare as usize], "{rare}");
    }
}

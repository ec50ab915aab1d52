//! The gate against the traps of the design, one by one.

mod common;

use common::table_gate::TableGate;
use common::write;
use riopipe_order::attribute::{Attribute, Flags, Kind, Member};
use riopipe_order::gate::{Cause, GateError, MemberCache, Step, Ticket};

use Step::{Append, Flush, Write};

const VOLATILE: MemberCache = MemberCache { member: Member(0), volatile: true };
const PLP: MemberCache = MemberCache { member: Member(1), volatile: false };

/// A gate whose tickets are the entries' ordinals.
struct Bench(TableGate);

impl Bench {
    fn new() -> Self {
        Self(TableGate::new(&[VOLATILE, PLP], 16))
    }

    fn arrive(&mut self, attribute: Attribute) -> Vec<Step> {
        let mut steps = Vec::new();
        let ticket = Ticket(attribute.ordinal % 16);
        self.0.arrive(ticket, &attribute, &mut steps).unwrap();
        steps
    }

    fn written(&mut self, ordinal: u32, ok: bool) -> Vec<Step> {
        let mut steps = Vec::new();
        self.0.written(Ticket(ordinal % 16), ok, &mut steps);
        steps
    }

    fn flushed(&mut self, ordinal: u32, ok: bool) -> Vec<Step> {
        let mut steps = Vec::new();
        self.0.flushed(Ticket(ordinal % 16), ok, &mut steps);
        steps
    }
}

/// A write of one block of its own.
fn plain(ordinal: u32) -> Attribute {
    Attribute { lba: 100 * u64::from(ordinal), ..write(u64::from(ordinal), ordinal) }
}

fn on(member: u8, attribute: Attribute) -> Attribute {
    Attribute { member: Member(member), ..attribute }
}

fn flushing(attribute: Attribute) -> Attribute {
    Attribute { flags: attribute.flags.with(Flags::FLUSH), ..attribute }
}

fn bare_flush(ordinal: u32) -> Attribute {
    Attribute { kind: Kind::Flush, lba: 0, blocks: 0, ..flushing(plain(ordinal)) }
}

fn done(ordinal: u32, persist: bool) -> Step {
    let ticket = Ticket(ordinal % 16);
    Step::Complete { ticket, persist }
}

fn refused(ordinal: u32, why: Cause) -> Step {
    let ticket = Ticket(ordinal % 16);
    Step::Refuse { ticket, why }
}

fn goes(ordinal: u32) -> [Step; 2] {
    [Append(Ticket(ordinal % 16)), Write(Ticket(ordinal % 16))]
}

#[test]
fn plain_writes_do_not_wait_for_one_another() {
    let mut gate = Bench::new();
    for ordinal in 1..=4 {
        assert_eq!(gate.arrive(on(ordinal as u8 % 2, plain(ordinal))), goes(ordinal));
    }
    assert_eq!(gate.written(3, true), [done(3, true)], "completed is durable with PLP");
    assert_eq!(gate.written(2, true), [done(2, false)], "and is not without");
    assert_eq!(gate.0.entry_count(), 2);
}

#[test]
fn entries_that_overtook_wait_for_their_predecessors() {
    let mut gate = Bench::new();
    assert_eq!(gate.arrive(plain(3)), []);
    assert_eq!(gate.arrive(plain(2)), []);
    assert_eq!(gate.0.early_count(), 2);
    let steps = gate.arrive(plain(1));
    assert_eq!(steps, [goes(1), goes(2), goes(3)].concat());
    assert_eq!(gate.0.early_count(), 0);
}

#[test]
fn t2_a_flush_waits_for_all_earlier_writes_on_its_drive() {
    let mut gate = Bench::new();
    gate.arrive(plain(1));
    gate.arrive(on(1, plain(2)));
    gate.arrive(plain(3));
    assert_eq!(gate.arrive(flushing(plain(4))), goes(4), "its own write need not wait");
    assert_eq!(gate.arrive(plain(5)), goes(5), "nor any later one");
    assert_eq!(gate.written(4, true), []);
    assert_eq!(gate.written(3, true), [done(3, false)]);
    assert_eq!(
        gate.written(1, true),
        [done(1, false), Flush(Ticket(4))],
        "2 is elsewhere, 5 later"
    );
    assert_eq!(gate.flushed(4, true), [done(4, true)]);
}

#[test]
fn t2_a_bare_flush_waits_too() {
    let mut gate = Bench::new();
    gate.arrive(plain(1));
    assert_eq!(gate.arrive(bare_flush(2)), [Append(Ticket(2))]);
    assert_eq!(gate.written(1, true), [done(1, false), Flush(Ticket(2))]);
    assert_eq!(gate.flushed(2, true), [done(2, true)]);
    assert_eq!(gate.arrive(bare_flush(3)), [Append(Ticket(3)), Flush(Ticket(3))]);
}

#[test]
fn t3_a_flush_entry_counts_the_writes_of_its_own_drive_only() {
    let mut gate = Bench::new();
    gate.arrive(on(1, plain(1)));
    assert_eq!(gate.arrive(bare_flush(2)), [Append(Ticket(2)), Flush(Ticket(2))]);
}

#[test]
fn t4_one_flush_covers_the_flush_entries_that_waited_with_it() {
    let mut gate = Bench::new();
    gate.arrive(flushing(plain(1)));
    gate.arrive(flushing(plain(2)));
    gate.arrive(flushing(plain(3)));
    assert_eq!(gate.written(2, true), []);
    assert_eq!(gate.written(1, true), [Flush(Ticket(2))], "the FLUSH of 2 covers 1");
    assert_eq!(gate.written(3, true), [], "one FLUSH at a time: 3 may not cover what 2 loses");
    assert_eq!(gate.flushed(2, true), [done(1, true), done(2, true), Flush(Ticket(3))]);
    assert_eq!(gate.flushed(3, true), [done(3, true)]);
}

#[test]
fn t4_no_entry_covers_others_after_a_failure() {
    let mut gate = Bench::new();
    gate.arrive(plain(1));
    gate.arrive(flushing(plain(2)));
    assert_eq!(gate.written(2, true), []);
    let why = Cause::WriteFailed { member: Member(0), ordinal: 1 };
    assert_eq!(gate.written(1, false), [refused(1, why), refused(2, why)]);
    assert!(gate.0.is_idle());
}

#[test]
fn t4_with_plp_a_flush_entry_covers_only_once_the_earlier_are_done() {
    let mut gate = Bench::new();
    gate.arrive(on(1, plain(1)));
    gate.arrive(on(1, flushing(plain(2))));
    assert_eq!(gate.written(2, true), [], "no FLUSH is needed, but 1 is not there yet");
    assert_eq!(gate.written(1, true), [done(1, true), done(2, true)]);
}

#[test]
fn t5_ordinals_wrap() {
    let mut gate = Bench(TableGate::starting_at(u32::MAX - 1, &[VOLATILE], 16));
    assert_eq!(gate.arrive(plain(1)), [], "three ahead, over the wrap");
    assert_eq!(gate.arrive(flushing(plain(0))), []);
    assert_eq!(gate.arrive(plain(u32::MAX)), []);
    let expected = [u32::MAX - 1, u32::MAX, 0, 1].map(goes).concat();
    assert_eq!(gate.arrive(plain(u32::MAX - 1)), expected);
    assert_eq!(gate.written(0, true), []);
    assert_eq!(gate.written(u32::MAX, true), [done(u32::MAX, false)]);
    let flush = [done(u32::MAX - 1, false), Flush(Ticket(0))];
    assert_eq!(gate.written(u32::MAX - 1, true), flush, "entry 1 comes later, not earlier");
    assert_eq!(gate.flushed(0, true), [done(0, true)]);
    assert!(gate.0.has_unflushed(Member(0)), "entry 1");
}

#[test]
fn t12_an_overlapping_write_waits_for_the_earlier() {
    let mut gate = Bench::new();
    let at = |ordinal, lba, blocks| Attribute { lba, blocks, ..plain(ordinal) };
    gate.arrive(at(1, 10, 4));
    assert_eq!(gate.arrive(at(2, 13, 2)), [Append(Ticket(2))]);
    assert_eq!(gate.arrive(at(3, 14, 1)), [Append(Ticket(3))], "2 waits, and 3 for it");
    assert_eq!(
        gate.arrive(at(4, 14, 600)),
        [Append(Ticket(4))],
        "a large one checks the list, too"
    );
    assert_eq!(gate.arrive(at(5, 600, 1)), [Append(Ticket(5))], "in its shadow");
    assert_eq!(gate.arrive(on(1, at(6, 10, 4))), goes(6), "another drive");
    assert_eq!(gate.arrive(at(7, 9, 1)), goes(7), "touching is not overlapping");
    assert_eq!(gate.arrive(at(8, 614, 1)), goes(8));
    assert_eq!(gate.written(1, true), [done(1, false), Write(Ticket(2))]);
    assert_eq!(gate.written(2, true), [done(2, false), Write(Ticket(3))]);
    assert_eq!(gate.written(3, true), [done(3, false), Write(Ticket(4))]);
    assert_eq!(gate.written(4, true), [done(4, false), Write(Ticket(5))]);
    assert_eq!(gate.0.entry_count(), 4, "5, 6, 7, 8");
}

#[test]
fn t13_a_full_log_takes_back_what_it_did_not_take() {
    let mut gate = Bench::new();
    let mut steps = Vec::new();
    let overlapping = Attribute { lba: 200, ..plain(3) };
    let arrivals = [plain(1), plain(2), overlapping, on(1, bare_flush(4)), bare_flush(5)];
    for attribute in arrivals {
        gate.0.arrive(Ticket(attribute.ordinal), &attribute, &mut steps).unwrap();
    }
    let at = steps.iter().position(|&step| step == Append(Ticket(2))).unwrap();
    gate.0.append_failed(at, Cause::LogFull, &mut steps);
    assert_eq!(steps[..at], goes(1), "what was logged goes on");
    let mut taken_back = steps.split_off(at);
    taken_back.sort_by_key(|step| match step {
        Step::Refuse { ticket, .. } => ticket.0,
        other => panic!("{other:?} of an entry that is not in the log"),
    });
    let all = (2..=5).map(|ordinal| refused(ordinal, Cause::LogFull));
    assert_eq!(taken_back, all.collect::<Vec<_>>());
    assert_eq!(gate.arrive(plain(6)), [refused(6, Cause::LogFull)]);
    assert_eq!(gate.written(1, true), [done(1, false)]);
    assert!(gate.0.is_idle());
}

#[test]
fn a_failed_fence_takes_everything_back() {
    let mut gate = Bench::new();
    gate.arrive(plain(1));
    let mut steps = Vec::new();
    gate.0.written(Ticket(1), true, &mut steps);
    gate.0.arrive(Ticket(2), &plain(2), &mut steps).unwrap();
    gate.0.arrive(Ticket(3), &bare_flush(3), &mut steps).unwrap();
    gate.0.fence_failed(&mut steps);
    let all = [1, 2, 3].map(|ordinal| refused(ordinal, Cause::LogFailed));
    assert_eq!(steps, all);
    assert!(gate.0.is_idle());
}

#[test]
fn t22_a_failed_flush_stops_the_stream() {
    let mut gate = Bench::new();
    gate.arrive(flushing(plain(1)));
    gate.written(1, true);
    gate.arrive(plain(2));
    gate.arrive(on(1, plain(3)));
    gate.arrive(Attribute { lba: 200, ..plain(4) });
    gate.arrive(plain(6));
    let why = Cause::FlushFailed { member: Member(0) };
    assert_eq!(
        gate.flushed(1, false),
        [refused(6, why), refused(4, why), refused(1, why)],
        "what waits goes at once, what is in flight when it comes back"
    );
    assert_eq!(gate.arrive(plain(5)), [refused(5, why)]);
    assert_eq!(gate.written(2, true), [refused(2, why)]);
    assert_eq!(gate.written(3, true), [refused(3, why)]);
    assert!(gate.0.is_idle());
    assert_eq!(gate.0.poison_cause(), Some(why));
}

#[test]
fn t22_a_failed_write_stops_what_comes_later_and_only_that() {
    let mut gate = Bench::new();
    gate.arrive(flushing(plain(1)));
    gate.arrive(plain(2));
    gate.arrive(flushing(plain(3)));
    let why = Cause::WriteFailed { member: Member(0), ordinal: 2 };
    assert_eq!(gate.written(2, false), [refused(2, why)]);
    assert_eq!(gate.written(1, true), [Flush(Ticket(1))]);
    assert_eq!(gate.written(3, true), [refused(3, why)]);
    assert_eq!(gate.flushed(1, true), [done(1, true)], "nothing before it failed");
    assert_eq!(gate.arrive(plain(4)), [refused(4, why)]);
}

/// The initiator replays what was damaged in transit, and drops a stream that has lost a write before.
#[test]
fn p6_the_failed_write_is_reported_before_what_it_stops() {
    let mut gate = Bench::new();
    gate.arrive(plain(1));
    gate.arrive(Attribute { lba: plain(1).lba, ..plain(2) });
    gate.arrive(bare_flush(3));
    let why = Cause::WriteFailed { member: Member(0), ordinal: 1 };
    assert_eq!(gate.written(1, false), [refused(1, why), refused(2, why), refused(3, why)]);
}

#[test]
fn t22_another_streams_failed_flush_stops_streams_with_unflushed_writes() {
    let mut steps = Vec::new();
    let mut clean = Bench::new();
    clean.arrive(flushing(plain(1)));
    clean.written(1, true);
    clean.flushed(1, true);
    clean.arrive(on(1, plain(2)));
    assert!(!clean.0.flush_failed_on(Member(0), &mut steps), "all its writes there are flushed");
    assert!(!clean.0.flush_failed_on(Member(1), &mut steps), "PLP: durable when completed");
    assert!(!clean.0.flush_failed_on(Member(9), &mut steps), "no such drive");
    assert_eq!(clean.written(2, true), [done(2, true)]);

    let mut affected = Bench::new();
    affected.arrive(plain(1));
    assert_eq!(affected.written(1, true), [done(1, false)], "complete, but not durable");
    affected.arrive(bare_flush(2));
    affected.arrive(plain(3));
    assert!(affected.0.flush_failed_on(Member(0), &mut steps));
    let why = Cause::FlushFailed { member: Member(0) };
    assert_eq!(steps, [], "both are in flight");
    assert_eq!(
        affected.flushed(2, true),
        [refused(2, why)],
        "its success changes nothing any more"
    );
    assert_eq!(affected.written(3, true), [refused(3, why)]);
}

#[test]
fn a_write_after_the_flush_entry_is_not_covered() {
    let mut gate = Bench::new();
    gate.arrive(bare_flush(1));
    gate.arrive(plain(2));
    gate.flushed(1, true);
    assert!(gate.0.has_unflushed(Member(0)));
    gate.written(2, true);
    assert!(gate.0.has_unflushed(Member(0)));
    gate.arrive(bare_flush(3));
    gate.flushed(3, true);
    assert!(!gate.0.has_unflushed(Member(0)));
}

#[test]
fn t18_a_peer_that_miscounts_gets_an_error() {
    let mut gate = Bench::new();
    let mut steps = Vec::new();
    let mut arrive = |ticket, attribute| gate.0.arrive(Ticket(ticket), &attribute, &mut steps);
    arrive(0, plain(1)).unwrap();
    arrive(1, plain(4)).unwrap();
    let twice = |ordinal| Err(GateError::Duplicate { ordinal, expected: 2 });
    assert_eq!(arrive(2, plain(1)), twice(1));
    assert_eq!(arrive(2, plain(4)), twice(4));
    assert_eq!(arrive(2, plain(0)), twice(0));
    assert!(arrive(2, plain(2 + 15)).is_ok());
    let (ordinal, expected, window) = (2 + 16, 2, 16);
    assert_eq!(arrive(3, plain(18)), Err(GateError::TooFar { ordinal, expected, window }));
    let (ordinal, member) = (2, Member(2));
    let unknown = Err(GateError::UnknownMember { ordinal, member });
    assert_eq!(arrive(3, on(2, plain(2))), unknown);
    assert_eq!(gate.0.entry_count(), 3, "a refused entry left no trace");
}

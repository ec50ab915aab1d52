//! The gate against a naive oracle. Entries arrive in any order, are written and flushed in any
//! order, and fail. No rule is broken, nothing is held without need, everything ends.

mod common;

use std::collections::BTreeMap;

use common::Choices;
use common::table_gate::TableGate;
use proptest::prelude::*;
use riopipe_order::attribute::{Attribute, Flags, Kind, Member, Seq};
use riopipe_order::gate::{Cause, MemberCache, Step, Ticket};

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Phase {
    /// Arrived, not yet appended.
    Arrived,
    /// Appended, its write not submitted yet.
    Appended,
    Writing,
    /// Its write is done (or there is none).
    Written,
    Flushing,
    Completed,
    Refused,
}

#[derive(Clone, Copy, Debug)]
struct Item {
    attribute: Attribute,
    /// Its place in the stream: ordinals without the wrap.
    place: usize,
    phase: Phase,
}

/// The gate's caller and the drives, and all rules that must hold, as simple as possible.
struct Bench {
    gate: TableGate,
    members: Vec<MemberCache>,
    items: BTreeMap<Ticket, Item>,
    steps: Vec<Step>,
    appended: usize,
    arrived: usize,
    /// Places of writes that failed; everything later may not complete.
    failed: Option<usize>,
    /// A flush failed, or the stream was stopped from outside: nothing may complete.
    stopped: bool,
    /// For each member, the place up to which a successful FLUSH covers its writes.
    covered: BTreeMap<u8, usize>,
    writing: Vec<Ticket>,
    flushing: Vec<Ticket>,
    seen: Marks,
}

/// Counts of the rare paths taken.
#[derive(Clone, Copy, Debug, Default)]
struct Marks {
    held: usize,
    waited: usize,
    joined: usize,
    late_flush: usize,
    retracted: usize,
    refused: usize,
}

impl Bench {
    fn volatile(&self, member: Member) -> bool {
        self.members.iter().any(|m| m.member == member && m.volatile)
    }

    fn must_fail(&self, place: usize) -> bool {
        self.stopped || self.failed.is_some_and(|failed| failed <= place)
    }

    /// Whether every entry of the stream on this drive before `place` has been written.
    fn earlier_are_written(&self, member: Member, place: usize) -> bool {
        self.items
            .values()
            .filter(|item| item.attribute.member == member && item.place < place)
            .all(|item| !matches!(item.phase, Phase::Arrived | Phase::Appended | Phase::Writing))
    }

    fn arrive(&mut self, ticket: Ticket, attribute: Attribute, place: usize) {
        let item = Item { attribute, place, phase: Phase::Arrived };
        assert!(self.items.insert(ticket, item).is_none());
        self.arrived += 1;
        let before = self.steps.len();
        let arrival = self.gate.arrive(ticket, &attribute, &mut self.steps);
        arrival.expect("a good peer");
        self.nothing_completes_after_a_failure(before);
    }

    /// Checked when the gate decides, not when the caller acts: a completion decided before a
    /// failure came back may still be sent after it.
    fn nothing_completes_after_a_failure(&self, before: usize) {
        for step in &self.steps[before..] {
            if let Step::Complete { ticket, .. } = step {
                let item = self.items[ticket];
                assert!(
                    !self.must_fail(item.place),
                    "{item:?} completes after a failure (P6, T22)"
                );
            }
        }
    }

    /// Carries out the steps of the gate. The log refuses the append of place `full_at`, and its
    /// fence fails if `fence_fails`.
    fn carry_out(&mut self, full_at: Option<usize>, fence_fails: bool) {
        let mut steps = std::mem::take(&mut self.steps);
        if fence_fails && steps.iter().any(|step| matches!(step, Step::Append(_))) {
            for step in &steps {
                if let Step::Append(ticket) = step {
                    self.appended = self.appended.max(self.items[ticket].place + 1);
                }
            }
            self.stopped = true;
            self.seen.retracted += 1;
            self.gate.fence_failed(&mut steps);
            assert!(steps.iter().all(|step| matches!(step, Step::Refuse { .. })), "{steps:?}");
        }
        let mut at = 0;
        while let Some(&step) = steps.get(at) {
            if let Step::Append(ticket) = step
                && full_at == Some(self.items[&ticket].place)
            {
                self.failed = Some(self.items[&ticket].place);
                self.seen.retracted += 1;
                self.gate.append_failed(at, Cause::LogFull, &mut steps);
                assert_ne!(steps.get(at), Some(&step), "it was not taken back");
                continue;
            }
            self.one(step);
            at += 1;
        }
        steps.clear();
        self.steps = steps;
        assert_eq!(self.gate.is_idle(), self.items.values().all(|i| i.phase.is_over()));
        self.nothing_is_held_without_need();
    }

    fn one(&mut self, step: Step) {
        let (Step::Append(ticket)
        | Step::Write(ticket)
        | Step::Flush(ticket)
        | Step::Complete { ticket, .. }
        | Step::Refuse { ticket, .. }) = step;
        let item = self.items[&ticket];
        let Item { attribute, place, .. } = item;
        let phase = match step {
            Step::Append(_) => {
                assert_eq!(place, self.appended, "appends come in order, without a gap");
                assert_eq!(item.phase, Phase::Arrived);
                self.appended += 1;
                match attribute.kind {
                    Kind::Flush => Phase::Written,
                    _ => Phase::Appended,
                }
            }
            Step::Write(_) => {
                assert_eq!(item.phase, Phase::Appended);
                for other in self.items.values().filter(|o| o.attribute.overlaps(&attribute)) {
                    // T12: no overlapping write is in flight, and the earlier one went first.
                    assert_ne!(other.phase, Phase::Writing, "{other:?} and {item:?} overlap");
                    assert!(
                        other.place >= place || other.phase.is_written(),
                        "{item:?} overtakes {other:?}"
                    );
                }
                self.writing.push(ticket);
                Phase::Writing
            }
            Step::Flush(_) => {
                assert!(self.volatile(attribute.member), "that FLUSH is not needed");
                assert!(attribute.is_flush());
                // T2: all the stream's earlier entries on that drive, and its own, are written.
                assert_eq!(item.phase, Phase::Written);
                assert!(self.earlier_are_written(attribute.member, place), "FLUSH of {item:?}");
                self.flushing.push(ticket);
                Phase::Flushing
            }
            Step::Complete { persist, .. } => {
                assert!(matches!(item.phase, Phase::Written | Phase::Flushing));
                if self.volatile(attribute.member) {
                    // T4: an entry that covers others was flushed after all of them.
                    assert_eq!(persist, attribute.is_flush());
                    let covered = self.covered.get(&attribute.member.0);
                    assert!(!persist || covered.is_some_and(|&upto| upto >= place), "{item:?}");
                } else {
                    assert!(persist, "completed is durable");
                    if attribute.is_flush() {
                        assert!(self.earlier_are_written(attribute.member, place), "{item:?}");
                    }
                }
                Phase::Completed
            }
            Step::Refuse { .. } => {
                assert!(self.must_fail(place), "{item:?} is refused for nothing");
                assert!(!matches!(item.phase, Phase::Writing) || !self.writing.contains(&ticket));
                self.seen.refused += 1;
                Phase::Refused
            }
        };
        assert!(!item.phase.is_over(), "{item:?} gets {step:?} after its end");
        self.items.get_mut(&ticket).unwrap().phase = phase;
    }

    /// Plain writes need not wait for one another (T2). An appended write that overlaps nothing in
    /// flight is submitted, and a due FLUSH is in flight.
    fn nothing_is_held_without_need(&mut self) {
        for item in self.items.values().filter(|item| item.phase == Phase::Appended) {
            let blocked = self.items.values().any(|other| {
                other.place < item.place
                    && matches!(other.phase, Phase::Appended | Phase::Writing)
                    && other.attribute.overlaps(&item.attribute)
            });
            assert!(blocked, "{item:?} is held without need");
        }
        for (ticket, item) in self.items.iter().filter(|(_, item)| item.phase == Phase::Written) {
            let member = item.attribute.member;
            let busy = self.flushing.iter().any(|t| self.items[t].attribute.member == member);
            assert!(
                busy || !self.earlier_are_written(member, item.place),
                "the FLUSH of {ticket:?} is due"
            );
            self.seen.late_flush += 1;
        }
        self.seen.held = self.seen.held.max(self.gate.early_count() as usize);
        let waiting = self.items.values().filter(|item| item.phase == Phase::Appended);
        self.seen.waited = self.seen.waited.max(waiting.count());
    }

    fn write_ends(&mut self, ticket: Ticket, ok: bool) {
        let item = self.items.get_mut(&ticket).unwrap();
        item.phase = Phase::Written;
        if !ok {
            let failed = self.failed.unwrap_or(usize::MAX);
            self.failed = Some(failed.min(item.place));
        }
        let before = self.steps.len();
        self.gate.written(ticket, ok, &mut self.steps);
        self.nothing_completes_after_a_failure(before);
    }

    fn flush_ends(&mut self, ticket: Ticket, ok: bool) {
        let item = self.items[&ticket];
        if ok {
            let upto = self.covered.entry(item.attribute.member.0).or_default();
            *upto = (*upto).max(item.place);
        } else {
            self.stopped = true;
        }
        let before = self.steps.len();
        self.gate.flushed(ticket, ok, &mut self.steps);
        self.nothing_completes_after_a_failure(before);
        let done = &self.steps[before..];
        let completed = done.iter().filter(|s| matches!(s, Step::Complete { .. }));
        self.seen.joined = self.seen.joined.max(completed.count());
    }
}

impl Phase {
    const fn is_over(self) -> bool {
        matches!(self, Self::Completed | Self::Refused)
    }

    const fn is_written(self) -> bool {
        !matches!(self, Self::Arrived | Self::Appended | Self::Writing)
    }
}

fn attribute(choices: &mut Choices, ordinal: u32) -> Attribute {
    let kind =
        [Kind::Write, Kind::Write, Kind::Write, Kind::Discard, Kind::Flush][choices.below(5)];
    let blocks = [1, 1, 2, 5, 40][choices.below(5)];
    let lba = choices.below(60) as u64;
    let nothing = kind == Kind::Flush;
    Attribute {
        seq: Seq(1 + u64::from(ordinal)),
        span: 1,
        num: 1,
        index: 0,
        ordinal,
        member: Member([2, 7, 250][choices.below(3)]),
        kind,
        flags: Flags::BOUNDARY.with_if(Flags::FLUSH, nothing || choices.below(6) == 0),
        lba: if nothing { 0 } else { lba },
        blocks: if nothing { 0 } else { blocks },
        tag: 0,
    }
}

fn run(total: usize, capacity: u32, mut choices: Choices) -> Marks {
    let members: Vec<_> = [2, 7, 250]
        .map(|member| MemberCache { member: Member(member), volatile: choices.below(3) != 0 })
        .into();
    let first = [1, u32::MAX - 5][choices.below(2)];
    // One run in four each: nothing fails; drives fail; the log fails; an ordinal never comes.
    let mode = choices.below(4);
    let full_at = (mode == 2 && choices.below(2) == 0).then(|| choices.below(total));
    let missing = (mode == 3).then(|| choices.below(total));
    let mut bench = Bench {
        gate: TableGate::starting_at(first, &members, capacity),
        members,
        items: BTreeMap::new(),
        steps: Vec::new(),
        appended: 0,
        arrived: 0,
        failed: None,
        stopped: false,
        covered: BTreeMap::new(),
        writing: Vec::new(),
        flushing: Vec::new(),
        seen: Marks::default(),
    };
    // Entries in transit, at most `capacity` unanswered. They overtake one another.
    let mut sent: Vec<(usize, Attribute)> = Vec::new();
    let mut next = 0;
    let mut free: Vec<Ticket> = (0..capacity).rev().map(Ticket).collect();
    let mut past: Vec<Item> = Vec::new();
    for _ in 0..total * 30 {
        // The entry that gets lost in transit is never answered either.
        let lost = usize::from(missing.is_some_and(|missing| missing < next));
        let open = bench.items.len() + sent.len() + lost;
        if next < total && open < capacity as usize && choices.below(3) != 0 {
            let attribute = attribute(&mut choices, first.wrapping_add(next as u32));
            if missing != Some(next) {
                sent.push((next, attribute));
            }
            next += 1;
        }
        match choices.below(4) {
            0 | 1 if !sent.is_empty() => {
                let early = choices.below(sent.len().min(4));
                let (place, attribute) = sent.remove(early);
                let ticket = free.pop().expect("no more than `capacity` are open");
                bench.arrive(ticket, attribute, place);
            }
            2 if !bench.flushing.is_empty() => {
                let ticket = bench.flushing.remove(choices.below(bench.flushing.len()));
                let ok = mode != 1 || choices.below(12) != 0;
                bench.flush_ends(ticket, ok);
            }
            _ if !bench.writing.is_empty() => {
                let ticket = bench.writing.remove(choices.below(bench.writing.len()));
                let ok = mode != 1 || choices.below(25) != 0;
                bench.write_ends(ticket, ok);
            }
            _ => {}
        }
        if choices.below(3) != 0 {
            continue; // a batch grows
        }
        let fence_fails = mode == 2 && full_at.is_none() && choices.below(20) == 19;
        bench.carry_out(full_at, fence_fails);
        bench.items.retain(|&ticket, item| {
            let over = item.phase.is_over();
            if over {
                free.push(ticket);
                past.push(*item);
            }
            !over
        });
    }
    // Faults stop, and everything in flight comes back. An entry that waits for an ordinal that
    // never comes ends with the connection.
    for (place, attribute) in sent.drain(..) {
        let ticket = free.pop().expect("no more than `capacity` are open");
        bench.arrive(ticket, attribute, place);
    }
    for _ in 0..4 * total + 8 {
        bench.carry_out(full_at, false);
        if let Some(ticket) = bench.writing.pop() {
            bench.write_ends(ticket, true);
        } else if let Some(ticket) = bench.flushing.pop() {
            bench.flush_ends(ticket, true);
        }
    }
    if missing.is_some() && bench.gate.poison_cause().is_none() {
        assert_eq!(bench.gate.entry_count(), bench.gate.early_count(), "only early ones are left");
        bench.stopped = true;
        bench.gate.poison(Cause::Closed, &mut bench.steps);
        bench.carry_out(None, false);
    }
    assert!(bench.gate.is_idle(), "liveness: {:?}", bench.items);
    assert_eq!(bench.gate.early_count(), 0);
    if mode == 0 {
        past.extend(bench.items.values());
        assert!(past.iter().all(|item| item.phase == Phase::Completed));
    }
    bench.seen
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 800, ..ProptestConfig::default() })]

    #[test]
    fn the_gate_breaks_no_rule_and_everything_ends(
        total in 1_usize..60,
        capacity in 1_u32..24,
        choices in proptest::collection::vec(any::<u16>(), 0..1500),
    ) {
        run(total, capacity, Choices::new(choices));
    }
}

/// The property above proves nothing if its runs stay in the harmless part of the space.
#[test]
fn the_property_takes_the_rare_paths() {
    let mut seen = Marks::default();
    let mut state = 1_u64;
    for _ in 0..300 {
        let choices = std::iter::repeat_with(|| {
            state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(99);
            (state >> 33) as u16
        });
        let run = run(50, 16, Choices::new(choices.take(4000).collect()));
        seen.held = seen.held.max(run.held);
        seen.waited = seen.waited.max(run.waited);
        seen.joined = seen.joined.max(run.joined);
        seen.late_flush += run.late_flush;
        seen.retracted += run.retracted;
        seen.refused += run.refused;
    }
    let Marks { held, waited, joined, .. } = seen;
    assert!(held >= 3 && waited >= 3 && joined >= 2, "{seen:?}");
    assert!(seen.late_flush > 50 && seen.retracted > 20 && seen.refused > 100, "{seen:?}");
}

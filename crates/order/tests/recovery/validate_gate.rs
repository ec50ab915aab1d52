//! An entry that is taken for durable really is durable, and an entry that was answered as durable
//! is taken for it: with the real gate over modelled drives, through crashes of the target and
//! replays (T4, P2, P7).

use std::collections::{BTreeMap, BTreeSet};

use proptest::prelude::*;
use riopipe_order::attribute::{Attribute, Flags, Kind, Member};
use riopipe_order::entry::{Origin, Position};
use riopipe_order::gate::{MemberCache, Step, Ticket};
use riopipe_order::ordering_log::LoggedEntry;
use riopipe_order::recovery::validate;

use crate::common::Choices;
use crate::common::table_gate::TableGate;
use crate::{flush, write_at};

/// A target with its log and drives. Entries are known by their seq.
struct World {
    /// Which drives are volatile. That may change while the target is down (T27).
    volatile: [bool; 3],
    gate: TableGate,
    tickets: BTreeMap<u32, Attribute>,
    /// The log, in order of position: each attribute, and whether it is persisted.
    log: Vec<(Attribute, bool)>,
    writing: Vec<u32>,
    /// FLUSHes in flight, with the writes that had completed there when they were submitted.
    flushing: Vec<(u32, BTreeSet<u64>)>,
    /// Writes that have completed in this incarnation.
    written: BTreeSet<u64>,
    /// Writes that no power cut can destroy any more.
    safe: BTreeSet<u64>,
    /// Writes whose persist word waits for a fence. After it they are answered.
    unfenced: Vec<u64>,
    answered: BTreeSet<u64>,
    /// Durable by a list that the owner has read. The owner counts them as done.
    listed: BTreeSet<u64>,
    failed: bool,
    replayed: usize,
    covered: usize,
}

fn gate(volatile: [bool; 3]) -> TableGate {
    let member = |n: u8| MemberCache { member: Member(n), volatile: volatile[usize::from(n)] };
    TableGate::new(&[0, 1, 2].map(member), 64)
}

impl World {
    fn new() -> Self {
        let volatile = [true, false, false];
        Self {
            volatile,
            gate: gate(volatile),
            tickets: BTreeMap::new(),
            log: Vec::new(),
            writing: Vec::new(),
            flushing: Vec::new(),
            written: BTreeSet::new(),
            safe: BTreeSet::new(),
            unfenced: Vec::new(),
            answered: BTreeSet::new(),
            listed: BTreeSet::new(),
            failed: false,
            replayed: 0,
            covered: 0,
        }
    }

    fn arrive(&mut self, attribute: Attribute) {
        let ticket = (0..64).find(|ticket| !self.tickets.contains_key(ticket)).unwrap();
        self.tickets.insert(ticket, attribute);
        let mut steps = Vec::new();
        self.gate.arrive(Ticket(ticket), &attribute, &mut steps).unwrap();
        self.carry_out(steps);
    }

    fn carry_out(&mut self, steps: Vec<Step>) {
        for step in steps {
            match step {
                Step::Append(ticket) => {
                    let attribute = self.tickets[&ticket.0];
                    let there = |(a, _): &(Attribute, bool)| a.seq == attribute.seq;
                    // Adopted if it is there already.
                    if !self.log.iter().any(there) {
                        self.log.push((attribute, false));
                    }
                }
                Step::Write(ticket) => self.writing.push(ticket.0),
                Step::Flush(ticket) => {
                    let member = self.tickets[&ticket.0].member;
                    let here = self.log.iter().map(|(a, _)| a).filter(|a| a.member == member);
                    let completed = here.map(|a| a.seq.0).filter(|seq| self.written.contains(seq));
                    self.flushing.push((ticket.0, completed.collect()));
                }
                Step::Complete { ticket, persist } => {
                    let attribute = self.tickets.remove(&ticket.0).unwrap();
                    let seq = attribute.seq;
                    if persist {
                        self.log.iter_mut().find(|(a, _)| a.seq == seq).unwrap().1 = true;
                        self.unfenced.push(seq.0);
                    }
                }
                Step::Refuse { ticket, .. } => {
                    self.tickets.remove(&ticket.0);
                }
            }
        }
    }

    /// A drive finishes something.
    fn finish(&mut self, choices: &mut Choices) {
        // Operations that finish together share a fence.
        if choices.below(3) > 0 {
            self.answered.extend(self.unfenced.drain(..));
        }
        let count = self.writing.len() + self.flushing.len();
        if count == 0 {
            return;
        }
        let at = choices.below(count);
        let ok = choices.below(200) < 199;
        self.failed |= !ok;
        let mut steps = Vec::new();
        if at < self.writing.len() {
            let ticket = self.writing.remove(at);
            let Attribute { seq, member, .. } = self.tickets[&ticket];
            if ok {
                self.written.insert(seq.0);
                if !self.volatile[usize::from(member.0)] {
                    self.safe.insert(seq.0);
                }
            }
            self.gate.written(Ticket(ticket), ok, &mut steps);
        } else {
            let (ticket, completed) = self.flushing.remove(at - self.writing.len());
            if ok {
                self.safe.extend(completed);
            }
            self.gate.flushed(Ticket(ticket), ok, &mut steps);
        }
        self.carry_out(steps);
    }

    /// The entries that recovery takes for durable.
    fn durable(&mut self) -> BTreeSet<u64> {
        let entry = |(at, &(attribute, persisted)): (usize, &(Attribute, bool))| LoggedEntry {
            position: Position(at as u64),
            attribute,
            origin: Origin { generation: 1, incarnation: 1 },
            persisted,
        };
        let entries: Vec<LoggedEntry> = self.log.iter().enumerate().map(entry).collect();
        let found = entries.iter().zip(validate(&entries));
        self.covered +=
            found.clone().filter(|(entry, durable)| *durable && !entry.persisted).count();
        found.filter(|(_, durable)| *durable).map(|(entry, _)| entry.attribute.seq.0).collect()
    }

    /// The target dies at this instant and comes back, perhaps with drives that have gained or lost
    /// their protection. Persist words that were not answered yet may be lost, except those that
    /// were read: a log is written back before that.
    fn crash(&mut self, choices: &mut Choices) {
        for (attribute, persisted) in &mut self.log {
            let answered = self.answered.contains(&attribute.seq.0);
            *persisted &= answered || choices.below(2) == 0;
        }
        for volatile in &mut self.volatile {
            *volatile ^= choices.below(3) == 0;
        }
        self.unfenced.clear();
        self.gate = gate(self.volatile);
        self.tickets.clear();
        self.writing.clear();
        self.flushing.clear();
        self.written.clear();
    }
}

/// The next entry of the stream.
fn next(sent: &[Attribute], ordinal: u32, choices: &mut Choices) -> Attribute {
    let seq = sent.len() as u64 + 1;
    let member = choices.below(3) as u8;
    let (lba, blocks) = (choices.below(4) as u64, 1 + choices.below(2) as u32);
    let mut a = match choices.below(5) {
        0 => flush(seq, member),
        _ => write_at(seq, member, lba, blocks),
    };
    if choices.below(6) == 0 {
        a.flags = a.flags.with(Flags::FLUSH);
    }
    Attribute { ordinal, ..a }
}

fn check(world: &mut World, sent: &[Attribute]) -> Result<BTreeSet<u64>, TestCaseError> {
    let durable = world.durable();
    for a in sent {
        let (seq, is) = (a.seq.0, durable.contains(&a.seq.0));
        if a.kind != Kind::Flush {
            prop_assert!(!is || world.safe.contains(&seq), "{seq} may be lost");
        }
        prop_assert!(is || !world.listed.contains(&seq), "{seq} was listed as durable");
        if world.answered.contains(&seq) {
            prop_assert!(is, "{seq} was answered as durable");
            let before = |b: &&Attribute| b.member == a.member && b.seq < a.seq;
            for b in sent.iter().filter(before).filter(|_| a.is_flush()) {
                prop_assert!(durable.contains(&b.seq.0), "{seq} covers {}", b.seq);
            }
        }
    }
    Ok(durable)
}

fn run(bytes: Vec<u16>) -> Result<(usize, usize), TestCaseError> {
    let mut choices = Choices::new(bytes);
    let mut world = World::new();
    let mut sent: Vec<Attribute> = Vec::new();
    let mut ordinal = 0;
    for _incarnation in 0..3 {
        for _ in 0..50 {
            match choices.below(40) {
                0 => break,
                1..=12 if sent.len() < 40 && !world.failed && world.tickets.len() < 60 => {
                    ordinal += 1;
                    let a = next(&sent, ordinal, &mut choices);
                    sent.push(a);
                    world.arrive(a);
                }
                _ => world.finish(&mut choices),
            }
        }
        // The last append may not have been fenced, so that nothing was submitted for it. It may be
        // there and may be torn.
        for _ in 0..choices.below(3) {
            ordinal += 1;
            let a = next(&sent, ordinal, &mut choices);
            sent.push(a);
            if choices.below(2) == 0 {
                world.log.push((a, false));
            }
        }
        world.crash(&mut choices);
        let durable = check(&mut world, &sent)?;
        if world.failed {
            break;
        }
        world.listed.extend(&durable);
        let read = world.log.iter().filter(|(_, persisted)| *persisted);
        world.answered.extend(read.map(|(a, _)| a.seq.0));
        // The owner comes back: everything that is not durable, in order, before anything new.
        ordinal = 0;
        for a in sent.iter().filter(|a| !durable.contains(&a.seq.0)) {
            ordinal += 1;
            world.replayed += 1;
            world.arrive(Attribute { ordinal, ..*a });
        }
    }
    check(&mut world, &sent)?;
    Ok((world.replayed, world.covered))
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 10_000, ..ProptestConfig::default() })]

    #[test]
    fn t4_durable_is_durable(bytes in prop::collection::vec(any::<u16>(), 0..700)) {
        run(bytes)?;
    }
}

#[test]
fn the_cases_have_replays_and_covered_entries_in_them() {
    let mut random: u64 = 1;
    let mut next = || {
        random = random.wrapping_mul(0x5851_f42d_4c95_7f2d).wrapping_add(1);
        (random >> 40) as u16
    };
    let (mut replayed, mut covered) = (0, 0);
    for _ in 0..100 {
        let found = run((0..700).map(|_| next()).collect()).unwrap();
        (replayed, covered) = (replayed + found.0, covered + found.1);
    }
    assert!(replayed > 500 && covered > 200, "{replayed} replayed, {covered} covered");
}

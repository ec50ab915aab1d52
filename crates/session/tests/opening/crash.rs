//! Recovery cut off at every step, and again in the recovery after that (T9).

use std::collections::{BTreeMap, BTreeSet};

use riopipe_order::attribute::{Attribute, Flags, GroupTag, Kind, Seq, StreamId};
use riopipe_session::initiator::opening::{Mode, Outcome, Phase};
use riopipe_session::wire;

use crate::world::{
    Driver, Past, Random, START, World, entry, extending, in_place, server_of, sqe_of,
};

/// A world after a crash, and the result that recovery must reach.
struct Case {
    world: World,
    history: Vec<Past>,
    /// By stream: the prefix and its tag.
    prefixes: Vec<(Seq, u64)>,
    /// Blocks that are to be zeroed.
    zeroed: BTreeSet<(u8, u64)>,
    /// The other contents that a block may have in the end, by in-place updates beyond the prefix.
    may_hold: BTreeMap<(u8, u64), BTreeSet<u32>>,
    /// In-place updates beyond the prefix.
    listed: BTreeSet<(u16, Seq, u8, u64, u32)>,
}

fn blocks_of(a: &Attribute) -> impl Iterator<Item = (u8, u64)> + use<> {
    let member = a.member.0;
    (a.lba..a.lba + u64::from(a.blocks)).map(move |lba| (member, lba))
}

/// How far the stream's groups are whole and durable, counting one after the other.
fn prefix(history: &[Past], stream: u16) -> Seq {
    let mut k = Seq::ZERO;
    loop {
        let next = k.next();
        let covers = |p: &&Past| {
            p.stream == stream && p.attribute.seq <= next && next <= p.attribute.seq_end()
        };
        let Some(one) = history.iter().find(covers) else { return k };
        let there =
            |index| history.iter().filter(covers).any(|p| p.attribute.index == index && p.durable);
        if !(0..one.attribute.num).all(there) {
            return k;
        }
        k = next;
    }
}

impl Case {
    /// `marks` is the released mark of each stream that each server (first) knows: no more than its
    /// prefix.
    fn new(servers: usize, streams: u16, history: Vec<Past>, random: &mut Random) -> Self {
        let caches = random.below(1 << (2 * servers));
        let mut world =
            World::new(servers, usize::from(streams), |member| caches >> member & 1 == 1);
        world.play(&history, random);
        let mut case = Self {
            world,
            history,
            prefixes: Vec::new(),
            zeroed: BTreeSet::new(),
            may_hold: BTreeMap::new(),
            listed: BTreeSet::new(),
        };
        for stream in 0..streams {
            let k = prefix(&case.history, stream);
            let beyond = |p: &&Past| p.stream == stream && p.attribute.seq > k;
            for past in case.history.iter().filter(beyond) {
                let a = &past.attribute;
                if a.flags.has(Flags::IN_PLACE) {
                    case.listed.insert((stream, a.seq, a.member.0, a.lba, a.blocks));
                } else if !a.flags.has(Flags::EXTEND) {
                    case.zeroed.extend(blocks_of(a));
                }
            }
            for server in 0..servers {
                case.mark(stream, server, Seq(random.below(k.0 as usize + 1) as u64));
            }
            case.prefixes.push((k, if k == Seq::ZERO { 0 } else { !k.0 }));
        }
        for (at, past) in case.history.iter().enumerate() {
            if past.attribute.seq > case.prefixes[usize::from(past.stream)].0 {
                for block in blocks_of(&past.attribute) {
                    case.may_hold.entry(block).or_default().insert(1 + at as u32);
                }
            }
        }
        case
    }

    /// A server knows that a stream is released up to `mark`, and has dropped the entries up to
    /// there.
    fn mark(&mut self, stream: u16, server: usize, mark: Seq) {
        // A merged request is released as a whole.
        let inside = |a: &Attribute| a.seq <= mark && mark < a.seq_end();
        let all = || self.history.iter().filter(|p| p.stream == stream).map(|p| p.attribute);
        let mark = all().find(inside).map_or(mark, |a| a.seq_end());
        let here = all().filter(|a| server_of(a.member.0) == server && a.seq_end() <= mark);
        let newest = here.max_by_key(|a| a.seq_end());
        let partition = &mut self.world.targets[server].partitions[usize::from(stream)];
        partition.released = mark;
        partition.entries.retain(|e| e.attribute.seq_end() > partition.released);
        partition.newest_tag = newest.map_or(GroupTag::NONE, |a| GroupTag::of_last_group(&a));
    }

    /// Checks that a log is settled only when everything is undone, durably, on all servers (T9).
    fn check_settle(&self, world: &World) {
        for &(member, lba) in &self.zeroed {
            let content = world.drive(member).medium.get(&lba).copied().unwrap_or(0);
            assert_eq!(content, 0, "member {member} block {lba} is not durably undone");
        }
    }

    fn check_end(&self, world: &World, outcome: &Outcome) {
        for (at, (k, tag)) in self.prefixes.iter().enumerate() {
            let found = &outcome.streams[at].plan;
            assert_eq!((found.k, found.tag), (*k, *tag), "stream {at}");
            assert_eq!(found.stream, StreamId(at as u16));
        }
        let listed: BTreeSet<_> = outcome
            .streams
            .iter()
            .flat_map(|stream| stream.plan.in_place.iter().map(|one| (stream.plan.stream, one)))
            .map(|(stream, one)| {
                let blocks = one.extent.blocks as u32;
                (stream.0, one.seq, one.extent.member.0, one.extent.lba, blocks)
            })
            .collect();
        assert_eq!(listed, self.listed);
        for target in &world.targets {
            for (partition, stream) in target.partitions.iter().zip(&outcome.streams) {
                assert!(partition.settled || partition.entries.is_empty() && partition.torn == 0);
                assert!(stream.pending || partition.entries.is_empty());
                let k = stream.plan.k;
                assert!(partition.released <= k && (!partition.settled || partition.released == k));
            }
        }
        let mut later = world.clone();
        let mut random = Random(9);
        (0..later.targets.len()).for_each(|server| later.power_cut(server, &mut random));
        for member in 0..2 * world.targets.len() as u8 {
            for lba in START..START + 80 {
                let (is, before) = (world.drive(member).reads(lba), self.before(member, lba));
                let what = format!("member {member} block {lba}");
                assert_eq!(is, later.drive(member).reads(lba), "{what} is not durable");
                if self.zeroed.contains(&(member, lba)) {
                    assert_eq!(is, 0, "{what}");
                } else {
                    let others = self.may_hold.get(&(member, lba));
                    let may = is == before || others.is_some_and(|others| others.contains(&is));
                    assert!(may, "{what} holds {is:#x}");
                }
            }
        }
    }

    /// The content of a block on the medium at the crash.
    fn before(&self, member: u8, lba: u64) -> u32 {
        self.world.drive(member).medium.get(&lba).copied().unwrap_or(0)
    }

    /// Opens, and cuts everything off at the `cut`th command. That command is still carried out,
    /// and so may be others in flight. Then the targets in `power` lose their power. Returns the
    /// outcome if the opening ended before.
    fn run(&self, world: &mut World, initiator: u32, cut: usize, power: usize) -> Option<Outcome> {
        let mode = Mode::Open(world.intent());
        let mut driver = Driver::new(world, initiator, mode);
        let mut settles = 0;
        while driver.calls < cut {
            let last = driver.calls + 1 == cut;
            if !driver.step(world, last).unwrap() {
                let outcome = driver.opening.into_outcome();
                self.check_end(world, &outcome);
                return Some(outcome);
            }
            let now = driver
                .log
                .iter()
                .filter(|(_, call)| sqe_of(call).opcode() == wire::ADMIN_SETTLE)
                .count();
            if now > settles {
                settles = now;
                self.check_settle(world);
            }
        }
        driver.lose(world);
        world.initiators_die();
        let mut random = Random(cut as u64 * 31 + u64::from(initiator));
        for server in (0..world.targets.len()).filter(|server| power >> server & 1 == 1) {
            world.power_cut(server, &mut random);
        }
        None
    }
}

const END: usize = usize::MAX;

/// Two servers, two streams: holes on either side, a group over both servers, a merged request,
/// in-place updates, one of them on a block that a fresh write beyond the prefix touched, too.
fn small(seed: u64) -> Case {
    let past = |stream, attribute, durable| Past { stream, attribute, durable };
    let part = |seq, index, member, lba| Attribute { num: 2, index, ..entry(seq, member, lba, 1) };
    let merged = Attribute { span: 2, tag: !6, ..entry(5, 2, 10, 2) };
    let history = vec![
        past(0, entry(1, 0, 1, 1), true),
        past(0, part(2, 0, 1, 2), true),
        past(0, part(2, 1, 2, 3), true),
        past(0, part(3, 0, 0, 4), true),
        // The other half never arrived.
        past(0, in_place(entry(4, 3, 5, 1)), true),
        past(0, merged, true),
        past(0, in_place(entry(7, 2, 11, 1)), false),
        past(1, entry(1, 1, 40, 2), true),
        past(1, in_place(entry(2, 3, 41, 1)), true),
        past(1, entry(3, 0, 42, 1), false),
        past(1, entry(4, 2, 43, 1), true),
    ];
    Case::new(2, 2, history, &mut Random(seed))
}

#[test]
fn t9_cut_off_at_every_command_and_again_at_every_command() {
    let mut cuts = 0;
    for seed in 0..6 {
        let case = small(seed);
        let mut world = case.world.clone();
        let outcome = case.run(&mut world, 1, END, 0).unwrap();
        assert!(outcome.needed && outcome.streams[0].pending && !outcome.streams[1].pending);
        for first in 1.. {
            let power = first + seed as usize;
            let mut world = case.world.clone();
            if case.run(&mut world, 1, first, power).is_some() {
                break;
            }
            for second in 1.. {
                let mut world = world.clone();
                if case.run(&mut world, 2, second, power / 4 + second).is_some() {
                    break;
                }
                case.run(&mut world, 3, END, 0).unwrap();
                cuts += 1;
            }
        }
    }
    assert!(cuts > 1500, "{cuts} recoveries were cut off twice");
}

/// A crash in the middle of anything.
fn random_case(seed: u64) -> Case {
    let mut random = Random(seed);
    let (servers, streams) = (1 + random.below(3), 1 + random.below(3) as u16);
    let mut history = Vec::new();
    for stream in 0..streams {
        let mut seq = 1;
        // Each stream has its own blocks (T15).
        let area = u64::from(stream) * 20;
        while random.below(9) > 0 {
            let span = if random.below(5) == 0 { 1 + random.below(3) as u64 } else { 1 };
            let num = if span > 1 { 1 } else { 1 + random.below(3) as u16 };
            for index in 0..num {
                let member = random.below(2 * servers) as u8;
                let blocks = 1 + random.below(3) as u32;
                let lba = area + random.below(17) as u64;
                let mut a = entry(seq, member, lba, blocks);
                match random.below(8) {
                    0 => a.kind = Kind::Discard,
                    1 | 2 => a = in_place(a),
                    3 => a = Attribute { kind: Kind::Flush, lba: 0, blocks: 0, ..a },
                    4 => a = extending(a),
                    _ => {}
                }
                let tag = !(seq + span - 1);
                let attribute = Attribute { span: span as u16, num, index, tag, ..a };
                // A drive cannot hold a durable write over one that is not durable: the later one
                // had waited for the earlier one (T12).
                let durable = random.below(6) > 0;
                if random.below(9) > 0 {
                    history.push(Past { stream, attribute, durable });
                }
                if random.below(9) == 0 {
                    let again = Attribute { ordinal: 9, ..attribute };
                    history.push(Past { stream, attribute: again, durable });
                }
            }
            seq += span;
        }
    }
    Case::new(servers, streams, history, &mut random)
}

#[test]
fn t9_cut_off_anywhere_as_often_as_it_likes() {
    let (mut cut, mut needed, mut pending) = (0, 0, 0);
    for seed in 0..1200 {
        let case = random_case(seed);
        let mut random = Random(seed ^ 0x5555);
        let mut world = case.world.clone();
        for initiator in 1..=4 {
            let at = 1 + random.below(25);
            let power = random.below(8);
            if case.run(&mut world, initiator, at, power).is_some() {
                world.initiators_die();
            } else {
                cut += 1;
            }
        }
        // A dry run reports exactly the result that an opening then finds, and it changes nothing.
        let before = world.clone();
        let mode = Mode::DryRun(world.intent());
        let dry = Driver::new(&world, 90, mode).run(&mut world).unwrap();
        assert_eq!(world, before);
        let outcome = case.run(&mut world, 5, END, 0).unwrap();
        for (dry, real) in dry.streams.iter().zip(&outcome.streams) {
            assert_eq!(dry, real);
        }
        needed += usize::from(outcome.needed);
        pending += usize::from(outcome.streams.iter().any(|s| s.pending));
        // Once more: nothing is left but in-place updates to be acknowledged.
        world.initiators_die();
        let again = case.run(&mut world, 6, END, 0).unwrap();
        assert!(!again.needed);
        assert_eq!(again.counts.undos + again.counts.settles, 0);
    }
    assert!(cut > 2500 && needed > 300 && pending > 500, "{cut} {needed} {pending}");
}

#[test]
fn t9_streams_restart_only_when_all_servers_have_settled_all() {
    let case = small(1);
    let mut world = case.world.clone();
    let mode = Mode::Open(world.intent());
    let mut driver = Driver::new(&world, 1, mode);
    while driver.opening.phase() != Phase::Over {
        let open = world.targets.iter().any(|t| t.partitions.iter().any(|p| !p.settled));
        assert!(open, "not over before all are settled, and then at once");
        driver.step(&mut world, false).unwrap();
    }
}

//! Logs that are given up: nothing is undone on any target. The blocks in doubt are listed until
//! they are acknowledged, wherever the recovery is cut off (T26).

use riopipe_nvme::command::opcode;
use riopipe_order::attribute::{Attribute, Member, Seq};
use riopipe_order::recovery::ADVICE;
use riopipe_session::claim::{ClaimError, Intent};
use riopipe_session::initiator::opening::{Mode, OpeningError, Outcome};

use crate::world::{
    BLOCKS, Driver, Partition, Past, Random, START, World, entry, extending, in_place, open,
    sqe_of, streams,
};

fn accept(world: &World) -> Mode {
    Mode::Open(Intent { accept_lost_log: true, ..world.intent() })
}

fn past(stream: u16, attribute: Attribute, durable: bool) -> Past {
    Past { stream, attribute, durable }
}

/// Two servers and streams; of stream 0, group 1 was on server 1, and all up to group 3 are durable.
fn history() -> Vec<Past> {
    vec![
        past(0, entry(1, 2, 5, 1), true),
        past(0, entry(2, 0, 6, 1), true),
        past(0, in_place(entry(3, 0, 7, 1)), true),
        past(0, entry(4, 1, 8, 2), false),
        past(0, extending(entry(6, 1, 9, 1)), false),
        past(1, entry(1, 0, 20, 1), true),
        past(1, entry(3, 1, 21, 1), true),
    ]
}

fn crashed() -> World {
    crashed_with(None)
}

fn crashed_with(more: Option<Past>) -> World {
    let mut world = World::new(2, 2, |member| member % 2 == 1);
    let history: Vec<Past> = history().into_iter().chain(more).collect();
    world.play(&history, &mut Random(5));
    world
}

/// Server 1's log is gone.
fn lost(world: &mut World) {
    world.targets[1].known = false;
    world.targets[1].generation = 0;
    world.targets[1].partitions.clear();
}

/// The durable blocks are there, and nothing was zeroed.
fn check_left(world: &World, was: &World) {
    for member in 0..4 {
        let (is, was) = (world.drive(member), was.drive(member));
        for lba in START..START + 64 {
            let may = [was.reads(lba), was.medium.get(&lba).copied().unwrap_or(0)];
            assert!(may.contains(&is.reads(lba)), "member {member}, block {lba}");
        }
    }
}

/// The listed groups of each stream: fresh writes and extensions in doubt, and in-place updates.
fn listed(outcome: &Outcome) -> Vec<(Seq, Vec<u64>, Vec<u64>, bool)> {
    let of = |stream: &riopipe_session::initiator::opening::StreamOutcome| {
        let plan = &stream.plan;
        assert!(plan.undo.is_empty() && plan.log_given_up);
        let groups =
            |list: &[riopipe_order::recovery::InPlace]| list.iter().map(|i| i.seq.0).collect();
        (plan.k, groups(&plan.in_doubt), groups(&plan.in_place), stream.pending)
    };
    outcome.streams.iter().map(of).collect()
}

/// The blocks that the history leaves without server 1's log.
fn expected() -> Vec<(Seq, Vec<u64>, Vec<u64>, bool)> {
    vec![(Seq(0), vec![2, 4, 6], vec![3], true), (Seq(1), vec![3], vec![], true)]
}

#[test]
fn t26_cut_off_at_every_command_and_again_at_every_command() {
    for first in 0..40 {
        for second in 0..40 {
            let mut world = crashed();
            let was = world.clone();
            lost(&mut world);
            let mut random = Random(first * 40 + second);
            let mut ended = false;
            for cut in [first, second] {
                // The next initiator gives the log up only where it is still refused.
                let mode = match world.targets[1].known {
                    true => Mode::Open(world.intent()),
                    false => accept(&world),
                };
                let mut driver = Driver::new(&world, 1 + cut as u32, mode);
                for _ in 0..cut {
                    ended = !driver.step(&mut world, false).unwrap();
                    if ended {
                        break;
                    }
                }
                driver.lose(&mut world);
                world.initiators_die();
                world.power_cut(random.below(2), &mut random);
            }
            let mode = match world.targets[1].known {
                true => Mode::Open(world.intent()),
                false => accept(&world),
            };
            let outcome = Driver::new(&world, 90, mode).run(&mut world).unwrap();
            assert_eq!(listed(&outcome), expected(), "cut off after {first} and {second}");
            check_left(&world, &was);
            if ended && first == second {
                return;
            }
        }
    }
}

#[test]
fn t26_the_list_stays_until_acknowledged_and_a_started_stream_is_as_any_other() {
    let mut world = crashed();
    lost(&mut world);
    let mode = accept(&world);
    let mut driver = Driver::new(&world, 1, mode);
    driver.go(&mut world).unwrap();
    let generation = driver.opening.generation();
    // Stream 1 goes on; no initiator has read the list of stream 0.
    let mode = Mode::Acknowledge { generation, streams: streams(&[1]) };
    Driver::new(&world, 1, mode).run(&mut world).unwrap();
    for target in &mut world.targets {
        let started = Partition { released: Seq(1), generation, ..Partition::default() };
        target.partitions[1] = started;
    }
    world.play(&[past(1, entry(3, 0, 30, 1), true)], &mut Random(1));
    world.initiators_die();
    let outcome = open(&mut world, 2).unwrap();
    assert!(outcome.streams[0].pending && outcome.streams[0].plan.log_given_up);
    assert_eq!(outcome.streams[0].plan.in_doubt.len(), 3);
    let plan = &outcome.streams[1].plan;
    assert_eq!((plan.k, plan.undone_blocks(), plan.log_given_up), (Seq(1), 1, false));
    assert_eq!(world.drive(0).reads(START + 30), 0, "undone as ever");
}

#[test]
fn t26_damaged_partitions_are_given_up_also_several_at_once() {
    let mut world = crashed();
    let was = world.clone();
    world.targets[1].partitions.iter_mut().for_each(|partition| partition.damaged = true);
    world.targets[0].partitions[1].damaged = true;
    let error = open(&mut world, 1).unwrap_err();
    assert_eq!(error, OpeningError::Claim(ClaimError::LogDamaged { target: 0 }));
    assert!(error.to_string().contains("accept_lost_log"), "{error}");
    let mode = accept(&world);
    let outcome = Driver::new(&world, 1, mode).run(&mut world).unwrap();
    let expected = vec![(Seq(0), vec![2, 4, 6], vec![3], true), (Seq(0), vec![], vec![], false)];
    assert_eq!(listed(&outcome), expected);
    check_left(&world, &was);
}

/// Opens such a world: first it is refused with advice, then the logs are given up.
fn refused_then_given_up(mut world: World, why: &str) -> (World, Outcome) {
    let was = world.clone();
    let error = open(&mut world, 1).unwrap_err();
    let text = error.to_string();
    assert!(text.contains(why) && text.contains(ADVICE), "{text}");
    world.initiators_die();
    let mode = accept(&world);
    let mut driver = Driver::new(&world, 2, mode);
    driver.go(&mut world).unwrap();
    let zeroed = |(_, call): &(usize, _)| sqe_of(call).opcode() == opcode::WRITE_ZEROES;
    assert!(!driver.log.iter().any(zeroed));
    check_left(&world, &was);
    let generation = driver.opening.generation();
    assert!(world.targets.iter().all(|t| t.given_up == generation), "noted in every log");
    (world, driver.opening.into_outcome())
}

#[test]
fn t26_logs_that_contradict_each_other_can_be_given_up() {
    // Group 2 with two entries that can't both be true.
    let two = Attribute { num: 3, index: 1, ..entry(2, 3, 9, 1) };
    let world = crashed_with(Some(past(0, two, true)));
    let (_, outcome) = refused_then_given_up(world, "contradict each other about group 2");
    let plan = &outcome.streams[0].plan;
    assert_eq!((plan.k, plan.in_doubt.len(), plan.in_place.len()), (Seq(0), 5, 1));
}

#[test]
fn t26_logs_that_were_settled_at_two_groups_can_be_given_up() {
    let mut world = crashed();
    for (target, k) in world.targets.iter_mut().zip([1, 2]) {
        let partition = &mut target.partitions[0];
        (partition.settled, partition.released) = (true, Seq(k));
        partition.entries.retain(|e| e.attribute.seq > Seq(k));
    }
    let why = "was settled at group 1 on one target";
    let (mut world, outcome) = refused_then_given_up(world, why);
    assert_eq!(outcome.streams[0].plan.k, Seq(2), "the largest mark counts");
    let generation = world.targets[0].generation;
    let mode = Mode::Acknowledge { generation, streams: streams(&[0]) };
    Driver::new(&world, 2, mode).run(&mut world).unwrap();
    assert!(world.targets.iter().all(|t| t.partitions[0].released == Seq(2)));
}

#[test]
fn t26_entries_that_belong_nowhere_can_be_given_up() {
    let outside = entry(5, 0, BLOCKS, 1);
    let world = crashed_with(Some(past(0, outside, false)));
    let (_, outcome) = refused_then_given_up(world, "outside its data area");
    let lists = |e: &riopipe_order::recovery::InPlace| e.seq == Seq(5);
    assert!(!outcome.streams[0].plan.in_doubt.iter().any(lists), "no block of the volume");
    let mut world = crashed();
    let mut entry = world.targets[0].partitions[0].entries[0];
    entry.attribute.member = Member(3);
    world.targets[0].partitions[0].entries[0] = entry;
    let _ = refused_then_given_up(world, "which is not on that target");
}

#[test]
fn t26_a_dry_run_reports_what_giving_up_would_do() {
    let mut world = crashed();
    lost(&mut world);
    let before = world.clone();
    let dry = Mode::DryRun(Intent { accept_lost_log: true, ..world.intent() });
    let outcome = Driver::new(&world, 1, dry).run(&mut world).unwrap();
    assert_eq!((listed(&outcome), &world), (expected(), &before));
}

/// An older copy of server 1's log was put back, from the time of an earlier owner.
fn older() -> (World, World) {
    let mut world = crashed();
    let was = world.clone();
    world.targets[1].generation = 1;
    (world, was)
}

#[test]
fn t26_an_older_log_is_given_up_and_nothing_is_undone() {
    let (mut world, was) = older();
    let error = open(&mut world, 1).unwrap_err();
    let behind = ClaimError::LogBehind { target: 1, have: 1, label: 2 };
    assert_eq!(error, OpeningError::Claim(behind));
    let text = error.to_string();
    assert!(text.contains("accept_lost_log") && !text.contains("new log"), "{text}");
    let dry = Mode::DryRun(Intent { accept_lost_log: true, ..world.intent() });
    let before = world.clone();
    let reported = Driver::new(&world, 1, dry).run(&mut world).unwrap();
    assert_eq!(world, before);
    let mode = accept(&world);
    let mut driver = Driver::new(&world, 1, mode);
    driver.go(&mut world).unwrap();
    let generation = driver.opening.generation();
    let outcome = driver.opening.into_outcome();
    // Group 1 of stream 0, which only the older log has, is not counted: it may be a group of
    // another history with the same number.
    let expected = vec![(Seq(0), vec![1, 2, 4, 6], vec![3], true), (Seq(1), vec![3], vec![], true)];
    assert_eq!((listed(&reported), listed(&outcome)), (expected.clone(), expected));
    check_left(&world, &was);
    // Recorded in the older log: no initiator accepts it as a good one from now on, without another
    // error.
    assert_eq!(world.targets[1].given_up, generation);
    world.initiators_die();
    let outcome = open(&mut world, 2).unwrap();
    assert!(outcome.streams.iter().all(|stream| stream.plan.undo.is_empty()));
}

#[test]
fn t26_an_older_log_is_given_up_wherever_it_is_cut_off() {
    for cut in 0..40 {
        let (mut world, was) = older();
        let mode = accept(&world);
        let mut driver = Driver::new(&world, 1, mode);
        let mut ended = false;
        for _ in 0..cut {
            ended = !driver.step(&mut world, false).unwrap();
            if ended {
                break;
            }
        }
        driver.lose(&mut world);
        world.initiators_die();
        world.power_cut(0, &mut Random(cut));
        // Only as long as it is refused an initiator has to give it up again.
        let mode = match open(&mut world.clone(), 2) {
            Err(OpeningError::Claim(ClaimError::LogBehind { .. })) => accept(&world),
            other => other.map(|_| Mode::Open(world.intent())).unwrap(),
        };
        let outcome = Driver::new(&world, 2, mode).run(&mut world).unwrap();
        assert!(outcome.streams.iter().all(|stream| stream.plan.undo.is_empty()), "{cut}");
        check_left(&world, &was);
        if ended {
            return;
        }
    }
}

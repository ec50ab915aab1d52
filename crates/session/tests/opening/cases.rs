//! The commands of an opening, and their order.

use riopipe_nvme::command::opcode;
use riopipe_order::attribute::{GroupTag, Kind, Seq};
use riopipe_session::initiator::opening::{
    ADMIN_COMMANDS_MAX, Call, IO_COMMANDS_MAX, Mode, Phase, Progress, UNDO_BLOCKS_MAX,
};
use riopipe_session::wire;
use riopipe_session::wire::list::Settle;

use crate::world::{Driver, Past, Random, START, World, entry, open, sqe_of};

const ASK: u8 = wire::ADMIN_STATUS;
const CLAIM: u8 = wire::ADMIN_CLAIM;
const LIST: u8 = wire::ADMIN_LIST;
const SETTLE: u8 = wire::ADMIN_SETTLE;

/// Plays `(stream, seq, member, lba, blocks, durable)`.
fn played(mut world: World, history: &[(u16, u64, u8, u64, u32, bool)]) -> World {
    let past = |&(stream, seq, member, lba, blocks, durable): &(u16, u64, u8, u64, u32, bool)| {
        Past { stream, attribute: entry(seq, member, lba, blocks), durable }
    };
    let history: Vec<Past> = history.iter().map(past).collect();
    world.play(&history, &mut Random(3));
    world
}

fn driver(world: &World) -> Driver {
    Driver::new(world, 1, Mode::Open(world.intent()))
}

#[test]
fn a_volume_at_rest_is_asked_taken_and_read_and_nothing_else() {
    let mut world = World::new(2, 1, |_| true);
    world.targets[0].partitions[0].released = Seq(5);
    world.targets[1].partitions[0].released = Seq(7);
    world.targets[1].partitions[0].newest_tag = GroupTag::new(Seq(7), 77);
    let before = world.clone();
    let mut driver = driver(&world);
    driver.go(&mut world).unwrap();
    for server in 0..2 {
        assert_eq!(driver.opcodes(server), [ASK, CLAIM, ASK, LIST]);
        assert_eq!(world.targets[server].drives, before.targets[server].drives);
        assert_eq!(world.targets[server].partitions, before.targets[server].partitions);
    }
    assert_eq!(driver.opening.generation(), 4, "T8: above what is on record");
    assert_eq!(driver.opening.statuses().len(), 2);
    assert!(driver.opening.statuses().iter().all(|(_, status)| status.own));
    let outcome = driver.opening.into_outcome();
    assert!(!outcome.needed && !outcome.streams[0].pending);
    let plan = &outcome.streams[0].plan;
    assert_eq!((plan.k, plan.tag), (Seq(7), 77), "T1: the largest mark, and its tag");
}

#[test]
fn the_phases_are_barriers_across_all_targets() {
    let world = World::new(3, 2, |member| member != 4);
    let mut world = played(world, &[(0, 2, 0, 5, 1, true), (1, 2, 5, 6, 1, false)]);
    let mut driver = driver(&world);
    let mut phases = vec![driver.opening.phase()];
    loop {
        let went_on = driver.step(&mut world, false).unwrap();
        if driver.opening.phase() != phases[phases.len() - 1] {
            phases.push(driver.opening.phase());
        }
        if !went_on {
            break;
        }
    }
    let all = [
        Phase::Ask,
        Phase::Claim,
        Phase::AskAgain,
        Phase::Claimed,
        Phase::List,
        Phase::Decided,
        Phase::Undo,
        Phase::Flush,
        Phase::Settle,
        Phase::Over,
    ];
    assert_eq!(phases, all);
    let opcodes: Vec<u8> = driver.log.iter().map(|(_, call)| sqe_of(call).opcode()).collect();
    let step = |opcode: u8| match opcode {
        CLAIM => 1,
        LIST => 2,
        opcode::WRITE_ZEROES => 3,
        opcode::FLUSH => 4,
        SETTLE => 5,
        _ => 0,
    };
    let steps: Vec<u8> = opcodes.iter().map(|opcode| step(*opcode)).filter(|s| *s > 0).collect();
    assert!(steps.is_sorted(), "T8, T9: each step everywhere before the next: {steps:?}");
    assert_eq!(steps.iter().filter(|step| **step == 4).count(), 5, "every volatile drive");
    let claims = driver.log.iter().filter(|(_, call)| sqe_of(call).opcode() == CLAIM);
    let order: Vec<usize> = claims.map(|(server, _)| *server).collect();
    assert_eq!(order, [0, 1, 2], "T8: in the same order by every initiator");
    let counts = driver.opening.outcome().counts;
    assert_eq!((counts.entries, counts.pages, counts.undos), (2, 6, 2));
    assert_eq!((counts.undone_blocks, counts.flushes, counts.settles), (2, 5, 3));
    assert!(all.iter().all(|phase| !phase.name().is_empty()));
}

#[test]
fn in_a_pause_nothing_is_sent_and_nothing_has_changed() {
    let mut world = played(World::new(2, 1, |_| false), &[(0, 2, 0, 5, 3, true)]);
    let before = world.clone();
    let mut driver = driver(&world);
    for phase in [Phase::Claimed, Phase::Decided] {
        driver.go_to(&mut world, phase);
        assert!(phase.is_pause());
        assert_eq!((driver.opening.next_command(0), driver.opening.next_command(1)), (None, None));
        for (now, then) in world.targets.iter().zip(&before.targets) {
            assert_eq!((&now.drives, &now.partitions), (&then.drives, &then.partitions));
        }
        driver.opening.end_pause().unwrap();
        assert_ne!(driver.opening.phase(), phase);
        let now = driver.opening.phase();
        driver.opening.end_pause().unwrap();
        assert_eq!(driver.opening.phase(), now, "only a pause is ended by that");
    }
    assert_eq!(driver.opening.outcome().streams[0].plan.undone_blocks(), 3);
}

#[test]
fn undo_joins_adjacent_blocks_and_cuts_long_extents() {
    // Two streams side by side, and a far one; on the other drive, next to each other by chance.
    let history = [
        (0, 2, 0, 100, 3000, true),
        (1, 2, 0, 3100, 1500, false),
        (0, 3, 0, 9000, 1, true),
        (1, 3, 1, 3100, 2, true),
        (0, 4, 1, 3101, 3, true),
    ];
    let mut world = played(World::new(1, 2, |_| false), &history);
    let mut driver = driver(&world);
    driver.go(&mut world).unwrap();
    let zeroes: Vec<_> = driver
        .log
        .iter()
        .map(|(_, call)| sqe_of(call))
        .filter(|sqe| sqe.opcode() == opcode::WRITE_ZEROES)
        .map(|sqe| {
            assert!(!sqe.deac(), "T10");
            (sqe.nsid(), sqe.slba() - START, sqe.nlb())
        })
        .collect();
    let most = UNDO_BLOCKS_MAX;
    let mut sorted = zeroes.clone();
    sorted.sort_unstable();
    let second = 100 + u64::from(most);
    let third = second + u64::from(most);
    assert_eq!(
        sorted,
        [
            (10, 100, most),
            (10, second, most),
            (10, third, 4500 - 2 * most),
            (10, 9000, 1),
            (11, 3100, 4)
        ]
    );
    assert_eq!(driver.opening.outcome().counts.undone_blocks, 4505);
}

#[test]
fn no_more_is_in_flight_than_the_queues_take() {
    let one = |i: u16| (i % 40, u64::from(i) + 2, 0, 2 * u64::from(i), 1, true);
    let history: Vec<_> = (0..200).map(one).collect();
    let mut world = played(World::new(2, 40, |_| false), &history);
    let mut driver = driver(&world);
    driver.go_to(&mut world, Phase::Claim);
    assert_eq!(driver.opening.progress().total, 2, "one after another, but that many");
    driver.go_to(&mut world, Phase::Claimed);
    driver.go_to(&mut world, Phase::List);
    let progress = |done| Progress { phase: Phase::List, done, total: 80 };
    assert_eq!(driver.opening.progress(), progress(0));
    driver.step(&mut world, false).unwrap();
    assert_eq!(driver.opening.progress(), progress(1));
    driver.go_to(&mut world, Phase::Undo);
    assert_eq!(driver.most_out, ADMIN_COMMANDS_MAX);
    driver.go_to(&mut world, Phase::Settle);
    assert_eq!(driver.most_out, IO_COMMANDS_MAX);
    assert_eq!(driver.opening.progress().total, 2);
    driver.go(&mut world).unwrap();
}

#[test]
fn long_lists_are_read_page_by_page_one_at_a_time() {
    let one = |i: u16| (i % 3, u64::from(i) + 2, 0, 2 * u64::from(i), 1, true);
    let history: Vec<_> = (0..33).map(one).collect();
    let mut world = played(World::new(1, 3, |_| false), &history);
    // A header and two entries.
    world.transfer = 3 * 64;
    let mut driver = driver(&world);
    driver.go(&mut world).unwrap();
    let pages: Vec<_> = driver
        .log
        .iter()
        .filter(|(_, call)| sqe_of(call).opcode() == LIST)
        .map(|(_, call)| wire::list_request(sqe_of(call)))
        .collect();
    assert_eq!(pages.len(), 18);
    let short = pages.iter().filter(|page| page.len == 2 * 64).count();
    assert!(short == 3 && pages.iter().all(|page| page.len <= 3 * 64), "no more than is left");
    let later = pages.iter().filter(|page| page.from.0 > 0).map(|page| page.stream.0);
    let mut runs: Vec<u16> = later.collect();
    runs.dedup();
    assert_eq!(runs.len(), 3, "one list is read to its end before another goes on: {runs:?}");
    let outcome = driver.opening.into_outcome();
    assert_eq!((outcome.counts.entries, outcome.counts.pages), (33, 18));
    assert!(outcome.streams.iter().all(|stream| stream.plan.found == 11));
}

#[test]
fn a_page_is_never_longer_than_targets_take() {
    let one = |i: u16| (0, u64::from(i) + 2, 0, 2 * u64::from(i), 1, true);
    let history: Vec<_> = (0..3000).map(one).collect();
    let mut world = played(World::new(1, 1, |_| false), &history);
    world.transfer = 1 << 20;
    let outcome = open(&mut world, 1).unwrap();
    assert_eq!((outcome.counts.entries, outcome.counts.pages), (3000, 2));
}

#[test]
fn a_page_is_as_long_as_what_may_be_in_it() {
    let mut world = played(World::new(1, 2, |_| false), &[(0, 2, 0, 5, 1, true)]);
    let mut driver = driver(&world);
    driver.go(&mut world).unwrap();
    let list = driver.log.iter().find(|(_, call)| sqe_of(call).opcode() == LIST).unwrap();
    assert!(matches!(list.1, Call::Admin { receive: 128, .. }), "a header and one entry");
}

#[test]
fn what_is_put_off_is_asked_again() {
    let mut world = played(World::new(2, 1, |_| true), &[(0, 2, 0, 5, 1, true)]);
    let mut driver = driver(&world);
    let mut phase = None;
    let mut waited = 0;
    loop {
        if phase != Some(driver.opening.phase()) {
            phase = Some(driver.opening.phase());
            world.targets[1].busy = 2;
        }
        if !driver.step(&mut world, false).unwrap() {
            break;
        }
        if let Some(put_off) = driver.opening.put_off(1) {
            assert_eq!(put_off.status, wire::status::STREAM_BUSY);
            waited = waited.max(put_off.attempts);
        }
        assert_eq!(driver.opening.put_off(0), None);
    }
    assert_eq!(waited, 2);
    assert_eq!(driver.opening.outcome().counts.put_off, 12, "twice in every phase with commands");
    assert!(world.targets.iter().all(|target| target.partitions[0].settled));
}

#[test]
fn t17_a_target_without_the_extension_takes_no_part() {
    // Nor if its log was given up.
    for logged in [false, true] {
        let mut world = played(World::new(2, 1, |_| false), &[(0, 2, 0, 5, 1, true)]);
        let mut config = world.config();
        config.servers[1].has_extension = false;
        config.servers[1].logged = logged;
        let mut driver = Driver::with(config, 1, Mode::Open(world.intent())).unwrap();
        driver.go(&mut world).unwrap();
        assert_eq!(driver.opcodes(1), []);
        let zeroes = opcode::WRITE_ZEROES;
        assert_eq!(driver.opcodes(0), [ASK, CLAIM, ASK, LIST, zeroes, SETTLE]);
    }
}

#[test]
fn a_volume_without_logs_is_taken_and_that_is_all() {
    let mut world = World::new(2, 2, |_| true);
    for target in &mut world.targets {
        target.partitions.clear();
        target.unlogged = true;
    }
    let mut config = world.config();
    config.servers.iter_mut().for_each(|server| server.logged = false);
    let intent = riopipe_session::claim::Intent { streams: 2, ..world.intent() };
    let mut driver = Driver::with(config.clone(), 1, Mode::Open(intent)).unwrap();
    driver.go(&mut world).unwrap();
    assert_eq!(driver.opcodes(0), [ASK, CLAIM, ASK]);
    assert!(world.targets.iter().all(|target| target.unlogged && target.generation == 4));
    let outcome = driver.opening.into_outcome();
    let marks: Vec<Seq> = outcome.streams.iter().map(|stream| stream.plan.k).collect();
    assert_eq!(marks, [Seq(0), Seq(0)]);
    assert!(!outcome.needed);
    // No target has the extension: none is asked, and the generation is the label's next.
    config.servers.iter_mut().for_each(|server| server.has_extension = false);
    let mut driver = Driver::with(config, 1, Mode::Open(intent)).unwrap();
    assert_eq!((driver.opening.phase(), driver.opening.generation()), (Phase::Claimed, 3));
    driver.go(&mut world).unwrap();
    assert_eq!(driver.calls, 0);
}

#[test]
fn t19_a_log_that_is_given_up_is_begun_anew() {
    let history = [(0, 1, 0, 5, 1, true), (0, 2, 3, 6, 1, true), (0, 3, 0, 7, 1, true)];
    let mut world = played(World::new(2, 1, |_| false), &history);
    world.targets[1].known = false;
    world.targets[1].generation = 0;
    world.targets[1].partitions.clear();
    let intent = riopipe_session::claim::Intent { accept_lost_log: true, ..world.intent() };
    let before = world.clone();
    let dry = Driver::new(&world, 1, Mode::DryRun(intent)).run(&mut world).unwrap();
    assert_eq!(world, before);
    let outcome = Driver::new(&world, 1, Mode::Open(intent)).run(&mut world).unwrap();
    let plan = &outcome.streams[0].plan;
    assert_eq!(plan.k, Seq(1), "what the lost log knew is lost");
    // Group 3 may have been durable with all before it: it is left, and listed (T26).
    assert_eq!((plan.undo.len(), plan.in_doubt.len(), plan.log_given_up), (0, 1, true));
    assert_eq!(plan, &dry.streams[0].plan);
    assert_eq!(world.drive(0).reads(START + 7), before.drive(0).reads(START + 7));
    assert!(world.targets[1].known && world.targets[1].partitions[0].settled);
}

#[test]
fn t19_giving_up_a_log_makes_none_where_none_is_due() {
    let mut world = World::new(2, 1, |_| false);
    world.targets[1].unlogged = true;
    world.targets[1].partitions.clear();
    let intent = riopipe_session::claim::Intent { accept_lost_log: true, ..world.intent() };
    let mut config = world.config();
    config.servers[1].logged = false;
    Driver::with(config, 1, Mode::Open(intent)).unwrap().run(&mut world).unwrap();
    assert!(world.targets[1].unlogged && world.targets[1].generation == 4);
}

#[test]
fn what_a_target_does_not_list_is_cleared_with_all_it_has() {
    let mut world = played(World::new(2, 3, |_| false), &[(1, 2, 0, 5, 1, true)]);
    world.targets[1].hides = true;
    let outcome = open(&mut world, 1).unwrap();
    assert!(outcome.needed && !world.targets[1].hides);
    assert!(world.targets.iter().all(|target| target.partitions.iter().all(|p| p.settled)));
}

#[test]
fn a_torn_append_is_cleared_like_an_entry() {
    let mut world = World::new(2, 3, |_| false);
    world.targets[1].partitions[2].torn = 1;
    let outcome = open(&mut world, 1).unwrap();
    assert!(outcome.needed);
    assert_eq!((outcome.counts.torn, outcome.counts.entries, outcome.counts.undos), (1, 0, 0));
    let settled: Vec<bool> = world.targets[1].partitions.iter().map(|p| p.settled).collect();
    assert_eq!(settled, [false, false, true]);
    assert_eq!(world.targets[1].partitions[2].torn, 0);
}

#[test]
fn settling_many_streams_takes_several_commands() {
    let history: Vec<_> = (0..400).map(|i| (i, 2, 0, 2 * u64::from(i), 1, true)).collect();
    let mut world = played(World::new(1, 400, |_| false), &history);
    let mut driver = driver(&world);
    driver.go(&mut world).unwrap();
    let sizes: Vec<usize> = driver
        .log
        .iter()
        .filter(|(_, call)| sqe_of(call).opcode() == SETTLE)
        .filter_map(|(_, call)| match call {
            Call::Admin { send, .. } => Settle::decode(send),
            Call::Io { .. } => None,
        })
        .map(|settle| settle.streams.len())
        .collect();
    assert_eq!(sizes.iter().sum::<usize>(), 400);
    assert_eq!(sizes.len(), 3);
    assert!(world.targets[0].partitions.iter().all(|p| p.settled && p.entries.is_empty()));
}

#[test]
fn t20_every_stream_in_the_logs_is_recovered() {
    let history = [(6, 2, 2, 6, 1, true), (3, 5, 0, 5, 1, false)];
    let mut world = played(World::new(2, 8, |_| false), &history);
    let outcome = open(&mut world, 1).unwrap();
    let dropped: Vec<u64> = outcome.streams.iter().map(|stream| stream.plan.dropped).collect();
    assert_eq!(dropped, [0, 0, 0, 1, 0, 0, 1, 0]);
    assert_eq!((world.drive(2).reads(START + 6), world.drive(0).reads(START + 5)), (0, 0));
}

#[test]
fn flush_entries_alone_leave_nothing_to_zero() {
    let mut world = World::new(1, 1, |_| true);
    let flush = riopipe_order::attribute::Attribute {
        kind: Kind::Flush,
        lba: 0,
        blocks: 0,
        ..entry(2, 0, 0, 1)
    };
    world.play(&[Past { stream: 0, attribute: flush, durable: false }], &mut Random(1));
    let outcome = open(&mut world, 1).unwrap();
    assert_eq!((outcome.counts.undos, outcome.counts.flushes, outcome.counts.settles), (0, 2, 1));
    assert!(outcome.needed);
}

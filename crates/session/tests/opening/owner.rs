//! The operations of an owner on single streams: recover one, acknowledge in-place lists (P6, T9).

use riopipe_order::attribute::{Seq, StreamId};
use riopipe_session::initiator::opening::{Mode, OpeningError, Phase};
use riopipe_session::wire;

use crate::world::{Driver, Past, Random, START, World, entry, in_place, open, sqe_of, streams};

const GENERATION: u32 = 4;

fn past(stream: u16, seq: u64, member: u8, lba: u64, durable: bool) -> Past {
    Past { stream, attribute: entry(seq, member, lba, 1), durable }
}

/// A volume of initiator 1 with streams that have written since; stream 1 has failed, and its
/// connections are closed.
fn running() -> World {
    let mut world = World::new(2, 3, |_| true);
    open(&mut world, 1).unwrap();
    let history = [
        past(0, 1, 0, 1, false),
        past(1, 1, 0, 11, true),
        past(1, 2, 2, 12, false),
        past(1, 3, 1, 13, true),
        past(2, 1, 3, 21, false),
    ];
    world.play(&history, &mut Random(2));
    for target in &mut world.targets {
        for (stream, partition) in target.partitions.iter_mut().enumerate() {
            partition.settled = false;
            partition.bound = stream != 1;
        }
    }
    world
}

fn reopen() -> Mode {
    Mode::Reopen { generation: GENERATION, streams: streams(&[1]) }
}

fn acknowledge(numbers: &[u16]) -> Mode {
    Mode::Acknowledge { generation: GENERATION, streams: streams(numbers) }
}

#[test]
fn p6_one_stream_is_recovered_while_others_run() {
    let mut world = running();
    let before = world.clone();
    let mut driver = Driver::new(&world, 1, reopen());
    assert_eq!(driver.opening.generation(), GENERATION);
    driver.go(&mut world).unwrap();
    let claims = |call| sqe_of(call).opcode() == wire::ADMIN_CLAIM;
    assert!(!driver.log.iter().any(|(_, call)| claims(call)), "it is the owner already");
    let outcome = driver.opening.into_outcome();
    assert_eq!(outcome.streams.len(), 1);
    let plan = &outcome.streams[0].plan;
    assert_eq!((plan.stream, plan.k, plan.tag, plan.dropped), (StreamId(1), Seq(1), !1, 2));
    for (now, then) in world.targets.iter().zip(&before.targets) {
        assert_eq!(now.generation, GENERATION);
        assert_eq!(now.partitions[0], then.partitions[0]);
        assert_eq!(now.partitions[2], then.partitions[2]);
        assert!(now.partitions[1].settled && now.partitions[1].entries.is_empty());
    }
    let reads = |member, lba| world.drive(member).reads(START + lba);
    assert_eq!([reads(2, 12), reads(1, 13)], [0, 0]);
    assert_eq!(reads(0, 11), 2, "what was whole stays");
    assert_eq!(reads(0, 1), before.drive(0).reads(START + 1), "other streams' blocks, too");
}

#[test]
fn t8_a_stream_whose_connection_lingers_is_waited_for() {
    let mut world = running();
    world.targets[1].partitions[1].bound = true;
    let mut driver = Driver::new(&world, 1, reopen());
    for _ in 0..20 {
        driver.step(&mut world, false).unwrap();
    }
    assert_eq!(driver.opening.phase(), Phase::List);
    let put_off = driver.opening.put_off(1).unwrap();
    assert_eq!(put_off.status, wire::status::STREAM_BUSY);
    assert!(put_off.attempts > 5);
    world.targets[1].partitions[1].bound = false;
    driver.go(&mut world).unwrap();
    assert_eq!(driver.opening.put_off(1), None);
}

#[test]
fn t9_a_reopening_cut_off_anywhere_is_finished_by_the_next_owner() {
    for cut in 1.. {
        let mut world = running();
        let mut driver = Driver::new(&world, 1, reopen());
        let mut over = false;
        while driver.calls < cut && !over {
            let last = driver.calls + 1 == cut;
            over = !driver.step(&mut world, last).unwrap();
        }
        driver.lose(&mut world);
        world.initiators_die();
        let mut random = Random(cut as u64);
        world.power_cut(cut % 2, &mut random);
        let outcome = open(&mut world, 2).unwrap();
        let found: Vec<Seq> = outcome.streams.iter().map(|stream| stream.plan.k).collect();
        assert_eq!(found, [Seq(0), Seq(1), Seq(0)], "cut at {cut}");
        let reads = |member, lba| world.drive(member).medium.get(&(START + lba)).copied();
        assert_eq!([reads(2, 12), reads(1, 13)], [Some(0), Some(0)]);
        assert_eq!(outcome.streams[1].plan.tag, !1);
        if over {
            assert!(cut > 8);
            break;
        }
    }
}

/// Stream 1 has in-place updates beyond its prefix on both servers, stream 0 on one.
fn with_in_place() -> World {
    let mut world = World::new(2, 3, |_| true);
    let live = |stream, seq, member, lba| Past {
        stream,
        attribute: in_place(entry(seq, member, lba, 1)),
        durable: true,
    };
    let history = [
        live(0, 2, 0, 5),
        past(0, 3, 2, 6, true),
        live(1, 4, 1, 7),
        live(1, 5, 3, 8),
        past(2, 1, 3, 9, true),
    ];
    world.play(&history, &mut Random(4));
    world
}

fn kept(world: &World, stream: usize) -> Vec<bool> {
    world.targets.iter().map(|t| !t.partitions[stream].entries.is_empty()).collect()
}

#[test]
fn t9_in_place_lists_stay_until_they_are_acknowledged() {
    let mut world = with_in_place();
    let first = open(&mut world, 1).unwrap();
    let pending = |outcome: &riopipe_session::initiator::opening::Outcome| {
        outcome.streams.iter().map(|stream| stream.pending).collect::<Vec<_>>()
    };
    assert_eq!(pending(&first), [true, true, false]);
    assert_eq!((kept(&world, 0), kept(&world, 1)), (vec![true, true], vec![true, true]));
    // The next owners find them again, and have nothing else to do.
    for initiator in 2..4 {
        world.initiators_die();
        let mut driver = Driver::new(&world, initiator, Mode::Open(world.intent()));
        driver.go(&mut world).unwrap();
        let again = driver.opening.into_outcome();
        assert!(!again.needed);
        assert_eq!(pending(&again), [true, true, false]);
        for (again, first) in again.streams.iter().zip(&first.streams) {
            assert_eq!(again.plan.in_place, first.plan.in_place);
            assert_eq!((again.plan.k, again.plan.tag), (first.plan.k, first.plan.tag));
        }
        assert_eq!(again.counts.undos, 0, "what was undone may be in use by now");
    }
    let generation = world.targets[0].generation;
    let mode = Mode::Acknowledge { generation, streams: streams(&[1]) };
    let outcome = Driver::new(&world, 3, mode).run(&mut world).unwrap();
    assert!(!outcome.streams[0].pending);
    assert_eq!(outcome.streams[0].plan.in_place, first.streams[1].plan.in_place);
    assert_eq!((kept(&world, 0), kept(&world, 1)), (vec![true, true], vec![false, false]));
    assert!(world.targets.iter().all(|t| t.partitions[1].released == first.streams[1].plan.k));
    // Again, since the answer may have been lost: nothing changes.
    let before = world.clone();
    let mode = Mode::Acknowledge { generation, streams: streams(&[1]) };
    Driver::new(&world, 3, mode).run(&mut world).unwrap();
    assert_eq!(world, before);
}

#[test]
fn t9_a_blank_in_place_list_on_one_server_only_is_cleared() {
    // The acknowledgement reached server 1 only. The entries that server 0 keeps have no in-place
    // update.
    let mut world = World::new(2, 1, |_| false);
    let live = Past { stream: 0, attribute: in_place(entry(3, 2, 7, 1)), durable: true };
    world.play(&[past(0, 2, 0, 5, false), live], &mut Random(1));
    open(&mut world, 1).unwrap();
    assert_eq!(kept(&world, 0), [true, true]);
    let mode = || Mode::Acknowledge { generation: GENERATION, streams: streams(&[0]) };
    let mut driver = Driver::new(&world, 1, mode());
    driver.go_to(&mut world, Phase::Settle);
    let (_, call) = driver.opening.next_command(1).unwrap();
    world.handle(1, 1, &call).unwrap();
    assert_eq!(kept(&world, 0), [true, false]);
    world.initiators_die();
    let outcome = open(&mut world, 2).unwrap();
    assert!(!outcome.streams[0].pending);
    assert_eq!(kept(&world, 0), [false, false]);
}

#[test]
fn t9_an_interrupted_settlement_keeps_the_list_everywhere_in_the_end() {
    // Server 0 was settled, server 1 has nothing of the stream and was not.
    let mut world = World::new(2, 1, |_| false);
    let live = Past { stream: 0, attribute: in_place(entry(3, 0, 7, 1)), durable: true };
    world.play(&[live], &mut Random(1));
    let mut driver = Driver::new(&world, 1, Mode::Open(world.intent()));
    driver.go_to(&mut world, Phase::Settle);
    let (_, call) = driver.opening.next_command(0).unwrap();
    world.handle(1, 0, &call).unwrap();
    driver.lose(&mut world);
    world.initiators_die();
    let outcome = open(&mut world, 2).unwrap();
    assert!(outcome.streams[0].pending);
    let generation = world.targets[0].generation;
    let mode = Mode::Acknowledge { generation, streams: streams(&[0]) };
    Driver::new(&world, 2, mode).run(&mut world).unwrap();
    assert_eq!(kept(&world, 0), [false, false]);
}

#[test]
fn only_what_was_recovered_is_acknowledged() {
    let mut world = with_in_place();
    world.targets.iter_mut().for_each(|t| (t.owner, t.generation) = (Some((1, true)), GENERATION));
    let before = world.clone();
    let error = Driver::new(&world, 1, acknowledge(&[1])).run(&mut world).unwrap_err();
    assert_eq!(error, OpeningError::NotPending { stream: StreamId(1) });
    assert_eq!(error.stream(), Some(StreamId(1)));
    assert_eq!(world, before);
    let partition = &mut world.targets[0].partitions[1];
    (partition.settled, partition.released) = (true, Seq(0));
    let before = world.clone();
    let error = Driver::new(&world, 1, acknowledge(&[1])).run(&mut world).unwrap_err();
    assert_eq!(error, OpeningError::NotRecovered { stream: StreamId(1) });
    assert_eq!(world, before);
}

#[test]
fn t8_a_fenced_owner_neither_reopens_nor_acknowledges() {
    for mode in [reopen(), acknowledge(&[1])] {
        let mut world = running();
        world.targets.iter_mut().for_each(|t| (t.owner, t.generation) = (Some((2, true)), 5));
        let before = world.clone();
        let error = Driver::new(&world, 1, mode).run(&mut world).unwrap_err();
        assert!(matches!(error, OpeningError::TakenOver { .. }), "{error:?}");
        assert!(error.to_string().contains("was taken over"), "{error}");
        assert_eq!(world, before);
    }
}

#[test]
fn t23_the_answer_to_an_abandoned_attempt_is_never_accepted() {
    let mut world = running();
    let config = world.config();
    // A first attempt asks for the lists. The second target's answer is in transit for a long time.
    let mut first = Driver::with_attempt(config.clone(), 1, reopen(), 1).unwrap();
    first.go_to(&mut world, Phase::List);
    let mut first = first.opening;
    let (late, call) = first.next_command(1).unwrap();
    let reported = world.handle(1, 1, &call).unwrap();
    drop(first);
    // The stream has run since, and group 4 is durable there and confirmed.
    world.targets[0].partitions[1].entries.retain(|e| e.attribute.seq <= Seq(1));
    world.targets[1].partitions[1].entries.clear();
    world.play(&[past(1, 2, 2, 12, true), past(1, 3, 2, 13, true)], &mut Random(3));
    world.targets[1].partitions[1].bound = false;

    let mut driver = Driver::with_attempt(config, 1, reopen(), 2).unwrap();
    driver.go_to(&mut world, Phase::List);
    let (ticket, call) = driver.opening.next_command(1).unwrap();
    assert_eq!((ticket.number, sqe_of(&call).opcode()), (late.number, wire::ADMIN_LIST));
    driver.opening.on_answer(late, Ok(&reported)).unwrap();
    assert_eq!(driver.opening.in_flight(1), 1, "its own answer is still waited for");
    let own = world.handle(1, 1, &call).unwrap();
    driver.opening.on_answer(ticket, Ok(&own)).unwrap();
    // An answer that comes when no command is in flight is not accepted either.
    driver.opening.on_answer(late, Err(wire::status::LOG_LOST)).unwrap();
    driver.go(&mut world).unwrap();
    let plan = &driver.opening.outcome().streams[0].plan;
    assert_eq!((plan.k, plan.undone_blocks()), (Seq(3), 0));
}

//! Errors in any step: one clear error, nothing changed before undo, and the opening can be run
//! again.

use riopipe_nvme::command::{Status, opcode};
use riopipe_order::attribute::{Seq, StreamId};
use riopipe_order::recovery::DecideError;
use riopipe_session::claim::{ClaimError, Intent};
use riopipe_session::initiator::opening::{Mode, Opening, OpeningError, Phase};
use riopipe_session::wire::{self, status};

use crate::world::{Driver, Past, Random, START, World, entry, open};

/// One group kept, one dropped on each server.
fn world() -> World {
    let mut world = World::new(2, 2, |_| true);
    let past = |stream, seq, member, lba, durable| {
        let attribute = entry(seq, member, lba, 1);
        Past { stream, attribute, durable }
    };
    let history = [
        past(0, 1, 0, 5, true),
        past(0, 3, 1, 6, true),
        past(0, 4, 2, 7, false),
        past(1, 2, 3, 8, true),
    ];
    world.play(&history, &mut Random(5));
    world
}

fn parts(world: &World) -> Vec<impl PartialEq + std::fmt::Debug + use<>> {
    world.targets.iter().map(|t| (t.drives.clone(), t.partitions.clone())).collect()
}

fn driver(world: &World, initiator: u32) -> Driver {
    Driver::new(world, initiator, Mode::Open(world.intent()))
}

#[test]
fn a_refusal_in_any_step_ends_it_and_it_can_be_run_again() {
    let expected = {
        let mut world = world();
        let outcome = open(&mut world, 1).unwrap();
        (outcome.streams, parts(&world))
    };
    let steps = [
        (wire::ADMIN_STATUS, "asking for the volume's state"),
        (wire::ADMIN_CLAIM, "claiming the volume"),
        (wire::ADMIN_LIST, "reading a stream's log"),
        (opcode::WRITE_ZEROES, "zeroing"),
        (opcode::FLUSH, "flushing member"),
        (wire::ADMIN_SETTLE, "recording the prefix"),
    ];
    for (opcode, doing) in steps {
        let mut world = world();
        let before = parts(&world);
        let status = Status::INTERNAL.with_dnr();
        world.targets[1].refuses = Some((opcode, status));
        let mut driver = driver(&world, 1);
        let error = driver.go(&mut world).unwrap_err();
        assert_eq!(error.server(), Some(1), "{error}");
        let text = error.to_string();
        assert!(text.contains(doing) && text.contains("internal error"), "{text}");
        match opcode {
            opcode::WRITE_ZEROES => {
                let found =
                    matches!(error, OpeningError::Undo { status: s, blocks: 1, .. } if s == status);
                assert!(found, "{error:?}");
                assert!(text.contains("the logs are as they were"), "{text}");
            }
            opcode::FLUSH => assert!(matches!(error, OpeningError::Flush { .. }), "{error:?}"),
            _ => assert!(matches!(error, OpeningError::Refused { .. }), "{error:?}"),
        }
        assert_eq!(error.stream().is_some(), opcode == wire::ADMIN_LIST);
        assert_eq!(
            (driver.opening.next_command(0), driver.opening.next_command(1)),
            (None, None),
            "it is over"
        );
        driver.opening.end_pause().unwrap();
        assert_eq!(driver.opening.next_command(0), None);
        driver.lose(&mut world);
        if matches!(opcode, wire::ADMIN_STATUS | wire::ADMIN_CLAIM | wire::ADMIN_LIST) {
            assert_eq!(parts(&world), before, "nothing was changed");
        }
        let unsettled = world.targets.iter().all(|t| t.partitions.iter().all(|p| !p.settled));
        assert!(unsettled || opcode == wire::ADMIN_SETTLE, "T9");
        world.initiators_die();
        world.targets[1].refuses = None;
        let outcome = open(&mut world, 2).unwrap();
        let found = outcome.streams.iter().map(|stream| (stream.plan.k, stream.plan.tag));
        let wanted = expected.0.iter().map(|stream| (stream.plan.k, stream.plan.tag));
        assert!(found.eq(wanted));
        assert_eq!(parts(&world), expected.1);
    }
}

#[test]
fn after_an_error_nothing_more_is_sent() {
    let mut world = World::new(2, 1, |_| false);
    let far = |i: u64| Past { stream: 0, attribute: entry(i + 2, 0, 2 * i, 1), durable: true };
    let history: Vec<Past> = (0..100).map(far).collect();
    world.play(&history, &mut Random(1));
    let mut driver = driver(&world, 1);
    driver.go_to(&mut world, Phase::Undo);
    let (ticket, _) = driver.opening.next_command(0).unwrap();
    let (other, _) = driver.opening.next_command(0).unwrap();
    driver.opening.on_answer(ticket, Err(Status::WRITE_FAULT)).unwrap_err();
    assert_eq!(driver.opening.next_command(0), None);
    driver.opening.on_answer(other, Ok(&[])).unwrap();
    assert_eq!(driver.opening.phase(), Phase::Undo);
    assert_eq!(driver.opening.outcome().counts.undos, 0);
}

#[test]
fn a_lost_log_store_is_no_passing_refusal() {
    let mut world = world();
    world.targets[0].refuses = Some((wire::ADMIN_SETTLE, status::LOG_FAILED));
    let error = open(&mut world, 1).unwrap_err();
    assert!(error.to_string().contains("log store failed"), "{error}");
    let busy = status::STREAM_BUSY.with_dnr();
    world.initiators_die();
    world.targets[0].refuses = Some((wire::ADMIN_SETTLE, busy));
    let error = open(&mut world, 2).unwrap_err();
    assert!(matches!(error, OpeningError::Refused { status, .. } if status == busy), "{error:?}");
}

#[test]
fn t8_a_living_owner_is_not_displaced_by_accident() {
    let mut world = world();
    open(&mut world, 1).unwrap();
    let error = open(&mut world, 2).unwrap_err();
    let owner = "nqn.other".into();
    assert_eq!(
        error,
        OpeningError::Claim(ClaimError::Owned { target: 0, owner, lease_left_ms: 0 })
    );
    assert_eq!(error.server(), Some(0));
    assert!(error.to_string().contains("take_over"));
    let take = Intent { take_over: true, ..world.intent() };
    // A dry run never takes anything over.
    let dry = Driver::new(&world, 2, Mode::DryRun(take)).run(&mut world).unwrap_err();
    assert!(matches!(dry, OpeningError::Claim(ClaimError::Owned { .. })), "{dry:?}");
    Driver::new(&world, 2, Mode::Open(take)).run(&mut world).unwrap();
    assert!(world.targets.iter().all(|target| target.owner == Some((2, true))));
}

#[test]
fn t8_of_two_that_want_it_one_gets_all() {
    // Both have asked before either claims.
    for seed in 0..40 {
        let mut world = world();
        let mut random = Random(seed);
        let mut both = [driver(&world, 1), driver(&world, 2)];
        for driver in &mut both {
            driver.go_to(&mut world, Phase::Claim);
        }
        let mut ended: [Option<Result<(), OpeningError>>; 2] = [None, None];
        while ended.iter().any(Option::is_none) {
            let at = random.below(2);
            if ended[at].is_none() {
                match both[at].step(&mut world, false) {
                    Ok(true) => {}
                    Ok(false) => ended[at] = Some(Ok(())),
                    Err(error) => ended[at] = Some(Err(error)),
                }
            }
        }
        let won: Vec<bool> = ended.iter().map(|end| matches!(end, Some(Ok(())))).collect();
        assert_eq!(won.iter().filter(|won| **won).count(), 1, "{ended:?}");
        let loser = ended.into_iter().flatten().find_map(Result::err).unwrap();
        let owned = matches!(&loser, OpeningError::Claim(ClaimError::Owned { target: 0, .. }));
        assert!(owned, "{loser:?}");
    }
}

#[test]
fn t8_an_owner_fenced_while_opening_learns_it() {
    let mut world = world();
    let mut first = driver(&world, 1);
    first.go_to(&mut world, Phase::AskAgain);
    let before = parts(&world);
    world.targets[1].owner = Some((2, true));
    let error = first.go(&mut world).unwrap_err();
    assert_eq!(error, OpeningError::TakenOver { server: 1, by: Some("nqn.other".into()) });
    assert_eq!(parts(&world), before);
}

#[test]
fn t8_a_fenced_owner_reopens_nothing_and_gets_the_name_of_the_new_owner() {
    for lives in [true, false] {
        let mut world = world();
        let mut first = driver(&world, 1);
        first.go(&mut world).unwrap();
        let generation = first.opening.generation();
        // The later owner may not be calling. Then any initiator can read the lists.
        world.targets[1].owner = Some((2, lives));
        world.targets[1].generation = generation + 1;
        let late = Past { stream: 0, attribute: entry(9, 3, 20, 1), durable: true };
        world.play(&[late], &mut Random(1));
        let before = parts(&world);
        let mode = Mode::Reopen { generation, streams: vec![StreamId(0)] };
        let mut again = Driver::new(&world, 1, mode);
        let error = again.go(&mut world).unwrap_err();
        let by = lives.then(|| "nqn.other".into());
        assert_eq!(error, OpeningError::TakenOver { server: 1, by });
        let text = error.to_string();
        let owner = if lives { "by nqn.other" } else { "by another initiator" };
        assert!(text.contains(owner) && text.contains("open it again"), "{text}");
        assert_eq!(parts(&world), before);
    }
}

#[test]
fn t8_an_owner_fenced_while_undoing_learns_that_and_not_of_a_drive() {
    let mut world = world();
    let mut first = driver(&world, 1);
    first.go_to(&mut world, Phase::Undo);
    let refuses = Some((opcode::WRITE_ZEROES, status::GUARDED.with_dnr()));
    world.targets.iter_mut().for_each(|target| target.refuses = refuses);
    let error = first.go(&mut world).unwrap_err();
    assert!(matches!(error, OpeningError::TakenOver { by: None, .. }), "{error:?}");
}

#[test]
fn t19_lost_and_missing_logs_are_refused_also_once_the_volume_is_taken() {
    let mut lost = world();
    lost.targets[1].log_lost = true;
    let error = open(&mut lost, 1).unwrap_err();
    assert_eq!(error, OpeningError::Claim(ClaimError::LogLost { target: 1 }));
    let mut blank = world();
    blank.targets[0].unlogged = true;
    blank.targets[0].partitions.clear();
    let intent = Intent { streams: 2, ..blank.intent() };
    let error = Driver::new(&blank, 1, Mode::Open(intent)).run(&mut blank).unwrap_err();
    assert_eq!(error, OpeningError::Claim(ClaimError::LogMissing { target: 0 }));
    assert!(blank.targets.iter().all(|target| target.owner.is_none()), "not even claimed");
    let mut later = world();
    let mut driver = driver(&later, 1);
    driver.go_to(&mut later, Phase::AskAgain);
    later.targets[1].log_lost = true;
    let error = driver.go(&mut later).unwrap_err();
    assert_eq!(error, OpeningError::Claim(ClaimError::LogLost { target: 1 }));
}

#[test]
fn t20_a_missing_target_stops_everything() {
    let mut world = world();
    let before = world.clone();
    let mut config = world.config();
    config.servers[1].present = false;
    for mode in [Mode::Open(world.intent()), Mode::DryRun(world.intent())] {
        let error = Opening::new(config.clone(), mode, 0).unwrap_err();
        assert_eq!(error, OpeningError::Missing { server: 1 });
        assert!(error.to_string().contains("make it reachable again"));
    }
    assert_eq!(world, before);
    open(&mut world, 1).unwrap();
}

#[test]
fn logs_that_contradict_each_other_are_refused() {
    let mut world = world();
    let other = riopipe_order::attribute::Attribute { num: 2, ..entry(4, 3, 9, 1) };
    let mut twin = world.targets[1].partitions[0].entries[0];
    (twin.position.0, twin.attribute) = (90, other);
    world.targets[1].partitions[0].entries.push(twin);
    let before = parts(&world);
    let error = open(&mut world, 1).unwrap_err();
    let decide = DecideError::Contradiction { stream: StreamId(0), seq: Seq(4) };
    assert_eq!(error, OpeningError::Decide(decide));
    assert_eq!((error.server(), error.stream()), (None, Some(StreamId(0))));
    assert!(error.to_string().contains("nothing was changed"));
    assert_eq!(parts(&world), before);
    let mut elsewhere = self::world();
    elsewhere.targets[1].partitions[1].entries[0].attribute.member.0 = 0;
    let error = open(&mut elsewhere, 1).unwrap_err();
    assert_eq!((error.server(), error.stream()), (Some(1), Some(StreamId(1))));
}

#[test]
fn a_group_beyond_everything_is_zeroed_where_it_lies() {
    let mut world = world();
    open(&mut world, 1).unwrap();
    let reads = |member, lba| world.drive(member).reads(START + lba);
    assert_eq!([reads(1, 6), reads(2, 7), reads(3, 8)], [0, 0, 0]);
    assert_eq!(reads(0, 5), 1, "the group that was whole holds what it wrote");
}

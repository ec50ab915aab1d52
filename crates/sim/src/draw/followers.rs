//! Groups that another stream follows.

use super::coincidence::{at, cluster, drive};
use crate::drive::{DriveFault, ModelKind};
use crate::rng::Rng;
use crate::scenario::{Ends, Engine, Op, Place, Scenario, Step, What, WriteOp};

/// Of 100 scenarios with engine `opimq`, and with another engine, the number with such groups.
const OPIMQ: u64 = 60;
const OTHERS: u64 = 10;
/// One of this number of seeds is about dual-stream writes; with engine `opimq` one of the second.
const ONE_IN: u64 = 25;
const ONE_IN_OPIMQ: u64 = 3;
/// Separates these random numbers from others.
const SALT: u64 = 0x666f_6c6c_6f77_6564;
/// The number of blocks of the drive's data.
const BLOCKS: u32 = 96;

/// Lets other streams follow some of the groups.
pub(super) fn choose(scenario: &mut Scenario, seed: u64) {
    let mut rng = Rng::new(seed ^ SALT);
    let is_opimq = scenario.volume.engine == Engine::Opimq;
    let share = if is_opimq { OPIMQ } else { OTHERS };
    let streams = scenario.volume.streams;
    if streams < 2 || !scenario.logs.is_empty() || !rng.percent(share) {
        return;
    }
    let often = *rng.pick(&[10, 30, 60]);
    // With a journal all others have the same follower, as in a file system.
    let has_journal = rng.one_in(2);
    for Step { stream, op } in &mut scenario.steps {
        let Op::Group { writes, durable } = op else { continue };
        let other = rng.below(u64::from(streams) - 1) as u16;
        let other = if other >= *stream { other + 1 } else { other };
        let follower = if has_journal { 0 } else { other };
        if follower != *stream && rng.percent(often) {
            let (writes, durable) = (core::mem::take(writes), *durable);
            *op = Op::Followed { writes, durable, follower };
        }
    }
}

/// The scenario of a seed that is about dual-stream writes. `is_opimq`: the engine was chosen.
pub(super) fn draw(seed: u64, is_opimq: bool) -> Option<Scenario> {
    let mut rng = Rng::new(seed ^ SALT.rotate_left(8));
    let one_in = if is_opimq { ONE_IN_OPIMQ } else { ONE_IN };
    rng.one_in(one_in).then(|| match rng.below(8) {
        0 => late_follower(&mut rng),
        1..=3 => full_queues(&mut rng),
        _ => duals(&mut rng),
    })
}

/// A drive that keeps the order of epochs, and streams that each have a share of it.
fn drive_of_streams(streams: u16, rng: &mut Rng) -> Scenario {
    let mut scenario = cluster(BLOCKS, rng);
    let spec = drive(&mut scenario);
    spec.model =
        Some(*rng.pick(&[ModelKind::FlashOp, ModelKind::FlashOp, ModelKind::FlashOpSmall]));
    if rng.one_in(4) {
        (spec.plp, spec.model) = (true, Some(ModelKind::OptaneOp));
    }
    scenario.machines[0].cores = *rng.pick(&[1, 2]);
    scenario.volume.engine = Engine::Opimq;
    scenario.volume.streams = streams;
    (scenario.volume.unit, scenario.volume.request_blocks) = (12, 12);
    scenario
}

/// A write into the share of its stream.
fn write(stream: u16, streams: u16, place: Place, rng: &mut Rng) -> WriteOp {
    let share = BLOCKS / u32::from(streams);
    let blocks = rng.range(1, 3) as u32;
    let first = u32::from(stream) * share + rng.below(u64::from(share - blocks)) as u32;
    WriteOp(first, blocks, place)
}

/// Another stream than this one.
fn other(stream: u16, streams: u16, rng: &mut Rng) -> u16 {
    ((u64::from(stream) + 1 + rng.below(u64::from(streams) - 1)) % u64::from(streams)) as u16
}

/// A stream begins late. Meanwhile others name it as the follower of groups that become durable, and
/// leave their streams.
fn late_follower(rng: &mut Rng) -> Scenario {
    let streams = *rng.pick(&[2, 2, 3]);
    let mut scenario = drive_of_streams(streams, rng);
    let group = |stream, follower, rng: &mut Rng| {
        let writes = (0..rng.range(1, 3)).map(|_| write(stream, streams, Place::InPlace, rng));
        let (writes, durable) = (writes.collect(), rng.one_in(2));
        let op = match follower {
            Some(follower) => Op::Followed { writes, durable, follower },
            None => Op::Group { writes, durable },
        };
        Step { stream, op }
    };
    let pause = *rng.pick(&[500, 2_000, 20_000]);
    let mut steps = vec![Step { stream: 0, op: Op::Pause(pause) }];
    for leader in 1..streams {
        for _ in 0..rng.range(1, 3) {
            steps.push(group(leader, Some(0), rng));
            steps.push(Step { stream: leader, op: Op::WaitDurable });
            if rng.one_in(2) {
                steps.push(Step { stream: leader, op: Op::Restart });
            }
        }
    }
    steps.extend((0..rng.range(1, 3)).map(|_| group(0, None, rng)));
    scenario.steps = steps;
    scenario
}

/// Queues of a few commands, and groups of many. Owners stop to call while requests have not left,
/// and the background driver notices that late. One owner waits. Nothing goes wrong.
fn full_queues(rng: &mut Rng) -> Scenario {
    let streams = *rng.pick(&[2, 2, 3, 4]);
    let mut scenario = drive_of_streams(streams, rng);
    if rng.one_in(2) {
        let spec = drive(&mut scenario);
        (spec.plp, spec.model) = (true, Some(ModelKind::OptaneOp));
    }
    scenario.volume.request_blocks = *rng.pick(&[1, 1, 2]);
    scenario.client.depth = *rng.pick(&[2, 2, 4]);
    scenario.client.not_calling_us = 50_000;
    scenario.client.think_ns = *rng.pick(&[0, 5_000, 50_000]);
    let (dual, durable) = (*rng.pick(&[20, 50, 80]), *rng.pick(&[0, 10, 50]));
    // The drive has had a command of each stream, so each can be named as a follower.
    for stream in 0..streams {
        let writes = vec![write(stream, streams, Place::InPlace, rng)];
        let begin = [Op::Group { writes, durable: false }, Op::WaitComplete, Op::Pause(500)];
        scenario.steps.extend(begin.map(|op| Step { stream, op }));
    }
    let waiting = rng.below(u64::from(streams)) as u16;
    let count = rng.range(2, 12);
    for step in 0..=count {
        let stream = if step == count { waiting } else { rng.below(u64::from(streams)) as u16 };
        let writes = (0..rng.range(2, 5)).map(|_| write(stream, streams, Place::InPlace, rng));
        let (writes, durable) = (writes.collect(), rng.percent(durable));
        let op = if rng.percent(dual) {
            Op::Followed { writes, durable, follower: other(stream, streams, rng) }
        } else {
            Op::Group { writes, durable }
        };
        scenario.steps.push(Step { stream, op });
    }
    // A stream without steps is closed, so its owner calls.
    scenario.steps.push(Step { stream: waiting, op: Op::WaitDurable });
    scenario
}

/// One drive that keeps the order of epochs. Streams name each other as followers, without a wait,
/// while the power is cut and connections break. Now and then nothing goes wrong.
fn duals(rng: &mut Rng) -> Scenario {
    let streams = *rng.pick(&[2, 2, 3, 4]);
    let mut scenario = drive_of_streams(streams, rng);
    scenario.client.depth = *rng.pick(&[2, 4, 16, 32]);
    scenario.client.think_ns = *rng.pick(&[0, 0, 5_000]);
    scenario.net.delay_max = *rng.pick(&[6_000, 15_000, 100_000, 300_000]);
    let dual = *rng.pick(&[20, 50, 80]);
    let discard = *rng.pick(&[0, 0, 10]);
    let restarts = rng.one_in(3);
    if rng.one_in(2) {
        // One stream begins late, so others may name it before it has written anything.
        scenario.steps.push(Step { stream: 0, op: Op::Pause(*rng.pick(&[500, 2_000, 20_000])) });
    }
    for _ in 0..rng.range(30, 100) {
        let stream = rng.below(u64::from(streams)) as u16;
        let one = |rng: &mut Rng| {
            let place = if rng.percent(discard) { Place::Discard } else { Place::InPlace };
            write(stream, streams, place, rng)
        };
        let writes = (0..rng.range(1, 5)).map(|_| one(rng)).collect();
        let durable = rng.percent(6);
        let follower = other(stream, streams, rng);
        let op = match rng.below(20) {
            0 => Op::WaitDurable,
            1 => Op::Pause(*rng.pick(&[100, 2_000])),
            2 if restarts => Op::Restart,
            _ if rng.percent(dual) => Op::Followed { writes, durable, follower },
            _ => Op::Group { writes, durable },
        };
        scenario.steps.push(Step { stream, op });
    }
    let faults = if rng.one_in(5) { 0 } else { rng.range(1, 5) };
    let mut event = 50;
    for _ in 0..faults {
        event += rng.range(5, 150);
        let (machine, effects, fences, down_us) = (0, rng.below(6) as u32, false, 200);
        let what = match rng.below(10) {
            0 => What::Kill { machine, effects, fences, down_us },
            1 => What::KillClient { down_us },
            2 => What::BlackOut { down_us },
            3 => What::Drive { machine, drive: 0, fault: DriveFault::Write },
            4 => What::Cut {
                nth: rng.below(8) as u32,
                ends: *rng.pick(&[Ends::Both, Ends::Client, Ends::Server]),
            },
            _ => What::PowerCut { machine, effects, fences, down_us },
        };
        scenario.faults.push(at(event, what));
    }
    scenario
}

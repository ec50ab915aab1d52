//! Scenarios in which one rare coincidence is likely.
//!
//! Some defences matter only when several unlikely events happen within a few microseconds. A seed
//! that draws a mix of everything has such a moment once in many thousands, if at all. So some
//! seeds draw only one coincidence: a small cluster, and faults at about the right moment.

use crate::drive::{DriveFault, DriveSpec};
use crate::log_store::LogStoreKind;
use crate::network::NetSpec;
use crate::oracle::NO_LOSS_MS;
use crate::rng::Rng;
use crate::scenario::{
    ClientSpec, Corruption, Ends, Engine, Fault, MachineSpec, Op, Place, Scenario, Step,
    VolumeSpec, What, When, WriteOp,
};

mod orders;
mod owners;
pub(super) mod redirected;

/// Of 100 seeds, the number that are about a coincidence.
const SHARE: u64 = 50;
/// Separates these random numbers from those of [`super::draw`], which stay the same.
const SALT: u64 = 0xc01c_1de5_0f7e_e15e;
/// The first block of the data area on each drive.
const FIRST: u32 = 8;

/// Draws the open values of a kind of coincidence.
type Draw = fn(&mut Rng) -> Scenario;

/// All coincidences, and the weight of each. The weight is higher where even such a scenario seldom
/// hits the moment.
const ALL: &[(u64, Draw)] = &[
    (1, flushes_beside_failing_ones),
    (8, undone_again),
    (2, replayed_over_newer),
    (3, words_of_older_laps),
    (4, words_that_were_never_fenced),
    (4, overlap_in_one_fence),
    (4, reads_beside_replays),
    (1, closed_while_cut_off),
    (10, owners::taken_over_while_coming_back),
    (1, stopped_and_cut_off),
    (1, owners::reads_of_a_fenced_owner),
    (3, owners::reads_that_outlive_the_owner),
    (6, owners::reads_that_outlive_the_association),
    (2, owners::taken_over_and_released),
    (1, answers_of_the_last_attempt),
    (2, corrupt_logs),
    (1, owners::commands_of_plain_hosts),
    (2, owners::plain_hosts_while_the_owner_is_unreachable),
    (6, owners::closed_while_one_is_down),
    (8, owners::writes_that_outlive_two_owners),
    (4, owners::released_before_the_fenced_owner_leaves),
    (1, stores_that_fail_while_given_up),
    (3, left_to_the_background_driver),
    (2, unreachable_for_about_the_loss_time),
    (2, writes_of_a_dead_target),
    (8, connected_late),
];

/// The scenario of a seed that is about a coincidence.
pub(super) fn draw(seed: u64) -> Option<Scenario> {
    if let Some(scenario) = orders::draw(seed) {
        return Some(scenario);
    }
    let mut rng = Rng::new(seed ^ SALT);
    if !rng.percent(SHARE) {
        return None;
    }
    let mut nth = rng.below(ALL.iter().map(|(weight, _)| weight).sum());
    let (_, scenario) = ALL.iter().find(|(weight, _)| {
        let here = nth < *weight;
        nth = nth.saturating_sub(*weight);
        here
    })?;
    Some(scenario(&mut rng))
}

/// One stream on one drive without power-loss protection, with no steps and no faults.
pub(super) fn cluster(data_blocks: u32, rng: &mut Rng) -> Scenario {
    let drive =
        DriveSpec { plp: false, garbage: false, at_once: 0, latency_us: 60, slow: 0, model: None };
    Scenario {
        seed: rng.u64() >> 1,
        machines: vec![MachineSpec {
            log: LogStoreKind::Dax,
            drives: vec![drive],
            blocks: FIRST + data_blocks,
            cores: 1,
            logless: false,
            foreign: false,
        }],
        volume: VolumeSpec {
            streams: 1,
            slots: 16,
            unit: 4,
            first: FIRST,
            request_blocks: 8,
            members: vec![(0, 0)],
            start: 0,
            engine: Engine::Rio,

            prepare: 0,
            orderless: Vec::new(),
        },
        client: ClientSpec {
            depth: 16,
            kept_blocks: 1024,
            merge: false,
            merge_from: 0,
            loss_ms: NO_LOSS_MS,
            keep_alive_ms: 0,
            digests: false,
            retry_us: 0,
            think_ns: 5_000,
            wait_limit_us: 0,
            not_calling_us: *rng.pick(&[200, 2_000, 10_000]),
            flush_us: *rng.pick(&[1_000, 20_000]),
        },
        net: NetSpec { delay_min: 5_000, delay_max: 15_000, split: 0 },
        steps: Vec::new(),
        faults: Vec::new(),
        logs: Vec::new(),
        second_volume: None,
        fs: None,
        device: None,
    }
}

pub(super) fn drive(scenario: &mut Scenario) -> &mut DriveSpec {
    &mut scenario.machines[0].drives[0]
}

pub(super) fn write(stream: u16, block: u32, blocks: u32, place: Place, durable: bool) -> Step {
    Step { stream, op: Op::Group { writes: vec![WriteOp(block, blocks, place)], durable } }
}

pub(super) fn at(event: u64, what: What) -> Fault {
    Fault { when: When::Event(event as u32), what }
}

/// An owner leaves its stream with writes that are not durable. The background driver takes it
/// over, sends its mark when it is idle, and flushes it. The power is cut meanwhile (trap T1).
fn left_to_the_background_driver(rng: &mut Rng) -> Scenario {
    let mut scenario = cluster(24, rng);
    scenario.volume.streams = *rng.pick(&[1, 2]);
    scenario.client.not_calling_us = *rng.pick(&[200, 2_000, 50_000]);
    scenario.client.flush_us = *rng.pick(&[20_000, 100_000, 1_000_000]);
    let streams = u64::from(scenario.volume.streams);
    for _ in 0..rng.range(3, 8) {
        let stream = rng.below(streams) as u16;
        for _ in 0..rng.range(1, 5) {
            let block = rng.below(24) as u32;
            scenario.steps.push(write(stream, block, 1, Place::Fresh, rng.percent(10)));
        }
        let us = *rng.pick(&[60_000, 60_000, 120_000, 300_000]);
        scenario.steps.push(Step { stream, op: Op::Pause(us) });
    }
    let mut event = 60;
    for _ in 0..rng.range(1, 4) {
        event += rng.range(60, 400);
        let (machine, effects, fences, down_us) = (0, 0, false, 200);
        scenario.faults.push(at(
            event,
            match rng.below(4) {
                0 => What::KillClient { down_us },
                1 => What::Kill { machine, effects, fences, down_us },
                2 => What::PowerCut { machine, effects, fences, down_us },
                _ => What::BlackOut { down_us },
            },
        ));
    }
    scenario
}

/// A target is unreachable for about as long as its streams wait for it. Some streams resume in
/// time; others give it up (promises P6, P7).
fn unreachable_for_about_the_loss_time(rng: &mut Rng) -> Scenario {
    let mut scenario = cluster(24, rng);
    scenario.volume.streams = *rng.pick(&[1, 2, 3]);
    let loss_ms = *rng.pick(&[5, 20, 60]);
    scenario.client.loss_ms = loss_ms;
    scenario.client.retry_us = *rng.pick(&[0, 100]);
    let streams = u64::from(scenario.volume.streams);
    for _ in 0..rng.range(40, 90) {
        let stream = rng.below(streams) as u16;
        let op = match rng.below(8) {
            0 => Op::WaitDurable,
            1 => Op::Pause(*rng.pick(&[100, 2_000, 20_000])),
            _ => {
                let block = rng.below(24) as u32;
                Op::Group {
                    writes: vec![WriteOp(block, 1, Place::Fresh)],
                    durable: rng.percent(20),
                }
            }
        };
        scenario.steps.push(Step { stream, op });
    }
    let mut event = 60;
    for _ in 0..rng.range(2, 5) {
        event += rng.range(40, 300);
        let down_us = (loss_ms * 1_000 + rng.below(3_000) as u32).saturating_sub(2_500);
        let (machine, effects, fences) = (0, 0, false);
        let what = match rng.below(3) {
            0 => What::Kill { machine, effects, fences, down_us },
            1 => What::PowerCut { machine, effects, fences, down_us },
            _ => What::Unreachable { for_us: down_us },
        };
        scenario.faults.push(at(event, what));
    }
    scenario
}

/// Streams are being opened while their target dies and comes back with a drive without power-loss
/// protection. Their late requests reach the next target process (trap T27).
fn connected_late(rng: &mut Rng) -> Scenario {
    let mut scenario = cluster(24, rng);
    (drive(&mut scenario).plp, drive(&mut scenario).latency_us) = (true, 10);
    scenario.machines[0].logless = rng.one_in(2);
    (scenario.volume.engine, scenario.volume.streams) = (Engine::Sync, 4);
    scenario.client.think_ns = 0;
    scenario.net = NetSpec { delay_min: 500, delay_max: *rng.pick(&[50_000, 300_500]), split: 0 };
    for _ in 0..rng.range(40, 60) {
        let (stream, block) = (rng.below(4) as u16, rng.below(24) as u32);
        scenario.steps.push(write(stream, block, 1, Place::Fresh, rng.percent(40)));
        if rng.percent(60) {
            scenario.steps.push(Step { stream, op: Op::Restart });
        }
    }
    let event = rng.range(90, 400);
    let (by_us, for_us) = (rng.range(300, 4_000) as u32, rng.range(2_000, 10_000) as u32);
    scenario.faults.push(at(event, What::LateStreams { by_us, for_us }));
    let event = event + rng.range(5, 60);
    scenario.faults.push(at(event, What::Unprotect { machine: 0, drive: 0, down_us: 10 }));
    scenario
}

/// FLUSHes of several streams on one drive fail, and the reactors receive the results late. The
/// data that another stream's FLUSH should cover is gone when that FLUSH succeeds (trap T29).
fn flushes_beside_failing_ones(rng: &mut Rng) -> Scenario {
    let mut scenario = cluster(48, rng);
    scenario.machines[0].cores = *rng.pick(&[2, 3]);
    scenario.volume.streams = *rng.pick(&[3, 4]);
    scenario.client.think_ns = *rng.pick(&[0, 20_000]);
    let streams = u64::from(scenario.volume.streams);
    for _ in 0..rng.range(60, 140) {
        let stream = rng.below(streams) as u16;
        let block = u32::from(stream) * 12 + rng.below(12) as u32;
        scenario.steps.push(write(stream, block, 1, Place::Fresh, rng.percent(70)));
    }
    let mut event = 100;
    for _ in 0..8 {
        event += rng.range(40, 300);
        let fault = DriveFault::Flush;
        scenario.faults.push(at(event, What::Drive { machine: 0, drive: 0, fault }));
    }
    scenario
}

/// A stream fails, and its undo is interrupted. The drive zeroes the requested blocks long after
/// the stream has begun to write there again (trap T8).
fn undone_again(rng: &mut Rng) -> Scenario {
    let mut scenario = cluster(12, rng);
    scenario.volume.slots = 32;
    (drive(&mut scenario).latency_us, drive(&mut scenario).slow) = (300, *rng.pick(&[20, 40]));
    for _ in 0..rng.range(60, 110) {
        let (block, blocks) = (rng.below(12) as u32, rng.range(1, 6) as u32);
        scenario.steps.push(write(0, block, blocks, Place::Fresh, rng.percent(10)));
    }
    let mut event = 60;
    for nth in 0..3 {
        event += rng.range(10, 250);
        let fault = *rng.pick(&[DriveFault::Write, DriveFault::Full]);
        scenario.faults.push(at(event, What::Drive { machine: 0, drive: 0, fault }));
        let when = When::Undo(2 * nth, rng.below(8) as u32);
        scenario.faults.push(Fault { when, what: What::CutUndo });
    }
    scenario
}

/// The same block is written again and again. Answers are lost with a connection, and the power is
/// cut while the stream replays. A durable write that is sent again overwrites a newer one (promise
/// P7).
fn replayed_over_newer(rng: &mut Rng) -> Scenario {
    let mut scenario = cluster(12, rng);
    drive(&mut scenario).plp = true;
    drive(&mut scenario).latency_us = *rng.pick(&[10, 60]);
    scenario.volume.slots = 64;
    scenario.client.think_ns = 0;
    scenario.net =
        NetSpec { delay_min: 20_000, delay_max: *rng.pick(&[60_000, 300_000]), split: 0 };
    for _ in 0..rng.range(50, 110) {
        scenario.steps.push(write(0, 0, 1, Place::InPlace, rng.percent(20)));
    }
    let mut event = 50;
    for nth in 0..4 {
        event += rng.range(40, 160);
        let (effects, fences, down_us) = (0, false, 10);
        let lost = match rng.below(3) {
            0 => What::Kill { machine: 0, effects, fences, down_us },
            1 => What::PowerCut { machine: 0, effects, fences, down_us },
            _ => What::Cut { nth: rng.below(4) as u32, ends: Ends::Both },
        };
        scenario.faults.push(at(event, lost));
        let when = When::Replay(nth, rng.below(16) as u32);
        scenario.faults.push(Fault { when, what: What::BlackOut { down_us: 200 } });
    }
    scenario
}

/// A power cut leaves whole entries with persist words of an older lap. Their data is sent again
/// without being made durable at once, and the target starts once more (trap T7).
fn words_of_older_laps(rng: &mut Rng) -> Scenario {
    let mut scenario = cluster(24, rng);
    scenario.volume.slots = *rng.pick(&[6, 8, 12]);
    scenario.client.think_ns = *rng.pick(&[0, 5_000, 40_000]);
    for _ in 0..110 {
        let block = rng.below(24) as u32;
        scenario.steps.push(write(0, block, 1, Place::InPlace, rng.percent(40)));
    }
    let mut event = rng.range(150, 400);
    for nth in 0..rng.range(6, 10) {
        let (machine, effects, down_us) = (0, rng.below(6) as u32, 10);
        let fences = nth % 2 == 0 || rng.one_in(2);
        scenario.faults.push(at(event, What::PowerCut { machine, effects, fences, down_us }));
        event += rng.range(40, 160);
    }
    scenario
}

/// A target dies between a store into its log and the fence. The next one accepts the word that it
/// reads, and the owner learns that the write is durable. Then the power is cut (trap T7).
fn words_that_were_never_fenced(rng: &mut Rng) -> Scenario {
    let mut scenario = cluster(24, rng);
    drive(&mut scenario).plp = true;
    drive(&mut scenario).latency_us = *rng.pick(&[10, 60]);
    scenario.volume.slots = 64;
    scenario.client.think_ns = *rng.pick(&[0, 5_000]);
    scenario.net = NetSpec { delay_min: 500, delay_max: *rng.pick(&[1_500, 15_000]), split: 0 };
    for _ in 0..110 {
        let block = rng.below(24) as u32;
        scenario.steps.push(write(0, block, 1, Place::InPlace, rng.percent(50)));
    }
    let mut event = rng.range(60, 160);
    for _ in 0..rng.range(3, 6) {
        let (machine, effects, down_us) = (0, rng.below(12) as u32, 10);
        scenario.faults.push(at(event, What::Kill { machine, effects, fences: true, down_us }));
        event += rng.range(10, 60);
        let effects = rng.below(3) as u32;
        scenario.faults.push(at(event, What::PowerCut { machine, effects, fences: true, down_us }));
        event += rng.range(40, 120);
    }
    scenario
}

/// A write waits for an earlier one to its block. Both are recorded as durable in one fence, and
/// the power is cut in that fence. Of the two words, the older one is lost (trap T12).
fn overlap_in_one_fence(rng: &mut Rng) -> Scenario {
    let mut scenario = cluster(12, rng);
    let spec = drive(&mut scenario);
    (spec.plp, spec.at_once) = (true, *rng.pick(&[50, 70, 85]));
    scenario.volume.slots = 64;
    scenario.client.think_ns = 0;
    scenario.net = NetSpec { delay_min: 500, delay_max: *rng.pick(&[500, 20_000]), split: 0 };
    for _ in 0..rng.range(60, 110) {
        scenario.steps.push(write(0, 0, 1, Place::InPlace, rng.percent(10)));
    }
    let mut event = rng.range(60, 140);
    for _ in 0..rng.range(3, 6) {
        let (machine, effects, down_us) = (0, rng.below(12) as u32, 10);
        scenario.faults.push(at(event, What::PowerCut { machine, effects, fences: true, down_us }));
        event += rng.range(40, 140);
    }
    scenario
}

/// One stream reads slowly the blocks of another stream, whose connection breaks. The other stream
/// resumes, and sends its older writes again, before the read has ended (promise P9).
fn reads_beside_replays(rng: &mut Rng) -> Scenario {
    let mut scenario = cluster(12, rng);
    (drive(&mut scenario).latency_us, drive(&mut scenario).slow) = (300, 30);
    scenario.volume.streams = 2;
    scenario.volume.slots = 64;
    scenario.net = NetSpec { delay_min: 500, delay_max: 1_500, split: 0 };
    for _ in 0..12 {
        for _ in 0..rng.range(2, 5) {
            scenario.steps.push(write(0, 0, 1, Place::InPlace, rng.percent(3)));
        }
        scenario.steps.push(Step { stream: 0, op: Op::WaitComplete });
        scenario.steps.push(Step { stream: 0, op: Op::Pause(2_000) });
        for _ in 0..8 {
            scenario.steps.push(Step { stream: 1, op: Op::Read(0, 1) });
        }
    }
    let mut event = 60;
    for _ in 0..10 {
        event += rng.range(20, 120);
        let ends = *rng.pick(&[Ends::Both, Ends::Client]);
        scenario.faults.push(at(event, What::Cut { nth: rng.below(6) as u32, ends }));
    }
    scenario
}

/// The volume is closed, and a target is unreachable when the marks of the streams are sent to it
/// (trap T1).
fn closed_while_cut_off(rng: &mut Rng) -> Scenario {
    let mut scenario = cluster(24, rng);
    scenario.volume.streams = *rng.pick(&[1, 2]);
    let streams = u64::from(scenario.volume.streams);
    for _ in 0..rng.range(10, 60) {
        let (stream, block) = (rng.below(streams) as u16, rng.below(24) as u32);
        scenario.steps.push(write(stream, block, 1, Place::Fresh, rng.percent(30)));
    }
    let event = rng.range(60, 500);
    scenario.faults.push(at(event, What::Release { for_us: 1_000 }));
    let (machine, effects, down_us) = (0, rng.below(6) as u32, 10);
    for _ in 0..2 {
        let lost = match rng.below(3) {
            0 => What::Kill { machine, effects, fences: true, down_us },
            1 => What::PowerCut { machine, effects, fences: true, down_us },
            _ => What::Cut { nth: rng.below(4) as u32, ends: Ends::Both },
        };
        scenario.faults.push(at(event + rng.range(1, 80), lost));
    }
    scenario
}

/// A target with a mapped log stops again and again (clean stop), and its machine loses its power
/// in the last steps of a stop (trap T24).
fn stopped_and_cut_off(rng: &mut Rng) -> Scenario {
    let mut scenario = cluster(24, rng);
    scenario.machines[0].log = LogStoreKind::File;
    drive(&mut scenario).plp = rng.one_in(2);
    for _ in 0..110 {
        scenario.steps.push(write(0, rng.below(24) as u32, 1, Place::Fresh, rng.percent(60)));
    }
    let mut event = 60;
    for _ in 0..6 {
        event += rng.range(30, 160);
        let cut = rng.range(1, 4) as u32;
        scenario.faults.push(at(event, What::Stop { machine: 0, off: true, cut, down_us: 10 }));
    }
    scenario
}

/// Streams are opened again while answers come late: those to one attempt during the next (trap
/// T23).
fn answers_of_the_last_attempt(rng: &mut Rng) -> Scenario {
    let mut scenario = cluster(24, rng);
    drive(&mut scenario).plp = rng.one_in(2);
    scenario.volume.streams = *rng.pick(&[1, 2]);
    scenario.volume.slots = 32;
    scenario.client.wait_limit_us = 5_000;
    let streams = u64::from(scenario.volume.streams);
    for _ in 0..110 {
        let stream = rng.below(streams) as u16;
        let step = write(stream, rng.below(24) as u32, 1, Place::Fresh, rng.percent(40));
        let restart = Step { stream, op: Op::Restart };
        scenario.steps.push(if rng.percent(12) { restart } else { step });
    }
    let mut event = 60;
    for _ in 0..8 {
        event += rng.range(20, 120);
        let (by_us, for_us) = (*rng.pick(&[6_000, 8_000, 9_500]), 40_000);
        scenario.faults.push(at(event, What::Lag { machine: 0, by_us, for_us }));
    }
    scenario
}

/// A target comes back with a log that is corrupt, or with its partitions in the wrong places
/// (trap T19).
fn corrupt_logs(rng: &mut Rng) -> Scenario {
    let mut scenario = cluster(24, rng);
    drive(&mut scenario).plp = rng.one_in(2);
    scenario.volume.streams = 2;
    scenario.volume.slots = *rng.pick(&[16, 32]);
    for _ in 0..100 {
        let (stream, block) = (rng.below(2) as u16, rng.below(24) as u32);
        scenario.steps.push(write(stream, block, 1, Place::Fresh, rng.percent(40)));
    }
    let mut event = 60;
    for _ in 0..4 {
        event += rng.range(40, 300);
        let how = *rng.pick(&[
            Corruption::Header,
            Corruption::Header,
            Corruption::Marks,
            Corruption::Swapped,
        ]);
        let bit = rng.below(1 << 16) as u32;
        scenario.faults.push(at(event, What::CorruptLog { machine: 0, how, bit }));
        if rng.percent(70) {
            scenario.faults.push(at(event, What::KillClient { down_us: 10 }));
        }
    }
    scenario
}

/// A log is lost with the power, and two initiators want the volume. The operator gives the log up,
/// and its store fails again and again (trap T26).
fn stores_that_fail_while_given_up(rng: &mut Rng) -> Scenario {
    let mut scenario = cluster(12, rng);
    scenario.machines[0].log = LogStoreKind::File;
    scenario.volume.streams = *rng.pick(&[1, 3]);
    let streams = u64::from(scenario.volume.streams);
    for _ in 0..110 {
        let (stream, block) = (rng.below(streams) as u16, rng.below(12) as u32);
        scenario.steps.push(write(stream, block, 1, Place::Fresh, rng.percent(80)));
    }
    let mut event = rng.range(60, 140);
    for nth in 0..3 {
        let (machine, effects, down_us) = (0, 0, 10);
        let cut = What::PowerCut { machine, effects, fences: false, down_us };
        scenario.faults.push(at(event, cut));
        let take_over = What::TakeOver { for_us: *rng.pick(&[0, 500, 20_000]) };
        scenario.faults.push(at(event + rng.below(200), take_over));
        for nth in 2 * nth + 1..2 * nth + 5 {
            let when = When::Recovery(nth, rng.range(20, 60) as u32);
            let fences = rng.below(10) as u32;
            scenario.faults.push(Fault { when, what: What::Log { machine, fences } });
        }
        event += rng.range(300, 900);
    }
    scenario
}

/// A target dies with writes in flight and is there again at once. The earlier requests to its
/// drive land after newer writes of the same blocks (trap T8).
fn writes_of_a_dead_target(rng: &mut Rng) -> Scenario {
    let mut scenario = cluster(12, rng);
    let spec = drive(&mut scenario);
    (spec.plp, spec.latency_us, spec.slow) = (rng.one_in(2), 300, *rng.pick(&[20, 40]));
    scenario.volume.slots = 64;
    scenario.volume.engine =
        *rng.pick(&[Engine::Rio, Engine::Rio, Engine::Sync, Engine::Linux, Engine::None]);
    for _ in 0..rng.range(60, 110) {
        let place = *rng.pick(&[Place::Fresh, Place::InPlace]);
        scenario.steps.push(write(0, rng.below(4) as u32, 1, place, rng.percent(20)));
    }
    let mut event = 60;
    for _ in 0..rng.range(2, 6) {
        event += rng.range(20, 200);
        let (machine, effects, fences, down_us) = (0, rng.below(6) as u32, false, 10);
        scenario.faults.push(at(event, What::Kill { machine, effects, fences, down_us }));
    }
    scenario
}

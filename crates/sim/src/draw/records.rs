//! Scenarios in which streams keep logs of records.

use super::coincidence::{at, cluster, drive, write};
use crate::drive::DriveFault;
use crate::log_store::LogStoreKind;
use crate::rng::Rng;
use crate::scenario::{Ends, Engine, LogSpec, Op, Place, Scenario, Step, What};

/// One of this number of seeds is about logs of records.
const ONE_IN: u64 = 12;
/// Separates these random numbers from all others, which stay the same.
const SALT: u64 = 0x7265_636f_7264_7321;

/// The scenario of a seed that is about logs of records.
pub(super) fn draw(seed: u64) -> Option<Scenario> {
    let mut rng = Rng::new(seed ^ SALT);
    rng.one_in(ONE_IN).then(|| logs_of_records(&mut rng))
}

fn logs_of_records(rng: &mut Rng) -> Scenario {
    let per_drive = *rng.pick(&[48, 72, 96]);
    let mut scenario = cluster(per_drive, rng);
    drive(&mut scenario).plp = rng.one_in(3);
    drive(&mut scenario).latency_us = *rng.pick(&[10, 60, 60, 300]);
    drive(&mut scenario).at_once = *rng.pick(&[0, 0, 60]);
    drive(&mut scenario).slow = *rng.pick(&[0, 0, 20]);
    scenario.machines[0].log = *rng.pick(&[
        LogStoreKind::Dax,
        LogStoreKind::Dax,
        LogStoreKind::Block,
        LogStoreKind::Cached,
    ]);
    scenario.machines[0].cores = *rng.pick(&[1, 1, 2]);
    for machine in 1..*rng.pick(&[1, 1, 2, 2, 2, 3]) {
        scenario.machines.push(scenario.machines[0].clone());
        scenario.volume.members.push((machine, 0));
    }
    let is_synced = rng.one_in(4);
    if is_synced {
        scenario.volume.engine = Engine::Sync;
        scenario.machines.iter_mut().for_each(|machine| machine.drives[0].at_once = 0);
        let logless = rng.one_in(2);
        scenario.machines.iter_mut().for_each(|machine| machine.logless = logless);
    }
    scenario.volume.unit = *rng.pick(&[1, 2, 4, 12]);
    scenario.volume.slots = *rng.pick(&[12, 16, 32]);
    scenario.client.merge = rng.one_in(2);
    scenario.client.digests = rng.one_in(8);
    scenario.client.think_ns = *rng.pick(&[0, 5_000, 40_000]);
    scenario.client.kept_blocks = *rng.pick(&[32, 1024]);
    scenario.net.split = *rng.pick(&[0, 0, 5]);
    place_logs(&mut scenario, rng);
    steps(&mut scenario, rng);
    faults(&mut scenario, rng);
    scenario
}

/// Places one log or two, and perhaps an ordinary stream beside them.
fn place_logs(scenario: &mut Scenario, rng: &mut Rng) {
    let blocks = (scenario.machines[0].blocks - scenario.volume.first) / scenario.volume.unit
        * scenario.volume.unit
        * scenario.machines.len() as u32;
    let logs = *rng.pick(&[1, 1, 2]);
    scenario.volume.streams = logs + u16::from(rng.one_in(4));
    let mut first = rng.below(4) as u32;
    for stream in 0..logs {
        let left = (blocks - first) / u32::from(logs - stream);
        let length = left.min(*rng.pick(&[17, 18, 21, 25, 40]));
        let group_blocks = *rng.pick(&[1, 2, 3, 8]);
        let (groups, flushes) = (*rng.pick(&[1, 2, 4]), *rng.pick(&[1, 2]));
        let log = LogSpec { stream, first, blocks: length, group_blocks, groups, flushes };
        scenario.logs.push(log);
        first += length;
    }
}

fn steps(scenario: &mut Scenario, rng: &mut Rng) {
    let last = scenario.logs.last().map_or(0, |log| log.first + log.blocks);
    let longest = *rng.pick(&[200, 4_000, 4_000, 12_000]);
    let wait = *rng.pick(&[4, 12, 30]);
    let trims = *rng.pick(&[4, 10, 20]);
    let checkpoints = *rng.pick(&[5, 10, 40]);
    for _ in 0..rng.range(30, 120) {
        let stream = rng.below(u64::from(scenario.volume.streams)) as u16;
        if usize::from(stream) == scenario.logs.len() {
            let block = last + rng.below(6) as u32;
            scenario.steps.push(write(stream, block, 1, Place::Fresh, rng.percent(20)));
            continue;
        }
        let bytes = rng.below(longest + 1) as u32;
        let op = match rng.below(100) {
            x if x < wait => Op::WaitDurable,
            x if x < wait + trims => Op::Trim(if rng.one_in(2) { 0 } else { rng.below(12) as u32 }),
            x if x < wait + trims + 4 => Op::ReadBack,
            x if x < wait + trims + 7 => Op::Pause(*rng.pick(&[100, 2_000])),
            x if x < wait + trims + 9 => Op::Restart,
            x if x < wait + trims + 9 + checkpoints => Op::Checkpoint(bytes),
            _ => Op::Append(bytes, *rng.pick(&[1, 1, 2, 6])),
        };
        scenario.steps.push(Step { stream, op });
    }
}

fn faults(scenario: &mut Scenario, rng: &mut Rng) {
    let is_logged = scenario.volume.engine.is_logged();
    let mut event = 40;
    if !is_logged && rng.one_in(2) {
        // A lost connection leaves blocks in caches. The same owner resumes, so no label is
        // flushed.
        let mut cut = rng.range(90, 400);
        for _ in 0..rng.range(1, 3) {
            let (nth, ends) = (rng.below(12) as u32, *rng.pick(&[Ends::Both, Ends::Client]));
            scenario.faults.push(at(cut, What::Cut { nth, ends }));
            cut += rng.range(20, 200);
            scenario.faults.push(at(cut, What::BlackOut { down_us: 200 }));
            cut += rng.range(200, 400);
        }
    }
    for _ in 0..rng.range(1, 6) {
        event += rng.range(40, 400);
        let machine = rng.index(scenario.machines.len());
        let (effects, fences) = (rng.below(16) as u32, is_logged && rng.one_in(3));
        let down_us = *rng.pick(&[10, 200, 5_000]);
        let what = match rng.below(12) {
            0 | 1 => What::KillClient { down_us },
            2..=4 => What::BlackOut { down_us },
            5 | 6 => What::PowerCut { machine, effects, fences, down_us },
            7 | 8 => What::Kill { machine, effects, fences, down_us },
            9 => What::TakeOver { for_us: *rng.pick(&[0, 500, 5_000]) },
            10 => What::Release { for_us: 1_000 },
            _ if rng.one_in(2) => What::Cut { nth: rng.below(6) as u32, ends: Ends::Both },
            _ => {
                let fault = *rng.pick(&[DriveFault::Write, DriveFault::Flush, DriveFault::Read]);
                What::Drive { machine, drive: 0, fault }
            }
        };
        scenario.faults.push(at(event, what));
    }
    // Without an ordering log one group is in flight at a time, so few cuts tear a block of it.
    for _ in 0..if is_logged { 0 } else { rng.range(2, 5) } {
        event += rng.range(40, 300);
        scenario.faults.push(at(event, What::BlackOut { down_us: 200 }));
    }
}

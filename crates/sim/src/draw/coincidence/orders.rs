//! Drives that keep an order by themselves: faults strike while several epochs are not durable.

use super::{at, cluster, drive};
use crate::drive::{DriveFault, ModelKind};
use crate::rng::Rng;
use crate::scenario::{Engine, Op, Place, Scenario, Step, What, WriteOp};

/// One of this number of seeds is about such a drive. It has random numbers of its own, so the
/// other seeds stay the same.
const ONE_IN: u64 = 20;
/// Separates these random numbers from others.
const SALT: u64 = 0x6f72_6465_7265_6421;
/// The number of blocks of the drive's data.
const BLOCKS: u32 = 72;

/// The scenario of a seed that is about such a drive.
pub(super) fn draw(seed: u64) -> Option<Scenario> {
    let mut rng = Rng::new(seed ^ SALT);
    rng.one_in(ONE_IN).then(|| epochs(&mut rng))
}

/// One drive with a cache barrier. Groups of several writes follow each other without a wait. Some
/// writes travel in their command, others wait for the target to ask for their data. The power is
/// cut, or a write fails while another connection carries nothing for a while.
fn epochs(rng: &mut Rng) -> Scenario {
    let mut scenario = cluster(BLOCKS, rng);
    let spec = drive(&mut scenario);
    (spec.plp, spec.model) = (false, Some(ModelKind::FlashBarrier));
    if rng.one_in(4) {
        (spec.plp, spec.model) = (true, Some(ModelKind::OptaneBarrier));
    }
    scenario.machines[0].cores = *rng.pick(&[1, 2]);
    scenario.volume.engine = Engine::Barrier;
    scenario.volume.streams = *rng.pick(&[1, 2, 3]);
    (scenario.volume.unit, scenario.volume.request_blocks) = (12, 12);
    scenario.client.depth = *rng.pick(&[2, 4, 16, 32]);
    scenario.client.merge = rng.one_in(4);
    scenario.client.think_ns = *rng.pick(&[0, 0, 5_000]);
    scenario.net.delay_max = *rng.pick(&[6_000, 15_000, 100_000, 300_000]);
    let streams = u64::from(scenario.volume.streams);
    let share = BLOCKS / u32::from(scenario.volume.streams);
    let large = *rng.pick(&[0, 20, 50]);
    for _ in 0..rng.range(20, 90) {
        let stream = rng.below(streams) as u16;
        let one = |rng: &mut Rng| {
            let blocks = if rng.percent(large) { rng.range(9, 13) } else { rng.range(1, 3) } as u32;
            let first = u32::from(stream) * share + rng.below(u64::from(share - blocks)) as u32;
            WriteOp(first, blocks, Place::InPlace)
        };
        let writes = (0..rng.range(1, 5)).map(|_| one(rng)).collect();
        let op = match rng.below(20) {
            0 => Op::WaitDurable,
            1 => Op::Pause(*rng.pick(&[100, 2_000])),
            _ => Op::Group { writes, durable: rng.percent(4) },
        };
        scenario.steps.push(Step { stream, op });
    }
    let mut event = 50;
    for _ in 0..rng.range(1, 5) {
        event += rng.range(5, 150);
        let (machine, effects, fences, down_us) = (0, rng.below(6) as u32, false, 200);
        match rng.below(6) {
            0 => scenario.faults.push(at(event, What::Kill { machine, effects, fences, down_us })),
            1 => scenario.faults.push(at(event, What::BlackOut { down_us })),
            2 | 3 => {
                let stall = What::Stall {
                    nth: rng.below(6) as u32,
                    up: true,
                    for_us: *rng.pick(&[1_000, 5_000, 20_000]),
                };
                scenario.faults.push(at(event, stall));
                let fault = What::Drive { machine, drive: 0, fault: DriveFault::Write };
                scenario.faults.push(at(event + rng.below(10), fault));
            }
            _ => scenario
                .faults
                .push(at(event, What::PowerCut { machine, effects, fences, down_us })),
        }
    }
    scenario
}

//! Coincidences of the prepare area of engine `horae`.

use super::{at, cluster, drive, write};
use crate::draw::engines;
use crate::drive::DriveFault;
use crate::log_store::LogStoreKind;
use crate::network::NetSpec;
use crate::rng::Rng;
use crate::scenario::{Engine, Fault, Op, Place, Scenario, Step, What, When};

/// One of so many scenarios with engine `horae` is one of these.
const ONE_IN: u64 = 2;
/// Separates these random numbers from those of the other drawings.
const SALT: u64 = 0x7265_6469_7265_6374;

/// The scenario of a seed with engine `horae` that is about a coincidence.
pub(in crate::draw) fn draw(seed: u64) -> Option<Scenario> {
    let mut rng = Rng::new(seed ^ SALT);
    rng.one_in(ONE_IN).then(|| match rng.below(9) {
        0 => lost_log_of_another_target(&mut rng),
        1 | 2 => read_after_a_power_cut(&mut rng),
        3..=6 => read_beside_a_failing_flush(&mut rng),
        _ => read_while_it_is_used_again(&mut rng),
    })
}

/// A stream updates blocks of two targets. One target loses its log by a power cut, and the operator
/// gives that log up. The durable updates on the other target are in the prepare area still, and its
/// log must not be given up with the lost one (trap T26). The recovery is cut off now and then.
fn lost_log_of_another_target(rng: &mut Rng) -> Scenario {
    let mut scenario = cluster(12, rng);
    let with_protection = rng.one_in(2);
    drive(&mut scenario).plp = with_protection;
    let second = scenario.machines[0].clone();
    scenario.machines.push(second);
    scenario.machines[0].log = LogStoreKind::File;
    scenario.volume.members = vec![(0, 0), (1, 0)];
    scenario.volume.slots = 64;
    scenario.volume.streams = *rng.pick(&[1, 2]);
    let streams = u64::from(scenario.volume.streams);
    for _ in 0..rng.range(60, 110) {
        let (stream, block) = (rng.below(streams) as u16, rng.below(24) as u32);
        scenario.steps.push(write(stream, block, 1, Place::InPlace, rng.percent(50)));
        if rng.one_in(4) {
            scenario.steps.push(Step { stream, op: Op::WaitDurable });
        }
    }
    let mut event = rng.range(250, 900);
    for nth in 1..4 {
        let (machine, effects, fences, down_us) = (0, rng.below(6) as u32, false, 10);
        let cut = What::PowerCut { machine, effects, fences, down_us };
        scenario.faults.push(at(event, cut));
        scenario.faults.push(at(event + rng.below(20), What::KillClient { down_us: 10 }));
        if rng.one_in(2) {
            let when = When::Recovery(nth, rng.range(4, 60) as u32);
            scenario.faults.push(Fault { when, what: What::KillClient { down_us: 10 } });
        }
        event += rng.range(400, 900);
    }
    engines::set(&mut scenario, Engine::Horae);
    engines::redirect(&mut scenario, *rng.pick(&[8, 64]));
    scenario
}

/// A stream updates a few blocks again and again, in a tiny prepare area, and another thread reads them.
/// After a power cut a block of the area has the older update of another block again, and the stream
/// that is opened again uses the area from its beginning. The thread must get neither (promise P9).
fn read_after_a_power_cut(rng: &mut Rng) -> Scenario {
    let mut scenario = cluster(12, rng);
    let drive = drive(&mut scenario);
    (drive.plp, drive.latency_us) = (false, *rng.pick(&[5, 20]));
    scenario.volume.slots = 64;
    scenario.net = NetSpec { delay_min: 500, delay_max: *rng.pick(&[1_500, 20_000]), split: 0 };
    let blocks = *rng.pick(&[3, 10]);
    for _ in 0..rng.range(20, 60) {
        let (block, is_durable) = (rng.below(blocks) as u32, rng.percent(50));
        scenario.steps.push(write(0, block, 1, Place::InPlace, is_durable));
        for _ in 0..rng.range(1, 4) {
            let op = Op::ReadApart(rng.below(blocks) as u32, 1);
            scenario.steps.push(Step { stream: 0, op });
        }
    }
    let (machine, effects, fences, down_us) = (0, rng.below(6) as u32, rng.one_in(2), 10);
    let cut = What::PowerCut { machine, effects, fences, down_us };
    scenario.faults.push(at(rng.range(200, 1_200), cut));
    engines::set(&mut scenario, Engine::Horae);
    engines::redirect(&mut scenario, *rng.pick(&[2, 3, 4]));
    scenario
}

/// A stream updates blocks again and again, in a small prepare area, and other threads read them. A
/// FLUSH fails, and the drive drops what is in its cache: a block of the area has the older update of
/// another block again. Its answer may come later than that of a read (trap T22, promise P9).
fn read_beside_a_failing_flush(rng: &mut Rng) -> Scenario {
    let mut scenario = cluster(12, rng);
    let drive = drive(&mut scenario);
    (drive.plp, drive.latency_us) = (false, *rng.pick(&[5, 20]));
    scenario.volume.streams = 5;
    scenario.volume.slots = 64;
    scenario.client.think_ns = *rng.pick(&[0, 2_000]);
    scenario.net = NetSpec { delay_min: 500, delay_max: *rng.pick(&[20_000, 100_000]), split: 0 };
    let blocks = *rng.pick(&[4, 10]);
    for _ in 0..rng.range(60, 120) {
        let (block, is_durable) = (rng.below(blocks) as u32, rng.percent(60));
        scenario.steps.push(write(0, block, 1, Place::InPlace, is_durable));
        for stream in 1..5 {
            let op = Op::Read(rng.below(blocks) as u32, *rng.pick(&[1, 3]));
            scenario.steps.push(Step { stream, op });
        }
    }
    let mut event = 150;
    for _ in 0..12 {
        event += rng.range(60, 400);
        let fault = DriveFault::Flush;
        scenario.faults.push(at(event, What::Drive { machine: 0, drive: 0, fault }));
    }
    engines::set(&mut scenario, Engine::Horae);
    engines::redirect(&mut scenario, *rng.pick(&[3, 6, 12]));
    scenario
}

/// A stream updates a few blocks again and again, in a tiny prepare area. Another stream reads them.
/// The drive is slow now and then, so that a read outlives the update that it reads: its blocks in
/// the area must not be used again before it ends (promise P9).
fn read_while_it_is_used_again(rng: &mut Rng) -> Scenario {
    let mut scenario = cluster(12, rng);
    let with_protection = rng.one_in(2);
    let drive = drive(&mut scenario);
    (drive.plp, drive.latency_us, drive.slow) = (with_protection, 20, *rng.pick(&[10, 40]));
    scenario.volume.streams = 3;
    scenario.volume.slots = *rng.pick(&[8, 64]);
    scenario.client.think_ns = *rng.pick(&[0, 5_000]);
    scenario.net = NetSpec { delay_min: 500, delay_max: 1_500, split: 0 };
    for _ in 0..rng.range(30, 90) {
        let block = rng.below(2) as u32;
        scenario.steps.push(write(0, block, 1, Place::InPlace, rng.percent(20)));
        for stream in [1, 2] {
            let op = Op::Read(rng.below(2) as u32, *rng.pick(&[1, 1, 3]));
            scenario.steps.push(Step { stream, op });
        }
    }
    if rng.one_in(3) {
        let (machine, effects, fences, down_us) = (0, rng.below(6) as u32, rng.one_in(2), 10);
        let cut = What::PowerCut { machine, effects, fences, down_us };
        scenario.faults.push(at(rng.range(200, 900), cut));
    }
    engines::set(&mut scenario, Engine::Horae);
    engines::redirect(&mut scenario, *rng.pick(&[2, 3, 4]));
    scenario
}

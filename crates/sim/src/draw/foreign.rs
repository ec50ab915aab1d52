//! Scenarios with a part that does not fit the volume: a foreign target, a replaced drive, or a
//! host that claims as many volumes as it can.

use super::coincidence::{at, cluster, drive, write};
use crate::drive::{DriveFault, DriveSpec};
use crate::rng::Rng;
use crate::scenario::{Engine, Place, Scenario, What, WrongLabel};

/// One of this number of seeds is about such a part.
const ONE_IN: u64 = 30;
/// Separates these random numbers from all others, which stay the same.
const SALT: u64 = 0x7374_7261_6e67_6572;

/// The scenario of a seed that is about such a part.
pub(super) fn draw(seed: u64) -> Option<Scenario> {
    let mut rng = Rng::new(seed ^ SALT);
    if !rng.one_in(ONE_IN) {
        return None;
    }
    let draws: [fn(&mut Rng) -> Scenario; 3] = [foreign_targets, wrong_drives, claimants];
    Some(rng.pick(&draws)(&mut rng))
}

/// A volume on two machines or one.
fn site(rng: &mut Rng) -> Scenario {
    let mut scenario = cluster(24, rng);
    drive(&mut scenario).plp = rng.one_in(2);
    scenario.volume.streams = *rng.pick(&[1, 2]);
    scenario.client.think_ns = *rng.pick(&[0, 5_000, 40_000]);
    if rng.one_in(2) {
        scenario.machines.push(scenario.machines[0].clone());
        scenario.volume.members.push((1, 0));
    }
    let (streams, blocks) = (u64::from(scenario.volume.streams), 24 * scenario.machines.len());
    for _ in 0..rng.range(40, 110) {
        let stream = rng.below(streams) as u16;
        let half = blocks as u64 / streams;
        let block = (u64::from(stream) * half + rng.below(half)) as u32;
        let place = *rng.pick(&[Place::Fresh, Place::InPlace]);
        scenario.steps.push(write(stream, block, 1, place, rng.percent(20)));
    }
    scenario
}

/// A foreign target does not have Rio's extension, so the volume has engine `sync` and its promise
/// (trap T17).
///
/// Such a target does not prevent any host from writing. So there is one initiator, and connections
/// break only with a process that dies. Writes that the process has left in flight do not meet
/// those of a later one.
fn foreign_targets(rng: &mut Rng) -> Scenario {
    let mut scenario = site(rng);
    scenario.volume.engine = Engine::Sync;
    let last = scenario.machines.len() - 1;
    for machine in &mut scenario.machines {
        (machine.logless, machine.foreign) = (true, rng.one_in(2));
    }
    scenario.machines[last].foreign = true;
    let mut event = 60;
    for _ in 0..rng.range(1, 6) {
        event += rng.range(40, 300);
        let machine = rng.index(scenario.machines.len());
        let down_us = *rng.pick(&[10, 200, 5_000]);
        let (effects, fences) = (rng.below(24) as u32, false);
        let what = match rng.below(8) {
            0 | 1 => What::Kill { machine, effects, fences, down_us },
            2..=4 => What::PowerCut { machine, effects, fences, down_us },
            5 => What::BlackOut { down_us },
            6 => What::Stop { machine, off: rng.one_in(2), cut: 0, down_us },
            _ => {
                let fault = *rng.pick(&[DriveFault::Flush, DriveFault::Write]);
                What::Drive { machine, drive: 0, fault }
            }
        };
        scenario.faults.push(at(event, what));
    }
    scenario
}

/// An operator replaces a drive by another one, and the volume is opened again (trap T19).
fn wrong_drives(rng: &mut Rng) -> Scenario {
    let mut scenario = site(rng);
    if scenario.machines.len() == 1 {
        let spec: DriveSpec = *drive(&mut scenario);
        scenario.machines[0].drives.push(spec);
        scenario.volume.members.push((0, 1));
    }
    let mut event = 60;
    for _ in 0..rng.range(1, 3) {
        event += rng.range(40, 400);
        let (machine, drive) = *rng.pick(&scenario.volume.members);
        let whose = *rng.pick(&[WrongLabel::Other, WrongLabel::Newer]);
        scenario.faults.push(at(event, What::WrongDrive { machine, drive, whose }));
        if rng.one_in(2) {
            scenario.faults.push(at(event, What::KillClient { down_us: 10 }));
        }
    }
    scenario
}

/// A host claims volumes on a drive of its own, or on the volume's, one after the other (trap T28).
fn claimants(rng: &mut Rng) -> Scenario {
    let mut scenario = site(rng);
    let spec: DriveSpec = *drive(&mut scenario);
    scenario.machines[0].drives.push(spec);
    for _ in 0..rng.range(1, 2) {
        let (drive, volumes) = (*rng.pick(&[0, 1, 1, 1]), rng.range(4, 12) as u32);
        let what = What::Claimant { machine: 0, drive, volumes };
        scenario.faults.push(at(rng.range(10, 400), what));
    }
    let event = rng.range(60, 500);
    scenario.faults.push(at(event, What::Release { for_us: 1_000 }));
    if rng.one_in(2) {
        let (effects, fences, down_us) = (rng.below(24) as u32, false, 10);
        let what = What::Kill { machine: 0, effects, fences, down_us };
        scenario.faults.push(at(rng.range(60, 500), what));
    }
    scenario
}

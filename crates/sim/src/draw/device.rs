//! Draws a scenario with a plain block device on the volume.

use super::{DRIVE_ORDERS, crash, cut, engines, net, partition};
use crate::drive::{DriveFault, DriveSpec};
use crate::log_store::LogStoreKind;
use crate::oracle::NO_LOSS_MS;
use crate::rng::Rng;
use crate::scenario::{
    ClientSpec, DeviceSpec, Engine, Fault, MachineSpec, Scenario, VolumeSpec, What, When,
};

/// Separates the random numbers of devices from those of other seeds.
const DEVICES: u64 = 0x6465_7669_6365_7300;
/// The first block of the data area on each drive.
const FIRST: u32 = 8;
/// An opening of the volume takes about this number of events.
const EVENTS_OF_AN_OPENING: u64 = 600;
/// The events between two requests are fewer than this most often.
const EVENTS_OF_A_REQUEST: u64 = 20;

/// The scenario with a plain device of a seed.
#[must_use]
pub fn draw_device(seed: u64) -> Scenario {
    let mut rng = Rng::new(seed ^ DEVICES);
    let engine = *rng.pick(&[
        Engine::Rio,
        Engine::Rio,
        Engine::Rio,
        Engine::Rio,
        Engine::Sync,
        Engine::Linux,
        Engine::Horae,
        Engine::Barrier,
        Engine::Opimq,
    ]);
    let unit = *rng.pick(&[1, 2, 4, 16]);
    let machines = machines(unit, &mut rng);
    let mut members = Vec::new();
    for (at, machine) in machines.iter().enumerate() {
        members.extend((0..machine.drives.len()).map(|drive| (at, drive)));
    }
    let requests = *rng.pick(&[10, 30, 60, 120, 200]);
    let device = DeviceSpec {
        seed: rng.u64() >> 1,
        requests,
        depth: *rng.pick(&[1, 4, 16, 32]),
        longest: *rng.pick(&[1, 3, 10, 24]),
        range_blocks: *rng.pick(&[2, 5, 16, 64]),
        part_blocks: *rng.pick(&[1, 2, 4, 8]),
        flushes: *rng.pick(&[2, 8, 20]),
        reads: *rng.pick(&[0, 10, 30]),
        zeroes: *rng.pick(&[0, 3, 12, 30]),
        fua: *rng.pick(&[0, 10, 40, 90]),
        hot: *rng.pick(&[0, 40, 90]),
        pauses: *rng.pick(&[0, 5, 30]),
        detaches: *rng.pick(&[0, 0, 2]),
        delays: *rng.pick(&[0, 0, 10, 50]),
    };
    let faults = faults(&machines, requests, &mut rng);
    let mut scenario = Scenario {
        seed: rng.u64() >> 1,
        machines,
        volume: VolumeSpec {
            streams: *rng.pick(&[1, 2, 3, 4]),
            slots: *rng.pick(&[16, 32, 64, 256]),
            unit,
            first: FIRST,
            request_blocks: *rng.pick(&[2, 4, 8, 32]),
            members,
            start: *rng.pick(&[0, 0, (1 << 32) - 20]),
            engine: Engine::Rio,
            prepare: 0,
            orderless: Vec::new(),
        },
        client: client(&mut rng),
        net: net(&mut rng),
        steps: Vec::new(),
        faults,
        logs: Vec::new(),
        second_volume: None,
        fs: None,
        device: Some(device),
    };
    if engine != Engine::Rio {
        let mut rng = Rng::new(seed ^ DRIVE_ORDERS);
        engines::choose(&mut scenario, Some(engine), &mut rng);
        engines::choose_models(&mut scenario, &mut rng);
    }
    scenario
}

fn machines(unit: u32, rng: &mut Rng) -> Vec<MachineSpec> {
    let log = *rng.pick(&[
        LogStoreKind::Dax,
        LogStoreKind::Dax,
        LogStoreKind::Block,
        LogStoreKind::Cached,
    ]);
    let plp = *rng.pick(&[0, 0, 50, 100]);
    let at_once = *rng.pick(&[0, 0, 10, 60, 100]);
    let latency_us = *rng.pick(&[10, 60, 60, 300]);
    let slow = *rng.pick(&[0, 0, 3, 20]);
    let drive = |rng: &mut Rng| DriveSpec {
        plp: rng.percent(plp),
        // A host's discard is a Write Zeroes that may deallocate. No drive of a target here, and no drive
        // that keeps to the specification, then returns anything but zeroes.
        garbage: false,
        at_once,
        latency_us,
        slow,
        model: None,
    };
    let blocks = FIRST + rng.pick(&[16_u32, 32, 64]).next_multiple_of(unit);
    (0..rng.range(1, 3))
        .map(|_| MachineSpec {
            log,
            drives: (0..rng.range(1, 2)).map(|_| drive(rng)).collect(),
            blocks,
            cores: *rng.pick(&[1, 1, 2]),
            logless: false,
            foreign: false,
        })
        .collect()
}

fn client(rng: &mut Rng) -> ClientSpec {
    ClientSpec {
        depth: *rng.pick(&[2, 8, 32]),
        kept_blocks: *rng.pick(&[16, 64, 1024]),
        merge: rng.percent(75),
        merge_from: 0,
        loss_ms: if rng.percent(60) { NO_LOSS_MS } else { *rng.pick(&[5, 20, 60]) },
        keep_alive_ms: *rng.pick(&[0, 0, 100, 300]),
        digests: rng.percent(8),
        retry_us: *rng.pick(&[0, 100, 3_000]),
        think_ns: 0,
        wait_limit_us: 0,
        not_calling_us: *rng.pick(&[200, 2_000, 50_000]),
        flush_us: *rng.pick(&[1_000, 20_000, 1_000_000]),
    }
}

fn faults(machines: &[MachineSpec], requests: u32, rng: &mut Rng) -> Vec<Fault> {
    // In some runs no target loses its power: then all that has completed must be there.
    let keeps_power = rng.one_in(3);
    let mut faults = Vec::new();
    for _ in 0..*rng.pick(&[0, 1, 2, 3, 5, 8]) {
        let request = rng.below(requests.into()) as u32;
        let after = rng.below(EVENTS_OF_A_REQUEST) as u32;
        let when = match rng.below(10) {
            0 => When::Event(rng.below(EVENTS_OF_AN_OPENING) as u32),
            1 | 2 => When::Recovery(rng.below(4) as u32, rng.below(EVENTS_OF_AN_OPENING) as u32),
            _ => When::Call(request, after),
        };
        let what = match rng.below(12) {
            0..=4 => crash(machines, rng),
            5..=7 => cut(rng),
            8 => partition(machines, rng),
            9 if rng.one_in(2) => {
                let machine = rng.index(machines.len());
                let drive = rng.index(machines[machine].drives.len());
                let fault = *rng.pick(&[DriveFault::Flush, DriveFault::Write]);
                What::Drive { machine, drive, fault }
            }
            _ => What::KillClient { down_us: *rng.pick(&[10, 1_000]) },
        };
        faults.push(Fault { when, what });
        // Another one while the first is being handled.
        if rng.percent(40) {
            let after = rng.below(150) as u32;
            let when = match rng.below(3) {
                0 => When::Replay(0, after / 2),
                1 => When::Call(request, EVENTS_OF_A_REQUEST as u32 + after),
                _ => When::Recovery(rng.range(1, 2) as u32, after),
            };
            faults.push(Fault { when, what: crash(machines, rng) });
        }
    }
    if keeps_power {
        for fault in &mut faults {
            fault.what = match fault.what {
                What::PowerCut { machine, effects, fences, down_us } => {
                    What::Kill { machine, effects, fences, down_us }
                }
                What::BlackOut { down_us } => What::KillAll { down_us },
                What::Stop { machine, cut, down_us, .. } => {
                    What::Stop { machine, off: false, cut, down_us }
                }
                other => other,
            };
        }
    }
    faults
}

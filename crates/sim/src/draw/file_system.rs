//! Draws a scenario with a file system on the volume.

use super::{DRIVE_ORDERS, ENGINES, crash, cut, engines, net, partition};
use crate::drive::DriveSpec;
use crate::fs::BLOCKS;
use crate::log_store::LogStoreKind;
use crate::oracle::NO_LOSS_MS;
use crate::rng::Rng;
use crate::scenario::{
    ClientSpec, Engine, Fault, FsSpec, GroupKind, MachineSpec, Scenario, VolumeSpec, What, When,
};

/// Separates the random numbers of file systems from those of other seeds.
const FILE_SYSTEMS: u64 = 0x7269_6f66_7300_0000;
/// The first block of the data area on each drive.
const FIRST: u32 = 8;

/// Separates the random numbers for prepare areas from those of the other drawings.
const PREPARE_AREAS: u64 = 0x7072_6570_6172_6573;

/// One of this number of runs has engine `horae`.
const HORAE_ONE_IN: u64 = 6;
/// One of this number of the others has engine `barrier`.
const BARRIER_ONE_IN: u64 = 6;
/// One of this number of the rest has engine `opimq`.
const OPIMQ_ONE_IN: u64 = 6;

/// The scenario with a file system of a seed.
#[must_use]
pub fn draw_file_system(seed: u64) -> Scenario {
    let mut rng = Rng::new(seed ^ ENGINES);
    if rng.one_in(HORAE_ONE_IN) {
        draw_file_system_on_horae(seed)
    } else if rng.one_in(BARRIER_ONE_IN) {
        draw_file_system_on_barrier(seed)
    } else if rng.one_in(OPIMQ_ONE_IN) {
        draw_file_system_on_opimq(seed)
    } else {
        on_rio(seed)
    }
}

/// The scenario with a file system on engine `horae`.
#[must_use]
pub fn draw_file_system_on_horae(seed: u64) -> Scenario {
    let mut scenario = on_rio(seed);
    set_horae(&mut scenario, seed);
    scenario
}

/// Sets engine `horae`. Two of three volumes redirect updates in place; a group of the file system
/// has up to 64 blocks.
fn set_horae(scenario: &mut Scenario, seed: u64) {
    engines::set(scenario, Engine::Horae);
    engines::redirect(scenario, *Rng::new(seed ^ PREPARE_AREAS).pick(&[0, 64, 200]));
}

/// The scenario with a file system on engine `barrier`.
#[must_use]
pub fn draw_file_system_on_barrier(seed: u64) -> Scenario {
    on_ordered_drives(Engine::Barrier, seed)
}

/// The scenario with a file system on engine `opimq`.
#[must_use]
pub fn draw_file_system_on_opimq(seed: u64) -> Scenario {
    on_ordered_drives(Engine::Opimq, seed)
}

fn on_ordered_drives(engine: Engine, seed: u64) -> Scenario {
    let mut scenario = on_rio(seed);
    let mut rng = Rng::new(seed ^ DRIVE_ORDERS);
    engines::choose(&mut scenario, Some(engine), &mut rng);
    engines::choose_models(&mut scenario, &mut rng);
    scenario
}

/// The scenario with a file system on engine `rio`.
fn on_rio(seed: u64) -> Scenario {
    let mut rng = Rng::new(seed ^ FILE_SYSTEMS);
    let unit = *rng.pick(&[4, 12, 64]);
    let mut machines = machines(&mut rng);
    let mut members = Vec::new();
    for (at, machine) in machines.iter().enumerate() {
        members.extend((0..machine.drives.len()).map(|drive| (at, drive)));
    }
    let per_member = (BLOCKS as u32).div_ceil(members.len() as u32).next_multiple_of(unit);
    machines.iter_mut().for_each(|machine| machine.blocks = FIRST + per_member);
    let calls = *rng.pick(&[10, 30, 60, 120]);
    let fs = FsSpec {
        seed: rng.u64() >> 1,
        calls,
        like_ext4: rng.one_in(6),
        pauses: *rng.pick(&[0, 5, 30]),
        remounts: *rng.pick(&[0, 0, 3]),
        ordered: *rng.pick(&[0, 5, 25, 60]),
        reuse: *rng.pick(&[0, 10, 40]),
        space: *rng.pick(&[0, 30, 60, 100]),
        delays: *rng.pick(&[0, 10, 50]),
        area_blocks: *rng.pick(&[128, 192]),
        dirty_pages: *rng.pick(&[1, 8, 4096]),
    };
    let faults = faults(&machines, calls, &mut rng);
    Scenario {
        seed: rng.u64() >> 1,
        machines,
        volume: VolumeSpec {
            streams: *rng.pick(&[2, 3, 3, 4]),
            slots: *rng.pick(&[64, 128, 256]),
            unit,
            first: FIRST,
            request_blocks: *rng.pick(&[4, 8, 32]),
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
        fs: Some(fs),
        device: None,
    }
}

fn machines(rng: &mut Rng) -> Vec<MachineSpec> {
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
        garbage: rng.one_in(2),
        at_once,
        latency_us,
        slow,
        model: None,
    };
    (0..rng.range(1, 2))
        .map(|_| MachineSpec {
            log,
            drives: (0..rng.range(1, 2)).map(|_| drive(rng)).collect(),
            blocks: 0,
            cores: *rng.pick(&[1, 1, 2]),
            logless: false,
            foreign: false,
        })
        .collect()
}

fn client(rng: &mut Rng) -> ClientSpec {
    ClientSpec {
        depth: *rng.pick(&[2, 8, 32]),
        kept_blocks: *rng.pick(&[512, 4096]),
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

/// The events of most calls of the program are fewer than this.
const EVENTS_OF_A_CALL: u64 = 40;
/// An opening of the volume and a mount take about this number of events.
const EVENTS_OF_A_MOUNT: u64 = 1_000;

/// A moment soon after the file system has submitted a group.
fn group(calls: u32, rng: &mut Rng) -> When {
    let kind = *rng.pick(&[
        GroupKind::Data,
        GroupKind::Record,
        GroupKind::Journal,
        GroupKind::Commit,
        GroupKind::Home,
    ]);
    let nth = rng.below(u64::from(calls / 4) + 4) as u32;
    When::Group(kind, nth, rng.below(EVENTS_OF_A_CALL) as u32)
}

fn faults(machines: &[MachineSpec], calls: u32, rng: &mut Rng) -> Vec<Fault> {
    let mut faults = Vec::new();
    for _ in 0..*rng.pick(&[0, 1, 2, 3, 5, 8]) {
        let call = rng.below(calls.into()) as u32;
        let when = match rng.below(10) {
            0 => When::Event(rng.below(EVENTS_OF_A_MOUNT) as u32),
            1 | 2 => When::Recovery(rng.below(4) as u32, rng.below(EVENTS_OF_A_MOUNT) as u32),
            3..=5 => group(calls, rng),
            _ => When::Call(call, rng.below(EVENTS_OF_A_CALL) as u32),
        };
        let what = match rng.below(10) {
            0..=4 => crash(machines, rng),
            5 | 6 => cut(rng),
            7 => partition(machines, rng),
            _ => What::KillClient { down_us: *rng.pick(&[10, 1_000]) },
        };
        faults.push(Fault { when, what });
        // Another one while the first is being handled.
        if rng.percent(40) {
            let after = rng.below(150) as u32;
            let when = match rng.below(3) {
                0 => When::Replay(0, after / 2),
                1 => When::Call(call, EVENTS_OF_A_CALL as u32 + after),
                _ => When::Recovery(rng.range(1, 2) as u32, after),
            };
            faults.push(Fault { when, what: crash(machines, rng) });
        }
    }
    faults
}

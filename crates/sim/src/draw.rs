//! Draws a scenario from a seed: topology, workload, options and faults.
//!
//! The scenario of a seed may change from version to version. A [`Scenario`] that was written to a
//! file does not change.

use riopipe_session::initiator::stream_driver::MERGE_FROM;

use crate::drive::{DriveFault, DriveSpec, ModelKind};
use crate::log_store::LogStoreKind;
use crate::network::NetSpec;
use crate::oracle::NO_LOSS_MS;
use crate::rng::Rng;
use crate::scenario::{
    ClientSpec, Ends, Engine, Fault, MachineSpec, Op, Place, Scenario, SecondVolumeSpec, Step,
    VolumeSpec, What, When, WriteOp,
};

mod coincidence;
mod device;
mod engines;
mod extensions;
mod file_system;
mod followers;
mod foreign;
mod records;

pub use device::draw_device;
pub use file_system::{
    draw_file_system, draw_file_system_on_barrier, draw_file_system_on_horae,
    draw_file_system_on_opimq,
};

/// The theme of a run about logs that are older than they should be.
const OLD_LOGS: u64 = 7;
/// The theme of a run in which streams are opened anew while answers come late.
const LATE_ANSWERS: u64 = 10;
/// The theme of a run in which plain hosts write and read beside the owner.
const PLAIN_HOSTS: u64 = 6;

/// A theme that makes no difference to the steps.
const OTHER: u64 = 0;

/// The number of themes. A run has one theme (some themes have a name), or a mix of all.
const THEMES: u64 = 18;
/// The power is cut while the damage of the last power cut is being repaired.
const REPEATED_CUTS: u64 = 11;
/// A target dies just after a take-over.
const CRASH_AFTER_TAKE_OVER: u64 = 12;
/// Streams read one another's blocks while targets crash.
const READS: u64 = 13;
/// The same blocks are written again and again, and a target crashes while they are made durable.
const OVERWRITES: u64 = 14;
/// A drive loses its power-loss protection.
const UNPROTECTED: u64 = 15;
/// FLUSHes fail while other FLUSHes succeed.
const FLUSHES: u64 = 16;
/// The owner is unreachable for a moment.
const UNREACHABLE: u64 = 17;

/// Separates the random numbers for the engine from those of the seed.
const ENGINES: u64 = 0x656e_6769_6e65_7300;

/// The way in which the scenario of a seed is drawn, if the volume is to have this engine. There are
/// no scenarios with a coincidence among them, since each of those was made for one engine, except
/// those with dual-stream writes of engine `opimq`.
#[must_use]
pub fn draw_with(engine: Engine) -> fn(u64) -> Scenario {
    match engine {
        Engine::Rio => |seed| general(seed, Some(Engine::Rio)),
        Engine::Sync => |seed| general(seed, Some(Engine::Sync)),
        Engine::Linux => |seed| general(seed, Some(Engine::Linux)),
        Engine::Horae => |seed| general(seed, Some(Engine::Horae)),
        Engine::Barrier => |seed| general(seed, Some(Engine::Barrier)),
        Engine::Opimq => |seed| {
            let duals = followers::draw(seed, true);
            duals.unwrap_or_else(|| general(seed, Some(Engine::Opimq)))
        },
        Engine::None => |seed| general(seed, Some(Engine::None)),
    }
}

/// The scenario of a seed.
#[must_use]
pub fn draw(seed: u64) -> Scenario {
    let special = foreign::draw(seed)
        .or_else(|| extensions::draw(seed))
        .or_else(|| records::draw(seed))
        .or_else(|| coincidence::draw(seed))
        .or_else(|| followers::draw(seed, false));
    special.unwrap_or_else(|| general(seed, None))
}

/// A scenario without a coincidence that is arranged, with this engine or a drawn one.
fn general(seed: u64, engine: Option<Engine>) -> Scenario {
    let mut rng = Rng::new(seed);
    let theme = rng.below(THEMES);
    let mut machines = machines(&mut rng);
    grow(&mut machines, &mut Rng::new(seed ^ CLUSTERS));
    fit_machines(theme, &mut machines, &mut rng);
    let mut volume = volume(&machines, &mut rng);
    match theme {
        CRASH_AFTER_TAKE_OVER => volume.streams = 4,
        FLUSHES => volume.streams = *rng.pick(&[3, 4]),
        REPEATED_CUTS => volume.slots = *rng.pick(&[6, 8]),
        _ => {}
    }
    let mut client = client(&mut rng);
    let net = net(&mut rng);
    let mut steps = steps(&machines, &volume, theme, &mut rng);
    if theme == LATE_ANSWERS {
        client.wait_limit_us = 5_000;
        let often = *rng.pick(&[5, 10, 20]);
        for step in &mut steps {
            if rng.percent(often) {
                step.op = Op::Restart;
            }
        }
    }
    let faults = faults(theme, &mut machines, &volume, steps.len(), &mut rng);
    let (seed_of_run, logs, second_volume) = (rng.u64() >> 1, Vec::new(), None);
    let mut scenario = Scenario {
        seed: seed_of_run,
        machines,
        volume,
        client,
        net,
        steps,
        faults,
        logs,
        second_volume,
        fs: None,
        device: None,
    };
    // The engine has random numbers of its own, so the other drawings of a seed do not depend on
    // it.
    engines::choose(&mut scenario, engine, &mut Rng::new(seed ^ ENGINES));
    if scenario.volume.engine == Engine::Horae
        && let Some(special) = coincidence::redirected::draw(seed)
    {
        return special;
    }
    if scenario.volume.engine.is_logged() {
        let Scenario { machines, volume, .. } = &mut scenario;
        scenario.second_volume =
            draw_second_volume(machines, volume, &mut Rng::new(seed ^ SECOND_VOLUMES));
    }
    choose_models(&mut scenario.machines, &mut Rng::new(seed ^ MODELS));
    engines::choose_models(&mut scenario, &mut Rng::new(seed ^ DRIVE_ORDERS));
    engines::choose_orderless(&mut scenario, &mut Rng::new(seed ^ ORDERLESS));
    extensions::choose(&mut scenario, &mut Rng::new(seed ^ EXTENSIONS));
    followers::choose(&mut scenario, seed);
    scenario.client.merge_from = *Rng::new(seed ^ MERGES).pick(&[0, 0, 3, MERGE_FROM]);
    scenario
}

/// One of this number of runs has a large cluster.
const LARGE_ONE_IN: u64 = 25;
/// The number of machines of the largest cluster.
const MACHINES_MAX: u64 = 8;

/// Gives a few runs many machines, with several drives each.
fn grow(machines: &mut Vec<MachineSpec>, rng: &mut Rng) {
    if !rng.one_in(LARGE_ONE_IN) {
        return;
    }
    let count = rng.range(4, MACHINES_MAX) as usize;
    while machines.len() < count {
        let mut machine = machines[rng.index(machines.len())].clone();
        let drive = machine.drives[0];
        machine.drives = vec![drive; *rng.pick(&[1, 2, 2, 3])];
        machines.push(machine);
    }
}

/// Gives some machines modelled SSDs, in one of six runs.
fn choose_models(machines: &mut [MachineSpec], rng: &mut Rng) {
    if !rng.one_in(6) {
        return;
    }
    for machine in machines {
        let is_modelled = rng.one_in(2);
        for drive in machine.drives.iter_mut().filter(|_| is_modelled) {
            // The writes of these runs have no order, so the drive's own order must not matter.
            drive.model = Some(match (drive.plp, rng.below(4)) {
                (true, _) => ModelKind::Optane,
                (false, 0) => ModelKind::FlashBarrier,
                (false, 1) => ModelKind::FlashOp,
                (false, _) => ModelKind::Flash,
            });
        }
    }
}

/// Separates the random numbers for the second volume. So the older drawings of a seed stay the
/// same.
const SECOND_VOLUMES: u64 = 0x6e65_6967_6862_6f75;
/// The same for large clusters.
const CLUSTERS: u64 = 0x636c_7573_7465_7273;
/// The same for modelled SSDs.
const MODELS: u64 = 0x6d6f_6465_6c73_0000;
/// The same for drives that keep an order.
const DRIVE_ORDERS: u64 = 0x6f72_6465_7273_0000;
/// The same for streams without an order.
const ORDERLESS: u64 = 0x6f72_6465_726c_6573;
/// The same for the merging of groups.
const MERGES: u64 = 0x6d65_7267_6573_0000;
/// The same for writes that extend.
const EXTENSIONS: u64 = 0x6578_7465_6e64_0000;

/// Adds a second volume with a drive on each machine, in one of six runs.
fn draw_second_volume(
    machines: &mut [MachineSpec],
    first: &VolumeSpec,
    rng: &mut Rng,
) -> Option<SecondVolumeSpec> {
    if !rng.one_in(6) {
        return None;
    }
    let drives: Vec<usize> = machines.iter().map(|machine| machine.drives.len()).collect();
    for machine in machines.iter_mut() {
        machine.drives.push(machine.drives[0]);
    }
    let volume = VolumeSpec {
        streams: *rng.pick(&[1, 1, 2]),
        unit: *rng.pick(&[1, 4]),
        request_blocks: *rng.pick(&[2, 8]),
        members: drives.into_iter().enumerate().collect(),
        start: 0,
        // All partitions have one size: the simulated log keeps each at its own place.
        ..first.clone()
    };
    let mut steps = steps(machines, &volume, OTHER, rng);
    steps.truncate(rng.range(10, 40) as usize);
    Some(SecondVolumeSpec { volume, steps, lives: rng.below(6) as u32 })
}

/// Adapts the machines to a theme.
fn fit_machines(theme: u64, machines: &mut [MachineSpec], rng: &mut Rng) {
    let log = match theme {
        REPEATED_CUTS | OVERWRITES => LogStoreKind::Dax,
        READS => *rng.pick(&[LogStoreKind::Dax, LogStoreKind::Block, LogStoreKind::Cached]),
        _ => return,
    };
    // Reads take time, and the data that a crash destroys is not replayed yet.
    let slow = theme == READS && rng.one_in(2);
    for machine in machines {
        machine.log = log;
        for drive in &mut machine.drives {
            match theme {
                READS => drive.plp = false,
                OVERWRITES => drive.plp = true,
                _ => {}
            }
            if slow {
                (drive.latency_us, drive.slow, drive.at_once) = (300, 40, 0);
            }
        }
    }
}

fn machines(rng: &mut Rng) -> Vec<MachineSpec> {
    let count = *rng.pick(&[1, 1, 2, 2, 2, 2, 3]);
    let log = *rng.pick(&[
        LogStoreKind::Dax,
        LogStoreKind::Dax,
        LogStoreKind::Block,
        LogStoreKind::Cached,
        LogStoreKind::File,
    ]);
    let plp = *rng.pick(&[0, 0, 50, 100]);
    let garbage = *rng.pick(&[0, 100]);
    let at_once = *rng.pick(&[0, 0, 10, 60, 100]);
    let latency_us = *rng.pick(&[10, 60, 60, 300]);
    let slow = *rng.pick(&[0, 0, 3, 20]);
    let blocks = 8 + *rng.pick(&[12, 24, 48, 96]);
    let spec = |rng: &mut Rng| DriveSpec {
        plp: rng.percent(plp),
        garbage: rng.percent(garbage),
        at_once,
        latency_us,
        slow,
        model: None,
    };
    (0..count)
        .map(|_| {
            let drives = *rng.pick(&[1, 1, 2]);
            let drives = (0..drives).map(|_| spec(rng)).collect();
            MachineSpec {
                log,
                drives,
                blocks,
                cores: *rng.pick(&[1, 1, 2, 3]),
                logless: false,
                foreign: false,
            }
        })
        .collect()
}

fn volume(machines: &[MachineSpec], rng: &mut Rng) -> VolumeSpec {
    let mut members = Vec::new();
    for (at, machine) in machines.iter().enumerate() {
        members.extend((0..machine.drives.len()).map(|drive| (at, drive)));
    }
    for at in (1..members.len()).rev() {
        members.swap(at, rng.index(at + 1));
    }
    let start = match rng.below(8) {
        0 => (1 << 32) - 1 - rng.below(24),
        1 => (1 << 31) - rng.below(24),
        2 => (3 << 32) - 1 - rng.below(24),
        _ => 0,
    };
    VolumeSpec {
        streams: *rng.pick(&[1, 1, 2, 2, 3, 4]),
        slots: *rng.pick(&[6, 8, 12, 16, 32, 64]),
        unit: *rng.pick(&[1, 2, 4, 12]),
        first: 8,
        request_blocks: *rng.pick(&[1, 2, 4, 8, 8, 12]),
        members,
        start,
        engine: Engine::Rio,

        prepare: 0,
        orderless: Vec::new(),
    }
}

fn client(rng: &mut Rng) -> ClientSpec {
    ClientSpec {
        depth: *rng.pick(&[1, 2, 4, 8, 16, 32]),
        kept_blocks: *rng.pick(&[8, 16, 64, 1024]),
        merge: rng.percent(75),
        merge_from: 0,
        loss_ms: if rng.percent(75) { NO_LOSS_MS } else { *rng.pick(&[0, 5, 20, 60]) },
        keep_alive_ms: *rng.pick(&[0, 0, 100, 300]),
        digests: rng.percent(8),
        retry_us: *rng.pick(&[0, 100, 3_000]),
        think_ns: *rng.pick(&[0, 5_000, 40_000, 200_000]),
        wait_limit_us: 0,
        not_calling_us: *rng.pick(&[200, 2_000, 10_000, 50_000]),
        flush_us: *rng.pick(&[1_000, 20_000, 100_000, 1_000_000]),
    }
}

fn net(rng: &mut Rng) -> NetSpec {
    let delay_min = *rng.pick(&[500, 5_000, 20_000]);
    let delay_max = delay_min + *rng.pick(&[0, 10_000, 80_000, 300_000]);
    NetSpec { delay_min, delay_max, split: *rng.pick(&[0, 5, 40]) }
}

fn steps(machines: &[MachineSpec], volume: &VolumeSpec, theme: u64, rng: &mut Rng) -> Vec<Step> {
    let members = volume.members.len() as u32;
    let per_member = (machines[0].blocks - volume.first) / volume.unit * volume.unit;
    let blocks = members * per_member;
    let count = rng.range(15, 110);
    let durable = if theme == FLUSHES { 60 } else { *rng.pick(&[3, 15, 40]) };
    let in_place = *rng.pick(&[0, 15, 15, 60]);
    let discard = *rng.pick(&[0, 5, 20]);
    let wait = *rng.pick(&[0, 5, 20]);
    let read = *rng.pick(&[0, 4, 20, 40]);
    let pause = *rng.pick(&[0, 1, 3]);
    let longest = *rng.pick(&[1, 2, 4, 8, 16]);
    let most = *rng.pick(&[1, 2, 4]);
    let sequential = rng.percent(40);
    let shared = theme == READS || rng.percent(50);
    // Some streams write the same few blocks over and over.
    let hot = theme == OVERWRITES || rng.one_in(if theme == READS { 2 } else { 6 });
    let in_place = if hot { 80 } else { in_place };
    let streams = u32::from(volume.streams);
    let mut next = vec![0; volume.streams.into()];
    let mut steps = Vec::new();
    for _ in 0..count {
        let stream = rng.below(u64::from(streams)) as u16;
        let area = if shared || blocks < 2 * streams {
            (0, blocks)
        } else {
            (u32::from(stream) * (blocks / streams), blocks / streams)
        };
        let area = if hot {
            (u32::from(stream) * blocks / streams, 2.min(blocks / streams))
        } else {
            area
        };
        let op = match rng.below(100) {
            x if x < read => {
                let (at, len) = extent(area, longest, rng);
                Op::Read(at, len)
            }
            x if x < read + wait => rng.pick(&[Op::WaitDurable, Op::WaitComplete]).clone(),
            x if x < read + wait + pause => Op::Pause(*rng.pick(&[100, 2_000, 60_000, 120_000])),
            _ => {
                let writes = (0..rng.range(1, most)).map(|_| {
                    let (mut at, len) = extent(area, longest, rng);
                    let cursor = &mut next[usize::from(stream)];
                    if sequential {
                        at = area.0 + *cursor % area.1;
                        *cursor += len;
                    }
                    let place = match rng.below(100) {
                        x if x < in_place => Place::InPlace,
                        x if x < in_place + discard => Place::Discard,
                        _ => Place::Fresh,
                    };
                    WriteOp(at, len, place)
                });
                Op::Group { writes: writes.collect(), durable: rng.percent(durable) }
            }
        };
        steps.push(Step { stream, op: op.clone() });
    }
    steps
}

fn extent(area: (u32, u32), longest: u32, rng: &mut Rng) -> (u32, u32) {
    let len = rng.range(1, u64::from(longest)) as u32;
    (area.0 + rng.below(u64::from(area.1)) as u32, len)
}

/// Draws the faults. Some runs have one theme.
fn faults(
    theme: u64,
    machines: &mut [MachineSpec],
    volume: &VolumeSpec,
    steps: usize,
    rng: &mut Rng,
) -> Vec<Fault> {
    let count = *rng.pick(&[0, 1, 1, 2, 2, 3, 4, 6]);
    let last = 250 + 14 * steps as u64;
    let mut faults: Vec<Fault> = Vec::new();
    if theme == 4 {
        // Streams fail, and their undo is interrupted again and again.
        let machine = machine(machines, rng);
        let drive = rng.index(machines[machine].drives.len());
        let fault = *rng.pick(&[DriveFault::Write, DriveFault::Full]);
        for drive in &mut machines[machine].drives {
            // The zeroes land after the attempt that asked for them has ended.
            (drive.latency_us, drive.slow) = (300, 40);
        }
        let when = When::Event(rng.range(60, last / 2) as u32);
        faults.push(Fault { when, what: What::Drive { machine, drive, fault } });
        for nth in 0..rng.range(1, 4) as u32 {
            let when = When::Undo(nth, rng.below(8) as u32);
            faults.push(Fault { when, what: What::CutUndo });
        }
    }
    if theme == 5 {
        // The data that a target had stored when it was killed is lost with the power soon after.
        let machine = machine(machines, rng);
        let at = rng.range(60, last) as u32;
        let (effects, down_us) = (rng.below(16) as u32, *rng.pick(&[10, 200]));
        let kill = What::Kill { machine, effects, fences: true, down_us };
        faults.push(Fault { when: When::Event(at), what: kill });
        let when = When::Event(at + rng.range(4, 250) as u32);
        let fences = rng.one_in(2);
        let what = What::PowerCut { machine, effects: rng.below(6) as u32, fences, down_us };
        faults.push(Fault { when, what });
    }
    if theme == LATE_ANSWERS {
        for _ in 0..rng.range(1, 4) {
            let when = When::Event(rng.range(60, last) as u32);
            let (by_us, for_us) = (*rng.pick(&[6_000, 8_000, 9_500]), 40_000);
            let what = What::Lag { machine: machine(machines, rng), by_us, for_us };
            faults.push(Fault { when, what });
        }
    }
    if theme == UNREACHABLE {
        // The owner is unreachable for a moment, at work or when it is idle. A second initiator
        // waits for the volume, and a plain host writes beside the owner.
        let at = if rng.one_in(2) { u32::MAX } else { rng.range(60, last) as u32 };
        let for_us = *rng.pick(&[2_000, 40_000, 200_000]);
        let standby = rng.one_in(2).then_some(What::Standby);
        let machine = machine(machines, rng);
        let drive = rng.index(machines[machine].drives.len());
        let data = u64::from(machines[machine].blocks - volume.first);
        let lba = volume.first + rng.below(data) as u32;
        let plain_host = What::PlainHost { machine, drive, lba, more: 0, forgets: false };
        let kinds = standby.into_iter().chain([What::Unreachable { for_us }, plain_host]);
        faults.extend(kinds.map(|what| Fault { when: When::Event(at), what }));
    }
    if theme == PLAIN_HOSTS {
        // The volume is released, and plain hosts write and read.
        for _ in 0..rng.range(1, 3) {
            let machine = machine(machines, rng);
            let drive = rng.index(machines[machine].drives.len());
            let lba = rng.below(u64::from(machines[machine].blocks)) as u32;
            let (more, forgets) = (rng.range(2, 12) as u32, false);
            let what = What::PlainHost { machine, drive, lba, more, forgets };
            faults.push(Fault { when: When::Event(rng.range(60, last) as u32), what });
        }
        let for_us = *rng.pick(&[0, 1_000, 5_000, 20_000]);
        let when = When::Event(rng.range(60, last) as u32);
        faults.push(Fault { when, what: What::Release { for_us } });
    }
    if theme == UNPROTECTED {
        // A drive has no power-loss protection from the start, or loses it.
        let machine = machine(machines, rng);
        machines[machine].drives.iter_mut().for_each(|drive| drive.plp = true);
        let drive = rng.index(machines[machine].drives.len());
        let down_us = *rng.pick(&[10, 200, 5_000]);
        let when = When::Event(rng.range(60, last / 2) as u32);
        faults.push(Fault { when, what: What::Unprotect { machine, drive, down_us } });
    }
    if theme == FLUSHES {
        // FLUSHes of one drive fail while those of others succeed. Each reactor receives its own
        // results.
        let machine = machine(machines, rng);
        let drive = rng.index(machines[machine].drives.len());
        machines[machine].cores = *rng.pick(&[2, 3]);
        let spec = &mut machines[machine].drives[drive];
        (spec.plp, spec.at_once, spec.latency_us) = (false, 0, 60);
        for _ in 0..rng.range(3, 8) {
            let when = When::Event(rng.range(60, last) as u32);
            let fault = DriveFault::Flush;
            faults.push(Fault { when, what: What::Drive { machine, drive, fault } });
        }
    }
    faults.append(&mut themed(theme, machines, last, rng));
    if theme == OLD_LOGS {
        old_logs(machines, last, &mut faults, rng);
    }
    for _ in 0..count {
        let when = When::Event(rng.range(60, last) as u32);
        let what = match theme {
            0 => crash(machines, rng),
            1 => cut(rng),
            2 => medium(machines, rng),
            3 => rare(machines, volume, rng),
            _ => match rng.below(10) {
                0..=4 => crash(machines, rng),
                5 | 6 => cut(rng),
                7 => medium(machines, rng),
                8 => partition(machines, rng),
                _ => rare(machines, volume, rng),
            },
        };
        faults.push(Fault { when, what });
        // Another fault while the first is being handled.
        if rng.percent(35) {
            let after = *rng.pick(&[10, 40, 80, 150, 250]);
            let after = rng.below(after) as u32;
            let nth = if rng.percent(40) { 0 } else { rng.range(1, 2) as u32 };
            let when =
                if rng.one_in(3) { When::Replay(0, after / 2) } else { When::Recovery(nth, after) };
            let what = if rng.one_in(4) { medium(machines, rng) } else { crash(machines, rng) };
            faults.push(Fault { when, what });
        }
    }
    faults
}

/// The faults of a theme.
fn themed(theme: u64, machines: &[MachineSpec], last: u64, rng: &mut Rng) -> Vec<Fault> {
    let mut faults = Vec::new();
    let machine = machine(machines, rng);
    let at = rng.range(60, last) as u32;
    let mut add = |at: u32, what| faults.push(Fault { when: When::Event(at), what });
    match theme {
        REPEATED_CUTS => {
            // The power is cut again before the damage of the last power cut is repaired.
            let mut at = at;
            for _ in 0..rng.range(2, 5) {
                let (effects, down_us) = (rng.below(10) as u32, 10);
                add(at, What::PowerCut { machine, effects, fences: true, down_us });
                at += rng.range(8, 140) as u32;
            }
        }
        CRASH_AFTER_TAKE_OVER => {
            // Streams resume just before the volume gets a new owner. Then a target dies.
            let kill = What::Kill { machine, effects: 0, fences: false, down_us: 200 };
            add(at, if rng.percent(75) { kill } else { cut(rng) });
            add(at + rng.range(15, 130) as u32, What::TakeOver { for_us: 40_000 });
            let (effects, fences) = (rng.below(30) as u32, rng.one_in(2));
            let kill = What::Kill { machine, effects, fences, down_us: 200 };
            let when = When::Recovery(1, rng.range(5, 140) as u32);
            faults.push(Fault { when, what: kill });
        }
        READS => {
            let cuts = *rng.pick(&[25, 85]);
            let mut at = 60;
            for _ in 0..rng.range(3, 8) {
                at += rng.range(20, last / 4) as u32;
                add(at, if rng.percent(cuts) { cut(rng) } else { crash(machines, rng) });
            }
        }
        OVERWRITES => {
            let fences = rng.percent(70);
            let effects = if fences { rng.below(24) as u32 } else { 0 };
            let down_us = 10;
            add(
                at,
                match rng.below(3) {
                    0 => cut(rng),
                    1 => What::Kill { machine, effects, fences, down_us },
                    _ => What::PowerCut { machine, effects, fences, down_us },
                },
            );
            if rng.one_in(2) {
                let when = When::Replay(0, rng.below(14) as u32);
                let what = What::BlackOut { down_us: 200 };
                faults.push(Fault { when, what });
            }
        }
        _ => {}
    }
    faults
}

/// Logs that are older than they should be, as a whole or in part (trap T24).
fn old_logs(machines: &mut [MachineSpec], last: u64, faults: &mut Vec<Fault>, rng: &mut Rng) {
    let machine = machine(machines, rng);
    let at = rng.range(60, last / 2) as u32;
    let mut add = |after: u64, what| {
        faults.push(Fault { when: When::Event(at + after as u32), what });
    };
    let down_us = *rng.pick(&[10, 200, 1_000]);
    if rng.one_in(2) {
        // An older copy is put back, once the volume has another owner.
        add(0, What::CopyLog { machine });
        add(rng.range(10, 80), What::KillClient { down_us });
        add(rng.range(160, 600), What::OldLog { machine });
        return;
    }
    // A target with a mapped log stops (clean stop), or nearly, and its power is cut later.
    machines.iter_mut().for_each(|machine| machine.log = LogStoreKind::File);
    let cut = if rng.one_in(2) { 0 } else { rng.range(1, 4) as u32 };
    add(0, What::Stop { machine, off: rng.one_in(2), cut, down_us });
    add(rng.range(60, 500), What::PowerCut { machine, effects: 0, fences: false, down_us });
}

fn machine(machines: &[MachineSpec], rng: &mut Rng) -> usize {
    rng.index(machines.len())
}

fn crash(machines: &[MachineSpec], rng: &mut Rng) -> What {
    let down_us = *rng.pick(&[10, 200, 1_000, 5_000, 30_000]);
    let machine = machine(machines, rng);
    let (effects, fences) = match rng.below(4) {
        0 => (0, false),
        1 => (rng.range(1, 24) as u32, false),
        _ => (rng.below(16) as u32, true),
    };
    match rng.below(12) {
        11 => What::Stop { machine, off: rng.one_in(2), cut: 0, down_us },
        0..=2 => What::Kill { machine, effects, fences, down_us },
        3..=6 => What::PowerCut { machine, effects, fences, down_us },
        7 => What::KillClient { down_us },
        8 => What::KillAll { down_us },
        _ => What::BlackOut { down_us },
    }
}

fn cut(rng: &mut Rng) -> What {
    let nth = rng.below(64) as u32;
    match rng.below(4) {
        0 => What::Stall {
            nth,
            up: rng.one_in(2),
            for_us: *rng.pick(&[100, 2_000, 20_000, 150_000]),
        },
        1 => What::Cut { nth, ends: Ends::Both },
        2 => What::Cut { nth, ends: Ends::Client },
        _ => What::Cut { nth, ends: Ends::Server },
    }
}

fn partition(machines: &[MachineSpec], rng: &mut Rng) -> What {
    let for_us = *rng.pick(&[0, 500, 5_000, 40_000, 200_000]);
    match rng.below(5) {
        0 | 1 => What::TakeOver { for_us },
        2 => What::Standby,
        _ => What::Partition { machine: machine(machines, rng), for_us },
    }
}

fn medium(machines: &[MachineSpec], rng: &mut Rng) -> What {
    let machine = machine(machines, rng);
    let drive = rng.index(machines[machine].drives.len());
    match rng.below(8) {
        0 => What::Log { machine, fences: rng.below(30) as u32 },
        1 => {
            What::Drive { machine, drive, fault: *rng.pick(&[DriveFault::Full, DriveFault::Read]) }
        }
        2..=4 => What::Drive { machine, drive, fault: DriveFault::Flush },
        _ => What::Drive { machine, drive, fault: DriveFault::Write },
    }
}

fn rare(machines: &[MachineSpec], volume: &VolumeSpec, rng: &mut Rng) -> What {
    let machine = machine(machines, rng);
    match rng.below(4) {
        0 => What::BlankLog { machine },
        1 => {
            let drive = rng.index(machines[machine].drives.len());
            let data = u64::from(machines[machine].blocks - volume.first);
            let lba = volume.first + rng.below(data) as u32;
            What::PlainHost { machine, drive, lba, more: *rng.pick(&[0, 0, 4]), forgets: false }
        }
        2 => What::TakeOver { for_us: *rng.pick(&[0, 500, 5_000, 40_000]) },
        // Longer than the loss timeout of an initiator: a member is missing (trap T20).
        _ => What::PowerCut { machine, effects: 0, fences: false, down_us: 60_000 },
    }
}

//! The engine of a run, and the faults that fit an engine without an ordering log.

use riopipe_order::write_order::DriveOrder;

use crate::drive::ModelKind;
use crate::rng::Rng;
use crate::scenario::{Engine, Fault, Scenario, What};

/// Of 100 runs, the number that have engine `sync`, `linux`, `none`, `horae`, `barrier` or `opimq`.
const SYNC: u64 = 12;
const LINUX: u64 = 10;
const NONE: u64 = 8;
const HORAE: u64 = 12;
const BARRIER: u64 = 8;
const OPIMQ: u64 = 8;

/// Draws the engine of a scenario that was drawn for `rio`, and adapts the rest. With `wanted` it is
/// that engine.
pub(super) fn choose(scenario: &mut Scenario, wanted: Option<Engine>, rng: &mut Rng) {
    let drawn = match rng.below(100) {
        x if x < SYNC => Engine::Sync,
        x if x < SYNC + LINUX => Engine::Linux,
        x if x < SYNC + LINUX + NONE => Engine::None,
        x if x < SYNC + LINUX + NONE + HORAE => Engine::Horae,
        x if x < SYNC + LINUX + NONE + HORAE + BARRIER => Engine::Barrier,
        x if x < SYNC + LINUX + NONE + HORAE + BARRIER + OPIMQ => Engine::Opimq,
        _ => Engine::Rio,
    };
    let engine = wanted.unwrap_or(drawn);
    set(scenario, engine);
    if engine == Engine::Horae {
        let blocks = *rng.pick(&[0, 2, 4, 8, 8, 16, 64]);
        redirect(scenario, blocks);
    }
    if engine.is_logged() {
        return;
    }
    let logless = *rng.pick(&[0, 50, 100]);
    for machine in &mut scenario.machines {
        machine.logless = rng.percent(logless);
    }
    scenario.faults.retain_mut(fits);
}

/// Gives the machines drives that keep the order which the engine needs.
pub(super) fn choose_models(scenario: &mut Scenario, rng: &mut Rng) {
    let needed = scenario.volume.engine.kind().capabilities().drive_order;
    for drive in scenario.machines.iter_mut().flat_map(|machine| &mut machine.drives) {
        drive.model = match (needed, drive.plp) {
            (DriveOrder::None, _) => continue,
            (DriveOrder::Barrier, false) => Some(ModelKind::FlashBarrier),
            (DriveOrder::Barrier, true) => Some(ModelKind::OptaneBarrier),
            (DriveOrder::Epochs, false) if rng.one_in(3) => Some(ModelKind::FlashOpSmall),
            (DriveOrder::Epochs, false) => Some(ModelKind::FlashOp),
            (DriveOrder::Epochs, true) => Some(ModelKind::OptaneOp),
        };
    }
}

/// Removes the order of some streams, in one of three runs of engine `barrier`. At least one
/// stream keeps it.
pub(super) fn choose_orderless(scenario: &mut Scenario, rng: &mut Rng) {
    let volume = &mut scenario.volume;
    if volume.engine != Engine::Barrier || !rng.one_in(3) {
        return;
    }
    let ordered = rng.below(u64::from(volume.streams)) as u16;
    volume.orderless = (0..volume.streams).filter(|id| *id != ordered && rng.one_in(2)).collect();
}

/// Sets the engine of a scenario that was drawn for `rio`.
pub(super) fn set(scenario: &mut Scenario, engine: Engine) {
    scenario.volume.engine = engine;
    if engine.is_logged() && !engine.replays() {
        // Without replay there is no reason to wait for a target.
        scenario.client.loss_ms = 0;
    }
}

/// Gives the volume a prepare area with so many blocks for each stream, before its data area.
pub(super) fn redirect(scenario: &mut Scenario, blocks: u32) {
    let volume = &mut scenario.volume;
    let prepare = blocks * u32::from(volume.streams);
    let first = volume.first;
    (volume.first, volume.prepare) = (first + prepare, prepare);
    for machine in &mut scenario.machines {
        machine.blocks += prepare;
    }
    for fault in &mut scenario.faults {
        if let What::PlainHost { lba, .. } = &mut fault.what
            && *lba >= first
        {
            *lba += prepare;
        }
    }
}

/// Whether a fault makes sense where no log is written. Adapts the faults that strike in a fence.
fn fits(fault: &mut Fault) -> bool {
    match &mut fault.what {
        What::Kill { fences, .. } | What::PowerCut { fences, .. } => *fences = false,
        What::CopyLog { .. } | What::OldLog { .. } | What::BlankLog { .. } | What::Log { .. } => {
            return false;
        }
        _ => {}
    }
    true
}

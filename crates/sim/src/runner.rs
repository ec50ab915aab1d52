//! Runs many seeds on several threads. Each run is its own world, and is the same on every machine.

use std::collections::BTreeMap;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::thread;
use std::time::{Duration, Instant};

use riopipe_fs_core::probe as fs_probe;
use riopipe_model::probe as drive_probe;
use riopipe_order::probe::{self, DevicePlant, Plant, Rare};

use crate::attempt::{Bounded, Fault};
use crate::core::Trace;
use crate::device::DeviceCounts;
use crate::draw::draw_with;
use crate::fs::FsCounts;
use crate::oracle::Violation;
use crate::scenario::{Engine, Scenario};
use crate::shrink::shrink;

/// A run of many seeds ends early after this number of failing seeds.
const FAILURES_MAX: u64 = 100;
/// It also ends after this number of seeds that never end: each of them keeps a core busy.
const ENDLESS_MAX: u64 = 8;
/// From this number of seeds on, a rare path that was never taken fails the run.
pub const RARE_SEEDS: u64 = 5_000;
/// Rare paths that no simulated cluster can take, or only in far more seeds than that.
const NOT_SIMULATED: &[Rare] = &[
    // TCP delivers a connection's commands in order. The gate's own tests reorder them.
    Rare::GateEarly,
];
/// The default number of seeds in which a planted bug must be caught.
pub const PLANT_SEEDS: u64 = 3_000;

/// The seeds to run, and the options of the run.
#[derive(Clone, Debug)]
pub struct Plan {
    /// The first seed.
    pub first: u64,
    /// The maximum number of seeds.
    pub seeds: u64,
    /// The number of threads.
    pub jobs: usize,
    /// The maximum duration of the whole run.
    pub time: Option<Duration>,
    /// The maximum duration of one seed's run.
    pub run_limit: Duration,
    /// Once it is set, no further seed is begun.
    pub stop: Arc<AtomicBool>,
    /// Draws the scenario of a seed.
    pub draw: fn(u64) -> Scenario,
    /// The option of `rio sim` that draws these scenarios, with a space behind it.
    pub options: &'static str,
}

/// A seed that failed.
#[derive(Clone, Debug)]
pub struct Failure {
    /// The seed.
    pub seed: u64,
    /// The failure.
    pub fault: Fault,
}

/// The result of many seeds.
#[derive(Clone, Debug, Default)]
pub struct Summary {
    /// The number of seeds run.
    pub seeds: u64,
    /// Seeds that failed, the lowest first.
    pub failures: Vec<Failure>,
    /// The number of failing seeds that never ended.
    pub endless: u64,
    /// The number of events of all runs.
    pub events: u64,
    /// The number of crashes of targets and initiators.
    pub crashes: u64,
    /// The number of recoveries that were begun.
    pub recoveries: u64,
    /// The work of file systems.
    pub fs: FsCounts,
    /// The work of plain devices.
    pub device: DeviceCounts,
    /// The duration.
    pub elapsed: Duration,
    /// For each rare path, the number of times that it was taken.
    pub rare: BTreeMap<&'static str, u64>,
}

impl Summary {
    /// Seeds per second.
    #[must_use]
    pub fn seeds_per_s(&self) -> f64 {
        self.seeds as f64 / self.elapsed.as_secs_f64().max(1e-9)
    }

    /// Rare paths that were never taken.
    #[must_use]
    pub fn never_taken(&self) -> Vec<&'static str> {
        let untaken = self.rare.iter().filter(|(_, count)| **count == 0).map(|(name, _)| *name);
        untaken.filter(|name| !NOT_SIMULATED.iter().any(|rare| rare.name() == *name)).collect()
    }
}

/// Runs seeds. `progress` gets the number of seeds run so far.
pub fn run_seeds(plan: &Plan, progress: &(dyn Fn(u64) + Sync)) -> Summary {
    let start = Instant::now();
    let before = probe::counts();
    let summary = Mutex::new(Summary::default());
    each_seed(plan, start, |seed, bounded| {
        let (outcome, fault) = bounded.run(&(plan.draw)(seed), None);
        let mut summary = summary.lock().unwrap_or_else(PoisonError::into_inner);
        summary.seeds += 1;
        summary.events += outcome.events;
        summary.crashes += outcome.crashes;
        summary.recoveries += outcome.recoveries;
        summary.fs += outcome.fs;
        summary.device += outcome.device;
        if let Some(fault) = fault {
            summary.endless += u64::from(matches!(fault, Fault::Endless(_)));
            summary.failures.push(Failure { seed, fault });
        }
        progress(summary.seeds);
        (summary.failures.len() as u64) < FAILURES_MAX && summary.endless < ENDLESS_MAX
    });
    let mut summary = summary.into_inner().unwrap_or_else(PoisonError::into_inner);
    summary.failures.sort_by_key(|failure| failure.seed);
    summary.elapsed = start.elapsed();
    let counts = probe::counts().into_iter().zip(before).map(|(now, before)| now - before);
    summary.rare = Rare::ALL.iter().map(|rare| rare.name()).zip(counts).collect();
    summary
}

/// Runs each seed of a plan in one of several threads, until `run` returns false.
fn each_seed(plan: &Plan, start: Instant, run: impl Fn(u64, &mut Bounded) -> bool + Sync) {
    let next = AtomicU64::new(0);
    let enough = AtomicBool::new(false);
    let work = || {
        let mut bounded = Bounded::new(plan.run_limit);
        let is_over = || {
            enough.load(Ordering::Relaxed)
                || plan.stop.load(Ordering::Relaxed)
                || plan.time.is_some_and(|max| start.elapsed() >= max)
        };
        while !is_over() {
            let nth = next.fetch_add(1, Ordering::Relaxed);
            if nth >= plan.seeds {
                return;
            }
            if !run(plan.first.wrapping_add(nth), &mut bounded) {
                enough.store(true, Ordering::Relaxed);
            }
        }
    };
    thread::scope(|scope| {
        for _ in 0..plan.jobs.max(1) {
            scope.spawn(work);
        }
    });
}

/// The planted bugs of RioFS that the cluster shows. The tests of `fs-core` show the others.
const FILE_SYSTEM_PLANTS: &[fs_probe::Plant] = &[
    fs_probe::Plant::CommitWhenComplete,
    fs_probe::Plant::BarrierWhenComplete,
    fs_probe::Plant::CommitBeforeData,
    fs_probe::Plant::RecordOnOtherStream,
    fs_probe::Plant::StreamPerWrite,
    fs_probe::Plant::OverwriteFresh,
    fs_probe::Plant::CheckpointFresh,
    fs_probe::Plant::ReuseBeforeCommit,
    fs_probe::Plant::BarrierNotAwaited,
    fs_probe::Plant::ObsoleteApplied,
    fs_probe::Plant::ConvertedBeforeData,
    fs_probe::Plant::CheckpointBeforeCommit,
    fs_probe::Plant::InodeAlwaysFit,
    fs_probe::Plant::HomeBeforeCommitBlock,
    fs_probe::Plant::RetiredBeforeDurable,
    fs_probe::Plant::DataWithoutFollower,
];

/// The planted bugs of a modelled drive that keeps the order of epochs, as far as a cluster shows
/// them. `crates/model/tests/plants` shows all of them.
const DRIVE_PLANTS: &[drive_probe::Plant] = &[
    drive_probe::Plant::FlushOvertakesEpoch,
    drive_probe::Plant::EpochNotWidened,
    drive_probe::Plant::ForcedEpoch,
    drive_probe::Plant::ForcedMapping,
    drive_probe::Plant::EpochEndedEarly,
    drive_probe::Plant::BarrierPassesHeldWrite,
    drive_probe::Plant::CompletedUnmapped,
    drive_probe::Plant::DualMappedByOneStream,
    drive_probe::Plant::SiblingForgotten,
    drive_probe::Plant::SiblingsMappedTwice,
];

/// A planted bug: the removed defence of the cluster, of its drives, or of a file system on it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum PlantedBug {
    /// One of the cluster.
    Cluster(Plant),
    /// One of a modelled drive that keeps the order of epochs.
    Drive(drive_probe::Plant),
    /// One of RioFS.
    FileSystem(fs_probe::Plant),
    /// One of a plain device.
    Device(DevicePlant),
}

/// The users of a volume that have planted bugs of their own.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum User {
    /// The steps of a scenario: the planted bugs are those of the cluster.
    Steps,
    /// RioFS.
    FileSystem,
    /// A plain device.
    Device,
}

impl PlantedBug {
    /// All planted bugs of the cluster, those of RioFS that need the cluster, or those of a plain device.
    #[must_use]
    pub fn all(of: User) -> Vec<Self> {
        match of {
            User::Steps => {
                let of_drives = DRIVE_PLANTS.iter().copied().map(Self::Drive);
                Plant::ALL.iter().copied().map(Self::Cluster).chain(of_drives).collect()
            }
            User::FileSystem => FILE_SYSTEM_PLANTS.iter().copied().map(Self::FileSystem).collect(),
            User::Device => DevicePlant::ALL.iter().copied().map(Self::Device).collect(),
        }
    }

    /// The name: that of the trap first, or `FS`, or `device`.
    #[must_use]
    pub fn name(self) -> String {
        match self {
            Self::Cluster(plant) => plant.name().into(),
            Self::Drive(plant) => format!("drive-{plant:?}"),
            Self::FileSystem(plant) => format!("FS-{plant:?}"),
            Self::Device(plant) => format!("device-{plant}"),
        }
    }

    /// The engine without which it makes no difference, if a run has another engine most often.
    fn engine(self) -> Option<Engine> {
        let needs_epochs = match self {
            Self::Cluster(plant) => plant.name().starts_with("opimq-"),
            Self::Drive(_) => true,
            Self::FileSystem(_) | Self::Device(_) => false,
        };
        needs_epochs.then_some(Engine::Opimq)
    }

    /// Plants it in this process, or takes it out again.
    fn set(self, is_planted: bool) {
        match self {
            Self::Cluster(plant) => probe::plant(is_planted.then_some(plant)),
            Self::Drive(plant) => drive_probe::plant(is_planted.then_some(plant)),
            Self::FileSystem(plant) => fs_probe::plant(is_planted.then_some(plant)),
            Self::Device(plant) => probe::plant_in_device(is_planted.then_some(plant)),
        }
    }
}

/// The result for a planted bug.
#[derive(Clone, Debug)]
pub struct PlantResult {
    /// The planted bug.
    pub plant: PlantedBug,
    /// The number of seeds run.
    pub seeds: u64,
    /// The number of seeds after which the oracle reported a broken promise; `None` if it never
    /// did.
    pub caught_after: Option<u64>,
    /// The seed, and the broken promise.
    pub failure: Option<(u64, Violation)>,
    /// The number of seeds in which the code under test panicked or did not end. They don't count.
    pub other: u64,
    /// The duration.
    pub elapsed: Duration,
}

/// Plants a bug and runs seeds until the oracle reports it. No other run may take place in this
/// process meanwhile.
pub fn try_plant(plant: PlantedBug, plan: &Plan, progress: &(dyn Fn(u64) + Sync)) -> PlantResult {
    let start = Instant::now();
    let (run, other, endless) = (AtomicU64::new(0), AtomicU64::new(0), AtomicU64::new(0));
    let found: Mutex<Option<(u64, Violation)>> = Mutex::new(None);
    let draw = plant.engine().map_or(plan.draw, draw_with);
    plant.set(true);
    each_seed(plan, start, |seed, bounded| {
        let (_, fault) = bounded.run(&draw(seed), None);
        progress(run.fetch_add(1, Ordering::Relaxed) + 1);
        match fault {
            None => true,
            Some(Fault::Broken(violation)) => {
                let mut found = found.lock().unwrap_or_else(PoisonError::into_inner);
                if found.as_ref().is_none_or(|(lowest, _)| seed < *lowest) {
                    *found = Some((seed, violation));
                }
                false
            }
            Some(Fault::Panicked(_)) => {
                other.fetch_add(1, Ordering::Relaxed);
                true
            }
            Some(Fault::Endless(_)) => {
                other.fetch_add(1, Ordering::Relaxed);
                endless.fetch_add(1, Ordering::Relaxed) + 1 < ENDLESS_MAX
            }
        }
    });
    plant.set(false);
    let failure = found.into_inner().unwrap_or_else(PoisonError::into_inner);
    PlantResult {
        plant,
        seeds: run.into_inner(),
        caught_after: failure.as_ref().map(|(seed, _)| seed.wrapping_sub(plan.first) + 1),
        failure,
        other: other.into_inner(),
        elapsed: start.elapsed(),
    }
}

/// A failure in a scenario that was made as small as possible.
#[derive(Clone, Debug)]
pub struct Explained {
    /// The failure in the small scenario.
    pub fault: Fault,
    /// The small scenario.
    pub scenario: Scenario,
    /// The trace of the small scenario.
    pub trace: Vec<String>,
}

/// Makes a failing scenario small, and traces it. Returns `None` if it does not fail.
///
/// A scenario that never ends stays as it is: each attempt at it would cost its time and a core.
#[must_use]
pub fn explain(scenario: &Scenario, fault: &Fault, run_limit: Duration) -> Option<Explained> {
    let mut bounded = Bounded::new(run_limit);
    let mut fails = |scenario: &Scenario| {
        bounded.run(scenario, None).1.is_some_and(|other| other.is_like(fault))
    };
    let small = match fault {
        Fault::Endless(_) => scenario.clone(),
        _ if fails(scenario) => shrink(scenario, &mut fails),
        _ => return None,
    };
    let trace = Trace::default();
    let fault = Bounded::new(run_limit).run(&small, Some(&trace)).1?;
    Some(Explained { fault, scenario: small, trace: trace.take() })
}

//! Many seeds, on several threads: each run is its own world, and its own again on every machine.

use std::collections::BTreeMap;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Mutex, PoisonError};
use std::thread;
use std::time::{Duration, Instant};

use riopipe_order::probe::{self, Plant, Rare};

use crate::attempt::attempt;
use crate::draw::draw;
use crate::oracle::{Promise, Violation};
use crate::scenario::Scenario;
use crate::shrink::shrink;

/// How many failing seeds are looked into before a run ends early.
const FAILURES_MAX: usize = 10;
/// From so many seeds on, a rare path that was never taken fails the run.
pub const RARE_SEEDS: u64 = 5_000;
/// Rare paths that no simulated cluster can take, or only in far more seeds than that.
const OUT_OF_REACH: &[Rare] = &[
    // TCP delivers a connection's commands in order; the gate's own tests overtake.
    Rare::GateEarly,
    // A persist word is lost alone while that of a later write to its block is kept: both must be
    // in one fence, and the power cut in it. Recovery's own tests do that.
    Rare::VouchedByOverlap,
];
/// Seeds in which a planted bug must be caught, unless told otherwise.
pub const PLANT_SEEDS: u64 = 5_000;

/// Which seeds to run, and how.
#[derive(Clone, Copy, Debug)]
pub struct Plan {
    /// The first seed.
    pub from: u64,
    /// How many.
    pub seeds: u64,
    /// On how many threads.
    pub jobs: usize,
    /// For how long at most.
    pub time: Option<Duration>,
}

/// How a seed failed.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Fault {
    /// A promise was broken.
    Broken(Violation),
    /// The code under test panicked.
    Panic(String),
}

/// A seed that failed.
#[derive(Clone, Debug)]
pub struct Failure {
    /// Which.
    pub seed: u64,
    /// How.
    pub fault: Fault,
}

/// What came of many seeds.
#[derive(Clone, Debug, Default)]
pub struct Summary {
    /// Seeds run.
    pub seeds: u64,
    /// Seeds that failed, the lowest first; the first few.
    pub failures: Vec<Failure>,
    /// How many failed.
    pub failed: u64,
    /// Events of all runs.
    pub events: u64,
    /// Crashes of targets and initiators.
    pub crashes: u64,
    /// Recoveries that were begun.
    pub recoveries: u64,
    /// How long it took.
    pub elapsed: Duration,
    /// How often each rare path was taken.
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
        let never = self.rare.iter().filter(|(_, count)| **count == 0).map(|(name, _)| *name);
        never.filter(|name| !OUT_OF_REACH.iter().any(|rare| rare.name() == *name)).collect()
    }
}

/// Runs seeds; `progress` is told how many have been run.
pub fn run_seeds(plan: &Plan, progress: &(dyn Fn(u64) + Sync)) -> Summary {
    let start = Instant::now();
    let before = probe::counts();
    let summary = Mutex::new(Summary::default());
    let next = AtomicU64::new(0);
    let stop = AtomicBool::new(false);
    thread::scope(|scope| {
        for _ in 0..plan.jobs.max(1) {
            scope.spawn(|| {
                while let Some(seed) = take(&next, &stop, plan, start) {
                    let result = attempt(&draw(seed), false);
                    let mut summary = summary.lock().unwrap_or_else(PoisonError::into_inner);
                    summary.seeds += 1;
                    let fault = match result {
                        Ok(outcome) => {
                            summary.events += outcome.events;
                            summary.crashes += outcome.crashes;
                            summary.recoveries += outcome.recoveries;
                            outcome.violation.map(Fault::Broken)
                        }
                        Err(what) => Some(Fault::Panic(what)),
                    };
                    if let Some(fault) = fault {
                        summary.failed += 1;
                        summary.failures.push(Failure { seed, fault });
                        if summary.failures.len() >= FAILURES_MAX {
                            stop.store(true, Ordering::Relaxed);
                        }
                    }
                    progress(summary.seeds);
                }
            });
        }
    });
    let mut summary = summary.into_inner().unwrap_or_else(PoisonError::into_inner);
    summary.failures.sort_by_key(|failure| failure.seed);
    summary.elapsed = start.elapsed();
    let counts = probe::counts().into_iter().zip(before).map(|(now, before)| now - before);
    summary.rare = Rare::ALL.iter().map(|rare| rare.name()).zip(counts).collect();
    summary
}

/// The next seed to run, if there is one and there is time.
fn take(next: &AtomicU64, stop: &AtomicBool, plan: &Plan, start: Instant) -> Option<u64> {
    if stop.load(Ordering::Relaxed) || plan.time.is_some_and(|limit| start.elapsed() >= limit) {
        return None;
    }
    let nth = next.fetch_add(1, Ordering::Relaxed);
    (nth < plan.seeds).then(|| plan.from.wrapping_add(nth))
}

/// What came of a planted bug.
#[derive(Clone, Debug)]
pub struct Hunt {
    /// The bug.
    pub plant: Plant,
    /// Seeds run.
    pub seeds: u64,
    /// After how many seeds the oracle saw a broken promise; `None` if it never did.
    pub caught_after: Option<u64>,
    /// Which promise, in which seed.
    pub failure: Option<(u64, Violation)>,
    /// Seeds in which the code under test panicked: they don't count.
    pub panics: u64,
    /// How long it took.
    pub elapsed: Duration,
}

/// Plants a bug and runs seeds until the oracle sees it. Nothing else may run in this process
/// meanwhile.
pub fn hunt(plant: Plant, plan: &Plan, progress: &(dyn Fn(u64) + Sync)) -> Hunt {
    let start = Instant::now();
    let next = AtomicU64::new(0);
    let stop = AtomicBool::new(false);
    let (run, panics) = (AtomicU64::new(0), AtomicU64::new(0));
    let found: Mutex<Option<(u64, Violation)>> = Mutex::new(None);
    probe::plant(Some(plant));
    thread::scope(|scope| {
        for _ in 0..plan.jobs.max(1) {
            scope.spawn(|| {
                while let Some(seed) = take(&next, &stop, plan, start) {
                    let result = attempt(&draw(seed), false);
                    progress(run.fetch_add(1, Ordering::Relaxed) + 1);
                    match result {
                        Err(_) => {
                            panics.fetch_add(1, Ordering::Relaxed);
                        }
                        Ok(outcome) => {
                            let Some(violation) = outcome.violation else { continue };
                            stop.store(true, Ordering::Relaxed);
                            let mut found = found.lock().unwrap_or_else(PoisonError::into_inner);
                            if found.as_ref().is_none_or(|(lowest, _)| seed < *lowest) {
                                *found = Some((seed, violation));
                            }
                        }
                    }
                }
            });
        }
    });
    probe::plant(None);
    let failure = found.into_inner().unwrap_or_else(PoisonError::into_inner);
    Hunt {
        plant,
        seeds: run.into_inner(),
        caught_after: failure.as_ref().map(|(seed, _)| seed.wrapping_sub(plan.from) + 1),
        failure,
        panics: panics.into_inner(),
        elapsed: start.elapsed(),
    }
}

/// A failure as small as it could be made.
#[derive(Clone, Debug)]
pub struct Explained {
    /// The promise and what was seen, in the small scenario.
    pub violation: Violation,
    /// The small scenario.
    pub scenario: Scenario,
    /// What happens in it.
    pub trace: Vec<String>,
}

/// Makes a failing scenario small, and tells what happens in it. `None` if it does not fail.
#[must_use]
pub fn explain(scenario: &Scenario) -> Option<Explained> {
    let promise: Promise = attempt(scenario, false).ok()?.violation?.promise;
    let small = shrink(scenario, promise);
    let outcome = attempt(&small, true).ok()?;
    Some(Explained { violation: outcome.violation?, scenario: small, trace: outcome.trace })
}

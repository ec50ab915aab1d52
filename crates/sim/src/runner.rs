//! Many seeds, on several threads: each run is its own world, and its own again on every machine.

use std::collections::BTreeMap;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::thread;
use std::time::{Duration, Instant};

use riopipe_order::probe::{self, Plant, Rare};

use crate::attempt::{Bounded, Fault};
use crate::core::Trace;
use crate::draw::draw;
use crate::oracle::Violation;
use crate::scenario::Scenario;
use crate::shrink::shrink;

/// After so many failing seeds a run ends early.
const FAILURES_MAX: u64 = 100;
/// And after so many that never end: each of them keeps a core busy.
const ENDLESS_MAX: u64 = 8;
/// From so many seeds on, a rare path that was never taken fails the run.
pub const RARE_SEEDS: u64 = 5_000;
/// Rare paths that no simulated cluster can take, or only in far more seeds than that.
const OUT_OF_REACH: &[Rare] = &[
    // TCP delivers a connection's commands in order; the gate's own tests overtake.
    Rare::GateEarly,
];
/// Seeds in which a planted bug must be caught, unless told otherwise.
pub const PLANT_SEEDS: u64 = 3_000;

/// Which seeds to run, and how.
#[derive(Clone, Debug)]
pub struct Plan {
    /// The first seed.
    pub first: u64,
    /// How many at most.
    pub seeds: u64,
    /// On how many threads.
    pub jobs: usize,
    /// For how long at most.
    pub time: Option<Duration>,
    /// How long one run may take.
    pub run_limit: Duration,
    /// Once it is set, no further seed is begun.
    pub stop: Arc<AtomicBool>,
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
    /// Seeds that failed, the lowest first.
    pub failures: Vec<Failure>,
    /// How many of them never ended.
    pub endless: u64,
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
    each_seed(plan, start, |seed, bounded| {
        let (outcome, fault) = bounded.run(&draw(seed), None);
        let mut summary = summary.lock().unwrap_or_else(PoisonError::into_inner);
        summary.seeds += 1;
        summary.events += outcome.events;
        summary.crashes += outcome.crashes;
        summary.recoveries += outcome.recoveries;
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

/// Has each seed of a plan run by one of several threads, until `run` says no.
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
    /// Seeds in which the code under test panicked, or did not end: they don't count.
    pub other: u64,
    /// How long it took.
    pub elapsed: Duration,
}

/// Plants a bug and runs seeds until the oracle sees it. Nothing else may run in this process
/// meanwhile.
pub fn hunt(plant: Plant, plan: &Plan, progress: &(dyn Fn(u64) + Sync)) -> Hunt {
    let start = Instant::now();
    let (run, other, endless) = (AtomicU64::new(0), AtomicU64::new(0), AtomicU64::new(0));
    let found: Mutex<Option<(u64, Violation)>> = Mutex::new(None);
    probe::plant(Some(plant));
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
    probe::plant(None);
    let failure = found.into_inner().unwrap_or_else(PoisonError::into_inner);
    Hunt {
        plant,
        seeds: run.into_inner(),
        caught_after: failure.as_ref().map(|(seed, _)| seed.wrapping_sub(plan.first) + 1),
        failure,
        other: other.into_inner(),
        elapsed: start.elapsed(),
    }
}

/// A failure as small as it could be made.
#[derive(Clone, Debug)]
pub struct Explained {
    /// What was seen, in the small scenario.
    pub fault: Fault,
    /// The small scenario.
    pub scenario: Scenario,
    /// What happens in it.
    pub trace: Vec<String>,
}

/// Makes a failing scenario small, and tells what happens in it. `None` if it does not fail.
///
/// One that never ends stays as it is: each attempt at it would cost its time and a core.
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

//! Runs scenarios. Survives code under test that panics or never ends.
//!
//! The world itself bounds the number of events of a run (promise P8). A loop inside one event has
//! no such bound. So each run also has a bound in wall-clock time, which is read only here and
//! never in the simulated world.

use std::any::Any;
use std::backtrace::{Backtrace, BacktraceStatus};
use std::cell::{Cell, RefCell};
use std::fmt;
use std::panic::{self, AssertUnwindSafe, PanicHookInfo};
use std::sync::Once;
use std::sync::mpsc::{self, Receiver, RecvTimeoutError, SyncSender};
use std::thread;
use std::time::Duration;

use crate::core::Trace;
use crate::oracle::Violation;
use crate::scenario::Scenario;
use crate::world::{Outcome, run};

/// The longest time that a run may take. The slowest runs take a fraction of a second. The limit is
/// far higher, so that a busy machine does not fail a run.
pub const RUN_LIMIT: Duration = Duration::from_secs(60);

/// The failure of a run.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Fault {
    /// A promise was broken.
    Broken(Violation),
    /// The code under test panicked: its message, and the place.
    Panicked(String),
    /// The run did not end in this time (promise P8): it loops for ever.
    Endless(Duration),
}

impl Fault {
    /// Whether both are the same kind of failure: the same promise, or the same panic.
    #[must_use]
    pub fn is_like(&self, other: &Self) -> bool {
        match (self, other) {
            (Self::Broken(one), Self::Broken(other)) => one.promise == other.promise,
            (Self::Panicked(one), Self::Panicked(other)) => place(one) == place(other),
            (Self::Endless(_), Self::Endless(_)) => true,
            _ => false,
        }
    }
}

/// The place of a panic, from the text of [`Fault::Panicked`].
fn place(panic: &str) -> &str {
    panic.lines().next().and_then(|line| line.rsplit(" at ").next()).unwrap_or_default()
}

impl fmt::Display for Fault {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Broken(violation) => {
                write!(f, "{} BROKEN: {}", violation.promise, violation.what)
            }
            Self::Panicked(what) => write!(f, "PANIC: {what}"),
            Self::Endless(limit) => {
                write!(f, "ENDLESS: it did not end within {} s (P8 live)", limit.as_secs_f64())
            }
        }
    }
}

struct Worker {
    jobs: SyncSender<(Scenario, Option<Trace>)>,
    results: Receiver<Result<Outcome, String>>,
}

/// Runs one scenario at a time, each with a bound on its time.
///
/// A run that does not end can't be stopped. Its thread remains, and runs until the process ends.
pub struct Bounded {
    limit: Duration,
    worker: Option<Worker>,
}

impl Bounded {
    /// A runner with this limit for each run.
    #[must_use]
    pub const fn new(limit: Duration) -> Self {
        Self { limit, worker: None }
    }

    /// Runs a scenario. Returns its result, and its failure if it failed. Writes the events to
    /// `trace`, also if the run does not end.
    ///
    /// # Panics
    /// The machine can't start another thread.
    pub fn run(&mut self, scenario: &Scenario, trace: Option<&Trace>) -> (Outcome, Option<Fault>) {
        let worker = self.worker.get_or_insert_with(Worker::start);
        let sent = worker.jobs.send((scenario.clone(), trace.cloned()));
        debug_assert!(sent.is_ok(), "a worker survives each run");
        match worker.results.recv_timeout(self.limit) {
            Ok(Ok(mut outcome)) => {
                let fault = outcome.violation.take().map(Fault::Broken);
                (outcome, fault)
            }
            Ok(Err(panic)) => (Outcome::default(), Some(Fault::Panicked(panic))),
            Err(RecvTimeoutError::Timeout) => {
                self.worker = None;
                (Outcome::default(), Some(Fault::Endless(self.limit)))
            }
            Err(RecvTimeoutError::Disconnected) => {
                self.worker = None;
                (Outcome::default(), Some(Fault::Panicked("outside of the run".into())))
            }
        }
    }
}

impl Worker {
    fn start() -> Self {
        let (jobs, todo) = mpsc::sync_channel::<(Scenario, Option<Trace>)>(1);
        let (done, results) = mpsc::sync_channel(1);
        let work = move || {
            while let Ok((scenario, trace)) = todo.recv() {
                // No thread waits for the result if the run took too long.
                if done.send(caught(&scenario, trace)).is_err() {
                    return;
                }
            }
        };
        thread::Builder::new().name("run".into()).spawn(work).expect("a machine has threads");
        Self { jobs, results }
    }
}

thread_local! {
    static QUIET: Cell<bool> = const { Cell::new(false) };
    static LOCATION: RefCell<String> = const { RefCell::new(String::new()) };
}

/// Runs a scenario. Returns the message and the place of a panic, if there was one.
fn caught(scenario: &Scenario, trace: Option<Trace>) -> Result<Outcome, String> {
    install_panic_hook();
    QUIET.set(true);
    // A run touches only its own state, except for counters that only ever grow.
    let result = panic::catch_unwind(AssertUnwindSafe(|| run(scenario, trace)));
    QUIET.set(false);
    result.map_err(|payload| format!("{}{}", panic_message(payload.as_ref()), LOCATION.take()))
}

fn panic_message(payload: &(dyn Any + Send)) -> &str {
    let text = payload.downcast_ref::<String>().map(String::as_str);
    text.or_else(|| payload.downcast_ref::<&str>().copied()).unwrap_or("a panic")
}

/// Reports a panic inside a run with the run's outcome, not on standard error.
fn install_panic_hook() {
    static ONCE: Once = Once::new();
    ONCE.call_once(|| {
        let before = panic::take_hook();
        panic::set_hook(Box::new(move |info| {
            if QUIET.get() {
                LOCATION.set(location(info));
            } else {
                before(info);
            }
        }));
    });
}

/// The place of a panic; with `RUST_BACKTRACE=1` also the backtrace.
fn location(info: &PanicHookInfo<'_>) -> String {
    let mut text = info.location().map(|at| format!(" at {at}")).unwrap_or_default();
    let trace = Backtrace::capture();
    if trace.status() == BacktraceStatus::Captured {
        text.push_str(&format!("\n{trace}"));
    }
    text
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::draw::draw;

    #[test]
    fn a_run_that_takes_too_long_is_a_failure_and_the_next_one_runs() {
        let mut bounded = Bounded::new(Duration::ZERO);
        let scenario = draw(1);
        // With a limit of zero even the shortest run is endless, unless it ends before the first
        // check.
        let (mut endless, mut runs) = (false, 0);
        while !endless && runs < 1000 {
            let fault = bounded.run(&scenario, None).1;
            endless = fault == Some(Fault::Endless(Duration::ZERO));
            runs += 1;
        }
        assert!(endless, "{runs} runs took no time");
        bounded.limit = RUN_LIMIT;
        let (outcome, fault) = bounded.run(&scenario, None);
        assert_eq!(fault, None);
        assert!(outcome.events > 0);
    }

    #[test]
    fn a_panic_is_a_failure_with_its_place() {
        let mut bounded = Bounded::new(RUN_LIMIT);
        let mut scenario = draw(1);
        scenario.volume.members.push((77, 0));
        let trace = Trace::default();
        let (_, fault) = bounded.run(&scenario, Some(&trace));
        let Some(Fault::Panicked(what)) = &fault else { panic!("{fault:?}") };
        assert!(what.contains("index out of bounds") && what.contains("world.rs:"), "{what}");
        assert!(fault.as_ref().unwrap().is_like(&Fault::Panicked(what.clone())));
        let (_, fault) = bounded.run(&draw(1), None);
        assert_eq!(fault, None, "the next one runs");
    }
}

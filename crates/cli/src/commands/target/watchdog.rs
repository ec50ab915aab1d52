//! The signs of life for a service manager that restarts a target that hangs.

use std::time::{Duration, Instant};

use riopipe_target::Running;

/// How many signs of life are planned within the manager's time. With more than one, a sign may be
/// late on a busy machine.
const SIGNS: u32 = 4;

/// The watch over the reactors of a target.
#[derive(Debug)]
pub(super) struct Watchdog {
    interval: Duration,
    /// The time of the next sign.
    due: Instant,
}

impl Watchdog {
    /// For a manager that expects a sign of life in each `time`.
    pub(super) fn new(time: Duration) -> Self {
        Self { interval: time / SIGNS, due: Instant::now() }
    }

    /// Whether a sign of life is due, and all reactors have run since the last one. Asks them
    /// again then. Without an answer of each reactor there is no sign.
    pub(super) fn sees_life(&mut self, running: &Running) -> bool {
        let now = Instant::now();
        if now < self.due || !running.have_answered() {
            return false;
        }
        running.ask();
        self.due = now + self.interval;
        true
    }
}

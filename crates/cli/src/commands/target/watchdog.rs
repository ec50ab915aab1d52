//! The signs of life for a service manager that restarts a target that hangs.

use std::time::{Duration, Instant};

use riopipe_target::Running;

/// How many signs of life are planned within the manager's time. With more than one, a sign may be
/// late on a busy machine.
const SIGNS: u32 = 4;

/// The reactors of a target, which are asked for a sign of life.
pub(super) trait Reactors {
    /// Whether all of them have run since the last [`ask`](Self::ask).
    fn have_answered(&self) -> bool;

    /// Asks all of them.
    fn ask(&self);
}

impl Reactors for Running {
    fn have_answered(&self) -> bool {
        Running::have_answered(self)
    }

    fn ask(&self) {
        Running::ask(self);
    }
}

/// The watch over the reactors of a target.
#[derive(Debug)]
pub(super) struct Watchdog {
    interval: Duration,
    /// The time of the next sign.
    due: Instant,
}

impl Watchdog {
    /// For a manager that expects a sign of life in each `time`. The first one is due `now`.
    pub(super) fn new(time: Duration, now: Instant) -> Self {
        Self { interval: time / SIGNS, due: now }
    }

    /// Whether a sign of life is due `now`, and all reactors have run since the last one. Asks them
    /// again then. Without an answer of each reactor there is no sign.
    pub(super) fn sees_life(&mut self, reactors: &impl Reactors, now: Instant) -> bool {
        if now < self.due || !reactors.have_answered() {
            return false;
        }
        reactors.ask();
        self.due = now + self.interval;
        true
    }
}

#[cfg(test)]
mod tests {
    use std::cell::Cell;

    use super::*;

    /// Reactors that answer, or hang.
    #[derive(Default)]
    struct Fake {
        hang: Cell<bool>,
        is_asked: Cell<bool>,
        asked: Cell<u32>,
    }

    impl Reactors for Fake {
        fn have_answered(&self) -> bool {
            !(self.is_asked.get() && self.hang.get())
        }

        fn ask(&self) {
            self.is_asked.set(true);
            self.asked.set(self.asked.get() + 1);
        }
    }

    #[test]
    fn a_target_whose_reactors_hang_gives_no_sign_of_life() {
        let (begin, reactors) = (Instant::now(), Fake::default());
        let mut watchdog = Watchdog::new(Duration::from_secs(4), begin);
        let mut sees_life = |ms| watchdog.sees_life(&reactors, begin + Duration::from_millis(ms));
        assert!(sees_life(0), "at once, because the start may have taken long");
        assert!(!sees_life(999), "four signs in the manager's time");
        assert!(sees_life(1000));
        reactors.hang.set(true);
        for ms in [2000, 3000, 3999, 60_000] {
            assert!(!sees_life(ms), "{ms} ms");
        }
        assert_eq!(reactors.asked.get(), 2, "no question before the last one is answered");
        // They were only slow.
        reactors.hang.set(false);
        assert!(sees_life(60_001));
        assert!(!sees_life(61_000));
    }
}

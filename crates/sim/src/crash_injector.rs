//! The crash injector: after a number of further effects on the outside, no action of a process has
//! any effect.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};

/// The crash injector of one process. Clones share their state.
#[derive(Clone, Debug, Default)]
pub struct CrashInjector(Arc<State>);

#[derive(Debug, Default)]
struct State {
    /// The number of effects left, plus one. 0: effects are not counted.
    left: AtomicU32,
    /// Only fences of the log are counted.
    fences: AtomicBool,
    stopped: AtomicBool,
}

impl CrashInjector {
    /// Plans a crash after `effects` more effects. With `fences`, only fences count.
    pub fn plan_crash(&self, effects: u32, fences: bool) {
        self.0.fences.store(fences, Ordering::Relaxed);
        self.0.left.store(effects + 1, Ordering::Relaxed);
    }

    /// Counts an effect. Returns whether it still takes place.
    #[inline]
    #[must_use]
    pub fn count_effect(&self) -> bool {
        if self.0.fences.load(Ordering::Relaxed) {
            return !self.has_stopped();
        }
        self.count_fence()
    }

    /// Counts a fence. Returns whether it still takes place.
    #[inline]
    #[must_use]
    pub fn count_fence(&self) -> bool {
        let left = self.0.left.load(Ordering::Relaxed);
        if left == 0 {
            return true;
        }
        if left == 1 {
            self.0.stopped.store(true, Ordering::Relaxed);
            return false;
        }
        self.0.left.store(left - 1, Ordering::Relaxed);
        true
    }

    /// Whether the process has been stopped.
    #[must_use]
    pub fn has_stopped(&self) -> bool {
        self.0.stopped.load(Ordering::Relaxed)
    }

    /// Resets the crash injector for the next process.
    pub fn reset(&self) {
        self.0.left.store(0, Ordering::Relaxed);
        self.0.fences.store(false, Ordering::Relaxed);
        self.0.stopped.store(false, Ordering::Relaxed);
    }
}

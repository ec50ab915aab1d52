//! A crash in the middle of something: after so many more effects on the outside, nothing that a
//! process does has any effect.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};

/// One process's fuse; clones burn together.
#[derive(Clone, Debug, Default)]
pub struct Fuse(Arc<State>);

#[derive(Debug, Default)]
struct State {
    /// Effects left, plus one; 0: none is counted.
    left: AtomicU32,
    /// Only fences of the log are counted.
    fences: AtomicBool,
    blown: AtomicBool,
}

impl Fuse {
    /// After `effects` more, of which only fences count if so asked, the fuse blows.
    pub fn light(&self, effects: u32, fences: bool) {
        self.0.fences.store(fences, Ordering::Relaxed);
        self.0.left.store(effects + 1, Ordering::Relaxed);
    }

    /// An effect is to take place: whether it still does.
    #[inline]
    #[must_use]
    pub fn burn(&self) -> bool {
        if self.0.fences.load(Ordering::Relaxed) {
            return !self.is_blown();
        }
        self.burn_fence()
    }

    /// A fence is to take place: whether it still does.
    #[inline]
    #[must_use]
    pub fn burn_fence(&self) -> bool {
        let left = self.0.left.load(Ordering::Relaxed);
        if left == 0 {
            return true;
        }
        if left == 1 {
            self.0.blown.store(true, Ordering::Relaxed);
            return false;
        }
        self.0.left.store(left - 1, Ordering::Relaxed);
        true
    }

    /// Whether it has blown.
    #[must_use]
    pub fn is_blown(&self) -> bool {
        self.0.blown.load(Ordering::Relaxed)
    }

    /// A new fuse, for the next life.
    pub fn renew(&self) {
        self.0.left.store(0, Ordering::Relaxed);
        self.0.fences.store(false, Ordering::Relaxed);
        self.0.blown.store(false, Ordering::Relaxed);
    }
}

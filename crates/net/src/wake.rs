//! A call that is heard once, however often it was made before anybody listened.
//!
//! `tests/wake.rs` compiles this file with a model checker's atomics and tries every interleaving.

use super::sync::{AtomicBool, Event, Ordering};

/// See the [module](self).
#[derive(Debug)]
pub(crate) struct Wake {
    event: Event,
    /// Set from the first call until the listener has heard it: spares the further system calls.
    pending: AtomicBool,
}

impl Wake {
    pub(crate) fn new(event: Event) -> Self {
        Self { event, pending: AtomicBool::new(false) }
    }

    /// What the listener waits for.
    pub(crate) fn event(&self) -> &Event {
        &self.event
    }

    pub(crate) fn call(&self) {
        // Release/acquire: what the calling thread wrote before is seen by the one that hears it.
        if !self.pending.swap(true, Ordering::AcqRel) {
            self.event.ring();
        }
    }

    /// Whether somebody has called since it was last [heard](Self::hear).
    pub(crate) fn is_called(&self) -> bool {
        self.pending.load(Ordering::Acquire)
    }

    /// The event has rung; afterwards the listener looks at everything.
    pub(crate) fn hear(&self) {
        self.event.silence();
        // After that: a call between the two then rings again or is covered by this return. The
        // other way round, it could be silenced while `pending` stays set, and no later call
        // would get through.
        self.pending.swap(false, Ordering::AcqRel);
    }
}

//! A notification that is received once, however often it was sent before that.
//!
//! `tests/wake.rs` compiles this file with a model checker's atomics and tries every interleaving.

use super::sync::{AtomicBool, Event, Ordering};

/// A notification that is received once; see the [module](self).
#[derive(Debug)]
pub(crate) struct Wake {
    event: Event,
    /// Set from the first notification until it is received; saves further system calls.
    pending: AtomicBool,
}

impl Wake {
    pub(crate) fn new(event: Event) -> Self {
        Self { event, pending: AtomicBool::new(false) }
    }

    /// The event that the receiver waits for.
    pub(crate) fn event(&self) -> &Event {
        &self.event
    }

    pub(crate) fn notify(&self) {
        // Release/acquire: the receiving thread sees all writes of the notifying one before this.
        if !self.pending.swap(true, Ordering::AcqRel) {
            self.event.signal();
        }
    }

    /// Whether a notification was sent since the last [`receive`](Self::receive).
    pub(crate) fn is_pending(&self) -> bool {
        self.pending.load(Ordering::Acquire)
    }

    /// The event was signalled; afterwards the receiver checks all of its sources.
    pub(crate) fn receive(&self) {
        self.event.clear();
        // In this order: a notification between the two steps then signals again, or is covered by
        // this return. In the other order, the event could be cleared while `pending` stays set,
        // and no later notification would arrive.
        self.pending.swap(false, Ordering::AcqRel);
    }
}

//! A notification between threads. However often it is sent before it is received, it is received
//! once.
//!
//! A model checker compiles this file with its own atomics, and tries every interleaving
//! (`tests/wake.rs`).

use super::sync::{AtomicBool, Event, Ordering};

/// A notification that is received once; see the [module](self).
#[derive(Debug)]
pub(crate) struct Wake {
    event: Event,
    /// Whether a notification was sent and has not been received. While it is set, further
    /// notifications need no system call.
    is_pending: AtomicBool,
}

impl Wake {
    pub(crate) fn new(event: Event) -> Self {
        Self { event, is_pending: AtomicBool::new(false) }
    }

    /// The event that the receiver waits for.
    pub(crate) fn event(&self) -> &Event {
        &self.event
    }

    /// Sends a notification. A thread that receives it sees all earlier stores of this thread.
    pub(crate) fn notify(&self) {
        if !self.is_pending.swap(true, Ordering::AcqRel) {
            self.event.signal();
        }
    }

    /// Whether a notification was sent since the last [`receive`](Self::receive).
    pub(crate) fn is_pending(&self) -> bool {
        self.is_pending.load(Ordering::Acquire)
    }

    /// Receives the notification, after the event was signalled. The caller then checks all sources of
    /// notifications.
    pub(crate) fn receive(&self) {
        // The event is cleared first. A notification between the two steps does not signal, but the
        // caller checks its source afterwards. In the other order, a notification between the steps
        // would signal, and the signal would be cleared while `is_pending` stays set. Then no later
        // notification would signal.
        self.event.clear();
        self.is_pending.swap(false, Ordering::AcqRel);
    }
}

//! The signal of the targets' threads to the threads that wait for their answers.

use std::sync::{Condvar, Mutex, PoisonError};
use std::time::Duration;

use riopipe_net::now_ns;

use crate::lock::lock;
use crate::time::nanos;

/// Wakes the threads that wait for answers of some targets, at each event of one of them.
#[derive(Debug, Default)]
pub(crate) struct Signal {
    count: Mutex<u64>,
    changed: Condvar,
}

impl Signal {
    /// The number of events so far.
    pub(crate) fn count(&self) -> u64 {
        *lock(&self.count)
    }

    pub(crate) fn notify(&self) {
        let mut count = lock(&self.count);
        *count = count.wrapping_add(1);
        self.changed.notify_all();
    }

    /// Waits until an event has happened after the count was `seen`, for `most` at most.
    pub(crate) fn wait(&self, seen: u64, most: Duration) {
        let deadline = now_ns().saturating_add(nanos(most));
        let mut count = lock(&self.count);
        while *count == seen {
            let left = Duration::from_nanos(deadline.saturating_sub(now_ns()));
            if left.is_zero() {
                return;
            }
            let waited = self.changed.wait_timeout(count, left);
            count = waited.unwrap_or_else(PoisonError::into_inner).0;
        }
    }
}

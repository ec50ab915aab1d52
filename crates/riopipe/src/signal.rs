//! The signal of the targets' threads to the threads that wait for their answers.
//!
//! A waiting thread reads the [count](Signal::count), checks the state of the targets, and
//! [waits](Signal::wait) until the count has changed. An event between the check and the wait changes
//! the count, so the wait returns at once.

use std::sync::{Condvar, Mutex, PoisonError};
use std::time::Duration;

use riopipe_net::now_ns;

use crate::lock::lock;
use crate::time::nanos;

/// Wakes the threads that wait for answers of some targets, at each event of one of these targets.
#[derive(Debug, Default)]
pub(crate) struct Signal {
    /// The number of events so far.
    count: Mutex<u64>,
    changed: Condvar,
}

impl Signal {
    /// The number of events so far.
    pub(crate) fn count(&self) -> u64 {
        *lock(&self.count)
    }

    /// Counts an event, and wakes the waiting threads.
    pub(crate) fn notify(&self) {
        let mut count = lock(&self.count);
        *count = count.wrapping_add(1);
        self.changed.notify_all();
    }

    /// Waits until the count differs from `seen_count`, for `timeout` at most.
    pub(crate) fn wait(&self, seen_count: u64, timeout: Duration) {
        let deadline = now_ns().saturating_add(nanos(timeout));
        let mut count = lock(&self.count);
        while *count == seen_count {
            let remaining = Duration::from_nanos(deadline.saturating_sub(now_ns()));
            if remaining.is_zero() {
                return;
            }
            let waited = self.changed.wait_timeout(count, remaining);
            count = waited.unwrap_or_else(PoisonError::into_inner).0;
        }
    }
}

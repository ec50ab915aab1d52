//! Waking the waiters of a stream's marks.

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::task::Waker;

/// Wakes waiters. A waker may run any code: it may drop a stream, which takes the stream's ownership
/// flag. A waker that panics affects neither the other waiters nor this thread, which has streams to
/// drive.
pub(crate) fn wake_all(waiters: Vec<Waker>) {
    for waiter in waiters {
        if catch_unwind(AssertUnwindSafe(|| waiter.wake())).is_err() {
            tracing::error!("the waker of a task that waits for a stream has panicked");
        }
    }
}

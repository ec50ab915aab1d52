//! Waking the waiters of a stream's marks.

use std::task::Waker;

/// Wakes waiters. A waker may run any code: it may drop a stream, which takes the stream's ownership
/// flag. A waker that panics affects neither the other waiters nor this thread, which has streams to
/// drive.
pub(crate) fn wake_all(waiters: Vec<Waker>) {
    for _ in 0..riopipe_platform::wake_all(waiters) {
        tracing::error!("the waker of a task that waits for a stream has panicked");
    }
}

//! How a stream's owner is called: by other threads, and by what an event loop waits for. How those
//! are woken that wait for a stream.

use std::os::fd::{AsFd, AsRawFd, BorrowedFd, RawFd};
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;
use std::task::Waker;

use crate::failure::Exhausted;
use crate::stream_shell::StreamHandle;

/// Calls the owner of a stream from any thread. It is cheap to clone, and does not keep the stream
/// open.
#[derive(Clone, Debug)]
pub struct StreamWaker(Arc<StreamHandle>);

impl StreamWaker {
    pub(crate) fn new(handle: &Arc<StreamHandle>) -> Self {
        Self(Arc::clone(handle))
    }

    /// Ends the [wait](crate::Stream::wait) that the owner is in, or else its next one, with
    /// [`WaitError::Woken`](crate::WaitError::Woken); a wait for
    /// [`Until::Woken`](crate::Until::Woken) ends well. So a thread sleeps on its stream and on a
    /// queue of its own: a thread that puts something into the queue calls this afterwards.
    ///
    /// An event loop sees a call, too: the stream's [descriptor](crate::Stream::event_fd) is readable
    /// until the next [`poll`](crate::Stream::poll) or wait begins.
    ///
    /// Calls before the owner notices count as one. Reads, and waits for room by a submission, are
    /// not interrupted: the call is kept for the next wait.
    pub fn wake(&self) {
        self.0.call_owner();
    }
}

/// A stream's descriptor for event loops: see [`Stream::event_fd`](crate::Stream::event_fd). It
/// stays open as long as this, or a clone of it, is there. Once the stream is gone it means nothing:
/// take it out of the event loop.
#[derive(Clone, Debug)]
pub struct StreamFd(Arc<StreamHandle>);

impl StreamFd {
    pub(crate) fn new(handle: &Arc<StreamHandle>) -> Result<Self, Exhausted> {
        handle.news().map_err(|_| Exhausted::Descriptors)?;
        Ok(Self(Arc::clone(handle)))
    }
}

impl AsFd for StreamFd {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.0.news().expect("it was made with this").as_fd()
    }
}

impl AsRawFd for StreamFd {
    fn as_raw_fd(&self) -> RawFd {
        self.as_fd().as_raw_fd()
    }
}

/// Wakes waiters. A waker may run any code: it may drop a stream, which takes the stream's ownership
/// flag. One that panics harms neither the other waiters nor this thread, which has streams to drive.
pub(crate) fn wake_all(waiters: Vec<Waker>) {
    for waiter in waiters {
        if catch_unwind(AssertUnwindSafe(|| waiter.wake())).is_err() {
            tracing::error!("the waker of a task that waits for a stream has panicked");
        }
    }
}

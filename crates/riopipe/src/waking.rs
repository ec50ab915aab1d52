//! Interrupting a stream's owner, from other threads and through event loops; waking the waiters of
//! a stream.

use std::os::fd::{AsFd, AsRawFd, BorrowedFd, RawFd};
use std::sync::Arc;

use crate::failure::Exhausted;
use crate::stream_handle::StreamHandle;

/// A handle by which any thread interrupts a wait of the stream's owner. It is cheap to clone, and
/// does not keep the stream open.
#[derive(Clone, Debug)]
pub struct StreamWaker(Arc<StreamHandle>);

impl StreamWaker {
    pub(crate) fn new(handle: &Arc<StreamHandle>) -> Self {
        Self(Arc::clone(handle))
    }

    /// Ends the present [wait](crate::Stream::wait) of the owner, or else its next one, with
    /// [`WaitError::Woken`](crate::WaitError::Woken). A wait for
    /// [`Until::Woken`](crate::Until::Woken) ends with success. So a thread can sleep on its stream and
    /// on a queue of its own at the same time: a thread that puts an item into the queue calls this
    /// afterwards.
    ///
    /// The call also makes the stream's [descriptor](crate::Stream::event_fd) readable, until the next
    /// [`poll`](crate::Stream::poll) or wait begins.
    ///
    /// Several calls before the owner's next wait count as one. Reads, and waits of a submission for
    /// space, are not interrupted: the call is kept for the next wait.
    pub fn wake(&self) {
        self.0.interrupt_owner();
    }
}

/// A stream's descriptor for event loops: see [`Stream::event_fd`](crate::Stream::event_fd). It
/// stays open until this and all its clones are dropped. After the stream has been closed or dropped
/// it has no meaning: remove it from the event loop.
#[derive(Clone, Debug)]
pub struct StreamFd(Arc<StreamHandle>);

impl StreamFd {
    pub(crate) fn new(handle: &Arc<StreamHandle>) -> Result<Self, Exhausted> {
        handle.event_loop_poller().map_err(|_| Exhausted::Descriptors)?;
        Ok(Self(Arc::clone(handle)))
    }
}

impl AsFd for StreamFd {
    fn as_fd(&self) -> BorrowedFd<'_> {
        let poller = self.0.event_loop_poller();
        poller.expect("`new` has made the poller").as_fd()
    }
}

impl AsRawFd for StreamFd {
    fn as_raw_fd(&self) -> RawFd {
        self.as_fd().as_raw_fd()
    }
}

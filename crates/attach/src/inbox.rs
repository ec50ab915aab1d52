//! The results for one queue, which the threads of a device leave there.

use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use riopipe_media::{AlignedBuf, Done, IoError, Operation};
use riopipe_platform::EventFd;

/// The results that a queue has not taken yet.
#[derive(Debug)]
pub(crate) struct Inbox {
    done: Mutex<Vec<Done>>,
    /// Readable when there may be results.
    event: EventFd,
}

impl Inbox {
    pub(crate) fn new() -> std::io::Result<Self> {
        Ok(Self { done: Mutex::default(), event: EventFd::new()? })
    }

    pub(crate) const fn event(&self) -> &EventFd {
        &self.event
    }

    fn lock(&self) -> MutexGuard<'_, Vec<Done>> {
        self.done.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Appends the results to `done`.
    pub(crate) fn take(&self, done: &mut Vec<Done>) {
        done.append(&mut self.lock());
    }
}

/// An operation of a queue, for its result.
#[derive(Debug)]
pub(crate) struct Ticket {
    pub(crate) inbox: Arc<Inbox>,
    /// The queue's name for the operation.
    pub(crate) op: u64,
    pub(crate) what: Operation,
    /// The first block; 0 for a flush.
    pub(crate) lba: u64,
    /// The number of blocks; 0 for a flush.
    pub(crate) blocks: u64,
}

impl Ticket {
    /// Ends the operation.
    pub(crate) fn end(self, result: Result<Option<AlignedBuf>, IoError>) {
        self.inbox.lock().push(Done { op: self.op, result });
        self.inbox.event.signal();
    }
}

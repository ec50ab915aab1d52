//! Reads: a queue of them, and the threads that carry them out.

use std::collections::VecDeque;
use std::sync::{Condvar, Mutex, MutexGuard, PoisonError};

use riopipe::{BLOCK_BYTES, Reader};
use riopipe_media::{AlignedBuf, Cause};

use crate::inbox::Ticket;
use crate::shared::Shared;

/// The reads that wait for a thread.
#[derive(Default)]
pub(crate) struct ReadQueue {
    waiting: Mutex<Waiting>,
    /// Notified when there is a read, or none will come any more.
    changed: Condvar,
}

#[derive(Default)]
struct Waiting {
    reads: VecDeque<Ticket>,
    is_closed: bool,
}

impl ReadQueue {
    fn lock(&self) -> MutexGuard<'_, Waiting> {
        self.waiting.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Adds a read, or returns it if the queue is closed.
    pub(crate) fn push(&self, ticket: Ticket) -> Result<(), Ticket> {
        let mut waiting = self.lock();
        if waiting.is_closed {
            return Err(ticket);
        }
        waiting.reads.push_back(ticket);
        drop(waiting);
        self.changed.notify_one();
        Ok(())
    }

    /// Ends all threads, once the reads that wait are done.
    pub(crate) fn close(&self) {
        self.lock().is_closed = true;
        self.changed.notify_all();
    }

    /// Waits for a read. `None`: there will be no more.
    fn pop(&self) -> Option<Ticket> {
        let mut waiting = self.lock();
        loop {
            if let Some(ticket) = waiting.reads.pop_front() {
                return Some(ticket);
            }
            if waiting.is_closed {
                return None;
            }
            waiting = self.changed.wait(waiting).unwrap_or_else(PoisonError::into_inner);
        }
    }
}

/// Carries out reads until the queue is closed. A completed write is complete in its stream before its
/// request ends, so every later read finds it (promise P9). A read of blocks that are in doubt after a failure
/// fails.
pub(crate) fn run(shared: &Shared, reader: &Reader) {
    while let Some(ticket) = shared.reads.pop() {
        // The length is checked: it is at most 8 MiB.
        let mut buf = AlignedBuf::with_any_content(ticket.blocks as usize * BLOCK_BYTES);
        let result = match reader.read(ticket.lba, &mut buf, None) {
            Ok(()) => match shared.doubt(&ticket, reader.has_failed_stream()) {
                None => Ok(Some(buf)),
                Some(doubt) => Err(doubt),
            },
            Err(error) => {
                let cause = Cause::Failed(error.to_string());
                Err(shared.limits.error(ticket.what, ticket.lba, ticket.blocks, cause))
            }
        };
        ticket.end(result);
    }
}

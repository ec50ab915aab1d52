//! The log's progress as other threads see it, and the callers that wait for records to be durable.
//!
//! The committer publishes the progress. It wakes only the callers whose records have become
//! durable.

use std::collections::BTreeMap;
use std::sync::{Condvar, Mutex, PoisonError};
use std::task::Waker;
use std::time::Duration;

use riopipe_wal_core::Lsn;
use riopipe_wal_core::writer::Writer;

use crate::error::WalFailure;
use crate::lock::lock;

/// The progress of a log.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct Progress {
    /// The Lsn below which records are durable.
    pub(crate) durable: Lsn,
    /// The Lsn below which records are dropped.
    pub(crate) trimmed: Lsn,
    /// The number of the oldest block that is needed.
    pub(crate) oldest_block: u64,
    /// The number of the block after the last durable one.
    pub(crate) durable_blocks_end: u64,
    /// Number of blocks that can be written before a trim is needed.
    pub(crate) free_blocks: u64,
    /// Whether no space becomes free without another trim.
    pub(crate) is_full: bool,
    /// Bytes of records that the committer has taken from the queue, but not packed.
    pub(crate) unpacked_bytes: usize,
}

impl Progress {
    pub(crate) fn of(writer: &Writer, unpacked_bytes: usize) -> Self {
        let (blocks, free_blocks) = (writer.blocks(), writer.free_blocks());
        Self {
            durable: writer.durable(),
            trimmed: writer.trimmed(),
            oldest_block: blocks.start,
            durable_blocks_end: blocks.end,
            free_blocks,
            is_full: free_blocks == 0 && !writer.awaits_space(),
            unpacked_bytes,
        }
    }
}

/// The state of [`Marks`].
#[derive(Debug, Default)]
pub(crate) struct MarksState {
    pub(crate) progress: Progress,
    /// The reason why the log has ended; `None` while it runs.
    pub(crate) end_reason: Option<WalFailure>,
    pub(crate) waiters: Waiters,
    /// The number of the waiter that came last.
    pub(crate) last_waiter_number: u64,
}

/// The key of a waiter. The order is that of the fields.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) struct WaiterKey {
    /// The Lsn of the record that the waiter waits for.
    pub(crate) lsn: Lsn,
    /// A number that no other waiter has.
    pub(crate) number: u64,
}

/// The wakers of all waiters.
pub(crate) type Waiters = BTreeMap<WaiterKey, Waker>;

/// Wakes waiters. The caller must hold no lock, because a waker may run any code.
fn wake_all(waiters: Waiters) {
    for _ in 0..riopipe_platform::wake_all(waiters.into_values()) {
        tracing::error!("the waker of a task that waits for a record has panicked");
    }
}

/// The marks of a log, and the callers that wait for them.
#[derive(Debug, Default)]
pub(crate) struct Marks {
    pub(crate) state: Mutex<MarksState>,
    /// Notified when the log has ended.
    ended: Condvar,
}

impl Marks {
    pub(crate) fn progress(&self) -> Progress {
        lock(&self.state).progress
    }

    /// The reason why the log has ended; `None` while it runs.
    pub(crate) fn end_reason(&self) -> Option<WalFailure> {
        lock(&self.state).end_reason.clone()
    }

    /// Publishes the log's progress; returns the number of callers that have waited for it.
    pub(crate) fn publish(&self, progress: Progress) -> usize {
        let mut state = lock(&self.state);
        state.progress = progress;
        // The records of waiters with smaller keys are durable.
        let first_undurable = WaiterKey { lsn: progress.durable, number: 0 };
        if state.waiters.first_key_value().is_none_or(|(key, _)| *key >= first_undurable) {
            return 0;
        }
        let still_waiting = state.waiters.split_off(&first_undurable);
        let done_waiting = std::mem::replace(&mut state.waiters, still_waiting);
        drop(state);
        let count = done_waiting.len();
        wake_all(done_waiting);
        count
    }

    /// Waits at most `timeout` until the log has ended; returns whether it has.
    pub(crate) fn wait_for_end(&self, timeout: Option<Duration>) -> bool {
        let state = lock(&self.state);
        let is_running = |state: &mut MarksState| state.end_reason.is_none();
        match timeout {
            None => {
                drop(self.ended.wait_while(state, is_running));
                true
            }
            Some(timeout) => {
                let result = self.ended.wait_timeout_while(state, timeout, is_running);
                !result.unwrap_or_else(PoisonError::into_inner).1.timed_out()
            }
        }
    }

    /// Records that the log has ended, and ends all waits. If there is a reason already, it stays.
    pub(crate) fn end(&self, reason: WalFailure) {
        let mut state = lock(&self.state);
        let _ = state.end_reason.get_or_insert(reason);
        let waiters = std::mem::take(&mut state.waiters);
        drop(state);
        self.ended.notify_all();
        wake_all(waiters);
    }
}

//! The log's progress as other threads see it, and the list of the callers that wait for more.
//!
//! The committer moves the marks and wakes only the callers that have waited for them.

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
    /// The numbers of the oldest block that is needed, and of the one after the last durable block.
    pub(crate) blocks: (u64, u64),
    /// Number of blocks that can be written before a trim is needed.
    pub(crate) free: u64,
    /// Whether no space becomes free without another trim.
    pub(crate) is_full: bool,
    /// Bytes of records that the committer has taken, but not packed.
    pub(crate) waiting: usize,
}

impl Progress {
    pub(crate) fn of(writer: &Writer, waiting: usize) -> Self {
        let (blocks, free) = (writer.blocks(), writer.free_blocks());
        Self {
            durable: writer.durable(),
            trimmed: writer.trimmed(),
            blocks: (blocks.start, blocks.end),
            free,
            is_full: free == 0 && !writer.awaits_space(),
            waiting,
        }
    }
}

/// The marks, and the waiters.
#[derive(Debug, Default)]
pub(crate) struct State {
    pub(crate) progress: Progress,
    pub(crate) over: Option<WalFailure>,
    pub(crate) waiters: Waiters,
    /// The number of the last waiter.
    pub(crate) numbers: u64,
}

/// By the Lsn waited for, and a number of its own.
pub(crate) type Waiters = BTreeMap<(Lsn, u64), Waker>;

/// Wakes waiters. The caller must have no lock.
fn wake_all(waiters: Waiters) {
    for _ in 0..riopipe_platform::wake_all(waiters.into_values()) {
        tracing::error!("the waker of a task that waits for a record has panicked");
    }
}

/// The marks of a log, and the callers that wait for them.
#[derive(Debug, Default)]
pub(crate) struct Marks {
    pub(crate) state: Mutex<State>,
    /// Notified when the log has ended.
    ended: Condvar,
}

impl Marks {
    pub(crate) fn progress(&self) -> Progress {
        lock(&self.state).progress
    }

    pub(crate) fn over(&self) -> Option<WalFailure> {
        lock(&self.state).over.clone()
    }

    /// Publishes the log's progress; returns the number of callers that have waited for it.
    pub(crate) fn publish(&self, progress: Progress) -> usize {
        let mut state = lock(&self.state);
        state.progress = progress;
        if state.waiters.first_key_value().is_none_or(|((lsn, _), _)| *lsn >= progress.durable) {
            return 0;
        }
        let still = state.waiters.split_off(&(progress.durable, 0));
        let awake = std::mem::replace(&mut state.waiters, still);
        drop(state);
        let count = awake.len();
        wake_all(awake);
        count
    }

    /// Waits at most `timeout` until the log has ended; returns whether it has.
    pub(crate) fn wait_over(&self, timeout: Option<Duration>) -> bool {
        let state = lock(&self.state);
        let goes_on = |state: &mut State| state.over.is_none();
        match timeout {
            None => {
                drop(self.ended.wait_while(state, goes_on));
                true
            }
            Some(timeout) => {
                let result = self.ended.wait_timeout_while(state, timeout, goes_on);
                !result.unwrap_or_else(PoisonError::into_inner).1.timed_out()
            }
        }
    }

    /// Ends all waits: the log has ended. The first reason is kept.
    pub(crate) fn end(&self, why: WalFailure) {
        let mut state = lock(&self.state);
        let _ = state.over.get_or_insert(why);
        let awake = std::mem::take(&mut state.waiters);
        drop(state);
        self.ended.notify_all();
        wake_all(awake);
    }
}

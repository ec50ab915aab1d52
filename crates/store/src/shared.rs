//! The state that the callers and the store's thread share.

use std::collections::VecDeque;
use std::sync::{Arc, Condvar, Mutex, MutexGuard, OnceLock, PoisonError};
use std::time::{Duration, Instant};

use riopipe::StreamWaker;
use riopipe_wal::{DurableError, Lsn, Wal};

use crate::error::{StoreFailure, WaitError};
use crate::state::{Entry, LogSpace, State};

/// A checkpoint whose record is in the log.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Checkpoint {
    /// Its snapshot becomes durable.
    Snapshot(Lsn),
    /// The log is trimmed by the empty record at this Lsn.
    Trim(Lsn),
}

/// The part under the lock.
#[derive(Debug)]
pub(crate) struct Locked {
    pub(crate) state: State,
    /// For each transaction in the ordering queue: its number, and the place for its Lsn.
    pub(crate) lsns: VecDeque<(u64, Arc<OnceLock<Lsn>>)>,
    /// Whether a checkpoint has begun and its trim is not durable yet.
    pub(crate) is_checkpointing: bool,
    /// The checkpoint, once its record is in the log.
    pub(crate) checkpoint: Option<Checkpoint>,
    /// Number of checkpoints that are done.
    pub(crate) checkpoints: u64,
    /// Why the store takes no more transactions.
    pub(crate) failure: Option<StoreFailure>,
    /// The thread ends when everything is in the log and durable.
    pub(crate) close: bool,
    /// The thread ends at once.
    pub(crate) abandon: bool,
    /// The thread has ended.
    pub(crate) has_ended: bool,
}

#[derive(Debug)]
pub(crate) struct Shared {
    pub(crate) locked: Mutex<Locked>,
    /// Notified when the thread has moved something.
    pub(crate) moved: Condvar,
    pub(crate) wal: Wal,
    /// Interrupts the wait of the store's thread.
    pub(crate) waker: StreamWaker,
}

impl Shared {
    /// Locks the state. A panic of another thread leaves it usable: each change is made by one call
    /// of `State`.
    pub(crate) fn lock(&self) -> MutexGuard<'_, Locked> {
        self.locked.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Waits until something has moved, at most for `limit`.
    pub(crate) fn wait<'a>(
        &self,
        locked: MutexGuard<'a, Locked>,
        limit: Duration,
    ) -> MutexGuard<'a, Locked> {
        let waited = self.moved.wait_timeout(locked, limit);
        waited.unwrap_or_else(PoisonError::into_inner).0
    }

    /// The space of the log now.
    pub(crate) fn log_space(&self) -> LogSpace {
        let stat = self.wal.stat();
        LogSpace { blocks: stat.blocks, free: stat.free_blocks, queued: stat.queued_bytes }
    }

    /// Appends all records to the log whose turn it is. Callers hold the lock, so the order of the
    /// records is the order of the queue.
    pub(crate) fn append(&self, locked: &mut Locked) -> Result<(), StoreFailure> {
        while let Some((number, entry)) = locked.state.next_record() {
            match entry {
                Entry::Transaction(bytes) => {
                    let lsn = self.wal.append(&bytes)?;
                    locked.state.on_appended(number, lsn.0);
                    if locked.lsns.front().is_some_and(|(of, _)| *of == number)
                        && let Some((_, place)) = locked.lsns.pop_front()
                    {
                        let _ = place.set(lsn);
                    }
                }
                Entry::Checkpoint(bytes) => {
                    // Nothing else appends meanwhile: this is the Lsn of the snapshot itself.
                    let from = self.wal.stat().end;
                    let lsn = self.wal.checkpoint(from, &bytes)?;
                    locked.checkpoint = Some(Checkpoint::Snapshot(lsn));
                }
            }
        }
        Ok(())
    }

    /// Begins a checkpoint, unless one has begun.
    pub(crate) fn begin_checkpoint(&self, locked: &mut Locked) {
        if !locked.is_checkpointing {
            locked.is_checkpointing = true;
            locked.state.checkpoint();
        }
    }

    /// Ends the store with this reason, unless it has another one.
    pub(crate) fn fail(&self, locked: &mut Locked, failure: StoreFailure) {
        if locked.failure.is_none() {
            tracing::error!(error = %failure, "a store has failed");
        }
        let _ = locked.failure.get_or_insert(failure);
        self.moved.notify_all();
    }
}

/// A queued transaction. It may be dropped: the transaction stays queued. A ticket that is kept
/// keeps the store's log open.
#[derive(Debug)]
pub struct Ticket {
    pub(crate) shared: Arc<Shared>,
    pub(crate) lsn: Arc<OnceLock<Lsn>>,
    pub(crate) number: u64,
}

impl Ticket {
    /// The number of the transaction. Later transactions of the store have higher numbers, also
    /// after it was opened again, unless a crash has cut this one.
    #[must_use]
    pub fn number(&self) -> u64 {
        self.number
    }

    /// Waits until the transaction and all earlier ones are durable, at most for `timeout`.
    ///
    /// # Errors
    /// [`WaitError`].
    pub fn wait(&self, timeout: Option<Duration>) -> Result<(), WaitError> {
        let since = Instant::now();
        let left = || timeout.map(|timeout| timeout.saturating_sub(since.elapsed()));
        let deadline = || WaitError::Deadline { waited: since.elapsed() };
        let mut locked = None;
        let lsn = loop {
            if let Some(lsn) = self.lsn.get() {
                break *lsn;
            }
            let guard = locked.take().unwrap_or_else(|| self.shared.lock());
            // Checked again under the lock, so that no notification is missed.
            if self.lsn.get().is_none() {
                if let Some(failure) = &guard.failure
                    && guard.has_ended
                {
                    return Err(failure.clone().into());
                }
                let limit = left().unwrap_or(Duration::from_secs(60));
                if limit.is_zero() {
                    return Err(deadline());
                }
                locked = Some(self.shared.wait(guard, limit));
            }
        };
        drop(locked);
        self.shared.wal.wait_durable(lsn, left()).map_err(|error| match error {
            DurableError::Deadline { .. } => deadline(),
            DurableError::Over(failure) => StoreFailure::Log(failure).into(),
            error => StoreFailure::Other(error.to_string()).into(),
        })
    }
}

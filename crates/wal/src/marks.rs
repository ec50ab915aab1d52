//! The log's progress as other threads see it, and the callers that wait for more.
//!
//! The committer moves the marks and wakes only the callers that have waited for them.

use std::collections::BTreeMap;
use std::future::Future;
use std::pin::Pin;
use std::sync::{Arc, Condvar, Mutex, PoisonError};
use std::task::{Context, Poll, Waker};
use std::time::{Duration, Instant};

use riopipe_platform::Sleeper;
use riopipe_wal_core::Lsn;
use riopipe_wal_core::writer::Writer;

use crate::error::{DurableError, WalFailure};
use crate::queue::{Queue, lock};

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
        let (blocks, free) = (writer.blocks(), writer.free());
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

#[derive(Debug, Default)]
struct State {
    progress: Progress,
    over: Option<WalFailure>,
    waiters: Waiters,
    numbers: u64,
}

/// By the Lsn waited for, and a number of its own.
type Waiters = BTreeMap<(Lsn, u64), Waker>;

/// Wakes waiters. The caller must have no lock.
fn wake_all(waiters: Waiters) {
    for _ in 0..riopipe_platform::wake_all(waiters.into_values()) {
        tracing::error!("the waker of a task that waits for a record has panicked");
    }
}

/// The marks of a log, and the callers that wait for them.
#[derive(Debug, Default)]
pub(crate) struct Marks {
    state: Mutex<State>,
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

/// Waits until a record, and every record before it, is durable: by [`wait`](Self::wait), or as a
/// [`Future`] on any async runtime. The log's own thread wakes each waiter once, and nothing is
/// polled.
///
/// It does not keep the log open, and may be dropped at any time.
#[derive(Debug)]
#[must_use = "nothing is waited for until it is"]
pub struct Durable {
    marks: Arc<Marks>,
    queue: Arc<Queue>,
    lsn: Lsn,
    waiter: Option<u64>,
}

impl Durable {
    pub(crate) fn new(marks: Arc<Marks>, queue: Arc<Queue>, lsn: Lsn) -> Self {
        Self { marks, queue, lsn, waiter: None }
    }

    /// Whether the record is durable, without waiting.
    ///
    /// # Errors
    /// [`DurableError`].
    pub fn is_durable(&self) -> Result<bool, DurableError> {
        let end = self.queue.end();
        if self.lsn >= end {
            return Err(DurableError::NotAppended { lsn: self.lsn, end });
        }
        let state = lock(&self.marks.state);
        match &state.over {
            _ if self.lsn < state.progress.durable => Ok(true),
            Some(over) => Err(over.clone().into()),
            None => Ok(false),
        }
    }

    /// Blocks until the record is durable, at most for `timeout`.
    ///
    /// # Errors
    /// [`DurableError`].
    pub fn wait(mut self, timeout: Option<Duration>) -> Result<(), DurableError> {
        let since = Instant::now();
        let sleeper = Arc::new(Sleeper::default());
        let waker = Waker::from(Arc::clone(&sleeper));
        let mut context = Context::from_waker(&waker);
        loop {
            if let Poll::Ready(result) = Pin::new(&mut self).poll(&mut context) {
                return result;
            }
            let waited = since.elapsed();
            match timeout.map(|timeout| timeout.saturating_sub(waited)) {
                None => sleeper.sleep(None),
                Some(Duration::ZERO) => {
                    return Err(DurableError::Deadline { lsn: self.lsn, waited });
                }
                Some(left) => sleeper.sleep(Some(left)),
            }
        }
    }

    /// Checks, and stores `waker` if the record is not durable yet.
    fn check(&mut self, waker: &Waker) -> Result<bool, DurableError> {
        let end = self.queue.end();
        if self.lsn >= end {
            return Err(DurableError::NotAppended { lsn: self.lsn, end });
        }
        // Wakers are cloned and dropped without the lock: that may run any code, also a wait's drop.
        let waker = waker.clone();
        let mut state = lock(&self.marks.state);
        if self.lsn < state.progress.durable {
            self.waiter = None;
            return Ok(true);
        }
        if let Some(over) = &state.over {
            return Err(over.clone().into());
        }
        let number = self.waiter.unwrap_or_else(|| {
            state.numbers += 1;
            state.numbers
        });
        let old = state.waiters.insert((self.lsn, number), waker);
        drop(state);
        drop(old);
        if self.waiter.replace(number).is_none() {
            // Drives with a volatile cache are flushed only for callers that wait.
            self.queue.want(self.lsn);
        }
        Ok(false)
    }
}

impl Future for Durable {
    type Output = Result<(), DurableError>;

    fn poll(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<Self::Output> {
        match self.check(context.waker()) {
            Ok(true) => Poll::Ready(Ok(())),
            Ok(false) => Poll::Pending,
            Err(error) => Poll::Ready(Err(error)),
        }
    }
}

impl Drop for Durable {
    fn drop(&mut self) {
        if let Some(number) = self.waiter {
            let waker = lock(&self.marks.state).waiters.remove(&(self.lsn, number));
            // Without the lock, as in `check`.
            drop(waker);
        }
    }
}

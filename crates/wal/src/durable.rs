//! Waiting until a record is durable, by a blocked thread or as a [`Future`].

use std::future::Future;
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll, Waker};
use std::time::{Duration, Instant};

use riopipe_platform::Sleeper;
use riopipe_wal_core::Lsn;

use crate::error::DurableError;
use crate::lock::lock;
use crate::marks::Marks;
use crate::queue::Queue;

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
            self.queue.request_durable(self.lsn);
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

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
use crate::marks::{Marks, WaiterKey};
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
    /// The number of this waiter in [`Marks`], once it is registered there.
    waiter_number: Option<u64>,
}

impl Durable {
    pub(crate) fn new(marks: Arc<Marks>, queue: Arc<Queue>, lsn: Lsn) -> Self {
        Self { marks, queue, lsn, waiter_number: None }
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
        if self.lsn < state.progress.durable {
            return Ok(true);
        }
        match &state.end_reason {
            Some(reason) => Err(reason.clone().into()),
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

    /// Returns whether the record is durable. If it is not, registers `waker` to be woken then.
    fn check_or_register(&mut self, waker: &Waker) -> Result<bool, DurableError> {
        let end = self.queue.end();
        if self.lsn >= end {
            return Err(DurableError::NotAppended { lsn: self.lsn, end });
        }
        // Wakers are cloned and dropped without the lock, because that may run any code, even the
        // drop of another `Durable`.
        let waker = waker.clone();
        let mut state = lock(&self.marks.state);
        if self.lsn < state.progress.durable {
            self.waiter_number = None;
            return Ok(true);
        }
        if let Some(reason) = &state.end_reason {
            return Err(reason.clone().into());
        }
        let number = self.waiter_number.unwrap_or_else(|| {
            state.last_waiter_number += 1;
            state.last_waiter_number
        });
        let old_waker = state.waiters.insert(WaiterKey { lsn: self.lsn, number }, waker);
        drop(state);
        drop(old_waker);
        let is_first_check = self.waiter_number.replace(number).is_none();
        if is_first_check {
            // Drives with a volatile cache are flushed only for callers that wait.
            self.queue.request_durable(self.lsn);
        }
        Ok(false)
    }
}

impl Future for Durable {
    type Output = Result<(), DurableError>;

    fn poll(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<Self::Output> {
        match self.check_or_register(context.waker()) {
            Ok(true) => Poll::Ready(Ok(())),
            Ok(false) => Poll::Pending,
            Err(error) => Poll::Ready(Err(error)),
        }
    }
}

impl Drop for Durable {
    fn drop(&mut self) {
        if let Some(number) = self.waiter_number {
            let key = WaiterKey { lsn: self.lsn, number };
            let waker = lock(&self.marks.state).waiters.remove(&key);
            // The lock is free again here: dropping a waker may run any code.
            drop(waker);
        }
    }
}

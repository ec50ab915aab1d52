//! Watching a stream from other threads, and from async code.

use std::future::Future;
use std::pin::Pin;
use std::sync::{Arc, Condvar, Mutex, PoisonError};
use std::task::{Context, Poll, Wake, Waker};
use std::time::{Duration, Instant};

use riopipe_order::attribute::Seq;
use riopipe_order::engine::Marks;
use riopipe_session::initiator::stream_driver::{Mark, Place, StreamIncarnation};

use crate::background::Background;
use crate::error::WaitError;
use crate::failure::StreamFailure;
use crate::shared::lock;
use crate::stream_shell::StreamHandle;
use crate::watched::{Over, Wait, Watched};

/// The marks of a stream, for other threads, to read and to wait for. The stream's owner moves them
/// in its calls. While the owner is in no call, and a watch reads them or waits for them, the
/// volume's background thread moves them, without delay.
///
/// A watch does not keep the stream open, and may be cloned and dropped at any time.
///
/// A stream that is [reopened](crate::Stream::reopen) gives the numbers of lost groups again. A thread
/// that waits for another thread's group is best given a [`MarkWait`], made right after the submission,
/// and not a number: it never takes another group for its own.
///
/// ```no_run
/// # fn commits(mut stream: riopipe::Stream) -> Result<(), Box<dyn std::error::Error>> {
/// use riopipe::Place;
///
/// let watch = stream.watch();
/// let page = stream.buf(4096)?;
/// let seq = stream.group().write(0, page, Place::Fresh).submit_durable()?;
/// std::thread::spawn(move || watch.wait_durable(seq, None)); // or: watch.durable(seq).await
/// # Ok(())
/// # }
/// ```
#[derive(Clone, Debug)]
pub struct Watch {
    watched: Arc<Watched<StreamFailure>>,
    /// Wakes the thread that drives the stream.
    driver: riopipe_net::Waker,
    background: riopipe_net::Waker,
}

impl Watch {
    pub(crate) fn new(handle: &StreamHandle, background: &Background) -> Self {
        let (driver, background) = (handle.waker().clone(), background.waker().clone());
        Self { watched: Arc::clone(&handle.watched), driver, background }
    }

    /// The marks, as they were found last. They never go back, unless the stream is
    /// [reopened](crate::Stream::reopen). Reading them in a loop costs
    /// more than [waiting](Self::wait_durable).
    #[must_use]
    pub fn marks(&self) -> Marks {
        self.look();
        self.watched.marks()
    }

    /// The last group that is *released*: see [`Stream::released`](crate::Stream::released). It may
    /// lag behind what the stream itself would say, never run ahead.
    #[must_use]
    pub fn released(&self) -> Seq {
        self.look();
        self.watched.released()
    }

    /// Whether the stream has failed.
    #[must_use]
    pub fn has_failed(&self) -> bool {
        self.look();
        self.watched.has_failed()
    }

    /// Blocks until group `seq` and all before it are durable, at most for `timeout`. If no group
    /// submitted since asked for that, the drives are flushed. A group that has not been submitted
    /// yet is waited for, too.
    ///
    /// # Errors
    /// The time is up; or the stream has failed, was closed or was dropped, and the group was not
    /// durable before.
    pub fn wait_durable(&self, seq: Seq, timeout: Option<Duration>) -> Result<Marks, WaitError> {
        self.durable(seq).wait(timeout)
    }

    /// Blocks until group `seq` and all before it are complete on all targets, at most for
    /// `timeout`. A group that has not been submitted yet is waited for, too.
    ///
    /// # Errors
    /// As [`wait_durable`](Self::wait_durable).
    pub fn wait_complete(&self, seq: Seq, timeout: Option<Duration>) -> Result<Marks, WaitError> {
        self.complete(seq).wait(timeout)
    }

    /// As [`wait_durable`](Self::wait_durable), as a future.
    pub fn durable(&self, seq: Seq) -> MarkWait {
        MarkWait::new(self, Mark::Durable, seq)
    }

    /// As [`wait_complete`](Self::wait_complete), as a future.
    pub fn complete(&self, seq: Seq) -> MarkWait {
        MarkWait::new(self, Mark::Complete, seq)
    }

    /// The background thread takes the stream over if its owner is in no call.
    fn look(&self) {
        if self.watched.look() {
            self.background.wake();
        }
    }
}

/// Waits for a mark of a stream: a [`Future`] that needs no particular runtime. The thread that
/// moves the mark wakes it; nothing is polled. It may be dropped at any time.
///
/// It ends as [`Watch::wait_durable`] does, without a time limit. It is for the group that has this
/// number now, or gets it next: if the stream is [reopened](crate::Stream::reopen) after this was made,
/// and that group was lost, it ends with the stream's failure, though another group may get the same
/// number.
#[derive(Debug)]
#[must_use = "nothing is waited for until it is"]
pub struct MarkWait {
    watch: Watch,
    mark: Mark,
    seq: Seq,
    incarnation: StreamIncarnation,
    /// Its place in the list of waiters, once it has been polled.
    place: Option<Place>,
}

impl MarkWait {
    fn new(watch: &Watch, mark: Mark, seq: Seq) -> Self {
        Self {
            watch: watch.clone(),
            mark,
            seq,
            incarnation: watch.watched.incarnation(),
            place: None,
        }
    }

    /// Blocks the thread until it has ended, at most for `timeout`: see [`Watch::wait_durable`].
    ///
    /// # Errors
    /// As [`Watch::wait_durable`].
    pub fn wait(mut self, timeout: Option<Duration>) -> Result<Marks, WaitError> {
        if let Some(marks) = self.watch.watched.reached(self.mark, self.seq, self.incarnation) {
            return Ok(marks);
        }
        let since = Instant::now();
        let bell = Arc::new(Bell::default());
        let waker = Waker::from(Arc::clone(&bell));
        loop {
            if let Poll::Ready(result) = self.check(&waker) {
                return result;
            }
            let left = timeout.map(|timeout| timeout.saturating_sub(since.elapsed()));
            if let (Some(timeout), Some(Duration::ZERO)) = (timeout, left) {
                return Err(WaitError::Deadline(timeout));
            }
            bell.sleep(left);
        }
    }

    fn check(&mut self, waker: &Waker) -> Poll<Result<Marks, WaitError>> {
        let Watch { watched, driver, background } = &self.watch;
        let seq = self.seq;
        if self.place.is_none()
            && let Some(marks) = watched.reached(self.mark, seq, self.incarnation)
        {
            return Poll::Ready(Ok(marks));
        }
        match watched.wait(self.mark, seq, self.incarnation, self.place, waker) {
            Wait::Reached(marks) => {
                self.place = None;
                Poll::Ready(Ok(marks))
            }
            Wait::Over(over) => {
                self.place = None;
                Poll::Ready(Err(match over {
                    Over::Failed(failure) => failure.into(),
                    Over::Closed => WaitError::Closed { seq, last: watched.marks().durable },
                    Over::Dropped => WaitError::Dropped { seq },
                }))
            }
            Wait::Waits { place, background: first, driver: wanted } => {
                self.place = Some(place);
                if wanted {
                    driver.wake();
                }
                if first {
                    background.wake();
                }
                Poll::Pending
            }
        }
    }
}

impl Future for MarkWait {
    type Output = Result<Marks, WaitError>;

    fn poll(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<Self::Output> {
        self.check(context.waker())
    }
}

impl Drop for MarkWait {
    fn drop(&mut self) {
        if let Some(place) = self.place {
            self.watch.watched.leave(self.mark, place);
        }
    }
}

/// Wakes a thread that blocks in a wait. It is no unpark: who parks that thread for something else may
/// depend on each of these.
#[derive(Debug, Default)]
struct Bell {
    rung: Mutex<bool>,
    changed: Condvar,
}

impl Bell {
    /// Sleeps until it is rung, at most for so long; it is not rung any more afterwards.
    fn sleep(&self, most: Option<Duration>) {
        let rung = lock(&self.rung);
        let mut rung = match most {
            None => {
                self.changed.wait_while(rung, |rung| !*rung).unwrap_or_else(PoisonError::into_inner)
            }
            Some(most) => {
                let waited = self.changed.wait_timeout_while(rung, most, |rung| !*rung);
                waited.unwrap_or_else(PoisonError::into_inner).0
            }
        };
        *rung = false;
    }
}

impl Wake for Bell {
    fn wake(self: Arc<Self>) {
        *lock(&self.rung) = true;
        self.changed.notify_one();
    }
}

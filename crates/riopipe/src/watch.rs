//! Watching a stream from other threads, and from async code.

use std::future::Future;
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll, Waker};
use std::time::{Duration, Instant};

use riopipe_order::attribute::Seq;
use riopipe_order::engine::Marks;
use riopipe_platform::Sleeper;
use riopipe_session::initiator::stream_driver::{Mark, Place, StreamIncarnation};

use crate::background::Background;
use crate::error::WaitError;
use crate::failure::StreamFailure;
use crate::stream_handle::StreamHandle;
use crate::watched::{MarksEnd, Wait, Watched};

/// A handle by which other threads read the marks of a stream, and wait for them. The marks advance
/// in each call of the stream's owner. Between its calls the volume's background thread advances
/// them, without delay, as soon as a watch reads the marks or waits for them.
///
/// A watch does not keep the stream open, and may be cloned and dropped at any time.
///
/// A stream that is [reopened](crate::Stream::reopen) uses the seqs of lost groups again. If that may
/// happen, give another thread a [`MarkWait`], made right after the submission, and not the seq. A
/// later group with the same seq does not end that wait.
///
/// ```no_run
/// # fn commits(mut stream: riopipe::Stream) -> Result<(), Box<dyn std::error::Error>> {
/// use riopipe::Place;
///
/// let watch = stream.watch();
/// let page = stream.buf(4096)?;
/// let seq = stream.group().write(0, page, Place::Fresh).submit_durable()?;
/// let durable = watch.durable(seq); // a MarkWait, which is a future, too
/// std::thread::spawn(move || durable.wait(None));
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

    /// The marks that were published last. They never go back, unless the stream is
    /// [reopened](crate::Stream::reopen). Reading them in a loop costs more than
    /// [waiting](Self::wait_durable).
    #[must_use]
    pub fn marks(&self) -> Marks {
        self.begin_read();
        self.watched.marks()
    }

    /// The seq of the last group that is *released*: see
    /// [`Stream::released`](crate::Stream::released). It may be behind the stream's own mark, never
    /// ahead of it.
    #[must_use]
    pub fn released(&self) -> Seq {
        self.begin_read();
        self.watched.released()
    }

    /// Whether the stream has failed, and has not been reopened since.
    #[must_use]
    pub fn has_failed(&self) -> bool {
        self.begin_read();
        self.watched.has_failed()
    }

    /// Blocks until group `seq` and all earlier ones are durable, for `timeout` at most; `None` means
    /// without limit. The drives are flushed if neither this group nor a later one was submitted as
    /// durable. The group may also be submitted after this call has begun.
    ///
    /// # Errors
    /// The time is up; or the stream has failed, was closed or was dropped, and the group was not
    /// durable before.
    pub fn wait_durable(&self, seq: Seq, timeout: Option<Duration>) -> Result<Marks, WaitError> {
        self.durable(seq).wait(timeout)
    }

    /// Blocks until group `seq` and all earlier ones are complete on all targets, for `timeout` at
    /// most; `None` means without limit. The group may be submitted later.
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
    fn begin_read(&self) {
        if self.watched.begin_read() {
            self.background.wake();
        }
    }
}

/// A wait for a mark of a stream: a [`Future`] that needs no particular runtime. The thread that
/// moves the mark wakes it; nothing is polled. It may be dropped at any time.
///
/// It ends as [`Watch::wait_durable`] does, without a time limit. It is for the group that has this
/// seq now, or gets it next. If that group is lost, and the stream is
/// [reopened](crate::Stream::reopen) after this was made, it ends with the stream's failure, even if
/// another group gets the same seq.
#[derive(Debug)]
#[must_use = "it does not wait until it is awaited or `wait` is called"]
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

    /// Blocks the thread until the wait has ended, for `timeout` at most; `None` means without limit.
    /// See [`Watch::wait_durable`].
    ///
    /// # Errors
    /// As [`Watch::wait_durable`].
    pub fn wait(mut self, timeout: Option<Duration>) -> Result<Marks, WaitError> {
        if let Some(marks) = self.watch.watched.reached(self.mark, self.seq, self.incarnation) {
            return Ok(marks);
        }
        let since = Instant::now();
        let sleeper = Arc::new(Sleeper::default());
        let waker = Waker::from(Arc::clone(&sleeper));
        loop {
            if let Poll::Ready(result) = self.check(&waker) {
                return result;
            }
            let left = timeout.map(|timeout| timeout.saturating_sub(since.elapsed()));
            if let (Some(timeout), Some(Duration::ZERO)) = (timeout, left) {
                return Err(WaitError::Deadline(timeout));
            }
            sleeper.sleep(left);
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
            Wait::Ended(over) => {
                self.place = None;
                Poll::Ready(Err(match over {
                    MarksEnd::Failed(failure) => failure.into(),
                    MarksEnd::Closed => WaitError::Closed { seq, last: watched.marks().durable },
                    MarksEnd::Dropped => WaitError::Dropped { seq },
                }))
            }
            Wait::Waits { place, wake_background, wake_driver } => {
                self.place = Some(place);
                if wake_driver {
                    driver.wake();
                }
                if wake_background {
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

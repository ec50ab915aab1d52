//! Watching a stream from other threads, and from async code.
//!
//! A [`Watch`] makes a [`MarkWait`] for one group. The first poll of the wait enters the list of waiters
//! ([`PublishedMarks::poll_wait`]). The thread that moves the mark takes the waiter out of the list and
//! wakes it.

use std::future::Future;
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll, Waker};
use std::time::{Duration, Instant};

use riopipe_order::attribute::Seq;
use riopipe_order::engine::Marks;
use riopipe_platform::Sleeper;
use riopipe_session::initiator::stream_driver::{Mark, Place, StreamIncarnation};

use crate::background::BackgroundThread;
use crate::error::WaitError;
use crate::failure::StreamFailure;
use crate::published_marks::{MarksEnd, PublishedMarks, WaitState};
use crate::stream_handle::StreamHandle;

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
    published_marks: Arc<PublishedMarks<StreamFailure>>,
    /// Wakes the thread that drives the stream.
    driver_waker: riopipe_net::Waker,
    background_waker: riopipe_net::Waker,
}

impl Watch {
    pub(crate) fn new(handle: &StreamHandle, background: &BackgroundThread) -> Self {
        Self {
            published_marks: Arc::clone(&handle.published_marks),
            driver_waker: handle.waker().clone(),
            background_waker: background.waker().clone(),
        }
    }

    /// The marks that were published last. They never go back, unless the stream is
    /// [reopened](crate::Stream::reopen). Reading them in a loop costs more than
    /// [waiting](Self::wait_durable).
    #[must_use]
    pub fn marks(&self) -> Marks {
        self.record_read();
        self.published_marks.marks()
    }

    /// The seq of the last group that is *released*: see
    /// [`Stream::released`](crate::Stream::released). It may be behind the stream's own mark, never
    /// ahead of it.
    #[must_use]
    pub fn released(&self) -> Seq {
        self.record_read();
        self.published_marks.released()
    }

    /// Whether the stream has failed, and has not been reopened since.
    #[must_use]
    pub fn has_failed(&self) -> bool {
        self.record_read();
        self.published_marks.has_failed()
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

    /// Records a read of the marks. Wakes the background thread at the first read since the owner's last
    /// call: it drives the stream from then on, if the owner is not calling.
    fn record_read(&self) {
        if self.published_marks.record_read() {
            self.background_waker.wake();
        }
    }
}

/// A wait for a mark of a stream: a [`Future`] that needs no particular runtime. The thread that
/// moves the mark wakes the wait. The wait may be dropped at any time.
///
/// It has the results of [`Watch::wait_durable`], and no time limit. It is bound to the group that has
/// the seq when the wait is made, or gets the seq next. If that group is lost, and the stream is
/// [reopened](crate::Stream::reopen) afterwards, the wait ends with the stream's failure, even if
/// another group gets the same seq.
#[derive(Debug)]
#[must_use = "it does not wait until it is awaited or `wait` is called"]
pub struct MarkWait {
    watch: Watch,
    mark: Mark,
    seq: Seq,
    /// The incarnation of the stream when the wait was made.
    incarnation: StreamIncarnation,
    /// The place in the list of waiters, while the wait is in the list.
    place: Option<Place>,
}

impl MarkWait {
    fn new(watch: &Watch, mark: Mark, seq: Seq) -> Self {
        Self {
            watch: watch.clone(),
            mark,
            seq,
            incarnation: watch.published_marks.incarnation(),
            place: None,
        }
    }

    /// Blocks the thread until the wait has ended, for `timeout` at most; `None` means without limit.
    /// See [`Watch::wait_durable`].
    ///
    /// # Errors
    /// As [`Watch::wait_durable`].
    pub fn wait(mut self, timeout: Option<Duration>) -> Result<Marks, WaitError> {
        if let Some(marks) = self.marks_if_reached() {
            return Ok(marks);
        }
        let begun = Instant::now();
        let sleeper = Arc::new(Sleeper::default());
        let waker = Waker::from(Arc::clone(&sleeper));
        loop {
            if let Poll::Ready(result) = self.poll_with(&waker) {
                return result;
            }
            let remaining = timeout.map(|timeout| timeout.saturating_sub(begun.elapsed()));
            if let (Some(timeout), Some(Duration::ZERO)) = (timeout, remaining) {
                return Err(WaitError::Deadline(timeout));
            }
            sleeper.sleep(remaining);
        }
    }

    fn marks_if_reached(&self) -> Option<Marks> {
        let published_marks = &self.watch.published_marks;
        published_marks.marks_if_reached(self.mark, self.seq, self.incarnation)
    }

    /// Enters the list of waiters, or renews the waker there. Returns the result if the wait has ended.
    fn poll_with(&mut self, waker: &Waker) -> Poll<Result<Marks, WaitError>> {
        // A wait whose mark is reached already needs no lock.
        if self.place.is_none()
            && let Some(marks) = self.marks_if_reached()
        {
            return Poll::Ready(Ok(marks));
        }
        let published_marks = &self.watch.published_marks;
        match published_marks.poll_wait(self.mark, self.seq, self.incarnation, self.place, waker) {
            WaitState::Reached(marks) => {
                self.place = None;
                Poll::Ready(Ok(marks))
            }
            WaitState::Ended(reason) => {
                self.place = None;
                Poll::Ready(Err(self.end_error(reason)))
            }
            WaitState::Waiting { place, wake_background, wake_driver } => {
                self.place = Some(place);
                if wake_driver {
                    self.watch.driver_waker.wake();
                }
                if wake_background {
                    self.watch.background_waker.wake();
                }
                Poll::Pending
            }
        }
    }

    /// The error of a wait whose mark will never reach the group.
    fn end_error(&self, reason: MarksEnd<StreamFailure>) -> WaitError {
        let seq = self.seq;
        match reason {
            MarksEnd::Failed(failure) => failure.into(),
            MarksEnd::Closed => {
                let last = self.watch.published_marks.marks().durable;
                WaitError::Closed { seq, last }
            }
            MarksEnd::Dropped => WaitError::Dropped { seq },
        }
    }
}

impl Future for MarkWait {
    type Output = Result<Marks, WaitError>;

    fn poll(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<Self::Output> {
        self.poll_with(context.waker())
    }
}

impl Drop for MarkWait {
    fn drop(&mut self) {
        if let Some(place) = self.place {
            self.watch.published_marks.remove_waiter(self.mark, place);
        }
    }
}

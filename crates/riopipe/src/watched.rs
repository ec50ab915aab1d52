//! A stream's marks as other threads see them, and the threads that wait for them.

use std::task::Waker;

use riopipe_order::attribute::Seq;
use riopipe_order::engine::Marks;
use riopipe_session::initiator::stream_driver::{
    Entry, Mark, MarksSnapshot, Place, StreamIncarnation, Waitlist,
};

use super::sync::{AtomicBool, AtomicU64, Mutex, MutexGuard, Ordering, fence, lock};

/// The marks that the driving thread of a stream has published last, and whether the stream has
/// failed. One thread writes at a time: the one that has taken the stream. `F` is a failure.
#[derive(Debug)]
pub(crate) struct Watched<F> {
    complete: AtomicU64,
    durable: AtomicU64,
    released: AtomicU64,
    failed: AtomicBool,
    /// The incarnation of the stream to which the marks belong.
    incarnation: AtomicU64,
    /// The group up to which durability has been requested by the owner. A waiter for these groups
    /// need not wake the driver.
    durable_requested: AtomicU64,
    /// The last group for whose durability a thread waits.
    durable_awaited: AtomicU64,
    /// Whether the list of waiters is not empty.
    has_waiters: AtomicBool,
    /// Whether a watch has read the marks since the last call of the stream's owner.
    was_read: AtomicBool,
    waiters: Mutex<Waiters<F>>,
}

#[derive(Debug)]
struct Waiters<F> {
    list: Waitlist<Waker>,
    /// Why the marks do not move any more, if so.
    end: Option<MarksEnd<F>>,
    /// Why the incarnation before this one ended.
    lost: Option<MarksEnd<F>>,
}

/// Why the marks do not move any more.
#[derive(Clone, Debug)]
pub(crate) enum MarksEnd<F> {
    Failed(F),
    Closed,
    Dropped,
}

/// The state of a wait.
#[derive(Debug)]
pub(crate) enum Wait<F> {
    /// The mark is reached. These are the marks.
    Reached(Marks),
    /// The mark will not be reached any more.
    Ended(MarksEnd<F>),
    /// The waiter is in the list.
    Waits {
        place: Place,
        /// Whether the caller must wake the background thread.
        wake_background: bool,
        /// Whether the caller must wake the thread that drives the stream.
        wake_driver: bool,
    },
}

impl<F: Clone> Watched<F> {
    pub(crate) fn new(start: Seq) -> Self {
        Self {
            complete: AtomicU64::new(start.0),
            durable: AtomicU64::new(start.0),
            released: AtomicU64::new(start.0),
            failed: AtomicBool::new(false),
            incarnation: AtomicU64::new(0),
            durable_requested: AtomicU64::new(start.0),
            durable_awaited: AtomicU64::new(0),
            has_waiters: AtomicBool::new(false),
            was_read: AtomicBool::new(false),
            waiters: Mutex::new(Waiters { list: Waitlist::new(), end: None, lost: None }),
        }
    }

    /// Publishes marks that have moved. A thread that reads them also sees all that the writer did
    /// before. Returns the waiters that must be woken. A woken waiter may run any code, so the caller
    /// must have no lock then, and may have a stream only if it is the stream's owner.
    #[must_use]
    pub(crate) fn publish(&self, marks: Marks) -> Vec<Waker> {
        self.complete.store(marks.complete.0, Ordering::Release);
        self.durable.store(marks.durable.0, Ordering::Release);
        // The fence is between these stores and the load. The waiter's fence is between its store and
        // its loads. So at least one of the two threads sees the store of the other.
        fence(Ordering::SeqCst);
        if self.has_waiters.load(Ordering::Relaxed) { self.take_reached(marks) } else { Vec::new() }
    }

    #[cold]
    fn take_reached(&self, marks: Marks) -> Vec<Waker> {
        let mut waiters = lock(&self.waiters);
        let reached = waiters.list.take_reached(marks);
        self.update_waiter_fields(&waiters);
        reached
    }

    #[inline]
    pub(crate) fn publish_released(&self, released: Seq) {
        self.released.store(released.0, Ordering::Release);
    }

    pub(crate) fn released(&self) -> Seq {
        Seq(self.released.load(Ordering::Acquire))
    }

    /// Groups up to `seq` become durable without a request of a waiter.
    #[inline]
    pub(crate) fn publish_asked(&self, seq: Seq) {
        self.durable_requested.store(seq.0, Ordering::Release);
    }

    /// The last group up to `last` for whose durability a thread waits; 0 if there is none.
    #[inline]
    pub(crate) fn wanted(&self, last: Seq) -> Seq {
        let wanted = Seq(self.durable_awaited.load(Ordering::Acquire));
        if wanted <= last { wanted } else { self.wanted_up_to(last) }
    }

    #[cold]
    fn wanted_up_to(&self, last: Seq) -> Seq {
        lock(&self.waiters).list.wanted_up_to(last).unwrap_or(Seq::ZERO)
    }

    /// Records that the marks do not move any more. The first reason counts. Returns the waiters that
    /// must be woken, as [`publish`](Self::publish) does.
    #[must_use]
    pub(crate) fn end(&self, over: MarksEnd<F>) -> Vec<Waker> {
        let mut waiters = lock(&self.waiters);
        if matches!(over, MarksEnd::Failed(_)) {
            self.failed.store(true, Ordering::Release);
        }
        waiters.end.get_or_insert(over);
        let all = waiters.list.take_all();
        self.update_waiter_fields(&waiters);
        all
    }

    /// Begins a new incarnation after the stream has been reopened. Its marks may go back. No thread
    /// waits, because the stream had failed.
    pub(crate) fn restart(&self, start: Seq) {
        let mut waiters = lock(&self.waiters);
        waiters.list.restart(start);
        // Before the stores below: a thread that reads a later mark then sees the new incarnation, too.
        self.incarnation.store(waiters.list.incarnation().0, Ordering::Release);
        // Only here the durable mark comes first, because it goes back.
        self.durable.store(start.0, Ordering::Release);
        self.complete.store(start.0, Ordering::Release);
        self.released.store(start.0, Ordering::Release);
        self.durable_requested.store(start.0, Ordering::Release);
        self.failed.store(false, Ordering::Release);
        waiters.lost = waiters.end.take();
    }

    /// The present incarnation of the stream. Waits that begin now belong to it.
    pub(crate) fn incarnation(&self) -> StreamIncarnation {
        StreamIncarnation(self.incarnation.load(Ordering::Acquire))
    }

    /// The marks, if `mark` is at group `seq` and they are of this incarnation.
    pub(crate) fn reached(
        &self,
        mark: Mark,
        seq: Seq,
        incarnation: StreamIncarnation,
    ) -> Option<Marks> {
        let marks = self.marks();
        (mark.of(marks) >= seq && self.incarnation() == incarnation).then_some(marks)
    }

    pub(crate) fn marks(&self) -> Marks {
        // The durable mark first: the complete mark, which is read after it, is not behind it, unless
        // the stream was reopened in between.
        let durable = Seq(self.durable.load(Ordering::Acquire));
        let complete = Seq(self.complete.load(Ordering::Acquire));
        Marks { complete, durable: durable.min(complete) }
    }

    pub(crate) fn has_failed(&self) -> bool {
        self.failed.load(Ordering::Acquire)
    }

    /// A watch is about to read the marks. Returns whether it must wake the background thread: it is
    /// the first since the owner's last call, and no thread may have driven the stream since then.
    #[inline]
    pub(crate) fn begin_read(&self) -> bool {
        !self.was_read.load(Ordering::Relaxed) && !self.was_read.swap(true, Ordering::AcqRel)
    }

    /// Records that a call of the owner ends. After that, the next watch that reads the marks is again
    /// the first one.
    #[inline]
    pub(crate) fn owner_called(&self) {
        if self.was_read.load(Ordering::Relaxed) {
            self.was_read.store(false, Ordering::Relaxed);
        }
    }

    /// Whether a thread waits for the marks, or has read them since the owner's last call.
    pub(crate) fn is_awaited(&self) -> bool {
        self.has_waiters.load(Ordering::Acquire) || self.was_read.load(Ordering::Acquire)
    }

    /// Begins or continues a wait until `mark` is at group `seq`, for a waiter of this incarnation;
    /// `place` is its place in the list, if it has one.
    pub(crate) fn wait(
        &self,
        mark: Mark,
        seq: Seq,
        incarnation: StreamIncarnation,
        place: Option<Place>,
        waker: &Waker,
    ) -> Wait<F> {
        // Wakers are cloned and dropped without the lock: that may run any code, also a wait's drop.
        let mut waker = waker.clone();
        let mut waiters = lock(&self.waiters);
        if let Some(place) = place {
            match waiters.list.renew(mark, place, waker) {
                Ok(old) => {
                    drop(waiters);
                    drop(old);
                    return Wait::Waits { place, wake_background: false, wake_driver: false };
                }
                Err(back) => waker = back,
            }
        }
        let ended = waiters.end.is_some();
        // Another waiter for the same group has woken the driver.
        let is_awaited_already = waiters.list.wanted_up_to(seq) == Some(seq);
        let read_marks = || {
            self.has_waiters.store(true, Ordering::Relaxed);
            fence(Ordering::SeqCst);
            MarksSnapshot { marks: self.marks(), ended }
        };
        let wait = match waiters.list.enter(mark, seq, incarnation, waker, read_marks) {
            Entry::Reached => Wait::Reached(self.marks()),
            Entry::Ended => match waiters.end.clone() {
                Some(over) => Wait::Ended(over),
                None => unreachable!("`end` was set under the same lock"),
            },
            Entry::Lost => match waiters.lost.clone() {
                Some(over) => Wait::Ended(over),
                None => unreachable!("a stream that is reopened has failed before"),
            },
            Entry::Waits { place, is_first } => {
                let wake_driver = mark == Mark::Durable
                    && !is_awaited_already
                    && self.durable_requested.load(Ordering::Acquire) < seq.0;
                Wait::Waits { place, wake_background: is_first, wake_driver }
            }
        };
        self.update_waiter_fields(&waiters);
        wait
    }

    /// Removes a waiter from the list.
    pub(crate) fn leave(&self, mark: Mark, place: Place) {
        let mut waiters = lock(&self.waiters);
        let waker = waiters.list.remove(mark, place);
        self.update_waiter_fields(&waiters);
        drop(waiters);
        // See `wait`.
        drop(waker);
    }

    /// Stores what other threads read about the list without its lock.
    fn update_waiter_fields(&self, waiters: &MutexGuard<'_, Waiters<F>>) {
        self.has_waiters.store(!waiters.list.is_empty(), Ordering::Release);
        let wanted = waiters.list.wanted().unwrap_or(Seq::ZERO);
        self.durable_awaited.store(wanted.0, Ordering::Release);
    }
}

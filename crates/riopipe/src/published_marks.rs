//! A stream's marks as other threads read them, and the threads that wait for them.
//!
//! The thread that drives the stream publishes the marks. Other threads read them without a lock. A
//! thread that must wait for a mark enters the list of waiters, which has a lock.
//!
//! A model checker compiles this file with its own atomics, and tries every interleaving
//! (`tests/threads.rs`).

use std::task::Waker;

use riopipe_order::attribute::Seq;
use riopipe_order::engine::Marks;
use riopipe_session::initiator::stream_driver::{
    Entry, Mark, MarksSnapshot, Place, StreamIncarnation, Waitlist,
};

use super::sync::{AtomicBool, AtomicU64, Mutex, MutexGuard, Ordering, fence, lock};

/// The marks that were published last, whether the stream has failed, and the waiters. Only the thread
/// that has taken the stream publishes. `F` is the type of a failure.
#[derive(Debug)]
pub(crate) struct PublishedMarks<F> {
    complete: AtomicU64,
    durable: AtomicU64,
    released: AtomicU64,
    has_failed: AtomicBool,
    /// The incarnation of the stream to which the marks belong.
    incarnation: AtomicU64,
    /// The last group that the owner has submitted as durable. A waiter for this group or an earlier
    /// one need not wake the driving thread, because these groups are flushed anyway.
    last_durable_requested: AtomicU64,
    /// The last group for whose durability a thread waits; 0 if there is none.
    last_durable_awaited: AtomicU64,
    /// Whether the list of waiters has any.
    has_waiters: AtomicBool,
    /// Whether a watch has read the marks since the last call of the stream's owner.
    was_read_since_call: AtomicBool,
    waiters: Mutex<Waiters<F>>,
}

#[derive(Debug)]
struct Waiters<F> {
    list: Waitlist<Waker>,
    /// Why the marks do not move any more; `None` while they move.
    end: Option<MarksEnd<F>>,
    /// Why the marks of the previous incarnation ended.
    previous_end: Option<MarksEnd<F>>,
}

/// Why the marks do not move any more.
#[derive(Clone, Debug)]
pub(crate) enum MarksEnd<F> {
    Failed(F),
    Closed,
    Dropped,
}

/// The state of a wait for a mark.
#[derive(Debug)]
pub(crate) enum WaitState<F> {
    /// The mark has reached the group. The value has the present marks.
    Reached(Marks),
    /// The mark will never reach the group, for this reason.
    Ended(MarksEnd<F>),
    /// The waiter is in the list.
    Waiting {
        /// The place in the list.
        place: Place,
        /// Whether the caller must wake the background thread.
        wake_background: bool,
        /// Whether the caller must wake the thread that drives the stream.
        wake_driver: bool,
    },
}

impl<F: Clone> PublishedMarks<F> {
    pub(crate) fn new(start: Seq) -> Self {
        Self {
            complete: AtomicU64::new(start.0),
            durable: AtomicU64::new(start.0),
            released: AtomicU64::new(start.0),
            has_failed: AtomicBool::new(false),
            incarnation: AtomicU64::new(0),
            last_durable_requested: AtomicU64::new(start.0),
            last_durable_awaited: AtomicU64::new(0),
            has_waiters: AtomicBool::new(false),
            was_read_since_call: AtomicBool::new(false),
            waiters: Mutex::new(Waiters { list: Waitlist::new(), end: None, previous_end: None }),
        }
    }

    /// Publishes marks that have moved. A thread that reads these marks also sees all earlier stores of
    /// the publishing thread. Returns the waiters that the caller must wake.
    ///
    /// A waker may run any code. So the caller must hold no lock when it wakes, and may hold a stream
    /// only if it is the stream's owner.
    #[must_use]
    pub(crate) fn publish(&self, marks: Marks) -> Vec<Waker> {
        self.complete.store(marks.complete.0, Ordering::Release);
        self.durable.store(marks.durable.0, Ordering::Release);
        // No waiter is missed. This thread stores the marks, then loads `has_waiters`. A waiter stores
        // `has_waiters`, then loads the marks (`poll_wait`). Both have a fence between the two steps,
        // so at least one of the two threads sees the store of the other.
        fence(Ordering::SeqCst);
        if self.has_waiters.load(Ordering::Relaxed) { self.take_reached(marks) } else { Vec::new() }
    }

    #[cold]
    fn take_reached(&self, marks: Marks) -> Vec<Waker> {
        let mut waiters = lock(&self.waiters);
        let reached = waiters.list.take_reached(marks);
        self.publish_waiter_summary(&waiters);
        reached
    }

    #[inline]
    pub(crate) fn publish_released(&self, released: Seq) {
        self.released.store(released.0, Ordering::Release);
    }

    pub(crate) fn released(&self) -> Seq {
        Seq(self.released.load(Ordering::Acquire))
    }

    /// Publishes that the owner has submitted group `seq` as durable.
    #[inline]
    pub(crate) fn publish_durable_requested(&self, seq: Seq) {
        self.last_durable_requested.store(seq.0, Ordering::Release);
    }

    /// The last group up to `last` for whose durability a thread waits; 0 if there is none. `last` is
    /// the last submitted group. A thread may also wait for a group that is not submitted yet.
    #[inline]
    pub(crate) fn last_awaited_durable(&self, last: Seq) -> Seq {
        let awaited = Seq(self.last_durable_awaited.load(Ordering::Acquire));
        if awaited <= last { awaited } else { self.search_last_awaited_durable(last) }
    }

    #[cold]
    fn search_last_awaited_durable(&self, last: Seq) -> Seq {
        lock(&self.waiters).list.wanted_up_to(last).unwrap_or(Seq::ZERO)
    }

    /// Records that the marks do not move any more, and why. Only the first reason is kept. Returns all
    /// waiters. The caller must wake them under the conditions of [`publish`](Self::publish).
    #[must_use]
    pub(crate) fn record_end(&self, reason: MarksEnd<F>) -> Vec<Waker> {
        let mut waiters = lock(&self.waiters);
        if matches!(reason, MarksEnd::Failed(_)) {
            self.has_failed.store(true, Ordering::Release);
        }
        waiters.end.get_or_insert(reason);
        let all = waiters.list.take_all();
        self.publish_waiter_summary(&waiters);
        all
    }

    /// Begins a new incarnation of a reopened stream. Its marks begin at `start`, which may be below the
    /// old marks. The list is empty, because the failure of the stream has ended all waits.
    pub(crate) fn begin_incarnation(&self, start: Seq) {
        let mut waiters = lock(&self.waiters);
        waiters.list.restart(start);
        // The incarnation is stored first, so a thread that reads a mark of the new incarnation also
        // reads its number.
        self.incarnation.store(waiters.list.incarnation().0, Ordering::Release);
        // The durable mark may never be ahead of the complete mark. Here both go back, so the durable
        // mark is stored first. In `publish` both advance, so it is stored last.
        self.durable.store(start.0, Ordering::Release);
        self.complete.store(start.0, Ordering::Release);
        self.released.store(start.0, Ordering::Release);
        self.last_durable_requested.store(start.0, Ordering::Release);
        self.has_failed.store(false, Ordering::Release);
        waiters.previous_end = waiters.end.take();
    }

    /// The present incarnation of the stream. Waits that begin now belong to it.
    pub(crate) fn incarnation(&self) -> StreamIncarnation {
        StreamIncarnation(self.incarnation.load(Ordering::Acquire))
    }

    /// The present marks, if `mark` has reached group `seq` in this incarnation.
    pub(crate) fn marks_if_reached(
        &self,
        mark: Mark,
        seq: Seq,
        incarnation: StreamIncarnation,
    ) -> Option<Marks> {
        let marks = self.marks();
        let is_reached = mark.of(marks) >= seq && self.incarnation() == incarnation;
        is_reached.then_some(marks)
    }

    pub(crate) fn marks(&self) -> Marks {
        // The durable mark is read first, so the complete mark is not behind it. The `min` below is for
        // a stream that is reopened between the two loads.
        let durable = Seq(self.durable.load(Ordering::Acquire));
        let complete = Seq(self.complete.load(Ordering::Acquire));
        Marks { complete, durable: durable.min(complete) }
    }

    pub(crate) fn has_failed(&self) -> bool {
        self.has_failed.load(Ordering::Acquire)
    }

    /// Records that a watch is about to read the marks. Returns whether the watch must wake the
    /// background thread. It must if this is the first read since the owner's last call, because
    /// possibly no thread has driven the stream since that call.
    #[inline]
    pub(crate) fn record_read(&self) -> bool {
        // The load is cheaper than the swap, and is enough for all reads but the first.
        !self.was_read_since_call.load(Ordering::Relaxed)
            && !self.was_read_since_call.swap(true, Ordering::AcqRel)
    }

    /// Records that a call of the owner ends. The next read by a watch is the first one again.
    #[inline]
    pub(crate) fn on_owner_call_end(&self) {
        // The owner calls often, and a watch reads seldom: most calls load and do not store.
        if self.was_read_since_call.load(Ordering::Relaxed) {
            self.was_read_since_call.store(false, Ordering::Relaxed);
        }
    }

    /// Whether a thread waits for the marks, or has read them since the owner's last call.
    pub(crate) fn is_awaited(&self) -> bool {
        self.has_waiters.load(Ordering::Acquire) || self.was_read_since_call.load(Ordering::Acquire)
    }

    /// Begins or continues a wait until `mark` reaches group `seq` in this incarnation. `place` is the
    /// place of the waiter in the list, if it has one.
    pub(crate) fn poll_wait(
        &self,
        mark: Mark,
        seq: Seq,
        incarnation: StreamIncarnation,
        place: Option<Place>,
        waker: &Waker,
    ) -> WaitState<F> {
        // To clone or drop a waker may run any code, for example the drop of another wait, which takes
        // this lock. So wakers are cloned and dropped without the lock.
        let mut waker = waker.clone();
        let mut waiters = lock(&self.waiters);
        if let Some(place) = place {
            match waiters.list.renew(mark, place, waker) {
                Ok(old_waker) => {
                    drop(waiters);
                    drop(old_waker);
                    return WaitState::Waiting {
                        place,
                        wake_background: false,
                        wake_driver: false,
                    };
                }
                // The waiter has left the list: the mark has reached the group, or the marks have
                // ended.
                Err(unused_waker) => waker = unused_waker,
            }
        }
        let has_ended = waiters.end.is_some();
        // If so, an earlier waiter for the same group has woken the driving thread.
        let is_awaited_already = waiters.list.wanted_up_to(seq) == Some(seq);
        // Called by the list after it has entered the waiter; see the fence in `publish`.
        let read_marks = || {
            self.has_waiters.store(true, Ordering::Relaxed);
            fence(Ordering::SeqCst);
            MarksSnapshot { marks: self.marks(), ended: has_ended }
        };
        let state = match waiters.list.enter(mark, seq, incarnation, waker, read_marks) {
            Entry::Reached => WaitState::Reached(self.marks()),
            Entry::Ended => match waiters.end.clone() {
                Some(reason) => WaitState::Ended(reason),
                None => unreachable!("`end` was set under the same lock"),
            },
            Entry::Lost => match waiters.previous_end.clone() {
                Some(reason) => WaitState::Ended(reason),
                None => unreachable!("a stream that is reopened has failed before"),
            },
            Entry::Waits { place, is_first } => {
                let is_durable_requested =
                    || self.last_durable_requested.load(Ordering::Acquire) >= seq.0;
                let wake_driver =
                    mark == Mark::Durable && !is_awaited_already && !is_durable_requested();
                WaitState::Waiting { place, wake_background: is_first, wake_driver }
            }
        };
        self.publish_waiter_summary(&waiters);
        state
    }

    /// Removes a waiter from the list.
    pub(crate) fn remove_waiter(&self, mark: Mark, place: Place) {
        let mut waiters = lock(&self.waiters);
        let waker = waiters.list.remove(mark, place);
        self.publish_waiter_summary(&waiters);
        // The waker is dropped without the lock, because its drop may run any code.
        drop(waiters);
        drop(waker);
    }

    /// Stores the facts about the list that other threads read without the lock.
    fn publish_waiter_summary(&self, waiters: &MutexGuard<'_, Waiters<F>>) {
        self.has_waiters.store(!waiters.list.is_empty(), Ordering::Release);
        let awaited = waiters.list.wanted().unwrap_or(Seq::ZERO);
        self.last_durable_awaited.store(awaited.0, Ordering::Release);
    }
}

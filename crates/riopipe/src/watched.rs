//! A stream's marks as other threads see them.

use riopipe_order::attribute::Seq;
use riopipe_order::engine::Marks;

use super::sync::{AtomicBool, AtomicU64, Ordering};

/// The marks that whoever drives the stream has found last, and whether it has failed. One thread
/// writes at a time: the one that has taken the stream.
#[derive(Debug)]
pub(crate) struct Watched {
    complete: AtomicU64,
    durable: AtomicU64,
    released: AtomicU64,
    failed: AtomicBool,
}

impl Watched {
    pub(crate) fn new(start: Seq) -> Self {
        Self {
            complete: AtomicU64::new(start.0),
            durable: AtomicU64::new(start.0),
            released: AtomicU64::new(start.0),
            failed: AtomicBool::new(false),
        }
    }

    /// Everything that the writer did before is seen by whoever sees the marks.
    #[inline]
    pub(crate) fn publish(&self, marks: Marks) {
        self.complete.store(marks.complete.0, Ordering::Release);
        self.durable.store(marks.durable.0, Ordering::Release);
    }

    #[inline]
    pub(crate) fn publish_released(&self, released: Seq) {
        self.released.store(released.0, Ordering::Release);
    }

    pub(crate) fn released(&self) -> Seq {
        Seq(self.released.load(Ordering::Acquire))
    }

    pub(crate) fn fail(&self) {
        self.failed.store(true, Ordering::Release);
    }

    /// The stream has been reopened: its marks may go back.
    pub(crate) fn restart(&self, start: Seq) {
        // The durable mark first, here alone: it goes down.
        self.durable.store(start.0, Ordering::Release);
        self.complete.store(start.0, Ordering::Release);
        self.released.store(start.0, Ordering::Release);
        self.failed.store(false, Ordering::Release);
    }

    pub(crate) fn marks(&self) -> Marks {
        // The durable mark first: the complete one that is read after it is not behind it, unless
        // the stream was reopened in between.
        let durable = Seq(self.durable.load(Ordering::Acquire));
        let complete = Seq(self.complete.load(Ordering::Acquire));
        Marks { complete, durable: durable.min(complete) }
    }

    pub(crate) fn has_failed(&self) -> bool {
        self.failed.load(Ordering::Acquire)
    }
}

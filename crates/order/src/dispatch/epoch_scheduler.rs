//! The epoch scheduler of the barrier-enabled stack: requests leave in any order within an epoch,
//! and epochs leave one after the other.
//!
//! ```text
//! insert:    w1 w2 w3 │    w4        │: a barrier; w4 waits until the epoch has left
//! take:      w3 w1 w2│  w4           the last request of the epoch to leave is its barrier
//! ```
//!
//! - A barrier loses its flag when it comes. From then on no request is taken in.
//! - The last request of the epoch gets the flag when it leaves. Then the requests that have waited
//!   are taken in, up to the next barrier.
//!
//! A drive has one sequence of epochs for all streams. A barrier of one stream also ends the epoch
//! of the others there, which orders more than they asked for. Requests without an order do not come
//! here: their streams have connections of their own, past every scheduler.

use alloc::collections::VecDeque;

use crate::probe::{self, Plant};

/// The order that the caller of the scheduler asks for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Wish {
    /// The request belongs to the open epoch.
    Ordered,
    /// The request is the last one of the open epoch.
    Barrier,
}

/// A request that leaves the scheduler.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Scheduled<R> {
    /// The request.
    pub request: R,
    /// How the drive must treat it. It is a barrier if it is the last request of its epoch to leave,
    /// whatever the caller asked for.
    pub order: Wish,
}

/// The scheduler.
#[derive(Debug)]
pub struct EpochScheduler<R> {
    /// The requests that may leave, in the order in which they came.
    queue: VecDeque<Queued<R>>,
    /// The barrier of the epoch in `queue` has come.
    is_ended: bool,
    /// The requests of later epochs.
    waiting: VecDeque<Queued<R>>,
}

#[derive(Debug)]
struct Queued<R> {
    request: R,
    wish: Wish,
}

impl<R> Default for EpochScheduler<R> {
    fn default() -> Self {
        Self { queue: VecDeque::new(), is_ended: false, waiting: VecDeque::new() }
    }
}

impl<R> EpochScheduler<R> {
    /// Takes in a request.
    pub fn insert(&mut self, request: R, wish: Wish) {
        let is_open = !self.is_ended || probe::is_bug_planted(Plant::EpochNotBlocked);
        if is_open {
            self.accept(Queued { request, wish });
        } else {
            self.waiting.push_back(Queued { request, wish });
        }
    }

    /// Puts a request among those that may leave.
    fn accept(&mut self, queued: Queued<R>) {
        self.is_ended |= queued.wish == Wish::Barrier;
        self.queue.push_back(queued);
    }

    /// The requests that may leave, in the order in which they came. A discipline chooses among
    /// them, by their place here.
    pub fn ready(&self) -> impl ExactSizeIterator<Item = &R> {
        self.queue.iter().map(|queued| &queued.request)
    }

    /// The number of requests that wait for an earlier epoch to leave.
    #[must_use]
    pub fn waiting(&self) -> usize {
        self.waiting.len()
    }

    /// Lets the request at this place leave. `None` if there is none.
    pub fn take(&mut self, place: usize) -> Option<Scheduled<R>> {
        let Queued { request, wish } = self.queue.remove(place)?;
        let is_last = self.is_ended && self.queue.is_empty();
        let is_barrier = match probe::is_bug_planted(Plant::BarrierNotReassigned) {
            true => wish == Wish::Barrier,
            false => is_last,
        };
        if is_last {
            self.is_ended = false;
            self.accept_next_epoch();
        }
        let order = if is_barrier { Wish::Barrier } else { Wish::Ordered };
        Some(Scheduled { request, order })
    }

    /// Takes out all requests, because none of them is to leave any more.
    pub fn take_all(&mut self) -> impl Iterator<Item = R> + use<R> {
        let Self { queue, waiting, .. } = core::mem::take(self);
        queue.into_iter().chain(waiting).map(|queued| queued.request)
    }

    /// Takes in the requests that have waited, up to the next barrier.
    fn accept_next_epoch(&mut self) {
        while !self.is_ended || probe::is_bug_planted(Plant::EpochsMixed) {
            match self.waiting.pop_front() {
                Some(queued) => self.accept(queued),
                None => break,
            }
        }
    }
}

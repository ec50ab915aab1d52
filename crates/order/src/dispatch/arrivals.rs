//! The target's half of an order that a drive keeps: it submits the ordered writes of a connection
//! so that the drive learns the order in which they came.
//!
//! ```text
//! arrive:    w1 (R2T)  w2  w3 (R2T)│  w4       │: a barrier
//! submit:    w2  w1  w3│  w4                   w3 waits for the data of w1, w4 for w3
//! ```
//!
//! A write with its data in the capsule is there at once. Another one waits until its data has come
//! by R2T. NVMe has no counterpart of SCSI's ordered priority, so the target itself must hold back
//! what would overtake:
//!
//! - A barrier is submitted when all earlier writes of its epoch have been.
//! - On a drive with a cache barrier, a write behind a barrier is submitted when that barrier has
//!   been: the drive's epochs are those of the submissions. A drive with streams keeps the order
//!   between epochs by their numbers, so there such a write does not wait.
//!
//! A write that fails, or is refused, *stops* the connection's ordered writes to that drive: none
//! behind it may become durable.

use alloc::collections::VecDeque;

use crate::probe::{self, Plant};
use crate::write_order::{EpochId, WriteOrder};

/// The ordered writes of one connection to one drive that are not submitted, oldest first.
#[derive(Debug)]
pub struct ArrivedWrites<W> {
    waiting: VecDeque<Arrived<W>>,
    is_stopped: bool,
}

#[derive(Debug)]
struct Arrived<W> {
    write: W,
    order: WriteOrder,
    has_data: bool,
}

impl<W> Default for ArrivedWrites<W> {
    fn default() -> Self {
        Self { waiting: VecDeque::new(), is_stopped: false }
    }
}

impl<W: Copy + PartialEq> ArrivedWrites<W> {
    /// Whether an ordered write has failed or was refused, so that no later one may be submitted.
    #[inline]
    #[must_use]
    pub const fn is_stopped(&self) -> bool {
        self.is_stopped
    }

    /// Whether a write that arrives now with its data may be submitted at once.
    #[inline]
    #[must_use]
    pub fn can_submit_at_once(&self, order: WriteOrder) -> bool {
        self.waiting.is_empty() || !self.waiting.iter().any(|earlier| precedes(earlier, order))
    }

    /// Takes in a write that can't be submitted yet.
    pub fn push(&mut self, write: W, order: WriteOrder, has_data: bool) {
        self.waiting.push_back(Arrived { write, order, has_data });
    }

    /// Notes that the data of a write has come.
    pub fn on_data(&mut self, write: W) {
        if let Some(arrived) = self.waiting.iter_mut().find(|arrived| arrived.write == write) {
            arrived.has_data = true;
        }
    }

    /// Takes the next write that may be submitted.
    pub fn next_to_submit(&mut self) -> Option<W> {
        let is_free = |place: usize| {
            let arrived = &self.waiting[place];
            let mut earlier = self.waiting.iter().take(place);
            arrived.has_data && !earlier.any(|earlier| precedes(earlier, arrived.order))
        };
        let place = (0..self.waiting.len()).find(|place| is_free(*place))?;
        self.waiting.remove(place).map(|arrived| arrived.write)
    }

    /// Puts back the write that was taken last: it could not be submitted.
    pub fn put_back(&mut self, write: W, order: WriteOrder) {
        self.waiting.push_front(Arrived { write, order, has_data: true });
    }

    /// Stops the ordered writes, because one has failed or was refused. Returns those that wait: the
    /// caller refuses them, each when its data has come.
    pub fn stop(&mut self) -> impl Iterator<Item = StoppedWrite<W>> + use<W> {
        self.is_stopped = true;
        let waiting = core::mem::take(&mut self.waiting);
        waiting.into_iter().map(|Arrived { write, has_data, .. }| StoppedWrite { write, has_data })
    }
}

/// A write that must be refused, because an earlier one has failed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct StoppedWrite<W> {
    /// The write.
    pub write: W,
    /// Its data has come.
    pub has_data: bool,
}

/// Whether `earlier` must be submitted before a later write of this order.
fn precedes<W>(earlier: &Arrived<W>, order: WriteOrder) -> bool {
    if probe::is_bug_planted(Plant::ArrivalPassesBarrier) {
        return false;
    }
    match (earlier.order, order) {
        (WriteOrder::Ordered { barrier: ends }, WriteOrder::Ordered { barrier }) => ends || barrier,
        (WriteOrder::Epochs(earlier), WriteOrder::Epochs(later)) => {
            let is_shared = |id: EpochId| later.epochs().any(|other| other == id);
            later.barrier && earlier.epochs().any(is_shared)
        }
        _ => false,
    }
}

#[cfg(test)]
mod tests {
    use alloc::vec::Vec;

    use super::*;
    use crate::write_order::EpochWrite;

    const ORDERED: WriteOrder = WriteOrder::Ordered { barrier: false };
    const BARRIER: WriteOrder = WriteOrder::Ordered { barrier: true };

    fn epoch(stream: u16, epoch: u16, barrier: bool) -> WriteOrder {
        let own = EpochId { stream, epoch };
        WriteOrder::Epochs(EpochWrite { own, follower: None, barrier })
    }

    fn submitted(writes: &mut ArrivedWrites<u32>) -> Vec<u32> {
        core::iter::from_fn(|| writes.next_to_submit()).collect()
    }

    #[test]
    fn a_barrier_waits_for_its_epoch_and_the_next_epoch_for_the_barrier() {
        let mut writes = ArrivedWrites::default();
        assert!(writes.can_submit_at_once(BARRIER));
        writes.push(1, ORDERED, false);
        assert!(writes.can_submit_at_once(ORDERED), "one epoch has no order");
        assert!(!writes.can_submit_at_once(BARRIER));
        writes.push(2, BARRIER, true);
        writes.push(3, ORDERED, true);
        assert!(!writes.can_submit_at_once(ORDERED), "the barrier is before it");
        assert_eq!(submitted(&mut writes), []);
        writes.on_data(1);
        assert_eq!(submitted(&mut writes), [1, 2, 3]);
        assert!(writes.can_submit_at_once(BARRIER));
    }

    #[test]
    fn streams_wait_only_for_the_barrier_of_their_own_epoch() {
        let mut writes = ArrivedWrites::default();
        writes.push(1, epoch(1, 7, false), false);
        assert!(writes.can_submit_at_once(epoch(1, 8, true)), "the drive knows the numbers");
        assert!(writes.can_submit_at_once(epoch(2, 7, true)), "another stream");
        assert!(!writes.can_submit_at_once(epoch(1, 7, true)));
        let own = EpochId { stream: 2, epoch: 9 };
        let follower = Some(EpochId { stream: 1, epoch: 7 });
        let dual = WriteOrder::Epochs(EpochWrite { own, follower, barrier: true });
        assert!(!writes.can_submit_at_once(dual), "a barrier for the follower, too");
        writes.push(2, epoch(1, 7, true), true);
        writes.push(3, epoch(1, 8, true), true);
        assert_eq!(submitted(&mut writes), [3]);
        writes.on_data(1);
        assert_eq!(submitted(&mut writes), [1, 2]);
    }

    #[test]
    fn a_failed_write_stops_all_behind_it() {
        let mut writes = ArrivedWrites::default();
        writes.push(1, ORDERED, false);
        writes.push(2, BARRIER, true);
        let stopped: Vec<_> =
            writes.stop().map(|stopped| (stopped.write, stopped.has_data)).collect();
        assert_eq!(stopped, [(1, false), (2, true)]);
        assert!(writes.is_stopped() && writes.next_to_submit().is_none());
    }
}

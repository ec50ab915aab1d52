//! Epoch pinning of OPIMQ: each core has a queue, a stream moves from core to core, and an epoch
//! stays in the queue in which it began.
//!
//! ```text
//! core:    0      0        1      1        1
//! write:   w1     w2       w3│    w4       w5│       │: the last write of its epoch
//! queue:   0      0        0      1        1
//! epoch:   0      0        0      1        1
//! ```
//!
//! A queue keeps its order, two queues have none. With an epoch in one queue, its last write comes
//! after all others of the epoch, so the drive knows when the epoch has ended. Between epochs the
//! drive keeps the order by their [numbers](super::epoch_numbers). Dual-stream writes are an epoch
//! of two streams, so that epoch of the follower is in one queue, too.

use crate::probe::{DispatchPlant, Plant, is_bug_planted, is_dispatch_bug_planted};

/// The queue of a stream's epoch on one drive.
#[derive(Clone, Copy, Debug, Default)]
pub struct EpochPinning {
    /// The queue of an epoch of which a write was dispatched, and the last write was not.
    open: Option<usize>,
}

impl EpochPinning {
    /// The queue into which the next write of the stream goes if the stream runs on the core with
    /// `core_queue`.
    #[must_use]
    pub fn queue_of(&self, core_queue: usize) -> usize {
        match self.open {
            Some(queue) if !is_epoch_not_pinned() => queue,
            _ => core_queue,
        }
    }

    /// Chooses the queue of a write that is dispatched now. `is_last`: it is the last write of its
    /// epoch.
    pub fn dispatch(&mut self, is_last: bool, core_queue: usize) -> usize {
        let queue = self.queue_of(core_queue);
        self.open = if is_last { None } else { Some(*self.open.get_or_insert(queue)) };
        queue
    }
}

/// Whether writes go into the queue of their core, and not into that of their epoch: a plant.
fn is_epoch_not_pinned() -> bool {
    is_dispatch_bug_planted(DispatchPlant::EpochNotPinned) || is_bug_planted(Plant::OpimqNotPinned)
}

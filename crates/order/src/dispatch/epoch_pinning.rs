//! Streams, epochs and queues of OPIMQ: each core has a queue, a stream moves from core to core,
//! and an epoch stays in the queue in which it began.
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
//! drive keeps the order by their numbers.
//!
//! A *dual-stream write* belongs to an epoch of another stream, too, which *follows* it. That epoch
//! consists of such writes alone. So it is in one queue, too, and ends with the same write. An epoch
//! has one follower, which its first write names. So a stream waits for another one only before it
//! begins an epoch, and no two wait for each other.

use alloc::collections::BTreeMap;

use crate::probe::{DispatchPlant, Plant, is_bug_planted, is_dispatch_bug_planted};
use crate::write_order::{EpochId, EpochWrite};

/// A write that is about to be dispatched.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct NextWrite {
    /// Its stream.
    pub stream: u16,
    /// The stream that follows it.
    pub follower: Option<u16>,
    /// It is the last write of its epoch.
    pub is_last: bool,
    /// The queue of the core on which the stream runs now.
    pub core_queue: usize,
}

/// A dispatched write.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Pinned {
    /// The queue into which the write goes.
    pub queue: usize,
    /// Its streams and epochs.
    pub order: EpochWrite,
}

/// The reason why a write can't be dispatched. Nothing has changed then.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum DispatchError {
    /// A stream has the number 0, which stands for no order, or follows itself.
    #[error("stream {0} can't have this write: streams are not 0, and none follows itself")]
    BadStream(u16),
    /// The follower is in the middle of an epoch of its own. The write must wait until that ends:
    /// the rest of that epoch would else be before the write.
    #[error("stream {0} is in the middle of an epoch: end it first")]
    FollowerOpen(u16),
    /// The epoch has begun with another follower, or without one, or its last write does not name
    /// the one that it has. Writes for another follower go into an epoch of their own.
    #[error("stream {0} has begun an epoch with another follower, or without one")]
    OtherFollower(u16),
    /// The stream follows an epoch that has not ended, so it has no place for a write of its own.
    #[error("stream {0} follows an epoch that has not ended: wait for its last write")]
    Following(u16),
}

/// The streams of a host.
#[derive(Clone, Debug, Default)]
pub struct EpochPinning {
    streams: BTreeMap<u16, Stream>,
}

#[derive(Clone, Debug, Default)]
struct Stream {
    /// The number of the next epoch, or of the open one.
    next: u64,
    open: Option<OpenEpoch>,
    /// The stream whose open epoch has a dual-stream write for this one. The epoch `next` of this
    /// stream has these writes.
    followed: Option<u16>,
}

/// An epoch whose last write was not dispatched.
#[derive(Clone, Debug)]
struct OpenEpoch {
    queue: usize,
    follower: Option<u16>,
}

impl EpochPinning {
    /// Begins a stream with this epoch.
    pub fn start(&mut self, stream: u16, first_epoch: u64) {
        self.streams.insert(stream, Stream { next: first_epoch, ..Stream::default() });
    }

    /// The number of the next epoch of a stream, or of the open one. A FLUSH of the epochs before
    /// it covers all epochs that have ended.
    #[must_use]
    pub fn next_epoch(&self, stream: u16) -> EpochId {
        let epoch = self.streams.get(&stream).map_or(0, |stream| stream.next) as u16;
        EpochId { stream, epoch }
    }

    /// The queue into which the next write of a stream goes if the stream runs on the core with
    /// `core_queue`.
    #[must_use]
    pub fn queue_of(&self, stream: u16, core_queue: usize) -> usize {
        let open = self.streams.get(&stream).and_then(|stream| stream.open.as_ref());
        match open {
            Some(open) if !is_epoch_not_pinned() => open.queue,
            _ => core_queue,
        }
    }

    /// Chooses the queue of a write, and gives it its epochs.
    ///
    /// # Errors
    /// The write must wait, or is wrong.
    pub fn dispatch(&mut self, write: NextWrite) -> Result<Pinned, DispatchError> {
        self.check(write)?;
        let NextWrite { stream: own, follower, is_last, core_queue } = write;
        let own_epoch = self.next_epoch(own);
        let queue = self.queue_of(own, core_queue);
        let stream = self.streams.entry(own).or_default();
        let open = stream.open.get_or_insert(OpenEpoch { queue: core_queue, follower });
        let ended_follower = open.follower.filter(|_| is_last);
        if is_last {
            stream.open = None;
            stream.next += 1;
        }
        let follower_epoch = follower.map(|follower| self.next_epoch(follower));
        if let Some(follower) = follower {
            self.streams.entry(follower).or_default().followed = Some(own);
        }
        if let Some(follower) = ended_follower {
            let follower = self.streams.entry(follower).or_default();
            follower.followed = None;
            follower.next += 1;
        }
        let order = EpochWrite { own: own_epoch, follower: follower_epoch, barrier: is_last };
        Ok(Pinned { queue, order })
    }

    /// Checks whether a write may be dispatched now.
    fn check(&self, write: NextWrite) -> Result<(), DispatchError> {
        let NextWrite { stream: own, follower, is_last, .. } = write;
        if own == 0 || follower == Some(own) || follower == Some(0) {
            return Err(DispatchError::BadStream(own));
        }
        let stream = self.streams.get(&own);
        if stream.is_some_and(|stream| stream.followed.is_some()) {
            return Err(DispatchError::Following(own));
        }
        if let Some(open) = stream.and_then(|stream| stream.open.as_ref()) {
            // The last write ends the follower's epoch, so it belongs to that.
            let is_right = follower == open.follower || (follower.is_none() && !is_last);
            return if is_right { Ok(()) } else { Err(DispatchError::OtherFollower(own)) };
        }
        let Some(follower) = follower else { return Ok(()) };
        let Some(followed) = self.streams.get(&follower) else { return Ok(()) };
        let is_busy = followed.open.is_some() || followed.followed.is_some();
        match is_busy && !is_dispatch_bug_planted(DispatchPlant::FollowerOpen) {
            true => Err(DispatchError::FollowerOpen(follower)),
            false => Ok(()),
        }
    }
}

/// Whether writes go into the queue of their core, and not into that of their epoch: a plant.
fn is_epoch_not_pinned() -> bool {
    is_dispatch_bug_planted(DispatchPlant::EpochNotPinned) || is_bug_planted(Plant::OpimqNotPinned)
}

//! The order that a drive itself keeps among writes, and how a write takes part in it.
//!
//! Most drives keep none. Two kinds keep some, and this project models both
//! (`docs/media.md`):
//!
//! - a drive with a *cache barrier* (Barrier-Enabled IO Stack, FAST '18, §3.2) makes the writes
//!   before a barrier durable before those after it;
//! - a drive with an *order-preserving FTL* (OPIMQ, FAST '25) keeps the order of the epochs of each
//!   stream.

use core::fmt;

/// The order among writes that a drive keeps.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum DriveOrder {
    /// None: without a FLUSH in between, any write may become durable before any other.
    #[default]
    None,
    /// Ordered writes become durable epoch by epoch. A barrier ends an epoch.
    Barrier,
    /// The writes of each stream become durable epoch by epoch. The commands name both.
    Epochs,
}

impl DriveOrder {
    /// The name in the specification of a drive.
    #[must_use]
    pub const fn name(self) -> &'static str {
        match self {
            Self::None => "none",
            Self::Barrier => "barrier",
            Self::Epochs => "op",
        }
    }

    /// The order with this name, if there is one.
    #[must_use]
    pub fn from_name(name: &str) -> Option<Self> {
        [Self::None, Self::Barrier, Self::Epochs].into_iter().find(|order| order.name() == name)
    }

    /// Whether a drive with this order can keep the order of such a write.
    #[must_use]
    pub const fn keeps(self, order: WriteOrder) -> bool {
        match order {
            WriteOrder::Orderless => true,
            WriteOrder::Ordered { .. } => matches!(self, Self::Barrier),
            WriteOrder::Epochs(_) => matches!(self, Self::Epochs),
        }
    }
}

impl fmt::Display for DriveOrder {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

/// The place of a write in the order that a drive keeps.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum WriteOrder {
    /// No place: the write may become durable before or after any other.
    #[default]
    Orderless,
    /// A place in the one sequence of epochs of a drive with a cache barrier
    /// ([`DriveOrder::Barrier`]). The epoch is the one that is open when the write is submitted.
    Ordered {
        /// The write is the last one of its epoch.
        barrier: bool,
    },
    /// A place in one or two streams of a drive with an order-preserving FTL
    /// ([`DriveOrder::Epochs`]).
    Epochs(EpochWrite),
}

/// A write of an epoch. A *dual-stream write* belongs to epochs of two streams.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct EpochWrite {
    /// The stream that writes, and its epoch.
    pub own: EpochId,
    /// The stream that follows the write, and the epoch that it has there.
    pub follower: Option<EpochId>,
    /// The write is the last one of its epoch, in both streams. Every other write of an epoch is
    /// submitted to the drive before that.
    pub barrier: bool,
}

impl EpochWrite {
    /// The one or two epochs of the write, its own first.
    pub fn epochs(&self) -> impl Iterator<Item = EpochId> {
        [Some(self.own), self.follower].into_iter().flatten()
    }
}

/// An epoch of a stream, as commands name it.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub struct EpochId {
    /// The stream. 0 stands for writes without an order, so it is no stream.
    pub stream: u16,
    /// The lower 16 bits of the number of the epoch.
    pub epoch: u16,
}

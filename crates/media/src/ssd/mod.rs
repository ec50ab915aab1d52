//! The modelled SSD: stands in for drives that one doesn't have, and for power cuts.
//!
//! [`Model`] is the whole drive as a pure state machine: it reads no clock and starts no thread;
//! `now` and seeds are arguments, and the same calls give the same results. [`Timing`] is its
//! clockwork alone. `ssd:` drives ([`open_drive`](crate::open_drive)) put it behind a lock and the
//! monotonic clock. The numbers are those of a [`Profile`]; docs/media.md has the formulas and the
//! source of each number.

mod drive;
mod frames;
mod model;
mod profile;
mod store;
#[cfg(test)]
mod tests;
mod timing;

pub(crate) use drive::Ssd;
pub use model::{Model, QueueId};
pub use profile::{FLASH, OPTANE, Profile};
pub use timing::Timing;

/// What a modelled power cut did.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct PowerCut {
    /// Blocks that went back to an older content: completed writes were lost.
    pub blocks_lost: u64,
    /// Blocks with unflushed writes that kept the newest.
    pub blocks_kept: u64,
    /// Blocks on which a write landed that had not completed.
    pub blocks_landed: u64,
    /// Operations that were in flight.
    pub in_flight: u64,
}

//! The modelled SSD: stands in for drives that one doesn't have, and for power cuts.
//!
//! [`Model`] is the whole drive as a pure state machine: `now` and seeds are arguments, and the
//! same calls give the same results. [`Timing`] is its clockwork alone. What holds the blocks is
//! behind [`Pages`]. The numbers are those of a [`Profile`]; docs/media.md has the formulas and the
//! source of each number.

mod model;
mod profile;
mod store;
mod timing;

pub use model::{Command, Model, PageList, QueueId};
pub use profile::{FLASH, OPTANE, Profile};
pub use store::Pages;
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

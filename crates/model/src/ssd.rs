//! The modelled SSD: replaces drives that a machine lacks, and models power cuts.
//!
//! [`Model`] is the whole drive as a pure state machine: `now` and seeds are arguments, and the
//! same calls give the same results. [`Timing`] computes its completion times alone. The blocks'
//! contents are behind [`Pages`]. A drive may keep an [`Order`] among writes. The numbers come from a [`Profile`]; docs/media.md has the
//! formulas and the source of each number.

mod barrier;
mod model;
#[cfg(test)]
mod names;
mod op;
mod order;
mod profile;
mod store;
mod timing;
mod versions;

pub use model::{Command, Model, PageList, QueueId};
pub use order::{Order, Tables};
pub use profile::{FLASH, OPTANE, Profile};
pub use store::{ExchangeError, Pages};
pub use timing::Timing;

/// The effects of a modelled power cut.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct PowerCut {
    /// Blocks that returned to an older content: completed writes were lost.
    pub blocks_lost: u64,
    /// Blocks with unflushed writes that kept the newest content.
    pub blocks_kept: u64,
    /// Blocks that took the content of a write that had not completed.
    pub blocks_landed: u64,
    /// Operations that were in flight.
    pub in_flight: u64,
}

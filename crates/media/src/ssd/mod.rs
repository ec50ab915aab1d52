//! The modelled SSD.

/// What a modelled power cut did.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct PowerCut {
    /// Blocks whose content changed: some write to them was lost.
    pub blocks_lost: u64,
    /// Blocks that had unflushed writes and kept the latest.
    pub blocks_kept: u64,
    /// Operations that were in flight.
    pub in_flight: u64,
}

//! The order that a modelled drive keeps, with its cost and its limits.

use riopipe_order::write_order::DriveOrder;

use super::Profile;

/// The order that a modelled drive keeps among writes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Order {
    /// The kind of order.
    pub kind: DriveOrder,
    /// The cost: writing and programming take longer by so many hundredths of a percent.
    pub penalty: u32,
    /// The size of the tables, for [`DriveOrder::Epochs`].
    pub tables: Tables,
}

/// The size of the tables of an order-preserving FTL.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Tables {
    /// Number of streams that may have epochs that are not mapped.
    pub streams: usize,
    /// Number of epochs of a stream that may be unmapped at a time.
    pub epochs: u64,
    /// Number of entries of all lists of delayed mappings. A block of a dual-stream write takes
    /// two.
    pub entries: u64,
}

impl Tables {
    /// The limits of the firmware that is published with OPIMQ.
    pub const PUBLISHED: Self = Self { streams: 128, epochs: 256, entries: 16_384 };
}

impl Order {
    /// The largest penalty: writes take twice as long.
    pub const PENALTY_MAX: u32 = 10_000;

    /// No order, at no cost.
    pub const NONE: Self = Self { kind: DriveOrder::None, penalty: 0, tables: Tables::PUBLISHED };

    /// The order `kind` with the cost that its paper states for a drive like this one.
    #[must_use]
    pub const fn of(kind: DriveOrder, profile: &Profile) -> Self {
        let penalty = match kind {
            DriveOrder::None => 0,
            // The cache survives, so its order costs nothing (§6.1 of the paper).
            DriveOrder::Barrier if profile.plp => 0,
            // "5% performance penalty to simulate the barrier overhead" (§6.1 of the paper).
            DriveOrder::Barrier => 500,
            // 1.91 against 1.89 thousand operations per second on the authors' FTL.
            DriveOrder::Epochs => 105,
        };
        Self { kind, penalty, tables: Tables::PUBLISHED }
    }

    /// `ns` with the penalty.
    pub(super) const fn penalized(&self, ns: u64) -> u64 {
        ns + ns * self.penalty as u64 / Self::PENALTY_MAX as u64
    }

    /// Largest number of old contents of blocks that the drive keeps.
    #[must_use]
    pub const fn kept_max(&self, profile: &Profile) -> u64 {
        match self.kind {
            DriveOrder::None | DriveOrder::Barrier => profile.losable_blocks,
            DriveOrder::Epochs => profile.losable_blocks + self.tables.entries,
        }
    }
}

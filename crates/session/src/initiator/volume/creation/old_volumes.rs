//! The old volumes of a creation: their state in the logs, and the choice of those to be dropped.

use alloc::vec::Vec;

use riopipe_order::attribute::VolumeId;
use riopipe_order::entry::ENTRY_BYTES;
use riopipe_order::log_region::{MemberNamespace, PARTITION_ALIGN};
use riopipe_order::ordering_log::partition_bytes;

/// The old volumes that are dropped now.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Dropping {
    /// One old volume on `target`, whose log has refused the partitions. Then the partitions are
    /// requested there again, because it may be enough to drop one old volume. If `only_guarding`,
    /// only an old volume that keeps its drives guarded is dropped.
    First { target: usize, only_guarding: bool },
    /// All, on all targets: the new volume is made.
    All,
}

/// An old volume, on one target.
#[derive(Debug)]
pub(super) struct OldVolume {
    pub(super) target: usize,
    pub(super) volume: VolumeId,
    /// Its drives there.
    pub(super) members: Vec<MemberNamespace>,
    /// The largest generation of the volume that is known.
    pub(super) generation: u32,
    pub(super) streams: u16,
    /// The log slots per stream on the target.
    pub(super) slots: u32,
    /// The state of the volume in the target's log.
    pub(super) state: OldState,
}

impl OldVolume {
    /// Whether the volume is one of those to be dropped.
    pub(super) fn is_due(&self, dropping: Dropping) -> bool {
        let OldState::Partitions { guards, is_behind } = self.state else { return false };
        match dropping {
            Dropping::First { target, only_guarding } => {
                self.target == target && (guards || !only_guarding) && !is_behind
            }
            Dropping::All => true,
        }
    }

    /// The log slots of all its streams.
    pub(super) fn slots(&self) -> u64 {
        u64::from(self.streams) * u64::from(self.slots)
    }

    /// The bytes of its partitions. A target has sent both counts, and they may have any value (T18).
    pub(super) fn bytes(&self) -> u64 {
        let entries = u64::from(self.slots) * ENTRY_BYTES as u64;
        let partition = partition_bytes(0) as u64 + entries;
        u64::from(self.streams) * partition.next_multiple_of(PARTITION_ALIGN as u64)
    }
}

/// The state of an old volume in the log of a target.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum OldState {
    /// Nothing, as far as is known.
    Nothing,
    /// Partitions that cannot be used. They are forgotten without a claim.
    Lost,
    /// Partitions. `guards`: something in them waits for recovery, and keeps the drives guarded
    /// (T21). `is_behind`: the log is older than the labels of the volume. Such a volume is dropped
    /// only after the new labels were written. The claim that comes first would make the log as new
    /// as the labels, and a crash after it would leave a volume that opens with that log (T24).
    Partitions { guards: bool, is_behind: bool },
    /// Partitions of a volume that has been claimed.
    Claimed,
}

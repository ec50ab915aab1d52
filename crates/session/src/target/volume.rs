//! One volume as a target keeps it, and the place of its logs.

use alloc::vec::Vec;

use riopipe_order::attribute::{Seq, VolumeId};
use riopipe_order::log_region::{
    HEADER_BYTES, LogRegion, MemberNamespace, PARTITION_ALIGN, RegionHeader,
};
use riopipe_order::ordering_log::{SLOTS_MIN, StreamLog, partition_bytes};
use riopipe_order::region::Region;

use super::claims::{Owner, Refusal, Split};
use super::shared::ConnId;
use crate::wire;

/// Slots per stream that are given when the claim leaves the choice to the target, if they fit:
/// 1 MiB of log for each stream.
const SLOTS_DEFAULT_MAX: u32 = 1 << 14;

/// Slots per stream with which a volume is content with half of what is free.
const SLOTS_ENOUGH: u32 = 1 << 10;

pub(super) enum Log<R> {
    /// The target has no log region.
    None,
    /// In service.
    Live { region: LogRegion<R>, split: Split<R> },
    /// Of another boot: not to be trusted, and not to be written over either (T19).
    Lost(RegionHeader),
}

#[expect(clippy::large_enum_variant, reason = "one for each stream, at home more often than not")]
pub(super) enum Partition<R> {
    /// Here, at rest, with this many live entries.
    Home { log: StreamLog<R>, live: u32 },
    /// Carried by a connection.
    Bound { conn: ConnId, released: Seq },
    /// Unreadable.
    Damaged,
}

pub(super) struct Volume<R> {
    pub(super) id: VolumeId,
    pub(super) generation: u32,
    pub(super) streams: u16,
    pub(super) slots: u32,
    /// Its namespaces here, with its numbers for them.
    pub(super) members: Vec<MemberNamespace>,
    pub(super) owner: Option<Owner>,
    /// One for each stream; none if the volume has no log here.
    pub(super) partitions: Vec<Partition<R>>,
    /// Its log cannot be trusted (T19).
    pub(super) lost: bool,
}

impl<R: Region> Volume<R> {
    /// Whether a namespace is a member.
    pub(super) fn has(&self, nsid: u32) -> bool {
        self.members.iter().any(|m| m.nsid == nsid)
    }

    /// Live entries in partitions at rest.
    pub(super) fn live(&self) -> u32 {
        self.partitions
            .iter()
            .map(|p| match p {
                Partition::Home { live, .. } => *live,
                Partition::Bound { .. } | Partition::Damaged => 0,
            })
            .sum()
    }

    pub(super) fn is_guarded(&self) -> bool {
        self.owner.is_some() || self.lost || self.live() > 0
    }
}

impl<R: Region> Partition<R> {
    pub(super) fn released(&self) -> Seq {
        match self {
            Self::Home { log, .. } => log.released(),
            Self::Bound { released, .. } => *released,
            Self::Damaged => Seq::ZERO,
        }
    }
}

pub(super) fn too_small(need: usize, have: usize) -> Refusal {
    let cut = |bytes: usize| u64::from(u32::try_from(bytes).unwrap_or(u32::MAX));
    (wire::status::LOG_TOO_SMALL.with_dnr(), cut(need) | cut(have) << 32)
}

/// The most slots per stream for which `streams` partitions fit into the largest gap.
pub(super) fn fitting_slots(header: &RegionHeader, streams: u16) -> Result<u32, Refusal> {
    let mut at = HEADER_BYTES;
    let mut gap = 0;
    for volume in &header.volumes {
        let extent = volume.extent();
        gap = gap.max(extent.start.saturating_sub(at));
        at = extent.end;
    }
    gap = gap.max((header.len as usize).saturating_sub(at));
    // Leave room for another volume, where that leaves this one enough.
    let half = gap / 2;
    let enough = partition_bytes(SLOTS_ENOUGH).saturating_mul(usize::from(streams.max(1)));
    let gap = if half >= enough { half } else { gap };
    let share = gap / usize::from(streams.max(1)) / PARTITION_ALIGN * PARTITION_ALIGN;
    if share < partition_bytes(SLOTS_MIN) {
        return Err(too_small(usize::from(streams) * PARTITION_ALIGN, gap));
    }
    let slots = (share - partition_bytes(0)) / riopipe_order::entry::ENTRY_BYTES;
    Ok(u32::try_from(slots).unwrap_or(u32::MAX).min(SLOTS_DEFAULT_MAX))
}

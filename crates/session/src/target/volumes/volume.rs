//! One volume in a target, and the place of its logs.

use alloc::boxed::Box;
use alloc::vec::Vec;
use core::ops::Range;

use riopipe_order::attribute::{Seq, StreamId, VolumeId};
use riopipe_order::entry::{ENTRY_BYTES, PartitionId};
use riopipe_order::log_region::{
    HEADER_BYTES, LogRegion, MemberNamespace, PARTITION_ALIGN, RegionHeader, VolumeRecord,
};
use riopipe_order::ordering_log::{SLOTS_MIN, Scan, StreamLog, partition_bytes};
use riopipe_order::probe::{self, Plant};
use riopipe_order::region::{Region, RegionError};

use super::lease::{Lease, Owner};
use super::refusal::Refusal;
use crate::target::ids::ConnId;
use crate::target::limits::{FENCES_MAX, LOG_SLOTS_MAX, STREAM_SLOTS_MAX};
use crate::wire::{self, Claim};

/// Slots per stream when the claim leaves the choice to the target, if they fit: 1 MiB of log for
/// each stream.
const SLOTS_DEFAULT_MAX: u32 = 1 << 14;

/// Slots per stream that are enough for a volume to leave half of the free space to others.
const SLOTS_ENOUGH: u32 = 1 << 10;

/// Returns the part of the log region in a byte range, to be used apart from the rest. Fails while
/// an earlier owner of a part of it still has it.
pub type Split<R> = Box<dyn FnMut(Range<usize>) -> Result<R, RegionError> + Send>;

/// The log region of a target. A [`Partition`] of it has the log of one stream.
pub(super) enum TargetLog<R> {
    /// The target has no log region.
    None,
    /// In service.
    Live { region: LogRegion<R>, split: Split<R> },
    /// Of another boot: its content is not valid. It is not overwritten before a host has given it
    /// up (T19).
    Lost(RegionHeader),
}

/// The log partition of one stream. A connection that carries the stream has the partition.
#[expect(clippy::large_enum_variant, reason = "one for each stream, at rest more often than not")]
pub(super) enum Partition<R> {
    /// No connection has it. `entries` counts its entries beyond the released mark. Torn entries
    /// count, too, as long as no recovery has settled the partition.
    AtRest { log: StreamLog<R>, entries: u32 },
    /// The connection `conn` carries the stream and has the log. `released` is the released mark at
    /// the time of the bind.
    Bound { conn: ConnId, released: Seq },
    /// Unreadable.
    Damaged,
}

/// A volume that the target knows.
pub(in crate::target) struct Volume<R> {
    pub(super) id: VolumeId,
    pub(super) generation: u32,
    pub(super) streams: u16,
    pub(super) slots: u32,
    /// Its namespaces here, with its member numbers for them.
    pub(in crate::target) members: Vec<MemberNamespace>,
    pub(super) lease: Lease,
    /// How long the target keeps it for its owner after the loss of the association, milliseconds
    /// (T25).
    pub(super) lease_ms: u32,
    /// The host that has claimed it last, also in an earlier incarnation of the target; 0 for none.
    pub(super) last_owner: [u8; 16],
    /// One partition for each stream; none if the volume has no log here.
    pub(super) partitions: Vec<Partition<R>>,
    /// Its log is not valid, so the volume is refused (T19).
    pub(super) lost: bool,
    /// The generation with which its log was last given up; 0 for never (T26).
    pub(super) given_up: u32,
    /// How many claims it had in this incarnation of the target.
    pub(super) claims: u64,
    /// Fences of claims, and of commands to forget the volume, that are not over: operations of
    /// earlier owners and of plain hosts may be in flight. A plain host may not write before they
    /// have come back, even if the claimant has ended (T8, T21).
    pub(super) fences: Vec<u64>,
    /// Every operation that was in flight at the last claim has come back (T8).
    pub(super) drained: bool,
    /// No entry of an earlier owner waits for recovery here: streams may start (T9).
    pub(super) recovered: bool,
}

/// The result of a claim.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(in crate::target) struct Claimed {
    /// The number of this claim among the volume's claims, for
    /// [`Volumes::enter`](super::Volumes::enter).
    pub(in crate::target) claim: u64,
    /// The association that ends with the claim: an earlier one of the same owner (P7), or, for a
    /// volume without a log, that of the former owner (T8).
    pub(in crate::target) replaced: Option<u64>,
    /// The association of a former owner that is present and has been fenced (T8).
    pub(in crate::target) fenced: Option<u64>,
}

impl<R: Region> Volume<R> {
    /// A volume that the target did not know before.
    pub(super) fn new(claim: &Claim, partitions: Vec<Partition<R>>, slots: u32) -> Self {
        Self {
            id: claim.volume,
            generation: 0,
            streams: claim.streams,
            slots,
            members: claim.members.clone(),
            lease: Lease::Vacant,
            lease_ms: 0,
            last_owner: [0; 16],
            partitions,
            lost: false,
            given_up: 0,
            claims: 0,
            fences: Vec::new(),
            drained: false,
            recovered: false,
        }
    }

    /// A volume of the log's directory, still without its partitions. `lost`: its log is not valid. If it has an owner, the
    /// association is lost, and the lease begins when the target starts
    /// ([`Volumes::begin`](super::Volumes::begin)).
    pub(super) fn recorded(record: &VolumeRecord, lost: bool) -> Self {
        Self {
            id: record.id,
            generation: record.generation,
            streams: record.streams,
            slots: record.slots,
            members: record.members.clone(),
            lease: Lease::from_record(record, 0),
            lease_ms: record.lease_ms,
            last_owner: record.owner,
            partitions: Vec::new(),
            lost,
            given_up: record.given_up,
            claims: 0,
            fences: Vec::new(),
            drained: false,
            recovered: false,
        }
    }

    /// Whether a namespace is a member.
    pub(super) fn has_member(&self, nsid: u32) -> bool {
        self.members.iter().any(|m| m.nsid == nsid)
    }

    /// Whether a stream has not been started since its log was given up (T26).
    pub(super) fn in_doubt(&self, log: &StreamLog<R>) -> bool {
        self.given_up > log.origin().generation
    }

    /// How many entries in partitions at rest no recovery has settled.
    pub(super) fn unsettled_entries(&self) -> u32 {
        self.partitions.iter().map(Partition::unsettled_entries).sum()
    }

    /// How many entries of in-place writes the settled partitions still have. Recovery keeps them
    /// until the owner has acknowledged them (T9).
    pub(super) fn in_place_entries(&self) -> u32 {
        self.partitions.iter().map(Partition::in_place_entries).sum()
    }

    /// The number of both kinds of entries together.
    pub(super) fn entries(&self) -> u32 {
        self.unsettled_entries() + self.in_place_entries()
    }

    /// The streams that connections carry. A volume without an owner may have some: connections of
    /// an earlier owner may still be open when the last owner releases the volume.
    pub(in crate::target) fn carried_streams(&self) -> impl Iterator<Item = PartitionId> {
        let carried = |(_, p): &(StreamId, &Partition<R>)| matches!(p, Partition::Bound { .. });
        let streams = (0..).map(StreamId).zip(&self.partitions).filter(carried);
        streams.map(|(stream, _)| PartitionId { volume: self.id, stream })
    }

    /// Refuses another fence if the volume has as many as it may have. A fence outlives the
    /// association of the host that caused it. So while a drive hangs, hosts could otherwise raise
    /// fences without bound (T28).
    pub(super) fn check_fence_limit(&self) -> Result<(), Refusal> {
        if self.fences.len() < FENCES_MAX {
            Ok(())
        } else {
            Err(Refusal::retry_later(wire::status::STREAM_BUSY))
        }
    }

    /// Whether plain hosts may not write its drives now (T21).
    pub(super) fn is_guarded(&self) -> bool {
        !self.lease.is_vacant() || self.lost || self.entries() > 0 || !self.fences.is_empty()
    }

    /// The time at which the volume may be freed although its owner has not released it: its lease
    /// runs out, and there is nothing to recover. A partition that is bound, or was not read,
    /// counts as something to recover.
    pub(super) fn freeable_from(&self) -> Option<u64> {
        let at_rest = |p: &Partition<R>| matches!(p, Partition::AtRest { entries: 0, .. });
        let is_clean = !self.lost && self.fences.is_empty() && self.partitions.iter().all(at_rest);
        self.lease.freeable_from().filter(|_| is_clean)
    }

    pub(super) fn is_owned_by(&self, association: u64) -> bool {
        self.lease.is_held_by(association)
    }

    /// Makes `host` the owner, because its claim has been granted.
    pub(super) fn set_owner(&mut self, claim: &Claim, host: Owner) -> Claimed {
        let previous = self.lease.owner().map(|owner| owner.association);
        // With a log, a stream is bound with a generation, which fences its writes and its reads.
        // Without a log, the requests of a stream are plain commands, which no generation fences.
        // So the association of the old owner ends. The old owner then knows that it is fenced, and
        // reads no data of the new one (T8, P9).
        let must_end = self.partitions.is_empty() && !probe::planted(Plant::T8FencedPlain);
        let previous = previous.filter(|association| *association != host.association);
        let replaced = previous.filter(|_| claim.resume || must_end);
        let fenced = previous.filter(|_| !claim.resume);
        self.generation = claim.generation;
        self.last_owner = host.hostid;
        self.lease_ms = claim.lease_ms;
        self.lease = Lease::Held(host);
        self.claims += 1;
        self.drained = false;
        self.recovered &= claim.resume;
        self.update_recovered();
        Claimed { claim: self.claims, replaced, fenced }
    }

    /// Sets `recovered` if recovery has ended: every partition is at rest, and its entries are
    /// settled or of the present owner. `recovered` then stays set until the next claim.
    ///
    /// The decision uses only durable state. A released mark that is only in memory may be the
    /// reason why a log has no entry of an earlier owner any more. Such a mark becomes durable first.
    /// Else the entries would be there again after a crash of the target, and the streams, which
    /// have been started meanwhile, could not be bound again (P7).
    pub(super) fn update_recovered(&mut self) {
        let generation = self.generation;
        if self.recovered {
            return;
        }
        self.recovered = self.partitions.iter_mut().all(|partition| match partition {
            Partition::AtRest { log, .. } if log.origin().generation == generation => true,
            Partition::AtRest { log, entries } => {
                (log.is_settled() || *entries == 0)
                    && (probe::planted(Plant::T9MarkInMemory)
                        || log.release_now(log.released()).is_ok())
            }
            Partition::Bound { .. } | Partition::Damaged => false,
        });
    }

    /// Whether the store of one of its logs has failed.
    pub(super) fn has_failed_log(&self) -> bool {
        let failed =
            |p: &Partition<R>| matches!(p, Partition::AtRest { log, .. } if log.has_failed());
        self.partitions.iter().any(failed)
    }
}

impl<R: Region> Partition<R> {
    /// A partition that no connection has, with the log's content from `scan`.
    pub(super) fn at_rest(log: StreamLog<R>, scan: &Scan) -> Self {
        let torn = if scan.settled { 0 } else { scan.torn };
        Self::AtRest { log, entries: scan.entries.len() as u32 + torn }
    }

    /// The released mark of the stream, as far as it is known here.
    pub(super) fn released(&self) -> Seq {
        match self {
            Self::AtRest { log, .. } => log.released(),
            Self::Bound { released, .. } => *released,
            Self::Damaged => Seq::ZERO,
        }
    }

    /// How many entries wait for recovery.
    pub(super) fn unsettled_entries(&self) -> u32 {
        match self {
            Self::AtRest { log, entries } if !log.is_settled() => *entries,
            _ => 0,
        }
    }

    /// How many entries of in-place writes recovery has kept after the settlement. The owner is to
    /// acknowledge them (T9).
    pub(super) fn in_place_entries(&self) -> u32 {
        match self {
            Self::AtRest { log, entries } if log.is_settled() => *entries,
            _ => 0,
        }
    }
}

/// The refusal of a claim for which the log has no space. The result has the `need`ed bytes in its
/// lower half, and the bytes that the log `have`s in its upper half. A number that does not fit
/// becomes the largest one that fits.
pub(super) fn log_too_small(need: usize, have: usize) -> Refusal {
    let cut = |bytes: usize| u64::from(u32::try_from(bytes).unwrap_or(u32::MAX));
    Refusal::do_not_retry(wire::status::LOG_TOO_SMALL).with_result(cut(need) | cut(have) << 32)
}

/// The refusal of a claim whose slots are beyond the bound (T28). The result is the most that it
/// may have for each stream.
pub(super) fn too_many_slots(header: &RegionHeader, streams: u16) -> Refusal {
    Refusal::do_not_retry(wire::status::TOO_MANY_SLOTS)
        .with_result(most_slots(header, streams).into())
}

/// Slots per stream for a claim that leaves them to the target. `former` are the volumes of a lost
/// log that this one replaces. A volume that comes back gets the number of slots that it had. A
/// volume that comes earlier leaves space for it, as far as it keeps enough for itself.
///
/// # Errors
/// Not even the smallest partitions fit, into the log or beneath the bound of its slots (T28).
pub(super) fn chosen_slots(
    header: &RegionHeader,
    former: &[VolumeRecord],
    claim: &Claim,
) -> Result<u32, Refusal> {
    let memory = usize::try_from(slots_left(header)).unwrap_or(usize::MAX);
    let space = largest_gap(header);
    let gap = space.min(memory.saturating_mul(ENTRY_BYTES));
    let before = |r: &&VolumeRecord| r.id == claim.volume && r.streams == claim.streams;
    if let Some(before) = former.iter().find(before)
        && before.extent().len() <= gap
        && before.slots <= most_slots(header, claim.streams)
    {
        return Ok(before.slots);
    }
    let is_lost = |r: &&VolumeRecord| {
        r.id != claim.volume && header.volumes.iter().all(|there| there.id != r.id)
    };
    let owed: usize = former.iter().filter(is_lost).map(|r| r.extent().len()).sum();
    // A log that was made anew may have to hold further volumes, which are in no list here. A claim
    // that gives up the log leaves half of the log to them if any partition fits into the other
    // half.
    let enough = if claim.give_up { PARTITION_ALIGN } else { partition_bytes(SLOTS_ENOUGH) };
    let fitting = |gap| fitting_slots(gap, owed, claim.streams, enough);
    // A larger log would not help where the log has the space and only the bound is in the way.
    fitting(gap).or_else(|_| fitting(space).and(Err(too_many_slots(header, claim.streams))))
}

/// The most slots per stream that a claim with so many streams gets (T28).
pub(super) fn most_slots(header: &RegionHeader, streams: u16) -> u32 {
    let share = slots_left(header) / u64::from(streams.max(1));
    u32::try_from(share).unwrap_or(u32::MAX).min(STREAM_SLOTS_MAX)
}

/// The slots that all further volumes together may have. The log may have volumes that an earlier
/// version of the target has given more.
fn slots_left(header: &RegionHeader) -> u64 {
    let of = |r: &VolumeRecord| u64::from(r.streams) * u64::from(r.slots);
    LOG_SLOTS_MAX.saturating_sub(header.volumes.iter().map(of).sum())
}

/// The bytes of the largest gap between partitions.
fn largest_gap(header: &RegionHeader) -> usize {
    let mut at = HEADER_BYTES;
    let mut gap = 0;
    for volume in &header.volumes {
        let extent = volume.extent();
        gap = gap.max(extent.start.saturating_sub(at));
        at = extent.end;
    }
    gap.max((header.len as usize).saturating_sub(at))
}

/// The slots per stream for which `streams` partitions fit into `gap` bytes. Space is left for
/// `owed` bytes that are expected, and for another volume, where that leaves each stream `enough`
/// bytes.
fn fitting_slots(gap: usize, owed: usize, streams: u16, enough: usize) -> Result<u32, Refusal> {
    let enough = enough.saturating_mul(usize::from(streams.max(1)));
    let unless_enough = |less: usize, gap: usize| if less >= enough { less } else { gap };
    let gap = unless_enough(gap.saturating_sub(owed), gap);
    let gap = unless_enough(gap / 2, gap);
    let share = gap / usize::from(streams.max(1)) / PARTITION_ALIGN * PARTITION_ALIGN;
    if share < partition_bytes(SLOTS_MIN) {
        return Err(log_too_small(usize::from(streams) * PARTITION_ALIGN, gap));
    }
    let slots = (share - partition_bytes(0)) / ENTRY_BYTES;
    Ok(u32::try_from(slots).unwrap_or(u32::MAX).min(SLOTS_DEFAULT_MAX))
}

#[cfg(test)]
mod tests {
    use alloc::vec;

    use riopipe_order::log_region::{LogKind, VolumeState};

    use super::*;
    use crate::wire::STREAMS_MAX;

    fn header(volumes: &[(u16, u32)]) -> RegionHeader {
        let record = |(i, (streams, slots)): (usize, &(u16, u32))| VolumeRecord {
            id: VolumeId([i as u8; 16]),
            generation: 1,
            state: VolumeState::Closed,
            owner: [0; 16],
            given_up: 0,
            lease_ms: 0,
            streams: *streams,
            slots: *slots,
            offset: (HEADER_BYTES + (i << 32)) as u64,
            members: Vec::new(),
        };
        RegionHeader {
            number: 1,
            uuid: [3; 16],
            boot: [9; 16],
            incarnation: 1,
            kind: LogKind::Block,
            synced: false,
            len: 1 << 40,
            volumes: volumes.iter().enumerate().map(record).collect(),
        }
    }

    #[test]
    fn t28_all_volumes_of_a_log_share_one_bound() {
        let most = |volumes: &[(u16, u32)], streams| most_slots(&header(volumes), streams);
        assert_eq!(most(&[], 1), STREAM_SLOTS_MAX);
        assert_eq!(u64::from(most(&[], STREAMS_MAX)) * u64::from(STREAMS_MAX), LOG_SLOTS_MAX);
        let default = (STREAMS_MAX, SLOTS_DEFAULT_MAX);
        assert_eq!(most(&[default], STREAMS_MAX), SLOTS_DEFAULT_MAX, "two volumes of the most fit");
        assert_eq!(most(&[default, default], 1), 0);
        assert_eq!(most(&[(STREAMS_MAX, 1 << 24)], 1), 0, "made before there was a bound");
    }

    /// Only the log that is too small is reported as too small, with all its free bytes.
    #[test]
    fn t28_a_choice_that_the_bound_does_not_allow_is_not_a_log_too_small() {
        let claim = |streams| Claim::plain(VolumeId([99; 16]), 1, streams, Vec::new());
        let mut header = header(&[(2, (1 << 24) - 60)]);
        assert!(chosen_slots(&header, &[], &claim(1)).is_ok());
        let too_many = Refusal::do_not_retry(wire::status::TOO_MANY_SLOTS).with_result(60);
        assert_eq!(chosen_slots(&header, &[], &claim(2)), Err(too_many));
        let end = header.volumes[0].extent().end;
        header.len = (end + 2 * PARTITION_ALIGN) as u64;
        assert_eq!(chosen_slots(&header, &[], &claim(2)), Err(too_many));
        header.len = (end + PARTITION_ALIGN) as u64;
        let small = log_too_small(2 * PARTITION_ALIGN, PARTITION_ALIGN);
        assert_eq!(chosen_slots(&header, &[], &claim(2)), Err(small));
        header.len = (end + 4 * PARTITION_ALIGN) as u64;
        let small = log_too_small(9 * PARTITION_ALIGN, 4 * PARTITION_ALIGN);
        assert_eq!(chosen_slots(&header, &[], &claim(9)), Err(small));
    }

    #[test]
    fn what_the_target_chooses_keeps_to_the_bound_and_leaves_space() {
        let mut there = vec![];
        for _ in 0..4 {
            let header = header(&there);
            let claim = Claim::plain(VolumeId([99; 16]), 1, STREAMS_MAX, Vec::new());
            let slots = chosen_slots(&header, &[], &claim).unwrap();
            assert!(SLOTS_ENOUGH < slots && slots <= most_slots(&header, STREAMS_MAX), "{slots}");
            there.push((STREAMS_MAX, slots));
        }
    }
}

//! One volume in a target, its log partitions, and the number of log slots that a new volume gets.

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

use super::fill::SharedFill;
use super::lease::{Lease, Owner};
use super::refusal::Refusal;
use crate::target::ids::ConnId;
use crate::target::limits::{FENCES_MAX, LOG_SLOTS_MAX, STREAM_SLOTS_MAX};
use crate::wire::{self, Claim};

/// The most slots per stream that the target chooses: 1 MiB of log for each stream.
const SLOTS_DEFAULT_MAX: u32 = 1 << 14;

/// A volume leaves a part of the free log to other volumes only if it keeps this many slots per
/// stream: 64 KiB of log for each stream.
const SLOTS_ENOUGH: u32 = 1 << 10;

/// Returns the part of the log region in a byte range, which is then used apart from the rest.
/// Fails while a part of the range is in use.
pub type Split<R> = Box<dyn FnMut(Range<usize>) -> Result<R, RegionError> + Send>;

/// The log region of a target. Each [`Partition`] of the region has the log of one stream.
pub(super) enum TargetLog<R> {
    /// The target has no log region.
    None,
    /// The log region is valid and in use.
    Live { region: LogRegion<R>, split: Split<R> },
    /// The log region is of another boot, so its content is not valid. The target does not
    /// overwrite the region before a host has given up its content (trap T19).
    Lost(RegionHeader),
}

/// The log partition of one stream. While a connection carries the stream, the connection has the
/// log.
#[expect(clippy::large_enum_variant, reason = "one for each stream, at rest more often than not")]
pub(super) enum Partition<R> {
    /// No connection carries the stream. `entry_count` counts the entries beyond the released mark.
    /// Torn entries count, too, as long as no recovery has settled the partition.
    AtRest { log: StreamLog<R>, entry_count: u32 },
    /// The connection `conn` carries the stream and has the log. `released` is the released mark at
    /// the time of the bind. The connection publishes how full the log is.
    Bound { conn: ConnId, released: Seq, fill: SharedFill },
    /// The partition can't be read.
    Damaged,
}

impl<R> Partition<R> {
    /// Whether a connection carries the stream.
    pub(super) fn is_bound(&self) -> bool {
        matches!(self, Self::Bound { .. })
    }
}

/// A volume that the target knows.
pub(in crate::target) struct Volume<R> {
    pub(super) id: VolumeId,
    /// The generation of the last claim.
    pub(super) generation: u32,
    /// The number of streams.
    pub(super) streams: u16,
    /// The number of log slots per stream.
    pub(super) slots: u32,
    /// The volume's namespaces on this target, each with its member number in the volume.
    pub(in crate::target) members: Vec<MemberNamespace>,
    /// Other places at which the members may be: a claim may name them instead. See
    /// [`locate_members`](super::Volumes::locate_members).
    pub(super) other_places: Vec<MemberNamespace>,
    /// Namespaces that are no members, and are guarded like members: their drives may be members.
    pub(super) also_guarded: Vec<u32>,
    /// The present owner, or the rest of the lease of an owner that was lost.
    pub(super) lease: Lease,
    /// How long the target keeps the volume for its owner after the loss of the association,
    /// milliseconds (trap T25).
    pub(super) lease_ms: u32,
    /// The identifier of the host that has made the last claim, also if that was in an earlier
    /// incarnation of the target; all 0 for none.
    pub(super) last_owner_hostid: [u8; 16],
    /// One partition for each stream; empty if the volume has no log here.
    pub(super) partitions: Vec<Partition<R>>,
    /// The log of the volume is not valid, so the volume can't be claimed (trap T19).
    pub(super) is_log_lost: bool,
    /// The generation of the claim that has last given up the log; 0 for none (trap T26).
    pub(super) given_up_generation: u32,
    /// How many times the volume was claimed in this incarnation of the target.
    pub(super) claim_count: u64,
    /// The ids of the fences of this volume that have not ended: operations of earlier owners and
    /// of plain hosts may be in flight. Claims raise fences, and so do commands to forget the
    /// volume. No plain host may write before all of them have ended, even if the claimant is gone
    /// (traps T8, T21).
    pub(super) fence_ids: Vec<u64>,
    /// Every operation that was in flight at the last claim has come back (trap T8).
    pub(super) is_drained: bool,
    /// No entry of an earlier owner waits for recovery here, so streams may start (trap T9).
    pub(super) is_recovered: bool,
}

/// The result of a claim that was granted.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(in crate::target) struct Claimed {
    /// The number of this claim among the claims of the volume, for
    /// [`Volumes::on_claim_drained`](super::Volumes::on_claim_drained).
    pub(in crate::target) claim_number: u64,
    /// The association that must end because of the claim: an earlier one of the same owner
    /// (promise P7), or, for a volume without a log, the one of the former owner (trap T8).
    pub(in crate::target) association_to_end: Option<u64>,
    /// The association of the former owner, which still exists and is fenced from now on (trap T8).
    pub(in crate::target) fenced_association: Option<u64>,
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
            other_places: Vec::new(),
            also_guarded: Vec::new(),
            lease: Lease::Vacant,
            lease_ms: 0,
            last_owner_hostid: [0; 16],
            partitions,
            is_log_lost: false,
            given_up_generation: 0,
            claim_count: 0,
            fence_ids: Vec::new(),
            is_drained: false,
            is_recovered: false,
        }
    }

    /// A volume that the log's directory records, still without its partitions. With
    /// `is_log_lost`, its log is not valid.
    ///
    /// If the record has an owner, the association of that owner is lost. The lease begins to run
    /// when the target begins to serve ([`Volumes::begin_service`](super::Volumes::begin_service)).
    pub(super) fn from_record(record: &VolumeRecord, is_log_lost: bool) -> Self {
        Self {
            id: record.id,
            generation: record.generation,
            streams: record.streams,
            slots: record.slots,
            members: record.members.clone(),
            other_places: Vec::new(),
            also_guarded: Vec::new(),
            lease: Lease::from_record(record, 0),
            lease_ms: record.lease_ms,
            last_owner_hostid: record.owner,
            partitions: Vec::new(),
            is_log_lost,
            given_up_generation: record.given_up_generation,
            claim_count: 0,
            fence_ids: Vec::new(),
            is_drained: false,
            is_recovered: false,
        }
    }

    /// Whether the namespace belongs to this volume, or may belong to it.
    pub(super) fn has_member(&self, nsid: u32) -> bool {
        self.members.iter().any(|member| member.nsid == nsid) || self.also_guarded.contains(&nsid)
    }

    /// Whether these are the members of the volume, each at a place where it may be.
    pub(super) fn may_have_members(&self, claimed: &[MemberNamespace]) -> bool {
        let has_place = |place: &MemberNamespace| {
            let mut others = self.other_places.iter().filter(|other| other.member == place.member);
            claimed.contains(place) || others.any(|other| claimed.contains(other))
        };
        self.members.len() == claimed.len() && self.members.iter().all(has_place)
    }

    /// Notes the places at which the owner has found the members. The former places stay guarded.
    pub(super) fn move_members(&mut self, claimed: &[MemberNamespace]) {
        for place in &mut self.members {
            let now = claimed.iter().find(|now| now.member == place.member && *now != place);
            if let Some(now) = now {
                self.also_guarded.push(place.nsid);
                self.other_places.push(core::mem::replace(place, *now));
            }
        }
    }

    /// Whether the stream of this log has not been started since the log was given up (trap T26).
    pub(super) fn is_in_doubt(&self, log: &StreamLog<R>) -> bool {
        self.given_up_generation > log.origin().generation
    }

    /// How many entries of partitions at rest wait for recovery: no recovery has settled them.
    pub(super) fn unsettled_entry_count(&self) -> u32 {
        self.partitions.iter().map(Partition::unsettled_entry_count).sum()
    }

    /// How many entries of in-place writes the settled partitions have. Recovery keeps these
    /// entries until the owner has acknowledged them (trap T9).
    pub(super) fn in_place_entry_count(&self) -> u32 {
        self.partitions.iter().map(Partition::in_place_entry_count).sum()
    }

    /// The number of entries that wait for recovery or for an acknowledgement.
    pub(super) fn entry_count(&self) -> u32 {
        self.unsettled_entry_count() + self.in_place_entry_count()
    }

    /// The streams that connections carry. Even a volume without an owner may have some, because
    /// connections of an earlier owner may still be open when the last owner releases the volume.
    pub(in crate::target) fn carried_streams(&self) -> impl Iterator<Item = PartitionId> {
        (0..)
            .map(StreamId)
            .zip(&self.partitions)
            .filter(|(_, partition)| matches!(partition, Partition::Bound { .. }))
            .map(|(stream, _)| PartitionId { volume: self.id, stream })
    }

    /// Refuses another fence if the volume already has [`FENCES_MAX`]. A fence outlives the
    /// association of the host that has raised it. Without this limit, hosts could raise fences
    /// without end while a drive hangs (trap T28).
    pub(super) fn check_fence_limit(&self) -> Result<(), Refusal> {
        if self.fence_ids.len() < FENCES_MAX {
            Ok(())
        } else {
            Err(Refusal::retry_later(wire::status::STREAM_BUSY))
        }
    }

    /// Whether plain hosts may not write the drives of the volume now (trap T21).
    pub(super) fn is_guarded(&self) -> bool {
        !self.lease.is_vacant()
            || self.is_log_lost
            || self.entry_count() > 0
            || !self.fence_ids.is_empty()
    }

    /// The time, ns, from which the volume may be freed although its owner has not released it: the
    /// end of its lease. `None` if the lease does not end, or if something is left to recover. A
    /// partition that is bound or damaged counts as something to recover.
    pub(super) fn freeable_from(&self) -> Option<u64> {
        let is_empty = |partition: &Partition<R>| {
            matches!(partition, Partition::AtRest { entry_count: 0, .. })
        };
        let is_clean =
            !self.is_log_lost && self.fence_ids.is_empty() && self.partitions.iter().all(is_empty);
        self.lease.freeable_from().filter(|_| is_clean)
    }

    /// Whether the owner is present with this association.
    pub(super) fn is_owned_by(&self, association: u64) -> bool {
        self.lease.is_held_by(association)
    }

    /// Makes `host` the owner, because its claim is granted.
    pub(super) fn set_owner(&mut self, claim: &Claim, host: Owner) -> Claimed {
        let previous = self.lease.owner().map(|owner| owner.association);
        let previous = previous.filter(|association| *association != host.association);
        // With a log, each stream is bound with a generation, which fences the stream. Without a
        // log, the requests of a stream are plain commands, which no generation fences. So the
        // association of the old owner must end: the old owner then knows that it is fenced, and
        // does not read data of the new one (trap T8, promise P9).
        let is_unlogged =
            self.partitions.is_empty() && !probe::is_bug_planted(Plant::T8FencedPlain);
        let association_to_end = previous.filter(|_| claim.resume || is_unlogged);
        let fenced_association = previous.filter(|_| !claim.resume);
        self.generation = claim.generation;
        self.last_owner_hostid = host.hostid;
        self.lease_ms = claim.lease_ms;
        self.lease = Lease::Held(host);
        self.claim_count += 1;
        self.is_drained = false;
        self.is_recovered &= claim.resume;
        self.update_recovered();
        Claimed { claim_number: self.claim_count, association_to_end, fenced_association }
    }

    /// Sets `is_recovered` if recovery has ended: every partition is at rest, and its entries are
    /// settled or are of the present owner. `is_recovered` then stays set until the next claim.
    ///
    /// The decision uses only durable state. A log may have no entry of an earlier owner only
    /// because of a released mark that is not durable yet. Such a mark becomes durable first.
    /// Otherwise the entries would be there again after a crash of the target, and the streams that
    /// were started meanwhile could not be bound again (promise P7).
    pub(super) fn update_recovered(&mut self) {
        let generation = self.generation;
        if self.is_recovered {
            return;
        }
        self.is_recovered = self.partitions.iter_mut().all(|partition| match partition {
            Partition::AtRest { log, .. } if log.origin().generation == generation => true,
            Partition::AtRest { log, entry_count } => {
                let has_nothing_to_recover = log.is_settled() || *entry_count == 0;
                has_nothing_to_recover
                    && (probe::is_bug_planted(Plant::T9MarkInMemory)
                        || log.release_now(log.released()).is_ok())
            }
            Partition::Bound { .. } | Partition::Damaged => false,
        });
    }

    /// Whether the store of a log at rest has failed.
    pub(super) fn has_failed_log(&self) -> bool {
        let has_failed = |partition: &Partition<R>| match partition {
            Partition::AtRest { log, .. } => log.has_failed(),
            Partition::Bound { .. } | Partition::Damaged => false,
        };
        self.partitions.iter().any(has_failed)
    }
}

impl<R: Region> Partition<R> {
    /// A partition that no connection has. `scan` is the content of its log.
    pub(super) fn at_rest(log: StreamLog<R>, scan: &Scan) -> Self {
        let torn_count = if scan.settled { 0 } else { scan.torn };
        Self::AtRest { log, entry_count: scan.entries.len() as u32 + torn_count }
    }

    /// The released mark of the stream. For a bound stream it may be older than the one of the
    /// connection.
    pub(super) fn released(&self) -> Seq {
        match self {
            Self::AtRest { log, .. } => log.released(),
            Self::Bound { released, .. } => *released,
            Self::Damaged => Seq::ZERO,
        }
    }

    /// How many entries wait for recovery: no recovery has settled them.
    pub(super) fn unsettled_entry_count(&self) -> u32 {
        match self {
            Self::AtRest { log, entry_count } if !log.is_settled() => *entry_count,
            _ => 0,
        }
    }

    /// How many entries of in-place writes recovery has kept after the settlement, until the owner
    /// acknowledges them (trap T9).
    pub(super) fn in_place_entry_count(&self) -> u32 {
        match self {
            Self::AtRest { log, entry_count } if log.is_settled() => *entry_count,
            _ => 0,
        }
    }
}

/// The refusal of a claim for which the log has no space. The lower half of the result is the
/// number of bytes needed, the upper half the number of bytes free. A number that does not fit into
/// its half becomes the largest one that fits.
pub(super) fn log_too_small_refusal(needed_bytes: usize, free_bytes: usize) -> Refusal {
    let clamp = |bytes: usize| u64::from(u32::try_from(bytes).unwrap_or(u32::MAX));
    Refusal::do_not_retry(wire::status::LOG_TOO_SMALL)
        .with_result(clamp(needed_bytes) | clamp(free_bytes) << 32)
}

/// The refusal of a claim with more slots than the target keeps in memory (trap T28). The result is
/// the most slots that the claim may have for each stream.
pub(super) fn too_many_slots_refusal(header: &RegionHeader, streams: u16) -> Refusal {
    Refusal::do_not_retry(wire::status::TOO_MANY_SLOTS)
        .with_result(slots_max(header, streams).into())
}

/// Chooses the slots per stream for a claim that leaves them to the target.
///
/// `former` are the volumes of a lost log that the present log replaces. A former volume that is
/// claimed again gets the number of slots that it had. Every other volume leaves space for the
/// former volumes that are still missing, as far as it keeps enough space for itself.
///
/// # Errors
/// Not even the smallest partitions fit, either into the log or below the limit of slots (trap
/// T28).
pub(super) fn choose_slots(
    header: &RegionHeader,
    former: &[VolumeRecord],
    claim: &Claim,
) -> Result<u32, Refusal> {
    let free_slots = usize::try_from(free_slot_count(header)).unwrap_or(usize::MAX);
    let free_space = largest_gap(header);
    let usable_space = free_space.min(free_slots.saturating_mul(ENTRY_BYTES));
    let is_same_volume =
        |record: &&VolumeRecord| record.id == claim.volume && record.streams == claim.streams;
    if let Some(record) = former.iter().find(is_same_volume)
        && record.extent().len() <= usable_space
        && record.slots <= slots_max(header, claim.streams)
    {
        return Ok(record.slots);
    }
    let is_missing = |record: &&VolumeRecord| {
        record.id != claim.volume && header.volumes.iter().all(|present| present.id != record.id)
    };
    let reserved_bytes: usize =
        former.iter().filter(is_missing).map(|record| record.extent().len()).sum();
    // A log that was made anew may have to hold further volumes, which `former` does not list. So a
    // claim that gives up the log leaves half of the log to them if any partition fits into the
    // other half.
    let enough_bytes = if claim.give_up { PARTITION_ALIGN } else { partition_bytes(SLOTS_ENOUGH) };
    let slots_for = |space| fitting_slots(space, reserved_bytes, claim.streams, enough_bytes);
    slots_for(usable_space).or_else(|_| {
        // If the free space alone is large enough, only the limit of slots is in the way. A larger
        // log would not help, so the refusal must not be "log too small".
        slots_for(free_space).and(Err(too_many_slots_refusal(header, claim.streams)))
    })
}

/// The most slots per stream that a claim with so many streams gets (trap T28).
pub(super) fn slots_max(header: &RegionHeader, streams: u16) -> u32 {
    let share = free_slot_count(header) / u64::from(streams.max(1));
    u32::try_from(share).unwrap_or(u32::MAX).min(STREAM_SLOTS_MAX)
}

/// The number of slots that all further volumes together may have. It may be 0, because an earlier
/// version of the target may have given more slots to the volumes of the log.
fn free_slot_count(header: &RegionHeader) -> u64 {
    let slots_of = |record: &VolumeRecord| u64::from(record.streams) * u64::from(record.slots);
    LOG_SLOTS_MAX.saturating_sub(header.volumes.iter().map(slots_of).sum())
}

/// The size of the largest gap between the volumes in the log region, bytes.
pub(super) fn largest_gap(header: &RegionHeader) -> usize {
    let mut end_of_previous = HEADER_BYTES;
    let mut largest = 0;
    for volume in &header.volumes {
        let extent = volume.extent();
        largest = largest.max(extent.start.saturating_sub(end_of_previous));
        end_of_previous = extent.end;
    }
    largest.max((header.len as usize).saturating_sub(end_of_previous))
}

/// The slots per stream for which `streams` partitions fit into `space` bytes.
///
/// Leaves `reserved_bytes` bytes to volumes that are expected, and half of the rest to others. Each
/// of the two reductions is made only if every stream keeps `enough_bytes` bytes.
fn fitting_slots(
    space: usize,
    reserved_bytes: usize,
    streams: u16,
    enough_bytes: usize,
) -> Result<u32, Refusal> {
    let enough_for_all = enough_bytes.saturating_mul(usize::from(streams.max(1)));
    let reduce_if_enough =
        |reduced: usize, space: usize| if reduced >= enough_for_all { reduced } else { space };
    let space = reduce_if_enough(space.saturating_sub(reserved_bytes), space);
    let space = reduce_if_enough(space / 2, space);
    let bytes_per_stream = space / usize::from(streams.max(1)) / PARTITION_ALIGN * PARTITION_ALIGN;
    if bytes_per_stream < partition_bytes(SLOTS_MIN) {
        return Err(log_too_small_refusal(usize::from(streams) * PARTITION_ALIGN, space));
    }
    let slots = (bytes_per_stream - partition_bytes(0)) / ENTRY_BYTES;
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
            given_up_generation: 0,
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
        let most = |volumes: &[(u16, u32)], streams| slots_max(&header(volumes), streams);
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
        assert!(choose_slots(&header, &[], &claim(1)).is_ok());
        let too_many = Refusal::do_not_retry(wire::status::TOO_MANY_SLOTS).with_result(60);
        assert_eq!(choose_slots(&header, &[], &claim(2)), Err(too_many));
        let end = header.volumes[0].extent().end;
        header.len = (end + 2 * PARTITION_ALIGN) as u64;
        assert_eq!(choose_slots(&header, &[], &claim(2)), Err(too_many));
        header.len = (end + PARTITION_ALIGN) as u64;
        let small = log_too_small_refusal(2 * PARTITION_ALIGN, PARTITION_ALIGN);
        assert_eq!(choose_slots(&header, &[], &claim(2)), Err(small));
        header.len = (end + 4 * PARTITION_ALIGN) as u64;
        let small = log_too_small_refusal(9 * PARTITION_ALIGN, 4 * PARTITION_ALIGN);
        assert_eq!(choose_slots(&header, &[], &claim(9)), Err(small));
    }

    #[test]
    fn what_the_target_chooses_keeps_to_the_bound_and_leaves_space() {
        let mut there = vec![];
        for _ in 0..4 {
            let header = header(&there);
            let claim = Claim::plain(VolumeId([99; 16]), 1, STREAMS_MAX, Vec::new());
            let slots = choose_slots(&header, &[], &claim).unwrap();
            assert!(SLOTS_ENOUGH < slots && slots <= slots_max(&header, STREAMS_MAX), "{slots}");
            there.push((STREAMS_MAX, slots));
        }
    }

    /// Only the space of former volumes that are missing is left for them.
    #[test]
    fn t19_space_is_left_for_missing_volumes_only() {
        const FREE: usize = 1 << 20;
        let claim = Claim::plain(VolumeId([99; 16]), 1, 1, Vec::new());
        let slots_in = |space: usize| ((space - partition_bytes(0)) / ENTRY_BYTES) as u32;
        let lost = header(&[(1, slots_in(FREE / 2))]);
        let mut present = lost.clone();
        present.len = (present.volumes[0].extent().end + FREE) as u64;
        let mut absent = header(&[]);
        absent.len = (HEADER_BYTES + FREE) as u64;
        let chosen = |header: &RegionHeader, former| choose_slots(header, former, &claim).unwrap();
        assert_eq!(chosen(&absent, &lost.volumes), slots_in(FREE / 4));
        assert_eq!(chosen(&present, &lost.volumes), slots_in(FREE / 2), "it is there again");
        assert_eq!(chosen(&absent, &[]), slots_in(FREE / 2));
    }
}

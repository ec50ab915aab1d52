//! The volumes that a target knows, and the log region with their ordering logs.
//!
//! A [`Volume`] has its namespaces, its [`Lease`] and its partitions of the log. `claims.rs` gives
//! a volume to an owner (T8), `binding.rs` gives a stream of it to a connection, `listing.rs` and
//! `settlement.rs` serve its recovery, and `release.rs` frees it. `unlogged.rs` bounds the number of
//! volumes without a log. `log_opening.rs` opens the log.
//!
//! The steps of a volume's use, in their order: a host *claims* the volume; the operations that were
//! in flight at the claim come back (*drained*); the owner *lists* the entries of each stream,
//! decides, undoes, and *settles* each stream; then it *binds* each stream to a connection, which
//! has the stream's log until it ends; at last the owner *releases* the volume.

mod binding;
mod claims;
mod lease;
mod listing;
mod log_opening;
mod refusal;
mod release;
mod settlement;
mod unlogged;
mod volume;

use alloc::string::{String, ToString};
use alloc::vec::Vec;
use core::ops::Range;

use riopipe_order::attribute::{StreamId, VolumeId};
use riopipe_order::entry::PartitionId;
use riopipe_order::log_region::{LogRegion, RegionHeader, VolumeRecord};
use riopipe_order::ordering_log::{LogError, StreamLog};
use riopipe_order::probe::{self, Rare};
use riopipe_order::region::{Crc32c, Region};

pub(super) use self::binding::{Binding, Bound, live_entries};
use self::lease::Lease;
pub use self::lease::Owner;
pub(super) use self::listing::{Listing, check_page_len, read_page, status_of_unreadable};
pub use self::log_opening::{Found, Opened};
pub(super) use self::refusal::Refusal;
use self::unlogged::UsedNamespaces;
pub use self::volume::Split;
pub(super) use self::volume::Volume;
use self::volume::{Partition, TargetLog};
use super::namespace::Namespaces;
use crate::wire::{self, VolumeStatus};

/// All volumes that the target knows, and the log region.
pub struct Volumes<R> {
    list: Vec<Volume<R>>,
    target_log: TargetLog<R>,
    /// The list of a partition that a host reads now, page by page. A change of any log drops it.
    listing: Option<Listing>,
    /// The namespaces that volumes have had in this incarnation of the target.
    used_namespaces: UsedNamespaces,
    /// The volumes of a lost log that was given up and replaced by this one.
    former: Vec<VolumeRecord>,
    crc: Crc32c,
}

impl<R: Region> Volumes<R> {
    fn new(list: Vec<Volume<R>>, target_log: TargetLog<R>, crc: Crc32c) -> Self {
        Self {
            list,
            target_log,
            listing: None,
            used_namespaces: UsedNamespaces::default(),
            former: Vec::new(),
            crc,
        }
    }

    /// A target without an ordering log.
    #[must_use]
    pub fn without_log(crc: Crc32c) -> Self {
        Self::new(Vec::new(), TargetLog::None, crc)
    }

    /// A target whose log region has been opened (a new incarnation has begun). Reads every
    /// partition. The second value lists the damaged ones; their volumes are refused until the
    /// owner accepts the loss (T19).
    ///
    /// A volume that is in the log's directory and was never claimed is forgotten. A crash has
    /// interrupted its creation, and its blank partitions must not be taken for the expected ones
    /// (T24).
    #[must_use]
    pub fn with_log(
        mut region: LogRegion<R>,
        mut split: Split<R>,
        crc: Crc32c,
    ) -> (Self, Vec<String>) {
        let mut problems = Vec::new();
        let unclaimed = region.header().volumes.iter().filter(|record| record.generation == 0);
        let unclaimed: Vec<VolumeId> = unclaimed.map(|record| record.id).collect();
        for id in unclaimed {
            problems.extend(region.remove_volume(id).err().map(|error| error.to_string()));
        }
        let records = region.header().volumes.clone();
        let list = records
            .into_iter()
            .map(|record| {
                let mut lost = false;
                let streams = (0..record.streams).map(StreamId);
                let partitions = streams
                    .filter_map(|stream| Some((stream, record.partition(stream)?)))
                    .map(|(stream, range)| {
                        let id = PartitionId { volume: record.id, stream };
                        // The owner of a later claim has given up what the log knew. A crash came
                        // before its claim was granted.
                        let is_given_up = record.given_up > record.generation;
                        open_partition(&mut split, range, id, is_given_up, crc).unwrap_or_else(
                            |problem| {
                                probe::hit(Rare::LogRefused);
                                problems.push(problem);
                                lost = true;
                                Partition::Damaged
                            },
                        )
                    })
                    .collect();
                Volume { partitions, ..Volume::recorded(&record, lost) }
            })
            .collect();
        (Self::new(list, TargetLog::Live { region, split }, crc), problems)
    }

    /// Notes that the log was made in this incarnation of the target, in place of a lost one with
    /// this header that was given up. If one of its volumes is claimed, it gets the number of log
    /// slots that it had, unless its claim gives another number. So all of them fit again.
    #[must_use]
    pub fn after_loss(mut self, lost: RegionHeader) -> Self {
        self.former = lost.volumes;
        self
    }

    /// A target whose log region is of another boot: its volumes are known, guarded, and refused
    /// until a host accepts the loss (T19).
    #[must_use]
    pub fn with_lost_log(header: RegionHeader, crc: Crc32c) -> Self {
        let list = header.volumes.iter().map(|record| Volume::recorded(record, true));
        Self::new(list.collect(), TargetLog::Lost(header), crc)
    }

    /// The description of Rio's extension for Identify Controller.
    #[must_use]
    pub fn extension(&self) -> wire::Extension {
        let header = match &self.target_log {
            TargetLog::None => None,
            TargetLog::Live { region, .. } => Some(region.header()),
            TargetLog::Lost(header) => Some(header),
        };
        wire::Extension {
            version: wire::EXTENSION_VERSION,
            log_kind: header.map(|h| h.kind),
            incarnation: header.map_or(0, |h| h.incarnation),
            region: header.map_or([0; 16], |h| h.uuid),
            boot: header.map_or([0; 16], |h| h.boot),
        }
    }

    /// The owner of a volume, if it is present.
    #[must_use]
    pub fn owner(&self, volume: VolumeId) -> Option<&Owner> {
        self.find(volume)?.lease.owner()
    }

    /// The number of entries of a volume's log at rest that wait for recovery; `None` if the volume
    /// is not known.
    #[must_use]
    pub fn live_entries(&self, volume: VolumeId) -> Option<u32> {
        self.find(volume).map(Volume::unsettled_entries)
    }

    /// Begins the leases of volumes that were found owned (T25), and sets the guards.
    pub(super) fn begin_service(&mut self, namespaces: &Namespaces, now: u64) {
        let header = match &self.target_log {
            TargetLog::None => None,
            TargetLog::Live { region, .. } => Some(region.header()),
            TargetLog::Lost(header) => Some(header),
        };
        for record in header.iter().flat_map(|header| &header.volumes) {
            if let Some(volume) = self.list.iter_mut().find(|v| v.id == record.id) {
                volume.lease = Lease::from_record(record, now);
            }
        }
        self.update_guards(namespaces);
    }

    /// The answer of the status command to association `association`.
    pub(super) fn status(&self, volume: VolumeId, association: u64, now: u64) -> VolumeStatus {
        let Some(v) = self.find(volume) else {
            return VolumeStatus { volume, ..VolumeStatus::default() };
        };
        let kept_for = v.lease.kept_for(now);
        VolumeStatus {
            volume,
            generation: v.generation,
            known: true,
            owned: kept_for.is_some(),
            own: v.is_owned_by(association),
            lease_left_ms: kept_for.map_or(0, |(_, left)| left),
            unrecovered: v.unsettled_entries() > 0,
            kept: v.in_place_entries() > 0,
            log_lost: v.lost,
            damaged: v.lost && matches!(self.target_log, TargetLog::Live { .. }),
            unlogged: v.partitions.is_empty() && !v.lost,
            streams: v.streams,
            slots: v.slots,
            live_entries: v.unsettled_entries(),
            owner: kept_for.map_or_else(String::new, |(name, _)| name.into()),
            released: v.partitions.iter().map(Partition::released).collect(),
        }
    }

    /// Whether every volume of a lost log has been given up. Then the region may be made anew.
    #[must_use]
    pub fn lost_log_given_up(&self) -> bool {
        matches!(&self.target_log, TargetLog::Lost(header)
            if header.volumes.is_empty())
    }

    pub(super) fn find(&self, id: VolumeId) -> Option<&Volume<R>> {
        self.list.iter().find(|v| v.id == id)
    }
}

/// Opens a partition. If it is not valid and was given up, it is begun anew (T26), as the claim
/// that gave it up would have done.
fn open_partition<R: Region>(
    split: &mut Split<R>,
    range: Range<usize>,
    id: PartitionId,
    is_given_up: bool,
    crc: Crc32c,
) -> Result<Partition<R>, String> {
    let part = split(range.clone()).map_err(|error| error.to_string())?;
    match StreamLog::open(part, id, crc) {
        Ok((log, scan)) => Ok(Partition::at_rest(log, &scan)),
        Err(LogError::Region(error)) => Err(error.to_string()),
        Err(_) if is_given_up => {
            let part = split(range).map_err(|error| error.to_string())?;
            let log = StreamLog::format(part, id, 0, crc).map_err(|error| error.to_string())?;
            Ok(Partition::AtRest { log, entries: 0 })
        }
        Err(error) => Err(error.to_string()),
    }
}

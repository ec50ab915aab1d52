//! The volumes that a target knows, and the log region with their ordering logs.
//!
//! A [`Volume`] has its namespaces, its [`Lease`] and its partitions of the log. A volume is used
//! in these steps:
//!
//! 1. A host *claims* the volume and becomes its owner (`claims.rs`, T8).
//! 2. The operations that were in flight at the claim come back: the volume is *drained*.
//! 3. The owner *lists* the entries of each stream (`listing.rs`), decides, and undoes.
//! 4. The owner *settles* each stream (`settlement.rs`).
//! 5. The owner *binds* each stream to a connection (`binding.rs`). The connection has the log of
//!    the stream until the stream ends there.
//! 6. The owner *releases* the volume (`release.rs`), or its lease runs out (`lease.rs`).
//!
//! `unlogged.rs` bounds the number of volumes without a log. `log_opening.rs` opens the log region,
//! and `places.rs` finds the members of the volumes in it.

mod binding;
mod claims;
mod fill;
mod lease;
mod listing;
mod log_opening;
mod places;
mod refusal;
mod release;
mod removal;
mod settlement;
mod unlogged;
mod volume;

use alloc::string::{String, ToString};
use alloc::vec::Vec;
use core::ops::Range;

use riopipe_order::attribute::{StreamId, VolumeId};
use riopipe_order::entry::PartitionId;
use riopipe_order::log_region::{HEADER_BYTES, LogRegion, RegionHeader, VolumeRecord};
use riopipe_order::ordering_log::{LogError, StreamLog};
use riopipe_order::probe::{self, Rare};
use riopipe_order::region::{Crc32c, Region};

pub(super) use self::binding::{Binding, Bound, count_live_entries};
pub(super) use self::fill::SharedFill;
pub use self::fill::{LogFill, VolumeFill};
use self::lease::Lease;
pub use self::lease::Owner;
pub(super) use self::listing::{Listing, check_page_len, read_page, status_of_unreadable};
pub use self::log_opening::{Found, Opened};
pub use self::places::LabelledDrive;
pub(super) use self::refusal::Refusal;
pub use self::removal::{VolumeInUse, VolumeUse};
use self::unlogged::UsedNamespaces;
pub use self::volume::Split;
pub(super) use self::volume::Volume;
use self::volume::{Partition, TargetLog, largest_gap};
use super::namespace::Namespaces;
use crate::wire::{self, LogDirectory, LogVolume, VolumeStatus};

/// The use of a volume, for reports.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct VolumeUsage {
    /// The volume.
    pub id: VolumeId,
    /// Its namespaces on this target.
    pub nsids: Vec<u32>,
    /// Whether it has an owner with an association.
    pub is_owned: bool,
    /// The number of its streams that connections carry, with a log.
    pub bound_streams: usize,
}

/// All volumes that the target knows, and the log region.
pub struct Volumes<R> {
    list: Vec<Volume<R>>,
    target_log: TargetLog<R>,
    /// The list of a partition's entries that a host is reading page by page. A change of any log
    /// drops the list.
    listing: Option<Listing>,
    /// The namespaces that volumes have had in this incarnation of the target.
    used_namespaces: UsedNamespaces,
    /// Whether the log is in the memory of the target's process.
    is_log_in_memory: bool,
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
            is_log_in_memory: false,
            former: Vec::new(),
            crc,
        }
    }

    /// Notes that the log is in the memory of the target's process. Hosts show that.
    pub const fn note_log_in_memory(&mut self) {
        self.is_log_in_memory = true;
    }

    /// A target without an ordering log.
    #[must_use]
    pub fn without_log(crc: Crc32c) -> Self {
        Self::new(Vec::new(), TargetLog::None, crc)
    }

    /// A target whose log region was opened for a new incarnation. Reads every partition. Also
    /// returns the problems of the damaged partitions: their volumes are refused until the owner
    /// accepts the loss (trap T19).
    ///
    /// A volume in the log's directory that was never claimed is forgotten: a crash has interrupted
    /// its creation. If the volume stayed, its blank partitions could be taken for the log that its
    /// labels name (trap T24).
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
        let mut list = Vec::new();
        for record in &region.header().volumes {
            let mut is_log_lost = false;
            let mut partitions = Vec::new();
            for stream in (0..record.streams).map(StreamId) {
                let Some(range) = record.partition(stream) else { continue };
                let id = PartitionId { volume: record.id, stream };
                // If this is true, a later claim has given up the content of the log, and a crash
                // has come before that claim was granted.
                let is_given_up = record.given_up_generation > record.generation;
                let opened = open_partition(&mut split, range, id, is_given_up, crc);
                partitions.push(opened.unwrap_or_else(|problem| {
                    probe::count_rare(Rare::LogRefused);
                    problems.push(problem);
                    is_log_lost = true;
                    Partition::Damaged
                }));
            }
            list.push(Volume { partitions, ..Volume::from_record(record, is_log_lost) });
        }
        (Self::new(list, TargetLog::Live { region, split }, crc), problems)
    }

    /// Notes that the log was made anew in this incarnation of the target, because the lost log
    /// with this header was given up. A volume of the lost log that is claimed again gets the
    /// number of log slots that it had, unless its claim gives another number. So all volumes fit
    /// again.
    #[must_use]
    pub fn after_loss(mut self, lost: RegionHeader) -> Self {
        self.former = lost.volumes;
        self
    }

    /// A target whose log region is of another boot. The volumes in it are known and guarded. They
    /// can't be claimed until a host accepts the loss of the log (trap T19).
    #[must_use]
    pub fn with_lost_log(header: RegionHeader, crc: Crc32c) -> Self {
        let list = header.volumes.iter().map(|record| Volume::from_record(record, true));
        Self::new(list.collect(), TargetLog::Lost(header), crc)
    }

    /// The description of Rio's extension for Identify Controller.
    #[must_use]
    pub fn extension(&self) -> wire::Extension {
        let header = self.log_header();
        wire::Extension {
            version: wire::EXTENSION_VERSION,
            log_kind: header.map(|header| header.kind),
            log_in_memory: self.is_log_in_memory,
            incarnation: header.map_or(0, |header| header.incarnation),
            region: header.map_or([0; 16], |header| header.uuid),
            boot: header.map_or([0; 16], |header| header.boot),
        }
    }

    /// The header of the log region, also of a lost one; `None` if the target has no log region.
    fn log_header(&self) -> Option<&RegionHeader> {
        match &self.target_log {
            TargetLog::None => None,
            TargetLog::Live { region, .. } => Some(region.header()),
            TargetLog::Lost(header) => Some(header),
        }
    }

    /// The header of the log region in use.
    fn live_log_header(&self) -> Option<&RegionHeader> {
        match &self.target_log {
            TargetLog::Live { region, .. } => Some(region.header()),
            TargetLog::None | TargetLog::Lost(_) => None,
        }
    }

    /// The owner of a volume, if the owner has an association.
    #[must_use]
    pub fn owner(&self, volume: VolumeId) -> Option<&Owner> {
        self.find(volume)?.lease.owner()
    }

    /// The present use of all volumes, in the order in which the target came to know them.
    pub fn usage(&self) -> impl Iterator<Item = VolumeUsage> + '_ {
        self.list.iter().map(|volume| VolumeUsage {
            id: volume.id,
            nsids: volume.members.iter().map(|member| member.nsid).collect(),
            is_owned: volume.lease.owner().is_some(),
            bound_streams: volume.partitions.iter().filter(|part| part.is_bound()).count(),
        })
    }

    /// The number of entries of a volume's log at rest that wait for recovery; `None` if the volume
    /// is not known.
    #[must_use]
    pub fn live_entries(&self, volume: VolumeId) -> Option<u32> {
        self.find(volume).map(Volume::unsettled_entry_count)
    }

    /// Begins the leases of the volumes that have an owner in the log's directory (trap T25), and
    /// sets the guards of all namespaces.
    pub(super) fn begin_service(&mut self, namespaces: &Namespaces, now: u64) {
        let header = match &self.target_log {
            TargetLog::None => None,
            TargetLog::Live { region, .. } => Some(region.header()),
            TargetLog::Lost(header) => Some(header),
        };
        for record in header.iter().flat_map(|header| &header.volumes) {
            if let Some(volume) = self.list.iter_mut().find(|volume| volume.id == record.id) {
                volume.lease = Lease::from_record(record, now);
            }
        }
        self.update_guards(namespaces);
    }

    /// The answer of the status command to association `association`.
    pub(super) fn status(&self, volume: VolumeId, association: u64, now: u64) -> VolumeStatus {
        let Some(known) = self.find(volume) else {
            return VolumeStatus { volume, ..VolumeStatus::default() };
        };
        let reserved_for = known.lease.reserved_for(now);
        VolumeStatus {
            volume: known.id,
            generation: known.generation,
            known: true,
            owned: reserved_for.is_some(),
            own: known.is_owned_by(association),
            lease_left_ms: reserved_for.map_or(0, |reserved| reserved.lease_left_ms),
            unrecovered: known.unsettled_entry_count() > 0,
            kept: known.in_place_entry_count() > 0,
            log_lost: known.is_log_lost,
            damaged: known.is_log_lost && matches!(self.target_log, TargetLog::Live { .. }),
            unlogged: known.partitions.is_empty() && !known.is_log_lost,
            streams: known.streams,
            slots: known.slots,
            live_entries: known.unsettled_entry_count(),
            owner: reserved_for.map_or_else(String::new, |reserved| reserved.owner_name.into()),
            owner_address: reserved_for
                .map_or_else(String::new, |reserved| reserved.owner_address.into()),
            released: known.partitions.iter().map(Partition::released).collect(),
        }
    }

    /// The answer of the directory command: the volumes with partitions, and the space of the log.
    pub(super) fn directory(&self, now: u64) -> LogDirectory {
        let Some(header) = self.log_header() else { return LogDirectory::default() };
        let used: u64 = header.volumes.iter().map(|record| record.extent().len() as u64).sum();
        let region_bytes = header.len;
        let describe = |record: &VolumeRecord| {
            let known = self.find(record.id);
            LogVolume {
                id: record.id,
                generation: known.map_or(record.generation, |volume| volume.generation),
                owned: known.is_some_and(|volume| volume.lease.is_reserved(now)),
                unrecovered: known.is_some_and(|volume| volume.unsettled_entry_count() > 0),
                kept: known.is_some_and(|volume| volume.in_place_entry_count() > 0),
                log_lost: known.is_some_and(|volume| volume.is_log_lost),
                streams: record.streams,
                slots: record.slots,
                live_entries: known.map_or(0, Volume::unsettled_entry_count),
                bytes: record.extent().len() as u64,
                members: known.map_or(&record.members, |volume| &volume.members).clone(),
            }
        };
        LogDirectory {
            region_bytes,
            free_bytes: region_bytes.saturating_sub(HEADER_BYTES as u64 + used),
            gap_bytes: largest_gap(header) as u64,
            volumes: header.volumes.iter().map(describe).collect(),
        }
    }

    /// Whether every volume of a lost log has been given up. Then the region may be made anew.
    #[must_use]
    pub fn lost_log_given_up(&self) -> bool {
        matches!(&self.target_log, TargetLog::Lost(header)
            if header.volumes.is_empty())
    }

    pub(super) fn find(&self, id: VolumeId) -> Option<&Volume<R>> {
        self.list.iter().find(|volume| volume.id == id)
    }

    fn find_mut(&mut self, id: VolumeId) -> Option<&mut Volume<R>> {
        self.list.iter_mut().find(|volume| volume.id == id)
    }
}

/// Opens a partition. A partition that is not valid and was given up is made anew, because the
/// claim that has given it up was interrupted before it did that (trap T26).
///
/// # Errors
/// The problem of the partition, for the operator.
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
            Ok(Partition::AtRest { log, entry_count: 0 })
        }
        Err(error) => Err(error.to_string()),
    }
}

//! Volumes: who owns them, with which generation, and where their stream logs are (T8, T21).

use alloc::boxed::Box;
use alloc::string::{String, ToString};
use alloc::vec::Vec;
use core::ops::Range;

use riopipe_nvme::command::Status;
use riopipe_order::attribute::{Seq, StreamId, VolumeId};
use riopipe_order::entry::{Life, PartitionId};
use riopipe_order::log_region::{
    AddError, LogKind, LogRegion, MEMBERS_MAX, MemberNamespace, NewVolume, RegionHeader,
    VolumeState,
};
use riopipe_order::ordering_log::{BindError, FormatError, StreamLog};
use riopipe_order::region::{Crc32c, Region, RegionError};

use super::namespace::Namespaces;
use super::shared::ConnId;
use super::volume::{Log, Partition, Volume, fitting_slots, too_small};
use crate::wire::{self, Claim, VolumeStatus};

/// Gives the part of the log region in a byte range, to be used apart from the rest. Fails while
/// an earlier owner of some of it is still there.
pub type Split<R> = Box<dyn FnMut(Range<usize>) -> Result<R, RegionError> + Send>;

/// Who owns a volume.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Owner {
    /// The association.
    pub assoc: u64,
    /// Its controller.
    pub cntlid: u16,
    /// The host's name.
    pub hostnqn: String,
    /// The host's id.
    pub hostid: [u8; 16],
}

/// A refusal: the status, and the completion's result.
pub(super) type Refusal = (Status, u64);

/// All volumes that the target knows, and the log region.
pub struct Volumes<R> {
    list: Vec<Volume<R>>,
    log: Log<R>,
    crc: Crc32c,
}

/// A stream that was bound.
pub(super) struct Bound<R> {
    pub(super) log: StreamLog<R>,
    pub(super) members: Vec<MemberNamespace>,
    pub(super) incarnation: u32,
}

impl<R: Region> Volumes<R> {
    /// A target without an ordering log.
    #[must_use]
    pub fn without_log(crc: Crc32c) -> Self {
        Self { list: Vec::new(), log: Log::None, crc }
    }

    /// A target whose log region has been opened (a new incarnation has begun). Reads every
    /// partition; what is wrong with any is told in the second value, and such a volume is
    /// refused until its owner accepts the loss (T19).
    #[must_use]
    pub fn with_log(region: LogRegion<R>, mut split: Split<R>, crc: Crc32c) -> (Self, Vec<String>) {
        let mut problems = Vec::new();
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
                        let opened = split(range)
                            .map_err(|error| error.to_string())
                            .and_then(|r| StreamLog::open(r, id, crc).map_err(|e| e.to_string()));
                        match opened {
                            Ok((log, scan)) => {
                                let live = scan.entries.len() as u32 + scan.torn;
                                Partition::Home { log, live }
                            }
                            Err(problem) => {
                                problems.push(problem);
                                lost = true;
                                Partition::Damaged
                            }
                        }
                    })
                    .collect();
                Volume {
                    id: record.id,
                    generation: record.generation,
                    streams: record.streams,
                    slots: record.slots,
                    members: record.members.clone(),
                    owner: None,
                    partitions,
                    lost,
                }
            })
            .collect();
        (Self { list, log: Log::Live { region, split }, crc }, problems)
    }

    /// A target whose log region is of another boot: the volumes in it are known, guarded, and
    /// refused until somebody accepts the loss (T19).
    #[must_use]
    pub fn with_lost_log(header: RegionHeader, crc: Crc32c) -> Self {
        let list = header.volumes.iter().map(|record| Volume {
            id: record.id,
            generation: record.generation,
            streams: record.streams,
            slots: record.slots,
            members: record.members.clone(),
            owner: None,
            partitions: Vec::new(),
            lost: true,
        });
        Self { list: list.collect(), log: Log::Lost(header), crc }
    }

    /// What Identify Controller says of Rio's extension.
    #[must_use]
    pub fn extension(&self) -> wire::Extension {
        let header = match &self.log {
            Log::None => None,
            Log::Live { region, .. } => Some(region.header()),
            Log::Lost(header) => Some(header),
        };
        wire::Extension {
            version: wire::EXTENSION_VERSION,
            log_kind: match header.map(|h| h.kind) {
                None => wire::LogKind::None,
                Some(LogKind::File) => wire::LogKind::File,
                Some(LogKind::Dax) => wire::LogKind::Dax,
                Some(LogKind::Pci) => wire::LogKind::Pci,
                Some(LogKind::Block) => wire::LogKind::Block,
            },
            incarnation: header.map_or(0, |h| h.incarnation),
            region: header.map_or([0; 16], |h| h.uuid),
            boot: header.map_or([0; 16], |h| h.boot),
        }
    }

    /// The owner of a volume.
    #[must_use]
    pub fn owner(&self, volume: VolumeId) -> Option<&Owner> {
        self.list.iter().find(|v| v.id == volume)?.owner.as_ref()
    }

    /// Live entries of a volume's log at rest; `None` if the volume is not known.
    #[must_use]
    pub fn live_entries(&self, volume: VolumeId) -> Option<u32> {
        self.list.iter().find(|v| v.id == volume).map(Volume::live)
    }

    /// What the status command answers association `assoc`.
    pub(super) fn status(&self, volume: VolumeId, assoc: u64) -> VolumeStatus {
        let Some(v) = self.find(volume) else {
            return VolumeStatus { volume, ..VolumeStatus::default() };
        };
        VolumeStatus {
            volume,
            generation: v.generation,
            known: true,
            owned: v.owner.is_some(),
            own: v.owner.as_ref().is_some_and(|o| o.assoc == assoc),
            unrecovered: v.live() > 0,
            log_lost: v.lost,
            unlogged: v.partitions.is_empty() && !v.lost,
            streams: v.streams,
            slots: v.slots,
            live_entries: v.live(),
            owner: v.owner.as_ref().map_or_else(String::new, |o| o.hostnqn.clone()),
            released: v.partitions.iter().map(Partition::released).collect(),
        }
    }

    /// Gives a volume to `who`: the generation is durable before this returns (T8). `living` says
    /// whether an association is alive.
    pub(super) fn claim(
        &mut self,
        claim: &Claim,
        who: Owner,
        namespaces: &Namespaces,
        living: impl Fn(u64) -> bool,
    ) -> Result<(), Refusal> {
        self.check_members(claim, namespaces)?;
        if claim.generation == 0 {
            return Err((wire::status::STALE_GENERATION.with_dnr(), 0));
        }
        let known = self.list.iter().position(|v| v.id == claim.volume);
        let at = match known {
            Some(at) => {
                self.check_known(at, claim, &who, living)?;
                // A volume that has done without a log so far gets one.
                if claim.create {
                    let generation = self.list[at].generation;
                    let partitions = self.add_partitions(claim)?;
                    let volume = &mut self.list[at];
                    (volume.slots, volume.partitions) = (partitions.1, partitions.0);
                    volume.generation = generation;
                }
                at
            }
            None if claim.create || claim.unlogged => {
                let (partitions, slots) =
                    if claim.unlogged { (Vec::new(), 0) } else { self.add_partitions(claim)? };
                self.list.push(Volume {
                    id: claim.volume,
                    generation: 0,
                    streams: claim.streams,
                    slots,
                    members: claim.members.clone(),
                    owner: None,
                    partitions,
                    lost: false,
                });
                self.list.len() - 1
            }
            None => {
                return Err(match self.log {
                    Log::None => (wire::status::NO_LOG.with_dnr(), 0),
                    Log::Lost(_) => (wire::status::LOG_LOST.with_dnr(), 0),
                    Log::Live { .. } => (wire::status::UNKNOWN_VOLUME.with_dnr(), 0),
                });
            }
        };
        let volume = &mut self.list[at];
        if claim.generation <= volume.generation {
            return Err((wire::status::STALE_GENERATION.with_dnr(), volume.generation.into()));
        }
        if let Log::Live { region, .. } = &mut self.log
            && !volume.partitions.is_empty()
        {
            region
                .set_generation(claim.volume, claim.generation, who.hostid)
                .map_err(|_| (wire::status::LOG_FAILED, 0))?;
        }
        volume.generation = claim.generation;
        volume.owner = Some(who);
        self.reguard(namespaces);
        Ok(())
    }

    /// T20, T21: the members exist, and belong to no other volume that is owned or unrecovered.
    fn check_members(&self, claim: &Claim, namespaces: &Namespaces) -> Result<(), Refusal> {
        let new = &claim.members;
        let twice =
            |i: usize| new[..i].iter().any(|m| m.nsid == new[i].nsid || m.member == new[i].member);
        if new.len() > MEMBERS_MAX || (1..new.len()).any(twice) {
            return Err((Status::INVALID_FIELD.with_dnr(), 0));
        }
        if new.iter().any(|m| namespaces.find(m.nsid).is_none()) {
            return Err((Status::INVALID_NAMESPACE.with_dnr(), 0));
        }
        let taken = self
            .list
            .iter()
            .any(|v| v.id != claim.volume && v.is_guarded() && new.iter().any(|m| v.has(m.nsid)));
        if taken { Err((wire::status::GUARDED.with_dnr(), 0)) } else { Ok(()) }
    }

    fn check_known(
        &self,
        at: usize,
        claim: &Claim,
        who: &Owner,
        living: impl Fn(u64) -> bool,
    ) -> Result<(), Refusal> {
        let v = &self.list[at];
        let logged = !v.partitions.is_empty();
        if v.lost {
            return Err((wire::status::LOG_LOST.with_dnr(), 0));
        }
        if let Some(owner) = &v.owner
            && owner.assoc != who.assoc
            && living(owner.assoc)
            && !claim.take_over
        {
            return Err((wire::status::OWNED, v.generation.into()));
        }
        if claim.generation <= v.generation {
            return Err((wire::status::STALE_GENERATION.with_dnr(), v.generation.into()));
        }
        if claim.create && logged {
            return Err((wire::status::VOLUME_EXISTS.with_dnr(), 0));
        }
        if claim.unlogged && v.live() > 0 {
            return Err((wire::status::UNRECOVERED.with_dnr(), 0));
        }
        if !claim.create && !claim.unlogged && !logged {
            return Err((wire::status::NO_LOG.with_dnr(), 0));
        }
        let same = v.members.len() == claim.members.len()
            && v.members.iter().all(|member| claim.members.contains(member));
        if v.streams != claim.streams || !same {
            return Err((Status::INVALID_FIELD.with_dnr(), 0));
        }
        Ok(())
    }

    fn add_partitions(&mut self, claim: &Claim) -> Result<(Vec<Partition<R>>, u32), Refusal> {
        let (region, split) = match &mut self.log {
            Log::None => return Err((wire::status::NO_LOG.with_dnr(), 0)),
            Log::Lost(_) => return Err((wire::status::LOG_LOST.with_dnr(), 0)),
            Log::Live { region, split } => (region, split),
        };
        let slots = match claim.slots {
            0 => fitting_slots(region.header(), claim.streams)?,
            slots => slots,
        };
        let new = NewVolume {
            id: claim.volume,
            streams: claim.streams,
            slots,
            members: claim.members.clone(),
        };
        let mut partitions = Vec::new();
        let crc = self.crc;
        let added = region.add_volume(new, |stream, range| {
            let id = PartitionId { volume: claim.volume, stream };
            let log = StreamLog::format(split(range)?, id, 0, crc).map_err(|e| match e {
                FormatError::Region(error) => error,
                other => RegionError::new(other.to_string()),
            })?;
            partitions.push(Partition::Home { log, live: 0 });
            Ok(())
        });
        match added {
            Ok(_) => Ok((partitions, slots)),
            Err(AddError::AlreadyThere { .. }) => Err((wire::status::VOLUME_EXISTS.with_dnr(), 0)),
            Err(AddError::TooSmall { need, have }) => Err(too_small(need, have)),
            Err(AddError::DirectoryFull) => Err(too_small(0, 0)),
            Err(AddError::Shape { .. }) => Err((Status::INVALID_FIELD.with_dnr(), 0)),
            Err(AddError::Region(_)) => Err((wire::status::LOG_FAILED, 0)),
        }
    }

    /// Whether `assoc` may give the volume back: it owns it, or nobody does and it is to be
    /// forgotten with all it holds.
    pub(super) fn may_release(
        &self,
        volume: VolumeId,
        assoc: u64,
        forget: bool,
    ) -> Result<(), Refusal> {
        let v = self.find(volume).ok_or((wire::status::UNKNOWN_VOLUME.with_dnr(), 0))?;
        match &v.owner {
            Some(owner) if owner.assoc == assoc => Ok(()),
            None if forget => Ok(()),
            _ => Err((wire::status::NOT_OWNER.with_dnr(), 0)),
        }
    }

    /// Gives a volume back, once its streams are; with `forget`, drops it and its log.
    pub(super) fn release(
        &mut self,
        volume: VolumeId,
        forget: bool,
        namespaces: &Namespaces,
    ) -> Result<(), Refusal> {
        let Some(at) = self.list.iter().position(|v| v.id == volume) else {
            return Err((wire::status::UNKNOWN_VOLUME.with_dnr(), 0));
        };
        self.list[at].owner = None;
        let result = if forget { self.forget(at) } else { self.close(at) };
        self.reguard(namespaces);
        result
    }

    fn forget(&mut self, at: usize) -> Result<(), Refusal> {
        let id = self.list[at].id;
        if let Log::Live { region, .. } = &mut self.log
            && region.volume(id).is_some()
        {
            region.remove_volume(id).map_err(|_| (wire::status::LOG_FAILED, 0))?;
        }
        if let Log::Lost(header) = &mut self.log {
            header.volumes.retain(|record| record.id != id);
        }
        self.list.remove(at);
        Ok(())
    }

    /// Whether a lost log holds nothing any more that somebody has not given up: then the region
    /// may be made anew.
    #[must_use]
    pub fn lost_log_given_up(&self) -> bool {
        matches!(&self.log, Log::Lost(header)
            if header.volumes.iter().all(|v| v.state == VolumeState::Closed))
    }

    /// Notes a volume as closed if nothing of it needs recovery.
    fn close(&mut self, at: usize) -> Result<(), Refusal> {
        let volume = &mut self.list[at];
        if volume.partitions.is_empty() {
            // Nothing about it outlives its owner but its generation.
            return Ok(());
        }
        let failed = |_| (wire::status::LOG_FAILED, 0);
        let mut clean = !volume.lost;
        for partition in &mut volume.partitions {
            match partition {
                Partition::Home { log, live: 0 } => {
                    let released = log.released();
                    log.release_now(released).map_err(failed)?;
                }
                _ => clean = false,
            }
        }
        if clean && let Log::Live { region, .. } = &mut self.log {
            region
                .set_state(volume.id, VolumeState::Closed)
                .map_err(|_| (wire::status::LOG_FAILED, 0))?;
        }
        Ok(())
    }

    /// An association has ended, and all its writes have come back.
    pub(super) fn vacate(&mut self, assoc: u64, namespaces: &Namespaces) {
        for at in 0..self.list.len() {
            let volume = &mut self.list[at];
            if volume.owner.as_ref().is_some_and(|o| o.assoc == assoc) {
                volume.owner = None;
                // A log that fails here stays marked as owned: recovery will look at it.
                let _ = self.close(at);
            }
        }
        self.reguard(namespaces);
    }

    /// Hands the log of a stream to a connection.
    pub(super) fn bind(
        &mut self,
        conn: ConnId,
        assoc: u64,
        id: PartitionId,
        generation: u32,
        released: Seq,
    ) -> Result<Bound<R>, Refusal> {
        let refuse = |status: Status| Err((status.with_dnr(), 0));
        let incarnation = match &self.log {
            Log::Live { region, .. } => region.incarnation(),
            Log::None => return refuse(wire::status::NO_LOG),
            Log::Lost(_) => return refuse(wire::status::LOG_LOST),
        };
        let Some(volume) = self.list.iter_mut().find(|v| v.id == id.volume) else {
            return refuse(wire::status::UNKNOWN_VOLUME);
        };
        // Who has been overtaken learns that first (T8).
        if generation < volume.generation {
            return refuse(wire::status::STALE_GENERATION);
        }
        if volume.owner.as_ref().is_none_or(|o| o.assoc != assoc) {
            return refuse(wire::status::NOT_OWNER);
        }
        if generation != volume.generation {
            return refuse(wire::status::STALE_GENERATION);
        }
        if volume.lost {
            return refuse(wire::status::LOG_LOST);
        }
        if volume.partitions.is_empty() {
            return refuse(wire::status::NO_LOG);
        }
        // Undo needs all lists of all streams at rest: one that is not recovered keeps the
        // others from starting (T9, T20).
        if volume.live() > 0 {
            return refuse(wire::status::UNRECOVERED);
        }
        let Some(partition) = volume.partitions.get_mut(usize::from(id.stream.0)) else {
            return refuse(wire::status::NO_SUCH_STREAM);
        };
        match partition {
            Partition::Bound { .. } => Err((wire::status::STREAM_BUSY, 0)),
            Partition::Damaged => refuse(wire::status::LOG_LOST),
            Partition::Home { log, .. } => {
                match log.start(Life { generation, incarnation }, released) {
                    Ok(()) => {}
                    Err(BindError::Generation { .. } | BindError::Incarnation { .. }) => {
                        return refuse(wire::status::STALE_GENERATION);
                    }
                    // Only resuming is refused for this.
                    Err(BindError::Settled { .. }) => return refuse(wire::status::UNRECOVERED),
                    Err(BindError::Region(_)) => return Err((wire::status::LOG_FAILED, 0)),
                }
                let carried = Partition::Bound { conn, released };
                let Partition::Home { log, .. } = core::mem::replace(partition, carried) else {
                    unreachable!("matched as Home above, and nothing came between");
                };
                Ok(Bound { log, members: volume.members.clone(), incarnation })
            }
        }
    }

    /// Takes the log of a stream back from a connection.
    pub(super) fn give_back(&mut self, conn: ConnId, log: StreamLog<R>) {
        let PartitionId { volume, stream } = log.id();
        let Some(volume) = self.list.iter_mut().find(|v| v.id == volume) else {
            return;
        };
        if let Some(partition) = volume.partitions.get_mut(usize::from(stream.0))
            && matches!(partition, Partition::Bound { conn: c, .. } if *c == conn)
        {
            let live = log.slots() - log.free();
            *partition = Partition::Home { log, live };
        }
    }

    /// Guards the members of volumes that nobody owns but that need recovery.
    pub(super) fn guard_unrecovered(&self, namespaces: &Namespaces) {
        self.reguard(namespaces);
    }

    /// Sets every namespace's guard from the volumes it belongs to (T21).
    fn reguard(&self, namespaces: &Namespaces) {
        for namespace in namespaces.iter() {
            let nsid = namespace.config.nsid;
            let mut guarded = self.list.iter().filter(|v| v.has(nsid) && v.is_guarded());
            match guarded.next() {
                None => namespace.state.open_to_all(),
                Some(volume) => {
                    namespace.state.guard_for(volume.owner.as_ref().map(|o| o.assoc));
                }
            }
        }
    }

    fn find(&self, id: VolumeId) -> Option<&Volume<R>> {
        self.list.iter().find(|v| v.id == id)
    }
}

//! Claims: a volume gets an owner, and if need be its partitions of the log (T8, T21).

use alloc::string::ToString;
use alloc::vec::Vec;

use riopipe_nvme::command::Status;
use riopipe_order::attribute::{StreamId, VolumeId};
use riopipe_order::entry::PartitionId;
use riopipe_order::log_region::{AddError, MEMBERS_MAX, NewVolume, VOLUMES_MAX};
use riopipe_order::ordering_log::{FormatError, LogError, StreamLog};
use riopipe_order::probe::{self, Plant, Rare};
use riopipe_order::region::{Region, RegionError};

use super::Volumes;
use super::lease::Owner;
use super::volume::{
    Claimed, Log, Partition, Refusal, Volume, chosen_slots, most_slots, too_many, too_small,
};
use crate::target::limits::LEASE_MS_MAX;
use crate::target::namespace::Namespaces;
use crate::wire::{self, Claim};

impl<R: Region> Volumes<R> {
    /// Gives a volume to `host`. The generation is durable before this returns (T8).
    ///
    /// Nothing may be bound, listed or settled before the operations in flight have come back, and
    /// [`claim_drained`](Self::claim_drained) has been called.
    pub(in crate::target) fn claim(
        &mut self,
        claim: &Claim,
        host: Owner,
        namespaces: &Namespaces,
        now: u64,
    ) -> Result<Claimed, Refusal> {
        let wanted = |v: &Volume<R>| {
            v.id != claim.volume && claim.members.iter().any(|member| v.has(member.nsid))
        };
        self.free(wanted, namespaces, now);
        self.check_members(claim, namespaces)?;
        if claim.generation == 0 {
            return Err((wire::status::STALE_GENERATION.with_dnr(), 0));
        }
        // A shorter lease than requested would end while its owner still waits (T25).
        if claim.lease_ms > LEASE_MS_MAX && !probe::planted(Plant::T28AnyLease) {
            return Err((wire::status::LEASE_TOO_LONG.with_dnr(), LEASE_MS_MAX.into()));
        }
        // An owner that resumes creates and gives up nothing. It fences only its own earlier connections.
        if claim.resume && (claim.create || claim.take_over || claim.give_up) {
            return Err((Status::INVALID_FIELD.with_dnr(), 0));
        }
        let known = self.list.iter().position(|v| v.id == claim.volume);
        if let Some(at) = known {
            self.list[at].may_be_fenced()?;
        }
        let at = match known {
            Some(at) if claim.resume => {
                self.check_resume(&self.list[at], claim, &host)?;
                at
            }
            Some(at) => {
                self.check_known(&self.list[at], claim, &host, now)?;
                if claim.give_up && !(claim.create && self.list[at].partitions.is_empty()) {
                    self.give_up(at, claim)?;
                } else if claim.create {
                    // A volume without a log so far gets one.
                    let (partitions, slots) = self.add_partitions(claim)?;
                    let volume = &mut self.list[at];
                    (volume.slots, volume.partitions) = (slots, partitions);
                }
                at
            }
            None if claim.create || claim.unlogged => {
                if claim.resume {
                    self.check_unknown_resume(claim)?;
                }
                let (partitions, slots) =
                    if claim.unlogged { (Vec::new(), 0) } else { self.add_partitions(claim)? };
                self.list.push(Volume::new(claim, partitions, slots));
                self.list.len() - 1
            }
            None => {
                probe::hit(Rare::LogRefused);
                return Err(match self.log {
                    Log::None => (wire::status::NO_LOG.with_dnr(), 0),
                    Log::Lost(_) => (wire::status::LOG_LOST.with_dnr(), 0),
                    Log::Live { .. } => (wire::status::UNKNOWN_VOLUME.with_dnr(), 0),
                });
            }
        };
        if claim.give_up && self.list[at].given_up != claim.generation {
            // The claim has begun a new log for the volume. The directory of that log records that
            // the old one was given up.
            self.record_given_up(at, claim.generation)?;
        }
        let volume = &mut self.list[at];
        if !claim.resume && claim.generation <= volume.generation {
            return Err((wire::status::STALE_GENERATION.with_dnr(), volume.generation.into()));
        }
        if let Log::Live { region, .. } = &mut self.log
            && !volume.partitions.is_empty()
        {
            let recorded = if claim.resume {
                region.renew(claim.volume, claim.lease_ms)
            } else {
                let Claim { generation, lease_ms, .. } = *claim;
                region.set_generation(claim.volume, generation, host.hostid, lease_ms)
            };
            recorded.map_err(|_| (wire::status::LOG_FAILED, 0))?;
        }
        let claimed = volume.change_hands(claim, host);
        self.listing = None;
        self.forget_predecessors(claim);
        self.reguard(namespaces);
        Ok(claimed)
    }

    /// Notes that every operation that was in flight when a volume was claimed has come back (T8).
    pub(in crate::target) fn claim_drained(&mut self, volume: VolumeId, claim: u64) {
        if let Some(volume) = self.list.iter_mut().find(|v| v.id == volume)
            && volume.claims == claim
        {
            volume.drained = true;
        }
    }

    /// T20, T21: the members exist, and belong to no other volume that is owned or unrecovered.
    fn check_members(&self, claim: &Claim, namespaces: &Namespaces) -> Result<(), Refusal> {
        let new = &claim.members;
        let is_repeated =
            |i: usize| new[..i].iter().any(|m| m.nsid == new[i].nsid || m.member == new[i].member);
        if new.len() > MEMBERS_MAX || (1..new.len()).any(is_repeated) {
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

    /// Whether a volume that the target knows may be claimed by `host` with a new generation.
    fn check_known(
        &self,
        v: &Volume<R>,
        claim: &Claim,
        host: &Owner,
        now: u64,
    ) -> Result<(), Refusal> {
        let logged = !v.partitions.is_empty();
        if v.lost && !(claim.give_up && matches!(self.log, Log::Live { .. })) {
            probe::hit(Rare::LogRefused);
            return Err((wire::status::LOG_LOST.with_dnr(), 0));
        }
        if v.lease.is_kept(now) && !v.is_owned_by(host.assoc) && !claim.take_over {
            return Err((wire::status::OWNED, v.generation.into()));
        }
        if claim.generation <= v.generation {
            return Err((wire::status::STALE_GENERATION.with_dnr(), v.generation.into()));
        }
        if claim.create && logged && !claim.give_up {
            return Err((wire::status::VOLUME_EXISTS.with_dnr(), 0));
        }
        if claim.unlogged && (v.entries() > 0 || v.carried().next().is_some()) {
            return Err((wire::status::UNRECOVERED.with_dnr(), 0));
        }
        if !claim.create && !claim.unlogged && !logged {
            return Err((wire::status::NO_LOG.with_dnr(), 0));
        }
        Self::check_shape(v, claim)
    }

    /// Whether `host` is the owner on record that resumes after the loss of its association or a
    /// restart of the target (P7).
    fn check_resume(&self, v: &Volume<R>, claim: &Claim, host: &Owner) -> Result<(), Refusal> {
        if v.lost {
            probe::hit(Rare::LogRefused);
            return Err((wire::status::LOG_LOST.with_dnr(), 0));
        }
        // The owner's claim was durable in this log before the owner relied on it. So the log has
        // an older state than in an earlier incarnation of the target (T24).
        if claim.generation > v.generation && !v.partitions.is_empty() {
            probe::hit(Rare::LogBehind);
            return Err((wire::status::LOG_LOST.with_dnr(), v.generation.into()));
        }
        // An owner that was fenced meanwhile gets this answer first (T8).
        if claim.generation != v.generation {
            return Err((wire::status::STALE_GENERATION.with_dnr(), v.generation.into()));
        }
        if v.last_owner != host.hostid {
            return Err((wire::status::NOT_OWNER.with_dnr(), 0));
        }
        // Another host may have written since (T25).
        if v.lease.is_vacant() {
            return Err((wire::status::LEASE_OVER.with_dnr(), 0));
        }
        match (claim.unlogged, v.partitions.is_empty()) {
            (false, true) => Err((wire::status::NO_LOG.with_dnr(), 0)),
            (true, false) => Err((Status::INVALID_FIELD.with_dnr(), 0)),
            _ => Self::check_shape(v, claim),
        }
    }

    /// T20: a volume keeps its streams and its members.
    fn check_shape(v: &Volume<R>, claim: &Claim) -> Result<(), Refusal> {
        let same = v.members.len() == claim.members.len()
            && v.members.iter().all(|member| claim.members.contains(member));
        if v.streams != claim.streams || !same {
            return Err((Status::INVALID_FIELD.with_dnr(), 0));
        }
        Ok(())
    }

    /// Gives up the content of a volume's log. This is durable before any partition is begun anew,
    /// because a blank one must not be taken for "nothing to undo" (T26).
    fn give_up(&mut self, at: usize, claim: &Claim) -> Result<(), Refusal> {
        let is_unreadable =
            |log: &StreamLog<R>| log.scan().is_err_and(|e| !matches!(e, LogError::Region(_)));
        let begins_anew = |partition: &Partition<R>| match partition {
            Partition::Damaged => true,
            Partition::Home { log, .. } => claim.create || is_unreadable(log),
            Partition::Bound { .. } => false,
        };
        let anew: Vec<bool> = self.list[at].partitions.iter().map(begins_anew).collect();
        self.record_given_up(at, claim.generation)?;
        let crc = self.crc;
        let (Log::Live { region, split }, volume) = (&mut self.log, &mut self.list[at]) else {
            return Err((wire::status::LOG_LOST.with_dnr(), 0));
        };
        let failed = || (wire::status::LOG_FAILED, 0);
        // If a store below fails, the volume stays marked as lost.
        volume.lost = true;
        let streams = (0..).map(StreamId).zip(&mut volume.partitions).zip(anew);
        for ((stream, partition), _) in streams.filter(|(_, anew)| *anew) {
            let record = region.volume(claim.volume);
            let Some(range) = record.and_then(|record| record.partition(stream)) else { continue };
            // The old log is dropped first: `split` fails while an earlier owner still has these
            // bytes.
            *partition = Partition::Damaged;
            let id = PartitionId { volume: claim.volume, stream };
            let part = split(range).map_err(|_| failed())?;
            let log = StreamLog::format(part, id, 0, crc).map_err(|_| failed())?;
            *partition = Partition::Home { log, entries: 0 };
        }
        volume.lost = false;
        Ok(())
    }

    /// Records durably that the log is given up. Nothing is recorded for a volume that is not in
    /// the log's directory.
    fn record_given_up(&mut self, at: usize, generation: u32) -> Result<(), Refusal> {
        let volume = &mut self.list[at];
        if let Log::Live { region, .. } = &mut self.log
            && region.volume(volume.id).is_some()
        {
            probe::hit(Rare::LogGivenUp);
            let recorded = region.give_up(volume.id, generation);
            recorded.map_err(|_| (wire::status::LOG_FAILED, 0))?;
            volume.given_up = generation;
        }
        Ok(())
    }

    /// Makes the partitions of a volume in the log. Returns them, and the number of slots of each.
    fn add_partitions(&mut self, claim: &Claim) -> Result<(Vec<Partition<R>>, u32), Refusal> {
        let (region, split) = match &mut self.log {
            Log::None => return Err((wire::status::NO_LOG.with_dnr(), 0)),
            Log::Lost(_) => return Err((wire::status::LOG_LOST.with_dnr(), 0)),
            Log::Live { region, split } => (region, split),
        };
        let slots = match claim.slots {
            0 => chosen_slots(region.header(), &self.former, claim)?,
            slots => slots,
        };
        // Each slot takes memory as long as the log is served, and a peer gives the number (T28).
        if slots > most_slots(region.header(), claim.streams) {
            return Err(too_many(region.header(), claim.streams));
        }
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
            partitions.push(Partition::Home { log, entries: 0 });
            Ok(())
        });
        match added {
            Ok(_) => Ok((partitions, slots)),
            Err(AddError::AlreadyThere { .. }) => Err((wire::status::VOLUME_EXISTS.with_dnr(), 0)),
            Err(AddError::TooSmall { need, have }) => Err(too_small(need, have)),
            Err(AddError::DirectoryFull) => {
                Err((wire::status::LOG_DIRECTORY_FULL.with_dnr(), VOLUMES_MAX as u64))
            }
            Err(AddError::Shape { .. }) => Err((Status::INVALID_FIELD.with_dnr(), 0)),
            Err(AddError::Region(_)) => Err((wire::status::LOG_FAILED, 0)),
        }
    }
}

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
use super::refusal::Refusal;
use super::volume::{
    Claimed, Partition, TargetLog, Volume, chosen_slots, log_too_small, most_slots, too_many_slots,
};
use crate::target::limits::LEASE_MS_MAX;
use crate::target::namespace::Namespaces;
use crate::wire::{self, Claim};

impl<R: Region> Volumes<R> {
    /// Makes `host` the owner of a volume. The new generation is durable before this returns (T8).
    ///
    /// No stream of it may be bound, listed or settled before [`claim_drained`](Self::claim_drained).
    /// The caller calls it when the operations that are in flight now have come back.
    pub(in crate::target) fn claim(
        &mut self,
        claim: &Claim,
        host: Owner,
        namespaces: &Namespaces,
        now: u64,
    ) -> Result<Claimed, Refusal> {
        let has_claimed_drive = |v: &Volume<R>| {
            v.id != claim.volume && claim.members.iter().any(|member| v.has_member(member.nsid))
        };
        self.free_expired(has_claimed_drive, namespaces, now);
        self.check_members(claim, namespaces)?;
        if claim.generation == 0 {
            return Err(Refusal::do_not_retry(wire::status::STALE_GENERATION));
        }
        // The owner relies on the lease that it requests. So a lease that is too long is refused
        // and not shortened: a shorter one would end while the owner still waits (T25).
        if claim.lease_ms > LEASE_MS_MAX && !probe::planted(Plant::T28AnyLease) {
            return Err(Refusal::do_not_retry(wire::status::LEASE_TOO_LONG)
                .with_result(LEASE_MS_MAX.into()));
        }
        // An owner that resumes creates and gives up nothing. It fences only its own earlier connections.
        if claim.resume && (claim.create || claim.take_over || claim.give_up) {
            return Err(Refusal::do_not_retry(Status::INVALID_FIELD));
        }
        let known = self.list.iter().position(|v| v.id == claim.volume);
        if let Some(at) = known {
            self.list[at].check_fence_limit()?;
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
                return Err(match self.target_log {
                    TargetLog::None => Refusal::do_not_retry(wire::status::NO_LOG),
                    TargetLog::Lost(_) => Refusal::do_not_retry(wire::status::LOG_LOST),
                    TargetLog::Live { .. } => Refusal::do_not_retry(wire::status::UNKNOWN_VOLUME),
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
            return Err(Refusal::do_not_retry(wire::status::STALE_GENERATION)
                .with_result(volume.generation.into()));
        }
        if let TargetLog::Live { region, .. } = &mut self.target_log
            && !volume.partitions.is_empty()
        {
            let recorded = if claim.resume {
                region.renew(claim.volume, claim.lease_ms)
            } else {
                let Claim { generation, lease_ms, .. } = *claim;
                region.set_generation(claim.volume, generation, host.hostid, lease_ms)
            };
            recorded.map_err(|_| Refusal::retry_later(wire::status::LOG_FAILED))?;
        }
        let claimed = volume.set_owner(claim, host);
        self.listing = None;
        self.forget_predecessors(claim);
        self.update_guards(namespaces);
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

    /// Checks that the members exist, and belong to no other volume that is owned or not recovered
    /// (T20, T21).
    fn check_members(&self, claim: &Claim, namespaces: &Namespaces) -> Result<(), Refusal> {
        let new = &claim.members;
        let is_repeated =
            |i: usize| new[..i].iter().any(|m| m.nsid == new[i].nsid || m.member == new[i].member);
        if new.len() > MEMBERS_MAX || (1..new.len()).any(is_repeated) {
            return Err(Refusal::do_not_retry(Status::INVALID_FIELD));
        }
        if new.iter().any(|m| namespaces.find(m.nsid).is_none()) {
            return Err(Refusal::do_not_retry(Status::INVALID_NAMESPACE));
        }
        let are_guarded = self.list.iter().any(|v| {
            v.id != claim.volume && v.is_guarded() && new.iter().any(|m| v.has_member(m.nsid))
        });
        if are_guarded { Err(Refusal::do_not_retry(wire::status::GUARDED)) } else { Ok(()) }
    }

    /// Checks whether `host` may claim a volume that the target knows, with a new generation.
    fn check_known(
        &self,
        v: &Volume<R>,
        claim: &Claim,
        host: &Owner,
        now: u64,
    ) -> Result<(), Refusal> {
        let logged = !v.partitions.is_empty();
        if v.lost && !(claim.give_up && matches!(self.target_log, TargetLog::Live { .. })) {
            probe::hit(Rare::LogRefused);
            return Err(Refusal::do_not_retry(wire::status::LOG_LOST));
        }
        if v.lease.is_kept(now) && !v.is_owned_by(host.association) && !claim.take_over {
            return Err(Refusal::retry_later(wire::status::OWNED).with_result(v.generation.into()));
        }
        if claim.generation <= v.generation {
            return Err(Refusal::do_not_retry(wire::status::STALE_GENERATION)
                .with_result(v.generation.into()));
        }
        if claim.create && logged && !claim.give_up {
            return Err(Refusal::do_not_retry(wire::status::VOLUME_EXISTS));
        }
        if claim.unlogged && (v.entries() > 0 || v.carried_streams().next().is_some()) {
            return Err(Refusal::do_not_retry(wire::status::UNRECOVERED));
        }
        if !claim.create && !claim.unlogged && !logged {
            return Err(Refusal::do_not_retry(wire::status::NO_LOG));
        }
        Self::check_shape(v, claim)
    }

    /// Checks whether `host` is the recorded owner. An owner resumes after the loss of its
    /// association, or after a restart of the target (P7).
    fn check_resume(&self, v: &Volume<R>, claim: &Claim, host: &Owner) -> Result<(), Refusal> {
        if v.lost {
            probe::hit(Rare::LogRefused);
            return Err(Refusal::do_not_retry(wire::status::LOG_LOST));
        }
        // The generation of a claim is durable in the log before the claim is answered. This log
        // has a lower generation, so its content is older than in an earlier incarnation of the
        // target (T24).
        if claim.generation > v.generation && !v.partitions.is_empty() {
            probe::hit(Rare::LogBehind);
            return Err(
                Refusal::do_not_retry(wire::status::LOG_LOST).with_result(v.generation.into())
            );
        }
        // This check comes before the next one, so that a fenced owner receives the reason (T8).
        if claim.generation != v.generation {
            return Err(Refusal::do_not_retry(wire::status::STALE_GENERATION)
                .with_result(v.generation.into()));
        }
        if v.last_owner != host.hostid {
            return Err(Refusal::do_not_retry(wire::status::NOT_OWNER));
        }
        // The lease is over, and the volume was freed. Another host may have written since (T25).
        if v.lease.is_vacant() {
            return Err(Refusal::do_not_retry(wire::status::LEASE_OVER));
        }
        match (claim.unlogged, v.partitions.is_empty()) {
            (false, true) => Err(Refusal::do_not_retry(wire::status::NO_LOG)),
            (true, false) => Err(Refusal::do_not_retry(Status::INVALID_FIELD)),
            _ => Self::check_shape(v, claim),
        }
    }

    /// Checks that the claim names the volume's own streams and members (T20).
    fn check_shape(v: &Volume<R>, claim: &Claim) -> Result<(), Refusal> {
        let same = v.members.len() == claim.members.len()
            && v.members.iter().all(|member| claim.members.contains(member));
        if v.streams != claim.streams || !same {
            return Err(Refusal::do_not_retry(Status::INVALID_FIELD));
        }
        Ok(())
    }

    /// Gives up the content of a volume's log. The record of this is durable before any partition is
    /// made anew. Without the record, recovery would take an empty partition for "nothing to undo"
    /// (T26).
    fn give_up(&mut self, at: usize, claim: &Claim) -> Result<(), Refusal> {
        let is_unreadable =
            |log: &StreamLog<R>| log.scan().is_err_and(|e| !matches!(e, LogError::Region(_)));
        let is_made_anew = |partition: &Partition<R>| match partition {
            Partition::Damaged => true,
            Partition::AtRest { log, .. } => claim.create || is_unreadable(log),
            Partition::Bound { .. } => false,
        };
        let anew: Vec<bool> = self.list[at].partitions.iter().map(is_made_anew).collect();
        self.record_given_up(at, claim.generation)?;
        let crc = self.crc;
        let (TargetLog::Live { region, split }, volume) =
            (&mut self.target_log, &mut self.list[at])
        else {
            return Err(Refusal::do_not_retry(wire::status::LOG_LOST));
        };
        let failed = || Refusal::retry_later(wire::status::LOG_FAILED);
        // If a store below fails, the volume stays marked as lost.
        volume.lost = true;
        let streams = (0..).map(StreamId).zip(&mut volume.partitions).zip(anew);
        for ((stream, partition), _) in streams.filter(|(_, anew)| *anew) {
            let record = region.volume(claim.volume);
            let Some(range) = record.and_then(|record| record.partition(stream)) else { continue };
            // The old log is dropped first: `split` fails while its bytes are still in use.
            *partition = Partition::Damaged;
            let id = PartitionId { volume: claim.volume, stream };
            let part = split(range).map_err(|_| failed())?;
            let log = StreamLog::format(part, id, 0, crc).map_err(|_| failed())?;
            *partition = Partition::AtRest { log, entries: 0 };
        }
        volume.lost = false;
        Ok(())
    }

    /// Records durably that the log is given up. Nothing is recorded for a volume that is not in
    /// the log's directory.
    fn record_given_up(&mut self, at: usize, generation: u32) -> Result<(), Refusal> {
        let volume = &mut self.list[at];
        if let TargetLog::Live { region, .. } = &mut self.target_log
            && region.volume(volume.id).is_some()
        {
            probe::hit(Rare::LogGivenUp);
            let recorded = region.give_up(volume.id, generation);
            recorded.map_err(|_| Refusal::retry_later(wire::status::LOG_FAILED))?;
            volume.given_up = generation;
        }
        Ok(())
    }

    /// Makes the partitions of a volume in the log. Returns them, and the number of slots of each.
    fn add_partitions(&mut self, claim: &Claim) -> Result<(Vec<Partition<R>>, u32), Refusal> {
        let (region, split) = match &mut self.target_log {
            TargetLog::None => return Err(Refusal::do_not_retry(wire::status::NO_LOG)),
            TargetLog::Lost(_) => return Err(Refusal::do_not_retry(wire::status::LOG_LOST)),
            TargetLog::Live { region, split } => (region, split),
        };
        let slots = match claim.slots {
            0 => chosen_slots(region.header(), &self.former, claim)?,
            slots => slots,
        };
        // Each slot takes memory of the target, and a host chooses the number. So it has a bound
        // (T28).
        if slots > most_slots(region.header(), claim.streams) {
            return Err(too_many_slots(region.header(), claim.streams));
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
            partitions.push(Partition::AtRest { log, entries: 0 });
            Ok(())
        });
        match added {
            Ok(_) => Ok((partitions, slots)),
            Err(AddError::AlreadyThere { .. }) => {
                Err(Refusal::do_not_retry(wire::status::VOLUME_EXISTS))
            }
            Err(AddError::TooSmall { need, have }) => Err(log_too_small(need, have)),
            Err(AddError::DirectoryFull) => {
                Err(Refusal::do_not_retry(wire::status::LOG_DIRECTORY_FULL)
                    .with_result(VOLUMES_MAX as u64))
            }
            Err(AddError::Shape { .. }) => Err(Refusal::do_not_retry(Status::INVALID_FIELD)),
            Err(AddError::Region(_)) => Err(Refusal::retry_later(wire::status::LOG_FAILED)),
        }
    }
}

//! Claims: a volume gets an owner, and its partitions of the log if it needs them (traps T8, T21).
//!
//! ```text
//! free expired leases → check the claim → make or give up the log → record the owner durably
//!     → the owner is set → (operations in flight come back) → on_claim_drained
//! ```

use alloc::string::ToString;
use alloc::vec::Vec;

use riopipe_nvme::command::Status;
use riopipe_order::attribute::{StreamId, VolumeId};
use riopipe_order::entry::PartitionId;
use riopipe_order::log_region::{AddError, MEMBERS_MAX, MemberNamespace, NewVolume, VOLUMES_MAX};
use riopipe_order::ordering_log::{FormatError, LogError, StreamLog};
use riopipe_order::probe::{self, Plant, Rare};
use riopipe_order::region::{Region, RegionError};

use super::Volumes;
use super::lease::Owner;
use super::refusal::Refusal;
use super::volume::{
    Claimed, Partition, TargetLog, Volume, choose_slots, log_too_small_refusal, slots_max,
    too_many_slots_refusal,
};
use crate::target::limits::LEASE_MS_MAX;
use crate::target::namespace::Namespaces;
use crate::wire::{self, Claim};

/// Checks the fields of a claim that need no knowledge of the volume.
fn check_fields(claim: &Claim) -> Result<(), Refusal> {
    if claim.generation == 0 {
        return Err(Refusal::do_not_retry(wire::status::STALE_GENERATION));
    }
    // The owner relies on the lease that it requests. So a lease that is too long is refused and
    // not shortened: a shorter one would end while the owner still waits for the target (trap T25).
    if claim.lease_ms > LEASE_MS_MAX && !probe::is_bug_planted(Plant::T28AnyLease) {
        return Err(
            Refusal::do_not_retry(wire::status::LEASE_TOO_LONG).with_result(LEASE_MS_MAX.into())
        );
    }
    // An owner that resumes continues with the log as it is, and replaces only its own earlier
    // association.
    if claim.resume && (claim.create || claim.take_over || claim.give_up) {
        return Err(Refusal::do_not_retry(Status::INVALID_FIELD));
    }
    Ok(())
}

/// The refusal of a claim for whose volume the directory of the log has no record. The result is the
/// number of volumes that it can have.
fn directory_full_refusal() -> Refusal {
    Refusal::do_not_retry(wire::status::LOG_DIRECTORY_FULL).with_result(VOLUMES_MAX as u64)
}

impl<R: Region> Volumes<R> {
    /// Makes `host` the owner of a volume. The new generation is durable before this function
    /// returns (trap T8).
    ///
    /// The caller must call [`on_claim_drained`](Self::on_claim_drained) when the operations that
    /// are in flight now have come back. Before that, no stream of the volume is bound, listed or
    /// settled.
    ///
    /// # Errors
    /// The claim is refused. The owner and the generation of the volume have not changed.
    pub(in crate::target) fn claim(
        &mut self,
        claim: &Claim,
        host: Owner,
        namespaces: &Namespaces,
        now: u64,
    ) -> Result<Claimed, Refusal> {
        let has_claimed_drive = |volume: &Volume<R>| {
            volume.id != claim.volume
                && claim.members.iter().any(|member| volume.has_member(member.nsid))
        };
        self.free_expired(has_claimed_drive, namespaces, now);
        self.check_members(claim, namespaces)?;
        check_fields(claim)?;
        let known = self.list.iter().position(|volume| volume.id == claim.volume);
        let at = match known {
            Some(at) => {
                self.list[at].check_fence_limit()?;
                self.prepare_known(at, claim, &host, now)?;
                at
            }
            None => self.add_unknown(claim)?,
        };
        if claim.give_up && self.list[at].given_up_generation != claim.generation {
            // The claim has begun a new log for the volume. The directory of that log must record
            // that the old log was given up.
            self.record_given_up(at, claim.generation)?;
        }
        self.record_owner(at, claim, &host)?;
        self.list[at].move_members(&claim.members);
        let claimed = self.list[at].set_owner(claim, host);
        self.listing = None;
        self.forget_predecessors(claim);
        self.update_guards(namespaces);
        Ok(claimed)
    }

    /// Checks the claim of a volume that the target knows. Then gives up the log of the volume, or
    /// makes one, if the claim demands that.
    fn prepare_known(
        &mut self,
        at: usize,
        claim: &Claim,
        host: &Owner,
        now: u64,
    ) -> Result<(), Refusal> {
        if claim.resume {
            return self.check_resume_of_known(&self.list[at], claim, host);
        }
        self.check_claim_of_known(&self.list[at], claim, host, now)?;
        let gets_first_log = claim.create && self.list[at].partitions.is_empty();
        if claim.give_up && !gets_first_log {
            return self.give_up(at, claim);
        }
        if claim.create {
            let (partitions, slots) = self.add_partitions(claim)?;
            let volume = &mut self.list[at];
            (volume.slots, volume.partitions) = (slots, partitions);
        }
        Ok(())
    }

    /// Adds a volume that the target does not know to the list, with a new log if the volume needs
    /// one. Returns its place in the list.
    fn add_unknown(&mut self, claim: &Claim) -> Result<usize, Refusal> {
        if !claim.create && !claim.unlogged {
            probe::count_rare(Rare::LogRefused);
            return Err(match self.target_log {
                TargetLog::None => Refusal::do_not_retry(wire::status::NO_LOG),
                TargetLog::Lost(_) => Refusal::do_not_retry(wire::status::LOG_LOST),
                TargetLog::Live { .. } => Refusal::do_not_retry(wire::status::UNKNOWN_VOLUME),
            });
        }
        if claim.resume {
            self.check_resume_of_unknown(claim)?;
        }
        let (partitions, slots) =
            if claim.unlogged { (Vec::new(), 0) } else { self.add_partitions(claim)? };
        self.list.push(Volume::new(claim, partitions, slots));
        Ok(self.list.len() - 1)
    }

    /// Records the generation, the owner and the lease of a granted claim durably in the log. A
    /// volume without partitions has no record in the log.
    fn record_owner(&mut self, at: usize, claim: &Claim, host: &Owner) -> Result<(), Refusal> {
        let volume = &self.list[at];
        if !claim.resume && claim.generation <= volume.generation {
            return Err(Refusal::do_not_retry(wire::status::STALE_GENERATION)
                .with_result(volume.generation.into()));
        }
        let TargetLog::Live { region, .. } = &mut self.target_log else { return Ok(()) };
        if volume.partitions.is_empty() {
            return Ok(());
        }
        let recorded = if claim.resume {
            region.renew(claim.volume, claim.lease_ms)
        } else {
            let Claim { generation, lease_ms, .. } = *claim;
            region.set_generation(claim.volume, generation, host.hostid, lease_ms)
        };
        recorded.map_err(|_| Refusal::retry_later(wire::status::LOG_FAILED))
    }

    /// Notes that every operation has come back that was in flight when the claim number
    /// `claim_number` of the volume was granted (trap T8).
    pub(in crate::target) fn on_claim_drained(&mut self, volume: VolumeId, claim_number: u64) {
        if let Some(volume) = self.find_mut(volume)
            && volume.claim_count == claim_number
        {
            volume.is_drained = true;
        }
    }

    /// Checks the members of a claim: each exists and has blocks of 4096 bytes, none is named twice, and none belongs to another
    /// volume that has an owner or is not recovered (traps T20, T21).
    fn check_members(&self, claim: &Claim, namespaces: &Namespaces) -> Result<(), Refusal> {
        let members = &claim.members;
        let is_repeated = |i: usize| {
            let MemberNamespace { member, nsid } = members[i];
            members[..i].iter().any(|other| other.nsid == nsid || other.member == member)
        };
        if members.len() > MEMBERS_MAX || (1..members.len()).any(is_repeated) {
            return Err(Refusal::do_not_retry(Status::INVALID_FIELD));
        }
        // The log counts blocks of 4096 bytes.
        let can_be_member = |member: &MemberNamespace| {
            let found = namespaces.find(member.nsid);
            found.is_some_and(|(_, namespace)| !namespace.config.lba_size.is_small())
        };
        if !members.iter().all(can_be_member) {
            return Err(Refusal::do_not_retry(Status::INVALID_NAMESPACE));
        }
        let are_guarded = self.list.iter().any(|other| {
            other.id != claim.volume
                && other.is_guarded()
                && members.iter().any(|member| other.has_member(member.nsid))
        });
        if are_guarded { Err(Refusal::do_not_retry(wire::status::GUARDED)) } else { Ok(()) }
    }

    /// Checks whether `host` may claim a volume that the target knows, with a new generation.
    fn check_claim_of_known(
        &self,
        volume: &Volume<R>,
        claim: &Claim,
        host: &Owner,
        now: u64,
    ) -> Result<(), Refusal> {
        let has_log = !volume.partitions.is_empty();
        let can_give_up = claim.give_up && matches!(self.target_log, TargetLog::Live { .. });
        if volume.is_log_lost && !can_give_up {
            probe::count_rare(Rare::LogRefused);
            return Err(Refusal::do_not_retry(wire::status::LOG_LOST));
        }
        let is_of_other_owner =
            volume.lease.is_reserved(now) && !volume.is_owned_by(host.association);
        if is_of_other_owner && !claim.take_over {
            return Err(
                Refusal::retry_later(wire::status::OWNED).with_result(volume.generation.into())
            );
        }
        if claim.generation <= volume.generation {
            return Err(Refusal::do_not_retry(wire::status::STALE_GENERATION)
                .with_result(volume.generation.into()));
        }
        if claim.create && has_log && !claim.give_up {
            return Err(Refusal::do_not_retry(wire::status::VOLUME_EXISTS));
        }
        let needs_its_log = volume.entry_count() > 0 || volume.carried_streams().next().is_some();
        if claim.unlogged && needs_its_log {
            return Err(Refusal::do_not_retry(wire::status::UNRECOVERED));
        }
        if !claim.create && !claim.unlogged && !has_log {
            return Err(Refusal::do_not_retry(wire::status::NO_LOG));
        }
        Self::check_shape(volume, claim)
    }

    /// Checks whether `host` may resume as the owner of a volume that the target knows: it must be
    /// the recorded owner. An owner resumes after the loss of its association, or after a restart
    /// of the target (promise P7).
    fn check_resume_of_known(
        &self,
        volume: &Volume<R>,
        claim: &Claim,
        host: &Owner,
    ) -> Result<(), Refusal> {
        if volume.is_log_lost {
            probe::count_rare(Rare::LogRefused);
            return Err(Refusal::do_not_retry(wire::status::LOG_LOST));
        }
        // The owner's generation was durable in the log before its claim succeeded. If this log has
        // a lower generation, its content is older than the content that the owner has used (trap
        // T24).
        if claim.generation > volume.generation && !volume.partitions.is_empty() {
            probe::count_rare(Rare::LogBehind);
            return Err(
                Refusal::do_not_retry(wire::status::LOG_LOST).with_result(volume.generation.into())
            );
        }
        // The generation is checked before the host, so that a fenced owner receives the status for
        // a fenced owner (trap T8).
        if claim.generation != volume.generation {
            return Err(Refusal::do_not_retry(wire::status::STALE_GENERATION)
                .with_result(volume.generation.into()));
        }
        if volume.last_owner_hostid != host.hostid {
            return Err(Refusal::do_not_retry(wire::status::NOT_OWNER));
        }
        // The lease is over, and the volume was freed. Another host may have written since (trap
        // T25).
        if volume.lease.is_vacant() {
            return Err(Refusal::do_not_retry(wire::status::LEASE_OVER));
        }
        let has_log = !volume.partitions.is_empty();
        if !claim.unlogged && !has_log {
            // The owner wrote to a log, and the log is gone.
            return Err(Refusal::do_not_retry(wire::status::NO_LOG));
        }
        if claim.unlogged && has_log {
            // The owner had no log before, so this claim is not the one that it made then.
            return Err(Refusal::do_not_retry(Status::INVALID_FIELD));
        }
        Self::check_shape(volume, claim)
    }

    /// Checks that the claim has the volume's number of streams, and its members (trap T20).
    fn check_shape(volume: &Volume<R>, claim: &Claim) -> Result<(), Refusal> {
        if volume.streams != claim.streams || !volume.may_have_members(&claim.members) {
            return Err(Refusal::do_not_retry(Status::INVALID_FIELD));
        }
        Ok(())
    }

    /// Gives up the content of a volume's log: makes the partitions anew that can't be read, or all
    /// of them if the claim creates the volume.
    ///
    /// The log records durably that it was given up before any partition is made anew. Without this
    /// record, recovery would take an empty partition for "nothing to undo" (trap T26).
    fn give_up(&mut self, at: usize, claim: &Claim) -> Result<(), Refusal> {
        // A failure of the log store shows nothing about the content of the log.
        let is_unreadable = |log: &StreamLog<R>| match log.scan() {
            Ok(_) | Err(LogError::Region(_)) => false,
            Err(_) => true,
        };
        let must_be_made_anew = |partition: &Partition<R>| match partition {
            Partition::Damaged => true,
            Partition::AtRest { log, .. } => claim.create || is_unreadable(log),
            Partition::Bound { .. } => false,
        };
        let are_to_be_made: Vec<bool> =
            self.list[at].partitions.iter().map(must_be_made_anew).collect();
        self.record_given_up(at, claim.generation)?;
        let crc = self.crc;
        let (TargetLog::Live { region, split }, volume) =
            (&mut self.target_log, &mut self.list[at])
        else {
            return Err(Refusal::do_not_retry(wire::status::LOG_LOST));
        };
        let log_failed = || Refusal::retry_later(wire::status::LOG_FAILED);
        // If the log store fails below, the log of the volume stays marked as lost.
        volume.is_log_lost = true;
        let streams = (0..).map(StreamId).zip(&mut volume.partitions).zip(are_to_be_made);
        for ((stream, partition), is_to_be_made) in streams {
            if !is_to_be_made {
                continue;
            }
            let record = region.volume(claim.volume);
            let Some(range) = record.and_then(|record| record.partition(stream)) else { continue };
            // The old log is dropped first, because `split` fails while its bytes are in use.
            *partition = Partition::Damaged;
            let id = PartitionId { volume: claim.volume, stream };
            let part = split(range).map_err(|_| log_failed())?;
            let log = StreamLog::format(part, id, 0, crc).map_err(|_| log_failed())?;
            *partition = Partition::AtRest { log, entry_count: 0 };
        }
        volume.is_log_lost = false;
        Ok(())
    }

    /// Records durably in the log's directory that the log of a volume is given up. Does nothing if
    /// the volume is not in the directory.
    fn record_given_up(&mut self, at: usize, generation: u32) -> Result<(), Refusal> {
        let volume = &mut self.list[at];
        if let TargetLog::Live { region, .. } = &mut self.target_log
            && region.volume(volume.id).is_some()
        {
            probe::count_rare(Rare::LogGivenUp);
            let recorded = region.give_up(volume.id, generation);
            recorded.map_err(|_| Refusal::retry_later(wire::status::LOG_FAILED))?;
            volume.given_up_generation = generation;
        }
        Ok(())
    }

    /// Makes the partitions of a volume in the log. Returns the partitions, and the number of slots
    /// of each.
    fn add_partitions(&mut self, claim: &Claim) -> Result<(Vec<Partition<R>>, u32), Refusal> {
        let (region, split) = match &mut self.target_log {
            TargetLog::None => return Err(Refusal::do_not_retry(wire::status::NO_LOG)),
            TargetLog::Lost(_) => return Err(Refusal::do_not_retry(wire::status::LOG_LOST)),
            TargetLog::Live { region, split } => (region, split),
        };
        let volumes = &region.header().volumes;
        let is_new = volumes.iter().all(|volume| volume.id != claim.volume);
        // This is checked before the space: more space would not help.
        if is_new && volumes.len() >= VOLUMES_MAX {
            return Err(directory_full_refusal());
        }
        let slots = match claim.slots {
            0 => choose_slots(region.header(), &self.former, claim)?,
            slots => slots,
        };
        // Each slot takes memory of the target, so a host must not choose any number of slots
        // (trap T28).
        if slots > slots_max(region.header(), claim.streams) {
            return Err(too_many_slots_refusal(region.header(), claim.streams));
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
            partitions.push(Partition::AtRest { log, entry_count: 0 });
            Ok(())
        });
        match added {
            Ok(_) => Ok((partitions, slots)),
            Err(AddError::AlreadyThere { .. }) => {
                Err(Refusal::do_not_retry(wire::status::VOLUME_EXISTS))
            }
            Err(AddError::TooSmall { need, have }) => Err(log_too_small_refusal(need, have)),
            Err(AddError::DirectoryFull) => Err(directory_full_refusal()),
            Err(AddError::Shape { .. }) => Err(Refusal::do_not_retry(Status::INVALID_FIELD)),
            Err(AddError::Region(_)) => Err(Refusal::retry_later(wire::status::LOG_FAILED)),
        }
    }
}

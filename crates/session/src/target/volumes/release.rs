//! The end of the ownership of a volume. The owner releases the volume, or the owner is lost for
//! longer than its lease, or the target stops (traps T8, T25). Also sets the guards of the
//! namespaces whenever the ownership changes (trap T21).

use alloc::vec::Vec;
use core::ops::Range;

use riopipe_order::attribute::VolumeId;
use riopipe_order::log_region::{HEADER_BYTES, VolumeRecord, VolumeState};
use riopipe_order::probe::{self, Plant, Rare};
use riopipe_order::region::{Region, RegionError};

use super::Volumes;
use super::lease::Lease;
use super::refusal::Refusal;
use super::volume::{Partition, TargetLog, Volume};
use crate::target::namespace::Namespaces;
use crate::wire::{self, ReleaseRequest};

impl<R: Region> Volumes<R> {
    /// Checks whether the host with this association may release the volume. Only the owner may,
    /// with two exceptions:
    ///
    /// - A volume whose log is lost cannot be claimed and has no owner, so any host may make the
    ///   target forget it (trap T19).
    /// - With `without_owner`, any host may make the target forget a volume that has no owner. The
    ///   host could claim such a volume first, unless a member's namespace is not there any more.
    pub(in crate::target) fn may_release(
        &self,
        volume: VolumeId,
        association: u64,
        request: ReleaseRequest,
        now: u64,
    ) -> Result<(), Refusal> {
        let ReleaseRequest { forget, without_owner } = request;
        let volume =
            self.find(volume).ok_or(Refusal::do_not_retry(wire::status::UNKNOWN_VOLUME))?;
        let is_lost_without_owner = volume.is_log_lost && volume.lease.owner().is_none();
        let may_any_host =
            forget && (is_lost_without_owner || probe::is_bug_planted(Plant::T18AnyoneForgets));
        let is_own = volume.is_owned_by(association);
        if without_owner && !is_own && volume.lease.is_reserved(now) {
            return Err(Refusal::retry_later(wire::status::OWNED));
        }
        if !is_own && !may_any_host && !without_owner {
            return Err(Refusal::do_not_retry(wire::status::NOT_OWNER));
        }
        if !forget {
            return Ok(());
        }
        // A command to forget a volume raises a fence.
        volume.check_fence_limit()
    }

    /// Releases a volume after the owner's connections have returned its streams. With `forget`,
    /// drops the volume and its log. Returns whether the volume is closed, with nothing left to
    /// recover.
    ///
    /// If something is left to recover, or a connection of a fenced owner still carries a stream,
    /// only the lease ends. The volume is then freed later (trap T21). If the log fails, the owner
    /// keeps the volume.
    pub(in crate::target) fn release(
        &mut self,
        volume: VolumeId,
        forget: bool,
        namespaces: &Namespaces,
    ) -> Result<bool, Refusal> {
        let Some(at) = self.list.iter().position(|other| other.id == volume) else {
            return Err(Refusal::do_not_retry(wire::status::UNKNOWN_VOLUME));
        };
        // The logs may change below, so a list that was read in part must not be continued.
        self.listing = None;
        let closed = !forget && self.close(at)?;
        if forget {
            self.forget(at)?;
        } else if closed {
            self.list[at].lease = Lease::Vacant;
        } else {
            self.list[at].lease.end();
        }
        self.update_guards(namespaces);
        Ok(closed)
    }

    /// Drops a volume and its log. This is refused while a connection carries a stream of the
    /// volume, because that connection would continue to write. No other operation is in flight:
    /// the owner's claim has waited for the operations of all others, and the release for those of
    /// the owner.
    fn forget(&mut self, at: usize) -> Result<(), Refusal> {
        if self.list[at].carried_streams().next().is_some() {
            return Err(Refusal::retry_later(wire::status::STREAM_BUSY));
        }
        let id = self.list[at].id;
        if let TargetLog::Live { region, .. } = &mut self.target_log
            && region.volume(id).is_some()
        {
            region.remove_volume(id).map_err(|_| Refusal::retry_later(wire::status::LOG_FAILED))?;
        }
        if let TargetLog::Lost(header) = &mut self.target_log {
            header.volumes.retain(|record| record.id != id);
        }
        self.former.retain(|record| record.id != id);
        self.list.remove(at);
        Ok(())
    }

    /// Records a volume as closed if none of its entries needs recovery or an acknowledgement.
    /// Returns whether the volume is closed.
    fn close(&mut self, at: usize) -> Result<bool, Refusal> {
        let volume = &mut self.list[at];
        if volume.partitions.is_empty() {
            // Without a log there is nothing to record.
            return Ok(!volume.is_log_lost);
        }
        let mut is_clean = !volume.is_log_lost;
        for partition in &mut volume.partitions {
            match partition {
                Partition::AtRest { log, entry_count: 0 } => {
                    let released = log.released();
                    log.release_now(released)
                        .map_err(|_| Refusal::retry_later(wire::status::LOG_FAILED))?;
                }
                _ => is_clean = false,
            }
        }
        if let TargetLog::Live { region, .. } = &mut self.target_log {
            let recorded = if is_clean {
                region.set_state(volume.id, VolumeState::Closed)
            } else {
                // A lease of 0 ms is over for the next incarnation of the target, too.
                region.renew(volume.id, 0)
            };
            recorded.map_err(|_| Refusal::retry_later(wire::status::LOG_FAILED))?;
        }
        Ok(is_clean)
    }

    /// Shortens the lease to nothing, because the owner was lost while its command to release the
    /// volume was in flight. This owner does not come back, so the volume need not be reserved.
    pub(in crate::target) fn cancel_lease(&mut self, volume: VolumeId, association: u64) {
        if let Some(volume) = self.find_mut(volume)
            && volume.is_owned_by(association)
        {
            volume.lease_ms = 0;
        }
    }

    /// Notes that an association is lost. The leases of its volumes begin to run (trap T25).
    pub(in crate::target) fn on_association_lost(
        &mut self,
        association: u64,
        namespaces: &Namespaces,
        now: u64,
    ) {
        let mut has_changed = false;
        for volume in &mut self.list {
            has_changed |= volume.lease.on_association_lost(association, volume.lease_ms, now);
        }
        if has_changed {
            self.update_guards(namespaces);
        }
    }

    /// Notes that every operation of a lost association has come back.
    pub(in crate::target) fn on_association_drained(
        &mut self,
        association: u64,
        namespaces: &Namespaces,
    ) {
        let mut has_changed = false;
        for volume in &mut self.list {
            has_changed |= volume.lease.on_association_drained(association);
        }
        if has_changed {
            self.update_guards(namespaces);
        }
    }

    /// Notes that a claim of `volume`, or a command to forget it, has raised this fence, which
    /// waits for operations in flight.
    pub(in crate::target) fn on_fence_raised(
        &mut self,
        volume: VolumeId,
        fence: u64,
        namespaces: &Namespaces,
    ) {
        if let Some(volume) = self.find_mut(volume)
            && !probe::is_bug_planted(Plant::T21EarlierOwnerForgotten)
        {
            volume.fence_ids.push(fence);
            self.update_guards(namespaces);
        }
    }

    /// Notes that a fence has ended: all operations for which it waited have come back.
    pub(in crate::target) fn on_fence_ended(&mut self, fence: u64, namespaces: &Namespaces) {
        let mut has_changed = false;
        for volume in &mut self.list {
            let fence_count = volume.fence_ids.len();
            volume.fence_ids.retain(|other| *other != fence);
            has_changed |= volume.fence_ids.len() < fence_count;
        }
        if has_changed {
            self.update_guards(namespaces);
        }
    }

    /// Frees those volumes for which `is_concerned` is true, whose lease has run out, and of which
    /// nothing needs recovery. They are recorded as closed, and plain hosts may write their drives.
    pub(super) fn free_expired(
        &mut self,
        is_concerned: impl Fn(&Volume<R>) -> bool,
        namespaces: &Namespaces,
        now: u64,
    ) {
        let mut has_changed = false;
        for at in 0..self.list.len() {
            let volume = &self.list[at];
            if !is_concerned(volume) || volume.freeable_from().is_none_or(|from| now < from) {
                continue;
            }
            // If the log fails here, the volume stays owned and guarded.
            if self.close(at) == Ok(true) {
                probe::count_rare(Rare::LeaseOver);
                self.list[at].lease = Lease::Vacant;
                has_changed = true;
            }
        }
        if has_changed {
            self.listing = None;
            self.update_guards(namespaces);
        }
    }

    /// Frees the volume of a guarded namespace if its lease has run out, because a host is about to
    /// write the namespace.
    pub(in crate::target) fn free_namespace(
        &mut self,
        nsid: u32,
        namespaces: &Namespaces,
        now: u64,
    ) {
        self.free_expired(|volume| volume.has_member(nsid), namespaces, now);
    }

    /// Frees every volume whose lease has run out, at a clean stop of the target.
    pub(in crate::target) fn free_all(&mut self, namespaces: &Namespaces, now: u64) {
        self.free_expired(|_| true, namespaces, now);
    }

    /// Sets the guards after namespaces have come.
    pub(in crate::target) fn guard_again(&self, namespaces: &Namespaces) {
        self.update_guards(namespaces);
    }

    /// Sets the guard of every namespace, according to the state of its volumes (trap T21).
    pub(super) fn update_guards(&self, namespaces: &Namespaces) {
        for namespace in namespaces.iter() {
            let nsid = namespace.config.nsid;
            let guarding =
                self.list.iter().find(|volume| volume.has_member(nsid) && volume.is_guarded());
            match guarding {
                Some(volume)
                    if probe::is_bug_planted(Plant::T25GuardWithConnection)
                        && volume.freeable_from().is_some() =>
                {
                    namespace.state.open_to_all();
                }
                None => namespace.state.open_to_all(),
                Some(volume) => {
                    let owner = volume.lease.owner().map(|owner| owner.association);
                    namespace.state.guard_for(owner, volume.freeable_from());
                }
            }
        }
    }

    /// The byte ranges of the log region whose content counts: the header, and the partitions of
    /// all volumes, also of those that can't be claimed. Empty if no valid log is in use.
    #[must_use]
    pub fn log_used(&self) -> Vec<Range<usize>> {
        match &self.target_log {
            TargetLog::None | TargetLog::Lost(_) => Vec::new(),
            TargetLog::Live { region, .. } => {
                let volumes = region.header().volumes.iter().map(VolumeRecord::extent);
                core::iter::once(0..HEADER_BYTES).chain(volumes).collect()
            }
        }
    }

    /// Ends the service by a clean stop: `write_back` must write back the part of the log whose
    /// content counts ([`log_used`](Self::log_used)). Then the header gets the stamp of a clean
    /// stop (trap T24). No connection may be left, and the volumes must not be used afterwards.
    ///
    /// # Errors
    /// The log could not be written back: it is valid in this boot only.
    pub fn end_service(
        &mut self,
        write_back: impl FnOnce() -> Result<(), RegionError>,
    ) -> Result<(), RegionError> {
        match &mut self.target_log {
            TargetLog::None | TargetLog::Lost(_) => Ok(()),
            TargetLog::Live { region, .. } => region.close(write_back),
        }
    }
}

//! The end of ownership of a volume: its owner releases it or is lost for longer than its lease, or
//! the target stops (T8, T25).

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
use crate::wire;

impl<R: Region> Volumes<R> {
    /// Checks whether `association` may release the volume: only its owner may. A volume whose log is lost
    /// cannot be claimed, so it has no owner. Any host may let the target forget it (T19).
    pub(in crate::target) fn may_release(
        &self,
        volume: VolumeId,
        association: u64,
        forget: bool,
    ) -> Result<(), Refusal> {
        let v = self.find(volume).ok_or(Refusal::do_not_retry(wire::status::UNKNOWN_VOLUME))?;
        let allows_any_host = forget && probe::planted(Plant::T18AnyoneForgets);
        if !(v.is_owned_by(association)
            || forget && v.lost && v.lease.owner().is_none()
            || allows_any_host)
        {
            return Err(Refusal::do_not_retry(wire::status::NOT_OWNER));
        }
        // A command to forget a volume raises a fence.
        if forget { v.check_fence_limit() } else { Ok(()) }
    }

    /// Releases a volume. Its owner's streams have been returned before. With `forget`, drops the
    /// volume and its log.
    ///
    /// Something may be left to recover, or a connection of a fenced owner may still carry a stream.
    /// Then only the lease ends, and the volume is freed later (T21). If the log fails, the owner
    /// keeps the volume. Returns whether the volume is closed, with nothing left to recover.
    pub(in crate::target) fn release(
        &mut self,
        volume: VolumeId,
        forget: bool,
        namespaces: &Namespaces,
    ) -> Result<bool, Refusal> {
        let Some(at) = self.list.iter().position(|v| v.id == volume) else {
            return Err(Refusal::do_not_retry(wire::status::UNKNOWN_VOLUME));
        };
        // The logs may change below, so a list that was read in part is not continued.
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

    /// Drops a volume and its log. This is refused while a connection carries a stream of it,
    /// because that connection would go on to write. Nothing else is in flight: the owner's claim
    /// has waited for the operations of all others, and its release for its own.
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
    /// Returns whether that is so.
    fn close(&mut self, at: usize) -> Result<bool, Refusal> {
        let volume = &mut self.list[at];
        if volume.partitions.is_empty() {
            // Only its generation outlives the owner.
            return Ok(!volume.lost);
        }
        let failed = |_| Refusal::retry_later(wire::status::LOG_FAILED);
        let mut clean = !volume.lost;
        for partition in &mut volume.partitions {
            match partition {
                Partition::AtRest { log, entries: 0 } => {
                    let released = log.released();
                    log.release_now(released).map_err(failed)?;
                }
                _ => clean = false,
            }
        }
        if let TargetLog::Live { region, .. } = &mut self.target_log {
            let recorded = match clean {
                true => region.set_state(volume.id, VolumeState::Closed),
                // Its lease is over, also for the next incarnation of the target.
                false => region.renew(volume.id, 0),
            };
            recorded.map_err(|_| Refusal::retry_later(wire::status::LOG_FAILED))?;
        }
        Ok(clean)
    }

    /// Ends the lease of an owner that was lost while its command to release the volume was in
    /// flight: the owner does not come back, so the volume need not be kept for it.
    pub(in crate::target) fn cancel_lease(&mut self, volume: VolumeId, association: u64) {
        if let Some(volume) =
            self.list.iter_mut().find(|v| v.id == volume && v.is_owned_by(association))
        {
            volume.lease_ms = 0;
        }
    }

    /// Notes that an association is lost: the leases of its volumes begin to run (T25).
    pub(in crate::target) fn association_lost(
        &mut self,
        association: u64,
        namespaces: &Namespaces,
        now: u64,
    ) {
        let mut has_changed = false;
        for volume in &mut self.list {
            has_changed |= volume.lease.association_lost(association, volume.lease_ms, now);
        }
        if has_changed {
            self.update_guards(namespaces);
        }
    }

    /// Notes that every operation of a lost association has come back.
    pub(in crate::target) fn association_drained(
        &mut self,
        association: u64,
        namespaces: &Namespaces,
    ) {
        let mut has_changed = false;
        for volume in &mut self.list {
            has_changed |= volume.lease.association_drained(association);
        }
        if has_changed {
            self.update_guards(namespaces);
        }
    }

    /// Notes that a claim of `volume`, or a command to forget it, has raised this fence. The fence
    /// waits for operations in flight.
    pub(in crate::target) fn fence_raised(
        &mut self,
        volume: VolumeId,
        fence: u64,
        namespaces: &Namespaces,
    ) {
        if let Some(volume) = self.list.iter_mut().find(|v| v.id == volume)
            && !probe::planted(Plant::T21EarlierOwnerForgotten)
        {
            volume.fences.push(fence);
            self.update_guards(namespaces);
        }
    }

    /// Notes that a fence has ended: all operations for which it waited have come back.
    pub(in crate::target) fn fence_ended(&mut self, fence: u64, namespaces: &Namespaces) {
        let mut has_changed = false;
        for volume in &mut self.list {
            let before = volume.fences.len();
            volume.fences.retain(|other| *other != fence);
            has_changed |= volume.fences.len() < before;
        }
        if has_changed {
            self.update_guards(namespaces);
        }
    }

    /// Frees the volumes that a host wants to use, if their lease has run out and nothing of them
    /// needs recovery. They are recorded as closed, and plain hosts may write.
    pub(super) fn free_expired(
        &mut self,
        is_wanted: impl Fn(&Volume<R>) -> bool,
        namespaces: &Namespaces,
        now: u64,
    ) {
        let mut has_changed = false;
        for at in 0..self.list.len() {
            let volume = &self.list[at];
            if !is_wanted(volume) || volume.freeable_from().is_none_or(|from| now < from) {
                continue;
            }
            // If a log fails here, its volume stays marked as owned, and guarded.
            if self.close(at) == Ok(true) {
                probe::hit(Rare::LeaseOver);
                self.list[at].lease = Lease::Vacant;
                has_changed = true;
            }
        }
        if has_changed {
            self.listing = None;
            self.update_guards(namespaces);
        }
    }

    /// Frees the volume of a guarded namespace for a host that wants to write it, if its lease has
    /// run out.
    pub(in crate::target) fn free_namespace(
        &mut self,
        nsid: u32,
        namespaces: &Namespaces,
        now: u64,
    ) {
        self.free_expired(|volume| volume.has_member(nsid), namespaces, now);
    }

    /// Frees every volume that may be freed, at a clean stop of the target.
    pub(in crate::target) fn free_all(&mut self, namespaces: &Namespaces, now: u64) {
        self.free_expired(|_| true, namespaces, now);
    }

    /// Sets the guard of every namespace, by the state of the volumes that it belongs to (T21).
    pub(super) fn update_guards(&self, namespaces: &Namespaces) {
        for namespace in namespaces.iter() {
            let nsid = namespace.config.nsid;
            let mut guarded = self.list.iter().filter(|v| v.has_member(nsid) && v.is_guarded());
            match guarded.next() {
                Some(volume)
                    if probe::planted(Plant::T25GuardWithConnection)
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

    /// The bytes of the log whose content counts: its header, and the partitions of its volumes,
    /// also of those that are refused. Empty if no log is in service.
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

    /// Ends service by a clean stop: `write_back` writes the log back, as far as its content counts
    /// ([`log_used`](Self::log_used)), and then its header gets the stamp (T24). No connection is
    /// left, and the volumes are not used any more.
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

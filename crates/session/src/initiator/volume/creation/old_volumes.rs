//! The old volumes of a creation: their state in the logs, the choice of those to be dropped, and
//! the commands that drop them.
//!
//! An old volume is dropped in two steps: it is claimed, and then its target forgets it.

use alloc::string::String;
use alloc::vec::Vec;

use riopipe_nvme::command::Cqe;
use riopipe_order::attribute::{Member, VolumeId};
use riopipe_order::entry::ENTRY_BYTES;
use riopipe_order::log_region::{MemberNamespace, PARTITION_ALIGN};
use riopipe_order::ordering_log::partition_bytes;

use super::super::calls::Associations;
use super::super::error::VolumeCreateError;
use super::super::members::MemberPlace;
use super::{ASKING_OLD, Drives, Question, VolumeCreation, failed_call};
use crate::claim;
use crate::initiator::queue_pair::Data;
use crate::label::Label;
use crate::wire::{Claim, VolumeStatus, claim_command, release_command, status};

/// The old volumes that are dropped now.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Dropping {
    /// One old volume on `target`, whose log has refused the partitions. Then the partitions are
    /// requested there again, because it may be enough to drop one old volume. If `only_guarding`,
    /// only an old volume that keeps its drives guarded is dropped.
    First { target: usize, only_guarding: bool },
    /// All, on all targets: the new volume is made.
    All,
}

/// An old volume, on one target.
#[derive(Debug)]
pub(super) struct OldVolume {
    target: usize,
    volume: VolumeId,
    /// Its drives on the target.
    members: Vec<MemberNamespace>,
    /// The largest generation of the volume that is known.
    generation: u32,
    streams: u16,
    /// The log slots per stream on the target.
    slots: u32,
    /// The state of the volume in the target's log.
    state: OldState,
}

impl OldVolume {
    /// Whether the volume is one of those to be dropped.
    fn is_due(&self, dropping: Dropping) -> bool {
        let OldState::Partitions { guards, is_behind } = self.state else { return false };
        match dropping {
            Dropping::First { target, only_guarding } => {
                self.target == target && (guards || !only_guarding) && !is_behind
            }
            Dropping::All => true,
        }
    }

    /// The log slots of all its streams.
    fn total_slots(&self) -> u64 {
        u64::from(self.streams) * u64::from(self.slots)
    }

    /// The bytes of its partitions. The target has sent the numbers of streams and slots, so they
    /// may have any value, but the product of the two does not overflow (trap T18).
    fn partition_bytes(&self) -> u64 {
        let entries = u64::from(self.slots) * ENTRY_BYTES as u64;
        let partition = partition_bytes(0) as u64 + entries;
        u64::from(self.streams) * partition.next_multiple_of(PARTITION_ALIGN as u64)
    }
}

/// The state of an old volume in the log of a target.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum OldState {
    /// Nothing that can be dropped: the log has no partitions of the volume, their state is not
    /// known, or the target has refused to drop them.
    Nothing,
    /// Partitions that cannot be used. They are forgotten without a claim.
    Lost,
    /// Partitions.
    Partitions {
        /// Whether something in the partitions waits for recovery. The target then refuses other
        /// writes to the drives (trap T21).
        guards: bool,
        /// Whether the log is older than the labels of the volume. Such a volume is dropped only
        /// after the new labels were written. The claim that comes first would make the log as new
        /// as the labels, and a crash after it would leave a volume that opens with that log (trap
        /// T24).
        is_behind: bool,
    },
    /// Partitions of a volume that has been claimed.
    Claimed,
}

impl VolumeCreation {
    /// Checks that no drive has a label, unless old volumes may be given up.
    pub(super) fn check_labels_may_go(&self) -> Result<(), VolumeCreateError> {
        self.check_unreadable_labels()?;
        let mut labels = self.drives.iter().flat_map(Drives::labels);
        match labels.next() {
            Some((member, label)) if !self.config.force => {
                Err(VolumeCreateError::InUse { member, volume: label.name.clone() })
            }
            _ => Ok(()),
        }
    }

    /// Lists the old volumes, and asks their targets whether they have owners.
    pub(super) fn begin_old_statuses(
        &mut self,
        now: u64,
        associations: &mut impl Associations,
    ) -> Result<(), VolumeCreateError> {
        for member in 0..self.config.places.len() {
            let Some(label) = self.present_label(member).cloned() else { continue };
            if self.given_up.contains(&label.volume) {
                continue;
            }
            self.given_up.push(label.volume);
            for target in self.targets_with_extension() {
                self.add_old_volume(&label, target, now, associations)?;
            }
        }
        Ok(())
    }

    /// Checks that no drive has a label that can't be read. Such a drive may belong to a volume, for
    /// example of a later version of this program. So it is given up only if the caller accepts that.
    pub(super) fn check_unreadable_labels(&self) -> Result<(), VolumeCreateError> {
        let unreadable = self.drives.as_ref().and_then(Drives::first_unreadable);
        match unreadable {
            Some((member, error)) if !self.config.force => {
                Err(VolumeCreateError::UnreadableLabel { member, error })
            }
            _ => Ok(()),
        }
    }

    /// If the old volume with this label has drives on a target, adds it to the list, and asks the
    /// target for its status.
    fn add_old_volume(
        &mut self,
        label: &Label,
        target: usize,
        now: u64,
        associations: &mut impl Associations,
    ) -> Result<(), VolumeCreateError> {
        let Some(drives) = &self.drives else { return Ok(()) };
        let members = self.old_members(label, target);
        if members.is_empty() {
            return Ok(());
        }
        let volume = label.volume;
        let generations = drives.labels_of(volume).map(|(_, label)| label.generation);
        let generation = generations.max().unwrap_or(0);
        self.old_volumes.push(OldVolume {
            target,
            volume,
            members,
            generation,
            streams: label.streams,
            slots: 0,
            state: OldState::Nothing,
        });
        let purpose = Question::OldStatus(self.old_volumes.len() - 1);
        self.targets
            .ask_status(associations, target, volume, purpose, now)
            .map_err(|source| failed_call(target, ASKING_OLD, source))
    }

    /// The drives of an old volume on a target, in the form that the claim of the old volume needs.
    fn old_members(&self, old: &Label, target: usize) -> Vec<MemberNamespace> {
        let Some(drives) = &self.drives else { return Vec::new() };
        let mut members = Vec::new();
        for (at, id) in old.members.iter().enumerate() {
            let place = self
                .place_by_label(drives, old, at)
                .or_else(|| self.place_by_nguid(drives, target, id.nguid));
            if let Some(place) = place
                && place.target == target
            {
                members.push(MemberNamespace { member: Member(at as u8), nsid: place.nsid });
            }
        }
        members
    }

    /// The place of the drive whose label has the number `at` in the old volume.
    fn place_by_label(&self, drives: &Drives, old: &Label, at: usize) -> Option<MemberPlace> {
        let labels = drives.labels_of(old.volume);
        let (member, _) = labels.filter(|(_, label)| usize::from(label.index) == at).last()?;
        Some(self.config.places[member])
    }

    /// The place of the drive with this NGUID: first among the drives of the new volume, then among
    /// all drives of `target`. A crash during an earlier creation may have left a drive of an old
    /// volume without its label.
    fn place_by_nguid(
        &self,
        drives: &Drives,
        target: usize,
        nguid: [u8; 16],
    ) -> Option<MemberPlace> {
        let mut given = self.config.places.iter().zip(&drives.namespaces);
        if let Some((place, _)) = given.find(|(_, namespace)| namespace.nguid == nguid) {
            return Some(*place);
        }
        let mut others = drives.controllers[target].namespaces.iter();
        let other = others.find(|namespace| namespace.nguid == nguid)?;
        Some(MemberPlace { target, nsid: other.nsid })
    }

    /// Stores the status of an old volume on a target. `at` is an index of `old_volumes`.
    ///
    /// # Errors
    /// The old volume has an owner.
    pub(super) fn on_old_status(
        &mut self,
        at: usize,
        status: VolumeStatus,
    ) -> Result<(), VolumeCreateError> {
        if status.owned {
            // No owner is displaced (trap T8).
            let (member, volume) = self.first_member_of(self.old_volumes[at].volume);
            return Err(VolumeCreateError::Owned { member, volume, owner: status.owner_text() });
        }
        let old = &mut self.old_volumes[at];
        old.state = if status.log_lost {
            OldState::Lost
        } else if status.known && !status.unlogged {
            let guards = status.unrecovered || status.kept;
            let is_behind = claim::is_behind(&status, old.generation);
            OldState::Partitions { guards, is_behind }
        } else {
            OldState::Nothing
        };
        old.generation = old.generation.max(status.generation);
        (old.streams, old.slots) = (status.streams, status.slots);
        Ok(())
    }

    /// Stores whether a target has accepted the claim of an old volume. A target that refuses the
    /// claim keeps the old volume. `at` is an index of `old_volumes`.
    pub(super) fn on_old_claimed(&mut self, at: usize, has_claimed: bool) {
        self.old_volumes[at].state =
            if has_claimed { OldState::Claimed } else { OldState::Nothing };
    }

    /// The first member whose drive belongs to an old volume, and the name of that volume.
    fn first_member_of(&self, volume: VolumeId) -> (usize, String) {
        let Some(drives) = &self.drives else { return Default::default() };
        let first = drives.labels_of(volume).next();
        first.map(|(member, label)| (member, label.name.clone())).unwrap_or_default()
    }

    /// Decides whether an old volume is dropped from a target's log after the target has refused the
    /// partitions of the new volume: returns the rule for the choice, or `None` if dropping
    /// them cannot help. `refusal` is the target's answer.
    pub(super) fn old_volumes_to_drop(&self, target: usize, refusal: Cqe) -> Option<Dropping> {
        let only_guarding = refusal.status().is(status::GUARDED);
        let dropping = Dropping::First { target, only_guarding };
        let may_help = only_guarding || self.may_make_space(target, refusal);
        let has_old_volume = self.old_volumes.iter().any(|old| old.is_due(dropping));
        (may_help && has_old_volume).then_some(dropping)
    }

    /// Whether a target's log that has refused the partitions may have enough space once all old
    /// volumes are dropped from it.
    fn may_make_space(&self, target: usize, refusal: Cqe) -> bool {
        let answer = refusal.status();
        if answer.is(status::LOG_TOO_SMALL) {
            // The result has the needed bytes in the lower half, the free bytes in the upper half.
            let (need, free) = (refusal.result() as u32, (refusal.result() >> 32) as u32);
            self.may_make_bytes(target, need, free)
        } else if answer.is(status::TOO_MANY_SLOTS) {
            self.may_make_slots(target, refusal.result() as u32)
        } else {
            answer.is(status::LOG_DIRECTORY_FULL)
        }
    }

    /// The old volumes that can be dropped from a target's log before the new volume is made.
    fn droppable_first(&self, target: usize) -> impl Iterator<Item = &OldVolume> {
        let dropping = Dropping::First { target, only_guarding: false };
        self.old_volumes.iter().filter(move |old| old.is_due(dropping))
    }

    /// Whether `need` adjacent bytes may become free in a target's log whose largest gap has `free`
    /// bytes.
    fn may_make_bytes(&self, target: usize, need: u32, free: u32) -> bool {
        // In the best case the dropped volumes and the gaps around them are adjacent. `n` volumes
        // have at most `n + 1` gaps around them, and no gap is larger than `free`.
        let gap_count = self.droppable_first(target).count() as u64 + 1;
        let dropped_bytes: u64 = self.droppable_first(target).map(OldVolume::partition_bytes).sum();
        u64::from(need) <= gap_count * u64::from(free) + dropped_bytes
    }

    /// Whether enough slots may become free in a target's log that has space for `most` slots per
    /// stream.
    fn may_make_slots(&self, target: usize, most: u32) -> bool {
        let streams = u64::from(self.config.streams);
        // The target has divided its free slots by `streams` and rounded down, which gave `most`.
        // This is the largest number of free slots with that quotient.
        let free_slots_max = streams * (u64::from(most) + 1) - 1;
        let needed_per_stream = match self.config.slots {
            // The target chooses the number. Its partitions are then whole pages.
            0 => self.config.min_slots(target).max(SLOTS_OF_A_PAGE),
            slots => slots,
        };
        let dropped_slots: u64 = self.droppable_first(target).map(OldVolume::total_slots).sum();
        streams * u64::from(needed_per_stream) <= free_slots_max + dropped_slots
    }

    /// Claims the next old volume that is to be dropped, on all its targets. Returns whether there
    /// was one.
    ///
    /// Old volumes are claimed one after the other. After a creation that a crash has cut off, two
    /// old volumes may have the same drives, and a target refuses the claim of one while the other
    /// has an owner (trap T21).
    pub(super) fn claim_next_old(
        &mut self,
        dropping: Dropping,
        now: u64,
        associations: &mut impl Associations,
    ) -> bool {
        let next = self.old_volumes.iter().find(|old| old.is_due(dropping));
        let Some(volume) = next.map(|old| old.volume) else { return false };
        for (at, old) in self.old_volumes.iter_mut().enumerate() {
            if old.volume != volume || !old.is_due(dropping) {
                continue;
            }
            // If no answer arrives, nothing more is done about this volume.
            old.state = OldState::Nothing;
            // Without a higher generation it cannot be claimed.
            let Some(generation) = old.generation.checked_add(1) else { continue };
            let claim = Claim::plain(volume, generation, old.streams, old.members.clone());
            let claim = claim.encode();
            let (sqe, data, purpose) =
                (claim_command(), Data::Bytes(&claim), Question::ClaimOld(at));
            // A target that can't get a command is lost, and the next question reports that.
            let _ = self.targets.ask_admin(associations, old.target, sqe, data, purpose, now);
        }
        true
    }

    /// Sends the command to forget for every old volume that is in this state.
    pub(super) fn send_forget_old(
        &mut self,
        state: OldState,
        now: u64,
        associations: &mut impl Associations,
    ) {
        for old in self.old_volumes.iter_mut().filter(|old| old.state == state) {
            old.state = OldState::Nothing;
            let forget = release_command(old.volume, true);
            let (data, purpose) = (Data::None, Question::Forget);
            // A target that can't get a command is lost, and the next question reports that.
            let _ = self.targets.ask_admin(associations, old.target, forget, data, purpose, now);
        }
    }
}

/// The fewest slots per stream that a target chooses: a partition of one page.
const SLOTS_OF_A_PAGE: u32 = (PARTITION_ALIGN / ENTRY_BYTES) as u32;

//! The new volume of a creation: its partitions in the logs, and its labels on the drives.

use alloc::vec::Vec;
use core::ops::Range;

use riopipe_nvme::command::Cqe;
use riopipe_nvme::digest::Crc32c;

use super::super::calls::Associations;
use super::super::error::{CallFailure, VolumeCreateError};
use super::super::labels;
use super::super::survey::LISTING;
use super::foreign_content::wiped_ranges;
use super::{ASKING, MAKING_PARTITIONS, Question, RELEASING, Step, VolumeCreation, failed_call};
use crate::drive_identity::RECORD_BLOCK;
use crate::initiator::queue_pair::Data;
use crate::label::{DATA_START, Label};
use crate::wire::{
    DIRECTORY_LEN, LogDirectory, claim_command, directory_command, release_command, status,
};

impl VolumeCreation {
    /// Whether the volume's engine has entries in the targets' logs.
    pub(super) fn keeps_log(&self) -> bool {
        self.label.as_ref().is_some_and(|label| label.engine.capabilities().keeps_log)
    }

    /// Claims the new volume on a target, which makes the partitions if the engine keeps a log.
    pub(super) fn make_partitions(
        &mut self,
        target: usize,
        now: u64,
        associations: &mut impl Associations,
    ) -> Result<(), VolumeCreateError> {
        let claim = self.config.claim(target, self.keeps_log()).encode();
        self.may_have_partitions = true;
        let (sqe, data) = (claim_command(), Data::Bytes(&claim));
        self.targets
            .ask_admin(associations, target, sqe, data, Question::Claim, now)
            .map_err(|source| failed_call(target, MAKING_PARTITIONS, source))
    }

    /// Handles the answer to the claim of the new volume. After a refusal that may be caused by an
    /// old volume, the next step drops an old volume.
    pub(super) fn on_partitions_answer(
        &mut self,
        target: usize,
        cqe: Cqe,
    ) -> Result<(), VolumeCreateError> {
        if let Some(dropping) = self.old_volumes_to_drop(target, cqe) {
            self.step = Step::DroppingOld(dropping);
            return Ok(());
        }
        let (answer, result) = (cqe.status(), cqe.result());
        let (low, high) = (result as u32, (result >> 32) as u32);
        if answer.is_ok() {
            Ok(())
        } else if answer.is(status::LOG_DIRECTORY_FULL) {
            Err(VolumeCreateError::LogDirectoryFull { target, volumes: low })
        } else if answer.is(status::LOG_TOO_SMALL) {
            // The error names the volumes that have the space, for which the target is asked.
            let volumes = Vec::new();
            self.error =
                Some(VolumeCreateError::LogTooSmall { target, need: low, free: high, volumes });
            self.step = Step::ListingLog { target, is_asked: false };
            Ok(())
        } else if answer.is(status::TOO_MANY_SLOTS) {
            let slots = self.config.slots;
            Err(VolumeCreateError::TooManySlots { target, slots, most: low })
        } else {
            Err(self.call_error(target, CallFailure::Status(answer)))
        }
    }

    /// Asks a target that has refused the partitions for the volumes in its log. Returns whether the
    /// next call may do more.
    pub(super) fn list_log(
        &mut self,
        target: usize,
        now: u64,
        associations: &mut impl Associations,
    ) -> Result<bool, VolumeCreateError> {
        let (sqe, data) = (directory_command(), Data::Read(DIRECTORY_LEN as u32));
        self.targets
            .ask_admin(associations, target, sqe, data, Question::Directory, now)
            .map_err(|source| failed_call(target, LISTING, source))?;
        self.step = Step::ListingLog { target, is_asked: true };
        Ok(false)
    }

    /// The error of a log without space, with the volumes that have the space.
    pub(super) fn log_too_small(&mut self, cqe: Cqe, page: &[u8]) -> Option<VolumeCreateError> {
        // An earlier target does not know the command.
        let directory = LogDirectory::decode(page).filter(|_| cqe.status().is_ok());
        let mut error = self.error.take()?;
        if let VolumeCreateError::LogTooSmall { volumes, .. } = &mut error {
            *volumes = directory.map(|directory| directory.volumes).unwrap_or_default();
        }
        Some(error)
    }

    /// Asks each target for the number of slots in its partitions, if the volume has a log.
    pub(super) fn count_slots(
        &mut self,
        now: u64,
        associations: &mut impl Associations,
    ) -> Result<(), VolumeCreateError> {
        if !self.keeps_log() {
            return Ok(());
        }
        for target in 0..self.targets.len() {
            self.targets
                .ask_status(associations, target, self.config.volume, Question::Status, now)
                .map_err(|source| failed_call(target, ASKING, source))?;
        }
        Ok(())
    }

    /// Checks that no other volume was made of the drives since the first reading of the labels.
    pub(super) fn check_drives_still_free(&self) -> Result<(), VolumeCreateError> {
        self.check_unreadable_labels()?;
        let labels = self.drives.iter().flat_map(|drives| drives.labels());
        for (member, found) in labels {
            if !self.given_up.contains(&found.volume) {
                return Err(VolumeCreateError::InUse { member, volume: found.name.clone() });
            }
        }
        Ok(())
    }

    /// Lists the writes of the new labels. If a drive holds anything else, that is erased: first
    /// around the labels, and, once the labels show that the drive belongs to the new volume, at
    /// the end of the drive, which may still hold data of an old volume.
    pub(super) fn plan_label_writes(&mut self) {
        let (Some(label), Some(drives)) = (&self.label, &self.drives) else { return };
        for (member, place) in self.config.places.iter().enumerate() {
            let label = Label { index: member as u16, ..label.clone() };
            let copies = new_copies(&label, drives.label(member), self.config.crc32c);
            let is_used = drives.content(member).is_some();
            let max_bytes = drives.controllers[place.target].mdts_bytes;
            let blocks = drives.namespaces[member].blocks;
            let has_own_identity = drives.has_own_identity(member, self.config.crc32c);
            let ranges = wiped_ranges(blocks, max_bytes, has_own_identity == Some(true));
            // An identity is no content, but one of another drive must not stay.
            let is_wiped = |range: &Range<u64>| {
                is_used || has_own_identity == Some(false) && range.contains(&RECORD_BLOCK)
            };
            let (head, tail): (Vec<_>, Vec<_>) =
                ranges.filter(is_wiped).partition(|range| range.end <= DATA_START);
            self.label_writes.extend(labels::zeroes(member, &head));
            let first = labels::first_labels(member, label.prepare_blocks, copies);
            self.label_writes.extend(first);
            self.label_writes.extend(labels::zeroes(member, &tail));
        }
    }

    /// Writes both copies of every label, one step after the other. Returns whether that is done.
    pub(super) fn write_labels(
        &mut self,
        now: u64,
        associations: &mut impl Associations,
    ) -> Result<bool, VolumeCreateError> {
        let Some(io) = self.label_writes.front() else { return Ok(true) };
        let target = self.config.places[labels::member_of(io)].target;
        if !self.write_in_flight && self.targets.is_drives_queue_ready(associations, target) {
            labels::send(
                &mut self.targets,
                associations,
                &self.config.places,
                io.clone(),
                Question::WriteLabel,
                now,
            )
            .map_err(|(_, source)| failed_call(target, labels::WRITING, source))?;
            self.write_in_flight = true;
        }
        Ok(false)
    }

    /// Sends every target the command to release the new volume.
    pub(super) fn send_release(
        &mut self,
        now: u64,
        associations: &mut impl Associations,
    ) -> Result<(), VolumeCreateError> {
        let release = release_command(self.config.volume, false);
        for target in self.targets_with_extension() {
            self.targets
                .ask_admin(associations, target, release, Data::None, Question::Release, now)
                .map_err(|source| failed_call(target, RELEASING, source))?;
        }
        Ok(())
    }

    /// Sends every target the command to forget the new volume. A target that does not know the
    /// volume answers with an error, which does not matter.
    pub(super) fn send_forget(&mut self, now: u64, associations: &mut impl Associations) {
        let forget = release_command(self.config.volume, true);
        for target in self.targets_with_extension() {
            let (data, purpose) = (Data::None, Question::Forget);
            // A target that can't get a command is lost, and the next question reports that.
            let _ = self.targets.ask_admin(associations, target, forget, data, purpose, now);
        }
    }
}

/// Both copies of a new label, in the order in which they are written, each with its block (LBA).
///
/// The first one replaces the older copy of the drive's `old` label, and counts as newer than the
/// other copy. So a crash leaves the newest label of the old volume, or the new label. If it left
/// an earlier label of the old volume, an older copy of a log would count as the newest (trap T24).
fn new_copies(label: &Label, old: Option<&Label>, crc32c: Crc32c) -> [(u64, Vec<u8>); 2] {
    let last = old.map_or(0, |old| old.sequence);
    let last = if last > u32::MAX - 2 { 0 } else { last };
    [last + 1, last + 2].map(|sequence| {
        let copy = Label { sequence, ..label.clone() };
        (Label::block_of(sequence), copy.encode(crc32c))
    })
}

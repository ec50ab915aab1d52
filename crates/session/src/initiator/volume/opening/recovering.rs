//! The steps of an opening from the claim to the end of recovery, with the two pauses of the
//! driver.
//!
//! ```text
//! continue_recovery → pause after the claim: begin_relabeling → continue_relabeling
//!                   → pause after the decision: on_prefixes_decided → continue_saving
//!                   → end: on_recovery_ended
//! ```

use riopipe_nvme::command::Sqe;

use super::super::calls::Associations;
use super::super::error::VolumeOpenError;
use super::super::labels;
use super::super::members::{MemberPlace, region_of};
use super::super::recovery::{RecoveryDriver, command_of};
use super::super::saving::{Next, ReadPart, Saving};
use super::failing::{label_error, save_error};
use super::{OpeningEvent, Purpose, Question, SaveState, Step, VolumeOpening};
use crate::initiator::association::ControlQueue;
use crate::initiator::opening::Phase;
use crate::initiator::queue_pair::Data;
use crate::label_work::Relabel;

impl VolumeOpening {
    /// Continues the recovery: sends the commands that are due. If the recovery has come to a pause
    /// or to its end, begins the step that belongs there. Returns whether there may be more to do
    /// now.
    pub(super) fn continue_recovery(
        &mut self,
        now: u64,
        associations: &mut impl Associations,
    ) -> Result<bool, VolumeOpenError> {
        let Some(driver) = &mut self.driver else { return Ok(false) };
        driver.check_timeouts(now)?;
        let is_dry = self.config.purpose == Purpose::DryRun;
        match driver.phase() {
            Phase::Claimed => {
                self.begin_relabeling();
                return Ok(true);
            }
            Phase::Decided => return self.on_prefixes_decided(now, associations),
            Phase::Over if is_dry => return self.on_prefixes_decided(now, associations),
            Phase::Over => {
                self.on_recovery_ended(associations)?;
                return Ok(false);
            }
            _ => {}
        }
        let phase = driver.phase();
        self.send_due_commands(now, associations)?;
        self.report_progress();
        // A phase without a command ends at once, and the next one begins.
        Ok(self.driver.as_ref().is_some_and(|driver| driver.phase() != phase))
    }

    /// Sends the commands of recovery that are due.
    fn send_due_commands(
        &mut self,
        now: u64,
        associations: &mut impl Associations,
    ) -> Result<(), VolumeOpenError> {
        let Some(driver) = &mut self.driver else { return Ok(()) };
        let (needs_drives, doing) = (driver.needs_drives(), driver.phase().action_name());
        for server in 0..self.targets.len() {
            if needs_drives && !self.targets.is_drives_queue_ready(associations, server) {
                continue;
            }
            while let Some((ticket, call)) = driver.next_command(server, now) {
                let (queue, sqe, data) = command_of(&call);
                let purpose = Question::Recovery(ticket);
                self.targets
                    .ask(associations, (server, queue), sqe, data, purpose, now)
                    .map_err(|source| VolumeOpenError::Call { server, doing, source })?;
                self.events.push_back(OpeningEvent::Sent { server, call });
            }
        }
        Ok(())
    }

    /// After the claim, begins to write the new generation into the labels. That happens before
    /// recovery changes anything, so that a log from before this claim is known to be old (trap
    /// T24).
    pub(super) fn begin_relabeling(&mut self) {
        let (Some(driver), Some(members)) = (&self.driver, &self.members) else { return };
        let generation = driver.opening().generation();
        self.events.push_back(OpeningEvent::Claimed { generation });
        let nguids = members.namespaces.iter().map(|namespace| namespace.nguid).collect();
        let log_region_of =
            |place: &MemberPlace| region_of(&members.controllers[place.target]).unwrap_or_default();
        let log_regions = members.places.iter().map(log_region_of);
        // If the caller accepts that a log is lost, the labels name the logs that the targets have
        // now. Where a target has none, they name none (trap T19).
        let new_regions = self.config.accept_lost_log.then(|| log_regions.collect());
        let edit = self.label_edit.clone();
        let crc32c = self.config.crc32c;
        let work = Relabel::new(&members.head, nguids, generation, new_regions, edit, crc32c);
        self.step = Step::Relabeling { work, in_flight: false };
    }

    /// Writes the new generation into the labels, one step after the other. After the last one,
    /// recovery continues. Returns whether that is done.
    pub(super) fn continue_relabeling(
        &mut self,
        now: u64,
        associations: &mut impl Associations,
    ) -> Result<bool, VolumeOpenError> {
        let Step::Relabeling { work, in_flight } = &mut self.step else { return Ok(false) };
        if *in_flight {
            return Ok(false);
        }
        if let Some(io) = work.next_step() {
            let (action, member) = (labels::action_name(&io), labels::member_of(&io));
            if self.targets.is_drives_queue_ready(associations, self.config.places[member].target) {
                labels::send(
                    &mut self.targets,
                    associations,
                    &self.config.places,
                    io,
                    Question::Relabel,
                    now,
                )
                .map_err(|(server, source)| label_error(server, action, source))?;
                *in_flight = true;
            }
            return Ok(false);
        }
        let finished = core::mem::replace(&mut self.step, Step::Recovering);
        if let (Step::Relabeling { work, .. }, Some(members)) = (finished, &mut self.members) {
            members.labels = work.into_labels();
            if let Some(label) = members.labels.first() {
                members.head.name.clone_from(&label.name);
            }
        }
        if let Some(driver) = &mut self.driver {
            driver.end_pause(now)?;
        }
        self.report_progress();
        Ok(true)
    }

    /// Continues after the recovered seqs have been decided. Nothing has been zeroed so far. If the
    /// caller requests that, begins to save the data that will be zeroed. Returns whether there may
    /// be more to do now.
    pub(super) fn on_prefixes_decided(
        &mut self,
        now: u64,
        associations: &mut impl Associations,
    ) -> Result<bool, VolumeOpenError> {
        let (Some(driver), Some(map)) = (&mut self.driver, &self.block_map) else {
            return Ok(false);
        };
        if !core::mem::replace(&mut self.clock_read_since_decision, true) {
            // The decision may have taken long, and `now` was read before it. So this function runs
            // again in the next call of `advance`, which has a new clock value.
            self.advance_at_once = true;
            return Ok(false);
        }
        driver.count_decide_time(now);
        let saving = self.config.save_undone.then(|| {
            let head = &self.members.as_ref()?.head;
            let opening = driver.opening();
            Saving::new(head, opening.generation(), opening.outcome(), map)
        });
        match saving.flatten() {
            Some(saving) => {
                self.step = Step::Saving { saving, state: SaveState::Idle, since: now };
            }
            None if driver.phase() == Phase::Over => {
                self.on_recovery_ended(associations)?;
                return Ok(false);
            }
            None => driver.end_pause(now)?,
        }
        self.report_progress();
        Ok(true)
    }

    /// Continues to save the data that will be zeroed: reads it, and prepares each step for the
    /// program, which writes the file. After the last step, recovery continues. A dry run ends
    /// then. Returns whether saving is done.
    pub(super) fn continue_saving(
        &mut self,
        now: u64,
        associations: &mut impl Associations,
    ) -> Result<bool, VolumeOpenError> {
        let Step::Saving { saving, state, since } = &mut self.step else { return Ok(false) };
        let (Some(driver), Some(map), Some(members)) =
            (&mut self.driver, &self.block_map, &self.members)
        else {
            return Ok(false);
        };
        if *state != SaveState::Idle {
            // A read is in flight, or the program has to do a step.
            return Ok(false);
        }
        match saving.next(map) {
            Next::Step(step) => *state = SaveState::Due(step),
            Next::Read(parts) => {
                *state = SaveState::Reading;
                for ReadPart { extent, at, len } in parts {
                    let place = members.places[usize::from(extent.member.0)];
                    let to = (place.target, ControlQueue::Drives);
                    let read = Sqe::read(place.nsid, extent.lba, extent.blocks);
                    let (data, purpose) = (Data::Read(len as u32), Question::ReadForSaving(at));
                    self.targets
                        .ask(associations, to, read, data, purpose, now)
                        .map_err(|source| save_error(place.target, source))?;
                }
            }
            Next::Saved => {
                let since = *since;
                self.step = Step::Recovering;
                if driver.phase() == Phase::Over {
                    self.step_times.save = now.saturating_sub(since);
                    self.on_recovery_ended(associations)?;
                } else {
                    driver.end_pause(now)?;
                }
                self.report_progress();
                return Ok(true);
            }
        }
        Ok(false)
    }

    /// Takes the result of the recovery, and ends the opening with it.
    pub(super) fn on_recovery_ended(
        &mut self,
        associations: &mut impl Associations,
    ) -> Result<(), VolumeOpenError> {
        let Some(driver) = &self.driver else { return Ok(()) };
        let (opening, step_times) = (driver.opening(), driver.step_times());
        let generation = opening.generation();
        let (statuses, outcome) = (opening.statuses().to_vec(), opening.outcome().clone());
        self.end_with_result(generation, statuses, outcome, step_times, associations)
    }

    /// Reports the progress of the recovery as an event, if it has changed.
    pub(super) fn report_progress(&mut self) {
        let progress = self.driver.as_ref().map(RecoveryDriver::progress);
        if progress == self.last_progress {
            return;
        }
        if let Some(progress) = progress {
            self.events.push_back(OpeningEvent::Progress(progress));
        }
        self.last_progress = progress;
    }
}

//! The steps of an opening: the questions that each step sends, the handling of the answers, and the
//! choice of the next step.
//!
//! ```text
//! continue_attaching → read_labels → begin_inspection → finish_inspection
//!                                  → begin_claim → continue_recovery ⇄ its two pauses
//!     pause after the claim:     begin_relabeling → continue_relabeling
//!     pause after the decision:  on_prefixes_decided → continue_saving
//!     at the end:                on_recovery_ended → end_with_result
//! any step that fails → release_after_failure → continue_release → the result, or a new attempt
//! ```

use alloc::vec::Vec;

use riopipe_nvme::command::Sqe;
use riopipe_order::probe::{self, Rare};
use riopipe_order::topology::Topology;

use super::super::calls::{Associations, TargetAnswer};
use super::super::error::{CallFailure, Nonsense, VolumeOpenError};
use super::super::labels;
use super::super::members::{MemberPlace, Members, namespaces, region_of};
use super::super::recovery::{RecoveryDriver, StepTimes, command_of};
use super::super::saving::{Next, ReadPart, Saving};
use super::{
    LabelReading, OpenedVolume, OpeningEvent, Purpose, Question, SaveState, Step, VolumeOpening,
};
use crate::claim::{ClaimError, Intent};
use crate::engine_choice::{Choice, choose};
use crate::initiator::association::ControlQueue;
use crate::initiator::opening::{Mode, Opening, OpeningError, Outcome, Phase};
use crate::initiator::queue_pair::Data;
use crate::label_work::{self, LabelIo, Relabel};
use crate::wire::{STATUS_LEN, VolumeStatus, release_command, status_command};

impl VolumeOpening {
    /// Handles failures and answers of targets. Then runs steps until one must wait for a target, for
    /// the program or for the clock.
    ///
    /// # Errors
    /// The attempt has failed.
    pub(super) fn run_steps(
        &mut self,
        now: u64,
        associations: &mut impl Associations,
    ) -> Result<(), VolumeOpenError> {
        if matches!(self.step, Step::Releasing(_) | Step::Ended) {
            // The attempt has failed or has its result already.
            return Ok(());
        }
        if !matches!(self.step, Step::Attaching | Step::Waiting { .. })
            && let Some((server, error)) = self.targets.first_lost(associations)
        {
            return Err(self.call_error(server, error.into()));
        }
        if let Some((server, error)) = self.targets.first_failed_drives_queue(associations) {
            return Err(match self.step {
                Step::ReadingLabels(_) => VolumeOpenError::Attach(alloc::vec![(server, error)]),
                _ => self.call_error(server, error.into()),
            });
        }
        while let Some(answer) = self.targets.next_answer(associations) {
            self.on_answer(answer, now)?;
        }
        while self.run_step(now, associations)? {}
        Ok(())
    }

    /// Runs the present step as far as possible. Returns whether the next call may do more.
    fn run_step(
        &mut self,
        now: u64,
        associations: &mut impl Associations,
    ) -> Result<bool, VolumeOpenError> {
        match &mut self.step {
            Step::Attaching => self.continue_attaching(now, associations),
            Step::ReadingLabels(_) => self.read_labels(now, associations),
            Step::ReadingStatuses { .. } => self.finish_inspection(associations),
            Step::Recovering => self.continue_recovery(now, associations),
            Step::Relabeling { .. } => self.continue_relabeling(now, associations),
            Step::Saving { .. } => self.continue_saving(now, associations),
            Step::Waiting { until } if now >= *until => {
                self.begin_next_attempt(now, associations);
                Ok(true)
            }
            Step::Waiting { .. } | Step::Releasing(_) | Step::Ended => Ok(false),
        }
    }

    /// Begins another attempt after the wait for an owner, over new associations.
    fn begin_next_attempt(&mut self, now: u64, associations: &mut impl Associations) {
        self.targets.replace_associations(associations);
        (self.driver, self.last_progress, self.block_map) = (None, None, None);
        (self.attempt_began, self.step_times) = (now, StepTimes::default());
        self.step = Step::Attaching;
    }

    /// Stores the answer to a question, for the step that has sent it.
    fn on_answer(
        &mut self,
        answer: TargetAnswer<Question>,
        now: u64,
    ) -> Result<(), VolumeOpenError> {
        let TargetAnswer { target: server, purpose, cqe, page } = answer;
        let status = cqe.status();
        if let Question::Recovery(ticket) = purpose {
            // Questions of recovery are sent only while there is a driver.
            let Some(driver) = &mut self.driver else { return Ok(()) };
            let answer = if status.is_ok() { Ok(&page[..]) } else { Err(status) };
            driver.on_answer(server, ticket, answer, now)?;
            self.report_progress();
            return Ok(());
        }
        if !status.is_ok() {
            return Err(self.call_error(server, CallFailure::Status(status)));
        }
        match (purpose, &mut self.step) {
            (Question::Label(member), Step::ReadingLabels(labels)) => {
                let controller = &labels.controllers[server];
                let (nguid, region) = (labels.namespaces[member].nguid, region_of(controller));
                let found = label_work::found(nguid, region, &page, self.config.crc32c);
                labels.found[member] = Some(found);
            }
            (Question::Status, Step::ReadingStatuses { statuses }) => {
                let nonsense = CallFailure::Nonsense(Nonsense::VolumeStatus);
                let status = VolumeStatus::decode(&page);
                statuses.push((server, status.ok_or(status_error(server, nonsense))?));
            }
            (Question::Relabel, Step::Relabeling { work, in_flight }) => {
                *in_flight = false;
                work.on_step_done(&page)?;
            }
            (Question::ReadForSaving(at), Step::Saving { saving, state, .. }) => {
                if let Some(step) = saving.read(at, &page) {
                    *state = SaveState::Due(step);
                }
            }
            // The step that has sent the question has ended.
            _ => {}
        }
        Ok(())
    }

    /// Once all targets are attached, opens the drives queues and begins to read the labels. Returns
    /// whether that is done.
    fn continue_attaching(
        &mut self,
        now: u64,
        associations: &mut impl Associations,
    ) -> Result<bool, VolumeOpenError> {
        let Some(attached) = self.targets.attach_results(associations) else { return Ok(false) };
        let controllers = attached.map_err(|failed| {
            probe::hit(Rare::MemberMissing);
            VolumeOpenError::Attach(failed)
        })?;
        let namespaces = namespaces(&self.config.places, &controllers)
            .map_err(|member| VolumeOpenError::NoNamespace { member })?;
        self.targets.open_drives_queues(associations, now);
        let members = namespaces.len();
        let (requested, found) = (alloc::vec![false; members], alloc::vec![None; members]);
        self.step = Step::ReadingLabels(LabelReading { controllers, namespaces, requested, found });
        Ok(true)
    }

    /// Reads the labels of all members. Once all have been read, checks them, and begins the claim or
    /// the inspection. Returns whether that is done.
    fn read_labels(
        &mut self,
        now: u64,
        associations: &mut impl Associations,
    ) -> Result<bool, VolumeOpenError> {
        let Step::ReadingLabels(labels) = &mut self.step else { return Ok(false) };
        for (member, place) in self.config.places.iter().enumerate() {
            if labels.requested[member]
                || !self.targets.is_drives_queue_ready(associations, place.target)
            {
                continue;
            }
            let io = LabelIo::Read { member };
            let purpose = Question::Label(member);
            labels::send(&mut self.targets, associations, &self.config.places, io, purpose, now)
                .map_err(|(server, source)| label_error(server, labels::READING, source))?;
            labels.requested[member] = true;
        }
        if labels.found.iter().any(Option::is_none) {
            return Ok(false);
        }
        let Step::ReadingLabels(labels) = core::mem::replace(&mut self.step, Step::Recovering)
        else {
            return Ok(false);
        };
        let members = Members::check(
            self.config.name.as_deref(),
            labels.controllers,
            &self.config.places,
            labels.namespaces,
            labels.found.into_iter().flatten().collect(),
            self.config.accept_lost_log,
            self.config.layout,
        )?;
        self.step_times.connect = now.saturating_sub(self.attempt_began);
        self.begin_claim_or_inspection(members, now, associations)?;
        Ok(true)
    }

    /// Begins the inspection of a volume whose labels are valid, or its claim and recovery.
    fn begin_claim_or_inspection(
        &mut self,
        members: Members,
        now: u64,
        associations: &mut impl Associations,
    ) -> Result<(), VolumeOpenError> {
        let block_map = members.block_map()?;
        if self.config.purpose == Purpose::Inspect {
            self.begin_inspection(members, block_map, now, associations)
        } else {
            self.begin_claim(members, block_map, now)
        }
    }

    /// Asks every target that has the extension for its state of the volume.
    fn begin_inspection(
        &mut self,
        members: Members,
        block_map: Topology,
        now: u64,
        associations: &mut impl Associations,
    ) -> Result<(), VolumeOpenError> {
        let volume = members.head.volume;
        self.block_map = Some(block_map);
        self.engine = members.head.engine;
        for server in 0..members.controllers.len() {
            if members.controllers[server].extension.is_some() {
                let (to, data) = ((server, ControlQueue::Admin), Data::Read(STATUS_LEN as u32));
                let sqe = status_command(volume);
                self.targets
                    .ask(associations, to, sqe, data, Question::Status, now)
                    .map_err(|source| status_error(server, source))?;
            }
        }
        self.members = Some(members);
        self.step = Step::ReadingStatuses { statuses: Vec::new() };
        Ok(())
    }

    /// Chooses the engine, and makes the driver that claims and recovers the volume. In a dry run, the
    /// driver changes nothing.
    fn begin_claim(
        &mut self,
        members: Members,
        block_map: Topology,
        now: u64,
    ) -> Result<(), VolumeOpenError> {
        let extensions = members.controllers.iter().map(|controller| controller.extension);
        let Choice { engine, fallback } =
            choose(members.head.engine, self.config.engine, extensions).map_err(|hindrance| {
                // An engine can be refused only if the caller insists on it.
                let engine = self.config.engine.unwrap_or(members.head.engine);
                VolumeOpenError::Engine { engine, hindrance }
            })?;
        (self.engine, self.fallback) = (engine, fallback);
        let intent = Intent {
            engine,
            take_over: self.config.take_over,
            accept_lost_log: self.config.accept_lost_log,
            label_generation: members.label_generation(),
            streams: members.head.streams,
            lease_ms: self.config.lease.lease_ms(engine),
        };
        let mode = match self.config.purpose {
            Purpose::Claim => Mode::Open(intent),
            Purpose::Inspect | Purpose::DryRun => Mode::DryRun(intent),
        };
        let attempt = self.config.attempt;
        let opening = Opening::new(members.opening_config(), mode, attempt)?;
        self.clock_read_since_decision = false;
        self.driver = Some(RecoveryDriver::new(opening, attempt, self.config.timeout_ns, now));
        (self.block_map, self.members) = (Some(block_map), Some(members));
        self.report_progress();
        Ok(())
    }

    /// Ends the inspection, once all targets have reported their state of the volume. Returns false:
    /// nothing follows.
    fn finish_inspection(
        &mut self,
        associations: &mut impl Associations,
    ) -> Result<bool, VolumeOpenError> {
        if self.targets.has_pending_answers() {
            return Ok(false);
        }
        // An inspection has no generation, and recovers nothing.
        let (generation, outcome, step_times) = (0, Outcome::default(), StepTimes::default());
        let Step::ReadingStatuses { statuses } = core::mem::replace(&mut self.step, Step::Ended)
        else {
            return Ok(false);
        };
        self.end_with_result(generation, statuses, outcome, step_times, associations)?;
        Ok(false)
    }

    /// Continues the recovery: sends the commands that are due. If the recovery has come to a pause or
    /// to its end, begins the step that belongs there. Returns whether there may be more to do now.
    fn continue_recovery(
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
        let needs_drives = driver.needs_drives();
        let phase = driver.phase();
        for server in 0..self.targets.len() {
            if needs_drives && !self.targets.is_drives_queue_ready(associations, server) {
                continue;
            }
            let doing = phase.action_name();
            let call_error = |source| VolumeOpenError::Call { server, doing, source };
            while let Some((ticket, call)) = driver.next_command(server, now) {
                let (queue, sqe, data) = command_of(&call);
                let purpose = Question::Recovery(ticket);
                self.targets
                    .ask(associations, (server, queue), sqe, data, purpose, now)
                    .map_err(call_error)?;
                self.events.push_back(OpeningEvent::Sent { server, call });
            }
        }
        self.report_progress();
        // A phase without a command ends at once, and the next one begins.
        Ok(self.driver.as_ref().is_some_and(|driver| driver.phase() != phase))
    }

    /// After the claim, begins to write the new generation into the labels. That happens before
    /// recovery changes anything, so that a log from before this claim is known to be old (T24).
    fn begin_relabeling(&mut self) {
        let (Some(driver), Some(members)) = (&self.driver, &self.members) else { return };
        let generation = driver.opening().generation();
        self.events.push_back(OpeningEvent::Claimed { generation });
        let nguids = members.namespaces.iter().map(|namespace| namespace.nguid).collect();
        let region_on_target = |place: &MemberPlace| {
            let extension = members.controllers[place.target].extension;
            extension.map_or([0; 16], |extension| extension.region)
        };
        let regions = members.places.iter().map(region_on_target);
        // If the caller accepts that a log is lost, the labels name the logs that the targets have
        // now.
        let regions = self.config.accept_lost_log.then(|| regions.collect());
        let work = Relabel::new(&members.head, nguids, generation, regions, self.config.crc32c);
        self.step = Step::Relabeling { work, in_flight: false };
    }

    /// Writes the new generation into the labels, one step after the other. After the last one,
    /// recovery continues. Returns whether that is done.
    fn continue_relabeling(
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
    fn on_prefixes_decided(
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
            let volume = self.members.as_ref()?.head.volume;
            Saving::new(volume, driver.opening().outcome(), map)
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
    /// program, which writes the file. After the last step, recovery continues. A dry run ends then.
    /// Returns whether saving is done.
    fn continue_saving(
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
                    let (to, data) = ((place.target, ControlQueue::Drives), Data::Read(len as u32));
                    let sqe = Sqe::read(place.nsid, extent.lba, extent.blocks);
                    self.targets
                        .ask(associations, to, sqe, data, Question::ReadForSaving(at), now)
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
    fn on_recovery_ended(
        &mut self,
        associations: &mut impl Associations,
    ) -> Result<(), VolumeOpenError> {
        let Some(driver) = &self.driver else { return Ok(()) };
        let (opening, step_times) = (driver.opening(), driver.step_times());
        let generation = opening.generation();
        let (statuses, outcome) = (opening.statuses().to_vec(), opening.outcome().clone());
        self.end_with_result(generation, statuses, outcome, step_times, associations)
    }

    /// Ends the opening with its result. The associations are kept only if the volume was claimed.
    /// `step_times`: the times that the driver has measured.
    fn end_with_result(
        &mut self,
        generation: u32,
        statuses: Vec<(usize, VolumeStatus)>,
        outcome: Outcome,
        step_times: StepTimes,
        associations: &mut impl Associations,
    ) -> Result<(), VolumeOpenError> {
        let Some(members) = &self.members else { return Ok(()) };
        let topology = match self.config.purpose {
            Purpose::Inspect => members.block_map()?,
            Purpose::DryRun | Purpose::Claim => members.topology(&statuses)?,
        };
        let Some(members) = self.members.take() else { return Ok(()) };
        match self.config.purpose {
            Purpose::Claim => self.targets.close_drives_queues(associations),
            Purpose::Inspect | Purpose::DryRun => self.targets.close_associations(associations),
        }
        self.step = Step::Ended;
        self.result = Some(Ok(OpenedVolume {
            members,
            engine: self.engine,
            fallback: self.fallback,
            generation,
            statuses,
            topology,
            outcome,
            steps: StepTimes {
                connect: self.step_times.connect,
                save: self.step_times.save + step_times.save,
                ..step_times
            },
            lease_ms: self.config.lease.lease_ms(self.engine),
        }));
        Ok(())
    }

    /// The error that a lost or failing target causes at this step.
    fn call_error(&self, server: usize, source: CallFailure) -> VolumeOpenError {
        let doing = match (&self.step, &self.driver) {
            (Step::Relabeling { work, .. }, _) => {
                work.next_step().as_ref().map_or(labels::WRITING, labels::action_name)
            }
            (Step::Saving { .. }, _) => return VolumeOpenError::Save { server, source },
            (Step::Recovering, Some(driver)) => driver.phase().action_name(),
            (Step::ReadingStatuses { .. }, _) => Phase::Ask.action_name(),
            _ => labels::READING,
        };
        VolumeOpenError::Call { server, doing, source }
    }

    /// Begins to release the volume, if it may have been claimed, after the attempt has failed with
    /// `error`. [`continue_release`](Self::continue_release) reports the error.
    pub(super) fn release_after_failure(
        &mut self,
        error: VolumeOpenError,
        now: u64,
        associations: &mut impl Associations,
    ) {
        self.targets.drop_pending_answers();
        let claims = self.config.purpose == Purpose::Claim;
        if let (true, Some(driver), Some(members)) = (claims, &self.driver, &self.members) {
            let generation = driver.opening().generation();
            self.events.push_back(OpeningEvent::Releases { generation });
            let release = release_command(members.head.volume, false);
            for (server, controller) in members.controllers.iter().enumerate() {
                if controller.extension.is_some() {
                    let to = (server, ControlQueue::Admin);
                    // A target that can't get the command notices the end of the association when
                    // the connection closes.
                    let _ = self.targets.ask(
                        associations,
                        to,
                        release,
                        Data::None,
                        Question::Release,
                        now,
                    );
                }
            }
        }
        self.step = Step::Releasing(error);
    }

    /// Ends the attempt, once every reachable target has answered the release. Then the opening waits
    /// for its next attempt, or ends with the error.
    pub(super) fn continue_release(&mut self, now: u64, associations: &mut impl Associations) {
        // The content of the answers does not matter.
        while self.targets.next_answer(associations).is_some() {}
        self.targets.drop_answers_of_lost_targets(associations);
        if self.targets.has_pending_answers() {
            return;
        }
        self.targets.close_associations(associations);
        let Step::Releasing(error) = core::mem::replace(&mut self.step, Step::Ended) else {
            return;
        };
        match self.time_of_next_attempt(&error, now) {
            Some(until) => self.step = Step::Waiting { until },
            None => self.result = Some(Err(error)),
        }
    }

    /// The time of the next attempt, ns, if this one has failed because the volume has an owner and
    /// the caller allows a longer wait (T25). Reports the wait as an event from time to time.
    fn time_of_next_attempt(&mut self, error: &VolumeOpenError, now: u64) -> Option<u64> {
        let VolumeOpenError::Opening(OpeningError::Claim(ClaimError::Owned {
            target,
            owner,
            lease_left_ms,
        })) = error
        else {
            return None;
        };
        let waited = now.saturating_sub(self.opening_began);
        let left = self.config.wait.for_ns.saturating_sub(waited);
        if left == 0 {
            return None;
        }
        if self
            .last_owned_report
            .is_none_or(|reported| now.saturating_sub(reported) >= self.config.wait.report_ns)
        {
            self.last_owned_report = Some(now);
            self.events.push_back(OpeningEvent::Owned {
                server: *target,
                owner: owner.clone(),
                lease_left_ms: *lease_left_ms,
                give_up_ns: left,
            });
        }
        Some(now.saturating_add(self.config.wait.ask_ns.min(left)))
    }

    /// Reports the progress of the recovery as an event, if it has changed.
    fn report_progress(&mut self) {
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

fn label_error(server: usize, doing: &'static str, source: CallFailure) -> VolumeOpenError {
    VolumeOpenError::Call { server, doing, source }
}

fn status_error(server: usize, source: CallFailure) -> VolumeOpenError {
    VolumeOpenError::Call { server, doing: Phase::Ask.action_name(), source }
}

fn save_error(server: usize, source: CallFailure) -> VolumeOpenError {
    VolumeOpenError::Save { server, source }
}

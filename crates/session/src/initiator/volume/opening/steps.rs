//! The steps of an opening up to the claim, and its end: the questions that each step sends, the
//! handling of the answers, and the choice of the next step.
//!
//! ```text
//! continue_attaching → read_labels → begin_claim      → recovery (see the module `recovering`)
//!                                  → begin_inspection → finish_inspection → end_with_result
//! any step that fails → release_after_failure (see the module `failing`)
//! ```

use alloc::vec::Vec;

use riopipe_order::probe::{self, Rare};
use riopipe_order::topology::Topology;

use super::super::calls::{Associations, TargetAnswer};
use super::super::error::{CallFailure, Nonsense, VolumeOpenError};
use super::super::labels;
use super::super::members::{Members, member_orders, namespaces, region_of};
use super::super::recovery::{RecoveryDriver, StepTimes};
use super::failing::{label_error, status_error};
use super::{
    LabelReading, OpenedVolume, Outlook, Purpose, Question, SaveState, Step, VolumeChange,
    VolumeOpening,
};
use crate::claim::{Intent, Plan};
use crate::engine_choice::{Choice, choose};
use crate::initiator::opening::{Mode, Opening, Outcome, plan_opening};
use crate::label::is_valid_name;
use crate::label_work::{self, LabelEdit, LabelIo};
use crate::wire::VolumeStatus;

impl VolumeOpening {
    /// Handles failures and answers of targets. Then runs steps until one must wait for a target,
    /// for the program or for the clock.
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
    pub(super) fn run_step(
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
    pub(super) fn begin_next_attempt(&mut self, now: u64, associations: &mut impl Associations) {
        self.targets.replace_associations(associations);
        (self.driver, self.last_progress, self.block_map) = (None, None, None);
        (self.attempt_began, self.step_times) = (now, StepTimes::default());
        self.step = Step::Attaching;
    }

    /// Stores the answer to a question, for the step that has sent it.
    pub(super) fn on_answer(
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
            (Question::Status, Step::ReadingStatuses { statuses, .. }) => {
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

    /// Once all targets are attached, opens the drives queues and begins to read the labels.
    /// Returns whether that is done.
    pub(super) fn continue_attaching(
        &mut self,
        now: u64,
        associations: &mut impl Associations,
    ) -> Result<bool, VolumeOpenError> {
        let Some(attached) = self.targets.attach_results(associations) else { return Ok(false) };
        let controllers = attached.map_err(|failed| {
            probe::count_rare(Rare::MemberMissing);
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

    /// Reads the labels of all members. Once all have been read, checks them, and begins the claim
    /// or the inspection. Returns whether that is done.
    pub(super) fn read_labels(
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
        self.step_times.connect = now.saturating_sub(self.attempt_began);
        self.begin_claim_or_inspection(labels, now, associations)?;
        Ok(true)
    }

    /// Checks the labels, and begins the inspection of the volume, or its claim and recovery.
    pub(super) fn begin_claim_or_inspection(
        &mut self,
        labels: LabelReading,
        now: u64,
        associations: &mut impl Associations,
    ) -> Result<(), VolumeOpenError> {
        let LabelReading { controllers, namespaces, found, .. } = labels;
        let found = found.into_iter().flatten().collect();
        let (config, name) = (&self.config, self.config.name.as_deref());
        let (places, layout) = (&config.places, config.layout);
        if config.purpose == Purpose::Inspect {
            let (members, refusal) = Members::check_for_inspection(
                name,
                controllers,
                places,
                namespaces,
                found,
                layout,
            )?;
            let block_map = members.block_map()?;
            let refusal = refusal.map(VolumeOpenError::from);
            return self.begin_inspection(members, refusal, block_map, now, associations);
        }
        let accept = config.accept_lost_log;
        let members = Members::check(name, controllers, places, namespaces, found, accept, layout)?;
        let block_map = members.block_map()?;
        self.begin_claim(members, block_map, now)
    }

    /// Asks every target that has the extension for its state of the volume.
    pub(super) fn begin_inspection(
        &mut self,
        members: Members,
        refusal: Option<VolumeOpenError>,
        block_map: Topology,
        now: u64,
        associations: &mut impl Associations,
    ) -> Result<(), VolumeOpenError> {
        let volume = members.head.volume;
        self.block_map = Some(block_map);
        self.engine = members.head.engine;
        for server in 0..members.controllers.len() {
            if members.controllers[server].extension.is_some() {
                self.targets
                    .ask_status(associations, server, volume, Question::Status, now)
                    .map_err(|source| status_error(server, source))?;
            }
        }
        self.members = Some(members);
        self.step = Step::ReadingStatuses { statuses: Vec::new(), refusal };
        Ok(())
    }

    /// Chooses the engine, and makes the driver that claims and recovers the volume. In a dry run,
    /// the driver changes nothing.
    pub(super) fn begin_claim(
        &mut self,
        members: Members,
        block_map: Topology,
        now: u64,
    ) -> Result<(), VolumeOpenError> {
        let intent = self.choose_intent(&members)?;
        let VolumeChange { name, grow } = self.config.change.clone();
        if name.as_deref().is_some_and(|name| !is_valid_name(name)) {
            return Err(VolumeOpenError::Name);
        }
        let data_blocks = if grow { Some(members.grown_data_blocks()?) } else { None };
        self.label_edit = LabelEdit { name, data_blocks };
        let mode = match self.config.purpose {
            Purpose::Claim => Mode::Open(intent),
            Purpose::Inspect | Purpose::DryRun => Mode::DryRun(intent),
        };
        let attempt = self.config.attempt;
        let config = members.opening_config(self.config.accept_lost_log);
        let opening = Opening::new(config, mode, attempt)?;
        self.clock_read_since_decision = false;
        self.driver = Some(RecoveryDriver::new(opening, attempt, self.config.timeout_ns, now));
        (self.block_map, self.members) = (Some(block_map), Some(members));
        self.report_progress();
        Ok(())
    }

    /// Chooses the engine, and the options of the claim.
    ///
    /// # Errors
    /// The caller insists on an engine that can't run.
    fn choose_intent(&mut self, members: &Members) -> Result<Intent, VolumeOpenError> {
        let extensions = members.controllers.iter().map(|controller| controller.extension);
        let logged = members.logged_targets(self.config.accept_lost_log);
        let orders = member_orders(&members.places, &members.controllers);
        let Choice { engine, fallback } =
            choose(members.head.engine, self.config.engine, extensions, logged, &orders).map_err(
                |hindrance| {
                    // An engine can be refused only if the caller insists on it.
                    let engine = self.config.engine.unwrap_or(members.head.engine);
                    VolumeOpenError::Engine { engine, hindrance }
                },
            )?;
        (self.engine, self.fallback) = (engine, fallback);
        Ok(Intent {
            engine,
            take_over: self.config.take_over,
            accept_lost_log: self.config.accept_lost_log,
            label_generation: members.label_generation(),
            streams: members.head.streams,
            lease_ms: self.config.lease.lease_ms(engine),
        })
    }

    /// Makes the decision that an opening would make before it changes anything.
    fn decide_outlook(
        &mut self,
        refusal: Option<VolumeOpenError>,
        statuses: &[(usize, VolumeStatus)],
    ) -> Outlook {
        let Some(members) = self.members.take() else { return Ok(Plan::default()) };
        let intent = self.choose_intent(&members);
        let outlook = match (refusal, intent) {
            (Some(error), _) | (None, Err(error)) => Err(error),
            (None, Ok(intent)) => {
                let config = members.opening_config(intent.accept_lost_log);
                plan_opening(&config, &intent, statuses)
                    .map_err(|error| VolumeOpenError::Opening(error.into()))
            }
        };
        self.members = Some(members);
        outlook
    }

    /// Ends the inspection, once all targets have reported their state of the volume. Returns
    /// false: nothing follows.
    pub(super) fn finish_inspection(
        &mut self,
        associations: &mut impl Associations,
    ) -> Result<bool, VolumeOpenError> {
        if self.targets.has_pending_answers() {
            return Ok(false);
        }
        // An inspection has no generation, and recovers nothing.
        let (generation, outcome, step_times) = (0, Outcome::default(), StepTimes::default());
        let Step::ReadingStatuses { statuses, refusal } =
            core::mem::replace(&mut self.step, Step::Ended)
        else {
            return Ok(false);
        };
        self.outlook = Some(self.decide_outlook(refusal, &statuses));
        self.end_with_result(generation, statuses, outcome, step_times, associations)?;
        Ok(false)
    }

    /// Ends the opening with its result. The associations are kept only if the volume was claimed.
    /// `step_times`: the times that the driver has measured.
    pub(super) fn end_with_result(
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
            outlook: self.outlook.take(),
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
}

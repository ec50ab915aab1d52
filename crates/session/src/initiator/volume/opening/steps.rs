//! The steps of an opening: the questions of each, the handling of the answers, the step that
//! follows.

use alloc::vec::Vec;

use riopipe_nvme::command::{Cqe, Sqe};
use riopipe_order::probe::{self, Rare};

use super::super::calls::Associations;
use super::super::error::{CallFailure, Nonsense, VolumeOpenError};
use super::super::labels;
use super::super::members::{MemberPlace, Members, namespaces, region_of};
use super::super::recovery::{RecoveryDriver, StepTimes, question};
use super::super::saving::{Next, ReadPart, Saving};
use super::{
    Labels, OpenedVolume, OpeningEvent, Purpose, Question, SaveState, Step, VolumeOpening,
};
use crate::claim::{ClaimError, Intent};
use crate::engine_choice::{Choice, choose};
use crate::initiator::association::ControlQueue;
use crate::initiator::opening::{Mode, Opening, OpeningError, Outcome, Phase};
use crate::initiator::queue_pair::Data;
use crate::label_work::{self, LabelIo, Relabel};
use crate::wire::{STATUS_LEN, VolumeStatus, release_command, status_command};

impl VolumeOpening {
    /// Handles failures and answers, and then does everything that can be done now.
    pub(super) fn go_on(
        &mut self,
        now: u64,
        a: &mut impl Associations,
    ) -> Result<(), VolumeOpenError> {
        if matches!(self.step, Step::Releasing(_) | Step::Over) {
            return Ok(());
        }
        if !matches!(self.step, Step::Attaching | Step::Waiting { .. })
            && let Some((server, error)) = self.targets.lost(a)
        {
            return Err(self.call_failed(server, error.into()));
        }
        if let Some((server, error)) = self.targets.drives_failed(a) {
            return Err(match self.step {
                Step::Labels(_) => VolumeOpenError::Attach(alloc::vec![(server, error)]),
                _ => self.call_failed(server, error.into()),
            });
        }
        while let Some((server, question, cqe, page)) = self.targets.answer(a) {
            self.take(server, question, cqe, &page, now)?;
        }
        while self.step(now, a)? {}
        Ok(())
    }

    /// Does all that can be done now. Returns whether there may be more.
    fn step(&mut self, now: u64, a: &mut impl Associations) -> Result<bool, VolumeOpenError> {
        match &mut self.step {
            Step::Attaching => self.attach(now, a),
            Step::Labels(_) => self.read_labels(now, a),
            Step::Status { .. } => self.inspected(a),
            Step::Recovering => self.recover(now, a),
            Step::Relabeling { .. } => self.relabel(now, a),
            Step::Saving { .. } => self.save(now, a),
            Step::Waiting { until } if now >= *until => {
                self.targets.begin_again(a);
                (self.driver, self.progress, self.map) = (None, None, None);
                (self.attempt_began, self.steps) = (now, StepTimes::default());
                self.step = Step::Attaching;
                Ok(true)
            }
            Step::Waiting { .. } | Step::Releasing(_) | Step::Over => Ok(false),
        }
    }

    /// Takes in an answer.
    fn take(
        &mut self,
        server: usize,
        question: Question,
        cqe: Cqe,
        page: &[u8],
        now: u64,
    ) -> Result<(), VolumeOpenError> {
        let status = cqe.status();
        if let Question::Recovery(ticket) = question {
            let Some(driver) = &mut self.driver else { return Ok(()) };
            let answer = if status.is_ok() { Ok(page) } else { Err(status) };
            driver.done(server, ticket, answer, now)?;
            self.note_progress();
            return Ok(());
        }
        if !status.is_ok() {
            return Err(self.call_failed(server, CallFailure::Status(status)));
        }
        match (question, &mut self.step) {
            (Question::Label(member), Step::Labels(labels)) => {
                let controller = &labels.controllers[server];
                let (nguid, region) = (labels.namespaces[member].nguid, region_of(controller));
                let found = label_work::found(nguid, region, page, self.config.crc32c);
                labels.found[member] = Some(found);
            }
            (Question::Status, Step::Status { statuses }) => {
                let nonsense = CallFailure::Nonsense(Nonsense::VolumeStatus);
                let status = VolumeStatus::decode(page);
                statuses.push((server, status.ok_or(status_failed(server, nonsense))?));
            }
            (Question::Relabel, Step::Relabeling { work, asked }) => {
                *asked = false;
                work.done(page)?;
            }
            (Question::Saved(at), Step::Saving { saving, state, .. }) => {
                if let Some(step) = saving.read(at, page) {
                    *state = SaveState::Due(step);
                }
            }
            _ => {}
        }
        Ok(())
    }

    /// Once all targets are attached, opens the queues to the drives. Returns whether that is done.
    fn attach(&mut self, now: u64, a: &mut impl Associations) -> Result<bool, VolumeOpenError> {
        let Some(attached) = self.targets.attached(a) else { return Ok(false) };
        let controllers = attached.map_err(|failed| {
            probe::hit(Rare::MemberMissing);
            VolumeOpenError::Attach(failed)
        })?;
        let namespaces = namespaces(&self.config.places, &controllers)
            .map_err(|member| VolumeOpenError::NoNamespace { member })?;
        self.targets.open_drives(a, now);
        let members = namespaces.len();
        let (asked, found) = (alloc::vec![false; members], alloc::vec![None; members]);
        self.step = Step::Labels(Labels { controllers, namespaces, asked, found });
        Ok(true)
    }

    /// Reads the labels of all members. When all have been read, checks them, and begins the claim
    /// or the inspection. Returns whether that is done.
    fn read_labels(
        &mut self,
        now: u64,
        a: &mut impl Associations,
    ) -> Result<bool, VolumeOpenError> {
        let Step::Labels(labels) = &mut self.step else { return Ok(false) };
        for (member, place) in self.config.places.iter().enumerate() {
            if labels.asked[member] || !self.targets.is_ready(a, place.target) {
                continue;
            }
            let io = LabelIo::Read { member };
            let what = Question::Label(member);
            labels::ask(&mut self.targets, a, &self.config.places, io, what, now)
                .map_err(|(server, source)| label_failed(server, labels::READING, source))?;
            labels.asked[member] = true;
        }
        if labels.found.iter().any(Option::is_none) {
            return Ok(false);
        }
        let Step::Labels(labels) = core::mem::replace(&mut self.step, Step::Recovering) else {
            return Ok(false);
        };
        let members = Members::judge(
            self.config.name.as_deref(),
            labels.controllers,
            &self.config.places,
            labels.namespaces,
            labels.found.into_iter().flatten().collect(),
            self.config.accept_lost_log,
            self.config.layout,
        )?;
        self.steps.connect = now.saturating_sub(self.attempt_began);
        self.begin(members, now, a)?;
        Ok(true)
    }

    /// Begins the claim and the recovery of a volume whose labels are valid, or its inspection.
    fn begin(
        &mut self,
        members: Members,
        now: u64,
        a: &mut impl Associations,
    ) -> Result<(), VolumeOpenError> {
        let volume = members.head.volume;
        let map = members.block_map()?;
        if self.config.purpose == Purpose::Inspect {
            self.map = Some(map);
            self.engine = members.head.engine;
            for server in 0..members.controllers.len() {
                if members.controllers[server].extension.is_some() {
                    let (to, data) = ((server, ControlQueue::Admin), Data::Read(STATUS_LEN as u32));
                    let sqe = status_command(volume);
                    self.targets
                        .ask(a, to, sqe, data, Question::Status, now)
                        .map_err(|source| status_failed(server, source))?;
                }
            }
            self.members = Some(members);
            self.step = Step::Status { statuses: Vec::new() };
            return Ok(());
        }
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
            Purpose::Take => Mode::Open(intent),
            Purpose::Inspect | Purpose::DryRun => Mode::DryRun(intent),
        };
        let attempt = self.config.attempt;
        let opening = Opening::new(members.opening_config(), mode, attempt)?;
        self.decided = false;
        self.driver = Some(RecoveryDriver::new(opening, attempt, self.config.timeout_ns, now));
        (self.map, self.members) = (Some(map), Some(members));
        self.note_progress();
        Ok(())
    }

    /// All targets have reported their state of the volume.
    fn inspected(&mut self, a: &mut impl Associations) -> Result<bool, VolumeOpenError> {
        if self.targets.is_owed() {
            return Ok(false);
        }
        let Step::Status { statuses } = core::mem::replace(&mut self.step, Step::Over) else {
            return Ok(false);
        };
        self.finish(0, statuses, Outcome::default(), StepTimes::default(), a)?;
        Ok(false)
    }

    /// Continues the recovery: sends its next commands, or begins the step of its phase. Returns
    /// whether there may be more to do now.
    fn recover(&mut self, now: u64, a: &mut impl Associations) -> Result<bool, VolumeOpenError> {
        let Some(driver) = &mut self.driver else { return Ok(false) };
        driver.timeout(now)?;
        let is_dry = self.config.purpose == Purpose::DryRun;
        match driver.phase() {
            Phase::Claimed => {
                self.claimed();
                return Ok(true);
            }
            Phase::Decided => return self.decided(now, a),
            Phase::Over if is_dry => return self.decided(now, a),
            Phase::Over => {
                self.over(a)?;
                return Ok(false);
            }
            _ => {}
        }
        let needs_drives = driver.needs_drives();
        let phase = driver.phase();
        for server in 0..self.targets.len() {
            let doing = phase.doing();
            let failed = |source| VolumeOpenError::Call { server, doing, source };
            if needs_drives && !self.targets.is_ready(a, server) {
                continue;
            }
            while let Some((ticket, call)) = driver.next(server, now) {
                let (queue, sqe, data) = question(&call);
                let what = Question::Recovery(ticket);
                self.targets.ask(a, (server, queue), sqe, data, what, now).map_err(failed)?;
                self.events.push_back(OpeningEvent::Sent { server, call });
            }
        }
        self.note_progress();
        // A step without a command ends at once.
        Ok(self.driver.as_ref().is_some_and(|driver| driver.phase() != phase))
    }

    /// The volume is this owner's. Its labels are marked with the new generation before anything
    /// relies on the claim (T24).
    fn claimed(&mut self) {
        let (Some(driver), Some(members)) = (&self.driver, &self.members) else { return };
        let generation = driver.opening().generation();
        self.events.push_back(OpeningEvent::Claimed { generation });
        let nguids = members.namespaces.iter().map(|namespace| namespace.nguid).collect();
        let region = |place: &MemberPlace| {
            let extension = members.controllers[place.target].extension;
            extension.map_or([0; 16], |extension| extension.region)
        };
        let regions = members.places.iter().map(region);
        let regions = self.config.accept_lost_log.then(|| regions.collect());
        let work = Relabel::new(&members.head, nguids, generation, regions, self.config.crc32c);
        self.step = Step::Relabeling { work, asked: false };
    }

    /// Writes the new generation into the labels, one step after the other. Then recovery
    /// continues.
    fn relabel(&mut self, now: u64, a: &mut impl Associations) -> Result<bool, VolumeOpenError> {
        let Step::Relabeling { work, asked } = &mut self.step else { return Ok(false) };
        if *asked {
            return Ok(false);
        }
        if let Some(io) = work.next() {
            let (doing, member) = (labels::doing(&io), labels::member_of(&io));
            if self.targets.is_ready(a, self.config.places[member].target) {
                labels::ask(&mut self.targets, a, &self.config.places, io, Question::Relabel, now)
                    .map_err(|(server, source)| label_failed(server, doing, source))?;
                *asked = true;
            }
            return Ok(false);
        }
        let finished = core::mem::replace(&mut self.step, Step::Recovering);
        if let (Step::Relabeling { work, .. }, Some(members)) = (finished, &mut self.members) {
            members.labels = work.into_labels();
        }
        if let Some(driver) = &mut self.driver {
            driver.go_on(now)?;
        }
        self.note_progress();
        Ok(true)
    }

    /// The prefix of every stream is known, and nothing has been zeroed. If the caller wants the
    /// data that will be zeroed, it is saved first.
    fn decided(&mut self, now: u64, a: &mut impl Associations) -> Result<bool, VolumeOpenError> {
        let (Some(driver), Some(map)) = (&mut self.driver, &self.map) else { return Ok(false) };
        if !core::mem::replace(&mut self.decided, true) {
            // Deciding may have taken long, and `now` is the time before it.
            self.at_once = true;
            return Ok(false);
        }
        driver.decided(now);
        let saving = self.config.save_undone.then(|| {
            let volume = self.members.as_ref()?.head.volume;
            Saving::new(volume, driver.opening().outcome(), map)
        });
        match saving.flatten() {
            Some(saving) => {
                self.step = Step::Saving { saving, state: SaveState::Next, since: now };
            }
            None if driver.phase() == Phase::Over => {
                self.over(a)?;
                return Ok(false);
            }
            None => driver.go_on(now)?,
        }
        self.note_progress();
        Ok(true)
    }

    /// Saves data that will be zeroed: reads it, and leaves each step for the program, which writes
    /// the file. Then recovery continues, or ends after a dry run.
    fn save(&mut self, now: u64, a: &mut impl Associations) -> Result<bool, VolumeOpenError> {
        let Step::Saving { saving, state, since } = &mut self.step else { return Ok(false) };
        let (Some(driver), Some(map), Some(members)) = (&mut self.driver, &self.map, &self.members)
        else {
            return Ok(false);
        };
        if *state != SaveState::Next {
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
                        .ask(a, to, sqe, data, Question::Saved(at), now)
                        .map_err(|source| save_failed(place.target, source))?;
                }
            }
            Next::Over => {
                let since = *since;
                self.step = Step::Recovering;
                if driver.phase() == Phase::Over {
                    self.steps.save = now.saturating_sub(since);
                    self.over(a)?;
                } else {
                    driver.go_on(now)?;
                }
                self.note_progress();
                return Ok(true);
            }
        }
        Ok(false)
    }

    /// Recovery is over.
    fn over(&mut self, a: &mut impl Associations) -> Result<(), VolumeOpenError> {
        let Some(driver) = &self.driver else { return Ok(()) };
        let (opening, steps) = (driver.opening(), driver.steps());
        let generation = opening.generation();
        let (statuses, outcome) = (opening.statuses().to_vec(), opening.outcome().clone());
        self.finish(generation, statuses, outcome, steps, a)
    }

    /// Ends the opening with its result. Only an opening that takes the volume keeps the
    /// associations.
    fn finish(
        &mut self,
        generation: u32,
        statuses: Vec<(usize, VolumeStatus)>,
        outcome: Outcome,
        steps: StepTimes,
        a: &mut impl Associations,
    ) -> Result<(), VolumeOpenError> {
        let Some(members) = &self.members else { return Ok(()) };
        let topology = match self.config.purpose {
            Purpose::Inspect => members.block_map()?,
            Purpose::DryRun | Purpose::Take => members.topology(&statuses)?,
        };
        let Some(members) = self.members.take() else { return Ok(()) };
        match self.config.purpose {
            Purpose::Take => self.targets.close_drives(a),
            Purpose::Inspect | Purpose::DryRun => self.targets.hang_up(a),
        }
        self.step = Step::Over;
        self.result = Some(Ok(OpenedVolume {
            members,
            engine: self.engine,
            fallback: self.fallback,
            generation,
            statuses,
            topology,
            outcome,
            steps: StepTimes {
                connect: self.steps.connect,
                save: self.steps.save + steps.save,
                ..steps
            },
            lease_ms: self.config.lease.lease_ms(self.engine),
        }));
        Ok(())
    }

    /// The error that a lost or failing target causes at this step.
    fn call_failed(&self, server: usize, source: CallFailure) -> VolumeOpenError {
        let doing = match (&self.step, &self.driver) {
            (Step::Relabeling { work, .. }, _) => {
                work.next().as_ref().map_or(labels::WRITING, labels::doing)
            }
            (Step::Saving { .. }, _) => return VolumeOpenError::Save { server, source },
            (Step::Recovering, Some(driver)) => driver.phase().doing(),
            (Step::Status { .. }, _) => Phase::Ask.doing(),
            _ => labels::READING,
        };
        VolumeOpenError::Call { server, doing, source }
    }

    /// The attempt has failed. A volume that may have been claimed is released.
    pub(super) fn fail(&mut self, error: VolumeOpenError, now: u64, a: &mut impl Associations) {
        self.targets.forget();
        let driver = self.driver.as_ref().filter(|_| self.config.purpose == Purpose::Take);
        if let (Some(driver), Some(members)) = (driver, &self.members) {
            let generation = driver.opening().generation();
            self.events.push_back(OpeningEvent::Releases { generation });
            let release = release_command(members.head.volume, false);
            for (server, controller) in members.controllers.iter().enumerate() {
                if controller.extension.is_some() {
                    let to = (server, ControlQueue::Admin);
                    // A target that can't get a command notices the end when the connection closes.
                    let _ = self.targets.ask(a, to, release, Data::None, Question::Release, now);
                }
            }
        }
        self.step = Step::Releasing(error);
    }

    /// The volume is being released: continues once every reachable target has answered.
    pub(super) fn released(&mut self, now: u64, a: &mut impl Associations) {
        while self.targets.answer(a).is_some() {}
        self.targets.forget_lost(a);
        if self.targets.is_owed() {
            return;
        }
        self.targets.hang_up(a);
        let Step::Releasing(error) = core::mem::replace(&mut self.step, Step::Over) else { return };
        match self.wait_for(&error, now) {
            Some(until) => self.step = Step::Waiting { until },
            None => self.result = Some(Err(error)),
        }
    }

    /// The time at which an owned volume is requested again, ns (T25); `None` if it is not.
    fn wait_for(&mut self, error: &VolumeOpenError, now: u64) -> Option<u64> {
        let VolumeOpenError::Opening(OpeningError::Claim(ClaimError::Owned {
            target,
            owner,
            lease_left_ms,
        })) = error
        else {
            return None;
        };
        let left = self.config.wait.for_ns.saturating_sub(now.saturating_sub(self.began));
        if left == 0 {
            return None;
        }
        if self
            .reported
            .is_none_or(|reported| now.saturating_sub(reported) >= self.config.wait.report_ns)
        {
            self.reported = Some(now);
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
    fn note_progress(&mut self) {
        let current = self.driver.as_ref().map(RecoveryDriver::progress);
        if let (true, Some(progress)) = (current != self.progress, current) {
            self.events.push_back(OpeningEvent::Progress(progress));
        }
        self.progress = current;
    }
}

fn label_failed(server: usize, doing: &'static str, source: CallFailure) -> VolumeOpenError {
    VolumeOpenError::Call { server, doing, source }
}

fn status_failed(server: usize, source: CallFailure) -> VolumeOpenError {
    VolumeOpenError::Call { server, doing: Phase::Ask.doing(), source }
}

fn save_failed(server: usize, source: CallFailure) -> VolumeOpenError {
    VolumeOpenError::Save { server, source }
}

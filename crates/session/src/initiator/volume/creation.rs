//! Volume creation: checks everything first, then makes the log partitions, then writes the labels.
//!
//! ```text
//! attaching → reading labels → reading content → reading old statuses → making partitions
//!           → counting slots → reading labels again → writing labels → releasing
//!           → dropping old volumes → ended
//!
//! making partitions → dropping an old volume → making partitions: a log is full, or refuses
//!
//! dropping an old volume: claim it → its target forgets it
//! ```
//!
//! An *old volume* is a volume to which some of the drives belonged before.
//!
//! A drive without a label may hold something else, such as a file system
//! ([`ForeignContent`](foreign_content::ForeignContent)). Such a drive is refused unless the caller
//! gives up its content. Then its signatures are erased before and after the labels are written.
//!
//! The old volumes keep their partitions until the new labels are written. So a crash leaves the
//! old volume or the new one, or, between two labels, drives that make no volume. There are two
//! exceptions: a log has no space beside the old volume, or the old volume waits for recovery
//! there. Then the old volume is dropped from that log first. A crash or a failure after that
//! leaves the old volume with a lost log.
//!
//! A creation that cannot succeed should leave the old volume its log. So the checks that need no
//! log come before the first claim. Where a log is full, an old volume is dropped first only if, by
//! the numbers in the target's refusal, that may make enough space. The space may still be too
//! small, because the free bytes may not be adjacent. A volume that keeps its drives guarded is
//! dropped first in any case: the space is not known until that volume is dropped.
//!
//! An old volume whose log is older than its labels is not dropped first: the claim would make that
//! log count as the newest (trap T24). Where it takes the space, the creation is refused.
//!
//! Only its owner may drop a volume, so an old volume is claimed first (trap T18). No owner is
//! displaced (trap T8). An old volume that cannot be dropped stays in the log: the new volume does
//! not depend on it.
//!
//! The program drives a creation like a [`VolumeOpening`](super::opening::VolumeOpening). A
//! creation has no deadline of its own. If it fails after partitions were made, it asks the targets
//! to forget the new volume.

mod config;
mod drives;
pub mod foreign_content;
mod new_volume;
mod old_volumes;

use alloc::collections::VecDeque;
use alloc::vec::Vec;

use riopipe_order::attribute::VolumeId;
use riopipe_order::engine::EngineKind;

pub use self::config::VolumeCreationConfig;
use self::drives::Drives;
use self::old_volumes::{Dropping, OldState, OldVolume};
use super::calls::{Associations, TargetAnswer, Targets};
use super::error::{CallFailure, Nonsense, VolumeCreateError};
use super::labels;
use super::members::{member_orders, namespaces};
use crate::engine_choice::{Choice, Lacking, choose_for_new};
use crate::label::Label;
use crate::label_work::{self, LabelIo};
use crate::wire::VolumeStatus;

/// The purpose of a question to a target.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Question {
    /// To read the label of this member.
    Label(usize),
    /// To read the next blocks of this member's drive, to find foreign content.
    Content(usize),
    /// To read the state of an old volume on a target. The number is an index of `old_volumes`.
    OldStatus(usize),
    /// To claim an old volume on a target. The number is an index of `old_volumes`.
    ClaimOld(usize),
    /// To make the target forget a volume. The status of the answer does not matter.
    Forget,
    /// To claim the new volume, which makes the partitions.
    Claim,
    /// To list the volumes in a log that has no space.
    Directory,
    /// To read the number of slots of the new partitions.
    Status,
    /// A step of writing a label.
    WriteLabel,
    /// To release the new volume.
    Release,
}

/// The step of the creation that runs.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Step {
    /// The associations with the targets are being set up.
    Attaching,
    /// The labels are read, to check whether the drives belong to a volume.
    ReadingLabels,
    /// The first and the last blocks of the drives are read, to find foreign content.
    ReadingContent,
    /// The targets of drives that belong to a volume are asked whether it has an owner.
    ReadingOldStatuses,
    /// The targets forget old volumes whose log is lost. Those cannot be claimed.
    ForgettingLost,
    /// The targets make partitions in their logs, one after the other, from this one on.
    MakingPartitions(usize),
    /// A target that has no space in its log is asked for the volumes in it, for the error.
    ListingLog { target: usize, is_asked: bool },
    /// The targets are asked for the number of slots of the new partitions.
    CountingSlots,
    /// The labels are read again, because another initiator may have made a volume of the same
    /// drives after the first reading. Once the partitions are made, no other initiator can do
    /// that.
    ReadingLabelsAgain,
    /// The labels are being written.
    WritingLabels,
    /// The targets release the new volume.
    Releasing,
    /// The next old volume is chosen and dropped.
    DroppingOld(Dropping),
    /// That old volume is being claimed.
    ClaimingOld(Dropping),
    /// The targets on which it was claimed forget it.
    ForgettingOld(Dropping),
    /// Creation has failed, and the targets forget the new volume.
    Failing,
    /// The result is known.
    Ended,
}

/// The creation of a volume; see the [module](self).
#[derive(Debug)]
pub struct VolumeCreation {
    config: VolumeCreationConfig,
    targets: Targets<Question>,
    step: Step,
    /// The drives, once all targets are attached.
    drives: Option<Drives>,
    /// The label of member 0 of the new volume, once all targets are attached.
    label: Option<Label>,
    /// The old volumes, all of which are given up.
    given_up: Vec<VolumeId>,
    /// The same volumes, with one item for each target on which they have drives.
    old_volumes: Vec<OldVolume>,
    /// The steps of writing labels that are not done.
    label_writes: VecDeque<LabelIo>,
    /// Whether the first of these steps has been sent.
    write_in_flight: bool,
    /// Whether partitions may have been made on some target. If the creation fails, the targets
    /// must then forget them.
    may_have_partitions: bool,
    /// The reason why the engine is not `rio`, until the caller takes it.
    fallback: Option<Lacking>,
    /// The error to be reported when the targets have forgotten the new volume, or when a target has
    /// listed the volumes in its log.
    error: Option<VolumeCreateError>,
    result: Option<Result<Label, VolumeCreateError>>,
}

impl VolumeCreation {
    /// A creation with these options, which [`advance`](Self::advance) begins.
    ///
    /// # Errors
    /// The options make no volume. No target has got a command.
    pub fn new(config: VolumeCreationConfig) -> Result<Self, VolumeCreateError> {
        config.check()?;
        Ok(Self {
            targets: Targets::new(config.targets),
            step: Step::Attaching,
            drives: None,
            label: None,
            given_up: Vec::new(),
            old_volumes: Vec::new(),
            label_writes: VecDeque::new(),
            write_in_flight: false,
            may_have_partitions: false,
            fallback: None,
            error: None,
            result: None,
            config,
        })
    }

    /// The reason why the volume is made for engine `sync`, if the caller did not request that
    /// engine. It is returned once (trap T17).
    pub fn take_fallback(&mut self) -> Option<Lacking> {
        self.fallback.take()
    }

    /// The result, once: the label of member 0.
    pub fn take_result(&mut self) -> Option<Result<Label, VolumeCreateError>> {
        self.result.take()
    }

    /// Continues with the answers that have arrived.
    pub fn advance(&mut self, now: u64, associations: &mut impl Associations) {
        match self.run_steps(now, associations) {
            // A target that fails now keeps its partitions of an old volume. That does not affect
            // the new volume.
            Err(_) if self.is_new_volume_made() => self.end_with_label(associations),
            Err(error) => self.clean_up_after_failure(error, now, associations),
            Ok(()) => {}
        }
        if self.step == Step::Failing {
            // The content of the answers does not matter.
            while self.targets.next_answer(associations).is_some() {}
            self.targets.drop_answers_of_lost_targets(associations);
            if !self.targets.has_pending_answers() {
                self.targets.close_associations(associations);
                self.step = Step::Ended;
                self.result = self.error.take().map(Err);
            }
        }
    }

    /// Handles failures and answers of targets. Then runs steps until one must wait for a target.
    fn run_steps(
        &mut self,
        now: u64,
        associations: &mut impl Associations,
    ) -> Result<(), VolumeCreateError> {
        if matches!(self.step, Step::Failing | Step::Ended) {
            // The creation has failed or has its result already.
            return Ok(());
        }
        if self.step != Step::Attaching
            && let Some((target, error)) = self.targets.first_lost(associations)
        {
            return Err(self.call_error(target, error.into()));
        }
        if let Some((target, error)) = self.targets.first_failed_drives_queue(associations) {
            return Err(match self.step {
                Step::ReadingLabels => VolumeCreateError::Attach(alloc::vec![(target, error)]),
                _ => self.call_error(target, error.into()),
            });
        }
        while let Some(answer) = self.targets.next_answer(associations) {
            self.on_answer(answer)?;
        }
        while self.run_step(now, associations)? {}
        Ok(())
    }

    /// Handles the answer to a question.
    fn on_answer(&mut self, answer: TargetAnswer<Question>) -> Result<(), VolumeCreateError> {
        let TargetAnswer { target, purpose: question, cqe, page } = answer;
        let status = cqe.status();
        match question {
            // The status of these answers is no error of the creation.
            Question::Forget => return Ok(()),
            Question::ClaimOld(at) => {
                self.on_old_claimed(at, status.is_ok());
                return Ok(());
            }
            Question::Claim => return self.on_partitions_answer(target, cqe),
            Question::Directory => {
                return self.log_too_small(cqe, &page).map_or(Ok(()), Err);
            }
            _ if !status.is_ok() => {
                return Err(self.call_error(target, CallFailure::Status(status)));
            }
            Question::Label(member) => {
                // Only the label itself matters here, so the identity of the drive is left out.
                let label = label_work::found([0; 16], None, &page, self.config.crc32c).label;
                if let Some(drives) = &mut self.drives {
                    drives.set_label(member, label);
                }
            }
            Question::Content(member) => {
                if let Some(drives) = &mut self.drives {
                    drives.add_content(member, &page);
                }
            }
            Question::OldStatus(at) => {
                let status = self.decode_status(target, &page)?;
                self.on_old_status(at, status)?;
            }
            Question::Status => {
                let slots = self.decode_status(target, &page)?.slots;
                self.config.check_slots_suffice(target, slots)?;
            }
            Question::WriteLabel => {
                self.write_in_flight = false;
                self.label_writes.pop_front();
            }
            Question::Release => {}
        }
        Ok(())
    }

    /// Runs the present step as far as possible. Returns whether the next call may do more.
    fn run_step(
        &mut self,
        now: u64,
        associations: &mut impl Associations,
    ) -> Result<bool, VolumeCreateError> {
        match self.step {
            Step::Attaching => return self.continue_attaching(now, associations),
            Step::ReadingLabels => {
                if !self.read_labels(now, associations)? {
                    return Ok(false);
                }
                self.check_labels_may_go()?;
                self.step = Step::ReadingContent;
            }
            Step::ReadingContent => {
                if !self.read_content(now, associations)? {
                    return Ok(false);
                }
                self.check_content_may_go()?;
                self.begin_old_statuses(now, associations)?;
                self.step = Step::ReadingOldStatuses;
            }
            Step::ReadingOldStatuses if !self.targets.has_pending_answers() => {
                self.send_forget_old(OldState::Lost, now, associations);
                self.step = Step::ForgettingLost;
            }
            Step::ForgettingLost if !self.targets.has_pending_answers() => {
                self.step = Step::MakingPartitions(0)
            }
            Step::DroppingOld(dropping) => {
                let has_claimed = self.claim_next_old(dropping, now, associations);
                match dropping {
                    _ if has_claimed => self.step = Step::ClaimingOld(dropping),
                    Dropping::First { target, .. } => self.step = Step::MakingPartitions(target),
                    Dropping::All => self.end_with_label(associations),
                }
            }
            Step::ClaimingOld(dropping) if !self.targets.has_pending_answers() => {
                self.send_forget_old(OldState::Claimed, now, associations);
                self.step = Step::ForgettingOld(dropping);
            }
            Step::ForgettingOld(dropping) if !self.targets.has_pending_answers() => {
                self.step = match dropping {
                    Dropping::First { target, .. } => Step::MakingPartitions(target),
                    Dropping::All => Step::DroppingOld(dropping),
                };
            }
            Step::MakingPartitions(target) if !self.targets.has_pending_answers() => {
                let mut with_extension = self.targets_with_extension().into_iter();
                if let Some(target) = with_extension.find(|next| *next >= target) {
                    self.make_partitions(target, now, associations)?;
                    self.step = Step::MakingPartitions(target + 1);
                } else {
                    self.count_slots(now, associations)?;
                    self.step = Step::CountingSlots;
                }
            }
            Step::ListingLog { target, is_asked: false } => {
                return self.list_log(target, now, associations);
            }
            Step::CountingSlots if !self.targets.has_pending_answers() => {
                if let Some(drives) = &mut self.drives {
                    drives.clear_labels();
                }
                self.step = Step::ReadingLabelsAgain;
            }
            Step::ReadingLabelsAgain => {
                if !self.read_labels(now, associations)? {
                    return Ok(false);
                }
                self.check_drives_still_free()?;
                self.plan_label_writes();
                self.step = Step::WritingLabels;
            }
            Step::WritingLabels => {
                if !self.write_labels(now, associations)? {
                    return Ok(false);
                }
                self.send_release(now, associations)?;
                self.step = Step::Releasing;
            }
            // While the new volume has an owner, no other volume of its drives can be claimed.
            Step::Releasing if !self.targets.has_pending_answers() => {
                self.step = Step::DroppingOld(Dropping::All)
            }
            _ => return Ok(false),
        }
        Ok(true)
    }

    /// Once all targets are attached, checks their drives, chooses the engine, and opens the drives
    /// queues. Returns whether that is done.
    fn continue_attaching(
        &mut self,
        now: u64,
        associations: &mut impl Associations,
    ) -> Result<bool, VolumeCreateError> {
        let Some(attached) = self.targets.attach_results(associations) else { return Ok(false) };
        let controllers = attached.map_err(VolumeCreateError::Attach)?;
        let namespaces = namespaces(&self.config.places, &controllers)
            .map_err(|member| VolumeCreateError::NoNamespace { member })?;
        self.config.check_drives(&namespaces)?;
        let extensions = controllers.iter().map(|controller| controller.extension);
        let orders = member_orders(&self.config.places, &controllers);
        let Choice { engine, fallback } = choose_for_new(self.config.engine, extensions, &orders)
            .map_err(|lacking| {
            // An engine can be refused only if the caller insists on it.
            let engine = self.config.engine.unwrap_or(EngineKind::PREFERRED);
            VolumeCreateError::Engine { engine, lacking }
        })?;
        self.fallback = fallback;
        let drives = Drives::new(controllers, namespaces, &self.config.places);
        self.config.check_prepare_area(engine)?;
        self.label = Some(self.config.label(&drives, engine)?);
        self.drives = Some(drives);
        if self.config.slots != 0 && self.keeps_log() {
            self.config.check_requested_slots()?;
        }
        self.targets.open_drives_queues(associations, now);
        self.step = Step::ReadingLabels;
        Ok(true)
    }

    /// Begins to undo the creation after it has failed with `error`: the targets forget the new
    /// volume if they may have partitions of it. [`advance`](Self::advance) then reports the error.
    fn clean_up_after_failure(
        &mut self,
        error: VolumeCreateError,
        now: u64,
        associations: &mut impl Associations,
    ) {
        self.targets.drop_pending_answers();
        // Once every label is written, the new volume exists, and keeps its partitions.
        let is_labelled = matches!(self.step, Step::Releasing);
        if self.may_have_partitions && !is_labelled {
            self.send_forget(now, associations);
        }
        self.error = Some(error);
        self.step = Step::Failing;
    }

    /// Whether the new volume is made, and only old volumes have still to be dropped.
    fn is_new_volume_made(&self) -> bool {
        matches!(
            self.step,
            Step::DroppingOld(Dropping::All)
                | Step::ClaimingOld(Dropping::All)
                | Step::ForgettingOld(Dropping::All)
        )
    }

    /// Ends the creation with the new label as its result.
    fn end_with_label(&mut self, associations: &mut impl Associations) {
        self.targets.drop_pending_answers();
        self.targets.close_associations(associations);
        self.step = Step::Ended;
        self.result = self.label.take().map(Ok);
    }

    /// Decodes the volume status that a target has sent.
    fn decode_status(&self, target: usize, page: &[u8]) -> Result<VolumeStatus, VolumeCreateError> {
        let nonsense = CallFailure::Nonsense(Nonsense::VolumeStatus);
        VolumeStatus::decode(page).ok_or_else(|| self.call_error(target, nonsense))
    }

    /// The error that a lost or failing target causes at this step.
    fn call_error(&self, target: usize, source: CallFailure) -> VolumeCreateError {
        let doing = match self.step {
            Step::Attaching | Step::ReadingLabels | Step::ReadingLabelsAgain => labels::READING,
            Step::ReadingContent => READING_CONTENT,
            Step::ReadingOldStatuses | Step::ForgettingLost => ASKING_OLD,
            Step::DroppingOld(_) | Step::ClaimingOld(_) | Step::ForgettingOld(_) => DROPPING_OLD,
            Step::MakingPartitions(_) | Step::ListingLog { .. } => MAKING_PARTITIONS,
            Step::CountingSlots => ASKING,
            Step::WritingLabels => labels::WRITING,
            Step::Releasing | Step::Failing | Step::Ended => RELEASING,
        };
        failed_call(target, doing, source)
    }

    /// The targets that have the extension.
    fn targets_with_extension(&self) -> Vec<usize> {
        (0..self.targets.len()).filter(|target| self.has_extension(*target)).collect()
    }

    /// Whether a target has the extension.
    fn has_extension(&self, target: usize) -> bool {
        let controller = self.drives.as_ref().and_then(|drives| drives.controllers.get(target));
        controller.is_some_and(|controller| controller.extension.is_some())
    }
}

const ASKING: &str = "asking for the volume's state";
const ASKING_OLD: &str = "asking for the old volume's state";
const DROPPING_OLD: &str = "dropping the old volume from its log";
const MAKING_PARTITIONS: &str = "making space in its log";
const READING_CONTENT: &str = "reading the content of the drive";
const RELEASING: &str = "releasing the volume";

fn failed_call(target: usize, doing: &'static str, source: CallFailure) -> VolumeCreateError {
    VolumeCreateError::Call { target, doing, source }
}

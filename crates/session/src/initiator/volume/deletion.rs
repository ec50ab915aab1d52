//! Deletion of a volume: its logs are freed, and its labels are erased.
//!
//! ```text
//! surveying → reading statuses → claiming → forgetting → reattaching → erasing → ended
//!           → reading statuses → claiming → erasing → forgetting → ended: displaces an owner
//! ```
//!
//! The volume is chosen by its name, or by its id, among those that a [survey](super::survey) of the
//! targets finds. The logs come first: a crash then leaves labels, by which the volume is found and
//! deleted again. A volume whose log was forgotten cannot be opened (trap T19).
//!
//! An owner is displaced only if the caller demands it, like by an opening that takes over (trap
//! T8). Then the labels come first, because a target takes no write from the last owner of a volume
//! that it has forgotten. A crash leaves partitions of a volume without a label, which is deleted by
//! its id. Without a displaced owner, the volume is first claimed on all targets, so that no other
//! program opens it while the targets forget it one after the other. If one of them has an owner by
//! then, nothing is forgotten. The labels are erased over new associations. A volume that cannot be
//! claimed, for example because its log is lost, is forgotten without a claim.
//!
//! Only labels count that were written for their drives, not copies of labels. Each label is read
//! again directly before it is erased, because another program may have made a volume of the drive
//! since the survey.
//!
//! The same commands erase the labels of single drives ([`DeletionSubject::Labels`]). Then no log is
//! touched.

use alloc::collections::VecDeque;
use alloc::string::String;
use alloc::vec::Vec;

use riopipe_nvme::digest::Crc32c;
use riopipe_order::attribute::{Member, VolumeId};
use riopipe_order::log_region::MemberNamespace;

use super::calls::{Associations, TargetAnswer, Targets};
use super::error::{CallFailure, Nonsense};
use super::labels;
use super::members::MemberPlace;
use super::survey::{FoundVolume, Survey, SurveyError, VolumeSurvey};
use crate::claim;
use crate::drive_identity::RECORD_BLOCK;
use crate::initiator::queue_pair::Data;
use crate::label::{LABEL_LEN, Label, LabelError};
use crate::label_work::LabelIo;
use crate::wire::{Claim, VolumeStatus, claim_command, discard_command, release_command, status};

/// The object of a deletion.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum DeletionSubject {
    /// The volume with this name, or with this id as hexadecimal digits.
    Volume(String),
    /// The labels of the drives at these places. The volume to which they belong is not usable
    /// after that.
    Labels(Vec<MemberPlace>),
}

/// The options of a deletion.
#[derive(Clone, Debug)]
pub struct VolumeDeletionConfig {
    /// The object of the deletion.
    pub subject: DeletionSubject,
    /// The number of targets that are searched.
    pub targets: usize,
    /// Whether an owner is displaced, and members may be missing. For labels: whether the volume may
    /// be whole, or have partitions on the targets.
    pub force: bool,
    /// CRC32C, for the labels.
    pub crc32c: Crc32c,
}

/// The result of a deletion.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Deleted {
    /// The id of the volume; of labels, that of the last volume.
    pub id: VolumeId,
    /// Its name; empty if no label was found.
    pub name: String,
    /// The drives whose labels were erased.
    pub drives: Vec<MemberPlace>,
    /// The targets whose logs have forgotten the volume, each with the bytes that became free.
    pub logs: Vec<(usize, u64)>,
    /// The members whose drives were not found.
    pub missing: Vec<usize>,
}

/// Why a volume could not be deleted.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum VolumeDeleteError {
    /// The targets could not be searched.
    #[error(transparent)]
    Survey(#[from] SurveyError),
    /// No volume with this name or id was found.
    #[error("no volume \"{0}\" on these targets")]
    Unknown(String),
    /// Several volumes have this name.
    #[error("several volumes have the name \"{0}\"")]
    Ambiguous(String),
    /// Members of the volume are not on these targets, or the volume has no label there.
    #[error("members of the volume are not on these targets")]
    Missing {
        /// The members that were not found; none if no label was found.
        members: Vec<usize>,
    },
    /// The volume has an owner.
    #[error("the volume is owned by {owner}")]
    Owned {
        /// The target.
        target: usize,
        /// The owner's host NQN.
        owner: String,
    },
    /// A drive whose label is to be erased has none.
    #[error("drive {0} has no label")]
    NoLabel(usize),
    /// A target has no such namespace.
    #[error("drive {0}: the target has no such namespace")]
    NoNamespace(usize),
    /// A drive whose label is to be erased is part of a volume that is there.
    #[error("drive {drive} is a member of volume \"{volume}\"")]
    InUse {
        /// The drive.
        drive: usize,
        /// The volume.
        volume: String,
    },
    /// A drive whose label is to be erased has a label that can't be read, so it may belong to a
    /// volume.
    #[error("drive {drive} has {error}")]
    UnreadableLabel {
        /// The drive.
        drive: usize,
        /// The cause.
        error: LabelError,
    },
    /// Labels of the volume list different members, so one of them is forged: that of the drive
    /// here, or that of another drive.
    #[error("labels of the volume contradict each other")]
    Contradiction(MemberPlace),
    /// Another program has written the label of a drive since it was read.
    #[error("the label of a drive was changed meanwhile")]
    Changed(MemberPlace),
    /// A target refused or failed.
    #[error("target {target}: {doing} failed: {source}")]
    Call {
        /// The target.
        target: usize,
        /// The action that failed.
        doing: &'static str,
        /// The error.
        source: CallFailure,
    },
}

/// The purpose of a question to a target.
#[derive(Clone, Copy, Debug)]
enum Question {
    Status,
    Claim,
    Forget,
    Erase,
}

/// The step that runs.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Step {
    Surveying,
    ReadingStatuses,
    Claiming,
    Forgetting,
    Reattaching,
    Erasing,
    Ended,
}

/// The deletion of a volume; see the [module](self).
#[derive(Debug)]
pub struct VolumeDeletion {
    config: VolumeDeletionConfig,
    survey: VolumeSurvey,
    targets: Targets<Question>,
    step: Step,
    found: Option<Survey>,
    /// The state of the volume on each target that has the extension.
    statuses: Vec<(usize, VolumeStatus)>,
    deleted: Deleted,
    writes: VecDeque<LabelIo>,
    write_in_flight: bool,
    /// Whether an owner is displaced.
    displaces: bool,
    /// The targets on which the deletion is the owner of the volume.
    claimed: Vec<usize>,
    /// A target that could not forget the volume because a connection carries a stream of it.
    busy_target: Option<usize>,
    /// When to give up if that stays so, ns.
    give_up_at: Option<u64>,
    result: Option<Result<Deleted, VolumeDeleteError>>,
}

impl VolumeDeletion {
    /// A deletion with these options, which [`advance`](Self::advance) begins.
    #[must_use]
    pub fn new(config: VolumeDeletionConfig) -> Self {
        Self {
            survey: VolumeSurvey::new(config.targets, config.crc32c),
            targets: Targets::new(config.targets),
            step: Step::Surveying,
            found: None,
            statuses: Vec::new(),
            deleted: Deleted::default(),
            writes: VecDeque::new(),
            write_in_flight: false,
            displaces: false,
            claimed: Vec::new(),
            busy_target: None,
            give_up_at: None,
            result: None,
            config,
        }
    }

    /// The result, once.
    pub fn take_result(&mut self) -> Option<Result<Deleted, VolumeDeleteError>> {
        self.result.take()
    }

    /// Continues with the answers that have arrived.
    pub fn advance(&mut self, now: u64, associations: &mut impl Associations) {
        if self.step == Step::Ended {
            return;
        }
        let result = match self.run(now, associations) {
            Ok(false) => return,
            Ok(true) => Ok(core::mem::take(&mut self.deleted)),
            Err(error) => Err(error),
        };
        self.step = Step::Ended;
        self.targets.close_associations(associations);
        self.result = Some(result);
    }

    /// Runs as far as possible. Returns whether all is done.
    fn run(
        &mut self,
        now: u64,
        associations: &mut impl Associations,
    ) -> Result<bool, VolumeDeleteError> {
        if self.step == Step::Surveying {
            let Some(survey) = self.survey.advance_within(now, associations) else {
                return Ok(false);
            };
            self.found = Some(survey?);
            self.begin(now, associations)?;
        }
        let lost = self.targets.first_lost(associations);
        let failed = lost.or_else(|| self.targets.first_failed_drives_queue(associations));
        if let Some((target, error)) = failed {
            return Err(self.call_error(target, error.into()));
        }
        while let Some(answer) = self.targets.next_answer(associations) {
            self.on_answer(answer)?;
        }
        loop {
            match self.step {
                Step::Erasing => {
                    if !self.erase(now, associations)? {
                        return Ok(false);
                    }
                    if !self.displaces {
                        return Ok(true);
                    }
                    self.send_forget(now, associations)?;
                    self.step = Step::Forgetting;
                }
                _ if self.targets.has_pending_answers() => return Ok(false),
                Step::ReadingStatuses => {
                    self.check_owner()?;
                    self.send_claims(now, associations)?;
                    self.step = Step::Claiming;
                }
                Step::Claiming if self.displaces => self.step = Step::Erasing,
                Step::Claiming => {
                    self.send_forget(now, associations)?;
                    self.step = Step::Forgetting;
                }
                Step::Forgetting if self.busy_target.is_some() => {
                    let target = self.busy_target.take().unwrap_or_default();
                    if now >= *self.give_up_at.get_or_insert(now.saturating_add(BUSY_MAX_NS)) {
                        let source = CallFailure::Status(status::STREAM_BUSY);
                        return Err(self.call_error(target, source));
                    }
                    self.send_forget(now, associations)?;
                }
                Step::Forgetting if self.displaces => return Ok(true),
                Step::Forgetting if self.claimed.is_empty() => self.step = Step::Erasing,
                Step::Forgetting => {
                    // A target takes no write from the last owner of a volume that it has forgotten.
                    self.targets.replace_associations(associations);
                    self.step = Step::Reattaching;
                }
                Step::Reattaching => {
                    let Some(attached) = self.targets.attach_results(associations) else {
                        return Ok(false);
                    };
                    attached.map_err(SurveyError::Attach)?;
                    self.targets.open_drives_queues(associations, now);
                    self.step = Step::Erasing;
                }
                Step::Surveying | Step::Ended => return Ok(false),
            }
        }
    }

    /// Chooses what is deleted, and asks the targets for the state of the volume.
    fn begin(
        &mut self,
        now: u64,
        associations: &mut impl Associations,
    ) -> Result<(), VolumeDeleteError> {
        let Some(survey) = &self.found else { return Ok(()) };
        match &self.config.subject {
            DeletionSubject::Volume(wanted) => {
                let volume = choose(survey, wanted)?;
                if let Some(drive) = survey.contradiction(volume.id) {
                    return Err(VolumeDeleteError::Contradiction(drive.place));
                }
                let missing = volume.missing();
                if !self.config.force && (volume.label.is_none() || !missing.is_empty()) {
                    return Err(VolumeDeleteError::Missing { members: missing });
                }
                self.deleted = Deleted {
                    id: volume.id,
                    name: volume.label.map(|label| label.name.clone()).unwrap_or_default(),
                    drives: survey.labelled(volume.id).map(|drive| drive.place).collect(),
                    logs: Vec::new(),
                    missing,
                };
                for (target, controller) in survey.controllers.iter().enumerate() {
                    if controller.extension.is_some() {
                        let purpose = Question::Status;
                        self.targets
                            .ask_status(associations, target, volume.id, purpose, now)
                            .map_err(|source| call(target, ASKING, source))?;
                    }
                }
                self.step = Step::ReadingStatuses;
            }
            DeletionSubject::Labels(places) => {
                for (number, place) in places.iter().enumerate() {
                    let drive = survey
                        .drives
                        .iter()
                        .find(|drive| drive.place == *place)
                        .ok_or(VolumeDeleteError::NoNamespace(number))?;
                    match &drive.label {
                        Err(LabelError::Blank) => return Err(VolumeDeleteError::NoLabel(number)),
                        Err(error) if !self.config.force => {
                            let (drive, error) = (number, *error);
                            return Err(VolumeDeleteError::UnreadableLabel { drive, error });
                        }
                        Err(_) => {}
                        Ok(label) => {
                            let has_log = !survey.volume(label.volume).logs.is_empty();
                            let is_left_over = survey.is_left_over(drive)
                                && (!has_log || drive.has_copied_label());
                            if !self.config.force && !is_left_over {
                                let volume = label.name.clone();
                                return Err(VolumeDeleteError::InUse { drive: number, volume });
                            }
                            self.deleted.id = label.volume;
                            self.deleted.name.clone_from(&label.name);
                        }
                    }
                }
                self.deleted.drives.clone_from(places);
                self.step = Step::Forgetting;
            }
        }
        // The reserved block, too: a target writes it only on a drive that has a label.
        let blocks = [labels::COPIES, RECORD_BLOCK..RECORD_BLOCK + 1];
        for drive in 0..self.deleted.drives.len() {
            self.writes.push_back(LabelIo::Read { member: drive });
            self.writes.extend(labels::zeroes(drive, &blocks));
        }
        Ok(())
    }

    fn on_answer(&mut self, answer: TargetAnswer<Question>) -> Result<(), VolumeDeleteError> {
        let TargetAnswer { target, purpose, cqe, page } = answer;
        let answer = cqe.status();
        match purpose {
            // Another deletion was faster, or the owner has it forgotten.
            Question::Forget if answer.is(status::UNKNOWN_VOLUME) => Ok(()),
            // The target now ends the connection of the old owner that carries the stream.
            Question::Forget if answer.is(status::STREAM_BUSY) => {
                self.busy_target = Some(target);
                Ok(())
            }
            Question::Forget | Question::Claim if answer.is(status::OWNED) => {
                Err(VolumeDeleteError::Owned { target, owner: String::new() })
            }
            // For example, a namespace of the volume is gone. The target then forgets the volume
            // without a claim if it has no owner.
            Question::Claim if !answer.is_ok() && !self.displaces => Ok(()),
            _ if !answer.is_ok() => Err(self.call_error(target, CallFailure::Status(answer))),
            Question::Status => {
                let nonsense = CallFailure::Nonsense(Nonsense::VolumeStatus);
                let status =
                    VolumeStatus::decode(&page).ok_or_else(|| call(target, ASKING, nonsense))?;
                self.statuses.push((target, status));
                Ok(())
            }
            Question::Forget => {
                let logs = self.found.iter().flat_map(|survey| survey.volume(self.deleted.id).logs);
                let bytes = logs.filter(|(at, _)| *at == target).map(|(_, log)| log.bytes);
                let bytes = bytes.fold(0, u64::saturating_add);
                // The answers arrive in any order. The result is in the order of the targets.
                let at = self.deleted.logs.partition_point(|(before, _)| *before < target);
                self.deleted.logs.insert(at, (target, bytes));
                Ok(())
            }
            Question::Claim => {
                self.claimed.push(target);
                Ok(())
            }
            Question::Erase => {
                self.write_in_flight = false;
                match self.writes.pop_front() {
                    Some(LabelIo::Read { member }) => self.check_unchanged(member, &page),
                    _ => Ok(()),
                }
            }
        }
    }

    /// Checks that the label of a drive is still the one to be erased; `drive` is its number among
    /// these. If the label is gone, nothing is erased there.
    fn check_unchanged(&mut self, drive: usize, page: &[u8]) -> Result<(), VolumeDeleteError> {
        let place = self.deleted.drives[drive];
        let (first, second) = page.split_at(page.len().min(LABEL_LEN));
        let crc32c = self.config.crc32c;
        let now = Label::newest([first, second], crc32c);
        if matches!(now, Err(LabelError::Blank)) {
            self.writes.retain(|io| labels::member_of(io) != drive);
            return Ok(());
        }
        let is_same = match &self.config.subject {
            // A creation writes one copy after the other, so both are checked.
            DeletionSubject::Volume(_) => {
                let copies = [first, second].map(|copy| Label::decode(copy, crc32c));
                let is_of_other = |copy: &Label| copy.volume != self.deleted.id;
                now.is_ok() && !copies.iter().flatten().any(is_of_other)
            }
            DeletionSubject::Labels(_) => {
                let mut seen = self.found.iter().flat_map(|survey| &survey.drives);
                seen.any(|seen| seen.place == place && seen.label == now)
            }
        };
        if is_same { Ok(()) } else { Err(VolumeDeleteError::Changed(place)) }
    }

    fn check_owner(&self) -> Result<(), VolumeDeleteError> {
        let owned = self.statuses.iter().find(|(_, status)| status.owned);
        match owned {
            Some((target, status)) if !self.config.force => {
                Err(VolumeDeleteError::Owned { target: *target, owner: status.owner.clone() })
            }
            _ => Ok(()),
        }
    }

    /// Claims the volume. Where it has an owner, the claim fences that owner; then it is claimed
    /// only there. Else it is claimed wherever that is possible, so that no program opens the volume
    /// while one target after the other forgets it. A log that is older than the labels is not
    /// claimed, because the claim would make it as new as these (trap T24).
    fn send_claims(
        &mut self,
        now: u64,
        associations: &mut impl Associations,
    ) -> Result<(), VolumeDeleteError> {
        let Some(survey) = &self.found else { return Ok(()) };
        let volume = survey.volume(self.deleted.id);
        let of_labels = volume.label.map_or(0, |label| label.generation);
        let of_logs = self.statuses.iter().map(|(_, status)| status.generation).max();
        let generation = of_labels.max(of_logs.unwrap_or(0)).saturating_add(1);
        self.displaces = self.statuses.iter().any(|(_, status)| status.owned);
        let may_claim = |status: &VolumeStatus| {
            let is_usable = status.known && !status.log_lost && !status.unlogged;
            if self.displaces {
                status.owned
            } else {
                is_usable && !claim::is_behind(status, of_labels)
            }
        };
        for (target, status) in self.statuses.iter().filter(|(_, status)| may_claim(status)) {
            let members = members_on(&volume, *target);
            let claim = Claim {
                take_over: self.displaces,
                unlogged: status.unlogged,
                ..Claim::plain(self.deleted.id, generation, status.streams, members)
            };
            let bytes = claim.encode();
            let (sqe, data) = (claim_command(), Data::Bytes(&bytes));
            self.targets
                .ask_admin(associations, *target, sqe, data, Question::Claim, now)
                .map_err(|source| call(*target, CLAIMING, source))?;
        }
        Ok(())
    }

    /// Has every target forget the volume that knows it.
    fn send_forget(
        &mut self,
        now: u64,
        associations: &mut impl Associations,
    ) -> Result<(), VolumeDeleteError> {
        let id = self.deleted.id;
        let is_done = |target: usize| self.deleted.logs.iter().any(|(done, _)| *done == target);
        let known = self.statuses.iter().filter(|(_, status)| status.known);
        for (target, status) in known.filter(|(target, _)| !is_done(*target)) {
            let is_owner = status.owned || self.claimed.contains(target);
            let forget = if is_owner { release_command(id, true) } else { discard_command(id) };
            self.targets
                .ask_admin(associations, *target, forget, Data::None, Question::Forget, now)
                .map_err(|source| call(*target, FORGETTING, source))?;
        }
        Ok(())
    }

    /// Erases the labels, one step after the other. Returns whether that is done.
    fn erase(
        &mut self,
        now: u64,
        associations: &mut impl Associations,
    ) -> Result<bool, VolumeDeleteError> {
        let Some(io) = self.writes.front() else { return Ok(true) };
        let target = self.deleted.drives[labels::member_of(io)].target;
        if !self.write_in_flight && self.targets.is_drives_queue_ready(associations, target) {
            let (places, purpose) = (&self.deleted.drives, Question::Erase);
            labels::send(&mut self.targets, associations, places, io.clone(), purpose, now)
                .map_err(|(target, source)| call(target, ERASING, source))?;
            self.write_in_flight = true;
        }
        Ok(false)
    }

    fn call_error(&self, target: usize, source: CallFailure) -> VolumeDeleteError {
        let doing = match self.step {
            Step::Surveying | Step::ReadingStatuses => ASKING,
            Step::Claiming => CLAIMING,
            Step::Forgetting => FORGETTING,
            Step::Reattaching | Step::Erasing | Step::Ended => ERASING,
        };
        call(target, doing, source)
    }
}

/// For how long a deletion asks again while a connection carries a stream of the volume, ns.
const BUSY_MAX_NS: u64 = 10_000_000_000;

const ASKING: &str = "asking for the volume's state";
const CLAIMING: &str = "taking the volume from its owner";
const FORGETTING: &str = "freeing the volume's log";
const ERASING: &str = "erasing the label";

fn call(target: usize, doing: &'static str, source: CallFailure) -> VolumeDeleteError {
    VolumeDeleteError::Call { target, doing, source }
}

/// The volume with this name or id.
fn choose<'a>(survey: &'a Survey, wanted: &str) -> Result<FoundVolume<'a>, VolumeDeleteError> {
    let volumes = survey.volumes();
    let has_name = |volume: &&FoundVolume<'_>| volume.label.is_some_and(|l| l.name == wanted);
    let has_id = |volume: &&FoundVolume<'_>| {
        let digits = wanted.chars().filter(|digit| *digit != '-');
        digits.eq(alloc::format!("{}", volume.id).chars().filter(|digit| *digit != '-'))
    };
    let mut named = volumes.iter().filter(has_name);
    match (named.next(), named.next()) {
        (Some(volume), None) => Ok(volume.clone()),
        (Some(_), Some(_)) => Err(VolumeDeleteError::Ambiguous(wanted.into())),
        (None, _) => {
            let by_id = volumes.iter().find(has_id).cloned();
            by_id.ok_or_else(|| VolumeDeleteError::Unknown(wanted.into()))
        }
    }
}

/// The members of a volume on a target, as its claim must name them: as the target's log has them,
/// else as the labels.
fn members_on(volume: &FoundVolume<'_>, target: usize) -> Vec<MemberNamespace> {
    if let Some((_, log)) = volume.logs.iter().find(|(at, _)| *at == target) {
        return log.members.clone();
    }
    let drives = volume.members.iter().enumerate();
    let on_target = drives.filter_map(|(member, drive)| {
        let place = drive.as_ref()?.place;
        (place.target == target)
            .then_some(MemberNamespace { member: Member(member as u8), nsid: place.nsid })
    });
    on_target.collect()
}

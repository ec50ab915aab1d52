//! A survey of targets: the labels of all their drives, and the volumes in their logs.
//!
//! ```text
//! attaching → reading labels and directories → ended
//! ```
//!
//! A survey needs no volume: it finds volumes of which members are missing, labels that cannot be
//! read, and partitions of volumes whose labels are gone. It changes nothing.
//!
//! The program drives a survey like a [`VolumeOpening`](super::opening::VolumeOpening).

use alloc::vec::Vec;

use riopipe_nvme::digest::Crc32c;
use riopipe_order::attribute::VolumeId;

use super::calls::{Associations, TargetAnswer, Targets};
use super::error::{CallFailure, Nonsense};
use super::labels;
use super::members::MemberPlace;
use crate::initiator::association::AssociationError;
use crate::initiator::attach::{Controller, Namespace};
use crate::initiator::queue_pair::Data;
use crate::label::{LABEL_LEN, Label, LabelError};
use crate::wire::{BLOCK_BYTES, DIRECTORY_LEN, LogDirectory, LogVolume, directory_command};

/// Why a survey failed.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum SurveyError {
    /// Targets that can't be attached to, each with the reason.
    #[error("{} of the targets can't be used", .0.len())]
    Attach(Vec<(usize, AssociationError)>),
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

/// A drive, as it was found.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct SurveyedDrive {
    /// Its place.
    pub place: MemberPlace,
    /// Its namespace.
    pub namespace: Namespace,
    /// Its label. A drive whose blocks no volume can use has none.
    pub label: Result<Label, LabelError>,
}

impl SurveyedDrive {
    /// The label that was written for this drive. A label that was copied from another drive does
    /// not count: no volume is opened with it (trap T20).
    #[must_use]
    pub fn own_label(&self) -> Option<&Label> {
        self.label.as_ref().ok().filter(|label| label.is_of(self.namespace.nguid))
    }

    /// Whether the label was copied from another drive.
    #[must_use]
    pub fn has_copied_label(&self) -> bool {
        self.label.is_ok() && self.own_label().is_none()
    }
}

/// The result of a survey.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Survey {
    /// The controller of each target.
    pub controllers: Vec<Controller>,
    /// The drives of all targets.
    pub drives: Vec<SurveyedDrive>,
    /// The log of each target; `None` if the target has no log, or does not list its volumes.
    pub logs: Vec<Option<LogDirectory>>,
}

/// A volume that was found.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct FoundVolume<'a> {
    /// Its id.
    pub id: VolumeId,
    /// Its newest label; `None` if only logs have it.
    pub label: Option<&'a Label>,
    /// For each member, the drive with its label, or with its identity.
    pub members: Vec<Option<&'a SurveyedDrive>>,
    /// Its partitions, with the number of the target.
    pub logs: Vec<(usize, &'a LogVolume)>,
}

impl FoundVolume<'_> {
    /// The members whose drives were not found.
    #[must_use]
    pub fn missing(&self) -> Vec<usize> {
        let is_missing = |member: &usize| self.members[*member].is_none();
        (0..self.members.len()).filter(is_missing).collect()
    }

    /// Whether the logs have an owner of the volume.
    #[must_use]
    pub fn is_owned(&self) -> bool {
        self.logs.iter().any(|(_, log)| log.owned)
    }
}

impl Survey {
    /// The volumes, those with labels first, in the order of their drives.
    #[must_use]
    pub fn volumes(&self) -> Vec<FoundVolume<'_>> {
        let labels = self.drives.iter().filter_map(SurveyedDrive::own_label);
        let in_logs = self.logs.iter().flatten().flat_map(|log| &log.volumes);
        let ids = labels.map(|label| label.volume).chain(in_logs.map(|volume| volume.id));
        let mut unique: Vec<VolumeId> = Vec::new();
        for id in ids {
            if !unique.contains(&id) {
                unique.push(id);
            }
        }
        unique.into_iter().map(|id| self.volume(id)).collect()
    }

    /// The drives, labels and partitions of a volume.
    #[must_use]
    pub fn volume(&self, id: VolumeId) -> FoundVolume<'_> {
        let label = self
            .labelled(id)
            .filter_map(SurveyedDrive::own_label)
            .max_by_key(|label| (label.generation, label.sequence));
        let members = label.map_or(0, |label| label.members.len());
        let members = (0..members).map(|member| self.drive_of(id, label, member)).collect();
        let logs = self.logs.iter().enumerate().flat_map(|(target, log)| {
            let volumes = log.iter().flat_map(|log| &log.volumes);
            volumes.filter(|volume| volume.id == id).map(move |volume| (target, volume))
        });
        FoundVolume { id, label, members, logs: logs.collect() }
    }

    /// The drives with labels of a volume that were written for them.
    pub(super) fn labelled(&self, id: VolumeId) -> impl Iterator<Item = &SurveyedDrive> {
        self.drives.iter().filter(move |drive| drive.own_label().is_some_and(|l| l.volume == id))
    }

    /// A drive whose label lists other members than the newest label of its volume. One of the two
    /// labels is forged.
    pub(super) fn contradiction(&self, id: VolumeId) -> Option<&SurveyedDrive> {
        let newest = self.volume(id).label?;
        let mut labelled = self.labelled(id);
        labelled.find(|drive| drive.own_label().is_some_and(|label| !label.has_members_of(newest)))
    }

    /// Whether the label of a drive can be erased without a loss, because no volume can be opened
    /// with it: it is a copy, or all other members are there and none has a label of the volume.
    pub(super) fn is_left_over(&self, drive: &SurveyedDrive) -> bool {
        let Ok(label) = &drive.label else { return false };
        let id = label.volume;
        let is_member = |number: usize| number == usize::from(label.index);
        let is_unlabelled = |number: usize| {
            let nguid = label.members[number].nguid;
            let mut drives = self.drives.iter();
            drives.any(|other| {
                let belongs_elsewhere = match &other.label {
                    Ok(label) => label.volume != id,
                    Err(error) => matches!(error, LabelError::Blank),
                };
                nguid != [0; 16] && other.namespace.nguid == nguid && belongs_elsewhere
            })
        };
        let has_other_label = || {
            self.labelled(id).any(|other| {
                other.own_label().is_some_and(|other| !is_member(usize::from(other.index)))
            })
        };
        let mut others = (0..label.members.len()).filter(|number| !is_member(*number));
        drive.has_copied_label()
            || (label.members.len() > 1 && !has_other_label() && others.all(is_unlabelled))
    }

    /// The drive of a member: the one with its label, else one without a label that has its NGUID.
    fn drive_of(
        &self,
        id: VolumeId,
        label: Option<&Label>,
        member: usize,
    ) -> Option<&SurveyedDrive> {
        let has_label = |drive: &&SurveyedDrive| {
            let label = drive.own_label();
            label.is_some_and(|label| label.volume == id && usize::from(label.index) == member)
        };
        let nguid = label.map_or([0; 16], |label| label.members[member].nguid);
        let was_member = |drive: &&SurveyedDrive| {
            let is_blank = matches!(drive.label, Err(LabelError::Blank));
            is_blank && nguid != [0; 16] && drive.namespace.nguid == nguid
        };
        let mut drives = self.drives.iter();
        drives.find(has_label).or_else(|| self.drives.iter().find(was_member))
    }
}

/// The purpose of a question to a target.
#[derive(Clone, Copy, Debug)]
enum Question {
    /// To read the label of this drive.
    Label(usize),
    /// To list the volumes in the log.
    Directory,
}

/// The reading of a drive's label.
#[derive(Clone, Debug)]
struct Reading {
    place: MemberPlace,
    namespace: Namespace,
    is_requested: bool,
    label: Option<Result<Label, LabelError>>,
}

/// A survey; see the [module](self).
#[derive(Debug)]
pub struct VolumeSurvey {
    targets: Targets<Question>,
    crc32c: Crc32c,
    /// Once all targets are attached.
    controllers: Option<Vec<Controller>>,
    readings: Vec<Reading>,
    logs: Vec<Option<LogDirectory>>,
    is_ended: bool,
    result: Option<Result<Survey, SurveyError>>,
}

impl VolumeSurvey {
    /// A survey of so many targets, which [`advance`](Self::advance) begins.
    #[must_use]
    pub fn new(targets: usize, crc32c: Crc32c) -> Self {
        Self {
            targets: Targets::new(targets),
            crc32c,
            controllers: None,
            readings: Vec::new(),
            logs: Vec::new(),
            is_ended: false,
            result: None,
        }
    }

    /// The result, once.
    pub fn take_result(&mut self) -> Option<Result<Survey, SurveyError>> {
        self.result.take()
    }

    /// Continues with the answers that have arrived. The associations end with the survey.
    pub fn advance(&mut self, now: u64, associations: &mut impl Associations) {
        if let Some(result) = self.advance_within(now, associations) {
            self.targets.close_associations(associations);
            self.result = Some(result);
        }
    }

    /// As [`advance`](Self::advance), for a larger operation, which continues with the
    /// associations. Returns the result, once.
    pub(super) fn advance_within(
        &mut self,
        now: u64,
        associations: &mut impl Associations,
    ) -> Option<Result<Survey, SurveyError>> {
        if self.is_ended {
            return None;
        }
        match self.run(now, associations) {
            Ok(false) => None,
            Ok(true) => {
                self.is_ended = true;
                Some(Ok(self.survey()))
            }
            Err(error) => {
                self.is_ended = true;
                Some(Err(error))
            }
        }
    }

    /// Runs as far as possible. Returns whether all has been read.
    fn run(&mut self, now: u64, associations: &mut impl Associations) -> Result<bool, SurveyError> {
        if self.controllers.is_none() {
            let Some(attached) = self.targets.attach_results(associations) else {
                return Ok(false);
            };
            self.begin_reading(attached.map_err(SurveyError::Attach)?, now, associations)?;
        }
        let lost = self.targets.first_lost(associations);
        let failed = lost.or_else(|| self.targets.first_failed_drives_queue(associations));
        if let Some((target, error)) = failed {
            return Err(SurveyError::Call { target, doing: labels::READING, source: error.into() });
        }
        while let Some(answer) = self.targets.next_answer(associations) {
            self.on_answer(answer)?;
        }
        for (drive, reading) in self.readings.iter_mut().enumerate() {
            let target = reading.place.target;
            if reading.label.is_some()
                || reading.is_requested
                || !self.targets.is_drives_queue_ready(associations, target)
            {
                continue;
            }
            let sent = labels::read_blocks(
                &mut self.targets,
                associations,
                reading.place,
                labels::COPIES,
                Question::Label(drive),
                now,
            );
            match sent {
                Ok(()) => reading.is_requested = true,
                // Once an answer has arrived, the queue has a free command.
                Err(CallFailure::Behind(_)) if self.targets.has_pending_answers() => break,
                Err(source) => {
                    return Err(SurveyError::Call { target, doing: labels::READING, source });
                }
            }
        }
        let are_labels_read = self.readings.iter().all(|reading| reading.label.is_some());
        Ok(are_labels_read && !self.targets.has_pending_answers())
    }

    /// Asks for the directories, and lists the drives.
    fn begin_reading(
        &mut self,
        controllers: Vec<Controller>,
        now: u64,
        associations: &mut impl Associations,
    ) -> Result<(), SurveyError> {
        self.targets.open_drives_queues(associations, now);
        for (target, controller) in controllers.iter().enumerate() {
            self.logs.push(None);
            for namespace in &controller.namespaces {
                let is_usable =
                    namespace.block_size == BLOCK_BYTES as u32 && namespace.metadata == 0;
                let can_be_read = is_usable && namespace.blocks >= 2;
                self.readings.push(Reading {
                    place: MemberPlace { target, nsid: namespace.nsid },
                    namespace: namespace.clone(),
                    is_requested: false,
                    label: (!can_be_read).then_some(Err(LabelError::Blank)),
                });
            }
            let has_log =
                controller.extension.is_some_and(|extension| extension.log_kind.is_some());
            if has_log {
                let data = Data::Read(DIRECTORY_LEN as u32);
                let (sqe, purpose) = (directory_command(), Question::Directory);
                self.targets
                    .ask_admin(associations, target, sqe, data, purpose, now)
                    .map_err(|source| SurveyError::Call { target, doing: LISTING, source })?;
            }
        }
        self.controllers = Some(controllers);
        Ok(())
    }

    fn on_answer(&mut self, answer: TargetAnswer<Question>) -> Result<(), SurveyError> {
        let TargetAnswer { target, purpose, cqe, page } = answer;
        let status = cqe.status();
        match purpose {
            // The problem of one drive does not hide the volumes of the others.
            Question::Label(drive) if !status.is_ok() => {
                self.readings[drive].label = Some(Err(LabelError::ReadFailed));
                Ok(())
            }
            Question::Label(drive) => {
                let copies = page.split_at(page.len().min(LABEL_LEN));
                let label = Label::newest([copies.0, copies.1], self.crc32c);
                self.readings[drive].label = Some(label);
                Ok(())
            }
            // An earlier target does not know the command.
            Question::Directory if !status.is_ok() => Ok(()),
            Question::Directory => {
                let source = CallFailure::Nonsense(Nonsense::LogDirectory);
                let directory = LogDirectory::decode(&page);
                self.logs[target] =
                    Some(directory.ok_or(SurveyError::Call { target, doing: LISTING, source })?);
                Ok(())
            }
        }
    }

    fn survey(&mut self) -> Survey {
        let drive = |reading: Reading| SurveyedDrive {
            place: reading.place,
            namespace: reading.namespace,
            label: reading.label.unwrap_or(Err(LabelError::Blank)),
        };
        Survey {
            controllers: self.controllers.take().unwrap_or_default(),
            drives: core::mem::take(&mut self.readings).into_iter().map(drive).collect(),
            logs: core::mem::take(&mut self.logs),
        }
    }
}

pub(super) const LISTING: &str = "listing the volumes in its log";

//! The volumes of some targets: listing and deleting them, and erasing labels of single drives.
//!
//! A [`VolumeSurvey`] and a [`VolumeDeletion`] decide each request. This file passes them the
//! associations, sleeps until a target answers, and puts addresses in the place of numbers.

use std::time::Duration;

use riopipe_net::now_ns;
use riopipe_order::attribute::VolumeId;
use riopipe_order::engine::EngineKind;
use riopipe_order::log_region::LogKind;
use riopipe_session::initiator::volume::deletion::{
    Deleted, DeletionSubject, VolumeDeleteError, VolumeDeletion, VolumeDeletionConfig,
};
use riopipe_session::initiator::volume::survey::{
    FoundVolume, Survey, SurveyError, SurveyedDrive, VolumeSurvey,
};
use riopipe_session::label::LabelError;
use riopipe_session::wire::LogVolume;
use serde::Serialize;

use crate::addr::{MemberAddr, TargetAddr};
use crate::association::Targets;
use crate::call_error::{AttachError, CallError};
use crate::identity::ConnectOptions;
use crate::info::{as_text, as_text_or_null, as_texts};

/// The longest sleep until the next check. An event of a target ends the sleep early.
const SLEEP_MAX: Duration = Duration::from_secs(3600);

/// The volumes and the logs that some targets have.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
#[non_exhaustive]
pub struct VolumeList {
    /// The volumes.
    pub volumes: Vec<ListedVolume>,
    /// The targets.
    pub targets: Vec<ListedTarget>,
}

/// A volume of which a label or partitions in a log were found.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
#[non_exhaustive]
pub struct ListedVolume {
    /// The name; `None` if no label was found. Then only logs have the volume.
    pub name: Option<String>,
    /// The id.
    #[serde(serialize_with = "as_text")]
    pub id: VolumeId,
    /// The engine for which it was created; `None` if no label was found.
    #[serde(serialize_with = "as_text_or_null")]
    pub engine: Option<EngineKind>,
    /// The number of its streams.
    pub streams: u16,
    /// The largest generation that was found.
    pub generation: u32,
    /// The size of its data, bytes; 0 if no label was found.
    pub bytes: u64,
    /// Its members, in order; empty if no label was found.
    pub members: Vec<ListedMember>,
    /// Its partitions in the logs.
    pub logs: Vec<ListedLog>,
    /// Its state: `owned`, `log lost`, `unrecovered`, `incomplete` (members were not found),
    /// `no label`, or `free`.
    pub state: &'static str,
}

/// A member of a listed volume.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
#[non_exhaustive]
pub struct ListedMember {
    /// Its number in the volume.
    pub index: usize,
    /// Its drive's NGUID, by the label.
    pub nguid: String,
    /// Its address; `None` if it is on none of the targets.
    #[serde(serialize_with = "as_text_or_null")]
    pub addr: Option<MemberAddr>,
    /// Whether its drive has the label. A drive of a deletion that was cut off has none.
    pub labelled: bool,
}

/// The partitions of a listed volume in a target's log.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
#[non_exhaustive]
pub struct ListedLog {
    /// The target.
    #[serde(serialize_with = "as_text")]
    pub target: TargetAddr,
    /// The size of the partitions, bytes.
    pub bytes: u64,
    /// The number of slots of each stream.
    pub slots: u32,
    /// The number of entries that wait for recovery.
    pub unrecovered: u32,
    /// Whether the volume has an owner there.
    pub owned: bool,
    /// Whether the log is lost or damaged.
    pub log_lost: bool,
}

/// A target that was asked.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
#[non_exhaustive]
pub struct ListedTarget {
    /// The address.
    #[serde(serialize_with = "as_text")]
    pub addr: TargetAddr,
    /// Its NQN.
    pub nqn: String,
    /// The kind of its log: `none`, `foreign` for a target without Rio's extension, or as in
    /// [`MemberInfo::log`](crate::MemberInfo::log).
    pub log: &'static str,
    /// The size of its log region, bytes; `None` if it has no log, or does not report it.
    pub log_bytes: Option<u64>,
    /// The bytes that no volume has.
    pub log_free_bytes: Option<u64>,
    /// The largest adjacent part of these. A new volume needs adjacent space.
    pub log_gap_bytes: Option<u64>,
    /// The drives without a label of a volume that could be read: their addresses, and what is
    /// there instead.
    pub drives: Vec<ListedDrive>,
}

/// A drive without a label that can be read.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
#[non_exhaustive]
pub struct ListedDrive {
    /// Its address.
    #[serde(serialize_with = "as_text")]
    pub addr: MemberAddr,
    /// Its size, bytes.
    pub bytes: u64,
    /// The problem of its label; `None` if it has none.
    pub problem: Option<String>,
    /// Whether its label was copied from another drive. Then it belongs to no volume.
    pub copied: bool,
}

/// Why targets could not be searched for volumes.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum ListError {
    /// A target can't be reached or used.
    #[error(transparent)]
    Attach(#[from] AttachError),
    /// A target refused a request, or failed.
    #[error("target {target}: {doing} failed: {source}")]
    Call {
        /// The target.
        target: TargetAddr,
        /// The operation that failed.
        doing: &'static str,
        /// The reason.
        source: CallError,
    },
}

/// Why a volume could not be deleted, or a label not be erased.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum DeleteError {
    /// The targets could not be searched.
    #[error(transparent)]
    List(#[from] ListError),
    /// No volume with this name or id was found.
    #[error("there is no volume {0:?} on these targets")]
    Unknown(String),
    /// Several volumes have this name.
    #[error("several volumes on these targets have the name {0:?}: give the id of one")]
    Ambiguous(String),
    /// Members of the volume are not on these targets.
    #[error("{}", missing_text(.members))]
    Missing {
        /// The numbers of the members that were not found; none if no label was found.
        members: Vec<usize>,
    },
    /// The volume has an owner.
    #[error("it is owned{}, as {target} reports", by(.owner))]
    Owned {
        /// The target.
        target: TargetAddr,
        /// The owner's host NQN; empty if the target did not name it.
        owner: String,
    },
    /// The drive has no label.
    #[error("{0} has no label")]
    NoLabel(MemberAddr),
    /// The target of a drive does not have its namespace.
    #[error("{member}: the target has no such namespace; it has {have:?}")]
    NoNamespace {
        /// The drive.
        member: MemberAddr,
        /// The ids of the target's namespaces.
        have: Vec<u32>,
    },
    /// The drive is a member of a volume that is there.
    #[error("{member} is a member of volume {volume:?}, which may still be there")]
    InUse {
        /// The drive.
        member: MemberAddr,
        /// The volume of its label.
        volume: String,
    },
    /// The drive has a label that can't be read, so it may belong to a volume.
    #[error("{member} has {error}")]
    UnreadableLabel {
        /// The drive.
        member: MemberAddr,
        /// The cause.
        error: LabelError,
    },
    /// The drive's label lists other members than the newest label of the volume.
    #[error("the label of {0} contradicts another label of the volume: one of them is forged")]
    Contradiction(MemberAddr),
    /// Another program has written the drive's label meanwhile.
    #[error("the label of {0} was changed meanwhile, and is not erased")]
    Changed(MemberAddr),
}

impl ListError {
    /// Whether the same call may succeed later, if only time passes.
    #[must_use]
    pub fn is_retryable(&self) -> bool {
        match self {
            Self::Attach(error) => error.is_retryable(),
            Self::Call { source, .. } => source.is_retryable(),
        }
    }
}

impl DeleteError {
    /// Whether the same call may succeed later, if only time passes. An owner
    /// ([`Owned`](Self::Owned)) may release its volume.
    #[must_use]
    pub fn is_retryable(&self) -> bool {
        match self {
            Self::List(error) => error.is_retryable(),
            Self::Owned { .. } => true,
            _ => false,
        }
    }
}

fn missing_text(members: &[usize]) -> String {
    let numbers: Vec<String> = members.iter().map(ToString::to_string).collect();
    match members {
        [] => "no label of it is on these targets, only its partitions in logs".into(),
        [_] => format!("its member {} is not on these targets", numbers[0]),
        _ => format!("its members {} are not on these targets", numbers.join(", ")),
    }
}

fn by(owner: &str) -> String {
    if owner.is_empty() { String::new() } else { format!(" by {owner}") }
}

/// The result of a deletion, or of erasing labels.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
#[non_exhaustive]
pub struct DeletedVolume {
    /// The name; `None` if no label was found.
    pub name: Option<String>,
    /// The id.
    #[serde(serialize_with = "as_text")]
    pub id: VolumeId,
    /// The drives whose labels were erased.
    #[serde(serialize_with = "as_texts")]
    pub drives: Vec<MemberAddr>,
    /// The targets whose logs have forgotten the volume.
    pub logs: Vec<FreedLog>,
    /// The numbers of the members that were not found.
    pub missing: Vec<usize>,
}

/// Space in a log that became free.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
#[non_exhaustive]
pub struct FreedLog {
    /// The target.
    #[serde(serialize_with = "as_text")]
    pub target: TargetAddr,
    /// The bytes that became free.
    pub bytes: u64,
}

pub(crate) fn list(
    members: &[MemberAddr],
    options: &ConnectOptions,
) -> Result<VolumeList, ListError> {
    let targets = Targets::start(members, options)?;
    let mut survey = VolumeSurvey::new(targets.len(), crate::crc32c);
    loop {
        let seen = targets.signal.count();
        survey.advance(now_ns(), &mut &targets);
        match survey.take_result() {
            Some(Ok(survey)) => return Ok(list_of(&survey, &targets)),
            Some(Err(error)) => return Err(list_error(&targets, options, error)),
            None => targets.signal.wait(seen, SLEEP_MAX),
        }
    }
}

/// Deletes the volume with this name or id, which is searched on all drives of the members' targets.
pub(crate) fn delete(
    name: &str,
    members: &[MemberAddr],
    force: bool,
    options: &ConnectOptions,
) -> Result<DeletedVolume, DeleteError> {
    run_deletion(|_| DeletionSubject::Volume(name.into()), members, force, options)
}

/// Erases the labels of these drives.
pub(crate) fn wipe(
    members: &[MemberAddr],
    force: bool,
    options: &ConnectOptions,
) -> Result<DeletedVolume, DeleteError> {
    let subject = |targets: &Targets| DeletionSubject::Labels(targets.places.clone());
    run_deletion(subject, members, force, options)
}

fn run_deletion(
    subject: impl FnOnce(&Targets) -> DeletionSubject,
    members: &[MemberAddr],
    force: bool,
    options: &ConnectOptions,
) -> Result<DeletedVolume, DeleteError> {
    let targets = Targets::start(members, options).map_err(ListError::from)?;
    let config = VolumeDeletionConfig {
        subject: subject(&targets),
        targets: targets.len(),
        force,
        crc32c: crate::crc32c,
    };
    let mut deletion = VolumeDeletion::new(config);
    loop {
        let seen = targets.signal.count();
        deletion.advance(now_ns(), &mut &targets);
        match deletion.take_result() {
            Some(Ok(deleted)) => return Ok(deleted_volume(deleted, &targets)),
            Some(Err(error)) => return Err(delete_error(members, &targets, options, error)),
            None => targets.signal.wait(seen, SLEEP_MAX),
        }
    }
}

fn deleted_volume(deleted: Deleted, targets: &Targets) -> DeletedVolume {
    let logs = deleted.logs.iter();
    DeletedVolume {
        name: Some(deleted.name).filter(|name| !name.is_empty()),
        id: deleted.id,
        drives: deleted.drives.iter().map(|place| targets.member_at(*place)).collect(),
        logs: logs
            .map(|(target, bytes)| FreedLog { target: targets.name(*target), bytes: *bytes })
            .collect(),
        missing: deleted.missing,
    }
}

fn list_of(survey: &Survey, targets: &Targets) -> VolumeList {
    let volumes = survey.volumes();
    VolumeList {
        volumes: volumes.iter().map(|volume| listed_volume(volume, targets)).collect(),
        targets: (0..targets.len()).map(|target| listed_target(survey, target, targets)).collect(),
    }
}

fn listed_volume(volume: &FoundVolume<'_>, targets: &Targets) -> ListedVolume {
    let label = volume.label;
    let in_logs = volume.logs.iter().map(|(_, log)| log);
    let streams = in_logs.clone().map(|log| log.streams).max().unwrap_or(0);
    let of_logs = in_logs.clone().map(|log| log.generation).max().unwrap_or(0);
    let member = |(index, drive): (usize, &Option<&SurveyedDrive>)| ListedMember {
        index,
        nguid: label.map(|label| hex(&label.members[index].nguid)).unwrap_or_default(),
        addr: drive.map(|drive| targets.member_at(drive.place)),
        labelled: drive.is_some_and(|drive| drive.own_label().is_some()),
    };
    let log = |(target, log): &(usize, &LogVolume)| ListedLog {
        target: targets.name(*target),
        bytes: log.bytes,
        slots: log.slots,
        unrecovered: log.live_entries,
        owned: log.owned,
        log_lost: log.log_lost,
    };
    let bytes = label.map_or(0, |label| {
        let blocks = label.data_blocks.saturating_mul(label.members.len() as u64);
        blocks.saturating_mul(u64::from(label.block_size))
    });
    ListedVolume {
        name: label.map(|label| label.name.clone()),
        id: volume.id,
        engine: label.map(|label| label.engine),
        streams: label.map_or(streams, |label| label.streams),
        generation: label.map_or(0, |label| label.generation).max(of_logs),
        bytes,
        members: volume.members.iter().enumerate().map(member).collect(),
        logs: volume.logs.iter().map(log).collect(),
        state: state(volume),
    }
}

fn state(volume: &FoundVolume<'_>) -> &'static str {
    let any = |what: fn(&LogVolume) -> bool| volume.logs.iter().any(|(_, log)| what(log));
    if volume.is_owned() {
        "owned"
    } else if volume.label.is_none() {
        "no label"
    } else if !volume.missing().is_empty() {
        "incomplete"
    } else if any(|log| log.log_lost) {
        "log lost"
    } else if any(|log| log.unrecovered) {
        "unrecovered"
    } else {
        "free"
    }
}

fn listed_target(survey: &Survey, target: usize, targets: &Targets) -> ListedTarget {
    let controller = &survey.controllers[target];
    let directory = survey.logs[target].as_ref();
    let drives = survey.drives.iter().filter(|drive| drive.place.target == target);
    let unlabelled = drives.filter_map(|drive| {
        let copied = drive.has_copied_label();
        let problem = match &drive.label {
            Ok(_) if copied => Some(COPIED.to_owned()),
            Ok(_) => return None,
            Err(LabelError::Blank) => None,
            Err(error) => Some(error.to_string()),
        };
        let bytes = drive.namespace.blocks.saturating_mul(u64::from(drive.namespace.block_size));
        Some(ListedDrive { addr: targets.member_at(drive.place), bytes, problem, copied })
    });
    ListedTarget {
        addr: targets.name(target),
        nqn: controller.subnqn.clone(),
        log: match &controller.extension {
            None => "foreign",
            Some(extension) => extension.log_kind.map_or("none", LogKind::name),
        },
        log_bytes: directory.map(|log| log.region_bytes),
        log_free_bytes: directory.map(|log| log.free_bytes),
        log_gap_bytes: directory.map(|log| log.gap_bytes),
        drives: unlabelled.collect(),
    }
}

const COPIED: &str = "a label copied from another drive: its NGUID differs";

fn hex(bytes: &[u8; 16]) -> String {
    bytes.iter().map(|byte| format!("{byte:02x}")).collect()
}

fn list_error(targets: &Targets, options: &ConnectOptions, error: SurveyError) -> ListError {
    match error {
        SurveyError::Attach(failed) => targets.attach_error(failed).into(),
        SurveyError::Call { target, doing, source } => {
            let source = CallError::of(source, options.timeout);
            ListError::Call { target: targets.name(target), doing, source }
        }
    }
}

fn delete_error(
    members: &[MemberAddr],
    targets: &Targets,
    options: &ConnectOptions,
    error: VolumeDeleteError,
) -> DeleteError {
    let addr = |drive: usize| members[drive].clone();
    match error {
        VolumeDeleteError::Survey(error) => list_error(targets, options, error).into(),
        VolumeDeleteError::Unknown(name) => DeleteError::Unknown(name),
        VolumeDeleteError::Ambiguous(name) => DeleteError::Ambiguous(name),
        VolumeDeleteError::Missing { members } => DeleteError::Missing { members },
        VolumeDeleteError::Owned { target, owner } => {
            DeleteError::Owned { target: targets.name(target), owner }
        }
        VolumeDeleteError::NoLabel(drive) => DeleteError::NoLabel(addr(drive)),
        VolumeDeleteError::NoNamespace(drive) => {
            let have = targets.nsids(targets.places[drive].target);
            DeleteError::NoNamespace { member: addr(drive), have }
        }
        VolumeDeleteError::InUse { drive, volume } => {
            DeleteError::InUse { member: addr(drive), volume }
        }
        VolumeDeleteError::UnreadableLabel { drive, error } => {
            DeleteError::UnreadableLabel { member: addr(drive), error }
        }
        VolumeDeleteError::Contradiction(place) => {
            DeleteError::Contradiction(targets.member_at(place))
        }
        VolumeDeleteError::Changed(place) => DeleteError::Changed(targets.member_at(place)),
        VolumeDeleteError::Call { target, doing, source } => {
            let source = CallError::of(source, options.timeout);
            ListError::Call { target: targets.name(target), doing, source }.into()
        }
    }
}

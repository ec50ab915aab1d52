//! The properties of a volume, for people and programs.

use std::fmt::Display;

use riopipe_order::attribute::VolumeId;
use riopipe_order::engine::EngineKind;
use riopipe_session::claim::ClaimError;
use riopipe_session::label::AssembleError;
use serde::{Serialize, Serializer};

use crate::error::OpenError;
use crate::recovery::EngineUnavailable;

/// A volume, as its labels and targets describe it.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct VolumeInfo {
    /// The name of the volume.
    pub name: String,
    /// The id of the volume: 16 random bytes.
    #[serde(serialize_with = "as_text")]
    pub id: VolumeId,
    /// The size of a block, bytes.
    pub block_size: u32,
    /// The size of the volume, in blocks.
    pub blocks: u64,
    /// The size of a stripe unit, in blocks.
    pub unit_blocks: u32,
    /// The number of streams.
    pub streams: u16,
    /// The generation on the labels: that of the last owner.
    pub generation: u32,
    /// The engine for which the volume was created.
    #[serde(serialize_with = "as_text")]
    pub engine: EngineKind,
    /// The members of the volume, in order.
    pub members: Vec<MemberInfo>,
}

/// A member of a volume.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct MemberInfo {
    /// The address of the member.
    #[serde(serialize_with = "as_text")]
    pub addr: crate::MemberAddr,
    /// The NQN of the target's subsystem.
    pub nqn: String,
    /// The NGUID of the namespace, hexadecimal.
    pub nguid: String,
    /// The size of the namespace, in blocks.
    pub blocks: u64,
    /// Whether the drive has a volatile write cache.
    pub volatile: bool,
    /// The kind of the target's ordering log: `none`, `mem`, `file`, `dax`, `block`, `pci`; `foreign` if
    /// the target does not have Rio's extension.
    pub log: String,
    /// Log slots for each stream on this target.
    pub slots: u32,
    /// The host NQN of the volume's owner on this target, if another initiator owns it.
    pub owner: Option<String>,
    /// The address from which that owner is connected to this target, or was; absent if it is not
    /// known.
    pub owner_address: Option<String>,
    /// The number of log entries on this target that have not been recovered.
    pub unrecovered: u32,
    /// Whether the target's log is lost: since its last boot, or because it is older than the volume's
    /// labels.
    pub log_lost: bool,
    /// The number of blocks of the namespace that the volume does not use: those beyond the stripe
    /// units that the smallest member has.
    pub unused_blocks: u64,
}

/// The result of an opening, as far as it is known before anything is changed. It comes from the same
/// decision as that of the opening.
#[derive(Debug)]
pub struct Outlook {
    /// The result, in one word.
    pub state: OpeningState,
    /// The error that the opening would return; `None` if it would open the volume.
    pub refusal: Option<OpenError>,
    /// The number of log entries that the opening would recover first, on the first target that has
    /// any.
    pub unrecovered: u32,
    /// The engine that would run.
    pub engine: EngineKind,
    /// The reason, if that is not the engine for which the volume was created (trap T17).
    pub fallback: Option<EngineUnavailable>,
}

/// The result of an opening, in one word.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum OpeningState {
    /// It would open.
    Free,
    /// It would open, after the recovery of what is in the logs.
    Unrecovered,
    /// Another initiator owns the volume.
    Owned,
    /// A log is lost, or older than the labels.
    LogLost,
    /// A log is damaged.
    LogDamaged,
    /// A target has no log, and by the labels one is due.
    NoLog,
    /// A target has another log than the one that is due by the labels.
    AnotherLogDue,
    /// A log that was given up is back, with entries.
    LogGivenUp,
    /// The label of a drive was copied from another drive.
    CopiedLabel,
    /// It would be refused for another reason.
    Refused,
}

impl OpeningState {
    /// The state that this error of an opening stands for.
    pub(crate) fn of_refusal(error: &OpenError) -> Self {
        match error {
            OpenError::Claim { error, .. } => match error {
                ClaimError::Owned { .. } => Self::Owned,
                ClaimError::LogLost { .. }
                | ClaimError::LogMissing { .. }
                | ClaimError::LogBehind { .. } => Self::LogLost,
                ClaimError::LogDamaged { .. } => Self::LogDamaged,
                ClaimError::LogGivenUp { .. } => Self::LogGivenUp,
                ClaimError::NoLog { .. } => Self::NoLog,
                _ => Self::Refused,
            },
            OpenError::Assemble { error, .. } => match error {
                AssembleError::LogDue { blank: true, .. } => Self::NoLog,
                AssembleError::LogDue { blank: false, .. } => Self::AnotherLogDue,
                AssembleError::Copied { .. } => Self::CopiedLabel,
                _ => Self::Refused,
            },
            _ => Self::Refused,
        }
    }

    /// Its name in reports.
    #[must_use]
    pub const fn name(self) -> &'static str {
        match self {
            Self::Free => "free",
            Self::Unrecovered => "unrecovered",
            Self::Owned => "owned",
            Self::LogLost => "log lost",
            Self::LogDamaged => "log damaged",
            Self::NoLog => "no log",
            Self::AnotherLogDue => "another log is due",
            Self::LogGivenUp => "log given up",
            Self::CopiedLabel => "copied label",
            Self::Refused => "refused",
        }
    }
}

/// Serialises a value as its text.
pub(crate) fn as_text<T: Display, S: Serializer>(value: &T, to: S) -> Result<S::Ok, S::Error> {
    to.collect_str(value)
}

/// Serialises a value as its text, or as null.
pub(crate) fn as_text_or_null<T: Display, S: Serializer>(
    value: &Option<T>,
    to: S,
) -> Result<S::Ok, S::Error> {
    match value {
        Some(value) => to.collect_str(value),
        None => to.serialize_none(),
    }
}

/// Serialises values as a list of their texts.
pub(crate) fn as_texts<T: Display, S: Serializer>(values: &[T], to: S) -> Result<S::Ok, S::Error> {
    to.collect_seq(values.iter().map(ToString::to_string))
}

//! Why a volume can't be opened or made. `server` and `target` count the volume's targets, `member`
//! its members; the program knows their addresses and adds them.

use alloc::format;
use alloc::string::String;
use alloc::vec::Vec;

use riopipe_nvme::command::Status;
use riopipe_order::engine::EngineKind;
use riopipe_order::topology::TopologyError;

use super::creation::foreign_content::ForeignContent;
use super::members::MembersError;
use super::recovery::RecoveryError;
use crate::engine_choice::{Hindrance, Lacking};
use crate::initiator::association::{AskError, AssociationError};
use crate::initiator::opening::OpeningError;
use crate::label::{AssembleError, LabelError};
use crate::wire::LogVolume;

/// An error in a target's answer (trap T18).
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum Nonsense {
    /// The status of a volume.
    #[error("a volume status that can't be read")]
    VolumeStatus,
    /// The list of the volumes in a log.
    #[error("a list of volumes that can't be read")]
    LogDirectory,
    /// A PDU that announces more bytes than were requested.
    #[error("a PDU larger than all requested data")]
    LargePdu,
}

/// An error in the options for a new volume.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum VolumeOptionsError {
    /// The number of members.
    #[error("a volume has 1 to 120 members")]
    Members,
    /// The number of members on one target.
    #[error("a volume has at most 16 members on one target")]
    MembersOnTarget,
    /// The number of streams.
    #[error("a volume has 1 to 1024 streams")]
    Streams,
    /// The number of blocks of a stripe unit.
    #[error("a stripe unit has 1 to 1048576 blocks")]
    UnitBlocks,
    /// A prepare area for an engine that uses none.
    #[error("only engine horae has a prepare area, not {engine}")]
    PrepareArea {
        /// The engine.
        engine: EngineKind,
    },
}

/// Why a command did not succeed.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum CallFailure {
    /// The association is lost, or its queue to the drives has failed.
    #[error(transparent)]
    Association(#[from] AssociationError),
    /// The target answered with an error.
    #[error("{0}")]
    Status(Status),
    /// No answer in time.
    #[error("no answer in time")]
    TimedOut,
    /// The queue has no free command: the target owes an answer to each one.
    #[error("the target stalls: it owes {0} answers, and gets no command before it sends them")]
    Behind(usize),
    /// The command could not be sent.
    #[error(transparent)]
    Ask(AskError),
    /// The target's answer is not valid (trap T18).
    #[error("the target's answer is not valid: {0}")]
    Nonsense(Nonsense),
}

impl CallFailure {
    pub(super) fn of(error: AskError) -> Self {
        match error {
            AskError::Full { unanswered } => Self::Behind(unanswered),
            AskError::NotReady | AskError::Data(_) => Self::Ask(error),
        }
    }
}

/// Why a volume could not be opened or inspected.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum VolumeOpenError {
    /// Targets that can't be attached to, each with the reason.
    #[error("{} of the volume's targets can't be used", .0.len())]
    Attach(Vec<(usize, AssociationError)>),
    /// A bad new name.
    #[error("a volume's name has 1 to 64 bytes without control characters")]
    Name,
    /// A member's target has no such namespace.
    #[error("member {member}: the target has no such namespace")]
    NoNamespace {
        /// The member.
        member: usize,
    },
    /// A target refused or failed.
    #[error("target {server}: {doing} failed: {source}")]
    Call {
        /// The target.
        server: usize,
        /// The action that failed.
        doing: &'static str,
        /// The error.
        source: CallFailure,
    },
    /// The drives don't make the volume.
    #[error(transparent)]
    Members(#[from] MembersError),
    /// The engine that the caller insists on can't run (trap T17).
    #[error("engine {engine} can't run on the volume")]
    Engine {
        /// The engine.
        engine: EngineKind,
        /// The reason.
        hindrance: Hindrance,
    },
    /// The labels describe no volume.
    #[error(transparent)]
    Topology(#[from] TopologyError),
    /// The status of the volume on its targets does not allow it.
    #[error(transparent)]
    Opening(#[from] OpeningError),
    /// Data that was about to be zeroed could not be read, to be saved. Nothing was zeroed.
    #[error("target {server}: reading the data to be zeroed failed: {source}")]
    Save {
        /// The target.
        server: usize,
        /// The error.
        source: CallFailure,
    },
    /// The program could not save the data that was about to be zeroed. Nothing was zeroed.
    #[error("the data to be zeroed could not be saved; nothing was zeroed")]
    NotSaved,
}

impl From<AssembleError> for VolumeOpenError {
    fn from(error: AssembleError) -> Self {
        Self::Members(error.into())
    }
}

impl From<RecoveryError> for VolumeOpenError {
    fn from(error: RecoveryError) -> Self {
        match error {
            RecoveryError::Opening(error) => Self::Opening(error),
            RecoveryError::TimedOut { server, doing } => {
                Self::Call { server, doing, source: CallFailure::TimedOut }
            }
            RecoveryError::PutOff { server, doing, status } => {
                Self::Call { server, doing, source: CallFailure::Status(status) }
            }
        }
    }
}

/// Why a volume could not be created. The steps that were done are undone as far as the targets
/// allow.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum VolumeCreateError {
    /// A bad name.
    #[error("a volume's name has 1 to 64 bytes without control characters")]
    Name,
    /// Options that make no volume.
    #[error(transparent)]
    Options(#[from] VolumeOptionsError),
    /// Targets that can't be attached to, each with the reason.
    #[error("{} of the volume's targets can't be used", .0.len())]
    Attach(Vec<(usize, AssociationError)>),
    /// A member's target has no such namespace.
    #[error("member {member}: the target has no such namespace")]
    NoNamespace {
        /// The member.
        member: usize,
    },
    /// Two members have the same namespace.
    #[error("member {member} is given twice")]
    DuplicateMember {
        /// The second of the two members.
        member: usize,
    },
    /// Two drives that have the same identity.
    #[error("member {member} has the same NGUID as a member before it")]
    SameNguid {
        /// The second of the two.
        member: usize,
    },
    /// Blocks of another size, or with metadata.
    #[error("member {member} has blocks of {size} bytes")]
    BlockSize {
        /// The member.
        member: usize,
        /// Its block size, bytes.
        size: u32,
    },
    /// The drive is too small.
    #[error("member {member} has {blocks} blocks and needs at least {needed}")]
    TooSmall {
        /// The member.
        member: usize,
        /// The number of its blocks.
        blocks: u64,
        /// The number of blocks that it needs.
        needed: u64,
    },
    /// The prepare area is too small.
    #[error("a prepare area of {blocks} blocks per drive; its streams need at least {needed}")]
    PrepareAreaTooSmall {
        /// The number of its blocks on each drive.
        blocks: u32,
        /// The number of blocks that it needs.
        needed: u32,
    },
    /// The drive belongs to a volume already.
    #[error("member {member} belongs to volume \"{volume}\" already")]
    InUse {
        /// The member.
        member: usize,
        /// The volume's name.
        volume: String,
    },
    /// The drive has a label that can't be read, so it may belong to a volume.
    #[error("member {member} has {error}")]
    UnreadableLabel {
        /// The member.
        member: usize,
        /// The cause: the label is damaged, or of a later version.
        error: LabelError,
    },
    /// The drive has no label and is not unused.
    #[error("member {member} holds {content}")]
    HoldsData {
        /// The member.
        member: usize,
        /// Its content.
        content: ForeignContent,
    },
    /// The volume that it belongs to has an owner that is connected.
    #[error("volume \"{volume}\", which member {member} belongs to, is owned by {owner}")]
    Owned {
        /// The member.
        member: usize,
        /// Its volume's name.
        volume: String,
        /// The owner's host NQN, and its address if it is known.
        owner: String,
    },
    /// The engine that the caller insists on can't run on a target (trap T17).
    #[error("engine {engine} can't run on target {}", .lacking.target)]
    Engine {
        /// The engine.
        engine: EngineKind,
        /// The target, and the property that it lacks.
        lacking: Lacking,
    },
    /// The target's log has not enough space.
    #[error(
        "the log region of target {target} is too small: {need} bytes are needed, {free} are free"
    )]
    LogTooSmall {
        /// The target.
        target: usize,
        /// The bytes needed.
        need: u32,
        /// The free bytes that are adjacent.
        free: u32,
        /// The volumes that have partitions in the log; empty if the target does not list them.
        volumes: Vec<LogVolume>,
    },
    /// The log has too few slots to make progress.
    #[error("{slots} log slots per stream on target {target} are too few: at least {needed}")]
    TooFewSlots {
        /// The target.
        target: usize,
        /// The number of slots that the log would have.
        slots: u32,
        /// The number of slots needed.
        needed: u32,
    },
    /// The directory of the target's log has no free record.
    #[error("the log region of target {target} holds {volumes} volumes, which is all that it can")]
    LogDirectoryFull {
        /// The target.
        target: usize,
        /// The number of volumes in it.
        volumes: u32,
    },
    /// More log slots than the target keeps (trap T28).
    #[error("target {target} keeps at most {most} more log slots per stream{}", requested(*.slots))]
    TooManySlots {
        /// The target.
        target: usize,
        /// The number of slots that was requested; 0: the choice was left to the target.
        slots: u32,
        /// The most slots per stream that it keeps for a volume with so many streams.
        most: u32,
    },
    /// The members make no volume.
    #[error(transparent)]
    Topology(#[from] TopologyError),
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

/// The end of a message about log slots: the number that was requested, if one was.
#[must_use]
pub fn requested(slots: u32) -> String {
    match slots {
        0 => String::new(),
        slots => format!("; {slots} were requested"),
    }
}

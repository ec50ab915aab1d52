//! Why a volume could not be created.

use riopipe_order::attribute::VolumeId;
use riopipe_order::engine::EngineKind;
use riopipe_order::topology::TopologyError;
use riopipe_order::write_order::DriveOrder;
use riopipe_session::engine_choice::Lack;
use riopipe_session::initiator::volume::creation::foreign_content::ForeignContent;
use riopipe_session::initiator::volume::error::{VolumeOptionsError, requested};
use riopipe_session::label::LabelError;

use crate::addr::{MemberAddr, TargetAddr};
use crate::call_error::{AttachError, CallError};
use crate::error::OpenError;

/// Why a volume could not be created.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum CreateError {
    /// A target can't be reached or used.
    #[error(transparent)]
    Attach(#[from] AttachError),
    /// The name is invalid: a name has 1 to 64 bytes without control characters.
    #[error("a volume's name has 1 to 64 bytes without control characters")]
    Name,
    /// The options are invalid.
    #[error(transparent)]
    Options(#[from] VolumeOptionsError),
    /// The volume was created, and could not be inspected after that.
    #[error("the volume was created, but does not read back as written: {0}")]
    ReadBack(#[source] Box<OpenError>),
    /// The same namespace is given twice.
    #[error("{0} is given twice")]
    Twice(MemberAddr),
    /// The drive has the same NGUID as an earlier member.
    #[error(
        "{0} has the same NGUID as a member before it: it is the same drive by another address, or \
         two targets were configured alike; give each target its own NQN"
    )]
    SameNguid(MemberAddr),
    /// The target of a member does not have its namespace.
    #[error("{member}: the target has no such namespace; it has {have:?}")]
    NoNamespace {
        /// The member.
        member: MemberAddr,
        /// The ids of the target's namespaces.
        have: Vec<u32>,
    },
    /// The namespace does not have blocks of 4096 bytes.
    #[error("{member}: blocks of {size} bytes; Rio needs a namespace formatted with 4096")]
    BlockSize {
        /// The member.
        member: MemberAddr,
        /// Its block size, bytes.
        size: u32,
    },
    /// The namespace has too few blocks.
    #[error("{member}: {blocks} blocks are too few; a member needs at least {needed}")]
    TooSmall {
        /// The member.
        member: MemberAddr,
        /// Blocks of the namespace.
        blocks: u64,
        /// Blocks that a member needs.
        needed: u64,
    },
    /// The drive belongs to a volume already.
    #[error(
        "{member} belongs to volume \"{volume}\" already; force gives that volume up, with all its data"
    )]
    InUse {
        /// The member.
        member: MemberAddr,
        /// The volume of the drive's label.
        volume: String,
    },
    /// The drive has a label that can't be read, so it may belong to a volume.
    #[error("{member} has {error}; force gives up the volume that the drive may belong to")]
    UnreadableLabel {
        /// The member.
        member: MemberAddr,
        /// The cause: the label is damaged, or of a later version.
        error: LabelError,
    },
    /// The drive has no label, and holds something else.
    #[error("{member} holds {content}; force erases it")]
    HoldsData {
        /// The member.
        member: MemberAddr,
        /// Its content.
        content: ForeignContent,
    },
    /// The engine can't run on a target.
    #[error("engine {engine} can't run on {target}: {}", lack_text(*.lack))]
    Engine {
        /// The engine.
        engine: EngineKind,
        /// The target.
        target: TargetAddr,
        /// The feature that the engine needs and the target lacks.
        lack: Lack,
    },
    /// The target's log region has no space for the volume's partitions.
    #[error(
        "the log region of {target} is too small: the volume needs {need} adjacent bytes, {free} are \
         free{}; use fewer streams or slots, delete a volume that is not needed, or use a larger region",
        log_users(.volumes)
    )]
    LogTooSmall {
        /// The target.
        target: TargetAddr,
        /// Bytes that the volume needs.
        need: u32,
        /// Adjacent bytes that are free.
        free: u32,
        /// The ids of the volumes that have partitions in the log, and their bytes; empty if the target
        /// does not list them.
        volumes: Vec<(VolumeId, u64)>,
    },
    /// Each stream would have too few log slots to make progress.
    #[error("{have} log slots per stream on {target} are too few for its members: at least {need}")]
    TooFewSlots {
        /// The target.
        target: TargetAddr,
        /// Slots that each stream would have.
        have: u32,
        /// Slots that each stream needs.
        need: u32,
    },
    /// The prepare area has too few blocks for the streams.
    #[error(
        "a prepare area of {blocks} blocks per drive is too small for the streams: at least {needed}, \
         or 0 for none"
    )]
    PrepareAreaTooSmall {
        /// Blocks of the area on each drive.
        blocks: u32,
        /// Blocks that it needs.
        needed: u32,
    },
    /// The directory of the target's log has no free record.
    #[error(
        "the log region of {target} holds {volumes} volumes, which is all that it can: create the \
         volume with force over the drives of one that is not needed, delete one, or use another log"
    )]
    LogDirectoryFull {
        /// The target.
        target: TargetAddr,
        /// The number of volumes in it.
        volumes: u32,
    },
    /// More log slots than the target keeps in memory.
    #[error(
        "{target} keeps too few log slots: at most {most} per stream for a volume with so many \
         streams, beside the other volumes in its log{}; use fewer streams or slots",
        requested(*.slots)
    )]
    TooManySlots {
        /// The target.
        target: TargetAddr,
        /// Slots per stream that were requested; 0: the choice was left to the target.
        slots: u32,
        /// The most slots per stream that it keeps now.
        most: u32,
    },
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
    /// The members do not make a valid volume.
    #[error(transparent)]
    Topology(#[from] TopologyError),
    /// The kernel returned no random number for the volume's id.
    #[error("no random volume id from the kernel: {0}")]
    Random(std::io::Error),
    /// The drive belongs to a volume that has an owner.
    #[error(
        "volume \"{volume}\", to which {member} belongs, is owned by {owner}: stop that owner first"
    )]
    Owned {
        /// The member.
        member: MemberAddr,
        /// The volume of the drive's label.
        volume: String,
        /// The owner's host NQN.
        owner: String,
    },
}

impl CreateError {
    /// Whether the same call may succeed later, if only time passes. An owner
    /// ([`Owned`](Self::Owned)) may release its volume.
    #[must_use]
    pub fn is_retryable(&self) -> bool {
        match self {
            Self::Attach(error) => error.is_retryable(),
            Self::Call { source, .. } => source.is_retryable(),
            Self::Owned { .. } => true,
            _ => false,
        }
    }
}

/// The volumes that have the rest of a log.
fn log_users(volumes: &[(VolumeId, u64)]) -> String {
    if volumes.is_empty() {
        return ", and other volumes have the rest".into();
    }
    let users = volumes.iter().map(|(id, bytes)| format!("volume {id} has {bytes}"));
    format!(", {}", users.collect::<Vec<_>>().join(", "))
}

pub(crate) fn lack_text(lack: Lack) -> &'static str {
    match lack {
        Lack::Extension => "it does not have Rio's extension",
        Lack::Log => "it has no ordering log",
        Lack::Order(DriveOrder::Barrier) => "a drive of the volume there has no cache barrier",
        Lack::Order(_) => {
            "a drive of the volume there does not keep the order of streams and epochs"
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn too_many_slots_are_named_only_if_they_were_requested() {
        let text = |slots| {
            let target = TargetAddr::new("10.0.0.1", 4420);
            CreateError::TooManySlots { target, slots, most: 10 }.to_string()
        };
        assert!(!text(0).contains("requested"), "{}", text(0));
        assert!(text(64).contains("64 were requested"), "{}", text(64));
        assert!([0, 64].iter().all(|slots| text(*slots).contains("at most 10")));
    }
}

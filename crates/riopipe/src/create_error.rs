//! Why a volume could not be created.

use riopipe_order::engine::EngineKind;
use riopipe_order::topology::TopologyError;
use riopipe_session::engine_choice::Lack;
use riopipe_session::initiator::volume::error::VolumeOptionsError;

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
    /// A bad name.
    #[error("a volume's name has 1 to 64 bytes without control characters")]
    Name,
    /// Bad options.
    #[error(transparent)]
    Options(#[from] VolumeOptionsError),
    /// The volume was made, and can't be looked at.
    #[error("the volume was made, but does not read back as written: {0}")]
    ReadBack(#[source] Box<OpenError>),
    /// The same namespace twice.
    #[error("{0} is given twice")]
    Twice(MemberAddr),
    /// Two drives that can't be told apart.
    #[error(
        "{0} has the same NGUID as a member before it: it is the same drive by another address, or \
         two targets were configured alike; give each target its own NQN"
    )]
    SameNguid(MemberAddr),
    /// No such namespace.
    #[error("{member}: the target has no such namespace; it has {have:?}")]
    NoNamespace {
        /// The member.
        member: MemberAddr,
        /// The namespaces that there are.
        have: Vec<u32>,
    },
    /// Blocks of another size.
    #[error("{member}: blocks of {size} bytes; Rio needs a namespace formatted with 4096")]
    BlockSize {
        /// The member.
        member: MemberAddr,
        /// Its block size, bytes.
        size: u32,
    },
    /// Too small.
    #[error("{member}: {blocks} blocks are too few; a member needs at least {needed}")]
    TooSmall {
        /// The member.
        member: MemberAddr,
        /// Blocks it has.
        blocks: u64,
        /// Blocks it needs.
        needed: u64,
    },
    /// It belongs to a volume already.
    #[error(
        "{member} belongs to volume \"{volume}\" already; force gives that volume up, with all that is on it"
    )]
    InUse {
        /// The member.
        member: MemberAddr,
        /// The volume.
        volume: String,
    },
    /// The engine can't run on a target.
    #[error("engine {engine} can't run on {target}: {}", lack_text(*.lack))]
    Engine {
        /// The engine.
        engine: EngineKind,
        /// The target.
        target: TargetAddr,
        /// What it needs and the target has not.
        lack: Lack,
    },
    /// The target's log has no room.
    #[error(
        "the log region of {target} is too small: the volume needs {need} bytes, {free} are free and other volumes have the rest; use fewer streams or slots, or a larger region (a log whose volumes are all gone can be removed while its target is down)"
    )]
    LogTooSmall {
        /// The target.
        target: TargetAddr,
        /// Bytes needed.
        need: u32,
        /// Bytes free.
        free: u32,
    },
    /// Too few slots to make progress.
    #[error("{have} log slots per stream on {target} are too few for its members: at least {need}")]
    TooFewSlots {
        /// The target.
        target: TargetAddr,
        /// Slots there would be.
        have: u32,
        /// Slots needed.
        need: u32,
    },
    /// The target refused or failed.
    #[error("target {target}: {doing} failed: {source}")]
    Call {
        /// The target.
        target: TargetAddr,
        /// What was being done.
        doing: &'static str,
        /// What went wrong.
        source: CallError,
    },
    /// The members make no volume.
    #[error(transparent)]
    Topology(#[from] TopologyError),
    /// No random id from the kernel.
    #[error("no random volume id from the kernel: {0}")]
    Random(std::io::Error),
    /// The volume that the members belong to now is in use.
    #[error(
        "volume \"{volume}\", which {member} belongs to, is owned by {owner}: stop that owner first"
    )]
    Owned {
        /// The member.
        member: MemberAddr,
        /// Its volume.
        volume: String,
        /// The owner's host NQN.
        owner: String,
    },
}

impl CreateError {
    /// Whether the same call may succeed later, with nothing changed but time. An owner that is
    /// there ([`Owned`](Self::Owned)) may go.
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

pub(crate) fn lack_text(lack: Lack) -> &'static str {
    match lack {
        Lack::Extension => "it does not speak Rio's extension",
        Lack::Log => "it has no ordering log",
    }
}

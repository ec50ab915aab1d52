//! What can go wrong, one type for each operation. Every message says what, where and what to do.

use std::fmt;
use std::time::Duration;

use riopipe_net::ConnectError;
use riopipe_nvme::command::Status;
use riopipe_order::attribute::{Seq, StreamId};
use riopipe_order::engine::EngineKind;
use riopipe_order::ownership::Violation;
use riopipe_order::topology::TopologyError;
use riopipe_session::claim::ClaimError;
use riopipe_session::engine_choice::Lack;
use riopipe_session::initiator::manager::UnreachableCause;
use riopipe_session::initiator::opening::OpeningError;
use riopipe_session::initiator::stream_driver::NotSubmitted;
use riopipe_session::label::AssembleError;
use riopipe_session::wire::retry;

use crate::addr::{MemberAddr, TargetAddr};
pub use crate::call_error::{AttachError, CallError};
pub use crate::create_error::CreateError;
use crate::failure::{Exhausted, FailureCause, StatusText, StreamFailure};
use crate::piece::Buf;
use crate::stream::Stream;
use crate::undone::SaveError;
use crate::volume::Volume;

/// Why engine `rio` can't run on a volume.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum EngineHindrance {
    /// A target can't take part.
    #[error("target {target} does not speak Rio's extension or has no ordering log")]
    Target {
        /// The target.
        target: TargetAddr,
        /// What it lacks.
        lack: Lack,
    },
    /// The volume was made for another engine.
    #[error("it was made for engine {0}, without room in the ordering logs")]
    MadeFor(EngineKind),
}

/// Why a volume could not be opened or looked at.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum OpenError {
    /// A target can't be reached or used.
    #[error(transparent)]
    Attach(#[from] AttachError),
    /// No such namespace.
    #[error("{member}: the target has no such namespace; it has {have:?}")]
    NoNamespace {
        /// The member.
        member: MemberAddr,
        /// The namespaces that there are.
        have: Vec<u32>,
    },
    /// The drive is not what it was.
    #[error(
        "{member}: the namespace has {blocks} blocks, fewer than the {needed} its label tells of: it has shrunk"
    )]
    Shrunk {
        /// The member.
        member: MemberAddr,
        /// Blocks that there are.
        blocks: u64,
        /// Blocks that there were.
        needed: u64,
    },
    /// The drives don't make the volume.
    #[error("{error}{}", given(.members, .error))]
    Assemble {
        /// The members given, in order.
        members: Vec<MemberAddr>,
        /// What is wrong.
        error: AssembleError,
    },
    /// The volume can't be taken.
    #[error("volume \"{volume}\"{}: {error}", on(.target))]
    Claim {
        /// The volume.
        volume: String,
        /// The target that stands against it, if it is one.
        target: Option<TargetAddr>,
        /// Why.
        error: ClaimError,
    },
    /// The engine can't run on this volume.
    #[error("engine {engine} can't run on volume \"{volume}\": {why}")]
    Engine {
        /// The engine asked for.
        engine: EngineKind,
        /// The volume.
        volume: String,
        /// Why not.
        why: EngineHindrance,
    },
    /// A target refused or failed.
    #[error("target {target}: {doing} failed: {source}")]
    Call {
        /// The target.
        target: TargetAddr,
        /// What was being done.
        doing: &'static str,
        /// What went wrong.
        source: CallError,
    },
    /// The labels describe no volume.
    #[error(transparent)]
    Topology(#[from] TopologyError),
    /// What a crash has left could not be recovered.
    #[error(transparent)]
    Recover(#[from] RecoverError),
    /// This process has not got what it takes.
    #[error(transparent)]
    Exhausted(#[from] Exhausted),
}

impl OpenError {
    /// Whether the same call may succeed later, with nothing changed but time: an owner goes or its
    /// lease runs out, a target comes back. Whatever the answer, opening again finds the same volume.
    /// False: it fails again until somebody changes a target, the members or the options.
    #[must_use]
    pub fn is_retryable(&self) -> bool {
        match self {
            Self::Attach(error) => error.is_retryable(),
            Self::Claim { error, .. } => matches!(error, ClaimError::Owned { .. }),
            Self::Call { source, .. } => source.is_retryable(),
            Self::Recover(error) => error.is_retryable(),
            Self::Exhausted(_) => true,
            _ => false,
        }
    }
}

/// Why what a crash has left could not be recovered. Whatever it is, it can be tried again: the same
/// prefix is found.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum RecoverError {
    /// A target can't be reached or used.
    #[error(transparent)]
    Attach(#[from] AttachError),
    /// A target of the open volume is away.
    #[error(
        "target {target} is away ({why}), and recovery needs all targets of the volume: try again \
         when it is back"
    )]
    Unreachable {
        /// The target.
        target: TargetAddr,
        /// What keeps it away.
        why: UnreachableReason,
    },
    /// A target of the open volume is lost to it for good.
    #[error(
        "target {target} is lost to this volume ({why}), and nothing more is written for its owner: \
         drop the volume; if it is to be yours, open it again (take_over fences an owner that is there)"
    )]
    Lost {
        /// The target.
        target: TargetAddr,
        /// Why.
        why: UnreachableCause,
    },
    /// A target refused or failed.
    #[error("target {target}: {doing} failed: {source}")]
    Call {
        /// The target.
        target: TargetAddr,
        /// What was being done.
        doing: &'static str,
        /// What went wrong.
        source: CallError,
    },
    /// What the targets say does not allow it.
    #[error("volume \"{volume}\"{}: {error}", on(.target))]
    Opening {
        /// The volume.
        volume: String,
        /// The target that it is about, if it is about one.
        target: Option<TargetAddr>,
        /// Why.
        error: OpeningError,
    },
    /// What was to be zeroed could not be kept.
    #[error("keeping what is about to be zeroed failed: {0}; nothing was zeroed")]
    Save(#[from] SaveError),
}

impl RecoverError {
    /// Whether the same call may succeed later, with nothing changed but time: the target comes
    /// back, the drive works again. False: this owner will not succeed; the volume is to be dropped,
    /// or somebody has to put a log or a drive right.
    #[must_use]
    pub fn is_retryable(&self) -> bool {
        match self {
            Self::Attach(error) => error.is_retryable(),
            Self::Unreachable { .. } => true,
            Self::Lost { .. } | Self::Save(_) => false,
            Self::Call { source, .. } => source.is_retryable(),
            Self::Opening { error, .. } => opening_may_pass(error),
        }
    }
}

/// Why a target that is expected to come back is away.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum UnreachableReason {
    /// It is away still.
    #[error(transparent)]
    Cause(#[from] UnreachableCause),
    /// It is back already.
    #[error("it was away for a moment")]
    Passed,
}

pub(crate) fn opening_may_pass(error: &OpeningError) -> bool {
    match error {
        OpeningError::Missing { .. } | OpeningError::Undo { .. } | OpeningError::Flush { .. } => {
            true
        }
        OpeningError::Claim(error) => matches!(error, ClaimError::Owned { .. }),
        OpeningError::Refused { status, .. } => retry::is_claim_passing(*status),
        _ => false,
    }
}

fn on(target: &Option<TargetAddr>) -> String {
    target.as_ref().map(|target| format!(" on {target}")).unwrap_or_default()
}

/// Why a failed stream could not be brought back.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum ReopenError {
    /// It has not failed.
    #[error(
        "stream {stream} has not failed: reopening it would throw away what is not durable; to do \
         that, drop it and open it again"
    )]
    Healthy {
        /// The stream.
        stream: StreamId,
    },
    /// Its prefix could not be found or restored.
    #[error(transparent)]
    Recover(#[from] RecoverError),
    /// It has been recovered, and can't be started.
    #[error(transparent)]
    Stream(#[from] StreamError),
}

impl ReopenError {
    /// Whether [`Stream::reopen`](crate::Stream::reopen) may succeed later, with nothing changed but
    /// time. False: the stream has not failed, has updates to be acknowledged first, or is lost to
    /// this owner.
    #[must_use]
    pub fn is_retryable(&self) -> bool {
        match self {
            Self::Healthy { .. } => false,
            Self::Recover(error) => error.is_retryable(),
            Self::Stream(error) => error.is_retryable(),
        }
    }
}

/// Why a list of in-place updates could not be acknowledged.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum AcknowledgeError {
    /// There is none.
    #[error("stream {stream} has no in-place updates that wait to be acknowledged")]
    NotPending {
        /// The stream.
        stream: StreamId,
    },
    /// A target refused or failed.
    #[error(transparent)]
    Recover(#[from] RecoverError),
}

impl AcknowledgeError {
    /// Whether the same call may succeed later, with nothing changed but time.
    #[must_use]
    pub fn is_retryable(&self) -> bool {
        matches!(self, Self::Recover(error) if error.is_retryable())
    }
}

fn given(members: &[MemberAddr], error: &AssembleError) -> String {
    let at = match error {
        AssembleError::Label { given, .. }
        | AssembleError::Foreign { given, .. }
        | AssembleError::Order { given, .. }
        | AssembleError::Copied { given }
        | AssembleError::Contradiction { given }
        | AssembleError::LogDue { given, .. } => *given,
        _ => return String::new(),
    };
    members.get(at).map(|member| format!(" (member {at} is {member})")).unwrap_or_default()
}

/// Why a stream could not be opened.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum StreamError {
    /// No such stream.
    #[error("stream {id}: the volume has {streams} streams, numbered from 0")]
    NoSuchStream {
        /// The stream asked for.
        id: u16,
        /// Streams of the volume.
        streams: u16,
    },
    /// It is open already.
    #[error("stream {0} is open already")]
    Open(StreamId),
    /// No queue left at a target.
    #[error("target {target} grants no more than {queues} I/O queues: open fewer streams")]
    NoQueue {
        /// The target.
        target: TargetAddr,
        /// Queues it grants.
        queues: u16,
    },
    /// Bad options.
    #[error(transparent)]
    Options(#[from] StreamOptionsError),
    /// This process has not got what it takes.
    #[error(transparent)]
    Exhausted(#[from] Exhausted),
    /// Its in-place updates beyond the prefix have not been acknowledged (T9).
    #[error(
        "stream {stream} was recovered, and {updates} in-place updates beyond its last group may or \
         may not be there: look at them (Volume::in_place), then acknowledge them \
         (Volume::acknowledge)"
    )]
    InPlacePending {
        /// The stream.
        stream: StreamId,
        /// How many updates.
        updates: usize,
    },
    /// Its last life ended without a close, and it could not be recovered.
    #[error(transparent)]
    Recover(#[from] RecoverError),
    /// No connection.
    #[error(transparent)]
    Connect(#[from] ConnectError),
    /// A target refused or failed.
    #[error("stream {stream}: target {target}: {source}")]
    Target {
        /// The stream.
        stream: StreamId,
        /// The target.
        target: TargetAddr,
        /// What went wrong.
        source: CallError,
    },
}

impl StreamError {
    /// Whether the same call may succeed later, with nothing changed but time: a target comes back,
    /// the stream's last connection ends. False: it fails again until another stream is closed, the
    /// updates are acknowledged, or the call is changed.
    #[must_use]
    pub fn is_retryable(&self) -> bool {
        match self {
            Self::Recover(error) => error.is_retryable(),
            Self::Connect(error) => !matches!(error, ConnectError::Address { .. }),
            Self::Target { source, .. } => source.is_retryable(),
            Self::Exhausted(_) => true,
            _ => false,
        }
    }
}

/// Options that make no stream.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum StreamOptionsError {
    /// [`queue_depth`](crate::StreamOptions::queue_depth).
    #[error("a stream's queue depth is 1 to 1024")]
    QueueDepth,
    /// [`kept_bytes_max`](crate::StreamOptions::kept_bytes_max).
    #[error("a stream must be able to keep at least one block")]
    KeptBytes,
}

/// Why there is no buffer of a length.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum BufError {
    /// It is not made of whole blocks.
    #[error("a buffer has whole blocks of 4096 bytes, at least one, and not {len} bytes")]
    NotBlocks {
        /// The length asked for, bytes.
        len: usize,
    },
    /// No group could take it.
    #[error(
        "a buffer of {len} bytes fits into no group: the stream keeps at most {kept_bytes_max} bytes"
    )]
    TooLarge {
        /// The length asked for, bytes.
        len: usize,
        /// [`StreamOptions::kept_bytes_max`](crate::StreamOptions::kept_bytes_max).
        kept_bytes_max: u64,
    },
}

/// Why a group was refused, and its buffers. Nothing of the group was taken.
#[derive(Debug, thiserror::Error)]
#[error("{kind}")]
pub struct SubmitError {
    /// The reason.
    pub kind: SubmitErrorKind,
    /// The group's buffers, in the order of its writes.
    pub bufs: Vec<Buf>,
}

impl SubmitError {
    /// See [`SubmitErrorKind::is_retryable`].
    #[must_use]
    pub fn is_retryable(&self) -> bool {
        self.kind.is_retryable()
    }
}

/// Why a group was refused.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum SubmitErrorKind {
    /// No room right now: wait for [`Until::Space`](crate::Until::Space) and submit again.
    #[error("no room for the group now ({0}): wait for room and submit it again")]
    Full(Bound),
    /// It can never fit.
    #[error("the group can never fit ({0}): submit smaller groups")]
    TooLarge(Bound),
    /// More requests than a group can count.
    #[error("the group makes more than 65535 requests: submit smaller groups")]
    TooManyEntries,
    /// A group without writes that is not durable.
    #[error("a group without writes has no meaning unless it is durable")]
    Empty,
    /// A write of no blocks, or beyond the volume.
    #[error("{blocks} blocks at {lba} do not lie within the volume's {volume} blocks")]
    OutOfRange {
        /// First block.
        lba: u64,
        /// Blocks.
        blocks: u32,
        /// Blocks of the volume.
        volume: u64,
    },
    /// A breach of the caller's duty (T11, T15).
    #[error(transparent)]
    Handover(#[from] Violation),
    /// The stream has failed.
    #[error(transparent)]
    Poisoned(StreamFailure),
}

impl SubmitErrorKind {
    /// Whether the same group may be taken later, with nothing changed but time: wait for
    /// [`Until::Space`](crate::Until::Space) and submit it again. False: it will be refused again. A
    /// stream that has failed ([`Poisoned`](Self::Poisoned)) can be
    /// [reopened](crate::Stream::reopen) if [`StreamFailure::is_retryable`] says so.
    #[must_use]
    pub fn is_retryable(&self) -> bool {
        matches!(self, Self::Full(_))
    }
}

/// Which bound a group ran into.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum Bound {
    /// The ordering log of this target (T13).
    Log {
        /// The target.
        target: TargetAddr,
    },
    /// The memory for what may have to be sent again (T14):
    /// [`StreamOptions::kept_bytes_max`](crate::StreamOptions::kept_bytes_max).
    Memory,
}

impl fmt::Display for Bound {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Log { target } => write!(f, "the ordering log of target {target} is full"),
            Self::Memory => f.write_str("the bound on memory kept for replay is reached"),
        }
    }
}

/// Why a wait ended without what was waited for.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum WaitError {
    /// The deadline passed; nothing else changed.
    #[error("what was waited for did not come within {0:?}; it may still")]
    Deadline(Duration),
    /// A group that was never submitted.
    #[error("group {seq} has not been submitted; the last one is {last}")]
    NotSubmitted {
        /// The group waited for.
        seq: Seq,
        /// The last one submitted.
        last: Seq,
    },
    /// A [`StreamWaker`](crate::StreamWaker) has called; nothing else changed.
    #[error("the wait was interrupted by another thread; what was waited for may still come")]
    Woken,
    /// The stream was closed, and the group was never submitted.
    #[error("group {seq} was not submitted before its stream was closed; the last one was {last}")]
    Closed {
        /// The group waited for.
        seq: Seq,
        /// The last one submitted.
        last: Seq,
    },
    /// The stream was dropped without being closed.
    #[error(
        "the stream was dropped before group {seq} was reported: it is recovered when it is opened \
         again"
    )]
    Dropped {
        /// The group waited for.
        seq: Seq,
    },
    /// The stream has failed.
    #[error(transparent)]
    Failed(#[from] StreamFailure),
}

impl WaitError {
    /// Whether the same wait may succeed: it was only not long enough, or interrupted. False: the
    /// group was never submitted, the stream is gone, or it has failed; [`StreamFailure::is_retryable`] says whether it can be
    /// reopened.
    #[must_use]
    pub fn is_retryable(&self) -> bool {
        matches!(self, Self::Deadline(_) | Self::Woken)
    }
}

impl From<NotSubmitted> for WaitError {
    fn from(NotSubmitted { seq, last }: NotSubmitted) -> Self {
        Self::NotSubmitted { seq, last }
    }
}

/// Why a read failed.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum ReadError {
    /// Beyond the volume, or not whole blocks.
    #[error("{bytes} bytes at block {lba} are no whole blocks within the volume's {volume} blocks")]
    OutOfRange {
        /// First block.
        lba: u64,
        /// Bytes.
        bytes: usize,
        /// Blocks of the volume.
        volume: u64,
    },
    /// The deadline passed. What is in the buffers is not defined.
    #[error("what was to be read did not come within {0:?}")]
    Deadline(Duration),
    /// The volume has been closed.
    #[error("the volume has been closed")]
    Closed,
    /// A target can't be reached by a reader of the volume.
    #[error("target {target}: {source}")]
    Call {
        /// The target.
        target: TargetAddr,
        /// What went wrong.
        source: CallError,
    },
    /// A reader of the volume can't be connected to its targets.
    #[error("reading the volume: {0}")]
    Connect(Box<StreamError>),
    /// A reader of the volume has lost a target for good, or for longer than
    /// [`loss_timeout`](crate::ConnectOptions::loss_timeout).
    #[error("{target}: {cause}")]
    Target {
        /// The target.
        target: Box<MemberAddr>,
        /// Why.
        cause: FailureCause,
    },
    /// The drive or target failed.
    #[error("reading block {lba} failed: {}", StatusText(*.status))]
    Status {
        /// The block where it failed.
        lba: u64,
        /// The target's answer.
        status: Status,
    },
    /// The stream has failed.
    #[error(transparent)]
    Failed(#[from] StreamFailure),
}

impl From<StreamError> for ReadError {
    fn from(error: StreamError) -> Self {
        Self::Connect(Box::new(error))
    }
}

impl ReadError {
    /// Whether the same read may succeed later, with nothing changed but time. False: it asks for
    /// what there is not, the drive has lost the blocks, or the stream has failed;
    /// [`StreamFailure::is_retryable`] says whether that can be reopened.
    #[must_use]
    pub fn is_retryable(&self) -> bool {
        match self {
            Self::Deadline(_) => true,
            Self::OutOfRange { .. } | Self::Closed | Self::Failed(_) => false,
            Self::Call { source, .. } => source.is_retryable(),
            Self::Connect(error) => error.is_retryable(),
            Self::Target { cause, .. } => cause.is_retryable(),
            Self::Status { status, .. } => retry::is_claim_passing(*status),
        }
    }
}

/// Why a volume could not be closed cleanly: its streams are as they were reported.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum CloseError {
    /// Streams are still open.
    #[error("{0} streams are still open: close them first")]
    StreamsOpen(usize),
    /// A target refused or failed.
    #[error("target {target}: giving the volume back failed: {source}")]
    Call {
        /// The target.
        target: TargetAddr,
        /// What went wrong.
        source: CallError,
    },
}

impl CloseError {
    /// Whether the same call may succeed later, with nothing changed but time. Streams that are open
    /// have to be closed first.
    #[must_use]
    pub fn is_retryable(&self) -> bool {
        matches!(self, Self::Call { source, .. } if source.is_retryable())
    }
}

/// A volume that was not closed, and why. It is as it was, and may be closed again; where a target
/// has it back already, nothing more is written there.
#[derive(Debug, thiserror::Error)]
#[error("{error}")]
pub struct NotClosed {
    /// The reason.
    #[source]
    pub error: CloseError,
    /// The volume.
    pub back: Volume,
}

impl NotClosed {
    /// See [`CloseError::is_retryable`].
    #[must_use]
    pub fn is_retryable(&self) -> bool {
        self.error.is_retryable()
    }
}

/// A stream that was not closed in time, and why. It goes on as if that had not been asked for.
#[derive(Debug, thiserror::Error)]
#[error("the stream was not closed: {error}")]
pub struct StreamNotClosed {
    /// The reason: [`WaitError::Deadline`] or [`WaitError::Failed`].
    #[source]
    pub error: WaitError,
    /// The stream.
    pub back: Box<Stream>,
}

impl StreamNotClosed {
    /// Whether the stream may be closed later, with nothing changed but time. False: it has failed.
    #[must_use]
    pub fn is_retryable(&self) -> bool {
        self.error.is_retryable()
    }
}

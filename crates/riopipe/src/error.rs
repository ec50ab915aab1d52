//! The errors of this crate, one type for each operation. Each message contains the operation that
//! failed, the place, the reason, and the remedy. `is_retryable` of each type is whether the same
//! call may succeed later, if only time passes.

use std::fmt;
use std::time::Duration;

use riopipe_net::ConnectError;
use riopipe_nvme::command::Status;
use riopipe_order::attribute::{Seq, StreamId};
use riopipe_order::engine::EngineKind;
use riopipe_order::ownership::Violation;
use riopipe_order::topology::TopologyError;
use riopipe_session::claim::ClaimError;
use riopipe_session::initiator::manager::UnreachableCause;
use riopipe_session::initiator::opening::OpeningError;
use riopipe_session::initiator::stream_driver::NotSubmitted;
use riopipe_session::label::AssembleError;
use riopipe_session::wire::retry;

use crate::addr::{MemberAddr, TargetAddr};
use crate::call_error::{AttachError, CallError, opening_may_pass};
use crate::failure::{Exhausted, FailureCause, StatusText, StreamFailure};
use crate::piece::Buf;
use crate::recovery::EngineUnavailable;
use crate::undone::SaveError;

/// Why a volume could not be opened or inspected.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum OpenError {
    /// A target can't be reached or used.
    #[error(transparent)]
    Attach(#[from] AttachError),
    /// The target of a member does not have its namespace.
    #[error("{member}: the target has no such namespace; it has {have:?}")]
    NoNamespace {
        /// The member.
        member: MemberAddr,
        /// The ids of the target's namespaces.
        have: Vec<u32>,
    },
    /// A namespace has fewer blocks than its label records.
    #[error(
        "{member}: the namespace has {blocks} blocks, fewer than the {needed} that its label records: \
         it has shrunk"
    )]
    Shrunk {
        /// The member.
        member: MemberAddr,
        /// Blocks of the namespace.
        blocks: u64,
        /// Blocks that the label records.
        needed: u64,
    },
    /// A volume that is to grow has a drive without more space.
    #[error(
        "{member} has {blocks} blocks, so the volume can't grow: for one more stripe unit each of its \
         drives needs {needed}"
    )]
    NothingToGrow {
        /// The member with the smallest drive.
        member: MemberAddr,
        /// Blocks of its namespace.
        blocks: u64,
        /// Blocks that each namespace needs at least.
        needed: u64,
    },
    /// The new name is invalid: a name has 1 to 64 bytes without control characters.
    #[error("a volume's name has 1 to 64 bytes without control characters")]
    Name,
    /// The drives do not make one volume, or not this volume in this order.
    #[error("{error}{}", given_member(.members, .error))]
    Assemble {
        /// The members, in the order of the call.
        members: Vec<MemberAddr>,
        /// The reason.
        error: AssembleError,
    },
    /// The volume can't be claimed.
    #[error("volume \"{volume}\"{}: {error}", on_target(.target))]
    Claim {
        /// The volume.
        volume: String,
        /// The target that refused it, if it was a single one.
        target: Option<TargetAddr>,
        /// The reason.
        error: ClaimError,
    },
    /// The engine can't run on this volume.
    #[error("engine {engine} can't run on volume \"{volume}\": {why}")]
    Engine {
        /// The engine of the options.
        engine: EngineKind,
        /// The volume.
        volume: String,
        /// The reason.
        why: EngineUnavailable,
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
    /// The labels describe no valid volume.
    #[error(transparent)]
    Topology(#[from] TopologyError),
    /// The recovery after a crash failed.
    #[error(transparent)]
    Recover(#[from] RecoverError),
    /// This process has no descriptors or threads left.
    #[error(transparent)]
    Exhausted(#[from] Exhausted),
}

impl OpenError {
    /// Whether the same call may succeed later, if only time passes: an owner releases the volume
    /// or its lease runs out, or a target comes back. In both cases the next attempt finds the same
    /// volume. False: it fails again until a target, the members or the options change.
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

/// Why a recovery failed. It can be tried again in each case, and finds the same prefix.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum RecoverError {
    /// A target can't be reached or used.
    #[error(transparent)]
    Attach(#[from] AttachError),
    /// A target of the open volume is unreachable.
    #[error(
        "target {target} is unreachable ({why}), and recovery needs all targets of the volume: try \
         again when it is back"
    )]
    Unreachable {
        /// The target.
        target: TargetAddr,
        /// The reason.
        why: UnreachableReason,
    },
    /// A target of the open volume is lost to its owner for good.
    #[error(
        "target {target} is lost to this owner ({why}), and nothing more is written there: drop the \
         volume; to own it again, open it again (take_over fences an owner that is alive)"
    )]
    Lost {
        /// The target.
        target: TargetAddr,
        /// The reason.
        why: UnreachableCause,
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
    /// The answers of the targets do not allow the recovery.
    #[error("volume \"{volume}\"{}: {error}", on_target(.target))]
    Opening {
        /// The volume.
        volume: String,
        /// The target, if the error concerns a single one.
        target: Option<TargetAddr>,
        /// The reason.
        error: OpeningError,
    },
    /// The data that was about to be zeroed could not be saved.
    #[error("saving the data that is about to be zeroed failed: {0}; nothing was zeroed")]
    Save(#[from] SaveError),
}

impl RecoverError {
    /// Whether the same call may succeed later, if only time passes: the target comes back, or the
    /// drive works again. False: this owner will not succeed. Drop the volume, or repair the log or
    /// the drive.
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

/// Why a target is unreachable. The target is expected to come back.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum UnreachableReason {
    /// It is still unreachable.
    #[error(transparent)]
    Cause(#[from] UnreachableCause),
    /// It was unreachable during the call, and is back already.
    #[error("it was unreachable for a moment")]
    Passed,
}

/// The address of a target, for the middle of a message. Empty if the error concerns no single
/// target.
fn on_target(target: &Option<TargetAddr>) -> String {
    match target {
        Some(target) => format!(" on {target}"),
        None => String::new(),
    }
}

/// Why a failed stream could not be reopened.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum ReopenError {
    /// The stream has not failed.
    #[error(
        "stream {stream} has not failed: reopening it would drop the groups that are not durable; if \
         you want that, drop the stream and open it again"
    )]
    Healthy {
        /// The stream.
        stream: StreamId,
    },
    /// The recovery of the stream failed.
    #[error(transparent)]
    Recover(#[from] RecoverError),
    /// The stream has been recovered, and could not be started.
    #[error(transparent)]
    Stream(#[from] StreamError),
}

impl ReopenError {
    /// Whether [`Stream::reopen`](crate::Stream::reopen) may succeed later, if only time passes.
    /// False: the stream has not failed, has updates that must be acknowledged first, or is lost to
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
    /// The stream has no list that waits to be acknowledged.
    #[error("stream {stream} has no in-place updates that wait to be acknowledged")]
    NotPending {
        /// The stream.
        stream: StreamId,
    },
    /// A target did not drop the list.
    #[error(transparent)]
    Recover(#[from] RecoverError),
}

impl AcknowledgeError {
    /// Whether the same call may succeed later, if only time passes.
    #[must_use]
    pub fn is_retryable(&self) -> bool {
        matches!(self, Self::Recover(error) if error.is_retryable())
    }
}

/// The address of the member that an error concerns, in brackets. Empty if the error concerns no
/// single member.
fn given_member(members: &[MemberAddr], error: &AssembleError) -> String {
    let index = match error {
        AssembleError::Label { given, .. }
        | AssembleError::Foreign { given, .. }
        | AssembleError::Order { given, .. }
        | AssembleError::Copied { given }
        | AssembleError::Contradiction { given }
        | AssembleError::LogDue { given, .. } => *given,
        _ => return String::new(),
    };
    match members.get(index) {
        Some(member) => format!(" (member {index} is {member})"),
        None => String::new(),
    }
}

/// Why a stream could not be opened.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum StreamError {
    /// The volume has no stream with this number.
    #[error("stream {id}: the volume has {streams} streams, numbered from 0")]
    NoSuchStream {
        /// The number of the call.
        id: u16,
        /// Streams of the volume.
        streams: u16,
    },
    /// The stream is open already.
    #[error("stream {0} is open already")]
    Open(StreamId),
    /// A target has no I/O queue left for the stream.
    #[error("target {target} grants no more than {queues} I/O queues: open fewer streams")]
    NoQueue {
        /// The target.
        target: TargetAddr,
        /// I/O queues that it grants.
        queues: u16,
    },
    /// The options are invalid.
    #[error(transparent)]
    Options(#[from] StreamOptionsError),
    /// This process has no descriptors or threads left.
    #[error(transparent)]
    Exhausted(#[from] Exhausted),
    /// The in-place updates beyond the stream's prefix have not been acknowledged (trap T9).
    #[error(
        "stream {stream} was recovered, and {updates} in-place updates beyond its last group may or \
         may not be there: check these blocks (Volume::in_place), then acknowledge them \
         (Volume::acknowledge)"
    )]
    InPlacePending {
        /// The stream.
        stream: StreamId,
        /// The number of updates, as ranges of blocks.
        updates: usize,
    },
    /// The stream was dropped without a close before, and could not be recovered.
    #[error(transparent)]
    Recover(#[from] RecoverError),
    /// A connection to a target could not be made.
    #[error(transparent)]
    Connect(#[from] ConnectError),
    /// A target refused a request, or failed.
    #[error("stream {stream}: target {target}: {source}")]
    Target {
        /// The stream.
        stream: StreamId,
        /// The target.
        target: TargetAddr,
        /// The reason.
        source: CallError,
    },
}

impl StreamError {
    /// Whether the same call may succeed later, if only time passes: a target comes back, or the
    /// last connection of the stream ends. False: it fails again until another stream is closed,
    /// the updates are acknowledged, or the call is changed.
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

/// Which option of a stream is invalid.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum StreamOptionsError {
    /// [`queue_depth`](crate::StreamOptions::queue_depth) is 0, or larger than 1024.
    #[error("a stream's queue depth is 1 to 1024")]
    QueueDepth,
    /// [`kept_bytes_max`](crate::StreamOptions::kept_bytes_max) is less than one block.
    #[error("a stream must be able to keep at least one block")]
    KeptBytes,
    /// [`orderless`](crate::StreamOptions::orderless) with this engine, which is not `barrier`.
    #[error(
        "a stream without an order needs engine `barrier`, and the volume runs with `{0}`; engine \
         `none` gives no stream an order"
    )]
    Orderless(EngineKind),
}

/// Why a stream has no buffer of this length.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum BufError {
    /// The length is 0, or not a multiple of 4096.
    #[error("a buffer has whole blocks of 4096 bytes, at least one, and not {len} bytes")]
    NotBlocks {
        /// The length of the call, bytes.
        len: usize,
    },
    /// The buffer would be too large for any group.
    #[error(
        "a buffer of {len} bytes fits into no group: the stream keeps at most {kept_bytes_max} bytes"
    )]
    TooLarge {
        /// The length of the call, bytes.
        len: usize,
        /// The bound, bytes:
        /// [`StreamOptions::kept_bytes_max`](crate::StreamOptions::kept_bytes_max).
        kept_bytes_max: u64,
    },
    /// The process does not get so much memory.
    #[error("there is no memory for a buffer of {len} bytes: use smaller buffers")]
    NoMemory {
        /// The length of the call, bytes.
        len: usize,
    },
}

/// Why a group was refused, and its buffers. No write of the group was admitted.
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
    /// There is no space for the group now: wait for [`Until::Space`](crate::Until::Space) and
    /// submit it again.
    #[error("no space for the group now ({0}): wait for space and submit it again")]
    Full(Bound),
    /// The group is larger than the bound, so it can never be admitted.
    #[error("the group can never fit ({0}): submit smaller groups")]
    TooLarge(Bound),
    /// The group makes more than 65535 requests.
    #[error("the group makes more than 65535 requests: submit smaller groups")]
    TooManyEntries,
    /// The group has no writes, and is not durable.
    #[error("a group without writes has no meaning unless it is durable")]
    Empty,
    /// The stream that is to [follow](crate::Group::follower) the group is not open in this process,
    /// is being closed, has failed, or is the stream of the group itself.
    #[error(
        "stream {stream} can't follow the group: it must be another stream, open and not failed"
    )]
    NoFollower {
        /// The stream that is to follow.
        stream: StreamId,
    },
    /// A write has no blocks, or does not lie within the volume.
    #[error("{blocks} blocks at {lba} do not lie within the volume's {volume} blocks")]
    OutOfRange {
        /// The first volume block of the write.
        lba: u64,
        /// Blocks of the write.
        blocks: u32,
        /// Blocks of the volume.
        volume: u64,
    },
    /// The group violates a duty of the caller (traps T11, T15). Only an ownership checker reports
    /// this.
    #[error(transparent)]
    Violation(#[from] Violation),
    /// The stream has failed.
    #[error(transparent)]
    Poisoned(StreamFailure),
}

impl SubmitErrorKind {
    /// Whether the same group may be admitted later, if only time passes: wait for
    /// [`Until::Space`](crate::Until::Space) and submit it again. False: it will be refused again.
    /// If the stream has failed ([`Poisoned`](Self::Poisoned)), [`StreamFailure::is_retryable`] is
    /// whether it can be [reopened](crate::Stream::reopen).
    #[must_use]
    pub fn is_retryable(&self) -> bool {
        matches!(self, Self::Full(_))
    }
}

/// The bound that a group exceeds.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum Bound {
    /// The ordering log of this target (trap T13).
    Log {
        /// The target.
        target: TargetAddr,
    },
    /// The replay memory of the stream (trap T14):
    /// [`StreamOptions::kept_bytes_max`](crate::StreamOptions::kept_bytes_max).
    Memory,
    /// The stream's part of the prepare area of engine `horae` on this member.
    PrepareArea {
        /// The member, counted from 0.
        member: usize,
    },
    /// The stream [follows](crate::Group::follower) a group of another stream, which is not durable
    /// yet.
    Followed,
}

impl fmt::Display for Bound {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Log { target } => write!(f, "the ordering log of target {target} is full"),
            Self::Memory => f.write_str("the bound of the replay memory is reached"),
            Self::PrepareArea { member } => {
                write!(f, "the prepare area of member {member} is full")
            }
            Self::Followed => f.write_str("a group that the stream follows is not durable yet"),
        }
    }
}

/// Why a wait ended early.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum WaitError {
    /// The time limit has passed. The stream is as before, and the same wait may still succeed.
    #[error("the wait was not over within {0:?}; it may still succeed")]
    Deadline(Duration),
    /// The group has not been submitted.
    #[error("group {seq} has not been submitted; the last one is {last}")]
    NotSubmitted {
        /// The group of the wait.
        seq: Seq,
        /// The last group submitted.
        last: Seq,
    },
    /// Another thread has called a [`StreamWaker`](crate::StreamWaker). The stream is as before,
    /// and the same wait may still succeed.
    #[error("another thread interrupted the wait; it may still succeed")]
    Woken,
    /// The stream was closed, and the group was never submitted.
    #[error("group {seq} was not submitted before its stream was closed; the last one was {last}")]
    Closed {
        /// The group of the wait.
        seq: Seq,
        /// The last group submitted.
        last: Seq,
    },
    /// The stream was dropped without a close.
    #[error(
        "the stream was dropped before group {seq} was reported: it is recovered when it is opened \
         again"
    )]
    Dropped {
        /// The group of the wait.
        seq: Seq,
    },
    /// The stream has failed.
    #[error(transparent)]
    Failed(#[from] StreamFailure),
}

impl WaitError {
    /// Whether the same wait may succeed: it was only too short, or interrupted. False: the group
    /// was never submitted, or the stream was closed, was dropped or has failed. A failed stream
    /// can be reopened if [`StreamFailure::is_retryable`] is true.
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
    /// An extent does not lie within the volume, or does not have whole blocks.
    #[error("{bytes} bytes at block {lba} are no whole blocks within the volume's {volume} blocks")]
    OutOfRange {
        /// The first volume block of the extent.
        lba: u64,
        /// Bytes of the extent.
        bytes: usize,
        /// Blocks of the volume.
        volume: u64,
    },
    /// The time limit has passed. The content of the buffers is not defined.
    #[error("the read was not over within {0:?}")]
    Deadline(Duration),
    /// [`Stream::cancel_read`](crate::Stream::cancel_read) has ended the read.
    #[error("the read was cancelled")]
    Cancelled,
    /// The stream has so many submitted reads, with those whose end was not taken.
    #[error("{0} reads are submitted: take the ends of some first")]
    Full(usize),
    /// The volume has been closed. Only a [`Reader`](crate::Reader) reports this.
    #[error("the volume has been closed")]
    Closed,
    /// A [`Reader`](crate::Reader) can't reach a target.
    #[error("target {target}: {source}")]
    Call {
        /// The target.
        target: TargetAddr,
        /// The reason.
        source: CallError,
    },
    /// A [`Reader`](crate::Reader) could not start its connections.
    #[error("reading the volume: {0}")]
    Connect(Box<StreamError>),
    /// A [`Reader`](crate::Reader) has lost a target for good, or for longer than
    /// [`loss_timeout`](crate::ConnectOptions::loss_timeout).
    #[error("{target}: {cause}")]
    Target {
        /// The target and its namespace.
        target: Box<MemberAddr>,
        /// The reason.
        cause: FailureCause,
    },
    /// The target answered with an error, its own or the drive's.
    #[error("reading block {lba} failed: {}", StatusText(*.status))]
    Status {
        /// The volume block at which the read failed.
        lba: u64,
        /// The NVMe status of the target's answer.
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
    /// Whether the same read may succeed later, if only time passes. False: the blocks do not
    /// exist, the drive has lost them, the volume has been closed, or the stream has failed. A
    /// failed stream can be reopened if [`StreamFailure::is_retryable`] is true.
    #[must_use]
    pub fn is_retryable(&self) -> bool {
        match self {
            Self::Deadline(_) | Self::Full(_) => true,
            Self::OutOfRange { .. } | Self::Cancelled | Self::Closed | Self::Failed(_) => false,
            Self::Call { source, .. } => source.is_retryable(),
            Self::Connect(error) => error.is_retryable(),
            Self::Target { cause, .. } => cause.is_retryable(),
            Self::Status { status, .. } => retry::is_claim_passing(*status),
        }
    }
}

/// Why a volume could not be closed. Groups that were reported complete or durable are so.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum CloseError {
    /// So many streams are still open.
    #[error("{0} streams are still open: close them first")]
    StreamsOpen(usize),
    /// A target did not release the volume.
    #[error("target {target}: releasing the volume failed: {source}")]
    Call {
        /// The target.
        target: TargetAddr,
        /// The reason.
        source: CallError,
    },
}

impl CloseError {
    /// Whether the same call may succeed later, if only time passes. Open streams must be closed
    /// first.
    #[must_use]
    pub fn is_retryable(&self) -> bool {
        matches!(self, Self::Call { source, .. } if source.is_retryable())
    }
}

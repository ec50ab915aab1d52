//! What can go wrong, one type for each operation. Every message says what, where and what to do.

use std::fmt;
use std::time::Duration;

use riopipe_net::{ConnectError, LinkError};
use riopipe_nvme::command::Status;
use riopipe_order::attribute::{Seq, StreamId};
use riopipe_order::engine::{Bound, Cause, EngineKind};
use riopipe_order::handover::Breach;
use riopipe_order::topology::TopologyError;
use riopipe_session::claim::ClaimError;
use riopipe_session::initiator::association::AssociationError;
use riopipe_session::initiator::keep_alive::Loss;
use riopipe_session::initiator::opening::OpeningError;
use riopipe_session::initiator::queue_pair::SessionError;
use riopipe_session::initiator::stream_driver::NotSubmitted;
use riopipe_session::label::AssembleError;

use crate::piece::Buf;
use crate::undone::SaveError;

/// A status with its meaning, also of Rio's own codes.
pub(crate) struct Said(pub(crate) Status);

impl fmt::Display for Said {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match riopipe_session::wire::status::meaning(self.0) {
            Some(meaning) => f.write_str(meaning),
            None => fmt::Display::fmt(&self.0, f),
        }
    }
}

/// Why a command got no good answer.
#[derive(Debug, thiserror::Error)]
pub enum CallError {
    /// The connection broke, or could not be made.
    #[error("{0}")]
    Link(String),
    /// The target broke the protocol, or refused the queue.
    #[error(transparent)]
    Session(#[from] SessionError),
    /// The target can't be brought up.
    #[error(transparent)]
    Attach(riopipe_session::initiator::attach::AttachError),
    /// The target closed the connection.
    #[error("the target closed the connection")]
    Closed,
    /// The target dropped the association.
    #[error("{0}")]
    Lost(Loss),
    /// No answer in time.
    #[error("no answer within {0:?}: the target stalls, or is no NVMe/TCP target")]
    TimedOut(Duration),
    /// The target has not answered what it was asked before.
    #[error("the target stalls: it owes {0} answers, and is asked nothing more before they come")]
    Behind(usize),
    /// The target answered with an error.
    #[error("{}", Said(*.0))]
    Status(Status),
    /// The target's answer makes no sense.
    #[error("the target's answer makes no sense: {0}")]
    Nonsense(&'static str),
}

impl From<LinkError> for CallError {
    fn from(error: LinkError) -> Self {
        Self::Link(error.to_string())
    }
}

impl From<AssociationError> for CallError {
    fn from(error: AssociationError) -> Self {
        match error {
            AssociationError::Session(error) => Self::Session(error),
            AssociationError::Attach(error) => Self::Attach(error),
            AssociationError::Closed | AssociationError::HungUp => Self::Closed,
            AssociationError::Dropped(loss) => Self::Lost(loss),
            AssociationError::TimedOut(ns) => Self::TimedOut(Duration::from_nanos(ns)),
            error @ (AssociationError::Connect(_)
            | AssociationError::Broken(_)
            | AssociationError::WhichSubsystem(_)) => Self::Link(error.to_string()),
        }
    }
}

/// Why a target could not be attached to.
#[derive(Debug, thiserror::Error)]
pub enum AttachError {
    /// No connection.
    #[error(transparent)]
    Connect(#[from] ConnectError),
    /// The conversation with the target failed.
    #[error("target {target}{}: {source}", in_brackets(.nqn))]
    Target {
        /// Its address.
        target: String,
        /// The subsystem asked for.
        nqn: Option<String>,
        /// What went wrong.
        source: CallError,
    },
    /// Discovery lists no subsystem, or several.
    #[error(
        "target {target} offers {} subsystems{}: say which one with nqn=…",
        .found.len(),
        list(.found)
    )]
    WhichSubsystem {
        /// Its address.
        target: String,
        /// The NQNs it lists.
        found: Vec<String>,
    },
    /// Several targets of a volume.
    #[error("{} of the volume's targets can't be used: {}", .0.len(), each(.0))]
    Several(Vec<AttachError>),
}

impl AttachError {
    /// Why there is no association with `nqn` of `target`; `connect` is the last failure to connect.
    pub(crate) fn of(
        target: &str,
        nqn: String,
        error: AssociationError,
        connect: Option<ConnectError>,
    ) -> Self {
        let target = target.to_owned();
        match (error, connect) {
            (AssociationError::Connect(_), Some(error)) => Self::Connect(error),
            (AssociationError::WhichSubsystem(found), _) => Self::WhichSubsystem { target, found },
            (error, _) => Self::Target { target, nqn: Some(nqn), source: error.into() },
        }
    }
}

fn each(errors: &[AttachError]) -> String {
    errors.iter().map(ToString::to_string).collect::<Vec<_>>().join("; ")
}

fn in_brackets(nqn: &Option<String>) -> String {
    nqn.as_ref().map(|nqn| format!(" ({nqn})")).unwrap_or_default()
}

fn list(found: &[String]) -> String {
    if found.is_empty() { String::new() } else { format!(" ({})", found.join(", ")) }
}

/// Why a volume could not be created.
#[derive(Debug, thiserror::Error)]
pub enum CreateError {
    /// A target can't be reached or used.
    #[error(transparent)]
    Attach(#[from] AttachError),
    /// A bad name.
    #[error("a volume's name has 1 to 64 bytes without control characters")]
    Name,
    /// Bad options.
    #[error("{0}")]
    Options(&'static str),
    /// The same namespace twice.
    #[error("{0} is given twice")]
    Twice(String),
    /// Two drives that can't be told apart.
    #[error(
        "{0} has the same NGUID as a member before it: it is the same drive by another address, or \
         two targets were configured alike; give each target its own NQN"
    )]
    SameNguid(String),
    /// No such namespace.
    #[error("{member}: the target has no such namespace; it has {have:?}")]
    NoNamespace {
        /// The member.
        member: String,
        /// The namespaces that there are.
        have: Vec<u32>,
    },
    /// Blocks of another size.
    #[error("{member}: blocks of {size} bytes; Rio needs a namespace formatted with 4096")]
    BlockSize {
        /// The member.
        member: String,
        /// Its block size, bytes.
        size: u32,
    },
    /// Too small.
    #[error("{member}: {blocks} blocks are too few; a member needs at least {needed}")]
    TooSmall {
        /// The member.
        member: String,
        /// Blocks it has.
        blocks: u64,
        /// Blocks it needs.
        needed: u64,
    },
    /// It belongs to a volume already.
    #[error(
        "{member} belongs to volume \"{volume}\" already; --force gives that volume up, with all that is on it"
    )]
    InUse {
        /// The member.
        member: String,
        /// The volume.
        volume: String,
    },
    /// The engine can't run on a target.
    #[error("engine {engine} can't run on {target}: {why}")]
    Engine {
        /// The engine.
        engine: EngineKind,
        /// The target.
        target: String,
        /// Why not.
        why: &'static str,
    },
    /// The target's log has no room.
    #[error(
        "the log region of {target} is too small: the volume needs {need} bytes, {free} are free and other volumes have the rest; use fewer streams or slots, or a larger region (a log whose volumes are all gone can be removed while its target is down)"
    )]
    LogTooSmall {
        /// The target.
        target: String,
        /// Bytes needed.
        need: u32,
        /// Bytes free.
        free: u32,
    },
    /// Too few slots to make progress.
    #[error("{have} log slots per stream on {target} are too few for its members: at least {need}")]
    TooFewSlots {
        /// The target.
        target: String,
        /// Slots there would be.
        have: u32,
        /// Slots needed.
        need: u32,
    },
    /// The target refused or failed.
    #[error("target {target}: {doing} failed: {source}")]
    Call {
        /// The target.
        target: String,
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
        member: String,
        /// Its volume.
        volume: String,
        /// The owner's host NQN.
        owner: String,
    },
}

/// Why a volume could not be opened or looked at.
#[derive(Debug, thiserror::Error)]
pub enum OpenError {
    /// A target can't be reached or used.
    #[error(transparent)]
    Attach(#[from] AttachError),
    /// No such namespace.
    #[error("{member}: the target has no such namespace; it has {have:?}")]
    NoNamespace {
        /// The member.
        member: String,
        /// The namespaces that there are.
        have: Vec<u32>,
    },
    /// The drive is not what it was.
    #[error(
        "{member}: the namespace has {blocks} blocks, fewer than the {needed} its label tells of: it has shrunk"
    )]
    Shrunk {
        /// The member.
        member: String,
        /// Blocks that there are.
        blocks: u64,
        /// Blocks that there were.
        needed: u64,
    },
    /// The drives don't make the volume.
    #[error("{error}{}", given(.members, .error))]
    Assemble {
        /// The members given, in order.
        members: Vec<String>,
        /// What is wrong.
        error: AssembleError,
    },
    /// The volume can't be taken.
    #[error("volume \"{volume}\" on {target}: {error}")]
    Claim {
        /// The volume.
        volume: String,
        /// The target that stands against it.
        target: String,
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
        why: String,
    },
    /// A target refused or failed.
    #[error("target {target}: {doing} failed: {source}")]
    Call {
        /// The target.
        target: String,
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
}

/// Why what a crash has left could not be recovered. Whatever it is, it can be tried again: the same
/// prefix is found.
#[derive(Debug, thiserror::Error)]
pub enum RecoverError {
    /// A target can't be reached or used.
    #[error(transparent)]
    Attach(#[from] AttachError),
    /// A target of the open volume is away.
    #[error(
        "target {target} is away ({why}), and recovery needs all targets of the volume: try again \
         when it is back"
    )]
    Away {
        /// The target.
        target: String,
        /// What keeps it away.
        why: String,
    },
    /// A target of the open volume is lost to it for good.
    #[error(
        "target {target} is lost to this volume ({why}), and nothing more is written for its owner: \
         drop the volume; if it is to be yours, open it again (--take-over fences an owner that is \
         there)"
    )]
    Lost {
        /// The target.
        target: String,
        /// Why.
        why: String,
    },
    /// A target refused or failed.
    #[error("target {target}: {doing} failed: {source}")]
    Call {
        /// The target.
        target: String,
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
        target: Option<String>,
        /// Why.
        error: OpeningError,
    },
    /// What was to be zeroed could not be kept.
    #[error("keeping what is about to be zeroed failed: {0}; nothing was zeroed")]
    Save(#[from] SaveError),
}

fn on(target: &Option<String>) -> String {
    target.as_ref().map(|target| format!(" on {target}")).unwrap_or_default()
}

/// Why a failed stream could not be brought back.
#[derive(Debug, thiserror::Error)]
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

/// Why a list of in-place updates could not be acknowledged.
#[derive(Debug, thiserror::Error)]
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

fn given(members: &[String], error: &AssembleError) -> String {
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
        target: String,
        /// Queues it grants.
        queues: u16,
    },
    /// Bad options.
    #[error("{0}")]
    Options(&'static str),
    /// Its in-place updates beyond the prefix have not been acknowledged (T9).
    #[error(
        "stream {stream} was recovered, and {updates} in-place updates beyond its last group may or \
         may not be there: look at them (Volume::in_place; rio volume recover lists them), then \
         acknowledge them (Volume::acknowledge; rio volume recover --acknowledge)"
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
        target: String,
        /// What went wrong.
        source: CallError,
    },
}

/// The one clear error of a poisoned stream (P6): everything after `seq` stays unreported.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error(
    "stream {stream} of volume \"{volume}\" failed at group {seq} on {target}: {cause}; groups before it are as \
     reported, nothing later will be"
)]
pub struct StreamFailure {
    /// The volume.
    pub volume: String,
    /// The stream.
    pub stream: StreamId,
    /// The first group that the failure touches.
    pub seq: Seq,
    /// The target and namespace.
    pub target: String,
    /// What happened.
    pub cause: String,
}

pub(crate) fn cause_text(cause: Cause, flush: bool) -> String {
    let what = if flush { "a FLUSH" } else { "a write" };
    match cause {
        Cause::Status(status) if is_about_owner(Status(status)) => {
            format!("the target does not have this owner any more: {}", Said(Status(status)))
        }
        Cause::Status(status) => format!("{what} ended with: {}", Said(Status(status))),
        Cause::Disconnected => "the connection is gone".into(),
        Cause::TimedOut => "the target stalls: no answer in time".into(),
        Cause::SharedFlush => {
            "another stream's FLUSH of the drive failed, so unflushed data there may be lost".into()
        }
        Cause::LogMismatch => {
            "the target's log is not what this stream has sent to it: another log stands in its \
             place, or it is damaged"
                .into()
        }
        Cause::Changed => "the target came back changed".into(),
    }
}

/// Whether a status says that the volume is another's.
fn is_about_owner(status: Status) -> bool {
    use riopipe_session::wire::status;
    [status::STALE_GENERATION, status::NOT_OWNER, status::OWNED, status::UNKNOWN_VOLUME]
        .iter()
        .any(|one| one.is(status))
}

/// Why a group was refused. The buffers are handed back.
#[derive(Debug, thiserror::Error)]
#[error("{why}")]
pub struct SubmitError {
    /// The reason.
    pub why: Why,
    /// The group's buffers, in the order of its writes.
    pub bufs: Vec<Buf>,
}

/// Why a group was refused.
#[derive(Debug, thiserror::Error)]
pub enum Why {
    /// No room right now: wait for [`Until::Room`](crate::Until::Room) and submit again.
    #[error("no room for the group now ({}): wait for room and submit it again", bound(.0))]
    Full(Bound),
    /// It can never fit.
    #[error("the group can never fit ({}): submit smaller groups", bound(.0))]
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
    Handover(#[from] Breach),
    /// The stream has failed.
    #[error(transparent)]
    Poisoned(StreamFailure),
}

fn bound(bound: &Bound) -> String {
    match bound {
        Bound::Log { server } => format!("the ordering log of target {server} is full"),
        Bound::Memory => "the bound on memory kept for replay is reached".into(),
    }
}

/// Why a wait ended without what was waited for.
#[derive(Debug, thiserror::Error)]
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
    /// The stream has failed.
    #[error(transparent)]
    Failed(#[from] StreamFailure),
}

impl From<NotSubmitted> for WaitError {
    fn from(NotSubmitted { seq, last }: NotSubmitted) -> Self {
        Self::NotSubmitted { seq, last }
    }
}

/// Why a read failed.
#[derive(Debug, thiserror::Error)]
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
    /// The drive or target failed.
    #[error("reading block {lba} failed: {}", Said(*.status))]
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

/// Why a volume could not be closed cleanly: its streams are as they were reported.
#[derive(Debug, thiserror::Error)]
pub enum CloseError {
    /// Streams are still open.
    #[error("{0} streams are still open: close them first")]
    StreamsOpen(usize),
    /// A target refused or failed.
    #[error("target {target}: giving the volume back failed: {source}")]
    Call {
        /// The target.
        target: String,
        /// What went wrong.
        source: CallError,
    },
}

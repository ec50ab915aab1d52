//! Why a target gives no good answer, or can't be attached to.

use std::time::Duration;

use riopipe_net::{ConnectError, LinkError};
use riopipe_nvme::command::Status;
use riopipe_session::initiator::association::{AssociationError, ConnectFailure};
use riopipe_session::initiator::attach::AttachError as BringUpError;
use riopipe_session::initiator::keep_alive::Loss;
use riopipe_session::initiator::manager::UnreachableCause;
use riopipe_session::initiator::opening::OpeningError;
use riopipe_session::initiator::queue_pair::SessionError;
use riopipe_session::initiator::volume::error::{CallFailure, Nonsense};
use riopipe_session::wire::retry;

use crate::addr::TargetAddr;
use crate::error::opening_may_pass;
use crate::failure::{Exhausted, StatusText};

/// Why a command got no good answer.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum CallError {
    /// No connection could be made; in the words of the system.
    #[error(transparent)]
    Connect(#[from] ConnectFailure),
    /// The connection broke; in the words of the system.
    #[error("{0}")]
    Broken(String),
    /// The target broke the protocol, or refused the queue.
    #[error(transparent)]
    Session(#[from] SessionError),
    /// The target can't be brought up.
    #[error(transparent)]
    BringUp(BringUpError),
    /// The target closed the connection.
    #[error("the target closed the connection")]
    Closed,
    /// The target dropped the association.
    #[error("{0}")]
    Lost(Loss),
    /// The target is away.
    #[error(transparent)]
    Unreachable(UnreachableCause),
    /// Discovery lists no subsystem, or several, and none was named.
    #[error(transparent)]
    WhichSubsystem(AssociationError),
    /// No answer in time.
    #[error("no answer within {0:?}: the target stalls, or is no NVMe/TCP target")]
    TimedOut(Duration),
    /// The target has not answered what it was asked before.
    #[error("the target stalls: it owes {0} answers, and is asked nothing more before they come")]
    Behind(usize),
    /// The target answered with an error.
    #[error("{}", StatusText(*.0))]
    Status(Status),
    /// What the target says of the volume does not allow it.
    #[error(transparent)]
    Opening(OpeningError),
    /// The target's answer makes no sense.
    #[error("the target's answer makes no sense: {0}")]
    Nonsense(Nonsense),
    /// This process has not got what it takes.
    #[error(transparent)]
    Exhausted(#[from] Exhausted),
}

impl CallError {
    /// Whether the same call may succeed later, with nothing changed but time: a target that is
    /// away comes back, one that stalls answers. False: it fails again until somebody changes the
    /// target, the volume or the call.
    #[must_use]
    pub fn is_retryable(&self) -> bool {
        match self {
            Self::Connect(_)
            | Self::Broken(_)
            | Self::Closed
            | Self::Lost(_)
            | Self::TimedOut(_)
            | Self::Behind(_)
            | Self::Exhausted(_) => true,
            Self::Unreachable(why) => {
                !matches!(why, UnreachableCause::Changed(_) | UnreachableCause::Released)
            }
            Self::Session(error) => {
                error.is_passing()
                    || matches!(error, SessionError::QueueDeleted | SessionError::Closed)
            }
            Self::Status(status) => retry::is_claim_passing(*status),
            Self::Opening(error) => opening_may_pass(error),
            Self::BringUp(_) | Self::WhichSubsystem(_) | Self::Nonsense(_) => false,
        }
    }

    /// What a volume's machines say of a call, whose answer was waited for so long.
    pub(crate) fn of(failure: CallFailure, timeout: Duration) -> Self {
        match failure {
            CallFailure::Association(error) => error.into(),
            CallFailure::Status(status) => Self::Status(status),
            CallFailure::TimedOut => Self::TimedOut(timeout),
            CallFailure::Behind(owed) => Self::Behind(owed),
            CallFailure::Ask(_) => Self::Closed,
            CallFailure::Nonsense(what) => Self::Nonsense(what),
        }
    }
}

impl From<LinkError> for CallError {
    fn from(error: LinkError) -> Self {
        Self::Broken(error.to_string())
    }
}

impl From<AssociationError> for CallError {
    fn from(error: AssociationError) -> Self {
        match error {
            AssociationError::Session(error) => Self::Session(error),
            AssociationError::Attach(error) => Self::BringUp(error),
            AssociationError::Closed | AssociationError::HungUp => Self::Closed,
            AssociationError::Dropped(loss) => Self::Lost(loss),
            AssociationError::TimedOut(ns) => Self::TimedOut(Duration::from_nanos(ns)),
            AssociationError::Connect(failure) => Self::Connect(failure),
            AssociationError::Broken(words) => Self::Broken(words),
            error @ AssociationError::WhichSubsystem(_) => Self::WhichSubsystem(error),
        }
    }
}

/// Why a target could not be attached to.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum AttachError {
    /// No connection.
    #[error(transparent)]
    Connect(#[from] ConnectError),
    /// The conversation with the target failed.
    #[error("target {target}{}: {source}", in_brackets(.nqn))]
    Target {
        /// Its address.
        target: TargetAddr,
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
        target: TargetAddr,
        /// The NQNs it lists.
        found: Vec<String>,
    },
    /// Several targets of a volume.
    #[error("{} of the volume's targets can't be used: {}", .0.len(), each(.0))]
    Several(Vec<AttachError>),
}

impl AttachError {
    /// Whether the same call may succeed later, with nothing changed but time. Of several targets,
    /// all have to be such that it may.
    #[must_use]
    pub fn is_retryable(&self) -> bool {
        match self {
            Self::Connect(error) => !matches!(error, ConnectError::Address { .. }),
            Self::Target { source, .. } => source.is_retryable(),
            Self::WhichSubsystem { .. } => false,
            Self::Several(errors) => errors.iter().all(Self::is_retryable),
        }
    }

    /// Why there is no association with `nqn` of `target`; `connect` is the last failure to connect.
    pub(crate) fn of(
        target: &TargetAddr,
        nqn: String,
        error: AssociationError,
        connect: Option<ConnectError>,
    ) -> Self {
        let target = target.clone();
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

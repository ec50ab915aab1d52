//! The errors of a single target: a request to it failed ([`CallError`]), or an association with it
//! could not be set up ([`AttachError`]).

use std::time::Duration;

use riopipe_net::{ConnectError, LinkError};
use riopipe_nvme::command::Status;
use riopipe_session::claim::ClaimError;
use riopipe_session::initiator::association::{AssociationError, ConnectFailure};
use riopipe_session::initiator::attach::AttachError as BringUpError;
use riopipe_session::initiator::keep_alive::Loss;
use riopipe_session::initiator::manager::UnreachableCause;
use riopipe_session::initiator::opening::OpeningError;
use riopipe_session::initiator::queue_pair::SessionError;
use riopipe_session::initiator::volume::error::{CallFailure, Nonsense};
use riopipe_session::rounded::Rounded;
use riopipe_session::wire::retry;

use crate::addr::TargetAddr;
use crate::failure::{Exhausted, StatusText};

/// Why a request to a target failed.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum CallError {
    /// No connection could be made. The message is that of the operating system.
    #[error(transparent)]
    Connect(#[from] ConnectFailure),
    /// The connection broke. The message is that of the operating system.
    #[error("{0}")]
    Broken(String),
    /// The target violated the protocol, or refused the queue.
    #[error(transparent)]
    Session(#[from] SessionError),
    /// The target's controller could not be enabled or identified.
    #[error(transparent)]
    BringUp(BringUpError),
    /// The target closed the connection.
    #[error("the target closed the connection")]
    Closed,
    /// The target dropped the association.
    #[error("{0}")]
    Lost(Loss),
    /// The target is unreachable.
    #[error(transparent)]
    Unreachable(UnreachableCause),
    /// Discovery lists no subsystem, or several, and the address names none.
    #[error(transparent)]
    WhichSubsystem(AssociationError),
    /// The target did not answer within this time.
    #[error("no answer within {}: the target stalls, or is no NVMe/TCP target", Rounded(*.0))]
    TimedOut(Duration),
    /// The target has sent nothing on any connection for this time.
    #[error("the target has sent nothing for {}: it stalls, or the network is cut", Rounded(*.0))]
    Silent(Duration),
    /// The target still owes this number of answers to earlier requests, so the request was not
    /// sent.
    #[error("the target stalls: it owes {0} answers, and gets no further request before they come")]
    Behind(usize),
    /// The target answered with this status.
    #[error("{}", StatusText(*.0))]
    Status(Status),
    /// The state of the volume at the target does not allow the request.
    #[error(transparent)]
    Opening(OpeningError),
    /// The target's answer is invalid.
    #[error("the target's answer is invalid: {0}")]
    Nonsense(Nonsense),
    /// This process has no descriptors or threads left.
    #[error(transparent)]
    Exhausted(#[from] Exhausted),
}

impl CallError {
    /// Whether the same call may succeed later, if only time passes: an unreachable target comes
    /// back, or a stalled target answers. False: it fails again until the target, the volume or the
    /// call changes.
    #[must_use]
    pub fn is_retryable(&self) -> bool {
        match self {
            Self::Connect(_)
            | Self::Broken(_)
            | Self::Closed
            | Self::Lost(_)
            | Self::TimedOut(_)
            | Self::Silent(_)
            | Self::Behind(_)
            | Self::Exhausted(_) => true,
            Self::Unreachable(why) => match why {
                UnreachableCause::Changed(_) | UnreachableCause::Released => false,
                // The manager sends a claim again only if its failure passes. After any other
                // failure the target is lost to this owner: another owner may have fenced it (trap
                // T8).
                UnreachableCause::Claim(status) => retry::is_claim_passing(*status),
                _ => true,
            },
            Self::Session(error) => {
                error.is_passing()
                    || matches!(error, SessionError::QueueDeleted | SessionError::Closed)
            }
            Self::Status(status) => retry::is_claim_passing(*status),
            Self::Opening(error) => opening_may_pass(error),
            Self::BringUp(_) | Self::WhichSubsystem(_) | Self::Nonsense(_) => false,
        }
    }

    /// The error of a call from the session's state machines; `timeout` is the time limit of the
    /// call.
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
            AssociationError::Closed | AssociationError::ClosedHere => Self::Closed,
            AssociationError::Dropped(loss) => Self::Lost(loss),
            AssociationError::TimedOut(ns) => Self::TimedOut(Duration::from_nanos(ns)),
            AssociationError::Silent(ns) => Self::Silent(Duration::from_nanos(ns)),
            AssociationError::Connect(failure) => Self::Connect(failure),
            AssociationError::Broken(words) => Self::Broken(words),
            error @ (AssociationError::WhichSubsystem(_)
            | AssociationError::NothingOffered { .. }) => Self::WhichSubsystem(error),
        }
    }
}

/// Why no association with a target could be set up.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum AttachError {
    /// No connection could be made.
    #[error(transparent)]
    Connect(#[from] ConnectError),
    /// The connection was made, and a request to the target failed.
    #[error("target {target}{}: {source}", nqn_in_brackets(.nqn))]
    Target {
        /// The address of the target.
        target: TargetAddr,
        /// The NQN of the subsystem, if it is known.
        nqn: Option<String>,
        /// The reason.
        source: CallError,
    },
    /// Discovery lists no subsystem, or several, and the address names none.
    #[error(
        "target {target} offers {} subsystems{}: name one of them with nqn=…",
        .found.len(),
        list_in_brackets(.found)
    )]
    WhichSubsystem {
        /// The address of the target.
        target: TargetAddr,
        /// The NQNs that discovery lists.
        found: Vec<String>,
    },
    /// Several targets of a volume can't be used, each for its own reason.
    #[error("{} of the volume's targets can't be used: {}", .0.len(), join_texts(.0))]
    Several(Vec<AttachError>),
}

impl AttachError {
    /// Whether the same call may succeed later, if only time passes. With several targets, this is
    /// true if it is true for each of them.
    #[must_use]
    pub fn is_retryable(&self) -> bool {
        match self {
            Self::Connect(ConnectError::Address { .. }) => false,
            Self::Connect(ConnectError::Relay { may_pass, .. }) => *may_pass,
            Self::Connect(_) => true,
            Self::Target { source, .. } => source.is_retryable(),
            Self::WhichSubsystem { .. } => false,
            Self::Several(errors) => errors.iter().all(Self::is_retryable),
        }
    }

    /// Why there is no association with subsystem `nqn` of `target`. `connect_error` is the last
    /// failure to connect. It has more details than [`AssociationError::Connect`], which only has
    /// its text.
    pub(crate) fn of(
        target: &TargetAddr,
        nqn: String,
        error: AssociationError,
        connect_error: Option<ConnectError>,
    ) -> Self {
        let target = target.clone();
        match (error, connect_error) {
            (AssociationError::Connect(_), Some(error)) => Self::Connect(error),
            (AssociationError::WhichSubsystem(found), _) => Self::WhichSubsystem { target, found },
            (error, _) => Self::Target { target, nqn: Some(nqn), source: error.into() },
        }
    }
}

/// The texts of several errors in one line.
fn join_texts(errors: &[AttachError]) -> String {
    let texts: Vec<String> = errors.iter().map(ToString::to_string).collect();
    texts.join("; ")
}

/// The NQN in brackets, for the end of a name. Empty if the NQN is not known.
fn nqn_in_brackets(nqn: &Option<String>) -> String {
    match nqn {
        Some(nqn) => format!(" ({nqn})"),
        None => String::new(),
    }
}

/// The NQNs in brackets. Empty if there are none.
fn list_in_brackets(nqns: &[String]) -> String {
    if nqns.is_empty() { String::new() } else { format!(" ({})", nqns.join(", ")) }
}

/// Whether an opening that failed with this error may succeed later, if only time passes.
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

#[cfg(test)]
mod tests {
    use super::*;
    use riopipe_session::wire::status;

    /// An owner that was fenced stays fenced. Only claims that are sent again may succeed later.
    #[test]
    fn t8_a_target_that_refused_the_claim_for_good_does_not_come_back() {
        let is_retryable =
            |status| CallError::Unreachable(UnreachableCause::Claim(status)).is_retryable();
        for fenced in [status::STALE_GENERATION.with_dnr(), status::LEASE_OVER, status::NOT_OWNER] {
            assert!(!is_retryable(fenced), "{fenced}");
        }
        for passing in [status::STREAM_BUSY, status::LOG_FAILED, Status::INTERNAL] {
            assert!(is_retryable(passing), "{passing}");
        }
    }
}

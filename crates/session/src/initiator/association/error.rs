//! Why associations end, and why commands are refused before they are sent.

use alloc::string::String;
use alloc::vec::Vec;
use core::fmt;
use core::time::Duration;

use crate::initiator::attach;
use crate::initiator::endpoint::ConnectFailure;
use crate::initiator::keep_alive::Loss;
use crate::initiator::queue_pair::{SessionError, SubmitError};
use crate::rounded::Rounded;

/// Why an association could not be set up, or has ended. For the queue to the drives: why it
/// failed.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum AssociationError {
    /// No connection could be made.
    #[error(transparent)]
    Connect(#[from] ConnectFailure),
    /// A connection broke; the text is from the program that has the socket.
    #[error("{0}")]
    Broken(String),
    /// The target broke the protocol, or refused the queue.
    #[error(transparent)]
    Session(#[from] SessionError),
    /// The target cannot be brought up.
    #[error(transparent)]
    Attach(attach::AttachError),
    /// The target closed the connection before the association stood, or closed the queue to its
    /// drives.
    #[error("the target closed the connection")]
    Closed,
    /// The target dropped the association.
    #[error("{0}")]
    Dropped(Loss),
    /// No answer has arrived for this time, ns.
    #[error(
        "no answer within {}: the target stalls, or is no NVMe/TCP target",
        Rounded(Duration::from_nanos(*.0))
    )]
    TimedOut(u64),
    /// The target has sent nothing on any connection for this time, ns.
    #[error(
        "the target has sent nothing for {}: it stalls, or the network is cut",
        Rounded(Duration::from_nanos(*.0))
    )]
    Silent(u64),
    /// Discovery lists several subsystems, and none was named.
    #[error("the target offers {} subsystems{}: name one of them", .0.len(), List(.0))]
    WhichSubsystem(Vec<String>),
    /// Discovery lists no subsystem for this host, and none was named.
    #[error(
        "the target offers no subsystem to host {hostnqn}: name one, or have the host put on its \
         list of allowed hosts"
    )]
    NothingOffered {
        /// The NQN of this host.
        hostnqn: String,
    },
    /// The initiator ended the association.
    #[error("the connection was closed by this side")]
    ClosedHere,
}

impl AssociationError {
    /// Whether a later attempt may succeed, because the target has not seen the end of the queue's
    /// last connection yet.
    #[must_use]
    pub fn is_passing(&self) -> bool {
        matches!(self, Self::Session(error) if error.is_passing())
    }
}

impl From<attach::AttachError> for AssociationError {
    fn from(error: attach::AttachError) -> Self {
        match error {
            attach::AttachError::Session(error) => Self::Session(error),
            other => Self::Attach(other),
        }
    }
}

/// Names in brackets, if there are any.
struct List<'a>(&'a [String]);

impl fmt::Display for List<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if self.0.is_empty() { Ok(()) } else { write!(f, " ({})", self.0.join(", ")) }
    }
}

/// Why a command could not be sent. No part of it was sent.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum AskError {
    /// The queue has no free command: the target owes an answer to each one.
    #[error(
        "the target stalls: it owes {unanswered} answers, and gets no command before it sends them"
    )]
    Full {
        /// The number of commands without an answer.
        unanswered: usize,
    },
    /// The queue is not connected: the association is being set up or has ended, or the queue to
    /// the drives is not open.
    #[error("the queue is not open")]
    NotReady,
    /// The command's data does not fit the queue: an error of the caller, or a target with limits
    /// that are too small for it.
    #[error(transparent)]
    Data(SubmitError),
}

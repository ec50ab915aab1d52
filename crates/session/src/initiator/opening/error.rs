//! Why an opening ends.

use alloc::string::String;

use riopipe_nvme::command::Status;
use riopipe_order::attribute::{Seq, StreamId};
use riopipe_order::recovery::{ADVICE, DecideError};

use crate::claim::ClaimError;
use crate::wire;

/// Why a volume or stream can't be claimed or recovered. `server` counts the volume's targets.
///
/// After any of these errors the same opening can be begun again: before [`Phase::Undo`] no drive
/// and no log has changed, and after it the same prefix is found.
///
/// [`Phase::Undo`]: super::Phase::Undo
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum OpeningError {
    /// A target is missing (trap T20).
    #[error(
        "a target of the volume is unreachable, and without all of them the last writes can't be \
         determined: make it reachable again"
    )]
    Missing {
        /// The target, counted from 0.
        server: usize,
    },
    /// The volume's state on the targets forbids claiming it.
    #[error(transparent)]
    Claim(#[from] ClaimError),
    /// The volume was taken over, while it was being opened or while it was open (trap T8).
    #[error(
        "the volume was taken over by {}, and nothing is written for this owner any more: drop the \
         volume; to own it again, open it again (take_over fences an owner that is connected)",
        .by.as_deref().unwrap_or("another initiator")
    )]
    TakenOver {
        /// The target that reports this, counted from 0.
        server: usize,
        /// The new owner's host NQN, if the target has reported it.
        by: Option<String>,
    },
    /// A target has refused a command.
    #[error("{doing} was refused: {}", Meaning(*.status))]
    Refused {
        /// The target.
        server: usize,
        /// The action that was to be done.
        doing: &'static str,
        /// The stream that the command was about, if it was about one.
        stream: Option<StreamId>,
        /// The status that the target answered.
        status: Status,
    },
    /// A target's answer is not valid (trap T18).
    #[error("{what}: it is damaged, or of another version; nothing was changed")]
    Nonsense {
        /// The target.
        server: usize,
        /// The stream that the answer is about, if it is about one.
        stream: Option<StreamId>,
        /// The part that is wrong.
        what: &'static str,
    },
    /// An entry for blocks outside the drive's data area (trap T19).
    #[error(
        "the log has an entry of stream {stream}, group {seq}, for blocks {lba} to {} of member \
         {member}, outside its data area: it is damaged, or not this volume's; {ADVICE}; nothing was \
         changed",
        lba + u64::from(*.blocks) - 1
    )]
    Outside {
        /// The target.
        server: usize,
        /// The stream.
        stream: StreamId,
        /// The group.
        seq: Seq,
        /// The member.
        member: u8,
        /// The first block.
        lba: u64,
        /// The number of blocks.
        blocks: u32,
    },
    /// The lists of all targets don't fit together.
    #[error("{0}; nothing was changed")]
    Decide(#[from] DecideError),
    /// Blocks of a drive could not be undone.
    #[error(
        "zeroing blocks {lba} to {} of member {member} failed: {}; the logs are as they were: when \
         the drive works again, open the volume again",
        lba + u64::from(*.blocks) - 1, Meaning(*.status)
    )]
    Undo {
        /// The target.
        server: usize,
        /// The member.
        member: u8,
        /// The first block.
        lba: u64,
        /// The number of blocks.
        blocks: u32,
        /// The status that the target answered.
        status: Status,
    },
    /// A redirected update could not be copied to its home.
    #[error(
        "copying blocks {lba} to {} of member {member} from the prepare area failed: {}; the logs \
         are as they were: when the drive works again, open the volume again",
        lba + u64::from(*.blocks) - 1, Meaning(*.status)
    )]
    Copy {
        /// The target.
        server: usize,
        /// The member.
        member: u8,
        /// The first block at home.
        lba: u64,
        /// The number of blocks.
        blocks: u32,
        /// The status that the target answered.
        status: Status,
    },
    /// A drive could not be flushed.
    #[error(
        "flushing member {member} after undo failed: {}; the logs are as they were: when the drive \
         works again, open the volume again",
        Meaning(*.status)
    )]
    Flush {
        /// The target.
        server: usize,
        /// The member.
        member: u8,
        /// The status that the target answered.
        status: Status,
    },
    /// A stream has no in-place list that could be acknowledged.
    #[error("stream {stream} has no list of in-place updates that waits to be acknowledged")]
    NotPending {
        /// The stream.
        stream: StreamId,
    },
    /// A stream's recovery was interrupted: it must be recovered before it is acknowledged.
    #[error("stream {stream} has not been recovered on all targets: reopen it, or the volume")]
    NotRecovered {
        /// The stream.
        stream: StreamId,
    },
}

impl OpeningError {
    /// The target of the volume that the error concerns, counted from 0.
    #[must_use]
    pub fn server(&self) -> Option<usize> {
        match self {
            Self::Missing { server }
            | Self::TakenOver { server, .. }
            | Self::Refused { server, .. }
            | Self::Nonsense { server, .. }
            | Self::Outside { server, .. }
            | Self::Undo { server, .. }
            | Self::Copy { server, .. }
            | Self::Flush { server, .. } => Some(*server),
            Self::Claim(error) => error.target(),
            Self::Decide(DecideError::WrongServer { server, .. }) => Some(usize::from(*server)),
            Self::Decide(_) | Self::NotPending { .. } | Self::NotRecovered { .. } => None,
        }
    }

    /// The stream that the error concerns.
    #[must_use]
    pub fn stream(&self) -> Option<StreamId> {
        match self {
            Self::Refused { stream, .. } | Self::Nonsense { stream, .. } => *stream,
            Self::Outside { stream, .. }
            | Self::NotPending { stream }
            | Self::NotRecovered { stream } => Some(*stream),
            Self::Decide(error) => Some(error.stream()),
            _ => None,
        }
    }
}

/// A status, and its meaning if it is one of Rio's own.
struct Meaning(Status);

impl core::fmt::Display for Meaning {
    fn fmt(&self, f: &mut core::fmt::Formatter<'_>) -> core::fmt::Result {
        match wire::status::meaning(self.0) {
            Some(meaning) => f.write_str(meaning),
            None => core::fmt::Display::fmt(&self.0, f),
        }
    }
}

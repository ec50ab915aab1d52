//! Errors, one type for each operation. Every message names the problem, its place and the remedy.

use std::time::Duration;

use riopipe::{
    AcknowledgeError, BufError, EngineKind, InPlaceRange, StreamError, StreamFailure, SubmitError,
    SubmitErrorKind, WaitError,
};
use riopipe_wal_core::Lsn;
use riopipe_wal_core::format::BlockError;
use riopipe_wal_core::opening::{Changed, FindError};
use riopipe_wal_core::reading;
use riopipe_wal_core::ring::BLOCKS_MIN;

/// The reason why a log does not work any more. All later calls return it.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum WalFailure {
    /// The log was closed, or is being closed.
    #[error("the log was closed")]
    Closed,
    /// The log's stream has failed. Durable records stay durable.
    #[error("{0}; drop the log and open it again")]
    Stream(#[from] StreamFailure),
    /// The log's stream refused a group for a reason that waiting does not remove.
    #[error("the log can't go on: {0}; drop it and open it again")]
    Refused(SubmitErrorKind),
    /// The log's stream has no buffer for a group.
    #[error("the log can't go on: {0}; drop it and open it again")]
    Buf(#[from] BufError),
    /// A flaw of this library has ended the log's thread. Durable records stay durable.
    #[error("the log can't go on, by a flaw of riopipe-wal: {0}; drop it and open it again")]
    Flaw(String),
}

/// The reason why blocks of a volume can't be a log.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum PlaceError {
    /// There are too few blocks.
    #[error("a log needs at least {} blocks, not {blocks}", BLOCKS_MIN + 1)]
    TooFew {
        /// Number of blocks of the place.
        blocks: u64,
    },
    /// Some of the blocks are beyond the volume's end.
    #[error("{blocks} blocks from block {lba} on do not lie within the volume's {volume} blocks")]
    OutOfRange {
        /// First block of the place.
        lba: u64,
        /// Number of blocks of the place.
        blocks: u64,
        /// Number of blocks of the volume.
        volume: u64,
    },
    /// The volume's engine keeps no order.
    #[error("engine {0} keeps no order, so a crash may leave holes in a log: use rio or sync")]
    Engine(EngineKind),
    /// [`WalOptions::stream`](crate::WalOptions::stream) is
    /// [`orderless`](riopipe::StreamOptions::orderless).
    #[error(
        "the log's stream has no order, so a crash may leave holes: unset StreamOptions::orderless"
    )]
    Orderless,
    /// [`WalOptions::group_bytes`](crate::WalOptions::group_bytes) is less than one block.
    #[error("a log's groups have at least 4096 bytes")]
    GroupBytes,
    /// [`WalOptions::groups`](crate::WalOptions::groups) or
    /// [`WalOptions::flushes`](crate::WalOptions::flushes) is 0.
    #[error("a log needs at least one group and one FLUSH in flight")]
    InFlight,
}

/// The reason why a log could not be created.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum CreateError {
    /// The place or the options are not usable.
    #[error(transparent)]
    Place(#[from] PlaceError),
    /// The place holds a log already.
    #[error(
        "a log is there already, at block {lba}: open it, or allow that it is overwritten \
         (WalOptions::overwrite)"
    )]
    Exists {
        /// The volume block of its anchor.
        lba: u64,
    },
    /// The place holds the first block of a log that this program can't read.
    #[error(
        "block {lba} is the first one of a log, and {source}: restore it, or allow that the log is \
         overwritten (WalOptions::overwrite)"
    )]
    Unreadable {
        /// The volume block.
        lba: u64,
        /// Its problem.
        source: BlockError,
    },
    /// The stream could not be opened.
    #[error(transparent)]
    Stream(#[from] StreamError),
    /// Reading the place failed.
    #[error("reading what is there failed: {0}")]
    Read(#[from] riopipe::ReadError),
    /// Its first blocks fit into no group of the stream.
    #[error("the log's first blocks were refused: {0}")]
    Buf(#[from] BufError),
    /// The stream refused the log's first blocks.
    #[error("the log's first blocks were refused: {0}")]
    Submit(#[from] SubmitError),
    /// The log's first blocks could not be made durable.
    #[error("the log's first blocks could not be made durable: {0}")]
    Wait(#[from] WaitError),
    /// This process lacks a resource.
    #[error("this process can't start a log: {0}")]
    System(#[from] std::io::Error),
}

impl CreateError {
    /// Whether the same call may succeed later, with nothing changed but time.
    #[must_use]
    pub fn is_retryable(&self) -> bool {
        match self {
            Self::Stream(error) => error.is_retryable(),
            Self::Read(error) => read_may_pass(error),
            // After `Wait` and `System` the log may be there: it is to be opened, not created.
            _ => false,
        }
    }
}

/// Whether a read may succeed later on a new stream.
fn read_may_pass(error: &riopipe::ReadError) -> bool {
    match error {
        riopipe::ReadError::Failed(failure) => failure.is_retryable(),
        error => error.is_retryable(),
    }
}

/// The reason why a log could not be opened. A second attempt finds the same log.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum OpenError {
    /// The place or the options are not usable.
    #[error(transparent)]
    Place(#[from] PlaceError),
    /// There is no log at the place.
    #[error("no log begins at block {lba}: {source}")]
    NoLog {
        /// The volume block where its anchor should be.
        lba: u64,
        /// The problem of the block there.
        source: BlockError,
    },
    /// The log there uses other blocks.
    #[error(
        "the log at block {lba} has {blocks} blocks from block {start} on: open it at these, it does \
         not move"
    )]
    OtherPlace {
        /// The volume block in which its anchor was found.
        lba: u64,
        /// The volume block in which it was created.
        start: u64,
        /// Number of its blocks.
        blocks: u64,
    },
    /// A crash interrupted its creation: no record was ever accepted.
    #[error(
        "a crash has interrupted the creation of the log at block {lba}: create it again, with \
         WalOptions::overwrite"
    )]
    CreationCut {
        /// The volume block of its anchor.
        lba: u64,
    },
    /// Its anchor is whole, and all its other blocks are lost or damaged.
    #[error(
        "the log at block {lba} has lost all its blocks: restore the drive, or create the log again, \
         with WalOptions::overwrite"
    )]
    Lost {
        /// The volume block of its anchor.
        lba: u64,
    },
    /// A durable block of the log is damaged.
    #[error(
        "block {number} of the log (volume block {lba}) was durable and can't be read as such any \
         more: records are lost or damaged from there on; restore the drive, or create the log again"
    )]
    Damaged {
        /// The block's number in the log.
        number: u64,
        /// The volume block of it.
        lba: u64,
    },
    /// The stream has writes in doubt outside of the log.
    #[error(
        "stream {stream} has {others} writes in doubt outside of the log's blocks: it belongs to \
         something else, too; check and acknowledge them (Volume::acknowledge)"
    )]
    NotOurs {
        /// The stream.
        stream: u16,
        /// Number of writes outside of the log.
        others: usize,
    },
    /// The stream's writes in doubt could not be acknowledged.
    #[error(transparent)]
    Acknowledge(#[from] AcknowledgeError),
    /// Opening the log failed after the stream's writes in doubt had been acknowledged. No later
    /// attempt finds them.
    #[error("{source} ({} writes in doubt were acknowledged before)", .in_doubt.len())]
    Acknowledged {
        /// The writes, as [`Found::in_doubt`](crate::Found::in_doubt) would list them.
        in_doubt: Vec<InPlaceRange>,
        /// The reason.
        source: Box<OpenError>,
    },
    /// The stream could not be opened.
    #[error(transparent)]
    Stream(#[from] StreamError),
    /// Reading the log failed.
    #[error("reading the log failed: {0}")]
    Read(#[from] ReadError),
    /// The blocks after a crash could not be made durable.
    #[error("what a crash has left of the log could not be made durable: {0}")]
    Settle(#[from] SettleError),
    /// A drive has lost blocks of the log while it was opened. They had not been durable.
    #[error(transparent)]
    Changed(#[from] Changed),
    /// This process lacks a resource.
    #[error("this process can't start a log: {0}")]
    System(#[from] std::io::Error),
}

impl OpenError {
    /// Whether the same call may succeed later, with nothing changed but time.
    #[must_use]
    pub fn is_retryable(&self) -> bool {
        match self {
            Self::Acknowledge(error) => error.is_retryable(),
            Self::Acknowledged { source, .. } => source.is_retryable(),
            Self::Stream(error) => error.is_retryable(),
            Self::Read(ReadError::Drive(error)) => read_may_pass(error),
            Self::Settle(error) => error.is_retryable(),
            Self::System(_) | Self::Changed(_) => true,
            _ => false,
        }
    }

    pub(crate) fn find(error: FindError<riopipe::ReadError>, lba: u64, of: u64, ring: u64) -> Self {
        match error {
            FindError::Read(error) => Self::Read(ReadError::Drive(error)),
            FindError::CreationCut => Self::CreationCut { lba: of },
            FindError::Lost => Self::Lost { lba: of },
            FindError::Damaged { number } => Self::Damaged { number, lba: lba + number % ring },
        }
    }
}

/// The reason why the blocks that a crash has left of a log could not be made durable.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum SettleError {
    /// The stream has no buffer for a block.
    #[error(transparent)]
    Buf(#[from] BufError),
    /// A block could not be read.
    #[error(transparent)]
    Read(#[from] riopipe::ReadError),
    /// The stream refused a block.
    #[error(transparent)]
    Submit(#[from] SubmitError),
    /// The blocks did not become durable.
    #[error(transparent)]
    Wait(#[from] WaitError),
}

impl SettleError {
    /// Whether opening the log may succeed later.
    #[must_use]
    pub fn is_retryable(&self) -> bool {
        match self {
            Self::Read(error) => read_may_pass(error),
            Self::Submit(error) => match &error.kind {
                SubmitErrorKind::Poisoned(failure) => failure.is_retryable(),
                kind => kind.is_retryable(),
            },
            Self::Wait(WaitError::Failed(failure)) => failure.is_retryable(),
            Self::Wait(error) => error.is_retryable(),
            Self::Buf(_) => false,
        }
    }
}

/// The reason why a record was not accepted.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum AppendError {
    /// The log is full of untrimmed records.
    #[error(
        "the log is full, and no trim is in flight: apply records elsewhere, then trim them \
         (waited {waited:?})"
    )]
    LogFull {
        /// Time waited for space.
        waited: Duration,
    },
    /// Records are appended faster than the drives write them.
    #[error(
        "no space for the record within {waited:?}: records come faster than the drives write them"
    )]
    Busy {
        /// Time waited for space.
        waited: Duration,
    },
    /// The record is too long for a log of this size.
    #[error("a record of {bytes} bytes does not fit: this log takes up to {max}")]
    TooLarge {
        /// Length of the record in bytes.
        bytes: usize,
        /// Length of the longest record in bytes.
        max: usize,
    },
    /// The log has ended.
    #[error(transparent)]
    Over(#[from] WalFailure),
}

impl AppendError {
    /// Whether the same call may succeed later: after a trim, or once the drives have caught up.
    #[must_use]
    pub fn is_retryable(&self) -> bool {
        matches!(self, Self::LogFull { .. } | Self::Busy { .. })
    }
}

/// The reason why a record is not known to be durable.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum DurableError {
    /// The time limit has passed; nothing else has changed.
    #[error("the record at {lsn} was not durable within {waited:?}; it may still become so")]
    Deadline {
        /// Lsn of the record.
        lsn: Lsn,
        /// Time waited.
        waited: Duration,
    },
    /// No record was appended at this Lsn.
    #[error("no record was appended at {lsn}: the log ends at {end}")]
    NotAppended {
        /// The requested Lsn.
        lsn: Lsn,
        /// The Lsn of the next record.
        end: Lsn,
    },
    /// The log ended before the record was durable.
    #[error(transparent)]
    Over(#[from] WalFailure),
}

impl DurableError {
    /// Whether the same call may succeed later.
    #[must_use]
    pub fn is_retryable(&self) -> bool {
        matches!(self, Self::Deadline { .. })
    }
}

/// The reason why records were not dropped.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum TrimError {
    /// The records are not durable.
    #[error("records below {asked} can't be dropped: only those below {durable} are durable")]
    NotDurable {
        /// The Lsn below which they should be dropped.
        asked: Lsn,
        /// The Lsn below which records are durable.
        durable: Lsn,
    },
    /// The log has ended.
    #[error(transparent)]
    Over(#[from] WalFailure),
}

impl TrimError {
    /// Whether the same call may succeed later, once more is durable.
    #[must_use]
    pub fn is_retryable(&self) -> bool {
        matches!(self, Self::NotDurable { .. })
    }
}

/// The reason why records could not be read.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum ReadError {
    /// A drive or a target failed.
    #[error(transparent)]
    Drive(#[from] riopipe::ReadError),
    /// A block is damaged.
    #[error("block {number} of the log: {error}")]
    Block {
        /// Number of the block.
        number: u64,
        /// The damage.
        error: BlockError,
    },
    /// A record is damaged.
    #[error("the record at {lsn} of the log does not fit its checksum")]
    Record {
        /// Lsn of the record.
        lsn: Lsn,
    },
    /// The records were trimmed.
    #[error("the log was trimmed up to {trimmed} while it was read: read on from there")]
    Trimmed {
        /// The first Lsn that is not trimmed.
        trimmed: Lsn,
    },
    /// The log has ended.
    #[error(transparent)]
    Over(#[from] WalFailure),
}

impl ReadError {
    /// Whether reading may succeed later, from an Lsn that is not trimmed.
    #[must_use]
    pub fn is_retryable(&self) -> bool {
        matches!(self, Self::Trimmed { .. })
    }

    /// The meaning of an error while reading at an Lsn; `trimmed` is the current trim, and `oldest`
    /// the number of the block that holds it.
    pub(crate) fn of(
        error: reading::ReadError<Self>,
        from: Lsn,
        (trimmed, oldest): (Lsn, u64),
    ) -> Self {
        match error {
            reading::ReadError::Read(error) => error,
            // The record's place may have been overwritten meanwhile, or that of a block before it
            // by which the record was searched.
            _ if from < trimmed => Self::Trimmed { trimmed },
            reading::ReadError::Block { number, .. } | reading::ReadError::Chain { number }
                if number < oldest =>
            {
                Self::Trimmed { trimmed }
            }
            reading::ReadError::Block { number, error } => Self::Block { number, error },
            reading::ReadError::Chain { number } => {
                Self::Block { number, error: BlockError::Senseless }
            }
            reading::ReadError::Record { lsn } => Self::Record { lsn },
        }
    }
}

/// The reason why a log was not closed.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum CloseError {
    /// The time limit has passed. The log accepts no more records and continues closing: call again
    /// to wait for it.
    #[error("the log was not closed within {waited:?}: {queued} bytes of records wait for space")]
    Deadline {
        /// Time waited.
        waited: Duration,
        /// Number of bytes that wait to be written.
        queued: usize,
    },
    /// The log failed before. Durable records stay durable.
    #[error(transparent)]
    Failed(#[from] WalFailure),
}

impl CloseError {
    /// Whether the same call may succeed later.
    #[must_use]
    pub fn is_retryable(&self) -> bool {
        matches!(self, Self::Deadline { .. })
    }
}

#[cfg(test)]
mod tests {
    use riopipe::cause::UnreachableCause;
    use riopipe::{Exhausted, MemberAddr, RecoverError, UnreachableReason};

    use super::*;

    #[test]
    fn an_error_is_retryable_if_its_cause_is() {
        let member: MemberAddr = "127.0.0.1:4420".parse().unwrap();
        let target = || member.target();
        let lost = || RecoverError::Lost { target: target(), why: UnreachableCause::Released };
        let away =
            || RecoverError::Unreachable { target: target(), why: UnreachableReason::Passed };
        assert!(!OpenError::from(StreamError::from(lost())).is_retryable());
        assert!(!OpenError::from(AcknowledgeError::from(lost())).is_retryable());
        assert!(OpenError::from(StreamError::from(away())).is_retryable());
        assert!(OpenError::from(AcknowledgeError::from(away())).is_retryable());
        let no_threads = || StreamError::from(Exhausted::Threads);
        assert!(OpenError::from(no_threads()).is_retryable());
        assert!(CreateError::from(no_threads()).is_retryable());
        assert!(!CreateError::from(StreamError::from(lost())).is_retryable());
        let late = || riopipe::ReadError::Deadline(Duration::ZERO);
        assert!(OpenError::from(ReadError::from(late())).is_retryable());
        assert!(CreateError::from(late()).is_retryable());
        assert!(OpenError::from(SettleError::from(late())).is_retryable());
        let odd = BufError::NotBlocks { len: 1 };
        assert!(!OpenError::from(SettleError::from(odd)).is_retryable());
        // The log is there already when its thread is started.
        assert!(!CreateError::from(std::io::Error::other("no thread")).is_retryable());
    }

    /// A search for a record reads blocks before it, which may have been overwritten since.
    #[test]
    fn a_block_before_the_trim_is_no_damage() {
        let chain = |number| reading::ReadError::Chain { number };
        let (from, trim) = (Lsn(900), (Lsn(800), 5));
        let overwritten = ReadError::of(chain(4), from, trim);
        assert!(matches!(overwritten, ReadError::Trimmed { trimmed: Lsn(800) }));
        assert!(matches!(ReadError::of(chain(5), from, trim), ReadError::Block { number: 5, .. }));
    }
}

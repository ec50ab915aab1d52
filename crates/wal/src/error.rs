//! What can go wrong, one type for each operation. Every message says what, where and what to do.

use std::time::Duration;

use riopipe::{AcknowledgeError, EngineKind, StreamError, StreamFailure, SubmitError, WaitError};
use riopipe_wal_core::Lsn;
use riopipe_wal_core::format::BlockError;
use riopipe_wal_core::opening::FindError;
use riopipe_wal_core::reading;
use riopipe_wal_core::ring::BLOCKS_MIN;

/// Why a log does not take or give anything any more. Each call says so from then on.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum WalFailure {
    /// It was closed, or is being closed.
    #[error("the log was closed")]
    Closed,
    /// Its stream has failed. What was durable stays so.
    #[error("{0}; drop the log and open it again")]
    Stream(#[from] StreamFailure),
    /// Its stream refused a group for a reason that can't be waited out, or this process lacks
    /// something that the log needs.
    #[error("the log can't go on: {0}; drop it and open it again")]
    Broken(String),
}

/// Why the blocks of a volume can't be a log.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum PlaceError {
    /// They are too few.
    #[error("a log needs at least {} blocks, not {blocks}", BLOCKS_MIN + 1)]
    TooFew {
        /// Blocks of the place.
        blocks: u64,
    },
    /// They are not all on the volume.
    #[error("{blocks} blocks from block {lba} on do not lie within the volume's {volume} blocks")]
    OutOfRange {
        /// First block of the place.
        lba: u64,
        /// Blocks of the place.
        blocks: u64,
        /// Blocks of the volume.
        volume: u64,
    },
    /// The volume keeps no order.
    #[error("engine {0} keeps no order, so a crash may leave holes in a log: use rio or sync")]
    Engine(EngineKind),
    /// The options make no sense.
    #[error("{0}")]
    Options(&'static str),
}

/// Why a log could not be created.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum CreateError {
    /// The place or the options won't do.
    #[error(transparent)]
    Place(#[from] PlaceError),
    /// A log is there already.
    #[error(
        "a log is there already, at block {lba}: open it, or say that it may be overwritten \
         (WalOptions::overwrite)"
    )]
    Exists {
        /// The volume block of its anchor.
        lba: u64,
    },
    /// No stream.
    #[error(transparent)]
    Stream(#[from] StreamError),
    /// Reading what is there failed.
    #[error("reading what is there failed: {0}")]
    Read(#[from] riopipe::ReadError),
    /// Its first blocks were refused.
    #[error("the log's first blocks were refused: {0}")]
    Submit(#[from] SubmitError),
    /// Its first blocks could not be made durable.
    #[error("the log's first blocks could not be made durable: {0}")]
    Wait(#[from] WaitError),
    /// This process lacks something.
    #[error("this process can't start a log: {0}")]
    System(#[from] std::io::Error),
}

impl CreateError {
    /// Whether the same call may succeed later, with nothing changed but time.
    #[must_use]
    pub fn is_retryable(&self) -> bool {
        matches!(self, Self::Wait(WaitError::Deadline(_)))
    }
}

/// Why a log could not be opened. Opening it again finds the same.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum OpenError {
    /// The place or the options won't do.
    #[error(transparent)]
    Place(#[from] PlaceError),
    /// There is no log.
    #[error("no log begins at block {lba}: {source}")]
    NoLog {
        /// The volume block where its anchor should be.
        lba: u64,
        /// What is wrong with what is there.
        source: BlockError,
    },
    /// The log that is there uses other blocks.
    #[error(
        "the log at block {lba} has {blocks} blocks from block {start} on: open it at these, it does \
         not move"
    )]
    OtherPlace {
        /// The volume block where its anchor was found.
        lba: u64,
        /// Where it was made.
        start: u64,
        /// Its blocks.
        blocks: u64,
    },
    /// Its creation was cut off by a crash, or all of it is damaged.
    #[error("the log at block {lba} has no block of its own: create it again")]
    Empty {
        /// The volume block of its anchor.
        lba: u64,
    },
    /// Part of what was durable is not there any more.
    #[error(
        "block {number} of the log (volume block {lba}) was durable and can't be read as such any \
         more: records are lost or damaged from there on; restore the drive, or create the log again"
    )]
    Damaged {
        /// The block's number in the log.
        number: u64,
        /// Where it lies.
        lba: u64,
    },
    /// The stream has writes in doubt that are none of the log's.
    #[error(
        "stream {stream} has {others} writes in doubt outside of the log's blocks: it belongs to \
         something else, too; look at them and acknowledge them (Volume::acknowledge)"
    )]
    NotOurs {
        /// The stream.
        stream: u16,
        /// Writes that lie elsewhere.
        others: usize,
    },
    /// The stream's writes in doubt could not be acknowledged.
    #[error(transparent)]
    Acknowledge(#[from] AcknowledgeError),
    /// No stream.
    #[error(transparent)]
    Stream(#[from] StreamError),
    /// Reading the log failed.
    #[error("reading the log failed: {0}")]
    Read(#[from] ReadError),
    /// What a crash has left could not be made durable.
    #[error("what a crash has left of the log could not be made durable: {0}")]
    Settle(String),
    /// This process lacks something.
    #[error("this process can't start a log: {0}")]
    System(#[from] std::io::Error),
}

impl OpenError {
    /// Whether the same call may succeed later, with nothing changed but time.
    #[must_use]
    pub fn is_retryable(&self) -> bool {
        matches!(self, Self::Acknowledge(AcknowledgeError::Recover(_)))
            || matches!(self, Self::Stream(StreamError::Recover(_)))
    }

    pub(crate) fn find(error: FindError<riopipe::ReadError>, lba: u64, of: u64, ring: u64) -> Self {
        match error {
            FindError::Read(error) => Self::Read(ReadError::Drive(error)),
            FindError::Empty => Self::Empty { lba: of },
            FindError::Damaged { number } => Self::Damaged { number, lba: lba + number % ring },
        }
    }
}

/// Why a record was not taken.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum AppendError {
    /// The log is full of records that are not trimmed.
    #[error(
        "the log is full, and no trim is under way: apply records elsewhere, then trim them \
         (waited {waited:?})"
    )]
    LogFull {
        /// How long room was waited for.
        waited: Duration,
    },
    /// Records come faster than the drives take them.
    #[error("no room for the record within {waited:?}: the drives are behind")]
    Busy {
        /// How long room was waited for.
        waited: Duration,
    },
    /// No log of this size takes it.
    #[error("a record of {bytes} bytes does not fit: this log takes up to {max}")]
    TooLarge {
        /// Bytes of the record.
        bytes: usize,
        /// Bytes that it may have.
        max: usize,
    },
    /// The log is over.
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

/// Why a record is not known to be durable.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum DurableError {
    /// The time is up; nothing else changed.
    #[error("the record at {lsn} was not durable within {waited:?}; it may still become so")]
    Deadline {
        /// The record.
        lsn: Lsn,
        /// How long was waited.
        waited: Duration,
    },
    /// No such record was appended.
    #[error("no record was appended at {lsn}: the log ends at {end}")]
    NotAppended {
        /// The Lsn asked for.
        lsn: Lsn,
        /// Where the next record will be.
        end: Lsn,
    },
    /// The log is over, and the record was not durable by then.
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

/// Why records were not dropped.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum TrimError {
    /// They are not durable.
    #[error("records below {asked} can't be dropped: only those below {durable} are durable")]
    NotDurable {
        /// Up to where they should be dropped.
        asked: Lsn,
        /// Up to where records are durable.
        durable: Lsn,
    },
    /// The log is over.
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

/// Why records could not be read.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum ReadError {
    /// A drive or a target failed.
    #[error(transparent)]
    Drive(#[from] riopipe::ReadError),
    /// A block is damaged.
    #[error("block {number} of the log: {error}")]
    Block {
        /// Its number.
        number: u64,
        /// What is wrong.
        error: BlockError,
    },
    /// A record is damaged.
    #[error("the record at {lsn} of the log does not fit its checksum")]
    Record {
        /// Its Lsn.
        lsn: Lsn,
    },
    /// What was to be read was trimmed.
    #[error("the log was trimmed up to {trimmed} while it was read: read on from there")]
    Trimmed {
        /// The first byte that is needed.
        trimmed: Lsn,
    },
    /// The log is over.
    #[error(transparent)]
    Over(#[from] WalFailure),
}

impl ReadError {
    /// Whether reading may succeed later, from an Lsn that is not trimmed.
    #[must_use]
    pub fn is_retryable(&self) -> bool {
        matches!(self, Self::Trimmed { .. })
    }

    /// What reading blocks at an Lsn has come to; `trimmed` is how far the log is trimmed by now.
    pub(crate) fn of(error: reading::ReadError<Self>, from: Lsn, trimmed: Lsn) -> Self {
        match error {
            reading::ReadError::Read(error) => error,
            // Its place may have been written again meanwhile.
            _ if from < trimmed => Self::Trimmed { trimmed },
            reading::ReadError::Block { number, error } => Self::Block { number, error },
            reading::ReadError::Chain { number } => {
                Self::Block { number, error: BlockError::Senseless }
            }
            reading::ReadError::Record { lsn } => Self::Record { lsn },
        }
    }
}

/// Why a log was not closed.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum CloseError {
    /// The time is up. The log takes no more records and goes on closing: call again to wait for it.
    #[error("the log was not closed within {waited:?}: {queued} bytes of records wait for room")]
    Deadline {
        /// How long was waited.
        waited: Duration,
        /// Bytes that wait to be written.
        queued: usize,
    },
    /// It failed before. What was durable stays so.
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

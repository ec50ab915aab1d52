//! Errors, one type for each operation.

use std::time::Duration;

use riopipe::{StreamError, StreamFailure};
use riopipe_wal::{AppendError, DurableError, Lsn, WalFailure};

/// The reason why a store does not work any more. All later calls return it. Drop the store and
/// open it again.
#[derive(Clone, Debug, thiserror::Error)]
#[non_exhaustive]
pub enum StoreFailure {
    /// The store was closed, or is being closed.
    #[error("the store was closed")]
    Closed,
    /// The log has ended.
    #[error("the store's log: {0}")]
    Log(#[from] WalFailure),
    /// The log did not take a record for which it has space.
    #[error("the store's log did not take a record: {0}")]
    Append(#[from] AppendError),
    /// The data stream has failed.
    #[error("the store's data: {0}")]
    Data(#[from] StreamFailure),
    /// The data stream refused a group, or a flaw of this library has ended the store's thread.
    #[error("the store can't go on: {0}")]
    Other(String),
}

/// The reason why a place or options can't be used for a store.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum PlaceError {
    /// The data place is not in the volume, or has no block.
    #[error(
        "{blocks} blocks of data from block {lba} on are not within the volume's {volume} blocks"
    )]
    OutOfRange {
        /// First block.
        lba: u64,
        /// Number of blocks.
        blocks: u64,
        /// Blocks of the volume.
        volume: u64,
    },
    /// The log and the data have blocks in common, or the same stream.
    #[error("the log and the data of a store need blocks and a stream of their own each")]
    Overlap,
    /// The log is too short.
    #[error("the log of a store needs at least {min} blocks, not {blocks}")]
    LogTooShort {
        /// Blocks of the log's place.
        blocks: u64,
        /// The fewest blocks.
        min: u64,
    },
}

/// The reason why a store could not be created.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum CreateError {
    /// The place can't be used.
    #[error(transparent)]
    Place(#[from] PlaceError),
    /// The log could not be created.
    #[error(transparent)]
    Log(#[from] riopipe_wal::CreateError),
    /// The first snapshot could not be written.
    #[error("the first snapshot could not be appended: {0}")]
    Append(#[from] AppendError),
    /// The first snapshot could not be made durable.
    #[error("the first snapshot could not be made durable: {0}")]
    Durable(#[from] DurableError),
    /// The data stream could not be opened.
    #[error(transparent)]
    Stream(#[from] StreamError),
    /// This process lacks a resource.
    #[error("this process can't start a store: {0}")]
    System(#[from] std::io::Error),
}

/// The reason why a store could not be opened. A second attempt finds the same store.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum OpenError {
    /// The place can't be used.
    #[error(transparent)]
    Place(#[from] PlaceError),
    /// The log could not be opened.
    #[error(transparent)]
    Log(#[from] riopipe_wal::OpenError),
    /// A record could not be read.
    #[error("the store's log: {0}")]
    Read(#[from] riopipe_wal::ReadError),
    /// The log has no snapshot: it is not the log of a store.
    #[error("the log has no snapshot of a store: it is the log of another program")]
    NoStore,
    /// A record is not one of a store, or does not fit the records before it.
    #[error("the record at {lsn} of the log does not fit this store")]
    Record {
        /// The record.
        lsn: Lsn,
    },
    /// The store has another data place.
    #[error(
        "the store has its data in {blocks} blocks from block {lba} on: open it with this place"
    )]
    OtherPlace {
        /// First block.
        lba: u64,
        /// Number of blocks.
        blocks: u64,
    },
    /// The data stream could not be opened.
    #[error(transparent)]
    Stream(#[from] StreamError),
    /// This process lacks a resource.
    #[error("this process can't start a store: {0}")]
    System(#[from] std::io::Error),
}

/// The reason why a transaction was refused. It has changed nothing.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum TransactionError {
    /// There is no object of this name.
    #[error("there is no object \"{name}\"")]
    Unknown {
        /// The name.
        name: String,
    },
    /// A write begins beyond the end of its object.
    #[error(
        "{len} bytes from byte {offset} on: object \"{name}\" ends at byte {size}, and may have no hole"
    )]
    Range {
        /// The object.
        name: String,
        /// First byte of the write.
        offset: u64,
        /// Bytes of the write.
        len: usize,
        /// Size of the object.
        size: u64,
    },
    /// A name is empty or too long.
    #[error("a name has 1 to {} bytes, not {bytes}", crate::NAME_BYTES_MAX)]
    Name {
        /// Bytes of the name.
        bytes: usize,
    },
    /// The transaction does not fit one record of the log.
    #[error(
        "the transaction's record has {bytes} bytes, of {max} at most: divide the transaction, or use a longer log"
    )]
    TooLarge {
        /// Bytes of the record.
        bytes: usize,
        /// The most bytes of a record.
        max: usize,
    },
    /// The table of objects is full.
    #[error(
        "the table of objects would have {bytes} bytes, of {max} at most: remove objects, or use a longer log"
    )]
    TableFull {
        /// Bytes of the table.
        bytes: usize,
        /// The most bytes of the table.
        max: usize,
    },
    /// There are not enough free blocks.
    #[error(
        "the store is full: the transaction needs {needed} blocks, and {free} are free (after {waited:?})"
    )]
    Full {
        /// Blocks that the change needs.
        needed: u64,
        /// Free blocks.
        free: u64,
        /// Time waited for blocks that earlier transactions have freed.
        waited: Duration,
    },
    /// The log or the ordering queue had no space in time.
    #[error("the store is busy: earlier transactions were not written within {waited:?}")]
    Busy {
        /// Time waited.
        waited: Duration,
    },
    /// A block that a write replaces in part could not be read.
    #[error("reading the rest of a block that the write changes: {0}")]
    Read(#[from] riopipe::ReadError),
    /// The store has failed.
    #[error(transparent)]
    Failed(#[from] StoreFailure),
}

impl TransactionError {
    /// Whether the same call may succeed later, if only time passes.
    #[must_use]
    pub fn is_retryable(&self) -> bool {
        match self {
            Self::Busy { .. } => true,
            Self::Read(error) => error.is_retryable(),
            _ => false,
        }
    }
}

/// The reason why a transaction is not known to be durable.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum WaitError {
    /// The time limit has passed. The transaction may still become durable.
    #[error("the transaction was not durable within {waited:?}")]
    Deadline {
        /// Time waited.
        waited: Duration,
    },
    /// The store has failed. The transaction may be durable or not.
    #[error(transparent)]
    Failed(#[from] StoreFailure),
}

/// The reason why `apply_transaction` failed.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum ApplyError {
    /// The transaction was refused, and has changed nothing.
    #[error(transparent)]
    Refused(#[from] TransactionError),
    /// The transaction is in the store, and not known to be durable.
    #[error(transparent)]
    Wait(#[from] WaitError),
}

/// The reason why an object could not be read.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum ReadError {
    /// There is no object of this name.
    #[error("there is no object \"{name}\"")]
    Unknown {
        /// The name.
        name: String,
    },
    /// The bytes are not within the object.
    #[error("{len} bytes from byte {offset} on: object \"{name}\" ends at byte {size}")]
    Range {
        /// The object.
        name: String,
        /// First byte.
        offset: u64,
        /// Number of bytes.
        len: usize,
        /// Size of the object.
        size: u64,
    },
    /// A drive or a target failed.
    #[error(transparent)]
    Drive(#[from] riopipe::ReadError),
    /// The store has failed.
    #[error(transparent)]
    Failed(#[from] StoreFailure),
}

//! A drive as one thread uses it: operations go in, completions come out.
//!
//! The target's sessions write to a [`BlockDevice`]. Real drives, the modelled SSD and the
//! simulator's drives implement it. The types and the one error of an operation are here, too, so
//! that no layer translates them.

use alloc::boxed::Box;
use alloc::string::String;
use alloc::sync::Arc;
use alloc::vec::Vec;
use core::fmt;

use crate::write_order::{EpochId, WriteOrder};

/// Size of a logical block in bytes: the unit of every address and length here, and the largest
/// piece that a drive is assumed to write atomically (assumption M1).
pub const BLOCK_BYTES: usize = 4096;

/// Most blocks that one operation with data may cover (8 MiB). A target splits or refuses larger
/// ones by its MDTS long before; the bound keeps buffers and model arithmetic finite. Write zeroes
/// and deallocate carry no data and may cover the whole drive.
pub const BLOCKS_MAX: u64 = 2048;

/// A drive, as one of its users sees it.
///
/// `op` is the caller's name for an operation. It comes back in [`Done`]; the device does not need
/// it to be unique. Operations in flight together may take effect in any order, also two on one
/// block (assumption M4). A flush covers the writes that had completed before it was submitted
/// (assumption M2).
///
/// An operation is refused at once, as [`Submitted::Done`] with an error, when its blocks are not
/// all on the drive, its length is zero or not a whole number of blocks, or too many operations
/// are in flight.
pub trait BlockDevice {
    /// A buffer of this device. A read returns one, and a write may hand one over.
    type Buf: AsRef<[u8]> + AsMut<[u8]>;

    /// Writes `data` (whole blocks) from block `lba` on.
    fn write(&mut self, op: u64, lba: u64, data: Data<'_, Self::Buf>) -> Submitted<Self::Buf>;

    /// Writes `data` (whole blocks) from block `lba` on, at a place in the order that the drive
    /// keeps. A drive that does not keep this order refuses the write
    /// ([`Cause::OrderNotKept`]).
    fn write_in_order(
        &mut self,
        op: u64,
        lba: u64,
        data: Data<'_, Self::Buf>,
        order: WriteOrder,
    ) -> Submitted<Self::Buf> {
        match order {
            WriteOrder::Orderless => self.write(op, lba, data),
            WriteOrder::Ordered { .. } | WriteOrder::Epochs(_) => {
                let blocks = (data.bytes().len() / BLOCK_BYTES) as u64;
                refuse_order(Operation::Write, lba, blocks)
            }
        }
    }

    /// Makes durable all writes of the stream in epochs before `before`, also those that have not
    /// been submitted yet: the operation ends when they have been, and are durable.
    fn flush_epochs(&mut self, op: u64, before: EpochId) -> Submitted<Self::Buf> {
        let _ = (op, before);
        refuse_order(Operation::Flush, 0, 0)
    }

    /// Begins a stream anew with the epoch `first`. What the drive still holds of the stream ends:
    /// operations in flight fail, and contents that are not durable are lost, as after a power
    /// cut.
    fn start_stream(&mut self, op: u64, first: EpochId) -> Submitted<Self::Buf> {
        let _ = (op, first);
        refuse_order(Operation::StartStream, 0, 0)
    }

    /// Whether the drive has Force Unit Access: it makes a write durable itself. Without it, a flush
    /// must follow a write that is to be durable.
    fn has_fua(&self) -> bool {
        false
    }

    /// As [`write`](Self::write), and the write is durable when it is done. Only for a drive that
    /// [has FUA](Self::has_fua).
    fn write_durably(
        &mut self,
        op: u64,
        lba: u64,
        data: Data<'_, Self::Buf>,
    ) -> Submitted<Self::Buf> {
        debug_assert!(self.has_fua(), "a flush would have to follow");
        self.write(op, lba, data)
    }

    /// As [`write_zeroes`](Self::write_zeroes), or as [`deallocate`](Self::deallocate) with
    /// `deallocate`, and the zeroes are durable when it is done. Only for a drive that
    /// [has FUA](Self::has_fua).
    fn zero_durably(
        &mut self,
        op: u64,
        lba: u64,
        blocks: u64,
        deallocate: bool,
    ) -> Submitted<Self::Buf> {
        debug_assert!(self.has_fua(), "a flush would have to follow");
        match deallocate {
            true => self.deallocate(op, lba, blocks),
            false => self.write_zeroes(op, lba, blocks),
        }
    }

    /// Reads `blocks` blocks from `lba` on into a new buffer.
    fn read(&mut self, op: u64, lba: u64, blocks: u64) -> Submitted<Self::Buf>;

    /// Makes durable all writes, of any user of the drive, that completed before this call.
    fn flush(&mut self, op: u64) -> Submitted<Self::Buf>;

    /// Makes the blocks read as zeroes; the space stays reserved.
    fn write_zeroes(&mut self, op: u64, lba: u64, blocks: u64) -> Submitted<Self::Buf>;

    /// Gives the blocks up. The medium decides what they read as afterwards; recovery does not rely
    /// on it (trap T10).
    fn deallocate(&mut self, op: u64, lba: u64, blocks: u64) -> Submitted<Self::Buf>;

    /// Takes back a read or a write without an order that waits in a queue before the drive, which has
    /// not been given it. Returns whether it was taken back. [`poll`](Self::poll) then never returns
    /// it, and it has no effect. Without such a queue there is nothing to take back.
    fn take_back(&mut self, op: u64) -> bool {
        let _ = op;
        false
    }

    /// Hands over to the drive the operations that earlier calls have only gathered. Without this
    /// call no pending operation need ever start. `now` is the time in ns at which a drive with
    /// modelled times receives them.
    fn kick(&mut self, now: u64);

    /// Appends the operations that have completed by `now` (ns) to `done`; never blocks.
    fn poll(&mut self, now: u64, done: &mut Vec<Done<Self::Buf>>);

    /// When (ns, on the clock of [`poll`](Self::poll)) the next completion is due, where that is
    /// known. A thread that sleeps must not sleep longer.
    fn next_deadline(&self) -> Option<u64>;

    /// Operations submitted (also those not kicked yet) and not yet returned by
    /// [`poll`](Self::poll).
    fn in_flight(&self) -> usize;
}

/// The answer of a drive that does not keep the order of an operation.
#[cold]
fn refuse_order<B>(what: Operation, lba: u64, blocks: u64) -> Submitted<B> {
    let drive = Arc::from("this drive");
    Submitted::Done(Err(IoError::new(what, lba, blocks, &drive, Cause::OrderNotKept)))
}

/// The bytes of a write.
#[derive(Debug)]
pub enum Data<'a, B> {
    /// Bytes that are the caller's again when the call returns. The device copies them unless it
    /// finishes within the call.
    Borrowed(&'a [u8]),
    /// A buffer that the device may keep until the write is done.
    Owned(B),
}

impl<B: AsRef<[u8]>> Data<'_, B> {
    /// The bytes themselves.
    #[inline]
    pub fn bytes(&self) -> &[u8] {
        match self {
            Self::Borrowed(bytes) => bytes,
            Self::Owned(buf) => buf.as_ref(),
        }
    }
}

/// How a submission ended.
#[derive(Debug)]
#[must_use]
pub enum Submitted<B> {
    /// Finished, or refused, within the call. [`BlockDevice::poll`] will not return it. A read
    /// brings its buffer.
    Done(Result<Option<B>, IoError>),
    /// In flight: [`BlockDevice::poll`] will return it.
    Pending,
}

/// One finished operation.
#[derive(Debug)]
pub struct Done<B> {
    /// The caller's name for the operation.
    pub op: u64,
    /// The buffer of a read, nothing for the others, or the error. After an error it is unknown
    /// which blocks of a write have been written.
    pub result: Result<Option<B>, IoError>,
}

/// Why an operation on a drive failed: which operation, where, and what to do about it.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("{}: {} on {}: {}", .0.what, Extent(.0.lba, .0.blocks), .0.drive, .0.cause)]
pub struct IoError(Box<Detail>);

impl IoError {
    /// An error of operation `what` on `blocks` blocks from `lba` on (both 0 for a flush).
    #[cold]
    #[must_use]
    pub fn new(what: Operation, lba: u64, blocks: u64, drive: &Arc<str>, cause: Cause) -> Self {
        Self(Box::new(Detail { what, lba, blocks, drive: Arc::clone(drive), cause }))
    }

    /// The operation that failed.
    #[must_use]
    pub const fn operation(&self) -> Operation {
        self.0.what
    }

    /// The cause of the failure.
    #[must_use]
    pub const fn cause(&self) -> &Cause {
        &self.0.cause
    }
}

#[derive(Debug, Clone, PartialEq, Eq)]
struct Detail {
    what: Operation,
    lba: u64,
    blocks: u64,
    drive: Arc<str>,
    cause: Cause,
}

/// The operations of a block device.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Operation {
    /// [`BlockDevice::write`].
    Write,
    /// [`BlockDevice::read`].
    Read,
    /// [`BlockDevice::flush`].
    Flush,
    /// [`BlockDevice::write_zeroes`].
    WriteZeroes,
    /// [`BlockDevice::deallocate`].
    Deallocate,
    /// [`BlockDevice::start_stream`].
    StartStream,
}

impl fmt::Display for Operation {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Write => "write",
            Self::Read => "read",
            Self::Flush => "flush",
            Self::WriteZeroes => "write zeroes",
            Self::Deallocate => "deallocate",
            Self::StartStream => "start of a stream",
        })
    }
}

/// The cause of a failed operation.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum Cause {
    /// Some of its blocks are not on the drive.
    #[error("the drive has only {capacity} blocks")]
    OutOfRange {
        /// The drive's capacity in blocks.
        capacity: u64,
    },
    /// An operation on nothing, on more than [`BLOCKS_MAX`] blocks, or on a length in bytes that is
    /// not a whole number of blocks.
    #[error(
        "{bytes} bytes: give a whole number of 4096-byte blocks, at least 1 and at most {}",
        BLOCKS_MAX
    )]
    BadLength {
        /// The length given, in bytes.
        bytes: u64,
    },
    /// More operations in flight than the depth of the queue.
    #[error("the queue is full ({depth} operations in flight): poll before submitting more")]
    QueueFull {
        /// The depth that the queue was opened with.
        depth: usize,
    },
    /// The host file system is full, a quota is reached or a file may not grow further. The text is
    /// the system's.
    #[error(
        "no space left for the file ({0}): free space there, or create the file with size= so that \
         its space is reserved beforehand"
    )]
    NoSpace(String),
    /// The file has been deleted, replaced or cut short, or the device removed, while it was
    /// served.
    #[error("{0}: stop serving it, bring the medium back, and serve it again")]
    Vanished(Gone),
    /// The modelled drive has lost power.
    #[error("the drive has lost power")]
    PowerLost,
    /// The drive does not keep the order that the operation needs.
    #[error(
        "the drive does not keep this order: cache barriers need a drive with order=barrier, \
         streams and epochs one with order=op"
    )]
    OrderNotKept,
    /// The streams that an operation names are none, or one twice.
    #[error("an ordered write needs one stream, or two different ones; 0 is no stream")]
    BadStream,
    /// The drive keeps the order of no further stream.
    #[error(
        "the drive keeps the order of {streams} streams at a time, and none of them is idle: end \
         the epochs of another stream first"
    )]
    StreamsFull {
        /// The number of streams with epochs that are not durable.
        streams: usize,
    },
    /// The epoch has been ended by a barrier.
    #[error("epoch {} of stream {} has ended: its barrier came before this write", .0.epoch, .0.stream)]
    EpochEnded(EpochId),
    /// An earlier write of the stream has failed, so no later one can become durable in order.
    #[error("an earlier write of stream {stream} has failed: start the stream anew")]
    StreamFailed {
        /// The stream.
        stream: u16,
    },
    /// The stream was started anew while the operation was in flight.
    #[error("stream {stream} was started anew while this was in flight")]
    StreamRestarted {
        /// The stream.
        stream: u16,
    },
    /// The medium or the system reported an error. The text is the system's.
    #[error("{0}")]
    Failed(String),
}

/// How a medium was lost.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub enum Gone {
    /// The file has no directory entry any more. Bytes that are written now are lost on close.
    #[error("the file has been deleted or replaced while it was served")]
    Deleted,
    /// The file is shorter than the drive.
    #[error("the file has been cut to {bytes} bytes while it was served")]
    Truncated {
        /// Its length now.
        bytes: u64,
    },
    /// The device is no longer there (ENODEV or ENXIO).
    #[error("the device is gone")]
    Removed,
}

struct Extent(u64, u64);

impl fmt::Display for Extent {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.1 {
            0 if self.0 == 0 => f.write_str("all blocks"),
            1 => write!(f, "block {}", self.0),
            _ => write!(f, "{} blocks from {}", self.1, self.0),
        }
    }
}

/// The bounds of a drive, and its name for errors. Every device checks an operation against them
/// before it does anything.
#[derive(Debug, Clone)]
pub struct Limits {
    capacity: u64,
    name: Arc<str>,
}

impl Limits {
    /// The limits of a drive of `capacity` blocks.
    #[must_use]
    pub fn new(capacity: u64, name: &Arc<str>) -> Self {
        Self { capacity, name: Arc::clone(name) }
    }

    /// Checks an operation that carries `bytes` of data.
    ///
    /// # Errors
    /// [`Cause::BadLength`], [`Cause::OutOfRange`].
    #[inline]
    pub fn data(&self, what: Operation, lba: u64, bytes: usize) -> Result<(), IoError> {
        if bytes == 0 || !bytes.is_multiple_of(BLOCK_BYTES) {
            let cause = Cause::BadLength { bytes: bytes as u64 };
            return Err(self.error(what, lba, (bytes / BLOCK_BYTES) as u64, cause));
        }
        self.blocks(what, lba, (bytes / BLOCK_BYTES) as u64)
    }

    /// Checks an operation that carries `blocks` blocks of data.
    ///
    /// # Errors
    /// [`Cause::BadLength`], [`Cause::OutOfRange`].
    #[inline]
    pub fn blocks(&self, what: Operation, lba: u64, blocks: u64) -> Result<(), IoError> {
        if blocks > BLOCKS_MAX {
            let bytes = blocks.saturating_mul(BLOCK_BYTES as u64);
            return Err(self.error(what, lba, blocks, Cause::BadLength { bytes }));
        }
        self.extent(what, lba, blocks)
    }

    /// Checks an operation on `blocks` blocks that carries no data.
    ///
    /// # Errors
    /// [`Cause::BadLength`], [`Cause::OutOfRange`].
    #[inline]
    pub fn extent(&self, what: Operation, lba: u64, blocks: u64) -> Result<(), IoError> {
        if blocks == 0 {
            return Err(self.error(what, lba, blocks, Cause::BadLength { bytes: 0 }));
        }
        match lba.checked_add(blocks) {
            Some(end) if end <= self.capacity => Ok(()),
            _ => {
                let capacity = self.capacity;
                Err(self.error(what, lba, blocks, Cause::OutOfRange { capacity }))
            }
        }
    }

    /// An error of an operation on this drive.
    #[cold]
    #[must_use]
    pub fn error(&self, what: Operation, lba: u64, blocks: u64, cause: Cause) -> IoError {
        IoError::new(what, lba, blocks, &self.name, cause)
    }
}

#[cfg(test)]
mod tests {
    use alloc::string::ToString;

    use super::*;

    #[test]
    fn messages_name_operation_place_and_remedy() {
        let drive: Arc<str> = Arc::from("file:/srv/a");
        let full = || Cause::NoSpace("No space left on device (os error 28)".into());
        let error = IoError::new(Operation::Write, 7, 2, &drive, full());
        let text = error.to_string();
        for part in ["write: 2 blocks from 7 on file:/srv/a", "No space left", "size="] {
            assert!(text.contains(part), "{part:?} in {text:?}");
        }
        let error = IoError::new(Operation::Flush, 0, 0, &drive, Cause::PowerLost);
        assert_eq!(error.to_string(), "flush: all blocks on file:/srv/a: the drive has lost power");
        assert_eq!((error.operation(), error.cause()), (Operation::Flush, &Cause::PowerLost));
    }

    #[test]
    fn a_result_stays_small() {
        // Completions are moved by the hundred thousand each second.
        assert!(size_of::<Done<Box<[u8]>>>() <= 40);
    }

    #[test]
    fn what_is_not_on_the_drive_is_refused() {
        let limits = Limits::new(3000, &Arc::from("d"));
        let cause = |result: Result<(), IoError>| result.map_err(|error| error.cause().clone());
        assert_eq!(cause(limits.data(Operation::Write, 2999, BLOCK_BYTES)), Ok(()));
        assert_eq!(cause(limits.extent(Operation::WriteZeroes, 0, 3000)), Ok(()));
        for lba in [3000, u64::MAX] {
            let beyond = Err(Cause::OutOfRange { capacity: 3000 });
            assert_eq!(cause(limits.blocks(Operation::Read, lba, 1)), beyond);
        }
        for bytes in [0, 1, 4095, 4097] {
            let bad = Err(Cause::BadLength { bytes });
            assert_eq!(cause(limits.data(Operation::Write, 0, bytes as usize)), bad);
        }
        let bytes = (BLOCKS_MAX + 1) * BLOCK_BYTES as u64;
        let bad = Err(Cause::BadLength { bytes });
        assert_eq!(cause(limits.blocks(Operation::Read, 0, BLOCKS_MAX + 1)), bad);
        let none = Err(Cause::BadLength { bytes: 0 });
        assert_eq!(cause(limits.extent(Operation::Deallocate, 5, 0)), none);
    }
}

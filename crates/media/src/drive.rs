//! What a drive is: [`Drive`], and the [`Queue`] through which one thread uses it.

use std::os::fd::RawFd;

use crate::buf::AlignedBuf;
use crate::error::{IoError, OpenError};
use crate::ssd::PowerCut;
use crate::survival::Survival;

/// Size of a logical block in bytes: the unit of every address and length here, and the largest
/// piece that a drive is assumed to write atomically (M1).
pub const BLOCK_SIZE: usize = 4096;

/// Most blocks that one operation may cover (8 MiB). A target splits or refuses larger ones by
/// its MDTS long before; the bound keeps buffers and model arithmetic finite. Write zeroes and
/// deallocate carry no data and may cover the whole drive.
pub const BLOCKS_MAX: u64 = 2048;

/// What a drive is like.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Geometry {
    /// Bytes in a logical block: always [`BLOCK_SIZE`].
    pub block_size: u32,
    /// Capacity in logical blocks, at least 1.
    pub blocks: u64,
    /// A completed write may be lost in a power cut until a later flush completes (what NVMe
    /// Identify reports as VWC).
    pub volatile_cache: bool,
    /// A block is written wholly or not at all even if power fails (M1). False for
    /// files on a host file system, which may tear one.
    pub atomic_block: bool,
    /// One line for people: kind, size, where.
    pub describe: String,
}

impl Geometry {
    /// Power-loss protection: completed is durable (M3).
    pub fn plp(&self) -> bool {
        !self.volatile_cache
    }
}

/// A place where blocks rest, shared by all reactors of a target.
///
/// What is assumed of it is numbered in docs/media.md; [`Drive::survives`] says which of these
/// assumptions the medium behind it keeps.
pub trait Drive: Send + Sync {
    /// Size, cache and description. Constant over the drive's life.
    fn geometry(&self) -> &Geometry;

    /// A way in for one thread. `depth` is the most operations that it will have in flight, at
    /// least 1; one more is answered with [`Cause::QueueFull`](crate::Cause::QueueFull).
    ///
    /// The queue may be sent to another thread until its first operation and belongs to that
    /// thread from then on. Refused ([`OpenError::Taken`]) while somebody has the drive to himself:
    /// see [`Drive::open_only_queue`].
    fn open_queue(&self, depth: usize) -> Result<Box<dyn Queue>, OpenError>;

    /// A queue for who wants no other beside it. A drive may then refuse to open others
    /// ([`OpenError::Taken`]) until it is dropped, and save what keeps queues apart; where it makes
    /// no difference, or others are open already, it is a queue like any other.
    ///
    /// The thread that used it also drops it, or hands it over by something that locks or enters
    /// the kernel, as all of the standard library's ways do.
    fn open_only_queue(&self, depth: usize) -> Result<Box<dyn Queue>, OpenError> {
        self.open_queue(depth)
    }

    /// What remains after a killed process and after a power cut.
    fn survives(&self) -> Survival;

    /// Cuts the power of a drive that can model it: everything in flight fails with
    /// [`Cause::PowerLost`](crate::Cause::PowerLost), the blocks that may be lost are lost or
    /// kept as `seed` decides, and the drive stays off until [`Drive::power_on`]. `None` where
    /// nothing is modelled: nothing happened.
    fn power_cut(&self, seed: u64) -> Option<PowerCut> {
        let _ = seed;
        None
    }

    /// Power again after [`Drive::power_cut`].
    fn power_on(&self) {}
}

/// One thread's way to a drive: operations go in, completions come out of [`Queue::poll`].
///
/// `op` is the caller's name for an operation; it comes back in [`Done`] and need not be unique
/// for the queue's sake. Operations in flight together may take effect in any order, also two on
/// one block (M4). A flush covers the writes that had completed before it was
/// submitted (M2).
///
/// An operation is refused at once, as `Submitted::Done(Err(..))`, when its blocks are not all on
/// the drive, its length is zero or not a whole number of blocks, or the queue is full.
///
/// Dropping a queue waits for what it has in flight, so that no write lands after its file has
/// been unlocked (T8).
pub trait Queue: Send {
    /// Writes `data` (whole blocks) from block `lba` on.
    fn write(&mut self, op: u64, lba: u64, data: Data<'_>) -> Submitted;

    /// Reads `blocks` blocks from `lba` on into a new buffer.
    fn read(&mut self, op: u64, lba: u64, blocks: u64) -> Submitted;

    /// Makes durable all writes, of any queue, that completed before this call.
    fn flush(&mut self, op: u64) -> Submitted;

    /// Makes the blocks read as zeroes; the space stays reserved.
    fn write_zeroes(&mut self, op: u64, lba: u64, blocks: u64) -> Submitted;

    /// Gives the blocks up. They read as zeroes afterwards, whatever the medium's own TRIM does
    /// (T10).
    fn deallocate(&mut self, op: u64, lba: u64, blocks: u64) -> Submitted;

    /// Hands to the drive what earlier calls have only gathered. Without it nothing pending need
    /// ever start.
    fn kick(&mut self);

    /// Appends what has completed to `done`. `now` is [`now()`](crate::now), read by the caller
    /// once per round; never blocks.
    fn poll(&mut self, now: u64, done: &mut Vec<Done>);

    /// When (in ns of [`now()`](crate::now)) the next completion is due, where that is known: who
    /// wants to sleep must not sleep longer. `None`: watch [`Queue::event_fd`].
    fn next_deadline(&self) -> Option<u64>;

    /// A descriptor that becomes readable when completions may be there. The queue never reads
    /// it: watch it edge-triggered, or read its 8 bytes on each wake-up.
    fn event_fd(&self) -> Option<RawFd>;

    /// Operations submitted (also those not kicked yet) and not yet returned by `poll`.
    fn in_flight(&self) -> usize;
}

/// The bytes of a write.
#[derive(Debug)]
pub enum Data<'a> {
    /// Bytes that are the caller's again when the call returns: the queue copies them unless it
    /// finishes within the call.
    Borrowed(&'a [u8]),
    /// A buffer that the queue may keep until the write is done.
    Owned(AlignedBuf),
}

impl Data<'_> {
    /// The bytes themselves.
    pub fn bytes(&self) -> &[u8] {
        match self {
            Data::Borrowed(bytes) => bytes,
            Data::Owned(buf) => buf,
        }
    }
}

/// How a submission ended.
#[derive(Debug)]
#[must_use]
pub enum Submitted {
    /// Finished, or refused, within the call: `poll` will say nothing of it.
    Done(Result<Option<AlignedBuf>, IoError>),
    /// Under way: `poll` will return it.
    Pending,
}

/// One finished operation.
#[derive(Debug)]
pub struct Done {
    /// The caller's name for it.
    pub op: u64,
    /// The buffer of a read, nothing for the others, or why it failed. After an error it is
    /// unknown which of a write's blocks have been written.
    pub result: Result<Option<AlignedBuf>, IoError>,
}

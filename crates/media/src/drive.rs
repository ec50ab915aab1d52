//! What a drive is: [`Drive`], and the [`Queue`] through which one thread uses it.

use std::os::fd::RawFd;

use riopipe_order::block_device::{self, BlockDevice};

use crate::buf::AlignedBuf;
use crate::error::OpenError;
use crate::ssd::PowerCut;
use crate::survival::Survival;

/// The bytes of a write.
pub type Data<'a> = block_device::Data<'a, AlignedBuf>;
/// How a submission ended.
pub type Submitted = block_device::Submitted<AlignedBuf>;
/// One finished operation.
pub type Done = block_device::Done<AlignedBuf>;

/// What a drive is like.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Geometry {
    /// Bytes in a logical block: always [`BLOCK_SIZE`](crate::BLOCK_SIZE).
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

/// One thread's way to a drive: operations go in, completions come out of
/// [`poll`](BlockDevice::poll). Its times are those of [`now()`](crate::now).
///
/// A deallocated block reads as zeroes afterwards, whatever the medium's own TRIM does (T10).
///
/// Dropping a queue waits for what it has in flight, so that no write lands after its file has
/// been unlocked (T8).
pub trait Queue: BlockDevice<Buf = AlignedBuf> + Send {
    /// A descriptor that becomes readable when completions may be there. The queue never reads
    /// it: watch it edge-triggered, or read its 8 bytes on each wake-up. `None`:
    /// [`next_deadline`](BlockDevice::next_deadline) says when to look.
    fn event_fd(&self) -> Option<RawFd>;
}

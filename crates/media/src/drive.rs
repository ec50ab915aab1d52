//! The interface of drives: [`Drive`], and the [`Queue`] through which one thread uses it.

use std::os::fd::RawFd;

use riopipe_order::block_device::{self, BlockDevice};
use riopipe_order::write_order::DriveOrder;

use crate::buf::AlignedBuf;
use crate::error::OpenError;
use crate::identity::Carrier;
use crate::ssd::PowerCut;
use crate::survival::Survival;

/// The data of a write.
pub type Data<'a> = block_device::Data<'a, AlignedBuf>;
/// The outcome of a submission.
pub type Submitted = block_device::Submitted<AlignedBuf>;
/// One finished operation.
pub type Done = block_device::Done<AlignedBuf>;

/// The properties of a drive.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Geometry {
    /// Size of a logical block in bytes: always [`BLOCK_BYTES`](crate::BLOCK_BYTES).
    pub block_size: u32,
    /// Capacity in logical blocks, at least 1.
    pub blocks: u64,
    /// A power cut may take a completed write until a later flush completes (VWC of NVMe Identify
    /// Controller).
    pub volatile_cache: bool,
    /// A block is written wholly or not at all even if power fails (assumption M1). False for files
    /// on a host file system, which may tear a block.
    pub atomic_block: bool,
    /// One line for display: kind, size, place.
    pub describe: String,
}

impl Geometry {
    /// Whether the drive has power-loss protection: a completed write is durable (assumption M3).
    pub fn plp(&self) -> bool {
        !self.volatile_cache
    }
}

/// A store of blocks, shared by all reactors of a target.
///
/// docs/media.md lists the assumptions about media. [`Drive::survives`] returns what a drive keeps
/// after a failure.
pub trait Drive: Send + Sync {
    /// Size, cache and description. Constant while the drive exists.
    fn geometry(&self) -> &Geometry;

    /// A queue for one thread. `depth`, at least 1, is the largest number of its operations in
    /// flight; one more fails with [`Cause::QueueFull`](crate::Cause::QueueFull).
    ///
    /// The queue may be sent to another thread until its first operation. From then on it belongs
    /// to the thread that used it.
    ///
    /// # Errors
    /// [`OpenError::Taken`], while another caller has the only queue of the drive: see
    /// [`Drive::open_only_queue`]. [`OpenError::Os`], if the system refuses the queue.
    fn open_queue(&self, depth: usize) -> Result<Box<dyn Queue>, OpenError>;

    /// A queue without others beside it. A drive may refuse to open others ([`OpenError::Taken`])
    /// until this one is dropped. The drive then saves the work of keeping queues apart. If others
    /// are open already, or if the drive gains nothing, the queue is an ordinary one.
    ///
    /// The thread that has used the queue drops it, or hands it over by an operation that locks or
    /// enters the kernel. All such operations of the standard library do.
    ///
    /// # Errors
    /// Those of [`Drive::open_queue`].
    fn open_only_queue(&self, depth: usize) -> Result<Box<dyn Queue>, OpenError> {
        self.open_queue(depth)
    }

    /// The order among writes that the drive keeps by itself. Its queues take writes in this order
    /// ([`write_in_order`](BlockDevice::write_in_order)).
    fn order(&self) -> DriveOrder {
        DriveOrder::None
    }

    /// The content that remains on the drive after a killed process and after a power cut.
    fn survives(&self) -> Survival;

    /// The file or device that the drive is on, for the drive's identity. `None`: it is in memory.
    fn carrier(&self) -> Option<Carrier<'_>> {
        None
    }

    /// Cuts the power of a modelled drive. Everything in flight fails with
    /// [`Cause::PowerLost`](crate::Cause::PowerLost), `seed` decides which of the blocks that may
    /// be lost are lost, and the drive stays off until [`Drive::power_on`]. `None`: the drive is
    /// not modelled, and nothing happened.
    fn power_cut(&self, seed: u64) -> Option<PowerCut> {
        let _ = seed;
        None
    }

    /// Turns the power on again after [`Drive::power_cut`].
    fn power_on(&self) {}
}

/// One thread's access to a drive: operations are submitted, and [`poll`](BlockDevice::poll)
/// returns their completions. Its times are those of [`now_ns`](riopipe_platform::now_ns).
///
/// A deallocated block reads as zeroes, whatever a TRIM of the medium does, because undo relies on
/// the zeroes (trap T10).
///
/// Dropping a queue waits for its operations in flight, so that no write lands after the file has
/// been unlocked (trap T8).
pub trait Queue: BlockDevice<Buf = AlignedBuf> + Send {
    /// A descriptor that becomes readable when there may be completions. The queue never reads it:
    /// watch it edge-triggered, or read its 8 bytes on each wake-up. `None`: poll at
    /// [`next_deadline`](BlockDevice::next_deadline).
    fn event_fd(&self) -> Option<RawFd>;
}

//! What a connection needs from outside: devices, time, what all connections share, a log book.

use alloc::string::String;

use riopipe_nvme::command::Status;
use riopipe_order::gate::Cause;
use riopipe_order::region::Region;

use super::shared::{ConnId, Shared};
use crate::stages::Spent;

/// Names a device operation of a connection; the host keeps it and hands it back. The upper 48
/// bits are the `key` that the host gave the connection, so that it finds the connection again;
/// the lower 16 are the connection's own.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct OpId(pub u64);

impl OpId {
    /// Bits that belong to the connection.
    pub const SLOT_BITS: u32 = 16;

    /// The host's key of the connection.
    #[must_use]
    #[inline]
    pub const fn key(self) -> u64 {
        self.0 >> Self::SLOT_BITS
    }

    #[inline]
    pub(super) const fn new(key: u64, slot: u16) -> Self {
        Self(key << Self::SLOT_BITS | slot as u64)
    }

    #[inline]
    pub(super) const fn slot(self) -> u16 {
        self.0 as u16
    }
}

/// The bytes of a write.
#[derive(Debug)]
pub enum WriteData<'a, B> {
    /// Straight from the receive buffer: the host copies them unless the write finishes within
    /// the call.
    Borrowed(&'a [u8]),
    /// A buffer that the host keeps until the write is done.
    Owned(B),
}

/// How a submission ended.
#[derive(Debug)]
#[must_use]
pub enum Submitted<B> {
    /// Finished within the call: [`TargetConn::device_done`](super::TargetConn::device_done)
    /// is not called for it. A read brings its buffer.
    Done(Result<Option<B>, DeviceError>),
    /// Under way.
    Pending,
}

/// Why a device operation failed, as far as a host can be told.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum DeviceError {
    /// Blocks beyond the end.
    #[error("blocks beyond the end of the drive")]
    OutOfRange,
    /// The file system below is full.
    #[error("no space left below the drive")]
    NoSpace,
    /// The file or device is gone.
    #[error("the drive has gone")]
    Vanished,
    /// The drive lost power.
    #[error("the drive has lost power")]
    PowerLost,
    /// Anything else.
    #[error("the drive reported an error")]
    Failed,
}

impl DeviceError {
    /// What the command completes with.
    #[must_use]
    pub const fn status(self, is_read: bool) -> Status {
        match self {
            Self::OutOfRange => Status::LBA_OUT_OF_RANGE.with_dnr(),
            Self::NoSpace => Status::CAPACITY_EXCEEDED.with_dnr(),
            Self::Vanished => Status::INTERNAL.with_dnr(),
            Self::PowerLost => Status::POWER_LOSS,
            Self::Failed if is_read => Status::UNRECOVERED_READ,
            Self::Failed => Status::WRITE_FAULT,
        }
    }
}

/// The world of a [`TargetConn`](super::TargetConn): the same code runs over real drives and
/// clocks and under a simulator.
///
/// `ns` counts the namespaces as [`Shared::namespaces`] lists them.
pub trait Host {
    /// A device buffer: what a read brings, and where an R2T transfer is gathered.
    type Buf: AsRef<[u8]> + AsMut<[u8]>;
    /// Where ordering-log partitions live.
    type Region: Region;

    /// The time in nanoseconds, from any origin, never going back.
    fn now(&self) -> u64;
    /// A buffer of exactly `len` bytes with any contents; `None` if there is no memory.
    fn alloc(&mut self, len: usize) -> Option<Self::Buf>;
    /// Writes whole blocks from `lba` on.
    fn write(
        &mut self,
        ns: usize,
        op: OpId,
        lba: u64,
        data: WriteData<'_, Self::Buf>,
    ) -> Submitted<Self::Buf>;
    /// Reads `blocks` blocks from `lba` on.
    fn read(&mut self, ns: usize, op: OpId, lba: u64, blocks: u32) -> Submitted<Self::Buf>;
    /// Makes durable the writes that have completed before.
    fn flush(&mut self, ns: usize, op: OpId) -> Submitted<Self::Buf>;
    /// Makes blocks read as zeroes; with `deallocate` their space may be given up.
    fn zero(
        &mut self,
        ns: usize,
        op: OpId,
        lba: u64,
        blocks: u64,
        deallocate: bool,
    ) -> Submitted<Self::Buf>;
    /// What all connections share, locked: never on the hot path.
    fn with_shared<T>(&mut self, f: impl FnOnce(&mut Shared<Self::Region>) -> T) -> T;
    /// Has [`TargetConn::noticed`](super::TargetConn::noticed) called on `conn`, on whichever
    /// thread it lives. The connection may be gone by then.
    fn notify(&mut self, conn: ConnId);
    /// Writes an event into the log book.
    fn log(&mut self, event: Event<'_>);
    /// The time as [`now`](Self::now) has it, but looked at just now; only traced writes ask.
    fn instant(&self) -> u64 {
        self.now()
    }
    /// So many ordered requests have come in one batch.
    fn ordered(&mut self, _requests: u64) {}
    /// A traced write has been answered: where its time went.
    fn traced(&mut self, _spent: &Spent) {}
    /// An ordered stream has failed (P6).
    fn stopped(&mut self, _why: Cause) {}
}

/// What is worth a line in the log book.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Event<'a> {
    /// A queue has been connected.
    Connected {
        /// The host.
        hostnqn: &'a str,
        /// The subsystem.
        subnqn: &'a str,
        /// The controller.
        cntlid: u16,
        /// 0 for the admin queue.
        qid: u16,
    },
    /// A Fabrics Connect was refused.
    Refused {
        /// Who asked.
        hostnqn: &'a str,
        /// For which subsystem.
        subnqn: &'a str,
        /// Which queue.
        qid: u16,
        /// Why.
        why: &'a str,
        /// What was answered.
        status: Status,
    },
    /// A connection ends.
    Closed {
        /// The host; empty before Connect.
        hostnqn: &'a str,
        /// The controller; `None` before Connect.
        cntlid: Option<u16>,
        /// The queue.
        qid: u16,
        /// Why.
        why: &'a str,
    },
    /// A volume has a new owner.
    Claimed {
        /// The owner.
        hostnqn: &'a str,
        /// Its controller.
        cntlid: u16,
        /// The volume and its generation.
        what: &'a String,
    },
    /// A claim, bind, mark or release was refused, or a stream was poisoned.
    Trouble {
        /// The host.
        hostnqn: &'a str,
        /// Its controller.
        cntlid: u16,
        /// The queue.
        qid: u16,
        /// What happened.
        why: &'a str,
    },
}

//! The environment of a connection: devices, time, the shared state of all connections, messages.

use alloc::string::String;

use riopipe_nvme::command::Status;
use riopipe_order::block_device::{self, BlockDevice, IoError};
use riopipe_order::gate::Cause;
use riopipe_order::region::Region;

use super::ids::ConnId;
use super::shared::Shared;
use crate::stages::Spent;

/// The status of a command whose device operation failed.
#[must_use]
#[cold]
pub fn status_of(error: &IoError, is_read: bool) -> Status {
    match error.cause() {
        block_device::Cause::OutOfRange { .. } => Status::LBA_OUT_OF_RANGE.with_dnr(),
        block_device::Cause::NoSpace(_) => Status::CAPACITY_EXCEEDED.with_dnr(),
        block_device::Cause::Vanished(_) => Status::INTERNAL.with_dnr(),
        block_device::Cause::PowerLost => Status::POWER_LOSS,
        block_device::Cause::BadLength { .. }
        | block_device::Cause::QueueFull { .. }
        | block_device::Cause::Failed(_) => match is_read {
            true => Status::UNRECOVERED_READ,
            false => Status::WRITE_FAULT,
        },
    }
}

/// The environment of a [`TargetConn`](super::TargetConn): drives, a clock, the state that all
/// connections share, messages for the operator. The same code runs over real drives and clocks,
/// and in a simulator.
///
/// `ns_index` counts the namespaces as [`Shared::namespaces`] lists them.
pub trait TargetEnv {
    /// A device buffer. A read returns one, and an R2T transfer is gathered in one.
    type Buf: AsRef<[u8]> + AsMut<[u8]>;
    /// A drive.
    type Device: BlockDevice<Buf = Self::Buf>;
    /// The region of ordering-log partitions.
    type Region: Region;

    /// The time in nanoseconds, from any origin; it never decreases.
    fn now(&self) -> u64;
    /// A buffer of exactly `len` bytes with any contents; `None` if there is no memory.
    fn alloc(&mut self, len: usize) -> Option<Self::Buf>;
    /// The drive of a namespace. Operations are named by [`OpId`](super::OpId), as numbers. The
    /// result of one that ends later is handed to
    /// [`TargetConn::device_done`](super::TargetConn::device_done).
    fn device(&mut self, ns_index: usize) -> &mut Self::Device;
    /// The shared state of all connections, locked: never on the hot path.
    fn with_shared<T>(&mut self, f: impl FnOnce(&mut Shared<Self::Region>) -> T) -> T;
    /// Causes a call of [`TargetConn::noticed`](super::TargetConn::noticed) for `conn`, on the core
    /// that has it: every core is sent a [`Message::Notice`](super::Message::Notice). The
    /// connection may have ended by then.
    fn notify(&mut self, conn: ConnId);
    /// Reports an event to the operator.
    fn log(&mut self, event: Event<'_>);
    /// The time as [`now`](Self::now) returns it, but read at this moment. Only traced writes ask
    /// for it.
    fn instant(&self) -> u64 {
        self.now()
    }
    /// Checks whether the ordering log's store still exists. Once it is gone, every fence fails. A
    /// [`TargetCore`](super::TargetCore) asks for this ten times a second while there is work,
    /// before it takes any input.
    fn watch_log(&mut self) {}
    /// Reports the number of ordered requests in one batch.
    fn ordered(&mut self, _requests: u64) {}
    /// Reports that a traced write has been answered, with its time in each stage.
    fn traced(&mut self, _spent: &Spent) {}
    /// Reports that an ordered stream has failed (P6).
    fn stopped(&mut self, _why: Cause) {}
}

/// An event that is reported to the operator.
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
        /// The queue id; 0 for the admin queue.
        qid: u16,
    },
    /// A Fabrics Connect was refused.
    Refused {
        /// The host that asked.
        hostnqn: &'a str,
        /// The subsystem that it asked for.
        subnqn: &'a str,
        /// The queue id that it asked for.
        qid: u16,
        /// The reason.
        why: &'a str,
        /// The status of the answer.
        status: Status,
    },
    /// A connection ends.
    Closed {
        /// The host; empty before Connect.
        hostnqn: &'a str,
        /// The controller; `None` before Connect.
        cntlid: Option<u16>,
        /// The queue id.
        qid: u16,
        /// The reason.
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
    /// All places for connections are taken. No more are accepted until one is free (T28).
    Full {
        /// How many connections are open.
        connections: usize,
    },
    /// A claim, bind, mark or release was refused, or a stream was poisoned.
    Trouble {
        /// The host.
        hostnqn: &'a str,
        /// Its controller.
        cntlid: u16,
        /// The queue id.
        qid: u16,
        /// The problem.
        why: &'a str,
    },
}

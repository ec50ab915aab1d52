//! The environment of a connection: devices, time, the shared state of all connections, messages.

use alloc::string::String;

use riopipe_nvme::command::Status;
use riopipe_order::block_device::{self, BlockDevice, IoError};
use riopipe_order::gate::Cause;
use riopipe_order::region::Region;

use super::ids::ConnId;
use super::shared::Shared;
use crate::auth::dh::DhJob;
use crate::stages::Spent;
use crate::wire;

/// The status of a command whose device operation failed.
#[must_use]
#[cold]
pub fn status_of(error: &IoError, is_read: bool) -> Status {
    match error.cause() {
        block_device::Cause::OutOfRange { .. } => Status::LBA_OUT_OF_RANGE.with_dnr(),
        block_device::Cause::NoSpace(_) => Status::CAPACITY_EXCEEDED.with_dnr(),
        block_device::Cause::Vanished(_) => wire::status::DRIVE_GONE.with_dnr(),
        block_device::Cause::PowerLost => Status::POWER_LOSS,
        block_device::Cause::BadLength { .. }
        | block_device::Cause::QueueFull { .. }
        // The target checks what a drive keeps, so a host does not cause the first three.
        | block_device::Cause::OrderNotKept
        | block_device::Cause::BadStream
        | block_device::Cause::StreamsFull { .. }
        | block_device::Cause::EpochEnded(_)
        | block_device::Cause::StreamFailed { .. }
        | block_device::Cause::StreamRestarted { .. }
        | block_device::Cause::Failed(_) => match is_read {
            true => Status::UNRECOVERED_READ,
            false => Status::WRITE_FAULT,
        },
    }
}

/// The environment of a [`TargetConn`](super::TargetConn): the drives, a clock, the state that all
/// connections share, and reports to the operator. Real drives and clocks have one implementation,
/// the simulator has another.
///
/// `ns_index` is the index of a namespace in [`Shared::namespaces`].
pub trait TargetEnv {
    /// A buffer for the data of one command: of a read, or of an R2T transfer.
    type Buf: AsRef<[u8]> + AsMut<[u8]>;
    /// A drive.
    type Device: BlockDevice<Buf = Self::Buf>;
    /// The region with the partitions of the ordering log.
    type Region: Region;

    /// The time of the current round, in nanoseconds from any origin. It never decreases.
    fn now(&self) -> u64;
    /// Allocates a buffer of exactly `len` bytes with any content; `None` if there is no memory.
    fn alloc(&mut self, len: usize) -> Option<Self::Buf>;
    /// The drive of a namespace. The number of an operation is its [`OpId`](super::OpId). The
    /// result of an operation that ends later must be passed to
    /// [`TargetConn::device_done`](super::TargetConn::device_done).
    fn device(&mut self, ns_index: usize) -> &mut Self::Device;
    /// Locks the shared state of all connections, and calls `f` with it. The hot path never calls
    /// this.
    fn with_shared<T>(&mut self, f: impl FnOnce(&mut Shared<Self::Region>) -> T) -> T;
    /// Wakes `conn`: sends a [`Message::Notice`](super::Message::Notice) to every core, so that the
    /// core that has the connection calls [`TargetConn::noticed`](super::TargetConn::noticed). The
    /// connection may have ended by then.
    fn notify(&mut self, conn: ConnId);
    /// Reports an event to the operator.
    fn log(&mut self, event: Event<'_>);
    /// Carries out an exponentiation for a connection: leaves its result in the shared state
    /// ([`Shared::leave_dh_done`]), and wakes the connection. This function carries it out at once, which
    /// takes up to tens of milliseconds. An environment whose connections must not wait so long carries it
    /// out on another thread.
    fn exponentiate(&mut self, conn: ConnId, job: DhJob) {
        let done = job.run();
        self.with_shared(|shared| shared.leave_dh_done(conn, done));
        self.notify(conn);
    }
    /// The time at this moment, from the same origin as [`now`](Self::now). It is read only for
    /// traced writes.
    fn instant(&self) -> u64 {
        self.now()
    }
    /// Checks whether the store of the ordering log still exists. When the store is gone, every
    /// later fence of the log must fail. A [`TargetCore`](super::TargetCore) calls this ten times a
    /// second while there is work, before it takes any input.
    fn watch_log(&mut self) {}
    /// Reports the number of ordered requests in one batch.
    fn ordered(&mut self, _requests: u64) {}
    /// Reports that a traced write has been answered, with its time in each stage.
    fn traced(&mut self, _spent: &Spent) {}
    /// Reports that an ordered stream has failed (promise P6).
    fn stopped(&mut self, _why: Cause) {}
}

/// An event that is reported to the operator.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Event<'a> {
    /// A queue has been connected.
    Connected {
        /// The host's address, as [`Transport::peer`](super::Transport::peer) returns it.
        peer: &'a str,
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
        /// The host's address.
        peer: &'a str,
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
        /// The host's address.
        peer: &'a str,
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
        /// The owner's address.
        peer: &'a str,
        /// The owner.
        hostnqn: &'a str,
        /// Its controller.
        cntlid: u16,
        /// The volume and its generation.
        what: &'a String,
    },
    /// All places for connections are taken. No more are accepted until one is free (trap T28).
    Full {
        /// How many connections are open.
        connections: usize,
    },
    /// A host has not authenticated: its secret is wrong, or it has broken the protocol of
    /// authentication.
    AuthenticationFailed {
        /// The host's address.
        peer: &'a str,
        /// The name that the host gave.
        hostnqn: &'a str,
        /// The queue id.
        qid: u16,
        /// The reason. It has no secrets.
        why: &'a str,
    },
    /// A connection that was not admitted has given way to another one, because there were too many of
    /// them (trap T28).
    Displaced {
        /// The host's address.
        peer: &'a str,
    },
    /// A connection was not admitted within the time for that.
    NotAdmitted {
        /// The host's address.
        peer: &'a str,
        /// The step that the host has not taken.
        why: &'a str,
    },
    /// A PDU of a host had a wrong digest. Its bytes were changed on the way, or the host computes
    /// digests wrongly.
    DigestError {
        /// The host's address.
        peer: &'a str,
        /// The host; empty before Connect.
        hostnqn: &'a str,
        /// The controller; `None` before Connect.
        cntlid: Option<u16>,
        /// The queue id.
        qid: u16,
        /// The digest that was wrong.
        digest: WrongDigest,
    },
    /// A claim, bind, mark or release was refused, or a stream was poisoned.
    Trouble {
        /// The host's address.
        peer: &'a str,
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

/// The digest of a PDU that was wrong.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum WrongDigest {
    /// That of the header. The command is not known, and the connection ends.
    Header,
    /// That of the data of a command. The command fails.
    Data {
        /// The id of the command.
        cid: u16,
        /// Its opcode; `None` if no command with this id waits for data.
        opcode: Option<u8>,
    },
}

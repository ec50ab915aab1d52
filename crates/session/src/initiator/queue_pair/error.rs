//! Why commands can't be submitted, and why connections end.

use alloc::string::String;

use riopipe_nvme::command::Status;
use riopipe_nvme::pdu::{Fes, PduError};

use crate::wire::retry;

/// Why a command could not be submitted. No part of it was sent.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum SubmitError {
    /// The queue's limit of commands in flight is reached.
    #[error("the queue is full")]
    Full,
    /// The connection is not set up yet, or has ended.
    #[error("the connection is not ready")]
    NotReady,
    /// A length that is not a multiple of 4, which data outside the capsule must have (TCP
    /// §3.6.2.8 to §3.6.2.10).
    #[error("{len} bytes of data are not a multiple of 4, as NVMe/TCP wants outside capsules")]
    Misaligned {
        /// The length of the data, bytes.
        len: u64,
    },
    /// [`Data::Bytes`](super::Data::Bytes) longer than a capsule takes, or a read beyond
    /// [`QpConfig::data_max`](super::QpConfig::data_max).
    #[error("{len} bytes of data are more than the {max} that may go with this command")]
    TooLong {
        /// The length of the data, bytes.
        len: u64,
        /// The limit, bytes.
        max: u32,
    },
}

/// Why a connection ended.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum SessionError {
    /// The target broke the protocol; the termination request that reports it is in the outbox.
    #[error("the target broke the protocol: {0}")]
    Protocol(#[from] PduError),
    /// The target ended the connection.
    #[error("the target ended the connection: {} (FES {fes:#x}, FEI {fei:#x})", fes_name(*.fes))]
    Terminated {
        /// Its Fatal Error Status.
        fes: u16,
        /// Its Fatal Error Information.
        fei: u32,
    },
    /// The target refused to create the queue.
    #[error("the target refused queue {qid} of {subnqn}: {status}{}", connect_detail(*.status, *.result))]
    Refused {
        /// The queue.
        qid: u16,
        /// The subsystem.
        subnqn: String,
        /// The status of the refusal.
        status: Status,
        /// The completion's result; names the field after *invalid parameters*.
        result: u64,
    },
    /// The target requires in-band authentication, which is not supported.
    #[error("{subnqn} wants the host to authenticate, which is not supported")]
    Authentication {
        /// The subsystem.
        subnqn: String,
    },
    /// Digests were requested and not granted.
    #[error("the target does not do the {0} digests that were asked for")]
    NoDigests(&'static str),
    /// The target has given up the queue, and reports that for a command on it (Base, figure
    /// "Generic Command Status Values", 08h): its association has ended. The commands in flight may
    /// be sent again on another connection.
    #[error("the target has given up the queue: its association has ended")]
    QueueDeleted,
    /// The connection has ended before.
    #[error("the connection has ended")]
    Closed,
}

impl SessionError {
    /// Whether the refusal passes by itself: the target has not seen the end of the queue's last
    /// connection yet.
    #[must_use]
    pub fn is_passing(&self) -> bool {
        let Self::Refused { status, .. } = self else { return false };
        retry::is_connect_passing(*status)
    }
}

fn fes_name(code: u16) -> &'static str {
    Fes::from_code(code).map_or("unknown reason", Fes::name)
}

/// Names the field for which a Connect was refused.
struct ConnectDetail(Option<(bool, u16)>);

fn connect_detail(status: Status, result: u64) -> ConnectDetail {
    ConnectDetail(
        status.is(Status::CONNECT_INVALID).then_some((result & 1 << 16 != 0, result as u16)),
    )
}

impl core::fmt::Display for ConnectDetail {
    fn fmt(&self, f: &mut core::fmt::Formatter<'_>) -> core::fmt::Result {
        match self.0 {
            None => Ok(()),
            Some((true, 16)) => f.write_str(": the controller id"),
            Some((true, 256)) => f.write_str(": no such subsystem"),
            Some((true, 512)) => f.write_str(": the host NQN"),
            Some((true, at)) => write!(f, ": byte {at} of the connect data"),
            Some((false, 42)) => f.write_str(": the queue id"),
            Some((false, 44)) => f.write_str(": the queue size"),
            Some((false, at)) => write!(f, ": byte {at} of the connect command"),
        }
    }
}

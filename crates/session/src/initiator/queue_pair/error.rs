//! Why commands can't be submitted, and why connections end.

use alloc::string::String;

use riopipe_nvme::command::Status;
use riopipe_nvme::pdu::{Fes, PduError};

use crate::auth::host::HostAuthError;
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
    /// The length of the data is not a multiple of 4. Data outside of the capsule must have such a
    /// length (TCP §3.6.2.8 to §3.6.2.10).
    #[error("{len} bytes of data are not a multiple of 4, as NVMe/TCP wants outside capsules")]
    Misaligned {
        /// The length of the data, bytes.
        len: u64,
    },
    /// [`Data::Bytes`](super::Data::Bytes) is longer than a capsule takes, or a read is longer than
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
    /// The target does not admit this host.
    #[error(
        "the target does not admit host {hostnqn} to {subnqn}: it is not on the target's list of \
         allowed hosts"
    )]
    HostNotAllowed {
        /// The NQN of this host.
        hostnqn: String,
        /// The subsystem.
        subnqn: String,
    },
    /// The target requires in-band authentication, and this host has no secret.
    #[error("{subnqn} wants host {hostnqn} to authenticate, and no secret is given for it")]
    Authentication {
        /// The NQN of this host.
        hostnqn: String,
        /// The subsystem.
        subnqn: String,
    },
    /// The authentication failed.
    #[error("this host and {subnqn} did not authenticate: {why}")]
    NotAuthenticated {
        /// The subsystem.
        subnqn: String,
        /// The reason.
        why: HostAuthError,
    },
    /// The target does not ask for authentication, and this host has a secret of the target that it must
    /// prove.
    #[error(
        "{subnqn} was to prove its identity, and asks for no authentication: it is another target, or \
         has no secret of this host"
    )]
    NoProof {
        /// The subsystem.
        subnqn: String,
    },
    /// The target requires a secure channel, which is not supported.
    #[error("{subnqn} wants a secure channel (TLS), which is not supported")]
    SecureChannel {
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
    /// Whether a later attempt to connect may succeed, because the target has refused this one only
    /// until it has seen the end of the queue's last connection.
    #[must_use]
    pub fn is_passing(&self) -> bool {
        let Self::Refused { status, .. } = self else { return false };
        retry::is_connect_passing(*status)
    }
}

fn fes_name(code: u16) -> &'static str {
    Fes::from_code(code).map_or("unknown reason", Fes::name)
}

/// The part of a Connect in which a field was not valid.
#[derive(Clone, Copy)]
enum ConnectPart {
    Command,
    Data,
}

/// The place of the field for which a Connect was refused.
#[derive(Clone, Copy)]
struct InvalidParameter {
    part: ConnectPart,
    /// The offset of the field in this part, in bytes.
    offset: u16,
}

/// The text that names the field for which a Connect was refused; empty if the status is another.
struct ConnectDetail(Option<InvalidParameter>);

/// Decodes the result of a refused Connect:
///
/// ```text
/// bits 15:0   IPO    offset of the field that is not valid, in bytes
/// bit  16     IATTR  1: the field is in the data of Connect, 0: in the command
/// ```
fn connect_detail(status: Status, result: u64) -> ConnectDetail {
    const IATTR: u64 = 1 << 16;
    if !status.is(Status::CONNECT_INVALID) {
        return ConnectDetail(None);
    }
    let part = if result & IATTR != 0 { ConnectPart::Data } else { ConnectPart::Command };
    ConnectDetail(Some(InvalidParameter { part, offset: result as u16 }))
}

impl core::fmt::Display for ConnectDetail {
    fn fmt(&self, f: &mut core::fmt::Formatter<'_>) -> core::fmt::Result {
        let Some(InvalidParameter { part, offset }) = self.0 else { return Ok(()) };
        match (part, offset) {
            (ConnectPart::Data, 16) => f.write_str(": the controller id"),
            (ConnectPart::Data, 256) => f.write_str(": no such subsystem"),
            (ConnectPart::Data, 512) => f.write_str(": the host NQN"),
            (ConnectPart::Data, _) => write!(f, ": byte {offset} of the connect data"),
            (ConnectPart::Command, 42) => f.write_str(": the queue id"),
            (ConnectPart::Command, 44) => f.write_str(": the queue size"),
            (ConnectPart::Command, _) => write!(f, ": byte {offset} of the connect command"),
        }
    }
}

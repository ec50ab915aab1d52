//! The reasons for which a connection ends.

use riopipe_nvme::pdu::{PduError, TermReq};

/// Why a connection ends. The last bytes for the host, if there are any, are in the outbox already.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum Closed {
    /// The host broke the protocol. A termination request informs it (trap T18).
    #[error("the host broke the protocol: {0}")]
    Protocol(#[from] PduError),
    /// The host sent a termination request.
    #[error("the host ended the connection (fatal error status {}, information {:#x})", .0.fes, .0.fei)]
    ByHost(TermReq),
    /// A time limit has passed (trap T18).
    #[error("{0}")]
    Stalled(&'static str),
    /// The association has ended, or the target stops.
    #[error("{0}")]
    Ended(&'static str),
}

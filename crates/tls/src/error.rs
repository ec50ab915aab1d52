//! The reasons why there is no TLS session.

use std::io;

/// Why a handshake failed, or a session ended. No message has a key.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum TlsError {
    /// The peer of a host does not speak TLS.
    #[error(
        "the target does not speak TLS on this port: check the port, or leave out the key of TLS"
    )]
    PlainTarget,
    /// A host does not speak TLS on a port that demands it.
    #[error("the host speaks NVMe/TCP without TLS, and this port demands TLS")]
    PlainHost,
    /// The target does not know the identity of the key.
    #[error(
        "the target knows no key of this host for this subsystem: give the target the same key for this host NQN"
    )]
    UnknownKey,
    /// The target has another key for the same identity.
    #[error("the target has another key of TLS for this host: compare the two")]
    WrongKey,
    /// The target refuses without a reason: it lacks the key, or has another one.
    #[error(
        "the target refuses the key of TLS: it has none for this host and subsystem, or another one"
    )]
    Refused,
    /// The host offers no key that the target has. The field is the text for the operator.
    #[error("no key of TLS is known for {0}")]
    UnknownIdentity(String),
    /// The host offers a known identity, and does not have the key.
    #[error(
        "the host does not have the key of TLS for the identity {0:?}, or does not prove it by the key's hash function"
    )]
    WrongBinder(String),
    /// The handshake has not used a pre-shared key.
    #[error("the peer wants another handshake than one with a pre-shared key")]
    NoPsk,
    /// The peer has ended the handshake or the session with an alert of TLS (RFC 8446 §6).
    #[error("the peer ended TLS with alert {0}")]
    Alert(u8),
    /// The peer has closed the connection during the handshake.
    #[error("the peer closed the connection during the handshake of TLS")]
    Closed,
    /// The handshake has taken too long.
    #[error("the handshake of TLS was not finished in time")]
    TimedOut,
    /// The peer has broken the protocol, or a record was changed on the way.
    #[error("a message of TLS is not valid, or was changed on the way ({0})")]
    Protocol(String),
    /// The connection has failed.
    #[error("the connection failed: {0}")]
    Io(io::Error),
    /// The library of TLS has failed.
    #[error("TLS failed in this process: {0}")]
    Library(String),
}

impl TlsError {
    /// Whether the target may have refused the first of the identities that it was offered, and may take
    /// another one. A target that names the reason has read all of them.
    #[must_use]
    pub const fn may_accept_another_identity(&self) -> bool {
        matches!(self, Self::Refused | Self::Closed | Self::Alert(_) | Self::Io(_))
    }
}

impl From<s2n_tls::error::Error> for TlsError {
    /// The error of a call outside of a handshake.
    fn from(error: s2n_tls::error::Error) -> Self {
        use s2n_tls::error::ErrorType;
        match error.kind() {
            ErrorType::IOError => Self::Io(io::Error::last_os_error()),
            ErrorType::ConnectionClosed => Self::Closed,
            ErrorType::ProtocolError => Self::Protocol(error.message().to_owned()),
            _ => Self::Library(error.message().to_owned()),
        }
    }
}

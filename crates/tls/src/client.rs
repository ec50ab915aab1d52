//! The side of an initiator.

use std::time::Duration;

use riopipe_net::{Interest, Socket, now_ns, wait_readable, wait_writable};
use riopipe_session::auth::tls::TlsKey;
use s2n_tls::enums::Mode;
use std::os::fd::AsFd;

use crate::error::TlsError;
use crate::link::Link;
use crate::relay::Relay;
use crate::stream::{DECRYPT_ERROR, Step, TlsStream, UNKNOWN_PSK_IDENTITY};
use crate::stream_config::{config_builder, psk_of};

/// The alert of a peer that gives no other reason: *handshake_failure* (RFC 8446 §6.2).
const HANDSHAKE_FAILURE: u8 = 40;
/// *illegal_parameter*, by which some libraries refuse a key.
const ILLEGAL_PARAMETER: u8 = 47;

/// Sets up TLS on a connection that was just made, and returns the socket that takes its place. Waits for
/// `timeout` at most. `keys` are those between this host and the subsystem, the preferred one first; the
/// target takes one that it has.
///
/// # Errors
/// [`TlsError`]. The connection is closed.
pub fn connect(
    relay: &Relay,
    socket: Socket,
    keys: &[TlsKey],
    timeout: Duration,
) -> Result<Socket, TlsError> {
    let deadline = now_ns().saturating_add(timeout.as_nanos().try_into().unwrap_or(u64::MAX));
    let (peer, local) = (socket.peer(), socket.local_addr().map_err(TlsError::Io)?);
    let mut tls = TlsStream::new(Mode::Client, config_builder()?.build()?, socket.into_std())?;
    for key in keys {
        tls.connection().append_psk(&psk_of(key)?)?;
    }
    while tls.handshake().map_err(|error| reason(&tls, error))? == Step::Blocked {
        let left = Duration::from_nanos(deadline.saturating_sub(now_ns()));
        if left.is_zero() {
            return Err(TlsError::TimedOut);
        }
        match tls.awaited() {
            Interest::Write => wait_writable(tls.as_fd(), left),
            _ => wait_readable(tls.as_fd(), left),
        }
        .map_err(TlsError::Io)?;
    }
    let (socket, _) =
        relay.add(peer, local, |inner, end| Link::open(tls, inner, end)).map_err(TlsError::Io)?;
    Ok(socket)
}

/// The reason of a failed handshake.
fn reason(tls: &TlsStream, error: TlsError) -> TlsError {
    match error {
        TlsError::Alert(UNKNOWN_PSK_IDENTITY) => TlsError::UnknownKey,
        TlsError::Alert(DECRYPT_ERROR) => TlsError::WrongKey,
        TlsError::Alert(HANDSHAKE_FAILURE | ILLEGAL_PARAMETER) => TlsError::Refused,
        TlsError::Protocol(_) | TlsError::Closed if tls.is_peer_plain() => TlsError::PlainTarget,
        error => error,
    }
}

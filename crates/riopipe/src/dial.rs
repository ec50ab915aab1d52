//! Making connections to targets, with TLS or without.

use std::fmt;
use std::sync::OnceLock;
use std::time::Duration;

use riopipe_net::{ConnectError, Socket, SocketOptions, now_ns};
use riopipe_nvme::tls_psk::TlsPsk;
use riopipe_session::auth::tls;
use riopipe_tls::{Relay, TlsError};

use crate::identity::ConnectOptions;

/// The relay of all connections with TLS. It starts with the first of them, and ends with the process.
static RELAY: OnceLock<Relay> = OnceLock::new();

/// The way in which connections to targets are made.
#[derive(Clone, PartialEq, Eq)]
pub(crate) struct Dialer {
    /// The key of this host, if it uses TLS.
    tls: Option<TlsPsk>,
    host_nqn: String,
    /// The time limit for a connection.
    pub(crate) timeout: Duration,
}

impl Dialer {
    pub(crate) fn new(options: &ConnectOptions) -> Self {
        Self {
            tls: options.tls.clone(),
            host_nqn: options.host_nqn.clone(),
            timeout: options.timeout,
        }
    }

    /// As this one, with another time limit if that is shorter.
    pub(crate) fn within(&self, timeout: Duration) -> Self {
        Self { timeout: self.timeout.min(timeout), ..self.clone() }
    }

    /// Connects to `address` (`host:port`), for subsystem `subnqn`.
    ///
    /// # Errors
    /// [`ConnectError`]; of TLS, [`ConnectError::Relay`].
    pub(crate) fn dial(&self, address: &str, subnqn: &str) -> Result<Socket, ConnectError> {
        let start = now_ns();
        let left = || self.timeout.saturating_sub(Duration::from_nanos(now_ns() - start));
        let connect = || riopipe_net::connect(address, left(), &SocketOptions::default());
        let socket = connect()?;
        let Some(psk) = &self.tls else { return Ok(socket) };
        let peer = socket.peer();
        let failed = |error: &TlsError| ConnectError::Relay {
            peer,
            may_pass: matches!(
                error,
                TlsError::Closed | TlsError::TimedOut | TlsError::Io(_) | TlsError::Protocol(_)
            ),
            reason: error.to_string(),
        };
        let relay = relay().map_err(|error| failed(&error))?;
        let keys = tls::keys(psk, &self.host_nqn, subnqn);
        let first = match riopipe_tls::connect(relay, socket, &keys, left()) {
            Ok(socket) => return Ok(socket),
            Err(error) => error,
        };
        // GnuTLS, and so Linux's target, takes the first identity or none.
        if first.may_accept_another_identity() {
            for key in keys.chunks(1) {
                if let Ok(socket) = riopipe_tls::connect(relay, connect()?, key, left()) {
                    return Ok(socket);
                }
            }
        }
        Err(failed(&first))
    }
}

impl fmt::Debug for Dialer {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Dialer").field("has_tls", &self.tls.is_some()).finish_non_exhaustive()
    }
}

fn relay() -> Result<&'static Relay, TlsError> {
    if let Some(relay) = RELAY.get() {
        return Ok(relay);
    }
    // Of several threads that come here at once, one keeps its relay.
    let relay = Relay::start().map_err(TlsError::Io)?;
    Ok(RELAY.get_or_init(|| relay))
}

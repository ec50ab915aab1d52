//! The side of a target: the keys of its hosts, and whether a port demands TLS.

use std::net::TcpStream;
use std::sync::{Arc, OnceLock, PoisonError, RwLock};

use riopipe_net::Socket;
use riopipe_session::auth::tls::{Demand, IDENTITY_BYTES_MAX, KeyOwner, KeyRing};
use s2n_tls::callbacks::{ClientHelloCallback, ConnectionFuture};
use s2n_tls::config::Config;
use s2n_tls::connection::Connection;
use s2n_tls::enums::Mode;
use s2n_tls::error::Error;

use crate::client_hello;
use crate::error::TlsError;
use crate::link::{Link, LinkEnd};
use crate::relay::Relay;
use crate::stream::{DECRYPT_ERROR, Step, TlsStream, UNKNOWN_PSK_IDENTITY};
use crate::stream_config::{config_builder, psk_of};

/// The keys of a target's hosts, and the library's configuration. All ports of a target share one.
#[derive(Debug)]
pub struct Door {
    keys: Arc<Keys>,
    config: Config,
}

#[derive(Debug)]
struct Keys(RwLock<Arc<KeyRing>>);

impl Keys {
    fn ring(&self) -> Arc<KeyRing> {
        // A thread that panicked while it had the lock has replaced the ring or not. Both are valid.
        Arc::clone(&self.0.read().unwrap_or_else(PoisonError::into_inner))
    }
}

/// The identities that a ClientHello offers.
#[derive(Debug, Default)]
struct Offer {
    /// The identities for which this target has a key, and whose they are.
    known: Vec<(String, KeyOwner)>,
    /// The identities for which it has none.
    unknown: Vec<String>,
}

impl Door {
    /// A door for hosts with these keys.
    ///
    /// # Errors
    /// [`TlsError::Library`].
    pub fn new(ring: KeyRing) -> Result<Self, TlsError> {
        let keys = Arc::new(Keys(RwLock::new(Arc::new(ring))));
        let mut builder = config_builder()?;
        builder.set_client_hello_callback(Chooser(Arc::clone(&keys)))?;
        Ok(Self { config: builder.build()?, keys })
    }

    /// Replaces the keys. Connections that exist keep theirs.
    pub fn set_keys(&self, ring: KeyRing) {
        *self.keys.0.write().unwrap_or_else(PoisonError::into_inner) = Arc::new(ring);
    }

    /// Takes a connection that was just accepted, and returns the socket that takes its place. The handshake
    /// begins when the host's first bytes arrive; the socket delivers nothing before it is done. To drop the
    /// socket ends the handshake, so a limit on the socket's connection is one on the handshake.
    ///
    /// [`LinkEnd::admitted`] of the result has the host, as soon as the socket delivers bytes that came by
    /// TLS.
    ///
    /// # Errors
    /// No descriptors are left, or the connection has ended.
    pub fn accept(
        self: &Arc<Self>,
        relay: &Relay,
        socket: Socket,
        demand: Demand,
    ) -> std::io::Result<(Socket, Arc<LinkEnd>)> {
        let (peer, local) = (socket.peer(), socket.local_addr()?);
        relay.add(peer, local, |inner, end| {
            Link::waiting(socket.into_std(), Arc::clone(self), demand, inner, end)
        })
    }

    /// The session of a connection whose first byte is one of TLS.
    pub(crate) fn session(&self, stream: TcpStream) -> Result<TlsStream, TlsError> {
        let mut tls = TlsStream::new(Mode::Server, self.config.clone(), stream)?;
        tls.connection().set_application_context(OnceLock::<Offer>::new());
        Ok(tls)
    }

    /// Goes on with a handshake. At its end, returns the host.
    pub(crate) fn handshake(tls: &mut TlsStream) -> Result<Step<KeyOwner>, TlsError> {
        match tls.handshake() {
            Ok(Step::Blocked) => Ok(Step::Blocked),
            Ok(Step::Done(())) => {
                let identity = tls.identity()?;
                let offer = offer_of(tls.connection());
                let known = offer.into_iter().flat_map(|offer| &offer.known);
                let mut of_key = known.filter(|(name, _)| name.as_bytes() == identity);
                let admitted = of_key.next().map(|(_, admitted)| admitted.clone());
                admitted.map(Step::Done).ok_or(TlsError::NoPsk)
            }
            Err(error) => Err(Self::refuse(tls, error)),
        }
    }

    /// Finds the reason of a failed handshake, and sends it to the peer.
    fn refuse(tls: &mut TlsStream, error: TlsError) -> TlsError {
        if !matches!(error, TlsError::Protocol(_) | TlsError::Library(_)) {
            return error;
        }
        let Some(offer) = offer_of(tls.connection()) else { return error };
        // A proof of another length than the key's hash function has is an error of the library's own.
        if matches!(error, TlsError::Library(_)) && offer.known.is_empty() {
            return error;
        }
        let (code, error) = match (offer.known.first(), offer.unknown.len()) {
            (None, 0) => return TlsError::NoPsk,
            (None, _) => {
                let names: Vec<String> =
                    offer.unknown.iter().map(|name| format!("{name:?}")).collect();
                (UNKNOWN_PSK_IDENTITY, TlsError::UnknownIdentity(names.join(", ")))
            }
            // The library names no more. After the ClientHello it has an error of its own kind only for the
            // binder, the proof of the key; the other parts were valid when the offer was read.
            (Some((identity, _)), _) => (DECRYPT_ERROR, TlsError::WrongBinder(identity.clone())),
        };
        tls.alert(code);
        error
    }
}

fn offer_of(connection: &Connection) -> Option<&Offer> {
    connection.application_context::<OnceLock<Offer>>().and_then(OnceLock::get)
}

/// Gives the library the keys that a ClientHello asks for, and no others. So a handshake costs the same
/// however many hosts there are.
struct Chooser(Arc<Keys>);

impl ClientHelloCallback for Chooser {
    fn on_client_hello(
        &self,
        connection: &mut Connection,
    ) -> Result<Option<std::pin::Pin<Box<dyn ConnectionFuture>>>, Error> {
        if offer_of(connection).is_some() {
            // A second ClientHello, after a HelloRetryRequest, offers the same.
            return Ok(None);
        }
        let message = connection.client_hello()?.raw_message()?;
        let ring = self.0.ring();
        let mut offer = Offer::default();
        for identity in client_hello::identities(&message) {
            let key = str::from_utf8(identity).ok().and_then(|identity| ring.find(identity));
            let Some(key) = key else {
                let shown = &identity[..identity.len().min(IDENTITY_BYTES_MAX)];
                offer.unknown.push(String::from_utf8_lossy(shown).into_owned());
                continue;
            };
            let identity = key.key.identity.clone();
            if offer.known.iter().all(|(known, _)| *known != identity) {
                connection.append_psk(&psk_of(&key.key)?)?;
                offer.known.push((identity, key.owner.clone()));
            }
        }
        if let Some(slot) = connection.application_context::<OnceLock<Offer>>() {
            // It is empty, as seen above.
            let _ = slot.set(offer);
        }
        Ok(None)
    }
}

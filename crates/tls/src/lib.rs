//! NVMe/TCP over TLS 1.3 with pre-shared keys (TCP §3.6.1; TP 8011, TP 8018), for both ends.
//!
//! s2n-tls does the handshake and the records. A [`Relay`] is a thread between the network and the sockets of
//! the program: it decrypts what comes from the network and writes it into a Unix socket, and the reverse.
//! So the rest of the program has a [`Socket`](riopipe_net::Socket) as without TLS, with the same limits and
//! time limits, and TLS works with any kernel. The price is one more copy, and the time of two wake-ups.
//!
//! - A target gives each accepted connection to its [`Door`], which knows the keys of the hosts.
//! - An initiator makes its connections with [`connect`].
//!
//! The keys come from [`riopipe_session::auth::tls`]. They are in no error, no log line and no formatting.

mod client;
mod client_hello;
mod door;
mod error;
mod link;
mod relay;
mod stream;
mod stream_config;

pub use client::connect;
pub use door::Door;
pub use error::TlsError;
pub use link::LinkEnd;
pub use relay::Relay;

//! In-band authentication with DH-HMAC-CHAP (Base §8.3.5.5; TP 8006), both sides, as pure state machines; and
//! the keys of TLS.
//!
//! - [`controller`]: the side of the target;
//! - [`host`]: the side of the initiator;
//! - [`dh`]: the Diffie-Hellman groups. An exponentiation takes milliseconds, so the target's side hands
//!   it out as a [`dh::DhJob`], and its shell decides where it runs;
//! - [`response`]: the responses to challenges, which both sides compute;
//! - [`tls`]: the keys of TLS and their identities, which both sides derive from a configured key.
//!
//! Random bytes are an argument. Secrets, private exponents and session keys are cleared when they are
//! dropped, and no formatting shows them.

pub mod controller;
pub mod dh;
pub mod host;
mod keyed;
pub mod response;
pub mod tls;

/// Fills a buffer with random bytes that no peer can guess.
pub type Random = fn(&mut [u8]);

//! NVMe and NVMe/TCP as bytes: PDUs, commands, identify structures, fabrics, discovery, log pages,
//! features, digests.
//!
//! Every type is encoded to bytes and decoded from bytes. The crate has no socket, no clock and no
//! state between calls. The order of messages that the protocol allows is checked by the `session`
//! crate.
//!
//! Decoders accept nothing unchecked (trap T18): they check each length, offset, flag and type that
//! they read. A wrong PDU is answered with the Fatal Error Status and Fatal Error Information that
//! the specification gives for it ([`pdu::PduError`]).
//!
//! Comments cite the specifications by these short names:
//!
//! - *Base*: NVM Express Base Specification, revision 2.0;
//! - *NVM*: NVM Command Set Specification, revision 1.0;
//! - *TCP*: NVM Express TCP Transport Specification, revision 1.0.
//!
//! All integers on the wire are little endian.

#![no_std]
#![forbid(unsafe_code)]

extern crate alloc;

#[cfg(test)]
extern crate std;

pub mod ana;
pub mod auth;
mod bytes;
pub mod command;
pub mod copy;
pub mod dhchap_secret;
pub mod digest;
pub mod discovery;
pub mod fabrics;
pub mod feature;
pub mod identify;
mod key_text;
pub mod log_page;
pub mod pdu;
pub mod pmr;
pub mod reservation;
pub mod status;
pub mod tls_psk;

pub use bytes::ShortData;
pub use digest::Crc32c;

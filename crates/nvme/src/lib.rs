//! The words of NVMe and NVMe/TCP: PDUs, commands, identify structures, fabrics, discovery, log
//! pages, features, digests.
//!
//! Every type here goes to bytes and comes from bytes, and nothing else: no socket, no clock, no
//! state between calls. What a peer may say *when* is the business of the sessions.
//!
//! Decoders trust nothing (T18): each length, offset, flag and type that comes from the wire is
//! checked, and what is wrong with a PDU is answered with the Fatal Error Status and Fatal Error
//! Information that the specification gives for it ([`pdu::PduError`]).
//!
//! Fields cite their place in the specifications, by these short names:
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

mod bytes;
pub mod command;
pub mod digest;
pub mod discovery;
pub mod fabrics;
pub mod feature;
pub mod identify;
pub mod log_page;
pub mod pdu;
pub mod status;

pub use bytes::ShortData;
pub use digest::Crc32c;

//! The initiator's and the target's sessions: the exchange of commands, as pure state machines.
//!
//! A session receives bytes and events as arguments, and leaves the bytes to send in an
//! [`outbox::Outbox`]. It opens no socket, reads no clock (`now` is an argument) and starts no
//! thread. Payloads are ranges of the receive buffer, or buffers that are passed through; they are
//! never copied.
//!
//! - [`initiator`]: a queue pair, bringing up a controller, discovery, an ordered stream;
//! - [`target`]: the other end of the same connections;
//! - [`auth`]: the authentication of both sides;
//! - [`drive_identity`]: the identity under which a target serves a drive;
//! - [`stages`]: the time of an ordered write, by stage, on both sides;
//! - [`wire`]: Rio's own commands and the ordering attribute on the wire.

#![no_std]
#![forbid(unsafe_code)]

extern crate alloc;

#[cfg(test)]
extern crate std;

pub mod auth;
pub mod claim;
pub mod drive_identity;
pub mod engine_choice;
pub mod initiator;
pub mod label;
pub mod label_work;
pub mod outbox;
pub mod rounded;
pub mod stages;
pub mod target;
pub mod wire;

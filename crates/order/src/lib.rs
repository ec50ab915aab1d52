//! Storage order as pure logic.
//!
//! This crate decides *in what order things may happen and what may be forgotten*: the
//! [attribute] that travels with each ordered request, the [ordering log](ordering_log)
//! and the [gate] at the target, the sequencer, the ORDER queue and the
//! [engines](engine) at the initiator.
//!
//! It never reads a clock, opens a socket, starts a thread or touches a device: it is `no_std` with
//! `alloc`. Everything that it needs from outside is an argument.
#![no_std]

extern crate alloc;

#[cfg(test)]
extern crate std;

pub mod attribute;
pub mod block_device;
mod bytes;
pub mod dispatch;
pub mod engine;
pub mod entry;
pub mod following;
pub mod gate;
pub mod group;
pub mod log_region;
pub mod ordering_log;
pub mod ownership;
pub mod probe;
pub mod recovery;
pub mod region;
pub mod topology;
pub mod write_order;

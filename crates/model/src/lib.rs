//! Media as pure state machines: what a log's store writes when, and what it believes.
//!
//! Nothing here reads a clock, opens a file or starts a thread: it is `no_std` with `alloc`. What
//! reaches a medium goes through small traits of raw effects ([`log::block::Blocks`],
//! [`log::mapped::Memory`]). `riopipe-media` implements them with system calls and stores,
//! the simulator with media that lose whatever they may lose.
#![no_std]

extern crate alloc;
#[cfg(test)]
extern crate std;

pub mod log;
pub mod seed;

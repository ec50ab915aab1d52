//! Media as pure state machines: the modelled SSD, and the stores of ordering logs, which decide
//! their writes, the time of each, and the content that they accept.
//!
//! Nothing here reads a clock, opens a file or starts a thread: the crate is `no_std` with `alloc`.
//! Access to a medium goes through small traits of raw effects ([`log::block::Blocks`],
//! [`log::mapped::Memory`], [`ssd::Pages`]). `riopipe-media` implements them with system calls, the
//! simulator with media that lose everything that they are allowed to lose.
#![no_std]

extern crate alloc;
#[cfg(test)]
extern crate std;

pub mod log;
pub mod probe;
pub mod seed;
pub mod ssd;

//! Media as pure state machines: the modelled SSD, and the stores of ordering logs with what each
//! writes when and what it believes.
//!
//! Nothing here reads a clock, opens a file or starts a thread: it is `no_std` with `alloc`. What
//! reaches a medium goes through small traits of raw effects ([`log::block::Blocks`],
//! [`log::mapped::Memory`], [`ssd::Pages`]). `riopipe-media` implements them with system calls and stores,
//! the simulator with media that lose whatever they may lose.
#![no_std]

extern crate alloc;
#[cfg(test)]
extern crate std;

pub mod log;
pub mod seed;
pub mod ssd;

//! Where bytes rest: drives, the modelled SSD, log regions.
//!
//! A [`Drive`] holds 4096-byte blocks; each thread uses it through a [`Queue`] of its own, which
//! never blocks: operations go in, completions come out of [`BlockDevice::poll`]. [`open_drive`] makes
//! one from a specification such as `mem:1G` or `file:/srv/disk.img,size=10G`.
//!
//! What the media are assumed to do is numbered M1 to M5 in docs/ordering-contract.md;
//! docs/media.md says which medium keeps what, and has the modelled drive's formulas with the
//! source of each of its numbers. This crate knows nothing of order,
//! streams or networks.

mod blocking;
mod buf;
mod clock;
mod copy;
mod disk;
mod drive;
mod error;
mod eventfd;
mod log;
mod mapping;
mod medium;
mod mem;
mod open;
mod persist;
mod request;
pub mod spec;
pub mod ssd;
pub mod survival;
mod threads;
mod uring;

pub use blocking::Blocking;
pub use buf::AlignedBuf;
pub use clock::now;
pub use drive::{Data, Done, Drive, Geometry, Queue, Submitted};
pub use error::OpenError;
pub use log::{
    LOG_HELP, LogPart, LogReader, LogStore, PartError, boot_id, open_log, open_log_within,
    read_log, survival_once_created,
};
pub use open::{DRIVE_HELP, open_drive, open_drive_within};
pub use riopipe_order::block_device::{
    BLOCK_SIZE, BLOCKS_MAX, BlockDevice, Cause, Gone, IoError, Operation,
};

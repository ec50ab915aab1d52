//! Storage media: drives, the modelled SSD, log stores.
//!
//! A [`Drive`] holds 4096-byte blocks. Each thread uses it through a [`Queue`] of its own, which
//! never blocks: operations are submitted, and [`BlockDevice::poll`] returns completions.
//! [`open_drive`] opens one from a specification such as `mem:1G` or `file:/srv/disk.img,size=10G`.
//!
//! The assumptions about media are numbered M1 to M5 in docs/ordering-contract.md. docs/media.md
//! shows which medium keeps which, and has the modelled drive's formulas with the source of each of
//! its numbers. This crate has no notion of order, streams or networks.

mod blocking;
mod buf;
mod buf_chunk;
mod copy;
mod disk;
mod drive;
mod drive_spec;
mod error;
mod identity;
mod joined;
mod log;
mod mapping;
mod medium;
mod mem;
mod open;
mod page_fault;
mod pci;
mod persist;
mod place;
mod request;
pub mod spec;
pub mod ssd;
pub mod survival;
mod threads;
mod uring;
mod watched;

pub use blocking::Blocking;
pub use buf::AlignedBuf;
pub use buf_chunk::BufChunk;
pub use drive::{Data, Done, Drive, Geometry, Queue, Submitted};
pub use drive_spec::DRIVE_HELP;
pub use error::OpenError;
pub use identity::{Attribute, Carrier, Physical};
pub use joined::JoinedDrive;
pub use log::{
    LOG_HELP, LogPart, LogReader, LogStore, PartError, boot_id, open_log, open_log_within,
    read_log, survival_once_created,
};
pub use open::{inspect_drive, open_drive, open_drive_within, properties_once_created};
pub use place::{MediumPlace, file_to_create, place_of_drive, place_of_log};
pub use riopipe_order::block_device::{
    BLOCK_BYTES, BLOCKS_MAX, BlockDevice, Cause, Gone, IoError, Operation,
};

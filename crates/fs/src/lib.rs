//! RioFS: the ext4 on-disk format on ordered streams, mounted through FUSE.
//!
//! `riopipe_fs_core` decides all that a call of a program does. This crate gives it a volume, a
//! clock and threads:
//!
//! - [`storage`]: an open [`Volume`](riopipe::Volume) as the core's storage;
//! - [`measured_storage`]: the same, with the time of each stage of an `fsync`;
//! - [`image`]: a file of this machine as a volume, served by a target in this process;
//! - [`fuse`]: a mounted file system, and the threads that serve it;
//! - [`control`]: questions of other processes to the one that serves a mount.

pub mod backing;
pub mod control;
pub mod exported_file;
pub mod fsync_stages;
pub mod fuse;
pub mod image;
pub mod measured_storage;
pub mod mkfs;
pub mod mount_stat;
pub mod mounts;
pub mod storage;

mod shared_stream;
mod superblock;

/// The file system without I/O: its calls, and their types.
pub use riopipe_fs_core as core;
pub use riopipe_fs_core::fs::{Fs, JournalMode, MountError, MountReport};
pub use superblock::SuperblockError;

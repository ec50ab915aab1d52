//! RioFS without I/O: the ext4 on-disk format, the journals, recovery, and what each call of a
//! program does.
//!
//! The crate works on a [`Storage`](storage::Storage), which reads blocks and takes ordered groups
//! of writes. The crate `riopipe-fs` implements it on the streams of a volume, and serves the file
//! system through FUSE; tests implement it in memory. Nothing here reads a clock, opens a file or
//! starts a thread: the time is an argument. Any number of threads may call at once;
//! [`sync`] is the only module that names the standard library, for its locks.
//!
//! `docs/riofs.md` describes the journals and the argument for crash consistency.

#![no_std]
#![forbid(unsafe_code)]

extern crate alloc;

#[cfg(test)]
extern crate std;

pub mod acl;
pub mod block;
mod cache;
mod credits;
mod data_pages;
pub mod dir;
pub mod error;
pub mod extents;
pub mod file_journal;
mod file_log;
pub mod format;
pub mod fs;
pub mod groups;
mod inode_table;
pub mod journal;
mod op;
pub mod open_inode;
mod orphans;
mod pages;
pub mod probe;
mod raw;
mod running;
pub mod storage;
pub mod sync;
#[cfg(test)]
pub(crate) mod testing;
pub mod tid;
mod view;
pub mod xattr;

pub use block::{BLOCK_BYTES, Block, BlockKind, BlockNo, Ino, MetaBlocks};
pub use error::FsError;

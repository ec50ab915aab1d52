//! Loads on a file system: threads that call `fsync` again and again, as programs do.
//!
//! A load uses [`Files`], the calls that it needs. These are calls of a file system in this process,
//! or the system calls of this machine ([`PathFiles`]).

mod append_fsync;
mod barrier_files;
mod dbench;
mod fillsync;
mod group_commit;
mod oltp_insert;
mod overwrite_fsync;
mod path_files;
#[cfg(test)]
mod recorded_files;
mod sqlite;
mod varmail;

use std::io;

pub use self::append_fsync::{APPEND_BYTES, append, append_fsync};
pub use self::barrier_files::{BarrierFiles, Guarantee};
pub use self::dbench::dbench;
pub use self::fillsync::{RECORD_BYTES, fillsync};
pub use self::oltp_insert::{oltp_insert, oltp_insert_each};
pub use self::overwrite_fsync::overwrite_fsync;
pub use self::path_files::PathFiles;
pub use self::sqlite::{SqliteJournal, sqlite};
pub use self::varmail::{varmail, varmail_each, varmail_with};
use crate::harness::Window;
use crate::permutation::mix;

/// The files of one directory. Any thread may call it at any time.
pub trait Files: Sync {
    /// An open file. It is closed when it is dropped.
    type File: Send + Sync;

    /// Makes a new, empty file, and opens it.
    ///
    /// # Errors
    /// The file exists, or the file system fails.
    fn create(&self, name: &str) -> io::Result<Self::File>;

    /// Opens a file.
    ///
    /// # Errors
    /// There is no such file, or the file system fails.
    fn open(&self, name: &str) -> io::Result<Self::File>;

    /// Removes a file.
    ///
    /// # Errors
    /// There is no such file, or the file system fails.
    fn remove(&self, name: &str) -> io::Result<()>;

    /// Writes at the end of a file. Only one thread writes to it.
    ///
    /// # Errors
    /// The file system fails.
    fn append(&self, file: &Self::File, data: &[u8]) -> io::Result<()>;

    /// Reads a whole file. Returns its length.
    ///
    /// # Errors
    /// The file system fails.
    fn read_all(&self, file: &Self::File, into: &mut Vec<u8>) -> io::Result<usize>;

    /// Cuts a file to nothing.
    ///
    /// # Errors
    /// The file system fails.
    fn cut(&self, file: &Self::File) -> io::Result<()>;

    /// Calls `fsync`, or `fdatasync` with `data_only`.
    ///
    /// # Errors
    /// The file system fails.
    fn sync(&self, file: &Self::File, data_only: bool) -> io::Result<()>;

    /// Calls `fsync` for the directory.
    ///
    /// # Errors
    /// The file system fails.
    fn sync_directory(&self) -> io::Result<()>;
}

/// The size and the duration of a load.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct FsLoad {
    /// Number of threads.
    pub threads: u32,
    /// Duration of the run.
    pub window: Window,
}

/// A sequence of numbers that is the same in each run.
#[derive(Clone, Copy, Debug)]
struct Numbers {
    seed: u64,
    drawn: u64,
}

impl Numbers {
    const fn new(seed: u64) -> Self {
        Self { seed, drawn: 0 }
    }

    fn next(&mut self) -> u64 {
        self.drawn += 1;
        mix(self.seed.wrapping_mul(0x9e37_79b9).wrapping_add(mix(self.drawn)))
    }

    /// A number below `end`, which is not 0.
    fn below(&mut self, end: u64) -> u64 {
        self.next() % end.max(1)
    }

    /// A number above 0, at most 1.
    fn share(&mut self) -> f64 {
        ((self.next() >> 11) + 1) as f64 / (1u64 << 53) as f64
    }
}

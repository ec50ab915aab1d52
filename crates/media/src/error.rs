//! Why a drive can't be opened, and why an operation on it failed.

use std::fmt;
use std::io;
use std::sync::Arc;

/// Why an operation on a drive failed: what was tried, where, and what to do about it.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("{}: {} on {}: {}", .0.what, Extent(.0.lba, .0.blocks), .0.drive, .0.cause)]
pub struct IoError(Box<Detail>);

impl IoError {
    /// An error of operation `what` on `blocks` blocks from `lba` on (both 0 for a flush).
    #[cold]
    pub fn new(what: Operation, lba: u64, blocks: u64, drive: &Arc<str>, cause: Cause) -> IoError {
        IoError(Box::new(Detail { what, lba, blocks, drive: Arc::clone(drive), cause }))
    }

    /// What was tried.
    pub fn operation(&self) -> Operation {
        self.0.what
    }

    /// Why it failed.
    pub fn cause(&self) -> &Cause {
        &self.0.cause
    }
}

#[derive(Debug, Clone, PartialEq, Eq)]
struct Detail {
    what: Operation,
    lba: u64,
    blocks: u64,
    drive: Arc<str>,
    cause: Cause,
}

/// What an operation does.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[allow(missing_docs)]
pub enum Operation {
    Write,
    Read,
    Flush,
    WriteZeroes,
    Deallocate,
}

impl fmt::Display for Operation {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Operation::Write => "write",
            Operation::Read => "read",
            Operation::Flush => "flush",
            Operation::WriteZeroes => "write zeroes",
            Operation::Deallocate => "deallocate",
        })
    }
}

/// Why an operation failed.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum Cause {
    /// Some of its blocks are not on the drive.
    #[error("the drive has only {capacity} blocks")]
    OutOfRange {
        /// The drive's capacity in blocks.
        capacity: u64,
    },
    /// Nothing to do, more than [`BLOCKS_MAX`](crate::BLOCKS_MAX) blocks, or a length in bytes
    /// that is not a whole number of blocks.
    #[error(
        "{bytes} bytes: give a whole number of 4096-byte blocks, at least 1 and at most {}",
        crate::BLOCKS_MAX
    )]
    BadLength {
        /// The length given, in bytes.
        bytes: u64,
    },
    /// More operations in flight than the queue was opened for.
    #[error("the queue is full ({depth} operations in flight): poll before submitting more")]
    QueueFull {
        /// The depth that the queue was opened with.
        depth: usize,
    },
    /// The host file system is full, a quota is reached or a file may not grow further.
    #[error(
        "no space left for the file ({0}): make room there, or create the file with size= so that \
         its space is reserved beforehand"
    )]
    NoSpace(Os),
    /// The file has been deleted, replaced or cut short, or the device removed, while it was
    /// served.
    #[error("{0}: stop serving it, bring the medium back, and serve it again")]
    Vanished(Gone),
    /// The modelled drive has lost power.
    #[error("the drive has lost power")]
    PowerLost,
    /// The medium or the system reported an error.
    #[error("{0}")]
    Failed(Os),
}

/// How a medium went away.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub enum Gone {
    /// No directory entry is left for the file: what is written now is lost on close.
    #[error("the file has been deleted or replaced while it was served")]
    Deleted,
    /// The file is shorter than the drive.
    #[error("the file has been cut to {bytes} bytes while it was served")]
    Truncated {
        /// Its length now.
        bytes: u64,
    },
    /// The device is no longer there (ENODEV or ENXIO).
    #[error("the device is gone")]
    Removed,
}

/// An error number of the operating system.
#[derive(Clone, Copy, PartialEq, Eq)]
pub struct Os(pub i32);

impl fmt::Display for Os {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}", io::Error::from_raw_os_error(self.0))
    }
}

impl fmt::Debug for Os {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Display::fmt(self, f)
    }
}

impl Cause {
    /// What a (positive) error number of the operating system means for a drive.
    pub fn from_os(errno: i32) -> Cause {
        match errno {
            libc::ENOSPC | libc::EDQUOT | libc::EFBIG => Cause::NoSpace(Os(errno)),
            libc::ENODEV | libc::ENXIO => Cause::Vanished(Gone::Removed),
            _ => Cause::Failed(Os(errno)),
        }
    }
}

/// Why a drive or a log can't be opened.
#[derive(Debug, thiserror::Error)]
pub enum OpenError {
    /// The specification can't be understood.
    #[error("{spec:?}: {problem}\n{}", .help)]
    Spec {
        /// What was given.
        spec: String,
        /// What is wrong with it.
        problem: String,
        /// The kinds there are.
        help: &'static str,
    },
    /// The file or device can't be opened or created.
    #[error("{path}: can't {doing}: {source}{}", hint(.source))]
    Os {
        /// Which one.
        path: String,
        /// What was tried.
        doing: &'static str,
        /// The system's answer.
        source: io::Error,
    },
    /// Another process serves it (T8).
    #[error(
        "{path}: in use by another process: whoever serves a medium locks it; stop the other one \
         first"
    )]
    Locked {
        /// Which one.
        path: String,
    },
    /// Somebody in this process has the drive's only queue.
    #[error(
        "{drive}: one queue has it to itself; drop that first, or have all who share the drive open \
         queues that share it"
    )]
    Taken {
        /// Which one.
        drive: String,
    },
    /// No file, and no size to create it with.
    #[error("{path}: no such file: add ,size= to create it (for example {path},size=1G)")]
    NoSuchFile {
        /// Which one.
        path: String,
    },
    /// The file or device is there, but its size is not usable.
    #[error("{path}: {problem}")]
    Size {
        /// Which one.
        path: String,
        /// What is wrong and what to do.
        problem: String,
    },
    /// Not the kind of file that is needed.
    #[error("{path}: {problem}")]
    Kind {
        /// Which one.
        path: String,
        /// What is wrong and what to do.
        problem: String,
    },
    /// No memory for it.
    #[error("can't get {bytes} bytes of memory for {what}: {source}: choose a smaller size")]
    Memory {
        /// What for.
        what: &'static str,
        /// How much.
        bytes: u64,
        /// The system's answer.
        source: io::Error,
    },
}

fn hint(error: &io::Error) -> &'static str {
    match error.raw_os_error() {
        Some(libc::ENOSPC | libc::EDQUOT) => {
            ": make room on that file system or choose a smaller size"
        }
        Some(libc::EFBIG) => ": the size is over a limit of the file system or of this process",
        Some(libc::EACCES | libc::EPERM) => {
            ": the user who serves it needs permission to read and write it"
        }
        _ => "",
    }
}

struct Extent(u64, u64);

impl fmt::Display for Extent {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.1 {
            0 if self.0 == 0 => f.write_str("all blocks"),
            1 => write!(f, "block {}", self.0),
            _ => write!(f, "{} blocks from {} on", self.1, self.0),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn messages_say_what_where_and_what_to_do() {
        let drive: Arc<str> = Arc::from("file:/srv/a");
        let error = IoError::new(Operation::Write, 7, 2, &drive, Cause::from_os(libc::ENOSPC));
        let text = error.to_string();
        for part in ["write: 2 blocks from 7 on on file:/srv/a", "No space left", "size="] {
            assert!(text.contains(part), "{part:?} in {text:?}");
        }
        assert_eq!(Cause::from_os(libc::ENODEV), Cause::Vanished(Gone::Removed));
    }

    #[test]
    fn a_result_stays_small() {
        // Completions are moved by the hundred thousand each second.
        assert!(size_of::<crate::Done>() <= 40);
    }
}

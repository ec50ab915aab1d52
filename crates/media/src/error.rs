//! Errors of opening a drive or a log, and the meaning of system errors for a drive.

use std::io;

use riopipe_nvme::pmr::PmrError;
use riopipe_order::block_device::{Cause, Gone};

/// The cause that a (positive) error number of the operating system stands for.
#[cold]
pub(crate) fn cause_of(errno: i32) -> Cause {
    let system_words = || io::Error::from_raw_os_error(errno).to_string();
    match errno {
        libc::ENOSPC | libc::EDQUOT | libc::EFBIG => Cause::NoSpace(system_words()),
        libc::ENODEV | libc::ENXIO => Cause::Vanished(Gone::Removed),
        _ => Cause::Failed(system_words()),
    }
}

/// The reason why a drive or a log can't be opened.
#[derive(Debug, thiserror::Error)]
pub enum OpenError {
    /// The specification can't be understood.
    #[error("{spec:?}: {problem}\n{}", .help)]
    Spec {
        /// The specification as given.
        spec: String,
        /// The part that can't be understood, and why.
        problem: String,
        /// The list of kinds and options.
        help: &'static str,
    },
    /// The file or device can't be opened or created.
    #[error("{path}: can't {doing}: {source}{}", hint(.source))]
    Os {
        /// Path of the file or device.
        path: String,
        /// The operation that failed.
        doing: &'static str,
        /// The system's error.
        source: io::Error,
    },
    /// Another process serves the medium (trap T8).
    #[error(
        "{path}: in use by another process: a process locks the medium that it serves; stop the \
         other one first"
    )]
    Locked {
        /// Path of the file or device.
        path: String,
    },
    /// Another caller in this process has the only queue of the drive.
    #[error("{drive}: its only queue is open; drop that first, or open all queues with sharing")]
    Taken {
        /// Description of the drive.
        drive: String,
    },
    /// The file does not exist, and no size to create it with is given.
    #[error("{path}: no such file: add ,size= to create it (for example {path},size=1G)")]
    NoSuchFile {
        /// Path of the file.
        path: String,
    },
    /// The file or device exists, but its size is not usable.
    #[error("{path}: {problem}")]
    Size {
        /// Path of the file or device.
        path: String,
        /// The problem and its remedy.
        problem: String,
    },
    /// The path is not of the necessary kind of file.
    #[error("{path}: {problem}")]
    Kind {
        /// Path of the file or device.
        path: String,
        /// The problem and its remedy.
        problem: String,
    },
    /// The memory of a drive can't be used.
    #[error("{path}: {source}{advice}")]
    DriveMemory {
        /// The drive's directory in sysfs.
        path: String,
        /// The reason, from the drive's properties.
        source: PmrError,
        /// The remedy, with a separator; empty if `source` contains it.
        advice: String,
    },
    /// There is not enough memory.
    #[error("can't get {bytes} bytes of memory for {what}: {source}: choose a smaller size")]
    Memory {
        /// The purpose of the memory.
        what: &'static str,
        /// Size of the memory in bytes.
        bytes: u64,
        /// The system's error.
        source: io::Error,
    },
}

fn hint(error: &io::Error) -> &'static str {
    match error.raw_os_error() {
        Some(libc::ENOSPC | libc::EDQUOT) => {
            ": free space on that file system or choose a smaller size"
        }
        Some(libc::EFBIG) => ": the size is over a limit of the file system or of this process",
        Some(libc::EACCES | libc::EPERM) => {
            ": the user of the server needs permission to read and write it"
        }
        _ => "",
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_cause_quotes_the_system_error() {
        let text = cause_of(libc::ENOSPC).to_string();
        for part in ["No space left", "size="] {
            assert!(text.contains(part), "{part:?} in {text:?}");
        }
        assert!(cause_of(libc::EIO).to_string().contains("Input/output error"));
        assert_eq!(cause_of(libc::ENODEV), Cause::Vanished(Gone::Removed));
    }
}

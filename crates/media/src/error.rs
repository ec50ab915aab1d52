//! Why a drive or a log can't be opened, and what the system's errors mean for a drive.

use std::io;

use riopipe_order::block_device::{Cause, Gone};

/// What a (positive) error number of the operating system means for a drive.
#[cold]
pub(crate) fn cause_of(errno: i32) -> Cause {
    let said = || io::Error::from_raw_os_error(errno).to_string();
    match errno {
        libc::ENOSPC | libc::EDQUOT | libc::EFBIG => Cause::NoSpace(said()),
        libc::ENODEV | libc::ENXIO => Cause::Vanished(Gone::Removed),
        _ => Cause::Failed(said()),
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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_cause_has_the_system_s_words() {
        let text = cause_of(libc::ENOSPC).to_string();
        for part in ["No space left", "size="] {
            assert!(text.contains(part), "{part:?} in {text:?}");
        }
        assert!(cause_of(libc::EIO).to_string().contains("Input/output error"));
        assert_eq!(cause_of(libc::ENODEV), Cause::Vanished(Gone::Removed));
    }
}

//! The reasons why a copy or a comparison fails.

use std::{ffi::OsString, io, path::PathBuf};

use crate::file_header::NAME_MAX;

/// The reason why a file can't be copied or compared.
#[derive(Debug, thiserror::Error)]
pub enum CopyError<E: std::error::Error> {
    /// The local file can't be read.
    #[error("{}: {source}", path.display())]
    Source {
        /// Path of the file.
        path: PathBuf,
        /// The system's error.
        source: io::Error,
    },
    /// The path is a folder, a pipe or a device.
    #[error("{}: not a regular file", .0.display())]
    NotAFile(PathBuf),
    /// The name does not fit into the header, or is none.
    #[error(
        "{0:?} is no name for a file in a volume: it must have 1 to {NAME_MAX} bytes and no slash"
    )]
    Name(OsString),
    /// The file became longer or shorter during the copy.
    #[error(
        "{}: it had {began} bytes when the copy began and has {now} now; the volume holds no file; \
         copy it again when no program writes it", path.display()
    )]
    Changed {
        /// Path of the file.
        path: PathBuf,
        /// Its length at the start, in bytes.
        began: u64,
        /// Number of bytes read.
        now: u64,
    },
    /// The volume is too small.
    #[error(
        "the file needs {need} blocks of 4096 bytes, header included; the volume has {have}: make \
         a larger volume"
    )]
    TooLarge {
        /// Number of blocks needed.
        need: u64,
        /// Number of blocks of the volume.
        have: u64,
    },
    /// A stream has more bytes than the volume has space for.
    #[error(
        "standard input has more bytes than the volume has space for ({space}); the volume holds no \
         file: make a larger volume"
    )]
    TooLong {
        /// Number of bytes that fit.
        space: u64,
    },
    /// A group of this size can't be submitted.
    #[error("groups of {bytes} bytes do not fit: {source}; nothing was written")]
    Group {
        /// Bytes of the file in each group.
        bytes: usize,
        /// A size that fits, in bytes; `None`: no size does.
        fits: Option<usize>,
        /// The bound.
        source: E,
    },
    /// The volume holds something other than a copied file.
    #[error("the volume's first block holds something that no file copy wrote")]
    Foreign,
    /// The volume holds a newer format.
    #[error("the volume's file has format version {0}, newer than this program's 1; update rio")]
    Newer(u32),
    /// The header is damaged.
    #[error("the header of the volume's file is damaged: {0}; write the file again")]
    Damaged(&'static str),
    /// The volume holds no file.
    #[error("the volume holds no file; `rio volume write` puts one there")]
    NoFile,
    /// The copy was interrupted.
    #[error("the volume holds no file: a copy of {0:?} was begun and not finished; write it again")]
    Unfinished(OsString),
    /// The bytes have changed since they were written.
    #[error(
        "the volume's file {name:?} is damaged: its checksum is {found:016x}, its header has \
         {expected:016x}; nothing was kept of it"
    )]
    Checksum {
        /// Name of the file.
        name: OsString,
        /// The checksum in the header.
        expected: u64,
        /// The checksum of the bytes.
        found: u64,
    },
    /// The bytes have changed since they were written, and have gone to a stream.
    #[error(
        "the volume's file {name:?} is damaged: its checksum is {found:016x}, its header has \
         {expected:016x}; its bytes have gone to standard output, and must not be used"
    )]
    ChecksumOfStream {
        /// Name of the file.
        name: OsString,
        /// The checksum in the header.
        expected: u64,
        /// The checksum of the bytes.
        found: u64,
    },
    /// The stream can't be written.
    #[error("can't write to standard output: {0}")]
    Output(#[source] io::Error),
    /// The destination exists.
    #[error("{}: already there; --force replaces it", .0.display())]
    Exists(PathBuf),
    /// The destination is a device, a pipe, a socket or a folder, or a link to one, or to nothing.
    #[error("{}: not a regular file, so it is not replaced, not even with --force", .0.display())]
    Irreplaceable(PathBuf),
    /// The local file was made longer or shorter during the comparison.
    #[error(
        "{}: it was changed during the comparison ({began} bytes at the beginning, {now} now); compare \
         it again when no program writes it", path.display()
    )]
    ChangedWhileCompared {
        /// Path of the file.
        path: PathBuf,
        /// Its length at the start, in bytes.
        began: u64,
        /// Its length at the end, in bytes.
        now: u64,
    },
    /// The destination can't be written.
    #[error("{}: can't {doing}: {source}; nothing was left behind", path.display())]
    Destination {
        /// Path of the file.
        path: PathBuf,
        /// The operation that failed.
        doing: &'static str,
        /// The system's error.
        source: io::Error,
    },
    /// The file is there, and its folder can't be made durable.
    #[error(
        "{}: it is there, with the right checksum, but a power cut may undo its name: can't make the \
         folder durable: {source}", path.display()
    )]
    Folder {
        /// Path of the file.
        path: PathBuf,
        /// The system's error.
        source: io::Error,
    },
    /// [`Watch::stop`](super::Watch::stop) requested it.
    #[error("interrupted")]
    Interrupted,
    /// The volume failed.
    #[error("{0}")]
    Store(#[from] E),
}

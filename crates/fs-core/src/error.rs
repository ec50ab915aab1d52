//! The errors of calls.

use alloc::string::String;

use crate::block::{BlockNo, Ino};

/// Why a call failed. Each has its `errno`.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum FsError {
    /// ENOENT.
    #[error("no such file or directory")]
    NotFound,
    /// EEXIST.
    #[error("file exists")]
    Exists,
    /// ENOTDIR.
    #[error("not a directory")]
    NotDirectory,
    /// EISDIR.
    #[error("is a directory")]
    IsDirectory,
    /// ENOTEMPTY.
    #[error("directory not empty")]
    NotEmpty,
    /// ENOSPC: no free block or inode.
    #[error("no space left")]
    NoSpace,
    /// EROFS: mounted read-only, or read-only after an error.
    #[error("read-only file system")]
    ReadOnly,
    /// ENAMETOOLONG: more than 255 bytes.
    #[error("file name too long")]
    NameTooLong,
    /// EFBIG: beyond the largest file.
    #[error("file too large")]
    FileTooLarge,
    /// EMLINK: too many hard links, or subdirectories without `dir_nlink`.
    #[error("too many links")]
    TooManyLinks,
    /// EACCES.
    #[error("permission denied")]
    Access,
    /// EPERM: such as a change of an immutable file.
    #[error("operation not permitted")]
    NotPermitted,
    /// EINVAL.
    #[error("invalid argument")]
    Invalid,
    /// ENODATA: no such extended attribute.
    #[error("no such attribute")]
    NoAttribute,
    /// ERANGE: the caller's buffer is too small.
    #[error("result too large for the buffer")]
    Range,
    /// ENXIO: no data or hole at or after this offset.
    #[error("no data or hole there")]
    NoDataOrHole,
    /// EOPNOTSUPP.
    #[error("not supported")]
    NotSupported,
    /// EBUSY.
    #[error("busy")]
    Busy,
    /// ESTALE: an inode that does not exist (any more).
    #[error("stale inode {0}")]
    Stale(Ino),
    /// ENOMEM.
    #[error("out of memory")]
    NoMemory,
    /// EIO: the storage failed.
    #[error("input/output error: {0}")]
    Io(String),
    /// EUCLEAN: a structure on the drive is damaged. `e2fsck` repairs it.
    #[error("damaged {what} in block {block}")]
    DamagedBlock {
        /// The structure.
        what: &'static str,
        /// The block that contains it.
        block: BlockNo,
    },
    /// EUCLEAN: an inode on the drive is damaged. `e2fsck` repairs it.
    #[error("damaged {what} of inode {ino}")]
    DamagedInode {
        /// The structure.
        what: &'static str,
        /// The inode.
        ino: Ino,
    },
}

impl FsError {
    /// Whether a structure on the drive is damaged.
    #[must_use]
    pub const fn is_damage(&self) -> bool {
        matches!(self, Self::DamagedBlock { .. } | Self::DamagedInode { .. })
    }

    /// The number that Linux uses for the error.
    #[must_use]
    pub const fn errno(&self) -> i32 {
        match self {
            Self::NotPermitted => 1,
            Self::NotFound => 2,
            Self::Io(_) => 5,
            Self::NoDataOrHole => 6,
            Self::NoMemory => 12,
            Self::Access => 13,
            Self::Busy => 16,
            Self::Exists => 17,
            Self::NotDirectory => 20,
            Self::IsDirectory => 21,
            Self::Invalid => 22,
            Self::FileTooLarge => 27,
            Self::NoSpace => 28,
            Self::ReadOnly => 30,
            Self::TooManyLinks => 31,
            Self::Range => 34,
            Self::NameTooLong => 36,
            Self::NotEmpty => 39,
            Self::NoAttribute => 61,
            Self::NotSupported => 95,
            Self::Stale(_) => 116,
            Self::DamagedBlock { .. } | Self::DamagedInode { .. } => 117,
        }
    }
}

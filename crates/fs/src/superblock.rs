//! The few fields of the superblock that are needed before the file system is mounted.

use std::fs::File;
use std::io;
use std::os::unix::fs::FileExt;
use std::path::Path;

use riopipe_fs_core::format::features::incompat::{RECOVER, RIOFS_DIRTY};

/// The byte of the file system at which the superblock begins.
const SUPERBLOCK_AT: u64 = 1024;
/// The magic number of ext2, ext3 and ext4.
const MAGIC: u16 = 0xef53;

/// Why a file has no superblock.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum SuperblockError {
    /// There is no ext4 file system.
    #[error("no ext4 file system is there: make one with `rio fs mkfs`")]
    NoFileSystem,
    /// The file can't be read.
    #[error("can't read the superblock: {0}")]
    Read(#[from] io::Error),
}

/// The fields of a superblock.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Superblock {
    /// Whether the file system is mounted, or was not unmounted.
    pub(crate) is_dirty: bool,
    /// Whether the main journal may have transactions that are not home.
    pub(crate) needs_replay: bool,
    /// The errors since the last check (`s_error_count`).
    pub(crate) errors: u32,
    /// Its UUID.
    pub(crate) uuid: [u8; 16],
}

impl Superblock {
    /// Reads the superblock of the image at `path`.
    pub(crate) fn read(path: &Path) -> Result<Self, SuperblockError> {
        let mut bytes = [0; 1024];
        match File::open(path)?.read_exact_at(&mut bytes, SUPERBLOCK_AT) {
            Err(error) if error.kind() == io::ErrorKind::UnexpectedEof => {
                Err(SuperblockError::NoFileSystem)
            }
            Err(error) => Err(error.into()),
            Ok(()) => Self::decode(&bytes).ok_or(SuperblockError::NoFileSystem),
        }
    }

    /// Decodes a superblock; `None`: there is none.
    pub(crate) fn decode(bytes: &[u8; 1024]) -> Option<Self> {
        let magic = u16::from_le_bytes([bytes[0x38], bytes[0x39]]);
        let u32_at = |at: usize| {
            u32::from_le_bytes([bytes[at], bytes[at + 1], bytes[at + 2], bytes[at + 3]])
        };
        let incompat = u32_at(0x60);
        let mut uuid = [0; 16];
        uuid.copy_from_slice(&bytes[0x68..0x78]);
        (magic == MAGIC).then_some(Self {
            is_dirty: incompat & RIOFS_DIRTY != 0,
            needs_replay: incompat & RECOVER != 0,
            errors: u32_at(0x194),
            uuid,
        })
    }

    /// The UUID as text.
    pub(crate) fn uuid_text(&self) -> String {
        riopipe::VolumeId(self.uuid).to_string()
    }
}

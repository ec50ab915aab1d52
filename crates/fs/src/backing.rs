//! That on which a file system is mounted: a volume, or an image with its target.

use std::path::Path;
use std::sync::Arc;

use riopipe::{EngineKind, Recovery, Volume};
use riopipe_fs_core::block::{BLOCK_BYTES, BlockNo};
use riopipe_fs_core::file_journal::record::Epoch;
use riopipe_fs_core::fs::{
    Fs, JournalMode, MountError, MountOptions, MountReport, clear_errors, give_up_recovery,
};
use riopipe_fs_core::storage::Storage;
use rustix::rand::{GetRandomFlags, getrandom};

use crate::fsync_stages::FsyncTimes;
use crate::image::{Image, ImageError, ImageOptions, Opened};
use crate::measured_storage::MeasuredStorage;
use crate::storage::{VolumeStorage, VolumeStorageError};
use crate::superblock::Superblock;

/// An open volume, or an image in service. It must be [closed](Self::close) after the file system
/// was unmounted: dropping it is a crash.
pub struct Backing {
    storage: Arc<VolumeStorage>,
    /// The same, as the file system uses it.
    measured: Arc<MeasuredStorage>,
    /// The image, if it is one. It is closed after the storage.
    image: Option<Image>,
}

/// Why a backing can't be used, or was not closed.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum BackingError {
    /// The image can't be used.
    #[error(transparent)]
    Image(#[from] ImageError),
    /// The volume can't be used.
    #[error(transparent)]
    Storage(#[from] VolumeStorageError),
}

/// The usual limit of the data of files in memory, MiB.
pub const DIRTY_LIMIT_MIB: u32 = 128;
/// The blocks of a MiB.
const BLOCKS_PER_MIB: usize = (1 << 20) / BLOCK_BYTES;

/// The options of a mount.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct FsOptions {
    /// How `fsync` keeps order.
    pub mode: JournalMode,
    /// Refuse all changes.
    pub read_only: bool,
    /// Leave out file-level records that are damaged or can't be applied.
    pub accept_lost_records: bool,
    /// The time between two commits of the background, seconds.
    pub commit_seconds: u32,
    /// The data of files in memory at which a write waits until some of it is written, MiB.
    pub dirty_limit_mib: u32,
}

impl Default for FsOptions {
    fn default() -> Self {
        Self {
            mode: JournalMode::default(),
            read_only: false,
            accept_lost_records: false,
            commit_seconds: 5,
            dirty_limit_mib: DIRTY_LIMIT_MIB,
        }
    }
}

/// The engine of the streams that a mode needs; `None`: that of the volume.
#[must_use]
pub const fn engine_of(mode: JournalMode) -> Option<EngineKind> {
    match mode {
        JournalMode::Horae => Some(EngineKind::Horae),
        JournalMode::Barrier => Some(EngineKind::Barrier),
        JournalMode::Opimq => Some(EngineKind::Opimq),
        JournalMode::Ext4 | JournalMode::Rio => None,
    }
}

impl Backing {
    /// Serves an image. Returns the findings of the volume's recovery, too.
    ///
    /// # Errors
    /// [`BackingError`].
    pub fn of_image(path: &Path, options: &ImageOptions) -> Result<(Self, Recovery), BackingError> {
        let Opened { image, volume, recovery } = Image::open(path, options)?;
        Ok((Self::new(VolumeStorage::new(volume)?, Some(image)), recovery))
    }

    /// Uses a volume that this process has opened.
    ///
    /// # Errors
    /// [`BackingError::Storage`].
    pub fn of_volume(volume: Volume) -> Result<Self, BackingError> {
        Ok(Self::new(VolumeStorage::new(volume)?, None))
    }

    fn new(storage: VolumeStorage, image: Option<Image>) -> Self {
        let storage = Arc::new(storage);
        let measured = Arc::new(MeasuredStorage::new(Arc::clone(&storage)));
        Self { storage, measured, image }
    }

    /// The storage.
    #[must_use]
    pub fn storage(&self) -> &Arc<VolumeStorage> {
        &self.storage
    }

    /// The path of the image without symbolic links; `None` for a volume.
    #[must_use]
    pub fn image_path(&self) -> Option<&Path> {
        self.image.as_ref().map(Image::path)
    }

    /// Whether the file system waits for a recovery, so that no other ext4 sees all of it. `None`: it
    /// has no superblock that can be read.
    #[must_use]
    pub fn needs_recovery(&self) -> Option<bool> {
        let mut first = [0; BLOCK_BYTES];
        self.storage.read(BlockNo(0), &mut first).ok()?;
        let superblock: &[u8; 1024] = first[1024..].first_chunk()?;
        let superblock = Superblock::decode(superblock)?;
        Some(superblock.is_dirty || superblock.needs_replay)
    }

    /// The times of the calls of `fsync`, since the backing was opened.
    #[must_use]
    pub fn fsync_times(&self) -> &Arc<FsyncTimes> {
        self.measured.fsync_times()
    }

    /// Mounts the file system, which recovers it after a crash.
    ///
    /// # Errors
    /// [`MountError`].
    pub fn mount(&self, options: &FsOptions) -> Result<(Arc<Fs>, MountReport), MountError> {
        let mut epoch = [0; 16];
        if getrandom(&mut epoch, GetRandomFlags::empty()) != Ok(epoch.len()) {
            // The kernel's pool is not ready yet. The clock and the process are enough for this.
            epoch[..8].copy_from_slice(&riopipe_platform::now_ns().to_le_bytes());
            epoch[8..12].copy_from_slice(&std::process::id().to_le_bytes());
        }
        let options = MountOptions {
            mode: options.mode,
            read_only: options.read_only,
            accept_lost_records: options.accept_lost_records,
            commit_seconds: options.commit_seconds,
            pages_max: options.dirty_limit_mib as usize * BLOCKS_PER_MIB,
            crc32c: riopipe_platform::crc32c,
            ..MountOptions::new(Epoch(epoch))
        };
        let storage = Arc::clone(&self.measured) as Arc<dyn Storage>;
        let (fs, report) = Fs::mount(storage, options, crate::fuse::now())?;
        Ok((Arc::new(fs), report))
    }

    /// Gives up the recovery of a file system that is too damaged for it ([`give_up_recovery`]).
    ///
    /// # Errors
    /// [`MountError`].
    pub fn give_up_recovery(&self) -> Result<(), MountError> {
        give_up_recovery(&*self.storage, riopipe_platform::crc32c)
    }

    /// Clears the record of errors, after a check that has found nothing ([`clear_errors`]).
    ///
    /// # Errors
    /// [`MountError`].
    pub fn clear_errors(&self) -> Result<(), MountError> {
        clear_errors(&*self.storage, riopipe_platform::crc32c)
    }

    /// Closes the volume, and stops the target of an image.
    ///
    /// # Errors
    /// [`BackingError`]. The volume is recovered when it is opened again.
    pub fn close(self) -> Result<(), BackingError> {
        let closed = self.storage.close();
        let stopped = self.image.map_or(Ok(()), Image::close);
        closed?;
        Ok(stopped?)
    }
}

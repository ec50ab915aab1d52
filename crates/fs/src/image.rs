//! A file with an ext4 file system as a volume, served by a target in this process.
//!
//! The file stays a plain image: block n of the file system is block n of the file. All else that a
//! volume needs is in the *side folder* `FILE.rio`, and together they are the drive that the target
//! serves ([`JoinedDrive`]):
//!
//! | file | content |
//! |---|---|
//! | `head` | the blocks of the drive before the data area, with the label |
//! | `log` | the ordering log |
//! | `blank` | an empty drive of the same size, in place of the image while the volume is created |
//!
//! The creation of a volume erases the first block of its data area, and refuses a drive whose last
//! blocks have a known signature. So the image is not there yet.
//!
//! The side folder exists only while the file system is mounted, and after a crash until it has been
//! mounted again. The file system has a bit in its superblock for the same time
//! (`RIOFS_DIRTY`), so there are four cases:
//!
//! | bit | side folder | meaning |
//! |---|---|---|
//! | clear | missing | unmounted: the volume is created |
//! | clear | there | a crash before the first change or after the last one: it is created again |
//! | set | there | a crash: the volume is opened, which recovers it |
//! | set | missing | the image cannot be recovered: it is refused |
//!
//! The identity of the drive follows from the UUID of the file system, so a side folder is never
//! used with another image (trap T27). The lock of the image excludes a second mount (trap T8). The
//! target serves only an initiator that knows a random name, which is nowhere stored.

use std::fs::{self, File};
use std::io;
use std::os::unix::fs::FileTypeExt;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use riopipe::{
    BLOCK_BYTES, ConnectOptions, CreateOptions, EngineKind, MemberAddr, OpenOptions, Recovery,
    Volume,
};
use riopipe_media::spec::escape_commas;
use riopipe_media::{Drive, JoinedDrive, open_drive, open_drive_within, open_log};
use riopipe_target::{Config, NamespaceOptions, Running, StartError, Target};

use crate::superblock::{Superblock, SuperblockError};

/// The blocks of a drive before the data area of its volume.
const HEAD_BLOCKS: u64 = 256;
/// The ordering log in bytes for each stream: 32,000 requests that are not released.
const LOG_BYTES_PER_STREAM: u64 = 2 << 20;
/// The smallest and the largest number of streams.
const STREAMS: (usize, usize) = (2, 8);
/// The largest number of reactors of the target.
const REACTORS_MAX: usize = 4;
/// How long to wait for another process that has the image locked. A killed one keeps the lock until
/// its last write has landed.
const LOCK_WAIT: Duration = Duration::from_secs(3);
/// The file of the side folder that is there only while the volume is created.
const BLANK: &str = "blank";
/// The name of the volume.
const VOLUME: &str = "riofs";

/// The options for opening an image.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct ImageOptions {
    /// Use an image whose ordering log was lost, in a crash of the machine or with the side folder.
    /// The order of its last writes is then not known (trap T19).
    pub accept_lost_log: bool,
    /// The engine of the streams; `None`: `rio`.
    pub engine: Option<EngineKind>,
}

/// Why an image can't be used as a volume.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum ImageError {
    /// A file can't be used.
    #[error("{path}: can't {doing}: {source}")]
    Os {
        /// The path of the file.
        path: String,
        /// The operation that failed.
        doing: &'static str,
        /// The system's error.
        source: io::Error,
    },
    /// It is a block device.
    #[error(
        "{path} is a block device: serve it (rio target serve --drive block:{path}), create a \
         volume on it, and mount the volume"
    )]
    Device {
        /// Its path.
        path: String,
    },
    /// It is neither a file nor a block device.
    #[error("{path} is not a file")]
    NotFile {
        /// Its path.
        path: String,
    },
    /// It has no file system that can be used.
    #[error("{path}: {source}")]
    Superblock {
        /// The path of the image.
        path: String,
        /// The reason.
        source: SuperblockError,
    },
    /// The image was not unmounted, and its side folder is missing.
    #[error(
        "{path} was not unmounted, and the folder {side}, which has the ordering log of that mount, \
         is missing: put the folder beside the image again. Only if it is lost: `rio fs mount \
         --accept-lost-log` does without it, and the last changes may be lost or damaged"
    )]
    NoSideFolder {
        /// The path of the image.
        path: String,
        /// The path of the side folder.
        side: String,
    },
    /// The image or a file of the side folder can't be opened.
    #[error(transparent)]
    Drive(#[from] riopipe_media::OpenError),
    /// The target can't be started.
    #[error(transparent)]
    Target(#[from] StartError),
    /// The volume can't be created.
    #[error("{path}: {source}")]
    Create {
        /// The path of the side folder.
        path: String,
        /// The reason.
        source: Box<riopipe::CreateError>,
    },
    /// The volume can't be opened.
    #[error("{path}: {source}")]
    Open {
        /// The path of the side folder.
        path: String,
        /// The reason.
        source: Box<riopipe::OpenError>,
    },
    /// The target did not stop in order.
    #[error(transparent)]
    Stop(#[from] riopipe_target::StopError),
}

impl ImageError {
    fn os(path: &Path, doing: &'static str) -> impl FnOnce(io::Error) -> Self {
        move |source| Self::Os { path: path.display().to_string(), doing, source }
    }
}

/// An image that a target in this process serves. Its volume must be closed before it is
/// [closed](Self::close).
pub struct Image {
    files: Files,
    target: Running,
    /// The drive of the image. It has the lock.
    image: Arc<dyn Drive>,
}

/// An image in service, its open volume, and the findings of the recovery of the volume.
pub struct Opened {
    /// The image.
    pub image: Image,
    /// Its volume, which has the size of the image.
    pub volume: Volume,
    /// The findings of the volume's recovery, after a crash.
    pub recovery: Recovery,
}

impl Image {
    /// Serves the image at `path`, and opens its volume.
    ///
    /// # Errors
    /// [`ImageError`]. Nothing is changed on the image.
    pub fn open(path: &Path, options: &ImageOptions) -> Result<Opened, ImageError> {
        // The side folder is beside the file, not beside a link to it.
        let path = fs::canonicalize(path).map_err(ImageError::os(path, "find it"))?;
        check_kind(&path)?;
        let drive = open_drive_within(&spec_of(&path), LOCK_WAIT)?;
        let superblock = read_superblock(&path)?;
        let side = side_folder(&path);
        let files = Files { image: path, head: side.join("head"), log: side.join("log"), side };
        let is_without_log = superblock.is_dirty && !files.head.exists();
        if !superblock.is_dirty || is_without_log && options.accept_lost_log {
            files.create_volume(&superblock, drive.geometry().blocks)?;
        } else if is_without_log {
            let (path, side) = (files.image.display(), files.side.display());
            return Err(ImageError::NoSideFolder {
                path: path.to_string(),
                side: side.to_string(),
            });
        }
        let head = open_drive(&spec_of(&files.head))?;
        let service = Service::start(&files, &superblock, head, Arc::clone(&drive), options)?;
        let open = OpenOptions {
            // This process has the locks, so the former owner has ended.
            take_over: true,
            accept_lost_log: options.accept_lost_log,
            engine: options.engine,
            connect: service.connect,
            ..OpenOptions::default()
        };
        let opened = Volume::open(VOLUME, &service.members, &open);
        let (volume, recovery) = opened.map_err(|source| ImageError::Open {
            path: files.side.display().to_string(),
            source: Box::new(source),
        })?;
        let image = Self { files, target: service.target, image: drive };
        Ok(Opened { image, volume, recovery })
    }

    /// The path of the image.
    #[must_use]
    pub fn path(&self) -> &Path {
        &self.files.image
    }

    /// The target that serves it.
    #[must_use]
    pub fn target(&self) -> &Running {
        &self.target
    }

    /// Stops the target. If the file system was unmounted, the side folder is removed: the image
    /// does not need it any more.
    ///
    /// # Errors
    /// [`ImageError`]. The target has stopped even so.
    pub fn close(self) -> Result<(), ImageError> {
        let Self { files, target, image } = self;
        target.stop()?;
        let is_dirty = Superblock::read(&files.image).is_ok_and(|found| found.is_dirty);
        if !is_dirty {
            files.remove_side()?;
        }
        // The lock ends only now, so the folder was not that of another mount.
        drop(image);
        Ok(())
    }
}

/// The files of an image.
struct Files {
    image: PathBuf,
    side: PathBuf,
    head: PathBuf,
    log: PathBuf,
}

impl Files {
    /// Makes the side folder with a new volume of the image's size.
    fn create_volume(&self, superblock: &Superblock, blocks: u64) -> Result<(), ImageError> {
        self.remove_side()?;
        fs::create_dir(&self.side).map_err(ImageError::os(&self.side, "create it"))?;
        sync_folder_of(&self.side)?;
        let streams = stream_count();
        drop(open_log(&format!("{},size={}", spec_of(&self.log), log_bytes(streams)))?);
        let (head_bytes, bytes) = (HEAD_BLOCKS * BLOCK_BYTES as u64, blocks * BLOCK_BYTES as u64);
        let head = open_drive(&format!("{},size={head_bytes}", spec_of(&self.head)))?;
        let blank_path = self.side.join(BLANK);
        let blank = open_drive(&format!("{},size={bytes},sparse", spec_of(&blank_path)))?;
        let service = Service::start(self, superblock, head, blank, &ImageOptions::default())?;
        let create = CreateOptions {
            unit_blocks: 1,
            streams: streams as u16,
            engine: Some(EngineKind::Rio),
            connect: service.connect,
            ..CreateOptions::default()
        };
        let created = Volume::create(VOLUME, &service.members, &create);
        created.map_err(|source| ImageError::Create {
            path: self.side.display().to_string(),
            source: Box::new(source),
        })?;
        service.target.stop()?;
        fs::remove_file(&blank_path).map_err(ImageError::os(&blank_path, "remove it"))
    }

    /// Removes the side folder. Only files of the names that this module writes are removed.
    fn remove_side(&self) -> Result<(), ImageError> {
        let ignore_missing = |path: &Path, result: io::Result<()>| match result {
            Err(error) if error.kind() != io::ErrorKind::NotFound => {
                Err(ImageError::os(path, "remove it")(error))
            }
            _ => Ok(()),
        };
        for path in [&self.head, &self.log, &self.side.join(BLANK)] {
            ignore_missing(path, fs::remove_file(path))?;
        }
        ignore_missing(&self.side, fs::remove_dir(&self.side))
    }
}

/// A target in this process that serves one drive to this process.
struct Service {
    target: Running,
    members: [MemberAddr; 1],
    connect: ConnectOptions,
}

impl Service {
    fn start(
        files: &Files,
        superblock: &Superblock,
        head: Arc<dyn Drive>,
        body: Arc<dyn Drive>,
        options: &ImageOptions,
    ) -> Result<Self, ImageError> {
        // An initiator that does not know this name is refused.
        let secret = random_uuid()?;
        let host_nqn = format!("nqn.2014-08.org.nvmexpress:uuid:{secret}");
        // An existing log keeps its size.
        let log_size = match options.accept_lost_log && !files.log.exists() {
            true => format!(",size={}", log_bytes(stream_count())),
            false => String::new(),
        };
        let config = Config {
            listen: vec!["127.0.0.1:0".into()],
            subnqn: Some(format!("nqn.2014-08.org.nvmexpress:riofs:{secret}")),
            namespaces: vec![NamespaceOptions {
                drive: spec_of(&files.image),
                nsid: Some(1),
                uuid: Some(superblock.uuid_text()),
                nguid: Some(superblock.uuid_text().replace('-', "")),
                lba_size: None,
                ana_group: None,
            }],
            log: Some(format!("{}{log_size}", spec_of(&files.log))),
            accept_lost_log: options.accept_lost_log,
            hosts: Some(vec![host_nqn.clone()]),
            hosts_are_secret: true,
            reactors: Some((cores() / 2).clamp(1, REACTORS_MAX)),
            ..Config::default()
        };
        let target = Target::start_on(&config, &[Arc::new(JoinedDrive::new(head, body))])?;
        let address = target.addresses()[0];
        let members = [MemberAddr {
            host: address.ip().to_string(),
            port: address.port(),
            nqn: Some(target.subnqn().to_owned()),
            nsid: 1,
        }];
        let connect = ConnectOptions { host_nqn, ..ConnectOptions::default() };
        Ok(Self { target, members, connect })
    }
}

/// The state of an image.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ImageState {
    /// Whether a process has it locked, as one that has it mounted does.
    pub is_in_use: bool,
    /// Whether it is mounted, or was not unmounted.
    pub is_dirty: bool,
    /// The errors that the file system has recorded since the last check that found no damage.
    pub errors: u32,
    /// Its size in bytes.
    pub bytes: u64,
    /// The UUID of the file system.
    pub uuid: String,
}

/// Finds the state of the image at `path`. Changes nothing.
///
/// # Errors
/// [`ImageError`].
pub fn image_state(path: &Path) -> Result<ImageState, ImageError> {
    check_kind(path)?;
    let file = File::open(path).map_err(ImageError::os(path, "open it"))?;
    let bytes = file.metadata().map_err(ImageError::os(path, "inspect it"))?.len();
    let superblock = read_superblock(path)?;
    // A shared lock, which ends with the file, disturbs no other program that reads the state.
    let is_in_use = matches!(file.try_lock_shared(), Err(fs::TryLockError::WouldBlock));
    Ok(ImageState {
        is_in_use,
        is_dirty: superblock.is_dirty,
        errors: superblock.errors,
        bytes,
        uuid: superblock.uuid_text(),
    })
}

fn read_superblock(path: &Path) -> Result<Superblock, ImageError> {
    Superblock::read(path)
        .map_err(|source| ImageError::Superblock { path: path.display().to_string(), source })
}

/// The side folder of the image at `path`.
#[must_use]
pub fn side_folder(path: &Path) -> PathBuf {
    let mut name = path.as_os_str().to_owned();
    name.push(".rio");
    name.into()
}

/// Checks that there is a regular file at `path`.
fn check_kind(path: &Path) -> Result<(), ImageError> {
    let kind = fs::metadata(path).map_err(ImageError::os(path, "inspect it"))?.file_type();
    let path = || path.display().to_string();
    if kind.is_block_device() {
        return Err(ImageError::Device { path: path() });
    }
    match kind.is_file() {
        true => Ok(()),
        false => Err(ImageError::NotFile { path: path() }),
    }
}

/// The specification of a file, as a drive or as a log.
fn spec_of(path: &Path) -> String {
    format!("file:{}", escape_commas(&path.to_string_lossy()))
}

/// Makes the name of the side folder durable.
fn sync_folder_of(side: &Path) -> Result<(), ImageError> {
    let parent = side.parent().unwrap_or(Path::new("/"));
    let synced = File::open(parent).and_then(|folder| folder.sync_all());
    synced.map_err(ImageError::os(parent, "write it to the disk"))
}

fn cores() -> usize {
    std::thread::available_parallelism().map_or(1, usize::from)
}

/// One stream more than there are cores: each core has one for its files, and the main journal has
/// one.
fn stream_count() -> usize {
    (cores() + 1).clamp(STREAMS.0, STREAMS.1)
}

/// The size of the ordering log for so many streams.
fn log_bytes(streams: usize) -> u64 {
    (streams as u64 + 1) * LOG_BYTES_PER_STREAM
}

/// A random UUID of the kernel.
fn random_uuid() -> Result<String, ImageError> {
    let path = Path::new("/proc/sys/kernel/random/uuid");
    let text = fs::read_to_string(path).map_err(ImageError::os(path, "read it"))?;
    Ok(text.trim().to_owned())
}

//! Mounting a file system through FUSE, and the threads that serve it.
//!
//! | threads | work |
//! |---|---|
//! | `fuser-N` | each reads a request of the kernel, makes the call, and answers |
//! | `riofs-tick` | the work of the background: commits, write-back, checkpoints |
//! | the caller's | waits until the file system is unmounted |
//!
//! A thread that makes an `fsync` waits until it is durable. So there are more threads than cores:
//! the others read requests meanwhile.

mod adapter;
mod convert;
mod ioctl;
mod ticker;

use std::io;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::Arc;

use fuser::{Config, MountOption, Session, SessionACL, SessionUnmounter};
use riopipe_fs_core::fs::Fs;
use rustix::fs::{AtFlags, CWD, StatxFlags, statx};
use rustix::mount::{UnmountFlags, unmount};

use self::adapter::Adapter;
pub use self::convert::now;
pub use self::ticker::Ticker;

/// The device of FUSE.
const DEVICE: &str = "/dev/fuse";
/// The usual number of threads that serve requests.
pub const DEFAULT_THREADS: usize = 16;

/// The options of a mount.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct FuseOptions {
    /// The name of the device that `mount` and `df` show, such as the path of an image.
    pub source: String,
    /// Refuse all changes.
    pub read_only: bool,
    /// Let all users use the files, as their permissions allow. Root always does. Others need
    /// `user_allow_other` in `/etc/fuse.conf`.
    pub allow_other: bool,
    /// The threads that serve requests. As many calls of `fsync` wait at the same time.
    pub threads: usize,
}

/// Why a file system is not mounted, or did not end in order.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum FuseError {
    /// The kernel has no FUSE, or a container has no access to it.
    #[error(
        "{DEVICE} is missing: load the module (modprobe fuse), or give the container the device \
         (docker run --device {DEVICE} --cap-add SYS_ADMIN)"
    )]
    NoDevice,
    /// The directory can't be used.
    #[error("{path}: {source}")]
    Directory {
        /// The path of the directory.
        path: String,
        /// The reason.
        source: io::Error,
    },
    /// The mount was refused.
    #[error("can't mount on {path}: {source}{}", hint(.source))]
    Mount {
        /// The path of the directory.
        path: String,
        /// The reason.
        source: io::Error,
    },
    /// The connection with the kernel broke.
    #[error("the connection with the kernel has failed: {0}")]
    Session(#[source] io::Error),
    /// The threads can't be started.
    #[error("can't start a thread: {0}")]
    Thread(#[source] io::Error),
    /// The file system could not be unmounted in order. The next mount recovers it.
    #[error("not unmounted in order, the next mount recovers what was durable: {0}")]
    Unmount(String),
}

fn hint(error: &io::Error) -> &'static str {
    match error.kind() {
        io::ErrorKind::NotFound => {
            ": a user other than root needs the program fusermount3 (package fuse3)"
        }
        io::ErrorKind::PermissionDenied => {
            ": the directory must belong to the user, and --allow-other needs user_allow_other in \
             /etc/fuse.conf"
        }
        _ => "",
    }
}

/// A mounted file system, which is not served yet: [`serve`](Self::serve) does that.
pub struct Mount {
    fs: Arc<Fs>,
    session: Session<Adapter>,
    unmounter: Unmounter,
    ticker: Ticker,
}

impl Mount {
    /// Mounts `fs` on a directory.
    ///
    /// # Errors
    /// [`FuseError`]. The file system is as before.
    pub fn new(fs: Arc<Fs>, directory: &Path, options: &FuseOptions) -> Result<Self, FuseError> {
        let text = || directory.display().to_string();
        if !Path::new(DEVICE).exists() {
            return Err(FuseError::NoDevice);
        }
        let at_directory = |source| FuseError::Directory { path: text(), source };
        let directory = directory.canonicalize().map_err(at_directory)?;
        if !directory.metadata().map_err(at_directory)?.is_dir() {
            return Err(at_directory(io::ErrorKind::NotADirectory.into()));
        }
        let adapter = Adapter::new(Arc::clone(&fs));
        let mut session = Session::new(adapter, &directory, &config(options))
            .map_err(|source| FuseError::Mount { path: text(), source })?;
        let unmounter = Unmounter::new(&directory, session.unmount_callable());
        let ticker = Ticker::start(Arc::clone(&fs)).map_err(FuseError::Thread)?;
        Ok(Self { fs, session, unmounter, ticker })
    }

    /// The handle by which another thread unmounts it.
    #[must_use]
    pub fn unmounter(&self) -> Unmounter {
        self.unmounter.clone()
    }

    /// Serves the file system until it is unmounted, by `umount` or by an [`Unmounter`]. Then makes
    /// everything durable, and marks the file system as unmounted.
    ///
    /// # Errors
    /// [`FuseError::Session`], [`FuseError::Unmount`].
    pub fn serve(self) -> Result<(), FuseError> {
        let Self { fs, session, unmounter: _, ticker } = self;
        let served = session.run();
        ticker.stop();
        // Even after a failed connection.
        unmount_unserved(&fs)?;
        served.map_err(FuseError::Session)
    }
}

/// Unmounts a file system that is not served, or not any more: makes everything durable, and marks
/// it as unmounted.
///
/// # Errors
/// [`FuseError::Unmount`].
pub fn unmount_unserved(fs: &Fs) -> Result<(), FuseError> {
    fs.unmount(now())
        .map_err(|error| FuseError::Unmount(fs.failure().unwrap_or_else(|| error.to_string())))
}

fn config(options: &FuseOptions) -> Config {
    let is_root = rustix::process::geteuid().is_root();
    let mut config = Config::default();
    config.mount_options = vec![
        MountOption::FSName(options.source.clone()),
        MountOption::Subtype("riofs".to_owned()),
        MountOption::DefaultPermissions,
    ];
    if options.read_only {
        config.mount_options.push(MountOption::RO);
    }
    if is_root {
        // As a mount of ext4.
        config.mount_options.extend([MountOption::Dev, MountOption::Suid]);
    }
    let is_for_all = is_root || options.allow_other;
    config.acl = if is_for_all { SessionACL::All } else { SessionACL::Owner };
    config.n_threads = Some(options.threads.max(1));
    config
}

/// A handle by which any thread unmounts a file system. [`Mount::serve`] returns afterwards.
#[derive(Clone, Debug)]
pub struct Unmounter {
    directory: Arc<PathBuf>,
    /// The number of the connection in `/sys/fs/fuse/connections`.
    connection: Option<u32>,
    unmounter: Arc<std::sync::Mutex<SessionUnmounter>>,
}

impl Unmounter {
    fn new(directory: &Path, unmounter: SessionUnmounter) -> Self {
        // No thread answers requests yet, so the kernel may not ask for the attributes.
        let found = statx(CWD, directory, AtFlags::STATX_DONT_SYNC, StatxFlags::TYPE);
        Self {
            directory: Arc::new(directory.to_owned()),
            connection: found.ok().map(|found| found.stx_dev_minor),
            unmounter: Arc::new(std::sync::Mutex::new(unmounter)),
        }
    }

    /// Unmounts the file system. If programs still use it, it is taken out of the directory tree at
    /// once, and their next calls fail: what they have written so far becomes durable. Returns
    /// whether programs still used it.
    ///
    /// # Errors
    /// The system refuses.
    pub fn unmount(&self) -> io::Result<bool> {
        let mut unmounter = self.unmounter.lock().unwrap_or_else(|error| error.into_inner());
        match unmounter.unmount() {
            Ok(()) => Ok(false),
            Err(error) if error.raw_os_error() == Some(libc::EBUSY) => self.detach().map(|()| true),
            Err(error) => Err(error),
        }
    }

    /// Takes a file system that is in use out of the directory tree, and ends the connection: else
    /// it would be served until the last program has closed its files.
    fn detach(&self) -> io::Result<()> {
        let directory = self.directory.as_path();
        // What programs have changed in mapped files is with the kernel.
        if let Ok(directory) = std::fs::File::open(directory) {
            let _ = rustix::fs::syncfs(directory);
        }
        if unmount(directory, UnmountFlags::DETACH | UnmountFlags::FORCE).is_ok() {
            return Ok(());
        }
        // Users other than root may only do it by this program.
        let mut command = Command::new("fusermount3");
        let status = command.args(["-u", "-z", "-q", "--"]).arg(directory).status()?;
        if !status.success() {
            return Err(io::Error::other("fusermount3 -u -z has failed"));
        }
        let connection = self.connection.ok_or_else(|| io::Error::other("unknown connection"))?;
        let aborted = std::fs::write(format!("/sys/fs/fuse/connections/{connection}/abort"), "1");
        if let Err(error) = aborted {
            tracing::warn!(
                "programs still use files: waiting until they have closed them ({error})"
            );
        }
        Ok(())
    }
}

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

use std::ffi::CString;
use std::fs::File;
use std::io;
use std::os::fd::AsRawFd;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::mpsc::{self, Receiver, Sender};
use std::thread;

use fuser::{Config, MountOption, Session, SessionACL};
use riopipe_fs_core::fs::Fs;
use rustix::mount::{MountFlags, UnmountFlags, mount, unmount};

use self::adapter::Adapter;
pub use self::convert::now;
pub use self::ticker::Ticker;
use crate::mounts::{self, MountPoint};

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
    #[error("{path}: {source}{}", directory_hint(path, source))]
    Directory {
        /// The path of the directory.
        path: String,
        /// The reason.
        source: io::Error,
    },
    /// A file system of RioFS is mounted there.
    #[error(
        "a file system of RioFS is mounted on {path} already: `rio fs umount {path}` unmounts it, or \
         takes off a mount whose process has ended"
    )]
    Mounted {
        /// The path of the directory.
        path: String,
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

fn directory_hint(path: &str, error: &io::Error) -> String {
    match error.raw_os_error() {
        Some(libc::ENOTCONN) => format!(
            ": the process that served a mount there has ended: `rio fs umount {path}` takes the \
             mount off"
        ),
        Some(libc::ENOENT) => format!(": make the directory first (mkdir {path})"),
        _ => String::new(),
    }
}

/// # Errors
/// [`FuseError::NoDevice`].
pub(crate) fn check_device() -> Result<(), FuseError> {
    if Path::new(DEVICE).exists() { Ok(()) } else { Err(FuseError::NoDevice) }
}

/// Checks, before the file system is opened and recovered, that it can be mounted on a directory.
/// Returns the directory's whole path.
///
/// # Errors
/// FUSE is missing, the directory can't be used, or a file system of RioFS is mounted there.
pub fn check_directory(directory: &Path) -> Result<PathBuf, FuseError> {
    let text = || directory.display().to_string();
    check_device()?;
    if MountPoint::on(directory).is_ok_and(|found| found.is_some()) {
        return Err(FuseError::Mounted { path: text() });
    }
    let at_directory = |source| FuseError::Directory { path: text(), source };
    let directory = directory.canonicalize().map_err(at_directory)?;
    if !directory.metadata().map_err(at_directory)?.is_dir() {
        return Err(at_directory(io::ErrorKind::NotADirectory.into()));
    }
    Ok(directory)
}

/// The message of fusermount3 ends with a newline.
fn one_line(error: io::Error) -> io::Error {
    match error.raw_os_error() {
        Some(_) => error,
        None => io::Error::new(error.kind(), error.to_string().trim().to_owned()),
    }
}

fn hint(error: &io::Error) -> &'static str {
    match error.kind() {
        io::ErrorKind::NotFound => {
            ": a user other than root needs the program fusermount3: it is in the package fuse3 \
             (apt-get install fuse3)"
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
    ends: Receiver<End>,
    ticker: Ticker,
}

/// The end of the service of a mount.
#[derive(Debug)]
enum End {
    /// The kernel has ended the connection.
    Disconnected(io::Result<()>),
    /// The directory tree does not have the mount any more, but programs have files open, and the
    /// kernel keeps the connection for them.
    Abandoned,
}

impl Mount {
    /// Mounts `fs` on a directory.
    ///
    /// # Errors
    /// [`FuseError`]. The file system is as before.
    pub fn new(fs: Arc<Fs>, directory: &Path, options: &FuseOptions) -> Result<Self, FuseError> {
        let text = || directory.display().to_string();
        let directory = check_directory(directory)?;
        let adapter = Adapter::new(Arc::clone(&fs));
        let session = session(adapter, &directory, options)
            .map_err(|source| FuseError::Mount { path: text(), source: one_line(source) })?;
        let (end, ends) = mpsc::channel();
        let unmounter = Unmounter::new(&directory, end);
        let ticker = Ticker::start(Arc::clone(&fs)).map_err(FuseError::Thread)?;
        Ok(Self { fs, session, unmounter, ends, ticker })
    }

    /// The handle by which another thread unmounts it.
    #[must_use]
    pub fn unmounter(&self) -> Unmounter {
        self.unmounter.clone()
    }

    /// Serves the file system until it is unmounted, by `umount` or by an [`Unmounter`]. Then calls
    /// `on_end`, makes everything durable, and marks the file system as unmounted.
    ///
    /// If programs have files open, and the kernel keeps the connection for them, they are served to
    /// the end of this process. They can change nothing more after this has returned.
    ///
    /// # Errors
    /// [`FuseError::Session`], [`FuseError::Unmount`], [`FuseError::Thread`].
    pub fn serve(self, on_end: impl FnOnce()) -> Result<(), FuseError> {
        let Self { fs, session, unmounter, ends, ticker } = self;
        let end = unmounter.end.clone();
        let run = || session.run();
        let begun = thread::Builder::new()
            .name("riofs-session".to_owned())
            .spawn(move || run_to_end(run, &end));
        begun.map_err(FuseError::Thread)?;
        let served = match ends.recv() {
            Ok(End::Disconnected(served)) => served,
            // `unmounter` is a sender, so this ends with a message.
            Ok(End::Abandoned) | Err(_) => Ok(()),
        };
        drop(unmounter);
        on_end();
        ticker.stop();
        // Even after a failed connection.
        unmount_unserved(&fs)?;
        served.map_err(FuseError::Session)
    }
}

/// Serves a connection to its end, and reports that. A panic is an end, too: nothing else would end
/// the wait of [`Mount::serve`], which has a sender itself.
fn run_to_end(run: impl FnOnce() -> io::Result<()>, end: &Sender<End>) {
    let served = catch_unwind(AssertUnwindSafe(run));
    let served = served.unwrap_or_else(|_| Err(io::Error::other("the server has panicked")));
    // Nothing receives it after the mount was abandoned.
    let _ = end.send(End::Disconnected(served));
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
    // fusermount3 gets the options of other users as one text.
    let source = match is_root {
        true => options.source.clone(),
        false => escape_source(&options.source),
    };
    let mut config = Config::default();
    config.mount_options = vec![
        MountOption::FSName(source),
        MountOption::Subtype("riofs".to_owned()),
        MountOption::DefaultPermissions,
    ];
    if options.read_only {
        config.mount_options.push(MountOption::RO);
    }
    let is_for_all = is_root || options.allow_other;
    config.acl = if is_for_all { SessionACL::All } else { SessionACL::Owner };
    config.n_threads = Some(options.threads.max(1));
    config
}

/// The name of a source in a list of options, which commas separate.
fn escape_source(source: &str) -> String {
    source.replace('\\', "\\\\").replace(',', "\\,")
}

/// Mounts the file system, and begins to serve it.
fn session(
    adapter: Adapter,
    directory: &Path,
    options: &FuseOptions,
) -> io::Result<Session<Adapter>> {
    let config = config(options);
    if rustix::process::geteuid().is_root() {
        let device = File::options().read(true).write(true).open(DEVICE)?;
        match mount_as_root(&device, directory, options) {
            Ok(()) => {
                let begun = Session::from_fd(adapter, device.into(), config.acl, config);
                return begun.inspect_err(|_| {
                    let _ = unmount(directory, UnmountFlags::DETACH);
                });
            }
            // Root of a container without the right to mount: as other users.
            Err(rustix::io::Errno::PERM) => {}
            Err(error) => return Err(error.into()),
        }
    }
    Session::new(adapter, directory, &config)
}

/// Mounts as a mount of ext4: with device nodes and set-user-ID programs, for all users. fuser would
/// not give the mount its type, by which [`MountPoint`] finds it.
fn mount_as_root(device: &File, directory: &Path, options: &FuseOptions) -> rustix::io::Result<()> {
    let flags = match options.read_only {
        true => MountFlags::RDONLY,
        false => MountFlags::empty(),
    };
    let data = format!(
        "fd={},rootmode=40000,user_id=0,group_id=0,default_permissions,allow_other",
        device.as_raw_fd()
    );
    let data = CString::new(data).map_err(|_| rustix::io::Errno::INVAL)?;
    mount(options.source.as_str(), directory, mounts::TYPE, flags, data.as_c_str())
}

/// A handle by which any thread unmounts a file system. [`Mount::serve`] returns afterwards.
#[derive(Clone, Debug)]
pub struct Unmounter {
    directory: Arc<PathBuf>,
    /// `None`: the kernel's list of mounts can't be read.
    mount: Option<Arc<MountPoint>>,
    end: Sender<End>,
}

impl Unmounter {
    fn new(directory: &Path, end: Sender<End>) -> Self {
        Self {
            end,
            directory: Arc::new(directory.to_owned()),
            mount: MountPoint::on(directory).ok().flatten().map(Arc::new),
        }
    }

    /// The mount, as the kernel lists it. `None`: its list can't be read.
    #[must_use]
    pub fn mount_point(&self) -> Option<&MountPoint> {
        self.mount.as_deref()
    }

    /// Unmounts the file system. If programs still use it, it is taken out of the directory tree at
    /// once, and their next calls fail: what they have written so far becomes durable. Returns
    /// whether programs still used it.
    ///
    /// # Errors
    /// The system refuses.
    pub fn unmount(&self) -> io::Result<bool> {
        let unmounted = match &self.mount {
            Some(mount) => mount.unmount(),
            None => Ok(unmount(self.directory.as_path(), UnmountFlags::empty())?),
        };
        match unmounted {
            Ok(()) => Ok(false),
            Err(error) if error.kind() == io::ErrorKind::ResourceBusy => {
                self.detach().map(|()| true)
            }
            Err(error) => Err(error),
        }
    }

    /// Takes a file system that is in use out of the directory tree, and ends the connection: else
    /// it would be served until the last program has closed its files. Where the kernel does not let
    /// a user end it (`/sys/fs/fuse/connections` is missing), the service ends without it.
    fn detach(&self) -> io::Result<()> {
        let directory = self.directory.as_path();
        // Data that programs have changed in mapped files is with the kernel.
        if let Ok(directory) = File::open(directory) {
            let _ = rustix::fs::syncfs(directory);
        }
        if unmount(directory, UnmountFlags::DETACH | UnmountFlags::FORCE).is_ok() {
            return Ok(());
        }
        let mount = self.mount.as_ref().ok_or_else(|| io::Error::other("unknown connection"))?;
        mount.take_off()?;
        // The minor number of the device is that of the connection.
        let connection = mount.device.rsplit(':').next().unwrap_or_default();
        let aborted = std::fs::write(format!("/sys/fs/fuse/connections/{connection}/abort"), "1");
        if let Err(error) = aborted {
            // Without the kernel's files of connections only the end of the process ends one.
            tracing::debug!(%error, "the connection is left to the end of the process");
            let _ = self.end.send(End::Abandoned);
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_server_that_panics_ends_the_wait_for_it() {
        let (end, ends) = mpsc::channel();
        let served = end.clone();
        // As in `serve`, `end` still is a sender when the thread has ended.
        let server = thread::spawn(move || run_to_end(|| panic!("planted"), &served));
        assert!(server.join().is_ok(), "the panic ends here");
        let Ok(End::Disconnected(Err(error))) = ends.try_recv() else { panic!("no end") };
        assert!(error.to_string().contains("panicked"), "{error}");
        run_to_end(|| Ok(()), &end);
        assert!(matches!(ends.try_recv(), Ok(End::Disconnected(Ok(())))));
    }

    #[test]
    fn commas_in_a_source_do_not_end_it() {
        assert_eq!(escape_source("a,b\\c"), "a\\,b\\\\c");
    }
}

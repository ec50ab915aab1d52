//! Opening the files and block devices under drives and logs, locked and with their space reserved.

use std::fs::{File, Metadata, OpenOptions, TryLockError};
use std::io;
use std::os::unix::fs::{FileTypeExt, MetadataExt, OpenOptionsExt};
use std::path::Path;
use std::time::{Duration, Instant};

use riopipe_order::block_device::{BLOCK_BYTES, Gone};
use rustix::fs::{FallocateFlags, fallocate};

use crate::error::OpenError;

/// Default wait for a lock that is taken: enough for a process that is ending, and for a short
/// inspection of a new device by another one.
pub(crate) const LOCK_WAIT_SHORT: Duration = Duration::from_millis(200);
/// Interval between two attempts to lock.
const LOCK_PAUSE: Duration = Duration::from_millis(20);

/// The wait for a medium that another process has locked: attempts for a limited time.
///
/// After a process has died, the kernel keeps its locks while its writes are in flight, because they
/// may still land (T8). So a lock that is taken now may soon be free.
#[derive(Debug, Clone, Copy)]
pub(crate) struct LockWait {
    /// The time limit.
    wait: Duration,
    /// The end of the time limit.
    until: Instant,
    /// The wait has been logged.
    reported: bool,
}

impl LockWait {
    pub(crate) fn within(wait: Duration) -> LockWait {
        let now = Instant::now();
        LockWait { wait, until: now.checked_add(wait).unwrap_or(now), reported: false }
    }

    /// Sleeps until the next attempt. Returns false if the time is over.
    fn sleep(&mut self, path: &str) -> bool {
        let left = self.until.saturating_duration_since(Instant::now());
        if left.is_zero() {
            return false;
        }
        if !self.reported && self.wait > LOCK_WAIT_SHORT {
            tracing::warn!(
                path,
                "in use by another process: waiting up to {} s until it lets go (a killed one does \
                 once its last write has landed)",
                self.wait.as_secs_f64()
            );
        }
        self.reported = true;
        std::thread::sleep(LOCK_PAUSE.min(left));
        true
    }
}

/// A file or device that this process has locked and will serve.
#[derive(Debug)]
pub(crate) struct Medium {
    pub(crate) file: File,
    pub(crate) path: String,
    /// Size in bytes: whole blocks, at least one.
    pub(crate) len: u64,
    /// Reads and writes bypass the page cache.
    pub(crate) direct: bool,
    /// All of its space was reserved when it was opened (files), or belongs to it (devices).
    pub(crate) reserved: bool,
    pub(crate) device: bool,
}

/// The treatment of a file's space before it is used.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Reserve {
    /// The file keeps holes: a full disk fails writes later.
    No,
    /// Space is reserved if a size is given and the file system can do it.
    Try,
    /// Space must be reserved: a hole in a mapping that can't be filled ends the process (SIGBUS).
    Must,
}

impl Medium {
    /// Opens the file at `path`, or creates it if it doesn't exist and `size` (bytes) is given.
    ///
    /// An existing file must have exactly that size: a truncated file, or another drive's, is not
    /// accepted in its place.
    pub(crate) fn file(
        path: &str,
        size: Option<u64>,
        reserve: Reserve,
        direct: bool,
        busy: LockWait,
    ) -> Result<Medium, OpenError> {
        open_or_create(path, size.is_some(), direct)?.into_medium(path, size, reserve, busy)
    }

    /// Gives a file that no other process uses its size and its space; it has `there` bytes.
    fn prepare(
        &mut self,
        there: u64,
        size: Option<u64>,
        reserve: Reserve,
    ) -> Result<(), OpenError> {
        let problem = match (there, size) {
            (0, None) => Some("the file is empty: add ,size= to give it a size".to_owned()),
            (len, None) if !len.is_multiple_of(BLOCK_BYTES as u64) => Some(format!(
                "the file has {len} bytes, which is not a whole number of 4096-byte blocks: it was \
                 cut short, or is something else (truncate -s %4096 would round its size up)"
            )),
            (len, Some(size)) if len != 0 && len != size => Some(format!(
                "the file has {len} bytes, but size={size}: leave size= out to use it as it is, or \
                 remove it to start afresh"
            )),
            _ => None,
        };
        if let Some(problem) = problem {
            return Err(OpenError::Size { path: self.path.clone(), problem });
        }
        self.len = size.unwrap_or(there);
        let reserve = match (reserve, size) {
            (Reserve::Try, None) => Reserve::No,
            (reserve, _) => reserve,
        };
        self.reserve(reserve)
    }

    /// Removes the name of a file that was created for an attempt that failed. The file must be
    /// locked: no process serves it then, and a process that waits for the lock will find that the
    /// file has no name.
    fn remove_created(&self) {
        let id = |metadata: Metadata| (metadata.dev(), metadata.ino());
        let named = std::fs::symlink_metadata(&self.path).map(id);
        // Another process may have moved the file, and put another one in its place.
        if named.is_ok_and(|named| self.file.metadata().is_ok_and(|ours| id(ours) == named)) {
            // If the file remains, its size is wrong, and the next attempt reports that.
            let _ = std::fs::remove_file(&self.path);
        }
    }

    /// Opens the block device at `path`, for this process alone.
    pub(crate) fn device(path: &str, mut busy: LockWait) -> Result<Medium, OpenError> {
        let os = |doing| move |source| OpenError::Os { path: path.to_owned(), doing, source };
        let metadata = std::fs::metadata(path).map_err(os("inspect it"))?;
        if !metadata.file_type().is_block_device() {
            return Err(OpenError::Kind {
                path: path.to_owned(),
                problem: format!("not a block device: for a file write file:{path}"),
            });
        }
        // O_EXCL fails on a block device that is mounted or otherwise in use.
        let file = loop {
            let opened = OpenOptions::new()
                .read(true)
                .write(true)
                .custom_flags(libc::O_DIRECT | libc::O_EXCL)
                .open(path);
            match opened {
                Ok(file) => break file,
                Err(error) if error.raw_os_error() == Some(libc::EBUSY) => {
                    if !busy.sleep(path) {
                        return Err(OpenError::Locked { path: path.to_owned() });
                    }
                }
                Err(source) => return Err(os("open it")(source)),
            }
        };
        let len = io::Seek::seek(&mut &file, io::SeekFrom::End(0)).map_err(os("find its size"))?;
        let len = len / BLOCK_BYTES as u64 * BLOCK_BYTES as u64;
        if len == 0 {
            return Err(OpenError::Size {
                path: path.to_owned(),
                problem: "the device has no space for a single 4096-byte block".to_owned(),
            });
        }
        let medium =
            Medium { file, path: path.to_owned(), len, direct: true, reserved: true, device: true };
        medium.lock(busy)?;
        let unit = medium.queue_attribute("logical_block_size");
        if let Some(bytes) = unit.and_then(|text| text.trim().parse::<u64>().ok())
            && bytes > BLOCK_BYTES as u64
        {
            let problem = format!(
                "its blocks have {bytes} bytes: this needs 4096 or less, which many drives can be \
                 formatted to (nvme format --lbaf)"
            );
            return Err(OpenError::Kind { path: medium.path, problem });
        }
        Ok(medium)
    }

    /// Whether a power cut may take a completed write of the device, according to its queue's
    /// `write_cache`. Unknown counts as yes.
    pub(crate) fn device_has_volatile_cache(&self) -> bool {
        self.queue_attribute("write_cache").is_none_or(|cache| cache.trim() != "write through")
    }

    /// An attribute of the device's queue in sysfs.
    fn queue_attribute(&self, what: &str) -> Option<String> {
        let device = self.file.metadata().ok()?.rdev();
        let directory = format!("/sys/dev/block/{}:{}", libc::major(device), libc::minor(device));
        // A partition has the queue of its disk.
        ["queue", "../queue"]
            .iter()
            .find_map(|queue| std::fs::read_to_string(format!("{directory}/{queue}/{what}")).ok())
    }

    /// Checks that the file still exists with its full size. An error of the check itself proves
    /// nothing.
    pub(crate) fn check(&self) -> Result<(), Gone> {
        if self.device {
            return Ok(());
        }
        match self.file.metadata() {
            Ok(metadata) if metadata.nlink() == 0 => Err(Gone::Deleted),
            Ok(metadata) if metadata.len() < self.len => {
                Err(Gone::Truncated { bytes: metadata.len() })
            }
            _ => Ok(()),
        }
    }

    /// Locks the medium for one server (T8). The lock belongs to the open file and ends with its
    /// last user. Each write in flight is a user, even after its process has died.
    fn lock(&self, mut busy: LockWait) -> Result<(), OpenError> {
        loop {
            match self.file.try_lock() {
                Ok(()) => return Ok(()),
                Err(TryLockError::WouldBlock) if busy.sleep(&self.path) => {}
                Err(TryLockError::WouldBlock) => {
                    return Err(OpenError::Locked { path: self.path.clone() });
                }
                Err(TryLockError::Error(source)) => {
                    let path = self.path.clone();
                    return Err(OpenError::Os { path, doing: "lock it", source });
                }
            }
        }
    }

    fn reserve(&mut self, reserve: Reserve) -> Result<(), OpenError> {
        let os = |doing, source| OpenError::Os { path: self.path.clone(), doing, source };
        if reserve != Reserve::No {
            match allocate(&self.file, 0, 0, self.len) {
                Ok(()) => {
                    self.reserved = true;
                    return Ok(());
                }
                Err(error) if is_unsupported(&error) && reserve == Reserve::Try => tracing::warn!(
                    path = self.path,
                    "this file system can't reserve space: a full disk will fail writes later"
                ),
                Err(error) if is_unsupported(&error) => {
                    return Err(OpenError::Kind {
                        path: self.path.clone(),
                        problem: "this file system can't reserve space (fallocate), and a mapped \
                                  file needs it: put it on ext4, XFS or tmpfs"
                            .to_owned(),
                    });
                }
                Err(error) => return Err(os("reserve its space", error)),
            }
        }
        self.file.set_len(self.len).map_err(|error| os("set its size", error))
    }
}

/// `fallocate(2)`.
pub(crate) fn allocate(file: &File, mode: i32, offset: u64, len: u64) -> io::Result<()> {
    Ok(fallocate(file, FallocateFlags::from_bits_retain(mode as u32), offset, len)?)
}

/// Whether the file system (or the device) lacks this operation.
pub(crate) fn is_unsupported(error: &io::Error) -> bool {
    matches!(error.raw_os_error(), Some(libc::EOPNOTSUPP | libc::ENOSYS))
}

/// A file that was opened, perhaps by several processes, and that has no server yet.
struct Opened {
    file: File,
    /// The file bypasses the page cache.
    direct: bool,
    /// This process created the file. Others may have opened it since, and may lock it first.
    created: bool,
}

impl Opened {
    /// Locks the file, and gives it its size if it has none.
    fn into_medium(
        self,
        path: &str,
        size: Option<u64>,
        reserve: Reserve,
        busy: LockWait,
    ) -> Result<Medium, OpenError> {
        let os = |doing| move |source| OpenError::Os { path: path.to_owned(), doing, source };
        let Opened { file, direct, created } = self;
        let metadata = file.metadata().map_err(os("inspect it"))?;
        if !metadata.is_file() {
            let problem = match metadata.file_type().is_block_device() {
                true => format!("a block device, not a file: write block:{path}"),
                false => "not a regular file".to_owned(),
            };
            return Err(OpenError::Kind { path: path.to_owned(), problem });
        }
        let path = path.to_owned();
        let mut medium = Medium { file, path, len: 0, direct, reserved: false, device: false };
        // A file belongs to the process that locks it, also if another one created it.
        medium.lock(busy)?;
        // The previous holder of the lock may have given the file its size, or removed its name.
        let metadata = medium.file.metadata().map_err(os("inspect it"))?;
        if metadata.nlink() == 0 {
            return Err(OpenError::NoSuchFile { path: medium.path });
        }
        let is_new = metadata.len() == 0;
        if let Err(error) = medium.prepare(metadata.len(), size, reserve) {
            // An unfinished file would make the next attempt fail. A file with a size had an owner
            // before, and stays.
            if created && is_new {
                medium.remove_created();
            }
            return Err(error);
        }
        if created || is_new {
            // A power cut that takes the file's name takes its bytes with it. The process that
            // created the name may have stopped before it made it durable.
            let parent = Path::new(&medium.path).parent().filter(|p| !p.as_os_str().is_empty());
            File::open(parent.unwrap_or(Path::new(".")))
                .and_then(|parent| parent.sync_all())
                .map_err(os("make its name durable in its directory"))?;
        }
        Ok(medium)
    }
}

/// Opens `path`, or creates a file there.
fn open_or_create(path: &str, create: bool, direct: bool) -> Result<Opened, OpenError> {
    let open = |direct: bool, new: bool| {
        OpenOptions::new()
            .read(true)
            .write(true)
            .create_new(new)
            .mode(0o600)
            .custom_flags(if direct { libc::O_DIRECT } else { 0 })
            .open(path)
    };
    let attempt = |direct: bool| match open(direct, false) {
        Err(error) if error.kind() == io::ErrorKind::NotFound && create => {
            open(direct, true).map(|file| (file, true))
        }
        other => other.map(|file| (file, false)),
    };
    let (mut result, mut direct) = (attempt(direct), direct);
    if direct && matches!(&result, Err(error) if error.raw_os_error() == Some(libc::EINVAL)) {
        tracing::warn!(path, "this file system has no direct I/O: using the page cache");
        direct = false;
        result = attempt(false);
    }
    match result {
        Ok((file, created)) => Ok(Opened { file, direct, created }),
        Err(error) if error.kind() == io::ErrorKind::NotFound && !create => {
            Err(OpenError::NoSuchFile { path: path.to_owned() })
        }
        Err(source) => Err(OpenError::Os {
            path: path.to_owned(),
            doing: if create { "open or create it" } else { "open it" },
            source,
        }),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const SIZE: Option<u64> = Some(64 << 10);
    /// A size that no file system supports.
    const TOO_LARGE: Option<u64> = Some(1 << 61);

    fn at_once() -> LockWait {
        LockWait::within(Duration::ZERO)
    }

    fn open(path: &str, size: Option<u64>) -> Result<Medium, OpenError> {
        Medium::file(path, size, Reserve::Must, false, at_once())
    }

    /// A file that this process has just created, and not locked yet.
    fn just_made(path: &str) -> Opened {
        let made = open_or_create(path, true, false).unwrap();
        assert!(made.created);
        made
    }

    fn in_folder(test: impl FnOnce(&str)) {
        let folder = tempfile::tempdir().unwrap();
        test(folder.path().join("medium").to_str().unwrap());
    }

    #[test]
    fn t8_a_file_stays_with_the_process_that_locked_it_first() {
        in_folder(|path| {
            let loser = just_made(path);
            let winner = open(path, SIZE).unwrap();
            let lost = loser.into_medium(path, SIZE, Reserve::Must, at_once()).err();
            assert!(matches!(lost, Some(OpenError::Locked { .. })), "{lost:?}");
            winner.check().unwrap();
            assert!(Path::new(path).exists());
        });
    }

    #[test]
    fn t8_a_file_served_in_between_is_not_treated_as_new() {
        in_folder(|path| {
            let late = just_made(path);
            drop(open(path, SIZE).unwrap());
            let refused = late.into_medium(path, Some(128 << 10), Reserve::Must, at_once()).err();
            assert!(matches!(refused, Some(OpenError::Size { .. })), "{refused:?}");
            open(path, None).unwrap();
        });
    }

    #[test]
    fn t8_an_unusable_new_file_is_removed_and_no_other() {
        in_folder(|path| {
            assert!(open(path, TOO_LARGE).is_err());
            assert!(!Path::new(path).exists(), "an unfinished file remains");
            // Another file has taken the name before this one was locked.
            let moved = just_made(path);
            std::fs::rename(path, format!("{path}-moved")).unwrap();
            drop(open(path, SIZE).unwrap());
            assert!(moved.into_medium(path, TOO_LARGE, Reserve::Must, at_once()).is_err());
            open(path, None).unwrap();
            // A file that existed before, although it is empty.
            let empty = format!("{path}-empty");
            File::create(&empty).unwrap();
            assert!(open(&empty, TOO_LARGE).is_err());
            assert!(Path::new(&empty).exists());
        });
    }
}

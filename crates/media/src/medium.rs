//! Opening the files and block devices under drives and logs, locked and with their space reserved.
//!
//! A file is opened in these steps:
//!
//! 1. open or create it ([`open_or_create`]),
//! 2. lock it, perhaps after a wait for another process ([`LockWait`]),
//! 3. check its size, or give it its size and its space,
//! 4. make the name of a new file durable.
//!
//! Several processes may open one file at the same time. Only the process that has the lock changes
//! the file.

use std::fs::{File, Metadata, OpenOptions, TryLockError};
use std::io;
use std::os::unix::fs::{FileTypeExt, MetadataExt, OpenOptionsExt};
use std::path::Path;
use std::time::{Duration, Instant};

use riopipe_order::block_device::{BLOCK_BYTES, Gone};
use rustix::fs::{FallocateFlags, fallocate};

use crate::error::OpenError;

/// Default wait for a lock that is taken: enough for a process that is ending, and for a process
/// that inspects a new device for a moment.
pub(crate) const LOCK_WAIT_SHORT: Duration = Duration::from_millis(200);
/// Interval between two attempts to lock.
const LOCK_PAUSE: Duration = Duration::from_millis(20);

/// The wait for a medium that another process has locked: attempts for a limited time.
///
/// After a process has died, the kernel keeps its locks while its writes are in flight, because the
/// writes may still land (trap T8). So a lock that is taken now may soon be free.
#[derive(Debug, Clone, Copy)]
pub(crate) struct LockWait {
    /// The time limit for all attempts.
    limit: Duration,
    /// The end of the time limit.
    deadline: Instant,
    /// Whether the wait has been logged.
    is_logged: bool,
}

impl LockWait {
    /// A wait that begins now, and ends after `limit`.
    pub(crate) fn within(limit: Duration) -> LockWait {
        let now = Instant::now();
        let deadline = now.checked_add(limit).unwrap_or(now);
        LockWait { limit, deadline, is_logged: false }
    }

    /// Sleeps until the next attempt. Returns false if the time limit has passed.
    fn sleep(&mut self, path: &str) -> bool {
        let left = self.deadline.saturating_duration_since(Instant::now());
        if left.is_zero() {
            return false;
        }
        if !self.is_logged && self.limit > LOCK_WAIT_SHORT {
            tracing::warn!(
                path,
                "in use by another process: waiting up to {} s until it lets go (a killed one does \
                 once its last write has landed)",
                rounded_seconds(self.limit)
            );
        }
        self.is_logged = true;
        std::thread::sleep(LOCK_PAUSE.min(left));
        true
    }
}

/// A time for display, in seconds with one decimal at most.
fn rounded_seconds(time: Duration) -> f64 {
    (time.as_secs_f64() * 10.0).round() / 10.0
}

/// A file or device that this process has locked and will serve.
#[derive(Debug)]
pub(crate) struct Medium {
    pub(crate) file: File,
    pub(crate) path: String,
    /// Size in bytes: whole blocks, at least one.
    pub(crate) len: u64,
    /// Whether reads and writes bypass the page cache.
    pub(crate) direct: bool,
    pub(crate) space: Space,
    /// Whether the medium is a block device, or the memory of one. Otherwise it is a regular file.
    pub(crate) device: bool,
}

/// The space of an opened medium.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Space {
    /// A file may have holes: a full disk fails writes to them.
    Holes,
    /// A file had space for all of its bytes when it was opened. An overwrite may need new space
    /// even so: the file system may copy on write, or share the blocks with another file.
    Allocated,
    /// The space was reserved when the file was opened. A device has its space.
    Reserved,
}

/// The treatment of a file's space before it is used.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Reserve {
    /// The file keeps holes: a full disk fails writes later.
    No,
    /// Space is reserved if a size is given and the file system can do it.
    Try,
    /// Space must be reserved. On a full disk, a store to a hole of a mapped file is lost (SIGBUS).
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
        lock_wait: LockWait,
    ) -> Result<Medium, OpenError> {
        open_or_create(path, size.is_some(), direct)?.into_medium(path, size, reserve, lock_wait)
    }

    /// Checks the size of a file that this process has locked, and gives a new file its size and
    /// its space. The file has `current_len` bytes now. `size` is the size that the specification
    /// gives.
    fn prepare(
        &mut self,
        current_len: u64,
        size: Option<u64>,
        reserve: Reserve,
    ) -> Result<(), OpenError> {
        let problem = match (current_len, size) {
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
        self.len = size.unwrap_or(current_len);
        if (reserve, size) == (Reserve::Try, None) {
            if self.is_allocated()? {
                self.space = Space::Allocated;
            }
            return self.reserve(Reserve::No);
        }
        self.reserve(reserve)
    }

    /// Whether the file has as much space as it has bytes, as one does whose space was reserved
    /// when it was created.
    fn is_allocated(&self) -> Result<bool, OpenError> {
        /// The unit of `st_blocks` in bytes, on every file system.
        const UNIT_BYTES: u64 = 512;
        let metadata = self.file.metadata().map_err(os_error(&self.path, "inspect it"))?;
        Ok(metadata.blocks().saturating_mul(UNIT_BYTES) >= self.len)
    }

    /// Removes the name of a file that was created for an attempt that failed. This process must
    /// have locked the file, so that no other process serves it. A process that waits for the lock
    /// will find that the file has no name.
    fn remove_created(&self) {
        let Ok(named_file) = std::fs::symlink_metadata(&self.path) else { return };
        let Ok(own_file) = self.file.metadata() else { return };
        // Another process may have moved the file, and put another one in its place.
        if is_same_file(&named_file, &own_file) {
            // If the file remains, its size is wrong, and the next attempt reports that.
            let _ = std::fs::remove_file(&self.path);
        }
    }

    /// Opens the block device at `path`, for this process alone.
    pub(crate) fn device(path: &str, mut lock_wait: LockWait) -> Result<Medium, OpenError> {
        let metadata = std::fs::metadata(path).map_err(os_error(path, "inspect it"))?;
        if !metadata.file_type().is_block_device() {
            return Err(OpenError::Kind {
                path: path.to_owned(),
                problem: format!("not a block device: for a file write file:{path}"),
            });
        }
        let file = open_device(path, &mut lock_wait)?;
        let bytes = io::Seek::seek(&mut &file, io::SeekFrom::End(0))
            .map_err(os_error(path, "find its size"))?;
        let len = bytes / BLOCK_BYTES as u64 * BLOCK_BYTES as u64;
        if len == 0 {
            return Err(OpenError::Size {
                path: path.to_owned(),
                problem: "the device has no space for a single 4096-byte block".to_owned(),
            });
        }
        let medium = Medium {
            file,
            path: path.to_owned(),
            len,
            direct: true,
            space: Space::Reserved,
            device: true,
        };
        medium.lock(lock_wait)?;
        if let Some(bytes) = medium.logical_block_bytes()
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

    /// The memory of a drive with `len` bytes, whose opened `file` maps it, for this process alone.
    pub(crate) fn region(
        file: File,
        path: &Path,
        len: u64,
        lock_wait: LockWait,
    ) -> Result<Medium, OpenError> {
        let path = path.display().to_string();
        let space = Space::Reserved;
        let medium = Medium { file, path, len, direct: false, space, device: true };
        medium.lock(lock_wait)?;
        Ok(medium)
    }

    /// Whether a power cut may take a completed write of the device, according to its queue's
    /// `write_cache`. Unknown counts as yes.
    pub(crate) fn device_has_volatile_cache(&self) -> bool {
        self.queue_attribute("write_cache").is_none_or(|cache| cache.trim() != "write through")
    }

    /// Whether the device writes a block of 4096 bytes wholly or not at all when power fails
    /// (assumption M1), as far as the system reports it.
    pub(crate) fn device_has_atomic_blocks(&self) -> bool {
        let attribute = |what: &str| self.queue_attribute(what)?.trim().parse().ok();
        atomic_bytes(attribute).is_some_and(|bytes| bytes >= BLOCK_BYTES as u64)
    }

    /// Whether a power cut takes nothing of what the device has completed, according to the system.
    pub(crate) fn device_is_protected(&self) -> bool {
        !self.device_has_volatile_cache() && self.device_has_atomic_blocks()
    }

    /// Size of the device's logical blocks in bytes, if the system reports it.
    fn logical_block_bytes(&self) -> Option<u64> {
        self.queue_attribute("logical_block_size")?.trim().parse().ok()
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

    /// Checks that the file still exists with its full size. If the check itself fails, the file
    /// counts as existing.
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

    /// Locks the medium, so that only one process serves it (trap T8). The lock belongs to the open
    /// file, and ends with the file's last user. Each write in flight is a user, even after its
    /// process has died.
    fn lock(&self, mut lock_wait: LockWait) -> Result<(), OpenError> {
        loop {
            match self.file.try_lock() {
                Ok(()) => return Ok(()),
                Err(TryLockError::WouldBlock) if lock_wait.sleep(&self.path) => {}
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

    /// Reserves the space of the file, as far as `reserve` asks for it, and sets the file's size.
    fn reserve(&mut self, reserve: Reserve) -> Result<(), OpenError> {
        if reserve != Reserve::No {
            match allocate(&self.file, 0, 0, self.len) {
                Ok(()) => {
                    self.space = Space::Reserved;
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
                Err(error) => return Err(os_error(&self.path, "reserve its space")(error)),
            }
        }
        self.file.set_len(self.len).map_err(os_error(&self.path, "set its size"))
    }
}

/// The most bytes that a device writes wholly or not at all: its physical block, or what it reports
/// for atomic writes (Linux 6.11) that may be as short as 4096 bytes. `attribute` reads an attribute
/// of its queue.
fn atomic_bytes(attribute: impl Fn(&str) -> Option<u64>) -> Option<u64> {
    let shortest = attribute("atomic_write_unit_min_bytes").filter(|bytes| *bytes > 0);
    let longest = attribute("atomic_write_unit_max_bytes");
    let by_command = longest.filter(|_| shortest.is_some_and(|min| min <= BLOCK_BYTES as u64));
    attribute("physical_block_size").max(by_command)
}

/// Converts an error of the system for the operation `doing` on the file or device at `path`.
fn os_error(path: &str, doing: &'static str) -> impl FnOnce(io::Error) -> OpenError {
    move |source| OpenError::Os { path: path.to_owned(), doing, source }
}

fn is_same_file(one: &Metadata, other: &Metadata) -> bool {
    (one.dev(), one.ino()) == (other.dev(), other.ino())
}

/// Opens the block device at `path` for direct I/O, after a wait for other users of the device.
fn open_device(path: &str, lock_wait: &mut LockWait) -> Result<File, OpenError> {
    loop {
        // O_EXCL fails on a block device that is mounted or otherwise in use.
        let opened = OpenOptions::new()
            .read(true)
            .write(true)
            .custom_flags(libc::O_DIRECT | libc::O_EXCL)
            .open(path);
        match opened {
            Ok(file) => return Ok(file),
            Err(error) if error.raw_os_error() == Some(libc::EBUSY) => {
                if !lock_wait.sleep(path) {
                    return Err(OpenError::Locked { path: path.to_owned() });
                }
            }
            Err(source) => return Err(os_error(path, "open it")(source)),
        }
    }
}

/// Calls `fallocate(2)` for `len` bytes from byte `offset` on. `mode` are its flags
/// (`FALLOC_FL_…`).
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
    /// Whether reads and writes bypass the page cache.
    direct: bool,
    /// Whether this process created the file. Other processes may have opened the file since, and
    /// may lock it first.
    created: bool,
}

impl Opened {
    /// Locks the file, and gives it its size if it has none.
    fn into_medium(
        self,
        path: &str,
        size: Option<u64>,
        reserve: Reserve,
        lock_wait: LockWait,
    ) -> Result<Medium, OpenError> {
        let Opened { file, direct, created } = self;
        let metadata = file.metadata().map_err(os_error(path, "inspect it"))?;
        if !metadata.is_file() {
            let problem = match metadata.file_type().is_block_device() {
                true => format!("a block device, not a file: write block:{path}"),
                false => "not a regular file".to_owned(),
            };
            return Err(OpenError::Kind { path: path.to_owned(), problem });
        }
        let mut medium = Medium {
            file,
            path: path.to_owned(),
            len: 0,
            direct,
            space: Space::Holes,
            device: false,
        };
        // A file belongs to the process that locks it, even if another process created it.
        medium.lock(lock_wait)?;
        // The previous holder of the lock may have given the file its size, or removed its name.
        let metadata = medium.file.metadata().map_err(os_error(path, "inspect it"))?;
        if metadata.nlink() == 0 {
            return Err(OpenError::NoSuchFile { path: medium.path });
        }
        let is_new = metadata.len() == 0;
        if let Err(error) = medium.prepare(metadata.len(), size, reserve) {
            // An unfinished file would make the next attempt fail. A file that has a size already
            // stays, because another process has used it.
            if created && is_new {
                medium.remove_created();
            }
            return Err(error);
        }
        if created || is_new {
            // A power cut that takes the file's name takes the file's bytes with it. The process
            // that created the file may have stopped before the name was durable.
            sync_parent_directory(path)
                .map_err(os_error(path, "make its name durable in its directory"))?;
        }
        Ok(medium)
    }
}

/// The directory of the file at `path`.
pub(crate) fn parent_directory(path: &str) -> &Path {
    match Path::new(path).parent() {
        Some(parent) if !parent.as_os_str().is_empty() => parent,
        _ => Path::new("."),
    }
}

/// Makes the name of the file at `path` durable in its directory.
fn sync_parent_directory(path: &str) -> io::Result<()> {
    File::open(parent_directory(path))?.sync_all()
}

/// Opens the file at `path`. Creates it if it does not exist and `create` is set.
///
/// Uses the page cache if the file system has no direct I/O.
fn open_or_create(path: &str, create: bool, direct: bool) -> Result<Opened, OpenError> {
    let mut result = try_open_or_create(path, create, direct);
    if direct && matches!(&result, Err(error) if error.raw_os_error() == Some(libc::EINVAL)) {
        tracing::warn!(path, "this file system has no direct I/O: using the page cache");
        result = try_open_or_create(path, create, false);
    }
    match result {
        Ok(opened) => Ok(opened),
        Err(error) if error.kind() == io::ErrorKind::NotFound && !create => {
            Err(OpenError::NoSuchFile { path: path.to_owned() })
        }
        Err(source) => {
            let doing = if create { "open or create it" } else { "open it" };
            Err(os_error(path, doing)(source))
        }
    }
}

/// One attempt of [`open_or_create`].
fn try_open_or_create(path: &str, create: bool, direct: bool) -> io::Result<Opened> {
    let open = |created: bool| -> io::Result<Opened> {
        let file = OpenOptions::new()
            .read(true)
            .write(true)
            .create_new(created)
            .mode(0o600)
            .custom_flags(if direct { libc::O_DIRECT } else { 0 })
            .open(path)?;
        Ok(Opened { file, direct, created })
    };
    match open(false) {
        Err(error) if error.kind() == io::ErrorKind::NotFound && create => open(true),
        result => result,
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
    fn m1_a_smaller_atomic_unit_is_seen() {
        const MIN: &str = "atomic_write_unit_min_bytes";
        const MAX: &str = "atomic_write_unit_max_bytes";
        const PHYSICAL: &str = "physical_block_size";
        for (reported, bytes) in [
            (&[][..], None),
            (&[(PHYSICAL, 512)], Some(512)),
            (&[(PHYSICAL, 4096)], Some(4096)),
            (&[(PHYSICAL, 512), (MIN, 0), (MAX, 0)], Some(512)),
            (&[(PHYSICAL, 512), (MIN, 512), (MAX, 16384)], Some(16384)),
            (&[(PHYSICAL, 512), (MIN, 512), (MAX, 2048)], Some(2048)),
            // Atomic writes, but none as short as a block.
            (&[(PHYSICAL, 512), (MIN, 8192), (MAX, 16384)], Some(512)),
        ] {
            let attribute =
                |what: &str| reported.iter().find(|(name, _)| *name == what).map(|(_, v)| *v);
            assert_eq!(atomic_bytes(attribute), bytes, "{reported:?}");
        }
    }

    #[test]
    fn times_for_display_are_rounded() {
        for (ms, shown) in [(9_999, "10"), (1_500, "1.5"), (996, "1"), (200, "0.2")] {
            assert_eq!(rounded_seconds(Duration::from_millis(ms)).to_string(), shown);
        }
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

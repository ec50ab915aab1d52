//! Opening what bytes rest on: files and block devices, locked and with their space reserved.

use std::fs::{File, Metadata, OpenOptions, TryLockError};
use std::io;
use std::os::unix::fs::{FileTypeExt, MetadataExt, OpenOptionsExt};
use std::path::Path;
use std::time::{Duration, Instant};

use riopipe_order::block_device::{BLOCK_SIZE, Gone};
use rustix::fs::{FallocateFlags, fallocate};

use crate::error::OpenError;

/// How long a busy lock is waited for by who doesn't say: long enough for a process that is just
/// ending, and for others' short looks at a new device.
pub(crate) const LOCK_WAIT_SHORT: Duration = Duration::from_millis(200);
/// How often a busy lock is tried.
const LOCK_PAUSE: Duration = Duration::from_millis(20);

/// What to do about a medium that another process has locked: try again for a time.
///
/// The kernel keeps a lock longer than the process if writes of it are still under way; that is as
/// it should be (they may land yet, T8), and so there is something to wait for.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Busy {
    wait: Duration,
    until: Instant,
    told: bool,
}

impl Busy {
    pub(crate) fn within(wait: Duration) -> Busy {
        let now = Instant::now();
        Busy { wait, until: now.checked_add(wait).unwrap_or(now), told: false }
    }

    /// Waits a little; false if the time is over.
    fn again(&mut self, path: &str) -> bool {
        let left = self.until.saturating_duration_since(Instant::now());
        if left.is_zero() {
            return false;
        }
        if !self.told && self.wait > LOCK_WAIT_SHORT {
            tracing::warn!(
                path,
                "in use by another process: waiting up to {} s until it lets go (a killed one does \
                 once its last write has landed)",
                self.wait.as_secs_f64()
            );
        }
        self.told = true;
        std::thread::sleep(LOCK_PAUSE.min(left));
        true
    }
}

/// A file or device that this process has locked and will serve.
#[derive(Debug)]
pub(crate) struct Medium {
    pub(crate) file: File,
    pub(crate) path: String,
    /// Bytes: whole blocks, at least one.
    pub(crate) len: u64,
    /// Reads and writes bypass the page cache.
    pub(crate) direct: bool,
    /// All its space was reserved when it was opened (files) or is its own (devices).
    pub(crate) reserved: bool,
    pub(crate) device: bool,
}

/// What to do about the space of a file before it is used.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Reserve {
    /// Leave holes: a full disk fails writes later.
    No,
    /// Reserve it when a size is given and the file system can.
    Try,
    /// Without it there is no opening: through a mapping, a hole that can't be filled is SIGBUS.
    Must,
}

impl Medium {
    /// Opens the file at `path`, or creates it if it isn't there and `size` (bytes) is given.
    ///
    /// A file that is there must have that very size: one cut short, or another drive's, is not
    /// taken for this one.
    pub(crate) fn file(
        path: &str,
        size: Option<u64>,
        reserve: Reserve,
        direct: bool,
        busy: Busy,
    ) -> Result<Medium, OpenError> {
        open_or_create(path, size.is_some(), direct)?.into_medium(path, size, reserve, busy)
    }

    /// Gives a file that nobody else uses its size and its space; it has `there` bytes.
    fn prepare(
        &mut self,
        there: u64,
        size: Option<u64>,
        reserve: Reserve,
    ) -> Result<(), OpenError> {
        let problem = match (there, size) {
            (0, None) => Some("the file is empty: add ,size= to give it a size".to_owned()),
            (len, None) if !len.is_multiple_of(BLOCK_SIZE as u64) => Some(format!(
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

    /// Takes its name from a file that was made in vain. Only for one that is locked: nobody serves
    /// it, and whoever waits for the lock finds that it has no name any more.
    fn take_back(&self) {
        let id = |metadata: Metadata| (metadata.dev(), metadata.ino());
        let named = std::fs::symlink_metadata(&self.path).map(id);
        // Somebody may have moved it away, and put another in its place.
        if named.is_ok_and(|named| self.file.metadata().is_ok_and(|ours| id(ours) == named)) {
            // If it stays, its size is wrong, and the next attempt says so.
            let _ = std::fs::remove_file(&self.path);
        }
    }

    /// Opens the block device at `path` for this process alone.
    pub(crate) fn device(path: &str, mut busy: Busy) -> Result<Medium, OpenError> {
        let os = |doing| move |source| OpenError::Os { path: path.to_owned(), doing, source };
        let metadata = std::fs::metadata(path).map_err(os("look at it"))?;
        if !metadata.file_type().is_block_device() {
            return Err(OpenError::Kind {
                path: path.to_owned(),
                problem: format!("not a block device: for a file write file:{path}"),
            });
        }
        // O_EXCL on a block device refuses one that is mounted or otherwise in use.
        let file = loop {
            let opened = OpenOptions::new()
                .read(true)
                .write(true)
                .custom_flags(libc::O_DIRECT | libc::O_EXCL)
                .open(path);
            match opened {
                Ok(file) => break file,
                Err(error) if error.raw_os_error() == Some(libc::EBUSY) => {
                    if !busy.again(path) {
                        return Err(OpenError::Locked { path: path.to_owned() });
                    }
                }
                Err(source) => return Err(os("open it")(source)),
            }
        };
        let len = io::Seek::seek(&mut &file, io::SeekFrom::End(0)).map_err(os("find its size"))?;
        let len = len / BLOCK_SIZE as u64 * BLOCK_SIZE as u64;
        if len == 0 {
            return Err(OpenError::Size {
                path: path.to_owned(),
                problem: "the device has no room for a single 4096-byte block".to_owned(),
            });
        }
        let medium =
            Medium { file, path: path.to_owned(), len, direct: true, reserved: true, device: true };
        medium.lock(busy)?;
        let unit = medium.queue_says("logical_block_size");
        if let Some(bytes) = unit.and_then(|text| text.trim().parse::<u64>().ok())
            && bytes > BLOCK_SIZE as u64
        {
            let problem = format!(
                "its blocks have {bytes} bytes: this needs 4096 or less, which many drives can be \
                 formatted to (nvme format --lbaf)"
            );
            return Err(OpenError::Kind { path: medium.path, problem });
        }
        Ok(medium)
    }

    /// Whether a device says that completed writes may be lost in a power cut: what its queue's
    /// `write_cache` says. Unknown counts as yes.
    pub(crate) fn device_has_volatile_cache(&self) -> bool {
        self.queue_says("write_cache").is_none_or(|cache| cache.trim() != "write through")
    }

    /// What a device's queue says of itself in sysfs.
    fn queue_says(&self, what: &str) -> Option<String> {
        let device = self.file.metadata().ok()?.rdev();
        let directory = format!("/sys/dev/block/{}:{}", libc::major(device), libc::minor(device));
        // A partition's queue is its disk's.
        ["queue", "../queue"]
            .iter()
            .find_map(|queue| std::fs::read_to_string(format!("{directory}/{queue}/{what}")).ok())
    }

    /// Whether the file is still there in full. Errors of the check itself say nothing.
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

    /// One server per medium (T8). The lock is the open file's: it goes with the last user of that,
    /// and each write under way is one, whether or not its process still lives.
    fn lock(&self, mut busy: Busy) -> Result<(), OpenError> {
        loop {
            match self.file.try_lock() {
                Ok(()) => return Ok(()),
                Err(TryLockError::WouldBlock) if busy.again(&self.path) => {}
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

/// The file system (or the device) doesn't have this operation.
pub(crate) fn is_unsupported(error: &io::Error) -> bool {
    matches!(error.raw_os_error(), Some(libc::EOPNOTSUPP | libc::ENOSYS))
}

/// A file that was opened, perhaps by several processes, and that is nobody's yet.
struct Opened {
    file: File,
    /// It bypasses the page cache.
    direct: bool,
    /// This process made it. Others may have opened it since, and one of them may be faster.
    created: bool,
}

impl Opened {
    /// Locks it, and gives it its size if it has none.
    fn into_medium(
        self,
        path: &str,
        size: Option<u64>,
        reserve: Reserve,
        busy: Busy,
    ) -> Result<Medium, OpenError> {
        let os = |doing| move |source| OpenError::Os { path: path.to_owned(), doing, source };
        let Opened { file, direct, created } = self;
        let metadata = file.metadata().map_err(os("look at it"))?;
        if !metadata.is_file() {
            let problem = match metadata.file_type().is_block_device() {
                true => format!("a block device, not a file: write block:{path}"),
                false => "not a regular file".to_owned(),
            };
            return Err(OpenError::Kind { path: path.to_owned(), problem });
        }
        let path = path.to_owned();
        let mut medium = Medium { file, path, len: 0, direct, reserved: false, device: false };
        // A file whose lock somebody else has is his, whoever made it.
        medium.lock(busy)?;
        // Whoever had the lock may have given the file its size, or taken its name.
        let metadata = medium.file.metadata().map_err(os("look at it"))?;
        if metadata.nlink() == 0 {
            return Err(OpenError::NoSuchFile { path: medium.path });
        }
        let is_new = metadata.len() == 0;
        if let Err(error) = medium.prepare(metadata.len(), size, reserve) {
            // Half a file would be in the way of the next attempt. One that has a size was somebody's
            // before.
            if created && is_new {
                medium.take_back();
            }
            return Err(error);
        }
        if created || is_new {
            // A file that loses its name in a power cut loses its bytes with it. Who made the name may
            // have given up before it got here.
            let parent = Path::new(&medium.path).parent().filter(|p| !p.as_os_str().is_empty());
            File::open(parent.unwrap_or(Path::new(".")))
                .and_then(|parent| parent.sync_all())
                .map_err(os("make its name durable in its directory"))?;
        }
        Ok(medium)
    }
}

/// Opens `path`, or makes a file there.
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
    /// More than any file system has.
    const TOO_LARGE: Option<u64> = Some(1 << 61);

    fn at_once() -> Busy {
        Busy::within(Duration::ZERO)
    }

    fn open(path: &str, size: Option<u64>) -> Result<Medium, OpenError> {
        Medium::file(path, size, Reserve::Must, false, at_once())
    }

    /// A file that this process has just made, and not locked yet.
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
    fn t8_the_loser_of_a_race_leaves_the_file_to_the_winner() {
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
    fn t8_what_somebody_served_meanwhile_is_not_taken_for_new() {
        in_folder(|path| {
            let late = just_made(path);
            drop(open(path, SIZE).unwrap());
            let refused = late.into_medium(path, Some(128 << 10), Reserve::Must, at_once()).err();
            assert!(matches!(refused, Some(OpenError::Size { .. })), "{refused:?}");
            open(path, None).unwrap();
        });
    }

    #[test]
    fn t8_a_new_file_that_cannot_be_had_is_taken_back_and_no_other() {
        in_folder(|path| {
            assert!(open(path, TOO_LARGE).is_err());
            assert!(!Path::new(path).exists(), "half a file is in the way");
            // Another file has got the name before this one was locked.
            let moved = just_made(path);
            std::fs::rename(path, format!("{path}-moved")).unwrap();
            drop(open(path, SIZE).unwrap());
            assert!(moved.into_medium(path, TOO_LARGE, Reserve::Must, at_once()).is_err());
            open(path, None).unwrap();
            // One that was there, though it is empty.
            let empty = format!("{path}-empty");
            File::create(&empty).unwrap();
            assert!(open(&empty, TOO_LARGE).is_err());
            assert!(Path::new(&empty).exists());
        });
    }
}

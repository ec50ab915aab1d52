//! Between the words of FUSE and those of the core.

use std::time::{Duration, SystemTime, UNIX_EPOCH};

use fuser::{
    Errno, FileAttr, FileHandle, FileType, FopenFlags, INodeNo, OpenAccMode, OpenFlags, Request,
};
use riopipe_fs_core::block::{BLOCK_BYTES, Ino};
use riopipe_fs_core::dir::FileKind;
use riopipe_fs_core::error::FsError;
use riopipe_fs_core::format::inode::Time;
use riopipe_fs_core::fs::{Attr, Caller};

/// The time now.
pub fn now() -> Time {
    time(SystemTime::now())
}

fn time(time: SystemTime) -> Time {
    match time.duration_since(UNIX_EPOCH) {
        Ok(since) => Time { seconds: since.as_secs() as i64, nanos: since.subsec_nanos() },
        Err(before) => {
            let before = before.duration();
            let (seconds, nanos) = (before.as_secs() as i64, before.subsec_nanos());
            match nanos {
                0 => Time { seconds: -seconds, nanos: 0 },
                _ => Time { seconds: -seconds - 1, nanos: 1_000_000_000 - nanos },
            }
        }
    }
}

/// A time in a request. Before 1970 the kernel's seconds round down and its nanoseconds count up, but
/// fuser 0.18 subtracts both from 1970. This undoes it.
pub(super) fn requested_time(time: SystemTime) -> Time {
    match time.duration_since(UNIX_EPOCH) {
        Ok(_) => self::time(time),
        Err(before) => {
            let before = before.duration();
            Time { seconds: -(before.as_secs() as i64), nanos: before.subsec_nanos() }
        }
    }
}

pub(super) fn system_time(time: Time) -> SystemTime {
    let seconds = Duration::from_secs(time.seconds.unsigned_abs());
    let whole = match time.seconds < 0 {
        true => UNIX_EPOCH.checked_sub(seconds),
        false => UNIX_EPOCH.checked_add(seconds),
    };
    let exact = whole.and_then(|whole| whole.checked_add(Duration::from_nanos(time.nanos.into())));
    exact.unwrap_or(UNIX_EPOCH)
}

/// The core's number of an inode. FUSE calls the root directory 1, and ext4 calls it 2.
pub(super) fn ino(ino: INodeNo) -> Result<Ino, FsError> {
    match ino.0 {
        1 => Ok(Ino::ROOT),
        other => u32::try_from(other).map(Ino).map_err(|_| FsError::NotFound),
    }
}

/// The number of an inode in FUSE.
pub(super) fn fuse_ino(ino: Ino) -> INodeNo {
    INodeNo(if ino == Ino::ROOT { 1 } else { ino.0.into() })
}

pub(super) fn file_type(mode: u16) -> FileType {
    match u32::from(mode) & libc::S_IFMT {
        libc::S_IFDIR => FileType::Directory,
        libc::S_IFLNK => FileType::Symlink,
        libc::S_IFBLK => FileType::BlockDevice,
        libc::S_IFCHR => FileType::CharDevice,
        libc::S_IFIFO => FileType::NamedPipe,
        libc::S_IFSOCK => FileType::Socket,
        _ => FileType::RegularFile,
    }
}

pub(super) fn entry_type(kind: FileKind) -> FileType {
    match kind {
        FileKind::DIRECTORY => FileType::Directory,
        FileKind::SYMLINK => FileType::Symlink,
        FileKind::BLOCK => FileType::BlockDevice,
        FileKind::CHARACTER => FileType::CharDevice,
        FileKind::FIFO => FileType::NamedPipe,
        FileKind::SOCKET => FileType::Socket,
        _ => FileType::RegularFile,
    }
}

pub(super) fn file_attr(attr: &Attr) -> FileAttr {
    FileAttr {
        ino: fuse_ino(attr.ino),
        size: attr.size,
        blocks: attr.sectors,
        atime: system_time(attr.times.atime),
        mtime: system_time(attr.times.mtime),
        ctime: system_time(attr.times.ctime),
        crtime: system_time(attr.times.crtime),
        kind: file_type(attr.mode),
        perm: attr.mode & 0o7777,
        nlink: attr.links,
        uid: attr.uid,
        gid: attr.gid,
        rdev: attr.rdev,
        blksize: BLOCK_BYTES as u32,
        flags: 0,
    }
}

/// The attributes of a name that does not exist: number 0.
pub(super) fn no_entry() -> FileAttr {
    FileAttr {
        ino: INodeNo(0),
        size: 0,
        blocks: 0,
        atime: UNIX_EPOCH,
        mtime: UNIX_EPOCH,
        ctime: UNIX_EPOCH,
        crtime: UNIX_EPOCH,
        kind: FileType::RegularFile,
        perm: 0,
        nlink: 0,
        uid: 0,
        gid: 0,
        rdev: 0,
        blksize: BLOCK_BYTES as u32,
        flags: 0,
    }
}

/// The program that makes a call. The kernel has checked its permissions.
pub(super) fn caller(request: &Request) -> Caller {
    Caller { uid: request.uid(), gid: request.gid(), groups: Vec::new(), umask: 0 }
}

/// The program that makes a call, with its other groups: a file may get the set-group-ID bit if its
/// group is one of them. No request has them, so they are read from the system.
pub(super) fn caller_with_groups(request: &Request) -> Caller {
    let status = std::fs::read_to_string(format!("/proc/{}/status", request.pid()));
    Caller { groups: groups_of(&status.unwrap_or_default()), ..caller(request) }
}

/// The groups in the text of `/proc/PID/status`.
fn groups_of(status: &str) -> Vec<u32> {
    let line = status.lines().find_map(|line| line.strip_prefix("Groups:")).unwrap_or_default();
    line.split_whitespace().filter_map(|group| group.parse().ok()).collect()
}

pub(super) fn errno(error: &FsError) -> Errno {
    Errno::from_i32(error.errno())
}

/// The handle of files whose reads and writes bypass the page cache. All others have handle 0, as
/// those that the kernel opens without a request.
const DIRECT: FileHandle = FileHandle(1);

/// Whether a write must be durable before it returns, and then whether only the fields that are
/// needed to read the data. `flags` are those of the open file and of the write itself
/// (`RWF_DSYNC`). If the file uses the page cache, the kernel calls `fsync` after the write.
pub(super) fn sync_of_write(handle: FileHandle, flags: OpenFlags) -> Option<bool> {
    // O_SYNC contains the bit of O_DSYNC.
    let data_only = flags.0 & libc::O_SYNC != libc::O_SYNC;
    (handle == DIRECT && flags.0 & libc::O_DSYNC != 0).then_some(data_only)
}

/// The handle of an open file, and how the kernel treats it. A file that is only written gains
/// nothing from the page cache; its writers then run at the same time. Others keep their cache: all
/// changes come through this kernel.
pub(super) fn opened(flags: OpenFlags) -> (FileHandle, FopenFlags) {
    let common = FopenFlags::FOPEN_NOFLUSH | FopenFlags::FOPEN_PARALLEL_DIRECT_WRITES;
    match flags.acc_mode() {
        OpenAccMode::O_WRONLY => (DIRECT, common | FopenFlags::FOPEN_DIRECT_IO),
        _ => (FileHandle(0), common | FopenFlags::FOPEN_KEEP_CACHE),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn times_come_back() {
        for (seconds, nanos) in [(0, 0), (5, 999_999_999), (-1, 1), (-7, 0), (-2, 999_999_999)] {
            let exact = Time { seconds, nanos };
            assert_eq!(time(system_time(exact)), exact);
        }
    }

    #[test]
    fn requested_times_before_1970_are_as_the_kernel_sent_them() {
        // As fuser makes it of -9 s and 5 ns.
        let received = UNIX_EPOCH - Duration::new(9, 5);
        assert_eq!(requested_time(received), Time { seconds: -9, nanos: 5 });
        let later = UNIX_EPOCH + Duration::new(9, 5);
        assert_eq!(requested_time(later), Time { seconds: 9, nanos: 5 });
    }

    #[test]
    fn only_direct_writes_are_synced_here() {
        let sync = |flags| sync_of_write(opened(OpenFlags(flags)).0, OpenFlags(flags));
        assert_eq!(sync(libc::O_WRONLY), None);
        assert_eq!(sync(libc::O_WRONLY | libc::O_DSYNC), Some(true));
        assert_eq!(sync(libc::O_WRONLY | libc::O_SYNC), Some(false));
        assert_eq!(sync(libc::O_RDWR | libc::O_SYNC), None);
    }

    #[test]
    fn the_groups_of_a_program_are_in_its_status() {
        assert_eq!(groups_of("Name:\tGroups: 9\nGroups:\t4 24 1000 \nPid:\t5\n"), [4, 24, 1000]);
        assert!(groups_of("Name:\tx\nGroups:\t \n").is_empty());
        assert!(groups_of("").is_empty());
    }

    #[test]
    fn the_root_directory_has_two_numbers() {
        assert_eq!(ino(INodeNo(1)), Ok(Ino::ROOT));
        assert_eq!(fuse_ino(Ino::ROOT), INodeNo(1));
        assert_eq!((ino(INodeNo(11)), fuse_ino(Ino(11))), (Ok(Ino(11)), INodeNo(11)));
        assert!(ino(INodeNo(1 << 32)).is_err());
    }
}

//! The requests of the kernel, each as a call of the core.

use std::cell::RefCell;
use std::ffi::OsStr;
use std::io;
use std::ops::ControlFlow;
use std::os::unix::ffi::OsStrExt;
use std::path::Path;
use std::sync::Arc;
use std::time::{Duration, SystemTime};

use fuser::{
    AccessFlags, BsdFileFlags, CopyFileRangeFlags, Errno, FileHandle, Filesystem, FopenFlags,
    Generation, INodeNo, InitFlags, IoctlFlags, KernelConfig, LockOwner, OpenFlags, RenameFlags,
    ReplyAttr, ReplyCreate, ReplyData, ReplyDirectory, ReplyDirectoryPlus, ReplyEmpty, ReplyEntry,
    ReplyIoctl, ReplyLseek, ReplyOpen, ReplyStatfs, ReplyWrite, ReplyXattr, Request, TimeOrNow,
    WriteFlags,
};
use riopipe_fs_core::acl::AclKind;
use riopipe_fs_core::block::{BLOCK_BYTES, Ino};
use riopipe_fs_core::dir::FileKind;
use riopipe_fs_core::error::FsError;
use riopipe_fs_core::format::inode::Time;
use riopipe_fs_core::fs::{Attr, Caller, Fs, NewInode, SeekTo, SetAttr};
use riopipe_fs_core::xattr::SetMode;

use super::convert::{
    caller, caller_with_groups, entry_type, errno, file_attr, fuse_ino, ino, no_entry, now, opened,
    requested_time, sync_of_write,
};
use super::ioctl::Command;
use crate::fsync_stages;

/// How long the kernel may use entries and attributes: all changes come through it.
const TTL: Duration = Duration::from_secs(24 * 3600);
/// The largest write and the largest read of one request, bytes.
const REQUEST_BYTES_MAX: u32 = 1 << 20;
/// Requests of the background, such as reading ahead, that the kernel sends at the same time.
const BACKGROUND_MAX: u16 = 64;
/// The entries that are taken from a directory at a time.
const ENTRIES: usize = 256;
/// The bytes that one step of a copy moves.
const COPY_BYTES: usize = 1 << 20;
/// The longest name, bytes.
const NAME_BYTES_MAX: u32 = 255;

thread_local! {
    /// The data of the last read of this thread: a new buffer for each would have to be zeroed.
    static READ_BUF: RefCell<Vec<u8>> = const { RefCell::new(Vec::new()) };
}

/// The file system as the kernel calls it.
pub(super) struct Adapter {
    fs: Arc<Fs>,
    /// Whether the kernel does without a request when a file is opened.
    can_skip_open: bool,
    /// Whether the kernel does without a request when a directory is opened.
    can_skip_opendir: bool,
}

/// An entry of a directory that was read.
struct Entry {
    ino: Ino,
    kind: FileKind,
    name: Vec<u8>,
    next_cookie: u64,
}

impl Adapter {
    pub(super) fn new(fs: Arc<Fs>) -> Self {
        Self { fs, can_skip_open: false, can_skip_opendir: false }
    }

    /// The next entries of a directory from `cookie` on; none at its end.
    fn entries(&self, directory: INodeNo, cookie: u64) -> Result<Vec<Entry>, FsError> {
        let mut entries = Vec::with_capacity(ENTRIES);
        self.fs.read_dir(ino(directory)?, cookie, &mut |item| {
            entries.push(Entry {
                ino: item.ino,
                kind: item.kind,
                name: item.name.to_vec(),
                next_cookie: item.next_cookie,
            });
            match entries.len() < ENTRIES {
                true => ControlFlow::Continue(()),
                false => ControlFlow::Break(()),
            }
        })?;
        Ok(entries)
    }

    /// Makes an inode. The umask counts only if the directory has no default access list, so the
    /// kernel leaves it to this.
    fn make(
        &self,
        request: &Request,
        parent: INodeNo,
        name: &OsStr,
        umask: u32,
        new: &NewInode<'_>,
    ) -> Result<Attr, FsError> {
        let caller = match has_set_group_id(new.mode.into()) {
            true => caller_with_groups(request),
            false => caller(request),
        };
        let caller = Caller { umask: (umask & 0o777) as u16, ..caller };
        self.fs.create(&caller, ino(parent)?, name.as_bytes(), new, now())
    }

    /// Copies a range of one file to another. Returns the number of bytes.
    fn copy(
        &self,
        request: &Request,
        from: (INodeNo, u64),
        to: (INodeNo, u64),
        len: u64,
    ) -> Result<u64, FsError> {
        let (source, target) = (ino(from.0)?, ino(to.0)?);
        let caller = caller(request);
        // The answer has 32 bits.
        let len = len.min(u64::from(u32::MAX) / 2);
        let mut buf = vec![0; COPY_BYTES.min(len as usize)];
        let mut done = 0;
        while done < len {
            let step = buf.len().min((len - done) as usize);
            let read = self.fs.read(source, from.1 + done, &mut buf[..step], now())?;
            let written = match read {
                0 => Ok(0),
                read => self.fs.write(&caller, target, to.1 + done, &buf[..read], now()),
            };
            done += match written {
                Ok(written) => written as u64,
                Err(error) if done == 0 => return Err(error),
                Err(_) => break,
            };
            if read < step {
                break;
            }
        }
        Ok(done)
    }
}

/// Whether a mode has the set-group-ID bit, which only members of the group may set.
fn has_set_group_id(mode: u32) -> bool {
    mode & libc::S_ISGID != 0
}

/// Answers with an entry.
fn reply_entry(reply: ReplyEntry, result: Result<Attr, FsError>) {
    match result {
        Ok(attr) => reply.entry(&TTL, &file_attr(&attr), Generation(attr.generation.into())),
        Err(error) => reply.error(errno(&error)),
    }
}

fn reply_attr(reply: ReplyAttr, result: Result<Attr, FsError>) {
    match result {
        Ok(attr) => reply.attr(&TTL, &file_attr(&attr)),
        Err(error) => reply.error(errno(&error)),
    }
}

fn reply_empty(reply: ReplyEmpty, result: Result<(), FsError>) {
    match result {
        Ok(()) => reply.ok(),
        Err(error) => reply.error(errno(&error)),
    }
}

fn reply_written(reply: ReplyWrite, result: Result<u64, FsError>) {
    match result {
        Ok(bytes) => reply.written(bytes as u32),
        Err(error) => reply.error(errno(&error)),
    }
}

/// Answers with the value of an attribute, or with its size if `size` is 0.
fn reply_xattr(reply: ReplyXattr, size: u32, result: Result<Vec<u8>, FsError>) {
    match result {
        Ok(value) if size == 0 => reply.size(value.len() as u32),
        Ok(value) if value.len() <= size as usize => reply.data(&value),
        Ok(_) => reply.error(Errno::ERANGE),
        Err(error) => reply.error(errno(&error)),
    }
}

impl Filesystem for Adapter {
    fn init(&mut self, _: &Request, config: &mut KernelConfig) -> io::Result<()> {
        let wanted = InitFlags::FUSE_ASYNC_READ
            | InitFlags::FUSE_PARALLEL_DIROPS
            | InitFlags::FUSE_ASYNC_DIO
            | InitFlags::FUSE_DO_READDIRPLUS
            | InitFlags::FUSE_READDIRPLUS_AUTO
            | InitFlags::FUSE_CACHE_SYMLINKS
            // Without it, each write first asks for an attribute.
            | InitFlags::FUSE_HANDLE_KILLPRIV_V2
            | InitFlags::FUSE_DIRECT_IO_ALLOW_MMAP
            | InitFlags::FUSE_NO_OPEN_SUPPORT
            // Access lists decide about access, too.
            | InitFlags::FUSE_POSIX_ACL
            | InitFlags::FUSE_DONT_MASK
            | InitFlags::FUSE_NO_OPENDIR_SUPPORT;
        // An older kernel does without some of them.
        let missing = config.add_capabilities(wanted).err().unwrap_or(InitFlags::empty());
        let _ = config.add_capabilities(wanted & !missing);
        self.can_skip_open = !missing.contains(InitFlags::FUSE_NO_OPEN_SUPPORT);
        self.can_skip_opendir = !missing.contains(InitFlags::FUSE_NO_OPENDIR_SUPPORT);
        let _ = config.set_max_write(REQUEST_BYTES_MAX);
        let _ = config.set_max_readahead(REQUEST_BYTES_MAX);
        let _ = config.set_max_background(BACKGROUND_MAX);
        Ok(())
    }

    fn lookup(&self, request: &Request, parent: INodeNo, name: &OsStr, reply: ReplyEntry) {
        let found = ino(parent)
            .and_then(|parent| self.fs.lookup(&caller(request), parent, name.as_bytes()));
        match found {
            // The kernel remembers that the name does not exist.
            Err(FsError::NotFound) => reply.entry(&TTL, &no_entry(), Generation(0)),
            found => reply_entry(reply, found),
        }
    }

    fn forget(&self, _: &Request, inode: INodeNo, count: u64) {
        if let Ok(inode) = ino(inode) {
            self.fs.forget(inode, count);
        }
    }

    fn getattr(&self, _: &Request, inode: INodeNo, _: Option<FileHandle>, reply: ReplyAttr) {
        reply_attr(reply, ino(inode).and_then(|inode| self.fs.attr(inode)));
    }

    fn setattr(
        &self,
        request: &Request,
        inode: INodeNo,
        mode: Option<u32>,
        uid: Option<u32>,
        gid: Option<u32>,
        size: Option<u64>,
        atime: Option<TimeOrNow>,
        mtime: Option<TimeOrNow>,
        ctime: Option<SystemTime>,
        _: Option<FileHandle>,
        _: Option<SystemTime>,
        _: Option<SystemTime>,
        _: Option<SystemTime>,
        _: Option<BsdFileFlags>,
        reply: ReplyAttr,
    ) {
        let now = now();
        let chosen = |given: TimeOrNow| -> Time {
            match given {
                TimeOrNow::SpecificTime(given) => requested_time(given),
                TimeOrNow::Now => now,
            }
        };
        let set = SetAttr {
            mode: mode.map(|mode| (mode & 0o7777) as u16),
            uid,
            gid,
            size,
            atime: atime.map(chosen),
            mtime: mtime.map(chosen),
            ctime: ctime.map(requested_time),
            remove_set_ids: size.is_some() && request.uid() != 0,
        };
        let caller = match mode.is_some_and(has_set_group_id) {
            true => caller_with_groups(request),
            false => caller(request),
        };
        let result = ino(inode).and_then(|inode| self.fs.set_attr(&caller, inode, &set, now));
        reply_attr(reply, result);
    }

    fn readlink(&self, _: &Request, inode: INodeNo, reply: ReplyData) {
        match ino(inode).and_then(|inode| self.fs.read_link(inode)) {
            Ok(target) => reply.data(&target),
            Err(error) => reply.error(errno(&error)),
        }
    }

    fn mknod(
        &self,
        request: &Request,
        parent: INodeNo,
        name: &OsStr,
        mode: u32,
        umask: u32,
        rdev: u32,
        reply: ReplyEntry,
    ) {
        let new = NewInode { mode: mode as u16, rdev, target: &[] };
        reply_entry(reply, self.make(request, parent, name, umask, &new));
    }

    fn mkdir(
        &self,
        request: &Request,
        parent: INodeNo,
        name: &OsStr,
        mode: u32,
        umask: u32,
        reply: ReplyEntry,
    ) {
        let mode = (mode & !libc::S_IFMT | libc::S_IFDIR) as u16;
        let new = NewInode { mode, rdev: 0, target: &[] };
        reply_entry(reply, self.make(request, parent, name, umask, &new));
    }

    fn symlink(
        &self,
        request: &Request,
        parent: INodeNo,
        name: &OsStr,
        target: &Path,
        reply: ReplyEntry,
    ) {
        let mode = (libc::S_IFLNK | 0o777) as u16;
        let new = NewInode { mode, rdev: 0, target: target.as_os_str().as_bytes() };
        reply_entry(reply, self.make(request, parent, name, 0, &new));
    }

    fn unlink(&self, request: &Request, parent: INodeNo, name: &OsStr, reply: ReplyEmpty) {
        let result = ino(parent)
            .and_then(|parent| self.fs.unlink(&caller(request), parent, name.as_bytes(), now()));
        reply_empty(reply, result);
    }

    fn rmdir(&self, request: &Request, parent: INodeNo, name: &OsStr, reply: ReplyEmpty) {
        let result = ino(parent)
            .and_then(|parent| self.fs.rmdir(&caller(request), parent, name.as_bytes(), now()));
        reply_empty(reply, result);
    }

    fn rename(
        &self,
        request: &Request,
        parent: INodeNo,
        name: &OsStr,
        new_parent: INodeNo,
        new_name: &OsStr,
        flags: RenameFlags,
        reply: ReplyEmpty,
    ) {
        let result = ino(parent).and_then(|parent| {
            let (name, new_name) = (name.as_bytes(), new_name.as_bytes());
            let new_parent = ino(new_parent)?;
            let caller = caller(request);
            self.fs.rename(&caller, parent, name, new_parent, new_name, flags.bits(), now())
        });
        reply_empty(reply, result);
    }

    fn link(
        &self,
        request: &Request,
        inode: INodeNo,
        parent: INodeNo,
        name: &OsStr,
        reply: ReplyEntry,
    ) {
        let result = ino(inode).and_then(|inode| {
            self.fs.link(&caller(request), inode, ino(parent)?, name.as_bytes(), now())
        });
        reply_entry(reply, result);
    }

    /// The kernel refers to the inode of each open file, so the file stays without a reference of
    /// its own.
    fn open(&self, _: &Request, _: INodeNo, flags: OpenFlags, reply: ReplyOpen) {
        if self.can_skip_open {
            // The kernel asks no more, and uses the page cache for all files.
            return reply.error(Errno::ENOSYS);
        }
        let (handle, flags) = opened(flags);
        reply.opened(handle, flags);
    }

    fn create(
        &self,
        request: &Request,
        parent: INodeNo,
        name: &OsStr,
        mode: u32,
        umask: u32,
        flags: i32,
        reply: ReplyCreate,
    ) {
        let mode = (mode & !libc::S_IFMT | libc::S_IFREG) as u16;
        let new = NewInode { mode, rdev: 0, target: &[] };
        match self.make(request, parent, name, umask, &new) {
            Ok(attr) => {
                let generation = Generation(attr.generation.into());
                let (handle, flags) = opened(OpenFlags(flags));
                reply.created(&TTL, &file_attr(&attr), generation, handle, flags);
            }
            Err(error) => reply.error(errno(&error)),
        }
    }

    fn read(
        &self,
        _: &Request,
        inode: INodeNo,
        _: FileHandle,
        offset: u64,
        size: u32,
        _: OpenFlags,
        _: Option<LockOwner>,
        reply: ReplyData,
    ) {
        READ_BUF.with_borrow_mut(|buf| {
            let size = size as usize;
            if buf.len() < size {
                buf.resize(size, 0);
            }
            let buf = &mut buf[..size];
            match ino(inode).and_then(|inode| self.fs.read(inode, offset, buf, now())) {
                Ok(bytes) => reply.data(&buf[..bytes.min(size)]),
                Err(error) => reply.error(errno(&error)),
            }
        });
    }

    fn write(
        &self,
        request: &Request,
        inode: INodeNo,
        handle: FileHandle,
        offset: u64,
        data: &[u8],
        write_flags: WriteFlags,
        flags: OpenFlags,
        _: Option<LockOwner>,
        reply: ReplyWrite,
    ) {
        let result = ino(inode).and_then(|inode| {
            let (caller, now) = (caller(request), now());
            if write_flags.contains(WriteFlags::FUSE_WRITE_KILL_SUIDGID) {
                let set = SetAttr { remove_set_ids: true, ..SetAttr::default() };
                self.fs.set_attr(&caller, inode, &set, now)?;
            }
            let written = self.fs.write(&caller, inode, offset, data, now)?;
            if let Some(data_only) = sync_of_write(handle, flags) {
                fsync_stages::measured(|| self.fs.fsync(inode, data_only, now))?;
            }
            Ok(written)
        });
        reply_written(reply, result.map(|bytes| bytes as u64));
    }

    /// The close of a file makes nothing durable: only `fsync` does. So the kernel need not ask.
    fn flush(&self, _: &Request, _: INodeNo, _: FileHandle, _: LockOwner, reply: ReplyEmpty) {
        reply.error(Errno::ENOSYS);
    }

    fn fsync(
        &self,
        _: &Request,
        inode: INodeNo,
        _: FileHandle,
        data_only: bool,
        reply: ReplyEmpty,
    ) {
        let fsync = |inode| fsync_stages::measured(|| self.fs.fsync(inode, data_only, now()));
        reply_empty(reply, ino(inode).and_then(fsync));
    }

    /// The kernel may keep what it has read of a directory: it changes only through the kernel.
    fn opendir(&self, _: &Request, _: INodeNo, _: OpenFlags, reply: ReplyOpen) {
        if self.can_skip_opendir {
            // The kernel asks no more, and uses the flags below.
            return reply.error(Errno::ENOSYS);
        }
        let flags = FopenFlags::FOPEN_CACHE_DIR | FopenFlags::FOPEN_KEEP_CACHE;
        reply.opened(FileHandle(0), flags);
    }

    fn readdir(
        &self,
        _: &Request,
        inode: INodeNo,
        _: FileHandle,
        offset: u64,
        mut reply: ReplyDirectory,
    ) {
        let mut cookie = offset;
        loop {
            let entries = match self.entries(inode, cookie) {
                Ok(entries) => entries,
                Err(error) if cookie == offset => return reply.error(errno(&error)),
                Err(_) => return reply.ok(),
            };
            for entry in &entries {
                let (kind, name) = (entry_type(entry.kind), OsStr::from_bytes(&entry.name));
                if reply.add(fuse_ino(entry.ino), entry.next_cookie, kind, name) {
                    return reply.ok();
                }
                cookie = entry.next_cookie;
            }
            if entries.len() < ENTRIES {
                return reply.ok();
            }
        }
    }

    fn readdirplus(
        &self,
        _: &Request,
        inode: INodeNo,
        _: FileHandle,
        offset: u64,
        mut reply: ReplyDirectoryPlus,
    ) {
        let mut cookie = offset;
        loop {
            let entries = match self.entries(inode, cookie) {
                Ok(entries) => entries,
                Err(error) if cookie == offset => return reply.error(errno(&error)),
                Err(_) => return reply.ok(),
            };
            for entry in &entries {
                // The kernel does not count these two as references.
                let is_dot = matches!(&entry.name[..], b"." | b"..");
                // A reference, as that of a lookup.
                let attr = match is_dot {
                    true => self.fs.attr(entry.ino),
                    false => self.fs.open(entry.ino),
                };
                let attr = match attr {
                    Ok(attr) => attr,
                    // It was removed meanwhile.
                    Err(FsError::Stale(_)) => {
                        cookie = entry.next_cookie;
                        continue;
                    }
                    Err(error) if cookie == offset => return reply.error(errno(&error)),
                    Err(_) => return reply.ok(),
                };
                let name = OsStr::from_bytes(&entry.name);
                let generation = Generation(attr.generation.into());
                let (number, attr) = (fuse_ino(attr.ino), file_attr(&attr));
                if reply.add(number, entry.next_cookie, name, &TTL, &attr, generation) {
                    if !is_dot {
                        self.fs.forget(entry.ino, 1);
                    }
                    return reply.ok();
                }
                cookie = entry.next_cookie;
            }
            if entries.len() < ENTRIES {
                return reply.ok();
            }
        }
    }

    fn fsyncdir(
        &self,
        request: &Request,
        inode: INodeNo,
        handle: FileHandle,
        data_only: bool,
        reply: ReplyEmpty,
    ) {
        self.fsync(request, inode, handle, data_only, reply);
    }

    fn statfs(&self, _: &Request, _: INodeNo, reply: ReplyStatfs) {
        let stat = self.fs.statfs();
        let block = BLOCK_BYTES as u32;
        reply.statfs(
            stat.blocks,
            stat.blocks_free,
            stat.blocks_available,
            stat.inodes,
            stat.inodes_free,
            block,
            NAME_BYTES_MAX,
            block,
        );
    }

    fn setxattr(
        &self,
        request: &Request,
        inode: INodeNo,
        name: &OsStr,
        value: &[u8],
        flags: i32,
        _: u32,
        reply: ReplyEmpty,
    ) {
        let mode = match flags {
            libc::XATTR_CREATE => SetMode::Create,
            libc::XATTR_REPLACE => SetMode::Replace,
            _ => SetMode::Any,
        };
        let caller = match name.as_bytes() == AclKind::Access.name() {
            true => caller_with_groups(request),
            false => caller(request),
        };
        let result = ino(inode).and_then(|inode| {
            self.fs.set_xattr(&caller, inode, name.as_bytes(), value, mode, now())
        });
        reply_empty(reply, result);
    }

    fn getxattr(&self, _: &Request, inode: INodeNo, name: &OsStr, size: u32, reply: ReplyXattr) {
        let value = ino(inode).and_then(|inode| self.fs.get_xattr(inode, name.as_bytes()));
        reply_xattr(reply, size, value);
    }

    fn listxattr(&self, request: &Request, inode: INodeNo, size: u32, reply: ReplyXattr) {
        let names = ino(inode).and_then(|inode| self.fs.list_xattr(&caller(request), inode));
        reply_xattr(reply, size, names);
    }

    fn removexattr(&self, request: &Request, inode: INodeNo, name: &OsStr, reply: ReplyEmpty) {
        let result = ino(inode).and_then(|inode| {
            self.fs.remove_xattr(&caller(request), inode, name.as_bytes(), now())
        });
        reply_empty(reply, result);
    }

    /// The kernel checks permissions itself (`default_permissions`).
    fn access(&self, _: &Request, _: INodeNo, _: AccessFlags, reply: ReplyEmpty) {
        reply.ok();
    }

    fn fallocate(
        &self,
        request: &Request,
        inode: INodeNo,
        _: FileHandle,
        offset: u64,
        len: u64,
        mode: i32,
        reply: ReplyEmpty,
    ) {
        let result = ino(inode).and_then(|inode| {
            // The kernel marks writes with that, and no `fallocate`.
            self.fs.remove_set_ids(&caller(request), inode, now())?;
            self.fs.fallocate(inode, mode, offset, len, now())
        });
        reply_empty(reply, result);
    }

    /// The calls that other file systems do not have, and `ENOTTY` for all else. Programs write
    /// the pages of mapped files before: the kernel does not.
    fn ioctl(
        &self,
        _: &Request,
        inode: INodeNo,
        _: FileHandle,
        _: IoctlFlags,
        command: u32,
        _: &[u8],
        _: u32,
        reply: ReplyIoctl,
    ) {
        let result = match Command::of(command) {
            Some(Command::Barrier { data_only }) => {
                ino(inode).and_then(|inode| self.fs.barrier(inode, data_only, now()))
            }
            Some(Command::SyncFs) => self.fs.sync(now()),
            None => return reply.error(Errno::ENOTTY),
        };
        match result {
            Ok(()) => reply.ioctl(0, &[]),
            Err(error) => reply.error(errno(&error)),
        }
    }

    fn lseek(
        &self,
        _: &Request,
        inode: INodeNo,
        _: FileHandle,
        offset: i64,
        whence: i32,
        reply: ReplyLseek,
    ) {
        let to = match whence {
            libc::SEEK_DATA => SeekTo::Data,
            libc::SEEK_HOLE => SeekTo::Hole,
            _ => return reply.error(Errno::EINVAL),
        };
        let Ok(offset) = u64::try_from(offset) else { return reply.error(Errno::ENXIO) };
        match ino(inode).and_then(|inode| self.fs.seek(inode, offset, to)) {
            Ok(found) => reply.offset(found as i64),
            Err(error) => reply.error(errno(&error)),
        }
    }

    fn copy_file_range(
        &self,
        request: &Request,
        from: INodeNo,
        _: FileHandle,
        from_offset: u64,
        to: INodeNo,
        _: FileHandle,
        to_offset: u64,
        len: u64,
        _: CopyFileRangeFlags,
        reply: ReplyWrite,
    ) {
        reply_written(reply, self.copy(request, (from, from_offset), (to, to_offset), len));
    }
}

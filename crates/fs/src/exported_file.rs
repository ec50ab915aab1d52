//! A volume as a file that can only be read, for programs that check file systems in files.
//!
//! The file is in a mount of FUSE of its own. So nothing is copied, and such a program reads from the
//! volume what it needs and no more.

use std::ffi::OsStr;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::{Duration, UNIX_EPOCH};

use fuser::{
    BackgroundSession, Config, Errno, FileAttr, FileHandle, FileType, Filesystem, FopenFlags,
    Generation, INodeNo, LockOwner, MountOption, OpenFlags, ReplyAttr, ReplyData, ReplyEntry,
    ReplyOpen, Request, Session,
};
use riopipe_fs_core::block::{BLOCK_BYTES, BlockNo};
use riopipe_fs_core::storage::Storage;

use crate::fuse::FuseError;

/// The name of the file in its directory.
const NAME: &str = "volume";
/// The number of the file. The directory has number 1.
const FILE: INodeNo = INodeNo(2);
/// How long the kernel may use attributes: nothing changes.
const TTL: Duration = Duration::from_secs(24 * 3600);

/// A file with the content of a storage. Dropping it removes it; [`close`](Self::close) reports what
/// keeps it.
pub struct ExportedFile {
    session: BackgroundSession,
    path: PathBuf,
}

impl ExportedFile {
    /// Mounts the file in an empty directory. Nothing may write to the storage as long as it is
    /// there.
    ///
    /// # Errors
    /// [`FuseError`].
    pub fn new(storage: Arc<dyn Storage>, directory: &Path) -> Result<Self, FuseError> {
        crate::fuse::check_device()?;
        let bytes = storage.blocks() * BLOCK_BYTES as u64;
        let mut config = Config::default();
        config.mount_options = vec![
            MountOption::FSName("riofs-check".to_owned()),
            MountOption::Subtype("riofs-file".to_owned()),
            MountOption::RO,
        ];
        let mounted = Session::new(Export { storage, bytes }, directory, &config);
        let failed = |source| FuseError::Mount { path: directory.display().to_string(), source };
        let session = mounted.and_then(Session::spawn).map_err(failed)?;
        Ok(Self { session, path: directory.join(NAME) })
    }

    /// The path of the file.
    #[must_use]
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// Removes the file.
    ///
    /// # Errors
    /// [`FuseError::Session`]: it is still in use.
    pub fn close(self) -> Result<(), FuseError> {
        self.session.umount_and_join().map_err(FuseError::Session)
    }
}

struct Export {
    storage: Arc<dyn Storage>,
    bytes: u64,
}

impl Export {
    fn attr(&self, ino: INodeNo) -> FileAttr {
        let (kind, perm, size) = match ino {
            FILE => (FileType::RegularFile, 0o400, self.bytes),
            _ => (FileType::Directory, 0o500, 0),
        };
        FileAttr {
            ino,
            size,
            blocks: size / 512,
            atime: UNIX_EPOCH,
            mtime: UNIX_EPOCH,
            ctime: UNIX_EPOCH,
            crtime: UNIX_EPOCH,
            kind,
            perm,
            nlink: 1,
            uid: rustix::process::geteuid().as_raw(),
            gid: rustix::process::getegid().as_raw(),
            rdev: 0,
            blksize: BLOCK_BYTES as u32,
            flags: 0,
        }
    }

    /// Reads bytes, of which fewer are there at the end.
    fn bytes(&self, offset: u64, size: u32) -> Result<Vec<u8>, Errno> {
        let end = offset.saturating_add(size.into()).min(self.bytes);
        let Some(len) = end.checked_sub(offset) else { return Ok(Vec::new()) };
        let unit = BLOCK_BYTES as u64;
        let first = offset / unit;
        let mut blocks = vec![0; ((end.div_ceil(unit) - first) * unit) as usize];
        if let Err(error) = self.storage.read(BlockNo(first), &mut blocks) {
            tracing::error!(%error, "the volume can't be read");
            return Err(Errno::EIO);
        }
        let skipped = (offset - first * unit) as usize;
        Ok(blocks[skipped..skipped + len as usize].to_vec())
    }
}

impl Filesystem for Export {
    fn lookup(&self, _: &Request, parent: INodeNo, name: &OsStr, reply: ReplyEntry) {
        match parent == INodeNo::ROOT && name == NAME {
            true => reply.entry(&TTL, &self.attr(FILE), Generation(0)),
            false => reply.error(Errno::ENOENT),
        }
    }

    fn getattr(&self, _: &Request, ino: INodeNo, _: Option<FileHandle>, reply: ReplyAttr) {
        reply.attr(&TTL, &self.attr(ino));
    }

    fn open(&self, _: &Request, _: INodeNo, _: OpenFlags, reply: ReplyOpen) {
        reply.opened(FileHandle(0), FopenFlags::FOPEN_KEEP_CACHE);
    }

    fn read(
        &self,
        _: &Request,
        _: INodeNo,
        _: FileHandle,
        offset: u64,
        size: u32,
        _: OpenFlags,
        _: Option<LockOwner>,
        reply: ReplyData,
    ) {
        match self.bytes(offset, size) {
            Ok(bytes) => reply.data(&bytes),
            Err(error) => reply.error(error),
        }
    }
}

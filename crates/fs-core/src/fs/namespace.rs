//! Names: finding, making, linking, removing.

use alloc::sync::Arc;
use alloc::vec::Vec;
use core::ops::ControlFlow;

use super::Fs;
use crate::acl::{Acl, AclKind};
use crate::block::{BLOCK_BYTES, BlockKind, BlockNo, Ino, MetaBlocks};
use crate::dir::{self, DirItem, Entry, FileKind};
use crate::error::FsError;
use crate::extents::{self, Extent, Run};
use crate::file_log::Creation;
use crate::format::inode::{DiskInode, I_BLOCK_BYTES, InodeFlags, Time, file_type};
use crate::fs::{Attr, Caller};
use crate::groups::Claim;
use crate::inode_table::{Inode, InodeState};
use crate::op::Op;
use crate::open_inode::OpenInode;
use crate::probe::{Plant, is_bug_planted};
use crate::sync::atomic::Ordering;
use crate::tid::Tid;
use crate::xattr;

/// The most links of a file, and of a directory without `dir_nlink`.
pub(super) const LINKS_MAX: u16 = 65_000;

/// An inode to be made.
#[derive(Clone, Copy, Debug)]
pub struct NewInode<'a> {
    /// Type and permissions.
    pub mode: u16,
    /// The number of a device; 0 for all others.
    pub rdev: u32,
    /// The target of a symbolic link.
    pub target: &'a [u8],
}

/// An entry of a directory at some moment.
#[derive(Clone, Copy, Debug)]
pub(super) struct Found {
    pub(super) entry: Option<Entry>,
    /// The version of the directory.
    version: u64,
}

/// Two inodes in the order in which they are locked.
pub(super) fn in_order<'a>(
    a: &'a Arc<Inode>,
    b: &'a Arc<Inode>,
) -> (&'a Arc<Inode>, &'a Arc<Inode>) {
    if a.ino <= b.ino { (a, b) } else { (b, a) }
}

/// # Errors
/// The inode is no directory, or a removed one.
pub(super) fn check_dir(disk: &DiskInode) -> Result<(), FsError> {
    if !disk.is_dir() {
        Err(FsError::NotDirectory)
    } else if disk.links == 0 {
        Err(FsError::NotFound)
    } else {
        Ok(())
    }
}

/// Marks a directory as changed.
pub(super) fn touch(disk: &mut DiskInode, now: Time) {
    disk.mtime = now;
    disk.ctime = now;
    disk.version += 1;
}

impl Fs {
    /// Finds a name in a directory. The caller refers to the inode from then on
    /// ([`forget`](Self::forget)).
    ///
    /// # Errors
    /// There is no such name, `parent` is no directory, or a block can't be read.
    pub fn lookup(&self, _caller: &Caller, parent: Ino, name: &[u8]) -> Result<Attr, FsError> {
        loop {
            let found = self.find(parent, name)?;
            let entry = found.entry.ok_or(FsError::NotFound)?;
            match self.inode(entry.ino) {
                Ok(inode) => {
                    // Under the lock the inode is not deleted.
                    let state = inode.state.read();
                    if state.disk.links > 0 {
                        inode.reference();
                        return Ok(Attr::of(inode.ino, &state));
                    }
                }
                Err(FsError::Stale(_)) => {}
                Err(error) => return Err(error),
            }
            self.check_changed(parent, found)?;
        }
    }

    /// The entry of a name.
    pub(super) fn find(&self, parent: Ino, name: &[u8]) -> Result<Found, FsError> {
        let parent = self.inode(parent)?;
        let state = parent.state.read();
        check_dir(&state.disk)?;
        let entry = dir::lookup(parent.ino, &state.disk, &self.view(), name)?;
        Ok(Found { entry, version: state.disk.version })
    }

    /// Checks that a directory has changed since it had an entry whose inode was free later. The
    /// name may lead to an inode with the same number again.
    ///
    /// # Errors
    /// It has not changed, so the entry itself is wrong.
    pub(super) fn check_changed(&self, parent: Ino, found: Found) -> Result<(), FsError> {
        let is_same = self.inode(parent)?.state.read().disk.version == found.version;
        match found.entry {
            Some(Entry { ino, .. }) if is_same => {
                Err(FsError::DamagedInode { what: "entry of a free inode", ino })
            }
            _ => Ok(()),
        }
    }

    /// Removes `count` references of the caller to an inode. A removed file whose last reference
    /// goes is deleted.
    pub fn forget(&self, ino: Ino, count: u64) {
        let Ok(inode) = self.inodes.get(ino) else { return };
        if inode.unreference(count) {
            self.on_unreferenced(inode);
        }
    }

    /// Adds a reference: an open file.
    ///
    /// # Errors
    /// The inode is gone.
    pub fn open(&self, ino: Ino) -> Result<Attr, FsError> {
        let inode = self.inode(ino)?;
        let state = inode.state.read();
        if inode.is_gone() {
            return Err(FsError::Stale(ino));
        }
        inode.reference();
        Ok(Attr::of(ino, &state))
    }

    /// Reads a directory from `cookie` on; 0 is its beginning. `sink` gets the entries, `.` and
    /// `..` first, and stops with [`ControlFlow::Break`].
    ///
    /// # Errors
    /// The inode is no directory, or a block can't be read.
    pub fn read_dir(
        &self,
        ino: Ino,
        cookie: u64,
        sink: &mut dyn FnMut(DirItem<'_>) -> ControlFlow<()>,
    ) -> Result<(), FsError> {
        let inode = self.inode(ino)?;
        let state = inode.state.read();
        check_dir(&state.disk)?;
        dir::read(ino, &state.disk, &self.view(), cookie, sink)
    }

    /// The target of a symbolic link.
    ///
    /// # Errors
    /// The inode is no symbolic link, or its block can't be read.
    pub fn read_link(&self, ino: Ino) -> Result<Vec<u8>, FsError> {
        let inode = self.inode(ino)?;
        let state = inode.state.read();
        if !state.disk.is_symlink() {
            return Err(FsError::Invalid);
        }
        let damaged = FsError::DamagedInode { what: "size of a symbolic link", ino };
        let size = usize::try_from(state.disk.size).map_err(|_| damaged.clone())?;
        if !state.disk.flags.contains(InodeFlags::EXTENTS) {
            return state.disk.i_block.get(..size).map(<[u8]>::to_vec).ok_or(damaged);
        }
        let Run::Mapped(Extent { physical, .. }) =
            extents::lookup(ino, &state.disk, &self.view(), 0)?
        else {
            return Err(damaged);
        };
        let block = self.read_meta(physical, BlockKind::Plain)?;
        block.get(..size).map(<[u8]>::to_vec).ok_or(damaged)
    }

    /// Makes a file, a directory, a device, a symbolic link. The caller refers to it from then on.
    ///
    /// # Errors
    /// The name exists or is too long, there is no space, and the like.
    pub fn create(
        &self,
        caller: &Caller,
        parent: Ino,
        name: &[u8],
        new: &NewInode<'_>,
        now: Time,
    ) -> Result<Attr, FsError> {
        let parent = self.inode(parent)?;
        let inode = self.retry(|| self.create_once(caller, &parent, name, new, now))?;
        Ok(Attr::new(&inode))
    }

    fn create_once(
        &self,
        caller: &Caller,
        parent: &Arc<Inode>,
        name: &[u8],
        new: &NewInode<'_>,
        now: Time,
    ) -> Result<Arc<Inode>, FsError> {
        let mut op = self.begin()?;
        op.set_claim(Claim::of(caller.uid == 0));
        // Without the inode there is no data to read.
        op.change_data();
        let mut state = op.lock(parent)?;
        check_dir(&state.disk)?;
        if dir::lookup(parent.ino, &state.disk, &op, name)?.is_some() {
            return Err(FsError::Exists);
        }
        state.disk.check_mutable()?;
        let is_dir = new.mode & file_type::MASK == file_type::DIRECTORY;
        let mut parent_disk = state.disk.clone();
        if is_dir {
            add_subdirectory(self, &mut parent_disk)?;
        }
        let ino = op.allocate_inode(parent.ino, is_dir)?;
        let mut disk = self.new_inode(caller, &state.disk, new, now);
        self.fill_new(&mut op, ino, &mut disk, new, parent.ino)?;
        if !disk.is_symlink() {
            let default = xattr::acl(parent.ino, &state.disk, &op, AclKind::Default)?;
            inherit_permissions(&mut op, ino, &mut disk, caller, default.as_ref())?;
        }
        let mut open = OpenInode { ino: parent.ino, disk: &mut parent_disk };
        dir::insert(&mut open, &mut op, name, ino, FileKind::of_mode(new.mode))?;
        touch(&mut parent_disk, now);

        let inode = Arc::new(self.inodes.make(ino, disk));
        inode.reference();
        let fields = self.encode_fields(ino, &inode.state.read());
        let finished = op.finish(&[parent, &inode])?;
        if inode.state.read().disk.xattr_block != BlockNo(0) {
            // Records do not describe the block of attributes.
            inode.make_unfit(finished.tid);
        }
        *inode.creation.lock() = Some(Creation::new(parent.ino, name, finished.tid, fields));
        self.inodes.insert_new(Arc::clone(&inode));
        state.disk = parent_disk;
        drop(finished);
        Ok(inode)
    }

    /// The fields of a new inode in a directory.
    pub(super) fn new_inode(
        &self,
        caller: &Caller,
        parent: &DiskInode,
        new: &NewInode<'_>,
        now: Time,
    ) -> DiskInode {
        let is_dir = new.mode & file_type::MASK == file_type::DIRECTORY;
        let mut mode = new.mode;
        let mut gid = caller.gid;
        if parent.mode & 0o2000 != 0 {
            gid = parent.gid;
            if is_dir {
                mode |= 0o2000;
            } else if mode & 0o2010 == 0o2010 && !caller.may_set_group_id(gid) {
                mode &= !0o2000;
            }
        }
        // Flags that new files inherit, as on ext4.
        let mut flags = parent.flags
            & (InodeFlags::SYNC | InodeFlags::NODUMP | InodeFlags::NOATIME | InodeFlags::DIRSYNC);
        if !is_dir {
            flags -= InodeFlags::DIRSYNC;
        }
        DiskInode {
            mode,
            uid: caller.uid,
            gid,
            atime: now,
            ctime: now,
            mtime: now,
            crtime: now,
            links: if is_dir { 2 } else { 1 },
            flags,
            generation: self.next_generation.fetch_add(1, Ordering::Relaxed),
            version: 1,
            extra_isize: self.layout.want_extra_isize,
            ..DiskInode::zeroed()
        }
    }

    /// Gives a new inode its first content.
    fn fill_new(
        &self,
        op: &mut Op<'_>,
        ino: Ino,
        disk: &mut DiskInode,
        new: &NewInode<'_>,
        parent: Ino,
    ) -> Result<(), FsError> {
        let kind = new.mode & file_type::MASK;
        match kind {
            file_type::REGULAR => extents::init(&mut OpenInode { ino, disk }),
            file_type::DIRECTORY => {
                let mut open = OpenInode { ino, disk };
                extents::init(&mut open);
                dir::create_empty(&mut open, op, parent)?;
            }
            file_type::SYMLINK => {
                if new.target.is_empty() || new.target.len() >= BLOCK_BYTES {
                    return Err(FsError::NameTooLong);
                }
                disk.size = new.target.len() as u64;
                if new.target.len() < I_BLOCK_BYTES {
                    disk.i_block[..new.target.len()].copy_from_slice(new.target);
                } else {
                    let mut open = OpenInode { ino, disk };
                    extents::init(&mut open);
                    let at = op.allocate(self.data_goal(ino))?;
                    let block = op.create(at, BlockKind::Plain)?;
                    block[..new.target.len()].copy_from_slice(new.target);
                    let extent = Extent { logical: 0, len: 1, physical: at, unwritten: false };
                    extents::insert(&mut open, op, extent)?;
                }
            }
            file_type::CHARACTER | file_type::BLOCK => set_rdev(disk, new.rdev),
            file_type::FIFO | file_type::SOCKET => {}
            _ => return Err(FsError::Invalid),
        }
        Ok(())
    }

    /// Removes the name of a file. The file itself goes when nothing refers to it.
    ///
    /// # Errors
    /// There is no such name, or it is a directory's.
    pub fn unlink(&self, _: &Caller, parent: Ino, name: &[u8], now: Time) -> Result<(), FsError> {
        self.remove_name(parent, name, false, now)
    }

    /// Removes an empty directory.
    ///
    /// # Errors
    /// There is no such name, it is no directory's, or it is not empty.
    pub fn rmdir(&self, _: &Caller, parent: Ino, name: &[u8], now: Time) -> Result<(), FsError> {
        self.remove_name(parent, name, true, now)
    }

    fn remove_name(
        &self,
        parent: Ino,
        name: &[u8],
        is_dir: bool,
        now: Time,
    ) -> Result<(), FsError> {
        self.submit_held()?;
        let parent = self.inode(parent)?;
        loop {
            let found = self.find(parent.ino, name)?;
            let entry = found.entry.ok_or(FsError::NotFound)?;
            if entry.ino == parent.ino {
                return Err(if is_dir { FsError::Invalid } else { FsError::IsDirectory });
            }
            let child = match self.inode(entry.ino) {
                Err(FsError::Stale(_)) => {
                    self.check_changed(parent.ino, found)?;
                    continue;
                }
                other => other?,
            };
            let removed =
                self.retry(|| self.remove_name_once(&parent, &child, name, is_dir, now))?;
            if removed {
                if !child.is_referenced() {
                    self.on_unreferenced(child);
                }
                return Ok(());
            }
        }
    }

    /// Whether the name was removed; else it belongs to another inode by now.
    fn remove_name_once(
        &self,
        parent: &Arc<Inode>,
        child: &Arc<Inode>,
        name: &[u8],
        is_dir: bool,
        now: Time,
    ) -> Result<bool, FsError> {
        let mut op = self.begin()?;
        op.set_claim(Claim::WriteBack);
        let (low, high) = in_order(parent, child);
        let mut low_state = match op.lock(low) {
            Err(FsError::Stale(ino)) if ino == child.ino => return Ok(false),
            other => other?,
        };
        let mut high_state = match op.lock(high) {
            Err(FsError::Stale(ino)) if ino == child.ino => return Ok(false),
            other => other?,
        };
        let (parent_state, child_state): (&mut InodeState, &mut InodeState) =
            if parent.ino < child.ino {
                (&mut low_state, &mut high_state)
            } else {
                (&mut high_state, &mut low_state)
            };
        check_dir(&parent_state.disk)?;
        match dir::lookup(parent.ino, &parent_state.disk, &op, name)? {
            Some(entry) if entry.ino == child.ino => {}
            _ => return Ok(false),
        }
        let mut parent_disk = parent_state.disk.clone();
        let mut disk = child_state.disk.clone();
        parent_disk.check_replaceable()?;
        disk.check_replaceable()?;
        match (is_dir, disk.is_dir()) {
            (true, false) => return Err(FsError::NotDirectory),
            (false, true) => return Err(FsError::IsDirectory),
            (true, true) => {
                if !dir::is_empty(child.ino, &disk, &op)? {
                    return Err(FsError::NotEmpty);
                }
                remove_subdirectory(&mut parent_disk);
                disk.links = 0;
                disk.size = 0;
            }
            (false, false) => disk.links = disk.links.saturating_sub(1),
        }
        dir::remove(&mut OpenInode { ino: parent.ino, disk: &mut parent_disk }, &mut op, name)?;
        touch(&mut parent_disk, now);
        disk.ctime = now;
        disk.version += 1;
        let finished = op.finish(&[parent, child])?;
        if disk.links == 0 && !is_bug_planted(Plant::OrphanForgotten) {
            self.orphans.lock().add(child.ino, &mut self.running.lock());
        }
        self.make_unfit(child, parent, name, finished.tid);
        parent_state.disk = parent_disk;
        if is_dir {
            child_state.written_size = 0;
        }
        child_state.disk = disk;
        drop(finished);
        Ok(true)
    }

    /// Makes another name of a file.
    ///
    /// # Errors
    /// The name exists, the inode is a directory, or it has too many links.
    pub fn link(
        &self,
        caller: &Caller,
        ino: Ino,
        parent: Ino,
        name: &[u8],
        now: Time,
    ) -> Result<Attr, FsError> {
        self.submit_held()?;
        let inode = self.inode(ino)?;
        let parent = self.inode(parent)?;
        self.retry(|| self.link_once(caller, &inode, &parent, name, now))
    }

    fn link_once(
        &self,
        caller: &Caller,
        inode: &Arc<Inode>,
        parent: &Arc<Inode>,
        name: &[u8],
        now: Time,
    ) -> Result<Attr, FsError> {
        if inode.ino == parent.ino {
            return Err(FsError::NotPermitted);
        }
        let mut op = self.begin()?;
        op.set_claim(Claim::of(caller.uid == 0));
        let (low, high) = in_order(parent, inode);
        let mut low_state = op.lock(low)?;
        let mut high_state = op.lock(high)?;
        let (parent_state, state): (&mut InodeState, &mut InodeState) = if parent.ino < inode.ino {
            (&mut low_state, &mut high_state)
        } else {
            (&mut high_state, &mut low_state)
        };
        check_dir(&parent_state.disk)?;
        if dir::lookup(parent.ino, &parent_state.disk, &op, name)?.is_some() {
            return Err(FsError::Exists);
        }
        if state.disk.is_dir() {
            return Err(FsError::NotPermitted);
        }
        // A file without a name may get one again only if it was made so (`O_TMPFILE`).
        if state.disk.links == 0 {
            return Err(FsError::NotFound);
        }
        parent_state.disk.check_mutable()?;
        state.disk.check_replaceable()?;
        if state.disk.links >= LINKS_MAX {
            return Err(FsError::TooManyLinks);
        }
        let mut parent_disk = parent_state.disk.clone();
        let kind = FileKind::of_mode(state.disk.mode);
        let mut open = OpenInode { ino: parent.ino, disk: &mut parent_disk };
        dir::insert(&mut open, &mut op, name, inode.ino, kind)?;
        touch(&mut parent_disk, now);
        let finished = op.finish(&[parent, inode])?;
        self.make_unfit(inode, parent, name, finished.tid);
        parent_state.disk = parent_disk;
        state.disk.links += 1;
        state.disk.ctime = now;
        state.disk.version += 1;
        inode.reference();
        drop(finished);
        Ok(Attr::of(inode.ino, state))
    }
}

impl Fs {
    /// A name was taken from an inode, or given to it a second time. Neither may be in a file-level
    /// record before transaction `tid` is durable: recovery would find the name in use, or undo the
    /// change of it.
    pub(super) fn make_unfit(&self, inode: &Inode, parent: &Inode, name: &[u8], tid: Tid) {
        inode.make_unfit(tid);
        parent.unfit_names.lock().add(name, tid, self.durable());
    }
}

/// Gives a new inode the access control lists that its directory has for it, or takes the bits of
/// the caller's umask from its mode.
fn inherit_permissions(
    op: &mut Op<'_>,
    ino: Ino,
    disk: &mut DiskInode,
    caller: &Caller,
    default: Option<&Acl>,
) -> Result<(), FsError> {
    let Some(default) = default else {
        disk.mode &= !(caller.umask & 0o777);
        return Ok(());
    };
    let (mode, access) = default.inherit(disk.mode);
    disk.mode = mode;
    let is_dir = disk.is_dir();
    let mut open = OpenInode { ino, disk };
    if let Some(access) = access {
        xattr::set_acl(&mut open, op, AclKind::Access, Some(&access))?;
    }
    if is_dir {
        xattr::set_acl(&mut open, op, AclKind::Default, Some(default))?;
    }
    Ok(())
}

/// Counts a subdirectory in its parent. With `dir_nlink` a directory with too many has one link.
pub(super) fn add_subdirectory(fs: &Fs, parent: &mut DiskInode) -> Result<(), FsError> {
    match parent.links {
        1 => {}
        links if links < LINKS_MAX => parent.links = links + 1,
        _ if fs.layout.dir_nlink => parent.links = 1,
        _ => return Err(FsError::TooManyLinks),
    }
    Ok(())
}

/// Counts a subdirectory less in its parent.
pub(super) fn remove_subdirectory(parent: &mut DiskInode) {
    // One link stands for too many to be counted.
    if parent.links > 2 {
        parent.links -= 1;
    }
}

/// Sets the number of a device, in the old form if it fits.
fn set_rdev(disk: &mut DiskInode, rdev: u32) {
    // Linux's numbers: minor bits 0-7 and 20-31, major bits 8-19.
    let (major, minor) = (rdev >> 8 & 0xfff, rdev & 0xff | rdev >> 12 & 0xfff00);
    let (old, new) = if major < 256 && minor < 256 {
        (major << 8 | minor, 0)
    } else {
        (0, minor & 0xff | major << 8 | (minor & !0xff) << 12)
    };
    disk.i_block[..4].copy_from_slice(&old.to_le_bytes());
    disk.i_block[4..8].copy_from_slice(&new.to_le_bytes());
}

/// The number of a device; 0 for all other inodes.
pub(super) fn rdev(disk: &DiskInode) -> u32 {
    if !matches!(disk.file_type(), file_type::CHARACTER | file_type::BLOCK) {
        return 0;
    }
    let [a, b, c, d, e, f, g, h, ..] = disk.i_block;
    match u32::from_le_bytes([a, b, c, d]) {
        0 => u32::from_le_bytes([e, f, g, h]),
        old => old,
    }
}

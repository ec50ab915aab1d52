//! Attributes of inodes, and the figures of the file system.

use alloc::sync::Arc;
use alloc::vec::Vec;

use super::Fs;
use super::namespace::rdev;
use crate::acl::AclKind;
use crate::block::{BLOCK_BYTES, BlockNo, Ino};
use crate::error::FsError;
use crate::format::inode::{DiskInode, InodeFlags, Time};
use crate::fs::Caller;
use crate::groups::Claim;
use crate::inode_table::{Inode, InodeState};
use crate::open_inode::OpenInode;
use crate::sync::MutexGuard;
use crate::xattr::{self, SetMode};

/// The attributes of an inode.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Attr {
    /// Its number.
    pub ino: Ino,
    /// Distinguishes the uses of the number.
    pub generation: u32,
    /// Type and permissions.
    pub mode: u16,
    /// The owner.
    pub uid: u32,
    /// The group.
    pub gid: u32,
    /// The size in bytes.
    pub size: u64,
    /// The number of 512-byte sectors.
    pub sectors: u64,
    /// The number of hard links.
    pub links: u32,
    /// The number of a device.
    pub rdev: u32,
    /// The times.
    pub times: Times,
    /// The flags.
    pub flags: InodeFlags,
}

/// The times of an inode.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Times {
    /// Last access.
    pub atime: Time,
    /// Last change of the data.
    pub mtime: Time,
    /// Last change of the inode.
    pub ctime: Time,
    /// Creation.
    pub crtime: Time,
}

impl Attr {
    pub(super) fn new(inode: &Inode) -> Self {
        Self::of(inode.ino, &inode.state.read())
    }

    pub(super) fn of(ino: Ino, state: &InodeState) -> Self {
        let InodeState { disk, pages, .. } = state;
        Self {
            ino,
            generation: disk.generation,
            mode: disk.mode,
            uid: disk.uid,
            gid: disk.gid,
            size: disk.size,
            // Blocks that will be allocated count already.
            sectors: disk.sectors + pages.reserved() * (BLOCK_BYTES as u64 / 512),
            links: u32::from(disk.links),
            rdev: rdev(disk),
            times: Times {
                atime: disk.atime,
                mtime: disk.mtime,
                ctime: disk.ctime,
                crtime: disk.crtime,
            },
            flags: disk.flags,
        }
    }
}

/// The attributes to set; `None` leaves one as it is.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct SetAttr {
    /// The permissions.
    pub mode: Option<u16>,
    /// The owner.
    pub uid: Option<u32>,
    /// The group.
    pub gid: Option<u32>,
    /// The size.
    pub size: Option<u64>,
    /// The time of the last access.
    pub atime: Option<Time>,
    /// The time of the last change of the data.
    pub mtime: Option<Time>,
    /// The time of the last change of the inode, from a kernel that keeps it.
    pub ctime: Option<Time>,
    /// Set-user-ID and set-group-ID bits are removed, as a change by another user does.
    pub remove_set_ids: bool,
}

/// The figures of the file system, as `statfs` returns them.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct StatFs {
    /// Blocks for data.
    pub blocks: u64,
    /// Free blocks.
    pub blocks_free: u64,
    /// Free blocks for users other than root.
    pub blocks_available: u64,
    /// Inodes.
    pub inodes: u64,
    /// Free inodes.
    pub inodes_free: u64,
}

impl Fs {
    /// The attributes of an inode.
    ///
    /// # Errors
    /// The inode is gone or can't be read.
    pub fn attr(&self, ino: Ino) -> Result<Attr, FsError> {
        Ok(Attr::new(&*self.inode(ino)?))
    }

    /// Sets attributes, and returns all.
    ///
    /// # Errors
    /// The size can't be set, or the inode is gone.
    pub fn set_attr(
        &self,
        caller: &Caller,
        ino: Ino,
        set: &SetAttr,
        now: Time,
    ) -> Result<Attr, FsError> {
        let inode = self.inode(ino)?;
        if let Some(size) = set.size {
            self.set_size(&inode, size, now)?;
        }
        if set.mode.is_some() || set.uid.is_some() || set.gid.is_some() {
            // A held file may need a main commit afterwards.
            self.submit_held()?;
        }
        self.retry(|| self.set_attr_once(caller, &inode, set, now))
    }

    /// Removes the set-user-ID and set-group-ID bits, as ext4 does when another user than root changes
    /// the data: the kernel leaves that to the file system with writes, and with `fallocate`.
    ///
    /// # Errors
    /// As [`set_attr`](Self::set_attr).
    pub fn remove_set_ids(&self, caller: &Caller, ino: Ino, now: Time) -> Result<(), FsError> {
        if caller.uid == 0 || self.attr(ino)?.mode & 0o6000 == 0 {
            return Ok(());
        }
        let set = SetAttr { remove_set_ids: true, ..SetAttr::default() };
        self.set_attr(caller, ino, &set, now).map(drop)
    }

    fn set_attr_once(
        &self,
        caller: &Caller,
        inode: &Arc<Inode>,
        set: &SetAttr,
        now: Time,
    ) -> Result<Attr, FsError> {
        let mut op = self.begin()?;
        op.set_claim(Claim::of(caller.uid == 0));
        let mut state = op.lock(inode)?;
        let mut disk = state.disk.clone();
        disk.check_mutable()?;
        if set.mode.is_some() || set.uid.is_some() || set.gid.is_some() {
            disk.check_replaceable()?;
        }
        let _shared = self.lock_attributes(&disk);
        if let Some(mode) = set.mode {
            disk.mode = disk.mode & 0xf000 | mode & 0o7777;
            // A file of a group that the caller is not in can't get the set-group-ID bit.
            if !caller.may_set_group_id(disk.gid) {
                disk.mode &= !0o2000;
            }
            if let Some(mut acl) = xattr::acl(inode.ino, &disk, &op, AclKind::Access)? {
                acl.chmod(mode);
                let mut open = OpenInode { ino: inode.ino, disk: &mut disk };
                xattr::set_acl(&mut open, &mut op, AclKind::Access, Some(&acl))?;
            }
        }
        disk.uid = set.uid.unwrap_or(disk.uid);
        disk.gid = set.gid.unwrap_or(disk.gid);
        let is_chown = set.uid.is_some() || set.gid.is_some();
        if (set.remove_set_ids || is_chown) && !disk.is_dir() {
            disk.mode &= !super::file::set_id_bits(disk.mode);
        }
        disk.atime = set.atime.unwrap_or(disk.atime).in_range();
        disk.mtime = set.mtime.unwrap_or(disk.mtime).in_range();
        disk.ctime = set.ctime.unwrap_or(now).in_range();
        disk.version += 1;
        let finished = op.finish(&[inode])?;
        // What a program puts into a directory after a chmod must not be there with the permissions
        // of before. The block of attributes changes only with the mode.
        if (set.mode.is_some() || is_chown) && needs_main_commit(&state.disk, &disk) {
            inode.make_unfit(finished.tid);
        }
        state.disk = disk;
        drop(finished);
        let attr = Attr::of(inode.ino, &state);
        Ok(attr)
    }

    /// Changes fields of an inode that need nothing else.
    pub(super) fn change_times(
        &self,
        inode: &Arc<Inode>,
        change: impl FnOnce(&mut DiskInode),
    ) -> Result<(), FsError> {
        let op = self.begin()?;
        let mut state = op.lock(inode)?;
        let finished = op.finish(&[inode])?;
        change(&mut state.disk);
        drop(finished);
        Ok(())
    }

    /// The figures of the file system.
    #[must_use]
    pub fn statfs(&self) -> StatFs {
        let counts = self.groups.counts();
        StatFs {
            blocks: self.layout.blocks.saturating_sub(self.overhead),
            blocks_free: counts.unreserved_blocks,
            blocks_available: counts.available_blocks,
            inodes: u64::from(self.layout.inodes),
            inodes_free: u64::from(counts.free_inodes),
        }
    }

    /// Locks the block of attributes of an inode, if it has one: other inodes may share it, and
    /// their locks do not protect it. The guard is kept until the operation is finished.
    pub(super) fn lock_attributes(&self, disk: &DiskInode) -> Option<MutexGuard<'_, ()>> {
        (disk.xattr_block != BlockNo(0)).then(|| self.shared_attributes.lock())
    }

    /// An extended attribute.
    ///
    /// # Errors
    /// [`FsError::NoAttribute`], or the inode is gone or can't be read.
    pub fn get_xattr(&self, ino: Ino, name: &[u8]) -> Result<Vec<u8>, FsError> {
        let inode = self.inode(ino)?;
        let state = inode.state.read();
        xattr::get(ino, &state.disk, &self.view(), name)
    }

    /// The names of all extended attributes, each with a zero byte behind it.
    ///
    /// # Errors
    /// The inode is gone or can't be read.
    pub fn list_xattr(&self, caller: &Caller, ino: Ino) -> Result<Vec<u8>, FsError> {
        let inode = self.inode(ino)?;
        let state = inode.state.read();
        xattr::list(ino, &state.disk, &self.view(), caller.uid == 0)
    }

    /// Sets an extended attribute.
    ///
    /// # Errors
    /// The attribute exists or not, against the mode; or there is no space.
    pub fn set_xattr(
        &self,
        caller: &Caller,
        ino: Ino,
        name: &[u8],
        value: &[u8],
        mode: SetMode,
        now: Time,
    ) -> Result<(), FsError> {
        self.submit_held()?;
        let inode = self.inode(ino)?;
        self.retry(|| {
            let mut op = self.begin()?;
            op.set_claim(Claim::of(caller.uid == 0));
            let mut state = op.lock(&inode)?;
            let mut disk = state.disk.clone();
            disk.check_replaceable()?;
            let _shared = self.lock_attributes(&disk);
            xattr::set(&mut OpenInode { ino, disk: &mut disk }, &mut op, name, value, mode)?;
            if name == AclKind::Access.name() && !caller.may_set_group_id(disk.gid) {
                // It has changed the mode, as chmod does.
                disk.mode &= !0o2000;
            }
            disk.ctime = now;
            disk.version += 1;
            let finished = op.finish(&[&inode])?;
            if needs_main_commit(&state.disk, &disk) {
                inode.make_unfit(finished.tid);
            }
            state.disk = disk;
            drop(finished);
            Ok(())
        })
    }

    /// Removes an extended attribute.
    ///
    /// # Errors
    /// [`FsError::NoAttribute`].
    pub fn remove_xattr(
        &self,
        caller: &Caller,
        ino: Ino,
        name: &[u8],
        now: Time,
    ) -> Result<(), FsError> {
        self.submit_held()?;
        let inode = self.inode(ino)?;
        self.retry(|| {
            let mut op = self.begin()?;
            op.set_claim(Claim::of(caller.uid == 0));
            let mut state = op.lock(&inode)?;
            let mut disk = state.disk.clone();
            disk.check_replaceable()?;
            let _shared = self.lock_attributes(&disk);
            xattr::remove(&mut OpenInode { ino, disk: &mut disk }, &mut op, name)?;
            disk.ctime = now;
            disk.version += 1;
            let finished = op.finish(&[&inode])?;
            if needs_main_commit(&state.disk, &disk) {
                inode.make_unfit(finished.tid);
            }
            state.disk = disk;
            drop(finished);
            Ok(())
        })
    }
}

/// Whether a change of attributes makes an inode unfit for records: they do not describe the block
/// of attributes, and have the first fields of the directories on the way.
fn needs_main_commit(old: &DiskInode, new: &DiskInode) -> bool {
    new.is_dir() || [old, new].iter().any(|disk| disk.xattr_block != BlockNo(0))
}

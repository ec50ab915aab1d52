//! Permissions: the bits of the mode, and access control lists as POSIX 1003.1e (draft 17) has them.

use alloc::vec::Vec;

use crate::error::FsError;
use crate::format::bytes::{u16_at, u32_at};
use crate::format::inode::{DiskInode, file_type};

#[cfg(test)]
mod tests;

bitflags::bitflags! {
    /// Kinds of access, as three bits of the mode have them.
    #[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
    pub struct Access: u8 {
        /// Execute a file, or search a directory.
        const EXECUTE = 1;
        /// Write.
        const WRITE = 2;
        /// Read.
        const READ = 4;
    }
}

impl Access {
    /// The lowest three bits of `bits`.
    const fn from_mode(bits: u16) -> Self {
        Self::from_bits_truncate((bits & 7) as u8)
    }

    const fn to_mode(self) -> u16 {
        self.bits() as u16
    }
}

/// The identity of a program that calls.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Caller<'a> {
    /// The user; 0 is root.
    pub uid: u32,
    /// The group.
    pub gid: u32,
    /// More groups.
    pub groups: &'a [u32],
}

impl Caller<'_> {
    /// Whether the caller is in a group.
    #[must_use]
    pub fn is_in(&self, gid: u32) -> bool {
        self.gid == gid || self.groups.contains(&gid)
    }
}

/// The fields of an inode that decide about access.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Permissions {
    /// Type and permissions (`i_mode`).
    pub mode: u16,
    /// The owner.
    pub uid: u32,
    /// The group.
    pub gid: u32,
}

impl From<&DiskInode> for Permissions {
    fn from(disk: &DiskInode) -> Self {
        Self { mode: disk.mode, uid: disk.uid, gid: disk.gid }
    }
}

/// Whether a caller may do all of `want` with an inode that has the access list `acl`, or none.
///
/// Root may do everything, except that it may only execute a file that has one of the three bits for
/// it.
#[must_use]
pub fn may(caller: Caller<'_>, inode: Permissions, acl: Option<&Acl>, want: Access) -> bool {
    if caller.uid == 0 {
        let is_dir = inode.mode & file_type::MASK == file_type::DIRECTORY;
        return is_dir || !want.contains(Access::EXECUTE) || inode.mode & 0o111 != 0;
    }
    let granted = if caller.uid == inode.uid {
        Access::from_mode(inode.mode >> 6)
    } else if let Some(acl) = acl {
        return acl.allows(caller, inode.gid, want);
    } else if caller.is_in(inode.gid) {
        Access::from_mode(inode.mode >> 3)
    } else {
        Access::from_mode(inode.mode)
    };
    granted.contains(want)
}

/// The two access control lists of an inode.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum AclKind {
    /// The list that decides about access to the inode.
    Access,
    /// The list that new files in the directory begin with.
    Default,
}

impl AclKind {
    /// The name of the attribute in user space.
    #[must_use]
    pub const fn name(self) -> &'static [u8] {
        match self {
            Self::Access => b"system.posix_acl_access",
            Self::Default => b"system.posix_acl_default",
        }
    }

    /// The number of the attribute on the drive. The rest of its name is empty.
    pub(crate) const fn index(self) -> u8 {
        match self {
            Self::Access => 2,
            Self::Default => 3,
        }
    }

    pub(crate) fn of_name(name: &[u8]) -> Option<Self> {
        [Self::Access, Self::Default].into_iter().find(|kind| kind.name() == name)
    }

    pub(crate) fn of_index(index: u8) -> Option<Self> {
        [Self::Access, Self::Default].into_iter().find(|kind| kind.index() == index)
    }
}

/// The subject of an entry.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Subject {
    /// The owner.
    Owner,
    /// A user.
    User(u32),
    /// The group of the inode.
    OwningGroup,
    /// A group.
    Group(u32),
    /// The most that users and groups may do, except the owner.
    Mask,
    /// All others.
    Other,
}

impl Subject {
    const fn tag(self) -> u16 {
        match self {
            Self::Owner => 0x1,
            Self::User(_) => 0x2,
            Self::OwningGroup => 0x4,
            Self::Group(_) => 0x8,
            Self::Mask => 0x10,
            Self::Other => 0x20,
        }
    }

    const fn of_tag(tag: u16, id: u32) -> Option<Self> {
        Some(match tag {
            0x1 => Self::Owner,
            0x2 => Self::User(id),
            0x4 => Self::OwningGroup,
            0x8 => Self::Group(id),
            0x10 => Self::Mask,
            0x20 => Self::Other,
            _ => return None,
        })
    }

    const fn id(self) -> Option<u32> {
        match self {
            Self::User(id) | Self::Group(id) => Some(id),
            _ => None,
        }
    }
}

/// The entry of an access control list.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct AclEntry {
    /// Its subject.
    pub subject: Subject,
    /// The access that it has.
    pub access: Access,
}

/// A valid access control list: an owner, users, the owning group, groups, a mask, others, in this
/// order. The mask may be missing if there are no users and groups.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Acl(Vec<AclEntry>);

/// The first 4 bytes in user space. On the drive they are 1.
const USER_VERSION: u32 = 2;
const DISK_VERSION: u32 = 1;
/// The id in user space of an entry that has none.
const NO_ID: u32 = u32::MAX;

impl Acl {
    /// A list of entries.
    ///
    /// # Errors
    /// [`FsError::Invalid`] if the list is not valid.
    pub fn new(entries: Vec<AclEntry>) -> Result<Self, FsError> {
        // Tags rise in a valid list; those without an id come once.
        let rises = entries.windows(2).all(|pair| {
            let (first, second) = (pair[0].subject, pair[1].subject);
            first.tag() < second.tag() || first.tag() == second.tag() && first.id().is_some()
        });
        let has = |subject| entries.iter().any(|entry| entry.subject == subject);
        let needs_mask = entries.iter().any(|entry| entry.subject.id().is_some());
        let good = rises
            && has(Subject::Owner)
            && has(Subject::OwningGroup)
            && has(Subject::Other)
            && (!needs_mask || has(Subject::Mask))
            && entries.iter().all(|entry| entry.subject.id() != Some(NO_ID));
        if good { Ok(Self(entries)) } else { Err(FsError::Invalid) }
    }

    /// The entries, in their order.
    #[must_use]
    pub fn entries(&self) -> &[AclEntry] {
        &self.0
    }

    /// Reads the form of user space: the value of `system.posix_acl_access`. A list without entries
    /// is none.
    ///
    /// # Errors
    /// [`FsError::NotSupported`] for another version; [`FsError::Invalid`].
    pub fn from_user(value: &[u8]) -> Result<Option<Self>, FsError> {
        let (version, rest) = value.split_first_chunk::<4>().ok_or(FsError::Invalid)?;
        if u32_at(version, 0) != USER_VERSION {
            return Err(FsError::NotSupported);
        }
        let entries = rest.chunks(8).map(|raw| {
            if raw.len() < 8 {
                return Err(FsError::Invalid);
            }
            entry(u16_at(raw, 0), u16_at(raw, 2), u32_at(raw, 4)).ok_or(FsError::Invalid)
        });
        let entries = entries.collect::<Result<Vec<_>, _>>()?;
        if entries.is_empty() { Ok(None) } else { Self::new(entries).map(Some) }
    }

    /// The form of user space.
    #[must_use]
    pub fn to_user(&self) -> Vec<u8> {
        let mut value = USER_VERSION.to_le_bytes().to_vec();
        for AclEntry { subject, access } in &self.0 {
            value.extend(subject.tag().to_le_bytes());
            value.extend(access.to_mode().to_le_bytes());
            value.extend(subject.id().unwrap_or(NO_ID).to_le_bytes());
        }
        value
    }

    /// Reads the form on the drive: `None` outside if it is damaged, `None` inside if it is empty.
    pub(crate) fn from_disk(value: &[u8]) -> Option<Option<Self>> {
        if value.is_empty() {
            return Some(None);
        }
        let (version, mut rest) = value.split_first_chunk::<4>()?;
        if u32_at(version, 0) != DISK_VERSION {
            return None;
        }
        let mut entries = Vec::new();
        while let Some((raw, tail)) = rest.split_first_chunk::<4>() {
            let (tag, access) = (u16_at(raw, 0), u16_at(raw, 2));
            rest = tail;
            let mut id = NO_ID;
            if Subject::of_tag(tag, 0)?.id().is_some() {
                let (raw, tail) = rest.split_first_chunk::<4>()?;
                (id, rest) = (u32_at(raw, 0), tail);
            }
            entries.push(entry(tag, access, id)?);
        }
        match (rest.is_empty(), entries.is_empty()) {
            (false, _) => None,
            (true, true) => Some(None),
            (true, false) => Self::new(entries).ok().map(Some),
        }
    }

    /// The form on the drive.
    pub(crate) fn to_disk(&self) -> Vec<u8> {
        let mut value = DISK_VERSION.to_le_bytes().to_vec();
        for AclEntry { subject, access } in &self.0 {
            value.extend(subject.tag().to_le_bytes());
            value.extend(access.to_mode().to_le_bytes());
            if let Some(id) = subject.id() {
                value.extend(id.to_le_bytes());
            }
        }
        value
    }

    fn access_of(&self, subject: Subject) -> Option<Access> {
        self.0.iter().find(|entry| entry.subject == subject).map(|entry| entry.access)
    }

    /// Whether a caller that is neither root nor the owner may do all of `want`.
    fn allows(&self, caller: Caller<'_>, gid: u32, want: Access) -> bool {
        let mask = self.access_of(Subject::Mask).unwrap_or(Access::all());
        if let Some(access) = self.access_of(Subject::User(caller.uid)) {
            return (access & mask).contains(want);
        }
        let mut is_member = false;
        for AclEntry { subject, access } in &self.0 {
            let group = match subject {
                Subject::OwningGroup => gid,
                Subject::Group(gid) => *gid,
                _ => continue,
            };
            if caller.is_in(group) {
                is_member = true;
                // One group must grant all; grants of several groups do not add up.
                if (*access & mask).contains(want) {
                    return true;
                }
            }
        }
        // A valid list has an entry for others.
        !is_member && self.access_of(Subject::Other).is_some_and(|other| other.contains(want))
    }

    /// The permission bits of the mode of an inode that has this access list. The bits of the group
    /// are the mask, if there is one.
    #[must_use]
    pub fn mode(&self) -> u16 {
        let of = |subject| self.access_of(subject).map(Access::to_mode);
        let group = of(Subject::Mask).or(of(Subject::OwningGroup)).unwrap_or(0);
        of(Subject::Owner).unwrap_or(0) << 6 | group << 3 | of(Subject::Other).unwrap_or(0)
    }

    /// Whether [`mode`](Self::mode) expresses all of the list, so that it need not be stored.
    #[must_use]
    pub fn is_mode(&self) -> bool {
        self.0.len() == 3
    }

    /// Changes the list as `chmod` does: the owner, others, and the mask, or the owning group if
    /// there is no mask. Then [`mode`](Self::mode) is `mode & 0o777`.
    pub fn chmod(&mut self, mode: u16) {
        let has_mask = self.access_of(Subject::Mask).is_some();
        for AclEntry { subject, access } in &mut self.0 {
            match subject {
                Subject::Owner => *access = Access::from_mode(mode >> 6),
                Subject::Mask => *access = Access::from_mode(mode >> 3),
                Subject::OwningGroup if !has_mask => *access = Access::from_mode(mode >> 3),
                Subject::Other => *access = Access::from_mode(mode),
                _ => {}
            }
        }
    }

    /// The mode and the access list of a new file in a directory with this default list. `mode` is
    /// the one that the program wants, without its umask. The list is `None` if the mode
    /// expresses all of it. A new directory also gets the default list itself; a symbolic link
    /// has neither.
    #[must_use]
    pub fn inherit(&self, mode: u16) -> (u16, Option<Self>) {
        let bits = mode & self.mode();
        let mut acl = self.clone();
        acl.chmod(bits);
        let acl = Some(acl).filter(|acl| !acl.is_mode());
        (mode & !0o777 | bits & 0o777, acl)
    }
}

fn entry(tag: u16, access: u16, id: u32) -> Option<AclEntry> {
    let access = Access::from_bits(u8::try_from(access).ok()?)?;
    Some(AclEntry { subject: Subject::of_tag(tag, id)?, access })
}

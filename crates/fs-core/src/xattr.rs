//! Extended attributes: in the inode behind its fields, and in one block outside.
//!
//! A new value goes into the inode if it fits there, and else into the block. The kernel lets
//! inodes with equal attributes share a block, which then counts them. A change makes a copy
//! of such a block for the one inode; this crate does not share blocks anew.
//!
//! The lock of one inode does not protect a shared block. A caller holds one lock of the whole file
//! system around each change of attributes, until other operations see the change.

use alloc::sync::Arc;
use alloc::vec::Vec;

use crate::acl::{Acl, AclKind};
use crate::block::{BLOCK_BYTES, Block, BlockKind, BlockNo, Ino, MetaBlocks};
use crate::error::FsError;
use crate::format::bytes::{set_u32, u32_at};
use crate::format::inode::DiskInode;
use crate::open_inode::OpenInode;

mod area;

#[cfg(test)]
mod tests;

use area::{Area, Attribute, Entry};

/// The most bytes of a name, with its prefix.
pub const MAX_NAME: usize = 255;

/// The first 4 bytes of attributes, in an inode and in a block.
const MAGIC: u32 = 0xea02_0000;
/// The bytes before the entries in a block: magic, count of inodes, count of blocks, hash, checksum.
const HEADER_BYTES: usize = 32;
/// The bytes before the entries in an inode.
const MAGIC_BYTES: usize = 4;
/// The 512-byte sectors of a block, as an inode counts them.
const SECTORS: u64 = 8;

/// Whether [`set`] may create an attribute, and replace one.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum SetMode {
    /// Both.
    #[default]
    Any,
    /// Only create it.
    Create,
    /// Only replace it.
    Replace,
}

/// The prefixes of names, and their numbers.
const PREFIXES: [(u8, &[u8]); 4] =
    [(1, b"user."), (4, b"trusted."), (6, b"security."), (7, b"system.")];

/// A name on the drive: the number of its prefix, and the rest.
type Key<'a> = (u8, &'a [u8]);

fn key_of(name: &[u8]) -> Result<Key<'_>, FsError> {
    if name.is_empty() || name.len() > MAX_NAME {
        return Err(FsError::Range);
    }
    if let Some(kind) = AclKind::of_name(name) {
        return Ok((kind.index(), b""));
    }
    let strip = |(index, prefix): (u8, &[u8])| Some((index, name.strip_prefix(prefix)?));
    let (index, rest) = PREFIXES.into_iter().find_map(strip).ok_or(FsError::NotSupported)?;
    if rest.is_empty() { Err(FsError::Invalid) } else { Ok((index, rest)) }
}

/// The value of an attribute. That of an access control list has the form of user space.
///
/// # Errors
/// [`FsError::NoAttribute`] if there is none; [`FsError::NotSupported`] for a name whose prefix is
/// none of `user.`, `trusted.`, `security.` and `system.`; [`FsError::Range`] for a name that is
/// empty or too long; [`FsError::Invalid`] for a prefix alone; damaged attributes; a block that can't
/// be read.
pub fn get(
    ino: Ino,
    disk: &DiskInode,
    blocks: &dyn MetaBlocks,
    name: &[u8],
) -> Result<Vec<u8>, FsError> {
    let key = key_of(name)?;
    if let Some(kind) = AclKind::of_name(name) {
        let acl = acl(ino, disk, blocks, kind)?.ok_or(FsError::NoAttribute)?;
        return Ok(acl.to_user());
    }
    get_raw(ino, disk, blocks, key)?.ok_or(FsError::NoAttribute)
}

/// The names of all attributes, with a zero byte after each, as `listxattr` returns them. Those that
/// begin with `trusted.` are for privileged callers. Names with an unknown prefix are left out.
///
/// # Errors
/// Damaged attributes; a block that can't be read.
pub fn list(
    ino: Ino,
    disk: &DiskInode,
    blocks: &dyn MetaBlocks,
    with_trusted: bool,
) -> Result<Vec<u8>, FsError> {
    let mut names = Vec::new();
    let mut add = |entry: Entry<'_>| {
        let prefix = match AclKind::of_index(entry.index) {
            Some(kind) if entry.name.is_empty() => kind.name(),
            _ => match PREFIXES.iter().find(|(index, _)| *index == entry.index) {
                Some((_, prefix)) if with_trusted || *prefix != b"trusted." => prefix,
                _ => return,
            },
        };
        names.extend_from_slice(prefix);
        names.extend_from_slice(entry.name);
        names.push(0);
    };
    inside(ino, disk)?.into_iter().flat_map(Area::entries).for_each(&mut add);
    if let Some(block) = outside(ino, disk, blocks)? {
        block.area()?.entries().for_each(add);
    }
    Ok(names)
}

/// Sets an attribute.
///
/// Setting the access control list `system.posix_acl_access` also sets the permission bits of
/// the mode, and stores no list that the mode expresses alone. The caller clears the bit S_ISGID of
/// the mode if it must be.
///
/// # Errors
/// [`FsError::Exists`] and [`FsError::NoAttribute`] by the `mode`; [`FsError::NoSpace`] if the
/// attributes do not fit in the inode and a block, or no block is free; [`FsError::Invalid`] for an
/// access control list that is none; [`FsError::Access`] for a default list of a file that is not
/// a directory; those of [`get`].
pub fn set(
    inode: &mut OpenInode<'_>,
    blocks: &mut dyn MetaBlocks,
    name: &[u8],
    value: &[u8],
    mode: SetMode,
) -> Result<(), FsError> {
    let key = key_of(name)?;
    match AclKind::of_name(name) {
        Some(kind) => {
            let acl = Acl::from_user(value)?;
            check_mode(inode, blocks, key, mode)?;
            set_acl(inode, blocks, kind, acl.as_ref())
        }
        None => {
            check_mode(inode, blocks, key, mode)?;
            change(inode, blocks, key, Some(value))
        }
    }
}

/// Removes an attribute.
///
/// # Errors
/// Those of [`get`]; [`FsError::NoSpace`] if a shared block must be copied, and no block is free.
pub fn remove(
    inode: &mut OpenInode<'_>,
    blocks: &mut dyn MetaBlocks,
    name: &[u8],
) -> Result<(), FsError> {
    let key = key_of(name)?;
    // The kernel lets a program remove an access control list that is not there.
    if AclKind::of_name(name).is_none() {
        check_mode(inode, blocks, key, SetMode::Replace)?;
    }
    change(inode, blocks, key, None)
}

/// Removes all attributes that are in a block. It is for an inode that is deleted.
///
/// # Errors
/// Damaged attributes; a block that can't be read.
pub fn remove_block(inode: &mut OpenInode<'_>, blocks: &mut dyn MetaBlocks) -> Result<(), FsError> {
    match outside(inode.ino, inode.disk, blocks)? {
        Some(outside) => release(inode, blocks, outside),
        None => Ok(()),
    }
}

/// An access control list of an inode, if it has one.
///
/// # Errors
/// Damaged attributes; a block that can't be read.
pub fn acl(
    ino: Ino,
    disk: &DiskInode,
    blocks: &dyn MetaBlocks,
    kind: AclKind,
) -> Result<Option<Acl>, FsError> {
    let Some(value) = get_raw(ino, disk, blocks, (kind.index(), b""))? else { return Ok(None) };
    let acl = Acl::from_disk(&value);
    acl.ok_or(FsError::DamagedInode { what: "access control list", ino })
}

/// Sets or removes an access control list. An access list also sets the permission bits of the mode,
/// and is not stored if the mode expresses all of it.
///
/// # Errors
/// As [`set`].
pub fn set_acl(
    inode: &mut OpenInode<'_>,
    blocks: &mut dyn MetaBlocks,
    kind: AclKind,
    acl: Option<&Acl>,
) -> Result<(), FsError> {
    let mut stored = acl;
    match (kind, acl) {
        (AclKind::Access, Some(acl)) => {
            inode.disk.mode = inode.disk.mode & !0o777 | acl.mode();
            stored = stored.filter(|acl| !acl.is_mode());
        }
        (AclKind::Default, Some(_)) if !inode.disk.is_dir() => return Err(FsError::Access),
        _ => {}
    }
    let value = stored.map(Acl::to_disk);
    change(inode, blocks, (kind.index(), b""), value.as_deref())
}

fn get_raw(
    ino: Ino,
    disk: &DiskInode,
    blocks: &dyn MetaBlocks,
    (index, name): Key<'_>,
) -> Result<Option<Vec<u8>>, FsError> {
    let find = |area: Area<'_>| {
        let found = area.entries().find(|entry| entry.index == index && entry.name == name);
        found.map(|entry| entry.value.to_vec())
    };
    if let Some(value) = inside(ino, disk)?.and_then(find) {
        return Ok(Some(value));
    }
    match outside(ino, disk, blocks)? {
        Some(block) => Ok(find(block.area()?)),
        None => Ok(None),
    }
}

fn check_mode(
    inode: &OpenInode<'_>,
    blocks: &dyn MetaBlocks,
    key: Key<'_>,
    mode: SetMode,
) -> Result<(), FsError> {
    if mode == SetMode::Any {
        return Ok(());
    }
    match (mode, get_raw(inode.ino, inode.disk, blocks, key)?) {
        (SetMode::Create, Some(_)) => Err(FsError::Exists),
        (SetMode::Replace, None) => Err(FsError::NoAttribute),
        _ => Ok(()),
    }
}

/// The bytes of an inode for attributes, with the magic number.
fn space_inside(disk: &DiskInode) -> usize {
    disk.attributes.len().saturating_sub(usize::from(disk.extra_isize))
}

/// The attributes in an inode, if there are any.
fn inside(ino: Ino, disk: &DiskInode) -> Result<Option<Area<'_>>, FsError> {
    let bytes = &disk.attributes[..space_inside(disk)];
    if bytes.len() < MAGIC_BYTES || u32_at(bytes, 0) != MAGIC {
        return Ok(None);
    }
    let area = Area::parse(&bytes[MAGIC_BYTES..], 0);
    area.map(Some).ok_or(FsError::DamagedInode { what: "attributes", ino })
}

/// A block of attributes.
struct Outside {
    at: BlockNo,
    block: Arc<Block>,
}

impl Outside {
    /// The number of inodes that use the block.
    fn users(&self) -> u32 {
        u32_at(&self.block[..], 4)
    }

    fn area(&self) -> Result<Area<'_>, FsError> {
        Area::parse(&self.block[..], HEADER_BYTES)
            .ok_or(FsError::DamagedBlock { what: "attributes", block: self.at })
    }
}

/// The block of attributes of an inode, if there is one.
fn outside(
    ino: Ino,
    disk: &DiskInode,
    blocks: &dyn MetaBlocks,
) -> Result<Option<Outside>, FsError> {
    let at = disk.xattr_block;
    if at.0 == 0 {
        return Ok(None);
    }
    if !blocks.layout().contains(at) {
        return Err(FsError::DamagedInode { what: "pointer to attributes", ino });
    }
    let outside = Outside { at, block: blocks.get(at, BlockKind::Xattr)? };
    let block = &outside.block[..];
    if u32_at(block, 0) != MAGIC || outside.users() == 0 || u32_at(block, 8) != 1 {
        return Err(FsError::DamagedBlock { what: "attributes", block: at });
    }
    Ok(Some(outside))
}

/// Sets or removes an attribute.
fn change(
    inode: &mut OpenInode<'_>,
    blocks: &mut dyn MetaBlocks,
    (index, name): Key<'_>,
    value: Option<&[u8]>,
) -> Result<(), FsError> {
    let mut in_inode = inside(inode.ino, inode.disk)?.map_or_else(Vec::new, Area::to_vec);
    let outside = outside(inode.ino, inode.disk, blocks)?;
    let mut in_block = match &outside {
        Some(outside) => outside.area()?.to_vec(),
        None => Vec::new(),
    };
    let others = |attributes: &mut Vec<Attribute>| {
        let before = attributes.len();
        attributes.retain(|attribute| !attribute.is(index, name));
        attributes.len() != before
    };
    let (mut write_inode, mut write_block) = (others(&mut in_inode), others(&mut in_block));
    if let Some(value) = value {
        in_inode.push(Attribute { index, name: name.to_vec(), value: value.to_vec() });
        if area::fit(&in_inode, space_inside(inode.disk).saturating_sub(MAGIC_BYTES)) {
            write_inode = true;
        } else {
            in_block.extend(in_inode.pop());
            if !area::fit(&in_block, BLOCK_BYTES - HEADER_BYTES) {
                return Err(FsError::NoSpace);
            }
            write_block = true;
        }
    }
    if write_inode {
        let space = space_inside(inode.disk);
        inode.disk.attributes.fill(0);
        if !in_inode.is_empty() {
            let bytes = &mut inode.disk.attributes[..space];
            set_u32(bytes, 0, MAGIC);
            area::write(&mut bytes[MAGIC_BYTES..], 0, &in_inode, false);
        }
    }
    match outside {
        Some(outside) if write_block && in_block.is_empty() => release(inode, blocks, outside),
        outside if write_block => write_outside(inode, blocks, outside, in_block),
        _ => Ok(()),
    }
}

/// Writes the attributes of the block, into a new block if there is none for this inode alone.
fn write_outside(
    inode: &mut OpenInode<'_>,
    blocks: &mut dyn MetaBlocks,
    outside: Option<Outside>,
    mut attributes: Vec<Attribute>,
) -> Result<(), FsError> {
    attributes.sort_by(|a, b| a.key().cmp(&b.key()));
    let block = match outside {
        Some(outside) if outside.users() == 1 => {
            let at = outside.at;
            drop(outside);
            blocks.edit(at, BlockKind::Xattr)?
        }
        outside => {
            let layout = blocks.layout();
            let goal = layout.first_block(layout.group_of_inode(inode.ino).0);
            let at = blocks.allocate(goal)?;
            if let Some(outside) = outside {
                release(inode, blocks, outside)?;
            }
            inode.disk.xattr_block = at;
            inode.disk.sectors += SECTORS;
            let block = blocks.create(at, BlockKind::Xattr)?;
            set_u32(block, 0, MAGIC);
            set_u32(block, 4, 1);
            set_u32(block, 8, 1);
            block
        }
    };
    let hash = area::write(&mut block[..], HEADER_BYTES, &attributes, true);
    set_u32(block, 12, hash);
    Ok(())
}

/// Takes the block from the inode. It is freed if no other inode uses it.
fn release(
    inode: &mut OpenInode<'_>,
    blocks: &mut dyn MetaBlocks,
    outside: Outside,
) -> Result<(), FsError> {
    let (at, users) = (outside.at, outside.users());
    drop(outside);
    if users > 1 {
        set_u32(blocks.edit(at, BlockKind::Xattr)?, 4, users - 1);
    } else {
        blocks.free_meta(at);
    }
    inode.disk.xattr_block = BlockNo(0);
    inode.disk.sectors = inode.disk.sectors.saturating_sub(SECTORS);
    Ok(())
}

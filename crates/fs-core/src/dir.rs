//! Directories, linear and with a hash tree.
//!
//! A directory of one block is a list of entries. When it is full and the file system has
//! `dir_index`, it becomes a hash tree: block 0 is the root of the tree, and the leaves are blocks
//! of entries, ordered by the hash of the name. A tree has one or two levels of index
//! blocks. Without `dir_index` the list grows, and each search reads all of it.
//!
//! # Scans
//! [`read`] continues a scan from a cookie. An entry that exists during the whole scan is returned
//! exactly once, whatever is inserted or removed between two calls:
//!
//! - A tree is scanned in the order of the hashes, because entries move when a leaf is split. A
//!   directory of one block that may become a tree is scanned in the same order. The cookie is made
//!   of the hash (31 bits), a second hash (24 bits) and the position among the names that have both
//!   in common (8 bits). Such names are the exception to the rule above: if one of them is inserted
//!   or removed between two calls that divide them, another one may be left out or returned twice.
//! - A list is scanned in the order of the blocks. Its entries never move.

use core::ops::ControlFlow;

use crate::block::{BlockKind, BlockNo, Ino, MetaBlocks};
use crate::error::FsError;
use crate::format::inode::{DiskInode, InodeFlags};
use crate::open_inode::OpenInode;

#[cfg(test)]
mod check;
mod hash;
mod index;
mod leaf;
mod list;
mod scan;
#[cfg(test)]
mod tests;
mod tree;
mod view;

use leaf::{Builder, Leaf};
use view::View;

/// The longest name, in bytes.
pub const NAME_BYTES: usize = 255;

/// The type of a file, as a directory entry has it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct FileKind(pub u8);

impl FileKind {
    /// Not known. No new entry may have it.
    pub const UNKNOWN: Self = Self(0);
    /// Regular file.
    pub const REGULAR: Self = Self(1);
    /// Directory.
    pub const DIRECTORY: Self = Self(2);
    /// Character device.
    pub const CHARACTER: Self = Self(3);
    /// Block device.
    pub const BLOCK: Self = Self(4);
    /// Named pipe.
    pub const FIFO: Self = Self(5);
    /// Socket.
    pub const SOCKET: Self = Self(6);
    /// Symbolic link.
    pub const SYMLINK: Self = Self(7);

    /// The type of an inode with this mode.
    #[must_use]
    pub const fn of_mode(mode: u16) -> Self {
        use crate::format::inode::file_type;
        match mode & file_type::MASK {
            file_type::REGULAR => Self::REGULAR,
            file_type::DIRECTORY => Self::DIRECTORY,
            file_type::CHARACTER => Self::CHARACTER,
            file_type::BLOCK => Self::BLOCK,
            file_type::FIFO => Self::FIFO,
            file_type::SOCKET => Self::SOCKET,
            file_type::SYMLINK => Self::SYMLINK,
            _ => Self::UNKNOWN,
        }
    }
}

/// The inode that a name stands for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Entry {
    /// Its number.
    pub ino: Ino,
    /// Its type.
    pub kind: FileKind,
}

/// An entry that [`read`] returns.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct DirItem<'a> {
    /// The number of the inode.
    pub ino: Ino,
    /// Its type.
    pub kind: FileKind,
    /// The name.
    pub name: &'a [u8],
    /// The cookie with which a scan continues after this entry. It is below 2^63.
    pub next_cookie: u64,
}

/// Makes a directory of one block with the entries `.` and `..`. The inode has no blocks yet. The
/// caller sets its mode and counts its links.
///
/// # Errors
/// [`FsError::NoSpace`], or an error of the extent tree.
pub fn create_empty(
    inode: &mut OpenInode<'_>,
    blocks: &mut dyn MetaBlocks,
    parent: Ino,
) -> Result<(), FsError> {
    inode.disk.size = 0;
    inode.disk.flags.remove(InodeFlags::INDEX);
    let (_, at) = view::append(inode, blocks)?;
    let area = leaf::area(blocks.layout());
    let kind = BlockKind::DirLeaf(inode.seed(blocks.layout()));
    let mut builder = Builder::new(area, blocks.create(at, kind)?);
    let dots = [(&b"."[..], inode.ino), (b"..", parent)];
    for (name, ino) in dots {
        // Two short entries fit in an empty block.
        builder.push(name, Entry { ino, kind: FileKind::DIRECTORY }).ok_or(FsError::NoSpace)?;
    }
    builder.finish();
    Ok(())
}

/// The entry of `name`; also of `.` and `..`.
///
/// # Errors
/// [`FsError::NameTooLong`], [`FsError::NotDirectory`], or a damaged directory.
pub fn lookup(
    ino: Ino,
    disk: &DiskInode,
    blocks: &dyn MetaBlocks,
    name: &[u8],
) -> Result<Option<Entry>, FsError> {
    check_length(name)?;
    let view = View::new(ino, disk, blocks)?;
    if name == b"." {
        return Ok(Some(Entry { ino, kind: FileKind::DIRECTORY }));
    }
    if name == b".." {
        return Ok(Some(Entry { ino: view.parent()?, kind: FileKind::DIRECTORY }));
    }
    Ok(find(&view, name)?.map(|place| place.found.entry))
}

/// The inode of `..`.
///
/// # Errors
/// A damaged directory.
pub fn parent(ino: Ino, disk: &DiskInode, blocks: &dyn MetaBlocks) -> Result<Ino, FsError> {
    View::new(ino, disk, blocks)?.parent()
}

/// Whether the directory has no entries but `.` and `..`.
///
/// # Errors
/// A damaged directory.
pub fn is_empty(ino: Ino, disk: &DiskInode, blocks: &dyn MetaBlocks) -> Result<bool, FsError> {
    let view = View::new(ino, disk, blocks)?;
    view.parent()?;
    let occupied = |leaf: Leaf<'_>| -> Result<bool, FsError> {
        for raw in leaf.used() {
            if !is_dot(raw?.name) {
                return Ok(true);
            }
        }
        Ok(false)
    };
    if view.is_tree() {
        tree::any_leaf(&view, occupied).map(|any| !any)
    } else {
        list::any_leaf(&view, occupied).map(|any| !any)
    }
}

/// Adds an entry. The caller has checked that the name does not exist.
///
/// On an error, fields of the inode may have changed: the caller drops them together with the
/// edited blocks.
///
/// # Errors
/// [`FsError::NameTooLong`]; [`FsError::Invalid`] for an empty name, one with `/` or a zero byte,
/// an inode out of range or an unknown type; [`FsError::NoSpace`], also if the hash tree is full;
/// [`FsError::Exists`] if the search for a place met the name (always in a tree, not always in a
/// list); a damaged directory.
pub fn insert(
    inode: &mut OpenInode<'_>,
    blocks: &mut dyn MetaBlocks,
    name: &[u8],
    child: Ino,
    kind: FileKind,
) -> Result<(), FsError> {
    check_new(blocks, name, child, kind)?;
    if is_dot(name) {
        return Err(FsError::Exists);
    }
    let entry = Entry { ino: child, kind };
    let view = View::new(inode.ino, inode.disk, &*blocks)?;
    if view.is_tree() {
        return tree::insert(inode, blocks, name, entry);
    }
    match list::slot(&view, name)? {
        list::Place::At(place, offset) => {
            let kind = view.leaf_kind();
            leaf::insert(blocks.edit(place, kind)?, offset, name, entry);
            Ok(())
        }
        list::Place::Full { used } if view.is_hashed() => {
            if leaf::is_sparse(blocks.layout(), used, name) {
                let block = view.leaf(0)?;
                let (at, kind) = (block.at, view.leaf_kind());
                let content = tree::compact(&view, &block, name, entry)?;
                *blocks.edit(at, kind)? = content;
                return Ok(());
            }
            tree::from_list(inode, blocks)?;
            tree::insert(inode, blocks, name, entry)
        }
        list::Place::Full { .. } => list::grow(inode, blocks, name, entry),
    }
}

/// Removes the entry of `name`, and returns it. The blocks of the directory remain allocated.
///
/// # Errors
/// [`FsError::NameTooLong`]; [`FsError::Invalid`] for `.` and `..`; a damaged directory.
pub fn remove(
    inode: &mut OpenInode<'_>,
    blocks: &mut dyn MetaBlocks,
    name: &[u8],
) -> Result<Option<Entry>, FsError> {
    check_length(name)?;
    if is_dot(name) {
        return Err(FsError::Invalid);
    }
    let view = View::new(inode.ino, inode.disk, &*blocks)?;
    let Some(place) = find(&view, name)? else { return Ok(None) };
    let kind = view.leaf_kind();
    leaf::remove(blocks.edit(place.at, kind)?, &place.found);
    Ok(Some(place.found.entry))
}

/// Lets the entry of `name` stand for another inode, and returns the entry as it was; `None` if
/// there is no such name. `..` can be replaced, too.
///
/// # Errors
/// [`FsError::NameTooLong`]; [`FsError::Invalid`] for `.`, and as in [`insert`]; a damaged
/// directory.
pub fn replace(
    inode: &mut OpenInode<'_>,
    blocks: &mut dyn MetaBlocks,
    name: &[u8],
    child: Ino,
    kind: FileKind,
) -> Result<Option<Entry>, FsError> {
    check_new(blocks, name, child, kind)?;
    let entry = Entry { ino: child, kind };
    let view = View::new(inode.ino, inode.disk, &*blocks)?;
    if name == b"." || (name == b".." && kind != FileKind::DIRECTORY) {
        return Err(FsError::Invalid);
    }
    if name == b".." {
        let old = Entry { ino: view.parent()?, kind: FileKind::DIRECTORY };
        let (at, kind) = view.first_block()?;
        leaf::set(blocks.edit(at, kind)?, leaf::PARENT_OFFSET, entry);
        return Ok(Some(old));
    }
    let Some(place) = find(&view, name)? else { return Ok(None) };
    let kind = view.leaf_kind();
    leaf::set(blocks.edit(place.at, kind)?, place.found.offset, entry);
    Ok(Some(place.found.entry))
}

/// Hands the entries from `cookie` on to `sink`, until there are no more or the sink breaks.
/// Cookie 0 is the beginning; every other one is the `next_cookie` of an entry. `.` and `..` come
/// first.
///
/// A sink may break because it could not take the entry: the scan then continues from the
/// `next_cookie` of the last entry that it took.
///
/// # Errors
/// A damaged directory.
pub fn read(
    ino: Ino,
    disk: &DiskInode,
    blocks: &dyn MetaBlocks,
    cookie: u64,
    sink: &mut dyn FnMut(DirItem<'_>) -> ControlFlow<()>,
) -> Result<(), FsError> {
    let view = View::new(ino, disk, blocks)?;
    // A break of the sink is the only other end of a scan; both are normal.
    let (ControlFlow::Continue(()) | ControlFlow::Break(())) = if view.is_hashed() {
        scan::by_hash(&view, cookie, sink)?
    } else {
        scan::by_position(&view, cookie, sink)?
    };
    Ok(())
}

/// An entry that was found, and its block.
struct FoundAt {
    at: BlockNo,
    found: leaf::Found,
}

fn find(view: &View<'_>, name: &[u8]) -> Result<Option<FoundAt>, FsError> {
    if view.is_tree() { tree::find(view, name) } else { list::find(view, name) }
}

fn is_dot(name: &[u8]) -> bool {
    name == b"." || name == b".."
}

fn check_length(name: &[u8]) -> Result<(), FsError> {
    if name.len() > NAME_BYTES { Err(FsError::NameTooLong) } else { Ok(()) }
}

/// Whether a name may be in a directory.
fn is_valid(name: &[u8]) -> bool {
    !name.is_empty() && !name.iter().any(|&byte| byte == b'/' || byte == 0)
}

fn check_new(
    blocks: &dyn MetaBlocks,
    name: &[u8],
    child: Ino,
    kind: FileKind,
) -> Result<(), FsError> {
    check_length(name)?;
    let known = (FileKind::REGULAR..=FileKind::SYMLINK).contains(&kind);
    if !is_valid(name) || !known || child.0 == 0 || child.0 > blocks.layout().inodes {
        return Err(FsError::Invalid);
    }
    Ok(())
}

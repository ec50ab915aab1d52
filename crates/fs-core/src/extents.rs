//! The extent tree of an inode: which blocks of the file lie where.
//!
//! The root is in the inode; below it there are up to five levels of nodes, each a block. The
//! functions that change a tree change the inode's `i_block` and `sectors`, and edit, allocate and
//! free nodes. After an error the caller drops all of it: the edits of the blocks, and the fields of
//! the inode.
//!
//! Every pointer and length that is used is checked: the header of a node, the order of an extent
//! and of those before and after it, the range of blocks. The search is binary, so it does not see
//! all entries; [`check_node`] sees all of one node, once, when the node is read from the drive.

use core::ops::{ControlFlow, Range};

use crate::block::{Block, BlockNo, Ino, MetaBlocks};
use crate::error::FsError;
use crate::format::inode::{DiskInode, InodeFlags};
use crate::format::layout::Layout;
use crate::open_inode::OpenInode;

mod change;
mod node;
mod tree;
mod view;

#[cfg(test)]
mod tests;

pub use change::{
    Budget, insert, mark_unwritten, mark_written, remove, remove_some, replace, shift,
};

use node::{MAX_UNWRITTEN, MAX_WRITTEN, Node, NodeMut};
use view::View;

/// The end of the largest file, in blocks: the last block is the one before.
pub const END: u64 = u32::MAX as u64;

/// Consecutive blocks of a file that lie on consecutive blocks of the drive.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Extent {
    /// The first block, counted in the file.
    pub logical: u32,
    /// The number of blocks: 32,768 at most, and 32,767 if unwritten.
    pub len: u32,
    /// The first block on the drive.
    pub physical: BlockNo,
    /// The blocks are allocated, and read as zeroes.
    pub unwritten: bool,
}

impl Extent {
    /// The block of the file after the last one.
    #[must_use]
    pub const fn end(&self) -> u64 {
        self.logical as u64 + self.len as u64
    }

    /// The blocks of the file from `from` on, up to `to`, which lie in the extent.
    pub(crate) fn part(&self, from: u64, to: u64) -> Self {
        debug_assert!(u64::from(self.logical) <= from && from <= to && to <= self.end());
        let skipped = from - u64::from(self.logical);
        Self {
            // Both are lengths or positions in the extent, so they fit.
            logical: self.logical + skipped as u32,
            len: (to - from) as u32,
            physical: BlockNo(self.physical.0 + skipped),
            ..*self
        }
    }

    /// Both extents as one, if `next` continues this one, and the result is not too long.
    pub(crate) fn joined(&self, next: &Self) -> Option<Self> {
        let limit = if self.unwritten { MAX_UNWRITTEN } else { MAX_WRITTEN };
        let fits = self.unwritten == next.unwritten
            && self.end() == u64::from(next.logical)
            && self.physical.0 + u64::from(self.len) == next.physical.0
            && self.len + next.len <= limit;
        fits.then_some(Self { len: self.len + next.len, ..*self })
    }
}

/// Consecutive blocks of a file, from the one asked for on.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Run {
    /// Nothing is allocated.
    Hole {
        /// The first block, counted in the file.
        logical: u32,
        /// The number of blocks, up to the next extent or the end of the largest file.
        len: u32,
    },
    /// The rest of an extent.
    Mapped(Extent),
}

/// Makes an empty tree in an inode, and sets its flag `EXTENTS`. Blocks of an older tree are not
/// freed.
pub fn init(inode: &mut OpenInode<'_>) {
    NodeMut::init(&mut inode.disk.i_block, 0);
    inode.disk.flags.insert(InodeFlags::EXTENTS);
}

/// The blocks of the file from `logical` on: the rest of an extent, or a hole.
///
/// # Errors
/// [`FsError::FileTooLarge`] beyond the largest file; [`FsError::NotSupported`] for an inode without
/// an extent tree; a damaged tree; a block that can't be read.
pub fn lookup(
    ino: Ino,
    disk: &DiskInode,
    blocks: &dyn MetaBlocks,
    logical: u32,
) -> Result<Run, FsError> {
    if u64::from(logical) >= END {
        return Err(FsError::FileTooLarge);
    }
    let leaf = View::new(ino, disk, blocks)?.descend(logical)?;
    if let Some(extent) = leaf.before()?
        && extent.end() > u64::from(logical)
    {
        return Ok(Run::Mapped(extent.part(u64::from(logical), extent.end())));
    }
    // The next extent begins after `logical`, and before `END`.
    let len = (leaf.next() - u64::from(logical)) as u32;
    Ok(Run::Hole { logical, len })
}

/// Calls `each` with the extents in `range`, in their order in the file, cut to the range, until it
/// breaks.
///
/// # Errors
/// A damaged tree; a block that can't be read. [`FsError::NotSupported`] for an inode without an
/// extent tree.
pub fn for_each(
    ino: Ino,
    disk: &DiskInode,
    blocks: &dyn MetaBlocks,
    range: Range<u64>,
    each: &mut dyn FnMut(Extent) -> ControlFlow<()>,
) -> Result<ControlFlow<()>, FsError> {
    View::new(ino, disk, blocks)?.for_each(range, each)
}

/// Calls `each` with the blocks of the tree's nodes, parents first, until it breaks.
///
/// # Errors
/// As [`for_each`].
pub fn blocks_of_tree(
    ino: Ino,
    disk: &DiskInode,
    blocks: &dyn MetaBlocks,
    each: &mut dyn FnMut(BlockNo) -> ControlFlow<()>,
) -> Result<ControlFlow<()>, FsError> {
    View::new(ino, disk, blocks)?.nodes(each)
}

/// Checks all entries of a node that was read from the drive: their order, and that they lie in the
/// file system. It is done once, when the node enters the cache. `may_have` returns whether a file
/// may have these blocks.
///
/// # Errors
/// [`FsError::DamagedBlock`].
pub fn check_node(
    layout: &Layout,
    at: BlockNo,
    block: &Block,
    may_have: &dyn Fn(BlockNo, u32) -> bool,
) -> Result<(), FsError> {
    let is_right = is_right(layout, &block[..], may_have);
    is_right.then_some(()).ok_or(view::damaged(Ino(0), Some(at)))
}

/// As [`check_node`], for the root of an inode's tree. An inode without a tree passes.
///
/// # Errors
/// [`FsError::DamagedInode`].
pub fn check_root(
    layout: &Layout,
    ino: Ino,
    disk: &DiskInode,
    may_have: &dyn Fn(BlockNo, u32) -> bool,
) -> Result<(), FsError> {
    let is_right =
        !disk.flags.contains(InodeFlags::EXTENTS) || is_right(layout, &disk.i_block, may_have);
    is_right.then_some(()).ok_or(view::damaged(ino, None))
}

/// Whether the bytes are a node with right entries, which lead to blocks that a file may have.
fn is_right(layout: &Layout, node: &[u8], may_have: &dyn Fn(BlockNo, u32) -> bool) -> bool {
    let node = Node::parse(node);
    node.is_some_and(|node| node.is_sound(layout) && node.points_at(may_have))
}

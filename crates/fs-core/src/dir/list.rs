//! Directories without a hash tree: blocks of entries without order.

use super::leaf::{self, Builder, Leaf, Slot};
use super::view::{self, View};
use super::{Entry, FoundAt};
use crate::block::{BlockNo, MetaBlocks};
use crate::error::FsError;
use crate::open_inode::OpenInode;

/// The place for a new entry.
pub(super) enum Place {
    /// In this block, in the unused space of the entry at this offset.
    At(BlockNo, usize),
    /// No block has enough space. The used entries of the last one need `used` bytes in all.
    Full { used: usize },
}

/// The entry of `name`.
pub(super) fn find(view: &View<'_>, name: &[u8]) -> Result<Option<FoundAt>, FsError> {
    for logical in 0..view.len {
        let block = view.leaf(logical)?;
        if let Some(found) = block.leaf(view).find(name)? {
            return Ok(Some(FoundAt { at: block.at, found }));
        }
    }
    Ok(None)
}

/// A place for `name`.
pub(super) fn slot(view: &View<'_>, name: &[u8]) -> Result<Place, FsError> {
    let mut last = 0;
    for logical in 0..view.len {
        let block = view.leaf(logical)?;
        match block.leaf(view).slot(name)? {
            Slot::Exists => return Err(FsError::Exists),
            Slot::At(offset) => return Ok(Place::At(block.at, offset)),
            Slot::Full { used } => last = used,
        }
    }
    Ok(Place::Full { used: last })
}

/// Adds a block with one entry.
pub(super) fn grow(
    inode: &mut OpenInode<'_>,
    blocks: &mut dyn MetaBlocks,
    name: &[u8],
    entry: Entry,
) -> Result<(), FsError> {
    let (_, at) = view::append(inode, blocks)?;
    let kind = View::new(inode.ino, inode.disk, &*blocks)?.leaf_kind();
    let area = leaf::area(blocks.layout());
    let mut builder = Builder::new(area, blocks.create(at, kind)?);
    builder.push(name, entry).ok_or(FsError::NoSpace)?;
    builder.finish();
    Ok(())
}

/// Whether `test` holds for any block.
pub(super) fn any_leaf(
    view: &View<'_>,
    test: impl Fn(Leaf<'_>) -> Result<bool, FsError>,
) -> Result<bool, FsError> {
    for logical in 0..view.len {
        if test(view.leaf(logical)?.leaf(view))? {
            return Ok(true);
        }
    }
    Ok(false)
}

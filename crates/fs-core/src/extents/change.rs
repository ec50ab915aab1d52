//! Changes of ranges of a file's extents.

use alloc::vec::Vec;
use core::ops::Range;

use crate::block::{BlockNo, MetaBlocks};
use crate::error::FsError;
use crate::extents::node::{MAX_UNWRITTEN, MAX_WRITTEN};
use crate::extents::tree::{SECTORS, Tree};
use crate::extents::view::is_sound;
use crate::extents::{END, Extent, Run, lookup};
use crate::open_inode::OpenInode;

/// A few extents in their order.
struct Few {
    items: [Extent; 5],
    len: usize,
}

impl Few {
    const fn new() -> Self {
        let none = Extent { logical: 0, len: 0, physical: BlockNo(0), unwritten: false };
        Self { items: [none; 5], len: 0 }
    }

    /// Adds an extent, which may be empty, and joins it to the last one if it continues that.
    fn push(&mut self, extent: Extent) {
        if extent.len == 0 {
            return;
        }
        if let Some(last) = self.items[..self.len].last_mut()
            && let Some(joined) = last.joined(&extent)
        {
            *last = joined;
        } else {
            self.items[self.len] = extent;
            self.len += 1;
        }
    }

    fn as_slice(&self) -> &[Extent] {
        &self.items[..self.len]
    }
}

/// Maps a hole to `extent`, which may be longer than one extent on the drive can be. It is joined
/// with the extents before and after if they continue each other. Adds its sectors to the inode.
///
/// # Errors
/// [`FsError::Invalid`] if the extent is empty, or not in the file system or the largest file;
/// [`FsError::DamagedInode`] if a part of the range is mapped; [`FsError::NoSpace`];
/// [`FsError::FileTooLarge`] if the inode can't count so many sectors; a damaged tree; a block that
/// can't be read.
pub fn insert(
    inode: &mut OpenInode<'_>,
    blocks: &mut dyn MetaBlocks,
    extent: Extent,
) -> Result<(), FsError> {
    check_argument(blocks, &extent)?;
    Tree { inode, blocks }.insert(extent)
}

/// Frees the data of the blocks of the file from `first` on, up to `last_exclusive`, and the nodes
/// that are then empty. Subtracts their sectors from the inode.
///
/// # Errors
/// [`FsError::NoSpace`] if the range cuts an extent in two, and the tree is full; a damaged tree; a
/// block that can't be read.
pub fn remove(
    inode: &mut OpenInode<'_>,
    blocks: &mut dyn MetaBlocks,
    first: u32,
    last_exclusive: u64,
) -> Result<(), FsError> {
    Tree { inode, blocks }.remove(first, last_exclusive, Budget::ALL, 0..0).map(drop)
}

/// The limits of one step of a long removal. Each number is at least 1.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Budget {
    /// Blocks of data.
    pub blocks: u64,
    /// Extents, whole ones or parts. Each may lie in another group, whose bitmap changes.
    pub extents: usize,
}

impl Budget {
    /// No limit.
    pub const ALL: Self = Self { blocks: u64::MAX, extents: usize::MAX };

    const fn is_used_up(self) -> bool {
        self.blocks == 0 || self.extents == 0
    }
}

/// As [`remove`], but frees at most `budget`, from the end of the range on, so that a truncation can
/// be spread over several transactions. Returns the end of the rest of the range: it is `first` if
/// nothing is left, and the next call's `last_exclusive` otherwise. Each call comes closer to
/// `first`.
///
/// # Errors
/// As [`remove`].
pub fn remove_some(
    inode: &mut OpenInode<'_>,
    blocks: &mut dyn MetaBlocks,
    first: u32,
    last_exclusive: u64,
    budget: Budget,
) -> Result<u64, FsError> {
    Tree { inode, blocks }.remove(first, last_exclusive, budget, 0..0)
}

/// Makes the extents in a range written: their data has been written. Holes stay as they are.
///
/// # Errors
/// [`FsError::NoSpace`] if the range cuts an extent, and the tree is full; a damaged tree; a block
/// that can't be read.
pub fn mark_written(
    inode: &mut OpenInode<'_>,
    blocks: &mut dyn MetaBlocks,
    first: u32,
    len: u32,
) -> Result<(), FsError> {
    Tree { inode, blocks }.convert(first, len, false)
}

/// Makes the extents in a range unwritten: they are read as zeroes. Holes stay as they are.
///
/// # Errors
/// As [`mark_written`].
pub fn mark_unwritten(
    inode: &mut OpenInode<'_>,
    blocks: &mut dyn MetaBlocks,
    first: u32,
    len: u32,
) -> Result<(), FsError> {
    Tree { inode, blocks }.convert(first, len, true)
}

/// Moves all blocks of the file from block `from` on by `by` blocks: towards the end to insert a
/// hole before `from`, or towards the beginning, where the `-by` blocks before `from` must be a
/// hole. It changes all nodes after `from`.
///
/// # Errors
/// [`FsError::Invalid`] if there is no such hole; [`FsError::FileTooLarge`] if the file would become
/// too large; [`FsError::NoSpace`]; a damaged tree; a block that can't be read.
pub fn shift(
    inode: &mut OpenInode<'_>,
    blocks: &mut dyn MetaBlocks,
    from: u32,
    by: i64,
) -> Result<(), FsError> {
    Tree { inode, blocks }.shift(from, by)
}

/// Makes the range of `extent` map to exactly this extent. Blocks of data to which the range was
/// mapped and that are not in `extent` are freed. The same call again changes nothing.
///
/// # Errors
/// As [`insert`], except that the range may be mapped.
pub fn replace(
    inode: &mut OpenInode<'_>,
    blocks: &mut dyn MetaBlocks,
    extent: Extent,
) -> Result<(), FsError> {
    check_argument(blocks, &extent)?;
    let new = extent.physical.0..extent.physical.0 + u64::from(extent.len);
    let mut tree = Tree { inode, blocks };
    let mut next = u64::from(extent.logical);
    while next < extent.end() {
        // The range ends at `END` or before, so `next` is a block of a file.
        let at = next as u32;
        next = match lookup(tree.inode.ino, tree.inode.disk, &*tree.blocks, at)? {
            Run::Hole { len, .. } => {
                let end = extent.end().min(next + u64::from(len));
                tree.insert(extent.part(next, end))?;
                end
            }
            Run::Mapped(old) => {
                let end = extent.end().min(old.end());
                let wanted = extent.part(next, end);
                if old.physical != wanted.physical {
                    tree.remove(at, end, Budget::ALL, new.clone())?;
                    tree.insert(wanted)?;
                } else if old.unwritten != wanted.unwritten {
                    tree.convert(at, wanted.len, wanted.unwritten)?;
                }
                end
            }
        };
    }
    Ok(())
}

/// Checks an extent that a caller passed, of any length.
fn check_argument(blocks: &dyn MetaBlocks, extent: &Extent) -> Result<(), FsError> {
    is_sound(blocks.layout(), extent, END).then_some(()).ok_or(FsError::Invalid)
}

impl Tree<'_, '_> {
    /// Maps a hole.
    fn insert(&mut self, extent: Extent) -> Result<(), FsError> {
        let limit = u64::from(if extent.unwritten { MAX_UNWRITTEN } else { MAX_WRITTEN });
        let mut next = u64::from(extent.logical);
        while next < extent.end() {
            let piece = extent.part(next, extent.end().min(next + limit));
            self.insert_one(piece)?;
            next = piece.end();
        }
        Ok(())
    }

    fn insert_one(&mut self, extent: Extent) -> Result<(), FsError> {
        let leaf = self.descend(extent.logical)?;
        let (before, after) = (leaf.before()?, leaf.after()?);
        if before.is_some_and(|before| before.end() > u64::from(extent.logical))
            || leaf.next() < extent.end()
        {
            return Err(FsError::DamagedInode { what: "mapped range", ino: self.inode.ino });
        }
        let path = leaf.path;
        drop(leaf);
        let (mut from, mut to) = (path.leaf().index, path.leaf().index);
        let mut new = Few::new();
        if let Some(before) = before.filter(|before| before.joined(&extent).is_some()) {
            new.push(before);
            from -= 1;
        }
        new.push(extent);
        if let Some(after) = after
            && new.as_slice().last().is_some_and(|last| last.joined(&after).is_some())
        {
            new.push(after);
            to += 1;
        }
        self.splice(&path, from, to, new.as_slice())?;
        self.charge(extent.len)
    }

    /// Removes the end of a range. The data on blocks in `keep` is not freed.
    fn remove(
        &mut self,
        first: u32,
        last_exclusive: u64,
        mut budget: Budget,
        keep: Range<u64>,
    ) -> Result<u64, FsError> {
        let first = u64::from(first);
        let mut end = last_exclusive.min(END);
        let mut removed = Vec::new();
        while end > first && !budget.is_used_up() {
            // `END` fits, so the block before `end` does.
            let leaf = self.descend((end - 1) as u32)?;
            let position = leaf.position();
            let (mut from, mut start) = (position, end);
            let mut left = None;
            // All of the range in this leaf, from its end on, goes in one step.
            while from > 0 && !budget.is_used_up() && left.is_none() {
                let extent = leaf.extent(from - 1)?;
                if extent.end() <= first {
                    break;
                }
                let high = extent.end().min(end);
                let low =
                    first.max(u64::from(extent.logical)).max(high.saturating_sub(budget.blocks));
                if low > u64::from(extent.logical) {
                    left = Some(extent.part(u64::from(extent.logical), low));
                }
                removed.push(extent.part(low, high));
                budget.blocks -= high - low;
                budget.extents -= 1;
                start = low;
                from -= 1;
            }
            if from == position {
                return Ok(first);
            }
            let last = leaf.extent(position - 1)?;
            let mut rest = Few::new();
            if let Some(left) = left {
                rest.push(left);
            }
            if last.end() > end {
                rest.push(last.part(end, last.end()));
            }
            let path = leaf.path;
            drop(leaf);
            self.splice(&path, from, position, rest.as_slice())?;
            for extent in removed.drain(..) {
                self.free_data(&extent, &keep);
            }
            end = start;
        }
        Ok(end.max(first))
    }

    fn free_data(&mut self, extent: &Extent, keep: &Range<u64>) {
        let (start, end) = (extent.physical.0, extent.physical.0 + u64::from(extent.len));
        for part in [start..end.min(keep.start), start.max(keep.end)..end] {
            // A part of an extent is no longer than it.
            if part.start < part.end {
                self.blocks.free_data(BlockNo(part.start), (part.end - part.start) as u32);
            }
        }
        let sectors = SECTORS * u64::from(extent.len);
        self.inode.disk.sectors = self.inode.disk.sectors.saturating_sub(sectors);
    }

    /// Makes the extents in a range written or unwritten.
    fn convert(&mut self, first: u32, len: u32, unwritten: bool) -> Result<(), FsError> {
        let mut next = u64::from(first);
        let end = (next + u64::from(len)).min(END);
        while next < end {
            let leaf = self.descend(next as u32)?;
            let Some(old) = leaf.before()?.filter(|old| old.end() > next) else {
                next = leaf.next();
                continue;
            };
            let stop = old.end().min(end);
            if old.unwritten == unwritten {
                next = stop;
                continue;
            }
            let i = leaf.position() - 1;
            let (mut from, mut to) = (i, i + 1);
            let mut new = Few::new();
            if i > 0 {
                new.push(leaf.extent(i - 1)?);
                from = i - 1;
            }
            new.push(old.part(u64::from(old.logical), next));
            // A written extent may be one block longer than an unwritten one.
            let middle = stop.min(next + u64::from(MAX_UNWRITTEN));
            new.push(Extent { unwritten, ..old.part(next, middle) });
            new.push(old.part(middle, old.end()));
            if let Some(after) = leaf.after()? {
                new.push(after);
                to = i + 2;
            }
            let path = leaf.path;
            drop(leaf);
            self.splice(&path, from, to, new.as_slice())?;
            next = middle;
        }
        Ok(())
    }

    fn shift(&mut self, from: u32, by: i64) -> Result<(), FsError> {
        let start = i64::from(from).checked_add(by).ok_or(FsError::FileTooLarge)?;
        if start < 0 {
            return Err(FsError::Invalid);
        }
        let last = self.descend((END - 1) as u32)?.before()?;
        let Some(last) = last.filter(|last| last.end() > u64::from(from)) else {
            return Ok(());
        };
        if by > 0 && last.end().saturating_add(by.unsigned_abs()) > END {
            return Err(FsError::FileTooLarge);
        }
        if by < 0 {
            // `start` is not negative, and before `from`.
            let leaf = self.descend(start as u32)?;
            let mapped = leaf.before()?.is_some_and(|before| before.end() > start as u64);
            if mapped || leaf.next() < u64::from(from) {
                return Err(FsError::Invalid);
            }
        }
        self.cut(from)?;
        self.shift_keys(from, by)?;
        if by < 0 { self.join_at(start as u32) } else { Ok(()) }
    }

    /// Cuts the extent in two that begins before block `at`, and ends after it.
    fn cut(&mut self, at: u32) -> Result<(), FsError> {
        let leaf = self.descend(at)?;
        let (at, position) = (u64::from(at), leaf.position());
        let Some(extent) = leaf.before()?.filter(|extent| extent.end() > at) else {
            return Ok(());
        };
        let path = leaf.path;
        drop(leaf);
        let halves = [extent.part(u64::from(extent.logical), at), extent.part(at, extent.end())];
        let new = if halves[0].len == 0 { &halves[1..] } else { &halves };
        self.splice(&path, position - 1, position, new)
    }

    /// Joins the extent at block `at` to the one before, if they continue each other.
    fn join_at(&mut self, at: u32) -> Result<(), FsError> {
        let leaf = self.descend(at)?;
        let position = leaf.position();
        let (Some(before), Some(after)) =
            (position.checked_sub(2).map(|i| leaf.extent(i)).transpose()?, leaf.before()?)
        else {
            return Ok(());
        };
        let path = leaf.path;
        drop(leaf);
        match before.joined(&after) {
            Some(joined) => self.splice(&path, position - 2, position, &[joined]),
            None => Ok(()),
        }
    }
}

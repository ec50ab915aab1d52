//! The block groups: which blocks and inodes are free, and their allocation.
//!
//! The bitmaps of a group are read when they are first needed, and then stay in memory. Each group
//! has a lock of its own; there is no other. A commit [renders](Groups::render) the groups that have
//! changed.
//!
//! Freeing has two steps. [`Groups::free_blocks`] and [`Groups::free_inode`] clear the bits that the
//! next commit writes, but the blocks and inodes stay *blocked*: they are not allocated. The caller
//! keeps them as a [`FreedBatch`], and calls [`Groups::reuse`] once the commit is durable, and once
//! the last stream that wrote to the blocks has released them. So what a crash may bring back is
//! never overwritten.

mod blocks;
mod group;
mod inodes;
mod render;
mod slots;
mod space;
mod system_blocks;
#[cfg(test)]
mod tests;

use alloc::sync::Arc;
use alloc::vec::Vec;

use crate::block::{Block, BlockNo, Ino};
use crate::error::FsError;
use crate::format::group_desc::GroupDesc;
use crate::format::layout::Layout;
use crate::sync::Mutex;
use crate::sync::atomic::{AtomicU32, AtomicU64, Ordering};
use group::Group;
use space::Space;
use system_blocks::SystemBlocks;

pub use space::Claim;

/// Reads a block of the format as the last commits have left it.
pub type ReadBlock<'a> = dyn Fn(BlockNo) -> Result<Arc<Block>, FsError> + 'a;

/// The block groups of a file system. All calls may be made by any thread at any time, except for
/// [`render`](Self::render).
#[derive(Debug)]
pub struct Groups {
    layout: Layout,
    groups: Vec<Group>,
    system: SystemBlocks,
    space: Space,
    /// Inodes that are not in use, blocked ones too.
    free_inodes: AtomicU64,
    blocked_inodes: AtomicU64,
    directories: AtomicU64,
    /// Spreads the directories of the root.
    spread: AtomicU32,
    /// The blocks of group descriptors, as the last commit has written them.
    descriptors: Mutex<Vec<Arc<Block>>>,
    /// A bit for each group that has changed since the last rendering.
    changed: Vec<AtomicU64>,
    /// The number of these bits.
    changed_count: AtomicU64,
}

/// Numbers of free blocks and inodes.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Counts {
    /// Blocks that are not in use, as the next commit shall write it.
    pub free_blocks: u64,
    /// Blocks that are neither in use nor reserved for pages in memory.
    pub unreserved_blocks: u64,
    /// Blocks that a user can get.
    pub available_blocks: u64,
    /// Inodes that are not in use, as the next commit shall write it.
    pub free_inodes: u32,
}

/// The place of an inode in its inode table.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct InodePlace {
    /// The block.
    pub block: BlockNo,
    /// The offset in the block, in bytes.
    pub offset: usize,
    /// The block was never initialised: it must be taken as zeroes instead of being read. No commit
    /// has written it. The commit that writes an inode of it writes the whole block.
    pub is_fresh: bool,
}

/// Blocks and inodes that were freed, and may not be allocated yet.
#[derive(Debug, Default)]
pub struct FreedBatch {
    blocks: Vec<(BlockNo, u32)>,
    inodes: Vec<Ino>,
}

impl FreedBatch {
    /// Whether nothing was freed.
    #[must_use]
    pub const fn is_empty(&self) -> bool {
        self.blocks.is_empty() && self.inodes.is_empty()
    }

    /// Adds all of another batch.
    pub fn append(&mut self, other: Self) {
        self.blocks.extend(other.blocks);
        self.inodes.extend(other.inodes);
    }

    /// The runs of blocks.
    pub fn blocks(&self) -> impl Iterator<Item = (BlockNo, u32)> {
        self.blocks.iter().copied()
    }

    /// The inodes.
    pub fn inodes(&self) -> impl Iterator<Item = Ino> {
        self.inodes.iter().copied()
    }

    fn add_blocks(&mut self, first: BlockNo, blocks: u32) {
        if let Some((last, length)) = self.blocks.last_mut()
            && last.0 + u64::from(*length) == first.0
            && let Some(both) = length.checked_add(blocks)
        {
            *length = both;
        } else {
            self.blocks.push((first, blocks));
        }
    }
}

impl Groups {
    /// The groups of a file system whose journal was replayed. All group descriptors are read and
    /// checked; bitmaps are read later.
    ///
    /// # Errors
    /// A group descriptor can't be read, or is damaged.
    pub fn open(layout: &Layout, read: &ReadBlock<'_>) -> Result<Self, FsError> {
        let mut descriptors = Vec::new();
        let mut descs = Vec::new();
        for n in 0..u64::from(layout.gdt_blocks()) {
            let at = BlockNo(1 + n);
            let block = read(at)?;
            for raw in block.chunks_exact(usize::from(layout.descriptor_bytes)) {
                let group = descs.len() as u32;
                if group == layout.groups {
                    break;
                }
                let desc = GroupDesc::decode(layout, raw);
                if !GroupDesc::verify(layout, group, raw) || !is_plausible(layout, &desc) {
                    return Err(FsError::DamagedBlock { what: "group descriptor", block: at });
                }
                descs.push(desc);
            }
            descriptors.push(block);
        }
        let system = SystemBlocks::new(layout, &descs)?;
        let sum = |part: fn(&GroupDesc) -> u32| descs.iter().map(|d| u64::from(part(d))).sum();
        let free: u64 = sum(|desc| desc.free_blocks);
        let groups = Self {
            space: Space::new(free, layout.blocks, layout.reserved_blocks),
            free_inodes: AtomicU64::new(sum(|desc| desc.free_inodes)),
            blocked_inodes: AtomicU64::new(0),
            directories: AtomicU64::new(sum(|desc| desc.used_dirs)),
            spread: AtomicU32::new(0),
            descriptors: Mutex::new(descriptors),
            changed: (0..descs.len().div_ceil(64)).map(|_| AtomicU64::new(0)).collect(),
            changed_count: AtomicU64::new(0),
            groups: descs.into_iter().map(|desc| Group::new(layout, desc)).collect(),
            system,
            layout: layout.clone(),
        };
        groups.check_free_blocks()?;
        Ok(groups)
    }

    /// Counts the blocks of the journal among those of the format: no other file may have one.
    ///
    /// # Errors
    /// [`FsError::DamagedInode`]: one of them is another structure of the format.
    /// [`FsError::DamagedBlock`]: a group descriptor counts them as free.
    pub fn add_journal(&mut self, ino: Ino, blocks: &[BlockNo]) -> Result<(), FsError> {
        if !self.system.add(blocks) {
            let what = "block list (blocks of the format)";
            return Err(FsError::DamagedInode { what, ino });
        }
        self.check_free_blocks()
    }

    /// No descriptor has more free blocks than the group has beside those of the format. Space for
    /// data is reserved by these numbers before a bitmap is read.
    fn check_free_blocks(&self) -> Result<(), FsError> {
        for (number, group) in (0u32..).zip(&self.groups) {
            let first = self.layout.first_block(number).0;
            let end = first + u64::from(self.layout.blocks_in_group(number));
            let own: u64 = self.system.within(first, end).map(|(from, to)| to - from).sum();
            if u64::from(group.available_blocks.load(Ordering::Relaxed)) > end - first - own {
                let block = self.layout.descriptor_at(number).0;
                return Err(FsError::DamagedBlock { what: "group descriptor", block });
            }
        }
        Ok(())
    }

    /// The numbers of free blocks and inodes.
    #[must_use]
    pub fn counts(&self) -> Counts {
        let unreserved_blocks = self.space.unreserved();
        Counts {
            free_blocks: self.space.free(),
            unreserved_blocks,
            available_blocks: unreserved_blocks.saturating_sub(self.space.withheld()),
            free_inodes: u32::try_from(self.free_inodes.load(Ordering::Relaxed))
                .unwrap_or(u32::MAX),
        }
    }

    /// The number of blocks that the format itself uses. With the blocks of the journal, it is the
    /// difference between all blocks and those that files can use.
    #[must_use]
    pub fn system_blocks(&self) -> u64 {
        self.system.count()
    }

    /// Whether there are blocks or inodes that are free but blocked. After [`FsError::NoSpace`] the
    /// caller commits, calls [`reuse`](Self::reuse), and tries again.
    #[must_use]
    pub fn has_blocked(&self) -> bool {
        self.space.blocked() > 0 || self.blocked_inodes.load(Ordering::Relaxed) > 0
    }

    /// Whether one of `blocks` blocks from `first` on is in use by the format itself, as superblock,
    /// group descriptor, bitmap, inode table or [journal](Self::add_journal), or does not exist. An
    /// extent that points to one is damaged.
    #[must_use]
    pub fn is_system_block(&self, first: BlockNo, blocks: u32) -> bool {
        first.0.checked_add(u64::from(blocks)).is_none_or(|end| end > self.layout.blocks)
            || self.system.contains(first, blocks)
    }

    /// About the number of blocks that [`render`](Self::render) would return now, at most.
    #[must_use]
    pub fn blocks_to_render(&self) -> usize {
        let groups = self.changed_count.load(Ordering::Relaxed);
        let descriptors = groups.min(u64::from(self.layout.gdt_blocks()));
        usize::try_from(2 * groups + descriptors).unwrap_or(usize::MAX)
    }

    /// The place of an inode, which must exist, in its inode table.
    #[must_use]
    pub fn inode_place(&self, ino: Ino) -> InodePlace {
        let (group, index) = self.layout.group_of_inode(ino);
        let group = &self.groups[group as usize];
        let per_block = self.layout.inodes_per_block();
        let block = index / per_block;
        InodePlace {
            block: BlockNo(group.inode_table.0 + u64::from(block)),
            offset: (index % per_block) as usize * usize::from(self.layout.inode_bytes),
            is_fresh: block >= group.table_ready.load(Ordering::Acquire),
        }
    }

    /// Lets the blocks and inodes of a batch be allocated again.
    pub fn reuse(&self, batch: FreedBatch) {
        for (first, blocks) in batch.blocks {
            for (group, bit, count) in self.parts(first, blocks) {
                let unblocked = self.groups[group as usize].unblock_blocks(bit, count);
                self.space.unblocked(unblocked);
            }
        }
        for ino in batch.inodes {
            let (group, index) = self.layout.group_of_inode(ino);
            if self.groups[group as usize].unblock_inode(index) {
                self.blocked_inodes.fetch_sub(1, Ordering::Relaxed);
            }
        }
    }

    /// The parts of a run of blocks in each group: group, first block in the group, blocks. Blocks
    /// that do not exist are left out.
    fn parts(&self, first: BlockNo, blocks: u32) -> impl Iterator<Item = (u32, u32, u32)> {
        let per_group = u64::from(self.layout.blocks_per_group);
        let end = first.0.saturating_add(u64::from(blocks)).min(self.layout.blocks);
        let mut at = first.0;
        core::iter::from_fn(move || {
            if at >= end {
                return None;
            }
            let bit = at % per_group;
            let count = (per_group - bit).min(end - at);
            let group = at / per_group;
            at += count;
            // Each is below the number of groups or of the blocks in one.
            Some((group as u32, bit as u32, count as u32))
        })
    }

    /// Marks a group as changed since the last rendering.
    fn mark_changed(&self, group: u32) {
        let bit = 1 << (group % 64);
        if self.changed[group as usize / 64].fetch_or(bit, Ordering::Release) & bit == 0 {
            self.changed_count.fetch_add(1, Ordering::Relaxed);
        }
    }

    /// The groups in the order of their distance from one, itself first.
    fn groups_from(&self, group: u32) -> impl Iterator<Item = u32> + use<> {
        let groups = self.layout.groups;
        (group..groups).chain(0..group)
    }
}

/// Lets a search go on in the next group if this one is damaged, and remembers the first damage.
fn unless_damaged<T>(
    found: Result<Option<T>, FsError>,
    damage: &mut Option<FsError>,
) -> Result<Option<T>, FsError> {
    match found {
        Err(error @ FsError::DamagedBlock { .. }) => {
            damage.get_or_insert(error);
            Ok(None)
        }
        other => other,
    }
}

/// Whether the numbers of a descriptor can be right.
fn is_plausible(layout: &Layout, desc: &GroupDesc) -> bool {
    let inodes = layout.inodes_per_group;
    // The free blocks are checked when the blocks of the format are known.
    desc.free_inodes <= inodes
        && desc.used_dirs <= inodes - desc.free_inodes
        && desc.itable_unused <= inodes
}

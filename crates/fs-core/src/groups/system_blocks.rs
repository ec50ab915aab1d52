//! The blocks that the format itself uses: superblocks, group descriptors, bitmaps, inode tables.

use alloc::vec::Vec;

use crate::block::BlockNo;
use crate::error::FsError;
use crate::format::group_desc::GroupDesc;
use crate::format::layout::Layout;

/// The blocks that the format itself uses, as sorted runs without overlap: first block, and the block
/// after the last.
#[derive(Debug)]
pub(super) struct SystemBlocks(Vec<(u64, u64)>);

impl SystemBlocks {
    /// Collects the blocks.
    ///
    /// # Errors
    /// A descriptor has a block that does not exist, or two structures have the same block.
    pub(super) fn new(layout: &Layout, descs: &[GroupDesc]) -> Result<Self, FsError> {
        let mut runs = Vec::new();
        for (group, desc) in (0u32..).zip(descs) {
            let damaged = || FsError::DamagedBlock {
                what: "group descriptor",
                block: layout.descriptor_at(group).0,
            };
            let head = layout.superblock_blocks(group).min(layout.blocks_in_group(group));
            if head > 0 {
                let first = layout.first_block(group).0;
                runs.push((first, first + u64::from(head), group));
            }
            for (first, blocks) in [
                (desc.block_bitmap.0, 1),
                (desc.inode_bitmap.0, 1),
                (desc.inode_table.0, u64::from(layout.inode_table_blocks())),
            ] {
                if first == 0 || first >= layout.blocks || blocks > layout.blocks - first {
                    return Err(damaged());
                }
                runs.push((first, first + blocks, group));
            }
        }
        runs.sort_unstable();
        let mut merged: Vec<(u64, u64)> = Vec::new();
        for (first, end, group) in runs {
            match merged.last_mut() {
                Some(last) if first < last.1 => {
                    return Err(FsError::DamagedBlock {
                        what: "group descriptor",
                        block: layout.descriptor_at(group).0,
                    });
                }
                Some(last) if first == last.1 => last.1 = end,
                _ => merged.push((first, end)),
            }
        }
        Ok(Self(merged))
    }

    /// Adds more blocks, each once. Returns whether they are apart from those that were there.
    pub(super) fn add(&mut self, blocks: &[BlockNo]) -> bool {
        let mut all = core::mem::take(&mut self.0);
        let mut next: Option<(u64, u64)> = None;
        for at in blocks.iter().map(|at| at.0) {
            match &mut next {
                Some(run) if run.1 == at => run.1 += 1,
                run => {
                    all.extend(run.take());
                    *run = Some((at, at + 1));
                }
            }
        }
        all.extend(next);
        all.sort_unstable();
        let are_apart = all.windows(2).all(|pair| pair[0].1 <= pair[1].0);
        self.0 = all;
        are_apart
    }

    /// The runs that have blocks in `first..end`, cut to it.
    pub(super) fn within(&self, first: u64, end: u64) -> impl Iterator<Item = (u64, u64)> {
        let from = self.0.partition_point(|run| run.1 <= first);
        self.0[from..]
            .iter()
            .take_while(move |run| run.0 < end)
            .map(move |run| (run.0.max(first), run.1.min(end)))
    }

    /// The number of blocks.
    pub(super) fn count(&self) -> u64 {
        self.0.iter().map(|run| run.1 - run.0).sum()
    }

    /// Whether one of `blocks` blocks from `first` on is in use by the format.
    pub(super) fn contains(&self, first: BlockNo, blocks: u32) -> bool {
        self.within(first.0, first.0.saturating_add(u64::from(blocks))).next().is_some()
    }
}

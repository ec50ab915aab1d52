//! The blocks that a commit writes for the groups that have changed.

use alloc::boxed::Box;
use alloc::collections::BTreeSet;
use alloc::sync::Arc;
use alloc::vec::Vec;

use super::Groups;
use super::group::table_blocks_in_use;
use crate::block::{BLOCK_BYTES, Block, BlockNo};
use crate::format::group_desc::GroupFlags;
use crate::sync::atomic::Ordering;

impl Groups {
    /// The new bitmaps and group descriptors of all groups that have changed since the last
    /// rendering, with their checksums, and blocks of zeroes for the inode tables that grow. The
    /// caller writes all of them in one commit, together with the superblock, which gets the
    /// [`counts`](Self::counts).
    ///
    /// No other call may run, except those that only read. Before it, the caller renders each inode
    /// that was allocated into its block, which it takes as zeroes if that is
    /// [fresh](super::InodePlace::is_fresh). From now on no block with such an inode is fresh.
    #[must_use]
    pub fn render(&self) -> Vec<(BlockNo, Box<Block>)> {
        let mut blocks = Vec::new();
        let mut touched = BTreeSet::new();
        let mut descriptors = self.descriptors.lock();
        for (n, word) in self.changed.iter().enumerate() {
            let mut bits = word.swap(0, Ordering::Acquire);
            self.changed_count.fetch_sub(u64::from(bits.count_ones()), Ordering::Relaxed);
            while bits != 0 {
                let group = n as u32 * 64 + bits.trailing_zeros();
                bits &= bits - 1;
                self.render_group(group, &mut descriptors, &mut touched, &mut blocks);
            }
        }
        for n in touched {
            blocks.push((BlockNo(1 + n as u64), Box::new(*descriptors[n])));
        }
        blocks
    }

    fn render_group(
        &self,
        number: u32,
        descriptors: &mut [Arc<Block>],
        touched: &mut BTreeSet<usize>,
        blocks: &mut Vec<(BlockNo, Box<Block>)>,
    ) {
        let layout = &self.layout;
        let group = &self.groups[number as usize];
        let mut locked = group.lock();
        if core::mem::take(&mut locked.state.blocks_changed)
            && let Some(bitmap) = locked.blocks().map(|slots| slots.encode())
        {
            let desc = &mut locked.state.desc;
            desc.flags.remove(GroupFlags::BLOCK_UNINIT);
            desc.seal_block_bitmap(layout, &bitmap);
            blocks.push((desc.block_bitmap, bitmap));
        }
        if core::mem::take(&mut locked.state.inodes_changed)
            && let Some(slots) = locked.inodes()
        {
            let bitmap = slots.encode();
            let last = slots.last_used().map_or(0, |last| last + 1);
            let is_free: Vec<bool> = (0..layout.inode_table_blocks())
                .map(|n| slots.are_free(n * layout.inodes_per_block(), layout.inodes_per_block()))
                .collect();
            let desc = &mut locked.state.desc;
            desc.flags.remove(GroupFlags::INODE_UNINIT);
            desc.seal_inode_bitmap(layout, &bitmap);
            blocks.push((desc.inode_bitmap, bitmap));
            if layout.has_group_csum() {
                desc.itable_unused = desc.itable_unused.min(layout.inodes_per_group - last);
                let ready = group.table_ready.load(Ordering::Relaxed);
                let needed = table_blocks_in_use(layout, desc).max(ready);
                for n in (ready..needed).filter(|n| is_free[*n as usize]) {
                    let at = BlockNo(desc.inode_table.0 + u64::from(n));
                    blocks.push((at, Box::new([0; BLOCK_BYTES])));
                }
                group.table_ready.store(needed, Ordering::Release);
            }
        }
        let (at, offset) = layout.descriptor_at(number);
        // The table of descriptors begins in block 1, and was read whole.
        let n = (at.0 - 1) as usize;
        let end = offset + usize::from(layout.descriptor_bytes);
        let raw = &mut Arc::make_mut(&mut descriptors[n])[offset..end];
        locked.state.desc.encode(layout, number, raw);
        touched.insert(n);
    }
}

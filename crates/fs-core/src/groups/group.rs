//! One group in memory.

use crate::sync::atomic::{AtomicU32, Ordering};

use super::ReadBlock;
use super::slots::Slots;
use super::system_blocks::SystemBlocks;
use crate::block::BlockNo;
use crate::error::FsError;
use crate::format::group_desc::{GroupDesc, GroupFlags};
use crate::format::layout::Layout;
use crate::sync::{Mutex, MutexGuard};

/// One group in memory.
#[derive(Debug)]
pub(super) struct Group {
    pub(super) inode_table: BlockNo,
    /// Blocks at the start of the inode table that are initialised.
    pub(super) table_ready: AtomicU32,
    /// Blocks that can be allocated. This and the next ones are copies for readers without the lock.
    pub(super) available_blocks: AtomicU32,
    /// Inodes that can be allocated.
    pub(super) available_inodes: AtomicU32,
    /// Inodes that are directories.
    pub(super) used_dirs: AtomicU32,
    state: Mutex<State>,
}

/// The part of a group that its lock protects.
#[derive(Debug)]
pub(super) struct State {
    pub(super) desc: GroupDesc,
    /// The blocks, once their bitmap was needed.
    blocks: Option<Slots>,
    /// The inodes, once their bitmap was needed.
    inodes: Option<Slots>,
    /// The bitmap is damaged: nothing of the group can be allocated or freed.
    is_block_bitmap_damaged: bool,
    is_inode_bitmap_damaged: bool,
    /// The end of the last run of blocks that was allocated.
    pub(super) last_block: u32,
    pub(super) blocks_changed: bool,
    pub(super) inodes_changed: bool,
}

/// The locked state of a group, with the slots of its blocks or its inodes.
pub(super) struct Locked<'a> {
    group: &'a Group,
    pub(super) state: MutexGuard<'a, State>,
}

impl Group {
    /// A group, of which only the descriptor was read.
    pub(super) fn new(layout: &Layout, mut desc: GroupDesc) -> Self {
        let table_blocks = layout.inode_table_blocks();
        if !layout.has_group_csum() {
            desc.flags.remove(GroupFlags::BLOCK_UNINIT | GroupFlags::INODE_UNINIT);
            desc.itable_unused = 0;
        }
        if desc.flags.contains(GroupFlags::INODE_UNINIT) {
            desc.itable_unused = layout.inodes_per_group;
        }
        let ready = if !layout.has_group_csum() || desc.flags.contains(GroupFlags::INODE_ZEROED) {
            table_blocks
        } else {
            table_blocks_in_use(layout, &desc)
        };
        Self {
            inode_table: desc.inode_table,
            table_ready: AtomicU32::new(ready),
            available_blocks: AtomicU32::new(desc.free_blocks),
            available_inodes: AtomicU32::new(desc.free_inodes),
            used_dirs: AtomicU32::new(desc.used_dirs),
            state: Mutex::new(State {
                desc,
                blocks: None,
                inodes: None,
                is_block_bitmap_damaged: false,
                is_inode_bitmap_damaged: false,
                last_block: 0,
                blocks_changed: false,
                inodes_changed: false,
            }),
        }
    }

    pub(super) fn lock(&self) -> Locked<'_> {
        Locked { group: self, state: self.state.lock() }
    }

    /// Reads the block bitmap, unless it was read. The lock is not held meanwhile: if another thread
    /// reads it, too, the first one counts, and this one may have read a later bitmap.
    pub(super) fn load_blocks(
        &self,
        layout: &Layout,
        group: u32,
        system: &SystemBlocks,
        read: &ReadBlock<'_>,
    ) -> Result<(), FsError> {
        let (desc, is_damaged) = {
            let state = self.state.lock();
            if state.blocks.is_some() {
                return Ok(());
            }
            (state.desc, state.is_block_bitmap_damaged)
        };
        let count = layout.blocks_in_group(group);
        let damaged = FsError::DamagedBlock { what: "block bitmap", block: desc.block_bitmap };
        if is_damaged {
            return Err(damaged);
        }
        let first = layout.first_block(group).0;
        let own = system.within(first, first + u64::from(count));
        // Both are below the number of blocks in a group.
        let own = own.map(|(at, end)| ((at - first) as u32, (end - at) as u32));
        let (slots, is_good) = if desc.flags.contains(GroupFlags::BLOCK_UNINIT) {
            let mut slots = Slots::new(count);
            for (start, len) in own {
                slots.take(start, len);
            }
            (slots, true)
        } else {
            let bitmap = read(desc.block_bitmap)?;
            let slots = Slots::decode(&bitmap, count);
            let mut own = own;
            let is_good = desc.verify_block_bitmap(layout, &bitmap)
                && own.all(|(start, len)| slots.are_used(start, len));
            (slots, is_good)
        };
        let is_good = is_good && slots.free_count() == desc.free_blocks;
        let mut state = self.state.lock();
        if state.blocks.is_none() {
            if !is_good {
                return Err(damaged);
            }
            state.blocks = Some(slots);
        }
        Ok(())
    }

    /// Reads the inode bitmap, unless it was read.
    pub(super) fn load_inodes(
        &self,
        layout: &Layout,
        group: u32,
        read: &ReadBlock<'_>,
    ) -> Result<(), FsError> {
        let (desc, is_damaged) = {
            let state = self.state.lock();
            if state.inodes.is_some() {
                return Ok(());
            }
            (state.desc, state.is_inode_bitmap_damaged)
        };
        let count = layout.inodes_per_group;
        let damaged = FsError::DamagedBlock { what: "inode bitmap", block: desc.inode_bitmap };
        if is_damaged {
            return Err(damaged);
        }
        let (slots, is_good) = if desc.flags.contains(GroupFlags::INODE_UNINIT) {
            (Slots::new(count), true)
        } else {
            let bitmap = read(desc.inode_bitmap)?;
            let slots = Slots::decode(&bitmap, count);
            let unused = desc.itable_unused;
            let is_good = desc.verify_inode_bitmap(layout, &bitmap)
                && slots.are_free(count - unused, unused)
                && (group != 0 || slots.are_used(0, layout.first_ino.0 - 1));
            (slots, is_good)
        };
        let is_good = is_good && slots.free_count() == desc.free_inodes;
        let mut state = self.state.lock();
        if state.inodes.is_none() {
            if !is_good {
                return Err(damaged);
            }
            state.inodes = Some(slots);
        }
        Ok(())
    }

    /// Leaves the group out of the search for blocks: its bitmap is damaged. Returns the free blocks
    /// that its descriptor has; 0 if it was left out before.
    pub(super) fn isolate_blocks(&self) -> u32 {
        let mut state = self.state.lock();
        if state.blocks.is_some() || core::mem::replace(&mut state.is_block_bitmap_damaged, true) {
            return 0;
        }
        self.available_blocks.store(0, Ordering::Relaxed);
        state.desc.free_blocks
    }

    /// As [`isolate_blocks`](Self::isolate_blocks), for inodes. If the bitmap was read, inodes can
    /// still be freed.
    pub(super) fn isolate_inodes(&self) {
        let mut locked = self.lock();
        locked.state.is_inode_bitmap_damaged = true;
        locked.group.available_inodes.store(0, Ordering::Relaxed);
    }

    /// Lets blocks be allocated again, and returns how many were blocked.
    pub(super) fn unblock_blocks(&self, start: u32, len: u32) -> u32 {
        let mut locked = self.lock();
        locked.blocks().map_or(0, |slots| slots.unblock(start, len))
    }

    /// Lets an inode be allocated again, and returns whether it was blocked.
    pub(super) fn unblock_inode(&self, index: u32) -> bool {
        let mut locked = self.lock();
        locked.inodes().is_some_and(|slots| slots.unblock(index, 1) == 1)
    }
}

/// The blocks of the inode table that have inodes which were used once.
pub(super) fn table_blocks_in_use(layout: &Layout, desc: &GroupDesc) -> u32 {
    let used = layout.inodes_per_group.saturating_sub(desc.itable_unused);
    used.div_ceil(layout.inodes_per_block())
}

impl Locked<'_> {
    /// The blocks, if their bitmap was read.
    pub(super) fn blocks(&mut self) -> Option<&mut Slots> {
        self.state.blocks.as_mut()
    }

    /// The inodes, if their bitmap was read.
    pub(super) fn inodes(&mut self) -> Option<&mut Slots> {
        self.state.inodes.as_mut()
    }
}

impl Drop for Locked<'_> {
    /// Copies the numbers into the descriptor, and for readers without the lock.
    fn drop(&mut self) {
        let state = &mut *self.state;
        if let Some(slots) = &state.blocks {
            let free = slots.free_count();
            state.desc.free_blocks = free;
            self.group.available_blocks.store(free - slots.blocked_count(), Ordering::Relaxed);
        }
        if let Some(slots) = &state.inodes {
            let free = slots.free_count();
            state.desc.free_inodes = free;
            let available =
                if state.is_inode_bitmap_damaged { 0 } else { free - slots.blocked_count() };
            self.group.available_inodes.store(available, Ordering::Relaxed);
        }
        self.group.used_dirs.store(state.desc.used_dirs, Ordering::Relaxed);
    }
}

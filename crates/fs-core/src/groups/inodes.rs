//! The allocation of inodes: directories of the root are spread, and everything else lies near its
//! parent.

use crate::sync::atomic::Ordering;

use super::{FreedBatch, Groups, ReadBlock};
use crate::block::Ino;
use crate::error::FsError;
use crate::format::group_desc::GroupFlags;

/// The number of groups among which the best one for a directory of the root is chosen.
const GROUPS_TO_COMPARE: usize = 64;

/// How often all groups are searched. Inodes may move from a group that comes later in the search to
/// one that was searched before.
const ROUNDS: usize = 2;

/// Groups as good as the average, as far as a directory is concerned.
struct Average {
    inodes: u32,
    blocks: u32,
    directories: u32,
}

impl Groups {
    /// Allocates an inode whose parent is the directory `parent`. Its fields are those of the last
    /// file with the number, or anything else: the caller sets all. [`InodePlace`](super::InodePlace)
    /// has whether its block must be read.
    ///
    /// # Errors
    /// [`FsError::NoSpace`], see [`has_blocked`](Self::has_blocked); or a bitmap can't be read or is
    /// damaged.
    pub fn allocate_inode(
        &self,
        parent: Ino,
        is_dir: bool,
        read: &ReadBlock<'_>,
    ) -> Result<Ino, FsError> {
        let home = self.layout.group_of_inode(parent).0.min(self.layout.groups - 1);
        let first = if is_dir { self.directory_group(parent, home) } else { self.file_group(home) };
        let mut damage = None;
        for _ in 0..ROUNDS {
            for group in self.groups_from(first) {
                if self.available_inodes(group) == 0 {
                    continue;
                }
                let taken = self.take_inode(group, is_dir, read);
                if let Some(ino) = super::unless_damaged(taken, &mut damage)? {
                    return Ok(ino);
                }
            }
        }
        Err(damage.unwrap_or(FsError::NoSpace))
    }

    /// Undoes an allocation for an operation that has failed. The inode can be allocated again at
    /// once.
    pub fn unallocate_inode(&self, ino: Ino, is_dir: bool) {
        let (group, index) = self.layout.group_of_inode(ino);
        let mut locked = self.groups[group as usize].lock();
        let free = locked.inodes().map_or(0, |slots| slots.put_back(index, 1));
        if free == 1 {
            if is_dir {
                locked.state.desc.used_dirs = locked.state.desc.used_dirs.saturating_sub(1);
            }
            locked.state.inodes_changed = true;
            self.count_inode(is_dir, false);
            drop(locked);
            self.mark_changed(group);
        }
    }

    /// Prepares [`free_inode`](Self::free_inode): reads the bitmap, and checks that the inode is in
    /// use and is not the format's own.
    ///
    /// # Errors
    /// A bitmap can't be read or is damaged, or the inode can't be freed.
    pub fn prepare_free_inode(&self, ino: Ino, read: &ReadBlock<'_>) -> Result<(), FsError> {
        if self.is_inode_used(ino, read)? && ino >= self.layout.first_ino {
            Ok(())
        } else {
            Err(FsError::DamagedInode { what: "use", ino })
        }
    }

    /// Frees an inode that was [prepared](Self::prepare_free_inode), and adds it to `batch`. It can be
    /// allocated again after [`reuse`](Self::reuse). An inode that is not in use is left out.
    pub fn free_inode(&self, ino: Ino, is_dir: bool, batch: &mut FreedBatch) {
        let (group, index) = self.layout.group_of_inode(ino);
        let mut locked = self.groups[group as usize].lock();
        let mut is_freed = false;
        if let Some(slots) = locked.inodes() {
            slots.free_and_block(index, 1, |_, _| is_freed = true);
        }
        if is_freed {
            if is_dir {
                locked.state.desc.used_dirs = locked.state.desc.used_dirs.saturating_sub(1);
            }
            locked.state.inodes_changed = true;
            // Under the lock, so that a count of blocked inodes never goes below zero.
            self.blocked_inodes.fetch_add(1, Ordering::Relaxed);
            self.count_inode(is_dir, false);
            drop(locked);
            self.mark_changed(group);
            batch.inodes.push(ino);
        }
    }

    /// Whether an inode is in use.
    ///
    /// # Errors
    /// A bitmap can't be read or is damaged, or the inode does not exist.
    pub fn is_inode_used(&self, ino: Ino, read: &ReadBlock<'_>) -> Result<bool, FsError> {
        if ino.0 == 0 || ino.0 > self.layout.inodes {
            return Err(FsError::DamagedInode { what: "number", ino });
        }
        let (group, index) = self.layout.group_of_inode(ino);
        self.load_inodes(group, read)?;
        let mut locked = self.groups[group as usize].lock();
        Ok(locked.inodes().is_some_and(|slots| slots.are_used(index, 1)))
    }

    /// Sets a particular inode in use, for a recovery that finds a file with it. Returns whether it
    /// was free.
    ///
    /// # Errors
    /// A bitmap can't be read or is damaged, or the inode does not exist.
    pub fn claim_inode(
        &self,
        ino: Ino,
        is_dir: bool,
        read: &ReadBlock<'_>,
    ) -> Result<bool, FsError> {
        if self.is_inode_used(ino, read)? {
            return Ok(false);
        }
        let (group, index) = self.layout.group_of_inode(ino);
        self.load_blocks(group, read)?;
        let claimed = self.set_inode(group, Some(index), is_dir);
        Ok(claimed.is_some())
    }

    fn available_inodes(&self, group: u32) -> u32 {
        self.groups[group as usize].available_inodes.load(Ordering::Relaxed)
    }

    fn available_blocks(&self, group: u32) -> u32 {
        self.groups[group as usize].available_blocks.load(Ordering::Relaxed)
    }

    /// The group in which the search for a file's inode begins: that of its parent, one in the same
    /// flexible group, or one at growing distance, with a free block too.
    fn file_group(&self, home: u32) -> u32 {
        let groups = self.layout.groups;
        let flex = self.layout.flex_groups;
        let first = home / flex * flex;
        let end = first.saturating_add(flex).min(groups);
        let far = (0..32)
            .map(|n| 1u64 << n)
            .take_while(|distance| *distance < u64::from(groups))
            // The sum is below two times the number of groups, and the remainder below it.
            .map(|distance| ((u64::from(home) + distance) % u64::from(groups)) as u32);
        (home..end)
            .chain(first..home)
            .chain(far)
            .find(|&group| self.available_inodes(group) > 0 && self.available_blocks(group) > 0)
            .unwrap_or(home)
    }

    /// The group in which the search for a directory's inode begins (the idea of Orlov): a directory
    /// of the root goes to an empty place, any other one near its parent unless that is crowded.
    fn directory_group(&self, parent: Ino, home: u32) -> u32 {
        let groups = self.layout.groups;
        let per_group = |sum: u64| u32::try_from(sum / u64::from(groups)).unwrap_or(u32::MAX);
        let average = Average {
            inodes: per_group(self.free_inodes.load(Ordering::Relaxed)),
            blocks: per_group(self.space.free()),
            directories: per_group(self.directories.load(Ordering::Relaxed)),
        };
        let directories =
            |group: u32| self.groups[group as usize].used_dirs.load(Ordering::Relaxed);
        if parent == Ino::ROOT {
            // The multiplier is odd and near the golden ratio of 2^32, so that starts spread well.
            let start = self.spread.fetch_add(1, Ordering::Relaxed).wrapping_mul(0x9e37_79b1);
            return self
                .groups_from(start % groups)
                .take(GROUPS_TO_COMPARE)
                .filter(|&group| {
                    self.available_inodes(group) >= average.inodes.max(1)
                        && self.available_blocks(group) >= average.blocks
                })
                .min_by_key(|&group| directories(group))
                .unwrap_or(start % groups);
        }
        let least_inodes = average.inodes.saturating_sub(self.layout.inodes_per_group / 4).max(1);
        let least_blocks = average.blocks.saturating_sub(self.layout.blocks_per_group / 4);
        let most_directories =
            average.directories.saturating_add(self.layout.inodes_per_group / 16);
        self.groups_from(home)
            .take(GROUPS_TO_COMPARE)
            .find(|&group| {
                self.available_inodes(group) >= least_inodes
                    && self.available_blocks(group) >= least_blocks
                    && directories(group) <= most_directories
            })
            .unwrap_or(home)
    }

    /// An inode was allocated that is in use: the bitmap of its group is damaged. No more inodes of
    /// the group are allocated. Returns the error.
    pub fn isolate_inodes_of(&self, ino: Ino) -> FsError {
        let (group, _) = self.layout.group_of_inode(ino);
        let group = &self.groups[group as usize];
        group.isolate_inodes();
        let block = group.lock().state.desc.inode_bitmap;
        FsError::DamagedBlock { what: "inode bitmap", block }
    }

    fn load_inodes(&self, group: u32, read: &ReadBlock<'_>) -> Result<(), FsError> {
        let group_in_memory = &self.groups[group as usize];
        let loaded = group_in_memory.load_inodes(&self.layout, group, read);
        if let Err(FsError::DamagedBlock { .. }) = loaded {
            group_in_memory.isolate_inodes();
        }
        loaded
    }

    fn take_inode(
        &self,
        group: u32,
        is_dir: bool,
        read: &ReadBlock<'_>,
    ) -> Result<Option<Ino>, FsError> {
        self.load_inodes(group, read)?;
        // A group with an inode in use has a block bitmap.
        self.load_blocks(group, read)?;
        Ok(self.set_inode(group, None, is_dir))
    }

    /// Sets an inode of a group in use: a particular one, or the first that can be allocated. The
    /// bitmaps of the group were read.
    fn set_inode(&self, group: u32, index: Option<u32>, is_dir: bool) -> Option<Ino> {
        let mut locked = self.groups[group as usize].lock();
        let slots = locked.inodes()?;
        let index = match index {
            Some(index) => index,
            None => slots.find(0, 1)?.0,
        };
        let (free, blocked) = slots.take(index, 1);
        if free + blocked == 0 {
            return None;
        }
        self.blocked_inodes.fetch_sub(u64::from(blocked), Ordering::Relaxed);
        let state = &mut *locked.state;
        state.inodes_changed = true;
        if state.desc.flags.contains(GroupFlags::BLOCK_UNINIT) {
            state.blocks_changed = true;
        }
        if is_dir {
            state.desc.used_dirs += 1;
        }
        self.count_inode(is_dir, true);
        drop(locked);
        self.mark_changed(group);
        // The number is at most that of all inodes.
        Some(Ino(group * self.layout.inodes_per_group + index + 1))
    }

    /// Counts an inode that is now in use, or no longer. The caller has the lock of its group, so that
    /// no number goes below zero.
    fn count_inode(&self, is_dir: bool, is_used: bool) {
        let directory = u64::from(is_dir);
        if is_used {
            self.free_inodes.fetch_sub(1, Ordering::Relaxed);
            self.directories.fetch_add(directory, Ordering::Relaxed);
        } else {
            self.free_inodes.fetch_add(1, Ordering::Relaxed);
            self.directories.fetch_sub(directory, Ordering::Relaxed);
        }
    }
}

//! Space: allocating, and waiting for space that is being freed.

use alloc::sync::Arc;
use alloc::vec::Vec;

use super::{Fs, Held};
use crate::block::{BlockKind, BlockNo, Ino};
use crate::error::FsError;
use crate::file_journal::record::{Change, Record};
use crate::groups::Claim;
use crate::inode_table::Inode;
use crate::sync::atomic::Ordering;

/// How often an operation is tried again after a commit that frees space, while other threads take
/// the space.
const RETRIES: usize = 3;

impl Fs {
    /// Does `attempt`. If there is no space now, but space that is being freed, frees it and tries
    /// again.
    pub(super) fn retry<T>(
        &self,
        attempt: impl FnMut() -> Result<T, FsError>,
    ) -> Result<T, FsError> {
        self.retry_for(Held::First, attempt)
    }

    /// As [`retry`](Self::retry), also for a thread that submits held files.
    ///
    /// Freed space waits for a commit. A long removal frees space step by step, over many
    /// transactions. So this goes on as long as a removal that has begun makes progress. Removals
    /// that begin later do not count, so there is an end.
    pub(super) fn retry_for<T>(
        &self,
        held: Held,
        mut attempt: impl FnMut() -> Result<T, FsError>,
    ) -> Result<T, FsError> {
        let mut removals = None;
        let mut tries = 0;
        loop {
            let reuses = self.reuses.load(Ordering::Acquire);
            let result = attempt();
            if !matches!(result, Err(FsError::NoSpace)) {
                return result;
            }
            let removals = removals.get_or_insert_with(|| self.removals());
            // Another thread may also have made space during the attempt.
            let has_reused = || self.reuses.load(Ordering::Acquire) != reuses;
            if tries < RETRIES && self.groups.has_blocked() {
                self.commit_running(held)?;
                self.reuse_when_released()?;
                tries += 1;
            } else if self.continue_removals(removals, held)? {
                tries = 0;
            } else if tries < RETRIES && has_reused() {
                tries += 1;
            } else {
                return result;
            }
        }
    }

    /// The inodes that lose blocks step by step, by a deletion or a truncate.
    fn removals(&self) -> Vec<Arc<Inode>> {
        let orphans = self.orphans.lock().all().into_iter();
        let inodes = orphans.filter_map(|ino| self.inodes.get(ino).ok());
        inodes.filter(|inode| inode.is_being_removed()).collect()
    }

    /// Does steps of these removals, until a transaction is full and committed, or all are finished.
    /// Other threads may do steps of them, too. Whether there was one. A removal that fails is
    /// dropped: its own caller gets the error.
    fn continue_removals(
        &self,
        removals: &mut Vec<Arc<Inode>>,
        held: Held,
    ) -> Result<bool, FsError> {
        let durable = self.durable();
        let mut is_step_done = false;
        while let Some(inode) = removals.last()
            && self.durable() == durable
        {
            match self.continue_removal(inode, held) {
                Ok(is_finished) => {
                    is_step_done = true;
                    if is_finished {
                        removals.pop();
                    }
                }
                Err(FsError::NoSpace | FsError::Stale(_)) => drop(removals.pop()),
                Err(error) if error.is_damage() => drop(removals.pop()),
                Err(error) => return Err(error),
            }
        }
        Ok(is_step_done)
    }

    /// Does one step of a removal. Returns whether it is finished.
    fn continue_removal(&self, inode: &Arc<Inode>, held: Held) -> Result<bool, FsError> {
        let has_no_name = inode.state.read().disk.links == 0;
        if has_no_name {
            self.delete_step(inode, false, held)
        } else {
            self.remove_step(inode, held)
        }
    }

    /// Allocates a run of blocks near `goal`; `reserved` of them were reserved.
    pub(crate) fn allocate_blocks(
        &self,
        goal: BlockNo,
        want: u32,
        claim: Claim,
        reserved: u32,
    ) -> Result<(BlockNo, u32), FsError> {
        let read = |at| self.read_meta(at, BlockKind::Plain);
        let mut refused = Vec::new();
        let found = loop {
            let found = self.groups.allocate_blocks(goal, want, claim, reserved, &read);
            match found {
                Ok((first, len)) if self.is_awaited(first, len) => refused.push((first, len)),
                _ => break found,
            }
        };
        for (first, len) in refused {
            self.groups.unallocate_blocks(first, len);
        }
        found
    }

    /// Whether one of these blocks belongs to a file-level record that recovery will apply later.
    /// The bitmaps do not show that yet.
    fn is_awaited(&self, first: BlockNo, len: u32) -> bool {
        if !self.is_recovering.load(Ordering::Acquire) {
            return false;
        }
        let end = first.0 + u64::from(len);
        let awaited = self.awaited.lock();
        awaited.range(..end).next_back().is_some_and(|(_, &awaited_end)| awaited_end > first.0)
    }

    /// Keeps the blocks of all `records` from being allocated, or none of them any more.
    pub(super) fn await_blocks(&self, records: &[Record]) {
        let mut awaited = self.awaited.lock();
        awaited.clear();
        for change in records.iter().flat_map(|record| &record.changes) {
            if let &Change::Extent { physical: Some(BlockNo(first)), len, .. } = change {
                let end = awaited.entry(first).or_default();
                *end = (first + u64::from(len)).max(*end);
            }
        }
        // A range that begins inside of another one must not hide the end of that one.
        let mut reach = 0;
        for end in awaited.values_mut() {
            reach = reach.max(*end);
            *end = reach;
        }
        self.is_recovering.store(!awaited.is_empty(), Ordering::Release);
    }

    /// Allocates an inode near its parent.
    pub(crate) fn allocate_inode(&self, parent: Ino, is_dir: bool) -> Result<Ino, FsError> {
        let read = |at| self.read_meta(at, BlockKind::Plain);
        self.groups.allocate_inode(parent, is_dir, &read)
    }

    /// Where the first data of an inode should lie: in its group.
    pub(super) fn data_goal(&self, ino: Ino) -> BlockNo {
        let group = self.layout.group_of_inode(ino).0;
        BlockNo(u64::from(group) * u64::from(self.layout.blocks_per_group))
    }
}

//! Space: allocating, and waiting for space that a commit frees.

use alloc::vec::Vec;

use super::{Fs, Held};
use crate::block::{BlockKind, BlockNo, Ino};
use crate::error::FsError;
use crate::file_journal::record::{Change, Record};
use crate::groups::Claim;
use crate::sync::atomic::Ordering;

/// How often an operation is tried again after a commit that frees space.
const RETRIES: usize = 3;

impl Fs {
    /// Does `attempt`. If there is no space now, but freed space that waits for a commit, commits
    /// and tries again.
    pub(super) fn retry<T>(
        &self,
        attempt: impl FnMut() -> Result<T, FsError>,
    ) -> Result<T, FsError> {
        self.retry_for(Held::First, attempt)
    }

    /// As [`retry`](Self::retry), also for a thread that submits held files.
    pub(super) fn retry_for<T>(
        &self,
        held: Held,
        mut attempt: impl FnMut() -> Result<T, FsError>,
    ) -> Result<T, FsError> {
        for _ in 0..RETRIES {
            let reuses = self.reuses.load(Ordering::Acquire);
            match attempt() {
                Err(FsError::NoSpace) if self.groups.has_blocked() => {
                    self.commit_running(held)?;
                    self.reuse_when_released()?;
                }
                // Another thread has just made space.
                Err(FsError::NoSpace) if self.reuses.load(Ordering::Acquire) != reuses => {}
                result => return result,
            }
        }
        attempt()
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

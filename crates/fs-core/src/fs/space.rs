//! Space: allocating, and waiting for space that a commit frees.

use super::Fs;
use crate::block::{BlockKind, BlockNo, Ino};
use crate::error::FsError;
use crate::groups::Claim;

/// How often an operation is tried again after a commit that frees space.
const RETRIES: usize = 3;

impl Fs {
    /// Does `attempt`. If there is no space now, but freed space that waits for a commit, commits
    /// and tries again.
    pub(super) fn retry<T>(
        &self,
        attempt: impl FnMut() -> Result<T, FsError>,
    ) -> Result<T, FsError> {
        self.retry_after(attempt, Self::commit_now)
    }

    /// As [`retry`](Self::retry), for a write-back, which may itself submit a held file.
    pub(super) fn retry_write_back<T>(
        &self,
        attempt: impl FnMut() -> Result<T, FsError>,
    ) -> Result<T, FsError> {
        self.retry_after(attempt, Self::commit_without_held)
    }

    fn retry_after<T>(
        &self,
        mut attempt: impl FnMut() -> Result<T, FsError>,
        commit: impl Fn(&Self) -> Result<(), FsError>,
    ) -> Result<T, FsError> {
        for _ in 0..RETRIES {
            match attempt() {
                Err(FsError::NoSpace) if self.groups.has_blocked() => {
                    commit(self)?;
                    self.reuse_when_released()?;
                }
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
        self.groups.allocate_blocks(goal, want, claim, reserved, &read)
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

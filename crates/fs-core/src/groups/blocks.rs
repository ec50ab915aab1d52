//! The allocation of blocks.

use super::{Claim, FreedBatch, Groups, ReadBlock};
use crate::block::BlockNo;
use crate::error::FsError;
use crate::sync::atomic::Ordering;

/// The number of groups that are searched for a run of the whole length.
const GROUPS_FOR_A_RUN: usize = 8;

/// How often all groups are searched. Blocks may move from a group that comes later in the search
/// to one that was searched before, so once is not enough; with a right to blocks, twice almost
/// always is.
const ROUNDS: usize = 4;

impl Groups {
    /// Allocates a run of up to `want` blocks: at `goal` if that is free, or else near it. A shorter
    /// run is the answer if there is no longer one in the groups searched.
    ///
    /// `reserved` of the blocks were [reserved](Self::reserve). The reservation stays; the caller
    /// [ends it](Self::unreserve) when the operation has succeeded.
    ///
    /// # Errors
    /// [`FsError::NoSpace`], see [`has_blocked`](Self::has_blocked); or a bitmap can't be read or is
    /// damaged.
    pub fn allocate_blocks(
        &self,
        goal: BlockNo,
        want: u32,
        claim: Claim,
        reserved: u32,
        read: &ReadBlock<'_>,
    ) -> Result<(BlockNo, u32), FsError> {
        if want == 0 {
            return Err(FsError::Invalid);
        }
        let granted = self.space.take(want, 1, claim, reserved)?;
        let found = self.find_blocks(goal, granted, read);
        let len = found.as_ref().map_or(0, |found| found.1);
        self.space.untake(u64::from(granted - len));
        self.space.allocated(len);
        found
    }

    /// Reserves blocks, so that they can be allocated later. The caller adds an estimate of the
    /// metadata, or allocates metadata as [`Claim::WriteBack`].
    ///
    /// # Errors
    /// [`FsError::NoSpace`], see [`has_blocked`](Self::has_blocked).
    pub fn reserve(&self, blocks: u32, claim: Claim) -> Result<(), FsError> {
        self.space.take(blocks, blocks, claim, 0)?;
        Ok(())
    }

    /// Ends the reservation of blocks, whether they were allocated or not.
    pub fn unreserve(&self, blocks: u64) {
        self.space.untake(blocks);
    }

    /// A goal for the blocks of stream `stream` of `streams`. Each stream has groups of its own, so
    /// that streams do not wait for the lock of the same group.
    #[must_use]
    pub fn rotor(&self, stream: u16, streams: u16) -> BlockNo {
        let groups = u64::from(self.layout.groups);
        let start = |stream: u64| stream * groups / u64::from(streams.max(1));
        let (first, end) = (start(u64::from(stream)), start(u64::from(stream) + 1).min(groups));
        let is_roomy = |group: &u64| {
            let available = self.groups[*group as usize].available_blocks.load(Ordering::Relaxed);
            available >= self.layout.blocks_per_group / 8
        };
        let group = (first..end).find(is_roomy).unwrap_or(first.min(groups - 1));
        self.layout.first_block(group as u32)
    }

    /// Prepares [`free_blocks`](Self::free_blocks): reads the bitmaps, and checks that the blocks
    /// are in use and are not the format's own.
    ///
    /// # Errors
    /// A bitmap can't be read or is damaged, or the blocks can't be freed.
    pub fn prepare_free_blocks(
        &self,
        first: BlockNo,
        blocks: u32,
        read: &ReadBlock<'_>,
    ) -> Result<(), FsError> {
        let damaged = || FsError::DamagedBlock { what: "use of blocks from here on", block: first };
        if self.is_system_block(first, blocks) {
            return Err(damaged());
        }
        for (group, bit, count) in self.parts(first, blocks) {
            self.load_blocks(group, read)?;
            let mut locked = self.groups[group as usize].lock();
            if !locked.blocks().is_some_and(|slots| slots.are_used(bit, count)) {
                return Err(damaged());
            }
        }
        Ok(())
    }

    /// Frees blocks that were [prepared](Self::prepare_free_blocks), and adds them to `batch`. They
    /// can be allocated again after [`reuse`](Self::reuse). Blocks that are not in use are left out.
    pub fn free_blocks(&self, first: BlockNo, blocks: u32, batch: &mut FreedBatch) {
        for (group, bit, count) in self.parts(first, blocks) {
            let mut freed = 0;
            let start = self.layout.first_block(group);
            let mut locked = self.groups[group as usize].lock();
            if let Some(slots) = locked.blocks() {
                slots.free_and_block(bit, count, |at, len| {
                    batch.add_blocks(BlockNo(start.0 + u64::from(at)), len);
                    freed += len;
                });
            }
            locked.state.blocks_changed |= freed > 0;
            self.space.freed_and_blocked(freed);
            drop(locked);
            if freed > 0 {
                self.mark_changed(group);
            }
        }
    }

    /// Undoes an allocation for an operation that has failed. The blocks can be allocated again at
    /// once, since nothing on the drive refers to them.
    pub fn unallocate_blocks(&self, first: BlockNo, blocks: u32) {
        for (group, bit, count) in self.parts(first, blocks) {
            let mut locked = self.groups[group as usize].lock();
            let free = locked.blocks().map_or(0, |slots| slots.put_back(bit, count));
            locked.state.blocks_changed |= free > 0;
            drop(locked);
            self.mark_changed(group);
            // After the lock, so that each right to a block finds one.
            self.space.put_back(free);
        }
    }

    /// Sets particular blocks in use, for a recovery that finds a file with them. Blocks that are in
    /// use already stay so. Returns how many were free.
    ///
    /// # Errors
    /// A bitmap can't be read or is damaged, or the blocks are the format's own or do not exist.
    pub fn claim_blocks(
        &self,
        first: BlockNo,
        blocks: u32,
        read: &ReadBlock<'_>,
    ) -> Result<u32, FsError> {
        if self.is_system_block(first, blocks) {
            return Err(FsError::DamagedBlock { what: "use of blocks from here on", block: first });
        }
        let mut sum = 0;
        for (group, bit, count) in self.parts(first, blocks) {
            self.load_blocks(group, read)?;
            let mut locked = self.groups[group as usize].lock();
            let (free, blocked) = locked.blocks().map_or((0, 0), |slots| slots.take(bit, count));
            locked.state.blocks_changed |= free + blocked > 0;
            self.space.claimed(free, blocked);
            drop(locked);
            if free + blocked > 0 {
                self.mark_changed(group);
            }
            sum += free + blocked;
        }
        Ok(sum)
    }

    /// Takes a run of up to `want` blocks, to which the caller has the right.
    fn find_blocks(
        &self,
        goal: BlockNo,
        want: u32,
        read: &ReadBlock<'_>,
    ) -> Result<(BlockNo, u32), FsError> {
        let (home, bit) = self.parts(goal, 1).next().map_or((0, 0), |part| (part.0, part.1));
        let available =
            |group: u32| self.groups[group as usize].available_blocks.load(Ordering::Relaxed);
        let goal_in = |group| (group == home).then_some(bit);
        let mut damage = None;
        // Near the goal, a run of the whole length, or whatever begins just there.
        let roomy = self.groups_from(home).filter(|&group| available(group) >= want);
        let near =
            core::iter::once(home).filter(|&home| available(home) > 0 && available(home) < want);
        for group in near.chain(roomy.take(GROUPS_FOR_A_RUN)) {
            let found = self.take_run(group, goal_in(group), want, want, read);
            if let Some(found) = super::unless_damaged(found, &mut damage)? {
                return Ok(found);
            }
        }
        for _ in 0..ROUNDS {
            for group in self.groups_from(home).filter(|&group| available(group) > 0) {
                let found = self.take_run(group, goal_in(group), want, 1, read);
                if let Some(found) = super::unless_damaged(found, &mut damage)? {
                    return Ok(found);
                }
            }
        }
        Err(damage.unwrap_or(FsError::NoSpace))
    }

    /// Takes a run of up to `want` blocks in a group: at `goal` if that is free, and otherwise one of
    /// `least` blocks or more.
    fn take_run(
        &self,
        group: u32,
        goal: Option<u32>,
        want: u32,
        least: u32,
        read: &ReadBlock<'_>,
    ) -> Result<Option<(BlockNo, u32)>, FsError> {
        self.load_blocks(group, read)?;
        let mut locked = self.groups[group as usize].lock();
        let from = goal.unwrap_or(0).max(locked.state.last_block);
        let Some(slots) = locked.blocks() else { return Ok(None) };
        let at_goal = goal.map(|goal| (goal, slots.run_at(goal, want)));
        let found = at_goal
            .filter(|(_, len)| *len > 0)
            .or_else(|| slots.find(from, want).filter(|(_, len)| *len >= least));
        let Some((start, len)) = found else { return Ok(None) };
        slots.take(start, len);
        locked.state.last_block = start + len;
        locked.state.blocks_changed = true;
        drop(locked);
        self.mark_changed(group);
        Ok(Some((BlockNo(self.layout.first_block(group).0 + u64::from(start)), len)))
    }

    pub(super) fn load_blocks(&self, group: u32, read: &ReadBlock<'_>) -> Result<(), FsError> {
        let group_in_memory = &self.groups[group as usize];
        let loaded = group_in_memory.load_blocks(&self.layout, group, &self.system, read);
        if let Err(FsError::DamagedBlock { .. }) = loaded {
            self.space.lost(group_in_memory.isolate_blocks());
        }
        loaded
    }
}

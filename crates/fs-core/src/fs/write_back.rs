//! Writing back: dirty pages get their blocks (delayed allocation) and are submitted.

use alloc::sync::Arc;
use alloc::vec::Vec;
use core::ops::Range;

use super::{Fs, Held};
use crate::block::{BLOCK_BYTES, Block, BlockNo, Ino};
use crate::error::FsError;
use crate::extents::{self, Extent, Run};
use crate::groups::Claim;
use crate::inode_table::{Inode, InodeState};
use crate::op::Op;
use crate::open_inode::OpenInode;
use crate::probe::{Plant, is_bug_planted};
use crate::storage::{BlockWrite, Content, GroupSeq, Placement, StreamNo, WriteGroup};

/// The runs of blocks that one operation allocates. Each may lie in another group.
const ALLOCATIONS_MAX: usize = 12;

/// The largest number of blocks of a group of data.
const GROUP_BLOCKS_MAX: usize = 64;

/// The end of a step of a write-back.
enum Step {
    /// A run of pages was submitted, or may be now: there may be more.
    Again,
    /// No page is dirty.
    Nothing,
    /// Files with held barriers must be submitted first.
    HeldFirst,
}

impl Fs {
    /// Submits the dirty pages of `range`. When it returns, they are ordered, not durable: the
    /// inode's stream and the last group are in the state of the inode.
    pub(super) fn write_back(&self, inode: &Arc<Inode>, range: Range<u32>) -> Result<(), FsError> {
        self.write_back_for(inode, range, Held::First)
    }

    /// As [`write_back`](Self::write_back), also for a thread that submits held files.
    pub(super) fn write_back_for(
        &self,
        inode: &Arc<Inode>,
        range: Range<u32>,
        held: Held,
    ) -> Result<(), FsError> {
        if inode.state.read().pages.dirty() == 0 {
            return Ok(());
        }
        loop {
            let step = || self.write_back_run(inode, range.clone(), held);
            match self.retry_for(held, step)? {
                Step::Again => {}
                Step::Nothing => return Ok(()),
                Step::HeldFirst => self.submit_held()?,
            }
        }
    }

    /// Submits the first run of dirty pages.
    fn write_back_run(
        &self,
        inode: &Arc<Inode>,
        range: Range<u32>,
        held: Held,
    ) -> Result<Step, FsError> {
        let stream = self.stream_of(inode.ino);
        self.wait_barriers(Some(stream))?;
        let mut op = self.begin_own(held)?;
        // The data was accepted: it may use any block.
        op.set_claim(Claim::WriteBack);
        let mut state = match op.lock(inode) {
            // It was deleted meanwhile.
            Err(FsError::Stale(_)) => return Ok(Step::Nothing),
            state => state?,
        };
        let Some((first, run)) = state.pages.dirty_run(range, GROUP_BLOCKS_MAX) else {
            return Ok(Step::Nothing);
        };
        // A page may have changed after a barrier that came during the wait for the lock.
        if !self.wait_locked(stream, held)? {
            return Ok(Step::HeldFirst);
        }
        if self.has_barrier(stream)
            && self.has_overwrites(inode.ino, &state, first..first + run.len() as u32)?
        {
            // A crash may leave a block in place of any group that was submitted, also without the
            // groups before it. So the order of a stream is not enough for an overwrite. In mode
            // `opimq` it is, but other streams do not follow the barrier.
            drop(state);
            drop(op);
            self.wait_pending(None)?;
            return Ok(Step::Again);
        }
        let state = &mut *state;
        let mut disk = state.disk.clone();
        let mut open = OpenInode { ino: inode.ino, disk: &mut disk };
        let reserved = state.pages.reserved_in(first..first + run.len() as u32);
        let (writes, is_changed) = self.place(&mut op, &mut open, first, &run, reserved)?;
        let pages = first..first + writes.len() as u32;
        let end = u64::from(pages.end) * BLOCK_BYTES as u64;
        let is_converted = is_changed && writes.iter().any(|w| w.placement == Placement::InPlace);
        let has_grown = end.min(disk.size) > state.written_size;
        if is_changed || has_grown && !is_bug_planted(Plant::SizeForgotten) {
            op.change_data();
        }
        state.stream = Some(stream);
        let mut stream = stream;
        if is_bug_planted(Plant::StreamPerWrite) && state.last_seq != GroupSeq(0) {
            stream = StreamNo(3 - stream.0);
        }

        let finished = op.finish(&[inode])?;
        if is_changed {
            state.log.change_range(pages.start, pages.end, finished.tid);
        }
        state.disk = disk;
        let follower = self.options.mode.keep_order().data.follower();
        let group = WriteGroup { writes, flush: false, content: Content::Data, follower };
        // After a failure the extents point at blocks that were not written, so nothing more may be
        // committed.
        let seq = self
            .storage
            .submit(stream, group)
            .map_err(|error| self.fail("writing file data", &error))?;
        if !(is_converted && is_bug_planted(Plant::ConvertedBeforeData)) {
            self.running.lock().needs_data(stream, seq);
        }
        self.submitted(state, pages, seq);
        drop(finished);
        Ok(Step::Again)
    }

    /// Whether dirty pages of a range replace data. Unwritten blocks read as zeroes until the record
    /// or the commit after the write-back is there, so a write of them replaces none.
    pub(super) fn has_overwrites(
        &self,
        ino: Ino,
        state: &InodeState,
        range: Range<u32>,
    ) -> Result<bool, FsError> {
        for page in state.pages.dirty_with_block(range) {
            let run = extents::lookup(ino, &state.disk, &self.view(), page)?;
            if matches!(run, Run::Mapped(extent) if !extent.unwritten) {
                return Ok(true);
            }
        }
        Ok(false)
    }

    /// Finds the blocks for consecutive pages, and allocates those that are missing. Returns the
    /// writes of the first pages or of all, and whether the extent tree has changed.
    fn place(
        &self,
        op: &mut Op<'_>,
        open: &mut OpenInode<'_>,
        first: u32,
        pages: &[Arc<Block>],
        mut reserved: u32,
    ) -> Result<(Vec<BlockWrite>, bool), FsError> {
        let mut is_changed = false;
        let mut writes = Vec::with_capacity(pages.len());
        // The rest of a run that lies in many pieces is for the next operation.
        while writes.len() < pages.len() && op.allocations() < ALLOCATIONS_MAX {
            let logical = first + writes.len() as u32;
            let missing = (pages.len() - writes.len()) as u32;
            let (at, len, placement) = match extents::lookup(open.ino, open.disk, op, logical)? {
                Run::Mapped(extent) if extent.unwritten => {
                    let len = extent.len.min(missing);
                    extents::mark_written(open, op, logical, len)?;
                    is_changed = true;
                    // It may have been written and zeroed by `fallocate` a moment ago, so it is not
                    // fresh. It reads as zeroes until the conversion is there, whatever is in it.
                    (extent.physical, len, Placement::InPlace)
                }
                Run::Mapped(extent) if is_bug_planted(Plant::OverwriteFresh) => {
                    (extent.physical, extent.len.min(missing), Placement::Fresh)
                }
                Run::Mapped(extent) => {
                    (extent.physical, extent.len.min(missing), Placement::InPlace)
                }
                Run::Hole { len, .. } => {
                    let want = len.min(missing);
                    let goal = self.goal(open, op, logical)?;
                    let (at, len) = op.allocate_data(goal, want, reserved.min(want))?;
                    reserved = reserved.saturating_sub(len);
                    let extent = Extent { logical, len, physical: at, unwritten: false };
                    extents::insert(open, op, extent)?;
                    is_changed = true;
                    (at, len, Placement::Fresh)
                }
            };
            let from = writes.len();
            for (index, page) in pages[from..from + len as usize].iter().enumerate() {
                let at = BlockNo(at.0 + index as u64);
                writes.push(BlockWrite { at, data: Arc::clone(page), placement });
            }
        }
        Ok((writes, is_changed))
    }

    /// Where a block of a file should lie: after the block before it, or in the group of its inode.
    pub(super) fn goal(
        &self,
        open: &OpenInode<'_>,
        op: &Op<'_>,
        logical: u32,
    ) -> Result<BlockNo, FsError> {
        if let Some(before) = logical.checked_sub(1)
            && let Run::Mapped(extent) = extents::lookup(open.ino, open.disk, op, before)?
        {
            return Ok(BlockNo(extent.physical.0 + 1));
        }
        Ok(self.data_goal(open.ino))
    }

    /// Records that pages were submitted.
    fn submitted(&self, state: &mut InodeState, pages: Range<u32>, seq: GroupSeq) {
        let end = u64::from(pages.end) * BLOCK_BYTES as u64;
        let reserved = state.pages.submitted(pages, seq);
        self.groups.unreserve(reserved);
        state.written_size = state.written_size.max(end.min(state.disk.size));
        state.last_seq = seq;
        state.settle_size();
    }

    /// The stream and the last group of an inode's data.
    pub(super) fn last_write(&self, inode: &Inode) -> Option<(StreamNo, GroupSeq)> {
        let state = inode.state.read();
        state.stream.map(|stream| (stream, state.last_seq))
    }
}

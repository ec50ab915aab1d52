//! An operation: a change of the file system that is there whole or not at all.
//!
//! Locks are taken in this order, and in debug builds the order of the inodes is checked:
//!
//! 1. the mutex of directory moves, or that of dropping pages, then the mutex of commits;
//! 2. the gate, for reading (a commit's cut takes it for writing);
//! 3. inodes, by ascending number;
//! 4. groups, shards of the cache, the running transaction, the files with pages: one at a time, for
//!    a moment.

use alloc::collections::{BTreeMap, BTreeSet};
use alloc::sync::Arc;
use alloc::vec::Vec;
use core::cell::Cell;

use crate::block::{BLOCK_BYTES, Block, BlockKind, BlockNo, Ino, MetaBlocks};
use crate::error::FsError;
use crate::extents::{self, Extent, Run};
use crate::format::inode::DiskInode;
use crate::format::layout::Layout;
use crate::fs::Fs;
use crate::groups::Claim;
use crate::inode_table::{Inode, InodeState};
use crate::probe::{Plant, is_bug_planted};
use crate::storage::{GroupSeq, StreamNo};
use crate::sync::{ReadGuard, WriteGuard};
use crate::tid::Tid;

/// An operation that is not finished. If it is dropped, it leaves nothing behind.
pub(crate) struct Op<'fs> {
    fs: &'fs Fs,
    /// The blocks of the running transaction to which the operation has the right.
    credits: usize,
    gate: Option<ReadGuard<'fs, ()>>,
    edits: BTreeMap<BlockNo, (BlockKind, Arc<Block>)>,
    allocated: Vec<(BlockNo, u32)>,
    allocated_inodes: Vec<(Ino, bool)>,
    freed_meta: Vec<BlockNo>,
    freed_data: Vec<(BlockNo, u32)>,
    freed_inodes: Vec<(Ino, bool)>,
    /// The last groups with the data of what is freed.
    last_writes: Vec<(StreamNo, GroupSeq)>,
    /// The claim to the last free blocks.
    claim: Claim,
    /// Whether blocks that the extent tree frees were written through the journal.
    frees_metadata: bool,
    /// Whether the change is needed to read the data of the inodes.
    changes_data: bool,
    /// The inode that was locked last.
    locked: Cell<Ino>,
}

/// A finished operation. Until it is dropped, no commit's cut takes place: the fields of the inodes
/// are put in their place meanwhile.
#[must_use = "the fields of inodes must change before the next cut"]
pub(crate) struct Finished<'fs> {
    /// The transaction to which the operation belongs.
    pub(crate) tid: Tid,
    _gate: ReadGuard<'fs, ()>,
}

impl<'fs> Op<'fs> {
    /// Begins an operation that has taken `credits`. It waits for a cut that takes place.
    pub(crate) fn begin(fs: &'fs Fs, credits: usize) -> Self {
        Self {
            gate: Some(fs.gate.read()),
            fs,
            credits,
            edits: BTreeMap::new(),
            allocated: Vec::new(),
            allocated_inodes: Vec::new(),
            freed_meta: Vec::new(),
            freed_data: Vec::new(),
            freed_inodes: Vec::new(),
            last_writes: Vec::new(),
            claim: Claim::User,
            frees_metadata: false,
            changes_data: false,
            locked: Cell::new(Ino(0)),
        }
    }

    /// Sets the operation's claim to the last free blocks.
    pub(crate) fn set_claim(&mut self, claim: Claim) {
        self.claim = claim;
    }

    /// Declares that the blocks of the inodes went through the journal: they are revoked when they
    /// are freed.
    pub(crate) fn free_as_metadata(&mut self, is_metadata: bool) {
        self.frees_metadata = is_metadata;
    }

    /// Declares that the change is needed to read the data of the inodes (`fdatasync`).
    pub(crate) fn change_data(&mut self) {
        self.changes_data = true;
    }

    /// Locks an inode for a change. Its number must be higher than that of all inodes that this
    /// operation has locked.
    ///
    /// # Errors
    /// [`FsError::Stale`]: the inode was deleted.
    pub(crate) fn lock<'i>(&self, inode: &'i Inode) -> Result<WriteGuard<'i, InodeState>, FsError> {
        debug_assert!(self.locked.get() < inode.ino, "inodes are locked by ascending number");
        self.locked.set(inode.ino);
        let state = inode.state.write();
        if inode.is_gone() { Err(FsError::Stale(inode.ino)) } else { Ok(state) }
    }

    /// Allocates a run of up to `want` blocks for data, near `goal`.
    pub(crate) fn allocate_data(
        &mut self,
        goal: BlockNo,
        want: u32,
        reserved: u32,
    ) -> Result<(BlockNo, u32), FsError> {
        let (first, len) = self.fs.allocate_blocks(goal, want, self.claim, reserved)?;
        self.allocated.push((first, len));
        Ok((first, len))
    }

    /// Allocates an inode.
    ///
    /// # Errors
    /// Also if a file is in memory that has the number: then the bitmap is damaged.
    pub(crate) fn allocate_inode(&mut self, parent: Ino, is_dir: bool) -> Result<Ino, FsError> {
        let ino = self.fs.allocate_inode(parent, is_dir)?;
        self.allocated_inodes.push((ino, is_dir));
        if self.fs.inodes.get(ino).is_ok_and(|inode| !inode.is_gone()) {
            return Err(self.fs.groups.isolate_inodes_of(ino));
        }
        Ok(ino)
    }

    /// Marks an inode as in use that a file-level record has.
    pub(crate) fn claim_inode(&mut self, ino: Ino, is_dir: bool) -> Result<(), FsError> {
        let read = |at| self.fs.read_meta(at, BlockKind::Plain);
        if !self.fs.groups.claim_inode(ino, is_dir, &read)? {
            return Err(FsError::DamagedInode { what: "file-level record (inode in use)", ino });
        }
        self.allocated_inodes.push((ino, is_dir));
        Ok(())
    }

    /// Marks the blocks of an extent as in use that a file-level record has, unless the file has
    /// them there already.
    pub(crate) fn claim_extent(
        &mut self,
        ino: Ino,
        disk: &DiskInode,
        extent: Extent,
    ) -> Result<(), FsError> {
        let mut done = 0;
        while done < extent.len {
            let run = extents::lookup(ino, disk, self, extent.logical + done)?;
            let at = BlockNo(extent.physical.0 + u64::from(done));
            let left = extent.len - done;
            let (len, is_there) = match run {
                Run::Mapped(mapped) => (mapped.len.min(left), mapped.physical == at),
                Run::Hole { len, .. } => (len.min(left), false),
            };
            if !is_there {
                let read = |at| self.fs.read_meta(at, BlockKind::Plain);
                if self.fs.groups.claim_blocks(at, len, &read)? != len {
                    let what = "file-level record (block in use)";
                    return Err(FsError::DamagedInode { what, ino });
                }
                self.allocated.push((at, len));
            }
            done += len;
        }
        Ok(())
    }

    /// Frees an inode.
    pub(crate) fn free_inode(&mut self, ino: Ino, is_dir: bool) {
        self.freed_inodes.push((ino, is_dir));
    }

    /// The blocks that this operation frees were written by this inode's groups.
    pub(crate) fn was_written(&mut self, state: &InodeState) {
        if let Some(stream) = state.stream {
            self.last_writes.push((stream, state.last_seq));
        }
    }

    /// Finishes the operation: its edits become visible, and belong to the running transaction. The
    /// fields of `inodes` must be put in their place before the result is dropped.
    ///
    /// # Errors
    /// A bitmap can't be read, or the operation does not fit into a transaction; nothing has changed.
    pub(crate) fn finish(mut self, inodes: &[&Arc<Inode>]) -> Result<Finished<'fs>, FsError> {
        let fs = self.fs;
        let needed = self.edits.len() + 2 * self.groups_changed();
        let missing = needed.saturating_sub(self.credits);
        if missing > 0 {
            // Such as an insertion into a file with more than 100,000 extents.
            if needed > fs.operation_max() || !fs.take_credits(missing, usize::MAX) {
                return Err(FsError::NotSupported);
            }
            self.credits += missing;
        }
        let read = |at| fs.read_meta(at, BlockKind::Plain);
        for &at in &self.freed_meta {
            fs.groups.prepare_free_blocks(at, 1, &read)?;
        }
        for &(first, blocks) in &self.freed_data {
            fs.groups.prepare_free_blocks(first, blocks, &read)?;
        }
        for &(ino, _) in &self.freed_inodes {
            fs.groups.prepare_free_inode(ino, &read)?;
        }

        let mut running = fs.running.lock();
        let tid = running.tid;
        for (at, (kind, data)) in core::mem::take(&mut self.edits) {
            fs.cache.put(at, kind, data, tid);
            running.blocks.insert(at, kind);
            running.revoked.remove(&at);
        }
        for at in core::mem::take(&mut self.freed_meta) {
            fs.cache.remove(at);
            running.blocks.remove(&at);
            if !is_bug_planted(Plant::RevokeForgotten) {
                running.revoked.insert(at);
            }
            fs.groups.free_blocks(at, 1, &mut running.freed);
        }
        for (first, blocks) in core::mem::take(&mut self.freed_data) {
            fs.groups.free_blocks(first, blocks, &mut running.freed);
        }
        for (ino, is_dir) in core::mem::take(&mut self.freed_inodes) {
            fs.groups.free_inode(ino, is_dir, &mut running.freed);
        }
        for (stream, seq) in core::mem::take(&mut self.last_writes) {
            running.was_written(stream, seq);
        }
        for &inode in inodes {
            inode.mark_changed(tid, self.changes_data);
            running.inodes.insert(inode.ino, Arc::clone(inode));
            running.table_blocks.insert(fs.groups.inode_place(inode.ino).block);
        }
        if is_bug_planted(Plant::ReuseBeforeCommit) {
            fs.groups.reuse(core::mem::take(&mut running.freed));
        }
        self.allocated.clear();
        self.allocated_inodes.clear();
        let gate = self.gate.take();
        let gate = gate.expect("only this takes the gate, and consumes the operation");
        Ok(Finished { tid, _gate: gate })
    }

    /// The groups of blocks that the operation allocates or frees: each has a bitmap and a descriptor.
    fn groups_changed(&self) -> usize {
        let layout = &self.fs.layout;
        let freed_meta = self.freed_meta.iter().map(|&at| (at, 1));
        let runs = self.allocated.iter().chain(&self.freed_data).copied().chain(freed_meta);
        let mut groups = BTreeSet::new();
        for (first, blocks) in runs {
            let last = BlockNo(first.0 + u64::from(blocks.saturating_sub(1)));
            groups.extend(layout.group_of_block(first)..=layout.group_of_block(last));
        }
        groups.len()
    }

    /// How many runs of blocks it has allocated.
    pub(crate) fn allocations(&self) -> usize {
        self.allocated.len()
    }

    /// The number of the transaction to which the operation will belong.
    pub(crate) fn tid(&self) -> Tid {
        self.fs.running.lock().tid
    }
}

impl Drop for Op<'_> {
    fn drop(&mut self) {
        self.fs.credits.end(self.credits);
        for &(first, blocks) in &self.allocated {
            self.fs.groups.unallocate_blocks(first, blocks);
        }
        for &(ino, is_dir) in &self.allocated_inodes {
            self.fs.groups.unallocate_inode(ino, is_dir);
        }
    }
}

impl MetaBlocks for Op<'_> {
    fn layout(&self) -> &Layout {
        &self.fs.layout
    }

    fn get(&self, at: BlockNo, kind: BlockKind) -> Result<Arc<Block>, FsError> {
        match self.edits.get(&at) {
            Some((had, data)) if *had == kind => Ok(Arc::clone(data)),
            Some(_) => {
                Err(FsError::DamagedBlock { what: "pointer (two uses of one block)", block: at })
            }
            None => self.fs.read_meta(at, kind),
        }
    }

    fn edit(&mut self, at: BlockNo, kind: BlockKind) -> Result<&mut Block, FsError> {
        if !self.edits.contains_key(&at) {
            let data = self.fs.read_meta(at, kind)?;
            self.edits.insert(at, (kind, data));
        }
        match self.edits.get_mut(&at) {
            Some((had, data)) if *had == kind => Ok(Arc::make_mut(data)),
            _ => Err(FsError::DamagedBlock { what: "pointer (two uses of one block)", block: at }),
        }
    }

    fn create(&mut self, at: BlockNo, kind: BlockKind) -> Result<&mut Block, FsError> {
        self.fs.check_block(at)?;
        self.edits.insert(at, (kind, Arc::new([0; BLOCK_BYTES])));
        self.edit(at, kind)
    }

    fn allocate(&mut self, goal: BlockNo) -> Result<BlockNo, FsError> {
        let (at, len) = self.fs.allocate_blocks(goal, 1, self.claim, 0)?;
        debug_assert_eq!(len, 1);
        self.allocated.push((at, len));
        Ok(at)
    }

    fn free_meta(&mut self, at: BlockNo) {
        self.edits.remove(&at);
        self.freed_meta.push(at);
    }

    fn free_data(&mut self, first: BlockNo, blocks: u32) {
        if self.frees_metadata {
            (0..u64::from(blocks)).for_each(|index| self.free_meta(BlockNo(first.0 + index)));
        } else {
            self.freed_data.push((first, blocks));
        }
    }
}

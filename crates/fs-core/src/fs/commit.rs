//! The main commit: cut, data, journal, checkpoint. It has two halves. This is the first one, which
//! submits; [`retirement`](super::retirement) is the second one, which waits.
//!
//! 1. *Cut*: the gate is closed, all changes since the last cut are rendered into blocks, and the
//!    next transaction begins.
//! 2. The data that the transaction refers to is *durable*. It is not enough that the drive has
//!    completed it: recovery zeroes fresh blocks beyond a stream's prefix. (In mode `barrier` it is
//!    submitted on the same stream, and in mode `opimq` on streams that the main stream follows: that
//!    is enough there.)
//! 3. The journal's blocks are submitted, and the commit block after them.
//! 4. When the commit is durable, it is *retired*: its blocks may be written home (a *checkpoint*),
//!    and what the transaction freed may be used again as soon as the last writes to it are
//!    released.
//!
//! In modes `barrier` and `opimq` the next commit may begin after step 3, so several transactions are in flight.
//! A block may be in all of them, each time with another content, and changing again in the running
//! one: no content of a block is ever changed in its place ([`cache`](crate::cache)), so each commit
//! keeps its own without a copy.

use alloc::collections::BTreeMap;
use alloc::string::ToString;
use alloc::sync::Arc;
use alloc::vec::Vec;

use super::journal_mode::{CommitBlock, Commits, DataState};
use super::retirement::{CommitState, Submitted};
use super::{Fs, Held, MAIN_STREAM};
use crate::block::{Block, BlockKind, BlockNo};
use crate::error::FsError;
use crate::format::checksum;
use crate::format::inode::INODE_BYTES;
use crate::groups::{FreedBatch, InodePlace};
use crate::inode_table::InodeState;
use crate::journal::Commit;
use crate::probe::{Plant, is_bug_planted};
use crate::running::Running;
use crate::storage::{BlockWrite, Content, GroupSeq, Placement, StreamNo, WriteGroup};
use crate::sync::atomic::Ordering;
use crate::tid::Tid;

/// The largest number of blocks of a group.
const GROUP_BLOCKS_MAX: usize = 64;

/// A transaction after its cut.
#[derive(Default)]
struct Cut {
    tid: Tid,
    blocks: Vec<(BlockNo, Arc<Block>)>,
    revoked: Vec<BlockNo>,
    freed: FreedBatch,
    last_writes: BTreeMap<StreamNo, GroupSeq>,
    data: BTreeMap<StreamNo, GroupSeq>,
}

/// Whether a commit asks for durability when it is submitted.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Wish {
    /// Order is enough: it becomes durable when something waits for that.
    Ordered,
    /// Its caller waits until it is durable.
    Durable,
}

/// The end of the first half of a commit.
enum Committed {
    /// Its commit block is submitted. If there is one commit at a time, it is durable.
    Submitted,
    /// There was nothing to commit.
    Nothing,
    /// Files with held barriers must be submitted first.
    HeldFirst,
}

impl Fs {
    /// Commits all finished operations, and returns when they are durable.
    pub(super) fn commit_now(&self) -> Result<(), FsError> {
        let tid = self.running.lock().tid;
        self.commit_up_to(tid)
    }

    /// Ends the running transaction, also for a thread that submits held files. What follows is
    /// ordered behind it.
    pub(super) fn commit_running(&self, held: Held) -> Result<(), FsError> {
        let tid = self.running.lock().tid;
        match held {
            Held::First => self.submit_up_to(tid, Wish::Ordered),
            Held::Submitting => self.submit_for(tid, Wish::Ordered, held).map(drop),
        }
    }

    /// Returns when transaction `tid` is durable, and commits it if it is still running.
    pub(super) fn commit_up_to(&self, tid: Tid) -> Result<(), FsError> {
        self.submit_up_to(tid, Wish::Durable)?;
        self.make_durable(tid)
    }

    /// Returns when the commit block of transaction `tid` is submitted, and submits it if it is
    /// still running.
    pub(super) fn submit_up_to(&self, tid: Tid, wish: Wish) -> Result<(), FsError> {
        loop {
            // Their barriers come before the commit.
            self.submit_held()?;
            match self.submit_for(tid, wish, Held::First)? {
                Committed::Submitted | Committed::Nothing => return Ok(()),
                Committed::HeldFirst => {}
            }
        }
    }

    fn submit_for(&self, tid: Tid, wish: Wish, held: Held) -> Result<Committed, FsError> {
        let mut committing = self.committing.lock();
        // Another thread may have committed it during the wait for the mutex.
        while committing.last_submitted().unwrap_or(self.durable()) < tid {
            self.check_writable()?;
            match self.commit(&mut committing, wish, held)? {
                Committed::Submitted => {}
                end => return Ok(end),
            }
        }
        Ok(Committed::Submitted)
    }

    /// Commits the running transaction.
    fn commit(
        &self,
        state: &mut CommitState,
        wish: Wish,
        held: Held,
    ) -> Result<Committed, FsError> {
        let cut = self.cut(held).map_err(|error| self.fail("preparing a commit", &error))?;
        let Some(cut) = cut else { return Ok(Committed::HeldFirst) };
        self.wait_barriers(None)?;
        let order = self.options.mode.keep_order();
        for (&stream, &seq) in &cut.data {
            if is_bug_planted(Plant::CommitBeforeData) {
                break;
            }
            let waited = match order.before_journal {
                DataState::Submitted => Ok(()),
                DataState::Complete => self.storage.wait_complete(stream, seq),
                DataState::Durable if is_bug_planted(Plant::CommitWhenComplete) => {
                    self.storage.wait_complete(stream, seq)
                }
                DataState::Durable => self.storage.wait_durable(stream, seq),
            };
            waited.map_err(|error| self.fail("writing file data", &error))?;
        }
        if cut.blocks.is_empty() {
            return Ok(Committed::Nothing);
        }
        let commit_block = self
            .write_transaction(state, &cut, wish)
            .map_err(|error| self.fail("writing the journal", &error))?;
        self.stat.commits.fetch_add(1, Ordering::Relaxed);
        let Cut { tid, freed, revoked, mut last_writes, data, .. } = cut;
        if !revoked.is_empty() {
            // The main stream may have written the freed blocks home, at the latest before this
            // commit. With engine `horae` such a write may still be redirected, and would land on
            // what another stream has written there meanwhile (trap T15).
            let last_home = last_writes.entry(MAIN_STREAM).or_default();
            *last_home = commit_block.max(*last_home);
        }
        self.on_submitted(state, Submitted { tid, commit_block, freed, last_writes, data })?;
        Ok(Committed::Submitted)
    }

    /// Submits the blocks of a transaction. Returns the group of its commit block.
    fn write_transaction(
        &self,
        state: &mut CommitState,
        cut: &Cut,
        wish: Wish,
    ) -> Result<GroupSeq, FsError> {
        let has_space = || {
            let has = self.journal.lock().has_space(cut.blocks.len(), cut.revoked.len());
            has.map_err(|error| FsError::Io(error.to_string()))
        };
        while !has_space()? {
            // Only blocks of durable transactions go home.
            self.await_submitted(state)?;
            self.checkpoint(usize::MAX)?;
        }
        let commit = self.journal.lock().encode_commit(
            cut.tid,
            &cut.blocks,
            &cut.revoked,
            self.now_seconds.load(Ordering::Relaxed),
        );
        let Commit { start, mut body, commit } =
            commit.map_err(|error| FsError::Io(error.to_string()))?;
        let order = self.options.mode.keep_order();
        // The journal's superblock must have the beginning of the log before a commit is in it.
        match (start, order.commits) {
            (Some(start), Commits::One) => self.write_main([start])?,
            (Some(start), Commits::Several) => body.insert(0, start),
            (None, _) => {}
        }
        if is_bug_planted(Plant::HomeBeforeCommitBlock) {
            self.submit_main(home(cut), Content::Home)?;
        }
        if is_bug_planted(Plant::CommitBlockWithOthers) {
            body.push(commit);
            return self.submit_main(body, Content::Journal);
        }
        let journal = self.submit_main(body, Content::Journal)?;
        if order.commit_block == CommitBlock::AfterFlush {
            // As jbd2: wait for the blocks, FLUSH, and write the commit block with FUA.
            self.storage.wait_complete(MAIN_STREAM, journal)?;
            if !is_bug_planted(Plant::CommitBlockBeforeFlush) {
                self.storage.wait_durable(MAIN_STREAM, journal)?;
            }
        }
        let flush = wish == Wish::Durable || order.commits == Commits::One;
        let content = Content::Commit;
        let commit = WriteGroup { writes: alloc::vec![commit], flush, content, follower: None };
        let last = self.storage.submit(MAIN_STREAM, commit)?;
        if is_bug_planted(Plant::CheckpointBeforeCommit) {
            self.submit_main(home(cut), Content::Home)?;
        }
        Ok(last)
    }

    /// Submits writes on the main stream. They become durable when something waits for that. Returns
    /// the last group.
    fn submit_main(
        &self,
        writes: impl IntoIterator<Item = BlockWrite>,
        content: Content,
    ) -> Result<GroupSeq, FsError> {
        let mut writes = writes.into_iter().peekable();
        let mut seq = GroupSeq(0);
        while writes.peek().is_some() {
            let group = writes.by_ref().take(GROUP_BLOCKS_MAX).collect();
            let group = WriteGroup { writes: group, flush: false, content, follower: None };
            seq = self.storage.submit(MAIN_STREAM, group)?;
        }
        Ok(seq)
    }

    /// Writes blocks on the main stream, and waits until they are durable. The main stream itself may
    /// then write them in place again; another one only when they are released.
    pub(super) fn write_main(
        &self,
        writes: impl IntoIterator<Item = BlockWrite>,
    ) -> Result<(), FsError> {
        let mut writes: Vec<BlockWrite> = writes.into_iter().collect();
        let last = writes.split_off(writes.len() - writes.len().min(GROUP_BLOCKS_MAX));
        self.submit_main(writes, Content::Home)?;
        let content = Content::Home;
        let last = WriteGroup { writes: last, flush: true, content, follower: None };
        let last = self.storage.submit(MAIN_STREAM, last)?;
        Ok(self.storage.wait_durable(MAIN_STREAM, last)?)
    }

    /// Writes up to `max` committed blocks home, and moves the tail of the journal. Commits must
    /// not run meanwhile.
    pub(super) fn checkpoint(&self, max: usize) -> Result<(), FsError> {
        let plan = self.journal.lock().plan_checkpoint(max);
        if !plan.writes.is_empty() {
            self.stat.checkpoint_blocks.fetch_add(plan.writes.len() as u64, Ordering::Relaxed);
            if is_bug_planted(Plant::TailBeforeCheckpoint) {
                self.submit_main(plan.writes.iter().cloned(), Content::Home)?;
            } else if is_bug_planted(Plant::CheckpointFresh) {
                let placement = Placement::Fresh;
                let fresh = plan.writes.iter().map(|w| BlockWrite { placement, ..w.clone() });
                self.write_main(fresh)?;
            } else {
                self.write_main(plan.writes.iter().cloned())?;
            }
        }
        self.journal.lock().on_checkpoint_released(plan);
        let tail = self.journal.lock().tail_update();
        if let Some(write) = tail {
            self.write_main([write])?;
            self.journal.lock().on_tail_released();
        }
        Ok(())
    }

    /// Writes everything home.
    pub(super) fn checkpoint_all(&self) -> Result<(), FsError> {
        let _committing = self.committing.lock();
        self.checkpoint(usize::MAX)
    }

    /// Writes blocks home if the log is more than half full.
    pub(super) fn checkpoint_if_due(&self) -> Result<(), FsError> {
        let _committing = self.committing.lock();
        let is_due = {
            let journal = self.journal.lock();
            journal.used() > journal.capacity() / 2
        };
        // After an unmount the log is another one's.
        if is_due && !self.is_read_only() { self.checkpoint(usize::MAX) } else { Ok(()) }
    }

    /// Ends the running transaction, and begins the next one. Operations wait meanwhile. `None`: a
    /// file is held, which must be submitted first. Changes after its barrier may be in the
    /// transaction.
    fn cut(&self, held: Held) -> Result<Option<Cut>, FsError> {
        let _gate = self.gate.write();
        if held == Held::First && !self.barriers.lock().is_nothing_held() {
            return Ok(None);
        }
        let running = {
            let mut running = self.running.lock();
            if running.is_empty() {
                // The transactions in the log follow one another without a gap, so the number is
                // used again. Data that was submitted changes its inode, so there is none.
                debug_assert!(running.data.is_empty(), "data belongs to a transaction");
                return Ok(Some(Cut { tid: running.tid, ..Cut::default() }));
            }
            let next = running.tid.next();
            core::mem::replace(&mut *running, Running::new(next))
        };
        let Running { tid, mut blocks, inodes, revoked, freed, last_writes, data, orphans, .. } =
            running;
        for inode in inodes.values() {
            let at = self.render_inode(inode.ino, &inode.state.read(), tid)?;
            blocks.insert(at, BlockKind::Plain);
        }
        for &ino in orphans.iter().filter(|ino| !inodes.contains_key(ino)) {
            let at = match self.inodes.get(ino) {
                Ok(inode) => self.render_inode(ino, &inode.state.read(), tid)?,
                Err(_) if self.orphans.lock().contains(ino) => {
                    self.render_inode(ino, &InodeState::new(self.read_inode(ino)?), tid)?
                }
                // It was in the list although it is free.
                Err(_) => continue,
            };
            blocks.insert(at, BlockKind::Plain);
        }
        for (at, block) in self.groups.render() {
            self.cache.put(at, BlockKind::Plain, Arc::from(block), tid);
            blocks.insert(at, BlockKind::Plain);
        }
        blocks.insert(self.render_superblock(tid)?, BlockKind::Plain);
        let sealed = blocks.keys().map(|&at| {
            let seal = |kind, block: &mut Block| checksum::seal(&self.layout, at, kind, block);
            let sealed = self.cache.change(at, tid, seal);
            let data = sealed.expect("the blocks of the running transaction stay in the cache");
            (at, data)
        });
        let blocks = sealed.collect();
        let revoked = revoked.into_iter().collect();
        Ok(Some(Cut { tid, blocks, revoked, freed, last_writes, data }))
    }

    /// Renders an inode into its block of the inode table.
    fn render_inode(
        &self,
        ino: crate::block::Ino,
        state: &crate::inode_table::InodeState,
        tid: Tid,
    ) -> Result<BlockNo, FsError> {
        let (InodePlace { block: at, offset, .. }, read) = self.read_table_block(ino)?;
        let mut disk = state.disk.clone();
        if disk.is_regular() {
            disk.size = disk.size.min(state.written_size);
        }
        if let Some(next) = self.orphans.lock().next(ino) {
            disk.dtime = next.0;
        }
        self.cache.change_read(at, BlockKind::Plain, read, tid, |block| {
            let (inodes, _) = block.as_chunks_mut::<INODE_BYTES>();
            disk.encode(&mut inodes[offset / INODE_BYTES], &self.layout, ino);
        });
        Ok(at)
    }

    /// Renders the superblock into block 0.
    fn render_superblock(&self, tid: Tid) -> Result<BlockNo, FsError> {
        let at = BlockNo(0);
        let read = self.read_meta(at, BlockKind::Plain)?;
        let mut superblock = {
            let mut superblock = self.superblock.lock();
            let counts = self.groups.counts();
            superblock.set_free_blocks(counts.free_blocks);
            superblock.set_free_inodes(counts.free_inodes);
            superblock.set_last_orphan(self.orphans.lock().first().0);
            superblock.clone()
        };
        self.cache.change_read(at, BlockKind::Plain, read, tid, |block| {
            superblock.encode(block, self.layout.crc32c);
        });
        Ok(at)
    }
}

/// The writes of a transaction's blocks home.
fn home(cut: &Cut) -> impl Iterator<Item = BlockWrite> {
    let placement = Placement::InPlace;
    cut.blocks.iter().cloned().map(move |(at, data)| BlockWrite { at, data, placement })
}

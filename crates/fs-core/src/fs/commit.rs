//! The main commit: cut, data, journal, checkpoint, reuse.
//!
//! 1. *Cut*: the gate is closed, all changes since the last cut are rendered into blocks, and the
//!    next transaction begins.
//! 2. The data that the transaction refers to is *durable*. It is not enough that the drive has
//!    completed it: recovery zeroes fresh blocks beyond a stream's prefix.
//! 3. The journal's blocks are submitted, and the commit block after them.
//! 4. When the commit is durable, its blocks may be written home (a *checkpoint*), and what the
//!    transaction freed may be used again as soon as the last writes to it are released.

use alloc::collections::BTreeMap;
use alloc::string::ToString;
use alloc::sync::Arc;
use alloc::vec::Vec;

use super::journal_mode::{CommitBlock, DataState};
use super::{Fs, Held, MAIN_STREAM};
use crate::block::{Block, BlockKind, BlockNo};
use crate::error::FsError;
use crate::format::checksum;
use crate::format::inode::INODE_BYTES;
use crate::groups::{FreedBatch, InodePlace};
use crate::inode_table::InodeState;
use crate::probe::{Plant, is_bug_planted};
use crate::running::Running;
use crate::storage::{BlockWrite, Content, GroupSeq, Placement, StreamNo, WriteGroup};
use crate::sync::atomic::Ordering;
use crate::tid::Tid;

/// The largest number of blocks of a group.
const GROUP_BLOCKS_MAX: usize = 64;

/// The state of commits, of which there is one at a time.
#[derive(Debug, Default)]
pub(super) struct CommitState {
    /// The blocks and inodes that durable commits have freed, and the groups that must be released
    /// before these are used again.
    freed: Vec<(FreedBatch, BTreeMap<StreamNo, GroupSeq>)>,
}

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

/// The end of a commit.
enum Committed {
    Durable,
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

    /// As [`commit_now`](Self::commit_now), also for a thread that submits held files.
    pub(super) fn commit_running(&self, held: Held) -> Result<(), FsError> {
        let tid = self.running.lock().tid;
        match held {
            Held::First => self.commit_up_to(tid),
            Held::Submitting => self.commit_and_wait(tid, held).map(drop),
        }
    }

    /// Returns when transaction `tid` is durable, and commits it if it is still running.
    pub(super) fn commit_up_to(&self, tid: Tid) -> Result<(), FsError> {
        loop {
            // Their barriers come before the commit.
            self.submit_held()?;
            if self.commit_and_wait(tid, Held::First)? {
                return Ok(());
            }
        }
    }

    /// Whether the transaction is durable, or empty; else files are held, which must be submitted
    /// first.
    fn commit_and_wait(&self, tid: Tid, held: Held) -> Result<bool, FsError> {
        let mut committing = self.committing.lock();
        // Another thread may have committed it during the wait for the mutex.
        while self.durable() < tid {
            self.check_writable()?;
            match self.commit(&mut committing, held)? {
                Committed::Durable => {}
                Committed::Nothing => break,
                Committed::HeldFirst => return Ok(false),
            }
        }
        Ok(true)
    }

    /// Commits the running transaction.
    fn commit(&self, state: &mut CommitState, held: Held) -> Result<Committed, FsError> {
        let cut = self.cut(held).map_err(|error| self.fail("preparing a commit", &error))?;
        let Some(mut cut) = cut else { return Ok(Committed::HeldFirst) };
        self.wait_barriers(None)?;
        let order = self.options.mode.keep_order();
        for (&stream, &seq) in &cut.data {
            if is_bug_planted(Plant::CommitBeforeData) {
                break;
            }
            let waited = match order.before_journal {
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
        let last = self.write_transaction(&cut);
        let last = last.map_err(|error| self.fail("writing the journal", &error))?;
        self.durable.store(cut.tid.0, Ordering::Release);
        self.stat.commits.fetch_add(1, Ordering::Relaxed);
        // Records of earlier transactions don't count any more, so a crash may leave any content in
        // their blocks.
        for (area, stream) in self.areas.iter().zip(1..) {
            let mut area = area.lock();
            area.on_commit_released(cut.tid);
            self.stat.note_area(StreamNo(stream), &area);
        }
        if !cut.revoked.is_empty() {
            // The main stream may have written the freed blocks home, at the latest before this
            // commit. With engine `horae` such a write may still be redirected, and would land on
            // what another stream has written there meanwhile (trap T15).
            let last_home = cut.last_writes.entry(MAIN_STREAM).or_default();
            *last_home = last.max(*last_home);
        }
        state.freed.push((cut.freed, cut.last_writes));
        self.reuse(state, false)?;
        Ok(Committed::Durable)
    }

    /// Writes a transaction into the log, and waits until it is durable. Returns its last group.
    fn write_transaction(&self, cut: &Cut) -> Result<GroupSeq, FsError> {
        let has_space = || {
            let has = self.journal.lock().has_space(cut.blocks.len(), cut.revoked.len());
            has.map_err(|error| FsError::Io(error.to_string()))
        };
        while !has_space()? {
            self.checkpoint(usize::MAX)?;
        }
        let commit = self.journal.lock().encode_commit(
            cut.tid,
            &cut.blocks,
            &cut.revoked,
            self.now_seconds.load(Ordering::Relaxed),
        );
        let commit = commit.map_err(|error| FsError::Io(error.to_string()))?;
        if let Some(start) = commit.start {
            // The journal's superblock must have the beginning of the log before a commit is in it.
            self.write_main([start])?;
        }
        let last = match self.options.mode.keep_order().commit_block {
            CommitBlock::NextGroup => {
                let all = commit.body.into_iter().chain([commit.commit]);
                self.submit_main(all, 1, Content::Journal, Content::Commit)?
            }
            CommitBlock::AfterFlush => {
                // As jbd2: wait for the blocks, FLUSH, and write the commit block with FUA.
                let body = self.submit_main(commit.body, 0, Content::Journal, Content::Commit)?;
                self.storage.wait_complete(MAIN_STREAM, body)?;
                if !is_bug_planted(Plant::CommitBlockBeforeFlush) {
                    self.storage.wait_durable(MAIN_STREAM, body)?;
                }
                self.submit_main([commit.commit], 1, Content::Journal, Content::Commit)?
            }
        };
        if is_bug_planted(Plant::CheckpointBeforeCommit) {
            let home = cut.blocks.iter().cloned();
            let placement = Placement::InPlace;
            let home = home.map(|(at, data)| BlockWrite { at, data, placement });
            self.submit_main(home, 0, Content::Home, Content::Home)?;
        }
        self.storage.wait_durable(MAIN_STREAM, last)?;
        self.journal.lock().on_commit_durable(cut.tid);
        Ok(last)
    }

    /// Submits writes on the main stream. The last `apart` of them, if any, are a group of their
    /// own, which asks for durability: their content is `last_content`. Returns the last group.
    fn submit_main(
        &self,
        writes: impl IntoIterator<Item = BlockWrite>,
        apart: usize,
        content: Content,
        last_content: Content,
    ) -> Result<GroupSeq, FsError> {
        let mut writes: Vec<BlockWrite> = writes.into_iter().collect();
        let last = writes.split_off(writes.len() - apart);
        let mut writes = writes.into_iter().peekable();
        let mut seq = GroupSeq(0);
        while writes.peek().is_some() {
            let group = writes.by_ref().take(GROUP_BLOCKS_MAX).collect();
            let group = WriteGroup { writes: group, flush: false, content };
            seq = self.storage.submit(MAIN_STREAM, group)?;
        }
        if last.is_empty() {
            return Ok(seq);
        }
        let last = WriteGroup { writes: last, flush: true, content: last_content };
        Ok(self.storage.submit(MAIN_STREAM, last)?)
    }

    /// Writes blocks on the main stream, and waits until they are durable. The main stream itself may
    /// then write them in place again; another one only when they are released.
    pub(super) fn write_main(
        &self,
        writes: impl IntoIterator<Item = BlockWrite>,
    ) -> Result<(), FsError> {
        let writes: Vec<BlockWrite> = writes.into_iter().collect();
        let apart = writes.len().min(GROUP_BLOCKS_MAX);
        let last = self.submit_main(writes, apart, Content::Home, Content::Home)?;
        Ok(self.storage.wait_durable(MAIN_STREAM, last)?)
    }

    /// Writes up to `max` committed blocks home, and moves the tail of the journal. Commits must
    /// not run meanwhile.
    pub(super) fn checkpoint(&self, max: usize) -> Result<(), FsError> {
        let plan = self.journal.lock().plan_checkpoint(max);
        if !plan.writes.is_empty() {
            self.stat.checkpoint_blocks.fetch_add(plan.writes.len() as u64, Ordering::Relaxed);
            if is_bug_planted(Plant::TailBeforeCheckpoint) {
                self.submit_main(plan.writes.iter().cloned(), 0, Content::Home, Content::Home)?;
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

    /// Lets freed blocks and inodes be used again, as far as the last writes to them are released.
    /// With `wait` all of them.
    fn reuse(&self, state: &mut CommitState, wait: bool) -> Result<(), FsError> {
        let mut kept = Vec::new();
        for (batch, last_writes) in core::mem::take(&mut state.freed) {
            let mut is_released = true;
            for (&stream, &seq) in &last_writes {
                let has_released = || {
                    let marks = self.storage.marks(stream);
                    marks.released >= seq
                        || is_bug_planted(Plant::ReuseBeforeReleased) && marks.durable >= seq
                };
                if !has_released() && wait {
                    let waited = self.storage.wait_released(stream, seq);
                    waited.map_err(|error| self.fail("writing file data", &error))?;
                }
                is_released &= has_released();
            }
            if is_released {
                self.groups.reuse(batch);
                self.reuses.fetch_add(1, Ordering::Release);
            } else {
                kept.push((batch, last_writes));
            }
        }
        state.freed = kept;
        Ok(())
    }

    /// Waits until all that durable commits have freed may be used again.
    pub(super) fn reuse_when_released(&self) -> Result<(), FsError> {
        self.reuse(&mut self.committing.lock(), true)
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
            // The transactions in the log follow one another without a gap.
            let is_empty = running.is_empty();
            let next = if is_empty { running.tid } else { running.tid.next() };
            core::mem::replace(&mut *running, Running::new(next))
        };
        if running.is_empty() {
            let Running { tid, data, .. } = running;
            return Ok(Some(Cut { tid, data, ..Cut::default() }));
        }
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

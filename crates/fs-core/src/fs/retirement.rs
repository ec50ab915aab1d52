//! The second half of a main commit: it becomes durable, and is *retired*. Then its blocks may be
//! written home, and what it has freed may be used again.
//!
//! With one commit at a time the committing thread does it at once. In modes `barrier` and `opimq` the thread that
//! needs durability does it, without the mutex of commits while it waits: an `fsync`, a commit that
//! finds the log full, a call that finds no space, the background. A FLUSH retires all commits whose
//! commit blocks it covers.

use alloc::collections::{BTreeMap, VecDeque};
use alloc::vec::Vec;

use super::journal_mode::{Commits, DataStreams};
use super::{Fs, MAIN_STREAM};
use crate::error::FsError;
use crate::groups::FreedBatch;
use crate::probe::{Plant, is_bug_planted};
use crate::storage::{GroupSeq, StreamNo};
use crate::sync::atomic::Ordering;
use crate::tid::Tid;

/// The state of commits, of which one is submitted at a time.
#[derive(Debug, Default)]
pub(super) struct CommitState {
    /// The commits that are submitted and not retired, the oldest first.
    submitted: VecDeque<Submitted>,
    /// The blocks and inodes that durable commits have freed, and the groups that must be released
    /// before these are used again.
    freed: Vec<(FreedBatch, BTreeMap<StreamNo, GroupSeq>)>,
}

impl CommitState {
    /// The last transaction that is submitted, if it is not retired.
    pub(super) fn last_submitted(&self) -> Option<Tid> {
        self.submitted.back().map(|commit| commit.tid)
    }

    /// The group of the last commit block, if its commit is not retired.
    pub(super) fn last_commit_block(&self) -> Option<GroupSeq> {
        self.submitted.back().map(|commit| commit.commit_block)
    }
}

/// A commit whose commit block is submitted.
#[derive(Debug)]
pub(super) struct Submitted {
    pub(super) tid: Tid,
    /// The group of its commit block.
    pub(super) commit_block: GroupSeq,
    pub(super) freed: FreedBatch,
    pub(super) last_writes: BTreeMap<StreamNo, GroupSeq>,
    /// The last groups of data before it.
    pub(super) data: BTreeMap<StreamNo, GroupSeq>,
}

impl Fs {
    /// A commit block was submitted. With one commit at a time it returns when that is durable.
    pub(super) fn on_submitted(
        &self,
        state: &mut CommitState,
        commit: Submitted,
    ) -> Result<(), FsError> {
        let commit_block = commit.commit_block;
        state.submitted.push_back(commit);
        match self.options.mode.keep_order().commits {
            Commits::One => self.await_submitted(state),
            Commits::Several if is_bug_planted(Plant::RetiredBeforeDurable) => {
                self.retire(state, commit_block)
            }
            Commits::Several => Ok(()),
        }
    }

    /// Waits until all submitted commits are durable, and retires them. No other is submitted
    /// meanwhile.
    pub(super) fn await_submitted(&self, state: &mut CommitState) -> Result<(), FsError> {
        let Some(last) = state.submitted.back() else { return Ok(()) };
        let last = last.commit_block;
        self.wait_commit_block(last)?;
        self.retire(state, last)
    }

    /// Waits until transaction `tid`, which is submitted, is durable, and retires it.
    pub(super) fn make_durable(&self, tid: Tid) -> Result<(), FsError> {
        let last = {
            let state = self.committing.lock();
            // An empty one is not among them.
            let last = state.submitted.iter().rev().find(|commit| commit.tid <= tid);
            last.map(|commit| commit.commit_block)
        };
        // Otherwise another thread has retired it.
        let Some(last) = last else { return Ok(()) };
        self.wait_commit_block(last)?;
        let durable = self.storage.marks(MAIN_STREAM).durable;
        self.retire(&mut self.committing.lock(), durable.max(last))
    }

    fn wait_commit_block(&self, seq: GroupSeq) -> Result<(), FsError> {
        let waited = self.storage.wait_durable(MAIN_STREAM, seq);
        waited.map_err(|error| self.fail("writing the journal", &error))
    }

    /// Retires the commits whose commit blocks are in the groups up to `durable`.
    fn retire(&self, state: &mut CommitState, durable: GroupSeq) -> Result<(), FsError> {
        while let Some(first) = state.submitted.front()
            && first.commit_block <= durable
            && let Some(commit) = state.submitted.pop_front()
        {
            let Submitted { tid, freed, last_writes, data, .. } = commit;
            for (stream, seq) in data {
                if let Some(covered) = self.covered.get(usize::from(stream.0)) {
                    covered.fetch_max(seq.0, Ordering::AcqRel);
                }
            }
            self.journal.lock().on_commit_durable(tid);
            self.durable.store(tid.0, Ordering::Release);
            // Records of earlier transactions don't count any more, so a crash may leave any
            // content in their blocks.
            for (area, stream) in self.areas.iter().zip(1..) {
                let mut area = area.lock();
                area.on_commit_released(tid);
                self.stat.note_area(StreamNo(stream), &area);
            }
            state.freed.push((freed, last_writes));
        }
        self.reuse(state, false)
    }

    /// Lets freed blocks and inodes be used again, as far as the last writes to them are released.
    /// With `wait` all of them.
    fn reuse(&self, state: &mut CommitState, wait: bool) -> Result<(), FsError> {
        let mut kept = Vec::new();
        for (batch, last_writes) in core::mem::take(&mut state.freed) {
            let mut is_released = true;
            for (&stream, &seq) in &last_writes {
                let has_released = || {
                    let is_early = is_bug_planted(Plant::ReuseBeforeReleased);
                    seq <= self.released(stream)
                        || is_early && self.storage.marks(stream).durable >= seq
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

    /// The last group of a stream that a durable commit has covered: the commit came after it, and so
    /// it is durable.
    fn covered(&self, stream: StreamNo) -> GroupSeq {
        let covered = self.covered.get(usize::from(stream.0));
        GroupSeq(covered.map_or(0, |covered| covered.load(Ordering::Acquire)))
    }

    /// Whether the groups of a stream up to `seq` are durable. A stream does not know by itself that
    /// the FLUSH of one that follows it has covered them.
    pub(super) fn is_durable(&self, stream: StreamNo, seq: GroupSeq) -> bool {
        seq <= self.covered(stream) || seq <= self.storage.marks(stream).durable
    }

    /// The last group of a stream that is released. In mode `opimq` what is durable is released:
    /// nothing is undone, and nothing is sent again.
    pub(super) fn released(&self, stream: StreamNo) -> GroupSeq {
        let released = self.storage.marks(stream).released;
        match self.options.mode.keep_order().data {
            DataStreams::OfInodeFollowedByMain => released.max(self.covered(stream)),
            DataStreams::Main | DataStreams::OfInode => released,
        }
    }

    /// Waits until all that submitted commits have freed may be used again.
    pub(super) fn reuse_when_released(&self) -> Result<(), FsError> {
        let mut state = self.committing.lock();
        self.await_submitted(&mut state)?;
        self.reuse(&mut state, true)
    }
}

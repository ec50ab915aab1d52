//! Barriers: order without waiting, also between files of different streams.
//!
//! On one stream the groups themselves are ordered: of what is fresh, a crash leaves a prefix. That
//! is not so for a block that is overwritten: a crash may leave it without the groups before it. And
//! between two streams there is no order. So an overwrite, and whatever is for another stream, waits
//! until the barriers before it are durable before it is submitted:
//!
//! - An `fsync`, a write-back and a main commit wait themselves.
//! - A second barrier must not wait. Its file is *held*: it is submitted later, by the background or
//!   by the first call that needs it. Such a call is one that changes the file, one that would make
//!   a main commit of the barrier, as a rename does, and one that makes something durable.
//!
//! Another thread may write back, sync or commit while a barrier is set. So each checks for barriers
//! again when it has locked what it submits: the inode, or the gate. What is changed after the
//! barrier by the thread that has set it needs the same lock, so it is not submitted earlier.
//!
//! In mode `opimq` the main stream follows the data streams, and a barrier is a main commit. So all that
//! needs a commit to be seen is ordered without a wait, and of the rest what is on the stream of the
//! barrier's file. An overwrite on another stream waits until the barrier is durable.

use alloc::sync::Arc;
use alloc::vec::Vec;
use core::sync::atomic::Ordering;

use super::commit::Wish;
use super::durability::{ALL_PAGES, is_data_only};
use super::file_commit::FileCommit;
use super::journal_mode::{DataStreams, FileBarrier};
use super::{Fs, MAIN_STREAM};
use crate::block::Ino;
use crate::error::FsError;
use crate::format::inode::Time;
use crate::inode_table::Inode;
use crate::probe::{Plant, is_bug_planted};
use crate::storage::{GroupSeq, StreamNo};

/// The barriers that may not be durable, and the files that wait for them.
#[derive(Debug, Default)]
pub(super) struct Barriers {
    /// The group of the last barrier of each stream that may not be durable.
    pending: Vec<(StreamNo, GroupSeq)>,
    /// Files with a barrier of their own that were not submitted yet, in the order of the calls.
    held: Vec<(Arc<Inode>, bool)>,
    /// In mode `barrier`: the last group that barriers have submitted. What comes later is ordered
    /// behind it, so nothing but an `fsync` waits for it.
    ordered: GroupSeq,
}

impl Barriers {
    /// The number of files that are held.
    pub(super) fn held(&self) -> u64 {
        self.held.len() as u64
    }

    /// Whether all files with barriers are submitted.
    pub(super) const fn is_nothing_held(&self) -> bool {
        self.held.is_empty()
    }
}

/// Whether a step is one of submitting held files.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Held {
    /// It is not: files that are held are submitted before it.
    First,
    /// It is.
    Submitting,
}

impl Fs {
    /// Orders a file: its data, its fields and its names as they are now are durable before any
    /// later change of any file that is made durable by a later call, and before later writes of
    /// this file. It does not wait until they are durable, unless the file needs a main commit (as
    /// an `fsync` that falls back). With `data_only` only the fields that are needed to read the
    /// data.
    ///
    /// # Errors
    /// As [`fsync`](Self::fsync).
    pub fn barrier(&self, ino: Ino, data_only: bool, now: Time) -> Result<(), FsError> {
        self.stat.barriers.fetch_add(1, Ordering::Relaxed);
        match self.options.mode.keep_order().barriers {
            FileBarrier::Record if !self.is_read_only() => {}
            FileBarrier::Commit if !self.is_read_only() => {
                return self.commit_barrier(ino, data_only, now);
            }
            _ => return self.fsync(ino, data_only, now),
        }
        self.note_time(now);
        let inode = self.inode(ino)?;
        let data_only = is_data_only(&inode, data_only);
        let stream = self.stream_of(ino);
        let is_overwritten = !is_bug_planted(Plant::OverwriteBeforeBarrier)
            && self.has_barrier(stream)
            && self.has_overwrites(ino, &inode.state.read(), ALL_PAGES)?;
        if !self.is_barrier_free(stream, is_overwritten) {
            // A commit must not come between it and a barrier that is held after it.
            if self.needs_commit(&inode, data_only) {
                return self.fsync(ino, data_only, now);
            }
            {
                let mut barriers = self.barriers.lock();
                barriers.held.push((Arc::clone(&inode), data_only));
                inode.set_held(true);
            }
            self.make_commit_due();
            return Ok(());
        }
        match self.submit_file(&inode, data_only, false, Held::First)? {
            FileCommit::Submitted(stream, seq) => self.add_barrier(stream, seq),
            FileCommit::Nothing => {}
            FileCommit::Fallback(_) => return self.fsync(ino, data_only, now),
        }
        Ok(())
    }

    /// A barrier where all is on one stream, or the main stream follows the others: what is committed
    /// later is ordered behind it. The data is submitted, and the commit that it needs, and nothing is
    /// waited for.
    fn commit_barrier(&self, ino: Ino, data_only: bool, now: Time) -> Result<(), FsError> {
        self.note_time(now);
        let inode = self.inode(ino)?;
        let tid = self.write_back_whole(&inode, is_data_only(&inode, data_only))?;
        if is_bug_planted(Plant::BarrierWithoutCommit) {
            return Ok(());
        }
        self.submit_up_to(tid, Wish::Ordered)?;
        let commit_block = self.committing.lock().last_commit_block();
        let data = self.last_write(&inode);
        if self.are_streams_followed() {
            let commit_block = commit_block.map(|seq| (MAIN_STREAM, seq));
            for (stream, seq) in data.into_iter().chain(commit_block) {
                self.add_barrier(stream, seq);
            }
            return Ok(());
        }
        let data = data.map(|(_, seq)| seq);
        let mut barriers = self.barriers.lock();
        barriers.ordered = barriers.ordered.max(commit_block.max(data).unwrap_or_default());
        Ok(())
    }

    /// Waits until all barriers of modes `barrier` and `opimq` are durable. An `fsync` of a file
    /// without changes would wait for nothing otherwise.
    pub(super) fn wait_ordered(&self) -> Result<(), FsError> {
        if self.are_streams_followed() {
            return self.wait_pending(None);
        }
        let ordered = self.barriers.lock().ordered;
        self.wait_durable(MAIN_STREAM, ordered, "waiting for a barrier")
    }

    /// Whether the main stream follows the data streams.
    fn are_streams_followed(&self) -> bool {
        self.options.mode.keep_order().data == DataStreams::OfInodeFollowedByMain
    }

    /// Whether a barrier on `stream` may be submitted at once.
    fn is_barrier_free(&self, stream: StreamNo, is_overwritten: bool) -> bool {
        let mut barriers = self.barriers.lock();
        self.drop_durable(&mut barriers);
        let is_ordered = |&(other, _): &(StreamNo, GroupSeq)| other == stream && !is_overwritten;
        barriers.held.is_empty() && barriers.pending.iter().all(is_ordered)
            || is_bug_planted(Plant::BarrierNotHeld)
    }

    fn add_barrier(&self, stream: StreamNo, seq: GroupSeq) {
        let mut barriers = self.barriers.lock();
        match barriers.pending.iter_mut().find(|(other, _)| *other == stream) {
            Some((_, last)) => *last = seq.max(*last),
            None => barriers.pending.push((stream, seq)),
        }
    }

    fn drop_durable(&self, barriers: &mut Barriers) {
        barriers.pending.retain(|&(stream, seq)| !self.is_durable(stream, seq));
    }

    /// Whether a barrier may not be durable, and an overwrite on `stream` must come after it. In mode
    /// `opimq` the order of a stream is enough for its own barriers.
    pub(super) fn has_barrier(&self, stream: StreamNo) -> bool {
        let mut barriers = self.barriers.lock();
        if barriers.pending.is_empty() || is_bug_planted(Plant::OverwriteBeforeBarrier) {
            return false;
        }
        self.drop_durable(&mut barriers);
        let are_others = self.are_streams_followed();
        barriers.pending.iter().any(|&(other, _)| (other == stream) != are_others)
    }

    /// Waits until the barriers of all streams but `stream` are durable, if what comes now would not
    /// be behind them otherwise. In mode `opimq` only overwrites would not.
    pub(super) fn wait_barriers(&self, stream: Option<StreamNo>) -> Result<(), FsError> {
        if self.are_streams_followed() || is_bug_planted(Plant::BarrierNotAwaited) {
            return Ok(());
        }
        self.wait_pending(stream)
    }

    /// Waits until the barriers of all streams but `stream` are durable.
    pub(super) fn wait_pending(&self, stream: Option<StreamNo>) -> Result<(), FsError> {
        let pending = {
            let mut barriers = self.barriers.lock();
            if barriers.pending.is_empty() {
                return Ok(());
            }
            self.drop_durable(&mut barriers);
            barriers.pending.clone()
        };
        for (other, seq) in pending {
            if Some(other) != stream {
                let waited = if is_bug_planted(Plant::BarrierWhenComplete) {
                    self.storage.wait_complete(other, seq)
                } else {
                    self.storage.wait_durable(other, seq)
                };
                waited.map_err(|error| self.fail("waiting for a barrier", &error))?;
            }
        }
        Ok(())
    }

    /// As [`wait_barriers`](Self::wait_barriers), for a file that this thread has locked: nothing of
    /// it that came after a barrier may be submitted before that barrier is durable. `false`: files
    /// are held, which must be submitted first. Then the caller releases its lock and does that.
    pub(super) fn wait_locked(&self, stream: StreamNo, held: Held) -> Result<bool, FsError> {
        if held == Held::First && !self.barriers.lock().is_nothing_held() {
            return Ok(false);
        }
        if !is_bug_planted(Plant::BarrierNotHeld) {
            self.wait_barriers(Some(stream))?;
        }
        Ok(true)
    }

    /// Submits the files that are held, in the order of their barriers.
    pub(super) fn submit_held(&self) -> Result<(), FsError> {
        if self.barriers.lock().held.is_empty() {
            return Ok(());
        }
        // One thread at a time, so that the order stays.
        let _submitting = self.submitting_held.lock();
        loop {
            let Some((inode, data_only)) = self.barriers.lock().held.first().cloned() else {
                return Ok(());
            };
            self.wait_barriers(Some(self.stream_of(inode.ino)))?;
            match self.submit_file(&inode, data_only, false, Held::Submitting) {
                Ok(FileCommit::Submitted(stream, seq)) => self.add_barrier(stream, seq),
                // It may have been deleted meanwhile.
                Ok(FileCommit::Nothing) | Err(FsError::Stale(_)) => {}
                Ok(FileCommit::Fallback(_)) => self.commit_running(Held::Submitting)?,
                Err(error) => return Err(error),
            }
            let mut barriers = self.barriers.lock();
            barriers.held.remove(0);
            let is_held = barriers.held.iter().any(|(other, _)| other.ino == inode.ino);
            inode.set_held(is_held);
        }
    }

    /// Before a change of a file's data, or its deletion: if the file is held, it is submitted first.
    pub(super) fn before_change(&self, inode: &Inode) -> Result<(), FsError> {
        if inode.is_held() { self.submit_held() } else { Ok(()) }
    }
}

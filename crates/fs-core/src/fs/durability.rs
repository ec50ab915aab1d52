//! `fsync` and its relatives, and the work of the background.

use alloc::sync::Arc;
use core::ops::Range;

use super::file_commit::FileCommit;
use super::journal_mode::Commits;
use super::{Fs, Held, Waker};
use crate::block::Ino;
use crate::error::FsError;
use crate::format::inode::Time;
use crate::inode_table::Inode;
use crate::storage::{GroupSeq, StreamNo};
use crate::sync::atomic::Ordering;
use crate::tid::Tid;

/// Whether only the data of an inode, and what is needed to read it, is asked for. The entries of a
/// directory are its data.
pub(super) fn is_data_only(inode: &Inode, asked: bool) -> bool {
    asked && inode.state.read().disk.is_regular()
}

/// All pages of a file.
pub(super) const ALL_PAGES: Range<u32> = 0..u32::MAX;

impl Fs {
    /// Makes a file durable: its data, its fields, and the names that lead to it. With `data_only`
    /// only the fields that are needed to read the data.
    ///
    /// # Errors
    /// The storage has failed: the file system is read-only from then on.
    pub fn fsync(&self, ino: Ino, data_only: bool, now: Time) -> Result<(), FsError> {
        self.note_time(now);
        self.stat.fsyncs.fetch_add(1, Ordering::Relaxed);
        let inode = self.inode(ino)?;
        if self.is_read_only() {
            // What was not durable when it failed never is.
            return if self.failure().is_some() { Err(FsError::ReadOnly) } else { Ok(()) };
        }
        let data_only = is_data_only(&inode, data_only);
        if self.options.mode.keep_order().file_level {
            self.submit_held()?;
            // A file without new data must not become durable before a barrier either.
            self.wait_barriers(Some(self.stream_of(ino)))?;
            match self.submit_file(&inode, data_only, true, Held::First)? {
                FileCommit::Submitted(stream, seq) => {
                    let waited = self.storage.wait_durable(stream, seq);
                    waited.map_err(|error| self.fail("writing file data", &error))?;
                    // The group may be older than a barrier of another file of its stream.
                    return self.wait_barriers(None);
                }
                FileCommit::Nothing => return self.wait_barriers(None),
                FileCommit::Fallback(why) => self.stat.count_fallback(why),
            }
        }
        let tid = self.write_back_whole(&inode, data_only)?;
        if tid > self.durable() {
            self.commit_up_to(tid)?;
        }
        // A commit has waited for the data of its transaction. But there may have been none: an
        // overwrite changes nothing that is needed to read the data.
        if let Some((stream, seq)) = self.last_write(&inode) {
            self.wait_durable(stream, seq, "writing file data")?;
        }
        self.wait_ordered()
    }

    /// Waits until a group is durable, unless it is.
    pub(super) fn wait_durable(
        &self,
        stream: StreamNo,
        seq: GroupSeq,
        doing: &str,
    ) -> Result<(), FsError> {
        if self.is_durable(stream, seq) {
            return Ok(());
        }
        let waited = self.storage.wait_durable(stream, seq);
        waited.map_err(|error| self.fail(doing, &error))
    }

    /// Submits all dirty pages of a file. Returns the transaction up to which all must be committed:
    /// the last one with changes of the file, or with `data_only` with changes that are needed to
    /// read its data.
    pub(super) fn write_back_whole(
        &self,
        inode: &Arc<Inode>,
        data_only: bool,
    ) -> Result<Tid, FsError> {
        let is_clean = inode.state.read().pages.dirty() == 0;
        self.write_back(inode, ALL_PAGES)?;
        let commits = self.options.mode.keep_order().commits;
        if data_only && is_clean && commits == Commits::Several {
            // As BarrierFS: a call that has no data to submit forces a commit.
            return Ok(self.running.lock().tid);
        }
        Ok(if data_only { inode.data_tid() } else { inode.changed_tid() })
    }

    /// Makes everything durable.
    ///
    /// # Errors
    /// As [`fsync`](Self::fsync).
    pub fn sync(&self, now: Time) -> Result<(), FsError> {
        self.note_time(now);
        if self.is_read_only() {
            return if self.failure().is_some() { Err(FsError::ReadOnly) } else { Ok(()) };
        }
        let written = self.write_back_all();
        self.commit_now()?;
        written
    }

    /// Submits the dirty pages of all files.
    pub(super) fn write_back_all(&self) -> Result<(), FsError> {
        let mut result = Ok(());
        for ino in self.inodes.data_pages().files() {
            let Ok(inode) = self.inodes.get(ino) else { continue };
            // One file that has no space must not keep the others from becoming durable.
            result = result.and(self.write_back(&inode, ALL_PAGES));
            // A stream whose groups were not flushed is made durable by the commit.
        }
        result
    }

    /// The work of the background: writes back and commits what is older than the commit interval,
    /// and commits when an area of file-level records is filling up. Returns the time of the next
    /// call, which may come earlier.
    ///
    /// # Errors
    /// As [`fsync`](Self::fsync).
    pub fn tick(&self, now: Time) -> Result<Time, FsError> {
        self.note_time(now);
        if self.is_read_only() {
            self.record_failure(now);
            return Ok(self.next_tick(now));
        }
        let is_due = self.is_commit_due.swap(false, Ordering::AcqRel);
        self.submit_held()?;
        let seconds = u64::try_from(now.seconds).unwrap_or(0);
        if seconds >= self.next_commit_seconds.load(Ordering::Relaxed) {
            let next = seconds + u64::from(self.options.commit_seconds);
            self.next_commit_seconds.store(next, Ordering::Relaxed);
            let written = self.write_back_all();
            self.commit_now()?;
            written?;
            self.drop_idle_inodes();
        } else if is_due && self.areas.iter().any(|area| area.lock().is_half_full()) {
            self.commit_now()?;
        }
        self.checkpoint_if_due()?;
        Ok(self.next_tick(now))
    }

    fn next_tick(&self, now: Time) -> Time {
        let next = i64::try_from(self.next_commit_seconds.load(Ordering::Relaxed));
        Time { seconds: next.unwrap_or(i64::MAX).max(now.seconds + 1), nanos: 0 }
    }

    /// Sets the function that is called when [`tick`](Self::tick) has work before its time.
    pub fn set_waker(&self, waker: Waker) {
        *self.waker.lock() = Some(waker);
    }

    /// A commit shall be made soon.
    pub(super) fn make_commit_due(&self) {
        if !self.is_commit_due.swap(true, Ordering::AcqRel)
            && let Some(waker) = &*self.waker.lock()
        {
            waker();
        }
    }

    /// Inodes that the kernel does not refer to, and that are durable, leave the memory.
    fn drop_idle_inodes(&self) {
        for ino in self.inodes.data_pages().files() {
            let Ok(inode) = self.inodes.get(ino) else { continue };
            let state = &mut *inode.state.write();
            if let Some(stream) = state.stream {
                state.pages.drop_complete(self.released(stream), None);
            }
        }
        for ino in self.inodes.maybe_idle() {
            self.remove_idle(ino);
        }
    }

    /// Removes an inode from the memory if nothing refers to it.
    pub(super) fn remove_idle(&self, ino: Ino) {
        let is_released = |stream, seq| self.released(stream) >= seq;
        self.inodes.remove_idle(ino, self.durable(), is_released);
    }

    /// Remembers the time, for the commits.
    pub(super) fn note_time(&self, now: Time) {
        let seconds = u64::try_from(now.seconds).unwrap_or(0);
        self.now_seconds.store(seconds, Ordering::Relaxed);
    }
}

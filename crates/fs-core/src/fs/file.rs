//! File data: reading, writing, sizes, holes.

use alloc::sync::Arc;
use alloc::vec;

use super::{Fs, Held};
use crate::block::{BLOCK_BYTES, Block, Ino};
use crate::error::FsError;
use crate::extents::{self, Extent, Run};
use crate::format::inode::{DiskInode, InodeFlags, Time};
use crate::fs::Caller;
use crate::groups::Claim;
use crate::inode_table::{Inode, InodeState};
use crate::op::Op;
use crate::open_inode::OpenInode;
use crate::tid::Tid;

/// The size of the largest file, in bytes: 2^32 - 1 blocks.
pub(crate) const SIZE_MAX: u64 = (u32::MAX as u64) * BLOCK_BYTES as u64;

pub(super) fn page_of(offset: u64) -> u32 {
    (offset / BLOCK_BYTES as u64) as u32
}

pub(super) fn offset_in_page(offset: u64) -> usize {
    (offset % BLOCK_BYTES as u64) as usize
}

impl Fs {
    /// Reads from a file into `into`. Returns the number of bytes, less at the end of the file.
    ///
    /// # Errors
    /// The inode is gone, is no regular file, or can't be read.
    pub fn read(
        &self,
        ino: Ino,
        offset: u64,
        into: &mut [u8],
        now: Time,
    ) -> Result<usize, FsError> {
        let inode = self.inode(ino)?;
        let (len, is_atime_due) = {
            let state = inode.state.read();
            if state.disk.is_dir() {
                return Err(FsError::IsDirectory);
            }
            let left = state.disk.size.saturating_sub(offset);
            let len = usize::try_from(left).unwrap_or(usize::MAX).min(into.len());
            self.read_locked(&inode, &state, offset, &mut into[..len])?;
            (len, self.is_atime_due(&state.disk, now))
        };
        if is_atime_due {
            match self.change_times(&inode, |disk| disk.atime = now) {
                Ok(()) | Err(FsError::ReadOnly) => {}
                Err(error) => return Err(error),
            }
        }
        Ok(len)
    }

    /// `relatime`: the time of access is updated if it is not newer than the others, or a day old.
    fn is_atime_due(&self, disk: &DiskInode, now: Time) -> bool {
        self.options.atime
            && !disk.flags.contains(InodeFlags::NOATIME)
            && now > disk.atime
            && (disk.atime <= disk.mtime
                || disk.atime <= disk.ctime
                || now.seconds - disk.atime.seconds >= 86_400)
    }

    /// Reads a range that ends at the end of the file at most.
    fn read_locked(
        &self,
        inode: &Inode,
        state: &InodeState,
        offset: u64,
        into: &mut [u8],
    ) -> Result<(), FsError> {
        let mut done = 0;
        while done < into.len() {
            let at = offset + done as u64;
            let (page, within) = (page_of(at), offset_in_page(at));
            let len = (BLOCK_BYTES - within).min(into.len() - done);
            if let Some(data) = state.pages.get(page) {
                into[done..done + len].copy_from_slice(&data[within..within + len]);
                done += len;
                continue;
            }
            let run = extents::lookup(inode.ino, &state.disk, &self.view(), page)?;
            match run {
                Run::Mapped(Extent { physical, len: blocks, unwritten: false, .. }) => {
                    // As many whole blocks as are not newer in memory are read at once.
                    let left = (into.len() - done + within).div_ceil(BLOCK_BYTES);
                    let blocks = (blocks as usize).min(left);
                    let newer = |index: &usize| state.pages.get(page + *index as u32).is_some();
                    let blocks = (0..blocks).find(newer).unwrap_or(blocks);
                    let end = (blocks * BLOCK_BYTES - within).min(into.len() - done);
                    let target = &mut into[done..done + end];
                    if within == 0 && end == blocks * BLOCK_BYTES {
                        self.storage.read(physical, target)?;
                    } else {
                        let mut whole = vec![0; blocks * BLOCK_BYTES];
                        self.storage.read(physical, &mut whole)?;
                        target.copy_from_slice(&whole[within..within + end]);
                    }
                    done += end;
                }
                Run::Mapped(_) | Run::Hole { .. } => {
                    into[done..done + len].fill(0);
                    done += len;
                }
            }
        }
        Ok(())
    }

    /// The content of a page: from memory, from the drive, or zeroes.
    pub(super) fn page(
        &self,
        ino: Ino,
        disk: &DiskInode,
        page: u32,
    ) -> Result<Arc<Block>, FsError> {
        let mut data = [0; BLOCK_BYTES];
        if let Run::Mapped(Extent { physical, unwritten: false, .. }) =
            extents::lookup(ino, disk, &self.view(), page)?
        {
            self.storage.read(physical, &mut data)?;
        }
        Ok(Arc::new(data))
    }

    /// Writes to a file. The data is in memory when this returns.
    ///
    /// # Errors
    /// The file would be too large, there is no space, or the file system is read-only. A part may
    /// have been written: then the result is the number of its bytes.
    pub fn write(
        &self,
        caller: &Caller,
        ino: Ino,
        offset: u64,
        data: &[u8],
        now: Time,
    ) -> Result<usize, FsError> {
        // As on Linux, what fits below the limit is written.
        let room = SIZE_MAX.saturating_sub(offset);
        if room == 0 {
            return Err(FsError::FileTooLarge);
        }
        let data = &data[..data.len().min(usize::try_from(room).unwrap_or(usize::MAX))];
        let inode = self.inode(ino)?;
        self.before_change(&inode)?;
        let mut done = 0;
        while done < data.len() || data.is_empty() {
            let at = offset + done as u64;
            let rest = &data[done..];
            match self.retry_whole(&inode, || self.write_pages(&inode, at, rest, caller, now)) {
                Ok(0) => break,
                Ok(written) => done += written,
                // What was written counts.
                Err(FsError::NoSpace) if done > 0 => break,
                Err(error) => return Err(error),
            }
        }
        if inode.state.read().pages.dirty() > self.options.dirty_pages_max {
            self.write_back(&inode, 0..u32::MAX)?;
        }
        self.limit_pages()?;
        Ok(done)
    }

    /// As [`retry`](Self::retry), for an attempt that begins with [`check_whole`]: a truncate that
    /// has begun is finished first.
    pub(super) fn retry_whole<T>(
        &self,
        inode: &Arc<Inode>,
        mut attempt: impl FnMut() -> Result<T, FsError>,
    ) -> Result<T, FsError> {
        loop {
            match self.retry(&mut attempt) {
                Err(FsError::Busy) => self.finish_cut(inode)?,
                result => return result,
            }
        }
    }

    /// Writes as much as there is space for. Returns the number of bytes.
    fn write_pages(
        &self,
        inode: &Arc<Inode>,
        offset: u64,
        data: &[u8],
        caller: &Caller,
        now: Time,
    ) -> Result<usize, FsError> {
        let op = self.begin()?;
        let mut state = op.lock(inode)?;
        let state = &mut *state;
        check_whole(state)?;
        if !state.disk.is_regular() {
            return Err(if state.disk.is_dir() { FsError::IsDirectory } else { FsError::Invalid });
        }
        state.disk.check_mutable()?;
        if offset < state.disk.size {
            state.disk.check_replaceable()?;
        }
        if let Some(stream) = state.stream {
            let keep = state.disk.size.checked_sub(1).map(page_of);
            state.pages.drop_complete(self.storage.marks(stream).complete, keep);
        }
        if offset > state.disk.size {
            self.zero_end(inode.ino, state)?;
        }
        let mut done = 0;
        while done < data.len() {
            let at = offset + done as u64;
            let (page, within) = (page_of(at), offset_in_page(at));
            let part = &data[done..data.len().min(done + BLOCK_BYTES - within)];
            match self.write_page(inode.ino, state, page, within, part, caller) {
                Err(FsError::NoSpace) if done > 0 => break,
                written => written?,
            }
            done += part.len();
            state.disk.size = state.disk.size.max(at + part.len() as u64);
        }
        state.disk.mtime = now;
        state.disk.ctime = now;
        state.disk.version += 1;
        if state.disk.mode & 0o6000 != 0 && caller.uid != 0 {
            state.disk.mode &= !set_id_bits(state.disk.mode);
        }
        drop(op.finish(&[inode])?);
        Ok(done)
    }

    /// Writes a part of one page.
    fn write_page(
        &self,
        ino: Ino,
        state: &mut InodeState,
        page: u32,
        within: usize,
        part: &[u8],
        caller: &Caller,
    ) -> Result<(), FsError> {
        let InodeState { pages, disk, .. } = state;
        let mut is_reserved = false;
        if !pages.is_dirty(page) && !self.is_allocated(ino, disk, page)? {
            self.groups.reserve(1, Claim::of(caller.uid == 0))?;
            is_reserved = true;
        }
        let page_start = u64::from(page) * BLOCK_BYTES as u64;
        let old_end = disk.size.saturating_sub(page_start).min(BLOCK_BYTES as u64) as usize;
        let is_whole = within == 0 && part.len() >= old_end;
        let old = || {
            if is_whole || old_end == 0 {
                return Ok(Arc::new([0; BLOCK_BYTES]));
            }
            self.page(ino, disk, page)
        };
        let changed = pages.change(page, is_reserved, old, |block| {
            // The drive may have anything behind the end of the file.
            block[old_end..].fill(0);
            block[within..within + part.len()].copy_from_slice(part);
        });
        if changed.is_err() && is_reserved {
            self.groups.unreserve(1);
        }
        changed
    }

    /// Whether a page has a block, written or not.
    fn is_allocated(&self, ino: Ino, disk: &DiskInode, page: u32) -> Result<bool, FsError> {
        Ok(matches!(extents::lookup(ino, disk, &self.view(), page)?, Run::Mapped(_)))
    }

    /// Zeroes the last page of a file behind the end, before the file grows over it.
    pub(super) fn zero_end(&self, ino: Ino, state: &mut InodeState) -> Result<(), FsError> {
        let InodeState { pages, disk, .. } = state;
        let within = offset_in_page(disk.size);
        if within == 0 {
            return Ok(());
        }
        let page = page_of(disk.size);
        if let Some(data) = pages.get(page) {
            if data[within..].iter().all(|&byte| byte == 0) {
                return Ok(());
            }
        } else {
            let old = self.page(ino, disk, page)?;
            if old[within..].iter().all(|&byte| byte == 0) {
                return Ok(());
            }
            pages.change(page, false, || Ok::<_, FsError>(old), |_| ())?;
        }
        pages.zero_tail(page, within);
        Ok(())
    }

    /// Sets the size of a file.
    pub(super) fn set_size(&self, inode: &Arc<Inode>, size: u64, now: Time) -> Result<(), FsError> {
        if size > SIZE_MAX {
            return Err(FsError::FileTooLarge);
        }
        self.before_change(inode)?;
        loop {
            match self.retry_whole(inode, || self.set_size_step(inode, size, now))? {
                SizeStep::WriteFirst(page) => self.write_back(inode, page..page + 1)?,
                SizeStep::RemoveMore => break,
                SizeStep::Done => return Ok(()),
            }
        }
        self.finish_cut(inode)
    }

    /// Sets the size, and removes the first blocks behind the new end.
    fn set_size_step(&self, inode: &Arc<Inode>, size: u64, now: Time) -> Result<SizeStep, FsError> {
        let mut op = self.begin_removal()?;
        let mut state = op.lock(inode)?;
        let state = &mut *state;
        if !state.disk.is_regular() {
            return Err(if state.disk.is_dir() { FsError::IsDirectory } else { FsError::Invalid });
        }
        check_whole(state)?;
        let old_size = state.disk.size;
        state.disk.check_mutable()?;
        if size < old_size {
            state.disk.check_replaceable()?;
        }
        op.change_data();
        if size > old_size {
            self.zero_end(inode.ino, state)?;
        }
        let end_page = page_of(state.written_size);
        if size > state.written_size
            && offset_in_page(state.written_size) != 0
            && state.pages.is_dirty(end_page)
            && self.is_allocated(inode.ino, &state.disk, end_page)?
        {
            return Ok(SizeStep::WriteFirst(end_page));
        }
        let mut disk = state.disk.clone();
        disk.size = size;
        disk.mtime = now;
        disk.ctime = now;
        disk.version += 1;
        // With the same size, blocks that `fallocate` has put behind the end go.
        let is_done = size > old_size || self.remove_behind_end(&mut op, inode, &mut disk)?;
        op.was_written(state);
        let finished = op.finish(&[inode])?;
        if !is_done {
            // A crash must not forget the rest.
            self.orphans.lock().add(inode.ino, &mut self.running.lock());
        }
        state.disk = disk;
        state.written_size = size;
        if size <= old_size {
            log_removed(inode, state, is_done, finished.tid);
        }
        let reserved = state.pages.remove(first_page_behind(size)..u32::MAX);
        self.groups.unreserve(reserved);
        if size < old_size {
            self.zero_end(inode.ino, state)?;
        }
        drop(finished);
        Ok(if is_done { SizeStep::Done } else { SizeStep::RemoveMore })
    }

    /// Finishes a truncate that has begun.
    pub(super) fn finish_cut(&self, inode: &Arc<Inode>) -> Result<(), FsError> {
        while !self.remove_step(inode, Held::First)? {}
        Ok(())
    }

    /// Removes more blocks behind the end of a file whose truncate has begun. Returns whether all
    /// are removed; then it is not in the list any more, unless it has no name.
    pub(super) fn remove_step(&self, inode: &Arc<Inode>, held: Held) -> Result<bool, FsError> {
        let mut op = self.begin_own_removal(held)?;
        let mut state = op.lock(inode)?;
        let state = &mut *state;
        if !state.is_cutting {
            return Ok(true);
        }
        let mut disk = state.disk.clone();
        let is_done = self.remove_behind_end(&mut op, inode, &mut disk)?;
        op.was_written(state);
        let finished = op.finish(&[inode])?;
        if is_done && disk.links > 0 {
            self.orphans.lock().remove(inode.ino, &mut self.running.lock());
        }
        state.disk = disk;
        log_removed(inode, state, is_done, finished.tid);
        drop(finished);
        Ok(is_done)
    }

    /// Removes blocks behind the end of a file, a step's worth at most. Returns whether all are
    /// removed.
    fn remove_behind_end(
        &self,
        op: &mut Op<'_>,
        inode: &Arc<Inode>,
        disk: &mut DiskInode,
    ) -> Result<bool, FsError> {
        let first = first_page_behind(disk.size);
        let mut open = OpenInode { ino: inode.ino, disk };
        let rest = extents::remove_some(&mut open, op, first, 1 << 32, self.removal())?;
        Ok(rest == u64::from(first))
    }
}

/// # Errors
/// [`FsError::Busy`]: a truncate of the file is not finished.
pub(super) fn check_whole(state: &InodeState) -> Result<(), FsError> {
    if state.is_cutting { Err(FsError::Busy) } else { Ok(()) }
}

/// Records that blocks behind the end were removed: a file-level record without this would bring
/// them back.
fn log_removed(inode: &Inode, state: &mut InodeState, is_done: bool, tid: Tid) {
    state.log.change_range(first_page_behind(state.disk.size), u32::MAX, tid);
    state.is_cutting = !is_done;
    if !is_done {
        // Recovery would not remove the rest.
        inode.make_unfit(tid);
    }
}

/// How a change of a size goes on.
enum SizeStep {
    /// Nothing was changed. This page must be submitted first: on the drive it has old data behind
    /// the end of the file, which would become a part of it.
    WriteFirst(u32),
    /// Blocks behind the end are left.
    RemoveMore,
    /// It is done.
    Done,
}

/// The first page that is wholly behind the end of a file of `size` bytes.
pub(super) fn first_page_behind(size: u64) -> u32 {
    size.div_ceil(BLOCK_BYTES as u64).min(u64::from(u32::MAX)) as u32
}

/// The set-user-ID bit, and the set-group-ID bit if it is one and not a lock's.
pub(super) const fn set_id_bits(mode: u16) -> u16 {
    if mode & 0o2010 == 0o2010 { 0o6000 } else { 0o4000 }
}

//! Holes and space of files: `fallocate` and `lseek`.

use alloc::sync::Arc;
use core::ops::Range;

use super::Fs;
use super::durability::ALL_PAGES;
use super::file::{SIZE_MAX, check_whole, offset_in_page, page_of};
use crate::block::{BLOCK_BYTES, Ino};
use crate::error::FsError;
use crate::extents::{self, Extent, Run};
use crate::format::inode::{DiskInode, Time};
use crate::groups::Claim;
use crate::inode_table::{Inode, InodeState};
use crate::op::Finished;
use crate::open_inode::OpenInode;

/// How `lseek` searches.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum SeekTo {
    /// The next byte of data.
    Data,
    /// The next byte of a hole; the end of the file is one.
    Hole,
}

/// Modes of `fallocate`.
pub mod mode {
    /// The size does not change.
    pub const KEEP_SIZE: i32 = 0x01;
    /// The range becomes a hole.
    pub const PUNCH_HOLE: i32 = 0x02;
    /// The range is cut out, and the rest moves down.
    pub const COLLAPSE_RANGE: i32 = 0x08;
    /// The range reads as zeroes, and has space.
    pub const ZERO_RANGE: i32 = 0x10;
    /// A hole is put in, and the rest moves up.
    pub const INSERT_RANGE: i32 = 0x20;
}

/// The blocks that one step allocates or removes at most.
const STEP_BLOCKS: u32 = 32_767;

/// The pages that a byte range covers wholly.
fn whole_pages(offset: u64, end: u64) -> Range<u32> {
    let first = page_of(offset.next_multiple_of(BLOCK_BYTES as u64));
    first..page_of(end).max(first)
}

impl Fs {
    /// The next data or hole of a file from `offset` on.
    ///
    /// # Errors
    /// [`FsError::NoDataOrHole`]: `offset` is behind the end, or there is no data behind it.
    pub fn seek(&self, ino: Ino, offset: u64, to: SeekTo) -> Result<u64, FsError> {
        let inode = self.inode(ino)?;
        let state = inode.state.read();
        if !state.disk.is_regular() {
            return Err(FsError::Invalid);
        }
        let size = state.disk.size;
        if offset >= size {
            return Err(FsError::NoDataOrHole);
        }
        let mut page = page_of(offset);
        let end = page_of(size - 1) + 1;
        while page < end {
            // Pages in memory are data, as is what they cover.
            let (is_data, next) = if state.pages.get(page).is_some() {
                (true, page + 1)
            } else {
                let (is_data, len) = match extents::lookup(ino, &state.disk, &self.view(), page)? {
                    Run::Mapped(extent) => (!extent.unwritten, extent.len),
                    Run::Hole { len, .. } => (false, len),
                };
                let next = page.saturating_add(len).min(end);
                (is_data, state.pages.first_in(page..next).unwrap_or(next))
            };
            if is_data == (to == SeekTo::Data) {
                return Ok(offset.max(u64::from(page) * BLOCK_BYTES as u64));
            }
            page = next;
        }
        if to == SeekTo::Hole { Ok(size) } else { Err(FsError::NoDataOrHole) }
    }

    /// Allocates, zeroes or removes space of a file; `how` are the modes of `fallocate`.
    ///
    /// # Errors
    /// The file would be too large, there is no space, or the modes do not go together.
    pub fn fallocate(
        &self,
        ino: Ino,
        how: i32,
        offset: u64,
        len: u64,
        now: Time,
    ) -> Result<(), FsError> {
        let end = offset.checked_add(len).filter(|&end| end <= SIZE_MAX && len > 0);
        let end = end.ok_or(if len == 0 { FsError::Invalid } else { FsError::FileTooLarge })?;
        let inode = self.inode(ino)?;
        {
            let state = inode.state.read();
            state.disk.check_mutable()?;
            if how & !mode::KEEP_SIZE != 0 {
                state.disk.check_replaceable()?;
            }
        }
        self.before_change(&inode)?;
        match how {
            0 | mode::KEEP_SIZE => self.allocate_range(&inode, offset..end, how, now),
            _ if how == mode::PUNCH_HOLE | mode::KEEP_SIZE => {
                self.zero_edges(&inode, offset..end, now)?;
                self.punch(&inode, whole_pages(offset, end), now)
            }
            _ if how & !mode::KEEP_SIZE == mode::ZERO_RANGE => {
                self.zero_edges(&inode, offset..end, now)?;
                self.punch(&inode, whole_pages(offset, end), now)?;
                self.allocate_range(&inode, offset..end, how & mode::KEEP_SIZE, now)
            }
            mode::COLLAPSE_RANGE | mode::INSERT_RANGE => {
                self.shift_range(&inode, offset, len, how == mode::INSERT_RANGE, now)
            }
            // These go with no other mode.
            _ if how & (mode::COLLAPSE_RANGE | mode::INSERT_RANGE) != 0 => Err(FsError::Invalid),
            _ => Err(FsError::NotSupported),
        }
    }

    /// # Errors
    /// The inode is no regular file.
    fn check_regular(disk: &DiskInode) -> Result<(), FsError> {
        if disk.is_regular() {
            Ok(())
        } else if disk.is_dir() {
            Err(FsError::IsDirectory)
        } else {
            Err(FsError::Invalid)
        }
    }

    /// Puts the fields of a finished change in their place.
    fn put(state: &mut InodeState, disk: DiskInode, pages: Range<u32>, finished: Finished<'_>) {
        state.disk = disk;
        state.log.change_range(pages.start, pages.end, finished.tid);
        drop(finished);
    }

    /// Gives each hole of a range unwritten blocks.
    fn allocate_range(
        &self,
        inode: &Arc<Inode>,
        range: Range<u64>,
        how: i32,
        now: Time,
    ) -> Result<(), FsError> {
        let mut next = page_of(range.start);
        let end = u32::try_from(range.end.div_ceil(BLOCK_BYTES as u64)).unwrap_or(u32::MAX);
        while next < end {
            next = self.retry_whole(inode, || self.allocate_step(inode, next, end, now))?;
        }
        if how & mode::KEEP_SIZE == 0 && inode.state.read().disk.size < range.end {
            self.set_size(inode, range.end, now)?;
        }
        Ok(())
    }

    /// Allocates from page `next` on. Returns the next page that may be a hole.
    fn allocate_step(
        &self,
        inode: &Arc<Inode>,
        next: u32,
        end: u32,
        now: Time,
    ) -> Result<u32, FsError> {
        let mut op = self.begin()?;
        let mut state = op.lock(inode)?;
        check_whole(&state)?;
        Self::check_regular(&state.disk)?;
        let mut disk = state.disk.clone();
        let mut open = OpenInode { ino: inode.ino, disk: &mut disk };
        let (len, is_hole) = match extents::lookup(open.ino, open.disk, &op, next)? {
            Run::Mapped(extent) => (extent.len, false),
            Run::Hole { len, .. } => (len, true),
        };
        let len = len.min(end - next).min(STEP_BLOCKS);
        if !is_hole {
            return Ok(next + len);
        }
        op.change_data();
        let goal = self.goal(&open, &op, next)?;
        let (physical, len) = op.allocate_data(goal, len, 0)?;
        let extent = Extent { logical: next, len, physical, unwritten: true };
        extents::insert(&mut open, &mut op, extent)?;
        disk.ctime = now;
        disk.version += 1;
        let finished = op.finish(&[inode])?;
        // Their blocks are there now.
        self.groups.unreserve(state.pages.unreserve(next..next + len));
        Self::put(&mut state, disk, next..next + len, finished);
        Ok(next + len)
    }

    /// Zeroes the parts of a range in pages that it does not cover wholly.
    fn zero_edges(&self, inode: &Arc<Inode>, range: Range<u64>, now: Time) -> Result<(), FsError> {
        let op = self.begin()?;
        let mut state = op.lock(inode)?;
        let state = &mut *state;
        Self::check_regular(&state.disk)?;
        let whole = whole_pages(range.start, range.end);
        let size = state.disk.size;
        let (start, end) = (range.start.min(size), range.end.min(size));
        let first_end = end.min(u64::from(whole.start) * BLOCK_BYTES as u64);
        self.zero_in_page(inode.ino, state, start..first_end)?;
        if page_of(end) >= whole.end && end > first_end {
            self.zero_in_page(inode.ino, state, start.max(end - offset_in_page(end) as u64)..end)?;
        }
        let finished = op.finish(&[inode])?;
        state.disk.mtime = now;
        state.disk.ctime = now;
        state.disk.version += 1;
        drop(finished);
        Ok(())
    }

    /// Zeroes bytes of one page. A hole stays one.
    fn zero_in_page(
        &self,
        ino: Ino,
        state: &mut InodeState,
        range: Range<u64>,
    ) -> Result<(), FsError> {
        if range.is_empty() {
            return Ok(());
        }
        let InodeState { pages, disk, .. } = state;
        let page = page_of(range.start);
        if pages.get(page).is_none() {
            let run = extents::lookup(ino, disk, &self.view(), page)?;
            if !matches!(run, Run::Mapped(Extent { unwritten: false, .. })) {
                return Ok(());
            }
        }
        let from = offset_in_page(range.start);
        let len = (range.end - range.start) as usize;
        let old = || self.page(ino, disk, page);
        pages.change(page, false, old, |block| block[from..from + len].fill(0))
    }

    /// Removes the blocks of whole pages.
    fn punch(&self, inode: &Arc<Inode>, pages: Range<u32>, now: Time) -> Result<(), FsError> {
        let mut end = pages.end;
        while end > pages.start {
            end = self.retry(|| self.punch_step(inode, pages.start..end, now))?;
        }
        Ok(())
    }

    /// Removes blocks from the end of a range on. Returns the end of the rest.
    fn punch_step(&self, inode: &Arc<Inode>, pages: Range<u32>, now: Time) -> Result<u32, FsError> {
        let mut op = self.begin_removal()?;
        op.set_claim(Claim::WriteBack);
        let mut state = op.lock(inode)?;
        let state = &mut *state;
        op.change_data();
        let mut disk = state.disk.clone();
        let mut open = OpenInode { ino: inode.ino, disk: &mut disk };
        let (first, end) = (pages.start, u64::from(pages.end));
        let rest = extents::remove_some(&mut open, &mut op, first, end, self.removal())?;
        // It is in the range, or just behind it.
        let done = rest as u32..pages.end;
        op.was_written(state);
        disk.mtime = now;
        disk.ctime = now;
        disk.version += 1;
        let finished = op.finish(&[inode])?;
        self.groups.unreserve(state.pages.remove(done.clone()));
        state.settle_size();
        Self::put(state, disk, done.clone(), finished);
        Ok(done.start)
    }

    /// Cuts whole blocks out of a file, or puts a hole in.
    fn shift_range(
        &self,
        inode: &Arc<Inode>,
        offset: u64,
        len: u64,
        is_insert: bool,
        now: Time,
    ) -> Result<(), FsError> {
        if offset_in_page(offset) != 0 || offset_in_page(len) != 0 {
            return Err(FsError::Invalid);
        }
        loop {
            self.write_back(inode, ALL_PAGES)?;
            if self
                .retry_whole(inode, || self.shift_range_once(inode, offset, len, is_insert, now))?
            {
                // The next overwrite goes to the shifted blocks in place. If a crash brought the
                // old places back, it would show the new data where it was not written.
                return self.commit_up_to(inode.changed_tid());
            }
        }
    }

    /// Whether the range was shifted; else another thread has written meanwhile.
    fn shift_range_once(
        &self,
        inode: &Arc<Inode>,
        offset: u64,
        len: u64,
        is_insert: bool,
        now: Time,
    ) -> Result<bool, FsError> {
        let mut op = self.begin_large()?;
        op.set_claim(Claim::WriteBack);
        let mut state = op.lock(inode)?;
        let state = &mut *state;
        check_whole(state)?;
        Self::check_regular(&state.disk)?;
        op.change_data();
        let size = state.disk.size;
        let is_outside = if is_insert { offset >= size } else { offset + len >= size };
        if is_outside {
            return Err(FsError::Invalid);
        }
        if is_insert && size + len > SIZE_MAX {
            return Err(FsError::FileTooLarge);
        }
        if state.pages.dirty() > 0 {
            return Ok(false);
        }
        if let Some(stream) = state.stream {
            self.storage.wait_complete(stream, state.last_seq)?;
        }
        let mut disk = state.disk.clone();
        let mut open = OpenInode { ino: inode.ino, disk: &mut disk };
        let (first, blocks) = (page_of(offset), page_of(len));
        if is_insert {
            extents::shift(&mut open, &mut op, first, i64::from(blocks))?;
            disk.size += len;
        } else {
            extents::remove(&mut open, &mut op, first, u64::from(first + blocks))?;
            extents::shift(&mut open, &mut op, first + blocks, -i64::from(blocks))?;
            disk.size -= len;
        }
        op.was_written(state);
        disk.mtime = now;
        disk.ctime = now;
        disk.version += 1;
        let finished = op.finish(&[inode])?;
        // Pages that were submitted have other places now, and reads find them on the drive.
        state.pages.remove(first..u32::MAX);
        state.written_size = disk.size;
        state.disk = disk;
        // Records describe ranges, not shifts.
        inode.make_unfit(finished.tid);
        drop(finished);
        Ok(true)
    }
}

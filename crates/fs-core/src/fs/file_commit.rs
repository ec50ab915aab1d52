//! `fsync` by a file-level transaction: a record in the area of the inode's stream, behind its
//! data. Nothing is waited for in between.

use alloc::boxed::Box;
use alloc::collections::BTreeSet;
use alloc::sync::Arc;
use alloc::vec::Vec;
use core::ops::ControlFlow;

use super::durability::ALL_PAGES;
use super::{Fs, Held};
use crate::block::{BlockNo, Ino};
use crate::dir::FileKind;
use crate::error::FsError;
use crate::extents;
use crate::file_journal::record::{Change, Header, RECORD_BLOCKS_MAX, Record, RecordId};
use crate::file_log::Creation;
use crate::format::inode::{DiskInode, INODE_BYTES, file_type};
use crate::inode_table::{Inode, InodeState};
use crate::probe::{Plant, is_bug_planted};
use crate::storage::{BlockWrite, Content, GroupSeq, Placement, StreamNo, WriteGroup};
use crate::sync::atomic::Ordering;
use crate::tid::Tid;

/// The extents of a record. A file with more changes falls back to a main commit.
const EXTENTS_MAX: usize = 8192;

/// Why an `fsync` falls back to a main commit.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Fallback {
    /// The inode is no regular file.
    Kind,
    /// The inode was renamed, linked, unlinked, or changed in a way that records do not describe.
    Inode,
    /// A name that leads to it was used by a rename, a link or an unlink before.
    Name,
    /// A directory was moved.
    Moved,
    /// The record would be too large.
    Size,
    /// The area has no space before the next main commit.
    Area,
}

impl Fallback {
    /// All reasons, in the order of their numbers.
    pub const ALL: [Self; 6] =
        [Self::Kind, Self::Inode, Self::Name, Self::Moved, Self::Size, Self::Area];

    /// Its name in figures.
    #[must_use]
    pub const fn name(self) -> &'static str {
        match self {
            Self::Kind => "kind",
            Self::Inode => "inode",
            Self::Name => "name",
            Self::Moved => "moved",
            Self::Size => "size",
            Self::Area => "area",
        }
    }
}

/// How an `fsync` goes on.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum FileCommit {
    /// All is durable when this group of the stream is.
    Submitted(StreamNo, GroupSeq),
    /// There is nothing to make durable.
    Nothing,
    /// A main commit is needed.
    Fallback(Fallback),
}

impl Fs {
    /// Submits the dirty pages of a file and its file-level transaction. With `flush` they become
    /// durable soon; in any case they are ordered.
    pub(super) fn submit_file(
        &self,
        inode: &Arc<Inode>,
        data_only: bool,
        flush: bool,
        held: Held,
    ) -> Result<FileCommit, FsError> {
        loop {
            self.write_back_for(inode, ALL_PAGES, held)?;
            let op = self.begin_own(held)?;
            let mut state = op.lock(inode)?;
            // It may have changed after a barrier that came during the wait for the lock.
            if !self.wait_locked(self.stream_of(inode.ino), held)? {
                drop((state, op));
                self.submit_held()?;
                continue;
            }
            // Another thread may have written meanwhile, or may write for ever. The pages that were
            // dirty at the beginning are submitted.
            if let Some(done) = self.submit_record(inode, &mut state, data_only, flush, op.tid())? {
                return Ok(done);
            }
        }
    }

    fn submit_record(
        &self,
        inode: &Arc<Inode>,
        state: &mut InodeState,
        data_only: bool,
        flush: bool,
        tid: Tid,
    ) -> Result<Option<FileCommit>, FsError> {
        let mut durable = self.durable();
        if is_bug_planted(Plant::RecordWithoutInFlight) {
            durable = durable.max(Tid(tid.0 - 1));
        }
        let last = if data_only { inode.data_tid() } else { inode.changed_tid() };
        let written = state.stream.map(|stream| (stream, state.last_seq));
        let changes = inode.changes();
        if last <= durable {
            return Ok(Some(match written {
                Some((stream, seq)) => FileCommit::Submitted(stream, seq),
                None => FileCommit::Nothing,
            }));
        }
        if let (Some((stream, seq)), Some(record)) =
            (written, state.log.record_of(changes, data_only))
        {
            return Ok(Some(FileCommit::Submitted(stream, seq.max(record))));
        }
        let fallback = |why| Ok(Some(FileCommit::Fallback(why)));
        let mut stream = self.stream_of(inode.ino);
        if is_bug_planted(Plant::RecordOnOtherStream) {
            stream = StreamNo(3 - stream.0);
        }
        let creations = match self.entries(inode, &state.disk, stream, durable) {
            Ok(creations) => creations,
            Err(why) => return fallback(why),
        };
        state.stream.get_or_insert(self.stream_of(inode.ino));
        let Some(content) = self.record_content(inode.ino, state, &creations, durable)? else {
            return fallback(Fallback::Size);
        };
        let blocks = Record::blocks_needed(&[], &content);
        if blocks > RECORD_BLOCKS_MAX {
            return fallback(Fallback::Size);
        }

        let mut area = self.area(stream).lock();
        if !area.has_space(blocks) {
            return fallback(Fallback::Area);
        }
        let id = RecordId(self.next_record.fetch_add(1, Ordering::Relaxed));
        let header = Header { epoch: self.options.epoch, id, tid, ..Header::default() };
        let mut record = Record { header, dependencies: Vec::new(), changes: content };
        let blocks = area.append(&self.layout, &mut record).into_iter();
        let writes = blocks.map(|(at, block)| BlockWrite {
            at,
            data: Arc::new(block),
            placement: Placement::Fresh,
        });
        let (writes, content) = (writes.collect(), Content::Record);
        let group = WriteGroup { writes, flush, content, follower: None };
        // The stream must get the records in the order of their places, so the area stays locked.
        let submitted = self.storage.submit(stream, group);
        let seq = submitted.map_err(|error| self.fail("writing a file-level record", &error))?;
        self.stat.note_area(stream, &area);
        if area.is_half_full() {
            self.make_commit_due();
        }
        drop(area);
        state.log.on_record(seq, changes);
        for (_, creation) in &creations {
            creation.on_logged(stream.0);
        }
        self.stat.records.fetch_add(1, Ordering::Relaxed);
        Ok(Some(FileCommit::Submitted(stream, seq)))
    }

    /// The entries that a record of an inode must contain, see [`creations`](Self::creations); or
    /// why it can't be in a record.
    fn entries(
        &self,
        inode: &Inode,
        disk: &DiskInode,
        stream: StreamNo,
        durable: Tid,
    ) -> Result<Vec<(Ino, Arc<Creation>)>, Fallback> {
        if !disk.is_regular() {
            return Err(Fallback::Kind);
        }
        if !inode.is_fit(durable) || disk.links != 1 {
            return Err(Fallback::Inode);
        }
        if self.directory_moved.load(Ordering::Acquire) > durable.0
            && !is_bug_planted(Plant::MovesIgnored)
        {
            return Err(Fallback::Moved);
        }
        self.creations(inode, stream, durable)
    }

    /// Whether a file needs a main commit to become durable now.
    pub(super) fn needs_commit(&self, inode: &Inode, data_only: bool) -> bool {
        let durable = self.durable();
        let last = if data_only { inode.data_tid() } else { inode.changed_tid() };
        let state = inode.state.read();
        let stream = self.stream_of(inode.ino);
        last > durable && self.entries(inode, &state.disk, stream, durable).is_err()
    }

    /// The entries that lead to an inode and are neither durable nor in a record of the stream, the
    /// highest directory first.
    fn creations(
        &self,
        inode: &Inode,
        stream: StreamNo,
        durable: Tid,
    ) -> Result<Vec<(Ino, Arc<Creation>)>, Fallback> {
        let mut found = Vec::new();
        let mut seen = BTreeSet::new();
        let mut ino = inode.ino;
        let mut creation = inode.creation.lock().clone();
        while let Some(link) = creation.filter(|link| link.tid > durable) {
            // A directory whose creation is not durable stays in memory.
            // If a bitmap is damaged, a directory may be above itself.
            if !seen.insert(ino) {
                return Err(Fallback::Name);
            }
            let parent = self.inodes.get(link.parent).map_err(|_| Fallback::Name)?;
            if !parent.is_fit(durable) || !parent.unfit_names.lock().is_fit(&link.name, durable) {
                return Err(Fallback::Name);
            }
            creation = parent.creation.lock().clone();
            let next = link.parent;
            found.push((ino, link));
            ino = next;
        }
        if is_bug_planted(Plant::RecordWithoutParents) {
            found.truncate(1);
        }
        found.reverse();
        // An entry in a record is there with all that were above it.
        found.retain(|(_, link)| !link.is_logged_on(stream.0));
        Ok(found)
    }

    /// The changes that a record of an inode must contain; `None`: they are too many.
    fn record_content(
        &self,
        ino: Ino,
        state: &InodeState,
        creations: &[(Ino, Arc<Creation>)],
        durable: Tid,
    ) -> Result<Option<Vec<Change>>, FsError> {
        let mut content = Vec::new();
        let mut entry_of_file = None;
        for (child, creation) in creations {
            let Creation { parent, name, fields, .. } = &**creation;
            let is_file = *child == ino;
            let kind =
                FileKind::of_mode(if is_file { state.disk.mode } else { file_type::DIRECTORY });
            let kind = kind.0;
            let entry = Change::Entry { parent: *parent, child: *child, kind, name: name.clone() };
            if is_file {
                entry_of_file = Some(entry);
            } else {
                content.push(Change::Inode { ino: *child, fields: fields.clone() });
                content.push(entry);
            }
        }
        if entry_of_file.is_none() || !is_bug_planted(Plant::EntryWithoutInode) {
            let fields = Box::new(self.encode_fields(ino, state));
            content.push(Change::Inode { ino, fields });
        }
        content.extend(entry_of_file);
        for (first, end) in state.log.ranges(durable).iter() {
            let mut next = first;
            let hole = |logical, end| Change::Extent {
                ino,
                logical,
                len: end - logical,
                physical: None,
                unwritten: false,
            };
            let mut is_full = false;
            let range = u64::from(first)..u64::from(end);
            let _ = extents::for_each(ino, &state.disk, &self.view(), range, &mut |extent| {
                if extent.logical > next {
                    content.push(hole(next, extent.logical));
                }
                next = extent.logical + extent.len;
                content.push(Change::Extent {
                    ino,
                    logical: extent.logical,
                    len: extent.len,
                    physical: Some(extent.physical),
                    unwritten: extent.unwritten,
                });
                is_full = content.len() > EXTENTS_MAX;
                if is_full { ControlFlow::Break(()) } else { ControlFlow::Continue(()) }
            })?;
            if is_full {
                return Ok(None);
            }
            if next < end {
                content.push(hole(next, end));
            }
        }
        Ok(Some(content))
    }

    /// The fields of an inode for a record: the size is that of the data that was submitted.
    pub(super) fn encode_fields(&self, ino: Ino, state: &InodeState) -> [u8; INODE_BYTES] {
        let mut disk = state.disk.clone();
        if disk.is_regular() {
            disk.size = disk.size.min(state.written_size);
            // Blocks have changes of their own.
            disk.i_block.fill(0);
            disk.sectors = 0;
        }
        disk.xattr_block = BlockNo(0);
        let mut fields = [0; INODE_BYTES];
        disk.encode(&mut fields, &self.layout, ino);
        fields
    }
}

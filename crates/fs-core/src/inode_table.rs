//! The inodes in memory.

use alloc::collections::{BTreeMap, BTreeSet};
use alloc::sync::Arc;
use alloc::vec::Vec;

use crate::block::{BLOCK_BYTES, Ino};
use crate::data_pages::DataPages;
use crate::file_log::{Changes, Creation, FileLog, UnfitNames};
use crate::format::inode::DiskInode;
use crate::pages::Pages;
use crate::probe::{Plant, is_bug_planted};
use crate::storage::{GroupSeq, StreamNo};
use crate::sync::atomic::{AtomicBool, AtomicU64, Ordering, fence};
use crate::sync::{Mutex, RwLock};
use crate::tid::Tid;

/// Under a scheduler threads meet in a shard also if they are few.
const SHARDS: usize = if cfg!(feature = "shuttle") { 2 } else { 64 };

/// An inode in memory.
#[derive(Debug)]
pub(crate) struct Inode {
    pub(crate) ino: Ino,
    /// The references of the kernel: lookups that were not forgotten, and open files.
    refs: AtomicU64,
    /// The last transaction that has changed it.
    changed: AtomicU64,
    /// The last transaction with a change that is needed to read its data.
    data_changed: AtomicU64,
    /// How often it has changed.
    changes: AtomicU64,
    /// How often it has changed so that its data is read differently.
    data_changes: AtomicU64,
    /// It may not be in a file-level record until this transaction is durable.
    unfit: AtomicU64,
    /// It was deleted, and its number is free.
    is_gone: AtomicBool,
    /// It has a barrier that was not submitted yet.
    is_held: AtomicBool,
    /// As `unfit`, for names in this directory.
    pub(crate) unfit_names: Mutex<UnfitNames>,
    /// How it came into being, if that may not be durable yet.
    pub(crate) creation: Mutex<Option<Arc<Creation>>>,
    pub(crate) state: RwLock<InodeState>,
}

/// The state that the lock of an inode protects.
#[derive(Debug)]
pub(crate) struct InodeState {
    /// Its fields. `size` is the size that programs see.
    pub(crate) disk: DiskInode,
    /// The size on the drive: delayed allocation sets it when the data is submitted. Never larger
    /// than `disk.size`.
    pub(crate) written_size: u64,
    /// The pages that are newer than the drive.
    pub(crate) pages: Pages,
    /// The stream of its data, once it was written.
    pub(crate) stream: Option<StreamNo>,
    /// The last group of that stream with its data.
    pub(crate) last_seq: GroupSeq,
    /// Its changes for the next file-level record.
    pub(crate) log: FileLog,
    /// A truncate has begun: blocks behind the end are still to be removed, before the file may
    /// grow over them.
    pub(crate) is_cutting: bool,
}

impl InodeState {
    pub(crate) fn new(disk: DiskInode) -> Self {
        Self {
            written_size: disk.size,
            disk,
            pages: Pages::default(),
            stream: None,
            last_seq: GroupSeq(0),
            log: FileLog::default(),
            is_cutting: false,
        }
    }

    /// Sets the size on the drive if no data behind it waits: the rest of the file is a hole then.
    pub(crate) fn settle_size(&mut self) {
        let first = u32::try_from(self.written_size / BLOCK_BYTES as u64).unwrap_or(u32::MAX);
        if self.disk.is_regular() && !self.pages.is_dirty_from(first) {
            self.written_size = self.disk.size;
        }
    }
}

impl Inode {
    fn new(ino: Ino, disk: DiskInode, pages: Pages) -> Self {
        Self {
            ino,
            refs: AtomicU64::new(0),
            changed: AtomicU64::new(0),
            data_changed: AtomicU64::new(0),
            changes: AtomicU64::new(0),
            data_changes: AtomicU64::new(0),
            unfit: AtomicU64::new(0),
            is_gone: AtomicBool::new(false),
            is_held: AtomicBool::new(false),
            unfit_names: Mutex::default(),
            creation: Mutex::new(None),
            state: RwLock::new(InodeState { pages, ..InodeState::new(disk) }),
        }
    }

    /// Records that transaction `tid` changes the inode; `is_data`: the change is needed to read
    /// its data.
    pub(crate) fn mark_changed(&self, tid: Tid, is_data: bool) {
        self.changed.store(tid.0, Ordering::Release);
        self.changes.fetch_add(1, Ordering::AcqRel);
        if is_data {
            self.data_changed.store(tid.0, Ordering::Release);
            self.data_changes.fetch_add(1, Ordering::AcqRel);
        }
    }

    /// How often the inode has changed.
    pub(crate) fn changes(&self) -> Changes {
        Changes {
            all: self.changes.load(Ordering::Acquire),
            data: self.data_changes.load(Ordering::Acquire),
        }
    }

    /// The inode may not be in a file-level record until transaction `tid` is durable.
    pub(crate) fn make_unfit(&self, tid: Tid) {
        self.unfit.fetch_max(tid.0, Ordering::AcqRel);
    }

    /// Whether it was deleted, and its number is free.
    pub(crate) fn is_gone(&self) -> bool {
        self.is_gone.load(Ordering::Acquire)
    }

    /// Whether a removal of its blocks has begun, and is not finished: it has no name and nothing
    /// refers to it, or a truncate goes step by step.
    pub(crate) fn is_being_removed(&self) -> bool {
        let state = self.state.read();
        let is_deleted = state.disk.links == 0 && !self.is_referenced();
        !self.is_gone() && (is_deleted || state.is_cutting)
    }

    /// It is deleted. The caller has its lock, and the operation is finished.
    pub(crate) fn set_gone(&self) {
        self.is_gone.store(true, Ordering::Release);
    }

    /// Whether it has a barrier that was not submitted yet.
    pub(crate) fn is_held(&self) -> bool {
        self.is_held.load(Ordering::Acquire)
    }

    /// See [`is_held`](Self::is_held).
    pub(crate) fn set_held(&self, is_held: bool) {
        self.is_held.store(is_held, Ordering::Release);
    }

    /// Whether the inode may be in a file-level record.
    pub(crate) fn is_fit(&self, durable: Tid) -> bool {
        self.unfit.load(Ordering::Acquire) <= durable.0 || is_bug_planted(Plant::InodeAlwaysFit)
    }

    /// The last transaction that has changed the inode.
    pub(crate) fn changed_tid(&self) -> Tid {
        Tid(self.changed.load(Ordering::Acquire))
    }

    /// The last transaction with a change that is needed to read the data.
    pub(crate) fn data_tid(&self) -> Tid {
        Tid(self.data_changed.load(Ordering::Acquire))
    }

    /// Adds a reference.
    pub(crate) fn reference(&self) {
        self.refs.fetch_add(1, Ordering::AcqRel);
    }

    /// Removes `count` references. Whether none is left.
    pub(crate) fn unreference(&self, count: u64) -> bool {
        let less = |refs: u64| Some(refs.saturating_sub(count));
        let before = self.refs.fetch_update(Ordering::AcqRel, Ordering::Acquire, less);
        before.is_ok_and(|before| before <= count)
    }

    /// Whether the kernel refers to it.
    pub(crate) fn is_referenced(&self) -> bool {
        self.refs.load(Ordering::Acquire) > 0
    }
}

/// The inodes in memory, by number. A deleted inode stays until its deletion is durable: the inode
/// table on the drive does not show it before.
#[derive(Debug)]
pub(crate) struct InodeTable {
    shards: [Mutex<Shard>; SHARDS],
    data_pages: Arc<DataPages>,
}

/// One shard.
#[derive(Debug)]
struct Shard {
    inodes: BTreeMap<Ino, Arc<Inode>>,
    /// The inodes that may leave the memory some time: the kernel did not refer to them when they
    /// came or were here last. All others are referenced.
    unreferenced: BTreeSet<Ino>,
    /// How many inodes were removed.
    removals: u64,
}

impl Shard {
    const fn new() -> Self {
        Self { inodes: BTreeMap::new(), unreferenced: BTreeSet::new(), removals: 0 }
    }
}

/// A moment in the life of the table, at which an inode was not in it.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Missed(u64);

impl InodeTable {
    pub(crate) fn new() -> Self {
        Self { shards: [const { Mutex::new(Shard::new()) }; SHARDS], data_pages: Arc::default() }
    }

    /// An inode with these fields, which is not in the table yet.
    pub(crate) fn make(&self, ino: Ino, disk: DiskInode) -> Inode {
        Inode::new(ino, disk, Pages::of(ino, &self.data_pages))
    }

    /// The pages of all files.
    pub(crate) fn data_pages(&self) -> &DataPages {
        &self.data_pages
    }

    fn shard(&self, ino: Ino) -> &Mutex<Shard> {
        &self.shards[ino.0 as usize % SHARDS]
    }

    /// An inode in memory; or, for [`insert_read`](Self::insert_read), that it is not there.
    pub(crate) fn get(&self, ino: Ino) -> Result<Arc<Inode>, Missed> {
        let shard = self.shard(ino).lock();
        shard.inodes.get(&ino).cloned().ok_or(Missed(shard.removals))
    }

    /// Adds an inode that was read after it was `missed`, unless one is here already. If others were
    /// removed meanwhile, it does nothing: a newer version of this one may have been among them.
    pub(crate) fn insert_read(&self, inode: Inode, missed: Missed) {
        let mut shard = self.shard(inode.ino).lock();
        if shard.removals == missed.0 {
            shard.unreferenced.insert(inode.ino);
            shard.inodes.entry(inode.ino).or_insert_with(|| Arc::new(inode));
        }
    }

    /// Adds a new inode. One that had the number before is gone.
    pub(crate) fn insert_new(&self, inode: Arc<Inode>) {
        let mut shard = self.shard(inode.ino).lock();
        shard.unreferenced.insert(inode.ino);
        shard.inodes.insert(inode.ino, inode);
    }

    /// Removes an inode that only the table refers to, if it has nothing that is not on the drive:
    /// `durable` is the last durable transaction, and `is_released` is whether the last write of its
    /// data is released. An inode that leaves the memory forgets that write, and the reuse of its
    /// blocks would not wait for it: while a replay is in progress, what is durable is not released.
    pub(crate) fn remove_idle(
        &self,
        ino: Ino,
        durable: Tid,
        is_released: impl Fn(StreamNo, GroupSeq) -> bool,
    ) {
        let mut shard = self.shard(ino).lock();
        let Some(inode) = shard.inodes.get(&ino) else { return };
        // The table has one of the references.
        let is_only_here = Arc::strong_count(inode) == 1;
        // What a thread has done before it dropped its reference is visible from here on.
        fence(Ordering::Acquire);
        let is_idle = is_only_here && !inode.is_referenced() && inode.changed_tid() <= durable && {
            let state = inode.state.read();
            state.pages.is_empty()
                && state.stream.is_none_or(|stream| is_released(stream, state.last_seq))
        };
        if is_idle {
            shard.inodes.remove(&ino);
            shard.unreferenced.remove(&ino);
            shard.removals += 1;
        } else {
            // It is tried again later.
            shard.unreferenced.insert(ino);
        }
    }

    /// The inodes that may be idle. Those to which the kernel refers come again when it does not any
    /// more, by [`remove_idle`](Self::remove_idle).
    pub(crate) fn maybe_idle(&self) -> Vec<Ino> {
        let mut found = Vec::new();
        for shard in &self.shards {
            let Shard { inodes, unreferenced, .. } = &mut *shard.lock();
            unreferenced.retain(|ino| inodes.get(ino).is_some_and(|inode| !inode.is_referenced()));
            found.extend(&*unreferenced);
        }
        found
    }
}

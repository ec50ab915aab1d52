//! Counters of the file system, and how full its journals are.

use alloc::vec::Vec;

use super::Fs;
pub use super::file_commit::Fallback;
use crate::file_journal::area::Area;
use crate::storage::StreamNo;
use crate::sync::atomic::{AtomicU64, Ordering};

/// The counters.
#[derive(Debug, Default)]
pub(super) struct Counters {
    pub(super) commits: AtomicU64,
    pub(super) checkpoint_blocks: AtomicU64,
    pub(super) fsyncs: AtomicU64,
    pub(super) records: AtomicU64,
    pub(super) barriers: AtomicU64,
    /// The blocks of each area that have records which are not obsolete. The areas themselves are
    /// locked while the storage has no space.
    area_used: Vec<AtomicU64>,
    fallbacks: [AtomicU64; Fallback::ALL.len()],
}

impl Counters {
    /// Counts an `fsync` that falls back to a main commit.
    pub(super) fn count_fallback(&self, why: Fallback) {
        self.fallbacks[why as usize].fetch_add(1, Ordering::Relaxed);
    }

    /// There are so many areas, which are empty.
    pub(super) fn set_areas(&mut self, count: usize) {
        self.area_used = (0..count).map(|_| AtomicU64::new(0)).collect();
    }

    /// Records how much of the area of a data stream is in use.
    pub(super) fn note_area(&self, stream: StreamNo, area: &Area) {
        if let Some(used) = self.area_used.get(usize::from(stream.0) - 1) {
            used.store(area.head().0 - area.oldest().0, Ordering::Relaxed);
        }
    }
}

/// The figures of a mounted file system, since the mount.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct FsStat {
    /// Main commits.
    pub commits: u64,
    /// Blocks that checkpoints have written.
    pub checkpoint_blocks: u64,
    /// Calls of `fsync` and `fdatasync`.
    pub fsyncs: u64,
    /// File-level records.
    pub records: u64,
    /// Calls of [`barrier`](Fs::barrier).
    pub barriers: u64,
    /// Calls of `fsync` and `fdatasync` that fell back to a main commit, by reason.
    pub fallbacks: [(Fallback, u64); Fallback::ALL.len()],
}

/// The unwritten data of a mounted file system, and how full its journals are.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct FsLoad {
    /// Pages of files that were not submitted yet.
    pub dirty_pages: u64,
    /// All pages of files in memory: those, and submitted ones that are still kept.
    pub pages: u64,
    /// The number of pages at which a write submits and drops some.
    pub pages_max: u64,
    /// Files with a barrier that were not submitted yet.
    pub held: u64,
    /// The log of the main journal.
    pub journal: Fill,
    /// The areas of file-level records, by stream; none in mode `ext4`.
    pub areas: Vec<(StreamNo, Fill)>,
    /// The errors that the superblock records, since the last check that found no damage.
    pub errors: u64,
}

/// How full a journal is, in blocks.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Fill {
    /// The blocks that are in use.
    pub used: u64,
    /// All blocks.
    pub blocks: u64,
}

impl Fs {
    /// The unwritten data, and how full the journals are. It waits for no storage.
    #[must_use]
    pub fn load(&self) -> FsLoad {
        let journal = {
            let journal = self.journal.lock();
            Fill { used: journal.used() as u64, blocks: journal.capacity() as u64 }
        };
        let blocks = self.division.as_ref().map_or(0, |division| division.area_blocks.into());
        let areas = self.stat.area_used.iter().zip(1..).map(|(used, stream)| {
            (StreamNo(stream), Fill { used: used.load(Ordering::Relaxed), blocks })
        });
        FsLoad {
            dirty_pages: self.inodes.data_pages().dirty() as u64,
            pages: self.inodes.data_pages().count() as u64,
            pages_max: self.options.pages_max as u64,
            held: self.barriers.lock().held(),
            journal,
            areas: areas.collect(),
            errors: self.superblock.lock().error_count().into(),
        }
    }

    /// The figures since the mount.
    #[must_use]
    pub fn stat(&self) -> FsStat {
        FsStat {
            commits: self.stat.commits.load(Ordering::Relaxed),
            checkpoint_blocks: self.stat.checkpoint_blocks.load(Ordering::Relaxed),
            fsyncs: self.stat.fsyncs.load(Ordering::Relaxed),
            records: self.stat.records.load(Ordering::Relaxed),
            barriers: self.stat.barriers.load(Ordering::Relaxed),
            fallbacks: Fallback::ALL
                .map(|why| (why, self.stat.fallbacks[why as usize].load(Ordering::Relaxed))),
        }
    }
}

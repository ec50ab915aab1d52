//! Counters of the file system.

use core::sync::atomic::{AtomicU64, Ordering};

use super::Fs;
pub use super::file_commit::Fallback;

/// The counters.
#[derive(Debug, Default)]
pub(super) struct Counters {
    pub(super) commits: AtomicU64,
    pub(super) checkpoint_blocks: AtomicU64,
    pub(super) fsyncs: AtomicU64,
    pub(super) records: AtomicU64,
    fallbacks: [AtomicU64; Fallback::ALL.len()],
}

impl Counters {
    /// Counts an `fsync` that falls back to a main commit.
    pub(super) fn count_fallback(&self, why: Fallback) {
        self.fallbacks[why as usize].fetch_add(1, Ordering::Relaxed);
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
    /// Calls of `fsync` and `fdatasync` that fell back to a main commit, by reason.
    pub fallbacks: [(Fallback, u64); Fallback::ALL.len()],
}

impl Fs {
    /// The figures since the mount.
    #[must_use]
    pub fn stat(&self) -> FsStat {
        FsStat {
            commits: self.stat.commits.load(Ordering::Relaxed),
            checkpoint_blocks: self.stat.checkpoint_blocks.load(Ordering::Relaxed),
            fsyncs: self.stat.fsyncs.load(Ordering::Relaxed),
            records: self.stat.records.load(Ordering::Relaxed),
            fallbacks: Fallback::ALL
                .map(|why| (why, self.stat.fallbacks[why as usize].load(Ordering::Relaxed))),
        }
    }
}

//! The pages of all files that are in memory: how many, and of which files.

use alloc::collections::BTreeSet;
use alloc::vec::Vec;

use crate::block::Ino;
use crate::sync::Mutex;
use crate::sync::atomic::{AtomicUsize, Ordering};

/// The pages of all files together.
#[derive(Debug, Default)]
pub(crate) struct DataPages {
    /// Dirty pages, and those that were submitted and are still kept.
    all: AtomicUsize,
    dirty: AtomicUsize,
    /// The files with pages.
    files: Mutex<BTreeSet<Ino>>,
}

impl DataPages {
    /// The pages in memory.
    pub(crate) fn count(&self) -> usize {
        self.all.load(Ordering::Relaxed)
    }

    /// Those that were not submitted yet.
    pub(crate) fn dirty(&self) -> usize {
        self.dirty.load(Ordering::Acquire)
    }

    /// The files with pages, by their numbers.
    pub(crate) fn files(&self) -> Vec<Ino> {
        self.files.lock().iter().copied().collect()
    }

    /// A file has `now` pages instead of `before`, and `now_dirty` dirty ones instead of
    /// `before_dirty`. The caller has the lock of the file.
    pub(crate) fn on_change(
        &self,
        ino: Ino,
        (before, before_dirty): (usize, usize),
        (now, now_dirty): (usize, usize),
    ) {
        add(&self.all, before, now);
        add(&self.dirty, before_dirty, now_dirty);
        match (before, now) {
            (0, 1..) => {
                self.files.lock().insert(ino);
            }
            (1.., 0) => {
                self.files.lock().remove(&ino);
            }
            _ => {}
        }
    }
}

fn add(sum: &AtomicUsize, before: usize, now: usize) {
    // A difference below zero wraps, and so does the sum.
    if before != now {
        sum.fetch_add(now.wrapping_sub(before), Ordering::AcqRel);
    }
}

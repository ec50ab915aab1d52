//! The newest errors of a controller, for its Error Information log page (Base §5.16.1.2).
//!
//! A queue gathers the errors of one event, and adds them to the log of its controller at the end of
//! the event: a command without an error costs nothing.

use alloc::collections::VecDeque;
use alloc::vec::Vec;

use riopipe_nvme::log_page::ErrorEntry;

use super::limits::ERROR_ENTRIES;

/// The errors of a controller.
#[derive(Debug, Default)]
pub struct ErrorLog {
    /// The newest first.
    entries: VecDeque<ErrorEntry>,
    /// How many errors there have been.
    count: u64,
}

impl ErrorLog {
    /// Adds errors, the oldest first. `skipped` have happened before them and are not kept.
    pub(super) fn add(&mut self, skipped: u64, errors: &[ErrorEntry]) {
        self.count += skipped;
        for error in errors {
            self.count += 1;
            self.entries.truncate(ERROR_ENTRIES - 1);
            self.entries.push_front(ErrorEntry { count: self.count, ..*error });
        }
    }

    /// How many errors there have been.
    pub(super) const fn count(&self) -> u64 {
        self.count
    }

    /// The log page: the newest errors first, and then entries without an error.
    pub(super) fn page(&self) -> Vec<u8> {
        let mut page: Vec<u8> = self.entries.iter().flat_map(ErrorEntry::encode).collect();
        page.resize(ERROR_ENTRIES * ErrorEntry::LEN, 0);
        page
    }
}

/// The errors of one event on one queue: the newest, as many as the log keeps.
#[derive(Debug, Default)]
pub(super) struct NewErrors {
    entries: VecDeque<ErrorEntry>,
    skipped: u64,
}

impl NewErrors {
    #[inline]
    pub(super) fn is_empty(&self) -> bool {
        self.entries.is_empty()
    }

    /// Notes an error.
    #[cold]
    pub(super) fn push(&mut self, error: ErrorEntry) {
        if self.entries.len() == ERROR_ENTRIES {
            self.entries.pop_front();
            self.skipped += 1;
        }
        self.entries.push_back(error);
    }

    /// The newest error, if it is of this command.
    pub(super) fn last_of(&mut self, cid: u16) -> Option<&mut ErrorEntry> {
        self.entries.back_mut().filter(|error| error.cid == cid)
    }

    /// Takes all errors, the oldest first, and the number of those that were skipped.
    pub(super) fn take(&mut self) -> (u64, Vec<ErrorEntry>) {
        let skipped = core::mem::take(&mut self.skipped);
        (skipped, core::mem::take(&mut self.entries).into())
    }
}

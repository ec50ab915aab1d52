//! The pages of a file that are newer than the drive: dirty, or being written.

use alloc::collections::BTreeMap;
use alloc::collections::btree_map::Entry;
use alloc::sync::Arc;
use alloc::vec::Vec;
use core::ops::Range;

use crate::block::{BLOCK_BYTES, Block};
use crate::storage::GroupSeq;

/// A page of a file.
#[derive(Clone, Debug)]
struct Page {
    data: Arc<Block>,
    state: PageState,
}

/// Whether a page must be written.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum PageState {
    /// It was not submitted yet. `is_reserved`: a block is reserved for it.
    Dirty { is_reserved: bool },
    /// It was submitted with this group of the inode's stream.
    Submitted(GroupSeq),
}

/// The pages of a file that are newer than the drive. Reads use them before the drive.
#[derive(Debug, Default)]
pub(crate) struct Pages {
    pages: BTreeMap<u32, Page>,
    dirty: usize,
}

impl Pages {
    /// The number of dirty pages.
    pub(crate) const fn dirty(&self) -> usize {
        self.dirty
    }

    /// Whether there is no page at all.
    pub(crate) fn is_empty(&self) -> bool {
        self.pages.is_empty()
    }

    /// The content of a page, if it is newer than the drive or still kept.
    pub(crate) fn get(&self, index: u32) -> Option<&Arc<Block>> {
        self.pages.get(&index).map(|page| &page.data)
    }

    /// Whether a page is dirty.
    pub(crate) fn is_dirty(&self, index: u32) -> bool {
        self.pages.get(&index).is_some_and(|page| matches!(page.state, PageState::Dirty { .. }))
    }

    /// Changes a page, which becomes dirty. `old` makes its content if it is not kept.
    pub(crate) fn change<E>(
        &mut self,
        index: u32,
        is_reserved: bool,
        old: impl FnOnce() -> Result<Arc<Block>, E>,
        change: impl FnOnce(&mut Block),
    ) -> Result<(), E> {
        let page = match self.pages.entry(index) {
            Entry::Occupied(page) => page.into_mut(),
            Entry::Vacant(vacant) => {
                vacant.insert(Page { data: old()?, state: PageState::Submitted(GroupSeq(0)) })
            }
        };
        change(Arc::make_mut(&mut page.data));
        if let PageState::Submitted(_) = page.state {
            page.state = PageState::Dirty { is_reserved };
            self.dirty += 1;
        }
        Ok(())
    }

    /// The first run of consecutive dirty pages in `range`, of `max` pages at most.
    pub(crate) fn dirty_run(
        &self,
        range: Range<u32>,
        max: usize,
    ) -> Option<(u32, Vec<Arc<Block>>)> {
        let is_dirty = |page: &Page| matches!(page.state, PageState::Dirty { .. });
        let mut dirty = self.pages.range(range).filter(|(_, page)| is_dirty(page));
        let (&first, page) = dirty.next()?;
        let mut run = alloc::vec![Arc::clone(&page.data)];
        for (&index, page) in dirty {
            if run.len() >= max || index as usize != first as usize + run.len() {
                break;
            }
            run.push(Arc::clone(&page.data));
        }
        Some((first, run))
    }

    /// Whether a page from `first` on is dirty.
    pub(crate) fn is_dirty_from(&self, first: u32) -> bool {
        let is_dirty = |page: &Page| matches!(page.state, PageState::Dirty { .. });
        self.dirty > 0 && self.pages.range(first..).any(|(_, page)| is_dirty(page))
    }

    /// Records that the dirty pages of a range were submitted. Returns how many had a reserved
    /// block.
    pub(crate) fn submitted(&mut self, range: Range<u32>, seq: GroupSeq) -> u64 {
        let mut reserved = 0;
        for page in self.pages.range_mut(range).map(|(_, page)| page) {
            if let PageState::Dirty { is_reserved } = page.state {
                reserved += u64::from(is_reserved);
                self.dirty -= 1;
                page.state = PageState::Submitted(seq);
            }
        }
        reserved
    }

    /// Drops the pages of a range, dirty ones too. Returns how many had a reserved block.
    pub(crate) fn remove(&mut self, range: Range<u32>) -> u64 {
        let indices: Vec<u32> = self.pages.range(range).map(|(&index, _)| index).collect();
        let mut reserved = 0;
        for index in indices {
            if let Some(Page { state: PageState::Dirty { is_reserved }, .. }) =
                self.pages.remove(&index)
            {
                reserved += u64::from(is_reserved);
                self.dirty -= 1;
            }
        }
        reserved
    }

    /// Zeroes the part of a page from byte `from` on, if the page is kept. A kept page that was
    /// submitted becomes dirty.
    pub(crate) fn zero_tail(&mut self, index: u32, from: usize) {
        if self.pages.contains_key(&index) {
            let zeroed = self.change(
                index,
                false,
                || Ok::<_, core::convert::Infallible>(Arc::new([0; BLOCK_BYTES])),
                |block| block[from..].fill(0),
            );
            let Ok(()) = zeroed;
        }
    }

    /// Drops the submitted pages that are complete, except page `keep`: a file that grows byte by
    /// byte needs its last page again.
    pub(crate) fn drop_complete(&mut self, complete: GroupSeq, keep: Option<u32>) {
        self.pages.retain(|&index, page| match page.state {
            PageState::Dirty { .. } => true,
            PageState::Submitted(seq) => seq > complete || Some(index) == keep,
        });
    }

    /// The first page in a range that is in memory.
    pub(crate) fn first_in(&self, range: Range<u32>) -> Option<u32> {
        self.pages.range(range).next().map(|(&index, _)| index)
    }

    /// The dirty pages of a range have blocks now. Returns how many had a reserved one.
    pub(crate) fn unreserve(&mut self, range: Range<u32>) -> u64 {
        let mut count = 0;
        for page in self.pages.range_mut(range).map(|(_, page)| page) {
            if let PageState::Dirty { is_reserved } = &mut page.state {
                count += u64::from(core::mem::take(is_reserved));
            }
        }
        count
    }

    /// The dirty pages of a range that have a reserved block.
    pub(crate) fn reserved_in(&self, range: Range<u32>) -> u32 {
        let is_reserved =
            |page: &&Page| matches!(page.state, PageState::Dirty { is_reserved: true });
        self.pages.range(range).map(|(_, page)| page).filter(is_reserved).count() as u32
    }

    /// The dirty pages that have a reserved block.
    pub(crate) fn reserved(&self) -> u64 {
        let is_reserved =
            |page: &&Page| matches!(page.state, PageState::Dirty { is_reserved: true });
        self.pages.values().filter(is_reserved).count() as u64
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn zeroes() -> Result<Arc<Block>, core::convert::Infallible> {
        Ok(Arc::new([0; BLOCK_BYTES]))
    }

    #[test]
    fn a_page_is_dirty_until_it_is_submitted_and_kept_until_it_is_complete() {
        let mut pages = Pages::default();
        for index in [3, 4, 5, 9] {
            let Ok(()) = pages.change(index, index != 4, zeroes, |block| block[0] = index as u8);
        }
        let (first, run) = pages.dirty_run(0..100, 16).unwrap();
        assert_eq!((first, run.len(), run[2][0]), (3, 3, 5));
        assert_eq!(pages.dirty_run(0..100, 2).unwrap().1.len(), 2);
        assert_eq!(pages.submitted(3..6, GroupSeq(7)), 2, "page 4 has no reserved block");
        assert_eq!((pages.dirty(), pages.dirty_run(0..100, 16).unwrap().0), (1, 9));
        pages.drop_complete(GroupSeq(6), None);
        assert_eq!(pages.get(4).unwrap()[0], 4, "in flight");
        let Ok(()) = pages.change(5, false, zeroes, |block| block[1] = 1);
        assert_eq!(run[2][1], 0, "the submitted content does not change");
        pages.drop_complete(GroupSeq(7), Some(3));
        assert!(pages.get(4).is_none() && pages.get(3).is_some());
        assert_eq!(pages.get(5).unwrap()[..2], [5, 1], "dirty again");
        assert_eq!(pages.remove(0..100), 1);
        assert!(pages.is_empty() && pages.dirty() == 0);
    }
}

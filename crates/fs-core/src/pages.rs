//! The pages of a file that are newer than the drive: dirty, or being written.

use alloc::collections::btree_map::Entry;
use alloc::collections::{BTreeMap, VecDeque};
use alloc::sync::Arc;
use alloc::vec::Vec;
use core::ops::Range;

use crate::block::{BLOCK_BYTES, Block, Ino};
use crate::data_pages::DataPages;
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
    /// No page before this one is dirty.
    dirty_from: u32,
    /// The submitted ranges in the order of their groups. Pages of a range may have changed or gone
    /// since.
    in_flight: VecDeque<(GroupSeq, Range<u32>)>,
    /// The page that was kept although it is complete.
    kept: Option<u32>,
    /// The file, and the pages of all files, which count these, too.
    of: Option<(Ino, Arc<DataPages>)>,
}

impl Drop for Pages {
    fn drop(&mut self) {
        let before = self.counts();
        self.pages.clear();
        self.dirty = 0;
        self.changed_from(before);
    }
}

impl Pages {
    /// No pages, of a file whose pages `all` counts.
    pub(crate) fn of(ino: Ino, all: &Arc<DataPages>) -> Self {
        let mut pages = Self::default();
        pages.of = Some((ino, Arc::clone(all)));
        pages
    }

    /// The number of pages, and of dirty ones.
    fn counts(&self) -> (usize, usize) {
        (self.pages.len(), self.dirty)
    }

    /// The pages were changed since they had these numbers.
    fn changed_from(&self, before: (usize, usize)) {
        if let Some((ino, all)) = &self.of {
            all.on_change(*ino, before, self.counts());
        }
    }

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
        let before = self.counts();
        let page = match self.pages.entry(index) {
            Entry::Occupied(page) => page.into_mut(),
            Entry::Vacant(vacant) => {
                vacant.insert(Page { data: old()?, state: PageState::Submitted(GroupSeq(0)) })
            }
        };
        change(Arc::make_mut(&mut page.data));
        if let PageState::Submitted(_) = page.state {
            page.state = PageState::Dirty { is_reserved };
            self.dirty_from = if self.dirty == 0 { index } else { self.dirty_from.min(index) };
            self.dirty += 1;
        }
        self.changed_from(before);
        Ok(())
    }

    /// The first run of consecutive dirty pages in `range`, of `max` pages at most.
    pub(crate) fn dirty_run(
        &self,
        range: Range<u32>,
        max: usize,
    ) -> Option<(u32, Vec<Arc<Block>>)> {
        let is_dirty = |page: &Page| matches!(page.state, PageState::Dirty { .. });
        let range = range.start.max(self.dirty_from)..range.end.max(self.dirty_from);
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

    /// The dirty pages of a range that have a block already.
    pub(crate) fn dirty_with_block(&self, range: Range<u32>) -> impl Iterator<Item = u32> {
        let has_block = |page: &&Page| page.state == PageState::Dirty { is_reserved: false };
        let pages = self.pages.range(range).filter(move |(_, page)| has_block(page));
        pages.map(|(&index, _)| index)
    }

    /// Whether a page from `first` on is dirty.
    pub(crate) fn is_dirty_from(&self, first: u32) -> bool {
        let is_dirty = |page: &Page| matches!(page.state, PageState::Dirty { .. });
        let first = first.max(self.dirty_from);
        self.dirty > 0 && self.pages.range(first..).any(|(_, page)| is_dirty(page))
    }

    /// Records that the dirty pages of a range were submitted, with a group no earlier than those
    /// before. Returns how many had a reserved block.
    pub(crate) fn submitted(&mut self, range: Range<u32>, seq: GroupSeq) -> u64 {
        let before = self.counts();
        let mut reserved = 0;
        if range.contains(&self.dirty_from) {
            self.dirty_from = range.end;
        }
        self.in_flight.push_back((seq, range.clone()));
        for page in self.pages.range_mut(range).map(|(_, page)| page) {
            if let PageState::Dirty { is_reserved } = page.state {
                reserved += u64::from(is_reserved);
                self.dirty -= 1;
                page.state = PageState::Submitted(seq);
            }
        }
        self.changed_from(before);
        reserved
    }

    /// Drops the pages of a range, dirty ones too. Returns how many had a reserved block.
    pub(crate) fn remove(&mut self, range: Range<u32>) -> u64 {
        let before = self.counts();
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
        self.changed_from(before);
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
        let before = self.counts();
        if self.kept != keep
            && let Some(kept) = self.kept.take()
        {
            self.drop_if_complete(kept, complete);
        }
        while let Some((seq, range)) = self.in_flight.front()
            && *seq <= complete
        {
            let range = range.clone();
            self.in_flight.pop_front();
            for index in range {
                match Some(index) == keep {
                    true => self.kept = keep,
                    false => self.drop_if_complete(index, complete),
                }
            }
        }
        self.changed_from(before);
    }

    fn drop_if_complete(&mut self, index: u32, complete: GroupSeq) {
        if let Entry::Occupied(page) = self.pages.entry(index)
            && matches!(page.get().state, PageState::Submitted(seq) if seq <= complete)
        {
            page.remove();
        }
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
    #[test]
    fn complete_pages_go_and_dirty_ones_are_found_whatever_came_before() {
        const PAGES: u32 = 12;
        for seed in 0..200u64 {
            let mut random = seed;
            let mut next = |below: u32| {
                random = random.wrapping_mul(0x5851_f42d_4c95_7f2d).wrapping_add(0x1405_7b7e_f767);
                ((random >> 40) as u32) % below
            };
            let mut pages = Pages::default();
            // The model: the group of a page, or `None` if it is dirty.
            let mut model: BTreeMap<u32, Option<u64>> = BTreeMap::new();
            let (mut last, mut complete) = (0, 0);
            for _ in 0..200 {
                let at = next(PAGES);
                let end = at + 1 + next(PAGES - at);
                match next(6) {
                    0..=2 => {
                        let Ok(()) = pages.change(at, false, zeroes, |_| ());
                        model.insert(at, None);
                    }
                    3 => {
                        if let Some((first, run)) = pages.dirty_run(at..end, 3) {
                            last += 1;
                            let range = first..first + run.len() as u32;
                            pages.submitted(range.clone(), GroupSeq(last));
                            model.range_mut(range).for_each(|(_, group)| *group = Some(last));
                        }
                    }
                    4 => {
                        complete += u64::from(next((last - complete) as u32 + 1));
                        let keep = (at < PAGES / 2).then_some(at);
                        pages.drop_complete(GroupSeq(complete), keep);
                        model.retain(|&index, group| {
                            Some(index) == keep || group.is_none_or(|group| group > complete)
                        });
                    }
                    _ => {
                        pages.remove(at..end);
                        model.retain(|index, _| !(at..end).contains(index));
                    }
                }
                let kept: Vec<u32> = pages.pages.keys().copied().collect();
                assert_eq!(kept, model.keys().copied().collect::<Vec<_>>(), "seed {seed}");
                for first in 0..PAGES {
                    let dirty = model.range(first..).find(|(_, group)| group.is_none());
                    let found = pages.dirty_run(first..PAGES, 1).map(|(first, _)| first);
                    assert_eq!(found, dirty.map(|(&index, _)| index), "seed {seed}");
                    assert_eq!(pages.is_dirty_from(first), dirty.is_some(), "seed {seed}");
                }
            }
        }
    }
}

//! The contents of the modelled drive's blocks, including those that a power cut may still restore.

use alloc::collections::{BTreeMap, VecDeque};
use alloc::vec;
use alloc::vec::Vec;

use super::PowerCut;
use crate::seed::Seed;

/// The store of a modelled drive's contents, with each block's newest completed content in its
/// place.
pub trait Pages {
    /// A block's content as it is passed around: the number of a page, or a name.
    type Page: Copy;
    /// The result of a read.
    type Buf;
    /// The content of zeroes, which needs no page.
    const ZEROES: Self::Page;

    /// Capacity in blocks.
    fn blocks(&self) -> u64;

    /// Makes `page` the content of block `lba`. Returns the page with the block's old content if
    /// `keep` is set, else a page that is free.
    ///
    /// `None`: no page is left to keep the old content; nothing has changed.
    fn exchange(&mut self, lba: u64, page: Self::Page, keep: bool) -> Option<Self::Page>;

    /// Frees a page; [`ZEROES`](Self::ZEROES) is allowed.
    fn release(&mut self, page: Self::Page);

    /// The current contents of `blocks` blocks from `lba` on.
    fn read(&self, lba: u64, blocks: u64) -> Self::Buf;
}

/// The blocks of a modelled drive. A block's old content is kept until a flush covers the write
/// that replaced it. To lose the write is to restore that content.
pub(super) struct Store<P: Pages> {
    pages: P,
    /// Completed writes that a power cut may lose, oldest first: the block, and its content before.
    losable: VecDeque<(u64, P::Page)>,
    /// How many writes were removed from the front of `losable` since the beginning.
    durable_count: u64,
    /// The most writes in `losable`. When there are more, the oldest becomes durable.
    losable_max: usize,
}

/// A position in the sequence of completed writes.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(super) struct Position(u64);

impl<P: Pages> Store<P> {
    /// At most `losable_max` completed writes may be lost; 0 with power-loss protection.
    pub(super) const fn new(pages: P, losable_max: u64) -> Self {
        let losable_max = losable_max as usize;
        Self { pages, losable: VecDeque::new(), durable_count: 0, losable_max }
    }

    pub(super) const fn pages(&self) -> &P {
        &self.pages
    }

    pub(super) const fn pages_mut(&mut self) -> &mut P {
        &mut self.pages
    }

    /// The contents of a block before each write that may still be lost, oldest first.
    pub(super) fn older(&self, lba: u64) -> impl Iterator<Item = P::Page> {
        self.losable.iter().filter(move |(at, _)| *at == lba).map(|(_, page)| *page)
    }

    /// Completes the write of one block: `page` becomes its content.
    pub(super) fn put(&mut self, lba: u64, page: P::Page) {
        if self.losable_max == 0 {
            return self.replace(lba, page);
        }
        let old = loop {
            if let Some(old) = self.pages.exchange(lba, page, true) {
                break old;
            }
            if self.losable.is_empty() {
                // All pages are in flight: this block's old content can't be kept.
                self.replace(lba, page);
                break P::ZEROES;
            }
            // The oldest writes become durable, as in a drive that must make space.
            self.make_durable(Position(self.durable_count + 1));
        };
        self.losable.push_back((lba, old));
        if self.losable.len() > self.losable_max {
            self.make_durable(Position(self.durable_count + 1));
        }
    }

    /// Replaces a block's content for good.
    fn replace(&mut self, lba: u64, page: P::Page) {
        if let Some(unneeded) = self.pages.exchange(lba, page, false) {
            self.pages.release(unneeded);
        }
    }

    /// The position that a flush submitted now must cover: all writes completed so far (M2).
    pub(super) fn position(&self) -> Position {
        Position(self.durable_count + self.losable.len() as u64)
    }

    /// Makes all writes before `upto` durable.
    pub(super) fn make_durable(&mut self, upto: Position) {
        while self.durable_count < upto.0 {
            // `upto` came from `position`, so there were that many writes; a power cut in between
            // has made all of them durable.
            let Some((_, old)) = self.losable.pop_front() else {
                break;
            };
            self.pages.release(old);
            self.durable_count += 1;
        }
    }

    /// Loses power with `in_flight` blocks in flight.
    ///
    /// Each block keeps one of these: its durable content, any completed write that is not yet
    /// durable, any write in flight. The result is durable.
    pub(super) fn power_cut(&mut self, in_flight: &[(u64, P::Page)], seed: u64) -> PowerCut {
        // All contents that each block may have: the durable one, then completed writes in their
        // order with `Now` as the newest, then those in flight.
        let mut contents: BTreeMap<u64, Vec<Content<P::Page>>> = BTreeMap::new();
        for (lba, old) in self.losable.drain(..) {
            contents.entry(lba).or_default().push(Content::Page(old));
            self.durable_count += 1;
        }
        for list in contents.values_mut() {
            list.push(Content::Now);
        }
        for (lba, page) in in_flight {
            contents.entry(*lba).or_insert_with(|| vec![Content::Now]).push(Content::Page(*page));
        }

        let mut random = Seed::new(seed);
        let severity = Severity::choose(&mut random);
        let mut cut = PowerCut::default();
        for (lba, list) in contents {
            let now = list.iter().position(|c| matches!(c, Content::Now));
            // Every list has a `Now`: pushed in one of the two loops above.
            let now = now.expect("the block's content now is among its contents");
            let kept = severity.pick(&mut random, list.len(), now);
            if kept == now {
                cut.blocks_kept += u64::from(now > 0);
            } else {
                cut.blocks_lost += u64::from(kept < now);
                cut.blocks_landed += u64::from(kept > now);
            }
            for (index, content) in list.into_iter().enumerate() {
                match content {
                    Content::Page(page) if index == kept => self.replace(lba, page),
                    Content::Page(page) => self.pages.release(page),
                    Content::Now => {}
                }
            }
        }
        cut
    }
}

/// One of the contents that a block may have after a power cut.
enum Content<Page> {
    Page(Page),
    /// The newest completed content, in its place.
    Now,
}

/// The overall severity of a power cut. The extremes are chosen often, since they find the most
/// errors.
enum Severity {
    /// Every block loses all that is not durable.
    AllDurableOnly,
    /// Every block keeps its newest completed content.
    AllNow,
    /// Every block has the content of its last write in flight.
    AllLatest,
    /// Each block keeps its newest completed content with this many quarters of probability, else
    /// it gets any of its contents.
    Each { keep_quarters: u64 },
}

impl Severity {
    fn choose(random: &mut Seed) -> Severity {
        match random.below(8) {
            0 => Severity::AllDurableOnly,
            1 => Severity::AllNow,
            2 => Severity::AllLatest,
            _ => Severity::Each { keep_quarters: random.below(4) },
        }
    }

    /// The index, of `count` contents, of the one that stays; `now` is the index of the newest
    /// completed one.
    fn pick(&self, random: &mut Seed, count: usize, now: usize) -> usize {
        match self {
            Severity::AllDurableOnly => 0,
            Severity::AllNow => now,
            Severity::AllLatest => count - 1,
            Severity::Each { keep_quarters } if random.below(4) < *keep_quarters => now,
            Severity::Each { .. } => random.below(count as u64) as usize,
        }
    }
}

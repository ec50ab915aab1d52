//! What the modelled drive holds, what it would still lose, and what it loses.

use alloc::collections::{BTreeMap, VecDeque};
use alloc::vec;
use alloc::vec::Vec;

use super::PowerCut;
use crate::seed::Seed;

/// What holds the blocks of a modelled drive, each block's newest completed content in its place.
pub trait Pages {
    /// A block's content, as it is handed around: the number of a page, or a name.
    type Page: Copy;
    /// What a read brings.
    type Buf;
    /// The content of zeroes; it needs no page.
    const ZEROES: Self::Page;

    /// Capacity in blocks.
    fn blocks(&self) -> u64;

    /// Puts `page` into the place of block `lba`. Returns a page for what was there before, if it
    /// is to be kept (`keep`), else one that is not needed any more.
    ///
    /// `None`: what was there can't be kept for want of pages; nothing has changed.
    fn exchange(&mut self, lba: u64, page: Self::Page, keep: bool) -> Option<Self::Page>;

    /// Takes back a page that is not needed any more ([`ZEROES`](Self::ZEROES) is fine, too).
    fn release(&mut self, page: Self::Page);

    /// What `blocks` blocks from `lba` on hold now.
    fn read(&self, lba: u64, blocks: u64) -> Self::Buf;
}

/// The blocks of a modelled drive. The old content of a block is kept until a flush covers the
/// write that replaced it, so that losing the write is to put it back.
pub(super) struct Store<P: Pages> {
    pages: P,
    /// Completed writes that a power cut may lose, oldest first: which block, and what it held
    /// before.
    losable: VecDeque<(u64, P::Page)>,
    /// How many writes were taken off the front of `losable`, ever.
    settled: u64,
    losable_max: usize,
}

/// A place in the sequence of completed writes.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(super) struct Position(u64);

impl<P: Pages> Store<P> {
    /// At most `losable_max` completed writes may be lost; 0 with power-loss protection.
    pub(super) const fn new(pages: P, losable_max: u64) -> Self {
        let losable_max = losable_max as usize;
        Self { pages, losable: VecDeque::new(), settled: 0, losable_max }
    }

    pub(super) const fn pages(&self) -> &P {
        &self.pages
    }

    pub(super) const fn pages_mut(&mut self) -> &mut P {
        &mut self.pages
    }

    /// What a block held before each write that may still be lost, oldest first.
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
            // The oldest writes are written back: a drive under pressure does no less.
            self.settle(Position(self.settled + 1));
        };
        self.losable.push_back((lba, old));
        if self.losable.len() > self.losable_max {
            self.settle(Position(self.settled + 1));
        }
    }

    /// Puts a page into a block's place for good.
    fn replace(&mut self, lba: u64, page: P::Page) {
        if let Some(unneeded) = self.pages.exchange(lba, page, false) {
            self.pages.release(unneeded);
        }
    }

    /// What a flush that is submitted now must cover: all writes completed so far (M2).
    pub(super) fn position(&self) -> Position {
        Position(self.settled + self.losable.len() as u64)
    }

    /// Makes all writes before `upto` durable.
    pub(super) fn settle(&mut self, upto: Position) {
        while self.settled < upto.0 {
            // `upto` came from `position`, so there are that many; a power cut in between has
            // settled all of them.
            let Some((_, old)) = self.losable.pop_front() else {
                break;
            };
            self.pages.release(old);
            self.settled += 1;
        }
    }

    /// Loses power with `underway` blocks in flight.
    ///
    /// Each block ends up with one of: what was durable, any completed write not yet durable, any
    /// write in flight. What is left is durable.
    pub(super) fn power_cut(&mut self, underway: &[(u64, P::Page)], seed: u64) -> PowerCut {
        // For each block all contents it may have: the durable one first, then completed writes
        // as they completed, the newest being NOW; then those in flight.
        let mut contents: BTreeMap<u64, Vec<Content<P::Page>>> = BTreeMap::new();
        for (lba, old) in self.losable.drain(..) {
            contents.entry(lba).or_default().push(Content::Page(old));
            self.settled += 1;
        }
        for list in contents.values_mut() {
            list.push(Content::Now);
        }
        for (lba, page) in underway {
            contents.entry(*lba).or_insert_with(|| vec![Content::Now]).push(Content::Page(*page));
        }

        let mut random = Seed::new(seed);
        let fate = Fate::choose(&mut random);
        let mut cut = PowerCut::default();
        for (lba, list) in contents {
            let now = list.iter().position(|c| matches!(c, Content::Now));
            // Every list has a `Now`: pushed in one of the two loops above.
            let now = now.expect("the block's content now is among its contents");
            let kept = fate.pick(&mut random, list.len(), now);
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

/// One content that a block may have after a power cut.
enum Content<Page> {
    Page(Page),
    /// The newest completed one, where it is now.
    Now,
}

/// The overall severity of a cut: the extremes are chosen often, since they find most.
enum Fate {
    AllDurableOnly,
    AllNow,
    AllLatest,
    Each { keep_quarters: u64 },
}

impl Fate {
    fn choose(random: &mut Seed) -> Fate {
        match random.below(8) {
            0 => Fate::AllDurableOnly,
            1 => Fate::AllNow,
            2 => Fate::AllLatest,
            _ => Fate::Each { keep_quarters: random.below(4) },
        }
    }

    /// Which of `count` contents stays; `now` is the newest completed one.
    fn pick(&self, random: &mut Seed, count: usize, now: usize) -> usize {
        match self {
            Fate::AllDurableOnly => 0,
            Fate::AllNow => now,
            Fate::AllLatest => count - 1,
            Fate::Each { keep_quarters } if random.below(4) < *keep_quarters => now,
            Fate::Each { .. } => random.below(count as u64) as usize,
        }
    }
}

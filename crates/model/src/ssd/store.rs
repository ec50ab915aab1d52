//! The contents of the modelled drive's blocks, including the old contents that a power cut may
//! restore.
//!
//! ```text
//! a block's contents:  durable ─▶ completed ─▶ … ─▶ newest completed ─▶ in flight ─▶ …
//!                      └─────── in `losable` ──────┘  in its place
//! ```

use alloc::collections::{BTreeMap, VecDeque};
use alloc::vec;
use alloc::vec::Vec;

use riopipe_order::block_device::Cause;

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

    /// Makes `page` the content of block `lba`, as a whole (assumption M1). Returns the page with
    /// the block's old content if `keep_old` is set. Otherwise returns a page that is not needed
    /// any more.
    ///
    /// # Errors
    /// Nothing has changed, and `page` still belongs to the caller.
    fn exchange(
        &mut self,
        lba: u64,
        page: Self::Page,
        keep_old: bool,
    ) -> Result<Self::Page, ExchangeError>;

    /// Frees a page; [`ZEROES`](Self::ZEROES) is allowed.
    fn release(&mut self, page: Self::Page);

    /// The current contents of `blocks` blocks from `lba` on.
    ///
    /// # Errors
    /// The medium has failed.
    fn read(&self, lba: u64, blocks: u64) -> Result<Self::Buf, Cause>;
}

/// The reason why a block's content could not be exchanged.
#[derive(Debug)]
pub enum ExchangeError {
    /// No page is left to keep the old content.
    OutOfPages,
    /// The medium has failed.
    Medium(Cause),
}

impl ExchangeError {
    /// The cause of the failed operation.
    pub(super) fn into_cause(self) -> Cause {
        match self {
            Self::OutOfPages => Cause::Failed("too many writes are in flight".into()),
            Self::Medium(cause) => cause,
        }
    }
}

/// The blocks of a modelled drive. A block's old content is kept until a flush covers the write
/// that replaced the content. A power cut loses the write by restoring the old content.
pub(super) struct Store<P: Pages> {
    pages: P,
    /// Completed writes that a power cut may lose, oldest first.
    losable: VecDeque<LosableWrite<P::Page>>,
    /// Number of writes that were removed from the front of `losable` since the beginning.
    durable_count: u64,
    /// Largest number of writes in `losable`. If there are more, the oldest becomes durable.
    losable_max: usize,
}

/// A completed write of one block that is not durable yet.
struct LosableWrite<Page> {
    lba: u64,
    /// The content of the block before the write.
    old_page: Page,
}

/// A position in the sequence of completed writes.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(super) struct Position(u64);

impl Position {
    /// The position before the version with this number.
    pub(super) const fn before(next_id: u64) -> Self {
        Self(next_id)
    }

    /// The number of the first version behind the position.
    pub(super) const fn next_id(self) -> u64 {
        self.0
    }
}

impl<P: Pages> Store<P> {
    /// A store of which a power cut may lose at most `losable_max` completed writes. With
    /// power-loss protection the number is 0.
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
    pub(super) fn older_contents(&self, lba: u64) -> impl Iterator<Item = P::Page> {
        self.losable.iter().filter(move |write| write.lba == lba).map(|write| write.old_page)
    }

    /// Completes the write of one block: `page` becomes its content.
    ///
    /// # Errors
    /// The medium has failed: the block keeps its content, and the page is released.
    pub(super) fn put(&mut self, lba: u64, page: P::Page) -> Result<(), Cause> {
        if self.losable_max == 0 {
            return self.put_durably(lba, page);
        }
        let old_page = loop {
            match self.pages.exchange(lba, page, true) {
                Ok(old_page) => break old_page,
                Err(ExchangeError::Medium(cause)) => {
                    self.pages.release(page);
                    return Err(cause);
                }
                Err(ExchangeError::OutOfPages) if self.losable.is_empty() => {
                    // All pages are in flight, so the block's old content can't be kept.
                    return self.put_durably(lba, page);
                }
                Err(ExchangeError::OutOfPages) => self.make_oldest_durable(),
            }
        };
        self.losable.push_back(LosableWrite { lba, old_page });
        if self.losable.len() > self.losable_max {
            self.make_oldest_durable();
        }
        Ok(())
    }

    /// Replaces a block's content, so that no power cut restores the old content.
    ///
    /// # Errors
    /// As for [`Store::put`].
    fn put_durably(&mut self, lba: u64, page: P::Page) -> Result<(), Cause> {
        let (unneeded, result) = match self.pages.exchange(lba, page, false) {
            Ok(unneeded) => (unneeded, Ok(())),
            // No page is needed without an old content to keep.
            Err(ExchangeError::OutOfPages) => (page, Ok(())),
            Err(ExchangeError::Medium(cause)) => (page, Err(cause)),
        };
        self.pages.release(unneeded);
        result
    }

    /// Makes the oldest losable write durable. A drive that needs space does the same.
    fn make_oldest_durable(&mut self) {
        self.make_durable(Position(self.durable_count + 1));
    }

    /// The position that a flush covers if it is submitted now: it must make durable all writes
    /// that have completed so far (assumption M2).
    pub(super) fn position(&self) -> Position {
        Position(self.durable_count + self.losable.len() as u64)
    }

    /// Makes all writes before `upto` durable.
    pub(super) fn make_durable(&mut self, upto: Position) {
        while self.durable_count < upto.0 {
            let Some(write) = self.losable.pop_front() else {
                break;
            };
            self.pages.release(write.old_page);
            self.durable_count += 1;
        }
    }

    /// Loses power while the writes of the blocks `in_flight` are in flight.
    ///
    /// Each block keeps one of its contents: the durable one, that of any completed write that is
    /// not durable, or that of any write in flight. The kept content is durable from now on.
    pub(super) fn power_cut(
        &mut self,
        in_flight: &[InFlightBlock<P::Page>],
        seed: u64,
    ) -> PowerCut {
        let mut random = Seed::new(seed);
        let severity = Severity::choose(&mut random);
        let mut cut = PowerCut::default();
        for (lba, contents) in self.possible_contents(in_flight) {
            let newest = contents.iter().position(|content| matches!(content, Content::Newest));
            let newest = newest.expect("`possible_contents` adds the newest content of each block");
            let kept = severity.pick(&mut random, contents.len(), newest);
            if kept == newest {
                cut.blocks_kept += u64::from(newest > 0);
            } else {
                cut.blocks_lost += u64::from(kept < newest);
                cut.blocks_landed += u64::from(kept > newest);
            }
            for (index, content) in contents.into_iter().enumerate() {
                match content {
                    Content::Page(page) if index == kept => {
                        // A block that can't be written keeps its newest content, which a power
                        // cut may leave as well.
                        let _ = self.put_durably(lba, page);
                    }
                    Content::Page(page) => self.pages.release(page),
                    Content::Newest => {}
                }
            }
        }
        cut
    }

    /// Takes out of the store all contents that each block may have after a power cut: the durable
    /// one, then those of completed writes in their order, then those in flight. Blocks that have
    /// only one content are left out.
    fn possible_contents(
        &mut self,
        in_flight: &[InFlightBlock<P::Page>],
    ) -> BTreeMap<u64, Vec<Content<P::Page>>> {
        let mut contents: BTreeMap<u64, Vec<Content<P::Page>>> = BTreeMap::new();
        for write in self.losable.drain(..) {
            contents.entry(write.lba).or_default().push(Content::Page(write.old_page));
            self.durable_count += 1;
        }
        for block_contents in contents.values_mut() {
            block_contents.push(Content::Newest);
        }
        for InFlightBlock { lba, page } in in_flight {
            let block_contents = contents.entry(*lba).or_insert_with(|| vec![Content::Newest]);
            block_contents.push(Content::Page(*page));
        }
        contents
    }
}

/// A block that a write in flight may have written.
pub(super) struct InFlightBlock<Page> {
    pub(super) lba: u64,
    /// The content that the write brings.
    pub(super) page: Page,
}

/// One of the contents that a block may have after a power cut.
enum Content<Page> {
    /// A content that is not in the block's place.
    Page(Page),
    /// The newest completed content, which is in the block's place.
    Newest,
}

/// The severity of a power cut. The extremes are chosen often, since they find the most errors.
pub(super) enum Severity {
    /// Every block gets its durable content.
    AllDurable,
    /// Every block keeps its newest completed content.
    AllNewest,
    /// Every block gets the content of its last write in flight.
    AllInFlight,
    /// Each block keeps its newest completed content with a probability of `keep_quarters / 4`.
    /// Otherwise it gets any of its contents.
    Each { keep_quarters: u64 },
}

impl Severity {
    pub(super) fn choose(random: &mut Seed) -> Severity {
        match random.below(8) {
            0 => Severity::AllDurable,
            1 => Severity::AllNewest,
            2 => Severity::AllInFlight,
            _ => Severity::Each { keep_quarters: random.below(4) },
        }
    }

    /// Picks the content that a block keeps: an index below `count`. `newest` is the index of the
    /// newest completed content.
    fn pick(&self, random: &mut Seed, count: usize, newest: usize) -> usize {
        match self {
            Severity::AllDurable => 0,
            Severity::AllNewest => newest,
            Severity::AllInFlight => count - 1,
            Severity::Each { keep_quarters } if random.below(4) < *keep_quarters => newest,
            Severity::Each { .. } => random.below(count as u64) as usize,
        }
    }
}

#[cfg(test)]
mod tests;

//! A drive with a cache barrier: its cache goes to the medium epoch by epoch.
//!
//! ```text
//! submitted:   a b │ c d e │ f          │: a barrier
//! cache:       {a, b}, {c, d, e}, {f}   written back from the left, within an epoch in any order
//! power cut:   a b   d                  what survives is a prefix of epochs, and any part of the
//!                                       next one
//! ```
//!
//! A write belongs to the epoch that is open when it is submitted, and writes of one epoch complete
//! before those of the next.

use alloc::collections::{BTreeMap, BTreeSet};
use alloc::vec::Vec;
use core::ops::Range;

use riopipe_order::block_device::Cause;

use super::store::Severity;
use super::versions::{VersionId, Versions};
use super::{ExchangeError, Pages, PowerCut};
use crate::probe::{Plant, is_bug_planted};
use crate::seed::Seed;

/// Largest number of failed sequences of epochs that have ranges of their own.
const FAILED_MAX: usize = 16;

/// The number of an epoch; `None` for a write without an order.
pub(super) type Epoch = Option<u64>;

/// The contents of a drive with a cache barrier, and its cache.
pub(super) struct BarrierStore<P: Pages> {
    versions: Versions<P, ()>,
    /// The completed writes that are not on the medium yet, by epoch.
    cache: BTreeMap<Epoch, Vec<CachedBlock>>,
    cached_count: usize,
    /// Largest number of blocks in the cache.
    cached_max: usize,
    /// The epoch of the next ordered write.
    open_epoch: u64,
    /// Time at which the last write of all ended epochs completes.
    ended_due: u64,
    /// Time at which the last write of the open epoch completes.
    open_due: u64,
    /// The epochs behind failed writes, which fail, too: without the failed write there is no order
    /// to keep. There is one range for each sequence of epochs that has failed, oldest first. The
    /// last range has no end as long as no new sequence has begun.
    failed: Vec<Range<u64>>,
    random: Seed,
}

/// A block of the cache.
#[derive(Clone, Copy)]
struct CachedBlock {
    lba: u64,
    id: VersionId,
}

impl<P: Pages> BarrierStore<P> {
    /// A store whose cache has `cached_max` blocks.
    pub(super) const fn new(pages: P, cached_max: u64, seed: u64) -> Self {
        Self {
            versions: Versions::new(pages),
            cache: BTreeMap::new(),
            cached_count: 0,
            cached_max: cached_max as usize,
            open_epoch: 0,
            ended_due: 0,
            open_due: 0,
            failed: Vec::new(),
            random: Seed::new(seed),
        }
    }

    pub(super) const fn versions(&self) -> &Versions<P, ()> {
        &self.versions
    }

    pub(super) const fn pages_mut(&mut self) -> &mut P {
        self.versions.pages_mut()
    }

    /// Takes in an ordered write that would complete at `due`. Returns its epoch, and the time at
    /// which it does complete: not before any write of an earlier epoch.
    pub(super) fn admit(&mut self, barrier: bool, due: u64) -> (Epoch, u64) {
        let epoch = Some(self.open_epoch);
        let due = match is_bug_planted(Plant::BarrierOvertaken) {
            true => due,
            false => due.max(self.ended_due),
        };
        self.open_due = self.open_due.max(due);
        if barrier {
            self.ended_due = self.open_due;
            self.open_epoch += 1;
        }
        (epoch, due)
    }

    /// Begins the sequence of epochs anew, after a failed write has ended it.
    pub(super) fn start(&mut self) {
        let Some(last) = self.failed.last_mut().filter(|last| last.end == u64::MAX) else { return };
        self.open_epoch += 1;
        self.ended_due = self.open_due;
        last.end = self.open_epoch;
        if self.failed.len() > FAILED_MAX {
            // Epochs between the two count as failed, too. Few of them can still be in flight.
            let oldest = self.failed.remove(0);
            self.failed[0].start = oldest.start;
        }
    }

    /// An ordered write was refused, which would have had a place in the open epoch.
    pub(super) fn refuse(&mut self, barrier: bool) {
        self.fail(Some(self.open_epoch));
        if barrier {
            self.ended_due = self.open_due;
            self.open_epoch += 1;
        }
    }

    /// Lets all epochs behind `epoch` fail, in which a write has failed.
    pub(super) fn fail(&mut self, epoch: Epoch) {
        let Some(epoch) = epoch else { return };
        if is_bug_planted(Plant::BarrierFailureForgotten) {
            return;
        }
        // A write of a sequence that has failed before may fail later than it did.
        match self.failed.iter_mut().find(|failed| epoch < failed.end) {
            Some(failed) => failed.start = failed.start.min(epoch + 1),
            None => self.failed.push(epoch + 1..u64::MAX),
        }
    }

    /// Whether an earlier write has failed, so that those of `epoch` must not become durable.
    pub(super) fn is_behind_failure(&self, epoch: Epoch) -> bool {
        epoch.is_some_and(|epoch| self.failed.iter().any(|failed| failed.contains(&epoch)))
    }

    /// Completes the write of one block.
    ///
    /// # Errors
    /// The block keeps its content, and the page is released.
    pub(super) fn put(&mut self, lba: u64, page: P::Page, epoch: Epoch) -> Result<(), Cause> {
        let id = loop {
            match self.versions.put(lba, page, (), |()| false) {
                Ok(id) => break id,
                Err(ExchangeError::OutOfPages) if self.cached_count > 0 => self.write_back_one(),
                Err(error) => {
                    self.versions.pages_mut().release(page);
                    return Err(error.into_cause());
                }
            }
        };
        self.cache.entry(epoch).or_default().push(CachedBlock { lba, id });
        self.cached_count += 1;
        while self.cached_count > self.cached_max {
            self.write_back_one();
        }
        Ok(())
    }

    /// Writes back any block of the oldest epoch, or any one without an order.
    fn write_back_one(&mut self) {
        let oldest = self.cache.keys().find(|epoch| epoch.is_some()).copied();
        let orderless = self.cache.contains_key(&None).then_some(None);
        let epochs: Vec<Epoch> = match is_bug_planted(Plant::BarrierIgnoredByWriteBack) {
            true => self.cache.keys().copied().collect(),
            false => oldest.into_iter().chain(orderless).collect(),
        };
        if epochs.is_empty() {
            return;
        }
        let epoch = epochs[self.random.below(epochs.len() as u64) as usize];
        let Some(blocks) = self.cache.get_mut(&epoch) else { return };
        let block = blocks.swap_remove(self.random.below(blocks.len() as u64) as usize);
        if blocks.is_empty() {
            self.cache.remove(&epoch);
        }
        self.cached_count -= 1;
        self.versions.make_durable(block.lba, block.id);
    }

    /// Makes all writes before the position durable.
    pub(super) fn make_durable(&mut self, before: VersionId) {
        for blocks in self.cache.values_mut() {
            for block in blocks.extract_if(.., |block| block.id < before) {
                self.cached_count -= 1;
                self.versions.make_durable(block.lba, block.id);
            }
        }
        self.cache.retain(|_, blocks| !blocks.is_empty());
    }

    /// Loses power while `in_flight` is in flight. A prefix of the epochs survives, and any blocks
    /// of the next one; of the writes without an order any do.
    pub(super) fn power_cut(
        &mut self,
        in_flight: Vec<InFlightBlock<P::Page>>,
        seed: u64,
    ) -> PowerCut {
        let mut random = Seed::new(seed);
        let severity = Severity::choose(&mut random);
        let in_flight_epochs = in_flight.iter().map(|block| block.epoch);
        let epochs: BTreeSet<Epoch> = self.cache.keys().copied().chain(in_flight_epochs).collect();
        let epochs: Vec<u64> = epochs.into_iter().flatten().collect();
        let torn_epoch = match epochs.is_empty() {
            true => 0,
            false => epochs[random.below(epochs.len() as u64) as usize],
        };
        let mut survives = |epoch: Epoch, is_completed: bool| match severity {
            Severity::AllDurable => false,
            Severity::AllNewest => is_completed,
            Severity::AllInFlight => true,
            Severity::Each { .. } if is_bug_planted(Plant::BarrierIgnoredByRecovery) => {
                random.below(2) == 0
            }
            Severity::Each { .. } => match epoch {
                Some(epoch) if epoch < torn_epoch => true,
                Some(epoch) if epoch > torn_epoch => false,
                Some(_) | None => random.below(2) == 0,
            },
        };
        let newest = self.versions.newest();
        let landed_from = self.versions.next_id();
        let mut survivors = BTreeSet::new();
        for (epoch, blocks) in core::mem::take(&mut self.cache) {
            survivors.extend(blocks.iter().filter(|_| survives(epoch, true)).map(|block| block.id));
        }
        let mut landing = Vec::new();
        for block in in_flight {
            let can_survive = !self.is_behind_failure(block.epoch);
            match can_survive && survives(block.epoch, false) {
                true => landing.push(block),
                false => self.versions.pages_mut().release(block.page),
            }
        }
        // Writes of one epoch land in any order (M4); one without an order lands in any epoch.
        landing.sort_by_cached_key(|block| {
            let any_epoch =
                || epochs.get(random.below(epochs.len().max(1) as u64) as usize).copied();
            (block.epoch.or_else(any_epoch), random.next_u64())
        });
        for block in landing {
            survivors.insert(self.versions.land(block.lba, block.page, (), |()| false));
        }
        self.cached_count = 0;
        (self.ended_due, self.open_due) = (0, 0);
        self.start();
        self.versions.settle(|id| survivors.contains(&id), &newest, landed_from)
    }
}

/// A block that a write in flight may have written.
pub(super) struct InFlightBlock<Page> {
    pub(super) lba: u64,
    pub(super) page: Page,
    pub(super) epoch: Epoch,
}

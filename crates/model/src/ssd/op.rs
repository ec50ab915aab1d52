//! An order-preserving FTL (OPFTL): pages are programmed in any order, and mapped in the order of
//! the epochs of their streams.
//!
//! ```text
//! write ─▶ held back? ─▶ in flight ─▶ cache ─▶ programmed ─▶ mapped
//!          (tables full)              (dirty)  in the list   durable
//!                                              of delayed
//!                                              mappings, until all earlier epochs are mapped
//! ```
//!
//! Only a mapped page survives a power cut. So of each stream a prefix of epochs survives, and any
//! part of the next one.
//!
//! The tables have limits ([`Tables`]). A write for which there is no entry is *held back* until
//! there is one. A write that its streams allow at once needs no entry and is never held back, so
//! the epochs before those that are held back always get through.

use alloc::collections::{BTreeMap, BTreeSet};
use alloc::vec::Vec;

use riopipe_order::block_device::Cause;
use riopipe_order::write_order::{EpochId, EpochWrite};

use super::order::Tables;
use super::store::Severity;
use super::versions::{VersionId, Versions};
use super::{ExchangeError, Pages, PowerCut};
use crate::probe::{Plant, is_bug_planted};
use crate::seed::Seed;
use tracker::{Places, Tracker};

mod tracker;

/// The contents of a drive with an order-preserving FTL, and its tables.
pub(super) struct Ftl<P: Pages> {
    versions: Versions<P, Option<Places>>,
    tables: Tables,
    /// The progress of the pages that are in the cache or programmed.
    arrived: Tracker,
    /// The progress of the pages that are programmed. What is done here is mapped.
    mapped: Tracker,
    /// The completed pages that are not mapped.
    unmapped: BTreeMap<VersionId, UnmappedPage>,
    /// The pages of `unmapped` that are not programmed.
    dirty: Vec<VersionId>,
    /// Largest number of dirty pages.
    dirty_max: usize,
    /// The pages of `unmapped` that wait for pages that have not arrived.
    early: BTreeSet<VersionId>,
    /// Number of entries that the list of delayed mappings has or may need, for pages that are
    /// not mapped.
    entries: u64,
    random: Seed,
}

/// A completed page that is not mapped.
#[derive(Debug, Clone, Copy)]
struct UnmappedPage {
    lba: u64,
    /// `None` for a write without an order.
    places: Option<Places>,
    /// Number of entries that are reserved for it.
    entries: u64,
}

/// A write that was taken in.
#[derive(Debug, Clone, Copy)]
pub(super) struct Ticket {
    places: Places,
    /// Number of entries that are reserved for each of its blocks.
    entries: u64,
}

impl Ticket {
    /// Whether the write belongs to this stream.
    pub(super) fn has(self, stream: u16) -> bool {
        self.places.has(stream)
    }
}

/// The answer to a write that wants to be taken in.
#[derive(Debug)]
pub(super) enum Admission {
    /// It was taken in.
    Admitted(Ticket),
    /// It must wait until pages have been mapped.
    HeldBack,
    /// It fails.
    Refused(Cause),
}

/// The state of a page whose write has completed.
#[derive(Debug)]
pub(super) enum PageState {
    /// It is mapped, and so durable.
    Mapped,
    /// It is not mapped yet.
    Waiting,
    /// It can't be mapped any more.
    Failed(Cause),
}

/// The condition for the begin of a FLUSH.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Awaited {
    /// The predecessors of all pages that had completed at this position.
    Completed(VersionId),
    /// The epochs of the stream before this one.
    Epochs {
        /// The stream.
        stream: u16,
        /// The first epoch that the FLUSH does not cover.
        before: u64,
    },
}

/// Whether a FLUSH can begin.
#[derive(Debug)]
pub(super) enum FlushState {
    /// All that it needs has arrived.
    Ready,
    /// It must wait.
    Waiting,
    /// It can never end.
    Failed(Cause),
}

impl<P: Pages> Ftl<P> {
    /// An FTL whose cache has `dirty_max` blocks.
    pub(super) fn new(pages: P, dirty_max: u64, tables: Tables, seed: u64) -> Self {
        Self {
            versions: Versions::new(pages),
            tables,
            arrived: Tracker::default(),
            mapped: Tracker::default(),
            unmapped: BTreeMap::new(),
            dirty: Vec::new(),
            dirty_max: dirty_max as usize,
            early: BTreeSet::new(),
            entries: 0,
            random: Seed::new(seed),
        }
    }

    pub(super) const fn versions(&self) -> &Versions<P, Option<Places>> {
        &self.versions
    }

    pub(super) const fn pages_mut(&mut self) -> &mut P {
        self.versions.pages_mut()
    }

    /// Takes in a write of `blocks` blocks, if the tables have space for it. `held_back` are the
    /// writes that wait for that, in the order in which they came.
    pub(super) fn admit<'a>(
        &mut self,
        write: EpochWrite,
        blocks: u64,
        held_back: impl Iterator<Item = &'a EpochWrite>,
    ) -> Admission {
        let is_bad = write.epochs().any(|id| id.stream == 0)
            || write.follower.is_some_and(|follower| follower.stream == write.own.stream);
        if is_bad {
            return Admission::Refused(Cause::BadStream);
        }
        let places = match self.mapped.resolve(write) {
            Ok(places) => places,
            Err(ended) => return Admission::Refused(Cause::EpochEnded(ended)),
        };
        if let Some(stream) = self.mapped.failed_before(places) {
            return Admission::Refused(Cause::StreamFailed { stream });
        }
        if self.mapped.active_with(places) > self.tables.streams {
            let streams = self.tables.streams;
            return Admission::Refused(Cause::StreamsFull { streams });
        }
        for place in places.iter() {
            let is_ahead = |next| place.epoch - next >= self.tables.epochs;
            if is_ahead(self.mapped.next(place.stream)) {
                if !is_bug_planted(Plant::ForcedEpoch) {
                    return Admission::HeldBack;
                }
                let mut mapped = Vec::new();
                self.mapped.force(place.stream, &mut mapped);
                self.map_all(mapped);
            }
        }
        // A barrier ends its epoch, so it must not pass a write of the epoch.
        if write.barrier
            && !is_bug_planted(Plant::BarrierPassesHeldWrite)
            && held_back
                .flat_map(EpochWrite::epochs)
                .any(|held| write.epochs().any(|id| id == held))
        {
            return Admission::HeldBack;
        }
        let entries = match self.mapped.allows(places) {
            true => 0,
            false => write.epochs().count() as u64,
        };
        if self.entries + blocks * entries > self.tables.entries
            && entries > 0
            && !is_bug_planted(Plant::ForcedMapping)
        {
            return Admission::HeldBack;
        }
        self.entries += blocks * entries;
        self.arrived.admit(places, blocks, write.barrier);
        self.mapped.admit(places, blocks, write.barrier);
        Admission::Admitted(Ticket { places, entries })
    }

    /// Completes the write of one block. Returns the number of its page, by which
    /// [`state`](Self::state) finds it.
    ///
    /// # Errors
    /// The block keeps its content, and the page is released.
    pub(super) fn put(
        &mut self,
        lba: u64,
        page: P::Page,
        ticket: Option<Ticket>,
    ) -> Result<VersionId, Cause> {
        let places = ticket.map(|ticket| ticket.places);
        let id = loop {
            match self.versions.put(lba, page, places, |later| precedes(places, *later)) {
                Ok(id) => break id,
                Err(ExchangeError::OutOfPages) if !self.dirty.is_empty() => self.program_any(),
                Err(error) => {
                    self.versions.pages_mut().release(page);
                    return Err(error.into_cause());
                }
            }
        };
        let entries = ticket.map_or(0, |ticket| ticket.entries);
        self.unmapped.insert(id, UnmappedPage { lba, places, entries });
        self.dirty.push(id);
        if let Some(places) = places {
            self.early.insert(id);
            let mut in_order = Vec::new();
            self.arrived.ready(id, places, &mut in_order);
            for (id, _) in in_order {
                self.early.remove(&id);
            }
        }
        while self.dirty.len() > self.dirty_max {
            self.program_any();
        }
        Ok(id)
    }

    /// The state of a page that [`put`](Self::put) has returned.
    pub(super) fn state(&self, id: VersionId) -> PageState {
        match self.unmapped.get(&id) {
            None => PageState::Mapped,
            Some(page) => match page.places.and_then(|places| self.mapped.failed_before(places)) {
                None => PageState::Waiting,
                Some(stream) => PageState::Failed(Cause::StreamFailed { stream }),
            },
        }
    }

    /// A write was not taken in: its streams stop there.
    pub(super) fn refuse(&mut self, write: EpochWrite) {
        if is_bug_planted(Plant::FailedWriteForgotten) {
            return;
        }
        for id in write.epochs().filter(|id| id.stream != 0) {
            let epoch = self.mapped.widen(id).unwrap_or(0).max(self.mapped.next(id.stream));
            self.mapped.fail(tracker::Place { stream: id.stream, epoch });
        }
    }

    /// The last `blocks` blocks of a write that was taken in were not written: its streams stop
    /// there.
    pub(super) fn fail(&mut self, ticket: Ticket, blocks: u64) {
        self.entries -= blocks * ticket.entries;
        if is_bug_planted(Plant::FailedWriteForgotten) {
            for id in (0..blocks).map(|block| VersionId::MAX - block) {
                self.arrived.ready(id, ticket.places, &mut Vec::new());
                let mut mapped = Vec::new();
                self.mapped.ready(id, ticket.places, &mut mapped);
                self.map_all(mapped);
            }
            return;
        }
        for place in ticket.places.iter() {
            self.mapped.fail(place);
        }
    }

    /// Whether completed pages are not programmed.
    pub(super) const fn has_dirty(&self) -> bool {
        !self.dirty.is_empty()
    }

    /// Programs any dirty page.
    fn program_any(&mut self) {
        let at = self.random.below(self.dirty.len() as u64) as usize;
        let id = self.dirty.swap_remove(at);
        self.program(id);
    }

    /// Programs a page that was dirty, and maps what is in order now.
    fn program(&mut self, id: VersionId) {
        let Some(page) = self.unmapped.get(&id).copied() else { return };
        let Some(places) = page.places else { return self.map(id) };
        if self.entries > self.tables.entries && !self.mapped.allows(places) {
            // Only the plant gets here: `admit` has reserved an entry.
            return self.map(id);
        }
        let mut mapped = Vec::new();
        self.mapped.ready(id, places, &mut mapped);
        self.map_all(mapped);
    }

    fn map_all(&mut self, mapped: Vec<(VersionId, Places)>) {
        for (id, _) in mapped {
            self.map(id);
        }
    }

    /// Maps a page: it is durable from now on.
    fn map(&mut self, id: VersionId) {
        if let Some(page) = self.unmapped.remove(&id) {
            self.entries -= page.entries;
            self.early.remove(&id);
            self.versions.make_durable(page.lba, id);
        }
    }

    /// The epoch before which a FLUSH of a stream covers everything.
    pub(super) fn awaited(&self, before: EpochId) -> Awaited {
        let next = self.mapped.next(before.stream);
        Awaited::Epochs {
            stream: before.stream,
            before: self.mapped.widen(before).unwrap_or(0).max(next),
        }
    }

    /// Whether a FLUSH can begin.
    pub(super) fn flush_state(&self, awaited: Awaited) -> FlushState {
        match awaited {
            Awaited::Epochs { stream, before } => {
                if self.mapped.failed_at(stream).is_some_and(|failed_at| failed_at < before) {
                    return FlushState::Failed(Cause::StreamFailed { stream });
                }
                let has_arrived = self.arrived.next(stream) >= before;
                match has_arrived || is_bug_planted(Plant::FlushOvertakesEpoch) {
                    true => FlushState::Ready,
                    false => FlushState::Waiting,
                }
            }
            Awaited::Completed(before) => {
                // What is behind a failed write was reported by that.
                let is_awaited = |id: &VersionId| {
                    let places = self.unmapped.get(id).and_then(|page| page.places);
                    places.is_some_and(|places| self.mapped.failed_before(places).is_none())
                };
                match self.early.range(..before).any(is_awaited) {
                    true => FlushState::Waiting,
                    false => FlushState::Ready,
                }
            }
        }
    }

    /// Programs all pages that had completed at a position.
    pub(super) fn program_all(&mut self, before: VersionId) {
        for id in self.dirty.extract_if(.., |id| *id < before).collect::<Vec<_>>() {
            self.program(id);
        }
    }

    /// Begins a stream anew. What is in order becomes durable, the rest is lost. `ended` are the
    /// writes of the stream that were in flight, each with its number of blocks.
    pub(super) fn start(&mut self, first: EpochId, ended: &[(Ticket, u64)]) {
        let stream = first.stream;
        self.program_all(VersionId::MAX);
        let is_lost = |page: &UnmappedPage| page.places.is_some_and(|places| places.has(stream));
        let unmapped = self.unmapped.iter().map(|(id, page)| (*id, *page));
        let lost: Vec<_> = unmapped.filter(|(_, page)| is_lost(page)).collect();
        let lost_places = lost.iter().filter_map(|(_, page)| page.places);
        let ended_places = ended.iter().map(|(ticket, _)| ticket.places);
        // The other streams of these writes stop, too.
        for place in lost_places.chain(ended_places).flat_map(Places::iter) {
            if place.stream != stream {
                self.mapped.fail(place);
            }
        }
        // The newest first, so that each is the uppermost one of its block when it goes.
        for (id, page) in lost.into_iter().rev() {
            self.unmapped.remove(&id);
            self.early.remove(&id);
            self.entries -= page.entries;
            self.versions.lose(page.lba, id);
        }
        self.entries -= ended.iter().map(|(ticket, blocks)| ticket.entries * blocks).sum::<u64>();
        self.arrived.start(first);
        self.mapped.start(first);
    }

    /// The streams that were used.
    pub(super) fn used_streams(&self) -> Vec<u16> {
        self.mapped.used()
    }

    /// Forgets all streams, which hold nothing back any more. They begin with the epoch `first`.
    pub(super) fn reset(&mut self, first: u16) {
        self.arrived.reset(first);
        self.mapped.reset(first);
    }

    /// Loses power while `in_flight` is in flight. Any of the pages that are not programmed may
    /// have been programmed at the last moment. Then what is in order survives.
    pub(super) fn power_cut(
        &mut self,
        mut in_flight: Vec<InFlightBlock<P::Page>>,
        seed: u64,
    ) -> PowerCut {
        let mut random = Seed::new(seed);
        let severity = Severity::choose(&mut random);
        let newest = self.versions.newest();
        let landed_from = self.versions.next_id();
        let mut is_programmed = |is_completed: bool| match severity {
            Severity::AllDurable => false,
            Severity::AllNewest => is_completed,
            Severity::AllInFlight => true,
            Severity::Each { keep_quarters } if is_completed => random.below(4) <= keep_quarters,
            Severity::Each { .. } => random.below(2) == 0,
        };
        let mut programmed: Vec<_> =
            self.dirty.iter().copied().filter(|_| is_programmed(true)).collect();
        let lost = in_flight.extract_if(.., |_| !is_programmed(false)).collect::<Vec<_>>();
        for block in lost {
            self.versions.pages_mut().release(block.page);
        }
        // Writes in flight land in any order (M4).
        in_flight.sort_by_cached_key(|_| random.next_u64());
        for block in in_flight {
            let places = block.ticket.map(|ticket| ticket.places);
            let is_later = |later: &Option<Places>| precedes(places, *later);
            let id = self.versions.land(block.lba, block.page, places, is_later);
            self.unmapped.insert(id, UnmappedPage { lba: block.lba, places, entries: 0 });
            programmed.push(id);
        }
        let mut mapped = Vec::new();
        let mut survivors = BTreeSet::new();
        for id in programmed {
            match self.unmapped.get(&id).and_then(|page| page.places) {
                Some(places) => self.mapped.ready(id, places, &mut mapped),
                None => _ = survivors.insert(id),
            }
        }
        survivors.extend(mapped.into_iter().map(|(id, _)| id));
        let cut = self.versions.settle(|id| survivors.contains(&id), &newest, landed_from);
        self.arrived = Tracker::default();
        self.mapped = Tracker::default();
        self.unmapped.clear();
        self.dirty.clear();
        self.early.clear();
        self.entries = 0;
        cut
    }
}

/// Whether a write must be durable before another one, so that it goes beneath that in a block.
fn precedes(write: Option<Places>, other: Option<Places>) -> bool {
    matches!((write, other), (Some(write), Some(other)) if write.precedes(other))
}

/// A block that a write in flight may have written.
pub(super) struct InFlightBlock<Page> {
    pub(super) lba: u64,
    pub(super) page: Page,
    pub(super) ticket: Option<Ticket>,
}

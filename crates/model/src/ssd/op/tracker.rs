//! The epochs of the streams of an order-preserving FTL, and the rule that keeps their order.
//!
//! An epoch is *active* until its barrier arrives, then *ended*. When all pages of an ended epoch
//! are done, the next epoch of the stream may follow. A page whose epoch may not follow yet waits
//! in a list of the epoch. A page of a dual-stream write has an epoch in two streams, waits in two
//! lists as *siblings*, and follows when both streams allow it.
//!
//! ```text
//! epoch:     0 mapped   1 ended, some pages done   2 active      3 …
//!                       ▲ next                     waiting: p q  waiting: r
//! ```

use alloc::collections::{BTreeMap, VecDeque};
use alloc::vec;
use alloc::vec::Vec;

use riopipe_order::write_order::{EpochId, EpochWrite};

use crate::probe::{Plant, is_bug_planted};
use crate::ssd::versions::VersionId;

/// An epoch, by its number that never wraps.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(in crate::ssd) struct Place {
    pub(super) stream: u16,
    pub(super) epoch: u64,
}

/// The one or two epochs of a write.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(in crate::ssd) struct Places {
    own: Place,
    follower: Option<Place>,
}

impl Places {
    /// The epochs, that of the write's own stream first.
    pub(super) fn iter(self) -> impl Iterator<Item = Place> {
        [Some(self.own), self.follower].into_iter().flatten()
    }

    /// Whether the write has an epoch in this stream.
    pub(super) fn has(self, stream: u16) -> bool {
        self.iter().any(|place| place.stream == stream)
    }

    /// Whether a stream orders this write before `other`.
    pub(super) fn precedes(self, other: Places) -> bool {
        let mut pairs = self.iter().flat_map(|place| other.iter().map(move |other| (place, other)));
        pairs.any(|(place, other)| place.stream == other.stream && place.epoch < other.epoch)
    }
}

/// The progress of all streams: of the pages that have arrived, or of those that are programmed.
#[derive(Debug, Default)]
pub(super) struct Tracker {
    /// All streams that were ever used. Those without epochs are idle.
    streams: BTreeMap<u16, Stream>,
    /// Number of streams that have epochs.
    active: usize,
    /// The number of lists in which each page waits.
    lists: BTreeMap<VersionId, usize>,
    /// The epoch with which streams begin that were not begun by a command.
    first: u64,
}

#[derive(Debug, Default)]
struct Stream {
    /// The first epoch that is not done. All before it are.
    next: u64,
    /// The epochs from `next` on.
    epochs: VecDeque<Epoch>,
    /// The first epoch in which a write has failed. Later ones can't follow any more.
    failed_at: Option<u64>,
}

#[derive(Debug, Default)]
struct Epoch {
    /// The barrier has arrived.
    ended: bool,
    /// Number of pages that were admitted and are not done.
    missing: u64,
    /// The pages that are ready and wait for this epoch to be the next one.
    waiting: BTreeMap<VersionId, Places>,
    /// The epochs that dual-stream writes of this epoch have in other streams.
    siblings: Vec<Place>,
}

impl Tracker {
    /// The key of a stream.
    fn key(stream: u16) -> u16 {
        match is_bug_planted(Plant::StreamsShareAPlace) {
            true => stream & 0x7f,
            false => stream,
        }
    }

    fn stream(&self, stream: u16) -> Option<&Stream> {
        self.streams.get(&Self::key(stream))
    }

    /// The number of the first epoch of a stream that is not done.
    pub(super) fn next(&self, stream: u16) -> u64 {
        self.stream(stream).map_or(self.first, |stream| stream.next)
    }

    /// The first epoch of a stream in which a write has failed.
    pub(super) fn failed_at(&self, stream: u16) -> Option<u64> {
        self.stream(stream)?.failed_at
    }

    /// The number of an epoch that a command names: the one with these lower bits that is nearest
    /// to the next epoch. `None`: it is before epoch 0.
    pub(super) fn widen(&self, id: EpochId) -> Option<u64> {
        let next = self.next(id.stream);
        if is_bug_planted(Plant::EpochNotWidened) {
            return Some(next & !0xffff | u64::from(id.epoch));
        }
        let distance = id.epoch.wrapping_sub(next as u16) as i16;
        next.checked_add_signed(distance.into())
    }

    /// The epochs of a write.
    ///
    /// # Errors
    /// The epoch that has ended, so that no write may follow in it.
    pub(super) fn resolve(&self, write: EpochWrite) -> Result<Places, EpochId> {
        let place = |id: EpochId| {
            let epoch = self.widen(id).filter(|epoch| *epoch >= self.next(id.stream)).ok_or(id)?;
            let place = Place { stream: id.stream, epoch };
            match self.epoch(place).is_some_and(|epoch| epoch.ended) {
                true => Err(id),
                false => Ok(place),
            }
        };
        let follower = write.follower.map(place).transpose()?;
        Ok(Places { own: place(write.own)?, follower })
    }

    fn epoch(&self, place: Place) -> Option<&Epoch> {
        let stream = self.stream(place.stream)?;
        stream.epochs.get(place.epoch.checked_sub(stream.next)? as usize)
    }

    fn epoch_mut(&mut self, place: Place) -> Option<&mut Epoch> {
        let stream = self.streams.get_mut(&Self::key(place.stream))?;
        stream.epochs.get_mut(place.epoch.checked_sub(stream.next)? as usize)
    }

    /// Whether all streams of a write allow it now.
    pub(super) fn allows(&self, places: Places) -> bool {
        let mut allowed = places.iter().map(|place| place.epoch <= self.next(place.stream));
        match is_bug_planted(Plant::DualMappedByOneStream) {
            true => allowed.any(|allowed| allowed),
            false => allowed.all(|allowed| allowed),
        }
    }

    /// Number of streams that would have epochs after a write with these epochs.
    pub(super) fn active_with(&self, places: Places) -> usize {
        let is_idle =
            |place: &Place| self.stream(place.stream).is_none_or(|stream| stream.epochs.is_empty());
        self.active + places.iter().filter(is_idle).count()
    }

    /// Counts the pages of a write. A barrier ends its epochs.
    pub(super) fn admit(&mut self, places: Places, pages: u64, barrier: bool) {
        for place in places.iter() {
            let first = self.first;
            let stream = self.streams.entry(Self::key(place.stream));
            let stream = stream.or_insert_with(|| Stream { next: first, ..Stream::default() });
            self.active += usize::from(stream.epochs.is_empty());
            let index = (place.epoch - stream.next) as usize;
            if stream.epochs.len() <= index {
                stream.epochs.resize_with(index + 1, Epoch::default);
            }
            let epoch = &mut stream.epochs[index];
            epoch.missing += pages;
            epoch.ended |= barrier;
            epoch.siblings.extend(places.iter().filter(|sibling| *sibling != place));
        }
    }

    /// A page is ready. Appends to `done` all pages that their streams allow now.
    pub(super) fn ready(
        &mut self,
        id: VersionId,
        places: Places,
        done: &mut Vec<(VersionId, Places)>,
    ) {
        let mut ready = vec![(id, places)];
        while let Some((id, places)) = ready.pop() {
            if !self.allows(places) {
                self.wait(id, places);
                continue;
            }
            done.push((id, places));
            for place in places.iter() {
                if let Some(epoch) = self.epoch_mut(place) {
                    epoch.missing = epoch.missing.saturating_sub(1);
                }
            }
            for place in places.iter() {
                self.advance(place.stream, &mut ready);
            }
        }
    }

    /// Puts a page into the list of each epoch that is not the next one of its stream.
    fn wait(&mut self, id: VersionId, places: Places) {
        let only_own = is_bug_planted(Plant::SiblingForgotten);
        for place in places.iter().take(if only_own { 1 } else { 2 }) {
            if place.epoch > self.next(place.stream)
                && let Some(epoch) = self.epoch_mut(place)
            {
                epoch.waiting.insert(id, places);
                *self.lists.entry(id).or_default() += 1;
            }
        }
    }

    /// Goes on to the next epochs of a stream whose pages are done. Appends the pages that have
    /// waited for them to `ready`.
    fn advance(&mut self, stream: u16, ready: &mut Vec<(VersionId, Places)>) {
        let Some(stream) = self.streams.get_mut(&Self::key(stream)) else { return };
        let lists = &mut self.lists;
        // A page is ready when it has left its last list, so the later one of its streams decides.
        let mut has_left_last_list = |id: &VersionId| match lists.get_mut(id) {
            Some(count) if *count > 1 => {
                *count -= 1;
                is_bug_planted(Plant::SiblingsMappedTwice)
            }
            _ => lists.remove(id).is_some(),
        };
        let ended_early = is_bug_planted(Plant::EpochEndedEarly);
        while let Some(epoch) = stream.epochs.front()
            && (epoch.ended || ended_early)
            && epoch.missing == 0
            && stream.failed_at.is_none_or(|failed_at| failed_at > stream.next)
        {
            stream.epochs.pop_front();
            stream.next += 1;
            self.active -= usize::from(stream.epochs.is_empty());
            if let Some(next) = stream.epochs.front_mut() {
                let waiting = core::mem::take(&mut next.waiting).into_iter();
                ready.extend(waiting.filter(|(id, _)| has_left_last_list(id)));
            }
        }
    }

    /// Goes on to the next epoch of a stream although this one is not done. This is what the
    /// published firmware does when its table is full, and only a plant does it here.
    pub(super) fn force(&mut self, stream: u16, done: &mut Vec<(VersionId, Places)>) {
        let mut ready = Vec::new();
        if let Some(stream) = self.streams.get_mut(&Self::key(stream)) {
            stream.epochs.pop_front();
            stream.next += 1;
            if stream.epochs.is_empty() {
                stream.epochs.push_back(Epoch::default());
            }
            ready.extend(stream.epochs.front_mut().map(|next| core::mem::take(&mut next.waiting)));
        }
        for (id, places) in ready.into_iter().flatten() {
            self.ready(id, places, done);
        }
    }

    /// A write of this epoch has failed. The stream stops behind the epoch, and so does each
    /// stream in which a write that can't follow any more has a sibling.
    pub(super) fn fail(&mut self, place: Place) {
        let mut failed = vec![place];
        while let Some(Place { stream, epoch }) = failed.pop() {
            let first = self.first;
            let stream = self.streams.entry(Self::key(stream));
            let stream = stream.or_insert_with(|| Stream { next: first, ..Stream::default() });
            if stream.failed_at.is_some_and(|failed_at| failed_at <= epoch) {
                continue;
            }
            stream.failed_at = Some(epoch);
            let behind = (stream.next..).zip(&stream.epochs).filter(|(number, _)| *number > epoch);
            failed.extend(behind.flat_map(|(_, epoch)| epoch.siblings.iter().copied()));
        }
    }

    /// Whether a write can't follow any more, because an earlier one of a stream has failed.
    pub(super) fn failed_before(&self, places: Places) -> Option<u16> {
        let is_behind = |place: &Place| {
            self.failed_at(place.stream).is_some_and(|failed_at| place.epoch > failed_at)
        };
        places.iter().find(is_behind).map(|place| place.stream)
    }

    /// The streams that were used.
    pub(super) fn used(&self) -> Vec<u16> {
        self.streams.keys().copied().collect()
    }

    /// Forgets all streams. They begin with the epoch `first`.
    pub(super) fn reset(&mut self, first: u16) {
        *self = Self { first: first.into(), ..Self::default() };
    }

    /// Begins a stream anew. Its epochs are forgotten, also as siblings: a failure of another stream
    /// reaches the old epochs only.
    pub(super) fn start(&mut self, first: EpochId) {
        let key = Self::key(first.stream);
        for epoch in self.streams.values_mut().flat_map(|stream| &mut stream.epochs) {
            epoch.siblings.retain(|sibling| Self::key(sibling.stream) != key);
        }
        let next = u64::from(first.epoch);
        let begun = Stream { next, epochs: VecDeque::new(), failed_at: None };
        let Some(old) = self.streams.insert(key, begun) else { return };
        self.active -= usize::from(!old.epochs.is_empty());
        for id in old.epochs.iter().flat_map(|epoch| epoch.waiting.keys()) {
            self.lists.remove(id);
        }
    }
}

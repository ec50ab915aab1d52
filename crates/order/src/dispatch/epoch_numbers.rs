//! The numbers of the epochs of all streams on one drive with the order of epochs (OPIMQ).
//!
//! A stream takes the next number when an epoch begins. A *dual-stream write* belongs to an epoch of
//! another stream, too, which *follows* it. Such an epoch takes the next number of both streams at
//! once, and its writes have the other stream's epoch for themselves. So no stream waits for another
//! one before it sends, and two such epochs have the same order in each stream that they share: the
//! drive never waits for each of them before the other.
//!
//! ```text
//! stream A:   A0        A1 ┐                A2
//! stream B:        B0   B1 ┘   B2
//!                       one epoch of dual-stream writes, with two numbers
//! ```

use alloc::collections::{BTreeMap, VecDeque};

use crate::probe::{self, DispatchPlant, Plant};
use crate::write_order::EpochId;

/// The most epochs from the oldest with a command in flight to the newest. A command has the lower
/// 16 bits of an epoch only. A drive finds the epoch by its distance from the one that is mapped
/// next, which must stay below 2^15. The tables of the drive take their part of that.
pub const EPOCHS_MAX: usize = 1 << 13;

/// The numbers of one epoch.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Taken {
    /// The stream that writes, and its epoch.
    pub own: EpochId,
    /// The stream that follows, and its epoch.
    pub follower: Option<EpochId>,
}

/// The streams of a host on one drive.
#[derive(Clone, Debug, Default)]
pub struct EpochNumbers {
    streams: BTreeMap<u16, Numbers>,
}

/// The numbers of one stream.
#[derive(Clone, Debug, Default)]
struct Numbers {
    /// The number of the next epoch.
    next: u64,
    /// The last epoch that belongs to a write of another stream.
    last_followed: Option<u64>,
    /// A FLUSH of the stream has ended that covers all epochs before this one.
    flushed_before: u64,
    /// Whether the drive's target knows the stream: it has answered a command of it.
    is_known: bool,
    in_flight: EpochsInFlight,
}

/// The epochs with commands in flight.
#[derive(Clone, Debug, Default)]
struct EpochsInFlight {
    /// The lower 16 bits of the number of the first epoch in `counts`.
    first: u16,
    /// The number of commands in flight of each epoch. A FLUSH counts in the epoch before which it
    /// covers everything.
    counts: VecDeque<u32>,
}

impl EpochsInFlight {
    fn index(&self, epoch: u16) -> usize {
        usize::from(epoch.wrapping_sub(self.first))
    }

    fn has_space(&self, epoch: u16) -> bool {
        self.counts.is_empty() || self.index(epoch) < EPOCHS_MAX
    }

    fn add(&mut self, epoch: u16, count: u32) {
        if self.counts.is_empty() {
            self.first = epoch;
        }
        let index = self.index(epoch);
        if self.counts.len() <= index {
            self.counts.resize(index + 1, 0);
        }
        self.counts[index] += count;
    }

    fn remove(&mut self, epoch: u16) {
        let index = self.index(epoch);
        if let Some(count) = self.counts.get_mut(index) {
            *count = count.saturating_sub(1);
        }
        while self.counts.front() == Some(&0) {
            self.counts.pop_front();
            self.first = self.first.wrapping_add(1);
        }
    }
}

impl EpochNumbers {
    /// Begins a stream with this epoch.
    pub fn start(&mut self, stream: u16, first_epoch: u64) {
        let numbers =
            Numbers { next: first_epoch, flushed_before: first_epoch, ..Numbers::default() };
        self.streams.insert(stream, numbers);
    }

    /// Forgets a stream that is over.
    pub fn end(&mut self, stream: u16) {
        self.streams.remove(&stream);
    }

    /// The number of the next epoch of a stream. A FLUSH of the epochs before it covers all epochs
    /// that have begun.
    #[must_use]
    pub fn next_epoch(&self, stream: u16) -> EpochId {
        let epoch = self.streams.get(&stream).map_or(0, |numbers| numbers.next) as u16;
        EpochId { stream, epoch }
    }

    /// Whether this many epochs of a stream may begin now, one after another.
    #[must_use]
    pub fn has_space(&self, stream: u16, epochs: usize) -> bool {
        let ahead = epochs.saturating_sub(1) as u16;
        self.streams.get(&stream).is_some_and(|numbers| {
            epochs < EPOCHS_MAX
                && numbers.in_flight.has_space((numbers.next as u16).wrapping_add(ahead))
        })
    }

    /// Whether the target of the drive knows a stream. A stream begins with the first command of
    /// its own there, so no other stream may name it before that.
    #[must_use]
    pub fn is_known(&self, stream: u16) -> bool {
        self.streams.get(&stream).is_some_and(|numbers| numbers.is_known)
    }

    /// Begins an epoch of `stream` with this number of writes. With a follower, all of them are
    /// dual-stream writes. `None`: one of the two streams is not there, or the stream follows itself.
    pub fn take(&mut self, stream: u16, follower: Option<u16>, writes: u32) -> Option<Taken> {
        let is_there = |of: u16| self.streams.contains_key(&of);
        if !is_there(stream) || follower.is_some_and(|it| it == stream || !is_there(it)) {
            return None;
        }
        let follower = follower.map(|it| self.take_one(it, writes, true));
        Some(Taken { own: self.take_one(stream, writes, false), follower })
    }

    fn take_one(&mut self, stream: u16, writes: u32, is_followed: bool) -> EpochId {
        let numbers = self.streams.entry(stream).or_default();
        let (number, epoch) = (numbers.next, numbers.next as u16);
        let is_shared = probe::is_dispatch_bug_planted(DispatchPlant::FollowerNotCounted)
            || probe::is_bug_planted(Plant::OpimqFollowerNotBehind);
        if !is_followed || !is_shared {
            numbers.next += 1;
        }
        if is_followed {
            numbers.last_followed = Some(number);
        }
        numbers.in_flight.add(epoch, writes);
        EpochId { stream, epoch }
    }

    /// Notes a FLUSH of the stream that is sent now, and returns the epoch before which it covers
    /// everything.
    pub fn begin_flush(&mut self, stream: u16) -> EpochId {
        let numbers = self.streams.entry(stream).or_default();
        let epoch = numbers.next as u16;
        numbers.in_flight.add(epoch, 1);
        EpochId { stream, epoch }
    }

    /// Notes that a command of an epoch of `stream` has ended well.
    pub fn on_done(&mut self, epoch: EpochId) {
        if let Some(numbers) = self.streams.get_mut(&epoch.stream) {
            numbers.in_flight.remove(epoch.epoch);
        }
    }

    /// Notes that the target has answered a command of the stream itself.
    pub fn on_answer(&mut self, stream: u16) {
        if let Some(numbers) = self.streams.get_mut(&stream) {
            numbers.is_known = true;
        }
    }

    /// Notes that a FLUSH of the epochs before this one has ended well.
    pub fn on_flushed(&mut self, before: EpochId) {
        let Some(numbers) = self.streams.get_mut(&before.stream) else { return };
        // At most EPOCHS_MAX epochs have begun since the FLUSH was sent.
        let since = (numbers.next as u16).wrapping_sub(before.epoch);
        let before = numbers.next - u64::from(since);
        numbers.flushed_before = numbers.flushed_before.max(before);
    }

    /// Whether the stream has followed a write of another stream that none of its own FLUSHes
    /// covers.
    #[must_use]
    pub fn follows_unflushed(&self, stream: u16) -> bool {
        self.streams.get(&stream).is_some_and(|numbers| {
            numbers.last_followed.is_some_and(|last| last >= numbers.flushed_before)
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn id(stream: u16, epoch: u16) -> EpochId {
        EpochId { stream, epoch }
    }

    #[test]
    fn dual_stream_writes_have_an_epoch_of_each_stream_for_themselves() {
        let mut numbers = EpochNumbers::default();
        numbers.start(1, 0);
        numbers.start(9, 65_535);
        let alone = Taken { own: id(9, 65_535), follower: None };
        assert_eq!(numbers.take(9, None, 1), Some(alone));
        let dual = Taken { own: id(1, 0), follower: Some(id(9, 0)) };
        assert_eq!(numbers.take(1, Some(9), 2), Some(dual), "epochs wrap");
        assert_eq!((numbers.next_epoch(1), numbers.next_epoch(9)), (id(1, 1), id(9, 1)));
        for (stream, follower) in [(0, None), (1, Some(1)), (1, Some(0)), (1, Some(8)), (7, None)] {
            assert_eq!(numbers.take(stream, follower, 1), None);
        }
        assert_eq!(numbers.next_epoch(1), id(1, 1), "nothing was taken");
    }

    #[test]
    fn a_stream_has_flushed_what_it_follows_once_a_later_flush_has_ended() {
        let mut numbers = EpochNumbers::default();
        numbers.start(1, 0);
        numbers.start(9, 70_000);
        let early = numbers.begin_flush(9);
        numbers.take(1, Some(9), 1).unwrap();
        assert!(numbers.follows_unflushed(9) && !numbers.follows_unflushed(1));
        numbers.on_flushed(early);
        assert!(numbers.follows_unflushed(9), "the FLUSH was sent before the write");
        let late = numbers.begin_flush(9);
        numbers.on_flushed(late);
        assert!(!numbers.follows_unflushed(9));
    }

    #[test]
    fn epochs_run_ahead_of_the_oldest_in_flight_by_a_bound_also_those_of_a_follower() {
        let mut numbers = EpochNumbers::default();
        numbers.start(1, 65_000);
        numbers.start(9, 0);
        let first = numbers.take(1, Some(9), 1).unwrap();
        let mut count = 0;
        while numbers.has_space(9, 1) {
            let taken = numbers.take(9, None, 1).unwrap();
            numbers.on_done(taken.own);
            count += 1;
        }
        assert_eq!(count, EPOCHS_MAX - 1);
        assert!(numbers.has_space(1, 100) && !numbers.has_space(1, EPOCHS_MAX));
        numbers.on_done(first.follower.unwrap());
        assert!(numbers.has_space(9, 1));
    }
}

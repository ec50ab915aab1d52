//! The list of a stream's waiters: other threads and futures, each with the mark that it waits for.
//!
//! A waiter enters the list, and then reads the marks once more. The thread that drives the stream
//! publishes the marks first, and then takes the waiters whose marks are reached out of the list.
//! So one of the two sees a mark that is published while a waiter enters.
//!
//! A stream that is reopened begins another [`StreamIncarnation`], and uses the seqs of lost groups
//! again. So a wait belongs to the incarnation in which it was begun: a later group with the same
//! seq never ends it (promise P2).

use alloc::collections::BTreeMap;
use alloc::vec::Vec;

use riopipe_order::attribute::Seq;
use riopipe_order::engine::Marks;
use riopipe_order::probe::{self, Plant};

/// A mark of a stream that a waiter can wait for.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Mark {
    /// All groups up to it are complete on all targets.
    Complete,
    /// All groups up to it are durable.
    Durable,
}

impl Mark {
    /// The value of this mark.
    #[must_use]
    pub const fn of(self, marks: Marks) -> Seq {
        match self {
            Self::Complete => marks.complete,
            Self::Durable => marks.durable,
        }
    }
}

/// The state of a stream that a waiter reads at one moment.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct MarksSnapshot {
    /// The marks that were published last.
    pub marks: Marks,
    /// Whether the marks cannot move any more, because the stream has failed, was closed or was
    /// dropped.
    pub ended: bool,
}

/// The number of an incarnation of a stream. The first begins when the stream is opened, and
/// another begins at each reopening.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct StreamIncarnation(pub u64);

/// How an attempt to wait begins.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Entry {
    /// The mark is reached: there is nothing to wait for.
    Reached,
    /// The mark is not reached, and will not be.
    Ended,
    /// The wait belongs to an earlier incarnation of the stream, and its group was lost.
    Lost,
    /// The waiter is in the list.
    Waits {
        /// Its place, for [`Waitlist::renew`] and [`Waitlist::remove`].
        place: Place,
        /// Whether it is the first waiter. The background driver must then be woken, so that it
        /// takes the stream over.
        is_first: bool,
    },
}

/// The place of a waiter in the list.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct Place {
    /// The group that the waiter waits for.
    seq: Seq,
    /// A number by which waiters for the same group differ.
    token: u64,
}

/// The waiters of a stream, by mark and seq. A `W` wakes one waiter.
#[derive(Debug)]
pub struct Waitlist<W> {
    /// The waiters for each mark.
    complete: BTreeMap<Place, W>,
    durable: BTreeMap<Place, W>,
    /// The token of the last waiter.
    last_token: u64,
    /// The group after which each incarnation but the first has begun.
    starts: Vec<Seq>,
}

impl<W> Default for Waitlist<W> {
    fn default() -> Self {
        Self::new()
    }
}

impl<W> Waitlist<W> {
    /// A list without waiters.
    #[must_use]
    pub const fn new() -> Self {
        Self {
            complete: BTreeMap::new(),
            durable: BTreeMap::new(),
            last_token: 0,
            starts: Vec::new(),
        }
    }

    /// Whether there are no waiters.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.complete.is_empty() && self.durable.is_empty()
    }

    /// The last group whose durability a waiter waits for.
    #[must_use]
    pub fn wanted(&self) -> Option<Seq> {
        self.durable.last_key_value().map(|(place, _)| place.seq)
    }

    /// As [`wanted`](Self::wanted), but only among the groups up to `last`, the last submitted one.
    #[must_use]
    pub fn wanted_up_to(&self, last: Seq) -> Option<Seq> {
        let (first, last) =
            (Place { seq: Seq::ZERO, token: 0 }, Place { seq: last, token: u64::MAX });
        self.durable.range(first..=last).next_back().map(|(place, _)| place.seq)
    }

    /// The present incarnation of the stream.
    #[must_use]
    pub const fn incarnation(&self) -> StreamIncarnation {
        StreamIncarnation(self.starts.len() as u64)
    }

    /// Begins another incarnation after the stream has been reopened. It continues after group
    /// `start`.
    pub fn restart(&mut self, start: Seq) {
        self.starts.push(start);
    }

    /// Whether a group of `incarnation` was kept in all later incarnations, and so is durable;
    /// `None` if there is no later incarnation.
    fn was_kept(&self, incarnation: StreamIncarnation, seq: Seq) -> Option<bool> {
        let since = self.starts.get(incarnation.0 as usize..).filter(|since| !since.is_empty())?;
        Some(since.iter().all(|start| seq <= *start))
    }

    /// Adds a waiter, which waits in this incarnation until `mark` is at group `seq`. `snapshot`
    /// reads the stream's state. It is called when the waiter is in the list, and not before.
    pub fn enter(
        &mut self,
        mark: Mark,
        seq: Seq,
        incarnation: StreamIncarnation,
        waiter: W,
        snapshot: impl FnOnce() -> MarksSnapshot,
    ) -> Entry {
        if let Some(kept) = self.was_kept(incarnation, seq) {
            return if kept { Entry::Reached } else { Entry::Lost };
        }
        let is_first = self.is_empty();
        self.last_token += 1;
        let place = Place { seq, token: self.last_token };
        self.list(mark).insert(place, waiter);
        if probe::is_bug_planted(Plant::P8WaiterNotChecked) {
            return Entry::Waits { place, is_first };
        }
        let snapshot = snapshot();
        if mark.of(snapshot.marks) >= seq {
            self.remove(mark, place);
            Entry::Reached
        } else if snapshot.ended {
            self.remove(mark, place);
            Entry::Ended
        } else {
            Entry::Waits { place, is_first }
        }
    }

    /// Replaces the `W` of a waiter. Returns the earlier one.
    ///
    /// # Errors
    /// The new `W`, if the waiter is not in the list any more.
    pub fn renew(&mut self, mark: Mark, place: Place, waiter: W) -> Result<W, W> {
        match self.list(mark).get_mut(&place) {
            Some(current) => Ok(core::mem::replace(current, waiter)),
            None => Err(waiter),
        }
    }

    /// Removes a waiter from the list. Returns its `W`, if it was in the list.
    pub fn remove(&mut self, mark: Mark, place: Place) -> Option<W> {
        self.list(mark).remove(&place)
    }

    /// Takes the waiters whose marks are reached out of the list, after the marks have moved.
    pub fn take_reached(&mut self, marks: Marks) -> Vec<W> {
        let mut reached = Vec::new();
        for mark in [Mark::Complete, Mark::Durable] {
            let (list, at) = (self.list(mark), mark.of(marks));
            while let Some(first) = list.first_entry().filter(|first| first.key().seq <= at) {
                reached.push(first.remove());
            }
        }
        reached
    }

    /// Takes all waiters out of the list, because the marks cannot move any more.
    pub fn take_all(&mut self) -> Vec<W> {
        if probe::is_bug_planted(Plant::P8WaiterNotWoken) {
            return Vec::new();
        }
        let complete = core::mem::take(&mut self.complete).into_values();
        complete.chain(core::mem::take(&mut self.durable).into_values()).collect()
    }

    fn list(&mut self, mark: Mark) -> &mut BTreeMap<Place, W> {
        match mark {
            Mark::Complete => &mut self.complete,
            Mark::Durable => &mut self.durable,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn at(complete: u64, durable: u64) -> Marks {
        Marks { complete: Seq(complete), durable: Seq(durable) }
    }

    fn goes_on(complete: u64, durable: u64) -> impl FnOnce() -> MarksSnapshot {
        move || MarksSnapshot { marks: at(complete, durable), ended: false }
    }

    fn waits(list: &mut Waitlist<u32>, mark: Mark, seq: u64, waiter: u32) -> (Place, bool) {
        match list.enter(mark, Seq(seq), StreamIncarnation(0), waiter, goes_on(0, 0)) {
            Entry::Waits { place, is_first } => (place, is_first),
            entry => panic!("{entry:?}"),
        }
    }

    #[test]
    fn p8_waiters_whose_marks_are_reached_are_taken_and_no_others() {
        let mut list = Waitlist::new();
        assert!(waits(&mut list, Mark::Complete, 3, 1).1, "the first one");
        for (mark, seq, waiter) in
            [(Mark::Durable, 2, 2), (Mark::Durable, 3, 3), (Mark::Durable, 2, 4)]
        {
            assert!(!waits(&mut list, mark, seq, waiter).1);
        }
        assert_eq!(list.wanted(), Some(Seq(3)));
        assert_eq!(
            [1, 2, 3, 9].map(|last| list.wanted_up_to(Seq(last)).map_or(0, |seq| seq.0)),
            [0, 2, 3, 3]
        );
        assert_eq!(list.take_reached(at(2, 1)), []);
        assert_eq!(list.take_reached(at(3, 2)), [1, 2, 4]);
        assert_eq!(list.take_reached(at(3, 2)), [], "each once");
        assert_eq!(list.take_reached(at(9, 9)), [3]);
        assert!(list.is_empty());
        assert_eq!(list.wanted(), None);
    }

    #[test]
    fn p8_a_waiter_reads_the_marks_again_once_it_is_in_the_list() {
        let mut list = Waitlist::new();
        assert_eq!(
            list.enter(Mark::Durable, Seq(2), StreamIncarnation(0), 1, goes_on(2, 2)),
            Entry::Reached
        );
        assert_eq!(
            list.enter(Mark::Complete, Seq(2), StreamIncarnation(0), 1, goes_on(2, 1)),
            Entry::Reached
        );
        let over = || MarksSnapshot { marks: at(2, 1), ended: true };
        assert_eq!(
            list.enter(Mark::Complete, Seq(2), StreamIncarnation(0), 1, over),
            Entry::Reached,
            "the mark is reached"
        );
        assert_eq!(list.enter(Mark::Durable, Seq(2), StreamIncarnation(0), 1, over), Entry::Ended);
        assert!(list.is_empty());
        let Entry::Waits { .. } =
            list.enter(Mark::Durable, Seq(2), StreamIncarnation(0), 1, goes_on(2, 1))
        else {
            panic!("it waits");
        };
    }

    #[test]
    fn p2_no_group_of_a_later_incarnation_ends_a_wait() {
        let mut list = Waitlist::new();
        let first = list.incarnation();
        list.restart(Seq(5));
        let second = list.incarnation();
        list.restart(Seq(7));
        let mut enter =
            |incarnation, seq| list.enter(Mark::Durable, Seq(seq), incarnation, 1, goes_on(9, 9));
        assert_eq!(enter(first, 5), Entry::Reached, "it was kept");
        assert_eq!(enter(first, 6), Entry::Lost, "the second incarnation's is another group");
        assert_eq!(enter(second, 7), Entry::Reached);
        assert_eq!(enter(second, 8), Entry::Lost);
        assert!(list.is_empty());
        let third = list.incarnation();
        assert_eq!(list.enter(Mark::Durable, Seq(9), third, 1, goes_on(9, 9)), Entry::Reached);
        let entry = list.enter(Mark::Durable, Seq(9), third, 1, goes_on(9, 8));
        assert!(matches!(entry, Entry::Waits { .. }));
    }

    #[test]
    fn p8_all_waiters_are_taken_when_the_marks_move_no_more() {
        let mut list = Waitlist::new();
        waits(&mut list, Mark::Durable, 9, 1);
        waits(&mut list, Mark::Complete, 4, 2);
        assert_eq!(list.take_all(), [2, 1]);
        assert!(list.is_empty());
    }

    #[test]
    fn a_waiter_may_be_renewed_or_leave() {
        let mut list = Waitlist::new();
        let (first, _) = waits(&mut list, Mark::Durable, 5, 1);
        let (second, _) = waits(&mut list, Mark::Durable, 5, 2);
        assert_eq!(list.renew(Mark::Durable, first, 7), Ok(1));
        assert_eq!(list.renew(Mark::Complete, first, 8), Err(8));
        assert_eq!(list.remove(Mark::Durable, second), Some(2));
        assert_eq!(list.take_reached(at(5, 5)), [7]);
        assert_eq!(list.renew(Mark::Durable, first, 9), Err(9), "it was taken");
        assert_eq!(list.remove(Mark::Durable, first), None);
        assert!(waits(&mut list, Mark::Complete, 6, 3).1, "the first one again");
    }
}

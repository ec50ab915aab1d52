//! The state of one stream of a device.

use alloc::collections::{BTreeSet, VecDeque};
use alloc::vec::Vec;

use riopipe_order::attribute::Seq;
use riopipe_order::engine::Marks;
use riopipe_order::probe::{DevicePlant, is_device_bug_planted};

use super::{Content, Part, RequestNo, Work};

/// A stream of the device: the parts that wait for it, and the requests that wait for its marks.
#[derive(Debug)]
pub(super) struct StreamState<D> {
    /// The parts that are not submitted, in order.
    pub(super) waiting: VecDeque<Part<D>>,
    /// The stream has no space.
    pub(super) is_full: bool,
    /// The part that the caller is submitting.
    handed: Option<Handed>,
    /// The requests that wait until a group is complete, once for each part.
    awaiting_complete: BTreeSet<(Seq, RequestNo)>,
    /// The requests that wait until a group is durable: once for each part of a write with FUA, and the
    /// flushes.
    awaiting_durable: BTreeSet<(Seq, RequestNo)>,
    /// The groups that are not released, with their blocks, in order.
    unreleased: VecDeque<(Seq, Handed)>,
    /// The number of discards among them.
    unreleased_zeroes: usize,
    marks: Marks,
    /// The group up to which all must become durable.
    durable_wanted: Seq,
    /// The group up to which the caller has been asked to make all durable.
    durable_asked: Seq,
    /// The last group of a write with FUA that was submitted without a flush of its own.
    last_shared: Seq,
    /// After a failure: the blocks with a change that was with the stream and not released, from and up
    /// to, without the last.
    in_doubt: Vec<(u64, u64)>,
}

/// The result of new marks.
#[derive(Debug)]
pub(super) struct Reached {
    /// The requests that wait for the marks no longer, once for each part.
    pub(super) requests: Vec<RequestNo>,
    /// Whether the first waiting part was waiting for a release, and need not wait any more; or whether a
    /// flush has ended for which writes with FUA have waited. No further mark may move then, so nothing
    /// else would wake the stream.
    pub(super) is_unblocked: bool,
}

/// A part that is with the stream.
#[derive(Clone, Copy, Debug)]
pub(super) struct Handed {
    request: RequestNo,
    lba: u64,
    blocks: u32,
    is_fua: bool,
    /// It is submitted as a durable group.
    is_durable: bool,
    is_zero: bool,
}

impl<D> StreamState<D> {
    /// A stream whose groups up to `last` are durable and released.
    pub(super) const fn new(last: Seq) -> Self {
        Self {
            waiting: VecDeque::new(),
            is_full: false,
            handed: None,
            awaiting_complete: BTreeSet::new(),
            awaiting_durable: BTreeSet::new(),
            unreleased: VecDeque::new(),
            unreleased_zeroes: 0,
            marks: Marks { complete: last, durable: last },
            durable_wanted: last,
            durable_asked: last,
            last_shared: last,
            in_doubt: Vec::new(),
        }
    }

    /// Whether any of these blocks is in doubt after a failure.
    pub(super) fn is_in_doubt(&self, lba: u64, blocks: u64) -> bool {
        let end = lba.saturating_add(blocks);
        self.in_doubt.iter().any(|(from, to)| *from < end && lba < *to)
    }

    /// See [`PlainDevice::next_work`](super::PlainDevice::next_work).
    pub(super) fn next_work(&mut self) -> Option<Work<D>> {
        debug_assert!(self.handed.is_none(), "the part before is submitted or came back");
        if let Some(needed) = self.release_needed() {
            self.durable_wanted = self.durable_wanted.max(needed);
        }
        if self.must_flush_shared() {
            self.durable_wanted = self.durable_wanted.max(self.last_shared);
        }
        // This comes before the parts: a flush must not wait until there is space for them, because it
        // may be what makes space.
        if self.durable_wanted > self.durable_asked.max(self.marks.durable) {
            self.durable_asked = self.durable_wanted;
            return Some(Work::MakeDurable(self.durable_wanted));
        }
        if self.is_full || self.release_needed().is_some() {
            return None;
        }
        let mut part = self.waiting.pop_front()?;
        // Writes with FUA share a flush: that of the last one in the queue, or the one behind a flush that
        // is in flight.
        let shares = self.is_flushing() || self.waiting.front().is_some_and(|next| next.is_fua);
        part.is_durable = part.is_fua && !shares;
        let Part { request, lba, blocks, is_fua, is_durable, .. } = part;
        let is_zero = matches!(part.content, Content::Zeroes);
        self.handed = Some(Handed { request, lba, blocks, is_fua, is_durable, is_zero });
        Some(Work::Submit(part))
    }

    /// Whether a flush that was asked for, or one of a group, has not ended.
    fn is_flushing(&self) -> bool {
        self.durable_asked > self.marks.durable
    }

    /// Whether the groups of writes with FUA that have no flush of their own must get one now: none is in
    /// flight, and the next part has none.
    fn must_flush_shared(&self) -> bool {
        let has_next = || {
            let next = self.waiting.front().filter(|part| part.is_fua && !self.is_full);
            next.is_some() && self.release_needed().is_none()
        };
        self.last_shared > self.durable_asked.max(self.marks.durable)
            && !self.is_flushing()
            && !has_next()
    }

    /// The group that must be released before the first waiting part may be submitted. It is the last
    /// one with any of the part's blocks whose content an undo of a discard would destroy:
    ///
    /// - If the part is a discard, any group counts (trap T11).
    /// - If the part is a write, a discard counts. A crash of this process alone would undo the discard,
    ///   and the write with it, although the write was complete and its host lives on.
    fn release_needed(&self) -> Option<Seq> {
        let part = self.waiting.front()?;
        let is_zero = matches!(part.content, Content::Zeroes);
        if match is_zero {
            true => is_device_bug_planted(DevicePlant::ZeroesNotAwaitRelease),
            false => is_device_bug_planted(DevicePlant::WriteNotAwaitsZeroes),
        } {
            return None;
        }
        if !is_zero && self.unreleased_zeroes == 0 {
            // There may be thousands of writes, and most writes come here.
            return None;
        }
        let end = part.lba + u64::from(part.blocks);
        let overlaps =
            |other: &Handed| other.lba < end && part.lba < other.lba + u64::from(other.blocks);
        let mut newest_first = self.unreleased.iter().rev();
        let last = newest_first.find(|(_, other)| (is_zero || other.is_zero) && overlaps(other));
        last.map(|(seq, _)| *seq)
    }

    /// See [`PlainDevice::on_submitted`](super::PlainDevice::on_submitted).
    pub(super) fn on_submitted(&mut self, seq: Seq) {
        // Nothing is left of it if the device has failed meanwhile.
        let Some(handed) = self.handed.take() else { return };
        if handed.is_durable {
            // The group itself asks for a flush.
            self.durable_asked = self.durable_asked.max(seq);
        } else if handed.is_fua && !is_device_bug_planted(DevicePlant::FuaNotFlushed) {
            self.last_shared = seq;
        }
        match handed.is_fua && !is_device_bug_planted(DevicePlant::FuaWhenComplete) {
            true => {
                let is_early = is_device_bug_planted(DevicePlant::FuaSharesEarlierFlush);
                let needed = if is_early { self.durable_asked } else { seq };
                self.awaiting_durable.insert((needed, handed.request));
            }
            false => {
                self.awaiting_complete.insert((seq, handed.request));
            }
        }
        self.unreleased_zeroes += usize::from(handed.is_zero);
        self.unreleased.push_back((seq, handed));
    }

    /// See [`PlainDevice::on_no_space`](super::PlainDevice::on_no_space).
    pub(super) fn on_no_space(&mut self, part: Part<D>) {
        self.handed = None;
        match is_device_bug_planted(DevicePlant::FullPartToBack) {
            true => self.waiting.push_back(part),
            false => self.waiting.push_front(part),
        }
        self.is_full = true;
    }

    /// Lets a flush wait until all groups are durable that are complete now. Returns whether any is not.
    pub(super) fn await_durable_of_complete(&mut self, no: RequestNo) -> bool {
        let mut complete = self.marks.complete;
        if is_device_bug_planted(DevicePlant::FlushOneLess) {
            complete = Seq(complete.0.saturating_sub(1));
        }
        if self.marks.durable >= complete {
            return false;
        }
        self.durable_wanted = self.durable_wanted.max(complete);
        self.awaiting_durable.insert((complete, no));
        true
    }

    /// Takes the marks of the stream.
    pub(super) fn on_marks(&mut self, marks: Marks, released: Seq) -> Reached {
        self.marks = marks;
        let mut has_released = false;
        while let Some((seq, handed)) = self.unreleased.front()
            && *seq <= released
        {
            self.unreleased_zeroes -= usize::from(handed.is_zero);
            self.unreleased.pop_front();
            has_released = true;
        }
        let is_unblocked = self.must_flush_shared()
            || has_released && !self.waiting.is_empty() && self.release_needed().is_none();
        let mut requests = take_up_to(&mut self.awaiting_complete, marks.complete);
        requests.extend(take_up_to(&mut self.awaiting_durable, marks.durable));
        Reached { requests, is_unblocked }
    }

    /// Forgets all parts and requests. The blocks of those that the stream had are in doubt.
    pub(super) fn clear(&mut self) {
        let with_stream = self.unreleased.iter().map(|(_, handed)| handed).chain(&self.handed);
        self.in_doubt.extend(with_stream.map(|it| (it.lba, it.lba + u64::from(it.blocks))));
        self.waiting.clear();
        self.handed = None;
        self.awaiting_complete.clear();
        self.awaiting_durable.clear();
        self.unreleased.clear();
        self.unreleased_zeroes = 0;
    }
}

/// Takes out the requests that wait for groups up to `seq`.
fn take_up_to(awaiting: &mut BTreeSet<(Seq, RequestNo)>, seq: Seq) -> Vec<RequestNo> {
    let mut reached = Vec::new();
    while let Some(&(first, no)) = awaiting.first()
        && first <= seq
    {
        awaiting.pop_first();
        reached.push(no);
    }
    reached
}

//! In-order completion: the window of groups between the released mark and the last one admitted.

use alloc::collections::VecDeque;

use super::Marks;
use crate::attribute::Seq;
use crate::probe::{self, Plant};

#[derive(Clone, Copy, Debug)]
struct GroupState {
    /// How many of its requests have not ended.
    remaining: u32,
    /// The group covers all before it: when all groups up to this one are complete, they are durable.
    covers: bool,
    /// The group is the engine's own flush. No caller waits for it, so the complete mark that the
    /// caller sees passes it; the durable mark does not.
    internal: bool,
    /// Payload bytes held.
    bytes: u64,
}

/// The groups of a stream that are not yet forgotten.
#[derive(Debug)]
pub(super) struct Window {
    /// All groups up to this one are forgotten. `groups[0]` is the next one.
    forgotten: Seq,
    groups: VecDeque<GroupState>,
    /// All groups up to this one are complete. The engine's own flush does not hold it up.
    complete: Seq,
    /// All groups up to this one are durable.
    durable: Seq,
    /// All groups up to this one were reported complete to the caller.
    delivered: Seq,
    /// The payload bytes of all groups in the window.
    kept_bytes: u64,
    /// The last complete group that covers all before it.
    covered: Seq,
    /// The internal group that has not ended. There is one at most.
    internal: Option<Seq>,
    /// The first failed group: nothing at or after this seq is ever reported complete (P6).
    failed_from: Option<Seq>,
    /// The oldest group with a request that is being replayed. Its data does not become durable
    /// before the replay ends, and is not released (T4).
    replayed: Option<Seq>,
    /// Groups before this seq, and no others, may become durable. It is the least of `failed_from`,
    /// `replayed` and `internal`. The window keeps it, because every completion needs it.
    durable_before: Seq,
    /// Groups before this seq, and no others, may be released. It is the least of `failed_from` and
    /// `replayed`.
    released_before: Seq,
    /// Complete on all servers, durable and delivered (T1).
    released: Seq,
}

impl Window {
    pub(super) fn new(start: Seq) -> Self {
        Self {
            forgotten: start,
            groups: VecDeque::new(),
            complete: start,
            durable: start,
            delivered: start,
            kept_bytes: 0,
            covered: start,
            internal: None,
            failed_from: None,
            replayed: None,
            durable_before: Seq(u64::MAX),
            released_before: Seq(u64::MAX),
            released: start,
        }
    }

    /// Computes the two bounds again, after `failed_from`, `replayed` or `internal` has changed.
    fn update_bounds(&mut self) {
        let least = |of: &[Option<Seq>]| of.iter().flatten().min().copied();
        let released = least(&[self.failed_from, self.replayed]);
        self.released_before = released.unwrap_or(Seq(u64::MAX));
        self.durable_before = least(&[released, self.internal]).unwrap_or(Seq(u64::MAX));
    }

    #[inline]
    pub(super) fn last(&self) -> Seq {
        self.forgotten.plus(self.groups.len() as u64)
    }

    #[inline]
    pub(super) fn len(&self) -> usize {
        self.groups.len()
    }

    #[inline]
    pub(super) fn complete(&self) -> Seq {
        self.complete
    }

    #[inline]
    pub(super) fn durable(&self) -> Seq {
        self.durable
    }

    #[inline]
    pub(super) fn kept_bytes(&self) -> u64 {
        self.kept_bytes
    }

    /// Adds a group with this many requests, and returns its seq. `covers`: once everything up to
    /// it is complete, everything up to it is durable.
    #[inline]
    pub(super) fn add_group(&mut self, requests: u32, covers: bool, bytes: u64) -> Seq {
        self.groups.push_back(GroupState { remaining: requests, covers, internal: false, bytes });
        self.kept_bytes += bytes;
        self.last()
    }

    /// Opens a group that holds up no completion: the engine's own flush.
    pub(super) fn add_internal_group(&mut self, requests: u32) -> Seq {
        self.groups.push_back(GroupState {
            remaining: requests,
            covers: false,
            internal: true,
            bytes: 0,
        });
        debug_assert!(self.internal.is_none(), "one forced flush at a time");
        self.internal = Some(self.last());
        self.update_bounds();
        self.last()
    }

    /// Notes that a request has succeeded that covers the groups `first` to `last`, both included.
    #[inline]
    pub(super) fn request_done(&mut self, first: Seq, last: Seq) {
        self.count_ended(first);
        for seq in first.0 + 1..last.0 + 1 {
            self.count_ended(Seq(seq));
        }
        self.advance();
    }

    /// Counts one request of a group as ended.
    #[inline(always)]
    fn count_ended(&mut self, seq: Seq) {
        let at = seq.0.wrapping_sub(self.forgotten.0 + 1);
        let group = self.groups.get_mut(at as usize);
        let Some(group) = group.filter(|group| group.remaining > 0) else {
            debug_assert!(probe::planted(Plant::T3NotCounted), "a request ends once");
            return;
        };
        group.remaining -= 1;
        if group.internal && group.remaining == 0 {
            group.covers = true;
            self.internal_done(seq);
        }
    }

    /// The engine's own flush has ended. It covers all groups before it, if the complete mark has
    /// passed it already. Else `advance` will count it when it passes.
    #[cold]
    #[inline(never)]
    fn internal_done(&mut self, seq: Seq) {
        self.internal = None;
        if seq <= self.complete {
            self.covered = self.covered.max(seq);
        }
        self.update_bounds();
    }

    /// Notes that the group just opened has no requests. It ends when all groups before it have
    /// ended.
    pub(super) fn end_empty_group(&mut self) {
        self.advance();
    }

    /// Moves the marks over complete groups, in order (P3).
    #[inline]
    fn advance(&mut self) {
        while let Some(group) = self.groups.get((self.complete.0 - self.forgotten.0) as usize) {
            let seq = self.complete.next();
            let is_incomplete = group.remaining > 0 && !group.internal;
            if is_incomplete || self.failed_from.is_some_and(|first| seq >= first) {
                break;
            }
            self.complete = seq;
            if group.covers {
                self.covered = seq;
            }
        }
        // A flush behind an unfinished internal flush covers only the later writes. A failed group
        // is at or behind `failed_from`. Every group that would cover it is there, too. A group
        // that is being replayed was not durable, whichever group covered it before (T4).
        if self.covered < self.durable_before {
            self.durable = self.durable.max(self.covered);
        }
        self.move_released();
    }

    /// Moves the released mark.
    #[inline]
    fn move_released(&mut self) {
        let mut mark = self.delivered.min(self.durable);
        if probe::planted(Plant::T1ReleaseUndurable) {
            mark = self.internal.map_or(self.delivered, |s| self.delivered.min(Seq(s.0 - 1)));
        }
        if mark < self.released_before {
            self.released = mark;
        }
    }

    /// Notes that groups up to `seq` are durable without a covering group.
    pub(super) fn set_durable(&mut self, seq: Seq) {
        debug_assert!(seq <= self.complete);
        self.durable = self.durable.max(seq);
        self.move_released();
    }

    /// Notes the oldest group with a request that is being replayed, if there is one.
    pub(super) fn replay_from(&mut self, oldest: Option<Seq>) {
        if self.replayed != oldest {
            self.replayed = oldest;
            self.update_bounds();
            self.advance();
        }
    }

    /// Fails the stream from `seq` on: nothing from there on is ever reported, nor anything that a
    /// replay still had to write again.
    pub(super) fn fail_from(&mut self, seq: Seq) {
        let seq = self.replayed.map_or(seq, |from| from.min(seq));
        self.failed_from = Some(self.failed_from.map_or(seq, |first| first.min(seq)));
        self.update_bounds();
    }

    /// The marks for the caller. All groups that they report complete count as delivered.
    #[inline]
    pub(super) fn deliver(&mut self) -> Marks {
        self.delivered = self.complete;
        self.move_released();
        let mut complete = self.complete;
        if probe::planted(Plant::P3AnyOrder) {
            let newest = self.groups.iter().rposition(|group| group.remaining == 0);
            complete = newest.map_or(complete, |at| self.forgotten.plus(at as u64 + 1));
        }
        Marks { complete, durable: self.durable.min(self.complete) }
    }

    /// The released mark: all groups up to it are complete on all servers, durable and delivered
    /// (T1).
    #[inline]
    pub(super) fn released(&self) -> Seq {
        self.released
    }

    /// Forgets groups up to `seq`.
    #[inline]
    pub(super) fn forget(&mut self, seq: Seq) {
        while self.forgotten < seq {
            let Some(group) = self.groups.pop_front() else { break };
            debug_assert_eq!(group.remaining, 0, "an unfinished group is never forgotten");
            self.kept_bytes -= group.bytes;
            self.forgotten = self.forgotten.next();
        }
    }

    #[inline]
    pub(super) fn forgotten(&self) -> Seq {
        self.forgotten
    }
}

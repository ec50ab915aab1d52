//! In-order completion: the window of groups from the oldest that is not forgotten to the last one
//! admitted, and the marks in it.
//!
//! ```text
//!  forgotten   released    durable     complete       last
//! -----+-----------+-----------+-----------+------------+
//!      |  released |  durable, |  complete,|   in       |
//!      |           |  not yet  |  not yet  |   flight   |
//!      |           |  released |  durable  |            |
//! ```
//!
//! Completions come in any order. [`count_request`](Window::count_request) counts them by group,
//! and moves the complete mark over the groups that have no request left. The durable mark follows
//! to the last complete group that *covers* the groups before it. The released mark follows when
//! the caller has read the marks.

use alloc::collections::VecDeque;

use super::Marks;
use crate::attribute::Seq;
use crate::probe::{self, Plant};

/// A group in the window.
#[derive(Clone, Copy, Debug)]
struct GroupState {
    /// The number of requests of the group that have not ended.
    remaining: u32,
    /// Whether the group covers all groups before it: once all groups up to it are complete, all of
    /// them are durable.
    covers: bool,
    /// Whether the group is the engine's own flush. The caller does not wait for it, so the
    /// complete mark passes it before it ends. The durable mark does not.
    is_internal: bool,
    /// The size of the payload in bytes.
    bytes: u64,
}

/// The groups of a stream that are not yet forgotten.
#[derive(Debug)]
pub(super) struct Window {
    /// All groups up to this one are forgotten. `groups[0]` is the next one.
    forgotten: Seq,
    groups: VecDeque<GroupState>,
    /// All groups up to this one are complete, except for the engine's own flush.
    complete: Seq,
    /// All groups up to this one are durable.
    durable: Seq,
    /// All groups up to this one were reported complete to the caller.
    delivered: Seq,
    /// The size of the payload of all groups in the window, in bytes.
    kept_bytes: u64,
    /// The last complete group that covers all groups before it.
    covered: Seq,
    /// The engine's own flush that has not ended. There is at most one.
    internal: Option<Seq>,
    /// The first failed group. No group from this one on is ever reported complete (promise P6).
    failed_from: Option<Seq>,
    /// The oldest group with a request that is being replayed. Its data does not become durable,
    /// and the group is not released, before the replay ends (trap T4).
    oldest_replay: Option<Seq>,
    /// Only groups before this seq may become durable: the least of `failed_from`, `oldest_replay`
    /// and `internal`. The window keeps this value, because every completion needs it.
    durable_before: Seq,
    /// Only groups before this seq may be released: the least of `failed_from` and `oldest_replay`.
    released_before: Seq,
    /// All groups up to this one are complete on all servers, durable and delivered.
    released: Seq,
    /// The last group that may be released by the state of the redirected updates: those up to it
    /// are home.
    home: Seq,
}

/// A bound that no group reaches.
const NO_BOUND: Seq = Seq(u64::MAX);

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
            oldest_replay: None,
            durable_before: NO_BOUND,
            released_before: NO_BOUND,
            released: start,
            home: NO_BOUND,
        }
    }

    /// Computes the two bounds again, after `failed_from`, `oldest_replay` or `internal` has
    /// changed.
    fn update_bounds(&mut self) {
        let failed_from = self.failed_from.unwrap_or(NO_BOUND);
        let oldest_replay = self.oldest_replay.unwrap_or(NO_BOUND);
        let internal = self.internal.unwrap_or(NO_BOUND);
        self.released_before = failed_from.min(oldest_replay);
        self.durable_before = self.released_before.min(internal);
    }

    /// The last group that was added.
    #[inline]
    pub(super) fn last(&self) -> Seq {
        self.forgotten.plus(self.groups.len() as u64)
    }

    /// The number of groups in the window.
    #[inline]
    pub(super) fn len(&self) -> usize {
        self.groups.len()
    }

    /// The complete mark.
    #[inline]
    pub(super) fn complete(&self) -> Seq {
        self.complete
    }

    /// The durable mark.
    #[inline]
    pub(super) fn durable(&self) -> Seq {
        self.durable
    }

    /// The size of the payload of all groups in the window, in bytes.
    #[inline]
    pub(super) fn kept_bytes(&self) -> u64 {
        self.kept_bytes
    }

    /// Adds a group, and returns its seq. `covers` is whether all groups up to this one are
    /// durable once they are complete. `bytes` is the size of the payload.
    #[inline]
    pub(super) fn add_group(&mut self, request_count: u32, covers: bool, bytes: u64) -> Seq {
        self.groups.push_back(GroupState {
            remaining: request_count,
            covers,
            is_internal: false,
            bytes,
        });
        self.kept_bytes += bytes;
        self.last()
    }

    /// Adds the engine's own flush as a group, and returns its seq. The group does not delay the
    /// complete mark.
    pub(super) fn add_internal_group(&mut self, request_count: u32) -> Seq {
        self.groups.push_back(GroupState {
            remaining: request_count,
            covers: false,
            is_internal: true,
            bytes: 0,
        });
        debug_assert!(self.internal.is_none(), "one forced flush at a time");
        self.internal = Some(self.last());
        self.update_bounds();
        self.last()
    }

    /// Counts a request that has succeeded, and moves the marks. The request belongs to the groups
    /// from `first` to `last`, both included.
    #[inline]
    pub(super) fn count_request(&mut self, first: Seq, last: Seq) {
        self.count_in_group(first);
        for seq in first.0 + 1..last.0 + 1 {
            self.count_in_group(Seq(seq));
        }
        self.advance();
    }

    /// Counts one request of a group as ended.
    #[inline(always)]
    fn count_in_group(&mut self, seq: Seq) {
        let index = seq.0.wrapping_sub(self.forgotten.0 + 1);
        let group = self.groups.get_mut(index as usize);
        let Some(group) = group.filter(|group| group.remaining > 0) else {
            debug_assert!(probe::is_bug_planted(Plant::T3NotCounted), "a request ends once");
            return;
        };
        group.remaining -= 1;
        if group.is_internal && group.remaining == 0 {
            group.covers = true;
            self.on_internal_flush_done(seq);
        }
    }

    /// Handles the end of the engine's own flush. If the complete mark has passed the flush
    /// already, the flush now covers all groups before it. Otherwise `advance` counts it when the
    /// mark passes.
    #[cold]
    #[inline(never)]
    fn on_internal_flush_done(&mut self, seq: Seq) {
        self.internal = None;
        if seq <= self.complete {
            self.covered = self.covered.max(seq);
        }
        self.update_bounds();
    }

    /// Moves the marks after a group without requests was added. Such a group is complete when all
    /// groups before it are.
    pub(super) fn complete_empty_group(&mut self) {
        self.advance();
    }

    /// Moves the complete mark over complete groups, in order, and the other marks with it.
    #[inline]
    fn advance(&mut self) {
        while let Some(group) = self.groups.get((self.complete.0 - self.forgotten.0) as usize) {
            let seq = self.complete.next();
            let is_incomplete = group.remaining > 0 && !group.is_internal;
            if is_incomplete || self.failed_from.is_some_and(|first| seq >= first) {
                break;
            }
            self.complete = seq;
            if group.covers {
                self.covered = seq;
            }
        }
        // The covering group makes all groups before it durable, unless one of them is at or after
        // `durable_before`. Then some group up to `covered` has failed, or is being replayed, or is
        // the engine's own flush that has not ended, and the durable mark must wait.
        if self.covered < self.durable_before {
            self.durable = self.durable.max(self.covered);
        }
        self.move_released();
    }

    /// Moves the released mark to the last group that is durable and delivered.
    #[inline]
    fn move_released(&mut self) {
        let mut mark = self.delivered.min(self.durable);
        if probe::is_bug_planted(Plant::T1ReleaseUndurable) {
            mark = self.internal.map_or(self.delivered, |s| self.delivered.min(Seq(s.0 - 1)));
        }
        let mark = mark.min(self.home);
        if mark < self.released_before {
            self.released = mark;
        }
    }

    /// Sets the last group that may be released by the state of the redirected updates; `None`: all
    /// of them are home.
    pub(super) fn set_home(&mut self, seq: Option<Seq>) {
        self.home = seq.unwrap_or(NO_BOUND);
        self.move_released();
    }

    /// Notes that all groups up to `seq` are durable, although no group covers them.
    pub(super) fn set_durable(&mut self, seq: Seq) {
        debug_assert!(seq <= self.complete);
        self.durable = self.durable.max(seq);
        self.move_released();
    }

    /// Sets the oldest group with a request that is being replayed, if there is one.
    pub(super) fn set_oldest_replay(&mut self, oldest: Option<Seq>) {
        if self.oldest_replay != oldest {
            self.oldest_replay = oldest;
            self.update_bounds();
            self.advance();
        }
    }

    /// Fails the stream from `seq` on, or from the oldest replay if that is earlier: the replay
    /// will not write its data again. No group from there on is ever reported.
    pub(super) fn fail_from(&mut self, seq: Seq) {
        let seq = self.oldest_replay.map_or(seq, |oldest| oldest.min(seq));
        self.failed_from = Some(self.failed_from.map_or(seq, |first| first.min(seq)));
        self.update_bounds();
    }

    /// The marks for the caller. All groups up to the complete mark count as delivered from now on.
    #[inline]
    pub(super) fn deliver(&mut self) -> Marks {
        self.delivered = self.complete;
        self.move_released();
        let mut complete = self.complete;
        if probe::is_bug_planted(Plant::P3AnyOrder) {
            let newest = self.groups.iter().rposition(|group| group.remaining == 0);
            complete = newest.map_or(complete, |index| self.forgotten.plus(index as u64 + 1));
        }
        Marks { complete, durable: self.durable.min(self.complete) }
    }

    /// The released mark: all groups up to it are complete on all servers, durable and delivered.
    #[inline]
    pub(super) fn released(&self) -> Seq {
        self.released
    }

    /// Removes the groups up to `seq` from the window.
    #[inline]
    pub(super) fn free_groups(&mut self, seq: Seq) {
        while self.forgotten < seq {
            let Some(group) = self.groups.pop_front() else { break };
            debug_assert_eq!(group.remaining, 0, "an unfinished group is never forgotten");
            self.kept_bytes -= group.bytes;
            self.forgotten = self.forgotten.next();
        }
    }

    /// The last group that was removed from the window.
    #[inline]
    pub(super) fn freed_up_to(&self) -> Seq {
        self.forgotten
    }
}

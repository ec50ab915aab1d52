//! Other threads of an initiator's process that wait for the marks of a stream, as with the
//! library's watches; and the checks of the promises to them (promise P8).
//!
//! Sometimes a thread begins to wait when the owner of a stream has submitted or waited: while the
//! owner is in a call, or while it is not calling. The time alone decides whether a thread begins
//! to wait, and for which mark it waits. So the other random decisions of the seed stay the same.
//! After a step that only reads, no thread begins to wait: a wait for durability flushes drives,
//! and some scenarios need undurable groups.

use std::collections::BTreeMap;

use riopipe_order::attribute::{Seq, StreamId};
use riopipe_order::engine::Marks;
use riopipe_session::initiator::stream_driver::{Entry, Mark, MarksSnapshot, Waitlist};

use super::stream::Stream;
use super::{Client, State};
use crate::core::{Core, US};
use crate::oracle::{Drives, Promise};

/// The waiters of a stream.
#[derive(Debug, Default)]
pub(super) struct Watchers {
    list: Waitlist<u64>,
    /// Each waiter that sleeps, with its mark and seq.
    asleep: BTreeMap<u64, (Mark, Seq)>,
    begun: u64,
    /// A thread may begin to wait now.
    may_begin: bool,
    /// The marks that were published last.
    published: Option<Marks>,
}

impl Watchers {
    /// Whether there is no waiter.
    pub(super) fn is_empty(&self) -> bool {
        self.list.is_empty()
    }

    /// The last group up to `last` whose durability a waiter waits for.
    pub(super) fn wanted(&self, last: Seq) -> Seq {
        self.list.wanted_up_to(last).unwrap_or(Seq::ZERO)
    }

    /// Sets whether a thread may begin to wait in this step of the owner.
    pub(super) fn may_begin(&mut self, is_due: bool, now: u64) {
        self.may_begin = is_due && now / US % 4 == 2;
    }

    /// Adds a waiter. Returns whether it is the first one; `None` if it need not wait.
    fn add(&mut self, mark: Mark, seq: Seq, snapshot: MarksSnapshot) -> Option<bool> {
        self.begun += 1;
        let id = self.begun;
        // A stream that is opened or reopened gets new watchers. So their list has only one
        // incarnation.
        match self.list.enter(mark, seq, self.list.incarnation(), id, || snapshot) {
            Entry::Waits { is_first, .. } => {
                self.asleep.insert(id, (mark, seq));
                Some(is_first)
            }
            Entry::Reached | Entry::Ended | Entry::Lost => None,
        }
    }

    /// Publishes the marks that were read.
    pub(super) fn publish(&mut self, marks: Marks) {
        if self.published.replace(marks) != Some(marks) {
            for id in self.list.take_reached(marks) {
                self.asleep.remove(&id);
            }
        }
    }

    /// Ends all waits: the marks move no more.
    pub(super) fn end(&mut self) {
        for id in self.list.take_all() {
            self.asleep.remove(&id);
        }
    }
}

impl Stream {
    /// The mark and seq that a new thread waits for now, if one begins to wait.
    fn watcher_begins(&mut self, core: &Core) -> Option<(Mark, Seq)> {
        if !core::mem::take(&mut self.watchers.may_begin) {
            return None;
        }
        let driver = self.driver()?;
        let (marks, last) = (driver.delivered(), driver.last());
        Some(match core.now / US / 4 % 4 {
            0 => (Mark::Durable, last),
            1 => (Mark::Complete, last),
            // The mark is already there.
            2 => (Mark::Durable, marks.durable),
            // The group will be submitted later, or never.
            _ => (Mark::Complete, last.next()),
        })
    }

    /// P8: a waiter is woken when its mark is there, or when the mark will not come.
    fn check_watchers(&self, core: &mut Core) {
        let (complete, durable, _) = core.oracle.progress(self.era, self.id);
        let marks = Marks { complete, durable };
        let over = self.failed || self.closed;
        let overdue = |(mark, seq): &&(Mark, Seq)| over || mark.of(marks) >= *seq;
        if let Some((mark, seq)) = self.watchers.asleep.values().find(overdue) {
            let id = self.id;
            let why = if over { "the stream is over" } else { "it is there" };
            let what = format!(
                "a thread still waits for stream {id} to be {mark:?} up to group {seq}, and {why}"
            );
            core.oracle.broken(Promise::P8, what);
        }
    }
}

impl Client {
    /// Begins the wait of a thread for a stream, if one is due.
    pub(super) fn watch(&mut self, id: u16, drives: &Drives<'_>, core: &mut Core) {
        let Some(Some(stream)) = self.streams.get_mut(usize::from(id)) else { return };
        let Some((mark, seq)) = stream.watcher_begins(core) else { return };
        let (complete, durable, _) = core.oracle.progress(stream.era, id);
        let snapshot = MarksSnapshot { marks: Marks { complete, durable }, ended: false };
        let wanted = stream.watchers.wanted(seq);
        let Some(first) = stream.watchers.add(mark, seq, snapshot) else { return };
        let raised = stream.watchers.wanted(seq) > wanted;
        core.trace(|| format!("stream {id}: a thread waits for {mark:?} up to group {seq}"));
        if raised {
            self.wake_stream(id, drives, core);
        }
        if first {
            self.wake_background(None, drives, core);
        }
    }

    /// P8: a stream with waiters is driven, by its owner in a call or by the background driver. Its
    /// waiters are woken when their marks are there.
    pub(super) fn check_watchers(&self, core: &mut Core) {
        for stream in self.streams.iter().flatten().filter(|stream| !stream.is_reader) {
            stream.check_watchers(core);
            let left = !stream.is_in_call() && !self.background.has_taken_over(StreamId(stream.id));
            let running = matches!(self.state, State::Running) && !stream.failed && !stream.closed;
            if running && left && !stream.watchers.is_empty() {
                let id = stream.id;
                let what = format!("threads wait for stream {id}, and no thread drives it");
                core.oracle.broken(Promise::P8, what);
            }
        }
    }
}

//! The commit of redirected updates: they are written home, and their groups are released.
//!
//! ```text
//! groups durable by a joint FLUSH --> Writes: home, in any order --> Flush: the written drives
//!                                 --> Logs: the released mark --> the blocks of the area are free
//! ```
//!
//! Until the last step recovery finds the updates in the logs, and copies them home. So a commit
//! that is cut off may be done again, or by recovery.

use alloc::vec::Vec;

use super::Horae;
use crate::attribute::{Flags, Kind, Member, Seq};
use crate::engine::redirect::Update;
use crate::engine::{Cause, Failure, Path, Payload, RequestId};
use crate::probe::{self, Plant, Rare};

/// The commit. At most one is in flight.
#[derive(Debug)]
pub(super) struct Commit {
    /// The last group that the caller, or a group that waits, wants to be released.
    pub(super) wanted: Seq,
    /// The last group that is to be released so that the area or a log has space.
    pub(super) for_space: Option<Seq>,
    /// All groups up to this one are released in the logs.
    pub(super) released: Seq,
    in_flight: Option<InFlight>,
    /// The writes that wait for an older one of the same blocks, oldest first.
    held: Vec<RequestId>,
    /// For each member, whether a write of the commit may be in its cache.
    dirty: Vec<bool>,
}

#[derive(Clone, Copy, Debug)]
struct InFlight {
    /// The last group that it releases.
    up_to: Seq,
    /// The number of requests of the current step that have not ended.
    outstanding: u32,
    step: Step,
}

/// The steps of a commit.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Step {
    Writes,
    Flush,
    Logs,
}

impl Commit {
    pub(super) fn new(start: Seq, members: usize) -> Self {
        Self {
            wanted: start,
            for_space: None,
            released: start,
            in_flight: None,
            held: Vec::new(),
            dirty: alloc::vec![false; members],
        }
    }
}

impl<P: Payload> Horae<P> {
    /// Notes that all redirected updates up to `seq` are to be home.
    pub(super) fn want_home(&mut self, seq: Seq) {
        self.commit.wanted = self.commit.wanted.max(seq);
        self.want_durable(seq);
        self.commit_if_due();
    }

    /// Begins a commit if one is wanted, none is in flight, and the wanted groups are durable.
    pub(super) fn commit_if_due(&mut self) {
        let (released, durable) = (self.commit.released, self.base.window.durable());
        let forgets_flushed = probe::is_bug_planted(Plant::HoraeHomeUnflushed);
        let durable = if forgets_flushed { self.base.window.complete() } else { durable };
        let is_due = |wanted: Seq| wanted > released && wanted <= durable;
        let is_wanted = is_due(self.commit.wanted) || self.commit.for_space.is_some_and(is_due);
        if !is_wanted || self.commit.in_flight.is_some() || self.base.failure.is_some() {
            return;
        }
        self.commit.for_space = None;
        self.commit.in_flight =
            Some(InFlight { up_to: durable, outstanding: 0, step: Step::Writes });
        let updates = self.redirects.not_home(durable);
        let mut ids = Vec::with_capacity(updates.len());
        for update in updates {
            let (id, request) = self.base.requests.allocate();
            let Update { id: place, member, server, lba, blocks, ref mut pieces, .. } = *update;
            (request.seq, request.index) = place;
            (request.member, request.server, request.lba) = (member, server, lba);
            (request.blocks, request.kind, request.path) = (blocks, Kind::Write, Path::Home);
            (request.flags, request.tag) = (Flags::IN_PLACE, 0);
            request.pieces.append(pieces);
            self.commit.dirty[usize::from(member.0)] = true;
            ids.push(id);
        }
        if !ids.is_empty() {
            probe::count_rare(Rare::HoraeCommit);
        }
        self.set_outstanding(ids.len() as u32);
        // Two updates of the same blocks must land in their order (trap T12).
        self.commit.held = ids;
        self.base.shape_held(&mut self.commit.held);
        self.base.enqueue();
        self.continue_commit();
    }

    fn set_outstanding(&mut self, count: u32) {
        if let Some(commit) = &mut self.commit.in_flight {
            commit.outstanding = count;
        }
    }

    /// Notes that a request of the commit has succeeded.
    pub(super) fn on_commit_request_done(&mut self) {
        let Some(commit) = &mut self.commit.in_flight else { return };
        commit.outstanding -= 1;
        self.base.shape_held(&mut self.commit.held);
        self.base.enqueue();
        self.continue_commit();
    }

    /// Begins the next step of the commit while the current one has no request left.
    fn continue_commit(&mut self) {
        while let Some(commit) = self.commit.in_flight.filter(|commit| commit.outstanding == 0) {
            match commit.step {
                Step::Writes => self.flush_home(),
                Step::Flush => self.record_released(commit.up_to),
                Step::Logs => return self.end_commit(commit.up_to),
            }
        }
    }

    /// Flushes the drives to which the commit has written.
    fn flush_home(&mut self) {
        let durable = self.base.window.durable();
        debug_assert!(self.base.shaped.is_empty());
        for index in 0..self.commit.dirty.len() {
            let is_volatile = self.base.topology.members()[index].volatile;
            let is_skipped = probe::is_bug_planted(Plant::HoraeReleasedEarly);
            if self.commit.dirty[index] && is_volatile && !is_skipped {
                self.base.add_flush_on(Path::Home, Member(index as u8), durable.next());
            }
        }
        self.begin_step(Step::Flush);
        self.base.enqueue();
    }

    /// Sets the step that begins with the requests in `shaped`.
    fn begin_step(&mut self, step: Step) {
        if let Some(commit) = &mut self.commit.in_flight {
            (commit.step, commit.outstanding) = (step, self.base.shaped.len() as u32);
        }
    }

    /// Records in each log with entries of the released groups that these are released.
    fn record_released(&mut self, up_to: Seq) {
        self.commit.dirty.fill(false);
        for server in 0..self.slots.len() {
            if self.slots[server].front().is_some_and(|seq| *seq <= up_to) {
                self.base.add_record(Path::Released, server as u16, up_to);
            }
        }
        self.begin_step(Step::Logs);
        self.base.enqueue_first();
    }

    /// Ends the commit: its groups are released, and what has waited for that continues.
    fn end_commit(&mut self, up_to: Seq) {
        self.commit.in_flight = None;
        self.free_slots(up_to);
        self.redirects.on_released(up_to);
        self.base.window.set_home(self.redirects.oldest().map(|seq| Seq(seq.0 - 1)));
        self.order_next();
        self.flush_if_due();
        self.commit_if_due();
    }

    /// Frees the slots of the groups up to `seq`, whose entries no log needs any more.
    pub(super) fn free_slots(&mut self, seq: Seq) {
        self.commit.released = self.commit.released.max(seq);
        for slots in &mut self.slots {
            while slots.front().is_some_and(|of| *of <= seq) {
                slots.pop_front();
            }
        }
    }

    /// The failure of this stream by a failed FLUSH of another stream: the drive may have lost
    /// updates that a commit has written home (trap T22). They are in the prepare area still, so
    /// recovery brings them home.
    pub(super) fn commit_failure_by_shared_flush(&self, member: Member) -> Option<Failure> {
        self.commit.dirty[usize::from(member.0)].then(|| Failure {
            seq: self.base.window.durable().next(),
            member,
            flush: true,
            cause: Cause::SharedFlush,
        })
    }

    /// Frees the requests of a commit that are not sent, because the stream has failed.
    pub(super) fn discard_commit(&mut self) {
        for id in self.commit.held.drain(..) {
            self.base.complete_and_free(id);
        }
    }
}

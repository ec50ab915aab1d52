//! Engine `linux`: what a journal on Linux's block layer does to keep order (JBD2, the journal of
//! ext4, over NVMe-oF).
//!
//! JBD2 commits a transaction in these steps: it writes the data and the journal blocks, and waits
//! for their transfers. Then it submits the commit block with `REQ_PREFLUSH | REQ_FUA`. The block
//! layer turns this into a FLUSH, a wait, and a write with FUA (Force Unit Access). A drive without
//! a volatile cache gets neither of the two.
//!
//! # Groups as transactions
//!
//! The last write of a durable group is the commit block of a transaction, and the writes before it
//! are the data and the journal blocks:
//!
//! ```text
//! durable group:   writes but the last --> PREFLUSH --> last write, with FUA --> durable
//! other group:     writes --> complete
//! between groups:  PREFLUSH, so that the next group is behind this one
//! ```
//!
//! - A PREFLUSH reaches each drive with a write that is not durable, in parallel. If there is no
//!   such drive, there is no PREFLUSH.
//! - Linux has no order without a FLUSH. JBD2 lets the next ordered write carry the FLUSH, and so
//!   does this engine: the FLUSH for a group that is not durable comes with the next group. If no
//!   group comes, none is sent, unless the caller asks for durability.
//! - If the last operation of a durable group is a discard, the group has no commit block: its
//!   writes end, and then a PREFLUSH ends the group.
//! - A group is never merged with another, and a commit block never with a write before it.

use alloc::collections::VecDeque;
use alloc::vec::Vec;

use super::base::{Base, has_base};
use super::{
    Bound, Capabilities, Cause, Engine, Failure, Limits, Marks, Op, Payload, Refusal, RequestId,
    Write,
};
use crate::attribute::{Kind, Member, Seq};
use crate::probe::{self, Plant, Rare};
use crate::topology::Topology;
use crate::write_order::DriveOrder;

/// The capabilities of the engine.
pub(super) const CAPABILITIES: Capabilities = Capabilities {
    keeps_order: true,
    is_serial: true,
    completes_durable: false,
    keeps_log: false,
    needs_binding: false,
    orders_at_target: false,
    can_replay: false,
    drive_order: DriveOrder::None,
    queues_per_server: 1,
};

/// The `linux` engine of one stream.
#[derive(Debug)]
pub struct Linux<P> {
    base: Base<P>,
    /// The groups that wait for the end of the current group.
    waiting: VecDeque<WaitingGroup>,
    /// The step whose requests are in flight.
    step: Step,
    /// The number of requests of the step that have not ended.
    outstanding: u32,
    /// The commit block of the current group: one request for each extent. Empty once it is sent.
    commit: Vec<RequestId>,
    /// The last group that the caller wants durable.
    wanted_durable: Seq,
    /// Empty lists for [`WaitingGroup::requests`], so that their memory is used again.
    spare_lists: Vec<Vec<RequestId>>,
}

/// The requests that are in flight. There is one step at a time.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Step {
    /// Nothing, or the FLUSHes between two groups.
    BetweenGroups,
    /// The writes of a group but its commit block.
    Body(Seq, IsDurable),
    /// The FLUSHes before the commit block of a group.
    Preflush(Seq),
    /// The commit block of a group.
    Commit,
}

/// Whether a group is to become durable without a later group.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum IsDurable {
    No,
    Yes,
}

/// A group that is turned into requests and not sent yet.
#[derive(Debug)]
struct WaitingGroup {
    seq: Seq,
    is_durable: IsDurable,
    /// The requests of the group. Those of its commit block are the last ones.
    requests: Vec<RequestId>,
    /// The number of requests of its commit block.
    commit_len: usize,
}

impl<P: Payload> Linux<P> {
    /// The engine of a new stream.
    #[must_use]
    pub fn new(topology: Topology, limits: Limits) -> Self {
        Self {
            wanted_durable: limits.start,
            base: Base::new(topology, limits),
            waiting: VecDeque::new(),
            step: Step::BetweenGroups,
            outstanding: 0,
            commit: Vec::new(),
            spare_lists: Vec::new(),
        }
    }

    /// Begins the next steps until one of them has requests in flight, or nothing is left to do.
    fn advance(&mut self) {
        while self.outstanding == 0 && self.base.failure.is_none() {
            match self.step {
                Step::BetweenGroups => {
                    if !self.begin_between_groups() {
                        return;
                    }
                }
                Step::Body(_, IsDurable::No) | Step::Commit => self.step = Step::BetweenGroups,
                Step::Body(seq, IsDurable::Yes) => {
                    self.step = Step::Preflush(seq);
                    self.send_flushes();
                }
                Step::Preflush(seq) => self.send_commit(seq),
            }
        }
    }

    /// Begins what comes after a group: the FLUSHes for the groups that are not durable, or the next
    /// group. Returns whether there was something to do.
    fn begin_between_groups(&mut self) -> bool {
        let is_flush_wanted = self.wanted_durable > self.base.window.durable();
        let is_flush_due = is_flush_wanted
            || !self.waiting.is_empty() && !probe::is_bug_planted(Plant::LinuxNoFlushBetween);
        if is_flush_due {
            self.send_flushes();
            if self.outstanding > 0 {
                probe::count_rare(Rare::LinuxFlushBetween);
                return true;
            }
        }
        if self.base.dirty.iter().all(Option::is_none) {
            // Nothing is in flight, so all groups that were sent are complete.
            self.base.window.set_durable(self.base.window.complete());
        }
        let Some(group) = self.waiting.pop_front() else { return false };
        self.send_body(group);
        true
    }

    /// Sends the writes of a group but its commit block.
    fn send_body(&mut self, group: WaitingGroup) {
        let WaitingGroup { seq, is_durable, mut requests, commit_len } = group;
        self.step = Step::Body(seq, is_durable);
        let body_len = requests.len() - commit_len;
        self.outstanding = body_len as u32;
        self.commit.extend(requests.drain(body_len..));
        self.base.shaped.append(&mut requests);
        self.spare_lists.push(requests);
        self.base.note_dirty(seq);
        self.base.enqueue();
        if self.outstanding == 0 && self.commit.is_empty() {
            self.base.window.complete_empty_group();
        }
        if probe::is_bug_planted(Plant::LinuxCommitEarly) {
            self.outstanding += self.commit.len() as u32;
            self.enqueue_commit(seq);
        }
    }

    /// Sends a FLUSH to each drive with a write that is not durable.
    fn send_flushes(&mut self) {
        // All groups before this one are durable when the FLUSHes have ended.
        let seq = self.base.window.durable().next();
        for index in 0..self.base.dirty.len() {
            if self.base.dirty[index].take().is_some() {
                let misses = probe::is_bug_planted(Plant::LinuxPreflushOneDrive)
                    && !self.base.shaped.is_empty();
                if !misses {
                    self.base.add_flush(Member(index as u8), seq, 0);
                }
            }
        }
        self.outstanding = self.base.shaped.len() as u32;
        self.base.enqueue();
    }

    /// Sends the commit block of a group. All other writes of the group are durable.
    fn send_commit(&mut self, seq: Seq) {
        self.step = Step::Commit;
        self.outstanding = self.commit.len() as u32;
        if self.outstanding > 0 {
            probe::count_rare(Rare::LinuxCommit);
        }
        self.enqueue_commit(seq);
    }

    /// Puts the requests of the commit block into the queues.
    fn enqueue_commit(&mut self, seq: Seq) {
        self.base.shaped.append(&mut self.commit);
        self.base.note_dirty(seq);
        self.base.enqueue();
    }

    /// Turns a group into numbered requests: those of the body, and those of the commit block.
    ///
    /// # Errors
    /// The group has too many requests. Nothing was done.
    fn shape(
        &mut self,
        writes: &mut [Write<P>],
        seq: Seq,
        tag: u64,
        durable: bool,
    ) -> Result<WaitingGroup, Refusal> {
        let has_commit =
            durable && writes.last().is_some_and(|write| matches!(write.op, Op::Write(..)));
        let (body_writes, commit_writes) =
            writes.split_at_mut(writes.len() - usize::from(has_commit));
        let base = &mut self.base;
        base.shape(body_writes, seq, tag)?;
        let mut requests = self.spare_lists.pop().unwrap_or_default();
        requests.append(&mut base.shaped);
        // Two calls, because one call would merge the commit block with the write before it.
        let shaped = base.shape(commit_writes, seq, tag);
        let commit_len = base.shaped.len();
        requests.append(&mut base.shaped);
        base.shaped.extend(&requests);
        let numbered = match shaped {
            Ok(()) => base.number_requests(),
            Err(refusal) => {
                base.discard_shaped();
                Err(refusal)
            }
        };
        if let Err(refusal) = numbered {
            requests.clear();
            self.spare_lists.push(requests);
            return Err(refusal);
        }
        base.shaped.clear();
        for id in &requests[requests.len() - commit_len..] {
            let request = base.requests.get_mut(*id);
            request.fua = base.topology.member(request.member).volatile;
        }
        let is_durable = if durable { IsDurable::Yes } else { IsDurable::No };
        Ok(WaitingGroup { seq, is_durable, requests, commit_len })
    }

    /// Frees the requests of all waiting groups and the commit block that is not sent, because the
    /// stream has failed.
    fn discard_waiting(&mut self) {
        for id in self.commit.drain(..) {
            self.base.complete_and_free(id);
        }
        for group in self.waiting.drain(..) {
            for id in group.requests {
                self.base.complete_and_free(id);
            }
        }
    }
}

has_base!(Linux);

impl<P: Payload> Engine<P> for Linux<P> {
    fn admit(&mut self, writes: &mut [Write<P>], tag: u64, durable: bool) -> Result<Seq, Refusal> {
        let bytes = self.base.check_group(writes, durable)?;
        if !self.base.has_space(bytes) {
            return Err(Refusal::Full(Bound::Memory));
        }
        let seq = self.base.window.last().next();
        let group = self.shape(writes, seq, tag, durable)?;
        let request_count = group.requests.len() as u32;
        self.base.window.add_group(request_count, false, bytes);
        self.waiting.push_back(group);
        self.advance();
        Ok(seq)
    }

    fn on_request_done(&mut self, id: RequestId, result: Result<(), Cause>) {
        let request = self.base.request(id);
        let (first, last) = (request.seq, request.seq_end());
        let is_flush = request.kind == Kind::Flush;
        if let Err(cause) = result {
            self.base.poison_by_request(id, cause);
            self.base.complete_and_free(id);
            self.discard_waiting();
            return;
        }
        self.base.complete_and_free(id);
        if self.base.failure.is_some() {
            return;
        }
        if !is_flush {
            self.base.window.count_request(first, last);
        }
        self.outstanding -= 1;
        self.advance();
    }

    fn poll(&mut self) -> Marks {
        self.base.deliver_without_replay()
    }

    fn ask_durable(&mut self, seq: Seq) {
        self.wanted_durable = self.wanted_durable.max(seq.min(self.base.window.last()));
        self.advance();
    }

    fn poison(&mut self, failure: Failure) {
        self.base.poison(failure);
        self.discard_waiting();
    }
}

//! Engine `sync`: one group at a time, each made durable before the next (Rio paper §2.2).
//!
//! ```text
//! waiting --> writes in flight --> FLUSHes in flight --> durable, and the next group starts
//!                     `---- no drive is dirty ----------^
//! ```
//!
//! A drive with power-loss protection is never dirty, so it needs no FLUSH.

use alloc::collections::VecDeque;
use alloc::vec::Vec;

use super::base::{Base, has_base};
use super::{
    Capabilities, Cause, Engine, Failure, Limits, Marks, Payload, Refusal, RequestId, Write,
};
use crate::attribute::{Kind, Member, Seq};
use crate::probe::{self, Plant};
use crate::topology::Topology;
use crate::write_order::DriveOrder;

/// The capabilities of the engine.
pub(super) const CAPABILITIES: Capabilities = Capabilities {
    keeps_order: true,
    is_serial: true,
    completes_durable: true,
    keeps_log: false,
    needs_binding: false,
    orders_at_target: false,
    can_replay: false,
    drive_order: DriveOrder::None,
    queues_per_server: 1,
};

/// The `sync` engine of one stream.
#[derive(Debug)]
pub struct Sync<P> {
    base: Base<P>,
    /// The groups that wait for the end of the current group.
    waiting: VecDeque<WaitingGroup>,
    /// The group whose writes or FLUSHes are in flight.
    current: Option<Seq>,
    /// Whether the requests in flight are the FLUSHes of the current group, not its writes.
    is_flushing: bool,
    /// The number of requests of the current group that are in flight.
    outstanding: u32,
    /// Empty lists for [`WaitingGroup::requests`], so that their memory is used again.
    spare_lists: Vec<Vec<RequestId>>,
}

/// A group that is turned into requests and not sent yet.
#[derive(Debug)]
struct WaitingGroup {
    seq: Seq,
    requests: Vec<RequestId>,
}

impl<P: Payload> Sync<P> {
    /// The engine of a new stream.
    #[must_use]
    pub fn new(topology: Topology, limits: Limits) -> Self {
        Self {
            base: Base::new(topology, limits),
            waiting: VecDeque::new(),
            current: None,
            is_flushing: false,
            outstanding: 0,
            spare_lists: Vec::new(),
        }
    }

    /// Sends the next group if none is in flight.
    fn start_next(&mut self) {
        while (self.current.is_none() || probe::is_bug_planted(Plant::SyncNextEarly))
            && self.base.failure.is_none()
        {
            let Some(WaitingGroup { seq, mut requests }) = self.waiting.pop_front() else { return };
            self.current = Some(seq);
            self.is_flushing = false;
            self.outstanding += requests.len() as u32;
            self.base.shaped.append(&mut requests);
            self.spare_lists.push(requests);
            self.base.note_dirty(seq);
            self.base.enqueue();
            if self.outstanding == 0 {
                self.base.window.complete_empty_group();
                self.flush_or_finish(seq);
            }
        }
    }

    /// Continues a group whose writes are complete: flushes the dirty drives, or finishes the group
    /// if no drive is dirty.
    fn flush_or_finish(&mut self, seq: Seq) {
        for index in 0..self.base.dirty.len() {
            if self.base.dirty[index].take().is_some() && !probe::is_bug_planted(Plant::SyncNoFlush)
            {
                self.base.add_flush(Member(index as u8), seq, 0);
            }
        }
        self.outstanding = self.base.shaped.len() as u32;
        self.is_flushing = self.outstanding > 0;
        self.base.enqueue();
        if !self.is_flushing {
            self.finish_group(seq);
        }
    }

    /// Notes that the current group is durable.
    fn finish_group(&mut self, seq: Seq) {
        self.base.window.set_durable(seq);
        self.current = None;
    }

    /// Frees the requests of all waiting groups, because the stream has failed.
    fn discard_waiting(&mut self) {
        for group in self.waiting.drain(..) {
            for id in group.requests {
                self.base.complete_and_free(id);
            }
        }
    }
}

has_base!(Sync);

impl<P: Payload> Engine<P> for Sync<P> {
    fn admit(&mut self, writes: &mut [Write<P>], tag: u64, durable: bool) -> Result<Seq, Refusal> {
        let base = &mut self.base;
        let (seq, bytes) = base.shape_and_number(writes, tag, durable)?;
        base.window.add_group(base.shaped.len() as u32, false, bytes);
        let mut requests = self.spare_lists.pop().unwrap_or_default();
        requests.append(&mut base.shaped);
        self.waiting.push_back(WaitingGroup { seq, requests });
        self.start_next();
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
        if self.outstanding > 0 {
            return;
        }
        if is_flush {
            self.finish_group(first);
        } else {
            self.flush_or_finish(first);
        }
        self.start_next();
    }

    fn poll(&mut self) -> Marks {
        let mut marks = self.base.window.deliver();
        // This engine reports a group complete only when its FLUSHes are done, because the next
        // group waits for them.
        marks.complete = marks.durable;
        self.base.window.free_groups(marks.durable);
        marks
    }

    fn ask_durable(&mut self, _seq: Seq) {
        // Each group is made durable anyway.
    }

    fn poison(&mut self, failure: Failure) {
        self.base.poison(failure);
        self.discard_waiting();
    }
}

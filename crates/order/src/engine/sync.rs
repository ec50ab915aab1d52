//! Linux's method: one group at a time. Wait for the transfer, FLUSH the drives that it dirtied
//! (unless they have PLP), then send the next group (Rio paper §2.2).

use alloc::collections::VecDeque;

use super::base::{Base, HasBase};
use super::{
    Capabilities, Cause, Engine, Failure, Limits, Marks, Payload, Refusal, RequestId, Write,
};
use crate::attribute::{Kind, Member, Seq};
use crate::probe::{self, Plant};
use crate::topology::Topology;

/// The capabilities of the engine.
pub(super) const CAPABILITIES: Capabilities = Capabilities {
    keeps_order: true,
    completes_durable: true,
    keeps_log: false,
    needs_binding: false,
    can_replay: false,
};

/// The `sync` engine of one stream.
#[derive(Debug)]
pub struct Sync<P> {
    base: Base<P>,
    /// Shaped groups that wait for their turn, each with its requests.
    waiting: VecDeque<(Seq, alloc::vec::Vec<RequestId>)>,
    /// Requests of the current group, or of its FLUSH, that have not ended.
    outstanding: u32,
    /// The group that is in flight, or whose FLUSH is.
    current: Option<Seq>,
    /// The requests in flight are the FLUSHes of the current group.
    flushing: bool,
    /// Empty lists for `waiting`, so that their memory is used again.
    spare: alloc::vec::Vec<alloc::vec::Vec<RequestId>>,
}

impl<P: Payload> Sync<P> {
    /// The engine of a new stream.
    #[must_use]
    pub fn new(topology: Topology, limits: Limits) -> Self {
        Self {
            base: Base::new(topology, limits),
            waiting: VecDeque::new(),
            outstanding: 0,
            current: None,
            flushing: false,
            spare: alloc::vec::Vec::new(),
        }
    }

    /// Sends the next group if none is in flight.
    fn start_next(&mut self) {
        while (self.current.is_none() || probe::planted(Plant::SyncNextEarly))
            && self.base.failure.is_none()
        {
            let Some((seq, mut ids)) = self.waiting.pop_front() else { return };
            self.current = Some(seq);
            self.flushing = false;
            self.outstanding += ids.len() as u32;
            self.base.shaped.append(&mut ids);
            self.spare.push(ids);
            self.base.note_dirty(seq);
            self.base.enqueue();
            if self.outstanding == 0 {
                self.base.window.end_empty_group();
                self.flush_or_finish(seq);
            }
        }
    }

    /// Continues a group whose transfer is complete: FLUSHes the drives that it has dirtied, or
    /// finishes the group if there are none.
    fn flush_or_finish(&mut self, seq: Seq) {
        for index in 0..self.base.dirty.len() {
            if self.base.dirty[index].take().is_some() && !probe::planted(Plant::SyncNoFlush) {
                self.base.add_flush(Member(index as u8), seq, 0);
            }
        }
        self.outstanding = self.base.shaped.len() as u32;
        self.flushing = self.outstanding > 0;
        self.base.enqueue();
        if !self.flushing {
            self.finish_group(seq);
        }
    }

    /// Notes that the current group is durable.
    fn finish_group(&mut self, seq: Seq) {
        self.base.window.set_durable(seq);
        self.current = None;
    }
}

impl<P> HasBase<P> for Sync<P> {
    #[inline]
    fn base(&self) -> &Base<P> {
        &self.base
    }

    #[inline]
    fn base_mut(&mut self) -> &mut Base<P> {
        &mut self.base
    }
}

impl<P: Payload> Engine<P> for Sync<P> {
    fn admit(&mut self, writes: &mut [Write<P>], tag: u64, durable: bool) -> Result<Seq, Refusal> {
        let base = &mut self.base;
        let (seq, bytes) = base.shape_and_number(writes, tag, durable)?;
        base.window.add_group(base.shaped.len() as u32, false, bytes);
        let mut ids = self.spare.pop().unwrap_or_default();
        ids.append(&mut base.shaped);
        self.waiting.push_back((seq, ids));
        self.start_next();
        Ok(seq)
    }

    fn done(&mut self, id: RequestId, result: Result<(), Cause>) {
        let request = self.base.request(id);
        let (first, last) = (request.seq, request.seq_end());
        let flush = request.kind == Kind::Flush;
        if let Err(cause) = result {
            self.base.fail(id, cause);
            self.base.end_and_free(id);
            for (_, ids) in self.waiting.drain(..) {
                for id in ids {
                    self.base.end_and_free(id);
                }
            }
            return;
        }
        self.base.end_and_free(id);
        if self.base.failure.is_some() {
            return;
        }
        if !flush {
            self.base.window.request_done(first, last);
        }
        self.outstanding -= 1;
        if self.outstanding == 0 {
            if flush {
                self.finish_group(first);
            } else {
                self.flush_or_finish(first);
            }
            self.start_next();
        }
    }

    fn poll(&mut self) -> Marks {
        let mut marks = self.base.window.deliver();
        // A group counts as complete once its FLUSH is back, because the caller waits for that.
        marks.complete = marks.durable;
        self.base.window.forget(marks.durable);
        marks
    }

    fn ask_durable(&mut self, _seq: Seq) {
        // Each group is made durable anyway.
    }

    fn poison(&mut self, failure: Failure) {
        self.base.poison(failure);
        for (_, ids) in self.waiting.drain(..) {
            for id in ids {
                self.base.end_and_free(id);
            }
        }
    }
}

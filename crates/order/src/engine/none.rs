//! No order at all: the most that the hardware and the stack can do. Requests are sent at once and
//! without attributes. Only the marks that the caller sees are in order.

use super::base::{Base, HasBase};
use super::{Capabilities, Cause, Engine, Limits, Marks, Payload, Refusal, RequestId, Write};
use crate::attribute::{Member, Seq};
use crate::probe::{self, Plant};
use crate::topology::Topology;

/// The capabilities of the engine.
pub(super) const CAPABILITIES: Capabilities = Capabilities {
    keeps_order: false,
    completes_durable: false,
    keeps_log: false,
    needs_binding: false,
    can_replay: false,
};

/// The `none` engine of one stream.
#[derive(Debug)]
pub struct NoOrder<P> {
    base: Base<P>,
    flush: FlushRound,
}

/// A FLUSH of all dirty drives, in flight or wanted.
#[derive(Debug, Default)]
pub(super) struct FlushRound {
    /// The caller wants everything up to this durable.
    wanted: Seq,
    /// The round in flight: the last group that it covers, and the number of outstanding FLUSHes.
    running: Option<(Seq, u32)>,
}

impl FlushRound {
    pub(super) fn want(&mut self, seq: Seq) {
        self.wanted = self.wanted.max(seq);
    }

    /// Starts a round if one is wanted and all writes that it must cover have completed (T2).
    #[inline]
    pub(super) fn start<P: Payload>(&mut self, base: &mut Base<P>) {
        let upto = base.window.complete();
        if self.running.is_some() || self.wanted <= base.window.durable() || upto < self.wanted {
            return;
        }
        self.begin(base, upto);
    }

    #[cold]
    fn begin<P: Payload>(&mut self, base: &mut Base<P>, upto: Seq) {
        for index in 0..base.dirty.len() {
            // Writes admitted after `upto` keep a drive dirty beyond this round.
            if base.dirty[index].is_some() {
                base.add_flush(Member(index as u8), upto, 0);
                if base.dirty[index].is_some_and(|seq| seq <= upto) {
                    base.dirty[index] = None;
                }
            }
        }
        let outstanding = base.shaped.len() as u32;
        base.enqueue();
        if outstanding == 0 {
            base.window.set_durable(upto);
        } else {
            self.running = Some((upto, outstanding));
        }
    }

    /// A FLUSH of the round has ended well.
    pub(super) fn done<P: Payload>(&mut self, base: &mut Base<P>) {
        if base.failure.is_some() {
            // The failure of another stream's FLUSH may have destroyed what this one covers (T22).
            return;
        }
        let Some((upto, outstanding)) = &mut self.running else { return };
        *outstanding -= 1;
        if *outstanding == 0 {
            base.window.set_durable(*upto);
            self.running = None;
            self.start(base);
        }
    }
}

impl<P: Payload> NoOrder<P> {
    /// The engine of a new stream.
    #[must_use]
    pub fn new(topology: Topology, limits: Limits) -> Self {
        Self { base: Base::new(topology, limits), flush: FlushRound::default() }
    }
}

impl<P> HasBase<P> for NoOrder<P> {
    #[inline]
    fn base(&self) -> &Base<P> {
        &self.base
    }

    #[inline]
    fn base_mut(&mut self) -> &mut Base<P> {
        &mut self.base
    }
}

impl<P: Payload> Engine<P> for NoOrder<P> {
    fn admit(&mut self, writes: &mut [Write<P>], tag: u64, durable: bool) -> Result<Seq, Refusal> {
        let base = &mut self.base;
        let (seq, bytes) = base.shape_and_number(writes, tag, durable)?;
        base.note_dirty(seq);
        let requests = base.shaped.len() as u32;
        let durable_at_once = !base.any_volatile || probe::planted(Plant::NoneNoFlush);
        base.window.add_group(requests, durable_at_once, bytes);
        if !base.merge_into_tail() {
            base.enqueue();
        }
        if requests == 0 {
            // A durable group without writes is complete once all groups before it are.
            base.window.end_empty_group();
        }
        if durable {
            self.flush.want(seq);
            self.flush.start(base);
        }
        Ok(seq)
    }

    fn done(&mut self, id: RequestId, result: Result<(), Cause>) {
        let request = self.base.request(id);
        let (first, last) = (request.seq, request.seq_end());
        let flush = request.kind == crate::attribute::Kind::Flush;
        match result {
            Err(cause) => self.base.fail(id, cause),
            Ok(()) if flush => self.flush.done(&mut self.base),
            Ok(()) => {
                self.base.window.request_done(first, last);
                self.flush.start(&mut self.base);
            }
        }
        self.base.end_and_free(id);
    }

    fn poll(&mut self) -> Marks {
        let marks = self.base.window.deliver();
        // This engine never replays. So a complete group may be forgotten.
        self.base.window.forget(self.base.window.complete());
        marks
    }

    fn ask_durable(&mut self, seq: Seq) {
        self.flush.want(seq.min(self.base.window.last()));
        if self.base.failure.is_none() {
            self.flush.start(&mut self.base);
        }
    }
}

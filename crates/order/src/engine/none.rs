//! Engine `none`: no order at all, so the most that the hardware and the stack can do.
//!
//! The engine sends requests at once and without attributes. Only the marks that it reports are in
//! order. A group becomes durable by a *flush round*: a FLUSH of every drive with unflushed writes.

use super::base::{Base, has_base};
use super::{Capabilities, Cause, Engine, Limits, Marks, Payload, Refusal, RequestId, Write};
use crate::attribute::{Kind, Member, Seq};
use crate::probe::{self, Plant};
use crate::topology::Topology;
use crate::write_order::DriveOrder;

/// The capabilities of the engine.
pub(super) const CAPABILITIES: Capabilities = Capabilities {
    keeps_order: false,
    is_serial: false,
    completes_durable: false,
    keeps_log: false,
    needs_binding: false,
    orders_at_target: false,
    can_replay: false,
    drive_order: DriveOrder::None,
    queues_per_server: 1,
};

/// The `none` engine of one stream.
#[derive(Debug)]
pub struct NoOrder<P> {
    base: Base<P>,
    flush: FlushRound,
}

/// The FLUSHes of all dirty drives, as one operation. At most one round is in flight.
#[derive(Debug, Default)]
pub(super) struct FlushRound {
    /// The last group that the caller wants durable.
    wanted_durable: Seq,
    /// The round in flight, if there is one.
    in_flight: Option<RoundInFlight>,
}

/// A flush round whose FLUSHes have not all ended.
#[derive(Debug)]
struct RoundInFlight {
    /// The last group that is durable when the round ends.
    covers_up_to: Seq,
    /// The number of FLUSHes that have not ended.
    outstanding: u32,
}

impl FlushRound {
    /// Notes that the caller wants all groups up to `seq` durable.
    pub(super) fn request(&mut self, seq: Seq) {
        self.wanted_durable = self.wanted_durable.max(seq);
    }

    /// Starts a round if the caller wants one, none is in flight, and all writes that the round
    /// must cover have completed. A FLUSH covers only writes that were complete before it (trap
    /// T2).
    #[inline]
    pub(super) fn start_if_due<P: Payload>(&mut self, base: &mut Base<P>) {
        let complete = base.window.complete();
        let is_wanted = self.wanted_durable > base.window.durable();
        if self.in_flight.is_some() || !is_wanted || complete < self.wanted_durable {
            return;
        }
        self.start(base, complete);
    }

    /// Starts a round if the groups up to `seq` are complete and not durable, and none is in flight,
    /// whatever the caller wants.
    pub(super) fn start_for<P: Payload>(&mut self, base: &mut Base<P>, seq: Seq) {
        let complete = base.window.complete();
        if self.in_flight.is_none() && seq > base.window.durable() && complete >= seq {
            self.start(base, complete);
        }
    }

    /// Starts a round that covers all groups up to `covers_up_to`.
    #[cold]
    fn start<P: Payload>(&mut self, base: &mut Base<P>, covers_up_to: Seq) {
        for index in 0..base.dirty.len() {
            let Some(last_write) = base.dirty[index] else { continue };
            base.add_flush(Member(index as u8), covers_up_to, 0);
            // A drive with a write of a later group stays dirty after this round.
            if last_write <= covers_up_to {
                base.dirty[index] = None;
            }
        }
        let outstanding = base.shaped.len() as u32;
        base.enqueue();
        if outstanding == 0 {
            base.window.set_durable(covers_up_to);
        } else {
            self.in_flight = Some(RoundInFlight { covers_up_to, outstanding });
        }
    }

    /// Notes that a FLUSH of the round has succeeded.
    pub(super) fn on_flush_succeeded<P: Payload>(&mut self, base: &mut Base<P>) {
        if base.failure.is_some() {
            // The failed FLUSH of another stream may have lost writes that this FLUSH covers (trap
            // T22).
            return;
        }
        let Some(round) = &mut self.in_flight else { return };
        round.outstanding -= 1;
        if round.outstanding == 0 {
            base.window.set_durable(round.covers_up_to);
            self.in_flight = None;
            self.start_if_due(base);
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

has_base!(NoOrder);

impl<P: Payload> Engine<P> for NoOrder<P> {
    fn admit(&mut self, writes: &mut [Write<P>], tag: u64, durable: bool) -> Result<Seq, Refusal> {
        let base = &mut self.base;
        let (seq, bytes) = base.shape_and_number(writes, tag, durable)?;
        base.note_dirty(seq);
        let request_count = base.shaped.len() as u32;
        let is_durable_when_complete =
            !base.has_volatile_member || probe::is_bug_planted(Plant::NoneNoFlush);
        base.window.add_group(request_count, is_durable_when_complete, bytes);
        if !base.merge_into_tail() {
            base.enqueue();
        }
        if request_count == 0 {
            // A durable group without writes is complete once all groups before it are.
            base.window.complete_empty_group();
        }
        if durable {
            self.flush.request(seq);
            self.flush.start_if_due(base);
        }
        Ok(seq)
    }

    fn on_request_done(&mut self, id: RequestId, result: Result<(), Cause>) {
        let request = self.base.request(id);
        let (first, last) = (request.seq, request.seq_end());
        let is_flush = request.kind == Kind::Flush;
        match result {
            Err(cause) => self.base.poison_by_request(id, cause),
            Ok(()) if is_flush => self.flush.on_flush_succeeded(&mut self.base),
            Ok(()) => {
                self.base.window.count_request(first, last);
                self.flush.start_if_due(&mut self.base);
            }
        }
        self.base.complete_and_free(id);
    }

    fn poll(&mut self) -> Marks {
        self.base.deliver_without_replay()
    }

    fn ask_durable(&mut self, seq: Seq) {
        self.flush.request(seq.min(self.base.window.last()));
        if self.base.failure.is_none() {
            self.flush.start_if_due(&mut self.base);
        }
    }
}

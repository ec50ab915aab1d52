//! Traces a stream's groups through the initiator's stages, one group at a time.

use riopipe_order::attribute::Seq;
use riopipe_order::engine::{Payload, RequestId};

use super::StreamSession;
use crate::stages::{Sampler, Spent, Stage, Trace};

/// A seq that no group has.
const NO_GROUP: u64 = u64::MAX;
/// An id that no request has.
const NO_REQUEST: u32 = u32::MAX;

/// The trace of a stream: it follows one group at a time, from its submission until all groups up
/// to it are complete.
///
/// If the group has several requests, the trace follows the one that was sent last. The time from
/// its answer until the other requests are answered counts as [`Stage::InOrderWait`].
#[derive(Debug)]
pub(super) struct Tracer {
    /// Chooses the groups that are traced.
    sampler: Sampler,
    /// The seq of the traced group, or [`NO_GROUP`].
    traced_seq: u64,
    /// The id of the request of the traced group that was sent last and is in flight, or
    /// [`NO_REQUEST`].
    traced_request: u32,
    /// The stage that the traced group has just entered. The caller gives the time later.
    entered_stage: Option<Stage>,
    trace: Trace,
}

impl Tracer {
    pub(super) fn new(seed: u64) -> Self {
        Self {
            sampler: Sampler::new(seed),
            traced_seq: NO_GROUP,
            traced_request: NO_REQUEST,
            entered_stage: None,
            trace: Trace::begin(Stage::Submit, 0),
        }
    }

    /// Handles a request that becomes a command. The request covers `span` groups from `seq` on.
    #[inline]
    pub(super) fn on_sent(&mut self, id: RequestId, seq: Seq, span: u16) {
        // One comparison for two: the traced group is not before `seq`, and less than `span` after
        // it. It is false for `NO_GROUP`, which is far from every seq.
        if self.traced_seq.wrapping_sub(seq.0) < u64::from(span) {
            self.traced_request = id.0;
            self.entered_stage = Some(Stage::Wire);
        }
    }

    /// Handles the answer to a request.
    #[inline]
    pub(super) fn on_answered(&mut self, id: RequestId) {
        if self.traced_request == id.0 {
            self.traced_request = NO_REQUEST;
            self.entered_stage = Some(Stage::InOrderWait);
        }
    }
}

/// The tracing calls of a session. All times are the caller's, ns, from any origin.
impl<P: Payload + AsRef<[u8]>> StreamSession<P> {
    /// Whether the next submitted group must be traced. The caller calls this once for each group.
    #[inline]
    pub fn traces_next(&mut self) -> bool {
        self.tracer.sampler.is_due() && self.tracer.traced_seq == NO_GROUP
    }

    /// Begins to trace group `seq`, which was admitted between `since` and `now`.
    #[cold]
    pub fn trace(&mut self, seq: Seq, since: u64, now: u64) {
        let tracer = &mut self.tracer;
        tracer.sampler.choose_next(now);
        tracer.traced_seq = seq.0;
        tracer.trace = Trace::begin(Stage::Submit, since);
        tracer.trace.enter(Stage::OrderQueue, now);
    }

    /// Whether the session needs a call of [`instant`](Self::instant). The caller checks this after
    /// [`pump`](Self::pump) and [`receive`](Self::receive).
    #[inline]
    #[must_use]
    pub fn wants_instant(&self) -> bool {
        self.tracer.entered_stage.is_some()
    }

    /// Gives the session the present time.
    #[cold]
    pub fn instant(&mut self, now: u64) {
        if let Some(stage) = self.tracer.entered_stage.take() {
            self.tracer.trace.enter(stage, now);
        }
    }

    /// Whether a traced group is complete as of the last [`poll`](Self::poll).
    #[inline]
    #[must_use]
    pub fn has_traced(&self) -> bool {
        self.marks.complete.0 >= self.tracer.traced_seq
    }

    /// Ends the trace of a group that is complete. Returns the time that it spent in each stage.
    #[cold]
    pub fn traced(&mut self, now: u64) -> Spent {
        self.instant(now);
        self.tracer.traced_seq = NO_GROUP;
        self.tracer.traced_request = NO_REQUEST;
        self.tracer.trace.end(now)
    }
}

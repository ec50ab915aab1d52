//! Follows a group of a stream through the initiator's stages, one at a time.

use riopipe_order::attribute::Seq;
use riopipe_order::engine::{Payload, RequestId};

use super::StreamSession;
use crate::stages::{Sampler, Spent, Stage, Trace};

/// A seq that no group has, and an id that no request has.
const NO_GROUP: u64 = u64::MAX;
const NO_REQUEST: u32 = u32::MAX;

/// The trace of a stream: it follows one group at a time, from its submission until all groups up
/// to it are complete.
///
/// Of a group of several requests, it follows the last one sent on the wire. The time until the
/// others are answered, too, counts as waiting for order.
#[derive(Debug)]
pub(super) struct Tracer {
    sampler: Sampler,
    /// The traced group.
    seq: u64,
    /// Its request that is in flight.
    request: u32,
    /// The stage that it has just entered; the caller adds the time.
    entered: Option<Stage>,
    trace: Trace,
}

impl Tracer {
    pub(super) fn new(seed: u64) -> Self {
        Self {
            sampler: Sampler::new(seed),
            seq: NO_GROUP,
            request: NO_REQUEST,
            entered: None,
            trace: Trace::begin(Stage::Submit, 0),
        }
    }

    /// A request that covers `span` groups from `seq` on becomes a command.
    #[inline]
    pub(super) fn sent(&mut self, id: RequestId, seq: Seq, span: u16) {
        if self.seq.wrapping_sub(seq.0) < u64::from(span) {
            self.request = id.0;
            self.entered = Some(Stage::Wire);
        }
    }

    /// A request is answered.
    #[inline]
    pub(super) fn answered(&mut self, id: RequestId) {
        if self.request == id.0 {
            self.request = NO_REQUEST;
            self.entered = Some(Stage::InOrderWait);
        }
    }
}

/// The tracing calls of a session. All times are the caller's, ns, from any origin.
impl<P: Payload + AsRef<[u8]>> StreamSession<P> {
    /// Whether the next submitted group must be traced. The caller calls this once for each group.
    #[inline]
    pub fn traces_next(&mut self) -> bool {
        self.tracer.sampler.is_due() && self.tracer.seq == NO_GROUP
    }

    /// Group `seq`, which is traced, has been admitted between `since` and `now`.
    #[cold]
    pub fn trace(&mut self, seq: Seq, since: u64, now: u64) {
        let tracer = &mut self.tracer;
        tracer.sampler.taken();
        tracer.seq = seq.0;
        tracer.trace = Trace::begin(Stage::Submit, since);
        tracer.trace.enter(Stage::OrderQueue, now);
    }

    /// Whether the session needs a call of [`instant`](Self::instant). The caller checks this after
    /// [`pump`](Self::pump) and [`receive`](Self::receive).
    #[inline]
    #[must_use]
    pub fn wants_instant(&self) -> bool {
        self.tracer.entered.is_some()
    }

    /// Gives the session the present time.
    #[cold]
    pub fn instant(&mut self, now: u64) {
        if let Some(stage) = self.tracer.entered.take() {
            self.tracer.trace.enter(stage, now);
        }
    }

    /// Whether a traced group is complete as of the last [`poll`](Self::poll).
    #[inline]
    #[must_use]
    pub fn has_traced(&self) -> bool {
        self.marks.complete.0 >= self.tracer.seq
    }

    /// The time of the traced group in each stage; the group is complete.
    #[cold]
    pub fn traced(&mut self, now: u64) -> Spent {
        self.instant(now);
        self.tracer.seq = NO_GROUP;
        self.tracer.request = NO_REQUEST;
        self.tracer.trace.end(now)
    }
}

//! Follows an ordered write of a stream through the target's stages, one at a time.

use riopipe_order::gate::{Step, Ticket};

use crate::stages::{Sampler, Spent, Stage, Trace};

/// No slot of a connection.
const NO_SLOT: u32 = u32::MAX;

/// The trace of a bound stream: one write from its arrival until the socket has its answer. While
/// one write is traced, no other trace begins. That loses few samples: seldom are more writes in
/// flight than lie between two samples.
///
/// Every write costs a comparison. The time is only read if the comparison holds. After a refusal
/// the traced write never ends, and nothing more is traced, because the stream has failed.
#[derive(Debug)]
pub(super) struct Tracer {
    sampler: Sampler,
    /// How many requests were reported to the environment.
    reported_count: u64,
    /// The slot of the traced write, until it may be answered.
    traced_slot: u32,
    /// It has arrived, and is not in the log.
    awaits_append: bool,
    /// It is complete. The batch's last fence is still to come.
    awaits_fence: bool,
    /// Its answer is in the outbox.
    awaits_socket: bool,
    trace: Trace,
}

impl Tracer {
    pub(super) fn new(seed: u64) -> Self {
        Self {
            sampler: Sampler::new(seed),
            reported_count: 0,
            traced_slot: NO_SLOT,
            awaits_append: false,
            awaits_fence: false,
            awaits_socket: false,
            trace: Trace::begin(Stage::Gate, 0),
        }
    }

    /// Notes that one more request has [`arrived`](Self::arrived). Returns whether it is to be
    /// reported: because it is to be traced, or because the traced write waits for it.
    #[inline]
    pub(super) fn count_arrival(&mut self) -> bool {
        self.sampler.is_due()
    }

    /// How many requests have arrived since the last call.
    #[inline]
    pub(super) fn take_arrival_count(&mut self) -> u64 {
        let seen = self.sampler.seen();
        seen - core::mem::replace(&mut self.reported_count, seen)
    }

    /// Notes that the request in slot `index` has arrived, and that `steps` are the next steps of
    /// the gate.
    #[cold]
    pub(super) fn on_arrived(&mut self, index: u16, is_write: bool, steps: &[Step], now: u64) {
        if is_write && self.traced_slot == NO_SLOT && !self.awaits_socket {
            self.traced_slot = u32::from(index);
            self.awaits_append = true;
            self.trace = Trace::begin(Stage::Gate, now);
        }
        if self.awaits_append && steps.contains(&Step::Append(Ticket(self.traced_slot))) {
            self.awaits_append = false;
            self.trace.enter(Stage::LogAppend, now);
            // Up to here every request is reported: it may close the gap before the traced one.
            self.sampler.taken();
        }
    }

    /// Whether the traced write is among those that a fence of the log now covers.
    #[inline]
    pub(super) fn is_logging(&self) -> bool {
        self.traced_slot != NO_SLOT && self.trace.stage() == Stage::LogAppend
    }

    /// Notes that the log is fenced, and that `steps` are next. If the gate has released the write,
    /// it only waits for its turn at the drive.
    #[cold]
    pub(super) fn on_logged(&mut self, steps: &[Step], now: u64) {
        let is_released = steps.contains(&Step::Write(Ticket(self.traced_slot)));
        self.trace.enter(if is_released { Stage::Device } else { Stage::Gate }, now);
    }

    /// Whether the traced write is in slot `index`.
    #[inline]
    pub(super) fn traces_slot(&self, index: u16) -> bool {
        self.traced_slot == u32::from(index)
    }

    /// Notes that its data has not arrived yet, or that its FLUSH waits for others.
    #[cold]
    pub(super) fn on_held(&mut self, now: u64) {
        self.trace.enter(Stage::Gate, now);
    }

    /// Notes that it goes to the drive.
    #[cold]
    pub(super) fn on_submitted(&mut self, now: u64) {
        self.trace.enter(Stage::Device, now);
    }

    /// Notes that it is back from the drive.
    #[cold]
    pub(super) fn on_landed(&mut self, is_flush_due: bool, now: u64) {
        self.trace.enter(if is_flush_due { Stage::Gate } else { Stage::Persist }, now);
    }

    /// Whether some write is being traced.
    #[inline]
    pub(super) fn is_tracing(&self) -> bool {
        self.traced_slot != NO_SLOT
    }

    /// Notes that the requests in `done` are complete, and are persisted next.
    #[cold]
    pub(super) fn on_completing(&mut self, done: &[Step], now: u64) {
        let ticket = Ticket(self.traced_slot);
        if done.iter().any(|step| matches!(step, Step::Complete { ticket: t, .. } if *t == ticket))
        {
            self.awaits_fence = true;
            self.trace.enter(Stage::Persist, now);
        }
    }

    /// Whether the traced write is among those that are now persisted and may be answered.
    #[inline]
    pub(super) fn awaits_fence(&self) -> bool {
        self.awaits_fence
    }

    /// Notes that it is about to be answered. Its slot may be another's from here on.
    #[cold]
    pub(super) fn on_persisted(&mut self, now: u64) {
        self.traced_slot = NO_SLOT;
        self.awaits_fence = false;
        self.awaits_socket = true;
        self.trace.enter(Stage::Completion, now);
    }

    /// Whether its answer is in transit to the socket.
    #[inline]
    pub(super) fn awaits_socket(&self) -> bool {
        self.awaits_socket
    }

    /// Notes that the socket has its answer.
    #[cold]
    pub(super) fn on_sent(&mut self, now: u64) -> Spent {
        self.awaits_socket = false;
        self.trace.end(now)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A tracer that is about to trace the next write.
    fn due() -> Tracer {
        let mut tracer = Tracer::new(1);
        while !tracer.count_arrival() {}
        tracer
    }

    fn complete(traced_slot: u32) -> [Step; 2] {
        [0, traced_slot]
            .map(|traced_slot| Step::Complete { ticket: Ticket(traced_slot), persist: true })
    }

    #[test]
    fn a_write_with_a_flush_goes_through_the_gate_and_the_drive_twice() {
        let mut tracer = due();
        tracer.on_arrived(3, false, &[Step::Append(Ticket(3))], 0);
        assert!(!tracer.is_tracing() && tracer.count_arrival(), "only writes are traced");
        // There is a gap before it.
        tracer.on_arrived(7, true, &[], 0);
        assert!(tracer.is_tracing() && !tracer.is_logging() && tracer.count_arrival());
        tracer.on_arrived(9, true, &[Step::Append(Ticket(9)), Step::Append(Ticket(7))], 10);
        assert!(tracer.is_logging());
        tracer.on_logged(&[Step::Write(Ticket(8))], 30);
        assert!(tracer.traces_slot(7) && !tracer.traces_slot(9) && !tracer.is_logging());
        tracer.on_submitted(60);
        tracer.on_landed(true, 100);
        tracer.on_submitted(150);
        tracer.on_landed(false, 210);
        tracer.on_completing(&complete(6), 215);
        assert!(!tracer.awaits_fence());
        tracer.on_completing(&complete(7), 220);
        assert!(tracer.awaits_fence());
        tracer.on_persisted(280);
        assert!(!tracer.is_tracing() && tracer.awaits_socket());
        while !tracer.count_arrival() {}
        tracer.on_arrived(7, true, &[Step::Append(Ticket(7))], 300);
        assert!(!tracer.is_tracing(), "one at a time");
        let spent = tracer.on_sent(360);
        let spent = Stage::TARGET.map(|stage| spent.of(stage));
        assert_eq!(spent, [10 + 30 + 50, 20, 40 + 60, 70, 80]);
        assert!(!tracer.awaits_socket());
    }

    #[test]
    fn what_waits_for_its_turn_at_the_drive_is_the_drives() {
        let mut tracer = due();
        tracer.on_arrived(0, true, &[Step::Append(Ticket(0)), Step::Write(Ticket(0))], 0);
        tracer.on_logged(&[Step::Write(Ticket(1)), Step::Write(Ticket(0))], 10);
        tracer.on_submitted(15);
        tracer.on_landed(false, 40);
        tracer.on_completing(&complete(0), 50);
        tracer.on_persisted(60);
        let spent = tracer.on_sent(60);
        assert_eq!((spent.of(Stage::Device), spent.of(Stage::Persist)), (30, 20));
    }

    #[test]
    fn every_request_is_reported_once() {
        let mut tracer = Tracer::new(1);
        for _ in 0..5 {
            let _ = tracer.count_arrival();
        }
        assert_eq!((tracer.take_arrival_count(), tracer.take_arrival_count()), (5, 0));
    }
}

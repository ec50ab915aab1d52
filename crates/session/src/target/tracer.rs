//! Follows single ordered writes of a stream through the stages of the target, for the metrics.
//!
//! ```text
//! on_arrival → on_logged → on_submitted → on_landed → on_completing → on_persisted → on_sent
//! ```

use riopipe_order::gate::{Step, Ticket};

use crate::stages::{Sampler, Spent, Stage, Trace};

/// Stands in [`Tracer::traced_slot`] for "no write is being traced".
const NO_SLOT: u32 = u32::MAX;

/// The tracer of a bound stream. It follows one write at a time, from the arrival of the write
/// until the socket has its completion. Few samples are lost by that, because there are seldom more
/// writes in flight than writes between two samples.
///
/// Every write costs one comparison. The time is read only for the traced write. If the traced
/// write is refused, its trace never ends, and nothing more is traced, because the stream has
/// failed.
#[derive(Debug)]
pub(super) struct Tracer {
    sampler: Sampler,
    /// How many requests have been reported to the environment.
    reported_count: u64,
    /// The slot of the traced write in the table of commands, until its completion is sent;
    /// otherwise [`NO_SLOT`].
    traced_slot: u32,
    /// The traced write has arrived and is not in the log yet.
    awaits_append: bool,
    /// The traced write is complete, and the last fence of its batch is still to come.
    awaits_fence: bool,
    /// The completion of the traced write is in the outbox.
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

    /// Counts one more request that has arrived. Returns whether the request must be passed to
    /// [`on_arrival`](Self::on_arrival): it may be the next traced write, or the traced write may
    /// wait for it.
    #[inline]
    pub(super) fn count_arrival(&mut self) -> bool {
        self.sampler.is_due()
    }

    /// Returns how many requests have arrived since the last call.
    #[inline]
    pub(super) fn take_arrival_count(&mut self) -> u64 {
        let seen = self.sampler.write_count();
        seen - core::mem::replace(&mut self.reported_count, seen)
    }

    /// Notes that the request in slot `index` has arrived, and that the gate has returned `steps`.
    #[cold]
    pub(super) fn on_arrival(&mut self, index: u16, is_write: bool, steps: &[Step], now: u64) {
        if is_write && self.traced_slot == NO_SLOT && !self.awaits_socket {
            self.traced_slot = u32::from(index);
            self.awaits_append = true;
            self.trace = Trace::begin(Stage::Gate, now);
        }
        if self.awaits_append && steps.contains(&Step::Append(Ticket(self.traced_slot))) {
            self.awaits_append = false;
            self.trace.enter(Stage::LogAppend, now);
            // Until now every request was passed to this method, because it might close the gap in
            // the order before the traced write. This is no longer needed.
            self.sampler.choose_next(now);
        }
    }

    /// Whether the traced write is appended to the log and waits for the fence of the log.
    #[inline]
    pub(super) fn is_logging(&self) -> bool {
        self.traced_slot != NO_SLOT && self.trace.stage() == Stage::LogAppend
    }

    /// Notes that the log is fenced, and that `steps` are carried out next. If they have the
    /// `Write` of the traced write, the gate has released it, and it waits only for the drive.
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

    /// Notes that the gate has released the traced write, but its data has not arrived yet.
    #[cold]
    pub(super) fn on_held(&mut self, now: u64) {
        self.trace.enter(Stage::Gate, now);
    }

    /// Notes that an operation of the traced write goes to the drive.
    #[cold]
    pub(super) fn on_submitted(&mut self, now: u64) {
        self.trace.enter(Stage::Device, now);
    }

    /// Notes that an operation of the traced write has come back from the drive. With
    /// `is_flush_due`, a FLUSH follows.
    #[cold]
    pub(super) fn on_landed(&mut self, is_flush_due: bool, now: u64) {
        self.trace.enter(if is_flush_due { Stage::Gate } else { Stage::Persist }, now);
    }

    /// Whether a write is being traced.
    #[inline]
    pub(super) fn is_tracing(&self) -> bool {
        self.traced_slot != NO_SLOT
    }

    /// Notes that the steps in `done` have ended their requests, whose persist words are fenced
    /// next.
    #[cold]
    pub(super) fn on_completing(&mut self, done: &[Step], now: u64) {
        let ticket = Ticket(self.traced_slot);
        let completes_traced =
            |step: &Step| matches!(step, Step::Complete { ticket: t, .. } if *t == ticket);
        if done.iter().any(completes_traced) {
            self.awaits_fence = true;
            self.trace.enter(Stage::Persist, now);
        }
    }

    /// Whether the traced write is complete and waits for the fence of its persist word.
    #[inline]
    pub(super) fn awaits_fence(&self) -> bool {
        self.awaits_fence
    }

    /// Notes that the completion of the traced write is about to be sent. Another request may use
    /// its slot from now on.
    #[cold]
    pub(super) fn on_persisted(&mut self, now: u64) {
        self.traced_slot = NO_SLOT;
        self.awaits_fence = false;
        self.awaits_socket = true;
        self.trace.enter(Stage::Completion, now);
    }

    /// Whether the completion of the traced write is in the outbox, in transit to the socket.
    #[inline]
    pub(super) fn awaits_socket(&self) -> bool {
        self.awaits_socket
    }

    /// Notes that the socket has taken the completion. Returns the time that the write has spent in
    /// each stage.
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
        tracer.on_arrival(3, false, &[Step::Append(Ticket(3))], 0);
        assert!(!tracer.is_tracing() && tracer.count_arrival(), "only writes are traced");
        // There is a gap before it.
        tracer.on_arrival(7, true, &[], 0);
        assert!(tracer.is_tracing() && !tracer.is_logging() && tracer.count_arrival());
        tracer.on_arrival(9, true, &[Step::Append(Ticket(9)), Step::Append(Ticket(7))], 10);
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
        tracer.on_arrival(7, true, &[Step::Append(Ticket(7))], 300);
        assert!(!tracer.is_tracing(), "one at a time");
        let spent = tracer.on_sent(360);
        let spent = Stage::TARGET.map(|stage| spent.of(stage));
        assert_eq!(spent, [10 + 30 + 50, 20, 40 + 60, 70, 80]);
        assert!(!tracer.awaits_socket());
    }

    #[test]
    fn what_waits_for_its_turn_at_the_drive_is_the_drives() {
        let mut tracer = due();
        tracer.on_arrival(0, true, &[Step::Append(Ticket(0)), Step::Write(Ticket(0))], 0);
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

//! Reports of a stream to the oracle: its marks, its failure, the time for which it waits for a
//! target, and the memory that it holds.

use std::sync::atomic::Ordering;

use riopipe_nvme::command::Status;
use riopipe_order::attribute::StreamId;
use riopipe_order::engine::{Cause, Failure};
use riopipe_session::initiator::stream_driver::StreamDriver;
use riopipe_session::initiator::volume::block_ownership::BlockOwnershipChecker;
use riopipe_session::wire::status;

use super::application::Call;
use super::stream::Stream;
use crate::core::{Core, MS};
use crate::oracle::{Drives, Poison, Poisoned, Promise};

/// The longest time between the moment at which a target has been unreachable for too long and the
/// moment at which a thread in a call has noticed that, ns.
const NOTICED_NS: u64 = 2 * MS;

impl Stream {
    /// Reads the marks, like the thread that drives the stream after each round. Returns false if
    /// the stream has failed.
    pub(super) fn check_marks(
        &mut self,
        ownership_checker: &mut BlockOwnershipChecker,
        drives: &Drives<'_>,
        core: &mut Core,
    ) -> bool {
        let (era, id) = (self.era, self.id);
        let Some(driver) = self.driver() else { return false };
        let polled = driver.marks();
        if self.is_reader {
            if let Err(failure) = polled {
                core.trace(|| format!("the reader has failed: {failure:?}"));
                self.failed = true;
                self.call = Call::None;
            }
            return polled.is_ok();
        }
        let Some(driver) = self.driver() else { return false };
        let (marks, released) = (driver.delivered(), driver.released());
        self.watchers.publish(marks);
        core.oracle.marks(era, id, marks.complete, marks.durable, drives);
        ownership_checker.on_released(StreamId(id), released);
        for (stream, seq) in core.oracle.covered(era, id, marks.durable) {
            ownership_checker.on_released(StreamId(stream), seq);
        }
        self.check_memory(core);
        match polled {
            Ok(_) => {
                self.check_wait_limit(core);
                true
            }
            Err(failure) => {
                self.has_failed_with(failure, core);
                false
            }
        }
    }

    /// Reports the failure of the stream.
    pub(super) fn has_failed_with(&mut self, failure: Failure, core: &mut Core) {
        if let Some(driver) = self.driver() {
            driver.check_connections(core.now);
        }
        while let Some(event) = self.driver().and_then(StreamDriver::next_event) {
            self.handle_event(event, core);
        }
        self.failed = true;
        self.call = Call::None;
        self.watchers.end();
        let Some(machine) = self.machine_of(failure.member) else { return };
        let (id, why) = (self.id, format!("{failure:?}"));
        core.trace(|| format!("stream {id}: failed: {why}"));
        let is_status = |code: u16, of: Status| code == of.code();
        let cause = match failure.cause {
            Cause::Disconnected | Cause::TimedOut => Poison::Lost,
            Cause::OtherStream => Poison::Other,
            Cause::Status(code)
                if is_status(code, status::STREAM_BUSY)
                    || is_status(code, status::NOT_OWNER)
                    || is_status(code, status::NOT_BOUND) =>
            {
                Poison::Lost
            }
            Cause::Status(code)
                if is_status(code, status::STALE_GENERATION)
                    || is_status(code, status::LEASE_OVER) =>
            {
                Poison::Fenced
            }
            // Only the owner may send plain writes (trap T21).
            Cause::Status(code)
                if is_status(code, status::GUARDED)
                    && !core.scenario.volume.engine.kind().capabilities().orders_at_target =>
            {
                Poison::Fenced
            }
            _ => Poison::Failed,
        };
        self.guarded = failure.cause == Cause::Status(status::GUARDED.code());
        self.fenced = cause == Poison::Fenced && !self.guarded;
        let waited = core.now.saturating_sub(self.carried[machine]);
        let unreachable = matches!(failure.cause, Cause::Disconnected | Cause::TimedOut);
        if unreachable && core.scenario.volume.engine.replays() && waited < self.loss_ns(core) {
            let what = format!(
                "stream {id} gave target {machine} up after {waited} ns, before its loss \
                 timeout was over: {why}"
            );
            core.oracle.broken(Promise::P7, what);
        }
        core.oracle.poisoned(self.era, id, &Poisoned { machine, cause, why }, core.now);
    }

    fn loss_ns(&self, core: &Core) -> u64 {
        u64::from(core.scenario.client.loss_ms) * MS
    }

    /// P8: an owner that waits for an unreachable target gives it up in time.
    fn check_wait_limit(&self, core: &mut Core) {
        let loss_ns = self.loss_ns(core);
        let waits = self.is_in_call() && core.is_logged();
        let latest = |carried: &u64| carried.saturating_add(loss_ns).saturating_add(NOTICED_NS);
        if waits && self.carried.iter().any(|carried| core.now > latest(carried)) {
            let what = format!(
                "stream {} waits for a target that has been unreachable for longer than its loss timeout",
                self.id
            );
            core.oracle.broken(Promise::P8, what);
        }
    }

    /// T14: the memory for replays is bounded.
    fn check_memory(&self, core: &mut Core) {
        let held = self.held.load(Ordering::Relaxed);
        if held > self.kept_max {
            let (id, max) = (self.id, self.kept_max);
            let what = format!("stream {id} holds {held} bytes for replay; its bound is {max}");
            core.oracle.broken(Promise::P8, what);
        }
    }
}

//! The batches of an ordered queue. A batch is everything that arrives in one receive, or comes
//! back from the drives in one poll.
//!
//! All requests of a batch share the fences of the log. The order of the steps makes sure that no
//! write reaches a drive before its attribute is in the log, and that no completion is sent before
//! the persist word is in the log (paper §4.3.2 steps 5 to 7; T7):
//!
//! ```text
//! append all attributes → one fence → submit the writes
//! set all persist words → one fence → send the completions
//! ```

use alloc::format;
use core::mem;

use riopipe_nvme::command::Status;
use riopipe_order::attribute::{Flags, Kind};
use riopipe_order::block_device::{self, BlockDevice, IoError, Submitted};
use riopipe_order::gate::{Cause, Step, Ticket};
use riopipe_order::probe::{self, Plant, Rare};
use riopipe_order::region::RegionError;

use super::commands::{Command, DataState, Stage};
use super::context::Context;
use super::env::{TargetEnv, status_of};
use super::ids::OpId;
use super::ordered::OrderedQueue;
use super::plain::submit_zeroing;
use crate::outbox::Outbox;

impl<E: TargetEnv> OrderedQueue<E> {
    /// Finishes a batch: carries out the steps of the gate in their order, fences the persist
    /// words, and then sends the completions. `buf` is the receive buffer of the batch.
    pub(super) fn finish_batch(
        &mut self,
        context: &mut Context<E>,
        buf: &[u8],
        env: &mut E,
        outbox: &mut Outbox<E::Buf>,
    ) {
        self.report_flush_failures(context);
        env.ordered(self.tracer.take_arrival_count());
        let persisted_count = self.carry_out_steps(context, buf, env);
        if self.tracer.is_tracing() {
            self.tracer.on_completing(&self.to_answer, env.instant());
        }
        self.fence_persist_words(context, persisted_count, env);
        if self.tracer.awaits_fence() {
            self.tracer.on_persisted(env.instant());
        }
        self.fill.publish(&self.log);
        self.report_stop_once(env);
        for step in self.to_answer.drain(..) {
            match step {
                Step::Complete { ticket, .. } => {
                    context.complete_command_inlined(ticket.0 as u16, Status::SUCCESS, 0, outbox);
                }
                Step::Refuse { ticket, why } => Self::refuse(context, ticket.0 as u16, why, outbox),
                Step::Append(_) | Step::Write(_) | Step::Flush(_) => {}
            }
        }
        self.copy_held_data(context, buf, env);
    }

    /// Fences the `persisted_count` persist words that this batch has set. If the fence fails, the
    /// gate turns the completions of the batch into refusals.
    #[inline(always)]
    fn fence_persist_words(&mut self, context: &mut Context<E>, persisted_count: u32, env: &mut E) {
        let is_shared = persisted_count > 1;
        if is_shared {
            probe::count_rare(Rare::FenceShared);
        }
        let must_fence = persisted_count > 0
            && !probe::is_bug_planted(Plant::T7AnswerBeforeFence)
            && !(is_shared && probe::is_bug_planted(Plant::T7BatchBeforeFence));
        if must_fence && let Err(error) = self.log.fence() {
            probe::count_rare(Rare::LogFailed);
            self.gate.on_fence_failed(&mut context.commands, &mut self.to_answer);
            report_log_failure(context, &error, env);
        }
    }

    /// Reports to the environment that the stream has failed, if that was not reported before. The
    /// end of a connection is no failure of its stream.
    #[inline(always)]
    fn report_stop_once(&mut self, env: &mut E) {
        if self.has_reported_stop {
            return;
        }
        let Some(cause) = self.gate.poison_cause() else { return };
        self.has_reported_stop = true;
        if !matches!(cause, Cause::Closed) {
            env.stopped(cause);
        }
    }

    /// Carries out the steps of the gate until there are none left. Returns how many persist words
    /// were set.
    #[inline(always)]
    fn carry_out_steps(&mut self, context: &mut Context<E>, buf: &[u8], env: &mut E) -> u32 {
        let mut persisted_count = 0u32;
        // The batch fences its appends even if no step is left: an entry that was appended may have
        // to wait at the gate, and then the gate returns no step for the entry yet.
        while self.has_unfenced_appends || !self.gate_steps.is_empty() {
            let must_fence = mem::take(&mut self.has_unfenced_appends)
                && !probe::is_bug_planted(Plant::T7WriteBeforeFence);
            if must_fence && let Err(error) = self.log.fence() {
                probe::count_rare(Rare::LogFailed);
                self.gate.on_fence_failed(&mut context.commands, &mut self.gate_steps);
                report_log_failure(context, &error, env);
            }
            if self.tracer.is_logging() {
                self.tracer.on_logged(&self.gate_steps, env.instant());
            }
            let mut in_progress = mem::take(&mut self.steps_in_progress);
            mem::swap(&mut in_progress, &mut self.gate_steps);
            for &step in &in_progress {
                match step {
                    Step::Append(_) => {
                        debug_assert!(false, "`on_request` has carried out the appends")
                    }
                    Step::Write(ticket) => {
                        self.submit(context, ticket.0 as u16, buf, env);
                        // The fast path: the drive has written the request within the call, and no
                        // other entry waited for the request. So the gate returns one `Complete`,
                        // which is carried out here without another pass of the loop.
                        if let [step @ Step::Complete { .. }] = self.gate_steps[..] {
                            self.gate_steps.clear();
                            persisted_count +=
                                u32::from(self.set_persist_word(&context.commands, step));
                        }
                    }
                    Step::Flush(ticket) => self.submit_flush(context, ticket.0 as u16, env),
                    Step::Complete { .. } | Step::Refuse { .. } => {
                        persisted_count +=
                            u32::from(self.set_persist_word(&context.commands, step));
                    }
                }
            }
            in_progress.clear();
            self.steps_in_progress = in_progress;
        }
        persisted_count
    }

    /// Sends the completion of a refused request. If the data of the request is still to arrive,
    /// only marks the request as refused: the completion is sent when the data has arrived.
    fn refuse(context: &mut Context<E>, index: u16, why: Cause, outbox: &mut Outbox<E::Buf>) {
        let status = Self::refusal_status(context, why);
        let Some(command) = context.commands.get_used(index) else {
            return;
        };
        let status = *command.early_status.get_or_insert(status);
        match command.stage {
            Stage::Receiving => command.is_refused = true,
            Stage::Budget => {
                context.waiting_for_budget.retain(|other| *other != index);
                context.complete_command(index, status, 0, outbox);
            }
            _ => context.complete_command(index, status, 0, outbox),
        }
    }

    /// Copies the in-capsule data of the writes that the gate still holds back, because the receive
    /// buffer gets other content after the batch.
    fn copy_held_data(&mut self, context: &mut Context<E>, buf: &[u8], env: &mut E) {
        let mut is_out_of_memory = false;
        for index in self.with_capsule_data.drain(..) {
            let command = &mut context.commands[index];
            let range = mem::take(&mut command.capsule_range);
            if command.stage != Stage::Gate || range.end == 0 {
                continue;
            }
            let bytes = &buf[range.start as usize..range.end as usize];
            match env.alloc(bytes.len()) {
                Some(mut copy) => {
                    copy.as_mut().copy_from_slice(bytes);
                    command.buf = Some(copy);
                }
                None => {
                    command.early_status = Some(Status::INTERNAL);
                    command.entry.data_state = DataState::Bad;
                    is_out_of_memory = true;
                }
            }
        }
        if is_out_of_memory {
            context.report_problem(
                "no memory for a held write; it will fail and stop its stream",
                env,
            );
        }
    }

    /// Submits a write or discard that the gate has released. If the data of a write has not
    /// arrived yet, the write is submitted when the data has arrived.
    #[inline]
    fn submit(&mut self, context: &mut Context<E>, index: u16, buf: &[u8], env: &mut E) {
        let command = &mut context.commands[index];
        let attribute = command.entry.attribute;
        if command.entry.data_state == DataState::Awaited {
            command.entry.write_waits_for_data = true;
            if self.tracer.traces_slot(index) {
                self.tracer.on_held(env.instant());
            }
            return;
        }
        let stream_has_ended = context.is_fenced
            || matches!(self.gate.poison_cause(), Some(Cause::LogFailed | Cause::Closed));
        if command.entry.data_state == DataState::Bad || stream_has_ended {
            // A fenced owner must not write (trap T8). After a failure of the log, the attribute
            // may be missing in the log, so the write must not reach the drive.
            return self.report_write(context, index, false);
        }
        let ns_index = usize::from(command.ns_index);
        if let Err(status) = context.check_reservation(ns_index) {
            // Another host has reserved the namespace while the request waited.
            context.commands[index].early_status = Some(status);
            return self.report_write(context, index, false);
        }
        let command = &mut context.commands[index];
        let op = OpId::new(context.key, index);
        let capsule_range = mem::take(&mut command.capsule_range);
        command.stage = Stage::Device;
        let is_traced = self.tracer.traces_slot(index);
        if is_traced {
            self.tracer.on_submitted(env.instant());
        }
        let submitted = match attribute.kind {
            Kind::Write if capsule_range.end > 0 => {
                let bytes = &buf[capsule_range.start as usize..capsule_range.end as usize];
                let data = block_device::Data::Borrowed(bytes);
                env.device(ns_index).write(op.0, attribute.lba, data)
            }
            Kind::Write => match command.buf.take() {
                Some(data) => {
                    let data = block_device::Data::Owned(data);
                    env.device(ns_index).write(op.0, attribute.lba, data)
                }
                None => {
                    debug_assert!(false, "a write without data");
                    command.stage = Stage::Gate;
                    command.early_status = Some(Status::INTERNAL);
                    return self.report_write(context, index, false);
                }
            },
            Kind::Discard => {
                let deallocate = command.sqe.deac();
                submit_zeroing(
                    env.device(ns_index),
                    op,
                    attribute.lba,
                    attribute.blocks.into(),
                    deallocate,
                )
            }
            Kind::Flush => {
                debug_assert!(false, "the gate writes nothing for a flush entry");
                Submitted::Done(Ok(None))
            }
        };
        if let Submitted::Done(result) = submitted {
            if is_traced {
                self.trace_device_result(&context.commands[index], env.instant());
            }
            self.on_operation_result(context, index, result, env);
        }
    }

    /// Submits a FLUSH that the gate has released.
    fn submit_flush(&mut self, context: &mut Context<E>, index: u16, env: &mut E) {
        context.commands[index].stage = Stage::DeviceFlush;
        let is_traced = self.tracer.traces_slot(index);
        if is_traced {
            self.tracer.on_submitted(env.instant());
        }
        if let Submitted::Done(result) = context.submit_flush_of(index, None, env) {
            if is_traced {
                self.trace_device_result(&context.commands[index], env.instant());
            }
            self.on_operation_result(context, index, result, env);
        }
    }

    /// Takes in the result of a device operation that was in flight.
    pub(super) fn on_device_result(
        &mut self,
        context: &mut Context<E>,
        index: u16,
        result: Result<Option<E::Buf>, IoError>,
        env: &mut E,
    ) {
        if self.tracer.traces_slot(index) {
            self.trace_device_result(&context.commands[index], env.instant());
        }
        self.on_operation_result(context, index, result, env);
    }

    /// Notes in the trace that the traced write, or its FLUSH, has come back from the drive.
    #[cold]
    fn trace_device_result(&mut self, command: &Command<E::Buf>, now: u64) {
        let was_flush = command.stage == Stage::DeviceFlush;
        self.tracer.on_landed(command.entry.attribute.flags.has(Flags::FLUSH) && !was_flush, now);
    }

    /// Passes the result of a submitted operation to the gate.
    #[inline(always)]
    fn on_operation_result(
        &mut self,
        context: &mut Context<E>,
        index: u16,
        result: Result<Option<E::Buf>, IoError>,
        env: &mut E,
    ) {
        let command = &mut context.commands[index];
        let was_flush = command.stage == Stage::DeviceFlush;
        command.stage = Stage::Gate;
        let has_succeeded = match result {
            Ok(_) => true,
            Err(error) => {
                command.early_status = Some(status_of(&error, false));
                false
            }
        };
        if was_flush {
            self.on_flush_result(context, index, has_succeeded, env);
            return;
        }
        if !has_succeeded {
            probe::count_rare(Rare::WriteFailed);
        }
        self.report_write(context, index, has_succeeded);
    }

    /// Reports the result of a write or discard to the gate.
    #[inline(always)]
    fn report_write(&mut self, context: &mut Context<E>, index: u16, has_succeeded: bool) {
        let ticket = Ticket(u32::from(index));
        self.gate.on_write_done(&mut context.commands, ticket, has_succeeded, &mut self.gate_steps);
    }

    /// Takes in the result of a FLUSH. A success is in doubt while a FLUSH of another connection on
    /// the same drive is in flight. A success in doubt is reported to the gate later (trap T29).
    #[inline(never)]
    fn on_flush_result(
        &mut self,
        context: &mut Context<E>,
        index: u16,
        has_succeeded: bool,
        env: &mut E,
    ) {
        if context.on_flush_ended(index, has_succeeded, !has_succeeded, env) {
            return;
        }
        if !has_succeeded {
            probe::count_rare(Rare::FlushFailed);
            self.count_own_flush_failure(usize::from(context.commands[index].ns_index));
        }
        self.report_flush(context, index, has_succeeded);
    }

    /// Reports the result of a FLUSH to the gate. Before that, reports the failed FLUSHes of other
    /// connections, because a failed FLUSH may have lost writes that this FLUSH covers (trap T22).
    pub(super) fn report_flush(
        &mut self,
        context: &mut Context<E>,
        index: u16,
        has_succeeded: bool,
    ) {
        self.report_flush_failures(context);
        let ticket = Ticket(u32::from(index));
        self.gate.on_flush_done(&mut context.commands, ticket, has_succeeded, &mut self.gate_steps);
    }
}

/// Reports to the operator that a fence has failed, and with it the stream.
#[cold]
fn report_log_failure<E: TargetEnv>(context: &Context<E>, error: &RegionError, env: &mut E) {
    let why = format!("the ordering log failed, and its stream is stopped: {error}");
    context.report_problem(&why, env);
}

//! The batches of an ordered queue. A batch is everything that arrives in one receive, or comes
//! back from the drives in one poll.
//!
//! The order of steps in a batch: append all attributes, **one** fence, submit the writes; set all
//! persist words, **one** fence, send the responses (paper §4.3.2 steps 5 to 7; T7).

use core::mem;

use riopipe_nvme::command::Status;
use riopipe_order::attribute::{Flags, Kind};
use riopipe_order::block_device::{self, BlockDevice, IoError, Submitted};
use riopipe_order::gate::{Cause, Step, Ticket};
use riopipe_order::probe::{self, Plant, Rare};

use super::commands::{Command, DataState, Stage};
use super::context::Context;
use super::env::{TargetEnv, status_of};
use super::ids::OpId;
use super::ordered::OrderedQueue;
use super::plain::zero;
use crate::outbox::Outbox;

impl<E: TargetEnv> OrderedQueue<E> {
    /// Finishes a batch: carries out the steps of the gate, in their order, fences the persist words,
    /// and then answers complete requests. `buf` is the receive buffer of the batch.
    pub(super) fn finish_batch(
        &mut self,
        context: &mut Context<E>,
        buf: &[u8],
        env: &mut E,
        outbox: &mut Outbox<E::Buf>,
    ) {
        self.report_flush_failures(context);
        env.ordered(self.tracer.take_arrived());
        let persisted = self.carry_out(context, buf, env);
        if self.tracer.is_tracing() {
            self.tracer.completing(&self.to_answer, env.instant());
        }
        let is_shared = persisted > 1;
        if is_shared {
            probe::hit(Rare::FenceShared);
        }
        let must_fence = persisted > 0
            && !probe::planted(Plant::T7AnswerBeforeFence)
            && !(is_shared && probe::planted(Plant::T7BatchBeforeFence));
        if must_fence && self.log.fence().is_err() {
            probe::hit(Rare::LogFailed);
            self.gate.fence_failed(&mut context.commands, &mut self.to_answer);
            context.report_problem("the ordering log failed; its stream is stopped", env);
        }
        if self.tracer.is_complete() {
            self.tracer.persisted(env.instant());
        }
        if !self.has_reported_stop
            && let Some(cause) = self.gate.poisoned()
        {
            self.has_reported_stop = true;
            if !matches!(cause, Cause::Closed) {
                env.stopped(cause);
            }
        }
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

    /// Carries out the steps of the gate until there are none left. Returns how many persist words
    /// were set.
    #[inline(always)]
    fn carry_out(&mut self, context: &mut Context<E>, buf: &[u8], env: &mut E) -> u32 {
        let mut persisted = 0u32;
        // An entry that was appended may have to wait, and then there is no further step. Its append
        // is fenced in this batch all the same.
        while self.has_unfenced_appends || !self.steps.is_empty() {
            let must_fence = mem::take(&mut self.has_unfenced_appends)
                && !probe::planted(Plant::T7WriteBeforeFence);
            if must_fence && self.log.fence().is_err() {
                probe::hit(Rare::LogFailed);
                self.gate.fence_failed(&mut context.commands, &mut self.steps);
                context.report_problem("the ordering log failed; its stream is stopped", env);
            }
            if self.tracer.is_logging() {
                self.tracer.logged(&self.steps, env.instant());
            }
            let mut in_progress = mem::take(&mut self.in_progress);
            mem::swap(&mut in_progress, &mut self.steps);
            for &step in &in_progress {
                match step {
                    Step::Append(_) => {
                        debug_assert!(false, "`arrived` has carried out the appends")
                    }
                    Step::Write(ticket) => {
                        self.submit(context, ticket.0 as u16, buf, env);
                        // The fast path: the drive has written the request when the call returns,
                        // and no other entry waited for it. The single `Complete` is carried out
                        // here, without another pass of the loop.
                        if let [step @ Step::Complete { .. }] = self.steps[..] {
                            self.steps.clear();
                            persisted += u32::from(self.complete(&context.commands, step));
                        }
                    }
                    Step::Flush(ticket) => self.submit_flush(context, ticket.0 as u16, env),
                    Step::Complete { .. } | Step::Refuse { .. } => {
                        persisted += u32::from(self.complete(&context.commands, step));
                    }
                }
            }
            in_progress.clear();
            self.in_progress = in_progress;
        }
        persisted
    }

    /// Answers a refused request. If its data is still to come, answers when it has come.
    fn refuse(context: &mut Context<E>, index: u16, why: Cause, outbox: &mut Outbox<E::Buf>) {
        let status = Self::refusal(context, why);
        let Some(command) = context.commands.get_used(index) else {
            return;
        };
        let status = *command.early_status.get_or_insert(status);
        match command.stage {
            Stage::Receiving => command.is_refused = true,
            Stage::Budget => {
                context.waiting_for_budget.retain(|waiting| *waiting != index);
                context.complete_command(index, status, 0, outbox);
            }
            _ => context.complete_command(index, status, 0, outbox),
        }
    }

    /// Copies the in-capsule data of writes that the gate still holds. The receive buffer, where the
    /// data is, has other content after the batch.
    fn copy_held_data(&mut self, context: &mut Context<E>, buf: &[u8], env: &mut E) {
        let mut is_out_of_memory = false;
        for index in self.inline.drain(..) {
            let command = &mut context.commands[index];
            let (start, end) = mem::take(&mut command.inline);
            if command.stage != Stage::Gate || end == 0 {
                continue;
            }
            let bytes = &buf[start as usize..end as usize];
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

    /// Submits a write or discard that the gate has released. If its data has not arrived yet, it
    /// is submitted when the data is there.
    #[inline]
    fn submit(&mut self, context: &mut Context<E>, index: u16, buf: &[u8], env: &mut E) {
        let command = &mut context.commands[index];
        let attribute = command.entry.attribute;
        if command.entry.data_state == DataState::Awaited {
            command.entry.write_waits_for_data = true;
            if self.tracer.is(index) {
                self.tracer.held(env.instant());
            }
            return;
        }
        let stream_has_ended = context.is_fenced
            || matches!(self.gate.poisoned(), Some(Cause::LogFailed | Cause::Closed));
        if command.entry.data_state == DataState::Bad || stream_has_ended {
            // Nothing goes to the drives after the owner was fenced (T8). Nothing goes there after
            // the log has failed either, because the attribute may not be in the log.
            return self.written(context, index, false);
        }
        let (ns_index, op) = (usize::from(command.ns_index), OpId::new(context.key, index));
        let (start, end) = mem::take(&mut command.inline);
        command.stage = Stage::Device;
        let is_traced = self.tracer.is(index);
        if is_traced {
            self.tracer.submitted(env.instant());
        }
        let submitted = match attribute.kind {
            Kind::Write if end > 0 => {
                let bytes = &buf[start as usize..end as usize];
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
                    return self.written(context, index, false);
                }
            },
            Kind::Discard => {
                let deallocate = command.sqe.deac();
                zero(env.device(ns_index), op, attribute.lba, attribute.blocks.into(), deallocate)
            }
            Kind::Flush => {
                debug_assert!(false, "the gate writes nothing for a flush entry");
                Submitted::Done(Ok(None))
            }
        };
        if let Submitted::Done(result) = submitted {
            if is_traced {
                self.landed(&context.commands[index], env.instant());
            }
            self.submitted(context, index, result, env);
        }
    }

    /// Submits a FLUSH that the gate has released.
    fn submit_flush(&mut self, context: &mut Context<E>, index: u16, env: &mut E) {
        context.commands[index].stage = Stage::DeviceFlush;
        let is_traced = self.tracer.is(index);
        if is_traced {
            self.tracer.submitted(env.instant());
        }
        if let Submitted::Done(result) = context.submit_flush_of(index, env) {
            if is_traced {
                self.landed(&context.commands[index], env.instant());
            }
            self.submitted(context, index, result, env);
        }
    }

    /// Takes in the result of a device operation.
    pub(super) fn device_result(
        &mut self,
        context: &mut Context<E>,
        index: u16,
        result: Result<Option<E::Buf>, IoError>,
        env: &mut E,
    ) {
        if self.tracer.is(index) {
            self.landed(&context.commands[index], env.instant());
        }
        self.submitted(context, index, result, env);
    }

    /// Notes that the traced write, or its FLUSH, is back from the drive.
    #[cold]
    fn landed(&mut self, command: &Command<E::Buf>, now: u64) {
        let was_flush = command.stage == Stage::DeviceFlush;
        self.tracer.landed(command.entry.attribute.flags.has(Flags::FLUSH) && !was_flush, now);
    }

    /// Passes the result of a submitted operation to the gate.
    #[inline(always)]
    fn submitted(
        &mut self,
        context: &mut Context<E>,
        index: u16,
        result: Result<Option<E::Buf>, IoError>,
        env: &mut E,
    ) {
        let command = &mut context.commands[index];
        let was_flush = command.stage == Stage::DeviceFlush;
        command.stage = Stage::Gate;
        let ok = match result {
            Ok(_) => true,
            Err(error) => {
                command.early_status = Some(status_of(&error, false));
                false
            }
        };
        if was_flush {
            self.flush_ended(context, index, ok, env);
        } else {
            if !ok {
                probe::hit(Rare::WriteFailed);
            }
            self.written(context, index, ok);
        }
    }

    /// Reports the end of a write or discard to the gate.
    #[inline(always)]
    fn written(&mut self, context: &mut Context<E>, index: u16, ok: bool) {
        let ticket = Ticket(u32::from(index));
        self.gate.written(&mut context.commands, ticket, ok, &mut self.steps);
    }

    /// Takes in the result of a FLUSH. A success is in doubt while a FLUSH of another connection on
    /// the same drive is in flight. Then it is reported to the gate later (T29).
    #[inline(never)]
    fn flush_ended(&mut self, context: &mut Context<E>, index: u16, ok: bool, env: &mut E) {
        if context.flush_ended(index, ok, env) {
            return;
        }
        if !ok {
            probe::hit(Rare::FlushFailed);
            self.count_own_flush_failure(usize::from(context.commands[index].ns_index));
        }
        self.report_flush(context, index, ok);
    }

    /// Reports the result of a FLUSH to the gate. FLUSHes of other connections that have failed are
    /// reported before it (T22).
    pub(super) fn report_flush(&mut self, context: &mut Context<E>, index: u16, ok: bool) {
        self.report_flush_failures(context);
        let ticket = Ticket(u32::from(index));
        self.gate.flushed(&mut context.commands, ticket, ok, &mut self.steps);
    }
}

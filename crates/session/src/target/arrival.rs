//! The arrival of ordered requests: a request is checked, passed to the gate, and recorded in the
//! log before it has any effect.
//!
//! ```text
//! capsule → check → gate → append to the log → data is there, or request it by R2T
//! ```
//!
//! The end of the batch ([`batch`](super::batch)) then carries out the steps that the gate
//! returned.

use core::mem;

use riopipe_nvme::command::Status;
use riopipe_order::attribute::{Attribute, Kind, Member};
use riopipe_order::gate::{Step, Ticket};
use riopipe_order::probe::{self, Rare};

use super::capsule::Capsule;
use super::closed::Closed;
use super::commands::{Command, DataState, Stage};
use super::context::{Context, fenced_owner, is_in_capsule};
use super::env::TargetEnv;
use super::limits::BLOCK_SIZE;
use super::ordered::OrderedQueue;
use crate::outbox::Outbox;
use crate::wire;

/// An ordered request that has passed all checks.
struct CheckedRequest {
    attribute: Attribute,
    /// The index of the request's namespace.
    ns_index: usize,
    /// The request needs no data beyond its capsule, so no R2T is needed.
    has_all_data: bool,
}

impl<E: TargetEnv> OrderedQueue<E> {
    /// Takes in a Write, Write Zeroes or Flush with an ordering attribute: checks the request,
    /// passes it to the gate, and appends to the log every entry that the gate admits because of
    /// it.
    #[inline]
    pub(super) fn on_request(
        &mut self,
        context: &mut Context<E>,
        capsule: Capsule<'_>,
        env: &mut E,
        outbox: &mut Outbox<E::Buf>,
    ) -> Result<(), Closed> {
        let Capsule { sqe, data, data_offset, .. } = capsule;
        let cid = sqe.cid();
        if let Some(cause) = self.gate.poison_cause() {
            context.send_completion(cid, Self::refusal_status(context, cause), 0, outbox);
            return Ok(());
        }
        let CheckedRequest { attribute, ns_index, has_all_data } = match self
            .check(context, capsule)
        {
            Ok(checked) => checked,
            Err(status) => {
                self.stop_stream(context, Member(0), sqe.dword(3));
                context
                    .report_problem("an ordered request made no sense; its stream is stopped", env);
                context.send_completion(cid, status, 0, outbox);
                return Ok(());
            }
        };
        let stage = if has_all_data { Stage::Gate } else { Stage::Budget };
        let index = context.insert_command(sqe, stage, ns_index)?;
        let command = &mut context.commands[index];
        command.is_ordered = true;
        let entry = &mut command.entry;
        entry.data_state = if has_all_data { DataState::Ready } else { DataState::Awaited };
        entry.write_waits_for_data = false;
        entry.attribute = attribute;
        // The gate knows a drive by its index in `drives`. The log knows the same drive by its
        // member number in the volume.
        let member = Member(self.drive_index_of[ns_index]);
        let attribute_for_gate = Attribute { member, ..attribute };
        let first_new_step = self.gate_steps.len();
        let ticket = Ticket(u32::from(index));
        let admitted = self.gate.on_arrival(
            &mut context.commands,
            ticket,
            &attribute_for_gate,
            &mut self.gate_steps,
        );
        if admitted.is_err() {
            self.stop_stream(context, member, attribute.ordinal);
            context.report_problem(
                "an ordered request came twice or too far ahead; its stream is stopped",
                env,
            );
            context.complete_command(index, wire::status::BAD_ATTRIBUTE.with_dnr(), 0, outbox);
            return Ok(());
        }
        if self.tracer.count_arrival() {
            let is_write = attribute.kind == Kind::Write;
            self.tracer.on_arrival(
                index,
                is_write,
                &self.gate_steps[first_new_step..],
                env.instant(),
            );
        }
        self.carry_out_appends(&mut context.commands, first_new_step);
        if !has_all_data {
            if context.charge_or_enqueue(index, attribute.blocks * BLOCK_SIZE, outbox) {
                self.start_transfer(context, index, env, outbox);
            }
        } else if !data.is_empty() {
            context.commands[index].capsule_range =
                data_offset as u32..(data_offset + data.len()) as u32;
            self.with_capsule_data.push(index);
        }
        Ok(())
    }

    /// Checks a request. Takes over from a valid one its seq, as the highest so far, and the
    /// released mark that the owner has put into it.
    #[inline]
    fn check(
        &mut self,
        context: &Context<E>,
        capsule: Capsule<'_>,
    ) -> Result<CheckedRequest, Status> {
        let Capsule { sqe, data, is_digest_valid, .. } = capsule;
        if !is_digest_valid {
            return Err(Status::TRANSIENT_TRANSPORT);
        }
        let (attribute, released) = wire::attribute(sqe, self.highest_seq)
            .map_err(|_| wire::status::BAD_ATTRIBUTE.with_dnr())?;
        // An ordered request asks for durability with the FLUSH flag of its attribute. FUA has no
        // effect on it, so it is refused instead of ignored.
        if sqe.fua() || sqe.fuse() != 0 {
            return Err(Status::INVALID_FIELD.with_dnr());
        }
        let ns_index = match attribute.kind {
            Kind::Flush => context.namespace(sqe)?.0,
            Kind::Write | Kind::Discard => context.check_blocks(sqe)?,
        };
        // A reservation of another host stands against ordered writes, too. The stream is stopped.
        context.check_reservation(ns_index)?;
        self.gate_index_of(ns_index, attribute.member)
            .ok_or(wire::status::BAD_ATTRIBUTE.with_dnr())?;
        let has_all_data = match attribute.kind {
            Kind::Write => {
                let data_len = attribute.blocks * BLOCK_SIZE;
                if data_len > wire::ORDERED_BYTES_MAX {
                    return Err(Status::INVALID_FIELD.with_dnr());
                }
                is_in_capsule(sqe, data_len, data)?
            }
            Kind::Discard | Kind::Flush if data.is_empty() => true,
            Kind::Discard | Kind::Flush => return Err(Status::SGL_LENGTH_INVALID.with_dnr()),
        };
        if attribute.seq_end() > self.highest_seq {
            if attribute.seq_end().0 >> 32 != self.highest_seq.0 >> 32 {
                probe::count_rare(Rare::SeqWrap);
            }
            self.highest_seq = attribute.seq_end();
        }
        self.log.release(released);
        Ok(CheckedRequest { attribute, ns_index, has_all_data })
    }

    /// Requests the data of a request that may hold the buffer for it.
    pub(super) fn start_transfer(
        &mut self,
        context: &mut Context<E>,
        index: u16,
        env: &mut E,
        outbox: &mut Outbox<E::Buf>,
    ) {
        if !context.request_data(index, env, outbox) {
            // There is no memory, so no R2T was sent. The gate receives the failure when it
            // releases the write.
            let command = &mut context.commands[index];
            command.early_status = Some(Status::INTERNAL);
            command.stage = Stage::Gate;
            self.on_data_ready(command, index);
        }
    }

    /// Notes that the data of a request has arrived completely, or will never arrive.
    pub(super) fn on_data_ready(&mut self, command: &mut Command<E::Buf>, index: u16) {
        let has_failed = command.early_status.is_some();
        command.entry.data_state = if has_failed { DataState::Bad } else { DataState::Ready };
        if mem::take(&mut command.entry.write_waits_for_data) {
            self.gate_steps.push(Step::Write(Ticket(u32::from(index))));
        }
    }
}

impl<E: TargetEnv> Context<E> {
    /// Refuses the ordered requests that are not finished when the connection gives up its stream
    /// and the gate of that stream.
    ///
    /// - A request whose data is still missing gets its completion when the data has arrived. It is
    ///   marked as refused now, because the connection may carry another stream by then, and the
    ///   gate of that stream does not know the request (trap T8).
    /// - A request whose FLUSH is in doubt gets its completion when the doubt is resolved.
    /// - A request that waits at the gate gets its completion now, because the gate is gone, and
    ///   every request must get one (promise P8).
    pub(super) fn refuse_unfinished(&mut self, outbox: &mut Outbox<E::Buf>) {
        for (_, command) in self.commands.iter_mut().filter(|(_, command)| command.is_ordered) {
            match command.stage {
                Stage::Budget | Stage::Receiving if !command.is_refused => {
                    command.is_refused = true;
                    command.early_status = Some(fenced_owner());
                }
                Stage::InDoubt => command.is_refused = true,
                _ => {}
            }
        }
        for index in self
            .commands
            .indices_where(|command| command.is_ordered && command.stage == Stage::Gate)
        {
            self.complete_command(index, fenced_owner(), 0, outbox);
        }
    }

    /// Completes a request that was refused before its data arrived.
    pub(super) fn complete_refused(&mut self, index: u16, outbox: &mut Outbox<E::Buf>) {
        let status = self.commands[index].early_status.unwrap_or_else(fenced_owner);
        self.complete_command(index, status, 0, outbox);
    }
}

//! The arrival of ordered requests: each is checked, passes the gate, and is in the log before it
//! has any effect.

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
use super::limits::{BLOCK_SIZE, TRANSFER_BYTES_MAX};
use super::ordered::OrderedQueue;
use crate::outbox::Outbox;
use crate::wire;

impl<E: TargetEnv> OrderedQueue<E> {
    /// Takes in a Write, Write Zeroes or Flush with an ordering attribute: checks it, passes it to
    /// the gate, and appends to the log all entries that the gate admits because of it.
    #[inline]
    pub(super) fn arrived(
        &mut self,
        context: &mut Context<E>,
        capsule: Capsule<'_>,
        env: &mut E,
        outbox: &mut Outbox<E::Buf>,
    ) -> Result<(), Closed> {
        let Capsule { sqe, data, data_at, .. } = capsule;
        let cid = sqe.cid();
        if let Some(cause) = self.gate.poisoned() {
            context.send_completion(cid, Self::refusal(context, cause), 0, outbox);
            return Ok(());
        }
        let (attribute, ns_index, inline) = match self.check(context, capsule) {
            Ok(checked) => checked,
            Err(status) => {
                self.stop_stream(context, Member(0), sqe.dword(3));
                context
                    .report_problem("an ordered request made no sense; its stream is stopped", env);
                context.send_completion(cid, status, 0, outbox);
                return Ok(());
            }
        };
        let stage = if inline { Stage::Gate } else { Stage::Budget };
        let index = context.insert_command(sqe, stage, ns_index)?;
        let command = &mut context.commands[index];
        command.is_ordered = true;
        let entry = &mut command.entry;
        entry.data_state = if inline { DataState::Ready } else { DataState::Awaited };
        entry.write_waits_for_data = false;
        entry.attribute = attribute;
        // The gate knows a drive by its index in `drives`, the log by its member number in the
        // volume.
        let member = Member(self.drive_index_of[ns_index]);
        let at_gate = Attribute { member, ..attribute };
        let first_step = self.steps.len();
        let ticket = Ticket(u32::from(index));
        let arrived = self.gate.arrive(&mut context.commands, ticket, &at_gate, &mut self.steps);
        if arrived.is_err() {
            self.stop_stream(context, member, attribute.ordinal);
            context.report_problem(
                "an ordered request came twice or too far ahead; its stream is stopped",
                env,
            );
            context.complete_command(index, wire::status::BAD_ATTRIBUTE.with_dnr(), 0, outbox);
            return Ok(());
        }
        if self.tracer.is_due() {
            let is_write = attribute.kind == Kind::Write;
            self.tracer.arrived(index, is_write, &self.steps[first_step..], env.instant());
        }
        self.carry_out_appends(&mut context.commands, first_step);
        if !inline {
            if context.charge_or_enqueue(index, attribute.blocks * BLOCK_SIZE, outbox) {
                self.start(context, index, env, outbox);
            }
        } else if !data.is_empty() {
            context.commands[index].inline = (data_at as u32, (data_at + data.len()) as u32);
            self.inline.push(index);
        }
        Ok(())
    }

    /// Checks a request. Returns its attribute, the index of its namespace, and whether all its data
    /// is in the capsule. The command also has the owner's released mark, which goes to the log.
    #[inline]
    fn check(
        &mut self,
        context: &Context<E>,
        capsule: Capsule<'_>,
    ) -> Result<(Attribute, usize, bool), Status> {
        let Capsule { sqe, data, digest_ok, .. } = capsule;
        if !digest_ok {
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
            Kind::Write | Kind::Discard => context.extent(sqe)?,
        };
        self.drive(ns_index, attribute.member).ok_or(wire::status::BAD_ATTRIBUTE.with_dnr())?;
        let inline = match attribute.kind {
            Kind::Write => {
                let data_len = attribute.blocks * BLOCK_SIZE;
                if data_len > TRANSFER_BYTES_MAX {
                    return Err(Status::INVALID_FIELD.with_dnr());
                }
                is_in_capsule(sqe, data_len, data)?
            }
            Kind::Discard | Kind::Flush if data.is_empty() => true,
            Kind::Discard | Kind::Flush => return Err(Status::SGL_LENGTH_INVALID.with_dnr()),
        };
        if attribute.seq_end() > self.highest_seq {
            if attribute.seq_end().0 >> 32 != self.highest_seq.0 >> 32 {
                probe::hit(Rare::SeqWrap);
            }
            self.highest_seq = attribute.seq_end();
        }
        self.log.release(released);
        Ok((attribute, ns_index, inline))
    }

    /// Starts a request that may hold its data: asks for the data.
    pub(super) fn start(
        &mut self,
        context: &mut Context<E>,
        index: u16,
        env: &mut E,
        outbox: &mut Outbox<E::Buf>,
    ) {
        if !context.request_data(index, env, outbox) {
            // No R2T has been sent. The gate sees the failure when it is the request's turn.
            let command = &mut context.commands[index];
            command.early_status = Some(Status::INTERNAL);
            command.stage = Stage::Gate;
            self.data_ready(command, index);
        }
    }

    /// Notes that the data of a request has arrived completely, or will never arrive.
    pub(super) fn data_ready(&mut self, command: &mut Command<E::Buf>, index: u16) {
        let has_failed = command.early_status.is_some();
        command.entry.data_state = if has_failed { DataState::Bad } else { DataState::Ready };
        if mem::take(&mut command.entry.write_waits_for_data) {
            self.steps.push(Step::Write(Ticket(u32::from(index))));
        }
    }
}

impl<E: TargetEnv> Context<E> {
    /// Refuses the requests that are not finished when the connection gives up its stream, and with
    /// it the gate.
    ///
    /// A request whose data is still missing is answered when the data has come. By then the
    /// connection may carry another stream, whose gate does not know the request (T8). A request in
    /// doubt is answered when its doubt is resolved. A request that waits at the gate is answered
    /// now, because no gate will answer it any more (P8).
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
        for index in self.commands.indices_where(|c| c.is_ordered && c.stage == Stage::Gate) {
            self.complete_command(index, fenced_owner(), 0, outbox);
        }
    }

    /// Answers a request that was refused before its data arrived.
    pub(super) fn answer_refused(&mut self, index: u16, outbox: &mut Outbox<E::Buf>) {
        let status = self.commands[index].early_status.unwrap_or_else(fenced_owner);
        self.complete_command(index, status, 0, outbox);
    }
}

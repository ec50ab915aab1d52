//! The control path of a stream: order commands, which append the ordering metadata of requests to
//! the log (engine `horae`).
//!
//! The requests themselves come later, as plain commands. The gate does not know them. So only the
//! owner knows which of them are durable, and records that with Mark commands: recovery rolls back
//! everything behind the last one. A mark drops the entries, or keeps them as durable ones.

use riopipe_nvme::command::Status;
use riopipe_order::attribute::{Attribute, Kind, Member};
use riopipe_order::gate::{Step, Ticket};
use riopipe_order::probe::{self, Plant};

use super::capsule::Capsule;
use super::closed::Closed;
use super::commands::{DataState, Stage};
use super::context::Context;
use super::env::TargetEnv;
use super::ordered::OrderedQueue;
use crate::outbox::Outbox;
use crate::wire::{self, OrderMetadata};

impl<E: TargetEnv> OrderedQueue<E> {
    /// Takes in an order command: checks it and appends its entry to the log. The completion is sent
    /// at the end of the batch, when the entry is durable (trap T7).
    pub(super) fn on_order(
        &mut self,
        context: &mut Context<E>,
        capsule: Capsule<'_>,
        env: &mut E,
        outbox: &mut Outbox<E::Buf>,
    ) -> Result<(), Closed> {
        let sqe = capsule.sqe;
        let cid = sqe.cid();
        if let Some(cause) = self.gate.poison_cause() {
            context.send_completion(cid, Self::refusal_status(context, cause), 0, outbox);
            return Ok(());
        }
        let (attribute, ns_index) = match self.check_order(context, capsule) {
            Ok(checked) => checked,
            Err(status) => {
                self.stop_stream(context, Member(0), sqe.dword(3));
                context
                    .report_problem("an order command made no sense; its stream is stopped", env);
                context.send_completion(cid, status, 0, outbox);
                return Ok(());
            }
        };
        let index = context.insert_command(sqe, Stage::Gate, ns_index)?;
        let command = &mut context.commands[index];
        command.is_ordered = true;
        command.entry.data_state = DataState::Ready;
        command.entry.write_waits_for_data = false;
        command.entry.attribute = attribute;
        let ticket = Ticket(u32::from(index));
        match self.append_one(&mut context.commands, ticket) {
            Ok(()) => {
                if probe::is_bug_planted(Plant::HoraeConfirmedEarly) {
                    self.has_unfenced_appends = false;
                }
                self.gate_steps.push(Step::Complete { ticket, persist: false });
            }
            Err(why) => {
                self.gate.poison(&mut context.commands, why, &mut self.gate_steps);
                self.gate_steps.push(Step::Refuse { ticket, why });
            }
        }
        Ok(())
    }

    /// Checks an order command. Takes over from a valid one its ordinal, its seq and the released
    /// mark.
    fn check_order(
        &mut self,
        context: &Context<E>,
        capsule: Capsule<'_>,
    ) -> Result<(Attribute, usize), Status> {
        let Capsule { sqe, data, .. } = capsule;
        let bad_attribute = || wire::status::BAD_ATTRIBUTE.with_dnr();
        if !data.is_empty() {
            return Err(Status::SGL_LENGTH_INVALID.with_dnr());
        }
        let OrderMetadata { mut attribute, released, prepared_block } =
            wire::order_metadata(sqe, self.highest_seq).map_err(|_| bad_attribute())?;
        let ns_index = match attribute.kind {
            Kind::Flush => context.namespace(sqe)?.0,
            Kind::Write | Kind::Discard => context.check_blocks(sqe)?,
        };
        self.gate_index_of(ns_index, attribute.member).ok_or_else(bad_attribute)?;
        // The entries of a stream come in order on its connection, so that the log has them in
        // order.
        if attribute.ordinal != self.last_ordered.wrapping_add(1) {
            return Err(bad_attribute());
        }
        self.last_ordered = attribute.ordinal;
        self.highest_seq = self.highest_seq.max(attribute.seq_end());
        if let Some(released) = released {
            self.log.release(released);
        }
        if let Some(block) = prepared_block {
            // The log has the block in the place of the ordinal.
            attribute.ordinal = block;
        }
        Ok((attribute, ns_index))
    }
}

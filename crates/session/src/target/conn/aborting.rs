//! Abort: a command that has had no effect yet ends without one.
//!
//! The Abort command comes on the admin queue, and the command to abort is on another queue, whose
//! connection may be on another core:
//!
//! ```text
//! admin queue --Notice::Abort--> queue of the command: completes the command, or leaves it alone
//! admin queue <--Notice::AbortEnded-- and completes the Abort
//! ```
//!
//! A command can be aborted where it waits: for the memory of its data, for its data, for blocks that
//! another command has locked, and for a drive that has as many operations as it takes. A command at a drive runs to its end, and so does a command
//! in pieces once its first piece has been carried out. A write with a place in an order, of a stream
//! or of a drive, is never aborted: those behind it rely on it. Neither is half of a fused operation.

use riopipe_nvme::command::{Status, opcode};
use riopipe_order::block_device::BlockDevice;

use super::TargetConn;
use crate::outbox::Outbox;
use crate::target::commands::Stage;
use crate::target::context::Context;
use crate::target::drive_order::is_in_drive_order;
use crate::target::env::TargetEnv;
use crate::target::ids::OpId;

impl<E: TargetEnv> TargetConn<E> {
    /// Aborts a command of this queue, if it waits and nothing depends on it. Sends its completion.
    /// Returns whether the command was aborted.
    pub(super) fn abort_command(
        &mut self,
        cid: u16,
        env: &mut E,
        outbox: &mut Outbox<E::Buf>,
    ) -> bool {
        if self.context.is_closing {
            return false;
        }
        let is_aborted = self.context.abort_before_drive(cid, outbox)
            || self.abort_before_operation(cid, env, outbox);
        if is_aborted {
            // Others may have waited for its memory.
            self.start_waiting_commands(env, outbox);
        }
        is_aborted
    }

    /// Aborts a command that has its data, if it has one, and whose only operation waits for the
    /// drive.
    fn abort_before_operation(
        &mut self,
        cid: u16,
        env: &mut E,
        outbox: &mut Outbox<E::Buf>,
    ) -> bool {
        let Some(index) = self.context.commands.index_of(cid) else { return false };
        let command = &self.context.commands[index];
        // A FLUSH is known to the FLUSHes of other connections (trap T29). Of a Dataset Management
        // command, some ranges may be deallocated already.
        let has_one_operation =
            matches!(command.sqe.opcode(), opcode::READ | opcode::WRITE | opcode::WRITE_ZEROES)
                && command.partner.is_none();
        let may_be_aborted = command.stage == Stage::Device
            && has_one_operation
            && command.piece_offset == 0
            && !command.is_ordered
            && !is_in_drive_order(&command.sqe);
        let ns_index = usize::from(command.ns_index);
        let op = OpId::new(self.context.key, index);
        if !may_be_aborted || !env.device(ns_index).take_back(op.0) {
            return false;
        }
        self.fences.on_operation_done(index, &mut self.context.commands[index]);
        self.context.complete_command(index, Status::ABORT_REQUESTED, 0, outbox);
        self.acknowledge_fences(env, outbox);
        true
    }
}

impl<E: TargetEnv> Context<E> {
    /// Aborts a command that waits for the memory of its data, or for its data. Sends its completion.
    /// Returns whether the command was aborted.
    pub(in crate::target) fn abort_before_drive(
        &mut self,
        cid: u16,
        outbox: &mut Outbox<E::Buf>,
    ) -> bool {
        let Some(index) = self.commands.index_of(cid) else { return false };
        let command = &self.commands[index];
        if command.is_ordered || is_in_drive_order(&command.sqe) || command.piece_offset > 0 {
            return false;
        }
        if command.partner.is_some() {
            return false;
        }
        match command.stage {
            Stage::Locked if command.begun_range_count == 0 && command.range_offset == 0 => {
                self.complete_command(index, Status::ABORT_REQUESTED, 0, outbox);
            }
            Stage::Budget => {
                self.waiting_for_budget.retain(|waiting| *waiting != index);
                self.complete_command(index, Status::ABORT_REQUESTED, 0, outbox);
            }
            Stage::Receiving => {
                let Some(freed_bytes) = self.commands.abort_transfer(index) else {
                    return false;
                };
                self.held_bytes -= freed_bytes;
                self.send_completion(cid, Status::ABORT_REQUESTED, 0, outbox);
            }
            _ => return false,
        }
        true
    }
}

//! Verify: checks that blocks can be read (NVM §3.2.4). No data goes to the host.
//!
//! The blocks are read in pieces, each within the budget of the connection. A Verify may have as many
//! blocks as a Read (VSL).

use riopipe_nvme::command::{Sqe, Status};
use riopipe_order::block_device::{BlockDevice, Submitted};

use super::closed::Closed;
use super::commands::Stage;
use super::context::Context;
use super::env::TargetEnv;
use super::ids::OpId;
use super::lba::Trim;
use super::limits::TRANSFER_BYTES_MAX;
use super::plain::PlainIo;
use crate::outbox::Outbox;

impl PlainIo {
    /// Begins a Verify when the connection may hold the buffer for its first piece (trap T28).
    pub(super) fn verify<E: TargetEnv>(
        &mut self,
        context: &mut Context<E>,
        (sqe, trim): (&Sqe, Trim),
        env: &mut E,
        outbox: &mut Outbox<E::Buf>,
    ) -> Result<(), Closed> {
        let data_len = trim.data_len(sqe);
        let checked = match context.check_blocks(sqe) {
            Ok(_) if data_len > TRANSFER_BYTES_MAX => Err(Status::INVALID_FIELD.with_dnr()),
            checked => checked,
        };
        self.begin_with_buffer(context, (sqe, trim), checked, env, outbox)
    }

    /// Reads the next piece of a Verify.
    pub(super) fn read_to_verify<E: TargetEnv>(
        &mut self,
        context: &mut Context<E>,
        index: u16,
        env: &mut E,
        outbox: &mut Outbox<E::Buf>,
    ) {
        loop {
            let command = &mut context.commands[index];
            let ns_index = usize::from(command.ns_index);
            let (lba, blocks) = (command.piece_lba(), command.piece_blocks());
            command.stage = Stage::Device;
            // The result shows whether blocks can be read, like that of a read (trap T8).
            if let Some(refusal) = context.refuses_new_read(ns_index) {
                return context.complete_command(index, refusal, 0, outbox);
            }
            let op = OpId::new(context.key, index);
            match env.device(ns_index).read(op.0, lba, blocks) {
                Submitted::Pending => return,
                Submitted::Done(Ok(_)) if context.begin_next_piece(index) => {}
                Submitted::Done(result) => {
                    return self.on_device_result(context, index, result, env, outbox);
                }
            }
        }
    }

    /// Goes on after a piece that could be read.
    pub(super) fn on_piece_verified<E: TargetEnv>(
        &mut self,
        context: &mut Context<E>,
        index: u16,
        env: &mut E,
        outbox: &mut Outbox<E::Buf>,
    ) {
        let ns_index = usize::from(context.commands[index].ns_index);
        if let Some(refusal) = context.refuses_read(ns_index) {
            context.complete_command(index, refusal, 0, outbox);
        } else if context.begin_next_piece(index) {
            self.read_to_verify(context, index, env, outbox);
        } else {
            context.complete_command(index, Status::SUCCESS, 0, outbox);
        }
    }
}

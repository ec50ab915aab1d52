//! Compare: checks whether the content of blocks is the data of the command (NVM §3.2.1).
//!
//! ```text
//! capsule → check → budget → data is there, or R2T → read the blocks → compare
//! ```
//!
//! A large one is carried out in pieces, like a write. The host's data and the content of the blocks
//! are in memory together, so its pieces are half as large ([`piece_bytes`](super::transfer)).
//! Across blocks a Compare is not atomic. The fused operation is, for one block
//! ([`fused`](super::fused)).

use riopipe_nvme::command::{Sqe, Status};
use riopipe_order::block_device::{BlockDevice, Submitted};

use super::closed::Closed;
use super::commands::Stage;
use super::context::{Context, is_in_capsule};
use super::env::TargetEnv;
use super::ids::OpId;
use super::lba::Trim;
use super::limits::TRANSFER_BYTES_MAX;
use super::plain::PlainIo;
use crate::outbox::Outbox;
use crate::wire;

impl PlainIo {
    /// Carries out a Compare, when the connection may hold the buffers for it (trap T28).
    pub(super) fn compare<E: TargetEnv>(
        &mut self,
        context: &mut Context<E>,
        (sqe, trim): (&Sqe, Trim),
        data: &[u8],
        env: &mut E,
        outbox: &mut Outbox<E::Buf>,
    ) -> Result<(), Closed> {
        let data_len = trim.data_len(sqe);
        let checked = context.check_blocks(sqe).and_then(|ns_index| {
            if wire::directive_type(sqe) != 0 || data_len > TRANSFER_BYTES_MAX {
                return Err(Status::INVALID_FIELD.with_dnr());
            }
            Ok((ns_index, is_in_capsule(sqe, data_len, data)?))
        });
        let (ns_index, in_capsule) = match checked {
            Ok(checked) => checked,
            Err(status) => {
                context.send_completion(sqe.cid(), status, 0, outbox);
                return Ok(());
            }
        };
        if !in_capsule {
            return context.insert_and_request_part(sqe, trim, ns_index, data_len, env, outbox);
        }
        let index = context.insert_command(sqe, Stage::Budget, ns_index)?;
        context.commands[index].trim = trim;
        if !context.keep_capsule_data(index, data, env) {
            context.complete_command(index, Status::INTERNAL, 0, outbox);
        } else if context.charge_or_enqueue(index, data_len, outbox) {
            self.start_with_buffer(context, index, env, outbox);
        }
        Ok(())
    }

    /// Reads the blocks of a Compare whose data, or a piece of it, has arrived.
    pub(super) fn read_to_compare<E: TargetEnv>(
        &mut self,
        context: &mut Context<E>,
        index: u16,
        env: &mut E,
        outbox: &mut Outbox<E::Buf>,
    ) {
        let ns_index = usize::from(context.commands[index].ns_index);
        // The result shows something of the content, like that of a read (trap T8).
        if let Some(refusal) = context.refuses_new_read(ns_index) {
            return context.complete_command(index, refusal, 0, outbox);
        }
        let command = &mut context.commands[index];
        command.stage = Stage::Device;
        let (lba, blocks) = (command.piece_lba(), command.piece_blocks());
        let op = OpId::new(context.key, index);
        if let Submitted::Done(result) = env.device(ns_index).read(op.0, lba, blocks) {
            self.on_device_result(context, index, result, env, outbox);
        }
    }

    /// Compares the content of blocks with the data of a command. Completes the command, or goes on
    /// with its next piece.
    pub(super) fn on_content_read<E: TargetEnv>(
        &mut self,
        context: &mut Context<E>,
        index: u16,
        content: Option<&E::Buf>,
        env: &mut E,
        outbox: &mut Outbox<E::Buf>,
    ) {
        match context.check_content(index, content) {
            Err(status) => context.complete_command(index, status, 0, outbox),
            Ok(()) if context.begin_next_piece(index) => {
                context.request_data_or_fail(index, env, outbox);
            }
            Ok(()) => context.complete_command(index, Status::SUCCESS, 0, outbox),
        }
    }
}

impl<E: TargetEnv> Context<E> {
    /// Copies the in-capsule data of a command, because the receive buffer is used again. Returns
    /// false if there is no memory.
    pub(super) fn keep_capsule_data(&mut self, index: u16, data: &[u8], env: &mut E) -> bool {
        let Some(mut copy) = env.alloc(data.len()) else { return false };
        copy.as_mut().copy_from_slice(data);
        self.commands[index].buf = Some(copy);
        true
    }

    /// Checks the content of blocks against the data of a command, which it drops.
    ///
    /// # Errors
    /// The status with which the command fails: Compare Failure, or the host may not read the blocks
    /// any more.
    pub(super) fn check_content(
        &mut self,
        index: u16,
        content: Option<&E::Buf>,
    ) -> Result<(), Status> {
        let command = &mut self.commands[index];
        let (ns_index, skip) = (usize::from(command.ns_index), command.piece_skip() as usize);
        let (data, content) = match (command.buf.take(), content) {
            (Some(data), Some(content)) => (data, content),
            _ => {
                debug_assert!(false, "a Compare without its data or without the content");
                return Err(Status::INTERNAL);
            }
        };
        if let Some(refusal) = self.refuses_read(ns_index) {
            return Err(refusal);
        }
        let end = skip + data.as_ref().len();
        let is_equal = content.as_ref().get(skip..end) == Some(data.as_ref());
        if is_equal { Ok(()) } else { Err(Status::COMPARE_FAILED.with_dnr()) }
    }
}

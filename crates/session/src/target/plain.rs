//! Plain I/O commands, outside of ordered streams: Read, Write, Flush and Write Zeroes.
//! (`compare.rs` has Compare, `fused.rs` Compare and Write, `verify.rs` Verify, `copy.rs` Copy,
//! `dataset.rs` Dataset Management, `modify.rs` writes of parts of the drive's blocks.)
//!
//! A command is checked, its buffer is charged to the budget if it needs one, and its operation
//! goes to the drive. [`PlainIo::on_device_result`] continues when the operation has come back. A
//! write with FUA (Force Unit Access) to a drive with a volatile cache needs a second operation: a
//! FLUSH, unless the drive has FUA itself.

use alloc::collections::VecDeque;
use core::ops::Range;

use riopipe_nvme::command::{Sgl, Sqe, Status, opcode};
use riopipe_nvme::pdu::DataHdr;
use riopipe_order::block_device::{BlockDevice, Data, IoError, Submitted};
use riopipe_order::probe::{self, Plant};

use riopipe_order::write_order::WriteOrder;

use super::block_locks::LockTicket;
use super::closed::Closed;
use super::commands::{Command, Stage};
use super::context::{Context, InsertedCommand, is_in_capsule};
use super::drive_order::{OrderedWrites, count_crossing, is_in_drive_order};
use super::env::{TargetEnv, status_of};
use super::epoch_use::{EpochUse, is_stream_failure};
use super::fused::FirstHalf;
use super::ids::OpId;
use super::lba::Trim;
use super::limits::{BLOCK_SIZE, TRANSFER_BYTES_MAX};
use super::modify::Modifying;
use super::reserve::{changes_reservations, on_reservations_drained};
use crate::outbox::Outbox;
use crate::wire;

/// The part of a connection that carries out plain commands.
#[derive(Debug, Default)]
pub(super) struct PlainIo {
    /// The writes with a place in their drive's order.
    pub(super) ordered_writes: OrderedWrites,
    /// The streams of drives that the connection uses.
    pub(super) epochs: EpochUse,
    /// By namespace index: how many FLUSHes of the drive had failed when this connection submitted
    /// the oldest of its plain writes that none of its FLUSHes has covered yet. `None` if there is
    /// no such write. If more FLUSHes have failed when a FLUSH succeeds, writes may be lost (trap
    /// T22).
    failures_at_first_write: alloc::vec::Vec<Option<u64>>,
    /// The first half of a fused operation, if it was the last command.
    pub(super) first_half: FirstHalf,
    /// The commands that wait until the connection has no exclusive lock of blocks, in order: the first
    /// halves of fused operations that have their data, and commands that change blocks in part.
    pub(super) waiting_for_lock: VecDeque<u16>,
}

/// A Write that has passed all checks.
pub(super) struct CheckedWrite {
    /// The index of the namespace.
    pub(super) ns_index: usize,
    /// How many bytes of data the command has.
    pub(super) data_len: u32,
    /// Whether all data is in the capsule. Otherwise it must be requested by R2T.
    pub(super) is_in_capsule: bool,
}

impl PlainIo {
    /// Checks a Write: its blocks, the guard of its namespace, and its data.
    #[inline]
    pub(super) fn check_write<E: TargetEnv>(
        context: &mut Context<E>,
        (sqe, trim): (&Sqe, Trim),
        data: &[u8],
        env: &mut E,
    ) -> Result<CheckedWrite, Status> {
        let ns_index = context.check_blocks(sqe)?;
        context.guard(ns_index, env)?;
        // Rio's own directive marks ordered requests. No other directive is supported.
        if wire::directive_type(sqe) != 0 {
            return Err(Status::INVALID_FIELD.with_dnr());
        }
        let data_len = trim.data_len(sqe);
        if data_len > TRANSFER_BYTES_MAX {
            return Err(Status::INVALID_FIELD.with_dnr());
        }
        let is_in_capsule = is_in_capsule(sqe, data_len, data)?;
        Ok(CheckedWrite { ns_index, data_len, is_in_capsule })
    }

    /// Carries out a Write: at once if its data is in the capsule, otherwise after the data has
    /// arrived by R2T.
    #[inline]
    pub(super) fn write<E: TargetEnv>(
        &mut self,
        context: &mut Context<E>,
        (sqe, trim): (&Sqe, Trim),
        data: &[u8],
        env: &mut E,
        outbox: &mut Outbox<E::Buf>,
    ) -> Result<(), Closed> {
        if wire::order_of(sqe) != Some(WriteOrder::Orderless) {
            return self.write_in_order(context, sqe, data, env, outbox);
        }
        let checked = match Self::check_write(context, (sqe, trim), data, env) {
            Ok(checked) => checked,
            Err(status) => {
                context.send_completion(sqe.cid(), status, 0, outbox);
                return Ok(());
            }
        };
        if trim.is_some() {
            return self.write_in_part(context, (sqe, trim), data, checked, env, outbox);
        }
        let CheckedWrite { ns_index, data_len, is_in_capsule } = checked;
        if !is_in_capsule {
            return context.insert_and_request_data(sqe, ns_index, data_len, env, outbox);
        }
        let index = context.next_index()?;
        if context.namespaces.at(ns_index).state.has_locks() {
            context.commands.insert(sqe, Stage::Device, ns_index);
            if context.keep_capsule_data(index, data, env) {
                self.submit_received_write(context, index, env, outbox);
            } else {
                context.complete_command(index, Status::INTERNAL, 0, outbox);
            }
            return Ok(());
        }
        let failures = self.note_plain_write(context, ns_index);
        count_crossing(context, ns_index);
        let op = OpId::new(context.key, index);
        let device = env.device(ns_index);
        let has_fua = sqe.fua() && device.has_fua();
        let submitted = match has_fua {
            true => device.write_durably(op.0, sqe.slba(), Data::Borrowed(data)),
            false => device.write(op.0, sqe.slba(), Data::Borrowed(data)),
        };
        match submitted {
            Submitted::Done(Ok(_)) if has_fua || !must_flush(context, sqe, ns_index) => {
                context.send_completion_inlined(sqe.cid(), Status::SUCCESS, 0, outbox);
            }
            Submitted::Done(result) => {
                context.commands.insert(sqe, Stage::Device, ns_index);
                context.commands[index].has_fua = has_fua;
                note_failures_before(&mut context.commands[index], failures);
                self.on_device_result(context, index, result, env, outbox);
            }
            Submitted::Pending => {
                context.commands.insert(sqe, Stage::Device, ns_index);
                context.commands[index].has_fua = has_fua;
                note_failures_before(&mut context.commands[index], failures);
            }
        }
        Ok(())
    }

    /// Carries out a command whose requested data has come in completely.
    pub(super) fn on_data_ready<E: TargetEnv>(
        &mut self,
        context: &mut Context<E>,
        index: u16,
        env: &mut E,
        outbox: &mut Outbox<E::Buf>,
    ) {
        match context.commands[index].sqe.opcode() {
            opcode::WRITE if is_in_drive_order(&context.commands[index].sqe) => {
                self.on_ordered_data(context, index, env, outbox);
            }
            opcode::WRITE => self.submit_received_write(context, index, env, outbox),
            opcode::COMPARE => self.read_to_compare(context, index, env, outbox),
            opcode::COPY => self.on_copy_list(context, index, env, outbox),
            code if changes_reservations(code) => {
                self.on_reservation_keys(context, index, env, outbox)
            }
            _ => self.begin_dataset(context, index, env, outbox),
        }
    }

    /// Submits a write whose requested data, or a piece of it, has come in.
    fn submit_received_write<E: TargetEnv>(
        &mut self,
        context: &mut Context<E>,
        index: u16,
        env: &mut E,
        outbox: &mut Outbox<E::Buf>,
    ) {
        let command = &context.commands[index];
        if command.trim.is_some() && !command.extent().is_whole() {
            return self.modify_and_go_on(context, index, env, outbox);
        }
        let (ns_index, lba) = (usize::from(command.ns_index), command.piece_lba());
        // Another host may have claimed the volume while the data was in transit (trap T21).
        if let Err(status) = context.guard(ns_index, env) {
            return context.complete_command(index, status, 0, outbox);
        }
        let blocks = (context.commands[index].buf_len() / BLOCK_SIZE as usize) as u64;
        if context.must_wait_for_blocks(index, lba, blocks, env) {
            return;
        }
        let command = &mut context.commands[index];
        let Some(buf) = command.buf.take() else {
            debug_assert!(false, "gathered data without a buffer");
            return context.complete_command(index, Status::INTERNAL, 0, outbox);
        };
        command.stage = Stage::Device;
        let failures = self.note_plain_write(context, ns_index);
        note_failures_before(&mut context.commands[index], failures);
        count_crossing(context, ns_index);
        let op = OpId::new(context.key, index);
        let device = env.device(ns_index);
        let command = &mut context.commands[index];
        // A command for a part of the drive's blocks has other operations, too, and a FLUSH after all.
        command.has_fua = command.sqe.fua() && !command.trim.is_some() && device.has_fua();
        let submitted = match command.has_fua {
            true => device.write_durably(op.0, lba, Data::Owned(buf)),
            false => device.write(op.0, lba, Data::Owned(buf)),
        };
        if let Submitted::Done(result) = submitted {
            self.on_device_result(context, index, result, env, outbox);
        }
    }

    /// Begins a Read when the connection may hold the buffer for its data (trap T28).
    #[inline]
    pub(super) fn read<E: TargetEnv>(
        &mut self,
        context: &mut Context<E>,
        (sqe, trim): (&Sqe, Trim),
        env: &mut E,
        outbox: &mut Outbox<E::Buf>,
    ) -> Result<(), Closed> {
        let data_len = trim.data_len(sqe);
        let checked = context.check_blocks(sqe).and_then(|ns_index| match sqe.sgl() {
            _ if data_len > TRANSFER_BYTES_MAX => Err(Status::INVALID_FIELD.with_dnr()),
            Ok(Sgl::Transport { len }) if len == data_len => Ok(ns_index),
            Ok(Sgl::Transport { .. }) => Err(Status::SGL_LENGTH_INVALID.with_dnr()),
            Ok(Sgl::InCapsule { .. }) => Err(Status::SGL_TYPE_INVALID.with_dnr()),
            Err(error) => Err(error.status()),
        });
        self.begin_with_buffer(context, (sqe, trim), checked, env, outbox)
    }

    /// Puts a command that has passed its checks into the table, and begins it when the connection
    /// may hold the buffer for its data, or for the first piece (trap T28). Refuses one that has not.
    #[inline]
    pub(super) fn begin_with_buffer<E: TargetEnv>(
        &mut self,
        context: &mut Context<E>,
        (sqe, trim): (&Sqe, Trim),
        checked: Result<usize, Status>,
        env: &mut E,
        outbox: &mut Outbox<E::Buf>,
    ) -> Result<(), Closed> {
        if let Some(InsertedCommand { index, .. }) =
            context.insert_or_refuse(sqe, Stage::Budget, checked, outbox)?
        {
            let command = &mut context.commands[index];
            command.trim = trim;
            let first_piece = command.piece_at(0);
            if context.charge_or_enqueue(index, first_piece, outbox) {
                self.start_with_buffer(context, index, env, outbox);
            }
        }
        Ok(())
    }

    /// Continues a command that may hold its buffer now: submits a read, or requests the data of
    /// another command by R2T.
    pub(super) fn start_with_buffer<E: TargetEnv>(
        &mut self,
        context: &mut Context<E>,
        index: u16,
        env: &mut E,
        outbox: &mut Outbox<E::Buf>,
    ) {
        let ns_index = usize::from(context.commands[index].ns_index);
        let refusal = context.refuses_new_read(ns_index);
        let command = &mut context.commands[index];
        if is_in_drive_order(&command.sqe) {
            if let Some(status) = command.early_status {
                return context.complete_command(index, status, 0, outbox);
            }
            return self.request_ordered_data(context, index, env, outbox);
        }
        let command = &mut context.commands[index];
        if command.sqe.opcode() == opcode::COMPARE && command.buf.is_some() {
            return self.read_to_compare(context, index, env, outbox);
        }
        if command.copy.is_some() {
            return self.copy_next(context, index, env, outbox);
        }
        if command.sqe.opcode() == opcode::VERIFY {
            return self.read_to_verify(context, index, env, outbox);
        }
        if command.sqe.opcode() != opcode::READ {
            return context.request_data_or_fail(index, env, outbox);
        }
        // A fenced host may not know yet that it is fenced. Its read could find zeroes where the
        // recovery of the new owner has undone completed writes of the host's stream (trap T8,
        // promise P9).
        if let Some(refusal) = refusal
            && !probe::is_bug_planted(Plant::T8FencedReads)
        {
            return context.complete_command(index, refusal, 0, outbox);
        }
        command.stage = Stage::Device;
        let (lba, blocks) = (command.piece_lba(), command.piece_blocks());
        let op = OpId::new(context.key, index);
        if let Submitted::Done(result) = env.device(ns_index).read(op.0, lba, blocks) {
            self.on_device_result(context, index, result, env, outbox);
        }
    }

    /// Submits a Flush.
    pub(super) fn flush<E: TargetEnv>(
        &mut self,
        context: &mut Context<E>,
        sqe: &Sqe,
        env: &mut E,
        outbox: &mut Outbox<E::Buf>,
    ) -> Result<(), Closed> {
        let checked = context.namespace(sqe).map(|(ns_index, _)| ns_index);
        let checked =
            checked.and_then(|ns_index| context.check_reservation(ns_index).map(|()| ns_index));
        let checked = checked
            .and_then(|ns_index| Ok((ns_index, self.flush_before(context, sqe, ns_index, env)?)));
        let before = checked.as_ref().ok().and_then(|(_, before)| *before);
        let checked = checked.map(|(ns_index, _)| ns_index);
        let Some(InsertedCommand { index, ns_index }) =
            context.insert_or_refuse(sqe, Stage::Device, checked, outbox)?
        else {
            return Ok(());
        };
        context.commands[index].failure_count_before = match before {
            Some((_, failures)) => Some(failures),
            None => self.failures_before_covered_writes(context, index, ns_index),
        };
        let before = before.map(|(before, _)| before);
        if let Submitted::Done(result) = context.submit_flush_of(index, before, env) {
            self.on_device_result(context, index, result, env, outbox);
        }
        Ok(())
    }

    /// Notes that a plain write goes to the drive, so that a later FLUSH of this connection covers
    /// the write. Returns how many FLUSHes of the drive have failed; `None` without a volatile cache.
    #[inline(always)]
    pub(super) fn note_plain_write<E: TargetEnv>(
        &mut self,
        context: &Context<E>,
        ns_index: usize,
    ) -> Option<u64> {
        let namespace = context.namespaces.at(ns_index);
        if !namespace.config.volatile {
            return None;
        }
        let failures = namespace.state.flush_failures();
        if self.failures_at_first_write.len() <= ns_index {
            self.failures_at_first_write.resize(ns_index + 1, None);
        }
        self.failures_at_first_write[ns_index].get_or_insert(failures);
        Some(failures)
    }

    /// How many FLUSHes of the drive had failed when the oldest write was submitted that a new
    /// FLUSH covers. If no write waits for a FLUSH, this is the present number of failed FLUSHes.
    /// `None` if the drive has no volatile cache.
    ///
    /// A FLUSH covers only completed writes. Writes that are in flight, also between two pieces,
    /// count for the next FLUSH, too. While a FLUSH is in flight, the next one covers the writes of
    /// both: the host may receive the success of the one before the failure of the other.
    fn failures_before_covered_writes<E: TargetEnv>(
        &mut self,
        context: &mut Context<E>,
        index: u16,
        ns_index: usize,
    ) -> Option<u64> {
        let namespace = context.namespaces.at(ns_index);
        if !namespace.config.volatile {
            return None;
        }
        let failures = namespace.state.flush_failures();
        let Some(at_first_write) = self.failures_at_first_write.get_mut(ns_index) else {
            return Some(failures);
        };
        let own = at_first_write.take();
        let mut oldest = own.unwrap_or(failures);
        let is_plain = |command: &&Command<E::Buf>| {
            usize::from(command.ns_index) == ns_index && !command.is_ordered
        };
        for command in context.commands.iter().filter(is_plain) {
            if command.sqe.opcode() == opcode::FLUSH {
                oldest = oldest.min(command.own_failure_count.unwrap_or(failures));
            } else if let Some(count) = command.failure_count_before {
                // A write that has begun: at the drive, or between two pieces.
                let first = at_first_write.get_or_insert(count);
                *first = count.min(*first);
            }
        }
        context.commands[index].own_failure_count = own;
        Some(oldest)
    }

    /// Whether writes that the successful FLUSH of this command covers may be lost, because a FLUSH
    /// of some connection has failed since the oldest of these writes was submitted.
    ///
    /// Each FLUSH that covers such a write and was in flight with the first one that reports the
    /// failure reports it, too. Later ones do not, in the same way in which Linux reports a failure
    /// once to `fsync`: the host then writes and flushes again (trap T22).
    fn may_have_lost_writes<E: TargetEnv>(&self, context: &Context<E>, index: u16) -> bool {
        let command = &context.commands[index];
        let Some(failures_before) = command.failure_count_before else {
            return false;
        };
        let ns_index = usize::from(command.ns_index);
        let failures = context.namespaces.at(ns_index).state.flush_failures();
        failures != failures_before && !probe::is_bug_planted(Plant::T22PlainFlush)
    }

    /// Submits a Write Zeroes.
    pub(super) fn write_zeroes<E: TargetEnv>(
        &mut self,
        context: &mut Context<E>,
        (sqe, trim): (&Sqe, Trim),
        env: &mut E,
        outbox: &mut Outbox<E::Buf>,
    ) -> Result<(), Closed> {
        let checked = context
            .check_blocks(sqe)
            .and_then(|ns_index| context.guard(ns_index, env).map(|()| ns_index));
        let Some(InsertedCommand { index, ns_index }) =
            context.insert_or_refuse(sqe, Stage::Device, checked, outbox)?
        else {
            return Ok(());
        };
        debug_assert_eq!(usize::from(context.commands[index].ns_index), ns_index);
        context.commands[index].trim = trim;
        if trim.is_some() {
            self.zero_in_part(context, index, env, outbox);
        } else {
            self.submit_write_zeroes(context, index, env, outbox);
        }
        Ok(())
    }

    /// Submits a Write Zeroes that has passed the guard, as soon as no other command has locked its
    /// blocks.
    fn submit_write_zeroes<E: TargetEnv>(
        &mut self,
        context: &mut Context<E>,
        index: u16,
        env: &mut E,
        outbox: &mut Outbox<E::Buf>,
    ) {
        let Command { sqe, ns_index, .. } = context.commands[index];
        let ns_index = usize::from(ns_index);
        let (lba, blocks) = (sqe.slba(), u64::from(sqe.nlb()));
        if context.must_wait_for_blocks(index, lba, blocks, env) {
            return;
        }
        context.commands[index].stage = Stage::Device;
        let op = OpId::new(context.key, index);
        let failures = self.note_plain_write(context, ns_index);
        note_failures_before(&mut context.commands[index], failures);
        let device = env.device(ns_index);
        let has_fua = sqe.fua() && device.has_fua();
        context.commands[index].has_fua = has_fua;
        let submitted = match has_fua {
            true => device.zero_durably(op.0, lba, blocks, sqe.deac()),
            false => submit_zeroing(device, op, lba, blocks, sqe.deac()),
        };
        if let Submitted::Done(result) = submitted {
            self.on_device_result(context, index, result, env, outbox);
        }
    }

    /// Continues a command that has waited for its blocks.
    pub(super) fn on_blocks_locked<E: TargetEnv>(
        &mut self,
        context: &mut Context<E>,
        ticket: LockTicket,
        env: &mut E,
        outbox: &mut Outbox<E::Buf>,
    ) {
        // The command may have been aborted meanwhile.
        let Some(index) = context.command_with_lock(ticket) else { return };
        let command = &context.commands[index];
        if command.stage != Stage::Locked {
            return;
        }
        let ns_index = usize::from(command.ns_index);
        let is_exclusive = command.lock.is_some_and(|lock| lock.is_exclusive);
        match (command.sqe.opcode(), command.partner) {
            (_, None) if is_exclusive => self.on_locked_to_modify(context, index, env, outbox),
            (opcode::WRITE_ZEROES, None) if command.trim.is_some() => {
                self.zero_in_part(context, index, env, outbox);
            }
            (_, Some(_)) => self.compare_half(context, index, env, outbox),
            (opcode::WRITE, None) => self.submit_received_write(context, index, env, outbox),
            (opcode::WRITE_ZEROES, None) => match context.guard(ns_index, env) {
                Ok(()) => self.submit_write_zeroes(context, index, env, outbox),
                Err(status) => context.complete_command(index, status, 0, outbox),
            },
            (code, None) if changes_reservations(code) || code == opcode::RESERVATION_REPORT => {
                on_reservations_drained(context, index, env, outbox);
            }
            (opcode::COPY, None) => self.write_copied(context, index, env, outbox),
            _ => self.deallocate_next(context, index, env, outbox),
        }
    }

    /// Takes in the result of a plain command's device operation.
    pub(super) fn on_device_result<E: TargetEnv>(
        &mut self,
        context: &mut Context<E>,
        index: u16,
        result: Result<Option<E::Buf>, IoError>,
        env: &mut E,
        outbox: &mut Outbox<E::Buf>,
    ) {
        let command = &context.commands[index];
        let (ns_index, stage, code) =
            (usize::from(command.ns_index), command.stage, command.sqe.opcode());
        if is_in_drive_order(&command.sqe) {
            return self.on_ordered_result(context, index, result.map(|_| ()), env, outbox);
        }
        let modifying = command.modifying;
        if modifying == Modifying::Writing {
            context.end_modifying(index);
        }
        let was_flush = stage == Stage::DeviceFlush || code == opcode::FLUSH;
        if was_flush {
            let is_loss = matches!(&result, Err(error) if !is_stream_failure(error));
            if context.on_flush_ended(index, result.is_ok(), is_loss, env) {
                return;
            }
            if result.is_ok() {
                return self.on_certain_flush_success(context, index, outbox);
            }
        }
        let status = match result {
            Err(error) if was_flush && is_stream_failure(&error) => {
                wire::status::POISONED.with_dnr()
            }
            Err(error) if context.commands[index].copy.is_some() => {
                let copy = &context.commands[index].copy;
                let was_read = copy.as_ref().is_some_and(|progress| progress.is_reading());
                return context.fail_copy(index, status_of(&error, was_read), outbox);
            }
            Err(error) => status_of(&error, is_read(code)),
            // There is no peer, so the status does not matter.
            Ok(_) if context.is_closing => Status::SUCCESS,
            Ok(content) if modifying == Modifying::Reading => {
                return self.on_read_to_modify(context, index, content, env, outbox);
            }
            Ok(buf) => match code {
                opcode::READ => {
                    if finish_read(context, index, ns_index, buf, outbox)
                        && context.charge_or_enqueue(
                            index,
                            context.commands[index].data_len,
                            outbox,
                        )
                    {
                        self.start_with_buffer(context, index, env, outbox);
                    }
                    return;
                }
                opcode::COMPARE if context.commands[index].partner.is_some() => {
                    return self.write_half(context, index, buf, env, outbox);
                }
                opcode::COMPARE => {
                    return self.on_content_read(context, index, buf.as_ref(), env, outbox);
                }
                opcode::COPY => return self.on_copied(context, index, buf, env, outbox),
                opcode::VERIFY => return self.on_piece_verified(context, index, env, outbox),
                opcode::WRITE if context.begin_next_piece(index) => {
                    return context.request_data_or_fail(index, env, outbox);
                }
                opcode::WRITE_ZEROES if context.begin_next_zeroes(index) => {
                    return self.zero_in_part(context, index, env, outbox);
                }
                opcode::DATASET_MANAGEMENT => {
                    return self.deallocate_next(context, index, env, outbox);
                }
                _ if !context.commands[index].has_fua
                    && must_flush(context, &context.commands[index].sqe, ns_index) =>
                {
                    return self.start_flush(context, index, env, outbox);
                }
                _ => Status::SUCCESS,
            },
        };
        context.complete_with_partner(index, status, outbox);
    }

    /// Submits the FLUSH that follows a write with FUA.
    pub(super) fn start_flush<E: TargetEnv>(
        &mut self,
        context: &mut Context<E>,
        index: u16,
        env: &mut E,
        outbox: &mut Outbox<E::Buf>,
    ) {
        context.commands[index].stage = Stage::DeviceFlush;
        // This FLUSH covers the command's own write alone. The write stays uncovered here, because the
        // host may still flush its other writes.
        if let Submitted::Done(result) = context.submit_flush_of(index, None, env) {
            self.on_device_result(context, index, result, env, outbox);
        }
    }

    /// Completes a command whose FLUSH has succeeded without doubt: a Flush, or a write with FUA.
    /// The command still fails if another FLUSH has failed and may have lost writes that this FLUSH
    /// was to make durable.
    pub(super) fn on_certain_flush_success<E: TargetEnv>(
        &mut self,
        context: &mut Context<E>,
        index: u16,
        outbox: &mut Outbox<E::Buf>,
    ) {
        let status = if self.may_have_lost_writes(context, index) {
            Status::WRITE_FAULT
        } else {
            Status::SUCCESS
        };
        context.complete_with_partner(index, status, outbox);
    }
}

/// Whether a FLUSH must follow the write, because the command has FUA (Force Unit Access) and the
/// drive has a volatile cache.
#[inline]
pub(super) fn must_flush<E: TargetEnv>(context: &Context<E>, sqe: &Sqe, ns_index: usize) -> bool {
    sqe.fua() && context.namespaces.at(ns_index).config.volatile
}

/// Whether the operation of this command on the drive is a read.
const fn is_read(code: u8) -> bool {
    matches!(code, opcode::READ | opcode::COMPARE | opcode::VERIFY)
}

/// Notes with a write how many FLUSHes of the drive had failed when its first piece was submitted.
pub(super) fn note_failures_before<B>(command: &mut Command<B>, failures: Option<u64>) {
    if command.failure_count_before.is_none() {
        command.failure_count_before = failures;
    }
}

/// Sends the data of a read that has come back from the drive in `buf`. Completes the read, unless
/// that was a piece, and another one follows: then it returns true, and the next piece is to be read.
fn finish_read<E: TargetEnv>(
    context: &mut Context<E>,
    index: u16,
    ns_index: usize,
    buf: Option<E::Buf>,
    outbox: &mut Outbox<E::Buf>,
) -> bool {
    // The host may have been fenced while the read was in flight. No fence waits for reads, so the
    // data may be of blocks that the new owner has undone or written (trap T8, promise P9).
    if let Some(refusal) = context.refuses_read(ns_index)
        && !probe::is_bug_planted(Plant::T8LateReads)
        && !probe::is_bug_planted(Plant::T8FencedReads)
    {
        context.complete_command(index, refusal, 0, outbox);
        return false;
    }
    let Some(buf) = buf else {
        debug_assert!(false, "a read without a buffer");
        context.complete_command(index, Status::INTERNAL, 0, outbox);
        return false;
    };
    let command = &context.commands[index];
    let (cid, datao, datal) = (command.sqe.cid(), command.piece_offset, command.data_len);
    let start = command.piece_skip() as usize;
    let range = start..start + datal as usize;
    debug_assert!(range.end <= buf.as_ref().len(), "a read of another length");
    let has_next = context.begin_next_piece(index);
    if has_next {
        // The data counts as unsent bytes from now on.
        let command = &mut context.commands[index];
        command.stage = Stage::Budget;
        context.held_bytes -= core::mem::take(&mut command.charged_bytes);
    } else {
        context.remove_command(index);
    }
    // The SUCCESS flag of the data replaces the response capsule. The flag carries no SQHD, so it
    // may be used only without flow control of the submission queue (TCP §3.3.2.2).
    let no_sq_flow = context.queue.as_ref().is_some_and(|queue| queue.no_sq_flow);
    let (last, success) = (!has_next, !has_next && no_sq_flow);
    let header = DataHdr { cccid: cid, ttag: 0, datao, datal, last, success };
    send_data(context, &header, buf, range, outbox);
    if last && !success {
        context.send_completion(cid, Status::SUCCESS, 0, outbox);
    }
    has_next
}

/// Sends data of a read, which is a range of `buf`. It goes into the outbox without a copy.
fn send_data<E: TargetEnv>(
    context: &Context<E>,
    header: &DataHdr,
    buf: E::Buf,
    range: Range<usize>,
    outbox: &mut Outbox<E::Buf>,
) {
    let tx = &context.tx;
    outbox.push_bytes(|bytes| tx.c2h_data(header, bytes));
    if tx.data_digest {
        let mut digest = alloc::vec::Vec::with_capacity(4);
        tx.data_digest([&buf.as_ref()[range.clone()]], &mut digest);
        outbox.push_slice(buf, range);
        outbox.push_bytes(|bytes| bytes.extend_from_slice(&digest));
    } else {
        outbox.push_slice(buf, range);
    }
}

/// Submits an operation after which the blocks read as zeroes. With `deallocate`, the drive may
/// also free their space.
#[inline]
pub(super) fn submit_zeroing<D: BlockDevice>(
    device: &mut D,
    op: OpId,
    lba: u64,
    blocks: u64,
    deallocate: bool,
) -> Submitted<D::Buf> {
    match deallocate {
        true => device.deallocate(op.0, lba, blocks),
        false => device.write_zeroes(op.0, lba, blocks),
    }
}

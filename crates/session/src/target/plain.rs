//! I/O commands outside of ordered streams: read, write, flush, write zeroes, deallocate.

use riopipe_nvme::command::{Sgl, Sqe, Status, opcode};
use riopipe_nvme::pdu::DataHdr;
use riopipe_order::block_device::{BlockDevice, Data, IoError, Submitted};
use riopipe_order::probe::{self, Plant};

use super::closed::Closed;
use super::commands::Stage;
use super::context::{Context, fenced_owner, is_in_capsule};
use super::env::{TargetEnv, status_of};
use super::ids::OpId;
use super::limits::{BLOCK_SIZE, TRANSFER_BYTES_MAX};
use crate::outbox::Outbox;

/// The part of a connection that carries out plain commands.
#[derive(Debug, Default)]
pub(super) struct PlainIo {
    /// By namespace: how many FLUSHes of the drive had failed when this connection submitted its
    /// first plain write that no FLUSH of it has covered yet. `None` if there is no such write (T22).
    failures_at_first_write: alloc::vec::Vec<Option<u64>>,
}

impl PlainIo {
    /// Checks a Write. Returns the index of its namespace, the bytes of its data, and whether all
    /// its data is in the capsule.
    #[inline]
    fn check_write<E: TargetEnv>(
        context: &mut Context<E>,
        sqe: &Sqe,
        data: &[u8],
        env: &mut E,
    ) -> Result<(usize, u32, bool), Status> {
        let ns_index = context.extent(sqe)?;
        context.guard(ns_index, env)?;
        // No directives but Rio's own are supported.
        if sqe.dword(12) >> 20 & 0xf != 0 {
            return Err(Status::INVALID_FIELD.with_dnr());
        }
        let data_len = sqe.nlb() * BLOCK_SIZE;
        if data_len > TRANSFER_BYTES_MAX {
            return Err(Status::INVALID_FIELD.with_dnr());
        }
        Ok((ns_index, data_len, is_in_capsule(sqe, data_len, data)?))
    }

    /// Carries out a Write: at once if its data is in the capsule, else after the data has come in.
    #[inline]
    pub(super) fn write<E: TargetEnv>(
        &mut self,
        context: &mut Context<E>,
        sqe: &Sqe,
        data: &[u8],
        env: &mut E,
        outbox: &mut Outbox<E::Buf>,
    ) -> Result<(), Closed> {
        let (ns_index, data_len, inline) = match Self::check_write(context, sqe, data, env) {
            Ok(checked) => checked,
            Err(status) => {
                context.send_completion(sqe.cid(), status, 0, outbox);
                return Ok(());
            }
        };
        if !inline {
            return context.insert_and_request_data(sqe, ns_index, data_len, env, outbox);
        }
        let index = context.next_index()?;
        self.note_plain_write(context, ns_index);
        let op = OpId::new(context.key, index);
        match env.device(ns_index).write(op.0, sqe.slba(), Data::Borrowed(data)) {
            Submitted::Done(Ok(_)) if !must_flush(context, sqe, ns_index) => {
                context.send_completion_inlined(sqe.cid(), Status::SUCCESS, 0, outbox);
            }
            Submitted::Done(result) => {
                context.commands.insert(sqe, Stage::Device, ns_index);
                self.device_result(context, index, result, env, outbox);
            }
            Submitted::Pending => {
                context.commands.insert(sqe, Stage::Device, ns_index);
            }
        }
        Ok(())
    }

    /// Carries out a command whose requested data has come in completely.
    pub(super) fn data_ready<E: TargetEnv>(
        &mut self,
        context: &mut Context<E>,
        index: u16,
        env: &mut E,
        outbox: &mut Outbox<E::Buf>,
    ) {
        match context.commands[index].sqe.opcode() {
            opcode::WRITE => self.submit_received_write(context, index, env, outbox),
            _ => self.begin_dataset(context, index, env, outbox),
        }
    }

    /// Submits a write whose requested data has come in.
    fn submit_received_write<E: TargetEnv>(
        &mut self,
        context: &mut Context<E>,
        index: u16,
        env: &mut E,
        outbox: &mut Outbox<E::Buf>,
    ) {
        let command = &context.commands[index];
        let (ns_index, lba) = (usize::from(command.ns_index), command.sqe.slba());
        // Another host may have claimed the volume while the data was in transit (T21).
        if let Err(status) = context.guard(ns_index, env) {
            return context.complete_command(index, status, 0, outbox);
        }
        let command = &mut context.commands[index];
        let Some(buf) = command.buf.take() else {
            debug_assert!(false, "gathered data without a buffer");
            return context.complete_command(index, Status::INTERNAL, 0, outbox);
        };
        command.stage = Stage::Device;
        self.note_plain_write(context, ns_index);
        let op = OpId::new(context.key, index);
        if let Submitted::Done(result) = env.device(ns_index).write(op.0, lba, Data::Owned(buf)) {
            self.device_result(context, index, result, env, outbox);
        }
    }

    /// Begins a Read, once the connection may hold the buffer for it (T28).
    #[inline]
    pub(super) fn read<E: TargetEnv>(
        &mut self,
        context: &mut Context<E>,
        sqe: &Sqe,
        env: &mut E,
        outbox: &mut Outbox<E::Buf>,
    ) -> Result<(), Closed> {
        let data_len = sqe.nlb() * BLOCK_SIZE;
        let checked = context.extent(sqe).and_then(|ns_index| match sqe.sgl() {
            _ if data_len > TRANSFER_BYTES_MAX => Err(Status::INVALID_FIELD.with_dnr()),
            Ok(Sgl::Transport { len }) if len == data_len => Ok(ns_index),
            Ok(Sgl::Transport { .. }) => Err(Status::SGL_LENGTH_INVALID.with_dnr()),
            Ok(Sgl::InCapsule { .. }) => Err(Status::SGL_TYPE_INVALID.with_dnr()),
            Err(error) => Err(error.status()),
        });
        if let Some((index, _)) = context.insert_or_refuse(sqe, Stage::Budget, checked, outbox)?
            && context.charge_or_enqueue(index, data_len, outbox)
        {
            self.start(context, index, env, outbox);
        }
        Ok(())
    }

    /// Starts a command that may hold its buffer now: begins a read, or asks for the data of a write.
    pub(super) fn start<E: TargetEnv>(
        &mut self,
        context: &mut Context<E>,
        index: u16,
        env: &mut E,
        outbox: &mut Outbox<E::Buf>,
    ) {
        let ns_index = usize::from(context.commands[index].ns_index);
        let refusal =
            if context.is_fenced { Some(fenced_owner()) } else { context.refuses_read(ns_index) };
        let command = &mut context.commands[index];
        if command.sqe.opcode() != opcode::READ {
            return context.request_data_or_fail(index, env, outbox);
        }
        // The read could find zeroes where recovery has undone writes that the host's stream has
        // completed. The host may not know yet that it is fenced (T8, P9).
        if let Some(refusal) = refusal
            && !probe::planted(Plant::T8FencedReads)
        {
            return context.complete_command(index, refusal, 0, outbox);
        }
        command.stage = Stage::Device;
        let (lba, blocks) = (command.sqe.slba(), command.sqe.nlb());
        let op = OpId::new(context.key, index);
        if let Submitted::Done(result) = env.device(ns_index).read(op.0, lba, blocks.into()) {
            self.device_result(context, index, result, env, outbox);
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
        let Some((index, ns_index)) =
            context.insert_or_refuse(sqe, Stage::Device, checked, outbox)?
        else {
            return Ok(());
        };
        context.commands[index].failure_count_before =
            self.failures_before_covered_writes(context, ns_index);
        if let Submitted::Done(result) = context.submit_flush_of(index, env) {
            self.device_result(context, index, result, env, outbox);
        }
        Ok(())
    }

    /// Notes that a plain write goes to the drive. A later FLUSH of this connection covers it.
    #[inline(always)]
    pub(super) fn note_plain_write<E: TargetEnv>(&mut self, context: &Context<E>, ns_index: usize) {
        let namespace = context.namespaces.at(ns_index);
        if !namespace.config.volatile {
            return;
        }
        let failures = namespace.state.flush_failures();
        if self.failures_at_first_write.len() <= ns_index {
            self.failures_at_first_write.resize(ns_index + 1, None);
        }
        self.failures_at_first_write[ns_index].get_or_insert(failures);
    }

    /// How many FLUSHes of the drive had failed when the first write that a FLUSH submitted now would
    /// cover was submitted. Without such a write: how many have failed until now. If one fails in
    /// between, the FLUSH must not succeed.
    ///
    /// The FLUSH does not cover writes that are in flight (M2). So if there are some, the next FLUSH
    /// begins at the same write.
    fn failures_before_covered_writes<E: TargetEnv>(
        &mut self,
        context: &Context<E>,
        ns_index: usize,
    ) -> Option<u64> {
        let namespace = context.namespaces.at(ns_index);
        if !namespace.config.volatile {
            return None;
        }
        let now = namespace.state.flush_failures();
        let Some(Some(before)) = self.failures_at_first_write.get(ns_index).copied() else {
            return Some(now);
        };
        let has_writes_in_flight = context.commands.any(|command| {
            usize::from(command.ns_index) == ns_index
                && matches!(command.stage, Stage::Device | Stage::DeviceFlush)
                && !command.is_ordered
                && !matches!(command.sqe.opcode(), opcode::READ | opcode::FLUSH)
        });
        if !has_writes_in_flight {
            self.failures_at_first_write[ns_index] = None;
        }
        Some(before)
    }

    /// Whether writes that the successful FLUSH of this command should cover may be lost, because a
    /// FLUSH of some connection has failed since the first of them. Returns true once for each
    /// failure, as Linux reports it to `fsync`: the host writes and flushes again (T22).
    fn has_lost<E: TargetEnv>(&mut self, context: &Context<E>, index: u16) -> bool {
        let command = &context.commands[index];
        let Some(before) = command.failure_count_before else {
            return false;
        };
        let ns_index = usize::from(command.ns_index);
        let failures = context.namespaces.at(ns_index).state.flush_failures();
        let has_lost = failures != before && !probe::planted(Plant::T22PlainFlush);
        if has_lost
            && let Some(failures_at_first_write) = self.failures_at_first_write.get_mut(ns_index)
        {
            // Later writes are counted anew.
            *failures_at_first_write = Some(failures);
        }
        has_lost
    }

    /// Submits a Write Zeroes.
    pub(super) fn write_zeroes<E: TargetEnv>(
        &mut self,
        context: &mut Context<E>,
        sqe: &Sqe,
        env: &mut E,
        outbox: &mut Outbox<E::Buf>,
    ) -> Result<(), Closed> {
        let checked = context
            .extent(sqe)
            .and_then(|ns_index| context.guard(ns_index, env).map(|()| ns_index));
        let Some((index, ns_index)) =
            context.insert_or_refuse(sqe, Stage::Device, checked, outbox)?
        else {
            return Ok(());
        };
        let op = OpId::new(context.key, index);
        let (lba, blocks) = (sqe.slba(), u64::from(sqe.nlb()));
        self.note_plain_write(context, ns_index);
        if let Submitted::Done(result) = zero(env.device(ns_index), op, lba, blocks, sqe.deac()) {
            self.device_result(context, index, result, env, outbox);
        }
        Ok(())
    }

    /// Takes in the result of a plain command's device operation.
    pub(super) fn device_result<E: TargetEnv>(
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
        let was_flush = stage == Stage::DeviceFlush || code == opcode::FLUSH;
        if was_flush {
            if context.flush_ended(index, result.is_ok(), env) {
                return;
            }
            if result.is_ok() {
                return self.flush_accepted(context, index, outbox);
            }
        }
        let status = match result {
            Err(error) => status_of(&error, code == opcode::READ),
            Ok(buf) => match (code, buf) {
                _ if context.is_closing => Status::SUCCESS,
                // Its owner may have been fenced while the read was in flight, and no fence waited
                // for the read. It may have found blocks that the next owner has undone or written
                // (T8, P9).
                (opcode::READ, buf) => match (context.refuses_read(ns_index), buf) {
                    (Some(refusal), _)
                        if !probe::planted(Plant::T8LateReads)
                            && !probe::planted(Plant::T8FencedReads) =>
                    {
                        refusal
                    }
                    (_, Some(buf)) => return send_read(context, index, buf, outbox),
                    (_, None) => {
                        debug_assert!(false, "a read without a buffer");
                        Status::INTERNAL
                    }
                },
                (opcode::DATASET_MANAGEMENT, _) => {
                    return self.deallocate_next(context, index, env, outbox);
                }
                _ if must_flush(context, &context.commands[index].sqe, ns_index) => {
                    return self.start_flush(context, index, ns_index, env, outbox);
                }
                _ => Status::SUCCESS,
            },
        };
        context.complete_command(index, status, 0, outbox);
    }

    /// Submits the FLUSH that follows a write with FUA.
    fn start_flush<E: TargetEnv>(
        &mut self,
        context: &mut Context<E>,
        index: u16,
        ns_index: usize,
        env: &mut E,
        outbox: &mut Outbox<E::Buf>,
    ) {
        context.commands[index].stage = Stage::DeviceFlush;
        // This FLUSH covers the command's own write, too. `failures_at_first_write` stays, because
        // the host may still flush its other writes.
        context.commands[index].failure_count_before =
            self.failures_at_first_write.get(ns_index).copied().flatten();
        if let Submitted::Done(result) = context.submit_flush_of(index, env) {
            self.device_result(context, index, result, env, outbox);
        }
    }

    /// Answers a FLUSH, or a write with FUA, whose FLUSH has succeeded without doubt. The command
    /// fails all the same if an earlier FLUSH has failed and lost writes that this one covers.
    pub(super) fn flush_accepted<E: TargetEnv>(
        &mut self,
        context: &mut Context<E>,
        index: u16,
        outbox: &mut Outbox<E::Buf>,
    ) {
        let status =
            if self.has_lost(context, index) { Status::WRITE_FAULT } else { Status::SUCCESS };
        context.complete_command(index, status, 0, outbox);
    }
}

/// Whether the command has FUA and the drive a volatile cache. Then a FLUSH follows the write.
#[inline]
fn must_flush<E: TargetEnv>(context: &Context<E>, sqe: &Sqe, ns_index: usize) -> bool {
    sqe.fua() && context.namespaces.at(ns_index).config.volatile
}

/// Answers a read with its data, which goes into the outbox without being copied.
fn send_read<E: TargetEnv>(
    context: &mut Context<E>,
    index: u16,
    buf: E::Buf,
    outbox: &mut Outbox<E::Buf>,
) {
    let command = &context.commands[index];
    let (cid, data_len) = (command.sqe.cid(), command.data_len);
    debug_assert_eq!(buf.as_ref().len(), data_len as usize, "a read of another length");
    context.remove_command(index);
    // SUCCESS stands for a response capsule, but carries no SQHD (TCP §3.3.2.2).
    let success = context.queue.as_ref().is_some_and(|q| q.no_sq_flow);
    let header = DataHdr { cccid: cid, ttag: 0, datao: 0, datal: data_len, last: true, success };
    let tx = &context.tx;
    outbox.push_bytes(|v| tx.c2h_data(&header, v));
    if tx.data_digest {
        let mut digest = alloc::vec::Vec::with_capacity(4);
        tx.data_digest([buf.as_ref()], &mut digest);
        outbox.push_payload(buf);
        outbox.push_bytes(|v| v.extend_from_slice(&digest));
    } else {
        outbox.push_payload(buf);
    }
    if !success {
        context.send_completion(cid, Status::SUCCESS, 0, outbox);
    }
}

/// Makes blocks read as zeroes; with `deallocate` their space may be given up.
#[inline]
pub(super) fn zero<D: BlockDevice>(
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

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
        cx: &mut Context<E>,
        sqe: &Sqe,
        data: &[u8],
        env: &mut E,
    ) -> Result<(usize, u32, bool), Status> {
        let ns = cx.extent(sqe)?;
        cx.guard(ns, env)?;
        // No directives but Rio's own are supported.
        if sqe.dword(12) >> 20 & 0xf != 0 {
            return Err(Status::INVALID_FIELD.with_dnr());
        }
        let want = sqe.nlb() * BLOCK_SIZE;
        if want > TRANSFER_BYTES_MAX {
            return Err(Status::INVALID_FIELD.with_dnr());
        }
        Ok((ns, want, is_in_capsule(sqe, want, data)?))
    }

    /// Carries out a Write: at once if its data is in the capsule, else after the data has come in.
    #[inline]
    pub(super) fn write<E: TargetEnv>(
        &mut self,
        cx: &mut Context<E>,
        sqe: &Sqe,
        data: &[u8],
        env: &mut E,
        out: &mut Outbox<E::Buf>,
    ) -> Result<(), Closed> {
        let (ns, want, inline) = match Self::check_write(cx, sqe, data, env) {
            Ok(checked) => checked,
            Err(status) => {
                cx.respond(sqe.cid(), status, 0, out);
                return Ok(());
            }
        };
        if !inline {
            return cx.ask_for_data(sqe, ns, want, env, out);
        }
        let index = cx.next_index()?;
        self.note_write(cx, ns);
        let op = OpId::new(cx.key, index);
        match env.device(ns).write(op.0, sqe.slba(), Data::Borrowed(data)) {
            Submitted::Done(Ok(_)) if !must_flush(cx, sqe, ns) => {
                cx.respond_here(sqe.cid(), Status::SUCCESS, 0, out);
            }
            Submitted::Done(result) => {
                cx.commands.take(sqe, Stage::Device, ns);
                self.device_result(cx, index, result, env, out);
            }
            Submitted::Pending => {
                cx.commands.take(sqe, Stage::Device, ns);
            }
        }
        Ok(())
    }

    /// Carries out a command whose requested data has come in completely.
    pub(super) fn data_ready<E: TargetEnv>(
        &mut self,
        cx: &mut Context<E>,
        index: u16,
        env: &mut E,
        out: &mut Outbox<E::Buf>,
    ) {
        match cx.commands[index].sqe.opcode() {
            opcode::WRITE => self.submit_received_write(cx, index, env, out),
            _ => self.begin_dataset(cx, index, env, out),
        }
    }

    /// Submits a write whose requested data has come in.
    fn submit_received_write<E: TargetEnv>(
        &mut self,
        cx: &mut Context<E>,
        index: u16,
        env: &mut E,
        out: &mut Outbox<E::Buf>,
    ) {
        let command = &cx.commands[index];
        let (ns, lba) = (usize::from(command.ns), command.sqe.slba());
        // Another host may have claimed the volume while the data was in transit (T21).
        if let Err(status) = cx.guard(ns, env) {
            return cx.answer(index, status, 0, out);
        }
        let command = &mut cx.commands[index];
        let Some(buf) = command.buf.take() else {
            debug_assert!(false, "gathered data without a buffer");
            return cx.answer(index, Status::INTERNAL, 0, out);
        };
        command.stage = Stage::Device;
        self.note_write(cx, ns);
        let op = OpId::new(cx.key, index);
        if let Submitted::Done(result) = env.device(ns).write(op.0, lba, Data::Owned(buf)) {
            self.device_result(cx, index, result, env, out);
        }
    }

    /// Begins a Read, once the connection may hold the buffer for it (T28).
    #[inline]
    pub(super) fn read<E: TargetEnv>(
        &mut self,
        cx: &mut Context<E>,
        sqe: &Sqe,
        env: &mut E,
        out: &mut Outbox<E::Buf>,
    ) -> Result<(), Closed> {
        let want = sqe.nlb() * BLOCK_SIZE;
        let checked = cx.extent(sqe).and_then(|ns| match sqe.sgl() {
            _ if want > TRANSFER_BYTES_MAX => Err(Status::INVALID_FIELD.with_dnr()),
            Ok(Sgl::Transport { len }) if len == want => Ok(ns),
            Ok(Sgl::Transport { .. }) => Err(Status::SGL_LENGTH_INVALID.with_dnr()),
            Ok(Sgl::InCapsule { .. }) => Err(Status::SGL_TYPE_INVALID.with_dnr()),
            Err(error) => Err(error.status()),
        });
        if let Some((index, _)) = cx.take_checked(sqe, Stage::Budget, checked, out)?
            && cx.may_hold(index, want, out)
        {
            self.start(cx, index, env, out);
        }
        Ok(())
    }

    /// Starts a command that may hold its buffer now: begins a read, or asks for the data of a write.
    pub(super) fn start<E: TargetEnv>(
        &mut self,
        cx: &mut Context<E>,
        index: u16,
        env: &mut E,
        out: &mut Outbox<E::Buf>,
    ) {
        let ns = usize::from(cx.commands[index].ns);
        let refusal = if cx.is_fenced { Some(fenced_owner()) } else { cx.refuses_read(ns) };
        let command = &mut cx.commands[index];
        if command.sqe.opcode() != opcode::READ {
            return cx.ask_or_fail(index, env, out);
        }
        // The read could find zeroes where recovery has undone writes that the host's stream has
        // completed. The host may not know yet that it is fenced (T8, P9).
        if let Some(refusal) = refusal
            && !probe::planted(Plant::T8FencedReads)
        {
            return cx.answer(index, refusal, 0, out);
        }
        command.stage = Stage::Device;
        let (lba, blocks) = (command.sqe.slba(), command.sqe.nlb());
        let op = OpId::new(cx.key, index);
        if let Submitted::Done(result) = env.device(ns).read(op.0, lba, blocks.into()) {
            self.device_result(cx, index, result, env, out);
        }
    }

    /// Submits a Flush.
    pub(super) fn flush<E: TargetEnv>(
        &mut self,
        cx: &mut Context<E>,
        sqe: &Sqe,
        env: &mut E,
        out: &mut Outbox<E::Buf>,
    ) -> Result<(), Closed> {
        let checked = cx.namespace(sqe).map(|(ns, _)| ns);
        let Some((index, ns)) = cx.take_checked(sqe, Stage::Device, checked, out)? else {
            return Ok(());
        };
        cx.commands[index].failures_before = self.failures_before_covered_writes(cx, ns);
        if let Submitted::Done(result) = cx.submit_flush_of(index, env) {
            self.device_result(cx, index, result, env, out);
        }
        Ok(())
    }

    /// Notes that a plain write goes to the drive. A later FLUSH of this connection covers it.
    #[inline(always)]
    pub(super) fn note_write<E: TargetEnv>(&mut self, cx: &Context<E>, ns: usize) {
        let namespace = cx.namespaces.at(ns);
        if !namespace.config.volatile {
            return;
        }
        let failures = namespace.state.flush_failures();
        if self.failures_at_first_write.len() <= ns {
            self.failures_at_first_write.resize(ns + 1, None);
        }
        self.failures_at_first_write[ns].get_or_insert(failures);
    }

    /// How many FLUSHes of the drive had failed when the first write that a FLUSH submitted now would
    /// cover was submitted. Without such a write: how many have failed until now. If one fails in
    /// between, the FLUSH must not succeed.
    ///
    /// The FLUSH does not cover writes that are in flight (M2). So if there are some, the next FLUSH
    /// begins at the same write.
    fn failures_before_covered_writes<E: TargetEnv>(
        &mut self,
        cx: &Context<E>,
        ns: usize,
    ) -> Option<u64> {
        let namespace = cx.namespaces.at(ns);
        if !namespace.config.volatile {
            return None;
        }
        let now = namespace.state.flush_failures();
        let Some(Some(before)) = self.failures_at_first_write.get(ns).copied() else {
            return Some(now);
        };
        let has_writes_in_flight = cx.commands.any(|command| {
            usize::from(command.ns) == ns
                && matches!(command.stage, Stage::Device | Stage::DeviceFlush)
                && !command.ordered
                && !matches!(command.sqe.opcode(), opcode::READ | opcode::FLUSH)
        });
        if !has_writes_in_flight {
            self.failures_at_first_write[ns] = None;
        }
        Some(before)
    }

    /// Whether writes that the successful FLUSH of this command should cover may be lost, because a
    /// FLUSH of some connection has failed since the first of them. Returns true once for each
    /// failure, as Linux reports it to `fsync`: the host writes and flushes again (T22).
    fn has_lost<E: TargetEnv>(&mut self, cx: &Context<E>, index: u16) -> bool {
        let command = &cx.commands[index];
        let Some(before) = command.failures_before else {
            return false;
        };
        let ns = usize::from(command.ns);
        let failures = cx.namespaces.at(ns).state.flush_failures();
        let has_lost = failures != before && !probe::planted(Plant::T22PlainFlush);
        if has_lost && let Some(failures_at_first_write) = self.failures_at_first_write.get_mut(ns)
        {
            // Later writes are counted anew.
            *failures_at_first_write = Some(failures);
        }
        has_lost
    }

    /// Submits a Write Zeroes.
    pub(super) fn write_zeroes<E: TargetEnv>(
        &mut self,
        cx: &mut Context<E>,
        sqe: &Sqe,
        env: &mut E,
        out: &mut Outbox<E::Buf>,
    ) -> Result<(), Closed> {
        let checked = cx.extent(sqe).and_then(|ns| cx.guard(ns, env).map(|()| ns));
        let Some((index, ns)) = cx.take_checked(sqe, Stage::Device, checked, out)? else {
            return Ok(());
        };
        let op = OpId::new(cx.key, index);
        let (lba, blocks) = (sqe.slba(), u64::from(sqe.nlb()));
        self.note_write(cx, ns);
        if let Submitted::Done(result) = zero(env.device(ns), op, lba, blocks, sqe.deac()) {
            self.device_result(cx, index, result, env, out);
        }
        Ok(())
    }

    /// Takes in the result of a plain command's device operation.
    pub(super) fn device_result<E: TargetEnv>(
        &mut self,
        cx: &mut Context<E>,
        index: u16,
        result: Result<Option<E::Buf>, IoError>,
        env: &mut E,
        out: &mut Outbox<E::Buf>,
    ) {
        let command = &cx.commands[index];
        let (ns, stage, code) = (usize::from(command.ns), command.stage, command.sqe.opcode());
        let was_flush = stage == Stage::DeviceFlush || code == opcode::FLUSH;
        if was_flush {
            if cx.flush_ended(index, result.is_ok(), env) {
                return;
            }
            if result.is_ok() {
                return self.flush_accepted(cx, index, out);
            }
        }
        let status = match result {
            Err(error) => status_of(&error, code == opcode::READ),
            Ok(buf) => match (code, buf) {
                _ if cx.closing => Status::SUCCESS,
                // Its owner may have been fenced while the read was in flight, and no fence waited
                // for the read. It may have found blocks that the next owner has undone or written
                // (T8, P9).
                (opcode::READ, buf) => match (cx.refuses_read(ns), buf) {
                    (Some(refusal), _)
                        if !probe::planted(Plant::T8LateReads)
                            && !probe::planted(Plant::T8FencedReads) =>
                    {
                        refusal
                    }
                    (_, Some(buf)) => return send_read(cx, index, buf, out),
                    (_, None) => {
                        debug_assert!(false, "a read without a buffer");
                        Status::INTERNAL
                    }
                },
                (opcode::DATASET_MANAGEMENT, _) => {
                    return self.deallocate_next(cx, index, env, out);
                }
                _ if must_flush(cx, &cx.commands[index].sqe, ns) => {
                    return self.start_flush(cx, index, ns, env, out);
                }
                _ => Status::SUCCESS,
            },
        };
        cx.answer(index, status, 0, out);
    }

    /// Submits the FLUSH that follows a write with FUA.
    fn start_flush<E: TargetEnv>(
        &mut self,
        cx: &mut Context<E>,
        index: u16,
        ns: usize,
        env: &mut E,
        out: &mut Outbox<E::Buf>,
    ) {
        cx.commands[index].stage = Stage::DeviceFlush;
        // This FLUSH covers the command's own write, too. `failures_at_first_write` stays, because
        // the host may still flush its other writes.
        cx.commands[index].failures_before =
            self.failures_at_first_write.get(ns).copied().flatten();
        if let Submitted::Done(result) = cx.submit_flush_of(index, env) {
            self.device_result(cx, index, result, env, out);
        }
    }

    /// Answers a FLUSH, or a write with FUA, whose FLUSH has succeeded without doubt. The command
    /// fails all the same if an earlier FLUSH has failed and lost writes that this one covers.
    pub(super) fn flush_accepted<E: TargetEnv>(
        &mut self,
        cx: &mut Context<E>,
        index: u16,
        out: &mut Outbox<E::Buf>,
    ) {
        let status = if self.has_lost(cx, index) { Status::WRITE_FAULT } else { Status::SUCCESS };
        cx.answer(index, status, 0, out);
    }
}

/// Whether the command has FUA and the drive a volatile cache. Then a FLUSH follows the write.
#[inline]
fn must_flush<E: TargetEnv>(cx: &Context<E>, sqe: &Sqe, ns: usize) -> bool {
    sqe.fua() && cx.namespaces.at(ns).config.volatile
}

/// Answers a read with its data, which goes into the outbox without being copied.
fn send_read<E: TargetEnv>(cx: &mut Context<E>, index: u16, buf: E::Buf, out: &mut Outbox<E::Buf>) {
    let command = &cx.commands[index];
    let (cid, want) = (command.sqe.cid(), command.want);
    debug_assert_eq!(buf.as_ref().len(), want as usize, "a read of another length");
    cx.forget(index);
    // SUCCESS stands for a response capsule, but carries no SQHD (TCP §3.3.2.2).
    let success = cx.queue.as_ref().is_some_and(|q| q.no_sq_flow);
    let header = DataHdr { cccid: cid, ttag: 0, datao: 0, datal: want, last: true, success };
    let tx = &cx.tx;
    out.push_bytes(|v| tx.c2h_data(&header, v));
    if tx.data_digest {
        let mut digest = alloc::vec::Vec::with_capacity(4);
        tx.data_digest([buf.as_ref()], &mut digest);
        out.push_payload(buf);
        out.push_bytes(|v| v.extend_from_slice(&digest));
    } else {
        out.push_payload(buf);
    }
    if !success {
        cx.respond(cid, Status::SUCCESS, 0, out);
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

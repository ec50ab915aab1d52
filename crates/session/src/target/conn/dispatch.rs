//! The dispatch of incoming PDUs and commands to the part of the connection that carries them out.

use riopipe_nvme::command::{Sqe, Status, admin, opcode};
use riopipe_nvme::pdu::{DataHdr, Parsed, Pdu, PduError};
use riopipe_order::block_device::IoError;
use riopipe_order::probe::{self, Plant};

use super::TargetConn;
use crate::outbox::Outbox;
use crate::target::capsule::Capsule;
use crate::target::closed::Closed;
use crate::target::commands::Stage;
use crate::target::context::fenced_owner;
use crate::target::env::TargetEnv;
use crate::wire;

impl<E: TargetEnv> TargetConn<E> {
    /// Handles a PDU, which begins at `at` in `buf`.
    #[inline(never)]
    pub(super) fn pdu(
        &mut self,
        parsed: &Parsed,
        buf: &[u8],
        at: usize,
        env: &mut E,
        out: &mut Outbox<E::Buf>,
    ) -> Result<(), Closed> {
        let data = at + parsed.data.start..at + parsed.data.end;
        match &parsed.pdu {
            Pdu::CapsuleCmd { sqe } => {
                self.capsule(Capsule::new(sqe, buf, data, parsed.data_digest_ok), env, out)
            }
            Pdu::H2cData(header) => {
                self.h2c_data(header, &buf[data], parsed.data_digest_ok, env, out)
            }
            Pdu::IcReq(request) => self.initialize(request, env, out),
            Pdu::H2cTermReq(term) => Err(Closed::ByHost(*term)),
            // `Rx` passes no other PDU to a controller.
            _ => Err(PduError::sequence("a PDU that only a host may get").into()),
        }
    }

    /// Handles a command, with its in-capsule data.
    #[inline]
    pub(super) fn capsule(
        &mut self,
        capsule: Capsule<'_>,
        env: &mut E,
        out: &mut Outbox<E::Buf>,
    ) -> Result<(), Closed> {
        let cx = &mut self.cx;
        let Some(queue) = &cx.queue else {
            return self.before_connect(capsule, env, out);
        };
        let cid = capsule.sqe.cid();
        cx.sqhd += 1;
        if cx.sqhd >= queue.entries {
            cx.sqhd = 0;
        }
        if cx.commands.has_cid(cid) {
            cx.respond(cid, Status::COMMAND_ID_CONFLICT.with_dnr(), 0, out);
            return Ok(());
        }
        if queue.qid == 0 {
            self.admin_command(capsule, env, out)
        } else {
            self.io_command(capsule, env, out)
        }
    }

    /// Handles a command on the admin queue.
    fn admin_command(
        &mut self,
        capsule: Capsule<'_>,
        env: &mut E,
        out: &mut Outbox<E::Buf>,
    ) -> Result<(), Closed> {
        let Capsule { sqe, data, digest_ok, .. } = capsule;
        if !digest_ok {
            self.cx.respond(sqe.cid(), Status::TRANSIENT_TRANSPORT, 0, out);
            return Ok(());
        }
        if sqe.opcode() == admin::FABRICS {
            return self.fabrics(sqe, env, out);
        }
        match &mut self.admin {
            Some(admin) => admin.command(&mut self.cx, sqe, data, env, out),
            None => {
                self.cx.respond(sqe.cid(), Status::INTERNAL, 0, out);
                Ok(())
            }
        }
    }

    /// Handles a command on an I/O queue: as an ordered request, or as a plain command.
    #[inline]
    fn io_command(
        &mut self,
        capsule: Capsule<'_>,
        env: &mut E,
        out: &mut Outbox<E::Buf>,
    ) -> Result<(), Closed> {
        let Capsule { sqe, data, digest_ok, .. } = capsule;
        let code = sqe.opcode();
        // Other opcodes do not have the dword that marks an ordered request.
        if wire::is_ordered(sqe)
            && matches!(code, opcode::WRITE | opcode::WRITE_ZEROES | opcode::FLUSH)
        {
            return match &mut self.ordered {
                Some(queue) => queue.arrived(&mut self.cx, capsule, env, out),
                None => self.ordered_without_stream(capsule, env, out),
            };
        }
        let Self { cx, plain, .. } = self;
        let cid = sqe.cid();
        if !digest_ok {
            cx.respond(cid, Status::TRANSIENT_TRANSPORT, 0, out);
            return Ok(());
        }
        if sqe.fuse() != 0 {
            cx.respond(cid, Status::INVALID_FIELD.with_dnr(), 0, out);
            return Ok(());
        }
        match code {
            opcode::WRITE => plain.write(cx, sqe, data, env, out),
            opcode::READ => plain.read(cx, sqe, env, out),
            opcode::FLUSH => plain.flush(cx, sqe, env, out),
            opcode::WRITE_ZEROES => plain.write_zeroes(cx, sqe, env, out),
            opcode::DATASET_MANAGEMENT => plain.dataset(cx, sqe, data, env, out),
            wire::IO_BIND => {
                self.bind(sqe, env, out);
                Ok(())
            }
            wire::IO_MARK | wire::IO_LIST => {
                self.stream_command(sqe, out);
                Ok(())
            }
            admin::FABRICS => self.fabrics(sqe, env, out),
            _ => {
                cx.respond(cid, Status::INVALID_OPCODE.with_dnr(), 0, out);
                Ok(())
            }
        }
    }

    /// Carries out a command that needs a stream: Mark or List.
    fn stream_command(&mut self, sqe: &Sqe, out: &mut Outbox<E::Buf>) {
        match &mut self.ordered {
            Some(queue) if sqe.opcode() == wire::IO_MARK => {
                queue.release_mark(&mut self.cx, sqe, out)
            }
            Some(queue) => queue.list(&mut self.cx, sqe, out),
            None => self.cx.respond(sqe.cid(), self.status_without_stream(), 0, out),
        }
    }

    /// An ordered request on a queue without a stream (T17). Its fields have no meaning there, and
    /// a host that sets them must not rely on them.
    #[cold]
    fn ordered_without_stream(
        &mut self,
        capsule: Capsule<'_>,
        env: &mut E,
        out: &mut Outbox<E::Buf>,
    ) -> Result<(), Closed> {
        if self.cx.is_fenced && probe::planted(Plant::T8StaleOwner) {
            let plain = wire::without_attribute(capsule.sqe);
            return self.io_command(Capsule { sqe: &plain, ..capsule }, env, out);
        }
        self.cx.respond(capsule.sqe.cid(), self.status_without_stream(), 0, out);
        Ok(())
    }

    /// The status for a command that needs a stream, on a queue that carries none.
    fn status_without_stream(&self) -> Status {
        if self.cx.is_fenced { fenced_owner() } else { wire::status::NOT_BOUND.with_dnr() }
    }

    /// Handles a piece of the data that an R2T requested.
    fn h2c_data(
        &mut self,
        header: &DataHdr,
        data: &[u8],
        digest_ok: bool,
        env: &mut E,
        out: &mut Outbox<E::Buf>,
    ) -> Result<(), Closed> {
        if let Some(index) = self.cx.data_received(header, data, digest_ok)? {
            self.data_ready(index, env, out);
        }
        Ok(())
    }

    /// Carries out a command whose data has come in completely, by R2T.
    fn data_ready(&mut self, index: u16, env: &mut E, out: &mut Outbox<E::Buf>) {
        let Self { cx, plain, ordered, admin, .. } = self;
        let command = &mut cx.commands[index];
        if !command.ordered {
            return match (command.verdict, admin) {
                (Some(status), _) => cx.answer(index, status, 0, out),
                (None, Some(admin)) => admin.data_ready(cx, index, env, out),
                (None, None) => plain.data_ready(cx, index, env, out),
            };
        }
        command.stage = Stage::Gate;
        match ordered {
            _ if command.refused => cx.answer_refused(index, out),
            Some(queue) => queue.data_ready(command, index),
            None => {
                debug_assert!(false, "a stream was released and its request not refused");
                cx.answer(index, fenced_owner(), 0, out);
            }
        }
    }

    /// Starts the commands that have waited for memory, in order, as far as the budget allows.
    pub(super) fn start_waiting(&mut self, env: &mut E, out: &mut Outbox<E::Buf>) {
        let Self { cx, plain, ordered, admin, .. } = self;
        cx.reservation.shrink(cx.held + out.len_bytes());
        while let Some(index) = cx.next_to_start(out) {
            let command = &cx.commands[index];
            match ordered {
                // The connection has given up its stream while the request waited. No R2T was sent.
                _ if command.refused => cx.answer_refused(index, out),
                Some(queue) if command.ordered => {
                    queue.start(cx, index, env, out);
                    // A request that gets no memory has failed at the gate. It is answered now,
                    // because no other event may follow that would finish a batch (P8).
                    if cx.commands[index].stage == Stage::Gate {
                        queue.finish_batch(cx, &[], env, out);
                    }
                }
                _ if admin.is_some() => cx.ask_or_fail(index, env, out),
                _ => plain.start(cx, index, env, out),
            }
        }
    }

    /// Takes in the result of a command's device operation.
    pub(super) fn device_result(
        &mut self,
        index: u16,
        result: Result<Option<E::Buf>, IoError>,
        env: &mut E,
        out: &mut Outbox<E::Buf>,
    ) {
        let Self { cx, plain, ordered, .. } = self;
        if !cx.commands[index].ordered {
            return plain.device_result(cx, index, result, env, out);
        }
        match ordered {
            Some(queue) => queue.device_result(cx, index, result, env),
            None => {
                debug_assert!(
                    probe::planted(Plant::T8ClaimNoWait) || probe::planted(Plant::T8ReplayNoWait),
                    "a stream was released with operations in flight (T8)"
                );
                cx.answer(index, fenced_owner(), 0, out);
            }
        }
    }

    /// Notes that a round of FLUSHes has ended. Uses the success of those FLUSHes of this connection
    /// that are not in doubt any more (T29).
    pub(super) fn resolve_doubts(&mut self, env: &mut E, out: &mut Outbox<E::Buf>) {
        let Self { cx, plain, ordered, .. } = self;
        for index in cx.resolve_doubts(env) {
            let command = &cx.commands[index];
            match ordered {
                _ if !command.ordered => plain.flush_accepted(cx, index, out),
                Some(queue) if !command.refused => queue.report_flush(cx, index, true),
                _ => cx.answer(index, fenced_owner(), 0, out),
            }
        }
        self.batch_ended(env, out);
    }
}

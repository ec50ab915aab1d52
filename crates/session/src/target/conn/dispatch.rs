//! The dispatch of incoming PDUs, commands and results of device operations to the part of the
//! connection that is responsible for them: `admin`, `plain` or `ordered`.

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
use crate::target::drive_order::is_in_drive_order;
use crate::target::env::{TargetEnv, WrongDigest};
use crate::target::lba::Trim;
use crate::target::reserve::{changes_reservations, report_reservations};
use crate::target::transfer::DataEnd;
use crate::wire;

impl<E: TargetEnv> TargetConn<E> {
    /// Handles a PDU that begins at offset `at` of the receive buffer `buf`.
    #[inline(never)]
    pub(super) fn on_pdu(
        &mut self,
        parsed: &Parsed,
        buf: &[u8],
        at: usize,
        env: &mut E,
        outbox: &mut Outbox<E::Buf>,
    ) -> Result<(), Closed> {
        let data = at + parsed.data.start..at + parsed.data.end;
        if !parsed.data_digest_ok {
            self.report_wrong_data(&parsed.pdu, env);
        }
        match &parsed.pdu {
            Pdu::CapsuleCmd { sqe } => {
                self.on_capsule(Capsule::new(sqe, buf, data, parsed.data_digest_ok), env, outbox)
            }
            Pdu::H2cData(header) => {
                self.on_h2c_data(header, &buf[data], parsed.data_digest_ok, env, outbox)
            }
            Pdu::IcReq(request) => self.on_ic_req(request, env, outbox),
            Pdu::H2cTermReq(term) => Err(Closed::ByHost(*term)),
            // `Rx` passes no other PDU to a controller.
            _ => Err(PduError::sequence("a PDU that only a host may get").into()),
        }
    }

    /// Reports that the digest of a PDU's data is wrong.
    #[cold]
    fn report_wrong_data(&mut self, pdu: &Pdu, env: &mut E) {
        let (cid, opcode) = match pdu {
            Pdu::CapsuleCmd { sqe } => (sqe.cid(), Some(sqe.opcode())),
            Pdu::H2cData(header) => {
                let command = self.context.commands.get_used(header.ttag);
                let command = command.filter(|command| command.sqe.cid() == header.cccid);
                (header.cccid, command.map(|command| command.sqe.opcode()))
            }
            // No other PDU of a host has data with a digest.
            _ => return,
        };
        self.context.report_digest_error(WrongDigest::Data { cid, opcode }, env);
    }

    /// Handles a command, with its in-capsule data.
    #[inline]
    pub(super) fn on_capsule(
        &mut self,
        capsule: Capsule<'_>,
        env: &mut E,
        outbox: &mut Outbox<E::Buf>,
    ) -> Result<(), Closed> {
        let context = &mut self.context;
        let Some(queue) = &context.queue else {
            return self.execute_before_connect(capsule, env, outbox);
        };
        let cid = capsule.sqe.cid();
        context.sqhd += 1;
        if context.sqhd >= queue.entries {
            context.sqhd = 0;
        }
        let is_admin = queue.qid == 0;
        if self.plain.awaits_second_half()
            && (!capsule.sqe.is_second_half() || wire::is_ordered(capsule.sqe))
        {
            self.plain.end_first_half(context, Status::FUSED_MISSING.with_dnr(), outbox);
        }
        if context.commands.has_cid(cid) {
            self.plain.end_first_half(context, Status::FUSED_FAILED.with_dnr(), outbox);
            self.plain.on_unread_command(context, capsule.sqe, outbox);
            context.send_completion(cid, Status::COMMAND_ID_CONFLICT.with_dnr(), 0, outbox);
            return Ok(());
        }
        let sqe = capsule.sqe;
        let outcome = match is_admin {
            true => self.execute_admin(capsule, env, outbox),
            false => self.execute_io(capsule, env, outbox),
        };
        if !self.context.new_errors.is_empty() {
            self.context.describe_error(sqe, sqe.slba());
        }
        outcome
    }

    /// Handles a command on the admin queue.
    fn execute_admin(
        &mut self,
        capsule: Capsule<'_>,
        env: &mut E,
        outbox: &mut Outbox<E::Buf>,
    ) -> Result<(), Closed> {
        let Capsule { sqe, data, is_digest_valid, .. } = capsule;
        if !is_digest_valid {
            self.context.send_completion(sqe.cid(), Status::TRANSIENT_TRANSPORT, 0, outbox);
            return Ok(());
        }
        // No admin command may be part of a fused operation (Base §3.4.2).
        if sqe.fuse() != 0 {
            self.context.send_completion(sqe.cid(), Status::INVALID_FIELD.with_dnr(), 0, outbox);
            return Ok(());
        }
        if sqe.opcode() == admin::FABRICS {
            return self.execute_fabrics(capsule, env, outbox);
        }
        match &mut self.admin {
            Some(admin) => admin.execute(&mut self.context, sqe, data, env, outbox),
            None => {
                self.context.send_completion(sqe.cid(), Status::INTERNAL, 0, outbox);
                Ok(())
            }
        }
    }

    /// Handles a command on an I/O queue: as an ordered request, or as a plain command.
    #[inline]
    fn execute_io(
        &mut self,
        capsule: Capsule<'_>,
        env: &mut E,
        outbox: &mut Outbox<E::Buf>,
    ) -> Result<(), Closed> {
        let Capsule { sqe, data, is_digest_valid, .. } = capsule;

        if wire::is_ordered(sqe) {
            return match &mut self.ordered {
                Some(ordered) => ordered.on_request(&mut self.context, capsule, env, outbox),
                None => self.refuse_ordered_without_stream(capsule, env, outbox),
            };
        }
        let Self { context, plain, ordered, .. } = self;
        let cid = sqe.cid();
        if !is_digest_valid {
            plain.on_unread_command(context, sqe, outbox);
            plain.on_unread_half(context, sqe, outbox);
            context.send_completion(cid, Status::TRANSIENT_TRANSPORT, 0, outbox);
            return Ok(());
        }
        let translated: Sqe;
        let (sqe, trim) = match context.translated(sqe) {
            None => (sqe, Trim::default()),
            Some(Ok((of_drive, trim))) => {
                translated = of_drive;
                (&translated, trim)
            }
            Some(Err(status)) => {
                plain.on_unread_half(context, sqe, outbox);
                context.send_completion(cid, status, 0, outbox);
                return Ok(());
            }
        };
        if sqe.fuse() != 0 {
            plain.on_unread_command(context, sqe, outbox);
            return plain.fused_command(context, (sqe, trim), data, env, outbox);
        }
        match sqe.opcode() {
            opcode::WRITE => plain.write(context, (sqe, trim), data, env, outbox),
            opcode::READ => plain.read(context, (sqe, trim), env, outbox),
            opcode::FLUSH => plain.flush(context, sqe, env, outbox),
            opcode::COMPARE => plain.compare(context, (sqe, trim), data, env, outbox),
            opcode::VERIFY => plain.verify(context, (sqe, trim), env, outbox),
            opcode::COPY => plain.copy(context, sqe, data, env, outbox),
            code if changes_reservations(code) => plain.reserve(context, sqe, data, env, outbox),
            opcode::RESERVATION_REPORT => report_reservations(context, sqe, env, outbox),
            opcode::WRITE_ZEROES => plain.write_zeroes(context, (sqe, trim), env, outbox),
            opcode::DATASET_MANAGEMENT => plain.dataset(context, sqe, data, env, outbox),
            wire::IO_BIND => {
                self.bind(sqe, env, outbox);
                Ok(())
            }
            wire::IO_ORDER => match ordered {
                Some(ordered) => ordered.on_order(context, capsule, env, outbox),
                None => {
                    let status = self.status_without_stream();
                    self.context.send_completion(cid, status, 0, outbox);
                    Ok(())
                }
            },
            wire::IO_MARK | wire::IO_LIST => {
                self.execute_stream_command(sqe, outbox);
                Ok(())
            }
            admin::FABRICS => self.execute_fabrics(capsule, env, outbox),
            _ => {
                context.send_completion(cid, Status::INVALID_OPCODE.with_dnr(), 0, outbox);
                Ok(())
            }
        }
    }

    /// Carries out a command that needs a stream: Mark or List.
    fn execute_stream_command(&mut self, sqe: &Sqe, outbox: &mut Outbox<E::Buf>) {
        match &mut self.ordered {
            Some(ordered) if sqe.opcode() == wire::IO_MARK => {
                ordered.release_mark(&mut self.context, sqe, outbox)
            }
            Some(ordered) => ordered.list(&mut self.context, sqe, outbox),
            None => {
                self.context.send_completion(sqe.cid(), self.status_without_stream(), 0, outbox)
            }
        }
    }

    /// Refuses an ordered request on a queue that carries no stream. The host relies on the order
    /// of its requests, and nothing would keep that order here (trap T17).
    #[cold]
    fn refuse_ordered_without_stream(
        &mut self,
        capsule: Capsule<'_>,
        env: &mut E,
        outbox: &mut Outbox<E::Buf>,
    ) -> Result<(), Closed> {
        if self.context.is_fenced && probe::is_bug_planted(Plant::T8StaleOwner) {
            let plain = wire::without_attribute(capsule.sqe);
            return self.execute_io(Capsule { sqe: &plain, ..capsule }, env, outbox);
        }
        self.context.send_completion(capsule.sqe.cid(), self.status_without_stream(), 0, outbox);
        Ok(())
    }

    /// The status for a command that needs a stream, on a queue that carries none.
    fn status_without_stream(&self) -> Status {
        if self.context.is_fenced { fenced_owner() } else { wire::status::NOT_BOUND.with_dnr() }
    }

    /// Handles a piece of the data that an R2T requested.
    fn on_h2c_data(
        &mut self,
        header: &DataHdr,
        data: &[u8],
        is_digest_valid: bool,
        env: &mut E,
        outbox: &mut Outbox<E::Buf>,
    ) -> Result<(), Closed> {
        if let Some(index) = self.context.receive_data(header, data, is_digest_valid)? {
            self.on_data_ready(index, env, outbox);
        }
        Ok(())
    }

    /// Handles the end of a data PDU that was open.
    pub(super) fn on_data_end(&mut self, end: &DataEnd, env: &mut E, outbox: &mut Outbox<E::Buf>) {
        if !end.is_digest_valid {
            self.report_wrong_data(&Pdu::H2cData(end.header), env);
        }
        if let Some(index) = self.context.close_data(end) {
            self.on_data_ready(index, env, outbox);
        }
    }

    /// Continues a command whose data has arrived completely by R2T.
    fn on_data_ready(&mut self, index: u16, env: &mut E, outbox: &mut Outbox<E::Buf>) {
        let Self { context, plain, ordered, admin, .. } = self;
        let command = &mut context.commands[index];
        if !command.is_ordered {
            return match (command.early_status, admin) {
                // A write in its drive's order stops those behind it if it fails.
                (Some(_), None) if is_in_drive_order(&command.sqe) => {
                    plain.on_ordered_data(context, index, env, outbox);
                }
                (_, None) if command.partner.is_some() => {
                    plain.on_half_data(context, index, env, outbox);
                }
                (Some(status), _) => context.complete_command(index, status, 0, outbox),
                (None, Some(admin)) => admin.on_data_ready(context, index, env, outbox),
                (None, None) => plain.on_data_ready(context, index, env, outbox),
            };
        }
        command.stage = Stage::Gate;
        match ordered {
            _ if command.is_refused => context.complete_refused(index, outbox),
            Some(ordered) => ordered.on_data_ready(command, index),
            None => {
                debug_assert!(false, "a stream was released and its request not refused");
                context.complete_command(index, fenced_owner(), 0, outbox);
            }
        }
    }

    /// Continues the commands that have waited for the budget, in order, as far as the budget
    /// allows.
    pub(super) fn start_waiting_commands(&mut self, env: &mut E, outbox: &mut Outbox<E::Buf>) {
        let Self { context, plain, ordered, admin, .. } = self;
        context.reservation.shrink(context.held_bytes + outbox.len_bytes());
        while let Some(index) = context.next_within_budget(outbox) {
            let command = &context.commands[index];
            match ordered {
                // The connection has given up its stream while the request waited.
                _ if command.is_refused => context.complete_refused(index, outbox),
                Some(ordered) if command.is_ordered => {
                    ordered.start_transfer(context, index, env, outbox);
                    // A request that gets no memory fails at the gate. The batch is finished here,
                    // so that the request gets its completion even if no other event follows
                    // (promise P8).
                    if context.commands[index].stage == Stage::Gate {
                        ordered.finish_batch(context, &[], env, outbox);
                    }
                }
                _ if admin.is_some() => context.request_data_or_fail(index, env, outbox),
                _ => plain.start_with_buffer(context, index, env, outbox),
            }
        }
        if !plain.waiting_for_lock.is_empty() {
            plain.start_waiting_for_lock(context, env, outbox);
        }
    }

    /// Passes the result of a command's device operation to the part that has submitted the
    /// operation.
    pub(super) fn on_device_result(
        &mut self,
        index: u16,
        result: Result<Option<E::Buf>, IoError>,
        env: &mut E,
        outbox: &mut Outbox<E::Buf>,
    ) {
        let Self { context, plain, ordered, .. } = self;
        if !context.commands[index].is_ordered {
            return plain.on_device_result(context, index, result, env, outbox);
        }
        match ordered {
            Some(ordered) => ordered.on_device_result(context, index, result, env),
            None => {
                debug_assert!(
                    probe::is_bug_planted(Plant::T8ClaimNoWait)
                        || probe::is_bug_planted(Plant::T8ReplayNoWait),
                    "a stream was released with operations in flight (T8)"
                );
                context.complete_command(index, fenced_owner(), 0, outbox);
            }
        }
    }

    /// Notes that a round of FLUSHes has ended. Continues the commands of this connection whose
    /// FLUSH is not in doubt any more (trap T29).
    pub(super) fn resolve_doubts(&mut self, env: &mut E, outbox: &mut Outbox<E::Buf>) {
        let Self { context, plain, ordered, .. } = self;
        for index in context.resolve_doubts(env) {
            let command = &context.commands[index];
            match ordered {
                _ if !command.is_ordered => plain.on_certain_flush_success(context, index, outbox),
                Some(ordered) if !command.is_refused => ordered.report_flush(context, index, true),
                _ => context.complete_command(index, fenced_owner(), 0, outbox),
            }
        }
        self.batch_ended(env, outbox);
    }
}

//! The fused operation Compare and Write (Base §3.4.2, NVM §3.1): a Compare, and directly behind it
//! on the same queue a Write of the same block. Clusters use it for their locks on disk.
//!
//! ```text
//! first half ─→ Paired ┐
//! second half ─→ Paired ┴ both have their data ─→ lock the block ─→ read ─→ compare ─→ write
//! ```
//!
//! The operation is atomic with regard to the commands of all connections: none changes the block
//! between the read and the write ([`block_locks`](super::block_locks)). A host that reads the block
//! finds it as it was before, or as it is afterwards: a block is read and written as a whole
//! (assumption M1). That is why the operation has one block at most (ACWU, NACWU).
//!
//! If one half fails, the other one fails with Failed Fused Command. A half without the other one
//! directly beside it fails with Missing Fused Command.
//!
//! Ordered requests take no part in the locks. So the operation is refused where they may come from:
//! on a namespace of a volume that has an owner, and on a drive that keeps an order itself.
//!
//! A connection carries out one such operation at a time. Further ones wait in order.
//!
//! The data of both halves is not charged to the budget. It is less than the in-capsule data for
//! which the queue has memory in any case, and so no half waits for memory that its other half holds.

use riopipe_nvme::command::{Fuse, Sqe, Status, opcode};
use riopipe_order::block_device::{BlockDevice, Data, Submitted};
use riopipe_order::write_order::DriveOrder;

use super::closed::Closed;
use super::commands::{Command, Stage};
use super::context::{Context, is_in_capsule};
use super::env::TargetEnv;
use super::ids::OpId;
use super::lba::Trim;
use super::modify::put_into;
use super::plain::{PlainIo, note_failures_before};
use crate::outbox::Outbox;
use crate::wire;

/// The first half of a fused operation, until its second half comes.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) enum FirstHalf {
    /// The last command was no first half.
    #[default]
    None,
    /// It is in the table of commands, with this index.
    Waits(u16),
    /// It has failed.
    Failed,
}

/// The other half of a fused operation.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Partner {
    /// The command is the Compare. This is the index of the Write, once it has come.
    Write(Option<u16>),
    /// The command is the Write. This is the index of the Compare.
    Compare(u16),
}

impl PlainIo {
    /// Whether the next command must be the second half of a fused operation.
    #[inline(always)]
    pub(super) const fn awaits_second_half(&self) -> bool {
        !matches!(self.first_half, FirstHalf::None)
    }

    /// Ends a first half, because another command than its second half has come, or its second half
    /// was refused.
    #[cold]
    pub(super) fn end_first_half<E: TargetEnv>(
        &mut self,
        context: &mut Context<E>,
        status: Status,
        outbox: &mut Outbox<E::Buf>,
    ) {
        if let FirstHalf::Waits(index) = core::mem::take(&mut self.first_half) {
            context.complete_command(index, status, 0, outbox);
        }
    }

    /// Ends a fused operation of which one half was damaged in transit, and is refused.
    #[cold]
    pub(super) fn on_unread_half<E: TargetEnv>(
        &mut self,
        context: &mut Context<E>,
        sqe: &Sqe,
        outbox: &mut Outbox<E::Buf>,
    ) {
        self.end_first_half(context, Status::FUSED_FAILED.with_dnr(), outbox);
        if sqe.fused() == Fuse::First {
            self.first_half = FirstHalf::Failed;
        }
    }

    /// Takes in half of a fused operation.
    #[cold]
    pub(super) fn fused_command<E: TargetEnv>(
        &mut self,
        context: &mut Context<E>,
        (sqe, trim): (&Sqe, Trim),
        data: &[u8],
        env: &mut E,
        outbox: &mut Outbox<E::Buf>,
    ) -> Result<(), Closed> {
        let cid = sqe.cid();
        match sqe.fused() {
            Fuse::First => match context.check_half((sqe, trim), opcode::COMPARE, data, env) {
                Ok(ns_index) => {
                    let index = context.insert_command(sqe, Stage::Paired, ns_index)?;
                    let command = &mut context.commands[index];
                    (command.partner, command.trim) = (Some(Partner::Write(None)), trim);
                    self.first_half = FirstHalf::Waits(index);
                    if !data.is_empty() && !context.keep_capsule_data(index, data, env) {
                        self.end_first_half(context, Status::INTERNAL, outbox);
                        self.first_half = FirstHalf::Failed;
                    }
                }
                Err(status) => {
                    self.first_half = FirstHalf::Failed;
                    context.send_completion(cid, status, 0, outbox);
                }
            },
            Fuse::Second => match core::mem::take(&mut self.first_half) {
                FirstHalf::None => {
                    let status = Status::FUSED_MISSING.with_dnr();
                    context.send_completion(cid, status, 0, outbox);
                }
                FirstHalf::Failed => {
                    context.send_completion(cid, Status::FUSED_FAILED.with_dnr(), 0, outbox);
                }
                FirstHalf::Waits(first) => {
                    return self.pair(context, first, (sqe, trim), data, env, outbox);
                }
            },
            Fuse::None | Fuse::Reserved => {
                context.send_completion(cid, Status::INVALID_FIELD.with_dnr(), 0, outbox);
            }
        }
        Ok(())
    }

    /// Takes in a second half whose first half waits.
    fn pair<E: TargetEnv>(
        &mut self,
        context: &mut Context<E>,
        first: u16,
        (sqe, trim): (&Sqe, Trim),
        data: &[u8],
        env: &mut E,
        outbox: &mut Outbox<E::Buf>,
    ) -> Result<(), Closed> {
        let Command { sqe: first_sqe, trim: first_trim, .. } = context.commands[first];
        let has_same_blocks = sqe.nsid() == first_sqe.nsid()
            && sqe.slba() == first_sqe.slba()
            && sqe.nlb() == first_sqe.nlb()
            && trim == first_trim;
        let checked = match has_same_blocks {
            true => context.check_half((sqe, trim), opcode::WRITE, data, env),
            false => Err(Status::INVALID_FIELD.with_dnr()),
        };
        let ns_index = match checked {
            Ok(ns_index) => ns_index,
            Err(status) => {
                context.complete_command(first, Status::FUSED_FAILED.with_dnr(), 0, outbox);
                context.send_completion(sqe.cid(), status, 0, outbox);
                return Ok(());
            }
        };
        let second = context.insert_command(sqe, Stage::Paired, ns_index)?;
        context.commands[first].partner = Some(Partner::Write(Some(second)));
        let command = &mut context.commands[second];
        (command.partner, command.trim) = (Some(Partner::Compare(first)), trim);
        if !data.is_empty() && !context.keep_capsule_data(second, data, env) {
            context.commands[second].early_status = Some(Status::INTERNAL);
        }
        for half in [first, second] {
            let command = &mut context.commands[half];
            command.data_len = trim.data_len(sqe);
            if command.buf.is_some() || command.early_status.is_some() {
                continue;
            }
            if !context.request_data(half, env, outbox) {
                context.commands[half].early_status = Some(Status::INTERNAL);
            }
        }
        self.start_pair(context, first, env, outbox);
        Ok(())
    }

    /// Takes in the data of one half.
    pub(super) fn on_half_data<E: TargetEnv>(
        &mut self,
        context: &mut Context<E>,
        index: u16,
        env: &mut E,
        outbox: &mut Outbox<E::Buf>,
    ) {
        context.commands[index].stage = Stage::Paired;
        match context.commands[index].partner {
            Some(Partner::Compare(first)) => self.start_pair(context, first, env, outbox),
            Some(Partner::Write(_)) => self.start_pair(context, index, env, outbox),
            None => context.complete_command(index, Status::INTERNAL, 0, outbox),
        }
    }

    /// Begins the operation if both halves have their data, and no other operation of this connection
    /// has its lock: locks the block.
    fn start_pair<E: TargetEnv>(
        &mut self,
        context: &mut Context<E>,
        first: u16,
        env: &mut E,
        outbox: &mut Outbox<E::Buf>,
    ) {
        let Some(Partner::Write(Some(second))) = context.commands[first].partner else { return };
        let halves = [first, second];
        if halves.iter().any(|half| context.commands[*half].stage == Stage::Receiving) {
            return;
        }
        for half in halves {
            if let Some(status) = context.commands[half].early_status {
                return context.fail_half(half, status, outbox);
            }
        }
        self.waiting_for_lock.push_back(first);
        self.start_waiting_for_lock(context, env, outbox);
    }

    /// Begins the operations that wait for the one before them, one after the other. A connection has
    /// one exclusive lock at a time, so there are not more locks than connections, and none of them asks
    /// all other connections for hundreds of locks at once (trap T28).
    pub(super) fn start_waiting_for_lock<E: TargetEnv>(
        &mut self,
        context: &mut Context<E>,
        env: &mut E,
        outbox: &mut Outbox<E::Buf>,
    ) {
        while !context.has_exclusive_lock()
            && let Some(index) = self.waiting_for_lock.pop_front()
        {
            // The lock of the one before.
            context.release_locks(env);
            match context.commands[index].partner {
                Some(_) => self.lock_pair(context, index, env, outbox),
                None => self.start_modifying(context, index, env, outbox),
            }
        }
    }

    /// Locks the block of a fused operation.
    fn lock_pair<E: TargetEnv>(
        &mut self,
        context: &mut Context<E>,
        first: u16,
        env: &mut E,
        outbox: &mut Outbox<E::Buf>,
    ) {
        let command = &context.commands[first];
        let blocks = command.sqe.slba()..command.sqe.slba() + 1;
        if context.lock_exclusively(first, blocks, env) {
            self.compare_half(context, first, env, outbox);
        }
    }

    /// Reads the block, which is locked now.
    pub(super) fn compare_half<E: TargetEnv>(
        &mut self,
        context: &mut Context<E>,
        first: u16,
        env: &mut E,
        outbox: &mut Outbox<E::Buf>,
    ) {
        let command = &mut context.commands[first];
        let (ns_index, lba) = (usize::from(command.ns_index), command.sqe.slba());
        if let Some(refusal) = context.refuses_new_read(ns_index) {
            return context.fail_half(first, refusal, outbox);
        }
        context.commands[first].stage = Stage::Device;
        let op = OpId::new(context.key, first);
        if let Submitted::Done(result) = env.device(ns_index).read(op.0, lba, 1) {
            self.on_device_result(context, first, result, env, outbox);
        }
    }

    /// Compares the content of the block, and writes it if it is the expected one.
    pub(super) fn write_half<E: TargetEnv>(
        &mut self,
        context: &mut Context<E>,
        first: u16,
        content: Option<E::Buf>,
        env: &mut E,
        outbox: &mut Outbox<E::Buf>,
    ) {
        context.commands[first].stage = Stage::Paired;
        if let Err(status) = context.check_content(first, content.as_ref()) {
            return context.fail_half(first, status, outbox);
        }
        let Some(Partner::Write(Some(second))) = context.commands[first].partner else {
            debug_assert!(false, "a Compare that was begun without its Write");
            return context.complete_command(first, Status::INTERNAL, 0, outbox);
        };
        let ns_index = usize::from(context.commands[second].ns_index);
        // Another host may have claimed the volume meanwhile (trap T21).
        if let Err(status) = context.may_change_fused(ns_index, env) {
            return context.fail_half(second, status, outbox);
        }
        // From here on the block is in use by the second half, also if the connection ends.
        let lock = context.commands[first].lock.take();
        let command = &mut context.commands[second];
        command.lock = lock;
        command.stage = Stage::Device;
        let buf = match (command.buf.take(), content) {
            (Some(data), Some(content)) if command.trim.is_some() => {
                put_into(content, command.extent(), Some(data), false)
            }
            (data, _) => data,
        };
        let Some(buf) = buf else {
            debug_assert!(false, "a Write without its data");
            return context.fail_half(second, Status::INTERNAL, outbox);
        };
        let lba = command.sqe.slba();
        let failures = self.note_plain_write(context, ns_index);
        note_failures_before(&mut context.commands[second], failures);
        let op = OpId::new(context.key, second);
        if let Submitted::Done(result) = env.device(ns_index).write(op.0, lba, Data::Owned(buf)) {
            self.on_device_result(context, second, result, env, outbox);
        }
    }
}

impl<E: TargetEnv> Context<E> {
    /// Checks half of a fused operation. Returns the index of its namespace.
    fn check_half(
        &mut self,
        (sqe, trim): (&Sqe, Trim),
        expected: u8,
        data: &[u8],
        env: &mut E,
    ) -> Result<usize, Status> {
        if sqe.opcode() != expected {
            return Err(Status::INVALID_FIELD.with_dnr());
        }
        let ns_index = self.check_blocks(sqe)?;
        let config = &self.namespaces.at(ns_index).config;
        if config.order != DriveOrder::None || wire::directive_type(sqe) != 0 {
            return Err(Status::INVALID_FIELD.with_dnr());
        }
        let data_len = trim.data_len(sqe);
        // ACWU and NACWU.
        if data_len > config.lba_size.bytes() {
            return Err(Status::ATOMIC_UNIT_EXCEEDED.with_dnr());
        }
        is_in_capsule(sqe, data_len, data)?;
        self.may_change_fused(ns_index, env)?;
        Ok(ns_index)
    }

    /// Checks the guard of a namespace for a fused operation.
    fn may_change_fused(&mut self, ns_index: usize, env: &mut E) -> Result<(), Status> {
        self.guard(ns_index, env)?;
        // The ordered requests of the owner do not wait for a locked block.
        match self.namespaces.at(ns_index).state.is_guarded_for(self.association()) {
            true => Err(wire::status::GUARDED.with_dnr()),
            false => Ok(()),
        }
    }

    /// Fails one half of a fused operation with this status, and the other one with it.
    pub(super) fn fail_half(&mut self, index: u16, status: Status, outbox: &mut Outbox<E::Buf>) {
        let failed = Status::FUSED_FAILED.with_dnr();
        match self.commands[index].partner {
            Some(Partner::Write(Some(second))) => {
                self.complete_pair(index, second, (status, failed), outbox);
            }
            Some(Partner::Compare(first)) => {
                self.complete_pair(first, index, (failed, status), outbox);
            }
            _ => self.complete_command(index, status, 0, outbox),
        }
    }

    /// Completes a command that has been carried out. If it is the second half of a fused operation,
    /// completes the first half, too.
    #[inline]
    pub(super) fn complete_with_partner(
        &mut self,
        index: u16,
        status: Status,
        outbox: &mut Outbox<E::Buf>,
    ) {
        match self.commands[index].partner {
            None => self.complete_command(index, status, 0, outbox),
            // The connection has ended, and has dropped the half that was not at the drive.
            Some(_) if self.is_closing => self.complete_command(index, status, 0, outbox),
            Some(Partner::Compare(first)) if status.is_ok() => {
                self.complete_pair(first, index, (Status::SUCCESS, status), outbox);
            }
            Some(_) => self.fail_half(index, status, outbox),
        }
    }

    /// Completes both halves, the first one first.
    fn complete_pair(
        &mut self,
        first: u16,
        second: u16,
        (first_status, second_status): (Status, Status),
        outbox: &mut Outbox<E::Buf>,
    ) {
        self.complete_command(first, first_status, 0, outbox);
        self.complete_command(second, second_status, 0, outbox);
    }
}

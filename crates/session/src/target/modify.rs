//! Writes that fill a block of the drive in part: those of a namespace with smaller blocks
//! ([`lba`](super::lba)).
//!
//! ```text
//! data is there → lock the blocks → read them → put the data in → write them → unlock
//! ```
//!
//! The blocks are locked as those of a Compare and Write are ([`fused`](super::fused)). So no other
//! command, of any connection, changes them between the read and the write, and none is lost. A block
//! is read and written as a whole (assumption M1), so a power cut changes no other logical
//! block of it.
//!
//! A connection has one such lock at a time. Further commands that need one wait in order. So there
//! are not more locks than connections (trap T28).

use core::ops::Range;

use riopipe_nvme::command::{Sqe, Status, opcode};
use riopipe_order::block_device::{BlockDevice, Data, IoError, Submitted};

use super::closed::Closed;
use super::commands::{HeldLock, Stage};
use super::context::{Context, update_shared};
use super::env::TargetEnv;
use super::ids::OpId;
use super::lba::{LbaSize, Trim};
use super::limits::BLOCK_SIZE;
use super::plain::{CheckedWrite, PlainIo, note_failures_before, submit_zeroing};
use crate::outbox::Outbox;

/// How far a command has come in changing blocks of the drive in part.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) enum Modifying {
    /// It does not change any now.
    #[default]
    No,
    /// It reads the blocks.
    Reading,
    /// It writes them.
    Writing,
}

/// A range of bytes of a drive.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Extent {
    /// The first block of the drive.
    pub(super) lba: u64,
    /// How many bytes of that block are before the range.
    pub(super) skip: u32,
    /// Bytes of the range.
    pub(super) len: u32,
}

impl Extent {
    /// The bytes of logical blocks.
    pub(super) fn of(lba: u64, blocks: u32, size: LbaSize) -> Self {
        let per_block = u64::from(size.per_drive_block());
        Self {
            lba: lba / per_block,
            skip: (lba % per_block) as u32 * size.bytes(),
            len: blocks * size.bytes(),
        }
    }

    /// Whether the range has only whole blocks.
    pub(super) const fn is_whole(&self) -> bool {
        self.skip == 0 && self.len.is_multiple_of(BLOCK_SIZE)
    }

    /// The number of blocks that have bytes of the range.
    pub(super) fn block_count(&self) -> u64 {
        (self.skip + self.len).div_ceil(BLOCK_SIZE).into()
    }

    /// The blocks that have bytes of the range.
    pub(super) fn blocks(&self) -> Range<u64> {
        self.lba..self.lba + self.block_count()
    }

    /// The place of the range in the content of its blocks.
    pub(super) const fn bytes(&self) -> Range<usize> {
        self.skip as usize..(self.skip + self.len) as usize
    }
}

/// The result of an operation that the drive has completed at once; `None` if it is in flight, or none
/// was begun.
pub(super) type ResultAtOnce<E> = Option<Result<Option<<E as TargetEnv>::Buf>, IoError>>;

impl PlainIo {
    /// Carries out a Write that has passed its checks and has blocks of the drive in part.
    #[cold]
    pub(super) fn write_in_part<E: TargetEnv>(
        &mut self,
        context: &mut Context<E>,
        (sqe, trim): (&Sqe, Trim),
        data: &[u8],
        checked: CheckedWrite,
        env: &mut E,
        outbox: &mut Outbox<E::Buf>,
    ) -> Result<(), Closed> {
        let CheckedWrite { ns_index, data_len, is_in_capsule } = checked;
        if !is_in_capsule {
            return context.insert_and_request_part(sqe, trim, ns_index, data_len, env, outbox);
        }
        let index = context.insert_command(sqe, Stage::Paired, ns_index)?;
        let command = &mut context.commands[index];
        (command.trim, command.data_len) = (trim, data_len);
        if context.keep_capsule_data(index, data, env) {
            self.modify_and_go_on(context, index, env, outbox);
        } else {
            context.complete_command(index, Status::INTERNAL, 0, outbox);
        }
        Ok(())
    }

    /// Changes the blocks of a command in part, and goes on with the command.
    pub(super) fn modify_and_go_on<E: TargetEnv>(
        &mut self,
        context: &mut Context<E>,
        index: u16,
        env: &mut E,
        outbox: &mut Outbox<E::Buf>,
    ) {
        let result = self.modify(context, index, env, outbox);
        self.go_on_after(context, index, result, env, outbox);
    }

    fn go_on_after<E: TargetEnv>(
        &mut self,
        context: &mut Context<E>,
        index: u16,
        result: ResultAtOnce<E>,
        env: &mut E,
        outbox: &mut Outbox<E::Buf>,
    ) {
        if let Some(result) = result {
            self.on_device_result(context, index, result, env, outbox);
        }
    }

    /// Changes the blocks of a command in part ([`Command::extent`](super::commands::Command)), as
    /// soon as the connection has no other exclusive lock. Returns the result of the write if all is
    /// done at once.
    pub(super) fn modify<E: TargetEnv>(
        &mut self,
        context: &mut Context<E>,
        index: u16,
        env: &mut E,
        outbox: &mut Outbox<E::Buf>,
    ) -> ResultAtOnce<E> {
        context.commands[index].stage = Stage::Paired;
        if !self.waiting_for_lock.is_empty() || context.has_exclusive_lock() {
            self.waiting_for_lock.push_back(index);
            return None;
        }
        // That of the piece before.
        context.release_locks(env);
        self.lock_and_modify(context, index, env, outbox)
    }

    fn lock_and_modify<E: TargetEnv>(
        &mut self,
        context: &mut Context<E>,
        index: u16,
        env: &mut E,
        outbox: &mut Outbox<E::Buf>,
    ) -> ResultAtOnce<E> {
        let blocks = context.commands[index].extent().blocks();
        match context.lock_exclusively(index, blocks, env) {
            true => self.read_to_modify(context, index, env, outbox),
            false => None,
        }
    }

    /// Begins a command that has waited until the connection has no exclusive lock.
    pub(super) fn start_modifying<E: TargetEnv>(
        &mut self,
        context: &mut Context<E>,
        index: u16,
        env: &mut E,
        outbox: &mut Outbox<E::Buf>,
    ) {
        let result = self.lock_and_modify(context, index, env, outbox);
        self.go_on_after(context, index, result, env, outbox);
    }

    /// Goes on with a command whose blocks are locked now.
    pub(super) fn on_locked_to_modify<E: TargetEnv>(
        &mut self,
        context: &mut Context<E>,
        index: u16,
        env: &mut E,
        outbox: &mut Outbox<E::Buf>,
    ) {
        let result = self.read_to_modify(context, index, env, outbox);
        self.go_on_after(context, index, result, env, outbox);
    }

    /// Reads the blocks, which are locked.
    fn read_to_modify<E: TargetEnv>(
        &mut self,
        context: &mut Context<E>,
        index: u16,
        env: &mut E,
        outbox: &mut Outbox<E::Buf>,
    ) -> ResultAtOnce<E> {
        let ns_index = usize::from(context.commands[index].ns_index);
        // Another host may have got a reservation while the command waited.
        if let Err(status) = context.guard(ns_index, env) {
            context.fail_write(index, status, outbox);
            return None;
        }
        let command = &mut context.commands[index];
        (command.stage, command.modifying) = (Stage::Device, Modifying::Reading);
        let extent = command.extent();
        let op = OpId::new(context.key, index);
        match env.device(ns_index).read(op.0, extent.lba, extent.block_count()) {
            Submitted::Done(Ok(content)) => {
                self.write_modified(context, index, content, env, outbox)
            }
            Submitted::Done(Err(error)) => Some(Err(error)),
            Submitted::Pending => None,
        }
    }

    /// Puts the data of the command into the content of its blocks, and writes them.
    fn write_modified<E: TargetEnv>(
        &mut self,
        context: &mut Context<E>,
        index: u16,
        content: Option<E::Buf>,
        env: &mut E,
        outbox: &mut Outbox<E::Buf>,
    ) -> ResultAtOnce<E> {
        let ns_index = usize::from(context.commands[index].ns_index);
        if let Err(status) = context.guard(ns_index, env) {
            context.fail_write(index, status, outbox);
            return None;
        }
        let command = &mut context.commands[index];
        let extent = command.extent();
        let data = command.buf.take();
        let is_zeroing = command.sqe.opcode() == opcode::WRITE_ZEROES;
        let content = content.and_then(|content| put_into(content, extent, data, is_zeroing));
        let Some(content) = content else {
            debug_assert!(false, "a change of blocks without their content or its data");
            context.fail_write(index, Status::INTERNAL, outbox);
            return None;
        };
        command.modifying = Modifying::Writing;
        let failures = self.note_plain_write(context, ns_index);
        note_failures_before(&mut context.commands[index], failures);
        let op = OpId::new(context.key, index);
        match env.device(ns_index).write(op.0, extent.lba, Data::Owned(content)) {
            Submitted::Done(result) => Some(result),
            Submitted::Pending => None,
        }
    }

    /// Takes in the content of blocks that a command changes in part.
    pub(super) fn on_read_to_modify<E: TargetEnv>(
        &mut self,
        context: &mut Context<E>,
        index: u16,
        content: Option<E::Buf>,
        env: &mut E,
        outbox: &mut Outbox<E::Buf>,
    ) {
        let result = self.write_modified(context, index, content, env, outbox);
        self.go_on_after(context, index, result, env, outbox);
    }

    /// Goes on with a Write Zeroes that has blocks of the drive in part: the part of the first block, the
    /// whole blocks, and the part of the last block, one after the other.
    pub(super) fn zero_in_part<E: TargetEnv>(
        &mut self,
        context: &mut Context<E>,
        index: u16,
        env: &mut E,
        outbox: &mut Outbox<E::Buf>,
    ) {
        let command = &mut context.commands[index];
        let left = command.trim.data_len(&command.sqe) - command.piece_offset;
        let skip = command.piece_skip();
        command.data_len = match skip == 0 && left >= BLOCK_SIZE {
            true => left - left % BLOCK_SIZE,
            false => left.min(BLOCK_SIZE - skip),
        };
        let (extent, ns_index) = (command.extent(), usize::from(command.ns_index));
        if !extent.is_whole() {
            return self.modify_and_go_on(context, index, env, outbox);
        }
        if let Err(status) = context.guard(ns_index, env) {
            return context.complete_command(index, status, 0, outbox);
        }
        let (lba, blocks) = (extent.lba, extent.block_count());
        if context.must_wait_for_blocks(index, lba, blocks, env) {
            return;
        }
        context.commands[index].stage = Stage::Device;
        let failures = self.note_plain_write(context, ns_index);
        note_failures_before(&mut context.commands[index], failures);
        let op = OpId::new(context.key, index);
        let deallocate = context.commands[index].sqe.deac();
        let submitted = submit_zeroing(env.device(ns_index), op, lba, blocks, deallocate);
        if let Submitted::Done(result) = submitted {
            self.on_device_result(context, index, result, env, outbox);
        }
    }
}

/// Puts data into the content of blocks; zeroes if there is no data and `is_zeroing`. `None` if
/// the content is too short, or there is no data.
pub(super) fn put_into<B: AsRef<[u8]> + AsMut<[u8]>>(
    mut content: B,
    extent: Extent,
    data: Option<B>,
    is_zeroing: bool,
) -> Option<B> {
    let part = content.as_mut().get_mut(extent.bytes())?;
    match data {
        Some(data) if data.as_ref().len() == part.len() => part.copy_from_slice(data.as_ref()),
        None if is_zeroing => part.fill(0),
        _ => return None,
    }
    Some(content)
}

impl<E: TargetEnv> Context<E> {
    /// Whether a command of this connection has an exclusive lock, or waits for one that was requested.
    pub(super) fn has_exclusive_lock(&self) -> bool {
        self.commands.any(|command| command.lock.is_some_and(|lock| lock.is_exclusive))
    }

    /// Requests an exclusive lock of blocks for a command. Returns whether it is held, and no other
    /// operation on the blocks is in flight. Otherwise the command goes on by
    /// [`PlainIo::on_blocks_locked`](super::plain::PlainIo).
    pub(super) fn lock_exclusively(&mut self, index: u16, blocks: Range<u64>, env: &mut E) -> bool {
        let (conn, ns_index) = (self.id, usize::from(self.commands[index].ns_index));
        let is_clear = !self.commands.any(|other| other.may_be_changing(ns_index, &blocks));
        let lock = update_shared(env, |shared| {
            shared.lock_blocks(conn, ns_index, blocks.clone(), is_clear)
        });
        let command = &mut self.commands[index];
        command.lock = Some(HeldLock { ticket: lock.ticket, is_used: false, is_exclusive: true });
        command.stage = Stage::Locked;
        lock.is_ready
    }

    /// Notes that a command has changed its blocks: others may have them.
    pub(super) fn end_modifying(&mut self, index: u16) {
        self.commands[index].modifying = Modifying::No;
        self.give_up_lock(index);
    }

    /// Goes on to the next part of a Write Zeroes. Returns false if there is none.
    pub(super) fn begin_next_zeroes(&mut self, index: u16) -> bool {
        if self.commands[index].lock.is_some() {
            self.give_up_lock(index);
        }
        let command = &mut self.commands[index];
        let next_offset = command.piece_offset + command.data_len;
        let has_next = command.trim.is_some() && next_offset < command.trim.data_len(&command.sqe);
        if has_next {
            command.piece_offset = next_offset;
        }
        has_next
    }

    /// Fails a command that was about to write.
    pub(super) fn fail_write(&mut self, index: u16, status: Status, outbox: &mut Outbox<E::Buf>) {
        match self.commands[index].copy {
            Some(_) => self.fail_copy(index, status, outbox),
            None => self.complete_command(index, status, 0, outbox),
        }
    }
}

//! Copy: copies source ranges of a namespace one behind the other to other blocks of it (NVM
//! §3.2.2).
//!
//! ```text
//! list of ranges → check all → budget → read a piece → write it → next piece → (FLUSH, with FUA)
//! ```
//!
//! A Copy holds one piece of data at a time, within the budget of the connection. The list of ranges
//! takes less than the in-capsule data for which the queue has memory in any case, and is not charged.
//!
//! A Copy is not atomic. Each piece is read and written by itself, and passes the guard by itself. If
//! a piece fails, the completion has the number of the first range that was not copied whole.

use alloc::boxed::Box;
use alloc::vec::Vec;

use riopipe_nvme::command::{Sqe, Status};
use riopipe_nvme::copy::SourceRange;
use riopipe_order::block_device::{BlockDevice, Data, IoError, Submitted};

use super::closed::Closed;
use super::commands::Stage;
use super::context::{Context, is_in_capsule};
use super::env::TargetEnv;
use super::ids::OpId;
use super::limits::{
    BLOCK_SIZE, CONNECTION_BYTES, COPY_BLOCKS_MAX, COPY_RANGE_BLOCKS_MAX, COPY_RANGES_MAX,
};
use super::plain::{PlainIo, must_flush, note_failures_before};
use crate::outbox::Outbox;
use crate::wire;

/// The most blocks of one piece.
const PIECE_BLOCKS: u32 = CONNECTION_BYTES as u32 / BLOCK_SIZE;

/// How far a Copy has come.
#[derive(Debug)]
pub(super) struct CopyProgress {
    ranges: Vec<SourceRange>,
    /// The number of the range of the current piece.
    range: usize,
    /// How many blocks of that range are before the current piece.
    offset: u32,
    /// The first block of the destination of the current piece.
    destination: u64,
    /// The operation in flight reads the current piece. Otherwise it writes the piece.
    is_reading: bool,
}

impl CopyProgress {
    /// Whether the operation in flight is a read.
    pub(super) const fn is_reading(&self) -> bool {
        self.is_reading
    }

    /// The source of the current piece; `None` if all is copied.
    fn piece(&self) -> Option<SourceRange> {
        let range = self.ranges.get(self.range)?;
        let lba = range.lba + u64::from(self.offset);
        Some(SourceRange { lba, blocks: (range.blocks - self.offset).min(PIECE_BLOCKS) })
    }

    /// Goes on to the next piece.
    fn advance(&mut self) {
        let Some(piece) = self.piece() else { return };
        self.destination += u64::from(piece.blocks);
        self.offset += piece.blocks;
        if self.offset == self.ranges[self.range].blocks {
            (self.range, self.offset) = (self.range + 1, 0);
        }
    }
}

impl PlainIo {
    /// Carries out a Copy, once its list of source ranges is there.
    pub(super) fn copy<E: TargetEnv>(
        &mut self,
        context: &mut Context<E>,
        sqe: &Sqe,
        data: &[u8],
        env: &mut E,
        outbox: &mut Outbox<E::Buf>,
    ) -> Result<(), Closed> {
        let list_len = sqe.copy_ranges() * SourceRange::LEN as u32;
        let checked = check_command(sqe).and_then(|()| {
            let (ns_index, _) = context.namespace(sqe)?;
            context.guard(ns_index, env)?;
            Ok((ns_index, is_in_capsule(sqe, list_len, data)?))
        });
        match checked {
            Err(status) => {
                context.send_completion(sqe.cid(), status, 0, outbox);
                Ok(())
            }
            Ok((ns_index, false)) => {
                context.insert_and_request_data(sqe, ns_index, list_len, env, outbox)
            }
            Ok((ns_index, true)) => {
                let index = context.insert_command(sqe, Stage::Budget, ns_index)?;
                self.begin_copy(context, index, data, env, outbox);
                Ok(())
            }
        }
    }

    /// Begins a Copy whose list of ranges has arrived by R2T.
    pub(super) fn on_copy_list<E: TargetEnv>(
        &mut self,
        context: &mut Context<E>,
        index: u16,
        env: &mut E,
        outbox: &mut Outbox<E::Buf>,
    ) {
        let command = &mut context.commands[index];
        command.stage = Stage::Budget;
        context.held_bytes -= core::mem::take(&mut command.charged_bytes);
        match command.buf.take() {
            Some(list) => self.begin_copy(context, index, list.as_ref(), env, outbox),
            None => context.complete_command(index, Status::INTERNAL, 0, outbox),
        }
    }

    /// Checks all ranges before the first one is copied, and begins when the connection may hold a
    /// piece.
    fn begin_copy<E: TargetEnv>(
        &mut self,
        context: &mut Context<E>,
        index: u16,
        list: &[u8],
        env: &mut E,
        outbox: &mut Outbox<E::Buf>,
    ) {
        let command = &context.commands[index];
        let (sqe, ns_index) = (command.sqe, usize::from(command.ns_index));
        let blocks = context.namespaces.at(ns_index).config.blocks;
        let ranges = match check_ranges(&sqe, list, blocks) {
            Ok(ranges) => ranges,
            Err(status) => return context.complete_command(index, status, 0, outbox),
        };
        let largest = ranges.iter().map(|range| range.blocks).max().unwrap_or(1);
        let piece_bytes = largest.min(PIECE_BLOCKS) * BLOCK_SIZE;
        let progress =
            CopyProgress { ranges, range: 0, offset: 0, destination: sqe.slba(), is_reading: true };
        context.commands[index].copy = Some(Box::new(progress));
        if context.charge_or_enqueue(index, piece_bytes, outbox) {
            self.copy_next(context, index, env, outbox);
        }
    }

    /// Goes on with the next piece, or ends the command.
    pub(super) fn copy_next<E: TargetEnv>(
        &mut self,
        context: &mut Context<E>,
        index: u16,
        env: &mut E,
        outbox: &mut Outbox<E::Buf>,
    ) {
        let result = self.read_to_copy(context, index, env, outbox);
        self.continue_copy(context, index, result, env, outbox);
    }

    /// Goes on with the piece that was read.
    pub(super) fn write_copied<E: TargetEnv>(
        &mut self,
        context: &mut Context<E>,
        index: u16,
        env: &mut E,
        outbox: &mut Outbox<E::Buf>,
    ) {
        let result = self.write_piece(context, index, env, outbox);
        self.continue_copy(context, index, result, env, outbox);
    }

    /// Takes in the result of an operation that has succeeded: goes on with the write of what was
    /// read, or with the next piece. It does so as long as the drive completes operations at once.
    pub(super) fn on_copied<E: TargetEnv>(
        &mut self,
        context: &mut Context<E>,
        index: u16,
        content: Option<E::Buf>,
        env: &mut E,
        outbox: &mut Outbox<E::Buf>,
    ) {
        self.continue_copy(context, index, Some(Ok(content)), env, outbox);
    }

    fn continue_copy<E: TargetEnv>(
        &mut self,
        context: &mut Context<E>,
        index: u16,
        mut result: CopyResult<E>,
        env: &mut E,
        outbox: &mut Outbox<E::Buf>,
    ) {
        while let Some(done) = result {
            result = match done {
                Err(error) => {
                    return self.on_device_result(context, index, Err(error), env, outbox);
                }
                Ok(Some(content)) => {
                    context.commands[index].buf = Some(content);
                    self.write_piece(context, index, env, outbox)
                }
                Ok(None) => {
                    if context.commands[index].lock.is_some() {
                        context.give_up_lock(index);
                    }
                    if let Some(progress) = &mut context.commands[index].copy {
                        progress.advance();
                    }
                    self.read_to_copy(context, index, env, outbox)
                }
            };
        }
    }

    /// Reads the next piece. Ends the command if there is none.
    fn read_to_copy<E: TargetEnv>(
        &mut self,
        context: &mut Context<E>,
        index: u16,
        env: &mut E,
        outbox: &mut Outbox<E::Buf>,
    ) -> CopyResult<E> {
        let command = &mut context.commands[index];
        let (sqe, ns_index) = (command.sqe, usize::from(command.ns_index));
        let Some(piece) = command.copy.as_ref().and_then(|progress| progress.piece()) else {
            if must_flush(context, &sqe, ns_index) {
                self.start_flush(context, index, env, outbox);
            } else {
                context.complete_command(index, Status::SUCCESS, 0, outbox);
            }
            return None;
        };
        if let Some(refusal) = context.refuses_new_read(ns_index) {
            context.fail_copy(index, refusal, outbox);
            return None;
        }
        let command = &mut context.commands[index];
        command.stage = Stage::Device;
        command.begun_range_count = 1;
        command.copy.iter_mut().for_each(|progress| progress.is_reading = true);
        let op = OpId::new(context.key, index);
        result_at_once(env.device(ns_index).read(op.0, piece.lba, piece.blocks.into()))
    }

    /// Writes the piece that was read.
    fn write_piece<E: TargetEnv>(
        &mut self,
        context: &mut Context<E>,
        index: u16,
        env: &mut E,
        outbox: &mut Outbox<E::Buf>,
    ) -> CopyResult<E> {
        let command = &context.commands[index];
        let ns_index = usize::from(command.ns_index);
        // The host may have been fenced, or another host may have claimed the volume, while the
        // piece was read (traps T8, T21).
        let refusal = context.refuses_read(ns_index).map_or(Ok(()), Err);
        if let Err(status) = refusal.and_then(|()| context.guard(ns_index, env)) {
            context.fail_copy(index, status, outbox);
            return None;
        }
        let command = &context.commands[index];
        let (Some(progress), Some(_)) = (&command.copy, &command.buf) else {
            debug_assert!(false, "a Copy without a piece");
            context.complete_command(index, Status::INTERNAL, 0, outbox);
            return None;
        };
        let lba = progress.destination;
        let blocks = (command.buf_len() / BLOCK_SIZE as usize) as u64;
        if context.must_wait_for_blocks(index, lba, blocks, env) {
            return None;
        }
        let failures = self.note_plain_write(context, ns_index);
        let command = &mut context.commands[index];
        note_failures_before(command, failures);
        command.stage = Stage::Device;
        command.copy.iter_mut().for_each(|progress| progress.is_reading = false);
        let buf = command.buf.take()?;
        let op = OpId::new(context.key, index);
        result_at_once(env.device(ns_index).write(op.0, lba, Data::Owned(buf)))
    }
}

/// The result of an operation that the drive has completed at once; `None` if it is in flight, or none
/// was begun.
type CopyResult<E> = Option<Result<Option<<E as TargetEnv>::Buf>, IoError>>;

fn result_at_once<B>(submitted: Submitted<B>) -> Option<Result<Option<B>, IoError>> {
    match submitted {
        Submitted::Done(result) => Some(result),
        Submitted::Pending => None,
    }
}

impl<E: TargetEnv> Context<E> {
    /// Fails a Copy. The result is the number of the first range that was not copied whole.
    pub(super) fn fail_copy(&mut self, index: u16, status: Status, outbox: &mut Outbox<E::Buf>) {
        let range = self.commands[index].copy.as_ref().map_or(0, |progress| progress.range);
        self.complete_command(index, status, range as u64, outbox);
    }
}

/// Checks the fields of a Copy.
fn check_command(sqe: &Sqe) -> Result<(), Status> {
    if sqe.copy_format() != 0 || wire::directive_type(sqe) != 0 {
        return Err(Status::INVALID_FIELD.with_dnr());
    }
    match sqe.copy_ranges() <= COPY_RANGES_MAX {
        true => Ok(()),
        false => Err(Status::COMMAND_SIZE_LIMIT.with_dnr()),
    }
}

/// Reads the list of source ranges, and checks the blocks of the sources and of the destination.
fn check_ranges(sqe: &Sqe, list: &[u8], blocks: u64) -> Result<Vec<SourceRange>, Status> {
    let (chunks, _) = list.as_chunks();
    let ranges: Vec<SourceRange> = chunks.iter().map(SourceRange::decode).collect();
    let total: u64 = ranges.iter().map(|range| u64::from(range.blocks)).sum();
    let is_too_long = |range: &SourceRange| range.blocks > COPY_RANGE_BLOCKS_MAX;
    if ranges.iter().any(is_too_long) || total > COPY_BLOCKS_MAX.into() {
        return Err(Status::COMMAND_SIZE_LIMIT.with_dnr());
    }
    let end_of = |lba: u64, count: u64| lba.checked_add(count).filter(|end| *end <= blocks);
    let Some(end) = end_of(sqe.slba(), total) else {
        return Err(Status::LBA_OUT_OF_RANGE.with_dnr());
    };
    for range in &ranges {
        let Some(range_end) = end_of(range.lba, range.blocks.into()) else {
            return Err(Status::LBA_OUT_OF_RANGE.with_dnr());
        };
        // Its pieces would be read after others had been written over them.
        if range.lba < end && sqe.slba() < range_end {
            return Err(Status::OVERLAPPING_RANGE.with_dnr());
        }
    }
    Ok(ranges)
}

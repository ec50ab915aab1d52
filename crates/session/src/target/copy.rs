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
use super::lba::LbaSize;
use super::limits::{
    BLOCK_SIZE, CONNECTION_BYTES, COPY_BLOCKS_MAX, COPY_RANGE_BLOCKS_MAX, COPY_RANGES_MAX,
};
use super::modify::{Extent, ResultAtOnce};
use super::plain::{PlainIo, must_flush, note_failures_before};
use crate::outbox::Outbox;
use crate::wire;

/// How far a Copy has come.
#[derive(Debug)]
pub(super) struct CopyProgress {
    ranges: Vec<SourceRange>,
    /// The size of the blocks in which ranges and destination are counted.
    lba_size: LbaSize,
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
    /// Whether the operation in flight reads the current piece.
    pub(super) const fn is_reading(&self) -> bool {
        self.is_reading
    }

    /// The most blocks of one piece.
    const fn piece_blocks_max(lba_size: LbaSize) -> u32 {
        match lba_size {
            LbaSize::Bytes4096 => CONNECTION_BYTES as u32 / BLOCK_SIZE,
            // The piece, and the blocks of the drive that it touches, are in memory together.
            LbaSize::Bytes512 => (CONNECTION_BYTES as u32 / 2 - BLOCK_SIZE) / lba_size.bytes(),
        }
    }

    /// The source of the current piece; `None` if all is copied.
    fn piece(&self) -> Option<SourceRange> {
        let range = self.ranges.get(self.range)?;
        let lba = range.lba + u64::from(self.offset);
        let blocks = (range.blocks - self.offset).min(Self::piece_blocks_max(self.lba_size));
        Some(SourceRange { lba, blocks })
    }

    /// The bytes of the drive that are the source of the current piece; `None` if all is copied.
    fn source(&self) -> Option<Extent> {
        self.piece().map(|piece| Extent::of(piece.lba, piece.blocks, self.lba_size))
    }

    /// The bytes of the drive that are the destination of the current piece.
    pub(super) fn destination(&self) -> Extent {
        let blocks = self.piece().map_or(0, |piece| piece.blocks);
        Extent::of(self.destination, blocks, self.lba_size)
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
        let config = &context.namespaces.at(ns_index).config;
        let (lba_size, blocks) = (config.lba_size, config.blocks);
        let ranges = match check_ranges(&sqe, list, blocks, lba_size) {
            Ok(ranges) => ranges,
            Err(status) => return context.complete_command(index, status, 0, outbox),
        };
        let largest = ranges.iter().map(|range| range.blocks).max().unwrap_or(1);
        let piece_bytes = largest.min(CopyProgress::piece_blocks_max(lba_size)) * lba_size.bytes();
        let piece_bytes = match lba_size.is_small() {
            true => 2 * (piece_bytes + BLOCK_SIZE),
            false => piece_bytes,
        };
        let progress = CopyProgress {
            ranges,
            lba_size,
            range: 0,
            offset: 0,
            destination: sqe.slba(),
            is_reading: true,
        };
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
        mut result: ResultAtOnce<E>,
        env: &mut E,
        outbox: &mut Outbox<E::Buf>,
    ) {
        while let Some(done) = result {
            result = match done {
                Err(error) => {
                    return self.on_device_result(context, index, Err(error), env, outbox);
                }
                Ok(Some(content)) => {
                    let Some(data) = context.copied_data(index, content, env) else {
                        return context.fail_copy(index, Status::INTERNAL, outbox);
                    };
                    context.commands[index].buf = Some(data);
                    self.write_piece(context, index, env, outbox)
                }
                Ok(None) => {
                    context.end_modifying(index);
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
    ) -> ResultAtOnce<E> {
        let command = &mut context.commands[index];
        let (sqe, ns_index) = (command.sqe, usize::from(command.ns_index));
        let Some(source) = command.copy.as_ref().and_then(|progress| progress.source()) else {
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
        result_at_once(env.device(ns_index).read(op.0, source.lba, source.block_count()))
    }

    /// Writes the piece that was read.
    fn write_piece<E: TargetEnv>(
        &mut self,
        context: &mut Context<E>,
        index: u16,
        env: &mut E,
        outbox: &mut Outbox<E::Buf>,
    ) -> ResultAtOnce<E> {
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
        let destination = progress.destination();
        if !destination.is_whole() {
            let command = &mut context.commands[index];
            command.copy.iter_mut().for_each(|progress| progress.is_reading = false);
            return self.modify(context, index, env, outbox);
        }
        let (lba, blocks) = (destination.lba, destination.block_count());
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

fn result_at_once<B>(submitted: Submitted<B>) -> Option<Result<Option<B>, IoError>> {
    match submitted {
        Submitted::Done(result) => Some(result),
        Submitted::Pending => None,
    }
}

impl<E: TargetEnv> Context<E> {
    /// The data of the current piece, from the content of the blocks that it touches. `None` if there
    /// is no memory.
    fn copied_data(&self, index: u16, content: E::Buf, env: &mut E) -> Option<E::Buf> {
        let source = self.commands[index].copy.as_ref()?.source()?;
        if source.is_whole() {
            return Some(content);
        }
        let mut data = env.alloc(source.len as usize)?;
        data.as_mut().copy_from_slice(content.as_ref().get(source.bytes())?);
        Some(data)
    }

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

/// Reads the list of source ranges, and checks the blocks of the sources and of the destination. The
/// drive has `drive_blocks` blocks.
fn check_ranges(
    sqe: &Sqe,
    list: &[u8],
    drive_blocks: u64,
    lba_size: LbaSize,
) -> Result<Vec<SourceRange>, Status> {
    let per_block = lba_size.per_drive_block();
    let blocks = drive_blocks * u64::from(per_block);
    let (chunks, _) = list.as_chunks();
    let ranges: Vec<SourceRange> = chunks.iter().map(SourceRange::decode).collect();
    let total: u64 = ranges.iter().map(|range| u64::from(range.blocks)).sum();
    let is_too_long = |range: &SourceRange| range.blocks > COPY_RANGE_BLOCKS_MAX * per_block;
    if ranges.iter().any(is_too_long) || total > u64::from(COPY_BLOCKS_MAX * per_block) {
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

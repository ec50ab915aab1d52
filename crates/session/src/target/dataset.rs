//! Dataset Management: deallocates ranges of blocks, one after the other.
//!
//! The data of the command is a list of ranges. All ranges are checked before the first operation.
//! When the operation of a range has come back, [`PlainIo::deallocate_next`] submits the next one.
//!
//! A range of more than [`DSM_RANGE_BLOCKS`] is deallocated in pieces. So one command neither keeps
//! its drive busy for long, nor a claim waiting that needs the drive. The limits are announced (DMRL,
//! DMRSL, DMSL). A host that does not know them is served all the same.

use riopipe_nvme::command::{DsmRange, Sgl, Sqe, Status};
use riopipe_order::block_device::{BlockDevice, Submitted};

use super::closed::Closed;
use super::commands::Stage;
use super::context::{Context, is_in_capsule};
use super::env::{TargetEnv, status_of};
use super::ids::OpId;
use super::lba::whole_blocks;
use super::limits::DSM_RANGE_BLOCKS;
use super::plain::{PlainIo, note_failures_before};
use crate::outbox::Outbox;

/// The most bytes of a list of ranges: NVMe allows 256 ranges.
const RANGE_LIST_BYTES_MAX: u32 = 256 * DsmRange::LEN as u32;

impl PlainIo {
    /// Carries out a Dataset Management command: at once if its data is in the capsule, otherwise
    /// after the data has arrived by R2T.
    pub(super) fn dataset<E: TargetEnv>(
        &mut self,
        context: &mut Context<E>,
        sqe: &Sqe,
        data: &[u8],
        env: &mut E,
        outbox: &mut Outbox<E::Buf>,
    ) -> Result<(), Closed> {
        // The list may be longer than its ranges. Linux always sends the 4 KiB of the longest list.
        let min_len = sqe.dsm_ranges() * DsmRange::LEN as u32;
        let data_len = match sqe.sgl() {
            Ok(Sgl::InCapsule { len, .. } | Sgl::Transport { len })
                if (min_len..=RANGE_LIST_BYTES_MAX).contains(&len) =>
            {
                len
            }
            _ => min_len,
        };
        let checked = context.namespace(sqe).and_then(|(ns_index, _)| {
            is_in_capsule(sqe, data_len, data).map(|in_capsule| (ns_index, in_capsule))
        });
        match checked {
            Err(status) => {
                context.send_completion(sqe.cid(), status, 0, outbox);
                Ok(())
            }
            Ok((ns_index, false)) => {
                context.insert_and_request_data(sqe, ns_index, data_len, env, outbox)
            }
            Ok((ns_index, true)) => {
                let index = context.insert_command(sqe, Stage::Device, ns_index)?;
                let Some(mut buf) = env.alloc(data_len as usize) else {
                    context.complete_command(index, Status::INTERNAL, 0, outbox);
                    return Ok(());
                };
                buf.as_mut().copy_from_slice(data);
                context.commands[index].buf = Some(buf);
                self.begin_dataset(context, index, env, outbox);
                Ok(())
            }
        }
    }

    /// Begins a command whose list of ranges has arrived. Checks all ranges before the first one is
    /// deallocated.
    pub(super) fn begin_dataset<E: TargetEnv>(
        &mut self,
        context: &mut Context<E>,
        index: u16,
        env: &mut E,
        outbox: &mut Outbox<E::Buf>,
    ) {
        let command = &context.commands[index];
        let ns_index = usize::from(command.ns_index);
        // The other attributes of the command are hints about use, which the target ignores. With
        // regard to reservations, every such command is a write (Base §8.19).
        if !command.sqe.dsm_deallocates() {
            let status = context.check_reservation(ns_index).err().unwrap_or(Status::SUCCESS);
            return context.complete_command(index, status, 0, outbox);
        }
        let config = &context.namespaces.at(ns_index).config;
        let blocks = config.blocks * u64::from(config.lba_size.per_drive_block());
        let is_inside = |range: DsmRange| {
            range.lba.checked_add(range.blocks.into()).is_some_and(|end| end <= blocks)
        };
        let all_inside = (0..command.sqe.dsm_ranges())
            .all(|number| nth_range(command.buf.as_ref(), number as usize).is_some_and(is_inside));
        if !all_inside {
            return context.complete_command(index, Status::LBA_OUT_OF_RANGE.with_dnr(), 0, outbox);
        }
        if let Err(status) = context.guard(ns_index, env) {
            return context.complete_command(index, status, 0, outbox);
        }
        self.deallocate_next(context, index, env, outbox);
    }

    /// Submits the deallocation of the next range. Completes the command if no range is left, or
    /// the next range must not be written.
    pub(super) fn deallocate_next<E: TargetEnv>(
        &mut self,
        context: &mut Context<E>,
        index: u16,
        env: &mut E,
        outbox: &mut Outbox<E::Buf>,
    ) {
        loop {
            let command = &mut context.commands[index];
            let number = command.begun_range_count;
            if u32::from(number) >= command.sqe.dsm_ranges() {
                return context.complete_command(index, Status::SUCCESS, 0, outbox);
            }
            let offset = command.range_offset;
            command.stage = Stage::Device;
            let (ns_index, op) = (usize::from(command.ns_index), OpId::new(context.key, index));
            let Some(range) = nth_range(command.buf.as_ref(), usize::from(number)) else {
                return context.complete_command(index, Status::INTERNAL, 0, outbox);
            };
            let lba_size = context.namespaces.at(ns_index).config.lba_size;
            let (first, whole) = whole_blocks(range.lba, range.blocks, lba_size);
            let blocks = (whole - offset).min(DSM_RANGE_BLOCKS);
            let lba = first + u64::from(offset);
            if blocks > 0 {
                // Another host may have claimed the volume since the previous range (trap T21).
                if let Err(status) = context.guard(ns_index, env) {
                    return context.complete_command(index, status, 0, outbox);
                }
                if context.must_wait_for_blocks(index, lba, blocks.into(), env) {
                    return;
                }
            }
            let command = &mut context.commands[index];
            command.range_offset = offset + blocks;
            if command.range_offset == whole {
                (command.begun_range_count, command.range_offset) = (number + 1, 0);
            }
            if blocks == 0 {
                continue;
            }
            let failures = self.note_plain_write(context, ns_index);
            note_failures_before(&mut context.commands[index], failures);
            match env.device(ns_index).deallocate(op.0, lba, blocks.into()) {
                Submitted::Pending => return,
                Submitted::Done(Ok(_)) => {}
                Submitted::Done(Err(error)) => {
                    return context.complete_command(index, status_of(&error, false), 0, outbox);
                }
            }
        }
    }
}

/// The range with this number in the list `buf`, counted from 0.
fn nth_range<B: AsRef<[u8]>>(buf: Option<&B>, number: usize) -> Option<DsmRange> {
    let bytes = buf?.as_ref().get(number * DsmRange::LEN..(number + 1) * DsmRange::LEN)?;
    bytes.first_chunk().map(DsmRange::decode)
}

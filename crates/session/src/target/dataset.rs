//! Dataset Management: ranges of blocks to deallocate, one after the other.

use riopipe_nvme::command::{DsmRange, Sgl, Sqe, Status};
use riopipe_order::block_device::{BlockDevice, Submitted};

use super::closed::Closed;
use super::commands::Stage;
use super::context::{Context, is_in_capsule};
use super::env::{TargetEnv, status_of};
use super::ids::OpId;
use super::plain::PlainIo;
use crate::outbox::Outbox;

/// A page of ranges of Dataset Management at its longest, bytes.
const DSM_PAGE: u32 = 256 * DsmRange::LEN as u32;

impl PlainIo {
    /// Dataset Management, with its in-capsule data.
    pub(super) fn dataset<E: TargetEnv>(
        &mut self,
        context: &mut Context<E>,
        sqe: &Sqe,
        data: &[u8],
        env: &mut E,
        outbox: &mut Outbox<E::Buf>,
    ) -> Result<(), Closed> {
        // The page may be longer than the ranges in it: Linux always sends all of its 4 KiB.
        let ranges = sqe.dsm_ranges() * DsmRange::LEN as u32;
        let data_len = match sqe.sgl() {
            Ok(Sgl::InCapsule { len, .. } | Sgl::Transport { len })
                if (ranges..=DSM_PAGE).contains(&len) =>
            {
                len
            }
            _ => ranges,
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

    /// Begins a command whose ranges are at hand. Checks all ranges before it deallocates the first.
    pub(super) fn begin_dataset<E: TargetEnv>(
        &mut self,
        context: &mut Context<E>,
        index: u16,
        env: &mut E,
        outbox: &mut Outbox<E::Buf>,
    ) {
        let command = &context.commands[index];
        // Other attributes are hints about use.
        if !command.sqe.dsm_deallocates() {
            return context.complete_command(index, Status::SUCCESS, 0, outbox);
        }
        let ns_index = usize::from(command.ns_index);
        let blocks = context.namespaces.at(ns_index).config.blocks;
        let inside = (0..command.sqe.dsm_ranges()).all(|i| {
            range(command.buf.as_ref(), i as usize)
                .is_some_and(|r| r.lba.checked_add(r.blocks.into()).is_some_and(|e| e <= blocks))
        });
        if !inside {
            return context.complete_command(index, Status::LBA_OUT_OF_RANGE.with_dnr(), 0, outbox);
        }
        if let Err(status) = context.guard(ns_index, env) {
            return context.complete_command(index, status, 0, outbox);
        }
        context.commands[index].begun_range_count = 0;
        self.deallocate_next(context, index, env, outbox);
    }

    /// Deallocates the next range. After the last one, answers the command.
    pub(super) fn deallocate_next<E: TargetEnv>(
        &mut self,
        context: &mut Context<E>,
        index: u16,
        env: &mut E,
        outbox: &mut Outbox<E::Buf>,
    ) {
        loop {
            let command = &mut context.commands[index];
            let next = command.begun_range_count;
            if u32::from(next) >= command.sqe.dsm_ranges() {
                return context.complete_command(index, Status::SUCCESS, 0, outbox);
            }
            command.begun_range_count += 1;
            command.stage = Stage::Device;
            let (ns_index, op) = (usize::from(command.ns_index), OpId::new(context.key, index));
            let Some(range) = range(command.buf.as_ref(), usize::from(next)) else {
                return context.complete_command(index, Status::INTERNAL, 0, outbox);
            };
            if range.blocks == 0 {
                continue;
            }
            // Another host may have claimed the volume since the last range (T21).
            if let Err(status) = context.guard(ns_index, env) {
                return context.complete_command(index, status, 0, outbox);
            }
            self.note_plain_write(context, ns_index);
            match env.device(ns_index).deallocate(op.0, range.lba, range.blocks.into()) {
                Submitted::Pending => return,
                Submitted::Done(Ok(_)) => {}
                Submitted::Done(Err(error)) => {
                    return context.complete_command(index, status_of(&error, false), 0, outbox);
                }
            }
        }
    }
}

fn range<B: AsRef<[u8]>>(buf: Option<&B>, i: usize) -> Option<DsmRange> {
    let bytes = buf?.as_ref().get(i * DsmRange::LEN..(i + 1) * DsmRange::LEN)?;
    bytes.first_chunk().map(DsmRange::decode)
}

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
        cx: &mut Context<E>,
        sqe: &Sqe,
        data: &[u8],
        env: &mut E,
        out: &mut Outbox<E::Buf>,
    ) -> Result<(), Closed> {
        // The page may be longer than the ranges in it: Linux always sends all of its 4 KiB.
        let ranges = sqe.dsm_ranges() * DsmRange::LEN as u32;
        let want = match sqe.sgl() {
            Ok(Sgl::InCapsule { len, .. } | Sgl::Transport { len })
                if (ranges..=DSM_PAGE).contains(&len) =>
            {
                len
            }
            _ => ranges,
        };
        let checked = cx
            .namespace(sqe)
            .and_then(|(ns, _)| is_in_capsule(sqe, want, data).map(|inline| (ns, inline)));
        match checked {
            Err(status) => {
                cx.respond(sqe.cid(), status, 0, out);
                Ok(())
            }
            Ok((ns, false)) => cx.ask_for_data(sqe, ns, want, env, out),
            Ok((ns, true)) => {
                let index = cx.take(sqe, Stage::Device, ns)?;
                let Some(mut buf) = env.alloc(want as usize) else {
                    cx.answer(index, Status::INTERNAL, 0, out);
                    return Ok(());
                };
                buf.as_mut().copy_from_slice(data);
                cx.commands[index].buf = Some(buf);
                self.begin_dataset(cx, index, env, out);
                Ok(())
            }
        }
    }

    /// Begins a command whose ranges are at hand. Checks all ranges before it deallocates the first.
    pub(super) fn begin_dataset<E: TargetEnv>(
        &mut self,
        cx: &mut Context<E>,
        index: u16,
        env: &mut E,
        out: &mut Outbox<E::Buf>,
    ) {
        let command = &cx.commands[index];
        // Other attributes are hints about use.
        if !command.sqe.dsm_deallocates() {
            return cx.answer(index, Status::SUCCESS, 0, out);
        }
        let ns = usize::from(command.ns);
        let blocks = cx.namespaces.at(ns).config.blocks;
        let inside = (0..command.sqe.dsm_ranges()).all(|i| {
            range(command.buf.as_ref(), i as usize)
                .is_some_and(|r| r.lba.checked_add(r.blocks.into()).is_some_and(|e| e <= blocks))
        });
        if !inside {
            return cx.answer(index, Status::LBA_OUT_OF_RANGE.with_dnr(), 0, out);
        }
        if let Err(status) = cx.guard(ns, env) {
            return cx.answer(index, status, 0, out);
        }
        cx.commands[index].ranges_begun = 0;
        self.deallocate_next(cx, index, env, out);
    }

    /// Deallocates the next range. After the last one, answers the command.
    pub(super) fn deallocate_next<E: TargetEnv>(
        &mut self,
        cx: &mut Context<E>,
        index: u16,
        env: &mut E,
        out: &mut Outbox<E::Buf>,
    ) {
        loop {
            let command = &mut cx.commands[index];
            let next = command.ranges_begun;
            if u32::from(next) >= command.sqe.dsm_ranges() {
                return cx.answer(index, Status::SUCCESS, 0, out);
            }
            command.ranges_begun += 1;
            command.stage = Stage::Device;
            let (ns, op) = (usize::from(command.ns), OpId::new(cx.key, index));
            let Some(range) = range(command.buf.as_ref(), usize::from(next)) else {
                return cx.answer(index, Status::INTERNAL, 0, out);
            };
            if range.blocks == 0 {
                continue;
            }
            // Another host may have claimed the volume since the last range (T21).
            if let Err(status) = cx.guard(ns, env) {
                return cx.answer(index, status, 0, out);
            }
            self.note_write(cx, ns);
            match env.device(ns).deallocate(op.0, range.lba, range.blocks.into()) {
                Submitted::Pending => return,
                Submitted::Done(Ok(_)) => {}
                Submitted::Done(Err(error)) => {
                    return cx.answer(index, status_of(&error, false), 0, out);
                }
            }
        }
    }
}

fn range<B: AsRef<[u8]>>(buf: Option<&B>, i: usize) -> Option<DsmRange> {
    let bytes = buf?.as_ref().get(i * DsmRange::LEN..(i + 1) * DsmRange::LEN)?;
    bytes.first_chunk().map(DsmRange::decode)
}

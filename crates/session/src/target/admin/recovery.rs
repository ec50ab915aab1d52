//! The commands of a recovery, on the admin queue: list and settle (T4, T9).

use riopipe_nvme::command::{Sqe, Status};
use riopipe_order::entry::PartitionId;

use super::Admin;
use crate::outbox::Outbox;
use crate::target::context::{Context, shared};
use crate::target::env::TargetEnv;
use crate::target::volumes::{Refusal, check_len};
use crate::wire;
use crate::wire::list::Settle;

impl Admin {
    /// List: a page of a partition.
    pub(super) fn list<E: TargetEnv>(
        cx: &mut Context<E>,
        sqe: &Sqe,
        env: &mut E,
        out: &mut Outbox<E::Buf>,
    ) {
        let (stream, from, len) = wire::list_of(sqe);
        let id = PartitionId { volume: wire::volume_of(sqe), stream };
        let assoc = cx.assoc();
        let page = match check_len(len) {
            Err(status) => Err(Refusal { status, result: 0 }),
            Ok(()) if sqe.dword(11) > u32::from(u16::MAX) => {
                Err(Refusal::do_not_retry(wire::status::NO_SUCH_STREAM))
            }
            Ok(()) => shared(env, |s| s.list(id, assoc, from, len)),
        };
        match page {
            Ok(page) => cx.send_page(sqe, &page.encode(len), out),
            Err(Refusal { status, result }) => cx.respond(sqe.cid(), status, result, out),
        }
    }

    /// Settle, with its data at hand.
    pub(super) fn settle_streams<E: TargetEnv>(
        cx: &mut Context<E>,
        index: u16,
        data: &[u8],
        env: &mut E,
        out: &mut Outbox<E::Buf>,
    ) {
        let Some(settle) = Settle::decode(data) else {
            return cx.answer(index, Status::INVALID_FIELD.with_dnr(), 0, out);
        };
        let assoc = cx.assoc();
        let settled = shared(env, |s| s.settle(&settle, assoc));
        match settled {
            Ok(()) => cx.answer(index, Status::SUCCESS, 0, out),
            Err(Refusal { status, result }) => {
                cx.trouble_with("settle refused", status, env);
                cx.answer(index, status, result, out);
            }
        }
    }
}

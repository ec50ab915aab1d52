//! The commands of a recovery, on the admin queue: list reads the entries of a stream's log, settle
//! records the recovered seqs (traps T4, T9).

use riopipe_nvme::command::{Sqe, Status};
use riopipe_order::entry::PartitionId;

use super::Admin;
use crate::outbox::Outbox;
use crate::target::context::{Context, update_shared};
use crate::target::env::TargetEnv;
use crate::target::volumes::{Refusal, check_page_len};
use crate::wire::list::Settle;
use crate::wire::{self, ListRequest};

impl Admin {
    /// Carries out a list command: sends a page of the entries in a partition.
    pub(super) fn list<E: TargetEnv>(
        context: &mut Context<E>,
        sqe: &Sqe,
        env: &mut E,
        outbox: &mut Outbox<E::Buf>,
    ) {
        let ListRequest { stream, from, len } = wire::list_request(sqe);
        let id = PartitionId { volume: wire::volume_of(sqe), stream };
        let association = context.association();
        let page = match check_page_len(len) {
            Err(status) => Err(Refusal { status, result: 0 }),
            Ok(()) if sqe.dword(11) > u32::from(u16::MAX) => {
                Err(Refusal::do_not_retry(wire::status::NO_SUCH_STREAM))
            }
            Ok(()) => update_shared(env, |shared| shared.list(id, association, from, len)),
        };
        match page {
            Ok(page) => context.send_page(sqe, &page.encode(len), outbox),
            Err(Refusal { status, result }) => {
                context.send_completion(sqe.cid(), status, result, outbox)
            }
        }
    }

    /// Carries out a settle command with this data.
    pub(super) fn settle_streams<E: TargetEnv>(
        context: &mut Context<E>,
        index: u16,
        data: &[u8],
        env: &mut E,
        outbox: &mut Outbox<E::Buf>,
    ) {
        let Some(settle) = Settle::decode(data) else {
            return context.complete_command(index, Status::INVALID_FIELD.with_dnr(), 0, outbox);
        };
        let association = context.association();
        let settled = update_shared(env, |shared| shared.settle(&settle, association));
        match settled {
            Ok(()) => context.complete_command(index, Status::SUCCESS, 0, outbox),
            Err(Refusal { status, result }) => {
                context.report_refusal("settle refused", status, env);
                context.complete_command(index, status, result, outbox);
            }
        }
    }
}

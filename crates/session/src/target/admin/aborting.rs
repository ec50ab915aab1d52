//! The Abort command (Base §5.1). Its admin queue asks the queue of the command to abort, and waits
//! for the answer: [`conn/aborting.rs`](crate::target::conn) decides.

use riopipe_nvme::command::{Sqe, Status};

use super::Admin;
use crate::outbox::Outbox;
use crate::target::closed::Closed;
use crate::target::commands::Stage;
use crate::target::context::{Context, update_shared};
use crate::target::env::TargetEnv;
use crate::target::limits::ABORTS_MAX;

/// An Abort command that waits for the queue of the command to abort.
#[derive(Clone, Copy, Debug)]
pub(super) struct WaitingAbort {
    /// The number of the Abort.
    id: u64,
    /// The index of the Abort command in the table.
    index: u16,
}

/// Dword 0 of the completion of an Abort: bit 0 is set if the command was not aborted.
fn result_of(is_aborted: bool) -> u64 {
    u64::from(!is_aborted)
}

impl Admin {
    /// Carries out an Abort command. The completion of a command that was aborted is sent before that
    /// of the Abort.
    pub(super) fn abort<E: TargetEnv>(
        &mut self,
        context: &mut Context<E>,
        sqe: &Sqe,
        env: &mut E,
        outbox: &mut Outbox<E::Buf>,
    ) -> Result<(), Closed> {
        let target = sqe.abort_target();
        if target.sqid == 0 {
            let is_aborted = self.abort_admin_command(context, target.cid, outbox);
            context.send_completion(sqe.cid(), Status::SUCCESS, result_of(is_aborted), outbox);
            return Ok(());
        }
        if self.waiting_aborts.len() >= ABORTS_MAX {
            context.send_completion(sqe.cid(), Status::ABORT_LIMIT.with_dnr(), 0, outbox);
            return Ok(());
        }
        let cntlid = context.queue.as_ref().map_or(0, |queue| queue.cntlid);
        let index = context.insert_command(sqe, Stage::Fence, 0)?;
        let conn = context.id;
        match update_shared(env, |shared| shared.request_abort(conn, cntlid, target)) {
            Some(id) => self.waiting_aborts.push(WaitingAbort { id, index }),
            None => context.complete_command(index, Status::SUCCESS, result_of(false), outbox),
        }
        Ok(())
    }

    /// Aborts an event request, or a command of this queue whose data has not come. Returns whether
    /// it was aborted.
    fn abort_admin_command<E: TargetEnv>(
        &mut self,
        context: &mut Context<E>,
        cid: u16,
        outbox: &mut Outbox<E::Buf>,
    ) -> bool {
        let Some(at) = self.event_request_cids.iter().position(|kept| *kept == cid) else {
            return context.abort_before_drive(cid, outbox);
        };
        self.event_request_cids.swap_remove(at);
        context.send_completion(cid, Status::ABORT_REQUESTED, 0, outbox);
        true
    }

    /// Notes that an Abort of this queue has ended.
    pub(in crate::target) fn on_abort_ended<E: TargetEnv>(
        &mut self,
        context: &mut Context<E>,
        id: u64,
        is_aborted: bool,
        outbox: &mut Outbox<E::Buf>,
    ) {
        let waiting = self.waiting_aborts.iter().position(|waiting| waiting.id == id);
        let Some(at) = waiting else { return };
        let WaitingAbort { index, .. } = self.waiting_aborts.swap_remove(at);
        if !context.is_closing {
            context.complete_command(index, Status::SUCCESS, result_of(is_aborted), outbox);
        }
    }
}

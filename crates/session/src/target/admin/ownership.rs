//! The commands by which a host gets and releases a volume: claim, status and release, on the admin
//! queue (T8).

use riopipe_nvme::command::{Sqe, Status};
use riopipe_order::attribute::VolumeId;

use super::Admin;
use crate::outbox::Outbox;
use crate::target::closed::Closed;
use crate::target::commands::Stage;
use crate::target::context::{Context, update_shared};
use crate::target::env::{Event, TargetEnv};
use crate::target::volumes::{Owner, Refusal};
use crate::wire::{self, Claim};

/// A command that waits until other connections have drained.
#[derive(Clone, Copy, Debug)]
pub(super) struct Waiting {
    /// The fence.
    fence: u64,
    /// The command.
    index: u16,
    /// The step that follows once they have drained.
    next_step: NextStep,
}

#[derive(Clone, Copy, Debug)]
enum NextStep {
    /// The volume has a new owner.
    Claimed {
        /// The volume.
        volume: VolumeId,
        /// The number of this claim among its claims.
        claim: u64,
    },
    /// Release the volume; forget it if the host asks for that.
    Release {
        /// The volume.
        volume: VolumeId,
        /// Whether its log is dropped, too.
        forget: bool,
    },
}

impl Admin {
    /// Claim, with its data at hand.
    pub(super) fn claim<E: TargetEnv>(
        &mut self,
        context: &mut Context<E>,
        index: u16,
        data: &[u8],
        env: &mut E,
        outbox: &mut Outbox<E::Buf>,
    ) {
        let Some(claim) = Claim::decode(data) else {
            return context.complete_command(index, Status::INVALID_FIELD.with_dnr(), 0, outbox);
        };
        let Some(queue) = &context.queue else {
            return;
        };
        let (conn, now) = (context.id, env.now());
        let (cntlid, hostnqn) = (queue.cntlid, queue.hostnqn.clone());
        let granted = update_shared(env, |shared| {
            let hostid = shared.controller(cntlid).map_or([0; 16], |c| c.hostid);
            let association = shared.controller(cntlid).map_or(0, |c| c.association);
            let host = Owner { association, cntlid, hostnqn: hostnqn.clone(), hostid };
            let number = shared.claim(&claim, host, now)?;
            // From here on, writes of plain hosts and streams of former owners are refused. Their
            // operations that are in flight must come back before the new owner reads a log or
            // writes. Otherwise a late write could land over newer data (T8, T21).
            Ok((shared.raise_fence(conn, claim.volume, None), number))
        });
        match granted {
            Err(Refusal { status, result }) => {
                context.report_refusal("claim refused", status, env);
                context.complete_command(index, status, result, outbox);
            }
            Ok((fence, number)) => {
                let what =
                    alloc::format!("volume {} generation {}", claim.volume, claim.generation);
                env.log(Event::Claimed { hostnqn: &hostnqn, cntlid, what: &what });
                if claim.give_up {
                    context.report_problem(
                        "the new owner has accepted the loss of the volume's ordering log \
                         (accept_lost_log): what could not be read of it begins anew, and no \
                         write is undone",
                        env,
                    );
                }
                let next_step = NextStep::Claimed { volume: claim.volume, claim: number };
                self.wait_for(context, fence, index, next_step, env, outbox);
            }
        }
    }

    /// Status: the target's state of a volume.
    pub(super) fn volume_status<E: TargetEnv>(
        context: &Context<E>,
        sqe: &Sqe,
        env: &mut E,
    ) -> alloc::vec::Vec<u8> {
        let (volume, now) = (wire::volume_of(sqe), env.now());
        env.with_shared(|shared| shared.volumes.status(volume, context.association(), now)).encode()
    }

    /// Release: ends the ownership of a volume.
    pub(super) fn release<E: TargetEnv>(
        &mut self,
        context: &mut Context<E>,
        sqe: &Sqe,
        env: &mut E,
        outbox: &mut Outbox<E::Buf>,
    ) -> Result<(), Closed> {
        let volume = wire::volume_of(sqe);
        let forget = sqe.dword(10) & 1 != 0;
        let (conn, association) = (context.id, context.association());
        let index = context.insert_command(sqe, Stage::Fence, 0)?;
        let fence = update_shared(env, |shared| {
            shared.volumes.may_release(volume, association, forget)?;
            // To release the volume, the owner's own connections must have drained and returned its
            // streams. To forget it, all connections must have drained: after that the target does
            // not know the volume, and so could not find their late writes.
            Ok::<_, Refusal>(shared.raise_fence(conn, volume, (!forget).then_some(association)))
        });
        match fence {
            Err(Refusal { status, result }) => {
                context.complete_command(index, status, result, outbox)
            }
            Ok(fence) => {
                self.wait_for(
                    context,
                    fence,
                    index,
                    NextStep::Release { volume, forget },
                    env,
                    outbox,
                );
            }
        }
        Ok(())
    }

    /// Continues with `next_step` when the fence has ended, or at once if there is none.
    fn wait_for<E: TargetEnv>(
        &mut self,
        context: &mut Context<E>,
        fence: Option<u64>,
        index: u16,
        next_step: NextStep,
        env: &mut E,
        outbox: &mut Outbox<E::Buf>,
    ) {
        match fence {
            Some(fence) => {
                context.commands[index].stage = Stage::Fence;
                self.waiting.push(Waiting { fence, index, next_step });
            }
            None => finish(context, index, next_step, env, outbox),
        }
    }

    /// Notes that every operation for which one of this connection's fences waited has come back.
    pub(in crate::target) fn on_fence_ended<E: TargetEnv>(
        &mut self,
        context: &mut Context<E>,
        fence: u64,
        env: &mut E,
        outbox: &mut Outbox<E::Buf>,
    ) {
        if let Some(at) = self.waiting.iter().position(|w| w.fence == fence) {
            let Waiting { index, next_step, .. } = self.waiting.swap_remove(at);
            if !context.is_closing {
                finish(context, index, next_step, env, outbox);
            }
        }
    }

    /// The volumes that the host was releasing.
    pub(in crate::target) fn releasing(&self) -> impl Iterator<Item = VolumeId> {
        self.waiting.iter().filter_map(|waiting| match waiting.next_step {
            NextStep::Release { volume, .. } => Some(volume),
            NextStep::Claimed { .. } => None,
        })
    }
}

fn finish<E: TargetEnv>(
    context: &mut Context<E>,
    index: u16,
    next_step: NextStep,
    env: &mut E,
    outbox: &mut Outbox<E::Buf>,
) {
    let outcome = match next_step {
        NextStep::Claimed { volume, claim } => {
            env.with_shared(|shared| shared.volumes.claim_drained(volume, claim));
            Ok(())
        }
        NextStep::Release { volume, forget } => {
            let association = context.association();
            update_shared(env, |shared| shared.release(volume, association, forget))
        }
    };
    match outcome {
        Ok(()) => context.complete_command(index, Status::SUCCESS, 0, outbox),
        Err(Refusal { status, result }) => context.complete_command(index, status, result, outbox),
    }
}

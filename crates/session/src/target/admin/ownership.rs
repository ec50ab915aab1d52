//! The commands by which a host becomes and ceases to be the owner of a volume: claim, status and
//! release, on the admin queue (trap T8).
//!
//! A claim and a release change the ownership in three steps, because operations of the former
//! owner and of other hosts may be in flight:
//!
//! 1. Check the command. A claim is granted at once, so that new operations of others are refused.
//! 2. Raise a fence and wait until the operations in flight have come back.
//! 3. Carry out the [`NextStep`]: the streams of the claimed volume may start, or the volume is
//!    released.

use riopipe_nvme::command::{Sqe, Status};
use riopipe_order::attribute::VolumeId;

use super::Admin;
use crate::outbox::Outbox;
use crate::target::closed::Closed;
use crate::target::commands::Stage;
use crate::target::context::{Context, update_shared};
use crate::target::env::{Event, TargetEnv};
use crate::target::volumes::{Owner, Refusal};
use crate::wire::{self, Claim, ReleaseRequest};

/// A command that waits for a fence.
#[derive(Clone, Copy, Debug)]
pub(super) struct WaitingCommand {
    /// The id of the fence.
    fence: u64,
    /// The index of the command in the table.
    index: u16,
    /// The step to carry out when the fence has ended.
    next_step: NextStep,
}

/// The step of a command after its fence.
#[derive(Clone, Copy, Debug)]
enum NextStep {
    /// End a claim: the owner may use the volume.
    EndClaim {
        /// The volume.
        volume: VolumeId,
        /// The number of this claim among the claims of the volume.
        claim_number: u64,
    },
    /// Release the volume.
    Release {
        /// The volume.
        volume: VolumeId,
        /// Whether the target also forgets the volume and drops its log.
        request: ReleaseRequest,
    },
}

/// A claim that was granted.
struct GrantedClaim {
    /// The number of this claim among the claims of the volume.
    claim_number: u64,
    /// The id of the fence for which the claim waits; `None` if nothing is in flight.
    fence: Option<u64>,
}

impl Admin {
    /// Carries out a claim command with this data.
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
        let members = claim.members.iter();
        let refusal = members
            .filter_map(|member| context.namespaces.find(member.nsid))
            .find_map(|(ns_index, _)| context.check_path(ns_index).err());
        if let Some(status) = refusal {
            context.report_refusal("claim refused", status, env);
            return context.complete_command(index, status.with_dnr(), 0, outbox);
        }
        let (conn, now) = (context.id, env.now());
        let (cntlid, hostnqn) = (queue.cntlid, queue.hostnqn.clone());
        let granted = update_shared(env, |shared| {
            let controller = shared.controller(cntlid);
            let hostid = controller.map_or([0; 16], |controller| controller.hostid);
            let association = controller.map_or(0, |controller| controller.association);
            let (hostnqn, address) = (hostnqn.clone(), context.peer.clone());
            let host = Owner { association, cntlid, hostnqn, address, hostid };
            let claim_number = shared.claim(&claim, host, now)?;
            // From here on, the target refuses writes of plain hosts and streams of former owners.
            // Their operations in flight must come back before the new owner reads a log or writes.
            // Otherwise a late write could land over newer data (traps T8, T21).
            let fence = shared.raise_fence(conn, claim.volume, None);
            Ok(GrantedClaim { claim_number, fence })
        });
        match granted {
            Err(Refusal { status, result }) => {
                context.report_refusal("claim refused", status, env);
                context.complete_command(index, status, result, outbox);
            }
            Ok(GrantedClaim { claim_number, fence }) => {
                let what =
                    alloc::format!("volume {} generation {}", claim.volume, claim.generation);
                let peer = &context.peer;
                env.log(Event::Claimed { peer, hostnqn: &hostnqn, cntlid, what: &what });
                if claim.give_up {
                    context.report_problem(
                        "the new owner has accepted the loss of the volume's ordering log \
                         (accept_lost_log): what could not be read of it begins anew, and no \
                         write is undone",
                        env,
                    );
                }
                let next_step = NextStep::EndClaim { volume: claim.volume, claim_number };
                self.carry_out_after_fence(context, fence, index, next_step, env, outbox);
            }
        }
    }

    /// The data of a status command: the target's state of a volume.
    pub(super) fn volume_status<E: TargetEnv>(
        context: &Context<E>,
        sqe: &Sqe,
        env: &mut E,
    ) -> alloc::vec::Vec<u8> {
        let (volume, now) = (wire::volume_of(sqe), env.now());
        env.with_shared(|shared| shared.volumes.status(volume, context.association(), now)).encode()
    }

    /// Carries out a release command, which ends the ownership of a volume.
    pub(super) fn release<E: TargetEnv>(
        &mut self,
        context: &mut Context<E>,
        sqe: &Sqe,
        env: &mut E,
        outbox: &mut Outbox<E::Buf>,
    ) -> Result<(), Closed> {
        let volume = wire::volume_of(sqe);
        let request = wire::release_request(sqe);
        let forget = request.forget;
        let now = env.now();
        let (conn, association) = (context.id, context.association());
        let index = context.insert_command(sqe, Stage::Fence, 0)?;
        let fence = update_shared(env, |shared| {
            shared.volumes.may_release(volume, association, request, now)?;
            // Before a release, the owner's own connections must drain and return their streams.
            // Before the target forgets a volume, all connections must drain, because the target
            // could not assign their late writes to the volume afterwards.
            Ok::<_, Refusal>(shared.raise_fence(conn, volume, (!forget).then_some(association)))
        });
        match fence {
            Err(Refusal { status, result }) => {
                context.complete_command(index, status, result, outbox)
            }
            Ok(fence) => {
                self.carry_out_after_fence(
                    context,
                    fence,
                    index,
                    NextStep::Release { volume, request },
                    env,
                    outbox,
                );
            }
        }
        Ok(())
    }

    /// Carries out `next_step` when the fence has ended, or at once if there is no fence.
    fn carry_out_after_fence<E: TargetEnv>(
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
                self.waiting_for_fence.push(WaitingCommand { fence, index, next_step });
            }
            None => carry_out(context, index, next_step, env, outbox),
        }
    }

    /// Notes that a fence of this connection has ended: all connections have acknowledged it.
    pub(in crate::target) fn on_fence_ended<E: TargetEnv>(
        &mut self,
        context: &mut Context<E>,
        fence: u64,
        env: &mut E,
        outbox: &mut Outbox<E::Buf>,
    ) {
        let waiting = self.waiting_for_fence.iter().position(|waiting| waiting.fence == fence);
        let Some(at) = waiting else { return };
        let WaitingCommand { index, next_step, .. } = self.waiting_for_fence.swap_remove(at);
        if !context.is_closing {
            carry_out(context, index, next_step, env, outbox);
        }
    }

    /// The volumes whose release waits for a fence.
    pub(in crate::target) fn volumes_in_release(&self) -> impl Iterator<Item = VolumeId> {
        self.waiting_for_fence.iter().filter_map(|waiting| match waiting.next_step {
            NextStep::Release { volume, .. } => Some(volume),
            NextStep::EndClaim { .. } => None,
        })
    }
}

/// Carries out the step that follows a fence, and completes the command.
fn carry_out<E: TargetEnv>(
    context: &mut Context<E>,
    index: u16,
    next_step: NextStep,
    env: &mut E,
    outbox: &mut Outbox<E::Buf>,
) {
    let outcome = match next_step {
        NextStep::EndClaim { volume, claim_number } => {
            env.with_shared(|shared| shared.volumes.on_claim_drained(volume, claim_number));
            Ok(())
        }
        NextStep::Release { volume, request } => {
            let (association, now) = (context.association(), env.now());
            update_shared(env, |shared| shared.release(volume, association, request, now))
        }
    };
    match outcome {
        Ok(()) => context.complete_command(index, Status::SUCCESS, 0, outbox),
        Err(Refusal { status, result }) => context.complete_command(index, status, result, outbox),
    }
}

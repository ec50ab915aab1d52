//! The beginning and the end of a stream on a connection: the Bind command, and the fence that
//! makes a change of owner safe (trap T8).
//!
//! The steps of a fence:
//!
//! 1. Another connection, the *claimant*, raises the fence and leaves a notice for this connection.
//! 2. This connection ends its stream: it refuses the requests that are not at the drives. It notes
//!    which of its device operations are in flight.
//! 3. When all of these operations have come back, this connection returns the log of its stream to
//!    the volume, and acknowledges the fence.
//! 4. When all connections have acknowledged the fence, the claimant continues.

use alloc::boxed::Box;
use alloc::sync::Arc;
use alloc::vec::Vec;
use core::ops::Range;

use riopipe_nvme::command::{Sqe, Status};
use riopipe_order::attribute::{Member, VolumeId};
use riopipe_order::entry::PartitionId;
use riopipe_order::probe::{self, Plant, Rare};

use super::TargetConn;
use crate::outbox::Outbox;
use crate::target::commands::Command;
use crate::target::context::update_shared;
use crate::target::env::TargetEnv;
use crate::target::limits::SEQ_MAX;
use crate::target::ordered::OrderedQueue;
use crate::target::shared::FenceScope;
use crate::target::volumes::{Binding, Refusal, count_live_entries};
use crate::wire;

/// The reserved bits of a Bind command's dword 10: the stream has bits 15:0, the resume flag bit
/// 31.
const BIND_RESERVED: u32 = 0x7fff_0000;

/// The fences that this connection has to acknowledge, in rounds.
///
/// A round waits for the device operations that were in flight at its beginning, and then
/// acknowledges its fences. A fence that is raised during a round belongs to the next round. So a
/// fence waits for two rounds at most, even if the connection always has operations in flight
/// (trap T28).
#[derive(Debug, Default)]
pub(super) struct Fences {
    /// How many of the device operations for which the current round waits are still in flight.
    awaited_operation_count: usize,
    /// The ids of the fences that the current round acknowledges at its end.
    current_round: Vec<u64>,
    /// The stream had already ended at the beginning of the current round. So the round waits for
    /// all operations of the stream, and returns the log of the stream at the end of the round.
    returns_stream: bool,
    /// The ids of the fences of the next round.
    next_round: Vec<u64>,
    /// The fences of blocks. They take no part in the rounds: each waits only for operations that
    /// may change its blocks. So neither a FLUSH nor a read, which may wait for other hosts, keeps
    /// them waiting.
    drains: Vec<Drain>,
}

/// A fence of blocks that this connection has to acknowledge.
#[derive(Debug)]
struct Drain {
    id: u64,
    /// The commands that had an operation in flight when the fence came which may change its blocks.
    awaited: Vec<u16>,
}

impl Fences {
    /// Notes that a device operation of a command has come back, if any fence waits for it.
    #[inline]
    pub(super) fn on_operation_done<B>(&mut self, index: u16, command: &mut Command<B>) {
        if core::mem::take(&mut command.awaited_by_fence) {
            self.awaited_operation_count -= 1;
        }
        if core::mem::take(&mut command.awaited_by_drain) {
            self.on_drained(index);
        }
    }

    #[cold]
    fn on_drained(&mut self, index: u16) {
        for drain in &mut self.drains {
            drain.awaited.retain(|other| *other != index);
        }
    }
}

/// Reads the fields of a Bind command: the stream, and how it is to be bound.
///
/// # Errors
/// The status with which the command is refused.
fn decode_bind(sqe: &Sqe) -> Result<(PartitionId, Binding), Status> {
    if sqe.dword(10) & BIND_RESERVED != 0 {
        return Err(wire::status::NO_SUCH_STREAM);
    }
    let binding = Binding {
        resume: wire::bind_resumes(sqe),
        generation: sqe.dword(11),
        released: wire::mark_of(sqe),
    };
    if binding.released.0 > SEQ_MAX {
        return Err(wire::status::BAD_ATTRIBUTE);
    }
    let id = PartitionId { volume: wire::volume_of(sqe), stream: wire::bind_stream(sqe) };
    Ok((id, binding))
}

/// The result of a Bind command: the slots of the stream's log in the lower 32 bits, the incarnation
/// of the target in the upper 32 bits.
fn bind_result(slots: u32, incarnation: u32) -> u64 {
    u64::from(slots) | u64::from(incarnation) << 32
}

impl<E: TargetEnv> TargetConn<E> {
    /// Carries out a Bind command. If the command succeeds, this connection carries a stream from
    /// now on.
    pub(super) fn bind(&mut self, sqe: &Sqe, env: &mut E, outbox: &mut Outbox<E::Buf>) {
        let Self { context, ordered, .. } = self;
        let cid = sqe.cid();
        let Some(queue) = &context.queue else {
            return;
        };
        if ordered.is_some() {
            return context.send_completion(cid, wire::status::STREAM_BUSY.with_dnr(), 0, outbox);
        }
        let (id, binding) = match decode_bind(sqe) {
            Ok(decoded) => decoded,
            Err(status) => {
                return context.send_completion(cid, status.with_dnr(), 0, outbox);
            }
        };
        let (conn, association, entries) = (context.id, queue.association, queue.entries);
        let access = Arc::clone(&queue.access);
        let refusal = env.with_shared(|shared| shared.path_refusal_of(id.volume, &access));
        if let Some(status) = refusal {
            context.report_refusal("bind refused", status, env);
            return context.send_completion(cid, status.with_dnr(), 0, outbox);
        }
        match update_shared(env, |shared| shared.bind(conn, association, id, binding)) {
            Err(Refusal { status, result }) => {
                context.report_refusal("bind refused", status, env);
                context.send_completion(cid, status, result, outbox);
            }
            Ok(bound) => {
                let result = bind_result(bound.log.slots(), bound.incarnation);
                // A namespace of the volume that is gone has no place in the queue. The commands to
                // it are refused.
                let members = bound.members.iter().filter_map(|member| {
                    let (ns_index, _) = context.namespaces.find(member.nsid)?;
                    Some((ns_index, member.member))
                });
                let members: Vec<(usize, Member)> = members.collect();
                context.is_fenced = false;
                context.commands.reset_gate_nodes();
                *ordered = Some(Box::new(OrderedQueue::new(
                    id.volume,
                    (bound.log, bound.fill),
                    &members,
                    &context.namespaces,
                    binding.released,
                    entries,
                )));
                context.send_completion(cid, Status::SUCCESS, result, outbox);
            }
        }
    }

    /// Takes in a fence that another connection has raised. Ends the stream of this connection if it
    /// belongs to `volume`. The fence joins the next round of [`Fences`], so it is acknowledged when
    /// every device operation that is in flight now has come back.
    pub(super) fn on_fence_raised(
        &mut self,
        id: u64,
        volume: VolumeId,
        scope: FenceScope,
        env: &mut E,
        outbox: &mut Outbox<E::Buf>,
    ) {
        let Self { context, ordered, fences, .. } = self;
        if let Some(ordered) = ordered
            && ordered.volume == volume
            && !context.is_fenced
        {
            ordered.end_stream(context);
            ordered.finish_batch(context, &[], env, outbox);
            context.report_problem("a new owner has taken the volume, or it was released", env);
        }
        fences.next_round.push(id);
        // These lines only serve the simulator: a counter, and a bug that its tests must find.
        let is_for_all = scope == FenceScope::AllAssociations;
        if is_for_all && context.commands.iter_mut().any(|(_, command)| command.is_on_device()) {
            probe::count_rare(Rare::FenceWaited);
        }
        let skips_wait = is_for_all && probe::is_bug_planted(Plant::T8ClaimNoWait);
        if skips_wait && self.carries_fenced_stream() {
            self.return_stream(env, outbox);
        }
        self.acknowledge_fences(env, outbox);
    }

    /// Takes in a fence of blocks: another command has locked them, or other hosts have lost access to
    /// them. It is acknowledged when the operations in flight that may change these blocks have come
    /// back.
    pub(super) fn on_drain(
        &mut self,
        id: u64,
        ns_index: usize,
        blocks: &Range<u64>,
        env: &mut E,
        outbox: &mut Outbox<E::Buf>,
    ) {
        let Self { context, fences, .. } = self;
        let mut awaited = Vec::new();
        for (index, command) in context.commands.iter_mut() {
            if command.may_be_changing(ns_index, blocks) {
                command.awaited_by_drain = true;
                awaited.push(index);
            }
        }
        fences.drains.push(Drain { id, awaited });
        self.acknowledge_fences(env, outbox);
    }

    /// Acknowledges the fences of blocks whose operations have come back.
    fn acknowledge_drains(&mut self, env: &mut E) {
        let drained: Vec<Drain> =
            self.fences.drains.extract_if(.., |drain| drain.awaited.is_empty()).collect();
        if drained.is_empty() {
            return;
        }
        let conn = self.context.id;
        update_shared(env, |shared| {
            for drain in drained {
                shared.acknowledge(drain.id, conn);
            }
        });
    }

    /// Acknowledges the fences whose operations have come back. Ends the current round if none of its
    /// operations is in flight any more, and begins the next round.
    pub(super) fn acknowledge_fences(&mut self, env: &mut E, outbox: &mut Outbox<E::Buf>) {
        if !self.fences.drains.is_empty() {
            self.acknowledge_drains(env);
        }
        while self.fences.awaited_operation_count == 0 {
            if self.fences.current_round.is_empty() {
                if self.fences.next_round.is_empty() {
                    return;
                }
                self.begin_fence_round();
                continue;
            }
            if self.fences.returns_stream && self.carries_fenced_stream() {
                self.return_stream(env, outbox);
            }
            let conn = self.context.id;
            let fences = core::mem::take(&mut self.fences.current_round);
            update_shared(env, |shared| {
                for id in fences {
                    shared.acknowledge(id, conn);
                }
            });
        }
    }

    /// Begins a round: marks the device operations in flight, for which the round waits.
    fn begin_fence_round(&mut self) {
        let returns_stream = self.carries_fenced_stream();
        let Self { context, fences, .. } = self;
        fences.current_round = core::mem::take(&mut fences.next_round);
        fences.returns_stream = returns_stream;
        for (_, command) in
            context.commands.iter_mut().filter(|(_, command)| command.is_on_device())
        {
            command.awaited_by_fence = true;
            fences.awaited_operation_count += 1;
        }
    }

    /// Whether this connection still has the log of a stream whose owner was fenced.
    fn carries_fenced_stream(&self) -> bool {
        self.ordered.is_some() && self.context.is_fenced
    }

    /// Returns the log of the stream to its volume. No operation of the stream is at a drive any
    /// more.
    pub(super) fn return_stream(&mut self, env: &mut E, outbox: &mut Outbox<E::Buf>) {
        let Some(ordered) = self.ordered.take() else {
            return;
        };
        self.context.refuse_unfinished(outbox);
        let mut log = ordered.log;
        // This fence makes the persist words of the last operations durable. If the fence fails,
        // recovery takes these entries as not done, which is safe.
        let _ = log.fence();
        // `count_live_entries` reads the log. The lock is not held meanwhile, so that other streams
        // can be bound.
        let entries = count_live_entries(&log);
        let conn = self.context.id;
        update_shared(env, |shared| {
            shared.volumes.return_log(conn, log, entries, &shared.namespaces)
        });
    }
}

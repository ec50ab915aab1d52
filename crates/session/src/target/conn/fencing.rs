//! The beginning and end of a stream on a connection: bind, and the fence that makes a change of
//! owner safe (T8).
//!
//! The steps of a fence: another connection (the claimant) raises it and leaves a notice for this
//! one; this one refuses what is not at the drives, and notes which device operations are in flight;
//! when all of those have come back, it returns its stream and acknowledges the fence; when all
//! connections have acknowledged, the claimant continues.

use alloc::boxed::Box;
use alloc::vec::Vec;

use riopipe_nvme::command::{Sqe, Status};
use riopipe_order::attribute::{Member, VolumeId};
use riopipe_order::entry::PartitionId;
use riopipe_order::probe::{self, Plant, Rare};

use super::TargetConn;
use crate::outbox::Outbox;
use crate::target::context::update_shared;
use crate::target::env::TargetEnv;
use crate::target::limits::SEQ_MAX;
use crate::target::ordered::OrderedQueue;
use crate::target::volumes::{Binding, Refusal, live_entries};
use crate::wire;

/// The bits of a Bind command's dword 10 that are neither the stream nor the resume flag.
const BIND_RESERVED: u32 = 0x7fff_0000;

/// The fences that this connection has to acknowledge. It serves them in rounds. A round waits for
/// the device operations that were in flight when it began, and then acknowledges its fences. A fence
/// that comes during a round belongs to the next one. So a fence waits for two rounds at most, also
/// if the connection always has operations in flight (T28).
#[derive(Debug, Default)]
pub(super) struct Fences {
    /// The number of device operations of the round that are still in flight.
    in_flight: usize,
    /// The fences to acknowledge at the end of the round.
    current: Vec<u64>,
    /// The stream had been ended when the round began. So the round waits for all operations of the
    /// stream, and at the end of the round the log of the stream is returned.
    returns_stream: bool,
    /// The fences of the next round.
    next: Vec<u64>,
}

impl Fences {
    /// Notes that a device operation has come back for which a fence waited.
    pub(super) const fn operation_done(&mut self) {
        self.in_flight -= 1;
    }
}

impl<E: TargetEnv> TargetConn<E> {
    /// Carries out a Bind command: if it succeeds, this queue carries a stream from now on.
    pub(super) fn bind(&mut self, sqe: &Sqe, env: &mut E, outbox: &mut Outbox<E::Buf>) {
        let Self { context, ordered, .. } = self;
        let cid = sqe.cid();
        let Some(queue) = &context.queue else {
            return;
        };
        if ordered.is_some() {
            return context.send_completion(cid, wire::status::STREAM_BUSY.with_dnr(), 0, outbox);
        }
        let (resume, stream) = (wire::bind_resumes(sqe), wire::bind_stream(sqe));
        if sqe.dword(10) & BIND_RESERVED != 0 {
            return context.send_completion(
                cid,
                wire::status::NO_SUCH_STREAM.with_dnr(),
                0,
                outbox,
            );
        }
        let (generation, released) = (sqe.dword(11), wire::mark_of(sqe));
        if released.0 > SEQ_MAX {
            return context.send_completion(cid, wire::status::BAD_ATTRIBUTE.with_dnr(), 0, outbox);
        }
        let id = PartitionId { volume: wire::volume_of(sqe), stream };
        let (conn, association, entries) = (context.id, queue.association, queue.entries);
        let binding = Binding { resume, generation, released };
        match update_shared(env, |shared| shared.bind(conn, association, id, binding)) {
            Err(Refusal { status, result }) => {
                context.report_refusal("bind refused", status, env);
                context.send_completion(cid, status, result, outbox);
            }
            Ok(bound) => {
                let slots = bound.log.slots();
                let members: Vec<(usize, Member)> = bound
                    .members
                    .iter()
                    .filter_map(|m| {
                        context.namespaces.find(m.nsid).map(|(ns_index, _)| (ns_index, m.member))
                    })
                    .collect();
                context.is_fenced = false;
                context.commands.reset_gate_nodes();
                *ordered = Some(Box::new(OrderedQueue::new(
                    id.volume,
                    bound.log,
                    &members,
                    &context.namespaces,
                    released,
                    entries,
                )));
                let result = u64::from(slots) | u64::from(bound.incarnation) << 32;
                context.send_completion(cid, Status::SUCCESS, result, outbox);
            }
        }
    }

    /// Takes in a fence that another connection has raised: ends the stream if it belongs to `volume`,
    /// and acknowledges fence `id` once every device operation that is in flight now has come back.
    pub(super) fn on_fence_raised(
        &mut self,
        id: u64,
        volume: VolumeId,
        claimed: bool,
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
        fences.next.push(id);
        if claimed && context.commands.iter_mut().any(|(_, command)| command.is_on_device()) {
            probe::hit(Rare::FenceWaited);
        }
        let skips_wait = claimed && probe::planted(Plant::T8ClaimNoWait);
        if skips_wait && self.carries_fenced() {
            self.return_stream(env, outbox);
        }
        self.acknowledge_fences(env, outbox);
    }

    /// If no operation of the round is left in flight, acknowledges its fences and begins the next
    /// round.
    pub(super) fn acknowledge_fences(&mut self, env: &mut E, outbox: &mut Outbox<E::Buf>) {
        while self.fences.in_flight == 0 {
            if self.fences.current.is_empty() {
                if self.fences.next.is_empty() {
                    return;
                }
                self.begin_round();
                continue;
            }
            if self.fences.returns_stream && self.carries_fenced() {
                self.return_stream(env, outbox);
            }
            let (conn, fences) = (self.context.id, core::mem::take(&mut self.fences.current));
            update_shared(env, |shared| {
                for id in fences {
                    shared.acknowledge(id, conn);
                }
            });
        }
    }

    /// Begins a round: marks the device operations that it waits for.
    fn begin_round(&mut self) {
        let returns_stream = self.carries_fenced();
        let Self { context, fences, .. } = self;
        fences.current = core::mem::take(&mut fences.next);
        fences.returns_stream = returns_stream;
        for (_, command) in
            context.commands.iter_mut().filter(|(_, command)| command.is_on_device())
        {
            command.awaited_by_fence = true;
            fences.in_flight += 1;
        }
    }

    /// Whether this connection still carries a stream whose owner was fenced.
    fn carries_fenced(&self) -> bool {
        self.ordered.is_some() && self.context.is_fenced
    }

    /// Returns the stream's log to its volume. None of its operations is at the drives any more.
    pub(super) fn return_stream(&mut self, env: &mut E, outbox: &mut Outbox<E::Buf>) {
        let Some(ordered) = self.ordered.take() else {
            return;
        };
        self.context.refuse_unfinished(outbox);
        let mut log = ordered.log;
        // Fences the persist words of operations that came back last. If this fails, they are not
        // durable, and recovery takes the entries as not done. That is safe.
        let _ = log.fence();
        // This reads the log. It is done outside of the lock, so that other streams can be bound
        // meanwhile.
        let entries = live_entries(&log);
        let conn = self.context.id;
        update_shared(env, |shared| {
            shared.volumes.return_log(conn, log, entries, &shared.namespaces)
        });
    }
}

//! Streams come and go: bind, claim, release, and the fence that makes a change of owner safe
//! (T8).

use riopipe_nvme::command::{Sqe, Status};
use riopipe_order::attribute::{Member, VolumeId};
use riopipe_order::entry::PartitionId;
use riopipe_order::probe::{self, Plant, Rare};

use super::binding::{Binding, live_entries};
use super::bound::Stream;
use super::claims::Owner;
use super::conn::{Closed, TargetConn, shared};
use super::env::{Event, TargetEnv};
use super::limits::SEQ_MAX;
use super::slots::Stage;
use crate::outbox::Outbox;
use crate::wire::{self, Claim};

/// A command of this connection that waits until other connections have drained.
#[derive(Clone, Copy, Debug)]
pub(super) struct Waiting {
    /// The fence.
    pub(super) fence: u64,
    /// The command's slot.
    pub(super) slot: u16,
    /// What to do then.
    pub(super) then: Then,
}

#[derive(Clone, Copy, Debug)]
pub(super) enum Then {
    /// The volume has changed hands.
    Claimed {
        /// The volume.
        volume: VolumeId,
        /// Which of its claims.
        claim: u64,
    },
    /// Give the volume back; forget it if so asked.
    Release {
        /// The volume.
        volume: VolumeId,
        /// Whether its log goes, too.
        forget: bool,
    },
}

impl<E: TargetEnv> TargetConn<E> {
    /// Bind: this queue carries a stream from now on.
    pub(super) fn bind(&mut self, sqe: &Sqe, env: &mut E, out: &mut Outbox<E::Buf>) {
        let cid = sqe.cid();
        let Some(queue) = &self.queue else {
            return;
        };
        if self.stream.is_some() {
            return self.respond(cid, wire::status::STREAM_BUSY.with_dnr(), 0, out);
        }
        let (resume, stream) = wire::bind_of(sqe);
        if sqe.dword(10) & 0x7fff_0000 != 0 {
            return self.respond(cid, wire::status::NO_SUCH_STREAM.with_dnr(), 0, out);
        }
        let (generation, released) = (sqe.dword(11), wire::mark_of(sqe));
        if released.0 > SEQ_MAX {
            return self.respond(cid, wire::status::BAD_ATTRIBUTE.with_dnr(), 0, out);
        }
        let id = PartitionId { volume: wire::volume_of(sqe), stream };
        let (conn, assoc, entries) = (self.id, queue.assoc, queue.entries);
        let binding = Binding { resume, generation, released };
        let bound = shared(env, |s| s.bind(conn, assoc, id, binding));
        match bound {
            Err((status, result)) => {
                self.trouble_with("bind refused", status, env);
                self.respond(cid, status, result, out);
            }
            Ok(bound) => {
                let slots = bound.log.slots();
                let members: alloc::vec::Vec<(usize, Member)> = bound
                    .members
                    .iter()
                    .filter_map(|m| self.namespaces.find(m.nsid).map(|(ns, _)| (ns, m.member)))
                    .collect();
                self.was_fenced = false;
                self.stream = Some(alloc::boxed::Box::new(Stream::new(
                    id.volume,
                    bound.log,
                    &members,
                    &self.namespaces,
                    released,
                    entries,
                )));
                let result = u64::from(slots) | u64::from(bound.incarnation) << 32;
                self.respond(cid, Status::SUCCESS, result, out);
            }
        }
    }

    /// Claim, with its data at hand.
    pub(super) fn claim(&mut self, index: u16, data: &[u8], env: &mut E, out: &mut Outbox<E::Buf>) {
        let Some(claim) = Claim::decode(data) else {
            return self.answer(index, Status::INVALID_FIELD.with_dnr(), 0, out);
        };
        let Some(queue) = &self.queue else {
            return;
        };
        let (conn, now) = (self.id, env.now());
        let (cntlid, hostnqn) = (queue.cntlid, queue.hostnqn.clone());
        let granted = shared(env, |s| {
            let hostid = s.controller(cntlid).map_or([0; 16], |c| c.hostid);
            let assoc = s.controller(cntlid).map_or(0, |c| c.assoc);
            let who = Owner { assoc, cntlid, hostnqn: hostnqn.clone(), hostid };
            let number = s.claim(&claim, who, now)?;
            // From here on the guard keeps plain writers out, and old bindings are refused. What
            // of either is under way must come back before the owner may read a list or write
            // anything: a ghost must not land over newer data (T8, T21).
            Ok((s.raise_fence(conn, claim.volume, None), number))
        });
        match granted {
            Err((status, result)) => {
                self.trouble_with("claim refused", status, env);
                self.answer(index, status, result, out);
            }
            Ok((fence, number)) => {
                let what =
                    alloc::format!("volume {} generation {}", claim.volume, claim.generation);
                env.log(Event::Claimed { hostnqn: &hostnqn, cntlid, what: &what });
                if claim.give_up {
                    self.trouble(
                        "what the ordering log knew of the volume was given up by its new owner \
                         (--accept-lost-log): what could not be read is begun anew, and nothing is \
                         undone",
                        env,
                    );
                }
                let then = Then::Claimed { volume: claim.volume, claim: number };
                self.wait_for(fence, index, then, env, out);
            }
        }
    }

    /// Status: what the target knows of a volume.
    pub(super) fn volume_status(&mut self, sqe: &Sqe, env: &mut E) -> alloc::vec::Vec<u8> {
        let assoc = self.queue.as_ref().map_or(0, |q| q.assoc);
        let (volume, now) = (wire::volume_of(sqe), env.now());
        env.with_shared(|s| s.volumes.status(volume, assoc, now)).encode()
    }

    /// Release: gives a volume back.
    pub(super) fn release(
        &mut self,
        sqe: &Sqe,
        env: &mut E,
        out: &mut Outbox<E::Buf>,
    ) -> Result<(), Closed> {
        let volume = wire::volume_of(sqe);
        let forget = sqe.dword(10) & 1 != 0;
        let assoc = self.queue.as_ref().map_or(0, |q| q.assoc);
        let conn = self.id;
        let index = self.next_slot()?;
        self.slots.take(sqe, Stage::Fence, 0);
        let fence = shared(env, |s| {
            s.volumes.may_release(volume, assoc, forget)?;
            // Its own streams must have come home first.
            Ok::<_, super::claims::Refusal>(s.raise_fence(conn, volume, Some(assoc)))
        });
        match fence {
            Err((status, result)) => self.answer(index, status, result, out),
            Ok(fence) => self.wait_for(fence, index, Then::Release { volume, forget }, env, out),
        }
        Ok(())
    }

    fn wait_for(
        &mut self,
        fence: Option<u64>,
        slot: u16,
        then: Then,
        env: &mut E,
        out: &mut Outbox<E::Buf>,
    ) {
        match (fence, &mut self.admin) {
            (Some(fence), Some(admin)) => {
                self.slots[slot].stage = Stage::Fence;
                admin.waiting.push(Waiting { fence, slot, then });
            }
            _ => self.finish(slot, then, env, out),
        }
    }

    /// Everything that one of this connection's fences waited for has come back.
    pub(super) fn fence_over(&mut self, fence: u64, env: &mut E, out: &mut Outbox<E::Buf>) {
        let Some(admin) = &mut self.admin else {
            return;
        };
        if let Some(at) = admin.waiting.iter().position(|w| w.fence == fence) {
            let Waiting { slot, then, .. } = admin.waiting.swap_remove(at);
            if !self.is_closing() {
                self.finish(slot, then, env, out);
            }
        }
    }

    /// The volumes that the host was giving back, and its association.
    pub(super) fn releasing(&self) -> alloc::vec::Vec<(VolumeId, u64)> {
        let assoc = self.queue.as_ref().map_or(0, |q| q.assoc);
        let waiting = self.admin.iter().flat_map(|admin| &admin.waiting);
        let released = waiting.filter_map(|waiting| match waiting.then {
            Then::Release { volume, .. } => Some((volume, assoc)),
            Then::Claimed { .. } => None,
        });
        released.collect()
    }

    fn finish(&mut self, slot: u16, then: Then, env: &mut E, out: &mut Outbox<E::Buf>) {
        let outcome = match then {
            Then::Claimed { volume, claim } => {
                env.with_shared(|s| s.volumes.enter(volume, claim));
                Ok(())
            }
            Then::Release { volume, forget } => {
                let assoc = self.queue.as_ref().map_or(0, |q| q.assoc);
                shared(env, |s| s.release(volume, assoc, forget))
            }
        };
        match outcome {
            Ok(()) => self.answer(slot, Status::SUCCESS, 0, out),
            Err((status, result)) => self.answer(slot, status, result, out),
        }
    }

    /// Another connection asks: give up the stream of `volume`, and say so once every device
    /// operation that is under way now has come back.
    pub(super) fn fence(
        &mut self,
        id: u64,
        volume: VolumeId,
        claimed: bool,
        env: &mut E,
        out: &mut Outbox<E::Buf>,
    ) {
        if let Some(stream) = &mut self.stream
            && stream.volume == volume
            && !stream.fenced
        {
            stream.shut();
            self.settle(&[], env, out);
            self.trouble("a new owner has taken the volume, or it was released", env);
        }
        let before = self.fence_left;
        for (_, slot) in self.slots.iter_mut() {
            if slot.on_device() && !slot.fenced {
                slot.fenced = true;
                self.fence_left += 1;
            }
        }
        if claimed && self.fence_left > before {
            probe::hit(Rare::FenceWaited);
        }
        let early = claimed && probe::planted(Plant::T8ClaimNoWait);
        if early && self.stream.as_ref().is_some_and(|s| s.fenced) {
            self.give_back_stream(env);
        }
        self.fences.push(id);
        self.fences_passed(env);
    }

    /// Acknowledges fences once nothing is left that they wait for.
    pub(super) fn fences_passed(&mut self, env: &mut E) {
        if self.fence_left > 0 || self.fences.is_empty() {
            return;
        }
        if self.stream.as_ref().is_some_and(|s| s.fenced) {
            self.give_back_stream(env);
        }
        let (conn, fences) = (self.id, core::mem::take(&mut self.fences));
        shared(env, |s| {
            for id in fences {
                s.acknowledge(id, conn);
            }
        });
    }

    /// Takes the stream's log home: nothing of it is at the drives any more.
    pub(super) fn give_back_stream(&mut self, env: &mut E) {
        let Some(stream) = self.stream.take() else {
            return;
        };
        self.doubts_orphaned();
        self.refuse_unfinished();
        self.was_fenced = stream.fenced;
        let mut log = stream.log;
        // Persist words of operations that came back last. If this fails, they are not durable,
        // which recovery takes for "not done": safe.
        let _ = log.fence();
        // Outside of the lock: others bind meanwhile.
        let entries = live_entries(&log);
        let conn = self.id;
        shared(env, |s| s.volumes.give_back(conn, log, entries));
    }

    pub(super) fn trouble_with(&self, what: &str, status: Status, env: &mut E) {
        let meaning = wire::status::meaning(status).map_or_else(
            || alloc::format!("{what}: {status}"),
            |meaning| alloc::format!("{what}: {meaning}"),
        );
        self.trouble(&meaning, env);
    }
}

/// What an owner is told that has been overtaken (T8).
#[cold]
pub(super) fn overtaken() -> Status {
    probe::hit(Rare::FencedOwner);
    wire::status::STALE_GENERATION.with_dnr()
}

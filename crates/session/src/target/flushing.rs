//! A connection's FLUSHes, beside those of other connections on whichever core (T22, T29): see
//! [`flushes`](super::flushes).

use riopipe_nvme::command::Status;
use riopipe_order::block_device::{BlockDevice, Submitted};
use riopipe_order::gate::Ticket;
use riopipe_order::probe::{self, Plant, Rare};

use super::bound::Stream;
use super::conn::{TargetConn, shared};
use super::env::{OpId, TargetEnv};
use super::slots::{Slot, Stage};
use super::stream::overtaken;
use crate::outbox::Outbox;

impl<E: TargetEnv> TargetConn<E> {
    /// Submits the FLUSH of the command in a slot.
    pub(super) fn submit_flush_of(&mut self, index: u16, env: &mut E) -> Submitted<E::Buf> {
        let ns = usize::from(self.slots[index].ns);
        let namespace = self.namespaces.at(ns);
        // Without a volatile cache a FLUSH has nothing to lose.
        let ticket = namespace.config.volatile.then(|| namespace.state.flushes.begin());
        self.slots[index].flush = ticket;
        env.device(ns).flush(OpId::new(self.key, index).0)
    }

    /// The FLUSH of the command in a slot has come back. Says whether its success is in doubt: then
    /// the slot waits, and [`doubts_over`](Self::doubts_over) goes on with it.
    pub(super) fn flush_ended(&mut self, index: u16, ok: bool, env: &mut E) -> bool {
        let slot = &mut self.slots[index];
        let ns = usize::from(slot.ns);
        let state = &self.namespaces.at(ns).state;
        if !ok {
            state.flushes.fail();
        }
        let Some(ticket) = slot.flush.take() else { return false };
        let doubt = state.flushes.end(ticket, || shared(env, |s| s.flushes_accounted(ns)));
        slot.doubt = doubt;
        // Nobody is left to answer at the end of a connection, and its gate believes nothing.
        let believed = !ok || self.is_closing() || probe::planted(Plant::T29BelieveAtOnce);
        if believed || !self.is_in_doubt(index, env) {
            return false;
        }
        probe::hit(Rare::FlushInDoubt);
        self.slots[index].stage = Stage::InDoubt;
        true
    }

    /// Whether the success of a FLUSH is in doubt still; the connection is woken if so.
    fn is_in_doubt(&self, index: u16, env: &mut E) -> bool {
        let slot = &self.slots[index];
        let (ns, conn) = (usize::from(slot.ns), self.id);
        let flushes = &self.namespaces.at(ns).state.flushes;
        slot.doubt
            .is_some_and(|doubt| flushes.wait(doubt, || shared(env, |s| s.await_flushes(ns, conn))))
    }

    /// FLUSHes of other connections have been accounted for.
    pub(super) fn doubts_over(&mut self, env: &mut E, out: &mut Outbox<E::Buf>) {
        for index in self.slots.indices(|slot| slot.stage == Stage::InDoubt) {
            if self.is_in_doubt(index, env) {
                continue;
            }
            let slot = &mut self.slots[index];
            slot.stage = Stage::Gate;
            if !slot.ordered {
                self.plain_flush_believed(index, out);
                continue;
            }
            match self.stream.take_if(|_| !slot.refused) {
                Some(mut stream) => {
                    self.flush_judged(&mut stream, index, true);
                    self.stream = Some(stream);
                }
                None => self.answer(index, overtaken(), 0, out),
            }
        }
        self.settled(env, out);
    }

    /// The stream is given back: what of it is in doubt has no gate to go back to.
    pub(super) fn doubts_orphaned(&mut self) {
        let in_doubt = |slot: &Slot<E::Buf>| slot.stage == Stage::InDoubt && slot.ordered;
        for (_, slot) in self.slots.iter_mut().filter(|(_, slot)| in_doubt(slot)) {
            slot.refused = true;
        }
    }

    /// A plain FLUSH (or one for FUA) has succeeded, and all others are accounted for: it is
    /// good, unless one that failed has lost what it covers.
    pub(super) fn plain_flush_believed(&mut self, index: u16, out: &mut Outbox<E::Buf>) {
        let ns = usize::from(self.slots[index].ns);
        let status = if self.has_lost(index, ns) { Status::WRITE_FAULT } else { Status::SUCCESS };
        self.answer(index, status, 0, out);
    }

    /// The FLUSH of an ordered request has come back.
    #[inline(never)]
    pub(super) fn ordered_flush_ended(
        &mut self,
        stream: &mut Stream<E>,
        index: u16,
        ok: bool,
        env: &mut E,
    ) {
        if self.flush_ended(index, ok, env) {
            return;
        }
        if !ok {
            probe::hit(Rare::FlushFailed);
            stream.own_flush_failed(usize::from(self.slots[index].ns));
        }
        self.flush_judged(stream, index, ok);
    }

    /// Tells the gate how the FLUSH of an ordered request ended, after whether another
    /// connection's has failed (T22).
    fn flush_judged(&mut self, stream: &mut Stream<E>, index: u16, ok: bool) {
        stream.see_flush_failures(&self.namespaces);
        stream.gate.flushed(Ticket(u32::from(index)), ok, &mut stream.steps);
    }
}

//! Rio's engine. It sends everything at once, each request with an ordering attribute. The targets
//! log the attributes. The initiator completes in order (Rio paper §4), and sends again the
//! requests that a target has lost (P7).
//!
//! # Why a replay reports no group as durable too early
//!
//! Group v *covers* the groups before it if everything up to v is durable once everything up to v
//! is complete: v carries a FLUSH for each drive with unflushed writes, or there is no such drive.
//! A target that crashes loses completed writes. So the engine must remember that it has reported
//! them complete, and yet must not rely on it:
//!
//! - A flush entry that is complete was persisted before its completion (T7). The log shows it, and
//!   with it all entries that it covers. None of them is sent again.
//! - A flush entry that is not complete is on the list, too, behind the writes that it is to cover.
//!   It is sent again behind them. If it was never sent, it goes behind all replays. Its group
//!   becomes complete, and so covers the others, only when the entry ends. The gate delays this end
//!   until the writes before it, sent again, have ended (T2).
//! - A write that is complete and not durable is sent again although no caller waits for it. Its
//!   end changes no mark.
//!
//! A log that does not show an entry that it persisted would break the first point. No log does
//! this, but a small rule makes the engine safe even then: nothing becomes durable, and nothing is
//! released, at or beyond a request that is being replayed.

use alloc::vec::Vec;

use super::base::{Base, HasBase};
use super::credits::Credits;
use super::sent::SentRequests;
use super::{
    Bound, Capabilities, Cause, Dispatch, Engine, Failure, Limits, Marks, Payload, Refusal,
    RequestId, Write,
};
use crate::attribute::{Attribute, Kind, Seq};
use crate::probe::{self, Plant, Rare};
use crate::topology::Topology;

/// The capabilities of the engine.
pub(super) const CAPABILITIES: Capabilities = Capabilities {
    keeps_order: true,
    completes_durable: false,
    keeps_log: true,
    needs_binding: true,
    can_replay: true,
};

/// The `rio` engine of one stream.
#[derive(Debug)]
pub struct Rio<P> {
    base: Base<P>,
    credits: Credits,
    /// How many entries the group being shaped has for each server's log.
    entries: Vec<u32>,
    /// The requests that were sent to each server.
    sent: Vec<SentRequests>,
    /// The last group with a joint FLUSH.
    flushed: Seq,
    /// A flush that the engine itself has added (a *forced* flush), until it is released. Only this
    /// flush may use the slots reserved for flushes, so there is one at a time (T13).
    forced: Option<Seq>,
    /// The last group that the caller wants durable.
    wanted: Seq,
    /// The tag of the last group. A forced flush has the same tag, so that recovery reports that tag
    /// also if the flush is the last group of the prefix.
    tag: u64,
    /// How many flushes were forced. For reports.
    forced_count: u64,
    /// How many requests were queued to be sent again. For reports.
    replayed: u64,
}

/// Whether a group flushes, and at whose request.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Flush {
    No,
    /// The caller wants the group durable.
    Asked,
    /// The engine needs space.
    Forced,
}

impl<P: Payload> Rio<P> {
    /// The engine of a new stream.
    #[must_use]
    pub fn new(topology: Topology, limits: Limits) -> Self {
        Self {
            credits: Credits::new(&topology),
            entries: alloc::vec![0; topology.servers().len()],
            sent: topology.servers().iter().map(|server| SentRequests::new(server.slots)).collect(),
            flushed: limits.start,
            forced: None,
            wanted: limits.start,
            tag: 0,
            forced_count: 0,
            replayed: 0,
            base: Base::new(topology, limits),
        }
    }

    /// How many flushes the engine put in because the caller asked for none (T1).
    #[must_use]
    pub fn forced_flushes(&self) -> u64 {
        self.forced_count
    }

    /// Whether a volatile drive has a write that no FLUSH covers.
    fn any_dirty(&self) -> bool {
        self.base.dirty.iter().any(Option::is_some)
    }

    /// Admits the group that was shaped and numbered: opens it in the window, and queues its
    /// requests. Returns its seq.
    fn commit(&mut self, flush: Flush, bytes: u64) -> Seq {
        let base = &mut self.base;
        let mut requests = base.shaped.len() as u32;
        if probe::planted(Plant::T3NotCounted) {
            let flushes = base.shaped.iter().filter(|id| base.request(**id).kind == Kind::Flush);
            requests -= (flushes.count() as u32).min(requests - 1);
        }
        let servers = || base.shaped.iter().map(|id| base.request(*id).server);
        if servers().zip(servers().skip(1)).any(|(one, next)| one != next) {
            probe::hit(Rare::GroupAcrossServers);
        }
        let seq = base.window.last().next();
        base.note_dirty(seq);
        if flush != Flush::No {
            base.dirty.fill(None);
            self.flushed = seq;
        }
        // A group covers all before it if no drive is dirty: without volatile caches, or after a
        // FLUSH of all, a complete group is durable.
        let covers = base.dirty.iter().all(Option::is_none);
        let opened = match flush {
            // No caller waits for this flush, so it holds up no completion.
            Flush::Forced => base.window.add_internal_group(requests),
            Flush::No | Flush::Asked => base.window.add_group(requests, covers, bytes),
        };
        debug_assert_eq!(opened, seq);
        if !base.merge_into_tail() {
            base.enqueue();
        }
        debug_assert!(self.credits.are_kept(|i| self.used(i)), "T13: within the partitions");
        seq
    }

    /// Adds a flush of the engine itself, if drives have unflushed writes and no such flush is in
    /// flight. On drives without PLP, no group is released before it is flushed. So if the caller
    /// never flushes, the engine does it before the log or the replay memory is full. Writes continue
    /// meanwhile (T1, T14).
    fn force_flush(&mut self) {
        if self.forced.is_some() || self.base.failure.is_some() || !self.any_dirty() {
            return;
        }
        probe::hit(Rare::ForcedFlush);
        let seq = self.base.window.last().next();
        self.base.add_joint_flush(seq, self.tag);
        // As many entries as there are dirty members at most: they fit the reserve.
        if self.base.number().is_ok() {
            self.forced = Some(seq);
            self.forced_count += 1;
            self.commit(Flush::Forced, 0);
        }
    }

    /// Frees everything that released groups have used: requests, log slots, replay memory, and the
    /// slots reserved for a forced flush.
    fn reclaim(&mut self) {
        let released = self.base.window.released();
        for sent in &mut self.sent {
            sent.release(&mut self.base, released);
        }
        self.base.window.forget(released);
        if self.forced.is_some_and(|seq| seq <= released) {
            self.forced = None;
        }
        if self.wanted > self.flushed {
            // The caller has asked for a flush while an earlier forced flush used the reserved slots.
            self.force_flush();
        }
    }

    /// Reports to the window how far the replays are.
    fn note_replays(&mut self) {
        let oldest = self.sent.iter().filter_map(SentRequests::oldest_replay);
        let oldest = oldest.map(|id| self.base.request(id).seq).min();
        self.base.window.replay_from(oldest);
    }

    /// Stops the stream after a failure: nothing is sent again either (P6).
    fn stop(&mut self) {
        for sent in &mut self.sent {
            sent.stop_replay(&mut self.base);
        }
        self.note_replays();
    }

    /// Slots of a server's log that are taken, or will be.
    fn used(&self, server: usize) -> usize {
        self.base.queues[server].len() + self.sent[server].len()
    }

    /// Whether half of a log or half of the replay memory is used. Then it is time for a flush.
    fn is_half_used(&self) -> bool {
        self.credits.half_used(|i| self.used(i))
            || self.base.window.kept_bytes() * 2 >= self.base.limits.kept_bytes_max
    }

    /// Turns the group into numbered requests, with its joint FLUSH if it is to be durable, and
    /// checks that each log has space for them. If it has not, the group is refused whole.
    fn shape(&mut self, writes: &mut [Write<P>], tag: u64, durable: bool) -> Result<(), Refusal> {
        let base = &mut self.base;
        let seq = base.window.last().next();
        base.shape(writes, seq, tag)?;
        if durable {
            base.add_joint_flush(seq, tag);
        }
        base.number()?;
        self.entries.fill(0);
        for id in &self.base.shaped {
            self.entries[usize::from(self.base.request(*id).server)] += 1;
        }
        if let Err(refusal) = self.credits.check(&self.entries, |i| self.used(i)) {
            self.base.unshape();
            return Err(refusal);
        }
        Ok(())
    }
}

impl<P> HasBase<P> for Rio<P> {
    #[inline]
    fn base(&self) -> &Base<P> {
        &self.base
    }

    #[inline]
    fn base_mut(&mut self) -> &mut Base<P> {
        &mut self.base
    }
}

impl<P: Payload> Engine<P> for Rio<P> {
    fn admit(&mut self, writes: &mut [Write<P>], tag: u64, durable: bool) -> Result<Seq, Refusal> {
        let bytes = self.base.check_group(writes, durable)?;
        if self.is_half_used() {
            self.force_flush();
        }
        if !self.base.has_space(bytes) {
            // All kept memory may be of groups that were never flushed.
            self.force_flush();
            return Err(Refusal::Full(Bound::Memory));
        }
        if let Err(refusal) = self.shape(writes, tag, durable) {
            if matches!(refusal, Refusal::Full(_)) {
                self.force_flush();
            }
            return Err(refusal);
        }
        self.tag = tag;
        Ok(self.commit(if durable { Flush::Asked } else { Flush::No }, bytes))
    }

    fn next(&mut self, server: u16) -> Option<Dispatch> {
        let at = usize::from(server);
        let (id, ordinal) = self.sent[at].next(&mut self.base.queues[at])?;
        Some(Dispatch { id, ordered: Some((ordinal, self.base.window.released())) })
    }

    fn done(&mut self, id: RequestId, result: Result<(), Cause>) {
        let request = self.base.request_mut(id);
        let (first, last) = (request.seq, request.seq_end());
        let server = usize::from(request.server);
        let is_replay = core::mem::replace(&mut request.is_replayed, false);
        let first_time = self.base.end(id);
        if first_time {
            self.sent[server].count_complete();
        }
        if let Err(cause) = result {
            self.base.fail(id, cause);
            self.stop();
        }
        if is_replay {
            self.sent[server].replay_ended(&self.base);
            self.note_replays();
        }
        // A request that was complete before, and was lost with its target, was counted then (T6).
        if first_time && result.is_ok() {
            self.base.window.request_done(first, last);
        }
        if probe::planted(Plant::T14ForgetEarly) {
            self.sent[server].drop_one(&mut self.base, id);
        }
    }

    fn suspend(&mut self, server: u16) -> bool {
        if self.base.failure.is_some() {
            return false;
        }
        self.sent[usize::from(server)].suspend();
        true
    }

    fn resume(&mut self, server: u16, durable: &mut dyn FnMut(Seq, u16) -> bool) {
        // Entries that the marks sent so far have released are gone from the server's log. Such an
        // entry may be durable although the log does not show it.
        self.reclaim();
        let Self { base, sent, .. } = self;
        let sent = &mut sent[usize::from(server)];
        debug_assert!(sent.is_suspended() || base.failure.is_some(), "resumed, never suspended");
        if base.failure.is_none() {
            // Called for a request whose completion was lost with the connection.
            sent.resume(base, durable, |base, id| {
                base.end(id);
                let request = base.request(id);
                let (first, last) = (request.seq, request.seq_end());
                base.window.request_done(first, last);
            });
            self.replayed += sent.replays() as u64;
        }
        self.note_replays();
    }

    fn visit_sent(&self, server: u16, visit: &mut dyn FnMut(&Attribute)) {
        for id in self.sent[usize::from(server)].sent() {
            visit(&self.base.request(id).attribute(0));
        }
    }

    fn replayed(&self) -> u64 {
        self.replayed
    }

    fn replaying(&self, server: u16) -> bool {
        self.sent[usize::from(server)].oldest_replay().is_some()
    }

    fn poll(&mut self) -> Marks {
        let marks = self.base.window.deliver();
        self.reclaim();
        marks
    }

    fn ask_durable(&mut self, seq: Seq) {
        self.wanted = self.wanted.max(seq.min(self.base.window.last()));
        if self.wanted > self.flushed {
            self.force_flush();
        }
    }

    fn kept_after(&self) -> Seq {
        if probe::planted(Plant::T14ForgetEarly) {
            return self.base.window.complete();
        }
        self.base.window.forgotten()
    }

    fn poison(&mut self, failure: Failure) {
        self.base.poison(failure);
        self.stop();
    }

    fn writes_pending(&self, lba: u64, blocks: u32) -> bool {
        let Self { base, sent, .. } = self;
        if base.incomplete() == 0 {
            return false;
        }
        let mut pending = false;
        base.topology.map(lba, blocks, |extent| {
            let server = usize::from(base.topology.member(extent.member).server);
            pending |= sent[server].touches(base, &extent)
                || base.queues[server].iter().any(|id| base.request(*id).touches(&extent));
        });
        pending
    }

    fn is_idle(&self) -> bool {
        self.base.incomplete() == 0 && self.sent.iter().all(|sent| sent.oldest_replay().is_none())
    }
}

//! Engine `rio`: the method of the Rio paper (§4).
//!
//! - The engine sends all requests at once, each with an ordering attribute. The targets log the
//!   attributes.
//! - The engine reports groups complete in order, whatever the order of the completions.
//! - When a target has lost requests, the engine sends them again (promise P7).
//!
//! # Why a replay reports no group as durable too early
//!
//! A group *covers* the groups before it if its completion makes them durable: the group carries a
//! FLUSH for each drive with unflushed writes, or there is no such drive.
//!
//! A target that crashes loses completed writes that were not flushed. The engine has reported them
//! complete already, and still must not report them durable. Three kinds of requests can be on the
//! list of the target:
//!
//! - A flush entry that is complete. The target persisted it before it sent the completion (trap
//!   T7). So the target's log shows this entry, and all entries that it covers, as durable. None of
//!   them is sent again.
//! - A flush entry that is not complete. It is sent again behind the writes that it must cover. Its
//!   group covers the others only when the entry ends. The gate delays that end until the replayed
//!   writes before it have ended (trap T2).
//! - A write that is complete and not durable. It is sent again, although the caller does not wait
//!   for it. Its end changes no mark.
//!
//! The first case relies on the target's log: it must show each entry that it persisted. The engine
//! has a second defence, for a log that would not: no group at or after a request that is being
//! replayed becomes durable or released.

use alloc::vec::Vec;

use super::base::{Base, has_base};
use super::credits::Credits;
use super::sent::{GivenOut, SentRequests};
use super::{
    Bound, Capabilities, Cause, Dispatch, Engine, Failure, Limits, Marks, OrderedDispatch, Payload,
    Refusal, RequestId, Write,
};
use crate::attribute::{Attribute, GROUP_ENTRIES_MAX, Kind, Seq};
use crate::probe::{self, Plant, Rare};
use crate::topology::Topology;
use crate::write_order::DriveOrder;

/// The capabilities of the engine.
pub(super) const CAPABILITIES: Capabilities = Capabilities {
    keeps_order: true,
    is_serial: false,
    completes_durable: false,
    keeps_log: true,
    needs_binding: true,
    orders_at_target: true,
    can_replay: true,
    drive_order: DriveOrder::None,
    queues_per_server: 1,
};

/// The `rio` engine of one stream.
#[derive(Debug)]
pub struct Rio<P> {
    base: Base<P>,
    credits: Credits,
    /// For each server, the number of entries that the group in `base.shaped` has for its log.
    new_entries: Vec<u32>,
    /// For each server, the requests that were sent to it.
    sent: Vec<SentRequests>,
    /// The last group with a joint FLUSH.
    last_flush: Seq,
    /// The group of the flush that the engine itself has added (a *forced* flush), until that group
    /// is released. Only this flush may use the slots reserved for flushes, so there is at most one
    /// at a time (trap T13).
    forced_flush: Option<Seq>,
    /// The last group that the caller wants durable.
    wanted_durable: Seq,
    /// The caller's tag of the last group. A forced flush has the same tag, so that recovery
    /// reports that tag also if the flush is the last group of the prefix.
    last_tag: u64,
    /// The number of forced flushes. For reports.
    forced_flush_count: u64,
    /// The number of requests that were queued to be sent again. For reports.
    replayed_count: u64,
}

/// Whether a group flushes, and at whose request.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum GroupFlush {
    /// The group has no joint FLUSH.
    No,
    /// The caller wants the group durable.
    Requested,
    /// The engine needs space in a log or in the replay memory.
    Forced,
}

impl<P: Payload> Rio<P> {
    /// The engine of a new stream.
    #[must_use]
    pub fn new(topology: Topology, limits: Limits) -> Self {
        Self {
            credits: Credits::new(&topology),
            new_entries: alloc::vec![0; topology.servers().len()],
            sent: topology.servers().iter().map(|server| SentRequests::new(server.slots)).collect(),
            last_flush: limits.start,
            forced_flush: None,
            wanted_durable: limits.start,
            last_tag: 0,
            forced_flush_count: 0,
            replayed_count: 0,
            base: Base::new(topology, limits),
        }
    }

    /// The number of flushes that the engine added because the caller had asked for none.
    #[must_use]
    pub fn forced_flush_count(&self) -> u64 {
        self.forced_flush_count
    }

    /// Whether a volatile drive has a write that no FLUSH covers.
    fn is_any_drive_dirty(&self) -> bool {
        self.base.dirty.iter().any(Option::is_some)
    }

    /// Admits the group in `base.shaped`: adds it to the window, and queues its requests. `bytes` is
    /// the size of its payload, which the replay memory keeps. Returns the seq of the group.
    fn admit_shaped(&mut self, flush: GroupFlush, bytes: u64) -> Seq {
        let base = &mut self.base;
        let mut request_count = base.shaped.len() as u32;
        if probe::is_bug_planted(Plant::T3NotCounted) {
            let flushes = base.shaped.iter().filter(|id| base.request(**id).kind == Kind::Flush);
            request_count -= (flushes.count() as u32).min(request_count - 1);
        }
        let servers = || base.shaped.iter().map(|id| base.request(*id).server);
        if servers().zip(servers().skip(1)).any(|(server, next)| server != next) {
            probe::count_rare(Rare::GroupAcrossServers);
        }
        let seq = base.window.last().next();
        base.note_dirty(seq);
        if flush != GroupFlush::No {
            base.dirty.fill(None);
            self.last_flush = seq;
        }
        // Without a dirty drive, a complete group is durable, and so are all groups before it:
        // either no drive has a volatile cache, or this group flushes all of them.
        let covers = base.dirty.iter().all(Option::is_none);
        let added = match flush {
            // The caller does not wait for this flush, so it must not delay the complete mark.
            GroupFlush::Forced => base.window.add_internal_group(request_count),
            GroupFlush::No | GroupFlush::Requested => {
                base.window.add_group(request_count, covers, bytes)
            }
        };
        debug_assert_eq!(added, seq);
        if !base.merge_into_tail() {
            base.enqueue();
        }
        debug_assert!(
            self.credits.are_respected(|server| self.used_slots(server)),
            "the entries fit into the logs"
        );
        seq
    }

    /// Adds a flush of the engine itself, if drives have unflushed writes and no forced flush is in
    /// flight. Writes continue meanwhile.
    ///
    /// On drives without power-loss protection, no group is released before it is flushed. A caller
    /// that never flushes would fill the log and the replay memory. So the engine flushes before
    /// they are full (traps T1, T14).
    fn force_flush(&mut self) {
        if self.forced_flush.is_some() || self.base.failure.is_some() || !self.is_any_drive_dirty()
        {
            return;
        }
        probe::count_rare(Rare::ForcedFlush);
        let seq = self.base.window.last().next();
        self.base.add_joint_flush(seq, self.last_tag);
        // The flush has at most one entry for each dirty member, so the reserved slots suffice. It
        // also has far fewer entries than a group may have, so numbering them cannot fail.
        if self.base.number_requests().is_ok() {
            self.forced_flush = Some(seq);
            self.forced_flush_count += 1;
            self.admit_shaped(GroupFlush::Forced, 0);
        }
    }

    /// Frees what released groups have used: requests, log slots, replay memory, and the slots that
    /// are reserved for a forced flush. If the caller waits for a flush that had no slots before,
    /// adds it now.
    fn free_released(&mut self) {
        let released = self.base.window.released();
        for sent in &mut self.sent {
            sent.free_released(&mut self.base, released);
        }
        self.base.window.free_groups(released);
        if self.forced_flush.is_some_and(|seq| seq <= released) {
            self.forced_flush = None;
        }
        let has_unflushed_wish = self.wanted_durable > self.last_flush;
        if has_unflushed_wish {
            // The caller asked for a flush while an earlier forced flush used the reserved slots.
            self.force_flush();
        }
    }

    /// Gives the window the seq of the oldest group that is being replayed, if there is one.
    fn update_oldest_replay(&mut self) {
        let oldest_of_each = self.sent.iter().filter_map(SentRequests::oldest_replay);
        let oldest = oldest_of_each.map(|id| self.base.request(id).seq).min();
        self.base.window.set_oldest_replay(oldest);
    }

    /// Ends all replays after a failure, because a failed stream sends nothing again.
    fn stop_replays(&mut self) {
        for sent in &mut self.sent {
            sent.stop_replay(&mut self.base);
        }
        self.update_oldest_replay();
    }

    /// The number of slots of a server's log that the stream takes: by requests that were sent, and
    /// by requests that wait to be sent.
    fn used_slots(&self, server: usize) -> usize {
        self.base.queues[server].len() + self.sent[server].len()
    }

    /// Whether half of a log or half of the replay memory is used. Then it is time for a flush.
    fn is_half_full(&self) -> bool {
        self.credits.is_any_log_half_full(|server| self.used_slots(server))
            || self.base.window.kept_bytes() * 2 >= self.base.limits.kept_bytes_max
    }

    /// Turns a group into numbered requests in `base.shaped`. If `durable` is set, the group gets a
    /// joint FLUSH.
    ///
    /// # Errors
    /// The group has too many entries, or a log has no space for them. The group is refused whole.
    fn shape(&mut self, writes: &mut [Write<P>], tag: u64, durable: bool) -> Result<(), Refusal> {
        let base = &mut self.base;
        let seq = base.window.last().next();
        base.shape(writes, seq, tag)?;
        if durable {
            base.add_joint_flush(seq, tag);
        }
        base.number_requests()?;
        self.new_entries.fill(0);
        for id in &self.base.shaped {
            self.new_entries[usize::from(self.base.request(*id).server)] += 1;
        }
        let has_space =
            self.credits.check_space(&self.new_entries, |server| self.used_slots(server));
        if let Err(refusal) = has_space {
            self.base.discard_shaped();
            return Err(refusal);
        }
        Ok(())
    }
}

has_base!(Rio);

impl<P: Payload> Engine<P> for Rio<P> {
    fn admit(&mut self, writes: &mut [Write<P>], tag: u64, durable: bool) -> Result<Seq, Refusal> {
        let bytes = self.base.check_group(writes, durable)?;
        if self.is_half_full() {
            self.force_flush();
        }
        if !self.base.has_space(bytes) {
            // The groups that fill the replay memory may never have been flushed.
            self.force_flush();
            return Err(Refusal::Full(Bound::Memory));
        }
        if let Err(refusal) = self.shape(writes, tag, durable) {
            if matches!(refusal, Refusal::Full(_)) {
                self.force_flush();
            }
            return Err(refusal);
        }
        self.last_tag = tag;
        let flush = if durable { GroupFlush::Requested } else { GroupFlush::No };
        Ok(self.admit_shaped(flush, bytes))
    }

    fn check_write(&self, lba: u64, blocks: u32, durable: bool) -> Result<(), Refusal> {
        let base = &self.base;
        base.check_write(lba, blocks)?;
        let mut new_entries = alloc::vec![0; base.topology.servers().len()];
        let mut is_written = alloc::vec![false; base.topology.members().len()];
        base.topology.for_each_extent(lba, blocks, |extent| {
            new_entries[usize::from(base.topology.member(extent.member).server)] += 1;
            is_written[usize::from(extent.member.0)] = true;
        });
        if durable {
            // Each drive with a volatile cache may be dirty by then, and need a flush entry.
            for (member, is_written) in base.topology.members().iter().zip(is_written) {
                new_entries[usize::from(member.server)] +=
                    u32::from(member.volatile && !is_written);
            }
        }
        if new_entries.iter().sum::<u32>() > u32::from(GROUP_ENTRIES_MAX) {
            return Err(Refusal::TooManyEntries);
        }
        self.credits.check_space(&new_entries, |_| 0)
    }

    fn next_request(&mut self, server: u16) -> Option<Dispatch> {
        let server = usize::from(server);
        let queue = &mut self.base.queues[server];
        let GivenOut { id, ordinal } = self.sent[server].next_request(queue)?;
        let released = self.base.window.released();
        Some(Dispatch { id, ordered: Some(OrderedDispatch { ordinal, released }) })
    }

    fn on_request_done(&mut self, id: RequestId, result: Result<(), Cause>) {
        let request = self.base.request_mut(id);
        let (first, last) = (request.seq, request.seq_end());
        let server = usize::from(request.server);
        let is_replay = core::mem::replace(&mut request.is_replayed, false);
        let is_first_completion = self.base.mark_complete(id);
        if is_first_completion {
            self.sent[server].count_complete();
        }
        if let Err(cause) = result {
            self.base.poison_by_request(id, cause);
            self.stop_replays();
        }
        if is_replay {
            self.sent[server].on_replay_ended(&self.base);
            self.update_oldest_replay();
        }
        // The window counts a request once. If the request was complete before its target lost it,
        // the window counted it then.
        if is_first_completion && result.is_ok() {
            self.base.window.count_request(first, last);
        }
        if probe::is_bug_planted(Plant::T14ForgetEarly) {
            self.sent[server].free_unreleased(&mut self.base, id);
        }
    }

    fn suspend(&mut self, server: u16) -> bool {
        if self.base.failure.is_some() {
            return false;
        }
        self.sent[usize::from(server)].suspend();
        true
    }

    fn resume(&mut self, server: u16, is_durable: &mut dyn FnMut(Seq, u16) -> bool) {
        // The server's log does not show entries that a released mark has freed, although they are
        // durable. So the requests of released groups must leave the list first.
        self.free_released();
        let Self { base, sent, .. } = self;
        let sent = &mut sent[usize::from(server)];
        debug_assert!(sent.is_suspended() || base.failure.is_some(), "resumed, never suspended");
        if base.failure.is_none() {
            sent.resume(base, is_durable, |base, id| {
                base.mark_complete(id);
                let request = base.request(id);
                let (first, last) = (request.seq, request.seq_end());
                base.window.count_request(first, last);
            });
            self.replayed_count += sent.replay_count() as u64;
        }
        self.update_oldest_replay();
    }

    fn visit_sent(&self, server: u16, visit: &mut dyn FnMut(&Attribute)) {
        for id in self.sent[usize::from(server)].iter() {
            visit(&self.base.request(id).attribute(0));
        }
    }

    fn replayed_count(&self) -> u64 {
        self.replayed_count
    }

    fn is_replaying(&self, server: u16) -> bool {
        self.sent[usize::from(server)].oldest_replay().is_some()
    }

    fn poll(&mut self) -> Marks {
        let marks = self.base.window.deliver();
        self.free_released();
        marks
    }

    fn ask_durable(&mut self, seq: Seq) {
        self.wanted_durable = self.wanted_durable.max(seq.min(self.base.window.last()));
        if self.wanted_durable > self.last_flush {
            self.force_flush();
        }
    }

    fn payload_freed_up_to(&self) -> Seq {
        if probe::is_bug_planted(Plant::T14ForgetEarly) {
            return self.base.window.complete();
        }
        self.base.window.freed_up_to()
    }

    fn poison(&mut self, failure: Failure) {
        self.base.poison(failure);
        self.stop_replays();
    }

    fn has_pending_write(&self, lba: u64, blocks: u32) -> bool {
        let Self { base, sent, .. } = self;
        if base.incomplete_count() == 0 {
            return false;
        }
        let mut is_pending = false;
        base.topology.for_each_extent(lba, blocks, |extent| {
            let server = usize::from(base.topology.member(extent.member).server);
            is_pending |= sent[server].has_incomplete_in(base, &extent)
                || base.queues[server].iter().any(|id| base.request(*id).touches(&extent));
        });
        is_pending
    }

    fn is_idle(&self) -> bool {
        self.base.incomplete_count() == 0
            && self.sent.iter().all(|sent| sent.oldest_replay().is_none())
    }
}

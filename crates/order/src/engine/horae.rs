//! Engine `horae`: the method of HORAE (OSDI '20), as the Rio paper extends it to NVMe-oF (§2.2,
//! §6.1).
//!
//! ```text
//! control path:  ordering metadata of a group --> log, fence --> answer, then the next group's
//! data path:     writes of the group, as soon as the answer is there, in any order
//! joint FLUSH:   all dirty drives, in parallel --> `flushed` to all logs --> durable
//! ```
//!
//! - *Control path.* The metadata of a group is durable in the targets' logs before any of its data
//!   is sent. The path is synchronous: the metadata of one group of the stream is in flight at a
//!   time. All entries of the group go side by side.
//! - *Data path.* The data needs no order: the requests are plain writes.
//! - *Joint FLUSH.* It covers the complete groups. It goes to all drives that they have written,
//!   and then each log with entries of these groups records `flushed`: up to there all groups are
//!   durable. Only after that the groups count as durable, also on drives without a volatile cache.
//! - *Recovery* rolls back all groups behind `flushed`. It is the recovery of the ordering log, which
//!   finds no entry behind the mark durable.
//! - *Space.* The log's head moves with `flushed`. When half of a log is used, the engine begins a
//!   joint FLUSH by itself.
//! - *Updates in place* are redirected to the prepare area, if the volume has one. Recovery rolls
//!   those behind `flushed` back, because their homes are as they were. A commit writes the others
//!   home. The log's head then stays before the oldest update that is not home.
//! - Without a prepare area updates in place are written home at once, and recovery lists those
//!   behind `flushed`, as with engine `rio` (trap T11).
//!
//! An extension of redirected blocks is redirected, too. Any other write of such blocks waits until
//! they are home: its entry follows when no log has theirs any more.

mod commit;

use alloc::collections::VecDeque;
use alloc::vec::Vec;

use super::base::{Base, has_base};
use super::credits::Credits;
use super::redirect::{Redirection, Redirects};
use super::{
    Bound, Capabilities, Cause, Dispatch, Engine, Failure, Limits, Marks, OrderedDispatch, Path,
    Payload, Refusal, RequestId, Write,
};
use crate::attribute::{Flags, GROUP_ENTRIES_MAX, Kind, Member, Seq};
use crate::gate::Filter;
use crate::probe::{self, Plant, Rare};
use crate::topology::Topology;
use crate::write_order::DriveOrder;
use commit::Commit;

/// The capabilities of the engine.
pub(super) const CAPABILITIES: Capabilities = Capabilities {
    keeps_order: true,
    is_serial: false,
    completes_durable: false,
    keeps_log: true,
    needs_binding: true,
    orders_at_target: false,
    can_replay: false,
    drive_order: DriveOrder::None,
    queues_per_server: 1,
};

/// The `horae` engine of one stream.
#[derive(Debug)]
pub struct Horae<P> {
    base: Base<P>,
    credits: Credits,
    /// For each server, the number of entries that the group in `base.shaped` has for its log.
    new_entries: Vec<u32>,
    /// For each server, the groups of the entries that take slots of its log, oldest first.
    slots: Vec<VecDeque<Seq>>,
    /// For each server, the last ordinal that was given to an entry.
    last_ordinal: Vec<u32>,
    /// The groups that wait for the control path, oldest first.
    waiting: VecDeque<Group>,
    /// The group whose metadata is on the control path.
    ordering: Option<Ordering>,
    /// The requests whose metadata is durable, and which wait for earlier data of the same blocks,
    /// oldest first.
    held: Vec<RequestId>,
    /// The data of the groups whose metadata is durable, until it is complete.
    data_blocks: Filter,
    flush: JointFlush,
    redirects: Redirects<P>,
    commit: Commit,
    /// Empty lists for [`Group::data`], so that their memory is used again.
    spare_lists: Vec<Vec<RequestId>>,
}

/// A group that was admitted, and whose data is not sent.
#[derive(Debug)]
struct Group {
    seq: Seq,
    tag: u64,
    /// Its requests, until they are sent.
    data: Vec<RequestId>,
    /// Whether the group has no writes. It still has one entry in a log.
    is_empty: bool,
}

/// The metadata of a group on the control path.
#[derive(Debug)]
struct Ordering {
    group: Group,
    /// The number of entries that are not confirmed.
    outstanding: u32,
}

/// The joint FLUSH. At most one is in flight.
#[derive(Debug, Default)]
struct JointFlush {
    /// The last group that the caller wants durable.
    wanted: Seq,
    /// The last group that is to become durable so that its slots become free; `None` if there is
    /// enough space.
    for_space: Option<Seq>,
    in_flight: Option<FlushInFlight>,
}

/// A joint FLUSH in flight.
#[derive(Clone, Copy, Debug)]
struct FlushInFlight {
    /// The last group that it covers.
    covers_up_to: Seq,
    /// The number of requests of the current step that have not ended.
    outstanding: u32,
    step: FlushStep,
    /// Whether the entries of the groups stay in the logs, because redirected updates are not home.
    keeps_entries: bool,
}

/// The steps of a joint FLUSH.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum FlushStep {
    /// The FLUSHes of the drives.
    Drives,
    /// The records of `flushed` in the logs.
    Logs,
}

impl<P: Payload> Horae<P> {
    /// The engine of a new stream.
    #[must_use]
    pub fn new(topology: Topology, limits: Limits) -> Self {
        let server_count = topology.servers().len();
        let slots: usize = topology.servers().iter().map(|server| server.slots as usize).sum();
        Self {
            credits: Credits::without_reserve(&topology),
            new_entries: alloc::vec![0; server_count],
            slots: (0..server_count).map(|_| VecDeque::new()).collect(),
            last_ordinal: alloc::vec![0; server_count],
            waiting: VecDeque::new(),
            ordering: None,
            held: Vec::new(),
            data_blocks: Filter::new(slots),
            flush: JointFlush { wanted: limits.start, ..JointFlush::default() },
            redirects: Redirects::new(&topology, limits.prepare, limits.start),
            commit: Commit::new(limits.start, topology.members().len()),
            spare_lists: Vec::new(),
            base: Base::new(topology, limits),
        }
    }

    /// Puts the metadata of the next group onto the control path, if it is free.
    fn order_next(&mut self) {
        if self.ordering.is_some() || self.base.failure.is_some() {
            return;
        }
        let Some(group) = self.waiting.front() else { return };
        if let Some(seq) = self.redirected_under(group) {
            // A write home beside a redirected update could be overwritten by it, now or by
            // recovery.
            return self.want_home(seq);
        }
        let Some(group) = self.waiting.pop_front() else { return };
        debug_assert!(self.base.shaped.is_empty());
        for id in &group.data {
            self.base.add_entry(*id);
        }
        if group.is_empty {
            // The group must be in a log, so that recovery finds it and its tag.
            self.base.add_flush(Member(0), group.seq, group.tag);
            let id = self.base.shaped[0];
            let entry = self.base.request_mut(id);
            (entry.path, entry.num) = (Path::Control, 1);
        }
        let outstanding = self.base.shaped.len() as u32;
        // The data of earlier groups does not delay the metadata.
        self.base.enqueue_first();
        self.ordering = Some(Ordering { group, outstanding });
        if probe::is_bug_planted(Plant::HoraeDataBeforeMetadata) {
            self.send_data_early();
        }
    }

    /// The newest earlier group with a redirected update under a write of `group` that goes home.
    fn redirected_under(&self, group: &Group) -> Option<Seq> {
        if self.redirects.is_empty() {
            return None;
        }
        let homes = group.data.iter().map(|id| self.base.request(*id));
        let homes = homes.filter(|request| !request.is_redirected());
        let under = homes
            .filter_map(|request| self.redirects.newest_touching(&request.extent(), request.seq));
        under.max()
    }

    /// Redirects the updates of the shaped group, of this seq, to the prepare area.
    ///
    /// # Errors
    /// The area has no space. The requests of the group are freed.
    fn redirect_shaped(&mut self, seq: Seq) -> Result<(), Refusal> {
        let updates = self.updates_of_shaped(seq);
        for &index in &updates {
            let request = self.base.request(self.base.shaped[index]);
            let (member, extent) = (request.member, request.extent());
            let (place, server) = ((seq, request.index), request.server);
            let Some(prepared_lba) = self.redirects.add(place, &extent, server) else {
                let shaped =
                    updates.iter().map(|index| self.base.request(self.base.shaped[*index]));
                let there = shaped.filter(|request| request.member == member);
                let blocks = there.map(|request| u64::from(request.blocks)).sum();
                let refusal = self.redirects.refusal(member, blocks);
                self.redirects.free_refused(seq);
                self.base.discard_shaped();
                return Err(refusal);
            };
            let request = self.base.request_mut(self.base.shaped[index]);
            request.prepared_lba = prepared_lba;
            request.flags = request.flags.with(Flags::REDIRECTED);
        }
        Ok(())
    }

    /// The requests of the shaped group that are redirected, by their places in it: updates in place,
    /// and extensions of redirected updates. A commit would write an update over what a later request
    /// of its group has written home. So an update that such a request touches goes home, too.
    fn updates_of_shaped(&self, seq: Seq) -> Vec<usize> {
        let shaped: Vec<&super::Request<P>> =
            self.base.shaped.iter().map(|id| self.base.request(*id)).collect();
        let mut updates: Vec<usize> = Vec::new();
        for (index, request) in shaped.iter().enumerate() {
            let extent = request.extent();
            let extends_redirected = || {
                request.flags.has(Flags::EXTEND)
                    && (self.redirects.newest_touching(&extent, seq).is_some()
                        || updates.iter().any(|before| shaped[*before].touches(&extent)))
            };
            if request.kind == Kind::Write
                && (request.flags.has(Flags::IN_PLACE) || extends_redirected())
            {
                updates.push(index);
            }
        }
        if updates.len() == shaped.len() {
            return updates;
        }
        let mut is_home = alloc::vec![true; shaped.len()];
        updates.iter().for_each(|index| is_home[*index] = false);
        for &index in updates.iter().rev() {
            let extent = shaped[index].extent();
            is_home[index] = (index + 1..shaped.len())
                .any(|later| is_home[later] && shaped[later].touches(&extent));
        }
        updates.retain(|index| !is_home[*index]);
        updates
    }

    /// Sends the data of the group on the control path. Only for a plant.
    fn send_data_early(&mut self) {
        let Some(ordering) = &mut self.ordering else { return };
        let mut data = core::mem::take(&mut ordering.group.data);
        for id in &data {
            if !self.base.request(*id).is_redirected() {
                self.count_blocks(*id);
            }
        }
        self.base.shaped.append(&mut data);
        self.base.enqueue();
    }

    /// Notes that an entry is durable in its log. If it was the last one of its group, the data of
    /// the group is sent, and the metadata of the next group.
    fn on_ordered(&mut self) {
        let Some(ordering) = &mut self.ordering else { return };
        ordering.outstanding -= 1;
        if ordering.outstanding > 0 {
            return;
        }
        let Some(Ordering { group, .. }) = self.ordering.take() else { return };
        if group.is_empty {
            self.base.window.count_request(group.seq, group.seq);
        }
        self.send_or_hold(group.data);
        self.order_next();
        self.flush_if_due();
    }

    /// Takes in the data of a group whose metadata is durable. Each request is sent, unless an
    /// earlier write to the same blocks has not ended, also one of the same group: the drive could
    /// carry out both in any order (trap T12).
    fn send_or_hold(&mut self, mut data: Vec<RequestId>) {
        debug_assert!(self.base.shaped.is_empty());
        for id in data.drain(..) {
            // The filter may be wrong in one direction, so the requests decide. Redirected updates
            // of the same blocks have different blocks in the area.
            if self.base.request(id).is_redirected() {
                self.base.shaped.push(id);
            } else if self.count_blocks(id) && self.base.overlaps_earlier(id) {
                probe::count_rare(Rare::HoraeOverlap);
                self.held.push(id);
            } else {
                self.base.shaped.push(id);
            }
        }
        self.base.enqueue();
        self.spare_lists.push(data);
    }

    /// Counts the blocks of a request in the filter. Returns whether earlier data may touch one of
    /// them.
    fn count_blocks(&mut self, id: RequestId) -> bool {
        let request = self.base.request(id);
        let (drive, lba) = (request.member.0, request.lba);
        self.data_blocks.add(drive, lba, lba + u64::from(request.blocks))
    }

    /// Sends the data that waited for a write that has ended.
    fn send_held(&mut self) {
        self.base.shape_held(&mut self.held);
        self.base.enqueue();
    }

    /// Notes that all groups up to `seq` are to become durable.
    fn want_durable(&mut self, seq: Seq) {
        self.flush.wanted = self.flush.wanted.max(seq);
        self.flush_if_due();
    }

    /// Notes that slots of the logs are to become free. The group that must become durable for that
    /// stays the same until the joint FLUSH begins: otherwise a caller that writes without a pause would
    /// delay it until a log is full.
    fn want_space(&mut self) {
        let (last, durable) = (self.base.window.last(), self.base.window.durable());
        let seq = self.flush.for_space.filter(|seq| *seq > durable).unwrap_or(last);
        self.flush.for_space = Some(seq);
        if self.commit.for_space.is_none_or(|seq| seq <= self.commit.released) {
            self.commit.for_space = Some(seq);
        }
        self.flush_if_due();
        self.commit_if_due();
    }

    /// Begins a joint FLUSH if one is wanted, none is in flight, and the wanted groups are complete.
    /// A FLUSH covers only writes that were complete before it (trap T2).
    fn flush_if_due(&mut self) {
        let (complete, durable) = (self.base.window.complete(), self.base.window.durable());
        let is_due = |wanted: Seq| wanted > durable && complete >= wanted;
        let is_wanted = is_due(self.flush.wanted) || self.flush.for_space.is_some_and(is_due);
        if !is_wanted || self.flush.in_flight.is_some() || self.base.failure.is_some() {
            return;
        }
        self.flush.for_space = None;
        debug_assert!(self.base.shaped.is_empty());
        for index in 0..self.base.dirty.len() {
            let Some(last_write) = self.base.dirty[index] else { continue };
            let is_missed =
                probe::is_bug_planted(Plant::HoraeFlushMissesDrive) && !self.base.shaped.is_empty();
            if !is_missed {
                self.base.add_flush(Member(index as u8), durable.next(), 0);
            }
            // A drive with a write of a later group stays dirty.
            if last_write <= complete {
                self.base.dirty[index] = None;
            }
        }
        let outstanding = self.base.shaped.len() as u32;
        if outstanding > 1 {
            probe::count_rare(Rare::HoraeJointFlush);
        }
        self.base.enqueue();
        let (covers_up_to, step) = (complete, FlushStep::Drives);
        self.flush.in_flight =
            Some(FlushInFlight { covers_up_to, outstanding, step, keeps_entries: false });
        if outstanding == 0 || probe::is_bug_planted(Plant::HoraeFlushedEarly) {
            self.record_flushed();
        }
    }

    /// Records `flushed` in each log with entries of the groups that the joint FLUSH covers.
    fn record_flushed(&mut self) {
        let Some(flush) = &mut self.flush.in_flight else { return };
        if flush.step == FlushStep::Logs {
            return;
        }
        let covers_up_to = flush.covers_up_to;
        let durable = self.base.window.durable();
        // The entries of redirected updates must stay until these are home. Those of all later
        // groups stay, too.
        let keeps_entries = self.redirects.oldest().is_some_and(|seq| seq <= covers_up_to);
        flush.keeps_entries = keeps_entries;
        flush.step = FlushStep::Logs;
        debug_assert!(self.base.shaped.is_empty());
        for (server, slots) in self.slots.iter().enumerate() {
            let old_count = slots.partition_point(|seq| keeps_entries && *seq <= durable);
            if slots.get(old_count).is_some_and(|seq| *seq <= covers_up_to) {
                let path = if keeps_entries { Path::Persisted } else { Path::Flushed };
                self.base.add_record(path, server as u16, covers_up_to);
            }
        }
        if keeps_entries && probe::is_bug_planted(Plant::HoraeFlushedForgotten) {
            self.base.discard_shaped();
        }
        flush.outstanding += self.base.shaped.len() as u32;
        self.base.enqueue_first();
        self.continue_flush();
    }

    /// Notes that a request of the joint FLUSH has succeeded.
    fn on_flush_request_done(&mut self) {
        let Some(flush) = &mut self.flush.in_flight else { return };
        flush.outstanding -= 1;
        self.continue_flush();
    }

    /// Begins the next step of the joint FLUSH, or ends it, if the current one has no request left.
    fn continue_flush(&mut self) {
        let Some(flush) = &mut self.flush.in_flight else { return };
        if flush.outstanding > 0 {
            return;
        }
        let covers_up_to = flush.covers_up_to;
        match flush.step {
            FlushStep::Drives => self.record_flushed(),
            FlushStep::Logs => {
                let keeps_entries = flush.keeps_entries;
                self.flush.in_flight = None;
                if !keeps_entries {
                    self.free_slots(covers_up_to);
                }
                self.base.window.set_durable(covers_up_to);
                self.flush_if_due();
                self.commit_if_due();
            }
        }
    }

    /// Whether half of a log is used. Then it is time for a joint FLUSH.
    fn is_half_full(&self) -> bool {
        self.credits.is_any_log_half_full(|server| self.slots[server].len())
    }

    /// Frees all requests that are not sent, because the stream has failed. Readers must not rely on
    /// updates any more that are not durable.
    fn discard_unsent(&mut self) {
        self.redirects.roll_back(self.base.window.durable());
        let ordering = self.ordering.take().map(|ordering| ordering.group);
        let groups = self.waiting.drain(..).chain(ordering);
        for id in groups.flat_map(|group| group.data).chain(self.held.drain(..)) {
            self.base.complete_and_free(id);
        }
        self.discard_commit();
    }

    /// Checks whether the entries of the shaped group fit into the logs. If not, its requests are
    /// freed.
    fn check_space(&mut self) -> Result<(), Refusal> {
        self.new_entries.fill(0);
        for id in &self.base.shaped {
            self.new_entries[usize::from(self.base.request(*id).server)] += 1;
        }
        if self.base.shaped.is_empty() {
            let server = self.base.topology.member(Member(0)).server;
            self.new_entries[usize::from(server)] = 1;
        }
        let has_space =
            self.credits.check_space(&self.new_entries, |server| self.slots[server].len());
        if has_space.is_err() {
            self.base.discard_shaped();
        }
        has_space
    }
}

has_base!(Horae);

impl<P: Payload> Engine<P> for Horae<P> {
    fn admit(&mut self, writes: &mut [Write<P>], tag: u64, durable: bool) -> Result<Seq, Refusal> {
        let bytes = self.base.check_group(writes, durable)?;
        if self.is_half_full() || self.redirects.is_half_full() {
            self.want_space();
        }
        if !self.base.has_space(bytes) {
            if !self.redirects.is_empty() {
                // The payload of an update is kept until it is home.
                self.want_space();
            }
            return Err(Refusal::Full(Bound::Memory));
        }
        let seq = self.base.window.last().next();
        self.base.shape(writes, seq, tag)?;
        self.base.number_requests()?;
        if let Err(refusal) = self.check_space() {
            if matches!(refusal, Refusal::Full(_)) {
                self.want_space();
            }
            return Err(refusal);
        }
        if self.redirects.is_enabled()
            && let Err(refusal) = self.redirect_shaped(seq)
        {
            if matches!(refusal, Refusal::Full(_)) {
                self.want_space();
            }
            return Err(refusal);
        }
        self.base.note_dirty(seq);
        for (slots, count) in self.slots.iter_mut().zip(&self.new_entries) {
            slots.extend((0..*count).map(|_| seq));
        }
        // A group without writes is complete when its entry is durable.
        let request_count = self.base.shaped.len().max(1) as u32;
        self.base.window.add_group(request_count, false, bytes);
        if self.redirects.is_enabled() {
            self.base.window.set_home(self.redirects.oldest().map(|seq| Seq(seq.0 - 1)));
        }
        let mut data = self.spare_lists.pop().unwrap_or_default();
        data.append(&mut self.base.shaped);
        let is_empty = data.is_empty();
        self.waiting.push_back(Group { seq, tag, data, is_empty });
        self.order_next();
        if durable {
            self.want_durable(seq);
        }
        Ok(seq)
    }

    fn check_write(&self, lba: u64, blocks: u32, _durable: bool) -> Result<(), Refusal> {
        let base = &self.base;
        base.check_write(lba, blocks)?;
        let mut new_entries = alloc::vec![0; base.topology.servers().len()];
        base.topology.for_each_extent(lba, blocks, |extent| {
            new_entries[usize::from(base.topology.member(extent.member).server)] += 1;
        });
        if new_entries.iter().sum::<u32>() > u32::from(GROUP_ENTRIES_MAX) {
            return Err(Refusal::TooManyEntries);
        }
        if self.redirects.is_enabled() {
            // The write may be an update in place.
            let mut redirected = alloc::vec![0; base.topology.members().len()];
            base.topology.for_each_extent(lba, blocks, |extent| {
                redirected[usize::from(extent.member.0)] += u64::from(extent.blocks);
            });
            for (member, blocks) in redirected.into_iter().enumerate() {
                self.redirects.check_size(Member(member as u8), blocks)?;
            }
        }
        self.credits.check_space(&new_entries, |_| 0)
    }

    fn next_request(&mut self, server: u16) -> Option<Dispatch> {
        let server = usize::from(server);
        let id = self.base.queues[server].pop_front()?;
        if self.base.request(id).path != Path::Control {
            return Some(Dispatch { id, ordered: None });
        }
        self.last_ordinal[server] = self.last_ordinal[server].wrapping_add(1);
        let (ordinal, released) = (self.last_ordinal[server], self.base.window.released());
        Some(Dispatch { id, ordered: Some(OrderedDispatch { ordinal, released }) })
    }

    fn on_request_done(&mut self, id: RequestId, result: Result<(), Cause>) {
        let request = self.base.request(id);
        let (first, last) = (request.seq, request.seq_end());
        let (path, kind) = (request.path, request.kind);
        let (prepared_lba, index) = (request.prepared_lba, request.index);
        let (drive, lba, end) =
            (request.member.0, request.lba, request.lba + u64::from(request.blocks));
        if let Err(cause) = result {
            if path == Path::Home || path == Path::Released {
                // The groups of the commit are durable, and stay so.
                let (seq, flush) = (self.base.window.durable().next(), kind == Kind::Flush);
                let member = Member(drive);
                self.base.poison(Failure { seq, member, flush, cause });
            } else {
                self.base.poison_by_request(id, cause);
            }
            self.base.complete_and_free(id);
            self.discard_unsent();
            return;
        }
        if prepared_lba > 0 && path == Path::Data && self.base.failure.is_none() {
            let pieces = core::mem::take(&mut self.base.request_mut(id).pieces);
            self.redirects.on_prepared((first, index), pieces);
        }
        self.base.complete_and_free(id);
        if self.base.failure.is_some() {
            return;
        }
        match (path, kind) {
            (Path::Control, _) => self.on_ordered(),
            (Path::Flushed | Path::Persisted, _) | (Path::Data, Kind::Flush) => {
                self.on_flush_request_done();
            }
            (Path::Home | Path::Released, _) => self.on_commit_request_done(),
            (Path::Data, Kind::Write | Kind::Discard) => {
                if prepared_lba == 0 {
                    self.data_blocks.remove(drive, lba, end);
                }
                self.base.window.count_request(first, last);
                self.send_held();
                self.flush_if_due();
            }
        }
    }

    fn poll(&mut self) -> Marks {
        let marks = self.base.window.deliver();
        // This engine never replays, so it need not keep a complete group.
        // The payload of a redirected update is needed until it is home.
        let complete = self.base.window.complete();
        let freed = self.redirects.freed_up_to().map_or(complete, |seq| seq.min(complete));
        self.base.window.free_groups(freed);
        marks
    }

    fn ask_durable(&mut self, seq: Seq) {
        self.want_durable(seq.min(self.base.window.last()));
    }

    fn poison(&mut self, failure: Failure) {
        self.base.poison(failure);
        self.discard_unsent();
    }

    fn on_flush_failed_elsewhere(&mut self, member: Member) {
        let failure = self.base.failure_by_shared_flush(member);
        if let Some(failure) = failure.or_else(|| self.commit_failure_by_shared_flush(member)) {
            self.poison(failure);
        }
    }

    fn ask_home(&mut self, seq: Seq) {
        self.want_home(seq.min(self.base.window.last()));
    }

    fn oldest_redirected(&self) -> Option<Seq> {
        self.redirects.oldest().filter(|_| self.base.failure.is_none())
    }

    fn next_redirection(&mut self) -> Option<Redirection<P>> {
        self.redirects.next_change()
    }

    fn awaits_reads(&self) -> bool {
        self.redirects.awaits_reads()
    }

    fn note_oldest_read(&mut self, oldest: Option<Seq>) {
        self.redirects.note_oldest_read(oldest);
    }
}

//! Engine `opimq`: the drive keeps the order of the epochs of each stream (OPIMQ, FAST '25), and
//! each core has a queue.
//!
//! ```text
//! core:     0             0     1          1                      1
//! group:    1             1     1│         2│                     (durable)
//! queue:    0 ─ write ──▶ write write│     1 ─ write│ ─────────▶  FLUSH(stream, epoch 2)
//! epoch:    0             0     0          1                      │: the last write of its epoch
//! ```
//!
//! - *Group.* A group is an epoch of its stream: its last write is the barrier. If two writes of a
//!   group touch the same block, the later one begins another epoch, because the writes of an
//!   epoch have no order. Groups are never merged: a merged write that a power cut tears could
//!   leave a part of the later group without the earlier one.
//! - *Order.* Groups on one drive do not wait for each other. The drive keeps their order.
//! - *Queues.* A stream has a queue to each server for each of [`QUEUES_PER_SERVER`] cores. An
//!   epoch stays in the queue of the core on which it began ([`EpochPinning`]).
//! - *Durability.* FLUSH(stream, epoch) is sent at once. The drive ends it when all earlier epochs
//!   have arrived and are durable.
//! - *Other drives* (ours). A drive knows no epochs of another one. So a group that is for another
//!   drive than the groups before it waits until they are durable.
//! - *Groups apart* (ours). A group on several drives, or with a discard, which drives take only
//!   without an order, waits until the groups before it are durable, is sent without an order, and
//!   is flushed. The group behind it waits for that.

use alloc::collections::VecDeque;
use alloc::vec::Vec;

use super::base::{Base, has_base};
use super::group_place::GroupPlace;
use super::{
    Capabilities, Cause, Dispatch, Engine, Failure, Limits, Marks, Payload, Refusal, RequestId,
    Write,
};
use crate::attribute::{Kind, Member, Seq};
use crate::dispatch::epoch_pinning::{EpochPinning, NextWrite};
use crate::probe::{self, Plant, Rare};
use crate::topology::Topology;
use crate::write_order::{DriveOrder, EpochId, EpochWrite, WriteOrder};

/// The number of queues that a stream has to each server. Cores share them by their numbers.
pub const QUEUES_PER_SERVER: u16 = 2;

/// The capabilities of the engine.
pub(super) const CAPABILITIES: Capabilities = Capabilities {
    keeps_order: true,
    is_serial: false,
    completes_durable: false,
    keeps_log: false,
    needs_binding: false,
    orders_at_target: false,
    can_replay: false,
    drive_order: DriveOrder::Epochs,
    queues_per_server: QUEUES_PER_SERVER,
};

/// The most epochs from the oldest with a command in flight to the newest. A command has the lower
/// 16 bits of an epoch only. A drive finds the epoch by its distance from the one that is mapped
/// next, which must stay below 2^15. The tables of the drive take their part of that.
const EPOCHS_MAX: usize = 1 << 13;

/// The `opimq` engine of one stream.
#[derive(Debug)]
pub struct Opimq<P> {
    base: Base<P>,
    /// The stream, by its number in commands.
    stream: u16,
    /// The core on which the caller runs.
    core: u32,
    /// The epochs of the stream on each drive.
    epochs: Vec<EpochPinning>,
    /// The groups that wait until the groups before them are durable, oldest first.
    waiting: VecDeque<Group>,
    /// The drive of the groups that were sent last. `None`: the last group was sent apart, or none
    /// was sent.
    drive: Option<Member>,
    /// The group that is sent apart.
    apart: Option<Apart>,
    in_flight: EpochsInFlight,
    /// The last group that was sent.
    sent: Seq,
    /// The last group that the caller wants durable.
    wanted: Seq,
    /// The last group that a FLUSH covers which was sent.
    flush_sent: Seq,
    /// The last group that a FLUSH covers which has ended.
    flushed: Seq,
    /// Empty lists for [`Group::requests`], so that their memory is used again.
    spare_lists: Vec<Vec<RequestId>>,
}

/// A group that is turned into requests and not sent.
#[derive(Debug)]
struct Group {
    seq: Seq,
    place: GroupPlace,
    requests: Vec<RequestId>,
}

/// A group that is sent apart.
#[derive(Clone, Copy, Debug)]
struct Apart {
    seq: Seq,
    /// The number of requests in flight.
    outstanding: u32,
    /// Whether these are the FLUSHes of the group, not its writes.
    is_flushing: bool,
}

/// The epochs with commands in flight on the present drive.
#[derive(Debug, Default)]
struct EpochsInFlight {
    /// The lower 16 bits of the number of the first epoch in `counts`.
    first: u16,
    /// The number of commands in flight of each epoch. A FLUSH counts in the epoch before which it
    /// covers everything.
    counts: VecDeque<u32>,
}

impl EpochsInFlight {
    fn index(&self, epoch: u16) -> usize {
        usize::from(epoch.wrapping_sub(self.first))
    }

    /// Whether a command of this epoch may be sent.
    fn has_space(&self, epoch: u16) -> bool {
        self.counts.is_empty() || self.index(epoch) < EPOCHS_MAX
    }

    fn add(&mut self, epoch: u16) {
        if self.counts.is_empty() {
            self.first = epoch;
        }
        let index = self.index(epoch);
        if self.counts.len() <= index {
            self.counts.resize(index + 1, 0);
        }
        self.counts[index] += 1;
    }

    fn remove(&mut self, epoch: u16) {
        let index = self.index(epoch);
        if let Some(count) = self.counts.get_mut(index) {
            *count = count.saturating_sub(1);
        }
        while self.counts.front() == Some(&0) {
            self.counts.pop_front();
            self.first = self.first.wrapping_add(1);
        }
    }
}

impl<P: Payload> Opimq<P> {
    /// The engine of a new stream.
    #[must_use]
    pub fn new(topology: Topology, limits: Limits) -> Self {
        let stream = limits.stream_number;
        let mut pinning = EpochPinning::default();
        pinning.start(stream, 0);
        Self {
            stream,
            core: 0,
            epochs: topology.members().iter().map(|_| pinning.clone()).collect(),
            waiting: VecDeque::new(),
            drive: None,
            apart: None,
            in_flight: EpochsInFlight::default(),
            sent: limits.start,
            wanted: limits.start,
            flush_sent: limits.start,
            flushed: limits.start,
            spare_lists: Vec::new(),
            base: Base::new(topology, limits),
        }
    }

    /// Gives each request of the shaped group its place in the order of the drive. The numbers of
    /// the epochs follow when the requests are sent.
    fn divide_into_epochs(&mut self) {
        let overlaps =
            self.base.has_overlap() && !probe::is_bug_planted(Plant::OpimqOverlapInEpoch);
        let Self { base, stream, .. } = self;
        let mut end = 0;
        for index in 0..base.shaped.len() {
            let request = base.requests.get_mut(base.shaped[index]);
            let own = EpochId { stream: *stream, epoch: 0 };
            let barrier = index + 1 == base.shaped.len();
            request.order = WriteOrder::Epochs(EpochWrite { own, follower: None, barrier });
            let lba = request.lba;
            let request_end = lba + u64::from(request.blocks);
            // Where writes overlap, each epoch has writes in the order of their blocks.
            if overlaps && index > 0 && lba < end {
                probe::count_rare(Rare::OpimqOverlap);
                let last = base.requests.get_mut(base.shaped[index - 1]);
                if let WriteOrder::Epochs(order) = &mut last.order {
                    order.barrier = true;
                }
                end = 0;
            }
            end = end.max(request_end);
        }
    }

    /// Whether the drive loses completed writes with its power.
    fn is_volatile(&self, member: Member) -> bool {
        self.base.topology.member(member).volatile && !probe::is_bug_planted(Plant::OpimqNoFlush)
    }

    /// Sends the waiting groups that may be sent now.
    fn send_waiting(&mut self) {
        while let Some(group) = self.waiting.front()
            && self.base.failure.is_none()
        {
            let (seq, place) = (group.seq, group.place);
            let is_first = self.base.window.durable().next() >= seq;
            let continues = match place {
                GroupPlace::Drive(member) => self.drive == Some(member),
                GroupPlace::Unordered => false,
                GroupPlace::Nowhere => self.apart.is_none(),
            };
            if !is_first && !continues && !probe::is_bug_planted(Plant::OpimqSwitchEarly) {
                probe::count_rare(Rare::OpimqSwitch);
                // The group before this one ends the part that must be durable.
                self.wanted = self.wanted.max(Seq(seq.0 - 1));
                self.flush_if_due();
                return;
            }
            let Some(Group { mut requests, .. }) = self.waiting.pop_front() else { return };
            self.base.shaped.append(&mut requests);
            self.spare_lists.push(requests);
            self.send_group(seq, place, is_first);
        }
    }

    /// Sends the shaped group. `is_first`: all groups before it are durable.
    fn send_group(&mut self, seq: Seq, place: GroupPlace, is_first: bool) {
        if is_first {
            self.base.dirty.fill(None);
        }
        self.base.note_dirty(seq);
        self.sent = seq;
        match place {
            GroupPlace::Drive(member) => {
                self.drive = Some(member);
                self.base.enqueue();
            }
            GroupPlace::Unordered => {
                self.drive = None;
                let outstanding = self.base.shaped.len() as u32;
                self.apart = Some(Apart { seq, outstanding, is_flushing: false });
                self.base.enqueue();
            }
            GroupPlace::Nowhere => {
                self.base.window.complete_empty_group();
                if is_first {
                    self.flushed = self.flushed.max(seq);
                    self.flush_sent = self.flush_sent.max(seq);
                }
            }
        }
        self.flush_if_due();
        self.note_durable();
    }

    /// Sends FLUSH(stream, epoch) if the caller wants more groups durable than one that was sent
    /// covers. The FLUSH need not wait for the writes: the drive does.
    fn flush_if_due(&mut self) {
        let is_due = self.wanted.min(self.sent) > self.flush_sent;
        let Some(member) = self.drive.filter(|_| is_due && self.base.failure.is_none()) else {
            return;
        };
        if !self.is_volatile(member) {
            // What is complete is durable.
            return;
        }
        debug_assert!(self.base.shaped.is_empty());
        self.base.add_flush(member, self.sent, 0);
        for index in 0..self.base.shaped.len() {
            let id = self.base.shaped[index];
            let stream = self.stream;
            self.base.request_mut(id).flush_before = Some(EpochId { stream, epoch: 0 });
        }
        self.flush_sent = self.sent;
        self.base.enqueue();
    }

    /// Moves the durable mark.
    fn note_durable(&mut self) {
        let complete = self.base.window.complete();
        if self.drive.is_some_and(|member| !self.is_volatile(member)) {
            self.flushed = self.flushed.max(complete.min(self.sent));
        }
        let durable = self.flushed.min(complete);
        if self.base.failure.is_none() && durable > self.base.window.durable() {
            self.base.window.set_durable(durable);
            // No FLUSH is needed for these groups any more.
            self.flush_sent = self.flush_sent.max(durable);
        }
    }

    /// Goes on with the group that is sent apart: its requests in flight have ended.
    fn continue_apart(&mut self, apart: Apart) {
        let Apart { seq, is_flushing, .. } = apart;
        if !is_flushing {
            debug_assert!(self.base.shaped.is_empty());
            for index in 0..self.base.dirty.len() {
                let member = Member(index as u8);
                if self.base.dirty[index].is_some() && self.is_volatile(member) {
                    self.base.add_flush(member, seq, 0);
                }
            }
            let outstanding = self.base.shaped.len() as u32;
            self.base.enqueue();
            if outstanding > 0 {
                self.apart = Some(Apart { seq, outstanding, is_flushing: true });
                return;
            }
        }
        self.apart = None;
        self.flushed = self.flushed.max(seq);
        self.flush_sent = self.flush_sent.max(seq);
    }

    /// The queue into which the request goes next, or `None` if it must wait.
    fn queue_of(&self, id: RequestId) -> Option<usize> {
        let request = self.base.request(id);
        let core_queue = self.core_queue();
        let epochs = &self.epochs[usize::from(request.member.0)];
        match (request.order, request.flush_before) {
            (WriteOrder::Epochs(_), _) | (_, Some(_)) => {
                let next = epochs.next_epoch(self.stream).epoch;
                let has_space = self.in_flight.has_space(next);
                let queue = match request.order {
                    WriteOrder::Epochs(_) => epochs.queue_of(self.stream, core_queue),
                    _ => core_queue,
                };
                has_space.then_some(queue)
            }
            _ => Some(core_queue),
        }
    }

    /// The queue of the core on which the caller runs.
    fn core_queue(&self) -> usize {
        self.core as usize % usize::from(QUEUES_PER_SERVER)
    }

    /// Gives a request that is sent now the numbers of its epochs. Returns whether that was
    /// possible.
    fn number_epochs(&mut self, id: RequestId) -> bool {
        let (core_queue, stream) = (self.core_queue(), self.stream);
        let request = self.base.requests.get_mut(id);
        let epochs = &mut self.epochs[usize::from(request.member.0)];
        match &mut request.order {
            WriteOrder::Epochs(order) => {
                let is_last = order.barrier;
                let next = NextWrite { stream, follower: None, is_last, core_queue };
                let Ok(pinned) = epochs.dispatch(next) else { return false };
                *order = pinned.order;
                self.in_flight.add(pinned.order.own.epoch);
                if pinned.queue != core_queue {
                    probe::count_rare(Rare::OpimqPinned);
                }
            }
            _ => {
                if let Some(before) = &mut request.flush_before {
                    *before = epochs.next_epoch(stream);
                    self.in_flight.add(before.epoch);
                }
            }
        }
        true
    }

    /// Frees the requests of all waiting groups, because the stream has failed.
    fn discard_waiting(&mut self) {
        for group in self.waiting.drain(..) {
            for id in group.requests {
                self.base.complete_and_free(id);
            }
        }
    }
}

has_base!(Opimq);

impl<P: Payload> Engine<P> for Opimq<P> {
    fn admit(&mut self, writes: &mut [Write<P>], tag: u64, durable: bool) -> Result<Seq, Refusal> {
        let (seq, bytes) = self.base.shape_and_number(writes, tag, durable)?;
        let place = self.base.place_of_shaped();
        if let GroupPlace::Drive(_) = place {
            self.divide_into_epochs();
        }
        self.base.window.add_group(self.base.shaped.len() as u32, false, bytes);
        let mut requests = self.spare_lists.pop().unwrap_or_default();
        requests.append(&mut self.base.shaped);
        self.waiting.push_back(Group { seq, place, requests });
        if durable {
            self.wanted = self.wanted.max(seq);
        }
        self.send_waiting();
        self.flush_if_due();
        Ok(seq)
    }

    fn set_core(&mut self, core: u32) {
        self.core = core;
    }

    fn queues_per_server(&self) -> u16 {
        QUEUES_PER_SERVER
    }

    fn next_request(&mut self, path: u16) -> Option<Dispatch> {
        let (server, queue) = (path / QUEUES_PER_SERVER, path % QUEUES_PER_SERVER);
        let id = *self.base.queues[usize::from(server)].front()?;
        if self.queue_of(id) != Some(usize::from(queue)) || !self.number_epochs(id) {
            return None;
        }
        self.base.queues[usize::from(server)].pop_front();
        Some(Dispatch { id, ordered: None })
    }

    fn on_request_done(&mut self, id: RequestId, result: Result<(), Cause>) {
        let request = self.base.request(id);
        let (seq, is_flush) = (request.seq, request.kind == Kind::Flush);
        let epoch = match (request.order, request.flush_before) {
            (WriteOrder::Epochs(order), _) => Some(order.own.epoch),
            (_, before) => before.map(|before| before.epoch),
        };
        if let Err(cause) = result {
            self.base.poison_by_request(id, cause);
            self.base.complete_and_free(id);
            self.discard_waiting();
            return;
        }
        self.base.complete_and_free(id);
        if self.base.failure.is_some() {
            // The failed FLUSH of another stream may have lost writes that this one covers (trap
            // T22).
            return;
        }
        if !is_flush {
            self.base.window.count_request(seq, seq);
        }
        match (epoch, self.apart) {
            (Some(epoch), _) => {
                self.in_flight.remove(epoch);
                if is_flush {
                    self.flushed = self.flushed.max(seq);
                }
            }
            (None, Some(apart)) if apart.outstanding > 1 => {
                self.apart = Some(Apart { outstanding: apart.outstanding - 1, ..apart });
            }
            (None, Some(apart)) => self.continue_apart(apart),
            (None, None) => {}
        }
        self.note_durable();
        self.send_waiting();
    }

    fn poll(&mut self) -> Marks {
        self.base.deliver_without_replay()
    }

    fn ask_durable(&mut self, seq: Seq) {
        self.wanted = self.wanted.max(seq.min(self.base.window.last()));
        self.flush_if_due();
    }

    fn poison(&mut self, failure: Failure) {
        self.base.poison(failure);
        self.discard_waiting();
    }
}

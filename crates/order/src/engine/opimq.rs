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
//! - *Followers.* The writes of a group with a follower are dual-stream writes: they have an epoch of
//!   the follower, too ([`EpochNumbers`](crate::dispatch::epoch_numbers)). Both numbers are taken when
//!   the group is admitted, so groups that the follower admits later have later epochs.
//! - *Other drives* (ours). A drive knows no epochs of another one. So a group that is for another
//!   drive than the groups before it waits until they are durable.
//! - *Groups apart* (ours). A group on several drives, or with a discard, which drives take only
//!   without an order, waits until the groups before it are durable, is sent without an order, and
//!   is flushed. The group behind it waits for that.

use alloc::collections::VecDeque;
use alloc::sync::Arc;
use alloc::vec::Vec;

use super::base::{Base, has_base};
use super::group_place::GroupPlace;
use super::{
    Capabilities, Cause, Dispatch, Engine, Failure, Limits, Marks, Payload, Refusal, RequestId,
    Write,
};
use crate::attribute::{Kind, Member, Seq};
use crate::dispatch::epoch_numbers::{EpochNumbers, Taken};
use crate::dispatch::epoch_pinning::EpochPinning;
use crate::following::{FollowWay, Following, OwnFollowing, SharedFollowing};
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

/// The tag of a FLUSH that covers what the stream follows, and perhaps none of its own groups.
const FOLLOWED: u64 = 1;
/// The number of an epoch that a request does not have yet. It names no stream.
const NOT_NUMBERED: EpochId = EpochId { stream: 0, epoch: 0 };

/// The `opimq` engine of one stream.
#[derive(Debug)]
pub struct Opimq<P> {
    base: Base<P>,
    /// The stream, by its number in commands.
    stream: u16,
    /// The core on which the caller runs.
    core: u32,
    /// The queue of the stream's epoch on each drive.
    pins: Vec<EpochPinning>,
    /// The epochs of the stream, and of those that follow it or that it follows.
    following: Shared,
    /// The groups that wait until the groups before them are durable, oldest first.
    waiting: VecDeque<Group>,
    /// The drive of the groups that were sent last. `None`: the last group was sent apart, or none
    /// was sent.
    drive: Option<Member>,
    /// The group that is sent apart.
    apart: Option<Apart>,
    /// The number of FLUSHes(stream, epoch) that are queued or in flight.
    flush_count: u32,
    /// Whether one of them has the tag [`FOLLOWED`].
    is_flushing_followed: bool,
    /// Whether the stream is being closed. Then it makes durable what it follows.
    is_closing: bool,
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

/// The state that the streams of a volume share, or that of a stream alone.
#[derive(Debug)]
enum Shared {
    Alone(OwnFollowing),
    Volume(Arc<SharedFollowing>),
}

impl Shared {
    fn with<R>(&mut self, act: impl FnOnce(&mut Following) -> R) -> R {
        match self {
            Self::Alone(following) => following.with(act),
            Self::Volume(following) => following.with(act),
        }
    }

    fn epochs<R>(&mut self, member: Member, act: impl FnOnce(&mut EpochNumbers) -> R) -> R {
        self.with(|following| act(following.epochs(member)))
    }
}

impl<P: Payload> Opimq<P> {
    /// The engine of a new stream.
    #[must_use]
    pub fn new(topology: Topology, limits: Limits) -> Self {
        let stream = limits.stream_number;
        let mut following = Shared::Alone(OwnFollowing::default());
        start_epochs(&mut following, &topology, stream);
        Self {
            stream,
            core: 0,
            pins: topology.members().iter().map(|_| EpochPinning::default()).collect(),
            following,
            waiting: VecDeque::new(),
            drive: None,
            apart: None,
            flush_count: 0,
            is_flushing_followed: false,
            is_closing: false,
            sent: limits.start,
            wanted: limits.start,
            flush_sent: limits.start,
            flushed: limits.start,
            spare_lists: Vec::new(),
            base: Base::new(topology, limits),
        }
    }

    /// Gives each request of the shaped group its place in the order of the drive. With a follower
    /// the writes are dual-stream writes. The numbers of the epochs are taken later.
    fn divide_into_epochs(&mut self, follower: Option<u16>) {
        let overlaps =
            self.base.has_overlap() && !probe::is_bug_planted(Plant::OpimqOverlapInEpoch);
        let follower = follower.map(|stream| EpochId { stream, epoch: 0 });
        let Self { base, .. } = self;
        let mut end = 0;
        for index in 0..base.shaped.len() {
            let request = base.requests.get_mut(base.shaped[index]);
            let barrier = index + 1 == base.shaped.len();
            let order = EpochWrite { own: NOT_NUMBERED, follower, barrier };
            request.order = WriteOrder::Epochs(order);
            let lba = request.lba;
            let request_end = lba + u64::from(request.blocks);
            // Where writes overlap, each epoch has writes in the order of their blocks.
            if overlaps && index > 0 && lba < end {
                probe::count_rare(Rare::OpimqOverlap);
                if follower.is_some() {
                    probe::count_rare(Rare::OpimqDualOverlap);
                }
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

    /// Admits a group. With a follower it also returns how that follows the group.
    fn admit_group(
        &mut self,
        writes: &mut [Write<P>],
        tag: u64,
        durable: bool,
        follower: Option<u16>,
    ) -> Result<(Seq, FollowWay), Refusal> {
        let (seq, bytes) = self.base.shape_and_number(writes, tag, durable)?;
        let place = self.base.place_of_shaped();
        let dual = follower.filter(|follower| self.can_be_dual(seq, place, *follower));
        if let GroupPlace::Drive(_) = place {
            let is_named = !probe::is_bug_planted(Plant::OpimqFollowerNotNamed);
            self.divide_into_epochs(dual.filter(|_| is_named));
        }
        self.base.window.add_group(self.base.shaped.len() as u32, false, bytes);
        let mut requests = self.spare_lists.pop().unwrap_or_default();
        requests.append(&mut self.base.shaped);
        self.waiting.push_back(Group { seq, place, requests });
        // The follower waits until the group is durable.
        let is_awaited = follower.is_some() && dual.is_none();
        if durable || is_awaited {
            self.wanted = self.wanted.max(seq);
        }
        self.send_waiting();
        self.flush_if_due();
        let (Some(_), GroupPlace::Drive(member)) = (dual, place) else {
            return Ok((seq, FollowWay::Waits));
        };
        probe::count_rare(Rare::OpimqDual);
        self.number_queued(member);
        Ok((seq, FollowWay::Dual))
    }

    /// Whether the writes of the shaped group can be dual-stream writes: they go to one drive, which
    /// knows the follower, behind groups of the stream that do not wait to be sent.
    ///
    /// No FLUSH is before them. A target may keep back its answer until other FLUSHes of the drive
    /// have ended (trap T29), and so its place in the queue. One of those may be the follower's, and
    /// may wait for these writes.
    fn can_be_dual(&mut self, seq: Seq, place: GroupPlace, follower: u16) -> bool {
        let GroupPlace::Drive(member) = place else { return false };
        let unflushed = self.unflushed_drive();
        let has_flush = self.flush_count > 0 && !probe::is_bug_planted(Plant::OpimqDualBehindFlush);
        let is_sent_at_once = self.waiting.is_empty()
            && !has_flush
            && (self.is_first(seq, unflushed) || self.continues(place, unflushed));
        // Each request that has no number yet may begin an epoch.
        let server = usize::from(self.base.topology.member(member).server);
        let epochs = self.base.queues[server].len() + self.base.shaped.len();
        let stream = self.stream;
        is_sent_at_once
            && self.following.epochs(member, |numbers| {
                let is_known = numbers.is_known(follower)
                    || probe::is_bug_planted(Plant::OpimqFollowerUnknown);
                is_known && numbers.has_space(stream, epochs) && numbers.has_space(follower, epochs)
            })
    }

    /// A drive with writes of other streams that this one follows, and that none of its FLUSHes
    /// covers: another one than the present drive, if there is such a one.
    fn unflushed_drive(&mut self) -> Option<Member> {
        if probe::is_bug_planted(Plant::OpimqFollowedNotFlushed) {
            return None;
        }
        let (stream, present) = (self.stream, self.drive);
        self.following.with(|following| following.unflushed_drive(stream, present))
    }

    /// Whether everything before group `seq` is durable, also what the stream follows.
    fn is_first(&self, seq: Seq, unflushed: Option<Member>) -> bool {
        self.base.window.durable().next() >= seq && unflushed.is_none()
    }

    /// Whether a group at this place may follow what was sent last without a wait.
    fn continues(&self, place: GroupPlace, unflushed: Option<Member>) -> bool {
        match place {
            GroupPlace::Drive(member) => {
                self.drive == Some(member) && unflushed.is_none_or(|other| other == member)
            }
            GroupPlace::Unordered => false,
            // A group without writes is durable with the FLUSH of the present drive.
            GroupPlace::Nowhere => {
                let is_flushed = |other| self.drive == Some(other) && self.is_volatile(other);
                self.apart.is_none() && unflushed.is_none_or(is_flushed)
            }
        }
    }

    /// Sends the waiting groups that may be sent now.
    fn send_waiting(&mut self) {
        while let Some(group) = self.waiting.front()
            && self.base.failure.is_none()
        {
            let (seq, place) = (group.seq, group.place);
            let unflushed = self.unflushed_drive();
            let is_first = self.is_first(seq, unflushed);
            let may_be_sent = is_first || self.continues(place, unflushed);
            if !may_be_sent && !probe::is_bug_planted(Plant::OpimqSwitchEarly) {
                probe::count_rare(Rare::OpimqSwitch);
                // The group before this one ends the part that must be durable.
                self.wanted = self.wanted.max(Seq(seq.0 - 1));
                self.flush_if_due();
                self.flush_followed(unflushed);
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
        self.add_flush_of_epochs(member, 0);
        self.flush_sent = self.sent;
    }

    /// Queues a FLUSH(stream, epoch). It gets the number of the epoch when it is sent.
    fn add_flush_of_epochs(&mut self, member: Member, tag: u64) {
        debug_assert!(self.base.shaped.is_empty());
        self.flush_count += 1;
        self.base.add_flush(member, self.sent, tag);
        for index in 0..self.base.shaped.len() {
            let id = self.base.shaped[index];
            self.base.request_mut(id).flush_before = Some(NOT_NUMBERED);
        }
        self.base.enqueue();
    }

    /// Makes durable what the stream follows on a drive.
    fn flush_followed(&mut self, unflushed: Option<Member>) {
        let Some(member) = unflushed.filter(|_| !self.is_flushing_followed) else { return };
        probe::count_rare(Rare::OpimqFollowedFlush);
        self.is_flushing_followed = true;
        self.add_flush_of_epochs(member, FOLLOWED);
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

    /// The queue into which the request goes next.
    fn queue_of(&self, id: RequestId) -> usize {
        let request = self.base.request(id);
        match request.order {
            WriteOrder::Epochs(_) => {
                self.pins[usize::from(request.member.0)].queue_of(self.core_queue())
            }
            _ => self.core_queue(),
        }
    }

    /// The queue of the core on which the caller runs.
    fn core_queue(&self) -> usize {
        self.core as usize % usize::from(QUEUES_PER_SERVER)
    }

    /// Takes the numbers of all epochs that are queued for a drive and have none.
    fn number_queued(&mut self, member: Member) {
        let server = usize::from(self.base.topology.member(member).server);
        let mut index = 0;
        while index < self.base.queues[server].len() {
            index = self.number(server, index);
        }
    }

    /// Takes the numbers of the epoch that begins with this request of a queue, or of the FLUSH
    /// there, if it has none. Returns the index of the request behind.
    fn number(&mut self, server: usize, index: usize) -> usize {
        let Some((count, taken)) = self.take_numbers(server, index) else { return index + 1 };
        if probe::is_bug_planted(Plant::OpimqSiblingsCrossed)
            && taken.follower.is_some()
            && let Some((next_count, next)) = self.take_numbers(server, index + count)
        {
            self.set_numbers(server, index, count, Taken { follower: next.follower, ..taken });
            let next = Taken { follower: taken.follower, ..next };
            self.set_numbers(server, index + count, next_count, next);
            return index + count + next_count;
        }
        self.set_numbers(server, index, count, taken);
        index + count
    }

    /// Takes numbers for the requests from this one on, if they begin an epoch without a number or
    /// are a FLUSH without one. Returns the count of the requests, too.
    fn take_numbers(&mut self, server: usize, index: usize) -> Option<(usize, Taken)> {
        let Self { base, following, stream, .. } = self;
        let stream = *stream;
        let queue = &base.queues[server];
        let first = base.requests.get(*queue.get(index)?);
        let member = first.member;
        match (first.order, first.flush_before) {
            (WriteOrder::Epochs(order), _) if order.own == NOT_NUMBERED => {
                let is_last = |id: &RequestId| match base.requests.get(*id).order {
                    WriteOrder::Epochs(order) => order.barrier,
                    _ => true,
                };
                let count = queue.iter().skip(index).take_while(|id| !is_last(id)).count() + 1;
                let follower = order.follower.map(|follower| follower.stream);
                let take =
                    |numbers: &mut EpochNumbers| numbers.take(stream, follower, count as u32);
                let taken = following.epochs(member, take);
                debug_assert!(taken.is_some(), "the streams are open");
                Some((count, taken?))
            }
            (_, Some(NOT_NUMBERED)) => {
                let own = following.epochs(member, |numbers| numbers.begin_flush(stream));
                Some((1, Taken { own, follower: None }))
            }
            _ => None,
        }
    }

    /// Gives requests of a queue their numbers.
    fn set_numbers(&mut self, server: usize, index: usize, count: usize, taken: Taken) {
        let Base { queues, requests, .. } = &mut self.base;
        for id in queues[server].iter().skip(index).take(count) {
            let request = requests.get_mut(*id);
            match &mut request.order {
                WriteOrder::Epochs(order) => {
                    (order.own, order.follower) = (taken.own, taken.follower);
                }
                _ => request.flush_before = Some(taken.own),
            }
        }
    }

    /// Whether the first request of a queue has its numbers, or gets them now: its epoch is not too
    /// far ahead of the oldest one in flight.
    fn number_first(&mut self, server: usize, id: RequestId) -> bool {
        let request = self.base.request(id);
        let (member, stream) = (request.member, self.stream);
        let needs_number = match (request.order, request.flush_before) {
            (WriteOrder::Epochs(order), _) => order.own == NOT_NUMBERED,
            (_, before) => before == Some(NOT_NUMBERED),
        };
        if needs_number {
            if !self.following.epochs(member, |numbers| numbers.has_space(stream, 1)) {
                return false;
            }
            self.number(server, 0);
        }
        true
    }

    /// Notes the end of a command in the numbers of the epochs.
    fn note_end(&mut self, id: RequestId) {
        let request = self.base.request(id);
        let (order, before, stream) = (request.order, request.flush_before, self.stream);
        self.following.epochs(request.member, |numbers| match (order, before) {
            (WriteOrder::Epochs(order), _) => {
                order.epochs().for_each(|epoch| numbers.on_done(epoch));
                numbers.on_answer(stream);
            }
            (_, Some(before)) => {
                numbers.on_done(before);
                numbers.on_flushed(before);
                numbers.on_answer(stream);
            }
            _ => {}
        });
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
        self.admit_group(writes, tag, durable, None).map(|(seq, _)| seq)
    }

    fn admit_followed(
        &mut self,
        writes: &mut [Write<P>],
        tag: u64,
        durable: bool,
        follower: u16,
    ) -> Result<(Seq, FollowWay), Refusal> {
        self.admit_group(writes, tag, durable, Some(follower))
    }

    fn share(&mut self, following: &Arc<SharedFollowing>) {
        self.following = Shared::Volume(Arc::clone(following));
        start_epochs(&mut self.following, &self.base.topology, self.stream);
    }

    fn set_closing(&mut self, is_closing: bool) {
        self.is_closing = is_closing;
        if is_closing && self.base.failure.is_none() {
            let unflushed = self.unflushed_drive();
            self.flush_followed(unflushed);
        }
    }

    fn set_core(&mut self, core: u32) {
        self.core = core;
    }

    fn has_numbered_unsent(&self) -> bool {
        // Requests get their numbers in the order in which they leave, so the first one has one if
        // any has.
        self.base.queues.iter().filter_map(|queue| queue.front()).any(|id| {
            let request = self.base.request(*id);
            match (request.order, request.flush_before) {
                (WriteOrder::Epochs(order), _) => order.own != NOT_NUMBERED,
                (_, before) => before.is_some_and(|before| before != NOT_NUMBERED),
            }
        })
    }

    fn queues_per_server(&self) -> u16 {
        QUEUES_PER_SERVER
    }

    fn next_request(&mut self, path: u16) -> Option<Dispatch> {
        let (server, queue) = (path / QUEUES_PER_SERVER, path % QUEUES_PER_SERVER);
        let id = *self.base.queues[usize::from(server)].front()?;
        if self.queue_of(id) != usize::from(queue) || !self.number_first(server.into(), id) {
            return None;
        }
        self.base.queues[usize::from(server)].pop_front();
        let core_queue = self.core_queue();
        let request = self.base.request(id);
        if let WriteOrder::Epochs(order) = request.order {
            let pin = &mut self.pins[usize::from(request.member.0)];
            if pin.dispatch(order.barrier, core_queue) != core_queue {
                probe::count_rare(Rare::OpimqPinned);
            }
        }
        Some(Dispatch { id, ordered: None })
    }

    fn on_request_done(&mut self, id: RequestId, result: Result<(), Cause>) {
        let request = self.base.request(id);
        let (seq, is_flush) = (request.seq, request.kind == Kind::Flush);
        let has_epoch =
            matches!(request.order, WriteOrder::Epochs(_)) || request.flush_before.is_some();
        let is_of_followed = is_flush && request.tag == FOLLOWED;
        if let Err(cause) = result {
            self.base.poison_by_request(id, cause);
            self.base.complete_and_free(id);
            self.discard_waiting();
            return;
        }
        self.note_end(id);
        self.flush_count -= u32::from(is_flush && has_epoch);
        self.base.complete_and_free(id);
        if self.base.failure.is_some() {
            // The failed FLUSH of another stream may have lost writes that this one covers (trap
            // T22).
            return;
        }
        if !is_flush {
            self.base.window.count_request(seq, seq);
        }
        match self.apart {
            _ if is_of_followed => self.is_flushing_followed = false,
            _ if has_epoch && is_flush => self.flushed = self.flushed.max(seq),
            _ if has_epoch => {}
            Some(apart) if apart.outstanding > 1 => {
                self.apart = Some(Apart { outstanding: apart.outstanding - 1, ..apart });
            }
            Some(apart) => self.continue_apart(apart),
            None => {}
        }
        self.note_durable();
        self.send_waiting();
        if self.is_closing && self.base.failure.is_none() {
            let unflushed = self.unflushed_drive();
            self.flush_followed(unflushed);
        }
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

/// Begins the epochs of a stream on all drives.
fn start_epochs(following: &mut Shared, topology: &Topology, stream: u16) {
    for (_, index) in topology.members().iter().zip(0..) {
        following.epochs(Member(index), |numbers| numbers.start(stream, 0));
    }
}

//! Engine `barrier`: the drive itself keeps the order (*Barrier-Enabled IO Stack for Flash
//! Storage*, FAST '18).
//!
//! ```text
//! groups:     w1 w2 │ w3 │ w4 w5 │       │: the last write of a group is a barrier
//! scheduler:  one epoch after the other, in any order within an epoch
//! drive:      its cache goes to the medium epoch by epoch
//! ```
//!
//! - *One drive.* A group is an epoch of the drive. The engine waits for nothing: groups go to the
//!   drive one behind the other, and the drive's cache barrier keeps their order.
//! - *Several drives.* A cache barrier orders the writes of one drive. So a group for another drive
//!   waits until all groups before it are durable, by a FLUSH. The same holds before and after a
//!   group that lies on several drives, or that has a discard, which drives take without an order.
//!   The paper has one drive; this *switch* is ours.
//! - *The same blocks twice in a group.* Each write of such a group is an epoch.
//! - *Merging.* Writes of several groups are never merged: a power cut may leave a part of a write.

use alloc::collections::VecDeque;
use alloc::vec::Vec;

use super::base::{Base, has_base};
use super::group_place::GroupPlace;
use super::none::FlushRound;
use super::{
    Capabilities, Cause, Dispatch, Engine, Failure, Limits, Marks, Payload, Refusal, RequestId,
    Write,
};
use crate::attribute::{Kind, Seq};
use crate::dispatch::epoch_scheduler::{EpochScheduler, Scheduled, Wish};
use crate::probe::{self, Plant, Rare};
use crate::topology::Topology;
use crate::write_order::{DriveOrder, WriteOrder};

/// The capabilities of the engine.
pub(super) const CAPABILITIES: Capabilities = Capabilities {
    keeps_order: true,
    is_serial: false,
    completes_durable: false,
    keeps_log: false,
    needs_binding: false,
    orders_at_target: false,
    can_replay: false,
    drive_order: DriveOrder::Barrier,
    queues_per_server: 1,
};

/// The most requests among which the scheduler chooses the next one.
const CHOICE_MAX: usize = 64;

/// The `barrier` engine of one stream.
#[derive(Debug)]
pub struct Barrier<P> {
    base: Base<P>,
    flush: FlushRound,
    /// The groups that wait for a switch, oldest first.
    waiting: VecDeque<WaitingGroup>,
    /// The place of the groups that were started last.
    started_on: GroupPlace,
    /// The last group that was started.
    last_started: Seq,
    /// The requests of the started groups on one drive.
    scheduler: EpochScheduler<RequestId>,
    /// The block behind the last request that the scheduler has given out.
    position: u64,
    /// Empty lists for [`WaitingGroup::requests`], so that their memory is used again.
    spare_lists: Vec<Vec<RequestId>>,
}

/// A group that was admitted and not started.
#[derive(Debug)]
struct WaitingGroup {
    seq: Seq,
    place: GroupPlace,
    requests: Vec<RequestId>,
}

impl<P: Payload> Barrier<P> {
    /// The engine of a new stream.
    #[must_use]
    pub fn new(topology: Topology, limits: Limits) -> Self {
        Self {
            flush: FlushRound::default(),
            waiting: VecDeque::new(),
            started_on: GroupPlace::Nowhere,
            last_started: limits.start,
            scheduler: EpochScheduler::default(),
            position: 0,
            spare_lists: Vec::new(),
            base: Base::new(topology, limits),
        }
    }

    /// Starts the waiting groups, up to one that needs a switch. If all groups before that one are
    /// durable, the switch is done; else it begins.
    fn start_waiting(&mut self) {
        while let Some(group) = self.waiting.front()
            && self.base.failure.is_none()
        {
            let place = group.place;
            let needs_switch = match (self.started_on, place) {
                (GroupPlace::Nowhere, _) | (_, GroupPlace::Nowhere) => false,
                (GroupPlace::Drive(one), GroupPlace::Drive(other)) => one != other,
                (GroupPlace::Unordered, _) | (_, GroupPlace::Unordered) => true,
            };
            if needs_switch
                && self.base.window.durable() < self.last_started
                && !probe::is_bug_planted(Plant::BarrierNoSwitch)
            {
                // The caller may want later groups durable, which wait for this switch.
                self.flush.start_for(&mut self.base, self.last_started);
                if self.base.window.durable() < self.last_started {
                    return;
                }
            }
            if needs_switch {
                probe::count_rare(Rare::BarrierSwitch);
            }
            if place != GroupPlace::Nowhere {
                self.started_on = place;
            }
            if let Some(group) = self.waiting.pop_front() {
                self.start(group);
            }
        }
    }

    /// Passes the requests of a group to the scheduler, or to the queues if nothing keeps their
    /// order.
    fn start(&mut self, WaitingGroup { seq, place, mut requests }: WaitingGroup) {
        self.last_started = seq;
        if requests.is_empty() {
            self.base.window.complete_empty_group();
        } else if place == GroupPlace::Unordered {
            self.base.shaped.append(&mut requests);
            self.base.note_dirty(seq);
            self.base.enqueue();
        } else {
            self.base.shaped.append(&mut requests);
            self.base.note_dirty(seq);
            let has_overlap = self.base.has_overlap();
            let last = self.base.shaped.len() - 1;
            for (index, id) in self.base.shaped.drain(..).enumerate() {
                let is_barrier = index == last || has_overlap;
                let wish = if is_barrier { Wish::Barrier } else { Wish::Ordered };
                self.scheduler.insert(id, wish);
            }
        }
        self.spare_lists.push(requests);
    }

    /// The place in the scheduler of the request to send next: the first one from the last position
    /// on, as an elevator goes.
    fn choose(&self) -> Option<usize> {
        let ready = self.scheduler.ready().take(CHOICE_MAX).enumerate();
        let distance = |id: &RequestId| self.base.request(*id).lba.wrapping_sub(self.position);
        ready.min_by_key(|(_, id)| distance(id)).map(|(place, _)| place)
    }

    /// Frees all requests that are not sent, because the stream has failed.
    fn discard_unsent(&mut self) {
        let waiting = self.waiting.drain(..).flat_map(|group| group.requests);
        for id in waiting.chain(self.scheduler.take_all()) {
            self.base.complete_and_free(id);
        }
    }
}

has_base!(Barrier);

impl<P: Payload> Engine<P> for Barrier<P> {
    fn admit(&mut self, writes: &mut [Write<P>], tag: u64, durable: bool) -> Result<Seq, Refusal> {
        let (seq, bytes) = self.base.shape_and_number(writes, tag, durable)?;
        let is_durable_when_complete = !self.base.has_volatile_member;
        let request_count = self.base.shaped.len() as u32;
        self.base.window.add_group(request_count, is_durable_when_complete, bytes);
        let place = self.base.place_of_shaped();
        let mut requests = self.spare_lists.pop().unwrap_or_default();
        requests.append(&mut self.base.shaped);
        self.waiting.push_back(WaitingGroup { seq, place, requests });
        self.start_waiting();
        if durable {
            self.ask_durable(seq);
        }
        Ok(seq)
    }

    fn next_request(&mut self, server: u16) -> Option<Dispatch> {
        if let Some(id) = self.base.queues[usize::from(server)].pop_front() {
            return Some(Dispatch { id, ordered: None });
        }
        let place = self.choose()?;
        let id = self.scheduler.ready().nth(place).copied()?;
        if self.base.request(id).server != server {
            return None;
        }
        let Scheduled { request: id, order } = self.scheduler.take(place)?;
        let request = self.base.request_mut(id);
        request.order = WriteOrder::Ordered { barrier: order == Wish::Barrier };
        self.position = request.lba + u64::from(request.blocks);
        Some(Dispatch { id, ordered: None })
    }

    fn on_request_done(&mut self, id: RequestId, result: Result<(), Cause>) {
        let request = self.base.request(id);
        let (first, last) = (request.seq, request.seq_end());
        let is_flush = request.kind == Kind::Flush;
        if let Err(cause) = result {
            self.base.poison_by_request(id, cause);
            self.base.complete_and_free(id);
            self.discard_unsent();
            return;
        }
        self.base.complete_and_free(id);
        if self.base.failure.is_some() {
            return;
        }
        if is_flush {
            self.flush.on_flush_succeeded(&mut self.base);
        } else {
            self.base.window.count_request(first, last);
            self.flush.start_if_due(&mut self.base);
        }
        self.start_waiting();
    }

    fn poll(&mut self) -> Marks {
        self.base.deliver_without_replay()
    }

    fn ask_durable(&mut self, seq: Seq) {
        self.flush.request(seq.min(self.base.window.last()));
        if self.base.failure.is_none() {
            self.flush.start_if_due(&mut self.base);
            self.start_waiting();
        }
    }

    fn poison(&mut self, failure: Failure) {
        self.base.poison(failure);
        self.discard_unsent();
    }
}

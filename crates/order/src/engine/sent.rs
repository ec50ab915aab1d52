//! The requests that were sent to one server.
//!
//! The engine keeps each request until it is released, because the server may lose it in a crash.
//! When the server is back, the engine sends the lost requests again, before anything new (promise
//! P7).

use alloc::collections::VecDeque;

use super::RequestId;
use super::base::Base;
use crate::attribute::Seq;
use crate::probe::{self, Plant, Rare};
use crate::topology::Extent;

/// The requests of one stream that were given out for one server.
///
/// In steady state a request costs a push and a pop here. The list has the order in which the
/// requests were sent, which is the order of (seq, index). A replay keeps this order.
#[derive(Debug)]
pub(super) struct SentRequests {
    /// The requests that were given out and are not released, oldest first.
    sent: VecDeque<RequestId>,
    /// The number of requests in `sent` that are not complete.
    incomplete_count: usize,
    /// The requests that are sent again, oldest first. A request leaves when it has ended and all
    /// before it have ended.
    replays: VecDeque<RequestId>,
    /// The number of requests at the front of `replays` that have been given out.
    replays_given_out: usize,
    /// The last ordinal that was given. Each binding counts its ordinals from 1, without gaps.
    last_ordinal: u32,
    /// Whether the connection is lost. Then nothing is given out.
    is_suspended: bool,
}

/// A request that is given out, with its ordinal.
pub(super) struct GivenOut {
    pub(super) id: RequestId,
    pub(super) ordinal: u32,
}

impl SentRequests {
    /// The list for a server whose log has `slots` slots. The list never has more requests than
    /// that.
    pub(super) fn new(slots: u32) -> Self {
        Self {
            sent: VecDeque::with_capacity(slots.min(1 << 16) as usize),
            incomplete_count: 0,
            replays: VecDeque::new(),
            replays_given_out: 0,
            last_ordinal: 0,
            is_suspended: false,
        }
    }

    /// Takes the next request to send: first the replays, then the requests in `queue`, which were
    /// never sent.
    #[inline]
    pub(super) fn next_request(&mut self, queue: &mut VecDeque<RequestId>) -> Option<GivenOut> {
        if self.is_suspended {
            return None;
        }
        let id = if let Some(id) = self.replays.get(self.replays_given_out) {
            self.replays_given_out += 1;
            *id
        } else {
            let id = queue.pop_front()?;
            self.sent.push_back(id);
            self.incomplete_count += 1;
            id
        };
        self.last_ordinal = self.last_ordinal.wrapping_add(1);
        Some(GivenOut { id, ordinal: self.last_ordinal })
    }

    /// Notes that a request of this list is complete for the first time.
    #[inline]
    pub(super) fn count_complete(&mut self) {
        self.incomplete_count -= 1;
    }

    /// Notes that the connection is lost.
    pub(super) fn suspend(&mut self) {
        self.is_suspended = true;
    }

    /// The number of requests that were given out and are not released. Each of them takes a slot
    /// of the server's log.
    #[inline]
    pub(super) fn len(&self) -> usize {
        self.sent.len()
    }

    /// The requests that were given out and are not released, oldest first.
    pub(super) fn iter(&self) -> impl Iterator<Item = RequestId> + '_ {
        self.sent.iter().copied()
    }

    pub(super) fn is_suspended(&self) -> bool {
        self.is_suspended
    }

    /// Begins a new binding: queues all requests that are not durable to be sent again, unchanged
    /// and before anything new. A later flush entry covers them only because of that order (trap
    /// T4).
    ///
    /// A request that is complete but not durable is sent again, too, because the server may have
    /// lost it with its cache. A request that is durable but not complete has lost only its
    /// completion: `on_completion_lost` is called for it.
    pub(super) fn resume<P: super::Payload>(
        &mut self,
        base: &mut Base<P>,
        is_durable: &mut dyn FnMut(Seq, u16) -> bool,
        mut on_completion_lost: impl FnMut(&mut Base<P>, RequestId),
    ) {
        self.is_suspended = false;
        self.last_ordinal = 0;
        self.replays.clear();
        self.replays_given_out = 0;
        for id in &self.sent {
            let request = base.request_mut(*id);
            request.is_replayed = !is_durable(request.seq, request.index);
            if !request.is_incomplete && probe::is_bug_planted(Plant::T4ReplayIncompleteOnly) {
                request.is_replayed = false;
            }
            let (is_incomplete, is_replayed) = (request.is_incomplete, request.is_replayed);
            if is_replayed {
                probe::count_rare(Rare::Replay);
                if !is_incomplete {
                    probe::count_rare(Rare::ReplayComplete);
                }
                self.replays.push_back(*id);
            } else if is_incomplete {
                probe::count_rare(Rare::CompletionFromList);
                self.incomplete_count -= 1;
                on_completion_lost(base, *id);
            }
        }
    }

    /// Notes that a replay has ended, and removes the ended replays from the front.
    pub(super) fn on_replay_ended<P: super::Payload>(&mut self, base: &Base<P>) {
        while self.replays.front().is_some_and(|id| !base.request(*id).is_replayed) {
            self.replays.pop_front();
            self.replays_given_out -= 1;
        }
    }

    /// The number of replays that are queued or in flight.
    pub(super) fn replay_count(&self) -> usize {
        self.replays.len()
    }

    /// The oldest replay that is queued or in flight.
    pub(super) fn oldest_replay(&self) -> Option<RequestId> {
        self.replays.front().copied()
    }

    /// Ends the replay: no further request is sent again. A request that is in flight on a
    /// connection still ends.
    pub(super) fn stop_replay<P: super::Payload>(&mut self, base: &mut Base<P>) {
        if self.is_suspended {
            self.replays_given_out = 0;
        }
        for id in self.replays.drain(self.replays_given_out..) {
            base.request_mut(id).is_replayed = false;
        }
    }

    /// Frees the requests up to the released mark. A request that may still end, and all behind it,
    /// are kept.
    pub(super) fn free_released<P: super::Payload>(&mut self, base: &mut Base<P>, released: Seq) {
        while let Some(&id) = self.sent.front() {
            let request = base.request(id);
            if request.seq_end() > released || request.is_incomplete || request.is_replayed {
                break;
            }
            self.sent.pop_front();
            base.free(id);
        }
        debug_assert!(self.incomplete_count <= self.sent.len(), "only listed requests are counted");
    }

    /// Frees one request, released or not. Only for a plant: a request that is not released may
    /// have to be replayed (trap T14).
    pub(super) fn free_unreleased<P: super::Payload>(&mut self, base: &mut Base<P>, id: RequestId) {
        self.sent.retain(|other| *other != id);
        base.free(id);
    }

    /// Whether a request that is not complete touches these blocks.
    pub(super) fn has_incomplete_in<P: super::Payload>(
        &self,
        base: &Base<P>,
        extent: &Extent,
    ) -> bool {
        // Most incomplete requests are among the newest, so the search begins there.
        let newest_first = self.sent.iter().rev().map(|id| base.request(*id));
        let mut incomplete = newest_first.filter(|r| r.is_incomplete).take(self.incomplete_count);
        incomplete.any(|request| request.touches(extent))
    }
}

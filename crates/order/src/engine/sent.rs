//! The requests that were sent to one server: kept until released, and sent again when the server
//! has lost them (P7).

use alloc::collections::VecDeque;

use super::RequestId;
use super::base::Base;
use crate::attribute::Seq;
use crate::probe::{self, Plant, Rare};
use crate::topology::Extent;

/// The requests of one stream that were given out for one server.
///
/// In steady state a request costs a push and a pop here. The list has the order in which the requests
/// were sent, which is the order of (seq, index). Replay sends them again in this order.
#[derive(Debug)]
pub(super) struct SentRequests {
    /// Given out and not released, oldest first (T14).
    sent: VecDeque<RequestId>,
    /// How many requests in `sent` are not complete.
    unfinished: usize,
    /// The requests to be sent again, oldest first. Those in front that have ended are taken off.
    replays: VecDeque<RequestId>,
    /// How many requests at the start of `replays` have been given out.
    replays_given_out: usize,
    /// The last ordinal given (T5: dense per binding).
    ordinal: u32,
    /// The connection is lost: nothing is given out.
    suspended: bool,
}

impl SentRequests {
    /// The list for a server whose log has this many slots. No more requests can be kept for it.
    pub(super) fn new(slots: u32) -> Self {
        Self {
            sent: VecDeque::with_capacity(slots.min(1 << 16) as usize),
            unfinished: 0,
            replays: VecDeque::new(),
            replays_given_out: 0,
            ordinal: 0,
            suspended: false,
        }
    }

    /// The next request and its ordinal: replays, then what was never sent.
    #[inline]
    pub(super) fn next(&mut self, fresh: &mut VecDeque<RequestId>) -> Option<(RequestId, u32)> {
        if self.suspended {
            return None;
        }
        let id = if let Some(id) = self.replays.get(self.replays_given_out) {
            self.replays_given_out += 1;
            *id
        } else {
            let id = fresh.pop_front()?;
            self.sent.push_back(id);
            self.unfinished += 1;
            id
        };
        self.ordinal = self.ordinal.wrapping_add(1);
        Some((id, self.ordinal))
    }

    /// Notes that a request that was given out here is complete for the first time.
    #[inline]
    pub(super) fn count_complete(&mut self) {
        self.unfinished -= 1;
    }

    pub(super) fn suspend(&mut self) {
        self.suspended = true;
    }

    /// The number of requests that were given out and are not released. They take as many slots of
    /// the server's log.
    #[inline]
    pub(super) fn len(&self) -> usize {
        self.sent.len()
    }

    /// The requests that were given out and are not released, oldest first.
    pub(super) fn sent(&self) -> impl Iterator<Item = RequestId> + '_ {
        self.sent.iter().copied()
    }

    pub(super) fn is_suspended(&self) -> bool {
        self.suspended
    }

    /// Begins a new binding. Everything on the list that is not durable is sent again, as it was,
    /// before anything new. Only because of that a later flush entry covers it (T4). A request that
    /// is complete but not durable may be lost, just as one in flight.
    ///
    /// Calls `complete` for each request whose completion was lost.
    pub(super) fn resume<P: super::Payload>(
        &mut self,
        base: &mut Base<P>,
        durable: &mut dyn FnMut(Seq, u16) -> bool,
        mut complete: impl FnMut(&mut Base<P>, RequestId),
    ) {
        self.suspended = false;
        self.ordinal = 0;
        self.replays.clear();
        self.replays_given_out = 0;
        for id in &self.sent {
            let request = base.request_mut(*id);
            request.is_replayed = !durable(request.seq, request.index);
            if !request.is_incomplete && probe::planted(Plant::T4ReplayIncompleteOnly) {
                request.is_replayed = false;
            }
            let (is_incomplete, is_replayed) = (request.is_incomplete, request.is_replayed);
            if is_replayed {
                probe::hit(Rare::Replay);
                if !is_incomplete {
                    probe::hit(Rare::ReplayComplete);
                }
                self.replays.push_back(*id);
            } else if is_incomplete {
                probe::hit(Rare::CompletionFromList);
                self.unfinished -= 1;
                complete(base, *id);
            }
        }
    }

    /// Notes that a replay has ended, and takes ended replays off the front.
    pub(super) fn replay_ended<P: super::Payload>(&mut self, base: &Base<P>) {
        while self.replays.front().is_some_and(|id| !base.request(*id).is_replayed) {
            self.replays.pop_front();
            self.replays_given_out -= 1;
        }
    }

    /// The number of replays that are queued or in flight.
    pub(super) fn replays(&self) -> usize {
        self.replays.len()
    }

    /// The oldest replay that is queued or in flight.
    pub(super) fn oldest_replay(&self) -> Option<RequestId> {
        self.replays.front().copied()
    }

    /// Ends the replay: nothing more is sent again. A request in flight still ends, if its
    /// connection is there.
    pub(super) fn stop_replay<P: super::Payload>(&mut self, base: &mut Base<P>) {
        if self.suspended {
            self.replays_given_out = 0;
        }
        for id in self.replays.drain(self.replays_given_out..) {
            base.request_mut(id).is_replayed = false;
        }
    }

    /// Forgets released requests. A request that may still end is kept, whatever the mark is.
    pub(super) fn release<P: super::Payload>(&mut self, base: &mut Base<P>, released: Seq) {
        while let Some(&id) = self.sent.front() {
            let request = base.request(id);
            if request.seq_end() > released || request.is_incomplete || request.is_replayed {
                break;
            }
            self.sent.pop_front();
            base.free(id);
        }
        debug_assert!(self.unfinished <= self.sent.len(), "what is not there is not unfinished");
    }

    /// Drops one request from the list, wherever it is. For a plant only: this must never be done
    /// to a request that is not released (T14).
    pub(super) fn drop_one<P: super::Payload>(&mut self, base: &mut Base<P>, id: RequestId) {
        self.sent.retain(|kept| *kept != id);
        base.free(id);
    }

    /// Whether a request that is not complete touches these blocks (P9).
    pub(super) fn touches<P: super::Payload>(&self, base: &Base<P>, extent: &Extent) -> bool {
        // Most of the unfinished requests are the newest.
        let newest = self.sent.iter().rev().map(|id| base.request(*id));
        newest.filter(|r| r.is_incomplete).take(self.unfinished).any(|r| r.touches(extent))
    }
}

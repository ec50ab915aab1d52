//! The stream driver: makes all decisions about an open stream. Its inputs are the calls of the
//! owner, the bytes of the connections, and the clock.
//!
//! The shell has the sockets, threads and buffers. One thread at a time drives the stream: the
//! owner's thread during a call, and the thread of the [`BackgroundDriver`] while the owner is not
//! calling. The thread runs rounds. A round has these steps, in order:
//!
//! ```text
//! 1. bytes of each server, the end of its connection → received, closed
//! 2. the ends of associations and new connections    → association_ended, give_up, connected
//! 3. pump(now), then the contents of each outbox are sent
//! 4. nothing has arrived, or deadline(now) is past   → timeout(now)
//! 5. check_connections(now), then each event is handled
//! ```
//!
//! The shell reports the end of an association after the bytes that arrived before it, and before
//! it sends anything in answer to them. The bytes may come from a target that has been started
//! again since, and nothing may be sent to that target before it is checked (trap T27). The shell
//! reads the [`marks`](StreamDriver::marks) between rounds. Times are nanoseconds of one monotonic
//! clock.

mod attention;
mod background;
mod calls;
mod connection;
mod reads;
mod start;
mod waitlist;

use alloc::collections::VecDeque;
use alloc::vec::Vec;

use riopipe_order::attribute::{Seq, StreamId};
use riopipe_order::engine::{Failure, Marks, Payload, Refusal, Write};
use riopipe_order::following::FollowWay;
use riopipe_order::probe::{self, Plant, Rare};
use riopipe_order::topology::Topology;

use super::queue_pair::SessionError;
use super::reconnect::ConnectRequest;
use super::stream::{ConnectionState, ReadSink, StreamConfig, StreamSession};
use crate::outbox::Outbox;
use crate::stages::Spent;

pub use attention::Attention;
pub use background::{BackgroundConfig, BackgroundDriver, Finding, ROUNDS_MAX};
use calls::Closing;
pub use calls::{Closed, NotSubmitted, Until, WaitEnd};
use connection::ServerConnection;
use reads::Reads;
pub use reads::{READS_MAX, ReadFailure};
pub use start::{
    MERGE_FROM, StartError, StartStep, StreamNumbers, StreamShared, StreamSpec, StreamStart,
};
pub use waitlist::{Entry, Mark, MarksSnapshot, Place, StreamIncarnation, Waitlist};

/// An event that a stream's driver reports to its shell.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum StreamEvent {
    /// The connection of a link has ended. The shell closes it.
    ConnectionEnded {
        /// The link.
        link: u16,
    },
    /// The driver requests a connection. The shell calls [`connected`](StreamDriver::connected)
    /// when the connection is made, or [`give_up`](StreamDriver::give_up). The request is not
    /// repeated.
    Connect(ConnectRequest),
    /// The stream is bound again on a server that it had lost.
    Back {
        /// The server.
        server: u16,
        /// The time for which the stream was without the server, ns.
        unreachable_ns: u64,
        /// The number of requests that were sent again, to any server.
        replayed: u64,
    },
}

/// The longest sleep of an owner in a call, ns. The owner must check the stream from time to time,
/// because another stream's failed FLUSH makes this stream fail although nothing arrives (trap
/// T22).
const SLEEP_NS_MAX: u64 = 1_000_000_000;

/// The number of admitted groups from which on the stream should send without a request of the
/// owner. This number of groups with one block each fills four TCP segments of 64 KiB. With fewer
/// groups, each segment would cost a system call on both sides.
const UNSENT_GROUPS_MAX: usize = 64;

/// The marks of a stream, with the released mark.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct ReportedMarks {
    marks: Marks,
    released: Seq,
}

/// An idle stream whose last group is not durable.
#[derive(Clone, Copy, Debug)]
struct IdleUndurable {
    /// The last group.
    last: Seq,
    /// When the stream was first found idle with this group, ns.
    since: u64,
}

/// The driver of an open stream; see the [module](self).
pub struct StreamDriver<P> {
    session: StreamSession<P>,
    /// The driver's state of each link.
    servers: Vec<ServerConnection>,
    events: VecDeque<StreamEvent>,
    /// Whether [`check_connections`](Self::check_connections) has something to do.
    connections_changed: bool,
    /// Whether there are requests that [`pump`](Self::pump) has not yet turned into commands.
    has_unsent: bool,
    /// The number of groups admitted since the last [`pump`](Self::pump).
    admitted_count: usize,
    /// The first failure that was reported (promise P6).
    failure: Option<Failure>,
    attention: Attention,
    /// Set while the stream is idle and its last group is not durable.
    idle_undurable: Option<IdleUndurable>,
    /// The reads that have not ended.
    reads: Reads,
    /// The step of the close, while the owner closes the stream.
    closing: Option<Closing>,
    /// The group up to which the owner may have freed the payload, by its last
    /// [`reclaim`](Self::reclaim).
    freed_up_to: Seq,
    /// The group up to which other threads wait for durability.
    durable_awaited: Seq,
    /// The group up to which this durability has been requested from the session.
    durable_requested: Seq,
    /// The marks that were last reported to the owner; see [`Until::Moved`].
    last_reported: ReportedMarks,
}

impl<P: Payload + AsRef<[u8]>> StreamDriver<P> {
    /// The driver of a session; `queues` has for each link the id of its queue, and the number of
    /// commands for which the queue has space.
    #[must_use]
    pub fn new(session: StreamSession<P>, queues: impl Iterator<Item = (u16, usize)>) -> Self {
        let servers = queues.map(|(qid, depth)| ServerConnection::new(qid, depth)).collect();
        let start = session.config().start;
        let last_reported =
            ReportedMarks { marks: session.marks(), released: session.engine().released() };
        Self {
            session,
            servers,
            events: VecDeque::new(),
            connections_changed: false,
            has_unsent: false,
            admitted_count: 0,
            failure: None,
            attention: Attention::default(),
            idle_undurable: None,
            reads: Reads::default(),
            closing: None,
            freed_up_to: start,
            durable_awaited: start,
            durable_requested: start,
            last_reported,
        }
    }

    /// Admits a group. If it is admitted, takes the payloads out of `writes`. The next
    /// [`pump`](Self::pump) sends the group. If the stream [should send](Self::should_send), that
    /// is due at once.
    ///
    /// # Errors
    /// The limit that refuses the group, or the failure of the stream. Nothing was admitted.
    #[inline]
    pub fn admit(
        &mut self,
        writes: &mut [Write<P>],
        tag: u64,
        durable: bool,
    ) -> Result<Seq, Refusal> {
        let seq = self.session.admit(writes, tag, durable)?;
        self.count_admitted(durable);
        Ok(seq)
    }

    /// As [`admit`](Self::admit), for a group that another stream of the volume follows. It should
    /// be sent at once. Returns how the stream follows it.
    ///
    /// # Errors
    /// As [`admit`](Self::admit), and [`Refusal::NoFollower`].
    pub fn admit_followed(
        &mut self,
        writes: &mut [Write<P>],
        tag: u64,
        durable: bool,
        follower: StreamId,
    ) -> Result<(Seq, FollowWay), Refusal> {
        let admitted = self.session.admit_followed(writes, tag, durable, follower)?;
        // The follower waits for it, or the drive holds back what the follower writes.
        self.count_admitted(true);
        Ok(admitted)
    }

    fn count_admitted(&mut self, is_awaited: bool) {
        self.admitted_count += 1;
        if is_awaited && !probe::is_bug_planted(Plant::P8DurableUnsent) {
            // A thread waits until the group is durable, or will do so. The owner may make no
            // further call before that, so the group is sent at once.
            self.admitted_count = UNSENT_GROUPS_MAX;
        }
    }

    /// Checks whether a group of one write fits into all bounds once nothing else is in flight.
    ///
    /// # Errors
    /// See [`Engine::check_write`](riopipe_order::engine::Engine::check_write).
    pub fn check_write(&self, lba: u64, blocks: u32, durable: bool) -> Result<(), Refusal> {
        self.session.check_write(lba, blocks, durable)
    }

    /// Whether the groups admitted since the last [`pump`](Self::pump) should be sent now, without
    /// a request of the owner: one of them is durable, or there are `UNSENT_GROUPS_MAX` of them.
    #[inline]
    #[must_use]
    pub fn should_send(&self) -> bool {
        self.admitted_count >= UNSENT_GROUPS_MAX
    }

    /// Counts a call of the owner. Returns whether the background driver must be woken, so that it
    /// notices when the owner stops calling again.
    #[inline]
    pub fn owner_calls(&mut self) -> bool {
        self.attention.called()
    }

    /// Ends a call of the owner, before it releases the stream. Returns whether the background driver
    /// must be woken, because another stream needs that a thread drives this one.
    #[inline]
    pub fn owner_call_ends(&mut self) -> bool {
        self.session.end_call()
    }

    /// The record that the owner and the background driver keep for each other.
    pub fn attention_mut(&mut self) -> &mut Attention {
        &mut self.attention
    }

    /// The marks; groups up to them count as delivered (trap T1).
    ///
    /// # Errors
    /// The failure of the stream: each call returns the same one (promise P6).
    #[inline]
    pub fn marks(&mut self) -> Result<Marks, Failure> {
        if let Some(failure) = self.failure {
            return Err(failure);
        }
        let last = self.session.engine().last_admitted();
        let polled = self.session.poll();
        // If the last group has changed, the engine has inserted a flush of its own, and the flush
        // must be sent.
        self.has_unsent |= self.session.engine().last_admitted() != last;
        polled.inspect_err(|failure| {
            self.failure = Some(*failure);
            // The session may have dropped connections.
            self.connections_changed = true;
        })
    }

    /// The marks that were delivered last, also of a stream that has failed since.
    #[inline]
    #[must_use]
    pub fn delivered(&self) -> Marks {
        self.session.marks()
    }

    /// Takes in the bytes that arrived over a link that [is open](Self::is_open); `sink` gets the
    /// bytes of the reads in flight. Returns the number of bytes of `buf` that were used up.
    ///
    /// # Errors
    /// The target broke the protocol, or refused the queue. The shell sends the contents of the
    /// outbox, which report the reason, and then calls [`closed`](Self::closed).
    #[inline]
    pub fn received(
        &mut self,
        link: u16,
        now: u64,
        buf: &[u8],
        sink: &mut ReadSink<'_>,
    ) -> Result<usize, SessionError> {
        self.session.receive(link, now, buf, sink)
    }

    /// The length of the PDU at the start of `buf`, in bytes.
    #[inline]
    #[must_use]
    pub fn need(&self, link: u16, buf: &[u8]) -> usize {
        self.session.need(link, buf)
    }

    /// Whether the driver needs to know the core on which the caller runs before each
    /// [`pump`](Self::pump).
    #[inline]
    #[must_use]
    pub fn wants_core(&self) -> bool {
        self.session.queues_per_server() > 1
    }

    /// Notes the core on which the caller runs. An engine with a queue for each core sends what
    /// follows over the queue of this one.
    #[inline]
    pub fn set_core(&mut self, core: u32) {
        self.session.set_core(core);
    }

    /// Turns the requests that may be sent now into commands in the outboxes.
    #[inline]
    pub fn pump(&mut self, now: u64) {
        if let Some(seq) = self.durable_to_request() {
            self.durable_requested = seq;
            self.session.ask_durable(seq);
        }
        self.start_reads();
        self.has_unsent = false;
        self.admitted_count = 0;
        // The session may have given a connection up since the last check.
        self.connections_changed |= self.session.is_connecting();
        self.session.pump(now);
    }

    /// Sets the last group for whose durability other threads wait: `seq`. When the groups up to it
    /// have been submitted, the drives are flushed, unless a later group has requested that.
    #[inline]
    pub fn want_durable(&mut self, seq: Seq) {
        if seq != self.durable_awaited {
            self.durable_awaited = seq;
            self.has_unsent |= self.durable_to_request().is_some();
        }
    }

    /// The group up to which a flush must be requested now, because another thread waits until it
    /// is durable; `None` if no thread does, or the flush was requested before.
    fn durable_to_request(&self) -> Option<Seq> {
        if self.durable_awaited <= self.durable_requested {
            return None;
        }
        let last_submitted = self.session.engine().last_admitted();
        let seq = self.durable_awaited.min(last_submitted);
        if seq > self.durable_requested { Some(seq) } else { None }
    }

    /// The bytes to send over a link.
    #[inline]
    pub fn outbox(&mut self, link: u16) -> &mut Outbox<P> {
        self.session.outbox(link)
    }

    /// Handles connections whose target has not answered for too long: they count as lost. The
    /// shell calls this after it has found that no bytes have arrived.
    pub fn timeout(&mut self, now: u64) {
        while let Some(link) = self.session.stalled(now) {
            self.session.lost(link, riopipe_order::engine::Cause::TimedOut, now);
            self.connections_changed = true;
        }
    }

    /// The next event for the shell. Each is returned once.
    #[inline]
    pub fn next_event(&mut self) -> Option<StreamEvent> {
        self.events.pop_front()
    }

    /// When a round is due even if nothing arrives, ns; `None` if a round is due only after an
    /// arrival.
    #[must_use]
    pub fn deadline(&self, now: u64) -> Option<u64> {
        if self.failure.is_none() && self.wants_pump() {
            return Some(now);
        }
        [self.session.deadline(now), self.read_deadline()].into_iter().flatten().min()
    }

    /// Whether there are requests that the next [`pump`](Self::pump) turns into commands. The next
    /// round is then due at once.
    #[must_use]
    pub fn wants_pump(&self) -> bool {
        self.has_unsent || self.can_start_read()
    }

    /// The time until which a call of the owner may sleep if nothing arrives, ns.
    #[must_use]
    pub fn sleeps_until(&self, now: u64) -> u64 {
        let longest = now.saturating_add(SLEEP_NS_MAX);
        self.deadline(now).map_or(longest, |deadline| deadline.min(longest))
    }

    /// Returns the last group whose payload the driver does not need any more: the caller frees the
    /// buffers up to it. Remembers the group, because [`Until::Space`] waits for a later one.
    #[inline]
    pub fn reclaim(&mut self) -> Seq {
        self.freed_up_to = self.session.engine().payload_freed_up_to();
        self.freed_up_to
    }

    /// The background driver calls this after its rounds, and after [`marks`](Self::marks). A
    /// stream that has been idle for `flush_ns` is flushed, so that the targets can drop its
    /// entries from their logs (trap T1). Returns when the next round is due even if nothing
    /// arrives: at once if the last round `worked`, and never (`None`) for a stream that has
    /// failed.
    pub fn finish_background_rounds(
        &mut self,
        worked: bool,
        flush_ns: u64,
        now: u64,
    ) -> Option<u64> {
        self.session.end_call();
        if self.failure.is_some() {
            return None;
        }
        let flush_due = self.flush_if_idle(flush_ns, now);
        let next_round = [self.deadline(now), flush_due].into_iter().flatten().min();
        if worked { Some(now) } else { next_round }
    }

    /// Requests a flush if the stream has been idle for `flush_ns` and its last group is not
    /// durable. Returns the time of the flush if it is due later.
    fn flush_if_idle(&mut self, flush_ns: u64, now: u64) -> Option<u64> {
        let engine = self.session.engine();
        let last = engine.last_admitted();
        let needs_flush = self.session.config().engine.capabilities().keeps_log
            && self.session.marks().durable < last
            && engine.is_idle();
        if !needs_flush || probe::is_bug_planted(Plant::T1NoBackgroundFlush) {
            self.idle_undurable = None;
            return None;
        }
        let since = match self.idle_undurable {
            Some(idle) if idle.last == last => idle.since,
            _ => now,
        };
        self.idle_undurable = Some(IdleUndurable { last, since });
        let due = since.saturating_add(flush_ns);
        if now < due {
            return Some(due);
        }
        probe::count_rare(Rare::BackgroundFlush);
        self.session.ask_durable(last);
        self.has_unsent = true;
        self.idle_undurable = None;
        None
    }

    /// The id of the stream.
    #[must_use]
    pub fn id(&self) -> StreamId {
        self.session.config().stream
    }

    /// The configuration of the stream.
    #[must_use]
    pub fn config(&self) -> &StreamConfig {
        self.session.config()
    }

    /// The volume's topology.
    #[must_use]
    pub fn topology(&self) -> &Topology {
        self.session.topology()
    }

    /// The last submitted group.
    #[must_use]
    pub fn last(&self) -> Seq {
        self.session.engine().last_admitted()
    }

    /// The released mark: groups up to it are complete, durable and delivered (trap T1).
    #[inline]
    #[must_use]
    pub fn released(&self) -> Seq {
        self.session.engine().released()
    }

    /// The number of requests that were sent again to targets that had been lost (promise P7).
    #[must_use]
    pub fn replayed(&self) -> u64 {
        self.session.engine().replayed_count()
    }

    /// The state of a link.
    #[must_use]
    pub fn connection(&self, link: u16) -> ConnectionState {
        self.session.connection(link)
    }

    /// The id of the queue of each link.
    pub fn qids(&self) -> impl Iterator<Item = u16> + '_ {
        self.servers.iter().map(|server| server.qid)
    }

    /// Whether the next submitted group must be traced; see [`StreamSession::traces_next`].
    #[inline]
    pub fn traces_next(&mut self) -> bool {
        self.session.traces_next()
    }

    /// Begins to trace group `seq`, which was admitted between `since` and `now`, ns.
    #[cold]
    pub fn trace(&mut self, seq: Seq, since: u64, now: u64) {
        self.session.trace(seq, since, now);
    }

    /// Whether the session needs a call of [`instant`](Self::instant). The shell checks this after
    /// [`pump`](Self::pump) and [`received`](Self::received).
    #[inline]
    #[must_use]
    pub fn wants_instant(&self) -> bool {
        self.session.wants_instant()
    }

    /// Gives the session the present time, ns.
    #[cold]
    pub fn instant(&mut self, now: u64) {
        self.session.instant(now);
    }

    /// The time that the traced group spent in each stage, if it is complete as of the last
    /// [`marks`](Self::marks).
    #[inline]
    pub fn traced(&mut self, now: impl FnOnce() -> u64) -> Option<Spent> {
        self.session.has_traced().then(|| self.session.traced(now()))
    }
}

impl<P> core::fmt::Debug for StreamDriver<P> {
    fn fmt(&self, f: &mut core::fmt::Formatter<'_>) -> core::fmt::Result {
        f.debug_struct("StreamDriver")
            .field("servers", &self.servers)
            .field("failure", &self.failure)
            .finish_non_exhaustive()
    }
}

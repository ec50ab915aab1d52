//! An open stream's driver: all that it decides between the calls of its owner, the bytes of its
//! connections and the clock.
//!
//! The shell has the sockets, threads and buffers. One thread at a time drives the stream: its
//! owner's, in a call, or that of the [`BackgroundDriver`] while the owner is elsewhere. It does
//! rounds:
//!
//! ```text
//! bytes of each server, the end of its connection → received, closed
//! the ends of associations and new connections    → association_ended, give_up, connected
//! pump(now), then each outbox is sent
//! nothing came, or deadline(now) is past          → timeout(now)
//! settle(now), then each event
//! ```
//!
//! An association that has ended is told of behind the bytes, and before anything is sent because of
//! them: they may be of a target that has been started again since (T27). The driver's
//! [`marks`](StreamDriver::marks) are read between rounds. Times are nanoseconds of one
//! monotonic clock.

mod attention;
mod background;
mod calls;
mod connection;
mod start;
mod waitlist;

use alloc::collections::VecDeque;
use alloc::vec::Vec;

use riopipe_order::attribute::{Seq, StreamId};
use riopipe_order::engine::{Failure, Marks, Payload, Refusal, Write};
use riopipe_order::probe::{self, Plant, Rare};
use riopipe_order::topology::Topology;

use super::queue_pair::SessionError;
use super::reconnect::ConnectRequest;
use super::stream::{ConnectionState, StreamConfig, StreamSession};
use crate::outbox::Outbox;
use crate::stages::Spent;

pub use attention::Attention;
pub use background::{BackgroundConfig, BackgroundDriver, Finding, ROUNDS_MAX};
pub use calls::{Closed, NotSubmitted, ReadFailure, Until, WaitEnd};
use calls::{Closing, ReadCall};
use connection::ServerConnection;
pub use start::{StartError, StartStep, StreamShared, StreamSpec, StreamStart};
pub use waitlist::{Entry, Mark, Place, Standing, StreamIncarnation, Waitlist};

/// Something that a stream's driver has for its shell.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum StreamEvent {
    /// The connection to a server is over: the shell closes it.
    Over {
        /// The server.
        server: u16,
    },
    /// A connection is wanted. It is asked for once; the shell answers with
    /// [`connected`](StreamDriver::connected) or [`give_up`](StreamDriver::give_up), as soon as it
    /// can.
    Connect(ConnectRequest),
    /// The stream is back on a server that it had lost.
    Back {
        /// The server.
        server: u16,
        /// For how long the stream was without it, ns.
        unreachable_ns: u64,
        /// Requests that were sent again, to any server.
        replayed: u64,
    },
}

/// The longest sleep of an owner in a call, ns: another stream's failed FLUSH makes this one fail
/// without anything coming in (T22).
const SLEEP_NS_MAX: u64 = 1_000_000_000;

/// Groups admitted before they are sent without being asked to: four full TCP segments of blocks.
/// Fewer cost a system call on either side for each segment.
const ADMITTED_MAX: usize = 64;

/// See the [module](self).
pub struct StreamDriver<P> {
    session: StreamSession<P>,
    servers: Vec<ServerConnection>,
    events: VecDeque<StreamEvent>,
    /// Some connection is not as it should be.
    unsettled: bool,
    /// Something was asked for that [`pump`](Self::pump) has not turned into commands yet.
    unsent: bool,
    /// Groups admitted since the last [`pump`](Self::pump).
    admitted: usize,
    /// The first failure that was reported (P6).
    failure: Option<Failure>,
    attention: Attention,
    /// The last group, if it is not durable, and since when nothing has been done about that.
    undurable: Option<(Seq, u64)>,
    /// The read of the owner's call.
    read: ReadCall,
    closing: Option<Closing>,
    /// The payload of groups up to this has been given back.
    forgotten: Seq,
    /// Other threads wait for this group to be durable, and up to which that was asked for.
    wanted: Seq,
    asked: Seq,
    /// What the owner was told last: the marks, and how far the stream is released.
    told: (Marks, Seq),
}

impl<P: Payload + AsRef<[u8]>> StreamDriver<P> {
    /// Drives a session; `queues` has the id of its queue on each server, and the commands that
    /// the queue has room for.
    #[must_use]
    pub fn new(session: StreamSession<P>, queues: impl Iterator<Item = (u16, usize)>) -> Self {
        let servers = queues.map(|(qid, depth)| ServerConnection::new(qid, depth)).collect();
        let forgotten = session.config().start;
        let told = (session.marks(), session.engine().released());
        Self {
            session,
            servers,
            events: VecDeque::new(),
            unsettled: false,
            unsent: false,
            admitted: 0,
            failure: None,
            attention: Attention::default(),
            undurable: None,
            read: ReadCall::default(),
            closing: None,
            forgotten,
            wanted: forgotten,
            asked: forgotten,
            told,
        }
    }

    /// Takes a group, whole or not at all, and the payloads out of `writes`. It leaves with the
    /// next [`pump`](Self::pump), which is due at once if the stream [is to
    /// send](Self::should_send).
    ///
    /// # Errors
    /// Which bound was hit, or that the stream has failed.
    #[inline]
    pub fn admit(
        &mut self,
        writes: &mut [Write<P>],
        tag: u64,
        durable: bool,
    ) -> Result<Seq, Refusal> {
        let seq = self.session.admit(writes, tag, durable)?;
        self.admitted += 1;
        if durable && !probe::planted(Plant::P8DurableUnsent) {
            // Somebody waits for it, or will; and nobody may call before it is there.
            self.admitted = ADMITTED_MAX;
        }
        Ok(seq)
    }

    /// Whether what has been admitted since the last [`pump`](Self::pump) is to be sent now, without
    /// being asked to: a durable group, or so many groups that waiting for more would gain nothing.
    #[inline]
    #[must_use]
    pub fn should_send(&self) -> bool {
        self.admitted >= ADMITTED_MAX
    }

    /// The owner calls. Returns whether the background driver must be woken, so that it notices
    /// when the owner goes away again.
    #[inline]
    pub fn owner_calls(&mut self) -> bool {
        self.attention.called()
    }

    /// What the owner and the background driver leave for one another.
    pub fn attention_mut(&mut self) -> &mut Attention {
        &mut self.attention
    }

    /// The marks; what they say counts as delivered (T1).
    ///
    /// # Errors
    /// The failure of the stream: the same one, however often it is asked for (P6).
    #[inline]
    pub fn marks(&mut self) -> Result<Marks, Failure> {
        if let Some(failure) = self.failure {
            return Err(failure);
        }
        let last = self.session.engine().last();
        let polled = self.session.poll();
        // The engine may have put in a flush of its own, and nothing else would send it.
        self.unsent |= self.session.engine().last() != last;
        polled.inspect_err(|failure| self.failure = Some(*failure))
    }

    /// The marks that were delivered last, also of a stream that has failed since.
    #[inline]
    #[must_use]
    pub fn delivered(&self) -> Marks {
        self.session.marks()
    }

    /// Takes in what arrived from a server that [is open](Self::is_open); `sink` gets the bytes of
    /// the read under way, with their offset in it. Returns how many bytes of `buf` were used up.
    ///
    /// # Errors
    /// The target broke the protocol, or refused the queue: the shell sends what the outbox holds,
    /// which says why, and then says [`closed`](Self::closed).
    #[inline]
    pub fn received(
        &mut self,
        server: u16,
        now: u64,
        buf: &[u8],
        sink: &mut dyn FnMut(usize, &[u8]),
    ) -> Result<usize, SessionError> {
        self.session.receive(server, now, buf, sink)
    }

    /// Bytes that the next PDU at the start of `buf` needs in all.
    #[inline]
    #[must_use]
    pub fn need(&self, server: u16, buf: &[u8]) -> usize {
        self.session.need(server, buf)
    }

    /// Turns what may be sent now into commands in the outboxes.
    #[inline]
    pub fn pump(&mut self, now: u64) {
        if let Some(seq) = self.to_ask() {
            self.asked = seq;
            self.session.ask_durable(seq);
        }
        self.unsent = false;
        self.admitted = 0;
        // What `pump` finds settled has been unsettled: a connection may have been given up.
        self.unsettled |= self.session.is_unsettled();
        self.session.pump(now);
    }

    /// Other threads wait until groups up to `seq` are durable; no later group that has been submitted
    /// is waited for. Once they have been submitted, the drives are flushed, unless a group submitted
    /// since has asked for that.
    #[inline]
    pub fn want_durable(&mut self, seq: Seq) {
        if seq != self.wanted {
            self.wanted = seq;
            self.unsent |= self.to_ask().is_some();
        }
    }

    /// Up to where the drives are to be flushed because other threads wait for that.
    fn to_ask(&self) -> Option<Seq> {
        if self.wanted <= self.asked {
            return None;
        }
        Some(self.wanted.min(self.session.engine().last())).filter(|seq| *seq > self.asked)
    }

    /// What is to be sent to a server.
    #[inline]
    pub fn outbox(&mut self, server: u16) -> &mut Outbox<P> {
        self.session.outbox(server)
    }

    /// Time has gone by, and nothing came: a target that owes answers for too long is lost.
    pub fn timeout(&mut self, now: u64) {
        while let Some(server) = self.session.stalled(now) {
            self.session.lost(server, riopipe_order::engine::Cause::TimedOut, now);
            self.unsettled = true;
        }
    }

    /// What the shell has to do, once each.
    #[inline]
    pub fn next_event(&mut self) -> Option<StreamEvent> {
        self.events.pop_front()
    }

    /// When a round is due though nothing may come; `None` if only something that comes makes one
    /// worth it.
    #[must_use]
    pub fn deadline(&self, now: u64) -> Option<u64> {
        if self.unsent && self.failure.is_none() { Some(now) } else { self.session.deadline(now) }
    }

    /// Whether something was asked for that only a [`pump`](Self::pump) turns into commands: the
    /// next round is due at once.
    #[must_use]
    pub fn wants_pump(&self) -> bool {
        self.unsent
    }

    /// Until when an owner in a call may sleep at most, if nothing comes.
    #[must_use]
    pub fn sleeps_until(&self, now: u64) -> u64 {
        let latest = now.saturating_add(SLEEP_NS_MAX);
        let read = self.read_deadline();
        self.deadline(now).into_iter().chain(read).fold(latest, u64::min)
    }

    /// The payload of groups up to what this returns is not needed any more: their buffers may be
    /// given back. [`Until::Space`] waits for more of it than there was at the last call.
    #[inline]
    pub fn reclaim(&mut self) -> Seq {
        self.forgotten = self.session.engine().kept_after();
        self.forgotten
    }

    /// The end of some rounds of the background driver, the last of which has `worked` or not,
    /// after [`marks`](Self::marks): an idle stream that its owner has left is made durable, so
    /// that the logs can forget it (T1). Returns when the next round is due though nothing may
    /// come; a stream that has failed needs none.
    pub fn take_care(&mut self, worked: bool, flush_ns: u64, now: u64) -> Option<u64> {
        if self.failure.is_some() {
            return None;
        }
        let flush = self.idle_flush(flush_ns, now);
        let next = self.deadline(now).into_iter().chain(flush).min();
        if worked { Some(now) } else { next }
    }

    /// Asks for a flush if the last group has been undurable for long enough with nothing under
    /// way; returns when that is due.
    fn idle_flush(&mut self, flush_ns: u64, now: u64) -> Option<u64> {
        let engine = self.session.engine();
        let last = engine.last();
        let lies = self.session.config().engine.capabilities().keeps_log
            && self.session.marks().durable < last
            && engine.is_idle();
        if !lies || probe::planted(Plant::T1NoBackgroundFlush) {
            self.undurable = None;
            return None;
        }
        let since = match self.undurable {
            Some((group, since)) if group == last => since,
            _ => now,
        };
        self.undurable = Some((last, since));
        let due = since.saturating_add(flush_ns);
        if now < due {
            return Some(due);
        }
        probe::hit(Rare::BackgroundFlush);
        self.session.ask_durable(last);
        self.unsent = true;
        self.undurable = None;
        None
    }

    /// Which stream of the volume.
    #[must_use]
    pub fn id(&self) -> StreamId {
        self.session.config().stream
    }

    /// What the stream is.
    #[must_use]
    pub fn config(&self) -> &StreamConfig {
        self.session.config()
    }

    /// The volume's topology.
    #[must_use]
    pub fn topology(&self) -> &Topology {
        self.session.topology()
    }

    /// The last group submitted.
    #[must_use]
    pub fn last(&self) -> Seq {
        self.session.engine().last()
    }

    /// Up to here the stream is complete, durable and delivered (T1).
    #[inline]
    #[must_use]
    pub fn released(&self) -> Seq {
        self.session.engine().released()
    }

    /// Requests that were sent again to targets that had been lost (P7), so far.
    #[must_use]
    pub fn replayed(&self) -> u64 {
        self.session.engine().replayed()
    }

    /// How the stream stands with a server.
    #[must_use]
    pub fn connection(&self, server: u16) -> ConnectionState {
        self.session.connection(server)
    }

    /// The queue on every server.
    pub fn qids(&self) -> impl Iterator<Item = u16> + '_ {
        self.servers.iter().map(|server| server.qid)
    }

    /// Whether the group that is submitted next is to be traced; see
    /// [`StreamSession::traces_next`].
    #[inline]
    pub fn traces_next(&mut self) -> bool {
        self.session.traces_next()
    }

    /// Group `seq`, which was to be traced, has been admitted between `since` and `now`.
    #[cold]
    pub fn trace(&mut self, seq: Seq, since: u64, now: u64) {
        self.session.trace(seq, since, now);
    }

    /// Whether the session wants to know the [`instant`](Self::instant): to be asked after
    /// [`pump`](Self::pump) and [`received`](Self::received).
    #[inline]
    #[must_use]
    pub fn wants_instant(&self) -> bool {
        self.session.wants_instant()
    }

    /// It is now `now`.
    #[cold]
    pub fn instant(&mut self, now: u64) {
        self.session.instant(now);
    }

    /// Where the time of the traced group went, if one is complete as of the last
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

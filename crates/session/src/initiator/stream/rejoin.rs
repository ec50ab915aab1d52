//! The loss of a connection, and its replacement (P7).
//!
//! ```text
//! lost → Down → rejoin: handshake → bind (resume) → the target's list → replay → Up
//!                          ↑____________| STREAM_BUSY: operations of the old connection (T8)
//! ```
//!
//! The engine holds the requests that may have to be sent again. The list shows which of them need
//! not be sent again, and must not be: a durable write sent again would put old content over a
//! newer write, and a crash a moment later could leave that old content durable, too. The replay
//! itself is the ordinary sending of requests.

use alloc::vec::Vec;

use riopipe_nvme::command::{Cqe, Status};
use riopipe_order::attribute::{Attribute, Member, Seq};
use riopipe_order::engine::{Cause, Engine, Failure, Payload};
use riopipe_order::entry::Position;
use riopipe_order::probe::{self, Plant, Rare};
use riopipe_order::recovery::ListedEntry;

use super::connection::{BUSY_PAUSE_MIN_NS, Loss, State, Step};
use super::{
    BindRefused, ConnectionState, IDLE_MARK_NS, StreamQueue, StreamSession, Tag, idle_mark,
};
use crate::initiator::queue_pair::Data;
use crate::wire::list::{PAGE_BYTES_MAX, Page, RECORD_BYTES};
use crate::wire::{self, status};

/// The longest pause before a bind that found the target busy is sent again, ns.
const BUSY_PAUSE_MAX_NS: u64 = 100_000_000;
/// The time between two checks whether this stream may read or replay (P9), ns.
const CHECK_NS: u64 = 2_000_000;

/// The result of setting up a connection.
#[derive(Clone, Copy, Debug)]
pub(super) enum SetUpEvent {
    /// The queue exists.
    Connected,
    /// The bind has been answered.
    Bound(Cqe),
    /// A page of the list has been answered.
    Listed(Cqe),
    /// The target reports that this connection does not carry the stream any more.
    Broken(Status),
}

impl<P: Payload + AsRef<[u8]>> StreamSession<P> {
    /// The connection to a server is lost, or the server has sent nothing for too long. The stream
    /// continues without that server until it has [`rejoin`](Self::rejoin)ed it (P7). If the engine
    /// cannot replay, or no time is given for it, the stream is poisoned (P6).
    pub fn lost(&mut self, server: u16, cause: Cause, now: u64) {
        let connection = &mut self.connections[usize::from(server)];
        if !connection.connected() {
            return;
        }
        let survives = self.config.loss_ns > 0
            && !probe::planted(Plant::P7GiveUpAtOnce)
            && (self.config.engine.capabilities().can_replay || self.reads_only)
            && self.engine.failure().is_none()
            && (!connection.bound || self.engine.suspend(server));
        if !survives {
            return self.give_up(server, cause);
        }
        connection.cut();
        connection.state = State::Down;
        let since = connection.loss.map_or(now, |loss| loss.since);
        connection.loss = Some(Loss { since, cause });
        self.reading.ask_again(server);
        self.unsettled = true;
    }

    /// The servers to which the stream needs a new connection.
    pub fn wants_rejoin(&self) -> impl Iterator<Item = u16> + '_ {
        let failed = self.engine.failure().is_some();
        let down = self.connections.iter().zip(0..).filter(move |(l, _)| l.state == State::Down);
        down.map(|(_, server)| server).filter(move |_| !failed)
    }

    /// Takes a new connection, not started, to a server that [needs one](Self::wants_rejoin), and
    /// opens the handshake on it. From now on no bytes of the old connection may be passed to the
    /// session.
    pub fn rejoin(&mut self, server: u16, queue: StreamQueue<P>, now: u64) {
        let connection = &mut self.connections[usize::from(server)];
        if connection.state != State::Down {
            debug_assert!(false, "no connection to server {server} was wanted");
            return;
        }
        connection.queue = queue;
        connection.progress = now;
        connection.busy_pause = BUSY_PAUSE_MIN_NS;
        connection.state = State::Joining(Step::Connect);
        connection.queue.start(&mut connection.out);
    }

    /// The server will not come back: the stream is poisoned (P6).
    pub fn give_up(&mut self, server: u16, cause: Cause) {
        let connection = &mut self.connections[usize::from(server)];
        if connection.state == State::Dead {
            return;
        }
        connection.cut();
        connection.state = State::Dead;
        self.unsettled = true;
        self.reading.give_up(server);
        probe::hit(Rare::GivenUp);
        self.marks = self.engine.poll();
        let member = self.topology.members().iter().position(|m| m.server == server).unwrap_or(0);
        self.engine.poison(Failure {
            seq: self.marks.complete.next(),
            member: Member(member as u8),
            flush: false,
            cause,
        });
        self.failed();
    }

    /// The stream has failed: nothing is replayed any more, and others need not wait for it.
    #[cold]
    pub(super) fn failed(&mut self) {
        if core::mem::replace(&mut self.over, true) {
            return;
        }
        for (connection, server) in self.connections.iter_mut().zip(0..) {
            connection.participant.leave();
            if !connection.carries() {
                connection.cut();
                connection.state = State::Dead;
                self.reading.give_up(server);
            }
        }
    }

    /// A session that only reads begins a read. It may not have been driven since the last one, so
    /// the time that a server was unreachable meanwhile does not count.
    pub fn begin_read(&mut self, now: u64) {
        if self.reads_only {
            let losses = self.connections.iter_mut().filter_map(|c| c.loss.as_mut());
            losses.for_each(|loss| loss.since = now);
        }
    }

    /// Time has passed: a server that has been unreachable for too long is given up.
    /// [`pump`](Self::pump) does this, too.
    pub fn tick(&mut self, now: u64) {
        for server in 0..self.connections.len() {
            let connection = &self.connections[server];
            if let Some(loss) = connection.loss
                && !connection.carries()
                && connection.state != State::Dead
                && now.saturating_sub(loss.since) >= self.config.loss_ns
            {
                self.give_up(server as u16, loss.cause);
            }
        }
    }

    /// The next time at which the session must be called even if nothing has arrived, ns. The
    /// caller then [`pump`](Self::pump)s it, after a check whether a server has
    /// [`stalled`](Self::stalled).
    #[must_use]
    pub fn deadline(&self, now: u64) -> Option<u64> {
        if self.engine.failure().is_some() {
            return None;
        }
        let mut first: Option<u64> = None;
        let mut at = |time: u64| first = Some(first.map_or(time, |first| first.min(time)));
        let idle_mark = idle_mark(&*self.engine, self.config.engine);
        for connection in &self.connections {
            if let (Some(loss), false) = (connection.loss, connection.carries()) {
                at(loss.since.saturating_add(self.config.loss_ns));
            }
            match connection.state {
                State::Joining(Step::Busy { at: time }) => at(time),
                State::Joining(Step::Reads) => at(now.saturating_add(CHECK_NS)),
                _ if connection.waits() => {
                    at(connection.progress.saturating_add(self.config.timeout_ns))
                }
                State::Up if idle_mark.is_some_and(|mark| mark > connection.reported.0) => {
                    at(connection.reported.1.saturating_add(IDLE_MARK_NS));
                }
                _ => {}
            }
        }
        // A read that waits for the read barrier is tried again (P9).
        let has_no_reads =
            |connection: &super::Connection<P>| connection.carries() && connection.reads_out == 0;
        if self.reading.unsent > 0 && self.connections.iter().any(has_no_reads) {
            at(now.saturating_add(CHECK_NS));
        }
        first
    }

    /// The state of the stream at a server.
    #[must_use]
    pub fn connection(&self, server: u16) -> ConnectionState {
        match self.connections[usize::from(server)].state {
            State::Joining(_) => ConnectionState::Joining,
            State::Up => ConnectionState::Up,
            State::Replaying => ConnectionState::Replaying,
            State::Down => ConnectionState::Down,
            State::Dead => ConnectionState::Dead,
        }
    }

    /// Continues to set up the connections that are not up.
    #[cold]
    pub(super) fn continue_set_up(&mut self, now: u64) {
        for server in 0..self.connections.len() {
            let connection = &mut self.connections[server];
            match connection.state {
                State::Joining(Step::Busy { at })
                    if now >= at && !probe::planted(Plant::P8BusyForEver) =>
                {
                    self.bind(server as u16, now);
                }
                State::Joining(Step::Reads) if connection.participant.has_no_reads() => {
                    self.replay(server as u16, now);
                }
                _ => {}
            }
            // Also where a replay has just begun: if there is nothing to replay, no answer will
            // come, and no deadline would call the session again for this server (P8).
            let connection = &mut self.connections[server];
            if connection.state == State::Replaying && !self.engine.replaying(server as u16) {
                connection.state = State::Up;
                connection.participant.up_to_date();
            }
        }
        self.tick(now);
        self.unsettled = self
            .connections
            .iter()
            .any(|connection| !matches!(connection.state, State::Up | State::Dead));
    }

    /// Handles an event of setting up the connection to `server`.
    #[cold]
    pub(super) fn handle_set_up(&mut self, server: u16, event: SetUpEvent, now: u64) {
        match event {
            SetUpEvent::Connected if self.config.engine.capabilities().needs_binding => {
                self.bind(server, now);
            }
            SetUpEvent::Connected => {
                let connection = &mut self.connections[usize::from(server)];
                // A target that has lost its cache does not yet have the data that streams have
                // delivered, until those streams are bound there again (P9).
                if let Some(incarnation) = connection.queue.config().incarnation {
                    connection.participant.note_incarnation(incarnation);
                }
                connection.loss = None;
                connection.state = State::Up;
            }
            SetUpEvent::Bound(cqe) => self.bound(server, &cqe, now),
            SetUpEvent::Listed(cqe) => self.listed(server, &cqe, now),
            SetUpEvent::Broken(status) => self.lost(server, Cause::Status(status.code()), now),
        }
    }

    /// Sends the bind command: for the first binding at this server, or to resume it after a loss.
    fn bind(&mut self, server: u16, now: u64) {
        let Self { connections, engine, config, .. } = self;
        let connection = &mut connections[usize::from(server)];
        let (volume, stream, generation) = (config.volume, config.stream, config.generation);
        let bind = if connection.bound {
            wire::resume_command(volume, stream, generation, engine.released())
        } else {
            wire::bind_command(volume, stream, generation, config.start)
        };
        let sent = connection.queue.submit(bind, Tag::Bind, Data::None, &mut connection.out);
        debug_assert!(sent.is_ok(), "a new queue has space");
        connection.progress = now;
        connection.state = State::Joining(Step::Bind);
    }

    /// Handles the answer to a bind. If the stream was bound there before, the list of the target's
    /// log is next.
    fn bound(&mut self, server: u16, cqe: &Cqe, now: u64) {
        let connection = &mut self.connections[usize::from(server)];
        let answer = cqe.status();
        if answer.is_ok() {
            connection.participant.bound((cqe.result() >> 32) as u32);
            if connection.bound {
                return self.list(server, Position::default());
            }
            connection.bound = true;
            connection.loss = None;
            connection.state = State::Up;
            connection.participant.up_to_date();
            return;
        }
        if answer.is(status::STREAM_BUSY) {
            connection.state =
                State::Joining(Step::Busy { at: now.saturating_add(connection.busy_pause) });
            connection.busy_pause = (connection.busy_pause * 2).min(BUSY_PAUSE_MAX_NS);
            self.unsettled = true;
            if let Some(loss) = &mut connection.loss {
                loss.cause = Cause::Status(answer.code());
            }
        } else if !connection.bound {
            self.bind_refused = Some(BindRefused { server, status: answer });
        } else if answer.is(status::NOT_OWNER) {
            // The association of the connection is not the owner's any more, but the generation is:
            // the same owner has set up another association, or will do so.
            self.lost(server, Cause::Status(answer.code()), now);
        } else {
            self.refused(server, answer);
        }
    }

    /// The target refuses to bind the stream again.
    fn refused(&mut self, server: u16, answer: Status) {
        if answer.is(status::STALE_GENERATION) {
            probe::hit(Rare::FencedOwner);
        }
        self.give_up(server, Cause::Status(answer.code()));
    }

    /// Requests the page of the target's list that starts at `from`.
    fn list(&mut self, server: u16, from: Position) {
        let slots = self.slots(server);
        let connection = &mut self.connections[usize::from(server)];
        let limit = (connection.queue.config().data_max as usize).min(PAGE_BYTES_MAX);
        let wanted = slots.saturating_add(1).saturating_mul(RECORD_BYTES);
        let len = limit.min(wanted) / RECORD_BYTES * RECORD_BYTES;
        connection.listing.from = from;
        connection.listing.page.clear();
        connection.listing.page.resize(len, 0);
        let command = wire::own_list_command(from, len);
        let sent = connection.queue.submit(
            command,
            Tag::List,
            Data::Read(len as u32),
            &mut connection.out,
        );
        debug_assert!(sent.is_ok(), "a queue without commands in flight has space");
        connection.state = State::Joining(Step::List);
    }

    /// The number of entries that the stream's log on a server can hold.
    fn slots(&self, server: u16) -> usize {
        self.topology.servers()[usize::from(server)].slots as usize
    }

    /// Handles a page of the target's list. After the last one, a replay waits until no stream
    /// reads the server (P9).
    fn listed(&mut self, server: u16, cqe: &Cqe, now: u64) {
        let answer = cqe.status();
        if !answer.is_ok() {
            return match breaks(answer) {
                // The next bind gives the definite answer.
                true => self.lost(server, Cause::Status(answer.code()), now),
                false => self.refused(server, answer),
            };
        }
        let slots = self.slots(server);
        let Self { connections, engine, config, .. } = self;
        let connection = &mut connections[usize::from(server)];
        let listing = &mut connection.listing;
        // A page that is not valid, or does not fit the stream, is not accepted (T18, T19).
        let page = Page::decode(&listing.page).filter(|page| {
            let held = listing.entries.len() + page.entries.len();
            page.volume == config.volume
                && page.stream == config.stream
                && !page.settled
                && page.released <= engine.released()
                && held <= slots
                && (!page.more || page.next > listing.from && !page.entries.is_empty())
        });
        let Some(page) = page else {
            return self.give_up(server, Cause::LogMismatch);
        };
        listing.entries.extend(page.entries);
        if page.more {
            return self.list(server, page.next);
        }
        listing.page = Vec::new();
        connection.state = State::Joining(Step::Reads);
        self.unsettled = true;
        self.continue_set_up(now);
    }

    /// Lets the engine send again the requests that the target's log does not hold as durable.
    fn replay(&mut self, server: u16, now: u64) {
        let connection = &mut self.connections[usize::from(server)];
        let known = Known::new(core::mem::take(&mut connection.listing.entries));
        let ours = known.is_of(&*self.engine, server);
        if !ours && !probe::planted(Plant::T14ForgetEarly) {
            return self.give_up(server, Cause::LogMismatch);
        }
        let replays_durable = probe::planted(Plant::P7ReplayDurable);
        self.engine.resume(server, &mut |seq, index| !replays_durable && known.durable(seq, index));
        connection.loss = None;
        connection.progress = now;
        connection.mark_refused = None;
        // The mark that was sent last may have been lost, or not be durable.
        connection.reported = (self.config.start, 0);
        connection.state = State::Replaying;
    }
}

/// Whether a status means that the connection is of no use any more, and does not concern the
/// stream. Either another owner has the volume, or this owner has it over another association; the
/// next bind reports which. Or data was corrupted in transit.
pub(super) fn breaks(answer: Status) -> bool {
    answer.is(status::STALE_GENERATION)
        || answer.is(status::NOT_BOUND)
        || answer.is(Status::TRANSIENT_TRANSPORT)
}

/// The entries in the target's log, by request.
struct Known(Vec<ListedEntry>);

impl Known {
    fn new(mut entries: Vec<ListedEntry>) -> Self {
        entries.sort_by_key(|entry| key(&entry.attribute));
        Self(entries)
    }

    /// The entries of a request. Several entries count as one (T6).
    fn of(&self, key_of: (Seq, u16)) -> &[ListedEntry] {
        let first = self.0.partition_point(|entry| key(&entry.attribute) < key_of);
        let rest = &self.0[first..];
        &rest[..rest.partition_point(|entry| key(&entry.attribute) == key_of)]
    }

    /// Whether the log shows that the data of a request is durable.
    fn durable(&self, seq: Seq, index: u16) -> bool {
        self.of((seq, index)).iter().any(|entry| entry.durable)
    }

    /// Whether all entries that are not released are requests of the stream, in the shape in which
    /// they were sent (T19).
    fn is_of<P: Payload>(&self, engine: &dyn Engine<P>, server: u16) -> bool {
        let released = engine.released();
        let mut unmatched = self.0.iter().filter(|e| e.attribute.seq_end() > released).count();
        let mut has_same_shape = true;
        engine.visit_sent(server, &mut |sent| {
            for ListedEntry { attribute: a, .. } in self.of(key(sent)) {
                has_same_shape &= Attribute { ordinal: sent.ordinal, ..*a } == *sent;
                unmatched -= usize::from(a.seq_end() > released).min(unmatched);
            }
        });
        has_same_shape && unmatched == 0
    }
}

/// The identity of a request in its stream: its group, and its index there.
fn key(a: &Attribute) -> (Seq, u16) {
    (a.seq, a.index)
}

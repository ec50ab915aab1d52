//! The loss of a connection, and its replacement (promise P7).
//!
//! ```text
//! lost → Down → rejoin: handshake → bind (resume) → the target's list → wait for reads → replay → Up
//!                                    ↑______| STREAM_BUSY: the target still has operations of the
//!                                             old connection in flight (trap T8)
//! ```
//!
//! The engine holds the requests that may have to be sent again. The list shows which of them are
//! durable. Those must not be sent again: a durable write that is sent again would overwrite the
//! content of a newer write, and a crash just after that could leave the old content. The replay
//! itself is the ordinary sending of requests.

use alloc::vec::Vec;

use riopipe_nvme::command::{Cqe, Status};
use riopipe_order::attribute::{Attribute, Member, Seq};
use riopipe_order::engine::{Cause, Engine, Failure, Payload};
use riopipe_order::entry::Position;
use riopipe_order::probe::{self, Plant, Rare};
use riopipe_order::recovery::ListedEntry;
use riopipe_order::write_order::DriveOrder;

use super::connection::{BUSY_PAUSE_MIN_NS, Loss, SentMark, State, Step};
use super::{
    ConnectionState, IDLE_MARK_NS, Purpose, StreamQueue, StreamSession, TargetRefusal, idle_mark,
};
use crate::initiator::queue_pair::Data;
use crate::wire::list::{PAGE_BYTES_MAX, Page, RECORD_BYTES};
use crate::wire::{self, status};

/// The longest pause before the bind is sent again after the answer STREAM_BUSY, ns.
const BUSY_PAUSE_MAX_NS: u64 = 100_000_000;
/// The time between two checks whether this stream may read or replay (promise P9), ns.
const CHECK_NS: u64 = 2_000_000;

/// An event of setting up a connection.
#[derive(Clone, Copy, Debug)]
pub(super) enum SetUpEvent {
    /// The queue exists.
    Connected,
    /// The bind has been answered.
    BindAnswered(Cqe),
    /// A page of the list has been answered.
    ListAnswered(Cqe),
    /// The target reports that this connection does not carry the stream any more.
    Broken(Status),
}

impl<P: Payload + AsRef<[u8]>> StreamSession<P> {
    /// Handles the loss of a link, also of one over which nothing has arrived for too
    /// long. The loss timeout counts from `now`. The stream waits until [`rejoin`](Self::rejoin) gives it another connection (promise
    /// P7). If the engine cannot replay, or [`loss_ns`](super::StreamConfig::loss_ns) is 0, the
    /// stream is poisoned (promise P6).
    pub fn lost(&mut self, link: u16, cause: Cause, now: u64) {
        let server = self.server_of(link);
        let connection = &mut self.connections[usize::from(link)];
        if !connection.has_connection() {
            return;
        }
        let can_continue = self.config.engine.capabilities().can_replay || self.reads_only;
        let waits_for_server = self.config.loss_ns > 0
            && !probe::is_bug_planted(Plant::P7GiveUpAtOnce)
            && can_continue
            && self.engine.failure().is_none()
            && (!connection.was_bound || self.engine.suspend(server));
        if !waits_for_server {
            return self.give_up(link, cause);
        }
        connection.drop_connection();
        connection.state = State::Down;
        let since = connection.loss.map_or(now, |loss| loss.since);
        connection.loss = Some(Loss { since, cause });
        self.readings.send_again(server);
        self.is_connecting = true;
    }

    /// The time from which the loss of a link counts, ns, if it is lost. A link that was given up
    /// keeps that time.
    #[must_use]
    pub fn lost_since(&self, link: u16) -> Option<u64> {
        self.connections.get(usize::from(link))?.loss.map(|loss| loss.since)
    }

    /// The links that need a new connection.
    pub fn wants_rejoin(&self) -> impl Iterator<Item = u16> + '_ {
        let has_failed = self.engine.failure().is_some();
        let links = self.connections.iter().zip(0..);
        links.filter_map(move |(connection, link)| {
            let wants_connection = connection.state == State::Down && !has_failed;
            wants_connection.then_some(link)
        })
    }

    /// Takes a queue on a new connection for a link that [needs one](Self::wants_rejoin), and
    /// opens the handshake on it. From now on no bytes of the old connection may be passed to the
    /// session.
    pub fn rejoin(&mut self, link: u16, queue: StreamQueue<P>, now: u64) {
        let connection = &mut self.connections[usize::from(link)];
        if connection.state != State::Down {
            debug_assert!(false, "no connection of link {link} was wanted");
            return;
        }
        connection.queue = queue;
        connection.last_progress = now;
        connection.busy_pause_ns = BUSY_PAUSE_MIN_NS;
        connection.state = State::Joining(Step::Connect);
        connection.queue.start(&mut connection.outbox);
    }

    /// Gives up a link to a server that will not come back. The stream is poisoned (promise P6).
    pub fn give_up(&mut self, link: u16, cause: Cause) {
        let server = self.server_of(link);
        let connection = &mut self.connections[usize::from(link)];
        if connection.state == State::Dead {
            return;
        }
        connection.drop_connection();
        connection.state = State::Dead;
        self.is_connecting = true;
        if self.server_of_reads(link).is_some() {
            self.readings.give_up_server(server);
        }
        probe::count_rare(Rare::GivenUp);
        self.marks = self.engine.poll();
        let member = self.topology.members().iter().position(|m| m.server == server).unwrap_or(0);
        self.engine.poison(Failure {
            seq: self.marks.complete.next(),
            member: Member(member as u8),
            flush: false,
            cause,
        });
        self.on_failure();
    }

    /// Handles the failure of the stream, once: leaves the read barrier, so that no other stream
    /// waits for this one, and drops all connections that are not up, because nothing is replayed
    /// any more. If the drive keeps the order of epochs, it drops all connections. The target then
    /// ends the stream on the drive, and no FLUSH there waits for epochs that will not come.
    #[cold]
    pub(super) fn on_failure(&mut self) {
        if self.failure_handled {
            return;
        }
        self.failure_handled = true;
        // Before this stream leaves the read barrier: no reader may rely on what may be lost.
        self.update_redirections();
        if let Some(followers) = &mut self.followers {
            // What was durable before concerns no other stream.
            followers.on_durable(self.marks.durable);
            followers.fail();
        }
        let has_epochs = self.config.engine.capabilities().drive_order == DriveOrder::Epochs;
        for link in 0..self.connections.len() as u16 {
            let server_of_reads = self.server_of_reads(link);
            let connection = &mut self.connections[usize::from(link)];
            // A session that only reads has no writes that could be lost.
            match self.reads_only {
                true => connection.participant.leave(),
                false => connection.participant.leave_failed(),
            }
            if !connection.sends_requests() || has_epochs {
                connection.drop_connection();
                connection.state = State::Dead;
                if let Some(server) = server_of_reads {
                    self.readings.give_up_server(server);
                }
            }
        }
    }

    /// Prepares a session that only reads for its next read. Between reads the session may not be
    /// driven, and then cannot notice that a server is back. So the time for which a server is
    /// unreachable counts from now on.
    pub fn begin_read(&mut self, now: u64) {
        if self.reads_only {
            for connection in &mut self.connections {
                if let Some(loss) = &mut connection.loss {
                    loss.since = now;
                }
            }
        }
    }

    /// Gives up every server that has been unreachable for longer than
    /// [`loss_ns`](super::StreamConfig::loss_ns). [`pump`](Self::pump) does this, too.
    pub fn give_up_overdue_servers(&mut self, now: u64) {
        for link in 0..self.connections.len() {
            let connection = &self.connections[link];
            if let Some(loss) = connection.loss
                && !connection.sends_requests()
                && connection.state != State::Dead
                && now.saturating_sub(loss.since) >= self.config.loss_ns
            {
                self.give_up(link as u16, loss.cause);
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
        let mut earliest: Option<u64> = None;
        let mut add = |time: u64| earliest = Some(earliest.map_or(time, |other| other.min(time)));
        let idle_mark = idle_mark(&*self.engine, self.config.engine);
        for connection in &self.connections {
            if let Some(loss) = connection.loss
                && !connection.sends_requests()
            {
                add(loss.since.saturating_add(self.config.loss_ns));
            }
            match connection.state {
                State::Joining(Step::Busy { at }) => add(at),
                State::Joining(Step::Reads) => add(now.saturating_add(CHECK_NS)),
                _ if connection.awaits_answer() => {
                    add(connection.last_progress.saturating_add(self.config.timeout_ns))
                }
                State::Up if idle_mark.is_some_and(|mark| mark > connection.last_mark.seq) => {
                    add(connection.last_mark.at.saturating_add(IDLE_MARK_NS));
                }
                _ => {}
            }
        }
        if let Some(at) = self.home_timer.deadline() {
            add(at);
        }
        if self.redirections.is_some() && self.engine.awaits_reads() {
            // No event reports the end of another stream's read.
            add(now.saturating_add(CHECK_NS));
        }
        // A read that waits for the read barrier is tried again (promise P9).
        let waits_for_barrier = |(link, connection): (u16, &super::Connection<P>)| {
            connection.sends_requests()
                && connection.reads_in_flight == 0
                && self
                    .server_of_reads(link)
                    .is_some_and(|server| self.readings.has_unsent_for(server))
        };
        if self.readings.has_unsent() && (0..).zip(&self.connections).any(waits_for_barrier) {
            add(now.saturating_add(CHECK_NS));
        }
        earliest
    }

    /// The state of a link.
    #[must_use]
    pub fn connection(&self, link: u16) -> ConnectionState {
        match self.connections[usize::from(link)].state {
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
                    if now >= at && !probe::is_bug_planted(Plant::P8BusyForEver) =>
                {
                    self.send_bind(server as u16, now);
                }
                State::Joining(Step::Reads) if connection.participant.has_no_reads() => {
                    self.begin_replay(server as u16, now);
                }
                _ => {}
            }
            // This is checked also for a replay that has just begun. If it has nothing to send, no
            // answer will arrive, and no deadline would call the session again for this server
            // (promise P8).
            let connection = &mut self.connections[server];
            if connection.state == State::Replaying && !self.engine.is_replaying(server as u16) {
                connection.state = State::Up;
                connection.participant.set_up_to_date();
            }
        }
        self.give_up_overdue_servers(now);
        self.is_connecting = self
            .connections
            .iter()
            .any(|connection| !matches!(connection.state, State::Up | State::Dead));
    }

    /// Handles an event of setting up the connection to `server`.
    #[cold]
    pub(super) fn handle_set_up(&mut self, server: u16, event: SetUpEvent, now: u64) {
        match event {
            SetUpEvent::Connected if self.config.engine.capabilities().needs_binding => {
                self.send_bind(server, now);
            }
            SetUpEvent::Connected => {
                let connection = &mut self.connections[usize::from(server)];
                // In a new incarnation, the target may not have all data that streams have
                // delivered. No stream reads there until those streams are bound again (promise
                // P9).
                if let Some(incarnation) = connection.queue.config().incarnation {
                    connection.participant.note_incarnation(incarnation);
                }
                connection.loss = None;
                connection.state = State::Up;
            }
            SetUpEvent::BindAnswered(cqe) => self.on_bind_answer(server, &cqe, now),
            SetUpEvent::ListAnswered(cqe) => self.on_list_page(server, &cqe, now),
            SetUpEvent::Broken(status) => self.lost(server, Cause::Status(status.code()), now),
        }
    }

    /// Sends the bind command: the first one at this server, or one that resumes after a loss.
    fn send_bind(&mut self, server: u16, now: u64) {
        let Self { connections, engine, config, .. } = self;
        let connection = &mut connections[usize::from(server)];
        let (volume, stream, generation) = (config.volume, config.stream, config.generation);
        let bind = if connection.was_bound {
            wire::resume_command(volume, stream, generation, engine.released())
        } else {
            wire::bind_command(volume, stream, generation, config.start)
        };
        let sent = connection.queue.submit(bind, Purpose::Bind, Data::None, &mut connection.outbox);
        debug_assert!(sent.is_ok(), "a new queue has space");
        connection.last_progress = now;
        connection.state = State::Joining(Step::Bind);
    }

    /// Handles the answer to a bind. If the stream was bound at this server before, requests the
    /// list of the target's log. Otherwise the connection is up.
    fn on_bind_answer(&mut self, server: u16, cqe: &Cqe, now: u64) {
        let answer = cqe.status();
        if answer.is_ok() {
            // The result has the target's incarnation in its upper half.
            return self.on_bound(server, (cqe.result() >> 32) as u32);
        }
        let connection = &mut self.connections[usize::from(server)];
        if answer.is(status::STREAM_BUSY) {
            let at = now.saturating_add(connection.busy_pause_ns);
            connection.state = State::Joining(Step::Busy { at });
            connection.busy_pause_ns = (connection.busy_pause_ns * 2).min(BUSY_PAUSE_MAX_NS);
            self.is_connecting = true;
            if let Some(loss) = &mut connection.loss {
                loss.cause = Cause::Status(answer.code());
            }
        } else if !connection.was_bound {
            self.bind_refused = Some(TargetRefusal { server, status: answer });
        } else if answer.is(status::NOT_OWNER) {
            // The generation is still the owner's, but the association of this connection is not.
            // The same owner has set up another association, or will do so.
            self.lost(server, Cause::Status(answer.code()), now);
        } else {
            self.on_bind_refused(server, answer);
        }
    }

    /// Handles a bind that the target has accepted in this incarnation.
    fn on_bound(&mut self, server: u16, incarnation: u32) {
        let connection = &mut self.connections[usize::from(server)];
        connection.participant.set_bound(incarnation);
        if connection.was_bound {
            return self.request_list_page(server, Position::default());
        }
        connection.was_bound = true;
        connection.loss = None;
        connection.state = State::Up;
        connection.participant.set_up_to_date();
    }

    /// Gives up a server whose target refuses to bind the stream again.
    fn on_bind_refused(&mut self, server: u16, answer: Status) {
        if answer.is(status::STALE_GENERATION) {
            probe::count_rare(Rare::FencedOwner);
        }
        self.give_up(server, Cause::Status(answer.code()));
    }

    /// Requests the page of the target's list that starts at `from`.
    fn request_list_page(&mut self, server: u16, from: Position) {
        let slots = self.log_slots(server);
        let connection = &mut self.connections[usize::from(server)];
        let limit = (connection.queue.config().data_max as usize).min(PAGE_BYTES_MAX);
        // One record more than the entries: the header of the page.
        let whole_list_len = slots.saturating_add(1).saturating_mul(RECORD_BYTES);
        let len = limit.min(whole_list_len) / RECORD_BYTES * RECORD_BYTES;
        connection.listing.from = from;
        connection.listing.page.clear();
        connection.listing.page.resize(len, 0);
        let command = wire::own_list_command(from, len);
        let sent = connection.queue.submit(
            command,
            Purpose::List,
            Data::Read(len as u32),
            &mut connection.outbox,
        );
        debug_assert!(sent.is_ok(), "a queue without commands in flight has space");
        connection.state = State::Joining(Step::List);
    }

    /// The number of entries that the stream's log on a server can hold.
    fn log_slots(&self, server: u16) -> usize {
        self.topology.servers()[usize::from(server)].slots as usize
    }

    /// Handles a page of the target's list. After the last one, a replay waits until no stream
    /// reads the server (promise P9).
    fn on_list_page(&mut self, server: u16, cqe: &Cqe, now: u64) {
        let answer = cqe.status();
        if !answer.is_ok() {
            if ends_connection(answer) {
                // The answer to the next bind shows whether the volume has another owner.
                self.lost(server, Cause::Status(answer.code()), now);
            } else {
                self.on_bind_refused(server, answer);
            }
            return;
        }
        let slots = self.log_slots(server);
        let Self { connections, engine, config, .. } = self;
        let connection = &mut connections[usize::from(server)];
        let listing = &mut connection.listing;
        // The page must be valid and belong to this stream: the decision which requests are
        // replayed depends on it (traps T18, T19).
        let page = Page::decode(&listing.page).filter(|page| {
            let entry_count = listing.entries.len() + page.entries.len();
            let continues = page.next > listing.from && !page.entries.is_empty();
            page.volume == config.volume
                && page.stream == config.stream
                && !page.settled
                && page.released <= engine.released()
                && entry_count <= slots
                && (!page.more || continues)
        });
        let Some(page) = page else {
            return self.give_up(server, Cause::LogMismatch);
        };
        listing.entries.extend(page.entries);
        if page.more {
            return self.request_list_page(server, page.next);
        }
        listing.page = Vec::new();
        connection.state = State::Joining(Step::Reads);
        self.is_connecting = true;
        self.continue_set_up(now);
    }

    /// Begins the replay: the engine sends again all requests that are not durable by the target's
    /// log.
    fn begin_replay(&mut self, server: u16, now: u64) {
        let connection = &mut self.connections[usize::from(server)];
        let log_entries = LogEntries::new(core::mem::take(&mut connection.listing.entries));
        let match_ours = log_entries.match_sent_requests(&*self.engine, server);
        if !match_ours && !probe::is_bug_planted(Plant::T14ForgetEarly) {
            return self.give_up(server, Cause::LogMismatch);
        }
        let replays_durable = probe::is_bug_planted(Plant::P7ReplayDurable);
        self.engine.resume(server, &mut |seq, index| {
            !replays_durable && log_entries.is_durable(seq, index)
        });
        connection.loss = None;
        connection.last_progress = now;
        connection.mark_refused = None;
        // The mark that was sent last may have been lost, or not be durable.
        connection.last_mark = SentMark { seq: self.config.start, at: 0 };
        connection.state = State::Replaying;
    }
}

/// Whether a status ends the connection, although the stream may continue on another one. There are
/// three causes: data was corrupted in transit, another owner has the volume, or this owner has the
/// volume over another association. The answer to the next bind shows which.
pub(super) fn ends_connection(answer: Status) -> bool {
    answer.is(status::STALE_GENERATION)
        || answer.is(status::NOT_BOUND)
        || answer.is(Status::TRANSIENT_TRANSPORT)
}

/// The identity of a request in its stream: its group, and its index there.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
struct RequestKey {
    seq: Seq,
    index: u16,
}

impl RequestKey {
    fn of(attribute: &Attribute) -> Self {
        Self { seq: attribute.seq, index: attribute.index }
    }
}

/// The entries in the target's log, sorted by request.
struct LogEntries(Vec<ListedEntry>);

impl LogEntries {
    fn new(mut entries: Vec<ListedEntry>) -> Self {
        entries.sort_by_key(|entry| RequestKey::of(&entry.attribute));
        Self(entries)
    }

    /// The entries of a request. There may be several, which count as one (trap T6).
    fn entries_of(&self, request: RequestKey) -> &[ListedEntry] {
        let start = self.0.partition_point(|entry| RequestKey::of(&entry.attribute) < request);
        let rest = &self.0[start..];
        let len = rest.partition_point(|entry| RequestKey::of(&entry.attribute) == request);
        &rest[..len]
    }

    /// Whether the log shows that the data of a request is durable.
    fn is_durable(&self, seq: Seq, index: u16) -> bool {
        self.entries_of(RequestKey { seq, index }).iter().any(|entry| entry.durable)
    }

    /// Whether every entry that is not released belongs to a request that the stream has sent, with
    /// the same attributes (trap T19).
    fn match_sent_requests<P: Payload>(&self, engine: &dyn Engine<P>, server: u16) -> bool {
        let released = engine.released();
        let is_unreleased = |entry: &ListedEntry| entry.attribute.seq_end() > released;
        let mut unmatched_count = self.0.iter().filter(|entry| is_unreleased(entry)).count();
        let mut attributes_match = true;
        engine.visit_sent(server, &mut |sent| {
            for entry in self.entries_of(RequestKey::of(sent)) {
                // A replay may have given the request another ordinal.
                let logged = Attribute { ordinal: sent.ordinal, ..entry.attribute };
                attributes_match &= logged == *sent;
                if is_unreleased(entry) {
                    unmatched_count = unmatched_count.saturating_sub(1);
                }
            }
        });
        attributes_match && unmatched_count == 0
    }
}

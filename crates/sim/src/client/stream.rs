//! A stream of an initiator's process, as in the library's shell: its driver, its connections, and
//! the thread that drives it. Its use by the application is in [`super::application`].

use std::sync::Arc;
use std::sync::atomic::AtomicU64;

use riopipe_nvme::command::Status;
use riopipe_order::attribute::{Member, Seq, StreamId};
use riopipe_order::engine::{Cause, EngineKind};
use riopipe_order::topology::Topology;
use riopipe_session::initiator::queue_pair::{IoQueue, QueuePair, SessionError};
use riopipe_session::initiator::reconnect::ConnectRequest;
use riopipe_session::initiator::stream::{ConnectionState, StreamConfig};
use riopipe_session::initiator::stream_driver::{
    Attention, StartError, StartStep, StreamDriver, StreamEvent, StreamShared, StreamSpec,
    StreamStart,
};

use super::application::{Call, Reading};
use super::committer::Committer;
use super::server::ANSWER_NS;
use super::watchers::Watchers;
use super::wire::Wire;
use crate::block::BLOCK;
use crate::core::{Core, MS};
use crate::network::{ClientEnd, Role};
use crate::oracle::Era;
use crate::payload::Payload;
use crate::scenario::Scenario;

/// A target that makes no progress for this time is given up, ns. See [`stall_ns`].
const STALL_NS: u64 = 80 * MS;
/// With slow drives the limit is so many times as long.
const SLOW_DRIVES_FACTOR: u64 = 5;
/// A target that sends nothing to an association for this time is lost, ns: see
/// [`silence_limit_ns`](riopipe_session::initiator::manager::silence_limit_ns).
const SILENCE_NS: u64 = ANSWER_NS;
/// The cores of an initiator.
const CORES: u64 = 3;
/// Of 100 rounds of a stream, the number before which its thread moves to another core.
const MIGRATIONS: u64 = 25;
/// A stream that is not bound everywhere after this time cannot be started, ns.
const START_NS: u64 = 200 * MS;

/// The time after which a target without progress is given up, ns.
///
/// A slow operation takes up to a hundred times as long as others, and a target confirms no FLUSH
/// before all others that were in flight with it have ended (trap T29). So a live target with slow
/// drives can take a long time for a few requests. A real limit is far longer than that, too.
fn stall_ns(scenario: &Scenario) -> u64 {
    let mut drives = scenario.machines.iter().flat_map(|machine| &machine.drives);
    let has_slow_drive = drives.any(|drive| drive.slow > 0);
    if has_slow_drive { SLOW_DRIVES_FACTOR * STALL_NS } else { STALL_NS }
}

/// The connection of a link of a stream, with the bytes that have arrived and were not received yet.
#[derive(Debug)]
struct Connection {
    wire: Wire,
    arrived: Vec<u8>,
    ended: bool,
}

/// A message of the initiator's other threads for a stream.
#[derive(Debug)]
pub(super) enum StreamMessage {
    /// A connection that the stream has asked for.
    Connected { link: u16, wire: Wire, queue: Box<IoQueue> },
    /// The association with a server has ended.
    AssociationEnded { server: u16, since: u64 },
    /// A server will not come back.
    GiveUp { server: u16, cause: Cause },
}

/// The library's state of the stream.
enum Body {
    Starting(Box<StreamStart<Payload>>),
    Open(Box<StreamDriver<Payload>>),
    /// The stream could not be started, was closed or was dropped.
    Over,
}

impl Connection {
    const fn new(wire: Wire) -> Self {
        Self { wire, arrived: Vec::new(), ended: false }
    }

    /// Receives the bytes that have arrived. Returns whether there were any. An error means that
    /// the connection has ended; it holds the session's error, if there is one.
    fn receive(
        &mut self,
        link: u16,
        driver: &mut StreamDriver<Payload>,
        reading: &mut Reading,
        core: &mut Core,
    ) -> Result<bool, Option<SessionError>> {
        if self.arrived.is_empty() {
            return if self.ended { Err(None) } else { Ok(false) };
        }
        let bytes = core::mem::take(&mut self.arrived);
        let fed = self.wire.feed(&bytes, |bytes| {
            driver.received(link, core.now, bytes, &mut |slot, offset, bytes| {
                reading.put(slot, offset, bytes);
            })
        });
        fed.map(|()| true).map_err(|error| {
            // Send the cause to the target, in case it still reads.
            self.wire.send(driver.outbox(link), core);
            Some(error)
        })
    }
}

/// The driver, also while the stream is being bound.
fn driver_of(body: &mut Body) -> Option<&mut StreamDriver<Payload>> {
    match body {
        Body::Starting(start) => start.driver(),
        Body::Open(driver) => Some(driver),
        Body::Over => None,
    }
}

/// The parts from which a stream is made.
pub(super) struct Setup<'a> {
    /// The stream.
    pub(super) id: u16,
    /// The owner's generation.
    pub(super) generation: u32,
    /// The mark from which the stream resumes.
    pub(super) start: Seq,
    /// The owner's era.
    pub(super) era: Era,
    /// The volume's drives.
    pub(super) topology: &'a Topology,
    /// Their namespaces.
    pub(super) nsids: &'a [u32],
    /// The state that the volume's streams share.
    pub(super) shared: &'a StreamShared,
    /// The engine of the stream.
    pub(super) engine: EngineKind,
    /// This is a reader of the volume, not a stream.
    pub(super) is_reader: bool,
}

/// A stream.
pub(super) struct Stream {
    pub(super) id: u16,
    pub(super) era: Era,
    /// This is a reader of the volume, not a stream.
    pub(super) is_reader: bool,
    /// The blocks that the process is to read beside its streams: the first, and their number.
    pub(super) reads_apart: Option<(u32, u32)>,
    /// The mark from which the stream resumes.
    pub(super) start: Seq,
    body: Body,
    /// The stream was bound everywhere once.
    begun: bool,
    /// The connections, by link.
    connections: Vec<Option<Connection>>,
    messages: Vec<StreamMessage>,
    /// The connections that the stream asks for.
    pub(super) requests: Vec<ConnectRequest>,
    pub(super) held: Arc<AtomicU64>,
    pub(super) kept_max: u64,
    /// The call that its owner is in.
    pub(super) call: Call,
    /// The other threads that wait for it.
    pub(super) watchers: Watchers,
    /// The end of the owner's call wakes the background driver.
    pub(super) wakes_background: bool,
    /// The owner has called, and the end of the call was not handled.
    has_called: bool,
    /// The core on which the thread that drives it runs.
    runs_on: u32,
    /// The last group that has been sent, as far as the connections allow.
    pub(super) sent: Seq,
    /// The time until which the thread that drives it sleeps, ns.
    wakes_at: Option<u64>,
    pub(super) reading: Reading,
    /// For each link, the last time at which it carried requests, ns; or the last sign of life
    /// of its target, if that is why it counts as lost.
    pub(super) carried: Vec<u64>,
    /// For each link, whether its connection carried requests at the last check.
    carries: Vec<bool>,
    replaying: Vec<bool>,
    /// The distance from the queues of this stream to those of the next one.
    qid_stride: u16,
    /// The number of times that connections were made again.
    reconnects: u16,
    /// The stream was opened before, and no recovery has ended that use.
    pub(super) opened_before: bool,
    /// The time at which it was made, ns.
    pub(super) made_at: u64,
    /// The stream failed because its plain writes are refused.
    pub(super) guarded: bool,
    /// Its owner's next step is planned.
    pub(super) step_planned: bool,
    pub(super) failed: bool,
    /// The stream failed because another owner has the volume.
    pub(super) fenced: bool,
    /// The target that refuses to bind the stream, and its answer.
    pub(super) refused: Option<(u16, Status)>,
    pub(super) closing: bool,
    pub(super) closed: bool,
    /// The result of recovery for the stream: the last group of the prefix, and its tag.
    pub(super) recovered: Option<(Seq, u64)>,
    /// The thread of the log of records that it keeps.
    pub(super) committer: Option<Box<Committer>>,
}

impl Stream {
    /// A stream without connections.
    #[must_use]
    pub(super) fn new(setup: &Setup<'_>, core: &Core) -> Self {
        let spec = &core.scenario.client;
        let kept_max = u64::from(spec.kept_blocks) * BLOCK as u64;
        let engine = if setup.is_reader { EngineKind::None } else { setup.engine };
        let servers = setup.topology.servers().len();
        let queues = usize::from(engine.capabilities().queues_per_server);
        let links = servers * queues;
        // The ids of a stream's queues on a target follow each other.
        let stride = setup.engine.capabilities().queues_per_server;
        let first_qid = setup.id * stride + 2;
        let qids = (first_qid..).take(queues).collect::<Vec<u16>>().repeat(servers);
        let stream = StreamSpec {
            config: StreamConfig {
                volume: core.id,
                stream: StreamId(setup.id),
                generation: setup.generation,
                engine,
                start: setup.start,
                nsids: setup.nsids.to_vec(),
                queue_depth: spec.depth,
                timeout_ns: stall_ns(&core.scenario),
                loss_ns: u64::from(spec.loss_ms) * MS,
            },
            topology: setup.topology.clone(),
            kept_bytes_max: kept_max,
            merge: spec.merge,
            merge_from: spec.merge_from,
            qids,
            reads_only: setup.is_reader,
        };
        let start = StreamStart::new(stream, setup.shared.clone(), START_NS, core.now);
        Self {
            id: setup.id,
            era: setup.era,
            is_reader: setup.is_reader,
            reads_apart: None,
            start: setup.start,
            body: Body::Starting(Box::new(start)),
            begun: false,
            connections: (0..links).map(|_| None).collect(),
            messages: Vec::new(),
            requests: Vec::new(),
            held: Arc::default(),
            kept_max,
            call: Call::None,
            watchers: Watchers::default(),
            wakes_background: false,
            has_called: false,
            runs_on: 0,
            sent: setup.start,
            wakes_at: None,
            reading: Reading::default(),
            carried: vec![core.now; links],
            carries: vec![false; links],
            replaying: vec![false; links],
            qid_stride: stride,
            reconnects: 0,
            opened_before: false,
            made_at: core.now,
            guarded: false,
            step_planned: false,
            failed: false,
            fenced: false,
            refused: None,
            closing: false,
            closed: false,
            recovered: None,
            committer: None,
        }
    }

    /// The target that refused to bind the stream, and its status.
    pub(super) fn take_refused(&mut self) -> Option<(u16, Status)> {
        self.refused.take()
    }

    /// Whether the stream has failed and was not reopened.
    #[must_use]
    pub(super) const fn has_failed(&self) -> bool {
        self.failed
    }

    /// Whether this is a reader that must be replaced: it has failed, or a target owes the answer
    /// to a read that was given up, and no thread receives that answer.
    pub(super) fn is_to_be_replaced(&self) -> bool {
        let owes = match &self.body {
            Body::Open(driver) => !self.is_in_call() && driver.has_unanswered_reads(),
            Body::Starting(_) => false,
            Body::Over => true,
        };
        self.is_reader && (self.failed || owes)
    }

    /// Whether it is bound everywhere, or was.
    #[must_use]
    pub(super) const fn has_begun(&self) -> bool {
        self.begun
    }

    /// Drops the library's stream, and its connections with it.
    pub(super) fn drop_stream(&mut self, core: &mut Core) {
        self.start = self.durable();
        self.watchers.end();
        self.body = Body::Over;
        self.drop_connections(core);
    }

    /// The progress of the stream, formatted for people.
    #[must_use]
    pub(super) fn describe(&self, core: &Core) -> String {
        if self.is_reader {
            return format!("reader {:?}", self.call);
        }
        let (complete, durable, last) = core.oracle.progress(self.era, self.id);
        let (steps, begun) = &core.steps[usize::from(self.id)];
        let connections = match &self.body {
            Body::Starting(start) => format!("{start:?}"),
            Body::Open(driver) => {
                let connections =
                    (0..self.connections.len()).map(|link| driver.connection(link as u16));
                format!("{:?}", connections.collect::<Vec<ConnectionState>>())
            }
            Body::Over => "over".into(),
        };
        format!(
            "{}: {complete}/{durable}/{last} step {begun} of {} {:?} {connections}{}",
            self.id,
            steps.len(),
            self.call,
            if self.failed { " failed" } else { "" }
        )
    }

    /// Whether everything submitted is durable and the logs have recorded that.
    #[must_use]
    pub(super) const fn is_closed(&self) -> bool {
        self.closed
    }

    /// The durable mark, as its owner has received it.
    #[must_use]
    pub(super) fn durable(&self) -> Seq {
        match &self.body {
            Body::Starting(_) | Body::Over => self.start,
            Body::Open(driver) => driver.delivered().durable,
        }
    }

    /// The library's stream, while it is bound everywhere and can be used.
    pub(super) fn driver(&mut self) -> Option<&mut StreamDriver<Payload>> {
        match &mut self.body {
            Body::Open(driver) if !self.failed && !self.closed => Some(driver),
            _ => None,
        }
    }

    /// The machine that has a drive of the volume, if the stream is bound everywhere.
    pub(super) fn machine_of(&self, member: Member) -> Option<usize> {
        let Body::Open(driver) = &self.body else { return None };
        Some(usize::from(driver.topology().member(member).server))
    }

    /// The messages between its owner and the background thread, if the stream can be driven.
    pub(super) fn attention(&mut self) -> Option<&mut Attention> {
        self.driver().map(StreamDriver::attention_mut)
    }

    /// Whether its owner's thread is in a call that waits. That thread then drives the stream.
    #[must_use]
    pub(super) fn is_in_call(&self) -> bool {
        !matches!(self.call, Call::None)
    }

    /// Notes that its owner is in no call any more. Returns whether the background driver must be
    /// woken to notice that.
    pub(super) fn call_ended(&mut self) -> bool {
        if self.is_in_call() {
            return false;
        }
        if core::mem::take(&mut self.has_called) {
            let is_needed = self.driver().is_some_and(StreamDriver::owner_call_ends);
            self.wakes_background |= is_needed;
        }
        core::mem::take(&mut self.wakes_background)
    }

    /// A thread of the program enters a call of the stream.
    pub(super) fn enter_call(&mut self) {
        let wakes = self.driver().is_some_and(StreamDriver::owner_calls);
        self.wakes_background |= wakes;
        self.has_called = true;
    }

    /// The time at which the thread that starts the stream, or its owner in a call, wakes without
    /// an event.
    #[must_use]
    pub(super) const fn deadline(&self) -> Option<u64> {
        if self.failed || self.closed { None } else { self.wakes_at }
    }

    /// Notes that the thread that drives the stream goes to sleep.
    pub(super) fn falls_asleep(&mut self, now: u64) {
        self.wakes_at = match (&self.body, self.call) {
            (Body::Starting(start), _) => Some(start.deadline(now)),
            (Body::Open(_), Call::None) | (Body::Over, _) => None,
            (Body::Open(driver), Call::Wait { deadline: Some(deadline), .. }) => {
                Some(driver.sleeps_until(now).min(deadline))
            }
            (Body::Open(driver), _) => Some(driver.sleeps_until(now)),
        };
    }

    /// The next request for the start of the stream. `None` if the stream is not being started, or
    /// if an event has to come first.
    pub(super) fn next_to_start(&mut self, core: &mut Core) -> Option<ConnectRequest> {
        loop {
            self.take_messages(core);
            let Body::Starting(start) = &mut self.body else { return None };
            if self.failed {
                return None;
            }
            match start.step(core.now) {
                StartStep::Connect(request) => return Some(request),
                StartStep::Drive => {
                    if !self.round(core) {
                        self.falls_asleep(core.now);
                        return None;
                    }
                }
                StartStep::Pause(_) => {
                    self.drop_connections(core);
                    self.falls_asleep(core.now);
                    return None;
                }
                StartStep::Ready => self.bound(core),
                StartStep::Failed(error) => {
                    let id = self.id;
                    core.trace(|| format!("stream {id}: could not be started: {error}"));
                    if let StartError::Refused(refused) = error {
                        self.refused = Some((refused.server, refused.status));
                    }
                    self.failed = true;
                    self.drop_stream(core);
                }
            }
        }
    }

    fn bound(&mut self, core: &mut Core) {
        let Body::Starting(start) = core::mem::replace(&mut self.body, Body::Over) else { return };
        if let Some(driver) = start.into_driver() {
            self.body = Body::Open(Box::new(driver));
            self.begun = true;
        }
        self.carried.fill(core.now);
        self.carries.fill(true);
        self.wakes_at = None;
    }

    /// Accepts a connection for the start of the stream.
    pub(super) fn connect(
        &mut self,
        request: &ConnectRequest,
        queue: IoQueue,
        end: ClientEnd,
        core: &mut Core,
    ) {
        let Body::Starting(start) = &mut self.body else { return };
        let role = Role::Stream { stream: self.id, server: request.server };
        let conn = core.connect(ClientEnd { role, ..end }, usize::from(request.server));
        start.connected(request.link, QueuePair::open(queue), core.now);
        self.connections[usize::from(request.link)] = Some(Connection::new(Wire::new(conn)));
    }

    /// Notes that a connection for the start of the stream cannot be made: the target is
    /// unreachable.
    pub(super) fn cannot_connect(&mut self, link: u16, core: &Core) {
        if let Body::Starting(start) = &mut self.body {
            start.put_off(link, core.now);
        }
    }

    /// The link of a connection, if it is one of the stream's.
    #[must_use]
    pub(super) fn link_of(&self, conn: usize) -> Option<u16> {
        let has_number = |connection: &Option<Connection>| {
            connection.as_ref().is_some_and(|c| c.wire.conn == conn)
        };
        self.connections.iter().position(has_number).map(|link| link as u16)
    }

    /// Receives bytes of a link, or the end of its connection.
    pub(super) fn arrives(&mut self, link: u16, bytes: Option<&[u8]>) {
        if let Some(connection) = &mut self.connections[usize::from(link)] {
            match bytes {
                Some(bytes) => connection.arrived.extend_from_slice(bytes),
                None => connection.ended = true,
            }
        }
    }

    /// The same request for another queue, which is not always the one before, as in the library. A
    /// target must not rely on the queue number, and may not have dropped the earlier queue yet
    /// (trap T8).
    fn on_another_queue(&mut self, request: ConnectRequest) -> ConnectRequest {
        self.reconnects += 1;
        if self.qid_stride > 1 {
            // The other queues are those of streams.
            return request;
        }
        ConnectRequest { qid: request.qid + 8 * (self.reconnects / 2 % 3), ..request }
    }

    /// Queues a message of another thread for the stream.
    pub(super) fn post(&mut self, message: StreamMessage) {
        self.messages.push(message);
    }

    /// Whether there are messages that were not read yet.
    #[must_use]
    pub(super) fn has_messages(&self) -> bool {
        !self.messages.is_empty()
    }

    /// Runs one round of all work that is due. Returns whether anything was done.
    pub(super) fn round(&mut self, core: &mut Core) -> bool {
        let mut worked = loop {
            let received = self.receive(core);
            // A connection may come up and be lost in the same round.
            self.note_connections(core);
            match received {
                Ok(worked) => break worked,
                Err((link, error)) => self.lose(link, error, core),
            }
        };
        if matches!(self.body, Body::Open(_)) {
            self.take_messages(core);
        }
        let Some(driver) = driver_of(&mut self.body) else { return worked };
        driver.want_durable(self.watchers.wanted(driver.last()));
        if driver.wants_core() {
            // The scheduler moves the thread to another core from time to time.
            if core.rng.percent(MIGRATIONS) {
                self.runs_on = core.rng.below(CORES) as u32;
            }
            driver.set_core(self.runs_on);
        }
        driver.pump(core.now);
        self.sent = driver.last();
        for (link, connection) in (0..).zip(&self.connections) {
            let out = driver.outbox(link);
            if let Some(connection) = connection {
                worked |= !out.is_empty();
                connection.wire.send(out, core);
            }
        }
        if let Body::Open(driver) = &mut self.body {
            if !worked {
                driver.timeout(core.now);
            }
            driver.check_connections(core.now);
            while let Some(event) = self.driver().and_then(StreamDriver::next_event) {
                self.handle_event(event, core);
            }
            self.note_connections(core);
        }
        worked
    }

    /// Receives the bytes that have arrived from each server. Returns whether there were any. An
    /// error names the link whose connection has ended.
    fn receive(&mut self, core: &mut Core) -> Result<bool, (u16, Option<SessionError>)> {
        let mut received = false;
        let Self { body, connections, reading, .. } = self;
        let Some(driver) = driver_of(body) else { return Ok(false) };
        for (link, connection) in (0..).zip(connections) {
            if let Some(connection) = connection.as_mut().filter(|_| driver.is_open(link)) {
                let result = connection.receive(link, driver, reading, core);
                received |= result.map_err(|error| (link, error))?;
            }
        }
        Ok(received)
    }

    pub(super) fn handle_event(&mut self, event: StreamEvent, core: &mut Core) {
        let id = self.id;
        match event {
            StreamEvent::ConnectionEnded { link } => self.close_connection(link, core),
            StreamEvent::Connect(request) => {
                let request = self.on_another_queue(request);
                self.requests.push(request);
            }
            StreamEvent::Back { server, replayed, .. } => core.trace(|| {
                format!("stream {id}: back on target {server}, {replayed} requests sent again")
            }),
        }
    }

    /// Handles the end of a connection. `error` is the error of the session, if there is one.
    fn lose(&mut self, link: u16, error: Option<SessionError>, core: &mut Core) {
        let id = self.id;
        core.trace(|| {
            let why = error.as_ref().map_or("it has ended".into(), ToString::to_string);
            format!("stream {id}: lost link {link}: {why}")
        });
        self.close_connection(link, core);
        match &mut self.body {
            Body::Starting(start) => start.failed(link, error, core.now),
            Body::Open(driver) => driver.closed(link, core.now),
            Body::Over => {}
        }
    }

    fn take_messages(&mut self, core: &mut Core) {
        for message in core::mem::take(&mut self.messages) {
            let driver = match &mut self.body {
                Body::Open(driver) => driver,
                Body::Starting(start) => {
                    match message {
                        StreamMessage::AssociationEnded { server, .. } => {
                            start.association_ended(server, core.now);
                        }
                        StreamMessage::GiveUp { server, .. } => start.give_up(server),
                        StreamMessage::Connected { wire, .. } => wire.close(core),
                    }
                    continue;
                }
                Body::Over => {
                    if let StreamMessage::Connected { wire, .. } = message {
                        wire.close(core);
                    }
                    continue;
                }
            };
            match message {
                StreamMessage::AssociationEnded { server, since } => {
                    // A connection that the stream still has is lost by this. Its loss timeout
                    // counts from the target's last sign of life.
                    for link in (0..self.carries.len()).filter(|link| {
                        driver.server_of(*link as u16) == server && driver.is_open(*link as u16)
                    }) {
                        if core::mem::take(&mut self.carries[link]) {
                            self.carried[link] = since.max(core.now.saturating_sub(SILENCE_NS));
                        }
                    }
                    driver.association_ended(server, since)
                }
                StreamMessage::GiveUp { server, cause } => driver.give_up(server, cause),
                StreamMessage::Connected { link, wire, queue } => {
                    if driver.connected(link, QueuePair::open(*queue), core.now) {
                        self.close_connection(link, core);
                        self.connections[usize::from(link)] = Some(Connection::new(wire));
                        let id = self.id;
                        core.trace(|| format!("stream {id}: connects link {link} again"));
                    } else {
                        wire.close(core);
                    }
                }
            }
        }
    }

    /// Notes the state of the connections.
    fn note_connections(&mut self, core: &mut Core) {
        let Body::Open(driver) = &self.body else { return };
        for link in 0..self.connections.len() {
            let state = driver.connection(link as u16);
            // A connection carries requests until the stream learns that it is lost.
            let carries = matches!(state, ConnectionState::Up | ConnectionState::Replaying);
            if core::mem::replace(&mut self.carries[link], carries) || carries {
                self.carried[link] = core.now;
            }
            let replaying = state == ConnectionState::Replaying;
            if replaying && !self.replaying[link] {
                core.replays = (core.replays.0 + 1, core.events);
            }
            self.replaying[link] = replaying;
        }
    }

    /// Whether a part of the stream is being replayed now.
    #[must_use]
    pub(super) fn is_replaying(&self) -> bool {
        self.replaying.contains(&true)
    }

    fn close_connection(&mut self, link: u16, core: &mut Core) {
        if let Some(connection) = self.connections[usize::from(link)].take() {
            connection.wire.close(core);
        }
    }

    /// Closes all connections at once.
    pub(super) fn drop_connections(&mut self, core: &mut Core) {
        (0..self.connections.len()).for_each(|link| self.close_connection(link as u16, core));
    }
}

//! A stream's inner part: its session, and its connections to the volume's targets. Whoever has
//! taken it, the owner or the housekeeper, drives it.

use std::sync::{Arc, Mutex};
use std::time::Duration;

use riopipe_net::{Interest, Poller, PollerError, Received, RecvBuf, Socket, Waker, now_ns};
use riopipe_order::attribute::{Seq, StreamId};
use riopipe_order::engine::{Cause, EngineKind, Failure, Marks};
use riopipe_session::initiator::queue_pair::QueuePair;
use riopipe_session::initiator::reconnect::ConnectRequest;
use riopipe_session::initiator::stream::{LinkState, StreamSession};

use crate::attention::Attention;
use crate::error::{CallError, StreamFailure, cause_text};
use crate::piece::{Kept, Piece, Pool};
use crate::shared::{Inner, lock};
use crate::watched::Watched;

/// What is reached without taking the stream: from the keepers, from watching threads, and from
/// event loops.
#[derive(Debug)]
pub(crate) struct Side {
    poller: Poller,
    waker: Waker,
    mail: Mutex<Vec<Mail>>,
    /// Outlives the stream where somebody still watches it.
    pub(crate) watched: Arc<Watched>,
}

/// What keepers tell a stream.
#[derive(Debug)]
pub(crate) enum Mail {
    /// A new connection to a server, and a queue on it that has not been started.
    Link { server: usize, socket: Socket, queue: Box<QueuePair<Piece>> },
    /// The association that a server's connections belong to is over, and a new one stands: a
    /// connection that does not know yet, because the machine at its other end lost its power while
    /// nothing was under way, is no good any more. Nor are reads of other streams until this one
    /// has come after (P9).
    Ended { server: usize },
    /// A server will not come back.
    GiveUp { server: usize, cause: Cause },
}

impl Side {
    pub(crate) fn new(start: Seq) -> Result<Arc<Self>, PollerError> {
        let poller = Poller::new()?;
        let waker = poller.waker();
        let watched = Arc::new(Watched::new(start));
        Ok(Arc::new(Self { poller, waker, mail: Mutex::default(), watched }))
    }

    /// Readable when the stream has something to do.
    pub(crate) fn poller(&self) -> &Poller {
        &self.poller
    }

    /// Leaves something for whoever drives the stream, and wakes him.
    pub(crate) fn post(&self, mail: Mail) {
        lock(&self.mail).push(mail);
        self.waker.wake();
    }
}

#[derive(Debug)]
struct Connection {
    socket: Socket,
    rx: RecvBuf,
    /// Whether the poller watches for room to send.
    wants_write: bool,
}

impl Connection {
    fn new(socket: Socket) -> Self {
        Self { socket, rx: RecvBuf::new(RX_MAX), wants_write: false }
    }
}

/// Bytes that one PDU may have at most: the largest read and its header.
const RX_MAX: usize = (4 << 20) + 4096;
/// What a stream that its owner has left is flushed after, if nobody else does it: so long that
/// one who writes now and then is not slowed down by flushes that he never asked for.
const FLUSH_NS: u64 = 1_000_000_000;

/// A stream's way to one server.
#[derive(Debug)]
struct Road {
    connection: Option<Connection>,
    qid: u16,
    /// Commands that its queue has room for.
    depth: usize,
    /// A connection has been asked for.
    asked: bool,
    /// How many of them have come to nothing.
    attempts: u32,
    /// When the connection was lost, and what had been replayed by then.
    lost: Option<(u64, u64)>,
}

/// See the [module](self).
pub(crate) struct Lanes {
    pub(crate) attention: Attention,
    pub(crate) session: StreamSession<Piece>,
    /// What the session's pieces are of; dropped after it.
    pub(crate) kept: Kept,
    roads: Vec<Road>,
    side: Arc<Side>,
    volume: Arc<Inner>,
    /// When the last [`turn`](Self::turn) began: looking at the clock costs as much as a look for
    /// answers does beside the system call.
    pub(crate) now: u64,
    /// Some connection is not as it should be.
    broken: bool,
    failure: Option<Box<StreamFailure>>,
    /// The mark that the ledger was last told.
    released: Seq,
    /// The last group, if it is not durable, and since when nothing has been done about that.
    undurable: Option<(Seq, u64)>,
}

/// A connection to be, of one stream to one server.
pub(crate) struct Way {
    pub(crate) socket: Socket,
    pub(crate) qid: u16,
    pub(crate) depth: usize,
}

impl Lanes {
    pub(crate) fn new(
        volume: Arc<Inner>,
        side: Arc<Side>,
        session: StreamSession<Piece>,
        ways: Vec<Way>,
    ) -> Result<Self, (usize, CallError)> {
        // What was left for an earlier life is about connections that are no more.
        lock(&side.mail).clear();
        let mut roads = Vec::with_capacity(ways.len());
        for (server, Way { socket, qid, depth }) in ways.into_iter().enumerate() {
            side.poller
                .add(&socket, server as u64, Interest::Read)
                .map_err(|e| (server, poll_error(e)))?;
            let connection = Some(Connection::new(socket));
            roads.push(Road { connection, qid, depth, asked: false, attempts: 0, lost: None });
        }
        let released = session.config().start;
        Ok(Self {
            attention: Attention::default(),
            session,
            kept: Kept::default(),
            roads,
            side,
            volume,
            now: now_ns(),
            broken: false,
            failure: None,
            released,
            undurable: None,
        })
    }

    pub(crate) fn id(&self) -> StreamId {
        self.session.config().stream
    }

    /// Closes all connections. The stream is no good for anything afterwards.
    pub(crate) fn hang_up(&mut self) {
        for road in &mut self.roads {
            road.connection = None;
        }
    }

    /// The queue on every server.
    pub(crate) fn qids(&self) -> Vec<u16> {
        self.roads.iter().map(|road| road.qid).collect()
    }

    /// Begins a new life on new connections. The attention goes on: its calls are counted.
    /// The old life's buffers go to the pool.
    pub(crate) fn restart(&mut self, new: Self, pool: &mut Pool) {
        let attention = std::mem::take(&mut self.attention);
        let mut kept = std::mem::take(&mut self.kept);
        *self = Self { attention, ..new };
        kept.give_back(Seq(u64::MAX), pool);
    }

    /// Gives the buffers back that are no longer needed; up to which group they are.
    pub(crate) fn reclaim(&mut self, pool: &mut Pool) -> Seq {
        let forgotten = self.session.engine().kept_after();
        self.kept.give_back(forgotten, pool);
        forgotten
    }

    /// Sends what may be sent, without looking for answers.
    pub(crate) fn send(&mut self) {
        self.session.pump(now_ns());
        self.tell_time();
        for server in 0..self.roads.len() {
            if let Err(error) = self.flush(server) {
                self.lose(server, &error);
            }
        }
    }

    /// One round of all there is to do; whether anything was done. A connection that breaks is
    /// asked for again, or poisons the stream.
    #[inline]
    pub(crate) fn work(&mut self, sink: &mut dyn FnMut(usize, &[u8])) -> bool {
        if self.side.poller.is_woken() {
            self.read_mail();
        }
        let worked = loop {
            match self.turn(sink) {
                Ok(worked) => break worked,
                Err((server, error)) => self.lose(server, &error),
            }
        };
        if !worked && let Some(server) = self.session.stalled(self.now) {
            self.session.lost(server, Cause::TimedOut, self.now);
            self.broken = true;
        }
        if self.broken {
            self.mend();
        }
        worked
    }

    /// Receives once from each target, then sends what that makes possible.
    pub(crate) fn turn(
        &mut self,
        sink: &mut dyn FnMut(usize, &[u8]),
    ) -> Result<bool, (usize, CallError)> {
        let mut worked = false;
        let now = now_ns();
        self.now = now;
        for server in 0..self.roads.len() {
            worked |= self.receive(server, now, sink).map_err(|e| (server, e))?;
        }
        self.tell_time();
        self.session.pump(now);
        self.tell_time();
        for server in 0..self.roads.len() {
            worked |= self.flush(server).map_err(|e| (server, e))?;
        }
        Ok(worked)
    }

    /// A traced group has entered a stage: the session has no clock to see when.
    #[inline]
    fn tell_time(&mut self) {
        if self.session.wants_instant() {
            self.session.instant(now_ns());
        }
    }

    fn receive(
        &mut self,
        server: usize,
        now: u64,
        sink: &mut dyn FnMut(usize, &[u8]),
    ) -> Result<bool, CallError> {
        let Some(connection) = &mut self.roads[server].connection else { return Ok(false) };
        if self.session.is_lost(server as u16) {
            // What comes from it now is nobody's.
            self.broken = true;
            return Ok(false);
        }
        match connection.rx.fill(&connection.socket)? {
            Received::WouldBlock => return Ok(false),
            Received::Closed => return Err(CallError::Closed),
            Received::Bytes(_) => {}
        }
        let used = self.session.receive(server as u16, now, connection.rx.data(), sink);
        let used = match used {
            Ok(used) => used,
            Err(error) => {
                // Tell the target why, if it still listens.
                let _ = connection.socket.send(self.session.outbox(server as u16).slices());
                return Err(error.into());
            }
        };
        connection.rx.consume(used);
        let need = self.session.need(server as u16, connection.rx.data());
        if connection.rx.reserve(need).is_err() {
            return Err(CallError::Nonsense("a PDU larger than anything that was asked for"));
        }
        Ok(true)
    }

    /// Sends from the outbox as far as the kernel takes it.
    fn flush(&mut self, server: usize) -> Result<bool, CallError> {
        let Some(connection) = &mut self.roads[server].connection else { return Ok(false) };
        let out = self.session.outbox(server as u16);
        let mut sent_any = false;
        while !out.is_empty() {
            let sent = connection.socket.send(out.slices())?;
            if sent == 0 {
                break;
            }
            out.consume(sent);
            sent_any = true;
        }
        let wants_write = !out.is_empty();
        if wants_write != connection.wants_write {
            connection.wants_write = wants_write;
            let interest = if wants_write { Interest::Both } else { Interest::Read };
            let modified = self.side.poller.modify(&connection.socket, server as u64, interest);
            modified.map_err(poll_error)?;
        }
        Ok(sent_any)
    }

    #[cold]
    fn lose(&mut self, server: usize, error: &CallError) {
        tracing::warn!(
            volume = %self.volume.name, stream = %self.id(),
            target = %self.volume.server_name(server), %error,
            "lost the connection of an ordered stream"
        );
        self.session.lost(server as u16, Cause::Disconnected, now_ns());
        self.roads[server].connection = None;
        self.broken = true;
    }

    /// Takes in what the keepers have left.
    #[cold]
    fn read_mail(&mut self) {
        // Before looking: what is posted from now on wakes again.
        let mut events = Vec::new();
        // It only fails when the process is out of memory; then the mail is read all the same.
        let _ = self.side.poller.wait(&mut events, Some(Duration::ZERO));
        self.take_mail();
    }

    fn take_mail(&mut self) {
        let now = now_ns();
        let all = std::mem::take(&mut *lock(&self.side.mail));
        for mail in all {
            match mail {
                Mail::GiveUp { server, cause } => {
                    self.session.give_up(server as u16, cause);
                    self.broken = true;
                }
                Mail::Ended { server } => {
                    if self.roads[server].connection.is_some() {
                        self.lose(server, &CallError::Closed);
                    }
                }
                Mail::Link { server, socket, queue } => {
                    let road = &mut self.roads[server];
                    let wanted = std::mem::take(&mut road.asked)
                        && self.session.link(server as u16) == LinkState::Down;
                    if !wanted {
                        continue;
                    }
                    road.attempts += 1;
                    if let Err(error) = self.side.poller.add(&socket, server as u64, Interest::Read)
                    {
                        tracing::error!(%error, "cannot watch a connection");
                        continue;
                    }
                    road.connection = Some(Connection::new(socket));
                    self.session.rejoin(server as u16, *queue, now);
                }
            }
        }
    }

    /// Drops connections that are lost, asks for new ones, and notices those that are back.
    #[cold]
    fn mend(&mut self) {
        let now = now_ns();
        self.broken = false;
        for server in 0..self.roads.len() {
            let state = self.session.link(server as u16);
            let road = &mut self.roads[server];
            match state {
                LinkState::Down | LinkState::Dead => {
                    // Closing it ends the poller's watch.
                    road.connection = None;
                    let replayed = self.session.engine().replayed();
                    let _ = road.lost.get_or_insert((now, replayed));
                }
                LinkState::Joining | LinkState::Replaying => {}
                LinkState::Up => {
                    road.attempts = 0;
                    if let Some((since, before)) = road.lost.take() {
                        tracing::info!(
                            volume = %self.volume.name, stream = %self.session.config().stream,
                            target = %self.volume.servers[server].name,
                            after_ms = now.saturating_sub(since) / 1_000_000,
                            replayed = self.session.engine().replayed() - before,
                            "an ordered stream is back on its target"
                        );
                    }
                }
            }
            self.broken |= !matches!(state, LinkState::Up | LinkState::Dead);
        }
        let wanted: Vec<u16> = self.session.wants_rejoin().collect();
        for server in wanted {
            self.ask(usize::from(server));
        }
        // A poisoned stream has nothing left to mend.
        self.broken &= self.session.engine().failure().is_none();
    }

    /// Asks for a connection to a server, once.
    fn ask(&mut self, server: usize) {
        let road = &mut self.roads[server];
        if road.asked {
            return;
        }
        let target = &self.volume.servers[server].target;
        if target.absence().is_some_and(|absence| absence.for_good) {
            self.session.give_up(server as u16, Cause::Disconnected);
            return;
        }
        road.asked = true;
        let (qid, depth, attempts) = (road.qid, road.depth, road.attempts);
        let (stream, server) = (self.session.config().stream, server as u16);
        target.request(ConnectRequest { stream, server, qid, depth, attempts }, &self.side);
    }

    /// Sleeps until something comes, until `deadline`, or until the session wants to be called.
    pub(crate) fn sleep(&mut self, deadline: Option<u64>) {
        let now = now_ns();
        let own = self.session.deadline(now);
        let until = deadline.into_iter().chain(own).min();
        // Now and then anyway: a deadline may come to be while nobody looks (T22).
        let left = until.map_or(SLEEP_NS_MAX, |until| until.saturating_sub(now).min(SLEEP_NS_MAX));
        let mut events = Vec::new();
        match self.side.poller.wait(&mut events, Some(Duration::from_nanos(left))) {
            // The wait has taken note of the waker; the mail is there.
            Ok(true) => self.take_mail(),
            Ok(false) => {}
            Err(error) => {
                tracing::error!(%error, "cannot sleep until something arrives; looking instead");
            }
        }
    }

    /// When [`work`](Self::work) should be called though nothing has come.
    pub(crate) fn deadline(&self) -> Option<u64> {
        self.session.deadline(now_ns())
    }

    /// The engine's marks, and what follows from them.
    pub(crate) fn marks(&mut self) -> Result<Marks, StreamFailure> {
        if let Some(failure) = &self.failure {
            return Err((**failure).clone());
        }
        let result = self.session.poll();
        let marks = self.session.marks();
        if self.session.has_traced() {
            self.volume.stages.record(&self.session.traced(now_ns()));
        }
        self.side.watched.publish(marks);
        if let Err(failure) = result {
            return Err(self.poisoned(failure));
        }
        if let Some(ledger) = &self.volume.ledger {
            let released = self.session.engine().released();
            if released > self.released {
                self.released = released;
                lock(ledger).released(self.id(), released);
            }
        }
        Ok(marks)
    }

    /// The housekeeper's turn: some rounds of work, so few that an owner who comes back does not
    /// wait long. Returns when the next one is due though nothing may have come.
    pub(crate) fn tend(&mut self, rounds: u32) -> Option<u64> {
        let mut worked = true;
        for _ in 0..rounds {
            worked = worked && self.work(&mut |_, _| ());
        }
        let Ok(marks) = self.marks() else { return None };
        let now = now_ns();
        let flush = self.background_flush(marks, now);
        let next = self.session.deadline(now).into_iter().chain(flush).min();
        if worked { Some(now) } else { next }
    }

    /// Makes durable what its owner has left lying, so that the logs can forget it (T1); returns
    /// when that is due.
    fn background_flush(&mut self, marks: Marks, now: u64) -> Option<u64> {
        let engine = self.session.engine();
        let last = engine.last();
        let lies = self.session.config().engine == EngineKind::Rio
            && marks.durable < last
            && engine.is_idle();
        if !lies {
            self.undurable = None;
            return None;
        }
        let since = match self.undurable {
            Some((group, since)) if group == last => since,
            _ => now,
        };
        self.undurable = Some((last, since));
        let due = since.saturating_add(FLUSH_NS);
        if now < due {
            return Some(due);
        }
        self.session.ask_durable(last);
        self.undurable = None;
        // Sends it.
        Some(now)
    }

    /// The stream has failed: the same error from now on, however often it is asked for (P6).
    #[cold]
    pub(crate) fn poisoned(&mut self, failure: Failure) -> StreamFailure {
        if let Some(failure) = &self.failure {
            return (**failure).clone();
        }
        let failure = self.describe(failure);
        self.side.watched.fail();
        self.failure = Some(Box::new(failure.clone()));
        failure
    }

    fn describe(&self, failure: Failure) -> StreamFailure {
        let server = self.session.topology().member(failure.member).server;
        let gone = matches!(failure.cause, Cause::Disconnected | Cause::TimedOut);
        let mut cause = cause_text(failure.cause, failure.flush);
        let absence = self.volume.servers[usize::from(server)].target.absence();
        if let Some(changed) = absence.as_ref().filter(|_| failure.cause == Cause::Changed) {
            // Which says it all.
            cause = changed.why.clone();
        }
        if let Some(absence) = absence.filter(|_| gone) {
            let ms = now_ns().saturating_sub(absence.since) / 1_000_000;
            cause = format!("{cause} ({}; for {ms} ms now)", absence.why);
        }
        StreamFailure {
            volume: self.volume.name.clone(),
            stream: self.id(),
            seq: failure.seq,
            target: self.volume.member_name(failure.member),
            cause,
        }
    }

    pub(crate) fn failure_of(&self, cause: String) -> StreamFailure {
        StreamFailure {
            volume: self.volume.name.clone(),
            stream: self.id(),
            seq: self.session.marks().complete.next(),
            target: self.volume.server_name(0),
            cause,
        }
    }
}

/// Longest sleep without a look around.
const SLEEP_NS_MAX: u64 = 1_000_000_000;

impl std::fmt::Debug for Lanes {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Lanes")
            .field("stream", &self.id())
            .field("marks", &self.session.marks())
            .finish_non_exhaustive()
    }
}

pub(crate) fn poll_error(error: PollerError) -> CallError {
    tracing::error!(%error, "cannot watch a connection");
    CallError::Nonsense("this process has no descriptors left to watch a connection with")
}

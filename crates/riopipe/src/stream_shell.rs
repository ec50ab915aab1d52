//! A stream in this process: its driver, its sockets and its buffers. The thread that has taken it,
//! its owner's or the background thread, drives it.

use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, OnceLock};
use std::task::Waker;
use std::time::Duration;

use riopipe_net::{Interest, Next, Poller, PollerError, Received, RecvBuf, Socket, Waiter, now_ns};
use riopipe_order::attribute::{Member, Seq, StreamId};
use riopipe_order::engine::{Cause, Failure, Marks};
use riopipe_session::initiator::queue_pair::{IoQueue, QueuePair};
use riopipe_session::initiator::stream_driver::{ROUNDS_MAX, StreamDriver, StreamEvent};
use riopipe_session::initiator::volume::error::Nonsense;

use crate::error::CallError;
use crate::failure::{Absence, Exhausted, FailureCause, StreamFailure};
use crate::piece::{Kept, Piece, Pool};
use crate::shared::{Inner, lock};
use crate::waking::wake_all;
use crate::watched::{Over, Watched};

/// What is reached without taking the stream: from the targets' threads, from watching threads, and
/// from event loops.
#[derive(Debug)]
pub(crate) struct StreamHandle {
    poller: Poller,
    waker: riopipe_net::Waker,
    mail: Mutex<Vec<StreamMessage>>,
    /// Another thread has called the owner.
    called: AtomicBool,
    /// What an event loop waits for, if there is one: what the stream's own poller waits for, that the
    /// background thread has found something, and calls of the owner. It is woken for the latter two.
    news: OnceLock<Poller>,
    /// Outlives the stream where somebody still watches it.
    pub(crate) watched: Arc<Watched<StreamFailure>>,
}

/// What the targets' threads tell a stream.
#[derive(Debug)]
pub(crate) enum StreamMessage {
    /// A connection to a server, and the queue to open on it.
    Connected { server: usize, socket: Socket, queue: Box<IoQueue> },
    /// The association that a server's connections belong to is over.
    AssociationEnded { server: usize },
    /// A server will not come back.
    GiveUp { server: usize, cause: Cause },
}

impl StreamHandle {
    pub(crate) fn new(start: Seq) -> Result<Arc<Self>, PollerError> {
        let poller = Poller::new()?;
        let waker = poller.waker();
        let watched = Arc::new(Watched::new(start));
        let (mail, called, news) = (Mutex::default(), AtomicBool::new(false), OnceLock::new());
        Ok(Arc::new(Self { poller, waker, mail, called, news, watched }))
    }

    /// Readable when the stream has something to do.
    pub(crate) fn poller(&self) -> &Poller {
        &self.poller
    }

    /// What an event loop waits for.
    pub(crate) fn news(&self) -> Result<&Poller, PollerError> {
        if self.news.get().is_none() {
            let news = Poller::new()?;
            news.add(&self.poller, 0, Interest::Read)?;
            // Another thread may have been faster.
            let _ = self.news.set(news);
        }
        Ok(self.news.get().expect("it was set above, or by another thread before"))
    }

    /// There is something that the owner has not seen: the background thread has found it, or another
    /// thread has called.
    fn tell_news(&self) {
        if let Some(news) = self.news.get() {
            news.waker().wake();
        }
    }

    /// The owner takes in all there is.
    #[inline]
    pub(crate) fn hear_news(&self) {
        if let Some(news) = self.news.get()
            && news.is_woken()
        {
            // It only fails when the process is out of memory; then it is heard all the same.
            let _ = news.wait(&mut Vec::new(), Some(Duration::ZERO));
        }
    }

    /// What wakes the thread that drives the stream.
    pub(crate) fn waker(&self) -> &riopipe_net::Waker {
        &self.waker
    }

    /// Calls the owner: its wait ends, or the next one does.
    pub(crate) fn call_owner(&self) {
        self.called.store(true, Ordering::Release);
        // An event loop is to see it though the background thread may hear it first.
        self.tell_news();
        self.waker.wake();
    }

    /// Leaves something for the thread that drives the stream, and wakes it.
    pub(crate) fn post(&self, mail: StreamMessage) {
        lock(&self.mail).push(mail);
        self.waker.wake();
    }

    /// Takes what the targets' threads have left.
    pub(crate) fn take_mail(&self) -> Vec<StreamMessage> {
        std::mem::take(&mut *lock(&self.mail))
    }

    /// Sleeps until something comes or the time has come; whether there is mail.
    pub(crate) fn sleep(&self, until: u64) -> bool {
        let left = Duration::from_nanos(until.saturating_sub(now_ns()));
        let mut events = Vec::new();
        self.poller.wait(&mut events, Some(left)).unwrap_or_else(|error| {
            tracing::error!(%error, "cannot sleep until something arrives; looking instead");
            false
        })
    }
}

#[derive(Debug)]
struct Connection {
    socket: Socket,
    rx: RecvBuf,
    /// Whether the poller watches for room to send.
    wants_write: bool,
}

/// Bytes that one PDU may have at most: the largest read and its header.
const RX_MAX: usize = (4 << 20) + 4096;

/// The sockets of a stream, one for each server that it is connected to.
#[derive(Debug)]
pub(crate) struct Connections {
    servers: Vec<Option<Connection>>,
    handle: Arc<StreamHandle>,
}

impl Connections {
    pub(crate) fn new(servers: usize, handle: Arc<StreamHandle>) -> Self {
        // What was left for an earlier life is about connections that are no more.
        lock(&handle.mail).clear();
        Self { servers: (0..servers).map(|_| None).collect(), handle }
    }

    /// Takes a socket to a server.
    pub(crate) fn open(&mut self, server: usize, socket: Socket) -> Result<(), PollerError> {
        self.handle.poller.add(&socket, server as u64, Interest::Read)?;
        let rx = RecvBuf::new(RX_MAX);
        self.servers[server] = Some(Connection { socket, rx, wants_write: false });
        Ok(())
    }

    /// Closes the socket to a server; that ends the poller's watch.
    fn close(&mut self, server: usize) {
        self.servers[server] = None;
    }

    pub(crate) fn close_all(&mut self) {
        self.servers.fill_with(|| None);
    }

    /// Receives once from each target, then sends what that makes possible; whether anything
    /// moved.
    pub(crate) fn round(
        &mut self,
        driver: &mut StreamDriver<Piece>,
        now: u64,
        sink: &mut dyn FnMut(usize, &[u8]),
    ) -> Result<bool, (usize, CallError)> {
        let received = self.receive_all(driver, now, sink)?;
        Ok(self.send_all(driver, now)? || received)
    }

    /// Receives once from each target; whether anything came.
    #[inline]
    fn receive_all(
        &mut self,
        driver: &mut StreamDriver<Piece>,
        now: u64,
        sink: &mut dyn FnMut(usize, &[u8]),
    ) -> Result<bool, (usize, CallError)> {
        let mut received = false;
        for server in 0..self.servers.len() {
            received |= self.receive(driver, server, now, sink).map_err(|e| (server, e))?;
        }
        tell_time(driver);
        Ok(received)
    }

    /// Sends each target what may be sent; whether anything was.
    #[inline]
    fn send_all(
        &mut self,
        driver: &mut StreamDriver<Piece>,
        now: u64,
    ) -> Result<bool, (usize, CallError)> {
        let mut sent = false;
        driver.pump(now);
        tell_time(driver);
        for server in 0..self.servers.len() {
            sent |= self.send(driver, server).map_err(|e| (server, e))?;
        }
        Ok(sent)
    }

    fn receive(
        &mut self,
        driver: &mut StreamDriver<Piece>,
        server: usize,
        now: u64,
        sink: &mut dyn FnMut(usize, &[u8]),
    ) -> Result<bool, CallError> {
        let Some(connection) = &mut self.servers[server] else { return Ok(false) };
        let at = server as u16;
        if !driver.is_open(at) {
            return Ok(false);
        }
        match connection.rx.fill(&connection.socket)? {
            Received::WouldBlock => return Ok(false),
            Received::Closed => return Err(CallError::Closed),
            Received::Bytes(_) => {}
        }
        let used = match driver.received(at, now, connection.rx.data(), sink) {
            Ok(used) => used,
            Err(error) => {
                // Tell the target why, if it still listens.
                let _ = connection.socket.send(driver.outbox(at).slices());
                return Err(error.into());
            }
        };
        connection.rx.consume(used);
        let need = driver.need(at, connection.rx.data());
        if connection.rx.reserve(need).is_err() {
            return Err(CallError::Nonsense(Nonsense::LargePdu));
        }
        Ok(true)
    }

    /// Sends from the outbox as far as the kernel takes it.
    fn send(&mut self, driver: &mut StreamDriver<Piece>, server: usize) -> Result<bool, CallError> {
        let Some(connection) = &mut self.servers[server] else { return Ok(false) };
        let out = driver.outbox(server as u16);
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
            let poller = &self.handle.poller;
            let modified = poller.modify(&connection.socket, server as u64, interest);
            modified.map_err(poll_error)?;
        }
        Ok(sent_any)
    }
}

/// A traced group has entered a stage: the session has no clock to see when.
#[inline]
fn tell_time(driver: &mut StreamDriver<Piece>) {
    if driver.wants_instant() {
        driver.instant(now_ns());
    }
}

/// See the [module](self). It owns the buffers of all that the driver has under way: pieces of one
/// buffer never get into two shells, nor out of one.
pub(crate) struct StreamShell {
    pub(crate) driver: StreamDriver<Piece>,
    /// What the driver's pieces are of; dropped after it.
    pub(crate) kept: Kept,
    connections: Connections,
    volume: Arc<Inner>,
    /// When the last round began: looking at the clock costs as much as a look for answers does
    /// beside the system call.
    pub(crate) now: u64,
    failure: Option<Box<StreamFailure>>,
    /// The mark that the ledger was last told.
    released: Seq,
    /// The marks that were published last.
    published: Marks,
    /// Those that waited for what has come: who drives the stream wakes them before it rests, or
    /// right after it has given the stream back.
    due: Vec<Waker>,
}

// SAFETY: only the driver's pieces are not `Send` (asserted below), because the counts of their
// buffers take one thread at a time. All pieces of a buffer that the driver has are in it, and they
// stay: it hands out none, and they are dropped in it. So they change threads with the shell and
// only so, and what one thread counted happens before the next one's turn, as it does for whatever
// is sent. The buffers' owners are here (`kept`), but one that is freed elsewhere, by a caller
// that got it back, has no piece left (`Buf::is_unique`, acquired after the last piece's release).
unsafe impl Send for StreamShell {}

const _: () = {
    const fn is_send<T: Send>() {}
    // The driver with a payload that may be sent; its engine is `Send` by an assertion of its own.
    is_send::<Kept>();
    is_send::<Connections>();
    is_send::<Arc<Inner>>();
    is_send::<Option<Box<StreamFailure>>>();
};

impl StreamShell {
    /// A stream that is bound everywhere.
    pub(crate) fn new(
        volume: Arc<Inner>,
        driver: StreamDriver<Piece>,
        connections: Connections,
    ) -> Self {
        let released = driver.config().start;
        let published = driver.delivered();
        let (kept, now, due) = (Kept::default(), now_ns(), Vec::new());
        Self { driver, kept, connections, volume, now, failure: None, released, published, due }
    }

    pub(crate) fn id(&self) -> StreamId {
        self.driver.id()
    }

    fn handle(&self) -> &Arc<StreamHandle> {
        &self.connections.handle
    }

    /// Closes all connections. The stream is no good for anything afterwards.
    pub(crate) fn hang_up(&mut self) {
        self.connections.close_all();
    }

    /// Begins a new life on new connections. The attention goes on: its calls are counted.
    /// The old life's buffers go to the pool.
    pub(crate) fn restart(&mut self, mut new: Self, pool: &mut Pool) {
        *new.driver.attention_mut() = std::mem::take(self.driver.attention_mut());
        new.due.append(&mut self.due);
        let mut kept = std::mem::take(&mut self.kept);
        *self = new;
        kept.give_back(Seq(u64::MAX), pool);
    }

    /// Gives the buffers back that are no longer needed.
    pub(crate) fn reclaim(&mut self, pool: &mut Pool) {
        self.kept.give_back(self.driver.reclaim(), pool);
    }

    /// Sends what may be sent, without looking for answers.
    pub(crate) fn send(&mut self) {
        self.driver.want_durable(self.handle().watched.wanted(self.driver.last()));
        self.driver.pump(now_ns());
        tell_time(&mut self.driver);
        for server in 0..self.connections.servers.len() {
            if let Err(error) = self.connections.send(&mut self.driver, server) {
                self.lose(server, &error);
            }
        }
    }

    /// One round of all there is to do; whether anything was done.
    #[inline]
    pub(crate) fn work(&mut self, sink: &mut dyn FnMut(usize, &[u8])) -> bool {
        let worked = loop {
            self.now = now_ns();
            match self.round(sink) {
                Ok(worked) => break worked,
                Err((server, error)) => self.lose(server, &error),
            }
        };
        if !worked {
            self.driver.timeout(self.now);
        }
        self.driver.settle(self.now);
        while let Some(event) = self.driver.next_event() {
            self.happens(event);
        }
        worked
    }

    /// As [`Connections::round`], with a look at the mail behind what was received: what the target
    /// has said may be of its next life (T27).
    #[inline]
    fn round(&mut self, sink: &mut dyn FnMut(usize, &[u8])) -> Result<bool, (usize, CallError)> {
        let received = self.connections.receive_all(&mut self.driver, self.now, sink)?;
        if self.connections.handle.poller.is_woken() {
            self.read_mail();
        }
        // Behind the mail: who waits for it has entered before that wakes this thread.
        let wanted = self.connections.handle.watched.wanted(self.driver.last());
        self.driver.want_durable(wanted);
        Ok(self.connections.send_all(&mut self.driver, self.now)? || received)
    }

    #[cold]
    fn happens(&mut self, event: StreamEvent) {
        match event {
            StreamEvent::Over { server } => self.connections.close(usize::from(server)),
            StreamEvent::Connect(request) => {
                let target = &self.volume.servers[usize::from(request.server)].target;
                if target.absence().is_some_and(|absence| absence.for_good) {
                    self.driver.give_up(request.server, Cause::Disconnected);
                } else {
                    target.request(request);
                }
            }
            StreamEvent::Back { server, unreachable_ns, replayed } => tracing::info!(
                volume = %self.volume.name, stream = %self.id(),
                target = %self.volume.server_name(usize::from(server)),
                after_ms = unreachable_ns / 1_000_000, replayed,
                "an ordered stream is back on its target"
            ),
        }
    }

    #[cold]
    fn lose(&mut self, server: usize, error: &CallError) {
        tracing::warn!(
            volume = %self.volume.name, stream = %self.id(),
            target = %self.volume.server_name(server), %error,
            "lost the connection of an ordered stream"
        );
        self.driver.closed(server as u16, now_ns());
        self.connections.close(server);
    }

    /// Takes in what the targets' threads have left.
    #[cold]
    fn read_mail(&mut self) {
        // Before looking: mail that is posted from now on wakes again.
        let mut events = Vec::new();
        // It only fails when the process is out of memory; then the mail is read all the same.
        let _ = self.handle().poller.wait(&mut events, Some(Duration::ZERO));
        self.take_mail();
    }

    /// Takes note of another thread's call. It may have come while no driver was there: the stream
    /// was being reopened.
    #[inline]
    pub(crate) fn hear_call(&mut self) {
        let called = &self.handle().called;
        if called.load(Ordering::Relaxed) && called.swap(false, Ordering::AcqRel) {
            self.driver.wake();
        }
    }

    fn take_mail(&mut self) {
        self.hear_call();
        let now = now_ns();
        for mail in self.handle().take_mail() {
            match mail {
                StreamMessage::GiveUp { server, cause } => {
                    self.driver.give_up(server as u16, cause)
                }
                StreamMessage::AssociationEnded { server } => {
                    self.driver.association_ended(server as u16, now);
                }
                StreamMessage::Connected { server, socket, queue } => {
                    if self.driver.connected(server as u16, QueuePair::open(*queue), now)
                        && let Err(error) = self.connections.open(server, socket)
                    {
                        self.lose(server, &poll_error(error));
                    }
                }
            }
        }
    }

    /// Sleeps until something comes, until `deadline`, or until the driver wants to be called.
    pub(crate) fn sleep(&mut self, deadline: Option<u64>) {
        let until = self.driver.sleeps_until(now_ns());
        if self.handle().sleep(deadline.map_or(until, |deadline| deadline.min(until))) {
            // The wait has taken note of the waker; the mail is there.
            self.take_mail();
        }
    }

    /// Takes those that are to be woken.
    #[inline]
    pub(crate) fn take_due(&mut self) -> Vec<Waker> {
        std::mem::take(&mut self.due)
    }

    /// For a call of the owner: looks again at once, or sleeps until something comes.
    pub(crate) fn rest(&mut self, waiter: &mut Waiter, worked: bool, deadline: Option<u64>) {
        if !self.due.is_empty() {
            // No other thread waits for the stream meanwhile: only its owner does that.
            wake_all(self.take_due());
        }
        if worked {
            waiter.worked();
            return;
        }
        if waiter.idle(self.now) == Next::Poll {
            waiter.relax();
            return;
        }
        self.sleep(deadline);
    }

    /// When [`work`](Self::work) should be called though nothing has come.
    pub(crate) fn deadline(&self) -> Option<u64> {
        self.driver.deadline(now_ns())
    }

    /// The driver's marks, and what follows from them.
    pub(crate) fn marks(&mut self) -> Result<Marks, StreamFailure> {
        if let Some(failure) = &self.failure {
            return Err((**failure).clone());
        }
        let result = self.driver.marks();
        if let Some(spent) = self.driver.traced(now_ns) {
            self.volume.stages.record(&spent);
        }
        let marks = self.driver.delivered();
        self.connections.handle.watched.publish_released(self.driver.released());
        if marks != self.published {
            self.published = marks;
            let mut due = self.connections.handle.watched.publish(marks);
            self.due.append(&mut due);
        }
        if let Err(failure) = result {
            return Err(self.poisoned(failure));
        }
        if let Some(ledger) = &self.volume.ledger {
            let released = self.driver.released();
            if released > self.released {
                self.released = released;
                lock(ledger).released(self.driver.id(), released);
            }
        }
        Ok(marks)
    }

    /// The background thread's turn: some rounds of work. Returns when the next one is due though
    /// nothing may have come.
    pub(crate) fn tend(&mut self, flush_ns: u64) -> Option<u64> {
        let before = (self.published, self.driver.released(), self.failure.is_some());
        let mut worked = true;
        for _ in 0..ROUNDS_MAX {
            worked = worked && self.work(&mut |_, _| ());
        }
        let looked = self.marks();
        if before != (self.published, self.driver.released(), self.failure.is_some()) {
            self.handle().tell_news();
        }
        looked.ok()?;
        self.driver.take_care(worked, flush_ns, now_ns())
    }

    /// The stream has failed: the same error from now on, however often it is asked for (P6).
    #[cold]
    pub(crate) fn poisoned(&mut self, failure: Failure) -> StreamFailure {
        if let Some(failure) = &self.failure {
            return (**failure).clone();
        }
        let failure = self.describe(failure);
        let mut due = self.handle().watched.end(Over::Failed(failure.clone()));
        self.due.append(&mut due);
        self.failure = Some(Box::new(failure.clone()));
        failure
    }

    fn describe(&self, failure: Failure) -> StreamFailure {
        let server = self.driver.topology().member(failure.member).server;
        let absence = self.volume.servers[usize::from(server)].target.absence();
        let absence = absence.map(|absence| Absence {
            why: absence.why,
            since: Duration::from_nanos(now_ns().saturating_sub(absence.since)),
            for_good: absence.for_good,
        });
        StreamFailure {
            volume: self.volume.name.clone(),
            stream: self.id(),
            seq: failure.seq,
            target: Box::new(self.volume.member_addr(failure.member)),
            cause: FailureCause::of(failure.cause, failure.flush, absence),
        }
    }

    /// A failure of the stream as a whole at a server.
    pub(crate) fn failure_of(&self, server: u16, cause: FailureCause) -> StreamFailure {
        let members = self.driver.topology().members().iter();
        let member = members.zip(0..).find(|(member, _)| member.server == server);
        let member = Member(member.map_or(0, |(_, index)| index));
        StreamFailure {
            volume: self.volume.name.clone(),
            stream: self.id(),
            seq: self.driver.delivered().complete.next(),
            target: Box::new(self.volume.member_addr(member)),
            cause,
        }
    }
}

impl std::fmt::Debug for StreamShell {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("StreamShell")
            .field("stream", &self.id())
            .field("marks", &self.driver.delivered())
            .finish_non_exhaustive()
    }
}

pub(crate) fn poll_error(error: PollerError) -> CallError {
    tracing::error!(%error, "cannot watch a connection");
    Exhausted::Descriptors.into()
}

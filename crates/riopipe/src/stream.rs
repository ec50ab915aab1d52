//! A stream on real sockets: the caller's thread builds, sends and reaps.

use std::collections::VecDeque;
use std::os::fd::{AsFd, BorrowedFd};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::Duration;

use riopipe_net::{
    Interest, Next, Poller, PollerError, Received, RecvBuf, Socket, SpinPolicy, Waiter, now_ns,
};
use riopipe_order::attribute::{Seq, StreamId};
use riopipe_order::engine::{Cause, Failure, Marks, Op, Place, Refusal, Write};
use riopipe_session::initiator::stream::StreamSession;

use crate::BLOCK_BYTES;
use crate::error::{
    CallError, ReadError, StreamError, StreamFailure, SubmitError, WaitError, Why, cause_text,
};
use crate::group::{Group, refused};
use crate::piece::{Buf, Piece, Pool};
use crate::volume::Inner;

/// How a stream is to work.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct StreamOptions {
    /// Requests in flight per target, 1 to 1024.
    pub queue_depth: usize,
    /// Payload bytes that may be held because they are not durable, or not complete (T14). A
    /// single group may not be larger.
    pub kept_bytes_max: u64,
    /// Whether neighbouring requests are merged (T16).
    pub merge: bool,
    /// How long a target may owe an answer before the stream gives it up.
    pub timeout: Duration,
}

impl Default for StreamOptions {
    fn default() -> Self {
        Self {
            queue_depth: 128,
            kept_bytes_max: 64 << 20,
            merge: true,
            timeout: Duration::from_secs(30),
        }
    }
}

/// What to wait for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Until {
    /// The group and all before it are complete on all targets.
    Complete(Seq),
    /// The group and all before it are durable. If no group submitted since asked for that, the
    /// drives are flushed.
    Durable(Seq),
    /// There is room for groups again.
    Room,
    /// Nothing is under way.
    Idle,
}

/// The marks of a stream, for other threads: they read what the owner's last poll found.
#[derive(Clone, Debug)]
pub struct Watch(Arc<Watched>);

#[derive(Debug, Default)]
struct Watched {
    complete: AtomicU64,
    durable: AtomicU64,
    failed: AtomicBool,
}

impl Watch {
    /// The marks.
    #[must_use]
    pub fn marks(&self) -> Marks {
        // The durable mark first: it is never ahead of the complete one that is read after it.
        let durable = Seq(self.0.durable.load(Ordering::Acquire));
        Marks { complete: Seq(self.0.complete.load(Ordering::Acquire)), durable }
    }

    /// Whether the stream has failed.
    #[must_use]
    pub fn has_failed(&self) -> bool {
        self.0.failed.load(Ordering::Acquire)
    }
}

/// What an event loop needs to know to call [`Stream::poll`] at the right times.
#[derive(Debug)]
pub struct Readiness<'a> {
    /// Readable when something has arrived or can be sent.
    pub fd: BorrowedFd<'a>,
    /// Poll at the latest after this long: a stalled target is noticed then.
    pub timeout: Option<Duration>,
}

#[derive(Debug)]
pub(crate) struct Connection {
    pub(crate) socket: Socket,
    pub(crate) rx: RecvBuf,
    /// Whether the poller watches for room to send.
    wants_write: bool,
}

impl Connection {
    pub(crate) fn new(socket: Socket) -> Self {
        Self { socket, rx: RecvBuf::new(RX_MAX), wants_write: false }
    }
}

/// Bytes that one PDU may have at most: the largest read and its header.
const RX_MAX: usize = (4 << 20) + 4096;
/// Groups submitted before they are sent without being asked to: one full TCP segment of blocks.
const UNSENT_MAX: usize = 16;

/// One sequence of ordered writes. It belongs to one thread at a time; move it as you like.
///
/// Dropping a stream without [`close`](Self::close) is a crash of the stream: nothing is lost that
/// was durable, but the volume must be recovered.
pub struct Stream {
    session: StreamSession<Piece>,
    connections: Vec<Connection>,
    poller: Poller,
    waiter: Waiter,
    pool: Pool,
    /// Buffers of groups that the engine has not forgotten.
    kept: VecDeque<(Seq, Vec<Buf>)>,
    spare_writes: Vec<Write<Piece>>,
    spare_bufs: Vec<Vec<Buf>>,
    unsent: usize,
    released_seen: Seq,
    watch: Arc<Watched>,
    failure: Option<Box<StreamFailure>>,
    volume: Arc<Inner>,
    /// Whether it is bound everywhere: before, whoever starts it keeps the reservation.
    started: bool,
    closed: bool,
}

impl Stream {
    pub(crate) fn start(
        volume: Arc<Inner>,
        session: StreamSession<Piece>,
        sockets: Vec<Socket>,
        options: &StreamOptions,
    ) -> Result<Self, StreamError> {
        let id = session.config().stream;
        let fault = |server: usize, source: CallError| StreamError::Target {
            stream: id,
            target: volume.server_name(server),
            source,
        };
        let poller = Poller::new().map_err(|e| fault(0, poll_error(e)))?;
        let mut connections = Vec::with_capacity(sockets.len());
        for (server, socket) in sockets.into_iter().enumerate() {
            poller
                .add(&socket, server as u64, Interest::Read)
                .map_err(|e| fault(server, poll_error(e)))?;
            connections.push(Connection::new(socket));
        }
        let spin_ns = nanos(volume.connect.spin);
        let start = session.config().start;
        let watch =
            Watched { complete: start.0.into(), durable: start.0.into(), ..Watched::default() };
        let mut stream = Self {
            session,
            connections,
            poller,
            waiter: Waiter::new(SpinPolicy { spin_ns, steady: false }),
            pool: Pool::new(options.kept_bytes_max),
            kept: VecDeque::new(),
            spare_writes: Vec::new(),
            spare_bufs: Vec::new(),
            unsent: 0,
            released_seen: start,
            watch: Arc::new(watch),
            failure: None,
            volume: Arc::clone(&volume),
            started: false,
            closed: false,
        };
        stream.session.start(now_ns());
        let deadline = now_ns().saturating_add(nanos(volume.connect.timeout));
        loop {
            let worked = stream.turn(&mut |_, _| ()).map_err(|(server, e)| fault(server, e))?;
            match stream.session.is_ready() {
                Ok(true) => {
                    stream.started = true;
                    return Ok(stream);
                }
                Ok(false) => {}
                Err(refused) => {
                    return Err(fault(
                        usize::from(refused.server),
                        CallError::Status(refused.status),
                    ));
                }
            }
            if now_ns() >= deadline {
                return Err(fault(0, CallError::TimedOut(volume.connect.timeout)));
            }
            stream.rest(worked, Some(deadline));
        }
    }

    /// Which stream of the volume.
    #[must_use]
    pub fn id(&self) -> StreamId {
        self.session.config().stream
    }

    /// The last group submitted.
    #[must_use]
    pub fn last(&self) -> Seq {
        self.session.engine().last()
    }

    /// A buffer of `len` bytes, a multiple of 4096. What is in it is not defined: it may have been
    /// used before.
    ///
    /// # Panics
    /// When `len` is 0 or no multiple of 4096.
    pub fn buf(&mut self, len: usize) -> Buf {
        assert!(
            len > 0 && len.is_multiple_of(BLOCK_BYTES),
            "a buffer has whole blocks, not {len} bytes"
        );
        self.pool.take(len)
    }

    /// Gives back a buffer that is not needed after all.
    pub fn recycle(&mut self, buf: Buf) {
        self.pool.give(buf);
    }

    /// Stages a group.
    pub fn group(&mut self) -> Group<'_> {
        Group::new(self)
    }

    /// Sends what is to be sent, takes in what has arrived, and returns the marks. Never blocks.
    ///
    /// # Errors
    /// The stream has failed (P6).
    pub fn poll(&mut self) -> Result<Marks, StreamFailure> {
        self.work(&mut |_, _| ());
        self.marks()
    }

    /// Waits until something is so, at most for `timeout`. Looks for a while, then sleeps.
    ///
    /// # Errors
    /// The time is up, the group was never submitted, or the stream has failed (P6).
    pub fn wait(&mut self, until: Until, timeout: Option<Duration>) -> Result<Marks, WaitError> {
        let last = self.last();
        match until {
            Until::Complete(seq) | Until::Durable(seq) if seq > last => {
                return Err(WaitError::NotSubmitted { seq, last });
            }
            Until::Durable(seq) => self.session.ask_durable(seq),
            _ => {}
        }
        let released = self.released_seen;
        let deadline = timeout.map(|t| now_ns().saturating_add(nanos(t)));
        loop {
            let worked = self.work(&mut |_, _| ());
            let marks = self.marks()?;
            let there = match until {
                Until::Complete(seq) => marks.complete >= seq,
                Until::Durable(seq) => marks.durable >= seq,
                Until::Room => self.released_seen > released || self.session.engine().is_idle(),
                Until::Idle => self.session.engine().is_idle(),
            };
            if there {
                return Ok(marks);
            }
            if let (Some(timeout), Some(deadline)) = (timeout, deadline)
                && now_ns() >= deadline
            {
                return Err(WaitError::Deadline(timeout));
            }
            self.rest(worked, deadline);
        }
    }

    /// Reads whole blocks at volume block `lba`. The stream sees what it submitted itself, also
    /// what is not complete (P9).
    ///
    /// # Errors
    /// Out of range, the drive failed, or the stream has.
    pub fn read(&mut self, lba: u64, into: &mut [u8]) -> Result<(), ReadError> {
        let volume = self.session.topology().blocks();
        let blocks = into.len() / BLOCK_BYTES;
        let within = into.len().is_multiple_of(BLOCK_BYTES)
            && u32::try_from(blocks).is_ok()
            && lba.checked_add(blocks as u64).is_some_and(|end| end <= volume);
        if !within {
            return Err(ReadError::OutOfRange { lba, bytes: into.len(), volume });
        }
        self.marks()?;
        if blocks == 0 {
            return Ok(());
        }
        while self.session.read_must_wait(lba, blocks as u32) {
            let worked = self.work(&mut |_, _| ());
            self.marks()?;
            self.rest(worked, None);
        }
        self.session.start_read(lba, blocks as u32);
        while self.session.is_reading() {
            let worked = self.work(&mut |offset, bytes| {
                if let Some(part) = into.get_mut(offset..offset + bytes.len()) {
                    part.copy_from_slice(bytes);
                }
            });
            self.marks()?;
            if self.session.is_reading() {
                self.rest(worked, None);
            }
        }
        self.session.read_result().map_err(|(offset, status)| ReadError::Status {
            lba: lba + (offset / BLOCK_BYTES) as u64,
            status,
        })
    }

    /// The marks for other threads.
    #[must_use]
    pub fn watch(&self) -> Watch {
        Watch(Arc::clone(&self.watch))
    }

    /// For epoll and async runtimes: when to call [`poll`](Self::poll).
    #[must_use]
    pub fn readiness(&self) -> Readiness<'_> {
        let busy = !self.session.engine().is_idle();
        let timeout = busy.then(|| Duration::from_nanos(self.session.config().timeout_ns));
        Readiness { fd: self.poller.as_fd(), timeout }
    }

    /// Waits until everything submitted is durable, tells the targets that their logs may forget
    /// it, and closes the connections. Returns the last group.
    ///
    /// # Errors
    /// The stream has failed; the volume must then be recovered.
    pub fn close(mut self) -> Result<Seq, StreamFailure> {
        let last = self.last();
        let failed = |e: WaitError, stream: &Self| match e {
            WaitError::Failed(failure) => failure,
            other => stream.failure_of(other.to_string()),
        };
        // A flush that the engine put in itself counts too: the last group may move.
        self.wait(Until::Durable(last), None).map_err(|e| failed(e, &self))?;
        let last = self.wait(Until::Idle, None).map_err(|e| failed(e, &self))?.durable;
        self.session.send_marks();
        loop {
            let worked = self.work(&mut |_, _| ());
            self.marks()?;
            match self.session.marks_confirmed() {
                Ok(true) => break,
                Ok(false) => self.rest(worked, None),
                Err(refused) => {
                    let said = CallError::Status(refused.status);
                    return Err(self.failure_of(format!("forgetting the log failed: {said}")));
                }
            }
        }
        self.closed = true;
        self.volume.stream_closed(self.id(), self.session.engine().released());
        Ok(last)
    }

    pub(crate) fn spare_lists(&mut self) -> (Vec<Write<Piece>>, Vec<Buf>) {
        (std::mem::take(&mut self.spare_writes), self.spare_bufs.pop().unwrap_or_default())
    }

    /// What can be told about a group before it is submitted.
    pub(crate) fn check(&self, writes: &[Write<Piece>]) -> Result<(), Why> {
        let volume = self.session.topology().blocks();
        for write in writes {
            let (lba, blocks) = (write.lba, write.blocks);
            let within = lba.checked_add(u64::from(blocks)).is_some_and(|end| end <= volume);
            if blocks == 0 || !within {
                return Err(Why::OutOfRange { lba, blocks, volume });
            }
        }
        if let Some(ledger) = &self.volume.ledger {
            ledger.check(self.id(), writes.iter().map(|w| (w.lba, w.blocks, is_fresh(&w.op))))?;
        }
        Ok(())
    }

    pub(crate) fn admit(
        &mut self,
        mut writes: Vec<Write<Piece>>,
        bufs: Vec<Buf>,
        tag: u64,
        durable: bool,
    ) -> Result<Seq, SubmitError> {
        match self.session.admit(&writes, tag, durable) {
            Ok(seq) => {
                if let Some(ledger) = &self.volume.ledger {
                    ledger.note(self.id(), writes.iter().map(|w| (w.lba, w.blocks)), seq);
                }
                writes.clear();
                self.spare_writes = writes;
                self.kept.push_back((seq, bufs));
                self.unsent += 1;
                if self.unsent >= UNSENT_MAX {
                    self.send();
                }
                Ok(seq)
            }
            Err(refusal) => {
                let why = match refusal {
                    Refusal::Full(bound) => Why::Full(bound),
                    Refusal::TooLarge(bound) => Why::TooLarge(bound),
                    Refusal::TooManyEntries => Why::TooManyEntries,
                    Refusal::Empty => Why::Empty,
                    Refusal::Poisoned(failure) => Why::Poisoned(self.describe(failure)),
                };
                Err(refused(why, writes, bufs))
            }
        }
    }

    /// Sends what may be sent, without looking for answers.
    fn send(&mut self) {
        self.unsent = 0;
        self.session.pump(now_ns());
        for server in 0..self.connections.len() {
            if let Err(error) = self.flush(server) {
                self.lose(server, &error);
            }
        }
    }

    /// One round of all there is to do; whether anything was done. A connection that breaks
    /// poisons the stream.
    fn work(&mut self, sink: &mut dyn FnMut(usize, &[u8])) -> bool {
        loop {
            match self.turn(sink) {
                Ok(worked) => {
                    if !worked && let Some(server) = self.session.stalled(now_ns()) {
                        self.session.lost(server, Cause::TimedOut, now_ns());
                        self.connections[usize::from(server)].socket.shutdown();
                        return true;
                    }
                    return worked;
                }
                Err((server, error)) => self.lose(server, &error),
            }
        }
    }

    fn lose(&mut self, server: usize, error: &CallError) {
        tracing::warn!(
            stream = %self.id(), target = %self.volume.server_name(server), %error,
            "lost the connection of an ordered stream"
        );
        self.session.lost(server as u16, Cause::Disconnected, now_ns());
        self.connections[server].socket.shutdown();
    }

    /// Receives once from each target, then sends what that makes possible.
    fn turn(&mut self, sink: &mut dyn FnMut(usize, &[u8])) -> Result<bool, (usize, CallError)> {
        let mut worked = false;
        let now = now_ns();
        for server in 0..self.connections.len() {
            if self.session.is_lost(server as u16) {
                continue;
            }
            worked |= self.receive(server, now, sink).map_err(|e| (server, e))?;
        }
        self.unsent = 0;
        self.session.pump(now);
        for server in 0..self.connections.len() {
            worked |= self.flush(server).map_err(|e| (server, e))?;
        }
        Ok(worked)
    }

    fn receive(
        &mut self,
        server: usize,
        now: u64,
        sink: &mut dyn FnMut(usize, &[u8]),
    ) -> Result<bool, CallError> {
        let connection = &mut self.connections[server];
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
        let out = self.session.outbox(server as u16);
        let connection = &mut self.connections[server];
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
            self.poller.modify(&connection.socket, server as u64, interest).map_err(poll_error)?;
        }
        Ok(sent_any)
    }

    /// Looks again at once, or sleeps until something comes.
    fn rest(&mut self, worked: bool, deadline: Option<u64>) {
        if worked {
            self.waiter.worked();
            return;
        }
        let now = now_ns();
        if self.waiter.idle(now) == Next::Look {
            self.waiter.relax();
            return;
        }
        // Wake now and then to notice a target that stalls.
        let stall = Duration::from_nanos(self.session.config().timeout_ns / 4 + 1_000_000);
        let left =
            deadline.map_or(stall, |d| Duration::from_nanos(d.saturating_sub(now)).min(stall));
        let mut events = Vec::new();
        if let Err(error) = self.poller.wait(&mut events, Some(left)) {
            tracing::error!(%error, "cannot sleep until something arrives; looking instead");
        }
    }

    /// The engine's marks, and what follows from them.
    fn marks(&mut self) -> Result<Marks, StreamFailure> {
        if let Some(failure) = &self.failure {
            return Err((**failure).clone());
        }
        let result = self.session.poll();
        let marks = self.session.marks();
        // Complete first: a watcher reads durable first, and must not see it ahead.
        self.watch.complete.store(marks.complete.0, Ordering::Release);
        self.watch.durable.store(marks.durable.0, Ordering::Release);
        if let Err(failure) = result {
            let failure = self.describe(failure);
            self.watch.failed.store(true, Ordering::Release);
            self.failure = Some(Box::new(failure.clone()));
            return Err(failure);
        }
        let forgotten = self.session.engine().kept_after();
        while self.kept.front().is_some_and(|(seq, _)| *seq <= forgotten) {
            if let Some((_, mut bufs)) = self.kept.pop_front() {
                for buf in bufs.drain(..) {
                    self.pool.give(buf);
                }
                self.spare_bufs.push(bufs);
            }
        }
        if forgotten > self.released_seen {
            self.released_seen = forgotten;
            if let Some(ledger) = &self.volume.ledger {
                ledger.released(self.id(), self.session.engine().released());
            }
        }
        Ok(marks)
    }

    fn describe(&self, failure: Failure) -> StreamFailure {
        StreamFailure {
            volume: self.volume.name.clone(),
            stream: self.id(),
            seq: failure.seq,
            target: self.volume.member_name(failure.member),
            cause: cause_text(failure.cause, failure.flush),
        }
    }

    fn failure_of(&self, cause: String) -> StreamFailure {
        StreamFailure {
            volume: self.volume.name.clone(),
            stream: self.id(),
            seq: self.session.marks().complete.next(),
            target: self.volume.server_name(0),
            cause,
        }
    }
}

impl Drop for Stream {
    fn drop(&mut self) {
        if self.started && !self.closed {
            tracing::warn!(
                volume = %self.volume.name, stream = %self.id(), last = %self.last(),
                "an ordered stream was dropped without being closed: the volume has to be recovered"
            );
            self.volume.stream_dropped(self.id());
        }
    }
}

impl std::fmt::Debug for Stream {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Stream")
            .field("volume", &self.volume.name)
            .field("id", &self.id())
            .field("last", &self.last())
            .field("marks", &self.session.marks())
            .finish_non_exhaustive()
    }
}

/// Nanoseconds; more than 584 years are that.
pub(crate) fn nanos(time: Duration) -> u64 {
    u64::try_from(time.as_nanos()).unwrap_or(u64::MAX)
}

fn is_fresh(op: &Op<Piece>) -> bool {
    matches!(op, Op::Write(Place::Fresh, _) | Op::Discard)
}

fn poll_error(error: PollerError) -> CallError {
    tracing::error!(%error, "cannot watch a connection");
    CallError::Nonsense("this process has no descriptors left to watch a connection with")
}

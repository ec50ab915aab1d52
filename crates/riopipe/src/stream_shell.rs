//! A stream in this process: its driver, its [`Connections`] and its buffers. The thread that has taken
//! it drives it: its owner's thread or the background thread.

use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::task::Waker;
use std::time::Duration;

use riopipe_net::{Next, Waiter, now_ns};
use riopipe_order::attribute::{Member, Seq, StreamId};
use riopipe_order::engine::{Cause, Failure, Marks};
use riopipe_session::initiator::queue_pair::QueuePair;
use riopipe_session::initiator::stream_driver::{ROUNDS_MAX, StreamDriver, StreamEvent};

use crate::call_error::CallError;
use crate::connections::{Connections, poll_error, report_time};
use crate::failure::{Absence, FailureCause, StreamFailure};
use crate::lock::lock;
use crate::piece::{Kept, Piece, Pool};
use crate::shared::Inner;
use crate::stream_handle::{StreamHandle, StreamMessage};
use crate::waiters::wake_all;
use crate::watched::MarksEnd;

/// See the [module](self). It owns the buffers of all requests that the driver has in flight: the
/// pieces of one buffer are never in two shells, and never leave one.
pub(crate) struct StreamShell {
    pub(crate) driver: StreamDriver<Piece>,
    /// The buffers of the driver's pieces; dropped after it.
    pub(crate) kept: Kept,
    connections: Connections,
    volume: Arc<Inner>,
    /// The time at which the last round began, ns. It is kept because reading the clock costs as much
    /// as a poll for answers without its system call.
    pub(crate) now: u64,
    /// The failure of the stream, in the form that callers get.
    failure: Option<Box<StreamFailure>>,
    /// The released mark that the ownership checker received last.
    checker_released: Seq,
    /// The marks that were published last.
    published: Marks,
    /// The waiters whose mark has been reached. The thread that drives the stream wakes them before it
    /// rests, or right after it has released the stream.
    due_wakers: Vec<Waker>,
}

// SAFETY: only the driver's pieces are not `Send` (asserted below), because the counts of their
// buffers take one thread at a time. All pieces of a buffer that the driver has are in it, and they
// stay: it hands out none, and they are dropped in it. So they change threads only together with the
// shell. The counts of one thread happen before those of the next one, as for any value that is sent
// to another thread. The buffers' owners are here (`kept`). A buffer that is freed elsewhere, by a
// caller that got it back, has no piece left (`Buf::is_unique`, acquired after the last piece's
// release).
unsafe impl Send for StreamShell {}

const _: () = {
    const fn is_send<T: Send>() {}
    // The other fields. The driver's engine is `Send` by an assertion of its own.
    is_send::<Kept>();
    is_send::<Connections>();
    is_send::<Arc<Inner>>();
    is_send::<Option<Box<StreamFailure>>>();
};

impl StreamShell {
    /// A stream that has been bound on all targets.
    pub(crate) fn new(
        volume: Arc<Inner>,
        driver: StreamDriver<Piece>,
        connections: Connections,
    ) -> Self {
        let checker_released = driver.config().start;
        let published = driver.delivered();
        let (kept, now, due_wakers) = (Kept::default(), now_ns(), Vec::new());
        Self {
            driver,
            kept,
            connections,
            volume,
            now,
            failure: None,
            checker_released,
            published,
            due_wakers,
        }
    }

    pub(crate) fn id(&self) -> StreamId {
        self.driver.id()
    }

    fn handle(&self) -> &Arc<StreamHandle> {
        &self.connections.handle
    }

    /// Closes all connections. The stream can't be used afterwards.
    pub(crate) fn close_connections(&mut self) {
        self.connections.close_all();
    }

    /// Begins a new incarnation on new connections. The driver's attention is kept, because it counts
    /// the owner's calls. The buffers of the old incarnation go to the pool.
    pub(crate) fn restart(&mut self, mut new: Self, pool: &mut Pool) {
        *new.driver.attention_mut() = std::mem::take(self.driver.attention_mut());
        new.due_wakers.append(&mut self.due_wakers);
        let mut kept = std::mem::take(&mut self.kept);
        *self = new;
        kept.recycle(Seq(u64::MAX), pool);
    }

    /// Returns the buffers that are no longer needed to the pool.
    pub(crate) fn reclaim(&mut self, pool: &mut Pool) {
        self.kept.recycle(self.driver.reclaim(), pool);
    }

    /// Sends all that may be sent, without receiving.
    pub(crate) fn send(&mut self) {
        self.driver.want_durable(self.handle().watched.wanted(self.driver.last()));
        self.driver.pump(now_ns());
        report_time(&mut self.driver);
        for server in 0..self.connections.servers.len() {
            if let Err(error) = self.connections.send(&mut self.driver, server) {
                self.close_after_error(server, &error);
            }
        }
    }

    /// One round: receives, sends, checks times, handles events. Returns whether any byte was received
    /// or sent.
    #[inline]
    pub(crate) fn work(&mut self, sink: &mut dyn FnMut(usize, &[u8])) -> bool {
        let worked = loop {
            self.now = now_ns();
            match self.round(sink) {
                Ok(worked) => break worked,
                Err((server, error)) => self.close_after_error(server, &error),
            }
        };
        if !worked {
            self.driver.timeout(self.now);
        }
        self.driver.check_connections(self.now);
        while let Some(event) = self.driver.next_event() {
            self.handle_event(event);
        }
        worked
    }

    /// As [`Connections::round`], but handles messages after receiving and before sending: the received
    /// bytes may be of the target's next incarnation (T27).
    #[inline]
    fn round(&mut self, sink: &mut dyn FnMut(usize, &[u8])) -> Result<bool, (usize, CallError)> {
        let received = self.connections.receive_all(&mut self.driver, self.now, sink)?;
        if self.connections.handle.poller().is_woken() {
            self.receive_messages();
        }
        // After the messages: a waiter enters the list before it wakes this thread.
        let wanted = self.connections.handle.watched.wanted(self.driver.last());
        self.driver.want_durable(wanted);
        Ok(self.connections.send_all(&mut self.driver, self.now)? || received)
    }

    /// Carries out an event of the driver.
    #[cold]
    fn handle_event(&mut self, event: StreamEvent) {
        match event {
            StreamEvent::ConnectionEnded { server } => self.connections.close(usize::from(server)),
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

    /// Closes the connection to a server after an error. The driver decides what follows.
    #[cold]
    fn close_after_error(&mut self, server: usize, error: &CallError) {
        tracing::warn!(
            volume = %self.volume.name, stream = %self.id(),
            target = %self.volume.server_name(server), %error,
            "lost the connection of an ordered stream"
        );
        self.driver.closed(server as u16, now_ns());
        self.connections.close(server);
    }

    /// Resets the waker, and handles the messages of the targets' threads.
    #[cold]
    fn receive_messages(&mut self) {
        // Before the messages are taken: a message that is posted from now on wakes again.
        let mut events = Vec::new();
        // This only fails when the process is out of memory; the messages are taken anyway.
        let _ = self.handle().poller().wait(&mut events, Some(Duration::ZERO));
        self.handle_messages();
    }

    /// Passes an interrupt of the owner by another thread to the driver. The interrupt may have come
    /// while there was no driver, because the stream was being reopened.
    #[inline]
    pub(crate) fn pass_owner_interrupt(&mut self) {
        let called = &self.handle().called;
        if called.load(Ordering::Relaxed) && called.swap(false, Ordering::AcqRel) {
            self.driver.wake();
        }
    }

    /// Handles the messages of the targets' threads, and another thread's call.
    fn handle_messages(&mut self) {
        self.pass_owner_interrupt();
        let now = now_ns();
        for message in self.handle().take_messages() {
            match message {
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
                        self.close_after_error(server, &poll_error(error));
                    }
                }
            }
        }
    }

    /// Sleeps until bytes arrive, until the stream is woken, until `deadline`, or until the driver must
    /// be called.
    pub(crate) fn sleep(&mut self, deadline: Option<u64>) {
        let until = self.driver.sleeps_until(now_ns());
        if self.handle().sleep(deadline.map_or(until, |deadline| deadline.min(until))) {
            // The sleep has reset the waker.
            self.handle_messages();
        }
    }

    /// Takes the waiters that must be woken.
    #[inline]
    pub(crate) fn take_due_wakers(&mut self) -> Vec<Waker> {
        std::mem::take(&mut self.due_wakers)
    }

    /// Ends a round in a call of the owner. Returns at once if another poll is worth the time, else
    /// sleeps. Before that, wakes the waiters whose mark has been reached.
    pub(crate) fn poll_again_or_sleep(
        &mut self,
        waiter: &mut Waiter,
        worked: bool,
        deadline: Option<u64>,
    ) {
        if !self.due_wakers.is_empty() {
            // No other thread waits for the ownership flag meanwhile: only the owner waits for it.
            wake_all(self.take_due_wakers());
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

    /// The time at which [`work`](Self::work) must be called even if no byte has arrived, ns.
    pub(crate) fn deadline(&self) -> Option<u64> {
        self.driver.deadline(now_ns())
    }

    /// Returns the driver's marks. If they have moved, publishes them, and reports the released mark to
    /// the ownership checker.
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
            self.due_wakers.append(&mut due);
        }
        if let Err(failure) = result {
            return Err(self.record_failure(failure));
        }
        if let Some(ownership) = &self.volume.ownership {
            let released = self.driver.released();
            if released > self.checker_released {
                self.checker_released = released;
                lock(ownership).on_released(self.driver.id(), released);
            }
        }
        Ok(marks)
    }

    /// The background thread's turn: some rounds of work. Returns the time at which the next turn is
    /// due even if no byte has arrived, ns.
    pub(crate) fn background_turn(&mut self, flush_ns: u64) -> Option<u64> {
        let before = (self.published, self.driver.released(), self.failure.is_some());
        let mut worked = true;
        for _ in 0..ROUNDS_MAX {
            worked = worked && self.work(&mut |_, _| ());
        }
        let marks = self.marks();
        if before != (self.published, self.driver.released(), self.failure.is_some()) {
            self.handle().signal_news();
        }
        marks.ok()?;
        self.driver.finish_background_rounds(worked, flush_ns, now_ns())
    }

    /// Records the first failure of the stream, and wakes its waiters. Returns the error for callers,
    /// the same one at each call (P6).
    #[cold]
    pub(crate) fn record_failure(&mut self, failure: Failure) -> StreamFailure {
        if let Some(failure) = &self.failure {
            return (**failure).clone();
        }
        let failure = self.describe(failure);
        let mut due = self.handle().watched.end(MarksEnd::Failed(failure.clone()));
        self.due_wakers.append(&mut due);
        self.failure = Some(Box::new(failure.clone()));
        failure
    }

    /// The error for callers: the failure, with the names of the volume, the stream and the target.
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

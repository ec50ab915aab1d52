//! A stream in this process: its driver, its [`Connections`] and its buffers. The owner's thread
//! and the background thread take it in turns, and drive it while they have it.
//!
//! One round of work ([`StreamShell::work`]):
//!
//! 1. receive bytes from all targets, and pass them to the driver;
//! 2. handle the messages of the targets' threads, such as new connections;
//! 3. send all that the driver has queued;
//! 4. report the time to the driver, and carry out its events.

use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::task::Waker;
use std::time::Duration;

use riopipe_net::{AdaptiveSpin, IdleStep, now_ns};
use riopipe_order::attribute::{Member, Seq, StreamId};
use riopipe_order::engine::{Cause, Failure, Marks};
use riopipe_session::initiator::manager::Absence;
use riopipe_session::initiator::queue_pair::QueuePair;
use riopipe_session::initiator::stream::ReadExtent as DriverExtent;
use riopipe_session::initiator::stream_driver::{ROUNDS_MAX, StreamDriver, StreamEvent};
use riopipe_session::rounded::Rounded;

use crate::call_error::CallError;
use crate::connections::{ConnectionError, Connections, note_core, poll_error, report_time};
use crate::failure::{FailureCause, StreamFailure};
use crate::lock::lock;
use crate::open_volume::OpenVolume;
use crate::piece::{BufPool, KeptBufs, Piece};
use crate::published_marks::MarksEnd;
use crate::stream_handle::{StreamHandle, StreamMessage};
use crate::submitted_reads::{ReadEnd, ReadId, ReadMemory, SubmittedReads};
use crate::time::nanos;
use crate::waiters::wake_all;

/// See the [module](self). It owns the buffers of all requests that the driver has in flight. All
/// pieces of one buffer are in the same shell, and stay in it until they are dropped.
pub(crate) struct StreamShell {
    pub(crate) driver: StreamDriver<Piece>,
    /// The buffers of the driver's pieces. The field is below `driver`, so that the pieces are
    /// dropped first.
    pub(crate) kept_bufs: KeptBufs,
    connections: Connections,
    volume: Arc<OpenVolume>,
    /// The time at which the last round began, ns. Other code of the round uses it, because to read
    /// the clock costs about as much as the rest of a poll without its system call.
    pub(crate) round_begun_ns: u64,
    /// The failure of the stream, in the form that callers get.
    failure: Option<Box<StreamFailure>>,
    /// The released mark that was passed to the ownership checker last.
    released_to_checker: Seq,
    /// The marks that were published last.
    published_marks: Marks,
    /// The waiters whose mark has been reached. The driving thread wakes them before it sleeps, or
    /// right after it has released the stream.
    due_wakers: Vec<Waker>,
    /// The reads that the owner has submitted, with their memory.
    pub(crate) reads: SubmittedReads,
}

// SAFETY: only the driver's pieces are not `Send` (asserted below), because only one thread at a
// time may count the pieces of a buffer. Three facts make the shell `Send`:
// - All pieces of a buffer are in the driver. It hands out no piece, and drops them itself. So the
//   pieces change threads only together with the shell.
// - The counts of one thread happen before those of the next thread, as for any value that is sent
//   to another thread.
// - The buffers are in the shell, too (`kept_bufs`). A caller that gets a buffer back may free it
//   in another thread. That buffer has no piece left: `Buf::is_unique` acquires the release of the
//   last piece.
unsafe impl Send for StreamShell {}

const _: () = {
    const fn is_send<T: Send>() {}
    // The other fields. The driver's engine is `Send` by an assertion of its own.
    is_send::<KeptBufs>();
    is_send::<Connections>();
    is_send::<Arc<OpenVolume>>();
    is_send::<Option<Box<StreamFailure>>>();
    is_send::<SubmittedReads>();
};

impl StreamShell {
    /// A stream that has been bound on all targets.
    pub(crate) fn new(
        volume: Arc<OpenVolume>,
        driver: StreamDriver<Piece>,
        connections: Connections,
    ) -> Self {
        let released_to_checker = driver.config().start;
        let published_marks = driver.delivered();
        Self {
            driver,
            kept_bufs: KeptBufs::default(),
            connections,
            volume,
            round_begun_ns: now_ns(),
            failure: None,
            released_to_checker,
            published_marks,
            due_wakers: Vec::new(),
            reads: SubmittedReads::default(),
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

    /// Submits a read of `blocks` blocks, in which the volume has been found to have them. It leaves
    /// with the next call that sends.
    pub(crate) fn submit_read(
        &mut self,
        lba: u64,
        blocks: u32,
        memory: Box<dyn ReadMemory>,
        timeout: Option<Duration>,
    ) -> ReadId {
        if blocks == 0 {
            let id = self.reads.add_ended(memory);
            self.driver.set_untaken_ends(self.reads.ended_count());
            return id;
        }
        let now = now_ns();
        let deadline = timeout.map(|timeout| now.saturating_add(nanos(timeout)));
        let slot = self.driver.begin_read(&[DriverExtent { lba, blocks }], deadline, now);
        self.driver.count_submitted_read();
        let id = self.reads.add(slot, lba, memory, timeout);
        if self.driver.should_send() {
            self.send();
        }
        id
    }

    /// Ends a submitted read before its data has arrived. Returns false if it has ended before.
    pub(crate) fn cancel_read(&mut self, id: ReadId) -> bool {
        let Some(slot) = self.reads.cancel(id) else { return false };
        self.driver.give_up_read(slot);
        self.driver.set_untaken_ends(self.reads.ended_count());
        true
    }

    /// Takes the end of a submitted read, if there is one.
    pub(crate) fn take_read_end(&mut self) -> Option<ReadEnd> {
        let end = self.reads.take_end();
        self.driver.set_untaken_ends(self.reads.ended_count());
        end
    }

    /// Finds the submitted reads that have ended. This comes after the check whether the stream has
    /// failed, because a failed stream gives the reads up, and their error is its failure.
    fn collect_read_ends(&mut self) {
        let Self { driver, reads, round_begun_ns: now, .. } = self;
        if !driver.may_have_ended_reads(*now) {
            return;
        }
        reads.end_some(|slot| driver.read_step(slot, *now));
        driver.set_untaken_ends(reads.ended_count());
    }

    /// Replaces the stream by its next incarnation, which has new connections. The driver's
    /// attention is kept, because it counts the owner's calls. The buffers of the old incarnation
    /// go to the pool.
    pub(crate) fn replace_incarnation(&mut self, mut next: Self, pool: &mut BufPool) {
        *next.driver.attention_mut() = std::mem::take(self.driver.attention_mut());
        next.due_wakers.append(&mut self.due_wakers);
        // The failure has ended all of them.
        next.reads = std::mem::take(&mut self.reads);
        next.driver.set_untaken_ends(next.reads.ended_count());
        let mut old_bufs = std::mem::take(&mut self.kept_bufs);
        // This drops the old driver, and with it the pieces of the old buffers.
        *self = next;
        old_bufs.recycle(Seq(u64::MAX), pool);
    }

    /// Returns the buffers that are no longer needed to the pool.
    pub(crate) fn reclaim_bufs(&mut self, pool: &mut BufPool) {
        self.kept_bufs.recycle(self.driver.reclaim(), pool);
    }

    /// Sends all that may be sent, without receiving.
    pub(crate) fn send(&mut self) {
        self.request_awaited_durability();
        note_core(&mut self.driver);
        self.driver.pump(now_ns());
        report_time(&mut self.driver);
        for link in 0..self.connections.links.len() {
            if let Err(error) = self.connections.send(&mut self.driver, link) {
                self.close_after_error(link, &error);
            }
        }
    }

    /// One round of work; see the [module](self). Returns whether any byte was received or sent.
    /// `read_sink` gets the data of the read of the owner's call: an offset in the whole read, and the
    /// bytes there. The data of submitted reads goes into their memory.
    #[inline]
    pub(crate) fn work(&mut self, read_sink: &mut dyn FnMut(usize, &[u8])) -> bool {
        let worked = loop {
            self.round_begun_ns = now_ns();
            match self.receive_and_send(read_sink) {
                Ok(worked) => break worked,
                // The other connections continue: the loop begins the round again without this one.
                Err(ConnectionError { link, error }) => self.close_after_error(link, &error),
            }
        };
        if !worked {
            self.driver.timeout(self.round_begun_ns);
        }
        self.driver.check_connections(self.round_begun_ns);
        while let Some(event) = self.driver.next_event() {
            self.handle_event(event);
        }
        worked
    }

    /// Receives, handles messages, and sends. Returns whether any byte was received or sent.
    ///
    /// The messages are handled after receiving, because the received bytes may come from the
    /// target's next incarnation (trap T27).
    #[inline]
    fn receive_and_send(
        &mut self,
        read_sink: &mut dyn FnMut(usize, &[u8]),
    ) -> Result<bool, ConnectionError> {
        let now = self.round_begun_ns;
        let Self { connections, driver, reads, .. } = self;
        let has_received = connections.receive_all(driver, now, &mut |slot, offset, bytes| {
            if !reads.put(slot, offset, bytes) {
                read_sink(offset, bytes);
            }
        })?;
        if self.connections.handle.poller().is_woken() {
            self.receive_messages();
        }
        // This comes after the waker was reset, because a waiter enters the list before it calls
        // the waker. So no waiter is missed.
        self.request_awaited_durability();
        Ok(self.connections.send_all(&mut self.driver, now)? || has_received)
    }

    /// Requests a FLUSH up to the last submitted group for whose durability a thread waits.
    #[inline]
    fn request_awaited_durability(&mut self) {
        let last_submitted = self.driver.last();
        let awaited = self.handle().published_marks.last_awaited_durable(last_submitted);
        self.driver.want_durable(awaited);
    }

    /// Carries out an event of the driver.
    #[cold]
    fn handle_event(&mut self, event: StreamEvent) {
        match event {
            StreamEvent::ConnectionEnded { link } => self.connections.close(usize::from(link)),
            StreamEvent::Connect(request) => {
                let target = &self.volume.servers[usize::from(request.server)].target;
                let is_given_up = |absence: Absence| absence.for_good || absence.given_up;
                if target.absence().is_some_and(is_given_up) {
                    self.driver.give_up(request.server, Cause::Disconnected);
                } else {
                    target.request_connection(request);
                }
            }
            // Of the same level as the line about the loss.
            StreamEvent::Back { server, unreachable_ns, replayed } => tracing::warn!(
                volume = %self.volume.name, stream = %self.id(),
                target = %self.volume.server_name(usize::from(server)),
                after = %Rounded(Duration::from_nanos(unreachable_ns)), replayed,
                "an ordered stream is back on its target"
            ),
        }
    }

    /// Closes the connection of a link after an error. The driver decides what follows.
    #[cold]
    fn close_after_error(&mut self, link: usize, error: &CallError) {
        let server = usize::from(self.driver.server_of(link as u16));
        tracing::warn!(
            volume = %self.volume.name, stream = %self.id(),
            target = %self.volume.server_name(server), %error,
            "lost the connection of an ordered stream"
        );
        self.driver.closed(link as u16, now_ns());
        self.connections.close(link);
    }

    /// Resets the waker, and handles the messages of the targets' threads.
    #[cold]
    fn receive_messages(&mut self) {
        // The waker is reset before the messages are taken, so a message that is posted after that
        // calls it again. The wait fails only when the process is out of memory. The messages are
        // taken anyway.
        let mut events = Vec::new();
        let _ = self.handle().poller().wait(&mut events, Some(Duration::ZERO));
        self.handle_messages();
    }

    /// Passes an interrupt of the owner by another thread to the driver. The handle keeps the
    /// interrupt until then, because there is no driver while the stream is being reopened.
    #[inline]
    pub(crate) fn pass_owner_interrupt(&mut self) {
        let is_interrupted = &self.handle().is_owner_interrupted;
        // The load is cheaper than the swap, and is enough if there is no interrupt.
        if is_interrupted.load(Ordering::Relaxed) && is_interrupted.swap(false, Ordering::AcqRel) {
            self.driver.wake();
        }
    }

    /// Handles the messages of the targets' threads, and an interrupt of the owner.
    fn handle_messages(&mut self) {
        self.pass_owner_interrupt();
        let now = now_ns();
        for message in self.handle().take_messages() {
            match message {
                StreamMessage::GiveUp { server, cause } => {
                    self.driver.give_up(server as u16, cause)
                }
                StreamMessage::AssociationEnded { server, since } => {
                    self.driver.association_ended(server as u16, since);
                }
                StreamMessage::Connected { link, socket, queue } => {
                    // The driver does not use a connection that it no longer requests.
                    let is_used = self.driver.connected(link as u16, QueuePair::open(*queue), now);
                    if is_used && let Err(error) = self.connections.open(link, socket) {
                        self.close_after_error(link, &poll_error(error));
                    }
                }
            }
        }
    }

    /// Sleeps until bytes arrive, until the stream's waker is called, until `deadline` (ns), or
    /// until the driver's own deadline.
    pub(crate) fn sleep(&mut self, deadline: Option<u64>) {
        let driver_deadline = self.driver.sleeps_until(now_ns());
        let sleep_end = deadline.map_or(driver_deadline, |at| at.min(driver_deadline));
        let was_woken = self.handle().sleep(sleep_end);
        if was_woken {
            // The sleep has reset the waker, so the messages must be handled now.
            self.handle_messages();
        }
    }

    /// Takes the waiters that must be woken.
    #[inline]
    pub(crate) fn take_due_wakers(&mut self) -> Vec<Waker> {
        std::mem::take(&mut self.due_wakers)
    }

    /// Ends a round of the owner's call: first wakes the waiters whose mark has been reached, and
    /// then waits until the next round should begin. If the round has done work, or polling still
    /// pays off, the next round begins at once; else the thread sleeps until bytes arrive or until
    /// `deadline` (ns). `worked` is the result of [`work`](Self::work).
    pub(crate) fn poll_again_or_sleep(
        &mut self,
        spin: &mut AdaptiveSpin,
        worked: bool,
        deadline: Option<u64>,
    ) {
        if !self.due_wakers.is_empty() {
            // A waker may run code that takes long. It delays no other thread, because only the
            // owner, which is this thread, ever waits for the stream.
            wake_all(self.take_due_wakers());
        }
        if worked {
            spin.on_work();
            return;
        }
        if spin.on_idle(self.round_begun_ns) == IdleStep::Poll {
            spin.relax();
            return;
        }
        self.sleep(deadline);
    }

    /// The time at which [`work`](Self::work) must be called even if no byte has arrived, ns.
    pub(crate) fn deadline(&self) -> Option<u64> {
        self.driver.deadline(now_ns())
    }

    /// Returns the driver's marks. Publishes those that have moved, and passes the released mark to
    /// the ownership checker. Finds the submitted reads that have ended.
    pub(crate) fn publish_marks(&mut self) -> Result<Marks, StreamFailure> {
        if let Some(failure) = &self.failure {
            return Err((**failure).clone());
        }
        let result = self.driver.marks();
        if let Some(stage_times) = self.driver.traced(now_ns) {
            self.volume.stages.record(&stage_times);
        }
        let marks = self.driver.delivered();
        self.connections.handle.published_marks.publish_released(self.driver.released());
        if marks != self.published_marks {
            self.published_marks = marks;
            let mut reached = self.connections.handle.published_marks.publish(marks);
            self.due_wakers.append(&mut reached);
        }
        if let Err(failure) = result {
            return Err(self.record_failure(failure));
        }
        if let Some(checker) = &self.volume.ownership_checker {
            let released = self.driver.released();
            if released > self.released_to_checker {
                self.released_to_checker = released;
                lock(checker).on_released(self.driver.id(), released);
            }
        }
        if !self.reads.is_empty() {
            self.collect_read_ends();
        }
        Ok(marks)
    }

    /// Drives the stream for some rounds, in the background thread. Stops early after a round
    /// without work. A stream that has been idle for `flush_ns` is flushed. Returns the time at
    /// which the background thread must drive the stream again even if no byte arrives, ns; `None`:
    /// never.
    pub(crate) fn drive_in_background(&mut self, flush_ns: u64) -> Option<u64> {
        let before = self.visible_progress();
        let mut worked = true;
        for _ in 0..ROUNDS_MAX {
            worked = worked && self.work(&mut |_, _| ());
        }
        let result = self.publish_marks();
        if self.visible_progress() != before {
            self.handle().wake_event_loop();
        }
        result.ok()?;
        self.driver.finish_background_rounds(worked, flush_ns, now_ns())
    }

    /// The state that the owner's event loop must learn of when it changes.
    fn visible_progress(&self) -> VisibleProgress {
        VisibleProgress {
            marks: self.published_marks,
            released: self.driver.released(),
            has_failed: self.failure.is_some(),
            ended_reads: self.reads.ended_count(),
        }
    }

    /// Records the first failure of the stream, and ends the waits for its marks. Returns the error
    /// for callers. All calls return the first failure, because a failed stream must not seem to
    /// recover by itself (promise P6).
    #[cold]
    pub(crate) fn record_failure(&mut self, failure: Failure) -> StreamFailure {
        if let Some(failure) = &self.failure {
            return (**failure).clone();
        }
        let failure = self.describe(failure);
        let end = MarksEnd::Failed(failure.clone());
        let mut waiters = self.handle().published_marks.record_end(end);
        self.due_wakers.append(&mut waiters);
        self.failure = Some(Box::new(failure.clone()));
        self.reads.fail(&failure, |slot| self.driver.give_up_read(slot));
        self.driver.set_untaken_ends(self.reads.ended_count());
        // The driver may have dropped connections. No later round of the stream may come.
        self.driver.check_connections(now_ns());
        while let Some(event) = self.driver.next_event() {
            self.handle_event(event);
        }
        failure
    }

    /// The error for callers: the failure, with the names of the volume, the stream and the target.
    fn describe(&self, failure: Failure) -> StreamFailure {
        let server = self.driver.topology().member(failure.member).server;
        let absence = self.volume.servers[usize::from(server)].target.absence();
        let absence = absence.map(|absence| {
            // The stream may have noticed the loss a moment before the target's thread.
            let lost_since = self.driver.lost_since(server).unwrap_or(absence.since);
            let since = lost_since.min(absence.since);
            crate::failure::Absence {
                why: absence.why,
                since: Duration::from_nanos(now_ns().saturating_sub(since)),
                for_good: absence.for_good,
            }
        });
        StreamFailure {
            volume: self.volume.name.clone(),
            stream: self.id(),
            seq: failure.seq,
            target: Box::new(self.volume.member_addr(failure.member)),
            cause: FailureCause::of(failure.cause, failure.flush, absence),
        }
    }

    /// Describes a failure of the whole stream at a server: it names the first member on that
    /// server.
    pub(crate) fn failure_at_server(&self, server: u16, cause: FailureCause) -> StreamFailure {
        let members = self.driver.topology().members().iter();
        let first_member = members.zip(0..).find(|(member, _)| member.server == server);
        let member = Member(first_member.map_or(0, |(_, index)| index));
        StreamFailure {
            volume: self.volume.name.clone(),
            stream: self.id(),
            seq: self.driver.delivered().complete.next(),
            target: Box::new(self.volume.member_addr(member)),
            cause,
        }
    }
}

/// See [`StreamShell::visible_progress`].
#[derive(PartialEq, Eq)]
struct VisibleProgress {
    marks: Marks,
    released: Seq,
    has_failed: bool,
    ended_reads: usize,
}

impl std::fmt::Debug for StreamShell {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("StreamShell")
            .field("stream", &self.id())
            .field("marks", &self.driver.delivered())
            .finish_non_exhaustive()
    }
}

//! A stream, as its owner holds it: the owner's thread builds requests, sends them, and receives the
//! answers.

use std::sync::Arc;
use std::time::{Duration, Instant};

use riopipe_net::{Owned, SpinPolicy, Waiter, now_ns};
use riopipe_order::attribute::{Seq, StreamId};
use riopipe_order::engine::{self, Marks, Refusal};
use riopipe_session::initiator::stream_driver::{BackgroundConfig, Until, WaitEnd};

use crate::BLOCK_BYTES;
use crate::background::OpenStream;
use crate::error::{
    Bound, BufError, ReadError, ReopenError, StreamError, SubmitError, SubmitErrorKind, WaitError,
};
use crate::failure::{Exhausted, FailureCause, StreamFailure};
use crate::group::{Group, Staged};
use crate::lock::lock;
use crate::owner_call::OwnerCall;
use crate::piece::{Buf, Exclusive, Pool};
use crate::reading::{ReadExtent, Reads};
use crate::recovery::StreamRecovery;
use crate::shared::Inner;
use crate::start::start;
use crate::stream_shell::{StreamHandle, StreamShell};
use crate::time::{deadline_after, nanos};
use crate::waiters::wake_all;
use crate::waking::{StreamFd, StreamWaker};
use crate::watch::Watch;
use crate::watched::Over;

/// The options of a stream.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct StreamOptions {
    /// Requests in flight per target, 1 to 1024.
    pub queue_depth: usize,
    /// The bound of the replay memory, bytes: the payload that the stream keeps because it is not
    /// complete or not durable (T14). A single group may not be larger.
    pub kept_bytes_max: u64,
    /// Whether requests for adjacent blocks are merged (T16), up to the largest in-capsule data of a
    /// command (32 KiB on a Rio target). A larger group takes several log entries.
    pub merge: bool,
    /// How long a target may owe an answer. After that the stream gives up the connection.
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

/// One sequence of ordered writes. It belongs to one thread at a time, and may be moved to another
/// thread at any time.
///
/// # When bytes leave
///
/// - The call that submits a durable group sends it, and all groups before it.
/// - The call that submits the 64th group in a row sends all of them.
/// - Other groups leave with the owner's next [`send`](Self::send), [`poll`](Self::poll),
///   [`wait`](Self::wait), read or [`close`](Self::close).
/// - If a socket or a queue is full, the rest leaves as soon as there is space: in one of these calls,
///   or by the background thread.
///
/// # While the owner is not calling
///
/// The volume's background thread drives the stream: submitted groups are sent and complete, and the
/// requests that a target has lost are replayed when the target is back. It begins at once when a
/// [watch](Self::watch) waits for the marks or reads them, and otherwise after 50 ms without a call.
/// So no watch waits for a timer.
///
/// # When a target is lost
///
/// A lost target costs time, not data (P7): the stream waits for it for
/// [`ConnectOptions::loss_timeout`](crate::ConnectOptions::loss_timeout), then fails (P6). A failed
/// stream can be [reopened](Self::reopen).
///
/// Dropping a stream without [`close`](Self::close) is a crash of the stream: durable groups stay,
/// and opening the stream again recovers it.
pub struct Stream {
    id: StreamId,
    shell: Arc<Owned<StreamShell>>,
    handle: Arc<StreamHandle>,
    waiter: Waiter,
    pool: Pool,
    pub(crate) staged: Exclusive<Staged>,
    volume: Arc<Inner>,
    options: StreamOptions,
    /// The findings of the stream's own recovery, if it had one.
    recovery: Option<StreamRecovery>,
    closed: bool,
}

impl Stream {
    /// A stream that has been bound on all targets; the volume has reserved it.
    ///
    /// # Errors
    /// The volume has no background thread yet, and none can be started. The stream is dropped.
    pub(crate) fn new(
        volume: Arc<Inner>,
        shell: StreamShell,
        handle: Arc<StreamHandle>,
        options: &StreamOptions,
        recovery: Option<StreamRecovery>,
    ) -> Result<Self, Exhausted> {
        let id = shell.id();
        let shell = Arc::new(Owned::new(shell));
        let open = OpenStream { shell: Arc::clone(&shell), handle: Arc::clone(&handle) };
        let spin_ns = nanos(volume.connect.spin);
        let stream = Self {
            id,
            shell,
            handle,
            waiter: Waiter::new(SpinPolicy { spin_ns, steady: false }),
            pool: Pool::new(options.kept_bytes_max),
            staged: Exclusive::default(),
            volume,
            options: options.clone(),
            recovery,
            closed: false,
        };
        stream.volume.background.add(id, open)?;
        Ok(stream)
    }

    /// Takes the stream for one call of its owner.
    #[inline]
    fn take(&self) -> OwnerCall<'_> {
        OwnerCall::begin(&self.shell, &self.handle, &self.volume.background)
    }

    /// The number of the stream in its volume, from 0.
    #[must_use]
    pub fn id(&self) -> StreamId {
        self.id
    }

    /// The seq of the last group submitted.
    #[must_use]
    pub fn last(&self) -> Seq {
        self.take().driver.last()
    }

    /// The seq of the last group that is *released*: this group and all earlier ones are complete on
    /// all targets, durable and delivered, so no recovery undoes them and no replay sends them again.
    /// Two rules depend on it:
    ///
    /// - A block whose old content was needed up to group `n` may be written as
    ///   [`Place::Fresh`](crate::Place::Fresh) again once `n` is released (T11).
    /// - Another stream may write a block once the group that wrote it is released (T15).
    ///
    /// Other threads read this mark by [`Watch::released`].
    ///
    /// A circular log is an example. A block of the ring is written again, as fresh, when its record
    /// is no longer part of the log. A group of the log itself records where the log begins. Until
    /// that group is released, the volume may recover to the state before it, which still needs the
    /// block.
    ///
    /// ```no_run
    /// # fn log(mut stream: riopipe::Stream) -> Result<(), Box<dyn std::error::Error>> {
    /// use riopipe::{Place, Seq, Until};
    ///
    /// const RING: u64 = 1000; // blocks 1 to 1000; block 0, the anchor, records where the log begins
    /// let (mut head, mut tail) = (0, 0); // records 0..: written up to `head`, needed from `tail` on
    /// let mut trim = Seq(0); // the group that wrote the anchor last
    /// let mut free_up_to = RING; // records below have space: no state needs their blocks
    /// loop {
    ///     if stream.released() >= trim {
    ///         free_up_to = tail + RING; // no crash brings an older `tail` back
    ///     }
    ///     if head < free_up_to {
    ///         let record = stream.buf(4096)?;
    ///         let lba = 1 + head % RING;
    ///         stream.group().write(lba, record, Place::Fresh).tag(head).submit()?;
    ///         head += 1;
    ///         continue;
    ///     }
    ///     // Full: drop the older half, durably, and wait until that is released.
    ///     tail = head - RING / 2;
    ///     let mut anchor = stream.buf(4096)?;
    ///     anchor[..8].copy_from_slice(&tail.to_le_bytes());
    ///     // In place: the old anchor is needed until this one is durable.
    ///     trim = stream.group().write(0, anchor, Place::InPlace).submit_durable()?;
    ///     stream.wait(Until::Durable(trim), None)?; // durable and delivered: released
    /// }
    /// # }
    /// ```
    #[must_use]
    pub fn released(&self) -> Seq {
        self.take().driver.released()
    }

    /// The findings of the stream's own recovery: when it was opened after a drop without a close, or
    /// when it was reopened. `None` if there was none. The findings of the volume's recovery are in
    /// the [`Recovery`](crate::Recovery) that [`Volume::open`](crate::Volume::open) returned.
    #[must_use]
    pub fn recovery(&self) -> Option<&StreamRecovery> {
        self.recovery.as_ref()
    }

    /// The number of requests that the stream has sent again so far, to targets that had been lost
    /// (P7).
    #[must_use]
    pub fn replayed(&self) -> u64 {
        self.take().driver.replayed()
    }

    /// Returns a buffer of `len` bytes, a multiple of 4096. Its content is not defined: the buffer may
    /// have been used before.
    ///
    /// # Errors
    /// `len` is 0, not a multiple of 4096, or more than
    /// [`kept_bytes_max`](StreamOptions::kept_bytes_max); or there is not so much memory.
    pub fn buf(&mut self, len: usize) -> Result<Buf, BufError> {
        let kept_bytes_max = self.options.kept_bytes_max;
        if len == 0 || !len.is_multiple_of(BLOCK_BYTES) {
            return Err(BufError::NotBlocks { len });
        }
        if len as u64 > kept_bytes_max {
            return Err(BufError::TooLarge { len, kept_bytes_max });
        }
        self.pool.take(len).ok_or(BufError::NoMemory { len })
    }

    /// Returns an unused buffer to the stream, for reuse by [`buf`](Self::buf).
    pub fn recycle(&mut self, buf: Buf) {
        self.pool.give(buf);
    }

    /// Begins a group. Its writes are staged in this process until it is submitted.
    pub fn group(&mut self) -> Group<'_> {
        Group::new(self)
    }

    /// Sends the submitted groups as far as the connections take them, receives the answers that have
    /// arrived, and returns the marks. Never blocks.
    ///
    /// # Errors
    /// The stream has failed (P6).
    pub fn poll(&mut self) -> Result<Marks, StreamFailure> {
        let mut shell = OwnerCall::begin(&self.shell, &self.handle, &self.volume.background);
        // First: news from now on makes the descriptor readable again.
        self.handle.clear_news();
        shell.work(&mut |_, _| ());
        let marks = shell.marks()?;
        shell.driver.marks_reported();
        shell.reclaim(&mut self.pool);
        Ok(marks)
    }

    /// Sends the submitted groups as far as the connections take them, and receives nothing. Never
    /// blocks.
    ///
    /// # Errors
    /// The stream has failed (P6).
    pub fn send(&mut self) -> Result<(), StreamFailure> {
        let mut shell = self.take();
        shell.send();
        shell.marks()?;
        Ok(())
    }

    /// Sends the submitted groups, and waits for the state `until`, for `timeout` at most; `None`
    /// means without limit. Returns the marks. It polls for
    /// [`ConnectOptions::spin`](crate::ConnectOptions::spin), then sleeps.
    ///
    /// # Errors
    /// The time is up, another thread has called a [waker](Self::waker), the group was never
    /// submitted, or the stream has failed (P6).
    pub fn wait(&mut self, until: Until, timeout: Option<Duration>) -> Result<Marks, WaitError> {
        let deadline = timeout.map(deadline_after);
        let Self { shell, handle, volume, waiter, pool, .. } = self;
        let mut shell = OwnerCall::begin(shell, handle, &volume.background);
        handle.clear_news();
        shell.take_call();
        shell.driver.begin_wait(until)?;
        let (end, marks) = loop {
            let worked = shell.work(&mut |_, _| ());
            let marks = shell.marks()?;
            if let Some(end) = shell.driver.wait_step(until, deadline, now_ns) {
                break (end, marks);
            }
            if !worked && matches!(until, Until::Moved | Until::Woken) {
                // The owner may sleep here without limit: so this call does the work that the
                // background thread does while the owner is not calling (T1).
                let (flush_ns, now) = (BackgroundConfig::default().flush_ns, shell.now);
                shell.driver.take_care(worked, flush_ns, now);
            }
            shell.rest(waiter, worked, deadline);
        };
        shell.driver.marks_reported();
        shell.reclaim(pool);
        match end {
            WaitEnd::Reached => Ok(marks),
            WaitEnd::Woken => Err(WaitError::Woken),
            WaitEnd::Deadline => Err(WaitError::Deadline(timeout.unwrap_or_default())),
        }
    }

    /// Reads whole blocks at volume block `lba` into `into`, and waits for them for `timeout` at most;
    /// `None` means without limit. The read returns the data of all writes that this stream has
    /// submitted, also of incomplete groups (P9). While a target is unreachable, or while requests are
    /// replayed to it, the read waits.
    ///
    /// # Errors
    /// [`ReadError`]: the blocks are out of range, the time is up, the drive failed, or the stream has
    /// failed. The content of the buffer is not defined then.
    pub fn read(
        &mut self,
        lba: u64,
        into: &mut [u8],
        timeout: Option<Duration>,
    ) -> Result<(), ReadError> {
        self.read_many(&mut [ReadExtent { lba, into }], timeout)
    }

    /// As [`read`](Self::read), for several extents at once: in one round trip, as far as the queue
    /// depth allows.
    ///
    /// ```no_run
    /// # fn index(mut stream: riopipe::Stream) -> Result<(), riopipe::ReadError> {
    /// use riopipe::ReadExtent;
    ///
    /// let (mut root, mut leaf) = (vec![0; 4096], vec![0; 8192]);
    /// let mut both = [
    ///     ReadExtent { lba: 0, into: &mut root },
    ///     ReadExtent { lba: 900, into: &mut leaf },
    /// ];
    /// stream.read_many(&mut both, Some(std::time::Duration::from_secs(1)))?;
    /// # Ok(())
    /// # }
    /// ```
    ///
    /// # Errors
    /// As [`read`](Self::read). An error of one extent is the error of the call.
    pub fn read_many(
        &mut self,
        extents: &mut [ReadExtent<'_>],
        timeout: Option<Duration>,
    ) -> Result<(), ReadError> {
        let extents = extents.iter_mut().map(|extent| (extent.lba, &mut *extent.into));
        let mut reads = Reads::new(extents, self.volume.topology.blocks())?;
        let mut shell = OwnerCall::begin(&self.shell, &self.handle, &self.volume.background);
        reads.run(&mut shell, &mut self.waiter, timeout)
    }

    /// Makes a watch: a handle by which other threads read the marks and wait for them.
    #[must_use]
    pub fn watch(&self) -> Watch {
        Watch::new(&self.handle, &self.volume.background)
    }

    /// Makes a waker: a handle by which any thread interrupts a wait of the owner. See
    /// [`StreamWaker::wake`].
    #[must_use]
    pub fn waker(&self) -> StreamWaker {
        StreamWaker::new(&self.handle)
    }

    /// Makes a descriptor for epoll and event loops: it is readable when the loop must call
    /// [`poll`](Self::poll). It does not borrow the stream, and outlives it. Other calls of the stream
    /// may receive what made it readable, so call `poll` before the loop sleeps.
    ///
    /// ```no_run
    /// # fn runs(mut stream: riopipe::Stream) -> Result<(), Box<dyn std::error::Error>> {
    /// # fn epoll_wait(_: impl std::os::fd::AsFd, _: Option<std::time::Instant>) {}
    /// let fd = stream.event_fd()?;
    /// loop {
    ///     let marks = stream.poll()?;
    ///     println!("durable up to {}", marks.durable);
    ///     epoll_wait(&fd, stream.next_deadline()); // and whatever else the loop waits for
    /// }
    /// # }
    /// ```
    ///
    /// # Errors
    /// This process has no descriptors left.
    pub fn event_fd(&self) -> Result<StreamFd, Exhausted> {
        StreamFd::new(&self.handle)
    }

    /// The time at which an event loop must call [`poll`](Self::poll) at the latest, even if the
    /// [descriptor](Self::event_fd) is not readable: a target that stalls, or that is unreachable for
    /// too long, is detected then. Each call of the stream may change it. `None`: no such time.
    #[must_use]
    pub fn next_deadline(&self) -> Option<Instant> {
        let deadline = self.take().deadline()?;
        Instant::now().checked_add(Duration::from_nanos(deadline.saturating_sub(now_ns())))
    }

    /// Sends all groups with a FLUSH and waits until they are durable, has the targets drop their log
    /// entries, and closes the connections. Returns the seq of the last group. There is no time limit:
    /// see [`close_within`](Self::close_within).
    ///
    /// # Errors
    /// The stream has failed; opening it again recovers it.
    pub fn close(mut self) -> Result<Seq, StreamFailure> {
        let closed = self.end(None)?;
        Ok(closed.expect("only a deadline ends it without a result"))
    }

    /// As [`close`](Self::close), for `timeout` at most. If the stream was not closed, the error
    /// contains it, and it can be used as before.
    ///
    /// # Errors
    /// [`StreamNotClosed`]: the time is up, or the stream has failed and may be
    /// [reopened](Self::reopen).
    pub fn close_within(mut self, timeout: Duration) -> Result<Seq, StreamNotClosed> {
        let error = match self.end(Some(deadline_after(timeout))) {
            Ok(Some(last)) => return Ok(last),
            Ok(None) => WaitError::Deadline(timeout),
            Err(failure) => WaitError::Failed(failure),
        };
        Err(StreamNotClosed { error, back: Box::new(self) })
    }

    /// Closes the stream; `None` if it was not closed at the deadline.
    fn end(&mut self, deadline: Option<u64>) -> Result<Option<Seq>, StreamFailure> {
        let Self { shell, handle, volume, waiter, .. } = self;
        let mut shell = OwnerCall::begin(shell, handle, &volume.background);
        shell.driver.begin_close();
        let closed = loop {
            let worked = shell.work(&mut |_, _| ());
            if let Err(failure) = shell.marks() {
                shell.driver.give_up_close();
                return Err(failure);
            }
            match shell.driver.close_step() {
                Ok(Some(closed)) => break closed,
                Ok(None) if deadline.is_some_and(|deadline| now_ns() >= deadline) => {
                    shell.driver.give_up_close();
                    return Ok(None);
                }
                Ok(None) => shell.rest(waiter, worked, deadline),
                Err(refused) => {
                    shell.driver.give_up_close();
                    let cause = FailureCause::Forget(refused.status);
                    return Err(shell.failure_of(refused.server, cause));
                }
            }
        };
        shell.hang_up();
        drop(shell);
        self.closed = true;
        self.volume.stream_closed(self.id, closed.released);
        Ok(Some(closed.last))
    }

    /// Restarts a failed stream: closes its connections, waits until none of its writes is in flight
    /// at any target (T8), finds its prefix, undoes the fresh writes beyond it, and continues after the
    /// prefix. Other streams continue meanwhile.
    ///
    /// Groups after [`last`](StreamRecovery::last) of the returned recovery are lost, and their seqs
    /// are used again. The [marks](Self::watch) go back to `last`. Waits of other threads for lost
    /// groups end with the failure, if they were [made](crate::MarkWait) before. With another engine
    /// than `rio` nothing is undone: the stream continues after its last durable group.
    ///
    /// # Errors
    /// [`ReopenError`]. The stream is still failed, and this may be tried again. A stream with
    /// in-place updates beyond its prefix stays failed until they are acknowledged: check them
    /// ([`recovery`](Self::recovery)), [acknowledge](crate::Volume::acknowledge) them, and reopen
    /// the stream again.
    pub fn reopen(&mut self) -> Result<StreamRecovery, ReopenError> {
        let Self { shell, handle, volume, pool, .. } = self;
        // One call to its end: the background thread may not take the stream meanwhile. It would
        // receive the messages for the new incarnation, and pass them to the old driver (T27).
        let mut shell = OwnerCall::begin(shell, handle, &volume.background);
        if shell.marks().is_ok() {
            return Err(ReopenError::Healthy { stream: self.id });
        }
        // From here on no request of the old incarnation reaches a target.
        shell.hang_up();
        // The waiters have their result now, and this call may take long.
        wake_all(shell.take_due());
        // With an engine without a log no later group is known to be there after a crash (P2).
        let durable = shell.driver.delivered().durable;
        let (qids, replayed) = (shell.driver.qids().collect::<Vec<_>>(), shell.driver.replayed());
        let mut recovery = if volume.is_logged() {
            volume.recover_stream(self.id)?
        } else {
            StreamRecovery::none(self.id, durable)
        };
        recovery.replayed = replayed;
        volume.stream_recovered(&recovery);
        if let Some(pending) = recovery.pending() {
            let updates = pending.len();
            self.recovery = Some(recovery);
            return Err(StreamError::InPlacePending { stream: self.id, updates }.into());
        }
        // Other threads read the old marks until the new incarnation has been bound.
        let fresh = start(volume, self.id, &qids, &self.options, handle)?;
        shell.restart(fresh, pool);
        handle.watched.restart(recovery.last);
        drop(shell);
        volume.background.wake();
        tracing::info!(volume = %self.volume.name, %recovery, "an ordered stream was reopened");
        self.recovery = Some(recovery.clone());
        Ok(recovery)
    }

    /// Takes back the buffers that were staged and never submitted.
    #[inline]
    pub(crate) fn unstage(&mut self) {
        let staged = self.staged.get_mut();
        staged.writes.clear();
        while let Some(buf) = staged.bufs.pop() {
            self.pool.give(buf);
        }
    }

    /// The checks of a group before it is submitted.
    fn check(&mut self) -> Result<(), SubmitErrorKind> {
        let volume = self.volume.topology.blocks();
        let writes = &self.staged.get_mut().writes;
        for write in writes {
            let (lba, blocks) = (write.lba, write.blocks);
            let within = lba.checked_add(u64::from(blocks)).is_some_and(|end| end <= volume);
            if blocks == 0 || !within {
                return Err(SubmitErrorKind::OutOfRange { lba, blocks, volume });
            }
        }
        if let Some(ownership) = &self.volume.ownership {
            lock(ownership)
                .check(self.id, writes.iter().map(|w| (w.lba, w.blocks, w.op.is_fresh())))?;
        }
        Ok(())
    }

    /// Submits the staged group.
    pub(crate) fn admit(&mut self, tag: u64, durable: bool) -> Result<Seq, SubmitError> {
        self.try_admit(tag, durable).map_err(|kind| self.refused(kind))
    }

    /// Submits the staged group, and waits for space for `timeout` at most.
    pub(crate) fn admit_or_wait(
        &mut self,
        tag: u64,
        durable: bool,
        timeout: Option<Duration>,
    ) -> Result<Seq, SubmitError> {
        let deadline = timeout.map(deadline_after);
        loop {
            let kind = match self.try_admit(tag, durable) {
                Ok(seq) => return Ok(seq),
                // The space may not be enough yet: the deadline holds for all waits together.
                Err(kind @ SubmitErrorKind::Full(_))
                    if deadline.is_none_or(|deadline| now_ns() < deadline) =>
                {
                    match self.wait_for_space(deadline) {
                        Ok(true) => {
                            self.staged.get_mut().restage();
                            continue;
                        }
                        Ok(false) => kind,
                        Err(failure) => SubmitErrorKind::Poisoned(failure),
                    }
                }
                Err(kind) => kind,
            };
            return Err(self.refused(kind));
        }
    }

    /// Waits for space; false if there was none before the deadline.
    fn wait_for_space(&mut self, deadline: Option<u64>) -> Result<bool, StreamFailure> {
        let Self { shell, handle, volume, waiter, pool, .. } = self;
        let mut shell = OwnerCall::begin(shell, handle, &volume.background);
        let end = loop {
            let worked = shell.work(&mut |_, _| ());
            shell.marks()?;
            if let Some(end) = shell.driver.wait_step_unwoken(Until::Space, deadline, now_ns) {
                break end;
            }
            shell.rest(waiter, worked, deadline);
        };
        shell.reclaim(pool);
        Ok(end == WaitEnd::Reached)
    }

    /// Submits the staged group; if it is refused, it stays staged.
    fn try_admit(&mut self, tag: u64, durable: bool) -> Result<Seq, SubmitErrorKind> {
        self.check()?;
        let Self { shell, handle, volume, staged, id, .. } = self;
        let mut shell = OwnerCall::begin(shell, handle, &volume.background);
        let traced = shell.driver.traces_next().then(now_ns);
        let staged = staged.get_mut();
        let seq =
            shell.driver.admit(&mut staged.writes, tag, durable).map_err(
                |refusal| match refusal {
                    Refusal::Full(bound) => SubmitErrorKind::Full(named(bound, volume)),
                    Refusal::TooLarge(bound) => SubmitErrorKind::TooLarge(named(bound, volume)),
                    Refusal::TooManyEntries => SubmitErrorKind::TooManyEntries,
                    Refusal::Empty => SubmitErrorKind::Empty,
                    Refusal::Poisoned(failure) => {
                        SubmitErrorKind::Poisoned(shell.poisoned(failure))
                    }
                },
            )?;
        if let Some(since) = traced {
            shell.driver.trace(seq, since, now_ns());
        }
        if let Some(ownership) = &volume.ownership {
            let writes = staged.writes.iter();
            lock(ownership).note(*id, writes.map(|w| (w.lba, w.blocks)), seq);
        }
        // First of all, while this thread holds the flag: the rest of a write that was split is
        // counted together with its parts in the driver.
        staged.writes.clear();
        shell.kept.keep(seq, staged.bufs.drain(..));
        if durable {
            handle.watched.publish_asked(seq);
        }
        if shell.driver.should_send() {
            shell.send();
        }
        Ok(seq)
    }

    /// Returns the staged buffers in the error; the pieces that point into them are dropped first.
    #[cold]
    fn refused(&mut self, kind: SubmitErrorKind) -> SubmitError {
        let staged = self.staged.get_mut();
        staged.writes.clear();
        SubmitError { kind, bufs: std::mem::take(&mut staged.bufs) }
    }
}

impl Drop for Stream {
    fn drop(&mut self) {
        self.volume.background.remove(self.id, &self.handle);
        self.volume.forget_stream(self.id, &self.handle);
        let last = self.last();
        // The background thread may hold the stream for a moment longer; the connections end here.
        self.shell.take().hang_up();
        let over = if self.closed { Over::Closed } else { Over::Dropped };
        if !self.closed {
            tracing::warn!(
                volume = %self.volume.name, stream = %self.id, %last,
                "an ordered stream was dropped without being closed: it will be recovered when it \
                 is opened again"
            );
            self.volume.stream_dropped(self.id);
        }
        // Last: a woken waiter may open the stream again at once.
        wake_all(self.handle.watched.end(over));
    }
}

impl std::fmt::Debug for Stream {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Stream")
            .field("volume", &self.volume.name)
            .field("id", &self.id)
            .field("marks", &self.handle.watched.marks())
            .finish_non_exhaustive()
    }
}

/// A bound, with the address of its target.
#[cold]
fn named(bound: engine::Bound, volume: &Inner) -> Bound {
    match bound {
        engine::Bound::Log { server } => {
            Bound::Log { target: volume.server_name(usize::from(server)) }
        }
        engine::Bound::Memory => Bound::Memory,
    }
}

/// A stream that was not closed in time, and the reason. The stream is as before the call.
#[derive(Debug, thiserror::Error)]
#[error("the stream was not closed: {error}")]
pub struct StreamNotClosed {
    /// The reason: [`WaitError::Deadline`] or [`WaitError::Failed`].
    #[source]
    pub error: WaitError,
    /// The stream.
    pub back: Box<Stream>,
}

impl StreamNotClosed {
    /// Whether the stream may be closed later, if only time passes. False: it has failed.
    #[must_use]
    pub fn is_retryable(&self) -> bool {
        self.error.is_retryable()
    }
}

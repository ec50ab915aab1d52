//! A stream, as its owner holds it: the owner's thread builds, sends and reaps.

use std::sync::Arc;
use std::time::{Duration, Instant};

use riopipe_net::{Owned, SpinPolicy, Waiter, now_ns};
use riopipe_order::attribute::{Seq, StreamId};
use riopipe_order::engine::{self, Marks, Refusal};
use riopipe_session::initiator::stream_driver::{BackgroundConfig, Until, WaitEnd};

use crate::BLOCK_BYTES;
use crate::background::OpenStream;
use crate::error::{
    Bound, BufError, ReadError, ReopenError, StreamError, StreamNotClosed, SubmitError,
    SubmitErrorKind, WaitError,
};
use crate::failure::{Exhausted, FailureCause, StreamFailure};
use crate::group::{Group, Staged};
use crate::owner_call::OwnerCall;
use crate::piece::{Buf, Exclusive, Pool};
use crate::reading::{ReadExtent, Reads};
use crate::recovery::StreamRecovery;
use crate::shared::{Inner, lock};
use crate::start::start;
use crate::stream_shell::{StreamHandle, StreamShell};
use crate::waking::{StreamFd, StreamWaker, wake_all};
use crate::watch::Watch;
use crate::watched::Over;

/// How a stream is to work.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct StreamOptions {
    /// Requests in flight per target, 1 to 1024.
    pub queue_depth: usize,
    /// Payload bytes that may be held because they are not durable, or not complete (T14). A
    /// single group may not be larger.
    pub kept_bytes_max: u64,
    /// Whether neighbouring requests are merged (T16), up to what goes with a command (32 KiB on a
    /// Rio target). A group of more than so much takes several log entries.
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

/// One sequence of ordered writes. It belongs to one thread at a time; move it as you like.
///
/// # When bytes leave
///
/// A durable group is sent by the call that submits it. Other groups are sent by the owner's next
/// [`send`](Self::send), [`poll`](Self::poll), [`wait`](Self::wait), read or
/// [`close`](Self::close), with the next durable group, or by the call that submits the 64th
/// group in a row. What a full socket or queue does not take leaves as soon as there is room, in one
/// of these calls or by the background thread.
///
/// # While the owner is elsewhere
///
/// The volume's background thread looks after the stream: what was submitted is sent and completes,
/// and targets that come back get what they have lost. It takes the stream over at once when a
/// [watch](Self::watch) waits for its marks or reads them, and otherwise after 50 ms without a call.
/// So no watch waits for a timer.
///
/// A target that goes away costs time, not data (P7): the stream waits for it for
/// [`ConnectOptions::loss_timeout`](crate::ConnectOptions::loss_timeout), then fails (P6). A failed
/// stream can be [reopened](Self::reopen).
///
/// Dropping a stream without [`close`](Self::close) is a crash of the stream: nothing is lost that
/// was durable, and opening it again recovers it.
pub struct Stream {
    id: StreamId,
    shell: Arc<Owned<StreamShell>>,
    handle: Arc<StreamHandle>,
    waiter: Waiter,
    pool: Pool,
    pub(crate) staged: Exclusive<Staged>,
    volume: Arc<Inner>,
    options: StreamOptions,
    /// What its own recovery found, if it had one.
    recovery: Option<StreamRecovery>,
    closed: bool,
}

impl Stream {
    /// A stream that has been bound everywhere; the volume has reserved it.
    pub(crate) fn new(
        volume: Arc<Inner>,
        shell: StreamShell,
        handle: Arc<StreamHandle>,
        options: &StreamOptions,
        recovery: Option<StreamRecovery>,
    ) -> Self {
        let id = shell.id();
        let shell = Arc::new(Owned::new(shell));
        let open = OpenStream { shell: Arc::clone(&shell), handle: Arc::clone(&handle) };
        volume.background.add(id, open);
        let spin_ns = nanos(volume.connect.spin);
        Self {
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
        }
    }

    /// Takes the stream for one call of its owner.
    #[inline]
    fn take(&self) -> OwnerCall<'_> {
        OwnerCall::begin(&self.shell, &self.handle, &self.volume.background)
    }

    /// Which stream of the volume.
    #[must_use]
    pub fn id(&self) -> StreamId {
        self.id
    }

    /// The last group submitted.
    #[must_use]
    pub fn last(&self) -> Seq {
        self.take().driver.last()
    }

    /// The last group that is *released*: it and all before it are complete on all targets, durable
    /// and delivered, so that nothing will undo them or send them again. A block whose old content
    /// was needed up to group `n` may be written as [`Place::Fresh`](crate::Place::Fresh) again once
    /// `n` is released (T11), and by another stream once the group that wrote it is (T15). [`Watch::released`] tells
    /// it to other threads.
    ///
    /// A circular log shows what it is for. A block of the ring is written again, as fresh, when the
    /// log no longer begins in it. Where the log begins is said by a group of the log itself, and
    /// after a crash the volume may recover to the state before that group as long as it is not
    /// released: then the block is still needed.
    ///
    /// ```no_run
    /// # fn log(mut stream: riopipe::Stream) -> Result<(), Box<dyn std::error::Error>> {
    /// use riopipe::{Place, Seq, Until};
    ///
    /// const RING: u64 = 1000; // blocks 1 to 1000; block 0 says where the log begins
    /// let (mut head, mut tail) = (0, 0); // records 0..: written up to `head`, needed from `tail` on
    /// let mut trim = Seq(0); // the group that said so last
    /// let mut free_up_to = RING; // records below have room: their blocks are needed by no state
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

    /// What was found when the stream itself was recovered, on being opened after it had been
    /// dropped, or on being reopened; of what was found when its volume was opened, that told.
    #[must_use]
    pub fn recovery(&self) -> Option<&StreamRecovery> {
        self.recovery.as_ref()
    }

    /// Requests that had to be sent again to targets that had been lost (P7), so far.
    #[must_use]
    pub fn replayed(&self) -> u64 {
        self.take().driver.replayed()
    }

    /// A buffer of `len` bytes, a multiple of 4096. What is in it is not defined: it may have been
    /// used before.
    ///
    /// # Errors
    /// When `len` is 0, no multiple of 4096, or more than
    /// [`kept_bytes_max`](StreamOptions::kept_bytes_max).
    pub fn buf(&mut self, len: usize) -> Result<Buf, BufError> {
        let kept_bytes_max = self.options.kept_bytes_max;
        if len == 0 || !len.is_multiple_of(BLOCK_BYTES) {
            return Err(BufError::NotBlocks { len });
        }
        if len as u64 > kept_bytes_max {
            return Err(BufError::TooLarge { len, kept_bytes_max });
        }
        Ok(self.pool.take(len))
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
        let mut shell = OwnerCall::begin(&self.shell, &self.handle, &self.volume.background);
        // First: what is found from now on makes the descriptor readable again.
        self.handle.hear_news();
        shell.work(&mut |_, _| ());
        let marks = shell.marks()?;
        shell.driver.marks_reported();
        shell.reclaim(&mut self.pool);
        Ok(marks)
    }

    /// Sends what was submitted, as far as the connections take it, and looks for no answers. Never
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

    /// Waits until something is so, at most for `timeout`. Looks for a while, then sleeps.
    ///
    /// # Errors
    /// The time is up, a [waker](Self::waker) has called, the group was never submitted, or the
    /// stream has failed (P6).
    pub fn wait(&mut self, until: Until, timeout: Option<Duration>) -> Result<Marks, WaitError> {
        let deadline = timeout.map(deadline_after);
        let Self { shell, handle, volume, waiter, pool, .. } = self;
        let mut shell = OwnerCall::begin(shell, handle, &volume.background);
        handle.hear_news();
        shell.hear_call();
        shell.driver.begin_wait(until)?;
        let (end, marks) = loop {
            let worked = shell.work(&mut |_, _| ());
            let marks = shell.marks()?;
            if let Some(end) = shell.driver.wait_step(until, deadline, now_ns) {
                break (end, marks);
            }
            if !worked && matches!(until, Until::Moved | Until::Woken) {
                // Its owner may sleep here for good: then this call does what the background thread
                // does elsewhere (T1).
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

    /// Reads whole blocks at volume block `lba`, at most for `timeout`. The stream sees what it
    /// submitted itself, also what is not complete (P9). While a target is away, or gets again what
    /// it has lost, the read waits.
    ///
    /// # Errors
    /// Out of range, the time is up, the drive failed, or the stream has. What is in the buffer is not
    /// defined then.
    pub fn read(
        &mut self,
        lba: u64,
        into: &mut [u8],
        timeout: Option<Duration>,
    ) -> Result<(), ReadError> {
        self.read_many(&mut [ReadExtent { lba, into }], timeout)
    }

    /// Reads several extents, all at once: in one round trip, as far as the queue depth allows. The
    /// rest is as with [`read`](Self::read).
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
    /// As [`read`](Self::read); an error of one extent is one of the call.
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

    /// The marks for other threads, to look at and to wait for.
    #[must_use]
    pub fn watch(&self) -> Watch {
        Watch::new(&self.handle, &self.volume.background)
    }

    /// What other threads call the owner with: see [`StreamWaker::wake`].
    #[must_use]
    pub fn waker(&self) -> StreamWaker {
        StreamWaker::new(&self.handle)
    }

    /// A descriptor for epoll and event loops: it is readable when [`poll`](Self::poll) is to be
    /// called. It can be held while the stream is used, and outlives it. Other calls may take in what
    /// made it readable: poll before sleeping.
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
    /// The process has no descriptors left.
    pub fn event_fd(&self) -> Result<StreamFd, Exhausted> {
        StreamFd::new(&self.handle)
    }

    /// When an event loop calls [`poll`](Self::poll) at the latest, though the
    /// [descriptor](Self::event_fd) may not be readable: a stalled target, and one that is away for
    /// too long, is noticed then. It moves with each call of the stream.
    #[must_use]
    pub fn next_deadline(&self) -> Option<Instant> {
        let deadline = self.take().deadline()?;
        Instant::now().checked_add(Duration::from_nanos(deadline.saturating_sub(now_ns())))
    }

    /// Waits until everything submitted is durable, tells the targets that their logs may forget
    /// it, and closes the connections. Returns the last group.
    ///
    /// # Errors
    /// The stream has failed; opening it again recovers it.
    pub fn close(mut self) -> Result<Seq, StreamFailure> {
        let closed = self.end(None)?;
        Ok(closed.expect("without a deadline there is none that passes"))
    }

    /// As [`close`](Self::close), at most for `timeout`. A stream that is not closed is given back:
    /// it goes on as if it had not been asked for.
    ///
    /// # Errors
    /// The time is up, or the stream has failed and may be [reopened](Self::reopen).
    pub fn close_within(mut self, timeout: Duration) -> Result<Seq, StreamNotClosed> {
        let error = match self.end(Some(deadline_after(timeout))) {
            Ok(Some(last)) => return Ok(last),
            Ok(None) => WaitError::Deadline(timeout),
            Err(failure) => WaitError::Failed(failure),
        };
        Err(StreamNotClosed { error, back: Box::new(self) })
    }

    /// Closes the stream; `None` if that was not done at the deadline.
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

    /// Brings a failed stream back: closes its connections, waits until no write of it is under
    /// way anywhere (T8), finds its prefix, undoes what is beyond, and goes on from there. Other
    /// streams go on meanwhile.
    ///
    /// What was submitted after group [`last`](StreamRecovery::last) of what this returns is gone,
    /// and its numbers are given again; the [marks](Self::watch) go back to it. Other threads' waits
    /// for what is gone end with the failure, if they were [made](crate::MarkWait) before. With another
    /// engine than `rio` nothing is undone: the stream goes on after what was durable.
    ///
    /// # Errors
    /// [`ReopenError`]; the stream has failed still, and this may be tried again. A stream with
    /// in-place updates beyond its prefix stays closed until they are acknowledged: look at them
    /// ([`recovery`](Self::recovery)), [acknowledge](crate::Volume::acknowledge) them, and reopen
    /// it again.
    pub fn reopen(&mut self) -> Result<StreamRecovery, ReopenError> {
        let mut shell = self.take();
        if shell.marks().is_ok() {
            return Err(ReopenError::Healthy { stream: self.id });
        }
        // From here on nothing of the old life reaches a target.
        shell.hang_up();
        // Of an engine without a log nothing else is known to be there after a crash (P2).
        let durable = shell.driver.delivered().durable;
        let (qids, replayed) = (shell.driver.qids().collect::<Vec<_>>(), shell.driver.replayed());
        drop(shell);
        let mut recovery = if self.volume.is_logged() {
            self.volume.recover_stream(self.id)?
        } else {
            StreamRecovery::none(self.id, durable)
        };
        recovery.replayed = replayed;
        self.volume.stream_recovered(&recovery);
        if let Some(pending) = recovery.pending() {
            let updates = pending.len();
            self.recovery = Some(recovery);
            return Err(StreamError::InPlacePending { stream: self.id, updates }.into());
        }
        // The last life's marks stay in sight until the new one stands.
        let fresh = start(&self.volume, self.id, &qids, &self.options, &self.handle)?;
        let mut shell = self.shell.take();
        shell.restart(fresh, &mut self.pool);
        self.handle.watched.restart(recovery.last);
        drop(shell);
        self.volume.background.wake();
        tracing::info!(volume = %self.volume.name, %recovery, "an ordered stream was reopened");
        self.recovery = Some(recovery.clone());
        Ok(recovery)
    }

    /// Takes back what was staged and never submitted.
    #[inline]
    pub(crate) fn unstage(&mut self) {
        let staged = self.staged.get_mut();
        staged.writes.clear();
        while let Some(buf) = staged.bufs.pop() {
            self.pool.give(buf);
        }
    }

    /// What can be told about a group before it is submitted.
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
        if let Some(ledger) = &self.volume.ledger {
            lock(ledger)
                .check(self.id, writes.iter().map(|w| (w.lba, w.blocks, w.op.is_fresh())))?;
        }
        Ok(())
    }

    /// Submits the staged group.
    pub(crate) fn admit(&mut self, tag: u64, durable: bool) -> Result<Seq, SubmitError> {
        self.try_admit(tag, durable).map_err(|kind| self.refused(kind))
    }

    /// Submits the staged group, and waits for room at most until the timeout is over.
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
                // What the wait ended for may not be enough: the deadline holds for all of them.
                Err(kind @ SubmitErrorKind::Full(_))
                    if deadline.is_none_or(|deadline| now_ns() < deadline) =>
                {
                    match self.wait_for_space(deadline) {
                        Ok(true) => continue,
                        Ok(false) => kind,
                        Err(failure) => SubmitErrorKind::Poisoned(failure),
                    }
                }
                Err(kind) => kind,
            };
            return Err(self.refused(kind));
        }
    }

    /// Waits for room; false if there was none before the deadline.
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
        if let Some(ledger) = &volume.ledger {
            let writes = staged.writes.iter();
            lock(ledger).note(*id, writes.map(|w| (w.lba, w.blocks)), seq);
        }
        // First of all, as long as the flag is held: what is left here of a write that was
        // cut is counted with its parts there.
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

    /// Hands the staged buffers back; the pieces that point into them go first.
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
        // Others may hold the stream for a moment longer; the connections end here.
        self.shell.take().hang_up();
        let over = if self.closed { Over::Closed } else { Over::Dropped };
        wake_all(self.handle.watched.end(over));
        if !self.closed {
            tracing::warn!(
                volume = %self.volume.name, stream = %self.id, %last,
                "an ordered stream was dropped without being closed: it will be recovered when it \
                 is opened again"
            );
            self.volume.stream_dropped(self.id);
        }
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

/// Nanoseconds; more than 584 years are that.
pub(crate) fn nanos(time: Duration) -> u64 {
    u64::try_from(time.as_nanos()).unwrap_or(u64::MAX)
}

/// The time that is `timeout` from now, ns.
pub(crate) fn deadline_after(timeout: Duration) -> u64 {
    now_ns().saturating_add(nanos(timeout))
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

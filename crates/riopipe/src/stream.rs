//! A stream, as its owner holds it: the owner's thread builds, sends and reaps.

use std::os::fd::{AsFd, BorrowedFd};
use std::sync::Arc;
use std::time::Duration;

use riopipe_net::{Owned, SpinPolicy, Taken, Waiter, now_ns};
use riopipe_order::attribute::{Seq, StreamId};
use riopipe_order::engine::{self, Marks, Refusal};
use riopipe_session::initiator::stream_driver::Until;

use crate::BLOCK_BYTES;
use crate::background::OpenStream;
use crate::error::{
    Bound, BufError, ReadError, ReopenError, StreamError, SubmitError, SubmitErrorKind, WaitError,
};
use crate::failure::{FailureCause, StreamFailure};
use crate::group::{Group, Staged};
use crate::piece::{Buf, Exclusive, Pool};
use crate::reading::{ReadExtent, Reads};
use crate::recovery::StreamRecovery;
use crate::shared::{Inner, lock};
use crate::start::start;
use crate::stream_shell::{StreamHandle, StreamShell};
use crate::watched::Watched;

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

/// The marks of a stream, for other threads: they read what was found last by the stream's owner
/// or, while the owner is elsewhere, by the volume's background thread.
#[derive(Clone, Debug)]
pub struct Watch(Arc<Watched>);

impl Watch {
    /// The marks. They never go back, unless the stream is [reopened](Stream::reopen).
    #[must_use]
    pub fn marks(&self) -> Marks {
        self.0.marks()
    }

    /// The last group that is *released*: see [`Stream::released`]. It may lag behind what the stream
    /// itself would say, never run ahead.
    #[must_use]
    pub fn released(&self) -> Seq {
        self.0.released()
    }

    /// Whether the stream has failed.
    #[must_use]
    pub fn has_failed(&self) -> bool {
        self.0.has_failed()
    }
}

/// What an event loop needs to know to call [`Stream::poll`] at the right times.
#[derive(Debug)]
pub struct Readiness<'a> {
    /// Readable when something has arrived or can be sent.
    pub fd: BorrowedFd<'a>,
    /// Poll at the latest after this long: a stalled target, and one that is away for too long, is
    /// noticed then.
    pub timeout: Option<Duration>,
}

/// One sequence of ordered writes. It belongs to one thread at a time; move it as you like.
///
/// While its owner is elsewhere, the volume's background thread looks after it: what was submitted is
/// sent and completes, [watchers](Self::watch) see its marks move, and targets that come back get
/// what they have lost.
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
    fn take(&self) -> Taken<'_, StreamShell> {
        taken(&self.shell, &self.volume)
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
        let mut shell = taken(&self.shell, &self.volume);
        shell.work(&mut |_, _| ());
        let marks = shell.marks()?;
        shell.reclaim(&mut self.pool);
        Ok(marks)
    }

    /// Waits until something is so, at most for `timeout`. Looks for a while, then sleeps.
    ///
    /// # Errors
    /// The time is up, the group was never submitted, or the stream has failed (P6).
    pub fn wait(&mut self, until: Until, timeout: Option<Duration>) -> Result<Marks, WaitError> {
        let deadline = timeout.map(|t| now_ns().saturating_add(nanos(t)));
        let mut waiting = Waiting::new(&self.shell, &self.volume, &mut self.waiter);
        waiting.shell.driver.begin_wait(until)?;
        let result = loop {
            let worked = waiting.shell.work(&mut |_, _| ());
            let marks = waiting.shell.marks()?;
            if waiting.shell.driver.reached(until) {
                break Ok(marks);
            }
            if let (Some(timeout), Some(deadline)) = (timeout, deadline)
                && now_ns() >= deadline
            {
                break Err(WaitError::Deadline(timeout));
            }
            waiting.rest(worked, deadline);
        };
        waiting.shell.reclaim(&mut self.pool);
        result
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
        let mut shell = taken(&self.shell, &self.volume);
        reads.run(&mut shell, &mut self.waiter, timeout)
    }

    /// The marks for other threads.
    #[must_use]
    pub fn watch(&self) -> Watch {
        Watch(Arc::clone(&self.handle.watched))
    }

    /// For epoll and async runtimes: when to call [`poll`](Self::poll).
    #[must_use]
    pub fn readiness(&self) -> Readiness<'_> {
        let deadline = self.take().deadline();
        let timeout = deadline.map(|at| Duration::from_nanos(at.saturating_sub(now_ns())));
        Readiness { fd: self.handle.poller().as_fd(), timeout }
    }

    /// Waits until everything submitted is durable, tells the targets that their logs may forget
    /// it, and closes the connections. Returns the last group.
    ///
    /// # Errors
    /// The stream has failed; opening it again recovers it.
    pub fn close(mut self) -> Result<Seq, StreamFailure> {
        let mut waiting = Waiting::new(&self.shell, &self.volume, &mut self.waiter);
        waiting.shell.driver.begin_close();
        let closed = loop {
            let worked = waiting.shell.work(&mut |_, _| ());
            waiting.shell.marks()?;
            match waiting.shell.driver.close_step() {
                Ok(Some(closed)) => break closed,
                Ok(None) => waiting.rest(worked, None),
                Err(refused) => {
                    let cause = FailureCause::Forget(refused.status);
                    return Err(waiting.shell.failure_of(refused.server, cause));
                }
            }
        };
        waiting.shell.hang_up();
        drop(waiting);
        self.closed = true;
        self.volume.stream_closed(self.id, closed.released);
        Ok(closed.last)
    }

    /// Brings a failed stream back: closes its connections, waits until no write of it is under
    /// way anywhere (T8), finds its prefix, undoes what is beyond, and goes on from there. Other
    /// streams go on meanwhile.
    ///
    /// What was submitted after group [`last`](StreamRecovery::last) of what this returns is gone,
    /// and its numbers are given again; the [marks](Self::watch) go back to it. With another
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
        if let Err(kind) = self.check() {
            return Err(self.refused(kind));
        }
        let mut shell = taken(&self.shell, &self.volume);
        let traced = shell.driver.traces_next().then(now_ns);
        let staged = self.staged.get_mut();
        match shell.driver.admit(&mut staged.writes, tag, durable) {
            Ok(seq) => {
                if let Some(since) = traced {
                    shell.driver.trace(seq, since, now_ns());
                }
                if let Some(ledger) = &self.volume.ledger {
                    let writes = staged.writes.iter();
                    lock(ledger).note(self.id, writes.map(|w| (w.lba, w.blocks)), seq);
                }
                // First of all, as long as the flag is held: what is left here of a write that was
                // cut is counted with its parts there.
                staged.writes.clear();
                shell.kept.keep(seq, staged.bufs.drain(..));
                if shell.driver.should_send() {
                    shell.send();
                }
                Ok(seq)
            }
            Err(refusal) => {
                let kind = match refusal {
                    Refusal::Full(bound) => SubmitErrorKind::Full(named(bound, &self.volume)),
                    Refusal::TooLarge(bound) => {
                        SubmitErrorKind::TooLarge(named(bound, &self.volume))
                    }
                    Refusal::TooManyEntries => SubmitErrorKind::TooManyEntries,
                    Refusal::Empty => SubmitErrorKind::Empty,
                    Refusal::Poisoned(failure) => {
                        SubmitErrorKind::Poisoned(shell.poisoned(failure))
                    }
                };
                drop(shell);
                Err(self.refused(kind))
            }
        }
    }

    /// Hands the staged buffers back; the pieces that point into them go first.
    #[cold]
    fn refused(&mut self, kind: SubmitErrorKind) -> SubmitError {
        let staged = self.staged.get_mut();
        staged.writes.clear();
        SubmitError { kind, bufs: std::mem::take(&mut staged.bufs) }
    }
}

/// Takes a stream for one call of its owner.
#[inline]
fn taken<'a>(shell: &'a Owned<StreamShell>, volume: &Inner) -> Taken<'a, StreamShell> {
    let mut shell = shell.take();
    if shell.driver.owner_calls() {
        volume.background.wake();
    }
    shell
}

/// A call that waits: it has the stream until it returns.
struct Waiting<'a> {
    shell: Taken<'a, StreamShell>,
    waiter: &'a mut Waiter,
}

impl<'a> Waiting<'a> {
    fn new(shell: &'a Owned<StreamShell>, volume: &Inner, waiter: &'a mut Waiter) -> Self {
        Self { shell: taken(shell, volume), waiter }
    }

    /// Looks again at once, or sleeps until something comes.
    fn rest(&mut self, worked: bool, deadline: Option<u64>) {
        self.shell.rest(self.waiter, worked, deadline);
    }
}

impl Drop for Stream {
    fn drop(&mut self) {
        self.volume.background.remove(self.id, &self.handle);
        self.volume.forget_stream(self.id, &self.handle);
        let last = self.last();
        // Others may hold the stream for a moment longer; the connections end here.
        self.shell.take().hang_up();
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

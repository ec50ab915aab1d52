//! A stream, as its owner holds it: the owner's thread builds, sends and reaps.

use std::os::fd::{AsFd, BorrowedFd};
use std::sync::Arc;
use std::time::Duration;

use riopipe_net::{Next, Owned, SpinPolicy, Taken, Waiter, now_ns};
use riopipe_order::attribute::{Seq, StreamId};
use riopipe_order::engine::{Marks, Op, Place, Refusal};
use riopipe_session::initiator::stream_driver::Until;

use crate::BLOCK_BYTES;
use crate::background::OpenStream;
use crate::error::{
    CallError, ReadError, ReopenError, StreamError, StreamFailure, SubmitError, WaitError, Why,
};
use crate::group::{Group, Staged};
use crate::piece::{Buf, Exclusive, Piece, Pool};
use crate::recovery::StreamRecovery;
use crate::shared::Inner;
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
    /// was needed up to group `n` may be written as [`Place::Fresh`] again once `n` is released
    /// (T11), and by another stream once the group that wrote it is (T15).
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

    /// Reads whole blocks at volume block `lba`. The stream sees what it submitted itself, also
    /// what is not complete (P9). While a target is away, or gets again what it has lost, the read
    /// waits.
    ///
    /// # Errors
    /// Out of range, the drive failed, or the stream has.
    pub fn read(&mut self, lba: u64, into: &mut [u8]) -> Result<(), ReadError> {
        let volume = self.volume.topology.blocks();
        let blocks = into.len() / BLOCK_BYTES;
        let within = into.len().is_multiple_of(BLOCK_BYTES)
            && u32::try_from(blocks).is_ok()
            && lba.checked_add(blocks as u64).is_some_and(|end| end <= volume);
        if !within {
            return Err(ReadError::OutOfRange { lba, bytes: into.len(), volume });
        }
        let mut waiting = Waiting::new(&self.shell, &self.volume, &mut self.waiter);
        waiting.shell.marks()?;
        if blocks == 0 {
            return Ok(());
        }
        waiting.shell.driver.begin_read(lba, blocks as u32);
        loop {
            if let Some(result) = waiting.shell.driver.read_step() {
                return result.map_err(|(offset, status)| ReadError::Status {
                    lba: lba + (offset / BLOCK_BYTES) as u64,
                    status,
                });
            }
            let worked = waiting.shell.work(&mut |offset, bytes| {
                if let Some(part) = into.get_mut(offset..offset + bytes.len()) {
                    part.copy_from_slice(bytes);
                }
            });
            waiting.shell.marks()?;
            if waiting.shell.driver.read_waits() {
                waiting.rest(worked, None);
            }
        }
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
                    let said = CallError::Status(refused.status);
                    let what = format!("forgetting the log failed: {said}");
                    return Err(waiting.shell.failure_of(what));
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
        if recovery.acknowledge {
            let updates = recovery.pending().len();
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
    fn check(&mut self) -> Result<(), Why> {
        let volume = self.volume.topology.blocks();
        let writes = &self.staged.get_mut().writes;
        for write in writes {
            let (lba, blocks) = (write.lba, write.blocks);
            let within = lba.checked_add(u64::from(blocks)).is_some_and(|end| end <= volume);
            if blocks == 0 || !within {
                return Err(Why::OutOfRange { lba, blocks, volume });
            }
        }
        if let Some(ledger) = &self.volume.ledger {
            ledger.check(self.id, writes.iter().map(|w| (w.lba, w.blocks, is_fresh(&w.op))))?;
        }
        Ok(())
    }

    /// Submits the staged group.
    pub(crate) fn admit(&mut self, tag: u64, durable: bool) -> Result<Seq, SubmitError> {
        if let Err(why) = self.check() {
            return Err(self.refused(why));
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
                    ledger.note(self.id, writes.map(|w| (w.lba, w.blocks)), seq);
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
                let why = match refusal {
                    Refusal::Full(bound) => Why::Full(bound),
                    Refusal::TooLarge(bound) => Why::TooLarge(bound),
                    Refusal::TooManyEntries => Why::TooManyEntries,
                    Refusal::Empty => Why::Empty,
                    Refusal::Poisoned(failure) => Why::Poisoned(shell.poisoned(failure)),
                };
                drop(shell);
                Err(self.refused(why))
            }
        }
    }

    /// Hands the staged buffers back; the pieces that point into them go first.
    #[cold]
    fn refused(&mut self, why: Why) -> SubmitError {
        let staged = self.staged.get_mut();
        staged.writes.clear();
        SubmitError { why, bufs: std::mem::take(&mut staged.bufs) }
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
        if worked {
            self.waiter.worked();
            return;
        }
        if self.waiter.idle(self.shell.now) == Next::Look {
            self.waiter.relax();
            return;
        }
        self.shell.sleep(deadline);
    }
}

impl Drop for Stream {
    fn drop(&mut self) {
        self.volume.background.remove(self.id);
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

fn is_fresh(op: &Op<Piece>) -> bool {
    matches!(op, Op::Write(Place::Fresh, _) | Op::Discard)
}

//! A stream, as its owner has it.
//!
//! Each call takes the [`StreamShell`] with an [`OwnerCall`], works in the caller's thread, and
//! releases the shell: the owner's thread builds requests, sends them, and receives the answers.
//! Between the calls the background thread may take the shell.

mod close;
mod read;
mod submit;

use std::sync::Arc;
use std::time::{Duration, Instant};

use riopipe_net::{AdaptiveSpin, Owned, SpinPolicy, now_ns};
use riopipe_order::attribute::{Seq, StreamId};
use riopipe_order::engine::Marks;
use riopipe_session::initiator::stream_driver::{BackgroundConfig, Until, WaitEnd};

pub use self::close::StreamNotClosed;
use crate::BLOCK_BYTES;
use crate::background::{BackgroundThread, OpenStream};
use crate::error::{BufError, ReopenError, StreamError, WaitError};
use crate::failure::{Exhausted, StreamFailure};
use crate::open_volume::OpenVolume;
use crate::options::StreamOptions;
use crate::owner_call::OwnerCall;
use crate::piece::{Buf, BufPool, Exclusive};
use crate::published_marks::MarksEnd;
use crate::recovery::StreamRecovery;
use crate::staged::Staged;
use crate::start::start;
use crate::stream_handle::StreamHandle;
use crate::stream_shell::StreamShell;
use crate::time::{deadline_after, nanos};
use crate::waiters::wake_all;
use crate::waking::{StreamFd, StreamWaker};
use crate::watch::Watch;

/// One sequence of ordered writes. It belongs to one thread at a time, and may be moved to another
/// thread at any time.
///
/// # When bytes leave
///
/// - The call that submits a durable group sends it, and all groups before it.
/// - The call that submits the 64th group in a row sends all of them.
/// - Other groups leave with the owner's next [`send`](Self::send), [`poll`](Self::poll),
///   [`wait`](Self::wait), read or [`close`](Self::close).
/// - If a socket or a queue is full, the rest leaves as soon as there is space: in one of these
///   calls, or by the background thread.
///
/// # While the owner is not calling
///
/// The volume's background thread drives the stream: submitted groups are sent and complete, and
/// the requests that a target has lost are replayed when the target is back. It begins at once when
/// a [watch](Self::watch) waits for the marks or reads them, and otherwise after 50 ms without a
/// call. So no watch waits for a timer.
///
/// # When a target is lost
///
/// A lost target costs time, not data (promise P7): the stream waits for it for
/// [`ConnectOptions::loss_timeout`](crate::ConnectOptions::loss_timeout), then fails (promise P6).
/// A failed stream can be [reopened](Self::reopen).
///
/// Dropping a stream without [`close`](Self::close) is a crash of the stream: durable groups stay,
/// and opening the stream again recovers it.
pub struct Stream {
    id: StreamId,
    shell: Arc<Owned<StreamShell>>,
    handle: Arc<StreamHandle>,
    /// Decides whether a wait polls again or sleeps.
    spin: AdaptiveSpin,
    buf_pool: BufPool,
    /// The writes of the group that is not submitted yet.
    pub(crate) staged: Exclusive<Staged>,
    volume: Arc<OpenVolume>,
    background: Arc<BackgroundThread>,
    options: StreamOptions,
    /// The findings of the stream's own recovery, if it had one.
    recovery: Option<StreamRecovery>,
    is_closed: bool,
}

impl Stream {
    /// A stream that has been bound on all targets; the volume has reserved it.
    ///
    /// # Errors
    /// The volume has no background thread yet, and none can be started. The stream is dropped.
    pub(crate) fn new(
        volume: Arc<OpenVolume>,
        background: Arc<BackgroundThread>,
        shell: StreamShell,
        handle: Arc<StreamHandle>,
        options: &StreamOptions,
        recovery: Option<StreamRecovery>,
    ) -> Result<Self, Exhausted> {
        let id = shell.id();
        let shell = Arc::new(Owned::new(shell));
        let open = OpenStream {
            shell: Arc::clone(&shell),
            handle: Arc::clone(&handle),
            following: Arc::clone(&volume.following),
        };
        let spin_ns = nanos(volume.connect_options.spin);
        let stream = Self {
            id,
            shell,
            handle,
            spin: AdaptiveSpin::new(SpinPolicy { spin_ns, steady: false }),
            buf_pool: BufPool::new(options.kept_bytes_max),
            staged: Exclusive::default(),
            volume,
            background,
            options: options.clone(),
            recovery,
            is_closed: false,
        };
        stream.background.add(id, open)?;
        Ok(stream)
    }

    /// Begins a call of the owner, which takes the shell until it ends.
    #[inline]
    fn begin_call(&self) -> OwnerCall<'_> {
        OwnerCall::begin(&self.shell, &self.handle, &self.background)
    }

    /// The number of the stream in its volume, from 0.
    #[must_use]
    pub fn id(&self) -> StreamId {
        self.id
    }

    /// The seq of the last group submitted.
    #[must_use]
    pub fn last(&self) -> Seq {
        self.begin_call().driver.last()
    }

    /// The seq of the last group that is *released*: this group and all earlier ones are complete
    /// on all targets, durable and delivered, so no recovery undoes them and no replay sends them
    /// again. Two rules depend on it:
    ///
    /// - A block whose old content was needed up to group `n` may be written as
    ///   [`Place::Fresh`](crate::Place::Fresh) again once `n` is released (trap T11).
    /// - Another stream may write a block once the group that wrote it is released (trap T15).
    ///
    /// Other threads read this mark by [`Watch::released`].
    ///
    /// A circular log is an example. A block of the ring is written again, as fresh, when its
    /// record is no longer part of the log. A group of the log itself records where the log begins.
    /// Until that group is released, the volume may recover to the state before it, which still
    /// needs the block.
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
        self.begin_call().driver.released()
    }

    /// The findings of the stream's own recovery: when it was opened after a drop without a close,
    /// or when it was reopened. `None` if there was none. The findings of the volume's recovery are
    /// in the [`Recovery`](crate::Recovery) that [`Volume::open`](crate::Volume::open) returned.
    #[must_use]
    pub fn recovery(&self) -> Option<&StreamRecovery> {
        self.recovery.as_ref()
    }

    /// The number of requests that the stream has sent again so far, to targets that had been lost
    /// (promise P7).
    #[must_use]
    pub fn replayed(&self) -> u64 {
        self.begin_call().driver.replayed()
    }

    /// Returns a buffer of `len` bytes, a multiple of 4096. Its content is not defined: the buffer
    /// may have been used before.
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
        self.buf_pool.take(len).ok_or(BufError::NoMemory { len })
    }

    /// Returns an unused buffer to the stream, for reuse by [`buf`](Self::buf).
    pub fn recycle(&mut self, buf: Buf) {
        self.buf_pool.put_back(buf);
    }

    /// Sends the submitted groups as far as the connections take them, receives the answers that
    /// have arrived, and returns the marks. Never blocks.
    ///
    /// # Errors
    /// The stream has failed (promise P6).
    pub fn poll(&mut self) -> Result<Marks, StreamFailure> {
        let mut shell = OwnerCall::begin(&self.shell, &self.handle, &self.background);
        // This comes first, so that a mark that moves from now on makes the descriptor readable
        // again.
        self.handle.reset_event_loop_poller();
        shell.work(&mut |_, _| ());
        let marks = shell.publish_marks()?;
        shell.driver.marks_reported();
        shell.reclaim_bufs(&mut self.buf_pool);
        Ok(marks)
    }

    /// Sends the submitted groups as far as the connections take them, and receives nothing. Never
    /// blocks.
    ///
    /// # Errors
    /// The stream has failed (promise P6).
    pub fn send(&mut self) -> Result<(), StreamFailure> {
        let mut shell = self.begin_call();
        shell.send();
        shell.publish_marks()?;
        Ok(())
    }

    /// Sends the submitted groups, and waits for the state `until`, for `timeout` at most; `None`
    /// means without limit. Returns the marks. It polls for
    /// [`ConnectOptions::spin`](crate::ConnectOptions::spin), then sleeps.
    ///
    /// # Errors
    /// The time is up, another thread has called a [waker](Self::waker), the group was never
    /// submitted, or the stream has failed (promise P6).
    pub fn wait(&mut self, until: Until, timeout: Option<Duration>) -> Result<Marks, WaitError> {
        let deadline = timeout.map(deadline_after);
        let Self { shell, handle, background, spin, buf_pool, .. } = self;
        let mut shell = OwnerCall::begin(shell, handle, background);
        handle.reset_event_loop_poller();
        shell.pass_owner_interrupt();
        shell.driver.begin_wait(until)?;
        let (end, marks) = loop {
            let worked = shell.work(&mut |_, _| ());
            let marks = shell.publish_marks()?;
            if let Some(end) = shell.driver.wait_step(until, deadline, now_ns) {
                if worked {
                    // The next wait begins anew, also if its first round has nothing to send.
                    spin.on_work();
                }
                break (end, marks);
            }
            // These waits may take without limit although the stream is idle. The background thread
            // can't take the stream during a call. So the wait itself flushes an idle stream, after
            // which the targets can drop its log entries (trap T1).
            let may_wait_while_idle = matches!(until, Until::Moved | Until::Woken);
            if may_wait_while_idle && !worked {
                let flush_ns = BackgroundConfig::default().flush_ns;
                let now = shell.round_begun_ns;
                shell.driver.finish_background_rounds(worked, flush_ns, now);
            }
            shell.poll_again_or_sleep(spin, worked, deadline);
        };
        shell.reclaim_bufs(buf_pool);
        match end {
            WaitEnd::Reached => {
                // The other ends return no marks, so a later wait must still find them new.
                shell.driver.marks_reported();
                Ok(marks)
            }
            WaitEnd::Woken => Err(WaitError::Woken),
            WaitEnd::Deadline => Err(WaitError::Deadline(timeout.unwrap_or_default())),
        }
    }

    /// Makes a watch: a handle by which other threads read the marks and wait for them.
    #[must_use]
    pub fn watch(&self) -> Watch {
        Watch::new(&self.handle, &self.background)
    }

    /// Makes a waker: a handle by which any thread interrupts a wait of the owner. See
    /// [`StreamWaker::wake`].
    #[must_use]
    pub fn waker(&self) -> StreamWaker {
        StreamWaker::new(&self.handle)
    }

    /// Makes a descriptor for epoll and event loops: it is readable when the loop must call
    /// [`poll`](Self::poll). It does not borrow the stream, and outlives it. Other calls of the
    /// stream may receive what made it readable, so call `poll` before the loop sleeps.
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
    /// [descriptor](Self::event_fd) is not readable: a target that stalls, or that is unreachable
    /// for too long, is detected then. Each call of the stream may change it. `None`: no such time.
    #[must_use]
    pub fn next_deadline(&self) -> Option<Instant> {
        let deadline = self.begin_call().deadline()?;
        Instant::now().checked_add(Duration::from_nanos(deadline.saturating_sub(now_ns())))
    }

    /// Restarts a failed stream: closes its connections, waits until none of its writes is in
    /// flight at any target (trap T8), finds its prefix, undoes the fresh writes beyond it, and
    /// continues after the prefix. Other streams continue meanwhile.
    ///
    /// Groups after [`last`](StreamRecovery::last) of the returned recovery are lost, and their
    /// seqs are used again. The [marks](Self::watch) go back to `last`. Waits of other threads for
    /// lost groups end with the failure, if they were [made](crate::MarkWait) before. With another
    /// engine than `rio` nothing is undone: the stream continues after its last durable group.
    ///
    /// # Errors
    /// [`ReopenError`]. The stream is still failed, and this may be tried again. A stream with
    /// in-place updates beyond its prefix stays failed until they are acknowledged: check them
    /// ([`recovery`](Self::recovery)), [acknowledge](crate::Volume::acknowledge) them, and reopen
    /// the stream again.
    pub fn reopen(&mut self) -> Result<StreamRecovery, ReopenError> {
        let Self { shell, handle, volume, background, buf_pool, .. } = self;
        // This call keeps the shell to its end, so that the background thread can't take the
        // stream. It would receive the messages for the new incarnation, and pass them to the old
        // driver (trap T27).
        let mut shell = OwnerCall::begin(shell, handle, background);
        if shell.publish_marks().is_ok() {
            return Err(ReopenError::Healthy { stream: self.id });
        }
        // From here on no request of the old incarnation reaches a target.
        shell.close_connections();
        // The waiters are woken before the recovery, which may take long. They end with the
        // failure.
        wake_all(shell.take_due_wakers());
        let qids: Vec<u16> = shell.driver.qids().collect();
        let mut recovery = if volume.has_logs() {
            volume.recover_stream(self.id)?
        } else {
            // Without a log no group after the last durable one is known to be whole (promise P2).
            StreamRecovery::none(self.id, shell.driver.delivered().durable)
        };
        recovery.replayed = shell.driver.replayed();
        volume.on_stream_recovered(&recovery);
        if let Some(pending) = recovery.pending() {
            let updates = pending.len();
            self.recovery = Some(recovery);
            return Err(StreamError::InPlacePending { stream: self.id, updates }.into());
        }
        // Other threads read the old marks until the new incarnation has been bound.
        let next = start(volume, self.id, &qids, &self.options, handle)?;
        shell.replace_incarnation(next, buf_pool);
        handle.published_marks.begin_incarnation(recovery.last);
        drop(shell);
        background.wake();
        tracing::info!(volume = %self.volume.name, %recovery, "an ordered stream was reopened");
        self.recovery = Some(recovery.clone());
        Ok(recovery)
    }
}

impl Drop for Stream {
    fn drop(&mut self) {
        self.background.remove(self.id, &self.handle);
        self.volume.remove_stream_from_targets(self.id, &self.handle);
        let last = self.last();
        // The background thread may have a reference to the shell for a moment longer. So the
        // connections are closed here, and not when the shell is dropped.
        let mut shell = self.shell.take();
        shell.close_connections();
        // From here on no thread writes to the memory of a read.
        shell.reads.clear();
        drop(shell);
        let end = if self.is_closed { MarksEnd::Closed } else { MarksEnd::Dropped };
        if !self.is_closed {
            tracing::warn!(
                volume = %self.volume.name, stream = %self.id, %last,
                "an ordered stream was dropped without being closed: it will be recovered when it \
                 is opened again"
            );
            self.volume.on_stream_dropped(self.id);
        }
        // The waiters are woken last, because a woken waiter may open the stream again at once.
        wake_all(self.handle.published_marks.record_end(end));
    }
}

impl std::fmt::Debug for Stream {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Stream")
            .field("volume", &self.volume.name)
            .field("id", &self.id)
            .field("marks", &self.handle.published_marks.marks())
            .finish_non_exhaustive()
    }
}

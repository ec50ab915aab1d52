//! The background thread of a volume: drives the streams whose owners are not calling. The
//! [`BackgroundDriver`] decides which streams these are.
//!
//! - **Taking a stream.** The thread takes a stream only if the stream's ownership flag is free. If
//!   a thread waits for the marks of a stream that is not free, the background thread leaves a
//!   request at the flag. The end of the owner's call then wakes the background thread.
//! - **Sleeping.** The thread sleeps until a stream that it drives has an event, until another
//!   thread begins to wait for a stream, or until the next deadline of the driver.
//! - **Begin and end.** The first stream that is opened starts the thread. The thread ends when no
//!   stream is open. If it panics while streams are open, a new thread takes its place.

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex};
use std::time::Duration;

use riopipe_net::{Event, Interest, Owned, Poller, PollerError, Waker, now_ns};
use riopipe_order::attribute::StreamId;
use riopipe_order::following::SharedFollowing;
use riopipe_session::initiator::stream_driver::{BackgroundConfig, BackgroundDriver, Finding};

use crate::failure::{Exhausted, StreamFailure};
use crate::lock::lock;
use crate::published_marks::PublishedMarks;
use crate::stream_handle::StreamHandle;
use crate::stream_shell::StreamShell;
use crate::waiters::wake_all;

/// The pause after an error or a panic before the thread continues, or another one begins.
const RETRY_PAUSE: Duration = Duration::from_millis(50);

/// An open stream, in the form that the background thread needs.
#[derive(Clone, Debug)]
pub(crate) struct OpenStream {
    pub(crate) shell: Arc<Owned<StreamShell>>,
    pub(crate) handle: Arc<StreamHandle>,
    /// The state that the streams of the volume share.
    pub(crate) following: Arc<SharedFollowing>,
}

impl OpenStream {
    /// Whether another thread, or another stream, waits for this one.
    fn is_awaited(&self, id: StreamId) -> bool {
        self.handle.published_marks.is_awaited() || self.following.is_needed(id)
    }
}

/// The open streams of a volume. While there are any, a thread drives those whose owners are not
/// calling.
#[derive(Debug)]
pub(crate) struct BackgroundThread {
    poller: Poller,
    waker: Waker,
    open_streams: Mutex<OpenStreams>,
}

/// The open streams, as the calls that open and close streams change them.
#[derive(Debug, Default)]
struct OpenStreams {
    by_id: BTreeMap<StreamId, OpenStream>,
    /// The number of changes of `by_id`.
    version: u64,
    /// Whether there is a thread that drives them.
    is_thread_running: bool,
}

impl BackgroundThread {
    pub(crate) fn new() -> Result<Arc<Self>, PollerError> {
        let poller = Poller::new()?;
        let waker = poller.waker();
        Ok(Arc::new(Self { poller, waker, open_streams: Mutex::default() }))
    }

    /// Adds a stream that is open from now on. The first stream starts the thread.
    ///
    /// # Errors
    /// The thread can't be started. Then the stream is not added, because nothing would flush it
    /// while it is idle, and its targets could not drop its log entries (trap T1).
    pub(crate) fn add(self: &Arc<Self>, id: StreamId, stream: OpenStream) -> Result<(), Exhausted> {
        let mut open_streams = lock(&self.open_streams);
        if open_streams.is_thread_running {
            self.waker.wake();
        } else {
            self.start_thread(&mut open_streams, Duration::ZERO)?;
        }
        open_streams.by_id.insert(id, stream);
        open_streams.version += 1;
        Ok(())
    }

    /// Starts the thread, which begins its work after `pause`.
    fn start_thread(
        self: &Arc<Self>,
        open_streams: &mut OpenStreams,
        pause: Duration,
    ) -> Result<(), Exhausted> {
        let background = Arc::clone(self);
        let builder = std::thread::Builder::new().name("riopipe-bg".into());
        let thread = move || {
            std::thread::sleep(pause);
            background.run();
        };
        builder.spawn(thread).map_err(|_| Exhausted::Threads)?;
        open_streams.is_thread_running = true;
        Ok(())
    }

    /// Removes a stream that has ended. The caller passes the handle of the stream, because another
    /// stream may have the same id already: a closed stream may be opened again before the old one
    /// is dropped. That other stream stays.
    pub(crate) fn remove(&self, id: StreamId, handle: &Arc<StreamHandle>) {
        let mut open_streams = lock(&self.open_streams);
        if open_streams.by_id.get(&id).is_some_and(|open| Arc::ptr_eq(&open.handle, handle)) {
            open_streams.by_id.remove(&id);
            open_streams.version += 1;
            self.waker.wake();
        }
    }

    /// The published marks of all open streams. The result has no references to the streams, so the
    /// caller never drops the last one.
    pub(crate) fn published_marks(&self) -> Vec<(StreamId, Arc<PublishedMarks<StreamFailure>>)> {
        let open_streams = lock(&self.open_streams);
        let marks = |(id, stream): (&StreamId, &OpenStream)| {
            (*id, Arc::clone(&stream.handle.published_marks))
        };
        open_streams.by_id.iter().map(marks).collect()
    }

    /// Wakes the thread.
    pub(crate) fn wake(&self) {
        self.waker.wake();
    }

    /// The waker of the thread, for threads that wait for a stream.
    pub(crate) fn waker(&self) -> &Waker {
        &self.waker
    }

    /// The loop of the thread. It ends when no stream is open.
    fn run(self: &Arc<Self>) {
        let mut worker = Worker {
            background: self,
            version: 0,
            driver: BackgroundDriver::new(BackgroundConfig::default()),
            streams: BTreeMap::new(),
        };
        let mut events = Vec::new();
        while worker.update_streams() {
            worker.run_round(now_ns(), &events);
            let deadline = worker.driver.deadline();
            let sleep = deadline.map(|at| Duration::from_nanos(at.saturating_sub(now_ns())));
            if let Err(error) = self.poller.wait(&mut events, sleep) {
                tracing::error!(%error, "the background thread cannot wait for events");
                std::thread::sleep(RETRY_PAUSE);
            }
        }
    }
}

/// The state that only the thread uses.
struct Worker<'a> {
    background: &'a Arc<BackgroundThread>,
    /// The version of the open streams of which `streams` is a copy.
    version: u64,
    driver: BackgroundDriver,
    streams: BTreeMap<StreamId, WorkerStream>,
}

struct WorkerStream {
    stream: OpenStream,
    /// Whether the thread's poller watches the stream's poller.
    is_watched: bool,
}

/// After a panic, starts another thread for the streams that are open.
impl Drop for Worker<'_> {
    fn drop(&mut self) {
        if !std::thread::panicking() {
            return;
        }
        tracing::error!("the background thread has panicked; starting another one");
        for WorkerStream { stream, is_watched } in self.streams.values() {
            if *is_watched {
                // The next thread adds the stream to the poller again.
                let _ = self.background.poller.remove(stream.handle.poller());
            }
        }
        let mut open_streams = lock(&self.background.open_streams);
        open_streams.is_thread_running = false;
        // The new thread pauses first, because the same panic may happen again.
        if !open_streams.by_id.is_empty()
            && let Err(error) = self.background.start_thread(&mut open_streams, RETRY_PAUSE)
        {
            tracing::error!(%error, "no thread drives the streams that are open");
        }
    }
}

impl Worker<'_> {
    /// Adds new streams and removes ended ones. Returns false if no stream is open: the thread
    /// ends.
    fn update_streams(&mut self) -> bool {
        let Self { background, version, driver, streams } = self;
        let mut open_streams = lock(&background.open_streams);
        if open_streams.version == *version && !open_streams.by_id.is_empty() {
            return true;
        }
        *version = open_streams.version;
        streams.retain(|id, WorkerStream { stream, is_watched }| {
            let open = open_streams.by_id.get(id);
            let is_open = open.is_some_and(|open| Arc::ptr_eq(&stream.shell, &open.shell));
            if !is_open {
                driver.remove(*id);
                if *is_watched {
                    // Another thread may still have the handle, and interrupt the owner. That would
                    // wake this thread, and no thread would reset the waker of the ended stream.
                    let _ = background.poller.remove(stream.handle.poller());
                }
            }
            is_open
        });
        if open_streams.by_id.is_empty() {
            // The next stream that is opened starts a new thread, under the same lock.
            open_streams.is_thread_running = false;
            return false;
        }
        for (id, stream) in &open_streams.by_id {
            streams.entry(*id).or_insert_with(|| {
                driver.add(*id);
                WorkerStream { stream: stream.clone(), is_watched: false }
            });
        }
        true
    }

    /// Drives the streams that have an event or are due. Checks whether the owners of the other
    /// streams call again.
    fn run_round(&mut self, now: u64, events: &[Event]) {
        let has_event = |id: StreamId| events.iter().any(|event| event.token == u64::from(id.0));
        let is_awaited = |id| {
            let entry = self.streams.get(&id);
            entry.is_some_and(|entry| entry.stream.is_awaited(id))
        };
        for (id, must_drive) in self.driver.due(now, has_event, is_awaited) {
            self.check_stream(id, must_drive, now);
            self.update_watch(id, now);
        }
    }

    /// Takes a stream if its owner is in no call, and drives it if the driver decides so.
    fn check_stream(&mut self, id: StreamId, must_drive: bool, now: u64) {
        let Some(WorkerStream { stream, .. }) = self.streams.get(&id) else { return };
        // A request at the flag makes the owner wake this thread at the end of its call. Without a
        // waiter that would only cost time, so no request is left.
        let is_awaited = stream.is_awaited(id);
        let taken = match is_awaited {
            true => stream.shell.take_or_request(),
            false => stream.shell.try_take(),
        };
        let Some(mut shell) = taken else {
            self.driver.on_owner_in_call(id, is_awaited, now);
            return;
        };
        let is_awaited = stream.is_awaited(id);
        let attention = shell.driver.attention_mut();
        if self.driver.check(id, must_drive, is_awaited, attention, now) == Finding::Drive {
            let next = shell.drive_in_background(self.driver.config().flush_ns);
            self.driver.on_driven(id, next);
        }
        let due_wakers = shell.take_due_wakers();
        // The stream is released first, because a waker may run any code.
        drop(shell);
        wake_all(due_wakers);
    }

    /// Makes the poller watch the stream if the stream has been taken over, and not watch it
    /// otherwise.
    fn update_watch(&mut self, id: StreamId, now: u64) {
        let Some(WorkerStream { stream, is_watched }) = self.streams.get_mut(&id) else { return };
        let poller = &self.background.poller;
        let stream_poller = stream.handle.poller();
        if !self.driver.has_taken_over(id) {
            if *is_watched {
                *is_watched = false;
                // This can't fail, because the stream is watched.
                let _ = poller.remove(stream_poller);
            }
        } else if !*is_watched {
            *is_watched = poller.add(stream_poller, u64::from(id.0), Interest::Read).is_ok();
            if !*is_watched {
                self.driver.on_unwatchable(id, now);
            }
        }
    }
}

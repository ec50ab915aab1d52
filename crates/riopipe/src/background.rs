//! The background thread of a volume: drives the streams whose owners are not calling, by the
//! decisions of the [`BackgroundDriver`].
//!
//! It takes a stream only if it gets the stream's ownership flag at once. Otherwise it leaves a
//! request at the flag, and the end of the owner's call wakes it. It sleeps until an event of a stream
//! that it drives, until a thread waits for a stream, or until the time at which the next owner counts
//! as not calling. Without an open stream there is no such thread. If the thread ends by a panic while
//! streams are open, another one takes its place.

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex};
use std::time::Duration;

use riopipe_net::{Event, Interest, Owned, Poller, PollerError, Waker, now_ns};
use riopipe_order::attribute::StreamId;
use riopipe_session::initiator::stream_driver::{BackgroundConfig, BackgroundDriver, Finding};

use crate::failure::{Exhausted, StreamFailure};
use crate::lock::lock;
use crate::stream_handle::StreamHandle;
use crate::stream_shell::StreamShell;
use crate::waiters::wake_all;
use crate::watched::Watched;

/// The pause after an error or a panic before the thread continues, or another one begins.
const RETRY_PAUSE: Duration = Duration::from_millis(50);

/// An open stream, in the form that the background thread needs.
#[derive(Clone, Debug)]
pub(crate) struct OpenStream {
    pub(crate) shell: Arc<Owned<StreamShell>>,
    pub(crate) handle: Arc<StreamHandle>,
}

/// The open streams of a volume. While there are any, a thread drives those whose owners are not
/// calling.
#[derive(Debug)]
pub(crate) struct Background {
    poller: Poller,
    waker: Waker,
    state: Mutex<State>,
}

#[derive(Debug, Default)]
struct State {
    streams: BTreeMap<StreamId, OpenStream>,
    /// The number of changes of `streams`.
    version: u64,
    /// Whether there is a thread.
    running: bool,
}

impl Background {
    pub(crate) fn new() -> Result<Arc<Self>, PollerError> {
        let poller = Poller::new()?;
        let waker = poller.waker();
        Ok(Arc::new(Self { poller, waker, state: Mutex::default() }))
    }

    /// Adds a stream that is open from now on. The first stream starts the thread. If the thread can't
    /// be started, the stream is not added: nothing would flush it or send its mark when idle (T1).
    ///
    /// # Errors
    /// The thread can't be started.
    pub(crate) fn add(self: &Arc<Self>, id: StreamId, stream: OpenStream) -> Result<(), Exhausted> {
        let mut state = lock(&self.state);
        if state.running {
            self.waker.wake();
        } else {
            self.start(&mut state, Duration::ZERO)?;
        }
        state.streams.insert(id, stream);
        state.version += 1;
        Ok(())
    }

    /// Starts the thread, which begins its work after `pause`.
    fn start(self: &Arc<Self>, state: &mut State, pause: Duration) -> Result<(), Exhausted> {
        let background = Arc::clone(self);
        let builder = std::thread::Builder::new().name("riopipe-bg".into());
        let thread = move || {
            std::thread::sleep(pause);
            background.run();
        };
        builder.spawn(thread).map_err(|_| Exhausted::Threads)?;
        state.running = true;
        Ok(())
    }

    /// Removes a stream that has ended. Another stream may have its id already, because a closed
    /// stream may be opened again before the old one is dropped. That other stream stays.
    pub(crate) fn remove(&self, id: StreamId, handle: &Arc<StreamHandle>) {
        let mut state = lock(&self.state);
        if state.streams.get(&id).is_some_and(|open| Arc::ptr_eq(&open.handle, handle)) {
            state.streams.remove(&id);
            state.version += 1;
            self.waker.wake();
        }
    }

    /// The published marks of all open streams. It does not clone the streams, so the caller never has
    /// the last reference to one.
    pub(crate) fn watched(&self) -> Vec<(StreamId, Arc<Watched<StreamFailure>>)> {
        let state = lock(&self.state);
        let watched =
            |(id, stream): (&StreamId, &OpenStream)| (*id, Arc::clone(&stream.handle.watched));
        state.streams.iter().map(watched).collect()
    }

    /// Wakes the thread after an owner's call has ended, if the thread had taken the stream over or had
    /// requested it.
    pub(crate) fn wake(&self) {
        self.waker.wake();
    }

    /// The waker of the thread, for threads that wait for a stream.
    pub(crate) fn waker(&self) -> &Waker {
        &self.waker
    }

    /// The loop of the thread. It ends when no stream is open.
    fn run(self: &Arc<Self>) {
        let mut thread = Thread {
            background: self,
            version: 0,
            driver: BackgroundDriver::new(BackgroundConfig::default()),
            streams: BTreeMap::new(),
        };
        let mut events = Vec::new();
        while thread.refresh() {
            thread.round(now_ns(), &events);
            let next = thread.driver.deadline();
            let sleep = next.map(|at| Duration::from_nanos(at.saturating_sub(now_ns())));
            if let Err(error) = self.poller.wait(&mut events, sleep) {
                tracing::error!(%error, "the background thread cannot wait for events");
                std::thread::sleep(RETRY_PAUSE);
            }
        }
    }
}

/// The state of the thread.
struct Thread<'a> {
    background: &'a Arc<Background>,
    /// The version of the open streams that `streams` has.
    version: u64,
    driver: BackgroundDriver,
    /// Each stream, and whether the thread's poller watches the stream's poller.
    streams: BTreeMap<StreamId, (OpenStream, bool)>,
}

/// After a panic, another thread drives the streams that are open.
impl Drop for Thread<'_> {
    fn drop(&mut self) {
        if !std::thread::panicking() {
            return;
        }
        tracing::error!("the background thread has panicked; starting another one");
        for (stream, watched) in self.streams.values() {
            if *watched {
                // The next thread watches it again.
                let _ = self.background.poller.remove(stream.handle.poller());
            }
        }
        let mut state = lock(&self.background.state);
        state.running = false;
        // After a pause: the same panic may come again.
        if !state.streams.is_empty()
            && let Err(error) = self.background.start(&mut state, RETRY_PAUSE)
        {
            tracing::error!(%error, "no thread drives the streams that are open");
        }
    }
}

impl Thread<'_> {
    /// Adds new streams and removes ended ones. Returns false when none is left: the thread ends.
    fn refresh(&mut self) -> bool {
        let Self { background, version, driver, streams } = self;
        let mut state = lock(&background.state);
        if state.version == *version && !state.streams.is_empty() {
            return true;
        }
        *version = state.version;
        streams.retain(|id, (stream, watched)| {
            let open = state.streams.get(id);
            let same = open.is_some_and(|open| Arc::ptr_eq(&stream.shell, &open.shell));
            if !same {
                driver.remove(*id);
                if *watched {
                    // Another thread may still have the handle and call the owner: that would wake
                    // this thread, which would not receive the call.
                    let _ = background.poller.remove(stream.handle.poller());
                }
            }
            same
        });
        if state.streams.is_empty() {
            // The next stream that is opened starts a new thread, under this lock.
            state.running = false;
            return false;
        }
        for (id, stream) in &state.streams {
            streams.entry(*id).or_insert_with(|| {
                driver.add(*id);
                (stream.clone(), false)
            });
        }
        true
    }

    /// Drives the streams that have an event or are due, and checks whether the owners of the others
    /// call again.
    fn round(&mut self, now: u64, events: &[Event]) {
        let has_event = |id: StreamId| events.iter().any(|event| event.token == u64::from(id.0));
        let handle = |id| self.streams.get(&id).map(|(stream, _)| &stream.handle);
        let awaited = |id| handle(id).is_some_and(|handle| handle.watched.is_awaited());
        for (id, must_drive) in self.driver.due(now, has_event, awaited) {
            let Some((OpenStream { shell, handle }, _)) = self.streams.get(&id) else { continue };
            // Without a waiter the owner must not wake this thread at the end of each of its calls.
            let awaited = handle.watched.is_awaited();
            match if awaited { shell.take_or_ask() } else { shell.try_take() } {
                None => self.driver.on_owner_in_call(id, awaited, now),
                Some(mut shell) => {
                    let awaited = handle.watched.is_awaited();
                    let attention = shell.driver.attention_mut();
                    if self.driver.check(id, must_drive, awaited, attention, now) == Finding::Drive
                    {
                        let next = shell.background_turn(self.driver.config().flush_ns);
                        self.driver.on_driven(id, next);
                    }
                    let due_wakers = shell.take_due_wakers();
                    drop(shell);
                    wake_all(due_wakers);
                }
            }
            self.watch(id, now);
        }
    }

    /// Watches a stream that has been taken over, and no other.
    fn watch(&mut self, id: StreamId, now: u64) {
        let Some((OpenStream { handle, .. }, watched)) = self.streams.get_mut(&id) else { return };
        let poller = &self.background.poller;
        if !self.driver.has_taken_over(id) {
            if std::mem::take(watched) {
                // It is watched, so this can't fail.
                let _ = poller.remove(handle.poller());
            }
        } else if !*watched {
            *watched = poller.add(handle.poller(), u64::from(id.0), Interest::Read).is_ok();
            if !*watched {
                self.driver.on_unwatchable(id, now);
            }
        }
    }
}

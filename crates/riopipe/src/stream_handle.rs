//! The handle of a stream for other threads: they post messages to it, wake it, and read its marks.

use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, OnceLock};
use std::time::Duration;

use riopipe_net::{Interest, Poller, PollerError, Socket, now_ns};
use riopipe_order::attribute::Seq;
use riopipe_order::engine::Cause;
use riopipe_session::initiator::queue_pair::IoQueue;

use crate::failure::StreamFailure;
use crate::lock::lock;
use crate::published_marks::PublishedMarks;

/// The part of a stream that other threads use without taking the stream: the targets' threads,
/// watching threads, and event loops.
#[derive(Debug)]
pub(crate) struct StreamHandle {
    poller: Poller,
    waker: riopipe_net::Waker,
    pub(crate) messages: Mutex<Vec<StreamMessage>>,
    /// Whether another thread has interrupted the owner, and the driver does not know it yet.
    pub(crate) is_owner_interrupted: AtomicBool,
    /// The poller for the owner's event loop, if the owner uses one. Its descriptor is readable in three
    /// cases:
    ///
    /// - the stream's own poller is readable;
    /// - the background thread has moved a mark;
    /// - another thread has interrupted the owner.
    ///
    /// In the last two cases its waker has been called.
    event_loop_poller: OnceLock<Poller>,
    /// When each server last sent bytes to the stream, ns; 0: never. The servers' threads read it,
    /// because these bytes show that the server runs.
    received_at: Box<[AtomicU64]>,
    /// Watches share these marks, and may outlive the stream.
    pub(crate) published_marks: Arc<PublishedMarks<StreamFailure>>,
}

/// A message of a target's thread to a stream.
#[derive(Debug)]
pub(crate) enum StreamMessage {
    /// A connection for a link, and the queue to open on it.
    Connected { link: usize, socket: Socket, queue: Box<IoQueue> },
    /// The association to which a server's connections belong has ended. The loss of the server
    /// counts from `since`, ns.
    AssociationEnded { server: usize, since: u64 },
    /// A server will not come back.
    GiveUp { server: usize, cause: Cause },
}

impl StreamHandle {
    /// The handle of a stream with `servers` servers that continues after group `start`.
    pub(crate) fn new(start: Seq, servers: usize) -> Result<Arc<Self>, PollerError> {
        let poller = Poller::new()?;
        let waker = poller.waker();
        Ok(Arc::new(Self {
            poller,
            waker,
            messages: Mutex::default(),
            is_owner_interrupted: AtomicBool::new(false),
            event_loop_poller: OnceLock::new(),
            received_at: (0..servers).map(|_| AtomicU64::new(0)).collect(),
            published_marks: Arc::new(PublishedMarks::new(start)),
        }))
    }

    /// The stream's poller: readable when a socket of the stream is readable, or when the stream's waker
    /// has been called.
    pub(crate) fn poller(&self) -> &Poller {
        &self.poller
    }

    /// The poller for the owner's event loop. Makes it at the first call.
    pub(crate) fn event_loop_poller(&self) -> Result<&Poller, PollerError> {
        if self.event_loop_poller.get().is_none() {
            let event_loop_poller = Poller::new()?;
            event_loop_poller.add(&self.poller, 0, Interest::Read)?;
            // This fails if another thread has set one in the meantime. Then that one is used.
            let _ = self.event_loop_poller.set(event_loop_poller);
        }
        Ok(self.event_loop_poller.get().expect("it was set above, or by another thread before"))
    }

    /// Wakes the owner's event loop, if there is one: the background thread has moved a mark, or another
    /// thread has interrupted the owner.
    pub(crate) fn wake_event_loop(&self) {
        if let Some(event_loop_poller) = self.event_loop_poller.get() {
            event_loop_poller.waker().wake();
        }
    }

    /// Resets the waker of the event loop's poller. A call of the owner does this at its beginning,
    /// because it reads the marks and the interrupt itself.
    #[inline]
    pub(crate) fn reset_event_loop_poller(&self) {
        if let Some(event_loop_poller) = self.event_loop_poller.get()
            && event_loop_poller.is_woken()
        {
            // This only fails when the process is out of memory. The owner's call reads the marks and
            // the interrupt anyway.
            let _ = event_loop_poller.wait(&mut Vec::new(), Some(Duration::ZERO));
        }
    }

    /// The waker of the thread that drives the stream.
    pub(crate) fn waker(&self) -> &riopipe_net::Waker {
        &self.waker
    }

    /// Interrupts the owner: ends its present wait, or else its next one.
    pub(crate) fn interrupt_owner(&self) {
        self.is_owner_interrupted.store(true, Ordering::Release);
        // The background thread may be the first that reads the interrupt. The event loop must wake even
        // then.
        self.wake_event_loop();
        self.waker.wake();
    }

    /// Records that a server has sent bytes at `now`, ns.
    #[inline]
    pub(crate) fn record_received(&self, server: usize, now: u64) {
        self.received_at[server].store(now, Ordering::Relaxed);
    }

    /// When a server last sent bytes to the stream, ns; 0: never.
    pub(crate) fn last_received(&self, server: usize) -> u64 {
        self.received_at[server].load(Ordering::Relaxed)
    }

    /// Posts a message to the thread that drives the stream, and wakes that thread.
    pub(crate) fn post(&self, message: StreamMessage) {
        lock(&self.messages).push(message);
        self.waker.wake();
    }

    /// Takes the messages of the targets' threads.
    pub(crate) fn take_messages(&self) -> Vec<StreamMessage> {
        std::mem::take(&mut *lock(&self.messages))
    }

    /// Sleeps until bytes arrive, until the stream's waker is called, or until the time `deadline` (ns).
    /// Returns whether the waker was called: then there may be messages.
    pub(crate) fn sleep(&self, deadline: u64) -> bool {
        let remaining = Duration::from_nanos(deadline.saturating_sub(now_ns()));
        let mut events = Vec::new();
        self.poller.wait(&mut events, Some(remaining)).unwrap_or_else(|error| {
            tracing::error!(%error, "cannot sleep until an event; polling instead");
            false
        })
    }
}

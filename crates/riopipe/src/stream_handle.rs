//! The handle of a stream for other threads: they post messages to it, wake it, and read its marks.

use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, OnceLock};
use std::time::Duration;

use riopipe_net::{Interest, Poller, PollerError, Socket, now_ns};
use riopipe_order::attribute::Seq;
use riopipe_order::engine::Cause;
use riopipe_session::initiator::queue_pair::IoQueue;

use crate::failure::StreamFailure;
use crate::lock::lock;
use crate::watched::Watched;

/// The part of a stream that other threads use without taking the stream: the targets' threads,
/// watching threads, and event loops.
#[derive(Debug)]
pub(crate) struct StreamHandle {
    poller: Poller,
    waker: riopipe_net::Waker,
    pub(crate) messages: Mutex<Vec<StreamMessage>>,
    /// Another thread has called the owner.
    pub(crate) called: AtomicBool,
    /// The poller of an event loop, if there is one. It is readable when the stream's own poller is,
    /// when the background thread has moved a mark, and when another thread has called the owner. Its
    /// waker is for the latter two, the *news*.
    news: OnceLock<Poller>,
    /// Outlives the stream as long as a watch has it.
    pub(crate) watched: Arc<Watched<StreamFailure>>,
}

/// A message of a target's thread to a stream.
#[derive(Debug)]
pub(crate) enum StreamMessage {
    /// A connection to a server, and the queue to open on it.
    Connected { server: usize, socket: Socket, queue: Box<IoQueue> },
    /// The association to which a server's connections belong has ended.
    AssociationEnded { server: usize },
    /// A server will not come back.
    GiveUp { server: usize, cause: Cause },
}

impl StreamHandle {
    pub(crate) fn new(start: Seq) -> Result<Arc<Self>, PollerError> {
        let poller = Poller::new()?;
        let waker = poller.waker();
        let watched = Arc::new(Watched::new(start));
        let (messages, called, news) = (Mutex::default(), AtomicBool::new(false), OnceLock::new());
        Ok(Arc::new(Self { poller, waker, messages, called, news, watched }))
    }

    /// The stream's poller: readable when a socket of the stream is, or when it has been woken.
    pub(crate) fn poller(&self) -> &Poller {
        &self.poller
    }

    /// The poller for an event loop.
    pub(crate) fn news(&self) -> Result<&Poller, PollerError> {
        if self.news.get().is_none() {
            let news = Poller::new()?;
            news.add(&self.poller, 0, Interest::Read)?;
            // Another thread may have been faster.
            let _ = self.news.set(news);
        }
        Ok(self.news.get().expect("it was set above, or by another thread before"))
    }

    /// Wakes the event loop: the background thread has moved a mark, or another thread has called the
    /// owner.
    pub(crate) fn signal_news(&self) {
        if let Some(news) = self.news.get() {
            news.waker().wake();
        }
    }

    /// Clears the news: a call of the owner begins, and receives them.
    #[inline]
    pub(crate) fn clear_news(&self) {
        if let Some(news) = self.news.get()
            && news.is_woken()
        {
            // This only fails when the process is out of memory; the owner receives the news anyway.
            let _ = news.wait(&mut Vec::new(), Some(Duration::ZERO));
        }
    }

    /// The waker of the thread that drives the stream.
    pub(crate) fn waker(&self) -> &riopipe_net::Waker {
        &self.waker
    }

    /// Calls the owner: ends its present wait, or else its next one.
    pub(crate) fn call_owner(&self) {
        self.called.store(true, Ordering::Release);
        // The event loop must wake even if the background thread receives the call first.
        self.signal_news();
        self.waker.wake();
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

    /// Sleeps until bytes arrive, until the stream is woken, or until the time `until`. Returns
    /// whether it was woken: there may be messages.
    pub(crate) fn sleep(&self, until: u64) -> bool {
        let left = Duration::from_nanos(until.saturating_sub(now_ns()));
        let mut events = Vec::new();
        self.poller.wait(&mut events, Some(left)).unwrap_or_else(|error| {
            tracing::error!(%error, "cannot sleep until an event; polling instead");
            false
        })
    }
}

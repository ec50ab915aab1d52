//! The state that the threads of a device share.

use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError};

use riopipe::StreamWaker;
use riopipe_media::{AlignedBuf, Cause, Geometry, IoError};
use riopipe_order::block_device::Limits;
use riopipe_session::initiator::plain_device::PlainDevice;

use crate::inbox::Ticket;
use crate::reads::ReadQueue;

/// The decisions of the device, with the operations of queues as requests.
pub(crate) type Decisions = PlainDevice<Ticket, Arc<AlignedBuf>>;

/// The state that the threads of a device share.
pub(crate) struct Shared {
    decisions: Mutex<Decisions>,
    /// Interrupts the thread of each stream.
    wakers: Vec<StreamWaker>,
    /// Why the device has failed.
    failure: OnceLock<String>,
    pub(crate) reads: ReadQueue,
    pub(crate) geometry: Geometry,
    pub(crate) limits: Limits,
    /// Changes are done only when they are durable.
    pub(crate) is_write_through: bool,
    /// The threads are to end.
    is_ending: AtomicBool,
    /// They are to end without closing their streams.
    is_abandoned: AtomicBool,
}

impl Shared {
    pub(crate) fn new(
        decisions: Decisions,
        wakers: Vec<StreamWaker>,
        geometry: Geometry,
        is_write_through: bool,
    ) -> Self {
        let limits = Limits::new(geometry.blocks, &Arc::from(geometry.describe.as_str()));
        Self {
            decisions: Mutex::new(decisions),
            wakers,
            failure: OnceLock::new(),
            reads: ReadQueue::default(),
            geometry,
            limits,
            is_write_through,
            is_ending: AtomicBool::new(false),
            is_abandoned: AtomicBool::new(false),
        }
    }

    fn lock(&self) -> MutexGuard<'_, Decisions> {
        self.decisions.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Makes a decision, and carries out what follows: wakes threads, and returns results.
    pub(crate) fn decide<R>(&self, decide: impl FnOnce(&mut Decisions) -> R) -> R {
        let mut decisions = self.lock();
        let result = decide(&mut decisions);
        let to_wake = decisions.take_to_wake();
        let ended = decisions.take_ended();
        drop(decisions);
        for stream in to_wake {
            self.wakers[stream].wake();
        }
        for ended in ended {
            let result = match ended.is_done {
                true => Ok(None),
                false => Err(self.error(&ended.token)),
            };
            ended.token.end(result);
        }
        result
    }

    /// Fails the device for a reason. Only the first one counts.
    #[cold]
    pub(crate) fn fail(&self, why: String) {
        // The reason comes first: the error of a request that ends from now on has it.
        if self.failure.set(why).is_ok() {
            let why = self.failure().unwrap_or_default();
            tracing::error!(
                "{}: {why}. All writes and flushes fail from now on; reads go on. Attach the volume \
                 again when the cause is gone",
                self.geometry.describe
            );
        }
        self.decide(Decisions::fail);
    }

    /// Why the device has failed; `None` if it has not.
    pub(crate) fn failure(&self) -> Option<&str> {
        self.failure.get().map(String::as_str)
    }

    /// The error of an operation on a device that has failed.
    fn error(&self, ticket: &Ticket) -> IoError {
        let why = self.failure().unwrap_or("it is closed").to_owned();
        self.limits.error(ticket.what, ticket.lba, ticket.blocks, Cause::Failed(why))
    }

    /// Takes a read, or ends it if no thread reads any more.
    pub(crate) fn read(&self, ticket: Ticket) {
        if let Err(ticket) = self.reads.push(ticket) {
            let error = self.error(&ticket);
            ticket.end(Err(error));
        }
    }

    /// Ends all operations in flight, and all later ones, after the threads have ended.
    pub(crate) fn end_all(&self) {
        self.decide(Decisions::fail);
    }

    pub(crate) fn is_ending(&self) -> bool {
        self.is_ending.load(Ordering::Acquire)
    }

    pub(crate) fn is_abandoned(&self) -> bool {
        self.is_abandoned.load(Ordering::Acquire)
    }

    /// Asks all threads to end: to close their streams in order, or as in a crash.
    pub(crate) fn end_threads(&self, in_order: bool) {
        self.is_abandoned.store(!in_order, Ordering::Release);
        self.is_ending.store(true, Ordering::Release);
        self.reads.close();
        for waker in &self.wakers {
            waker.wake();
        }
    }
}

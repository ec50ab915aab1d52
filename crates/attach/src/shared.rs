//! The state that the threads of a device share.

use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError};
use std::time::Duration;

use riopipe::StreamWaker;
use riopipe_media::{AlignedBuf, Cause, Geometry, IoError};
use riopipe_order::block_device::Limits;
use riopipe_session::initiator::plain_device::PlainDevice;

use crate::inbox::Ticket;
use crate::reads::ReadQueue;

/// The time between two checks whether the device has failed.
const FAILURE_CHECK: Duration = Duration::from_millis(1);

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
    /// The threads are to end.
    is_ending: AtomicBool,
    /// They are to end without closing their streams.
    is_abandoned: AtomicBool,
}

impl Shared {
    pub(crate) fn new(decisions: Decisions, wakers: Vec<StreamWaker>, geometry: Geometry) -> Self {
        let limits = Limits::new(geometry.blocks, &Arc::from(geometry.describe.as_str()));
        Self {
            decisions: Mutex::new(decisions),
            wakers,
            failure: OnceLock::new(),
            reads: ReadQueue::default(),
            geometry,
            limits,
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
        // The reason comes first: the error of a request that ends from now on has it. The message comes
        // last, because reads wait for the decision.
        let is_first = self.failure.set(why).is_ok();
        self.decide(Decisions::fail);
        if is_first {
            let why = self.failure().unwrap_or_default();
            tracing::error!(
                "{}: {why}. All writes and flushes fail from now on, and reads of blocks whose newest \
                 content may be lost. Remove the cause, end this process, attach the volume again, and \
                 check what is on it",
                self.geometry.describe
            );
        }
    }

    /// Why the device has failed; `None` if it has not.
    pub(crate) fn failure(&self) -> Option<&str> {
        self.failure.get().map(String::as_str)
    }

    /// Why blocks that were read now may not be used: their newest content may be lost. `None`: they may.
    ///
    /// `has_failed_stream` was true after the read. The thread of that stream fails the device next, so
    /// its decision is awaited.
    pub(crate) fn doubt(&self, ticket: &Ticket, has_failed_stream: bool) -> Option<IoError> {
        let (lba, blocks) = (ticket.lba, ticket.blocks);
        loop {
            let decisions = self.lock();
            let is_decided = !has_failed_stream || decisions.has_failed();
            if is_decided && decisions.may_read(lba, blocks) {
                return None;
            }
            drop(decisions);
            // A stream that fails while the device closes fails nothing else.
            if is_decided || self.is_ending() {
                break;
            }
            std::thread::sleep(FAILURE_CHECK);
        }
        let why = self.failure().unwrap_or("a stream has failed while it closes");
        let cause =
            format!("their newest content may be lost, because the device has failed: {why}");
        Some(self.limits.error(ticket.what, lba, blocks, Cause::Failed(cause)))
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

#[cfg(test)]
mod tests {
    use riopipe_media::{BLOCK_BYTES, Operation};
    use riopipe_order::attribute::Seq;
    use riopipe_session::initiator::plain_device::{Layout, Work};

    use super::*;
    use crate::inbox::Inbox;

    fn ticket(inbox: &Arc<Inbox>, what: Operation, lba: u64) -> Ticket {
        Ticket { inbox: Arc::clone(inbox), op: 0, what, lba, blocks: 1 }
    }

    /// A read that has not waited for a stream that has failed waits for the decision of its thread.
    #[test]
    fn p9_blocks_in_doubt_are_not_read_after_a_failure() {
        let mut decisions = PlainDevice::new(Layout::new(1, 1, 1).unwrap(), [Seq(0)]);
        let inbox = Arc::new(Inbox::new().unwrap());
        let data = Arc::new(AlignedBuf::zeroed(BLOCK_BYTES));
        decisions.write(ticket(&inbox, Operation::Write, 7), 7, 1, data, false);
        decisions.take_to_wake();
        let Some(Work::Submit(_)) = decisions.next_work(0) else { panic!("the write") };
        decisions.on_submitted(0, Seq(1));
        let geometry = Geometry {
            block_size: BLOCK_BYTES as u32,
            blocks: 9,
            volatile_cache: true,
            atomic_block: true,
            describe: "volume".to_owned(),
        };
        let shared = Shared::new(decisions, Vec::new(), geometry);
        let [written, other] = [7, 8].map(|lba| ticket(&inbox, Operation::Read, lba));
        assert!(shared.doubt(&written, false).is_none(), "it has not failed");
        let doubt = std::thread::scope(|scope| {
            let read = scope.spawn(|| shared.doubt(&written, true));
            std::thread::sleep(5 * FAILURE_CHECK);
            shared.fail("a drive is broken".to_owned());
            read.join().unwrap()
        });
        let text = doubt.expect("its newest content may be lost").to_string();
        assert!(text.contains("may be lost") && text.contains("a drive is broken"), "{text}");
        assert!(shared.doubt(&other, true).is_none(), "nothing had changed it");
    }
}

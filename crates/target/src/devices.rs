//! The environment of a reactor's connections: drives, the shared state, the mailboxes of the other
//! reactors.

use std::sync::Arc;

use riopipe_media::{AlignedBuf, BlockDevice, Cause, Data, Done, IoError, Queue, Submitted};
use riopipe_order::gate;
use riopipe_session::stages::{Spent, Stages};
use riopipe_session::target::limits::BLOCK_SIZE;
use riopipe_session::target::{BoundedDevice, ConnId, Event, Message, OpId, Shared, TargetEnv};

use crate::counters::{Counter, Counters};
use crate::log::{Log, WatchedPart};
use crate::mail::Mailboxes;
use crate::shared::{SharedState, lock};
use crate::tcp::Tcp;

/// Largest number of operations in flight per drive and reactor; further ones wait here.
pub(crate) const QUEUE_DEPTH: usize = 512;

/// The mailboxes of the reactors.
pub(crate) type Mail = Mailboxes<Message<Devices, Tcp>>;

/// One reactor's access to the drives, and everything else that its connections need.
pub(crate) struct Devices {
    drives: Vec<DriveQueue>,
    parts: DevicesParts,
    /// Time of the current round, in ns; the clock is read once per round.
    pub(crate) now: u64,
    /// Completions of one poll. Empty between polls; it stays so that its memory is used again.
    done: Vec<Done>,
}

/// Everything that a reactor's connections need besides the drives.
pub(crate) struct DevicesParts {
    pub(crate) shared: SharedState,
    pub(crate) mail: Arc<Mail>,
    pub(crate) log: Option<Arc<Log>>,
    /// The counters of this reactor.
    pub(crate) counters: Arc<Counters>,
    /// The stages of all reactors.
    pub(crate) stages: Arc<Stages>,
}

/// A reactor's queue of a drive, with counters.
pub(crate) struct DriveQueue {
    queue: BoundedDevice<dyn Queue>,
    /// The reactor's counters.
    counters: Arc<Counters>,
}

impl DriveQueue {
    /// Counts the failure if the operation has failed within its call.
    #[inline]
    fn count_failure(&self, submitted: Submitted) -> Submitted {
        if let Submitted::Done(Err(error)) = &submitted {
            report_failure(error, &self.counters);
        }
        submitted
    }
}

impl BlockDevice for DriveQueue {
    type Buf = AlignedBuf;

    #[inline]
    fn write(&mut self, op: u64, lba: u64, data: Data<'_>) -> Submitted {
        self.counters.add(Counter::Writes, 1);
        self.counters.add(Counter::WrittenBytes, data.bytes().len() as u64);
        let submitted = self.queue.write(op, lba, data);
        self.count_failure(submitted)
    }

    #[inline]
    fn read(&mut self, op: u64, lba: u64, blocks: u64) -> Submitted {
        self.counters.add(Counter::Reads, 1);
        self.counters.add(Counter::ReadBytes, blocks * u64::from(BLOCK_SIZE));
        let submitted = self.queue.read(op, lba, blocks);
        self.count_failure(submitted)
    }

    fn flush(&mut self, op: u64) -> Submitted {
        self.counters.add(Counter::Flushes, 1);
        let submitted = self.queue.flush(op);
        self.count_failure(submitted)
    }

    fn write_zeroes(&mut self, op: u64, lba: u64, blocks: u64) -> Submitted {
        self.counters.add(Counter::Discards, 1);
        let submitted = self.queue.write_zeroes(op, lba, blocks);
        self.count_failure(submitted)
    }

    fn deallocate(&mut self, op: u64, lba: u64, blocks: u64) -> Submitted {
        self.counters.add(Counter::Discards, 1);
        let submitted = self.queue.deallocate(op, lba, blocks);
        self.count_failure(submitted)
    }

    fn kick(&mut self, now: u64) {
        self.queue.kick(now);
    }

    fn poll(&mut self, now: u64, done: &mut Vec<Done>) {
        let from = done.len();
        self.queue.poll(now, done);
        for error in done[from..].iter().filter_map(|done| done.result.as_ref().err()) {
            report_failure(error, &self.counters);
        }
    }

    fn next_deadline(&self) -> Option<u64> {
        self.queue.next_deadline()
    }

    fn in_flight(&self) -> usize {
        self.queue.in_flight()
    }
}

impl Devices {
    pub(crate) fn new(queues: Vec<Box<dyn Queue>>, parts: DevicesParts) -> Self {
        let drives = queues.into_iter().map(|queue| DriveQueue {
            queue: BoundedDevice::new(queue, QUEUE_DEPTH, AlignedBuf::copy_of),
            counters: Arc::clone(&parts.counters),
        });
        Self { drives: drives.collect(), parts, now: riopipe_platform::now_ns(), done: Vec::new() }
    }

    /// Submits the gathered operations and passes completions to `each`; returns their number.
    pub(crate) fn poll(
        &mut self,
        mut each: impl FnMut(&mut Self, OpId, Result<Option<AlignedBuf>, IoError>),
    ) -> usize {
        let mut count = 0;
        for ns in 0..self.drives.len() {
            let drive = &mut self.drives[ns];
            if drive.in_flight() == 0 {
                continue;
            }
            // The time is read again: a modelled drive computes from it.
            drive.kick(riopipe_platform::now_ns());
            let mut done = std::mem::take(&mut self.done);
            drive.poll(self.now, &mut done);
            count += done.len();
            for Done { op, result } in done.drain(..) {
                each(self, OpId(op), result);
            }
            self.done = done;
        }
        count
    }

    /// Time at which a modelled drive has its next completion, or another drive must be polled
    /// again, in nanoseconds.
    pub(crate) fn next_deadline(&self) -> Option<u64> {
        self.drives.iter().filter_map(BlockDevice::next_deadline).min()
    }

    /// Number of operations in flight.
    pub(crate) fn in_flight(&self) -> usize {
        self.drives.iter().map(BlockDevice::in_flight).sum()
    }

    /// Descriptors that become readable when a drive has completions.
    pub(crate) fn event_fds(&self) -> impl Iterator<Item = std::os::fd::RawFd> {
        self.drives.iter().filter_map(|d| d.queue.event_fd())
    }
}

impl TargetEnv for Devices {
    type Buf = AlignedBuf;
    type Device = DriveQueue;
    type Region = WatchedPart;

    #[inline]
    fn now(&self) -> u64 {
        self.now
    }

    fn alloc(&mut self, len: usize) -> Option<AlignedBuf> {
        Some(AlignedBuf::zeroed(len))
    }

    #[inline]
    fn device(&mut self, ns: usize) -> &mut DriveQueue {
        &mut self.drives[ns]
    }

    fn with_shared<T>(&mut self, f: impl FnOnce(&mut Shared<WatchedPart>) -> T) -> T {
        f(&mut lock(&self.parts.shared))
    }

    fn notify(&mut self, conn: ConnId) {
        self.parts.mail.notify(conn);
    }

    #[inline]
    fn watch_log(&mut self) {
        if let Some(log) = &self.parts.log {
            log.watch();
        }
    }

    fn log(&mut self, event: Event<'_>) {
        match event {
            Event::Connected { hostnqn, subnqn, cntlid, qid } => {
                self.parts.counters.add(Counter::Connections, 1);
                tracing::info!(hostnqn, subnqn, cntlid, qid, "connected");
            }
            Event::Refused { hostnqn, subnqn, qid, why, status } => {
                self.parts.counters.add(Counter::ConnectsRefused, 1);
                tracing::warn!(hostnqn, subnqn, qid, why, %status, "connect refused");
            }
            Event::Closed { hostnqn, cntlid, qid, why } => {
                tracing::info!(hostnqn, cntlid, qid, why, "connection closed");
            }
            Event::Claimed { hostnqn, cntlid, what } => {
                self.parts.counters.add(Counter::Claims, 1);
                tracing::info!(hostnqn, cntlid, what, "volume claimed");
            }
            Event::Full { connections } => tracing::warn!(
                "{connections} connections are open, no more are accepted until one ends: raise \
                 `connections` in the configuration, or find the host that opens so many"
            ),
            Event::Trouble { hostnqn, cntlid, qid, why } => {
                tracing::warn!(hostnqn, cntlid, qid, why, "trouble");
            }
        }
    }

    #[inline]
    fn instant(&self) -> u64 {
        riopipe_platform::now_ns()
    }

    #[inline]
    fn ordered(&mut self, requests: u64) {
        self.parts.counters.add(Counter::OrderedRequests, requests);
    }

    fn traced(&mut self, spent: &Spent) {
        self.parts.stages.record(spent);
    }

    fn stopped(&mut self, why: gate::Cause) {
        self.parts.counters.add(Counter::StreamsFailed, 1);
        match why {
            gate::Cause::LogFull => self.parts.counters.add(Counter::LogFull, 1),
            gate::Cause::LogFailed => self.parts.counters.add(Counter::LogFailed, 1),
            _ => {}
        }
    }
}

/// Counts a failed operation, and logs it.
#[cold]
fn report_failure(error: &IoError, counters: &Counters) {
    counters.add(Counter::DriveErrors, 1);
    match error.cause() {
        // Only a modelled drive returns this: a test has cut its power.
        Cause::PowerLost => tracing::warn!(%error, "a modelled drive has no power"),
        _ => tracing::error!(%error, "a drive failed"),
    }
}

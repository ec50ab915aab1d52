//! The world of a reactor's connections: drives, the shared state, the mailboxes of the others.

use std::collections::VecDeque;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use riopipe_media::{AlignedBuf, Cause, Data, Done, IoError, Queue};
use riopipe_order::gate;
use riopipe_session::stages::{Spent, Stages};
use riopipe_session::target::limits::BLOCK_SIZE;
use riopipe_session::target::{
    ConnId, DeviceError, Event, Host, OpId, Shared, Submitted, WriteData,
};

use crate::counters::{Counter, Counters};
use crate::log::WatchedPart;
use crate::mail::Mailboxes;

/// Operations in flight per drive and reactor; what comes on top waits its turn here.
pub(crate) const QUEUE_DEPTH: usize = 512;

/// A device buffer.
pub(crate) struct Buf(AlignedBuf);

impl AsRef<[u8]> for Buf {
    fn as_ref(&self) -> &[u8] {
        &self.0
    }
}

impl AsMut<[u8]> for Buf {
    fn as_mut(&mut self) -> &mut [u8] {
        &mut self.0
    }
}

/// What all connections of all reactors share, behind its lock.
pub(crate) type SharedState = Arc<Mutex<Shared<WatchedPart>>>;

/// Locks the shared state. A panic elsewhere leaves it usable: every change of it is complete
/// before anything that could panic.
pub(crate) fn lock(shared: &SharedState) -> MutexGuard<'_, Shared<WatchedPart>> {
    shared.lock().unwrap_or_else(PoisonError::into_inner)
}

/// One reactor's way to the drives, and everything else its connections need.
pub(crate) struct Devices {
    drives: Vec<DriveQueue>,
    shared: SharedState,
    mail: Arc<Mailboxes>,
    /// Read once per round.
    pub(crate) now: u64,
    /// Scratch space for completions.
    done: Vec<Done>,
    /// This reactor's own.
    counters: Arc<Counters>,
    /// Of all reactors.
    stages: Arc<Stages>,
}

struct DriveQueue {
    queue: Box<dyn Queue>,
    /// Asked for while the queue was full.
    backlog: VecDeque<Backlog>,
}

struct Backlog {
    op: OpId,
    lba: u64,
    what: What,
}

enum What {
    Write(AlignedBuf),
    Read(u64),
    Flush,
    Zero { blocks: u64, deallocate: bool },
}

impl Devices {
    pub(crate) fn new(
        queues: Vec<Box<dyn Queue>>,
        shared: SharedState,
        mail: Arc<Mailboxes>,
        counters: Arc<Counters>,
        stages: Arc<Stages>,
    ) -> Self {
        let drives = queues.into_iter().map(|queue| DriveQueue { queue, backlog: VecDeque::new() });
        let (drives, now) = (drives.collect(), riopipe_media::now());
        Self { drives, shared, mail, now, done: Vec::new(), counters, stages }
    }

    /// Starts what was gathered and hands what has finished to `each`; returns how much that was.
    pub(crate) fn poll(
        &mut self,
        mut each: impl FnMut(&mut Self, OpId, Result<Option<Buf>, DeviceError>),
    ) -> usize {
        let mut count = 0;
        for ns in 0..self.drives.len() {
            let drive = &mut self.drives[ns];
            if drive.queue.in_flight() == 0 {
                continue;
            }
            drive.queue.kick();
            let mut done = std::mem::take(&mut self.done);
            drive.queue.poll(self.now, &mut done);
            count += done.len();
            for Done { op, result } in done.drain(..) {
                let result = translate(result, &self.counters);
                each(self, OpId(op), result);
            }
            self.done = done;
            while let Some((op, result)) = self.next_of_backlog(ns) {
                count += 1;
                each(self, op, result);
            }
        }
        count
    }

    /// Submits what waited for room; stops at one that finishes within the call, to hand it out.
    fn next_of_backlog(&mut self, ns: usize) -> Option<(OpId, Result<Option<Buf>, DeviceError>)> {
        let drive = &mut self.drives[ns];
        while drive.queue.in_flight() < QUEUE_DEPTH {
            let Backlog { op, lba, what } = drive.backlog.pop_front()?;
            let submitted = match what {
                What::Write(data) => drive.queue.write(op.0, lba, Data::Owned(data)),
                What::Read(blocks) => drive.queue.read(op.0, lba, blocks),
                What::Flush => drive.queue.flush(op.0),
                What::Zero { blocks, deallocate: true } => {
                    drive.queue.deallocate(op.0, lba, blocks)
                }
                What::Zero { blocks, deallocate: false } => {
                    drive.queue.write_zeroes(op.0, lba, blocks)
                }
            };
            if let riopipe_media::Submitted::Done(result) = submitted {
                return Some((op, translate(result, &self.counters)));
            }
        }
        None
    }

    /// When a modelled drive will have something, nanoseconds.
    pub(crate) fn next_deadline(&self) -> Option<u64> {
        self.drives.iter().filter_map(|d| d.queue.next_deadline()).min()
    }

    /// Operations that have not come back.
    pub(crate) fn in_flight(&self) -> usize {
        self.drives.iter().map(|d| d.queue.in_flight() + d.backlog.len()).sum()
    }

    /// Descriptors that become readable when a drive has something.
    pub(crate) fn event_fds(&self) -> impl Iterator<Item = std::os::fd::RawFd> {
        self.drives.iter().filter_map(|d| d.queue.event_fd())
    }

    /// The queue of a drive, if there is room in it.
    #[inline]
    fn queue(&mut self, ns: usize) -> Result<&mut dyn Queue, &mut VecDeque<Backlog>> {
        let drive = &mut self.drives[ns];
        if drive.queue.in_flight() < QUEUE_DEPTH && drive.backlog.is_empty() {
            Ok(drive.queue.as_mut())
        } else {
            Err(&mut drive.backlog)
        }
    }
}

impl Host for Devices {
    type Buf = Buf;
    type Region = WatchedPart;

    #[inline]
    fn now(&self) -> u64 {
        self.now
    }

    fn alloc(&mut self, len: usize) -> Option<Buf> {
        Some(Buf(AlignedBuf::zeroed(len)))
    }

    #[inline]
    fn write(&mut self, ns: usize, op: OpId, lba: u64, data: WriteData<'_, Buf>) -> Submitted<Buf> {
        let bytes = match &data {
            WriteData::Borrowed(bytes) => bytes.len(),
            WriteData::Owned(Buf(buf)) => buf.len(),
        };
        self.counters.add(Counter::Writes, 1);
        self.counters.add(Counter::WrittenBytes, bytes as u64);
        match (self.queue(ns), data) {
            (Ok(queue), WriteData::Borrowed(bytes)) => {
                submitted(queue.write(op.0, lba, Data::Borrowed(bytes)), &self.counters)
            }
            (Ok(queue), WriteData::Owned(Buf(buf))) => {
                submitted(queue.write(op.0, lba, Data::Owned(buf)), &self.counters)
            }
            (Err(backlog), data) => {
                let data = match data {
                    WriteData::Borrowed(bytes) => AlignedBuf::copy_of(bytes),
                    WriteData::Owned(Buf(buf)) => buf,
                };
                backlog.push_back(Backlog { op, lba, what: What::Write(data) });
                Submitted::Pending
            }
        }
    }

    #[inline]
    fn read(&mut self, ns: usize, op: OpId, lba: u64, blocks: u32) -> Submitted<Buf> {
        self.counters.add(Counter::Reads, 1);
        self.counters.add(Counter::ReadBytes, u64::from(blocks) * u64::from(BLOCK_SIZE));
        match self.queue(ns) {
            Ok(queue) => submitted(queue.read(op.0, lba, blocks.into()), &self.counters),
            Err(backlog) => {
                backlog.push_back(Backlog { op, lba, what: What::Read(blocks.into()) });
                Submitted::Pending
            }
        }
    }

    fn flush(&mut self, ns: usize, op: OpId) -> Submitted<Buf> {
        self.counters.add(Counter::Flushes, 1);
        match self.queue(ns) {
            Ok(queue) => submitted(queue.flush(op.0), &self.counters),
            Err(backlog) => {
                backlog.push_back(Backlog { op, lba: 0, what: What::Flush });
                Submitted::Pending
            }
        }
    }

    fn zero(
        &mut self,
        ns: usize,
        op: OpId,
        lba: u64,
        blocks: u64,
        deallocate: bool,
    ) -> Submitted<Buf> {
        self.counters.add(Counter::Discards, 1);
        match self.queue(ns) {
            Ok(queue) if deallocate => {
                submitted(queue.deallocate(op.0, lba, blocks), &self.counters)
            }
            Ok(queue) => submitted(queue.write_zeroes(op.0, lba, blocks), &self.counters),
            Err(backlog) => {
                backlog.push_back(Backlog { op, lba, what: What::Zero { blocks, deallocate } });
                Submitted::Pending
            }
        }
    }

    fn with_shared<T>(&mut self, f: impl FnOnce(&mut Shared<WatchedPart>) -> T) -> T {
        f(&mut lock(&self.shared))
    }

    fn notify(&mut self, conn: ConnId) {
        self.mail.notify(conn);
    }

    fn log(&mut self, event: Event<'_>) {
        match event {
            Event::Connected { hostnqn, subnqn, cntlid, qid } => {
                self.counters.add(Counter::Connections, 1);
                tracing::info!(hostnqn, subnqn, cntlid, qid, "connected");
            }
            Event::Refused { hostnqn, subnqn, qid, why, status } => {
                self.counters.add(Counter::ConnectsRefused, 1);
                tracing::warn!(hostnqn, subnqn, qid, why, %status, "connect refused");
            }
            Event::Closed { hostnqn, cntlid, qid, why } => {
                tracing::info!(hostnqn, cntlid, qid, why, "connection closed");
            }
            Event::Claimed { hostnqn, cntlid, what } => {
                self.counters.add(Counter::Claims, 1);
                tracing::info!(hostnqn, cntlid, what, "volume claimed");
            }
            Event::Trouble { hostnqn, cntlid, qid, why } => {
                tracing::warn!(hostnqn, cntlid, qid, why, "trouble");
            }
        }
    }

    #[inline]
    fn instant(&self) -> u64 {
        riopipe_media::now()
    }

    #[inline]
    fn ordered(&mut self, requests: u64) {
        self.counters.add(Counter::OrderedRequests, requests);
    }

    fn traced(&mut self, spent: &Spent) {
        self.stages.record(spent);
    }

    fn stopped(&mut self, why: gate::Cause) {
        self.counters.add(Counter::StreamsFailed, 1);
        match why {
            gate::Cause::LogFull => self.counters.add(Counter::LogFull, 1),
            gate::Cause::LogFailed => self.counters.add(Counter::LogFailed, 1),
            _ => {}
        }
    }
}

#[inline]
fn submitted(submitted: riopipe_media::Submitted, counters: &Counters) -> Submitted<Buf> {
    match submitted {
        riopipe_media::Submitted::Done(result) => Submitted::Done(translate(result, counters)),
        riopipe_media::Submitted::Pending => Submitted::Pending,
    }
}

#[inline]
fn translate(
    result: Result<Option<AlignedBuf>, IoError>,
    counters: &Counters,
) -> Result<Option<Buf>, DeviceError> {
    match result {
        Ok(buf) => Ok(buf.map(Buf)),
        Err(error) => Err(explain(&error, counters)),
    }
}

#[cold]
fn explain(error: &IoError, counters: &Counters) -> DeviceError {
    counters.add(Counter::DriveErrors, 1);
    match error.cause() {
        // Only a modelled drive knows: somebody has cut its power, to see what happens.
        Cause::PowerLost => tracing::warn!(%error, "a modelled drive has no power"),
        _ => tracing::error!(%error, "a drive failed"),
    }
    match error.cause() {
        Cause::OutOfRange { .. } => DeviceError::OutOfRange,
        Cause::NoSpace(_) => DeviceError::NoSpace,
        Cause::Vanished(_) => DeviceError::Vanished,
        Cause::PowerLost => DeviceError::PowerLost,
        Cause::BadLength { .. } | Cause::QueueFull { .. } | Cause::Failed(_) => DeviceError::Failed,
    }
}

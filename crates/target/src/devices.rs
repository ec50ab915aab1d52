//! The environment of a reactor's core: drives, the shared state, the mailboxes of the other
//! reactors, counters, and the clock.
//!
//! [`Devices`] implements [`TargetEnv`], through which the pure core reaches everything outside of
//! it. [`DriveQueue`] is a queue to one drive that counts its operations.

use std::sync::Arc;

use riopipe_media::{AlignedBuf, BlockDevice, Cause, Data, Done, IoError, Queue, Submitted};
use riopipe_order::gate;
use riopipe_order::write_order::{EpochId, WriteOrder};
use riopipe_session::auth::dh::DhJob;
use riopipe_session::stages::{Spent, Stages};
use riopipe_session::target::limits::BLOCK_SIZE;
use riopipe_session::target::{
    BoundedDevice, ConnId, Event, Message, OpId, Shared, TargetEnv, WrongDigest,
};

use crate::counters::{Counter, Counters};
use crate::exponents::Exponents;
use crate::hosts::Hosts;
use crate::log::{Log, WatchedPart};
use crate::mail::Mailboxes;
use crate::removed_drive::RemovedDrive;
use crate::shared::{SharedState, lock};
use crate::tcp::Tcp;

/// Largest number of operations of one reactor that are in flight at one drive. Further operations
/// wait in the [`DriveQueue`].
pub(crate) const QUEUE_DEPTH: usize = 512;

/// The mailboxes of the reactors.
pub(crate) type ReactorMailboxes = Mailboxes<Message<Devices, Tcp>>;

/// One reactor's access to the drives, and everything else that its connections need.
pub(crate) struct Devices {
    /// A queue for each drive, in the order of the namespaces.
    drives: Vec<DriveQueue>,
    parts: DevicesParts,
    /// The host of the connection that has just become a queue.
    pub(crate) connected_host: Option<String>,
    /// Time of the current round, in ns; the clock is read once per round.
    pub(crate) now: u64,
    /// The completions of one poll. The vector is empty between polls, and is kept so that a poll
    /// allocates nothing.
    completions: Vec<Done>,
}

/// Everything that a reactor's connections need besides the drives.
pub(crate) struct DevicesParts {
    pub(crate) shared: SharedState,
    pub(crate) mailboxes: Arc<ReactorMailboxes>,
    pub(crate) log: Option<Arc<Log>>,
    /// The counters of this reactor.
    pub(crate) counters: Arc<Counters>,
    /// The counters of this reactor for each drive, in the order of the namespaces.
    pub(crate) drive_counters: Vec<Arc<Counters>>,
    /// The hosts of all reactors.
    pub(crate) hosts: Arc<Hosts>,
    /// The stages of all reactors.
    pub(crate) stages: Arc<Stages>,
    /// The exponentiations of all reactors.
    pub(crate) exponents: Arc<Exponents>,
}

/// A reactor's queue of a drive, with counters.
pub(crate) struct DriveQueue {
    queue: BoundedDevice<dyn Queue>,
    /// The reactor's counters for this drive.
    counters: Arc<Counters>,
}

impl DriveQueue {
    fn new(queue: Box<dyn Queue>, counters: Arc<Counters>) -> Self {
        Self { queue: BoundedDevice::new(queue, QUEUE_DEPTH, AlignedBuf::copy_of), counters }
    }

    /// Counts and logs the failure of an operation that has failed within its call.
    #[inline]
    fn report_if_failed(&self, submitted: Submitted) -> Submitted {
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
        self.report_if_failed(submitted)
    }

    #[inline]
    fn write_in_order(
        &mut self,
        op: u64,
        lba: u64,
        data: Data<'_>,
        order: WriteOrder,
    ) -> Submitted {
        self.counters.add(Counter::Writes, 1);
        self.counters.add(Counter::WrittenBytes, data.bytes().len() as u64);
        let submitted = self.queue.write_in_order(op, lba, data, order);
        self.report_if_failed(submitted)
    }

    fn has_fua(&self) -> bool {
        self.queue.has_fua()
    }

    fn write_durably(&mut self, op: u64, lba: u64, data: Data<'_>) -> Submitted {
        self.counters.add(Counter::Writes, 1);
        self.counters.add(Counter::WrittenBytes, data.bytes().len() as u64);
        let submitted = self.queue.write_durably(op, lba, data);
        self.report_if_failed(submitted)
    }

    fn zero_durably(&mut self, op: u64, lba: u64, blocks: u64, deallocate: bool) -> Submitted {
        self.counters.add(Counter::Discards, 1);
        let submitted = self.queue.zero_durably(op, lba, blocks, deallocate);
        self.report_if_failed(submitted)
    }

    fn flush_epochs(&mut self, op: u64, before: EpochId) -> Submitted {
        self.counters.add(Counter::Flushes, 1);
        let submitted = self.queue.flush_epochs(op, before);
        self.report_if_failed(submitted)
    }

    fn start_stream(&mut self, op: u64, first: EpochId) -> Submitted {
        let submitted = self.queue.start_stream(op, first);
        self.report_if_failed(submitted)
    }

    #[inline]
    fn read(&mut self, op: u64, lba: u64, blocks: u64) -> Submitted {
        self.counters.add(Counter::Reads, 1);
        self.counters.add(Counter::ReadBytes, blocks * u64::from(BLOCK_SIZE));
        let submitted = self.queue.read(op, lba, blocks);
        self.report_if_failed(submitted)
    }

    fn flush(&mut self, op: u64) -> Submitted {
        self.counters.add(Counter::Flushes, 1);
        let submitted = self.queue.flush(op);
        self.report_if_failed(submitted)
    }

    fn write_zeroes(&mut self, op: u64, lba: u64, blocks: u64) -> Submitted {
        self.counters.add(Counter::Discards, 1);
        let submitted = self.queue.write_zeroes(op, lba, blocks);
        self.report_if_failed(submitted)
    }

    fn deallocate(&mut self, op: u64, lba: u64, blocks: u64) -> Submitted {
        self.counters.add(Counter::Discards, 1);
        let submitted = self.queue.deallocate(op, lba, blocks);
        self.report_if_failed(submitted)
    }

    fn take_back(&mut self, op: u64) -> bool {
        self.queue.take_back(op)
    }

    fn kick(&mut self, now: u64) {
        self.queue.kick(now);
    }

    fn poll(&mut self, now: u64, done: &mut Vec<Done>) {
        let first_new = done.len();
        self.queue.poll(now, done);
        for completion in &done[first_new..] {
            if let Err(error) = &completion.result {
                report_failure(error, &self.counters);
            }
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
        let drives = queues
            .into_iter()
            .zip(&parts.drive_counters)
            .map(|(queue, counters)| DriveQueue::new(queue, Arc::clone(counters)));
        Self {
            drives: drives.collect(),
            parts,
            connected_host: None,
            now: riopipe_platform::now_ns(),
            completions: Vec::new(),
        }
    }

    /// Adds the queue of the drive of a namespace, at the namespace's index. Returns the descriptor
    /// to watch, if the queue has one.
    pub(crate) fn add_drive(
        &mut self,
        index: usize,
        queue: Box<dyn Queue>,
        counters: Arc<Counters>,
    ) -> Option<std::os::fd::RawFd> {
        // A place may be free because an earlier addition was taken back.
        while self.drives.len() <= index {
            self.drives.push(DriveQueue::new(Box::new(RemovedDrive), Arc::default()));
        }
        self.drives[index] = DriveQueue::new(queue, counters);
        self.drives[index].queue.event_fd()
    }

    /// Drops the queue of a drive if none of its operations is in flight. Returns whether it is
    /// dropped.
    pub(crate) fn remove_drive(&mut self, index: usize) -> bool {
        match self.drives.get_mut(index) {
            Some(drive) if drive.in_flight() > 0 => false,
            Some(drive) => {
                let counters = Arc::clone(&drive.counters);
                *drive = DriveQueue::new(Box::new(RemovedDrive), counters);
                true
            }
            None => true,
        }
    }

    /// The hosts of all reactors.
    pub(crate) fn hosts(&self) -> &Hosts {
        &self.parts.hosts
    }

    /// Submits the gathered operations of all drives, and passes their completions to `on_done`.
    /// Returns the number of completions.
    pub(crate) fn poll(
        &mut self,
        mut on_done: impl FnMut(&mut Self, OpId, Result<Option<AlignedBuf>, IoError>),
    ) -> usize {
        let mut count = 0;
        for index in 0..self.drives.len() {
            let drive = &mut self.drives[index];
            if drive.in_flight() == 0 {
                continue;
            }
            // The clock is read again, because a modelled drive computes completion times from the
            // time of a submission.
            drive.kick(riopipe_platform::now_ns());
            let mut completions = std::mem::take(&mut self.completions);
            drive.poll(self.now, &mut completions);
            count += completions.len();
            for Done { op, result } in completions.drain(..) {
                on_done(self, OpId(op), result);
            }
            self.completions = completions;
        }
        count
    }

    /// Time in ns at which a drive must be polled even if no event comes: for the next completion
    /// of a modelled drive, or for another attempt to submit.
    pub(crate) fn next_deadline(&self) -> Option<u64> {
        self.drives.iter().filter_map(BlockDevice::next_deadline).min()
    }

    /// Number of operations in flight at all drives.
    pub(crate) fn in_flight(&self) -> usize {
        self.drives.iter().map(BlockDevice::in_flight).sum()
    }

    /// Descriptors that become readable when a drive has completions.
    pub(crate) fn event_fds(&self) -> impl Iterator<Item = std::os::fd::RawFd> {
        self.drives.iter().filter_map(|drive| drive.queue.event_fd())
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
        Some(AlignedBuf::with_any_content(len))
    }

    #[inline]
    fn device(&mut self, ns: usize) -> &mut DriveQueue {
        &mut self.drives[ns]
    }

    fn with_shared<T>(&mut self, f: impl FnOnce(&mut Shared<WatchedPart>) -> T) -> T {
        f(&mut lock(&self.parts.shared))
    }

    fn notify(&mut self, conn: ConnId) {
        self.parts.mailboxes.notify(conn);
    }

    #[inline]
    fn watch_log(&mut self) {
        if let Some(log) = &self.parts.log {
            log.watch();
        }
    }

    fn log(&mut self, event: Event<'_>) {
        match event {
            Event::Connected { peer, hostnqn, subnqn, cntlid, qid } => {
                self.parts.counters.add(Counter::Connections, 1);
                self.connected_host = Some(hostnqn.to_owned());
                tracing::info!(peer, hostnqn, subnqn, cntlid, qid, "connected");
            }
            Event::Refused { peer, hostnqn, subnqn, qid, why, status } => {
                self.parts.counters.add(Counter::ConnectsRefused, 1);
                self.parts.hosts.on_refused(hostnqn);
                tracing::warn!(peer, hostnqn, subnqn, qid, why, %status, "connect refused");
            }
            Event::Closed { peer, hostnqn, cntlid, qid, why } => {
                tracing::info!(peer, hostnqn, cntlid, qid, why, "connection closed");
            }
            Event::Claimed { peer, hostnqn, cntlid, what } => {
                self.parts.counters.add(Counter::Claims, 1);
                tracing::info!(peer, hostnqn, cntlid, what, "volume claimed");
            }
            Event::Full { connections } => tracing::warn!(
                "{connections} connections are open, no more are accepted until one ends: raise \
                 `connections` in the configuration, or find the host that opens so many"
            ),
            Event::AuthenticationFailed { peer, hostnqn, qid, why } => {
                self.parts.counters.add(Counter::AuthenticationsFailed, 1);
                self.parts.hosts.on_refused(hostnqn);
                tracing::warn!(peer, hostnqn, qid, why, "authentication failed");
            }
            Event::Displaced { peer } => {
                self.parts.counters.add(Counter::ConnectionsDisplaced, 1);
                tracing::warn!(
                    peer,
                    "a connection that was not admitted gave way to another one: too many are open"
                );
            }
            Event::NotAdmitted { peer, why } => {
                self.parts.counters.add(Counter::ConnectionsTimedOut, 1);
                tracing::warn!(peer, why, "connection not admitted");
            }
            Event::DigestError { peer, hostnqn, cntlid, qid, digest } => match digest {
                WrongDigest::Header => {
                    self.parts.counters.add(Counter::HeaderDigestErrors, 1);
                    tracing::warn!(peer, hostnqn, cntlid, qid, "a header has a wrong digest");
                }
                WrongDigest::Data { cid, opcode } => {
                    self.parts.counters.add(Counter::DataDigestErrors, 1);
                    let why = "the data of a command has a wrong digest";
                    tracing::warn!(peer, hostnqn, cntlid, qid, cid, opcode, "{why}");
                }
            },
            Event::Trouble { peer, hostnqn, cntlid, qid, why } => {
                self.parts.hosts.on_problem(hostnqn);
                tracing::warn!(peer, hostnqn, cntlid, qid, why, "trouble");
            }
        }
    }

    fn exponentiate(&mut self, conn: ConnId, job: DhJob) {
        self.parts.exponents.submit(conn, job);
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
        // Only a modelled drive returns this cause, after a test has cut its power.
        Cause::PowerLost => tracing::warn!(%error, "a modelled drive has no power"),
        _ => tracing::error!(%error, "a drive failed"),
    }
}

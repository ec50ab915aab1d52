//! Operations of a drive with an order-preserving FTL that wait for others.
//!
//! - A write is *held back* while the tables have no space for it.
//! - A FLUSH waits for writes that have not arrived.
//! - With power-loss protection a write completes only when it is mapped, since a completed write
//!   is durable (assumption M3).

use alloc::vec::Vec;

use riopipe_order::block_device::{Cause, IoError, Operation};
use riopipe_order::write_order::{EpochId, EpochWrite, WriteOrder};

use super::contents::{Contents, Ticket};
use super::{Command, Model, Name, PageList, QueueId};
use crate::ssd::Pages;
use crate::ssd::op::{self, Admission, Awaited, FlushState, PageState};
use crate::ssd::versions::VersionId;

/// The operations that wait, each kind in the order in which they came.
pub(super) struct Waiting<Page> {
    writes: Vec<HeldWrite<Page>>,
    flushes: Vec<WaitingFlush>,
    unmapped: Vec<UnmappedWrite>,
    /// The cache is being written back to free the tables.
    is_writing_back: bool,
}

/// A write that is held back.
struct HeldWrite<Page> {
    name: Name,
    lba: u64,
    pages: PageList<Page>,
    write: EpochWrite,
}

/// The outcome of an attempt to begin a write.
enum TriedWrite<Page> {
    /// It is in flight.
    Begun,
    /// It has failed, and its streams have stopped.
    Refused,
    /// It is held back.
    HeldBack(HeldWrite<Page>),
}

/// A FLUSH that has not begun.
struct WaitingFlush {
    name: Name,
    awaited: Awaited,
}

/// A write that has landed, but is not mapped.
struct UnmappedWrite {
    name: Name,
    lba: u64,
    blocks: u64,
    order: WriteOrder,
    pages: Vec<VersionId>,
}

/// An operation that waits, as the caller of [`Model::end_waiting`] sees it.
pub(super) struct WaitingOperation {
    queue: QueueId,
    streams: [Option<u16>; 2],
}

impl WaitingOperation {
    fn of_write(name: Name, order: WriteOrder) -> Self {
        let streams = match order {
            WriteOrder::Epochs(EpochWrite { own, follower, .. }) => {
                [Some(own.stream), follower.map(|follower| follower.stream)]
            }
            WriteOrder::Orderless | WriteOrder::Ordered { .. } => [None; 2],
        };
        Self { queue: name.queue, streams }
    }

    fn of_flush(flush: &WaitingFlush) -> Self {
        let stream = match flush.awaited {
            Awaited::Epochs { stream, .. } => Some(stream),
            Awaited::Completed(_) => None,
        };
        Self { queue: flush.name.queue, streams: [stream, None] }
    }
}

impl<Page> Waiting<Page> {
    pub(super) const fn new() -> Self {
        Self {
            writes: Vec::new(),
            flushes: Vec::new(),
            unmapped: Vec::new(),
            is_writing_back: false,
        }
    }

    const fn is_empty(&self) -> bool {
        self.writes.is_empty() && self.flushes.is_empty() && self.unmapped.is_empty()
    }
}

impl<P: Pages> Model<P> {
    /// Whether operations wait for others, so that [`next_due`](Self::next_due) does not include
    /// them.
    #[inline]
    pub const fn has_waiting(&self) -> bool {
        !self.waiting.is_empty()
    }

    /// Submits a write that the drive can execute.
    #[inline]
    pub(super) fn submit_write(
        &mut self,
        now: u64,
        name: Name,
        (lba, pages, order): (u64, PageList<P::Page>, WriteOrder),
    ) {
        let blocks = pages.as_slice().len() as u64;
        let (due, ticket) = match (&mut self.contents, order) {
            (Contents::Barrier(store), WriteOrder::Ordered { barrier }) => {
                let (epoch, due) = store.admit(barrier, self.timing.write(now, blocks));
                (due, Ticket::Barrier(epoch))
            }
            (Contents::Epochs(_), WriteOrder::Epochs(write)) => {
                let write = HeldWrite { name, lba, pages, write };
                match self.try_write(now, write, self.waiting.writes.len()) {
                    TriedWrite::Begun => {}
                    TriedWrite::Refused => self.wake(now),
                    TriedWrite::HeldBack(held) => {
                        self.waiting.writes.push(held);
                        self.begin_write_back(now);
                    }
                }
                return;
            }
            _ => (self.timing.write(now, blocks), Ticket::Orderless),
        };
        self.begin(due, Some(name), Command::Write { lba, pages, order }, ticket);
    }

    /// Begins a write if the tables have space for it. `earlier` is the number of the writes that
    /// are held back and came before it.
    fn try_write(
        &mut self,
        now: u64,
        held: HeldWrite<P::Page>,
        earlier: usize,
    ) -> TriedWrite<P::Page> {
        let Contents::Epochs(ftl) = &mut self.contents else { return TriedWrite::HeldBack(held) };
        let blocks = held.pages.as_slice().len() as u64;
        let earlier = self.waiting.writes[..earlier].iter().map(|held| &held.write);
        let admission = ftl.admit(held.write, blocks, earlier);
        let admitted = match admission {
            Admission::HeldBack => return TriedWrite::HeldBack(held),
            Admission::Admitted(ticket) => Ok(ticket),
            Admission::Refused(cause) => Err(cause),
        };
        let HeldWrite { name, lba, pages, write } = held;
        let command = Command::Write { lba, pages, order: WriteOrder::Epochs(write) };
        match admitted {
            Ok(ticket) => {
                let due = self.timing.write(now, blocks);
                self.begin(due, Some(name), command, Ticket::Epochs(ticket));
                TriedWrite::Begun
            }
            Err(cause) => {
                let error = self.limits.error(Operation::Write, lba, blocks, cause);
                self.refuse(name, command, error);
                TriedWrite::Refused
            }
        }
    }

    /// Submits a FLUSH.
    pub(super) fn submit_flush(&mut self, now: u64, name: Name, command: Command<P::Page>) {
        if let Contents::Epochs(ftl) = &self.contents {
            let awaited = match command {
                Command::FlushEpochs { before } => ftl.awaited(before),
                // What has completed is durable.
                _ if self.profile.plp => Awaited::Completed(0),
                _ => Awaited::Completed(ftl.versions().next_id()),
            };
            self.waiting.flushes.push(WaitingFlush { name, awaited });
            return self.wake(now);
        }
        let due = self.timing.flush(now);
        self.begin(due, Some(name), command, Ticket::Orderless);
    }

    /// Notes a write that completes when its pages are mapped.
    pub(super) fn wait_for_mapping(
        &mut self,
        name: Name,
        order: WriteOrder,
        (lba, blocks): (u64, u64),
        pages: Vec<VersionId>,
    ) {
        self.waiting.unmapped.push(UnmappedWrite { name, lba, blocks, order, pages });
    }

    /// Continues all operations that need not wait any more. This is called after each change that
    /// they may have waited for.
    #[inline]
    pub(super) fn wake(&mut self, now: u64) {
        if !self.waiting.is_empty() {
            self.wake_waiting(now);
        }
    }

    fn wake_waiting(&mut self, now: u64) {
        let mut index = 0;
        while index < self.waiting.writes.len() {
            let held = self.waiting.writes.remove(index);
            match self.try_write(now, held, index) {
                TriedWrite::Begun => {}
                // The streams of the write have stopped, which may end writes before it.
                TriedWrite::Refused => index = 0,
                TriedWrite::HeldBack(held) => {
                    self.waiting.writes.insert(index, held);
                    index += 1;
                }
            }
        }
        self.wake_unmapped();
        self.wake_flushes(now);
        self.begin_write_back(now);
    }

    /// Writes the cache back while writes are held back: mapped pages free the tables. It ends when
    /// all that is in the cache now has been programmed.
    fn begin_write_back(&mut self, now: u64) {
        let Contents::Epochs(ftl) = &self.contents else { return };
        let is_needed = !self.waiting.writes.is_empty() && ftl.has_dirty();
        if is_needed && !self.waiting.is_writing_back {
            self.waiting.is_writing_back = true;
            let due = self.timing.drained(now);
            self.begin(due, None, Command::Flush, Ticket::Orderless);
        }
    }

    /// Ends a write-back, whose pages have been programmed.
    pub(super) const fn end_write_back(&mut self) {
        self.waiting.is_writing_back = false;
    }

    /// Completes the writes whose pages are mapped, or never can be.
    fn wake_unmapped(&mut self) {
        let Contents::Epochs(ftl) = &self.contents else { return };
        let mut ended = Vec::new();
        for mut write in core::mem::take(&mut self.waiting.unmapped) {
            let mut failure = None;
            write.pages.retain(|id| match ftl.state(*id) {
                PageState::Mapped => false,
                PageState::Waiting => true,
                PageState::Failed(cause) => {
                    failure = Some(cause);
                    true
                }
            });
            let error = |cause| self.limits.error(Operation::Write, write.lba, write.blocks, cause);
            match failure.map(error) {
                Some(error) => ended.push((write.name, Err(error))),
                None if write.pages.is_empty() => ended.push((write.name, Ok(None))),
                None => self.waiting.unmapped.push(write),
            }
        }
        for (name, result) in ended {
            self.add_completion(name, result);
        }
    }

    /// Begins the FLUSHes for which all has arrived.
    fn wake_flushes(&mut self, now: u64) {
        for flush in core::mem::take(&mut self.waiting.flushes) {
            let Contents::Epochs(ftl) = &self.contents else { return };
            match ftl.flush_state(flush.awaited) {
                FlushState::Waiting => self.waiting.flushes.push(flush),
                FlushState::Ready => {
                    let due = self.timing.flush(now);
                    self.begin(due, Some(flush.name), Command::Flush, Ticket::Orderless);
                }
                FlushState::Failed(cause) => {
                    let error = self.limits.error(Operation::Flush, 0, 0, cause);
                    self.add_completion(flush.name, Err(error));
                }
            }
        }
    }

    /// Ends all operations that wait and belong to `queue`: they fail. A queue that is about to be
    /// closed must not wait for what may never come.
    pub fn end_waiting_of(&mut self, now: u64, queue: QueueId) {
        let cause = Cause::Failed("the queue was closed".into());
        self.end_waiting(|operation| operation.queue == queue, &cause);
        self.wake(now);
    }

    /// Ends operations that wait: they fail, and the streams of writes that were held back stop.
    /// Returns their number.
    pub(super) fn end_waiting(
        &mut self,
        ends: impl Fn(&WaitingOperation) -> bool,
        cause: &Cause,
    ) -> u64 {
        let mut ended: Vec<(Name, IoError)> = Vec::new();
        let limits = &self.limits;
        let error = |what, lba, blocks| limits.error(what, lba, blocks, cause.clone());
        for held in core::mem::take(&mut self.waiting.writes) {
            let order = WriteOrder::Epochs(held.write);
            if !ends(&WaitingOperation::of_write(held.name, order)) {
                self.waiting.writes.push(held);
                continue;
            }
            let blocks = held.pages.as_slice().len() as u64;
            ended.push((held.name, error(Operation::Write, held.lba, blocks)));
            for page in held.pages.as_slice() {
                self.contents.pages_mut().release(*page);
            }
            self.contents.refuse(order);
        }
        for write in core::mem::take(&mut self.waiting.unmapped) {
            match ends(&WaitingOperation::of_write(write.name, write.order)) {
                true => ended.push((write.name, error(Operation::Write, write.lba, write.blocks))),
                false => self.waiting.unmapped.push(write),
            }
        }
        for flush in core::mem::take(&mut self.waiting.flushes) {
            match ends(&WaitingOperation::of_flush(&flush)) {
                true => ended.push((flush.name, error(Operation::Flush, 0, 0))),
                false => self.waiting.flushes.push(flush),
            }
        }
        let count = ended.len() as u64;
        for (name, error) in ended {
            self.add_completion(name, Err(error));
        }
        count
    }

    /// Resets the controller: all streams end, as with [`Command::StartStream`], and begin with the
    /// epoch `first`.
    pub fn reset_streams(&mut self, now: u64, first: u16) {
        let used = match &self.contents {
            Contents::Epochs(ftl) => ftl.used_streams(),
            Contents::Barrier(_) => alloc::vec![0],
            Contents::Orderless(_) => return,
        };
        for stream in used {
            self.start_stream(EpochId { stream, epoch: 0 });
        }
        if let Contents::Epochs(ftl) = &mut self.contents {
            ftl.reset(first);
        }
        // FLUSHes may wait for streams without a write.
        let cause = Cause::Failed("the controller was reset".into());
        self.end_waiting(|operation| operation.streams[0].is_some(), &cause);
        self.wake(now);
    }

    /// Begins a stream anew: see [`Command::StartStream`].
    pub(super) fn start_stream(&mut self, first: EpochId) {
        if let Contents::Barrier(store) = &mut self.contents {
            return store.start();
        }
        let stream = first.stream;
        let cause = Cause::StreamRestarted { stream };
        let mut ended = Vec::new();
        for slot in 0..self.ops.len() {
            let ticket = self.ops[slot].as_ref().and_then(|operation| operation.ticket.epochs());
            let Some(ticket) = ticket.filter(|ticket| ticket.has(stream)) else { continue };
            // The slot is free when the operation would have been due.
            let Some(operation) = self.ops[slot].take() else { continue };
            let (what, lba, blocks) = operation.command.extent();
            if let Command::Write { pages, .. } = &operation.command {
                self.release(pages);
            }
            ended.push((ticket, blocks));
            let error = self.limits.error(what, lba, blocks, cause.clone());
            if let Some(name) = operation.name {
                self.add_completion(name, Err(error));
            }
        }
        self.end_waiting(|operation| operation.streams.contains(&Some(stream)), &cause);
        if let Contents::Epochs(ftl) = &mut self.contents {
            ftl.start(first, &ended as &[(op::Ticket, u64)]);
        }
    }
}

//! The drive as a state machine: operations are submitted with the time, and complete when they are
//! due.
//!
//! ```text
//! submit ──▶ in flight, ordered by completion time ── advance ──▶ inbox of the queue ──▶ take_done
//! ```

use alloc::boxed::Box;
use alloc::collections::BinaryHeap;
use alloc::sync::Arc;
use alloc::vec::Vec;
use core::cmp::Reverse;
use core::slice;

use riopipe_order::block_device::{Cause, Done, IoError, Limits, Operation};
use riopipe_order::write_order::{DriveOrder, EpochId, WriteOrder};

use super::store::Position;
use super::{Order, Pages, PowerCut, Profile, Timing};
use contents::{Contents, InFlightBlock, Ticket};
use waiting::Waiting;

mod contents;
mod waiting;

/// A modelled drive with its data.
///
/// An operation takes effect when it completes, in the order of completion times. Until then a
/// power cut may apply any part of it, as far as the order of the drive allows that. A read returns
/// the content at its completion.
pub struct Model<P: Pages> {
    profile: &'static Profile,
    order: Order,
    timing: Timing,
    contents: Contents<P>,
    /// The operations that wait for others, so that it is not known when they complete.
    waiting: Waiting<P::Page>,
    /// The completion times of the operations in flight, the earliest first.
    due: BinaryHeap<Reverse<DueOperation>>,
    /// The operations in flight, by slot.
    ops: Vec<Option<InFlightOperation<P::Page>>>,
    /// The free slots of `ops`.
    free_slots: Vec<u32>,
    /// Number of operations submitted so far.
    submitted_count: u64,
    /// The completions of each queue, by the number of the queue.
    inboxes: Vec<Inbox<P::Buf>>,
    limits: Limits,
    /// Whether the power is off.
    is_off: bool,
    /// Time of the latest submission in ns.
    last_submission: u64,
}

/// The completion time of an operation in flight. The order is that of the fields.
#[derive(PartialEq, Eq, PartialOrd, Ord)]
struct DueOperation {
    /// Completion time in ns.
    due: u64,
    /// The number of the submission, which makes the order total.
    submission: u64,
    /// The operation's slot in [`Model::ops`].
    slot: u32,
}

/// The queue that submitted an operation and receives its completion.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct QueueId(u32);

/// An operation of the drive.
#[derive(Debug, Clone)]
pub enum Command<Page> {
    /// Write.
    Write {
        /// First block.
        lba: u64,
        /// The contents, block by block. The drive owns them from now on, even if it refuses the
        /// write.
        pages: PageList<Page>,
        /// Its place in the order that the drive keeps.
        order: WriteOrder,
    },
    /// Write zeroes, or deallocate: deallocated blocks read as zeroes, too (trap T10).
    Zeroes {
        /// One of these two operations.
        what: Operation,
        /// First block.
        lba: u64,
        /// Number of blocks.
        blocks: u64,
    },
    /// Read.
    Read {
        /// First block.
        lba: u64,
        /// Number of blocks.
        blocks: u64,
    },
    /// Make durable all writes that have completed by now (assumption M2).
    Flush,
    /// Make durable all writes of the stream in epochs before this one, also those that come later.
    FlushEpochs {
        /// The first epoch that is not covered.
        before: EpochId,
    },
    /// Begin the stream anew with this epoch. Its operations in flight fail. What is in order
    /// becomes durable, the rest of the stream is lost. A drive with a cache barrier has one
    /// sequence of epochs, and any stream stands for it.
    StartStream {
        /// The first epoch.
        first: EpochId,
    },
}

impl<Page> Command<Page> {
    /// The operation, its first block and its number of blocks.
    fn extent(&self) -> (Operation, u64, u64) {
        match self {
            Self::Write { lba, pages, .. } => {
                (Operation::Write, *lba, pages.as_slice().len() as u64)
            }
            Self::Zeroes { what, lba, blocks } => (*what, *lba, *blocks),
            Self::Read { lba, blocks } => (Operation::Read, *lba, *blocks),
            Self::Flush | Self::FlushEpochs { .. } => (Operation::Flush, 0, 0),
            Self::StartStream { .. } => (Operation::StartStream, 0, 0),
        }
    }

    /// Whether a drive with this order can execute the command.
    const fn is_kept_by(&self, kind: DriveOrder) -> bool {
        match self {
            Self::Write { order, .. } => kind.keeps(*order),
            Self::Zeroes { .. } | Self::Read { .. } | Self::Flush => true,
            Self::FlushEpochs { .. } => matches!(kind, DriveOrder::Epochs),
            Self::StartStream { .. } => matches!(kind, DriveOrder::Epochs | DriveOrder::Barrier),
        }
    }
}

/// The contents of one write, block by block. Most writes have one block.
#[derive(Debug, Clone)]
pub enum PageList<Page> {
    /// One block.
    One(Page),
    /// Any number.
    Many(Box<[Page]>),
}

impl<Page> PageList<Page> {
    /// All contents, in order.
    #[inline]
    pub fn as_slice(&self) -> &[Page] {
        match self {
            PageList::One(page) => slice::from_ref(page),
            PageList::Many(pages) => pages,
        }
    }
}

/// An operation that has not completed.
struct InFlightOperation<Page> {
    /// The queue and the caller's name of the operation. `None`: the drive does it by itself.
    name: Option<Name>,
    command: Command<Page>,
    /// The place of a write in the order of the drive.
    ticket: Ticket,
    /// The writes that had completed when the operation began. A flush makes them durable.
    completed_before: Position,
}

/// The queue of an operation, and the caller's name for the operation.
#[derive(Debug, Clone, Copy)]
struct Name {
    queue: QueueId,
    op: u64,
}

/// The completions of a queue that were not taken yet.
struct Inbox<Buf> {
    done: Vec<Done<Buf>>,
    /// Whether the queue is open. The inbox of a closed queue is used again.
    is_open: bool,
}

impl<P: Pages> Model<P> {
    /// A drive over `pages` that keeps no order. `seed` determines the spread of completion times.
    pub fn new(profile: &'static Profile, pages: P, seed: u64) -> Self {
        Self::with_order(profile, Order::NONE, pages, seed)
    }

    /// A drive over `pages` that keeps an order. `seed` determines the spread of completion times,
    /// and in which order the cache is written back.
    pub fn with_order(profile: &'static Profile, order: Order, pages: P, seed: u64) -> Self {
        let name = Arc::from(alloc::format!("ssd:{}", profile.name));
        Self {
            profile,
            order,
            timing: Timing::with_order(profile, order, seed),
            limits: Limits::new(pages.blocks(), &name),
            contents: Contents::new(profile, order, pages, seed),
            waiting: Waiting::new(),
            due: BinaryHeap::new(),
            ops: Vec::new(),
            free_slots: Vec::new(),
            submitted_count: 0,
            inboxes: Vec::new(),
            is_off: false,
            last_submission: 0,
        }
    }

    /// The store of the blocks' contents.
    pub const fn pages(&self) -> &P {
        self.contents.pages()
    }

    /// The store of the blocks' contents, to allocate pages for writes.
    pub const fn pages_mut(&mut self) -> &mut P {
        self.contents.pages_mut()
    }

    /// The contents of a block before each completed write that a power cut may still take, oldest
    /// first.
    pub fn older_contents(&self, lba: u64) -> impl Iterator<Item = P::Page> {
        self.contents.older_contents(lba)
    }

    /// Capacity in blocks.
    pub fn blocks(&self) -> u64 {
        self.contents.pages().blocks()
    }

    /// Opens a queue. Completions of its operations are kept until [`take_done`](Self::take_done).
    pub fn open_queue(&mut self) -> QueueId {
        let closed_inbox = self.inboxes.iter().position(|inbox| !inbox.is_open);
        let index = closed_inbox.unwrap_or_else(|| {
            self.inboxes.push(Inbox { done: Vec::new(), is_open: true });
            self.inboxes.len() - 1
        });
        self.inboxes[index].is_open = true;
        QueueId(index as u32)
    }

    /// Closes a queue, which must have nothing in flight.
    pub fn close_queue(&mut self, queue: QueueId) {
        let inbox = &mut self.inboxes[queue.0 as usize];
        inbox.done.clear();
        inbox.is_open = false;
    }

    /// Completes all operations that are due at `now`.
    #[inline]
    pub fn advance(&mut self, now: u64) {
        while let Some(Reverse(DueOperation { due, slot, .. })) = self.due.peek()
            && *due <= now
        {
            let (due, slot) = (*due, *slot);
            self.due.pop();
            self.complete(due, slot);
        }
    }

    /// Time at which the next operation of any queue is due.
    #[inline]
    pub fn next_due(&self) -> Option<u64> {
        self.due.peek().map(|Reverse(operation)| operation.due)
    }

    /// Moves the completions of `queue` to the end of `done`; returns their number.
    pub fn take_done(&mut self, queue: QueueId, done: &mut Vec<Done<P::Buf>>) -> usize {
        let inbox = &mut self.inboxes[queue.0 as usize].done;
        let count = inbox.len();
        done.append(inbox);
        count
    }

    /// Cuts the power at `now`. Everything in flight fails with [`Cause::PowerLost`]. `seed`
    /// decides which of the blocks that may be lost are lost. The drive stays off until
    /// [`power_on`](Self::power_on).
    pub fn power_cut(&mut self, now: u64, seed: u64) -> PowerCut {
        self.advance(now);
        let mut in_flight: Vec<_> = self.due.drain().map(|Reverse(operation)| operation).collect();
        in_flight.sort_unstable();
        let mut blocks_in_flight = Vec::new();
        let mut count = 0;
        for operation in &in_flight {
            let Some(operation) = self.take_operation(operation.slot) else { continue };
            let InFlightOperation { name, command, ticket, .. } = operation;
            let Some(name) = name else { continue };
            let (what, lba, blocks) = command.extent();
            match command {
                Command::Write { lba, pages, .. } => {
                    let pages = pages.as_slice().iter();
                    let written = (lba..).zip(pages);
                    blocks_in_flight.extend(written.map(|(lba, page)| InFlightBlock {
                        lba,
                        page: *page,
                        ticket,
                    }));
                }
                Command::Zeroes { lba, blocks, .. } => {
                    let zeroed = (lba..lba + blocks).map(|lba| InFlightBlock {
                        lba,
                        page: P::ZEROES,
                        ticket,
                    });
                    blocks_in_flight.extend(zeroed);
                }
                Command::Read { .. }
                | Command::Flush
                | Command::FlushEpochs { .. }
                | Command::StartStream { .. } => {}
            }
            let error = self.limits.error(what, lba, blocks, Cause::PowerLost);
            self.add_completion(name, Err(error));
            count += 1;
        }
        count += self.end_waiting(|_| true, &Cause::PowerLost);
        let mut cut = self.contents.power_cut(blocks_in_flight, seed);
        cut.in_flight = count;
        self.timing = Timing::with_order(self.profile, self.order, seed);
        self.end_write_back();
        self.is_off = true;
        cut
    }

    /// Makes all completed writes durable, without taking time.
    pub fn make_all_durable(&mut self) {
        let all = self.contents.position();
        self.contents.make_durable(all);
    }

    /// Turns the power on. The contents that the cut left are durable. All streams begin with epoch
    /// 0.
    pub fn power_on(&mut self) {
        self.is_off = false;
    }

    /// Submits a command. A refused command completes at once.
    #[inline]
    pub fn submit(&mut self, now: u64, queue: QueueId, op: u64, command: Command<P::Page>) {
        let name = Name { queue, op };
        // The clocks of the callers may differ a little; the drive's time never decreases.
        let now = now.max(self.last_submission);
        self.last_submission = now;
        // Operations that are due take effect first, because a flush must cover them.
        self.advance(now);
        let (what, lba, blocks) = command.extent();
        let in_bounds = match command {
            Command::Flush | Command::FlushEpochs { .. } | Command::StartStream { .. } => Ok(()),
            Command::Zeroes { .. } => self.limits.extent(what, lba, blocks),
            Command::Write { .. } | Command::Read { .. } => self.limits.blocks(what, lba, blocks),
        };
        let refused = match in_bounds {
            Err(error) => Some(error),
            Ok(()) if self.is_off => Some(self.limits.error(what, lba, blocks, Cause::PowerLost)),
            Ok(()) if !command.is_kept_by(self.order.kind) => {
                Some(self.limits.error(what, lba, blocks, Cause::OrderNotKept))
            }
            Ok(()) => None,
        };
        if let Some(error) = refused {
            self.refuse(name, command, error);
            return self.wake(now);
        }
        match command {
            Command::Write { lba, pages, order } => {
                self.submit_write(now, name, (lba, pages, order));
            }
            Command::Flush | Command::FlushEpochs { .. } => {
                self.submit_flush(now, name, command);
            }
            Command::StartStream { first } => {
                self.start_stream(first);
                let due = self.timing.flush(now);
                self.begin(due, Some(name), command, Ticket::Orderless);
                self.wake(now);
            }
            Command::Zeroes { .. } => {
                let due = self.timing.update_tables(now);
                self.begin(due, Some(name), command, Ticket::Orderless);
            }
            Command::Read { lba, blocks } => {
                let due = self.timing.read(now, lba, blocks);
                self.begin(due, Some(name), command, Ticket::Orderless);
            }
        }
    }

    /// Begins an operation that completes at `due`.
    #[inline]
    fn begin(&mut self, due: u64, name: Option<Name>, command: Command<P::Page>, ticket: Ticket) {
        let completed_before = self.contents.position();
        let operation = InFlightOperation { name, command, ticket, completed_before };
        let slot = self.add_operation(operation);
        self.due.push(Reverse(DueOperation { due, submission: self.submitted_count, slot }));
        self.submitted_count += 1;
    }

    /// Puts an operation into a free slot; returns the slot.
    #[inline]
    fn add_operation(&mut self, operation: InFlightOperation<P::Page>) -> u32 {
        match self.free_slots.pop() {
            Some(slot) => {
                self.ops[slot as usize] = Some(operation);
                slot
            }
            None => {
                self.ops.push(Some(operation));
                (self.ops.len() - 1) as u32
            }
        }
    }

    /// Takes an operation out of its slot when it is due. Returns `None` if it has ended before.
    fn take_operation(&mut self, slot: u32) -> Option<InFlightOperation<P::Page>> {
        // A slot is in `due` exactly once, from the begin of its operation until here.
        self.free_slots.push(slot);
        self.ops[slot as usize].take()
    }

    /// Completes the operation in a slot, which was due at `now`: it takes effect now.
    #[inline]
    fn complete(&mut self, now: u64, slot: u32) {
        let Some(operation) = self.take_operation(slot) else { return };
        let InFlightOperation { name, command, ticket, completed_before } = operation;
        let (what, lba, blocks) = command.extent();
        let result = match command {
            Command::Write { lba, pages, order } => {
                match self.contents.write(lba, pages.as_slice(), ticket) {
                    Ok(unmapped) if !unmapped.is_empty() && self.profile.plp => {
                        if let Some(name) = name {
                            self.wait_for_mapping(name, order, (lba, blocks), unmapped);
                        }
                        return self.wake(now);
                    }
                    Ok(_) => Ok(None),
                    Err(cause) => Err(cause),
                }
            }
            Command::Zeroes { lba, blocks, .. } => (lba..lba + blocks)
                .try_for_each(|lba| self.contents.write(lba, &[P::ZEROES], ticket).map(|_| ()))
                .map(|()| None),
            Command::Read { lba, blocks } => self.contents.pages().read(lba, blocks).map(Some),
            Command::Flush | Command::FlushEpochs { .. } => {
                self.contents.make_durable(completed_before);
                Ok(None)
            }
            Command::StartStream { .. } => Ok(None),
        };
        let result = result.map_err(|cause| self.limits.error(what, lba, blocks, cause));
        match name {
            Some(name) => self.add_completion(name, result),
            None => self.end_write_back(),
        }
        self.wake(now);
    }

    /// Completes a command with an error at once, and frees the pages that it brought. A write in
    /// an order stops its streams.
    #[cold]
    fn refuse(&mut self, name: Name, command: Command<P::Page>, error: IoError) {
        if let Command::Write { pages, order, .. } = command {
            self.release(&pages);
            self.contents.refuse(order);
        }
        self.add_completion(name, Err(error));
    }

    /// Frees the pages of a write.
    fn release(&mut self, pages: &PageList<P::Page>) {
        for page in pages.as_slice() {
            self.contents.pages_mut().release(*page);
        }
    }

    /// Adds a completion to the inbox of a queue. A closed queue needs none.
    #[inline]
    fn add_completion(&mut self, name: Name, result: Result<Option<P::Buf>, IoError>) {
        let Name { queue, op } = name;
        let inbox = &mut self.inboxes[queue.0 as usize];
        if inbox.is_open {
            inbox.done.push(Done { op, result });
        }
    }
}

#[cfg(test)]
mod tests;

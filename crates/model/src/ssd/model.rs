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

use super::store::{InFlightBlock, Position, Store};
use super::{Pages, PowerCut, Profile, Timing};

/// A modelled drive with its data.
///
/// An operation takes effect when it completes, in the order of completion times. Until then a
/// power cut may apply any part of it. A read returns the content at its completion.
pub struct Model<P: Pages> {
    profile: &'static Profile,
    timing: Timing,
    store: Store<P>,
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
}

impl<Page> Command<Page> {
    /// The operation, its first block and its number of blocks.
    fn extent(&self) -> (Operation, u64, u64) {
        match self {
            Self::Write { lba, pages } => (Operation::Write, *lba, pages.as_slice().len() as u64),
            Self::Zeroes { what, lba, blocks } => (*what, *lba, *blocks),
            Self::Read { lba, blocks } => (Operation::Read, *lba, *blocks),
            Self::Flush => (Operation::Flush, 0, 0),
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
    queue: QueueId,
    /// The caller's name of the operation.
    op: u64,
    command: Command<Page>,
    /// The writes that had completed when the operation was submitted. A flush makes them durable.
    completed_before: Position,
}

/// The completions of a queue that were not taken yet.
struct Inbox<Buf> {
    done: Vec<Done<Buf>>,
    /// Whether the queue is open. The inbox of a closed queue is used again.
    is_open: bool,
}

impl<P: Pages> Model<P> {
    /// A drive over `pages`. `seed` determines the spread of completion times.
    pub fn new(profile: &'static Profile, pages: P, seed: u64) -> Self {
        let name = Arc::from(alloc::format!("ssd:{}", profile.name));
        Self {
            profile,
            timing: Timing::new(profile, seed),
            limits: Limits::new(pages.blocks(), &name),
            store: Store::new(pages, profile.losable_blocks),
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
        self.store.pages()
    }

    /// The store of the blocks' contents, to allocate pages for writes.
    pub const fn pages_mut(&mut self) -> &mut P {
        self.store.pages_mut()
    }

    /// The contents of a block before each completed write that a power cut may still take, oldest
    /// first.
    pub fn older_contents(&self, lba: u64) -> impl Iterator<Item = P::Page> {
        self.store.older_contents(lba)
    }

    /// Capacity in blocks.
    pub fn blocks(&self) -> u64 {
        self.store.pages().blocks()
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
            let slot = *slot;
            self.due.pop();
            self.complete(slot);
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
        for operation in &in_flight {
            let InFlightOperation { queue, op, command, .. } = self.take_operation(operation.slot);
            let (what, lba, blocks) = command.extent();
            match command {
                Command::Write { lba, pages } => {
                    let pages = pages.as_slice().iter();
                    let written =
                        (lba..).zip(pages).map(|(lba, page)| InFlightBlock { lba, page: *page });
                    blocks_in_flight.extend(written);
                }
                Command::Zeroes { lba, blocks, .. } => {
                    let zeroed =
                        (lba..lba + blocks).map(|lba| InFlightBlock { lba, page: P::ZEROES });
                    blocks_in_flight.extend(zeroed);
                }
                Command::Read { .. } | Command::Flush => {}
            }
            let error = self.limits.error(what, lba, blocks, Cause::PowerLost);
            self.add_completion(queue, op, Err(error));
        }
        let mut cut = self.store.power_cut(&blocks_in_flight, seed);
        cut.in_flight = in_flight.len() as u64;
        self.timing = Timing::new(self.profile, seed);
        self.is_off = true;
        cut
    }

    /// Makes all completed writes durable, without taking time.
    pub fn make_all_durable(&mut self) {
        let all = self.store.position();
        self.store.make_durable(all);
    }

    /// Turns the power on. The contents that the cut left are durable.
    pub fn power_on(&mut self) {
        self.is_off = false;
    }

    /// Submits a command. A refused command completes at once.
    #[inline]
    pub fn submit(&mut self, now: u64, queue: QueueId, op: u64, command: Command<P::Page>) {
        // The clocks of the callers may differ a little; the drive's time never decreases.
        let now = now.max(self.last_submission);
        self.last_submission = now;
        // Operations that are due take effect first, because a flush must cover them.
        self.advance(now);
        let (what, lba, blocks) = command.extent();
        let in_bounds = match command {
            Command::Flush => Ok(()),
            Command::Zeroes { .. } => self.limits.extent(what, lba, blocks),
            Command::Write { .. } | Command::Read { .. } => self.limits.blocks(what, lba, blocks),
        };
        if let Err(error) = in_bounds {
            return self.refuse(queue, op, command, error);
        }
        if self.is_off {
            let error = self.limits.error(what, lba, blocks, Cause::PowerLost);
            return self.refuse(queue, op, command, error);
        }
        let due = match &command {
            Command::Write { pages, .. } => self.timing.write(now, pages.as_slice().len() as u64),
            Command::Zeroes { .. } => self.timing.update_tables(now),
            Command::Read { lba, blocks } => self.timing.read(now, *lba, *blocks),
            Command::Flush => self.timing.flush(now),
        };
        let completed_before = self.store.position();
        let slot = self.add_operation(InFlightOperation { queue, op, command, completed_before });
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

    /// Takes an operation in flight out of its slot.
    fn take_operation(&mut self, slot: u32) -> InFlightOperation<P::Page> {
        self.free_slots.push(slot);
        // A slot is in `due` exactly once, from the submission of its operation until here.
        self.ops[slot as usize].take().expect("an op in flight")
    }

    /// Completes the operation in a slot: it takes effect now.
    #[inline]
    fn complete(&mut self, slot: u32) {
        let operation = self.take_operation(slot);
        let (what, lba, blocks) = operation.command.extent();
        let result = match operation.command {
            Command::Write { lba, pages } => self.write(lba, pages.as_slice()).map(|()| None),
            Command::Zeroes { lba, blocks, .. } => (lba..lba + blocks)
                .try_for_each(|lba| self.store.put(lba, P::ZEROES))
                .map(|()| None),
            Command::Read { lba, blocks } => self.store.pages().read(lba, blocks).map(Some),
            Command::Flush => {
                self.store.make_durable(operation.completed_before);
                Ok(None)
            }
        };
        let result = result.map_err(|cause| self.limits.error(what, lba, blocks, cause));
        self.add_completion(operation.queue, operation.op, result);
    }

    /// Writes blocks from `lba` on. After a failure the blocks behind it are not written.
    fn write(&mut self, lba: u64, pages: &[P::Page]) -> Result<(), Cause> {
        let mut result = Ok(());
        for (lba, page) in (lba..).zip(pages) {
            match result {
                Ok(()) => result = self.store.put(lba, *page),
                Err(_) => self.store.pages_mut().release(*page),
            }
        }
        result
    }

    /// Completes a command with an error at once, and frees the pages that it brought.
    #[cold]
    fn refuse(&mut self, queue: QueueId, op: u64, command: Command<P::Page>, error: IoError) {
        if let Command::Write { pages, .. } = command {
            for page in pages.as_slice() {
                self.store.pages_mut().release(*page);
            }
        }
        self.add_completion(queue, op, Err(error));
    }

    /// Adds a completion to the inbox of a queue. A closed queue needs none.
    #[inline]
    fn add_completion(&mut self, queue: QueueId, op: u64, result: Result<Option<P::Buf>, IoError>) {
        let inbox = &mut self.inboxes[queue.0 as usize];
        if inbox.is_open {
            inbox.done.push(Done { op, result });
        }
    }
}

#[cfg(test)]
mod tests;

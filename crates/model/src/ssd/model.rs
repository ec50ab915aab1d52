//! The drive as a state machine: operations are submitted with the time, and complete when they are
//! due.

use alloc::boxed::Box;
use alloc::collections::BinaryHeap;
use alloc::sync::Arc;
use alloc::vec::Vec;
use core::cmp::Reverse;
use core::slice;

use riopipe_order::block_device::{Cause, Done, IoError, Limits, Operation};

use super::store::{Position, Store};
use super::{Pages, PowerCut, Profile, Timing};

/// A modelled drive with its data.
///
/// An operation takes effect when it completes, in the order of completion times. Until then a
/// power cut may apply any part of it. A read returns the content at its completion.
pub struct Model<P: Pages> {
    profile: &'static Profile,
    timing: Timing,
    store: Store<P>,
    /// Operations in flight by completion time, then by number of submission, so that the order is
    /// total.
    due: BinaryHeap<Reverse<(u64, u64, u32)>>,
    ops: Vec<Option<Op<P::Page>>>,
    free_ops: Vec<u32>,
    submitted: u64,
    inboxes: Vec<Inbox<P::Buf>>,
    limits: Limits,
    off: bool,
    /// Time of the latest submission.
    now: u64,
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
    /// Write zeroes, or deallocate: deallocated blocks read as zeroes, too (T10).
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
    /// Make durable all writes that have completed by now (M2).
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

struct Op<Page> {
    queue: QueueId,
    op: u64,
    command: Command<Page>,
    /// For a flush: the writes that it covers.
    covers: Position,
}

struct Inbox<Buf> {
    done: Vec<Done<Buf>>,
    open: bool,
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
            free_ops: Vec::new(),
            submitted: 0,
            inboxes: Vec::new(),
            off: false,
            now: 0,
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
    pub fn older(&self, lba: u64) -> impl Iterator<Item = P::Page> {
        self.store.older(lba)
    }

    /// Capacity in blocks.
    pub fn blocks(&self) -> u64 {
        self.store.pages().blocks()
    }

    /// Opens a queue. Completions of its operations are kept until [`take_done`](Self::take_done).
    pub fn open_queue(&mut self) -> QueueId {
        let closed = self.inboxes.iter().position(|inbox| !inbox.open);
        let index = closed.unwrap_or_else(|| {
            self.inboxes.push(Inbox { done: Vec::new(), open: true });
            self.inboxes.len() - 1
        });
        self.inboxes[index].open = true;
        QueueId(index as u32)
    }

    /// Closes a queue, which must have nothing in flight.
    pub fn close_queue(&mut self, queue: QueueId) {
        let inbox = &mut self.inboxes[queue.0 as usize];
        inbox.done.clear();
        inbox.open = false;
    }

    /// Completes all operations that are due at `now`.
    #[inline]
    pub fn advance(&mut self, now: u64) {
        while let Some(Reverse((due, _, slot))) = self.due.peek()
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
        self.due.peek().map(|Reverse((due, _, _))| *due)
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
        let mut blocks_in_flight = Vec::new();
        let mut in_flight = 0;
        let mut order: Vec<_> = self.due.drain().map(|Reverse(entry)| entry).collect();
        order.sort_unstable();
        for (_, _, slot) in order {
            in_flight += 1;
            let op = self.take_op(slot);
            let (what, lba, blocks) = op.command.extent();
            match op.command {
                Command::Write { lba, pages } => {
                    blocks_in_flight.extend((lba..).zip(pages.as_slice().iter().copied()));
                }
                Command::Zeroes { lba, blocks, .. } => {
                    blocks_in_flight.extend((lba..lba + blocks).map(|lba| (lba, P::ZEROES)));
                }
                Command::Read { .. } | Command::Flush => {}
            }
            self.answer(
                op.queue,
                op.op,
                Err(self.limits.error(what, lba, blocks, Cause::PowerLost)),
            );
        }
        let mut cut = self.store.power_cut(&blocks_in_flight, seed);
        cut.in_flight = in_flight;
        self.timing = Timing::new(self.profile, seed);
        self.off = true;
        cut
    }

    /// Makes all completed writes durable, without taking time.
    pub fn make_all_durable(&mut self) {
        let all = self.store.position();
        self.store.make_durable(all);
    }

    /// Turns the power on. The contents that the cut left are durable.
    pub fn power_on(&mut self) {
        self.off = false;
    }

    /// Submits a command. A refused command completes at once.
    #[inline]
    pub fn submit(&mut self, now: u64, queue: QueueId, op: u64, command: Command<P::Page>) {
        // The clocks of the callers may differ a little; the drive's time never decreases.
        let now = now.max(self.now);
        self.now = now;
        // Operations that are due take effect first: a flush must cover them.
        self.advance(now);
        let (what, lba, blocks) = command.extent();
        let checked = match command {
            Command::Flush => Ok(()),
            Command::Zeroes { .. } => self.limits.extent(what, lba, blocks),
            Command::Write { .. } | Command::Read { .. } => self.limits.blocks(what, lba, blocks),
        };
        if let Err(error) = checked {
            return self.refuse(queue, op, command, error);
        }
        if self.off {
            let error = self.limits.error(what, lba, blocks, Cause::PowerLost);
            return self.refuse(queue, op, command, error);
        }
        let due = match &command {
            Command::Write { pages, .. } => self.timing.write(now, pages.as_slice().len() as u64),
            Command::Zeroes { .. } => self.timing.table(now),
            Command::Read { lba, blocks } => self.timing.read(now, *lba, *blocks),
            Command::Flush => self.timing.flush(now),
        };
        let op = Op { queue, op, command, covers: self.store.position() };
        let slot = match self.free_ops.pop() {
            Some(slot) => {
                self.ops[slot as usize] = Some(op);
                slot
            }
            None => {
                self.ops.push(Some(op));
                (self.ops.len() - 1) as u32
            }
        };
        self.due.push(Reverse((due, self.submitted, slot)));
        self.submitted += 1;
    }

    #[inline]
    fn complete(&mut self, slot: u32) {
        let op = self.take_op(slot);
        let result = match op.command {
            Command::Write { lba, pages } => {
                for (lba, page) in (lba..).zip(pages.as_slice()) {
                    self.store.put(lba, *page);
                }
                None
            }
            Command::Zeroes { lba, blocks, .. } => {
                for lba in lba..lba + blocks {
                    self.store.put(lba, P::ZEROES);
                }
                None
            }
            Command::Read { lba, blocks } => Some(self.store.pages().read(lba, blocks)),
            Command::Flush => {
                self.store.make_durable(op.covers);
                None
            }
        };
        self.answer(op.queue, op.op, Ok(result));
    }

    #[cold]
    fn refuse(&mut self, queue: QueueId, op: u64, command: Command<P::Page>, error: IoError) {
        if let Command::Write { pages, .. } = command {
            pages.as_slice().iter().for_each(|page| self.store.pages_mut().release(*page));
        }
        self.answer(queue, op, Err(error));
    }

    fn take_op(&mut self, slot: u32) -> Op<P::Page> {
        self.free_ops.push(slot);
        // A slot is in `due` exactly once, from the submission of its operation until here.
        self.ops[slot as usize].take().expect("an op in flight")
    }

    #[inline]
    fn answer(&mut self, queue: QueueId, op: u64, result: Result<Option<P::Buf>, IoError>) {
        let inbox = &mut self.inboxes[queue.0 as usize];
        if inbox.open {
            inbox.done.push(Done { op, result });
        }
    }
}

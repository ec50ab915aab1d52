//! The drive as a state machine: operations go in with the time, and come out when they are due.

use std::cmp::Reverse;
use std::collections::BinaryHeap;
use std::sync::Arc;

use riopipe_order::block_device::{BLOCK_SIZE, Cause, IoError, Limits, Operation};

use crate::buf::AlignedBuf;
use crate::drive::Done;
use crate::error::OpenError;
use crate::mapping::Mapping;
use crate::ssd::frames::{Bytes, Frame, ZEROES};
use crate::ssd::store::{Position, Store};
use crate::ssd::{PowerCut, Profile, Timing};

/// A modelled drive with its data.
///
/// An operation takes effect when it completes, in the order of completion times; until then a
/// power cut may let any part of it land. Reads return what is there when they complete.
pub struct Model {
    profile: &'static Profile,
    timing: Timing,
    store: Store,
    /// Operations under way by completion time; then by submission, so that ties are decided.
    due: BinaryHeap<Reverse<(u64, u64, u32)>>,
    ops: Vec<Option<Op>>,
    free_ops: Vec<u32>,
    submitted: u64,
    inboxes: Vec<Inbox>,
    limits: Limits,
    off: bool,
    /// When the latest command was submitted.
    now: u64,
}

/// Who submitted an operation, and gets its completion.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct QueueId(u32);

/// What to do; the data of a write is in frames already.
pub(crate) enum Command {
    Write { lba: u64, frames: FrameList },
    Zeroes { what: Operation, lba: u64, blocks: u64 },
    Read { lba: u64, blocks: u64 },
    Flush,
}

/// The frames of one write. Most are of one block.
pub(crate) enum FrameList {
    One(Frame),
    Many(Box<[Frame]>),
}

impl FrameList {
    pub(crate) fn as_slice(&self) -> &[Frame] {
        match self {
            FrameList::One(frame) => std::slice::from_ref(frame),
            FrameList::Many(frames) => frames,
        }
    }
}

struct Op {
    queue: QueueId,
    op: u64,
    command: Command,
    /// For a flush: what it covers.
    covers: Position,
}

struct Inbox {
    done: Vec<Done>,
    open: bool,
}

impl Model {
    /// A drive of `blocks` blocks, all zero, in memory. `seed` decides the spread of completion
    /// times; `prefault` takes the memory now.
    pub fn new(
        profile: &'static Profile,
        blocks: u64,
        seed: u64,
        prefault: bool,
    ) -> Result<Model, OpenError> {
        let store = Store::in_memory(blocks, profile.losable_blocks, prefault);
        Model::with_store(profile, store, blocks, seed)
    }

    /// The same with its blocks in a mapped file.
    pub(crate) fn in_file(
        profile: &'static Profile,
        file: Mapping,
        seed: u64,
    ) -> Result<Model, OpenError> {
        let blocks = (file.len() / BLOCK_SIZE) as u64;
        let store = Store::in_file(file, profile.losable_blocks);
        Model::with_store(profile, store, blocks, seed)
    }

    fn with_store(
        profile: &'static Profile,
        store: std::io::Result<Store>,
        blocks: u64,
        seed: u64,
    ) -> Result<Model, OpenError> {
        let bytes = blocks.saturating_mul(BLOCK_SIZE as u64);
        let store = store.map_err(|source| OpenError::Memory {
            what: "a modelled drive",
            bytes,
            source,
        })?;
        let name = Arc::from(format!("ssd:{}", profile.name));
        Ok(Model {
            profile,
            timing: Timing::new(profile, seed),
            store,
            due: BinaryHeap::new(),
            ops: Vec::new(),
            free_ops: Vec::new(),
            submitted: 0,
            inboxes: Vec::new(),
            limits: Limits::new(blocks, &name),
            off: false,
            now: 0,
        })
    }

    /// Capacity in blocks.
    pub fn blocks(&self) -> u64 {
        self.store.blocks()
    }

    /// A queue: completions of what it submits are kept for it.
    pub fn open_queue(&mut self) -> QueueId {
        let closed = self.inboxes.iter().position(|inbox| !inbox.open);
        let index = closed.unwrap_or_else(|| {
            self.inboxes.push(Inbox { done: Vec::new(), open: true });
            self.inboxes.len() - 1
        });
        self.inboxes[index].open = true;
        QueueId(index as u32)
    }

    /// Ends a queue, which must have nothing in flight.
    pub fn close_queue(&mut self, queue: QueueId) {
        let inbox = &mut self.inboxes[queue.0 as usize];
        inbox.done.clear();
        inbox.open = false;
    }

    /// Submits a write of whole blocks.
    pub fn write(
        &mut self,
        now: u64,
        queue: QueueId,
        op: u64,
        lba: u64,
        bytes: &[u8],
    ) -> Result<(), IoError> {
        self.limits.data(Operation::Write, lba, bytes.len())?;
        let mut frames = Vec::with_capacity(bytes.len() / BLOCK_SIZE);
        for block in bytes.chunks_exact(BLOCK_SIZE) {
            let Some(frame) = self.store.allocate() else {
                frames.into_iter().for_each(|f| self.store.release(f));
                return Err(self.too_many(Operation::Write, lba));
            };
            self.store.bytes().fill(frame, block);
            frames.push(frame);
        }
        let frames = FrameList::Many(frames.into());
        self.submit(now, queue, op, Command::Write { lba, frames });
        Ok(())
    }

    /// Submits a read.
    pub fn read(
        &mut self,
        now: u64,
        queue: QueueId,
        op: u64,
        lba: u64,
        blocks: u64,
    ) -> Result<(), IoError> {
        self.limits.blocks(Operation::Read, lba, blocks)?;
        self.submit(now, queue, op, Command::Read { lba, blocks });
        Ok(())
    }

    /// Submits a write of zeroes. Deallocating does the same: such blocks read as zeroes (T10).
    pub fn write_zeroes(
        &mut self,
        now: u64,
        queue: QueueId,
        op: u64,
        lba: u64,
        blocks: u64,
    ) -> Result<(), IoError> {
        let what = Operation::WriteZeroes;
        self.limits.extent(what, lba, blocks)?;
        self.submit(now, queue, op, Command::Zeroes { what, lba, blocks });
        Ok(())
    }

    /// Submits a flush: it covers the writes that have completed by `now` (M2).
    pub fn flush(&mut self, now: u64, queue: QueueId, op: u64) {
        self.submit(now, queue, op, Command::Flush);
    }

    /// Completes what is due.
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

    /// When the next operation (of any queue) is due.
    #[inline]
    pub fn next_due(&self) -> Option<u64> {
        self.due.peek().map(|Reverse((due, _, _))| *due)
    }

    /// Moves what has completed for `queue` to the end of `done`; returns how many there were.
    pub fn take_done(&mut self, queue: QueueId, done: &mut Vec<Done>) -> usize {
        let inbox = &mut self.inboxes[queue.0 as usize].done;
        let count = inbox.len();
        done.append(inbox);
        count
    }

    /// Cuts the power at `now`; see [`Drive::power_cut`](crate::Drive::power_cut).
    pub fn power_cut(&mut self, now: u64, seed: u64) -> PowerCut {
        self.advance(now);
        let mut underway = Vec::new();
        let mut in_flight = 0;
        let mut order: Vec<_> = self.due.drain().map(|Reverse(entry)| entry).collect();
        order.sort_unstable();
        for (_, _, slot) in order {
            in_flight += 1;
            let op = self.take_op(slot);
            let (what, lba, blocks) = match &op.command {
                Command::Write { lba, frames } => {
                    let frames = frames.as_slice();
                    underway.extend((*lba..).zip(frames.iter().copied()));
                    (Operation::Write, *lba, frames.len() as u64)
                }
                Command::Zeroes { what, lba, blocks } => {
                    underway.extend((*lba..*lba + *blocks).map(|lba| (lba, ZEROES)));
                    (*what, *lba, *blocks)
                }
                Command::Read { lba, blocks } => (Operation::Read, *lba, *blocks),
                Command::Flush => (Operation::Flush, 0, 0),
            };
            self.answer(
                op.queue,
                op.op,
                Err(self.limits.error(what, lba, blocks, Cause::PowerLost)),
            );
        }
        let mut cut = self.store.power_cut(&underway, seed);
        cut.in_flight = in_flight;
        self.timing = Timing::new(self.profile, seed);
        self.off = true;
        cut
    }

    /// Power again. What the cut left is there, and durable.
    pub fn power_on(&mut self) {
        self.off = false;
    }

    /// Schedules a checked command.
    #[inline]
    pub(crate) fn submit(&mut self, now: u64, queue: QueueId, op: u64, command: Command) {
        // The callers' clocks may be a little apart; the drive's does not go back.
        let now = now.max(self.now);
        self.now = now;
        // What is due takes effect first: a flush must cover it.
        self.advance(now);
        if self.off {
            return self.refuse(queue, op, command);
        }
        let due = match &command {
            Command::Write { frames, .. } => self.timing.write(now, frames.as_slice().len() as u64),
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

    /// The frames' memory, for who fills frames without holding the drive.
    pub(crate) fn bytes(&self) -> &Arc<Bytes> {
        self.store.bytes()
    }

    /// A frame for a write to come.
    pub(crate) fn allocate(&mut self) -> Option<Frame> {
        self.store.allocate()
    }

    /// Takes back an unused frame.
    pub(crate) fn release(&mut self, frame: Frame) {
        self.store.release(frame);
    }

    #[inline]
    fn complete(&mut self, slot: u32) {
        let op = self.take_op(slot);
        let result = match op.command {
            Command::Write { lba, frames } => {
                for (lba, frame) in (lba..).zip(frames.as_slice()) {
                    self.store.put(lba, *frame);
                }
                None
            }
            Command::Zeroes { lba, blocks, .. } => {
                for lba in lba..lba + blocks {
                    self.store.put(lba, ZEROES);
                }
                None
            }
            Command::Read { lba, blocks } => {
                let mut buf = AlignedBuf::recycled(blocks as usize * BLOCK_SIZE);
                for (lba, block) in (lba..).zip(buf.chunks_exact_mut(BLOCK_SIZE)) {
                    self.store.read(lba, block);
                }
                Some(buf)
            }
            Command::Flush => {
                self.store.settle(op.covers);
                None
            }
        };
        self.answer(op.queue, op.op, Ok(result));
    }

    #[cold]
    fn refuse(&mut self, queue: QueueId, op: u64, command: Command) {
        let (what, lba, blocks) = match command {
            Command::Write { lba, frames } => {
                let frames = frames.as_slice();
                frames.iter().for_each(|f| self.store.release(*f));
                (Operation::Write, lba, frames.len() as u64)
            }
            Command::Zeroes { what, lba, blocks } => (what, lba, blocks),
            Command::Read { lba, blocks } => (Operation::Read, lba, blocks),
            Command::Flush => (Operation::Flush, 0, 0),
        };
        let error = self.limits.error(what, lba, blocks, Cause::PowerLost);
        self.answer(queue, op, Err(error));
    }

    fn take_op(&mut self, slot: u32) -> Op {
        self.free_ops.push(slot);
        // A slot is in `due` exactly once, from its op's submission until here.
        self.ops[slot as usize].take().expect("an op under way")
    }

    #[inline]
    fn answer(&mut self, queue: QueueId, op: u64, result: Result<Option<AlignedBuf>, IoError>) {
        let inbox = &mut self.inboxes[queue.0 as usize];
        if inbox.open {
            inbox.done.push(Done { op, result });
        }
    }

    fn too_many(&self, what: Operation, lba: u64) -> IoError {
        let cause = Cause::QueueFull { depth: self.due.len() };
        self.limits.error(what, lba, 1, cause)
    }
}

//! An ordered volume as a plain block device: the groups that a request of the device becomes, and the
//! marks at which the request is done.
//!
//! ```text
//! host ── write, zero, flush ──▶ PlainDevice ── Submit, MakeDurable ──▶ stream 0, 1, …
//!      ◀────── completions ─────             ◀──── seqs and marks ────
//! ```
//!
//! - **Blocks and streams.** A block belongs to one stream, by a fixed function of its address
//!   ([`Layout`]). So no block ever passes from one stream to another (trap T15), and two writes to
//!   one block keep their order (trap T12).
//! - **Write.** It is cut into *parts* where its stream changes, and where it is larger than a group
//!   may be. Each part is a group of its own, in place, because a host overwrites what it needs. The
//!   write is done when the groups of all parts are complete.
//! - **FUA.** The write is done when the groups of all its parts are durable. The group of a single write
//!   with FUA is a durable one, which costs one round trip. Of several that wait for a stream, only the last
//!   group is one. While a flush is in flight, further groups are plain ones, and the next flush is for all
//!   of them. So writes with FUA share flushes, and none waits for more than two.
//! - **Flush.** It is done when, on every stream, all groups are durable that were complete when it
//!   came. A host counts on no more: a write that it has not seen completed is not covered
//!   (assumption M2).
//! - **Zero** (Write Zeroes, Deallocate, TRIM). Its parts are discards. The undo of a discard destroys the
//!   old content (trap T11), so a part waits until no write to its blocks is unreleased, and a write waits
//!   until no discard of its blocks is. Only some parts of a request are in flight at a time, so a request
//!   for a whole device takes little memory.
//! - **Order.** On each block, requests take effect in the order in which they came. A host that has lost
//!   its connection connects again, while a request of before is still in flight. That request must not
//!   change a block over a later write (trap T8). So a part waits until the older requests have queued
//!   their parts for its blocks.
//! - **No space.** If a stream has no space for a group (traps T13, T14), its parts wait in their order.
//!   The parts of other streams go on, and so do flushes.
//! - **Engines that roll back.** After a crash of this process alone, recovery of some engines takes back
//!   updates in place that are complete, and not durable. A host that lives on has seen them complete. So
//!   with these engines every write and every request for zeroes is one with FUA.
//! - **Failure.** The first failure of a stream fails the device: every request that is not done, and
//!   every later one. A request that has failed is never reported as done later (promise P6). The device
//!   serves writes again when the volume is opened again, which recovers it.
//! - **Reads after a failure.** A stream that has failed does not replay to a target that comes back. So a
//!   block that has a write in flight, or one that is not released, may have its older content there. Such
//!   blocks are not read any more ([`may_read`](PlainDevice::may_read)); all others have the newest content.
//!
//! The caller has the streams and the data. It runs a loop for each stream:
//! [`next_work`](PlainDevice::next_work), then [`on_submitted`](PlainDevice::on_submitted) or
//! [`on_no_space`](PlainDevice::on_no_space), and [`on_marks`](PlainDevice::on_marks) when the marks of
//! the stream have moved.

mod layout;
mod stream_state;

use alloc::collections::{BTreeMap, BTreeSet};
use alloc::vec::Vec;

use riopipe_order::attribute::Seq;
use riopipe_order::engine::{EngineKind, Marks};
use riopipe_order::probe::{DevicePlant, is_device_bug_planted};

pub use self::layout::{Layout, LayoutError};
use self::stream_state::StreamState;

/// The most parts of a request for zeroes that are in flight at the same time.
const ZERO_PARTS_MAX: u32 = 16;

/// The number of a request, in the order in which requests came.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
struct RequestNo(u64);

/// The next work for the thread of a stream.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Work<D> {
    /// Submit this part as a group of its own.
    Submit(Part<D>),
    /// Have all groups up to this one made durable. Nothing needs to be waited for: the marks show it.
    MakeDurable(Seq),
}

/// A part of a request: one group of one stream.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Part<D> {
    /// The first block.
    pub lba: u64,
    /// The number of blocks, at least 1.
    pub blocks: u32,
    /// The effect on the blocks.
    pub content: Content<D>,
    /// Whether the group is to be submitted as a durable one.
    pub is_durable: bool,
    /// Whether its request is done only when the group is durable.
    is_fua: bool,
    request: RequestNo,
}

/// The new content of the blocks of a part.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Content<D> {
    /// Data of the write, from its block `first_block` on. The place is
    /// [`InPlace`](riopipe_order::engine::Place::InPlace).
    Data {
        /// The data of the whole write.
        data: D,
        /// The block of the write with which the part begins, from 0.
        first_block: u32,
    },
    /// Zeroes, as a discard.
    Zeroes,
}

/// A request that has ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Ended<T> {
    /// The caller's name for the request.
    pub token: T,
    /// Whether the request is done. False: the device has failed.
    pub is_done: bool,
}

/// A request that has not ended.
#[derive(Debug)]
struct Request<T, D> {
    token: T,
    /// The parts that are not done; of a flush, the streams that are not durable up to where it needs.
    open: u32,
    /// The blocks that have no parts yet.
    rest: Rest<D>,
}

/// The last blocks of a request: those that have no parts yet. A flush has none.
#[derive(Debug)]
struct Rest<D> {
    lba: u64,
    blocks: u64,
    /// The data of a write, and the block of it at `lba`. `None`: the blocks are to be zeroed.
    data: Option<(D, u32)>,
    is_fua: bool,
}

impl<D> Rest<D> {
    /// The rest of a request that changes no blocks.
    const NONE: Self = Self { lba: 0, blocks: 0, data: None, is_fua: false };

    /// Whether it has any of `blocks` blocks from `lba` on.
    const fn overlaps(&self, lba: u64, blocks: u64) -> bool {
        self.lba < lba + blocks && lba < self.lba + self.blocks
    }
}

/// The device. `T` is the caller's name for a request, `D` the data of a write, or a reference to it.
#[derive(Debug)]
pub struct PlainDevice<T, D> {
    layout: Layout,
    streams: Vec<StreamState<D>>,
    requests: BTreeMap<RequestNo, Request<T, D>>,
    /// The requests with blocks that have no parts yet.
    unqueued: BTreeSet<RequestNo>,
    next_request: u64,
    ended: Vec<Ended<T>>,
    /// The streams that have new work.
    to_wake: BTreeSet<usize>,
    has_failed: bool,
    /// Changes are done only when they are durable.
    is_write_through: bool,
}

/// Whether a crash of this process alone takes back writes in place that are complete, and not durable.
const fn rolls_back(engine: EngineKind) -> bool {
    match engine {
        // Recovery forgets redirected updates that are not durable.
        EngineKind::Horae => true,
        // The drive drops what is not durable when the stream begins anew.
        EngineKind::Opimq => true,
        EngineKind::None
        | EngineKind::Sync
        | EngineKind::Linux
        | EngineKind::Barrier
        | EngineKind::Rio => false,
    }
}

impl<T, D: Clone> PlainDevice<T, D> {
    /// A device on streams whose last groups are `last`, one for each stream of the layout.
    #[must_use]
    pub fn new(layout: Layout, last: impl IntoIterator<Item = Seq>) -> Self {
        let streams: Vec<StreamState<D>> = last.into_iter().map(StreamState::new).collect();
        debug_assert_eq!(streams.len(), layout.streams(), "one for each stream");
        Self {
            layout,
            streams,
            requests: BTreeMap::new(),
            unqueued: BTreeSet::new(),
            next_request: 0,
            ended: Vec::new(),
            to_wake: BTreeSet::new(),
            has_failed: false,
            is_write_through: false,
        }
    }

    /// The same device on a volume that runs this engine.
    #[must_use]
    pub fn on_engine(mut self, engine: EngineKind) -> Self {
        self.is_write_through =
            rolls_back(engine) && !is_device_bug_planted(DevicePlant::RolledBack);
        self
    }

    /// The layout.
    #[must_use]
    pub const fn layout(&self) -> &Layout {
        &self.layout
    }

    /// Whether a stream has failed.
    #[must_use]
    pub const fn has_failed(&self) -> bool {
        self.has_failed
    }

    /// Whether these blocks may be read. They may, as long as the device has not failed. Afterwards a
    /// block that a group may still change, or whose change may be lost, has an unknown content.
    ///
    /// A read is checked when it has ended: the device may fail while it is in flight.
    #[must_use]
    pub fn may_read(&self, lba: u64, blocks: u64) -> bool {
        if !self.has_failed || is_device_bug_planted(DevicePlant::ReadsInDoubt) {
            return true;
        }
        !self.streams.iter().any(|stream| stream.is_in_doubt(lba, blocks))
    }

    /// The number of requests that have not ended.
    #[must_use]
    pub fn in_flight(&self) -> usize {
        self.requests.len()
    }

    /// Takes the requests that have ended, in the order in which they did.
    pub fn take_ended(&mut self) -> Vec<Ended<T>> {
        core::mem::take(&mut self.ended)
    }

    /// Takes the streams that have got work since the last call. Their threads must be woken.
    pub fn take_to_wake(&mut self) -> BTreeSet<usize> {
        core::mem::take(&mut self.to_wake)
    }

    /// Takes a write of `blocks` blocks from `lba` on, which are on the device. With `is_fua`, the write
    /// is done only when it is durable.
    pub fn write(&mut self, token: T, lba: u64, blocks: u32, data: D, is_fua: bool) {
        let (blocks, data) = (u64::from(blocks), Some((data, 0)));
        self.change(token, Rest { lba, blocks, data, is_fua });
    }

    /// Takes a request that makes `blocks` blocks from `lba` on read as zeroes. They are on the device.
    /// With `is_fua`, it is done only when that is durable.
    pub fn zero(&mut self, token: T, lba: u64, blocks: u64, is_fua: bool) {
        self.change(token, Rest { lba, blocks, data: None, is_fua });
    }

    /// Takes a request to make durable all writes that have ended before.
    pub fn flush(&mut self, token: T) {
        let Some(no) = self.begin(token, Rest::NONE) else { return };
        let mut open = 0;
        for (stream, state) in self.streams.iter_mut().enumerate() {
            if is_device_bug_planted(DevicePlant::FlushAtOnce)
                || open > 0 && is_device_bug_planted(DevicePlant::FlushOneStream)
            {
                continue;
            }
            if state.await_durable_of_complete(no) {
                open += 1;
                self.to_wake.insert(stream);
            }
        }
        if let Some(request) = self.requests.get_mut(&no) {
            request.open = open;
        }
        self.end_if_done(no);
    }

    /// The next work for the thread of a stream. `None`: it waits until the marks move, or until it is
    /// woken. If that is [`Work::Submit`], one of [`on_submitted`](Self::on_submitted),
    /// [`on_no_space`](Self::on_no_space) and [`fail`](Self::fail) must follow before the next call.
    pub fn next_work(&mut self, stream: usize) -> Option<Work<D>> {
        match self.has_failed {
            true => None,
            false => self.streams[stream].next_work(),
        }
    }

    /// The part that [`next_work`](Self::next_work) returned is submitted as group `seq`.
    pub fn on_submitted(&mut self, stream: usize, seq: Seq) {
        self.streams[stream].on_submitted(seq);
    }

    /// The stream has no space for the part that [`next_work`](Self::next_work) returned. The stream gets no
    /// part until [`on_space`](Self::on_space).
    pub fn on_no_space(&mut self, stream: usize, part: Part<D>) {
        if !self.has_failed {
            self.streams[stream].on_no_space(part);
        }
    }

    /// The stream may have space again.
    pub fn on_space(&mut self, stream: usize) {
        self.streams[stream].is_full = is_device_bug_planted(DevicePlant::FullForEver);
    }

    /// The marks of a stream, and its released mark.
    pub fn on_marks(&mut self, stream: usize, marks: Marks, released: Seq) {
        // Nothing waits for marks after a failure.
        let reached = self.streams[stream].on_marks(marks, released);
        if reached.is_unblocked && !is_device_bug_planted(DevicePlant::UnblockedNotWoken) {
            self.to_wake.insert(stream);
        }
        for no in &reached.requests {
            if let Some(request) = self.requests.get_mut(no) {
                request.open -= 1;
                if is_device_bug_planted(DevicePlant::DoneWithFirstPart) && request.rest.blocks == 0
                {
                    request.open = 0;
                }
            }
        }
        if !reached.requests.is_empty() {
            // The oldest comes first: others may wait for it.
            for no in self.unqueued.clone() {
                self.queue_parts(no);
            }
        }
        for no in reached.requests {
            self.end_if_done(no);
        }
    }

    /// A stream has failed: all requests that have not ended fail, and all later ones.
    pub fn fail(&mut self) {
        self.has_failed = !is_device_bug_planted(DevicePlant::FailureForgotten);
        for state in &mut self.streams {
            state.clear();
        }
        self.unqueued.clear();
        let requests = core::mem::take(&mut self.requests);
        let failed = |Request { token, .. }| Ended { token, is_done: false };
        self.ended.extend(requests.into_values().map(failed));
    }

    /// Begins a request. `None`: the device has failed, and so has the request.
    fn begin(&mut self, token: T, rest: Rest<D>) -> Option<RequestNo> {
        if self.has_failed {
            self.ended.push(Ended { token, is_done: false });
            return None;
        }
        let no = RequestNo(self.next_request);
        self.next_request += 1;
        self.requests.insert(no, Request { token, open: 0, rest });
        Some(no)
    }

    /// Takes a request that changes blocks.
    fn change(&mut self, token: T, mut rest: Rest<D>) {
        rest.is_fua |= self.is_write_through;
        if let Some(no) = self.begin(token, rest) {
            self.queue_parts(no);
            self.end_if_done(no);
        }
    }

    /// Puts a part into the queue of its stream.
    fn queue(&mut self, part: Part<D>) {
        if let Some(request) = self.requests.get_mut(&part.request) {
            request.open += 1;
        }
        let mut stream = self.layout.stream_of(part.lba);
        if is_device_bug_planted(DevicePlant::BlocksChangeStream) {
            stream = (stream + part.request.0 as usize) % self.streams.len();
        }
        self.streams[stream].waiting.push_back(part);
        self.to_wake.insert(stream);
    }

    /// Queues the next parts of a request, as far as it may have more in flight, and no older request
    /// has blocks of them without a part.
    fn queue_parts(&mut self, no: RequestNo) {
        while let Some(Request { open, rest, .. }) = self.requests.get(&no) {
            if rest.blocks == 0 {
                self.unqueued.remove(&no);
                return;
            }
            let (lba, blocks) = (rest.lba, self.layout.part_blocks(rest.lba, rest.blocks));
            let has_enough = rest.data.is_none() && *open >= ZERO_PARTS_MAX;
            if has_enough || self.must_wait_for_older(no, lba, u64::from(blocks)) {
                self.unqueued.insert(no);
                return;
            }
            self.queue_part(no, lba, blocks);
        }
    }

    /// Whether a request older than `no` has any of these blocks without a part.
    fn must_wait_for_older(&self, no: RequestNo, lba: u64, blocks: u64) -> bool {
        if is_device_bug_planted(DevicePlant::OvertakesOlder) {
            return false;
        }
        let older = self.unqueued.range(..no).filter_map(|no| self.requests.get(no));
        older.into_iter().any(|request| request.rest.overlaps(lba, blocks))
    }

    /// Queues the first blocks of the rest of a request as a part.
    fn queue_part(&mut self, no: RequestNo, lba: u64, blocks: u32) {
        let Some(Request { rest, .. }) = self.requests.get_mut(&no) else { return };
        rest.lba += u64::from(blocks);
        rest.blocks -= u64::from(blocks);
        let content = match &mut rest.data {
            Some((data, next_block)) => {
                let first_block = *next_block;
                *next_block += blocks;
                Content::Data { data: data.clone(), first_block }
            }
            None => Content::Zeroes,
        };
        let is_fua = rest.is_fua;
        self.queue(Part { lba, blocks, content, is_durable: false, is_fua, request: no });
    }

    /// Ends a request of which nothing is open.
    fn end_if_done(&mut self, no: RequestNo) {
        let is_done = |request: &Request<T, D>| request.open == 0 && request.rest.blocks == 0;
        if self.requests.get(&no).is_some_and(is_done)
            && let Some(Request { token, .. }) = self.requests.remove(&no)
        {
            self.ended.push(Ended { token, is_done: true });
        }
    }
}

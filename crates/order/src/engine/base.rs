//! The part that all engines share: turning a group into requests, the ORDER queue with merging,
//! and the request table.

use alloc::collections::VecDeque;
use alloc::vec::Vec;

use super::window::Window;
use super::{
    Bound, Cause, Failure, Limits, Op, Payload, Place, Refusal, Request, RequestId, Write,
};
use crate::attribute::{Flags, GROUP_ENTRIES_MAX, Kind, Member, SPAN_MAX, Seq};
use crate::block_device::BLOCK_BYTES;
use crate::probe::{self, Plant, Rare};
use crate::topology::{Extent, Topology};

/// Access to the part of an engine that is the same in all engines. No other crate implements this
/// trait, so only this crate makes engines.
pub trait HasBase<P> {
    /// The shared part.
    fn base(&self) -> &Base<P>;

    /// The shared part, to be changed.
    fn base_mut(&mut self) -> &mut Base<P>;
}

/// The state that every engine keeps of its stream.
#[derive(Debug)]
pub struct Base<P> {
    pub(super) topology: Topology,
    pub(super) limits: Limits,
    pub(super) window: Window,
    pub(super) failure: Option<Failure>,
    /// One ORDER queue per server, first in, first out (Rio paper §4.5, principle 1).
    pub(super) queues: Vec<VecDeque<RequestId>>,
    /// Requests of the group being shaped.
    pub(super) shaped: Vec<RequestId>,
    /// The last seq with a write on each member that no FLUSH has covered yet.
    pub(super) dirty: Vec<Option<Seq>>,
    /// The last seq with a write on each volatile member, flushed or not.
    last_write: Vec<Seq>,
    /// Whether the volume has a volatile member.
    pub(super) any_volatile: bool,
    /// The request table. A request stays at its place until it is freed.
    requests: Vec<Request<P>>,
    /// The free places in `requests`.
    free: Vec<RequestId>,
    /// The number of requests that are not complete.
    incomplete: u32,
}

/// Most groups that may be in flight, or kept for replay, at once. A group without payload must be
/// bounded, too (T14).
const GROUPS_MAX: usize = 1 << 16;
/// Most requests that may be in flight, or kept for replay, at once.
const REQUESTS_MAX: usize = 1 << 17;

impl<P: Payload> Base<P> {
    pub(super) fn new(topology: Topology, limits: Limits) -> Self {
        let servers = topology.servers().len();
        let members = topology.members().len();
        let any_volatile = topology.any_volatile();
        Self {
            window: Window::new(limits.start),
            topology,
            limits,
            failure: None,
            queues: (0..servers).map(|_| VecDeque::new()).collect(),
            shaped: Vec::new(),
            dirty: alloc::vec![None; members],
            last_write: alloc::vec![Seq::ZERO; members],
            any_volatile,
            requests: Vec::new(),
            free: Vec::new(),
            incomplete: 0,
        }
    }

    #[inline]
    pub(super) fn request(&self, id: RequestId) -> &Request<P> {
        &self.requests[id.0 as usize]
    }

    #[inline]
    pub(super) fn request_mut(&mut self, id: RequestId) -> &mut Request<P> {
        &mut self.requests[id.0 as usize]
    }

    #[inline]
    pub(super) fn incomplete(&self) -> u32 {
        self.incomplete
    }

    /// Checks a group as every engine must, and returns its payload bytes.
    ///
    /// # Errors
    /// The stream has failed, the group is empty, or it can never fit (T14).
    #[inline]
    pub(super) fn check_group(&self, writes: &[Write<P>], durable: bool) -> Result<u64, Refusal> {
        if let Some(failure) = self.failure {
            return Err(Refusal::Poisoned(failure));
        }
        if writes.is_empty() && !durable {
            return Err(Refusal::Empty);
        }
        let bytes = Self::bytes(writes);
        if bytes > self.limits.kept_bytes_max {
            return Err(Refusal::TooLarge(Bound::Memory));
        }
        Ok(bytes)
    }

    /// Payload bytes of a group.
    #[inline]
    fn bytes(writes: &[Write<P>]) -> u64 {
        writes
            .iter()
            .filter(|w| matches!(w.op, Op::Write(..)))
            .map(|w| u64::from(w.blocks) * BLOCK_BYTES as u64)
            .sum()
    }

    /// Whether a group with this much payload may be taken now. A complete request counts as long
    /// as it may have to be replayed (T14).
    #[inline]
    pub(super) fn has_space(&self, bytes: u64) -> bool {
        let in_use = self.requests.len() - self.free.len();
        let fits = self.window.kept_bytes() + bytes <= self.limits.kept_bytes_max
            && self.window.len() < GROUPS_MAX
            && in_use < REQUESTS_MAX
            || probe::planted(Plant::T14Unbounded);
        if !fits {
            probe::hit(Rare::MemoryFull);
        }
        fits
    }

    /// Turns a group's writes into requests: cut by stripe and transfer limit, adjacent ones
    /// merged. The requests are in `shaped` and not queued yet.
    ///
    /// # Errors
    /// When there would be more requests than a group can count; nothing was done.
    #[inline(always)]
    pub(super) fn shape(
        &mut self,
        writes: &mut [Write<P>],
        seq: Seq,
        tag: u64,
    ) -> Result<(), Refusal> {
        debug_assert!(self.shaped.is_empty());
        if let [write] = writes
            && let Some(extent) = self.topology.single(write.lba, write.blocks)
        {
            self.add(write, extent, false, seq, tag);
            return Ok(());
        }
        self.shape_all(writes, seq, tag)
    }

    /// The general case of [`shape`](Self::shape): several writes, or one that is split.
    #[inline(never)]
    fn shape_all(&mut self, writes: &mut [Write<P>], seq: Seq, tag: u64) -> Result<(), Refusal> {
        let parts: u64 =
            writes.iter().map(|w| self.topology.parts_max(w.blocks)).fold(0, u64::saturating_add);
        if parts > u64::from(GROUP_ENTRIES_MAX) {
            return Err(Refusal::TooManyEntries);
        }
        for write in writes {
            self.shape_one(write, seq, tag);
        }
        Ok(())
    }

    /// Adds the requests for one write: one for each extent on which it lies.
    fn shape_one(&mut self, write: &mut Write<P>, seq: Seq, tag: u64) {
        if let Some(extent) = self.topology.single(write.lba, write.blocks) {
            return self.add_part(write, extent, false, seq, tag);
        }
        // A write with up to four parts, as most have, needs no allocation.
        let mut parts: [Extent; 4] =
            [Extent { member: Member(0), lba: 0, blocks: 0, offset: 0 }; 4];
        let mut count = 0usize;
        self.topology.map(write.lba, write.blocks, |extent| {
            if let Some(slot) = parts.get_mut(count) {
                *slot = extent;
            }
            count += 1;
        });
        let split = count > 1;
        if split {
            probe::hit(Rare::Split);
        }
        if let Some(parts) = parts.get(..count) {
            for extent in parts {
                self.add_part(write, *extent, split, seq, tag);
            }
        } else {
            let mut all = Vec::with_capacity(count);
            self.topology.map(write.lba, write.blocks, |extent| all.push(extent));
            for extent in all {
                self.add_part(write, extent, true, seq, tag);
            }
        }
    }

    /// [`add`](Self::add) as a call: only the fast path has the code of `add` inline.
    #[inline(never)]
    fn add_part(&mut self, write: &mut Write<P>, of: Extent, split: bool, seq: Seq, tag: u64) {
        self.add(write, of, split, seq, tag);
    }

    /// Adds the part of a write that lies on `extent` to the group being shaped: as a request of
    /// its own, or merged into the group's last request. `split`: the write has other parts.
    #[inline(always)]
    fn add(&mut self, write: &mut Write<P>, extent: Extent, split: bool, seq: Seq, tag: u64) {
        let (kind, place, piece) = match &mut write.op {
            Op::Write(place, payload) => {
                let whole = extent.blocks == write.blocks;
                let piece = match whole {
                    true => payload.take(extent.blocks),
                    false => payload.part(extent.offset, extent.blocks),
                };
                (Kind::Write, *place, Some(piece))
            }
            Op::Discard => (Kind::Discard, Place::Fresh, None),
        };
        let flags = place.flag().with_if(Flags::SPLIT, split);
        if self.limits.merge
            && !split
            && let Some(last) = self.shaped.last().copied()
            && self.continues(last, extent, kind, flags)
        {
            probe::hit(Rare::MergedInGroup);
            let last = self.request_mut(last);
            last.blocks += extent.blocks;
            last.pieces.extend(piece);
            return;
        }
        let server = self.topology.member(extent.member).server;
        let (id, request) = self.allocate();
        // Field by field, in its place. If the request were put together elsewhere and moved here,
        // the processor would wait for its own stores.
        request.seq = seq;
        request.member = extent.member;
        request.server = server;
        request.kind = kind;
        request.flags = flags;
        request.lba = extent.lba;
        request.blocks = extent.blocks;
        request.tag = tag;
        request.pieces.extend(piece);
        self.shaped.push(id);
    }

    /// Adds a flush entry for `member` to the group being shaped (T3).
    pub(super) fn add_flush(&mut self, member: Member, seq: Seq, tag: u64) {
        let server = self.topology.member(member).server;
        let (id, request) = self.allocate();
        request.seq = seq;
        request.member = member;
        request.server = server;
        request.kind = Kind::Flush;
        request.flags = Flags::FLUSH;
        request.lba = 0;
        request.blocks = 0;
        request.tag = tag;
        self.shaped.push(id);
    }

    /// Makes the group's FLUSH reach every drive that the stream has dirtied since its last FLUSH
    /// (T3): on the last write of the group there, or as an entry of its own. A group without any
    /// entry gets a flush entry all the same, so that it is in a log.
    pub(super) fn add_joint_flush(&mut self, seq: Seq, tag: u64) {
        for index in 0..self.topology.members().len() {
            let member = Member(index as u8);
            if !self.topology.member(member).volatile {
                continue;
            }
            let last =
                self.shaped.iter().rev().copied().find(|id| self.request(*id).member == member);
            if let Some(id) = last {
                let request = self.request_mut(id);
                request.flags = request.flags.with(Flags::FLUSH);
            } else if self.dirty[index].is_some()
                && (self.shaped.is_empty() || !probe::planted(Plant::T3OwnDrivesOnly))
            {
                self.add_flush(member, seq, tag);
            }
        }
        if self.shaped.is_empty() {
            self.add_flush(Member(0), seq, tag);
        }
    }

    /// Numbers the group's entries (T6) and marks its boundary.
    ///
    /// # Errors
    /// When there are more entries than 16 bits can count; the group is taken apart again.
    #[inline]
    pub(super) fn number(&mut self) -> Result<(), Refusal> {
        let num = self.shaped.len();
        if num > usize::from(GROUP_ENTRIES_MAX) {
            self.unshape();
            return Err(Refusal::TooManyEntries);
        }
        let Self { shaped, requests, .. } = self;
        for (index, id) in shaped.iter().enumerate() {
            let request = &mut requests[id.0 as usize];
            request.num = num as u16;
            request.index = index as u16;
            request.flags = request.flags.with_if(Flags::BOUNDARY, index + 1 == num);
        }
        Ok(())
    }

    /// Shapes and numbers a group that goes into no log; returns its seq and its payload bytes.
    /// Only memory bounds such a group.
    ///
    /// # Errors
    /// Those of [`check_group`](Self::check_group), [`shape`](Self::shape) and [`number`](Self::number), and
    /// [`Refusal::Full`] when there is no memory for the group now (T14).
    #[inline(always)]
    pub(super) fn shape_and_number(
        &mut self,
        writes: &mut [Write<P>],
        tag: u64,
        durable: bool,
    ) -> Result<(Seq, u64), Refusal> {
        let bytes = self.check_group(writes, durable)?;
        if !self.has_space(bytes) {
            return Err(Refusal::Full(Bound::Memory));
        }
        let seq = self.window.last().next();
        self.shape(writes, seq, tag)?;
        self.number()?;
        Ok((seq, bytes))
    }

    /// Takes the group being shaped apart, because it is refused.
    pub(super) fn unshape(&mut self) {
        while let Some(id) = self.shaped.pop() {
            self.end_and_free(id);
        }
    }

    /// Merges the shaped group into the last request queued for its server, if the group is one
    /// request that continues that one (T16): whole groups, consecutive, adjacent on one drive,
    /// nothing split, a flush only last. Returns whether it has merged.
    #[inline]
    pub(super) fn merge_into_tail(&mut self) -> bool {
        let [id] = self.shaped[..] else { return false };
        if !self.limits.merge {
            return false;
        }
        let new = self.request(id);
        let Some(&tail) = self.queues[usize::from(new.server)].back() else { return false };
        let queued = self.request(tail);
        // The other flags, boundary and FLUSH, may differ.
        let relevant = Flags::PLACE.with(Flags::SPLIT);
        let extent = Extent { member: new.member, lba: new.lba, blocks: new.blocks, offset: 0 };
        let fits = queued.num == 1
            && queued.seq_end().next() == new.seq
            && queued.span < SPAN_MAX
            && !queued.flags.has(Flags::FLUSH)
            && self.continues(tail, extent, new.kind, Flags(new.flags.0 & relevant.0));
        if !fits {
            return false;
        }
        probe::hit(Rare::MergedGroups);
        let (tag, flags, blocks) = (new.tag, new.flags, new.blocks);
        let mut pieces = core::mem::take(&mut self.request_mut(id).pieces);
        let queued = self.request_mut(tail);
        queued.blocks += blocks;
        queued.span += 1;
        queued.tag = tag;
        queued.flags = queued.flags.with(flags);
        queued.pieces.append(&mut pieces);
        // The list is empty now. It goes back to its place, so that its memory is used again.
        self.request_mut(id).pieces = pieces;
        self.shaped.clear();
        self.end_and_free(id);
        true
    }

    /// Whether `extent` begins where request `id` ends, on the same drive, within its transfer
    /// limit and one stripe unit, with the same kind and place (T16).
    fn continues(&self, id: RequestId, extent: Extent, kind: Kind, flags: Flags) -> bool {
        let request = self.request(id);
        let place = |of: Flags| of.0 & Flags::PLACE.0;
        let blocks = request.blocks + extent.blocks;
        let end = request.lba + u64::from(request.blocks);
        kind != Kind::Flush
            && request.kind == kind
            && request.member == extent.member
            && !request.flags.has(Flags::SPLIT)
            && (place(request.flags) == place(flags) || probe::planted(Plant::T16MergePlaces))
            && (end == extent.lba || end < extent.lba && probe::planted(Plant::T16MergeGaps))
            && (blocks <= self.limits.merged_blocks_max || kind == Kind::Discard)
            && blocks <= self.topology.member(extent.member).request_blocks_max
            && self.topology.within_unit(extent.member, request.lba, blocks)
    }

    /// Puts the shaped group into the ORDER queues.
    #[inline(always)]
    pub(super) fn enqueue(&mut self) {
        let Self { shaped, requests, queues, .. } = self;
        for id in &*shaped {
            let server = requests[id.0 as usize].server;
            queues[usize::from(server)].push_back(*id);
        }
        shaped.clear();
    }

    /// Records which drives the shaped group dirties.
    #[inline(always)]
    pub(super) fn note_dirty(&mut self, seq: Seq) {
        if self.any_volatile {
            self.note_dirty_members(seq);
        }
    }

    fn note_dirty_members(&mut self, seq: Seq) {
        for index in 0..self.shaped.len() {
            let request = self.request(self.shaped[index]);
            let (kind, member) = (request.kind, request.member);
            if kind != Kind::Flush && self.topology.member(member).volatile {
                self.dirty[usize::from(member.0)] = Some(seq);
                self.last_write[usize::from(member.0)] = seq;
            }
        }
    }

    /// A request has failed: the stream is poisoned from its first group on (P6).
    pub(super) fn fail(&mut self, id: RequestId, cause: Cause) {
        let request = self.request(id);
        self.poison(Failure {
            seq: request.seq,
            member: request.member,
            flush: request.flags.has(Flags::FLUSH),
            cause,
        });
    }

    /// Poisons the stream; the first failure is the one reported.
    pub(super) fn poison(&mut self, failure: Failure) {
        self.window.fail_from(failure.seq);
        if self.failure.is_none() {
            self.failure = Some(failure);
        }
        for server in 0..self.queues.len() {
            while let Some(id) = self.queues[server].pop_front() {
                self.end_and_free(id);
            }
        }
    }

    /// The failure that a failed FLUSH of `member` means for this stream, if the FLUSH was not its
    /// own (T22). The stream's writes there that are not durable may be lost, also those behind a
    /// FLUSH in flight.
    pub(super) fn affected_by_flush(&self, member: Member) -> Option<Failure> {
        let durable = self.window.durable();
        (self.last_write[usize::from(member.0)] > durable).then(|| Failure {
            seq: durable.next(),
            member,
            flush: true,
            cause: Cause::SharedFlush,
        })
    }

    /// Whether an incomplete write touches these volume blocks (P9).
    pub(super) fn writes_pending(&self, lba: u64, blocks: u32) -> bool {
        if self.incomplete == 0 {
            return false;
        }
        let mut pending = false;
        self.topology.map(lba, blocks, |extent| {
            pending |= self.requests.iter().any(|r| r.is_incomplete && r.touches(&extent));
        });
        pending
    }

    /// Takes a free place in the request table. The request there is of one group, incomplete, not
    /// numbered and without payload. Its other fields are still those of the last request.
    #[inline]
    fn allocate(&mut self) -> (RequestId, &mut Request<P>) {
        self.incomplete += 1;
        let id = match self.free.pop() {
            Some(id) => id,
            None => self.grow(),
        };
        let request = &mut self.requests[id.0 as usize];
        debug_assert!(!request.is_incomplete && request.pieces.is_empty(), "the place is free");
        request.span = 1;
        request.num = 0;
        request.index = 0;
        request.is_incomplete = true;
        request.is_replayed = false;
        (id, request)
    }

    /// Adds a place to the request table.
    #[cold]
    fn grow(&mut self) -> RequestId {
        self.requests.push(Request {
            seq: Seq::ZERO,
            span: 1,
            num: 0,
            index: 0,
            member: Member(0),
            server: 0,
            kind: Kind::Write,
            flags: Flags::default(),
            lba: 0,
            blocks: 0,
            tag: 0,
            pieces: Vec::new(),
            is_incomplete: false,
            is_replayed: false,
        });
        RequestId(self.requests.len() as u32 - 1)
    }

    /// Ends a request that will not be replayed, and frees its place.
    #[inline]
    pub(super) fn end_and_free(&mut self, id: RequestId) {
        let was_incomplete = self.end(id);
        debug_assert!(was_incomplete, "a request is retired once");
        self.free(id);
    }

    /// Notes that a request is complete, and keeps it, because it may have to be replayed (T14).
    /// Returns whether this is its first completion.
    #[inline]
    pub(super) fn end(&mut self, id: RequestId) -> bool {
        let was_incomplete = core::mem::replace(&mut self.request_mut(id).is_incomplete, false);
        self.incomplete -= u32::from(was_incomplete);
        was_incomplete
    }

    /// Forgets a request that has ended.
    #[inline]
    pub(super) fn free(&mut self, id: RequestId) {
        let request = self.request_mut(id);
        debug_assert!(
            !request.is_incomplete && !request.is_replayed,
            "what may still end is not forgotten"
        );
        request.pieces.clear();
        self.free.push(id);
    }
}

//! The part that all engines share: it turns the groups of a stream into requests.
//!
//! An engine admits a group in these steps:
//!
//! ```text
//! check_group      may the stream take this group at all?
//! shape            one request for each extent of each write, in `shaped`
//! number           num and index of each request
//! merge_into_tail  the group continues the last queued request: the two become one
//! enqueue          otherwise, each request goes to the ORDER queue of its server
//! ```
//!
//! The requests themselves are in the [`RequestTable`].

use alloc::collections::VecDeque;
use alloc::vec::Vec;

use super::request_table::RequestTable;
use super::window::Window;
use super::{
    Bound, Cause, Failure, Limits, Marks, Op, Path, Payload, Place, Refusal, Request, RequestId,
    Write,
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

/// Implements [`HasBase`] for an engine whose field `base` it is.
macro_rules! has_base {
    ($engine:ident) => {
        impl<P> $crate::engine::base::HasBase<P> for $engine<P> {
            #[inline]
            fn base(&self) -> &$crate::engine::base::Base<P> {
                &self.base
            }

            #[inline]
            fn base_mut(&mut self) -> &mut $crate::engine::base::Base<P> {
                &mut self.base
            }
        }
    };
}
pub(super) use has_base;

/// The state that every engine keeps of its stream.
#[derive(Debug)]
pub struct Base<P> {
    pub(super) topology: Topology,
    pub(super) limits: Limits,
    /// The groups that are not forgotten, and the marks.
    pub(super) window: Window,
    /// The failure that poisoned the stream, if one did.
    pub(super) failure: Option<Failure>,
    /// The ORDER queue of each server, first in, first out (Rio paper §4.5, principle 1).
    pub(super) queues: Vec<VecDeque<RequestId>>,
    /// The requests of the group that is being turned into requests.
    pub(super) shaped: Vec<RequestId>,
    /// For each member, the last group with a write that no FLUSH covers; `None` if there is none.
    pub(super) dirty: Vec<Option<Seq>>,
    /// For each volatile member, the last group with a write to it, flushed or not.
    last_write: Vec<Seq>,
    /// Whether the volume has a volatile member.
    pub(super) has_volatile_member: bool,
    pub(super) requests: RequestTable<P>,
    /// The memory of [`has_overlap`](Self::has_overlap).
    pub(super) extents: Vec<(u64, u64)>,
}

/// The most groups that may be in flight, or kept for replay, at once. This bounds the groups
/// without payload, too, which [`Limits::kept_bytes_max`] does not count.
const GROUPS_MAX: usize = 1 << 16;
/// The most requests that may be in flight, or kept for replay, at once.
const REQUESTS_MAX: usize = 1 << 17;

/// The most extents of a write that need no allocation. Most writes have fewer.
const EXTENTS_ON_STACK: usize = 4;

impl<P: Payload> Base<P> {
    pub(super) fn new(topology: Topology, limits: Limits) -> Self {
        let server_count = topology.servers().len();
        let member_count = topology.members().len();
        let has_volatile_member = topology.has_volatile_member();
        Self {
            window: Window::new(limits.start),
            topology,
            limits,
            failure: None,
            queues: (0..server_count).map(|_| VecDeque::new()).collect(),
            shaped: Vec::new(),
            dirty: alloc::vec![None; member_count],
            last_write: alloc::vec![Seq::ZERO; member_count],
            has_volatile_member,
            requests: RequestTable::new(),
            extents: Vec::new(),
        }
    }

    #[inline]
    pub(super) fn request(&self, id: RequestId) -> &Request<P> {
        self.requests.get(id)
    }

    #[inline]
    pub(super) fn request_mut(&mut self, id: RequestId) -> &mut Request<P> {
        self.requests.get_mut(id)
    }

    /// The number of requests that are not complete.
    #[inline]
    pub(super) fn incomplete_count(&self) -> u32 {
        self.requests.incomplete_count()
    }

    /// See [`RequestTable::mark_complete`].
    #[inline]
    pub(super) fn mark_complete(&mut self, id: RequestId) -> bool {
        self.requests.mark_complete(id)
    }

    /// See [`RequestTable::free`].
    #[inline]
    pub(super) fn free(&mut self, id: RequestId) {
        self.requests.free(id);
    }

    /// See [`RequestTable::complete_and_free`].
    #[inline]
    pub(super) fn complete_and_free(&mut self, id: RequestId) {
        self.requests.complete_and_free(id);
    }

    /// Delivers the marks of an engine that never replays, so that it need not keep complete groups.
    pub(super) fn deliver_without_replay(&mut self) -> Marks {
        let marks = self.window.deliver();
        self.window.free_groups(self.window.complete());
        marks
    }

    /// Checks a group before it is turned into requests, and returns the size of its payload in
    /// bytes.
    ///
    /// # Errors
    /// The stream has failed, the group is empty, or its payload can never fit into the replay
    /// memory.
    #[inline]
    pub(super) fn check_group(&self, writes: &[Write<P>], durable: bool) -> Result<u64, Refusal> {
        if let Some(failure) = self.failure {
            return Err(Refusal::Poisoned(failure));
        }
        if writes.is_empty() && !durable {
            return Err(Refusal::Empty);
        }
        let bytes = Self::payload_bytes(writes);
        self.check_payload(bytes)?;
        Ok(bytes)
    }

    /// Checks whether a payload of `bytes` bytes can ever fit into the replay memory.
    #[inline]
    fn check_payload(&self, bytes: u64) -> Result<(), Refusal> {
        match bytes > self.limits.kept_bytes_max {
            true => Err(Refusal::TooLarge(Bound::Memory)),
            false => Ok(()),
        }
    }

    /// Checks whether a group of one write with payload can be admitted once nothing else is in
    /// flight: the bounds that hold for every engine.
    pub(super) fn check_write(&self, lba: u64, blocks: u32) -> Result<(), Refusal> {
        if let Some(failure) = self.failure {
            return Err(Refusal::Poisoned(failure));
        }
        self.check_payload(u64::from(blocks) * BLOCK_BYTES as u64)?;
        match self.topology.single_extent(lba, blocks) {
            Some(_) => Ok(()),
            None => self.check_request_count([blocks]),
        }
    }

    /// Checks whether writes of these lengths, in blocks, have few enough requests for one group.
    fn check_request_count(&self, writes: impl IntoIterator<Item = u32>) -> Result<(), Refusal> {
        let counts = writes.into_iter().map(|blocks| self.topology.request_count_max(blocks));
        match counts.fold(0, u64::saturating_add) > u64::from(GROUP_ENTRIES_MAX) {
            true => Err(Refusal::TooManyEntries),
            false => Ok(()),
        }
    }

    /// The size of the payload of a group in bytes.
    #[inline]
    fn payload_bytes(writes: &[Write<P>]) -> u64 {
        writes
            .iter()
            .filter(|w| matches!(w.op, Op::Write(..)))
            .map(|w| u64::from(w.blocks) * BLOCK_BYTES as u64)
            .sum()
    }

    /// Whether the replay memory has space for a group with `bytes` bytes of payload now. A
    /// complete request still takes space until it is released, because it may have to be replayed
    /// (trap T14).
    #[inline]
    pub(super) fn has_space(&self, bytes: u64) -> bool {
        let fits = self.window.kept_bytes() + bytes <= self.limits.kept_bytes_max
            && self.window.len() < GROUPS_MAX
            && self.requests.len() < REQUESTS_MAX
            || probe::is_bug_planted(Plant::T14Unbounded);
        if !fits {
            probe::count_rare(Rare::MemoryFull);
        }
        fits
    }

    /// Turns the writes of a group into requests: splits them at stripe units and transfer limits,
    /// and merges adjacent ones. The requests are then in `shaped`, and not in a queue yet.
    ///
    /// # Errors
    /// The group would have more requests than a group can count. Nothing was done.
    #[inline(always)]
    pub(super) fn shape(
        &mut self,
        writes: &mut [Write<P>],
        seq: Seq,
        tag: u64,
    ) -> Result<(), Refusal> {
        debug_assert!(self.shaped.is_empty());
        if let [write] = writes
            && let Some(extent) = self.topology.single_extent(write.lba, write.blocks)
        {
            self.add_extent(write, extent, IsSplit::No, seq, tag);
            return Ok(());
        }
        self.shape_all(writes, seq, tag)
    }

    /// The general case of [`shape`](Self::shape): several writes, or one that is split.
    #[inline(never)]
    fn shape_all(&mut self, writes: &mut [Write<P>], seq: Seq, tag: u64) -> Result<(), Refusal> {
        self.check_request_count(writes.iter().map(|write| write.blocks))?;
        for write in writes {
            self.shape_one(write, seq, tag);
        }
        Ok(())
    }

    /// Turns one write into requests: one for each extent on which it lies.
    fn shape_one(&mut self, write: &mut Write<P>, seq: Seq, tag: u64) {
        if let Some(extent) = self.topology.single_extent(write.lba, write.blocks) {
            return self.add_extent_outlined(write, extent, IsSplit::No, seq, tag);
        }
        let mut first_extents = [Extent::EMPTY; EXTENTS_ON_STACK];
        let mut count = 0usize;
        self.topology.for_each_extent(write.lba, write.blocks, |extent| {
            if let Some(slot) = first_extents.get_mut(count) {
                *slot = extent;
            }
            count += 1;
        });
        let is_split = if count > 1 { IsSplit::Yes } else { IsSplit::No };
        if count > 1 {
            probe::count_rare(Rare::Split);
        }
        if let Some(extents) = first_extents.get(..count) {
            for extent in extents {
                self.add_extent_outlined(write, *extent, is_split, seq, tag);
            }
        } else {
            let mut extents = Vec::with_capacity(count);
            self.topology.for_each_extent(write.lba, write.blocks, |extent| extents.push(extent));
            for extent in extents {
                self.add_extent_outlined(write, extent, is_split, seq, tag);
            }
        }
    }

    /// [`add_extent`](Self::add_extent) as a call. Only the fast path has the code of `add_extent`
    /// inline.
    #[inline(never)]
    fn add_extent_outlined(
        &mut self,
        write: &mut Write<P>,
        extent: Extent,
        is_split: IsSplit,
        seq: Seq,
        tag: u64,
    ) {
        self.add_extent(write, extent, is_split, seq, tag);
    }

    /// Adds one extent of a write to `shaped`: as a request of its own, or merged into the last
    /// request there.
    #[inline(always)]
    fn add_extent(
        &mut self,
        write: &mut Write<P>,
        extent: Extent,
        is_split: IsSplit,
        seq: Seq,
        tag: u64,
    ) {
        let (kind, place, piece) = match &mut write.op {
            Op::Write(place, payload) => {
                let piece = if extent.blocks == write.blocks {
                    payload.take(extent.blocks)
                } else {
                    payload.part(extent.offset, extent.blocks)
                };
                (Kind::Write, *place, Some(piece))
            }
            Op::Discard => (Kind::Discard, Place::Fresh, None),
        };
        let flags = place.flag().with_if(Flags::SPLIT, is_split == IsSplit::Yes);
        if self.limits.merge
            && is_split == IsSplit::No
            && let Some(last) = self.shaped.last().copied()
            && self.can_append_to(last, extent, kind, flags)
        {
            probe::count_rare(Rare::MergedInGroup);
            let last = self.request_mut(last);
            last.blocks += extent.blocks;
            last.pieces.extend(piece);
            return;
        }
        let server = self.topology.member(extent.member).server;
        let (id, request) = self.requests.allocate();
        // Each field is stored in its place. If the request were built elsewhere and moved here,
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

    /// Adds a flush entry for `member` to `shaped`: an entry that writes nothing, for a drive that
    /// the group itself does not write.
    pub(super) fn add_flush(&mut self, member: Member, seq: Seq, tag: u64) {
        let server = self.topology.member(member).server;
        let (id, request) = self.requests.allocate();
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

    /// Makes the shaped group flush every drive that has a write of the stream that no FLUSH
    /// covers. Otherwise the group would be reported durable while an earlier write on another
    /// drive is not (trap T3).
    ///
    /// The last write of the group to a drive carries the FLUSH of that drive. A drive that the
    /// group does not write gets a flush entry. A group without any entry gets a flush entry, too,
    /// so that the group is in a log.
    pub(super) fn add_joint_flush(&mut self, seq: Seq, tag: u64) {
        for index in 0..self.topology.members().len() {
            let member = Member(index as u8);
            if !self.topology.member(member).volatile {
                continue;
            }
            let mut newest_first = self.shaped.iter().rev().copied();
            let last_write = newest_first.find(|id| self.request(*id).member == member);
            if let Some(id) = last_write {
                let request = self.request_mut(id);
                request.flags = request.flags.with(Flags::FLUSH);
            } else if self.dirty[index].is_some()
                && (self.shaped.is_empty() || !probe::is_bug_planted(Plant::T3OwnDrivesOnly))
            {
                self.add_flush(member, seq, tag);
            }
        }
        if self.shaped.is_empty() {
            self.add_flush(Member(0), seq, tag);
        }
    }

    /// Gives each request of the shaped group its index and the number of the group's entries, and
    /// marks the last request as the boundary. Recovery needs these numbers to find out whether an
    /// entry is missing (trap T6).
    ///
    /// # Errors
    /// The group has more entries than 16 bits can count. Its requests are freed.
    #[inline]
    pub(super) fn number_requests(&mut self) -> Result<(), Refusal> {
        let num = self.shaped.len();
        if num > usize::from(GROUP_ENTRIES_MAX) {
            self.discard_shaped();
            return Err(Refusal::TooManyEntries);
        }
        let Self { shaped, requests, .. } = self;
        for (index, id) in shaped.iter().enumerate() {
            let request = requests.get_mut(*id);
            request.num = num as u16;
            request.index = index as u16;
            request.flags = request.flags.with_if(Flags::BOUNDARY, index + 1 == num);
        }
        Ok(())
    }

    /// Turns a group that goes into no log into numbered requests. Returns the seq of the group and
    /// the size of its payload in bytes. Only the replay memory bounds such a group.
    ///
    /// # Errors
    /// The errors of [`check_group`](Self::check_group), [`shape`](Self::shape) and
    /// [`number_requests`](Self::number_requests), and [`Refusal::Full`] if the replay memory has no space now.
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
        self.number_requests()?;
        Ok((seq, bytes))
    }

    /// Frees the requests of the shaped group, because the group is refused.
    pub(super) fn discard_shaped(&mut self) {
        while let Some(id) = self.shaped.pop() {
            self.complete_and_free(id);
        }
    }

    /// Merges the shaped group into the last request in the queue of its server, if that is
    /// allowed. Returns whether it has merged them.
    ///
    /// Both must be whole groups of one request each, one after the other in the stream. Their
    /// blocks must be adjacent on one drive, and neither may be split. Only the last group of a
    /// merged request may have a FLUSH. Otherwise one log entry could not stand for all of them
    /// (trap T16).
    #[inline]
    pub(super) fn merge_into_tail(&mut self) -> bool {
        let [id] = self.shaped[..] else { return false };
        if !self.limits.merge || self.incomplete_count() <= self.limits.merge_from {
            return false;
        }
        let new = self.request(id);
        let Some(&tail) = self.queues[usize::from(new.server)].back() else { return false };
        let queued = self.request(tail);
        // The other flags, boundary and FLUSH, may differ.
        let relevant_flags = Flags(new.flags.0 & Flags::PLACE.with(Flags::SPLIT).0);
        let extent = Extent { member: new.member, lba: new.lba, blocks: new.blocks, offset: 0 };
        let can_merge = queued.num == 1
            && queued.seq_end().next() == new.seq
            && queued.span < SPAN_MAX
            && !queued.flags.has(Flags::FLUSH)
            && self.can_append_to(tail, extent, new.kind, relevant_flags);
        if !can_merge {
            return false;
        }
        probe::count_rare(Rare::MergedGroups);
        let (tag, flags, blocks) = (new.tag, new.flags, new.blocks);
        let mut pieces = core::mem::take(&mut self.request_mut(id).pieces);
        let queued = self.request_mut(tail);
        queued.blocks += blocks;
        queued.span += 1;
        queued.tag = tag;
        queued.flags = queued.flags.with(flags);
        queued.pieces.append(&mut pieces);
        // The list is empty now. It goes back to its request, so that its memory is used again.
        self.request_mut(id).pieces = pieces;
        self.shaped.clear();
        self.complete_and_free(id);
        true
    }

    /// Whether the blocks of `extent` can become the last blocks of request `id`: they begin where
    /// the request ends, on the same drive and with the same kind and place, and both together keep
    /// the transfer limit and lie within one stripe unit.
    fn can_append_to(&self, id: RequestId, extent: Extent, kind: Kind, flags: Flags) -> bool {
        let request = self.request(id);
        let place_flags = |flags: Flags| flags.0 & Flags::PLACE.0;
        let has_same_place = place_flags(request.flags) == place_flags(flags);
        let blocks = request.blocks + extent.blocks;
        let request_end = request.lba + u64::from(request.blocks);
        kind != Kind::Flush
            && request.kind == kind
            && request.member == extent.member
            && !request.flags.has(Flags::SPLIT)
            && (has_same_place || probe::is_bug_planted(Plant::T16MergePlaces))
            && (request_end == extent.lba
                || request_end < extent.lba && probe::is_bug_planted(Plant::T16MergeGaps))
            && (blocks <= self.limits.merged_blocks_max || kind == Kind::Discard)
            && blocks <= self.topology.member(extent.member).request_blocks_max
            && self.topology.is_within_unit(extent.member, request.lba, blocks)
    }

    /// Puts the requests of the shaped group into the ORDER queues of their servers.
    #[inline(always)]
    pub(super) fn enqueue(&mut self) {
        let Self { shaped, requests, queues, .. } = self;
        for id in &*shaped {
            let server = requests.get(*id).server;
            queues[usize::from(server)].push_back(*id);
        }
        shaped.clear();
    }

    /// Puts the shaped requests before all requests in the queues of their servers. Their own order
    /// stays.
    pub(super) fn enqueue_first(&mut self) {
        let Self { shaped, requests, queues, .. } = self;
        for id in shaped.drain(..).rev() {
            queues[usize::from(requests.get(id).server)].push_front(id);
        }
    }

    /// Adds the ordering metadata of a request to `shaped`, as a request on the control path.
    pub(super) fn add_entry(&mut self, of: RequestId) {
        let (id, _) = self.requests.allocate();
        let data = self.requests.get(of);
        let (seq, num, index, tag) = (data.seq, data.num, data.index, data.tag);
        let (member, server, kind, flags) = (data.member, data.server, data.kind, data.flags);
        let (lba, blocks, prepared_lba) = (data.lba, data.blocks, data.prepared_lba);
        let entry = self.requests.get_mut(id);
        (entry.seq, entry.num, entry.index, entry.tag) = (seq, num, index, tag);
        (entry.member, entry.server, entry.kind, entry.flags) = (member, server, kind, flags);
        (entry.lba, entry.blocks, entry.path) = (lba, blocks, Path::Control);
        entry.prepared_lba = prepared_lba;
        self.shaped.push(id);
    }

    /// Whether an earlier request on the same path touches the same blocks, and is not complete (trap
    /// T12).
    pub(super) fn overlaps_earlier(&self, id: RequestId) -> bool {
        let request = self.requests.get(id);
        let place = (request.seq, request.index);
        self.requests.is_any_before(request.path, place, &request.extent())
    }

    /// Moves those of the held requests to `shaped` that overlap no earlier one any more.
    pub(super) fn shape_held(&mut self, held: &mut Vec<RequestId>) {
        let mut index = 0;
        while index < held.len() {
            if self.overlaps_earlier(held[index]) {
                index += 1;
            } else {
                self.shaped.push(held.remove(index));
            }
        }
    }

    /// Adds to `shaped` a record on this path for the log of `server`, about all groups up to `seq`.
    pub(super) fn add_record(&mut self, path: Path, server: u16, seq: Seq) {
        let members = self.topology.members();
        let member = members.iter().position(|member| member.server == server).unwrap_or(0);
        self.add_flush_on(path, Member(member as u8), seq);
    }

    /// Adds a request without blocks on this path to `shaped`.
    pub(super) fn add_flush_on(&mut self, path: Path, member: Member, seq: Seq) {
        self.add_flush(member, seq, 0);
        if let Some(id) = self.shaped.last() {
            self.requests.get_mut(*id).path = path;
        }
    }

    /// Records the volatile drives to which the shaped group, of this seq, writes.
    #[inline(always)]
    pub(super) fn note_dirty(&mut self, seq: Seq) {
        if self.has_volatile_member {
            self.note_dirty_members(seq);
        }
    }

    /// The part of [`note_dirty`](Self::note_dirty) for a volume with volatile members.
    fn note_dirty_members(&mut self, seq: Seq) {
        for index in 0..self.shaped.len() {
            let request = self.request(self.shaped[index]);
            let (kind, member, fua) = (request.kind, request.member, request.fua);
            if kind != Kind::Flush && self.topology.member(member).volatile {
                if !fua {
                    self.dirty[usize::from(member.0)] = Some(seq);
                }
                self.last_write[usize::from(member.0)] = seq;
            }
        }
    }

    /// Poisons the stream from the first group of a failed request on, because nothing later may be
    /// reported complete (promise P6).
    pub(super) fn poison_by_request(&mut self, id: RequestId, cause: Cause) {
        let request = self.request(id);
        self.poison(Failure {
            seq: request.seq,
            member: request.member,
            // A target may carry out FUA as a FLUSH behind the write.
            flush: request.flags.has(Flags::FLUSH) || request.fua,
            cause,
        });
    }

    /// Poisons the stream, and frees all requests that are not sent yet. The first failure stays
    /// the one that is reported.
    pub(super) fn poison(&mut self, failure: Failure) {
        self.window.fail_from(failure.seq);
        if self.failure.is_none() {
            self.failure = Some(failure);
        }
        for server in 0..self.queues.len() {
            while let Some(id) = self.queues[server].pop_front() {
                self.complete_and_free(id);
            }
        }
    }

    /// The failure of this stream that follows from a failed FLUSH of another stream on `member`;
    /// `None` if the stream has no write there that is not durable.
    ///
    /// A failed FLUSH may have lost the writes of all streams on that drive. A later FLUSH does not
    /// bring them back, even if it succeeds (trap T22).
    pub(super) fn failure_by_shared_flush(&self, member: Member) -> Option<Failure> {
        let durable = self.window.durable();
        (self.last_write[usize::from(member.0)] > durable).then(|| Failure {
            seq: durable.next(),
            member,
            flush: true,
            cause: Cause::SharedFlush,
        })
    }

    /// Whether an incomplete write touches these volume blocks. A read must wait for it (promise
    /// P9).
    pub(super) fn has_pending_write(&self, lba: u64, blocks: u32) -> bool {
        if self.incomplete_count() == 0 {
            return false;
        }
        let mut is_pending = false;
        self.topology.for_each_extent(lba, blocks, |extent| {
            is_pending |= self.requests.is_any_incomplete_in(&extent);
        });
        is_pending
    }
}

/// Whether a write has several extents.
#[derive(Clone, Copy, PartialEq, Eq)]
enum IsSplit {
    No,
    Yes,
}

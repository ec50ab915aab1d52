//! The request table of a stream: all requests that wait, are in flight, or are kept for a replay.
//!
//! A request has a fixed place in the table, its [`RequestId`], from [`allocate`] until [`free`].
//! Between the two the engine reports once that the request is complete ([`mark_complete`]).
//!
//! [`allocate`]: RequestTable::allocate
//! [`free`]: RequestTable::free
//! [`mark_complete`]: RequestTable::mark_complete

use alloc::vec::Vec;

use super::{Path, Request, RequestId};
use crate::attribute::{Flags, Kind, Member, Seq};
use crate::topology::Extent;
use crate::write_order::WriteOrder;

/// The requests of one stream.
#[derive(Debug)]
pub(super) struct RequestTable<P> {
    /// The places, by [`RequestId`]. A request stays at its place until it is freed.
    requests: Vec<Request<P>>,
    /// The places that have no request now.
    free_places: Vec<RequestId>,
    /// The number of requests that are not complete.
    incomplete_count: u32,
}

impl<P> RequestTable<P> {
    pub(super) const fn new() -> Self {
        Self { requests: Vec::new(), free_places: Vec::new(), incomplete_count: 0 }
    }

    #[inline]
    pub(super) fn get(&self, id: RequestId) -> &Request<P> {
        &self.requests[id.0 as usize]
    }

    #[inline]
    pub(super) fn get_mut(&mut self, id: RequestId) -> &mut Request<P> {
        &mut self.requests[id.0 as usize]
    }

    /// The number of requests in the table, complete or not.
    #[inline]
    pub(super) fn len(&self) -> usize {
        self.requests.len() - self.free_places.len()
    }

    /// The number of requests that are not complete.
    #[inline]
    pub(super) fn incomplete_count(&self) -> u32 {
        self.incomplete_count
    }

    /// Whether a request that is not complete touches these blocks.
    pub(super) fn is_any_incomplete_in(&self, extent: &Extent) -> bool {
        self.requests.iter().any(|request| request.is_incomplete && request.touches(extent))
    }

    /// Whether a request on this path that comes before the one with this (seq, index), and is not
    /// complete, touches these blocks.
    pub(super) fn is_any_before(&self, path: Path, place: (Seq, u16), extent: &Extent) -> bool {
        self.requests.iter().any(|request| {
            request.is_incomplete
                && request.path == path
                && (request.seq, request.index) < place
                && request.touches(extent)
        })
    }

    /// Takes a free place in the table. The request there is incomplete, of one group, not numbered
    /// and without payload. Its other fields are still those of the last request at that place.
    #[inline]
    pub(super) fn allocate(&mut self) -> (RequestId, &mut Request<P>) {
        self.incomplete_count += 1;
        let id = match self.free_places.pop() {
            Some(id) => id,
            None => self.add_place(),
        };
        let request = &mut self.requests[id.0 as usize];
        debug_assert!(!request.is_incomplete && request.pieces.is_empty(), "the place is free");
        request.span = 1;
        request.num = 0;
        request.index = 0;
        request.path = Path::Data;
        request.fua = false;
        request.order = WriteOrder::Orderless;
        request.flush_before = None;
        request.prepared_lba = 0;
        request.is_incomplete = true;
        request.is_replayed = false;
        (id, request)
    }

    /// Adds a place to the table.
    #[cold]
    fn add_place(&mut self) -> RequestId {
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
            path: Path::Data,
            fua: false,
            order: WriteOrder::Orderless,
            flush_before: None,
            prepared_lba: 0,
            pieces: Vec::new(),
            is_incomplete: false,
            is_replayed: false,
        });
        RequestId(self.requests.len() as u32 - 1)
    }

    /// Notes that a request is complete, and keeps it, because it may have to be replayed. Returns
    /// whether this is its first completion.
    #[inline]
    pub(super) fn mark_complete(&mut self, id: RequestId) -> bool {
        let was_incomplete = core::mem::replace(&mut self.get_mut(id).is_incomplete, false);
        self.incomplete_count -= u32::from(was_incomplete);
        was_incomplete
    }

    /// Frees the place of a request that is complete and is not being replayed.
    #[inline]
    pub(super) fn free(&mut self, id: RequestId) {
        let request = self.get_mut(id);
        debug_assert!(
            !request.is_incomplete && !request.is_replayed,
            "a request that may still end keeps its place"
        );
        request.pieces.clear();
        self.free_places.push(id);
    }

    /// Notes that a request is complete and will not be replayed, and frees its place.
    #[inline]
    pub(super) fn complete_and_free(&mut self, id: RequestId) {
        let was_incomplete = self.mark_complete(id);
        debug_assert!(was_incomplete, "a request completes once");
        self.free(id);
    }
}

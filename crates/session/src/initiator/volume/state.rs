//! The common state of the streams of an open volume: the open streams and their queues, the group
//! after which each stream continues, and the reasons why a stream can't be opened.

use alloc::collections::{BTreeMap, BTreeSet};
use alloc::vec::Vec;

use riopipe_order::attribute::{Seq, StreamId};
use riopipe_order::engine::EngineKind;

use super::ranges::InPlaceRange;
use crate::initiator::association::DRIVES_QUEUE;

/// Why a stream can't be opened now.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum ReserveError {
    /// The volume has no such stream.
    #[error("the volume has {streams} streams, numbered from 0")]
    NoSuchStream {
        /// The number of streams of the volume.
        streams: u16,
    },
    /// The stream is open already.
    #[error("the stream is open already")]
    Open,
    /// In-place updates beyond its prefix have not been acknowledged (trap T9).
    #[error("{updates} in-place updates of the stream have not been acknowledged")]
    Pending {
        /// The number of those updates.
        updates: usize,
    },
    /// A target grants no more queues.
    #[error("a target grants no more than {queues} I/O queues")]
    NoQueue {
        /// The target, as the volume counts them.
        server: usize,
        /// The number of queues that it grants.
        queues: u16,
    },
}

/// The id of the first reader. It is higher than the id of every stream that a volume may have.
const READER_FIRST: u16 = 1 << 15;

/// A stream that is reserved for the caller.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Reserved {
    /// Its queues on every target: those of the first target first.
    pub qids: Vec<u16>,
    /// The group after which it continues.
    pub start: Seq,
    /// Whether its last run ended without a close. Its logs must then be recovered before it
    /// starts.
    pub unrecovered: bool,
}

/// The streams of an open volume; see the [module](self).
#[derive(Debug)]
pub struct VolumeState {
    /// Whether the streams write to ordering logs, so that a stream that ends without a close must
    /// be recovered.
    logged: bool,
    /// The number of queues that a stream has on each target.
    queues_per_server: usize,
    /// The group after which each stream continues.
    marks: Vec<Seq>,
    /// The number of queues that each target grants.
    granted: Vec<u16>,
    /// For each target, the granted queues that no stream uses.
    free: Vec<BTreeSet<u16>>,
    /// Open streams, each with its queues on each target.
    open: BTreeMap<StreamId, Vec<u16>>,
    /// Readers of the volume, each with its queue on each target.
    readers: BTreeMap<StreamId, Vec<u16>>,
    /// Streams that ended without a close. Their last writes may still be in flight, so the stream
    /// takes the same queues when it is opened again: a target grants a queue again only once all
    /// operations of its last connection have come back from the drives (trap T8).
    ended: BTreeMap<StreamId, Vec<u16>>,
    /// Streams that ended without a close, and have not been recovered since.
    unrecovered: BTreeSet<StreamId>,
    /// In-place updates that have not been acknowledged (trap T9).
    pending: BTreeMap<StreamId, Vec<InPlaceRange>>,
    /// The last attempt to recover something (trap T23).
    attempt: u32,
}

impl VolumeState {
    /// The state of a volume that has been opened by the attempt with this number. It has `streams`
    /// streams, and no stream is open. `granted` has the number of I/O queues that each target
    /// grants.
    #[must_use]
    pub fn new(streams: u16, granted: Vec<u16>, engine: EngineKind, attempt: u32) -> Self {
        let queues = |granted: &u16| (DRIVES_QUEUE + 1..=*granted).collect();
        Self {
            logged: engine.capabilities().keeps_log,
            queues_per_server: usize::from(engine.capabilities().queues_per_server),
            marks: alloc::vec![Seq::ZERO; usize::from(streams)],
            free: granted.iter().map(queues).collect(),
            granted,
            open: BTreeMap::new(),
            readers: BTreeMap::new(),
            ended: BTreeMap::new(),
            unrecovered: BTreeSet::new(),
            pending: BTreeMap::new(),
            attempt,
        }
    }

    /// Reserves a stream, and its queues on each target.
    ///
    /// # Errors
    /// [`ReserveError`]: nothing was reserved.
    pub fn reserve(&mut self, stream: StreamId) -> Result<Reserved, ReserveError> {
        let Some(start) = self.marks.get(usize::from(stream.0)).copied() else {
            return Err(ReserveError::NoSuchStream { streams: self.marks.len() as u16 });
        };
        if self.open.contains_key(&stream) {
            return Err(ReserveError::Open);
        }
        if let Some(updates) = self.pending.get(&stream) {
            return Err(ReserveError::Pending { updates: updates.len() });
        }
        let unrecovered = self.logged && self.unrecovered.contains(&stream);
        let qids = self.reserve_queues(stream, self.queues_per_server)?;
        self.open.insert(stream, qids.clone());
        Ok(Reserved { qids, start, unrecovered })
    }

    /// Reserves `count` queues on each target for a stream or a reader.
    fn reserve_queues(&mut self, stream: StreamId, count: usize) -> Result<Vec<u16>, ReserveError> {
        if let Some(qids) = self.ended.remove(&stream) {
            return Ok(qids);
        }
        let Some(server) = self.free.iter().position(|free| free.len() < count) else {
            let take = |free: &mut BTreeSet<u16>| -> Vec<u16> {
                core::iter::from_fn(|| free.pop_first()).take(count).collect()
            };
            return Ok(self.free.iter_mut().flat_map(take).collect());
        };
        // The last queues of another stream that has ended can be used: a target grants them once
        // the writes of that stream have come back. That is not safe without a log. The ended
        // stream could then be opened again on other queues, while late writes of its last queues
        // are in flight. Such a write could overwrite a newer one (trap T8).
        let ended = if self.logged { self.ended.pop_first() } else { None };
        match ended {
            Some((_, qids)) => Ok(qids),
            None => Err(ReserveError::NoQueue { server, queues: self.granted[server] }),
        }
    }

    /// Frees the queues of a stream that has been closed cleanly. All its groups are released up to
    /// `released`, and its logs have that mark.
    pub fn on_stream_closed(&mut self, stream: StreamId, released: Seq) {
        self.set_mark(stream, released);
        self.unrecovered.remove(&stream);
        if let Some(qids) = self.open.remove(&stream) {
            self.free_queues(&qids, self.queues_per_server);
        }
    }

    /// Frees `count` queues on each target.
    fn free_queues(&mut self, qids: &[u16], count: usize) {
        for (free, qids) in self.free.iter_mut().zip(qids.chunks(count)) {
            free.extend(qids);
        }
    }

    /// Keeps the queues of a stream that has ended without a close, because its requests may still
    /// be in flight. Returns whether the stream was open.
    pub fn on_stream_ended(&mut self, stream: StreamId) -> bool {
        let Some(qids) = self.open.remove(&stream) else { return false };
        self.ended.insert(stream, qids);
        self.unrecovered.insert(stream);
        true
    }

    /// Records that a stream has been recovered and continues after group `last`. If `pending`
    /// lists in-place updates, the stream cannot be opened before they are acknowledged (trap T9).
    pub fn on_stream_recovered(
        &mut self,
        stream: StreamId,
        last: Seq,
        pending: Option<Vec<InPlaceRange>>,
    ) {
        self.set_mark(stream, last);
        self.unrecovered.remove(&stream);
        match pending {
            Some(list) => self.pending.insert(stream, list),
            None => self.pending.remove(&stream),
        };
    }

    /// Records that the in-place updates of a stream have been acknowledged.
    pub fn on_updates_acknowledged(&mut self, stream: StreamId) {
        self.pending.remove(&stream);
    }

    /// The in-place updates of a stream that wait to be acknowledged, if it has such a list.
    #[must_use]
    pub fn pending(&self, stream: StreamId) -> Option<&[InPlaceRange]> {
        self.pending.get(&stream).map(Vec::as_slice)
    }

    /// The streams with in-place updates that wait to be acknowledged.
    pub fn pending_streams(&self) -> impl Iterator<Item = StreamId> + '_ {
        self.pending.keys().copied()
    }

    /// The group after which a stream continues.
    #[must_use]
    pub fn mark(&self, stream: StreamId) -> Seq {
        self.marks.get(usize::from(stream.0)).copied().unwrap_or(Seq::ZERO)
    }

    /// Reserves a queue on each target, to read the volume beside its streams. The queues belong to
    /// an id that no stream has.
    ///
    /// # Errors
    /// [`ReserveError::NoQueue`]: nothing was reserved.
    pub fn reserve_reader(&mut self) -> Result<(StreamId, Vec<u16>), ReserveError> {
        let ids_in_use = self.readers.keys().zip(READER_FIRST..).take_while(|(id, at)| id.0 == *at);
        let id = StreamId(READER_FIRST + ids_in_use.count() as u16);
        let qids = self.reserve_queues(id, 1)?;
        self.readers.insert(id, qids.clone());
        Ok((id, qids))
    }

    /// Frees the queues of a reader whose connections are closed.
    pub fn on_reader_closed(&mut self, reader: StreamId) {
        if let Some(qids) = self.readers.remove(&reader) {
            self.free_queues(&qids, 1);
        }
    }

    /// The number of open streams.
    #[must_use]
    pub fn open_streams(&self) -> usize {
        self.open.len()
    }

    /// Whether the streams write to ordering logs.
    #[must_use]
    pub const fn is_logged(&self) -> bool {
        self.logged
    }

    /// The number of the next attempt to recover something. A late answer to an earlier attempt
    /// does not belong to it (trap T23).
    pub fn next_attempt(&mut self) -> u32 {
        self.attempt = self.attempt.wrapping_add(1);
        self.attempt
    }

    fn set_mark(&mut self, stream: StreamId, mark: Seq) {
        if let Some(current) = self.marks.get_mut(usize::from(stream.0)) {
            *current = mark;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::super::ranges::BlockRange;
    use super::*;
    use alloc::vec;

    fn state() -> VolumeState {
        VolumeState::new(8, vec![3, 3], EngineKind::Rio, 0)
    }

    #[test]
    fn t8_a_stream_that_ended_without_a_close_gets_its_own_queues_again() {
        let mut state = state();
        assert_eq!(state.reserve(StreamId(0)).unwrap().qids, [2, 2]);
        assert!(state.on_stream_ended(StreamId(0)));
        assert!(!state.on_stream_ended(StreamId(0)), "it has ended already");
        let other = state.reserve(StreamId(1)).unwrap();
        assert_eq!((other.qids, other.unrecovered), (vec![3, 3], false));
        let again = state.reserve(StreamId(0)).unwrap();
        assert_eq!((again.qids, again.unrecovered), (vec![2, 2], true));
        let none = ReserveError::NoQueue { server: 0, queues: 3 };
        assert_eq!(state.reserve(StreamId(2)), Err(none));
    }

    #[test]
    fn when_queues_run_out_those_of_ended_streams_are_taken() {
        let mut state = state();
        assert_eq!(state.reserve(StreamId(7)).unwrap().qids, [2, 2]);
        assert!(state.on_stream_ended(StreamId(7)));
        assert_eq!(state.reserve(StreamId(0)).unwrap().qids, [3, 3]);
        assert_eq!(state.reserve(StreamId(5)).unwrap().qids, [2, 2]);
    }

    #[test]
    fn t8_without_a_log_a_stream_keeps_its_queues_until_it_is_opened_again() {
        let mut state = VolumeState::new(8, vec![3], EngineKind::None, 0);
        assert_eq!(state.reserve(StreamId(7)).unwrap().qids, [2]);
        assert!(state.on_stream_ended(StreamId(7)));
        assert_eq!(state.reserve(StreamId(0)).unwrap().qids, [3]);
        let none = ReserveError::NoQueue { server: 0, queues: 3 };
        assert_eq!(state.reserve(StreamId(5)), Err(none));
        assert_eq!(state.reserve(StreamId(7)).unwrap().qids, [2]);
    }

    #[test]
    fn a_volume_keeps_a_log_or_not_as_its_engine_does() {
        let is_logged = |engine| VolumeState::new(8, vec![3], engine, 0).is_logged();
        assert_eq!([EngineKind::Rio, EngineKind::Sync].map(is_logged), [true, false]);
    }

    #[test]
    fn a_stream_of_an_engine_with_a_queue_for_each_core_has_several_queues_on_each_target() {
        let mut state = VolumeState::new(8, vec![6, 7], EngineKind::Opimq, 0);
        assert_eq!(state.reserve(StreamId(1)).unwrap().qids, [2, 3, 2, 3]);
        assert_eq!(state.reserve_reader().unwrap().1, [4, 4], "a reader needs one");
        assert_eq!(state.reserve(StreamId(2)).unwrap().qids, [5, 6, 5, 6]);
        let refused = state.reserve(StreamId(3));
        assert_eq!(refused, Err(ReserveError::NoQueue { server: 0, queues: 6 }));
        state.on_stream_closed(StreamId(1), Seq(0));
        state.on_stream_ended(StreamId(2));
        assert_eq!(state.reserve(StreamId(3)).unwrap().qids, [2, 3, 2, 3]);
        assert_eq!(state.reserve(StreamId(2)).unwrap().qids, [5, 6, 5, 6], "its own (T8)");
    }

    #[test]
    fn a_stream_that_was_closed_frees_its_queues_and_goes_on_from_its_mark() {
        let mut state = state();
        state.reserve(StreamId(4)).unwrap();
        assert_eq!(state.reserve(StreamId(4)), Err(ReserveError::Open));
        assert_eq!(state.reserve(StreamId(8)), Err(ReserveError::NoSuchStream { streams: 8 }));
        assert_eq!(state.open_streams(), 1);
        state.on_stream_closed(StreamId(4), Seq(9));
        assert_eq!(state.open_streams(), 0);
        let again = state.reserve(StreamId(4)).unwrap();
        assert_eq!((again.qids, again.start, again.unrecovered), (vec![2, 2], Seq(9), false));
    }

    #[test]
    fn t9_a_stream_with_in_place_updates_waits_for_them_to_be_acknowledged() {
        let mut state = state();
        let range = BlockRange { lba: 5, blocks: 1 };
        let updates = vec![InPlaceRange { seq: Seq(4), range }];
        state.on_stream_recovered(StreamId(1), Seq(3), Some(updates.clone()));
        assert_eq!(state.reserve(StreamId(1)), Err(ReserveError::Pending { updates: 1 }));
        assert_eq!(state.pending_streams().collect::<Vec<_>>(), [StreamId(1)]);
        assert_eq!(state.pending(StreamId(1)), Some(&updates[..]));
        assert_eq!(state.pending(StreamId(0)), None, "another stream");
        state.on_updates_acknowledged(StreamId(1));
        assert_eq!(state.pending(StreamId(1)), None);
        assert_eq!(state.reserve(StreamId(1)).unwrap().start, Seq(3));
    }

    #[test]
    fn readers_have_queues_and_ids_of_their_own() {
        let mut state = state();
        let (first, qids) = state.reserve_reader().unwrap();
        assert_eq!(qids, [2, 2]);
        assert_eq!(state.reserve(StreamId(0)).unwrap().qids, [3, 3]);
        let none = ReserveError::NoQueue { server: 0, queues: 3 };
        assert_eq!(state.reserve_reader(), Err(none));
        state.on_stream_closed(StreamId(0), Seq(1));
        let (second, qids) = state.reserve_reader().unwrap();
        assert_eq!((second.0, qids), (first.0 + 1, vec![3, 3]));
        state.on_reader_closed(first);
        assert_eq!(state.reserve_reader().unwrap(), (first, vec![2, 2]));
        assert_eq!(state.open_streams(), 0);
    }

    #[test]
    fn t23_every_attempt_has_a_number_of_its_own() {
        let mut state = state();
        assert_eq!((state.next_attempt(), state.next_attempt()), (1, 2));
    }
}

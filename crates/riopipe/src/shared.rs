//! What the streams of an open volume share.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use riopipe_metrics::Start;
use riopipe_order::attribute::{Member, Seq, StreamId, VolumeId};
use riopipe_order::engine::EngineKind;
use riopipe_order::handover::{Breach, Ledger};
use riopipe_order::topology::Topology;
use riopipe_session::initiator::opening::OpeningConfig;
use riopipe_session::initiator::stream::{FlushFailures, ReplayBoard};
use riopipe_session::stages::Stages;

use crate::addr::MemberAddr;
use crate::background::Background;
use crate::error::StreamError;
use crate::identity::ConnectOptions;
use crate::info::VolumeInfo;
use crate::recovery::{InPlaceRange, StreamRecovery};
use crate::target::Target;

/// What streams share.
#[derive(Debug)]
pub(crate) struct Inner {
    pub(crate) name: String,
    pub(crate) id: VolumeId,
    pub(crate) info: VolumeInfo,
    pub(crate) engine: EngineKind,
    pub(crate) generation: u32,
    pub(crate) topology: Topology,
    /// The volume as recovery sees it.
    pub(crate) opening: OpeningConfig,
    pub(crate) nsids: Vec<u32>,
    pub(crate) servers: Vec<Arc<Server>>,
    pub(crate) connect: ConnectOptions,
    pub(crate) marks: Mutex<Vec<Seq>>,
    pub(crate) streams: Mutex<Streams>,
    pub(crate) flush_failures: Arc<FlushFailures>,
    pub(crate) replay_board: Arc<ReplayBoard>,
    pub(crate) ledger: Option<SharedLedger>,
    pub(crate) background: Arc<Background>,
    /// Where the time of the streams' groups goes.
    pub(crate) stages: Arc<Stages>,
    pub(crate) opened: Start,
    /// One recovery at a time: they share the queue to the drives. Which attempt the last was.
    pub(crate) recovering: Mutex<u32>,
}

impl Drop for Inner {
    fn drop(&mut self) {
        for server in &self.servers {
            // It learns at once that the owner is gone, and for good: it needs no lease (T25).
            server.target.stop();
        }
    }
}

/// One target of an open volume.
#[derive(Debug)]
pub(crate) struct Server {
    pub(crate) name: String,
    pub(crate) addr: MemberAddr,
    pub(crate) queues_granted: u16,
    /// Whether it speaks the extension, so that the volume is claimed there.
    pub(crate) is_claimed: bool,
    pub(crate) target: Arc<Target>,
}

/// Who has which queue on every server, and what keeps streams from being opened.
#[derive(Debug, Default)]
pub(crate) struct Streams {
    /// Queues that no stream uses, by server.
    pub(crate) free: Vec<BTreeSet<u16>>,
    /// Open streams.
    pub(crate) open: BTreeMap<StreamId, Vec<u16>>,
    /// Streams that ended without a close. Their last writes may still be on their way, so the
    /// next life of the stream takes the same queues: a target grants a queue again only once
    /// everything of its last connection has come back from the drives (T8).
    ended: BTreeMap<StreamId, Vec<u16>>,
    /// Streams that ended without a close, and have not been recovered since.
    unrecovered: BTreeSet<StreamId>,
    /// In-place updates that have not been acknowledged (T9).
    pub(crate) pending: BTreeMap<StreamId, Vec<InPlaceRange>>,
}

/// A stream that is taken, with its queue on every server.
pub(crate) struct Reserved {
    pub(crate) qids: Vec<u16>,
    /// Its last life ended without a close: it comes after its recovery.
    pub(crate) unrecovered: bool,
}

impl Inner {
    /// Takes the stream and a queue on each server for it.
    pub(crate) fn reserve(&self, stream: StreamId) -> Result<Reserved, StreamError> {
        let mut streams = lock(&self.streams);
        if streams.open.contains_key(&stream) {
            return Err(StreamError::Open(stream));
        }
        if let Some(updates) = streams.pending.get(&stream) {
            return Err(StreamError::InPlacePending { stream, updates: updates.len() });
        }
        let unrecovered = streams.unrecovered.contains(&stream);
        let qids = streams.queues_for(stream, |server| StreamError::NoQueue {
            target: self.servers[server].name.clone(),
            queues: self.servers[server].queues_granted,
        })?;
        streams.open.insert(stream, qids.clone());
        Ok(Reserved { qids, unrecovered })
    }

    /// The stream has been closed cleanly.
    pub(crate) fn stream_closed(&self, stream: StreamId, released: Seq) {
        lock(&self.marks)[usize::from(stream.0)] = released;
        let mut streams = lock(&self.streams);
        streams.unrecovered.remove(&stream);
        if let Some(qids) = streams.open.remove(&stream) {
            for (free, qid) in streams.free.iter_mut().zip(qids) {
                free.insert(qid);
            }
        }
    }

    /// The stream is gone, and what it had under way may not be.
    pub(crate) fn stream_dropped(&self, stream: StreamId) {
        let mut streams = lock(&self.streams);
        if let Some(qids) = streams.open.remove(&stream) {
            streams.ended.insert(stream, qids);
            streams.unrecovered.insert(stream);
        }
    }

    /// The stream has been recovered: from here it goes on.
    pub(crate) fn stream_recovered(&self, found: &StreamRecovery) {
        let stream = found.stream;
        lock(&self.marks)[usize::from(stream.0)] = found.last;
        let mut streams = lock(&self.streams);
        streams.unrecovered.remove(&stream);
        if found.acknowledge {
            streams.pending.insert(stream, found.pending());
        } else {
            streams.pending.remove(&stream);
        }
        if let Some(ledger) = &self.ledger {
            ledger.restarted(stream, found.last);
        }
    }

    /// A server's address, for error messages.
    pub(crate) fn server_name(&self, server: usize) -> String {
        self.servers[server].name.clone()
    }

    /// A member's address, for error messages.
    pub(crate) fn member_name(&self, member: Member) -> String {
        self.info.members[usize::from(member.0)].addr.to_string()
    }

    /// Whether the volume's streams leave something in ordering logs.
    pub(crate) fn is_logged(&self) -> bool {
        self.engine == EngineKind::Rio
    }
}

impl Streams {
    fn queues_for<E>(
        &mut self,
        stream: StreamId,
        none_left: impl Fn(usize) -> E,
    ) -> Result<Vec<u16>, E> {
        if let Some(qids) = self.ended.remove(&stream) {
            return Ok(qids);
        }
        if self.free.iter().any(BTreeSet::is_empty)
            && let Some((_, qids)) = self.ended.pop_first()
        {
            // Somebody else's last queues will do: they are granted once that one is over.
            return Ok(qids);
        }
        if let Some(server) = self.free.iter().position(BTreeSet::is_empty) {
            return Err(none_left(server));
        }
        Ok(self.free.iter_mut().filter_map(BTreeSet::pop_first).collect())
    }
}

/// The ledger of T11 and T15, shared by a volume's streams.
#[derive(Debug, Default)]
pub(crate) struct SharedLedger(Mutex<(Ledger, BTreeMap<StreamId, Seq>)>);

impl SharedLedger {
    pub(crate) fn check(
        &self,
        stream: StreamId,
        writes: impl Iterator<Item = (u64, u32, bool)>,
    ) -> Result<(), Breach> {
        let state = lock(&self.0);
        for (lba, blocks, fresh) in writes {
            let released = |of| state.1.get(&of).copied().unwrap_or(Seq::ZERO);
            state.0.check(stream, lba, blocks, fresh, released)?;
        }
        Ok(())
    }

    pub(crate) fn note(
        &self,
        stream: StreamId,
        writes: impl Iterator<Item = (u64, u32)>,
        seq: Seq,
    ) {
        let mut state = lock(&self.0);
        for (lba, blocks) in writes {
            state.0.note(stream, lba, blocks, seq);
        }
    }

    pub(crate) fn released(&self, stream: StreamId, released: Seq) {
        let mut state = lock(&self.0);
        state.1.insert(stream, released);
        state.0.prune(stream, released);
    }

    /// The stream has been recovered: what it wrote beyond `last` is gone, and will be neither
    /// undone nor sent again.
    pub(crate) fn restarted(&self, stream: StreamId, last: Seq) {
        let mut state = lock(&self.0);
        state.1.insert(stream, last);
        state.0.prune(stream, Seq(u64::MAX));
    }
}

/// Locks; a panic of another thread while it held the lock leaves nothing half-done here.
pub(crate) fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn streams() -> Streams {
        Streams { free: vec![BTreeSet::from([2, 3]), BTreeSet::from([2, 3])], ..Streams::default() }
    }

    #[test]
    fn t8_a_stream_that_ended_badly_gets_its_own_queues_again() {
        let mut streams = streams();
        let first = streams.queues_for(StreamId(0), |_| ()).unwrap();
        assert_eq!(first, [2, 2]);
        streams.ended.insert(StreamId(0), first);
        assert_eq!(streams.queues_for(StreamId(1), |_| ()), Ok(vec![3, 3]));
        assert_eq!(streams.queues_for(StreamId(0), |_| ()), Ok(vec![2, 2]));
        assert_eq!(streams.queues_for(StreamId(2), |server| server), Err(0));
    }

    #[test]
    fn when_queues_run_out_those_of_dead_streams_are_taken() {
        let mut streams = streams();
        streams.ended.insert(StreamId(7), vec![9, 9]);
        for stream in 0..2 {
            streams.queues_for(StreamId(stream), |_| ()).unwrap();
        }
        assert_eq!(streams.queues_for(StreamId(5), |_| ()), Ok(vec![9, 9]));
    }

    #[test]
    fn t15_what_recovery_dropped_keeps_nobody_waiting() {
        let ledger = SharedLedger::default();
        ledger.note(StreamId(0), [(5, 1)].into_iter(), Seq(3));
        let check =
            |ledger: &SharedLedger| ledger.check(StreamId(1), [(5, 1, true)].into_iter()).is_ok();
        ledger.released(StreamId(0), Seq(2));
        assert!(!check(&ledger));
        ledger.restarted(StreamId(0), Seq(2));
        assert!(check(&ledger));
    }
}

//! The shared state of the streams of an open volume.

use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex};

use riopipe_metrics::Start;
use riopipe_order::attribute::{Member, Seq, StreamId, VolumeId};
use riopipe_order::engine::EngineKind;
use riopipe_order::topology::Topology;
use riopipe_session::initiator::opening::OpeningConfig;
use riopipe_session::initiator::stream::{FlushFailures, ReadBarrier};
use riopipe_session::initiator::volume::block_ownership::BlockOwnershipChecker;
use riopipe_session::initiator::volume::state::{ReserveError, Reserved, VolumeState};
use riopipe_session::stages::Stages;

use crate::addr::{MemberAddr, TargetAddr};
use crate::error::StreamError;
use crate::identity::ConnectOptions;
use crate::info::VolumeInfo;
use crate::lock::lock;
use crate::recovery::StreamRecovery;
use crate::signal::Signal;
use crate::stream_handle::StreamHandle;
use crate::target::Target;

/// An open volume: the state that its streams and readers share.
#[derive(Debug)]
pub(crate) struct Inner {
    pub(crate) name: String,
    pub(crate) id: VolumeId,
    pub(crate) info: VolumeInfo,
    /// The engine that runs.
    pub(crate) engine: EngineKind,
    /// The generation of this owner.
    pub(crate) generation: u32,
    pub(crate) topology: Topology,
    /// The volume, in the form that recovery needs.
    pub(crate) opening: OpeningConfig,
    /// For each member, its namespace identifier.
    pub(crate) nsids: Vec<u32>,
    pub(crate) servers: Vec<Arc<Server>>,
    pub(crate) connect: ConnectOptions,
    /// The streams that are open, and the queues of the targets that they use.
    pub(crate) state: Mutex<VolumeState>,
    /// The failed FLUSHes of all streams (T22).
    pub(crate) flush_failures: Arc<FlushFailures>,
    /// Makes reads wait while a stream replays (P9).
    pub(crate) read_barrier: Arc<ReadBarrier>,
    /// The ownership checker (T11, T15), if the options or a debug build require it.
    pub(crate) ownership: Option<Mutex<BlockOwnershipChecker>>,
    /// The time of the streams' groups in each stage.
    pub(crate) stages: Arc<Stages>,
    pub(crate) opened: Start,
    /// One recovery at a time: they share the queue to the drives.
    pub(crate) recovering: Mutex<()>,
    /// The volume has been released on its targets.
    pub(crate) closed: AtomicBool,
    /// Wakes waiting threads at each event of a target.
    pub(crate) signal: Arc<Signal>,
}

impl Drop for Inner {
    fn drop(&mut self) {
        for server in &self.servers {
            // This shows the target at once that the owner has ended for good, so no lease is needed
            // (T25).
            server.target.stop();
        }
    }
}

/// One target of an open volume.
#[derive(Debug)]
pub(crate) struct Server {
    pub(crate) name: TargetAddr,
    pub(crate) addr: MemberAddr,
    /// Whether it has the extension, so that the volume is claimed there.
    pub(crate) is_claimed: bool,
    pub(crate) target: Arc<Target>,
}

impl Inner {
    /// Reserves the stream and a queue on each server for it.
    pub(crate) fn reserve(&self, stream: StreamId) -> Result<Reserved, StreamError> {
        lock(&self.state).reserve(stream).map_err(|error| match error {
            ReserveError::NoSuchStream { streams } => {
                StreamError::NoSuchStream { id: stream.0, streams }
            }
            ReserveError::Open => StreamError::Open(stream),
            ReserveError::Pending { updates } => StreamError::InPlacePending { stream, updates },
            ReserveError::NoQueue { server, queues } => {
                StreamError::NoQueue { target: self.server_name(server), queues }
            }
        })
    }

    /// The group after which a stream continues.
    pub(crate) fn mark(&self, stream: StreamId) -> Seq {
        lock(&self.state).mark(stream)
    }

    /// The stream has been closed cleanly.
    pub(crate) fn stream_closed(&self, stream: StreamId, released: Seq) {
        lock(&self.state).on_stream_closed(stream, released);
    }

    /// The stream has ended, and its requests may still be in flight.
    pub(crate) fn stream_dropped(&self, stream: StreamId) {
        let was_open = lock(&self.state).on_stream_ended(stream);
        // Otherwise this could end a stream that another thread has opened meanwhile.
        debug_assert!(was_open, "an opened stream ends once");
    }

    /// The targets need not send the stream messages any more.
    pub(crate) fn forget_stream(&self, stream: StreamId, handle: &Arc<StreamHandle>) {
        self.servers.iter().for_each(|server| server.target.forget(stream, handle));
    }

    /// The stream has been recovered, and continues after the prefix.
    pub(crate) fn stream_recovered(&self, found: &StreamRecovery) {
        lock(&self.state).on_stream_recovered(found.stream, found.last, found.pending());
        if let Some(ownership) = &self.ownership {
            lock(ownership).on_recovered(found.stream, found.last);
        }
    }

    /// A server's address, for error messages.
    pub(crate) fn server_name(&self, server: usize) -> TargetAddr {
        self.servers[server].name.clone()
    }

    /// A member's address, for error messages.
    pub(crate) fn member_addr(&self, member: Member) -> MemberAddr {
        self.info.members[usize::from(member.0)].addr.clone()
    }

    /// Whether the volume has been released on its targets: another initiator may own it.
    pub(crate) fn is_closed(&self) -> bool {
        self.closed.load(Ordering::Acquire)
    }

    /// Whether the volume's streams write to ordering logs.
    pub(crate) fn is_logged(&self) -> bool {
        lock(&self.state).is_logged()
    }
}

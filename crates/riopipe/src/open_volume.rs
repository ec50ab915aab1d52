//! An open volume: the state that its [`Volume`](crate::Volume), its streams and its readers share.

use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex};

use riopipe_metrics::Start;
use riopipe_order::attribute::{Member, Seq, StreamId, VolumeId};
use riopipe_order::engine::EngineKind;
use riopipe_order::following::SharedFollowing;
use riopipe_order::topology::Topology;
use riopipe_session::initiator::opening::OpeningConfig;
use riopipe_session::initiator::stream::{FlushFailures, ReadBarrier, SharedRedirections};
use riopipe_session::initiator::stream_driver::StreamNumbers;
use riopipe_session::initiator::volume::block_ownership::BlockOwnershipChecker;
use riopipe_session::initiator::volume::state::{ReserveError, Reserved, VolumeState};
use riopipe_session::stages::Stages;

use crate::addr::{MemberAddr, TargetAddr};
use crate::error::StreamError;
use crate::following::StreamHandles;
use crate::identity::ConnectOptions;
use crate::info::VolumeInfo;
use crate::lock::lock;
use crate::recovery::StreamRecovery;
use crate::redirections::LockedRedirections;
use crate::signal::Signal;
use crate::stream_handle::StreamHandle;
use crate::target::Target;

/// See the [module](self). The volume is open until this is dropped, or until it is released.
#[derive(Debug)]
pub(crate) struct OpenVolume {
    pub(crate) name: String,
    pub(crate) id: VolumeId,
    pub(crate) info: VolumeInfo,
    /// The engine that runs.
    pub(crate) engine: EngineKind,
    /// The generation of this owner.
    pub(crate) generation: u32,
    pub(crate) topology: Topology,
    /// The properties of the volume, in the form that recovery needs.
    pub(crate) opening_config: OpeningConfig,
    /// For each member, its namespace identifier.
    pub(crate) nsids: Vec<u32>,
    pub(crate) servers: Vec<Arc<Server>>,
    pub(crate) connect_options: ConnectOptions,
    /// The streams that are open, and the queues of the targets that they use.
    pub(crate) state: Mutex<VolumeState>,
    /// The failed FLUSHes of each drive. A failed FLUSH may have lost data of all streams on that
    /// drive, so it fails all of them (trap T22).
    pub(crate) flush_failures: Arc<FlushFailures>,
    /// Makes reads wait while a stream replays, because the target may have lost what the stream
    /// replays (promise P9).
    pub(crate) read_barrier: Arc<ReadBarrier>,
    /// The numbers of the volume's streams in commands to drives that keep their order.
    pub(crate) stream_numbers: Arc<StreamNumbers>,
    /// The blocks that its streams have redirected.
    pub(crate) redirections: Arc<LockedRedirections>,
    /// The groups that other streams follow.
    pub(crate) following: Arc<SharedFollowing>,
    /// The handles by which a stream wakes another one that follows it.
    pub(crate) stream_handles: StreamHandles,
    /// Checks the declarations of the caller about blocks (traps T11, T15). `None` unless the
    /// options or a debug build require it.
    pub(crate) ownership_checker: Option<Mutex<BlockOwnershipChecker>>,
    /// The time of the streams' groups in each stage.
    pub(crate) stages: Arc<Stages>,
    pub(crate) opened_at: Start,
    /// Locked during a recovery, because recoveries share each target's queue for the drives.
    pub(crate) recovery_lock: Mutex<()>,
    /// Whether the volume has been released on its targets.
    pub(crate) is_released: AtomicBool,
    /// Is notified when the association with a target changes.
    pub(crate) signal: Arc<Signal>,
}

impl Drop for OpenVolume {
    fn drop(&mut self) {
        for server in &self.servers {
            // The target detects at once that the owner has ended for good. So it does not keep the
            // volume for the owner until the end of a lease (trap T25).
            server.target.stop();
        }
    }
}

/// One target of an open volume.
#[derive(Debug)]
pub(crate) struct Server {
    pub(crate) name: TargetAddr,
    /// The address of the first member on the target, with the NQN of the subsystem.
    pub(crate) addr: MemberAddr,
    /// Whether the volume is claimed on the target, because the target has Rio's extension.
    pub(crate) is_claimed: bool,
    pub(crate) target: Arc<Target>,
}

impl OpenVolume {
    /// Reserves the stream, and a queue on each server for it.
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
    pub(crate) fn last_seq(&self, stream: StreamId) -> Seq {
        lock(&self.state).mark(stream)
    }

    /// Records that a stream was closed. Its groups up to `released` need no recovery.
    pub(crate) fn on_stream_closed(&self, stream: StreamId, released: Seq) {
        lock(&self.state).on_stream_closed(stream, released);
    }

    /// Records that a stream was dropped without a close. Its requests may still be in flight.
    pub(crate) fn on_stream_dropped(&self, stream: StreamId) {
        let was_open = lock(&self.state).on_stream_ended(stream);
        // A second call could end a stream that another thread has opened after the first call.
        debug_assert!(was_open, "an opened stream ends once");
    }

    /// Stops the messages of the targets to a stream that has ended.
    pub(crate) fn remove_stream_from_targets(&self, stream: StreamId, handle: &Arc<StreamHandle>) {
        for server in &self.servers {
            server.target.remove_stream(stream, handle);
        }
    }

    /// Records that a stream was recovered. It continues after the prefix.
    pub(crate) fn on_stream_recovered(&self, recovery: &StreamRecovery) {
        let StreamRecovery { stream, last, .. } = *recovery;
        lock(&self.state).on_stream_recovered(stream, last, recovery.pending());
        self.redirections.with(&mut |redirections| redirections.forget(stream));
        if let Some(checker) = &self.ownership_checker {
            lock(checker).on_recovered(stream, last);
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

    /// Whether the volume has been released on its targets. Another initiator may own it by now.
    pub(crate) fn is_released(&self) -> bool {
        self.is_released.load(Ordering::Acquire)
    }

    /// Whether the volume's streams write to ordering logs.
    pub(crate) fn has_logs(&self) -> bool {
        lock(&self.state).is_logged()
    }
}

//! Starting a stream: a connection to every target, and the stream bound on each.
//!
//! A target may still be taking leave of the stream's last connection: it refuses the queue until
//! nothing of that one is under way any more (T8). Then everything is tried again a moment later.
//! So it is while a target is away, and when one has gone since its connection was begun: a stream
//! is handed out only over associations that have not ended meanwhile (T27).

use alloc::boxed::Box;
use alloc::sync::Arc;
use alloc::vec::Vec;

use riopipe_order::engine::{Limits, Payload, engine};
use riopipe_order::probe::{self, Plant};
use riopipe_order::topology::Topology;

use super::StreamDriver;
use crate::initiator::queue_pair::SessionError;
use crate::initiator::reconnect::ConnectRequest;
use crate::initiator::stream::{
    BindRefused, CONTROL_COMMANDS, FlushFailures, ReadBarrier, StreamConfig, StreamQueue,
    StreamSession,
};
use crate::wire::BLOCK_BYTES;

/// What a stream is to be.
#[derive(Clone, Debug)]
pub struct StreamSpec {
    /// The stream. Its queue depth is what is wished for: a target may grant smaller queues.
    pub config: StreamConfig,
    /// The volume's topology.
    pub topology: Topology,
    /// Payload bytes that may be held because they are not durable, or not complete (T14).
    pub kept_bytes_max: u64,
    /// Whether neighbouring requests are merged (T16), up to what goes with a command.
    pub merge: bool,
    /// The stream's queue on every server.
    pub qids: Vec<u16>,
    /// It is no stream of the volume, and only reads it; see
    /// [`StreamSession::reads_only`]. Its engine is `EngineKind::None`.
    pub reads_only: bool,
}

/// What all streams of a volume in one process share.
#[derive(Clone, Debug)]
pub struct StreamShared {
    /// Failed FLUSHes (T22).
    pub flush_failures: Arc<FlushFailures>,
    /// Where reads must wait (P9).
    pub read_barrier: Arc<ReadBarrier>,
}

/// Why a stream could not be started.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum StartError {
    /// The connection to a server ended, with an error of the session if it had one.
    #[error("the connection to server {server} ended")]
    Ended {
        /// The server.
        server: u16,
        /// What the session says; `None`: the target or the network closed it.
        error: Option<SessionError>,
    },
    /// A target does not bind the stream.
    #[error("server {} does not bind the stream: {}", .0.server, .0.status)]
    Refused(BindRefused),
    /// A target did not bind the stream in time, or owed an answer for too long.
    #[error("server {server} did not bind the stream within {after_ns} ns")]
    TimedOut {
        /// The server; the first, if it is not known which.
        server: u16,
        /// The time that it had, ns.
        after_ns: u64,
    },
}

/// What the shell does next.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum StartStep {
    /// Make this connection, and say [`connected`](StreamStart::connected), or
    /// [`put_off`](StreamStart::put_off) while the target is away.
    Connect(ConnectRequest),
    /// Drive the [`driver`](StreamStart::driver), if there is one: take in what comes,
    /// [`pump`](StreamDriver::pump) and send; but do not [`settle`](StreamDriver::settle) it. Tell
    /// [`failed`](StreamStart::failed) of a connection that ends.
    Drive,
    /// Close all connections, and come back at this time, ns. It may be past.
    Rest(u64),
    /// The stream is bound everywhere: take it with [`into_driver`](StreamStart::into_driver).
    Ready,
    /// It cannot be started.
    Failed(StartError),
}

/// A refused queue is asked for again after this long, ns.
const REST_NS: u64 = 5_000_000;

/// A connection to be, of the stream to one server.
#[derive(Debug)]
struct PendingConnection<P> {
    asked: bool,
    queue: Option<StreamQueue<P>>,
}

enum Stage<P> {
    Connecting(Vec<PendingConnection<P>>),
    Binding(Box<StreamDriver<P>>),
    /// Nothing is done before `until`; the shell has been told so, or has not.
    Resting {
        until: u64,
        told: bool,
    },
    Failed(StartError),
}

/// A stream that is being started: its connections are made, and it is bound on each target.
pub struct StreamStart<P> {
    spec: StreamSpec,
    shared: StreamShared,
    timeout_ns: u64,
    deadline: u64,
    /// The server that is connected to first: the one that was away last.
    first: u16,
    stage: Stage<P>,
}

impl<P: Payload + AsRef<[u8]> + 'static> StreamStart<P> {
    /// Starts a stream at `now`; it is given up after `timeout_ns`.
    #[must_use]
    pub fn new(spec: StreamSpec, shared: StreamShared, timeout_ns: u64, now: u64) -> Self {
        debug_assert_eq!(spec.qids.len(), spec.topology.servers().len());
        let stage = Stage::Connecting(pending(&spec));
        let deadline = now.saturating_add(timeout_ns);
        Self { spec, shared, timeout_ns, deadline, first: 0, stage }
    }

    /// What the shell does next.
    pub fn step(&mut self, now: u64) -> StartStep {
        match &mut self.stage {
            Stage::Resting { until, told } if now < *until || !*told => {
                *told = true;
                StartStep::Rest(*until)
            }
            Stage::Resting { .. } => {
                self.stage = Stage::Connecting(pending(&self.spec));
                self.step(now)
            }
            Stage::Connecting(pending) => {
                let asked =
                    |server: &u16| pending.get(usize::from(*server)).is_none_or(|p| p.asked);
                let mut servers = core::iter::once(self.first).chain(0..pending.len() as u16);
                match servers.find(|server| !asked(server)) {
                    Some(server) => {
                        pending[usize::from(server)].asked = true;
                        StartStep::Connect(ConnectRequest {
                            stream: self.spec.config.stream,
                            server,
                            qid: self.spec.qids[usize::from(server)],
                            depth: commands(&self.spec),
                            attempts: 0,
                        })
                    }
                    None if now >= self.deadline => self.time_out(0, self.timeout_ns),
                    None => StartStep::Drive,
                }
            }
            Stage::Binding(driver) => match driver.session.is_ready() {
                Ok(true) => StartStep::Ready,
                Ok(false) if now >= self.deadline => self.time_out(0, self.timeout_ns),
                Ok(false) => match driver.session.stalled(now) {
                    Some(server) => self.time_out(server, self.spec.config.timeout_ns),
                    None => StartStep::Drive,
                },
                Err(refused) => self.fail(StartError::Refused(refused)),
            },
            Stage::Failed(error) => StartStep::Failed(error.clone()),
        }
    }

    fn time_out(&mut self, server: u16, after_ns: u64) -> StartStep {
        self.fail(StartError::TimedOut { server, after_ns })
    }

    fn fail(&mut self, error: StartError) -> StartStep {
        self.stage = Stage::Failed(error.clone());
        StartStep::Failed(error)
    }

    /// A connection that was asked for is there, and a queue on it that has not been started.
    pub fn connected(&mut self, server: u16, queue: StreamQueue<P>, now: u64) {
        let Stage::Connecting(pending) = &mut self.stage else { return };
        if let Some(pending) = pending.get_mut(usize::from(server)) {
            pending.queue = Some(queue);
        }
        if pending.iter().all(|pending| pending.queue.is_some()) {
            let queues = pending.iter_mut().filter_map(|pending| pending.queue.take()).collect();
            let mut driver = self.drive(queues);
            driver.session.start(now);
            self.stage = Stage::Binding(Box::new(driver));
        }
    }

    /// A connection has ended, with an error of the session if there was one. If the target only
    /// waits for the end of the stream's last connection, or has hung up without a word, as one does
    /// that dies, everything is tried again.
    pub fn failed(&mut self, server: u16, error: Option<SessionError>, now: u64) {
        if matches!(self.stage, Stage::Failed(_)) {
            return;
        }
        match error {
            Some(error) if !error.is_passing() || now >= self.deadline => {
                self.stage = Stage::Failed(StartError::Ended { server, error: Some(error) });
            }
            _ => self.put_off(server, now),
        }
    }

    /// The association that a server's connections belong to is over: a connection that was begun
    /// before is of no use, nor is what was met on it (T27). Everything is tried again.
    pub fn association_ended(&mut self, server: u16, now: u64) {
        let concerned = match &self.stage {
            Stage::Connecting(pending) => {
                let there = |pending: &PendingConnection<P>| pending.queue.is_some();
                pending.get(usize::from(server)).is_some_and(there)
            }
            Stage::Binding(_) => true,
            Stage::Failed(StartError::Ended { server: at, error: Some(_) }) => {
                *at == server && now < self.deadline
            }
            Stage::Failed(StartError::Refused(refused)) => {
                refused.server == server && now < self.deadline
            }
            Stage::Resting { .. } | Stage::Failed(_) => false,
        };
        if concerned && !probe::planted(Plant::T27LateConnect) {
            self.put_off(server, now);
        }
    }

    /// A connection that was asked for cannot be made now, because the target is away: everything is
    /// tried again a moment later, this server first, until the time is over.
    pub fn put_off(&mut self, server: u16, now: u64) {
        self.first = server;
        self.stage = if now < self.deadline {
            Stage::Resting { until: now.saturating_add(REST_NS), told: false }
        } else {
            Stage::Failed(StartError::Ended { server, error: None })
        };
    }

    /// A server will not come back: the stream cannot be started.
    pub fn give_up(&mut self, server: u16) {
        self.stage = Stage::Failed(StartError::Ended { server, error: None });
    }

    /// The stream's driver once all connections are there.
    pub fn driver(&mut self) -> Option<&mut StreamDriver<P>> {
        match &mut self.stage {
            Stage::Binding(driver) => Some(driver),
            _ => None,
        }
    }

    /// When to call [`step`](Self::step) though nothing may have come.
    #[must_use]
    pub fn deadline(&self, now: u64) -> u64 {
        match &self.stage {
            Stage::Resting { until, told: true } => *until,
            Stage::Resting { told: false, .. } => now,
            Stage::Binding(driver) => {
                driver.deadline(now).map_or(self.deadline, |at| at.min(self.deadline))
            }
            Stage::Connecting(_) | Stage::Failed(_) => self.deadline,
        }
    }

    /// The stream, if it is bound everywhere.
    #[must_use]
    pub fn into_driver(self) -> Option<StreamDriver<P>> {
        match self.stage {
            Stage::Binding(driver) if driver.session.is_ready() == Ok(true) => Some(*driver),
            _ => None,
        }
    }

    /// A driver over queues to all servers.
    fn drive(&self, queues: Vec<StreamQueue<P>>) -> StreamDriver<P> {
        let StreamSpec { config, topology, kept_bytes_max, merge, qids, reads_only } = &self.spec;
        let mut config = config.clone();
        let mut merged_blocks_max = u32::MAX;
        for queue in &queues {
            // A target that takes no data with commands asks for all of it anyway.
            match queue.in_capsule() / BLOCK_BYTES as u32 {
                0 => {}
                blocks => merged_blocks_max = merged_blocks_max.min(blocks),
            }
            let room = usize::from(queue.config().sqsize).saturating_sub(CONTROL_COMMANDS + 1);
            config.queue_depth = config.queue_depth.min(room.max(1));
        }
        let limits = Limits {
            kept_bytes_max: *kept_bytes_max,
            merge: *merge,
            merged_blocks_max,
            start: config.start,
        };
        let engine = engine(config.engine, topology.clone(), limits);
        let session = StreamSession::new(
            config,
            engine,
            topology.clone(),
            queues,
            Arc::clone(&self.shared.flush_failures),
            &self.shared.read_barrier,
        );
        let session = if *reads_only { session.reads_only() } else { session };
        let depth = commands(&self.spec);
        StreamDriver::new(session, qids.iter().map(|qid| (*qid, depth)))
    }
}

/// Commands that a queue of the stream has to have room for.
fn commands(spec: &StreamSpec) -> usize {
    spec.config.queue_depth + CONTROL_COMMANDS
}

fn pending<P>(spec: &StreamSpec) -> Vec<PendingConnection<P>> {
    spec.qids.iter().map(|_| PendingConnection { asked: false, queue: None }).collect()
}

impl<P> core::fmt::Debug for StreamStart<P> {
    fn fmt(&self, f: &mut core::fmt::Formatter<'_>) -> core::fmt::Result {
        let stage = match &self.stage {
            Stage::Connecting(_) => "connecting",
            Stage::Binding(_) => "binding",
            Stage::Resting { .. } => "resting",
            Stage::Failed(_) => "failed",
        };
        f.debug_struct("StreamStart").field("stage", &stage).finish_non_exhaustive()
    }
}

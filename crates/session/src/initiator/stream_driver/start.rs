//! The start of a stream: it makes a connection to every target, and binds the stream on each.
//!
//! A target may still be ending the stream's last connection: it refuses the queue until nothing of
//! that connection is in flight any more (T8). Then the start tries everything again a moment
//! later. It does the same while a target is unreachable, and when a target was lost since its
//! connection was begun: a stream starts only over associations that have not ended meanwhile
//! (T27).

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

/// The specification of a stream that is to be started.
#[derive(Clone, Debug)]
pub struct StreamSpec {
    /// The stream's configuration. A target may grant smaller queues than its queue depth.
    pub config: StreamConfig,
    /// The volume's topology.
    pub topology: Topology,
    /// The most payload bytes that are kept because they are not durable, or not complete (T14).
    pub kept_bytes_max: u64,
    /// Whether adjacent requests are merged (T16), up to the data that a command can carry.
    pub merge: bool,
    /// The id of the stream's queue on each server.
    pub qids: Vec<u16>,
    /// It is not a stream of the volume, and only reads the volume; see
    /// [`StreamSession::reads_only`]. Its engine is `EngineKind::None`.
    pub reads_only: bool,
}

/// The state that all streams of a volume share in one process.
#[derive(Clone, Debug)]
pub struct StreamShared {
    /// The record of failed FLUSHes (T22).
    pub flush_failures: Arc<FlushFailures>,
    /// The read barrier (P9).
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
        /// The error of the session; `None`: the target or the network closed the connection.
        error: Option<SessionError>,
    },
    /// A target has refused to bind the stream.
    #[error("server {} does not bind the stream: {}", .0.server, .0.status)]
    Refused(BindRefused),
    /// A target did not bind the stream in time, or did not answer for too long.
    #[error("server {server} did not bind the stream within {after_ns} ns")]
    TimedOut {
        /// The server; the first, if the server is not known.
        server: u16,
        /// The time limit, ns.
        after_ns: u64,
    },
}

/// The next action of the shell.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum StartStep {
    /// Make this connection, and call [`connected`](StreamStart::connected), or
    /// [`put_off`](StreamStart::put_off) while the target is unreachable.
    Connect(ConnectRequest),
    /// Drive the [`driver`](StreamStart::driver), if there is one: take in the bytes that arrive,
    /// [`pump`](StreamDriver::pump) and send; but do not [`settle`](StreamDriver::settle) it. Call
    /// [`failed`](StreamStart::failed) for a connection that ends.
    Drive,
    /// Close all connections, and call [`step`](StreamStart::step) again at this time, ns. It may
    /// be past.
    Rest(u64),
    /// The stream is bound on all targets: take it with [`into_driver`](StreamStart::into_driver).
    Ready,
    /// The stream cannot be started.
    Failed(StartError),
}

/// A refused queue is requested again after this time, ns.
const REST_NS: u64 = 5_000_000;

/// A connection of the stream to one server that is not made yet.
#[derive(Debug)]
struct PendingConnection<P> {
    asked: bool,
    queue: Option<StreamQueue<P>>,
}

enum Stage<P> {
    Connecting(Vec<PendingConnection<P>>),
    Binding(Box<StreamDriver<P>>),
    /// Nothing is done before `until`; `reported` is whether the shell has received that step.
    Resting {
        until: u64,
        reported: bool,
    },
    Failed(StartError),
}

/// A stream that is being started: its connections are made, and it is bound on each target.
pub struct StreamStart<P> {
    spec: StreamSpec,
    shared: StreamShared,
    timeout_ns: u64,
    deadline: u64,
    /// The server to connect to first: the one that was unreachable last.
    first: u16,
    stage: Stage<P>,
}

impl<P: Payload + AsRef<[u8]> + 'static> StreamStart<P> {
    /// Begins to start a stream at `now`, ns. The start is given up after `timeout_ns`.
    #[must_use]
    pub fn new(spec: StreamSpec, shared: StreamShared, timeout_ns: u64, now: u64) -> Self {
        debug_assert_eq!(spec.qids.len(), spec.topology.servers().len());
        let stage = Stage::Connecting(pending(&spec));
        let deadline = now.saturating_add(timeout_ns);
        Self { spec, shared, timeout_ns, deadline, first: 0, stage }
    }

    /// The next action of the shell.
    pub fn step(&mut self, now: u64) -> StartStep {
        match &mut self.stage {
            Stage::Resting { until, reported } if now < *until || !*reported => {
                *reported = true;
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

    /// A requested connection is made, with a queue that has not been started.
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

    /// A connection has ended, with an error of the session if there was one. The start tries
    /// everything again if the target only waits for the end of the stream's last connection, or
    /// has closed the connection without an error, as a target does that dies.
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

    /// The association of a server's connections has ended: a connection that was begun before is
    /// of no use, and neither are the answers on it (T27). The start tries everything again.
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

    /// A requested connection cannot be made now, because the target is unreachable. The start
    /// tries everything again a moment later, this server first, until its time limit.
    pub fn put_off(&mut self, server: u16, now: u64) {
        self.first = server;
        self.stage = if now < self.deadline {
            Stage::Resting { until: now.saturating_add(REST_NS), reported: false }
        } else {
            Stage::Failed(StartError::Ended { server, error: None })
        };
    }

    /// The server will not come back: the stream cannot be started.
    pub fn give_up(&mut self, server: u16) {
        self.stage = Stage::Failed(StartError::Ended { server, error: None });
    }

    /// The stream's driver once all connections are made.
    pub fn driver(&mut self) -> Option<&mut StreamDriver<P>> {
        match &mut self.stage {
            Stage::Binding(driver) => Some(driver),
            _ => None,
        }
    }

    /// When to call [`step`](Self::step) even if nothing has arrived, ns.
    #[must_use]
    pub fn deadline(&self, now: u64) -> u64 {
        match &self.stage {
            Stage::Resting { until, reported: true } => *until,
            Stage::Resting { reported: false, .. } => now,
            Stage::Binding(driver) => {
                driver.deadline(now).map_or(self.deadline, |at| at.min(self.deadline))
            }
            Stage::Connecting(_) | Stage::Failed(_) => self.deadline,
        }
    }

    /// The stream's driver, if the stream is bound on all targets.
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
        let mut merged_blocks_max = u32::MAX;
        for queue in &queues {
            // A target that takes no data with commands requests all of it anyway.
            match queue.in_capsule() / BLOCK_BYTES as u32 {
                0 => {}
                blocks => merged_blocks_max = merged_blocks_max.min(blocks),
            }
        }
        let limits = Limits {
            kept_bytes_max: *kept_bytes_max,
            merge: *merge,
            merged_blocks_max,
            start: config.start,
        };
        let engine = engine(config.engine, topology.clone(), limits);
        let session = StreamSession::new(
            config.clone(),
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

/// The number of commands for which a queue of the stream must have space.
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

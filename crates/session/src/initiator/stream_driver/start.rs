//! The start of a stream: a connection to every target is made, and the stream is bound on each.
//!
//! ```text
//! Connecting: one connection for each link → Binding → Ready
//!      ↑____ Pausing ________|__________________|
//! ```
//!
//! After a failure that may pass, the start closes all connections, pauses, and begins again. There
//! are three such failures. A target refuses the queue, because commands of the stream's last
//! connection are still in flight (trap T8). A target is unreachable. A target was lost since its
//! connection was begun: a stream starts only over associations that have stood all the time (trap
//! T27).

use alloc::boxed::Box;
use alloc::sync::Arc;
use alloc::vec::Vec;
use core::ops::Range;
use core::sync::atomic::{AtomicU32, Ordering};

use riopipe_order::engine::{Limits, Payload, engine};
use riopipe_order::following::SharedFollowing;
use riopipe_order::probe::{self, Plant};
use riopipe_order::topology::Topology;

use super::StreamDriver;
use crate::initiator::queue_pair::SessionError;
use crate::initiator::reconnect::ConnectRequest;
use crate::initiator::stream::{
    CONTROL_COMMANDS, FlushFailures, ReadBarrier, SharedRedirections, StreamConfig, StreamQueue,
    StreamSession, TargetRefusal,
};
use crate::wire::BLOCK_BYTES;

/// The number of requests in flight from which a stream merges whole groups, if it merges at all.
/// With fewer messages in flight, the initiator waits for the target and the target for the
/// initiator, and that costs more than merging saves.
pub const MERGE_FROM: u32 = 8;

/// The specification of a stream that is to be started.
#[derive(Clone, Debug)]
pub struct StreamSpec {
    /// The stream's configuration. A target may grant smaller queues than its queue depth.
    pub config: StreamConfig,
    /// The volume's topology.
    pub topology: Topology,
    /// Limit of the replay memory: the payload bytes that are kept because they are not durable or
    /// not complete (trap T14).
    pub kept_bytes_max: u64,
    /// Whether adjacent requests are merged (trap T16), up to the data that a command can carry.
    pub merge: bool,
    /// The number of requests in flight from which whole groups are merged.
    pub merge_from: u32,
    /// The id of the queue of each link.
    pub qids: Vec<u16>,
    /// Whether it only reads the volume, and is no stream of the volume; see
    /// [`StreamSession::reads_only`]. Its engine is then `EngineKind::None`.
    pub reads_only: bool,
}

impl StreamSpec {
    /// The number of queues that the stream has to each server.
    fn queues_per_server(&self) -> usize {
        usize::from(self.config.engine.capabilities().queues_per_server)
    }
}

/// The state that all streams of a volume share in one process.
#[derive(Clone, Debug)]
pub struct StreamShared {
    /// The record of failed FLUSHes (trap T22).
    pub flush_failures: Arc<FlushFailures>,
    /// The read barrier (promise P9).
    pub read_barrier: Arc<ReadBarrier>,
    /// The numbers of streams in commands.
    pub stream_numbers: Arc<StreamNumbers>,
    /// The redirected blocks (promise P9).
    pub redirections: Arc<dyn SharedRedirections>,
    /// The groups that other streams follow.
    pub following: Arc<SharedFollowing>,
}

/// The numbers that streams have in commands to drives that keep their order. Each opening of a
/// stream gets another number. So commands of the last opening never belong to the next one, also
/// if a target has not noticed the end of the last one yet.
#[derive(Debug, Default)]
pub struct StreamNumbers(AtomicU32);

impl StreamNumbers {
    /// The number for a stream that is opened now: 1 to 65534. 0 stands for no stream, and 65535
    /// for the one sequence of a drive with a cache barrier.
    fn next(&self) -> u16 {
        (self.0.fetch_add(1, Ordering::Relaxed) % (u32::from(u16::MAX) - 1)) as u16 + 1
    }
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
    Refused(TargetRefusal),
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
    /// [`pump`](StreamDriver::pump) and send, without
    /// [`check_connections`](StreamDriver::check_connections). Call [`failed`](StreamStart::failed)
    /// for a connection that ends.
    Drive,
    /// Close all connections, and call [`step`](StreamStart::step) again at this time, ns. The time
    /// may be past.
    Pause(u64),
    /// The stream is bound on all targets: take it with [`into_driver`](StreamStart::into_driver).
    Ready,
    /// The stream cannot be started.
    Failed(StartError),
}

/// The pause before the start begins again, ns.
const RETRY_DELAY_NS: u64 = 5_000_000;

/// The connection of one link, while not all connections are made.
#[derive(Debug)]
struct PendingConnection<P> {
    /// Whether the shell has been asked for it.
    is_requested: bool,
    /// Its queue, once the connection is made.
    queue: Option<StreamQueue<P>>,
}

/// The progress of the start.
enum Progress<P> {
    /// The connections are being made, one for each link.
    Connecting(Vec<PendingConnection<P>>),
    /// All connections are made. The stream is being bound, or is bound.
    Binding(Box<StreamDriver<P>>),
    /// The start waits until this time, ns, and then begins again.
    Pausing {
        until: u64,
        /// Whether the shell has got [`StartStep::Pause`] for this pause.
        is_reported: bool,
    },
    /// The stream cannot be started.
    Failed(StartError),
}

/// A stream that is being started: its connections are made, and it is bound on each target.
pub struct StreamStart<P> {
    spec: StreamSpec,
    shared: StreamShared,
    /// The time limit of the start, ns.
    timeout_ns: u64,
    /// The time at which the start is given up, ns.
    deadline: u64,
    /// The link whose connection is requested first: the one that failed last.
    first_link: u16,
    progress: Progress<P>,
}

impl<P: Payload + AsRef<[u8]> + 'static> StreamStart<P> {
    /// Begins to start a stream at `now`, ns. The start is given up after `timeout_ns`.
    #[must_use]
    pub fn new(spec: StreamSpec, shared: StreamShared, timeout_ns: u64, now: u64) -> Self {
        debug_assert_eq!(spec.qids.len(), spec.topology.servers().len() * spec.queues_per_server());
        let progress = Progress::Connecting(pending_connections(&spec));
        let deadline = now.saturating_add(timeout_ns);
        Self { spec, shared, timeout_ns, deadline, first_link: 0, progress }
    }

    /// The next action of the shell.
    pub fn step(&mut self, now: u64) -> StartStep {
        match &mut self.progress {
            Progress::Pausing { until, is_reported } if now < *until || !*is_reported => {
                *is_reported = true;
                StartStep::Pause(*until)
            }
            Progress::Pausing { .. } => {
                self.progress = Progress::Connecting(pending_connections(&self.spec));
                self.step(now)
            }
            Progress::Connecting(_) => match self.next_connect_request() {
                Some(request) => StartStep::Connect(request),
                None if now >= self.deadline => self.end_with_timeout(0, self.timeout_ns),
                None => StartStep::Drive,
            },
            Progress::Binding(driver) => match driver.session.is_ready() {
                Ok(true) => StartStep::Ready,
                Ok(false) if now >= self.deadline => self.end_with_timeout(0, self.timeout_ns),
                Ok(false) => match driver.session.stalled(now) {
                    Some(link) => {
                        self.end_with_timeout(self.server_of(link), self.spec.config.timeout_ns)
                    }
                    None => StartStep::Drive,
                },
                Err(refusal) => self.end_with_error(StartError::Refused(refusal)),
            },
            Progress::Failed(error) => StartStep::Failed(error.clone()),
        }
    }

    /// The request for the next connection that the shell has not been asked for; `None` if it has
    /// been asked for all of them. The link that failed last comes first.
    fn next_connect_request(&mut self) -> Option<ConnectRequest> {
        let Progress::Connecting(pending) = &mut self.progress else { return None };
        let links = core::iter::once(self.first_link).chain(0..pending.len() as u16);
        for link in links {
            let Some(connection) = pending.get_mut(usize::from(link)) else { continue };
            if connection.is_requested {
                continue;
            }
            connection.is_requested = true;
            return Some(ConnectRequest {
                stream: self.spec.config.stream,
                server: link / self.spec.queues_per_server() as u16,
                link,
                qid: self.spec.qids[usize::from(link)],
                depth: commands_per_queue(&self.spec),
                attempts: 0,
            });
        }
        None
    }

    /// Ends the start because a time limit of `after_ns` has passed.
    fn end_with_timeout(&mut self, server: u16, after_ns: u64) -> StartStep {
        self.end_with_error(StartError::TimedOut { server, after_ns })
    }

    /// Ends the start with an error, which each later step returns, too.
    fn end_with_error(&mut self, error: StartError) -> StartStep {
        self.progress = Progress::Failed(error.clone());
        StartStep::Failed(error)
    }

    /// Takes a requested connection, with a queue that has not been started. Once all connections
    /// are made, begins to bind.
    pub fn connected(&mut self, link: u16, queue: StreamQueue<P>, now: u64) {
        let Progress::Connecting(pending) = &mut self.progress else { return };
        if let Some(pending) = pending.get_mut(usize::from(link)) {
            pending.queue = Some(queue);
        }
        if pending.iter().all(|pending| pending.queue.is_some()) {
            let queues = pending.iter_mut().filter_map(|pending| pending.queue.take()).collect();
            let mut driver = self.make_driver(queues);
            driver.session.start(now);
            self.progress = Progress::Binding(Box::new(driver));
        }
    }

    /// Handles the end of a link's connection. `error` is the error of the session, if it had one. The
    /// start begins again if the target only waits for the end of the stream's last connection, or
    /// if the connection has ended without an error, as it does when a target dies.
    pub fn failed(&mut self, link: u16, error: Option<SessionError>, now: u64) {
        if matches!(self.progress, Progress::Failed(_)) {
            return;
        }
        match error {
            Some(error) if !error.is_passing() || now >= self.deadline => {
                let server = self.server_of(link);
                self.progress = Progress::Failed(StartError::Ended { server, error: Some(error) });
            }
            _ => self.put_off(link, now),
        }
    }

    /// Handles the end of a server's association. A connection that was begun before, and the
    /// answers on it, cannot be used any more (trap T27). The start begins again.
    pub fn association_ended(&mut self, server: u16, now: u64) {
        let is_affected = match &self.progress {
            Progress::Connecting(pending) => {
                let has_queue = |link: u16| {
                    let pending = pending.get(usize::from(link));
                    pending.is_some_and(|pending| pending.queue.is_some())
                };
                self.links_to(server).any(has_queue)
            }
            Progress::Binding(_) => true,
            // An answer of the lost target has ended the start. It cannot be used any more, either.
            Progress::Failed(StartError::Ended { server: ended_server, error: Some(_) }) => {
                *ended_server == server && now < self.deadline
            }
            Progress::Failed(StartError::Refused(refusal)) => {
                refusal.server == server && now < self.deadline
            }
            Progress::Pausing { .. } | Progress::Failed(_) => false,
        };
        if is_affected && !probe::is_bug_planted(Plant::T27LateConnect) {
            self.put_off(self.links_to(server).start, now);
        }
    }

    /// The server of a link.
    fn server_of(&self, link: u16) -> u16 {
        link / self.spec.queues_per_server() as u16
    }

    /// The links to a server.
    fn links_to(&self, server: u16) -> Range<u16> {
        let queues = self.spec.queues_per_server() as u16;
        server * queues..(server + 1) * queues
    }

    /// Pauses, and then begins again with this link, until the time limit has passed. The shell
    /// calls this when a requested connection cannot be made because the target is unreachable.
    pub fn put_off(&mut self, link: u16, now: u64) {
        self.first_link = link;
        self.progress = if now < self.deadline {
            Progress::Pausing { until: now.saturating_add(RETRY_DELAY_NS), is_reported: false }
        } else {
            Progress::Failed(StartError::Ended { server: self.server_of(link), error: None })
        };
    }

    /// Ends the start with an error, because the server will not come back.
    pub fn give_up(&mut self, server: u16) {
        self.progress = Progress::Failed(StartError::Ended { server, error: None });
    }

    /// The stream's driver once all connections are made.
    pub fn driver(&mut self) -> Option<&mut StreamDriver<P>> {
        match &mut self.progress {
            Progress::Binding(driver) => Some(driver),
            _ => None,
        }
    }

    /// When to call [`step`](Self::step) even if nothing has arrived, ns.
    #[must_use]
    pub fn deadline(&self, now: u64) -> u64 {
        match &self.progress {
            Progress::Pausing { until, is_reported: true } => *until,
            Progress::Pausing { is_reported: false, .. } => now,
            Progress::Binding(driver) => {
                driver.deadline(now).map_or(self.deadline, |at| at.min(self.deadline))
            }
            Progress::Connecting(_) | Progress::Failed(_) => self.deadline,
        }
    }

    /// The stream's driver, if the stream is bound on all targets.
    #[must_use]
    pub fn into_driver(self) -> Option<StreamDriver<P>> {
        match self.progress {
            Progress::Binding(driver) if driver.session.is_ready() == Ok(true) => {
                driver.session.set_open();
                Some(*driver)
            }
            _ => None,
        }
    }

    /// A driver over queues to all servers.
    fn make_driver(&self, queues: Vec<StreamQueue<P>>) -> StreamDriver<P> {
        let StreamSpec { config, topology, kept_bytes_max, merge, merge_from, qids, reads_only } =
            &self.spec;
        // Merged requests should fit into the capsules of all targets.
        let mut merged_blocks_max = u32::MAX;
        for queue in &queues {
            let capsule_blocks = queue.in_capsule() / BLOCK_BYTES as u32;
            // If a target takes no data in capsules, the size of a request makes no difference.
            if capsule_blocks > 0 {
                merged_blocks_max = merged_blocks_max.min(capsule_blocks);
            }
        }
        let stream_number = self.shared.stream_numbers.next();
        let limits = Limits {
            kept_bytes_max: *kept_bytes_max,
            merge: *merge,
            merge_from: *merge_from,
            merged_blocks_max,
            start: config.start,
            stream_number,
            prepare: topology.prepare_part(config.stream),
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
        let session = session.redirecting(&self.shared.redirections);
        let session = if *reads_only {
            session.reads_only()
        } else {
            session.following(&self.shared.following, stream_number)
        };
        let depth = commands_per_queue(&self.spec);
        StreamDriver::new(session, qids.iter().map(|qid| (*qid, depth)))
    }
}

/// The number of commands for which a queue of the stream must have space.
fn commands_per_queue(spec: &StreamSpec) -> usize {
    spec.config.queue_depth + CONTROL_COMMANDS
}

fn pending_connections<P>(spec: &StreamSpec) -> Vec<PendingConnection<P>> {
    spec.qids.iter().map(|_| PendingConnection { is_requested: false, queue: None }).collect()
}

impl<P> core::fmt::Debug for StreamStart<P> {
    fn fmt(&self, f: &mut core::fmt::Formatter<'_>) -> core::fmt::Result {
        let progress = match &self.progress {
            Progress::Connecting(_) => "connecting",
            Progress::Binding(_) => "binding",
            Progress::Pausing { .. } => "pausing",
            Progress::Failed(_) => "failed",
        };
        f.debug_struct("StreamStart").field("stage", &progress).finish_non_exhaustive()
    }
}

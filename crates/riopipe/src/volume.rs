//! An open volume: who owns what, and the streams that come from it.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::mpsc::{RecvTimeoutError, Sender, channel};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use riopipe_net::now_ns;
use riopipe_nvme::command::{Sqe, Status};
use riopipe_order::attribute::{Member, Seq, StreamId, VolumeId};
use riopipe_order::engine::{EngineKind, Limits, engine};
use riopipe_order::handover::{Breach, Ledger};
use riopipe_order::topology::{ServerInfo, Topology};
use riopipe_session::initiator::queue_pair::SessionError;
use riopipe_session::initiator::stream::{
    CONTROL_COMMANDS, FlushFailures, ReplayBoard, StreamConfig, StreamSession,
};
use riopipe_session::wire;

use crate::addr::MemberAddr;
use crate::association::{Association, CallData, KATO_MS, open_socket};
use crate::error::{CallError, CloseError, CreateError, OpenError, StreamError};
use crate::identity::ConnectOptions;
use crate::info::VolumeInfo;
use crate::stream::{Stream, StreamOptions, nanos};
use crate::{create, open};

/// How a volume is to be made.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct CreateOptions {
    /// Blocks of a stripe unit.
    pub unit_blocks: u32,
    /// Streams, 1 to 1024.
    pub streams: u16,
    /// The engine to make it for; `None`: `rio` where every target can, else `sync` (T17).
    pub engine: Option<EngineKind>,
    /// Log slots per stream and target; 0: what fits.
    pub slots: u32,
    /// Make drives forget the volume that they belong to, and all its data.
    pub force: bool,
    /// How to connect.
    pub connect: ConnectOptions,
}

impl Default for CreateOptions {
    fn default() -> Self {
        Self {
            unit_blocks: 16,
            streams: 8,
            engine: None,
            slots: 0,
            force: false,
            connect: ConnectOptions::default(),
        }
    }
}

/// How a volume is to be opened.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct OpenOptions {
    /// The engine; `None`: what the volume was made for.
    pub engine: Option<EngineKind>,
    /// Fence an owner that is alive (T8).
    pub take_over: bool,
    /// Give up an ordering log that is not there any more, and with it the knowledge of what was
    /// under way last (T19).
    pub accept_lost_log: bool,
    /// Check the caller's duties T11 and T15, at some cost. Debug builds always do.
    pub check_handover: bool,
    /// How to connect.
    pub connect: ConnectOptions,
}

/// What was found when a volume was opened.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Recovery {
    /// The last group of each stream: everything up to it is there.
    pub streams: Vec<(StreamId, Seq)>,
    /// Why another engine runs than the volume was made for, if so (T17).
    pub fallback: Option<String>,
}

/// An ordered volume over one or more drives, owned by this process as long as it, or a stream of
/// it, is there.
#[derive(Debug)]
pub struct Volume {
    inner: Arc<Inner>,
}

/// One target of an open volume.
#[derive(Debug)]
pub(crate) struct Server {
    pub(crate) association: Mutex<Association>,
    pub(crate) name: String,
    pub(crate) addr: MemberAddr,
    /// I/O queues that no stream uses.
    pub(crate) queues: Mutex<BTreeSet<u16>>,
    pub(crate) queues_granted: u16,
    pub(crate) speaks_rio: bool,
}

/// What streams share.
#[derive(Debug)]
pub(crate) struct Inner {
    pub(crate) name: String,
    pub(crate) id: VolumeId,
    pub(crate) info: VolumeInfo,
    pub(crate) engine: EngineKind,
    pub(crate) generation: u32,
    pub(crate) topology: Topology,
    pub(crate) nsids: Vec<u32>,
    pub(crate) servers: Vec<Server>,
    pub(crate) connect: ConnectOptions,
    pub(crate) marks: Mutex<Vec<Seq>>,
    pub(crate) streams: Mutex<Streams>,
    pub(crate) flush_failures: Arc<FlushFailures>,
    pub(crate) replay_board: Arc<ReplayBoard>,
    pub(crate) ledger: Option<SharedLedger>,
    /// Dropped with the rest: the keepers of the associations end then.
    pub(crate) keepers: Mutex<Vec<Sender<()>>>,
}

/// Who has which queue on every server.
#[derive(Debug, Default)]
pub(crate) struct Streams {
    /// Open streams.
    open: BTreeMap<StreamId, Vec<u16>>,
    /// Streams that ended without a close. Their last writes may still be on their way, so the
    /// next life of the stream takes the same queues: a target grants a queue again only once
    /// everything of its last connection has come back from the drives (T8).
    ended: BTreeMap<StreamId, Vec<u16>>,
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
}

/// Locks; a panic of another thread while it held the lock leaves nothing half-done here.
pub(crate) fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

impl Volume {
    /// Makes a volume of `members`, in this order: labels on every drive, and room in every
    /// target's ordering log.
    ///
    /// # Errors
    /// [`CreateError`]; what was begun is taken back as far as the targets allow.
    pub fn create(
        name: &str,
        members: &[MemberAddr],
        options: &CreateOptions,
    ) -> Result<VolumeInfo, CreateError> {
        create::create(name, members, options)
    }

    /// Looks at the volume that `members` make, without taking it.
    ///
    /// # Errors
    /// [`OpenError`].
    pub fn inspect(
        members: &[MemberAddr],
        connect: &ConnectOptions,
    ) -> Result<VolumeInfo, OpenError> {
        open::inspect(members, connect)
    }

    /// Opens the volume `name`, whose members are given in its order, and becomes its owner.
    ///
    /// # Errors
    /// [`OpenError`]: a member that is missing, foreign or out of order; an owner that is alive; a
    /// log that has not been recovered, or is not the one that is due.
    pub fn open(
        name: &str,
        members: &[MemberAddr],
        options: &OpenOptions,
    ) -> Result<(Self, Recovery), OpenError> {
        let (inner, recovery) = open::open(name, members, options)?;
        let inner = Arc::new(inner);
        keep_alive(&inner);
        Ok((Self { inner }, recovery))
    }

    /// What it is.
    #[must_use]
    pub fn info(&self) -> &VolumeInfo {
        &self.inner.info
    }

    /// Its size in blocks.
    #[must_use]
    pub fn blocks(&self) -> u64 {
        self.inner.topology.blocks()
    }

    /// The engine that runs.
    #[must_use]
    pub fn engine(&self) -> EngineKind {
        self.inner.engine
    }

    /// Opens a stream. Its id means the same after a restart.
    ///
    /// # Errors
    /// [`StreamError`].
    pub fn stream(&self, id: u16, options: &StreamOptions) -> Result<Stream, StreamError> {
        let stream = StreamId(id);
        if id >= self.inner.info.streams {
            return Err(StreamError::NoSuchStream { id, streams: self.inner.info.streams });
        }
        if !(1..=1024).contains(&options.queue_depth) {
            return Err(StreamError::Options("a stream's queue depth is 1 to 1024"));
        }
        if options.kept_bytes_max < wire::BLOCK_BYTES as u64 {
            return Err(StreamError::Options("a stream must be able to keep at least one block"));
        }
        let queues = self.inner.reserve(stream)?;
        // A target may still be taking leave of the stream's last connection.
        let deadline = now_ns().saturating_add(nanos(self.inner.connect.timeout));
        loop {
            match self.start(stream, &queues, options) {
                Err(StreamError::Target { source, .. })
                    if is_passing(&source) && now_ns() < deadline =>
                {
                    std::thread::sleep(Duration::from_millis(5));
                }
                Err(error) => {
                    self.inner.stream_dropped(stream);
                    return Err(error);
                }
                Ok(stream) => return Ok(stream),
            }
        }
    }

    fn start(
        &self,
        stream: StreamId,
        qids: &[u16],
        options: &StreamOptions,
    ) -> Result<Stream, StreamError> {
        let inner = &self.inner;
        let start = lock(&inner.marks)[usize::from(stream.0)];
        let mut sockets = Vec::new();
        let mut queues = Vec::new();
        let mut depth = options.queue_depth;
        for (server, qid) in inner.servers.iter().zip(qids) {
            let queue = lock(&server.association).io_queue(*qid, depth + CONTROL_COMMANDS);
            depth = depth.min(
                usize::from(queue.config().sqsize).saturating_sub(CONTROL_COMMANDS + 1).max(1),
            );
            sockets.push(open_socket(&server.addr, &inner.connect)?);
            queues.push(queue);
        }
        let limits = Limits { kept_bytes_max: options.kept_bytes_max, merge: options.merge, start };
        let config = StreamConfig {
            volume: inner.id,
            stream,
            generation: inner.generation,
            engine: inner.engine,
            start,
            nsids: inner.nsids.clone(),
            queue_depth: depth,
            timeout_ns: nanos(options.timeout),
            loss_ns: 0,
        };
        let session = StreamSession::new(
            config,
            engine(inner.engine, inner.topology.clone(), limits),
            inner.topology.clone(),
            queues,
            Arc::clone(&inner.flush_failures),
            &inner.replay_board,
        );
        Stream::start(Arc::clone(inner), session, sockets, options)
    }

    /// Gives the volume back, so that anyone may open it. All streams must have been closed.
    ///
    /// # Errors
    /// [`CloseError`].
    pub fn close(self) -> Result<(), CloseError> {
        let open = lock(&self.inner.streams).open.len();
        if open > 0 {
            return Err(CloseError::StreamsOpen(open));
        }
        for server in self.inner.servers.iter().filter(|s| s.speaks_rio) {
            let release = wire::release_command(self.inner.id, false);
            lock(&server.association)
                .admin
                .call(release, CallData::None)
                .map_err(|source| CloseError::Call { target: server.name.clone(), source })?;
        }
        Ok(())
    }
}

impl Inner {
    /// Takes the stream and a queue on each server for it.
    fn reserve(&self, stream: StreamId) -> Result<Vec<u16>, StreamError> {
        let mut streams = lock(&self.streams);
        if streams.open.contains_key(&stream) {
            return Err(StreamError::Open(stream));
        }
        if let Some(qids) = streams.ended.remove(&stream) {
            streams.open.insert(stream, qids.clone());
            return Ok(qids);
        }
        let short = self.servers.iter().any(|server| lock(&server.queues).is_empty());
        if short && let Some((_, qids)) = streams.ended.pop_first() {
            // Somebody else's last queues will do: they are granted once that one is over.
            streams.open.insert(stream, qids.clone());
            return Ok(qids);
        }
        let mut qids = Vec::new();
        for server in &self.servers {
            let Some(qid) = lock(&server.queues).pop_first() else {
                for (server, qid) in self.servers.iter().zip(qids) {
                    lock(&server.queues).insert(qid);
                }
                return Err(StreamError::NoQueue {
                    target: server.name.clone(),
                    queues: server.queues_granted,
                });
            };
            qids.push(qid);
        }
        streams.open.insert(stream, qids.clone());
        Ok(qids)
    }

    /// The stream has been closed cleanly.
    pub(crate) fn stream_closed(&self, stream: StreamId, released: Seq) {
        lock(&self.marks)[usize::from(stream.0)] = released;
        if let Some(qids) = lock(&self.streams).open.remove(&stream) {
            for (server, qid) in self.servers.iter().zip(qids) {
                lock(&server.queues).insert(qid);
            }
        }
    }

    /// The stream is gone, and what it had under way may not be.
    pub(crate) fn stream_dropped(&self, stream: StreamId) {
        let mut streams = lock(&self.streams);
        if let Some(qids) = streams.open.remove(&stream) {
            streams.ended.insert(stream, qids);
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

    /// The log slots of each server, for the topology.
    pub(crate) fn server_infos(slots: &[u32]) -> Vec<ServerInfo> {
        slots.iter().map(|slots| ServerInfo { slots: *slots }).collect()
    }
}

/// Whether a refusal goes away by itself: the old connection's end has not been seen yet.
fn is_passing(error: &CallError) -> bool {
    match error {
        CallError::Status(status) => status.is(wire::status::STREAM_BUSY),
        CallError::Session(SessionError::Refused { status, .. }) => {
            status.is(Status::CONNECT_INVALID)
                || status.is(Status::SEQUENCE_ERROR)
                || status.is(Status::QUEUE_ID_INVALID)
                || status.is(Status::CONNECT_BUSY)
        }
        _ => false,
    }
}

/// A thread for each target that tells it, three times in each keep alive time, that the owner
/// lives: one that hangs keeps no other waiting.
fn keep_alive(inner: &Arc<Inner>) {
    let every = Duration::from_millis(u64::from(KATO_MS) / 3);
    for index in 0..inner.servers.len() {
        let (stop, stopped) = channel();
        let weak = Arc::downgrade(inner);
        let keeper = std::thread::Builder::new().name("riopipe-keeper".into());
        let thread = keeper.spawn(move || {
            while stopped.recv_timeout(every) == Err(RecvTimeoutError::Timeout) {
                let Some(inner) = weak.upgrade() else { return };
                let server = &inner.servers[index];
                let told = lock(&server.association).admin.call(Sqe::keep_alive(), CallData::None);
                match told {
                    Ok(_) | Err(CallError::TimedOut(_)) => {}
                    Err(error) => {
                        tracing::warn!(
                            volume = %inner.name, target = %server.name, %error,
                            "lost the admin connection: the target will take this owner for dead"
                        );
                        return;
                    }
                }
            }
        });
        match thread {
            Ok(_) => lock(&inner.keepers).push(stop),
            Err(error) => {
                tracing::error!(%error, "no thread to keep the volume's connections alive");
            }
        }
    }
}

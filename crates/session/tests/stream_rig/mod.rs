//! An ordered stream whose targets are scripts: the test reads the stream's bytes, and gives the
//! target's answers.
#![allow(dead_code, reason = "each test file uses what it needs")]

use std::ops::Range;
use std::sync::{Arc, Mutex};

use riopipe_nvme::digest::soft;
use riopipe_order::attribute::{Seq, StreamId, VolumeId};
use riopipe_order::engine::{EngineKind, Limits, Op, Payload, Place, Write, engine};
use riopipe_order::following::{Following, FollowingShell, SharedFollowing};
use riopipe_order::topology::{MemberInfo, ServerInfo, Topology};
use riopipe_session::initiator::queue_pair::{QpConfig, QueuePair};
use riopipe_session::initiator::stream::{
    FlushFailures, ReadBarrier, Redirections, SharedRedirections, StreamConfig, StreamQueue,
    StreamSession,
};
use riopipe_session::initiator::stream_driver::StreamShared;
use riopipe_session::outbox::Outbox;

use crate::peer::target::{Command, Page, Script, listed};

pub(crate) const SUBNQN: &str = "nqn.2026-01.io.example:drives";
pub(crate) const VOLUME: VolumeId = VolumeId([7; 16]);
pub(crate) const BIND: u8 = 0x84;
pub(crate) const MARK: u8 = 0x88;
pub(crate) const LIST: u8 = 0x8a;
pub(crate) const MS: u64 = 1_000_000;
pub(crate) const LOSS: u64 = 1000 * MS;
pub(crate) const TIMEOUT: u64 = 300 * MS;

pub(crate) mod status {
    /// Generic: transient transport error.
    pub(crate) const TRANSIENT_TRANSPORT: u16 = 0x022;
    pub(crate) const STALE_GENERATION: u16 = 0x702;
    pub(crate) const NOT_OWNER: u16 = 0x703;
    pub(crate) const UNRECOVERED: u16 = 0x704;
    pub(crate) const POISONED: u16 = 0x707;
    pub(crate) const STREAM_BUSY: u16 = 0x709;
    pub(crate) const NO_SUCH_STREAM: u16 = 0x70e;
    pub(crate) const NOT_BOUND: u16 = 0x70f;
    pub(crate) const LOG_LOST: u16 = 0x710;
}

/// The redirected blocks that the streams of a test share.
#[derive(Debug, Default)]
pub(crate) struct Redirected(std::sync::Mutex<Redirections>);

impl SharedRedirections for Redirected {
    fn with(&self, change: &mut dyn FnMut(&mut Redirections)) {
        change(&mut self.0.lock().unwrap());
    }
}

/// Some blocks of a shared buffer.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Piece(Arc<[u8]>, Range<usize>);

impl Payload for Piece {
    fn part(&self, first_block: u32, blocks: u32) -> Self {
        let start = self.1.start + first_block as usize * 4096;
        Self(Arc::clone(&self.0), start..start + blocks as usize * 4096)
    }
}

impl AsRef<[u8]> for Piece {
    fn as_ref(&self) -> &[u8] {
        &self.0[self.1.clone()]
    }
}

/// One block of a content that names itself.
pub(crate) fn block(content: u64) -> Vec<u8> {
    content.to_le_bytes().repeat(512)
}

/// Takes all bytes that are to be sent.
pub(crate) fn all<P: AsRef<[u8]>>(out: &mut Outbox<P>) -> Vec<u8> {
    let mut bytes = Vec::with_capacity(out.len_bytes());
    out.slices().for_each(|slice| bytes.extend_from_slice(slice));
    out.consume(bytes.len());
    bytes
}

/// Blocks with contents from `content` on.
pub(crate) fn piece(content: u64, blocks: u32) -> Piece {
    let blocks: Vec<_> = (0..u64::from(blocks)).map(|i| block(content + i)).collect();
    let bytes = blocks.concat();
    let len = bytes.len();
    Piece(bytes.into(), 0..len)
}

pub(crate) fn write(lba: u64, content: u64) -> Write<Piece> {
    Write { lba, blocks: 1, op: Op::Write(Place::Fresh, piece(content, 1)) }
}

/// The shape of a stream.
#[derive(Clone)]
pub(crate) struct Shape {
    /// Server and volatility of each member.
    pub(crate) members: Vec<(u16, bool)>,
    pub(crate) slots: u32,
    pub(crate) depth: usize,
    pub(crate) loss_ns: u64,
    pub(crate) merge: bool,
    pub(crate) engine: EngineKind,
    pub(crate) start: u64,
    /// Bytes of data in a capsule.
    pub(crate) in_capsule: u32,
    /// Bytes that one read may ask for.
    pub(crate) data_max: u32,
}

impl Shape {
    /// One drive on each of `servers` servers.
    pub(crate) fn of(servers: u16, volatile: bool) -> Self {
        Self {
            members: (0..servers).map(|server| (server, volatile)).collect(),
            slots: 64,
            depth: 16,
            loss_ns: LOSS,
            merge: false,
            engine: EngineKind::Rio,
            start: 0,
            in_capsule: 8192,
            data_max: 1 << 20,
        }
    }

    pub(crate) fn servers(&self) -> u16 {
        self.members.iter().map(|(server, _)| server + 1).max().unwrap()
    }

    pub(crate) fn topology(&self) -> Topology {
        let members = self.members.iter().map(|&(server, volatile)| MemberInfo {
            server,
            start: 16,
            blocks: 32,
            request_blocks_max: 8,
            volatile,
        });
        let servers = (0..self.servers()).map(|_| ServerInfo { slots: self.slots });
        Topology::new(members.collect(), servers.collect(), 1).unwrap()
    }

    pub(crate) fn queue(
        &self,
        hostnqn: &str,
        hostid: [u8; 16],
        cntlid: u16,
        qid: u16,
    ) -> StreamQueue<Piece> {
        let mut admin = QpConfig::admin(hostnqn.into(), hostid, SUBNQN.into(), soft);
        admin.data_max = self.data_max;
        let mut queue = QueuePair::new(admin.io_queue(cntlid, qid, self.depth as u16 + 9));
        queue.set_in_capsule(self.in_capsule);
        queue
    }

    pub(crate) fn config(&self, stream: u16, generation: u32) -> StreamConfig {
        let mut next = vec![0; usize::from(self.servers())];
        let nsids = self.members.iter().map(|(server, _)| {
            next[usize::from(*server)] += 1;
            next[usize::from(*server)]
        });
        StreamConfig {
            volume: VOLUME,
            stream: StreamId(stream),
            generation,
            engine: self.engine,
            start: Seq(self.start),
            nsids: nsids.collect(),
            queue_depth: self.depth,
            timeout_ns: TIMEOUT,
            loss_ns: self.loss_ns,
        }
    }

    pub(crate) fn session(
        &self,
        stream: u16,
        generation: u32,
        queues: Vec<StreamQueue<Piece>>,
        failures: &Arc<FlushFailures>,
        barrier: &Arc<ReadBarrier>,
    ) -> StreamSession<Piece> {
        let (config, start) = (self.config(stream, generation), Seq(self.start));
        let limits = Limits { merge: self.merge, start, ..Limits::default() };
        let engine = engine(self.engine, self.topology(), limits);
        StreamSession::new(config, engine, self.topology(), queues, Arc::clone(failures), barrier)
    }
}

/// The shared state of the streams of a volume.
pub(crate) fn shared(shape: &Shape) -> (Arc<FlushFailures>, Arc<ReadBarrier>) {
    (FlushFailures::new(shape.members.len()), ReadBarrier::new(usize::from(shape.servers())))
}

/// A stream, its scripts, and a clock.
pub(crate) struct Rig {
    pub(crate) shape: Shape,
    pub(crate) session: StreamSession<Piece>,
    pub(crate) scripts: Vec<Script>,
    pub(crate) now: u64,
    /// The data of the read in flight.
    pub(crate) read: Vec<u8>,
}

impl Rig {
    /// Bound everywhere, in incarnation 1.
    pub(crate) fn new(shape: Shape) -> Self {
        let (failures, barrier) = shared(&shape);
        Self::on(shape, 0, &failures, &barrier).bound(1)
    }

    /// The same, one of several streams, nothing bound yet.
    pub(crate) fn on(
        shape: Shape,
        stream: u16,
        failures: &Arc<FlushFailures>,
        barrier: &Arc<ReadBarrier>,
    ) -> Self {
        let servers = usize::from(shape.servers());
        let queues = (0..servers).map(|_| new_queue(&shape)).collect();
        let session = shape.session(stream, 1, queues, failures, barrier);
        let scripts = (0..servers).map(|_| Script::default()).collect();
        let mut rig = Self { shape, session, scripts, now: 1 << 40, read: vec![] };
        rig.session.start(rig.now);
        rig.carry();
        rig
    }

    pub(crate) fn bound(mut self, incarnation: u32) -> Self {
        for server in 0..self.scripts.len() {
            let bind = self.take_one(server, BIND);
            assert_eq!(bind.dword(10), u32::from(self.session.config().stream.0), "a fresh start");
            self.bind_ok(server, &bind, incarnation);
        }
        assert_eq!(self.session.is_ready(), Ok(true));
        self
    }

    pub(crate) fn bind_ok(&mut self, server: usize, bind: &Command, incarnation: u32) {
        let result = u64::from(self.shape.slots) | u64::from(incarnation) << 32;
        self.scripts[server].answer(bind, 0, result);
        self.carry();
    }

    /// Carries everything both ways until nothing moves.
    pub(crate) fn carry(&mut self) {
        loop {
            self.session.pump(self.now);
            let mut moved = false;
            for server in 0..self.scripts.len() {
                let out = self.session.outbox(server as u16);
                let bytes = all(out);
                self.scripts[server].take(&bytes);
                let input = std::mem::take(&mut self.scripts[server].output);
                moved |= !bytes.is_empty() || !input.is_empty();
                if self.session.is_lost(server as u16) {
                    continue;
                }
                let read = &mut self.read;
                let used =
                    self.session.receive(server as u16, self.now, &input, &mut |_, at, bytes| {
                        read.resize(read.len().max(at + bytes.len()), 0);
                        read[at..at + bytes.len()].copy_from_slice(bytes);
                    });
                // A script sends whole PDUs. A connection may have been closed in between.
                assert!(used.is_ok(), "{used:?}");
            }
            if !moved {
                return;
            }
        }
    }

    /// The commands that have come, all of them.
    pub(crate) fn take(&mut self, server: usize) -> Vec<Command> {
        self.carry();
        std::mem::take(&mut self.scripts[server].commands)
    }

    /// The one command that has come.
    pub(crate) fn take_one(&mut self, server: usize, opcode: u8) -> Command {
        let commands = self.take(server);
        assert_eq!(commands.len(), 1, "one command, not {commands:x?}");
        assert_eq!(commands[0].opcode(), opcode, "{commands:x?}");
        commands.into_iter().next().unwrap()
    }

    pub(crate) fn answer(&mut self, server: usize, command: &Command, status: u16) {
        self.scripts[server].answer(command, status, 0);
        self.carry();
    }

    pub(crate) fn cut(&mut self, server: usize) {
        self.scripts[server] = Script::default();
        let cause = riopipe_order::engine::Cause::Disconnected;
        self.session.lost(server as u16, cause, self.now);
    }

    /// A new connection, up to its bind.
    pub(crate) fn rejoin(&mut self, server: usize) -> Command {
        assert!(self.session.wants_rejoin().any(|wanted| wanted == server as u16));
        self.scripts[server] = Script::default();
        let queue = new_queue(&self.shape);
        self.session.rejoin(server as u16, queue, self.now);
        let bind = self.take_one(server, BIND);
        assert_ne!(bind.dword(10) >> 31, 0, "it goes on");
        bind
    }

    /// A new connection, bound and listed. The next commands are the replay.
    pub(crate) fn back(&mut self, server: usize, incarnation: u32, log: Vec<[u8; 64]>) {
        let bind = self.rejoin(server);
        self.bind_ok(server, &bind, incarnation);
        let list = self.take_one(server, LIST);
        let page = self.page(log);
        self.scripts[server].answer_data(&list, page.encode());
        self.carry();
    }

    /// A whole list.
    pub(crate) fn page(&self, entries: Vec<[u8; 64]>) -> Page {
        Page {
            volume: VOLUME.0,
            stream: self.session.config().stream.0,
            more: false,
            settled: false,
            released: self.shape.start,
            next: 0,
            entries,
        }
    }

    pub(crate) fn submit(&mut self, writes: &[Write<Piece>]) -> u64 {
        let seq = self.session.admit(&mut writes.to_vec(), 0, false).unwrap().0;
        self.carry();
        seq
    }

    /// (complete, durable).
    pub(crate) fn marks(&mut self) -> (u64, u64) {
        let marks = self.session.poll().unwrap();
        (marks.complete.0, marks.durable.0)
    }
}

pub(crate) fn new_queue(shape: &Shape) -> StreamQueue<Piece> {
    shape.queue("nqn.2014-08.org.nvmexpress:uuid:1", [7; 16], 1, 1)
}

/// The log of a target that got these commands: positions from 0 on.
pub(crate) fn log(commands: &[(Command, bool)]) -> Vec<[u8; 64]> {
    commands.iter().zip(0..).map(|((command, durable), at)| listed(command, at, *durable)).collect()
}

/// The state that the streams of a test share about the groups that they follow.
#[derive(Debug, Default)]
pub(crate) struct Followings {
    following: Mutex<Following>,
    pub(crate) woken: Mutex<Vec<StreamId>>,
}

#[derive(Debug)]
struct Shell(Arc<Followings>);

impl FollowingShell for Shell {
    fn with(&self, act: &mut dyn FnMut(&mut Following)) {
        act(&mut self.0.following.lock().unwrap());
    }

    fn wake(&self, stream: StreamId) {
        self.0.woken.lock().unwrap().push(stream);
    }
}

/// The state that the streams of a volume share.
pub(crate) fn stream_shared(shape: &Shape, followings: &Arc<Followings>) -> StreamShared {
    let (flush_failures, read_barrier) = shared(shape);
    let following = SharedFollowing::new(Box::new(Shell(Arc::clone(followings))));
    StreamShared {
        flush_failures,
        read_barrier,
        stream_numbers: Arc::default(),
        redirections: Arc::<Redirected>::default(),
        following: Arc::new(following),
    }
}

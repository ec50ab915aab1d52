//! Streams, targets and the network between them in one thread: the same sessions on both ends as
//! in the programs, with every byte and every drive operation in the test's hands.
#![allow(dead_code, reason = "each test file uses what it needs")]

pub(crate) mod media;
mod region;
pub(crate) mod target;

use std::collections::BTreeMap;
use std::sync::Arc;

use riopipe_order::engine::{Cause, Failure, Op, Place, Refusal, Write};
use riopipe_session::initiator::stream::{
    ConnectionState, ReadBarrier, ReadExtent, ReadSlot, StreamSession,
};

use riopipe_testkit::Random;

use crate::peer::{HOSTID, HOSTNQN};
use crate::stream_rig::{MS, Piece, Shape, all, block, piece, shared};
use target::Target;

/// The effect of a group on some blocks.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum What {
    Put(Place),
    Discard,
}

/// A connection of a stream to a target.
#[derive(Default)]
pub(crate) struct Pipe {
    /// The target's connection; `None` once that target has died.
    conn: Option<usize>,
    pub(crate) to_target: Vec<u8>,
    pub(crate) to_host: Vec<u8>,
    /// Bytes delivered to the target, and to the host.
    pub(crate) delivered: (usize, usize),
}

/// A stream and its connections.
pub(crate) struct Client {
    pub(crate) session: StreamSession<Piece>,
    pub(crate) pipes: Vec<Option<Pipe>>,
    /// Bytes received and not used.
    rest: Vec<Vec<u8>>,
    /// (complete, durable), as last reported.
    pub(crate) marks: (u64, u64),
    /// The read in flight: its blocks, the least version of each at its start, and the data
    /// received.
    reading: Option<(u64, Vec<usize>, Vec<u8>)>,
    pub(crate) reads: usize,
    pub(crate) failure: Option<Failure>,
}

/// All contents that a block has been given, oldest first: the stream, its group, and the content.
type History = BTreeMap<u64, Vec<(u16, u64, u64)>>;

pub(crate) struct World {
    pub(crate) shape: Shape,
    pub(crate) targets: Vec<Target>,
    pub(crate) clients: Vec<Client>,
    /// Connections that the streams have given up, and whose bytes are still in transit.
    pub(crate) late: Vec<(usize, Pipe)>,
    pub(crate) random: Random,
    pub(crate) now: u64,
    pub(crate) barrier: Arc<ReadBarrier>,
    history: History,
    contents: u64,
}

impl World {
    /// `streams` streams, bound everywhere.
    pub(crate) fn new(shape: Shape, streams: u16, seed: u64) -> Self {
        let targets = (0..shape.servers()).map(|server| {
            let members = shape.members.iter().zip(0..).filter(|((at, _), _)| *at == server);
            let drives: Vec<(u8, bool)> =
                members.map(|((_, volatile), member)| (member, *volatile)).collect();
            Target::new(&drives, streams, shape.slots)
        });
        let (failures, barrier) = shared(&shape);
        let mut world = Self {
            targets: targets.collect(),
            clients: vec![],
            late: vec![],
            random: Random(seed),
            now: 1 << 40,
            barrier,
            history: BTreeMap::new(),
            contents: 0,
            shape,
        };
        for stream in 0..streams {
            let servers = world.targets.len();
            let queues = (0..servers).map(|server| world.queue(server, stream)).collect();
            let session = world.shape.session(stream, 1, queues, &failures, &world.barrier);
            let pipes = (0..servers).map(|server| Some(world.pipe(server))).collect();
            world.clients.push(Client {
                session,
                pipes,
                rest: vec![vec![]; servers],
                marks: (0, 0),
                reading: None,
                reads: 0,
                failure: None,
            });
            world.clients[usize::from(stream)].session.start(world.now);
            world.settle();
            assert_eq!(world.clients[usize::from(stream)].session.is_ready(), Ok(true));
        }
        world
    }

    fn queue(
        &self,
        server: usize,
        stream: u16,
    ) -> riopipe_session::initiator::stream::StreamQueue<Piece> {
        let cntlid = self.targets[server].owner.map_or(1, |(_, cntlid)| cntlid);
        self.shape.queue(HOSTNQN, HOSTID, cntlid, stream + 1)
    }

    fn pipe(&mut self, server: usize) -> Pipe {
        Pipe { conn: Some(self.targets[server].accept()), ..Pipe::default() }
    }

    /// The stream sends its next requests.
    pub(crate) fn pump(&mut self, client: usize) {
        let Client { session, pipes, .. } = &mut self.clients[client];
        session.pump(self.now);
        for (server, pipe) in pipes.iter_mut().enumerate() {
            let out = session.outbox(server as u16);
            if let Some(pipe) = pipe {
                pipe.to_target.append(&mut all(out));
            }
            if session.is_lost(server as u16)
                && let Some(pipe) = pipe.take()
            {
                // The session has dropped it by itself.
                self.late.push((server, pipe));
            }
        }
    }

    /// Up to `most` bytes get to the target.
    pub(crate) fn carry_to_target(&mut self, client: usize, server: usize, most: usize) -> usize {
        let Self { clients, targets, .. } = self;
        let Some(pipe) = &mut clients[client].pipes[server] else { return 0 };
        deliver(pipe, &mut targets[server], most)
    }

    /// Up to `most` bytes get to the stream.
    pub(crate) fn carry_to_host(&mut self, client: usize, server: usize, most: usize) -> usize {
        let Self { clients, targets, now, .. } = self;
        let Client { session, pipes, rest, reading, .. } = &mut clients[client];
        let Some(pipe) = &mut pipes[server] else { return 0 };
        if let Some(conn) = pipe.conn {
            pipe.to_host.append(&mut targets[server].sent(conn));
        }
        let n = most.min(pipe.to_host.len());
        let rest = &mut rest[server];
        rest.extend(pipe.to_host.drain(..n));
        pipe.delivered.1 += n;
        let used = session.receive(server as u16, *now, rest, &mut |_, at, bytes| {
            if let Some((_, _, read)) = reading {
                read[at..at + bytes.len()].copy_from_slice(bytes);
            }
        });
        match used {
            Ok(used) => drop(rest.drain(..used)),
            Err(_) => self.lose(client, server),
        }
        n
    }

    /// The stream notices that its connection is gone. The bytes that it has sent are still in
    /// transit.
    pub(crate) fn lose(&mut self, client: usize, server: usize) {
        let one = &mut self.clients[client];
        if let Some(pipe) = one.pipes[server].take() {
            self.late.push((server, pipe));
        }
        one.rest[server].clear();
        one.session.lost(server as u16, Cause::Disconnected, self.now);
    }

    /// Connections that are down are made anew where a target accepts them.
    pub(crate) fn rejoin(&mut self, client: usize) {
        let wanted: Vec<u16> = self.clients[client].session.wants_rejoin().collect();
        for server in wanted {
            let at = usize::from(server);
            if self.targets[at].owner.is_none() {
                continue;
            }
            let queue = self.queue(at, client as u16);
            let pipe = self.pipe(at);
            let one = &mut self.clients[client];
            one.rest[at].clear();
            if let Some(old) = one.pipes[at].replace(pipe) {
                self.late.push((at, old));
            }
            self.clients[client].session.rejoin(server, queue, self.now);
        }
    }

    /// Up to `most` bytes of a connection that was given up still get to the target; then the
    /// target learns that it has ended.
    pub(crate) fn carry_late(&mut self, at: usize, most: usize) {
        let (server, pipe) = &mut self.late[at];
        deliver(pipe, &mut self.targets[*server], most);
        if pipe.to_target.is_empty() || pipe.conn.is_none_or(|c| self.targets[*server].is_closed(c))
        {
            if let Some(conn) = pipe.conn {
                self.targets[*server].end(conn);
            }
            self.late.swap_remove(at);
        }
    }

    /// A target dies and starts again. The streams notice at their next receive from it.
    pub(crate) fn restart(&mut self, server: usize, power: bool) {
        self.targets[server].restart(power, &mut self.random);
        for client in &mut self.clients {
            if let Some(pipe) = &mut client.pipes[server] {
                pipe.conn = None;
            }
        }
        self.late.retain(|(at, _)| *at != server);
    }

    /// The owner comes back to a target that has started again.
    pub(crate) fn come_back(&mut self, server: usize) {
        if self.targets[server].owner.is_none() {
            self.targets[server].claim(1, true);
        }
    }

    /// Streams whose target has died, or has closed their connection, notice.
    pub(crate) fn notice(&mut self, client: usize) {
        for server in 0..self.targets.len() {
            let gone = |pipe: &Pipe| match pipe.conn {
                None => true,
                Some(conn) => self.targets[server].is_closed(conn) && pipe.to_host.is_empty(),
            };
            if self.clients[client].pipes[server].as_ref().is_some_and(gone) {
                self.lose(client, server);
            }
        }
    }

    /// A group of writes to blocks of the stream's own. Returns whether it was taken.
    pub(crate) fn submit(
        &mut self,
        client: usize,
        blocks: &[(u64, u32, What)],
        durable: bool,
    ) -> bool {
        let mut contents = self.contents;
        let mut held = vec![];
        let writes = blocks.iter().map(|&(lba, blocks, what)| {
            let first = contents + 1;
            let op = match what {
                What::Put(place) => {
                    contents += u64::from(blocks);
                    Op::Write(place, piece(first, blocks))
                }
                What::Discard => Op::Discard,
            };
            held.extend(
                (0..u64::from(blocks))
                    .map(|i| (lba + i, if what == What::Discard { 0 } else { first + i })),
            );
            Write { lba, blocks, op }
        });
        let writes: Vec<Write<Piece>> = writes.collect();
        let one = &mut self.clients[client];
        match one.session.admit(&mut writes.clone(), self.contents, durable) {
            Ok(seq) => {
                for (lba, content) in held {
                    let history = self.history.entry(lba).or_default();
                    history.push((client as u16, seq.0, content));
                }
                self.contents = contents;
                true
            }
            Err(Refusal::Full(_) | Refusal::TooLarge(_)) => false,
            Err(other) => panic!("{other:?}"),
        }
    }

    /// Reads the marks: they never go back (P3).
    pub(crate) fn poll(&mut self, client: usize) {
        let one = &mut self.clients[client];
        match one.session.poll() {
            Ok(marks) => {
                let (complete, durable) = one.marks;
                assert!(marks.complete.0 >= complete && marks.durable.0 >= durable, "{marks:?}");
                assert!(
                    marks.durable <= marks.complete
                        && marks.complete <= one.session.engine().last_admitted()
                );
                one.marks = (marks.complete.0, marks.durable.0);
            }
            Err(failure) => one.failure = Some(failure),
        }
    }

    /// Begins a read, if none is in flight and no write of its own blocks it.
    pub(crate) fn read(&mut self, client: usize, lba: u64, blocks: u32) {
        let one = &mut self.clients[client];
        if one.reading.is_some() || one.session.read_must_wait(lba, blocks) {
            return;
        }
        one.session.start_read(ReadSlot(0), &[ReadExtent { lba, blocks }]);
        // The stream's own writes are all there; others' up to the reported marks.
        let least = (lba..lba + u64::from(blocks)).map(|lba| {
            let reported = |&(stream, seq, _): &(u16, u64, u64)| {
                usize::from(stream) == client || seq <= self.clients[usize::from(stream)].marks.0
            };
            self.history.get(&lba).and_then(|h| h.iter().rposition(reported)).map_or(0, |at| at + 1)
        });
        let least = least.collect();
        self.clients[client].reading = Some((lba, least, vec![0xee; blocks as usize * 4096]));
    }

    /// Judges a read that has ended: each block holds its content of the start, or something newer
    /// (P9).
    pub(crate) fn end_read(&mut self, client: usize) {
        let one = &mut self.clients[client];
        if one.session.is_reading(ReadSlot(0)) {
            return;
        }
        let Some((lba, least, bytes)) = one.reading.take() else { return };
        if one.session.read_result(ReadSlot(0)).is_err() {
            assert!(one.session.poll().is_err(), "only a failed stream's reads fail");
            return;
        }
        one.reads += 1;
        for ((bytes, least), lba) in bytes.chunks(4096).zip(least).zip(lba..) {
            let none = vec![];
            let history = self.history.get(&lba).unwrap_or(&none);
            let old = std::iter::once(0).chain(history.iter().map(|(_, _, content)| *content));
            let found = old.clone().skip(least).any(|content| bytes == block(content));
            assert!(
                found,
                "block {lba} reads {:?}, not one of {:?}",
                &bytes[..8],
                old.skip(least).collect::<Vec<_>>()
            );
        }
    }

    pub(crate) fn is_reading(&self, client: usize) -> bool {
        self.clients[client].reading.is_some()
    }

    /// Everything moves, nothing fails, until nothing moves any more.
    pub(crate) fn settle(&mut self) {
        for round in 0.. {
            assert!(round < 10_000, "it never ends (P8)");
            let mut moved = false;
            while !self.late.is_empty() {
                self.carry_late(0, usize::MAX);
            }
            for target in &mut self.targets {
                moved |= target.busy() > 0;
                target.work_all();
            }
            for client in 0..self.clients.len() {
                self.notice(client);
                self.rejoin(client);
                self.pump(client);
                for server in 0..self.targets.len() {
                    moved |= self.carry_to_target(client, server, usize::MAX) > 0;
                    moved |= self.carry_to_host(client, server, usize::MAX) > 0;
                }
                self.poll(client);
                self.end_read(client);
                moved |= self.clients[client].session.wants_rejoin().next().is_some();
                let due = self.clients[client].session.deadline(self.now);
                if !moved
                    && let Some(due) = due
                    && due <= self.now + 200 * MS
                {
                    self.now = self.now.max(due);
                    moved = true;
                }
            }
            if !moved {
                return;
            }
        }
    }

    /// Has everything made durable, and reads every block as a power cut would leave it (P2, P5,
    /// P7).
    pub(crate) fn check_all(&mut self) {
        self.settle();
        for client in 0..self.clients.len() {
            let one = &mut self.clients[client];
            let last = one.session.engine().last_admitted();
            one.session.ask_durable(last);
        }
        self.settle();
        for (client, one) in self.clients.iter().enumerate() {
            assert_eq!(one.failure, None);
            let last = one.session.engine().last_admitted().0;
            assert_eq!(one.marks, (last, last), "stream {client}");
            assert_eq!(one.session.engine().released().0, last);
            for server in 0..self.targets.len() {
                assert_eq!(one.session.connection(server as u16), ConnectionState::Up);
            }
        }
        for server in 0..self.targets.len() {
            assert!(self.barrier.readable(server as u16));
        }
        let topology = self.shape.topology();
        for lba in 0..topology.blocks() {
            let history = self.history.get(&lba).map(Vec::as_slice).unwrap_or_default();
            let content = history.last().map_or(0, |(_, _, content)| *content);
            topology.for_each_extent(lba, 1, |extent| {
                let server = usize::from(topology.member(extent.member).server);
                let before = &self.shape.members[..usize::from(extent.member.0)];
                let ns = before.iter().filter(|(at, _)| usize::from(*at) == server).count();
                let bytes = self.targets[server].media.drives[ns].durable_block(extent.lba);
                assert!(
                    bytes == block(content),
                    "block {lba} holds {:?}, not {content}",
                    &bytes[..8]
                );
            });
        }
    }
}

fn deliver(pipe: &mut Pipe, target: &mut Target, most: usize) -> usize {
    let n = most.min(pipe.to_target.len());
    let bytes: Vec<u8> = pipe.to_target.drain(..n).collect();
    pipe.delivered.0 += n;
    if let Some(conn) = pipe.conn
        && n > 0
    {
        target.feed(conn, &bytes);
        pipe.to_host.append(&mut target.sent(conn));
    }
    n
}

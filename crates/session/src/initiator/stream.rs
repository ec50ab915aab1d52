//! An ordered stream: one engine over one queue pair for each of the volume's targets.
//!
//! The owner admits groups, calls [`pump`](StreamSession::pump) to turn what may go into commands,
//! sends what the outboxes hold, feeds what arrives to [`receive`](StreamSession::receive), and
//! reads the marks. No reply is ever waited for here.

use alloc::boxed::Box;
use alloc::sync::Arc;
use alloc::vec::Vec;
use core::sync::atomic::{AtomicU64, Ordering};

use riopipe_nvme::command::{Sqe, Status};
use riopipe_order::attribute::{Kind, Member, Seq, StreamId, VolumeId};
use riopipe_order::engine::{
    Cause, Engine, EngineKind, Failure, Marks, Payload, Refusal, RequestId, Write,
};
use riopipe_order::topology::Topology;

use super::queue_pair::{Data, Event, QueuePair, SessionError};
use crate::outbox::Outbox;
use crate::wire;

/// Failed FLUSHes of a volume's drives, shared by its streams (T22).
#[derive(Debug)]
pub struct FlushFailures {
    epoch: AtomicU64,
    members: Vec<AtomicU64>,
}

impl FlushFailures {
    /// None so far, for a volume of `members` drives.
    #[must_use]
    pub fn new(members: usize) -> Arc<Self> {
        let members = (0..members).map(|_| AtomicU64::new(0)).collect();
        Arc::new(Self { epoch: AtomicU64::new(0), members })
    }

    fn fail(&self, member: Member) {
        self.members[usize::from(member.0)].fetch_add(1, Ordering::Relaxed);
        self.epoch.fetch_add(1, Ordering::Release);
    }
}

/// What a stream is.
#[derive(Clone, Debug)]
pub struct StreamConfig {
    /// The volume.
    pub volume: VolumeId,
    /// The stream.
    pub stream: StreamId,
    /// The owner's generation.
    pub generation: u32,
    /// The engine.
    pub engine: EngineKind,
    /// The mark from which it goes on.
    pub start: Seq,
    /// The namespace of each member on its server.
    pub nsids: Vec<u32>,
    /// Requests in flight per target at most.
    pub queue_depth: usize,
    /// How long a target may make no progress while commands are out, ns.
    pub timeout_ns: u64,
}

/// An idle stream tells its mark this often at most, ns: one command in passing, not one a write.
const IDLE_MARK_NS: u64 = 50_000_000;

/// Commands beside the queue depth that a queue must have room for: reads, marks, bind.
pub const CONTROL_COMMANDS: usize = 8;

/// Commands of a read: its number in bits 32–39, the part below, so that what comes for a read
/// that was given up is not taken for the next one's.
const READ: u64 = 1 << 40;
const BIND: u64 = 2 << 40;
const MARK: u64 = 3 << 40;
const KIND: u64 = 0xff << 40;

#[derive(Debug)]
struct Link<P> {
    queue: QueuePair<P>,
    out: Outbox<P>,
    ready: bool,
    lost: bool,
    /// When the target last answered, or was first asked something, ns.
    progress: u64,
    /// The mark that the target was last told durably, and when, ns.
    told: (Seq, u64),
}

#[derive(Debug)]
struct ReadPart {
    server: u16,
    nsid: u32,
    lba: u64,
    blocks: u32,
    /// Where it starts in the whole read, bytes.
    offset: usize,
    sent: bool,
    ended: bool,
}

#[derive(Debug, Default)]
struct Reading {
    number: u8,
    parts: Vec<ReadPart>,
    unsent: usize,
    outstanding: usize,
    failed: Option<(usize, Status)>,
}

/// Why a stream could not be started.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct BindRefused {
    /// The server.
    pub server: u16,
    /// Its answer.
    pub status: Status,
}

/// An ordered stream over its targets.
pub struct StreamSession<P> {
    config: StreamConfig,
    engine: Box<dyn Engine<P>>,
    topology: Topology,
    links: Vec<Link<P>>,
    reading: Reading,
    marks: Marks,
    marks_out: usize,
    mark_refused: Option<BindRefused>,
    bind_refused: Option<BindRefused>,
    shared: Arc<FlushFailures>,
    seen_epoch: u64,
    seen: Vec<u64>,
}

impl<P: Payload + AsRef<[u8]>> StreamSession<P> {
    /// A stream over `queues`, one for each server of the topology, none of them started.
    #[must_use]
    pub fn new(
        config: StreamConfig,
        engine: Box<dyn Engine<P>>,
        topology: Topology,
        queues: Vec<QueuePair<P>>,
        shared: Arc<FlushFailures>,
    ) -> Self {
        debug_assert_eq!(queues.len(), topology.servers().len());
        debug_assert_eq!(config.nsids.len(), topology.members().len());
        let links = queues
            .into_iter()
            .map(|queue| Link {
                queue,
                out: Outbox::new(),
                ready: false,
                lost: false,
                progress: 0,
                told: (config.start, 0),
            })
            .collect();
        let seen_epoch = shared.epoch.load(Ordering::Acquire);
        let seen = shared.members.iter().map(|m| m.load(Ordering::Relaxed)).collect();
        Self {
            marks: Marks { complete: config.start, durable: config.start },
            config,
            engine,
            topology,
            links,
            reading: Reading::default(),
            marks_out: 0,
            mark_refused: None,
            bind_refused: None,
            shared,
            seen_epoch,
            seen,
        }
    }

    /// Opens the handshake on every connection.
    pub fn start(&mut self, now: u64) {
        for link in &mut self.links {
            link.progress = now;
            link.queue.start(&mut link.out);
        }
    }

    /// Whether every connection is set up and, if the engine needs it, bound.
    ///
    /// # Errors
    /// When a target has refused to bind the stream.
    pub fn is_ready(&self) -> Result<bool, BindRefused> {
        match self.bind_refused {
            Some(refused) => Err(refused),
            None => Ok(self.links.iter().all(|link| link.ready)),
        }
    }

    /// Takes a group, whole or not at all.
    ///
    /// # Errors
    /// See [`Engine::admit`].
    pub fn admit(&mut self, writes: &[Write<P>], tag: u64, durable: bool) -> Result<Seq, Refusal> {
        self.engine.admit(writes, tag, durable)
    }

    /// Turns what may be sent now into commands in the outboxes.
    pub fn pump(&mut self, now: u64) {
        let Self { links, engine, config, reading, marks_out, .. } = self;
        for (server, link) in links.iter_mut().enumerate() {
            if link.lost || !link.ready {
                continue;
            }
            if link.queue.in_flight() == 0 {
                link.progress = now;
            }
            while link.queue.in_flight() < config.queue_depth {
                let Some(dispatch) = engine.next(server as u16) else { break };
                let request = engine.request(dispatch.id);
                let nsid = config.nsids[usize::from(request.member.0)];
                let mut sqe = match request.kind {
                    Kind::Write => Sqe::write(nsid, request.lba, request.blocks),
                    Kind::Discard => Sqe::write_zeroes(nsid, request.lba, request.blocks, true),
                    Kind::Flush => Sqe::flush(nsid),
                };
                if let Some((ordinal, released)) = dispatch.ordered {
                    wire::put_attribute(&mut sqe, &request.attribute(ordinal), released);
                }
                let data = match request.kind {
                    Kind::Write => Data::Write(&request.pieces),
                    Kind::Discard | Kind::Flush => Data::None,
                };
                let sent = link.queue.submit(sqe, u64::from(dispatch.id.0), data, &mut link.out);
                debug_assert!(sent.is_ok(), "the queue has room for its depth");
            }
            if reading.unsent > 0 {
                send_reads(reading, server as u16, link);
            }
            let released = engine.released();
            // Alone when idle (T1): so that a crash of an idle initiator leaves a log at rest.
            if config.engine == EngineKind::Rio
                && engine.is_idle()
                && released == engine.last()
                && released > link.told.0
                && now.saturating_sub(link.told.1) > IDLE_MARK_NS
            {
                link.told.1 = now;
                tell_mark(link, released, marks_out);
            }
        }
    }

    /// Starts a read of volume blocks; the caller has made sure that
    /// [`read_must_wait`](Self::read_must_wait) is false. One read at a time: an earlier one that
    /// has not ended is given up.
    pub fn start_read(&mut self, lba: u64, blocks: u32) {
        let Self { reading, topology, config, .. } = self;
        reading.number = reading.number.wrapping_add(1);
        reading.parts.clear();
        reading.failed = None;
        topology.map(lba, blocks, |extent| {
            reading.parts.push(ReadPart {
                server: topology.member(extent.member).server,
                nsid: config.nsids[usize::from(extent.member.0)],
                lba: extent.lba,
                blocks: extent.blocks,
                offset: extent.offset as usize * wire::BLOCK_BYTES,
                sent: false,
                ended: false,
            });
        });
        reading.unsent = reading.parts.len();
        reading.outstanding = reading.parts.len();
    }

    /// Whether an own write to these blocks is not complete: a read must wait for it (P9).
    #[must_use]
    pub fn read_must_wait(&self, lba: u64, blocks: u32) -> bool {
        self.engine.writes_pending(lba, blocks)
    }

    /// Whether a read is under way.
    #[must_use]
    pub fn is_reading(&self) -> bool {
        self.reading.outstanding > 0
    }

    /// How the last read ended: where it failed, in bytes from its start, and why.
    ///
    /// # Errors
    /// The first part that failed.
    pub fn read_result(&self) -> Result<(), (usize, Status)> {
        self.reading.failed.map_or(Ok(()), Err)
    }

    /// Takes in what arrived from `server`; `sink` gets the bytes of the read under way, with their
    /// offset in it. Returns how many bytes of `buf` were used up.
    ///
    /// # Errors
    /// When the target breaks the protocol; the caller closes the connection and says
    /// [`lost`](Self::lost).
    pub fn receive(
        &mut self,
        server: u16,
        now: u64,
        buf: &[u8],
        sink: &mut dyn FnMut(usize, &[u8]),
    ) -> Result<usize, SessionError> {
        let Self {
            links,
            engine,
            config,
            reading,
            marks_out,
            bind_refused,
            mark_refused,
            shared,
            ..
        } = self;
        let link = &mut links[usize::from(server)];
        let mut became_ready = false;
        let mut events = 0u32;
        let used = link.queue.receive(buf, &mut link.out, |event| {
            events += 1;
            match event {
                Event::Ready { .. } => became_ready = true,
                Event::Data { user, offset, bytes } => {
                    if let Some(index) = reading.part(user) {
                        sink(reading.parts[index].offset + offset as usize, bytes);
                    }
                }
                Event::Done { user, cqe } => {
                    let status = cqe.status();
                    match user & KIND {
                        0 => {
                            let id = RequestId(user as u32);
                            if status.is_ok() {
                                engine.done(id, Ok(()));
                            } else {
                                let request = engine.request(id);
                                // Ordered FLUSHes are the target's to judge: it knows whether it
                                // was the drive that failed, and tells every stream there (T22).
                                if config.engine != EngineKind::Rio
                                    && request.kind == Kind::Flush
                                    && is_drive_failure(status)
                                {
                                    shared.fail(request.member);
                                }
                                engine.done(id, Err(Cause::Status(status.code())));
                            }
                        }
                        READ => {
                            if let Some(index) = reading.part(user) {
                                reading.end(index, status);
                            }
                        }
                        BIND if status.is_ok() => link.ready = true,
                        BIND => *bind_refused = Some(BindRefused { server, status }),
                        _ => {
                            *marks_out -= 1;
                            if !status.is_ok() {
                                *mark_refused = Some(BindRefused { server, status });
                            }
                        }
                    }
                }
            }
        })?;
        if events > 0 {
            link.progress = now;
        }
        if became_ready {
            if config.engine == EngineKind::Rio {
                let bind = wire::bind_command(
                    config.volume,
                    config.stream,
                    config.generation,
                    config.start,
                );
                let sent = link.queue.submit(bind, BIND, Data::None, &mut link.out);
                debug_assert!(sent.is_ok(), "a fresh queue has room");
            } else {
                link.ready = true;
            }
        }
        Ok(used)
    }

    /// The marks; what they say counts as delivered (T1).
    ///
    /// # Errors
    /// The failure that poisoned the stream (P6).
    pub fn poll(&mut self) -> Result<Marks, Failure> {
        let epoch = self.shared.epoch.load(Ordering::Acquire);
        if epoch != self.seen_epoch {
            self.seen_epoch = epoch;
            for (index, seen) in self.seen.iter_mut().enumerate() {
                let now = self.shared.members[index].load(Ordering::Relaxed);
                if now != *seen {
                    *seen = now;
                    self.engine.flush_failed_elsewhere(Member(index as u8));
                }
            }
        }
        self.marks = self.engine.poll();
        self.engine.failure().map_or(Ok(self.marks), Err)
    }

    /// The marks as of the last poll.
    #[must_use]
    pub fn marks(&self) -> Marks {
        self.marks
    }

    /// The connection to a server is gone, or it is given up: the stream is poisoned (P6).
    pub fn lost(&mut self, server: u16, cause: Cause) {
        let link = &mut self.links[usize::from(server)];
        if core::mem::replace(&mut link.lost, true) {
            return;
        }
        link.out.clear();
        self.marks = self.engine.poll();
        let member = self.topology.members().iter().position(|m| m.server == server).unwrap_or(0);
        self.engine.poison(Failure {
            seq: self.marks.complete.next(),
            member: Member(member as u8),
            flush: false,
            cause,
        });
        for index in 0..self.reading.parts.len() {
            if self.reading.parts[index].server == server {
                self.reading.end(index, Status::ABORTED_BY_HOST);
            }
        }
    }

    /// A server that has made no progress for too long though it was asked something.
    #[must_use]
    pub fn stalled(&self, now: u64) -> Option<u16> {
        self.links
            .iter()
            .position(|link| {
                let waits = !link.ready || link.queue.in_flight() > 0;
                !link.lost && waits && now.saturating_sub(link.progress) > self.config.timeout_ns
            })
            .map(|server| server as u16)
    }

    /// Tells every target durably how far the stream is released: before a clean close, when all
    /// is durable and delivered.
    pub fn send_marks(&mut self) {
        if self.config.engine != EngineKind::Rio {
            return;
        }
        let released = self.engine.released();
        for link in self.links.iter_mut().filter(|link| link.ready && !link.lost) {
            tell_mark(link, released, &mut self.marks_out);
        }
    }

    /// Whether all targets have confirmed their marks.
    ///
    /// # Errors
    /// A target that could not take it.
    pub fn marks_confirmed(&self) -> Result<bool, BindRefused> {
        self.mark_refused.map_or(Ok(self.marks_out == 0), Err)
    }

    /// Bytes that the next PDU at the start of `buf` needs in all.
    #[must_use]
    pub fn need(&self, server: u16, buf: &[u8]) -> usize {
        self.links[usize::from(server)].queue.need(buf)
    }

    /// What is to be sent to a server.
    pub fn outbox(&mut self, server: u16) -> &mut Outbox<P> {
        &mut self.links[usize::from(server)].out
    }

    /// Commands in flight to a server.
    #[must_use]
    pub fn in_flight(&self, server: u16) -> usize {
        self.links[usize::from(server)].queue.in_flight()
    }

    /// Whether the connection to a server was given up.
    #[must_use]
    pub fn is_lost(&self, server: u16) -> bool {
        self.links[usize::from(server)].lost
    }

    /// Asks that everything up to `seq` become durable.
    pub fn ask_durable(&mut self, seq: Seq) {
        self.engine.ask_durable(seq);
    }

    /// The engine.
    #[must_use]
    pub fn engine(&self) -> &dyn Engine<P> {
        &*self.engine
    }

    /// What the stream is.
    #[must_use]
    pub fn config(&self) -> &StreamConfig {
        &self.config
    }

    /// The volume's topology.
    #[must_use]
    pub fn topology(&self) -> &Topology {
        &self.topology
    }
}

fn tell_mark<P: AsRef<[u8]> + Clone>(link: &mut Link<P>, released: Seq, out: &mut usize) {
    let mark = wire::mark_command(released, true);
    if link.queue.submit(mark, MARK, Data::None, &mut link.out).is_ok() {
        link.told.0 = released;
        *out += 1;
    }
}

/// Whether a FLUSH ended so because the drive failed: then what it held may be gone. A refusal
/// says nothing about the drive.
fn is_drive_failure(status: Status) -> bool {
    status.sct() == Status::SCT_MEDIA
        || status.is(Status::INTERNAL)
        || status.is(Status::CAPACITY_EXCEEDED)
        || status.is(Status::POWER_LOSS)
}

impl Reading {
    /// The part that a command of the read under way is for.
    fn part(&self, user: u64) -> Option<usize> {
        let index = user as u32 as usize;
        let part = self.parts.get(index)?;
        (self.number == (user >> 32) as u8 && !part.ended).then_some(index)
    }

    fn end(&mut self, index: usize, status: Status) {
        let part = &mut self.parts[index];
        if core::mem::replace(&mut part.ended, true) {
            return;
        }
        if !core::mem::replace(&mut part.sent, true) {
            self.unsent -= 1;
        }
        self.outstanding -= 1;
        if !status.is_ok() && self.failed.is_none() {
            self.failed = Some((part.offset, status));
        }
    }
}

fn send_reads<P: AsRef<[u8]> + Clone>(reading: &mut Reading, server: u16, link: &mut Link<P>) {
    for (index, part) in reading.parts.iter_mut().enumerate() {
        if part.sent || part.server != server {
            continue;
        }
        let sqe = Sqe::read(part.nsid, part.lba, part.blocks);
        let data = Data::Read(part.blocks * wire::BLOCK_BYTES as u32);
        let user = READ | u64::from(reading.number) << 32 | index as u64;
        if link.queue.submit(sqe, user, data, &mut link.out).is_err() {
            return;
        }
        part.sent = true;
        reading.unsent -= 1;
    }
}

//! An ordered stream: one engine over one queue pair for each of the volume's targets.
//!
//! Some engines have several queue pairs to each target
//! ([`Capabilities::queues_per_server`](riopipe_order::engine::Capabilities::queues_per_server)).
//! Then each connection is a *link* with a number of its own: server × queues per server + queue.
//! With one queue to each server, a link has the number of its server. The first link to a server
//! carries the reads, too.
//!
//! The [stream driver](super::stream_driver) drives it. In each round the driver does this, in
//! order:
//!
//! 1. admits groups with [`admit`](StreamSession::admit);
//! 2. calls [`pump`](StreamSession::pump), which turns requests that may be sent into commands;
//! 3. sends the contents of the [outboxes](StreamSession::outbox);
//! 4. passes bytes that have arrived to [`receive`](StreamSession::receive);
//! 5. reads the marks with [`poll`](StreamSession::poll).
//!
//! No function waits for an answer.

mod answers;
mod barrier;
mod connection;
mod followers;
mod home_timer;
mod reading;
mod redirections;
mod rejoin;
mod sync;
mod tracer;

use alloc::boxed::Box;
use alloc::sync::Arc;
use alloc::vec::Vec;

use riopipe_nvme::command::{Sqe, Status};
use riopipe_order::attribute::{Kind, Member, Seq, StreamId, VolumeId};
use riopipe_order::engine::{
    Bound, Cause, Engine, EngineKind, Failure, Marks, OrderedDispatch, Path, Payload, Refusal,
    RequestId, Write,
};
use riopipe_order::following::{FollowWay, SharedFollowing};
use riopipe_order::probe::{self, Plant, Rare};
use riopipe_order::topology::Topology;
use riopipe_order::write_order::DriveOrder;

use super::queue_pair::{Data, Event, QueuePair, SessionError};
use crate::outbox::Outbox;
use crate::wire;
use answers::AnswerHandler;
use barrier::HandledFailures;
pub use barrier::{FlushFailures, ReadBarrier};
pub use connection::ConnectionState;
use connection::{Connection, State};
use followers::Followers;
use home_timer::{HomeTimer, NotHome};
use reading::{PartCheck, ReadPart, Readings};
pub use reading::{ReadPartFailure, ReadSlot};
use redirections::{Part, RedirectionAccess};
pub use redirections::{Redirections, SharedRedirections};
use rejoin::SetUpEvent;
use tracer::Tracer;

/// The configuration of a stream.
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
    /// The released mark from which the stream continues.
    pub start: Seq,
    /// The namespace of each member on its server.
    pub nsids: Vec<u32>,
    /// The most requests in flight per target.
    pub queue_depth: usize,
    /// The time for which a target may make no progress while commands are in flight, ns.
    pub timeout_ns: u64,
    /// The time for which a server may be unreachable before the stream gives the server up, ns. If
    /// the server comes back within that time, the stream continues (promise P7). 0: a lost
    /// connection poisons the stream at once, as with engines that cannot replay.
    pub loss_ns: u64,
}

/// The shortest time between two marks that an idle stream sends, ns. The pause keeps a stream with
/// single writes from sending a mark for each write.
const IDLE_MARK_NS: u64 = 50_000_000;

/// The number of commands for which a queue must have space beside the requests: reads, marks,
/// bind.
pub const CONTROL_COMMANDS: usize = 8;

/// A connection of a stream.
pub type StreamQueue<P> = QueuePair<P, Purpose>;

/// The purpose of a command on a connection of a stream.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Purpose {
    /// A request of the engine.
    Request(RequestId),
    /// Part of a read.
    Read {
        /// The slot of the read.
        slot: ReadSlot,
        /// The number of the read in its slot. It separates answers for this read from late answers
        /// for an earlier one that was given up.
        number: u32,
        /// The part of the read.
        part: u32,
    },
    /// To bind the connection to the stream.
    Bind,
    /// To send the released mark.
    Mark,
    /// To list the entries of the stream in the target's log.
    List,
}

/// A target's refusal to bind the stream, or to record its mark.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct TargetRefusal {
    /// The server.
    pub server: u16,
    /// The status of the target's answer.
    pub status: Status,
}

/// Blocks of a volume to read.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ReadExtent {
    /// The first block.
    pub lba: u64,
    /// The number of blocks.
    pub blocks: u32,
}

/// Takes the data of reads as it arrives: the slot of the read, the offset in the whole read in bytes,
/// and the bytes there.
pub type ReadSink<'a> = dyn FnMut(ReadSlot, usize, &[u8]) + 'a;

/// An ordered stream over its targets.
pub struct StreamSession<P> {
    config: StreamConfig,
    engine: Box<dyn Engine<P>>,
    topology: Topology,
    /// The connections, by link.
    connections: Vec<Connection<P>>,
    /// The number of queues, and so of links, to each server.
    queues_per_server: u16,
    /// The reads in flight.
    readings: Readings,
    /// The marks as of the last poll.
    marks: Marks,
    /// Whether the stream is being closed. Then every target must get the last mark.
    closing: bool,
    /// The refusal of the stream's first bind at a server.
    bind_refused: Option<TargetRefusal>,
    /// Whether some connection is down, is being set up, or replays. Then
    /// [`continue_set_up`](Self::continue_set_up) has work.
    is_connecting: bool,
    /// Whether [`on_failure`](Self::on_failure) has handled the failure of the stream.
    failure_handled: bool,
    /// Whether the session only reads. Then it is bound nowhere, and the loss of a connection does
    /// not poison it.
    reads_only: bool,
    /// The failed FLUSHes of all streams of the volume. They affect this stream's data, too (trap
    /// T22).
    flush_failures: Arc<FlushFailures>,
    /// The failures among them that this stream has handled.
    handled_failures: HandledFailures,
    /// The redirected blocks of all streams of the volume; `None`: the volume redirects none.
    redirections: Option<RedirectionAccess>,
    /// When redirected updates that are durable are written home.
    home_timer: HomeTimer,
    /// The stream's part in the following of groups; `None` for a session that only reads.
    followers: Option<Followers>,
    tracer: Tracer,
}

impl<P: Payload + AsRef<[u8]>> StreamSession<P> {
    /// A stream over `queues`, one for each link, none of them started. All
    /// streams of a volume in this process share `flush_failures` and `barrier`.
    #[must_use]
    pub fn new(
        config: StreamConfig,
        engine: Box<dyn Engine<P>>,
        topology: Topology,
        queues: Vec<StreamQueue<P>>,
        flush_failures: Arc<FlushFailures>,
        barrier: &Arc<ReadBarrier>,
    ) -> Self {
        let queues_per_server = engine.queues_per_server();
        debug_assert_eq!(queues.len(), topology.servers().len() * usize::from(queues_per_server));
        debug_assert_eq!(config.nsids.len(), topology.members().len());
        let connections = queues
            .into_iter()
            .zip(0..)
            .map(|(queue, link): (_, u16)| {
                let server = link / queues_per_server;
                Connection::new(queue, barrier.participant(server), config.start)
            })
            .collect();
        let handled_failures = flush_failures.all_handled();
        Self {
            tracer: Tracer::new(config.stream.0.into()),
            marks: Marks { complete: config.start, durable: config.start },
            config,
            engine,
            topology,
            connections,
            queues_per_server,
            readings: Readings::default(),
            closing: false,
            bind_refused: None,
            is_connecting: true,
            failure_handled: false,
            reads_only: false,
            flush_failures,
            handled_failures,
            redirections: None,
            home_timer: HomeTimer::default(),
            followers: None,
        }
    }

    /// Lets the session use the record of redirected blocks that all streams of the volume share. The
    /// record drops the blocks of an earlier run of the stream: its logs have been recovered since, or
    /// it was closed.
    #[must_use]
    pub fn redirecting(self, shared: &Arc<dyn SharedRedirections>) -> Self {
        if self.topology.prepare_blocks() == 0 {
            return self;
        }
        let stream = self.config.stream;
        shared.with(&mut |redirections| redirections.forget(stream));
        let crc32c = self.connections[0].queue.crc32c();
        let access = RedirectionAccess::new(Arc::clone(shared), crc32c);
        Self { redirections: Some(access), ..self }
    }

    /// Lets the stream take part in the following of groups of its volume, by its number in
    /// commands.
    #[must_use]
    pub fn following(mut self, shared: &Arc<SharedFollowing>, number: u16) -> Self {
        self.followers = Some(Followers::new(shared, self.config.stream, number));
        self.engine.share(shared);
        self
    }

    /// Turns the session into one that only reads: no group may be admitted, and the engine needs
    /// no bind. Its reads return all groups that are complete in all streams (promise P9).
    #[must_use]
    pub fn reads_only(self) -> Self {
        Self { reads_only: true, ..self }
    }

    /// Notes that the stream is open: other streams may name it as a follower.
    pub fn set_open(&self) {
        if let Some(followers) = &self.followers {
            followers.open();
        }
    }

    /// Opens the handshake on every connection.
    pub fn start(&mut self, now: u64) {
        for connection in &mut self.connections {
            connection.last_progress = now;
            connection.queue.start(&mut connection.outbox);
        }
    }

    /// Whether every connection is set up and, if the engine needs it, bound.
    ///
    /// # Errors
    /// When a target has refused to bind the stream.
    pub fn is_ready(&self) -> Result<bool, TargetRefusal> {
        match self.bind_refused {
            Some(refused) => Err(refused),
            None => Ok(self.connections.iter().all(Connection::sends_requests)),
        }
    }

    /// Admits a group. If it is admitted, takes the payloads out of `writes`.
    ///
    /// # Errors
    /// See [`Engine::admit`].
    pub fn admit(
        &mut self,
        writes: &mut [Write<P>],
        tag: u64,
        durable: bool,
    ) -> Result<Seq, Refusal> {
        self.check_followed()?;
        self.engine.admit(writes, tag, durable)
    }

    /// As [`admit`](Self::admit), for a group that another stream of the volume follows. Returns
    /// how it does.
    ///
    /// # Errors
    /// As [`admit`](Self::admit), and [`Refusal::NoFollower`].
    pub fn admit_followed(
        &mut self,
        writes: &mut [Write<P>],
        tag: u64,
        durable: bool,
        follower: StreamId,
    ) -> Result<(Seq, FollowWay), Refusal> {
        self.check_followed()?;
        if let Some(failure) = self.engine.failure() {
            return Err(Refusal::Poisoned(failure));
        }
        let Some(followers) = &mut self.followers else { return Err(Refusal::NoFollower) };
        let number = followers.follower(follower).ok_or(Refusal::NoFollower)?;
        let (seq, way) = self.engine.admit_followed(writes, tag, durable, number)?;
        followers.follow(seq, number, way);
        Ok((seq, way))
    }

    /// Checks that no group which the stream follows must become durable first.
    #[inline]
    fn check_followed(&mut self) -> Result<(), Refusal> {
        self.fail_if_it_must();
        let must_wait = self.followers.as_mut().is_some_and(Followers::refuses_group);
        match must_wait && self.engine.failure().is_none() {
            true => Err(Refusal::Full(Bound::Followed)),
            false => Ok(()),
        }
    }

    /// Fails the stream if one has failed with which it shares a group.
    #[inline]
    fn fail_if_it_must(&mut self) {
        if self.followers.as_mut().is_some_and(Followers::must_fail)
            && self.engine.failure().is_none()
        {
            probe::count_rare(Rare::FollowFailed);
            self.engine.poison(Failure {
                seq: self.marks.complete.next(),
                member: Member(0),
                flush: false,
                cause: Cause::OtherStream,
            });
        }
    }

    /// Whether the last group was refused because the stream follows one that is still not durable.
    #[must_use]
    pub fn must_wait_for_followed(&self) -> bool {
        self.followers.as_ref().is_some_and(Followers::still_refuses)
    }

    /// Notes that a thread which has driven the stream stops. Returns whether another stream needs
    /// that a thread drives this one, also while its owner does not call.
    #[inline]
    pub fn end_call(&mut self) -> bool {
        let Self { followers: Some(followers), engine, connections, .. } = self else {
            return false;
        };
        let orders_epochs = self.config.engine.capabilities().drive_order == DriveOrder::Epochs;
        let is_unsent = |connection: &Connection<P>| {
            !connection.outbox.is_empty() || connection.queue.has_unrequested_data()
        };
        followers.end_call(|| {
            orders_epochs && (engine.has_numbered_unsent() || connections.iter().any(is_unsent))
        })
    }

    /// Notes whether the owner closes the stream. Then no further group is followed, and what is
    /// followed becomes durable before the stream is idle.
    pub fn set_closing(&mut self, is_closing: bool) {
        if let Some(followers) = &self.followers {
            followers.set_closing(is_closing);
        }
        self.engine.set_closing(is_closing);
    }

    /// Notes that the stream is closed: everything is durable.
    pub fn set_closed(&mut self) {
        if let Some(followers) = &mut self.followers {
            followers.set_closed();
        }
    }

    /// Checks whether a group of one write fits into all bounds once nothing else is in flight.
    ///
    /// # Errors
    /// See [`Engine::check_write`].
    pub fn check_write(&self, lba: u64, blocks: u32, durable: bool) -> Result<(), Refusal> {
        self.engine.check_write(lba, blocks, durable)
    }

    /// Turns requests that may be sent now into commands in the outboxes, and drives connections
    /// that are being set up.
    pub fn pump(&mut self, now: u64) {
        if self.is_connecting {
            self.continue_set_up(now);
        }
        self.update_redirections();
        self.commit_in_time(now);
        for link in 0..self.connections.len() as u16 {
            let connection = &mut self.connections[usize::from(link)];
            if !connection.sends_requests() {
                continue;
            }
            if connection.queue.in_flight() == 0 {
                connection.last_progress = now;
            }
            self.send_requests(link);
            if self.readings.has_unsent()
                && let Some(server) = self.server_of_reads(link)
            {
                self.send_reads(server, link);
            }
            self.send_idle_mark(link, now);
        }
        if self.queues_per_server > 1 {
            self.send_to_all_queues();
        }
    }

    /// Sends the parts of the reads for a server, if it may be read now.
    fn send_reads(&mut self, server: u16, link: u16) {
        let Self { readings, redirections, connections, config, .. } = self;
        let connection = &mut connections[usize::from(link)];
        if let Some(access) = redirections {
            // Once the server may be read, the streams that have failed have rolled back. A place that
            // was found before may then have the content of another block.
            if connection.participant.begin_read() {
                let roll_backs = access.count_roll_backs();
                let place = &mut |slot, extent: &_| access.begin_read(slot, extent);
                readings.place_again(server, roll_backs, place);
            }
        }
        let depth = connection.depth(config.queue_depth);
        readings.send_parts(server, connection, depth);
        if connection.reads_in_flight == 0 {
            connection.participant.end_read();
        }
    }

    /// Makes the engine's changes of the redirected blocks visible to the readers of the volume, and
    /// lets the engine use blocks again that no reader reads any more.
    #[inline]
    fn update_redirections(&mut self) {
        let Self { redirections: Some(access), engine, config, readings, .. } = self else {
            return;
        };
        while let Some(change) = engine.next_redirection() {
            let (crc32c, mut change) = (access.crc32c, Some(change));
            access.with(&mut |redirections| {
                if let Some(change) = change.take() {
                    redirections.apply(config.stream, change, crc32c);
                }
            });
        }
        access.end_reads(|slot| readings.is_in_flight(slot));
        if engine.awaits_reads() {
            let mut oldest = None;
            access.with(&mut |redirections| oldest = redirections.oldest_read(config.stream));
            engine.note_oldest_read(oldest);
        }
    }

    /// Brings redirected updates home in time, so that their groups are released. A caller may wait for
    /// that.
    #[inline]
    fn commit_in_time(&mut self, now: u64) {
        if self.redirections.is_none() {
            return;
        }
        let (durable, last) = (self.marks.durable, self.engine.last_admitted());
        let is_idle = self.engine.is_idle() && durable >= last;
        let oldest = self.engine.oldest_redirected().filter(|oldest| *oldest <= durable);
        if self.home_timer.is_due(oldest.map(|oldest| NotHome { oldest, last, is_idle }), now) {
            probe::count_rare(Rare::HomeInTime);
            self.engine.ask_home(durable);
        }
    }

    /// Sends more requests of an engine with several queues to a server: what one queue has taken
    /// may let another one continue.
    fn send_to_all_queues(&mut self) {
        loop {
            let mut has_sent = false;
            for link in 0..self.connections.len() as u16 {
                if self.connections[usize::from(link)].sends_requests() {
                    has_sent |= self.send_requests(link);
                }
            }
            if !has_sent {
                return;
            }
        }
    }

    /// The server that is read over this link, if it carries reads.
    fn server_of_reads(&self, link: u16) -> Option<u16> {
        let queues = self.queues_per_server;
        link.is_multiple_of(queues).then_some(link / queues)
    }

    /// The server of a link.
    #[must_use]
    pub fn server_of(&self, link: u16) -> u16 {
        link / self.queues_per_server
    }

    /// The links to a server.
    pub fn links_to(&self, server: u16) -> core::ops::Range<u16> {
        let queues = self.queues_per_server;
        server * queues..(server + 1) * queues
    }

    /// The number of queues that the stream has to each server.
    #[inline]
    #[must_use]
    pub const fn queues_per_server(&self) -> u16 {
        self.queues_per_server
    }

    /// Notes the core on which the caller runs, for an engine with a queue for each core.
    #[inline]
    pub fn set_core(&mut self, core: u32) {
        self.engine.set_core(core);
    }

    /// Sends the engine's requests over a link, until its queue has no space for more. Returns
    /// whether there were any.
    #[inline]
    fn send_requests(&mut self, link: u16) -> bool {
        let Self { connections, engine, config, tracer, .. } = self;
        let connection = &mut connections[usize::from(link)];
        let depth = connection.depth(config.queue_depth);
        let mut has_sent = false;
        while connection.queue.in_flight() < depth {
            let Some(dispatch) = engine.next_request(link) else { break };
            has_sent = true;
            let request = engine.request(dispatch.id);
            tracer.on_sent(dispatch.id, request.seq, request.span);
            let nsid = config.nsids[usize::from(request.member.0)];
            let mut sqe = match (request.path, request.kind) {
                (Path::Data | Path::Home, Kind::Write) => {
                    Sqe::write(nsid, request.data_lba(), request.blocks)
                }
                (Path::Data | Path::Home, Kind::Discard) => {
                    Sqe::write_zeroes(nsid, request.lba, request.blocks, true)
                }
                (Path::Data | Path::Home, Kind::Flush) => Sqe::flush(nsid),
                (Path::Control, kind) => {
                    wire::order_command(nsid, kind, request.lba, request.blocks)
                }
                (Path::Flushed | Path::Released, _) => wire::mark_command(request.seq, true),
                (Path::Persisted, _) => wire::durable_command(request.seq),
            };
            if request.fua && !probe::is_bug_planted(Plant::LinuxNoFua) {
                sqe.set_fua(true);
            }
            wire::put_order(&mut sqe, request.order);
            if let Some(before) = request.flush_before {
                wire::put_flush_before(&mut sqe, before);
            }
            if let Some(OrderedDispatch { ordinal, released }) = dispatch.ordered {
                wire::put_attribute(&mut sqe, &request.attribute(ordinal), released);
                if request.is_redirected() {
                    let area = self.topology.prepare_start(request.member);
                    wire::put_prepared_block(&mut sqe, (request.data_lba() - area) as u32);
                }
            }
            let data = match (request.path, request.kind) {
                (Path::Data | Path::Home, Kind::Write) => Data::Write(&request.pieces),
                _ => Data::None,
            };
            let purpose = Purpose::Request(dispatch.id);
            let sent = connection.queue.submit(sqe, purpose, data, &mut connection.outbox);
            debug_assert!(sent.is_ok(), "the queue has space for its depth");
        }
        has_sent
    }

    /// Sends the released mark of an idle stream to a server, in a command of its own (trap T1). So
    /// a crash of an idle initiator leaves a log that needs no recovery.
    #[inline]
    fn send_idle_mark(&mut self, link: u16, now: u64) {
        let Some(released) = idle_mark(&*self.engine, self.config.engine) else { return };
        let connection = &mut self.connections[usize::from(link)];
        if released <= connection.last_mark.seq {
            return;
        }
        let is_due = self.closing || now.saturating_sub(connection.last_mark.at) >= IDLE_MARK_NS;
        if is_due && connection.send_mark(released, now) {
            probe::count_rare(Rare::IdleMark);
        }
    }

    /// Starts a read of volume blocks, extent after extent, in a slot. The caller has checked that
    /// [`read_must_wait`](Self::read_must_wait) is false for each. An earlier read of the slot that
    /// has not ended is given up.
    pub fn start_read(&mut self, slot: ReadSlot, extents: &[ReadExtent]) {
        self.give_up_read(slot);
        let Self { readings, topology, config, redirections, .. } = self;
        let reading = readings.begin(slot);
        if let Some(access) = redirections {
            reading.roll_backs = access.count_roll_backs();
        }
        let mut bytes_before = 0;
        for ReadExtent { lba, blocks } in extents {
            topology.for_each_extent(*lba, *blocks, |extent| {
                let mut add = |Part { lba, blocks, offset, checksums }| {
                    reading.add(ReadPart {
                        server: topology.member(extent.member).server,
                        nsid: config.nsids[usize::from(extent.member.0)],
                        member: extent.member,
                        home: extent.lba + u64::from(offset),
                        lba,
                        blocks,
                        offset: bytes_before
                            + (extent.offset + offset) as usize * wire::BLOCK_BYTES,
                        check: PartCheck::new(checksums),
                        is_sent: false,
                        has_ended: false,
                    });
                };
                match redirections {
                    Some(access) if !probe::is_bug_planted(Plant::HoraeReadHome) => {
                        access.begin_read(slot, &extent).into_iter().for_each(add);
                    }
                    _ => add(Part::at_home(&extent)),
                }
            });
            bytes_before += *blocks as usize * wire::BLOCK_BYTES;
        }
        readings.queue(slot);
        for link in 0..self.connections.len() as u16 {
            if self.connections[usize::from(link)].state == State::Dead
                && let Some(server) = self.server_of_reads(link)
            {
                self.readings.give_up_server(server);
            }
        }
    }

    /// Gives up the read of a slot, if there is one: later replies for it are dropped.
    pub fn give_up_read(&mut self, slot: ReadSlot) {
        self.readings.give_up(slot);
        if let Some(access) = &mut self.redirections {
            access.end_reads(|other| self.readings.is_in_flight(other));
        }
    }

    /// Whether a read command has no answer yet. Until then no stream can replay on its server
    /// (promise P9).
    #[must_use]
    pub fn has_unanswered_reads(&self) -> bool {
        self.connections.iter().any(|connection| connection.reads_in_flight > 0)
    }

    /// Whether a read of these blocks must wait, because a write of this stream to them is not
    /// complete (promise P9).
    #[must_use]
    pub fn read_must_wait(&self, lba: u64, blocks: u32) -> bool {
        self.engine.has_pending_write(lba, blocks) && !probe::is_bug_planted(Plant::P9OwnReads)
    }

    /// Whether the read of a slot is in flight.
    #[must_use]
    pub fn is_reading(&self, slot: ReadSlot) -> bool {
        self.readings.is_in_flight(slot)
    }

    /// The number of reads that have ended since the start, without those that were given up.
    #[must_use]
    pub fn ended_reads(&self) -> u64 {
        self.readings.ended_count()
    }

    /// The result of the last read of a slot.
    ///
    /// # Errors
    /// The first part that failed.
    pub fn read_result(&self, slot: ReadSlot) -> Result<(), ReadPartFailure> {
        match self.readings.failure(slot) {
            Some(failure) => Err(failure),
            None => Ok(()),
        }
    }

    /// Takes in bytes that arrived over a link. `sink` gets the bytes of the reads in flight.
    /// Returns the number of bytes of `buf` that were used up.
    ///
    /// # Errors
    /// When the target breaks the protocol. The caller then closes the connection and calls
    /// [`lost`](Self::lost).
    pub fn receive(
        &mut self,
        link: u16,
        now: u64,
        buf: &[u8],
        sink: &mut ReadSink<'_>,
    ) -> Result<usize, SessionError> {
        let server = self.server_of(link);
        let connection = &mut self.connections[usize::from(link)];
        let mut handler = AnswerHandler {
            server,
            config: &self.config,
            engine: &mut *self.engine,
            readings: &mut self.readings,
            crc32c: connection.queue.crc32c(),
            flush_failures: &self.flush_failures,
            handled_failures: &mut self.handled_failures,
            tracer: &mut self.tracer,
            listing: &mut connection.listing,
            participant: &mut connection.participant,
            reads_in_flight: &mut connection.reads_in_flight,
            marks_in_flight: &mut connection.marks_in_flight,
            mark_refused: &mut connection.mark_refused,
            set_up_event: None,
        };
        let received = connection.queue.receive(buf, &mut connection.outbox, |event| match event {
            Event::Ready { .. } => handler.set_up_event = Some(SetUpEvent::Connected),
            Event::Data { context, offset, bytes } => {
                handler.on_data(context, offset as usize, bytes, sink);
            }
            Event::Done { context, cqe } => handler.on_completion(context, cqe),
        });
        let set_up_event = handler.set_up_event;
        // An R2T counts, too: the target waits for its data.
        if received.as_ref().is_ok_and(|used| *used > 0) {
            connection.last_progress = now;
        }
        self.update_redirections();
        let used = received?;
        if let Some(event) = set_up_event {
            self.handle_set_up(link, event, now);
        }
        Ok(used)
    }

    /// The marks. The stream counts all groups that they report as delivered (trap T1).
    ///
    /// # Errors
    /// The failure that poisoned the stream (promise P6).
    pub fn poll(&mut self) -> Result<Marks, Failure> {
        let Self { flush_failures, handled_failures, engine, .. } = self;
        flush_failures
            .for_each_new(handled_failures, |member| engine.on_flush_failed_elsewhere(member));
        self.marks = self.engine.poll();
        if let Some(followers) = &mut self.followers {
            followers.on_durable(self.marks.durable);
        }
        self.fail_if_it_must();
        match self.engine.failure() {
            None => Ok(self.marks),
            Some(failure) => {
                self.on_failure();
                Err(failure)
            }
        }
    }

    /// The marks as of the last poll.
    #[must_use]
    pub fn marks(&self) -> Marks {
        self.marks
    }

    /// A link that has made no progress for too long although an answer on it is missing. The
    /// caller closes the connection and calls [`lost`](Self::lost).
    #[must_use]
    pub fn stalled(&self, now: u64) -> Option<u16> {
        let is_stalled = |connection: &Connection<P>| {
            connection.awaits_answer()
                && now.saturating_sub(connection.last_progress) >= self.config.timeout_ns
        };
        self.connections.iter().position(is_stalled).map(|link| link as u16)
    }

    /// Sends every target the released mark, to be recorded durably. This is for a clean close,
    /// when all groups are durable and delivered. A mark that a target has refused is sent again:
    /// its log may be able to record it now.
    pub fn send_marks(&mut self) {
        self.closing = true;
        for connection in &mut self.connections {
            if connection.mark_refused.take().is_some() {
                connection.last_mark.seq = self.config.start;
            }
        }
    }

    /// Ends the close before it is done. Marks are again sent only when the stream is idle.
    pub fn give_up_marks(&mut self) {
        self.closing = false;
    }

    /// Whether all targets have confirmed their marks.
    ///
    /// # Errors
    /// A target could not record its mark.
    pub fn marks_confirmed(&self) -> Result<bool, TargetRefusal> {
        for (connection, link) in self.connections.iter().zip(0..) {
            if let Some(status) = connection.mark_refused {
                return Err(TargetRefusal { server: self.server_of(link), status });
            }
        }
        let released = self.engine.released();
        let keeps_log = self.config.engine.capabilities().keeps_log
            && !probe::is_bug_planted(Plant::T1CloseWithoutMark);
        if !keeps_log {
            return Ok(true);
        }
        let has_confirmed = |connection: &Connection<P>| {
            connection.sends_requests()
                && connection.marks_in_flight == 0
                && connection.last_mark.seq >= released
        };
        Ok(self.connections.iter().all(has_confirmed))
    }

    /// The length of the PDU at the start of `buf`, in bytes.
    #[must_use]
    pub fn need(&self, link: u16, buf: &[u8]) -> usize {
        self.connections[usize::from(link)].queue.need(buf)
    }

    /// The bytes to send over a link.
    pub fn outbox(&mut self, link: u16) -> &mut Outbox<P> {
        &mut self.connections[usize::from(link)].outbox
    }

    /// The number of commands in flight on a link.
    #[must_use]
    pub fn in_flight(&self, link: u16) -> usize {
        let connection = &self.connections[usize::from(link)];
        if connection.has_connection() { connection.queue.in_flight() } else { 0 }
    }

    /// Whether a link has no connection: then no bytes are received or sent over it.
    #[must_use]
    pub fn is_lost(&self, link: u16) -> bool {
        !self.connections[usize::from(link)].has_connection()
    }

    /// Whether some connection is down, is being set up, or replays, as of the last check.
    #[inline]
    #[must_use]
    pub(super) const fn is_connecting(&self) -> bool {
        self.is_connecting
    }

    /// Requests that all groups up to `seq` become durable.
    pub fn ask_durable(&mut self, seq: Seq) {
        self.engine.ask_durable(seq);
    }

    /// Requests that all redirected updates up to `seq` are written home.
    pub fn ask_home(&mut self, seq: Seq) {
        self.engine.ask_home(seq);
    }

    /// The engine.
    #[must_use]
    pub fn engine(&self) -> &dyn Engine<P> {
        &*self.engine
    }

    /// The configuration of the stream.
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

/// The mark that a stream must send because it is idle and all its groups are released; `None` if
/// it must send none.
fn idle_mark<P: Payload>(engine: &dyn Engine<P>, kind: EngineKind) -> Option<Seq> {
    if !kind.capabilities().keeps_log || !engine.is_idle() {
        return None;
    }
    let (released, last) = (engine.released(), engine.last_admitted());
    (released == last || probe::is_bug_planted(Plant::T1IdleMarkEarly)).then_some(last)
}

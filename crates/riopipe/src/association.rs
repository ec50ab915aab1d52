//! A conversation with a target, one question at a time: bringing it up, its admin queue, and
//! discovery. Nothing here is on the way of a write.

use std::os::fd::AsFd;
use std::sync::{Arc, Mutex, MutexGuard};
use std::time::Duration;

use riopipe_net::{Received, RecvBuf, Socket, SocketOptions, connect, now_ns, wait_readable};
use riopipe_nvme::command::{Cqe, Sqe};
use riopipe_nvme::discovery::Entry;
use riopipe_nvme::fabrics::DISCOVERY_NQN;
use riopipe_session::initiator::attach::{self, Attach, Controller};
use riopipe_session::initiator::discover::Discover;
use riopipe_session::initiator::keep_alive::KeepAlive;
use riopipe_session::initiator::queue_pair::{Data, Event, QpConfig, QueuePair, SubmitError};
use riopipe_session::outbox::Outbox;
use riopipe_session::wire::{STATUS_LEN, VolumeStatus, status_command};

use crate::addr::{MemberAddr, socket};
use crate::error::{AttachError, CallError};
use crate::identity::ConnectOptions;
use crate::piece::{Buf, Piece};
use crate::shared::lock;

/// I/O queues asked for: one for labels, the rest for streams.
const IO_QUEUES: u16 = 128;

/// A socket and what is on its way in and out.
#[derive(Debug)]
pub(crate) struct Lane {
    pub(crate) socket: Socket,
    rx: RecvBuf,
    out: Outbox<Piece>,
}

impl Lane {
    pub(crate) fn new(socket: Socket) -> Self {
        Self { socket, rx: RecvBuf::new(0), out: Outbox::new() }
    }

    /// Sends what is queued, as far as the kernel takes it.
    fn flush(&mut self) -> Result<(), CallError> {
        while !self.out.is_empty() {
            let sent = self.socket.send(self.out.slices())?;
            self.out.consume(sent);
            if sent == 0 {
                break;
            }
        }
        Ok(())
    }

    /// Sends and receives until `step`, which is fed what arrived, has a result.
    fn run<T>(
        &mut self,
        timeout: Duration,
        mut step: impl FnMut(u64, &[u8], &mut Outbox<Piece>) -> Result<(usize, Option<T>), CallError>,
    ) -> Result<T, CallError> {
        let deadline = now_ns().saturating_add(crate::stream::nanos(timeout));
        loop {
            let stepped = step(now_ns(), self.rx.data(), &mut self.out);
            self.flush()?;
            let (used, result) = stepped?;
            self.rx.consume(used);
            if let Some(result) = result {
                return Ok(result);
            }
            let left = Duration::from_nanos(deadline.saturating_sub(now_ns()));
            if left.is_zero() {
                return Err(CallError::TimedOut(timeout));
            }
            // A bring-up looks at the controller's state every millisecond.
            let _ = wait_readable(self.socket.as_fd(), left.min(Duration::from_millis(1)));
            if self.rx.fill(&self.socket)? == Received::Closed {
                return Err(CallError::Closed);
            }
        }
    }
}

/// The data of a command.
pub(crate) enum CallData<'a> {
    None,
    Bytes(&'a [u8]),
    Buf(Buf),
    Read(u32),
}

/// An answer: the name of its command, its completion, its data.
pub(crate) type Answer = (u64, Cqe, Vec<u8>);

/// The name of keep-alives among the commands of an admin queue: no attempt ever has this ticket.
const KEEP_ALIVE: u64 = u64::MAX;

/// A queue asked one command at a time.
#[derive(Debug)]
pub(crate) struct Caller {
    lane: Lane,
    queue: QueuePair<Piece>,
    timeout: Duration,
    /// Commands asked so far: tells a late answer from the one that is waited for.
    asked: u64,
    /// Commands of [`send`](Caller::send) that are out: number, the caller's name, data so far.
    /// Also those of errands that were given up: their answers have names of their own (T23).
    out: Vec<(u64, u64, Vec<u8>)>,
    /// What is being written, until it is sent; dropped after the pieces of it.
    bufs: Vec<Buf>,
    /// Of an admin queue: when its target is told that this host lives.
    keep: Option<KeepAlive>,
    /// Answers that came while it was told, for [`collect`](Self::collect).
    came: Vec<Answer>,
}

impl Caller {
    fn new(lane: Lane, queue: QueuePair<Piece>, timeout: Duration) -> Self {
        let (out, bufs, came) = (Vec::new(), Vec::new(), Vec::new());
        Self { lane, queue, timeout, asked: 0, out, bufs, keep: None, came }
    }

    /// Opens an I/O queue.
    pub(crate) fn open(
        socket: Socket,
        queue: QueuePair<Piece>,
        timeout: Duration,
    ) -> Result<Self, CallError> {
        let mut caller = Self::new(Lane::new(socket), queue, timeout);
        let Self { lane, queue, .. } = &mut caller;
        queue.start(&mut lane.out);
        lane.run(timeout, |_, data, out| {
            let mut ready = None;
            let used = queue.receive(data, out, |event| {
                if matches!(event, Event::Ready { .. }) {
                    ready = Some(());
                }
            })?;
            Ok((used, ready))
        })?;
        Ok(caller)
    }

    /// Asks one command; returns its completion, whatever its status, and its data.
    pub(crate) fn ask(
        &mut self,
        sqe: Sqe,
        data: CallData<'_>,
    ) -> Result<(Cqe, Vec<u8>), CallError> {
        let (number, mut page) = self.submit(sqe, data)?;
        let Self { lane, queue, timeout, out: others, keep, asked, .. } = self;
        let answered = lane.run(*timeout, |now, bytes, out| {
            let mut done = None;
            if let Some(keep) = keep.as_mut().filter(|keep| keep.is_due(now)) {
                keep.tell(now);
                *asked += 1;
                // A queue without room has told the target enough.
                let _ = queue.submit(Sqe::keep_alive(), *asked, Data::None, out);
            }
            let used = queue.receive(bytes, out, |event| match event {
                Event::Data { user, offset, bytes } if user == number => {
                    let at = offset as usize;
                    if let Some(part) = page.get_mut(at..at + bytes.len()) {
                        part.copy_from_slice(bytes);
                    }
                }
                Event::Done { user, cqe } if user == number => done = Some(cqe),
                // Late, for a command that was given up.
                Event::Done { user, .. } => others.retain(|(number, ..)| *number != user),
                Event::Data { .. } | Event::Ready { .. } => {}
            })?;
            Ok((used, done))
        });
        match answered {
            Ok(cqe) => Ok((cqe, page)),
            Err(error) => Err(self.lost(error)),
        }
    }

    /// What an error means for the association, if this is its admin queue.
    fn lost(&self, error: CallError) -> CallError {
        match (&error, &self.keep) {
            (CallError::Closed, Some(keep)) => CallError::Lost(keep.lost(now_ns())),
            (CallError::Link(_), Some(keep)) => {
                let loss = keep.lost(now_ns());
                if loss.ran_out() { CallError::Lost(loss) } else { error }
            }
            _ => error,
        }
    }

    /// Tells the target that this host lives, if that is due. Never waits.
    ///
    /// # Errors
    /// The connection is gone.
    pub(crate) fn keep_alive(&mut self) -> Result<(), CallError> {
        let now = now_ns();
        let Some(keep) = self.keep.as_mut().filter(|keep| keep.is_due(now)) else { return Ok(()) };
        keep.tell(now);
        self.send(KEEP_ALIVE, Sqe::keep_alive(), CallData::None)?;
        self.push()
    }

    /// Tells the target that this host lives, and waits for its answer.
    ///
    /// # Errors
    /// It does not answer.
    pub(crate) fn tell(&mut self) -> Result<(), CallError> {
        if let Some(keep) = &mut self.keep {
            keep.tell(now_ns());
        }
        self.call(Sqe::keep_alive(), CallData::None).map(|_| ())
    }

    /// When the target is to be told next, ns; `None` if this is no admin queue.
    pub(crate) fn keep_alive_next(&self) -> Option<u64> {
        self.keep.as_ref().map(KeepAlive::next)
    }

    /// Takes in what has come, and keeps it for [`collect`](Self::collect). Never waits.
    ///
    /// # Errors
    /// The connection is gone.
    pub(crate) fn look(&mut self) -> Result<(), CallError> {
        let mut came = std::mem::take(&mut self.came);
        let looked = self.collect(&mut came);
        self.came = came;
        looked
    }

    fn submit(&mut self, sqe: Sqe, data: CallData<'_>) -> Result<(u64, Vec<u8>), CallError> {
        let Self { lane, queue, asked, bufs, .. } = self;
        *asked += 1;
        let number = *asked;
        let mut page = Vec::new();
        let sent = match data {
            CallData::None => queue.submit(sqe, number, Data::None, &mut lane.out),
            CallData::Bytes(bytes) => queue.submit(sqe, number, Data::Bytes(bytes), &mut lane.out),
            CallData::Buf(mut buf) => {
                bufs.retain(|buf| !buf.is_unique());
                let sent = queue.submit(sqe, number, Data::Write(&[buf.piece()]), &mut lane.out);
                bufs.push(buf);
                sent
            }
            CallData::Read(len) => {
                page.resize(len as usize, 0);
                queue.submit(sqe, number, Data::Read(len), &mut lane.out)
            }
        };
        sent.map_err(|error| match error {
            SubmitError::Full => CallError::Behind(queue.in_flight()),
            _ => CallError::Closed,
        })?;
        Ok((number, page))
    }

    /// Queues one command without waiting for its answer, which [`collect`](Self::collect) brings
    /// under the name `user`. The caller bounds how many are out.
    pub(crate) fn send(
        &mut self,
        user: u64,
        sqe: Sqe,
        data: CallData<'_>,
    ) -> Result<(), CallError> {
        let (number, page) = self.submit(sqe, data)?;
        self.out.push((number, user, page));
        Ok(())
    }

    /// Sends what is queued as far as the kernel takes it. Never waits.
    pub(crate) fn push(&mut self) -> Result<(), CallError> {
        self.lane.flush().map_err(|error| self.lost(error))
    }

    /// Hands out the answers that are there: completions, whatever their status, with their data.
    /// Never waits.
    pub(crate) fn collect(&mut self, answers: &mut Vec<Answer>) -> Result<(), CallError> {
        self.receive(answers).map_err(|error| self.lost(error))
    }

    fn receive(&mut self, answers: &mut Vec<Answer>) -> Result<(), CallError> {
        answers.append(&mut self.came);
        let Self { lane, queue, out, .. } = self;
        if lane.rx.fill(&lane.socket)? == Received::Closed {
            return Err(CallError::Closed);
        }
        let used = queue.receive(lane.rx.data(), &mut lane.out, |event| match event {
            Event::Data { user, offset, bytes } => {
                let page = out.iter_mut().find(|(number, ..)| *number == user);
                let at = offset as usize;
                if let Some(part) = page.and_then(|(.., page)| page.get_mut(at..at + bytes.len())) {
                    part.copy_from_slice(bytes);
                }
            }
            Event::Done { user, cqe } => {
                // One that is not there was given up by `ask`.
                if let Some(at) = out.iter().position(|(number, ..)| *number == user) {
                    let (_, user, page) = out.swap_remove(at);
                    if user != KEEP_ALIVE {
                        answers.push((user, cqe, page));
                    }
                }
            }
            Event::Ready { .. } => {}
        })?;
        lane.rx.consume(used);
        lane.flush()
    }

    /// Closes the connection: the target learns at once, and calls fail from now on.
    pub(crate) fn hang_up(&mut self) {
        // From now on it is not the target that has dropped it.
        self.keep = None;
        self.lane.socket.shutdown();
    }

    /// What to wait for before [`collect`](Self::collect) brings more: the socket, and whether
    /// also for room to send.
    pub(crate) fn waits_for(&self) -> (&Socket, bool) {
        (&self.lane.socket, !self.lane.out.is_empty())
    }

    /// Asks one command that has to succeed.
    pub(crate) fn call(
        &mut self,
        sqe: Sqe,
        data: CallData<'_>,
    ) -> Result<(Cqe, Vec<u8>), CallError> {
        let (cqe, page) = self.ask(sqe, data)?;
        if cqe.status().is_ok() { Ok((cqe, page)) } else { Err(CallError::Status(cqe.status())) }
    }
}

/// An attached controller and its admin queue.
#[derive(Debug)]
pub(crate) struct Association {
    pub(crate) addr: MemberAddr,
    pub(crate) controller: Controller,
    /// What its queues have in common.
    pub(crate) config: QpConfig,
    admin: Arc<Mutex<Caller>>,
}

impl Association {
    /// Attaches to the target of `member`.
    pub(crate) fn attach(
        member: &MemberAddr,
        options: &ConnectOptions,
    ) -> Result<Self, AttachError> {
        let nqn = match &member.nqn {
            Some(nqn) => nqn.clone(),
            None => only_subsystem(member, options)?,
        };
        let socket = open_socket(member, options)?;
        let mut config =
            QpConfig::admin(options.host_nqn.clone(), options.host_id, nqn.clone(), crate::crc32c);
        config.kato_ms = options.keep_alive_ms();
        config.header_digest = options.header_digest;
        config.data_digest =
            options.data_digest.unwrap_or_else(|| !socket.peer().ip().is_loopback());
        config.data_max = 4 << 20;
        let mut lane = Lane::new(socket);
        let mut attach = Attach::new(config.clone(), IO_QUEUES);
        attach.start(&mut lane.out);
        let attached = lane.run(options.timeout, |now, data, out| {
            attach.tick(now, out);
            let used = attach.receive(now, data, out).map_err(attach_error)?;
            Ok((used, attach.is_attached().then_some(())))
        });
        let fault = |source| AttachError::Target {
            target: member.socket(),
            nqn: Some(nqn.clone()),
            source,
        };
        attached.map_err(fault)?;
        let (queue, controller) = attach
            .finish()
            .ok_or_else(|| fault(CallError::Nonsense("the bring-up did not end")))?;
        let mut admin = Caller::new(lane, queue, options.timeout);
        admin.keep = Some(KeepAlive::new(config.kato_ms, now_ns()));
        let addr = MemberAddr { nqn: Some(nqn), ..member.clone() };
        Ok(Self { addr, controller, config, admin: Arc::new(Mutex::new(admin)) })
    }

    /// Its admin queue.
    pub(crate) fn admin(&self) -> MutexGuard<'_, Caller> {
        lock(&self.admin)
    }

    /// Its admin queue, for whoever uses it beside others.
    pub(crate) fn shared_admin(&self) -> Arc<Mutex<Caller>> {
        Arc::clone(&self.admin)
    }

    /// Why the target has dropped the association, if it has: then that is why an I/O queue of it
    /// fails, too, whatever `error` the queue itself has met.
    pub(crate) fn blame(&self, error: CallError) -> CallError {
        blame(&self.admin, error)
    }

    /// What the target knows of a volume.
    pub(crate) fn volume_status(
        &self,
        volume: riopipe_order::attribute::VolumeId,
    ) -> Result<VolumeStatus, CallError> {
        let (_, page) =
            self.admin().call(status_command(volume), CallData::Read(STATUS_LEN as u32))?;
        VolumeStatus::decode(&page).ok_or(CallError::Nonsense("a volume status that can't be read"))
    }

    /// A fresh, not yet started I/O queue with room for `depth` commands.
    pub(crate) fn io_queue(&self, qid: u16, depth: usize) -> QueuePair<Piece> {
        let entries = (depth + 1).min(usize::from(self.controller.sqsize_max.max(2)));
        let config = self.config.io_queue(self.controller.cntlid, qid, entries as u16);
        let mut queue = QueuePair::new(config);
        queue.set_in_capsule(self.controller.in_capsule_bytes);
        queue
    }

    /// The target's address for error messages.
    pub(crate) fn name(&self) -> String {
        self.addr.socket()
    }
}

/// [`Association::blame`] of an association with this admin queue.
pub(crate) fn blame(admin: &Mutex<Caller>, error: CallError) -> CallError {
    match lock(admin).look() {
        Err(lost @ CallError::Lost(_)) => lost,
        _ => error,
    }
}

pub(crate) fn open_socket(
    member: &MemberAddr,
    options: &ConnectOptions,
) -> Result<Socket, riopipe_net::ConnectError> {
    connect(&member.socket(), options.timeout, &SocketOptions::default())
}

fn attach_error(error: attach::AttachError) -> CallError {
    match error {
        attach::AttachError::Session(error) => error.into(),
        other => CallError::Attach(other),
    }
}

/// Lists what a discovery service at `host:port` knows.
///
/// # Errors
/// No connection, or no discovery service there.
pub fn discover(
    host: &str,
    port: u16,
    options: &ConnectOptions,
) -> Result<Vec<Entry>, AttachError> {
    let address = socket(host, port);
    let socket = connect(&address, options.timeout, &SocketOptions::default())?;
    let mut config = QpConfig::admin(
        options.host_nqn.clone(),
        options.host_id,
        DISCOVERY_NQN.into(),
        crate::crc32c,
    );
    config.header_digest = options.header_digest;
    config.data_digest = options.data_digest.unwrap_or_else(|| !socket.peer().ip().is_loopback());
    let mut lane = Lane::new(socket);
    let mut discover = Discover::new(config);
    discover.start(&mut lane.out);
    lane.run(options.timeout, |now, data, out| {
        discover.tick(now, out);
        let used = discover.receive(now, data, out).map_err(attach_error)?;
        Ok((used, discover.entries().map(<[Entry]>::to_vec)))
    })
    .map_err(|source| AttachError::Target {
        target: address,
        nqn: Some(DISCOVERY_NQN.into()),
        source,
    })
}

fn only_subsystem(member: &MemberAddr, options: &ConnectOptions) -> Result<String, AttachError> {
    let mut found: Vec<String> = discover(&member.host, member.port, options)?
        .into_iter()
        .filter(|e| e.subtype == riopipe_nvme::discovery::SUBTYPE_NVM)
        .map(|e| e.subnqn)
        .collect();
    found.sort();
    found.dedup();
    match found.len() {
        1 => Ok(found.remove(0)),
        _ => Err(AttachError::WhichSubsystem { target: member.socket(), found }),
    }
}

//! A target's thread: it has the sockets of the target's association, and the clock. What is done
//! when is decided by the [`Association`], and by the [`AssociationManager`] that it becomes when the
//! volume is open.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::{Arc, Condvar, Mutex, PoisonError};
use std::time::Duration;

use riopipe_net::{ConnectError, Poller, Socket, SocketOptions, connect, now_ns};
use riopipe_nvme::command::{Cqe, Sqe};
use riopipe_nvme::discovery::Entry;
use riopipe_order::attribute::StreamId;
use riopipe_session::initiator::association::{
    AskError, Association, AssociationState, ConnectFailure, ControlQueue, DrivesState,
};
use riopipe_session::initiator::attach::Controller;
use riopipe_session::initiator::manager::{
    Absence, AssociationManager, ConnectionId, ManagerConfig, ManagerEvent,
};
use riopipe_session::initiator::queue_pair::{Data, QueuePair};
use riopipe_session::initiator::reconnect::ConnectRequest;

use crate::background::Background;
use crate::error::{AttachError, CallError};
use crate::piece::{Buf, Piece};
use crate::shared::lock;
use crate::sockets::ControlSockets;
use crate::stream::nanos;
use crate::stream_shell::{Mail, StreamHandle};

/// The data of a command.
pub(crate) enum CallData<'a> {
    None,
    Bytes(&'a [u8]),
    Buf(Buf),
    Read(u32),
}

/// An answer: the name of its command, its completion, its data.
pub(crate) type Answer = (u64, Cqe, Vec<u8>);

/// Names of commands that [`Target::ask`] waits for have this bit; others are of recoveries.
const ASKED: u64 = 1 << 63;

/// Wakes the threads that wait for answers of some targets: something has happened at one of them.
#[derive(Debug, Default)]
pub(crate) struct Signal {
    count: Mutex<u64>,
    changed: Condvar,
}

impl Signal {
    /// Changes with everything that happens.
    pub(crate) fn count(&self) -> u64 {
        *lock(&self.count)
    }

    fn tell(&self) {
        let mut count = lock(&self.count);
        *count = count.wrapping_add(1);
        self.changed.notify_all();
    }

    /// Waits until something has happened since the count was `seen`, or for so long.
    pub(crate) fn wait(&self, seen: u64, most: Duration) {
        let deadline = now_ns().saturating_add(nanos(most));
        let mut count = lock(&self.count);
        while *count == seen {
            let left = Duration::from_nanos(deadline.saturating_sub(now_ns()));
            if left.is_zero() {
                return;
            }
            let waited = self.changed.wait_timeout(count, left);
            count = waited.unwrap_or_else(PoisonError::into_inner).0;
        }
    }
}

/// Whose target it is once the volume is open.
#[derive(Debug)]
pub(crate) struct Owner {
    pub(crate) volume: String,
    /// Which of the volume's servers it is.
    pub(crate) index: usize,
    pub(crate) streams: Arc<Background>,
}

#[derive(Debug)]
struct Managed {
    manager: AssociationManager<Piece>,
    owner: Owner,
    loss_timeout: Duration,
    /// The streams that have asked for connections.
    handles: BTreeMap<StreamId, Arc<StreamHandle>>,
}

#[derive(Debug)]
enum Link {
    Single(Box<Association<Piece>>),
    Managed(Box<Managed>),
}

#[derive(Debug)]
struct Control {
    link: Link,
    sockets: ControlSockets,
    /// The connection that was made for a stream last.
    made: Option<Socket>,
    /// Why the last connection could not be made.
    connect_error: Option<ConnectError>,
    /// Commands of [`Target::ask`] so far, and those that are waited for.
    asked: u64,
    waiting: BTreeSet<u64>,
    answers: Vec<Answer>,
    over: bool,
    /// What is being written, until it is sent; dropped after the pieces of it.
    bufs: Vec<Buf>,
}

/// See the [module](self).
#[derive(Debug)]
pub(crate) struct Target {
    /// As `host:port`.
    pub(crate) name: String,
    timeout: Duration,
    poller: Poller,
    control: Mutex<Control>,
    signal: Arc<Signal>,
}

impl Target {
    /// Begins to set up an association.
    pub(crate) fn start(
        name: String,
        association: Association<Piece>,
        timeout: Duration,
        signal: Arc<Signal>,
    ) -> Result<Arc<Self>, CallError> {
        let control = Control {
            link: Link::Single(Box::new(association)),
            sockets: ControlSockets::default(),
            made: None,
            connect_error: None,
            asked: 0,
            waiting: BTreeSet::new(),
            answers: Vec::new(),
            over: false,
            bufs: Vec::new(),
        };
        let poller = Poller::new()
            .map_err(|_| CallError::Nonsense("this process has no descriptors left"))?;
        let control = Mutex::new(control);
        let target = Arc::new(Self { name, timeout, poller, control, signal });
        let own = Arc::clone(&target);
        let thread = std::thread::Builder::new().name("riopipe-target".into());
        match thread.spawn(move || own.run()) {
            Ok(_) => Ok(target),
            Err(_) => Err(CallError::Nonsense("this process can start no more threads")),
        }
    }

    fn run(&self) {
        let mut events = Vec::new();
        loop {
            let (wanted, deadline) = {
                let mut control = lock(&self.control);
                if control.over {
                    return;
                }
                control.turn(&self.name, &self.poller);
                (control.wanted(), control.deadline())
            };
            self.signal.tell();
            if let Some(wanted) = wanted {
                self.connect(wanted);
                continue;
            }
            let sleep = deadline.map(|at| Duration::from_nanos(at.saturating_sub(now_ns())));
            if let Err(error) = self.poller.wait(&mut events, sleep) {
                tracing::error!(target = %self.name, %error, "cannot wait for events");
                std::thread::sleep(Duration::from_millis(100));
            }
        }
    }

    /// Makes a connection; others may use the target meanwhile.
    fn connect(&self, wanted: ConnectionId) {
        let made = connect(&self.name, self.timeout, &SocketOptions::default());
        let mut control = lock(&self.control);
        if !control.over {
            control.connected(wanted, made, &self.poller);
        }
    }

    /// Waits until `done` has a result; `None` after the target's time limit.
    fn wait<T>(&self, mut done: impl FnMut(&mut Control) -> Option<T>) -> Option<T> {
        let deadline = now_ns().saturating_add(nanos(self.timeout));
        loop {
            let seen = self.signal.count();
            if let Some(result) = done(&mut lock(&self.control)) {
                return Some(result);
            }
            let left = Duration::from_nanos(deadline.saturating_sub(now_ns()));
            if left.is_zero() {
                return None;
            }
            self.signal.wait(seen, left);
        }
    }

    /// Waits until it is attached, which has limits of its own; its NQN and controller.
    pub(crate) fn attached(&self) -> Result<(String, Controller), AttachError> {
        loop {
            let seen = self.signal.count();
            let mut control = lock(&self.control);
            if let Link::Single(association) = &control.link {
                match (association.state(), association.controller()) {
                    (AssociationState::Attached, Some(controller)) => {
                        return Ok((association.subnqn().into(), controller.clone()));
                    }
                    (AssociationState::Lost(error), _) => {
                        let (error, nqn) = (error.clone(), association.subnqn().to_owned());
                        let connect_error = control.connect_error.take();
                        return Err(AttachError::of(&self.name, nqn, error, connect_error));
                    }
                    _ => {}
                }
            }
            drop(control);
            self.signal.wait(seen, self.timeout);
        }
    }

    /// Waits until discovery has listed what there is.
    pub(crate) fn discovered(&self) -> Result<Vec<Entry>, AttachError> {
        loop {
            let seen = self.signal.count();
            let mut control = lock(&self.control);
            if let Link::Single(association) = &control.link {
                if let Some(entries) = association.discovered() {
                    return Ok(entries.to_vec());
                }
                if let AssociationState::Lost(error) = association.state() {
                    let (error, nqn) = (error.clone(), association.subnqn().to_owned());
                    let connect_error = control.connect_error.take();
                    return Err(AttachError::of(&self.name, nqn, error, connect_error));
                }
            }
            drop(control);
            self.signal.wait(seen, self.timeout);
        }
    }

    /// Opens the queue to the drives, and waits for it.
    pub(crate) fn open_drives(&self) -> Result<(), AttachError> {
        let mut nqn = None;
        let opened = self.change(|control, now| {
            control.connect_error = None;
            let association = control.association()?;
            nqn = Some(association.subnqn().to_owned());
            association.open_drives(now);
            Ok(())
        });
        let mut failed = opened.err();
        loop {
            let seen = self.signal.count();
            let mut control = lock(&self.control);
            match control.association().map(|association| association.drives()) {
                _ if failed.is_some() => {}
                Ok(DrivesState::Ready) => return Ok(()),
                Ok(DrivesState::Opening) => {}
                Ok(DrivesState::Failed(why)) => failed = Some(why.clone().into()),
                Ok(DrivesState::Closed) => failed = Some(CallError::Closed),
                Err(lost) => failed = Some(lost),
            }
            if let Some(source) = failed {
                return Err(match control.connect_error.take() {
                    Some(error) => AttachError::Connect(error),
                    None => AttachError::Target { target: self.name.clone(), nqn, source },
                });
            }
            drop(control);
            self.signal.wait(seen, self.timeout);
        }
    }

    /// Closes the queue to the drives.
    pub(crate) fn close_drives(&self) {
        self.change(|control, _| {
            if let Ok(association) = control.association() {
                association.close_drives();
            }
        });
    }

    /// Changes something, sends what is to be sent, and has the rest seen to.
    fn change<T>(&self, change: impl FnOnce(&mut Control, u64) -> T) -> T {
        let mut control = lock(&self.control);
        let result = change(&mut control, now_ns());
        control.send(&self.poller);
        drop(control);
        self.poller.waker().wake();
        result
    }

    /// Asks one command; returns its completion, whatever its status, and its data.
    pub(crate) fn ask(
        &self,
        queue: ControlQueue,
        sqe: Sqe,
        data: CallData<'_>,
    ) -> Result<(Cqe, Vec<u8>), CallError> {
        let (name, number) = self.change(|control, now| {
            control.asked += 1;
            let name = ASKED | control.asked;
            control.send_command(queue, name, sqe, data, now)?;
            control.waiting.insert(name);
            Ok::<_, CallError>((name, control.number()))
        })?;
        let answered = self.wait(|control| {
            let at = control.answers.iter().position(|(one, ..)| *one == name);
            if let Some((_, cqe, page)) = at.map(|at| control.answers.swap_remove(at)) {
                return Some(Ok((cqe, page)));
            }
            control.why(queue, number).map(Err)
        });
        lock(&self.control).waiting.remove(&name);
        answered.unwrap_or(Err(CallError::TimedOut(self.timeout)))
    }

    /// Asks one command that has to succeed.
    pub(crate) fn call(
        &self,
        queue: ControlQueue,
        sqe: Sqe,
        data: CallData<'_>,
    ) -> Result<(Cqe, Vec<u8>), CallError> {
        let (cqe, page) = self.ask(queue, sqe, data)?;
        if cqe.status().is_ok() { Ok((cqe, page)) } else { Err(CallError::Status(cqe.status())) }
    }

    /// Asks one command without waiting for its answer, which [`collect`](Self::collect) brings under
    /// the name `ticket`. The caller bounds how many are out.
    pub(crate) fn send(
        &self,
        queue: ControlQueue,
        ticket: u64,
        sqe: Sqe,
        data: CallData<'_>,
    ) -> Result<(), CallError> {
        let mut control = lock(&self.control);
        control.send_command(queue, ticket, sqe, data, now_ns())?;
        control.send(&self.poller);
        Ok(())
    }

    /// Hands out the answers to [`send`](Self::send) that are there, with their data. Never waits.
    /// `number` is that of the association that was asked.
    pub(crate) fn collect(&self, number: u32, answers: &mut Vec<Answer>) -> Result<(), CallError> {
        let mut control = lock(&self.control);
        let lost = control.why(ControlQueue::Admin, number);
        if let Some(error) = lost.or_else(|| control.why(ControlQueue::Drives, number)) {
            return Err(error);
        }
        answers.extend(control.answers.extract_if(.., |(name, ..)| *name & ASKED == 0));
        Ok(())
    }

    /// Counts the associations.
    pub(crate) fn number(&self) -> u32 {
        lock(&self.control).number()
    }

    /// What tells that something has happened.
    pub(crate) fn signal(&self) -> &Arc<Signal> {
        &self.signal
    }

    /// A fresh I/O queue of the association.
    pub(crate) fn io_queue(&self, qid: u16, depth: usize) -> Result<QueuePair<Piece>, CallError> {
        let mut control = lock(&self.control);
        control.association()?.io_queue(qid, depth).ok_or(CallError::Closed)
    }

    /// The volume is open: from now on the association is kept.
    pub(crate) fn manage(&self, config: ManagerConfig, owner: Owner) {
        let loss_timeout = Duration::from_nanos(config.loss_ns);
        let mut control = lock(&self.control);
        let Link::Single(association) = &mut control.link else { return };
        // What is put in its place lasts no longer than this function.
        let nothing = Association::new(association.config().clone());
        let association = core::mem::replace(&mut **association, nothing);
        let manager = AssociationManager::new(association, config);
        let handles = BTreeMap::new();
        control.link = Link::Managed(Box::new(Managed { manager, owner, loss_timeout, handles }));
        drop(control);
        self.poller.waker().wake();
    }

    /// A stream wants a connection.
    pub(crate) fn request(&self, request: ConnectRequest, handle: &Arc<StreamHandle>) {
        self.change(|control, now| {
            if let Link::Managed(managed) = &mut control.link {
                managed.handles.insert(request.stream, Arc::clone(handle));
                managed.manager.request(request, now);
            }
        });
    }

    /// Why the target is away, if it is.
    pub(crate) fn absence(&self) -> Option<Absence> {
        match &lock(&self.control).link {
            Link::Single(_) => None,
            Link::Managed(managed) => managed.manager.absence().cloned(),
        }
    }

    /// Ends it, unless the volume has been opened.
    pub(crate) fn stop_unless_open(&self) {
        let is_open = matches!(lock(&self.control).link, Link::Managed(_));
        if !is_open {
            self.stop();
        }
    }

    /// Ends it: the target learns at once that the owner is gone, and for good.
    pub(crate) fn stop(&self) {
        self.change(|control, now| {
            control.over = true;
            match &mut control.link {
                Link::Single(association) => association.hang_up(),
                Link::Managed(managed) => managed.manager.stop(now),
            }
        });
    }
}

impl Control {
    /// One round of what is to be done.
    fn turn(&mut self, name: &str, poller: &Poller) {
        let now = now_ns();
        match &mut self.link {
            Link::Single(association) => {
                self.sockets.receive(&mut **association, now);
                association.timeout(now);
            }
            Link::Managed(managed) => {
                self.sockets.receive(&mut managed.manager, now);
                managed.manager.timeout(now);
            }
        }
        if let Link::Managed(managed) = &mut self.link {
            while let Some(event) = managed.manager.next_event() {
                managed.act(name, event, &mut self.made);
            }
        }
        while let Some(answer) = self.association().ok().and_then(Association::answer) {
            if answer.name & ASKED == 0 || self.waiting.contains(&answer.name) {
                self.answers.push((answer.name, answer.cqe, answer.page));
            }
        }
        self.send(poller);
    }

    fn send(&mut self, poller: &Poller) {
        let now = now_ns();
        match &mut self.link {
            Link::Single(association) => self.sockets.send(&mut **association, poller, now),
            Link::Managed(managed) => self.sockets.send(&mut managed.manager, poller, now),
        }
        self.bufs.retain(|buf| !buf.is_unique());
    }

    fn wanted(&self) -> Option<ConnectionId> {
        match &self.link {
            Link::Single(association) => association.wants_connection().map(ConnectionId::Control),
            Link::Managed(managed) => managed.manager.wants_connection(),
        }
    }

    fn deadline(&self) -> Option<u64> {
        match &self.link {
            Link::Single(association) => association.deadline(),
            Link::Managed(managed) => managed.manager.deadline(),
        }
    }

    fn connected(
        &mut self,
        wanted: ConnectionId,
        made: Result<Socket, ConnectError>,
        poller: &Poller,
    ) {
        let now = now_ns();
        let socket = match made {
            Ok(socket) => socket,
            Err(error) => {
                let failure = ConnectFailure(error.to_string());
                self.connect_error = Some(error);
                return self.connect_failed(wanted, failure, now);
            }
        };
        let is_local = socket.peer().ip().is_loopback();
        match wanted {
            ConnectionId::Control(queue) => {
                if let Err(error) = self.sockets.put(queue, socket, poller) {
                    let failure = ConnectFailure(error.to_string());
                    return self.connect_failed(wanted, failure, now);
                }
            }
            ConnectionId::Stream(_) => self.made = Some(socket),
        }
        match (&mut self.link, wanted) {
            (Link::Single(association), ConnectionId::Control(queue)) => {
                association.connected(queue, is_local, now);
            }
            (Link::Managed(managed), _) => managed.manager.connected(wanted, is_local, now),
            (Link::Single(_), ConnectionId::Stream(_)) => {}
        }
    }

    fn connect_failed(&mut self, wanted: ConnectionId, failure: ConnectFailure, now: u64) {
        match (&mut self.link, wanted) {
            (Link::Single(association), ConnectionId::Control(queue)) => {
                association.connect_failed(queue, failure);
            }
            (Link::Managed(managed), _) => managed.manager.connect_failed(wanted, failure, now),
            (Link::Single(_), ConnectionId::Stream(_)) => {}
        }
    }

    /// The association, if it stands; else why not.
    fn association(&mut self) -> Result<&mut Association<Piece>, CallError> {
        match &mut self.link {
            Link::Single(association) => match association.state() {
                AssociationState::Lost(error) => Err(error.clone().into()),
                _ => Ok(association),
            },
            Link::Managed(managed) => {
                let why = managed.manager.absence().map(|absence| absence.why.clone());
                match (managed.manager.association(), why) {
                    (Some(association), _) => Ok(association),
                    (None, Some(why)) => Err(CallError::Link(why)),
                    (None, None) => Err(CallError::Closed),
                }
            }
        }
    }

    /// Why what was asked on a queue of association `number` will not be answered, if that is so.
    fn why(&mut self, queue: ControlQueue, number: u32) -> Option<CallError> {
        if number != self.number() {
            return Some(CallError::Closed);
        }
        match self.association() {
            Err(error) => Some(error),
            Ok(association) => match (queue, association.drives()) {
                (ControlQueue::Drives, DrivesState::Failed(error)) => Some(error.clone().into()),
                (ControlQueue::Drives, DrivesState::Closed) => Some(CallError::Closed),
                _ => None,
            },
        }
    }

    fn number(&self) -> u32 {
        match &self.link {
            Link::Single(_) => 0,
            Link::Managed(managed) => managed.manager.number(),
        }
    }

    fn send_command(
        &mut self,
        queue: ControlQueue,
        name: u64,
        sqe: Sqe,
        data: CallData<'_>,
        now: u64,
    ) -> Result<(), CallError> {
        let association = self.association()?;
        let asked = match data {
            CallData::None => association.ask(queue, name, sqe, Data::None, now),
            CallData::Bytes(bytes) => association.ask(queue, name, sqe, Data::Bytes(bytes), now),
            CallData::Read(len) => association.ask(queue, name, sqe, Data::Read(len), now),
            CallData::Buf(mut buf) => {
                let asked = association.ask(queue, name, sqe, Data::Write(&[buf.piece()]), now);
                self.bufs.push(buf);
                asked
            }
        };
        asked.map_err(|error| match error {
            AskError::Full { owed } => CallError::Behind(owed),
            AskError::NotReady | AskError::Data(_) => CallError::Closed,
        })
    }
}

impl Managed {
    /// Tells streams and the log of what has happened.
    fn act(&mut self, target: &str, event: ManagerEvent<Piece>, made: &mut Option<Socket>) {
        let Owner { volume, index: server, streams } = &self.owner;
        let server = *server;
        match event {
            ManagerEvent::Lost { why } if self.loss_timeout.is_zero() => tracing::warn!(
                %volume, %target, error = %why,
                "lost the target; no time is given for it to come back"
            ),
            ManagerEvent::Lost { why } => tracing::warn!(
                %volume, %target, error = %why, loss_timeout = ?self.loss_timeout,
                "lost the target; trying to reach it again"
            ),
            ManagerEvent::Back { away_ns, attempts } => {
                for stream in streams.streams() {
                    stream.handle.post(Mail::AssociationEnded { server });
                }
                tracing::info!(
                    %volume, %target, after_ms = away_ns / 1_000_000, attempts,
                    "the target is back"
                );
            }
            ManagerEvent::GivenUp { away_ns } => tracing::error!(
                %volume, %target, away_ms = away_ns / 1_000_000,
                "given up: the streams fail; when the target comes back they can be reopened"
            ),
            ManagerEvent::Refused { why, cause } => {
                if !self.loss_timeout.is_zero() {
                    tracing::error!(
                        %volume, %target, %why, "the target will not have this owner back"
                    );
                }
                for stream in streams.streams() {
                    stream.handle.post(Mail::GiveUp { server, cause });
                }
            }
            ManagerEvent::StreamConnection { stream, queue } => {
                if let (Some(socket), Some(handle)) = (made.take(), self.handles.remove(&stream)) {
                    let queue = Box::new(queue);
                    handle.post(Mail::Connected { server, socket, queue });
                }
            }
        }
    }
}

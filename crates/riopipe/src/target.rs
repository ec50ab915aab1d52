//! A target's thread: it has the sockets of the target's association, and the clock. The
//! [`Association`] decides the actions and their times. When the volume is open, the association
//! becomes an [`AssociationManager`], which decides them from then on.
//!
//! Connections are made by another thread, one at a time: to resolve a name and to connect may take
//! long, and the association must send Keep Alive meanwhile (T25).

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex};
use std::time::Duration;

use riopipe_net::{ConnectError, Poller, Socket, SocketOptions, connect, now_ns};
use riopipe_nvme::discovery::Entry;
use riopipe_order::attribute::StreamId;
use riopipe_session::initiator::association::{
    Association, AssociationError, AssociationState, ConnectFailure, DrivesState,
};
use riopipe_session::initiator::endpoint::{ConnectionId, Endpoint};
use riopipe_session::initiator::manager::{
    Absence, AssociationManager, ManagerConfig, ManagerEvent,
};
use riopipe_session::initiator::queue_pair::IoQueue;
use riopipe_session::initiator::reconnect::ConnectRequest;

use crate::addr::TargetAddr;
use crate::call_error::{AttachError, CallError};
use crate::failure::Exhausted;
use crate::lock::lock;
use crate::signal::Signal;
use crate::sockets::{ControlSockets, Page};
use crate::stream_handle::{StreamHandle, StreamMessage};

/// The volume to which the target belongs once the volume is open.
#[derive(Debug)]
pub(crate) struct Owner {
    pub(crate) volume: String,
    /// The number of the target among the volume's servers.
    pub(crate) index: usize,
}

#[derive(Debug)]
struct Managed {
    manager: AssociationManager<Page>,
    owner: Owner,
    loss_timeout: Duration,
    /// The streams that have, or are to have, a connection of the association.
    handles: BTreeMap<StreamId, Arc<StreamHandle>>,
}

/// The association before the volume is open, or its manager after that.
#[derive(Debug)]
enum Phase {
    Single(Box<Association<Page>>),
    Managed(Box<Managed>),
}

#[derive(Debug)]
struct Control {
    phase: Phase,
    sockets: ControlSockets,
    /// The connection that a thread is making now.
    making: Option<Making>,
    /// The connection that was made for a stream last. It waits until the manager reports the queue
    /// for it.
    made: Option<Socket>,
    /// Why the last connection could not be made.
    connect_error: Option<ConnectError>,
    /// Whether the target is not needed any more: its thread ends.
    over: bool,
}

/// A connection that is being made.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Making {
    wanted: ConnectionId,
    /// The [number](AssociationManager::number) of the association for which it is made. Each
    /// association that stands again has a higher number, and does not get a connection that was
    /// made for an earlier one (T27).
    number: u32,
}

/// The number of the first association, with which a manager begins.
const FIRST_NUMBER: u32 = 1;

/// Why a connection was not made.
enum Unmade {
    Connect(ConnectError),
    /// The process can't make one.
    Exhausted(Exhausted),
}

/// A target of a volume, with its thread; see the [module](self).
#[derive(Debug)]
pub(crate) struct Target {
    /// The address, as `host:port`.
    pub(crate) name: TargetAddr,
    timeout: Duration,
    poller: Poller,
    control: Mutex<Control>,
    signal: Arc<Signal>,
}

impl Target {
    /// Begins to set up an association.
    pub(crate) fn start(
        name: TargetAddr,
        association: Association<Page>,
        timeout: Duration,
        signal: Arc<Signal>,
    ) -> Result<Arc<Self>, CallError> {
        let control = Control {
            phase: Phase::Single(Box::new(association)),
            sockets: ControlSockets::default(),
            making: None,
            made: None,
            connect_error: None,
            over: false,
        };
        let poller = Poller::new().map_err(|_| Exhausted::Descriptors)?;
        let control = Mutex::new(control);
        let target = Arc::new(Self { name, timeout, poller, control, signal });
        let for_thread = Arc::clone(&target);
        let thread = std::thread::Builder::new().name("riopipe-target".into());
        match thread.spawn(move || for_thread.run()) {
            Ok(_) => Ok(target),
            Err(_) => Err(Exhausted::Threads.into()),
        }
    }

    /// The thread of the target: runs rounds until the target is not needed any more. The signal
    /// wakes the calls that wait for a change.
    fn run(self: &Arc<Self>) {
        let mut events = Vec::new();
        loop {
            let (has_changed, begun, deadline) = {
                let mut control = lock(&self.control);
                if control.over {
                    return;
                }
                let has_changed = control.turn(&self.name, &self.poller);
                (has_changed, control.begin_making(), control.deadline())
            };
            if has_changed {
                self.signal.notify();
            }
            if let Some(making) = begun {
                self.connect(making);
            }
            let sleep = deadline.map(|at| Duration::from_nanos(at.saturating_sub(now_ns())));
            if let Err(error) = self.poller.wait(&mut events, sleep) {
                tracing::error!(target = %self.name, %error, "cannot wait for events");
                std::thread::sleep(Duration::from_millis(100));
            }
        }
    }

    /// Starts the thread that makes a connection.
    fn connect(self: &Arc<Self>, making: Making) {
        let (name, timeout) = (self.name.clone(), self.timeout);
        // The thread may run for longer than the target is needed, and keeps none of it then.
        let target = Arc::downgrade(self);
        let thread = std::thread::Builder::new().name("riopipe-connect".into());
        let started = thread.spawn(move || {
            let made = connect(name.as_str(), timeout, &SocketOptions::default());
            if let Some(target) = target.upgrade() {
                target.finish(making, made.map_err(Unmade::Connect));
            }
        });
        if started.is_err() {
            self.finish(making, Err(Unmade::Exhausted(Exhausted::Threads)));
        }
    }

    /// Takes in the connection that another thread has made, or the reason why there is none.
    fn finish(&self, making: Making, made: Result<Socket, Unmade>) {
        let mut control = lock(&self.control);
        control.making = None;
        // The association may have ended meanwhile, or the request. A connection that is still
        // wanted is then begun anew.
        if !control.over && control.wanted() == Some(making) {
            control.connected(making.wanted, made, &self.poller);
        }
        drop(control);
        self.signal.notify();
        self.poller.waker().wake();
    }

    /// Waits until discovery has listed the subsystems.
    pub(crate) fn discovered(&self) -> Result<Vec<Entry>, AttachError> {
        loop {
            let seen = self.signal.count();
            let mut control = lock(&self.control);
            if let Phase::Single(association) = &control.phase {
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

    /// Why there is no association.
    pub(crate) fn attach_error(&self, error: AssociationError) -> AttachError {
        let mut control = lock(&self.control);
        let nqn = match &control.phase {
            Phase::Single(association) => association.subnqn().to_owned(),
            Phase::Managed(_) => String::new(),
        };
        AttachError::of(&self.name, nqn, error, control.connect_error.take())
    }

    /// Calls `f` with the association, as long as the volume is not open.
    pub(crate) fn with_association<R>(
        &self,
        f: impl FnOnce(&mut Association<Page>) -> R,
    ) -> Option<R> {
        self.change(|control, _| match &mut control.phase {
            Phase::Single(association) => Some(f(association)),
            Phase::Managed(_) => None,
        })
    }

    /// Calls `f` with the association's manager, once the volume is open.
    pub(crate) fn with_manager(&self, f: &mut dyn FnMut(&mut AssociationManager<Page>)) {
        self.change(|control, _| {
            if let Phase::Managed(managed) = &mut control.phase {
                f(&mut managed.manager);
            }
        });
    }

    /// Changes the state, sends waiting bytes, and wakes the thread for all other work.
    fn change<T>(&self, change: impl FnOnce(&mut Control, u64) -> T) -> T {
        let mut control = lock(&self.control);
        let result = change(&mut control, now_ns());
        control.send(&self.poller);
        drop(control);
        self.poller.waker().wake();
        result
    }

    /// A fresh I/O queue of the association, for a stream. From now on, until it is
    /// [forgotten](Self::forget), the stream gets a message when an association ends.
    pub(crate) fn io_queue(
        &self,
        request: &ConnectRequest,
        handle: &Arc<StreamHandle>,
    ) -> Result<IoQueue, CallError> {
        let mut control = lock(&self.control);
        let queue = control.association()?.io_queue(request.qid, request.depth);
        let queue = queue.ok_or(CallError::Closed)?;
        if let Phase::Managed(managed) = &mut control.phase {
            managed.handles.insert(request.stream, Arc::clone(handle));
        }
        Ok(queue)
    }

    /// A stream has ended. Another one may have its number by now.
    pub(crate) fn forget(&self, stream: StreamId, handle: &Arc<StreamHandle>) {
        if let Phase::Managed(managed) = &mut lock(&self.control).phase
            && managed.handles.get(&stream).is_some_and(|current| Arc::ptr_eq(current, handle))
        {
            managed.handles.remove(&stream);
        }
    }

    /// The volume is open: from now on the association is set up again when it is lost.
    pub(crate) fn manage(&self, config: ManagerConfig, owner: Owner) {
        let loss_timeout = Duration::from_nanos(config.loss_ns);
        let mut control = lock(&self.control);
        let Phase::Single(association) = &mut control.phase else { return };
        // The replacement exists no longer than this function runs.
        let nothing = Association::new(association.config().clone());
        let association = core::mem::replace(&mut **association, nothing);
        let manager = AssociationManager::new(association, config);
        let handles = BTreeMap::new();
        control.phase = Phase::Managed(Box::new(Managed { manager, owner, loss_timeout, handles }));
        drop(control);
        self.poller.waker().wake();
    }

    /// A stream wants another connection.
    pub(crate) fn request(&self, request: ConnectRequest) {
        self.change(|control, now| {
            if let Phase::Managed(managed) = &mut control.phase {
                managed.manager.request(request, now);
            }
        });
    }

    /// Why the target is unreachable, if it is.
    pub(crate) fn absence(&self) -> Option<Absence> {
        match &lock(&self.control).phase {
            Phase::Single(_) => None,
            Phase::Managed(managed) => managed.manager.absence().cloned(),
        }
    }

    /// Ends the association, unless the volume has been opened.
    pub(crate) fn stop_unless_open(&self) {
        let is_open = matches!(lock(&self.control).phase, Phase::Managed(_));
        if !is_open {
            self.stop();
        }
    }

    /// Ends the association, and shows the target at once that the owner has ended for good.
    pub(crate) fn stop(&self) {
        self.change(|control, now| {
            control.over = true;
            match &mut control.phase {
                Phase::Single(association) => association.close(),
                Phase::Managed(managed) => managed.manager.stop(now),
            }
        });
    }
}

impl Control {
    /// One round: receives, handles events, sends. Returns whether bytes arrived or the state changed.
    fn turn(&mut self, name: &TargetAddr, poller: &Poller) -> bool {
        let now = now_ns();
        let before = self.state();
        let has_received = match &mut self.phase {
            Phase::Single(association) => {
                let has_received = self.sockets.receive(&mut **association, now);
                association.timeout(now);
                has_received
            }
            Phase::Managed(managed) => {
                let has_received = self.sockets.receive(&mut managed.manager, now);
                managed.manager.timeout(now);
                while let Some(event) = managed.manager.next_event() {
                    managed.act(name, event, &mut self.made);
                }
                has_received
            }
        };
        self.send(poller);
        has_received || self.state() != before
    }

    /// The state that calls wait for and that may change without received bytes: the number of the
    /// association, whether it stands, and whether its queue to the drives has failed.
    fn state(&mut self) -> (u32, bool, bool) {
        let number = match &self.phase {
            Phase::Single(_) => 0,
            Phase::Managed(managed) => managed.manager.association_number(),
        };
        let association = self.association().ok();
        let stands = association.is_some();
        let failed = association.is_some_and(|a| matches!(a.drives(), DrivesState::Failed(_)));
        (number, stands, failed)
    }

    /// Sends the bytes that wait, as far as the sockets take them.
    fn send(&mut self, poller: &Poller) {
        let now = now_ns();
        match &mut self.phase {
            Phase::Single(association) => self.sockets.send(&mut **association, poller, now),
            Phase::Managed(managed) => self.sockets.send(&mut managed.manager, poller, now),
        }
    }

    /// The connection that is wanted now.
    fn wanted(&self) -> Option<Making> {
        let (wanted, number) = match &self.phase {
            Phase::Single(association) => (association.wants_connection(), FIRST_NUMBER),
            Phase::Managed(managed) => {
                (managed.manager.wants_connection(), managed.manager.association_number())
            }
        };
        wanted.map(|wanted| Making { wanted, number })
    }

    /// The connection to make now, if one is wanted and none is being made.
    fn begin_making(&mut self) -> Option<Making> {
        if self.making.is_some() {
            return None;
        }
        self.making = self.wanted();
        self.making
    }

    fn deadline(&self) -> Option<u64> {
        match &self.phase {
            Phase::Single(association) => association.deadline(),
            Phase::Managed(managed) => managed.manager.deadline(),
        }
    }

    /// Gives the association the connection that it wanted, or reports why it could not be made.
    fn connected(&mut self, wanted: ConnectionId, made: Result<Socket, Unmade>, poller: &Poller) {
        let now = now_ns();
        let socket = match made {
            Ok(socket) => socket,
            Err(Unmade::Connect(error)) => {
                let failure = ConnectFailure(error.to_string());
                self.connect_error = Some(error);
                return self.connect_failed(wanted, failure, now);
            }
            Err(Unmade::Exhausted(what)) => {
                self.connect_error = None;
                return self.connect_failed(wanted, ConnectFailure(what.to_string()), now);
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
        match &mut self.phase {
            Phase::Single(association) => association.connected(wanted, is_local, now),
            Phase::Managed(managed) => managed.manager.connected(wanted, is_local, now),
        }
    }

    fn connect_failed(&mut self, wanted: ConnectionId, failure: ConnectFailure, now: u64) {
        match &mut self.phase {
            Phase::Single(association) => association.connect_failed(wanted, failure, now),
            Phase::Managed(managed) => managed.manager.connect_failed(wanted, failure, now),
        }
    }

    /// The association, or the reason why there is none.
    fn association(&mut self) -> Result<&mut Association<Page>, CallError> {
        match &mut self.phase {
            Phase::Single(association) => match association.state() {
                AssociationState::Lost(error) => Err(error.clone().into()),
                _ => Ok(association),
            },
            Phase::Managed(managed) => {
                let why = managed.manager.absence().map(|absence| absence.why.clone());
                match (managed.manager.association(), why) {
                    (Some(association), _) => Ok(association),
                    (None, Some(why)) => Err(CallError::Unreachable(why)),
                    (None, None) => Err(CallError::Closed),
                }
            }
        }
    }
}

impl Managed {
    /// Reports the event to the streams and to the log of the program.
    fn act(&mut self, target: &TargetAddr, event: ManagerEvent, made: &mut Option<Socket>) {
        let Owner { volume, index: server } = &self.owner;
        let server = *server;
        match event {
            ManagerEvent::Lost { why } => {
                for handle in self.handles.values() {
                    handle.post(StreamMessage::AssociationEnded { server });
                }
                if self.manager.is_released() {
                    tracing::info!(%volume, %target, "the target, which has released the volume, is lost");
                } else if self.loss_timeout.is_zero() {
                    tracing::warn!(
                        %volume, %target, error = %why,
                        "lost the target; the loss timeout is 0, so it is not tried again"
                    );
                } else {
                    tracing::warn!(
                        %volume, %target, error = %why, loss_timeout = ?self.loss_timeout,
                        "lost the target; trying to reach it again"
                    );
                }
            }
            ManagerEvent::Back { unreachable_ns, attempts } => tracing::info!(
                %volume, %target, after_ms = unreachable_ns / 1_000_000, attempts,
                "the target is back"
            ),
            ManagerEvent::GivenUp { unreachable_ns } => tracing::error!(
                %volume, %target, unreachable_ms = unreachable_ns / 1_000_000,
                "the target is given up: the streams fail; when it is back they can be reopened"
            ),
            ManagerEvent::Refused { why, cause } => {
                if !self.loss_timeout.is_zero() && !self.manager.is_released() {
                    tracing::error!(
                        %volume, %target, %why, "the target refuses this owner"
                    );
                }
                for handle in self.handles.values() {
                    handle.post(StreamMessage::GiveUp { server, cause });
                }
            }
            ManagerEvent::StreamConnection { stream, queue } => {
                if let (Some(socket), Some(handle)) = (made.take(), self.handles.get(&stream)) {
                    let queue = Box::new(queue);
                    handle.post(StreamMessage::Connected { server, socket, queue });
                }
            }
        }
    }
}

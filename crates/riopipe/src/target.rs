//! One target of a volume, with its thread.
//!
//! The thread has the sockets and the clock of the association with the target. It decides nothing:
//! the [`Association`] decides what to send, and when. Once the volume is open, an
//! [`AssociationManager`] has the association, and sets it up again when it is lost.
//!
//! One round of the thread:
//!
//! 1. receive bytes, report the time, carry out events, send bytes ([`TargetState::run_round`]);
//! 2. start a *connect thread* if the association requests a connection;
//! 3. sleep until bytes arrive, until another thread calls the waker, or until the next deadline.
//!
//! A connect thread makes one connection. The target's own thread may not do that: to resolve a
//! name and to connect may take long, and without Keep Alive the target would drop the association
//! meanwhile (trap T25).

mod state;

use std::sync::{Arc, Mutex};
use std::time::Duration;

use riopipe_net::{Poller, Socket, now_ns};
use riopipe_nvme::discovery::Entry;
use riopipe_order::attribute::StreamId;
use riopipe_session::initiator::association::{Association, AssociationError, AssociationState};
use riopipe_session::initiator::manager::{Absence, AssociationManager, ManagerConfig};
use riopipe_session::initiator::queue_pair::IoQueue;
use riopipe_session::initiator::reconnect::ConnectRequest;

pub(crate) use self::state::VolumeServer;
use self::state::{AssociationPhase, ConnectAttempt, ConnectAttemptError, TargetState};
use crate::addr::TargetAddr;
use crate::call_error::{AttachError, CallError};
use crate::dial::Dialer;
use crate::failure::Exhausted;
use crate::lock::lock;
use crate::signal::Signal;
use crate::sockets::Page;
use crate::stream_handle::StreamHandle;

/// The pause of the target's thread after a failed wait for events.
const RETRY_PAUSE: Duration = Duration::from_millis(100);

/// A target of a volume, with its thread; see the [module](self).
#[derive(Debug)]
pub(crate) struct Target {
    /// The address, as `host:port`.
    pub(crate) name: TargetAddr,
    dialer: Dialer,
    poller: Poller,
    state: Mutex<TargetState>,
    /// Wakes the threads that wait for a change of the association.
    signal: Arc<Signal>,
}

impl Target {
    /// Starts the thread of the target, which sets up the association.
    pub(crate) fn start(
        name: TargetAddr,
        association: Association<Page>,
        dialer: Dialer,
        signal: Arc<Signal>,
    ) -> Result<Arc<Self>, CallError> {
        let poller = Poller::new().map_err(|_| Exhausted::Descriptors)?;
        let state = Mutex::new(TargetState::new(association));
        let target = Arc::new(Self { name, dialer, poller, state, signal });
        let for_thread = Arc::clone(&target);
        let thread = std::thread::Builder::new().name("riopipe-target".into());
        match thread.spawn(move || for_thread.run()) {
            Ok(_) => Ok(target),
            Err(_) => Err(Exhausted::Threads.into()),
        }
    }

    /// The loop of the target's thread. It ends when the target is [stopped](Self::stop).
    fn run(self: &Arc<Self>) {
        let mut events = Vec::new();
        loop {
            let (has_changed, begun_attempt, subnqn, deadline) = {
                let mut state = lock(&self.state);
                if state.is_stopped {
                    return;
                }
                let has_changed = state.run_round(&self.name, &self.poller);
                let begun_attempt = state.begin_connect_attempt();
                (has_changed, begun_attempt, state.subnqn().to_owned(), state.deadline())
            };
            if has_changed {
                self.signal.notify();
            }
            if let Some(attempt) = begun_attempt {
                self.start_connect_thread(attempt, subnqn);
            }
            let sleep = deadline.map(|at| Duration::from_nanos(at.saturating_sub(now_ns())));
            if let Err(error) = self.poller.wait(&mut events, sleep) {
                tracing::error!(target = %self.name, %error, "cannot wait for events");
                std::thread::sleep(RETRY_PAUSE);
            }
        }
    }

    /// Starts a thread that makes a connection for a subsystem, and passes it to
    /// [`finish_connect_attempt`](Self::finish_connect_attempt).
    fn start_connect_thread(self: &Arc<Self>, attempt: ConnectAttempt, subnqn: String) {
        let (name, dialer) = (self.name.clone(), self.dialer.clone());
        // The connect thread may outlive the target, so it holds no strong reference to the target.
        let target = Arc::downgrade(self);
        let thread = std::thread::Builder::new().name("riopipe-connect".into());
        let started = thread.spawn(move || {
            let connected = dialer.dial(name.as_str(), &subnqn);
            if let Some(target) = target.upgrade() {
                let result = connected.map_err(ConnectAttemptError::Connect);
                target.finish_connect_attempt(attempt, result);
            }
        });
        if started.is_err() {
            let error = ConnectAttemptError::Exhausted(Exhausted::Threads);
            self.finish_connect_attempt(attempt, Err(error));
        }
    }

    /// Passes the result of an attempt to the association, if the association still requests this
    /// connection.
    fn finish_connect_attempt(
        &self,
        attempt: ConnectAttempt,
        result: Result<Socket, ConnectAttemptError>,
    ) {
        let mut state = lock(&self.state);
        state.connect_attempt = None;
        // The association or the request may have ended during the attempt. The result is dropped
        // in that case. The next round begins a new attempt if a connection is requested.
        if !state.is_stopped && state.requested_connection() == Some(attempt) {
            state.on_connect_result(attempt.connection, result, &self.poller);
        }
        drop(state);
        self.signal.notify();
        self.poller.waker().wake();
    }

    /// Waits until discovery has listed the subsystems.
    pub(crate) fn wait_for_discovery(&self) -> Result<Vec<Entry>, AttachError> {
        loop {
            let seen = self.signal.count();
            let mut state = lock(&self.state);
            if let AssociationPhase::Unmanaged(association) = &state.phase {
                if let Some(entries) = association.discovered() {
                    return Ok(entries.to_vec());
                }
                if let AssociationState::Lost(error) = association.state() {
                    let (error, nqn) = (error.clone(), association.subnqn().to_owned());
                    let connect_error = state.last_connect_error.take();
                    return Err(AttachError::of(&self.name, nqn, error, connect_error));
                }
            }
            drop(state);
            self.signal.wait(seen, self.dialer.timeout);
        }
    }

    /// Describes why there is no association: `error`, with the target's address and subsystem.
    pub(crate) fn attach_error(&self, error: AssociationError) -> AttachError {
        let mut state = lock(&self.state);
        let nqn = match &state.phase {
            AssociationPhase::Unmanaged(association) => association.subnqn().to_owned(),
            AssociationPhase::Managed(_) => String::new(),
        };
        AttachError::of(&self.name, nqn, error, state.last_connect_error.take())
    }

    /// Calls `action` with the association. Returns `None` without a call if the volume is open,
    /// because the manager has the association from then on.
    pub(crate) fn with_association<R>(
        &self,
        action: impl FnOnce(&mut Association<Page>) -> R,
    ) -> Option<R> {
        self.update_state(|state, _| match &mut state.phase {
            AssociationPhase::Unmanaged(association) => Some(action(association)),
            AssociationPhase::Managed(_) => None,
        })
    }

    /// Calls `action` with the association's manager, if the volume is open.
    pub(crate) fn with_manager(&self, action: &mut dyn FnMut(&mut AssociationManager<Page>)) {
        self.update_state(|state, _| {
            if let AssociationPhase::Managed(managed) = &mut state.phase {
                action(&mut managed.manager);
            }
        });
    }

    /// Calls `update` with the state and the present time (ns), and sends the bytes that `update`
    /// has queued. Wakes the target's thread for the rest of the work, such as new connections.
    fn update_state<T>(&self, update: impl FnOnce(&mut TargetState, u64) -> T) -> T {
        let mut state = lock(&self.state);
        let result = update(&mut state, now_ns());
        state.send(&self.poller);
        drop(state);
        self.poller.waker().wake();
        result
    }

    /// Makes an I/O queue of the association for a stream. From now on the stream gets a message
    /// each time the association ends, until [`remove_stream`](Self::remove_stream).
    pub(crate) fn create_io_queue(
        &self,
        request: &ConnectRequest,
        handle: &Arc<StreamHandle>,
    ) -> Result<IoQueue, CallError> {
        let mut state = lock(&self.state);
        let queue = state.association()?.io_queue(request.qid, request.depth);
        let queue = queue.ok_or(CallError::Closed)?;
        if let AssociationPhase::Managed(managed) = &mut state.phase {
            managed.stream_handles.insert(request.stream, Arc::clone(handle));
        }
        Ok(queue)
    }

    /// Stops the messages to a stream that has ended. The caller passes the handle of the stream,
    /// because another stream may have the same id already. That other stream stays.
    pub(crate) fn remove_stream(&self, stream: StreamId, handle: &Arc<StreamHandle>) {
        let mut state = lock(&self.state);
        let AssociationPhase::Managed(managed) = &mut state.phase else { return };
        let is_present =
            managed.stream_handles.get(&stream).is_some_and(|present| Arc::ptr_eq(present, handle));
        if is_present {
            managed.stream_handles.remove(&stream);
        }
    }

    /// Passes the association to a manager, because the volume is open. From now on the association
    /// is set up again when it is lost.
    pub(crate) fn begin_managing(&self, config: ManagerConfig, server: VolumeServer) {
        let mut state = lock(&self.state);
        state.begin_managing(config, server);
        drop(state);
        self.poller.waker().wake();
    }

    /// Requests a connection for a stream.
    pub(crate) fn request_connection(&self, request: ConnectRequest) {
        self.update_state(|state, now| {
            if let AssociationPhase::Managed(managed) = &mut state.phase {
                managed.manager.request(request, now);
            }
        });
    }

    /// Why the target is unreachable; `None` if it is reachable, or if the volume is not open.
    pub(crate) fn absence(&self) -> Option<Absence> {
        match &lock(&self.state).phase {
            AssociationPhase::Unmanaged(_) => None,
            AssociationPhase::Managed(managed) => managed.manager.absence().cloned(),
        }
    }

    /// Ends the association and the thread, unless the volume has been opened.
    pub(crate) fn stop_unless_open(&self) {
        let is_open = matches!(lock(&self.state).phase, AssociationPhase::Managed(_));
        if !is_open {
            self.stop();
        }
    }

    /// Ends the association and the thread. The target detects at once that the owner has ended for
    /// good.
    pub(crate) fn stop(&self) {
        self.update_state(|state, now| {
            state.is_stopped = true;
            match &mut state.phase {
                AssociationPhase::Unmanaged(association) => association.close(),
                AssociationPhase::Managed(managed) => managed.manager.stop(now),
            }
        });
    }
}

//! The state of a target, behind its lock: the association or its manager, the sockets, and the
//! connection that is being made.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Duration;

use riopipe_net::{ConnectError, Poller, Socket, now_ns};
use riopipe_order::attribute::StreamId;
use riopipe_order::engine::Cause;
use riopipe_session::initiator::association::{
    Association, AssociationState, ConnectFailure, DrivesState,
};
use riopipe_session::initiator::endpoint::{ConnectionId, Endpoint};
use riopipe_session::initiator::manager::{AssociationManager, ManagerConfig, ManagerEvent};
use riopipe_session::rounded::Rounded;

use crate::addr::TargetAddr;
use crate::call_error::CallError;
use crate::failure::Exhausted;
use crate::sockets::{ControlSockets, Page};
use crate::stream_handle::{StreamHandle, StreamMessage};

/// The place of a target in an open volume.
#[derive(Debug)]
pub(crate) struct VolumeServer {
    /// The name of the volume.
    pub(crate) volume: String,
    /// The number of the target among the volume's servers.
    pub(crate) index: usize,
}

/// An association with its manager, once the volume is open.
#[derive(Debug)]
pub(super) struct ManagedAssociation {
    pub(super) manager: AssociationManager<Page>,
    server: VolumeServer,
    loss_timeout: Duration,
    /// The streams that have a connection of the association, or have requested one.
    pub(super) stream_handles: BTreeMap<StreamId, Arc<StreamHandle>>,
}

/// The part that decides for the association: it alone until the volume is open, its manager after
/// that.
#[derive(Debug)]
pub(super) enum AssociationPhase {
    Unmanaged(Box<Association<Page>>),
    Managed(Box<ManagedAssociation>),
}

/// The state that the thread of the target and the calls of other threads share.
#[derive(Debug)]
pub(super) struct TargetState {
    pub(super) phase: AssociationPhase,
    sockets: ControlSockets,
    /// The connection that a connect thread is making now.
    pub(super) connect_attempt: Option<ConnectAttempt>,
    /// The connection that was made last for a stream. It is kept here until the manager emits the
    /// event that has the queue for it.
    stream_socket: Option<Socket>,
    /// Why the last connection could not be made.
    pub(super) last_connect_error: Option<ConnectError>,
    /// Whether the target's thread must end.
    pub(super) is_stopped: bool,
}

/// A connection that a connect thread makes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct ConnectAttempt {
    pub(super) connection: ConnectionId,
    /// The [number](AssociationManager::number) of the association for which the connection is
    /// made. Each association that is set up again has a higher number. So a connection that was
    /// made for an earlier association is not used for a later one (trap T27).
    association_number: u32,
}

/// The number of the first association, with which a manager begins.
const FIRST_ASSOCIATION_NUMBER: u32 = 1;

/// Why an attempt made no connection.
pub(super) enum ConnectAttemptError {
    Connect(ConnectError),
    /// This process has no resources for a connection.
    Exhausted(Exhausted),
}

/// The part of the state for which other threads wait and that may change without received bytes.
#[derive(PartialEq, Eq)]
struct ObservedState {
    association_number: u32,
    has_association: bool,
    /// Whether the I/O queue for the drives has failed.
    has_failed_drives: bool,
}

impl TargetState {
    pub(super) fn new(association: Association<Page>) -> Self {
        Self {
            phase: AssociationPhase::Unmanaged(Box::new(association)),
            sockets: ControlSockets::default(),
            connect_attempt: None,
            stream_socket: None,
            last_connect_error: None,
            is_stopped: false,
        }
    }

    /// Receives bytes, reports the time, carries out events, and sends bytes. Returns whether bytes
    /// arrived or the observed state changed.
    pub(super) fn run_round(&mut self, target: &TargetAddr, poller: &Poller) -> bool {
        let now = now_ns();
        let before = self.observed();
        let has_received = match &mut self.phase {
            AssociationPhase::Unmanaged(association) => {
                let has_received = self.sockets.receive(&mut **association, now);
                association.timeout(now);
                has_received
            }
            AssociationPhase::Managed(managed) => {
                let has_received = self.sockets.receive(&mut managed.manager, now);
                managed.report_received();
                managed.manager.timeout(now);
                while let Some(event) = managed.manager.next_event() {
                    managed.handle_event(target, event, &mut self.stream_socket);
                }
                has_received
            }
        };
        self.send(poller);
        has_received || self.observed() != before
    }

    fn observed(&mut self) -> ObservedState {
        let association_number = match &self.phase {
            AssociationPhase::Unmanaged(_) => 0,
            AssociationPhase::Managed(managed) => managed.manager.association_number(),
        };
        let association = self.association().ok();
        ObservedState {
            association_number,
            has_association: association.is_some(),
            has_failed_drives: association
                .is_some_and(|association| matches!(association.drives(), DrivesState::Failed(_))),
        }
    }

    /// Sends the queued bytes, as far as the sockets accept them.
    pub(super) fn send(&mut self, poller: &Poller) {
        let now = now_ns();
        match &mut self.phase {
            AssociationPhase::Unmanaged(association) => {
                self.sockets.send(&mut **association, poller, now);
            }
            AssociationPhase::Managed(managed) => {
                self.sockets.send(&mut managed.manager, poller, now);
            }
        }
    }

    /// The connection that the association or its manager requests now.
    pub(super) fn requested_connection(&self) -> Option<ConnectAttempt> {
        let (connection, association_number) = match &self.phase {
            AssociationPhase::Unmanaged(association) => {
                (association.wants_connection(), FIRST_ASSOCIATION_NUMBER)
            }
            AssociationPhase::Managed(managed) => {
                (managed.manager.wants_connection(), managed.manager.association_number())
            }
        };
        let connection = connection?;
        Some(ConnectAttempt { connection, association_number })
    }

    /// The subsystem for which a connection is made now.
    pub(super) fn subnqn(&self) -> &str {
        match &self.phase {
            AssociationPhase::Unmanaged(association) => association.subnqn(),
            AssociationPhase::Managed(managed) => managed.manager.subnqn(),
        }
    }

    /// Begins an attempt, if a connection is requested and no connect thread runs. The caller
    /// starts the connect thread.
    pub(super) fn begin_connect_attempt(&mut self) -> Option<ConnectAttempt> {
        if self.connect_attempt.is_some() {
            return None;
        }
        self.connect_attempt = self.requested_connection();
        self.connect_attempt
    }

    /// The time of the next round, even if no bytes arrive, ns.
    pub(super) fn deadline(&self) -> Option<u64> {
        match &self.phase {
            AssociationPhase::Unmanaged(association) => association.deadline(),
            AssociationPhase::Managed(managed) => managed.manager.deadline(),
        }
    }

    /// Passes the connection that was requested to the association, or the reason why it could not
    /// be made.
    pub(super) fn on_connect_result(
        &mut self,
        connection: ConnectionId,
        result: Result<Socket, ConnectAttemptError>,
        poller: &Poller,
    ) {
        let now = now_ns();
        let socket = match result {
            Ok(socket) => socket,
            Err(ConnectAttemptError::Connect(error)) => {
                let failure = ConnectFailure(error.to_string());
                self.last_connect_error = Some(error);
                return self.report_connect_failure(connection, failure, now);
            }
            Err(ConnectAttemptError::Exhausted(resource)) => {
                self.last_connect_error = None;
                let failure = ConnectFailure(resource.to_string());
                return self.report_connect_failure(connection, failure, now);
            }
        };
        let is_local = socket.peer().ip().is_loopback();
        match connection {
            ConnectionId::Control(queue) => {
                if let Err(error) = self.sockets.insert(queue, socket, poller) {
                    let failure = ConnectFailure(error.to_string());
                    return self.report_connect_failure(connection, failure, now);
                }
            }
            ConnectionId::Stream(_) => self.stream_socket = Some(socket),
        }
        match &mut self.phase {
            AssociationPhase::Unmanaged(association) => {
                association.connected(connection, is_local, now);
            }
            AssociationPhase::Managed(managed) => {
                managed.manager.connected(connection, is_local, now);
            }
        }
    }

    fn report_connect_failure(
        &mut self,
        connection: ConnectionId,
        failure: ConnectFailure,
        now: u64,
    ) {
        match &mut self.phase {
            AssociationPhase::Unmanaged(association) => {
                association.connect_failed(connection, failure, now);
            }
            AssociationPhase::Managed(managed) => {
                managed.manager.connect_failed(connection, failure, now);
            }
        }
    }

    /// The association, or the reason why there is none.
    pub(super) fn association(&mut self) -> Result<&mut Association<Page>, CallError> {
        match &mut self.phase {
            AssociationPhase::Unmanaged(association) => match association.state() {
                AssociationState::Lost(error) => Err(error.clone().into()),
                _ => Ok(association),
            },
            AssociationPhase::Managed(managed) => {
                let why = managed.manager.absence().map(|absence| absence.why.clone());
                match (managed.manager.association(), why) {
                    (Some(association), _) => Ok(association),
                    (None, Some(why)) => Err(CallError::Unreachable(why)),
                    (None, None) => Err(CallError::Closed),
                }
            }
        }
    }

    /// Moves the association into a new manager. Does nothing if it has one.
    pub(super) fn begin_managing(&mut self, config: ManagerConfig, server: VolumeServer) {
        let loss_timeout = Duration::from_nanos(config.loss_ns);
        let AssociationPhase::Unmanaged(association) = &mut self.phase else { return };
        // The box must not be left empty, so a new association takes the place until `phase` is
        // assigned below. The new association sends nothing.
        let placeholder = Association::new(association.config().clone());
        let association = core::mem::replace(&mut **association, placeholder);
        let manager = AssociationManager::new(association, config);
        let stream_handles = BTreeMap::new();
        let managed = ManagedAssociation { manager, server, loss_timeout, stream_handles };
        self.phase = AssociationPhase::Managed(Box::new(managed));
    }
}

impl ManagedAssociation {
    /// Reports to the manager when the target last sent bytes to a stream.
    fn report_received(&mut self) {
        let server = self.server.index;
        let received =
            self.stream_handles.values().map(|handle| handle.last_received(server)).max();
        self.manager.note_received(received.unwrap_or_default());
    }

    /// Reports an event of the manager to the streams and to the log of the program.
    /// `stream_socket` is the connection that was made for a stream, if there is one.
    fn handle_event(
        &mut self,
        target: &TargetAddr,
        event: ManagerEvent,
        stream_socket: &mut Option<Socket>,
    ) {
        let VolumeServer { volume, index } = &self.server;
        let server = *index;
        match event {
            ManagerEvent::Lost { why, since } => {
                self.post_to_streams(|| StreamMessage::AssociationEnded { server, since });
                if self.loss_timeout.is_zero() {
                    tracing::warn!(
                        %volume, %target, error = %why,
                        "lost the target; the loss timeout is 0, so it is not tried again"
                    );
                } else {
                    tracing::warn!(
                        %volume, %target, error = %why,
                        loss_timeout = %Rounded(self.loss_timeout),
                        "lost the target; trying to reach it again"
                    );
                }
            }
            ManagerEvent::Ended => {
                tracing::debug!(%volume, %target, "the target has ended the connection of a closed volume");
                let cause = Cause::Disconnected;
                self.post_to_streams(|| StreamMessage::GiveUp { server, cause });
            }
            // Of the same level as the line about the loss.
            ManagerEvent::Back { unreachable_ns, attempts } => tracing::warn!(
                %volume, %target, after = %Rounded(Duration::from_nanos(unreachable_ns)), attempts,
                "the target is back"
            ),
            ManagerEvent::GivenUp { unreachable_ns } => tracing::error!(
                %volume, %target, unreachable = %Rounded(Duration::from_nanos(unreachable_ns)),
                "the target is given up: the streams fail; when it is back they can be reopened"
            ),
            ManagerEvent::Refused { why, cause } => {
                if !self.loss_timeout.is_zero() {
                    tracing::error!(
                        %volume, %target, %why, "the target refuses this owner"
                    );
                }
                self.post_to_streams(|| StreamMessage::GiveUp { server, cause });
            }
            ManagerEvent::StreamConnection { stream, queue } => {
                let handle = self.stream_handles.get(&stream);
                if let (Some(socket), Some(handle)) = (stream_socket.take(), handle) {
                    let queue = Box::new(queue);
                    // Only streams with one queue to each server make new connections.
                    handle.post(StreamMessage::Connected { link: server, socket, queue });
                }
            }
        }
    }

    /// Posts the same message to each stream.
    fn post_to_streams(&self, message: impl Fn() -> StreamMessage) {
        for handle in self.stream_handles.values() {
            handle.post(message());
        }
    }
}

//! An initiator's target on the simulated network: the connections of its [`Association`], and of
//! the [`AssociationManager`] that the association becomes when the volume is open.

use std::convert::Infallible;

use riopipe_nvme::command::{Sqe, Status};
use riopipe_order::attribute::StreamId;
use riopipe_order::engine::Cause;
use riopipe_session::initiator::association::{
    Association, AssociationConfig, AssociationState, ConnectionEnd, ControlQueue,
};
use riopipe_session::initiator::endpoint::{ConnectionId, Endpoint};
use riopipe_session::initiator::manager::{AssociationManager, ManagerConfig, ManagerEvent};
use riopipe_session::initiator::queue_pair::{Data, IoQueue};
use riopipe_session::initiator::reconnect::ConnectRequest;
use riopipe_session::initiator::volume::Associations;

use super::wire::Wire;
use crate::core::{Core, Ev, MS};
use crate::network::{ClientEnd, Role};
use crate::payload::Payload;
use riopipe_platform::crc32c;

/// The interval of keep-alives to a target, ns.
const REPORT_NS: u64 = 10 * MS;
/// The time after which a target that owes an answer is given up, ns.
pub(super) const ANSWER_NS: u64 = 80 * MS;
/// The number of I/O queues that an initiator asks for.
const IO_QUEUES: u16 = 32;

/// An event of a target.
pub(super) enum TargetEvent {
    /// The association is lost; the loss counts from `since`, ns.
    Lost { since: u64 },
    /// The volume is claimed again, over a new association.
    Resumed,
    /// This owner has lost the target for good.
    Refused(String, Cause),
    /// A stream's connection, and the queue on it.
    Connection(StreamId, Wire, Box<IoQueue>),
}

/// The properties of an initiator without a digest or a keep-alive.
pub(super) fn association(hostnqn: String, hostid: [u8; 16], subnqn: String) -> AssociationConfig {
    AssociationConfig {
        host_nqn: hostnqn,
        host_id: hostid,
        secrets: None,
        subnqn: Some(subnqn),
        keep_alive_ms: 0,
        report_ns: Some(REPORT_NS),
        header_digest: false,
        data_digest: Some(false),
        crc: crc32c,
        data_max: 1 << 20,
        io_queues: IO_QUEUES,
        answer_ns: ANSWER_NS,
    }
}

/// The connections to a target that belong to no stream yet.
#[derive(Debug)]
struct Wires {
    index: u16,
    /// The connections by [`ControlQueue`]; discovery is not used.
    control: [Option<Wire>; 3],
    /// The connection that was made for a stream last.
    made: Option<Wire>,
}

impl Wires {
    /// Receives bytes of one of the connections.
    fn received(
        &mut self,
        conn: usize,
        bytes: &[u8],
        endpoint: &mut impl Endpoint<Piece = Payload>,
        core: &Core,
    ) {
        let Some(queue) = self.queue_of(conn) else { return };
        if let Some(wire) = &mut self.control[queue as usize] {
            let fed: Result<(), Infallible> =
                wire.feed(bytes, |bytes| Ok(endpoint.received(queue, bytes, core.now)));
            let Ok(()) = fed;
        }
    }

    /// Handles the end of one of the connections.
    fn closed(&mut self, conn: usize, endpoint: &mut impl Endpoint<Piece = Payload>, core: &Core) {
        let Some(queue) = self.queue_of(conn) else { return };
        self.control[queue as usize] = None;
        endpoint.closed(queue, ConnectionEnd::Closed, core.now);
    }

    fn queue_of(&self, conn: usize) -> Option<ControlQueue> {
        let has_number = |wire: &Option<Wire>| wire.as_ref().is_some_and(|wire| wire.conn == conn);
        let at = self.control.iter().position(has_number)?;
        ControlQueue::ALL.into_iter().find(|queue| *queue as usize == at)
    }

    /// Sends the pending bytes, closes ended connections, and makes the requested ones.
    fn carry(
        &mut self,
        endpoint: &mut impl Endpoint<Piece = Payload>,
        end: ClientEnd,
        core: &mut Core,
    ) {
        loop {
            for queue in ControlQueue::ALL {
                let wire = &mut self.control[queue as usize];
                if let Some(there) = wire {
                    there.send(endpoint.outbox(queue), core);
                    if !endpoint.is_open(queue) {
                        there.close(core);
                        *wire = None;
                    }
                }
            }
            let Some(wanted) = endpoint.wants_connection() else { return };
            let role = match wanted {
                ConnectionId::Control(ControlQueue::Drives) => Role::Undo(self.index),
                ConnectionId::Control(_) => Role::Admin(self.index),
                ConnectionId::Stream(stream) => {
                    Role::Stream { stream: stream.0, server: self.index }
                }
            };
            let conn = core.connect(ClientEnd { role, ..end }, usize::from(self.index));
            let wire = match wanted {
                ConnectionId::Control(queue) => &mut self.control[queue as usize],
                ConnectionId::Stream(_) => &mut self.made,
            };
            *wire = Some(Wire::new(conn));
            endpoint.connected(wanted, true, core.now);
        }
    }
}

#[derive(Debug)]
enum Attachment {
    /// There was no exchange with the target yet.
    None,
    /// The volume is not open yet.
    Single(Box<Association<Payload>>),
    /// The volume is open.
    Managed(Box<AssociationManager<Payload>>),
}

/// A target, as used by an initiator.
#[derive(Debug)]
pub(super) struct Server {
    attachment: Attachment,
    wires: Wires,
    /// The time at which it is woken next, ns.
    wakes_at: u64,
}

impl Server {
    /// A target without any connection yet.
    #[must_use]
    pub(super) fn new(index: u16) -> Self {
        let wires = Wires { index, control: [None, None, None], made: None };
        Self { attachment: Attachment::None, wires, wakes_at: 0 }
    }

    /// Sets up an association.
    pub(super) fn attach(&mut self, config: AssociationConfig, end: ClientEnd, core: &mut Core) {
        self.attachment = Attachment::Single(Box::new(Association::new(config)));
        self.carry(end, core);
    }

    /// Passes the association to a manager, which keeps it alive while the volume is open.
    pub(super) fn manage(&mut self, config: ManagerConfig, end: ClientEnd, core: &mut Core) {
        if let Attachment::Single(association) =
            core::mem::replace(&mut self.attachment, Attachment::None)
        {
            let manager = AssociationManager::new(*association, config);
            self.attachment = Attachment::Managed(Box::new(manager));
        }
        self.carry(end, core);
    }

    /// The manager of the open volume's association.
    pub(super) fn manager(&mut self) -> Option<&mut AssociationManager<Payload>> {
        match &mut self.attachment {
            Attachment::Managed(manager) => Some(manager),
            Attachment::None | Attachment::Single(_) => None,
        }
    }

    /// Whether its association exists.
    #[must_use]
    pub(super) fn is_up(&self) -> bool {
        match &self.attachment {
            Attachment::None => false,
            Attachment::Single(association) => association.is_attached(),
            Attachment::Managed(manager) => manager.is_standing(),
        }
    }

    /// Whether the open volume is claimed there.
    #[must_use]
    pub(super) fn is_claimed(&self) -> bool {
        matches!(self.attachment, Attachment::Managed(_)) && self.is_up()
    }

    /// The controller of the association, if there is one.
    pub(super) fn cntlid(&mut self) -> Option<u16> {
        Some(self.manager()?.controller()?.cntlid)
    }

    /// The admin connection of the association, if there is one.
    #[must_use]
    pub(super) fn admin_conn(&self) -> Option<usize> {
        let wire = self.wires.control[ControlQueue::Admin as usize].as_ref()?;
        self.is_up().then_some(wire.conn)
    }

    fn association(&mut self) -> Option<&mut Association<Payload>> {
        match &mut self.attachment {
            Attachment::None => None,
            Attachment::Single(association) => Some(association),
            Attachment::Managed(manager) => manager.association(),
        }
    }

    /// A new I/O queue of the association.
    #[must_use]
    pub(super) fn io_queue(&mut self, qid: u16, depth: usize) -> Option<IoQueue> {
        self.association()?.io_queue(qid, depth)
    }

    /// Passes on the connect request of a stream.
    pub(super) fn request(&mut self, request: ConnectRequest, end: ClientEnd, core: &mut Core) {
        if let Attachment::Managed(manager) = &mut self.attachment {
            manager.request(request, core.now);
            self.carry(end, core);
        }
    }

    /// Handles a deadline.
    pub(super) fn wake(&mut self, end: ClientEnd, core: &mut Core) {
        if core.now < self.wakes_at {
            // The deadline is not due any more.
            return;
        }
        self.wakes_at = 0;
        match &mut self.attachment {
            Attachment::None => {}
            Attachment::Single(association) => association.timeout(core.now),
            Attachment::Managed(manager) => manager.timeout(core.now),
        }
        self.carry(end, core);
    }

    /// Receives bytes of one of its connections.
    pub(super) fn received(&mut self, conn: usize, bytes: &[u8], end: ClientEnd, core: &mut Core) {
        match &mut self.attachment {
            Attachment::None => {}
            Attachment::Single(association) => {
                self.wires.received(conn, bytes, &mut **association, core);
            }
            Attachment::Managed(manager) => self.wires.received(conn, bytes, &mut **manager, core),
        }
        self.carry(end, core);
    }

    /// Handles the end of one of its connections.
    pub(super) fn closed(&mut self, conn: usize, end: ClientEnd, core: &mut Core) {
        match &mut self.attachment {
            Attachment::None => {}
            Attachment::Single(association) => self.wires.closed(conn, &mut **association, core),
            Attachment::Managed(manager) => self.wires.closed(conn, &mut **manager, core),
        }
        self.carry(end, core);
    }

    /// Carries out the pending work, and plans a wake for the next deadline.
    pub(super) fn carry(&mut self, end: ClientEnd, core: &mut Core) {
        let deadline = match &mut self.attachment {
            Attachment::None => return,
            Attachment::Single(association) => {
                self.wires.carry(&mut **association, end, core);
                association.deadline()
            }
            Attachment::Managed(manager) => {
                self.wires.carry(&mut **manager, end, core);
                manager.deadline()
            }
        };
        if let Some(at) = deadline.map(|at| at.max(core.now))
            && (self.wakes_at == 0 || at < self.wakes_at)
        {
            self.wakes_at = at;
            let server = self.wires.index;
            core.at(
                at,
                Ev::WakeClient { client: end.client, incarnation: end.incarnation, server },
            );
        }
    }

    /// The next event, once. The caller asks after each of the calls above, until there is none.
    pub(super) fn event(&mut self, core: &mut Core) -> Option<TargetEvent> {
        let index = self.wires.index;
        match &mut self.attachment {
            Attachment::None => None,
            Attachment::Single(association) => {
                let AssociationState::Lost(error) = association.state() else { return None };
                let why = error.to_string();
                core.trace(|| format!("initiator: lost target {index}: {why}"));
                self.attachment = Attachment::None;
                Some(TargetEvent::Lost { since: core.now })
            }
            Attachment::Managed(manager) => Some(match manager.next_event()? {
                ManagerEvent::Lost { why, since } => {
                    core.trace(|| format!("initiator: lost target {index}: {why}"));
                    TargetEvent::Lost { since }
                }
                ManagerEvent::Ended => TargetEvent::Refused(
                    "the volume was released there".into(),
                    Cause::Disconnected,
                ),
                ManagerEvent::Back { attempts, .. } => {
                    core.trace(|| {
                        format!("initiator: target {index} is claimed again ({attempts})")
                    });
                    TargetEvent::Resumed
                }
                ManagerEvent::GivenUp { .. } => {
                    core.trace(|| {
                        format!("initiator: target {index} has been unreachable for too long")
                    });
                    return self.event(core);
                }
                ManagerEvent::Refused { why, cause } => {
                    TargetEvent::Refused(why.to_string(), cause)
                }
                ManagerEvent::StreamConnection { stream, queue } => {
                    TargetEvent::Connection(stream, self.wires.made.take()?, Box::new(queue))
                }
            }),
        }
    }

    /// Ends this initiator.
    pub(super) fn leave(&mut self, end: ClientEnd, core: &mut Core) {
        match &mut self.attachment {
            Attachment::None => {}
            Attachment::Single(association) => association.close(),
            Attachment::Managed(manager) => manager.stop(core.now),
        }
        self.carry(end, core);
    }

    /// Sends a command with a few bytes on the admin queue, if the association exists.
    pub(super) fn send_command(&mut self, sqe: Sqe, bytes: &[u8], end: ClientEnd, core: &mut Core) {
        if let Some(association) = self.association() {
            let data = if bytes.is_empty() { Data::None } else { Data::Bytes(bytes) };
            // Without an association the command is dropped.
            let _ = association.ask(ControlQueue::Admin, 0, sqe, data, core.now);
        }
        self.carry(end, core);
    }

    /// The answer to a command that was sent with `send_command`.
    pub(super) fn answer(&mut self) -> Option<Status> {
        self.association()?.next_answer().map(|answer| answer.cqe.status())
    }
}

/// The associations with the targets of a volume that is being opened.
pub(super) struct Targets<'a>(pub(super) &'a mut [Server]);

impl Associations for Targets<'_> {
    type Piece = Payload;

    fn with<R>(&mut self, target: usize, f: impl FnOnce(&mut Association<Payload>) -> R) -> R {
        match &mut self.0[target].attachment {
            Attachment::Single(association) => f(association),
            Attachment::None | Attachment::Managed(_) => {
                unreachable!("each target was attached to before")
            }
        }
    }
}

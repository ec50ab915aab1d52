//! An initiator's target: the connections of its [`Association`], and of the [`AssociationManager`]
//! that it becomes when the volume is open, on the simulated network.

use std::convert::Infallible;

use riopipe_nvme::command::{Sqe, Status};
use riopipe_order::attribute::StreamId;
use riopipe_order::engine::Cause;
use riopipe_session::initiator::association::{
    AskError, Association, AssociationConfig, AssociationState, ConnectionEnd, ControlQueue,
    DrivesState,
};
use riopipe_session::initiator::attach::Controller;
use riopipe_session::initiator::manager::{
    AssociationManager, ConnectionId, ManagerConfig, ManagerEvent,
};
use riopipe_session::initiator::opening::{Call, Ticket};
use riopipe_session::initiator::queue_pair::{Data, QueuePair};
use riopipe_session::initiator::reconnect::ConnectRequest;
use riopipe_session::label::LABEL_LEN;
use riopipe_session::label_work::LabelIo;

use super::wire::Wire;
use crate::core::{Core, Ev, MS};
use crate::crc::crc32c;
use crate::network::{ClientEnd, Role};
use crate::payload::Payload;

/// A target is asked for a sign of life this often, ns.
const TELL_NS: u64 = 10 * MS;
/// A target that owes an answer for so long is given up, ns.
const ANSWER_NS: u64 = 80 * MS;
/// I/O queues asked for.
const IO_QUEUES: u16 = 32;

/// The name of a label's command; no ticket is the same.
const LABEL: u64 = u64::MAX - 1;
/// The name of the command that gives the volume back.
const RELEASE: u64 = u64::MAX - 2;

/// What a command was sent for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Purpose {
    /// The opening of the volume.
    Opening(Ticket),
    /// A drive's label.
    Label,
    /// Giving the volume back.
    Release,
}

/// What has happened.
pub(super) enum News {
    /// A command has ended: with the data that came, or so.
    Answer(Purpose, Result<Vec<u8>, Status>),
    /// What was asked will not be answered: the association is gone, or the queue to the drives.
    Lost,
    /// The volume is claimed again, over a new association.
    Back,
    /// The target is lost to this owner.
    Refused(String, Cause),
    /// A stream's connection, and the queue on it.
    Connection(StreamId, Wire, Box<QueuePair<Payload>>),
}

/// How an initiator without a digest or a keep alive presents itself.
pub(super) fn association(hostnqn: String, hostid: [u8; 16], subnqn: String) -> AssociationConfig {
    AssociationConfig {
        host_nqn: hostnqn,
        host_id: hostid,
        subnqn: Some(subnqn),
        keep_alive_ms: 0,
        tell_ns: Some(TELL_NS),
        header_digest: false,
        data_digest: Some(false),
        crc: crc32c,
        data_max: 1 << 20,
        io_queues: IO_QUEUES,
        answer_ns: ANSWER_NS,
    }
}

#[derive(Debug)]
enum Link {
    /// No association; the next attempt is made then.
    Down(u64),
    /// As long as the volume is not open.
    Single(Box<Association<Payload>>),
    /// The volume is open.
    Managed(Box<AssociationManager<Payload>>),
}

/// A target, as an initiator sees it.
#[derive(Debug)]
pub(super) struct Server {
    index: u16,
    config: AssociationConfig,
    link: Link,
    /// By [`ControlQueue`]; discovery is not used.
    wires: [Option<Wire>; 3],
    /// The connection that was made for a stream last.
    made: Option<Wire>,
    /// When it is woken next.
    wakes_at: u64,
}

impl Server {
    /// A target without any connection yet.
    #[must_use]
    pub(super) fn new(index: u16, config: AssociationConfig) -> Self {
        let wires = [None, None, None];
        Self { index, config, link: Link::Down(0), wires, made: None, wakes_at: 0 }
    }

    /// The volume is open: from now on the association is kept.
    pub(super) fn manage(&mut self, config: impl FnOnce(&Controller) -> ManagerConfig) {
        let Link::Single(association) = &self.link else { return };
        let Some(config) = association.controller().map(config) else { return };
        let was = core::mem::replace(&mut self.link, Link::Down(0));
        if let Link::Single(association) = was {
            let manager = AssociationManager::new(*association, config);
            self.link = Link::Managed(Box::new(manager));
        }
    }

    /// Whether its association is there.
    #[must_use]
    pub(super) fn is_up(&self) -> bool {
        match &self.link {
            Link::Down(_) => false,
            Link::Single(association) => association.is_attached(),
            Link::Managed(manager) => manager.is_standing(),
        }
    }

    /// Whether the open volume is claimed there.
    #[must_use]
    pub(super) fn is_claimed(&self) -> bool {
        matches!(self.link, Link::Managed(_)) && self.is_up()
    }

    /// The admin connection of the association that is there.
    #[must_use]
    pub(super) fn admin_conn(&self) -> Option<usize> {
        let wire = self.wires[ControlQueue::Admin as usize].as_ref()?;
        self.is_up().then_some(wire.conn)
    }

    /// The controller, as last attached.
    #[must_use]
    pub(super) fn controller(&self) -> Option<&Controller> {
        match &self.link {
            Link::Down(_) => None,
            Link::Single(association) => association.controller(),
            Link::Managed(manager) => manager.controller(),
        }
    }

    fn association(&mut self) -> Option<&mut Association<Payload>> {
        match &mut self.link {
            Link::Down(_) => None,
            Link::Single(association) => Some(association),
            Link::Managed(manager) => manager.association(),
        }
    }

    /// A new I/O queue of the association.
    #[must_use]
    pub(super) fn io_queue(&mut self, qid: u16, depth: usize) -> Option<QueuePair<Payload>> {
        self.association()?.io_queue(qid, depth)
    }

    /// A stream wants a connection.
    pub(super) fn request(&mut self, request: ConnectRequest, end: ClientEnd, core: &mut Core) {
        if let Link::Managed(manager) = &mut self.link {
            manager.request(request, core.now);
            self.carry(end, core);
        }
    }

    /// Time goes by.
    pub(super) fn wake(&mut self, end: ClientEnd, core: &mut Core) {
        if core.now < self.wakes_at {
            // It is woken for something that is not due any more.
            return;
        }
        self.wakes_at = 0;
        match &mut self.link {
            Link::Down(at) if *at <= core.now => {
                self.link = Link::Single(Box::new(Association::new(self.config.clone())));
            }
            Link::Down(_) => {}
            Link::Single(association) => association.timeout(core.now),
            Link::Managed(manager) => manager.timeout(core.now),
        }
        self.carry(end, core);
    }

    /// Bytes have come over one of its connections.
    pub(super) fn received(&mut self, conn: usize, bytes: &[u8], end: ClientEnd, core: &mut Core) {
        let Some(queue) = self.queue_of(conn) else { return };
        let Self { link, wires, .. } = self;
        if let Some(wire) = &mut wires[queue as usize] {
            let fed: Result<(), Infallible> = wire.feed(bytes, |bytes| {
                Ok(match link {
                    Link::Down(_) => bytes.len(),
                    Link::Single(association) => association.received(queue, bytes, core.now),
                    Link::Managed(manager) => manager.received(queue, bytes, core.now),
                })
            });
            let Ok(()) = fed;
        }
        self.carry(end, core);
    }

    /// One of its connections has ended.
    pub(super) fn closed(&mut self, conn: usize, end: ClientEnd, core: &mut Core) {
        let Some(queue) = self.queue_of(conn) else { return };
        self.wires[queue as usize] = None;
        match &mut self.link {
            Link::Down(_) => {}
            Link::Single(association) => {
                association.closed(queue, ConnectionEnd::Closed, core.now);
            }
            Link::Managed(manager) => manager.closed(queue, ConnectionEnd::Closed, core.now),
        }
        self.carry(end, core);
    }

    fn queue_of(&self, conn: usize) -> Option<ControlQueue> {
        let is = |wire: &Option<Wire>| wire.as_ref().is_some_and(|wire| wire.conn == conn);
        let at = self.wires.iter().position(is)?;
        ControlQueue::ALL.into_iter().find(|queue| *queue as usize == at)
    }

    /// Sends what is to be sent, closes what is over, and makes the connections that are wanted.
    fn carry(&mut self, end: ClientEnd, core: &mut Core) {
        loop {
            for queue in ControlQueue::ALL {
                let (open, out) = match &mut self.link {
                    Link::Down(_) => break,
                    Link::Single(association) => {
                        (association.is_open(queue), association.outbox(queue))
                    }
                    Link::Managed(manager) => (manager.is_open(queue), manager.outbox(queue)),
                };
                let wire = &mut self.wires[queue as usize];
                if let Some(there) = wire {
                    there.send(out, core);
                    if !open {
                        there.close(core);
                        *wire = None;
                    }
                }
            }
            let wanted = match &self.link {
                Link::Down(_) => None,
                Link::Single(association) => {
                    association.wants_connection().map(ConnectionId::Control)
                }
                Link::Managed(manager) => manager.wants_connection(),
            };
            let Some(wanted) = wanted else { break };
            let role = match wanted {
                ConnectionId::Control(ControlQueue::Drives) => Role::Undo(self.index),
                ConnectionId::Control(_) => Role::Admin(self.index),
                ConnectionId::Stream(stream) => {
                    Role::Stream { stream: stream.0, server: self.index }
                }
            };
            let conn = core.connect(ClientEnd { role, ..end }, usize::from(self.index));
            let wire = match wanted {
                ConnectionId::Control(queue) => &mut self.wires[queue as usize],
                ConnectionId::Stream(_) => &mut self.made,
            };
            *wire = Some(Wire::new(conn));
            match (&mut self.link, wanted) {
                (Link::Single(association), ConnectionId::Control(queue)) => {
                    association.connected(queue, true, core.now);
                }
                (Link::Managed(manager), _) => manager.connected(wanted, true, core.now),
                _ => {}
            }
        }
        self.wake_in_time(end, core);
    }

    /// Is woken when its next deadline is due.
    fn wake_in_time(&mut self, end: ClientEnd, core: &mut Core) {
        let deadline = match &self.link {
            Link::Down(at) => Some(*at),
            Link::Single(association) => association.deadline(),
            Link::Managed(manager) => manager.deadline(),
        };
        if let Some(at) = deadline.map(|at| at.max(core.now))
            && (self.wakes_at == 0 || at < self.wakes_at)
        {
            self.wakes_at = at;
            let ev = Ev::WakeClient { client: end.client, life: end.life, server: self.index };
            core.at(at, ev);
        }
    }

    /// What has happened, once: to be asked for after each of the calls above, until there is none.
    pub(super) fn news(&mut self, end: ClientEnd, core: &mut Core) -> Option<News> {
        let index = self.index;
        if let Link::Managed(manager) = &mut self.link
            && let Some(event) = manager.next_event()
        {
            return match event {
                ManagerEvent::Lost { why } => {
                    core.trace(|| format!("initiator: lost target {index}: {why}"));
                    Some(News::Lost)
                }
                ManagerEvent::Back { attempts, .. } => {
                    core.trace(|| format!("initiator: target {index} is back ({attempts})"));
                    Some(News::Back)
                }
                ManagerEvent::GivenUp { .. } => {
                    core.trace(|| format!("initiator: target {index} has been away for too long"));
                    self.news(end, core)
                }
                ManagerEvent::Refused { why, cause } => Some(News::Refused(why, cause)),
                ManagerEvent::StreamConnection { stream, queue } => {
                    let wire = self.made.take()?;
                    Some(News::Connection(stream, wire, Box::new(queue)))
                }
            };
        }
        if let Link::Single(association) = &self.link
            && let AssociationState::Lost(error) = association.state()
        {
            let why = error.to_string();
            core.trace(|| format!("initiator: lost target {index}: {why}"));
            self.link = Link::Down(core.now + core.retry().max(MS));
            self.wake_in_time(end, core);
            return Some(News::Lost);
        }
        let association = self.association()?;
        if let Some(answer) = association.answer() {
            let purpose = match answer.name {
                LABEL => Purpose::Label,
                RELEASE => Purpose::Release,
                ticket => Purpose::Opening(Ticket::from_bits(ticket)),
            };
            let status = answer.cqe.status();
            let answer = if status.is_ok() { Ok(answer.page) } else { Err(status) };
            return Some(News::Answer(purpose, answer));
        }
        if let DrivesState::Failed(error) = association.drives() {
            let why = error.to_string();
            association.close_drives();
            core.trace(|| format!("initiator: lost the drives of target {index}: {why}"));
            return Some(News::Lost);
        }
        None
    }

    /// This initiator ends.
    pub(super) fn leave(&mut self, end: ClientEnd, core: &mut Core) {
        match &mut self.link {
            Link::Down(_) => {}
            Link::Single(association) => association.hang_up(),
            Link::Managed(manager) => manager.stop(core.now),
        }
        self.carry(end, core);
    }

    /// Whether so many admin commands wait for an answer that there is no room for many more.
    #[must_use]
    pub(super) fn owes_much(&mut self) -> bool {
        // Half of what an admin queue has room for.
        self.association().is_some_and(|it| it.owed(ControlQueue::Admin) >= 16)
    }

    fn ask(
        &mut self,
        queue: ControlQueue,
        name: u64,
        sqe: Sqe,
        data: Data<'_, Payload>,
        end: ClientEnd,
        core: &mut Core,
    ) {
        let Some(association) = self.association() else { return };
        match association.ask(queue, name, sqe, data, core.now) {
            // Its answer will not come, which is known already.
            Ok(()) | Err(AskError::NotReady) => {}
            // The queues have more entries than anybody here has calls.
            Err(error) => debug_assert!(false, "{error}"),
        }
        self.carry(end, core);
    }

    /// Gives the volume back.
    pub(super) fn release(&mut self, release: Sqe, end: ClientEnd, core: &mut Core) {
        self.ask(ControlQueue::Admin, RELEASE, release, Data::None, end, core);
    }

    /// Sends a command of the opening.
    pub(super) fn opening_call(
        &mut self,
        ticket: Ticket,
        call: &Call,
        end: ClientEnd,
        core: &mut Core,
    ) {
        let name = ticket.to_bits();
        match call {
            Call::Admin { sqe, send, receive } => {
                let data = match (send.is_empty(), receive) {
                    (false, _) => Data::Bytes(send),
                    (true, 0) => Data::None,
                    (true, len) => Data::Read(*len as u32),
                };
                self.ask(ControlQueue::Admin, name, *sqe, data, end, core);
            }
            Call::Io { sqe } => {
                let idle = self.association().is_some_and(|a| a.owed(ControlQueue::Drives) == 0);
                if idle {
                    core.undos = (core.undos.0 + 1, core.events);
                }
                self.ask(ControlQueue::Drives, name, *sqe, Data::None, end, core);
            }
        }
    }

    /// Does something with a drive's labels, over the queue to the drives, which is ready.
    pub(super) fn label_io(&mut self, io: &LabelIo, nsid: u32, end: ClientEnd, core: &mut Core) {
        let payload;
        let (sqe, data) = match io {
            LabelIo::Read { .. } => (Sqe::read(nsid, 0, 2), Data::Read(2 * LABEL_LEN as u32)),
            LabelIo::Flush { .. } => (Sqe::flush(nsid), Data::None),
            LabelIo::Write { lba, block, .. } => {
                payload = [Payload::from(block.clone())];
                (Sqe::write(nsid, *lba, 1), Data::Write(&payload))
            }
        };
        self.ask(ControlQueue::Drives, LABEL, sqe, data, end, core);
    }

    /// Whether a command to the drives can be sent now; makes it so for later.
    pub(super) fn is_ready_for_io(&mut self, end: ClientEnd, core: &mut Core) -> bool {
        let Some(association) = self.association() else { return false };
        if association.drives() == DrivesState::Ready {
            return true;
        }
        association.open_drives(core.now);
        self.carry(end, core);
        false
    }

    /// The queue to the drives is not needed any more.
    pub(super) fn close_drives(&mut self, end: ClientEnd, core: &mut Core) {
        if let Some(association) = self.association() {
            association.close_drives();
            self.carry(end, core);
        }
    }
}

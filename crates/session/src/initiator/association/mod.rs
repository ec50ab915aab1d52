//! The association of one initiator with one target: discovery, bring-up, and the queues beside the
//! streams.
//!
//! ```text
//! (Discovering →) Attaching → Attached → Lost
//! ```
//!
//! An [`Association`] is one attempt: once lost it stays lost, and the next attempt is a new one,
//! so no answer of an earlier attempt is ever taken for its own (T23). It decides which connections
//! it needs, which commands it sends on them and in which order, when it sends Keep Alive, and when
//! an answer has been missing for too long. The program around it has the sockets and the clock,
//! and does this, in order:
//!
//! 1. [`timeout`](Endpoint::timeout) when [`deadline`](Endpoint::deadline) is due;
//! 2. for each queue that has a connection: bytes go from [`outbox`](Endpoint::outbox) to the
//!    socket and from the socket to [`received`](Endpoint::received); the end of the connection is
//!    reported with [`closed`](Endpoint::closed). [`ControlQueue::ALL`] is the order: the admin
//!    queue comes first, since its end explains the end of the others;
//! 3. a queue that [is not open](Endpoint::is_open) any more: the contents of its outbox are sent
//!    as far as the connection takes them at once (it may be a last PDU), and the connection is
//!    closed;
//! 4. [`wants_connection`](Endpoint::wants_connection): it is made, which
//!    [`connected`](Endpoint::connected) or [`connect_failed`](Endpoint::connect_failed)
//!    reports.
//!
//! The caller sends questions with [`ask`](Association::ask) under a name of its choice, and
//! [`answer`](Association::answer) returns that name. All times are nanoseconds of one monotonic
//! clock.

mod commands;
mod error;
mod queues;

use alloc::boxed::Box;
use alloc::collections::VecDeque;
use alloc::string::String;
use alloc::vec::Vec;

use riopipe_nvme::command::{Cqe, Sqe};
use riopipe_nvme::digest::Crc32c;
use riopipe_nvme::discovery::Entry;
use riopipe_nvme::fabrics::DISCOVERY_NQN;
use riopipe_order::probe::{self, Plant};

use self::commands::Commands;
pub use self::error::{AskError, AssociationError};
use self::queues::Drives;
pub use self::queues::{DRIVES_COMMANDS, DRIVES_QUEUE};
use super::attach::{Attach, Controller};
use super::discover::Discover;
pub use super::endpoint::{ConnectFailure, ConnectionEnd, ControlQueue};
use super::endpoint::{ConnectionId, Endpoint};
use super::keep_alive::KeepAlive;
use super::queue_pair::{Data, IoQueue, QpConfig, QueuePair};
use crate::outbox::Outbox;

/// The configuration of an association.
#[derive(Clone, Debug)]
pub struct AssociationConfig {
    /// The host's NQN.
    pub host_nqn: String,
    /// The host's identifier.
    pub host_id: [u8; 16],
    /// The subsystem; `None`: the only one that discovery at the same address lists.
    pub subnqn: Option<String>,
    /// The time after which the target gives up a host that sends nothing (KATO), milliseconds; 0:
    /// never.
    pub keep_alive_ms: u32,
    /// The interval of Keep Alive commands, ns; `None`: a third of the time after which the target
    /// gives up.
    pub report_ns: Option<u64>,
    /// CRC32C over every PDU's header.
    pub header_digest: bool,
    /// CRC32C over every PDU's data; `None`: unless the connection stays on this machine.
    pub data_digest: Option<bool>,
    /// The CRC32C implementation.
    pub crc: Crc32c,
    /// The most data that one read may request, in bytes: a bound on all buffered data.
    pub data_max: u32,
    /// The number of I/O queues to request, including the one to the drives.
    pub io_queues: u16,
    /// The limit for discovery, the bring-up, opening the queue to the drives, and an answer, ns.
    pub answer_ns: u64,
}

/// The state of an association.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum AssociationState<'a> {
    /// Discovery or the bring-up is running, or waits for its connection.
    Attaching,
    /// The association stands: [`Association::controller`] is known, and questions may be asked.
    Attached,
    /// The association has ended, or could not be set up. No open question will be answered.
    Lost(&'a AssociationError),
}

/// The state of the queue to the drives.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum DrivesState<'a> {
    /// It has not been requested, or it has been closed.
    Closed,
    /// It is being opened, or waits until the target has seen the end of its last connection.
    Opening,
    /// Questions may be asked.
    Ready,
    /// It could not be opened, or it has ended. No open question on it will be answered.
    /// [`Association::open_drives`] tries again.
    Failed(&'a AssociationError),
}

/// The answer to a question.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Answer {
    /// The queue on which it was asked.
    pub queue: ControlQueue,
    /// The caller's name for the question.
    pub name: u64,
    /// Its completion, whatever its status.
    pub cqe: Cqe,
    /// The data of a read, as long as requested; else empty.
    pub page: Vec<u8>,
}

#[derive(Debug)]
enum State<P> {
    /// Discovery needs its connection.
    Undiscovered,
    /// Discovery is running; its deadline, ns.
    Discovering(Box<Discover<P>>, u64),
    /// The admin queue needs its connection.
    Unattached,
    /// The bring-up is running; its deadline, ns.
    Attaching(Box<Attach<P>>, u64),
    Attached(Box<Commands<P>>, KeepAlive),
    Lost(AssociationError),
}

/// The association of one initiator with one target; see the [module](self). `P` is a piece of a
/// write's data.
#[derive(Debug)]
pub struct Association<P> {
    config: AssociationConfig,
    /// The common configuration of its queues, from the admin connection on.
    queues: Option<QpConfig>,
    state: State<P>,
    /// The outbox of each [`ControlQueue`].
    outboxes: [Outbox<P>; 3],
    subnqn: Option<String>,
    only_discovers: bool,
    discovered: Option<Vec<Entry>>,
    controller: Option<Controller>,
    drives: Drives<P>,
    answers: VecDeque<Answer>,
    /// The number of commands sent so far, on all queues.
    asked: u64,
    /// The limit for an answer on the admin queue, in multiples of
    /// [`AssociationConfig::answer_ns`].
    answer_factor: u64,
}

/// The factor of an [extended](Association::extend_answer_limit) limit for an answer. There is
/// still a limit, because a machine whose power was cut never answers.
pub const EXTENDED_FACTOR: u64 = 10;

impl<P: AsRef<[u8]> + Clone> Association<P> {
    /// A new association; nothing is connected yet.
    #[must_use]
    pub fn new(config: AssociationConfig) -> Self {
        let state = if config.subnqn.is_some() { State::Unattached } else { State::Undiscovered };
        Self {
            queues: None,
            state,
            outboxes: [Outbox::new(), Outbox::new(), Outbox::new()],
            subnqn: config.subnqn.clone(),
            only_discovers: false,
            discovered: None,
            controller: None,
            drives: Drives::Closed,
            answers: VecDeque::new(),
            asked: 0,
            answer_factor: 1,
            config,
        }
    }

    /// Only reads the discovery log, which [`discovered`](Self::discovered) returns. It attaches to
    /// no controller.
    #[must_use]
    pub fn discover(config: AssociationConfig) -> Self {
        let config = AssociationConfig { subnqn: None, ..config };
        Self { only_discovers: true, ..Self::new(config) }
    }

    /// From now on the limit for an answer on the admin queue is [`EXTENDED_FACTOR`] times as long.
    /// This is for a volume that cannot replay: losing the association fails its streams for good,
    /// and a target that hangs may recover. The callers then have limits of their own.
    pub fn extend_answer_limit(&mut self) {
        self.answer_factor = EXTENDED_FACTOR;
    }

    /// The configuration.
    #[must_use]
    pub const fn config(&self) -> &AssociationConfig {
        &self.config
    }

    /// The state of the association.
    #[must_use]
    pub const fn state(&self) -> AssociationState<'_> {
        match &self.state {
            State::Attached(..) => AssociationState::Attached,
            State::Lost(error) => AssociationState::Lost(error),
            _ => AssociationState::Attaching,
        }
    }

    /// Whether the association stands.
    #[must_use]
    pub const fn is_attached(&self) -> bool {
        matches!(self.state, State::Attached(..))
    }

    /// The controller, once attached; also after the association has been lost.
    #[must_use]
    pub const fn controller(&self) -> Option<&Controller> {
        self.controller.as_ref()
    }

    /// The NQN of the subsystem that it attaches to; that of discovery until the subsystem is
    /// known.
    #[must_use]
    pub fn subnqn(&self) -> &str {
        self.subnqn.as_deref().unwrap_or(DISCOVERY_NQN)
    }

    /// The subsystems that discovery has listed; `None` before that, and if a subsystem was named.
    #[must_use]
    pub fn discovered(&self) -> Option<&[Entry]> {
        self.discovered.as_deref()
    }

    /// The state of the queue to the drives.
    #[must_use]
    pub const fn drives(&self) -> DrivesState<'_> {
        self.drives.state()
    }

    /// The queue for which a connection must be made now.
    fn wanted(&self) -> Option<ControlQueue> {
        match &self.state {
            State::Undiscovered => Some(ControlQueue::Discovery),
            State::Unattached => Some(ControlQueue::Admin),
            State::Attached(..) if matches!(self.drives, Drives::Wanted { .. }) => {
                Some(ControlQueue::Drives)
            }
            _ => None,
        }
    }

    /// The queue that needs such a connection.
    fn queue_of(&self, connection: ConnectionId) -> Option<ControlQueue> {
        self.wanted().filter(|queue| connection == ConnectionId::Control(*queue))
    }

    /// The limit for an answer on the admin queue, ns.
    const fn admin_ns(&self) -> u64 {
        self.config.answer_ns.saturating_mul(self.answer_factor)
    }

    /// Opens the queue to the drives, unless it is open or being opened. It is always the same
    /// queue: the target accepts it again only when all commands that it had before have come back,
    /// so that no zeroes of an earlier attempt land late (T8). The association waits for that, for
    /// `answer_ns` at most.
    pub fn open_drives(&mut self, now: u64) {
        if self.is_attached() && matches!(self.drives, Drives::Closed | Drives::Failed(_)) {
            self.drives = Drives::wanted(now.saturating_add(self.config.answer_ns), self.asked);
        }
    }

    /// Closes the queue to the drives. No open question on it will be answered.
    pub fn close_drives(&mut self) {
        self.outboxes[ControlQueue::Drives as usize].clear();
        self.drives = Drives::Closed;
        self.answers.retain(|answer| answer.queue != ControlQueue::Drives);
    }

    /// Sends a command on a queue, under a name of the caller's choice. Many may be in flight at a
    /// time.
    ///
    /// # Errors
    /// [`AskError`]: no part of it was sent.
    pub fn ask(
        &mut self,
        queue: ControlQueue,
        name: u64,
        sqe: Sqe,
        data: Data<'_, P>,
        now: u64,
    ) -> Result<(), AskError> {
        let commands = match (queue, &mut self.state, &mut self.drives) {
            (ControlQueue::Admin, State::Attached(admin, _), _) => admin,
            (ControlQueue::Drives, State::Attached(..), Drives::Ready(drives)) => drives,
            _ => return Err(AskError::NotReady),
        };
        self.asked += 1;
        commands.ask(self.asked, name, sqe, data, now, &mut self.outboxes[queue as usize])
    }

    /// The next answer, in order of arrival.
    pub fn answer(&mut self) -> Option<Answer> {
        self.answers.pop_front()
    }

    /// The number of questions on a queue that have no answer yet.
    #[must_use]
    pub fn owed(&self, queue: ControlQueue) -> usize {
        match (queue, &self.state, &self.drives) {
            (ControlQueue::Admin, State::Attached(admin, _), _) => admin.owed(),
            (ControlQueue::Drives, _, Drives::Ready(drives)) => drives.owed(),
            _ => 0,
        }
    }

    /// A new I/O queue for a stream's connection, with space for `depth` commands, or for as many
    /// as the controller takes; `None` unless attached.
    #[must_use]
    pub fn io_queue(&self, qid: u16, depth: usize) -> Option<IoQueue> {
        let controller = self.controller.as_ref().filter(|_| self.is_attached())?;
        let entries = depth.saturating_add(1).min(usize::from(controller.sqsize_max.max(2)));
        let mut config = self.queues.as_ref()?.io_queue(controller.cntlid, qid, entries as u16);
        config.incarnation = controller.extension.map(|extension| extension.incarnation);
        Some(IoQueue { config, in_capsule_bytes: controller.in_capsule_bytes })
    }

    /// Ends the association: the contents of the outboxes may still be sent, then all its
    /// connections are closed, by which the target notices the end.
    pub fn hang_up(&mut self) {
        if !matches!(self.state, State::Lost(_)) {
            self.lose(AssociationError::HungUp);
        }
    }
}

impl<P: AsRef<[u8]> + Clone> Endpoint for Association<P> {
    type Piece = P;

    fn wants_connection(&self) -> Option<ConnectionId> {
        self.wanted().map(ConnectionId::Control)
    }

    fn connected(&mut self, connection: ConnectionId, is_local: bool, now: u64) {
        let Some(queue) = self.queue_of(connection) else { return };
        let out = &mut self.outboxes[queue as usize];
        out.clear();
        let by = now.saturating_add(self.config.answer_ns);
        match queue {
            ControlQueue::Discovery => {
                let config = self.config.queue(DISCOVERY_NQN.into(), is_local);
                let mut discover = Box::new(Discover::new(QpConfig { kato_ms: 0, ..config }));
                discover.start(out);
                self.state = State::Discovering(discover, by);
            }
            ControlQueue::Admin => {
                let config = self.config.queue(self.subnqn().into(), is_local);
                let mut attach = Box::new(Attach::new(config.clone(), self.config.io_queues));
                attach.start(&mut self.outboxes[queue as usize]);
                self.queues = Some(config);
                self.state = State::Attaching(attach, by);
            }
            ControlQueue::Drives => {
                let Some(of) = self.io_queue(self.drives.qid(), DRIVES_COMMANDS) else { return };
                let pair = QueuePair::open(of);
                self.drives.start(pair, by, &mut self.outboxes[queue as usize]);
            }
        }
    }

    fn connect_failed(&mut self, connection: ConnectionId, failure: ConnectFailure, _: u64) {
        match self.queue_of(connection) {
            Some(ControlQueue::Drives) => self.drives_failed(failure.into()),
            Some(_) => self.lose(failure.into()),
            None => {}
        }
    }

    fn is_open(&self, queue: ControlQueue) -> bool {
        match (queue, &self.state) {
            (ControlQueue::Discovery, State::Discovering(..))
            | (ControlQueue::Admin, State::Attaching(..) | State::Attached(..)) => true,
            (ControlQueue::Drives, State::Attached(..)) => self.drives.is_open(),
            _ => false,
        }
    }

    fn need(&self, queue: ControlQueue, buf: &[u8]) -> usize {
        match (queue, &self.state) {
            (ControlQueue::Discovery, State::Discovering(discover, _)) => discover.need(buf),
            (ControlQueue::Admin, State::Attaching(attach, _)) => attach.need(buf),
            (ControlQueue::Admin, State::Attached(admin, _)) => admin.need(buf),
            (ControlQueue::Drives, _) => self.drives.need(buf),
            _ => 0,
        }
    }

    fn outbox(&mut self, queue: ControlQueue) -> &mut Outbox<P> {
        &mut self.outboxes[queue as usize]
    }

    fn received(&mut self, queue: ControlQueue, bytes: &[u8], now: u64) -> usize {
        let taken = match queue {
            ControlQueue::Discovery => self.on_discovery(bytes, now),
            ControlQueue::Admin => self.on_admin(bytes, now),
            ControlQueue::Drives => self.on_drives(bytes, now),
        };
        match (taken, queue) {
            (Ok(used), _) => used,
            (Err(error), ControlQueue::Drives) => {
                self.drives_refused(error, now);
                bytes.len()
            }
            (Err(error), _) => {
                self.lose(error);
                bytes.len()
            }
        }
    }

    fn closed(&mut self, queue: ControlQueue, end: ConnectionEnd, now: u64) {
        if !self.is_open(queue) {
            return;
        }
        self.outboxes[queue as usize].clear();
        let plain = |end| match end {
            ConnectionEnd::Closed => AssociationError::Closed,
            ConnectionEnd::Broken(why) => AssociationError::Broken(why),
        };
        match (queue, &self.state) {
            (ControlQueue::Drives, _) => self.drives_failed(plain(end)),
            (_, State::Attached(_, keep)) => {
                let loss = keep.lost(now);
                let explained = end == ConnectionEnd::Closed || loss.ran_out();
                self.lose(if explained { AssociationError::Dropped(loss) } else { plain(end) });
            }
            _ => self.lose(plain(end)),
        }
    }

    fn timeout(&mut self, now: u64) {
        let answer_ns = self.config.answer_ns;
        let admin_ns = self.admin_ns();
        let after = match &mut self.state {
            State::Discovering(discover, by) => {
                discover.tick(now, &mut self.outboxes[ControlQueue::Discovery as usize]);
                (now >= *by).then_some(answer_ns)
            }
            State::Attaching(attach, by) => {
                attach.tick(now, &mut self.outboxes[ControlQueue::Admin as usize]);
                (now >= *by).then_some(answer_ns)
            }
            State::Attached(admin, keep) => {
                if keep.is_due(now) {
                    keep.sent(now);
                    self.asked += 1;
                    let out = &mut self.outboxes[ControlQueue::Admin as usize];
                    admin.keep_alive(self.asked, now, out);
                }
                if probe::planted(Plant::P8KeepAliveUnanswered) {
                    admin.accept_keep_alives();
                }
                is_overdue(admin, admin_ns, now).then_some(admin_ns)
            }
            _ => None,
        };
        if let Some(after) = after {
            return self.lose(AssociationError::TimedOut(after));
        }
        if self.drives.timeout(answer_ns, now) {
            self.drives_failed(AssociationError::TimedOut(answer_ns));
        }
    }

    fn deadline(&self) -> Option<u64> {
        let own = match &self.state {
            State::Discovering(discover, by) => {
                Some(discover.next_deadline().map_or(*by, |at| at.min(*by)))
            }
            State::Attaching(attach, by) => {
                Some(attach.next_deadline().map_or(*by, |at| at.min(*by)))
            }
            State::Attached(admin, keep) => {
                let owed = admin.owed_since();
                let owed = owed.map(|since| since.saturating_add(self.admin_ns()));
                [keep.next(), owed].into_iter().flatten().min()
            }
            _ => None,
        };
        let drives = self.drives.deadline(self.config.answer_ns);
        [own, drives].into_iter().flatten().min()
    }
}

fn is_overdue<P: AsRef<[u8]> + Clone>(commands: &Commands<P>, answer_ns: u64, now: u64) -> bool {
    commands.owed_since().is_some_and(|since| now.saturating_sub(since) >= answer_ns)
}

impl AssociationConfig {
    /// An admin queue to a subsystem.
    fn queue(&self, subnqn: String, is_local: bool) -> QpConfig {
        let config = QpConfig::admin(self.host_nqn.clone(), self.host_id, subnqn, self.crc);
        QpConfig {
            kato_ms: self.keep_alive_ms,
            header_digest: self.header_digest,
            data_digest: self.data_digest.unwrap_or(!is_local),
            data_max: self.data_max,
            ..config
        }
    }
}

#[cfg(test)]
mod tests;

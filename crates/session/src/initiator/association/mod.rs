//! The association of one initiator with one target: discovery, bring-up, and the queues beside the
//! streams.
//!
//! ```text
//! (Discovering →) Attaching → Attached → Lost
//! ```
//!
//! An [`Association`] is one attempt. Once it is lost, it stays lost, and a new attempt needs a new
//! `Association`. So an answer that belongs to an earlier attempt is never used (T23). An association decides which connections it needs, which commands it sends on them and in which order, when it
//! sends Keep Alive, and when an answer has been missing for too long. The program around it has the sockets and the clock,
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
//! The caller sends commands with [`ask`](Association::ask). These are its *questions*. The caller
//! gives each question a number, and [`next_answer`](Association::next_answer) returns that number. All times are nanoseconds of one monotonic
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
    /// The number that the caller has given to the question.
    pub question: u64,
    /// The completion, with any status.
    pub cqe: Cqe,
    /// The data of a read, as long as requested; else empty.
    pub page: Vec<u8>,
}

/// The step of setting up the association, or its end. The numbers are deadlines, ns.
#[derive(Debug)]
enum State<P> {
    /// Discovery needs its connection.
    Undiscovered,
    /// Discovery is running.
    Discovering(Box<Discover<P>>, u64),
    /// The admin queue needs its connection.
    Unattached,
    /// The bring-up is running.
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
    /// The subsystem, once it is known.
    subnqn: Option<String>,
    /// Whether the association ends when discovery has ended.
    only_discovers: bool,
    /// The subsystems that discovery has listed.
    discovered: Option<Vec<Entry>>,
    controller: Option<Controller>,
    /// The drives queue.
    drives: Drives<P>,
    /// Answers that the caller has not taken.
    answers: VecDeque<Answer>,
    /// The number of commands sent so far, on all queues.
    commands_sent: u64,
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
            commands_sent: 0,
            answer_factor: 1,
            config,
        }
    }

    /// An association that only reads the discovery log, which [`discovered`](Self::discovered)
    /// returns. It attaches to no controller.
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

    /// Whether questions may be asked.
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
    fn wanted_queue(&self) -> Option<ControlQueue> {
        match &self.state {
            State::Undiscovered => Some(ControlQueue::Discovery),
            State::Unattached => Some(ControlQueue::Admin),
            State::Attached(..) if matches!(self.drives, Drives::Wanted { .. }) => {
                Some(ControlQueue::Drives)
            }
            _ => None,
        }
    }

    /// The queue for which `connection` must be made now.
    fn queue_of(&self, connection: ConnectionId) -> Option<ControlQueue> {
        self.wanted_queue().filter(|queue| connection == ConnectionId::Control(*queue))
    }

    /// The limit for an answer on the admin queue, ns.
    const fn admin_answer_ns(&self) -> u64 {
        self.config.answer_ns.saturating_mul(self.answer_factor)
    }

    /// Opens the queue to the drives, unless it is open or being opened. It is always the same
    /// queue: the target accepts it again only when all commands that it had before have come back,
    /// so that no zeroes of an earlier attempt land late (T8). The association waits for that, for
    /// `answer_ns` at most.
    pub fn open_drives(&mut self, now: u64) {
        if self.is_attached() && matches!(self.drives, Drives::Closed | Drives::Failed(_)) {
            self.drives =
                Drives::wanted(now.saturating_add(self.config.answer_ns), self.commands_sent);
        }
    }

    /// Closes the queue to the drives. No open question on it will be answered.
    pub fn close_drives(&mut self) {
        self.outboxes[ControlQueue::Drives as usize].clear();
        self.drives = Drives::Closed;
        self.answers.retain(|answer| answer.queue != ControlQueue::Drives);
    }

    /// Sends a command on a queue. `question` is a number of the caller's choice. Many commands may be
    /// in flight at a time.
    ///
    /// # Errors
    /// [`AskError`]: no part of it was sent.
    pub fn ask(
        &mut self,
        queue: ControlQueue,
        question: u64,
        sqe: Sqe,
        data: Data<'_, P>,
        now: u64,
    ) -> Result<(), AskError> {
        let commands = match (queue, &mut self.state, &mut self.drives) {
            (ControlQueue::Admin, State::Attached(admin, _), _) => admin,
            (ControlQueue::Drives, State::Attached(..), Drives::Ready(drives)) => drives,
            _ => return Err(AskError::NotReady),
        };
        self.commands_sent += 1;
        commands.ask(
            self.commands_sent,
            question,
            sqe,
            data,
            now,
            &mut self.outboxes[queue as usize],
        )
    }

    /// The next answer, in order of arrival.
    pub fn next_answer(&mut self) -> Option<Answer> {
        self.answers.pop_front()
    }

    /// The number of questions on a queue that have no answer yet.
    #[must_use]
    pub fn unanswered(&self, queue: ControlQueue) -> usize {
        match (queue, &self.state, &self.drives) {
            (ControlQueue::Admin, State::Attached(admin, _), _) => admin.unanswered(),
            (ControlQueue::Drives, _, Drives::Ready(drives)) => drives.unanswered(),
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
    pub fn close(&mut self) {
        if !matches!(self.state, State::Lost(_)) {
            self.end_with_error(AssociationError::ClosedHere);
        }
    }
}

impl<P: AsRef<[u8]> + Clone> Endpoint for Association<P> {
    type Piece = P;

    fn wants_connection(&self) -> Option<ConnectionId> {
        self.wanted_queue().map(ConnectionId::Control)
    }

    fn connected(&mut self, connection: ConnectionId, is_local: bool, now: u64) {
        let Some(queue) = self.queue_of(connection) else { return };
        let out = &mut self.outboxes[queue as usize];
        out.clear();
        let deadline = now.saturating_add(self.config.answer_ns);
        match queue {
            ControlQueue::Discovery => {
                let config = self.config.admin_queue_config(DISCOVERY_NQN.into(), is_local);
                let mut discover = Box::new(Discover::new(QpConfig { kato_ms: 0, ..config }));
                discover.start(out);
                self.state = State::Discovering(discover, deadline);
            }
            ControlQueue::Admin => {
                let config = self.config.admin_queue_config(self.subnqn().into(), is_local);
                let mut attach = Box::new(Attach::new(config.clone(), self.config.io_queues));
                attach.start(&mut self.outboxes[queue as usize]);
                self.queues = Some(config);
                self.state = State::Attaching(attach, deadline);
            }
            ControlQueue::Drives => {
                let Some(queue_config) = self.io_queue(self.drives.qid(), DRIVES_COMMANDS) else {
                    return;
                };
                let pair = QueuePair::open(queue_config);
                self.drives.start(pair, deadline, &mut self.outboxes[queue as usize]);
            }
        }
    }

    fn connect_failed(&mut self, connection: ConnectionId, failure: ConnectFailure, _: u64) {
        match self.queue_of(connection) {
            Some(ControlQueue::Drives) => self.fail_drives_queue(failure.into()),
            Some(_) => self.end_with_error(failure.into()),
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
            ControlQueue::Discovery => self.receive_discovery(bytes, now),
            ControlQueue::Admin => self.receive_admin(bytes, now),
            ControlQueue::Drives => self.receive_drives(bytes, now),
        };
        match (taken, queue) {
            (Ok(used), _) => used,
            (Err(error), ControlQueue::Drives) => {
                self.on_drives_queue_error(error, now);
                bytes.len()
            }
            (Err(error), _) => {
                self.end_with_error(error);
                bytes.len()
            }
        }
    }

    fn closed(&mut self, queue: ControlQueue, end: ConnectionEnd, now: u64) {
        if !self.is_open(queue) {
            return;
        }
        self.outboxes[queue as usize].clear();
        let error_of = |end| match end {
            ConnectionEnd::Closed => AssociationError::Closed,
            ConnectionEnd::Broken(why) => AssociationError::Broken(why),
        };
        match (queue, &self.state) {
            (ControlQueue::Drives, _) => self.fail_drives_queue(error_of(end)),
            (_, State::Attached(_, keep)) => {
                let loss = keep.loss_at(now);
                let explained = end == ConnectionEnd::Closed || loss.ran_out();
                self.end_with_error(if explained {
                    AssociationError::Dropped(loss)
                } else {
                    error_of(end)
                });
            }
            _ => self.end_with_error(error_of(end)),
        }
    }

    fn timeout(&mut self, now: u64) {
        let answer_ns = self.config.answer_ns;
        let admin_answer_ns = self.admin_answer_ns();
        let overdue_ns = match &mut self.state {
            State::Discovering(discover, deadline) => {
                discover.tick(now, &mut self.outboxes[ControlQueue::Discovery as usize]);
                (now >= *deadline).then_some(answer_ns)
            }
            State::Attaching(attach, deadline) => {
                attach.tick(now, &mut self.outboxes[ControlQueue::Admin as usize]);
                (now >= *deadline).then_some(answer_ns)
            }
            State::Attached(admin, keep) => {
                if keep.is_due(now) {
                    keep.record_sent(now);
                    self.commands_sent += 1;
                    let out = &mut self.outboxes[ControlQueue::Admin as usize];
                    admin.keep_alive(self.commands_sent, now, out);
                }
                if probe::planted(Plant::P8KeepAliveUnanswered) {
                    admin.accept_keep_alives();
                }
                is_overdue(admin, admin_answer_ns, now).then_some(admin_answer_ns)
            }
            _ => None,
        };
        if let Some(limit_ns) = overdue_ns {
            return self.end_with_error(AssociationError::TimedOut(limit_ns));
        }
        if self.drives.check_time(answer_ns, now) {
            self.fail_drives_queue(AssociationError::TimedOut(answer_ns));
        }
    }

    fn deadline(&self) -> Option<u64> {
        let own_deadline = match &self.state {
            State::Discovering(discover, deadline) => {
                Some(discover.next_deadline().map_or(*deadline, |at| at.min(*deadline)))
            }
            State::Attaching(attach, deadline) => {
                Some(attach.next_deadline().map_or(*deadline, |at| at.min(*deadline)))
            }
            State::Attached(admin, keep) => {
                let stalled = admin.stalled_since();
                let answer_due = stalled.map(|since| since.saturating_add(self.admin_answer_ns()));
                [keep.next_due(), answer_due].into_iter().flatten().min()
            }
            _ => None,
        };
        let drives_deadline = self.drives.deadline(self.config.answer_ns);
        [own_deadline, drives_deadline].into_iter().flatten().min()
    }
}

fn is_overdue<P: AsRef<[u8]> + Clone>(commands: &Commands<P>, answer_ns: u64, now: u64) -> bool {
    commands.stalled_since().is_some_and(|since| now.saturating_sub(since) >= answer_ns)
}

impl AssociationConfig {
    /// An admin queue to a subsystem.
    fn admin_queue_config(&self, subnqn: String, is_local: bool) -> QpConfig {
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

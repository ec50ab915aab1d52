//! The association of one initiator with one target: discovery, bring-up, and the queues beside the
//! streams.
//!
//! ```text
//! (Discovering →) Attaching → Attached → Lost
//!  finds the NQN   brings the   commands   for good
//!                  controller   may be
//!                  up           sent
//! ```
//!
//! An [`Association`] is one attempt. Once it is lost, it stays lost, and a new attempt needs a new
//! `Association`. So an answer that belongs to an earlier attempt is never used (trap T23).
//!
//! An association decides which connections it needs, which commands it sends on them and in which
//! order, when it sends Keep Alive, and when an answer has been missing for too long. The program
//! around it has the sockets and the clock, and drives the association as an
//! [`Endpoint`](super::endpoint::Endpoint). It does this, in order:
//!
//! 1. calls `timeout` when `deadline` is due;
//! 2. for each queue that has a connection, in the order of [`ControlQueue::ALL`]: sends the
//!    contents of the `outbox`, passes the bytes that have arrived to `received`, and reports the
//!    end of the connection with `closed`. The admin queue comes first, because its end explains
//!    the end of the others;
//! 3. closes the connection of each queue that is not open any more (`is_open`). Before, it sends
//!    the contents of the outbox as far as the connection takes them at once, because they may be a
//!    last PDU;
//! 4. makes the connection that `wants_connection` requests, and reports it with `connected` or
//!    `connect_failed`.
//!
//! The caller sends commands with [`ask`](Association::ask). These are its *questions*. The caller
//! gives each question a number, and [`next_answer`](Association::next_answer) returns that number.
//! All times are nanoseconds of one monotonic clock.

mod commands;
mod connections;
mod error;
mod queues;

use alloc::boxed::Box;
use alloc::collections::VecDeque;
use alloc::string::String;
use alloc::sync::Arc;
use alloc::vec::Vec;

use riopipe_nvme::command::{Cqe, Sqe};
use riopipe_nvme::digest::Crc32c;
use riopipe_nvme::discovery::Entry;
use riopipe_nvme::fabrics::DISCOVERY_NQN;

use self::commands::Commands;
pub use self::error::{AskError, AssociationError};
use self::queues::Drives;
pub use self::queues::{DRIVES_COMMANDS, DRIVES_QUEUE};
use super::attach::{Attach, Controller};
use super::discover::Discover;
use super::endpoint::ConnectionId;
pub use super::endpoint::{ConnectFailure, ConnectionEnd, ControlQueue};
use super::keep_alive::KeepAlive;
use super::queue_pair::{Data, IoQueue, QpConfig};
use crate::auth::host::HostSecrets;
use crate::outbox::Outbox;

/// The configuration of an association.
#[derive(Clone, Debug)]
pub struct AssociationConfig {
    /// The host's NQN.
    pub host_nqn: String,
    /// The host's identifier.
    pub host_id: [u8; 16],
    /// The secrets with which the host authenticates if the target demands it.
    pub secrets: Option<Arc<HostSecrets>>,
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

/// The step of setting up the association, or its end. A `deadline` is the time at which the step
/// is given up, ns.
#[derive(Debug)]
enum State<P> {
    /// Discovery needs its connection.
    Undiscovered,
    /// Discovery is running.
    Discovering { discover: Box<Discover<P>>, deadline: u64 },
    /// The admin queue needs its connection.
    Unattached,
    /// The bring-up is running.
    Attaching { attach: Box<Attach<P>>, deadline: u64 },
    /// Questions may be asked.
    Attached { admin: Box<Commands<P>>, keep_alive: KeepAlive },
    /// The association has ended, or could not be set up.
    Lost(AssociationError),
}

/// The association of one initiator with one target; see the [module](self). `P` is a piece of a
/// write's data.
#[derive(Debug)]
pub struct Association<P> {
    config: AssociationConfig,
    /// The configuration of the admin queue, once its connection exists. The I/O queues have the
    /// same digests and limits.
    admin_config: Option<QpConfig>,
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
    /// When the target last sent anything, ns, as far as the association knows.
    last_received: u64,
    /// The time for which the target may send nothing, ns; `None`: only answers have limits.
    silence_ns: Option<u64>,
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
            admin_config: None,
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
            last_received: 0,
            silence_ns: None,
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

    /// From now on the association is lost when the target has sent nothing for `silence_ns`
    /// nanoseconds. Keep Alive is sent three times as often at least, because its answers show that
    /// the target runs.
    pub fn limit_silence(&mut self, silence_ns: u64) {
        self.silence_ns = Some(silence_ns);
        if let State::Attached { keep_alive, .. } = &mut self.state {
            keep_alive.speed_up(keep_alive_interval_ns(silence_ns));
        }
    }

    /// Takes in that the target has sent something at `at`, ns, on a connection that the
    /// association does not have: that of a stream.
    pub fn note_received(&mut self, at: u64) {
        self.last_received = self.last_received.max(at);
    }

    /// When the target last sent anything, ns: on a queue of the association, or as far as
    /// [`note_received`](Self::note_received) has reported.
    #[must_use]
    pub const fn last_received(&self) -> u64 {
        self.last_received
    }

    /// The limit of [`limit_silence`](Self::limit_silence), ns.
    #[must_use]
    pub const fn silence_ns(&self) -> Option<u64> {
        self.silence_ns
    }

    /// When the target has been silent for too long, ns, if it sends nothing until then: the limit
    /// is over, and a Keep Alive has waited for its answer for two thirds of the limit. The second
    /// condition only matters if the program itself did not run for a while.
    fn silence_ends(&self, admin: &Commands<P>) -> Option<u64> {
        let silence_ns = self.silence_ns?;
        let asked_at = admin.oldest_keep_alive()?;
        let answer_ns = silence_ns - keep_alive_interval_ns(silence_ns);
        let limit = self.last_received.saturating_add(silence_ns);
        Some(limit.max(asked_at.saturating_add(answer_ns)))
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
            State::Attached { .. } => AssociationState::Attached,
            State::Lost(error) => AssociationState::Lost(error),
            _ => AssociationState::Attaching,
        }
    }

    /// Whether questions may be asked.
    #[must_use]
    pub const fn is_attached(&self) -> bool {
        matches!(self.state, State::Attached { .. })
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
            State::Attached { .. } if matches!(self.drives, Drives::Wanted { .. }) => {
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
    /// so that no zeroes of an earlier attempt land late (trap T8). The association waits for that,
    /// for `answer_ns` at most.
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

    /// Sends a command on a queue. `question` is a number of the caller's choice. Many commands may
    /// be in flight at a time.
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
            (ControlQueue::Admin, State::Attached { admin, .. }, _) => admin,
            (ControlQueue::Drives, State::Attached { .. }, Drives::Ready(drives)) => drives,
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

    /// Takes the answer to a question on the admin queue, if it has arrived.
    pub(super) fn take_answer(&mut self, question: u64) -> Option<Answer> {
        let is_answer =
            |answer: &Answer| answer.queue == ControlQueue::Admin && answer.question == question;
        let index = self.answers.iter().position(is_answer)?;
        self.answers.remove(index)
    }

    /// The next answer, in order of arrival.
    pub fn next_answer(&mut self) -> Option<Answer> {
        self.answers.pop_front()
    }

    /// The number of questions on a queue that have no answer yet.
    #[must_use]
    pub fn unanswered(&self, queue: ControlQueue) -> usize {
        match (queue, &self.state, &self.drives) {
            (ControlQueue::Admin, State::Attached { admin, .. }, _) => admin.unanswered(),
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
        let mut config =
            self.admin_config.as_ref()?.io_queue(controller.cntlid, qid, entries as u16);
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

/// The interval of Keep Alive commands if the target may be silent for `silence_ns`, ns.
const fn keep_alive_interval_ns(silence_ns: u64) -> u64 {
    silence_ns / 3
}

/// Whether an answer has been missing without progress for `answer_ns` or longer.
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
            secrets: self.secrets.clone(),
            ..config
        }
    }
}

#[cfg(test)]
mod tests;

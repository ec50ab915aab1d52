//! Events on an association's connections, and its queue to the drives.

use alloc::boxed::Box;
use alloc::string::String;
use alloc::vec::Vec;

use riopipe_nvme::discovery::{Entry, SUBTYPE_NVM};
use riopipe_order::probe::{self, Plant};

use super::commands::Commands;
use super::{Answer, Association, AssociationError, ControlQueue, DrivesState, State, is_overdue};
use crate::initiator::keep_alive::KeepAlive;
use crate::initiator::opening::IO_COMMANDS_MAX;
use crate::initiator::queue_pair::QueuePair;
use crate::outbox::Outbox;

/// The I/O queue of labels and recovery; streams have the others.
pub const DRIVES_QUEUE: u16 = 1;
/// The number of commands for which the drives queue has space: those of a recovery, and one more.
pub const DRIVES_COMMANDS: usize = IO_COMMANDS_MAX + 1;
/// The delay before the drives queue is requested again after the target has refused it, ns.
const RETRY_DELAY_NS: u64 = 2_000_000;

/// The state of the drives queue.
///
/// ```text
/// Closed → Wanted → Starting → Ready
///             ↑___ Refused __|   (no longer than until `give_up_at`)
/// ```
///
/// `qid` is the id of the queue, and `give_up_at` the time from which a refusal is final, ns.
#[derive(Debug)]
pub(super) enum Drives<P> {
    /// It has not been requested, or it has been closed.
    Closed,
    /// The target has refused it for now. It is requested again at `retry_at`, ns.
    Refused { qid: u16, retry_at: u64, give_up_at: u64 },
    /// It needs its connection.
    Wanted { qid: u16, give_up_at: u64 },
    /// Handshake and Connect are in flight.
    Starting {
        commands: Box<Commands<P>>,
        qid: u16,
        give_up_at: u64,
        /// The time by which the target must have answered both, ns.
        deadline: u64,
    },
    /// Commands may be sent.
    Ready(Box<Commands<P>>),
    /// It could not be opened, or it has ended.
    Failed(AssociationError),
}

impl<P> Drives<P> {
    pub(super) const fn state(&self) -> DrivesState<'_> {
        match self {
            Self::Closed => DrivesState::Closed,
            Self::Refused { .. } | Self::Wanted { .. } | Self::Starting { .. } => {
                DrivesState::Opening
            }
            Self::Ready(_) => DrivesState::Ready,
            Self::Failed(error) => DrivesState::Failed(error),
        }
    }

    pub(super) const fn is_open(&self) -> bool {
        matches!(self, Self::Starting { .. } | Self::Ready(_))
    }
}

impl<P: AsRef<[u8]> + Clone> Drives<P> {
    /// The state from which the queue is requested, until it is given up at `give_up_at`, ns. The
    /// queue is always the same one. Only a plant draws another, by `commands_sent`, which differs
    /// from one request to the next.
    pub(super) fn wanted(give_up_at: u64, commands_sent: u64) -> Self {
        let takes_another = probe::is_bug_planted(Plant::T8UndoNoWait);
        let qid = if takes_another { 26 + (commands_sent % 6) as u16 } else { DRIVES_QUEUE };
        Self::Wanted { qid, give_up_at }
    }

    pub(super) const fn qid(&self) -> u16 {
        match self {
            Self::Wanted { qid, .. } => *qid,
            _ => DRIVES_QUEUE,
        }
    }

    /// Begins the handshake on a new connection. The target must answer before `deadline`, ns.
    pub(super) fn start(&mut self, pair: QueuePair<P>, deadline: u64, outbox: &mut Outbox<P>) {
        let Self::Wanted { qid, give_up_at } = *self else { return };
        let mut commands = Box::new(Commands::new(pair));
        commands.start(outbox);
        *self = Self::Starting { commands, qid, give_up_at, deadline };
    }

    pub(super) fn need(&self, buf: &[u8]) -> usize {
        match self {
            Self::Starting { commands, .. } | Self::Ready(commands) => commands.need(buf),
            _ => 0,
        }
    }

    /// Requests a refused queue again if that is due at `now`, ns. Returns whether an answer has
    /// been missing for longer than `answer_ns`.
    pub(super) fn check_time(&mut self, answer_ns: u64, now: u64) -> bool {
        match self {
            Self::Refused { qid, retry_at, give_up_at } if *retry_at <= now => {
                *self = Self::Wanted { qid: *qid, give_up_at: *give_up_at };
                false
            }
            Self::Starting { deadline, .. } => now >= *deadline,
            Self::Ready(commands) => is_overdue(commands, answer_ns, now),
            _ => false,
        }
    }

    /// When the queue must be checked again, ns: for another request, or for a missing answer.
    pub(super) fn deadline(&self, answer_ns: u64) -> Option<u64> {
        match self {
            Self::Refused { retry_at, .. } => Some(*retry_at),
            Self::Starting { deadline, .. } => Some(*deadline),
            Self::Ready(commands) => {
                commands.stalled_since().map(|since| since.saturating_add(answer_ns))
            }
            Self::Closed | Self::Wanted { .. } | Self::Failed(_) => None,
        }
    }
}

impl<P: AsRef<[u8]> + Clone> Association<P> {
    /// Takes in bytes of the discovery connection. The subsystem is known when the log has been
    /// read.
    pub(super) fn receive_discovery(
        &mut self,
        bytes: &[u8],
        now: u64,
    ) -> Result<usize, AssociationError> {
        let State::Discovering { discover, .. } = &mut self.state else { return Ok(bytes.len()) };
        let outbox = &mut self.outboxes[ControlQueue::Discovery as usize];
        let used = discover.receive(now, bytes, outbox)?;
        if let Some(entries) = discover.entries() {
            let entries = entries.to_vec();
            let subsystem = only_subsystem(&entries, &self.config.host_nqn);
            self.discovered = Some(entries);
            if self.only_discovers {
                return Err(AssociationError::ClosedHere);
            }
            self.subnqn = Some(subsystem?);
            self.state = State::Unattached;
        }
        Ok(used)
    }

    /// Takes in bytes of the admin queue. During the bring-up they belong to it, and afterwards
    /// they are answers to commands.
    pub(super) fn receive_admin(
        &mut self,
        bytes: &[u8],
        now: u64,
    ) -> Result<usize, AssociationError> {
        let Self { state, answers, .. } = self;
        let outbox = &mut self.outboxes[ControlQueue::Admin as usize];
        match state {
            State::Attaching { attach, .. } => {
                let used = attach.receive(now, bytes, outbox)?;
                if attach.is_attached() {
                    self.on_brought_up(now);
                }
                Ok(used)
            }
            State::Attached { admin, .. } => {
                let queue = ControlQueue::Admin;
                let used = admin.receive(bytes, now, outbox, |question, cqe, page| {
                    answers.push_back(Answer { queue, question, cqe, page });
                })?;
                Ok(used)
            }
            _ => Ok(bytes.len()),
        }
    }

    /// Ends the bring-up: from now on questions may be asked, and Keep Alive is sent.
    fn on_brought_up(&mut self, now: u64) {
        // `Unattached` is only a placeholder: it is replaced below.
        let last_state = core::mem::replace(&mut self.state, State::Unattached);
        if let State::Attaching { attach, .. } = last_state
            && let Some((pair, controller)) = attach.finish()
        {
            self.controller = Some(controller);
            let keep_alive = KeepAlive::new(self.config.keep_alive_ms, now);
            let keep_alive = match self.config.report_ns {
                Some(interval_ns) => keep_alive.every(interval_ns),
                None => keep_alive,
            };
            self.state = State::Attached { admin: Box::new(Commands::new(pair)), keep_alive };
        }
    }

    /// Takes in bytes of the queue to the drives.
    pub(super) fn receive_drives(
        &mut self,
        bytes: &[u8],
        now: u64,
    ) -> Result<usize, AssociationError> {
        let Self { drives, answers, .. } = self;
        let outbox = &mut self.outboxes[ControlQueue::Drives as usize];
        let commands = match drives {
            Drives::Starting { commands, .. } | Drives::Ready(commands) => commands,
            _ => return Ok(bytes.len()),
        };
        let queue = ControlQueue::Drives;
        let used = commands.receive(bytes, now, outbox, |question, cqe, page| {
            answers.push_back(Answer { queue, question, cqe, page });
        })?;
        if commands.is_ready() && matches!(drives, Drives::Starting { .. }) {
            let last_state = core::mem::replace(drives, Drives::Closed);
            if let Drives::Starting { commands, .. } = last_state {
                *drives = Drives::Ready(commands);
            }
        }
        Ok(used)
    }

    /// Handles an error of the drives queue. If a later attempt may succeed, the queue is requested
    /// again after a delay; else it has failed.
    pub(super) fn on_drives_queue_error(&mut self, error: AssociationError, now: u64) {
        match self.drives {
            Drives::Starting { qid, give_up_at, .. } if error.is_passing() && now < give_up_at => {
                let retry_at = now.saturating_add(RETRY_DELAY_NS);
                self.drives = Drives::Refused { qid, retry_at, give_up_at };
            }
            _ => self.fail_drives_queue(error),
        }
    }

    /// Records that the drives queue has failed, and drops its answers that the caller has not
    /// taken.
    pub(super) fn fail_drives_queue(&mut self, error: AssociationError) {
        // After an error of the protocol the outbox holds the last PDU to the target, which must be
        // sent.
        if !matches!(error, AssociationError::Session(_)) {
            self.outboxes[ControlQueue::Drives as usize].clear();
        }
        self.drives = Drives::Failed(error);
        self.answers.retain(|answer| answer.queue != ControlQueue::Drives);
    }

    /// Records that the association is lost, and drops all answers that the caller has not taken.
    pub(super) fn end_with_error(&mut self, error: AssociationError) {
        self.state = State::Lost(error);
        self.outboxes[ControlQueue::Drives as usize].clear();
        self.drives = Drives::Closed;
        self.answers.clear();
    }
}

/// The NQN of the only subsystem with namespaces that a discovery log lists for the host `hostnqn`.
fn only_subsystem(entries: &[Entry], hostnqn: &str) -> Result<String, AssociationError> {
    let with_namespaces = entries.iter().filter(|entry| entry.subtype == SUBTYPE_NVM);
    let mut found: Vec<String> = with_namespaces.map(|entry| entry.subnqn.clone()).collect();
    found.sort();
    found.dedup();
    match found.len() {
        0 => Err(AssociationError::NothingOffered { hostnqn: hostnqn.into() }),
        1 => Ok(found.remove(0)),
        _ => Err(AssociationError::WhichSubsystem(found)),
    }
}

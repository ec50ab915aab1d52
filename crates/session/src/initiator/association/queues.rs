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
/// The number of commands for which it has space: those of a recovery, and one more.
pub const DRIVES_COMMANDS: usize = IO_COMMANDS_MAX + 1;
/// The pause before a queue that the target refused is requested again, ns.
const REST_NS: u64 = 2_000_000;

/// The queue to the drives.
#[derive(Debug)]
pub(super) enum Drives<P> {
    Closed,
    /// The target has refused it for now. It is requested again at `at`, ns, until the time `by`,
    /// ns.
    Resting {
        qid: u16,
        at: u64,
        by: u64,
    },
    /// It needs its connection. `by` is as above.
    Wanted {
        qid: u16,
        by: u64,
    },
    /// Handshake and Connect are in flight. `by` is as above.
    Starting {
        commands: Box<Commands<P>>,
        qid: u16,
        by: u64,
        /// The time at which the target must have answered both, ns.
        deadline: u64,
    },
    Ready(Box<Commands<P>>),
    Failed(AssociationError),
}

impl<P> Drives<P> {
    pub(super) const fn state(&self) -> DrivesState<'_> {
        match self {
            Self::Closed => DrivesState::Closed,
            Self::Resting { .. } | Self::Wanted { .. } | Self::Starting { .. } => {
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
    /// The queue is wanted from now on, and requested until the time `by`. `asked` differs from one
    /// request to the next. Only a plant uses it.
    pub(super) fn wanted(by: u64, asked: u64) -> Self {
        let takes_another = probe::planted(Plant::T8UndoNoWait);
        let qid = if takes_another { 26 + (asked % 6) as u16 } else { DRIVES_QUEUE };
        Self::Wanted { qid, by }
    }

    pub(super) const fn qid(&self) -> u16 {
        match self {
            Self::Wanted { qid, .. } => *qid,
            _ => DRIVES_QUEUE,
        }
    }

    /// Its connection is made.
    pub(super) fn start(&mut self, pair: QueuePair<P>, deadline: u64, out: &mut Outbox<P>) {
        let Self::Wanted { qid, by } = *self else { return };
        let mut commands = Box::new(Commands::new(pair));
        commands.start(out);
        *self = Self::Starting { commands, qid, by, deadline };
    }

    pub(super) fn need(&self, buf: &[u8]) -> usize {
        match self {
            Self::Starting { commands, .. } | Self::Ready(commands) => commands.need(buf),
            _ => 0,
        }
    }

    /// Time has passed. Returns whether an answer has been missing for too long.
    pub(super) fn timeout(&mut self, answer_ns: u64, now: u64) -> bool {
        match self {
            Self::Resting { qid, at, by } if *at <= now => {
                *self = Self::Wanted { qid: *qid, by: *by };
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
            Self::Resting { at, .. } => Some(*at),
            Self::Starting { deadline, .. } => Some(*deadline),
            Self::Ready(commands) => {
                commands.owed_since().map(|since| since.saturating_add(answer_ns))
            }
            Self::Closed | Self::Wanted { .. } | Self::Failed(_) => None,
        }
    }
}

impl<P: AsRef<[u8]> + Clone> Association<P> {
    /// Takes in bytes of the discovery connection. The subsystem is known when the log has been
    /// read.
    pub(super) fn on_discovery(
        &mut self,
        bytes: &[u8],
        now: u64,
    ) -> Result<usize, AssociationError> {
        let State::Discovering(discover, _) = &mut self.state else { return Ok(bytes.len()) };
        let out = &mut self.outboxes[ControlQueue::Discovery as usize];
        let used = discover.receive(now, bytes, out)?;
        if let Some(entries) = discover.entries() {
            let entries = entries.to_vec();
            let only = only_subsystem(&entries);
            self.discovered = Some(entries);
            if self.only_discovers {
                return Err(AssociationError::HungUp);
            }
            self.subnqn = Some(only?);
            self.state = State::Unattached;
        }
        Ok(used)
    }

    /// Takes in bytes of the admin queue: for the bring-up, or answers to questions after it.
    pub(super) fn on_admin(&mut self, bytes: &[u8], now: u64) -> Result<usize, AssociationError> {
        let Self { state, answers, .. } = self;
        let out = &mut self.outboxes[ControlQueue::Admin as usize];
        match state {
            State::Attaching(attach, _) => {
                let used = attach.receive(now, bytes, out)?;
                if attach.is_attached() {
                    self.attached(now);
                }
                Ok(used)
            }
            State::Attached(admin, _) => {
                let queue = ControlQueue::Admin;
                let used = admin.receive(bytes, now, out, |name, cqe, page| {
                    answers.push_back(Answer { queue, name, cqe, page });
                })?;
                Ok(used)
            }
            _ => Ok(bytes.len()),
        }
    }

    /// The controller has been brought up: the association stands, and Keep Alive begins.
    fn attached(&mut self, now: u64) {
        // The state in between lasts no longer than this function.
        let before = core::mem::replace(&mut self.state, State::Unattached);
        if let State::Attaching(attach, _) = before
            && let Some((pair, controller)) = attach.finish()
        {
            self.controller = Some(controller);
            let keep = KeepAlive::new(self.config.keep_alive_ms, now);
            let keep = self.config.report_ns.map_or(keep, |every_ns| keep.every(every_ns));
            self.state = State::Attached(Box::new(Commands::new(pair)), keep);
        }
    }

    /// Takes in bytes of the queue to the drives.
    pub(super) fn on_drives(&mut self, bytes: &[u8], now: u64) -> Result<usize, AssociationError> {
        let Self { drives, answers, .. } = self;
        let out = &mut self.outboxes[ControlQueue::Drives as usize];
        let commands = match drives {
            Drives::Starting { commands, .. } | Drives::Ready(commands) => commands,
            _ => return Ok(bytes.len()),
        };
        let queue = ControlQueue::Drives;
        let used = commands.receive(bytes, now, out, |name, cqe, page| {
            answers.push_back(Answer { queue, name, cqe, page });
        })?;
        if commands.is_ready() && matches!(drives, Drives::Starting { .. }) {
            let before = core::mem::replace(drives, Drives::Closed);
            if let Drives::Starting { commands, .. } = before {
                *drives = Drives::Ready(commands);
            }
        }
        Ok(used)
    }

    /// The queue to the drives has met an error. If the refusal passes by itself, the queue is
    /// requested again later.
    pub(super) fn drives_refused(&mut self, error: AssociationError, now: u64) {
        match self.drives {
            Drives::Starting { qid, by, .. } if error.is_passing() && now < by => {
                let at = now.saturating_add(REST_NS);
                self.drives = Drives::Resting { qid, at, by };
            }
            _ => self.drives_failed(error),
        }
    }

    /// The queue to the drives has failed. The answers on it that were not taken are dropped.
    pub(super) fn drives_failed(&mut self, error: AssociationError) {
        // After an error of the protocol it holds the last PDU to the target.
        if !matches!(error, AssociationError::Session(_)) {
            self.outboxes[ControlQueue::Drives as usize].clear();
        }
        self.drives = Drives::Failed(error);
        self.answers.retain(|answer| answer.queue != ControlQueue::Drives);
    }

    /// The association is lost.
    pub(super) fn lose(&mut self, error: AssociationError) {
        self.state = State::Lost(error);
        self.outboxes[ControlQueue::Drives as usize].clear();
        self.drives = Drives::Closed;
        self.answers.clear();
    }
}

/// The NQN of the only subsystem with namespaces that a discovery log lists.
fn only_subsystem(entries: &[Entry]) -> Result<String, AssociationError> {
    let of_storage = entries.iter().filter(|entry| entry.subtype == SUBTYPE_NVM);
    let mut found: Vec<String> = of_storage.map(|entry| entry.subnqn.clone()).collect();
    found.sort();
    found.dedup();
    match found.len() {
        1 => Ok(found.remove(0)),
        _ => Err(AssociationError::WhichSubsystem(found)),
    }
}

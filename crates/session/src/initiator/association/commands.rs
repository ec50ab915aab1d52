//! The commands of one control queue that have no answer yet: commands of callers, and Keep Alive.
//!
//! A caller's command is a *question*, with a number that the caller has chosen. Each command has
//! another number, too, which is unique in the association.

use alloc::vec;
use alloc::vec::Vec;

use riopipe_nvme::command::{Cqe, Sqe};

use super::error::AskError;
use crate::initiator::queue_pair::{Data, Event, QueuePair, SessionError, SubmitError};
use crate::outbox::Outbox;

/// Limit of Keep Alive commands in flight. While the target has not answered these, another one has
/// no use, and would take space of other commands.
const KEEP_ALIVES_MAX: usize = 3;

/// The source of a command.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum CommandSource {
    /// The association sent a Keep Alive at this time, ns.
    KeepAlive { sent_at: u64 },
    /// A caller asked the question with this number.
    Caller { question: u64 },
}

/// A command that has no answer yet.
#[derive(Debug)]
struct PendingCommand {
    /// The number of the command. It is unique in the association, so that no late answer is used
    /// for another command (trap T23).
    number: u64,
    source: CommandSource,
    /// The data of a read: as long as requested, and filled as far as data has arrived.
    read_data: Vec<u8>,
}

/// A queue and the commands on it that have no answer yet.
#[derive(Debug)]
pub(super) struct Commands<P> {
    queue_pair: QueuePair<P>,
    pending: Vec<PendingCommand>,
    /// The time from which a missing answer to a caller counts, ns: when data or a completion for a
    /// caller last came, or when a caller's command was sent while none was in flight.
    last_progress: u64,
}

impl<P: AsRef<[u8]> + Clone> Commands<P> {
    pub(super) fn new(queue_pair: QueuePair<P>) -> Self {
        Self { queue_pair, pending: Vec::new(), last_progress: 0 }
    }

    pub(super) fn start(&mut self, outbox: &mut Outbox<P>) {
        self.queue_pair.start(outbox);
    }

    pub(super) fn is_ready(&self) -> bool {
        self.queue_pair.is_ready()
    }

    pub(super) fn need(&self, buf: &[u8]) -> usize {
        self.queue_pair.need(buf)
    }

    /// Sends a caller's command. `number` is its unique number in the association, and `question`
    /// the caller's number, which the answer carries.
    pub(super) fn ask(
        &mut self,
        number: u64,
        question: u64,
        sqe: Sqe,
        data: Data<'_, P>,
        now: u64,
        outbox: &mut Outbox<P>,
    ) -> Result<(), AskError> {
        let read_data = match &data {
            Data::Read(len) => vec![0; *len as usize],
            _ => Vec::new(),
        };
        self.queue_pair.submit(sqe, number, data, outbox).map_err(|error| match error {
            SubmitError::Full => AskError::Full { unanswered: self.pending.len() },
            SubmitError::NotReady => AskError::NotReady,
            error => AskError::Data(error),
        })?;
        // No caller's command was in flight, so the time without progress begins here.
        if !self.pending.iter().any(PendingCommand::is_callers) {
            self.last_progress = now;
        }
        self.pending.push(PendingCommand {
            number,
            source: CommandSource::Caller { question },
            read_data,
        });
        Ok(())
    }

    /// Sends a Keep Alive, unless [`KEEP_ALIVES_MAX`] of them have no answer yet.
    pub(super) fn keep_alive(&mut self, number: u64, now: u64, outbox: &mut Outbox<P>) {
        let keep_alives_in_flight =
            self.pending.iter().filter(|command| !command.is_callers()).count();
        if keep_alives_in_flight < KEEP_ALIVES_MAX
            && self.queue_pair.submit(Sqe::keep_alive(), number, Data::None, outbox).is_ok()
        {
            let source = CommandSource::KeepAlive { sent_at: now };
            self.pending.push(PendingCommand { number, source, read_data: Vec::new() });
        }
    }

    /// Takes in bytes that have arrived; see [`QueuePair::receive`]. For each answer to a caller,
    /// calls `on_answer` with the number of the question, the completion, and the data that was
    /// read.
    pub(super) fn receive(
        &mut self,
        bytes: &[u8],
        now: u64,
        outbox: &mut Outbox<P>,
        mut on_answer: impl FnMut(u64, Cqe, Vec<u8>),
    ) -> Result<usize, SessionError> {
        let Self { queue_pair, pending, last_progress } = self;
        queue_pair.receive(bytes, outbox, |event| match event {
            Event::Ready { .. } => {}
            Event::Data { context: number, offset, bytes } => {
                let Some(command) = pending.iter_mut().find(|command| command.number == number)
                else {
                    return;
                };
                *last_progress = now;
                let start = offset as usize;
                // The queue pair drops bytes beyond the requested ones, so the range exists.
                if let Some(part) = command.read_data.get_mut(start..start + bytes.len()) {
                    part.copy_from_slice(bytes);
                }
            }
            Event::Done { context: number, cqe } => {
                let Some(index) = pending.iter().position(|command| command.number == number)
                else {
                    return;
                };
                let command = pending.swap_remove(index);
                if let CommandSource::Caller { question } = command.source {
                    *last_progress = now;
                    on_answer(question, cqe, command.read_data);
                }
            }
        })
    }

    /// Since when the oldest missing answer has been missing without progress, ns; `None` if no
    /// answer is missing.
    pub(super) fn stalled_since(&self) -> Option<u64> {
        let waits_since = |command: &PendingCommand| match command.source {
            CommandSource::KeepAlive { sent_at } => sent_at,
            CommandSource::Caller { .. } => self.last_progress,
        };
        self.pending.iter().map(waits_since).min()
    }

    /// When the oldest Keep Alive that has no answer yet was sent, ns.
    pub(super) fn oldest_keep_alive(&self) -> Option<u64> {
        let sent_at = |command: &PendingCommand| match command.source {
            CommandSource::KeepAlive { sent_at } => Some(sent_at),
            CommandSource::Caller { .. } => None,
        };
        self.pending.iter().filter_map(sent_at).min()
    }

    /// The number of callers' commands that have no answer yet.
    pub(super) fn unanswered(&self) -> usize {
        self.pending.iter().filter(|command| command.is_callers()).count()
    }

    /// Counts all Keep Alive commands as answered.
    pub(super) fn drop_keep_alives(&mut self) {
        self.pending.retain(PendingCommand::is_callers);
    }
}

impl PendingCommand {
    /// Whether the command came from a caller, not from the association itself.
    const fn is_callers(&self) -> bool {
        matches!(self.source, CommandSource::Caller { .. })
    }
}

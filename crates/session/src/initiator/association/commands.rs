//! The commands of one queue that have no answer yet.

use alloc::vec;
use alloc::vec::Vec;

use riopipe_nvme::command::{Cqe, Sqe};

use super::error::AskError;
use crate::initiator::queue_pair::{Data, Event, QueuePair, SessionError, SubmitError};
use crate::outbox::Outbox;

/// Limit of Keep Alive commands in flight. A target that has not answered these needs no more of
/// them, and the rest of the queue is for other commands.
const KEEP_ALIVES_MAX: usize = 3;

/// The source of a command.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Asker {
    /// The association itself: a Keep Alive, sent at this time.
    KeepAlive(u64),
    /// The caller. The number is the caller's number of its question.
    Caller(u64),
}

/// A command that has no answer yet.
#[derive(Debug)]
struct PendingCommand {
    /// The number of the command in the association, so that no answer is taken for the answer to
    /// another command (T23).
    number: u64,
    asker: Asker,
    /// The data that has arrived so far.
    page: Vec<u8>,
}

/// A queue and the commands on it that have no answer yet.
#[derive(Debug)]
pub(super) struct Commands<P> {
    pair: QueuePair<P>,
    pending: Vec<PendingCommand>,
    /// When data or a completion of a caller's command last came, or, if later, when the first of
    /// the commands in flight was sent, ns.
    last_progress: u64,
}

impl<P: AsRef<[u8]> + Clone> Commands<P> {
    pub(super) fn new(pair: QueuePair<P>) -> Self {
        Self { pair, pending: Vec::new(), last_progress: 0 }
    }

    pub(super) fn start(&mut self, out: &mut Outbox<P>) {
        self.pair.start(out);
    }

    pub(super) fn is_ready(&self) -> bool {
        self.pair.is_ready()
    }

    pub(super) fn need(&self, buf: &[u8]) -> usize {
        self.pair.need(buf)
    }

    /// Sends a caller's command. `number` identifies the command in the association. `question` is the
    /// caller's number, which is returned with the answer.
    pub(super) fn ask(
        &mut self,
        number: u64,
        question: u64,
        sqe: Sqe,
        data: Data<'_, P>,
        now: u64,
        out: &mut Outbox<P>,
    ) -> Result<(), AskError> {
        let page = match &data {
            Data::Read(len) => vec![0; *len as usize],
            _ => Vec::new(),
        };
        self.pair.submit(sqe, number, data, out).map_err(|error| match error {
            SubmitError::Full => AskError::Full { unanswered: self.pending.len() },
            SubmitError::NotReady => AskError::NotReady,
            error => AskError::Data(error),
        })?;
        // No caller waited until now, so the time without progress begins here.
        if !self.pending.iter().any(PendingCommand::is_callers) {
            self.last_progress = now;
        }
        self.pending.push(PendingCommand { number, asker: Asker::Caller(question), page });
        Ok(())
    }

    /// Sends a Keep Alive, unless [`KEEP_ALIVES_MAX`] of them have no answer yet.
    pub(super) fn keep_alive(&mut self, number: u64, now: u64, out: &mut Outbox<P>) {
        let in_flight = self.pending.iter().filter(|command| !command.is_callers()).count();
        if in_flight < KEEP_ALIVES_MAX
            && self.pair.submit(Sqe::keep_alive(), number, Data::None, out).is_ok()
        {
            let asker = Asker::KeepAlive(now);
            self.pending.push(PendingCommand { number, asker, page: Vec::new() });
        }
    }

    /// Takes in bytes that have arrived; see [`QueuePair::receive`]. Calls `on_answer` for each
    /// caller's command that is answered, with the caller's number, the completion and the data
    /// that was read.
    pub(super) fn receive(
        &mut self,
        bytes: &[u8],
        now: u64,
        out: &mut Outbox<P>,
        mut on_answer: impl FnMut(u64, Cqe, Vec<u8>),
    ) -> Result<usize, SessionError> {
        let Self { pair, pending, last_progress } = self;
        pair.receive(bytes, out, |event| match event {
            Event::Ready { .. } => {}
            Event::Data { user, offset, bytes } => {
                let Some(command) = pending.iter_mut().find(|q| q.number == user) else {
                    return;
                };
                *last_progress = now;
                let at = offset as usize;
                // The queue pair lets no byte through beyond the requested ones.
                if let Some(part) = command.page.get_mut(at..at + bytes.len()) {
                    part.copy_from_slice(bytes);
                }
            }
            Event::Done { user, cqe } => {
                let Some(at) = pending.iter().position(|q| q.number == user) else { return };
                let command = pending.swap_remove(at);
                if let Asker::Caller(question) = command.asker {
                    *last_progress = now;
                    on_answer(question, cqe, command.page);
                }
            }
        })
    }

    /// The time since which an answer has been missing without any progress, ns; `None` if no answer
    /// is missing.
    pub(super) fn stalled_since(&self) -> Option<u64> {
        let since = |command: &PendingCommand| match command.asker {
            Asker::KeepAlive(at) => at,
            Asker::Caller(_) => self.last_progress,
        };
        self.pending.iter().map(since).min()
    }

    /// The number of callers' commands that have no answer yet.
    pub(super) fn unanswered(&self) -> usize {
        self.pending.iter().filter(|command| command.is_callers()).count()
    }

    /// Counts all Keep Alive commands as answered.
    pub(super) fn accept_keep_alives(&mut self) {
        self.pending.retain(PendingCommand::is_callers);
    }
}

impl PendingCommand {
    /// Whether the command came from a caller, not from the association itself.
    const fn is_callers(&self) -> bool {
        matches!(self.asker, Asker::Caller(_))
    }
}

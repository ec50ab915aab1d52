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
    /// The caller, with its name for the command.
    Caller(u64),
}

/// A command that has no answer yet.
#[derive(Debug)]
struct Question {
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
    questions: Vec<Question>,
    /// When data or a completion of a caller's command last came, or, if later, when the first of
    /// the commands in flight was sent, ns.
    last_progress: u64,
}

impl<P: AsRef<[u8]> + Clone> Commands<P> {
    pub(super) fn new(pair: QueuePair<P>) -> Self {
        Self { pair, questions: Vec::new(), last_progress: 0 }
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

    /// Sends a caller's command. `number` identifies it in the association, and `name` is handed
    /// back to the caller with the answer.
    pub(super) fn ask(
        &mut self,
        number: u64,
        name: u64,
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
            SubmitError::Full => AskError::Full { owed: self.questions.len() },
            SubmitError::NotReady => AskError::NotReady,
            error => AskError::Data(error),
        })?;
        // No caller waited until now, so the time without progress begins here.
        if !self.questions.iter().any(Question::is_callers) {
            self.last_progress = now;
        }
        self.questions.push(Question { number, asker: Asker::Caller(name), page });
        Ok(())
    }

    /// Sends a Keep Alive, unless the target has enough to answer.
    pub(super) fn keep_alive(&mut self, number: u64, now: u64, out: &mut Outbox<P>) {
        let in_flight = self.questions.iter().filter(|question| !question.is_callers()).count();
        if in_flight < KEEP_ALIVES_MAX
            && self.pair.submit(Sqe::keep_alive(), number, Data::None, out).is_ok()
        {
            let asker = Asker::KeepAlive(now);
            self.questions.push(Question { number, asker, page: Vec::new() });
        }
    }

    /// Takes in bytes that have arrived; see [`QueuePair::receive`]. Calls `on_answer` for each
    /// caller's command that is answered, with its name, its completion and the data that it read.
    pub(super) fn receive(
        &mut self,
        bytes: &[u8],
        now: u64,
        out: &mut Outbox<P>,
        mut on_answer: impl FnMut(u64, Cqe, Vec<u8>),
    ) -> Result<usize, SessionError> {
        let Self { pair, questions, last_progress } = self;
        pair.receive(bytes, out, |event| match event {
            Event::Ready { .. } => {}
            Event::Data { user, offset, bytes } => {
                let Some(question) = questions.iter_mut().find(|q| q.number == user) else {
                    return;
                };
                *last_progress = now;
                let at = offset as usize;
                // The queue pair lets no byte through beyond the requested ones.
                if let Some(part) = question.page.get_mut(at..at + bytes.len()) {
                    part.copy_from_slice(bytes);
                }
            }
            Event::Done { user, cqe } => {
                let Some(at) = questions.iter().position(|q| q.number == user) else { return };
                let question = questions.swap_remove(at);
                if let Asker::Caller(name) = question.asker {
                    *last_progress = now;
                    on_answer(name, cqe, question.page);
                }
            }
        })
    }

    /// The time since which an answer has been missing without any progress, ns.
    pub(super) fn owed_since(&self) -> Option<u64> {
        let since = |question: &Question| match question.asker {
            Asker::KeepAlive(at) => at,
            Asker::Caller(_) => self.last_progress,
        };
        self.questions.iter().map(since).min()
    }

    /// The number of callers' commands that have no answer yet.
    pub(super) fn owed(&self) -> usize {
        self.questions.iter().filter(|question| question.is_callers()).count()
    }

    /// Counts all Keep Alive commands as answered.
    pub(super) fn accept_keep_alives(&mut self) {
        self.questions.retain(Question::is_callers);
    }
}

impl Question {
    /// Whether the command came from a caller, not from the association itself.
    const fn is_callers(&self) -> bool {
        matches!(self.asker, Asker::Caller(_))
    }
}

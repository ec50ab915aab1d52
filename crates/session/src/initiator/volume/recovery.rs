//! One attempt to recover a volume or some of its streams: the choice and the times of the commands
//! to each target, and the end of the attempt.
//!
//! [`Opening`] knows which commands are due, and [`RecoveryDriver`] adds the times. It sends a
//! command that a target has put off again after a delay. If a target puts commands off for too
//! long, or does not answer for too long, the attempt ends with an error. Then another attempt with
//! the next number may begin. Answers to commands of the earlier attempt may still arrive, and the
//! new attempt drops them (trap T23).

use alloc::vec::Vec;

use riopipe_nvme::command::{Sqe, Status};

use crate::initiator::association::ControlQueue;
use crate::initiator::opening::{Call, Opening, OpeningError, Phase, Progress, Ticket};
use crate::initiator::queue_pair::Data;

/// The delay before a command that a target has put off once is sent again, ns. Each later delay is
/// twice as long.
const RETRY_DELAY_NS_MIN: u64 = 500_000;
/// The longest delay, ns.
const RETRY_DELAY_NS_MAX: u64 = 20_000_000;
/// Limit of the doublings of the delay.
const RETRY_DOUBLINGS_MAX: u32 = 6;

/// Why an attempt has failed. `server` counts the volume's targets.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum RecoveryError {
    /// The state of the volume on the targets does not allow the recovery.
    #[error(transparent)]
    Opening(#[from] OpeningError),
    /// A target has not answered for too long.
    #[error("{doing}: the target has not answered in time")]
    TimedOut {
        /// The target.
        server: usize,
        /// The action that failed.
        doing: &'static str,
    },
    /// A target has put commands off for too long.
    #[error("{doing}: the target puts it off: {status}")]
    PutOff {
        /// The target.
        server: usize,
        /// The action that failed.
        doing: &'static str,
        /// The status that it answered last.
        status: Status,
    },
}

/// The time of each step of a recovery, ns.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct StepTimes {
    /// Connecting to all targets and reading the labels.
    pub connect: u64,
    /// Claiming the volume on all targets, which waits until the requests of a former owner have
    /// ended.
    pub claim: u64,
    /// Reading all lists.
    pub list: u64,
    /// Merging them into one order per stream, and deciding.
    pub decide: u64,
    /// Reading and saving the data that is about to be zeroed.
    pub save: u64,
    /// Zeroing fresh blocks beyond the prefixes.
    pub undo: u64,
    /// Flushing the drives.
    pub flush: u64,
    /// Recording the prefixes, and shortening the logs.
    pub settle: u64,
}

impl StepTimes {
    /// The time to which `phase` counts.
    fn time_of(&mut self, phase: Phase) -> &mut u64 {
        match phase {
            Phase::Ask | Phase::Claim | Phase::AskAgain | Phase::Claimed => &mut self.claim,
            Phase::List => &mut self.list,
            // In this pause the decision is reported, and the data that will be zeroed is saved.
            Phase::Decided => &mut self.save,
            Phase::Undo => &mut self.undo,
            Phase::Flush => &mut self.flush,
            Phase::Settle | Phase::Over => &mut self.settle,
        }
    }
}

/// The times of one target.
#[derive(Clone, Copy, Debug, Default)]
struct TargetState {
    /// When the target last answered, or, if later, when it got the first of the commands in
    /// flight, ns.
    last_progress: u64,
    /// The time before which nothing is sent, because the target has put a command off, ns.
    retry_at: u64,
    /// The time since which the target has put all commands off, ns.
    put_off_since: Option<u64>,
}

/// One running attempt; see the [module](self).
#[derive(Debug)]
pub struct RecoveryDriver {
    opening: Opening,
    /// The number of the attempt.
    attempt: u32,
    /// The limit for an answer, and for putting commands off, ns.
    timeout_ns: u64,
    targets: Vec<TargetState>,
    step_times: StepTimes,
    /// When the present phase began, ns.
    phase_began: u64,
    /// Whether the recovered seqs have been decided, and the time of the decision is not counted
    /// yet.
    decide_time_pending: bool,
}

impl RecoveryDriver {
    /// The driver of an attempt that begins at `now`. `attempt` is the number with which `opening`
    /// was made. A target may leave a command without an answer, or put commands off, for
    /// `timeout_ns` nanoseconds.
    #[must_use]
    pub fn new(opening: Opening, attempt: u32, timeout_ns: u64, now: u64) -> Self {
        let targets = alloc::vec![TargetState::default(); opening.servers()];
        let step_times = StepTimes::default();
        Self {
            opening,
            attempt,
            timeout_ns,
            targets,
            step_times,
            phase_began: now,
            decide_time_pending: false,
        }
    }

    /// The next command for a target, if one may be sent now. The caller sends it and reports its
    /// answer with [`on_answer`](Self::on_answer).
    pub fn next_command(&mut self, server: usize, now: u64) -> Option<(Ticket, Call)> {
        let state = self.targets.get_mut(server)?;
        if now < state.retry_at {
            return None;
        }
        let idle = self.opening.in_flight(server) == 0;
        let next = self.opening.next_command(server)?;
        if idle {
            state.last_progress = now;
        }
        Some(next)
    }

    /// Takes the answer to a command: its data, or the status of its failure. The answer to a
    /// command of an earlier attempt is dropped (trap T23).
    ///
    /// # Errors
    /// [`RecoveryError`]: the attempt has failed.
    pub fn on_answer(
        &mut self,
        server: usize,
        ticket: Ticket,
        answer: Result<&[u8], Status>,
        now: u64,
    ) -> Result<(), RecoveryError> {
        let before = self.opening.phase();
        let Some(state) = self.targets.get_mut(server) else { return Ok(()) };
        // Any answer shows that the target is reachable.
        state.last_progress = now;
        self.opening.on_answer(ticket, answer)?;
        if ticket.attempt == self.attempt {
            match self.opening.put_off(server) {
                Some(put_off) => {
                    let since = *state.put_off_since.get_or_insert(now);
                    if now.saturating_sub(since) > self.timeout_ns {
                        let (doing, status) = (before.action_name(), put_off.status);
                        return Err(RecoveryError::PutOff { server, doing, status });
                    }
                    let delay = RETRY_DELAY_NS_MIN << put_off.attempts.min(RETRY_DOUBLINGS_MAX);
                    state.retry_at = now.saturating_add(delay.min(RETRY_DELAY_NS_MAX));
                }
                None => state.put_off_since = None,
            }
        }
        if self.opening.phase() != before {
            self.count_time(before, now);
            // The decision follows the last list. Its time is counted separately.
            self.decide_time_pending = before == Phase::List;
        }
        Ok(())
    }

    /// Checks whether every target answers in time.
    ///
    /// # Errors
    /// A target has not answered for too long. The attempt has failed.
    pub fn check_timeouts(&mut self, now: u64) -> Result<(), RecoveryError> {
        for (server, state) in self.targets.iter().enumerate() {
            if self.opening.in_flight(server) > 0
                && now.saturating_sub(state.last_progress) > self.timeout_ns
            {
                let doing = self.opening.phase().action_name();
                return Err(RecoveryError::TimedOut { server, doing });
            }
        }
        Ok(())
    }

    /// The next time at which a call is due, ns. Then a command that was put off may be sent again
    /// ([`next_command`](Self::next_command)), or the limit for an answer has passed
    /// ([`check_timeouts`](Self::check_timeouts)).
    #[must_use]
    pub fn deadline(&self, now: u64) -> Option<u64> {
        let deadline_of = |(server, state): (usize, &TargetState)| {
            let retry = (state.retry_at > now).then_some(state.retry_at);
            let timeout = (self.opening.in_flight(server) > 0)
                .then(|| state.last_progress.saturating_add(self.timeout_ns).saturating_add(1));
            retry.into_iter().chain(timeout).min()
        };
        self.targets.iter().enumerate().filter_map(deadline_of).min()
    }

    /// Ends a [pause](Phase::is_pause). The time of the pause is counted separately.
    ///
    /// # Errors
    /// [`RecoveryError`]: the attempt has ended.
    pub fn end_pause(&mut self, now: u64) -> Result<(), RecoveryError> {
        self.count_decide_time(now);
        let phase = self.opening.phase();
        self.opening.end_pause()?;
        self.count_time(phase, now);
        Ok(())
    }

    /// Whether the commands of the present phase go over the drives queue.
    #[must_use]
    pub fn needs_drives(&self) -> bool {
        matches!(self.opening.phase(), Phase::Undo | Phase::Flush)
    }

    /// The phase.
    #[must_use]
    pub fn phase(&self) -> Phase {
        self.opening.phase()
    }

    /// The progress of the phase.
    #[must_use]
    pub fn progress(&self) -> Progress {
        self.opening.progress()
    }

    /// The findings so far.
    #[must_use]
    pub fn opening(&self) -> &Opening {
        &self.opening
    }

    /// The time of each step so far.
    #[must_use]
    pub fn step_times(&self) -> StepTimes {
        self.step_times
    }

    /// The result and the times, once the attempt is over.
    #[must_use]
    pub fn into_parts(self) -> (Opening, StepTimes) {
        (self.opening, self.step_times)
    }

    /// Counts the time of the decision. The decision reads no clock, so the caller reads the clock
    /// after it: `now`. If the caller does not call this in the pause that follows the decision,
    /// [`end_pause`](Self::end_pause) counts the time.
    pub fn count_decide_time(&mut self, now: u64) {
        if core::mem::take(&mut self.decide_time_pending) {
            self.step_times.decide += now.saturating_sub(self.phase_began);
            self.phase_began = now;
        }
    }

    /// Adds the time since the last count to that of `phase`.
    fn count_time(&mut self, phase: Phase, now: u64) {
        *self.step_times.time_of(phase) += now.saturating_sub(self.phase_began);
        self.phase_began = now;
    }
}

/// A command in the form that an association takes: its queue, the command and its data.
#[must_use]
pub fn command_of<P>(call: &Call) -> (ControlQueue, Sqe, Data<'_, P>) {
    let (queue, sqe, send, receive) = match call {
        Call::Admin { sqe, send, receive } => (ControlQueue::Admin, sqe, send, *receive),
        Call::Io { sqe, send, receive } => (ControlQueue::Drives, sqe, send, *receive),
    };
    let data = match (send.is_empty(), receive) {
        (false, _) => Data::Bytes(send),
        (true, 0) => Data::None,
        (true, len) => Data::Read(len as u32),
    };
    (queue, *sqe, data)
}

#[cfg(test)]
mod tests;

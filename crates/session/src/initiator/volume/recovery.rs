//! One attempt to recover a volume or some of its streams: the choice and the times of the commands
//! to each target, and the end of the attempt.
//!
//! [`Opening`] knows which commands are due. [`RecoveryDriver`] adds the times: a command that a
//! target has put off is sent again after a rest; a target that puts commands off for too long, or
//! owes an answer for too long, ends the attempt. An attempt that has ended can be begun anew with
//! the next number: the answers to its commands may still come, and the next attempt drops them
//! (T23).

use alloc::vec::Vec;

use riopipe_nvme::command::{Sqe, Status};

use crate::initiator::association::ControlQueue;
use crate::initiator::opening::{Call, Opening, OpeningError, Phase, Progress, Ticket};
use crate::initiator::queue_pair::Data;

/// The first pause after a target has put a command off, ns.
const REST_NS: u64 = 500_000;
/// The longest pause, ns.
const REST_NS_MAX: u64 = 20_000_000;
/// The most doublings of a pause.
const REST_DOUBLED_MAX: u32 = 6;

/// Why an attempt has ended. `server` counts the volume's targets.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum RecoveryError {
    /// The state on the targets does not allow it.
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
    fn of(&mut self, phase: Phase) -> &mut u64 {
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

#[derive(Clone, Copy, Debug, Default)]
struct TargetState {
    /// When the target last answered, or first got a command after it had nothing to do, ns.
    progress: u64,
    /// Nothing is sent before this time, because a command was put off, ns.
    rests_until: u64,
    /// The time since which it has put off all commands, ns.
    put_off_since: Option<u64>,
}

/// One running attempt; see the [module](self).
#[derive(Debug)]
pub struct RecoveryDriver {
    opening: Opening,
    attempt: u32,
    timeout_ns: u64,
    targets: Vec<TargetState>,
    steps: StepTimes,
    /// The start of the present step, ns.
    since: u64,
    /// The prefixes have been decided, and the time of that is not counted yet.
    deciding: bool,
}

impl RecoveryDriver {
    /// The driver of an attempt that begins at `now`. `attempt` is the number with which `opening`
    /// was made. A target may leave a command without an answer, or put commands off, for
    /// `timeout_ns` nanoseconds.
    #[must_use]
    pub fn new(opening: Opening, attempt: u32, timeout_ns: u64, now: u64) -> Self {
        let targets = alloc::vec![TargetState::default(); opening.servers()];
        let steps = StepTimes::default();
        Self { opening, attempt, timeout_ns, targets, steps, since: now, deciding: false }
    }

    /// The next command for a target, if one may be sent now. The caller sends it and reports its
    /// answer with [`done`](Self::done).
    pub fn next(&mut self, server: usize, now: u64) -> Option<(Ticket, Call)> {
        let state = self.targets.get_mut(server)?;
        if now < state.rests_until {
            return None;
        }
        let idle = self.opening.in_flight(server) == 0;
        let next = self.opening.next(server)?;
        if idle {
            state.progress = now;
        }
        Some(next)
    }

    /// A command has ended; `answer` has the data that came back. The answer to a command of an
    /// earlier attempt is dropped (T23).
    ///
    /// # Errors
    /// [`RecoveryError`]: the attempt has ended.
    pub fn done(
        &mut self,
        server: usize,
        ticket: Ticket,
        answer: Result<&[u8], Status>,
        now: u64,
    ) -> Result<(), RecoveryError> {
        let before = self.opening.phase();
        let Some(state) = self.targets.get_mut(server) else { return Ok(()) };
        // Any answer shows that the target is reachable.
        state.progress = now;
        self.opening.done(ticket, answer)?;
        if ticket.attempt == self.attempt {
            match self.opening.put_off(server) {
                Some(put_off) => {
                    let since = *state.put_off_since.get_or_insert(now);
                    if now.saturating_sub(since) > self.timeout_ns {
                        let (doing, status) = (before.doing(), put_off.status);
                        return Err(RecoveryError::PutOff { server, doing, status });
                    }
                    let rest = REST_NS << put_off.attempts.min(REST_DOUBLED_MAX);
                    state.rests_until = now.saturating_add(rest.min(REST_NS_MAX));
                }
                None => state.put_off_since = None,
            }
        }
        if self.opening.phase() != before {
            self.ends(before, now);
            // After the last list has arrived, the prefixes are decided. That time is counted by
            // itself.
            self.deciding = before == Phase::List;
        }
        Ok(())
    }

    /// Time has passed.
    ///
    /// # Errors
    /// A target has not answered for too long: the attempt has ended.
    pub fn timeout(&mut self, now: u64) -> Result<(), RecoveryError> {
        for (server, state) in self.targets.iter().enumerate() {
            if self.opening.in_flight(server) > 0
                && now.saturating_sub(state.progress) > self.timeout_ns
            {
                let doing = self.opening.phase().doing();
                return Err(RecoveryError::TimedOut { server, doing });
            }
        }
        Ok(())
    }

    /// The next time at which a call is due, ns: a command that was put off is sent again
    /// ([`next`](Self::next)), or an answer is owed for too long ([`timeout`](Self::timeout)).
    #[must_use]
    pub fn deadline(&self, now: u64) -> Option<u64> {
        let of = |(server, state): (usize, &TargetState)| {
            let rest = (state.rests_until > now).then_some(state.rests_until);
            let owed = (self.opening.in_flight(server) > 0)
                .then(|| state.progress.saturating_add(self.timeout_ns).saturating_add(1));
            rest.into_iter().chain(owed).min()
        };
        self.targets.iter().enumerate().filter_map(of).min()
    }

    /// Continues after a pause. The time of the pause is counted by itself.
    ///
    /// # Errors
    /// [`RecoveryError`]: the attempt has ended.
    pub fn go_on(&mut self, now: u64) -> Result<(), RecoveryError> {
        self.decided(now);
        let phase = self.opening.phase();
        self.opening.go_on()?;
        self.ends(phase, now);
        Ok(())
    }

    /// Whether the present step writes to drives: its commands go over the I/O queue.
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
    pub fn steps(&self) -> StepTimes {
        self.steps
    }

    /// The result and the times, once the attempt is over.
    #[must_use]
    pub fn finish(self) -> (Opening, StepTimes) {
        (self.opening, self.steps)
    }

    /// Notes that the prefixes have been decided, and counts the time of that. Deciding reads no
    /// clock, so the caller reads it afterwards: `now`. If this is not called in the pause that
    /// follows, [`go_on`](Self::go_on) does the same.
    pub fn decided(&mut self, now: u64) {
        if core::mem::take(&mut self.deciding) {
            self.steps.decide += now.saturating_sub(self.since);
            self.since = now;
        }
    }

    /// Counts the time since the last step under `phase`.
    fn ends(&mut self, phase: Phase, now: u64) {
        *self.steps.of(phase) += now.saturating_sub(self.since);
        self.since = now;
    }
}

/// The form of a command for an association.
#[must_use]
pub fn question<P>(call: &Call) -> (ControlQueue, Sqe, Data<'_, P>) {
    match call {
        Call::Admin { sqe, send, receive } => {
            let data = match (send.is_empty(), *receive) {
                (false, _) => Data::Bytes(send),
                (true, 0) => Data::None,
                (true, len) => Data::Read(len as u32),
            };
            (ControlQueue::Admin, *sqe, data)
        }
        Call::Io { sqe } => (ControlQueue::Drives, *sqe, Data::None),
    }
}

#[cfg(test)]
mod tests;

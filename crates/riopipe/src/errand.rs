//! An [`Opening`] on real connections: all targets at once, many commands at a time, one thread.

use std::sync::Arc;
use std::time::{Duration, Instant};

use riopipe_net::now_ns;
use riopipe_session::initiator::association::ControlQueue;
use riopipe_session::initiator::opening::{Call, Opening, OpeningError, Phase, Progress, Ticket};

use crate::drive_io::Drives;
use crate::error::CallError;
use crate::recovery::Steps;
use crate::stream::nanos;
use crate::target::{Answer, CallData, Signal, Target};

/// A target's two queues.
pub(crate) struct Lines<'a> {
    pub(crate) target: Arc<Target>,
    pub(crate) drives: &'a Drives,
}

/// Why an errand failed.
#[derive(Debug)]
pub(crate) enum ErrandError {
    /// A target can't be asked.
    Call { target: String, doing: &'static str, source: CallError },
    /// The targets' answers forbid it.
    Opening(OpeningError),
}

/// How long a command that was put off rests before it is sent again, at first and at most.
const REST_NS: u64 = 500_000;
const REST_NS_MAX: u64 = 20_000_000;

/// One errand on its way.
pub(crate) struct Errand<'a> {
    pub(crate) opening: Opening,
    lines: Vec<Lines<'a>>,
    /// Which association each target was asked over.
    numbers: Vec<u32>,
    signal: Arc<Signal>,
    timeout: Duration,
    states: Vec<State>,
    phase_began: Instant,
    pub(crate) steps: Steps,
}

#[derive(Clone, Copy, Default)]
struct State {
    /// When the target last answered, or was first asked after it had nothing to do, ns.
    progress: u64,
    /// Nothing goes out before this time, because a command was put off, ns.
    rests_until: u64,
    /// Since when it has put commands off without doing any, ns.
    put_off_since: Option<u64>,
}

impl<'a> Errand<'a> {
    pub(crate) fn new(opening: Opening, lines: Vec<Lines<'a>>, timeout: Duration) -> Self {
        let states = vec![State::default(); lines.len()];
        let numbers = lines.iter().map(|line| line.target.number()).collect();
        // All targets of a volume have the same.
        let signal = lines.first().map(|line| Arc::clone(line.target.signal()));
        let signal = signal.unwrap_or_default();
        let (phase_began, steps) = (Instant::now(), Steps::default());
        Self { opening, lines, numbers, signal, timeout, states, phase_began, steps }
    }

    /// Goes on until the next pause, or the end.
    pub(crate) fn run(&mut self, progress: &mut dyn FnMut(Progress)) -> Result<Phase, ErrandError> {
        let mut answers = Vec::new();
        let mut told = None;
        loop {
            let seen = self.signal.count();
            for at in 0..self.lines.len() {
                self.take(at, &mut answers)?;
            }
            for at in 0..self.lines.len() {
                self.send(at)?;
            }
            let now = self.opening.progress();
            if told != Some(now) {
                told = Some(now);
                progress(now);
            }
            let phase = self.opening.phase();
            if phase.is_pause() || phase == Phase::Over {
                return Ok(phase);
            }
            self.rest(seen);
        }
    }

    /// Goes on after a pause; what was done in it has taken its own time.
    pub(crate) fn go_on(&mut self) -> Result<(), ErrandError> {
        let phase = self.opening.phase();
        self.ends(phase);
        self.opening.go_on().map_err(ErrandError::Opening)
    }

    /// The connections, for what is to be done in a pause.
    pub(crate) fn drives(&self, server: usize) -> (&str, &Drives) {
        let line = &self.lines[server];
        (&line.target.name, line.drives)
    }

    /// Books the time since the last phase under `phase`.
    fn ends(&mut self, phase: Phase) {
        self.steps.add(phase, self.phase_began.elapsed());
        self.phase_began = Instant::now();
    }

    fn send(&mut self, at: usize) -> Result<(), ErrandError> {
        let (line, state) = (&mut self.lines[at], &mut self.states[at]);
        let fault = |doing| {
            let target = line.target.name.clone();
            move |source| ErrandError::Call { target, doing, source }
        };
        let now = now_ns();
        while now >= state.rests_until {
            let idle = self.opening.out(at) == 0;
            let Some((ticket, call)) = self.opening.next(at) else { break };
            if idle {
                state.progress = now;
            }
            let ticket = ticket.to_bits();
            let doing = doing(self.opening.phase());
            match call {
                Call::Admin { sqe, send, receive } => {
                    let data = match (send.is_empty(), receive) {
                        (false, _) => CallData::Bytes(&send),
                        (true, 0) => CallData::None,
                        (true, len) => CallData::Read(len as u32),
                    };
                    let asked = line.target.send(ControlQueue::Admin, ticket, sqe, data);
                    asked.map_err(fault(doing))?;
                }
                Call::Io { sqe } => {
                    let asked = line.target.send(ControlQueue::Drives, ticket, sqe, CallData::None);
                    asked.map_err(fault(doing))?;
                }
            }
        }
        Ok(())
    }

    /// Sleeps until something has come, or it is time to send again what was put off.
    fn rest(&self, seen: u64) {
        let now = now_ns();
        let again = self.states.iter().map(|state| state.rests_until).filter(|at| *at > now).min();
        let most = again.map_or(Duration::from_millis(200), |at| Duration::from_nanos(at - now));
        self.signal.wait(seen, most);
    }

    fn take(&mut self, at: usize, answers: &mut Vec<Answer>) -> Result<(), ErrandError> {
        let (line, state) = (&mut self.lines[at], &mut self.states[at]);
        let before = self.opening.phase();
        let fault = |target: &str, source| ErrandError::Call {
            target: target.into(),
            doing: doing(before),
            source,
        };
        let collected = line.target.collect(self.numbers[at], answers);
        collected.map_err(|source| fault(&line.target.name, source))?;
        let now = now_ns();
        if !answers.is_empty() {
            state.progress = now;
        }
        if self.opening.out(at) > 0 && now.saturating_sub(state.progress) > nanos(self.timeout) {
            return Err(fault(&line.target.name, CallError::TimedOut(self.timeout)));
        }
        for (user, cqe, page) in answers.drain(..) {
            // Of an errand before this one it may be, too: the machine knows its own (T23).
            let ticket = Ticket::from_bits(user);
            let status = cqe.status();
            let answer = if status.is_ok() { Ok(&page[..]) } else { Err(status) };
            let began = Instant::now();
            let phase = self.opening.phase();
            self.opening.done(ticket, answer).map_err(ErrandError::Opening)?;
            let state = &mut self.states[at];
            match self.opening.put_off(at) {
                Some(put_off) => {
                    let since = *state.put_off_since.get_or_insert(now);
                    if now.saturating_sub(since) > nanos(self.timeout) {
                        let source = CallError::Status(put_off.status);
                        return Err(fault(&self.lines[at].target.name, source));
                    }
                    let rest = REST_NS << put_off.attempts.min(6);
                    state.rests_until = now.saturating_add(rest.min(REST_NS_MAX));
                }
                None => state.put_off_since = None,
            }
            if self.opening.phase() != phase {
                if phase == Phase::List {
                    // The last list's arrival is followed by the decision.
                    let deciding = began.elapsed();
                    self.steps.decide += deciding;
                    self.steps.list += self.phase_began.elapsed().saturating_sub(deciding);
                    self.phase_began = Instant::now();
                } else {
                    self.ends(phase);
                }
            }
        }
        Ok(())
    }
}

fn doing(phase: Phase) -> &'static str {
    match phase {
        Phase::Ask | Phase::AskAgain => "asking for the volume's state",
        Phase::Claim | Phase::Claimed => "claiming the volume",
        Phase::List | Phase::Decided => "reading the ordering log",
        Phase::Undo => "zeroing what is beyond the prefix",
        Phase::Flush => "flushing a drive",
        Phase::Settle | Phase::Over => "recording the prefix in the log",
    }
}

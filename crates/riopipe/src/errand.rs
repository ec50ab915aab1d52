//! An [`Opening`] on real connections: all targets at once, many commands at a time, one thread.

use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use riopipe_net::{Interest, Poller, now_ns};
use riopipe_session::initiator::opening::{Call, Opening, OpeningError, Phase, Progress, Ticket};

use crate::association::{Answer, CallData, Caller, blame};
use crate::error::CallError;
use crate::recovery::Steps;
use crate::shared::lock;
use crate::stream::nanos;

/// A target's two queues.
pub(crate) struct Lines<'a> {
    pub(crate) target: String,
    pub(crate) admin: Arc<Mutex<Caller>>,
    pub(crate) drives: &'a mut Caller,
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
    poller: Poller,
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
    /// Whether the poller watches for room to send, on the admin queue and the other.
    wants_write: [bool; 2],
}

impl<'a> Errand<'a> {
    pub(crate) fn new(
        opening: Opening,
        lines: Vec<Lines<'a>>,
        timeout: Duration,
    ) -> Result<Self, ErrandError> {
        let broken = |_| ErrandError::Call {
            target: lines.first().map(|line| line.target.clone()).unwrap_or_default(),
            doing: "watching the connections",
            source: CallError::Nonsense("this process has no descriptors left"),
        };
        let poller = Poller::new().map_err(broken)?;
        for (at, line) in lines.iter().enumerate() {
            let admin = lock(&line.admin);
            for (which, caller) in [&*admin, &*line.drives].into_iter().enumerate() {
                let (socket, _) = caller.waits_for();
                poller.add(socket, token(at, which), Interest::Read).map_err(broken)?;
            }
        }
        let states = vec![State::default(); lines.len()];
        let (phase_began, steps) = (Instant::now(), Steps::default());
        Ok(Self { opening, lines, poller, timeout, states, phase_began, steps })
    }

    /// Goes on until the next pause, or the end.
    pub(crate) fn run(&mut self, progress: &mut dyn FnMut(Progress)) -> Result<Phase, ErrandError> {
        let mut answers = Vec::new();
        let mut told = None;
        loop {
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
            self.rest();
            for at in 0..self.lines.len() {
                self.take(at, &mut answers)?;
            }
        }
    }

    /// Goes on after a pause; what was done in it has taken its own time.
    pub(crate) fn go_on(&mut self) -> Result<(), ErrandError> {
        let phase = self.opening.phase();
        self.ends(phase);
        self.opening.go_on().map_err(ErrandError::Opening)
    }

    /// The connections, for what is to be done in a pause.
    pub(crate) fn drives(&mut self, server: usize) -> (&str, &mut Caller) {
        let line = &mut self.lines[server];
        (&line.target, line.drives)
    }

    /// Books the time since the last phase under `phase`.
    fn ends(&mut self, phase: Phase) {
        self.steps.add(phase, self.phase_began.elapsed());
        self.phase_began = Instant::now();
    }

    fn send(&mut self, at: usize) -> Result<(), ErrandError> {
        let (line, state) = (&mut self.lines[at], &mut self.states[at]);
        let fault = |doing| {
            let target = line.target.clone();
            move |source| ErrandError::Call { target, doing, source }
        };
        let now = now_ns();
        let mut admin = lock(&line.admin);
        admin.keep_alive().map_err(fault("keeping the connection alive"))?;
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
                    admin.send(ticket, sqe, data).map_err(fault(doing))?;
                }
                Call::Io { sqe } => {
                    line.drives.send(ticket, sqe, CallData::None).map_err(fault(doing))?;
                }
            }
        }
        for (which, caller) in [&mut *admin, &mut *line.drives].into_iter().enumerate() {
            // What answers came meanwhile stays for `take`.
            caller.push().map_err(fault(doing(self.opening.phase())))?;
            let (socket, wants_write) = caller.waits_for();
            if wants_write != state.wants_write[which] {
                state.wants_write[which] = wants_write;
                let interest = if wants_write { Interest::Both } else { Interest::Read };
                // It was added at the start, so this can't fail.
                let _ = self.poller.modify(socket, token(at, which), interest);
            }
        }
        Ok(())
    }

    /// Sleeps until something has come, or it is time to send again what was put off.
    fn rest(&self) {
        let now = now_ns();
        let again = self.states.iter().map(|state| state.rests_until).filter(|at| *at > now).min();
        let most = again.map_or(Duration::from_millis(200), |at| Duration::from_nanos(at - now));
        let mut events = Vec::new();
        if let Err(error) = self.poller.wait(&mut events, Some(most)) {
            tracing::error!(%error, "cannot sleep until something arrives; looking instead");
        }
    }

    fn take(&mut self, at: usize, answers: &mut Vec<Answer>) -> Result<(), ErrandError> {
        let (line, state) = (&mut self.lines[at], &mut self.states[at]);
        let before = self.opening.phase();
        let fault = |target: &str, source| ErrandError::Call {
            target: target.into(),
            doing: doing(before),
            source,
        };
        // When the association is lost, so is its other queue, and it knows why.
        let collected = lock(&line.admin).collect(answers);
        let collected = collected.and_then(|()| line.drives.collect(answers));
        collected.map_err(|source| fault(&line.target, blame(&line.admin, source)))?;
        let now = now_ns();
        if !answers.is_empty() {
            state.progress = now;
        }
        if self.opening.out(at) > 0 && now.saturating_sub(state.progress) > nanos(self.timeout) {
            return Err(fault(&line.target, CallError::TimedOut(self.timeout)));
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
                        return Err(fault(&self.lines[at].target, source));
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

fn token(at: usize, which: usize) -> u64 {
    (2 * at + which) as u64
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

//! The state that every part of the simulated cluster needs: the clock, the planned events, the
//! network, the oracle, and a trace of the events.

use std::cmp::Reverse;
use std::collections::BinaryHeap;
use std::sync::{Arc, Mutex, PoisonError};

use riopipe_order::attribute::VolumeId;

use crate::block::BlockBytes;
use crate::machine::{FIRST_GENERATION, VOLUME, VOLUME_NAME};
use crate::network::{Chunk, ClientEnd, Direction, Network};
use crate::oracle::{LogHistory, Oracle, Where};
use crate::rng::Rng;
use crate::scenario::{GroupKind, LogSpec, Scenario};
use crate::world::second_volume::Side;

/// Nanoseconds of a microsecond.
pub const US: u64 = 1_000;
/// Nanoseconds of a millisecond.
pub const MS: u64 = 1_000_000;

/// A planned event.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Ev {
    /// Data arrives over a connection.
    Arrive {
        /// The connection.
        conn: usize,
        /// Toward the target.
        up: bool,
    },
    /// A drive may finish operations.
    Drive {
        /// The machine.
        machine: usize,
        /// Its drive.
        drive: usize,
    },
    /// A core of a target is woken: for its deadline, or for input that has arrived while it was
    /// busy.
    WakeCore {
        /// The machine.
        machine: usize,
        /// Its core.
        core: usize,
    },
    /// A socket of a target has space again.
    Space {
        /// The machine.
        machine: usize,
        /// The connection.
        conn: usize,
    },
    /// A machine's target is started.
    StartMachine(usize),
    /// An initiator is started.
    StartClient(usize),
    /// The clocks of an initiator are checked.
    TickClient {
        /// The initiator.
        client: usize,
        /// The number of its process.
        incarnation: u32,
    },
    /// A deadline of an initiator for one of its targets is due.
    WakeClient {
        /// The initiator.
        client: usize,
        /// The number of its process.
        incarnation: u32,
        /// The target.
        server: u16,
    },
    /// A thread of an initiator that drives a stream wakes.
    WakeStreams {
        /// The initiator.
        client: usize,
        /// The number of its process.
        incarnation: u32,
    },
    /// A stream does its next step.
    Act {
        /// The initiator.
        client: usize,
        /// The number of its process.
        incarnation: u32,
        /// The stream.
        stream: u16,
    },
    /// A machine that was cut off is reachable again.
    Heal,
    /// A plain host does its next step.
    WakePlainHost(usize),
}

/// The trace is bounded, so that a run that loops for ever does not fill the memory.
const TRACE_LINES_MAX: usize = 1 << 20;

/// A trace of the events, line by line. It remains after a run that panics or never ends.
#[derive(Clone, Debug, Default)]
pub struct Trace(Arc<Mutex<Vec<String>>>);

impl Trace {
    fn push(&self, line: String) {
        let mut lines = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        if lines.len() < TRACE_LINES_MAX {
            lines.push(line);
        }
    }

    /// Takes all lines so far out of the trace.
    #[must_use]
    pub fn take(&self) -> Vec<String> {
        core::mem::take(&mut *self.0.lock().unwrap_or_else(PoisonError::into_inner))
    }
}

/// The state that every part of the simulated cluster needs.
pub struct Core {
    /// The time, ns.
    pub now: u64,
    heap: BinaryHeap<Reverse<(u64, u64, Ev)>>,
    order: u64,
    /// The number of events so far.
    pub events: u64,
    /// All connections of the run.
    pub net: Network,
    /// The oracle.
    pub oracle: Oracle,
    /// The random numbers for the initiators.
    pub rng: Rng,
    /// The trace of the events, if one is wanted.
    trace: Option<Trace>,
    /// The scenario.
    pub scenario: Scenario,
    /// The volume's id.
    pub id: VolumeId,
    /// The volume's name.
    pub name: &'static str,
    /// The place of each block of the volume.
    pub map: Vec<Where>,
    /// For each stream, its steps and the number of steps that have begun.
    pub steps: Vec<(Vec<usize>, usize)>,
    /// The generation on the volume's labels.
    pub label_generation: u32,
    /// A program outside of the events uses the volume.
    pub program_runs: bool,
    /// The number of calls of that program, and the number of events at the last one.
    pub calls: (u32, u64),
    /// The same for the groups of a file system, by [`GroupKind`].
    pub groups: [(u32, u64); 5],
    /// Faults have stopped: everything must end now.
    pub faults_stopped: bool,
    /// The number of recoveries that have begun, and the number of events when the last one began.
    pub recoveries: (u32, u64),
    /// The number of replays that have begun, and the number of events when the last one began.
    pub replays: (u32, u64),
    /// The number of requests to targets to zero blocks, and the number of events at the last one.
    pub undos: (u32, u64),
    /// The number of tags given so far.
    pub tags: u64,
    /// The histories of the logs of records, in the order of the scenario's logs.
    pub logs: Vec<LogHistory>,
    /// The bytes of the blocks of the logs of records.
    pub block_bytes: BlockBytes,
    spare: Vec<u64>,
}

impl Core {
    /// The state at the beginning of a run.
    #[must_use]
    pub fn new(scenario: Scenario, map: Vec<Where>, trace: Option<Trace>) -> Self {
        let mut rng = Rng::new(scenario.seed);
        let net = Network::new(scenario.net, rng.fork(0));
        let oracle = Oracle::new(&scenario, &map);
        let steps = Self::steps_of(&scenario);
        let logs = scenario.logs.iter().map(|_| LogHistory::default()).collect();
        Self {
            id: VOLUME,
            name: VOLUME_NAME,
            now: MS,
            heap: BinaryHeap::new(),
            order: 0,
            events: 0,
            net,
            oracle,
            rng: rng.fork(1),
            trace,
            scenario,
            map,
            steps,
            label_generation: FIRST_GENERATION,
            program_runs: false,
            calls: (0, 0),
            groups: [(0, 0); 5],
            faults_stopped: false,
            recoveries: (0, 0),
            replays: (0, 0),
            undos: (0, 0),
            tags: 0,
            logs,
            block_bytes: BlockBytes::default(),
            spare: Vec::new(),
        }
    }

    /// Whether the targets keep a log of the volume.
    #[must_use]
    pub const fn is_logged(&self) -> bool {
        self.scenario.volume.engine.is_logged()
    }

    /// The log of records that a stream of this volume keeps, if it keeps one.
    #[must_use]
    pub fn log_of(&self, stream: u16) -> Option<usize> {
        // The second volume has no log of records.
        let is_of_stream = |log: &LogSpec| log.stream == stream && self.id == VOLUME;
        self.scenario.logs.iter().position(is_of_stream)
    }

    /// For each stream, its steps. None has begun.
    pub(crate) fn steps_of(scenario: &Scenario) -> Vec<(Vec<usize>, usize)> {
        let mut steps = vec![(Vec::new(), 0); usize::from(scenario.volume.streams)];
        for (at, step) in scenario.steps.iter().enumerate() {
            if let Some((steps, _)) = steps.get_mut(usize::from(step.stream)) {
                steps.push(at);
            }
        }
        steps
    }

    /// Exchanges this volume and the volume in `side`.
    pub(crate) fn swap(&mut self, side: &mut Side) {
        core::mem::swap(&mut self.id, &mut side.id);
        core::mem::swap(&mut self.name, &mut side.name);
        core::mem::swap(&mut self.oracle, &mut side.oracle);
        core::mem::swap(&mut self.map, &mut side.map);
        core::mem::swap(&mut self.steps, &mut side.steps);
        core::mem::swap(&mut self.scenario.volume, &mut side.volume);
        core::mem::swap(&mut self.scenario.steps, &mut side.list);
        core::mem::swap(&mut self.label_generation, &mut side.label_generation);
    }

    /// Plans an event for a time.
    pub fn at(&mut self, time: u64, ev: Ev) {
        self.order += 1;
        self.heap.push(Reverse((time.max(self.now), self.order, ev)));
    }

    /// Plans an event after a delay.
    pub fn after(&mut self, delay: u64, ev: Ev) {
        self.at(self.now + delay, ev);
    }

    /// The next event. Advances the clock to it.
    pub fn next_event(&mut self) -> Option<Ev> {
        let Reverse((time, _, ev)) = self.heap.pop()?;
        self.now = time;
        self.events += 1;
        Some(ev)
    }

    /// Notes that the program on the volume makes a call.
    pub fn note_call(&mut self) {
        self.calls = (self.calls.0 + 1, self.events);
    }

    /// Notes that a file system submits a group.
    pub fn note_group(&mut self, kind: GroupKind) {
        let groups = &mut self.groups[kind as usize];
        *groups = (groups.0 + 1, self.events);
    }

    /// Sends bytes over a connection.
    pub fn send(&mut self, conn: usize, direction: Direction, bytes: Vec<u8>) {
        let mut at = core::mem::take(&mut self.spare);
        self.net.send(conn, direction, bytes, self.now, &mut at);
        for time in at.drain(..) {
            self.at(time, Ev::Arrive { conn, up: direction == Direction::Up });
        }
        self.spare = at;
    }

    /// The time until the next attempt to connect, ns.
    pub fn retry(&mut self) -> u64 {
        self.rng.below(u64::from(self.scenario.client.retry_us) * US + 1)
    }

    /// Opens a connection to a machine. Whether the machine answers is known later.
    pub fn connect(&mut self, end: ClientEnd, machine: usize) -> usize {
        let conn = self.net.open(end, machine);
        let time = self.net.put(conn, Direction::Up, Chunk::Open, self.now);
        self.at(time, Ev::Arrive { conn, up: true });
        conn
    }

    /// Ends one direction of a connection.
    pub fn end(&mut self, conn: usize, direction: Direction) {
        if let Some(time) = self.net.end(conn, direction, self.now) {
            self.at(time, Ev::Arrive { conn, up: direction == Direction::Up });
        }
    }

    /// Refuses a connection whose other end is gone: the initiator learns of it.
    pub fn refuse(&mut self, conn: usize) {
        let time = self.net.refuse(conn, self.now);
        self.at(time, Ev::Arrive { conn, up: false });
    }

    /// Whether events are traced.
    #[must_use]
    pub const fn is_traced(&self) -> bool {
        self.trace.is_some()
    }

    /// Adds a line to the trace, if one is wanted.
    pub fn trace(&mut self, what: impl FnOnce() -> String) {
        if let Some(trace) = &self.trace {
            let us = self.now / US;
            trace.push(format!("{:>7} {:>9}.{:03} us  {}", self.events, us, self.now % US, what()));
        }
    }
}

//! Runs a scenario on the modelled drive, with or without a power cut, and asks the oracle.

use riopipe_model::ssd::{Command, Model, PageList, QueueId};
use riopipe_order::block_device::Done;
use riopipe_order::write_order::{DriveOrder, EpochId, EpochWrite, WriteOrder};

use crate::names::Names;
use crate::oracle::Oracle;
use crate::scenario::{Act, BLOCKS, STREAMS, Scenario};

/// Longer than any chain of operations of a scenario takes, in ns.
const LONG: u64 = 1_000_000_000_000;

/// A run of a scenario.
struct World<'a> {
    scenario: &'a Scenario,
    model: Model<Names>,
    queue: QueueId,
    oracle: Oracle,
    /// Number of writes so far, in the order of the scenario.
    writes: usize,
    now: u64,
}

/// Counts of a run: a test of loss without a loss would prove nothing.
#[derive(Debug, Default, Clone, Copy)]
pub(crate) struct Seen {
    pub(crate) lost: u64,
    pub(crate) kept: u64,
    pub(crate) landed: u64,
    /// Moments at which operations waited for others.
    pub(crate) waited: u64,
    pub(crate) failed: u64,
}

impl Seen {
    pub(crate) fn add(&mut self, other: Seen) {
        self.lost += other.lost;
        self.kept += other.kept;
        self.landed += other.landed;
        self.waited += other.waited;
        self.failed += other.failed;
    }
}

/// Runs a scenario to its end, and with a power cut at each of its steps.
///
/// # Errors
/// The promise that the drive has broken.
pub(crate) fn check(scenario: &Scenario) -> Result<Seen, String> {
    let mut seen = Seen::default();
    for steps in 0..=scenario.acts.len() {
        seen.add(run(scenario, steps, true).map_err(|error| format!("cut at {steps}: {error}"))?);
    }
    seen.add(run(scenario, scenario.acts.len(), false)?);
    Ok(seen)
}

fn run(scenario: &Scenario, steps: usize, cut: bool) -> Result<Seen, String> {
    let names = Names::new(BLOCKS, scenario.failing);
    let mut model = Model::with_order(scenario.profile, scenario.order, names, scenario.seed);
    let queue = model.open_queue();
    if scenario.order.kind == DriveOrder::Epochs {
        for stream in STREAMS {
            let first = EpochId { stream, epoch: scenario.first_epoch as u16 };
            model.submit(0, queue, 0, Command::StartStream { first });
        }
        model.advance(LONG);
        model.take_done(queue, &mut Vec::new());
    }
    let writes = scenario.acts.iter().filter_map(|act| match act {
        Act::Write(write) => Some(write.clone()),
        Act::Flush | Act::FlushEpochs { .. } | Act::Wait { .. } => None,
    });
    let oracle = Oracle::new(scenario, writes.collect());
    let mut world = World { scenario, model, queue, oracle, writes: 0, now: LONG };
    let mut seen = Seen::default();
    for (op, act) in (0..).zip(&scenario.acts[..steps]) {
        world.act(op, act);
        seen.failed += world.take_done()?;
        seen.waited += u64::from(world.model.has_waiting());
    }
    if cut {
        world.cut(&mut seen)?;
    } else {
        world.end(&mut seen)?;
    }
    Ok(seen)
}

/// The numbers of operations: a write has its place among the writes, a FLUSH has this and its
/// place among the acts.
const FLUSHES: u64 = 1 << 32;

impl World<'_> {
    fn act(&mut self, op: u64, act: &Act) {
        let op = FLUSHES + op;
        let command = match act {
            Act::Write(write) => {
                let name = self.writes as u32 + 1;
                let pages = PageList::Many(vec![name; write.blocks as usize].into());
                self.oracle.submit_write(self.writes);
                self.writes += 1;
                let command = Command::Write { lba: write.lba, pages, order: write.order() };
                return self.model.submit(self.now, self.queue, u64::from(name) - 1, command);
            }
            Act::Flush => {
                self.oracle.submit_flush(op, None);
                Command::Flush
            }
            Act::FlushEpochs { stream, before } => {
                self.oracle.submit_flush(op, Some((*stream, *before)));
                let before = EpochId { stream: *stream, epoch: *before as u16 };
                Command::FlushEpochs { before }
            }
            Act::Wait { ns } => {
                self.now += ns;
                return self.model.advance(self.now);
            }
        };
        self.model.submit(self.now, self.queue, op, command);
    }

    /// Passes completions to the oracle. Returns the number of failures.
    fn take_done(&mut self) -> Result<u64, String> {
        let mut done = Vec::new();
        self.model.take_done(self.queue, &mut done);
        let mut failed = 0;
        for Done { op, result } in done {
            if let Err(error) = &result
                && self.scenario.failing.is_none()
            {
                return Err(format!("{op} was refused: {error}"));
            }
            failed += u64::from(result.is_err());
            match op {
                FLUSHES.. => self.oracle.complete_flush(op, result.is_err())?,
                write => self.oracle.complete_write(write as usize, result.is_err()),
            }
        }
        Ok(failed)
    }

    fn cut(&mut self, seen: &mut Seen) -> Result<(), String> {
        let cut = self.model.power_cut(self.now, self.scenario.seed);
        let mut done = Vec::new();
        self.model.take_done(self.queue, &mut done);
        if done.len() as u64 != cut.in_flight || self.model.has_waiting() {
            return Err("an operation in flight was not answered".into());
        }
        seen.lost += cut.blocks_lost;
        seen.kept += cut.blocks_kept;
        seen.landed += cut.blocks_landed;
        let blocks = self.model.pages().blocks.clone();
        self.oracle.check_cut(&blocks)?;
        self.model.power_on();
        let again = self.model.power_cut(self.now, !self.scenario.seed);
        if (again.blocks_lost, again.blocks_landed) != (0, 0) || self.model.pages().blocks != blocks
        {
            return Err("the result of a power cut is not durable".into());
        }
        self.model.power_on();
        self.begin_anew()
    }

    /// After a power cut, streams begin with epoch 0.
    fn begin_anew(&mut self) -> Result<(), String> {
        if self.scenario.order.kind != DriveOrder::Epochs {
            return Ok(());
        }
        let id = |epoch| EpochId { stream: STREAMS[1], epoch };
        let write = EpochWrite { own: id(0), follower: None, barrier: true };
        let lba = u64::from(self.scenario.failing == Some(0));
        let (pages, order) = (PageList::One(7), WriteOrder::Epochs(write));
        let now = self.now;
        self.model.submit(now, self.queue, 1, Command::FlushEpochs { before: id(1) });
        self.model.submit(now, self.queue, 2, Command::Write { lba, pages, order });
        self.model.advance(now + LONG);
        let mut done = Vec::new();
        self.model.take_done(self.queue, &mut done);
        match &done[..] {
            [first, second] if first.result.is_ok() && second.result.is_ok() => Ok(()),
            _ => Err(format!("after a power cut: {done:?}")),
        }
    }

    /// Waits until everything has completed.
    fn end(&mut self, seen: &mut Seen) -> Result<(), String> {
        self.now += LONG;
        self.model.advance(self.now);
        seen.failed += self.take_done()?;
        let blocks = self.model.pages().blocks.clone();
        self.oracle.check_end(&blocks)
    }
}

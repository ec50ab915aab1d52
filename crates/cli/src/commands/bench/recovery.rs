//! `rio bench recovery`: the time to recover full logs.

use std::time::{Duration, Instant};

use riopipe::{ConnectOptions, OpenOptions, Recovery, StreamOptions, Volume};
use riopipe_lab::{
    figures::file_system::RecoveryTimes,
    full_log::{self, Place},
    machine::Machine,
    stats::Estimate,
    table::{Align, Table},
    terminal::{Colour, Terminal},
    units,
};
use serde::Serialize;

use super::replay::{self, Replay};
use crate::{
    args::bench::Recovery as Args,
    connect::{open_failure, stream_failure},
    failure::{Code, Failure},
    interrupt::Interrupt,
    output::{Output, Report},
    own_targets::{OwnTargets, Plan, file_log},
    progress::Progress,
};

/// Number of blocks of each drive that entries may name.
const BLOCKS: u64 = 128 << 10;
/// The paper's figures, ms (EuroSys '23, §6.5).
const PAPER: Paper = Paper { reconstruct_ms: 55.0, undo_ms: 125.0 };

pub(in crate::commands) fn measure(
    args: &Args,
    output: &Output,
    interrupt: &Interrupt,
) -> Result<Measured, Failure> {
    let machine = Machine::this();
    let mut own = OwnTargets::start(&Plan {
        volume: "recovery",
        targets: args.targets,
        drives: args.drives,
        drive: args.drive.clone(),
        log: file_log(args.log_size),
        streams: args.streams,
        ..Plan::default()
    })?;
    let progress = Progress::steps(output, "", 2 * u64::from(args.rounds));
    let mut rounds = Vec::new();
    for round in 0..args.rounds {
        interrupt.check()?;
        progress.set_message(format!("crash and recovery {}", round + 1));
        rounds.push(once(&mut own, args)?);
        progress.step();
    }
    drop(own);
    let mut own = replay::targets(args)?;
    let mut replays = Vec::new();
    for round in 0..args.rounds {
        interrupt.check()?;
        progress.set_message(format!("crash of the targets and replay {}", round + 1));
        replays.push(replay::once(&mut own, args)?);
        progress.step();
    }
    drop(progress);
    Ok(Measured::new(machine, args, &rounds, &replays))
}

struct Round {
    total: Duration,
    recovery: Recovery,
    entries: u64,
}

fn once(own: &mut OwnTargets, args: &Args) -> Result<Round, Failure> {
    let options = OpenOptions {
        connect: ConnectOptions { loss_timeout: Duration::ZERO, ..ConnectOptions::default() },
        ..OpenOptions::default()
    };
    let open = |own: &OwnTargets| {
        Volume::open(own.volume(), own.members(), &options).map_err(|error| open_failure(&error))
    };
    // An owner that the targets have recorded, and that is gone when they come back.
    let (owner, _) = open(own)?;
    let mut entries = 0;
    own.killed(|logs| {
        for (target, log) in (0..).zip(logs) {
            let (targets, drives) = (args.targets, args.drives);
            let place = Place { target, targets, drives, blocks: BLOCKS };
            entries += full_log::fill(log, place).map_err(|error| {
                Failure::new(Code::Failed, "can't fill an ordering log").because(&error)
            })?;
        }
        Ok(())
    })?;
    drop(owner);

    let begun = Instant::now();
    let (volume, recovery) = open(own)?;
    let streams = (0..args.streams)
        .map(|id| volume.stream(id as u16, &StreamOptions::default()))
        .collect::<Result<Vec<_>, _>>()
        .map_err(|error| stream_failure(&error))?;
    let total = begun.elapsed();

    let found: u64 = recovery.streams.iter().map(|stream| u64::from(stream.found)).sum();
    let kept: u64 = recovery.streams.iter().map(|stream| stream.kept).sum();
    if found != entries || kept != 0 {
        let what = format!("{entries} entries were to be undone; {found} were found, {kept} kept");
        return Err(Failure::new(Code::Differs, what));
    }
    for stream in streams {
        stream.close().map_err(|error| Failure::storage(&error))?;
    }
    volume.close().map_err(|error| Failure::storage(&error))?;
    Ok(Round { total, recovery, entries })
}

#[derive(Clone, Copy, Debug, Serialize)]
struct Paper {
    reconstruct_ms: f64,
    undo_ms: f64,
}

/// The result of the measurement.
#[derive(Debug, Serialize)]
pub(in crate::commands) struct Measured {
    schema: &'static str,
    machine: Machine,
    streams: u32,
    targets: u32,
    drives: u32,
    drive: String,
    log_bytes: u64,
    rounds: usize,
    /// Number of log entries on all targets; each is one 4 KiB write that is undone.
    entries: u64,
    /// Time from the first connection until every stream can be written again: median.
    total_ms: f64,
    total_ms_interval: [f64; 2],
    /// Time to read all lists and merge them into one order per stream: median.
    reconstruct_ms: f64,
    /// Time to zero the blocks beyond the prefixes, and to flush: median.
    undo_ms: f64,
    /// Time to shorten the logs: median.
    settle_ms: f64,
    /// Time to connect, claim, read labels and bind the streams: median of the rest.
    other_ms: f64,
    /// Specification of the drives of the replay.
    replay_drive: String,
    /// The requests of a replay: median.
    replayed: u64,
    /// Time from the start of the crashed targets until all that was submitted is durable: median.
    replay_ms: f64,
    replay_ms_interval: [f64; 2],
    paper: Paper,
}

impl Measured {
    /// The times, and the number of entries that were undone.
    pub(in crate::commands) fn times(&self) -> (RecoveryTimes, u64) {
        let times = RecoveryTimes {
            reconstruct_ms: self.reconstruct_ms,
            undo_ms: self.undo_ms,
            other_ms: self.settle_ms + self.other_ms,
        };
        (times, self.entries)
    }

    /// The time of a replay, and the number of its requests.
    pub(in crate::commands) const fn replay(&self) -> (f64, u64) {
        (self.replay_ms, self.replayed)
    }

    fn new(machine: Machine, args: &Args, rounds: &[Round], replays: &[Replay]) -> Self {
        // There is at least one round.
        let estimate =
            |samples: &[f64]| Estimate::of(samples).map_or([0.0; 3], |e| [e.value, e.low, e.high]);
        let median = |of: &dyn Fn(&Round) -> Duration| {
            let samples: Vec<f64> = rounds.iter().map(|r| of(r).as_secs_f64() * 1e3).collect();
            estimate(&samples)
        };
        let times: Vec<f64> = replays.iter().map(|r| r.time.as_secs_f64() * 1e3).collect();
        let requests: Vec<f64> = replays.iter().map(|r| r.requests as f64).collect();
        let replay = estimate(&times);
        let reconstruct = |r: &Round| r.recovery.steps.list + r.recovery.steps.decide;
        let undo = |r: &Round| r.recovery.steps.undo + r.recovery.steps.flush;
        let settle = |r: &Round| r.recovery.steps.settle;
        let other = |r: &Round| r.total.saturating_sub(reconstruct(r) + undo(r) + settle(r));
        let total = median(&|r| r.total);
        Self {
            schema: "rio-bench-recovery/1",
            machine,
            streams: args.streams,
            targets: args.targets,
            drives: args.drives,
            drive: args.drive.clone(),
            log_bytes: args.log_size,
            rounds: rounds.len(),
            entries: rounds.first().map_or(0, |r| r.entries),
            total_ms: total[0],
            total_ms_interval: [total[1], total[2]],
            reconstruct_ms: median(&reconstruct)[0],
            undo_ms: median(&undo)[0],
            settle_ms: median(&settle)[0],
            other_ms: median(&other)[0],
            replay_drive: args.replay_drive.clone(),
            replayed: estimate(&requests)[0] as u64,
            replay_ms: replay[0],
            replay_ms_interval: [replay[1], replay[2]],
            paper: PAPER,
        }
    }
}

impl Report for Measured {
    fn text(&self, terminal: &Terminal) -> String {
        let mut table = Table::new(&[
            ("step", Align::Left),
            ("median ms", Align::Right),
            ("paper ms", Align::Right),
        ]);
        let mut row = |step: &str, ms: f64, paper: Option<f64>| {
            let paper = paper.map_or_else(|| "-".into(), |ms| format!("{ms:.0}"));
            table.row([step.to_owned(), format!("{ms:.1}"), paper]);
        };
        row("reconstruct the order", self.reconstruct_ms, Some(self.paper.reconstruct_ms));
        row("undo and flush", self.undo_ms, Some(self.paper.undo_ms));
        row("shorten the logs", self.settle_ms, None);
        row("connect, claim, bind", self.other_ms, None);
        let paper = self.paper.reconstruct_ms + self.paper.undo_ms;
        row("total", self.total_ms, Some(paper));
        format!(
            "{} entries in {} full logs of {}, {} streams, {} drives ({}); all undone\n\n{}\n\
             Replay to the targets, which have crashed alone: {:.1} ms from their start until all is durable, \
             {} requests sent again ({})\n{}",
            self.entries,
            self.targets,
            units::bytes(self.log_bytes),
            self.streams,
            self.targets * self.drives,
            self.drive,
            table.render(terminal),
            self.replay_ms,
            self.replayed,
            self.replay_drive,
            terminal.paint(
                Colour::Grey,
                &format!("medians of {} rounds; {}\n", self.rounds, self.machine.line())
            ),
        )
    }
}

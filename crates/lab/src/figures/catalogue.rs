//! The figures: what each one asks, and what is run for it.

mod barrier;
mod horae;
mod opimq;
pub mod program;
mod rio;

use riopipe_order::engine::EngineKind;
use serde::Serialize;

use self::program::Program;
use crate::access::Access;
use crate::workload::{Pattern, Shape, Workload};

/// A figure that can be measured.
#[derive(Clone, Copy, Debug, Serialize)]
pub struct Entry {
    /// Its name on the command line.
    pub id: &'static str,
    /// Its title.
    pub title: &'static str,
    /// The paper and its number there.
    pub source: &'static str,
    /// The question that it answers.
    pub question: &'static str,
    /// The runs.
    #[serde(skip)]
    pub experiment: Experiment,
}

/// The runs of a figure.
#[derive(Clone, Copy, Debug)]
pub enum Experiment {
    /// Ordered writes on a volume.
    Block(Block),
    /// A load on the file system.
    FileSystem(FileSystem),
    /// The writes of a program on the file system.
    Program(Program),
    /// The commands at the drive during ordered writes, over time.
    QueueOverTime(QueueOverTime),
    /// The recovery of full logs.
    Recovery,
}

/// The commands at the drive during ordered writes of one thread, over time.
#[derive(Clone, Copy, Debug)]
pub struct QueueOverTime {
    /// The drive and the contenders. There are no values of an axis.
    pub block: Block,
    /// The contender that waits for each write.
    pub waits: &'static str,
    /// The one that is compared with it.
    pub ordered: &'static str,
    /// The shown time, µs.
    pub span_us: u64,
}

impl QueueOverTime {
    /// The time of so many steps between two moments that are shown, ns.
    #[must_use]
    pub const fn every_ns(&self, steps: u64) -> u64 {
        self.span_us * 1_000 / (super::queue::SAMPLES as u64 - 1) * steps
    }

    /// Writes in flight of the thread, where an engine does not wait.
    #[must_use]
    pub fn in_flight(&self) -> u32 {
        self.block.axis.workload(1).queue_depth
    }
}

/// A load on the file system, in modes of RioFS.
#[derive(Clone, Copy, Debug)]
pub struct FileSystem {
    /// The paper.
    pub paper: Paper,
    /// The drive.
    pub drive: Drive,
    /// The name of the load, as of `rio bench fs --workload`.
    pub load: &'static str,
    /// The content of the picture.
    pub shows: FileSystemView,
    /// The compared modes.
    pub modes: &'static [Mode],
    /// The numbers of the paper.
    pub claims: &'static [FileSystemClaim],
    /// The paper's conclusion, as a part of a sentence.
    pub conclusion: &'static str,
}

/// The content of the picture of a load on the file system.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum FileSystemView {
    /// Throughput and latency against threads.
    Threads,
    /// The time of an `fsync` of one thread, step by step.
    Steps,
    /// The times of the operations of one thread: mean and percentiles.
    Percentiles,
}

/// A mode of RioFS.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Mode {
    /// Its name in the figure.
    pub name: &'static str,
    /// Its name in `rio bench fs`.
    pub mode: &'static str,
}

/// As ext4 with jbd2.
pub const EXT4: Mode = Mode { name: "ext4", mode: "ext4" };
/// RioFS on streams of engine `horae`.
pub const HORAE_FS: Mode = Mode { name: "HoraeFS", mode: "horae" };
/// RioFS, which leaves the order of its commits to the drive.
pub const BARRIER_FS: Mode = Mode { name: "BarrierFS", mode: "barrier" };
/// RioFS.
pub const RIO_FS: Mode = Mode { name: "RioFS", mode: "rio" };

/// A number of the paper about two modes, and the range in which ours supports the conclusion.
#[derive(Clone, Copy, Debug)]
pub struct FileSystemClaim {
    /// The mode that should be ahead.
    pub better: Mode,
    /// The other one.
    pub worse: Mode,
    /// The compared value at each point; the figure is the geometric mean of the ratios.
    pub measure: FileSystemMeasure,
    /// The paper's number, if it states one.
    pub paper: Option<f64>,
    /// From here on ours supports the conclusion.
    pub at_least: f64,
}

/// A value of a mode at one number of threads.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum FileSystemMeasure {
    /// Operations per second.
    Throughput,
    /// The mean of the times of the operations.
    Mean,
    /// The 99th percentile.
    P99,
    /// The 99.9th percentile.
    P999,
}

/// Ordered writes on a volume: one parameter varies, and the engines take turns at each value.
#[derive(Clone, Copy, Debug)]
pub struct Block {
    /// The paper.
    pub paper: Paper,
    /// The drives of each target.
    pub targets: &'static [&'static [Drive]],
    /// The parameter that varies.
    pub axis: Axis,
    /// The compared ways to keep order.
    pub contenders: &'static [Contender],
    /// The panels, from left to right.
    pub panels: &'static [Measure],
    /// The numbers of the paper.
    pub claims: &'static [Claim],
    /// The paper's conclusion, as a part of a sentence.
    pub conclusion: &'static str,
}

/// The paper of a figure of ordered writes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Paper {
    /// Rio, EuroSys '23.
    Rio,
    /// Barrier-Enabled IO Stack, FAST '18.
    Barrier,
    /// HORAE, OSDI '20.
    Horae,
    /// OPIMQ, FAST '25.
    Opimq,
}

/// A modelled drive.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Drive {
    /// Flash with a volatile cache.
    Flash,
    /// 3D XPoint, with power-loss protection.
    Optane,
}

impl Drive {
    /// The name of its profile.
    #[must_use]
    pub fn profile(self) -> &'static str {
        match self {
            Self::Flash => "flash",
            Self::Optane => "optane",
        }
    }
}

/// The parameter of the horizontal axis.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Axis {
    /// Number of threads, with random writes of 4 KiB.
    Threads,
    /// Number of threads, each with a journal: 8 KiB, then 4 KiB.
    JournalThreads,
    /// Number of threads, up to that of the containers in the OPIMQ paper, with random writes of
    /// 4 KiB.
    ManyThreads,
    /// KiB of each write, by one thread.
    Size(Pattern),
    /// Number of adjacent writes of 4 KiB, by so many threads.
    Batch {
        /// Number of threads.
        threads: u32,
        /// Place of a batch relative to the one before.
        pattern: Pattern,
    },
}

/// Writes in flight of a thread, for engines that do not wait.
const DEPTH: u32 = 32;

impl Axis {
    /// The title of the axis.
    #[must_use]
    pub fn title(self) -> &'static str {
        match self {
            Self::Threads | Self::JournalThreads | Self::ManyThreads => "threads",
            Self::Size(_) => "KiB of a write",
            Self::Batch { .. } => "4 KiB writes of a batch",
        }
    }

    /// The values: a few with `quick`.
    #[must_use]
    pub fn values(self, quick: bool) -> &'static [u32] {
        match (self, quick) {
            (Self::Threads | Self::JournalThreads, true) => &[1, 2],
            (Self::Threads | Self::JournalThreads, false) => &[1, 2, 4, 8, 12],
            (Self::ManyThreads, true) => &[2, 16],
            (Self::ManyThreads, false) => &[1, 4, 10, 20, 40],
            (Self::Size(_), true) => &[4, 16, 64],
            (Self::Size(_), false) => &[4, 8, 16, 32, 64],
            (Self::Batch { .. }, true) => &[1, 4, 16],
            (Self::Batch { .. }, false) => &[1, 2, 4, 8, 16],
        }
    }

    /// The workload at one value.
    #[must_use]
    pub fn workload(self, value: u32) -> Workload {
        let uniform =
            |pattern, kib: u32, batch| Shape::Uniform { pattern, size: kib << 10, batch, group: 1 };
        let (shape, threads) = match self {
            Self::Threads | Self::ManyThreads => (uniform(Pattern::Random, 4, 1), value),
            Self::JournalThreads => (Shape::Journal, value),
            Self::Size(pattern) => (uniform(pattern, value, 1), 1),
            Self::Batch { threads, pattern } => (uniform(pattern, 4, value), threads),
        };
        Workload { shape, access: Access::Write, queue_depth: DEPTH, threads, seed: 1 }
    }
}

/// One of the compared ways to keep order.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Contender {
    /// Its name in the figure.
    pub name: &'static str,
    /// The name of its engine.
    pub engine: &'static str,
    /// Whether adjacent writes are merged.
    pub merge: bool,
    /// Whether all threads share one stream, and so one queue and one dispatcher.
    pub shares_stream: bool,
    /// Whether updates in place are redirected.
    pub redirects: bool,
    /// Whether the threads move from core to core.
    pub moves: bool,
}

impl Contender {
    /// The contender for the time of a command and its answer.
    pub const TRIP: Self = Self::new("none", "none").apart();

    const fn new(name: &'static str, engine: &'static str) -> Self {
        Self { name, engine, merge: true, shares_stream: false, redirects: false, moves: false }
    }

    const fn apart(self) -> Self {
        Self { merge: false, ..self }
    }

    const fn sharing_a_stream(self) -> Self {
        Self { shares_stream: true, ..self }
    }

    const fn redirecting(self) -> Self {
        Self { redirects: true, ..self }
    }

    const fn moving(self) -> Self {
        Self { moves: true, ..self }
    }

    /// The engine; `None` if this program has none of that name.
    #[must_use]
    pub fn kind(&self) -> Option<EngineKind> {
        EngineKind::from_name(self.engine)
    }
}

/// The content of a panel.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Measure {
    /// Thousand writes per second.
    Writes,
    /// Payload, MB per second.
    Bytes,
    /// Writes for each unit of CPU time of the initiator, over those of the orderless writes.
    InitiatorEfficiency,
    /// The same of the targets.
    TargetEfficiency,
    /// CPU time of the initiator for each write, µs.
    InitiatorCpu,
    /// CPU time of the targets for each write, µs.
    TargetCpu,
    /// Mean number of writes in flight: the rate times the mean latency (Little's law).
    InFlight,
}

impl Measure {
    /// The title of the panel.
    #[must_use]
    pub fn title(self) -> &'static str {
        match self {
            Self::Writes => "thousand writes per second",
            Self::Bytes => "MB per second",
            Self::InitiatorEfficiency => "CPU efficiency, initiator, orderless = 1",
            Self::TargetEfficiency => "CPU efficiency, targets, orderless = 1",
            Self::InitiatorCpu => "CPU time of a write, initiator, µs",
            Self::TargetCpu => "CPU time of a write, targets, µs",
            Self::InFlight => "writes in flight, mean",
        }
    }
}

/// A number of the paper, and the range in which ours supports the paper's conclusion.
#[derive(Clone, Copy, Debug)]
pub struct Claim {
    /// The contender in the numerator.
    pub over: &'static str,
    /// The contender in the denominator.
    pub under: &'static str,
    /// The compared value at each point; the figure is the geometric mean of the ratios.
    pub measure: Measure,
    /// The paper's number, if it states one.
    pub paper: Option<f64>,
    /// From here on ours supports the conclusion.
    pub at_least: f64,
}

/// The name of the contender that keeps no order.
pub const ORDERLESS: &str = "orderless";
/// The name of the contender that waits for each transfer, and for a FLUSH.
pub const LINUX: &str = "Linux";
/// The name of the contender that sends ordering metadata first.
pub const HORAE: &str = "HORAE";
/// The name of the contender whose drive keeps the order of one queue.
pub const BARRIER: &str = "barrier";
/// The name of the contender whose drive keeps the order of several queues.
pub const OPIMQ: &str = "OPIMQ";

const WITH_LINUX: Contender = Contender::new(LINUX, "linux");
const WITH_HORAE: Contender = Contender::new(HORAE, "horae");
/// The paper's stack has one queue and one dispatcher for all threads.
const WITH_BARRIER: Contender = Contender::new(BARRIER, "barrier").sharing_a_stream();
const WITH_OPIMQ: Contender = Contender::new(OPIMQ, "opimq");
const RIO: Contender = Contender::new("Rio", "rio");
const RIO_APART: Contender = Contender::new("Rio w/o merge", "rio").apart();
const NONE: Contender = Contender::new(ORDERLESS, "none");
const NONE_APART: Contender = Contender::new("orderless w/o merge", "none").apart();

const SPEED_AND_EFFICIENCY: &[Measure] =
    &[Measure::Writes, Measure::InitiatorEfficiency, Measure::TargetEfficiency];

const fn claim(
    over: &'static str,
    under: &'static str,
    measure: Measure,
    paper: Option<f64>,
    at_least: f64,
) -> Claim {
    Claim { over, under, measure, paper, at_least }
}

const fn mode_claim(
    better: Mode,
    worse: Mode,
    measure: FileSystemMeasure,
    paper: Option<f64>,
    at_least: f64,
) -> FileSystemClaim {
    FileSystemClaim { better, worse, measure, paper, at_least }
}

const ONE_FLASH: &[&[Drive]] = &[&[Drive::Flash]];
const ONE_OPTANE: &[&[Drive]] = &[&[Drive::Optane]];

/// All figures, by paper and number.
pub fn all() -> impl Iterator<Item = &'static Entry> {
    [rio::FIGURES, barrier::FIGURES, horae::FIGURES, opimq::FIGURES].into_iter().flatten()
}

/// The figure of this name.
#[must_use]
pub fn named(id: &str) -> Option<&'static Entry> {
    all().find(|entry| entry.id == id)
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use super::*;

    fn blocks() -> impl Iterator<Item = (&'static str, &'static Block)> {
        all().filter_map(|entry| match &entry.experiment {
            Experiment::Block(block) => Some((entry.id, block)),
            Experiment::QueueOverTime(queue) => Some((entry.id, &queue.block)),
            _ => None,
        })
    }

    #[test]
    fn names_are_unique_and_workloads_valid() {
        let names: BTreeSet<_> = all().map(|entry| entry.id).collect();
        assert_eq!(names.len(), all().count());
        for entry in all() {
            assert_eq!(named(entry.id).map(|found| found.title), Some(entry.title));
        }
        assert!(named("rio-1").is_none());
        for (_, block) in blocks() {
            for quick in [true, false] {
                for value in block.axis.values(quick) {
                    block.axis.workload(*value).check().unwrap();
                }
            }
        }
    }

    fn programs() -> impl Iterator<Item = (&'static str, &'static Program)> {
        all().filter_map(|entry| match &entry.experiment {
            Experiment::Program(program) => Some((entry.id, program)),
            _ => None,
        })
    }

    #[test]
    fn claims_about_programs_are_about_their_contenders_and_ticks() {
        for (id, program) in programs() {
            for claim in program.claims {
                for name in [claim.over, claim.under] {
                    assert!(program.contenders.iter().any(|c| c.name == name), "{id}: no {name}");
                }
                for quick in [true, false] {
                    let mut ticks = program.ticks(quick).iter();
                    let is_there = claim.at.is_none_or(|at| ticks.any(|tick| tick.name == at));
                    assert!(is_there, "{id}: {:?}", claim.at);
                }
            }
            for quick in [true, false] {
                let names: BTreeSet<_> = program.ticks(quick).iter().map(|one| one.name).collect();
                assert_eq!(names.len(), program.ticks(quick).len(), "{id}");
            }
        }
    }

    #[test]
    fn claims_are_about_the_contenders_of_their_figure() {
        for (id, block) in blocks() {
            for claim in block.claims {
                for name in [claim.over, claim.under] {
                    let is_there = block.contenders.iter().any(|one| one.name == name);
                    assert!(is_there, "{id}: no {name}");
                }
            }
            // Efficiency is over the orderless writes.
            assert!(block.contenders.iter().any(|one| one.name == ORDERLESS), "{id}");
        }
    }
}

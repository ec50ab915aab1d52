//! The figures: what each one asks, and what is run for it.

use riopipe_order::engine::EngineKind;
use serde::Serialize;

use crate::workload::{Pattern, Shape, Workload};

/// Title of the Rio paper, for sources.
macro_rules! rio {
    ($place:literal) => {
        concat!("Rio, EuroSys '23, ", $place)
    };
}

/// Title of the paper on the barrier-enabled stack, for sources.
macro_rules! barrier_stack {
    ($place:literal) => {
        concat!("Barrier-Enabled IO Stack, FAST '18, ", $place)
    };
}

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
    /// The recovery of full logs.
    Recovery,
}

/// A load on the file system, in the modes of RioFS, against threads.
#[derive(Clone, Copy, Debug)]
pub struct FileSystem {
    /// The name of the load, as of `rio bench fs --workload`.
    pub load: &'static str,
    /// The content of the picture.
    pub shows: FileSystemView,
    /// The paper's throughput of RioFS over that of ext4.
    pub paper: f64,
    /// The paper's throughput of RioFS over that of HoraeFS.
    pub paper_horae: f64,
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
            Self::Threads | Self::JournalThreads => "threads",
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
            Self::Threads => (uniform(Pattern::Random, 4, 1), value),
            Self::JournalThreads => (Shape::Journal, value),
            Self::Size(pattern) => (uniform(pattern, value, 1), 1),
            Self::Batch { threads, pattern } => (uniform(pattern, 4, value), threads),
        };
        Workload { shape, queue_depth: DEPTH, threads, seed: 1 }
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
}

impl Contender {
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
/// The name of the contender whose drive keeps the order.
pub const BARRIER: &str = "barrier";

const WITH_LINUX: Contender = Contender { name: LINUX, engine: "linux", merge: true };
const WITH_HORAE: Contender = Contender { name: HORAE, engine: "horae", merge: true };
const WITH_BARRIER: Contender = Contender { name: BARRIER, engine: "barrier", merge: true };
const RIO: Contender = Contender { name: "Rio", engine: "rio", merge: true };
const RIO_APART: Contender = Contender { name: "Rio w/o merge", engine: "rio", merge: false };
const NONE: Contender = Contender { name: ORDERLESS, engine: "none", merge: true };
const NONE_APART: Contender =
    Contender { name: "orderless w/o merge", engine: "none", merge: false };

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

const SIZE_CLAIMS: &[Claim] = &[
    claim("Rio", "Linux", Measure::Bytes, None, 1.5),
    claim("Rio", "HORAE", Measure::Bytes, None, 1.1),
    claim("Rio", ORDERLESS, Measure::Bytes, None, 0.8),
];

const BATCH_CLAIMS: &[Claim] = &[
    claim("Rio", "Rio w/o merge", Measure::InitiatorEfficiency, None, 1.1),
    claim("Rio", "Rio w/o merge", Measure::TargetEfficiency, None, 1.1),
    claim("Rio", "HORAE", Measure::Writes, None, 1.1),
];

const MERGE_CLAIMS: &[Claim] = &[
    claim(ORDERLESS, "orderless w/o merge", Measure::InitiatorEfficiency, None, 1.1),
    claim(ORDERLESS, "orderless w/o merge", Measure::TargetEfficiency, None, 1.1),
];

const QUEUE_DEPTH_CLAIMS: &[Claim] = &[
    claim(BARRIER, "Linux", Measure::Writes, Some(2.0), 1.5),
    claim(BARRIER, ORDERLESS, Measure::Writes, Some(0.87), 0.7),
    claim(BARRIER, "Linux", Measure::InFlight, None, 4.0),
];

const ONE_FLASH: &[&[Drive]] = &[&[Drive::Flash]];
const ONE_OPTANE: &[&[Drive]] = &[&[Drive::Optane]];

/// The contenders of the figures with threads. A cache barrier orders the writes of one drive, so
/// `barrier` takes part where there is one. The paper's figures do not have it.
const ON_ONE_DRIVE: &[Contender] = &[WITH_LINUX, WITH_HORAE, WITH_BARRIER, RIO, NONE];
const ON_SEVERAL_DRIVES: &[Contender] = &[WITH_LINUX, WITH_HORAE, RIO, NONE];

/// Waiting for each transfer, barriers, and no order, on one drive (Barrier-Enabled IO Stack,
/// figure 9).
const fn queue_depths(targets: &'static [&'static [Drive]]) -> Block {
    Block {
        paper: Paper::Barrier,
        targets,
        axis: Axis::Threads,
        contenders: &[WITH_LINUX, WITH_BARRIER, RIO, NONE],
        panels: &[Measure::Writes, Measure::InFlight],
        claims: QUEUE_DEPTH_CLAIMS,
        conclusion: "barriers keep the drive's queue full, and waits keep it empty",
    }
}

/// Figure 2 without and with power-loss protection; they differ in the drive only.
const fn motivation(targets: &'static [&'static [Drive]], claims: &'static [Claim]) -> Block {
    Block {
        paper: Paper::Rio,
        targets,
        axis: Axis::JournalThreads,
        contenders: &[WITH_LINUX, WITH_HORAE, NONE],
        panels: &[Measure::Writes],
        claims,
        conclusion: "order costs Linux and HORAE most of what the drive can do",
    }
}

const fn threads(
    targets: &'static [&'static [Drive]],
    claims: &'static [Claim],
    conclusion: &'static str,
) -> Block {
    Block {
        paper: Paper::Rio,
        targets,
        axis: Axis::Threads,
        contenders: match targets.len() == 1 && targets[0].len() == 1 {
            true => ON_ONE_DRIVE,
            false => ON_SEVERAL_DRIVES,
        },
        panels: SPEED_AND_EFFICIENCY,
        claims,
        conclusion,
    }
}

const fn sizes(pattern: Pattern) -> Block {
    Block {
        paper: Paper::Rio,
        targets: ONE_OPTANE,
        axis: Axis::Size(pattern),
        contenders: &[WITH_LINUX, WITH_HORAE, RIO, NONE],
        panels: &[Measure::Bytes, Measure::InitiatorEfficiency, Measure::TargetEfficiency],
        claims: SIZE_CLAIMS,
        conclusion: "Rio is ahead at each size, and close to orderless writes",
    }
}

const fn batches(threads: u32) -> Block {
    Block {
        paper: Paper::Rio,
        targets: ONE_OPTANE,
        axis: Axis::Batch { threads, pattern: Pattern::Sequential },
        contenders: &[WITH_LINUX, WITH_HORAE, RIO_APART, RIO, NONE],
        panels: SPEED_AND_EFFICIENCY,
        claims: BATCH_CLAIMS,
        conclusion: "merging saves CPU time on both sides",
    }
}

/// All figures, by paper and number.
pub const CATALOGUE: &[Entry] = &[
    Entry {
        id: "rio-2a",
        title: "The cost of order on flash",
        source: rio!("figure 2(a)"),
        question: "What does order cost with Linux and HORAE, if the drive has a volatile cache?",
        experiment: Experiment::Block(motivation(
            ONE_FLASH,
            &[
                claim(ORDERLESS, "Linux", Measure::Writes, None, 20.0),
                claim(ORDERLESS, "HORAE", Measure::Writes, None, 1.5),
            ],
        )),
    },
    Entry {
        id: "rio-2b",
        title: "The cost of order on Optane",
        source: rio!("figure 2(b)"),
        question: "What does order cost with Linux and HORAE, if a write needs no FLUSH?",
        experiment: Experiment::Block(motivation(
            ONE_OPTANE,
            &[
                claim(ORDERLESS, "Linux", Measure::Writes, None, 1.5),
                claim(ORDERLESS, "HORAE", Measure::Writes, None, 1.2),
            ],
        )),
    },
    Entry {
        id: "rio-3a",
        title: "Merging without order, flash",
        source: rio!("figure 3(a)"),
        question: "How much CPU time does merging save?",
        experiment: Experiment::Block(merging(ONE_FLASH)),
    },
    Entry {
        id: "rio-3b",
        title: "Merging without order, Optane",
        source: rio!("figure 3(b)"),
        question: "How much CPU time does merging save?",
        experiment: Experiment::Block(merging(ONE_OPTANE)),
    },
    Entry {
        id: "rio-10a",
        title: "Ordered random writes against threads, flash",
        source: rio!("figure 10(a)"),
        question: "How fast are ordered writes of 4 KiB, and at which cost?",
        experiment: Experiment::Block(threads(
            ONE_FLASH,
            &[
                claim("Rio", "Linux", Measure::Writes, Some(100.0), 20.0),
                claim("Rio", "HORAE", Measure::Writes, Some(2.8), 1.5),
                claim("Rio", BARRIER, Measure::Writes, None, 0.8),
                claim("Rio", ORDERLESS, Measure::Writes, None, 0.8),
                claim("Rio", "Linux", Measure::InitiatorEfficiency, Some(18.0), 1.2),
                claim("Rio", "HORAE", Measure::InitiatorEfficiency, Some(1.7), 1.2),
                claim("Rio", "Linux", Measure::TargetEfficiency, Some(22.7), 1.2),
                claim("Rio", "HORAE", Measure::TargetEfficiency, Some(2.1), 1.2),
            ],
            "without FLUSH and waits, Rio is as fast as orderless writes, and two orders of \
             magnitude faster than Linux",
        )),
    },
    Entry {
        id: "rio-10b",
        title: "Ordered random writes against threads, Optane",
        source: rio!("figure 10(b)"),
        question: "How fast are ordered writes if a write needs no FLUSH?",
        experiment: Experiment::Block(threads(
            ONE_OPTANE,
            &[
                claim("Rio", "Linux", Measure::Writes, Some(9.4), 2.0),
                claim("Rio", "HORAE", Measure::Writes, Some(3.3), 1.5),
                claim("HORAE", "Linux", Measure::Writes, Some(2.8), 1.2),
                claim("Rio", BARRIER, Measure::Writes, None, 0.8),
                claim("Rio", ORDERLESS, Measure::Writes, None, 0.8),
                claim("Rio", "Linux", Measure::InitiatorEfficiency, Some(1.7), 1.2),
                claim("Rio", "HORAE", Measure::InitiatorEfficiency, Some(1.7), 1.2),
                claim("Rio", "Linux", Measure::TargetEfficiency, Some(3.5), 1.2),
                claim("Rio", "HORAE", Measure::TargetEfficiency, Some(2.0), 1.2),
            ],
            "the waits alone make Linux and HORAE several times slower than Rio",
        )),
    },
    Entry {
        id: "rio-10c",
        title: "Ordered random writes against threads, two drives",
        source: rio!("figure 10(c)"),
        question: "Do ordered writes use several drives of one target at once?",
        experiment: Experiment::Block(threads(
            &[&[Drive::Flash, Drive::Optane]],
            &[
                claim("Rio", "Linux", Measure::Writes, None, 20.0),
                claim("Rio", "HORAE", Measure::Writes, None, 1.5),
                claim("Rio", ORDERLESS, Measure::Writes, None, 0.8),
            ],
            "Rio uses the drives at once, Linux and HORAE one after the other",
        )),
    },
    Entry {
        id: "rio-10d",
        title: "Ordered random writes against threads, two targets",
        source: rio!("figure 10(d)"),
        question: "Do ordered writes use several targets at once?",
        experiment: Experiment::Block(threads(
            &[&[Drive::Flash, Drive::Optane], &[Drive::Flash, Drive::Optane]],
            &[
                claim("Rio", "Linux", Measure::Writes, None, 20.0),
                claim("Rio", "HORAE", Measure::Writes, None, 1.5),
                claim("Rio", ORDERLESS, Measure::Writes, None, 0.8),
            ],
            "Rio uses the targets at once, Linux and HORAE one after the other",
        )),
    },
    Entry {
        id: "rio-11a",
        title: "Sequential ordered writes against their size",
        source: rio!("figure 11, sequential"),
        question: "Does Rio keep its lead with larger writes?",
        experiment: Experiment::Block(sizes(Pattern::Sequential)),
    },
    Entry {
        id: "rio-11b",
        title: "Random ordered writes against their size",
        source: rio!("figure 11, random"),
        question: "Does Rio keep its lead with larger writes?",
        experiment: Experiment::Block(sizes(Pattern::Random)),
    },
    Entry {
        id: "rio-12a",
        title: "Merging of ordered writes, one thread",
        source: rio!("figure 12(a)"),
        question: "What does merging of ordered writes gain if CPU time is short?",
        experiment: Experiment::Block(batches(1)),
    },
    Entry {
        id: "rio-12b",
        title: "Merging of ordered writes, several threads",
        source: rio!("figure 12(b)"),
        question: "What does merging of ordered writes gain if the drive is the limit?",
        experiment: Experiment::Block(batches(2)),
    },
    Entry {
        id: "rio-13",
        title: "Appends with fsync, against threads",
        source: rio!("figure 13"),
        question: "How fast is an fsync, and how long does it take?",
        experiment: Experiment::FileSystem(FileSystem {
            load: "append_fsync",
            shows: FileSystemView::Threads,
            paper: 3.0,
            paper_horae: 1.2,
            conclusion: "an fsync with one wait is several times faster than one with three",
        }),
    },
    Entry {
        id: "rio-14",
        title: "The time of an fsync, step by step",
        source: rio!("figure 14"),
        question: "Where does the time of an fsync go?",
        experiment: Experiment::FileSystem(FileSystem {
            load: "append_fsync",
            shows: FileSystemView::Steps,
            paper: 3.0,
            paper_horae: 1.2,
            conclusion: "the waits between data, journal and commit are what RioFS saves",
        }),
    },
    Entry {
        id: "rio-15a",
        title: "A mail server on the file system",
        source: rio!("figure 15(a)"),
        question: "What does a faster fsync gain for varmail?",
        experiment: Experiment::FileSystem(FileSystem {
            load: "varmail",
            shows: FileSystemView::Threads,
            paper: 2.3,
            paper_horae: 1.3,
            conclusion: "a mail server is about twice as fast",
        }),
    },
    Entry {
        id: "rio-15b",
        title: "RocksDB's fillsync on the file system",
        source: rio!("figure 15(b)"),
        question: "What does a faster fsync gain for RocksDB?",
        experiment: Experiment::FileSystem(FileSystem {
            load: "rocksdb_fillsync",
            shows: FileSystemView::Threads,
            paper: 1.9,
            paper_horae: 1.5,
            conclusion: "durable puts are about twice as fast",
        }),
    },
    Entry {
        id: "rio-recovery",
        title: "The time to recover full logs",
        source: rio!("§6.5"),
        question: "How long does a recovery take in the worst case?",
        experiment: Experiment::Recovery,
    },
    Entry {
        id: "barrier-9a",
        title: "Ways to order writes, flash",
        source: barrier_stack!("figure 9, plain-SSD"),
        question: "What does it bring to let the drive keep the order, if it has a volatile cache?",
        experiment: Experiment::Block(queue_depths(ONE_FLASH)),
    },
    Entry {
        id: "barrier-9b",
        title: "Ways to order writes, power-loss protection",
        source: barrier_stack!("figure 9, supercap-SSD"),
        question: "What does it bring to let the drive keep the order, if a write needs no FLUSH?",
        experiment: Experiment::Block(queue_depths(ONE_OPTANE)),
    },
];

const fn merging(targets: &'static [&'static [Drive]]) -> Block {
    Block {
        paper: Paper::Rio,
        targets,
        axis: Axis::Batch { threads: 1, pattern: Pattern::Sequential },
        contenders: &[NONE_APART, NONE],
        panels: &[Measure::Writes, Measure::InitiatorCpu, Measure::TargetCpu],
        claims: MERGE_CLAIMS,
        conclusion: "merging saves CPU time on both sides",
    }
}

/// The figure of this name.
#[must_use]
pub fn named(id: &str) -> Option<&'static Entry> {
    CATALOGUE.iter().find(|entry| entry.id == id)
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use super::*;

    fn blocks() -> impl Iterator<Item = (&'static str, &'static Block)> {
        CATALOGUE.iter().filter_map(|entry| match &entry.experiment {
            Experiment::Block(block) => Some((entry.id, block)),
            _ => None,
        })
    }

    #[test]
    fn names_are_unique_and_workloads_valid() {
        let names: BTreeSet<_> = CATALOGUE.iter().map(|entry| entry.id).collect();
        assert_eq!(names.len(), CATALOGUE.len());
        for entry in CATALOGUE {
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

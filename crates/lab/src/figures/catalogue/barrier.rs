//! The figures of *Barrier-Enabled IO Stack for Flash Storage* (FAST '18).

use super::{
    Axis, BARRIER, BARRIER_FS, Block, Claim, Contender, Drive, EXT4, Entry, Experiment, FileSystem,
    FileSystemClaim, FileSystemMeasure, FileSystemView, Measure, NONE, ONE_FLASH, ONE_OPTANE,
    ORDERLESS, Paper, RIO, RIO_FS, WITH_BARRIER, WITH_LINUX, claim, mode_claim,
};

/// Title of the paper, for sources.
macro_rules! barrier_stack {
    ($place:literal) => {
        concat!("Barrier-Enabled IO Stack, FAST '18, ", $place)
    };
}

const QUEUE_DEPTH_CLAIMS: &[Claim] = &[
    claim(BARRIER, "Linux", Measure::Writes, Some(2.0), 1.5),
    claim(BARRIER, ORDERLESS, Measure::Writes, Some(0.87), 0.7),
    claim(BARRIER, "Linux", Measure::InFlight, None, 4.0),
];

/// A queue for each thread. The paper's stack has none of that kind.
const OWN_QUEUES: Contender = Contender::new("barrier, a queue each", "barrier");

/// Waiting for each transfer, barriers, and no order, on one drive (Barrier-Enabled IO Stack,
/// figure 9).
const fn queue_depths(targets: &'static [&'static [Drive]]) -> Block {
    Block {
        paper: Paper::Barrier,
        targets,
        axis: Axis::Threads,
        contenders: &[WITH_LINUX, WITH_BARRIER, OWN_QUEUES, RIO, NONE],
        panels: &[Measure::Writes, Measure::InFlight],
        claims: QUEUE_DEPTH_CLAIMS,
        conclusion: "barriers keep the drive's queue full, and waits keep it empty",
    }
}

const fn ahead(measure: FileSystemMeasure, paper: f64, at_least: f64) -> FileSystemClaim {
    mode_claim(BARRIER_FS, EXT4, measure, Some(paper), at_least)
}

const fn file_system(
    drive: Drive,
    load: &'static str,
    shows: FileSystemView,
    claims: &'static [FileSystemClaim],
    conclusion: &'static str,
) -> Experiment {
    Experiment::FileSystem(FileSystem {
        paper: Paper::Barrier,
        drive,
        load,
        shows,
        modes: &[EXT4, BARRIER_FS, RIO_FS],
        claims,
        conclusion,
    })
}

/// The figures, by number.
pub(super) const FIGURES: &[Entry] = &[
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
    Entry {
        id: "barrier-13a",
        title: "The scalability of fsync, flash",
        source: barrier_stack!("figure 13(a), plain-SSD"),
        question: "How does journaling with barriers grow with the threads, if a commit needs a FLUSH?",
        experiment: file_system(
            Drive::Flash,
            "append_fsync",
            FileSystemView::Threads,
            &[ahead(FileSystemMeasure::Throughput, 2.0, 1.3)],
            "BarrierFS makes twice as many fsyncs at each number of threads",
        ),
    },
    Entry {
        id: "barrier-13b",
        title: "The scalability of fsync, power-loss protection",
        source: barrier_stack!("figure 13(b), supercap-SSD"),
        question: "How does journaling with barriers grow with the threads, if no commit needs a FLUSH?",
        experiment: file_system(
            Drive::Optane,
            "append_fsync",
            FileSystemView::Threads,
            &[ahead(FileSystemMeasure::Throughput, 1.3, 1.1)],
            "BarrierFS is ahead also without FLUSH",
        ),
    },
    Entry {
        id: "barrier-15",
        title: "A mail server with barriers, flash",
        source: barrier_stack!("figure 15, varmail with durability"),
        question: "What does journaling with barriers gain for varmail?",
        experiment: file_system(
            Drive::Flash,
            "varmail",
            FileSystemView::Threads,
            &[ahead(FileSystemMeasure::Throughput, 1.6, 1.2)],
            "a mail server gains, although each fsync is still durable",
        ),
    },
    Entry {
        id: "barrier-t1a",
        title: "The times of fsync, flash",
        source: barrier_stack!("table 1, plain-SSD"),
        question: "How long does an fsync take in the mean, and at worst?",
        experiment: file_system(
            Drive::Flash,
            "append_fsync",
            FileSystemView::Percentiles,
            &[
                ahead(FileSystemMeasure::Mean, 1.69, 1.2),
                ahead(FileSystemMeasure::P99, 1.27, 1.0),
                ahead(FileSystemMeasure::P999, 1.73, 1.0),
            ],
            "an fsync takes 40 % less time, and the slow ones do, too",
        ),
    },
    Entry {
        id: "barrier-t1b",
        title: "The times of fsync, power-loss protection",
        source: barrier_stack!("table 1, supercap-SSD"),
        question: "How long does an fsync take if no commit needs a FLUSH?",
        experiment: file_system(
            Drive::Optane,
            "append_fsync",
            FileSystemView::Percentiles,
            &[
                ahead(FileSystemMeasure::Mean, 1.67, 1.2),
                ahead(FileSystemMeasure::P99, 1.6, 1.0),
                ahead(FileSystemMeasure::P999, 1.17, 1.0),
            ],
            "an fsync takes 40 % less time, and the slow ones do, too",
        ),
    },
];

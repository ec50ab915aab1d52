//! The figures of *Barrier-Enabled IO Stack for Flash Storage* (FAST '18).

use super::{
    Axis, BARRIER, BARRIER_FS, Block, Claim, Contender, Drive, EXT4, Entry, Experiment, FileSystem,
    FileSystemClaim, FileSystemMeasure, FileSystemView, Measure, NONE, ONE_FLASH, ONE_OPTANE,
    ORDERLESS, Paper, QueueOverTime, RIO, RIO_FS, WITH_BARRIER, WITH_LINUX, claim, mode_claim,
    program::{Program, ProgramClaim, ProgramContender, ProgramLoad, ProgramMeasure, Tick},
};
use crate::fs_load::{Guarantee, SqliteJournal};

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

const ON_EXT4: ProgramContender = ProgramContender::new("ext4", "ext4");
const ON_BARRIER_FS: ProgramContender = ProgramContender::new("BarrierFS", "barrier");
const BARRIER_FS_ORDERED: ProgramContender =
    ProgramContender::new("BarrierFS, order only", "barrier").asking(Guarantee::Ordered);
const ON_RIO_FS: ProgramContender = ProgramContender::new("RioFS", "rio");
const RIO_FS_ORDERED: ProgramContender =
    ProgramContender::new("RioFS, order only", "rio").asking(Guarantee::Ordered);

const NO_MOUNT_OPTION: &str =
    "the paper's ext4 with order only is the mount option nobarrier, which RioFS does not have";

const SQLITE_TICKS: &[Tick] = &[
    Tick::threads("PERSIST", 1, ProgramLoad::Sqlite(SqliteJournal::Persist)),
    Tick::threads("WAL", 1, ProgramLoad::Sqlite(SqliteJournal::Wal)),
];

/// SQLite in two journal modes (figure 14).
const SQLITE: Program = Program {
    paper: Paper::Barrier,
    drives: &[Drive::Flash],
    axis: "journal mode",
    ticks: SQLITE_TICKS,
    quick: SQLITE_TICKS,
    contenders: &[
        ON_EXT4,
        ON_BARRIER_FS.asking(Guarantee::DurableAtEnd),
        BARRIER_FS_ORDERED,
        ON_RIO_FS.asking(Guarantee::DurableAtEnd),
        RIO_FS_ORDERED,
    ],
    panels: &[ProgramMeasure::Rate, ProgramMeasure::Mean],
    claims: &[
        sqlite("BarrierFS", Some(3.7), 2.0).at("PERSIST"),
        sqlite("BarrierFS, order only", Some(73.0), 10.0).at("PERSIST"),
    ],
    conclusion: "barriers instead of the first three fdatasyncs make SQLite several times as fast, and order \
                 alone makes it tens of times as fast",
    differs: &[
        "the load makes the writes and calls of SQLite 3.40 as a trace of its system calls shows them; the paper has \
         SQLite itself",
        "the phone with UFS, where the gain is 1.75, is missing",
        "RioFS is not in the paper. It submits an overwrite when the barriers before it are durable, so where a \
         program overwrites its files, its barriers gain little",
        NO_MOUNT_OPTION,
    ],
};

const fn sqlite(over: &'static str, paper: Option<f64>, at_least: f64) -> ProgramClaim {
    ProgramClaim::new(over, "ext4", ProgramMeasure::Rate, paper, at_least)
}

/// The commands at the drive over time (figure 10).
const fn queue(targets: &'static [&'static [Drive]], span_us: u64) -> QueueOverTime {
    QueueOverTime {
        block: Block {
            contenders: &[WITH_LINUX, WITH_BARRIER, RIO, NONE],
            conclusion: "a queue with waits has one command or none, and barriers fill it",
            ..queue_depths(targets)
        },
        waits: "Linux",
        ordered: BARRIER,
        span_us,
    }
}

/// The waits of a thread that calls `fsync` or `fbarrier` (figure 11).
const fn switches(drives: &'static [Drive]) -> Program {
    Program {
        paper: Paper::Barrier,
        drives,
        axis: "4 KiB written before each call",
        ticks: SWITCH_TICKS,
        quick: SWITCH_TICKS,
        contenders: &[ON_EXT4, ON_BARRIER_FS, BARRIER_FS_ORDERED, ON_RIO_FS, RIO_FS_ORDERED],
        panels: &[ProgramMeasure::Switches, ProgramMeasure::Rate],
        claims: SWITCH_CLAIMS,
        conclusion: "an fsync of BarrierFS gives up the core less often, and an fbarrier hardly ever",
        differs: &[
            "the context switches are the voluntary ones of the thread that calls, as the kernel counts them. It \
             commits by itself, so all waits are its own; in the paper the thread of the journal has some of them",
            "in the paper an fsync of ext4 gives up the core twice. One of BarrierFS does it once, or twice if it commits \
             nothing because no timestamp has changed: so it is on the drive with power-loss protection. Timestamps \
             are in nanoseconds here, so each fsync commits",
            "a thread also gives up its core when it waits for a lock, or for the thread that owns a stream",
            NO_MOUNT_OPTION,
            "RioFS is not in the paper",
        ],
    }
}

const SWITCH_CLAIMS: &[ProgramClaim] = &[
    ProgramClaim::new("ext4", "BarrierFS", ProgramMeasure::Switches, None, 1.1),
    ProgramClaim::new("ext4", "BarrierFS, order only", ProgramMeasure::Switches, None, 4.0),
];

const SWITCH_TICKS: &[Tick] = &[
    Tick::threads("append", 1, ProgramLoad::Append),
    Tick::threads("overwrite", 1, ProgramLoad::Overwrite),
];

const QUEUE_TICKS: &[Tick] = &[
    Tick::threads("fsync", 1, ProgramLoad::Append).asking(Guarantee::Durable),
    Tick::threads("fbarrier", 1, ProgramLoad::Append).asking(Guarantee::Ordered),
];

/// The commands at the drive under `fsync` and `fbarrier` (figure 12).
const QUEUE_OF_FSYNC: Program = Program {
    paper: Paper::Barrier,
    drives: &[Drive::Flash],
    axis: "call after each append of 4 KiB",
    ticks: QUEUE_TICKS,
    quick: QUEUE_TICKS,
    contenders: &[ON_EXT4, ON_BARRIER_FS, ON_RIO_FS],
    panels: &[ProgramMeasure::LargestQueueDepth, ProgramMeasure::QueueDepth, ProgramMeasure::Rate],
    claims: &[
        ProgramClaim::new("BarrierFS", "ext4", ProgramMeasure::LargestQueueDepth, None, 1.5)
            .at("fsync"),
        ProgramClaim::new("BarrierFS", "ext4", ProgramMeasure::LargestQueueDepth, None, 4.0)
            .at("fbarrier"),
    ],
    conclusion: "BarrierFS has the blocks of a commit at the drive at once, and fbarrier fills the queue",
    differs: &[
        "the paper states depths: BarrierFS has up to two commands at the drive with fsync, and fifteen with fbarrier",
        "a queue of the drive has 32 commands in the paper; here it has as many as the target sends",
        "the fbarrier of ext4 is an fsync",
        "RioFS is not in the paper",
    ],
};

const SERVER_TICKS: &[Tick] = &[
    Tick::threads("varmail", 4, ProgramLoad::Varmail),
    Tick::threads("OLTP-insert", 4, ProgramLoad::OltpInsert),
];

/// The server workloads with and without durability (figure 15).
const SERVERS: Program = Program {
    paper: Paper::Barrier,
    drives: &[Drive::Flash],
    axis: "workload, 4 threads",
    ticks: SERVER_TICKS,
    quick: SERVER_TICKS,
    contenders: &[ON_EXT4, ON_BARRIER_FS, BARRIER_FS_ORDERED, ON_RIO_FS, RIO_FS_ORDERED],
    panels: &[ProgramMeasure::Rate, ProgramMeasure::Mean],
    claims: &[
        server("BarrierFS", Some(1.6), 1.2).at("varmail"),
        server("BarrierFS, order only", Some(43.0), 10.0).at("OLTP-insert"),
    ],
    conclusion: "a mail server gains with durability, and a database tens of times without",
    differs: &[
        "the load makes InnoDB's writes and calls (group commit of the redo log, doublewrite, table); the paper has \
         MySQL with sysbench",
        NO_MOUNT_OPTION,
        "OptFS is missing",
        "RioFS is not in the paper. It submits an overwrite when the barriers before it are durable",
    ],
};

const fn server(over: &'static str, paper: Option<f64>, at_least: f64) -> ProgramClaim {
    ProgramClaim::new(over, "ext4", ProgramMeasure::Rate, paper, at_least)
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
        id: "barrier-10a",
        title: "The drive's queue over time, flash",
        source: barrier_stack!("figure 10, plain-SSD"),
        question: "How full is the drive's queue if each write waits for the one before, and with barriers?",
        experiment: Experiment::QueueOverTime(queue(ONE_FLASH, 5_000)),
    },
    Entry {
        id: "barrier-10b",
        title: "The drive's queue over time, power-loss protection",
        source: barrier_stack!("figure 10, with a drive that needs no FLUSH"),
        question: "How full is the drive's queue if a write needs no FLUSH?",
        experiment: Experiment::QueueOverTime(queue(ONE_OPTANE, 400)),
    },
    Entry {
        id: "barrier-11a",
        title: "Context switches of fsync and fbarrier, flash",
        source: barrier_stack!("figure 11, plain-SSD"),
        question: "How often does a thread give up its core until an fsync returns?",
        experiment: Experiment::Program(switches(&[Drive::Flash])),
    },
    Entry {
        id: "barrier-11b",
        title: "Context switches of fsync and fbarrier, power-loss protection",
        source: barrier_stack!("figure 11, supercap-SSD"),
        question: "How often does a thread give up its core if no commit needs a FLUSH?",
        experiment: Experiment::Program(switches(&[Drive::Optane])),
    },
    Entry {
        id: "barrier-12",
        title: "The drive's queue under fsync and fbarrier",
        source: barrier_stack!("figure 12"),
        question: "How many commands does the drive have at once while one thread syncs?",
        experiment: Experiment::Program(QUEUE_OF_FSYNC),
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
        id: "barrier-14",
        title: "SQLite with barriers, flash",
        source: barrier_stack!("figure 14(b), plain-SSD"),
        question: "What does SQLite gain if a call that only keeps order does not wait?",
        experiment: Experiment::Program(SQLITE),
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
        id: "barrier-15-order",
        title: "A mail server and a database, durable and with order only",
        source: barrier_stack!("figure 15, with and without durability"),
        question: "What do servers gain if they need order only?",
        experiment: Experiment::Program(SERVERS),
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

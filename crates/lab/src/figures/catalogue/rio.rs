//! The figures of *Rio* (EuroSys '23).

use super::{
    Axis, BARRIER, Block, Claim, Contender, Drive, EXT4, Entry, Experiment, FileSystem,
    FileSystemClaim, FileSystemMeasure, FileSystemView, HORAE_FS, Measure, NONE, NONE_APART,
    ONE_FLASH, ONE_OPTANE, OPIMQ, ORDERLESS, Paper, RIO, RIO_APART, RIO_FS, SPEED_AND_EFFICIENCY,
    WITH_BARRIER, WITH_HORAE, WITH_LINUX, WITH_OPIMQ, claim, mode_claim,
};
use crate::workload::Pattern;

/// Title of the Rio paper, for sources.
macro_rules! rio {
    ($place:literal) => {
        concat!("Rio, EuroSys '23, ", $place)
    };
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

/// The contenders of the figures with threads. A drive that keeps an order does so for its own
/// writes, so `barrier` and OPIMQ take part where there is one drive. The paper's figures do not
/// have them.
const ON_ONE_DRIVE: &[Contender] = &[WITH_LINUX, WITH_HORAE, WITH_BARRIER, WITH_OPIMQ, RIO, NONE];
const ON_SEVERAL_DRIVES: &[Contender] = &[WITH_LINUX, WITH_HORAE, RIO, NONE];

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

/// The paper: 67 % less latency, and a 99th percentile of half as much.
const APPEND_CLAIMS: &[FileSystemClaim] = &[
    mode_claim(RIO_FS, EXT4, FileSystemMeasure::Throughput, Some(3.0), 1.5),
    mode_claim(RIO_FS, HORAE_FS, FileSystemMeasure::Throughput, Some(1.2), 1.0),
    mode_claim(RIO_FS, EXT4, FileSystemMeasure::Mean, Some(3.0), 1.5),
    mode_claim(RIO_FS, EXT4, FileSystemMeasure::P99, Some(2.0), 1.2),
];

const VARMAIL_CLAIMS: &[FileSystemClaim] = &[
    mode_claim(RIO_FS, EXT4, FileSystemMeasure::Throughput, Some(2.3), 1.5),
    mode_claim(RIO_FS, HORAE_FS, FileSystemMeasure::Throughput, Some(1.3), 1.0),
];

const FILLSYNC_CLAIMS: &[FileSystemClaim] = &[
    mode_claim(RIO_FS, EXT4, FileSystemMeasure::Throughput, Some(1.9), 1.5),
    mode_claim(RIO_FS, HORAE_FS, FileSystemMeasure::Throughput, Some(1.5), 1.0),
];

const fn on_optane(
    load: &'static str,
    shows: FileSystemView,
    claims: &'static [FileSystemClaim],
    conclusion: &'static str,
) -> FileSystem {
    FileSystem {
        paper: Paper::Rio,
        drive: Drive::Optane,
        load,
        shows,
        modes: &[EXT4, HORAE_FS, RIO_FS],
        claims,
        conclusion,
    }
}

/// The figures, by number.
pub(super) const FIGURES: &[Entry] = &[
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
                claim("Rio", OPIMQ, Measure::Writes, None, 0.8),
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
                claim("Rio", OPIMQ, Measure::Writes, None, 0.8),
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
        experiment: Experiment::FileSystem(on_optane(
            "append_fsync",
            FileSystemView::Threads,
            APPEND_CLAIMS,
            "an fsync with one wait is several times faster than one with three",
        )),
    },
    Entry {
        id: "rio-14",
        title: "The time of an fsync, step by step",
        source: rio!("figure 14"),
        question: "Where does the time of an fsync go?",
        experiment: Experiment::FileSystem(on_optane(
            "append_fsync",
            FileSystemView::Steps,
            APPEND_CLAIMS,
            "the waits between data, journal and commit are what RioFS saves",
        )),
    },
    Entry {
        id: "rio-15a",
        title: "A mail server on the file system",
        source: rio!("figure 15(a)"),
        question: "What does a faster fsync gain for varmail?",
        experiment: Experiment::FileSystem(on_optane(
            "varmail",
            FileSystemView::Threads,
            VARMAIL_CLAIMS,
            "a mail server is about twice as fast",
        )),
    },
    Entry {
        id: "rio-15b",
        title: "RocksDB's fillsync on the file system",
        source: rio!("figure 15(b)"),
        question: "What does a faster fsync gain for RocksDB?",
        experiment: Experiment::FileSystem(on_optane(
            "rocksdb_fillsync",
            FileSystemView::Threads,
            FILLSYNC_CLAIMS,
            "durable puts are about twice as fast",
        )),
    },
    Entry {
        id: "rio-recovery",
        title: "The time to recover full logs",
        source: rio!("§6.5"),
        question: "How long does a recovery take in the worst case?",
        experiment: Experiment::Recovery,
    },
];

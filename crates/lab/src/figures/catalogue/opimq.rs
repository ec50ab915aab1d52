//! The figures of *OPIMQ: Order Preserving IO stack for Multi-Queue Block Device* (FAST '25).

use super::{
    Axis, BARRIER, Block, Claim, Contender, Drive, Entry, Experiment, LINUX, Measure, NONE,
    ONE_FLASH, OPIMQ, ORDERLESS, Paper, RIO, WITH_BARRIER, WITH_LINUX, WITH_OPIMQ, claim,
    program::{Program, ProgramClaim, ProgramContender, ProgramLoad, ProgramMeasure, Tick},
};

/// Title of the paper, for sources.
macro_rules! opimq {
    ($place:literal) => {
        concat!("OPIMQ, FAST '25, ", $place)
    };
}

const MOVING: Contender = Contender::new("OPIMQ, threads move", "opimq").moving();
const NONE_MOVING: Contender = Contender::new("orderless, threads move", "none").moving();

/// The paper has random writes at 3.4 % of orderless ones with transfer and flush, and at 47 % with
/// one queue.
const QUEUE_CLAIMS: &[Claim] = &[
    claim(ORDERLESS, LINUX, Measure::Writes, Some(29.0), 10.0),
    claim(ORDERLESS, BARRIER, Measure::Writes, Some(2.1), 1.2),
    claim(OPIMQ, BARRIER, Measure::Writes, None, 1.2),
    claim(OPIMQ, ORDERLESS, Measure::Writes, None, 0.7),
];

const PINNING_CLAIMS: &[Claim] = &[
    claim(OPIMQ, ORDERLESS, Measure::Writes, None, 0.7),
    claim("OPIMQ, threads move", "orderless, threads move", Measure::Writes, None, 0.7),
];

const OPEXT4: ProgramContender = ProgramContender::new("OPEXT4", "opimq");

const FILE_SYSTEMS: &[ProgramContender] = &[
    ProgramContender::new("ext4", "ext4"),
    ProgramContender::new("BarrierFS", "barrier"),
    OPEXT4,
    ProgramContender::new("RioFS", "rio"),
];

const NOT_THERE: &str = "MQFS is missing, and RioFS is not in the paper";
const CONTAINERS: &str = "each container is a thread with a directory of its own";

/// Overwrites with `fsync`.
const FSYNC: Program = Program {
    paper: Paper::Opimq,
    drives: &[Drive::Flash],
    axis: "threads",
    ticks: &[
        Tick::threads("1", 1, ProgramLoad::Overwrite),
        Tick::threads("2", 2, ProgramLoad::Overwrite),
        Tick::threads("4", 4, ProgramLoad::Overwrite),
    ],
    quick: &[
        Tick::threads("1", 1, ProgramLoad::Overwrite),
        Tick::threads("2", 2, ProgramLoad::Overwrite),
    ],
    contenders: FILE_SYSTEMS,
    panels: &[ProgramMeasure::Mean, ProgramMeasure::P99, ProgramMeasure::P999],
    claims: &[
        ProgramClaim::new("ext4", "OPEXT4", ProgramMeasure::Mean, Some(3.0), 1.5).at("1"),
        ProgramClaim::new("ext4", "OPEXT4", ProgramMeasure::P99, None, 1.2).at("1"),
    ],
    conclusion: "an fsync takes a third of the time if the drive keeps the order of several queues",
    differs: &[NOT_THERE],
};

const fn against(under: &'static str, paper: Option<f64>, at_least: f64) -> ProgramClaim {
    ProgramClaim::new("OPEXT4", under, ProgramMeasure::Rate, paper, at_least)
}

/// Programs in many containers.
const fn containers(
    ticks: &'static [Tick],
    quick: &'static [Tick],
    claims: &'static [ProgramClaim],
    differs: &'static [&'static str],
) -> Program {
    Program {
        paper: Paper::Opimq,
        drives: &[Drive::Flash],
        axis: "containers",
        ticks,
        quick,
        contenders: FILE_SYSTEMS,
        panels: &[ProgramMeasure::Rate, ProgramMeasure::Mean, ProgramMeasure::P999],
        claims,
        conclusion: "many containers gain most if order needs neither waits nor a common queue",
        differs,
    }
}

/// Numbers of containers. The paper states its ratios at 40.
const fn ticks(load: ProgramLoad) -> [Tick; 3] {
    [Tick::threads("1", 1, load), Tick::threads("10", 10, load), Tick::threads("40", 40, load)]
}

/// Those of a quick run.
const fn quick(load: ProgramLoad) -> [Tick; 2] {
    [Tick::threads("2", 2, load), Tick::threads("40", 40, load)]
}

/// The figures, in the order of the paper.
pub(super) const FIGURES: &[Entry] = &[
    Entry {
        id: "opimq-queues",
        title: "Ordered writes of many threads",
        source: opimq!("motivation: random writes with one queue and with several"),
        question: "What does it cost if all threads share one queue?",
        experiment: Experiment::Block(Block {
            paper: Paper::Opimq,
            targets: ONE_FLASH,
            axis: Axis::ManyThreads,
            contenders: &[WITH_LINUX, WITH_BARRIER, WITH_OPIMQ, RIO, NONE],
            panels: &[Measure::Writes, Measure::InFlight],
            claims: QUEUE_CLAIMS,
            conclusion: "order with several queues keeps the speed that one queue loses",
        }),
    },
    Entry {
        id: "opimq-pinning",
        title: "Epoch pinning, with threads that move",
        source: opimq!("epoch pinning overhead"),
        question: "What does it cost to keep the writes of an epoch on one queue?",
        experiment: Experiment::Block(Block {
            paper: Paper::Opimq,
            targets: ONE_FLASH,
            axis: Axis::JournalThreads,
            contenders: &[WITH_OPIMQ, MOVING, NONE, NONE_MOVING],
            panels: &[Measure::Writes, Measure::InitiatorEfficiency],
            claims: PINNING_CLAIMS,
            conclusion: "epoch pinning costs next to nothing",
        }),
    },
    Entry {
        id: "opimq-fsync",
        title: "The time of an fsync after a random overwrite",
        source: opimq!("latency of fsync"),
        question: "How long does an fsync take if its order needs no wait?",
        experiment: Experiment::Program(FSYNC),
    },
    Entry {
        id: "opimq-varmail",
        title: "Mail servers in containers",
        source: opimq!("macro benchmarks, Filebench varmail"),
        question: "What do many mail servers on one file system gain?",
        experiment: Experiment::Program(containers(
            const { &ticks(ProgramLoad::VarmailEach) },
            const { &quick(ProgramLoad::VarmailEach) },
            &[against("ext4", Some(2.9), 1.3).at("40"), against("BarrierFS", None, 1.0).at("40")],
            &[CONTAINERS, "40 mails for each container, so that all fit on the drive", NOT_THERE],
        )),
    },
    Entry {
        id: "opimq-dbench",
        title: "File servers in containers",
        source: opimq!("macro benchmarks, dbench"),
        question: "What do many file servers on one file system gain?",
        experiment: Experiment::Program(containers(
            const { &ticks(ProgramLoad::Dbench) },
            const { &quick(ProgramLoad::Dbench) },
            &[against("ext4", Some(2.8), 1.3).at("40"), against("BarrierFS", None, 1.0).at("40")],
            &[
                CONTAINERS,
                "the load has the shares of calls of dbench's load file, with smaller files and without calls that \
                 change nothing",
                NOT_THERE,
            ],
        )),
    },
    Entry {
        id: "opimq-sysbench",
        title: "Databases in containers",
        source: opimq!("macro benchmarks, sysbench OLTP-insert on MySQL"),
        question: "What do many databases on one file system gain?",
        experiment: Experiment::Program(containers(
            const { &ticks(ProgramLoad::OltpInsertEach) },
            const { &quick(ProgramLoad::OltpInsertEach) },
            &[against("ext4", Some(2.9), 1.3).at("40"), against("BarrierFS", None, 1.0).at("40")],
            &[
                CONTAINERS,
                "the load makes InnoDB's writes and calls (redo log, doublewrite, table); the paper has MySQL",
                NOT_THERE,
            ],
        )),
    },
];

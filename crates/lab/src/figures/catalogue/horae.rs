//! The figures of *Write Dependency Disentanglement with HORAE* (OSDI '20), by its slides.

use super::{
    Axis, BARRIER, BARRIER_FS, Block, Claim, Contender, Drive, EXT4, Entry, Experiment, FileSystem,
    FileSystemMeasure, FileSystemView, HORAE, HORAE_FS, LINUX, Measure, NONE, ONE_FLASH, ORDERLESS,
    Paper, RIO, WITH_BARRIER, WITH_HORAE, WITH_LINUX, claim, mode_claim,
};

/// Title of the paper, for sources.
macro_rules! horae {
    ($place:literal) => {
        concat!("HORAE, OSDI '20, slides: ", $place)
    };
}

/// Updates in place go to the prepare area first.
const REDIRECTED: Contender = Contender::new("HORAE, redirected", "horae").redirecting();

const CLAIMS: &[Claim] = &[
    claim(HORAE, LINUX, Measure::Writes, None, 1.5),
    claim(HORAE, ORDERLESS, Measure::Writes, None, 0.5),
];

const CLAIMS_BESIDE_BARRIER: &[Claim] = &[
    claim(HORAE, LINUX, Measure::Writes, None, 1.5),
    claim(HORAE, BARRIER, Measure::Writes, None, 0.9),
    claim(HORAE, ORDERLESS, Measure::Writes, None, 0.5),
];

const OVERWRITE_CLAIMS: &[Claim] = &[
    claim("HORAE, redirected", LINUX, Measure::Writes, None, 1.5),
    claim("HORAE, redirected", HORAE, Measure::Writes, None, 0.5),
];

const fn block(
    targets: &'static [&'static [Drive]],
    contenders: &'static [Contender],
    claims: &'static [Claim],
    conclusion: &'static str,
) -> Experiment {
    Experiment::Block(Block {
        paper: Paper::Horae,
        targets,
        axis: Axis::Threads,
        contenders,
        panels: &[Measure::Writes, Measure::InitiatorEfficiency],
        claims,
        conclusion,
    })
}

/// The figures, in the order of the slides.
pub(super) const FIGURES: &[Entry] = &[
    Entry {
        id: "horae-one",
        title: "Ordered writes on one drive",
        source: horae!("block device performance, single device"),
        question: "What does a control path of its own bring on one drive?",
        experiment: block(
            ONE_FLASH,
            &[WITH_LINUX, WITH_BARRIER, WITH_HORAE, RIO, NONE],
            CLAIMS_BESIDE_BARRIER,
            "ordering metadata on a path of its own costs less than a FLUSH and a wait",
        ),
    },
    Entry {
        id: "horae-several",
        title: "Ordered writes on three drives",
        source: horae!("block device performance, multiple devices"),
        question: "Do ordered writes grow with the number of drives?",
        experiment: block(
            &[&[Drive::Flash, Drive::Flash, Drive::Optane]],
            &[WITH_LINUX, WITH_HORAE, RIO, NONE],
            CLAIMS,
            "ordered writes use all drives at once",
        ),
    },
    Entry {
        id: "horae-overwrite",
        title: "Ordered random overwrites, with redirection",
        source: horae!("random overwrite"),
        question: "What does it cost that an update in place can be rolled back?",
        experiment: block(
            ONE_FLASH,
            &[WITH_LINUX, WITH_HORAE, REDIRECTED, RIO, NONE],
            OVERWRITE_CLAIMS,
            "redirected updates are ahead of Linux, although each is written twice",
        ),
    },
    Entry {
        id: "horae-fs",
        title: "Allocating writes with fsync, flash",
        source: horae!("file system performance, one drive"),
        question: "What does it bring to send data, journal and commit block side by side?",
        experiment: Experiment::FileSystem(FileSystem {
            paper: Paper::Horae,
            drive: Drive::Flash,
            load: "append_fsync",
            shows: FileSystemView::Threads,
            modes: &[EXT4, BARRIER_FS, HORAE_FS],
            claims: &[
                mode_claim(HORAE_FS, EXT4, FileSystemMeasure::Throughput, None, 1.3),
                // The paper's HoraeFS is ahead of BarrierFS; it states no number.
                mode_claim(HORAE_FS, BARRIER_FS, FileSystemMeasure::Throughput, None, 1.0),
            ],
            conclusion: "HoraeFS is ahead of ext4 and of BarrierFS, at best by 2.2",
        }),
    },
];

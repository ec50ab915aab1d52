//! The figures of *Write Dependency Disentanglement with HORAE* (OSDI '20), by its slides.

use super::{
    Axis, BARRIER, BARRIER_FS, Block, Claim, Contender, Drive, EXT4, Entry, Experiment, FileSystem,
    FileSystemMeasure, FileSystemView, HORAE, HORAE_FS, LINUX, Measure, NONE, ONE_FLASH, ORDERLESS,
    Paper, RIO, WITH_BARRIER, WITH_HORAE, WITH_LINUX, claim, mode_claim,
    program::{Layout, Program, ProgramClaim, ProgramContender, ProgramLoad, ProgramMeasure, Tick},
};
use crate::fs_load::Guarantee;

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

const ON_EXT4: ProgramContender = ProgramContender::new("ext4", "ext4");
const ON_BARRIER_FS: ProgramContender = ProgramContender::new("BarrierFS", "barrier");
const ON_HORAE_FS: ProgramContender = ProgramContender::new("HoraeFS", "horae");
const ON_RIO_FS: ProgramContender = ProgramContender::new("RioFS", "rio");

const APPENDS: [Tick; 4] = [
    Tick::threads("1", 1, ProgramLoad::Append),
    Tick::threads("2", 2, ProgramLoad::Append),
    Tick::threads("4", 4, ProgramLoad::Append),
    Tick::threads("8", 8, ProgramLoad::Append),
];

/// Allocating writes on a file system over two drives.
const SEVERAL_DRIVES: Program = Program {
    paper: Paper::Horae,
    drives: &[Drive::Flash, Drive::Flash],
    axis: "threads",
    ticks: &APPENDS,
    quick: &[APPENDS[0], APPENDS[1]],
    contenders: &[ON_EXT4, ON_HORAE_FS, ON_RIO_FS],
    panels: &[ProgramMeasure::Rate, ProgramMeasure::Mean],
    claims: &[ProgramClaim::new("HoraeFS", "ext4", ProgramMeasure::Rate, None, 1.3)],
    conclusion: "HoraeFS is ahead on two drives, too: it flushes them side by side, once",
    differs: &[
        "the slides' ext4 is on a RAID 0 of the kernel, the file systems here on a striped volume",
        "BarrierFS needs one drive",
        "RioFS is not in the slides",
    ],
};

const MYSQL_TICKS: &[Tick] = &[
    Tick::threads("fsync", 4, ProgramLoad::OltpInsert).asking(Guarantee::Durable),
    Tick::threads("fbarrier", 4, ProgramLoad::OltpInsert).asking(Guarantee::Ordered),
];

const MYSQL_PANELS: &[ProgramMeasure] = &[ProgramMeasure::Rate, ProgramMeasure::Mean];
const MYSQL_LOAD: &str = "the load makes InnoDB's writes and calls (group commit of the redo log, doublewrite, \
                          table); the paper has MySQL with OLTP-insert";
const MYSQL_ORDER: &str = "with fbarrier all calls are barriers. That of ext4 is an fsync; in the slides it is the \
                           mount option nobarrier, a weaker order";
const MYSQL_RIO: &str = "RioFS is not in the slides. RioFS and HoraeFS submit an overwrite when the barriers before \
                         it are durable. MySQL overwrites its files, so their barriers gain little. HORAE's own way is \
                         redirection, which mode horae of RioFS does not rely on: its bars with fbarrier are not judged";

const fn rate(over: &'static str, under: &'static str, at_least: f64) -> ProgramClaim {
    ProgramClaim::new(over, under, ProgramMeasure::Rate, None, at_least)
}

/// MySQL with all files on one drive.
const MYSQL: Program = Program {
    paper: Paper::Horae,
    drives: &[Drive::Flash],
    axis: "calls of MySQL, 4 threads",
    ticks: MYSQL_TICKS,
    quick: MYSQL_TICKS,
    contenders: &[ON_EXT4, ON_BARRIER_FS, ON_HORAE_FS, ON_RIO_FS],
    panels: MYSQL_PANELS,
    claims: &[
        rate("HoraeFS", "ext4", 1.1).at("fsync"),
        rate("HoraeFS", "BarrierFS", 1.0).at("fsync"),
    ],
    conclusion: "MySQL is faster on HoraeFS than on ext4 and on BarrierFS, at best by 1.8",
    differs: &[MYSQL_LOAD, MYSQL_ORDER, MYSQL_RIO],
};

/// MySQL with two drives: one volume over both, or the redo log on the second one.
const MYSQL_REDO: Program = Program {
    paper: Paper::Horae,
    drives: &[Drive::Flash, Drive::Flash],
    axis: "calls of MySQL, 4 threads",
    ticks: MYSQL_TICKS,
    quick: MYSQL_TICKS,
    contenders: &[
        ProgramContender::new("ext4, RAID 0", "ext4"),
        ON_EXT4.on(Layout::Apart),
        ProgramContender::new("HoraeFS, RAID 0", "horae"),
        ON_HORAE_FS.on(Layout::Apart),
        ON_RIO_FS.on(Layout::Apart),
    ],
    panels: MYSQL_PANELS,
    claims: &[
        rate("HoraeFS", "ext4", 1.1).at("fsync"),
        rate("HoraeFS, RAID 0", "ext4, RAID 0", 1.1).at("fsync"),
        rate("HoraeFS", "HoraeFS, RAID 0", 1.0).at("fsync"),
    ],
    conclusion: "HoraeFS is ahead with two drives, and a drive for the redo log is better than a stripe",
    differs: &[
        MYSQL_LOAD,
        MYSQL_ORDER,
        "a redo log of its own has a file system of its own on a target of its own, so the slides' order between the \
         two drives is missing",
        MYSQL_RIO,
    ],
};

const fn objects(name: &'static str, applies: bool, kib: usize) -> Tick {
    Tick::threads(name, 4, ProgramLoad::Objects { applies, bytes: kib << 10 })
}

const STORE_TICKS: &[Tick] = &[
    objects("apply 4K", true, 4),
    objects("apply 64K", true, 64),
    objects("queue 4K", false, 4),
    objects("queue 64K", false, 64),
];

const fn on_store(name: &'static str, engine: &'static str, layout: Layout) -> ProgramContender {
    ProgramContender::new(name, engine).on(layout)
}

/// The object store on one drive and on three.
const STORE: Program = Program {
    paper: Paper::Horae,
    drives: &[Drive::Flash, Drive::Flash, Drive::Optane],
    axis: "transaction, 4 threads",
    ticks: STORE_TICKS,
    quick: STORE_TICKS,
    contenders: &[
        on_store("Linux", "linux", Layout::First),
        on_store("HORAE", "horae", Layout::First),
        on_store("Rio", "rio", Layout::First),
        on_store("Linux, 3 drives", "linux", Layout::Joined),
        on_store("HORAE, 3 drives", "horae", Layout::Joined),
        on_store("Rio, 3 drives", "rio", Layout::Joined),
    ],
    panels: &[ProgramMeasure::Rate],
    claims: &[
        rate("HORAE", "Linux", 1.2).at("queue 4K"),
        rate("HORAE", "Linux", 1.2).at("queue 64K"),
        rate("HORAE, 3 drives", "Linux, 3 drives", 1.2).at("queue 64K"),
    ],
    conclusion: "ordered transactions whose writes go side by side are faster, at best by 2",
    differs: &[
        "the object store of Rio (docs/store.md) on three engines; the paper has BlueStore, and its own version of it",
        "each transaction replaces one object. With apply a thread waits for each transaction, with queue it has 64 \
         in flight, and waits for the oldest one until it is durable",
        "content of 4 KiB is in the record of its transaction, content of 64 KiB in blocks of its own. Data and log are \
         two streams, so with each engine such a record waits until its data is durable; in the slides HORAE orders \
         them without that wait",
        "Rio is not in the slides",
    ],
};

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
    Entry {
        id: "horae-fs-drives",
        title: "Allocating writes with fsync on two drives",
        source: horae!("file system performance, two drives"),
        question: "Does a file system gain from a second drive if it has to flush both?",
        experiment: Experiment::Program(SEVERAL_DRIVES),
    },
    Entry {
        id: "horae-mysql",
        title: "MySQL on one drive",
        source: horae!("application performance, MySQL, sole"),
        question: "What does a database gain if its file system does not wait within an fsync?",
        experiment: Experiment::Program(MYSQL),
    },
    Entry {
        id: "horae-mysql-redo",
        title: "MySQL on two drives",
        source: horae!("application performance, MySQL, separate redo log"),
        question: "Does the redo log need a drive of its own?",
        experiment: Experiment::Program(MYSQL_REDO),
    },
    Entry {
        id: "horae-store",
        title: "Transactions of an object store",
        source: horae!("application performance, HoraeStore"),
        question: "What does an object store gain if it says ordered and durable apart?",
        experiment: Experiment::Program(STORE),
    },
];

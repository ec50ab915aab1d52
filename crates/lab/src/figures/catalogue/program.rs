//! The writes of a program on a file system, or on an object store: points on an axis, and at each of
//! them the contenders in turns.

use super::{Drive, Paper};
use crate::fs_load::{Guarantee, SqliteJournal};

/// The runs of a program.
#[derive(Clone, Copy, Debug)]
pub struct Program {
    /// The paper.
    pub paper: Paper,
    /// The drives of the one target.
    pub drives: &'static [Drive],
    /// The title of the axis.
    pub axis: &'static str,
    /// Its values.
    pub ticks: &'static [Tick],
    /// Those of a quick run.
    pub quick: &'static [Tick],
    /// The compared ways.
    pub contenders: &'static [ProgramContender],
    /// The panels, from left to right.
    pub panels: &'static [ProgramMeasure],
    /// The numbers of the paper.
    pub claims: &'static [ProgramClaim],
    /// The paper's conclusion, as a part of a sentence.
    pub conclusion: &'static str,
    /// The differences to the paper that the figure alone has.
    pub differs: &'static [&'static str],
}

impl Program {
    /// Whether the program uses an object store.
    #[must_use]
    pub fn is_of_objects(&self) -> bool {
        self.ticks.iter().any(|tick| tick.load.is_of_objects())
    }

    /// The values of the axis: a few with `quick`.
    #[must_use]
    pub const fn ticks(&self, quick: bool) -> &'static [Tick] {
        if quick { self.quick } else { self.ticks }
    }
}

/// A value of the axis.
#[derive(Clone, Copy, Debug)]
pub struct Tick {
    /// Its name below the axis.
    pub name: &'static str,
    /// Number of threads.
    pub threads: u32,
    /// The program.
    pub load: ProgramLoad,
    /// The guarantee of the calls, if it is the same for all contenders.
    pub guarantee: Option<Guarantee>,
}

impl Tick {
    /// So many threads of a program.
    pub(super) const fn threads(name: &'static str, threads: u32, load: ProgramLoad) -> Self {
        Self { name, threads, load, guarantee: None }
    }

    /// A program whose calls have this guarantee.
    pub(super) const fn asking(self, guarantee: Guarantee) -> Self {
        Self { guarantee: Some(guarantee), ..self }
    }
}

/// The writes of a program.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ProgramLoad {
    /// Appends of 4 KiB, each with a call.
    Append,
    /// Overwrites of 4 KiB at random places, each with a call.
    Overwrite,
    /// Single inserts of SQLite.
    Sqlite(SqliteJournal),
    /// The mail server of Filebench.
    Varmail,
    /// The same in a directory of its own for each thread.
    VarmailEach,
    /// Inserts into one MySQL database.
    OltpInsert,
    /// Inserts into a MySQL database of each thread.
    OltpInsertEach,
    /// A file server's clients.
    Dbench,
    /// Transactions of an object store, each of one object.
    Objects {
        /// Whether each is durable when its call returns (`apply_transaction`), or ordered only
        /// (`queue_transaction`).
        applies: bool,
        /// The bytes of an object.
        bytes: usize,
    },
}

impl ProgramLoad {
    /// Whether it needs an object store instead of a file system.
    #[must_use]
    pub const fn is_of_objects(self) -> bool {
        matches!(self, Self::Objects { .. })
    }
}

/// A way to run the program.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ProgramContender {
    /// Its name in the figure.
    pub name: &'static str,
    /// The mode of RioFS, or the engine of the object store.
    pub mode: &'static str,
    /// The guarantee of the calls.
    pub guarantee: Guarantee,
    /// Its use of the drives.
    pub layout: Layout,
}

/// The use of several drives.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord)]
pub enum Layout {
    /// One volume over all of them.
    #[default]
    Joined,
    /// A volume on each. The last one is that of the log.
    Apart,
    /// One volume on the first.
    First,
}

impl ProgramContender {
    pub(super) const fn new(name: &'static str, mode: &'static str) -> Self {
        Self { name, mode, guarantee: Guarantee::Durable, layout: Layout::Joined }
    }

    pub(super) const fn asking(self, guarantee: Guarantee) -> Self {
        Self { guarantee, ..self }
    }

    pub(super) const fn on(self, layout: Layout) -> Self {
        Self { layout, ..self }
    }

    /// The drives that it uses.
    #[must_use]
    pub fn drives(&self, all: &'static [Drive]) -> &'static [Drive] {
        match self.layout {
            Layout::Joined | Layout::Apart => all,
            Layout::First => &all[..1],
        }
    }

    /// The guarantee of the calls at a value of the axis.
    #[must_use]
    pub fn guarantee_at(&self, tick: &Tick) -> Guarantee {
        tick.guarantee.unwrap_or(self.guarantee)
    }
}

/// A value of a contender at one tick.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ProgramMeasure {
    /// Thousand operations per second.
    Rate,
    /// Mean time of an operation, µs.
    Mean,
    /// 99th percentile of the time of an operation, µs.
    P99,
    /// 99.9th percentile of the time of an operation, µs.
    P999,
    /// Times that a thread of the program gives up its core, for each operation.
    Switches,
    /// Mean number of commands in flight at the drive.
    QueueDepth,
    /// The largest number of them.
    LargestQueueDepth,
}

impl ProgramMeasure {
    /// The title of its panel.
    #[must_use]
    pub const fn title(self) -> &'static str {
        match self {
            Self::Rate => "thousand operations per second",
            Self::Mean => "mean latency, µs",
            Self::P99 => "99th percentile of latency, µs",
            Self::P999 => "99.9th percentile of latency, µs",
            Self::Switches => "context switches of an operation",
            Self::QueueDepth => "commands at the drive, mean",
            Self::LargestQueueDepth => "commands at the drive, largest number",
        }
    }

    /// Its name in a claim.
    pub(crate) const fn in_claim(self) -> &'static str {
        match self {
            Self::Rate => "",
            Self::Mean => ", mean latency",
            Self::P99 => ", 99th percentile",
            Self::P999 => ", 99.9th percentile",
            Self::Switches => ", context switches",
            Self::QueueDepth => ", commands at the drive",
            Self::LargestQueueDepth => ", largest number of commands at the drive",
        }
    }
}

/// A number of the paper, and the range in which ours supports the conclusion.
#[derive(Clone, Copy, Debug)]
pub struct ProgramClaim {
    /// The contender in the numerator.
    pub over: &'static str,
    /// The contender in the denominator.
    pub under: &'static str,
    /// The compared value.
    pub measure: ProgramMeasure,
    /// The tick at which it is compared; `None`: the geometric mean over all.
    pub at: Option<&'static str>,
    /// The paper's number, if it states one.
    pub paper: Option<f64>,
    /// From here on ours supports the conclusion.
    pub at_least: f64,
}

impl ProgramClaim {
    /// The ratio of two contenders over all ticks.
    pub(super) const fn new(
        over: &'static str,
        under: &'static str,
        measure: ProgramMeasure,
        paper: Option<f64>,
        at_least: f64,
    ) -> Self {
        Self { over, under, measure, at: None, paper, at_least }
    }

    /// The same at one tick.
    pub(super) const fn at(self, tick: &'static str) -> Self {
        Self { at: Some(tick), ..self }
    }
}

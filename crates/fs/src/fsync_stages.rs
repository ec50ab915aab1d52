//! The stages of an `fsync`, and the time that each takes.
//!
//! A call of `fsync` is made within [`measured`] or [`traced`]. The
//! [storage](crate::measured_storage::MeasuredStorage) then assigns its time to stages. It is in
//! exactly one stage at any moment, so the times of the stages add up to the time of the call.
//!
//! | mode | stages of an `fsync` after an append |
//! |---|---|
//! | `rio` | dispatch data, dispatch record, wait record |
//! | `ext4` | dispatch data, wait data, dispatch journal, wait journal, flush journal, dispatch commit, wait commit |

use std::cell::RefCell;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use riopipe::stages::{Distribution, Histogram};
use riopipe_fs_core::storage::Content;
use riopipe_platform::now_ns;

/// A stage of an `fsync`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum FsyncStage {
    /// Dirty pages get their blocks, and are submitted.
    DispatchData,
    /// The data has been submitted, and is waited for.
    WaitData,
    /// A file-level record is made and submitted.
    DispatchRecord,
    /// The record is waited for until it is durable, and with it the data before it.
    WaitRecord,
    /// The blocks of a main commit are made and submitted, apart from the commit block.
    DispatchJournal,
    /// They are waited for.
    WaitJournal,
    /// They have arrived, and are made durable (FLUSH) before the commit block.
    FlushJournal,
    /// The commit block is submitted.
    DispatchCommit,
    /// The commit block is waited for until it is durable.
    WaitCommit,
    /// Blocks are written home, because the log is full.
    Home,
    /// Blocks are read.
    Read,
    /// All else: locks, the commit of another thread, the cut of a commit.
    Rest,
}

impl FsyncStage {
    /// The number of stages.
    pub const COUNT: usize = 12;
    /// All stages, in the order in which an `fsync` goes through them.
    pub const ALL: [Self; Self::COUNT] = [
        Self::DispatchData,
        Self::WaitData,
        Self::DispatchRecord,
        Self::WaitRecord,
        Self::DispatchJournal,
        Self::WaitJournal,
        Self::FlushJournal,
        Self::DispatchCommit,
        Self::WaitCommit,
        Self::Home,
        Self::Read,
        Self::Rest,
    ];

    /// Its name in results and metrics.
    #[must_use]
    pub const fn name(self) -> &'static str {
        match self {
            Self::DispatchData => "dispatch_data",
            Self::WaitData => "wait_data",
            Self::DispatchRecord => "dispatch_record",
            Self::WaitRecord => "wait_record",
            Self::DispatchJournal => "dispatch_journal",
            Self::WaitJournal => "wait_journal",
            Self::FlushJournal => "flush_journal",
            Self::DispatchCommit => "dispatch_commit",
            Self::WaitCommit => "wait_commit",
            Self::Home => "home",
            Self::Read => "read",
            Self::Rest => "rest",
        }
    }

    /// The stage that ends when a group of this content is submitted.
    const fn of_submit(content: Content) -> Self {
        match content {
            Content::Data => Self::DispatchData,
            Content::Record => Self::DispatchRecord,
            Content::Journal => Self::DispatchJournal,
            Content::Commit => Self::DispatchCommit,
            Content::Home => Self::Home,
        }
    }

    /// The stage in which a group of this content is waited for.
    const fn of_wait(content: Content, until: Until) -> Self {
        match (content, until) {
            (Content::Data, _) => Self::WaitData,
            (Content::Record, _) => Self::WaitRecord,
            (Content::Journal, Until::Complete) => Self::WaitJournal,
            (Content::Journal, Until::Durable) => Self::FlushJournal,
            (Content::Commit, _) => Self::WaitCommit,
            (Content::Home, _) => Self::Home,
        }
    }
}

/// The mark for which a call waits.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Until {
    Complete,
    Durable,
}

/// A call of the storage.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Call {
    Submit(Content),
    /// `is_open`: the mark had not been reached when the call began.
    Wait {
        content: Content,
        until: Until,
        is_open: bool,
    },
    Read,
}

/// A stage of one `fsync`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct FsyncStep {
    /// The stage.
    pub stage: FsyncStage,
    /// When it began, ns after the call of `fsync`.
    pub from_ns: u64,
    /// When it ended, ns after the call of `fsync`.
    pub to_ns: u64,
    /// Whether it is a wait for something that had not arrived before.
    pub is_serial_wait: bool,
}

/// The stages of one `fsync`, in their order, without [`FsyncStage::Rest`].
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct FsyncTrace {
    /// The stages.
    pub steps: Vec<FsyncStep>,
    /// The time of the whole call, ns.
    pub total_ns: u64,
}

/// The time of one `fsync` in each stage.
#[derive(Debug)]
struct Stopwatch {
    began_ns: u64,
    /// The end of the last call of the storage.
    last_ns: u64,
    stages: [u64; FsyncStage::COUNT],
    serial_waits: usize,
    /// With a trace only.
    steps: Option<Vec<FsyncStep>>,
    /// The sums to which it will be added: those of the storage.
    times: Option<Arc<FsyncTimes>>,
}

impl Stopwatch {
    fn new(now_ns: u64, is_traced: bool) -> Self {
        Self {
            began_ns: now_ns,
            last_ns: now_ns,
            stages: [0; FsyncStage::COUNT],
            serial_waits: 0,
            steps: is_traced.then(Vec::new),
            times: None,
        }
    }

    /// Counts a call of the storage. A group's stage begins at the end of the call before, because
    /// the file system has made it since then.
    fn on_call(&mut self, call: Call, began_ns: u64, ended_ns: u64) {
        let (stage, from_ns, is_serial_wait) = match call {
            Call::Submit(content) => (FsyncStage::of_submit(content), self.last_ns, false),
            Call::Wait { content, until, is_open } => {
                (FsyncStage::of_wait(content, until), began_ns, is_open)
            }
            Call::Read => (FsyncStage::Read, began_ns, false),
        };
        self.stages[stage as usize] += ended_ns.saturating_sub(from_ns);
        self.serial_waits += usize::from(is_serial_wait);
        self.last_ns = ended_ns;
        if let Some(steps) = &mut self.steps {
            let since = |ns: u64| ns.saturating_sub(self.began_ns);
            let (from_ns, to_ns) = (since(from_ns), since(ended_ns));
            steps.push(FsyncStep { stage, from_ns, to_ns, is_serial_wait });
        }
    }

    /// Ends the call: what no other stage has is the rest. Returns the time of the whole.
    fn end(&mut self, now_ns: u64) -> u64 {
        let total_ns = now_ns.saturating_sub(self.began_ns);
        let known: u64 = self.stages.iter().sum();
        self.stages[FsyncStage::Rest as usize] += total_ns.saturating_sub(known);
        total_ns
    }
}

thread_local! {
    /// The `fsync` that this thread makes.
    static RUNNING: RefCell<Option<Stopwatch>> = const { RefCell::new(None) };
}

/// Makes a call of `fsync`, and adds its time to the [`FsyncTimes`] of the storage. A call that
/// needs nothing of the storage is not counted.
pub fn measured<T>(fsync: impl FnOnce() -> T) -> T {
    run(false, fsync).0
}

/// As [`measured`], and returns the stages of the call, too.
pub fn traced<T>(fsync: impl FnOnce() -> T) -> (T, FsyncTrace) {
    run(true, fsync)
}

fn run<T>(is_traced: bool, fsync: impl FnOnce() -> T) -> (T, FsyncTrace) {
    let stopwatch = Stopwatch::new(now_ns(), is_traced);
    RUNNING.with_borrow_mut(|running| *running = Some(stopwatch));
    let result = fsync();
    let stopwatch = RUNNING.with_borrow_mut(Option::take);
    let Some(mut stopwatch) = stopwatch else { return (result, FsyncTrace::default()) };
    let total_ns = stopwatch.end(now_ns());
    if let Some(times) = stopwatch.times.take() {
        times.add(&stopwatch, total_ns);
    }
    (result, FsyncTrace { steps: stopwatch.steps.unwrap_or_default(), total_ns })
}

/// Whether this thread makes a call of `fsync` that is measured.
pub(crate) fn is_running() -> bool {
    RUNNING.with_borrow(Option::is_some)
}

/// Counts a call of the storage, if this thread makes it within an `fsync`.
pub(crate) fn on_call(times: &Arc<FsyncTimes>, call: Call, began_ns: u64) {
    RUNNING.with_borrow_mut(|running| {
        if let Some(stopwatch) = running {
            stopwatch.times.get_or_insert_with(|| Arc::clone(times));
            stopwatch.on_call(call, began_ns, now_ns());
        }
    });
}

/// The largest number of serial waits of an `fsync` that is counted apart.
pub const SERIAL_WAITS_MAX: usize = 8;

/// The times of all measured calls of `fsync` since the mount, by stage. Any thread may read them at
/// any time.
#[derive(Debug, Default)]
pub struct FsyncTimes {
    stages: [Histogram; FsyncStage::COUNT],
    total: Histogram,
    serial_waits: [AtomicU64; SERIAL_WAITS_MAX + 1],
}

impl FsyncTimes {
    fn add(&self, one: &Stopwatch, total_ns: u64) {
        for (histogram, &ns) in self.stages.iter().zip(&one.stages) {
            if ns > 0 {
                histogram.record(ns);
            }
        }
        self.total.record(total_ns);
        let waits = one.serial_waits.min(SERIAL_WAITS_MAX);
        self.serial_waits[waits].fetch_add(1, Ordering::Relaxed);
    }

    /// The times so far.
    #[must_use]
    pub fn snapshot(&self) -> FsyncTimesSnapshot {
        let load = |count: &AtomicU64| count.load(Ordering::Relaxed);
        FsyncTimesSnapshot {
            stages: FsyncStage::ALL.map(|stage| self.stages[stage as usize].snapshot()),
            total: self.total.snapshot(),
            serial_waits: self.serial_waits.each_ref().map(load),
        }
    }
}

/// The times of the calls of `fsync` by some moment, or between two.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct FsyncTimesSnapshot {
    stages: [Distribution; FsyncStage::COUNT],
    total: Distribution,
    serial_waits: [u64; SERIAL_WAITS_MAX + 1],
}

impl FsyncTimesSnapshot {
    /// The times of the calls that were in a stage. Its [count](Distribution::count) is the number
    /// of these calls.
    #[must_use]
    pub fn stage(&self, stage: FsyncStage) -> &Distribution {
        &self.stages[stage as usize]
    }

    /// All stages, in the order in which an `fsync` goes through them.
    pub fn stages(&self) -> impl Iterator<Item = (FsyncStage, &Distribution)> {
        FsyncStage::ALL.into_iter().map(|stage| (stage, self.stage(stage)))
    }

    /// The times of the whole calls.
    #[must_use]
    pub const fn total(&self) -> &Distribution {
        &self.total
    }

    /// The number of calls by how often they waited for something that had not arrived before, one
    /// wait after the other. The last one has [`SERIAL_WAITS_MAX`] waits or more.
    #[must_use]
    pub const fn serial_waits(&self) -> &[u64; SERIAL_WAITS_MAX + 1] {
        &self.serial_waits
    }

    /// The mean of these waits; `None` without calls.
    #[must_use]
    pub fn mean_serial_waits(&self) -> Option<f64> {
        let calls: u64 = self.serial_waits.iter().sum();
        let waits: u64 =
            self.serial_waits.iter().zip(0..).map(|(calls, waits)| calls * waits).sum();
        (calls > 0).then(|| waits as f64 / calls as f64)
    }

    /// The calls that ended after the snapshot `before`.
    #[must_use]
    pub fn since(&self, before: &Self) -> Self {
        Self {
            stages: FsyncStage::ALL.map(|stage| self.stage(stage).since(before.stage(stage))),
            total: self.total.since(&before.total),
            serial_waits: std::array::from_fn(|waits| {
                self.serial_waits[waits].saturating_sub(before.serial_waits[waits])
            }),
        }
    }

    /// Adds the calls of another snapshot.
    pub fn add(&mut self, other: &Self) {
        self.stages.iter_mut().zip(&other.stages).for_each(|(sum, more)| sum.add(more));
        self.total.add(&other.total);
        self.serial_waits.iter_mut().zip(&other.serial_waits).for_each(|(sum, more)| *sum += more);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// An `fsync` in mode `ext4`, with times in ns: begin and end of each call.
    fn ext4() -> Stopwatch {
        let wait = |content, until, is_open| Call::Wait { content, until, is_open };
        let mut one = Stopwatch::new(1_000, true);
        one.on_call(Call::Submit(Content::Data), 1_007, 1_010);
        one.on_call(wait(Content::Data, Until::Complete, true), 1_015, 1_115);
        one.on_call(Call::Submit(Content::Journal), 1_120, 1_125);
        one.on_call(wait(Content::Journal, Until::Complete, true), 1_125, 1_225);
        one.on_call(wait(Content::Journal, Until::Durable, false), 1_225, 1_226);
        one.on_call(Call::Submit(Content::Commit), 1_228, 1_229);
        one.on_call(wait(Content::Commit, Until::Durable, true), 1_229, 1_329);
        one
    }

    #[test]
    fn the_stages_of_a_call_add_up_to_its_time() {
        let mut one = ext4();
        assert_eq!(one.end(1_331), 331);
        let of = |stage: FsyncStage| one.stages[stage as usize];
        assert_eq!(one.stages.iter().sum::<u64>(), 331);
        assert_eq!(of(FsyncStage::DispatchData), 10, "the work since the call is a part of it");
        assert_eq!(of(FsyncStage::WaitData), 100);
        assert_eq!(of(FsyncStage::DispatchJournal), 10);
        assert_eq!(of(FsyncStage::FlushJournal), 1);
        assert_eq!(of(FsyncStage::WaitCommit), 100);
        assert_eq!(of(FsyncStage::Rest), 7, "before the first wait, and after the last");
        assert_eq!(one.serial_waits, 3, "a mark that was reached before is no wait");
        let steps = one.steps.unwrap();
        assert!(steps.is_sorted_by_key(|step| step.from_ns));
        assert_eq!(
            steps[1],
            FsyncStep {
                stage: FsyncStage::WaitData,
                from_ns: 15,
                to_ns: 115,
                is_serial_wait: true
            }
        );
    }

    #[test]
    fn sums_are_those_of_the_calls_since() {
        let times = FsyncTimes::default();
        let add = || {
            let mut one = ext4();
            let total_ns = one.end(1_331);
            times.add(&one, total_ns);
        };
        assert_eq!(times.snapshot().mean_serial_waits(), None);
        add();
        let before = times.snapshot();
        add();
        add();
        let mut since = times.snapshot().since(&before);
        assert_eq!((since.total().count(), since.total().sum()), (2, 662));
        assert_eq!(since.stage(FsyncStage::WaitCommit).sum(), 200);
        assert_eq!(since.stage(FsyncStage::DispatchRecord).count(), 0, "no call was in it");
        assert_eq!((since.serial_waits()[3], since.mean_serial_waits()), (2, Some(3.0)));
        since.add(&before);
        assert_eq!(since, times.snapshot());
        let sum: u64 = since.stages().map(|(_, seen)| seen.sum()).sum();
        assert_eq!(sum, since.total().sum());
    }

    #[test]
    fn only_calls_within_an_fsync_are_counted() {
        let times = Arc::new(FsyncTimes::default());
        on_call(&times, Call::Submit(Content::Data), now_ns());
        measured(|| ());
        assert_eq!(times.snapshot(), FsyncTimesSnapshot::default());
        let (result, trace) = traced(|| {
            assert!(is_running());
            on_call(&times, Call::Submit(Content::Record), now_ns());
            5
        });
        assert!(!is_running());
        assert_eq!((result, trace.steps.len()), (5, 1));
        assert_eq!(times.snapshot().total().sum(), trace.total_ns);
    }

    #[test]
    fn stages_are_numbered_in_the_order_of_the_list() {
        for (number, stage) in FsyncStage::ALL.into_iter().enumerate() {
            assert_eq!(stage as usize, number, "{}", stage.name());
        }
    }
}

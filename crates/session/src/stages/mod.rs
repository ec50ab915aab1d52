//! The stages of an ordered write, and the time that sampled writes spend in each.
//!
//! Initiator and target each choose some writes, about one in [`ONE_IN`], and trace them: they record how
//! long it is in each stage. A traced write is in exactly one stage at any moment. So the times of
//! its stages add up to the time of the write. A write that is not traced costs a counter and a few
//! branches that are never taken.
//!
//! Sessions have no clock. A target's session asks its environment for the time, and an initiator's
//! session reports that it needs the time. Both do this only for a traced write.

mod histogram;
mod sampler;

pub use histogram::{Distribution, Histogram};
pub(crate) use sampler::Sampler;

/// On average, one write in this number is traced, and more of the first writes of a stream and of a
/// stream with few writes in a second. The clock is read seven times for a traced
/// write, which costs some 3 ns a write, averaged over all writes.
pub const ONE_IN: u64 = 256;

/// A stage of an ordered write: a step that is being done for the write, or for which it waits.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
#[repr(u8)]
pub enum Stage {
    /// Initiator: the write's group is checked, cut at stripes, numbered and merged with adjacent
    /// ones.
    Submit,
    /// Initiator: the write waits in the ORDER queue until it becomes a command.
    OrderQueue,
    /// Initiator: the command is sent, and its answer has not arrived. This includes the target's
    /// stages.
    Wire,
    /// Target: the gate holds the write back. An earlier entry is missing, its blocks overlap, a
    /// FLUSH must come first, or its data has not arrived yet.
    Gate,
    /// Target: the write's attribute is stored in the ordering log and fenced, with those of its
    /// batch.
    LogAppend,
    /// Target: the drive carries out the write, or a FLUSH that belongs to it.
    Device,
    /// Target: the persist word of the entry is set and fenced, with those of its batch.
    Persist,
    /// Target: the answer is made and passed to the socket.
    Completion,
    /// Initiator: the write is done, and waits for all earlier groups and for the rest of its
    /// group.
    InOrderWait,
}

impl Stage {
    /// The number of stages.
    pub const COUNT: usize = 9;
    /// All stages, in the order in which a write goes through them.
    pub const ALL: [Self; Self::COUNT] = [
        Self::Submit,
        Self::OrderQueue,
        Self::Wire,
        Self::Gate,
        Self::LogAppend,
        Self::Device,
        Self::Persist,
        Self::Completion,
        Self::InOrderWait,
    ];
    /// The stages of an initiator.
    pub const INITIATOR: [Self; 4] =
        [Self::Submit, Self::OrderQueue, Self::Wire, Self::InOrderWait];
    /// The stages of a target.
    pub const TARGET: [Self; 5] =
        [Self::Gate, Self::LogAppend, Self::Device, Self::Persist, Self::Completion];

    /// The name of the stage in metrics and JSON.
    #[must_use]
    pub const fn name(self) -> &'static str {
        match self {
            Self::Submit => "submit",
            Self::OrderQueue => "order_queue",
            Self::Wire => "wire",
            Self::Gate => "gate",
            Self::LogAppend => "log_append",
            Self::Device => "device",
            Self::Persist => "persist",
            Self::Completion => "completion",
            Self::InOrderWait => "in_order_wait",
        }
    }
}

/// The time that one traced write spent in each stage, ns.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Spent([u64; Stage::COUNT]);

impl Spent {
    /// The time in this stage, ns.
    #[must_use]
    pub const fn of(&self, stage: Stage) -> u64 {
        self.0[stage as usize]
    }

    /// The time in all stages, ns.
    #[must_use]
    pub fn total(&self) -> u64 {
        self.0.iter().sum()
    }
}

/// A traced write: its present stage, and the time at which it entered that stage.
#[derive(Clone, Debug)]
pub(crate) struct Trace {
    stage: Stage,
    /// The time at which the write entered the stage, ns.
    entered_at: u64,
    /// The time in the stages before.
    spent: Spent,
}

impl Trace {
    /// A write that enters `stage` at `now`, ns.
    pub(crate) fn begin(stage: Stage, now: u64) -> Self {
        Self { stage, entered_at: now, spent: Spent::default() }
    }

    pub(crate) const fn stage(&self) -> Stage {
        self.stage
    }

    /// Records that the write enters the stage `next`. It may have been in that stage before.
    pub(crate) fn enter(&mut self, next: Stage, now: u64) {
        self.spent.0[self.stage as usize] += now.saturating_sub(self.entered_at);
        self.stage = next;
        self.entered_at = now;
    }

    /// Ends the trace at `now`, because the write is done. Returns the time in each stage.
    pub(crate) fn end(&mut self, now: u64) -> Spent {
        self.enter(self.stage, now);
        self.spent
    }
}

/// A histogram for each stage of one side. All threads that trace and all that read share it,
/// without a lock. Recording allocates nothing.
#[derive(Debug)]
pub struct Stages {
    /// The histograms, by the number of the stage.
    histograms: [Histogram; Stage::COUNT],
    /// The stages of this side. The other histograms stay empty.
    own_stages: &'static [Stage],
}

impl Stages {
    /// Empty histograms of a target's stages.
    #[must_use]
    pub const fn of_target() -> Self {
        Self { histograms: [const { Histogram::new() }; Stage::COUNT], own_stages: &Stage::TARGET }
    }

    /// Empty histograms of an initiator's stages.
    #[must_use]
    pub const fn of_initiator() -> Self {
        Self {
            histograms: [const { Histogram::new() }; Stage::COUNT],
            own_stages: &Stage::INITIATOR,
        }
    }

    /// Records one traced write: one value for each stage of this side, 0 for a stage that it
    /// skipped.
    pub fn record(&self, spent: &Spent) {
        for &stage in self.own_stages {
            self.histograms[stage as usize].record(spent.of(stage));
        }
    }

    /// The recorded values so far, by stage. A write that another thread records meanwhile may be
    /// in the values of some stages and not yet in those of others.
    pub fn snapshot(&self) -> impl Iterator<Item = (Stage, Distribution)> + '_ {
        self.own_stages.iter().map(|&stage| (stage, self.histograms[stage as usize].snapshot()))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_sides_share_the_stages_between_them() {
        let mut both: std::vec::Vec<_> =
            Stage::INITIATOR.into_iter().chain(Stage::TARGET).collect();
        both.sort();
        assert_eq!(both, Stage::ALL);
        assert!(Stage::ALL.iter().enumerate().all(|(i, stage)| *stage as usize == i));
    }

    #[test]
    fn stages_add_up_to_the_whole() {
        let mut trace = Trace::begin(Stage::Gate, 100);
        for (stage, now) in [(Stage::Device, 150), (Stage::Gate, 400), (Stage::Device, 410)] {
            trace.enter(stage, now);
        }
        let spent = trace.end(1_000);
        assert_eq!((spent.of(Stage::Gate), spent.of(Stage::Device)), (60, 840));
        assert_eq!(spent.total(), 900);
    }

    #[test]
    fn a_clock_that_stops_or_steps_back_adds_no_time() {
        let mut trace = Trace::begin(Stage::Gate, 100);
        trace.enter(Stage::Device, 90);
        assert_eq!(trace.end(90).total(), 0);
    }

    #[test]
    fn only_the_stages_of_the_own_side_are_recorded() {
        let stages = Stages::of_target();
        let mut trace = Trace::begin(Stage::Wire, 0);
        trace.enter(Stage::Device, 50);
        stages.record(&trace.end(70));
        let all: std::vec::Vec<_> =
            stages.snapshot().map(|(s, d)| (s, d.count(), d.sum())).collect();
        assert_eq!(all.len(), Stage::TARGET.len());
        assert!(all.contains(&(Stage::Device, 1, 20)) && all.contains(&(Stage::Gate, 1, 0)));
    }
}

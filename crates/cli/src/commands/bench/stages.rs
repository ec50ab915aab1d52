//! The time of the stages during a measurement, on both sides: `rio bench run --stages`.

use riopipe::stages::{Distribution, Stage};
use riopipe_lab::terminal::{Colour, Terminal};
use riopipe_target::{Running, StageStat, with_shares};
use serde::Serialize;

use crate::stage_table;

/// The traced stages of one engine at one depth, in all rounds.
#[derive(Clone, Debug, Default)]
pub(super) struct Traced {
    initiator: Vec<(String, Distribution)>,
    target: Vec<(String, Distribution)>,
}

impl Traced {
    /// One run, from the volume's stages and those of its targets since `before`.
    pub(super) fn of(
        volume: &[(Stage, Distribution)],
        before: &[Seen],
        targets: &[Running],
    ) -> Self {
        let mut one = Self::default();
        let volume = volume.iter().map(|(stage, seen)| (stage.name().to_owned(), seen.clone()));
        sum_up(&mut one.initiator, volume);
        for (Seen(before), target) in before.iter().zip(targets) {
            let both = stages(target).into_iter().zip(before);
            let since = both.map(|((stage, now), (_, then))| (stage, now.since(then)));
            sum_up(&mut one.target, since);
        }
        one
    }

    /// Adds a run.
    pub(super) fn add(&mut self, run: Self) {
        sum_up(&mut self.initiator, run.initiator);
        sum_up(&mut self.target, run.target);
    }

    pub(super) fn view(self, engine: &'static str, queue_depth: u32) -> View {
        // The percentiles are enough here; all buckets would be most of the result.
        let brief = |stages| {
            let mut stages = with_shares(stages);
            stages.iter_mut().for_each(|stage| stage.buckets.clear());
            stages
        };
        let Self { initiator, target } = self;
        View { engine, queue_depth, initiator: brief(initiator), target: brief(target) }
    }
}

fn sum_up(
    all: &mut Vec<(String, Distribution)>,
    more: impl IntoIterator<Item = (String, Distribution)>,
) {
    for (stage, seen) in more {
        match all.iter_mut().find(|(name, _)| *name == stage) {
            Some((_, sum)) => sum.add(&seen),
            None => all.push((stage, seen)),
        }
    }
}

/// The stages of one target at some time.
#[derive(Clone, Debug)]
pub(super) struct Seen(Vec<(String, Distribution)>);

impl Seen {
    pub(super) fn by(targets: &[Running]) -> Vec<Self> {
        targets.iter().map(|target| Self(stages(target))).collect()
    }
}

fn stages(target: &Running) -> Vec<(String, Distribution)> {
    let stages = target.stat().stages.into_iter();
    stages.map(|stage| (stage.stage.clone(), stage.distribution())).collect()
}

/// The stages in printed form.
#[derive(Clone, Debug, Serialize)]
pub(super) struct View {
    engine: &'static str,
    queue_depth: u32,
    initiator: Vec<StageStat>,
    /// Empty for targets of other processes, which report their own.
    target: Vec<StageStat>,
}

impl View {
    pub(super) fn text(&self, terminal: &Terminal) -> String {
        let mut text = String::new();
        for (side, stages) in [("initiator", &self.initiator), ("targets", &self.target)] {
            // Without order, a target has nothing to trace.
            if stages.iter().any(|stage| stage.count > 0) {
                let head = format!("{} at depth {}: {side}", self.engine, self.queue_depth);
                text += &format!("\n{}\n", terminal.paint(Colour::Bold, &head));
                text += &stage_table::render(stages, terminal);
            }
        }
        text
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn rounds_add_up() {
        let seen = |ns| vec![(Stage::Wire, Distribution::from_filled(&[(ns, 1)], ns, ns))];
        let mut traced = Traced::default();
        traced.add(Traced::of(&seen(10), &[], &[]));
        traced.add(Traced::of(&seen(30), &[], &[]));
        let view = traced.view("rio", 32);
        assert_eq!((view.initiator[0].count, view.initiator[0].sum_ns), (2, 40));
        assert!(view.target.is_empty());
        let text = view.text(&Terminal::PLAIN);
        assert!(text.contains("rio at depth 32: initiator"), "{text}");
        assert!(!text.contains("targets"), "{text}");
    }
}

//! A figure of the commands at a drive over time.

use riopipe_model::ssd::Profile;

use super::{
    block,
    catalogue::{Entry, QueueOverTime},
    figure::{Claim, Curve, Figure, Form, Panel, Value, Verdict},
};
use crate::{machine::Machine, units};

/// The commands at the drive during a run of one contender.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Queue {
    /// The name of the contender.
    pub contender: String,
    /// The numbers at [`SAMPLES`] moments with the same distance.
    pub depths: Vec<u64>,
    /// The mean over the run.
    pub mean: f64,
    /// The largest one of the run.
    pub largest: u64,
}

/// The moments at which the number is shown.
pub const SAMPLES: usize = 41;
/// A moment of this many has its time below the axis.
const LABELLED_ONE_IN: usize = 10;

/// The conditions of the measurement.
#[derive(Clone, Debug)]
pub struct Conditions {
    /// Time of one command to the target and of its answer, without the drive, ns.
    pub trip_ns: f64,
    /// The machine, described before the runs.
    pub machine: Machine,
    /// Whether the runs were short.
    pub quick: bool,
}

/// The finished figure.
#[must_use]
pub fn figure(entry: &Entry, spec: &QueueOverTime, runs: &[Queue], at: &Conditions) -> Figure {
    let find = |name: &str| runs.iter().find(|run| run.contender == name);
    let curve = |name: &str| Curve {
        name: name.to_owned(),
        values: (0..SAMPLES)
            .map(|moment| {
                let depth = *find(name)?.depths.get(moment)?;
                Some(Value { median: depth as f64, interval: None })
            })
            .collect(),
        expected: Vec::new(),
    };
    let tick = |moment: usize| match moment.is_multiple_of(LABELLED_ONE_IN) {
        true => format!("{:.2}", spec.every_ns(moment as u64) as f64 / 1e6),
        false => String::new(),
    };
    let claims = claims(spec, runs);
    Figure {
        quick: at.quick,
        machine: at.machine.clone(),
        setup: format!(
            "{}; one thread; the commands at the drive at {SAMPLES} moments within one run",
            block::setup(&spec.block)
        ),
        differs: block::differs(&spec.block, &at.machine),
        panels: vec![Panel {
            form: Form::Lines,
            title: "commands at the drive".to_owned(),
            axis: "ms".to_owned(),
            ticks: (0..SAMPLES).map(tick).collect(),
            within_cores: SAMPLES,
            curves: spec.block.contenders.iter().map(|one| curve(one.name)).collect(),
        }],
        verdict: Verdict::of(spec.block.conclusion, &claims),
        claims,
        model: model(spec, at.trip_ns),
        ..Figure::of(entry)
    }
}

fn claims(spec: &QueueOverTime, runs: &[Queue]) -> Vec<Claim> {
    let find = |name: &str| runs.iter().find(|run| run.contender == name);
    let ratio = |over: f64, under: f64| (over > 0.0 && under > 0.0).then(|| over / under);
    let (waits, ordered) = (find(spec.waits), find(spec.ordered));
    let in_flight = f64::from(spec.in_flight());
    let pair = waits.zip(ordered);
    vec![
        Claim {
            what: format!("{} / {}, commands at the drive, mean", spec.ordered, spec.waits),
            paper: None,
            expected: None,
            here: pair.and_then(|(waits, ordered)| ratio(ordered.mean, waits.mean)),
            at_least: 4.0,
        },
        Claim {
            what: format!("one / largest number with {}", spec.waits),
            paper: Some(1.0),
            expected: Some(1.0),
            here: waits.and_then(|run| ratio(1.0, run.largest as f64)),
            at_least: 1.0,
        },
        Claim {
            what: format!("largest number with {} / writes in flight", spec.ordered),
            paper: Some(1.0),
            expected: Some(1.0),
            here: ordered.and_then(|run| ratio(run.largest as f64, in_flight)),
            at_least: 0.7,
        },
    ]
}

fn model(spec: &QueueOverTime, trip_ns: f64) -> String {
    let drive = spec.block.targets[0][0];
    let Some(profile) = Profile::named(drive.profile()) else { return String::new() };
    let write = block::write_ns_of(drive);
    let flush = match profile.plp {
        true => String::new(),
        false => {
            let flush = units::time(profile.flush_base_ns as f64);
            format!(" On this drive a FLUSH ({flush}) follows, also alone.")
        }
    };
    format!(
        "A write is at the drive for {}, and {} passes between two of them if each is waited for: the queue has \
         one command or none.{flush} Without a wait, {} writes are on their way at any time. They are at the drive \
         as far as the network and the target are faster than it: it takes a command in {}.",
        units::time(write),
        units::time(trip_ns),
        spec.in_flight(),
        units::time(profile.write_command_ns as f64),
    )
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::figures::{
        catalogue::{self, Experiment},
        figure::Holds,
    };

    fn run(contender: &str, depths: &[u64]) -> Queue {
        let depths: Vec<u64> = depths.iter().copied().cycle().take(SAMPLES).collect();
        Queue {
            contender: contender.to_owned(),
            mean: depths.iter().sum::<u64>() as f64 / SAMPLES as f64,
            largest: depths.iter().copied().max().unwrap_or(0),
            depths,
        }
    }

    fn of(runs: &[Queue]) -> Figure {
        let entry = catalogue::named("barrier-10a").unwrap();
        let Experiment::QueueOverTime(spec) = &entry.experiment else { panic!() };
        let machine = Machine { cores: 2, ..Machine::default() };
        figure(entry, spec, runs, &Conditions { trip_ns: 12_000.0, machine, quick: true })
    }

    #[test]
    fn a_full_queue_beside_one_with_a_command_or_none() {
        let figure = of(&[run("Linux", &[0, 1]), run("barrier", &[28, 32])]);
        assert_eq!(figure.verdict.holds, Holds::Yes, "{}", figure.verdict.sentence);
        let panel = &figure.panels[0];
        assert_eq!((panel.ticks.len(), panel.curves[0].values.len()), (SAMPLES, SAMPLES));
        assert_eq!((panel.ticks[0].as_str(), panel.ticks[1].as_str()), ("0.00", ""));
        assert_eq!(panel.curves[1].values[1].unwrap().median, 32.0);
        assert!(figure.model.contains("FLUSH"), "{}", figure.model);
    }

    #[test]
    fn a_second_command_of_linux_shows_in_the_verdict() {
        let figure = of(&[run("Linux", &[2, 1]), run("barrier", &[28, 32])]);
        assert_eq!(figure.verdict.holds, Holds::InPart, "{}", figure.verdict.sentence);
        assert_eq!(of(&[]).verdict.holds, Holds::NotMeasured);
    }
}

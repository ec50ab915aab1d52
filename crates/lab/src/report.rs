//! Results of comparisons: the machine, the points, each engine's figures and their ratios; as JSON
//! and as text.

use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};

use crate::{
    access::Access,
    bars::{self, Bar},
    latency::{Latencies, LatencySummary},
    machine::Machine,
    rounds::Rounds,
    sample::Sample,
    stats::Estimate,
    table::{Align, Table},
    terminal::{Colour, Terminal},
    units,
    workload::{Pattern, Shape, Workload},
};

/// Version of the JSON format, for readers to check.
pub const SCHEMA: &str = "rio-bench/1";

/// Share of the machine's time from which on stolen time is reported.
const STOLEN_REPORTED: f64 = 0.005;

/// A whole comparison.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Report {
    /// The name and version of this format: [`SCHEMA`].
    pub schema: String,
    /// The machine that was measured.
    pub machine: Machine,
    /// One per set of parameters.
    pub points: Vec<Point>,
}

/// All contenders at one set of parameters, interleaved.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Point {
    /// Description of the workload.
    pub workload: String,
    /// Number of writing threads.
    pub threads: u32,
    /// Bytes per write; of a journal, its largest write.
    pub size: u32,
    /// Number of adjacent writes of a batch.
    pub batch: u32,
    /// Number of writes per group.
    pub group: u32,
    /// Writes in flight per thread.
    pub queue_depth: u32,
    /// `seq`, `rand` or `journal`.
    pub pattern: String,
    /// Whether the groups were written or read. *Writes* in other fields are then these operations.
    #[serde(default)]
    pub rw: Access,
    /// There were more threads than cores: figures show sharing, not speed.
    pub beyond_cores: bool,
    /// Number of runs of each contender, without discarded ones.
    pub rounds: usize,
    /// Share of the machine's time that the host took, 0 to 1: mean of the kept runs. Absent if it
    /// is not known.
    #[serde(skip_serializing_if = "Option::is_none", default)]
    pub host_stole: Option<f64>,
    /// Number of runs that the host disturbed, and that were repeated.
    #[serde(default)]
    pub set_aside: u64,
    /// Figures by contender.
    pub engines: BTreeMap<String, EngineFigures>,
    /// Medians of round-by-round ratios.
    pub ratios: BTreeMap<String, f64>,
    /// 95 % confidence intervals of the ratios (they need at least six rounds).
    pub ratio_intervals: BTreeMap<String, [f64; 2]>,
}

/// One contender's figures: medians over the rounds; latencies over all rounds together.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct EngineFigures {
    /// Writes per second.
    pub writes_per_s: f64,
    /// Its 95 % confidence interval.
    pub writes_per_s_interval: [f64; 2],
    /// Groups per second, the median over the rounds.
    pub groups_per_s: f64,
    /// Payload bytes per second, the median over the rounds.
    pub bytes_per_s: f64,
    /// CPU time per write on both sides together, in ns; the initiator's alone if the target's is
    /// not known. It comes from the runs with sleeping, if there are any.
    pub cpu_ns_per_write: f64,
    /// The initiator's part, in ns.
    pub initiator_cpu_ns_per_write: f64,
    /// The target's part in ns, if it is known.
    #[serde(skip_serializing_if = "Option::is_none", default)]
    pub target_cpu_ns_per_write: Option<f64>,
    /// Latency from submission to completion.
    pub latency: LatencySummary,
    /// The figures with both sides sleeping while they wait, if that was run; CPU time comes from
    /// these.
    #[serde(skip_serializing_if = "Option::is_none", default)]
    pub blocking: Option<BlockingFigures>,
}

/// Figures of runs in which both sides sleep while they wait.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct BlockingFigures {
    /// Writes per second, the median over the rounds.
    pub writes_per_s: f64,
    /// Latency from submission to completion, over all rounds together.
    pub latency: LatencySummary,
}

/// The figure that a ratio compares.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Figure {
    /// Writes per second.
    Speed,
    /// Groups per second.
    Groups,
    /// CPU time per write of both sides.
    Cpu,
}

impl Figure {
    fn of(self, sample: &Sample) -> f64 {
        match self {
            Self::Speed => sample.writes_per_s(),
            Self::Groups => sample.groups_per_s(),
            Self::Cpu => {
                sample.initiator_cpu_ns_per_write()
                    + sample.target_cpu_ns_per_write().unwrap_or(0.0)
            }
        }
    }
}

/// A ratio to report: its name, numerator and denominator.
#[derive(Clone, Copy, Debug)]
pub struct Ratio {
    /// Name in the report.
    pub name: &'static str,
    /// Contender in the numerator.
    pub over: &'static str,
    /// Contender in the denominator.
    pub under: &'static str,
    /// The compared figure.
    pub figure: Figure,
}

/// The ratios of interest. Those with both contenders present are reported; of two with one name,
/// the latter. (`none_seq` runs if merging needs sequential writes, and is then the right
/// denominator.)
pub const RATIOS: [Ratio; 13] = [
    ratio("none_over_floor", "none", "floor", Figure::Speed),
    ratio("rio_over_none", "rio", "none", Figure::Speed),
    ratio("rio_over_sync", "rio", "sync", Figure::Speed),
    ratio("rio_over_horae", "rio", "horae", Figure::Speed),
    ratio("rio_over_barrier", "rio", "barrier", Figure::Speed),
    ratio("rio_over_opimq", "rio", "opimq", Figure::Speed),
    ratio("rio_over_linux", "rio", "linux", Figure::Speed),
    ratio("rio_cpu_over_none", "rio", "none", Figure::Cpu),
    ratio("rio_merged_over_none", "rio_merged", "none", Figure::Speed),
    ratio("rio_merged_over_none", "rio_merged", "none_seq", Figure::Speed),
    ratio("rio_dax_over_none", "rio_dax", "none", Figure::Speed),
    ratio("rio_dax_cpu_over_none", "rio_dax", "none", Figure::Cpu),
    ratio("rio_block_over_none", "rio_block", "none", Figure::Speed),
];

const fn ratio(
    name: &'static str,
    over: &'static str,
    under: &'static str,
    figure: Figure,
) -> Ratio {
    Ratio { name, over, under, figure }
}

impl Report {
    /// A report of these points on this machine. The machine was described before the run, for its
    /// load.
    #[must_use]
    pub fn new(machine: Machine, points: Vec<Point>) -> Self {
        Self { schema: SCHEMA.to_owned(), machine, points }
    }

    /// The report as text: machine, then per point a table and bars.
    #[must_use]
    pub fn render(&self, terminal: &Terminal) -> String {
        let mut text = terminal.paint(Colour::Grey, &self.machine.line()) + "\n";
        for point in &self.points {
            text += "\n";
            text += &point.render(terminal);
        }
        if let Some(line) = self.host_line() {
            text += &format!("\n{}\n", terminal.paint(Colour::Grey, &line));
        }
        if let Some(warning) = self.machine.warning() {
            text += &format!("\n{}\n", terminal.paint(Colour::Red, &warning));
        }
        text
    }

    /// The host's effect on all points together, if it is worth a line.
    pub(crate) fn host_line(&self) -> Option<String> {
        let runs_of = |point: &Point| (point.rounds * point.engines.len()) as f64;
        let known = || self.points.iter().filter_map(|p| Some((runs_of(p), p.host_stole?)));
        let runs: f64 = known().map(|(runs, _)| runs).sum();
        let stolen: f64 = known().map(|(runs, share)| runs * share).sum();
        let share = if runs > 0.0 { stolen / runs } else { 0.0 };
        let took = format!("the host took {:.1} % of the machine's time", share * 100.0);
        match self.points.iter().map(|point| point.set_aside).sum::<u64>() {
            0 => (share > STOLEN_REPORTED).then_some(took),
            1 => Some(format!("{took}; 1 disturbed run was taken again")),
            n => Some(format!("{took}; {n} disturbed runs were taken again")),
        }
    }
}

impl Point {
    /// A point from interleaved rounds.
    #[must_use]
    pub fn new(
        workload: &Workload,
        cores: usize,
        rounds: &Rounds<Sample>,
        ratios: &[Ratio],
    ) -> Self {
        let (pattern, size, batch, group) = match workload.shape {
            Shape::Journal => ("journal".to_owned(), 8192, 1, 1),
            Shape::Uniform { pattern, size, batch, group } => {
                (Pattern::to_string(&pattern), size, batch, group)
            }
        };
        let (ratios, ratio_intervals) = ratios_of(rounds, ratios);
        let disturbances =
            || rounds.iter().flat_map(|(_, samples)| samples).map(|sample| sample.disturbance);
        Self {
            workload: workload.to_string(),
            threads: workload.threads,
            size,
            batch,
            group,
            queue_depth: workload.queue_depth,
            pattern,
            rw: workload.access,
            beyond_cores: workload.threads as usize > cores,
            rounds: rounds.iter().map(|(_, s)| s.len()).max().unwrap_or(0),
            host_stole: mean(disturbances().filter_map(|d| d.stole)),
            set_aside: disturbances().map(|d| u64::from(d.set_aside)).sum(),
            engines: rounds
                .iter()
                .map(|(name, samples)| (name.to_owned(), EngineFigures::of(samples)))
                .collect(),
            ratios,
            ratio_intervals,
        }
    }

    fn render(&self, terminal: &Terminal) -> String {
        let mut text = terminal.paint(Colour::Bold, &self.workload);
        if self.beyond_cores {
            text += " (more threads than cores)";
        }
        text += "\n\n";
        let operations = self.rw.operations();
        let (speed, cpu) =
            (format!("{operations}/s"), format!("CPU/{}", operations.trim_end_matches('s')));
        let mut table = Table::new(&[
            ("", Align::Left),
            (&speed, Align::Right),
            ("±", Align::Right),
            ("p50", Align::Right),
            ("p99", Align::Right),
            ("p99.9", Align::Right),
            (&cpu, Align::Right),
        ]);
        for (name, figures) in &self.engines {
            table.row([
                terminal.paint(colour_of(name), name),
                units::count(figures.writes_per_s),
                plus_minus(figures.writes_per_s, figures.writes_per_s_interval),
                units::time(figures.latency.p50_ns as f64),
                units::time(figures.latency.p99_ns as f64),
                units::time(figures.latency.p999_ns as f64),
                units::time(figures.cpu_ns_per_write),
            ]);
        }
        text += &table.render(terminal);
        text += "\n";
        let bars: Vec<Bar> = self
            .engines
            .iter()
            .map(|(name, figures)| Bar {
                name: name.clone(),
                value: figures.writes_per_s,
                label: units::per_second(figures.writes_per_s),
                colour: colour_of(name),
            })
            .collect();
        text += &bars::render(&bars, terminal);
        text += &render_ratios(&self.ratios, &self.ratio_intervals);
        text
    }
}

impl EngineFigures {
    fn of(samples: &[Sample]) -> Self {
        let estimate = |figure: &dyn Fn(&Sample) -> f64| {
            let values: Vec<f64> = samples.iter().map(figure).collect();
            Estimate::of(&values)
        };
        let median = |figure: &dyn Fn(&Sample) -> f64| estimate(figure).map_or(0.0, |e| e.value);
        let blocking: Vec<&Sample> =
            samples.iter().filter_map(|sample| sample.blocking.as_deref()).collect();
        let known = samples.iter().all(|s| s.target_cpu_ns.is_some());
        let speed = estimate(&Sample::writes_per_s);
        Self {
            writes_per_s: speed.map_or(0.0, |e| e.value),
            writes_per_s_interval: speed.map_or([0.0; 2], |e| [e.low, e.high]),
            groups_per_s: median(&Sample::groups_per_s),
            bytes_per_s: median(&Sample::bytes_per_s),
            cpu_ns_per_write: median(&|s| Figure::Cpu.of(s)),
            initiator_cpu_ns_per_write: median(&Sample::initiator_cpu_ns_per_write),
            target_cpu_ns_per_write: known
                .then(|| median(&|s| s.target_cpu_ns_per_write().unwrap_or(0.0))),
            latency: latency(samples.iter()),
            blocking: (!blocking.is_empty()).then(|| {
                let speeds: Vec<f64> = blocking.iter().map(|s| s.writes_per_s()).collect();
                BlockingFigures {
                    writes_per_s: Estimate::of(&speeds).map_or(0.0, |e| e.value),
                    latency: latency(blocking.into_iter()),
                }
            }),
        }
    }
}

/// The mean; `None` without values.
fn mean(values: impl Iterator<Item = f64>) -> Option<f64> {
    let (count, sum) = values.fold((0, 0.0), |(count, sum), value| (count + 1, sum + value));
    (count > 0).then(|| sum / f64::from(count))
}

/// The latencies of all rounds together.
fn latency<'a>(samples: impl Iterator<Item = &'a Sample>) -> LatencySummary {
    let mut latencies = Latencies::new();
    for sample in samples {
        latencies.add(&sample.latencies);
    }
    latencies.summary()
}

/// Those of `ratios` with both contenders present: medians, and intervals.
pub(crate) fn ratios_of(
    rounds: &Rounds<Sample>,
    ratios: &[Ratio],
) -> (BTreeMap<String, f64>, BTreeMap<String, [f64; 2]>) {
    let mut medians = BTreeMap::new();
    let mut intervals = BTreeMap::new();
    for ratio in ratios {
        let over = rounds.values(ratio.over, |s| ratio.figure.of(s));
        let under = rounds.values(ratio.under, |s| ratio.figure.of(s));
        if let Some(estimate) = Estimate::of_ratio(&over, &under) {
            medians.insert(ratio.name.to_owned(), estimate.value);
            intervals.insert(ratio.name.to_owned(), [estimate.low, estimate.high]);
        }
    }
    (medians, intervals)
}

pub(crate) fn render_ratios(
    ratios: &BTreeMap<String, f64>,
    intervals: &BTreeMap<String, [f64; 2]>,
) -> String {
    let mut text = String::new();
    for (name, ratio) in ratios {
        let interval = intervals.get(name).map_or(String::new(), |[low, high]| {
            format!("  ({} to {})", units::ratio(*low), units::ratio(*high))
        });
        let name = name.replace("_over_", " / ").replace('_', " ");
        text += &format!("  {name} = {}{interval}\n", units::ratio(*ratio));
    }
    if !text.is_empty() {
        text.insert(0, '\n');
    }
    text
}

pub(crate) fn plus_minus(value: f64, [low, high]: [f64; 2]) -> String {
    if value == 0.0 {
        return String::new();
    }
    format!("{:.0} %", (high - low) / 2.0 / value * 100.0)
}

pub(crate) fn colour_of(engine: &str) -> Colour {
    match engine {
        "none" => Colour::Blue,
        "floor" => Colour::Grey,
        rio if rio.starts_with("rio") => Colour::Green,
        _ => Colour::Red,
    }
}

#[cfg(test)]
pub(crate) mod tests {
    use super::*;
    use crate::{compare, retakes::Disturbance};

    /// A run of one second at this speed.
    pub(crate) fn sample(writes: u64, cpu_ns_per_write: u64) -> Sample {
        let mut sample = Sample {
            writes,
            groups: writes / 2,
            bytes: writes * 4096,
            wall_ns: 1_000_000_000,
            initiator_cpu_ns: writes * cpu_ns_per_write,
            target_cpu_ns: Some(writes * cpu_ns_per_write),
            ..Sample::default()
        };
        sample.latencies.record_n(1_000_000_000 / writes, writes);
        sample
    }

    pub(crate) fn rounds() -> Rounds<Sample> {
        let speeds = [("none", 200_000), ("rio", 190_000), ("sync", 500)];
        let names = speeds.map(|(name, _)| name);
        Rounds::run::<()>(&names, 7, |index, round| {
            // The machine becomes slower in each round; ratios must not depend on it.
            let slower = 10 - round as u64;
            Ok(sample(speeds[index].1 * slower / 10, 500 + 10 * index as u64))
        })
        .unwrap()
    }

    fn report() -> Report {
        let workload = Workload::random_4k(2, 32);
        let machine = Machine {
            cpu: "Test CPU".to_owned(),
            cores: 2,
            memory_bytes: 8 << 30,
            kernel: "6.1".to_owned(),
            congestion: "cubic".to_owned(),
            load: 0.0,
        };
        Report::new(machine, vec![Point::new(&workload, 2, &rounds(), &RATIOS)])
    }

    #[test]
    fn medians_and_ratios_by_round() {
        let report = report();
        let point = &report.points[0];
        assert_eq!(point.engines["none"].writes_per_s, 140_000.0);
        assert_eq!(point.engines["none"].writes_per_s_interval, [80_000.0, 200_000.0]);
        assert!((point.ratios["rio_over_none"] - 0.95).abs() < 1e-9);
        assert!((point.ratio_intervals["rio_over_none"][1] - 0.95).abs() < 1e-9);
        assert!((point.ratios["rio_over_sync"] - 380.0).abs() < 1e-9);
        assert!((point.ratios["rio_cpu_over_none"] - 1.02).abs() < 1e-9);
        assert!(!point.ratios.contains_key("none_over_floor"), "no floor was run");
        assert_eq!(point.engines["rio"].cpu_ns_per_write, 1020.0);
        assert_eq!(point.engines["rio"].target_cpu_ns_per_write, Some(510.0));
    }

    #[test]
    fn json_has_its_documented_fields_and_can_be_parsed() {
        let report = report();
        let json = serde_json::to_value(&report).unwrap();
        assert_eq!(json["schema"], "rio-bench/1");
        assert_eq!(json["machine"]["cores"], 2);
        let point = &json["points"][0];
        for name in ["threads", "size", "batch", "queue_depth"] {
            assert!(point[name].is_u64(), "{name}");
        }
        for name in ["writes_per_s", "cpu_ns_per_write"] {
            assert!(point["engines"]["rio"][name].is_f64(), "{name}");
        }
        for name in ["p50_ns", "p99_ns", "p999_ns"] {
            assert!(point["engines"]["rio"]["latency"][name].is_u64(), "{name}");
        }
        assert!(point["ratios"]["rio_over_none"].is_f64());
        assert_eq!(serde_json::from_value::<Report>(json).unwrap(), report);
    }

    #[test]
    fn the_text_has_all_figures_within_the_width() {
        let text = report().render(&Terminal::PLAIN);
        for part in [
            "Test CPU, 2 cores, 8 GiB, Linux 6.1, TCP cubic",
            "rand 4 KiB, queue depth 32, 2 threads",
            "none     140 k  43 %",
            "rio / none = 0.95  (0.95 to 0.95)",
            "####",
        ] {
            assert!(text.contains(part), "no {part:?} in\n{text}");
        }
        assert!(text.lines().all(|l| l.chars().count() <= 80), "{text}");
    }

    /// A point of two contenders in two rounds; the host took these shares.
    fn disturbed(shares: [Option<f64>; 4], set_aside: u32) -> Point {
        let rounds = Rounds::run::<()>(&["none", "rio"], 2, |index, round| {
            let disturbance = Disturbance { stole: shares[2 * round + index], set_aside };
            Ok(Sample { disturbance, ..sample(1000, 10) })
        });
        Point::new(&Workload::random_4k(1, 1), 2, &rounds.unwrap(), &RATIOS)
    }

    #[test]
    fn a_point_reports_stolen_time_and_repeated_runs() {
        let point = disturbed([Some(0.01), Some(0.03), Some(0.0), Some(0.0)], 2);
        let json = serde_json::to_value(&point).unwrap();
        assert!((json["host_stole"].as_f64().unwrap() - 0.01).abs() < 1e-9, "{json}");
        assert_eq!(json["set_aside"], 8);
        assert_eq!(json["rounds"], 2, "a discarded run is not a round");
        assert_eq!(serde_json::from_value::<Point>(json).unwrap(), point);
    }

    #[test]
    fn unknown_stolen_time_is_not_reported_as_zero() {
        let json = serde_json::to_value(disturbed([None; 4], 0)).unwrap();
        assert!(json.get("host_stole").is_none(), "{json}");
        assert_eq!(json["set_aside"], 0);
        let json = serde_json::to_value(disturbed([Some(0.0); 4], 0)).unwrap();
        assert_eq!(json["host_stole"], 0.0);
        // The mean of the known ones.
        let some = disturbed([None, Some(0.02), None, None], 0);
        assert_eq!(some.host_stole, Some(0.02));
    }

    #[test]
    fn stolen_time_is_one_line_if_there_was_any() {
        let line = |points: &[Point]| {
            let report = Report::new(Machine::default(), points.to_vec());
            let line = report.host_line();
            for text in
                [report.render(&Terminal::PLAIN), compare::render(&report, &Terminal::PLAIN)]
            {
                assert_eq!(text.contains("the host"), line.is_some(), "{text}");
                assert!(line.iter().all(|line| text.lines().any(|l| l == line)), "{text}");
            }
            line
        };
        assert_eq!(line(&[]), None);
        assert_eq!(line(&[disturbed([None; 4], 0)]), None);
        assert_eq!(line(&[disturbed([Some(0.004); 4], 0)]), None);
        let took = "the host took 0.4 % of the machine's time; 4 disturbed runs were taken again";
        assert_eq!(line(&[disturbed([Some(0.004); 4], 1)]).as_deref(), Some(took));
        let took = "the host took 1.2 % of the machine's time";
        assert_eq!(line(&[disturbed([Some(0.012); 4], 0)]).as_deref(), Some(took));
        // Both points count.
        let mut quiet = disturbed([Some(0.0); 4], 0);
        quiet.set_aside = 1;
        let both = line(&[disturbed([Some(0.3); 4], 0), quiet]);
        let took = "the host took 15.0 % of the machine's time; 1 disturbed run was taken again";
        assert_eq!(both.as_deref(), Some(took));
        let most = line(&[disturbed([Some(0.3); 4], 20)]).unwrap_or_default();
        assert!(most.len() <= 80, "{most}");
    }

    #[test]
    fn threads_beyond_cores_are_marked() {
        let point = Point::new(&Workload::random_4k(12, 1), 2, &rounds(), &[]);
        assert!(point.beyond_cores);
        assert!(point.render(&Terminal::PLAIN).contains("more threads than cores"));
    }
}

//! The result of `rio bench fs`.

use std::{collections::BTreeMap, path::PathBuf};

use riopipe_fs::fsync_stages::{FsyncTimesSnapshot, FsyncTrace};
use riopipe_lab::{
    figures::file_system::Mark,
    fs_load::APPEND_BYTES,
    latency::{Latencies, LatencySummary},
    machine::Machine,
    rounds::Rounds,
    stats::Estimate,
    table::{Align, Table},
    terminal::{Colour, Terminal},
    units,
};
use serde::Serialize;

use super::{Plans, contender::Run};
use crate::{
    args::bench::fs::{Through, Workload},
    output::Report,
};

/// The modes of RioFS, by their names in the result.
const MODES: [&str; 5] = ["ext4", "horae", "barrier", "opimq", "rio"];

/// The result of the measurement.
#[derive(Debug, Serialize)]
pub(in crate::commands) struct Measured {
    schema: &'static str,
    machine: Machine,
    /// The path of the calls: `calls` of the file system in this process, or a `mount`.
    through: &'static str,
    append_bytes: usize,
    streams: u32,
    seconds: f64,
    rounds: u32,
    pub(super) points: Vec<Point>,
    /// Why the kernel's ext4 does not take part, although it was asked for.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(super) kernel_left_out: Option<String>,
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub(super) plots: Vec<PathBuf>,
    /// The paper's figures, with NVMe over RDMA in the kernel.
    paper: Paper,
}

/// The figures of the paper (EuroSys '23, 6.3 and 6.4), RioFS over ext4: the throughput of appends
/// with 16 threads, and of the applications on average over the numbers of threads.
#[derive(Debug, Serialize)]
struct Paper {
    append_fsync_rio_over_ext4: f64,
    append_fsync_latency_reduction: f64,
    append_fsync_p99_reduction: f64,
    varmail_rio_over_ext4: f64,
    rocksdb_fillsync_rio_over_ext4: f64,
}

const PAPER: Paper = Paper {
    append_fsync_rio_over_ext4: 3.0,
    append_fsync_latency_reduction: 0.67,
    append_fsync_p99_reduction: 0.5,
    varmail_rio_over_ext4: 2.3,
    rocksdb_fillsync_rio_over_ext4: 1.9,
};

/// The result for one load, drive, round trip and number of threads.
#[derive(Debug, Serialize)]
pub(super) struct Point {
    pub(super) workload: &'static str,
    /// The program that makes the load: `rio` or `db_bench`.
    by: &'static str,
    pub(super) profile: String,
    pub(super) rtt_us: f64,
    pub(super) threads: u32,
    pub(super) modes: BTreeMap<&'static str, Figures>,
    /// With `append_fsync`, and a stream for each thread.
    #[serde(skip_serializing_if = "Option::is_none")]
    floor: Option<Floor>,
    ratios: Ratios,
    /// Number of runs that the host disturbed, and that were repeated.
    set_aside: u32,
}

/// The figures of one mode over all rounds.
#[derive(Debug, Serialize)]
pub(super) struct Figures {
    /// Operations per second: median.
    pub(super) ops_per_s: f64,
    /// Mean, median and 99th percentile of the time of an operation in µs, over all rounds.
    pub(super) mean_us: f64,
    p50_us: f64,
    pub(super) p99_us: f64,
    /// 99.9th percentile.
    p999_us: f64,
    /// CPU time for each operation in µs, of both sides: median; null for the kernel's ext4, whose
    /// threads are not known.
    cpu_us_per_op: Option<f64>,
    /// The part of the initiator: callers, FUSE, file system, streams.
    initiator_cpu_us_per_op: Option<f64>,
    /// The part of the target.
    target_cpu_us_per_op: Option<f64>,
    /// The calls of `fsync`; of RioFS only.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(super) fsync: Option<Fsync>,
}

/// The calls of `fsync` and `fdatasync` of one mode, over all rounds.
#[derive(Debug, Serialize)]
pub(super) struct Fsync {
    calls: u64,
    mean_us: f64,
    p50_us: f64,
    p99_us: f64,
    /// How often a call waited for something that had not arrived, one after the other: mean.
    serial_waits: f64,
    /// The writes that the drive got for each call, and the FLUSHes.
    drive_writes: f64,
    drive_flushes: f64,
    /// The time of a call by stage. The means add up to that of the calls.
    pub(super) breakdown: Vec<Stage>,
    /// The call with the median time among those that were traced; null through a mount.
    trace: Option<Trace>,
}

/// The time of a call in one stage.
#[derive(Debug, Serialize)]
pub(super) struct Stage {
    pub(super) stage: &'static str,
    /// The mean over all calls, also those that were not in the stage.
    pub(super) mean_us: f64,
    share: f64,
}

/// One call of `fsync`.
#[derive(Debug, Serialize)]
struct Trace {
    total_us: f64,
    serial_waits: usize,
    steps: Vec<Step>,
}

#[derive(Debug, Serialize)]
struct Step {
    stage: &'static str,
    from_us: f64,
    to_us: f64,
    is_serial_wait: bool,
}

/// Two groups and one wait.
#[derive(Debug, Serialize)]
struct Floor {
    ops_per_s: f64,
    p50_us: f64,
    p99_us: f64,
    drive_writes: f64,
    drive_flushes: f64,
}

/// Ratios round by round: medians.
#[derive(Debug, Serialize)]
struct Ratios {
    /// Operations per second.
    rio_over_ext4: f64,
    rio_over_ext4_interval: [f64; 2],
    rio_over_horae: f64,
    /// Null with a drive that keeps no order.
    rio_over_barrier: Option<f64>,
    /// Likewise.
    rio_over_opimq: Option<f64>,
    /// 99th percentiles.
    rio_p99_over_ext4: f64,
    /// Medians of the time of an operation.
    #[serde(skip_serializing_if = "Option::is_none")]
    rio_over_floor: Option<f64>,
    /// Operations per second.
    #[serde(skip_serializing_if = "Option::is_none")]
    rio_over_kernel_ext4: Option<f64>,
}

const fn us(ns: f64) -> f64 {
    ns / 1e3
}

fn median(values: &[f64]) -> f64 {
    Estimate::of(values).map_or(0.0, |estimate| estimate.value)
}

fn latencies(runs: &[Run]) -> LatencySummary {
    let mut all = Latencies::new();
    runs.iter().for_each(|run| all.add(&run.sample.latencies));
    all.summary()
}

impl Measured {
    /// The figures of each mode at each point, for a figure of the paper.
    pub(in crate::commands) fn marks(&self) -> Vec<Mark> {
        let of = |threads: u32, mode: &str, figures: &Figures| Mark {
            mode: mode.to_owned(),
            threads,
            ops_per_s: figures.ops_per_s,
            mean_us: figures.mean_us,
            p50_us: figures.p50_us,
            p99_us: figures.p99_us,
            p999_us: figures.p999_us,
            serial_waits: figures.fsync.as_ref().map_or(0.0, |fsync| fsync.serial_waits),
            steps: figures.fsync.iter().flat_map(Fsync::steps).collect(),
        };
        let points = self.points.iter();
        let modes = points.flat_map(|point| point.modes.iter().map(move |mode| (point, mode)));
        modes.map(|(point, (mode, figures))| of(point.threads, mode, figures)).collect()
    }
}

impl Fsync {
    fn steps(&self) -> Vec<(String, f64)> {
        self.breakdown.iter().map(|one| (one.stage.to_owned(), one.mean_us)).collect()
    }
}

impl Figures {
    fn of(name: &str, rounds: &Rounds<Run>) -> Self {
        let runs = rounds.samples(name).unwrap_or_default();
        let summary = latencies(runs);
        let is_known = name != "kernel_ext4";
        let target = |run: &Run| run.sample.target_cpu_ns_per_write().unwrap_or(0.0);
        let initiator = |run: &Run| run.sample.initiator_cpu_ns_per_write();
        let cpu = |of: &dyn Fn(&Run) -> f64| is_known.then(|| us(median(&rounds.values(name, of))));
        Self {
            ops_per_s: median(&rounds.values(name, |run| run.sample.writes_per_s())),
            mean_us: us(summary.mean_ns),
            p50_us: us(summary.p50_ns as f64),
            p99_us: us(summary.p99_ns as f64),
            p999_us: us(summary.p999_ns as f64),
            cpu_us_per_op: cpu(&|run| initiator(run) + target(run)),
            initiator_cpu_us_per_op: cpu(&initiator),
            target_cpu_us_per_op: cpu(&target),
            fsync: is_known.then(|| Fsync::of(runs)),
        }
    }
}

impl Fsync {
    fn of(runs: &[Run]) -> Self {
        let mut times = FsyncTimesSnapshot::default();
        let (mut writes, mut flushes) = (0, 0);
        for run in runs {
            times.add(&run.fsyncs);
            let drive = run.drive.unwrap_or_default();
            writes += drive.writes;
            flushes += drive.flushes;
        }
        let calls = times.total().count();
        let of_each = |sum: u64| sum as f64 / calls.max(1) as f64;
        let all = times.total().sum().max(1) as f64;
        let stages = times.stages().filter(|(_, seen)| seen.sum() > 0);
        let breakdown = stages.map(|(stage, seen)| Stage {
            stage: stage.name(),
            mean_us: us(of_each(seen.sum())),
            share: seen.sum() as f64 / all,
        });
        Self {
            calls,
            mean_us: us(of_each(times.total().sum())),
            p50_us: us(times.total().quantile(500_000) as f64),
            p99_us: us(times.total().quantile(990_000) as f64),
            serial_waits: times.mean_serial_waits().unwrap_or(0.0),
            drive_writes: of_each(writes),
            drive_flushes: of_each(flushes),
            breakdown: breakdown.collect(),
            trace: Trace::median(runs.iter().flat_map(|run| &run.traces)),
        }
    }
}

impl Trace {
    /// The trace with the median time.
    fn median<'a>(traces: impl Iterator<Item = &'a FsyncTrace>) -> Option<Self> {
        let mut traces: Vec<&FsyncTrace> = traces.collect();
        traces.sort_by_key(|trace| trace.total_ns);
        let trace = traces.get(traces.len() / 2)?;
        let steps = trace.steps.iter().map(|step| Step {
            stage: step.stage.name(),
            from_us: us(step.from_ns as f64),
            to_us: us(step.to_ns as f64),
            is_serial_wait: step.is_serial_wait,
        });
        Some(Self {
            total_us: us(trace.total_ns as f64),
            serial_waits: trace.steps.iter().filter(|step| step.is_serial_wait).count(),
            steps: steps.collect(),
        })
    }
}

impl Floor {
    fn of(rounds: &Rounds<Run>) -> Option<Self> {
        let runs = rounds.samples("floor")?;
        let summary = latencies(runs);
        let per_op = |of: fn(&super::fresh::DriveCounts) -> u64| {
            let (mut sum, mut ops) = (0, 0);
            for run in runs {
                sum += run.drive.as_ref().map_or(0, of);
                ops += run.floor_ops;
            }
            sum as f64 / ops.max(1) as f64
        };
        Some(Self {
            ops_per_s: median(&rounds.values("floor", |run| run.sample.writes_per_s())),
            p50_us: us(summary.p50_ns as f64),
            p99_us: us(summary.p99_ns as f64),
            drive_writes: per_op(|drive| drive.writes),
            drive_flushes: per_op(|drive| drive.flushes),
        })
    }
}

impl Ratios {
    fn of(rounds: &Rounds<Run>) -> Self {
        let rates = |name: &str| rounds.values(name, |run| run.sample.writes_per_s());
        let summary = |of: fn(LatencySummary) -> u64| {
            move |run: &Run| of(run.sample.latencies.summary()) as f64
        };
        let (p50, p99) = (summary(|s| s.p50_ns), summary(|s| s.p99_ns));
        let ratio = |over: &[f64], under: &[f64]| Estimate::of_ratio(over, under);
        let value = |estimate: Option<Estimate>| estimate.map(|estimate| estimate.value);
        let rate = ratio(&rates("rio"), &rates("ext4"));
        Self {
            rio_over_ext4: value(rate).unwrap_or(0.0),
            rio_over_horae: value(ratio(&rates("rio"), &rates("horae"))).unwrap_or(0.0),
            rio_over_barrier: value(ratio(&rates("rio"), &rates("barrier"))),
            rio_over_opimq: value(ratio(&rates("rio"), &rates("opimq"))),
            rio_over_ext4_interval: rate.map_or([0.0; 2], |ratio| [ratio.low, ratio.high]),
            rio_p99_over_ext4: value(ratio(
                &rounds.values("rio", p99),
                &rounds.values("ext4", p99),
            ))
            .unwrap_or(0.0),
            rio_over_floor: value(ratio(&rounds.values("rio", p50), &rounds.values("floor", p50))),
            rio_over_kernel_ext4: value(ratio(&rates("rio"), &rates("kernel_ext4"))),
        }
    }
}

impl Point {
    pub(super) fn new(
        workload: Workload,
        by: &'static str,
        profile: &str,
        rtt_ns: u64,
        threads: u32,
        rounds: &Rounds<Run>,
        set_aside: u32,
    ) -> Self {
        let modes = MODES.into_iter().chain(["kernel_ext4"]);
        let measured = modes.filter(|mode| rounds.samples(mode).is_some());
        Self {
            workload: workload.name(),
            by,
            profile: profile.to_owned(),
            rtt_us: us(rtt_ns as f64),
            threads,
            modes: measured.map(|mode| (mode, Figures::of(mode, rounds))).collect(),
            floor: Floor::of(rounds),
            ratios: Ratios::of(rounds),
            set_aside,
        }
    }
}

impl Point {
    fn fsync_of(&self, mode: &str) -> Option<&Fsync> {
        self.modes.get(mode)?.fsync.as_ref()
    }
}

impl Measured {
    pub(super) fn new(
        machine: Machine,
        through: Through,
        plans: &Plans,
        points: Vec<Point>,
    ) -> Self {
        Self {
            schema: "rio-bench-fs/1",
            machine,
            through: through.name(),
            append_bytes: APPEND_BYTES,
            streams: plans.streams,
            seconds: plans.time.as_secs_f64(),
            rounds: plans.rounds,
            points,
            kernel_left_out: None,
            plots: Vec::new(),
            paper: PAPER,
        }
    }

    /// The line under a picture.
    pub(super) fn caption(&self) -> String {
        let through = match self.through {
            "calls" => "without FUSE",
            _ => "through FUSE",
        };
        let Self { rounds, seconds, .. } = self;
        format!("{through}; medians of {rounds} rounds of {seconds} s; {}", self.machine.line())
    }

    fn table(&self, terminal: &Terminal) -> String {
        let mut table = Table::new(&[
            ("load", Align::Left),
            ("drive", Align::Left),
            ("rtt", Align::Right),
            ("threads", Align::Right),
            ("ext4", Align::Right),
            ("p50", Align::Right),
            ("p99", Align::Right),
            ("horae", Align::Right),
            ("p50", Align::Right),
            ("p99", Align::Right),
            ("barrier", Align::Right),
            ("p50", Align::Right),
            ("p99", Align::Right),
            ("opimq", Align::Right),
            ("p50", Align::Right),
            ("p99", Align::Right),
            ("rio", Align::Right),
            ("p50", Align::Right),
            ("p99", Align::Right),
            ("rio / ext4", Align::Right),
            ("rio / horae", Align::Right),
            ("rio / barrier", Align::Right),
            ("rio / opimq", Align::Right),
            ("waits", Align::Right),
            ("rio / floor", Align::Right),
            ("kernel", Align::Right),
        ]);
        for point in &self.points {
            let load = match point.by {
                "db_bench" => "db_bench fillsync",
                _ => point.workload,
            };
            let mut row = vec![
                load.replace('_', " "),
                point.profile.clone(),
                units::time(point.rtt_us * 1e3),
                point.threads.to_string(),
            ];
            let mut waits = Vec::new();
            for mode in MODES {
                let Some(figures) = point.modes.get(mode) else {
                    row.extend(["-"; 3].map(str::to_owned));
                    continue;
                };
                row.push(units::per_second(figures.ops_per_s));
                row.push(units::time(figures.p50_us * 1e3));
                row.push(units::time(figures.p99_us * 1e3));
                waits.extend(figures.fsync.as_ref().map(|f| format!("{:.1}", f.serial_waits)));
            }
            row.push(units::ratio(point.ratios.rio_over_ext4));
            row.push(units::ratio(point.ratios.rio_over_horae));
            for ratio in [point.ratios.rio_over_barrier, point.ratios.rio_over_opimq] {
                row.push(ratio.map_or_else(|| "-".to_owned(), units::ratio));
            }
            row.push(waits.join(", "));
            row.push(point.ratios.rio_over_floor.map(units::ratio).unwrap_or_default());
            let kernel = point.modes.get("kernel_ext4");
            row.push(kernel.map(|k| units::per_second(k.ops_per_s)).unwrap_or_default());
            table.row(row);
        }
        table.render(terminal)
    }

    /// Where the time of an `fsync` goes, with the fewest threads.
    fn breakdown(&self, terminal: &Terminal) -> String {
        let appends = || self.points.iter().filter(|point| point.workload == "append_fsync");
        let Some(fewest) = appends().map(|point| point.threads).min() else {
            return String::new();
        };
        let points: Vec<&Point> = appends().filter(|point| point.threads == fewest).collect();
        let heads: Vec<String> = points
            .iter()
            .map(|point| format!("{}, {}", point.profile, units::time(point.rtt_us * 1e3)))
            .collect();
        let mut columns = vec![("mode", Align::Left), ("stage", Align::Left)];
        columns.extend(heads.iter().map(|head| (head.as_str(), Align::Right)));
        let mut table = Table::new(&columns);
        for mode in MODES {
            let mut row = |stage: &str, value: &dyn Fn(&Fsync) -> Option<f64>| {
                let cell = |point: &&Point| {
                    let us = point.fsync_of(mode).and_then(value);
                    us.map_or("-".to_owned(), |us| units::time(us * 1e3))
                };
                let cells = points.iter().map(cell);
                table.row([mode.to_owned(), stage.replace('_', " ")].into_iter().chain(cells));
            };
            for stage in riopipe_fs::fsync_stages::FsyncStage::ALL {
                let mean = |fsync: &Fsync| {
                    let mut stages = fsync.breakdown.iter();
                    stages.find(|one| one.stage == stage.name()).map(|one| one.mean_us)
                };
                let is_there =
                    |point: &&Point| point.fsync_of(mode).and_then(mean).is_some_and(|us| us > 0.0);
                if points.iter().any(is_there) {
                    row(stage.name(), &mean);
                }
            }
            row("all", &|fsync| Some(fsync.mean_us));
        }
        let head = format!("where the time of an fsync goes: means, threads: {fewest}");
        format!("\n{}\n{}", terminal.paint(Colour::Bold, &head), table.render(terminal))
    }
}

impl Report for Measured {
    fn text(&self, terminal: &Terminal) -> String {
        let Paper {
            append_fsync_rio_over_ext4: append,
            varmail_rio_over_ext4: varmail,
            rocksdb_fillsync_rio_over_ext4: fillsync,
            ..
        } = self.paper;
        let note = format!(
            "{}\nthe paper, in the kernel over RDMA: {append} times the throughput of ext4 and half \
             of its p99 (append fsync), {varmail} times (varmail), {fillsync} times (RocksDB \
             fillsync)\n",
            self.caption()
        );
        let mut text = self.table(terminal) + &self.breakdown(terminal) + "\n";
        if let Some(reason) = &self.kernel_left_out {
            text += &format!("without the kernel's ext4: {reason}\n");
        }
        for plot in &self.plots {
            text += &format!("plotted: {}\n", plot.display());
        }
        text + &terminal.paint(Colour::Grey, &note)
    }
}

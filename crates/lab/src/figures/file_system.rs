//! A figure of the file system, or of the recovery, from its measured points.

use super::{
    catalogue::{
        BARRIER_FS, Drive, Entry, FileSystem, FileSystemClaim, FileSystemMeasure, FileSystemView,
        HORAE_FS, Mode, Paper,
    },
    figure::{Claim, Curve, Figure, Form, Holds, Panel, Value, Verdict},
};
use crate::{machine::Machine, units};

/// One mode at one number of threads.
#[derive(Clone, Debug, Default)]
pub struct Mark {
    /// The mode, as `rio bench fs` names it.
    pub mode: String,
    /// Number of threads.
    pub threads: u32,
    /// Operations per second.
    pub ops_per_s: f64,
    /// Mean latency, µs.
    pub mean_us: f64,
    /// Median of the latency, µs.
    pub p50_us: f64,
    /// 99th percentile of the latency, µs.
    pub p99_us: f64,
    /// 99.9th percentile of the latency, µs.
    pub p999_us: f64,
    /// How often an `fsync` waits, one wait after the other.
    pub serial_waits: f64,
    /// The steps of an `fsync` and the time of each, µs.
    pub steps: Vec<(String, f64)>,
}

/// A value of a mode.
type Of = fn(&Mark) -> f64;

/// The conditions of a measurement.
#[derive(Clone, Debug)]
pub struct Conditions {
    /// The machine, described before the runs.
    pub machine: Machine,
    /// Whether only some values were measured, with short runs.
    pub quick: bool,
    /// Drive and network.
    pub setup: String,
}

/// The finished figure.
#[must_use]
pub fn figure(entry: &Entry, load: &FileSystem, marks: &[Mark], at: &Conditions) -> Figure {
    let threads = threads_of(marks);
    let fewest = threads.first().copied().unwrap_or(1);
    let panels = match load.shows {
        FileSystemView::Threads => {
            let lines = |title, of| lines(title, load, marks, &threads, at, of);
            vec![
                lines("thousand operations per second", |mark| mark.ops_per_s / 1e3),
                lines("mean latency, µs", |mark| mark.mean_us),
                lines("99th percentile of latency, µs", |mark| mark.p99_us),
            ]
        }
        FileSystemView::Steps => vec![steps(load, marks, fewest)],
        FileSystemView::Percentiles => vec![percentiles(load, marks, fewest)],
    };
    let claims: Vec<Claim> =
        load.claims.iter().map(|spec| claim(spec, load, marks, &threads)).collect();
    Figure {
        quick: at.quick,
        machine: at.machine.clone(),
        setup: at.setup.clone(),
        differs: differs(load, &at.machine),
        panels,
        verdict: Verdict::of(load.conclusion, &claims),
        claims,
        model: model(load, marks, fewest),
        ..Figure::of(entry)
    }
}

/// The difference of HoraeFS to the paper.
pub(super) const HORAE_FS_DIFFERS: &str = "HoraeFS is RioFS on streams of engine `horae`, with updates in place that are not redirected; it has the \
     journals for each core, as the Rio paper gave them to it";
/// The difference of BarrierFS to the paper.
pub(super) const BARRIER_FS_DIFFERS: &str = "BarrierFS has a drive of its own, equal to the other one but for the cache barrier and its cost";

/// The difference of OPEXT4 to the paper.
pub(super) const OPEXT4_DIFFERS: &str = "OPEXT4 is mode `opimq` of RioFS. It has a drive of its own, equal to the other one but for the order of epochs \
     and its cost; the paper has a drive without that order, and adds its cost";

/// The differences to the paper's set-up.
fn differs(load: &FileSystem, machine: &Machine) -> Vec<String> {
    let mut list = user_space_differs();
    list.extend(place_differs(load.paper, machine, &[load.drive]));
    list.extend(load.modes.contains(&HORAE_FS).then(|| HORAE_FS_DIFFERS.to_owned()));
    list.extend(load.modes.contains(&BARRIER_FS).then(|| BARRIER_FS_DIFFERS.to_owned()));
    list
}

/// The differences of all figures of file systems.
pub(super) fn user_space_differs() -> Vec<String> {
    vec![
        "the file systems are modes of RioFS, which runs in user space, and the load calls it in the same \
         process; the paper has them in the kernel and in programs"
            .to_owned(),
        "ext4 waits as ext4 with jbd2 does".to_owned(),
    ]
}

/// The differences in machine, network and drives.
pub(super) fn place_differs(paper: Paper, machine: &Machine, drives: &[Drive]) -> Vec<String> {
    let (cores, network, drive) = match paper {
        Paper::Rio => (
            "the paper has 36 for each server",
            "TCP on loopback; the paper has RDMA over 200 Gbit/s",
            "an Intel 905P",
        ),
        Paper::Barrier => (
            "the paper has 4 and 16",
            "NVMe over TCP on loopback; the paper has SATA drives in the machine",
            "a Samsung 850 PRO with a penalty of 5 %, as the model has, and an 843TN",
        ),
        Paper::Horae => (
            "the slides state none",
            "NVMe over TCP on loopback; the paper has the drives in the machine",
            match drives.len() {
                1 => "an Intel 750",
                2 => "an Intel 750 and a P3700",
                _ => "a Samsung 860 Pro, an Intel 750 and a P3700",
            },
        ),
        Paper::Opimq => (
            "the paper has 40",
            "NVMe over TCP on loopback; the paper has the drive in the machine",
            "a Samsung 980 Pro",
        ),
    };
    let here = if drives.len() == 1 { "a modelled drive" } else { "modelled drives" };
    vec![
        format!("{} cores for both sides; {cores}", machine.cores),
        network.to_owned(),
        format!("{here} in memory; the paper has {drive}"),
    ]
}

/// The numbers of threads, in ascending order.
fn threads_of(marks: &[Mark]) -> Vec<u32> {
    let mut threads: Vec<u32> = marks.iter().map(|mark| mark.threads).collect();
    threads.sort_unstable();
    threads.dedup();
    threads
}

fn find<'a>(marks: &'a [Mark], mode: &str, threads: u32) -> Option<&'a Mark> {
    marks.iter().find(|mark| mark.mode == mode && mark.threads == threads)
}

fn lines(
    title: &str,
    load: &FileSystem,
    marks: &[Mark],
    threads: &[u32],
    at: &Conditions,
    of: Of,
) -> Panel {
    let values = |mode: &str| {
        let value = |threads: &u32| {
            find(marks, mode, *threads).map(|mark| Value { median: of(mark), interval: None })
        };
        threads.iter().map(value).collect()
    };
    let curve = |one: &Mode| Curve {
        name: one.name.to_owned(),
        values: values(one.mode),
        expected: Vec::new(),
    };
    Panel {
        form: Form::Lines,
        title: title.to_owned(),
        axis: "threads".to_owned(),
        ticks: threads.iter().map(ToString::to_string).collect(),
        within_cores: threads.iter().filter(|one| **one as usize <= at.machine.cores).count(),
        curves: load.modes.iter().map(curve).collect(),
    }
}

/// The steps of an `fsync` of each mode, as bars.
fn steps(load: &FileSystem, marks: &[Mark], threads: u32) -> Panel {
    let modes = load.modes.iter();
    let modes: Vec<(&Mark, &str)> =
        modes.filter_map(|one| Some((find(marks, one.mode, threads)?, one.name))).collect();
    let mut names: Vec<&str> = Vec::new();
    // A step that no mode takes, or hardly ever, is no part of a picture.
    let is_seen = |us: f64| us > 0.05;
    for (name, us) in modes.iter().flat_map(|(mark, _)| &mark.steps) {
        if is_seen(*us) && !names.contains(&name.as_str()) {
            names.push(name);
        }
    }
    let value = |mark: &Mark, step: &str| {
        let time = mark.steps.iter().find(|(name, _)| name == step);
        time.map(|(_, us)| Value { median: *us, interval: None })
    };
    Panel {
        form: Form::Stacked,
        title: "mean time of an fsync, µs".to_owned(),
        axis: "µs".to_owned(),
        ticks: modes.iter().map(|(_, name)| (*name).to_owned()).collect(),
        within_cores: modes.len(),
        curves: names
            .iter()
            .map(|step| Curve {
                name: step.replace('_', " "),
                values: modes.iter().map(|(mark, _)| value(mark, step)).collect(),
                expected: Vec::new(),
            })
            .collect(),
    }
}

/// Mean and percentiles of the latency of one thread.
fn percentiles(load: &FileSystem, marks: &[Mark], threads: u32) -> Panel {
    const VALUES: [(&str, Of); 4] = [
        ("mean", |mark| mark.mean_us),
        ("median", |mark| mark.p50_us),
        ("99 %", |mark| mark.p99_us),
        ("99.9 %", |mark| mark.p999_us),
    ];
    let curve = |one: &Mode| {
        let mark = find(marks, one.mode, threads);
        let value = |of: Of| mark.map(|mark| Value { median: of(mark), interval: None });
        Curve {
            name: one.name.to_owned(),
            values: VALUES.iter().map(|(_, of)| value(*of)).collect(),
            expected: Vec::new(),
        }
    };
    Panel {
        form: Form::Lines,
        title: "time of an append with fsync, µs".to_owned(),
        axis: "of all operations of one thread".to_owned(),
        ticks: VALUES.iter().map(|(name, _)| (*name).to_owned()).collect(),
        within_cores: VALUES.len(),
        curves: load.modes.iter().map(curve).collect(),
    }
}

fn claim(spec: &FileSystemClaim, load: &FileSystem, marks: &[Mark], threads: &[u32]) -> Claim {
    let FileSystemClaim { better, worse, measure, paper, at_least } = *spec;
    let threads = match load.shows {
        FileSystemView::Percentiles => threads.get(..1).unwrap_or_default(),
        _ => threads,
    };
    // The geometric mean, since these are ratios.
    let mean = |of: &dyn Fn(&Mark, &Mark) -> f64| {
        let pair =
            |one: &u32| Some((find(marks, better.mode, *one)?, find(marks, worse.mode, *one)?));
        let ratios: Vec<f64> =
            threads.iter().filter_map(pair).map(|(better, worse)| of(better, worse)).collect();
        let is_known = |ratio: &f64| ratio.is_finite() && *ratio > 0.0;
        (!ratios.is_empty() && ratios.iter().all(is_known)).then(|| {
            (ratios.iter().map(|ratio| ratio.ln()).sum::<f64>() / ratios.len() as f64).exp()
        })
    };
    let ahead = format!("{} / {}", better.name, worse.name);
    let slower = format!("{} / {}", worse.name, better.name);
    let (what, here) = match measure {
        FileSystemMeasure::Throughput => (ahead, mean(&|b, w| b.ops_per_s / w.ops_per_s)),
        FileSystemMeasure::Mean => (slower + ", mean latency", mean(&|b, w| w.mean_us / b.mean_us)),
        FileSystemMeasure::P99 => (slower + ", 99th percentile", mean(&|b, w| w.p99_us / b.p99_us)),
        FileSystemMeasure::P999 => {
            (slower + ", 99.9th percentile", mean(&|b, w| w.p999_us / b.p999_us))
        }
    };
    // The waits of HORAE's streams are below the file system, so its trace does not count them.
    let counts_waits = better != HORAE_FS && worse != HORAE_FS;
    let waits = mean(&|better, worse| worse.serial_waits / better.serial_waits);
    Claim { what, paper, expected: waits.filter(|_| counts_waits), here, at_least }
}

fn model(load: &FileSystem, marks: &[Mark], threads: u32) -> String {
    let counted = load.modes.iter().filter(|one| **one != HORAE_FS);
    let waits: Vec<String> = counted
        .filter_map(|one| {
            let mark = find(marks, one.mode, threads)?;
            Some(format!("{:.1} times with {}", mark.serial_waits, one.name))
        })
        .collect();
    let horae = " HoraeFS waits once, too, but below it the data and the record each wait for their ordering \
                 metadata, and `flushed` is recorded at the end: three more round trips.";
    format!(
        "An fsync of one thread waits {}, one wait after the other. If a wait is long beside the work around \
         it, the ratio of the speeds is that of the waits. Threads that share a commit wait less often \
         each.{}",
        units::list(&waits),
        if load.modes.contains(&HORAE_FS) { horae } else { "" }
    )
}

/// The times of a recovery, ms.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct RecoveryTimes {
    /// To read all lists and merge them.
    pub reconstruct_ms: f64,
    /// To discard what disobeys the order.
    pub undo_ms: f64,
    /// All else: connections, claims, shortening of the logs; the paper does not state it.
    pub other_ms: f64,
}

/// The replay to targets that have crashed alone: the initiator sends again what they may have lost.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Replay {
    /// From the start of the targets until all is durable.
    pub ms: f64,
    /// The requests that were sent again.
    pub requests: u64,
}

/// The paper's recovery of Rio and of HORAE (§6.5).
const RIO: RecoveryTimes = RecoveryTimes { reconstruct_ms: 55.0, undo_ms: 125.0, other_ms: 0.0 };
const HORAE: RecoveryTimes = RecoveryTimes { reconstruct_ms: 38.0, undo_ms: 101.0, other_ms: 0.0 };

/// The finished figure of the recovery. `entries` is the number of log entries that are undone.
#[must_use]
pub fn recovery(
    entry: &Entry,
    here: RecoveryTimes,
    entries: u64,
    replay: Replay,
    at: &Conditions,
) -> Figure {
    let bars = [("HORAE, the paper", HORAE), ("Rio, the paper", RIO), ("Rio, here", here)];
    let value = |ms: f64| Some(Value { median: ms, interval: None });
    // The last bar is the replay, which has one part only.
    let curve = |name: &str, of: fn(&RecoveryTimes) -> f64| Curve {
        name: name.to_owned(),
        values: bars.iter().map(|(_, times)| value(of(times))).chain([value(0.0)]).collect(),
        expected: Vec::new(),
    };
    let sent_again = Curve {
        name: "replay to crashed targets".to_owned(),
        values: bars.iter().map(|_| value(0.0)).chain([value(replay.ms)]).collect(),
        expected: Vec::new(),
    };
    // A time supports nothing by itself. The verdict is on the sum.
    let claim = |what: &str, paper: f64, here: f64| Claim {
        what: what.to_owned(),
        paper: Some(paper),
        expected: None,
        here: (here > 0.0).then_some(here),
        at_least: 0.0,
    };
    let total = here.reconstruct_ms + here.undo_ms + here.other_ms;
    let holds = total < 1000.0;
    let sentence = format!(
        "{}: even the worst recovery takes less than a second ({total:.0} ms for {entries} entries; the \
         paper's take 180 ms, for fewer). Where only the targets crash, nothing is undone: {} requests are \
         sent again, and all is durable {:.0} ms after the targets begin to start.",
        if holds { "It holds here" } else { "It does not hold here" },
        replay.requests,
        replay.ms,
    );
    let ticks = bars.iter().map(|(name, _)| *name).chain(["Rio, here, replay"]);
    Figure {
        quick: at.quick,
        machine: at.machine.clone(),
        setup: at.setup.clone(),
        differs: vec![
            "the logs are filled to the last slot as the worst crash would leave them; in the paper 36 threads \
             write until a target crashes"
                .to_owned(),
            format!("{} cores for both sides; the paper has 36 for each server", at.machine.cores),
            "TCP on loopback; the paper has RDMA over 200 Gbit/s".to_owned(),
            "the replay is our addition: the paper states no time for it".to_owned(),
            "not measured: HORAE; engine `horae` has the logs and the recovery of Rio here".to_owned(),
        ],
        panels: vec![Panel {
            form: Form::Stacked,
            title: "time of a recovery, ms".to_owned(),
            axis: "ms".to_owned(),
            within_cores: ticks.clone().count(),
            ticks: ticks.map(str::to_owned).collect(),
            curves: vec![
                curve("reconstruct the order", |times| times.reconstruct_ms),
                curve("discard", |times| times.undo_ms),
                curve("connect, claim, shorten the logs", |times| times.other_ms),
                sent_again,
            ],
        }],
        claims: vec![
            claim("reconstruct the order, ms", RIO.reconstruct_ms, here.reconstruct_ms),
            claim("discard, ms", RIO.undo_ms, here.undo_ms),
        ],
        model: format!(
            "The time follows the number of entries: {entries} of them are read, merged and undone here, each \
             one block of 4 KiB."
        ),
        verdict: Verdict { holds: if holds { Holds::Yes } else { Holds::No }, sentence },
        ..Figure::of(entry)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::figures::catalogue::{self, Experiment};

    fn conditions() -> Conditions {
        Conditions {
            machine: Machine { cores: 2, ..Machine::default() },
            quick: true,
            setup: "one target".to_owned(),
        }
    }

    fn mark(mode: &str, threads: u32, us: f64, waits: f64) -> Mark {
        Mark {
            mode: mode.to_owned(),
            threads,
            ops_per_s: 1e6 / us,
            mean_us: us,
            p50_us: us,
            p99_us: 2.0 * us,
            p999_us: 3.0 * us,
            serial_waits: waits,
            steps: vec![("dispatch_data".to_owned(), us / 4.0), ("wait".to_owned(), us / 2.0)],
        }
    }

    fn of(id: &str) -> Figure {
        let entry = catalogue::named(id).unwrap();
        let Experiment::FileSystem(load) = &entry.experiment else { panic!("{id}") };
        let marks: Vec<Mark> = [1, 4]
            .into_iter()
            .flat_map(|threads| {
                [
                    mark("ext4", threads, 120.0, 3.0),
                    mark("horae", threads, 60.0, 1.0),
                    mark("barrier", threads, 80.0, 1.5),
                    mark("rio", threads, 40.0, 1.0),
                ]
            })
            .collect();
        figure(entry, load, &marks, &conditions())
    }

    #[test]
    fn ratios_of_the_modes_are_beside_the_papers() {
        let figure = of("rio-13");
        let speed = &figure.claims[0];
        assert_eq!((speed.paper, speed.what.as_str()), (Some(3.0), "RioFS / ext4"));
        for claim in &figure.claims {
            let (here, expected) = match claim.what.as_str() {
                "RioFS / HoraeFS" => (1.5, None),
                _ => (3.0, Some(3.0)),
            };
            assert!((claim.here.unwrap() - here).abs() < 1e-9, "{claim:?}");
            assert_eq!(claim.expected.map(f64::round), expected, "{claim:?}");
        }
        assert_eq!(figure.verdict.holds, Holds::Yes);
        assert_eq!((figure.panels.len(), figure.panels[0].within_cores), (3, 1));
        assert_eq!(of("rio-15a").claims.len(), 2);
    }

    #[test]
    fn steps_are_bars_of_one_thread() {
        let figure = of("rio-14");
        let panel = &figure.panels[0];
        assert_eq!(
            (panel.form, panel.ticks.as_slice()),
            (Form::Stacked, &["ext4", "HoraeFS", "RioFS"].map(str::to_owned)[..])
        );
        let names: Vec<_> = panel.curves.iter().map(|curve| curve.name.as_str()).collect();
        assert_eq!(names, ["dispatch data", "wait"]);
        assert_eq!(panel.curves[1].values[2].unwrap().median, 20.0);
    }

    #[test]
    fn percentiles_are_those_of_one_thread() {
        let figure = of("barrier-t1a");
        let panel = &figure.panels[0];
        assert_eq!(panel.ticks, ["mean", "median", "99 %", "99.9 %"]);
        let names: Vec<_> = panel.curves.iter().map(|curve| curve.name.as_str()).collect();
        assert_eq!(names, ["ext4", "BarrierFS", "RioFS"]);
        assert_eq!(panel.curves[1].values[3].unwrap().median, 240.0);
        let claim = &figure.claims[2];
        assert_eq!(claim.what, "ext4 / BarrierFS, 99.9th percentile");
        assert!((claim.here.unwrap() - 1.5).abs() < 1e-9, "{claim:?}");
        assert!((claim.expected.unwrap() - 2.0).abs() < 1e-9, "{claim:?}");
        assert!(
            figure.model.contains("3.0 times with ext4, 1.5 times with BarrierFS"),
            "{}",
            figure.model
        );
    }

    #[test]
    fn a_missing_mode_is_no_claim() {
        let entry = catalogue::named("rio-13").unwrap();
        let Experiment::FileSystem(load) = &entry.experiment else { panic!() };
        let figure = figure(entry, load, &[mark("rio", 1, 40.0, 1.0)], &conditions());
        assert_eq!(figure.verdict.holds, Holds::NotMeasured);
    }

    #[test]
    fn a_recovery_is_beside_both_of_the_paper() {
        let entry = catalogue::named("rio-recovery").unwrap();
        let here = RecoveryTimes { reconstruct_ms: 20.0, undo_ms: 60.0, other_ms: 10.0 };
        let replay = Replay { ms: 80.0, requests: 16_000 };
        let figure = recovery(entry, here, 65_000, replay, &conditions());
        assert_eq!(figure.panels[0].ticks.len(), 4);
        for curve in &figure.panels[0].curves {
            assert_eq!(curve.values.len(), 4, "{}", curve.name);
        }
        assert!(figure.verdict.sentence.contains("16000 requests"), "{}", figure.verdict.sentence);
        assert!(
            figure.verdict.sentence.contains("(90 ms for 65000"),
            "{}",
            figure.verdict.sentence
        );
        let slow = RecoveryTimes { undo_ms: 2e3, ..here };
        let slow = recovery(entry, slow, 1, replay, &conditions());
        assert_eq!(slow.verdict.holds, Holds::No);
    }
}

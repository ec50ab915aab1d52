//! `rio bench fs`: append and fsync on RioFS, in the modes `ext4` and `rio`.

use std::{
    collections::BTreeMap,
    sync::Arc,
    time::{Duration, Instant},
};

use riopipe::{ConnectOptions, OpenOptions, Volume};
use riopipe_fs::{
    Fs, JournalMode,
    backing::{Backing, FsOptions},
    core::{
        FsError, Ino,
        fs::{Caller, NewInode, SetAttr},
    },
    fuse::{Ticker, now},
    mkfs::{MkfsOptions, make_on_volume},
};
use riopipe_lab::{
    harness::{self, Phase, Window, Worker},
    latency::Latencies,
    link::LinkModel,
    machine::Machine,
    retakes::{Disturbance, Retakes},
    rounds::Rounds,
    sample::Sample,
    stats::Estimate,
    table::{Align, Table},
    terminal::{Colour, Terminal},
    units,
};
use serde::Serialize;

use super::window;
use crate::{
    args::bench::fs::Fs as Args,
    connect::{connect_options, open_failure},
    failure::{Code, Failure},
    interrupt::Interrupt,
    output::{Output, Report},
    own_targets::{OwnTargets, Plan, file_log},
    progress::Progress,
};

/// The numbers of threads without `--threads`, and with `--quick`.
const THREADS: [u32; 4] = [1, 2, 4, 8];
const THREADS_QUICK: [u32; 2] = [1, 2];
/// The modes, by their names in the result.
const MODES: [&str; 2] = ["ext4", "rio"];
/// The size at which a file is cut to nothing, so that the drive does not fill up.
const FILE_BYTES_MAX: u64 = 32 << 20;
/// The bytes of an append.
const APPEND: usize = 4096;
/// The streams of the volume: the main stream, and some for data.
const STREAMS: u32 = 5;

pub(super) fn measure(args: &Args, output: &Output) -> Result<Measured, Failure> {
    let machine = Machine::this();
    let interrupt = Interrupt::watch(output)?;
    let (seconds, rounds) = if args.quick { (0.4, 4) } else { (1.0, 6) };
    let time = args.time.unwrap_or(Duration::from_secs_f64(seconds));
    let rounds = args.rounds.unwrap_or(rounds);
    let threads = match (&args.threads, args.quick) {
        (Some(threads), _) => threads.clone(),
        (None, true) => THREADS_QUICK.to_vec(),
        (None, false) => THREADS.to_vec(),
    };
    let connect = connect_options(&args.connect);
    let points = args.profile.len() * args.rtt.len() * threads.len();
    let runs = (points * MODES.len()) as u64 * u64::from(rounds);
    let mut retakes = Retakes::new(runs, Retakes::PERCENT);
    let progress = Progress::steps(output, "", runs);
    let mut points = Vec::new();
    for profile in &args.profile {
        for &rtt_ns in &args.rtt {
            let own = start(profile, rtt_ns, &connect)?;
            for &threads in &threads {
                let load = Load { threads, window: window(time) };
                let mut disturbed = Vec::new();
                let samples = Rounds::run(&MODES, rounds as usize, |index, _| {
                    let rtt = units::time(rtt_ns as f64);
                    let mode = MODES[index];
                    progress.set_message(format!("{profile}, {rtt}, {threads} threads, {mode}"));
                    let (sample, disturbance) =
                        retakes.take(|| once(&own, &connect, mode, &load, &interrupt))?;
                    disturbed.push(disturbance);
                    progress.step();
                    Ok::<_, Failure>(sample)
                })?;
                points.push(Point::new(profile, rtt_ns, threads, &samples, &disturbed));
            }
        }
    }
    drop(progress);
    Ok(Measured {
        schema: "rio-bench-fs/1",
        machine,
        through: "calls",
        append_bytes: APPEND,
        seconds: time.as_secs_f64(),
        rounds,
        points,
        paper: PAPER,
    })
}

/// A target with one drive, and a file system on it.
fn start(profile: &str, rtt_ns: u64, connect: &ConnectOptions) -> Result<OwnTargets, Failure> {
    let drive = match profile {
        "mem" => "mem:1G".to_owned(),
        modelled => format!("ssd:{modelled},size=1G"),
    };
    let link = LinkModel { rtt_ns, jitter_ns: 0, bits_per_s: 0 };
    OwnTargets::start(&Plan {
        volume: "fs",
        drive,
        log: file_log(8 << 20),
        streams: STREAMS,
        connect: connect.clone(),
        link: (!link.is_nothing()).then_some(link),
        ..Plan::default()
    })
}

/// A load: threads for a time.
#[derive(Clone, Copy)]
struct Load {
    threads: u32,
    window: Window,
}

fn storage(error: &dyn std::error::Error) -> Failure {
    Failure::new(Code::Storage, error.to_string())
}

/// One run of one mode, on a new file system.
fn once(
    own: &OwnTargets,
    connect: &ConnectOptions,
    mode: &str,
    load: &Load,
    interrupt: &Interrupt,
) -> Result<Sample, Failure> {
    interrupt.check()?;
    let options = OpenOptions { connect: connect.clone(), ..OpenOptions::default() };
    let (volume, _) = Volume::open(own.volume(), own.members(), &options)
        .map_err(|error| open_failure(&error))?;
    let fresh = MkfsOptions { force: true, ..MkfsOptions::default() };
    make_on_volume(&volume, &fresh, &mut |_, _| ()).map_err(|error| storage(&error))?;
    let backing = Backing::of_volume(volume).map_err(|error| storage(&error))?;
    let mode = if mode == "ext4" { JournalMode::Ext4 } else { JournalMode::Rio };
    let options = FsOptions { mode, ..FsOptions::default() };
    let (fs, _) = backing.mount(&options).map_err(|error| storage(&error))?;
    let ticker = Ticker::start(Arc::clone(&fs)).map_err(|error| storage(&error))?;
    let result = append_fsync(&fs, own, load);
    ticker.stop();
    let sample = result.map_err(|error| storage(&error))?;
    fs.unmount(now()).map_err(|error| storage(&error))?;
    drop(fs);
    backing.close().map_err(|error| storage(&error))?;
    Ok(sample)
}

/// Each thread appends to a file of its own, and waits for its fsync.
fn append_fsync(fs: &Fs, own: &OwnTargets, load: &Load) -> Result<Sample, FsError> {
    let caller = Caller::default();
    let work = |thread: u32, worker: &Worker<'_>| -> Result<Latencies, FsError> {
        let name = format!("file{thread}");
        let new = NewInode { mode: 0o100_644, rdev: 0, target: b"" };
        let file = fs.create(&caller, Ino::ROOT, name.as_bytes(), &new, now())?.ino;
        let data = vec![0x5a; APPEND];
        let mut latencies = Latencies::new();
        let mut size = 0;
        worker.ready();
        loop {
            let phase = worker.phase();
            if phase == Phase::Stop {
                return Ok(latencies);
            }
            if size >= FILE_BYTES_MAX {
                let cut = SetAttr { size: Some(0), ..SetAttr::default() };
                fs.set_attr(&caller, file, &cut, now())?;
                size = 0;
            }
            let since = Instant::now();
            fs.write(&caller, file, size, &data, now())?;
            fs.fsync(file, false, now())?;
            size += APPEND as u64;
            worker.completed(1, 1, APPEND as u64);
            if phase == Phase::Measure {
                latencies.record(u64::try_from(since.elapsed().as_nanos()).unwrap_or(u64::MAX));
            }
        }
    };
    harness::run(load.window, load.threads, || own.cpu_ns(), work)
}

/// The result of the measurement.
#[derive(Debug, Serialize)]
pub(super) struct Measured {
    schema: &'static str,
    machine: Machine,
    /// The path of the calls: `calls` of the file system in this process.
    through: &'static str,
    append_bytes: usize,
    seconds: f64,
    rounds: u32,
    points: Vec<Point>,
    /// The paper's ratios of throughput, RioFS over ext4, with NVMe over RDMA in the kernel.
    paper: Paper,
}

/// The figures of the paper (EuroSys '23, 6.3 and 6.4).
#[derive(Debug, Serialize)]
struct Paper {
    append_fsync_rio_over_ext4: f64,
    append_fsync_latency_reduction: f64,
    append_fsync_p99_reduction: f64,
}

const PAPER: Paper = Paper {
    append_fsync_rio_over_ext4: 3.0,
    append_fsync_latency_reduction: 0.67,
    append_fsync_p99_reduction: 0.5,
};

/// The result for one drive, round trip and number of threads.
#[derive(Debug, Serialize)]
struct Point {
    workload: &'static str,
    profile: String,
    rtt_us: f64,
    threads: u32,
    modes: BTreeMap<&'static str, Figures>,
    ratios: Ratios,
    /// Number of runs that the host disturbed, and that were repeated.
    set_aside: u32,
}

/// The figures of one mode over all rounds.
#[derive(Debug, Serialize)]
struct Figures {
    /// Appends with fsync per second: median.
    ops_per_s: f64,
    /// Median of the time of an append with fsync in µs, over all rounds.
    p50_us: f64,
    /// 99th percentile of that time in µs, over all rounds.
    p99_us: f64,
    /// CPU time of the calling threads for each append with fsync in µs: median.
    cpu_us_per_op: f64,
    /// CPU time of the target for each append with fsync in µs: median.
    target_cpu_us_per_op: f64,
}

/// Ratios of the modes, round by round: medians.
#[derive(Debug, Serialize)]
struct Ratios {
    rio_over_ext4: f64,
    rio_over_ext4_interval: [f64; 2],
}

fn median(values: &[f64]) -> f64 {
    Estimate::of(values).map_or(0.0, |estimate| estimate.value)
}

impl Figures {
    fn of(mode: &str, rounds: &Rounds<Sample>) -> Self {
        let mut latencies = Latencies::new();
        let samples = rounds.samples(mode).unwrap_or_default();
        samples.iter().for_each(|sample| latencies.add(&sample.latencies));
        let summary = latencies.summary();
        let us = |ns: f64| ns / 1e3;
        let target = |sample: &Sample| sample.target_cpu_ns_per_write().unwrap_or(0.0);
        Self {
            ops_per_s: median(&rounds.values(mode, Sample::writes_per_s)),
            p50_us: us(summary.p50_ns as f64),
            p99_us: us(summary.p99_ns as f64),
            cpu_us_per_op: us(median(&rounds.values(mode, Sample::initiator_cpu_ns_per_write))),
            target_cpu_us_per_op: us(median(&rounds.values(mode, target))),
        }
    }
}

impl Point {
    fn new(
        profile: &str,
        rtt_ns: u64,
        threads: u32,
        rounds: &Rounds<Sample>,
        disturbed: &[Disturbance],
    ) -> Self {
        let rates = |mode: &str| rounds.values(mode, Sample::writes_per_s);
        let ratio = Estimate::of_ratio(&rates("rio"), &rates("ext4"));
        Self {
            workload: "append_fsync",
            profile: profile.to_owned(),
            rtt_us: rtt_ns as f64 / 1e3,
            threads,
            modes: MODES.iter().map(|mode| (*mode, Figures::of(mode, rounds))).collect(),
            ratios: Ratios {
                rio_over_ext4: ratio.map_or(0.0, |ratio| ratio.value),
                rio_over_ext4_interval: ratio.map_or([0.0; 2], |ratio| [ratio.low, ratio.high]),
            },
            set_aside: disturbed.iter().map(|one| one.set_aside).sum(),
        }
    }
}

impl Report for Measured {
    fn text(&self, terminal: &Terminal) -> String {
        let mut table = Table::new(&[
            ("drive", Align::Left),
            ("rtt", Align::Right),
            ("threads", Align::Right),
            ("ext4", Align::Right),
            ("p50", Align::Right),
            ("p99", Align::Right),
            ("rio", Align::Right),
            ("p50", Align::Right),
            ("p99", Align::Right),
            ("rio / ext4", Align::Right),
        ]);
        for point in &self.points {
            let mut row = vec![
                point.profile.clone(),
                units::time(point.rtt_us * 1e3),
                point.threads.to_string(),
            ];
            for mode in MODES {
                if let Some(figures) = point.modes.get(mode) {
                    row.push(units::per_second(figures.ops_per_s));
                    row.push(units::time(figures.p50_us * 1e3));
                    row.push(units::time(figures.p99_us * 1e3));
                }
            }
            row.push(units::ratio(point.ratios.rio_over_ext4));
            table.row(row);
        }
        let note = format!(
            "medians of {} rounds of {} s; the paper has {} times the throughput of ext4, in the \
             kernel over RDMA; {}\n",
            self.rounds,
            self.seconds,
            self.paper.append_fsync_rio_over_ext4,
            self.machine.line()
        );
        format!(
            "appends of 4 KiB with fsync, each thread on a file of its own; without FUSE\n\n{}\n{}",
            table.render(terminal),
            terminal.paint(Colour::Grey, &note),
        )
    }
}

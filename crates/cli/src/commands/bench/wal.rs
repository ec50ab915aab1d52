//! `rio bench wal`: a log of records with engine `rio`, compared with the same log with write and
//! FLUSH.

use std::time::Duration;

use riopipe::{ConnectOptions, EngineKind, OpenOptions, Volume};
use riopipe_lab::{
    machine::Machine,
    retakes::{Disturbance, Retakes},
    rounds::Rounds,
    stats::Estimate,
    table::{Align, Table},
    terminal::{Colour, Terminal},
    units,
    wal_load::{self, WalFigures, WalLoad, WalSample},
};
use riopipe_wal::{Wal, WalOptions, WalPlace};
use serde::Serialize;

use super::window;
use crate::{
    args::bench::wal::Wal as Args,
    connect::{connect_options, open_failure},
    failure::Failure,
    interrupt::Interrupt,
    output::{Output, Report},
    own_targets::{OwnTargets, Plan, file_log},
    progress::Progress,
};

/// The numbers of producers without `--producers`, and with `--quick`.
const PRODUCERS: [u32; 7] = [1, 2, 4, 8, 16, 32, 64];
const PRODUCERS_QUICK: [u32; 3] = [1, 8, 64];
/// 64 MiB of log.
const PLACE: WalPlace = WalPlace { stream: 0, lba: 0, blocks: 16 << 10 };
/// Longest time for closing a log.
const CLOSE: Duration = Duration::from_secs(60);
/// The two contenders, by their names in the result.
const CONTENDERS: [&str; 2] = ["wal", "flush"];

pub(super) fn measure(args: &Args, output: &Output) -> Result<Measured, Failure> {
    let machine = Machine::this();
    let interrupt = Interrupt::watch(output)?;
    let (seconds, rounds) = if args.quick { (0.5, 4) } else { (1.0, 6) };
    let time = args.time.unwrap_or(Duration::from_secs_f64(seconds));
    let rounds = args.rounds.unwrap_or(rounds);
    let producers = match (&args.producers, args.quick) {
        (Some(producers), _) => producers.clone(),
        (None, true) => PRODUCERS_QUICK.to_vec(),
        (None, false) => PRODUCERS.to_vec(),
    };
    let connect = connect_options(&args.connect)?;
    let own = OwnTargets::start(&Plan {
        volume: "wal",
        targets: args.targets,
        drive: args.drive.clone(),
        log: file_log(args.log_size),
        connect: connect.clone(),
        link: args.link.model(),
        ..Plan::default()
    })?;
    let runs = (producers.len() * args.record.len() * CONTENDERS.len()) as u64 * u64::from(rounds);
    let mut retakes = Retakes::new(runs, Retakes::PERCENT);
    let progress = Progress::steps(output, "", runs);
    let mut points = Vec::new();
    for record_bytes in &args.record {
        for producers in &producers {
            let load = WalLoad {
                producers: *producers,
                record_bytes: *record_bytes as usize,
                window: window(time),
            };
            let mut disturbed = Vec::new();
            let samples = Rounds::run(&CONTENDERS, rounds as usize, |index, _| {
                progress.set_message(format!("{}, {producers} producers", CONTENDERS[index]));
                let (sample, disturbance) =
                    retakes.take(|| once(&own, &connect, index, &load, args, &interrupt))?;
                disturbed.push(disturbance);
                progress.step();
                Ok::<_, Failure>(sample)
            })?;
            points.push(Point::new(&load, &samples, &disturbed));
        }
    }
    drop(progress);
    Ok(Measured {
        schema: "rio-bench-wal/1",
        machine,
        drive: args.drive.clone(),
        targets: args.targets,
        link: args.link.model().map(|link| link.to_string()),
        groups: args.groups,
        flushes: args.flushes,
        seconds: time.as_secs_f64(),
        rounds,
        points,
    })
}

/// One run of one contender, on a new log.
fn once(
    own: &OwnTargets,
    connect: &ConnectOptions,
    contender: usize,
    load: &WalLoad,
    args: &Args,
    interrupt: &Interrupt,
) -> Result<WalSample, Failure> {
    interrupt.check()?;
    // With FLUSH, a second group in flight would only wait, and make groups smaller.
    let (engine, groups) = match CONTENDERS[contender] {
        "wal" => (EngineKind::Rio, args.groups as usize),
        _ => (EngineKind::Sync, 1),
    };
    let options =
        OpenOptions { engine: Some(engine), connect: connect.clone(), ..OpenOptions::default() };
    let (volume, _) = Volume::open(own.volume(), own.members(), &options)
        .map_err(|error| open_failure(&error))?;
    let flushes = args.flushes as usize;
    let options = WalOptions { groups, flushes, overwrite: true, ..WalOptions::default() };
    let wal = Wal::create(&volume, PLACE, &options).map_err(|error| Failure::storage(&error))?;
    let result = wal_load::run(&wal, load);
    let closed = wal.close(Some(CLOSE));
    drop(wal);
    // The first failure is the cause; that of closing is its consequence.
    let sample = result.map_err(|error| Failure::storage(&error))?;
    closed.map_err(|error| Failure::storage(&error))?;
    volume.close().map_err(|error| Failure::storage(&error))?;
    Ok(sample)
}

/// The result of the measurement.
#[derive(Debug, Serialize)]
pub(super) struct Measured {
    schema: &'static str,
    machine: Machine,
    drive: String,
    targets: u32,
    #[serde(skip_serializing_if = "Option::is_none")]
    link: Option<String>,
    groups: u32,
    flushes: u32,
    seconds: f64,
    rounds: u32,
    points: Vec<Point>,
}

/// The result for one number of producers and one size of records.
#[derive(Debug, Serialize)]
struct Point {
    producers: u32,
    record_bytes: usize,
    wal: WalFigures,
    flush: WalFigures,
    /// Ratio of records per second, `wal` over `flush`: median of round-by-round ratios.
    ratio: f64,
    ratio_interval: [f64; 2],
    /// Number of runs that the host disturbed, and that were repeated.
    set_aside: u32,
    /// Mean share of the machine's time that the host took, if it is known.
    #[serde(skip_serializing_if = "Option::is_none")]
    host_stole: Option<f64>,
}

impl Point {
    fn new(load: &WalLoad, rounds: &Rounds<WalSample>, disturbed: &[Disturbance]) -> Self {
        let rates = |name: &str| rounds.values(name, |sample| sample.records_per_s);
        let figures = |name: &str| {
            // There is at least one round.
            let median = Estimate::of(&rates(name)).map_or(0.0, |estimate| estimate.value);
            WalFigures::of(median, rounds.samples(name).unwrap_or_default())
        };
        let ratio = Estimate::of_ratio(&rates("wal"), &rates("flush"));
        let stole: Option<Vec<f64>> = disturbed.iter().map(|one| one.stole).collect();
        let mean = |shares: Vec<f64>| shares.iter().sum::<f64>() / shares.len().max(1) as f64;
        Self {
            producers: load.producers,
            record_bytes: load.record_bytes,
            wal: figures("wal"),
            flush: figures("flush"),
            ratio: ratio.map_or(0.0, |ratio| ratio.value),
            ratio_interval: ratio.map_or([0.0; 2], |ratio| [ratio.low, ratio.high]),
            set_aside: disturbed.iter().map(|one| one.set_aside).sum(),
            host_stole: stole.map(mean),
        }
    }
}

impl Report for Measured {
    fn text(&self, terminal: &Terminal) -> String {
        let mut table = Table::new(&[
            ("producers", Align::Right),
            ("record", Align::Right),
            ("wal", Align::Right),
            ("p99", Align::Right),
            ("flush", Align::Right),
            ("p99", Align::Right),
            ("wal / flush", Align::Right),
        ]);
        for point in &self.points {
            table.row([
                point.producers.to_string(),
                units::bytes(point.record_bytes as u64),
                units::per_second(point.wal.records_per_s),
                units::time(point.wal.p99_us * 1e3),
                units::per_second(point.flush.records_per_s),
                units::time(point.flush.p99_us * 1e3),
                units::ratio(point.ratio),
            ]);
        }
        let link = self.link.as_ref().map(|link| format!(", {link}")).unwrap_or_default();
        let targets = if self.targets == 1 { "target" } else { "targets" };
        format!(
            "durable records, each waited for; {} {targets} with {}{link}\n\n{}\n{}",
            self.targets,
            self.drive,
            table.render(terminal),
            terminal.paint(
                Colour::Grey,
                &format!(
                    "medians of {} rounds of {} s; {}\n",
                    self.rounds,
                    self.seconds,
                    self.machine.line()
                )
            ),
        )
    }
}

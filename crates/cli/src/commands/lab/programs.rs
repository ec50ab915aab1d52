//! The runs of a program: at each point the contenders take turns, each time on a new file system or a
//! new object store, on the same drives.

use std::{cell::RefCell, collections::BTreeMap, io, iter, sync::Arc, time::Duration};

use clap::ValueEnum;
use riopipe::{BLOCK_BYTES, ConnectOptions, EngineKind, StreamOptions};
use riopipe_fs::{
    JournalMode,
    backing::engine_of,
    fsync_stages::FsyncTimesSnapshot,
    fuse::{Ticker, now},
};
use riopipe_lab::{
    figures::{
        block::write_ns_of,
        catalogue::{
            Drive as Kind, Entry,
            program::{Layout, Program, ProgramContender, ProgramLoad, ProgramMeasure, Tick},
        },
        figure::Figure,
        program::{self, Mark, Measured},
    },
    fs_load::{
        FsLoad, append, dbench, oltp_insert, oltp_insert_each, overwrite_fsync, sqlite,
        varmail_each, varmail_with,
    },
    harness::SideCpu,
    machine::Machine,
    queue_depth::{DepthReading, DepthWatch, WatchedDrive},
    retakes::Retakes,
    rounds::Rounds,
    sample::Sample,
    stats::Estimate,
    units,
    workload::Workload,
};
use riopipe_net::SpinPolicy;
use riopipe_order::write_order::DriveOrder;

use super::objects::Objects;
use crate::{
    args::fs::Mode,
    commands::{
        bench::{
            self,
            fs::{
                calls::Calls,
                cpu::{side_cpu, worker_switches},
                fresh::{DriveCounts, Fresh},
            },
            open_drive, waiting,
        },
        fs::journal_mode,
    },
    failure::{Code, Failure},
    interrupt::Interrupt,
    load::Load,
    output::Output,
    own_targets::{OwnTargets, Plan, file_log},
    progress::Progress,
};

/// Size of each drive, and of the log of a target. The files of 40 containers need 130 MiB.
const DRIVE_SIZE: &str = "384M";
const LOG_BYTES: u64 = 8 << 20;
/// Bytes on one drive before the next one follows.
const UNIT_BYTES: u32 = 64 << 10;
/// A percentile needs so many operations above it.
const ABOVE_MIN: u64 = 10;
/// The streams of a volume: the main one, and those of the data of files.
const STREAMS: u32 = 9;

/// Measures a figure.
pub(super) fn measure(
    entry: &Entry,
    program: &Program,
    quick: bool,
    interrupt: &Interrupt,
    output: &Output,
) -> Result<Figure, Failure> {
    let machine = Machine::this();
    let ticks = program.ticks(quick);
    let (contenders, missing): (Vec<&ProgramContender>, Vec<&ProgramContender>) =
        program.contenders.iter().partition(|one| match program.is_of_objects() {
            true => EngineKind::from_name(one.mode).is_some(),
            false => mode_of(one).is_some(),
        });
    let sleeps = program.panels.contains(&ProgramMeasure::Switches);
    let mut sites = Sites::new(program.drives, sleeps);
    let rounds = if quick { 3 } else { 6 };
    let runs = (ticks.len() * contenders.len() + 1) as u64 * rounds as u64;
    let mut retakes = Retakes::new(runs, Retakes::PERCENT);
    let progress = Progress::steps(output, entry.id, runs);
    let trip_ns = sites.trip_ns(rounds, &mut retakes, interrupt, &mut || progress.step())?;
    let names: Vec<&str> = contenders.iter().map(|one| one.name).collect();
    let time = Duration::from_millis(if quick { 200 } else { 300 });
    let mut marks = Vec::new();
    for tick in ticks {
        progress.set_message(format!("{}: {} {}", entry.id, program.axis, tick.name));
        let samples = Rounds::run(&names, rounds, |index, _| {
            let (run, _) = retakes.take(|| {
                interrupt.check()?;
                let run = sites.run(contenders[index], tick, time);
                run.map_err(|failure| {
                    failure.during(&format!("{}, {} at {}", entry.id, names[index], tick.name))
                })
            })?;
            progress.step();
            Ok::<_, Failure>(run)
        })?;
        marks.extend(names.iter().map(|name| mark(name, tick, &samples)));
    }
    drop(progress);
    let measured = Measured {
        marks,
        trip_ns,
        machine,
        quick,
        setup: setup(program),
        missing: missing.iter().map(|one| one.name).collect(),
    };
    Ok(program::figure(entry, program, &measured))
}

fn setup(program: &Program) -> String {
    let drives: Vec<String> = program.drives.iter().map(|d| d.profile().to_owned()).collect();
    let drives = match drives.as_slice() {
        [one] => format!("a modelled {one} drive"),
        several => format!("modelled {} drives", units::list(several)),
    };
    let sleeps = match program.panels.contains(&ProgramMeasure::Switches) {
        true => "; both sides sleep at each wait, without polling before",
        false => "",
    };
    let (what, new) = match program.is_of_objects() {
        true => ("the object store", "store"),
        false => ("RioFS", "file system"),
    };
    let apart = match program.contenders.iter().any(|one| one.layout == Layout::Apart) {
        true => ", or a target for each drive where the redo log has its own",
        false => "",
    };
    format!(
        "One target on loopback with {drives}{apart}; {what} in the process of the load, all contenders in turns, each \
         time on a new {new}{sleeps}"
    )
}

/// The mode of RioFS, by its name on the command line; `None`: this program has no such mode.
fn mode_of(contender: &ProgramContender) -> Option<JournalMode> {
    Mode::from_str(contender.mode, false).ok().map(journal_mode)
}

/// The order that the drives of a mode must keep.
fn order_of(mode: JournalMode) -> DriveOrder {
    engine_of(mode).map_or(DriveOrder::None, |engine| engine.capabilities().drive_order)
}

/// One run.
#[derive(Clone, Debug, Default)]
struct Run {
    sample: Sample,
    /// The counts within the window.
    fsyncs: FsyncTimesSnapshot,
    drive: DriveCounts,
    switches: u64,
    queue_depth: f64,
    largest_queue_depth: u64,
    /// The waits of an operation one after the other, if they are known without counting.
    known_waits: Option<u64>,
}

impl Run {
    fn of_each(&self, count: u64) -> f64 {
        count as f64 / self.sample.writes.max(1) as f64
    }

    /// The waits of an operation, one after the other.
    fn serial_waits(&self) -> f64 {
        let all = self.fsyncs.serial_waits().iter().zip(0..).map(|(calls, waits)| calls * waits);
        self.known_waits.map_or_else(|| self.of_each(all.sum()), |waits| waits as f64)
    }
}

fn mark(name: &str, tick: &Tick, rounds: &Rounds<Run>) -> Mark {
    let runs = rounds.samples(name).unwrap_or_default();
    let estimate = |of: &dyn Fn(&Run) -> f64| Estimate::of(&rounds.values(name, of));
    let median = |of: &dyn Fn(&Run) -> f64| estimate(of).map_or(0.0, |estimate| estimate.value);
    let rate = estimate(&|run| run.sample.writes_per_s());
    let mut latencies = riopipe_lab::latency::Latencies::new();
    runs.iter().for_each(|run| latencies.add(&run.sample.latencies));
    let summary = latencies.summary();
    Mark {
        contender: name.to_owned(),
        tick: tick.name.to_owned(),
        threads: tick.threads,
        ops_per_s: rate.map_or(0.0, |rate| rate.value),
        ops_per_s_interval: rate.map(|rate| [rate.low, rate.high]),
        mean_us: summary.mean_ns / 1e3,
        p99_us: (summary.count >= 100 * ABOVE_MIN).then_some(summary.p99_ns as f64 / 1e3),
        p999_us: (summary.count >= 1000 * ABOVE_MIN).then_some(summary.p999_ns as f64 / 1e3),
        switches: median(&|run| run.of_each(run.switches)),
        serial_waits: median(&Run::serial_waits),
        drive_writes: median(&|run| run.of_each(run.drive.writes)),
        drive_blocks: median(&|run| run.of_each(run.drive.written_bytes) / BLOCK_BYTES as f64),
        drive_flushes: median(&|run| run.of_each(run.drive.flushes)),
        queue_depth: median(&|run| run.queue_depth),
        largest_queue_depth: median(&|run| run.largest_queue_depth as f64),
    }
}

/// The volumes of a contender, each with its targets: one over all drives, or one for each drive.
struct Site {
    owns: Vec<OwnTargets>,
    watches: Vec<Arc<DepthWatch>>,
}

/// The sites of all contenders, made when they are needed.
struct Sites {
    drives: &'static [Kind],
    sleeps: bool,
    /// By the order that the drives keep, and by the use of the drives.
    all: BTreeMap<(&'static str, Layout), Site>,
}

impl Sites {
    fn new(drives: &'static [Kind], sleeps: bool) -> Self {
        Self { drives, sleeps, all: BTreeMap::new() }
    }

    fn spin(&self) -> SpinPolicy {
        if self.sleeps { SpinPolicy::BLOCK } else { SpinPolicy::HYBRID }
    }

    fn connect(&self) -> ConnectOptions {
        waiting(ConnectOptions::default(), self.spin())
    }

    fn spec(kind: Kind, order: DriveOrder) -> String {
        format!("ssd:{},size={DRIVE_SIZE},order={}", kind.profile(), order.name())
    }

    fn site(&mut self, order: DriveOrder, layout: Layout) -> Result<&Site, Failure> {
        let key = (order.name(), layout);
        if !self.all.contains_key(&key) {
            let volumes = match layout {
                Layout::Joined => self.drives.chunks(self.drives.len()),
                Layout::Apart => self.drives.chunks(1),
                Layout::First => self.drives[..1].chunks(1),
            };
            let mut site = Site { owns: Vec::new(), watches: Vec::new() };
            for drives in volumes {
                let mut open = Vec::new();
                for kind in drives {
                    let spec = Self::spec(*kind, order);
                    let (drive, watch) = WatchedDrive::around(open_drive(&spec)?);
                    open.push(drive);
                    site.watches.push(watch);
                }
                site.owns.push(OwnTargets::start(&Plan {
                    volume: "lab-fs",
                    drives: drives.len() as u32,
                    // Only for the configuration: these drives are open already.
                    drive: Self::spec(drives[0], order),
                    open,
                    log: file_log(LOG_BYTES),
                    unit_bytes: UNIT_BYTES,
                    streams: STREAMS,
                    connect: self.connect(),
                    spin: self.spin(),
                    ..Plan::default()
                })?);
            }
            self.all.insert(key, site);
        }
        // It was inserted if it was missing.
        self.all.get(&key).ok_or_else(|| Failure::new(Code::Failed, "no targets"))
    }

    /// Time of a command and its answer without the drive: an orderless write at depth 1, less the mean
    /// time of the drives.
    fn trip_ns(
        &mut self,
        rounds: usize,
        retakes: &mut Retakes,
        interrupt: &Interrupt,
        step: &mut dyn FnMut(),
    ) -> Result<f64, Failure> {
        let connect = self.connect();
        let drives = self.drives;
        let own = &self.site(DriveOrder::None, Layout::Joined)?.owns[0];
        let samples = Rounds::run(&["none"], rounds, |_, _| {
            let load = Load {
                volume: own.volume().to_owned(),
                members: own.members().to_vec(),
                connect: connect.clone(),
                io_timeout: StreamOptions::default().timeout,
                workload: Workload::random_4k(1, 1),
                window: bench::window(Duration::from_millis(100)),
                merge: false,
                cores: Vec::new(),
                shares_stream: false,
                moves: false,
            };
            let (sample, _) = retakes.take(|| {
                interrupt.check()?;
                load.run(EngineKind::None, interrupt, || None)
            })?;
            step();
            Ok::<_, Failure>(sample)
        })?;
        let medians = samples.values("none", |sample| sample.latencies.summary().p50_ns as f64);
        let median = Estimate::of(&medians).map_or(0.0, |estimate| estimate.value);
        let writes: f64 = drives.iter().map(|drive| write_ns_of(*drive)).sum();
        Ok((median - writes / drives.len().max(1) as f64).max(0.0))
    }

    /// Runs one contender.
    fn run(
        &mut self,
        contender: &ProgramContender,
        tick: &Tick,
        time: Duration,
    ) -> Result<Run, Failure> {
        match tick.load {
            ProgramLoad::Objects { applies, bytes } => {
                self.run_objects(contender, tick, Objects { applies, bytes }, time)
            }
            _ => self.run_on_files(contender, tick, time),
        }
    }

    /// Runs one contender on a new object store.
    fn run_objects(
        &mut self,
        contender: &ProgramContender,
        tick: &Tick,
        objects: Objects,
        time: Duration,
    ) -> Result<Run, Failure> {
        let connect = self.connect();
        let site = self.site(DriveOrder::None, contender.layout)?;
        // Contenders without an engine have been left out.
        let engine = EngineKind::from_name(contender.mode).unwrap_or(EngineKind::Rio);
        let window = Window::of(site, &[]);
        let load = FsLoad { threads: tick.threads, window: bench::window(time) };
        let own = &site.owns[0];
        let sample = objects.run(own, &connect, engine, &load, || window.read())?;
        Ok(Run { known_waits: Some(objects.serial_waits()), ..window.run(sample) })
    }

    /// Runs one contender on new file systems.
    fn run_on_files(
        &mut self,
        contender: &ProgramContender,
        tick: &Tick,
        time: Duration,
    ) -> Result<Run, Failure> {
        // Contenders without a mode have been left out.
        let mode = mode_of(contender).unwrap_or_default();
        let connect = self.connect();
        let site = self.site(order_of(mode), contender.layout)?;
        let fresh = site.owns.iter().map(|own| Fresh::make(own, &connect, mode));
        let fresh = fresh.collect::<Result<Vec<_>, _>>()?;
        let start = |one: &Fresh| Ticker::start(Arc::clone(one.fs()));
        let tickers = fresh.iter().map(start).collect::<io::Result<Vec<_>>>();
        let tickers = tickers.map_err(|error| Failure::storage(&error))?;
        let files: Vec<Calls> = fresh.iter().map(|one| Calls::new(Arc::clone(one.fs()))).collect();
        let window = Window::of(site, &fresh);
        let load = FsLoad { threads: tick.threads, window: bench::window(time) };
        let result = run_load(contender, tick, &files, &load, || window.read());
        drop(files);
        tickers.into_iter().for_each(Ticker::stop);
        let sample = result.map_err(|error| Failure::storage(&error))?;
        let run = window.run(sample);
        for one in fresh {
            one.fs().unmount(now()).map_err(|error| Failure::storage(&error))?;
            one.close()?;
        }
        Ok(run)
    }
}

/// Makes the load. The first file system has the data, the last one the log, if the program has one.
fn run_load(
    contender: &ProgramContender,
    tick: &Tick,
    files: &[Calls],
    load: &FsLoad,
    cpu: impl Fn() -> SideCpu,
) -> io::Result<Sample> {
    let guarantee = contender.guarantee_at(tick);
    let (Some(data), Some(log)) = (files.first(), files.last()) else {
        return Err(io::Error::other("no file system"));
    };
    match tick.load {
        ProgramLoad::Append => append(data, load, guarantee, cpu),
        ProgramLoad::Overwrite => overwrite_fsync(data, load, guarantee, cpu),
        ProgramLoad::Sqlite(journal) => sqlite(data, load, journal, guarantee, cpu),
        ProgramLoad::Varmail => varmail_with(data, load, guarantee, cpu),
        ProgramLoad::VarmailEach => varmail_each(data, load, cpu),
        ProgramLoad::OltpInsert => oltp_insert(data, log, load, guarantee, cpu),
        ProgramLoad::OltpInsertEach => oltp_insert_each(data, load, guarantee, cpu),
        ProgramLoad::Dbench => dbench(data, load, cpu),
        ProgramLoad::Objects { .. } => Err(io::Error::other("no load on files")),
    }
}

/// The counts from the beginning of the measured window to its end. The harness reads the CPU time
/// at both, and so do we.
struct Window<'a> {
    site: &'a Site,
    fresh: &'a [Fresh],
    readings: RefCell<Vec<Reading>>,
}

struct Reading {
    fsyncs: Vec<FsyncTimesSnapshot>,
    drives: Vec<DriveCounts>,
    switches: u64,
    depths: Vec<DepthReading>,
}

impl<'a> Window<'a> {
    fn of(site: &'a Site, fresh: &'a [Fresh]) -> Self {
        Self { site, fresh, readings: RefCell::default() }
    }

    fn read(&self) -> SideCpu {
        let fsyncs = self.fresh.iter().map(Fresh::fsyncs).collect();
        let drives = self.site.owns.iter().map(DriveCounts::of).collect();
        let depths = self.site.watches.iter().map(|watch| watch.read()).collect();
        let switches = worker_switches();
        self.readings.borrow_mut().push(Reading { fsyncs, drives, switches, depths });
        side_cpu()
    }

    fn run(self, sample: Sample) -> Run {
        let readings = self.readings.into_inner();
        let (Some(begin), Some(end)) = (readings.first(), readings.last()) else {
            return Run { sample, ..Run::default() };
        };
        let mut run =
            Run { sample, switches: end.switches.saturating_sub(begin.switches), ..Run::default() };
        for (end, begin) in iter::zip(&end.fsyncs, &begin.fsyncs) {
            run.fsyncs.add(&end.since(begin));
        }
        for (end, begin) in iter::zip(&end.drives, &begin.drives) {
            let counts = end.since(*begin);
            run.drive.writes += counts.writes;
            run.drive.flushes += counts.flushes;
        }
        let count = end.depths.len().max(1) as f64;
        for (end, begin) in iter::zip(&end.depths, &begin.depths) {
            run.queue_depth += end.mean_since(begin) / count;
            run.largest_queue_depth = run.largest_queue_depth.max(end.largest());
        }
        run
    }
}

#[cfg(test)]
mod tests {
    use riopipe_lab::{
        figures::catalogue::{self, Experiment},
        fs_load::Guarantee,
    };

    use super::*;

    const SHORT: Duration = Duration::from_millis(15);

    fn run(sites: &mut Sites, contender: &ProgramContender, tick: &Tick) -> Run {
        sites.run(contender, tick, SHORT).unwrap_or_else(|failure| {
            panic!("{} at {}: {failure}", contender.name, tick.name);
        })
    }

    #[test]
    fn modes_have_the_names_of_the_file_system() {
        for program in all() {
            for contender in program.contenders.iter().filter(|_| !program.is_of_objects()) {
                let name = mode_of(contender).map(JournalMode::name);
                assert!(name.is_none_or(|name| name == contender.mode), "{name:?}");
            }
        }
        for mode in ["ext4", "horae", "barrier", "rio"] {
            let is_of_mode = |one: &&ProgramContender| one.mode == mode;
            let contender = all().flat_map(|program| program.contenders).find(is_of_mode);
            assert!(contender.is_some_and(|one| mode_of(one).is_some()), "{mode}");
        }
    }

    /// Each program, each use of the drives, each mode: over the figures, not all combinations.
    #[test]
    fn every_program_of_a_figure_runs() {
        for entry in catalogue::all() {
            let Experiment::Program(program) = &entry.experiment else { continue };
            let mut sites = Sites::new(program.drives, false);
            let is_there =
                |one: &&ProgramContender| program.is_of_objects() || mode_of(one).is_some();
            let contenders: Vec<_> = program.contenders.iter().filter(is_there).collect();
            for (number, contender) in contenders.iter().enumerate() {
                let tick = &program.quick[number % program.quick.len()];
                let run = run(&mut sites, contender, tick);
                assert!(run.sample.writes > 0, "{}: {}", entry.id, contender.name);
                assert!(run.sample.latencies.summary().count > 0, "{}", entry.id);
            }
        }
    }

    fn all() -> impl Iterator<Item = &'static Program> {
        catalogue::all().filter_map(|entry| match &entry.experiment {
            Experiment::Program(program) => Some(program),
            _ => None,
        })
    }

    fn figure(id: &str) -> &'static Program {
        match catalogue::named(id).map(|entry| &entry.experiment) {
            Some(Experiment::Program(program)) => program,
            other => panic!("{id}: {other:?}"),
        }
    }

    /// The counts that do not depend on the speed of the machine.
    #[test]
    fn waits_commands_and_switches_are_counted() {
        let program = figure("barrier-11b");
        let mut sites = Sites::new(program.drives, true);
        let of = |name: &str| program.contenders.iter().find(|one| one.name == name).unwrap();
        let append = &program.ticks[0];
        let ext4 = run(&mut sites, of("ext4"), append);
        let ordered = run(&mut sites, of("BarrierFS, order only"), append);
        assert_eq!(of("BarrierFS, order only").guarantee_at(append), Guarantee::Ordered);
        // Data, the journal's blocks, and the commit block are waited for. Operations at the edges of the
        // window are counted in part.
        assert!(ext4.serial_waits() > 1.5, "{}", ext4.serial_waits());
        assert!(ext4.of_each(ext4.switches) > 1.0, "{}", ext4.switches);
        assert!(ext4.drive.writes > 0);
        assert!(ext4.queue_depth > 0.0);
        assert!(ordered.serial_waits() < ext4.serial_waits() / 2.0, "{}", ordered.serial_waits());
        assert!(ordered.drive.writes > 0 && ordered.largest_queue_depth > 0);
    }
}

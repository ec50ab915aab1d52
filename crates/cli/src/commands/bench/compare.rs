//! `rio bench compare`: all engines, beside one another and beside the floor.
//!
//! Each run starts targets of its own on drives that all runs share. So all contenders write to the
//! same memory, none runs beside an idle target, and each begins with an empty log.

use std::{collections::BTreeMap, path::PathBuf, sync::Arc, time::Duration};

use riopipe::EngineKind;
use riopipe_lab::{
    compare,
    floor::FloorOptions,
    harness::Window,
    machine::Machine,
    plot,
    report::{Point, RATIOS, Report as Figures},
    retakes::Retakes,
    rounds::Rounds,
    sample::Sample,
    sweep::Sweep,
    terminal::Terminal,
    workload::{Pattern, Shape, Workload},
};
use riopipe_media::Drive;
use riopipe_net::{SocketOptions, SpinPolicy};
use riopipe_order::write_order::DriveOrder;
use serde::Serialize;

use super::{connect, floor, window};
use crate::{
    args::bench::compare::{Compare as Args, Contender},
    failure::{Code, Failure},
    interrupt::Interrupt,
    load::Load,
    output::{Output, Report},
    own_targets::{OwnTargets, Plan, cores, file_log},
    progress::Progress,
};

/// The depths of `--quick`.
const QUICK_DEPTHS: [u32; 3] = [1, 32, 128];
/// Limit for repeated runs with `--quick`, in percent of the planned ones: 43 s become 54 s at
/// worst. With 40 % it could exceed a minute.
const QUICK_RETAKES_PERCENT: u64 = 25;
/// Time of a run outside of its windows: targets start and stop, a volume is created and opened.
const OVERHEAD: Duration = Duration::from_millis(40);

pub(super) fn measure(args: &Args, output: &Output) -> Result<Compared, Failure> {
    let sweep = sweep(args);
    let contenders = contenders(args)?;
    let workloads = sweep.workloads(args.seed);
    for workload in &workloads {
        workload.check().map_err(|error| Failure::new(Code::Usage, error.to_string()))?;
    }
    // Described before the run: afterwards the load includes our own.
    let machine = Machine::this();
    let interrupt = Interrupt::watch(output)?;
    let mut bench = Bench::prepare(args, &interrupt)?;
    for workload in &workloads {
        bench.has_space(workload)?;
    }
    let per_point = |workload: &Workload| taking_part(&contenders, workload);
    let runs: usize = workloads.iter().map(|w| per_point(w).len()).sum::<usize>() * bench.rounds;
    output.note(format!(
        "{} points, {} rounds, {}: about {}",
        workloads.len(),
        bench.rounds,
        contenders.iter().map(|c| c.name()).collect::<Vec<_>>().join(" "),
        about(bench.one_run() * runs as u32)
    ));
    let percent = if args.quick { QUICK_RETAKES_PERCENT } else { Retakes::PERCENT };
    let mut retakes = Retakes::new(runs as u64, percent);
    let progress = Progress::steps(output, "", runs as u64);
    let mut points = Vec::new();
    for workload in &workloads {
        let contenders = per_point(workload);
        let names: Vec<&str> = contenders.iter().map(|contender| contender.name()).collect();
        let samples = Rounds::run(&names, bench.rounds, |index, _| {
            progress.set_message(format!("{workload}: {}", names[index]));
            let (sample, disturbance) = retakes.take(|| {
                interrupt.check()?;
                floor::twice(args.wait, |spin, share| {
                    bench.run(contenders[index], workload, spin, window(bench.time / share))
                })
            })?;
            progress.step();
            Ok(Sample { disturbance, ..sample })
        })?;
        points.push(Point::new(workload, machine.cores, &samples, &RATIOS));
    }
    drop(progress);
    let figures = Figures::new(machine, points);
    let plots = match &args.plot {
        Some(folder) => plot::write(folder, &figures.points, &sweep, &bench.caption(&figures))
            .map_err(|error| Failure::new(Code::Failed, "no plots").because(&error))?,
        None => Vec::new(),
    };
    Ok(Compared {
        figures,
        drive: args.drive.clone(),
        targets: args.targets,
        unit_bytes: args.unit,
        logs: bench.logs,
        wait: args.wait.to_string(),
        link: args.link.model().map(|link| link.to_string()),
        seconds: bench.time.as_secs_f64(),
        rounds: bench.rounds,
        plots,
    })
}

fn sweep(args: &Args) -> Sweep {
    Sweep::new(match args.quick {
        true => [Some(QUICK_DEPTHS.to_vec()), None, None, None],
        false => [args.depth.clone(), args.threads.clone(), args.size.clone(), args.batch.clone()],
    })
}

/// The contenders whose drives keep an order by themselves.
const ORDERED: [(Contender, DriveOrder); 2] =
    [(Contender::Barrier, DriveOrder::Barrier), (Contender::Opimq, DriveOrder::Epochs)];

/// Whether drives with this specification, which may leave the order open, can keep an order.
fn can_keep(drive: &str, order: DriveOrder) -> bool {
    let is_open = !drive.contains(",order=");
    drive.starts_with("ssd:") && (is_open || drive.contains(&format!(",order={order}")))
}

/// The requested contenders, each once, or all that the drive allows.
fn contenders(args: &Args) -> Result<Vec<Contender>, Failure> {
    let in_memory = args.drive.starts_with("mem:");
    if !in_memory && args.engine.contains(&Contender::Floor) {
        let what = format!("the floor needs a drive in memory (mem:…), not {}", args.drive);
        return Err(Failure::new(Code::Usage, what));
    }
    for (contender, order) in ORDERED {
        let can_run = can_keep(&args.drive, order);
        if !can_run && args.engine.contains(&contender) {
            let what = format!("{contender} needs ssd:…,order={order}, not {}", args.drive);
            return Err(Failure::new(Code::Usage, what));
        }
    }
    let all = [
        Contender::Floor,
        Contender::None,
        Contender::Rio,
        Contender::RioDax,
        Contender::RioBlock,
        Contender::RioMerged,
        Contender::Sync,
        Contender::Linux,
        Contender::Horae,
        Contender::Barrier,
        Contender::Opimq,
    ];
    let wanted = |contender: &Contender| match args.engine.is_empty() {
        true => match contender {
            Contender::Floor => in_memory,
            Contender::Barrier | Contender::Opimq => ORDERED
                .iter()
                .any(|(ordered, order)| ordered == contender && can_keep(&args.drive, *order)),
            _ => true,
        },
        false => args.engine.contains(contender),
    };
    Ok(all.into_iter().filter(wanted).collect())
}

/// Those of `contenders` that run at this point, and the denominators that they need.
fn taking_part(contenders: &[Contender], workload: &Workload) -> Vec<Contender> {
    let mut all = contenders.to_vec();
    let pair = [Contender::None, Contender::RioMerged];
    if is_alone(workload) && pair.iter().all(|one| contenders.contains(one)) {
        all.push(Contender::NoneSeq);
    }
    all
}

/// Whether there is nothing to merge.
fn is_alone(workload: &Workload) -> bool {
    matches!(workload.shape, Shape::Uniform { pattern: Pattern::Random, batch: 1, .. })
}

/// The workload of `contender` where the others have `workload`.
fn workload_of(contender: Contender, workload: &Workload) -> Workload {
    let mut own = *workload;
    let sequential = matches!(contender, Contender::RioMerged | Contender::NoneSeq);
    if sequential
        && is_alone(workload)
        && let Shape::Uniform { pattern, .. } = &mut own.shape
    {
        *pattern = Pattern::Sequential;
    }
    own
}

/// A drive of this kind for each target.
fn drives(args: &Args, spec: &str) -> Result<Vec<Arc<dyn Drive>>, Failure> {
    (0..args.targets).map(|_| floor::drive(spec)).collect()
}

/// The state that all runs share.
struct Bench<'a> {
    args: &'a Args,
    interrupt: &'a Interrupt,
    drives: Vec<Arc<dyn Drive>>,
    /// The drives that keep an order, by its name, once a run has needed them.
    ordered_drives: BTreeMap<&'static str, Vec<Arc<dyn Drive>>>,
    time: Duration,
    rounds: usize,
    /// Description of each log, by its contender.
    logs: BTreeMap<&'static str, String>,
}

impl<'a> Bench<'a> {
    fn prepare(args: &'a Args, interrupt: &'a Interrupt) -> Result<Self, Failure> {
        let (seconds, rounds) = if args.quick { (0.2, 4) } else { (0.5, 6) };
        Ok(Self {
            args,
            interrupt,
            drives: drives(args, &args.drive)?,
            ordered_drives: BTreeMap::new(),
            time: args.time.unwrap_or(Duration::from_secs_f64(seconds)),
            rounds: args.rounds.unwrap_or(rounds) as usize,
            logs: BTreeMap::new(),
        })
    }

    /// Checks that all threads fit on the smallest volume of the comparison: the floor's one drive.
    fn has_space(&self, workload: &Workload) -> Result<(), Failure> {
        let blocks = self.drives[0].geometry().blocks;
        (0..workload.threads)
            .try_for_each(|thread| workload.area(thread, blocks).map(drop))
            .map_err(|error| Failure::new(Code::Usage, error.to_string()))
    }

    /// Approximate time of one contender in one round.
    fn one_run(&self) -> Duration {
        let of = |window: Window| window.warm_up + window.duration + OVERHEAD;
        match self.args.wait {
            SpinPolicy::BLOCK => of(window(self.time)),
            _ => of(window(self.time)) + of(window(self.time / 2)),
        }
    }

    fn run(
        &mut self,
        contender: Contender,
        workload: &Workload,
        spin: SpinPolicy,
        window: Window,
    ) -> Result<Sample, Failure> {
        let workload = workload_of(contender, workload);
        let (engine, log, merge) = match contender {
            Contender::Floor => return self.run_floor(workload, spin, window),
            Contender::None | Contender::NoneSeq => (EngineKind::None, self.file_log(), false),
            Contender::Sync => (EngineKind::Sync, self.file_log(), false),
            Contender::Horae => (EngineKind::Horae, self.file_log(), false),
            Contender::Barrier => (EngineKind::Barrier, self.file_log(), false),
            Contender::Linux => (EngineKind::Linux, self.file_log(), false),
            Contender::Opimq => (EngineKind::Opimq, self.file_log(), false),
            Contender::Rio => (EngineKind::Rio, self.file_log(), false),
            Contender::RioMerged => (EngineKind::Rio, self.file_log(), true),
            Contender::RioDax => (EngineKind::Rio, self.log("dax", &self.args.dax_log), false),
            Contender::RioBlock => {
                (EngineKind::Rio, self.log("block", &self.args.block_log), false)
            }
        };
        let (drive, open) = match contender {
            Contender::Barrier => self.ordered_drives(DriveOrder::Barrier)?,
            Contender::Opimq => self.ordered_drives(DriveOrder::Epochs)?,
            _ => (self.args.drive.clone(), self.drives.clone()),
        };
        let own = OwnTargets::start(&Plan {
            volume: "compare",
            targets: self.args.targets,
            log,
            unit_bytes: self.args.unit,
            streams: workload.threads,
            pin: true,
            connect: connect(&self.args.connect, spin)?,
            spin,
            link: self.args.link.model(),
            drive,
            open,
            ..Plan::default()
        })?;
        if engine.capabilities().keeps_log {
            let lines = own.targets()[0].describe();
            let log = lines.iter().find_map(|line| line.strip_prefix("ordering log: "));
            self.logs.entry(contender.name()).or_insert_with(|| log.unwrap_or_default().to_owned());
        }
        let load = Load {
            volume: own.volume().to_owned(),
            members: own.members().to_vec(),
            connect: connect(&self.args.connect, spin)?,
            io_timeout: self.args.connect.io_timeout,
            workload,
            window,
            merge,
            cores: own.writer_cores().to_vec(),
            shares_stream: false,
            moves: false,
        };
        load.run(engine, self.interrupt, || own.cpu_ns())
    }

    /// The drives that keep this order, and their specification. They are opened once.
    fn ordered_drives(
        &mut self,
        order: DriveOrder,
    ) -> Result<(String, Vec<Arc<dyn Drive>>), Failure> {
        let spec = match self.args.drive.contains(",order=") {
            true => return Ok((self.args.drive.clone(), self.drives.clone())),
            false => format!("{},order={order}", self.args.drive),
        };
        let opened = match self.ordered_drives.get(order.name()) {
            Some(opened) => opened.clone(),
            None => drives(self.args, &spec)?,
        };
        self.ordered_drives.insert(order.name(), opened.clone());
        Ok((spec, opened))
    }

    fn run_floor(
        &self,
        workload: Workload,
        spin: SpinPolicy,
        window: Window,
    ) -> Result<Sample, Failure> {
        let (server_cores, writer_cores) = cores();
        let options = FloorOptions {
            workload,
            window,
            writer_cores,
            server_cores,
            spin,
            socket: SocketOptions::default(),
            link: self.args.link.model(),
        };
        floor::once(&options, &self.drives[0])
    }

    fn file_log(&self) -> String {
        file_log(self.args.log_size)
    }

    fn log(&self, kind: &str, given: &Option<String>) -> String {
        given.clone().unwrap_or_else(|| format!("{kind}:{{}},size={}", self.args.log_size))
    }

    fn caption(&self, figures: &Figures) -> String {
        let mut text = format!("{}, {} cores", self.args.drive, figures.machine.cores);
        if let Some(link) = self.args.link.model() {
            text += &format!(", {link}");
        }
        text
    }
}

fn about(time: Duration) -> String {
    match time.as_secs() {
        seconds @ ..100 => format!("{} s", seconds + 1),
        seconds => format!("{} minutes", seconds.div_ceil(60)),
    }
}

/// The results, and the conditions of the measurement.
#[derive(Debug, Serialize)]
pub(super) struct Compared {
    #[serde(flatten)]
    figures: Figures,
    drive: String,
    targets: u32,
    unit_bytes: u32,
    /// By contender.
    logs: BTreeMap<&'static str, String>,
    wait: String,
    #[serde(skip_serializing_if = "Option::is_none")]
    link: Option<String>,
    seconds: f64,
    rounds: usize,
    plots: Vec<PathBuf>,
}

impl Report for Compared {
    fn text(&self, terminal: &Terminal) -> String {
        let mut text = compare::render(&self.figures, terminal);
        text += "\n";
        let targets = if self.targets == 1 { "target" } else { "targets" };
        text += &format!(
            "{} {targets}, drive {}, wait {}, {} rounds of {} s\n",
            self.targets, self.drive, self.wait, self.rounds, self.seconds
        );
        if let Some(link) = &self.link {
            text += &format!("modelled link: {link}\n");
        }
        for (contender, log) in &self.logs {
            text += &format!("log of {contender}: {log}\n");
        }
        for plot in &self.plots {
            text += &format!("plotted: {}\n", plot.display());
        }
        text
    }
}

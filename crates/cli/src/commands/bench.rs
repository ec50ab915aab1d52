//! `rio bench …`

mod compare;
mod floor;
pub(super) mod fs;
mod metrics;
pub(super) mod recovery;
mod replay;
mod stages;
mod wal;

use std::{collections::BTreeMap, time::Duration};

use riopipe::{ConnectOptions, EngineKind, MemberAddr, Volume};
use riopipe_lab::{
    access::Access,
    floor::FloorOptions,
    harness::Window,
    machine::Machine,
    report::{Point, RATIOS, Report as Figures},
    retakes::Retakes,
    rounds::Rounds,
    sample::Sample,
    terminal::Terminal,
    workload::{Pattern as Walk, Shape, Workload},
};
use riopipe_net::{SocketOptions, SpinPolicy};
use riopipe_target::Running;
use serde::Serialize;

use crate::{
    args::{
        bench::{Bench, Pattern, Run, Switch, Writes},
        connect::Connect,
    },
    connect::{connect_options, known_members, members},
    failure::{Code, Failure},
    interrupt::Interrupt,
    load::Load,
    output::{Output, Report},
    own_targets::{OwnTargets, Plan, file_log},
    progress::Progress,
};

/// The name of the raw exchange among the engines.
const FLOOR: &str = "floor";
/// The floor's drive: it needs memory, with any drive of the engines.
const FLOOR_DRIVE: &str = "mem:1G";

pub(super) use floor::{drive as open_drive, twice};

pub(super) fn run(command: Bench, output: &Output) -> Result<(), Failure> {
    match command {
        Bench::Compare(args) => output.result(&compare::measure(&args, output)?),
        Bench::Floor(args) => output.result(&floor::measure(&args, output)?),
        Bench::Run(args) => output.result(&measure(&args, output)?),
        Bench::Recovery(args) => {
            output.result(&recovery::measure(&args, output, &Interrupt::watch(output)?)?)
        }
        Bench::Wal(args) => output.result(&wal::measure(&args, output)?),
        Bench::Fs(args) => output.result(&fs::measure(&args, output, &Interrupt::watch(output)?)?),
    }
}

fn measure(args: &Run, output: &Output) -> Result<Measured, Failure> {
    let workloads = workloads(&args.writes, args.rw)?;
    let engines = without_repeats(&args.engine);
    // Described before the run: afterwards the load includes our own.
    let machine = Machine::this();
    let interrupt = Interrupt::watch(output)?;
    let metrics = args.metrics.as_deref().map(|address| metrics::Metrics::at(address, output));
    let metrics = metrics.transpose()?;
    let place = Place::prepare(args)?;
    let floor_drive = match args.floor {
        true => Some(floor::drive(FLOOR_DRIVE)?),
        false => None,
    };
    let mut contenders: Vec<&str> = engines.iter().map(|engine| engine.name()).collect();
    contenders.extend(floor_drive.is_some().then_some(FLOOR));

    let steps = workloads.len() as u64 * u64::from(args.writes.rounds) * contenders.len() as u64;
    let mut retakes = Retakes::new(steps, Retakes::PERCENT);
    let progress = Progress::steps(output, "", steps);
    let mut points = Vec::new();
    let mut stages = Vec::new();
    for workload in &workloads {
        let load = place.load(args, *workload)?;
        let mut traced = vec![stages::Traced::default(); engines.len()];
        let rounds = Rounds::run(&contenders, args.writes.rounds as usize, |index, _| {
            progress
                .set_message(format!("{} at depth {}", contenders[index], workload.queue_depth));
            let ((sample, seen), disturbance) = retakes.take(|| {
                interrupt.check()?;
                match (engines.get(index), &floor_drive) {
                    (Some(engine), _) => {
                        let before = stages::Seen::by(place.targets());
                        let opened = |volume: &Volume| {
                            if let Some(metrics) = &metrics {
                                metrics.serve_volume(volume);
                            }
                        };
                        let target_cpu_ns = || place.target_cpu_ns();
                        let (sample, volume) =
                            load.run_traced(*engine, &interrupt, target_cpu_ns, opened)?;
                        let seen = stages::Traced::of(&volume, &before, place.targets());
                        Ok((sample, Some(seen)))
                    }
                    (None, Some(drive)) => {
                        let options = FloorOptions {
                            workload: *workload,
                            window: load.window,
                            writer_cores: load.cores.clone(),
                            server_cores: place.server_cores(),
                            spin: args.wait,
                            socket: SocketOptions::default(),
                            link: args.link.model(),
                        };
                        floor::once(&options, drive).map(|sample| (sample, None))
                    }
                    (None, None) => Err(Failure::new(Code::Failed, "no such contender")),
                }
            })?;
            // Only of the kept run.
            if let Some(seen) = seen {
                traced[index].add(seen);
            }
            progress.step();
            Ok(Sample { disturbance, ..sample })
        })?;
        points.push(Point::new(workload, machine.cores, &rounds, &RATIOS));
        if args.stages {
            let named = engines.iter().zip(traced);
            stages.extend(named.map(|(e, t)| t.view(e.name(), workload.queue_depth)));
        }
    }
    drop(progress);
    Ok(Measured {
        figures: Figures::new(machine, points),
        merge: args.merge == Switch::On,
        seconds: args.writes.time.as_secs_f64(),
        rounds: args.writes.rounds,
        place: place.describe(args),
        stages,
    })
}

/// The warm-up precedes the measured time: connections, caches and congestion windows reach their
/// steady state.
pub(super) fn window(duration: Duration) -> Window {
    Window { warm_up: (duration / 5).min(Duration::from_millis(500)), duration }
}

fn workloads(args: &Writes, access: Access) -> Result<Vec<Workload>, Failure> {
    let shape = match args.pattern {
        Pattern::Journal => Shape::Journal,
        Pattern::Rand | Pattern::Seq => Shape::Uniform {
            pattern: if args.pattern == Pattern::Seq { Walk::Sequential } else { Walk::Random },
            size: args.size,
            batch: args.batch,
            group: args.group,
        },
    };
    let of_depth = |queue_depth: &u32| {
        let (threads, seed) = (args.threads, args.seed);
        let workload = Workload { shape, access, queue_depth: *queue_depth, threads, seed };
        workload.check().map_err(|error| Failure::new(Code::Usage, error.to_string()))?;
        Ok(workload)
    };
    args.depth.iter().map(of_depth).collect()
}

fn without_repeats(engines: &[EngineKind]) -> Vec<EngineKind> {
    let mut once: Vec<EngineKind> = Vec::new();
    for engine in engines {
        if !once.contains(engine) {
            once.push(*engine);
        }
    }
    once
}

/// The options of the command line, with this way to wait.
fn connect(args: &Connect, wait: SpinPolicy) -> Result<ConnectOptions, Failure> {
    Ok(waiting(connect_options(args)?, wait))
}

/// The options, with this way to wait.
pub(super) fn waiting(options: ConnectOptions, wait: SpinPolicy) -> ConnectOptions {
    ConnectOptions { spin: Duration::from_nanos(wait.spin_ns), ..options }
}

/// The volume under test.
enum Place {
    Own(OwnTargets),
    Existing { volume: String, members: Vec<MemberAddr>, connect: ConnectOptions },
}

impl Place {
    fn prepare(args: &Run) -> Result<Self, Failure> {
        if let Some(volume) = &args.volume {
            let (members, options) = match args.members.is_empty() {
                true => known_members(volume, None, &args.connect)?,
                false => (members(&args.members)?, connect_options(&args.connect)?),
            };
            let connect = waiting(options, args.wait);
            return Ok(Self::Existing { volume: volume.clone(), members, connect });
        }
        OwnTargets::start(&Plan {
            volume: "bench",
            targets: args.targets,
            drives: 1,
            drive: args.drive.clone(),
            log: args.log.clone().unwrap_or_else(|| file_log(args.log_size)),
            unit_bytes: args.unit,
            streams: args.writes.threads,
            pin: true,
            connect: connect(&args.connect, args.wait)?,
            spin: args.wait,
            link: args.link.model(),
            ..Plan::default()
        })
        .map(Self::Own)
    }

    fn load(&self, args: &Run, workload: Workload) -> Result<Load, Failure> {
        let (volume, members, connect, cores) = match self {
            Self::Own(own) => {
                let connect = connect(&args.connect, args.wait)?;
                (own.volume(), own.members(), connect, own.writer_cores())
            }
            Self::Existing { volume, members, connect } => {
                (volume.as_str(), members.as_slice(), connect.clone(), &[][..])
            }
        };
        Ok(Load {
            volume: volume.to_owned(),
            members: members.to_vec(),
            connect,
            io_timeout: args.connect.io_timeout,
            workload,
            window: window(args.writes.time),
            merge: args.merge == Switch::On,
            cores: cores.to_vec(),
            shares_stream: false,
            moves: false,
        })
    }

    fn target_cpu_ns(&self) -> Option<u64> {
        match self {
            Self::Own(own) => own.cpu_ns(),
            Self::Existing { .. } => None,
        }
    }

    /// The targets whose counters can be read.
    fn targets(&self) -> &[Running] {
        match self {
            Self::Own(own) => own.targets(),
            Self::Existing { .. } => &[],
        }
    }

    fn server_cores(&self) -> Vec<usize> {
        match self {
            Self::Own(own) => own.server_cores().to_vec(),
            Self::Existing { .. } => Vec::new(),
        }
    }

    fn describe(&self, args: &Run) -> BTreeMap<&'static str, serde_json::Value> {
        let mut place = BTreeMap::new();
        match self {
            Self::Own(_) => {
                place.insert("drive", args.drive.clone().into());
                place.insert("targets", args.targets.into());
                match &args.log {
                    Some(log) => place.insert("log", log.clone().into()),
                    None => place.insert("log_bytes", args.log_size.into()),
                };
                place.insert("unit_bytes", args.unit.into());
                place.insert("wait", args.wait.to_string().into());
                if let Some(link) = args.link.model() {
                    place.insert("link", link.to_string().into());
                }
            }
            Self::Existing { volume, members, .. } => {
                let members: Vec<_> = members.iter().map(ToString::to_string).collect();
                place.insert("volume", volume.clone().into());
                place.insert("members", members.into());
            }
        }
        place
    }
}

/// The results, and the conditions of the measurement.
#[derive(Debug, Serialize)]
struct Measured {
    #[serde(flatten)]
    figures: Figures,
    merge: bool,
    seconds: f64,
    rounds: u32,
    place: BTreeMap<&'static str, serde_json::Value>,
    /// With `--stages` only.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    stages: Vec<stages::View>,
}

impl Report for Measured {
    fn text(&self, terminal: &Terminal) -> String {
        let place: Vec<String> =
            self.place.iter().map(|(name, value)| format!("{name} {}", plain(value))).collect();
        let merge = if self.merge { "on" } else { "off" };
        let stages: String = self.stages.iter().map(|view| view.text(terminal)).collect();
        format!(
            "{}\n{}, merge {merge}, {} rounds of {} s\n{stages}",
            self.figures.render(terminal).trim_end_matches('\n'),
            place.join(", "),
            self.rounds,
            self.seconds,
        )
    }
}

fn plain(value: &serde_json::Value) -> String {
    value.as_str().map_or_else(|| value.to_string(), str::to_owned)
}

#[cfg(test)]
mod tests {
    use clap::Parser;

    use super::*;
    use crate::args::{Cli, Command};

    fn args(words: &str) -> Run {
        let cli = Cli::try_parse_from(["rio", "bench", "run"].into_iter().chain(words.split(' ')));
        match cli.unwrap().command {
            Command::Bench(Bench::Run(run)) => *run,
            other => panic!("{other:?}"),
        }
    }

    #[test]
    fn options_become_workloads() {
        let words = "--depth 2,32 --pattern seq --size 8K --batch 4 --group 2 --threads 3";
        let all = workloads(&args(words).writes, Access::Write).unwrap();
        assert_eq!(all.iter().map(|w| w.queue_depth).collect::<Vec<_>>(), [2, 32]);
        assert_eq!(
            all[1].to_string(),
            "seq 8 KiB, batches of 4, groups of 2, queue depth 32, 3 threads"
        );
        assert_eq!(
            workloads(&args("--pattern journal").writes, Access::Write).unwrap()[0].shape,
            Shape::Journal
        );
    }

    #[test]
    fn an_invalid_workload_is_a_usage_error_with_a_remedy() {
        for (words, part) in
            [("--depth 1 --group 2", "raise it to 2"), ("--group 3 --batch 2", "multiple")]
        {
            let failure = workloads(&args(words).writes, Access::Write).unwrap_err();
            assert_eq!(failure.code, Code::Usage);
            assert!(failure.message.contains(part), "{failure}");
        }
    }

    #[test]
    fn reads_are_part_of_the_workload() {
        let run = args("--rw mixed:70 --size 4M");
        let text = workloads(&run.writes, run.rw).unwrap()[0].to_string();
        assert_eq!(text, "mixed:70, rand 4096 KiB, queue depth 32, 1 thread");
        let refused = |words: &str| {
            Cli::try_parse_from(["rio", "bench", "run"].into_iter().chain(words.split(' ')))
                .unwrap_err()
                .to_string()
        };
        assert!(refused("--rw both").contains("mixed:70"));
        assert!(refused("--size 8M").contains("more than 4M"));
        assert!(refused("--rw read --floor").contains("--floor"));
    }

    #[test]
    fn an_engine_named_twice_runs_once() {
        let engines = without_repeats(&args("--engine rio,none,rio").engine);
        assert_eq!(engines, [EngineKind::Rio, EngineKind::None]);
    }
}

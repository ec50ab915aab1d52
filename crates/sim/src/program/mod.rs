//! The command line: its options, and the result of a command.

mod duration;
mod output;
mod report;

use std::{
    collections::hash_map::RandomState,
    hash::BuildHasher,
    io::IsTerminal,
    path::PathBuf,
    process::ExitCode,
    sync::{
        Arc,
        atomic::{AtomicBool, AtomicU64, Ordering},
    },
    time::{Duration, Instant},
};

use clap::{Parser, ValueEnum};
use riopipe_sim::{
    attempt::{Bounded, Fault, RUN_LIMIT},
    core::Trace,
    draw::{
        draw, draw_device, draw_file_system, draw_file_system_on_barrier,
        draw_file_system_on_horae, draw_file_system_on_opimq, draw_with,
    },
    runner::{
        PLANT_SEEDS, Plan, PlantResult, PlantedBug, RARE_SEEDS, User, explain, run_seeds, try_plant,
    },
    scenario::{Engine, Scenario},
};
use signal_hook::{
    consts::{SIGINT, SIGTERM},
    flag,
};

/// Every seed was clean, or every plant was caught.
const CLEAN: u8 = 0;
/// A file could not be read.
const FAILED: u8 = 1;
/// A promise was broken, or a run did not end.
const BROKEN: u8 = 20;
/// The code under test panicked.
const PANICKED: u8 = 21;
/// A planted bug was not caught.
const UNCAUGHT: u8 = 22;
/// A rare path was never taken.
const NEVER: u8 = 23;
/// Ctrl-C or SIGTERM ended it early.
const INTERRUPTED: u8 = 130;
/// The limit of a drawn first seed. Every reader of JSON can represent a smaller number exactly.
const FIRST_MAX: u64 = 1 << 48;

/// Runs a whole cluster from a seed, crashes it, and checks every promise
#[derive(Debug, Parser)]
#[command(
    name = "rio sim",
    bin_name = "rio sim",
    version,
    after_help = "\
Targets, drives, network and initiators run in one thread. The sessions, engines and logs are those of `rio`
itself. A seed decides the topology, the writes, and the faults: crashes of any part at any moment and again
during recovery, power cuts, torn log words, late writes, lost connections, failing writes and FLUSHes, full
disks, an owner that resumes. An oracle without knowledge of logs compares the drives with the promises (P1 to
P9, docs/ordering-contract.md). First everything may fail. Then faults stop, and all that was submitted must end.

A run is bounded in events and in time. A run that does not end is a failure, too.

With --fs a file system (RioFS) and a random program use the volume. The program's model judges what each mount
finds after a crash. --plant removes defences of the file system then.

With --device the volume is a plain block device, as rio volume attach serves it, and a random host writes, reads,
flushes and discards. The host's model judges what each attachment finds after a crash. --plant removes defences of
the device then.

The first seed is drawn unless --first names it: new seeds find failures that known seeds do not. With --plant
the defence of a trap is removed first, and the oracle must report a broken promise. These runs begin with
seed 1, so that the result is the same everywhere.

Exit codes: 0 clean (with --plant: all caught), 1 a file can't be read, 2 usage, 20 a promise was broken or
a run did not end, 21 the code panicked, 22 a planted bug was not caught, 23 a rare path was never taken, 130 ended by
Ctrl-C or SIGTERM with all seeds clean so far, 141 standard output has no reader. After the first Ctrl-C the running
seeds end, and the count is printed. The second Ctrl-C ends the program at once.

Examples:
  rio sim --for 10m
  rio sim --first 1 --seeds 5000
  rio sim --seed 4711 --trace
  rio sim --plant all
  rio sim --plant T7 -o json | jq .plants
  rio sim --fs --for 10m
  rio sim --device --for 10m"
)]
struct Args {
    /// Run RioFS on the simulated volume. A seed draws another cluster, faults and a program
    #[arg(long)]
    fs: bool,
    /// Run a plain block device on the simulated volume. A seed draws another cluster, faults and a host
    #[arg(long, conflicts_with_all = ["fs", "engine"])]
    device: bool,
    /// Run only scenarios with this engine: rio, sync, linux, horae, barrier, opimq or none; with --fs only horae,
    /// barrier or opimq
    #[arg(long, value_name = "ENGINE", value_parser = engine, conflicts_with = "plant")]
    engine: Option<Engine>,
    /// The number of seeds to run [default: 1000; with --for: no limit; with --plant: 3000 for
    /// each]
    #[arg(long, value_name = "COUNT")]
    seeds: Option<u64>,
    /// The first seed [default: drawn, and printed; with --plant 1]
    #[arg(long, value_name = "SEED")]
    first: Option<u64>,
    /// Run seeds for this time: 90s, 10m, 2h
    #[arg(long = "for", value_name = "DURATION", value_parser = duration::parse)]
    time: Option<Duration>,
    /// Run this seed alone; if it fails, make it small and print its trace
    #[arg(long, value_name = "SEED", conflicts_with_all = ["seeds", "first", "time", "plant", "scenario"])]
    seed: Option<u64>,
    /// With --seed: print its scenario, for --scenario, and run nothing
    #[arg(long, requires = "seed")]
    draw: bool,
    /// Run the scenario in this file, as a failure prints it
    #[arg(long, value_name = "FILE", conflicts_with_all = ["seeds", "first", "time", "plant"])]
    scenario: Option<PathBuf>,
    /// With --seed or --scenario: print the trace of all events
    #[arg(long)]
    trace: bool,
    /// Remove a defence. NAME is a planted bug, a trap (trap T7) with all its planted bugs, or all;
    /// --plant help lists them
    #[arg(long, value_name = "NAME")]
    plant: Option<String>,
    /// Threads [default: one per core]
    #[arg(long, value_name = "COUNT")]
    jobs: Option<usize>,
    /// A run that takes longer than this has failed [default: 60s]
    #[arg(long, value_name = "DURATION", value_parser = duration::parse)]
    run_limit: Option<Duration>,
    /// The format of the result
    #[arg(short, long, value_enum, default_value = "normal", value_name = "FORMAT")]
    output: Format,
    /// Print no progress
    #[arg(long)]
    quiet: bool,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
enum Format {
    /// Text
    Normal,
    /// JSON
    Json,
}

/// The engine of this name.
fn engine(name: &str) -> Result<Engine, String> {
    let all = [
        Engine::Rio,
        Engine::Sync,
        Engine::Linux,
        Engine::Horae,
        Engine::Barrier,
        Engine::Opimq,
        Engine::None,
    ];
    let found = all.into_iter().find(|engine| engine.kind().name() == name);
    found.ok_or_else(|| {
        "the engines are rio, sync, linux, horae, barrier, opimq and none".to_owned()
    })
}

pub(crate) fn main() -> ExitCode {
    let args = Args::parse();
    let is_of_file_systems =
        |engine| matches!(engine, Engine::Horae | Engine::Barrier | Engine::Opimq);
    if args.fs && args.engine.is_some_and(|engine| !is_of_file_systems(engine)) {
        let text = "with --fs the engines to choose are horae, barrier and opimq";
        return ExitCode::from(fail(text));
    }
    ExitCode::from(match (&args.plant, args.seed, &args.scenario) {
        (Some(name), _, _) => plants(&args, name),
        (None, Some(seed), _) if args.draw => {
            output::line(format_args!("{}", args.draw(seed).to_text()));
            CLEAN
        }
        (None, Some(seed), _) => one(&args, &args.draw(seed), &args.name_of(seed)),
        (None, None, Some(path)) => {
            match std::fs::read_to_string(path).map_err(|e| e.to_string()) {
                Err(error) => fail(&format!("{}: {error}", path.display())),
                Ok(text) => match Scenario::from_text(&text) {
                    Err(error) => fail(&format!("{}: {error}", path.display())),
                    Ok(scenario) => one(&args, &scenario, &path.display().to_string()),
                },
            }
        }
        (None, None, None) => many(&args),
    })
}

fn fail(what: &str) -> u8 {
    output::note(format_args!("rio sim: {what}\n"));
    FAILED
}

impl Args {
    fn draw(&self, seed: u64) -> Scenario {
        self.kind()(seed)
    }

    /// The seed, as in the options that run it.
    fn name_of(&self, seed: u64) -> String {
        format!("seed {seed} {}", self.options()).trim_end().to_owned()
    }

    /// How the scenario of a seed is drawn.
    fn kind(&self) -> fn(u64) -> Scenario {
        if self.device {
            return draw_device;
        }
        match (self.fs, self.engine) {
            (true, None) => draw_file_system,
            (true, Some(Engine::Barrier)) => draw_file_system_on_barrier,
            (true, Some(Engine::Opimq)) => draw_file_system_on_opimq,
            (true, Some(_)) => draw_file_system_on_horae,
            (false, None) => draw,
            (false, Some(engine)) => draw_with(engine),
        }
    }

    /// The options that choose the kind of scenario, with a space behind each.
    fn options(&self) -> &'static str {
        if self.device {
            return "--device ";
        }
        match (self.fs, self.engine) {
            (true, None) => "--fs ",
            (true, Some(Engine::Barrier)) => "--fs --engine barrier ",
            (true, Some(Engine::Opimq)) => "--fs --engine opimq ",
            (true, Some(_)) => "--fs --engine horae ",
            (false, None) => "",
            (false, Some(Engine::Rio)) => "--engine rio ",
            (false, Some(Engine::Sync)) => "--engine sync ",
            (false, Some(Engine::Linux)) => "--engine linux ",
            (false, Some(Engine::Horae)) => "--engine horae ",
            (false, Some(Engine::Barrier)) => "--engine barrier ",
            (false, Some(Engine::Opimq)) => "--engine opimq ",
            (false, Some(Engine::None)) => "--engine none ",
        }
    }

    /// The seeds to run. Without options: this number of seeds, from this one on.
    fn plan(&self, seeds: u64, first: u64) -> Plan {
        let cores = std::thread::available_parallelism().map_or(1, usize::from);
        Plan {
            first: self.first.unwrap_or(first),
            seeds: self.seeds.unwrap_or(seeds),
            jobs: self.jobs.unwrap_or(cores),
            time: self.time,
            run_limit: self.run_limit(),
            stop: interrupt(),
            draw: self.kind(),
            options: self.options(),
        }
    }

    fn run_limit(&self) -> Duration {
        self.run_limit.unwrap_or(RUN_LIMIT)
    }

    fn shows_progress(&self) -> bool {
        !self.quiet && std::io::stderr().is_terminal()
    }
}

/// A flag that Ctrl-C and SIGTERM set; a second signal ends the process at once.
fn interrupt() -> Arc<AtomicBool> {
    let stop = Arc::new(AtomicBool::new(false));
    for signal in [SIGINT, SIGTERM] {
        let watched =
            flag::register_conditional_shutdown(signal, INTERRUPTED.into(), Arc::clone(&stop))
                .and_then(|_| flag::register(signal, Arc::clone(&stop)));
        if let Err(error) = watched {
            output::note(format_args!(
                "rio sim: Ctrl-C will end the run without a count: {error}\n"
            ));
        }
    }
    stop
}

/// Prints the progress from time to time.
struct Ticker<'a> {
    what: &'a str,
    of: u64,
    shown: bool,
    begun: Instant,
    last: AtomicU64,
}

impl<'a> Ticker<'a> {
    fn new(args: &Args, what: &'a str, of: u64) -> Self {
        let shown = args.shows_progress();
        Self { what, of, shown, begun: Instant::now(), last: AtomicU64::new(0) }
    }

    fn show(&self, done: u64) {
        let now = self.begun.elapsed().as_millis() as u64 / 250;
        if self.shown && self.last.swap(now, Ordering::Relaxed) != now {
            let total =
                if self.of == u64::MAX { String::new() } else { format!(" of {}", self.of) };
            output::note(format_args!("\r\x1b[K{}{done}{total} seeds", self.what));
        }
    }
}

impl Drop for Ticker<'_> {
    fn drop(&mut self) {
        if self.shown {
            output::note(format_args!("\r\x1b[K"));
        }
    }
}

/// A random seed, which probably was never run before.
fn any_seed() -> u64 {
    // The keys of a new hasher come from the system.
    RandomState::new().hash_one(std::process::id()) % FIRST_MAX
}

fn many(args: &Args) -> u8 {
    let plan = args.plan(if args.time.is_some() { u64::MAX } else { 1000 }, any_seed());
    if args.output == Format::Normal {
        // Printed at once, so that it is visible if the run or its machine stops.
        output::line(format_args!("the first seed is {}", plan.first));
    }
    let ticker = Ticker::new(args, "", plan.seeds);
    let summary = run_seeds(&plan, &|done| ticker.show(done));
    drop(ticker);
    // The rare paths are those of the cluster's own scenarios.
    let enough = summary.seeds >= RARE_SEEDS && !args.fs && !args.device && args.engine.is_none();
    match args.output {
        Format::Json => report::json(&summary, &plan),
        Format::Normal => report::text(&summary, &plan, enough),
    }
    let panicked = |fault: &Fault| matches!(fault, Fault::Panicked(_));
    let worst = summary.failures.iter().find(|failure| !panicked(&failure.fault));
    if let Some(failure) = worst.or(summary.failures.first()) {
        if args.output == Format::Normal {
            let name = args.name_of(failure.seed);
            report_failure(args, &args.draw(failure.seed), &failure.fault, &name);
        }
        return if panicked(&failure.fault) { PANICKED } else { BROKEN };
    }
    if enough && !summary.never_taken().is_empty() {
        return NEVER;
    }
    if plan.stop.load(Ordering::Relaxed) { INTERRUPTED } else { CLEAN }
}

/// Makes a failure small and prints it.
fn report_failure(args: &Args, scenario: &Scenario, fault: &Fault, name: &str) {
    output::note(format_args!("making {name} small …\n"));
    match explain(scenario, fault, args.run_limit()) {
        Some(small) => report::explained(&small, name),
        None => output::note(format_args!("{name} did not fail again\n")),
    }
}

fn one(args: &Args, scenario: &Scenario, name: &str) -> u8 {
    let trace = Trace::default();
    let mut bounded = Bounded::new(args.run_limit());
    let (outcome, fault) = bounded.run(scenario, args.trace.then_some(&trace));
    for line in trace.take() {
        output::line(format_args!("{line}"));
    }
    let Some(fault) = fault else {
        output::line(format_args!(
            "{name}: clean; {} events, {} crashes, {} recoveries",
            outcome.events, outcome.crashes, outcome.recoveries
        ));
        return CLEAN;
    };
    output::line(format_args!("{name}: {fault}"));
    if !args.trace {
        report_failure(args, scenario, &fault, name);
    }
    if matches!(fault, Fault::Panicked(_)) { PANICKED } else { BROKEN }
}

fn plants(args: &Args, name: &str) -> u8 {
    let known = PlantedBug::all(match (args.fs, args.device) {
        (true, _) => User::FileSystem,
        (_, true) => User::Device,
        _ => User::Steps,
    });
    let is_chosen = |plant: &PlantedBug| {
        let own = plant.name();
        name == "all" || name == own || Some(name) == own.split('-').next()
    };
    let chosen: Vec<PlantedBug> = known.iter().copied().filter(is_chosen).collect();
    if chosen.is_empty() {
        let known: Vec<String> = known.into_iter().map(PlantedBug::name).collect();
        output::note(format_args!(
            "rio sim: no planted bug {name:?}; there are all, and {}\n",
            known.join(", ")
        ));
        return 2;
    }
    let plan = args.plan(PLANT_SEEDS, 1);
    let mut results: Vec<PlantResult> = Vec::new();
    for plant in chosen {
        let what = format!("{}: ", plant.name());
        let ticker = Ticker::new(args, &what, plan.seeds);
        let result = try_plant(plant, &plan, &|done| ticker.show(done));
        drop(ticker);
        if args.output == Format::Normal {
            report::plant_result(&result);
        }
        results.push(result);
        if plan.stop.load(Ordering::Relaxed) {
            break;
        }
    }
    if args.output == Format::Json {
        report::plants(&results, &plan);
    }
    if plan.stop.load(Ordering::Relaxed) {
        return INTERRUPTED;
    }
    if results.iter().all(|result| result.caught_after.is_some()) { CLEAN } else { UNCAUGHT }
}

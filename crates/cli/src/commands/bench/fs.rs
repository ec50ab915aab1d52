//! `rio bench fs`: loads of programs on RioFS, in the modes of RioFS in turns.

pub(in crate::commands) mod calls;
mod contender;
pub(in crate::commands) mod cpu;
mod db_bench;
mod floor;
pub(in crate::commands) mod fresh;
mod kernel;
mod mounted;
mod plots;
mod report;

use std::time::Duration;

use riopipe_lab::{
    fs_load::FsLoad, link::LinkModel, machine::Machine, retakes::Retakes, rounds::Rounds, units,
};

use self::{
    contender::{Contender, Place},
    report::{Measured, Point},
};
use super::window;
use crate::{
    args::bench::fs::{Fs as Args, Through, Workload},
    connect::connect_options,
    failure::{Code, Failure},
    interrupt::Interrupt,
    output::Output,
    own_targets::{OwnTargets, Plan, file_log},
    progress::Progress,
};

/// The numbers of threads without `--threads`, and with `--quick`.
const THREADS: [u32; 4] = [1, 2, 4, 8];
const THREADS_QUICK: [u32; 2] = [1, 2];
/// The round trips without `--rtt`, and with `--quick`, ns.
const RTTS: [u64; 3] = [0, 30_000, 100_000];
const RTTS_QUICK: [u64; 2] = [0, 100_000];
/// The streams of the volume: the main stream, and one for each thread's data, within limits. A
/// journal has space for the areas of some.
const STREAMS_MIN: u32 = 5;
const STREAMS_MAX: u32 = 17;
/// Limit for repeated runs with `--quick`, in percent of the planned ones.
const QUICK_RETAKES_PERCENT: u64 = 20;

/// The points to be measured.
struct Plans {
    workloads: Vec<Workload>,
    threads: Vec<u32>,
    rtts_ns: Vec<u64>,
    streams: u32,
    time: Duration,
    rounds: u32,
}

impl Plans {
    fn new(args: &Args) -> Self {
        let list = |given: &Option<Vec<u32>>, quick: &[u32], full: &[u32]| match given {
            Some(given) => given.clone(),
            None if args.quick => quick.to_vec(),
            None => full.to_vec(),
        };
        let threads = list(&args.threads, &THREADS_QUICK, &THREADS);
        let rtts_ns = match &args.rtt {
            Some(given) => given.clone(),
            None if args.quick => RTTS_QUICK.to_vec(),
            None => RTTS.to_vec(),
        };
        let most = threads.iter().copied().max().unwrap_or(1);
        let (seconds, rounds) = if args.quick { (0.3, 3) } else { (1.0, 6) };
        Self {
            workloads: args.workload.clone().unwrap_or_else(|| Workload::ALL.to_vec()),
            threads,
            rtts_ns,
            streams: (most + 1).clamp(STREAMS_MIN, STREAMS_MAX),
            time: args.time.unwrap_or(Duration::from_secs_f64(seconds)),
            rounds: args.rounds.unwrap_or(rounds),
        }
    }

    /// The loads at one round trip. With `--quick` the applications are measured at the longest one
    /// and with the most threads only, unless they are asked for.
    fn loads(&self, args: &Args, rtt_ns: u64) -> Vec<(Workload, u32)> {
        let mut loads = Vec::new();
        for &workload in &self.workloads {
            let is_brief =
                args.quick && args.workload.is_none() && workload != Workload::AppendFsync;
            for &threads in &self.threads {
                let is_last =
                    self.rtts_ns.last() == Some(&rtt_ns) && self.threads.last() == Some(&threads);
                if !is_brief || is_last {
                    loads.push((workload, threads));
                }
            }
        }
        loads
    }

    /// The contenders at a point, by their names.
    fn contenders(
        &self,
        profile: &str,
        rtt_ns: u64,
        load: (Workload, u32),
        has_kernel: bool,
    ) -> Vec<Contender> {
        let (workload, threads) = load;
        let mut all = vec![Contender::Ext4, Contender::Horae, Contender::Rio];
        if is_modelled(profile) {
            all.extend([Contender::Barrier, Contender::Opimq]);
        }
        if workload == Workload::AppendFsync && threads < self.streams {
            all.push(Contender::Floor);
        }
        if has_kernel && profile == "mem" && rtt_ns == 0 {
            all.push(Contender::KernelExt4);
        }
        all
    }
}

pub(in crate::commands) fn measure(
    args: &Args,
    output: &Output,
    interrupt: &Interrupt,
) -> Result<Measured, Failure> {
    let machine = Machine::this();
    let plans = Plans::new(args);
    let kernel_left_out = match args.kernel {
        false => None,
        true => kernel::KernelExt4::mount()
            .and_then(|kernel| kernel.unmount().map_err(|error| error.to_string()))
            .err(),
    };
    if let Some(reason) = &kernel_left_out {
        output.note(format!("note: without the kernel's ext4: {reason}"));
    }
    let has_kernel = args.kernel && kernel_left_out.is_none();
    let db_bench = match args.through {
        Through::Mount => db_bench::find(),
        Through::Calls => None,
    };

    let mut steps = Vec::new();
    for profile in &args.profile {
        for &rtt_ns in &plans.rtts_ns {
            for load in plans.loads(args, rtt_ns) {
                let contenders = plans.contenders(profile, rtt_ns, load, has_kernel);
                steps.push((profile, rtt_ns, load, contenders));
            }
        }
    }
    let contenders: usize = steps.iter().map(|(.., contenders)| contenders.len()).sum();
    let runs = contenders as u64 * u64::from(plans.rounds);
    let percent = if args.quick { QUICK_RETAKES_PERCENT } else { Retakes::PERCENT };
    let mut retakes = Retakes::new(runs, percent);
    let progress = Progress::steps(output, "", runs);
    let mut points = Vec::new();
    let mut place: Option<(&String, u64, Place)> = None;
    for (profile, rtt_ns, (workload, threads), contenders) in steps {
        let is_same = |(of, at, _): &(&String, u64, Place)| *of == profile && *at == rtt_ns;
        if !place.as_ref().is_some_and(is_same) {
            // The old targets stop before new ones start.
            drop(place.take());
            place = Some((profile, rtt_ns, start(profile, rtt_ns, &plans, args, &db_bench)?));
        }
        let Some((_, _, place)) = &place else { continue };
        let load = FsLoad { threads, window: window(plans.time) };
        let names: Vec<&str> = contenders.iter().map(|contender| contender.name()).collect();
        let mut set_aside = 0;
        let rounds = Rounds::run(&names, plans.rounds as usize, |index, _| {
            let rtt = units::time(rtt_ns as f64);
            progress.set_message(format!(
                "{}, {profile}, {rtt}, {threads} threads, {}",
                workload.name(),
                names[index]
            ));
            let (run, disturbance) = retakes.take(|| {
                interrupt.check()?;
                place.run(contenders[index], workload, &load)
            })?;
            set_aside += disturbance.set_aside;
            progress.step();
            Ok::<_, Failure>(run)
        })?;
        let is_by_db_bench = workload == Workload::RocksdbFillsync && db_bench.is_some();
        let by = if is_by_db_bench { "db_bench" } else { "rio" };
        points.push(Point::new(workload, by, profile, rtt_ns, threads, &rounds, set_aside));
    }
    drop((progress, place));
    let mut measured = Measured::new(machine, args.through, &plans, points);
    measured.kernel_left_out = kernel_left_out;
    if let Some(folder) = &args.plot {
        let plots = plots::write(folder, &measured);
        measured.plots =
            plots.map_err(|error| Failure::new(Code::Failed, "no plots").because(&error))?;
    }
    Ok(measured)
}

/// A target with one drive, and what runs on it.
fn start(
    profile: &str,
    rtt_ns: u64,
    plans: &Plans,
    args: &Args,
    db_bench: &Option<std::path::PathBuf>,
) -> Result<Place, Failure> {
    let link = LinkModel { rtt_ns, jitter_ns: 0, bits_per_s: 0 };
    let connect = connect_options(&args.connect)?;
    let on = |drive: String| {
        OwnTargets::start(&Plan {
            volume: "fs",
            drive,
            log: file_log(8 << 20),
            streams: plans.streams,
            connect: connect.clone(),
            link: (!link.is_nothing()).then_some(link),
            ..Plan::default()
        })
    };
    let modelled = format!("ssd:{profile},size=1G");
    let (plain, barrier, epochs) = match is_modelled(profile) {
        true => {
            let ordered = |order| on(format!("{modelled},order={order}")).map(Some);
            (on(modelled.clone())?, ordered("barrier")?, ordered("op")?)
        }
        false => (on("mem:1G".to_owned())?, None, None),
    };
    let (through, db_bench) = (args.through, db_bench.clone());
    Ok(Place { plain, barrier, epochs, connect: connect.clone(), through, db_bench })
}

/// Whether the drive of this profile is a modelled SSD.
fn is_modelled(profile: &str) -> bool {
    profile != "mem"
}

#[cfg(test)]
mod tests {
    use clap::Parser;

    use super::*;
    use crate::args::{Cli, Command, bench::Bench};

    fn args(words: &str) -> Args {
        let words = ["rio", "bench", "fs"].into_iter().chain(words.split_whitespace());
        match Cli::try_parse_from(words).unwrap().command {
            Command::Bench(Bench::Fs(fs)) => *fs,
            other => panic!("{other:?}"),
        }
    }

    #[test]
    fn a_full_run_has_each_load_at_each_point() {
        let args = args("");
        let plans = Plans::new(&args);
        assert_eq!(plans.loads(&args, 30_000).len(), 3 * 4);
        assert_eq!((plans.streams, plans.rounds), (9, 6));
    }

    #[test]
    fn a_quick_run_has_the_applications_once_for_each_drive() {
        let quick = args("--quick");
        let plans = Plans::new(&quick);
        let append = Workload::AppendFsync;
        assert_eq!(plans.loads(&quick, 0), [(append, 1), (append, 2)]);
        let at_last = plans.loads(&quick, 100_000);
        assert_eq!(at_last.len(), 4);
        assert!(at_last.contains(&(Workload::Varmail, 2)));
        // What is asked for is measured everywhere.
        let asked = args("--quick --workload varmail --threads 3");
        let plans = Plans::new(&asked);
        assert_eq!(plans.loads(&asked, 0), [(Workload::Varmail, 3)]);
    }

    #[test]
    fn floor_and_kernel_take_part_where_they_can_be_compared() {
        let args = args("--threads 1,40");
        let plans = Plans::new(&args);
        let of = |profile, rtt, load| plans.contenders(profile, rtt, load, true);
        let modes = [
            Contender::Ext4,
            Contender::Horae,
            Contender::Rio,
            Contender::Barrier,
            Contender::Opimq,
        ];
        let one = (Workload::AppendFsync, 1);
        assert_eq!(of("optane", 0, one)[..5], modes);
        assert_eq!(of("optane", 0, one)[5..], [Contender::Floor]);
        assert!(!of("mem", 0, one).contains(&Contender::Barrier), "it keeps no order");
        assert_eq!(of("mem", 0, one).last(), Some(&Contender::KernelExt4));
        assert!(!of("mem", 100, one).contains(&Contender::KernelExt4), "it has no link");
        assert_eq!(of("optane", 0, (Workload::AppendFsync, 40)), modes, "threads share streams");
        assert_eq!(of("optane", 0, (Workload::Varmail, 1)), modes);
    }
}

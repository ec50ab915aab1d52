//! `rio bench floor`: the limit of the machine, without Rio.

use std::sync::Arc;

use riopipe_lab::{
    access::Access,
    compare,
    floor::{self, FloorOptions},
    machine::Machine,
    report::{Point, Report as Figures},
    retakes::Retakes,
    rounds::Rounds,
    sample::Sample,
    terminal::Terminal,
};
use riopipe_media::{Drive, OpenError, open_drive};
use riopipe_net::{SocketOptions, SpinPolicy};
use serde::Serialize;

use super::{FLOOR, window, workloads};
use crate::{
    args::bench::Floor as Args,
    failure::{Code, Failure},
    interrupt::Interrupt,
    output::{Output, Report},
    own_targets::cores,
    progress::Progress,
};

pub(super) fn measure(args: &Args, output: &Output) -> Result<Measured, Failure> {
    let workloads = workloads(&args.writes, Access::Write)?;
    let machine = Machine::this();
    let interrupt = Interrupt::watch(output)?;
    let drive = drive(&args.drive)?;
    let (server_cores, writer_cores) = cores();
    let rounds = args.writes.rounds as usize;
    let runs = (workloads.len() * rounds) as u64;
    let mut retakes = Retakes::new(runs, Retakes::PERCENT);
    let progress = Progress::steps(output, "", runs);
    let mut points = Vec::new();
    for workload in workloads {
        let options = FloorOptions {
            workload,
            window: window(args.writes.time),
            writer_cores: writer_cores.clone(),
            server_cores: server_cores.clone(),
            spin: args.wait,
            socket: SocketOptions::default(),
            link: args.link.model(),
        };
        let samples = Rounds::run(&[FLOOR], rounds, |_, _| {
            progress.set_message(format!("depth {}", workload.queue_depth));
            let (sample, disturbance) = retakes.take(|| {
                interrupt.check()?;
                twice(args.wait, |spin, share| {
                    let window = window(args.writes.time / share);
                    once(&FloorOptions { spin, window, ..options.clone() }, &drive)
                })
            })?;
            progress.step();
            Ok(Sample { disturbance, ..sample })
        })?;
        points.push(Point::new(&workload, machine.cores, &samples, &[]));
    }
    drop(progress);
    Ok(Measured {
        figures: Figures::new(machine, points),
        drive: args.drive.clone(),
        wait: args.wait.to_string(),
        link: args.link.model().map(|link| link.to_string()),
        seconds: args.writes.time.as_secs_f64(),
        rounds: args.writes.rounds,
    })
}

/// The drive to which the payload is copied.
pub(in crate::commands) fn drive(spec: &str) -> Result<Arc<dyn Drive>, Failure> {
    open_drive(spec).map_err(|error| {
        let code = match error {
            OpenError::Spec { .. } => Code::Usage,
            _ => Code::Media,
        };
        Failure::new(code, format!("no drive {spec}")).because(&error)
    })
}

/// One run.
pub(super) fn once(options: &FloorOptions, drive: &Arc<dyn Drive>) -> Result<Sample, Failure> {
    floor::run(options, drive)
        .map_err(|error| Failure::new(Code::Failed, "the floor can't be measured").because(&error))
}

/// A run with the requested way to wait, and one of half its length with sleeping, for CPU time.
/// `run` gets the way to wait and the divisor of the time.
pub(in crate::commands) fn twice(
    wait: SpinPolicy,
    mut run: impl FnMut(SpinPolicy, u32) -> Result<Sample, Failure>,
) -> Result<Sample, Failure> {
    let mut sample = run(wait, 1)?;
    if wait != SpinPolicy::BLOCK {
        sample.blocking = Some(Box::new(run(SpinPolicy::BLOCK, 2)?));
    }
    Ok(sample)
}

/// The results, and the conditions of the measurement.
#[derive(Debug, Serialize)]
pub(super) struct Measured {
    #[serde(flatten)]
    figures: Figures,
    drive: String,
    wait: String,
    #[serde(skip_serializing_if = "Option::is_none")]
    link: Option<String>,
    seconds: f64,
    rounds: u32,
}

impl Report for Measured {
    fn text(&self, terminal: &Terminal) -> String {
        let link = self.link.as_ref().map(|link| format!(", link: {link}")).unwrap_or_default();
        format!(
            "{}\ndrive {}, wait {}{link}, {} rounds of {} s\n",
            compare::render(&self.figures, terminal).trim_end_matches('\n'),
            self.drive,
            self.wait,
            self.rounds,
            self.seconds,
        )
    }
}

//! The runs in which the commands at the drive are counted over time.

use std::{cell::RefCell, time::Duration};

use riopipe::{ConnectOptions, EngineKind, StreamOptions};
use riopipe_lab::{
    figures::{
        block::write_ns_of,
        catalogue::{Contender, Drive as Kind, Entry, QueueOverTime},
        figure::Figure,
        queue::{self, Conditions, Queue, SAMPLES},
    },
    machine::Machine,
    queue_depth::{DepthStep, WatchedDrive, depths_at, mean_depth},
    sample::Sample,
    workload::Workload,
};

use super::measure::{UNIT_BYTES, order_of};
use crate::{
    commands::bench::{open_drive, window},
    failure::Failure,
    interrupt::Interrupt,
    load::Load,
    output::Output,
    own_targets::{OwnTargets, Plan, file_log},
    progress::Progress,
};

/// Size of the log of the target.
const LOG_BYTES: u64 = 2 << 20;
/// Size of the drive.
const DRIVE_SIZE: &str = "256M";

/// Measures a figure.
pub(super) fn measure(
    entry: &Entry,
    experiment: &QueueOverTime,
    quick: bool,
    interrupt: &Interrupt,
    output: &Output,
) -> Result<Figure, Failure> {
    let machine = Machine::this();
    let block = &experiment.block;
    let kind = block.targets[0][0];
    let contenders: Vec<&Contender> =
        block.contenders.iter().filter(|one| one.kind().is_some()).collect();
    let progress = Progress::steps(output, entry.id, contenders.len() as u64 + 1);
    let time = Duration::from_millis(if quick { 200 } else { 1000 });
    let trip = Contender::TRIP;
    let (alone, _) = run(&trip, kind, &Workload::random_4k(1, 1), time, interrupt)?;
    let median = alone.latencies.summary().p50_ns as f64;
    let trip_ns = (median - write_ns_of(kind)).max(0.0);
    progress.step();
    let workload = block.axis.workload(1);
    let mut queues = Vec::new();
    for contender in contenders {
        progress.set_message(format!("{}: {}", entry.id, contender.name));
        let (_, steps) = run(contender, kind, &workload, time, interrupt)?;
        // From the middle of the run on, where all is steady.
        let middle = steps.get(steps.len() / 2).map_or(0, |step| step.at_ns);
        queues.push(Queue {
            contender: contender.name.to_owned(),
            depths: depths_at(&steps, middle, experiment.every_ns(1), SAMPLES),
            mean: mean_depth(&steps),
            largest: steps.iter().map(|step| step.depth).max().unwrap_or(0),
        });
        progress.step();
    }
    drop(progress);
    Ok(queue::figure(entry, experiment, &queues, &Conditions { trip_ns, machine, quick }))
}

/// One run, on a drive of its own, and the commands at the drive in its measured window.
fn run(
    contender: &Contender,
    kind: Kind,
    workload: &Workload,
    time: Duration,
    interrupt: &Interrupt,
) -> Result<(Sample, Vec<DepthStep>), Failure> {
    interrupt.check()?;
    let order = order_of(contender).name();
    let specification = format!("ssd:{},size={DRIVE_SIZE},order={order}", kind.profile());
    let (drive, watch) = WatchedDrive::around(open_drive(&specification)?);
    let own = OwnTargets::start(&Plan {
        volume: "lab",
        log: file_log(LOG_BYTES),
        unit_bytes: UNIT_BYTES,
        pin: true,
        // Only for the configuration: the drive is open already.
        drive: specification,
        open: vec![drive],
        ..Plan::default()
    })?;
    let load = Load {
        volume: own.volume().to_owned(),
        members: own.members().to_vec(),
        connect: ConnectOptions::default(),
        io_timeout: StreamOptions::default().timeout,
        workload: *workload,
        window: window(time),
        // A merged command would stand for several writes.
        merge: false,
        cores: own.writer_cores().to_vec(),
        shares_stream: contender.shares_stream,
        moves: contender.moves,
    };
    // The load asks for CPU time at both ends of the window.
    let steps = RefCell::new(None);
    let at_end = || {
        let mut steps = steps.borrow_mut();
        match steps.take() {
            None => {
                watch.record();
                *steps = Some(Vec::new());
            }
            Some(_) => *steps = Some(watch.recorded()),
        }
        None
    };
    // Contenders without an engine have been left out.
    let sample = load.run(contender.kind().unwrap_or(EngineKind::None), interrupt, at_end)?;
    Ok((sample, steps.into_inner().unwrap_or_default()))
}

#[cfg(test)]
mod tests {
    use riopipe_lab::figures::catalogue::{self, Experiment};

    use super::*;

    #[test]
    fn the_queue_of_linux_has_a_command_or_none_and_barriers_fill_it() {
        let entry = catalogue::named("barrier-10b").map(|entry| &entry.experiment);
        let Some(Experiment::QueueOverTime(experiment)) = entry else { panic!("{entry:?}") };
        let block = &experiment.block;
        let depths = |name: &str| -> Vec<u64> {
            let contender = block.contenders.iter().find(|one| one.name == name).unwrap();
            let (kind, time) = (block.targets[0][0], Duration::from_millis(20));
            let workload = block.axis.workload(1);
            let (sample, steps) =
                run(contender, kind, &workload, time, &Interrupt::default()).unwrap();
            assert!(sample.writes > 0);
            steps.iter().map(|step| step.depth).collect()
        };
        let linux = depths(experiment.waits);
        assert!(!linux.is_empty() && linux.iter().all(|depth| *depth <= 1), "{linux:?}");
        assert!(depths(experiment.ordered).iter().any(|depth| *depth > 1));
    }
}

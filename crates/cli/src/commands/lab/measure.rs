//! The runs of one figure: at each point the contenders take turns, on the same drives.

use std::{collections::BTreeMap, sync::Arc, time::Duration};

use riopipe::{ConnectOptions, EngineKind, StreamOptions};
use riopipe_lab::{
    figures::{
        block::{Measured, mean_write_ns},
        catalogue::{Block, Contender, Drive as Kind},
    },
    machine::Machine,
    report::Point,
    retakes::Retakes,
    rounds::Rounds,
    sample::Sample,
    workload::Workload,
};
use riopipe_media::Drive;
use riopipe_net::SpinPolicy;
use riopipe_order::write_order::DriveOrder;

use super::store::Partial;
use crate::{
    commands::bench::{open_drive, twice, waiting, window},
    failure::Failure,
    interrupt::Interrupt,
    load::Load,
    own_targets::{OwnTargets, Plan, file_log},
};

/// Duration of a run, in all one and a half times as long. All figures together take no more than an
/// hour, also if the host is so busy that two runs in five are repeated.
const WINDOW: Duration = Duration::from_millis(200);
/// Size of each drive.
const DRIVE_SIZE: &str = "256M";
/// Size of the log of each target: the paper's (§6.1).
const LOG_BYTES: u64 = 2 << 20;
/// Size of the prepare area for each stream, blocks: 4 MiB, as `rio volume create` gives it.
const PREPARE_BLOCKS: u32 = 1024;
/// Bytes on one drive before the next one follows: the paper distributes blocks of 4 KiB (§6.2.1).
pub(super) const UNIT_BYTES: u32 = 4096;

/// The measurement of one figure.
pub(super) struct Bench<'a> {
    experiment: &'a Block,
    quick: bool,
    machine: Machine,
    interrupt: &'a Interrupt,
    /// The drives, by the order that they keep: of the contenders some need drives with an order.
    drives: BTreeMap<&'static str, Vec<Arc<dyn Drive>>>,
    contenders: Vec<Contender>,
    retakes: Retakes,
    measured: Partial,
}

impl<'a> Bench<'a> {
    pub(super) fn new(
        experiment: &'a Block,
        quick: bool,
        machine: Machine,
        interrupt: &'a Interrupt,
    ) -> Result<Self, Failure> {
        let kinds = experiment.targets.iter().flat_map(|drives| drives.iter());
        let contenders: Vec<Contender> =
            experiment.contenders.iter().filter(|one| one.kind().is_some()).copied().collect();
        let mut drives = BTreeMap::new();
        // The time of a trip is measured without an order.
        for order in contenders.iter().map(order_of).chain([DriveOrder::None]) {
            if !drives.contains_key(order.name()) {
                let open = kinds.clone().map(|kind| open_drive(&spec(kind, order)));
                drives.insert(order.name(), open.collect::<Result<_, _>>()?);
            }
        }
        let runs = experiment.axis.values(quick).len() * contenders.len() * rounds(quick);
        Ok(Self {
            experiment,
            quick,
            machine,
            interrupt,
            drives,
            contenders,
            retakes: Retakes::new(runs as u64, Retakes::PERCENT),
            measured: Partial {
                version: env!("CARGO_PKG_VERSION").to_owned(),
                quick,
                ..Partial::default()
            },
        })
    }

    /// Takes the points of an interrupted run, if it was of the same kind.
    pub(super) fn go_on_from(&mut self, partial: Option<Partial>) {
        let is_same = |old: &Partial| {
            old.version == self.measured.version
                && old.quick == self.quick
                && old.points.len() <= self.values().len()
        };
        if let Some(old) = partial.filter(is_same) {
            self.measured = old;
        }
    }

    fn values(&self) -> &'static [u32] {
        self.experiment.axis.values(self.quick)
    }

    /// Number of runs that are left.
    pub(super) fn steps(&self) -> u64 {
        let points = self.values().len() - self.measured.points.len();
        let probes = usize::from(self.measured.trip_ns.is_none());
        ((points * self.contenders.len() + probes) * rounds(self.quick)) as u64
    }

    /// The point that comes next; `None` when all are measured.
    pub(super) fn next(&self) -> Option<String> {
        if self.measured.trip_ns.is_none() {
            return Some("the time of a trip".to_owned());
        }
        let value = self.values().get(self.measured.points.len())?;
        Some(format!("{} {value}", self.experiment.axis.title()))
    }

    /// Measures the point that comes next; returns all so far. `step` is called after each run.
    pub(super) fn measure_next(&mut self, step: &mut dyn FnMut()) -> Result<&Partial, Failure> {
        if self.measured.trip_ns.is_none() {
            self.measured.trip_ns = Some(self.trip_ns(step)?);
        } else if let Some(value) = self.values().get(self.measured.points.len()) {
            let workload = self.experiment.axis.workload(*value);
            let contenders = self.contenders.clone();
            let names: Vec<&str> = contenders.iter().map(|one| one.name).collect();
            let samples = self.rounds(&names, step, |bench, index, spin, time| {
                bench.run(&contenders[index], &workload, spin, time)
            })?;
            self.measured.points.push(Point::new(&workload, self.machine.cores, &samples, &[]));
        }
        Ok(&self.measured)
    }

    /// The measurement. All points are there if [`next`](Self::next) is `None`.
    pub(super) fn into_measured(self) -> Measured {
        Measured {
            points: self.measured.points,
            trip_ns: self.measured.trip_ns.unwrap_or_default(),
            machine: self.machine,
            quick: self.quick,
        }
    }

    /// Time of a command and its answer without the drive: a write at depth 1, less the mean of the
    /// drives' times.
    fn trip_ns(&mut self, step: &mut dyn FnMut()) -> Result<f64, Failure> {
        let workload = Workload::random_4k(1, 1);
        let none = Contender::TRIP;
        let samples = self.rounds(&[none.name], step, |bench, _, spin, time| {
            bench.run(&none, &workload, spin, time)
        })?;
        let point = Point::new(&workload, self.machine.cores, &samples, &[]);
        let median = point.engines.get(none.name).map_or(0, |figures| figures.latency.p50_ns);
        Ok((median as f64 - mean_write_ns(self.experiment)).max(0.0))
    }

    fn rounds(
        &mut self,
        names: &[&str],
        step: &mut dyn FnMut(),
        run: impl Fn(&Self, usize, SpinPolicy, Duration) -> Result<Sample, Failure>,
    ) -> Result<Rounds<Sample>, Failure> {
        let mut retakes = std::mem::replace(&mut self.retakes, Retakes::new(0, 0));
        let samples = Rounds::run(names, rounds(self.quick), |index, _| {
            let (sample, disturbance) = retakes.take(|| {
                self.interrupt.check()?;
                twice(SpinPolicy::HYBRID, |spin, share| run(self, index, spin, WINDOW / share))
            })?;
            step();
            Ok(Sample { disturbance, ..sample })
        });
        self.retakes = retakes;
        samples
    }

    fn run(
        &self,
        contender: &Contender,
        workload: &Workload,
        spin: SpinPolicy,
        time: Duration,
    ) -> Result<Sample, Failure> {
        // Contenders without an engine have been left out.
        let engine = contender.kind().unwrap_or(EngineKind::None);
        let order = order_of(contender);
        let connect = waiting(ConnectOptions::default(), spin);
        let targets = self.experiment.targets;
        let own = OwnTargets::start(&Plan {
            volume: "lab",
            targets: targets.len() as u32,
            drives: targets[0].len() as u32,
            log: file_log(LOG_BYTES),
            unit_bytes: UNIT_BYTES,
            streams: workload.threads,
            pin: true,
            connect: connect.clone(),
            spin,
            // Only for the configuration: these drives are open already.
            drive: spec(&targets[0][0], order),
            open: self.drives.get(order.name()).cloned().unwrap_or_default(),
            prepare_blocks: match contender.redirects {
                true => PREPARE_BLOCKS * workload.threads,
                false => 0,
            },
            ..Plan::default()
        })?;
        let load = Load {
            volume: own.volume().to_owned(),
            members: own.members().to_vec(),
            connect,
            io_timeout: StreamOptions::default().timeout,
            workload: *workload,
            window: window(time),
            merge: contender.merge,
            cores: own.writer_cores().to_vec(),
            shares_stream: contender.shares_stream,
            moves: contender.moves,
        };
        load.run(engine, self.interrupt, || own.cpu_ns())
    }
}

/// The order that the drives of a contender must keep.
pub(super) fn order_of(contender: &Contender) -> DriveOrder {
    contender.kind().map_or(DriveOrder::None, |kind| kind.capabilities().drive_order)
}

/// The specification of a drive.
fn spec(kind: &Kind, order: DriveOrder) -> String {
    format!("ssd:{},size={DRIVE_SIZE},order={order}", kind.profile())
}

/// Number of rounds: an interval needs six.
fn rounds(quick: bool) -> usize {
    if quick { 3 } else { 6 }
}

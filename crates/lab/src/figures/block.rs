//! A figure of ordered writes from its measured points, with the model of what to expect.

use riopipe_model::ssd::Profile;

use super::{
    catalogue::{self, BARRIER, Block, Contender, Drive, Entry, HORAE, Measure, ORDERLESS, Paper},
    figure::{Claim, Curve, Figure, Form, Panel, Value, Verdict},
};
use crate::{
    machine::Machine,
    report::{EngineFigures, Point},
    units,
    workload::{BLOCK, Shape, Workload},
};

/// Time to store one entry of ordering metadata in a persistent memory region, ns (Rio, §6.1).
const PERSIST_NS: f64 = 600.0;

/// The measurement of a figure.
#[derive(Clone, Debug)]
pub struct Measured {
    /// One for each value of the axis, in their order. The engines have the names of the contenders.
    pub points: Vec<Point>,
    /// Time of one command to a target and of its answer, without the drive, ns.
    pub trip_ns: f64,
    /// The machine, described before the runs.
    pub machine: Machine,
    /// Whether only some values were measured, with short runs.
    pub quick: bool,
}

/// The finished figure.
#[must_use]
pub fn figure(entry: &Entry, block: &Block, measured: &Measured) -> Figure {
    let model = Model { block, trip_ns: measured.trip_ns };
    let values = block.axis.values(measured.quick);
    let panel = |measure: &Measure| Panel {
        form: Form::Lines,
        title: measure.title().to_owned(),
        axis: block.axis.title().to_owned(),
        ticks: values.iter().map(ToString::to_string).collect(),
        within_cores: measured.points.iter().take_while(|point| !point.beyond_cores).count(),
        curves: block.contenders.iter().map(|one| curve(one, *measure, measured, &model)).collect(),
    };
    let claims: Vec<Claim> =
        block.claims.iter().map(|spec| claim(spec, measured, &model)).collect();
    Figure {
        quick: measured.quick,
        machine: measured.machine.clone(),
        setup: setup(block),
        differs: differs(block, &measured.machine),
        panels: block.panels.iter().map(panel).collect(),
        verdict: Verdict::of(block.conclusion, &claims),
        claims,
        model: model.text(),
        points: measured.points.clone(),
        ..Figure::of(entry)
    }
}

fn curve(contender: &Contender, measure: Measure, measured: &Measured, model: &Model) -> Curve {
    let values = measured.points.iter().map(|point| value(point, contender.name, measure));
    let expected = match measure {
        Measure::Writes | Measure::Bytes if contender.name != ORDERLESS => measured
            .points
            .iter()
            .filter_map(|point| model.rate(contender, point, measure))
            .collect(),
        _ => Vec::new(),
    };
    Curve {
        name: contender.name.to_owned(),
        values: values.collect(),
        // A model for some points only would be misread.
        expected: if expected.len() == measured.points.len() { expected } else { Vec::new() },
    }
}

/// The value of `measure` of one contender at one point; `None` if it was not measured.
fn value(point: &Point, name: &str, measure: Measure) -> Option<Value> {
    let figures = point.engines.get(name)?;
    let plain = |median| Some(Value { median, interval: None });
    let over_orderless = |of: fn(&EngineFigures) -> Option<f64>| {
        let (own, orderless) = (of(figures)?, of(point.engines.get(ORDERLESS)?)?);
        (own > 0.0).then_some(orderless / own)
    };
    match measure {
        Measure::Writes => Some(Value {
            median: figures.writes_per_s / 1e3,
            interval: Some(figures.writes_per_s_interval.map(|end| end / 1e3)),
        }),
        Measure::Bytes => plain(figures.bytes_per_s / 1e6),
        Measure::InitiatorEfficiency => plain(over_orderless(initiator_cpu)?),
        Measure::TargetEfficiency => plain(over_orderless(target_cpu)?),
        Measure::InitiatorCpu => plain(initiator_cpu(figures)? / 1e3),
        Measure::TargetCpu => plain(target_cpu(figures)? / 1e3),
        Measure::InFlight => plain(figures.writes_per_s * figures.latency.mean_ns / 1e9),
    }
}

fn initiator_cpu(figures: &EngineFigures) -> Option<f64> {
    Some(figures.initiator_cpu_ns_per_write)
}

fn target_cpu(figures: &EngineFigures) -> Option<f64> {
    figures.target_cpu_ns_per_write
}

fn claim(spec: &catalogue::Claim, measured: &Measured, model: &Model) -> Claim {
    let ratio = |point: &Point| {
        let of = |name| Some(value(point, name, spec.measure)?.median);
        Some(of(spec.over)? / of(spec.under)?)
    };
    let expected = |point: &Point| {
        let of = |name: &str| {
            let contender = model.block.contenders.iter().find(|one| one.name == name)?;
            model.rate(contender, point, spec.measure)
        };
        Some(of(spec.over)? / of(spec.under)?)
    };
    let what = match spec.measure {
        Measure::Writes | Measure::Bytes => "",
        Measure::InitiatorEfficiency | Measure::InitiatorCpu => ", CPU efficiency of the initiator",
        Measure::TargetEfficiency | Measure::TargetCpu => ", CPU efficiency of the targets",
        Measure::InFlight => ", writes in flight",
    };
    Claim {
        what: format!("{} / {}{what}", spec.over, spec.under),
        paper: spec.paper,
        expected: mean(measured.points.iter().map(expected)),
        here: mean(measured.points.iter().map(ratio)),
        at_least: spec.at_least,
    }
}

/// The geometric mean, since these are ratios; `None` if one is missing.
pub(super) fn mean(ratios: impl Iterator<Item = Option<f64>>) -> Option<f64> {
    let ratios: Option<Vec<f64>> =
        ratios.map(|ratio| ratio.filter(|value| value.is_finite() && *value > 0.0)).collect();
    let ratios = ratios.filter(|ratios| !ratios.is_empty())?;
    let sum: f64 = ratios.iter().map(|ratio| ratio.ln()).sum();
    Some((sum / ratios.len() as f64).exp())
}

/// The waits of one group, one after the other.
struct Model<'a> {
    block: &'a Block,
    trip_ns: f64,
}

impl Model<'_> {
    /// The expected value at a point, in the unit of `measure`: a thread makes one group in the time
    /// of its waits, and all threads together no more than orderless writes. `None` without a model.
    fn rate(&self, contender: &Contender, point: &Point, measure: Measure) -> Option<f64> {
        let limit = value(point, ORDERLESS, measure)?.median;
        let of = |bytes: f64| match measure {
            Measure::Writes => Some(1e-3),
            Measure::Bytes => Some(bytes / 1e6),
            _ => None,
        };
        let unit = of(f64::from(point.size))?;
        if contender.name == ORDERLESS {
            return Some(limit);
        }
        match self.serial_ns(contender, f64::from(point.size)) {
            serial if serial > 0.0 => {
                Some((f64::from(point.threads) * 1e9 / serial * unit).min(limit))
            }
            _ => Some(limit),
        }
    }

    /// The time that a thread waits for one group, ns.
    fn serial_ns(&self, contender: &Contender, bytes: f64) -> f64 {
        match contender.engine {
            "linux" => self.mean_of_drives(|profile| {
                let write = self.trip_ns + write_ns(profile, bytes / f64::from(BLOCK));
                match profile.plp {
                    true => write,
                    false => write + self.trip_ns + profile.flush_base_ns as f64,
                }
            }),
            "horae" => self.trip_ns + PERSIST_NS,
            _ => 0.0,
        }
    }

    /// Groups go to the drives in turn.
    fn mean_of_drives(&self, of: impl Fn(&Profile) -> f64) -> f64 {
        mean_of_drives(self.block, of)
    }

    fn text(&self) -> String {
        let mut parts = Vec::new();
        let block = f64::from(BLOCK);
        for contender in self.block.contenders {
            let serial = self.serial_ns(contender, block);
            let waits = match (contender.engine, self.has_flush()) {
                ("linux", true) => "transfer and write, then a FLUSH",
                ("linux", false) => "transfer and write",
                ("horae", _) => "the ordering metadata's round trip",
                _ => continue,
            };
            parts.push(format!(
                "with {} a thread waits {} for each group of 4 KiB ({waits})",
                contender.name,
                units::time(serial)
            ));
        }
        if parts.is_empty() {
            return "No contender waits.".to_owned();
        }
        format!(
            "A command and its answer take {} here without the drive. So {}. The others wait for \
             nothing. Each is limited by what orderless writes reach.",
            units::time(self.trip_ns),
            parts.join(", and ")
        )
    }

    fn has_flush(&self) -> bool {
        self.block.targets.iter().flat_map(|drives| drives.iter()).any(|d| *d == Drive::Flash)
    }
}

fn mean_of_drives(block: &Block, of: impl Fn(&Profile) -> f64) -> f64 {
    let drives = || block.targets.iter().flat_map(|drives| drives.iter());
    let profiles = || drives().filter_map(|drive| Profile::named(drive.profile()));
    profiles().map(of).sum::<f64>() / profiles().count().max(1) as f64
}

/// Time of a write of 4 KiB in the drives, the mean over them, ns.
#[must_use]
pub fn mean_write_ns(block: &Block) -> f64 {
    mean_of_drives(block, |profile| write_ns(profile, 1.0))
}

/// Time of a write of 4 KiB in a drive of this kind, ns.
#[must_use]
pub fn write_ns_of(drive: Drive) -> f64 {
    Profile::named(drive.profile()).map_or(0.0, |profile| write_ns(profile, 1.0))
}

/// Time of a write in the drive, ns.
pub(super) fn write_ns(profile: &Profile, blocks: f64) -> f64 {
    profile.write_command_ns as f64
        + profile.link_block_ns as f64 * (blocks - 1.0)
        + profile.write_latency_ns as f64
}

/// The name of the drive's kind and its model.
fn drive_text(drive: Drive) -> String {
    let like = Profile::named(drive.profile()).map_or("", |profile| profile.like);
    format!("{} (modelled, like {like})", drive.profile())
}

pub(super) fn setup(block: &Block) -> String {
    let targets = match block.targets.len() {
        1 => "One target".to_owned(),
        n => format!("{n} targets"),
    };
    let drives: Vec<String> = block.targets[0].iter().map(|drive| drive_text(*drive)).collect();
    let each = if block.targets.len() > 1 { " each" } else { "" };
    let workload: Workload = block.axis.workload(block.axis.values(true)[0]);
    let writes = match workload.shape {
        Shape::Journal => "each thread writes 8 KiB, then 4 KiB behind it, each a group".to_owned(),
        Shape::Uniform { pattern, .. } => format!("{pattern} writes, each a group"),
    };
    format!(
        "{targets} on loopback with {}{each}; {writes}; {} in flight for each thread, where an \
         engine does not wait",
        drives.join(" and "),
        workload.queue_depth
    )
}

/// The differences to the paper's set-up, for every figure of ordered writes.
pub(super) fn differs(block: &Block, machine: &Machine) -> Vec<String> {
    let cores = machine.cores;
    let mut list = match block.paper {
        Paper::Rio => vec![
            format!(
                "{cores} cores for initiator and targets together; the paper has 36 for each server"
            ),
            "TCP on loopback in user space; the paper has RDMA over 200 Gbit/s in the kernel"
                .to_owned(),
            "modelled drives in memory; the paper has a Samsung PM981, an Intel 905P and a P4800X"
                .to_owned(),
            "the ordering log is a mapped file in memory; the paper has 2 MB of DRAM in a drive"
                .to_owned(),
        ],
        Paper::Barrier => vec![
            format!("{cores} cores for initiator and target together; the paper has 4 and 16"),
            "NVMe over TCP on loopback in user space; the paper has SATA drives in the machine, and \
             its stack in the kernel"
                .to_owned(),
            "modelled drives in memory; the paper has a Samsung 850 PRO with a penalty of 5 %, as \
             the model has, and an 843TN"
                .to_owned(),
            "32 writes in flight for each thread, each an epoch; the paper's threads call \
             fdatabarrier after each write"
                .to_owned(),
            "Linux is wait-on-transfer (X in the paper) with power-loss protection only; on flash it \
             also flushes"
                .to_owned(),
            "the paper has neither Rio nor a queue for each thread".to_owned(),
        ],
        Paper::Horae => vec![
            format!("{cores} cores for initiator and target together; the slides state none"),
            "NVMe over TCP on loopback in user space, as Rio's paper runs HORAE; HORAE has its drives \
             in the machine, and writes the metadata to their memory in 0.5 µs"
                .to_owned(),
            "modelled drives in memory; HORAE has a Samsung 860 Pro, an Intel 750 and a P3700"
                .to_owned(),
            "the slides have no numbers beside their curves".to_owned(),
            "Rio is not in the slides".to_owned(),
        ],
        Paper::Opimq => vec![
            format!("{cores} cores for initiator and target together; the paper has 40"),
            "NVMe over TCP on loopback in user space; the paper has the drive in the machine, and its \
             stack in the kernel"
                .to_owned(),
            "modelled drives in memory, with the order kept by the model; the paper has a Samsung 980 \
             Pro, which keeps no order, with a penalty of 1.05 %"
                .to_owned(),
            "threads instead of containers, and writes instead of a file system".to_owned(),
            "Rio is not in the paper".to_owned(),
        ],
    };
    let has = |is: fn(&Contender) -> bool| block.contenders.iter().any(is);
    if has(|one| one.name == BARRIER) {
        list.push(
            "`barrier` has drives of its own, equal to the others but for the cache barrier and its \
             cost; all threads share one stream, whose thread dispatches their writes"
                .to_owned(),
        );
    }
    if has(|one| one.engine == "opimq") {
        list.push(
            "OPIMQ has drives of its own, equal to the others but for the order of epochs and its cost"
                .to_owned(),
        );
    }
    if has(|one| one.name == HORAE) && has(|one| one.redirects) {
        list.push(
            "HORAE without redirection writes updates home at once, and can't roll them back"
                .to_owned(),
        );
    }
    let missing: Vec<&str> =
        block.contenders.iter().filter(|one| one.kind().is_none()).map(|one| one.name).collect();
    if !missing.is_empty() {
        list.push(format!(
            "not measured: {} (this program has no such engine)",
            missing.join(", ")
        ));
    }
    list
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::figures::{catalogue::Experiment, figure::Holds};

    fn figures(writes_per_s: f64, cpu: f64) -> EngineFigures {
        EngineFigures {
            writes_per_s,
            writes_per_s_interval: [writes_per_s * 0.9, writes_per_s * 1.1],
            bytes_per_s: writes_per_s * 4096.0,
            initiator_cpu_ns_per_write: cpu,
            target_cpu_ns_per_write: Some(2.0 * cpu),
            ..EngineFigures::default()
        }
    }

    /// Points of `id` with these contenders.
    fn measured(id: &str, engines: &[(&str, f64, f64)]) -> (Figure, Measured) {
        let entry = catalogue::named(id).unwrap();
        let Experiment::Block(block) = &entry.experiment else { panic!("{id}") };
        let axis = block.axis;
        let point = |value: &u32| {
            let workload = axis.workload(*value);
            let mut point = Point::new(&workload, 2, &crate::report::tests::rounds(), &[]);
            point.engines = engines
                .iter()
                .map(|(name, rate, cpu)| ((*name).to_owned(), figures(*rate, *cpu)))
                .collect();
            point
        };
        let measured = Measured {
            points: axis.values(true).iter().map(point).collect(),
            trip_ns: 20_000.0,
            machine: Machine { cores: 2, ..Machine::default() },
            quick: true,
        };
        (figure(entry, block, &measured), measured)
    }

    #[test]
    fn ratios_are_beside_those_of_the_paper() {
        let (figure, _) = measured(
            "rio-10b",
            &[("Linux", 20e3, 10e3), ("Rio", 180e3, 2e3), (ORDERLESS, 200e3, 1e3)],
        );
        let claim = |what: &str| figure.claims.iter().find(|one| one.what == what).unwrap();
        let speed = claim("Rio / Linux");
        assert_eq!(speed.paper, Some(9.4));
        assert!((speed.here.unwrap() - 9.0).abs() < 1e-9);
        // One thread waits for 20 us of trip and 10 us of write; two make twice as much.
        let expected = (200.0f64 / (1e3 / 30.0) * (200.0 / (2e3 / 30.0))).sqrt();
        assert!((speed.expected.unwrap() - expected).abs() < 1e-9, "{speed:?}");
        let efficiency = claim("Rio / Linux, CPU efficiency of the initiator");
        assert!((efficiency.here.unwrap() - 5.0).abs() < 1e-9);
        assert_eq!(efficiency.expected, None);
        // What was not measured is no support, and no contradiction.
        assert_eq!(claim("Rio / HORAE").here, None);
        assert_eq!(figure.verdict.holds, Holds::Yes, "{}", figure.verdict.sentence);
        assert!(figure.model.contains("With") || figure.model.contains("with Linux"));
        let curve = &figure.panels[0].curves[1];
        assert_eq!((curve.name.as_str(), curve.values.as_slice()), ("HORAE", &[None, None][..]));
    }

    #[test]
    fn a_lead_that_is_missing_shows_in_the_verdict() {
        let engines = [("Linux", 100e3, 1e3), ("Rio", 110e3, 1e3), (ORDERLESS, 200e3, 1e3)];
        let (figure, _) = measured("rio-10a", &engines);
        assert_eq!(figure.verdict.holds, Holds::No, "{}", figure.verdict.sentence);
    }

    #[test]
    fn a_figure_is_the_same_after_a_round_trip_through_json() {
        let (figure, _) = measured("rio-2a", &[("Linux", 5e2, 1e3), (ORDERLESS, 200e3, 1e3)]);
        let text = serde_json::to_string(&figure).unwrap();
        assert_eq!(serde_json::from_str::<Figure>(&text).unwrap(), figure);
    }
}

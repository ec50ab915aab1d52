//! A figure of a program from its measured points, with the model of what to expect.

use riopipe_model::ssd::Profile;

use super::{
    block::{self, write_ns},
    catalogue::{
        Drive, Entry,
        program::{Program, ProgramClaim, ProgramContender, ProgramMeasure},
    },
    figure::{Claim, Curve, Figure, Form, Panel, Value, Verdict},
    file_system,
};
use crate::{fs_load::Guarantee, machine::Machine, units};

/// Fewer context switches than this of an operation are none: a ratio to less has no meaning.
const SWITCHES_MIN: f64 = 0.01;

/// One contender at one tick.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Mark {
    /// The name of the contender.
    pub contender: String,
    /// The name of the tick.
    pub tick: String,
    /// Number of threads.
    pub threads: u32,
    /// Operations per second.
    pub ops_per_s: f64,
    /// Their interval; with less than six rounds the smallest and the largest value.
    pub ops_per_s_interval: Option<[f64; 2]>,
    /// Mean latency, µs.
    pub mean_us: f64,
    /// 99th percentile of the latency, µs; `None` if too few operations are above it.
    pub p99_us: Option<f64>,
    /// 99.9th percentile of the latency, µs; `None` if too few operations are above it.
    pub p999_us: Option<f64>,
    /// The times that a thread of the program gives up its core, for each operation.
    pub switches: f64,
    /// How often an operation waits for the drive, one wait after the other.
    pub serial_waits: f64,
    /// The commands that the drives get for each operation.
    pub drive_writes: f64,
    /// The blocks that these commands write.
    pub drive_blocks: f64,
    /// The FLUSHes that the drives get for each operation.
    pub drive_flushes: f64,
    /// Mean number of commands at a drive.
    pub queue_depth: f64,
    /// The largest number of them.
    pub largest_queue_depth: f64,
}

/// The measurement of a figure.
#[derive(Clone, Debug)]
pub struct Measured {
    /// One for each contender and tick.
    pub marks: Vec<Mark>,
    /// Time of one command to the target and of its answer, without the drive, ns.
    pub trip_ns: f64,
    /// The machine, described before the runs.
    pub machine: Machine,
    /// Whether only some values were measured, with short runs.
    pub quick: bool,
    /// Drive and network.
    pub setup: String,
    /// The names of the contenders that this program can't run.
    pub missing: Vec<&'static str>,
}

/// The finished figure.
#[must_use]
pub fn figure(entry: &Entry, program: &Program, measured: &Measured) -> Figure {
    let model = Model { program, trip_ns: measured.trip_ns };
    let claims: Vec<Claim> =
        program.claims.iter().map(|spec| claim(spec, measured, &model)).collect();
    let panels = program.panels.iter().map(|measure| panel(*measure, program, measured));
    let mut differs = match program.is_of_objects() {
        true => Vec::new(),
        false => file_system_differs(program),
    };
    differs.extend(file_system::place_differs(program.paper, &measured.machine, program.drives));
    differs.extend(program.differs.iter().map(|text| (*text).to_owned()));
    if !measured.missing.is_empty() {
        let names = measured.missing.join(", ");
        differs.push(format!("not measured: {names} (this program has no such mode)"));
    }
    Figure {
        quick: measured.quick,
        machine: measured.machine.clone(),
        setup: measured.setup.clone(),
        differs,
        panels: panels.collect(),
        verdict: Verdict::of(program.conclusion, &claims),
        claims,
        model: model.text(measured),
        ..Figure::of(entry)
    }
}

fn file_system_differs(program: &Program) -> Vec<String> {
    let mut differs = file_system::user_space_differs();
    let runs = |mode: &str| program.contenders.iter().any(|one| one.mode == mode);
    differs.extend(runs("horae").then(|| file_system::HORAE_FS_DIFFERS.to_owned()));
    differs.extend(runs("barrier").then(|| file_system::BARRIER_FS_DIFFERS.to_owned()));
    differs.extend(runs("opimq").then(|| file_system::OPEXT4_DIFFERS.to_owned()));
    differs
}

fn find<'a>(measured: &'a Measured, contender: &str, tick: &str) -> Option<&'a Mark> {
    measured.marks.iter().find(|mark| mark.contender == contender && mark.tick == tick)
}

fn panel(measure: ProgramMeasure, program: &Program, measured: &Measured) -> Panel {
    let ticks = program.ticks(measured.quick);
    let is_threads = ticks.iter().any(|tick| tick.threads != ticks[0].threads);
    let curve = |one: &ProgramContender| Curve {
        name: one.name.to_owned(),
        values: ticks
            .iter()
            .map(|tick| value(find(measured, one.name, tick.name)?, measure))
            .collect(),
        expected: Vec::new(),
    };
    Panel {
        form: if is_threads { Form::Lines } else { Form::Bars },
        title: measure.title().to_owned(),
        axis: program.axis.to_owned(),
        ticks: ticks.iter().map(|tick| tick.name.to_owned()).collect(),
        within_cores: match is_threads {
            true => ticks.iter().filter(|t| t.threads as usize <= measured.machine.cores).count(),
            false => ticks.len(),
        },
        curves: program.contenders.iter().map(curve).collect(),
    }
}

/// `None` if there were too few operations for it.
fn value(mark: &Mark, measure: ProgramMeasure) -> Option<Value> {
    let interval = match measure {
        ProgramMeasure::Rate => mark.ops_per_s_interval.map(|ends| ends.map(|end| end / 1e3)),
        _ => None,
    };
    let median = match measure {
        ProgramMeasure::Rate => mark.ops_per_s / 1e3,
        ProgramMeasure::Mean => mark.mean_us,
        ProgramMeasure::P99 => mark.p99_us?,
        ProgramMeasure::P999 => mark.p999_us?,
        ProgramMeasure::Switches => mark.switches,
        ProgramMeasure::QueueDepth => mark.queue_depth,
        ProgramMeasure::LargestQueueDepth => mark.largest_queue_depth,
    };
    Some(Value { median, interval })
}

fn claim(spec: &ProgramClaim, measured: &Measured, model: &Model<'_>) -> Claim {
    let ticks = model.program.ticks(measured.quick).iter();
    let ticks: Vec<&str> =
        ticks.map(|tick| tick.name).filter(|name| spec.at.is_none_or(|at| at == *name)).collect();
    let mean = |of: &dyn Fn(&Mark) -> Option<f64>| {
        let value = |contender, tick: &&str| of(find(measured, contender, tick)?);
        block::mean(
            ticks.iter().map(|tick| Some(value(spec.over, tick)? / value(spec.under, tick)?)),
        )
    };
    let here = |mark: &Mark| {
        let value = value(mark, spec.measure)?.median;
        Some(match spec.measure {
            ProgramMeasure::Switches => value.max(SWITCHES_MIN),
            _ => value,
        })
    };
    let expected = |mark: &Mark| match spec.measure {
        _ if model.waits_elsewhere(mark) => None,
        ProgramMeasure::Rate => Some(model.rate(mark)),
        ProgramMeasure::Mean => Some(model.mean_us(mark)),
        ProgramMeasure::Switches => Some(mark.serial_waits.max(SWITCHES_MIN)),
        _ => None,
    };
    let at = spec.at.map(|tick| format!(", {tick}")).unwrap_or_default();
    Claim {
        what: format!("{} / {}{}{at}", spec.over, spec.under, spec.measure.in_claim()),
        paper: spec.paper,
        expected: mean(&expected),
        here: mean(&here),
        at_least: spec.at_least,
    }
}

/// The serial waits of an operation, and the work of the drives for it.
struct Model<'a> {
    program: &'a Program,
    trip_ns: f64,
}

impl Model<'_> {
    /// Operations per second: no more than the waits of the threads let begin, and no more than the
    /// drives can do. The CPU time of an operation is not in it.
    fn rate(&self, mark: &Mark) -> f64 {
        let (thread_ns, drive_ns) = self.times_ns(mark);
        1e9 / (thread_ns / f64::from(mark.threads.max(1))).max(drive_ns)
    }

    fn mean_us(&self, mark: &Mark) -> f64 {
        let (thread_ns, drive_ns) = self.times_ns(mark);
        thread_ns.max(drive_ns * f64::from(mark.threads)) / 1e3
    }

    /// Whether an operation waits outside of the calls whose waits are counted: on file-level journals a
    /// write behind a barrier may wait until what is before the barrier is durable.
    fn waits_elsewhere(&self, mark: &Mark) -> bool {
        let named = self.program.contenders.iter().find(|one| one.name == mark.contender);
        let all = self.program.ticks.iter().chain(self.program.quick);
        let tick = all.into_iter().find(|tick| tick.name == mark.tick);
        named.zip(tick).is_some_and(|(one, tick)| {
            matches!(one.mode, "rio" | "horae")
                && !tick.load.is_of_objects()
                && one.guarantee_at(tick) != Guarantee::Durable
        })
    }

    /// The time that a thread waits for one operation, and the time that the operation takes the
    /// drives, ns. The drives work side by side.
    fn times_ns(&self, mark: &Mark) -> (f64, f64) {
        let named = self.program.contenders.iter().find(|one| one.name == mark.contender);
        let all = self.program.drives;
        let drives = Drives::new(named.map_or(all, |one| one.drives(all)));
        let flushes = mark.drive_flushes / drives.flushed();
        // A thread can't wait for more FLUSHes than it has waits.
        let waits = mark.serial_waits * (self.trip_ns + drives.write_ns());
        let thread_ns = waits + flushes.min(mark.serial_waits) * drives.flush_ns();
        let writes = (mark.drive_writes * drives.command_ns())
            .max(mark.drive_blocks * drives.block_ns())
            / drives.count();
        // At best the FLUSHes of all threads wait together, and the drive joins them.
        let joined = flushes / f64::from(mark.threads.max(1));
        (thread_ns, writes + joined * drives.flush_ns())
    }

    fn text(&self, measured: &Measured) -> String {
        let (program, drives) = (self.program, Drives::new(self.program.drives));
        let Some(tick) = program.ticks(measured.quick).first() else { return String::new() };
        let of = |one: &ProgramContender| {
            let mark = find(measured, one.name, tick.name)?;
            if self.waits_elsewhere(mark) {
                return None;
            }
            Some(format!(
                "{:.1} times, with {:.1} FLUSHes, with {}",
                mark.serial_waits, mark.drive_flushes, one.name
            ))
        };
        let counts: Vec<String> = program.contenders.iter().filter_map(of).collect();
        let has_horae = program.contenders.iter().any(|one| one.mode == "horae");
        let below = match has_horae && !program.is_of_objects() {
            true => {
                " With HoraeFS data and record also wait for their ordering metadata, below the file system, \
                 which is not counted."
            }
            false => "",
        };
        let waits = match program.is_of_objects() {
            true => "By the way of the store, and with the FLUSHes counted",
            false => "Counted",
        };
        format!(
            "{waits} at {} ({}), an operation waits {}. A wait is a round trip ({} here) and a write of the \
             drive ({}), a FLUSH takes {} more. So much is expected of a thread. All together can't do more \
             than the drive, which takes {} for a command and {} for a block, and joins FLUSHes that wait together. CPU time is not in the model, so where nothing \
             waits it is only a limit.{below}",
            tick.name,
            program.axis,
            units::list(&counts),
            units::time(self.trip_ns),
            units::time(drives.write_ns()),
            units::time(drives.flush_ns()),
            units::time(drives.command_ns()),
            units::time(drives.block_ns()),
        )
    }
}

/// The times of some drives.
struct Drives(Vec<&'static Profile>);

impl Drives {
    fn new(drives: &[Drive]) -> Self {
        Self(drives.iter().filter_map(|drive| Profile::named(drive.profile())).collect())
    }

    fn count(&self) -> f64 {
        self.0.len().max(1) as f64
    }

    fn mean(&self, of: impl Fn(&Profile) -> f64) -> f64 {
        self.0.iter().map(|profile| of(profile)).sum::<f64>() / self.count()
    }

    fn write_ns(&self) -> f64 {
        self.mean(|profile| write_ns(profile, 1.0))
    }

    fn command_ns(&self) -> f64 {
        self.mean(|profile| profile.write_command_ns as f64)
    }

    /// The time of a block on the way into the drive, or to the medium if that is longer.
    fn block_ns(&self) -> f64 {
        self.mean(|profile| (profile.link_block_ns as f64).max(profile.drain_block_ns() as f64))
    }

    /// The drives that need a FLUSH; if none does, those that get one.
    fn with_cache(&self) -> impl Iterator<Item = &'static Profile> {
        let is_any = self.0.iter().any(|profile| !profile.plp);
        self.0.iter().copied().filter(move |profile| !profile.plp || !is_any)
    }

    fn flushed(&self) -> f64 {
        self.with_cache().count().max(1) as f64
    }

    /// They flush side by side, so the slowest one counts.
    fn flush_ns(&self) -> f64 {
        self.with_cache().map(|profile| profile.flush_base_ns as f64).fold(0.0, f64::max)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::figures::{
        catalogue::{self, Experiment},
        figure::Holds,
    };

    fn mark(contender: &str, tick: &str, us: f64, waits: f64, flushes: f64) -> Mark {
        Mark {
            contender: contender.to_owned(),
            tick: tick.to_owned(),
            threads: 1,
            ops_per_s: 1e6 / us,
            ops_per_s_interval: Some([0.9e6 / us, 1.1e6 / us]),
            mean_us: us,
            p99_us: Some(2.0 * us),
            p999_us: None,
            switches: waits,
            serial_waits: waits,
            drive_writes: 5.0,
            drive_blocks: 6.0,
            drive_flushes: flushes,
            queue_depth: 1.0,
            largest_queue_depth: 3.0,
        }
    }

    fn of(id: &str, marks: Vec<Mark>) -> Figure {
        let entry = catalogue::named(id).unwrap();
        let Experiment::Program(program) = &entry.experiment else { panic!("{id}") };
        let measured = Measured {
            marks,
            trip_ns: 10_000.0,
            machine: Machine { cores: 2, ..Machine::default() },
            quick: true,
            setup: "one target".to_owned(),
            missing: Vec::new(),
        };
        figure(entry, program, &measured)
    }

    #[test]
    fn ratios_are_at_their_tick_and_the_model_counts_waits_and_flushes() {
        let both = |name, persist: (f64, f64), wal| {
            [
                mark(name, "PERSIST", persist.0, persist.1, persist.1),
                mark(name, "WAL", wal, 1.0, 1.0),
            ]
        };
        let marks = [
            both("ext4", (8000.0, 4.0), 2000.0),
            both("BarrierFS", (2000.0, 1.0), 2000.0),
            both("BarrierFS, order only", (50.0, 0.0), 50.0),
        ];
        let figure = of("barrier-14", marks.concat());
        let claim = |what: &str| figure.claims.iter().find(|one| one.what == what).unwrap();
        let durable = claim("BarrierFS / ext4, PERSIST");
        assert_eq!(durable.paper, Some(3.7));
        assert!((durable.here.unwrap() - 4.0).abs() < 1e-9, "{durable:?}");
        // Four waits and FLUSHes beside one.
        assert!((durable.expected.unwrap() - 4.0).abs() < 1e-9, "{durable:?}");
        let ordered = claim("BarrierFS, order only / ext4, PERSIST");
        assert!((ordered.here.unwrap() - 160.0).abs() < 1e-9, "{ordered:?}");
        // Nothing waits, so the five commands of a transaction are the limit: 5 times 2.222 us.
        let waits = 4.0 * (10.0 + 2.222 + 17.778 + 1720.0);
        assert!((ordered.expected.unwrap() - waits / 11.11).abs() < 1.0, "{ordered:?}");
        assert_eq!(figure.verdict.holds, Holds::Yes, "{}", figure.verdict.sentence);
        assert!(
            figure.model.contains("4.0 times, with 4.0 FLUSHes, with ext4"),
            "{}",
            figure.model
        );
        let panel = &figure.panels[0];
        assert_eq!((panel.ticks.len(), panel.within_cores), (2, 2), "no axis of threads");
        assert_eq!(panel.form, Form::Bars);
    }

    #[test]
    fn only_drives_with_a_cache_are_flushed_and_side_by_side() {
        let flush = |drives: &[Drive]| {
            let drives = Drives::new(drives);
            (drives.flushed(), drives.flush_ns())
        };
        assert_eq!(flush(&[Drive::Flash, Drive::Flash, Drive::Optane]), (2.0, 1_720_000.0));
        assert_eq!(flush(&[Drive::Optane]), (1.0, 10_000.0));
    }

    #[test]
    fn what_was_not_measured_is_no_claim() {
        let figure = of("barrier-14", vec![mark("BarrierFS", "PERSIST", 10.0, 1.0, 1.0)]);
        assert_eq!(figure.verdict.holds, Holds::NotMeasured);
        assert_eq!(figure.panels[0].curves[0].values, [None, None]);
    }
}

//! `rio demo`: the purpose of Rio, in under a minute.

mod power_cut;

use std::{
    collections::BTreeMap,
    env, fs,
    path::{Path, PathBuf},
    time::{Duration, Instant},
};

use riopipe::{ConnectOptions, EngineKind, OpenOptions, StreamOptions, Volume};
use riopipe_lab::{
    demo_report::DemoReport,
    machine::Machine,
    rounds::Rounds,
    terminal::{Colour, Terminal},
    units,
    workload::Workload,
};
use riopipe_media::ssd::FLASH;
use serde::Serialize;

use super::{
    bench::window,
    volume::copy::{Bar, FileView, copy_failure},
};
use crate::{
    args::demo::Demo,
    connect::{open_failure, stream_failure},
    failure::{Code, Failure},
    file_copy::{self, Comparison, Source, WriteOptions},
    interrupt::Interrupt,
    load::Load,
    output::{Output, Report},
    own_targets::{OwnTargets, Plan, file_log},
    progress::Progress,
    volume_store::{STREAM, VolumeStore},
};

/// Number of targets, with one drive each.
const TARGETS: u32 = 2;
/// Size of each target's ordering log in bytes: that of the paper's PMR (§4.1).
const LOG_BYTES: u64 = 2 << 20;
/// The stripe unit in bytes.
const UNIT_BYTES: u32 = 64 << 10;
/// Number of writes in flight.
const DEPTH: u32 = 32;
/// Size of the smallest modelled drive in bytes: enough for the journal's area.
const DRIVE_BYTES_MIN: u64 = 256 << 20;
/// Bytes of the file per group.
const GROUP_BYTES: usize = 256 << 10;
/// Time for measuring the round trip to a target.
const TRIP_TIME: Duration = Duration::from_millis(400);

pub(super) fn run(args: &Demo, output: &Output) -> Result<(), Failure> {
    let file = match &args.file {
        Some(file) => file.clone(),
        // This is right even if the program on disk has been replaced meanwhile.
        None => env::current_exe().ok().filter(|p| p.exists()).unwrap_or("/proc/self/exe".into()),
    };
    let file_bytes = fs::metadata(&file)
        .map(|meta| meta.len())
        .map_err(|error| Failure::new(Code::Failed, file.display().to_string()).because(&error))?;
    let machine = Machine::this();
    let drive_bytes = (file_bytes / u64::from(TARGETS) + DRIVE_BYTES_MIN).next_multiple_of(1 << 20);
    // Before there is anything to leave behind.
    let interrupt = Interrupt::watch(output)?;
    let mut own = OwnTargets::start(&Plan {
        volume: "demo",
        targets: TARGETS,
        drives: 1,
        drive: format!("ssd:{},size={drive_bytes},lazy", FLASH.name),
        log: file_log(LOG_BYTES),
        unit_bytes: UNIT_BYTES,
        streams: 1,
        ..Plan::default()
    })?;
    let copied = copy(&own, &file, output, &interrupt)?;
    let measured = measure(args, &own, output, &interrupt)?;
    let cuts = power_cuts(&mut own, output, &interrupt)?;

    let drives = format!("{TARGETS} targets on loopback, a modelled {} each", FLASH.like);
    let verified = copied.comparison.is_equal();
    let workload = Workload::journal(1, DEPTH);
    let report =
        DemoReport::new(machine, &drives, (file_bytes, verified), &workload, &measured.rounds);
    let expected = Expected::new(&report, measured.trip_and_write_ns);
    let shown = Shown {
        report,
        file: FileView::of(&copied.comparison.header),
        path: file,
        file_groups: copied.groups,
        file_seconds: copied.seconds,
        expected,
        power_cut: cuts,
    };
    output.result(&shown)?;
    if !verified {
        let what = format!("{} did not come back as it was written", shown.path.display());
        return Err(Failure::new(Code::Differs, what));
    }
    match shown.power_cut.get(EngineKind::Rio.name()) {
        Some(cut) if !cut.is_prefix() => {
            Err(Failure::new(Code::Differs, "what the power cut left of rio's groups is no prefix"))
        }
        _ => Ok(()),
    }
}

/// Cuts the power in the middle of writing: with `rio`, and with `none`.
fn power_cuts(
    own: &mut OwnTargets,
    output: &Output,
    interrupt: &Interrupt,
) -> Result<BTreeMap<&'static str, power_cut::CutView>, Failure> {
    let engines = [EngineKind::Rio, EngineKind::None];
    let progress = Progress::steps(output, "", engines.len() as u64);
    let mut cuts = BTreeMap::new();
    for (engine, seed) in engines.into_iter().zip(1..) {
        interrupt.check()?;
        progress.set_message(format!("cutting the power while {engine} writes"));
        cuts.insert(engine.name(), power_cut::cut(own, engine, seed)?);
        progress.step();
    }
    Ok(cuts)
}

struct Copied {
    groups: u64,
    seconds: f64,
    comparison: Comparison,
}

/// Copies the file into the volume, opens the volume again and compares each byte.
fn copy(
    own: &OwnTargets,
    file: &Path,
    output: &Output,
    interrupt: &Interrupt,
) -> Result<Copied, Failure> {
    let begun = Instant::now();
    let written = with_store(own, interrupt, |store| {
        let mut watch = Bar::new(output, "copying", interrupt);
        let options = WriteOptions { group_bytes: GROUP_BYTES, ..WriteOptions::default() };
        Source::open(file)
            .and_then(|mut file| file_copy::write(store, &mut file, &options, &mut watch))
            .map_err(|error| copy_failure(&error))
    })?;
    let seconds = begun.elapsed().as_secs_f64();
    let comparison = with_store(own, interrupt, |store| {
        let mut watch = Bar::new(output, "comparing", interrupt);
        Source::open(file)
            .and_then(|mut file| file_copy::verify(store, Some(&mut file), &mut watch))
            .map_err(|error| copy_failure(&error))
    })?;
    Ok(Copied { groups: written.groups, seconds, comparison })
}

fn with_store<R>(
    own: &OwnTargets,
    interrupt: &Interrupt,
    work: impl FnOnce(&mut VolumeStore) -> Result<R, Failure>,
) -> Result<R, Failure> {
    let (volume, _) = Volume::open(own.volume(), own.members(), &OpenOptions::default())
        .map_err(|error| open_failure(&error))?;
    let stream =
        volume.stream(STREAM, &StreamOptions::default()).map_err(|error| stream_failure(&error))?;
    let mut store = VolumeStore::new(&volume, stream, interrupt.clone());
    let result = work(&mut store);
    let closed = store.close().map_err(|error| Failure::storage(&error));
    let result = result?;
    closed?;
    volume.close().map_err(|error| Failure::storage(&error))?;
    Ok(result)
}

struct MeasuredDemo {
    /// Latency of a 4 KiB or 8 KiB write at depth 1, from submission to completion, in ns.
    trip_and_write_ns: f64,
    rounds: Rounds<riopipe_lab::sample::Sample>,
}

/// Measures the journal with three engines, in turns.
fn measure(
    args: &Demo,
    own: &OwnTargets,
    output: &Output,
    interrupt: &Interrupt,
) -> Result<MeasuredDemo, Failure> {
    let load = |depth, time| Load {
        volume: own.volume().to_owned(),
        members: own.members().to_vec(),
        connect: ConnectOptions::default(),
        io_timeout: StreamOptions::default().timeout,
        workload: Workload::journal(1, depth),
        window: window(time),
        merge: true,
        cores: Vec::new(),
        shares_stream: false,
        moves: false,
    };
    let contenders = [EngineKind::Sync, EngineKind::Rio, EngineKind::None];
    let names = contenders.map(EngineKind::name);
    let progress =
        Progress::steps(output, "", 1 + u64::from(args.rounds) * contenders.len() as u64);
    progress.set_message("one write at a time, to see how long a trip takes");
    let trip = load(1, TRIP_TIME).run(EngineKind::None, interrupt, || None)?;
    progress.step();
    let journal = load(DEPTH, args.time);
    let rounds = Rounds::run(&names, args.rounds as usize, |index, round| {
        interrupt.check()?;
        progress.set_message(format!("round {}: {}", round + 1, names[index]));
        let sample = journal.run(contenders[index], interrupt, || None);
        progress.step();
        sample
    })?;
    Ok(MeasuredDemo { trip_and_write_ns: trip.latencies.summary().p50_ns as f64, rounds })
}

/// The ratio that follows from the drive's profile. docs/performance.md derives it.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
struct Expected {
    /// Measured time of a write at depth 1, in ns: a round trip, and the drive's time for the
    /// write.
    trip_and_write_ns: f64,
    /// The profile's time for a write into the drive's cache, in ns.
    write_ns: f64,
    /// Round trip to a target, in ns: the difference.
    trip_ns: f64,
    /// The profile's time for a FLUSH when nothing waits to be programmed, in ns.
    flush_ns: f64,
    /// Time of a group with `sync`, in ns: trip, write, trip, FLUSH.
    sync_group_ns: f64,
    /// The resulting groups per second of `sync`.
    sync_groups_per_s: f64,
    /// Ratio of the measured groups per second of `rio` to those.
    rio_over_sync: f64,
}

impl Expected {
    fn new(report: &DemoReport, trip_and_write_ns: f64) -> Self {
        let write_ns = (FLASH.write_command_ns + FLASH.write_latency_ns) as f64;
        let trip_ns = (trip_and_write_ns - write_ns).max(0.0);
        let flush_ns = FLASH.flush_base_ns as f64;
        let sync_group_ns = trip_ns + write_ns + trip_ns + flush_ns;
        let sync_groups_per_s = 1e9 / sync_group_ns;
        let rio = report.engines.get("rio").map_or(0.0, |figures| figures.groups_per_s);
        Self {
            trip_and_write_ns,
            write_ns,
            trip_ns,
            flush_ns,
            sync_group_ns,
            sync_groups_per_s,
            rio_over_sync: rio / sync_groups_per_s,
        }
    }

    fn text(&self, report: &DemoReport) -> String {
        let rio = report.engines.get("rio").map_or(0.0, |figures| figures.groups_per_s);
        let measured = report.ratios.get("rio_over_sync").copied().unwrap_or(0.0);
        format!(
            "Why: a group with sync takes trip {} + write {} + trip {} + FLUSH {} = {}.\n\
             In that time rio, at {}, makes {} groups: so rio / sync should be {}; it is {}.\n",
            units::time(self.trip_ns),
            units::time(self.write_ns),
            units::time(self.trip_ns),
            units::time(self.flush_ns),
            units::time(self.sync_group_ns),
            units::per_second(rio),
            units::ratio(self.rio_over_sync),
            units::ratio(self.rio_over_sync),
            units::ratio(measured),
        )
    }
}

/// The result of the demo.
#[derive(Debug, Serialize)]
struct Shown {
    #[serde(flatten)]
    report: DemoReport,
    file: FileView,
    path: PathBuf,
    file_groups: u64,
    file_seconds: f64,
    expected: Expected,
    /// By engine.
    power_cut: BTreeMap<&'static str, power_cut::CutView>,
}

impl Report for Shown {
    fn text(&self, terminal: &Terminal) -> String {
        let verdict = match self.report.verified {
            true => terminal.paint(Colour::Green, "verified byte for byte"),
            false => terminal.paint(Colour::Red, "NOT THE SAME when read back"),
        };
        format!(
            "{} ({}) copied through an ordered volume over two targets, in {} groups: {verdict}\n\n\
             {}{}\n{}",
            self.path.display(),
            units::bytes(self.report.file_bytes),
            self.file_groups,
            self.report.render(terminal),
            terminal.paint(Colour::Grey, &self.expected.text(&self.report)),
            self.cuts(terminal),
        )
    }
}

impl Shown {
    fn cuts(&self, terminal: &Terminal) -> String {
        let mut text = String::from(
            "Then the power of both targets was cut in the middle of writing, and came back:\n",
        );
        for (engine, cut) in self.power_cut.iter().rev() {
            text += &cut.text(engine, terminal);
        }
        text
    }
}

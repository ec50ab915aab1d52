//! `rio volume recover`

use std::path::PathBuf;

use riopipe::{InPlaceRange, RecoverOptions, Recovery, Steps, StreamRecovery, Volume};
use riopipe_lab::terminal::Terminal;
use serde::Serialize;

use crate::{
    args::volume::Recover,
    connect::{members_and_options, open_failure},
    failure::Failure,
    interrupt::Interrupt,
    output::{Output, Report},
    progress::Progress,
};

/// The steps of a recovery in which it has not claimed the volume yet.
const BEFORE_CLAIM: [&str; 3] = ["ask", "claim", "ask again"];

pub(super) fn run(args: &Recover, output: &Output) -> Result<(), Failure> {
    let (addresses, connect) = members_and_options(Some(&args.open.name), &args.open.members)?;
    let options = RecoverOptions {
        dry_run: args.dry_run,
        save_undone: args.save_undone.clone(),
        acknowledge: args.acknowledge,
        take_over: args.open.take_over,
        wait_for_lease: args.open.wait,
        accept_lost_log: args.open.accept_lost_log,
        connect,
    };
    let progress = Progress::steps(output, "connecting", 0);
    // A recovery that has begun is brief, and the volume is released after it. Before it begins,
    // a signal ends the program at once, because another owner may be waited for.
    let mut interrupt = Ok(None);
    let recovery = Volume::recover(&args.open.name, &addresses, &options, &mut |step| {
        if matches!(interrupt, Ok(None)) && !BEFORE_CLAIM.contains(&step.step) {
            interrupt = Interrupt::watch(output).map(Some);
        }
        progress.of(step.total as u64);
        progress.at(step.done as u64);
        progress.set_message(step.step);
    })
    .map_err(|error| open_failure(&error))?;
    drop(progress);
    // Nothing else has failed, so the recovery was not protected from signals, and is done.
    interrupt?;
    output.result(&View::new(recovery))
}

/// The findings and actions of a recovery, as text and as JSON.
#[derive(Serialize)]
struct View {
    schema: &'static str,
    volume: String,
    dry_run: bool,
    /// There was nothing to recover.
    nothing: bool,
    streams: Vec<StreamView>,
    steps_ms: StepsView,
    /// Number of log slots that the crash has torn.
    torn: u64,
    saved: Option<PathBuf>,
    #[serde(skip)]
    text: String,
}

#[derive(Serialize)]
struct StreamView {
    stream: u16,
    last: u64,
    tag: u64,
    found: u32,
    kept: u64,
    dropped: u64,
    replayed: u64,
    undone_blocks: u64,
    undone: Vec<RangeView>,
    in_place: Vec<InPlaceView>,
    log_given_up: bool,
    /// Fresh writes that were kept because of that.
    in_doubt: Vec<InPlaceView>,
    acknowledge: bool,
}

#[derive(Serialize)]
struct RangeView {
    lba: u64,
    blocks: u64,
}

#[derive(Serialize)]
struct InPlaceView {
    seq: u64,
    lba: u64,
    blocks: u64,
}

#[derive(Serialize)]
struct StepsView {
    connect: f64,
    claim: f64,
    list: f64,
    decide: f64,
    save: f64,
    undo: f64,
    flush: f64,
    settle: f64,
}

impl View {
    fn new(recovery: Recovery) -> Self {
        Self {
            schema: "rio-recovery/1",
            text: recovery.to_string(),
            nothing: recovery.is_nothing(),
            streams: recovery.streams.iter().map(StreamView::of).collect(),
            steps_ms: StepsView::of(&recovery.steps),
            volume: recovery.volume,
            dry_run: recovery.dry_run,
            torn: recovery.torn,
            saved: recovery.saved,
        }
    }
}

impl StreamView {
    fn of(stream: &StreamRecovery) -> Self {
        let ranges = stream.undone.iter();
        let listed = |writes: &[InPlaceRange]| {
            let view = |w: &InPlaceRange| InPlaceView {
                seq: w.seq.0,
                lba: w.range.lba,
                blocks: w.range.blocks,
            };
            writes.iter().map(view).collect()
        };
        Self {
            stream: stream.stream.0,
            last: stream.last.0,
            tag: stream.tag,
            found: stream.found,
            kept: stream.kept,
            dropped: stream.dropped,
            replayed: stream.replayed,
            undone_blocks: stream.undone_blocks(),
            undone: ranges.map(|r| RangeView { lba: r.lba, blocks: r.blocks }).collect(),
            in_place: listed(&stream.in_place),
            log_given_up: stream.log_given_up,
            in_doubt: listed(&stream.in_doubt),
            acknowledge: stream.acknowledge,
        }
    }
}

impl StepsView {
    fn of(steps: &Steps) -> Self {
        let ms = |time: std::time::Duration| time.as_secs_f64() * 1e3;
        Self {
            connect: ms(steps.connect),
            claim: ms(steps.claim),
            list: ms(steps.list),
            decide: ms(steps.decide),
            save: ms(steps.save),
            undo: ms(steps.undo),
            flush: ms(steps.flush),
            settle: ms(steps.settle),
        }
    }
}

impl Report for View {
    fn text(&self, _: &Terminal) -> String {
        self.text.clone()
    }
}

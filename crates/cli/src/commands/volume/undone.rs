//! `rio volume undone`: the blocks that a recovery has saved before it zeroed them.

use std::{
    path::PathBuf,
    time::{SystemTime, UNIX_EPOCH},
};

use riopipe::{
    BLOCK_BYTES, OpenOptions, OpeningState, Place, ReaderOptions, StreamOptions, Until, Volume,
    undone::{self, BlockNow, SavedExtent, UndoneFile},
};
use riopipe_lab::{
    table::{Align, Table},
    terminal::Terminal,
    units,
};
use serde::Serialize;

use crate::{
    args::volume::{Undone, UndoneApply, UndoneShow},
    connect::{open_failure, stream_failure, unchecked_members},
    failure::{Code, Failure},
    interrupt::Interrupt,
    output::{Output, Report},
};

/// The most blocks of one group that writes saved blocks back.
const GROUP_BLOCKS: u64 = 64;

pub(super) fn run(command: &Undone, output: &Output) -> Result<(), Failure> {
    match command {
        Undone::Show(args) => show(args, output),
        Undone::Apply(args) => apply(args, output),
    }
}

fn open_file(path: &std::path::Path) -> Result<UndoneFile, Failure> {
    undone::read(path).map_err(|error| {
        let code = match error {
            undone::ReadSavedError::Damaged { .. } | undone::ReadSavedError::Length { .. } => {
                Code::Differs
            }
            _ => Code::Failed,
        };
        Failure::new(code, error.to_string())
    })
}

fn show(args: &UndoneShow, output: &Output) -> Result<(), Failure> {
    let file = open_file(&args.file)?;
    output.result(&FileView::of(args.file.clone(), &file))
}

/// A run of blocks in the file that are adjacent in the volume and get the same treatment.
struct Run {
    /// The stream of the group that wrote them.
    stream: u16,
    /// The first block of the run, counted over all blocks of the file.
    in_file: u64,
    /// The first volume block.
    lba: u64,
    blocks: u64,
    /// Whether the blocks were written since.
    is_changed: bool,
}

fn apply(args: &UndoneApply, output: &Output) -> Result<(), Failure> {
    let file = open_file(&args.file)?;
    let name = args.volume.as_deref().or(file.name.as_deref());
    let (addresses, connect, _) = unchecked_members(name, &args.members)?;
    // The id decides whether it is the volume of the blocks: its name may have changed.
    let (info, outlook) =
        Volume::examine(None, &addresses, &connect).map_err(|error| open_failure(&error))?;
    check_origin(args, &file, &info)?;
    if let Some(error) = &outlook.refusal {
        return Err(open_failure(error));
    }
    if outlook.state == OpeningState::Unrecovered && args.dry_run {
        let message =
            format!("volume {:?} has something to recover, and a dry run does not", info.name);
        return Err(Failure::new(Code::Volume, message)
            .hint("`rio volume recover` first, or apply without --dry-run"));
    }
    let options = OpenOptions { wait_for_lease: args.wait, connect, ..OpenOptions::default() };
    let (volume, recovery) =
        Volume::open(&info.name, &addresses, &options).map_err(|error| open_failure(&error))?;
    if !recovery.is_nothing() {
        output.note(recovery.to_string());
    }
    let interrupt = Interrupt::watch(output)?;
    // Between the examination and the opening, another owner may have come and gone.
    let is_next = info.generation.checked_add(1) == Some(volume.stat().generation);
    let is_untouched = is_next && undone::zeroes_are_of_the_undo(file.generation, info.generation);
    let applied = compare(&file, &volume, args, is_untouched).and_then(|(runs, restored)| {
        if !args.dry_run {
            write_runs(&file, &volume, &runs, args, &interrupt)?;
        }
        Ok(Applied::of(args, &info.name, &runs, restored))
    });
    // The first failure is the cause; that of closing is its consequence.
    let closed = volume.close().map_err(|error| {
        Failure::new(Code::Storage, format!("can't close volume {:?}", info.name)).because(&error)
    });
    let applied = applied?;
    closed?;
    output.result(&applied)
}

/// Checks that the blocks are of this volume, and of its past unless `--force` accepts another one.
fn check_origin(
    args: &UndoneApply,
    file: &UndoneFile,
    info: &riopipe::VolumeInfo,
) -> Result<(), Failure> {
    let saved = (file.volume, file.generation);
    match undone::check_origin(saved, (info.id, info.generation)) {
        Ok(()) => Ok(()),
        Err(undone::NotOfVolume::Later { .. }) if args.force => Ok(()),
        Err(error) => {
            let path = args.file.display();
            let failure = Failure::new(Code::Volume, format!("{path}: {error}"));
            Err(match error {
                undone::NotOfVolume::Later { .. } => {
                    failure.hint("--force writes them all the same")
                }
                _ => failure,
            })
        }
    }
}

/// Compares the present content of the volume with the file. Returns the runs to be written, and the
/// number of blocks that have the saved content already. `is_untouched`: no owner had the volume since
/// the blocks were undone, so none of them was written.
fn compare(
    file: &UndoneFile,
    volume: &Volume,
    args: &UndoneApply,
    is_untouched: bool,
) -> Result<(Vec<Run>, u64), Failure> {
    let reader = volume.reader(&ReaderOptions::default());
    let (mut runs, mut restored, mut in_file) = (Vec::<Run>::new(), 0, 0);
    let mut saved = vec![0; GROUP_BLOCKS as usize * BLOCK_BYTES];
    let mut now = saved.clone();
    for SavedExtent { stream, range, .. } in &file.extents {
        let mut done = 0;
        while done < range.blocks {
            let blocks = (range.blocks - done).min(GROUP_BLOCKS);
            let bytes = blocks as usize * BLOCK_BYTES;
            let (saved, now) = (&mut saved[..bytes], &mut now[..bytes]);
            read_saved(file, in_file, saved)?;
            reader.read(range.lba + done, now, None).map_err(|error| {
                Failure::new(Code::Storage, format!("can't read volume block {}", range.lba + done))
                    .because(&error)
            })?;
            for at in 0..blocks {
                let block = at as usize * BLOCK_BYTES..(at as usize + 1) * BLOCK_BYTES;
                let is_changed = match BlockNow::of(&now[block.clone()], &saved[block]) {
                    BlockNow::Restored => {
                        restored += 1;
                        continue;
                    }
                    BlockNow::Undone => false,
                    BlockNow::Changed => true,
                };
                let (lba, in_file) = (range.lba + done + at, in_file + at);
                match runs.last_mut() {
                    Some(run)
                        if run.lba + run.blocks == lba
                            && run.in_file + run.blocks == in_file
                            && (run.stream, run.is_changed) == (stream.0, is_changed)
                            && run.blocks < GROUP_BLOCKS =>
                    {
                        run.blocks += 1;
                    }
                    _ => {
                        let stream = stream.0;
                        runs.push(Run { stream, in_file, lba, blocks: 1, is_changed });
                    }
                }
            }
            done += blocks;
            in_file += blocks;
        }
    }
    let mut changed = runs.iter().filter(|run| run.is_changed);
    if let Some(first) = changed.next()
        && !args.force
    {
        let blocks: u64 = first.blocks + changed.map(|run| run.blocks).sum::<u64>();
        let message = format!(
            "{blocks} of the blocks were written since they were undone, the first is volume block {}",
            first.lba
        );
        return Err(Failure::new(Code::Differs, message)
            .hint("--force overwrites them with the saved content"));
    }
    if let Some(first) = runs.first()
        && !is_untouched
        && !args.force
    {
        let blocks: u64 = runs.iter().map(|run| run.blocks).sum();
        let message = format!(
            "{blocks} of the blocks read as zeroes, the first is volume block {}, and may have been \
             written so: the volume was opened since they were undone, or the file does not name \
             the recovery that has undone them",
            first.lba
        );
        return Err(Failure::new(Code::Differs, message).hint(
            "--force writes the saved content over them, if nothing has written zeroes there. A dry \
             run, or an `apply` that was cut off, has opened the volume, too",
        ));
    }
    Ok((runs, restored))
}

fn read_saved(file: &UndoneFile, first: u64, into: &mut [u8]) -> Result<(), Failure> {
    file.read_blocks(first, into).map_err(|error| Failure::new(Code::Failed, error.to_string()))
}

/// Writes the runs back, each stream's own, in their order, and waits until they are durable.
///
/// A block that reads as zeroes is written as a fresh one: if a crash cuts the writes off, it is
/// zeroed again, and the file can be applied again. A block that was written since is overwritten in
/// place.
fn write_runs(
    file: &UndoneFile,
    volume: &Volume,
    runs: &[Run],
    args: &UndoneApply,
    interrupt: &Interrupt,
) -> Result<(), Failure> {
    let timeout = args.members.connect.io_timeout;
    let options = StreamOptions { timeout, ..StreamOptions::default() };
    for runs in runs.chunk_by(|one, next| one.stream == next.stream) {
        let id = runs[0].stream;
        let mut stream = volume.stream(id, &options).map_err(|error| stream_failure(&error))?;
        let failed = |what: &dyn std::error::Error| {
            Failure::new(Code::Storage, format!("writing back through stream {id}")).because(what)
        };
        let written = runs.iter().try_for_each(|run| {
            interrupt.check()?;
            let bytes = run.blocks as usize * BLOCK_BYTES;
            let mut buf = stream.buf(bytes).map_err(|error| failed(&error))?;
            read_saved(file, run.in_file, &mut buf)?;
            let place = if run.is_changed { Place::InPlace } else { Place::Fresh };
            let group = stream.group().write(run.lba, buf, place);
            group.submit_durable_or_wait(None).map_err(|error| failed(&error))?;
            Ok(())
        });
        let last = stream.last();
        let durable = match written {
            Ok(()) => stream.wait(Until::Durable(last), None).map_err(|error| failed(&error)),
            Err(failure) => Err(failure),
        };
        let closed = stream.close().map_err(|error| failed(&error));
        durable?;
        closed?;
    }
    Ok(())
}

/// The blocks in a file.
#[derive(Serialize)]
struct FileView {
    schema: &'static str,
    path: PathBuf,
    version: u32,
    volume: Option<String>,
    id: String,
    generation: Option<u32>,
    saved_unix_ms: Option<u64>,
    blocks: u64,
    bytes: u64,
    extents: Vec<ExtentView>,
}

#[derive(Serialize)]
struct ExtentView {
    stream: u16,
    seq: Option<u64>,
    lba: u64,
    blocks: u64,
}

impl FileView {
    fn of(path: PathBuf, file: &UndoneFile) -> Self {
        let unix_ms = |at: SystemTime| {
            let since = at.duration_since(UNIX_EPOCH).unwrap_or_default();
            u64::try_from(since.as_millis()).unwrap_or(u64::MAX)
        };
        let extent = |extent: &SavedExtent| ExtentView {
            stream: extent.stream.0,
            seq: Some(extent.seq.0).filter(|seq| *seq > 0),
            lba: extent.range.lba,
            blocks: extent.range.blocks,
        };
        Self {
            schema: "rio-undone/1",
            path,
            version: file.version,
            volume: file.name.clone(),
            id: file.volume.to_string(),
            generation: Some(file.generation).filter(|generation| *generation > 0),
            saved_unix_ms: file.saved_at.map(unix_ms),
            blocks: file.blocks(),
            bytes: file.blocks() * BLOCK_BYTES as u64,
            extents: file.extents.iter().map(extent).collect(),
        }
    }
}

impl Report for FileView {
    fn text(&self, terminal: &Terminal) -> String {
        let volume = match &self.volume {
            Some(name) => format!("volume {name:?} ({})", self.id),
            None => format!("volume {}", self.id),
        };
        let mut text = format!("{} undone blocks of {volume}", self.blocks);
        if let Some(ms) = self.saved_unix_ms {
            text += &format!(", saved at {}", utc(ms));
        }
        if let Some(generation) = self.generation {
            text += &format!(", generation {generation}");
        }
        text += &format!("\n{}; all checksums are right\n\n", units::bytes(self.bytes));
        let mut table = Table::new(&[
            ("stream", Align::Right),
            ("seq", Align::Right),
            ("first block", Align::Right),
            ("blocks", Align::Right),
        ]);
        for extent in &self.extents {
            table.row([
                extent.stream.to_string(),
                extent.seq.map_or_else(|| "-".to_owned(), |seq| seq.to_string()),
                extent.lba.to_string(),
                extent.blocks.to_string(),
            ]);
        }
        text + &table.render(terminal)
    }
}

/// A time in UTC, from its milliseconds since 1970: `2026-11-25 23:10:05 UTC`.
fn utc(unix_ms: u64) -> String {
    let (days, of_day) = (unix_ms / 86_400_000, unix_ms / 1000 % 86_400);
    // The civil date of a day, in eras of 400 years that begin on the first of March.
    let shifted = days + 719_468;
    let (era, of_era) = (shifted / 146_097, shifted % 146_097);
    let year_of_era = (of_era - of_era / 1460 + of_era / 36_524 - of_era / 146_096) / 365;
    let of_year = of_era - (365 * year_of_era + year_of_era / 4 - year_of_era / 100);
    let from_march = (5 * of_year + 2) / 153;
    let day = of_year - (153 * from_march + 2) / 5 + 1;
    let month = if from_march < 10 { from_march + 3 } else { from_march - 9 };
    let year = era * 400 + year_of_era + u64::from(month <= 2);
    let (hour, minute, second) = (of_day / 3600, of_day / 60 % 60, of_day % 60);
    format!("{year:04}-{month:02}-{day:02} {hour:02}:{minute:02}:{second:02} UTC")
}

/// The result of writing saved blocks back.
#[derive(Serialize)]
struct Applied {
    schema: &'static str,
    volume: String,
    path: PathBuf,
    dry_run: bool,
    /// Blocks that read as zeroes, and were written.
    written: u64,
    /// Blocks that were written since they were undone, and were overwritten.
    overwritten: u64,
    /// Blocks that had the saved content already.
    already_there: u64,
    ranges: Vec<RangeView>,
}

#[derive(Serialize)]
struct RangeView {
    stream: u16,
    lba: u64,
    blocks: u64,
    overwritten: bool,
}

impl Applied {
    fn of(args: &UndoneApply, volume: &str, runs: &[Run], already_there: u64) -> Self {
        let blocks = |changed: bool| {
            runs.iter().filter(|run| run.is_changed == changed).map(|run| run.blocks).sum()
        };
        let range = |run: &Run| RangeView {
            stream: run.stream,
            lba: run.lba,
            blocks: run.blocks,
            overwritten: run.is_changed,
        };
        Self {
            schema: "rio-undone-apply/1",
            volume: volume.to_owned(),
            path: args.file.clone(),
            dry_run: args.dry_run,
            written: blocks(false),
            overwritten: blocks(true),
            already_there,
            ranges: runs.iter().map(range).collect(),
        }
    }
}

impl Report for Applied {
    fn text(&self, _: &Terminal) -> String {
        let verb = if self.dry_run { "would write" } else { "wrote" };
        let mut text = format!(
            "{verb} {} blocks of {} back to volume {:?}\n",
            self.written + self.overwritten,
            self.path.display(),
            self.volume
        );
        for RangeView { stream, lba, blocks, overwritten } in &self.ranges {
            let over = if *overwritten { ", over newer content" } else { "" };
            text += &format!("  stream {stream}: {blocks} blocks from block {lba} on{over}\n");
        }
        if self.already_there > 0 {
            text += &format!("{} blocks have that content already\n", self.already_there);
        }
        text
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn times_are_printed_in_utc() {
        for (seconds, text) in [
            (0, "1970-01-01 00:00:00 UTC"),
            (951_782_400, "2000-02-29 00:00:00 UTC"),
            (1_795_648_205, "2026-11-25 23:10:05 UTC"),
            (4_107_542_399, "2100-02-28 23:59:59 UTC"),
        ] {
            assert_eq!(utc(seconds * 1000), text);
        }
    }
}

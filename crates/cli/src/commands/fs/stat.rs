//! `rio fs stat`

use std::path::Path;

use riopipe_fs::{
    control::{AskError, ask_stat},
    image::{ImageState, image_state},
    mount_stat::{Figure, FigureKind, MountStat},
    mounts::MountPoint,
};
use riopipe_lab::{
    table::{Align, Table},
    terminal::{Colour, Terminal},
    units,
};
use riopipe_metrics::StageStat;
use serde::Serialize;

use super::{ask_failure, failures::image_failure, mount_of, not_mounted};
use crate::{
    args::fs::Stat as Args,
    failure::{Code, Failure},
    live::{self, Figures, Unanswered},
    output::{Output, Report},
    stage_table,
};

pub(super) fn run(args: &Args, output: &Output) -> Result<(), Failure> {
    let is_file = Path::new(&args.place).is_file();
    let mut mount = mount_of(&args.place)?;
    // The process of an image may have ended without an unmount.
    if is_file
        && let Some(found) = &mount
        && let Err(AskError::NotServed { .. }) = ask_stat(found)
    {
        mount = None;
    }
    match mount {
        Some(mount) => live::show_each(None, args.watch, output, || ask(&mount)),
        None if !is_file => Err(not_mounted(&args.place)),
        None if args.watch.is_some() => Err(Failure::new(
            Code::Usage,
            format!("{} is not mounted: only a mounted one has figures", args.place),
        )),
        None => {
            let path = Path::new(&args.place);
            let state = image_state(path).map_err(|error| image_failure(&error))?;
            output.result(&StateView::of(path, &state))
        }
    }
}

fn ask(mount: &MountPoint) -> Result<MountStat, Unanswered> {
    ask_stat(mount).map_err(|error| ask_failure(&error).into())
}

impl Figures for MountStat {
    fn since(&self, before: &Self) -> Self {
        Self::since(self, before)
    }

    fn text(&self, before: Option<&Self>, terminal: &Terminal) -> String {
        let span = units::time(self.uptime_s * 1e9);
        let head = match before.is_some() {
            true => format!("{}: the last {span}", self.directory),
            false => format!("{} {}: mounted for {span}", self.directory, self.version),
        };
        let mut text = format!(
            "{}, mode {}, {}\n",
            terminal.paint(Colour::Bold, &head),
            self.mode,
            self.place
        );
        match &self.failure {
            Some(why) => {
                let state = terminal.paint(Colour::Red, "read-only after an error");
                text += &format!("{state}: {why}\n");
            }
            None if self.read_only => text += "read-only, as it was mounted\n",
            None => {}
        }
        for target in self.targets.iter().filter(|target| !target.connected) {
            let state = terminal.paint(Colour::Red, "unreachable");
            text += &format!("target {}: {state}, calls wait for it\n", target.address);
        }
        text.push('\n');
        text += &figures(self, before.is_some(), terminal);
        text.push('\n');
        text + &times(self, terminal)
    }
}

/// A line for each figure. Counters have a rate, too, if they are of an interval.
fn figures(stat: &MountStat, is_interval: bool, terminal: &Terminal) -> String {
    let mut table =
        Table::new(&[("figure", Align::Left), ("", Align::Right), ("per second", Align::Right)]);
    for Figure { name, kind, label, values, .. } in stat.figures() {
        for (of, value) in values {
            // Most reasons never occur.
            if label == Some("reason") && value == 0 {
                continue;
            }
            let name = name.replace('_', " ");
            let name = match label {
                Some(label) => format!("{name}, {label} {of}"),
                None => name,
            };
            let is_rate = is_interval && kind == FigureKind::Counter;
            let rate = match is_rate {
                true => units::count(value as f64 / stat.uptime_s.max(1e-9)),
                false => String::new(),
            };
            table.row([name, value.to_string(), rate]);
        }
    }
    table.render(terminal)
}

fn times(stat: &MountStat, terminal: &Terminal) -> String {
    match stat.total.first() {
        Some(&StageStat { count, p50_ns, p99_ns, max_ns, .. }) if count > 0 => {
            let time = |ns: u64| units::time(ns as f64);
            format!(
                "{count} fsyncs were measured: p50 {}, p99 {}, max {}\n\n{}",
                time(p50_ns),
                time(p99_ns),
                time(max_ns),
                stage_table::render(&stat.stages, terminal)
            )
        }
        _ => "No fsync was measured.\n".to_owned(),
    }
}

/// The state of a file.
#[derive(Debug, Serialize)]
struct StateView {
    schema: &'static str,
    place: String,
    state: &'static str,
    bytes: u64,
    uuid: String,
    /// Errors that the superblock records, since the last check that found no damage.
    errors: u32,
}

impl StateView {
    fn of(file: &Path, state: &ImageState) -> Self {
        Self {
            schema: MountStat::SCHEMA,
            place: file.display().to_string(),
            state: match (state.is_in_use, state.is_dirty) {
                (true, _) => "mounted",
                (false, true) => "unrecovered",
                (false, false) => "unmounted",
            },
            bytes: state.bytes,
            uuid: state.uuid.clone(),
            errors: state.errors,
        }
    }
}

impl Report for StateView {
    fn text(&self, _: &Terminal) -> String {
        let Self { place, state, uuid, .. } = self;
        let errors = match self.errors {
            0 => String::new(),
            errors => format!(
                ", {errors} errors recorded: `rio fs fsck` checks it, and clears that if \
                 it finds no damage"
            ),
        };
        format!("{place}: {state}, {}, UUID {uuid}{errors}\n", units::bytes(self.bytes))
    }
}

#[cfg(test)]
mod tests {
    use riopipe_fs::mount_stat::{AreaStat, FallbackStat};

    use super::*;

    fn stat(uptime_s: f64, fsyncs: u64) -> MountStat {
        let fallback = |reason: &str, count| FallbackStat { reason: reason.to_owned(), count };
        MountStat {
            place: "/srv/disk.img".into(),
            directory: "/mnt".into(),
            mode: "rio".into(),
            version: "0.1.0".into(),
            uptime_s,
            fsyncs,
            fallbacks: vec![fallback("kind", 0), fallback("name", 5)],
            areas: vec![AreaStat { stream: 1, used_blocks: 3, blocks: 2000 }],
            ..MountStat::default()
        }
    }

    #[test]
    fn a_line_for_each_figure_and_the_reason_of_a_failure() {
        let before = stat(2.0, 100);
        let text = before.text(None, &Terminal::PLAIN);
        assert!(text.starts_with("/mnt 0.1.0: mounted for 2.00 s, mode rio, /srv/disk.img\n\n"));
        assert!(text.contains("fallbacks, reason name") && !text.contains("reason kind"), "{text}");
        assert!(text.contains("area used blocks, stream 1"), "{text}");
        assert!(text.ends_with("No fsync was measured.\n"), "{text}");

        let why = Some("writing file data: the target is gone".to_owned());
        let now = MountStat { failure: why, read_only: true, ..stat(4.0, 500) };
        let text = Figures::since(&now, &before).text(Some(&before), &Terminal::PLAIN);
        assert!(text.starts_with("/mnt: the last 2.00 s, mode rio"), "{text}");
        assert!(text.contains("read-only after an error: writing file data"), "{text}");
        let line = text.lines().find(|line| line.starts_with("fsyncs ")).unwrap();
        let words: Vec<&str> = line.split_whitespace().collect();
        assert_eq!(words[1..].join(" "), format!("400 {}", units::count(200.0)), "{line:?}");
    }
}

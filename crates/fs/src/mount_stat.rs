//! The figures of a mounted file system: one table for text, JSON and Prometheus.

use std::fmt;
use std::path::Path;
use std::sync::Arc;

use prometheus_client::collector::Collector;
use prometheus_client::encoding::DescriptorEncoder;
use riopipe::TargetStat;
use riopipe_fs_core::fs::{Fs, FsLoad, FsStat, JournalMode};
use riopipe_metrics::exposition::{
    connected, counter, counters, gauge, gauges, info, process, text, times, uptime,
};
use riopipe_metrics::{StageStat, Start, StatError, StatSource, to_json, with_shares};
use serde::{Deserialize, Serialize};

use crate::backing::Backing;
use crate::fsync_stages::FsyncTimes;
use crate::storage::VolumeStorage;

/// The figures of a mounted file system. `rio fs stat` shows them, and `/stat` serves them as JSON.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct MountStat {
    /// The name and version of this format: [`MountStat::SCHEMA`].
    pub schema: String,
    /// The volume, or the path of the image.
    pub place: String,
    /// Always [`MountStat::STATE`].
    pub state: String,
    /// The directory.
    pub directory: String,
    /// How `fsync` keeps order: `rio` or `ext4`.
    pub mode: String,
    /// The version of the program that serves it.
    pub version: String,
    /// The time of the mount, milliseconds since 1970 UTC.
    pub mounted_unix_ms: u64,
    /// How long it has been mounted, seconds.
    pub uptime_s: f64,
    /// Whether changes are refused: it was mounted so, or an error has made it so.
    pub read_only: bool,
    /// The error that has made it read-only.
    #[serde(skip_serializing_if = "Option::is_none", default)]
    pub failure: Option<String>,
    /// The targets of the volume.
    pub targets: Vec<TargetStat>,
    /// Calls of `fsync` and `fdatasync`, and synchronous writes.
    pub fsyncs: u64,
    /// File-level records: fsyncs that waited once.
    pub records: u64,
    /// Fsyncs that fell back to a main commit, by reason.
    pub fallbacks: Vec<FallbackStat>,
    /// Barriers.
    pub barriers: u64,
    /// Main commits.
    pub commits: u64,
    /// Blocks that were written home from the main journal.
    pub checkpoint_blocks: u64,
    /// Files with a barrier that were not submitted yet.
    pub barriers_held: u64,
    /// Pages of files that were not submitted yet.
    pub dirty_pages: u64,
    /// Pages of files in memory: those, and submitted ones that the drive has not confirmed.
    pub pages: u64,
    /// The number of pages at which a write waits, and drops some.
    pub pages_max: u64,
    /// Blocks of the main journal that are in use.
    pub journal_used_blocks: u64,
    /// Blocks of the main journal.
    pub journal_blocks: u64,
    /// The areas of file-level records.
    pub areas: Vec<AreaStat>,
    /// Errors that the superblock records, since the last check that found no damage.
    pub errors: u64,
    /// The time of fsyncs in each stage.
    pub stages: Vec<StageStat>,
    /// The time of whole fsyncs: one entry, `fsync`.
    pub total: Vec<StageStat>,
}

/// How many fsyncs fell back to a main commit for one reason.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct FallbackStat {
    /// The reason: see `docs/riofs.md`.
    pub reason: String,
    /// The number.
    pub count: u64,
}

/// The area of file-level records of a stream.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct AreaStat {
    /// The stream.
    pub stream: u16,
    /// Its blocks with records that no main commit has made obsolete.
    pub used_blocks: u64,
    /// All of its blocks.
    pub blocks: u64,
}

/// Whether a figure only rises.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum FigureKind {
    /// It counts events since the mount.
    Counter,
    /// It is a state.
    Gauge,
}

/// A figure, with one value, or with one for each value of a label.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Figure {
    /// Its name: `rio_fs_NAME` is that of the metric.
    pub name: &'static str,
    /// Its meaning, in one line.
    pub help: &'static str,
    /// Whether it only rises.
    pub kind: FigureKind,
    /// The label: its name, or nothing.
    pub label: Option<&'static str>,
    /// The values, each with that of the label.
    pub values: Vec<(String, u64)>,
}

impl MountStat {
    /// The value of [`schema`](Self::schema). Its number changes if the meaning of a key changes.
    pub const SCHEMA: &str = "rio-fs-stat/2";
    /// The state of a mounted file system, in words.
    pub const STATE: &str = "mounted";

    /// All figures.
    #[must_use]
    pub fn figures(&self) -> Vec<Figure> {
        let one = |kind| {
            move |name, help, value| {
                let values = vec![(String::new(), value)];
                Figure { name, help, kind, label: None, values }
            }
        };
        let (counter, gauge) = (one(FigureKind::Counter), one(FigureKind::Gauge));
        let fallback = |fallback: &FallbackStat| (fallback.reason.clone(), fallback.count);
        let area = |value: fn(&AreaStat) -> u64| {
            self.areas.iter().map(move |area| (area.stream.to_string(), value(area))).collect()
        };
        vec![
            counter("fsyncs", "Calls of fsync and fdatasync, and synchronous writes", self.fsyncs),
            counter("records", "File-level records: fsyncs that waited once", self.records),
            Figure {
                name: "fallbacks",
                help: "Fsyncs that fell back to a main commit",
                kind: FigureKind::Counter,
                label: Some("reason"),
                values: self.fallbacks.iter().map(fallback).collect(),
            },
            counter("barriers", "Barriers", self.barriers),
            counter("commits", "Main commits", self.commits),
            counter(
                "checkpoint_blocks",
                "Blocks that were written home from the main journal",
                self.checkpoint_blocks,
            ),
            gauge(
                "barriers_held",
                "Files with a barrier that were not submitted yet",
                self.barriers_held,
            ),
            gauge("dirty_pages", "Pages of files that were not submitted yet", self.dirty_pages),
            gauge(
                "pages",
                "Pages of files in memory: those, and what the drive has not confirmed",
                self.pages,
            ),
            gauge(
                "pages_max",
                "Number of pages in memory at which a write waits, and drops some",
                self.pages_max,
            ),
            gauge(
                "journal_used_blocks",
                "Blocks of the main journal that are in use",
                self.journal_used_blocks,
            ),
            gauge("journal_blocks", "Blocks of the main journal", self.journal_blocks),
            Figure {
                name: "area_used_blocks",
                help: "Blocks of the area of file-level records that are in use",
                kind: FigureKind::Gauge,
                label: Some("stream"),
                values: area(|area| area.used_blocks),
            },
            Figure {
                name: "area_blocks",
                help: "Blocks of the area of file-level records",
                kind: FigureKind::Gauge,
                label: Some("stream"),
                values: area(|area| area.blocks),
            },
            gauge("read_only", "Whether changes are refused", self.read_only.into()),
            gauge("failed", "Whether an error is the reason", self.failure.is_some().into()),
            gauge("errors", "Errors that the superblock records", self.errors),
        ]
    }

    /// The figures of the time from `before` to `self`: `uptime_s` is the length of that time, and
    /// counters and stages have what happened in it. If it was mounted again after `before`, returns
    /// the figures since the new mount.
    #[must_use]
    pub fn since(&self, before: &Self) -> Self {
        let mut since = self.clone();
        if !self.is_same_mount(before) {
            return since;
        }
        since.uptime_s -= before.uptime_s;
        since.stages = riopipe_metrics::since(&self.stages, &before.stages);
        since.total = riopipe_metrics::since(&self.total, &before.total);
        for (now, then) in [
            (&mut since.fsyncs, before.fsyncs),
            (&mut since.records, before.records),
            (&mut since.barriers, before.barriers),
            (&mut since.commits, before.commits),
            (&mut since.checkpoint_blocks, before.checkpoint_blocks),
        ] {
            *now = now.saturating_sub(then);
        }
        for now in &mut since.fallbacks {
            let then = before.fallbacks.iter().find(|then| then.reason == now.reason);
            now.count = now.count.saturating_sub(then.map_or(0, |then| then.count));
        }
        since
    }

    /// The figures as OpenMetrics text for Prometheus.
    ///
    /// # Errors
    /// [`StatError::Encoding`], on a bug only.
    pub fn open_metrics(&self) -> Result<String, StatError> {
        Ok(text(MetricsPage(self.clone()))?)
    }

    /// Whether both figures are of the same mount.
    #[must_use]
    pub fn is_same_mount(&self, other: &Self) -> bool {
        self.directory == other.directory && self.mounted_unix_ms == other.mounted_unix_ms
    }
}

/// The source of the figures of a mounted file system. It does not wait for the storage.
pub struct MountStatSource {
    fs: Arc<Fs>,
    storage: Arc<VolumeStorage>,
    times: Arc<FsyncTimes>,
    place: String,
    directory: String,
    mode: JournalMode,
    mounted: Start,
}

impl MountStatSource {
    /// The figures of a file system that was mounted now.
    #[must_use]
    pub fn new(
        fs: Arc<Fs>,
        backing: &Backing,
        place: &str,
        directory: &Path,
        mode: JournalMode,
    ) -> Self {
        Self {
            fs,
            storage: Arc::clone(backing.storage()),
            times: Arc::clone(backing.fsync_times()),
            place: place.to_owned(),
            directory: directory.display().to_string(),
            mode,
            mounted: Start::now(),
        }
    }

    /// The figures now.
    #[must_use]
    pub fn stat(&self) -> MountStat {
        let FsStat { commits, checkpoint_blocks, fsyncs, records, barriers, fallbacks, .. } =
            self.fs.stat();
        let FsLoad { dirty_pages, pages, pages_max, held, journal, areas, errors } = self.fs.load();
        let fallbacks = fallbacks.map(|(why, count)| {
            let reason = why.name().to_owned();
            FallbackStat { reason, count }
        });
        let areas = areas.into_iter().map(|(stream, fill)| AreaStat {
            stream: stream.0,
            used_blocks: fill.used,
            blocks: fill.blocks,
        });
        let times = self.times.snapshot();
        let stages = times.stages().filter(|(_, seen)| seen.count() > 0);
        MountStat {
            schema: MountStat::SCHEMA.to_owned(),
            place: self.place.clone(),
            state: MountStat::STATE.to_owned(),
            directory: self.directory.clone(),
            mode: self.mode.name().to_owned(),
            version: env!("CARGO_PKG_VERSION").to_owned(),
            mounted_unix_ms: self.mounted.unix_ms,
            uptime_s: self.mounted.uptime_s(),
            read_only: self.fs.is_read_only(),
            failure: self.fs.failure(),
            targets: self.storage.targets(),
            fsyncs,
            records,
            fallbacks: fallbacks.into(),
            barriers,
            commits,
            checkpoint_blocks,
            barriers_held: held,
            dirty_pages,
            pages,
            pages_max,
            journal_used_blocks: journal.used,
            journal_blocks: journal.blocks,
            areas: areas.collect(),
            errors,
            stages: with_shares(stages.map(|(stage, seen)| (stage.name(), seen.clone()))),
            total: with_shares([("fsync", times.total().clone())]),
        }
    }
}

impl StatSource for MountStatSource {
    fn about(&self) -> &str {
        "The metrics of a mounted RioFS"
    }

    fn open_metrics(&self) -> Result<String, StatError> {
        self.stat().open_metrics()
    }

    fn json(&self) -> Result<String, StatError> {
        to_json(&self.stat())
    }

    fn health(&self) -> Result<(), StatError> {
        match self.fs.failure() {
            Some(why) => Err(StatError::Unhealthy(format!("it is read-only: {why}"))),
            None => Ok(()),
        }
    }
}

/// The figures as a page of OpenMetrics text.
#[derive(Debug)]
struct MetricsPage(MountStat);

impl Collector for MetricsPage {
    fn encode(&self, mut encoder: DescriptorEncoder<'_>) -> fmt::Result {
        let Self(stat) = self;
        let about = [
            ("place", stat.place.clone()),
            ("directory", stat.directory.clone()),
            ("mode", stat.mode.clone()),
            ("version", stat.version.clone()),
        ];
        info(&mut encoder, "rio_fs", "The mounted file system", &about)?;
        uptime(&mut encoder, "How long it has been mounted", stat.uptime_s)?;
        let targets = stat.targets.iter();
        connected(&mut encoder, targets.map(|t| (&*t.address, &*t.subnqn, t.connected)))?;
        for Figure { name, help, kind, label, values } in stat.figures() {
            let name = format!("rio_fs_{name}");
            if let (None, &[(_, value)]) = (label, values.as_slice()) {
                match kind {
                    FigureKind::Counter => counter(&mut encoder, &name, help, value)?,
                    FigureKind::Gauge => gauge(&mut encoder, &name, help, value)?,
                }
                continue;
            }
            let values = values.into_iter().map(|(of, value)| {
                let labels: Vec<_> = label.map(|label| (label, of)).into_iter().collect();
                (labels, value)
            });
            match kind {
                FigureKind::Counter => counters(&mut encoder, &name, help, values)?,
                FigureKind::Gauge => gauges(&mut encoder, &name, help, values)?,
            }
        }
        let help = "Time of fsyncs in each stage; the stages add up to the whole";
        times(&mut encoder, "rio_fs_fsync_stage", help, &stat.stages)?;
        let help = "Time of whole fsyncs";
        times(&mut encoder, "rio_fs_fsync", help, &stat.total)?;
        process(&mut encoder)
    }
}

#[cfg(test)]
mod tests {
    use riopipe::stages::Distribution;

    use super::*;

    fn stat(uptime_s: f64, count: u64) -> MountStat {
        let waits = Distribution::from_filled(&[(31, count)], 31 * count, 31);
        MountStat {
            schema: MountStat::SCHEMA.to_owned(),
            place: "/srv/disk.img".to_owned(),
            state: MountStat::STATE.to_owned(),
            directory: "/mnt".to_owned(),
            mode: "rio".to_owned(),
            mounted_unix_ms: 1_000,
            uptime_s,
            failure: Some("writing file data: gone".to_owned()),
            read_only: true,
            fsyncs: count,
            records: count,
            fallbacks: vec![FallbackStat { reason: "name".to_owned(), count }],
            barriers: count,
            commits: count,
            checkpoint_blocks: count,
            barriers_held: 3,
            dirty_pages: 5,
            pages: 6,
            pages_max: 8,
            journal_used_blocks: 7,
            journal_blocks: 4_000,
            areas: vec![AreaStat { stream: 1, used_blocks: 9, blocks: 2_000 }],
            stages: with_shares([("wait_record", waits.clone())]),
            total: with_shares([("fsync", waits)]),
            ..MountStat::default()
        }
    }

    #[test]
    fn between_two_readings_counters_count_and_states_stay() {
        let (before, now) = (stat(10.0, 100), stat(15.0, 160));
        let since = now.since(&before);
        assert_eq!((since.uptime_s, since.stages[0].count, since.total[0].count), (5.0, 60, 60));
        for (figure, now) in since.figures().into_iter().zip(now.figures()) {
            match figure.kind {
                FigureKind::Counter => assert_eq!(figure.values[0].1, 60, "{}", figure.name),
                FigureKind::Gauge => assert_eq!(figure, now),
            }
        }
        let mounted_again = MountStat { mounted_unix_ms: 2_000, ..now };
        assert_eq!(mounted_again.since(&before), mounted_again);
    }

    #[test]
    fn each_figure_is_in_the_json_and_in_the_metrics() {
        let stat = stat(1.5, 2);
        let json = serde_json::to_value(&stat).unwrap();
        let page = text(MetricsPage(stat.clone())).unwrap();
        for figure in stat.figures() {
            let kind = match figure.kind {
                FigureKind::Counter => "counter",
                FigureKind::Gauge => "gauge",
            };
            let line = format!("# TYPE rio_fs_{} {kind}", figure.name);
            assert!(page.lines().any(|found| found == line), "no {line:?} in\n{page}");
            let is_key = figure.label.is_some() || figure.name == "failed";
            assert!(is_key || !json[figure.name].is_null(), "{}", figure.name);
        }
        for line in [
            "rio_fs_fsyncs_total 2",
            "rio_fs_fallbacks_total{reason=\"name\"} 2",
            "rio_fs_area_used_blocks{stream=\"1\"} 9",
            "rio_fs_read_only 1",
            "rio_fs_fsync_stage_seconds_count{stage=\"wait_record\"} 2",
            "rio_fs_fsync_seconds_count{stage=\"fsync\"} 2",
            "# EOF",
        ] {
            assert!(page.lines().any(|found| found == line), "no {line:?} in\n{page}");
        }
        assert_eq!(serde_json::from_value::<MountStat>(json).unwrap(), stat);
    }
}

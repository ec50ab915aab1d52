//! The figures of an open volume.

use std::fmt;
use std::sync::{Arc, Weak};

use prometheus_client::collector::Collector;
use prometheus_client::encoding::DescriptorEncoder;
use riopipe_metrics::exposition::{connected, gauges, info, process, stages, text, uptime};
use riopipe_metrics::{StageStat, StatError, StatSource, to_json, with_shares};
use riopipe_order::attribute::StreamId;
use riopipe_session::stages::ONE_IN;
use serde::{Deserialize, Serialize};

use crate::background::BackgroundThread;
use crate::failure::StreamFailure;
use crate::open_volume::{OpenVolume, Server};
use crate::published_marks::PublishedMarks;

/// The figures of an open volume. `rio volume stat` shows them, and `/stat` serves them as JSON.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct VolumeStat {
    /// The name and version of this format: [`VolumeStat::SCHEMA`].
    pub schema: String,
    /// The volume's name.
    pub volume: String,
    /// The engine with which the volume was opened.
    pub engine: String,
    /// The owner's generation.
    pub generation: u32,
    /// The library's version.
    pub version: String,
    /// The time at which the volume was opened, milliseconds since 1970 UTC.
    pub opened_unix_ms: u64,
    /// How long the volume has been open, seconds.
    pub uptime_s: f64,
    /// The volume's targets, in the order of its members.
    pub targets: Vec<TargetStat>,
    /// The open streams, in the order of their ids.
    pub streams: Vec<StreamStat>,
    /// On average one group in this number is traced.
    pub sampled_one_in: u64,
    /// The time of the traced groups in each stage of the initiator, for all streams together, in the
    /// order in which a group passes through the stages.
    pub stages: Vec<StageStat>,
}

/// A target of an open volume.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct TargetStat {
    /// The target's address, as `host:port`.
    pub address: String,
    /// The NQN of its subsystem.
    pub subnqn: String,
    /// Whether there is an association with the target, as far as the initiator has detected. While
    /// there is none, streams wait for the target.
    pub connected: bool,
}

/// The marks of an open stream. A mark is the seq of a group, and seqs continue when the volume is
/// opened again: marks are not counts since the opening.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct StreamStat {
    /// The number of the stream in its volume, from 0.
    pub id: u16,
    /// The seq of the last group that is complete, with all earlier ones.
    pub complete: u64,
    /// The seq of the last group that is durable, with all earlier ones.
    pub durable: u64,
    /// Whether the stream has failed, and has not been reopened.
    pub failed: bool,
}

impl VolumeStat {
    /// The value of [`schema`](Self::schema). Its number changes if the meaning of a key changes.
    pub const SCHEMA: &str = "rio-volume-stat/1";

    /// The figures of the time from `before` to `self`: `uptime_s` is the length of that time, and
    /// `stages` has its traced groups. Marks stay as they are in `self`. If the volume was opened again
    /// after `before`, returns the figures since the new opening.
    #[must_use]
    pub fn since(&self, before: &Self) -> Self {
        let mut since = self.clone();
        if self.is_same_opening(before) {
            since.uptime_s -= before.uptime_s;
            since.stages = riopipe_metrics::since(&self.stages, &before.stages);
        }
        since
    }

    /// Whether both figures are of the same opening of the same volume.
    #[must_use]
    pub fn is_same_opening(&self, other: &Self) -> bool {
        self.volume == other.volume
            && self.generation == other.generation
            && self.opened_unix_ms == other.opened_unix_ms
    }
}

impl OpenVolume {
    /// Reads the figures. `open_streams` has the published marks of the open streams. Waits for no
    /// stream.
    pub(crate) fn stat(
        &self,
        open_streams: Vec<(StreamId, Arc<PublishedMarks<StreamFailure>>)>,
    ) -> VolumeStat {
        let target_stat = |server: &Arc<Server>| TargetStat {
            address: server.name.to_string(),
            subnqn: server.addr.nqn.clone().unwrap_or_default(),
            connected: server.target.absence().is_none(),
        };
        let stream_stats = open_streams.into_iter().map(|(id, published_marks)| {
            let marks = published_marks.marks();
            StreamStat {
                id: id.0,
                complete: marks.complete.0,
                durable: marks.durable.0,
                failed: published_marks.has_failed(),
            }
        });
        let stages = self.stages.snapshot().map(|(stage, times)| (stage.name(), times));
        VolumeStat {
            schema: VolumeStat::SCHEMA.into(),
            volume: self.name.clone(),
            engine: self.engine.name().into(),
            generation: self.generation,
            version: env!("CARGO_PKG_VERSION").into(),
            opened_unix_ms: self.opened_at.unix_ms,
            uptime_s: self.opened_at.uptime_s(),
            targets: self.servers.iter().map(target_stat).collect(),
            streams: stream_stats.collect(),
            sampled_one_in: ONE_IN,
            stages: with_shares(stages),
        }
    }
}

/// The figures of a volume, without keeping it open.
pub(crate) struct VolumeStatSource {
    pub(crate) volume: Weak<OpenVolume>,
    pub(crate) background: Weak<BackgroundThread>,
}

impl VolumeStatSource {
    fn stat(&self) -> Result<VolumeStat, StatError> {
        // The references end with this function, before the figures are sent. So they do not keep the
        // volume open during the transfer.
        let volume = self.volume.upgrade().ok_or(StatError::Gone("the volume has been closed"))?;
        // There is no background thread if only a reader keeps the volume open. Then no stream is open.
        let open_streams = match self.background.upgrade() {
            Some(background) => background.published_marks(),
            None => Vec::new(),
        };
        Ok(volume.stat(open_streams))
    }
}

impl StatSource for VolumeStatSource {
    fn about(&self) -> &str {
        "A Rio volume's metrics"
    }

    fn open_metrics(&self) -> Result<String, StatError> {
        Ok(text(MetricsPage(self.stat()?))?)
    }

    fn json(&self) -> Result<String, StatError> {
        to_json(&self.stat()?)
    }

    fn health(&self) -> Result<(), StatError> {
        let stat = self.stat()?;
        match stat.streams.iter().find(|stream| stream.failed) {
            Some(stream) => Err(StatError::Unhealthy(format!(
                "stream {} of the volume has failed, and was not reopened",
                stream.id
            ))),
            None => Ok(()),
        }
    }
}

/// The figures as a page of OpenMetrics text.
#[derive(Debug)]
struct MetricsPage(VolumeStat);

impl Collector for MetricsPage {
    fn encode(&self, mut encoder: DescriptorEncoder<'_>) -> fmt::Result {
        let Self(stat) = self;
        let volume_labels = [
            ("volume", stat.volume.clone()),
            ("engine", stat.engine.clone()),
            ("generation", stat.generation.to_string()),
            ("version", stat.version.clone()),
        ];
        info(&mut encoder, "rio_volume", "The open volume", &volume_labels)?;
        uptime(&mut encoder, "How long the volume has been open", stat.uptime_s)?;
        let targets = stat.targets.iter();
        connected(&mut encoder, targets.map(|t| (&*t.address, &*t.subnqn, t.connected)))?;
        // For each stream, its label and one of its figures.
        let per_stream = |figure: fn(&StreamStat) -> u64| {
            let labels = |stream: &StreamStat| [("stream", stream.id.to_string())];
            stat.streams.iter().map(move |stream| (labels(stream), figure(stream)))
        };
        let complete = per_stream(|stream| stream.complete);
        let help = "The last complete group of the stream";
        gauges(&mut encoder, "rio_stream_complete_group", help, complete)?;
        let durable = per_stream(|stream| stream.durable);
        let help = "The last durable group of the stream";
        gauges(&mut encoder, "rio_stream_durable_group", help, durable)?;
        let failed = per_stream(|stream| stream.failed.into());
        let help = "Whether the stream has failed";
        gauges(&mut encoder, "rio_stream_failed", help, failed)?;
        process(&mut encoder)?;
        stages(&mut encoder, &stat.stages)
    }
}

#[cfg(test)]
mod tests {
    use riopipe_session::stages::Distribution;

    use super::*;

    fn stat(uptime_s: f64, complete: u64, wire: &[(u64, u64)]) -> VolumeStat {
        let sum = wire.iter().map(|(ns, count)| ns * count).sum();
        let wire = Distribution::from_filled(wire, sum, wire.last().map_or(0, |(ns, _)| *ns));
        let target = |port: u16, connected| TargetStat {
            address: format!("127.0.0.1:{port}"),
            subnqn: "nqn.2026-11.com.example:d".into(),
            connected,
        };
        VolumeStat {
            schema: VolumeStat::SCHEMA.into(),
            volume: "journal".into(),
            engine: "rio".into(),
            generation: 7,
            version: "0".into(),
            opened_unix_ms: 1_000,
            uptime_s,
            targets: vec![target(1, true), target(2, false)],
            streams: vec![
                StreamStat { id: 0, complete, durable: complete - 1, failed: false },
                StreamStat { id: 3, complete: 9, durable: 9, failed: true },
            ],
            sampled_one_in: ONE_IN,
            stages: with_shares([("wire", wire)]),
        }
    }

    #[test]
    fn between_two_readings_stages_count_and_marks_stay() {
        let before = stat(10.0, 100, &[(31, 1)]);
        let now = stat(15.0, 160, &[(31, 3)]);
        let since = now.since(&before);
        assert_eq!((since.uptime_s, since.streams[0].complete), (5.0, 160));
        assert_eq!((since.stages[0].count, since.stages[0].sum_ns), (2, 62));
        let opened_again = VolumeStat { generation: 8, ..now };
        assert_eq!(opened_again.since(&before), opened_again);
        let json = to_json(&opened_again).unwrap();
        assert!(
            json.starts_with("{\"schema\":\"rio-volume-stat/1\",\"volume\":\"journal\""),
            "{json}"
        );
    }

    #[test]
    fn the_text_has_the_lines_of_openmetrics() {
        let page = text(MetricsPage(stat(1.5, 100, &[(100, 2)]))).unwrap();
        for line in [
            "# TYPE rio_volume info",
            "rio_uptime_seconds 1.5",
            "rio_target_connected{target=\"127.0.0.1:2\",subnqn=\"nqn.2026-11.com.example:d\"} 0",
            "rio_stream_complete_group{stream=\"0\"} 100",
            "rio_stream_durable_group{stream=\"0\"} 99",
            "rio_stream_failed{stream=\"0\"} 0",
            "rio_stream_failed{stream=\"3\"} 1",
            "rio_stages_sampled_one_in 256.0",
            "rio_stage_seconds_count{stage=\"wire\"} 2",
            "# EOF",
        ] {
            assert!(page.lines().any(|found| found == line), "no {line:?} in\n{page}");
        }
        let info = "rio_volume_info{volume=\"journal\",engine=\"rio\",generation=\"7\"";
        assert!(page.contains(info), "{page}");
    }
}

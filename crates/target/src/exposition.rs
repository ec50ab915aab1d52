//! The metrics of a target as OpenMetrics text for Prometheus.

use std::fmt;

use prometheus_client::collector::Collector;
use prometheus_client::encoding::{DescriptorEncoder, EncodeMetric};
use prometheus_client::metrics::MetricType;
use prometheus_client::metrics::counter::ConstCounter;
use riopipe_metrics::exposition::{counters, gauge, gauges, info, process, stages, text, uptime};
use riopipe_metrics::{StatError, StatSource};

use crate::counters::Counter;
use crate::hosts::HOST_COUNTERS;
use crate::log_fill;
use crate::stat::{MetricsSource, PartStat, Stat};

impl StatSource for MetricsSource {
    fn about(&self) -> &str {
        "A Rio target's metrics"
    }

    fn open_metrics(&self) -> Result<String, StatError> {
        Ok(encode_open_metrics(self.stat())?)
    }

    fn json(&self) -> Result<String, StatError> {
        riopipe_metrics::to_json(&self.stat())
    }

    fn health(&self) -> Result<(), StatError> {
        // The log is asked first: a target without writes has no stream that could have failed.
        if let Some(log) = self.log.upgrade()
            && let Err(error) = log.check()
        {
            let why = format!("the ordering log ({}) has failed: {error}", log.describe());
            return Err(StatError::Unhealthy(why));
        }
        match self.stat().counter(Counter::LogFailed.name()) {
            0 => Ok(()),
            _ => Err(StatError::Unhealthy(
                "the ordering log could not be written: its streams have failed; the target's \
                 messages have the reason"
                    .into(),
            )),
        }
    }
}

/// The statistics as OpenMetrics text.
fn encode_open_metrics(stat: Stat) -> Result<String, fmt::Error> {
    text(Page(stat))
}

/// The page that Prometheus reads: all metrics of one reading.
#[derive(Debug)]
struct Page(Stat);

impl Collector for Page {
    fn encode(&self, mut encoder: DescriptorEncoder<'_>) -> fmt::Result {
        let Self(stat) = self;
        let about = [("subnqn", stat.subnqn.as_str()), ("version", stat.version.as_str())];
        info(&mut encoder, "rio_target", "The target", &about)?;
        let connections = stat.connections as f64;
        gauge(&mut encoder, "rio_connections", "Queues that are connected now", connections)?;
        gauge(&mut encoder, "rio_reactors", "Threads that serve", stat.reactors as f64)?;
        uptime(&mut encoder, "How long the target has been serving", stat.uptime_s)?;
        log_fill::encode(&stat.log, &mut encoder)?;
        for counter in Counter::ALL {
            let name = format!("rio_{}", counter.name());
            let descriptor =
                encoder.encode_descriptor(&name, counter.help(), None, MetricType::Counter)?;
            ConstCounter::new(stat.counter(counter.name())).encode(descriptor)?;
        }
        parts(&mut encoder, "namespace", "nsid", &drive_counters(), &stat.namespaces)?;
        parts(&mut encoder, "volume", "volume", &drive_counters(), &stat.volumes)?;
        parts(&mut encoder, "host", "host", &HOST_COUNTERS, &stat.hosts)?;
        process(&mut encoder)?;
        stages(&mut encoder, &stat.stages)
    }
}

/// The counters of a drive: name and description.
fn drive_counters() -> Vec<(&'static str, &'static str)> {
    Counter::OF_DRIVE.iter().map(|counter| (counter.name(), counter.help())).collect()
}

/// Encodes the counters of namespaces, volumes or hosts. The part's name is the label `label`.
fn parts(
    encoder: &mut DescriptorEncoder<'_>,
    kind: &str,
    label: &'static str,
    names: &[(&str, &str)],
    parts: &[PartStat],
) -> fmt::Result {
    for (name, help) in names {
        let value = |part: &PartStat| {
            let count = part.counters.get(*name).copied().unwrap_or(0);
            ([(label, part.name.clone())], count)
        };
        let values = parts.iter().map(value);
        counters(encoder, &format!("rio_{kind}_{name}"), &format!("By {kind}: {help}"), values)?;
    }
    let connections = parts.iter().filter_map(|part| {
        part.connections.map(|count| ([(label, part.name.clone())], count as f64))
    });
    let help = format!("By {kind}: connections now");
    match kind {
        "namespace" => Ok(()),
        _ => gauges(encoder, &format!("rio_{kind}_connections"), &help, connections),
    }
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeMap;

    use riopipe_metrics::with_shares;
    use riopipe_session::stages::Distribution;

    use super::*;
    use crate::log_fill::{LogStat, LogVolumeStat};

    fn part(name: &str, connections: Option<usize>, counter: &str, count: u64) -> PartStat {
        let counters = BTreeMap::from([(counter.into(), count)]);
        PartStat { name: name.into(), connections, counters }
    }

    #[test]
    fn the_text_has_the_lines_of_openmetrics() {
        let seen = Distribution::from_filled(&[(100, 2), (1_000, 1), (1 << 36, 1)], 5_000, 1 << 36);
        let page = encode_open_metrics(Stat {
            schema: Stat::SCHEMA.into(),
            subnqn: "nqn.2026-11.com.example:\"d\"".into(),
            version: "0.1.0".into(),
            started_unix_ms: 0,
            uptime_s: 1.5,
            reactors: 2,
            connections: 3,
            log: LogStat {
                bytes: 2 << 20,
                used_bytes: 12_288,
                volumes: vec![LogVolumeStat {
                    volume: "07".into(),
                    bytes: 4096,
                    slots: 120,
                    used_slots: 40,
                    stream_slots: 60,
                    fullest_stream_slots: 30,
                }],
            },
            counters: BTreeMap::from([("writes".into(), 7)]),
            namespaces: vec![part("1", None, "written_bytes", 4096)],
            volumes: vec![part("4f1e", Some(3), "drive_errors", 1)],
            hosts: vec![part("nqn.\"h\"", Some(2), "problems", 9)],
            sampled_one_in: 256,
            stages: with_shares([("device", seen)]),
        })
        .unwrap();
        for line in [
            "# TYPE rio_target info",
            "# TYPE rio_writes counter",
            "# HELP rio_writes Writes handed to drives, ordered or not",
            "rio_writes_total 7",
            "rio_flushes_total 0",
            "rio_connections 3.0",
            "rio_log_bytes 2097152.0",
            "rio_log_used_bytes 12288.0",
            "rio_log_volume_bytes{volume=\"07\"} 4096.0",
            "rio_log_slots{volume=\"07\"} 120.0",
            "rio_log_used_slots{volume=\"07\"} 40.0",
            "rio_log_fullest_stream_ratio{volume=\"07\"} 0.5",
            "# UNIT rio_uptime_seconds seconds",
            "rio_uptime_seconds 1.5",
            "# TYPE rio_stage_seconds histogram",
            "rio_namespace_written_bytes_total{nsid=\"1\"} 4096",
            "rio_namespace_flushes_total{nsid=\"1\"} 0",
            "rio_volume_drive_errors_total{volume=\"4f1e\"} 1",
            "rio_volume_connections{volume=\"4f1e\"} 3.0",
            "rio_host_problems_total{host=\"nqn.\\\"h\\\"\"} 9",
            "rio_host_connections{host=\"nqn.\\\"h\\\"\"} 2.0",
            "# TYPE process_cpu_seconds counter",
            "rio_stage_seconds_count{stage=\"device\"} 4",
            "rio_stage_seconds_bucket{le=\"+Inf\",stage=\"device\"} 4",
            "# EOF",
        ] {
            assert!(page.lines().any(|found| found == line), "no {line:?} in\n{page}");
        }
        assert!(page.contains("subnqn=\"nqn.2026-11.com.example:\\\"d\\\"\""), "{page}");
    }
}

//! The metrics of a target as OpenMetrics text for Prometheus.

use std::fmt;

use prometheus_client::collector::Collector;
use prometheus_client::encoding::{DescriptorEncoder, EncodeMetric};
use prometheus_client::metrics::MetricType;
use prometheus_client::metrics::counter::ConstCounter;
use riopipe_metrics::exposition::{gauge, info, stages, text, uptime};
use riopipe_metrics::{StatError, StatSource};

use crate::counters::Counter;
use crate::stat::{MetricsSource, Stat};

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
        for counter in Counter::ALL {
            let name = format!("rio_{}", counter.name());
            let descriptor =
                encoder.encode_descriptor(&name, counter.help(), None, MetricType::Counter)?;
            ConstCounter::new(stat.counter(counter.name())).encode(descriptor)?;
        }
        stages(&mut encoder, &stat.stages)
    }
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeMap;

    use riopipe_metrics::with_shares;
    use riopipe_session::stages::Distribution;

    use super::*;

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
            counters: BTreeMap::from([("writes".into(), 7)]),
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
            "# UNIT rio_uptime_seconds seconds",
            "rio_uptime_seconds 1.5",
            "# TYPE rio_stage_seconds histogram",
            "rio_stage_seconds_count{stage=\"device\"} 4",
            "rio_stage_seconds_bucket{le=\"+Inf\",stage=\"device\"} 4",
            "# EOF",
        ] {
            assert!(page.lines().any(|found| found == line), "no {line:?} in\n{page}");
        }
        assert!(page.contains("subnqn=\"nqn.2026-11.com.example:\\\"d\\\"\""), "{page}");
    }
}

//! The figures as Prometheus reads them: OpenMetrics text.

use std::fmt;

use prometheus_client::collector::Collector;
use prometheus_client::encoding::{DescriptorEncoder, EncodeMetric, text};
use prometheus_client::metrics::MetricType;
use prometheus_client::metrics::counter::ConstCounter;
use prometheus_client::metrics::exemplar::Exemplar;
use prometheus_client::metrics::gauge::ConstGauge;
use prometheus_client::registry::{Registry, Unit};

use crate::counters::Counter;
use crate::stat::{StageStat, Stat};

/// What the text is, as HTTP says it.
pub(crate) const CONTENT_TYPE: &str = "application/openmetrics-text; version=1.0.0; charset=utf-8";

/// Bounds of the buckets told, as powers of two of nanoseconds: 128 ns to 8.6 s.
const POWERS: std::ops::RangeInclusive<u32> = 7..=33;

type Labels = [(&'static str, String); 1];
type NoExemplars = std::collections::HashMap<usize, Exemplar<Labels, f64>>;

/// The text.
pub(crate) fn metrics(stat: Stat) -> Result<String, fmt::Error> {
    let mut registry = Registry::default();
    registry.register_collector(Box::new(Page(stat)));
    let mut page = String::new();
    text::encode(&mut page, &registry)?;
    Ok(page)
}

#[derive(Debug)]
struct Page(Stat);

impl Collector for Page {
    fn encode(&self, mut to: DescriptorEncoder<'_>) -> fmt::Result {
        let Self(stat) = self;
        let about = [("subnqn", stat.subnqn.as_str()), ("version", stat.version.as_str())];
        to.encode_descriptor("rio_target", "The target", None, MetricType::Info)?
            .encode_info(&about)?;
        for (name, help, value) in [
            ("rio_connections", "Queues that are connected now", stat.connections as f64),
            ("rio_reactors", "Threads that serve", stat.reactors as f64),
            (
                "rio_stages_sampled_one_in",
                "One ordered write in so many is traced",
                stat.sampled_one_in as f64,
            ),
        ] {
            let gauge = ConstGauge::new(value);
            gauge.encode(to.encode_descriptor(name, help, None, MetricType::Gauge)?)?;
        }
        let uptime = ConstGauge::new(stat.uptime_s);
        let help = "How long the target has been serving";
        let unit = Some(&Unit::Seconds);
        uptime.encode(to.encode_descriptor("rio_uptime", help, unit, MetricType::Gauge)?)?;
        for what in Counter::ALL {
            let name = format!("rio_{}", what.name());
            let counter = ConstCounter::new(stat.counter(what.name()));
            counter.encode(to.encode_descriptor(
                &name,
                what.help(),
                None,
                MetricType::Counter,
            )?)?;
        }
        let help = "Time of traced ordered writes in each stage; the stages add up to the whole";
        let mut family = to.encode_descriptor("rio_stage", help, unit, MetricType::Histogram)?;
        for stage in &stat.stages {
            let labels: Labels = [("stage", stage.stage.clone())];
            let sum = stage.sum_ns as f64 * 1e-9;
            family.encode_family(&labels)?.encode_histogram(
                sum,
                stage.count,
                &buckets(stage),
                None::<&NoExemplars>,
            )?;
        }
        Ok(())
    }
}

/// Upper bounds, s, and how many are between them and the one before.
fn buckets(stage: &StageStat) -> Vec<(f64, u64)> {
    let seen = stage.distribution();
    let mut before = 0;
    let mut buckets: Vec<(f64, u64)> = POWERS
        .map(|power| {
            let below = seen.below(1 << power);
            let count = below - std::mem::replace(&mut before, below);
            ((1u64 << power) as f64 * 1e-9, count)
        })
        .collect();
    buckets.push((f64::INFINITY, seen.count() - before));
    buckets
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeMap;

    use riopipe_session::stages::Distribution;

    use super::*;
    use crate::stat::with_shares;

    #[test]
    fn what_prometheus_reads() {
        let seen = Distribution::from_filled(&[(100, 2), (1_000, 1), (1 << 36, 1)], 5_000, 1 << 36);
        let page = metrics(Stat {
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
        // Cumulative, and the last finite bound has all but the one that is beyond it.
        let counts: Vec<u64> = page
            .lines()
            .filter(|line| line.starts_with("rio_stage_seconds_bucket"))
            .map(|line| line.rsplit_once(' ').unwrap().1.parse().unwrap())
            .collect();
        assert_eq!(counts.len(), POWERS.count() + 1);
        assert!(counts.is_sorted());
        assert_eq!((counts[0], counts[2], counts[3], counts[26]), (2, 2, 3, 3));
    }
}

//! Metrics as OpenMetrics text for Prometheus, and the encoding that all sources share.

use std::fmt;

use prometheus_client::collector::Collector;
use prometheus_client::encoding::{
    DescriptorEncoder, EncodeGaugeValue, EncodeLabelSet, EncodeMetric, text,
};
use prometheus_client::metrics::MetricType;
use prometheus_client::metrics::counter::ConstCounter;
use prometheus_client::metrics::exemplar::Exemplar;
use prometheus_client::metrics::gauge::ConstGauge;
use prometheus_client::registry::{Registry, Unit};
use riopipe_session::stages::ONE_IN;

pub use crate::process::process;
use crate::stage::StageStat;

/// The content type of the text in HTTP.
pub const CONTENT_TYPE: &str = "application/openmetrics-text; version=1.0.0; charset=utf-8";

/// Bounds of a stage's buckets, as powers of two of nanoseconds: 128 ns to 8.6 s.
const POWERS: std::ops::RangeInclusive<u32> = 7..=33;

type Labels = [(&'static str, String); 1];
type NoExemplars = std::collections::HashMap<usize, Exemplar<Labels, f64>>;

/// The text that `page` encodes.
///
/// # Errors
/// Those of `page`; writing to memory doesn't fail.
pub fn text(page: impl Collector) -> Result<String, fmt::Error> {
    let mut registry = Registry::default();
    registry.register_collector(Box::new(page));
    let mut text = String::new();
    text::encode(&mut text, &registry)?;
    Ok(text)
}

/// Encodes constant properties of the source as labels.
///
/// # Errors
/// None when writing to memory.
pub fn info(
    to: &mut DescriptorEncoder<'_>,
    name: &str,
    help: &str,
    about: &impl EncodeLabelSet,
) -> fmt::Result {
    to.encode_descriptor(name, help, None, MetricType::Info)?.encode_info(about)
}

/// Encodes one value that can rise and fall.
///
/// # Errors
/// None when writing to memory.
pub fn gauge(
    to: &mut DescriptorEncoder<'_>,
    name: &str,
    help: &str,
    value: impl EncodeGaugeValue,
) -> fmt::Result {
    let encoder = to.encode_descriptor(name, help, None, MetricType::Gauge)?;
    ConstGauge::new(value).encode(encoder)
}

/// Encodes several such values, distinguished by their labels.
///
/// # Errors
/// None when writing to memory.
pub fn gauges<L: EncodeLabelSet, V: EncodeGaugeValue>(
    to: &mut DescriptorEncoder<'_>,
    name: &str,
    help: &str,
    values: impl IntoIterator<Item = (L, V)>,
) -> fmt::Result {
    let mut family = to.encode_descriptor(name, help, None, MetricType::Gauge)?;
    for (labels, value) in values {
        ConstGauge::new(value).encode(family.encode_family(&labels)?)?;
    }
    Ok(())
}

/// Encodes for each target of an open volume, by its address and its NQN, whether it is connected.
///
/// # Errors
/// None when writing to memory.
pub fn connected<'a>(
    to: &mut DescriptorEncoder<'_>,
    targets: impl IntoIterator<Item = (&'a str, &'a str, bool)>,
) -> fmt::Result {
    let help = "Whether the target is connected, as far as the volume has detected";
    let values = targets.into_iter().map(|(address, subnqn, is_connected)| {
        ([("target", address), ("subnqn", subnqn)], u64::from(is_connected))
    });
    gauges(to, "rio_target_connected", help, values)
}

/// Encodes a count that only rises.
///
/// # Errors
/// None when writing to memory.
pub fn counter(to: &mut DescriptorEncoder<'_>, name: &str, help: &str, value: u64) -> fmt::Result {
    let encoder = to.encode_descriptor(name, help, None, MetricType::Counter)?;
    ConstCounter::new(value).encode(encoder)
}

/// Encodes a count that only rises, for each of several labels.
///
/// # Errors
/// None when writing to memory.
pub fn counters<L: EncodeLabelSet>(
    to: &mut DescriptorEncoder<'_>,
    name: &str,
    help: &str,
    values: impl IntoIterator<Item = (L, u64)>,
) -> fmt::Result {
    let mut family = to.encode_descriptor(name, help, None, MetricType::Counter)?;
    for (labels, value) in values {
        ConstCounter::new(value).encode(family.encode_family(&labels)?)?;
    }
    Ok(())
}

/// Encodes the uptime of the source: `rio_uptime_seconds`.
///
/// # Errors
/// None when writing to memory.
pub fn uptime(to: &mut DescriptorEncoder<'_>, help: &str, seconds: f64) -> fmt::Result {
    let unit = Some(&Unit::Seconds);
    let encoder = to.encode_descriptor("rio_uptime", help, unit, MetricType::Gauge)?;
    ConstGauge::new(seconds).encode(encoder)
}

/// Encodes the time of traced writes in each stage: `rio_stage_seconds` by `stage`, and
/// `rio_stages_sampled_one_in`.
///
/// # Errors
/// None when writing to memory.
pub fn stages(to: &mut DescriptorEncoder<'_>, stages: &[StageStat]) -> fmt::Result {
    let help = "Of a busy stream one ordered write in so many is traced";
    gauge(to, "rio_stages_sampled_one_in", help, ONE_IN as f64)?;
    let help = "Time of traced ordered writes in each stage; the stages add up to the whole";
    times(to, "rio_stage", help, stages)
}

/// Encodes times in stages as histograms: `NAME_seconds` by `stage`.
///
/// # Errors
/// None when writing to memory.
pub fn times(
    to: &mut DescriptorEncoder<'_>,
    name: &str,
    help: &str,
    stages: &[StageStat],
) -> fmt::Result {
    let unit = Some(&Unit::Seconds);
    let mut family = to.encode_descriptor(name, help, unit, MetricType::Histogram)?;
    for stage in stages {
        let labels: Labels = [("stage", stage.stage.clone())];
        family.encode_family(&labels)?.encode_histogram(
            stage.sum_ns as f64 * 1e-9,
            stage.count,
            &buckets(stage),
            None::<&NoExemplars>,
        )?;
    }
    Ok(())
}

/// Upper bounds in s, each with the number of values between it and the one before.
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
    use riopipe_session::stages::Distribution;

    use super::*;
    use crate::stage::with_shares;

    #[derive(Debug)]
    struct Page(Vec<StageStat>);

    impl Collector for Page {
        fn encode(&self, mut to: DescriptorEncoder<'_>) -> fmt::Result {
            info(&mut to, "rio_thing", "The thing", &[("name", "\"t\"")])?;
            uptime(&mut to, "How long", 1.5)?;
            let groups = [([("stream", "0")], 7_u64), ([("stream", "1")], u64::MAX)];
            gauges(&mut to, "rio_groups", "Groups", groups)?;
            stages(&mut to, &self.0)
        }
    }

    #[test]
    fn the_text_has_the_lines_of_openmetrics() {
        let seen = Distribution::from_filled(&[(100, 2), (1_000, 1), (1 << 36, 1)], 5_000, 1 << 36);
        let page = text(Page(with_shares([("device", seen)]))).unwrap();
        for line in [
            "# TYPE rio_thing info",
            "rio_thing_info{name=\"\\\"t\\\"\"} 1",
            "# UNIT rio_uptime_seconds seconds",
            "rio_uptime_seconds 1.5",
            "rio_groups{stream=\"0\"} 7",
            "rio_groups{stream=\"1\"} 18446744073709551615",
            "# TYPE rio_stage_seconds histogram",
            "rio_stage_seconds_count{stage=\"device\"} 4",
            "rio_stage_seconds_bucket{le=\"+Inf\",stage=\"device\"} 4",
            "# EOF",
        ] {
            assert!(page.lines().any(|found| found == line), "no {line:?} in\n{page}");
        }
        // The counts are cumulative; the last finite bound covers all but the one value beyond it.
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

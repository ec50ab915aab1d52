//! Latency histograms and their summary.

use hdrhistogram::Histogram;
use serde::{Deserialize, Serialize};

/// Longest latency that is distinguished, in ns; longer ones count as this one: 100 s.
const MAX_NS: u64 = 100_000_000_000;

/// Latencies in nanoseconds, to three digits. It takes about 200 KiB, so there is one per thread
/// and run.
#[derive(Clone, Debug)]
pub struct Latencies {
    histogram: Histogram<u64>,
    /// The last latency, and the length of its run. Writes that were sent and completed together
    /// have the same latency, and a search for each would affect the measurement.
    run: (u64, u64),
}

/// The summary of [`Latencies`], in nanoseconds.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct LatencySummary {
    /// Number of recorded values.
    pub count: u64,
    /// Mean.
    pub mean_ns: f64,
    /// The median.
    pub p50_ns: u64,
    /// The 99th percentile.
    pub p99_ns: u64,
    /// The 99.9th percentile.
    pub p999_ns: u64,
    /// The largest value.
    pub max_ns: u64,
}

impl Default for Latencies {
    fn default() -> Self {
        Self::new()
    }
}

impl Latencies {
    /// An empty histogram.
    #[must_use]
    pub fn new() -> Self {
        // 1 ns to 100 s with three digits: constants that hdrhistogram accepts.
        let histogram = Histogram::new_with_bounds(1, MAX_NS, 3).expect("valid bounds");
        Self { histogram, run: (0, 0) }
    }

    /// Records one latency.
    #[inline]
    pub fn record(&mut self, ns: u64) {
        self.record_n(ns, 1);
    }

    /// Records `count` equal latencies: those of one batch of answers.
    #[inline]
    pub fn record_n(&mut self, ns: u64, count: u64) {
        if ns == self.run.0 {
            self.run.1 += count;
        } else {
            self.end_run();
            self.run = (ns, count);
        }
    }

    fn end_run(&mut self) {
        let (ns, count) = std::mem::take(&mut self.run);
        // Even zero values would affect the minimum and the maximum.
        if count > 0 {
            self.histogram.saturating_record_n(ns.max(1), count);
        }
    }

    /// Adds the latencies of another thread or another round.
    pub fn add(&mut self, other: &Self) {
        // Same bounds, so it cannot fail.
        self.histogram.add(&other.histogram).expect("same bounds");
        self.record_n(other.run.0, other.run.1);
    }

    /// Removes all values, after the warm-up.
    pub fn clear(&mut self) {
        self.histogram.clear();
        self.run = (0, 0);
    }

    /// The summary.
    #[must_use]
    pub fn summary(&self) -> LatencySummary {
        let mut all = self.clone();
        all.end_run();
        let all = all.histogram;
        if all.is_empty() {
            return LatencySummary::default();
        }
        LatencySummary {
            count: all.len(),
            mean_ns: all.mean(),
            p50_ns: all.value_at_quantile(0.5),
            p99_ns: all.value_at_quantile(0.99),
            p999_ns: all.value_at_quantile(0.999),
            max_ns: all.max(),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn about(value: u64, wanted: u64) -> bool {
        value.abs_diff(wanted) <= wanted / 500
    }

    #[test]
    fn quantiles_to_three_digits() {
        let mut all = Latencies::new();
        let mut more = Latencies::new();
        for i in 1..=5_000 {
            all.record(i * 1_000);
            more.record((5_000 + i) * 1_000);
        }
        all.add(&more);
        let summary = all.summary();
        assert_eq!(summary.count, 10_000);
        assert!(about(summary.p50_ns, 5_000_000), "{summary:?}");
        assert!(about(summary.p99_ns, 9_900_000), "{summary:?}");
        assert!(about(summary.p999_ns, 9_990_000), "{summary:?}");
        assert!(about(summary.max_ns, 10_000_000), "{summary:?}");
        assert!(about(summary.mean_ns as u64, 5_000_500), "{summary:?}");
    }

    #[test]
    fn equal_values_in_a_row_are_all_counted() {
        let mut all = Latencies::new();
        for _ in 0..3 {
            all.record(5);
        }
        all.add(&all.clone());
        all.record_n(9, 0);
        let summary = all.summary();
        assert_eq!((summary.count, summary.max_ns), (6, 5));
        all.record_n(9, 2);
        all.record(5);
        let summary = all.summary();
        assert_eq!((summary.count, summary.p50_ns, summary.max_ns), (9, 5, 9));
    }

    #[test]
    fn values_beyond_the_range_are_clamped() {
        let mut all = Latencies::new();
        assert_eq!(all.summary(), LatencySummary::default());
        all.record(0);
        all.record_n(u64::MAX, 2);
        assert_eq!(all.summary().count, 3);
        assert!(all.summary().max_ns >= MAX_NS);
        all.clear();
        assert_eq!(all.summary().count, 0);
    }
}

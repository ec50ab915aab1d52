//! Latency histograms and what is reported of them.

use hdrhistogram::Histogram;
use serde::{Deserialize, Serialize};

/// Longest latency told apart; longer ones count as this: 100 s.
const MAX_NS: u64 = 100_000_000_000;

/// Latencies in nanoseconds, to three digits. About 200 KiB, so one per thread and run.
#[derive(Clone, Debug)]
pub struct Latencies(Histogram<u64>);

/// What is reported of [`Latencies`], in nanoseconds.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct LatencySummary {
    /// Values recorded.
    pub count: u64,
    /// Mean.
    pub mean_ns: f64,
    /// Half are faster.
    pub p50_ns: u64,
    /// 99 of 100 are faster.
    pub p99_ns: u64,
    /// 999 of 1000 are faster.
    pub p999_ns: u64,
    /// The slowest.
    pub max_ns: u64,
}

impl Default for Latencies {
    fn default() -> Self {
        Self::new()
    }
}

impl Latencies {
    /// None yet.
    #[must_use]
    pub fn new() -> Self {
        // 1 ns to 100 s with three digits: constants that hdrhistogram accepts.
        Self(Histogram::new_with_bounds(1, MAX_NS, 3).expect("valid bounds"))
    }

    /// One more.
    #[inline]
    pub fn record(&mut self, ns: u64) {
        self.0.saturating_record(ns.max(1));
    }

    /// Many alike: what one batch of answers brought.
    #[inline]
    pub fn record_n(&mut self, ns: u64, count: u64) {
        self.0.saturating_record_n(ns.max(1), count);
    }

    /// Adds another thread's, or another round's.
    pub fn add(&mut self, other: &Self) {
        // Same bounds, so it cannot fail.
        self.0.add(&other.0).expect("same bounds");
    }

    /// Forgets all: the warm-up.
    pub fn clear(&mut self) {
        self.0.clear();
    }

    /// The figures.
    #[must_use]
    pub fn summary(&self) -> LatencySummary {
        if self.0.is_empty() {
            return LatencySummary::default();
        }
        LatencySummary {
            count: self.0.len(),
            mean_ns: self.0.mean(),
            p50_ns: self.0.value_at_quantile(0.5),
            p99_ns: self.0.value_at_quantile(0.99),
            p999_ns: self.0.value_at_quantile(0.999),
            max_ns: self.0.max(),
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
    fn the_extremes_are_kept_not_refused() {
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

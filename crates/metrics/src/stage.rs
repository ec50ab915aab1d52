//! The times of traced writes in a stage, as they are reported.

use riopipe_session::stages::Distribution;
use serde::{Deserialize, Serialize};

/// The times of traced writes in one stage.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct StageStat {
    /// Name of the stage.
    pub stage: String,
    /// Number of traced writes.
    pub count: u64,
    /// Total time of these writes in the stage, in ns.
    pub sum_ns: u64,
    /// Share of this time in the total of all stages shown with it, 0 to 1.
    pub share: f64,
    /// Median in ns, with an error of at most 3 %, as the percentiles below.
    pub p50_ns: u64,
    /// 99th percentile in ns.
    pub p99_ns: u64,
    /// 99.9th percentile in ns.
    pub p999_ns: u64,
    /// The longest time in ns.
    pub max_ns: u64,
    /// The whole distribution: the largest time of each bucket in ns, and the number of values in
    /// it. Absent if it is empty.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub buckets: Vec<(u64, u64)>,
}

impl StageStat {
    fn new(stage: String, seen: &Distribution, total: u64) -> Self {
        Self {
            stage,
            count: seen.count(),
            sum_ns: seen.sum(),
            share: if total == 0 { 0.0 } else { seen.sum() as f64 / total as f64 },
            p50_ns: seen.quantile(500_000),
            p99_ns: seen.quantile(990_000),
            p999_ns: seen.quantile(999_000),
            max_ns: seen.max(),
            buckets: seen.filled().collect(),
        }
    }

    /// The distribution, as exact as the buckets are.
    #[must_use]
    pub fn distribution(&self) -> Distribution {
        Distribution::from_filled(&self.buckets, self.sum_ns, self.max_ns)
    }
}

/// The stages of one side, a target's or an initiator's, with their shares.
pub fn with_shares(
    stages: impl IntoIterator<Item = (impl Into<String>, Distribution)>,
) -> Vec<StageStat> {
    let stages: Vec<(String, Distribution)> =
        stages.into_iter().map(|(stage, seen)| (stage.into(), seen)).collect();
    let total = stages.iter().map(|(_, seen)| seen.sum()).sum();
    stages.into_iter().map(|(stage, seen)| StageStat::new(stage, &seen, total)).collect()
}

/// The values of `now` since `before`, by the stages' names, with new shares.
#[must_use]
pub fn since(now: &[StageStat], before: &[StageStat]) -> Vec<StageStat> {
    with_shares(now.iter().map(|now| {
        let then = before.iter().find(|then| then.stage == now.stage);
        let seen = now.distribution();
        (now.stage.clone(), then.map_or(seen.clone(), |then| seen.since(&then.distribution())))
    }))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn seen(times: &[(u64, u64)]) -> Distribution {
        let sum = times.iter().map(|(ns, count)| ns * count).sum();
        Distribution::from_filled(times, sum, times.last().map_or(0, |(ns, _)| *ns))
    }

    #[test]
    fn shares_are_of_the_whole_and_survive_json() {
        let stages =
            with_shares([("gate", seen(&[(15, 4)])), ("device", seen(&[(20, 5), (40, 2)]))]);
        let shares: Vec<f64> = stages.iter().map(|stage| stage.share).collect();
        assert_eq!(shares, [0.25, 0.75]);
        let text = serde_json::to_string(&stages).unwrap();
        assert_eq!(serde_json::from_str::<Vec<StageStat>>(&text).unwrap(), stages);
        assert_eq!(with_shares([("gate", Distribution::default())])[0].share, 0.0);
    }

    #[test]
    fn the_difference_of_two_readings_has_only_later_values() {
        let before = with_shares([("gate", seen(&[(15, 4)])), ("device", seen(&[(31, 1)]))]);
        let now = with_shares([("gate", seen(&[(15, 4)])), ("device", seen(&[(31, 3)]))]);
        let since = since(&now, &before);
        assert_eq!((since[0].count, since[1].count, since[1].sum_ns), (0, 2, 62));
        assert_eq!(since[1].share, 1.0);
    }
}

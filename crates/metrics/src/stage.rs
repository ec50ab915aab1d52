//! The times that traced writes have spent in a stage, as they are told.

use riopipe_session::stages::Distribution;
use serde::{Deserialize, Serialize};

/// The times that traced writes have spent in one stage.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct StageStat {
    /// The stage's name.
    pub stage: String,
    /// Writes traced.
    pub count: u64,
    /// All their time in the stage, ns.
    pub sum_ns: u64,
    /// That as a part of their time in all stages shown with this one, 0 to 1.
    pub share: f64,
    /// Half of the writes took no longer, ns; to 3 %, as those below.
    pub p50_ns: u64,
    /// 99 % took no longer, ns.
    pub p99_ns: u64,
    /// 99.9 % took no longer, ns.
    pub p999_ns: u64,
    /// The longest, ns.
    pub max_ns: u64,
    /// The whole distribution: the highest time of each bucket, ns, and how many are in it. Left
    /// out where there is none to tell.
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

    /// The distribution, as far as the buckets tell.
    #[must_use]
    pub fn distribution(&self) -> Distribution {
        Distribution::from_filled(&self.buckets, self.sum_ns, self.max_ns)
    }
}

/// Stages of one side, and what part of the whole each is. The writes may be a target's or an
/// initiator's.
pub fn with_shares(
    stages: impl IntoIterator<Item = (impl Into<String>, Distribution)>,
) -> Vec<StageStat> {
    let stages: Vec<(String, Distribution)> =
        stages.into_iter().map(|(stage, seen)| (stage.into(), seen)).collect();
    let total = stages.iter().map(|(_, seen)| seen.sum()).sum();
    stages.into_iter().map(|(stage, seen)| StageStat::new(stage, &seen, total)).collect()
}

/// What `now` has seen since `before`, by the stages' names, with new shares.
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
    fn between_two_looks_only_what_came_between_counts() {
        let before = with_shares([("gate", seen(&[(15, 4)])), ("device", seen(&[(31, 1)]))]);
        let now = with_shares([("gate", seen(&[(15, 4)])), ("device", seen(&[(31, 3)]))]);
        let since = since(&now, &before);
        assert_eq!((since[0].count, since[1].count, since[1].sum_ns), (0, 2, 62));
        assert_eq!(since[1].share, 1.0);
    }
}

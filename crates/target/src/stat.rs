//! Counters of a target, and the times of its ordered writes.

use std::collections::BTreeMap;
use std::sync::Arc;

use riopipe_metrics::{StageStat, Start, with_shares};
use riopipe_session::stages::{ONE_IN, Stages};
use serde::{Deserialize, Serialize};

use crate::counters::{Counter, Counters};
use crate::shared::{SharedState, lock};

/// The statistics of a target: `rio target stat` shows them, and `/stat` serves them as JSON.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Stat {
    /// The name and version of this format: [`Stat::SCHEMA`].
    pub schema: String,
    /// The subsystem's NQN.
    pub subnqn: String,
    /// The target's version.
    pub version: String,
    /// The time at which it began to serve, in milliseconds since 1970; it distinguishes one run of
    /// a target from the next.
    pub started_unix_ms: u64,
    /// Time for which it has been serving, in seconds.
    pub uptime_s: f64,
    /// Number of reactors.
    pub reactors: usize,
    /// Number of currently connected queues.
    pub connections: usize,
    /// The counters since the start, by name.
    pub counters: BTreeMap<String, u64>,
    /// On average, one of this many ordered writes is traced.
    pub sampled_one_in: u64,
    /// The stages of traced writes, in their order.
    pub stages: Vec<StageStat>,
}

impl Stat {
    /// The value of [`schema`](Self::schema). Its number changes if the meaning of a key does.
    pub const SCHEMA: &str = "rio-target-stat/1";

    /// The difference from the earlier statistics `before`; `uptime_s` is the time between the two.
    /// If the target has been restarted in between, these are the values since the restart.
    #[must_use]
    pub fn since(&self, before: &Self) -> Self {
        if self.started_unix_ms != before.started_unix_ms {
            return self.clone();
        }
        let mut since = self.clone();
        since.uptime_s -= before.uptime_s;
        for (name, count) in &mut since.counters {
            *count = count.saturating_sub(before.counters.get(name).copied().unwrap_or(0));
        }
        since.stages = riopipe_metrics::since(&self.stages, &before.stages);
        since
    }

    /// A counter by name; 0 if there is none of this name.
    #[must_use]
    pub fn counter(&self, name: &str) -> u64 {
        self.counters.get(name).copied().unwrap_or(0)
    }
}

/// The source of a running target's metrics. Reading the metrics disturbs no reactor.
pub(crate) struct MetricsSource {
    pub(crate) subnqn: String,
    pub(crate) start: Start,
    pub(crate) shared: SharedState,
    /// The counters of each reactor.
    pub(crate) counters: Vec<Arc<Counters>>,
    pub(crate) stages: Arc<Stages>,
}

impl MetricsSource {
    pub(crate) fn stat(&self) -> Stat {
        let total =
            |counter: Counter| self.counters.iter().map(|counters| counters.get(counter)).sum();
        Stat {
            schema: Stat::SCHEMA.into(),
            subnqn: self.subnqn.clone(),
            version: env!("CARGO_PKG_VERSION").into(),
            started_unix_ms: self.start.unix_ms,
            uptime_s: self.start.uptime_s(),
            reactors: self.counters.len(),
            connections: lock(&self.shared).connections(),
            counters: Counter::ALL
                .iter()
                .map(|counter| (counter.name().to_owned(), total(*counter)))
                .collect(),
            sampled_one_in: ONE_IN,
            stages: with_shares(self.stages.snapshot().map(|(stage, seen)| (stage.name(), seen))),
        }
    }
}

#[cfg(test)]
mod tests {
    use riopipe_session::stages::Distribution;

    use super::*;

    fn seen(times: &[(u64, u64)]) -> Distribution {
        let sum = times.iter().map(|(ns, count)| ns * count).sum();
        Distribution::from_filled(times, sum, times.last().map_or(0, |(ns, _)| *ns))
    }

    fn stat(uptime_s: f64, writes: u64, device: &[(u64, u64)]) -> Stat {
        Stat {
            schema: Stat::SCHEMA.into(),
            subnqn: "nqn.2026-11.com.example:d".into(),
            version: "0".into(),
            started_unix_ms: 1_000,
            uptime_s,
            reactors: 1,
            connections: 2,
            counters: BTreeMap::from([("writes".into(), writes)]),
            sampled_one_in: ONE_IN,
            stages: with_shares([("gate", seen(&[(15, 4)])), ("device", seen(device))]),
        }
    }

    #[test]
    fn shares_are_of_the_whole_and_survive_json() {
        let stat = stat(1.0, 5, &[(20, 5), (40, 2)]);
        let shares: Vec<f64> = stat.stages.iter().map(|stage| stage.share).collect();
        assert_eq!(shares, [0.25, 0.75]);
        let text = serde_json::to_string(&stat).unwrap();
        assert_eq!(serde_json::from_str::<Stat>(&text).unwrap(), stat);
        assert!(with_shares([("gate", Distribution::default())])[0].share == 0.0);
    }

    #[test]
    fn the_difference_of_two_readings_has_only_later_values() {
        let before = stat(10.0, 100, &[(31, 1), (1023, 1)]);
        let now = stat(15.0, 160, &[(31, 3), (1023, 1)]);
        let since = now.since(&before);
        assert_eq!((since.uptime_s, since.counter("writes")), (5.0, 60));
        let device = &since.stages[1];
        assert_eq!((device.count, device.sum_ns, device.max_ns), (2, 62, 31));
        assert_eq!(since.stages[0].count, 0);
        assert_eq!(device.share, 1.0);
        // Restarted in between, and serving for longer than the run before.
        let restarted = Stat { started_unix_ms: 2_000, ..now };
        assert_eq!(restarted.since(&before), restarted);
    }
}

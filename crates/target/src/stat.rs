//! Counters of a target, and the times of its ordered writes.

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex, PoisonError, Weak};

use riopipe_metrics::{StageStat, Start, with_shares};
use riopipe_session::stages::{ONE_IN, Stages};
use riopipe_session::target::VolumeUsage;
use serde::{Deserialize, Serialize};

use crate::counters::{Counter, Counters};
use crate::drive_counters::DriveCounters;
use crate::hosts::Hosts;
use crate::log::Log;
use crate::log_fill::LogStat;
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
    /// How full the ordering log is.
    #[serde(default)]
    pub log: LogStat,
    /// The counters since the start, by name.
    pub counters: BTreeMap<String, u64>,
    /// The counters of each namespace, by its identifier.
    #[serde(default)]
    pub namespaces: Vec<PartStat>,
    /// The counters of each volume, by its id: sums over its drives at this target, since the start
    /// of the target. Its connections are those that carry a stream with a log. At most
    /// [`LABELS_MAX`] volumes have their own; the sum of the others is [`OTHER`].
    #[serde(default)]
    pub volumes: Vec<PartStat>,
    /// The counters of each host, by its NQN. At most [`LABELS_MAX`] hosts have their own.
    #[serde(default)]
    pub hosts: Vec<PartStat>,
    /// On average, one of this many ordered writes of a busy stream is traced.
    pub sampled_one_in: u64,
    /// The stages of traced writes, in their order.
    pub stages: Vec<StageStat>,
}

/// The largest number of volumes, and of hosts, with counters of their own.
pub const LABELS_MAX: usize = 64;
/// Name of the volumes, or the hosts, beyond [`LABELS_MAX`].
pub const OTHER: &str = "other";

/// The counters of a namespace, a volume or a host.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct PartStat {
    /// The namespace identifier, the volume's id, or the host's NQN; [`OTHER`] for those beyond the
    /// bound.
    pub name: String,
    /// Number of its connections now; absent for a namespace.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub connections: Option<usize>,
    /// The counters since the start, by name.
    pub counters: BTreeMap<String, u64>,
}

/// Subtracts the counters `before` from `now`.
fn subtract(now: &mut BTreeMap<String, u64>, before: &BTreeMap<String, u64>) {
    for (name, count) in now {
        *count = count.saturating_sub(before.get(name).copied().unwrap_or(0));
    }
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
        subtract(&mut since.counters, &before.counters);
        let Self { namespaces, volumes, hosts, .. } = &mut since;
        for (now, before) in
            [(namespaces, &before.namespaces), (volumes, &before.volumes), (hosts, &before.hosts)]
        {
            for part in now {
                if let Some(before) = before.iter().find(|before| before.name == part.name) {
                    subtract(&mut part.counters, &before.counters);
                }
            }
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
    /// The counters of the namespaces.
    pub(crate) drives: Mutex<DriveCounters>,
    pub(crate) hosts: Arc<Hosts>,
    pub(crate) stages: Arc<Stages>,
    /// The ordering log, if there is one that is still open. The metrics do not keep it open.
    pub(crate) log: Weak<Log>,
}

impl MetricsSource {
    pub(crate) fn stat(&self) -> Stat {
        let of_reactors = |counter: Counter| -> u64 {
            self.counters.iter().map(|counters| counters.get(counter)).sum()
        };
        let mut counters: BTreeMap<String, u64> = Counter::ALL
            .iter()
            .map(|counter| (counter.name().to_owned(), of_reactors(*counter)))
            .collect();
        let named = |values: [u64; Counter::OF_DRIVE.len()]| -> BTreeMap<String, u64> {
            let names = Counter::OF_DRIVE.iter().map(|counter| counter.name().to_owned());
            names.zip(values).collect()
        };
        let (namespaces, former): (Vec<PartStat>, _) = {
            let drives = self.drives.lock().unwrap_or_else(PoisonError::into_inner);
            let part = |(nsid, values): (u32, _)| PartStat {
                name: nsid.to_string(),
                connections: None,
                counters: named(values),
            };
            (drives.namespaces().map(part).collect(), named(*drives.former()))
        };
        for part in namespaces.iter().map(|namespace| &namespace.counters).chain([&former]) {
            add_to(&mut counters, part);
        }
        let (connections, usage, log) = {
            let shared = lock(&self.shared);
            let volumes = shared.volumes();
            let usage: Vec<VolumeUsage> = volumes.usage().collect();
            (shared.connections(), usage, volumes.log_fill().into())
        };
        Stat {
            schema: Stat::SCHEMA.into(),
            subnqn: self.subnqn.clone(),
            version: env!("CARGO_PKG_VERSION").into(),
            started_unix_ms: self.start.unix_ms,
            uptime_s: self.start.uptime_s(),
            reactors: self.counters.len(),
            connections,
            log,
            counters,
            volumes: volumes(&usage, &namespaces),
            namespaces,
            hosts: self.hosts.stat(),
            sampled_one_in: ONE_IN,
            stages: with_shares(self.stages.snapshot().map(|(stage, seen)| (stage.name(), seen))),
        }
    }
}

/// Adds `more` to the counters in `sum`.
fn add_to(sum: &mut BTreeMap<String, u64>, more: &BTreeMap<String, u64>) {
    for (name, count) in more {
        *sum.entry(name.clone()).or_default() += count;
    }
}

/// The counters of the volumes: sums over their namespaces. A drive belongs to one volume only.
fn volumes(usage: &[VolumeUsage], namespaces: &[PartStat]) -> Vec<PartStat> {
    let mut volumes: Vec<PartStat> = Vec::new();
    for (index, volume) in usage.iter().enumerate() {
        let name = if index < LABELS_MAX { volume.id.to_string() } else { OTHER.to_owned() };
        if volumes.last().is_none_or(|last| last.name != name) {
            let counters = Counter::OF_DRIVE.iter().map(|counter| (counter.name().to_owned(), 0));
            let counters = counters.collect();
            volumes.push(PartStat { name, connections: Some(0), counters });
        }
        // There is one: it was pushed here or in an earlier turn.
        let Some(part) = volumes.last_mut() else { continue };
        part.connections = part.connections.map(|count| count + volume.bound_streams);
        let is_member = |namespace: &&PartStat| {
            volume.nsids.iter().any(|nsid| nsid.to_string() == namespace.name)
        };
        for namespace in namespaces.iter().filter(is_member) {
            add_to(&mut part.counters, &namespace.counters);
        }
    }
    volumes
}

#[cfg(test)]
mod tests {
    use riopipe_order::attribute::VolumeId;
    use riopipe_session::stages::Distribution;

    use super::*;

    fn seen(times: &[(u64, u64)]) -> Distribution {
        let sum = times.iter().map(|(ns, count)| ns * count).sum();
        Distribution::from_filled(times, sum, times.last().map_or(0, |(ns, _)| *ns))
    }

    fn part(name: &str, writes: u64) -> PartStat {
        let counters = BTreeMap::from([("writes".into(), writes)]);
        PartStat { name: name.into(), connections: None, counters }
    }

    #[test]
    fn volumes_have_the_counters_of_their_namespaces_within_a_bound() {
        let usage = |number: u8, nsids: &[u32]| VolumeUsage {
            id: VolumeId([number; 16]),
            nsids: nsids.to_vec(),
            is_owned: true,
            bound_streams: 2,
        };
        let namespaces: Vec<PartStat> = (1..=200).map(|n| part(&n.to_string(), n)).collect();
        let two = volumes(&[usage(1, &[1, 3]), usage(2, &[2])], &namespaces);
        let seen = |part: &PartStat| (part.connections, part.counters["writes"]);
        assert_eq!(two.iter().map(seen).collect::<Vec<_>>(), [(Some(2), 4), (Some(2), 2)]);
        assert_eq!(two[0].name, VolumeId([1; 16]).to_string());
        let many: Vec<VolumeUsage> = (1..=200).map(|n| usage(n, &[n.into()])).collect();
        let many = volumes(&many, &namespaces);
        assert_eq!((many.len(), many[LABELS_MAX].name.as_str()), (LABELS_MAX + 1, OTHER));
        assert_eq!(many.iter().map(|part| part.counters["writes"]).sum::<u64>(), 20_100);
        assert_eq!(many[LABELS_MAX].connections, Some(2 * (200 - LABELS_MAX)));
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
            log: LogStat::default(),
            counters: BTreeMap::from([("writes".into(), writes)]),
            namespaces: vec![part("1", writes)],
            volumes: Vec::new(),
            hosts: vec![part("nqn.a", 2 * writes)],
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
        assert_eq!(
            (&since.namespaces[..], &since.hosts[..]),
            (&[part("1", 60)][..], &[part("nqn.a", 120)][..])
        );
        let device = &since.stages[1];
        assert_eq!((device.count, device.sum_ns, device.max_ns), (2, 62, 31));
        assert_eq!(since.stages[0].count, 0);
        assert_eq!(device.share, 1.0);
        // Restarted in between, and serving for longer than the run before.
        let restarted = Stat { started_unix_ms: 2_000, ..now };
        assert_eq!(restarted.since(&before), restarted);
    }
}

//! The traffic of each host, for the metrics.
//!
//! A connection counts its own bytes, without a lock or a locked instruction ([`Traffic`]). The
//! table of hosts ([`Hosts`]) is locked only when a connection becomes a queue of a host, when a
//! request is refused, and when the metrics are read. A host chooses its own name, so the number of
//! names is bounded (trap T28).

use std::collections::BTreeMap;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use crate::stat::{LABELS_MAX, OTHER, PartStat};

/// Name of all hosts that send no NQN when they connect.
const UNNAMED: &str = "unnamed";

/// The name of a host in the metrics.
const fn label_of(hostnqn: &str) -> &str {
    if hostnqn.is_empty() { UNNAMED } else { hostnqn }
}

/// The bytes of a connection. Only the thread that has the connection counts; every thread may
/// read.
#[derive(Debug, Default)]
pub(crate) struct Traffic {
    received: AtomicU64,
    sent: AtomicU64,
}

impl Traffic {
    #[inline]
    pub(crate) fn add_received(&self, bytes: usize) {
        add(&self.received, bytes);
    }

    #[inline]
    pub(crate) fn add_sent(&self, bytes: usize) {
        add(&self.sent, bytes);
    }
}

/// Adds to a counter that no other thread changes.
#[inline]
fn add(value: &AtomicU64, count: usize) {
    value.store(value.load(Relaxed).wrapping_add(count as u64), Relaxed);
}

/// The hosts that have connected, by name.
#[derive(Debug, Default)]
pub(crate) struct Hosts(Mutex<BTreeMap<String, Host>>);

/// The counts of one host.
#[derive(Debug, Default)]
struct Host {
    /// Queues that it has connected so far.
    accepted: u64,
    /// Connects that were refused.
    refused: u64,
    /// Claims, binds, marks and releases that were refused, and failures of its streams.
    problems: u64,
    /// Bytes of the connections that have ended.
    received: u64,
    sent: u64,
    /// The traffic of its connections; those that have ended are removed by [`Host::sweep`].
    connections: Vec<Arc<Traffic>>,
}

impl Host {
    /// Adds the bytes of ended connections to the sums, and removes them. A connection has ended if
    /// nothing else has its traffic.
    fn sweep(&mut self) {
        let Self { connections, received, sent, .. } = self;
        connections.retain(|traffic| {
            let is_open = Arc::strong_count(traffic) > 1;
            if !is_open {
                *received += traffic.received.load(Relaxed);
                *sent += traffic.sent.load(Relaxed);
            }
            is_open
        });
    }
}

impl Hosts {
    fn lock(&self) -> MutexGuard<'_, BTreeMap<String, Host>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Notes that a connection has become a queue of the host.
    pub(crate) fn on_connected(&self, hostnqn: &str, traffic: &Arc<Traffic>) {
        let hostnqn = label_of(hostnqn);
        let mut hosts = self.lock();
        let has_space = hosts.contains_key(hostnqn) || hosts.len() < LABELS_MAX;
        let host = hosts.entry((if has_space { hostnqn } else { OTHER }).to_owned()).or_default();
        host.accepted += 1;
        // The list has no more than the open connections, and those that ended since the last call.
        host.sweep();
        host.connections.push(Arc::clone(traffic));
    }

    /// Notes that a Connect was refused. A host that has never connected gets no name of its own, so
    /// that it cannot use up all names.
    pub(crate) fn on_refused(&self, hostnqn: &str) {
        self.known_or_other(hostnqn, |host| host.refused += 1);
    }

    /// Notes that a request of a connected host was refused, or that its stream has failed.
    pub(crate) fn on_problem(&self, hostnqn: &str) {
        self.known_or_other(hostnqn, |host| host.problems += 1);
    }

    fn known_or_other(&self, hostnqn: &str, count: impl FnOnce(&mut Host)) {
        let mut hosts = self.lock();
        match hosts.get_mut(label_of(hostnqn)) {
            Some(host) => count(host),
            None => count(hosts.entry(OTHER.to_owned()).or_default()),
        }
    }

    /// The counters of all hosts.
    pub(crate) fn stat(&self) -> Vec<PartStat> {
        let mut hosts = self.lock();
        let stat = |(name, host): (&String, &mut Host)| {
            host.sweep();
            let open = |of: fn(&Traffic) -> &AtomicU64| -> u64 {
                host.connections.iter().map(|traffic| of(traffic).load(Relaxed)).sum()
            };
            let counts = [
                host.accepted,
                host.refused,
                host.problems,
                host.received + open(|traffic| &traffic.received),
                host.sent + open(|traffic| &traffic.sent),
            ];
            let names = HOST_COUNTERS.iter().map(|(name, _)| (*name).to_owned());
            PartStat {
                name: name.clone(),
                connections: Some(host.connections.len()),
                counters: names.zip(counts).collect(),
            }
        };
        hosts.iter_mut().map(stat).collect()
    }
}

/// The counters of a host: name and description.
pub(crate) const HOST_COUNTERS: [(&str, &str); 5] = [
    ("connections_accepted", "Queues that the host has connected"),
    ("connects_refused", "Connects of the host that were refused"),
    ("problems", "Requests of the host that were refused, and failures of its streams"),
    ("received_bytes", "Bytes received from the host, with all headers of NVMe/TCP"),
    ("sent_bytes", "Bytes sent to the host, with all headers of NVMe/TCP"),
];

#[cfg(test)]
mod tests {
    use super::*;

    fn of<'a>(stat: &'a [PartStat], name: &str) -> &'a PartStat {
        stat.iter().find(|host| host.name == name).unwrap_or_else(|| panic!("{name}: {stat:?}"))
    }

    #[test]
    fn a_host_keeps_the_bytes_of_connections_that_have_ended() {
        let hosts = Hosts::default();
        let (first, second) = (Arc::new(Traffic::default()), Arc::new(Traffic::default()));
        first.add_received(100);
        hosts.on_connected("nqn.a", &first);
        hosts.on_connected("nqn.a", &second);
        first.add_sent(7);
        second.add_received(11);
        let count = |name: &str| of(&hosts.stat(), "nqn.a").counters[name];
        assert_eq!((count("received_bytes"), count("sent_bytes")), (111, 7));
        assert_eq!(of(&hosts.stat(), "nqn.a").connections, Some(2));
        drop(first);
        for _ in 0..2 {
            assert_eq!((count("received_bytes"), count("sent_bytes")), (111, 7));
            assert_eq!(of(&hosts.stat(), "nqn.a").connections, Some(1));
        }
        assert_eq!(count("connections_accepted"), 2);
        hosts.on_refused("nqn.a");
        hosts.on_problem("nqn.a");
        assert_eq!((count("connects_refused"), count("problems")), (1, 1));
    }

    #[test]
    fn a_host_without_a_name_has_a_label() {
        let hosts = Hosts::default();
        hosts.on_connected("", &Arc::default());
        hosts.on_problem("");
        let stat = hosts.stat();
        let counters = &of(&stat, UNNAMED).counters;
        assert_eq!((counters["connections_accepted"], counters["problems"]), (1, 1));
        assert_eq!(stat.len(), 1);
    }

    /// T28: names come from peers.
    #[test]
    fn t28_the_number_of_names_is_bounded() {
        let hosts = Hosts::default();
        for stranger in 0..1000 {
            hosts.on_refused(&format!("nqn.stranger-{stranger}"));
        }
        assert_eq!(hosts.stat().len(), 1);
        let traffic = Arc::new(Traffic::default());
        for host in 0..1000 {
            hosts.on_connected(&format!("nqn.host-{host}"), &traffic);
        }
        let stat = hosts.stat();
        assert_eq!(stat.len(), LABELS_MAX);
        let accepted = |host: &PartStat| host.counters["connections_accepted"];
        assert_eq!(stat.iter().map(accepted).sum::<u64>(), 1000, "all are counted");
        let other = of(&stat, OTHER);
        assert_eq!(
            (other.counters["connects_refused"], accepted(of(&stat, "nqn.host-0"))),
            (1000, 1)
        );
        assert!(accepted(other) > 900);
    }

    /// When hosts use up the names before any other is needed.
    #[test]
    fn t28_other_has_a_place_beside_the_names() {
        let hosts = Hosts::default();
        let traffic = Arc::new(Traffic::default());
        for host in 0..1000 {
            hosts.on_connected(&format!("nqn.host-{host}"), &traffic);
        }
        assert_eq!(hosts.stat().len(), LABELS_MAX + 1);
    }
}

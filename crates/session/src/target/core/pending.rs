//! The limits on connections that are not admitted: those that have not passed Connect, and, where
//! the target demands it, authentication (trap T28).
//!
//! A peer without rights can open connections and send nothing. So their number is limited, for each
//! network that they come from and in total. A new connection is never refused for these limits: an
//! older one gives way to it. It is the oldest one of the network with the most. So a flood from one
//! network displaces its own connections, and a host elsewhere needs only the time of its own Connect.

use alloc::collections::BTreeMap;
use core::net::IpAddr;

/// The limits on connections that are not admitted.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct PendingLimits {
    /// From one IPv4 address, or from one IPv6 network of 64 bits, because a peer may choose the
    /// other 64 bits of its address itself.
    pub per_address: usize,
    /// From all of them together.
    pub total: usize,
}

impl PendingLimits {
    /// No limits: for tests and the simulator.
    pub const NONE: Self = Self { per_address: usize::MAX, total: usize::MAX };
}

/// The network from which a connection comes.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
enum Network {
    V4([u8; 4]),
    /// The first 64 bits of the address.
    V6([u8; 8]),
    /// The transport has no addresses.
    Unknown,
}

impl Network {
    fn of(address: Option<IpAddr>) -> Self {
        match address.map(|address| address.to_canonical()) {
            Some(IpAddr::V4(address)) => Self::V4(address.octets()),
            Some(IpAddr::V6(address)) => {
                let [a, b, c, d, e, f, g, h, ..] = address.octets();
                Self::V6([a, b, c, d, e, f, g, h])
            }
            None => Self::Unknown,
        }
    }
}

/// The entry of a connection in [`Pending`].
#[derive(Clone, Copy, Debug)]
pub(super) struct PendingEntry {
    network: Network,
    /// Entries have ascending numbers.
    number: u64,
}

/// The connections of a core that are not admitted. Only the core that accepts connections has any.
#[derive(Debug)]
pub(super) struct Pending {
    limits: PendingLimits,
    /// The places of the connections in their core, by network and number.
    networks: BTreeMap<Network, BTreeMap<u64, u32>>,
    count: usize,
    next_number: u64,
}

impl Pending {
    pub(super) const fn new(limits: PendingLimits) -> Self {
        Self { limits, networks: BTreeMap::new(), count: 0, next_number: 0 }
    }

    /// Adds the connection at place `at`.
    pub(super) fn add(&mut self, address: Option<IpAddr>, at: u32) -> PendingEntry {
        let entry = PendingEntry { network: Network::of(address), number: self.next_number };
        self.next_number += 1;
        self.networks.entry(entry.network).or_default().insert(entry.number, at);
        self.count += 1;
        entry
    }

    /// Removes a connection. Does nothing if it is removed already.
    pub(super) fn remove(&mut self, entry: PendingEntry) {
        let Some(connections) = self.networks.get_mut(&entry.network) else { return };
        if connections.remove(&entry.number).is_some() {
            self.count -= 1;
        }
        if connections.is_empty() {
            self.networks.remove(&entry.network);
        }
    }

    /// The place of a connection that must give way, because the connection with this entry is one
    /// too many; `None` if it is not.
    pub(super) fn excess(&self, newest: PendingEntry) -> Option<u32> {
        let of_network = self.networks.get(&newest.network);
        if let Some(connections) = of_network.filter(|of| of.len() > self.limits.per_address) {
            return connections.values().next().copied();
        }
        if self.count > self.limits.total { self.oldest_of_largest() } else { None }
    }

    /// The place of the oldest connection of the network with the most connections; `None` if there
    /// is no connection. Of several networks with the most, the one with the oldest connection.
    pub(super) fn oldest_of_largest(&self) -> Option<u32> {
        let first_number = |of: &BTreeMap<u64, u32>| of.keys().next().copied().unwrap_or(u64::MAX);
        let largest = self
            .networks
            .values()
            .max_by_key(|of| (of.len(), core::cmp::Reverse(first_number(of))))?;
        largest.values().next().copied()
    }
}

#[cfg(test)]
mod tests {
    use alloc::vec::Vec;

    use super::*;

    const LIMITS: PendingLimits = PendingLimits { per_address: 3, total: 5 };

    fn v4(last: u8) -> Option<IpAddr> {
        Some(IpAddr::from([192, 0, 2, last]))
    }

    #[test]
    fn t28_a_network_with_too_many_loses_its_oldest() {
        let mut pending = Pending::new(LIMITS);
        let first: Vec<PendingEntry> = (0..3).map(|at| pending.add(v4(1), at)).collect();
        assert!(first.iter().all(|entry| pending.excess(*entry).is_none()));
        let fourth = pending.add(v4(1), 3);
        assert_eq!(pending.excess(fourth), Some(0));
        pending.remove(first[0]);
        assert_eq!(pending.excess(fourth), None);
        pending.remove(first[0]);
        assert_eq!(pending.count, 3, "removed once");
    }

    #[test]
    fn t28_in_total_the_network_with_the_most_gives_way() {
        let mut pending = Pending::new(LIMITS);
        let single = pending.add(v4(1), 0);
        for at in 1..=3 {
            pending.add(v4(2), at);
        }
        let fifth = pending.add(v4(3), 4);
        assert_eq!(pending.excess(fifth), None);
        let sixth = pending.add(v4(3), 5);
        assert_eq!(pending.excess(sixth), Some(1), "not the oldest of all");
        // One each: the oldest.
        let mut pending = Pending::new(LIMITS);
        let entries: Vec<PendingEntry> = (0..6).map(|at| pending.add(v4(at as u8), at)).collect();
        assert_eq!(pending.excess(entries[5]), Some(0));
        for entry in entries {
            pending.remove(entry);
        }
        pending.remove(single);
        assert_eq!((pending.oldest_of_largest(), pending.networks.len()), (None, 0));
    }

    #[test]
    fn t28_the_addresses_of_an_ipv6_network_count_together() {
        let mut pending = Pending::new(LIMITS);
        let v6 = |last: u16| Some(IpAddr::from([0x2001, 0xdb8, 0, 7, last, last, last, last]));
        let entries: Vec<PendingEntry> = (0..4).map(|at| pending.add(v6(at), at.into())).collect();
        assert_eq!(pending.excess(entries[3]), Some(0));
        // An IPv4 address that a socket of IPv6 reports is one of IPv4.
        let mapped = IpAddr::from([0, 0, 0, 0, 0, 0xffff, 0xc000, 0x0201]);
        assert_eq!(Network::of(Some(mapped)), Network::of(v4(1)));
    }
}

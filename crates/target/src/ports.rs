//! The ports of a target: the addresses at which it is served, and what changes with another
//! configuration.
//!
//! A port has an id, which discovery reports and a controller belongs to. It keeps the id as long as its
//! address is served, and no later port gets it. At the start the ids are the places of the addresses in
//! the configuration: first those of `listen`, then those of `discovery`. The entries of `ana` name a
//! place.

use std::fmt;
use std::net::SocketAddr;

use riopipe_net::{HostPort, ListenError, Listener};
use riopipe_session::auth::tls::Demand;
use riopipe_session::target::{DiscoveryPort, PortState};

use crate::config::{Config, DEFAULT_DISCOVERY_PORT, DEFAULT_PORT};
use crate::queue_requests::Port;
use crate::tls::demands;

/// An address of a configuration.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct PortAddress {
    /// Host and port, as in `192.0.2.1:4420`.
    pub address: String,
    /// Whether it is meant for discovery only.
    pub is_discovery: bool,
}

impl fmt::Display for PortAddress {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let kind = if self.is_discovery { "discovery address" } else { "address" };
        write!(f, "{kind} {}", self.address)
    }
}

/// The addresses of a configuration, in the order of their places.
pub(crate) fn addresses_of(config: &Config) -> Vec<PortAddress> {
    let of = |list: &[String], is_discovery: bool, default: u16| -> Vec<PortAddress> {
        let full = |text: &String| match text.parse::<HostPort>() {
            Ok(parsed) => parsed.with_port(default),
            // Listening on it reports the error.
            Err(_) => text.clone(),
        };
        list.iter().map(|text| PortAddress { address: full(text), is_discovery }).collect()
    };
    let mut all = of(&config.listen, false, DEFAULT_PORT);
    all.extend(of(&config.discovery, true, DEFAULT_DISCOVERY_PORT));
    all
}

/// A port that is served.
#[derive(Clone, Debug)]
struct ServedPort {
    id: u16,
    of: PortAddress,
    /// Whether hosts may or must use TLS there. It stays as long as the address is served.
    tls: Option<Demand>,
    /// The address of the listener, with the real port.
    bound: SocketAddr,
}

/// The ports that are served, in the order of their places.
#[derive(Clone, Debug, Default)]
pub(crate) struct Ports {
    list: Vec<ServedPort>,
    /// The highest id that a port has had.
    last_id: u16,
}

/// The reason why a configuration's ports can't be served.
#[derive(Debug, thiserror::Error)]
pub enum PortsError {
    /// An address can't be listened on.
    #[error(transparent)]
    Listen(#[from] ListenError),
    /// Each of the 65535 ids was used.
    #[error("no id is left for another port: restart the target")]
    NoId,
}

/// The ports with another configuration.
pub(crate) struct NextPorts {
    /// The ports from then on.
    pub(crate) ports: Ports,
    /// The ports that come. Their listeners accept nothing yet.
    pub(crate) added: Vec<Port>,
    /// The ids of the ports that go.
    pub(crate) removed: Vec<u16>,
    /// Whether hosts see a difference.
    pub(crate) has_changed: bool,
}

impl Ports {
    /// The ports of this configuration, if these are served now: listens on the addresses that come.
    ///
    /// # Errors
    /// An address can't be listened on. No listener is left.
    pub(crate) fn next(&self, config: &Config) -> Result<NextPorts, PortsError> {
        let mut old = self.list.clone();
        let mut ports = Self { list: Vec::new(), last_id: self.last_id };
        let mut added = Vec::new();
        for (of, tls) in addresses_of(config).into_iter().zip(demands(config)) {
            let same = old.iter().position(|port| port.of == of);
            let known = same.or_else(|| old.iter().position(|it| it.of.address == of.address));
            let port = match known {
                Some(at) => ServedPort { of, ..old.remove(at) },
                None => {
                    let listener = Listener::bind(&of.address)?;
                    let id = ports.last_id.checked_add(1).ok_or(PortsError::NoId)?;
                    ports.last_id = id;
                    let bound = listener.local_addr();
                    added.push(Port { id, tls, listener });
                    ServedPort { id, of, tls, bound }
                }
            };
            ports.list.push(port);
        }
        let removed: Vec<u16> = old.iter().map(|port| port.id).collect();
        let has_changed = ports.listed() != self.listed() || !removed.is_empty();
        Ok(NextPorts { ports, added, removed, has_changed })
    }

    /// How many there are.
    pub(crate) fn len(&self) -> usize {
        self.list.len()
    }

    /// The addresses of the listeners: those of `listen`, or those of `discovery`.
    pub(crate) fn bound(&self, is_discovery: bool) -> Vec<SocketAddr> {
        let of_kind = self.list.iter().filter(|port| port.of.is_discovery == is_discovery);
        of_kind.map(|port| port.bound).collect()
    }

    /// The discovery log's records for the listen addresses. An address that stands for all addresses
    /// of the machine can't be given to a host. The host then keeps the address that it has used.
    pub(crate) fn listed(&self) -> Vec<DiscoveryPort> {
        let port = |port: &ServedPort| DiscoveryPort {
            portid: port.id,
            traddr: port.bound.ip().to_string(),
            trsvcid: port.bound.port().to_string(),
            ipv6: port.bound.is_ipv6(),
            discovery_only: false,
            tls: port.tls,
        };
        self.list.iter().filter(|port| !port.of.is_discovery).map(port).collect()
    }

    /// The id of the port in this place, counted from 1.
    pub(crate) fn id_at(&self, place: u16) -> Option<u16> {
        let port = self.list.get(usize::from(place).checked_sub(1)?)?;
        Some(port.id)
    }

    /// States of ports by their ids, from states by their places.
    pub(crate) fn by_id(&self, states: &[PortState]) -> Vec<PortState> {
        let of = |state: &PortState| Some(PortState { port: self.id_at(state.port)?, ..*state });
        states.iter().filter_map(of).collect()
    }

    /// States of ports by their places, from states by their ids.
    pub(crate) fn by_place(&self, states: &[PortState]) -> Vec<PortState> {
        let place = |id: u16| self.list.iter().position(|port| port.id == id);
        let of =
            |state: &PortState| Some(PortState { port: place(state.port)? as u16 + 1, ..*state });
        let mut found: Vec<PortState> = states.iter().filter_map(of).collect();
        found.sort_by_key(|state| (state.port, state.group));
        found
    }
}

#[cfg(test)]
mod tests {
    use riopipe_nvme::ana::AnaState;

    use super::*;

    fn config(listen: &[&str], discovery: &[&str]) -> Config {
        let owned = |list: &[&str]| list.iter().map(|&text| text.to_owned()).collect();
        Config { listen: owned(listen), discovery: owned(discovery), ..Config::default() }
    }

    fn ids(ports: &Ports) -> Vec<u16> {
        (1..=ports.len() as u16).map(|place| ports.id_at(place).unwrap()).collect()
    }

    #[test]
    fn a_port_keeps_its_id_and_no_other_one_gets_it() {
        let (one, two) = ("127.0.0.1:0", "127.0.0.2:0");
        let first = Ports::default().next(&config(&[one, two], &["127.0.0.3:0"])).unwrap();
        assert_eq!((ids(&first.ports), first.added.len()), (vec![1, 2, 3], 3));
        let ports = first.ports;
        let state = PortState { port: 1, group: 7, state: AnaState::Inaccessible };
        // The first one goes, one comes, and one changes its kind.
        let next = ports.next(&config(&["127.0.0.3:0", two], &["127.0.0.4:0"])).unwrap();
        assert_eq!((ids(&next.ports), &next.removed[..]), (vec![3, 2, 4], &[1][..]));
        assert_eq!(next.added[0].id, 4);
        assert!(next.has_changed);
        let listed: Vec<u16> = next.ports.listed().iter().map(|port| port.portid).collect();
        assert_eq!(listed, [3, 2], "the last one is for discovery only");
        assert_eq!(next.ports.by_id(&[state])[0].port, 3);
        assert_eq!(next.ports.by_place(&[PortState { port: 2, ..state }])[0].port, 2);
        assert_eq!(next.ports.by_place(&[state]), [], "it is not served any more");
        let again = next.ports.next(&config(&[one, "127.0.0.3:0", two], &[])).unwrap();
        assert_eq!((ids(&again.ports), again.removed), (vec![5, 3, 2], vec![4]));
        let same = again.ports.next(&config(&[one, "127.0.0.3:0", two], &[])).unwrap();
        assert!(!same.has_changed && same.added.is_empty() && same.removed.is_empty());
    }

    #[test]
    fn an_address_without_a_port_is_that_with_the_default() {
        let all = addresses_of(&config(&["192.0.2.1", "[::1]:7", "::1"], &["192.0.2.1"]));
        let texts: Vec<&str> = all.iter().map(|of| of.address.as_str()).collect();
        assert_eq!(texts, ["192.0.2.1:4420", "[::1]:7", "[::1]:4420", "192.0.2.1:8009"]);
    }

    #[test]
    fn one_address_that_cannot_be_listened_on_refuses_all() {
        let taken = Listener::bind("127.0.0.1:0").unwrap();
        let (address, free) = (taken.local_addr().to_string(), "127.0.0.1:0");
        let refused = Ports::default().next(&config(&[free, &address], &[]));
        let text = refused.err().unwrap().to_string();
        assert!(text.contains(&address), "{text}");
        let full = Ports { last_id: u16::MAX, ..Ports::default() };
        assert!(matches!(full.next(&config(&[free], &[])), Err(PortsError::NoId)));
    }
}

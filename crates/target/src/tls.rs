//! TLS: the part of a configuration about it, and the part of a running target that does it.

use std::collections::BTreeMap;
use std::sync::Arc;

use riopipe_net::Socket;
use riopipe_nvme::fabrics::DISCOVERY_NQN;
use riopipe_session::auth::tls::{Demand, KeyRing};
use riopipe_tls::{Door, LinkEnd, Relay, TlsError};
use serde::{Deserialize, Serialize};

use crate::check::Problem;
use crate::config::Config;
use crate::secrets::SecretSource;

/// The part of a configuration about TLS 1.3 with pre-shared keys (`[tls]`).
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct TlsOptions {
    /// The key of each host, by NQN. These hosts may connect, and must use TLS; others may only if `hosts` or
    /// `dhchap.hosts` lists them. Without any, there is no TLS.
    pub hosts: BTreeMap<String, SecretSource>,
    /// Whether the addresses demand TLS.
    pub mode: TlsMode,
    /// The addresses of `listen` and `discovery` that have another mode, as they are written there.
    pub listen: BTreeMap<String, TlsMode>,
}

/// Whether an address demands TLS.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum TlsMode {
    /// Hosts must use TLS.
    #[default]
    Required,
    /// Hosts may use TLS. Those with a key must.
    Allowed,
    /// There is no TLS.
    Off,
}

impl TlsMode {
    const fn demand(self) -> Option<Demand> {
        match self {
            Self::Required => Some(Demand::Required),
            Self::Allowed => Some(Demand::Allowed),
            Self::Off => None,
        }
    }
}

/// Whether each address demands TLS: those of `listen`, and then those of `discovery`.
pub(crate) fn demands(config: &Config) -> Vec<Option<Demand>> {
    let TlsOptions { hosts, mode, listen } = &config.tls;
    let mode_of = |address: &String| match hosts.is_empty() {
        true => TlsMode::Off,
        false => listen.get(address).copied().unwrap_or(*mode),
    };
    let addresses = config.listen.iter().chain(&config.discovery);
    addresses.map(|address| mode_of(address).demand()).collect()
}

/// The keys of the hosts for the subsystem, and for discovery.
pub(crate) fn key_ring(config: &Config, subnqn: &str) -> Result<KeyRing, Vec<Problem>> {
    let TlsOptions { hosts, mode, listen } = &config.tls;
    let (mut ring, mut problems) = (KeyRing::default(), Vec::new());
    for (host, source) in hosts {
        match source.read_psk() {
            Ok(psk) => {
                ring.add(&psk, host, subnqn);
                ring.add(&psk, host, DISCOVERY_NQN);
            }
            Err((what, advice)) => {
                problems.push(Problem::new(format!("tls.hosts.{host:?}"), what, advice));
            }
        }
    }
    if hosts.is_empty() && (*mode != TlsMode::Required || !listen.is_empty()) {
        let advice = "give the hosts' keys in tls.hosts, or leave out the rest of tls";
        problems.push(Problem::new("tls", "no host has a key, so there is no TLS", advice));
    }
    for address in listen.keys() {
        if !config.listen.contains(address) && !config.discovery.contains(address) {
            let advice = "write the address as in listen or discovery";
            let what = format!("{address:?}: the target does not listen there");
            problems.push(Problem::new("tls.listen", what, advice));
        }
    }
    if problems.is_empty() { Ok(ring) } else { Err(problems) }
}

/// The part of a running target that does TLS.
#[derive(Debug)]
pub(crate) struct TlsService {
    door: Arc<Door>,
    relay: Relay,
}

impl TlsService {
    /// Starts the relay, if any address has TLS.
    pub(crate) fn start(
        ring: KeyRing,
        demands: &[Option<Demand>],
    ) -> Result<Option<Arc<Self>>, TlsError> {
        if demands.iter().all(Option::is_none) {
            return Ok(None);
        }
        let door = Arc::new(Door::new(ring)?);
        let relay = Relay::start().map_err(TlsError::Io)?;
        Ok(Some(Arc::new(Self { door, relay })))
    }

    /// Replaces the keys. Connections that exist stay.
    pub(crate) fn set_keys(&self, ring: KeyRing) {
        self.door.set_keys(ring);
    }

    /// The socket that takes the place of one that was accepted at an address with TLS.
    pub(crate) fn accept(
        &self,
        socket: Socket,
        demand: Demand,
    ) -> std::io::Result<(Socket, Option<Arc<LinkEnd>>)> {
        let (socket, end) = self.door.accept(&self.relay, socket, demand)?;
        Ok((socket, Some(end)))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const HOST: &str = "nqn.2026-01.io.example:host";
    const PSK: &str = "NVMeTLSkey-1:01:VRLbtnN9AQb2WXW3c9+wEf/DRLz0QuLdbYvEhwtdWwNf9LrZ:";

    fn config(toml: &str) -> Config {
        Config::from_toml(toml).unwrap()
    }

    #[test]
    fn each_address_has_its_mode() {
        let hosts = format!("[tls.hosts]\n\"{HOST}\" = \"{PSK}\"\n");
        let listen =
            "listen = [\"10.0.0.1:4420\", \"127.0.0.1:4420\"]\ndiscovery = [\"10.0.0.1\"]\n";
        let of = |toml: &str| demands(&config(toml));
        assert_eq!(of(listen), [None; 3]);
        assert_eq!(of(&format!("{listen}{hosts}")), [Some(Demand::Required); 3]);
        let tls = "[tls]\nmode = \"allowed\"\nlisten = { \"127.0.0.1:4420\" = \"off\" }\n";
        let allowed = Some(Demand::Allowed);
        assert_eq!(of(&format!("{listen}{tls}{hosts}")), [allowed, None, allowed]);
    }

    #[test]
    fn a_mistake_is_named_and_no_key_is_shown() {
        let of = |toml: &str| key_ring(&config(toml), "nqn.2026-01.io.example:drives");
        assert!(of("").is_ok());
        assert!(of("[tls]\nmode = \"allowed\"").is_err(), "without a key there is no TLS");
        let toml = format!(
            "[tls]\nlisten = {{ \"10.9.9.9\" = \"off\" }}\n[tls.hosts]\n\"{HOST}\" = \"{}\"\n\
             \"nqn.2026-01.io.example:b\" = \"/nowhere/key\"",
            PSK.replace("VRL", "VRM")
        );
        let problems = of(&toml).unwrap_err();
        let text: Vec<String> = problems.iter().map(ToString::to_string).collect();
        let text = text.join("\n");
        for word in ["10.9.9.9", "checksum", "/nowhere/key", HOST] {
            assert!(text.contains(word), "no {word} in {text}");
        }
        let config = config(&toml);
        let shown = format!("{text}{config:?}") + &toml::to_string(&config).unwrap();
        assert!(!shown.contains("VRM") && shown.contains("not shown"), "{shown}");
        assert!(Config::from_toml("[tls]\nmode = \"maybe\"").is_err());
    }
}

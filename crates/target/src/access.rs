//! Remarks on the hosts that may connect to a target.

use std::net::SocketAddr;

use riopipe_session::auth::tls::Demand;

use crate::config::Config;
use crate::tls::demands;

/// The remark on a list of hosts, which is not the protection that it seems to be.
const NAMES_ONLY: &str = "hosts without a secret are told apart by the names that they give, which \
    nothing proves: a host that knows a listed name is admitted. Give each host a secret (dhchap) or a key (tls), or \
    keep others away by the network (addresses, firewall, VPN)";
/// The remark on secrets without encryption.
const NOT_ENCRYPTED: &str = "hosts prove their identity when they connect, and what follows is neither \
    encrypted nor signed: a machine on the way can read and change it. Use a network that you trust, or \
    a VPN";

/// The remarks on a configuration whose listeners have these addresses: the place, and the text.
pub(crate) fn access_notes(
    config: &Config,
    addresses: &[SocketAddr],
) -> Vec<(&'static str, String)> {
    let mut notes = Vec::new();
    let open: Vec<String> = addresses
        .iter()
        .filter(|address| address.ip().is_unspecified())
        .map(ToString::to_string)
        .collect();
    let demands = demands(config);
    let is_plain = |(address, demand): (&SocketAddr, &Option<Demand>)| {
        !address.ip().is_loopback() && *demand != Some(Demand::Required)
    };
    if !config.dhchap.hosts.is_empty() && addresses.iter().zip(&demands).any(is_plain) {
        notes.push(("dhchap", NOT_ENCRYPTED.to_owned()));
    }
    let is_without_secret = |host: &String| {
        !config.dhchap.hosts.contains_key(host) && !config.tls.hosts.contains_key(host)
    };
    match &config.hosts {
        None if !config.dhchap.hosts.is_empty() || !config.tls.hosts.is_empty() => {}
        None if !open.is_empty() => notes.push((
            "listen",
            format!(
                "{} stands for all addresses of this machine, and every host that reaches one of \
                 them may read and write the drives: there is neither authentication nor \
                 encryption. Listen on an address of a network that you trust, or give the hosts \
                 that may connect secrets (dhchap) or keys (tls)",
                open.join(", ")
            ),
        )),
        None => {}
        Some(_) if config.hosts_are_secret => {}
        Some(hosts) if !hosts.is_empty() && !hosts.iter().any(is_without_secret) => {}
        Some(_) => notes.push(("hosts", NAMES_ONLY.to_owned())),
    }
    notes
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::secrets::SecretSource;
    use crate::tls::TlsMode;

    #[test]
    fn only_what_is_open_is_remarked_on() {
        let of = |address: &str, hosts: Option<Vec<String>>| {
            let config = Config { hosts, ..Config::default() };
            let notes = access_notes(&config, &[address.parse().unwrap()]);
            notes.into_iter().map(|(place, _)| place).collect::<Vec<_>>()
        };
        for (address, hosts, places) in [
            ("127.0.0.1:1", None, &[][..]),
            ("192.0.2.1:1", None, &[]),
            ("0.0.0.0:1", None, &["listen"]),
            ("[::]:1", None, &["listen"]),
            ("[::]:1", Some(Vec::new()), &["hosts"]),
            ("127.0.0.1:1", Some(vec!["nqn.x".to_owned()]), &["hosts"]),
        ] {
            assert_eq!(of(address, hosts), places, "{address}");
        }
    }

    #[test]
    fn secrets_take_the_place_of_names() {
        let of = |address: &str, hosts: Option<Vec<String>>| {
            let mut config = Config { hosts, ..Config::default() };
            let secret = SecretSource::file("/etc/rio/secrets/x");
            config.dhchap.hosts.insert("nqn.x".to_owned(), secret);
            let notes = access_notes(&config, &[address.parse().unwrap()]);
            notes.into_iter().map(|(place, _)| place).collect::<Vec<_>>()
        };
        assert_eq!(of("127.0.0.1:1", None), [""; 0]);
        assert_eq!(of("0.0.0.0:1", None), ["dhchap"]);
        let of_tls = |address: &str, mode: TlsMode| {
            let mut config = Config { listen: vec![address.into()], ..Config::default() };
            let source = SecretSource::file("/etc/rio/secrets/x");
            config.dhchap.hosts.insert("nqn.x".to_owned(), source.clone());
            config.tls.hosts.insert("nqn.x".to_owned(), source);
            config.tls.mode = mode;
            let notes = access_notes(&config, &[address.parse().unwrap()]);
            notes.into_iter().map(|(place, _)| place).collect::<Vec<_>>()
        };
        assert_eq!(of_tls("0.0.0.0:1", TlsMode::Required), [""; 0], "all is encrypted");
        assert_eq!(of_tls("0.0.0.0:1", TlsMode::Allowed), ["dhchap"]);
        assert_eq!(of("127.0.0.1:1", Some(vec!["nqn.x".to_owned()])), [""; 0]);
        assert_eq!(of("127.0.0.1:1", Some(vec!["nqn.y".to_owned()])), ["hosts"]);
    }

    #[test]
    fn secret_names_are_not_remarked_on() {
        let hosts = Some(vec!["nqn.x".to_owned()]);
        let config = Config { hosts, hosts_are_secret: true, ..Config::default() };
        assert!(access_notes(&config, &["127.0.0.1:1".parse().unwrap()]).is_empty());
    }
}

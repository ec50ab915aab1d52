//! Remarks on the hosts that may connect to a target.

use std::net::SocketAddr;

use crate::config::Config;

/// The remark on a list of hosts, which is not the protection that it seems to be.
const NAMES_ONLY: &str = "hosts are told apart by the names that they give, which nothing proves: a \
    host that knows a listed name is admitted. Keep others away by the network (addresses, firewall, \
    VPN)";

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
    match &config.hosts {
        None if !open.is_empty() => notes.push((
            "listen",
            format!(
                "{} stands for all addresses of this machine, and every host that reaches one of \
                 them may read and write the drives: there is neither authentication nor \
                 encryption. Listen on an address of a network that you trust, or list the hosts \
                 that may connect",
                open.join(", ")
            ),
        )),
        None => {}
        Some(_) if config.hosts_are_secret => {}
        Some(_) => notes.push(("hosts", NAMES_ONLY.to_owned())),
    }
    notes
}

#[cfg(test)]
mod tests {
    use super::*;

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
    fn secret_names_are_not_remarked_on() {
        let hosts = Some(vec!["nqn.x".to_owned()]);
        let config = Config { hosts, hosts_are_secret: true, ..Config::default() };
        assert!(access_notes(&config, &["127.0.0.1:1".parse().unwrap()]).is_empty());
    }
}

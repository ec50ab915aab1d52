//! The difference between the configuration that a target serves and another one: what can change
//! while it serves, and what can't.

use std::collections::{BTreeMap, BTreeSet};
use std::fmt;

use crate::check::Problem;
use crate::checked_config::CheckedNamespace;
use crate::config::{AnaOptions, Config};
use crate::ports::{PortAddress, addresses_of};
use crate::tls::demands;

/// The namespaces, hosts and addresses that a change of the configuration adds and removes. The text has
/// a line for each, with `+` or `-` before it.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Difference {
    /// The namespaces that come.
    pub added: Vec<ServedDrive>,
    /// The namespaces that go.
    pub removed: Vec<ServedDrive>,
    /// The hosts that may connect from now on, and could not before. `None` stands for any host.
    pub added_hosts: Vec<Option<String>>,
    /// The hosts that may not connect any more. `None` stands for any host.
    pub removed_hosts: Vec<Option<String>>,
    /// The entries of `ana` that come, and those that go: their ports are *optimized* then, or as another
    /// entry wants.
    pub added_ana: Vec<AnaOptions>,
    /// See `added_ana`.
    pub removed_ana: Vec<AnaOptions>,
    /// The addresses at which the target is served from now on, and was not before.
    pub added_addresses: Vec<PortAddress>,
    /// The addresses at which the target is not served any more.
    pub removed_addresses: Vec<PortAddress>,
}

/// A namespace and the specification of its drive.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ServedDrive {
    /// The namespace identifier.
    pub nsid: u32,
    /// The drive.
    pub drive: String,
}

impl ServedDrive {
    fn of(namespace: &CheckedNamespace) -> Self {
        Self { nsid: namespace.nsid, drive: namespace.drive.clone() }
    }
}

impl Difference {
    /// Whether nothing changes.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        *self == Self::default()
    }

    /// Whether other hosts may connect, or through other addresses.
    #[must_use]
    pub fn changes_access(&self) -> bool {
        let hosts = self.added_hosts.len() + self.removed_hosts.len();
        hosts + self.added_addresses.len() != 0
    }
}

impl fmt::Display for Difference {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let host = |host: &Option<String>| host.clone().unwrap_or_else(|| "any host".to_owned());
        for ServedDrive { nsid, drive } in &self.removed {
            writeln!(f, "- namespace {nsid}: {drive}")?;
        }
        for ServedDrive { nsid, drive } in &self.added {
            writeln!(f, "+ namespace {nsid}: {drive}")?;
        }
        for removed in &self.removed_hosts {
            writeln!(f, "- host: {}", host(removed))?;
        }
        for added in &self.added_hosts {
            writeln!(f, "+ host: {}", host(added))?;
        }
        for removed in &self.removed_addresses {
            writeln!(f, "- {removed}")?;
        }
        for added in &self.added_addresses {
            writeln!(f, "+ {added}")?;
        }
        for removed in &self.removed_ana {
            writeln!(f, "- {removed}")?;
        }
        for added in &self.added_ana {
            writeln!(f, "+ {added}")?;
        }
        Ok(())
    }
}

/// A configuration with its checked values.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Checked<'a> {
    pub(crate) config: &'a Config,
    pub(crate) subnqn: &'a str,
    pub(crate) namespaces: &'a [CheckedNamespace],
}

/// The difference from the configuration `old`, which is served, to `new`.
///
/// # Errors
/// The changes that can't be made while the target serves: each key, and each namespace that
/// would change instead of going or coming.
pub(crate) fn difference(old: Checked<'_>, new: Checked<'_>) -> Result<Difference, Vec<Problem>> {
    let mut problems = fixed_keys(old, new);
    let mut difference = Difference::default();
    for namespace in new.namespaces {
        match change_of(namespace, old.namespaces) {
            Ok(true) => difference.added.push(ServedDrive::of(namespace)),
            Ok(false) => {}
            Err(problem) => problems.push(problem),
        }
    }
    if !problems.is_empty() {
        return Err(problems);
    }
    let is_gone = |served: &&CheckedNamespace| {
        new.namespaces.iter().all(|namespace| namespace.nsid != served.nsid)
    };
    difference.removed = old.namespaces.iter().filter(is_gone).map(ServedDrive::of).collect();
    let hosts = |config: &Config| -> Vec<Option<String>> {
        // A host with a secret or a key may connect, and no other, except those of the list.
        let with_secrets = config.dhchap.hosts.keys().chain(config.tls.hosts.keys());
        let mut with_secrets = with_secrets.peekable();
        if config.hosts.is_none() && with_secrets.peek().is_none() {
            return vec![None];
        }
        // A host may be in several of the lists.
        let named: BTreeSet<&String> = config.hosts.iter().flatten().chain(with_secrets).collect();
        named.into_iter().cloned().map(Some).collect()
    };
    let (old_hosts, new_hosts) = (hosts(old.config), hosts(new.config));
    let without = |hosts: &[Option<String>], others: &[Option<String>]| {
        hosts.iter().filter(|host| !others.contains(host)).cloned().collect()
    };
    let entries = |these: &Config, others: &Config| -> Vec<AnaOptions> {
        these.ana.iter().filter(|entry| !others.ana.contains(entry)).cloned().collect()
    };
    let (old_addresses, new_addresses) = (addresses_of(old.config), addresses_of(new.config));
    difference.added_addresses = without_each(&new_addresses, &old_addresses);
    difference.removed_addresses = without_each(&old_addresses, &new_addresses);
    difference.added_ana = entries(new.config, old.config);
    difference.removed_ana = entries(old.config, new.config);
    difference.added_hosts = without(&new_hosts, &old_hosts);
    difference.removed_hosts = without(&old_hosts, &new_hosts);
    Ok(difference)
}

/// These elements without the others. An element that is there twice needs two others.
fn without_each<T: PartialEq + Clone>(these: &[T], others: &[T]) -> Vec<T> {
    let mut left = these.to_vec();
    for other in others {
        if let Some(at) = left.iter().position(|one| one == other) {
            left.remove(at);
        }
    }
    left
}

/// Whether a namespace of the new configuration is added to those that are served.
///
/// # Errors
/// It would change a served namespace, or the id of a served drive.
fn change_of(namespace: &CheckedNamespace, served: &[CheckedNamespace]) -> Result<bool, Problem> {
    let nsid = namespace.nsid;
    let place = format!("namespace {nsid}");
    if let Some(same) = served.iter().find(|served| served.nsid == nsid) {
        return if same.drive != namespace.drive {
            Err(Problem::new(
                place,
                format!("its drive is {}, and would be {}", same.drive, namespace.drive),
                "remove the namespace by one reload, and add the new one by another, or give the \
                 new one a free nsid: else hosts could take one drive for the other",
            ))
        } else if !same.has_identity_of(namespace) {
            let what = "its uuid or nguid would change";
            Err(Problem::new(place, what, "restart the target, or remove it and add it again"))
        } else if same.ana_group != namespace.ana_group {
            let what = "its ana_group would change";
            Err(Problem::new(place, what, "restart the target, or remove it and add it again"))
        } else if same.lba_size != namespace.lba_size {
            let what = "its lba_size would change";
            Err(Problem::new(place, what, "restart the target, or remove it and add it again"))
        } else {
            Ok(false)
        };
    }
    match served.iter().find(|served| served.drive == namespace.drive) {
        Some(other) => Err(Problem::new(
            place,
            format!("its drive {} is namespace {} now", namespace.drive, other.nsid),
            &format!(
                "give it nsid = {} to keep the id (without nsid it gets the lowest free one)",
                other.nsid
            ),
        )),
        None => Ok(true),
    }
}

/// The keys whose values can't change while the target serves, and differ.
fn fixed_keys(old: Checked<'_>, new: Checked<'_>) -> Vec<Problem> {
    // A key that is added to the configuration must be named here.
    let Config {
        listen: _,
        discovery: _,
        subnqn: _,
        serial,
        model,
        namespaces: _,
        ana: _,
        log,
        // These are for the opening of drives, which a reload does with the new values.
        create: _,
        accept_lost_log: _,
        lock_wait_ms: _,
        hosts: _,
        hosts_are_secret: _,
        // The secrets are read again, and count from then on.
        dhchap: _,
        // The keys, too. The modes are compared below.
        tls: _,
        pending_connections,
        pending_connections_per_address,
        reactors,
        cores,
        spin_us,
        require_header_digest,
        require_data_digest,
        io_queues,
        connections,
        memory_mib,
        grace_ms,
        metrics,
        control,
        remarks: _,
    } = new.config;
    let mut problems = Vec::new();
    let mut compare = |key: &str, old_text: String, new_text: String| {
        if old_text != new_text {
            let is_made_from_address = key == "subnqn" && new.config.subnqn.is_none();
            problems.push(Problem::new(
                key,
                format!("is {old_text}, and would be {new_text}"),
                match is_made_from_address {
                    true => "the default follows from the first address: set subnqn to keep it",
                    false => "this can't change while the target serves: restart it",
                },
            ));
        }
    };
    let is = old.config;
    macro_rules! fixed {
        ($($key:ident),*) => {
            $(compare(stringify!($key), shown(&is.$key), shown($key));)*
        };
    }
    compare("subnqn", shown(&old.subnqn), shown(&new.subnqn));
    compare("tls", tls_of(old.config, new.config), tls_of(new.config, old.config));
    fixed!(
        serial,
        model,
        log,
        reactors,
        cores,
        spin_us,
        require_header_digest,
        require_data_digest,
        io_queues,
        connections,
        pending_connections,
        pending_connections_per_address,
        memory_mib,
        grace_ms,
        metrics,
        control
    );
    problems
}

/// Whether there is TLS, and the demands of the addresses that the other configuration has, too.
/// Addresses that come bring their demand.
fn tls_of(config: &Config, other: &Config) -> String {
    let demands = demands(config);
    let is_used = demands.iter().any(Option::is_some);
    let others = addresses_of(other);
    let is_kept = |of: &PortAddress| others.iter().any(|other| other.address == of.address);
    let kept: BTreeMap<_, _> = addresses_of(config)
        .into_iter()
        .zip(demands)
        .filter(|(of, _)| is_kept(of))
        .map(|(of, demand)| (of.address, demand))
        .collect();
    match is_used {
        false => "off".to_owned(),
        true => format!("{kept:?}"),
    }
}

/// A value as a message shows it.
fn shown(value: &impl serde::Serialize) -> String {
    match serde_json::to_string(value).as_deref() {
        Ok("null") => "not given".to_owned(),
        Ok(text) => text.to_owned(),
        // Plain values: serialisation can't fail.
        Err(error) => error.to_string(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::checked_config::check_config;
    use crate::config::NamespaceOptions;

    fn namespace(nsid: u32, drive: &str) -> NamespaceOptions {
        NamespaceOptions { nsid: Some(nsid), drive: drive.into(), ..Default::default() }
    }

    fn two() -> Config {
        Config {
            namespaces: vec![namespace(1, "mem:16M"), namespace(2, "mem:32M")],
            hosts: Some(vec!["nqn.2026-11.com.example:a".into()]),
            ..Config::default()
        }
    }

    fn of(old: &Config, new: &Config) -> Result<Difference, Vec<Problem>> {
        let (checked_old, checked_new) = (check_config(old).unwrap(), check_config(new).unwrap());
        let checked = |config, checked: &'_ crate::checked_config::CheckedConfig| {
            let subnqn: &str = Box::leak(checked.subnqn.clone().into_boxed_str());
            (config, subnqn)
        };
        let ((_, old_nqn), (_, new_nqn)) = (checked(old, &checked_old), checked(new, &checked_new));
        difference(
            Checked { config: old, subnqn: old_nqn, namespaces: &checked_old.namespaces },
            Checked { config: new, subnqn: new_nqn, namespaces: &checked_new.namespaces },
        )
    }

    #[test]
    fn namespaces_and_hosts_come_and_go() {
        let old = two();
        assert!(of(&old, &old).unwrap().is_empty());
        let new = Config {
            namespaces: vec![namespace(3, "mem:64M"), namespace(2, "mem:32M")],
            hosts: Some(vec!["nqn.2026-11.com.example:b".into()]),
            // For the drives that come.
            create: true,
            lock_wait_ms: 7,
            ..old.clone()
        };
        assert_eq!(
            of(&old, &new).unwrap().to_string(),
            "- namespace 1: mem:16M\n+ namespace 3: mem:64M\n\
             - host: nqn.2026-11.com.example:a\n+ host: nqn.2026-11.com.example:b\n"
        );
        let any = Config { hosts: None, ..old.clone() };
        let text = of(&old, &any).unwrap().to_string();
        assert_eq!(text, "- host: nqn.2026-11.com.example:a\n+ host: any host\n");
        assert!(of(&any, &old).unwrap().to_string().starts_with("- host: any host\n"));
        // The order of the list means nothing.
        let turned = Config { namespaces: two().namespaces.into_iter().rev().collect(), ..two() };
        assert!(of(&old, &turned).unwrap().is_empty());
    }

    #[test]
    fn an_address_that_comes_brings_its_tls_and_one_that_stays_keeps_it() {
        let with = |listen: &str, tls: &str| {
            let key = "NVMeTLSkey-1:01:VRLbtnN9AQb2WXW3c9+wEf/DRLz0QuLdbYvEhwtdWwNf9LrZ:";
            let hosts = format!("[tls.hosts]\n\"nqn.2026-11.com.example:a\" = \"{key}\"\n");
            let subnqn = "subnqn = \"nqn.2026-11.com.example:drives\"";
            let hosts = if tls == "none" { "" } else { &hosts };
            let tls = if tls == "none" { "" } else { tls };
            let text = format!(
                "{subnqn}\nlisten = [{listen}]\n{tls}\n{hosts}[[namespaces]]\ndrive = \"mem:16M\"\n"
            );
            Config::from_toml(&text).unwrap()
        };
        let (one, two) = ("\"127.0.0.1:7\"", "\"127.0.0.1:7\", \"127.0.0.2:7\"");
        let mode = |text: &str| format!("[tls]\n{text}");
        let old = with(one, "[tls]");
        let off = with(two, &mode("listen = { \"127.0.0.2:7\" = \"off\" }"));
        assert!(of(&old, &with(two, "[tls]")).is_ok() && of(&old, &off).is_ok());
        assert!(of(&off, &old).is_ok(), "the other one goes");
        let places = |old: &Config, new: &Config| {
            let problems = of(old, new).unwrap_err();
            problems.iter().map(|problem| problem.place.clone()).collect::<Vec<_>>()
        };
        assert_eq!(places(&old, &with(one, &mode("mode = \"allowed\""))), ["tls"]);
        assert_eq!(places(&off, &with(two, "[tls]")), ["tls"]);
        // The part that does TLS starts with the target.
        assert_eq!(places(&with(one, "none"), &off), ["tls"]);
    }

    #[test]
    fn what_cannot_change_is_named_and_nothing_is_half_done() {
        let old = two();
        let new = Config {
            listen: vec!["127.0.0.1:7".into()],
            log: Some("mem:2M".into()),
            reactors: Some(3),
            grace_ms: 7,
            namespaces: vec![namespace(1, "mem:1G"), namespace(4, "mem:32M")],
            ..old.clone()
        };
        let problems = of(&old, &new).unwrap_err();
        let places: Vec<&str> = problems.iter().map(|problem| problem.place.as_str()).collect();
        // The default NQN is made from the first address.
        assert_eq!(places, ["subnqn", "log", "reactors", "grace_ms", "namespace 1", "namespace 4"]);
        let text: Vec<String> = problems.iter().map(ToString::to_string).collect();
        assert!(text[0].contains("set subnqn to keep it"), "{text:?}");
        assert!(text[1].contains("is not given, and would be \"mem:2M\""), "{text:?}");
        assert!(text[4].contains("mem:16M") && text[4].contains("mem:1G"), "{text:?}");
        assert!(text[5].contains("is namespace 2 now") && text[5].contains("nsid = 2"), "{text:?}");
        let named = |uuid: &str| {
            let mut config = two();
            config.namespaces[0].uuid = Some(uuid.into());
            config
        };
        let uuid = "01234567-89ab-cdef-0123-456789abcdef";
        let problems = of(&old, &named(uuid)).unwrap_err();
        assert!(problems[0].what.contains("uuid"), "{problems:?}");
        assert!(of(&named(uuid), &named(uuid)).unwrap().is_empty());
        let mut small = two();
        small.namespaces[0].lba_size = Some(512);
        let problems = of(&old, &small).unwrap_err();
        assert!(problems[0].what.contains("lba_size"), "{problems:?}");
        let mut grouped = two();
        grouped.namespaces[0].ana_group = Some(2);
        let problems = of(&old, &grouped).unwrap_err();
        assert!(problems[0].what.contains("ana_group"), "{problems:?}");
        grouped.namespaces[0].ana_group = Some(1);
        assert!(of(&old, &grouped).unwrap().is_empty(), "the default");
    }

    #[test]
    fn states_of_ports_come_and_go() {
        let with = |states: &[(Option<u32>, &str)]| Config {
            ana: states
                .iter()
                .map(|(group, state)| AnaOptions { port: 1, group: *group, state: (*state).into() })
                .collect(),
            ..two()
        };
        let old = with(&[(None, "inaccessible"), (Some(2), "change")]);
        assert!(of(&old, &old).unwrap().is_empty());
        let new = with(&[(Some(2), "change"), (Some(3), "non-optimized")]);
        assert_eq!(
            of(&old, &new).unwrap().to_string(),
            "- port 1: inaccessible\n+ port 1, ANA group 3: non-optimized\n"
        );
    }

    #[test]
    fn addresses_come_and_go() {
        let with = |listen: &[&str], discovery: &[&str]| Config {
            listen: listen.iter().map(|&text| text.to_owned()).collect(),
            discovery: discovery.iter().map(|&text| text.to_owned()).collect(),
            subnqn: Some("nqn.2026-11.com.example:s".into()),
            ..two()
        };
        let old = with(&["192.0.2.1", "192.0.2.2:4420"], &["192.0.2.1"]);
        assert!(of(&old, &old).unwrap().is_empty());
        // The order means nothing here, and neither does a port that is the default.
        let same = with(&["192.0.2.2", "192.0.2.1:4420"], &["192.0.2.1:8009"]);
        assert!(of(&old, &same).unwrap().is_empty());
        let new = with(&["192.0.2.2", "[::1]:7", "[::1]:7"], &["192.0.2.2:4420"]);
        assert_eq!(
            of(&old, &new).unwrap().to_string(),
            "- address 192.0.2.1:4420\n- discovery address 192.0.2.1:8009\n\
             + address [::1]:7\n+ address [::1]:7\n+ discovery address 192.0.2.2:4420\n"
        );
    }

    /// Without an nsid the third drive of three would move when the second one goes.
    #[test]
    fn an_id_that_would_move_is_refused() {
        let plain = |drives: &[&str]| Config {
            namespaces: drives
                .iter()
                .map(|drive| NamespaceOptions { drive: (*drive).into(), ..Default::default() })
                .collect(),
            ..Config::default()
        };
        let old = plain(&["mem:1M", "mem:2M", "mem:3M"]);
        let problems = of(&old, &plain(&["mem:1M", "mem:3M"])).unwrap_err();
        assert!(problems[0].what.contains("mem:2M") && problems[0].what.contains("mem:3M"));
        let added = of(&old, &plain(&["mem:1M", "mem:2M", "mem:3M", "mem:4M"])).unwrap().added;
        assert_eq!(added, [ServedDrive { nsid: 4, drive: "mem:4M".into() }]);
    }
}

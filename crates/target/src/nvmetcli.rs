//! nvmetcli's JSON, the configuration format of the Linux kernel's target.
//!
//! The structures have only the keys that a Rio target uses:
//!
//! ```text
//! hosts[]:      nqn, dhchap, dhchap_key (refused)
//! ports[]:      portid, addr { adrfam, traddr, trsvcid, trtype, treq, tsas }, subsystems[],
//!               allowed_hosts[], ana_groups[] { grpid, ana { state } }
//! subsystems[]: nqn, attr { allow_any_host, serial, model }, allowed_hosts[], namespaces[]
//! namespaces[]: nsid, enable, ana_grpid, device { path, uuid, nguid }
//! ```
//!
//! Other keys are remarked on, unless they have the value that nvmetcli writes without being asked.
//! A key that would let more hosts in if it were ignored is an error.

mod unused;

use std::collections::{BTreeMap, BTreeSet};

use riopipe_media::spec::escape_commas;
use riopipe_nvme::ana::AnaState;
use serde::Deserialize;

use self::unused::{Keys, Remarks};
use crate::config::{AnaOptions, Config, NamespaceOptions};

/// The reason why such a file was not accepted.
#[derive(Debug, thiserror::Error)]
pub enum JsonError {
    /// It is not JSON with the right keys.
    #[error("not nvmetcli's JSON: {0}")]
    Shape(#[from] serde_json::Error),
    /// It does not have exactly one subsystem.
    #[error(
        "{0} subsystems: a Rio target serves one; write a file for each and start a target for \
         each"
    )]
    Subsystems(usize),
    /// A port has a transport other than TCP.
    #[error("port {portid} has transport {trtype:?}: a Rio target speaks tcp only")]
    Transport {
        /// Number of the port.
        portid: u16,
        /// Transport of the port.
        trtype: String,
    },
    /// A port asks for TLS.
    #[error(
        "port {portid} asks for TLS (tsas or treq): this target has none, and would be open \
         without it; remove the key if the network keeps others away"
    )]
    Tls {
        /// Number of the port.
        portid: u16,
    },
    /// No port offers the subsystem.
    #[error("no port lists subsystem {0:?}: add it to a port's \"subsystems\"")]
    NoPort(String),
    /// A host has a secret. Without it, the host would be admitted by its name alone.
    #[error(
        "host {0:?} has a secret (dhchap): a Rio target reads secrets from TOML only; put them into \
         [dhchap.hosts]"
    )]
    Secret(String),
}

/// The whole file.
#[derive(Deserialize)]
struct File {
    #[serde(default)]
    hosts: Vec<Host>,
    #[serde(default)]
    ports: Vec<Port>,
    #[serde(default)]
    subsystems: Vec<Subsystem>,
    #[serde(flatten)]
    other: Keys,
}

/// A host that the kernel's target knows, with the keys that versions of nvmetcli write for its
/// secret. Another list allows it.
#[derive(Deserialize)]
struct Host {
    #[serde(default)]
    nqn: String,
    dhchap: Option<serde::de::IgnoredAny>,
    dhchap_key: Option<serde::de::IgnoredAny>,
    #[serde(flatten)]
    other: Keys,
}

#[derive(Deserialize)]
struct Port {
    #[serde(default)]
    portid: u16,
    addr: Address,
    #[serde(default)]
    subsystems: Vec<String>,
    /// The hosts that may use the port, if it has a list of its own.
    #[serde(default)]
    allowed_hosts: Option<Vec<String>>,
    /// The states of the ANA groups. In the kernel, group 1 is optimized at first, and the others are
    /// inaccessible until the port has an entry for them.
    #[serde(default)]
    ana_groups: Vec<AnaGroup>,
    #[serde(flatten)]
    other: Keys,
}

#[derive(Deserialize)]
struct AnaGroup {
    grpid: u32,
    #[serde(default)]
    ana: Ana,
    #[serde(flatten)]
    other: Keys,
}

#[derive(Default, Deserialize)]
struct Ana {
    state: Option<String>,
    #[serde(flatten)]
    other: Keys,
}

#[derive(Deserialize)]
struct Address {
    #[serde(default)]
    adrfam: String,
    traddr: String,
    #[serde(deserialize_with = "text_or_number")]
    trsvcid: String,
    trtype: String,
    /// Whether the port needs a secure channel.
    #[serde(default)]
    treq: String,
    /// The secure channel: `none` or a version of TLS.
    #[serde(default)]
    tsas: String,
    #[serde(flatten)]
    other: Keys,
}

/// People write the port as a number.
fn text_or_number<'de, D: serde::Deserializer<'de>>(from: D) -> Result<String, D::Error> {
    #[derive(Deserialize)]
    #[serde(untagged)]
    enum Port {
        Text(String),
        Number(u16),
    }
    Ok(match Port::deserialize(from)? {
        Port::Text(text) => text,
        Port::Number(number) => number.to_string(),
    })
}

#[derive(Deserialize)]
struct Subsystem {
    nqn: String,
    #[serde(default)]
    attr: Attributes,
    #[serde(default)]
    allowed_hosts: Vec<String>,
    #[serde(default)]
    namespaces: Vec<Namespace>,
    #[serde(flatten)]
    other: Keys,
}

#[derive(Default, Deserialize)]
struct Attributes {
    #[serde(default)]
    allow_any_host: Switch,
    serial: Option<String>,
    model: Option<String>,
    #[serde(flatten)]
    other: Keys,
}

/// A value that is on or off: `1` and `0`, or a Boolean. nvmetcli writes the numbers as text,
/// people write them as numbers.
#[derive(Default, Deserialize)]
#[serde(untagged)]
enum Switch {
    Text(String),
    Number(u64),
    Bool(bool),
    /// The file has no value.
    #[default]
    Missing,
}

impl Switch {
    fn is_on(&self) -> bool {
        match self {
            Self::Text(text) => text == "1",
            Self::Number(number) => *number == 1,
            Self::Bool(on) => *on,
            Self::Missing => false,
        }
    }
}

#[derive(Deserialize)]
struct Namespace {
    nsid: u32,
    #[serde(default = "enabled")]
    enable: Switch,
    ana_grpid: Option<u32>,
    device: Device,
    #[serde(flatten)]
    other: Keys,
}

const fn enabled() -> Switch {
    Switch::Bool(true)
}

#[derive(Deserialize)]
struct Device {
    path: String,
    uuid: Option<String>,
    nguid: Option<String>,
    #[serde(flatten)]
    other: Keys,
}

/// Parses the text of a file into the configuration of a target.
///
/// # Errors
/// [`JsonError`].
pub(crate) fn parse(text: &str) -> Result<Config, JsonError> {
    let mut file: File = serde_json::from_str(text)?;
    let has_secret = |host: &&Host| host.dhchap.is_some() || host.dhchap_key.is_some();
    if let Some(host) = file.hosts.iter().find(has_secret) {
        return Err(JsonError::Secret(host.nqn.clone()));
    }
    if file.subsystems.len() != 1 {
        return Err(JsonError::Subsystems(file.subsystems.len()));
    }
    let subsystem = file.subsystems.remove(0);
    let mut remarks = Remarks::default();
    let ports = ports_of(&file.ports, &subsystem.nqn, &mut remarks)?;
    let listen = ports.iter().map(|port| port.addr.listen()).collect();
    let hosts = allowed_hosts(&subsystem, &ports, &file.hosts, &mut remarks);
    remark_on_unused(&file, &subsystem, &mut remarks);
    let enabled_namespaces =
        subsystem.namespaces.into_iter().filter(|namespace| namespace.enable.is_on());
    let namespaces: Vec<NamespaceOptions> = enabled_namespaces
        .map(|Namespace { nsid, device, ana_grpid, .. }| NamespaceOptions {
            drive: drive_spec(device.path),
            nsid: Some(nsid),
            uuid: present_id(device.uuid),
            nguid: present_id(device.nguid),
            lba_size: None,
            ana_group: ana_grpid,
        })
        .collect();
    let ana = ana_states(&ports, &namespaces);
    let defaults = Config::default();
    Ok(Config {
        listen,
        subnqn: Some(subsystem.nqn),
        serial: subsystem.attr.serial,
        model: subsystem.attr.model.unwrap_or(defaults.model),
        hosts,
        namespaces,
        ana,
        remarks: remarks.into_problems(),
        ..Config::default()
    })
}

/// The states of the ports that are not optimized, for the groups of the namespaces and those that the
/// ports name. A port without an entry for a group has the kernel's first state: optimized for group 1,
/// inaccessible for the others.
fn ana_states(ports: &[&Port], namespaces: &[NamespaceOptions]) -> Vec<AnaOptions> {
    let used: BTreeSet<u32> =
        namespaces.iter().filter_map(|namespace| namespace.ana_group).collect();
    let first_state = |group: u32| match group {
        1 => AnaState::Optimized.name(),
        _ => AnaState::Inaccessible.name(),
    };
    let mut states = Vec::new();
    for (port, place) in ports.iter().zip(1..) {
        let mut of_port: BTreeMap<u32, &str> =
            used.iter().map(|group| (*group, first_state(*group))).collect();
        for AnaGroup { grpid, ana, .. } in &port.ana_groups {
            of_port.insert(*grpid, ana.state.as_deref().unwrap_or(first_state(*grpid)));
        }
        of_port.retain(|_, state| *state != AnaState::Optimized.name());
        let of = |(group, state): (u32, &str)| AnaOptions {
            port: place,
            group: Some(group),
            state: state.to_owned(),
        };
        states.extend(of_port.into_iter().map(of));
    }
    states
}

/// The TCP ports that list the subsystem `nqn`.
fn ports_of<'a>(
    ports: &'a [Port],
    nqn: &String,
    remarks: &mut Remarks,
) -> Result<Vec<&'a Port>, JsonError> {
    let offering: Vec<&Port> = ports.iter().filter(|port| port.subsystems.contains(nqn)).collect();
    let (tcp, others): (Vec<&Port>, Vec<&Port>) =
        offering.into_iter().partition(|port| port.addr.trtype == "tcp");
    if let Some(port) = tcp.iter().find(|port| port.addr.needs_tls()) {
        return Err(JsonError::Tls { portid: port.portid });
    }
    match (tcp.is_empty(), others.first()) {
        (true, None) => Err(JsonError::NoPort(nqn.clone())),
        (true, Some(Port { portid, addr, .. })) => {
            Err(JsonError::Transport { portid: *portid, trtype: addr.trtype.clone() })
        }
        (false, _) => {
            for Port { portid, addr, .. } in others {
                let what = format!("transport {:?}: a Rio target speaks tcp only", addr.trtype);
                remarks.add(format!("port {portid}"), what, "the port is left out");
            }
            Ok(tcp)
        }
    }
}

impl Address {
    fn listen(&self) -> String {
        let Self { adrfam, traddr, trsvcid, .. } = self;
        match adrfam == "ipv6" || traddr.contains(':') {
            true => format!("[{traddr}]:{trsvcid}"),
            false => format!("{traddr}:{trsvcid}"),
        }
    }

    /// Whether hosts without TLS are to be refused.
    fn needs_tls(&self) -> bool {
        self.treq == "required" || !matches!(self.tsas.as_str(), "" | "none")
    }
}

/// The hosts that may connect; `None` for any. The target has one list for all of its ports, so a
/// host that a port does not allow is left out.
fn allowed_hosts(
    subsystem: &Subsystem,
    ports: &[&Port],
    known: &[Host],
    remarks: &mut Remarks,
) -> Option<Vec<String>> {
    let of_ports: Vec<&Vec<String>> =
        ports.iter().filter_map(|port| port.allowed_hosts.as_ref()).collect();
    let admits_any = subsystem.attr.allow_any_host.is_on();
    if admits_any && !subsystem.allowed_hosts.is_empty() {
        let what = "allowed_hosts beside allow_any_host, which takes precedence";
        remarks.add("subsystem", what, "set allow_any_host to 0 to admit only the list");
    }
    let mut hosts = match (admits_any, of_ports.first()) {
        (true, None) => return None,
        (true, Some(first)) => (*first).clone(),
        (false, _) => subsystem.allowed_hosts.clone(),
    };
    let mut seen = Vec::new();
    hosts.retain(|host| {
        let is_new = !seen.contains(host);
        seen.push(host.clone());
        is_new
    });
    let before = hosts.len();
    hosts.retain(|host| of_ports.iter().all(|allowed| allowed.contains(host)));
    if !of_ports.is_empty() {
        let what = format!(
            "a port has a list of hosts: {} hosts are admitted, on all ports, which every list \
             allows",
            hosts.len()
        );
        let advice = match before == hosts.len() {
            true => "",
            false => "start a target for each port to tell their hosts apart",
        };
        remarks.add("allowed_hosts", what, advice);
    }
    if !known.is_empty() {
        for host in hosts.iter().filter(|host| known.iter().all(|known| known.nqn != **host)) {
            let what = format!("allowed host {host:?} is not among the file's hosts");
            remarks.add("hosts", what, "it is admitted even so; is its name right?");
        }
    }
    Some(hosts)
}

/// Remarks on the keys that have no meaning here.
fn remark_on_unused(file: &File, subsystem: &Subsystem, remarks: &mut Remarks) {
    remarks.add_unused("file", &file.other);
    for (index, host) in file.hosts.iter().enumerate() {
        remarks.add_unused(format!("hosts[{index}]"), &host.other);
    }
    for port in &file.ports {
        remarks.add_unused(format!("port {}", port.portid), &port.other);
        remarks.add_unused(format!("port {}, addr", port.portid), &port.addr.other);
        for AnaGroup { grpid, ana, other } in &port.ana_groups {
            let place = format!("port {}, ANA group {grpid}", port.portid);
            remarks.add_unused(place.clone(), other);
            remarks.add_unused(place, &ana.other);
        }
    }
    remarks.add_unused("subsystem", &subsystem.other);
    remarks.add_unused("subsystem, attr", &subsystem.attr.other);
    for namespace in &subsystem.namespaces {
        let place = format!("namespace {}", namespace.nsid);
        remarks.add_unused(place.clone(), &namespace.other);
        remarks.add_unused(format!("{place}, device"), &namespace.device.other);
    }
}

/// The specification of the drive at an absolute path. Any other text is a specification already.
fn drive_spec(path: String) -> String {
    if path.starts_with("/dev/") {
        format!("block:{}", escape_commas(&path))
    } else if path.starts_with('/') {
        format!("file:{}", escape_commas(&path))
    } else {
        path
    }
}

/// The identifier; `None` if it is all zeroes, by which nvmetcli means that there is none.
fn present_id(id: Option<String>) -> Option<String> {
    id.filter(|id| id.chars().any(|c| c != '0' && c != '-'))
}

#[cfg(test)]
mod tests {
    use super::*;

    /// In the form that `nvmetcli save` writes.
    const SAVED: &str = r#"{
      "hosts": [{"nqn": "nqn.2026-01.io.example:host"}],
      "ports": [{
        "addr": {"adrfam": "ipv4", "traddr": "10.0.0.3", "treq": "not specified",
                 "trsvcid": "4420", "trtype": "tcp"},
        "ana_groups": [{"ana": {"state": "optimized"}, "grpid": 1}],
        "param": {"inline_data_size": "16384"},
        "portid": 2, "referrals": [], "subsystems": ["testnqn"]}],
      "subsystems": [{
        "allowed_hosts": ["nqn.2026-01.io.example:host"],
        "attr": {"allow_any_host": "0", "cntlid_max": "65519", "cntlid_min": "1",
                 "model": "Linux", "serial": "9de9d31eea4fc34d4ff6", "version": "1.3"},
        "namespaces": [
          {"ana_grpid": 1, "device": {"nguid": "ef90689c-6c46-d44c-89c1-4067801309a8",
             "path": "/dev/nvme0n1", "uuid": "00000000-0000-0000-0000-000000000000"},
           "enable": 1, "nsid": 1},
          {"device": {"path": "/srv/b.img"}, "enable": 0, "nsid": 2},
          {"device": {"path": "mem:64M"}, "nsid": 3},
          {"device": {"path": "/srv/a,b"}, "nsid": 4}],
        "nqn": "testnqn"}]}"#;

    #[test]
    fn a_file_saved_by_nvmetcli_is_accepted() {
        let config = parse(SAVED).unwrap();
        assert_eq!(config.listen, ["10.0.0.3:4420"]);
        assert_eq!(config.subnqn.as_deref(), Some("testnqn"));
        assert_eq!(config.hosts.as_deref().unwrap(), ["nqn.2026-01.io.example:host"]);
        let drives: Vec<_> = config.namespaces.iter().map(|n| (n.nsid, &n.drive[..])).collect();
        assert_eq!(
            drives,
            [(Some(1), "block:/dev/nvme0n1"), (Some(3), "mem:64M"), (Some(4), "file:/srv/a,,b")]
        );
        assert_eq!(config.namespaces[0].uuid, None, "all zeroes means none");
        assert!(config.namespaces[0].nguid.is_some());
        let open = SAVED.replace(r#""allow_any_host": "0""#, r#""allow_any_host": "1""#);
        assert_eq!(parse(&open).unwrap().hosts, None);
    }

    #[test]
    fn missing_features_are_reported() {
        let rdma = SAVED.replace(r#""trtype": "tcp""#, r#""trtype": "rdma""#);
        let error = parse(&rdma).unwrap_err().to_string();
        assert!(error.contains("port 2") && error.contains("rdma"), "{error}");
        for key in ["\"dhchap_key\": \"DHHC-1:00:x:\"", "\"dhchap\": {\"key\": \"x\"}"] {
            let host = r#""hosts": [{"#;
            let secret = SAVED.replace(host, &format!("{host}{key}, "));
            let error = parse(&secret).unwrap_err();
            assert!(matches!(error, JsonError::Secret(_)), "{error}");
        }
        for (key, value) in [("treq", "required"), ("tsas", "tls1.3")] {
            let mut file: serde_json::Value = serde_json::from_str(SAVED).unwrap();
            file["ports"][0]["addr"][key] = value.into();
            let refused = parse(&file.to_string());
            assert!(matches!(refused, Err(JsonError::Tls { portid: 2 })), "{key}");
        }
        let nowhere = SAVED.replace(r#""subsystems": ["testnqn"]"#, r#""subsystems": []"#);
        assert!(matches!(parse(&nowhere), Err(JsonError::NoPort(_))));
        assert!(matches!(parse("{}"), Err(JsonError::Subsystems(0))));
        assert!(matches!(parse("[1]"), Err(JsonError::Shape(_))));
    }

    fn remarks(file: &serde_json::Value) -> Vec<String> {
        let config = parse(&file.to_string()).unwrap();
        config.remarks.iter().map(ToString::to_string).collect()
    }

    fn saved() -> serde_json::Value {
        serde_json::from_str(SAVED).unwrap()
    }

    #[test]
    fn keys_without_a_meaning_are_remarked_on() {
        assert_eq!(
            remarks(&saved()),
            [
                "port 2: param: no meaning for a Rio target",
                "subsystem, attr: cntlid_max, cntlid_min, version: no meaning for a Rio target",
            ]
        );
        let mut file = saved();
        file["ports"][0]["ana_groups"][0]["weight"] = 7.into();
        file["subsystems"][0]["namespaces"][0]["resv_enable"] = 1.into();
        file["subsystems"][0]["passthru"] = serde_json::json!({"enable": 0});
        file["hosts"][0]["alias"] = "first".into();
        file["comment"] = "of the operator".into();
        let all = remarks(&file).join("\n");
        for words in [
            "file: comment:",
            "hosts[0]: alias:",
            "port 2: param:",
            "port 2, ANA group 1: weight:",
            "subsystem: passthru:",
            "namespace 1: resv_enable:",
        ] {
            assert!(all.contains(words), "no {words:?} in {all}");
        }
    }

    #[test]
    fn ports_of_other_transports_are_left_out() {
        let mut file = saved();
        let mut rdma = file["ports"][0].clone();
        rdma["addr"]["trtype"] = "rdma".into();
        rdma["portid"] = 3.into();
        let mut second = file["ports"][0].clone();
        // As people write it.
        second["addr"]["trsvcid"] = 4421.into();
        second["addr"]["traddr"] = "fd00::1".into();
        let ports = file["ports"].as_array_mut().unwrap();
        ports.extend([rdma, second]);
        let config = parse(&file.to_string()).unwrap();
        assert_eq!(config.listen, ["10.0.0.3:4420", "[fd00::1]:4421"]);
        assert!(remarks(&file)[0].starts_with("port 3: transport \"rdma\""));
    }

    /// As in the kernel, a group without an entry at a port is inaccessible there, except group 1.
    #[test]
    fn the_states_of_ports_are_taken_over() {
        let mut file = saved();
        let mut second = file["ports"][0].clone();
        second["addr"]["trsvcid"] = "4421".into();
        second["ana_groups"] = serde_json::json!([
            {"grpid": 1, "ana": {"state": "non-optimized"}},
            {"grpid": 2, "ana": {"state": "optimized"}},
            {"grpid": 3},
        ]);
        // A port that does not offer the subsystem has no place here.
        let mut other = second.clone();
        other["subsystems"] = serde_json::json!([]);
        file["ports"].as_array_mut().unwrap().extend([other, second]);
        file["subsystems"][0]["namespaces"][2]["ana_grpid"] = 2.into();
        let config = parse(&file.to_string()).unwrap();
        let groups: Vec<_> = config.namespaces.iter().map(|it| it.ana_group).collect();
        assert_eq!(groups, [Some(1), Some(2), None]);
        let states: Vec<String> = config.ana.iter().map(ToString::to_string).collect();
        assert_eq!(
            states,
            [
                "port 1, ANA group 2: inaccessible",
                "port 2, ANA group 1: non-optimized",
                "port 2, ANA group 3: inaccessible",
            ]
        );
        assert!(!remarks(&file).join("\n").contains("ana_gr"), "all of it has a meaning");
        // The check of the values finds a state that does not exist.
        file["ports"][0]["ana_groups"][0]["ana"]["state"] = "bogus".into();
        assert_eq!(parse(&file.to_string()).unwrap().ana[0].state, "bogus");
    }

    /// Never more hosts than the file admits.
    #[test]
    fn lists_of_hosts_of_ports_restrict_those_of_the_subsystem() {
        let (a, b) = ("nqn.2026-01.io.example:host", "nqn.2026-01.io.example:other");
        let hosts = |any: &str, subsystem: &[&str], ports: &[&[&str]]| {
            let mut file = saved();
            file["subsystems"][0]["attr"]["allow_any_host"] = any.into();
            file["subsystems"][0]["allowed_hosts"] = subsystem.into();
            let port = file["ports"][0].clone();
            file["ports"] = ports
                .iter()
                .map(|allowed| {
                    let mut port = port.clone();
                    port["allowed_hosts"] = (*allowed).into();
                    port
                })
                .collect();
            parse(&file.to_string()).unwrap().hosts
        };
        let some = |hosts: &[&str]| Some(hosts.iter().map(|host| (*host).to_owned()).collect());
        assert_eq!(hosts("0", &[a, b], &[&[a]]), some(&[a]));
        assert_eq!(hosts("0", &[a, b, a], &[&[a, b], &[b]]), some(&[b]));
        assert_eq!(hosts("1", &[], &[&[a]]), some(&[a]));
        assert_eq!(hosts("1", &[], &[&[a], &[b]]), some(&[]));
        let mut file = saved();
        file["subsystems"][0]["allowed_hosts"] = [a, b].as_slice().into();
        assert!(remarks(&file)[0].contains("other\" is not among the file's hosts"));
        file["subsystems"][0]["attr"]["allow_any_host"] = "1".into();
        assert_eq!(parse(&file.to_string()).unwrap().hosts, None);
        assert!(remarks(&file)[0].contains("takes precedence"));
    }
}

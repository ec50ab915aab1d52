//! nvmetcli's JSON, the configuration format of the Linux kernel's target.
//!
//! The structures have only the keys that a Rio target uses:
//!
//! ```text
//! hosts[]:      nqn, dhchap, dhchap_key (refused)
//! ports[]:      portid, addr { adrfam, traddr, trsvcid, trtype }, subsystems[]
//! subsystems[]: nqn, attr { allow_any_host, serial, model }, allowed_hosts[], namespaces[]
//! namespaces[]: nsid, enable, device { path, uuid, nguid }
//! ```

use riopipe_media::spec::escape_commas;
use serde::Deserialize;

use crate::config::{Config, NamespaceOptions};

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

/// The whole file. Other features of the kernel's target (ANA, passthrough, offload) are ignored if
/// they do not affect the data.
#[derive(Deserialize)]
struct File {
    #[serde(default)]
    hosts: Vec<Host>,
    #[serde(default)]
    ports: Vec<Port>,
    #[serde(default)]
    subsystems: Vec<Subsystem>,
}

/// A host, with the keys that versions of nvmetcli write for its secret.
#[derive(Deserialize)]
struct Host {
    #[serde(default)]
    nqn: String,
    dhchap: Option<serde::de::IgnoredAny>,
    dhchap_key: Option<serde::de::IgnoredAny>,
}

#[derive(Deserialize)]
struct Port {
    #[serde(default)]
    portid: u16,
    addr: Address,
    #[serde(default)]
    subsystems: Vec<String>,
}

#[derive(Deserialize)]
struct Address {
    #[serde(default)]
    adrfam: String,
    traddr: String,
    trsvcid: String,
    trtype: String,
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
}

#[derive(Default, Deserialize)]
struct Attributes {
    #[serde(default)]
    allow_any_host: Switch,
    serial: Option<String>,
    model: Option<String>,
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
    device: Device,
}

const fn enabled() -> Switch {
    Switch::Bool(true)
}

#[derive(Deserialize)]
struct Device {
    path: String,
    uuid: Option<String>,
    nguid: Option<String>,
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
    let listen = listen_addresses(&file.ports, &subsystem.nqn)?;
    if listen.is_empty() {
        return Err(JsonError::NoPort(subsystem.nqn));
    }
    let enabled_namespaces =
        subsystem.namespaces.into_iter().filter(|namespace| namespace.enable.is_on());
    let namespaces = enabled_namespaces.map(|Namespace { nsid, device, .. }| NamespaceOptions {
        drive: drive_spec(device.path),
        nsid: Some(nsid),
        uuid: present_id(device.uuid),
        nguid: present_id(device.nguid),
    });
    let defaults = Config::default();
    let admits_all_hosts = subsystem.attr.allow_any_host.is_on();
    Ok(Config {
        listen,
        subnqn: Some(subsystem.nqn),
        serial: subsystem.attr.serial,
        model: subsystem.attr.model.unwrap_or(defaults.model),
        hosts: if admits_all_hosts { None } else { Some(subsystem.allowed_hosts) },
        namespaces: namespaces.collect(),
        ..Config::default()
    })
}

/// The addresses of all ports that list the subsystem `nqn`.
fn listen_addresses(ports: &[Port], nqn: &String) -> Result<Vec<String>, JsonError> {
    let mut addresses = Vec::new();
    for port in ports.iter().filter(|port| port.subsystems.contains(nqn)) {
        let Address { adrfam, traddr, trsvcid, trtype } = &port.addr;
        if trtype != "tcp" {
            return Err(JsonError::Transport { portid: port.portid, trtype: trtype.clone() });
        }
        let is_ipv6 = adrfam == "ipv6" || traddr.contains(':');
        addresses.push(if is_ipv6 {
            format!("[{traddr}]:{trsvcid}")
        } else {
            format!("{traddr}:{trsvcid}")
        });
    }
    Ok(addresses)
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
        let nowhere = SAVED.replace(r#""subsystems": ["testnqn"]"#, r#""subsystems": []"#);
        assert!(matches!(parse(&nowhere), Err(JsonError::NoPort(_))));
        assert!(matches!(parse("{}"), Err(JsonError::Subsystems(0))));
        assert!(matches!(parse("[1]"), Err(JsonError::Shape(_))));
    }
}

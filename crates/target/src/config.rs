//! The configuration of a target.

#[cfg(doc)]
use riopipe_session::target::ANA_GROUP_MAX;
use riopipe_session::target::limits::{IO_QUEUES_MAX, MEMORY_BYTES};
use serde::{Deserialize, Serialize};
use std::fmt;

use crate::check::Problem;
use crate::secrets::DhchapOptions;
use crate::tls::TlsOptions;

/// The configuration of a target, from options or a file.
///
/// As TOML:
///
/// ```toml
/// listen = ["0.0.0.0:4420"]
/// log = "file:/var/lib/rio/log,size=2M"
///
/// [[namespaces]]
/// drive = "block:/dev/nvme0n1"
/// ```
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct Config {
    /// Addresses, with ports or without; port 0 takes a free one, 4420 is the default. They also
    /// answer discovery.
    pub listen: Vec<String>,
    /// Further addresses meant for discovery only, port 8009 by default; they also answer all other
    /// commands.
    pub discovery: Vec<String>,
    /// The subsystem's NQN; made from the machine and the first address if absent.
    pub subnqn: Option<String>,
    /// Serial number, at most 20 characters; made from the NQN if absent.
    pub serial: Option<String>,
    /// Model, at most 40 characters.
    pub model: String,
    /// The namespaces.
    pub namespaces: Vec<NamespaceOptions>,
    /// The ANA states of the ports that are not *optimized*.
    pub ana: Vec<AnaOptions>,
    /// The place of the ordering log, such as `file:/var/lib/rio/log,size=2M` or
    /// `block:/dev/nvme1n1`; without a log, engine `rio` is not available here.
    pub log: Option<String>,
    /// Create the files of drives and of the log that have a size and do not exist. Otherwise a
    /// missing file is an error: its file system may not be mounted, and a volume may be in it.
    pub create: bool,
    /// Create the log again, although it belongs to another boot or is damaged. Its state of
    /// volumes that were not closed is lost (trap T19).
    pub accept_lost_log: bool,
    /// Milliseconds to wait at the start for another process that has a drive or the log locked. A
    /// killed process keeps its locks until its last write has landed (trap T8).
    pub lock_wait_ms: u64,
    /// Host NQNs that may connect; all hosts may if absent.
    pub hosts: Option<Vec<String>>,
    /// The names in `hosts` are random and only this process knows them: a host that gives one is
    /// this process. Not part of a configuration file, where anyone may read the names.
    #[serde(skip)]
    pub hosts_are_secret: bool,
    /// The secrets of hosts that must authenticate, and the rules for that.
    pub dhchap: DhchapOptions,
    /// The keys of TLS, and the addresses that demand it.
    pub tls: TlsOptions,
    /// Number of reactors, one thread each; one per core if absent.
    pub reactors: Option<usize>,
    /// Cores to pin the reactors to, in order; none are pinned if empty.
    pub cores: Vec<usize>,
    /// Microseconds to poll before sleeping. 0 sleeps at once; 200 if absent.
    pub spin_us: Option<u64>,
    /// Refuse connections without header digests.
    pub require_header_digest: bool,
    /// Refuse connections without data digests.
    pub require_data_digest: bool,
    /// Number of I/O queues per controller.
    pub io_queues: u16,
    /// Largest number of connections of all hosts together; others wait until one ends (trap T28).
    pub connections: usize,
    /// Largest number of connections that are not admitted yet: that have not passed Connect, and, where
    /// it is demanded, authentication. They count among `connections`. One more displaces the oldest of
    /// the address with the most (trap T28).
    pub pending_connections: usize,
    /// As `pending_connections`, from one IPv4 address or one IPv6 network of 64 bits. A host opens all
    /// its I/O queues before their Connect, so this must not be below the queues of the hosts behind one
    /// address that connect at the same time.
    pub pending_connections_per_address: usize,
    /// MiB of data that reads, transfers and unsent answers of all connections may take, beyond 1
    /// MiB for each. Commands may bring four times as much in their capsules (trap T28).
    pub memory_mib: usize,
    /// Milliseconds that commands in flight may take to finish when the target stops.
    pub grace_ms: u64,
    /// Loopback address and port at which the program that runs the target serves its metrics, such
    /// as `127.0.0.1:9420`; port 0 takes a free one. Not served if absent. The target itself serves
    /// nothing there: see [`Running::stat_source`](crate::Running::stat_source).
    pub metrics: Option<String>,
    /// Path of the socket at which the program that runs the target takes commands, such as
    /// `/run/rio/target.sock`. None if absent.
    pub control: Option<String>,
    /// Remarks on the file that this configuration is from: what it asks for and does not get.
    #[serde(skip)]
    pub remarks: Vec<Problem>,
}

/// One namespace.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct NamespaceOptions {
    /// The drive, such as `mem:1G`, `file:/srv/a.img,size=10G` or `block:/dev/nvme0n1`.
    pub drive: String,
    /// Namespace identifier; the lowest free one if absent.
    #[serde(default)]
    pub nsid: Option<u32>,
    /// UUID; the drive's own if absent.
    #[serde(default)]
    pub uuid: Option<String>,
    /// NGUID, 32 hexadecimal digits; if absent, made from a given UUID, else the drive's own.
    #[serde(default)]
    pub nguid: Option<String>,
    /// Bytes of a logical block: 4096, or 512 for plain hosts that need that; 4096 if absent.
    #[serde(default)]
    pub lba_size: Option<u32>,
    /// ANA group, 1 to [`ANA_GROUP_MAX`]; 1 if absent.
    #[serde(default)]
    pub ana_group: Option<u32>,
}

/// The ANA state of a port.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct AnaOptions {
    /// The port: the place of its address in `listen`, counted from 1. Those of `discovery` follow.
    pub port: u16,
    /// The ANA group; all groups that no other entry for the port names if absent.
    #[serde(default)]
    pub group: Option<u32>,
    /// `optimized`, `non-optimized`, `inaccessible`, `persistent-loss` or `change`.
    pub state: String,
}

/// Port of an address to listen on that has none: the one that IANA has registered for NVMe-oF.
pub const DEFAULT_PORT: u16 = 4420;
/// Port of a discovery address that has none.
pub(crate) const DEFAULT_DISCOVERY_PORT: u16 = 8009;
/// Default address to listen on for NVMe/TCP.
pub const DEFAULT_LISTEN: &str = "127.0.0.1:4420";
/// Default wait for locked drives and logs, in milliseconds.
pub const DEFAULT_LOCK_WAIT_MS: u64 = 10_000;
/// Default time to poll before sleeping, in microseconds.
pub const DEFAULT_SPIN_US: u64 = 200;
/// Largest number of reactors that a configuration may ask for.
pub(crate) const REACTORS_MAX: usize = 256;
/// Largest number of connections that a configuration may allow.
pub(crate) const CONNECTIONS_MAX: usize = 1 << 16;
/// Least memory for data that a configuration may allow, in MiB: enough for one queue of the
/// largest size.
pub(crate) const MEMORY_MIB_MIN: usize = 2;
/// Most memory for data that a configuration may allow, in MiB: 1 TiB.
pub(crate) const MEMORY_MIB_MAX: usize = 1 << 20;
/// Default for the largest number of connections.
pub(crate) const DEFAULT_CONNECTIONS: usize = 4096;
/// Default for the largest number of connections that are not admitted.
pub(crate) const DEFAULT_PENDING: usize = 2048;
/// Default for the largest number of connections from one address that are not admitted: eight controllers
/// with the most I/O queues.
pub(crate) const DEFAULT_PENDING_PER_ADDRESS: usize = 1024;

impl fmt::Display for AnaOptions {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.group {
            Some(group) => write!(f, "port {}, ANA group {group}: {}", self.port, self.state),
            None => write!(f, "port {}: {}", self.port, self.state),
        }
    }
}

impl Default for Config {
    fn default() -> Self {
        Self {
            listen: vec![DEFAULT_LISTEN.into()],
            discovery: Vec::new(),
            subnqn: None,
            serial: None,
            model: "Rio target".into(),
            namespaces: Vec::new(),
            ana: Vec::new(),
            log: None,
            create: false,
            accept_lost_log: false,
            lock_wait_ms: DEFAULT_LOCK_WAIT_MS,
            hosts: None,
            hosts_are_secret: false,
            dhchap: DhchapOptions::default(),
            tls: TlsOptions::default(),
            reactors: None,
            cores: Vec::new(),
            spin_us: None,
            require_header_digest: false,
            require_data_digest: false,
            io_queues: IO_QUEUES_MAX,
            connections: DEFAULT_CONNECTIONS,
            pending_connections: DEFAULT_PENDING,
            pending_connections_per_address: DEFAULT_PENDING_PER_ADDRESS,
            memory_mib: MEMORY_BYTES >> 20,
            grace_ms: 1000,
            metrics: None,
            control: None,
            remarks: Vec::new(),
        }
    }
}

impl Config {
    /// Namespaces over these drives on a free loopback port: for tests and demonstrations. Missing
    /// files are created.
    #[must_use]
    pub fn on_loopback(drives: &[&str]) -> Self {
        Self {
            listen: vec!["127.0.0.1:0".into()],
            namespaces: drives
                .iter()
                .map(|drive| NamespaceOptions { drive: (*drive).into(), ..Default::default() })
                .collect(),
            create: true,
            ..Self::default()
        }
    }

    /// Reads TOML.
    ///
    /// # Errors
    /// The error, with line and column.
    pub fn from_toml(text: &str) -> Result<Self, Box<toml::de::Error>> {
        toml::from_str(text).map_err(Box::new)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_key_can_be_set_in_toml() {
        let config = Config::from_toml(
            r#"
            listen = ["0.0.0.0:4420", "[::]:4420"]
            discovery = ["0.0.0.0:8009"]
            subnqn = "nqn.2026-01.io.example:drives"
            log = "file:/var/lib/rio/log,size=2M"
            create = true
            hosts = ["nqn.2014-08.org.nvmexpress:uuid:0"]
            reactors = 2
            cores = [0, 1]
            spin_us = 50
            require_header_digest = true
            metrics = "127.0.0.1:9420"
            control = "/run/rio/target.sock"

            [[namespaces]]
            drive = "mem:1G"

            [[namespaces]]
            nsid = 7
            drive = "block:/dev/nvme0n1"
            uuid = "01234567-89ab-cdef-0123-456789abcdef"
            lba_size = 512
            "#,
        )
        .unwrap();
        assert_eq!(config.namespaces[1].nsid, Some(7));
        assert_eq!(config.namespaces[1].lba_size, Some(512));
        assert_eq!(config.spin_us, Some(50));
        assert!(config.create && !Config::default().create);
        assert!(config.require_header_digest && !config.require_data_digest);
        assert_eq!(config.metrics.as_deref(), Some("127.0.0.1:9420"));
        assert_eq!(config.control.as_deref(), Some("/run/rio/target.sock"));
        assert_eq!(Config::from_toml("").unwrap(), Config::default());
    }

    #[test]
    fn a_wrong_key_is_named_with_its_line() {
        let error = Config::from_toml("\nlisten = []\nlogs = \"x\"\n").unwrap_err().to_string();
        assert!(error.contains("line 3") && error.contains("logs"), "{error}");
    }
}

//! The values of a configuration, checked and completed with defaults. Nothing is opened here.

use std::collections::BTreeMap;
use std::fmt;
use std::ops::RangeInclusive;

use riopipe_metrics::{AddressError, TARGET_PORT, check_address};
use riopipe_net::{HostPort, allowed_cores};
use riopipe_nvme::ana::AnaState;
use riopipe_nvme::fabrics::check_nqn;
use riopipe_session::drive_identity::DriveId;
use riopipe_session::target::limits::IO_QUEUES_MAX;
use riopipe_session::target::{ANA_GROUP_MAX, LbaSize, NSID_MAX, PortState};
use uuid::Uuid;

use crate::check::Problem;
use crate::config::{
    AnaOptions, CONNECTIONS_MAX, Config, MEMORY_MIB_MAX, MEMORY_MIB_MIN, NamespaceOptions,
    REACTORS_MAX,
};
use crate::identity;

/// Length of the serial number (SN) in NVMe's Identify Controller data structure, in bytes.
const SERIAL_BYTES_MAX: usize = 20;
/// Length of the model number (MN) in the same structure, in bytes.
const MODEL_BYTES_MAX: usize = 40;

/// The values of a configuration that have defaults.
#[derive(Debug)]
pub(crate) struct CheckedConfig {
    pub(crate) subnqn: String,
    /// The serial number.
    pub(crate) serial: String,
    /// Number of reactors.
    pub(crate) reactors: usize,
    pub(crate) namespaces: Vec<CheckedNamespace>,
    /// The ANA states of the ports that the configuration names.
    pub(crate) ana: Vec<PortState>,
}

/// One namespace with all of its identifiers.
#[derive(Clone, Debug)]
pub(crate) struct CheckedNamespace {
    pub(crate) nsid: u32,
    /// The specification of the drive.
    pub(crate) drive: String,
    /// The identity that the configuration gives, or that follows from NQN and namespace id.
    pub(crate) id: DriveId,
    /// Whether the configuration gives the UUID.
    pub(crate) has_uuid: bool,
    /// Whether the configuration gives the NGUID.
    pub(crate) has_nguid: bool,
    /// The size of the logical blocks that hosts see.
    pub(crate) lba_size: LbaSize,
    /// The ANA group.
    pub(crate) ana_group: u32,
}

impl CheckedNamespace {
    /// Whether the configuration gives this namespace the same identifiers as the other.
    pub(crate) fn has_identity_of(&self, other: &Self) -> bool {
        (self.id, self.has_uuid, self.has_nguid) == (other.id, other.has_uuid, other.has_nguid)
    }
}

impl CheckedConfig {
    /// The values of a configuration with errors, for a check of its media. Values that the media
    /// do not need are blank.
    pub(crate) fn unchecked(config: &Config) -> Self {
        let namespaces =
            config.namespaces.iter().zip(1..).map(|(namespace, position)| CheckedNamespace {
                nsid: namespace.nsid.unwrap_or(position),
                drive: namespace.drive.clone(),
                id: DriveId { nguid: [0; 16], uuid: [0; 16] },
                has_uuid: false,
                has_nguid: false,
                lba_size: LbaSize::default(),
                ana_group: 1,
            });
        Self {
            subnqn: config.subnqn.clone().unwrap_or_default(),
            serial: String::new(),
            reactors: 1,
            namespaces: namespaces.collect(),
            ana: Vec::new(),
        }
    }
}

/// Checks everything that needs no open file, and adds the defaults.
pub(crate) fn check_config(config: &Config) -> Result<CheckedConfig, Vec<Problem>> {
    let mut checker = ConfigChecker { config, problems: Vec::new() };
    checker.check_not_empty();
    let subnqn = checker.check_subnqn();
    checker.check_hosts();
    let serial = checker.check_serial_and_model(&subnqn);
    let reactors = checker.check_reactors();
    checker.check_cores();
    checker.check_range("io_queues", config.io_queues, 1..=IO_QUEUES_MAX);
    checker.check_range("connections", config.connections, 1..=CONNECTIONS_MAX);
    let pending = 1..=CONNECTIONS_MAX;
    checker.check_range("pending_connections", config.pending_connections, pending.clone());
    let per_address = config.pending_connections_per_address;
    checker.check_range("pending_connections_per_address", per_address, pending);
    checker.check_range("memory_mib", config.memory_mib, MEMORY_MIB_MIN..=MEMORY_MIB_MAX);
    checker.check_metrics_address();
    let namespaces = checker.check_namespaces(&subnqn);
    let ana = checker.check_ana();
    if !checker.problems.is_empty() {
        return Err(checker.problems);
    }
    Ok(CheckedConfig { subnqn, serial, reactors, namespaces, ana })
}

/// A check of a configuration, which collects all of its errors.
struct ConfigChecker<'a> {
    config: &'a Config,
    problems: Vec<Problem>,
}

impl ConfigChecker<'_> {
    fn report(&mut self, place: &str, what: impl fmt::Display, advice: &str) {
        self.problems.push(Problem::new(place, what, advice));
    }

    fn check_not_empty(&mut self) {
        if self.config.listen.is_empty() {
            self.report("listen", "no address", "give one, such as 0.0.0.0:4420");
        }
        if self.config.namespaces.is_empty() {
            self.report("namespaces", "none", "give at least one drive, such as mem:1G");
        }
    }

    /// Checks the subsystem's NQN; returns it, or the default.
    fn check_subnqn(&mut self) -> String {
        let first_address = self.config.listen.first().map_or("", String::as_str);
        let subnqn = match &self.config.subnqn {
            Some(subnqn) => subnqn.clone(),
            None => identity::default_subnqn(first_address),
        };
        if let Err(error) = check_nqn(&subnqn) {
            let advice = "write it like nqn.2026-01.io.example:name";
            self.report("subnqn", format!("{subnqn:?}: {error}"), advice);
        }
        subnqn
    }

    fn check_hosts(&mut self) {
        for (index, host) in self.config.hosts.iter().flatten().enumerate() {
            if let Err(error) = check_nqn(host) {
                let advice = "copy it from the host's /etc/nvme/hostnqn";
                self.report(&format!("hosts[{index}]"), format!("{host:?}: {error}"), advice);
            }
        }
    }

    /// Checks the serial number and the model; returns the serial number, or the default.
    fn check_serial_and_model(&mut self, subnqn: &str) -> String {
        let serial = match &self.config.serial {
            Some(serial) => serial.clone(),
            None => identity::serial(subnqn),
        };
        self.check_identify_text("serial", &serial, SERIAL_BYTES_MAX);
        self.check_identify_text("model", &self.config.model, MODEL_BYTES_MAX);
        serial
    }

    /// Checks a text for a field of NVMe's Identify Controller data structure, which is ASCII.
    fn check_identify_text(&mut self, place: &str, text: &str, bytes_max: usize) {
        let is_ascii = text.chars().all(|c| c.is_ascii_graphic() || c == ' ');
        if text.len() > bytes_max || !is_ascii {
            let advice = format!("at most {bytes_max} ASCII characters");
            self.report(place, format!("{text:?}"), &advice);
        }
    }

    /// Checks the number of reactors; returns it, or the default: one for each core.
    fn check_reactors(&mut self) -> usize {
        let pinned_cores = self.config.cores.len();
        let default = if pinned_cores > 0 { pinned_cores } else { allowed_cores().len() };
        let reactors = self.config.reactors.unwrap_or(default);
        self.check_range("reactors", reactors, 1..=REACTORS_MAX);
        reactors
    }

    /// Checks that the machine has the cores. Whether this process may use a core shows when a
    /// reactor pins itself to the core.
    fn check_cores(&mut self) {
        let core_count = core_count_of_machine();
        if let Some(core) = self.config.cores.iter().find(|core| **core >= core_count) {
            let advice = format!("this machine has 0 to {}", core_count - 1);
            self.report("cores", format!("core {core}"), &advice);
        }
    }

    fn check_range<T: PartialOrd + fmt::Display>(
        &mut self,
        place: &str,
        value: T,
        allowed: RangeInclusive<T>,
    ) {
        if !allowed.contains(&value) {
            let advice = format!("give {} to {}", allowed.start(), allowed.end());
            self.report(place, value, &advice);
        }
    }

    fn check_metrics_address(&mut self) {
        let Some(address) = self.config.metrics.as_deref() else { return };
        let senseless = |_| AddressError::Senseless(address.to_owned());
        let parsed: Result<HostPort, _> = address.parse().map_err(senseless);
        let checked = parsed.and_then(|parsed| check_address(&parsed.with_port(TARGET_PORT)));
        if let Err(error) = checked {
            self.report("metrics", &error, error.advice());
        }
    }

    /// Checks the namespaces; returns them with their identifiers. A namespace without an
    /// identifier gets the lowest one that the configuration does not name.
    fn check_namespaces(&mut self, subnqn: &str) -> Vec<CheckedNamespace> {
        let config = self.config;
        let named: Vec<u32> = config.namespaces.iter().filter_map(|ns| ns.nsid).collect();
        let mut free_nsids = (1..).filter(|nsid| !named.contains(nsid));
        let mut checked: Vec<CheckedNamespace> = Vec::new();
        for (index, namespace) in config.namespaces.iter().enumerate() {
            let place = format!("namespaces[{index}]");
            let Some(nsid) = namespace.nsid.or_else(|| free_nsids.next()) else {
                continue;
            };
            if nsid == 0 || nsid > NSID_MAX {
                self.report(&place, format!("nsid {nsid}"), &format!("give 1 to {NSID_MAX}"));
            }
            if checked.iter().any(|other| other.nsid == nsid) {
                let what = format!("nsid {nsid} is used twice");
                self.report(&place, what, "give each namespace its own");
            }
            if namespace.drive.is_empty() {
                self.report(&place, "no drive", "give one, such as mem:1G");
            }
            let uuid = self.check_uuid(&place, namespace, subnqn, nsid);
            let nguid = self.check_nguid(&place, namespace, &uuid);
            checked.push(CheckedNamespace {
                nsid,
                drive: namespace.drive.clone(),
                id: DriveId { nguid, uuid: *uuid.as_bytes() },
                has_uuid: namespace.uuid.is_some(),
                has_nguid: namespace.nguid.is_some(),
                lba_size: self.check_lba_size(&place, namespace),
                ana_group: self.check_ana_group(&place, namespace.ana_group),
            });
        }
        checked
    }

    /// Checks an ANA group; returns it, or the default.
    fn check_ana_group(&mut self, place: &str, group: Option<u32>) -> u32 {
        let group = group.unwrap_or(1);
        if !(1..=ANA_GROUP_MAX).contains(&group) {
            let advice = format!("give 1 to {ANA_GROUP_MAX}");
            self.report(place, format!("ANA group {group}"), &advice);
        }
        group
    }

    /// Checks the ANA states of the ports; returns one for each group that they name.
    fn check_ana(&mut self) -> Vec<PortState> {
        let config = self.config;
        let ports = config.listen.len() + config.discovery.len();
        let mut states = BTreeMap::new();
        // The entries without a group come first, so that those with one take precedence.
        for named in [false, true] {
            for (index, entry) in config.ana.iter().enumerate() {
                if entry.group.is_some() != named {
                    continue;
                }
                let place = format!("ana[{index}]");
                let is_same = |of: &AnaOptions| (of.port, of.group) == (entry.port, entry.group);
                if let Some(first) = config.ana[..index].iter().position(is_same) {
                    let advice = "leave one of them";
                    self.report(&place, format!("the same port and group as ana[{first}]"), advice);
                }
                if entry.port == 0 || usize::from(entry.port) > ports {
                    let advice = format!("give 1 to {ports}: the places of the addresses");
                    self.report(&place, format!("port {}", entry.port), &advice);
                }
                let Some(state) = AnaState::from_name(&entry.state) else {
                    let names = AnaState::ALL.map(AnaState::name).join(", ");
                    let what = format!("state {:?}", entry.state);
                    self.report(&place, what, &format!("give one of {names}"));
                    continue;
                };
                let groups = match entry.group {
                    Some(group) => {
                        let group = self.check_ana_group(&place, Some(group));
                        group..=group
                    }
                    None => 1..=ANA_GROUP_MAX,
                };
                for group in groups {
                    states.insert((entry.port, group), state);
                }
            }
        }
        let state = |((port, group), state)| PortState { port, group, state };
        states.into_iter().map(state).collect()
    }

    /// Checks the size of a namespace's logical blocks; returns it, or the default.
    fn check_lba_size(&mut self, place: &str, namespace: &NamespaceOptions) -> LbaSize {
        let Some(bytes) = namespace.lba_size else { return LbaSize::default() };
        LbaSize::from_bytes(bytes).unwrap_or_else(|| {
            let advice = "give 4096, or 512 for hosts that need that";
            self.report(place, format!("lba_size {bytes}"), advice);
            LbaSize::default()
        })
    }

    /// Checks the UUID of a namespace; returns it, or the default.
    fn check_uuid(
        &mut self,
        place: &str,
        namespace: &NamespaceOptions,
        subnqn: &str,
        nsid: u32,
    ) -> Uuid {
        let Some(text) = namespace.uuid.as_deref() else {
            return identity::namespace_uuid(subnqn, nsid);
        };
        Uuid::parse_str(text).unwrap_or_else(|error| {
            self.report(place, format!("uuid: {error}"), "leave it out to have one made");
            Uuid::nil()
        })
    }

    /// Checks the NGUID of a namespace; returns it, or the default, which follows from the UUID.
    fn check_nguid(&mut self, place: &str, namespace: &NamespaceOptions, uuid: &Uuid) -> [u8; 16] {
        let Some(text) = namespace.nguid.as_deref() else {
            return identity::namespace_nguid(uuid);
        };
        match Uuid::parse_str(text) {
            Ok(nguid) => *nguid.as_bytes(),
            Err(error) => {
                self.report(place, format!("nguid: {error}"), "leave it out to have one made");
                [0; 16]
            }
        }
    }
}

/// Number of cores that the machine has, including those that this process may not use.
fn core_count_of_machine() -> usize {
    // SAFETY: takes a constant, returns a number or -1.
    let count = unsafe { libc::sysconf(libc::_SC_NPROCESSORS_CONF) };
    usize::try_from(count).unwrap_or(1).max(1)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Two ports for I/O and one for discovery, and these lines.
    fn checked(lines: &str) -> Result<CheckedConfig, Vec<String>> {
        let text = format!(
            "listen = [\"127.0.0.1:0\", \"127.0.0.2:0\"]\ndiscovery = [\"127.0.0.3:0\"]\n{lines}"
        );
        let config = Config::from_toml(&text).unwrap();
        check_config(&config).map_err(|all| all.iter().map(ToString::to_string).collect())
    }

    const DRIVE: &str = "[[namespaces]]\ndrive = \"mem:1M\"\n";

    #[test]
    fn a_state_is_of_one_group_or_of_all_that_no_other_entry_names() {
        let entry = |port: u16, group: &str, state: &str| {
            format!("[[ana]]\nport = {port}\n{group}\nstate = \"{state}\"\n")
        };
        let one = entry(2, "group = 7", "optimized");
        let all = entry(2, "", "inaccessible");
        let of_discovery = entry(3, "group = 128", "change");
        // Their order means nothing.
        for text in [[&one, &all, &of_discovery], [&of_discovery, &all, &one]] {
            let states = checked(&format!("{DRIVE}{}", text.map(String::as_str).concat()));
            let states = states.unwrap().ana;
            assert_eq!(states.len(), ANA_GROUP_MAX as usize + 1);
            let of = |port, group| {
                states.iter().find(|it| (it.port, it.group) == (port, group)).map(|it| it.state)
            };
            assert_eq!(of(2, 7), Some(AnaState::Optimized));
            for group in [1, 6, 8, ANA_GROUP_MAX] {
                assert_eq!(of(2, group), Some(AnaState::Inaccessible), "{group}");
            }
            assert_eq!(of(3, 128), Some(AnaState::Change));
            assert_eq!(of(1, 1), None, "optimized");
        }
        for state in AnaState::ALL {
            let states = checked(&format!("{DRIVE}{}", entry(1, "group = 1", state.name())));
            assert_eq!(states.unwrap().ana, [PortState { port: 1, group: 1, state }]);
        }
    }

    #[test]
    fn what_no_port_or_group_can_have_is_named_with_its_place() {
        for (lines, words) in [
            ("port = 0\nstate = \"optimized\"", "ana[0]: port 0; give 1 to 3"),
            ("port = 4\nstate = \"optimized\"", "ana[0]: port 4; give 1 to 3"),
            ("port = 1\nstate = \"bad\"", "ana[0]: state \"bad\"; give one of optimized, non-opt"),
            ("port = 1\nstate = \"Optimized\"", "ana[0]: state \"Optimized\""),
            ("port = 1\ngroup = 0\nstate = \"change\"", "ana[0]: ANA group 0; give 1 to 128"),
            ("port = 1\ngroup = 129\nstate = \"change\"", "ana[0]: ANA group 129"),
            (
                "port = 1\nstate = \"change\"\n[[ana]]\nport = 1\nstate = \"optimized\"",
                "ana[1]: the same port and group as ana[0]",
            ),
        ] {
            let problems = checked(&format!("{DRIVE}[[ana]]\n{lines}\n")).unwrap_err();
            assert_eq!(problems.len(), 1, "{problems:?}");
            assert!(problems[0].starts_with(words), "no {words:?} in {problems:?}");
        }
        for group in [0, 129] {
            let problems = checked(&format!("{DRIVE}ana_group = {group}\n")).unwrap_err();
            let words = format!("namespaces[0]: ANA group {group}; give 1 to 128");
            assert_eq!(problems, [words]);
        }
        let groups = |text: &str| checked(text).unwrap().namespaces[0].ana_group;
        assert_eq!((groups(DRIVE), groups(&format!("{DRIVE}ana_group = 128\n"))), (1, 128));
    }
}

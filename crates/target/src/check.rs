//! Checking a configuration: its errors, and the guarantees of its media.

use std::fmt;
use std::path::Path;

use riopipe_media::survival::{Kept, Row, Survival, row};
use riopipe_media::{boot_id, open_drive, open_log, survival_once_created};
use riopipe_metrics::check_address;
use riopipe_net::{Listener, allowed_cores};
use riopipe_nvme::fabrics::check_nqn;
use riopipe_order::log_region::opening::{Decision, Place, Refused, decide};
use riopipe_order::log_region::{HEADER_BYTES, OpenError};
use riopipe_session::target::NSID_MAX;
use riopipe_session::target::limits::IO_QUEUES_MAX;
use uuid::Uuid;

use crate::config::{CONNECTIONS_MAX, Config, MEMORY_MIB_MAX, MEMORY_MIB_MIN};
use crate::identity;

/// An error in a configuration: place, defect and remedy.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Problem {
    /// The part of the configuration, as its key.
    pub place: String,
    /// The defect.
    pub what: String,
    /// The remedy; empty if `what` contains it.
    pub advice: String,
}

impl Problem {
    fn new(place: impl Into<String>, what: impl fmt::Display, advice: &str) -> Self {
        Self { place: place.into(), what: what.to_string(), advice: advice.into() }
    }
}

impl fmt::Display for Problem {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}: {}", self.place, self.what)?;
        if !self.advice.is_empty() {
            write!(f, "; {}", self.advice)?;
        }
        Ok(())
    }
}

/// The result of checking a configuration.
#[derive(Clone, Debug, Default)]
pub struct Report {
    /// All errors.
    pub problems: Vec<Problem>,
    /// Remarks that are not errors.
    pub notes: Vec<Problem>,
    /// The guarantees of each namespace's drive together with the log.
    pub promises: Vec<Promise>,
    /// The subsystem's NQN.
    pub subnqn: String,
}

/// A row of the table of media: data drive and log.
#[derive(Clone, Debug)]
pub struct Promise {
    /// The namespace identifier.
    pub nsid: u32,
    /// The specification of its drive.
    pub drive: String,
    /// The specification of the log; `none` without one.
    pub log: String,
    /// The survival of failures, and the gain to expect.
    pub row: Row,
}

impl Promise {
    pub(crate) fn new(
        nsid: u32,
        drive: &str,
        survival: Survival,
        volatile: bool,
        log: Option<&str>,
        log_survives: Option<Survival>,
    ) -> Self {
        Self {
            nsid,
            drive: drive.to_owned(),
            log: log.unwrap_or("none").to_owned(),
            row: match log_survives {
                Some(log) => row(survival, volatile, log),
                None => Row {
                    process_kill: "blocks without order: there is no log",
                    power_cut: "blocks without order: there is no log",
                    gain: "none: engine rio needs a log; hosts fall back to sync",
                },
            },
        }
    }
}

impl Report {
    /// Whether a target with this configuration would start.
    #[must_use]
    pub fn is_ok(&self) -> bool {
        self.problems.is_empty()
    }
}

impl fmt::Display for Report {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        for problem in &self.problems {
            writeln!(f, "error: {problem}")?;
        }
        for note in &self.notes {
            writeln!(f, "note: {note}")?;
        }
        for Promise { nsid, drive, log, row } in &self.promises {
            writeln!(f, "namespace {nsid}: drive {drive}, log {log}")?;
            writeln!(f, "  after a process kill: {}", row.process_kill)?;
            writeln!(f, "  after a power cut:    {}", row.power_cut)?;
            writeln!(f, "  gain to expect:       {}", row.gain)?;
        }
        if self.is_ok() {
            writeln!(f, "{} would be served", self.subnqn)?;
        }
        Ok(())
    }
}

/// Checks a configuration without serving it. Existing drives and logs are opened and not changed;
/// nothing is created.
#[must_use]
pub fn check(config: &Config) -> Report {
    let mut report = Report::default();
    let checked = match check_config(config) {
        Ok(checked) => checked,
        Err(problems) => {
            report.problems = problems;
            // The rest is checked even so: one run shows all errors.
            CheckedConfig::rough(config)
        }
    };
    report.subnqn = checked.subnqn;
    for (key, addresses) in [("listen", &config.listen), ("discovery", &config.discovery)] {
        for (i, address) in addresses.iter().enumerate() {
            if let Err(error) = Listener::bind(address) {
                report.problems.push(Problem::new(format!("{key}[{i}]"), error, ""));
            }
        }
    }
    let log = check_log(config, &mut report);
    for (i, ns) in checked.namespaces.iter().enumerate() {
        let place = format!("namespaces[{i}] (nsid {})", ns.nsid);
        let Some((survival, volatile)) = check_drive(&place, &ns.drive, &mut report) else {
            continue;
        };
        if !survival.note.is_empty() {
            report.notes.push(Problem::new(&place, survival.note, ""));
        }
        let spec = config.log.as_deref();
        report.promises.push(Promise::new(ns.nsid, &ns.drive, survival, volatile, spec, log));
    }
    report
}

/// The path that a specification would create.
fn to_be_created(spec: &str) -> Option<&str> {
    let (kind, rest) = spec.split_once(':')?;
    let path = rest.split(',').next()?;
    let creates =
        matches!(kind, "file" | "dax" | "block") && rest.split(',').any(|o| o.starts_with("size="));
    (creates && !Path::new(path).exists()).then_some(path)
}

fn check_drive(place: &str, spec: &str, report: &mut Report) -> Option<(Survival, bool)> {
    if let Some(path) = to_be_created(spec) {
        if let Some(problem) = no_directory(place, path) {
            report.problems.push(problem);
            return None;
        }
        report.notes.push(Problem::new(place, format!("{path} will be created"), ""));
        let survival =
            Survival { process_kill: Kept::Completed, power_cut: Kept::Flushed, note: "" };
        return Some((survival, true));
    }
    // The properties of a drive in memory are known without allocating all of it.
    let lazy = matches!(spec.split(':').next(), Some("mem" | "ssd")) && !spec.contains(",lazy");
    let opened = open_drive(&if lazy { format!("{spec},lazy") } else { spec.to_owned() });
    match opened {
        Ok(drive) => Some((drive.survives(), drive.geometry().volatile_cache)),
        Err(error) => {
            report.problems.push(Problem::new(place, error, ""));
            None
        }
    }
}

fn no_directory(place: &str, path: &str) -> Option<Problem> {
    let directory = Path::new(path).parent()?;
    if directory.as_os_str().is_empty() || directory.is_dir() {
        return None;
    }
    let what = format!("{path} can't be created: {} is no directory", directory.display());
    Some(Problem::new(place, what, "make the directory first"))
}

fn check_log(config: &Config, report: &mut Report) -> Option<Survival> {
    let spec = config.log.as_deref()?;
    if let Some(path) = to_be_created(spec) {
        if let Some(problem) = no_directory("log", path) {
            report.problems.push(problem);
            return None;
        }
        report.notes.push(Problem::new("log", format!("{path} will be created"), ""));
        return match survival_once_created(spec) {
            Ok(Some(survival)) => {
                note(report, survival);
                Some(survival)
            }
            // Another process has created it just now.
            Ok(None) => None,
            Err(error) => {
                report.problems.push(Problem::new("log", error, ""));
                None
            }
        };
    }
    let store = match open_log(spec) {
        Ok(store) => store,
        Err(error) => {
            report.problems.push(Problem::new("log", error, ""));
            return None;
        }
    };
    note(report, store.survives());
    let refused = match (store.part(0..HEADER_BYTES.min(store.len())), boot_id()) {
        (Ok(header), Ok(boot)) => {
            let place = Place { len: store.len(), kind: store.kind(), boot };
            refusal(decide(&header, place, config.accept_lost_log, riopipe_platform::crc32c))
        }
        (Err(error), _) => Some(Problem::new("log", error, "")),
        (_, Err(error)) => Some(Problem::new("log", error, "")),
    };
    report.problems.extend(refused);
    Some(store.survives())
}

fn note(report: &mut Report, survival: Survival) {
    if !survival.note.is_empty() {
        report.notes.push(Problem::new("log", survival.note, ""));
    }
}

/// The error in the log that would keep the target, or volumes, from being served.
fn refusal(decided: Result<Decision, Refused>) -> Option<Problem> {
    let problem = |what: String, advice| Some(Problem::new("log", what, advice));
    match decided {
        Ok(Decision::Open | Decision::Create | Decision::GiveUp(_)) => None,
        Ok(Decision::Lost(_)) => problem(
            "the log is of another boot, in which its target was not stopped cleanly: the \
             volumes in it would be refused"
                .into(),
            "check their content, then start once with accept_lost_log (--accept-lost-log)",
        ),
        Err(Refused::TooSmall { have, .. }) => {
            problem(format!("{have} bytes are too small for a log region"), "give it 2M or more")
        }
        Err(Refused::Region(OpenError::Newer { version })) => problem(
            format!("a log region of format version {version}, written by a newer program"),
            "use that program",
        ),
        Err(Refused::Region(OpenError::NotALog)) => {
            problem("this is not a log region".into(), "check the path")
        }
        Err(Refused::Region(OpenError::Damaged { what })) => problem(
            format!("the log region is damaged: {what}"),
            "restore it, or give it up with accept_lost_log (--accept-lost-log)",
        ),
        Err(error) => problem(error.to_string(), ""),
    }
}

/// The configuration with all defaults.
#[derive(Debug)]
pub(crate) struct CheckedConfig {
    pub(crate) subnqn: String,
    pub(crate) serial: String,
    pub(crate) reactors: usize,
    pub(crate) namespaces: Vec<CheckedNamespace>,
}

#[derive(Debug)]
pub(crate) struct CheckedNamespace {
    pub(crate) nsid: u32,
    pub(crate) drive: String,
    pub(crate) uuid: Uuid,
    pub(crate) nguid: [u8; 16],
}

impl CheckedConfig {
    fn rough(config: &Config) -> Self {
        let namespaces = config.namespaces.iter().zip(1..).map(|(ns, nsid)| CheckedNamespace {
            nsid: ns.nsid.unwrap_or(nsid),
            drive: ns.drive.clone(),
            uuid: Uuid::nil(),
            nguid: [0; 16],
        });
        Self {
            subnqn: config.subnqn.clone().unwrap_or_default(),
            serial: String::new(),
            reactors: 1,
            namespaces: namespaces.collect(),
        }
    }
}

/// Number of cores of the machine. Each reactor is pinned on its own, and checks then whether this
/// process may use the core.
fn cores_of_machine() -> usize {
    // SAFETY: takes a constant, returns a number or -1.
    let count = unsafe { libc::sysconf(libc::_SC_NPROCESSORS_CONF) };
    usize::try_from(count).unwrap_or(1).max(1)
}

/// Checks everything that needs no open file, and adds the defaults.
pub(crate) fn check_config(config: &Config) -> Result<CheckedConfig, Vec<Problem>> {
    let mut problems = Vec::new();
    let mut wrong = |place: &str, what: String, advice: &str| {
        problems.push(Problem::new(place, what, advice));
    };
    if config.listen.is_empty() {
        wrong("listen", "no address".into(), "give one, such as 0.0.0.0:4420");
    }
    if config.namespaces.is_empty() {
        wrong("namespaces", "none".into(), "give at least one drive, such as mem:1G");
    }
    let listen = config.listen.first().map_or("", String::as_str);
    let subnqn = config.subnqn.clone().unwrap_or_else(|| identity::default_subnqn(listen));
    if let Err(error) = check_nqn(&subnqn) {
        let advice = "write it like nqn.2026-01.io.example:name";
        wrong("subnqn", format!("{subnqn:?}: {error}"), advice);
    }
    for (i, host) in config.hosts.iter().flatten().enumerate() {
        if let Err(error) = check_nqn(host) {
            let advice = "copy it from the host's /etc/nvme/hostnqn";
            wrong(&format!("hosts[{i}]"), format!("{host:?}: {error}"), advice);
        }
    }
    let serial = config.serial.clone().unwrap_or_else(|| identity::serial(&subnqn));
    for (place, text, most) in [("serial", &serial, 20), ("model", &config.model, 40)] {
        if text.len() > most || !text.chars().all(|c| c.is_ascii_graphic() || c == ' ') {
            wrong(place, format!("{text:?}"), &format!("at most {most} ASCII characters"));
        }
    }
    let cores = allowed_cores();
    let reactors = config.reactors.unwrap_or(match config.cores.len() {
        0 => cores.len(),
        pinned => pinned,
    });
    if !(1..=256).contains(&reactors) {
        wrong("reactors", format!("{reactors}"), "give 1 to 256");
    }
    let count = cores_of_machine();
    if let Some(core) = config.cores.iter().find(|core| **core >= count) {
        wrong("cores", format!("core {core}"), &format!("this machine has 0 to {}", count - 1));
    }
    if !(1..=IO_QUEUES_MAX).contains(&config.io_queues) {
        let advice = format!("give 1 to {IO_QUEUES_MAX}");
        wrong("io_queues", config.io_queues.to_string(), &advice);
    }
    if !(1..=CONNECTIONS_MAX).contains(&config.connections) {
        let advice = format!("give 1 to {CONNECTIONS_MAX}");
        wrong("connections", config.connections.to_string(), &advice);
    }
    if !(MEMORY_MIB_MIN..=MEMORY_MIB_MAX).contains(&config.memory_mib) {
        let advice = format!("give {MEMORY_MIB_MIN} to {MEMORY_MIB_MAX}");
        wrong("memory_mib", config.memory_mib.to_string(), &advice);
    }
    if let Some(Err(error)) = config.metrics.as_deref().map(check_address) {
        wrong("metrics", error.to_string(), error.advice());
    }
    let mut namespaces: Vec<CheckedNamespace> = Vec::new();
    let given: Vec<u32> = config.namespaces.iter().filter_map(|ns| ns.nsid).collect();
    let mut free = (1..).filter(|nsid| !given.contains(nsid));
    for (i, ns) in config.namespaces.iter().enumerate() {
        let place = format!("namespaces[{i}]");
        let Some(nsid) = ns.nsid.or_else(|| free.next()) else {
            continue;
        };
        if nsid == 0 || nsid > NSID_MAX {
            wrong(&place, format!("nsid {nsid}"), &format!("give 1 to {NSID_MAX}"));
        }
        if namespaces.iter().any(|other| other.nsid == nsid) {
            wrong(&place, format!("nsid {nsid} is used twice"), "give each namespace its own");
        }
        if ns.drive.is_empty() {
            wrong(&place, "no drive".into(), "give one, such as mem:1G");
        }
        let uuid = match ns.uuid.as_deref().map(Uuid::parse_str) {
            None => identity::namespace_uuid(&subnqn, nsid),
            Some(Ok(uuid)) => uuid,
            Some(Err(error)) => {
                wrong(&place, format!("uuid: {error}"), "leave it out to have one made");
                Uuid::nil()
            }
        };
        let nguid = match ns.nguid.as_deref().map(Uuid::parse_str) {
            None => identity::namespace_nguid(&uuid),
            Some(Ok(nguid)) => *nguid.as_bytes(),
            Some(Err(error)) => {
                wrong(&place, format!("nguid: {error}"), "leave it out to have one made");
                [0; 16]
            }
        };
        namespaces.push(CheckedNamespace { nsid, drive: ns.drive.clone(), uuid, nguid });
    }
    if problems.is_empty() {
        Ok(CheckedConfig { subnqn, serial, reactors, namespaces })
    } else {
        Err(problems)
    }
}

#[cfg(test)]
mod tests {
    use riopipe_order::attribute::{Member, VolumeId};
    use riopipe_order::log_region::{LogKind, LogRegion, MemberNamespace, NewVolume};
    use riopipe_order::region::MemRegion;

    use super::*;
    use crate::config::NamespaceOptions;

    fn places(report: &Report) -> Vec<&str> {
        report.problems.iter().map(|p| p.place.as_str()).collect()
    }

    #[test]
    fn all_errors_are_reported_at_once_with_their_places() {
        let namespace = |nsid, drive: &str| NamespaceOptions {
            nsid,
            drive: drive.into(),
            ..NamespaceOptions::default()
        };
        let config = Config {
            listen: vec!["127.0.0.1:0".into(), "nowhere".into()],
            subnqn: Some("drives".into()),
            serial: Some("far too long a serial number".into()),
            hosts: Some(vec!["me".into()]),
            reactors: Some(0),
            cores: vec![100_000],
            io_queues: 0,
            connections: 0,
            memory_mib: 0,
            log: Some("tape:/dev/st0".into()),
            metrics: Some("0.0.0.0:9420".into()),
            namespaces: vec![
                namespace(Some(1), "mem:1M"),
                namespace(Some(1), "mem:1000"),
                namespace(Some(5000), "file:/no/such/file"),
                NamespaceOptions { uuid: Some("?".into()), ..namespace(None, "") },
            ],
            ..Config::default()
        };
        let report = check(&config);
        let found = places(&report);
        for place in [
            "listen[1]",
            "subnqn",
            "serial",
            "hosts[0]",
            "reactors",
            "cores",
            "io_queues",
            "connections",
            "memory_mib",
            "log",
            "metrics",
            "namespaces[1]",
            "namespaces[2]",
            "namespaces[3]",
            "namespaces[1] (nsid 1)",
            "namespaces[2] (nsid 5000)",
        ] {
            assert!(found.contains(&place), "{place} in {found:?}");
        }
        assert!(!report.is_ok());
        let text = report.to_string();
        assert!(text.contains("error: listen[1]: ") && text.contains("0.0.0.0:4420"), "{text}");
        assert!(!text.contains("would be served"));
    }

    #[test]
    fn nothing_is_created_and_the_table_is_shown() {
        let dir = tempfile::tempdir().unwrap();
        let path = |name: &str| dir.path().join(name).display().to_string();
        let config = Config {
            log: Some(format!("file:{},size=2M", path("log"))),
            ..Config::on_loopback(&[
                "mem:16M",
                "ssd:flash,size=16M",
                &format!("file:{},size=1M", path("drive")),
            ])
        };
        let report = check(&config);
        assert!(report.is_ok(), "{report}");
        assert_eq!(std::fs::read_dir(dir.path()).unwrap().count(), 0, "nothing was created");
        let text = report.to_string();
        for line in ["will be created", "after a power cut:", "gain to expect:", "would be served"]
        {
            assert!(text.contains(line), "{line:?} in {text}");
        }
        assert_eq!(report.promises.len(), 3);
        // The prediction for a missing file agrees with the result after its creation.
        let running = crate::Target::start(&config).unwrap();
        running.stop().unwrap();
        let after = check(&config);
        assert!(after.is_ok(), "{after}");
        for (before, after) in report.promises.iter().zip(&after.promises) {
            assert_eq!(before.row, after.row, "{}", before.drive);
        }
    }

    #[test]
    fn media_in_use_and_invalid_logs_are_reported() {
        let dir = tempfile::tempdir().unwrap();
        let path = |name: &str| dir.path().join(name).display().to_string();
        let config = Config {
            log: Some(format!("file:{},size=2M", path("log"))),
            ..Config::on_loopback(&[&format!("file:{},size=1M", path("drive"))])
        };
        let running = crate::Target::start(&config).unwrap();
        let busy = check(&config);
        assert_eq!(places(&busy), ["log", "namespaces[0] (nsid 1)"], "{busy}");
        assert!(busy.to_string().contains("in use by another process"), "{busy}");
        running.stop().unwrap();
        std::fs::write(path("log"), vec![b'x'; 2 << 20]).unwrap();
        let report = check(&config);
        assert!(report.to_string().contains("not a log region"), "{report}");
        assert!(matches!(crate::Target::start(&config), Err(crate::StartError::Log { .. })));
        std::fs::write(path("log"), vec![0; 8192]).unwrap();
        let small = Config { log: Some(format!("file:{}", path("log"))), ..config };
        let report = check(&small);
        assert!(report.to_string().contains("too small"), "{report}");
    }

    /// The bytes of a log region, with or without a volume in it.
    fn region(kind: LogKind, volumes: bool) -> Vec<u8> {
        let len = 1 << 20;
        let boot = boot_id().unwrap();
        let header = MemRegion::new(len);
        let crc = riopipe_platform::crc32c;
        let mut log = LogRegion::create(header, len, [1; 16], boot, kind, crc).unwrap();
        if volumes {
            let member = MemberNamespace { member: Member(0), nsid: 1 };
            let volume =
                NewVolume { id: VolumeId([2; 16]), streams: 1, slots: 64, members: vec![member] };
            log.add_volume(volume, |_, _| Ok(())).unwrap();
        }
        log.into_region().bytes().to_vec()
    }

    #[test]
    fn t19_a_log_region_stays_on_its_kind_of_medium() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("log");
        let config = |kind: &str, accept| Config {
            log: Some(format!("{kind}:{}", path.display())),
            accept_lost_log: accept,
            lock_wait_ms: 0,
            ..Config::on_loopback(&["mem:1M"])
        };
        // On tmpfs a block log is as durable as a mapped file, and stamped as one.
        let in_memory = {
            std::fs::write(&path, vec![0; 1 << 20]).unwrap();
            open_log(&format!("block:{}", path.display())).unwrap().kind() == LogKind::File
        };
        for (made, serve) in [(LogKind::Block, "file"), (LogKind::File, "block")] {
            if in_memory {
                continue;
            }
            std::fs::write(&path, region(made, true)).unwrap();
            let report = check(&config(serve, false));
            assert_eq!(places(&report), ["log"], "{report}");
            let error = crate::Target::start(&config(serve, false)).err().unwrap().to_string();
            for text in [&report.to_string(), &error] {
                assert!(
                    text.contains("it was made on") && text.contains("accept_lost_log"),
                    "{text}"
                );
            }
            assert_eq!(std::fs::read(&path).unwrap(), region(made, true), "left alone");
            let same = if serve == "file" { "block" } else { "file" };
            assert!(check(&config(same, false)).is_ok());
            // With `accept_lost_log` it is created again, with a new stamp.
            assert!(check(&config(serve, true)).is_ok());
            crate::Target::start(&config(serve, true)).unwrap().stop().unwrap();
            assert!(check(&config(serve, false)).is_ok());
            // A log without volumes has no state that could be lost.
            std::fs::write(&path, region(made, false)).unwrap();
            assert!(check(&config(serve, false)).is_ok());
            crate::Target::start(&config(serve, false)).unwrap().stop().unwrap();
        }
    }

    #[test]
    fn a_running_target_has_the_guarantees_that_the_check_reported() {
        let dir = tempfile::tempdir().unwrap();
        let path = |name: &str| dir.path().join(name).display().to_string();
        for log in ["file", "block"] {
            let config = Config {
                log: Some(format!("{log}:{},size=2M", path(log))),
                ..Config::on_loopback(&["mem:16M", &format!("file:{},size=1M", path("drive"))])
            };
            let before = check(&config);
            let running = crate::Target::start(&config).unwrap();
            assert_eq!(running.promises().len(), 2);
            for (predicted, promised) in before.promises.iter().zip(running.promises()) {
                assert_eq!(
                    (&predicted.row, &predicted.log),
                    (&promised.row, &promised.log),
                    "{log}"
                );
            }
            running.stop().unwrap();
            assert!(check(&config).is_ok());
        }
    }
}

//! The check of a configuration: its errors, and the guarantees of its media.
//!
//! 1. [`check_config`] checks all values that need no open file or device, and adds the defaults.
//! 2. Each listen address is bound once.
//! 3. The log and each drive are opened, unless starting the target would create them.
//!
//! `rio target check` prints the [`Report`]. A start of the target does only the first step:
//! opening the media for service shows the same errors.

use std::fmt;
use std::net::SocketAddr;
use std::path::Path;
use std::sync::Arc;

use riopipe_media::survival::{Row, Survival, row};
use riopipe_media::{
    Drive, LogStore, MediumPlace, OpenError, boot_id, inspect_drive, open_log, place_of_drive,
    place_of_log, properties_once_created, survival_once_created,
};
use riopipe_net::Listener;
use riopipe_order::log_region::opening::{Decision, Refused, decide};
use riopipe_order::log_region::{self, HEADER_BYTES};
use riopipe_session::drive_identity::{Choice, Origin, distinguish};

use crate::access::access_notes;
use crate::checked_config::{CheckedConfig, CheckedNamespace, check_config};
use crate::config::{Config, DEFAULT_DISCOVERY_PORT, DEFAULT_PORT};
use crate::drive_identity::{IdentityError, ShownIdentity, choose_for, inspect, note};
use crate::lba_size::check_lba_size;
use crate::log::{LogOpenError, check_size, place};
use crate::same_media::same_media;
use crate::secrets;
use crate::tls;

/// An error in a configuration, or of what it names: place, defect and remedy.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Problem {
    /// The part of the configuration, as its key.
    pub place: String,
    /// The defect.
    pub what: String,
    /// The remedy; empty if `what` contains it.
    pub advice: String,
    /// The part that has the defect.
    pub kind: ProblemKind,
}

/// The part that has a defect: each has an exit code of its own.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ProblemKind {
    /// The configuration makes no sense.
    Configuration,
    /// The configuration makes sense, and a drive, the log or an address can't be served.
    Medium,
}

impl Problem {
    pub(crate) fn new(place: impl Into<String>, what: impl fmt::Display, advice: &str) -> Self {
        let kind = ProblemKind::Configuration;
        Self { place: place.into(), what: what.to_string(), advice: advice.into(), kind }
    }

    /// A defect of a drive, a log or an address.
    fn of_medium(place: impl Into<String>, what: impl fmt::Display, advice: &str) -> Self {
        Self { kind: ProblemKind::Medium, ..Self::new(place, what, advice) }
    }

    /// A drive or a log that can't be opened, or a specification of it that makes no sense.
    fn of_open(place: impl Into<String>, error: &OpenError) -> Self {
        match error {
            OpenError::Spec { .. } => Self::new(place, error, ""),
            _ => Self::of_medium(place, error, ""),
        }
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
    /// The identity of the drive; `None` if it gets one when it is first served.
    pub identity: Option<ShownIdentity>,
}

/// The properties of a drive that decide which guarantees it can give.
#[derive(Clone, Copy, Debug)]
pub(crate) struct DriveProperties {
    pub(crate) survival: Survival,
    pub(crate) has_volatile_cache: bool,
}

impl Promise {
    /// The guarantees of the drive with specification `drive`, together with the log with
    /// specification `log`. `log_survival` is `None` if there is no usable log.
    pub(crate) fn new(
        nsid: u32,
        drive: &str,
        properties: DriveProperties,
        log: Option<&str>,
        log_survival: Option<Survival>,
    ) -> Self {
        let row = match log_survival {
            Some(log) => row(properties.survival, properties.has_volatile_cache, log),
            None => Row {
                process_kill: "blocks without order: there is no log",
                power_cut: "blocks without order: there is no log",
                gain: "none: engine rio needs a log; hosts fall back to sync",
            },
        };
        Self {
            nsid,
            drive: drive.to_owned(),
            log: log.unwrap_or("none").to_owned(),
            row,
            identity: None,
        }
    }
}

impl Report {
    /// Whether a target with this configuration would start.
    #[must_use]
    pub fn is_ok(&self) -> bool {
        self.problems.is_empty()
    }

    /// Whether the configuration itself makes sense: what is wrong, if anything, are drives, the log or
    /// addresses.
    #[must_use]
    pub fn makes_sense(&self) -> bool {
        self.problems.iter().all(|problem| problem.kind == ProblemKind::Medium)
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
        for Promise { nsid, drive, log, row, identity } in &self.promises {
            writeln!(f, "namespace {nsid}: drive {drive}, log {log}")?;
            if let Some(ShownIdentity { nguid, origin, .. }) = identity {
                writeln!(f, "  identity:             {nguid}, {origin}")?;
            }
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
            // The media are checked even so, because one run shall show all errors.
            CheckedConfig::unchecked(config)
        }
    };
    let has_identities = report.is_ok();
    if let Err(problems) = secrets::access(config) {
        report.problems.extend(problems);
    }
    if let Err(problems) = tls::key_ring(config, &checked.subnqn) {
        report.problems.extend(problems);
    }
    report.subnqn = checked.subnqn;
    let mut addresses = check_addresses("listen", &config.listen, DEFAULT_PORT, &mut report);
    addresses.extend(check_addresses(
        "discovery",
        &config.discovery,
        DEFAULT_DISCOVERY_PORT,
        &mut report,
    ));
    report.notes.extend(config.remarks.iter().cloned());
    let notes = access_notes(config, &addresses).into_iter();
    report.notes.extend(notes.map(|(place, note)| Problem::new(place, note, "")));
    report.problems.extend(same_media(&checked.namespaces, 0, config.log.as_deref()));
    let log_survival = check_log(config, &mut report);
    let mut choices = Vec::new();
    for (index, namespace) in checked.namespaces.iter().enumerate() {
        let place = format!("namespaces[{index}] (nsid {})", namespace.nsid);
        let Some((properties, drive)) =
            check_drive(&place, &namespace.drive, config.create, &mut report)
        else {
            continue;
        };
        let choice = drive
            .filter(|_| has_identities)
            .and_then(|drive| check_identity(&place, namespace, &*drive, &mut report));
        add_survival_note(&place, properties.survival, &mut report);
        let log = config.log.as_deref();
        let promise = Promise::new(namespace.nsid, &namespace.drive, properties, log, log_survival);
        let shown = choice.as_ref().filter(|choice| choice.origin != Origin::New);
        report.promises.push(Promise { identity: shown.map(ShownIdentity::from), ..promise });
        choices.extend(choice.map(|choice| (place, namespace.nsid, choice)));
    }
    check_distinct(&choices, &mut report);
    report
}

/// Checks that each address can be listened on; returns those that can. `key` is the key of the list
/// in the configuration.
fn check_addresses(
    key: &str,
    addresses: &[String],
    default_port: u16,
    report: &mut Report,
) -> Vec<SocketAddr> {
    let mut found = Vec::new();
    for (index, address) in addresses.iter().enumerate() {
        match Listener::bind_with_port(address, default_port) {
            Ok(listener) => found.push(listener.local_addr()),
            Err(error) => {
                report.problems.push(Problem::of_medium(format!("{key}[{index}]"), error, ""));
            }
        }
    }
    found
}

/// Adds the remark that belongs to the survival of a drive or log, if there is one.
fn add_survival_note(place: &str, survival: Survival, report: &mut Report) {
    if !survival.note.is_empty() {
        report.notes.push(Problem::new(place, survival.note, ""));
    }
}

/// The problem that a file does not exist, or is empty, and is not to be created; or can't be
/// because its directory does not exist.
fn missing_file_problem(place: &str, file: &MediumPlace, create: bool) -> Option<Problem> {
    let path = file.path();
    if !create && file.is_empty_file() {
        let advice = "put its content back, or have it filled as a new one with create (--create)";
        return Some(Problem::of_medium(place, format!("{path} is empty"), advice));
    }
    if !create {
        let advice = "mount its file system, or have the file created with create (--create)";
        return Some(Problem::of_medium(place, format!("{path} does not exist"), advice));
    }
    let directory = Path::new(path).parent()?;
    if directory.as_os_str().is_empty() || directory.is_dir() {
        return None;
    }
    let what = format!("{path} can't be created: {} is no directory", directory.display());
    Some(Problem::of_medium(place, what, "make the directory first"))
}

/// Checks the drive with specification `spec`; returns its properties if it can be served, and the
/// drive itself if it exists.
fn check_drive(
    place: &str,
    spec: &str,
    create: bool,
    report: &mut Report,
) -> Option<(DriveProperties, Option<Arc<dyn Drive>>)> {
    match place_of_drive(spec) {
        Ok(Some(file)) if file.would_be_created() => {
            return Some((check_drive_to_create(place, spec, &file, create, report)?, None));
        }
        // Opening it reports an error in the specification.
        Ok(_) | Err(_) => {}
    }
    match inspect_drive(spec) {
        Ok(drive) => {
            let properties = DriveProperties {
                survival: drive.survives(),
                has_volatile_cache: drive.geometry().volatile_cache,
            };
            Some((properties, Some(drive)))
        }
        Err(error) => {
            report.problems.push(Problem::of_open(place, &error));
            None
        }
    }
}

/// Checks the identity that the drive would get; returns it if there is one.
fn check_identity(
    place: &str,
    namespace: &CheckedNamespace,
    drive: &dyn Drive,
    report: &mut Report,
) -> Option<Choice> {
    let known = inspect(drive, namespace.id);
    let checked = known.and_then(|known| Ok((choose_for(&known, namespace)?, known)));
    match checked {
        Ok((choice, known)) => {
            let member = known.member(choice.id, namespace.nsid);
            if let Err(error) = check_lba_size(namespace, drive, member.map(|m| m.volume)) {
                report.problems.push(Problem::new(place, error, ""));
            }
            if let Some(note) = note(drive, choice.origin) {
                report.notes.push(Problem::new(place, note, ""));
            }
            Some(choice)
        }
        Err(error) => {
            report.problems.push(Problem::of_medium(place, error, ""));
            None
        }
    }
}

/// Checks that no two drives have the same identity. Each has its place and its namespace id.
fn check_distinct(drives: &[(String, u32, Choice)], report: &mut Report) {
    let mut choices: Vec<Choice> = drives.iter().map(|(_, _, choice)| *choice).collect();
    if let Err((first, second)) = distinguish(&mut choices) {
        let error = IdentityError::SameAs { nsid: drives[first].1 };
        report.problems.push(Problem::of_medium(&drives[second].0, error, ""));
    }
}

/// Checks a drive whose file a start of the target would create.
fn check_drive_to_create(
    place: &str,
    spec: &str,
    file: &MediumPlace,
    create: bool,
    report: &mut Report,
) -> Option<DriveProperties> {
    check_creation(place, file, create, report)?;
    match properties_once_created(spec) {
        Ok(properties) => properties
            .map(|(survival, has_volatile_cache)| DriveProperties { survival, has_volatile_cache }),
        Err(error) => {
            report.problems.push(Problem::of_open(place, &error));
            None
        }
    }
}

/// Checks that a file can be created; `None` if it can't.
fn check_creation(
    place: &str,
    file: &MediumPlace,
    create: bool,
    report: &mut Report,
) -> Option<()> {
    let problem = missing_file_problem(place, file, create)
        .or_else(|| file.check_creation().err().map(|error| Problem::of_open(place, &error)));
    if let Some(problem) = problem {
        report.problems.push(problem);
        return None;
    }
    let future =
        if file.is_empty_file() { "is empty, and will be filled" } else { "will be created" };
    let note = format!("{} {future}", file.path());
    report.notes.push(Problem::new(place, note, ""));
    Some(())
}

/// Checks the log; returns its survival if it can be served.
fn check_log(config: &Config, report: &mut Report) -> Option<Survival> {
    let spec = config.log.as_deref()?;
    if let Err(error) = check_size(spec) {
        report.problems.push(match &error {
            LogOpenError::Store(error) => Problem::of_open("log", error),
            _ => Problem::of_medium("log", error, ""),
        });
        return None;
    }
    if let Ok(Some(file)) = place_of_log(spec)
        && file.would_be_created()
    {
        let create = config.create || config.accept_lost_log;
        return check_log_to_create(spec, &file, create, report);
    }
    let store = match open_log(spec) {
        Ok(store) => store,
        Err(error) => {
            report.problems.push(Problem::of_open("log", &error));
            return None;
        }
    };
    add_survival_note("log", store.survives(), report);
    report.problems.extend(log_content_problem(&store, config.accept_lost_log));
    Some(store.survives())
}

/// Checks a log whose file a start of the target would create.
fn check_log_to_create(
    spec: &str,
    file: &MediumPlace,
    create: bool,
    report: &mut Report,
) -> Option<Survival> {
    check_creation("log", file, create, report)?;
    match survival_once_created(spec) {
        Ok(Some(survival)) => {
            add_survival_note("log", survival, report);
            Some(survival)
        }
        // Another process has just created the file.
        Ok(None) => None,
        Err(error) => {
            report.problems.push(Problem::of_open("log", &error));
            None
        }
    }
}

/// The problem of the log's content that would keep the target, or volumes, from being served.
fn log_content_problem(store: &LogStore, accept_lost_log: bool) -> Option<Problem> {
    let header = match store.part(0..HEADER_BYTES.min(store.len())) {
        Ok(header) => header,
        Err(error) => return Some(Problem::of_medium("log", error, "")),
    };
    let boot = match boot_id() {
        Ok(boot) => boot,
        Err(error) => return Some(Problem::of_medium("log", error, "")),
    };
    let place = place(store, boot);
    explain_decision(decide(&header, place, accept_lost_log, riopipe_platform::crc32c))
}

/// The problem that the decision about a log's content stands for; `None` if the log can be served.
fn explain_decision(decision: Result<Decision, Refused>) -> Option<Problem> {
    let problem = |what: String, advice| Some(Problem::of_medium("log", what, advice));
    match decision {
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
        Err(Refused::Region(log_region::OpenError::Newer { version })) => problem(
            format!("a log region of format version {version}, written by a newer program"),
            "use that program",
        ),
        Err(Refused::Region(log_region::OpenError::NotALog)) => {
            problem("this is not a log region".into(), "check the path")
        }
        Err(Refused::Region(log_region::OpenError::Damaged { what })) => problem(
            format!("the log region is damaged: {what}"),
            "restore it, or give it up with accept_lost_log (--accept-lost-log)",
        ),
        Err(error) => problem(error.to_string(), ""),
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

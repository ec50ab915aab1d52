//! `rio target serve|check|identity|stat|reload|ana|drain`

mod ana;
mod drain;
mod identity;
mod reload;
mod serving;
mod stat;
mod watchdog;

use std::net::SocketAddr;

use riopipe_lab::terminal::{Colour, Terminal};
use riopipe_metrics::TARGET_PORT;
use riopipe_net::HostPort;
use riopipe_platform::raise_descriptors_max;
use riopipe_target::{
    Config, DEFAULT_PORT, LoadError, NamespaceOptions, Problem, Promise, ReloadError, SecretSource,
};
use serde::Serialize;

use self::{
    identity::IdentityView,
    serving::{End, Service, control_path},
};
use crate::{
    args::target::{Serve, Target},
    control_socket::ControlSocket,
    failure::{Code, Failure, start_failure},
    interrupt,
    metrics_server::{MetricsAddress, MetricsError, MetricsServer},
    output::{Output, Report},
    service_manager::ServiceManager,
};

pub(super) fn run(command: Target, output: &Output) -> Result<(), Failure> {
    match command {
        Target::Serve(args) => serve(&args, output),
        Target::Check(args) => check(&args, output),
        Target::Identity(args) => identity::run(&args, output),
        Target::Stat(args) => stat::run(&args, output),
        Target::Reload(args) => reload::run(&args, output),
        Target::Ana(args) => ana::run(&args, output),
        Target::Drain(args) => drain::run(&args, output),
    }
}

fn serve(args: &Serve, output: &Output) -> Result<(), Failure> {
    // A connection is a descriptor, and the usual soft limit is for fewer than are allowed.
    raise_descriptors_max();
    let config = config(args)?;
    let manager = ServiceManager::from_environment();
    let signals = match args.config {
        Some(_) => interrupt::Stop::watch_with_reload()?,
        None => interrupt::Stop::watch()?,
    };
    let control = control_path(config.control.as_deref());
    let control = control.map(|path| ControlSocket::at(&path)).transpose()?;
    // Before the drives: a taken address is reported before the target starts.
    let take = |address| MetricsAddress::take(address, TARGET_PORT);
    let metrics = config.metrics.as_deref().map(take).transpose();
    let metrics = metrics.map_err(MetricsError::into_failure)?;
    let mut running =
        riopipe_target::Target::start(&config).map_err(|error| start_failure(&error))?;
    let metrics = metrics.map(|address| address.serve(running.stat_source())).transpose();
    let metrics = metrics.map_err(MetricsError::into_failure)?;
    let printed = output.result(&Serving {
        schema: "rio-target/1",
        subnqn: running.subnqn().to_owned(),
        addresses: running.addresses().to_vec(),
        discovery_addresses: running.discovery_addresses().to_vec(),
        metrics: metrics.as_ref().map(MetricsServer::address),
        control: control.as_ref().map(|control| control.path().display().to_string()),
        serves: running.describe().to_vec(),
        created: running.created().to_vec(),
        promises: running.promises().iter().map(PromiseView::of).collect(),
    });
    match printed {
        // The caller may not read the addresses; hosts still use them.
        Err(failure) if failure.code == Code::Unread => {}
        printed => printed?,
    }
    let mut service = Service { args, signals, control, manager, draining: None };
    let end = service.run(&mut running);
    match &end {
        End::Signal(signal) => {
            tracing::info!(signal, "stopping; a second signal ends the target at once");
        }
        End::ReactorEnded => tracing::error!("a reactor has ended: stopping"),
        End::Drained(view) => tracing::info!(drained = view.is_drained(), "stopping"),
    }
    let stopped = running.stop().map_err(|error| {
        Failure::new(Code::Media, "the target did not stop cleanly").because(&error)
    });
    let ended = stopped.and_then(|()| match &end {
        End::Signal(_) => Ok(()),
        End::Drained(view) if view.is_drained() => Ok(()),
        End::Drained(view) => Err(view.failure()),
        End::ReactorEnded => {
            Err(Failure::new(Code::Failed, "a reactor has ended; the log has the reason"))
        }
    });
    if let Some(draining) = service.draining {
        match (&end, &ended) {
            // The client makes a failure of the open volumes itself.
            (End::Drained(view), Ok(())) => draining.end(Ok(view)),
            (End::Drained(view), Err(failure)) if failure.code == Code::Volume => {
                draining.end(Ok(view));
            }
            (_, Err(failure)) => draining.end(Err(failure)),
            (_, Ok(())) => {
                let message = "a signal has ended the target while it was being drained";
                draining.end(Err(&Failure::new(Code::Interrupted, message)));
            }
        }
    }
    ended
}

fn check(args: &Serve, output: &Output) -> Result<(), Failure> {
    let report = riopipe_target::check(&config(args)?);
    output.result(&Checked {
        schema: "rio-target-check/1",
        ok: report.is_ok(),
        subnqn: report.subnqn.clone(),
        problems: report.problems.iter().map(Note::of).collect(),
        notes: report.notes.iter().map(Note::of).collect(),
        promises: report.promises.iter().map(PromiseView::of).collect(),
    })?;
    // The code with which a target would end.
    let code = if report.makes_sense() { Code::Media } else { Code::Usage };
    match report.problems.len() {
        0 => Ok(()),
        1 => Err(Failure::new(code, "one mistake: a target would not start")),
        n => Err(Failure::new(code, format!("{n} mistakes: a target would not start"))),
    }
}

/// The configuration file, if any, with the options of the command line.
fn config(args: &Serve) -> Result<Config, Failure> {
    let mut config = match &args.config {
        Some(path) => Config::load(path).map_err(|error| load_failure(&error))?,
        None => Config::default(),
    };
    if args.traddr.is_some() || args.trsvcid.is_some() {
        config.listen = vec![listen_address(args, &config.listen)?];
    }
    if let Some(port) = args.discovery_port {
        // An address that can't be read is reported with the others.
        let first = config.listen.first().and_then(|address| address.parse::<HostPort>().ok());
        let host = first.map_or_else(|| "127.0.0.1".to_owned(), |first| first.host);
        config.discovery = vec![HostPort { host, port: Some(port) }.to_string()];
    }
    if !args.drives.is_empty() {
        let drive = |drive: &String| NamespaceOptions {
            drive: drive.clone(),
            lba_size: args.lba_size,
            ..Default::default()
        };
        config.namespaces = args.drives.iter().map(drive).collect();
    }
    if !args.allow_hosts.is_empty() {
        config.hosts = Some(args.allow_hosts.clone());
    }
    for (host, source) in &args.dhchap_hosts {
        config.dhchap.hosts.insert(host.clone(), in_a_file(source)?);
    }
    if let Some(source) = &args.dhchap_ctrl_secret {
        config.dhchap.controller = Some(in_a_file(source)?);
    }
    for (host, source) in &args.tls_hosts {
        config.tls.hosts.insert(host.clone(), in_a_file(source)?);
    }
    if let Some(mode) = args.tls {
        config.tls.mode = mode;
    }
    if !args.cores.is_empty() {
        config.cores.clone_from(&args.cores);
    }
    config.subnqn = args.nqn.clone().or(config.subnqn);
    config.log = args.log.clone().or(config.log);
    config.metrics = args.metrics.clone().or(config.metrics);
    config.control = args.control.clone().or(config.control);
    config.reactors = args.reactors.or(config.reactors);
    config.spin_us = args.spin_us.or(config.spin_us);
    if let Some(wait) = args.lock_wait {
        config.lock_wait_ms = u64::try_from(wait.as_millis()).unwrap_or(u64::MAX);
    }
    config.create |= args.create;
    config.accept_lost_log |= args.accept_lost_log;
    config.require_header_digest |= args.require_hdr_digest;
    config.require_data_digest |= args.require_data_digest;
    Ok(config)
}

/// The place of a secret, which must be a file.
pub(super) fn in_a_file(source: &SecretSource) -> Result<SecretSource, Failure> {
    match source.is_inline() {
        false => Ok(source.clone()),
        true => Err(Failure::new(
            Code::Usage,
            "a secret is among the arguments, where other users see it",
        )
        .hint("give the path of a file with it, which only its owner may read")),
    }
}

/// The address of `-a` and `-s`. The one that is not given is that of the configuration, whose
/// addresses are `configured`.
fn listen_address(args: &Serve, configured: &[String]) -> Result<String, Failure> {
    let given = args.traddr.as_ref();
    let port = port_of(given, args.trsvcid)?;
    if let (Some(address), Some(_)) = (given, port) {
        return Ok(HostPort { host: address.host.clone(), port }.to_string());
    }
    let [only] = configured else {
        let (option, missing) = if given.is_some() { ("-a", "-s") } else { ("-s", "-a") };
        return Err(Failure::new(
            Code::Usage,
            format!(
                "{option} alone: the configuration listens on {} addresses ({})",
                configured.len(),
                configured.join(", ")
            ),
        )
        .hint(format!("give {missing}, too: both replace all of them")));
    };
    let configured: HostPort = only
        .parse()
        .map_err(|error| Failure::new(Code::Usage, format!("listen[0]: {only:?}: {error}")))?;
    let host = given.unwrap_or(&configured).host.clone();
    Ok(HostPort { host, port: port.or(configured.port) }.with_port(DEFAULT_PORT))
}

/// The port of `-a` or of `-s`.
pub(super) fn port_of(
    address: Option<&HostPort>,
    port: Option<u16>,
) -> Result<Option<u16>, Failure> {
    match (address.and_then(|address| address.port), port) {
        (Some(one), Some(other)) if one != other => Err(Failure::new(
            Code::Usage,
            format!("-a has port {one}, -s is {other}: give the port once"),
        )),
        (one, other) => Ok(one.or(other)),
    }
}

/// The failure of a reload, after which the target serves as before.
fn reload_failure(error: &ReloadError) -> Failure {
    let message = |code| Failure::new(code, "the target serves as before").because(error);
    match error {
        ReloadError::Config(_) => {
            message(Code::Usage).hint("`rio target check` finds all that is wrong")
        }
        ReloadError::Fixed(_) => message(Code::Usage),
        ReloadError::InUse(_) => message(Code::Volume).hint(
            "close the volumes first. --force removes the namespaces even so: the owners lose their \
             connections, and the volumes can't be opened until the drives are back",
        ),
        ReloadError::PortInUse(_) => message(Code::Volume).hint(
            "close the volumes first. --force removes the addresses even so: the owners lose their \
             connections, and their streams fail unless they find the target at the same address again",
        ),
        ReloadError::Ports(_) => message(Code::Media),
        ReloadError::Drive(start) => {
            let Failure { code, hint, .. } = start_failure(start);
            Failure { hint, ..message(code) }
        }
        ReloadError::Closing(_) => message(Code::Media),
        ReloadError::Reactor(_) => message(Code::Failed),
    }
}

fn load_failure(error: &LoadError) -> Failure {
    let code = match error {
        LoadError::Read { .. } => Code::Failed,
        LoadError::Toml { .. }
        | LoadError::Hidden { .. }
        | LoadError::Json { .. }
        | LoadError::Open { .. } => Code::Usage,
    };
    Failure::new(code, error.to_string().trim_end())
}

/// The guarantees of a drive and the log together.
#[derive(Debug, Serialize)]
struct PromiseView {
    nsid: u32,
    drive: String,
    log: String,
    process_kill: &'static str,
    power_cut: &'static str,
    gain: &'static str,
    /// Absent if the drive gets its identity when it is first served.
    #[serde(flatten)]
    identity: Option<IdentityView>,
}

impl PromiseView {
    fn of(promise: &Promise) -> Self {
        Self {
            nsid: promise.nsid,
            drive: promise.drive.clone(),
            log: promise.log.clone(),
            process_kill: promise.row.process_kill,
            power_cut: promise.row.power_cut,
            gain: promise.row.gain,
            identity: promise.identity.as_ref().map(IdentityView::of),
        }
    }

    fn text(&self, terminal: &Terminal) -> String {
        let head = format!("namespace {}: drive {}, log {}", self.nsid, self.drive, self.log);
        let identity = match &self.identity {
            Some(identity) => format!("{}, {}", identity.nguid, identity.identity),
            None => "new, once the drive is served".to_owned(),
        };
        format!(
            "{}\n  identity:                {identity}\n  a killed process leaves: {}\n  a power cut leaves:      {}\n  \
             gain to expect:          {}\n",
            terminal.paint(Colour::Bold, &head),
            self.process_kill,
            self.power_cut,
            self.gain
        )
    }
}

#[derive(Debug, Serialize)]
struct Serving {
    schema: &'static str,
    subnqn: String,
    addresses: Vec<SocketAddr>,
    discovery_addresses: Vec<SocketAddr>,
    /// With `--metrics` only.
    #[serde(skip_serializing_if = "Option::is_none")]
    metrics: Option<SocketAddr>,
    /// The control socket, if there is one.
    #[serde(skip_serializing_if = "Option::is_none")]
    control: Option<String>,
    serves: Vec<String>,
    created: Vec<String>,
    promises: Vec<PromiseView>,
}

impl Report for Serving {
    fn text(&self, terminal: &Terminal) -> String {
        let addresses =
            |all: &[SocketAddr]| all.iter().map(ToString::to_string).collect::<Vec<_>>().join(", ");
        let mut text = format!("{} at {}\n", self.subnqn, addresses(&self.addresses));
        if !self.discovery_addresses.is_empty() {
            text += &format!("discovery at {}\n", addresses(&self.discovery_addresses));
        }
        if let Some(address) = self.metrics {
            text += &format!(
                "metrics at http://{address}/metrics; `rio target stat {address}` shows them\n"
            );
        }
        if let Some(path) = &self.control {
            text += &format!("control socket {path}, for `rio target reload` and `drain`\n");
        }
        for line in &self.serves {
            text += &format!("{line}\n");
        }
        for path in &self.created {
            text += &format!("created: {path}\n");
        }
        for promise in &self.promises {
            text += &promise.text(terminal);
        }
        text
    }
}

#[derive(Debug, Serialize)]
struct Note {
    place: String,
    what: String,
    advice: String,
}

impl Note {
    fn of(problem: &Problem) -> Self {
        let Problem { place, what, advice, .. } = problem.clone();
        Self { place, what, advice }
    }

    fn text(&self) -> String {
        match self.advice.is_empty() {
            true => format!("{}: {}\n", self.place, self.what),
            false => format!("{}: {}; {}\n", self.place, self.what, self.advice),
        }
    }
}

#[derive(Debug, Serialize)]
struct Checked {
    schema: &'static str,
    ok: bool,
    subnqn: String,
    problems: Vec<Note>,
    notes: Vec<Note>,
    promises: Vec<PromiseView>,
}

impl Report for Checked {
    fn text(&self, terminal: &Terminal) -> String {
        let mut text = String::new();
        for problem in &self.problems {
            text += &format!("{} {}", terminal.paint(Colour::Red, "wrong:"), problem.text());
        }
        for note in &self.notes {
            text += &format!("{} {}", terminal.paint(Colour::Blue, "note:"), note.text());
        }
        for promise in &self.promises {
            text += &promise.text(terminal);
        }
        if self.ok {
            text += &format!("{} would be served\n", self.subnqn);
        }
        text
    }
}

#[cfg(test)]
mod tests {
    use clap::Parser;

    use super::*;
    use crate::args::{Cli, Command};

    fn tried(words: &[&str]) -> Result<Config, Failure> {
        let words = ["rio", "target", "serve"].iter().chain(words);
        match Cli::try_parse_from(words).unwrap().command {
            Command::Target(Target::Serve(args)) => config(&args),
            other => panic!("{other:?}"),
        }
    }

    fn of(words: &[&str]) -> Config {
        tried(words).unwrap()
    }

    fn refused(words: &[&str]) -> String {
        let failure = tried(words).unwrap_err();
        assert_eq!(failure.code, Code::Usage, "{failure}");
        failure.to_string()
    }

    #[test]
    fn options_alone_are_a_configuration() {
        let config = of(&["--drive", "mem:1G", "--drive", "mem:2G", "-s", "0", "-a", "::1"]);
        assert_eq!(config.listen, ["[::1]:0"]);
        assert_eq!(config.namespaces[1].drive, "mem:2G");
        assert_eq!(of(&["--drive", "mem:1G"]).listen, ["127.0.0.1:4420"]);
        assert_eq!(of(&["-a", "::1", "--discovery-port", "8009"]).discovery, ["[::1]:8009"]);
        for words in
            [&["-a", "[::1]:7"][..], &["-a", "::1", "-s", "7"], &["-a", "[::1]", "-s", "7"]]
        {
            assert_eq!(of(words).listen, ["[::1]:7"], "{words:?}");
        }
        assert_eq!(of(&["-a", "localhost:7", "-s", "7"]).listen, ["localhost:7"]);
        assert!(refused(&["-a", "localhost:7", "-s", "8"]).contains("give the port once"));
    }

    #[test]
    fn options_take_precedence_over_the_file() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("target.toml");
        let text = "listen = [\"192.0.2.1:4421\"]\nlog = \"file:/a\"\nspin_us = 7\n\
                    [[namespaces]]\ndrive = \"mem:1G\"\n";
        std::fs::write(&path, text).unwrap();
        let path = path.to_str().unwrap();
        let config = of(&["-c", path]);
        assert_eq!((config.listen[0].as_str(), config.spin_us), ("192.0.2.1:4421", Some(7)));
        let config = of(&["-c", path, "--log", "file:/b", "--drive", "mem:2G"]);
        assert_eq!(config.listen, ["192.0.2.1:4421"]);
        assert_eq!(config.log.as_deref(), Some("file:/b"));
        assert_eq!(config.namespaces[0].drive, "mem:2G");
        let config = of(&["-c", path, "--discovery-port", "8009"]);
        assert_eq!(config.discovery, ["192.0.2.1:8009"]);
        // Of the address, only what is given.
        assert_eq!(of(&["-c", path, "-s", "7"]).listen, ["192.0.2.1:7"]);
        assert_eq!(of(&["-c", path, "-a", "::1"]).listen, ["[::1]:4421"]);
        assert_eq!(of(&["-c", path, "-a", "::1", "-s", "7"]).listen, ["[::1]:7"]);
        let two = "listen = [\"192.0.2.1:4421\", \"192.0.2.1:4422\"]";
        std::fs::write(path, two).unwrap();
        for (option, value, missing) in [("-s", "7", "-a"), ("-a", "::1", "-s")] {
            let failure = refused(&["-c", path, option, value]);
            assert!(failure.contains("192.0.2.1:4422") && failure.contains(missing), "{failure}");
        }
        assert_eq!(of(&["-c", path, "-a", "[::1]:7"]).listen, ["[::1]:7"]);
    }
}

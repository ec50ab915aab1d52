//! A running target: its start, its threads, its end.
//!
//! [`Target::start`] opens everything before anything is served:
//!
//! 1. the drives,
//! 2. the log and the volumes in it,
//! 3. the listeners,
//! 4. the reactors, one thread each.
//!
//! [`Running::stop`] ends the reactors, flushes the drives, and writes the log back.
//! [`Running::reload`] (`target/reload.rs`) changes namespaces, hosts and ports in between.

mod reload;

use std::net::SocketAddr;
use std::sync::{Arc, Mutex, PoisonError, Weak};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use riopipe_media::survival::Survival;
use riopipe_media::{
    Blocking, Drive, IoError, MediumPlace, Queue, file_to_create, open_drive_within,
};
use riopipe_metrics::{Start, StatSource};
use riopipe_net::{Poller, PollerError, SpinPolicy, pin_to_core};
use riopipe_nvme::ana::AnaState;
use riopipe_order::region::RegionError;
use riopipe_order::write_order::DriveOrder;
use riopipe_session::stages::Stages;
use riopipe_session::target::{
    ANA_GROUP_MAX, CoreConfig, DiscoveryPort, Identity, LabelledDrive, NamespaceConfig,
    NamespaceIdError, Namespaces, OpenVolume, PendingLimits, Places, PortState, QueueCounts,
    Shared,
};

use crate::access::access_notes;
use crate::check::{DriveProperties, Problem, Promise};
use crate::checked_config::{CheckedConfig, CheckedNamespace, check_config};
use crate::config::{Config, DEFAULT_SPIN_US};
use crate::control::{Control, Shutdown};
use crate::counters::Counters;
use crate::devices::{DevicesParts, QUEUE_DEPTH, ReactorMailboxes};
use crate::drive_counters::DriveCounters;
use crate::drive_identity::{IdentityError, ShownIdentity, identify};
use crate::exponents::Exponents;
use crate::heartbeat::Heartbeat;
use crate::lba_size::{LbaSizeError, check_lba_size};
use crate::log::{Log, LogOpenError, check_size, end_unused_service, open_volumes};
use crate::mail::Mailboxes;
use crate::ports::{NextPorts, Ports, PortsError};
use crate::queue_requests::{Port, QueueRequests, RequestReceiver};
use crate::reactor::{Reactor, ReactorParts};
use crate::same_media::same_media;
use crate::secrets;
use crate::shared::{SharedState, end_service, lock};
use crate::stat::{MetricsSource, Stat};
use crate::tls::{self, TlsService};
use riopipe_platform::crc32c;
use riopipe_tls::TlsError;

use self::reload::RetiringDrive;
pub use self::reload::{ReloadError, ReloadOptions, Reloaded};

/// Length of the firmware revision (FR) in NVMe's Identify Controller data structure, in bytes.
const FIRMWARE_BYTES_MAX: usize = 8;

/// The reason why a target did not start.
#[derive(Debug, thiserror::Error)]
pub enum StartError {
    /// The configuration is wrong.
    #[error("{}", join_lines(.0))]
    Config(Vec<Problem>),
    /// A drive can't be opened.
    #[error("namespace {nsid}: {source}")]
    Drive {
        /// The namespace identifier.
        nsid: u32,
        /// The drive's error.
        source: riopipe_media::OpenError,
    },
    /// A drive has no identity under which it could be served.
    #[error("namespace {nsid}: {source}")]
    Identity {
        /// The namespace identifier.
        nsid: u32,
        /// The reason.
        source: IdentityError,
    },
    /// A drive can't have logical blocks of the size that the configuration wants.
    #[error("namespace {nsid}: {source}")]
    LbaSize {
        /// The namespace identifier.
        nsid: u32,
        /// The reason.
        source: LbaSizeError,
    },
    /// A file does not exist, and the configuration does not have it created.
    #[error(
        "{place}: {path} does not exist: if it should, its file system may not be mounted; to have \
         it created, set create"
    )]
    Missing {
        /// The namespace or the log.
        place: String,
        /// The path of the file.
        path: String,
    },
    /// A file is empty, and the configuration does not have it filled.
    #[error(
        "{place}: {path} is empty: if it should not be, put its content back; to have it filled as \
         a new one, set create"
    )]
    Empty {
        /// The namespace or the log.
        place: String,
        /// The path of the file.
        path: String,
    },
    /// The namespace identifiers contradict one another.
    #[error(transparent)]
    NamespaceId(#[from] NamespaceIdError),
    /// The ordering log can't be opened.
    #[error("ordering log {spec}: {source}")]
    Log {
        /// Specification of the log.
        spec: String,
        /// The log's error.
        source: LogOpenError,
    },
    /// TLS can't be set up.
    #[error(transparent)]
    Tls(#[from] TlsError),
    /// An address can't be listened on.
    #[error(transparent)]
    Listen(#[from] PortsError),
    /// No descriptors are left.
    #[error(transparent)]
    Poller(#[from] PollerError),
    /// No thread could be started.
    #[error("can't start a reactor thread: {0}")]
    Thread(std::io::Error),
}

fn join_lines(problems: &[Problem]) -> String {
    let lines: Vec<String> = problems.iter().map(ToString::to_string).collect();
    lines.join("\n")
}

/// The reason why a target did not stop in order. It has stopped even so.
#[derive(Debug, thiserror::Error)]
pub enum StopError {
    /// A drive could not be flushed: a power cut may take writes that its hosts had not flushed.
    #[error("{drive}: the last flush failed: {source}")]
    Flush {
        /// Description of the drive.
        drive: String,
        /// The drive's error.
        source: IoError,
    },
    /// A drive did not accept a queue for its flush.
    #[error("{drive}: can't be flushed: {source}")]
    Drive {
        /// Description of the drive.
        drive: String,
        /// The drive's error.
        source: riopipe_media::OpenError,
    },
    /// The log could not be written back.
    #[error(
        "{log}: not written back: {source}; should the power be cut before it is served and \
         stopped again, the volumes in it are refused"
    )]
    Log {
        /// Description of the log.
        log: String,
        /// The log's error.
        source: RegionError,
    },
    /// A reactor ended with an error, or panicked.
    #[error("a reactor failed: {0}")]
    Reactor(String),
}

/// The reason why an ANA state was not set.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum AnaError {
    /// The target has no such port.
    #[error("port {port}: the target has ports 1 to {ports}, the places of its addresses")]
    Port {
        /// The port.
        port: u16,
        /// How many ports there are.
        ports: usize,
    },
    /// There is no such group.
    #[error("ANA group {0}: give 1 to {ANA_GROUP_MAX}")]
    Group(u32),
}

/// A target that is not running yet.
pub struct Target;

/// A running target. Dropping it stops it in order.
pub struct Running {
    ports: Ports,
    /// Those of `listen`, and those of `discovery`, in the order of the configuration.
    addresses: Vec<SocketAddr>,
    discovery_addresses: Vec<SocketAddr>,
    subnqn: String,
    /// The served media, one line each, for display.
    descriptions: Vec<String>,
    created: Vec<String>,
    promises: Vec<Promise>,
    shared: SharedState,
    control: Arc<Control>,
    heartbeat: Arc<Heartbeat>,
    mailboxes: Arc<ReactorMailboxes>,
    /// The threads of the reactors, by the reactor's index.
    threads: Vec<JoinHandle<Result<(), PollerError>>>,
    requests: QueueRequests,
    /// The configuration that is served.
    config: Config,
    /// The namespaces that are served, each at the place of its drive in `drives`, and of its
    /// promise in `promises`.
    namespaces: Vec<CheckedNamespace>,
    /// The drives of the namespaces: in the configuration's order, and then those that came later.
    drives: Vec<Arc<dyn Drive>>,
    /// The drives of namespaces that have gone, until they are closed.
    retiring: Vec<RetiringDrive>,
    log: Option<Arc<Log>>,
    metrics: Arc<MetricsSource>,
    /// The reactors have been asked to end, and have ended.
    has_shut_down: bool,
    /// `None` if no address has TLS.
    tls: Option<Arc<TlsService>>,
}

impl Target {
    /// Opens drives and log, listens, and starts the reactors.
    ///
    /// # Errors
    /// [`StartError`], with the reason why the target can't serve exactly its configuration;
    /// nothing is left open.
    pub fn start(config: &Config) -> Result<Running, StartError> {
        Self::start_on(config, &[])
    }

    /// As [`start`](Self::start), on drives that are open already, one for each namespace in order:
    /// those that [`Running::power_cut`] returned. Missing ones are opened. A single reactor may
    /// take the only queue of a drive; no other queue of it may then exist.
    ///
    /// # Errors
    /// See [`start`](Self::start).
    pub fn start_on(config: &Config, open: &[Arc<dyn Drive>]) -> Result<Running, StartError> {
        let checked = check_config(config).map_err(StartError::Config)?;
        let access = secrets::access(config).map_err(StartError::Config)?;
        let ring = tls::key_ring(config, &checked.subnqn).map_err(StartError::Config)?;
        let twice = same_media(&checked.namespaces, open.len(), config.log.as_deref());
        if !twice.is_empty() {
            return Err(StartError::Config(twice));
        }
        // Before a drive's file is created, too.
        if let Some(spec) = &config.log {
            let refused = |source| StartError::Log { spec: spec.clone(), source };
            check_size(spec).map_err(refused)?;
        }
        // All locks share one time limit, because a killed process had all of them.
        let start = Instant::now();
        let lock_wait = Duration::from_millis(config.lock_wait_ms);
        let lock_wait_left = || lock_wait.saturating_sub(start.elapsed());
        let files = files_to_create(config, &checked.namespaces, open.len())?;
        note_created(&files);
        let created = files.iter().map(|(_, file)| file.path().to_owned()).collect();
        let OpenDrives { drives, namespaces, identities, members, mut descriptions } =
            open_drives(&checked.namespaces, open, lock_wait_left)?;
        let namespaces = Namespaces::new(namespaces)?;
        // A start that fails after the log is opened may leave it without its stamp of a clean
        // stop, because opening clears the stamp (trap T24). So the pollers are created before.
        let pollers: Vec<Poller> =
            (0..checked.reactors).map(|_| Poller::new()).collect::<Result<_, _>>()?;
        let tls = TlsService::start(ring, &tls::demands(config))?;
        let log_spec = config.log.as_deref();
        let (mut volumes, log) =
            open_volumes(log_spec, config.accept_lost_log, lock_wait_left(), &mut descriptions)
                .map_err(|source| StartError::Log {
                    spec: log_spec.unwrap_or_default().to_owned(),
                    source,
                })?;
        volumes.locate_members(&members);
        let log_survival = log.as_ref().map(|log| log.survives());
        let mut promises = promises(&checked.namespaces, &drives, log_spec, log_survival);
        for (promise, identity) in promises.iter_mut().zip(identities) {
            promise.identity = Some(identity);
        }
        let NextPorts { ports, added: listening, .. } = match Ports::default().next(config) {
            Ok(next) => next,
            Err(error) => {
                // Nothing was served: the log is as valid as before.
                if let Some(log) = &log {
                    end_unused_service(volumes, log);
                }
                return Err(error.into());
            }
        };
        for remark in &config.remarks {
            tracing::warn!("configuration: {remark}");
        }
        let (addresses, discovery_addresses) = (ports.bound(false), ports.bound(true));
        let all = [&addresses[..], &discovery_addresses].concat();
        for (_, note) in access_notes(config, &all) {
            tracing::warn!("{note}");
        }
        let identity = subsystem_identity(config, &checked, ports.listed());
        let mut shared = Shared::new(identity, namespaces, volumes, riopipe_platform::now_ns());
        shared.set_memory(config.memory_mib << 20);
        shared.set_access(access);
        shared.set_ana_states(&ports.by_id(&checked.ana));
        let shared = Arc::new(Mutex::new(shared));
        let metrics = Arc::new(MetricsSource {
            subnqn: checked.subnqn.clone(),
            start: Start::now(),
            shared: Arc::clone(&shared),
            counters: (0..checked.reactors).map(|_| Arc::new(Counters::default())).collect(),
            drives: Mutex::new(drive_counters(&checked)),
            hosts: Arc::default(),
            stages: Arc::new(Stages::of_target()),
            log: log.as_ref().map_or_else(Weak::new, Arc::downgrade),
        });
        let (requests, receivers) = QueueRequests::new(checked.reactors);
        let mut running = Running {
            ports,
            addresses,
            discovery_addresses,
            subnqn: checked.subnqn.clone(),
            descriptions,
            created,
            promises,
            shared,
            control: Arc::new(Control::new()),
            heartbeat: Arc::new(Heartbeat::new(checked.reactors)),
            mailboxes: Arc::new(Mailboxes::new(pollers.iter().map(Poller::waker).collect())),
            threads: Vec::new(),
            requests,
            config: config.clone(),
            namespaces: checked.namespaces,
            drives,
            retiring: Vec::new(),
            log,
            metrics,
            has_shut_down: false,
            tls,
        };
        running.start_reactors(pollers, receivers, listening)?;
        for address in &running.addresses {
            let reactors = checked.reactors;
            tracing::info!(%address, subnqn = running.subnqn, reactors, "serving");
        }
        Ok(running)
    }
}

/// The counters of all namespaces, for each reactor.
fn drive_counters(checked: &CheckedConfig) -> DriveCounters {
    let mut counters = DriveCounters::default();
    for namespace in &checked.namespaces {
        counters.add(namespace.nsid, checked.reactors);
    }
    counters
}

/// The files that opening the drives and the log will create, or fill if they are empty, each with
/// its place: those of namespaces beyond the first `open_count`, and of the log.
///
/// # Errors
/// The configuration does not have them created. A loss of the log that is accepted stands for the
/// log's file, too.
fn files_to_create(
    config: &Config,
    namespaces: &[CheckedNamespace],
    open_count: usize,
) -> Result<Vec<(String, MediumPlace)>, StartError> {
    let drives = namespaces.iter().skip(open_count).map(|namespace| {
        (format!("namespace {}", namespace.nsid), namespace.drive.as_str(), config.create)
    });
    let is_log_created = config.create || config.accept_lost_log;
    let log =
        config.log.iter().map(|log| ("ordering log".to_owned(), log.as_str(), is_log_created));
    let mut created = Vec::new();
    for (place, spec, is_created) in drives.chain(log) {
        match file_to_create(spec) {
            Some(file) if is_created => created.push((place, file)),
            Some(file) => {
                let path = file.path().to_owned();
                return Err(match file.is_empty_file() {
                    true => StartError::Empty { place, path },
                    false => StartError::Missing { place, path },
                });
            }
            None => {}
        }
    }
    Ok(created)
}

/// Logs that files are created.
fn note_created(files: &[(String, MediumPlace)]) {
    for (place, file) in files {
        let state = match file.is_empty_file() {
            true => "is empty, and is filled",
            false => "does not exist, and is created",
        };
        tracing::warn!(path = file.path(), "{place}: the file {state}");
    }
}

/// The drives of all namespaces, in the configuration's order.
#[derive(Default)]
struct OpenDrives {
    drives: Vec<Arc<dyn Drive>>,
    namespaces: Vec<NamespaceConfig>,
    identities: Vec<ShownIdentity>,
    /// The members of volumes that the drives are by their labels.
    members: Vec<LabelledDrive>,
    /// A line for display for each namespace.
    descriptions: Vec<String>,
}

/// Takes the drive of each namespace from `open`, or opens it if `open` has too few. A locked drive
/// is waited for as long as `lock_wait_left` returns.
fn open_drives(
    namespaces: &[CheckedNamespace],
    open: &[Arc<dyn Drive>],
    lock_wait_left: impl Fn() -> Duration,
) -> Result<OpenDrives, StartError> {
    let mut opened = OpenDrives::default();
    for (index, namespace) in namespaces.iter().enumerate() {
        let nsid = namespace.nsid;
        let drive = match open.get(index) {
            Some(drive) => Arc::clone(drive),
            None => open_drive_within(&namespace.drive, lock_wait_left())
                .map_err(|source| StartError::Drive { nsid, source })?,
        };
        opened.descriptions.push(format!("namespace {nsid}: {}", drive.geometry().describe));
        opened.drives.push(drive);
    }
    let drives = opened.drives.iter().map(AsRef::as_ref);
    let drives: Vec<(&CheckedNamespace, &dyn Drive)> = namespaces.iter().zip(drives).collect();
    let identified =
        identify(&drives).map_err(|(nsid, source)| StartError::Identity { nsid, source })?;
    for ((namespace, drive), (choice, known)) in drives.into_iter().zip(&identified) {
        let geometry = drive.geometry();
        let member = known.member(choice.id, namespace.nsid);
        check_lba_size(namespace, drive, member.map(|member| member.volume))
            .map_err(|source| StartError::LbaSize { nsid: namespace.nsid, source })?;
        opened.namespaces.push(NamespaceConfig {
            nsid: namespace.nsid,
            blocks: geometry.blocks,
            lba_size: namespace.lba_size,
            ana_group: namespace.ana_group,
            nguid: choice.id.nguid,
            uuid: choice.id.uuid,
            volatile: geometry.volatile_cache,
            order: drive.order(),
        });
        opened.members.extend(member);
        opened.identities.push(choice.into());
    }
    Ok(opened)
}

/// The guarantees of each namespace's drive together with the log.
fn promises(
    namespaces: &[CheckedNamespace],
    drives: &[Arc<dyn Drive>],
    log_spec: Option<&str>,
    log_survival: Option<Survival>,
) -> Vec<Promise> {
    let promise = |(namespace, drive): (&CheckedNamespace, &Arc<dyn Drive>)| {
        let properties = DriveProperties {
            survival: drive.survives(),
            has_volatile_cache: drive.geometry().volatile_cache,
        };
        Promise::new(namespace.nsid, &namespace.drive, properties, log_spec, log_survival)
    };
    namespaces.iter().zip(drives).map(promise).collect()
}

/// The identity of the subsystem for its hosts.
fn subsystem_identity(
    config: &Config,
    checked: &CheckedConfig,
    ports: Vec<DiscoveryPort>,
) -> Identity {
    Identity {
        subnqn: checked.subnqn.clone(),
        serial: checked.serial.clone(),
        model: config.model.clone(),
        firmware: env!("CARGO_PKG_VERSION").chars().take(FIRMWARE_BYTES_MAX).collect(),
        require_header_digest: config.require_header_digest,
        require_data_digest: config.require_data_digest,
        ports,
        io_queues: config.io_queues,
    }
}

/// Runs a reactor in the calling thread, which is pinned to `core`.
fn run_reactor(parts: ReactorParts, core: Option<usize>) -> Result<(), PollerError> {
    if let Some(core) = core
        && let Err(error) = pin_to_core(core)
    {
        // The pinning only affects speed; the target works without it.
        tracing::warn!(%error, "reactor not pinned");
    }
    riopipe_platform::fine_timers();
    let index = parts.core.index;
    let mailboxes = Arc::clone(&parts.devices.mailboxes);
    match Reactor::new(parts) {
        Ok(reactor) => reactor.run(),
        Err(error) => {
            tracing::error!(%error, "a reactor can't start");
            mailboxes.announce_end(index);
            Err(error)
        }
    }
}

/// The counters of a reactor for each namespace.
fn counters_of(metrics: &MetricsSource, reactor: usize) -> Vec<Arc<Counters>> {
    metrics.drives.lock().unwrap_or_else(PoisonError::into_inner).of_reactor(reactor)
}

fn spin_policy(spin_us: Option<u64>) -> SpinPolicy {
    let spin_ns = spin_us.unwrap_or(DEFAULT_SPIN_US).saturating_mul(1000);
    SpinPolicy { spin_ns, ..SpinPolicy::HYBRID }
}

impl Running {
    /// Starts a reactor for each poller. The first reactor listens for all.
    fn start_reactors(
        &mut self,
        pollers: Vec<Poller>,
        receivers: Vec<RequestReceiver>,
        mut ports: Vec<Port>,
    ) -> Result<(), StartError> {
        let config = &self.config;
        let reactor_count = pollers.len();
        let places = Places::new(config.connections);
        let queue_counts = QueueCounts::new(reactor_count);
        let exponents = Exponents::new(Arc::clone(&self.shared), Arc::clone(&self.mailboxes));
        for (index, (poller, requests)) in pollers.into_iter().zip(receivers).enumerate() {
            let parts = ReactorParts {
                core: CoreConfig {
                    index,
                    listens: index == 0,
                    grace_ns: config.grace_ms.saturating_mul(1_000_000),
                    crc: crc32c,
                    places: Arc::clone(&places),
                    queues: Arc::clone(&queue_counts),
                    pending: PendingLimits {
                        per_address: config.pending_connections_per_address,
                        total: config.pending_connections,
                    },
                },
                poller,
                queues: self.open_queues(reactor_count)?,
                // The first reactor takes all of them, and leaves none to the others.
                ports: std::mem::take(&mut ports),
                tls: self.tls.clone(),
                devices: DevicesParts {
                    shared: Arc::clone(&self.shared),
                    mailboxes: Arc::clone(&self.mailboxes),
                    log: self.log.clone(),
                    counters: Arc::clone(&self.metrics.counters[index]),
                    drive_counters: counters_of(&self.metrics, index),
                    hosts: Arc::clone(&self.metrics.hosts),
                    stages: Arc::clone(&self.metrics.stages),
                    exponents: Arc::clone(&exponents),
                },
                control: Arc::clone(&self.control),
                heartbeat: Arc::clone(&self.heartbeat),
                requests,
                spin: spin_policy(config.spin_us),
            };
            let core = config.cores.get(index).copied();
            let thread = std::thread::Builder::new()
                .name(format!("reactor-{index}"))
                .spawn(move || run_reactor(parts, core))
                .map_err(StartError::Thread)?;
            self.threads.push(thread);
        }
        Ok(())
    }

    /// Opens the queues of one reactor: one for each drive.
    fn open_queues(&self, reactor_count: usize) -> Result<Vec<Box<dyn Queue>>, StartError> {
        let mut queues = Vec::new();
        for (drive, namespace) in self.drives.iter().zip(&self.namespaces) {
            // A single reactor takes the only queue of each drive, which saves the drive's locks.
            let depth = drive_queue_depth(drive.order());
            let queue = match reactor_count {
                1 => drive.open_only_queue(depth),
                _ => drive.open_queue(depth),
            };
            let nsid = namespace.nsid;
            queues.push(queue.map_err(|source| StartError::Drive { nsid, source })?);
        }
        Ok(queues)
    }

    /// The listen addresses with the real ports, in the configuration's order. A
    /// [reload](Self::reload) may change them.
    #[must_use]
    pub fn addresses(&self) -> &[SocketAddr] {
        &self.addresses
    }

    /// The addresses meant for discovery only.
    #[must_use]
    pub fn discovery_addresses(&self) -> &[SocketAddr] {
        &self.discovery_addresses
    }

    /// The subsystem's NQN.
    #[must_use]
    pub fn subnqn(&self) -> &str {
        &self.subnqn
    }

    /// The served media, one line each, for display.
    #[must_use]
    pub fn describe(&self) -> &[String] {
        &self.descriptions
    }

    /// The paths of the files that the start has created, or filled because they were empty: drives
    /// and log.
    #[must_use]
    pub fn created(&self) -> &[String] {
        &self.created
    }

    /// The guarantees of each namespace's drive together with the log.
    #[must_use]
    pub fn promises(&self) -> &[Promise] {
        &self.promises
    }

    /// The drives of the namespaces, in the configuration's order and then those of later
    /// [reloads](Self::reload), for tests that cut the power of
    /// a modelled one. A target with one reactor may have the only queue of a drive
    /// ([`Drive::open_only_queue`]); no other queue can then be opened while the target runs.
    #[must_use]
    pub fn drives(&self) -> &[Arc<dyn Drive>] {
        &self.drives
    }

    /// Number of connections after their Fabrics Connect that have not ended.
    #[must_use]
    pub fn connections(&self) -> usize {
        lock(&self.shared).connections()
    }

    /// The counters so far, and the times of ordered writes.
    #[must_use]
    pub fn stat(&self) -> Stat {
        self.metrics.stat()
    }

    /// The source of these metrics for a server, as OpenMetrics text and as JSON.
    #[must_use]
    pub fn stat_source(&self) -> Arc<dyn StatSource> {
        Arc::clone(&self.metrics) as _
    }

    /// Whether all reactors still run. A reactor that ended has logged the reason.
    #[must_use]
    pub fn is_alive(&self) -> bool {
        self.threads.iter().all(|thread| !thread.is_finished())
    }

    /// Takes no new hosts from now on, except owners of volumes that are open here, and informs the
    /// hosts that are connected. Nothing else changes: those hosts go on.
    pub fn drain(&self) {
        let conns = {
            let mut shared = lock(&self.shared);
            shared.drain();
            shared.take_conns_to_wake()
        };
        for conn in conns {
            self.mailboxes.notify(conn);
        }
    }

    /// Sets the ANA state of a group at a port, or of all groups. `port` is the place of its address in
    /// the configuration, counted from 1: first those of `listen`, then those of `discovery`. Also
    /// informs the hosts that are connected
    /// through that port. A [reload](Self::reload) sets the states of the configuration again.
    ///
    /// # Errors
    /// The port or the group does not exist.
    pub fn set_ana(&self, port: u16, group: Option<u32>, state: AnaState) -> Result<(), AnaError> {
        let ports = self.ports.len();
        let id = self.ports.id_at(port).ok_or(AnaError::Port { port, ports })?;
        let groups = match group {
            Some(group) if group == 0 || group > ANA_GROUP_MAX => {
                return Err(AnaError::Group(group));
            }
            Some(group) => group..=group,
            None => 1..=ANA_GROUP_MAX,
        };
        let mut conns = Vec::new();
        {
            let mut shared = lock(&self.shared);
            for group in groups {
                conns.extend(shared.set_ana_state(PortState { port: id, group, state }));
            }
        }
        for conn in conns {
            self.mailboxes.notify(conn);
        }
        let group = group.map_or_else(|| "all".to_owned(), |group| group.to_string());
        tracing::info!(port, group, state = state.name(), "ANA state set");
        Ok(())
    }

    /// The ANA states of the ports that are not *optimized*, each with the place of the port.
    #[must_use]
    pub fn ana_states(&self) -> Vec<PortState> {
        self.ports.by_place(&lock(&self.shared).ana_states())
    }

    /// The volumes that have an owner now, which is connected, or may come back within its lease.
    #[must_use]
    pub fn open_volumes(&self) -> Vec<OpenVolume> {
        lock(&self.shared).open_volumes(riopipe_platform::now_ns())
    }

    /// Asks all reactors for a sign of life ([`have_answered`](Self::have_answered)).
    pub fn ask(&self) {
        self.heartbeat.ask(&self.mailboxes);
    }

    /// Whether all reactors have run their loops since the last [`ask`](Self::ask): none of them
    /// hangs.
    #[must_use]
    pub fn have_answered(&self) -> bool {
        self.heartbeat.have_all_answered()
    }

    /// Stops in order: commands in flight finish, connections end, and drives are flushed. Volumes
    /// without an owner and without anything to recover are marked as closed, so that no lease
    /// delays their next owner (trap T25). A `file:` log is written back so that it outlives this
    /// boot (trap T24). The write-back takes at most 60 s, and a second more for each 32 MiB of the
    /// log's volumes. Locks are released.
    ///
    /// # Errors
    /// [`StopError`], the first failure; the target has stopped even so.
    pub fn stop(mut self) -> Result<(), StopError> {
        self.stop_in_order()
    }

    fn stop_in_order(&mut self) -> Result<(), StopError> {
        self.shut_down(Shutdown::Graceful)?;
        let retiring = self.retiring.iter().map(RetiringDrive::drive);
        let flushed = self.drives.iter().chain(retiring).try_for_each(flush);
        // The log is written back even after a failed flush, because it stays valid.
        let written_back = match self.log.take() {
            Some(log) => end_service(&self.shared, &log)
                .map_err(|source| StopError::Log { log: log.describe().into(), source }),
            None => Ok(()),
        };
        flushed.and(written_back)?;
        tracing::info!(subnqn = self.subnqn, "stopped");
        Ok(())
    }

    /// Ends at once, as if the process were killed: nothing is answered, flushed or closed. It only
    /// waits for operations that are at the drives, as a dead process's I/O would also finish.
    pub fn kill(mut self) {
        // A killed process reports no errors.
        let _ = self.shut_down(Shutdown::Immediate);
    }

    /// Cuts the power, as far as the drives model it: `seed` decides which of the blocks that may
    /// be lost are lost, and the process ends as by [`kill`](Self::kill). Returns the drives, with
    /// power again, for [`Target::start_on`]. Drives without a model keep everything.
    #[must_use]
    pub fn power_cut(mut self, seed: u64) -> Vec<Arc<dyn Drive>> {
        for (index, drive) in self.drives.iter().enumerate() {
            let _ = drive.power_cut(seed.wrapping_add(index as u64));
        }
        // A killed process reports no errors.
        let _ = self.shut_down(Shutdown::Immediate);
        for drive in &self.drives {
            drive.power_on();
        }
        std::mem::take(&mut self.drives)
    }

    /// Requests a shutdown of all reactors, and waits until their threads have ended.
    fn shut_down(&mut self, shutdown: Shutdown) -> Result<(), StopError> {
        self.has_shut_down = true;
        // After a failed start, some reactors have no thread that would announce their end.
        for index in self.threads.len()..self.mailboxes.reactor_count() {
            self.mailboxes.announce_end(index);
        }
        self.control.request(shutdown, &self.mailboxes);
        let mut result = Ok(());
        for thread in self.threads.drain(..) {
            match thread.join() {
                Ok(Ok(())) => {}
                Ok(Err(error)) => result = Err(StopError::Reactor(error.to_string())),
                Err(_) => result = Err(StopError::Reactor("it panicked".into())),
            }
        }
        result
    }
}

fn flush(drive: &Arc<dyn Drive>) -> Result<(), StopError> {
    let description = || drive.geometry().describe.clone();
    let mut queue = Blocking::new(drive.as_ref())
        .map_err(|source| StopError::Drive { drive: description(), source })?;
    queue.flush().map_err(|source| StopError::Flush { drive: description(), source })
}

impl Drop for Running {
    fn drop(&mut self) {
        // The target was neither stopped nor killed. Perhaps its start has failed.
        if !self.has_shut_down
            && let Err(error) = self.stop_in_order()
        {
            tracing::error!(%error, "the target did not stop cleanly");
        }
    }
}

/// The depth of a reactor's queue in a drive. A drive with streams of epochs may hold operations on them
/// back, and they keep no others out. So there the target's own bound
/// ([`BoundedDevice`](riopipe_session::target::BoundedDevice)), which does not count them, is the only
/// one.
const fn drive_queue_depth(order: DriveOrder) -> usize {
    match order {
        DriveOrder::Epochs => usize::MAX,
        DriveOrder::None | DriveOrder::Barrier => QUEUE_DEPTH,
    }
}

#[cfg(test)]
mod tests {
    use riopipe_media::{AlignedBuf, BlockDevice, Data, Submitted, open_drive};
    use riopipe_order::write_order::{EpochId, EpochWrite, WriteOrder};
    use riopipe_session::target::BoundedDevice;

    use super::*;

    #[test]
    fn operations_that_a_drive_holds_back_keep_no_others_out() {
        let drive = open_drive("ssd:flash,size=16M,order=op").unwrap();
        let queue = drive.open_queue(drive_queue_depth(drive.order())).unwrap();
        let mut bounded = BoundedDevice::new(queue, QUEUE_DEPTH, AlignedBuf::copy_of);
        // Epoch 0 does not come.
        let own = EpochId { stream: 1, epoch: 1 };
        let order = WriteOrder::Epochs(EpochWrite { own, follower: None, barrier: false });
        for op in 0..QUEUE_DEPTH as u64 {
            let data = Data::Borrowed(&[0; 4096][..]);
            assert!(matches!(bounded.write_in_order(op, op, data, order), Submitted::Pending));
        }
        assert!(matches!(bounded.read(1 << 20, 0, 1), Submitted::Pending));
        assert!(matches!(bounded.flush(1 << 21), Submitted::Pending));
    }
}

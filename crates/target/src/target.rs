//! A running target: its start, its threads, its end.

use std::net::SocketAddr;
use std::sync::{Arc, Mutex};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use riopipe_media::{Blocking, Drive, IoError, open_drive_within};
use riopipe_metrics::{Start, StatSource};
use riopipe_net::{ListenError, Listener, Poller, PollerError, SpinPolicy, pin_to_core};
use riopipe_order::region::RegionError;
use riopipe_session::stages::Stages;
use riopipe_session::target::{
    CoreConfig, DiscoveryPort, Identity, NamespaceConfig, NamespaceIdError, Namespaces, Places,
    QueueCounts, Shared,
};

use crate::check::{Problem, Promise};
use crate::config::{Config, DEFAULT_SPIN_US};
use crate::control::{Control, Shutdown};
use crate::counters::Counters;
use crate::devices::{DevicesParts, Mail, QUEUE_DEPTH};
use crate::log::{Log, LogOpenError, end_unused_service, open_volumes};
use crate::mail::Mailboxes;
use crate::reactor::{Parts, Reactor};
use crate::shared::{SharedState, end_service, lock};
use crate::stat::{Figures, Stat};
use riopipe_platform::crc32c;

/// The reason why a target did not start.
#[derive(Debug, thiserror::Error)]
pub enum StartError {
    /// The configuration is wrong.
    #[error("{}", problems(.0))]
    Config(Vec<Problem>),
    /// A drive can't be opened.
    #[error("namespace {nsid}: {source}")]
    Drive {
        /// The namespace identifier.
        nsid: u32,
        /// The drive's error.
        source: riopipe_media::OpenError,
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
    /// An address can't be listened on.
    #[error(transparent)]
    Listen(#[from] ListenError),
    /// No descriptors are left.
    #[error(transparent)]
    Poller(#[from] PollerError),
    /// No thread could be started.
    #[error("can't start a reactor thread: {0}")]
    Thread(std::io::Error),
}

fn problems(problems: &[Problem]) -> String {
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

/// A target that is not running yet.
pub struct Target;

/// A running target. Dropping it stops it in order.
pub struct Running {
    addresses: Vec<SocketAddr>,
    discovery_addresses: Vec<SocketAddr>,
    subnqn: String,
    describe: Vec<String>,
    promises: Vec<Promise>,
    shared: SharedState,
    control: Arc<Control>,
    mail: Arc<Mail>,
    threads: Vec<JoinHandle<Result<(), PollerError>>>,
    drives: Vec<Arc<dyn Drive>>,
    log: Option<Arc<Log>>,
    figures: Arc<Figures>,
    /// Its reactors have been asked to end.
    ended: bool,
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
        let checked = crate::check::check_config(config).map_err(StartError::Config)?;
        // One wait for all of them: a killed process had all of their locks.
        let start = Instant::now();
        let lock_wait = Duration::from_millis(config.lock_wait_ms);
        let lock_wait = || lock_wait.saturating_sub(start.elapsed());
        let mut drives: Vec<Arc<dyn Drive>> = Vec::new();
        let mut namespaces = Vec::new();
        let mut describe = Vec::new();
        for (index, ns) in checked.namespaces.iter().enumerate() {
            let drive = match open.get(index) {
                Some(drive) => Arc::clone(drive),
                None => open_drive_within(&ns.drive, lock_wait())
                    .map_err(|source| StartError::Drive { nsid: ns.nsid, source })?,
            };
            let geometry = drive.geometry();
            describe.push(format!("namespace {}: {}", ns.nsid, geometry.describe));
            namespaces.push(NamespaceConfig {
                nsid: ns.nsid,
                blocks: geometry.blocks,
                nguid: ns.nguid,
                uuid: *ns.uuid.as_bytes(),
                volatile: geometry.volatile_cache,
            });
            drives.push(drive);
        }
        let namespaces = Namespaces::new(namespaces)?;
        let reactors = checked.reactors;
        // Before the log is opened: that clears its stamp of a clean stop (T24).
        let pollers: Vec<Poller> =
            (0..reactors).map(|_| Poller::new()).collect::<Result<_, _>>()?;
        let spec = config.log.as_deref();
        let (volumes, log) =
            open_volumes(spec, config.accept_lost_log, lock_wait(), &mut describe).map_err(
                |source| StartError::Log { spec: spec.unwrap_or_default().to_owned(), source },
            )?;
        let log_survives = log.as_ref().map(|log| log.survives());
        let promises = checked.namespaces.iter().zip(&drives).map(|(ns, drive)| {
            let volatile = drive.geometry().volatile_cache;
            Promise::new(ns.nsid, &ns.drive, drive.survives(), volatile, spec, log_survives)
        });
        let promises = promises.collect();
        let mut listeners = match listen(config) {
            Ok(listeners) => listeners,
            Err(error) => {
                // Nothing was served: the log is as valid as before.
                if let Some(log) = &log {
                    end_unused_service(volumes, log);
                }
                return Err(error.into());
            }
        };
        let mut addresses: Vec<SocketAddr> = listeners.iter().map(Listener::local_addr).collect();
        let discovery_addresses = addresses.split_off(config.listen.len());
        let identity = Identity {
            subnqn: checked.subnqn.clone(),
            serial: checked.serial,
            model: config.model.clone(),
            firmware: env!("CARGO_PKG_VERSION").chars().take(8).collect(),
            allowed_hosts: config.hosts.clone(),
            require_header_digest: config.require_header_digest,
            require_data_digest: config.require_data_digest,
            ports: ports(&addresses),
            io_queues: config.io_queues,
        };
        let mut shared = Shared::new(identity, namespaces, volumes, riopipe_platform::now_ns());
        shared.set_memory(config.memory_mib << 20);
        let shared = Arc::new(Mutex::new(shared));
        let mail = Arc::new(Mailboxes::new(pollers.iter().map(Poller::waker).collect()));
        let control = Arc::new(Control::new());
        let places = Places::new(config.connections);
        let queue_counts = QueueCounts::new(reactors);
        let figures = Arc::new(Figures {
            subnqn: checked.subnqn.clone(),
            start: Start::now(),
            shared: Arc::clone(&shared),
            counters: (0..reactors).map(|_| Arc::new(Counters::default())).collect(),
            stages: Arc::new(Stages::of_target()),
        });
        let mut running = Running {
            addresses,
            discovery_addresses,
            subnqn: checked.subnqn,
            describe,
            promises,
            shared,
            control,
            mail,
            threads: Vec::new(),
            drives,
            log,
            figures,
            ended: false,
        };
        for (index, poller) in pollers.into_iter().enumerate() {
            let mut queues = Vec::new();
            for (drive, ns) in running.drives.iter().zip(&checked.namespaces) {
                // One reactor takes the only queue of each drive.
                let queue = match reactors {
                    1 => drive.open_only_queue(QUEUE_DEPTH),
                    _ => drive.open_queue(QUEUE_DEPTH),
                };
                queues.push(queue.map_err(|source| StartError::Drive { nsid: ns.nsid, source })?);
            }
            let parts = Parts {
                core: CoreConfig {
                    index,
                    listens: index == 0,
                    grace_ns: config.grace_ms.saturating_mul(1_000_000),
                    crc: crc32c,
                    places: Arc::clone(&places),
                    queues: Arc::clone(&queue_counts),
                },
                poller,
                queues,
                listeners: if index == 0 { std::mem::take(&mut listeners) } else { Vec::new() },
                devices: DevicesParts {
                    shared: Arc::clone(&running.shared),
                    mail: Arc::clone(&running.mail),
                    log: running.log.clone(),
                    counters: Arc::clone(&running.figures.counters[index]),
                    stages: Arc::clone(&running.figures.stages),
                },
                control: Arc::clone(&running.control),
                spin: spin(config.spin_us),
            };
            let core = config.cores.get(index).copied();
            let thread = std::thread::Builder::new()
                .name(format!("reactor-{index}"))
                .spawn(move || run(parts, core))
                .map_err(StartError::Thread)?;
            running.threads.push(thread);
        }
        for address in &running.addresses {
            tracing::info!(%address, subnqn = running.subnqn, reactors, "serving");
        }
        Ok(running)
    }
}

fn run(parts: Parts, core: Option<usize>) -> Result<(), PollerError> {
    if let Some(core) = core
        && let Err(error) = pin_to_core(core)
    {
        // The pinning only affects speed; the target works without it.
        tracing::warn!(%error, "reactor not pinned");
    }
    riopipe_platform::fine_timers();
    let (index, mail) = (parts.core.index, Arc::clone(&parts.devices.mail));
    match Reactor::new(parts) {
        Ok(reactor) => reactor.run(),
        Err(error) => {
            tracing::error!(%error, "a reactor can't start");
            mail.reactor_ends(index);
            Err(error)
        }
    }
}

fn listen(config: &Config) -> Result<Vec<Listener>, ListenError> {
    config.listen.iter().chain(&config.discovery).map(|address| Listener::bind(address)).collect()
}

fn spin(spin_us: Option<u64>) -> SpinPolicy {
    let spin_ns = spin_us.unwrap_or(DEFAULT_SPIN_US).saturating_mul(1000);
    SpinPolicy { spin_ns, ..SpinPolicy::HYBRID }
}

/// The discovery log's records for the listen addresses. An address that stands for all of the
/// machine's can't be given to a host; the host keeps the one that it has used.
fn ports(addresses: &[SocketAddr]) -> Vec<DiscoveryPort> {
    let port = |(i, address): (usize, &SocketAddr)| DiscoveryPort {
        portid: i as u16 + 1,
        traddr: address.ip().to_string(),
        trsvcid: address.port().to_string(),
        ipv6: address.is_ipv6(),
        discovery_only: false,
    };
    addresses.iter().enumerate().map(port).collect()
}

impl Running {
    /// The listen addresses with the real ports, in the configuration's order.
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
        &self.describe
    }

    /// The guarantees of each namespace's drive together with the log.
    #[must_use]
    pub fn promises(&self) -> &[Promise] {
        &self.promises
    }

    /// The drives of the namespaces, in the configuration's order, for tests that cut the power of
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
        self.figures.stat()
    }

    /// The source of these metrics for a server, as OpenMetrics text and as JSON.
    #[must_use]
    pub fn stat_source(&self) -> Arc<dyn StatSource> {
        Arc::clone(&self.figures) as _
    }

    /// Whether all reactors still run. A reactor that ended has logged the reason.
    #[must_use]
    pub fn is_alive(&self) -> bool {
        self.threads.iter().all(|thread| !thread.is_finished())
    }

    /// Stops in order: commands in flight finish, connections end, and drives are flushed. Volumes
    /// without an owner and without anything to recover are marked as closed (T25). A `file:` log
    /// is written back so that it outlives this boot (T24; for at most 60 s, and a second more for
    /// each 32 MiB of its volumes). Locks are released.
    ///
    /// # Errors
    /// [`StopError`], the first failure; the target has stopped even so.
    pub fn stop(mut self) -> Result<(), StopError> {
        self.finish()
    }

    fn finish(&mut self) -> Result<(), StopError> {
        self.end(Shutdown::Graceful)?;
        let flushed = self.drives.iter().try_for_each(flush);
        // The log is valid even if its drives could not be flushed.
        let rested = match self.log.take() {
            Some(log) => end_service(&self.shared, &log)
                .map_err(|source| StopError::Log { log: log.describe().into(), source }),
            None => Ok(()),
        };
        flushed.and(rested)?;
        tracing::info!(subnqn = self.subnqn, "stopped");
        Ok(())
    }

    /// Ends at once, as if the process were killed: nothing is answered, flushed or closed. It only
    /// waits for operations that are at the drives, as a dead process's I/O would also finish.
    pub fn kill(mut self) {
        // A killed process reports no errors.
        let _ = self.end(Shutdown::Immediate);
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
        let _ = self.end(Shutdown::Immediate);
        for drive in &self.drives {
            drive.power_on();
        }
        std::mem::take(&mut self.drives)
    }

    fn end(&mut self, shutdown: Shutdown) -> Result<(), StopError> {
        self.ended = true;
        // Reactors that were never started, since the start failed.
        for index in self.threads.len()..self.mail.reactors() {
            self.mail.reactor_ends(index);
        }
        self.control.request(shutdown, &self.mail);
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
    let name = || drive.geometry().describe.clone();
    let mut queue = Blocking::new(drive.as_ref())
        .map_err(|source| StopError::Drive { drive: name(), source })?;
    queue.flush().map_err(|source| StopError::Flush { drive: name(), source })
}

impl Drop for Running {
    fn drop(&mut self) {
        // Neither stopped nor killed; perhaps it has not even started.
        if !self.ended
            && let Err(error) = self.finish()
        {
            tracing::error!(%error, "the target did not stop cleanly");
        }
    }
}

//! A change of the configuration of a running target.
//!
//! 1. The configuration is checked and compared with the one that is served. If anything can't
//!    change, nothing does.
//! 2. The target listens on the addresses that come. The drives that come are opened, and each reactor
//!    gets its queues of them. No host knows of them yet, and no connection is accepted. If anything
//!    fails, they are closed again.
//! 3. Namespaces, hosts and ports change at once, under the lock ([`Shared::change`]). Hosts learn of it.
//! 4. Connections are accepted at the ports that come, and the listeners of those that go are closed.
//! 5. The namespaces that go are retired: commands that were begun end, the reactors drop their
//!    queues, and the drive is flushed and closed.
//!
//! [`Shared::change`]: riopipe_session::target::Shared::change

use std::sync::mpsc::{Receiver, RecvTimeoutError, TryRecvError};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use riopipe_media::Drive;
use riopipe_session::auth::tls::KeyRing;
use riopipe_session::target::{
    Change, ChangeError, NamespaceConfig, PortChange, PortInUse, VolumeInUse,
};

use super::{
    OpenDrives, Running, StartError, drive_queue_depth, files_to_create, flush, join_lines,
    note_created, open_drives, promises,
};
use crate::access::access_notes;
use crate::check::Problem;
use crate::checked_config::{CheckedNamespace, check_config};
use crate::config::Config;
use crate::difference::{Checked, Difference, ServedDrive, difference};
use crate::drive_identity::IdentityError;
use crate::ports::{NextPorts, PortsError};
use crate::queue_requests::{Port, QueueRequest, RequestAnswer};
use crate::same_media::same_media;
use crate::secrets;
use crate::shared::lock;
use crate::tls;

/// Longest wait for the reactors to take their queues of a new drive. Their rounds are short.
const REACTOR_TIME: Duration = Duration::from_secs(10);
/// Longest wait for a removed drive, beyond the grace time for the commands of hosts.
const CLOSE_TIME: Duration = Duration::from_secs(10);
/// Interval of the checks whether a removed drive is closed.
const CHECK_INTERVAL: Duration = Duration::from_millis(5);

/// How a configuration is taken over.
#[derive(Clone, Copy, Debug, Default)]
pub struct ReloadOptions {
    /// Change nothing: only find out what would change, and whether that is possible.
    pub dry_run: bool,
    /// Remove namespaces also from volumes that need them, and addresses through which owners of volumes
    /// are connected. The owners lose their connections.
    pub force: bool,
}

/// A configuration that was taken over, or would be.
#[derive(Clone, Debug, Default)]
pub struct Reloaded {
    /// The changes.
    pub difference: Difference,
    /// The paths of the files that were created, or filled because they were empty.
    pub created: Vec<String>,
    /// The volumes that needed namespaces which have gone by force.
    pub forced: Vec<VolumeInUse>,
    /// The volumes whose owners were connected through addresses that have gone by force.
    pub forced_ports: Vec<PortInUse>,
    /// The drives that have gone and are not closed yet, because their operations do not end.
    pub closing: Vec<ServedDrive>,
}

/// The reason why a configuration was not taken over. Nothing has changed.
#[derive(Debug, thiserror::Error)]
pub enum ReloadError {
    /// The configuration is wrong.
    #[error("{}", join_lines(.0))]
    Config(Vec<Problem>),
    /// It changes what can't change while the target serves.
    #[error("{}", join_lines(.0))]
    Fixed(Vec<Problem>),
    /// Namespaces would go that volumes need.
    #[error("{}", lines(.0))]
    InUse(Vec<VolumeInUse>),
    /// Addresses would go through which owners of volumes are connected.
    #[error("{}", lines(.0))]
    PortInUse(Vec<PortInUse>),
    /// An address that comes can't be listened on.
    #[error(transparent)]
    Ports(#[from] PortsError),
    /// A drive that comes can't be served.
    #[error(transparent)]
    Drive(#[from] StartError),
    /// A drive that has gone by an earlier change is not closed yet.
    #[error(
        "namespace {} ({}) was removed, and operations on its drive are still in flight: try again \
         later, or choose another nsid",
        .0.nsid,
        .0.drive
    )]
    Closing(ServedDrive),
    /// A reactor has not taken its queue of a drive, or a listener.
    #[error("a reactor can't take the queue of a drive, or a listener: {0}")]
    Reactor(String),
}

fn lines(volumes: &[impl ToString]) -> String {
    volumes.iter().map(ToString::to_string).collect::<Vec<_>>().join("\n")
}

impl From<ChangeError> for ReloadError {
    fn from(error: ChangeError) -> Self {
        match error {
            ChangeError::InUse(volumes) => Self::InUse(volumes),
            ChangeError::PortInUse(volumes) => Self::PortInUse(volumes),
            ChangeError::NamespaceId(error) => Self::Drive(error.into()),
        }
    }
}

/// A drive that hosts can't find any more, until it is closed.
pub(super) struct RetiringDrive {
    served: ServedDrive,
    drive: Arc<dyn Drive>,
    /// The index of the namespace.
    index: usize,
    /// The number of the change that has removed it.
    change: u64,
    /// When the hosts that still use it lose their connections; `None` if they have.
    grace_end: Option<Instant>,
    /// The answers of the reactors that have dropped their queues, and how many are missing. The
    /// lock is only there because a receiver can't be shared.
    closing: Option<(Mutex<Receiver<RequestAnswer>>, usize)>,
}

impl RetiringDrive {
    pub(super) const fn drive(&self) -> &Arc<dyn Drive> {
        &self.drive
    }
}

impl Running {
    /// Takes over another configuration while the target serves: namespaces, hosts and addresses come
    /// and go.
    /// Everything is done, or nothing is. Waits until the drives that go are closed, for the grace
    /// time of the configuration and 10 s at most; [`tend`](Self::tend) closes what is left then.
    ///
    /// # Errors
    /// [`ReloadError`]. Then the target serves as before.
    pub fn reload(
        &mut self,
        config: &Config,
        options: ReloadOptions,
    ) -> Result<Reloaded, ReloadError> {
        let checked = check_config(config).map_err(ReloadError::Config)?;
        let old =
            Checked { config: &self.config, subnqn: &self.subnqn, namespaces: &self.namespaces };
        let new = Checked { config, subnqn: &checked.subnqn, namespaces: &checked.namespaces };
        let difference = difference(old, new).map_err(ReloadError::Fixed)?;
        let closing = self.retiring.iter().map(|retiring| &retiring.served);
        let is_used = |served: &&ServedDrive| {
            difference
                .added
                .iter()
                .any(|added| added.nsid == served.nsid || added.drive == served.drive)
        };
        if let Some(served) = closing.into_iter().find(is_used) {
            return Err(ReloadError::Closing(served.clone()));
        }
        let twice = same_media(&checked.namespaces, 0, config.log.as_deref());
        if !twice.is_empty() {
            return Err(ReloadError::Config(twice));
        }
        let access = secrets::access(config).map_err(ReloadError::Config)?;
        let ring = tls::key_ring(config, &checked.subnqn).map_err(ReloadError::Config)?;
        let removed: Vec<u32> = difference.removed.iter().map(|served| served.nsid).collect();
        let now = riopipe_platform::now_ns();
        let forced = lock(&self.shared).volumes_in_use(&removed, now);
        if !forced.is_empty() && !options.force {
            return Err(ReloadError::InUse(forced));
        }
        let next = self.ports.next(config)?;
        let forced_ports = lock(&self.shared).ports_in_use(&next.removed, now);
        if !forced_ports.is_empty() && !options.force {
            return Err(ReloadError::PortInUse(forced_ports));
        }
        let is_added = |namespace: &&CheckedNamespace| {
            difference.added.iter().any(|added| added.nsid == namespace.nsid)
        };
        let added: Vec<CheckedNamespace> =
            checked.namespaces.iter().filter(is_added).cloned().collect();
        let files = files_to_create(&Config { log: None, ..config.clone() }, &added, 0)?;
        let created = files.iter().map(|(_, file)| file.path().to_owned()).collect();
        let closing = Vec::new();
        let mut reloaded = Reloaded { difference, created, forced, forced_ports, closing };
        if options.dry_run {
            return Ok(reloaded);
        }
        note_created(&files);
        let change = Change {
            access: Some(access),
            removed,
            ana: Some(next.ports.by_id(&checked.ana)),
            force: options.force,
            ..Change::default()
        };
        self.change(config, &added, next, change, ring)?;
        for line in reloaded.difference.to_string().lines() {
            tracing::info!(subnqn = self.subnqn, "configuration changed: {line}");
        }
        if reloaded.difference.changes_access() {
            let addresses = [&self.addresses[..], &self.discovery_addresses].concat();
            for (_, note) in access_notes(config, &addresses) {
                tracing::warn!("{note}");
            }
        }
        let limit = Instant::now() + self.grace() + CLOSE_TIME;
        while !self.retiring.is_empty() && Instant::now() < limit {
            self.tend();
            std::thread::sleep(CHECK_INTERVAL);
        }
        reloaded.closing = self.retiring.iter().map(|retiring| retiring.served.clone()).collect();
        Ok(reloaded)
    }

    fn grace(&self) -> Duration {
        Duration::from_millis(self.config.grace_ms)
    }

    /// Carries out a change to this configuration, with these namespaces added, and these ports from then
    /// on.
    fn change(
        &mut self,
        config: &Config,
        added: &[CheckedNamespace],
        next: NextPorts,
        change: Change,
        ring: KeyRing,
    ) -> Result<(), ReloadError> {
        let start = Instant::now();
        let lock_wait = Duration::from_millis(config.lock_wait_ms);
        let left = || lock_wait.saturating_sub(start.elapsed());
        let opened = open_drives(added, &[], left)?;
        self.check_identities(&opened.namespaces)?;
        let first_index = lock(&self.shared).namespaces().index_count();
        self.add_queues(first_index, added, &opened)?;
        let NextPorts { ports, added: new_ports, removed: removed_ports, has_changed } = next;
        let new_ids: Vec<u16> = new_ports.iter().map(|port| port.id).collect();
        if let Err(error) = self.add_ports(new_ports) {
            self.take_back(first_index, added, new_ids);
            return Err(error);
        }
        let OpenDrives { drives, namespaces, identities, members, descriptions } = opened;
        let removed = change.removed.clone();
        let listed = PortChange { listed: ports.listed(), removed: removed_ports.clone() };
        let listed = has_changed.then_some(listed);
        let change = Change { added: namespaces, found: members, ports: listed, ..change };
        let slots_of_removed: Vec<usize> = {
            let shared = lock(&self.shared);
            let found = removed.iter().filter_map(|nsid| shared.namespaces().find(*nsid));
            found.map(|(index, _)| index).collect()
        };
        let changed = {
            let mut shared = lock(&self.shared);
            let changed = shared.change(change, riopipe_platform::now_ns());
            (changed, shared.take_conns_to_wake())
        };
        let number = match changed {
            (Ok(number), conns) => {
                self.wake(conns);
                number
            }
            (Err(error), _) => {
                self.take_back(first_index, added, new_ids);
                return Err(error.into());
            }
        };
        // A key that goes proves nothing from now on, and the hosts of new ports have theirs.
        if let Some(tls) = &self.tls {
            tls.set_keys(ring);
        }
        self.config = config.clone();
        (self.addresses, self.discovery_addresses) = (ports.bound(false), ports.bound(true));
        self.ports = ports;
        if !new_ids.is_empty() {
            // It can't fail: the reactor has the listeners.
            let _ = self.ask_about_ports(QueueRequest::OpenPorts(new_ids));
        }
        self.remove_ports(removed_ports);
        let grace_end = Some(Instant::now() + self.grace());
        for (nsid, index) in removed.into_iter().zip(slots_of_removed) {
            let Some(at) = self.namespaces.iter().position(|namespace| namespace.nsid == nsid)
            else {
                continue;
            };
            let namespace = self.namespaces.remove(at);
            self.promises.remove(at);
            self.retiring.push(RetiringDrive {
                served: ServedDrive { nsid, drive: namespace.drive },
                drive: self.drives.remove(at),
                index,
                change: number,
                grace_end,
                closing: None,
            });
            let described = format!("namespace {nsid}: ");
            self.descriptions.retain(|line| !line.starts_with(&described));
        }
        let log_survival = self.log.as_ref().map(|log| log.survives());
        let mut new_promises = promises(added, &drives, self.config.log.as_deref(), log_survival);
        for (promise, identity) in new_promises.iter_mut().zip(identities) {
            promise.identity = Some(identity);
        }
        self.promises.extend(new_promises);
        self.namespaces.extend(added.iter().cloned());
        self.drives.extend(drives);
        self.descriptions.extend(descriptions);
        Ok(())
    }

    /// Gives the first reactor the ports that come. They accept nothing yet.
    fn add_ports(&self, ports: Vec<Port>) -> Result<(), ReloadError> {
        for port in ports {
            self.ask_about_ports(QueueRequest::AddPort(port))?;
        }
        Ok(())
    }

    /// Has the first reactor close the listeners of these ports.
    fn remove_ports(&self, ids: Vec<u16>) {
        if !ids.is_empty() {
            // Only a reactor that has ended gives no answer, and its listeners are closed.
            let _ = self.ask_about_ports(QueueRequest::RemovePorts(ids));
        }
    }

    fn ask_about_ports(&self, request: QueueRequest) -> Result<(), ReloadError> {
        let answers = self.requests.ask([request], &self.mailboxes);
        answers.recv_timeout(REACTOR_TIME).map_err(no_answer)?.map_err(ReloadError::Reactor)
    }

    /// Closes what was opened for a change that has failed.
    fn take_back(&self, first_index: usize, added: &[CheckedNamespace], ports: Vec<u16>) {
        self.remove_ports(ports);
        self.remove_queues(first_index, added.len());
        let mut counters = self.metrics.drives.lock().unwrap_or_else(PoisonError::into_inner);
        for namespace in added {
            counters.remove(namespace.nsid);
        }
    }

    /// Checks that no drive that comes has the identity of one that is served.
    fn check_identities(&self, added: &[NamespaceConfig]) -> Result<(), ReloadError> {
        let shared = lock(&self.shared);
        for config in added {
            let same = shared.namespaces().iter().find(|served| {
                served.config.nguid == config.nguid || served.config.uuid == config.uuid
            });
            if let Some(same) = same {
                let source = IdentityError::SameAs { nsid: same.config.nsid };
                return Err(StartError::Identity { nsid: config.nsid, source }.into());
            }
        }
        Ok(())
    }

    /// Gives each reactor a queue of each drive. The namespaces get the indices from `first_index`
    /// on.
    fn add_queues(
        &self,
        first_index: usize,
        added: &[CheckedNamespace],
        opened: &OpenDrives,
    ) -> Result<(), ReloadError> {
        for (at, (namespace, drive)) in added.iter().zip(&opened.drives).enumerate() {
            let taken = self.add_queue(first_index + at, namespace.nsid, drive);
            if taken.is_err() {
                self.remove_queues(first_index, at + 1);
                let mut counters =
                    self.metrics.drives.lock().unwrap_or_else(PoisonError::into_inner);
                for namespace in &added[..=at] {
                    counters.remove(namespace.nsid);
                }
            }
            taken?;
        }
        Ok(())
    }

    /// Gives each reactor a queue of a drive.
    fn add_queue(
        &self,
        index: usize,
        nsid: u32,
        drive: &Arc<dyn Drive>,
    ) -> Result<(), ReloadError> {
        let reactors = self.requests.reactor_count();
        let counters = {
            let mut counters = self.metrics.drives.lock().unwrap_or_else(PoisonError::into_inner);
            counters.add(nsid, reactors)
        };
        let mut requests = Vec::new();
        for counters in counters {
            let depth = drive_queue_depth(drive.order());
            let queue = match reactors {
                1 => drive.open_only_queue(depth),
                _ => drive.open_queue(depth),
            };
            let queue = queue.map_err(|source| StartError::Drive { nsid, source })?;
            requests.push(QueueRequest::Add { index, queue, counters });
        }
        let answers = self.requests.ask(requests, &self.mailboxes);
        let limit = Instant::now() + REACTOR_TIME;
        for _ in 0..reactors {
            let left = limit.saturating_duration_since(Instant::now());
            answers.recv_timeout(left).map_err(no_answer)?.map_err(ReloadError::Reactor)?;
        }
        Ok(())
    }

    /// Takes the queues of `count` drives back from the reactors. No connection knows them.
    fn remove_queues(&self, first_index: usize, count: usize) {
        for index in first_index..first_index + count {
            let requests =
                (0..self.requests.reactor_count()).map(|_| QueueRequest::Remove { index });
            let answers = self.requests.ask(requests, &self.mailboxes);
            // The drive must be closed when this function returns, so that it can be opened again.
            for _ in 0..self.requests.reactor_count() {
                let _ = answers.recv_timeout(REACTOR_TIME);
            }
        }
    }

    fn wake(&self, conns: Vec<riopipe_session::target::ConnId>) {
        for conn in conns {
            self.mailboxes.notify(conn);
        }
    }

    /// Goes on with what a [`reload`](Self::reload) has left: closes the drives that have gone, as
    /// soon as their operations have ended. Call it from time to time. It waits for no host.
    pub fn tend(&mut self) {
        let mut retiring = std::mem::take(&mut self.retiring);
        retiring.retain_mut(|drive| !self.close(drive));
        self.retiring.append(&mut retiring);
    }

    /// Takes the next step to close a drive. Returns whether it is closed.
    fn close(&self, retiring: &mut RetiringDrive) -> bool {
        let reactors = self.requests.reactor_count();
        if retiring.closing.is_none() {
            let mut shared = lock(&self.shared);
            if !shared.is_retired(retiring.change) {
                if retiring.grace_end.is_some_and(|end| end <= Instant::now()) {
                    retiring.grace_end = None;
                    shared.end_users(retiring.change);
                }
                let conns = shared.take_conns_to_wake();
                drop(shared);
                self.wake(conns);
                // A connection without events checks its commands when its reactor runs.
                self.mailboxes.wake_all();
                return false;
            }
            drop(shared);
            let index = retiring.index;
            let requests = (0..reactors).map(|_| QueueRequest::Remove { index });
            let answers = Mutex::new(self.requests.ask(requests, &self.mailboxes));
            retiring.closing = Some((answers, reactors));
        }
        let Some((answers, missing)) = &mut retiring.closing else { return false };
        let answers = answers.get_mut().unwrap_or_else(PoisonError::into_inner);
        while *missing > 0 {
            match answers.try_recv() {
                Ok(_) => *missing -= 1,
                Err(TryRecvError::Empty) => return false,
                // A reactor has ended, and its queues with it.
                Err(TryRecvError::Disconnected) => *missing = 0,
            }
        }
        if let Err(error) = flush(&retiring.drive) {
            tracing::error!(%error, nsid = retiring.served.nsid, "a removed drive was not flushed");
        }
        let mut counters = self.metrics.drives.lock().unwrap_or_else(PoisonError::into_inner);
        counters.remove(retiring.served.nsid);
        let ServedDrive { nsid, drive } = &retiring.served;
        tracing::info!(nsid, drive = drive.as_str(), "a removed drive is closed");
        true
    }
}

fn no_answer(error: RecvTimeoutError) -> ReloadError {
    ReloadError::Reactor(match error {
        RecvTimeoutError::Timeout => format!("no answer within {} s", REACTOR_TIME.as_secs()),
        RecvTimeoutError::Disconnected => "it has ended".to_owned(),
    })
}

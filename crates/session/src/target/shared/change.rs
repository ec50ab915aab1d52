//! Changes of the subsystem while it serves: namespaces, hosts and ports come and go.
//!
//! A change takes effect at once, under the lock, or not at all. Connections learn of it by a
//! [`Notice`]. A command that was begun before on a removed namespace still ends there. So the
//! namespace is *retired* first, and its drive may be closed when no connection uses it any more
//! ([`Shared::is_retired`]).

use alloc::collections::{BTreeMap, BTreeSet};
use alloc::format;
use alloc::string::{String, ToString};
use alloc::sync::Arc;
use alloc::vec::Vec;

use riopipe_order::attribute::VolumeId;
use riopipe_order::region::Region;

use super::{Controller, Notice, Shared};
use crate::target::access::Access;
use crate::target::ana::PortState;
use crate::target::identity::DiscoveryPort;
use crate::target::ids::ConnId;
use crate::target::namespace::{NamespaceConfig, NamespaceIdError};
use crate::target::volumes::{LabelledDrive, VolumeInUse};

/// A change of the subsystem.
#[derive(Clone, Debug, Default)]
pub struct Change {
    /// The hosts that may connect from now on, and their secrets, if that changes.
    pub access: Option<Arc<Access>>,
    /// The ids of the namespaces that go.
    pub removed: Vec<u32>,
    /// The namespaces that come.
    pub added: Vec<NamespaceConfig>,
    /// The members of volumes that their drives are, by the labels.
    pub found: Vec<LabelledDrive>,
    /// The ports from now on, if that changes.
    pub ports: Option<PortChange>,
    /// The ANA states of the ports from now on, if that changes: all that are not *optimized*.
    pub ana: Option<Vec<PortState>>,
    /// Remove namespaces also from volumes that need them, and ports through which owners are
    /// connected. The associations of these owners end.
    pub force: bool,
}

/// A change of the ports of the subsystem.
#[derive(Clone, Debug, Default)]
pub struct PortChange {
    /// The records of the discovery log.
    pub listed: Vec<DiscoveryPort>,
    /// The ids of the ports that go. No later port may have one of them.
    pub removed: Vec<u16>,
}

/// A volume whose owner is connected through a port.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error(
    "host {hostnqn} at {address} has volume {volume} open through {port}: close it there first, or open \
     it through another address"
)]
pub struct PortInUse {
    /// The address of the port, or its id if discovery does not list it.
    pub port: String,
    /// The volume.
    pub volume: VolumeId,
    /// The name of the host.
    pub hostnqn: String,
    /// The address from which it is connected.
    pub address: String,
}

/// The reason why a change was refused. Nothing has changed.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum ChangeError {
    /// The namespace ids contradict one another.
    #[error(transparent)]
    NamespaceId(#[from] NamespaceIdError),
    /// Volumes need the namespaces that would go.
    #[error("{}", join(.0))]
    InUse(Vec<VolumeInUse>),
    /// Owners of volumes are connected through the ports that would go.
    #[error("{}", join(.0))]
    PortInUse(Vec<PortInUse>),
}

fn join(volumes: &[impl ToString]) -> String {
    volumes.iter().map(ToString::to_string).collect::<Vec<_>>().join("; ")
}

/// By the number of a change: the connections that may still use a namespace that it has removed.
#[derive(Debug, Default)]
pub(super) struct Retirements {
    waiting_for: BTreeMap<u64, BTreeSet<ConnId>>,
    last: u64,
}

impl Retirements {
    /// Notes that `conn` uses none of the namespaces that this change has removed.
    fn acknowledge(&mut self, number: u64, conn: ConnId) {
        if let Some(waiting_for) = self.waiting_for.get_mut(&number) {
            waiting_for.remove(&conn);
            if waiting_for.is_empty() {
                self.waiting_for.remove(&number);
            }
        }
    }

    /// Notes that a connection has ended.
    pub(super) fn forget(&mut self, conn: ConnId) {
        self.waiting_for.retain(|_, waiting_for| {
            waiting_for.remove(&conn);
            !waiting_for.is_empty()
        });
    }
}

impl<R: Region> Shared<R> {
    /// The volumes that need one of these namespaces at time `now`, ns: [`change`](Self::change)
    /// does not remove these namespaces without force.
    #[must_use]
    pub fn volumes_in_use(&self, nsids: &[u32], now: u64) -> Vec<VolumeInUse> {
        self.volumes.in_use(nsids, now)
    }

    /// Changes the subsystem at time `now`, ns, and leaves notices for the connections. Returns the
    /// number of the change, for [`is_retired`](Self::is_retired). The caller must wake the
    /// connections ([`take_conns_to_wake`](Self::take_conns_to_wake)).
    ///
    /// # Errors
    /// [`ChangeError`]; then nothing has changed.
    pub fn change(&mut self, change: Change, now: u64) -> Result<u64, ChangeError> {
        let Change { access, removed, added, found, ports, ana, force } = change;
        let in_use = self.volumes.in_use(&removed, now);
        if !in_use.is_empty() && !force {
            return Err(ChangeError::InUse(in_use));
        }
        let removed_ports = ports.as_ref().map_or(&[][..], |ports| &ports.removed);
        let ports_in_use = self.ports_in_use(removed_ports, now);
        if !ports_in_use.is_empty() && !force {
            return Err(ChangeError::PortInUse(ports_in_use));
        }
        let changed_nsids: Vec<u32> =
            removed.iter().copied().chain(added.iter().map(|config| config.nsid)).collect();
        let namespaces = self.namespaces.changed(&removed, added)?;
        // From here on nothing fails.
        self.namespaces = Arc::new(namespaces);
        self.after_ana_groups_changed();
        self.volumes.locate_added(&found);
        self.volumes.guard_again(&self.namespaces);
        for association in self.volumes.owners_of(&removed) {
            self.end_association(association, "a namespace of its volume was removed");
        }
        if let Some(ports) = ports {
            self.change_ports(ports);
        }
        if let Some(ana) = ana {
            self.change_ana_states(&ana);
        }
        if let Some(access) = access {
            // The discovery log depends on the hosts. Hosts read it again after each event.
            let has_changed = self.access.hosts != access.hosts;
            self.access = access;
            if has_changed {
                self.note_discovery_change();
            }
            self.end_hosts_not_allowed();
        }
        Ok(self.announce(changed_nsids))
    }

    /// The volumes that owners have open at time `now`, ns, through one of these ports:
    /// [`change`](Self::change) does not remove these ports without force.
    #[must_use]
    pub fn ports_in_use(&self, ports: &[u16], now: u64) -> Vec<PortInUse> {
        let mut found = Vec::new();
        for controller in self.controllers.values().filter(|it| ports.contains(&it.port)) {
            for (volume, address) in self.volumes.open_by(controller.association, now) {
                let listed = self.identity.ports.iter().find(|it| it.portid == controller.port);
                let port = match listed {
                    Some(DiscoveryPort { traddr, trsvcid, ipv6: true, .. }) => {
                        format!("[{traddr}]:{trsvcid}")
                    }
                    Some(DiscoveryPort { traddr, trsvcid, .. }) => format!("{traddr}:{trsvcid}"),
                    None => format!("port {}", controller.port),
                };
                let hostnqn = controller.hostnqn.clone();
                found.push(PortInUse { port, volume, hostnqn, address });
            }
        }
        found
    }

    /// Sets the ports. The associations that were made through a removed one end, and no new ones
    /// begin there: the listener may still have accepted a connection.
    fn change_ports(&mut self, PortChange { listed, removed }: PortChange) {
        self.list_ports(listed);
        let is_at_removed = |controller: &&Controller| removed.contains(&controller.port);
        let lost = self.controllers.values().filter(is_at_removed);
        let associations: Vec<u64> = lost.map(|controller| controller.association).collect();
        for association in associations {
            self.end_association(association, "the target does not serve its port any more");
        }
        self.removed_ports.extend(removed);
    }

    /// Ends the associations of the hosts that may not connect any more. A discovery controller is
    /// for every host.
    fn end_hosts_not_allowed(&mut self) {
        let has_lost =
            |controller: &&Controller| !controller.discovery && !self.allows(&controller.hostnqn);
        let lost = self.controllers.values().filter(has_lost);
        let associations: Vec<u64> = lost.map(|controller| controller.association).collect();
        for association in associations {
            self.end_association(association, "its host may not connect any more");
        }
    }

    /// Informs all connections that the namespaces with these ids have come or gone.
    fn announce(&mut self, nsids: Vec<u32>) -> u64 {
        self.retirements.last += 1;
        let number = self.retirements.last;
        if nsids.is_empty() {
            return number;
        }
        let conns: BTreeSet<ConnId> = self.conns.keys().copied().collect();
        for conn in &conns {
            self.leave_notice(*conn, Notice::NamespacesChanged { number });
        }
        // Behind the notices of the change: a host that is informed finds the new namespaces.
        for nsid in nsids {
            self.note_namespace_change(nsid);
        }
        if !conns.is_empty() {
            self.retirements.waiting_for.insert(number, conns);
        }
        number
    }

    /// Notes that `conn` knows of this change, and uses none of the namespaces that it has removed.
    pub(in crate::target) fn acknowledge_change(&mut self, number: u64, conn: ConnId) {
        self.retirements.acknowledge(number, conn);
    }

    /// Whether no connection uses a namespace any more that this change has removed. Its drive gets
    /// no operation from then on.
    #[must_use]
    pub fn is_retired(&self, number: u64) -> bool {
        !self.retirements.waiting_for.contains_key(&number)
    }

    /// Ends the connections that still use a namespace that this change has removed, because their
    /// hosts take too long.
    pub fn end_users(&mut self, number: u64) {
        let users = self.retirements.waiting_for.get(&number).cloned().unwrap_or_default();
        for conn in users {
            self.leave_notice(conn, Notice::Close("a namespace that it uses was removed"));
        }
    }
}

//! The hosts that may connect, and how they prove their identity.

use alloc::collections::{BTreeMap, BTreeSet};
use alloc::format;
use alloc::string::String;
use alloc::sync::Arc;

use riopipe_nvme::dhchap_secret::DhchapSecret;
use riopipe_nvme::fabrics::DISCOVERY_NQN;

use crate::auth::controller::AuthRules;
use crate::auth::tls::KeyOwner;

/// The hosts that may connect, with their secrets, and the rules of authentication.
///
/// All of it is one value, so that a change of hosts and secrets happens at once
/// ([`Shared::set_access`](super::Shared::set_access)).
#[derive(Clone, Debug, Default)]
pub struct Access {
    /// The hosts that may connect, by NQN; `None` if every host may, without authentication.
    pub hosts: Option<BTreeMap<String, HostAccess>>,
    /// The rules of authentication. `None` is the same as no secret of any host.
    pub rules: Option<AuthRules>,
    /// The hosts that have a key of TLS. They may use no connection without TLS.
    pub tls_hosts: BTreeSet<String>,
}

/// The proof that a host on the list must give.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum HostAccess {
    /// Nothing: any peer that gives the name is admitted.
    ByName,
    /// That it has this secret.
    BySecret(DhchapSecret),
}

/// The treatment of a host that connects.
#[derive(Clone, Copy, Debug)]
pub(super) enum Admission<'a> {
    /// It may not connect.
    Refused,
    /// It may connect.
    Granted,
    /// It may connect, and must prove that it has this secret.
    Authenticates(&'a DhchapSecret, &'a AuthRules),
}

impl Access {
    /// A list of hosts that need not prove anything.
    #[must_use]
    pub fn by_name(hosts: impl IntoIterator<Item = String>) -> Arc<Self> {
        let hosts = hosts.into_iter().map(|host| (host, HostAccess::ByName)).collect();
        Arc::new(Self { hosts: Some(hosts), rules: None, tls_hosts: BTreeSet::new() })
    }

    /// Whether a host may connect to a subsystem over a connection: one that `secured_by` has secured by
    /// TLS, or one without TLS. A key proves one name only, and a host with a key uses it: otherwise a peer
    /// without the key could give the host's name on a connection without TLS.
    ///
    /// # Errors
    /// The reason, for the operator.
    pub(super) fn check_channel(
        &self,
        secured_by: Option<&KeyOwner>,
        hostnqn: &str,
        subnqn: &str,
    ) -> Result<(), String> {
        match secured_by {
            Some(owner) if owner.hostnqn != hostnqn || owner.subnqn != subnqn => Err(format!(
                "the connection's key of TLS is that of host {:?} for subsystem {:?}",
                owner.hostnqn, owner.subnqn
            )),
            None if subnqn != DISCOVERY_NQN && self.tls_hosts.contains(hostnqn) => {
                Err("the host has a key of TLS, and has connected without TLS".into())
            }
            _ => Ok(()),
        }
    }

    /// The treatment of the host with this NQN.
    pub(super) fn admission(&self, hostnqn: &str) -> Admission<'_> {
        let Some(hosts) = &self.hosts else { return Admission::Granted };
        match (hosts.get(hostnqn), &self.rules) {
            (Some(HostAccess::ByName), _) => Admission::Granted,
            (Some(HostAccess::BySecret(secret)), Some(rules)) => {
                Admission::Authenticates(secret, rules)
            }
            (Some(HostAccess::BySecret(_)), None) | (None, _) => Admission::Refused,
        }
    }
}

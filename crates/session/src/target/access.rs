//! The hosts that may connect, and how they prove their identity.

use alloc::collections::BTreeMap;
use alloc::string::String;
use alloc::sync::Arc;

use riopipe_nvme::dhchap_secret::DhchapSecret;

use crate::auth::controller::AuthRules;

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
        Arc::new(Self { hosts: Some(hosts), rules: None })
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

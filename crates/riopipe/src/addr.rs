//! The addresses of members and targets.

use std::fmt;
use std::str::FromStr;
use std::sync::Arc;

use riopipe_net::HostPort;

/// The port that IANA has registered for NVMe over Fabrics.
const DEFAULT_PORT: u16 = 4420;

/// The address of a member, that is, of a drive of a volume: a namespace of a target.
///
/// The text form is `ADDR[:PORT][,nqn=NQN][,ns=N]`. The default port is 4420, the default namespace
/// is 1. Without an NQN, the target's discovery service must list exactly one subsystem.
///
/// ```
/// let m: riopipe::MemberAddr = "10.0.0.1:4421,ns=2".parse().unwrap();
/// assert_eq!((m.port, m.nsid), (4421, 2));
/// assert_eq!(m.to_string(), "10.0.0.1:4421,ns=2");
/// ```
#[derive(Clone, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct MemberAddr {
    /// The host name or IP address of the target.
    pub host: String,
    /// The TCP port of the target.
    pub port: u16,
    /// The NQN of the subsystem. `None`: the only one that discovery lists.
    pub nqn: Option<String>,
    /// The namespace id (NSID) of the drive, from 1.
    pub nsid: u32,
}

impl MemberAddr {
    /// The address of the target, as `host:port`.
    #[must_use]
    pub fn socket(&self) -> String {
        host_and_port(&self.host, self.port)
    }

    /// Whether both members are on one target.
    pub(crate) fn same_target(&self, other: &Self) -> bool {
        self.host == other.host && self.port == other.port && self.nqn == other.nqn
    }

    /// The address of the target.
    #[must_use]
    pub fn target(&self) -> TargetAddr {
        TargetAddr::new(&self.host, self.port)
    }
}

/// The address of a target: a host and a TCP port. The text form is `host:port`, with an IPv6 address
/// in brackets.
///
/// ```
/// let member: riopipe::MemberAddr = "[::1]:4420,ns=2".parse().unwrap();
/// assert_eq!(member.target().as_str(), "[::1]:4420");
/// ```
#[derive(Clone, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct TargetAddr(Arc<str>);

impl TargetAddr {
    pub(crate) fn new(host: &str, port: u16) -> Self {
        Self(host_and_port(host, port).into())
    }

    /// The text form, as `connect` and a resolver accept it.
    #[must_use]
    pub fn as_str(&self) -> &str {
        &self.0
    }
}

impl fmt::Display for TargetAddr {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

/// `host:port`, with an IPv6 address in brackets.
fn host_and_port(host: &str, port: u16) -> String {
    let is_ipv6 = host.contains(':');
    if is_ipv6 { format!("[{host}]:{port}") } else { format!("{host}:{port}") }
}

impl fmt::Display for MemberAddr {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.socket())?;
        if let Some(nqn) = &self.nqn {
            write!(f, ",nqn={nqn}")?;
        }
        write!(f, ",ns={}", self.nsid)
    }
}

/// Why a text is not a member's address.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
#[error(
    "\"{text}\" is no member address ({what}); write ADDR[:PORT][,nqn=NQN][,ns=N], as 10.0.0.1:4420,ns=1"
)]
pub struct ParseMemberError {
    text: String,
    what: String,
}

impl FromStr for MemberAddr {
    type Err = ParseMemberError;

    fn from_str(text: &str) -> Result<Self, ParseMemberError> {
        let fail = |what: &str| ParseMemberError { text: text.to_owned(), what: what.to_owned() };
        let mut parts = text.split(',');
        let socket: Result<HostPort, _> = parts.next().unwrap_or_default().parse();
        let HostPort { host, port } = socket.map_err(|error| fail(&error.to_string()))?;
        let port = match port {
            Some(0) => return Err(fail("the port is not a number from 1 to 65535")),
            port => port.unwrap_or(DEFAULT_PORT),
        };
        let mut member = Self { host, port, nqn: None, nsid: 1 };
        for part in parts {
            match part.split_once('=') {
                Some(("nqn", nqn)) if !nqn.is_empty() => member.nqn = Some(nqn.to_owned()),
                Some(("ns", ns)) => match ns.parse() {
                    Ok(ns) if ns > 0 => member.nsid = ns,
                    _ => return Err(fail("the namespace is not a number from 1 up")),
                },
                _ => return Err(fail("after the address come only nqn= and ns=")),
            }
        }
        Ok(member)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn addresses_are_read_and_written_back() {
        for text in ["a:1,ns=1", "[::1]:4420,nqn=nqn.x:y,ns=7", "127.0.0.1:4420,ns=4294967295"] {
            assert_eq!(text.parse::<MemberAddr>().unwrap().to_string(), text);
        }
        assert_eq!("host".parse::<MemberAddr>().unwrap().to_string(), "host:4420,ns=1");
        for text in ["::1", "[::1]", "[::1]:4420"] {
            assert_eq!(text.parse::<MemberAddr>().unwrap().to_string(), "[::1]:4420,ns=1");
        }
    }

    #[test]
    fn the_error_of_a_bad_address_shows_the_form() {
        for text in ["", ":4420", "a:0", "a:x", "a,ns=0", "a,foo=1", "[::1", "a,nqn="] {
            let error = text.parse::<MemberAddr>().unwrap_err().to_string();
            assert!(error.contains("ADDR[:PORT]"), "{error}");
        }
    }
}

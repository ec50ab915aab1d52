//! Addresses as people write them: a host, with a port or without.

use std::fmt;
use std::io;
use std::net::{Ipv6Addr, SocketAddr, ToSocketAddrs};
use std::str::FromStr;

/// The host and the port of a text such as `192.0.2.1:4420`, `[2001:db8::1]:4420`, `2001:db8::1` or
/// `storage.example`. All options and keys for addresses are read in this way.
///
/// ```
/// use riopipe_net::HostPort;
/// let address: HostPort = "::1".parse().unwrap();
/// assert_eq!((address.host.as_str(), address.port), ("::1", None));
/// assert_eq!(address.with_port(4420), "[::1]:4420");
/// ```
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct HostPort {
    /// A name or a number; an IPv6 address without brackets.
    pub host: String,
    /// The port, if the text has one.
    pub port: Option<u16>,
}

impl HostPort {
    /// The text `host:port` with this port, or with `default` if it has none. An IPv6 address is in
    /// brackets.
    #[must_use]
    pub fn with_port(&self, default: u16) -> String {
        let port = self.port.unwrap_or(default);
        Self { host: self.host.clone(), port: Some(port) }.to_string()
    }
}

impl fmt::Display for HostPort {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match (self.host.contains(':'), self.port) {
            (true, Some(port)) => write!(f, "[{}]:{port}", self.host),
            (false, Some(port)) => write!(f, "{}:{port}", self.host),
            (_, None) => f.write_str(&self.host),
        }
    }
}

/// The socket addresses that `text` stands for, in the resolver's order; never empty. Without a port
/// in the text it is `default_port`.
///
/// # Errors
/// The text is no address ([`ParseAddressError`] is the cause), or the resolver's error.
pub(crate) fn socket_addresses(
    text: &str,
    default_port: Option<u16>,
) -> io::Result<Vec<SocketAddr>> {
    let invalid = |error| io::Error::new(io::ErrorKind::InvalidInput, error);
    let HostPort { host, port } = text.parse().map_err(invalid)?;
    let port = port.or(default_port).ok_or_else(|| invalid(ParseAddressError::NoPort))?;
    let found: Vec<_> = (host.as_str(), port).to_socket_addrs()?.collect();
    match found.is_empty() {
        true => Err(io::Error::new(io::ErrorKind::NotFound, "the name has no address")),
        false => Ok(found),
    }
}

/// Why a text is no address.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum ParseAddressError {
    /// There is nothing before the port.
    #[error("no host")]
    NoHost,
    /// There is a bracket without the other one, or something other than a port behind it.
    #[error("the brackets of an IPv6 address are written [ADDR] or [ADDR]:PORT")]
    Brackets,
    /// The text in brackets, or with several colons, is no IPv6 address.
    #[error("{0:?} is no IPv6 address; with a port it is written [ADDR]:PORT")]
    Ipv6(String),
    /// The text behind the last colon is no port.
    #[error("the port {0:?} is not a number from 0 to 65535")]
    Port(String),
    /// The text has no port, and needs one.
    #[error("no port")]
    NoPort,
    /// The text is one number: a port without a host.
    #[error("{0} is a port without a host")]
    OnlyPort(String),
    /// The host has a character that no name and no address has.
    #[error("{0:?} is neither a name nor an address")]
    Host(String),
}

impl FromStr for HostPort {
    type Err = ParseAddressError;

    fn from_str(text: &str) -> Result<Self, ParseAddressError> {
        let (host, port) = if let Some(behind) = text.strip_prefix('[') {
            let (host, rest) = behind.split_once(']').ok_or(ParseAddressError::Brackets)?;
            let port = match rest {
                "" => None,
                rest => Some(rest.strip_prefix(':').ok_or(ParseAddressError::Brackets)?),
            };
            check_ipv6(host)?;
            (host, port)
        } else if text.matches(':').count() > 1 {
            check_ipv6(text)?;
            (text, None)
        } else {
            let (host, port) = match text.split_once(':') {
                Some((host, port)) => (host, Some(port)),
                None => (text, None),
            };
            check_name(host, port.is_some())?;
            (host, port)
        };
        let port = port.map(parse_port).transpose()?;
        Ok(Self { host: host.to_owned(), port })
    }
}

/// Checks an IPv6 address, which may have a zone, as in `fe80::1%eth0`.
fn check_ipv6(text: &str) -> Result<(), ParseAddressError> {
    let address = text.split_once('%').map_or(text, |(address, _)| address);
    match address.parse::<Ipv6Addr>() {
        Ok(_) => Ok(()),
        Err(_) => Err(ParseAddressError::Ipv6(text.to_owned())),
    }
}

/// Checks a name or an IPv4 address. The resolver takes one number for an IPv4 address, but people
/// mean a port by it.
fn check_name(host: &str, has_port: bool) -> Result<(), ParseAddressError> {
    if host.is_empty() {
        return Err(ParseAddressError::NoHost);
    }
    if host.bytes().all(|byte| byte.is_ascii_digit()) {
        return Err(match has_port {
            true => ParseAddressError::Host(host.to_owned()),
            false => ParseAddressError::OnlyPort(host.to_owned()),
        });
    }
    let is_of_a_name = |c: char| c.is_alphanumeric() || matches!(c, '.' | '-' | '_');
    match host.chars().all(is_of_a_name) {
        true => Ok(()),
        false => Err(ParseAddressError::Host(host.to_owned())),
    }
}

fn parse_port(text: &str) -> Result<u16, ParseAddressError> {
    // `parse` would accept a sign.
    let is_number = !text.is_empty() && text.bytes().all(|byte| byte.is_ascii_digit());
    let port = if is_number { text.parse().ok() } else { None };
    port.ok_or_else(|| ParseAddressError::Port(text.to_owned()))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_form_is_read_and_written_with_its_port() {
        for (text, host, port, whole) in [
            ("192.0.2.1", "192.0.2.1", None, "192.0.2.1:4420"),
            ("192.0.2.1:7", "192.0.2.1", Some(7), "192.0.2.1:7"),
            ("::1", "::1", None, "[::1]:4420"),
            ("[::1]", "::1", None, "[::1]:4420"),
            ("[::1]:0", "::1", Some(0), "[::1]:0"),
            ("fe80::1%eth0", "fe80::1%eth0", None, "[fe80::1%eth0]:4420"),
            ("storage-1.example", "storage-1.example", None, "storage-1.example:4420"),
            ("localhost:65535", "localhost", Some(65535), "localhost:65535"),
        ] {
            let read: HostPort = text.parse().unwrap();
            assert_eq!((read.host.as_str(), read.port), (host, port), "{text}");
            assert_eq!(read.with_port(4420), whole);
            assert_eq!(read.to_string().parse(), Ok(read));
        }
    }

    #[test]
    fn what_is_no_address_is_refused_with_the_reason() {
        for (text, why) in [
            ("", "no host"),
            (":4420", "no host"),
            ("4420", "a port without a host"),
            ("1:2", "neither a name"),
            ("a:", "not a number"),
            ("a:x", "not a number"),
            ("a:+1", "not a number"),
            ("a:65536", "not a number"),
            ("[::1", "brackets"),
            ("[::1]4420", "brackets"),
            ("[a]:1", "no IPv6"),
            ("1::2::3", "no IPv6"),
            ("a:b:c", "no IPv6"),
            ("a b", "neither a name"),
            ("http://a", "not a number"),
        ] {
            let error = text.parse::<HostPort>().unwrap_err().to_string();
            assert!(error.contains(why), "{text}: {error}");
        }
    }
}

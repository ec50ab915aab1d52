//! Addresses that only this machine can reach: a server of metrics authenticates no client.

use std::net::ToSocketAddrs;

/// The port of a target's metrics, if none is given.
pub const TARGET_PORT: u16 = 9420;
/// The port of an open volume's metrics, if none is given.
pub const VOLUME_PORT: u16 = 9421;
/// The port of the metrics of a mounted file system, if none is given.
pub const FS_PORT: u16 = 9422;

/// The reason why metrics may not be served at an address.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum AddressError {
    /// The address can't be parsed, or its name has no address.
    #[error("{0:?} is no address")]
    Senseless(String),
    /// It is not a loopback address.
    #[error("{0:?} can be reached from other machines")]
    Reachable(String),
}

impl AddressError {
    /// The remedy, for the user.
    #[must_use]
    pub const fn advice(&self) -> &'static str {
        match self {
            Self::Senseless(_) => "give one, such as 127.0.0.1:9420",
            Self::Reachable(_) => {
                "metrics know no authentication: give a loopback address, such as 127.0.0.1:9420, \
                 and have an agent on this machine read it"
            }
        }
    }
}

/// Whether only this machine can reach `address`, which is `host:port`.
///
/// # Errors
/// [`AddressError`].
pub fn check_address(address: &str) -> Result<(), AddressError> {
    let senseless = || AddressError::Senseless(address.to_owned());
    let mut found = address.to_socket_addrs().map_err(|_| senseless())?.peekable();
    found.peek().ok_or_else(senseless)?;
    match found.all(|address| address.ip().to_canonical().is_loopback()) {
        true => Ok(()),
        false => Err(AddressError::Reachable(address.to_owned())),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_loopback_addresses_are_accepted() {
        for address in ["127.0.0.1:0", "127.9.9.9:9420", "[::1]:9420", "[::ffff:127.0.0.1]:1"] {
            assert_eq!(check_address(address), Ok(()), "{address}");
        }
        for address in ["0.0.0.0:9420", "[::]:9420", "192.0.2.1:9420", "[::ffff:192.0.2.1]:1"] {
            let error = check_address(address).unwrap_err();
            assert_eq!(error, AddressError::Reachable(address.into()));
            assert!(error.advice().contains("127.0.0.1"));
        }
        for address in ["", "9420", "127.0.0.1", "127.0.0.1:port", "127.0.0.1:99999"] {
            let error = check_address(address).unwrap_err();
            assert_eq!(error, AddressError::Senseless(address.into()));
        }
    }
}

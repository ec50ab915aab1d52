//! The identity of the subsystem: its names, its settings, and its addresses.

use alloc::string::String;
use alloc::vec::Vec;

use crate::auth::tls::Demand;

/// The identity and the settings of the subsystem.
#[derive(Clone, Debug)]
pub struct Identity {
    /// The subsystem's NQN.
    pub subnqn: String,
    /// Serial number, at most 20 ASCII characters.
    pub serial: String,
    /// Model, at most 40 ASCII characters.
    pub model: String,
    /// Firmware revision, at most 8 ASCII characters.
    pub firmware: String,
    /// Whether connections without header digests are refused.
    pub require_header_digest: bool,
    /// Whether connections without data digests are refused.
    pub require_data_digest: bool,
    /// The addresses of the subsystem: the records of the discovery log.
    pub ports: Vec<DiscoveryPort>,
    /// The most I/O queues of a controller.
    pub io_queues: u16,
}

impl Identity {
    /// A subsystem that needs no digests, lists no port, and allows 16 I/O
    /// queues: for tests and the simulator.
    #[must_use]
    pub fn open_to_all(subnqn: impl Into<String>, serial: impl Into<String>) -> Self {
        Self {
            subnqn: subnqn.into(),
            serial: serial.into(),
            model: "Rio target".into(),
            firmware: "0.1".into(),
            require_header_digest: false,
            require_data_digest: false,
            ports: Vec::new(),
            io_queues: 16,
        }
    }
}

/// An address of the subsystem, as discovery reports it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct DiscoveryPort {
    /// Port id.
    pub portid: u16,
    /// The address, as text.
    pub traddr: String,
    /// The TCP port, as text.
    pub trsvcid: String,
    /// Whether the address is IPv6.
    pub ipv6: bool,
    /// Whether only the discovery service uses this address.
    pub discovery_only: bool,
    /// Whether hosts may or must use TLS there; `None` if there is no TLS.
    pub tls: Option<Demand>,
}

/// An address of this machine, as text.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct LocalAddress {
    /// The address.
    pub traddr: String,
    /// Whether it is IPv6.
    pub ipv6: bool,
    /// The port id of the listener there.
    pub portid: u16,
}

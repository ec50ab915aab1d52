//! The configuration of a connection.

use alloc::string::String;
use alloc::sync::Arc;

use riopipe_nvme::digest::Crc32c;
use riopipe_nvme::fabrics::CNTLID_ANY;

use crate::auth::host::HostSecrets;

/// The configuration of a connection.
#[derive(Clone, Debug)]
pub struct QpConfig {
    /// The host's NQN.
    pub hostnqn: String,
    /// The host's identifier.
    pub hostid: [u8; 16],
    /// The subsystem to connect to.
    pub subnqn: String,
    /// The queue to create; 0 is the admin queue.
    pub qid: u16,
    /// The controller to which the queue belongs; [`CNTLID_ANY`] for the admin queue.
    pub cntlid: u16,
    /// The number of entries of the queue, 2 to 4096. One entry stays free, so one command fewer
    /// may be in flight.
    pub sqsize: u16,
    /// The Keep Alive Timeout of an admin queue, in milliseconds. 0: the target never gives up the
    /// host.
    pub kato_ms: u32,
    /// Ask for header digests.
    pub header_digest: bool,
    /// Ask for data digests.
    pub data_digest: bool,
    /// The CRC32C implementation.
    pub crc: Crc32c,
    /// The number of R2Ts that the target may have open for one command, at least 1.
    pub maxr2t: u32,
    /// The most data that one read may request, in bytes: a bound on all buffered data.
    pub data_max: u32,
    /// For an I/O queue: the incarnation of the target, if the target has the extension.
    pub incarnation: Option<u32>,
    /// The secrets with which the host authenticates if the target demands it.
    pub secrets: Option<Arc<HostSecrets>>,
}

/// An I/O queue that a stream may open on a connection of its own: its configuration, and the limit
/// of the controller for one capsule. Nothing has been sent for it.
#[derive(Clone, Debug)]
pub struct IoQueue {
    /// The configuration.
    pub config: QpConfig,
    /// The most data that a command capsule may carry, in bytes.
    pub in_capsule_bytes: u32,
}

impl QpConfig {
    /// An admin queue of 32 entries, without digests.
    #[must_use]
    pub fn admin(hostnqn: String, hostid: [u8; 16], subnqn: String, crc: Crc32c) -> Self {
        Self {
            hostnqn,
            hostid,
            subnqn,
            qid: 0,
            cntlid: CNTLID_ANY,
            sqsize: 32,
            kato_ms: 0,
            header_digest: false,
            data_digest: false,
            crc,
            maxr2t: 1,
            data_max: 1 << 20,
            incarnation: None,
            secrets: None,
        }
    }

    /// The configuration of an I/O queue with `sqsize` entries on the same controller. `cntlid` is
    /// the controller's identifier.
    #[must_use]
    pub fn io_queue(&self, cntlid: u16, qid: u16, sqsize: u16) -> Self {
        Self { qid, cntlid, sqsize, kato_ms: 0, ..self.clone() }
    }
}

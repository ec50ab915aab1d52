//! CRC32C for everything in the simulated cluster.

use crc_fast::CrcAlgorithm;

/// CRC32C in append form; see [`riopipe_nvme::Crc32c`].
#[must_use]
pub fn crc32c(crc: u32, data: &[u8]) -> u32 {
    // The crate's initial state is the register: the complement of a finished CRC.
    let mut digest =
        crc_fast::Digest::new_with_init_state(CrcAlgorithm::Crc32Iscsi, u64::from(!crc));
    digest.update(data);
    digest.finalize() as u32
}

//! CRC32C by the processor's own instructions.

use crc_fast::CrcAlgorithm;

/// CRC32C in append form; see [`riopipe_nvme::Crc32c`].
pub(crate) fn crc32c(crc: u32, data: &[u8]) -> u32 {
    // The crate's initial state is the register: the complement of a finished CRC.
    let mut digest =
        crc_fast::Digest::new_with_init_state(CrcAlgorithm::Crc32Iscsi, u64::from(!crc));
    digest.update(data);
    digest.finalize() as u32
}

#[cfg(test)]
mod tests {
    use super::crc32c;

    #[test]
    fn it_is_crc32c_and_appends() {
        assert_eq!(crc32c(0, b"123456789"), 0xe306_9283);
        let data: Vec<u8> = (0..5000u32).map(|i| (i * 7) as u8).collect();
        for cut in [0, 1, 72, 4095, 4096, 5000] {
            let (a, b) = data.split_at(cut);
            assert_eq!(crc32c(crc32c(0, a), b), riopipe_nvme::digest::soft(0, &data));
        }
    }
}

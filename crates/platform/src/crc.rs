//! CRC32C with the processor's own instructions: the `crc32` instruction for log entries (52 bytes)
//! and PDU headers, folding for data.

use crc_fast::CrcAlgorithm;

/// Up to this length in bytes, the `crc32` instruction, eight bytes at a time, is faster than
/// starting to fold.
#[cfg(target_arch = "x86_64")]
const SHORT_MAX: usize = 256;

/// CRC32C in append form: `crc32c(0, data)` is the checksum of `data`, and
/// `crc32c(crc32c(0, a), b)` that of `a` followed by `b`. Digests, labels and logs have it.
#[inline]
#[must_use]
pub fn crc32c(crc: u32, data: &[u8]) -> u32 {
    #[cfg(target_arch = "x86_64")]
    if data.len() <= SHORT_MAX && std::arch::is_x86_feature_detected!("sse4.2") {
        // SAFETY: the processor has SSE 4.2.
        return unsafe { short(crc, data) };
    }
    // The crate's initial state is the register, the complement of a finished CRC.
    let mut digest =
        crc_fast::Digest::new_with_init_state(CrcAlgorithm::Crc32Iscsi, u64::from(!crc));
    digest.update(data);
    digest.finalize() as u32
}

/// # Safety
/// The processor must have SSE 4.2.
#[cfg(target_arch = "x86_64")]
#[target_feature(enable = "sse4.2")]
unsafe fn short(crc: u32, data: &[u8]) -> u32 {
    use std::arch::x86_64::{_mm_crc32_u8, _mm_crc32_u32, _mm_crc32_u64};
    let (mut register, mut data) = (!crc, data);
    // A log entry's 52 bytes begin in the middle of a word: half a word is read first, so that each
    // load finds the result of one store.
    if data.len() & 4 != 0
        && let Some((half, rest)) = data.split_first_chunk()
    {
        register = _mm_crc32_u32(register, u32::from_le_bytes(*half));
        data = rest;
    }
    let mut register = u64::from(register);
    let (words, rest) = data.as_chunks::<8>();
    for word in words {
        register = _mm_crc32_u64(register, u64::from_le_bytes(*word));
    }
    let mut register = register as u32;
    for byte in rest {
        register = _mm_crc32_u8(register, *byte);
    }
    !register
}

#[cfg(test)]
mod tests {
    use super::crc32c;

    #[test]
    fn the_result_is_crc32c_and_appends() {
        assert_eq!(crc32c(0, b"123456789"), 0xe306_9283);
        let data: Vec<u8> = (0..5000u32).map(|i| (i * 7) as u8).collect();
        for len in [0, 1, 7, 8, 52, 72, 255, 256, 257, 4096, 5000] {
            let whole = riopipe_nvme::digest::soft(0, &data[..len]);
            for cut in [0, 1, 8, 72, 4095, 4096].into_iter().filter(|cut| *cut <= len) {
                let (a, b) = data[..len].split_at(cut);
                assert_eq!(crc32c(crc32c(0, a), b), whole, "{cut} of {len}");
            }
        }
    }
}

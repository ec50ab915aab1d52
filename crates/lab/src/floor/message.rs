//! The messages of the raw exchange: as long as NVMe/TCP's, without their content.
//!
//! ```text
//! header, 72 bytes              answer, 24 bytes
//!  0  u32 length of the whole    0  u32 length (24)
//!  4  u32 slot                   4  u32 slot
//!  8  u64 first block            8  zeroes
//! 16  zeroes
//! ```

/// Length of the header before a payload in bytes: NVMe/TCP's CapsuleCmd header and submission
/// entry, 8 + 64.
pub const HEADER_LEN: usize = 72;

/// Length of an answer in bytes: NVMe/TCP's CapsuleResp, 8 + 16.
pub const ANSWER_LEN: usize = 24;

/// The header of one write, decoded.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Header {
    /// Length of header and payload in bytes.
    pub(super) len: u32,
    /// The writer's number of the write.
    pub(super) slot: u32,
    /// First block.
    pub(super) lba: u64,
}

impl Header {
    pub(super) fn put(self, into: &mut [u8; HEADER_LEN]) {
        into[..4].copy_from_slice(&self.len.to_le_bytes());
        into[4..8].copy_from_slice(&self.slot.to_le_bytes());
        into[8..16].copy_from_slice(&self.lba.to_le_bytes());
    }

    /// `None` if the header is not complete.
    pub(super) fn parse(bytes: &[u8]) -> Option<Self> {
        let header = bytes.first_chunk::<HEADER_LEN>()?;
        Some(Self {
            len: word(header, 0),
            slot: word(header, 4),
            lba: u64::from(word(header, 8)) | u64::from(word(header, 12)) << 32,
        })
    }
}

/// Appends an answer to `slot`.
pub(super) fn push_answer(slot: u32, into: &mut Vec<u8>) {
    let mut answer = [0; ANSWER_LEN];
    answer[..4].copy_from_slice(&(ANSWER_LEN as u32).to_le_bytes());
    answer[4..8].copy_from_slice(&slot.to_le_bytes());
    into.extend_from_slice(&answer);
}

/// The slots of the complete answers at the front of `bytes`.
pub(super) fn answers(bytes: &[u8]) -> impl Iterator<Item = u32> {
    bytes.chunks_exact(ANSWER_LEN).map(|answer| word(answer, 4))
}

/// Writes a payload's address into it, so that a reader can verify its place.
pub(super) fn stamp(payload: &mut [u8], lba: u64) {
    payload[..8].copy_from_slice(&lba.to_le_bytes());
}

/// The address that [`stamp`] has written.
#[cfg(test)]
pub(super) fn stamped_lba(payload: &[u8]) -> u64 {
    u64::from_le_bytes(payload[..8].try_into().unwrap())
}

fn word(bytes: &[u8], at: usize) -> u32 {
    u32::from_le_bytes([bytes[at], bytes[at + 1], bytes[at + 2], bytes[at + 3]])
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn messages_are_parsed_as_they_were_built() {
        let header = Header { len: 4168, slot: 0x0102_0304, lba: 0x0506_0708_090a_0b0c };
        let mut bytes = [0; HEADER_LEN];
        header.put(&mut bytes);
        assert_eq!(Header::parse(&bytes), Some(header));
        assert_eq!(Header::parse(&bytes[..71]), None);
        let mut out = Vec::new();
        push_answer(7, &mut out);
        push_answer(9, &mut out);
        assert_eq!(out.len(), 2 * ANSWER_LEN);
        assert_eq!(answers(&out[..40]).collect::<Vec<_>>(), [7]);
        assert_eq!(answers(&out).collect::<Vec<_>>(), [7, 9]);
    }
}

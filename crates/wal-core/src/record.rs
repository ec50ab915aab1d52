//! Records in the log: a frame with length, kind and checksum, and then the record's bytes.
//!
//! | bytes | content of the frame |
//! |---|---|
//! | 0..4 | bits 0 to 27: length of the record in bytes; bits 28 to 31: its kind |
//! | 4..8 | CRC32C of the record's bytes, its Lsn, and the first word of the frame |
//!
//! A record is one range of bytes in the log's numbering ([`Lsn`]). The end of a block may divide
//! the range anywhere.

use crate::format::u32_at;
use crate::{Crc32c, Lsn};

/// Length of the frame before a record's bytes, in bytes.
pub const FRAME_BYTES: usize = 8;
/// Number of bits of a frame's first word that hold the length. The kind is in the bits above.
const LEN_BITS: u32 = 28;
/// The number of [`Kind::Data`] in a frame.
const KIND_DATA: u32 = 1;
/// The number of [`Kind::Checkpoint`] in a frame.
const KIND_CHECKPOINT: u32 = 2;
/// Length of the longest record that a frame can describe, in bytes. The limit of a log is usually
/// lower ([`Ring::record_bytes_max`](crate::ring::Ring::record_bytes_max)).
pub const LEN_MAX: usize = (1 << LEN_BITS) - 1;

/// The kind of a record.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Kind {
    /// The caller's bytes.
    Data,
    /// A checkpoint: the Lsn at which replay begins, and the caller's bytes.
    Checkpoint,
}

/// The frame before a record.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Frame {
    /// Kind of the record.
    pub kind: Kind,
    /// Length of the record in bytes.
    pub len: usize,
    /// The checksum that the frame has.
    sum: u32,
}

impl Frame {
    /// The frame of a record at `lsn`. `record_sum` is the checksum of the record's bytes, which
    /// can be computed before the Lsn is known. The frame's checksum also covers the Lsn, so that a
    /// record that is read at another place is refused.
    ///
    /// # Panics
    /// If `len` is more than [`LEN_MAX`].
    #[must_use]
    pub fn encode(
        kind: Kind,
        len: usize,
        record_sum: u32,
        lsn: Lsn,
        crc: Crc32c,
    ) -> [u8; FRAME_BYTES] {
        assert!(len <= LEN_MAX, "records are bounded before they are framed");
        let kind: u32 = match kind {
            Kind::Data => KIND_DATA,
            Kind::Checkpoint => KIND_CHECKPOINT,
        };
        let first_word = kind << LEN_BITS | len as u32;
        let frame_sum = frame_sum(record_sum, lsn, first_word, crc);
        let mut bytes = [0; FRAME_BYTES];
        bytes[..4].copy_from_slice(&first_word.to_le_bytes());
        bytes[4..].copy_from_slice(&frame_sum.to_le_bytes());
        bytes
    }

    /// Reads a frame; `None` if it is not valid.
    #[must_use]
    pub fn decode(bytes: &[u8; FRAME_BYTES]) -> Option<Self> {
        let first_word = u32_at(bytes, 0);
        let kind = match first_word >> LEN_BITS {
            KIND_DATA => Kind::Data,
            KIND_CHECKPOINT => Kind::Checkpoint,
            _ => return None,
        };
        Some(Self { kind, len: first_word as usize & LEN_MAX, sum: u32_at(bytes, 4) })
    }

    /// Whether `record` is the record of this frame at `lsn`: its length and its checksum are
    /// right.
    #[must_use]
    pub fn fits(&self, record: &[u8], lsn: Lsn, crc: Crc32c) -> bool {
        let expected = Self::encode(self.kind, self.len, crc(0, record), lsn, crc);
        record.len() == self.len && u32_at(&expected, 4) == self.sum
    }

    /// Length of frame and record in bytes.
    #[must_use]
    pub fn total(&self) -> usize {
        FRAME_BYTES + self.len
    }
}

/// The checksum of a frame: it continues `record_sum` with the Lsn and the frame's first word.
fn frame_sum(record_sum: u32, lsn: Lsn, first_word: u32, crc: Crc32c) -> u32 {
    crc(crc(record_sum, &lsn.0.to_le_bytes()), &first_word.to_le_bytes())
}

#[cfg(test)]
mod tests {
    use super::*;
    use riopipe_nvme::digest::soft;

    #[test]
    fn a_frame_fits_its_record_at_its_place_only() {
        let record = b"some bytes";
        for kind in [Kind::Data, Kind::Checkpoint] {
            let bytes = Frame::encode(kind, record.len(), soft(0, record), Lsn(77), soft);
            let frame = Frame::decode(&bytes).unwrap();
            assert_eq!((frame.kind, frame.len), (kind, 10));
            assert!(frame.fits(record, Lsn(77), soft));
            assert!(!frame.fits(record, Lsn(78), soft), "a record of another place");
            assert!(!frame.fits(b"some bytez", Lsn(77), soft), "other bytes");
            assert!(!frame.fits(b"some byte", Lsn(77), soft), "fewer bytes");
        }
    }

    #[test]
    fn zeroes_are_no_frame() {
        assert_eq!(Frame::decode(&[0; FRAME_BYTES]), None);
        let empty = Frame::encode(Kind::Data, 0, 0, Lsn(0), soft);
        assert_eq!(Frame::decode(&empty).map(|frame| frame.total()), Some(FRAME_BYTES));
    }
}

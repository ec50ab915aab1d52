//! Records in the log: a length, a kind and a checksum before the record's bytes.
//!
//! A record is one range of bytes in the log's numbering ([`Lsn`]); the ends of blocks may divide
//! it anywhere.

use crate::format::u32_at;
use crate::{Crc32c, Lsn};

/// Length of the frame before a record's bytes, in bytes.
pub const FRAME_BYTES: usize = 8;
/// Number of bits of a frame's first word that hold the length.
const LEN_BITS: u32 = 28;
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
    /// The checksum as it was written.
    crc: u32,
}

impl Frame {
    /// The frame of a record at `lsn`. `sum` is the checksum of the record's bytes, which can be
    /// computed before its place is known. The frame's checksum also covers the place: a record
    /// read at another place is refused.
    ///
    /// # Panics
    /// If `len` is more than [`LEN_MAX`].
    #[must_use]
    pub fn encode(kind: Kind, len: usize, sum: u32, lsn: Lsn, crc: Crc32c) -> [u8; FRAME_BYTES] {
        assert!(len <= LEN_MAX, "records are bounded before they are framed");
        let kind: u32 = match kind {
            Kind::Data => 1,
            Kind::Checkpoint => 2,
        };
        let word = kind << LEN_BITS | len as u32;
        let mut bytes = [0; FRAME_BYTES];
        bytes[..4].copy_from_slice(&word.to_le_bytes());
        bytes[4..].copy_from_slice(&seal(sum, lsn, word, crc).to_le_bytes());
        bytes
    }

    /// Reads a frame; `None` if it is not valid.
    #[must_use]
    pub fn decode(bytes: &[u8; FRAME_BYTES]) -> Option<Self> {
        let word = u32_at(bytes, 0);
        let kind = match word >> LEN_BITS {
            1 => Kind::Data,
            2 => Kind::Checkpoint,
            _ => return None,
        };
        Some(Self { kind, len: word as usize & LEN_MAX, crc: u32_at(bytes, 4) })
    }

    /// Whether `record` has the checksum of this frame at this place.
    #[must_use]
    pub fn fits(&self, record: &[u8], lsn: Lsn, crc: Crc32c) -> bool {
        let again = Self::encode(self.kind, self.len, crc(0, record), lsn, crc);
        record.len() == self.len && u32_at(&again, 4) == self.crc
    }

    /// Length of frame and record in bytes.
    #[must_use]
    pub fn total(&self) -> usize {
        FRAME_BYTES + self.len
    }
}

fn seal(sum: u32, lsn: Lsn, word: u32, crc: Crc32c) -> u32 {
    crc(crc(sum, &lsn.0.to_le_bytes()), &word.to_le_bytes())
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

//! What the tests of this crate share.
#![allow(dead_code, reason = "each test binary uses a part of it")]

use riopipe_order::attribute::{Attribute, Flags, Kind, Member, Seq, StreamId, VolumeId};
use riopipe_order::entry::PartitionId;

const TABLE: crc::Crc<u32, crc::Table<16>> =
    crc::Crc::<u32, crc::Table<16>>::new(&crc::CRC_32_ISCSI);

/// CRC-32C in append form.
pub(crate) fn crc32c(crc: u32, data: &[u8]) -> u32 {
    // The crate takes the register before reflection and final inversion.
    let mut digest = TABLE.digest_with_initial((!crc).reverse_bits());
    digest.update(data);
    digest.finalize()
}

/// The partition that most tests use.
pub(crate) const ID: PartitionId = PartitionId { volume: VolumeId([7; 16]), stream: StreamId(3) };

/// A one-block write that is a group of its own.
pub(crate) fn write(seq: u64, ordinal: u32) -> Attribute {
    Attribute {
        seq: Seq(seq),
        span: 1,
        num: 1,
        index: 0,
        ordinal,
        member: Member(0),
        kind: Kind::Write,
        flags: Flags::BOUNDARY,
        lba: 1000 + seq % 1000,
        blocks: 1,
        tag: !seq,
    }
}

/// Choices made by a test case, one after the other.
pub(crate) struct Choices {
    bytes: Vec<u16>,
    at: usize,
}

impl Choices {
    pub(crate) fn new(bytes: Vec<u16>) -> Self {
        Self { bytes, at: 0 }
    }

    /// One of `0..n`; always 0 once the choices are used up, so that runs end.
    pub(crate) fn below(&mut self, n: usize) -> usize {
        let choice = self.bytes.get(self.at).copied().unwrap_or(0);
        self.at += 1;
        usize::from(choice) % n.max(1)
    }
}

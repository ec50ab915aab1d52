//! The data of Copy: source ranges of format 0 (NVM §3.2.2).

use crate::bytes::{put_u16, put_u64, u16_at, u64_at};

/// A source range of a Copy: 32 bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct SourceRange {
    /// Byte 8: the first block.
    pub lba: u64,
    /// Byte 16: the number of blocks, 1 to 65536. The field holds one less.
    pub blocks: u32,
}

impl SourceRange {
    /// Length of a range in bytes.
    pub const LEN: usize = 32;

    /// The range as bytes.
    #[must_use]
    pub fn encode(&self) -> [u8; Self::LEN] {
        let mut bytes = [0; Self::LEN];
        put_u64(&mut bytes, 8, self.lba);
        put_u16(&mut bytes, 16, self.blocks.wrapping_sub(1) as u16);
        bytes
    }

    /// Reads a range.
    #[must_use]
    pub fn decode(bytes: &[u8; Self::LEN]) -> Self {
        Self { lba: u64_at(bytes, 8), blocks: u32::from(u16_at(bytes, 16)) + 1 }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn source_range_bytes() {
        let mut want = [0; 32];
        want[8] = 7;
        want[15] = 1;
        want[16] = 0xff;
        want[17] = 0xff;
        let range = SourceRange { lba: 1 << 56 | 7, blocks: 65536 };
        assert_eq!(range.encode(), want);
        assert_eq!(SourceRange::decode(&want), range);
    }
}

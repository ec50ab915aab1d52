//! The header block of a copied file: block 0 of the volume, written last.
//!
//! ```text
//!    0  magic "RIOFILE" and 00h            8 bytes
//!    8  version, 1                         u32
//!   12  state: 1 being copied, 2 whole     u32
//!   16  length of the file, bytes          u64
//!   24  CRC-64/NVME of the file            u64
//!   32  first block of the file, 1         u64
//!   40  length of the name, bytes          u16
//!   42  the name, no path                  at most 255 bytes, then zeroes
//! 4088  CRC-64/NVME of bytes 0 to 4087     u64
//! ```
//!
//! All numbers are little endian. One block is written atomically (assumption M1), so a header is
//! old or new, never a mixture.

use std::{
    ffi::{OsStr, OsString},
    os::unix::ffi::{OsStrExt, OsStringExt},
};

use crc_fast::CrcAlgorithm::Crc64Nvme;
use riopipe::BLOCK_BYTES;

/// Block of the header.
pub const HEADER_BLOCK: u64 = 0;
/// First block of the file's bytes.
pub const DATA_BLOCK: u64 = 1;
/// Largest length of a name in bytes.
pub const NAME_MAX: usize = 255;

const MAGIC: [u8; 8] = *b"RIOFILE\0";
const VERSION: u32 = 1;
const STATE_COPYING: u32 = 1;
const STATE_WHOLE: u32 = 2;
const NAME_AT: usize = 42;
const CHECK_AT: usize = BLOCK_BYTES - 8;

/// The description of a volume's file.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Header {
    /// Its name, without a path.
    pub name: OsString,
    /// Length of the file in bytes.
    pub length: u64,
    /// CRC-64/NVME of the file's bytes.
    pub checksum: u64,
}

/// The content of block 0 of a volume.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Found {
    /// A whole file.
    Whole(Header),
    /// A copy of a file with this name was begun and not finished.
    Copying(OsString),
    /// All zeroes.
    Blank,
    /// A file in a newer format.
    Newer(u32),
    /// A header whose own checksum or fields are wrong.
    Damaged(&'static str),
    /// Other data.
    Foreign,
}

/// Number of blocks of a file of `length` bytes, including the header. `None`: more than a volume
/// can have.
#[must_use]
pub fn blocks_for(length: u64) -> Option<u64> {
    length.div_ceil(BLOCK_BYTES as u64).checked_add(DATA_BLOCK)
}

/// The checksum of `bytes`.
#[must_use]
pub fn checksum(bytes: &[u8]) -> u64 {
    crc_fast::checksum(Crc64Nvme, bytes)
}

/// A checksum over bytes that arrive in pieces.
#[derive(Debug)]
pub struct Checksum(crc_fast::Digest);

impl Checksum {
    /// The checksum of no bytes.
    #[must_use]
    pub fn new() -> Self {
        Self(crc_fast::Digest::new(Crc64Nvme))
    }

    /// Adds bytes.
    pub fn add(&mut self, bytes: &[u8]) {
        self.0.update(bytes);
    }

    /// The checksum of all bytes so far.
    #[must_use]
    pub fn value(&self) -> u64 {
        self.0.finalize()
    }
}

impl Default for Checksum {
    fn default() -> Self {
        Self::new()
    }
}

impl Header {
    /// Encodes the header of a complete file.
    ///
    /// # Panics
    /// If `block` is not one block long, or the name is longer than [`NAME_MAX`]: both are errors
    /// of the caller.
    pub fn encode(&self, block: &mut [u8]) {
        encode(block, STATE_WHOLE, &self.name, self.length, self.checksum);
    }

    /// Encodes the header of a file that is being copied.
    ///
    /// # Panics
    /// As [`Header::encode`].
    pub fn encode_copying(name: &OsStr, block: &mut [u8]) {
        encode(block, STATE_COPYING, name, 0, 0);
    }
}

fn encode(block: &mut [u8], state: u32, name: &OsStr, length: u64, checksum_of_file: u64) {
    let name = name.as_bytes();
    assert!(block.len() == BLOCK_BYTES && name.len() <= NAME_MAX);
    block.fill(0);
    block[..8].copy_from_slice(&MAGIC);
    block[8..12].copy_from_slice(&VERSION.to_le_bytes());
    block[12..16].copy_from_slice(&state.to_le_bytes());
    block[16..24].copy_from_slice(&length.to_le_bytes());
    block[24..32].copy_from_slice(&checksum_of_file.to_le_bytes());
    block[32..40].copy_from_slice(&DATA_BLOCK.to_le_bytes());
    block[40..42].copy_from_slice(&(name.len() as u16).to_le_bytes());
    block[NAME_AT..NAME_AT + name.len()].copy_from_slice(name);
    let check = checksum(&block[..CHECK_AT]);
    block[CHECK_AT..].copy_from_slice(&check.to_le_bytes());
}

/// Decodes a block of a volume of `volume_blocks`. A volume is untrusted input (trap T19): every
/// field is checked.
#[must_use]
pub fn decode(block: &[u8], volume_blocks: u64) -> Found {
    let u32_at = |at: usize| u32::from_le_bytes([0, 1, 2, 3].map(|i| block[at + i]));
    let u64_at = |at: usize| u64::from_le_bytes([0, 1, 2, 3, 4, 5, 6, 7].map(|i| block[at + i]));
    if block.len() != BLOCK_BYTES {
        return Found::Damaged("it is not one block");
    }
    if block.iter().all(|byte| *byte == 0) {
        return Found::Blank;
    }
    if block[..8] != MAGIC {
        return Found::Foreign;
    }
    // The checksum is at the same place in every version, so that a flipped bit in the version is
    // not taken for a newer format.
    if u64_at(CHECK_AT) != checksum(&block[..CHECK_AT]) {
        return Found::Damaged("its checksum is wrong");
    }
    if u32_at(8) != VERSION {
        return Found::Newer(u32_at(8));
    }
    let name_len = usize::from(u16::from_le_bytes([block[40], block[41]]));
    if name_len > NAME_MAX {
        return Found::Damaged("its name is too long");
    }
    let name = OsString::from_vec(block[NAME_AT..NAME_AT + name_len].to_vec());
    if !is_plain_name(&name) {
        return Found::Damaged("its name is not a plain file name");
    }
    match u32_at(12) {
        STATE_COPYING => Found::Copying(name),
        STATE_WHOLE => {
            let length = u64_at(16);
            if u64_at(32) != DATA_BLOCK || blocks_for(length).is_none_or(|n| n > volume_blocks) {
                return Found::Damaged("it speaks of blocks that the volume doesn't have");
            }
            Found::Whole(Header { name, length, checksum: u64_at(24) })
        }
        _ => Found::Damaged("its state is unknown"),
    }
}

/// Whether `name` is a file in a folder, and never a path out of it.
#[must_use]
pub fn is_plain_name(name: &OsStr) -> bool {
    let bytes = name.as_bytes();
    !bytes.is_empty()
        && bytes.len() <= NAME_MAX
        && bytes != b"."
        && bytes != b".."
        && !bytes.iter().any(|byte| matches!(byte, b'/' | 0))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn header(name: &str, length: u64) -> Header {
        Header { name: name.into(), length, checksum: 0x0123_4567_89ab_cdef }
    }

    fn block(header: &Header) -> Vec<u8> {
        let mut block = vec![0xee; BLOCK_BYTES];
        header.encode(&mut block);
        block
    }

    /// Changes bytes and corrects the block's own checksum.
    fn forged(at: usize, bytes: &[u8]) -> Vec<u8> {
        let mut block = block(&header("a", 5000));
        block[at..at + bytes.len()].copy_from_slice(bytes);
        let check = checksum(&block[..CHECK_AT]).to_le_bytes();
        block[CHECK_AT..].copy_from_slice(&check);
        block
    }

    #[test]
    fn round_trip() {
        for header in [header("a", 0), header(&"n".repeat(255), 4096 * 99)] {
            assert_eq!(decode(&block(&header), 100), Found::Whole(header));
        }
        let mut copying = vec![0; BLOCK_BYTES];
        Header::encode_copying(OsStr::new("a"), &mut copying);
        assert_eq!(decode(&copying, 100), Found::Copying("a".into()));
    }

    #[test]
    fn the_layout_is_as_documented() {
        let block = block(&header("abc", 0x1122));
        assert_eq!(&block[..8], b"RIOFILE\0");
        assert_eq!(&block[8..16], [1, 0, 0, 0, 2, 0, 0, 0]);
        assert_eq!(&block[16..24], [0x22, 0x11, 0, 0, 0, 0, 0, 0]);
        assert_eq!(&block[24..32], [0xef, 0xcd, 0xab, 0x89, 0x67, 0x45, 0x23, 0x01]);
        assert_eq!(&block[32..46], [1, 0, 0, 0, 0, 0, 0, 0, 3, 0, b'a', b'b', b'c', 0]);
        // CRC-64/NVME's published check value.
        assert_eq!(checksum(b"123456789"), 0xae8b_1486_0a79_9888);
    }

    #[test]
    fn every_flipped_bit_is_noticed() {
        let good = block(&header("report.pdf", 5000));
        for bit in 0..BLOCK_BYTES * 8 {
            let mut bad = good.clone();
            bad[bit / 8] ^= 1 << (bit % 8);
            let found = decode(&bad, 100);
            assert!(matches!(found, Found::Damaged(_) | Found::Foreign), "bit {bit}: {found:?}");
        }
    }

    #[test]
    fn other_blocks_are_not_taken_for_a_header() {
        assert_eq!(decode(&[0; BLOCK_BYTES], 100), Found::Blank);
        assert_eq!(decode(&[7; BLOCK_BYTES], 100), Found::Foreign);
        assert_eq!(decode(&forged(8, &[2]), 100), Found::Newer(2));
        assert!(matches!(decode(&forged(12, &[3]), 100), Found::Damaged(_)));
        assert!(matches!(decode(&block(&header("a", 4096 * 99 + 1)), 100), Found::Damaged(_)));
        assert!(matches!(decode(&block(&header("a", u64::MAX)), 100), Found::Damaged(_)));
        for name in ["", ".", "..", "/etc/passwd", "a/b", "a\0b"] {
            let found = decode(&block(&header(name, 1)), 100);
            assert!(matches!(found, Found::Damaged(_)), "{name:?}: {found:?}");
        }
        let long = forged(40, &256u16.to_le_bytes());
        assert!(matches!(decode(&long, 100), Found::Damaged(_)));
    }
}

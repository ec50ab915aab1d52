//! The format on the drives: the anchor, which marks a range of blocks as a log, and the header of
//! each block of records.
//!
//! ```text
//!           0       4          6       8        10         12       16           88          4096
//! header    | magic | version  | used  | first  | reserved | CRC32C | nine words | payload ... |
//! anchor    | magic | version  | 0     | 0      | 0        | CRC32C | log, start, blocks, 0 ... |
//! ```
//!
//! The nine words of a header: log, number, epoch, follows, Lsn, trim, oldest, checkpoint, settled.
//! All numbers are little endian. `docs/wal-format.md` has the tables.

use riopipe_order::probe::{Plant, is_bug_planted};

use crate::{BLOCK_BYTES, Crc32c, Lsn};

/// The format version that this code writes, and the only one that it reads.
pub const VERSION: u16 = 1;
/// Length of a block's header in bytes.
pub const HEADER_BYTES: usize = 88;
/// Bytes of records that a block can hold.
pub const PAYLOAD_BYTES: usize = BLOCK_BYTES - HEADER_BYTES;

const BLOCK_MAGIC: [u8; 4] = *b"RWLB";
const ANCHOR_MAGIC: [u8; 4] = *b"RWLA";
// Offsets in bytes. Headers and anchors begin with the same fields.
const VERSION_AT: usize = 4;
const USED_AT: usize = 6;
const FIRST_AT: usize = 8;
const CRC_AT: usize = 12;
/// Offset of the fields that are words of 64 bits, one after the other.
const WORDS_AT: usize = 16;
/// Number of bytes of an anchor that its checksum covers.
const ANCHOR_BYTES: usize = 48;
/// Largest valid number of a block, and largest valid Lsn. Real ones stay far below. Sums of
/// numbers up to this one do not overflow.
const LARGEST_NUMBER: u64 = u64::MAX / 4;
/// Value of `first` if no record begins in the block.
const NO_RECORD: u16 = u16::MAX;
/// Value of `checkpoint` if none was written.
const NO_CHECKPOINT: u64 = u64::MAX;

/// The first block of a log's range: it identifies the log and its blocks. It is written once, when
/// the log is created.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Anchor {
    /// A random number that distinguishes this log's blocks from all others.
    pub log: u64,
    /// The volume block of the anchor itself.
    pub start: u64,
    /// Length of the range in blocks, including the anchor.
    pub blocks: u64,
}

/// The header of a block of records.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Header {
    /// The log that the block belongs to ([`Anchor::log`]).
    pub log: u64,
    /// The block's number: the number of blocks of this log before it. Divided by the ring's
    /// length, the quotient is the block's lap, and the remainder is its place in the ring.
    pub number: u64,
    /// A random number of the opening that wrote the block.
    pub epoch: u64,
    /// The epoch of the block before it. If it differs from [`epoch`](Self::epoch), there was a
    /// crash between the two blocks. A record that is unfinished before this block then stays
    /// unfinished.
    pub follows: u64,
    /// The Lsn of the block's first byte.
    pub lsn: Lsn,
    /// Number of bytes of records in the block.
    pub used: u16,
    /// Offset of the first record that begins in the block, in bytes from the end of the header.
    pub first: Option<u16>,
    /// Records below this Lsn are no longer needed.
    pub trim: Lsn,
    /// The block that holds the byte [`trim`](Self::trim): older ones may be overwritten.
    pub oldest: u64,
    /// The last checkpoint that ends in this block or before it.
    pub checkpoint: Option<Lsn>,
    /// All blocks below this number were durable when this one was written.
    pub settled: u64,
}

/// The reason why a block does not belong to the log.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum BlockError {
    /// It is zero, or not a block of any log.
    #[error("it is not a block of a log")]
    Blank,
    /// It has another version of the format.
    #[error("it has version {0} of the log format; this program reads version {VERSION}")]
    Version(u16),
    /// Some of its bytes have changed since it was written.
    #[error("its checksum does not fit: it is torn or damaged")]
    Torn,
    /// It belongs to another log.
    #[error("it belongs to another log ({0:016x})")]
    Foreign(u64),
    /// Its checksum is right, but its fields contradict one another.
    #[error("its header contradicts itself")]
    Senseless,
}

impl Header {
    /// The Lsn of the byte after the block's last one.
    #[must_use]
    pub fn end(&self) -> Lsn {
        self.lsn.plus(self.used.into())
    }

    /// Whether this block directly follows `before` in the same log.
    #[must_use]
    pub fn comes_after(&self, before: &Self) -> bool {
        let continues = self.number == before.number + 1
            && self.follows == before.epoch
            && self.lsn == before.end();
        continues || is_bug_planted(Plant::W4OldLap) && self.number < before.number
    }

    /// Finishes a block whose records are in place already: writes the header before the records,
    /// zeroes the rest of the block, and adds the checksum.
    ///
    /// # Panics
    /// If `block` is not one block long, or `used` is more than it holds.
    pub fn seal(&self, block: &mut [u8], crc: Crc32c) {
        assert_eq!(block.len(), BLOCK_BYTES, "a block is sealed as a whole");
        let used = usize::from(self.used);
        let (header, payload) = block.split_at_mut(HEADER_BYTES);
        payload[used..].fill(0);
        header[..4].copy_from_slice(&BLOCK_MAGIC);
        put(header, VERSION_AT, &VERSION.to_le_bytes());
        put(header, USED_AT, &self.used.to_le_bytes());
        put(header, FIRST_AT, &self.first.unwrap_or(NO_RECORD).to_le_bytes());
        // The checksum is computed with zeroes in its place.
        header[FIRST_AT + 2..WORDS_AT].fill(0);
        let checkpoint = self.checkpoint.map_or(NO_CHECKPOINT, |lsn| lsn.0);
        let words = [
            self.log,
            self.number,
            self.epoch,
            self.follows,
            self.lsn.0,
            self.trim.0,
            self.oldest,
            checkpoint,
            self.settled,
        ];
        put_words(header, &words);
        let sum = crc(crc(0, header), &payload[..used]);
        put(header, CRC_AT, &sum.to_le_bytes());
    }

    /// Reads the header of a block of `log`, and checks the block.
    ///
    /// # Errors
    /// [`BlockError`].
    pub fn parse(block: &[u8], log: u64, crc: Crc32c) -> Result<Self, BlockError> {
        if block.len() != BLOCK_BYTES || block[..4] != BLOCK_MAGIC {
            return Err(BlockError::Blank);
        }
        let version = u16_at(block, VERSION_AT);
        if version != VERSION {
            return Err(BlockError::Version(version));
        }
        let used = u16_at(block, USED_AT);
        if usize::from(used) > PAYLOAD_BYTES {
            return Err(BlockError::Torn);
        }
        if !Self::has_valid_sum(block, used, crc) && !is_bug_planted(Plant::W6TornBlock) {
            return Err(BlockError::Torn);
        }
        let header = Self::decode(block);
        if header.log != log {
            return Err(BlockError::Foreign(header.log));
        }
        if header.is_sensible() { Ok(header) } else { Err(BlockError::Senseless) }
    }

    /// Whether the checksum of a block with `used` bytes of records is right.
    fn has_valid_sum(block: &[u8], used: u16, crc: Crc32c) -> bool {
        let mut header = [0; HEADER_BYTES];
        header.copy_from_slice(&block[..HEADER_BYTES]);
        put(&mut header, CRC_AT, &[0; 4]);
        let payload = &block[HEADER_BYTES..HEADER_BYTES + usize::from(used)];
        crc(crc(0, &header), payload) == u32_at(block, CRC_AT)
    }

    /// Reads the fields of a block's header, whatever they are.
    fn decode(block: &[u8]) -> Self {
        let first = u16_at(block, FIRST_AT);
        let checkpoint = word_at(block, 7);
        Self {
            log: word_at(block, 0),
            number: word_at(block, 1),
            epoch: word_at(block, 2),
            follows: word_at(block, 3),
            lsn: Lsn(word_at(block, 4)),
            used: u16_at(block, USED_AT),
            first: (first != NO_RECORD).then_some(first),
            trim: Lsn(word_at(block, 5)),
            oldest: word_at(block, 6),
            checkpoint: (checkpoint != NO_CHECKPOINT).then_some(Lsn(checkpoint)),
            settled: word_at(block, 8),
        }
    }

    /// Whether the fields do not contradict one another.
    fn is_sensible(&self) -> bool {
        self.lsn.0 <= LARGEST_NUMBER
            && self.number <= LARGEST_NUMBER
            && self.trim <= self.end()
            && self.first.is_none_or(|first| first < self.used)
            && self.oldest <= self.number
            && self.settled <= self.number
            && self.checkpoint.is_none_or(|lsn| lsn < self.end())
    }
}

impl Anchor {
    /// Writes the block of this anchor.
    ///
    /// # Panics
    /// If `block` is not one block long.
    pub fn seal(&self, block: &mut [u8], crc: Crc32c) {
        assert_eq!(block.len(), BLOCK_BYTES, "an anchor is a block");
        block.fill(0);
        block[..4].copy_from_slice(&ANCHOR_MAGIC);
        put(block, VERSION_AT, &VERSION.to_le_bytes());
        put_words(block, &[self.log, self.start, self.blocks]);
        let sum = crc(0, &block[..ANCHOR_BYTES]);
        put(block, CRC_AT, &sum.to_le_bytes());
    }

    /// Reads an anchor.
    ///
    /// # Errors
    /// [`BlockError`]; never [`Foreign`](BlockError::Foreign).
    pub fn parse(block: &[u8], crc: Crc32c) -> Result<Self, BlockError> {
        if block.len() != BLOCK_BYTES || block[..4] != ANCHOR_MAGIC {
            return Err(BlockError::Blank);
        }
        let version = u16_at(block, VERSION_AT);
        if version != VERSION {
            return Err(BlockError::Version(version));
        }
        let mut bytes = [0; ANCHOR_BYTES];
        bytes.copy_from_slice(&block[..ANCHOR_BYTES]);
        put(&mut bytes, CRC_AT, &[0; 4]);
        if crc(0, &bytes) != u32_at(block, CRC_AT) {
            return Err(BlockError::Torn);
        }
        Ok(Self { log: word_at(block, 0), start: word_at(block, 1), blocks: word_at(block, 2) })
    }
}

/// Writes the two blocks of a new log: its anchor, and block 0, which holds no record. By block 0,
/// every log has a block that marks its end.
///
/// # Panics
/// If `blocks` is not two blocks long.
pub fn begin(anchor: &Anchor, epoch: u64, crc: Crc32c, blocks: &mut [u8]) {
    let (anchor_block, block_0) = blocks.split_at_mut(BLOCK_BYTES);
    anchor.seal(anchor_block, crc);
    let header = Header {
        log: anchor.log,
        number: 0,
        epoch,
        follows: epoch,
        lsn: Lsn::ZERO,
        used: 0,
        first: None,
        trim: Lsn::ZERO,
        oldest: 0,
        checkpoint: None,
        settled: 0,
    };
    header.seal(block_0, crc);
}

/// Writes the words of a header or an anchor.
fn put_words(bytes: &mut [u8], words: &[u64]) {
    for (index, word) in words.iter().enumerate() {
        put(bytes, WORDS_AT + 8 * index, &word.to_le_bytes());
    }
}

/// Reads word number `index` of a header or an anchor.
fn word_at(bytes: &[u8], index: usize) -> u64 {
    u64_at(bytes, WORDS_AT + 8 * index)
}

fn put(bytes: &mut [u8], at: usize, value: &[u8]) {
    bytes[at..at + value.len()].copy_from_slice(value);
}

fn u16_at(bytes: &[u8], at: usize) -> u16 {
    u16::from_le_bytes([bytes[at], bytes[at + 1]])
}

pub(crate) fn u32_at(bytes: &[u8], at: usize) -> u32 {
    let mut value = [0; 4];
    value.copy_from_slice(&bytes[at..at + 4]);
    u32::from_le_bytes(value)
}

fn u64_at(bytes: &[u8], at: usize) -> u64 {
    let mut value = [0; 8];
    value.copy_from_slice(&bytes[at..at + 8]);
    u64::from_le_bytes(value)
}

#[cfg(test)]
mod tests {
    use super::*;
    use riopipe_nvme::digest::soft;

    fn header() -> Header {
        Header {
            log: 7,
            number: 130,
            epoch: 11,
            follows: 10,
            lsn: Lsn(5000),
            used: 40,
            first: Some(3),
            trim: Lsn(900),
            oldest: 70,
            checkpoint: Some(Lsn(4000)),
            settled: 128,
        }
    }

    fn sealed(header: &Header) -> [u8; BLOCK_BYTES] {
        let mut block = [0xaa; BLOCK_BYTES];
        header.seal(&mut block, soft);
        block
    }

    #[test]
    fn a_header_is_read_as_it_was_written() {
        let all = [header(), Header { first: None, checkpoint: None, used: 0, ..header() }];
        for header in all {
            let block = sealed(&header);
            assert_eq!(Header::parse(&block, 7, soft), Ok(header));
            let used = HEADER_BYTES + usize::from(header.used);
            assert!(block[used..].iter().all(|byte| *byte == 0), "old bytes are zeroed");
        }
    }

    #[test]
    fn every_flipped_bit_of_a_block_is_detected() {
        let block = sealed(&header());
        for bit in 0..(HEADER_BYTES + 40) * 8 {
            let mut torn = block;
            torn[bit / 8] ^= 1 << (bit % 8);
            assert!(Header::parse(&torn, 7, soft).is_err(), "bit {bit}");
        }
    }

    #[test]
    fn blank_foreign_and_contradictory_blocks_are_distinguished() {
        assert_eq!(Header::parse(&[0; BLOCK_BYTES], 7, soft), Err(BlockError::Blank));
        assert_eq!(Header::parse(&sealed(&header()), 8, soft), Err(BlockError::Foreign(7)));
        for senseless in [
            Header { trim: Lsn(5041), ..header() },
            Header { settled: 131, ..header() },
            Header { oldest: 131, ..header() },
            Header { first: Some(40), ..header() },
            Header { lsn: Lsn(u64::MAX), ..header() },
            Header { number: u64::MAX, ..header() },
            Header { checkpoint: Some(Lsn(5040)), ..header() },
        ] {
            let read = Header::parse(&sealed(&senseless), 7, soft);
            assert_eq!(read, Err(BlockError::Senseless), "{senseless:?}");
        }
    }

    #[test]
    fn an_anchor_is_read_as_written_and_every_flipped_bit_is_detected() {
        let anchor = Anchor { log: 7, start: 100, blocks: 64 };
        let mut block = [0xaa; BLOCK_BYTES];
        anchor.seal(&mut block, soft);
        assert_eq!(Anchor::parse(&block, soft), Ok(anchor));
        assert_eq!(Header::parse(&block, 7, soft), Err(BlockError::Blank));
        for bit in 0..ANCHOR_BYTES * 8 {
            let mut torn = block;
            torn[bit / 8] ^= 1 << (bit % 8);
            assert!(Anchor::parse(&torn, soft).is_err(), "bit {bit}");
        }
    }
}

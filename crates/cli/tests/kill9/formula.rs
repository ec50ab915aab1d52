//! The writes of group `n` of a stream, as a formula: the judge then needs no record of them but
//! the number of the last group that was begun.
//!
//! The area of a stream is a ring of blocks behind one header block. Group `n` writes the next one
//! to six blocks of the ring, in one write or two, as fresh ones; every seventh group also writes
//! the header in place.

/// Number of streams that write at the same time.
pub(crate) const STREAMS: u16 = 2;
/// Blocks of a stream's area, including the header block.
pub(crate) const AREA: u64 = 2048;
/// First block of the ring; block 0 of the area is the header, the rest is unused.
const RING: u64 = 8;
/// Largest payload of unreleased groups that a stream keeps, in bytes. With it, no block of the
/// ring is written again before its last write was released: that makes it fresh (T11).
pub(crate) const KEPT_BYTES: u64 = 2 << 20;
/// Length of a block in bytes.
pub(crate) const BLOCK: usize = 4096;

/// One write of a group.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Write {
    /// First block, from the start of the stream's area.
    pub(crate) block: u64,
    pub(crate) blocks: u64,
    pub(crate) in_place: bool,
}

/// Iterates over the groups of a stream, from the first on.
#[derive(Clone, Debug, Default)]
pub(crate) struct Walk {
    /// The last group that was returned.
    pub(crate) n: u64,
    /// The place of the next group in the ring.
    at: u64,
}

impl Walk {
    /// The state after group `n`.
    pub(crate) fn after(stream: u16, n: u64) -> Self {
        let mut walk = Self::default();
        let mut writes = Vec::new();
        while walk.n < n {
            walk.next(stream, &mut writes);
        }
        walk
    }

    /// The writes of the next group.
    pub(crate) fn next(&mut self, stream: u16, writes: &mut Vec<Write>) {
        self.n += 1;
        writes.clear();
        let dice = mix(self.n << 16 | u64::from(stream));
        for i in 0..1 + dice % 2 {
            let ring = AREA - RING;
            let blocks = (1 + (dice >> (8 * (i + 1))) % 3).min(ring - self.at);
            writes.push(Write { block: RING + self.at, blocks, in_place: false });
            self.at = (self.at + blocks) % ring;
        }
        if self.n.is_multiple_of(7) {
            writes.push(Write { block: 0, blocks: 1, in_place: true });
        }
    }

    /// Whether the next group is to be waited for until it is durable.
    pub(crate) fn durable(stream: u16, n: u64) -> bool {
        mix(n << 20 | u64::from(stream)).is_multiple_of(23)
    }
}

/// Fills a block with content that identifies its stream and its group, and shows whether it is
/// complete.
pub(crate) fn fill(stream: u16, n: u64, block: u64, into: &mut [u8]) {
    let mut state = mix(mix(n) ^ mix(block << 16 | u64::from(stream)));
    for (i, word) in into.chunks_exact_mut(8).enumerate() {
        let value = match i {
            0 => MAGIC,
            1 => u64::from(stream) << 48 | block,
            2 => n,
            _ => {
                state = state.wrapping_add(0x9e37_79b9_7f4a_7c15);
                state
            }
        };
        word.copy_from_slice(&value.to_le_bytes());
    }
}

/// The group of `stream` that wrote this block of its area; 0 for zeroes.
pub(crate) fn read(stream: u16, block: u64, bytes: &[u8]) -> Result<u64, &'static str> {
    if bytes.iter().all(|byte| *byte == 0) {
        return Ok(0);
    }
    let word = |i: usize| u64::from_le_bytes(bytes[8 * i..8 * i + 8].try_into().unwrap());
    if word(0) != MAGIC {
        return Err("bytes that no group wrote");
    }
    if word(1) != u64::from(stream) << 48 | block {
        return Err("the content of another block");
    }
    let mut whole = vec![0; bytes.len()];
    fill(stream, word(2), block, &mut whole);
    if whole == bytes { Ok(word(2)) } else { Err("half of one content and half of another") }
}

const MAGIC: u64 = u64::from_le_bytes(*b"ordeal\x00\x01");

fn mix(mut x: u64) -> u64 {
    x = (x ^ (x >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    x = (x ^ (x >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    x ^ (x >> 31)
}

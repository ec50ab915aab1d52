//! The ring: the blocks of the volume that a log uses, and their order.
//!
//! ```text
//! block numbers of the log:   … 18 19 | 20 21 22 … 39 | 40 41 …
//! places in a ring of 20:     … 18 19 |  0  1  2 … 19 |  0  1 …
//! ```

use crate::format::PAYLOAD_BYTES;
use crate::record::{FRAME_BYTES, LEN_MAX};

/// Smallest length of a ring in blocks.
pub const BLOCKS_MIN: u64 = 16;
/// Number of blocks reserved for groups that carry only a trim. Such a group frees other blocks.
pub(crate) const RESERVED_BLOCKS: u64 = 2;
/// Largest number of blocks that may be incomplete or not durable at a time: 16 MiB.
const WINDOW_BLOCKS_MAX: u64 = 4096;

/// Consecutive blocks of a volume that a log fills in laps. Block number `n` of the log has place
/// `n % blocks` in the ring.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Ring {
    start: u64,
    blocks: u64,
}

/// Consecutive blocks of a volume.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Extent {
    /// The first volume block.
    pub lba: u64,
    /// Number of blocks; may be 0.
    pub blocks: u64,
}

impl Ring {
    /// A ring of `blocks` blocks from the volume block `start` on; `None` if they are fewer than
    /// [`BLOCKS_MIN`], or more than the format allows.
    #[must_use]
    pub fn new(start: u64, blocks: u64) -> Option<Self> {
        let fits = blocks >= BLOCKS_MIN && start.checked_add(blocks).is_some();
        fits.then_some(Self { start, blocks })
    }

    /// Length of the ring in blocks.
    #[must_use]
    pub fn blocks(&self) -> u64 {
        self.blocks
    }

    /// The volume block of block `number`.
    #[must_use]
    pub fn lba(&self, number: u64) -> u64 {
        self.start + number % self.blocks
    }

    /// The volume blocks of the `count` blocks from `number` on, as two extents. The second is
    /// empty unless the blocks cross the ring's end.
    #[must_use]
    pub fn extents(&self, number: u64, count: u64) -> [Extent; 2] {
        let before_end = (self.blocks - number % self.blocks).min(count);
        [
            Extent { lba: self.lba(number), blocks: before_end },
            Extent { lba: self.start, blocks: count - before_end },
        ]
    }

    /// Largest number of blocks that may be incomplete or not durable at a time. Opening reads no
    /// further than this beyond the end of the log, so the number is part of the format.
    #[must_use]
    pub fn window(&self) -> u64 {
        (self.blocks / 4).min(WINDOW_BLOCKS_MAX)
    }

    /// Length of the longest record of this log in bytes: half the ring.
    #[must_use]
    pub fn record_bytes_max(&self) -> usize {
        let half_ring = (self.blocks / 2) * PAYLOAD_BYTES as u64 - FRAME_BYTES as u64;
        usize::try_from(half_ring).map_or(LEN_MAX, |half_ring| half_ring.min(LEN_MAX))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn blocks_wrap_around() {
        let ring = Ring::new(100, 20).unwrap();
        assert_eq!((ring.lba(0), ring.lba(19), ring.lba(20), ring.lba(45)), (100, 119, 100, 105));
        let extent = |lba, blocks| Extent { lba, blocks };
        assert_eq!(ring.extents(15, 5), [extent(115, 5), extent(100, 0)]);
        assert_eq!(ring.extents(38, 5), [extent(118, 2), extent(100, 3)]);
        assert_eq!(ring.window(), 5);
        assert_eq!(Ring::new(0, 15), None);
        assert_eq!(Ring::new(u64::MAX - 10, 16), None);
    }
}

//! The ring: which blocks of the volume a log uses, and in which order.

use crate::format::PAYLOAD_BYTES;
use crate::record::{FRAME_BYTES, LEN_MAX};

/// The fewest blocks that a ring works with.
pub const BLOCKS_MIN: u64 = 16;
/// Blocks that are kept back for the groups that make room again.
pub(crate) const RESERVE: u64 = 2;
/// The most blocks that may be under way, or not durable, at a time: 16 MiB.
const WINDOW_MAX: u64 = 4096;

/// Some consecutive blocks of a volume that a log fills round and round. Block number `n` of the log
/// lies at the `n % blocks`-th of them.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Ring {
    start: u64,
    blocks: u64,
}

impl Ring {
    /// A ring of `blocks` blocks from the volume block `start` on; `None` when they are fewer than
    /// [`BLOCKS_MIN`], or more than there can be.
    #[must_use]
    pub fn new(start: u64, blocks: u64) -> Option<Self> {
        let fits = blocks >= BLOCKS_MIN && start.checked_add(blocks).is_some();
        fits.then_some(Self { start, blocks })
    }

    /// Blocks of it.
    #[must_use]
    pub fn blocks(&self) -> u64 {
        self.blocks
    }

    /// Where block `number` lies on the volume.
    #[must_use]
    pub fn lba(&self, number: u64) -> u64 {
        self.start + number % self.blocks
    }

    /// Where `count` blocks from `number` on lie, as one or two pieces of the volume: volume block
    /// and blocks. The second has none unless they go round the ring's end.
    #[must_use]
    pub fn extents(&self, number: u64, count: u64) -> [(u64, u64); 2] {
        let before_end = (self.blocks - number % self.blocks).min(count);
        [(self.lba(number), before_end), (self.start, count - before_end)]
    }

    /// How many blocks may be under way, or not durable, at a time. Whoever opens the log looks no
    /// further than this beyond its end, so it is part of the format.
    #[must_use]
    pub fn window(&self) -> u64 {
        (self.blocks / 4).min(WINDOW_MAX)
    }

    /// The longest record that this log takes, in bytes: half the ring.
    #[must_use]
    pub fn record_bytes_max(&self) -> usize {
        let half = (self.blocks / 2) * PAYLOAD_BYTES as u64 - FRAME_BYTES as u64;
        usize::try_from(half).map_or(LEN_MAX, |half| half.min(LEN_MAX))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn blocks_go_round() {
        let ring = Ring::new(100, 20).unwrap();
        assert_eq!((ring.lba(0), ring.lba(19), ring.lba(20), ring.lba(45)), (100, 119, 100, 105));
        assert_eq!(ring.extents(15, 5), [(115, 5), (100, 0)]);
        assert_eq!(ring.extents(38, 5), [(118, 2), (100, 3)]);
        assert_eq!(ring.window(), 5);
        assert_eq!(Ring::new(0, 15), None);
        assert_eq!(Ring::new(u64::MAX - 10, 16), None);
    }
}

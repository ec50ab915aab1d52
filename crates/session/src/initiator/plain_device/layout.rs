//! The stream of each block, and the largest part of a request.

use riopipe_order::block_device::BLOCKS_MAX;

/// The least blocks of a range: 4 MiB. So few requests reach into two ranges, and a file system's data
/// still uses all streams.
const RANGE_BLOCKS_MIN: u64 = 1024;

/// The fixed function from blocks to streams. The device is cut into *ranges* of equal size. Range `n`
/// belongs to stream `n % streams`. A range has whole stripes, so a part never has fewer blocks of a
/// stripe unit than the volume itself would cut it into.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Layout {
    streams: usize,
    range_blocks: u64,
    part_blocks_max: u32,
}

/// Why there is no such layout.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum LayoutError {
    /// A device needs a stream.
    #[error("a device needs at least one stream")]
    NoStream,
    /// A stripe or a part has no blocks.
    #[error("a stripe and a part have at least one block")]
    Empty,
}

impl Layout {
    /// The layout for `streams` streams of a volume whose stripes have `stripe_blocks` blocks on all
    /// drives together, if a group takes a write of `part_blocks_max` blocks.
    ///
    /// # Errors
    /// One of them is 0.
    pub fn new(
        streams: usize,
        stripe_blocks: u64,
        part_blocks_max: u32,
    ) -> Result<Self, LayoutError> {
        if stripe_blocks == 0 {
            return Err(LayoutError::Empty);
        }
        let stripes = RANGE_BLOCKS_MIN.div_ceil(stripe_blocks);
        Self::with_ranges(streams, stripe_blocks.saturating_mul(stripes), part_blocks_max)
    }

    /// The layout with ranges of `range_blocks` blocks, also small ones: for a volume that has only some
    /// blocks, as in a simulation.
    ///
    /// # Errors
    /// One of the numbers is 0.
    pub fn with_ranges(
        streams: usize,
        range_blocks: u64,
        part_blocks_max: u32,
    ) -> Result<Self, LayoutError> {
        match (streams, range_blocks, part_blocks_max) {
            (0, _, _) => Err(LayoutError::NoStream),
            (_, 0, _) | (_, _, 0) => Err(LayoutError::Empty),
            _ => {
                let part_blocks_max = part_blocks_max.min(BLOCKS_MAX as u32);
                Ok(Self { streams, range_blocks, part_blocks_max })
            }
        }
    }

    /// The number of streams.
    #[must_use]
    pub const fn streams(&self) -> usize {
        self.streams
    }

    /// The blocks of a range.
    #[must_use]
    pub const fn range_blocks(&self) -> u64 {
        self.range_blocks
    }

    /// The most blocks of a part.
    #[must_use]
    pub const fn part_blocks_max(&self) -> u32 {
        self.part_blocks_max
    }

    /// The stream to which a block belongs.
    #[must_use]
    pub const fn stream_of(&self, lba: u64) -> usize {
        (lba / self.range_blocks % self.streams as u64) as usize
    }

    /// The blocks of the first part of a request for `blocks` blocks from `lba` on: at least 1, if the
    /// request has any.
    #[must_use]
    pub fn part_blocks(&self, lba: u64, blocks: u64) -> u32 {
        let in_range = self.range_blocks - lba % self.range_blocks;
        // Below 2³², because `part_blocks_max` is.
        blocks.min(in_range).min(u64::from(self.part_blocks_max)) as u32
    }
}

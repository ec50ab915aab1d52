//! The blocks that entries at the gate touch, as a counting filter. Its answer is "no entry touches
//! these blocks", or "check the list" (T12).

use alloc::vec;
use alloc::vec::Vec;

/// Entries up to this many blocks are counted block by block. While a larger entry is at the gate,
/// the answer is always "check the list".
const SMALL_BLOCKS: u64 = 32;

/// A counting filter: a block of a drive belongs to a cell, by its hash, and each cell counts the
/// entries that touch one of its blocks.
#[derive(Debug)]
pub(crate) struct Filter {
    cells: Vec<u32>,
    /// A hash of 64 bits, shifted right by this, is the index of a cell.
    shift: u32,
    /// How many entries of up to [`SMALL_BLOCKS`] blocks are counted.
    small: u32,
    /// How many larger entries there are.
    large: u32,
}

impl Filter {
    /// A filter for up to `entries` entries at once.
    pub(crate) fn new(entries: usize) -> Self {
        let cells = (entries * 16).next_power_of_two().clamp(1 << 10, 1 << 16);
        Self { cells: vec![0; cells], shift: 64 - cells.trailing_zeros(), small: 0, large: 0 }
    }

    /// Counts the blocks `lba..end` of a drive. Returns whether any of them *may* have been touched
    /// already.
    #[inline]
    pub(crate) fn add(&mut self, drive: u8, lba: u64, end: u64) -> bool {
        let mut hit = self.large > 0;
        if end - lba == 1 {
            let cell = self.cell(drive, lba);
            let count = &mut self.cells[cell];
            hit |= *count > 0;
            *count += 1;
            self.small += 1;
        } else if end - lba > SMALL_BLOCKS {
            hit |= self.small > 0;
            self.large += 1;
        } else {
            for block in lba..end {
                let cell = self.cell(drive, block);
                hit |= self.cells[cell] > 0;
                self.cells[cell] += 1;
            }
            self.small += 1;
        }
        hit
    }

    /// Takes back what [`add`](Self::add) counted for the same blocks.
    #[inline]
    pub(crate) fn remove(&mut self, drive: u8, lba: u64, end: u64) {
        if end - lba == 1 {
            let cell = self.cell(drive, lba);
            self.cells[cell] -= 1;
            self.small -= 1;
        } else if end - lba > SMALL_BLOCKS {
            self.large -= 1;
        } else {
            for block in lba..end {
                let cell = self.cell(drive, block);
                self.cells[cell] -= 1;
            }
            self.small -= 1;
        }
    }

    #[inline]
    fn cell(&self, drive: u8, block: u64) -> usize {
        // Fibonacci hashing: adjacent blocks get keys that are far apart.
        let key = block ^ u64::from(drive) << 56;
        (key.wrapping_mul(0x9e37_79b9_7f4a_7c15) >> self.shift) as usize
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn entries_that_have_left_leave_no_count() {
        let mut filter = Filter::new(4096);
        for blocks in [1, SMALL_BLOCKS, SMALL_BLOCKS + 1, 1000] {
            for time in 1..=3 {
                assert!(!filter.add(0, 100, 100 + blocks), "{blocks} blocks, time {time}");
                filter.remove(0, 100, 100 + blocks);
            }
        }
    }

    #[test]
    fn only_large_entries_make_others_check_the_list() {
        let mut filter = Filter::new(4096);
        assert!(!filter.add(0, 100, 100 + SMALL_BLOCKS));
        assert!(!filter.add(0, 900, 900 + SMALL_BLOCKS), "nothing is near");
        assert!(!filter.add(1, 100, 101), "another drive");
        assert!(filter.add(0, 5000, 5000 + SMALL_BLOCKS + 1), "a large one, and small ones there");
        assert!(filter.add(0, 9000, 9001), "and the other way round");
        filter.remove(0, 5000, 5000 + SMALL_BLOCKS + 1);
        assert!(!filter.add(0, 9500, 9501));
        assert!(filter.add(0, 131, 140), "the last block of the first");
    }
}

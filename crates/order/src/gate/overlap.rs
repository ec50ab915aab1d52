//! A fast check whether a write overlaps an entry at the gate.
//!
//! The check is a counting filter. Its answer is "no entry at the gate touches these blocks", or
//! "check the list of entries". A search of the list for every write would be slow.

use alloc::vec;
use alloc::vec::Vec;

/// The filter counts an entry of up to this many blocks block by block. While a larger entry is at
/// the gate, the answer is always "check the list".
const SMALL_BLOCKS: u64 = 32;
/// So many cells for each entry keep the filter sparse, so that most writes need no search.
const CELLS_PER_ENTRY: usize = 16;
/// The bounds of the number of cells. The largest filter takes 256 KiB.
const CELLS_MIN: usize = 1 << 10;
const CELLS_MAX: usize = 1 << 16;
/// The factor of Fibonacci hashing, 2⁶⁴ divided by the golden ratio: the hashes of adjacent blocks
/// are far apart.
const HASH_FACTOR: u64 = 0x9e37_79b9_7f4a_7c15;

/// A counting filter. The hash of a block decides to which cell the block belongs. Each cell counts
/// the entries that touch one of its blocks.
#[derive(Debug)]
pub(crate) struct Filter {
    /// The counts. The number of cells is a power of two.
    cells: Vec<u32>,
    /// A hash of 64 bits, shifted right by this number of bits, is the index of a cell.
    shift: u32,
    /// The number of entries of up to [`SMALL_BLOCKS`] blocks at the gate.
    small_count: u32,
    /// The number of larger entries at the gate.
    large_count: u32,
}

impl Filter {
    /// A filter for up to `entries_max` entries at once.
    pub(crate) fn new(entries_max: usize) -> Self {
        let wanted_cells = (entries_max * CELLS_PER_ENTRY).next_power_of_two();
        let cell_count = wanted_cells.clamp(CELLS_MIN, CELLS_MAX);
        let shift = u64::BITS - cell_count.trailing_zeros();
        Self { cells: vec![0; cell_count], shift, small_count: 0, large_count: 0 }
    }

    /// Counts an entry with the blocks `lba..end` of a drive. Returns whether an entry that was
    /// counted before *may* touch one of these blocks.
    #[inline]
    pub(crate) fn add(&mut self, drive: u8, lba: u64, end: u64) -> bool {
        let mut may_overlap = self.large_count > 0;
        if end - lba == 1 {
            let cell = self.cell_of(drive, lba);
            let count = &mut self.cells[cell];
            may_overlap |= *count > 0;
            *count += 1;
            self.small_count += 1;
        } else if end - lba > SMALL_BLOCKS {
            may_overlap |= self.small_count > 0;
            self.large_count += 1;
        } else {
            for block in lba..end {
                let cell = self.cell_of(drive, block);
                may_overlap |= self.cells[cell] > 0;
                self.cells[cell] += 1;
            }
            self.small_count += 1;
        }
        may_overlap
    }

    /// Whether an entry that was counted *may* touch one of the blocks `lba..end` of a drive.
    pub(crate) fn may_contain(&self, drive: u8, lba: u64, end: u64) -> bool {
        self.large_count > 0
            || end - lba > SMALL_BLOCKS && self.small_count > 0
            || (lba..end).any(|block| self.cells[self.cell_of(drive, block)] > 0)
    }

    /// Removes an entry that [`add`](Self::add) has counted with the same blocks.
    #[inline]
    pub(crate) fn remove(&mut self, drive: u8, lba: u64, end: u64) {
        if end - lba == 1 {
            let cell = self.cell_of(drive, lba);
            self.cells[cell] -= 1;
            self.small_count -= 1;
        } else if end - lba > SMALL_BLOCKS {
            self.large_count -= 1;
        } else {
            for block in lba..end {
                let cell = self.cell_of(drive, block);
                self.cells[cell] -= 1;
            }
            self.small_count -= 1;
        }
    }

    /// The index of the cell to which a block of a drive belongs.
    #[inline]
    fn cell_of(&self, drive: u8, block: u64) -> usize {
        let key = block ^ u64::from(drive) << 56;
        (key.wrapping_mul(HASH_FACTOR) >> self.shift) as usize
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

//! Which blocks are touched by entries at the gate: a counting filter that says "surely none" or
//! "look closely" (T12).

use alloc::vec;
use alloc::vec::Vec;

/// Entries up to this many blocks are counted block by block; larger ones make every look a close
/// one while they are there.
const SMALL_BLOCKS: u64 = 32;

/// Counts, per hash of (drive, block), the entries that touch it.
#[derive(Debug)]
pub(crate) struct Filter {
    cells: Vec<u32>,
    shift: u32,
    small: u32,
    large: u32,
}

impl Filter {
    /// A filter for up to `entries` entries at once.
    pub(crate) fn new(entries: usize) -> Self {
        let cells = (entries * 16).next_power_of_two().clamp(1 << 10, 1 << 16);
        Self { cells: vec![0; cells], shift: 64 - cells.trailing_zeros(), small: 0, large: 0 }
    }

    /// Counts the blocks `lba..end` of a drive, and says whether any of them *may* have been
    /// touched already.
    #[inline]
    pub(crate) fn add(&mut self, drive: u8, lba: u64, end: u64) -> bool {
        let mut hit = self.large > 0;
        if end - lba > SMALL_BLOCKS {
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
        if end - lba > SMALL_BLOCKS {
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
        // Fibonacci hashing: neighbouring blocks fall far apart.
        let key = block ^ u64::from(drive) << 56;
        (key.wrapping_mul(0x9e37_79b9_7f4a_7c15) >> self.shift) as usize
    }
}

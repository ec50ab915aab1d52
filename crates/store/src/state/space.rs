//! The free blocks of the data place.

use alloc::collections::BTreeMap;
use alloc::vec::Vec;

/// The free blocks, as runs. Adjacent runs are one.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Space {
    /// The length of each free run, by its first block.
    runs: BTreeMap<u64, u64>,
    /// Number of free blocks.
    free: u64,
}

impl Space {
    /// All of these blocks are free.
    pub(crate) fn new(first: u64, blocks: u64) -> Self {
        let runs = (blocks > 0).then_some((first, blocks)).into_iter().collect();
        Self { runs, free: blocks }
    }

    /// Number of free blocks.
    pub(crate) fn free(&self) -> u64 {
        self.free
    }

    /// Takes this many blocks: from the first run that holds them all, otherwise from several runs.
    /// `None`: there are fewer.
    pub(crate) fn allocate(&mut self, blocks: u64) -> Option<Vec<u64>> {
        if blocks > self.free {
            return None;
        }
        let mut taken = Vec::new();
        while (taken.len() as u64) < blocks {
            let missing = blocks - taken.len() as u64;
            let whole = self.runs.iter().find(|(_, len)| **len >= missing);
            let (first, len) = whole.or_else(|| self.runs.first_key_value())?;
            let (first, len) = (*first, *len);
            let count = len.min(missing);
            self.runs.remove(&first);
            if len > count {
                self.runs.insert(first + count, len - count);
            }
            self.free -= count;
            taken.extend(first..first + count);
        }
        Some(taken)
    }

    /// Takes this very block. False: it is not free.
    pub(crate) fn take(&mut self, lba: u64) -> bool {
        let Some((first, len)) = self.runs.range(..=lba).next_back() else { return false };
        let (first, end) = (*first, first + len);
        if lba >= end {
            return false;
        }
        self.runs.remove(&first);
        if first < lba {
            self.runs.insert(first, lba - first);
        }
        if lba + 1 < end {
            self.runs.insert(lba + 1, end - lba - 1);
        }
        self.free -= 1;
        true
    }

    /// Makes a block free that was taken.
    pub(crate) fn release(&mut self, lba: u64) {
        let (mut first, mut len) = (lba, 1);
        if let Some((before, before_len)) = self.runs.range(..lba).next_back()
            && before + before_len == lba
        {
            (first, len) = (*before, before_len + 1);
        }
        if let Some(after) = self.runs.remove(&(lba + 1)) {
            len += after;
        }
        self.runs.insert(first, len);
        self.free += 1;
    }
}

#[cfg(test)]
mod tests {
    use riopipe_testkit::Random;

    use super::*;

    #[test]
    fn no_block_is_taken_twice_and_free_runs_are_joined() {
        let mut random = Random(5);
        let mut space = Space::new(10, 200);
        let mut taken: Vec<u64> = Vec::new();
        for _ in 0..3000 {
            match random.below(3) {
                0 => {
                    let blocks = random.below(20);
                    match space.allocate(blocks) {
                        None => assert!(blocks > 200 - taken.len() as u64),
                        Some(new) => {
                            assert_eq!(new.len() as u64, blocks);
                            for lba in new {
                                assert!((10..210).contains(&lba) && !taken.contains(&lba));
                                taken.push(lba);
                            }
                        }
                    }
                }
                1 => {
                    let lba = random.below(230);
                    let is_free = (10..210).contains(&lba) && !taken.contains(&lba);
                    assert_eq!(space.take(lba), is_free);
                    if is_free {
                        taken.push(lba);
                    }
                }
                _ if taken.is_empty() => {}
                _ => {
                    let lba = taken.swap_remove(random.index(taken.len()));
                    space.release(lba);
                }
            }
            assert_eq!(space.free(), 200 - taken.len() as u64);
        }
        for lba in taken {
            space.release(lba);
        }
        assert_eq!(space, Space::new(10, 200));
    }
}

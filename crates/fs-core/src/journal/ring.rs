//! The ring of blocks that has the transactions.

/// The blocks of a journal from `first` up to `end`, as a ring. It has two blocks at least.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Ring {
    /// The first block.
    pub(super) first: u32,
    /// The block after the last one.
    pub(super) end: u32,
}

impl Ring {
    /// The number of blocks.
    pub(super) const fn len(self) -> u32 {
        self.end - self.first
    }

    /// Whether `at` is a block of the ring.
    pub(super) const fn contains(self, at: u32) -> bool {
        self.first <= at && at < self.end
    }

    /// The block after `at`.
    pub(super) const fn after(self, at: u32) -> u32 {
        if at + 1 >= self.end { self.first } else { at + 1 }
    }

    /// The number of blocks from `from` up to `to`; 0 if they are the same.
    pub(super) const fn distance(self, from: u32, to: u32) -> u32 {
        if to >= from { to - from } else { self.len() - (from - to) }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_ring_wraps() {
        let ring = Ring { first: 1, end: 5 };
        assert_eq!(ring.len(), 4);
        assert_eq!([1, 2, 3, 4].map(|at| ring.after(at)), [2, 3, 4, 1]);
        assert_eq!((ring.distance(2, 4), ring.distance(4, 2), ring.distance(3, 3)), (2, 2, 0));
        assert!(!ring.contains(0) && ring.contains(4) && !ring.contains(5));
    }
}

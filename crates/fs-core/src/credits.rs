//! The rights of operations to blocks of the running transaction.
//!
//! A transaction must fit into the log. An operation takes the right to as many blocks as it may
//! change before it begins, and what it did not change is free again when it ends.

use crate::sync::atomic::{AtomicUsize, Ordering};

/// The blocks to which the operations that run have the right.
#[derive(Debug, Default)]
pub(crate) struct Credits(AtomicUsize);

impl Credits {
    /// Takes the right to `blocks` more blocks. Whether it was taken: not if the log of `log` blocks
    /// had no space for it, for the `needed` blocks of the running transaction, and for all rights
    /// that were taken. The caller has the lock under which `needed` grows.
    pub(crate) fn take(&self, blocks: usize, needed: usize, log: usize) -> bool {
        let taken = self.0.load(Ordering::Acquire) + blocks;
        // The quarter that is left is for the inode tables, the descriptor blocks of the log and the
        // like.
        let fits = needed + taken <= log / 4 * 3;
        if fits {
            self.0.fetch_add(blocks, Ordering::AcqRel);
        }
        fits
    }

    /// Ends a right. The blocks that were changed with it count as needed by now.
    pub(crate) fn end(&self, blocks: usize) {
        self.0.fetch_sub(blocks, Ordering::AcqRel);
    }
}

#[cfg(all(test, not(feature = "shuttle")))]
mod tests {
    use alloc::vec::Vec;

    use super::Credits;

    /// Numbers below a bound, from a seed (xorshift).
    struct Random(u64);

    impl Random {
        fn below(&mut self, bound: usize) -> usize {
            self.0 ^= self.0 << 13;
            self.0 ^= self.0 >> 7;
            self.0 ^= self.0 << 17;
            (self.0 % bound as u64) as usize
        }
    }

    #[test]
    fn operations_that_run_at_once_never_need_more_than_the_log_has() {
        for seed in 1..200 {
            let mut random = Random(seed);
            let log = 256 + random.below(2000);
            let (credits, mut needed, mut running) = (Credits::default(), 0, Vec::new());
            let mut refused = 0;
            for _ in 0..2000 {
                let wanted = 1 + random.below(log / 4);
                if random.below(2) == 0 {
                    if credits.take(wanted, needed, log) {
                        running.push(wanted);
                    } else {
                        refused += 1;
                        if running.is_empty() {
                            // Its commit empties the running transaction.
                            needed = 0;
                        }
                    }
                } else if !running.is_empty() {
                    let right = running.swap_remove(random.below(running.len()));
                    // Most operations change less than they may, and some all.
                    needed += right - random.below(right + 1);
                    credits.end(right);
                }
                assert!(needed <= log / 4 * 3, "seed {seed}: {needed} blocks in a log of {log}");
            }
            assert!(refused > 0, "seed {seed}");
            running.iter().for_each(|&right| credits.end(right));
            assert!(credits.take(log / 4 * 3, 0, log), "seed {seed}: a right was not ended");
        }
    }
}

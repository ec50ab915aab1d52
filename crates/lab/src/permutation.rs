//! A random order of `0..n` in which every number occurs once per lap.
//!
//! Independent random places would sometimes repeat one that is still being written. The
//! measurement would then include the handling of overlaps (trap T12), in each run a different
//! amount of it. A permutation keeps two writes to one place `n` writes apart, without any memory.

/// A random permutation of `0..n`, computed, not stored. It consists of invertible steps on the
/// smallest power of two that holds `n`, repeated while the result is outside.
///
/// It takes two multiplications, since both sides of every ratio pay for it.
#[derive(Clone, Debug)]
pub(crate) struct Permutation {
    n: u64,
    mask: u64,
    /// Shift by which high bits affect low ones.
    shift: u32,
    /// Odd numbers: multiplication by one is invertible.
    factors: [u64; 2],
    offset: u64,
}

impl Permutation {
    /// # Panics
    /// If `n` is 0 or above 2⁶² (far beyond any drive).
    pub(crate) fn new(n: u64, seed: u64) -> Self {
        assert!((1..=1 << 62).contains(&n), "no permutation of {n} numbers");
        let bits = 64 - (n - 1).leading_zeros();
        let [first, second, offset] = [1, 2, 3].map(|word| mix(seed ^ mix(word)));
        Self {
            n,
            mask: (1 << bits) - 1,
            shift: bits.div_ceil(2).max(1),
            factors: [first | 1, second | 1],
            offset,
        }
    }

    /// The image of `i` (below `n`).
    #[inline]
    pub(crate) fn at(&self, i: u64) -> u64 {
        debug_assert!(i < self.n);
        let Self { n, mask, shift, factors: [first, second], offset } = *self;
        let mut x = i;
        // The domain has less than 2 n numbers, so on average fewer than two steps are needed. The
        // loop ends, since the permutation's cycle through `i` returns to `i`, which is inside.
        loop {
            x = x.wrapping_add(offset).wrapping_mul(first) & mask;
            x ^= x >> shift;
            x = x.wrapping_mul(second) & mask;
            x ^= x >> shift;
            if x < n {
                return x;
            }
        }
    }
}

/// The finisher of SplitMix64: every bit of the result depends on every bit of `x`.
pub(crate) const fn mix(x: u64) -> u64 {
    let mut z = x.wrapping_add(0x9e37_79b9_7f4a_7c15);
    z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    z ^ (z >> 31)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn meets_every_number_once() {
        for n in [1, 2, 3, 4, 5, 16, 17, 255, 256, 257, 10_000] {
            for seed in 0..4 {
                let walk = Permutation::new(n, seed);
                let mut seen = vec![false; n as usize];
                for i in 0..n {
                    let at = walk.at(i) as usize;
                    assert!(!seen[at], "{at} twice among {n}");
                    seen[at] = true;
                }
            }
        }
    }

    #[test]
    fn stays_within_the_largest_too() {
        for n in [1 << 62, (1 << 61) + 1, (1 << 40) - 1] {
            for seed in 0..8 {
                let walk = Permutation::new(n, seed);
                let mut places: Vec<_> = (n - 1000..n).map(|i| walk.at(i)).collect();
                assert!(places.iter().all(|at| *at < n));
                places.sort_unstable();
                places.dedup();
                assert_eq!(places.len(), 1000, "{n}, {seed}");
            }
        }
    }

    #[test]
    fn is_not_in_order_and_differs_by_seed() {
        let walk = |seed| {
            let walk = Permutation::new(1000, seed);
            (0..1000).map(|i| walk.at(i)).collect::<Vec<_>>()
        };
        let one = walk(1);
        let ascents = one.windows(2).filter(|w| w[0] < w[1]).count();
        // Half of the steps go up; ±150 is about 16 standard deviations.
        assert!((350..650).contains(&ascents), "{ascents}");
        assert_ne!(one, walk(2));
        assert_eq!(one, walk(1));
    }
}

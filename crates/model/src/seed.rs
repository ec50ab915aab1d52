//! Random choices that follow from a seed: they are the same on every machine.

/// SplitMix64 (Steele, Lea, Flood: "Fast splittable pseudorandom number generators", 2014).
#[derive(Debug, Clone)]
pub struct Seed(u64);

impl Seed {
    /// The sequence of `seed`.
    #[must_use]
    pub const fn new(seed: u64) -> Seed {
        Seed(seed)
    }

    /// 64 random bits.
    #[inline]
    pub fn next_u64(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut bits = self.0;
        bits = (bits ^ (bits >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        bits = (bits ^ (bits >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        bits ^ (bits >> 31)
    }

    /// A number below `bound`; `bound` is at least 1.
    #[inline]
    pub fn below(&mut self, bound: u64) -> u64 {
        // The upper half of the product is the random fraction of `bound`.
        ((u128::from(self.next_u64()) * u128::from(bound)) >> 64) as u64
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn frozen() {
        // The generator's published first outputs for seed 0. A change would make all recorded
        // seeds worthless.
        let mut seed = Seed::new(0);
        assert_eq!(seed.next_u64(), 0xe220_a839_7b1d_cdaf);
        assert_eq!(seed.next_u64(), 0x6e78_9e6a_a1b9_65f4);
        assert!((0..1000).all(|_| seed.below(3) < 3));
    }
}

//! Random numbers from a seed: the same on every machine, in every version.

/// A generator of random numbers (xoshiro256**, seeded by splitmix64).
#[derive(Clone, Debug)]
pub struct Rng([u64; 4]);

impl Rng {
    /// A generator whose whole sequence follows from `seed`.
    #[must_use]
    pub fn new(seed: u64) -> Self {
        let mut state = seed;
        Self(core::array::from_fn(|_| {
            state = state.wrapping_add(0x9e37_79b9_7f4a_7c15);
            let mut z = state;
            z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
            z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
            z ^ (z >> 31)
        }))
    }

    /// Another generator that shares nothing with this one, named by `salt`.
    #[must_use]
    pub fn fork(&mut self, salt: u64) -> Self {
        Self::new(self.u64() ^ salt.wrapping_mul(0x9e37_79b9_7f4a_7c15))
    }

    /// 64 random bits.
    pub fn u64(&mut self) -> u64 {
        let s = &mut self.0;
        let result = s[1].wrapping_mul(5).rotate_left(7).wrapping_mul(9);
        let t = s[1] << 17;
        s[2] ^= s[0];
        s[3] ^= s[1];
        s[1] ^= s[2];
        s[0] ^= s[3];
        s[2] ^= t;
        s[3] = s[3].rotate_left(45);
        result
    }

    /// A number below `n`; 0 if `n` is 0.
    pub fn below(&mut self, n: u64) -> u64 {
        ((u128::from(self.u64()) * u128::from(n)) >> 64) as u64
    }

    /// A number from `from` to `to`, both included.
    pub fn range(&mut self, from: u64, to: u64) -> u64 {
        from + self.below(to - from + 1)
    }

    /// An index below `len`.
    pub fn index(&mut self, len: usize) -> usize {
        self.below(len as u64) as usize
    }

    /// True in `percent` of 100 cases.
    pub fn percent(&mut self, percent: u64) -> bool {
        self.below(100) < percent
    }

    /// True in one of `n` cases.
    pub fn one_in(&mut self, n: u64) -> bool {
        self.below(n) == 0
    }

    /// One of `of`.
    pub fn pick<'a, T>(&mut self, of: &'a [T]) -> &'a T {
        &of[self.index(of.len())]
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_generator_is_the_published_one_and_stays_in_bounds() {
        // xoshiro256** with the state 1, 2, 3, 4 begins with these numbers.
        let mut rng = Rng([1, 2, 3, 4]);
        assert_eq!([rng.u64(), rng.u64(), rng.u64()], [11520, 0, 1_509_978_240]);
        let mut seen = [false; 7];
        for _ in 0..1000 {
            seen[rng.index(7)] = true;
            assert!((3..=5).contains(&rng.range(3, 5)));
        }
        assert_eq!(seen, [true; 7]);
        assert_eq!(rng.below(0), 0);
    }
}

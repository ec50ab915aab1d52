//! The choice of the writes that are traced.

use super::ONE_IN;

/// Counts writes, and chooses those that are traced: one in [`ONE_IN`], on average. Each interval
/// is random, so that writes of a periodic program are not always sampled at the same phase.
#[derive(Debug)]
pub(crate) struct Sampler {
    /// The number of writes so far.
    write_count: u64,
    /// The number of the write that must be traced next.
    next_traced: u64,
    /// The state of the random number generator, which is never 0.
    random_state: u64,
}

impl Sampler {
    /// A sampler that has counted no writes. Samplers with different seeds choose different writes.
    pub(crate) fn new(seed: u64) -> Self {
        // An odd number is never 0.
        let random_state = seed.wrapping_mul(2).wrapping_add(1);
        let mut sampler = Self { write_count: 0, next_traced: 0, random_state };
        sampler.choose_next();
        sampler
    }

    /// Counts one more write. Returns whether it is due to be traced. All later writes are due,
    /// too, until the caller traces one and calls [`choose_next`](Self::choose_next).
    #[inline]
    pub(crate) fn is_due(&mut self) -> bool {
        self.write_count += 1;
        self.write_count >= self.next_traced
    }

    /// Chooses the next write to be traced, 1 to 2 × [`ONE_IN`] − 1 writes after the last one.
    pub(crate) fn choose_next(&mut self) {
        // Marsaglia's xorshift generator.
        self.random_state ^= self.random_state << 13;
        self.random_state ^= self.random_state >> 7;
        self.random_state ^= self.random_state << 17;
        // The upper half of the state, scaled to the range of the interval.
        let skipped = ((self.random_state >> 32) * (2 * ONE_IN - 1)) >> 32;
        self.next_traced = self.write_count + 1 + skipped;
    }

    /// The number of writes so far.
    pub(crate) const fn write_count(&self) -> u64 {
        self.write_count
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn one_in_256_is_sampled_and_at_changing_intervals() {
        for seed in [0, 1, 0x1234_5678_9abc_def0, u64::MAX] {
            let mut sampler = Sampler::new(seed);
            let (mut taken, mut odd, mut last) = (0u64, 0u64, 0);
            const WRITES: u64 = 1 << 20;
            for write in 1..=WRITES {
                if sampler.is_due() {
                    sampler.choose_next();
                    taken += 1;
                    odd += write & 1;
                    assert!(write - last < 2 * ONE_IN, "{seed}");
                    last = write;
                }
            }
            let due = WRITES / ONE_IN;
            assert!(taken.abs_diff(due) < due / 20, "{seed}: {taken} of {due}");
            // Writes and marks may alternate: both are sampled.
            assert!(odd.abs_diff(taken / 2) < taken / 10, "{seed}: {odd} of {taken}");
            assert_eq!(sampler.write_count(), WRITES);
        }
    }

    #[test]
    fn a_due_sample_stays_due() {
        let mut sampler = Sampler::new(3);
        while !sampler.is_due() {}
        assert!(sampler.is_due());
        sampler.choose_next();
        let until = (1..).find(|_| sampler.is_due());
        assert!(until.is_some_and(|writes| writes < 2 * ONE_IN));
    }
}

//! The choice of the writes that are traced.

use super::ONE_IN;

/// Counts writes, and reports when one must be traced. Each interval is drawn anew, so that writes
/// of a periodic program are not always sampled at the same phase.
#[derive(Debug)]
pub(crate) struct Sampler {
    /// How many writes were counted.
    seen: u64,
    /// The number of the write that must be traced next.
    next: u64,
    /// The state of the generator, which is never 0.
    state: u64,
}

impl Sampler {
    /// `seed` makes the choices of samplers that begin together differ.
    pub(crate) fn new(seed: u64) -> Self {
        let mut sampler = Self { seen: 0, next: 0, state: seed.wrapping_mul(2).wrapping_add(1) };
        sampler.taken();
        sampler
    }

    /// Counts one more write. Returns whether it must be traced; all later writes must be, too,
    /// until one was [`taken`](Self::taken).
    #[inline]
    pub(crate) fn is_due(&mut self) -> bool {
        self.seen += 1;
        self.seen >= self.next
    }

    /// The write is traced: the next one comes after 1 to 2 × [`ONE_IN`] − 1 writes.
    pub(crate) fn taken(&mut self) {
        // Marsaglia's xorshift; its upper half, scaled.
        self.state ^= self.state << 13;
        self.state ^= self.state >> 7;
        self.state ^= self.state << 17;
        let draw = ((self.state >> 32) * (2 * ONE_IN - 1)) >> 32;
        self.next = self.seen + 1 + draw;
    }

    /// The number of writes so far.
    pub(crate) const fn seen(&self) -> u64 {
        self.seen
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
                    sampler.taken();
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
            assert_eq!(sampler.seen(), WRITES);
        }
    }

    #[test]
    fn a_due_sample_stays_due() {
        let mut sampler = Sampler::new(3);
        while !sampler.is_due() {}
        assert!(sampler.is_due());
        sampler.taken();
        let until = (1..).find(|_| sampler.is_due());
        assert!(until.is_some_and(|writes| writes < 2 * ONE_IN));
    }
}

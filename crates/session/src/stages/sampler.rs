//! The choice of the writes that are traced.

use super::ONE_IN;

/// Writes at the beginning of a stream that are traced anyway. Then the intervals grow with the
/// number of writes, up to [`ONE_IN`].
const FIRST: u64 = 32;
/// Nanoseconds in a second.
const NS_PER_S: u64 = 1_000_000_000;

/// Counts writes, and chooses those that are traced: one in [`ONE_IN`], on average, and more of the
/// first writes of a stream and of a stream with few writes in a second. Each interval is random,
/// so that writes of a periodic program are not always sampled at the same phase.
#[derive(Debug)]
pub(crate) struct Sampler {
    /// The number of writes so far.
    write_count: u64,
    /// The number of the write that must be traced next.
    next_traced: u64,
    /// The number of the write that was traced last.
    last_traced: u64,
    /// The time of that write, ns.
    last_traced_at: u64,
    /// The state of the random number generator, which is never 0.
    random_state: u64,
}

impl Sampler {
    /// A sampler that has counted no writes. Samplers with different seeds choose different writes.
    pub(crate) fn new(seed: u64) -> Self {
        // An odd number is never 0.
        let random_state = seed.wrapping_mul(2).wrapping_add(1);
        Self { write_count: 0, next_traced: 1, last_traced: 0, last_traced_at: 0, random_state }
    }

    /// Counts one more write. Returns whether it is due to be traced. All later writes are due,
    /// too, until the caller traces one and calls [`choose_next`](Self::choose_next).
    #[inline]
    pub(crate) fn is_due(&mut self) -> bool {
        self.write_count += 1;
        self.write_count >= self.next_traced
    }

    /// Notes that the last write is traced at `now`, ns, and chooses the next one, 1 to 2 ×
    /// [`ONE_IN`] − 1 writes later.
    ///
    /// The mean of the interval is at most the number of writes in a second, as far as the time
    /// since the last traced one shows. So a slow stream is traced about once a second.
    pub(crate) fn choose_next(&mut self, now: u64) {
        let writes = self.write_count - self.last_traced;
        let elapsed = now.saturating_sub(self.last_traced_at);
        let per_second = writes.saturating_mul(NS_PER_S).checked_div(elapsed).unwrap_or(ONE_IN);
        let mean = ONE_IN.min(self.write_count / FIRST).min(per_second).max(1);
        self.last_traced = self.write_count;
        self.last_traced_at = now;
        // Marsaglia's xorshift generator.
        self.random_state ^= self.random_state << 13;
        self.random_state ^= self.random_state >> 7;
        self.random_state ^= self.random_state << 17;
        // The upper half of the state, scaled to the range of the interval.
        let skipped = ((self.random_state >> 32) * (2 * mean - 1)) >> 32;
        self.next_traced = self.write_count + 1 + skipped;
    }

    /// The number of writes so far.
    pub(crate) const fn write_count(&self) -> u64 {
        self.write_count
    }
}

#[cfg(test)]
mod tests {
    use std::vec::Vec;

    use super::*;

    /// A stream with a write every `interval`, ns; returns the numbers of the traced writes.
    fn traced(seed: u64, writes: u64, interval: u64) -> Vec<u64> {
        let mut sampler = Sampler::new(seed);
        let traced = (1..=writes).filter(|write| {
            let is_due = sampler.is_due();
            if is_due {
                sampler.choose_next(write * interval);
            }
            is_due
        });
        let traced = traced.collect();
        assert_eq!(sampler.write_count(), writes);
        traced
    }

    #[test]
    fn one_in_256_is_sampled_and_at_changing_intervals() {
        for seed in [0, 1, 0x1234_5678_9abc_def0, u64::MAX] {
            const WRITES: u64 = 1 << 20;
            // 100,000 writes in a second.
            let traced = traced(seed, WRITES, 10_000);
            let (taken, odd) = (traced.len() as u64, traced.iter().map(|write| write & 1).sum());
            assert!(traced.windows(2).all(|pair| pair[1] - pair[0] < 2 * ONE_IN), "{seed}");
            let due = WRITES / ONE_IN;
            assert!(taken.abs_diff(due) < due / 8, "{seed}: {taken} of {due}");
            // Writes and marks may alternate: both are sampled.
            let half: u64 = taken / 2;
            assert!(half.abs_diff(odd) < taken / 10, "{seed}: {odd} of {taken}");
        }
    }

    #[test]
    fn the_first_writes_of_a_stream_are_traced() {
        for seed in [0, 7, u64::MAX] {
            let traced = traced(seed, 10_000, 1_000);
            let first: Vec<u64> = (1..=2 * FIRST).collect();
            assert_eq!(traced[..first.len()], first, "{seed}");
            assert!((150..300).contains(&traced.len()), "{seed}: {}", traced.len());
        }
    }

    #[test]
    fn a_slow_stream_is_traced_about_once_a_second() {
        for per_second in [1, 10, 100] {
            // An hour, after a burst that has ended the time of small intervals.
            let writes = 3600 * per_second;
            let mut sampler = Sampler::new(3);
            let mut now = 0;
            for _ in 0..100_000 {
                now += 1_000;
                if sampler.is_due() {
                    sampler.choose_next(now);
                }
            }
            let mut traced = 0;
            for _ in 0..writes {
                now += NS_PER_S / per_second;
                if sampler.is_due() {
                    sampler.choose_next(now);
                    traced += 1;
                }
            }
            // At the end of the burst the next interval is a long one.
            let due = (writes - 2 * ONE_IN.min(writes / 4)) / per_second;
            assert!(traced > due / 2 && traced < 3600 * 2, "{per_second}: {traced} of {due}");
        }
    }

    #[test]
    fn a_due_sample_stays_due() {
        let mut sampler = Sampler::new(3);
        while !sampler.is_due() {}
        assert!(sampler.is_due());
        sampler.choose_next(0);
        let until = (1..).find(|_| sampler.is_due());
        assert!(until.is_some_and(|writes| writes < 2 * ONE_IN));
    }
}

//! Histograms of times that several threads may write and read at once.
//!
//! The buckets are those of HdrHistogram: each power of two is divided into the same number of
//! buckets of equal width, and the lowest values have a bucket each. With 4 buckets for each power
//! of two:
//!
//! ```text
//! values:   0  1  2  3 | 4  5  6  7 | 8-9  10-11  12-13  14-15 | 16-19 …
//! buckets:  0  1  2  3 | 4  5  6  7 |  8     9     10     11   |  12   …
//! ```

use alloc::vec::Vec;
use core::fmt;
use core::sync::atomic::{AtomicU64, Ordering::Relaxed};

/// The number of buckets for each power of two: the error of a value is at most one part in 32.
const BUCKETS_PER_POWER: usize = 32;
/// The number of bits that choose the bucket within a power of two.
const BUCKET_BITS: u32 = BUCKETS_PER_POWER.trailing_zeros();
/// Values from this one on, about 137 s, share the last bucket.
const LAST_BUCKET_NS: u64 = (1 << 37) - 1;
const BUCKET_COUNT: usize = bucket_of(LAST_BUCKET_NS) + 1;

/// The bucket of a value that is at most [`LAST_BUCKET_NS`].
const fn bucket_of(ns: u64) -> usize {
    if ns < BUCKETS_PER_POWER as u64 {
        return ns as usize;
    }
    // A bucket here covers 2^shift values. The highest bits of the value are its number in its
    // power of two, with a leading 1.
    let shift = ns.ilog2() - BUCKET_BITS;
    let in_power = (ns >> shift) as usize - BUCKETS_PER_POWER;
    (shift as usize + 1) * BUCKETS_PER_POWER + in_power
}

/// The highest value of a bucket, ns.
const fn highest_in(bucket: usize) -> u64 {
    if bucket < BUCKETS_PER_POWER {
        return bucket as u64;
    }
    let shift = bucket / BUCKETS_PER_POWER - 1;
    let in_power = bucket % BUCKETS_PER_POWER;
    let next_bucket_start = ((BUCKETS_PER_POWER + in_power) as u64 + 1) << shift;
    next_bucket_start - 1
}

/// A histogram of times, with an error of at most 3 %. It takes 8 KiB, however many times it
/// counts. To record a time takes three atomic operations, which is too slow for every write:
/// record samples.
pub struct Histogram {
    /// The number of recorded times in each bucket.
    counts: [AtomicU64; BUCKET_COUNT],
    /// The sum of all recorded times, ns.
    sum_ns: AtomicU64,
    /// The longest recorded time, ns.
    max_ns: AtomicU64,
}

impl Histogram {
    /// An empty histogram.
    #[must_use]
    pub const fn new() -> Self {
        Self {
            counts: [const { AtomicU64::new(0) }; BUCKET_COUNT],
            sum_ns: AtomicU64::new(0),
            max_ns: AtomicU64::new(0),
        }
    }

    /// Records one time, ns.
    pub fn record(&self, ns: u64) {
        self.counts[bucket_of(ns.min(LAST_BUCKET_NS))].fetch_add(1, Relaxed);
        self.sum_ns.fetch_add(ns, Relaxed);
        self.max_ns.fetch_max(ns, Relaxed);
    }

    /// The distribution of all values so far.
    #[must_use]
    pub fn snapshot(&self) -> Distribution {
        Distribution {
            counts: self.counts.iter().map(|count| count.load(Relaxed)).collect(),
            sum_ns: self.sum_ns.load(Relaxed),
            max_ns: self.max_ns.load(Relaxed),
        }
    }
}

impl Default for Histogram {
    fn default() -> Self {
        Self::new()
    }
}

impl fmt::Debug for Histogram {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Histogram").field("max", &self.max_ns).finish_non_exhaustive()
    }
}

/// The distribution of the times that a histogram has counted by some moment.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Distribution {
    /// The number of times in each bucket.
    counts: Vec<u64>,
    sum_ns: u64,
    max_ns: u64,
}

impl Default for Distribution {
    fn default() -> Self {
        Self { counts: alloc::vec![0; BUCKET_COUNT], sum_ns: 0, max_ns: 0 }
    }
}

impl Distribution {
    /// The number of times.
    #[must_use]
    pub fn count(&self) -> u64 {
        self.counts.iter().sum()
    }

    /// The sum of all times, ns.
    #[must_use]
    pub const fn sum(&self) -> u64 {
        self.sum_ns
    }

    /// The longest time, ns.
    #[must_use]
    pub const fn max(&self) -> u64 {
        self.max_ns
    }

    /// The time, ns, that `per_million` of a million times do not exceed: 990,000 gives the 99th
    /// percentile. 0 if the distribution is empty.
    #[must_use]
    pub fn quantile(&self, per_million: u64) -> u64 {
        let rank = (u128::from(self.count()) * u128::from(per_million)).div_ceil(1_000_000) as u64;
        let mut counted = 0;
        for (bucket, count) in self.counts.iter().enumerate() {
            counted += count;
            if *count > 0 && counted >= rank {
                return highest_in(bucket).min(self.max_ns);
            }
        }
        0
    }

    /// The number of times shorter than `ns`; exact where `ns` is a power of two.
    #[must_use]
    pub fn below(&self, ns: u64) -> u64 {
        self.counts[..bucket_of(ns.min(LAST_BUCKET_NS))].iter().sum()
    }

    /// The buckets that are not empty: the highest value of each, ns, and the number of its values.
    pub fn filled(&self) -> impl Iterator<Item = (u64, u64)> + '_ {
        let all = self.counts.iter().enumerate();
        all.map(|(bucket, count)| (highest_in(bucket), *count)).filter(|(_, count)| *count > 0)
    }

    /// The distribution with these results of [`filled`](Self::filled), [`sum`](Self::sum) and
    /// [`max`](Self::max).
    #[must_use]
    pub fn from_filled(filled: &[(u64, u64)], sum: u64, max: u64) -> Self {
        let mut distribution = Self { sum_ns: sum, max_ns: max, ..Self::default() };
        for (ns, added) in filled {
            let count = &mut distribution.counts[bucket_of((*ns).min(LAST_BUCKET_NS))];
            *count = count.saturating_add(*added);
        }
        distribution
    }

    /// Adds the times of another distribution.
    pub fn add(&mut self, other: &Self) {
        for (count, added) in self.counts.iter_mut().zip(&other.counts) {
            *count += added;
        }
        self.sum_ns += other.sum_ns;
        self.max_ns = self.max_ns.max(other.max_ns);
    }

    /// The times that were recorded after the distribution was `before`. Of the longest one only
    /// the bucket is known.
    #[must_use]
    pub fn since(&self, before: &Self) -> Self {
        let both = self.counts.iter().zip(&before.counts);
        let counts: Vec<u64> = both.map(|(now, then)| now.saturating_sub(*then)).collect();
        let max_ns = match counts.iter().rposition(|count| *count > 0) {
            Some(bucket) => highest_in(bucket).min(self.max_ns),
            None => 0,
        };
        Self { counts, sum_ns: self.sum_ns.saturating_sub(before.sum_ns), max_ns }
    }
}

#[cfg(test)]
mod tests {
    use std::vec::Vec;

    use super::*;

    #[test]
    fn buckets_follow_one_another_and_are_narrow() {
        let mut last = 0;
        for at in 0..BUCKET_COUNT {
            let top = highest_in(at);
            assert_eq!(bucket_of(top), at);
            assert_eq!(bucket_of((top + 1).min(LAST_BUCKET_NS)), (at + 1).min(BUCKET_COUNT - 1));
            let low = if at == 0 { 0 } else { last + 1 };
            assert!((top - low) * BUCKETS_PER_POWER as u64 <= low.max(1), "{low}..={top}");
            last = top;
        }
        assert_eq!(last, LAST_BUCKET_NS);
    }

    /// The results of `Distribution`, by sorting.
    fn naive(sorted: &[u64], in_a_million: u64) -> u64 {
        let rank = (sorted.len() as u64 * in_a_million).div_ceil(1_000_000).max(1);
        sorted[rank as usize - 1]
    }

    #[test]
    fn quantiles_are_those_of_the_sorted_list_to_three_percent() {
        let mut state = 7u64;
        let mut values: Vec<u64> = (0..5_000)
            .map(|_| {
                state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1);
                1 << (state >> 59) | state >> 44
            })
            .collect();
        let histogram = Histogram::new();
        values.iter().for_each(|value| histogram.record(*value));
        values.sort_unstable();
        let seen = histogram.snapshot();
        assert_eq!((seen.count(), seen.max()), (5_000, values[4_999]));
        assert_eq!(seen.sum(), values.iter().sum::<u64>());
        for q in [0, 1, 250_000, 500_000, 990_000, 999_000, 1_000_000] {
            let (is, should) = (seen.quantile(q), naive(&values, q));
            assert!(
                is >= should && is - should <= should / BUCKETS_PER_POWER as u64,
                "{q}: {is}, {should}"
            );
        }
        for power in 0..37 {
            let short = values.iter().filter(|value| **value < 1 << power).count();
            assert_eq!(seen.below(1 << power), short as u64, "{power}");
        }
    }

    #[test]
    fn an_empty_histogram_counts_nothing() {
        let none = Histogram::new().snapshot();
        assert_eq!((none.count(), none.quantile(500_000), none.filled().count()), (0, 0, 0));
        assert_eq!(none, Distribution::default());
    }

    #[test]
    fn a_time_beyond_the_limit_counts_as_the_longest() {
        let histogram = Histogram::new();
        histogram.record(u64::MAX / 2);
        assert_eq!(histogram.snapshot().quantile(1), LAST_BUCKET_NS);
    }

    #[test]
    fn a_snapshot_survives_a_report_and_leaves_later_samples() {
        let histogram = Histogram::new();
        [3, 70_000, 70_000].into_iter().for_each(|ns| histogram.record(ns));
        let before = histogram.snapshot();
        let filled: Vec<_> = before.filled().collect();
        assert_eq!(Distribution::from_filled(&filled, before.sum(), before.max()), before);
        histogram.record(1_000);
        let since = histogram.snapshot().since(&before);
        assert_eq!((since.count(), since.sum()), (1, 1_000));
        assert!((1_000..1_032).contains(&since.max()));
        assert_eq!(before.since(&before), Distribution::default());
        let mut both = before.clone();
        both.add(&since);
        assert_eq!((both.count(), both.sum()), (4, 141_003));
        assert_eq!(both.max(), before.max());
    }
}

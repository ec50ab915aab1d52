//! Histograms of times that several threads may write and read at once.

use alloc::vec::Vec;
use core::fmt;
use core::sync::atomic::{AtomicU64, Ordering::Relaxed};

/// The number of buckets for each power of two: the error of a value is at most one part in 32.
const STEPS: usize = 32;
const STEP_BITS: u32 = STEPS.trailing_zeros();
/// Values from here on, about 137 s, share one bucket.
const HIGHEST: u64 = (1 << 37) - 1;
const BUCKETS: usize = bucket(HIGHEST) + 1;

/// The bucket of a value: each power of two has [`STEPS`] of them.
const fn bucket(ns: u64) -> usize {
    if ns < STEPS as u64 {
        return ns as usize;
    }
    let shift = ns.ilog2() - STEP_BITS;
    (shift as usize + 1) * STEPS + (ns >> shift) as usize - STEPS
}

/// The highest value of a bucket, ns.
const fn highest(bucket: usize) -> u64 {
    if bucket < STEPS {
        return bucket as u64;
    }
    let shift = bucket / STEPS - 1;
    (((STEPS + bucket % STEPS) as u64 + 1) << shift) - 1
}

/// The number of times in each bucket, to 3 %: 8 KiB, never more. Recording is three atomic
/// additions, so it is for samples, not for every write.
pub struct Histogram {
    buckets: [AtomicU64; BUCKETS],
    sum: AtomicU64,
    max: AtomicU64,
}

impl Histogram {
    /// An empty histogram.
    #[must_use]
    pub const fn new() -> Self {
        Self {
            buckets: [const { AtomicU64::new(0) }; BUCKETS],
            sum: AtomicU64::new(0),
            max: AtomicU64::new(0),
        }
    }

    /// Records one time, ns.
    pub fn record(&self, ns: u64) {
        self.buckets[bucket(ns.min(HIGHEST))].fetch_add(1, Relaxed);
        self.sum.fetch_add(ns, Relaxed);
        self.max.fetch_max(ns, Relaxed);
    }

    /// The distribution of all values so far.
    #[must_use]
    pub fn snapshot(&self) -> Distribution {
        Distribution {
            buckets: self.buckets.iter().map(|count| count.load(Relaxed)).collect(),
            sum: self.sum.load(Relaxed),
            max: self.max.load(Relaxed),
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
        f.debug_struct("Histogram").field("max", &self.max).finish_non_exhaustive()
    }
}

/// The distribution of times at some moment.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Distribution {
    buckets: Vec<u64>,
    sum: u64,
    max: u64,
}

impl Default for Distribution {
    fn default() -> Self {
        Self { buckets: alloc::vec![0; BUCKETS], sum: 0, max: 0 }
    }
}

impl Distribution {
    /// The number of times.
    #[must_use]
    pub fn count(&self) -> u64 {
        self.buckets.iter().sum()
    }

    /// The sum of all times, ns.
    #[must_use]
    pub const fn sum(&self) -> u64 {
        self.sum
    }

    /// The longest time, ns.
    #[must_use]
    pub const fn max(&self) -> u64 {
        self.max
    }

    /// The time, ns, that `in_a_million` of a million times do not exceed; 0 if the histogram is
    /// empty.
    #[must_use]
    pub fn quantile(&self, in_a_million: u64) -> u64 {
        let rank = (u128::from(self.count()) * u128::from(in_a_million)).div_ceil(1_000_000) as u64;
        let mut seen = 0;
        for (at, count) in self.buckets.iter().enumerate() {
            seen += count;
            if *count > 0 && seen >= rank {
                return highest(at).min(self.max);
            }
        }
        0
    }

    /// The number of times shorter than `ns`; exact where `ns` is a power of two.
    #[must_use]
    pub fn below(&self, ns: u64) -> u64 {
        self.buckets[..bucket(ns.min(HIGHEST))].iter().sum()
    }

    /// The buckets that are not empty: the highest value of each, ns, and the number of its values.
    pub fn filled(&self) -> impl Iterator<Item = (u64, u64)> + '_ {
        let all = self.buckets.iter().enumerate().map(|(at, count)| (highest(at), *count));
        all.filter(|(_, count)| *count > 0)
    }

    /// The histogram with these results of [`filled`](Self::filled), [`sum`](Self::sum) and
    /// [`max`](Self::max).
    #[must_use]
    pub fn from_filled(filled: &[(u64, u64)], sum: u64, max: u64) -> Self {
        let mut all = Self { sum, max, ..Self::default() };
        for (ns, count) in filled {
            let bucket = &mut all.buckets[bucket((*ns).min(HIGHEST))];
            *bucket = bucket.saturating_add(*count);
        }
        all
    }

    /// Adds the values of another histogram.
    pub fn add(&mut self, other: &Self) {
        for (count, more) in self.buckets.iter_mut().zip(&other.buckets) {
            *count += more;
        }
        self.sum += other.sum;
        self.max = self.max.max(other.max);
    }

    /// The values since the histogram was `before`. Of the longest one only the bucket is known.
    #[must_use]
    pub fn since(&self, before: &Self) -> Self {
        let buckets = self.buckets.iter().zip(&before.buckets);
        let buckets: Vec<u64> = buckets.map(|(now, then)| now.saturating_sub(*then)).collect();
        let max = match buckets.iter().rposition(|count| *count > 0) {
            Some(at) => highest(at).min(self.max),
            None => 0,
        };
        Self { buckets, sum: self.sum.saturating_sub(before.sum), max }
    }
}

#[cfg(test)]
mod tests {
    use std::vec::Vec;

    use super::*;

    #[test]
    fn buckets_follow_one_another_and_are_narrow() {
        let mut last = 0;
        for at in 0..BUCKETS {
            let top = highest(at);
            assert_eq!(bucket(top), at);
            assert_eq!(bucket((top + 1).min(HIGHEST)), (at + 1).min(BUCKETS - 1));
            let low = if at == 0 { 0 } else { last + 1 };
            assert!((top - low) * STEPS as u64 <= low.max(1), "{low}..={top}");
            last = top;
        }
        assert_eq!(last, HIGHEST);
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
            assert!(is >= should && is - should <= should / STEPS as u64, "{q}: {is}, {should}");
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
        assert_eq!(histogram.snapshot().quantile(1), HIGHEST);
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

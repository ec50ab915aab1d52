//! Medians and ratios with confidence intervals, without assumptions about the noise.
//!
//! There are few rounds, and their noise is skewed: another program makes a run slower, never
//! faster. So means and standard deviations mislead. Here a figure is a median, and its interval is
//! between two of the measured values, chosen by the binomial distribution: with any distribution,
//! each measured value is above the true median with probability ½.
//!
//! A ratio of two contenders is computed for each round; the figure is the median of these. A
//! disturbance of a whole round affects both sides of its ratio.

use serde::{Deserialize, Serialize};

/// The intended confidence.
pub const CONFIDENCE: f64 = 0.95;

/// A median with its interval.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
pub struct Estimate {
    /// The median of the measured values.
    pub value: f64,
    /// Lower end of the interval, a measured value.
    pub low: f64,
    /// Upper end of the interval, a measured value.
    pub high: f64,
    /// The probability that the interval holds the true median: at least 0.95 from six values on.
    /// With fewer it is that of the smallest and the largest value (0.9375 with five, 0.5 with two,
    /// 0 with one).
    pub confidence: f64,
    /// Number of measured values.
    pub n: usize,
}

impl Estimate {
    /// The estimate from measured values, in any order. `None` if there are none, or if one is not
    /// a number.
    #[must_use]
    pub fn of(values: &[f64]) -> Option<Self> {
        if values.is_empty() || values.iter().any(|v| v.is_nan()) {
            return None;
        }
        let mut sorted = values.to_vec();
        sorted.sort_by(f64::total_cmp);
        let n = sorted.len();
        let (below, confidence) = interval(n);
        Some(Self {
            value: f64::midpoint(sorted[(n - 1) / 2], sorted[n / 2]),
            low: sorted[below],
            high: sorted[n - 1 - below],
            confidence,
            n,
        })
    }

    /// The ratio of two contenders that were measured in the same rounds, in round order. `None` if
    /// the numbers of rounds differ, there are none, or a divisor is zero.
    #[must_use]
    pub fn of_ratio(over: &[f64], under: &[f64]) -> Option<Self> {
        if over.len() != under.len() || under.contains(&0.0) {
            return None;
        }
        let ratios: Vec<f64> = over.iter().zip(under).map(|(a, b)| a / b).collect();
        Self::of(&ratios)
    }

    /// Half of the interval's width as a share of the value: 0.02 reads "± 2 %".
    #[must_use]
    pub fn relative_error(&self) -> f64 {
        if self.value == 0.0 {
            return 0.0;
        }
        (self.high - self.low) / 2.0 / self.value
    }
}

/// The number of values to drop at each end so that the rest still covers the median with
/// [`CONFIDENCE`], and the resulting confidence.
///
/// The interval from the (d+1)-th smallest to the (d+1)-th largest of n values misses the median
/// only if at most d of n values are on one side: 2 · P(Binomial(n, ½) ≤ d).
fn interval(n: usize) -> (usize, f64) {
    // P(Binomial(n, ½) = 0) would underflow at n > 1074; so large samples are computed by their
    // share.
    let n_small = n.min(1000);
    let mut probability = 0.5f64.powi(n_small as i32);
    let mut tail = probability;
    let mut best = (0, (1.0 - 2.0 * tail).max(0.0));
    for dropped in 1..n_small.div_ceil(2) {
        probability *= (n_small - dropped + 1) as f64 / dropped as f64;
        tail += probability;
        let confidence = 1.0 - 2.0 * tail;
        if confidence < CONFIDENCE {
            break;
        }
        best = (dropped, confidence);
    }
    // Beyond 1000 values the same share is dropped: the interval is slightly wide, never narrow.
    (best.0 * n / n_small, best.1)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::permutation::mix;

    #[test]
    fn medians() {
        assert_eq!(Estimate::of(&[]), None);
        assert_eq!(Estimate::of(&[1.0, f64::NAN]), None);
        let one = Estimate::of(&[3.0]).unwrap();
        assert_eq!((one.value, one.low, one.high, one.confidence), (3.0, 3.0, 3.0, 0.0));
        assert_eq!(Estimate::of(&[4.0, 1.0]).unwrap().value, 2.5);
        assert_eq!(Estimate::of(&[9.0, 1.0, 2.0]).unwrap().value, 2.0);
    }

    #[test]
    fn intervals_as_in_the_tables() {
        // The usual table of distribution-free 95 % intervals of the median: ranks 1–6 of 6,
        // 1–7 of 7, 1–8 of 8, 2–8 of 9, 2–9 of 10, 6–15 of 20.
        for (n, dropped) in [(6, 0), (7, 0), (8, 0), (9, 1), (10, 1), (20, 5), (25, 7), (50, 17)] {
            assert_eq!(interval(n).0, dropped, "{n} values");
            assert!(interval(n).1 >= CONFIDENCE);
        }
        assert_eq!(interval(5), (0, 0.9375));
        assert_eq!(interval(2), (0, 0.5));
        let (dropped, _) = interval(4000);
        assert!((1800..2000).contains(&dropped), "{dropped}");
    }

    #[test]
    fn an_interval_covers_the_median_with_its_confidence() {
        // A skewed distribution with median 1: the exponential's inverse, scaled. Of 1000
        // experiments with 9 values each, 96.1 % of the intervals should contain 1.
        let uniform = |i: u64| (mix(i) >> 11) as f64 / (1u64 << 53) as f64;
        let covered = (0..1000)
            .filter(|experiment| {
                let values: Vec<f64> =
                    (0..9).map(|i| -(1.0 - uniform(experiment * 9 + i)).log2()).collect();
                let estimate = Estimate::of(&values).unwrap();
                estimate.low <= 1.0 && 1.0 <= estimate.high
            })
            .count();
        assert!((940..=980).contains(&covered), "{covered} of 1000");
    }

    #[test]
    fn a_ratio_is_taken_within_rounds() {
        // The machine becomes ten times slower after the first round; the ratio stays the same.
        let over = [100.0, 10.0, 10.0];
        let under = [200.0, 20.0, 20.0];
        let ratio = Estimate::of_ratio(&over, &under).unwrap();
        assert_eq!((ratio.value, ratio.low, ratio.high), (0.5, 0.5, 0.5));
        assert_eq!(ratio.relative_error(), 0.0);
        // The median of ratios, not the ratio of medians (30 / 90).
        let ratio = Estimate::of_ratio(&[10.0, 200.0, 30.0], &[20.0, 100.0, 90.0]).unwrap();
        assert_eq!((ratio.value, ratio.high), (0.5, 2.0));
        assert_eq!(Estimate::of_ratio(&over, &[1.0]), None);
        assert_eq!(Estimate::of_ratio(&[1.0], &[0.0]), None);
    }
}

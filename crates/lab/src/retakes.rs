//! The repetition of runs that the host has disturbed, within bounds: a measurement must also end
//! on a host that is always busy.

use crate::steal::{Reading, Stolen};

/// Largest number of tries for one run.
const TRIES: u32 = 3;

/// Number of repetitions that are always allowed.
const MORE_MIN: u64 = 2;

/// The number of runs that may still be repeated.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Retakes {
    left: u64,
}

/// The host's effect on a run.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Disturbance {
    /// Share of the machine's time that the host took during the kept run, 0 to 1, if it is known.
    pub stole: Option<f64>,
    /// Number of tries that were discarded for the kept one.
    pub set_aside: u32,
}

impl Retakes {
    /// Default number of additional runs, in percent of the planned ones.
    pub const PERCENT: u64 = 40;

    /// A budget for `planned` runs: `percent` more of them (rounded up), but at least two.
    #[must_use]
    pub fn new(planned: u64, percent: u64) -> Self {
        Self { left: planned.saturating_mul(percent).div_ceil(100).max(MORE_MIN) }
    }

    /// Runs, and repeats while the host disturbs the run. Returns the try that lost least.
    ///
    /// # Errors
    /// The first error of `run` ends it, even if an earlier try was good.
    pub fn take<T, E>(
        &mut self,
        mut run: impl FnMut() -> Result<T, E>,
    ) -> Result<(T, Disturbance), E> {
        self.least_disturbed(|| {
            let before = Reading::now();
            let result = run()?;
            Ok((result, Reading::now().since(&before)))
        })
    }

    /// As [`take`](Self::take), with the lost time of each try given by `run`; if it is not known,
    /// nothing is discarded.
    fn least_disturbed<T, E>(
        &mut self,
        mut run: impl FnMut() -> Result<(T, Option<Stolen>), E>,
    ) -> Result<(T, Disturbance), E> {
        let (mut kept, mut lost) = run()?;
        let mut set_aside = 0;
        while disturbs(lost) && set_aside + 1 < TRIES && self.left > 0 {
            self.left -= 1;
            set_aside += 1;
            let (next, next_lost) = run()?;
            if !disturbs(next_lost) || share(next_lost) < share(lost) {
                (kept, lost) = (next, next_lost);
            }
        }
        Ok((kept, Disturbance { stole: share(lost), set_aside }))
    }
}

fn disturbs(lost: Option<Stolen>) -> bool {
    lost.is_some_and(|lost| lost.disturbs())
}

fn share(lost: Option<Stolen>) -> Option<f64> {
    lost.map(|lost| lost.share)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::steal::TICK_NS;

    /// Runs with tries that lose these shares in order (the last one repeats); returns the index of
    /// the kept try, and its disturbance.
    fn take(retakes: &mut Retakes, shares: &[f64]) -> (usize, Disturbance) {
        let mut tries = 0;
        let result = retakes.least_disturbed::<_, ()>(|| {
            let share = shares[tries.min(shares.len() - 1)];
            tries += 1;
            Ok((tries, Some(Stolen { ns: 100 * TICK_NS, share })))
        });
        let (kept, disturbance) = result.unwrap();
        assert_eq!(disturbance.set_aside as usize + 1, tries, "every other try was set aside");
        (kept, disturbance)
    }

    #[test]
    fn two_in_five_more_rounded_up_but_two_at_least() {
        for (planned, more) in [(0, 2), (1, 2), (5, 2), (6, 3), (96, 39), (100, 40)] {
            assert_eq!(Retakes::new(planned, Retakes::PERCENT).left, more, "{planned}");
        }
        assert_eq!(Retakes::new(96, 25).left, 24);
    }

    #[test]
    fn a_quiet_run_is_kept_at_once() {
        let mut retakes = Retakes { left: 10 };
        let (kept, disturbance) = take(&mut retakes, &[0.01]);
        assert_eq!((kept, disturbance), (1, Disturbance { stole: Some(0.01), set_aside: 0 }));
        assert_eq!(retakes.left, 10);
    }

    #[test]
    fn a_disturbed_run_is_taken_until_it_is_quiet() {
        let mut retakes = Retakes { left: 10 };
        let (kept, disturbance) = take(&mut retakes, &[0.3, 0.0]);
        assert_eq!((kept, disturbance), (2, Disturbance { stole: Some(0.0), set_aside: 1 }));
        assert_eq!(retakes.left, 9);
    }

    #[test]
    fn of_three_disturbed_tries_the_best_is_kept() {
        for (shares, best) in
            [([0.1, 0.2, 0.3], 1), ([0.3, 0.1, 0.2], 2), ([0.3, 0.2, 0.1], 3), ([0.1; 3], 1)]
        {
            let mut retakes = Retakes { left: 10 };
            let (kept, disturbance) = take(&mut retakes, &shares);
            assert_eq!(kept, best, "{shares:?}");
            assert_eq!(disturbance, Disturbance { stole: Some(0.1), set_aside: 2 });
            assert_eq!(retakes.left, 8);
        }
    }

    #[test]
    fn with_the_budget_spent_the_best_so_far_is_kept() {
        let mut retakes = Retakes { left: 3 };
        assert_eq!(take(&mut retakes, &[0.5, 0.4, 0.3]).0, 3);
        assert_eq!(take(&mut retakes, &[0.5, 0.6, 0.0]).0, 1, "the budget had no third try");
        for _ in 0..5 {
            let (kept, disturbance) = take(&mut retakes, &[0.5, 0.0]);
            assert_eq!((kept, disturbance), (1, Disturbance { stole: Some(0.5), set_aside: 0 }));
        }
    }

    #[test]
    fn an_always_busy_host_uses_up_the_budget() {
        let mut retakes = Retakes::new(20, Retakes::PERCENT);
        let tries: u32 = (0..20).map(|_| 1 + take(&mut retakes, &[0.3]).1.set_aside).sum();
        assert_eq!(tries, 28);
    }

    #[test]
    fn without_a_counter_nothing_is_discarded() {
        let mut retakes = Retakes { left: 10 };
        let mut tries = 0;
        let result = retakes.least_disturbed::<_, ()>(|| {
            tries += 1;
            Ok((tries, None))
        });
        assert_eq!(result, Ok((1, Disturbance::default())));
        assert_eq!((tries, retakes.left), (1, 10));
    }

    /// One tick of any share is no disturbance, so this try wins over a disturbed one.
    #[test]
    fn an_undisturbed_try_is_kept_with_any_share() {
        let mut tries = [(20, 0.03), (1, 0.05)].into_iter();
        let result = Retakes { left: 10 }.least_disturbed::<_, ()>(|| {
            let (ticks, share) = tries.next().unwrap();
            Ok((ticks, Some(Stolen { ns: ticks * TICK_NS, share })))
        });
        assert_eq!(result, Ok((1, Disturbance { stole: Some(0.05), set_aside: 1 })));
    }

    /// As an interruption does.
    #[test]
    fn an_error_ends_it_at_once() {
        let mut tries = 0;
        let result = Retakes { left: 10 }.least_disturbed::<(), _>(|| {
            tries += 1;
            match tries {
                1 => Ok(((), Some(Stolen { ns: 100 * TICK_NS, share: 0.5 }))),
                _ => Err("interrupted"),
            }
        });
        assert_eq!((result, tries), (Err("interrupted"), 2));
    }

    #[test]
    fn runs_are_measured_with_the_real_counter() {
        let mut runs = 0;
        let result = Retakes { left: 2 }.take::<_, ()>(|| {
            runs += 1;
            std::thread::sleep(std::time::Duration::from_millis(1));
            Ok(())
        });
        let ((), disturbance) = result.unwrap();
        // The result depends on the host; all tries are counted in any case.
        assert_eq!(disturbance.set_aside + 1, runs);
        assert!(disturbance.stole.is_none_or(|share| (0.0..=1.0).contains(&share)));
    }
}

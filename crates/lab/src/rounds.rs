//! Interleaved rounds: every contender once per round, in a different order each round.

/// The samples of all contenders, in round order.
#[derive(Clone, Debug)]
pub struct Rounds<S> {
    names: Vec<String>,
    samples: Vec<Vec<S>>,
}

impl<S> Rounds<S> {
    /// Runs `rounds` rounds over `contenders`; `run` gets the contender's index and the round.
    ///
    /// Each round starts with another contender, and every second one goes backwards. So no
    /// contender always runs first (on a cool machine), or always after the same one (with its
    /// caches and its TCP state).
    ///
    /// # Errors
    /// The first error of `run` ends it.
    pub fn run<E>(
        contenders: &[&str],
        rounds: usize,
        mut run: impl FnMut(usize, usize) -> Result<S, E>,
    ) -> Result<Self, E> {
        let mut samples: Vec<Vec<S>> = contenders.iter().map(|_| Vec::new()).collect();
        for round in 0..rounds {
            for index in order(contenders.len(), round) {
                samples[index].push(run(index, round)?);
            }
        }
        Ok(Self { names: contenders.iter().map(|&name| name.to_owned()).collect(), samples })
    }

    /// The contenders' names and samples, in the order given.
    pub fn iter(&self) -> impl Iterator<Item = (&str, &[S])> {
        self.names
            .iter()
            .zip(&self.samples)
            .map(|(name, samples)| (name.as_str(), samples.as_slice()))
    }

    /// One contender's samples, in round order.
    #[must_use]
    pub fn samples(&self, name: &str) -> Option<&[S]> {
        let index = self.names.iter().position(|n| n == name)?;
        Some(&self.samples[index])
    }

    /// One figure of one contender's samples, in round order; empty for an unknown name.
    #[must_use]
    pub fn values(&self, name: &str, figure: impl Fn(&S) -> f64) -> Vec<f64> {
        self.samples(name).unwrap_or_default().iter().map(figure).collect()
    }
}

/// The order of `n` contenders in a round: rotated by the round, backwards in every second one.
fn order(n: usize, round: usize) -> impl Iterator<Item = usize> {
    (0..n).map(move |i| {
        let i = if round.is_multiple_of(2) { i } else { n - 1 - i };
        (i + round / 2) % n
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_contender_once_per_round_and_every_place_over_the_rounds() {
        for n in 1..6 {
            let rounds: Vec<Vec<_>> = (0..2 * n).map(|r| order(n, r).collect()).collect();
            for round in &rounds {
                let mut sorted = round.clone();
                sorted.sort_unstable();
                assert_eq!(sorted, (0..n).collect::<Vec<_>>());
            }
            for place in 0..n {
                for contender in 0..n {
                    let times = rounds.iter().filter(|r| r[place] == contender).count();
                    assert_eq!(times, 2, "contender {contender} of {n} at place {place}");
                }
            }
        }
    }

    #[test]
    fn samples_are_kept_by_contender_in_round_order() {
        let mut calls = Vec::new();
        let rounds = Rounds::run::<()>(&["a", "b"], 3, |index, round| {
            calls.push((index, round));
            Ok(10 * index + round)
        })
        .unwrap();
        assert_eq!(calls, [(0, 0), (1, 0), (1, 1), (0, 1), (1, 2), (0, 2)]);
        assert_eq!(rounds.samples("a"), Some(&[0, 1, 2][..]));
        assert_eq!(rounds.values("b", |&s| s as f64), [10.0, 11.0, 12.0]);
        assert_eq!(rounds.samples("c"), None);
        assert_eq!(rounds.iter().count(), 2);
    }

    #[test]
    fn an_error_ends_it() {
        let result =
            Rounds::run(&["a", "b"], 3, |_, round| if round == 1 { Err("gone") } else { Ok(()) });
        assert_eq!(result.unwrap_err(), "gone");
    }
}

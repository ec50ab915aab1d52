//! Makes a failing scenario smaller while it still fails in the same way.

use crate::scenario::{Op, Scenario, What};

/// Runs that one shrinking may take.
const RUNS_MAX: u32 = 800;

struct Shrinker<'a> {
    best: Scenario,
    fails: &'a mut dyn FnMut(&Scenario) -> bool,
    left: u32,
}

/// A scenario as small as could be found that still `fails`.
#[must_use]
pub fn shrink(scenario: &Scenario, fails: &mut dyn FnMut(&Scenario) -> bool) -> Scenario {
    let mut shrinker = Shrinker { best: scenario.clone(), fails, left: RUNS_MAX };
    loop {
        let before = shrinker.best.clone();
        shrinker.faults();
        shrinker.steps();
        shrinker.details();
        if shrinker.best == before || shrinker.left == 0 {
            return shrinker.best;
        }
    }
}

impl Shrinker<'_> {
    /// Takes a smaller scenario if it still fails.
    fn take(&mut self, candidate: Scenario) -> bool {
        if self.left == 0 || candidate == self.best {
            return false;
        }
        self.left -= 1;
        let fails = (self.fails)(&candidate);
        if fails {
            self.best = candidate;
        }
        fails
    }

    fn faults(&mut self) {
        let mut at = 0;
        while at < self.best.faults.len() {
            let mut fewer = self.best.clone();
            fewer.faults.remove(at);
            if !self.take(fewer) {
                at += 1;
            }
        }
    }

    /// Drops runs of steps, the longest first.
    fn steps(&mut self) {
        let mut len = self.best.steps.len().next_power_of_two() / 2;
        while len > 0 {
            let mut at = 0;
            while at < self.best.steps.len() {
                let mut fewer = self.best.clone();
                let end = (at + len).min(fewer.steps.len());
                fewer.steps.drain(at..end);
                if !self.take(fewer) {
                    at += len;
                }
            }
            len /= 2;
        }
    }

    /// Makes what is left simpler.
    fn details(&mut self) {
        for at in 0..self.best.steps.len() {
            let Op::Group { writes, durable } = self.best.steps[at].op.clone() else { continue };
            for write in 0..writes.len() {
                let mut fewer = writes.clone();
                fewer.remove(write);
                self.take_step(at, Op::Group { writes: fewer, durable });
                let mut shorter = writes.clone();
                shorter[write].1 = 1;
                self.take_step(at, Op::Group { writes: shorter, durable });
            }
            if durable {
                self.take_step(at, Op::Group { writes, durable: false });
            }
        }
        for at in 0..self.best.faults.len() {
            let mut simpler = self.best.clone();
            match &mut simpler.faults[at].what {
                What::Kill { effects, fences, .. } | What::PowerCut { effects, fences, .. } => {
                    (*effects, *fences) = (0, false);
                }
                _ => {}
            }
            self.take(simpler);
        }
        let mut alone = self.best.clone();
        alone.neighbour = None;
        self.take(alone);
        let mut plain = self.best.clone();
        plain.client.digests = false;
        plain.client.keep_alive_ms = 0;
        plain.net.split = 0;
        self.take(plain);
        let mut unmerged = self.best.clone();
        unmerged.client.merge = false;
        self.take(unmerged);
    }

    fn take_step(&mut self, at: usize, op: Op) {
        if at < self.best.steps.len() {
            let mut simpler = self.best.clone();
            simpler.steps[at].op = op;
            self.take(simpler);
        }
    }
}

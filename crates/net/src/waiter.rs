//! Deciding between looking again and sleeping.
//!
//! A sleep that ends by an interrupt costs about 40 µs; a look costs less than one. A loop that is
//! in the middle of a conversation should look; one that is idle should sleep. The waiter tells
//! them apart by what just happened, as KVM does when a guest halts: as long as answers come within
//! the spin time, spin; when waits turn out long, spin less, down to nothing; when they turn short
//! again, spin again.

use std::{fmt, str::FromStr, thread};

/// Between two looks: gives way to whoever else wants this core, and returns at once, after some
/// 300 ns, when nobody does.
///
/// Without it a thread that looks for an answer can keep from its core the very thread that is to
/// give it: two writers and two servers on two cores lose nine tenths of their speed. With a core
/// for each thread it costs nothing that can be measured.
#[inline]
pub fn relax() {
    thread::yield_now();
}

/// How long to look before sleeping. As text: `hybrid`, `block`, `poll`, or the microseconds to
/// spin.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct SpinPolicy {
    /// The longest time, in nanoseconds, to look in vain before sleeping. 0: sleep at once.
    pub spin_ns: u64,
    /// Spin that long, always, even if past waits were long.
    pub steady: bool,
}

impl SpinPolicy {
    /// Sleep at once: a busy machine, or a measurement of what work itself costs.
    pub const BLOCK: Self = Self { spin_ns: 0, steady: false };
    /// Never sleep: burns a core.
    pub const POLL: Self = Self { spin_ns: u64::MAX, steady: true };
    /// Look for up to 200 µs, less when that is in vain: full speed when busy, nothing when idle.
    pub const HYBRID: Self = Self { spin_ns: 200_000, steady: false };
}

impl Default for SpinPolicy {
    fn default() -> Self {
        Self::HYBRID
    }
}

impl FromStr for SpinPolicy {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        match text {
            "hybrid" => Ok(Self::HYBRID),
            "block" => Ok(Self::BLOCK),
            "poll" => Ok(Self::POLL),
            _ => match text.parse::<u32>() {
                Ok(us) => Ok(Self { spin_ns: u64::from(us) * 1_000, steady: false }),
                Err(_) => Err(format!(
                    "unknown way to wait {text:?}: hybrid (spin, then sleep), block (sleep at \
                     once), poll (never sleep), or the microseconds to spin"
                )),
            },
        }
    }
}

impl fmt::Display for SpinPolicy {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match *self {
            Self::HYBRID => f.write_str("hybrid"),
            Self::BLOCK => f.write_str("block"),
            Self::POLL => f.write_str("poll"),
            Self { spin_ns, .. } => write!(f, "{}", spin_ns / 1_000),
        }
    }
}

/// What to do after a round that found nothing.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Next {
    /// Look again, after [`relax`].
    Look,
    /// Sleep until something happens.
    Sleep,
}

/// The decision for one loop. Tell it of every round: [`worked`](Waiter::worked) or
/// [`idle`](Waiter::idle).
///
/// ```
/// use riopipe_net::{Next, SpinPolicy, Waiter, now_ns, relax};
/// let mut waiter = Waiter::new(SpinPolicy::HYBRID);
/// let mut todo = 3;
/// loop {
///     if todo > 0 {
///         todo -= 1;
///         waiter.worked();
///         continue;
///     }
///     match waiter.idle(now_ns()) {
///         Next::Look => relax(),
///         Next::Sleep => break, // here: poller.wait(&mut events, until_next_deadline)
///     }
/// }
/// ```
#[derive(Clone, Debug)]
pub struct Waiter {
    policy: SpinPolicy,
    /// How long to spin now: between 0 and the policy's.
    spin_ns: u64,
    state: State,
}

#[derive(Clone, Copy, Debug)]
enum State {
    Working,
    Spinning {
        since: u64,
    },
    /// Told to sleep; waiting since.
    Sleeping {
        since: u64,
    },
    /// Something came after a sleep; the clock is read at the next idle round.
    Woken {
        since: u64,
    },
}

impl Waiter {
    /// A waiter that spins at first.
    #[must_use]
    pub fn new(policy: SpinPolicy) -> Self {
        Self { policy, spin_ns: policy.spin_ns, state: State::Working }
    }

    /// The policy it was made with.
    #[must_use]
    pub fn policy(&self) -> SpinPolicy {
        self.policy
    }

    /// The last round did something.
    #[inline]
    pub fn worked(&mut self) {
        self.state = match self.state {
            State::Working | State::Spinning { .. } => State::Working,
            State::Sleeping { since } | State::Woken { since } => State::Woken { since },
        };
    }

    /// The last round, at `now` (nanoseconds), found nothing: what now?
    #[inline]
    pub fn idle(&mut self, now: u64) -> Next {
        match self.state {
            State::Working => self.begin(now),
            State::Spinning { since } => self.go_on(now, since),
            State::Sleeping { since } => {
                // Woken for nothing (a timer, a signal), perhaps long ago: still idle.
                self.adapt(now.saturating_sub(since));
                self.state = State::Sleeping { since: now };
                Next::Sleep
            }
            State::Woken { since } => {
                // `now` is a little late: after the work that ended the wait, not before. That
                // errs towards sleeping by one round, and saves reading the clock twice.
                self.adapt(now.saturating_sub(since));
                self.begin(now)
            }
        }
    }

    fn begin(&mut self, now: u64) -> Next {
        self.state = State::Spinning { since: now };
        self.go_on(now, now)
    }

    fn go_on(&mut self, now: u64, since: u64) -> Next {
        if now.saturating_sub(since) < self.spin_ns {
            return Next::Look;
        }
        self.state = State::Sleeping { since };
        Next::Sleep
    }

    /// A wait that had to sleep took `waited` in all, spinning included.
    fn adapt(&mut self, waited: u64) {
        if self.policy.steady {
            return;
        }
        self.spin_ns = if waited <= self.policy.spin_ns {
            // Spinning to the limit would have caught it.
            self.policy.spin_ns
        } else if self.spin_ns > SPIN_MIN_NS {
            self.spin_ns / 2
        } else {
            0
        };
    }
}

/// Spinning less than this never pays.
const SPIN_MIN_NS: u64 = 5_000;

#[cfg(test)]
mod tests {
    use super::*;

    const MS: u64 = 1_000_000;

    /// Waits from `*now` until `*now + wait`, with looks 1 µs apart; returns the time spent looking.
    fn wait(waiter: &mut Waiter, now: &mut u64, wait: u64) -> u64 {
        let (start, end) = (*now, *now + wait);
        let mut looked = 0;
        while *now < end {
            match waiter.idle(*now) {
                Next::Look => {
                    *now += 1_000;
                    looked = *now - start;
                }
                Next::Sleep => *now = end,
            }
        }
        waiter.worked();
        looked
    }

    #[test]
    fn answers_within_the_spin_time_never_sleep() {
        let mut waiter = Waiter::new(SpinPolicy::HYBRID);
        let mut now = 0;
        for _ in 0..100 {
            assert_eq!(wait(&mut waiter, &mut now, 150_000), 150_000);
        }
    }

    #[test]
    fn idling_costs_less_and_less_and_then_nothing() {
        let mut waiter = Waiter::new(SpinPolicy::HYBRID);
        let mut now = 0;
        let spent: Vec<_> = (0..10).map(|_| wait(&mut waiter, &mut now, 10 * MS)).collect();
        assert_eq!(spent[0], 200_000);
        assert!(spent.is_sorted_by(|a, b| a >= b), "{spent:?}");
        assert_eq!(spent[9], 0);
    }

    #[test]
    fn waking_for_nothing_is_idling() {
        let mut waiter = Waiter::new(SpinPolicy::HYBRID);
        let mut now = 0;
        while waiter.idle(now) == Next::Look {
            now += 1_000;
        }
        // Timers without work: never a reason to look.
        for _ in 0..50 {
            now += 5 * MS;
            assert_eq!(waiter.idle(now), Next::Sleep);
        }
    }

    #[test]
    fn one_short_wait_brings_the_spinning_back() {
        let mut waiter = Waiter::new(SpinPolicy::HYBRID);
        let mut now = 0;
        for _ in 0..20 {
            wait(&mut waiter, &mut now, 10 * MS);
        }
        assert_eq!(wait(&mut waiter, &mut now, 60_000), 0, "still asleep");
        assert_eq!(wait(&mut waiter, &mut now, 60_000), 60_000);
    }

    #[test]
    fn as_text_and_back() {
        for policy in [SpinPolicy::HYBRID, SpinPolicy::BLOCK, SpinPolicy::POLL] {
            assert_eq!(policy.to_string().parse(), Ok(policy));
        }
        let fifty: SpinPolicy = "50".parse().unwrap();
        assert_eq!((fifty.spin_ns, fifty.to_string().as_str()), (50_000, "50"));
        let error = "fast".parse::<SpinPolicy>().unwrap_err();
        assert!(error.contains("fast") && error.contains("hybrid"), "{error}");
    }

    #[test]
    fn the_extremes_do_not_adapt() {
        let mut now = 0;
        let mut block = Waiter::new(SpinPolicy::BLOCK);
        for _ in 0..5 {
            assert_eq!(wait(&mut block, &mut now, 2_000), 0);
        }
        let mut poll = Waiter::new(SpinPolicy::POLL);
        for _ in 0..5 {
            assert_eq!(wait(&mut poll, &mut now, 10 * MS), 10 * MS);
        }
    }
}

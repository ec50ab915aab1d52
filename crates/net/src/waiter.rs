//! The decision between polling again and sleeping.
//!
//! A sleep that ends by an interrupt costs about 40 µs; a poll costs less than one. A loop that
//! exchanges messages should poll, an idle one should sleep. The waiter decides by the recent
//! waits, as KVM does when a guest halts. While answers come within the spin time, it spins. When
//! waits turn out long, it spins for a shorter time, down to none. When they become short again, it
//! spins again.
//!
//! A spinning thread can keep the thread that it waits for from its core. So it yields between two
//! polls, which costs almost nothing on a core of its own. If a yield takes time, another thread
//! needs the core: the waiter then sleeps instead, and does not spin again for a while. (Two
//! writers and two servers on two cores, queue depth 1: 10 k writes/s with plain spinning, 82 k
//! with yielding, 114 k with sleeping. One writer and one server: 101 k, 101 k, 12 k.)

use std::{fmt, str::FromStr, thread};

use riopipe_platform::now_ns;

/// Yields this core to other threads. [`Waiter::relax`] is better, since it also measures whether
/// one used it.
#[inline]
pub fn relax() {
    thread::yield_now();
}

/// The time to poll before sleeping. As text: `hybrid`, `block`, `poll`, or the microseconds to
/// spin.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct SpinPolicy {
    /// The longest time to poll without success before sleeping, in nanoseconds. 0: sleep at once.
    pub spin_ns: u64,
    /// Always spin that long, even if past waits were long.
    pub steady: bool,
}

impl SpinPolicy {
    /// Sleep at once: for a busy machine, or to measure the cost of the work itself.
    pub const BLOCK: Self = Self { spin_ns: 0, steady: false };
    /// Never sleep: uses a whole core.
    pub const POLL: Self = Self { spin_ns: u64::MAX, steady: true };
    /// Poll for up to 200 µs, shorter if that was in vain: full speed when busy, no cost when idle.
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

/// The next step after a round without work.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Next {
    /// Poll again, after [`Waiter::relax`].
    Poll,
    /// Sleep until an event occurs.
    Sleep,
}

/// The decision for one loop. Report every round to it: [`worked`](Waiter::worked) or
/// [`idle`](Waiter::idle).
///
/// ```
/// use riopipe_net::{Next, SpinPolicy, Waiter, now_ns};
/// let mut waiter = Waiter::new(SpinPolicy::HYBRID);
/// let mut todo = 3;
/// loop {
///     if todo > 0 {
///         todo -= 1;
///         waiter.worked();
///         continue;
///     }
///     match waiter.idle(now_ns()) {
///         Next::Poll => waiter.relax(),
///         Next::Sleep => break, // here: poller.wait(&mut events, until_next_deadline)
///     }
/// }
/// ```
#[derive(Clone, Debug)]
pub struct Waiter {
    policy: SpinPolicy,
    /// Current spin time in nanoseconds: between 0 and the policy's.
    spin_ns: u64,
    state: State,
    core: Core,
}

/// The use of this core by other threads, as far as it is known.
#[derive(Clone, Debug, Default)]
struct Core {
    /// Yields during this spin, and how many of them another thread used.
    yields: u32,
    used: u32,
    /// Time before which there is no spinning.
    shared_until: u64,
    /// Time for which the core will be taken for shared the next time, in nanoseconds.
    backoff_ns: u64,
}

#[derive(Clone, Copy, Debug)]
enum State {
    Working,
    Spinning {
        since: u64,
    },
    /// It was asked to sleep, at this time.
    Sleeping {
        since: u64,
    },
    /// Work came after a sleep; the clock is read at the next idle round.
    Woken {
        since: u64,
    },
}

impl Waiter {
    /// A waiter that begins with spinning.
    #[must_use]
    pub fn new(policy: SpinPolicy) -> Self {
        Self { policy, spin_ns: policy.spin_ns, state: State::Working, core: Core::default() }
    }

    /// The policy of this waiter.
    #[must_use]
    pub fn policy(&self) -> SpinPolicy {
        self.policy
    }

    /// Reports that the last round did some work.
    #[inline]
    pub fn worked(&mut self) {
        if matches!(self.state, State::Spinning { .. }) && self.core.used == 0 {
            // The spinning had success, and no other thread needed the core.
            self.core.backoff_ns = 0;
        }
        self.state = match self.state {
            State::Working | State::Spinning { .. } => State::Working,
            State::Sleeping { since } | State::Woken { since } => State::Woken { since },
        };
    }

    /// Reports that the last round, at `now` (nanoseconds), found no work; returns the next step.
    #[inline]
    pub fn idle(&mut self, now: u64) -> Next {
        match self.state {
            State::Working => self.begin(now),
            State::Spinning { since } => self.go_on(now, since),
            State::Sleeping { since } => {
                // Woken without work (a timer, a signal), perhaps long ago: still idle.
                self.adapt(now.saturating_sub(since));
                self.state = State::Sleeping { since: now };
                Next::Sleep
            }
            State::Woken { since } => {
                // `now` may be a little late: after the work that ended the wait, not before. The
                // error is at most one round towards sleeping, and it saves reading the clock
                // twice.
                self.adapt(now.saturating_sub(since));
                self.begin(now)
            }
        }
    }

    /// Yields between two polls, and measures whether another thread used the core. About 400 ns if
    /// none did.
    #[inline]
    pub fn relax(&mut self) {
        // The clock is read here and not taken from `idle`: callers may have read theirs before the
        // round's work, whose time must not count as another thread's.
        let start = now_ns();
        thread::yield_now();
        self.yielded(start, now_ns());
    }

    fn begin(&mut self, now: u64) -> Next {
        self.core.yields = 0;
        self.core.used = 0;
        self.go_on(now, now)
    }

    fn go_on(&mut self, now: u64, since: u64) -> Next {
        if now.saturating_sub(since) < self.spin_ns && self.may_spin(now) {
            self.state = State::Spinning { since };
            return Next::Poll;
        }
        self.state = State::Sleeping { since };
        Next::Sleep
    }

    /// Reports a yield from `at` to `now`.
    fn yielded(&mut self, at: u64, now: u64) {
        let ns = now.saturating_sub(at);
        self.core.yields += 1;
        if ns > YIELD_NS_MAX {
            self.core.used += 1;
        }
        // One long absence is enough; short ones must be frequent, since a single one may be an
        // interrupt.
        let shared = ns > ABSENCE_NS_MAX
            || (self.core.yields >= YIELDS_MIN && self.core.used > self.core.yields / 2);
        if shared && !self.policy.steady {
            self.core.backoff_ns = (self.core.backoff_ns * 2).clamp(BACKOFF_NS_MIN, BACKOFF_NS_MAX);
            self.core.shared_until = now + self.core.backoff_ns;
        }
    }

    fn may_spin(&self, now: u64) -> bool {
        self.policy.steady || now >= self.core.shared_until
    }

    /// Adapts the spin time after a wait with a sleep; it took `waited` in all, spinning included.
    fn adapt(&mut self, waited: u64) {
        if self.policy.steady {
            return;
        }
        self.spin_ns = if waited <= self.policy.spin_ns {
            // Spinning up to the limit would have sufficed.
            self.policy.spin_ns
        } else if self.spin_ns > SPIN_MIN_NS {
            self.spin_ns / 2
        } else {
            0
        };
    }
}

/// The shortest useful spin, in nanoseconds. A shorter one saves less time than it costs.
const SPIN_MIN_NS: u64 = 5_000;

/// Longest yield without another thread, in nanoseconds: a system call and two scans of the run
/// queue.
const YIELD_NS_MAX: u64 = 3_000;

/// Longest absence during a yield that counts as a turn of the peer, in nanoseconds. After a longer
/// one, an unrelated busy thread had the core.
const ABSENCE_NS_MAX: u64 = 100_000;

/// Least number of yields before their share counts.
const YIELDS_MIN: u32 = 4;

/// Shortest and longest time for which a core is assumed to be shared, in nanoseconds. An attempt
/// to spin costs a time slice of the other thread, some milliseconds. Without an attempt, each wait
/// costs a wake-up.
const BACKOFF_NS_MIN: u64 = 1_000_000;
const BACKOFF_NS_MAX: u64 = 100_000_000;

#[cfg(test)]
mod tests {
    use super::*;

    const MS: u64 = 1_000_000;

    /// Waits from `*now` until `*now + wait`, with polls 1 µs apart; returns the time spent
    /// polling.
    fn wait(waiter: &mut Waiter, now: &mut u64, wait: u64) -> u64 {
        let (start, end) = (*now, *now + wait);
        let mut polled = 0;
        while *now < end {
            match waiter.idle(*now) {
                Next::Poll => {
                    *now += 1_000;
                    polled = *now - start;
                }
                Next::Sleep => *now = end,
            }
        }
        waiter.worked();
        polled
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
    fn an_idle_loop_spins_less_and_less_and_then_sleeps() {
        let mut waiter = Waiter::new(SpinPolicy::HYBRID);
        let mut now = 0;
        let spent: Vec<_> = (0..10).map(|_| wait(&mut waiter, &mut now, 10 * MS)).collect();
        assert_eq!(spent[0], 200_000);
        assert!(spent.is_sorted_by(|a, b| a >= b), "{spent:?}");
        assert_eq!(spent[9], 0);
    }

    #[test]
    fn a_wake_up_without_work_counts_as_idle() {
        let mut waiter = Waiter::new(SpinPolicy::HYBRID);
        let mut now = 0;
        while waiter.idle(now) == Next::Poll {
            now += 1_000;
        }
        // Timers without work: no reason to spin.
        for _ in 0..50 {
            now += 5 * MS;
            assert_eq!(waiter.idle(now), Next::Sleep);
        }
    }

    #[test]
    fn one_short_wait_restores_the_spinning() {
        let mut waiter = Waiter::new(SpinPolicy::HYBRID);
        let mut now = 0;
        for _ in 0..20 {
            wait(&mut waiter, &mut now, 10 * MS);
        }
        assert_eq!(wait(&mut waiter, &mut now, 60_000), 0, "still asleep");
        assert_eq!(wait(&mut waiter, &mut now, 60_000), 60_000);
    }

    /// One wait with polls and yields of `yield_ns`; returns the number of polls before it slept,
    /// or `None` if it was still polling after 150 µs and `yield_ns` is below 100 µs.
    fn polls_until_sleep(waiter: &mut Waiter, now: &mut u64, yield_ns: u64) -> Option<u32> {
        let start = *now;
        let mut polls = 0;
        let slept = loop {
            if *now - start >= 150_000 && yield_ns < 100_000 {
                break None;
            }
            match waiter.idle(*now) {
                Next::Sleep => break Some(polls),
                Next::Poll => {
                    let at = *now;
                    *now += yield_ns;
                    waiter.yielded(at, *now);
                    polls += 1;
                }
            }
        };
        waiter.worked();
        slept
    }

    #[test]
    fn a_shared_core_is_left_to_the_others() {
        let mut waiter = Waiter::new(SpinPolicy::HYBRID);
        let mut now = 0;
        assert_eq!(polls_until_sleep(&mut waiter, &mut now, 400), None, "alone");
        // A peer takes its short turns, or another thread a long one.
        assert_eq!(polls_until_sleep(&mut waiter, &mut now, 6_000), Some(4));
        assert_eq!(polls_until_sleep(&mut waiter, &mut now, 400), Some(0), "not yet again");
        now += 2 * MS;
        assert_eq!(polls_until_sleep(&mut waiter, &mut now, 3 * MS), Some(1));
        now += 5 * MS;
        let polls = polls_until_sleep(&mut waiter, &mut now, 400);
        assert!(polls.is_none_or(|polls| polls > 100), "the core is free again: {polls:?}");
    }

    #[test]
    fn a_shared_core_is_tried_less_and_less_often() {
        let mut waiter = Waiter::new(SpinPolicy::HYBRID);
        let mut now = 0;
        let mut tries = Vec::new();
        while now < 2_000 * MS {
            if polls_until_sleep(&mut waiter, &mut now, 3 * MS) == Some(1) {
                tries.push(now / MS);
            }
            now += MS / 10;
        }
        assert!(tries.len() < 30, "{tries:?}");
        assert!(tries.windows(2).all(|w| w[1] - w[0] <= 105), "{tries:?}");
    }

    #[test]
    fn an_occasional_interrupt_does_not_count_as_sharing() {
        let mut waiter = Waiter::new(SpinPolicy::HYBRID);
        let mut now = 0;
        for i in 0..500 {
            let Next::Poll = waiter.idle(now) else {
                panic!("slept at poll {i}");
            };
            let at = now;
            now += if i % 10 == 0 { 8_000 } else { 400 };
            waiter.yielded(at, now);
            if i % 100 == 99 {
                waiter.worked();
            }
        }
    }

    #[test]
    fn a_policy_is_parsed_as_it_is_displayed() {
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

//! The decision between polling again and sleeping.
//!
//! A sleep that ends by an interrupt costs about 40 µs. A poll costs less than 1 µs. So a loop that
//! exchanges messages should poll (*spin*), and an idle loop should sleep.
//!
//! [`AdaptiveSpin`] adapts the spin time to the recent waits, as KVM does when a guest halts:
//!
//! - A wait that was shorter than the longest spin time sets the spin time to the longest.
//! - A longer wait halves the spin time, down to none.
//!
//! A spinning thread may take the core from the thread that must send the answer. So the loop yields
//! the core between two polls. A yield costs almost nothing if no other thread needs the core. If
//! yields take long, other threads need the core: the loop then sleeps, and does not spin again for a
//! while (the *backoff*). Writes per second at queue depth 1, on two cores:
//!
//! | threads | plain spinning | spinning with yields | sleeping |
//! |---|---|---|---|
//! | two writers, two servers | 10 k | 82 k | 114 k |
//! | one writer, one server | 101 k | 101 k | 12 k |

use std::{fmt, str::FromStr, thread};

use riopipe_platform::now_ns;

/// Yields this core to other threads. Prefer [`AdaptiveSpin::relax`], because it also measures whether
/// another thread used the core.
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
    /// Whether to spin for `spin_ns` at each wait. False: adapt the spin time to the recent waits, and do
    /// not spin while other threads need the core.
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
                Ok(spin_us) => Ok(Self { spin_ns: u64::from(spin_us) * 1_000, steady: false }),
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
pub enum IdleStep {
    /// Poll again, after [`AdaptiveSpin::relax`].
    Poll,
    /// Sleep until an event occurs.
    Sleep,
}

/// Decides for one loop. The loop reports every round: [`on_work`](Self::on_work) or
/// [`on_idle`](Self::on_idle).
///
/// ```
/// use riopipe_net::{IdleStep, SpinPolicy, AdaptiveSpin, now_ns};
/// let mut spin = AdaptiveSpin::new(SpinPolicy::HYBRID);
/// let mut todo = 3;
/// loop {
///     if todo > 0 {
///         todo -= 1;
///         spin.on_work();
///         continue;
///     }
///     match spin.on_idle(now_ns()) {
///         IdleStep::Poll => spin.relax(),
///         IdleStep::Sleep => break, // here: poller.wait(&mut events, until_next_deadline)
///     }
/// }
/// ```
#[derive(Clone, Debug)]
pub struct AdaptiveSpin {
    policy: SpinPolicy,
    /// The present spin time: between 0 and the policy's `spin_ns`.
    spin_ns: u64,
    state: LoopState,
    core_use: CoreUse,
}

/// The use of this core by other threads, as the yields show it.
#[derive(Clone, Debug, Default)]
struct CoreUse {
    /// The number of yields during the present spin.
    yield_count: u32,
    /// How many of these yields another thread used.
    used_yield_count: u32,
    /// The time (ns) until which the loop does not spin, because other threads need the core.
    backoff_end: u64,
    /// The duration of the last backoff; 0 after a spin without another thread.
    backoff_ns: u64,
}

/// The state of the loop. Each `since` is the time at which the present wait began, ns.
#[derive(Clone, Copy, Debug)]
enum LoopState {
    /// The last round did some work.
    Working,
    /// The loop polls again and again.
    Spinning { since: u64 },
    /// The last decision was to sleep.
    Sleeping { since: u64 },
    /// The loop has done some work after a sleep, but the end of the wait is not recorded yet. The next
    /// idle round records it, because only idle rounds have the time.
    Woken { since: u64 },
}

impl AdaptiveSpin {
    /// Begins with the longest spin time of the policy.
    #[must_use]
    pub fn new(policy: SpinPolicy) -> Self {
        let core_use = CoreUse::default();
        Self { policy, spin_ns: policy.spin_ns, state: LoopState::Working, core_use }
    }

    /// The policy.
    #[must_use]
    pub fn policy(&self) -> SpinPolicy {
        self.policy
    }

    /// Reports that the last round did some work.
    #[inline]
    pub fn on_work(&mut self) {
        if matches!(self.state, LoopState::Spinning { .. }) && self.core_use.used_yield_count == 0 {
            // The spinning had success, and no other thread needed the core.
            self.core_use.backoff_ns = 0;
        }
        self.state = match self.state {
            LoopState::Working | LoopState::Spinning { .. } => LoopState::Working,
            LoopState::Sleeping { since } | LoopState::Woken { since } => {
                LoopState::Woken { since }
            }
        };
    }

    /// Reports that the last round, at `now` (ns), found no work. Returns the next step of the loop.
    #[inline]
    pub fn on_idle(&mut self, now: u64) -> IdleStep {
        match self.state {
            LoopState::Working => self.begin_wait(now),
            LoopState::Spinning { since } => self.continue_wait(now, since),
            LoopState::Sleeping { since } => {
                // A timer or a signal has ended the sleep, and there was no work. The loop is still
                // idle, so it sleeps again.
                self.adapt_spin_time(now.saturating_sub(since));
                self.state = LoopState::Sleeping { since: now };
                IdleStep::Sleep
            }
            LoopState::Woken { since } => {
                // The wait ended before the work, but `now` is after the work. So the wait counts as
                // longer by at most one round. To read the clock once more would cost too much.
                self.adapt_spin_time(now.saturating_sub(since));
                self.begin_wait(now)
            }
        }
    }

    /// Yields the core between two polls, and measures whether another thread used it. Takes about
    /// 400 ns if none did.
    #[inline]
    pub fn relax(&mut self) {
        // The time of `on_idle` is not used here. A caller may have read it before the work of the
        // round, and that work must not count as time of another thread.
        let begin = now_ns();
        thread::yield_now();
        self.on_yield(begin, now_ns());
    }

    fn begin_wait(&mut self, now: u64) -> IdleStep {
        self.core_use.yield_count = 0;
        self.core_use.used_yield_count = 0;
        self.continue_wait(now, now)
    }

    fn continue_wait(&mut self, now: u64, since: u64) -> IdleStep {
        if now.saturating_sub(since) < self.spin_ns && self.may_spin(now) {
            self.state = LoopState::Spinning { since };
            return IdleStep::Poll;
        }
        self.state = LoopState::Sleeping { since };
        IdleStep::Sleep
    }

    /// Records a yield from `begin` to `end` (ns). Begins a backoff if other threads need the core.
    fn on_yield(&mut self, begin: u64, end: u64) {
        let core_use = &mut self.core_use;
        let duration_ns = end.saturating_sub(begin);
        core_use.yield_count += 1;
        if duration_ns > UNUSED_YIELD_NS_MAX {
            core_use.used_yield_count += 1;
        }
        let is_busy_thread_present = duration_ns > PEER_TURN_NS_MAX;
        // A single used yield may be an interrupt, so most of several yields must be used.
        let are_most_yields_used = core_use.yield_count >= YIELD_COUNT_MIN
            && core_use.used_yield_count > core_use.yield_count / 2;
        if (is_busy_thread_present || are_most_yields_used) && !self.policy.steady {
            core_use.backoff_ns = (core_use.backoff_ns * 2).clamp(BACKOFF_NS_MIN, BACKOFF_NS_MAX);
            core_use.backoff_end = end + core_use.backoff_ns;
        }
    }

    fn may_spin(&self, now: u64) -> bool {
        self.policy.steady || now >= self.core_use.backoff_end
    }

    /// Adapts the spin time after a wait with a sleep. `wait_ns` is the whole wait, with its spin.
    fn adapt_spin_time(&mut self, wait_ns: u64) {
        if self.policy.steady {
            return;
        }
        self.spin_ns = if wait_ns <= self.policy.spin_ns {
            // A spin of the longest time would have been enough, without a sleep.
            self.policy.spin_ns
        } else if self.spin_ns > SPIN_NS_MIN {
            self.spin_ns / 2
        } else {
            0
        };
    }
}

/// The shortest useful spin. A shorter one saves less time than it costs.
const SPIN_NS_MIN: u64 = 5_000;

/// The longest yield that no other thread used: a system call and two scans of the run queue.
const UNUSED_YIELD_NS_MAX: u64 = 3_000;

/// The longest yield that the thread at the other end of the connection may have used. In a longer one,
/// an unrelated busy thread had the core.
const PEER_TURN_NS_MAX: u64 = 100_000;

/// The number of yields in a spin before the share of used ones counts.
const YIELD_COUNT_MIN: u32 = 4;

/// The shortest and the longest backoff. A spin after the backoff may cost a time slice of the other
/// thread, some milliseconds. During the backoff, each wait costs a wake-up.
const BACKOFF_NS_MIN: u64 = 1_000_000;
const BACKOFF_NS_MAX: u64 = 100_000_000;

#[cfg(test)]
mod tests {
    use super::*;

    const MS: u64 = 1_000_000;

    /// Waits from `*now` until `*now + wait`, with polls 1 µs apart; returns the time spent
    /// polling.
    fn wait(spin: &mut AdaptiveSpin, now: &mut u64, wait: u64) -> u64 {
        let (start, end) = (*now, *now + wait);
        let mut polled = 0;
        while *now < end {
            match spin.on_idle(*now) {
                IdleStep::Poll => {
                    *now += 1_000;
                    polled = *now - start;
                }
                IdleStep::Sleep => *now = end,
            }
        }
        spin.on_work();
        polled
    }

    #[test]
    fn answers_within_the_spin_time_never_sleep() {
        let mut spin = AdaptiveSpin::new(SpinPolicy::HYBRID);
        let mut now = 0;
        for _ in 0..100 {
            assert_eq!(wait(&mut spin, &mut now, 150_000), 150_000);
        }
    }

    #[test]
    fn an_idle_loop_spins_less_and_less_and_then_sleeps() {
        let mut spin = AdaptiveSpin::new(SpinPolicy::HYBRID);
        let mut now = 0;
        let spent: Vec<_> = (0..10).map(|_| wait(&mut spin, &mut now, 10 * MS)).collect();
        assert_eq!(spent[0], 200_000);
        assert!(spent.is_sorted_by(|a, b| a >= b), "{spent:?}");
        assert_eq!(spent[9], 0);
    }

    #[test]
    fn a_wake_up_without_work_counts_as_idle() {
        let mut spin = AdaptiveSpin::new(SpinPolicy::HYBRID);
        let mut now = 0;
        while spin.on_idle(now) == IdleStep::Poll {
            now += 1_000;
        }
        // Timers without work: no reason to spin.
        for _ in 0..50 {
            now += 5 * MS;
            assert_eq!(spin.on_idle(now), IdleStep::Sleep);
        }
    }

    #[test]
    fn one_short_wait_restores_the_spinning() {
        let mut spin = AdaptiveSpin::new(SpinPolicy::HYBRID);
        let mut now = 0;
        for _ in 0..20 {
            wait(&mut spin, &mut now, 10 * MS);
        }
        assert_eq!(wait(&mut spin, &mut now, 60_000), 0, "still asleep");
        assert_eq!(wait(&mut spin, &mut now, 60_000), 60_000);
    }

    /// One wait with polls and yields of `yield_ns`; returns the number of polls before it slept,
    /// or `None` if it was still polling after 150 µs and `yield_ns` is below 100 µs.
    fn polls_until_sleep(spin: &mut AdaptiveSpin, now: &mut u64, yield_ns: u64) -> Option<u32> {
        let start = *now;
        let mut polls = 0;
        let slept = loop {
            if *now - start >= 150_000 && yield_ns < 100_000 {
                break None;
            }
            match spin.on_idle(*now) {
                IdleStep::Sleep => break Some(polls),
                IdleStep::Poll => {
                    let at = *now;
                    *now += yield_ns;
                    spin.on_yield(at, *now);
                    polls += 1;
                }
            }
        };
        spin.on_work();
        slept
    }

    #[test]
    fn a_shared_core_is_left_to_the_others() {
        let mut spin = AdaptiveSpin::new(SpinPolicy::HYBRID);
        let mut now = 0;
        assert_eq!(polls_until_sleep(&mut spin, &mut now, 400), None, "alone");
        // A peer takes its short turns, or another thread a long one.
        assert_eq!(polls_until_sleep(&mut spin, &mut now, 6_000), Some(4));
        assert_eq!(polls_until_sleep(&mut spin, &mut now, 400), Some(0), "not yet again");
        now += 2 * MS;
        assert_eq!(polls_until_sleep(&mut spin, &mut now, 3 * MS), Some(1));
        now += 5 * MS;
        let polls = polls_until_sleep(&mut spin, &mut now, 400);
        assert!(polls.is_none_or(|polls| polls > 100), "the core is free again: {polls:?}");
    }

    #[test]
    fn a_shared_core_is_tried_less_and_less_often() {
        let mut spin = AdaptiveSpin::new(SpinPolicy::HYBRID);
        let mut now = 0;
        let mut tries = Vec::new();
        while now < 2_000 * MS {
            if polls_until_sleep(&mut spin, &mut now, 3 * MS) == Some(1) {
                tries.push(now / MS);
            }
            now += MS / 10;
        }
        assert!(tries.len() < 30, "{tries:?}");
        assert!(tries.windows(2).all(|w| w[1] - w[0] <= 105), "{tries:?}");
    }

    #[test]
    fn an_occasional_interrupt_does_not_count_as_sharing() {
        let mut spin = AdaptiveSpin::new(SpinPolicy::HYBRID);
        let mut now = 0;
        for i in 0..500 {
            let IdleStep::Poll = spin.on_idle(now) else {
                panic!("slept at poll {i}");
            };
            let at = now;
            now += if i % 10 == 0 { 8_000 } else { 400 };
            spin.on_yield(at, now);
            if i % 100 == 99 {
                spin.on_work();
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
        let mut block = AdaptiveSpin::new(SpinPolicy::BLOCK);
        for _ in 0..5 {
            assert_eq!(wait(&mut block, &mut now, 2_000), 0);
        }
        let mut poll = AdaptiveSpin::new(SpinPolicy::POLL);
        for _ in 0..5 {
            assert_eq!(wait(&mut poll, &mut now, 10 * MS), 10 * MS);
        }
    }
}

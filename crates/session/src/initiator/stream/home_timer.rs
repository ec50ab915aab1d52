//! The time at which redirected updates of engine `horae` are written home without a need for space.
//!
//! Their groups are released only then. Other streams may wait for that, and updates that are not home
//! are lost with their log (trap T26). So an update must not wait for long.

use riopipe_order::attribute::Seq;

/// The time for which a stream is idle before its redirected updates are written home, ns. A stream
/// with single durable updates would otherwise write each of them twice at once.
const IDLE_NS: u64 = 50_000_000;

/// The longest time for which a durable update waits on a stream that is never idle, ns.
const AGE_NS: u64 = 250_000_000;

/// The state of a stream's updates that are not home.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct NotHome {
    /// The group of the oldest update. It is durable.
    pub(super) oldest: Seq,
    /// The last group of the stream.
    pub(super) last: Seq,
    /// Whether the stream is idle, and all its groups are durable.
    pub(super) is_idle: bool,
}

/// The times since when updates wait, ns.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct HomeTimer(Option<Waiting>);

#[derive(Clone, Copy, Debug)]
struct Waiting {
    state: NotHome,
    /// Since when `oldest` is the oldest one.
    since: u64,
    /// Since when the stream is idle after `last`.
    idle_since: u64,
}

impl HomeTimer {
    /// Takes in the present state; `None`: no durable update waits. Returns whether it is time to write
    /// the updates home. Then the times start again.
    pub(super) fn is_due(&mut self, state: Option<NotHome>, now: u64) -> bool {
        let Some(state) = state else {
            self.0 = None;
            return false;
        };
        let before = self.0;
        let since = before.filter(|before| before.state.oldest == state.oldest);
        let idle_since =
            before.filter(|before| before.state.is_idle && before.state.last == state.last);
        self.0 = Some(Waiting {
            state,
            since: since.map_or(now, |before| before.since),
            idle_since: idle_since.map_or(now, |before| before.idle_since),
        });
        let is_due = self.deadline().is_some_and(|at| at <= now);
        if is_due {
            self.0 = None;
        }
        is_due
    }

    /// The time at which the updates are to be written home, if nothing changes, ns.
    pub(super) fn deadline(&self) -> Option<u64> {
        let Waiting { state, since, idle_since } = self.0?;
        let at_age = since.saturating_add(AGE_NS);
        let at_idle = state.is_idle.then_some(idle_since.saturating_add(IDLE_NS));
        Some(at_idle.map_or(at_age, |at| at.min(at_age)))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn state(oldest: u64, last: u64, is_idle: bool) -> Option<NotHome> {
        Some(NotHome { oldest: Seq(oldest), last: Seq(last), is_idle })
    }

    #[test]
    fn an_idle_stream_writes_home_after_a_while() {
        let mut timer = HomeTimer::default();
        assert!(!timer.is_due(state(1, 1, true), 1000));
        assert_eq!(timer.deadline(), Some(1000 + IDLE_NS));
        assert!(!timer.is_due(state(1, 1, true), 1000 + IDLE_NS - 1));
        assert!(timer.is_due(state(1, 1, true), 1000 + IDLE_NS));
        assert_eq!(timer.deadline(), None);
    }

    #[test]
    fn a_stream_that_is_never_idle_long_enough_writes_home_at_an_age() {
        let mut timer = HomeTimer::default();
        let mut now = 0;
        for last in 1.. {
            let is_due = timer.is_due(state(1, last, last % 2 == 0), now);
            assert_eq!(is_due, now >= AGE_NS, "at {now}");
            if is_due {
                break;
            }
            now += IDLE_NS - 1;
        }
    }

    #[test]
    fn a_new_oldest_update_starts_the_age_again() {
        let mut timer = HomeTimer::default();
        assert!(!timer.is_due(state(1, 9, false), 0));
        assert!(!timer.is_due(state(2, 9, false), AGE_NS));
        assert!(timer.is_due(state(2, 9, false), 2 * AGE_NS));
        assert!(!timer.is_due(None, 3 * AGE_NS));
        assert_eq!(timer.deadline(), None);
    }
}

//! Time limits and marks.

use std::time::{Duration, Instant};

use riopipe::Marks;

/// No time limit. Each negative number means this.
pub const RIOP_FOREVER: i64 = -1;

/// The marks of a stream. See `riop_marks` in `riopipe.h`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(C)]
pub struct RiopMarks {
    /// The seq of the last complete group.
    pub complete: u64,
    /// The seq of the last durable group.
    pub durable: u64,
}

impl From<Marks> for RiopMarks {
    fn from(marks: Marks) -> Self {
        Self { complete: marks.complete.0, durable: marks.durable.0 }
    }
}

/// A time limit in milliseconds; `None` for no limit.
pub(crate) fn limit(timeout_ms: i64) -> Option<Duration> {
    u64::try_from(timeout_ms).ok().map(Duration::from_millis)
}

/// The milliseconds until `deadline`, rounded up, as `poll` and `epoll_wait` take them; -1 for no deadline.
pub(crate) fn ms_until(deadline: Option<Instant>) -> i64 {
    deadline.map_or(RIOP_FOREVER, |deadline| {
        let left = deadline.saturating_duration_since(Instant::now());
        // As an `int`, which is what these calls take.
        left.as_nanos().div_ceil(1_000_000).min(i32::MAX as u128) as i64
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn times_are_those_of_poll() {
        assert_eq!(limit(RIOP_FOREVER), None);
        assert_eq!(limit(i64::MIN), None);
        assert_eq!(limit(0), Some(Duration::ZERO));
        assert_eq!(limit(1500), Some(Duration::from_millis(1500)));
        assert_eq!(ms_until(None), -1);
        let now = Instant::now();
        assert_eq!(ms_until(Some(now)), 0);
        // Rounded up: a sleep of so long ends at or behind the deadline.
        let far = ms_until(Some(now + Duration::from_micros(3_600_000_001)));
        assert!((1..=3_600_001).contains(&far), "{far}");
        assert_eq!(ms_until(Some(now + Duration::from_secs(1 << 32))), i64::from(i32::MAX));
    }
}

//! Times in nanoseconds of the monotonic clock.

use std::time::Duration;

use riopipe_net::now_ns;

/// The time in nanoseconds; 584 years at most.
pub(crate) fn nanos(time: Duration) -> u64 {
    u64::try_from(time.as_nanos()).unwrap_or(u64::MAX)
}

/// The time that is `timeout` from now, ns.
pub(crate) fn deadline_after(timeout: Duration) -> u64 {
    now_ns().saturating_add(nanos(timeout))
}

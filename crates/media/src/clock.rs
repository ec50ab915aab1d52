//! The one clock that drives and reactors share.

use rustix::time::{ClockId, clock_gettime};

/// Nanoseconds of `CLOCK_MONOTONIC`: what
/// [`BlockDevice::poll`](crate::BlockDevice::poll) takes and
/// [`BlockDevice::next_deadline`](crate::BlockDevice::next_deadline) returns.
#[inline]
pub fn now() -> u64 {
    let time = clock_gettime(ClockId::Monotonic);
    time.tv_sec as u64 * 1_000_000_000 + time.tv_nsec as u64
}

#[cfg(test)]
mod tests {
    #[test]
    fn never_goes_back() {
        let first = super::now();
        assert!(first > 0);
        assert!(super::now() >= first);
    }
}

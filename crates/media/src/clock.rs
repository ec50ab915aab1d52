//! The one clock that drives and reactors share.

/// Nanoseconds of `CLOCK_MONOTONIC`: what
/// [`BlockDevice::poll`](crate::BlockDevice::poll) takes and
/// [`BlockDevice::next_deadline`](crate::BlockDevice::next_deadline) returns.
#[inline]
pub fn now() -> u64 {
    let mut time = libc::timespec { tv_sec: 0, tv_nsec: 0 };
    // SAFETY: `time` is a valid timespec to write to. CLOCK_MONOTONIC exists on every Linux, so
    // the call cannot fail.
    unsafe { libc::clock_gettime(libc::CLOCK_MONOTONIC, &mut time) };
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

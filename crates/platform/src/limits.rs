//! The limits of this process.

/// The most file descriptors that this process may have open (`RLIMIT_NOFILE`); `None` if the
/// system does not report it.
#[must_use]
pub fn descriptors_max() -> Option<u64> {
    descriptor_limits().map(|limits| limits.rlim_cur)
}

/// Allows this process as many file descriptors as its user may have (the hard `RLIMIT_NOFILE`).
/// The usual soft limit of 1024 is for programs that call `select`. Returns the limit then.
pub fn raise_descriptors_max() -> Option<u64> {
    let mut limits = descriptor_limits()?;
    limits.rlim_cur = limits.rlim_max;
    // SAFETY: reads the structure, which outlives the call.
    let result = unsafe { libc::setrlimit(libc::RLIMIT_NOFILE, &limits) };
    if result == 0 { Some(limits.rlim_cur) } else { descriptors_max() }
}

fn descriptor_limits() -> Option<libc::rlimit> {
    let mut limits = libc::rlimit { rlim_cur: 0, rlim_max: 0 };
    // SAFETY: fills the structure, which outlives the call.
    let result = unsafe { libc::getrlimit(libc::RLIMIT_NOFILE, &mut limits) };
    (result == 0).then_some(limits)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_limit_is_raised_to_the_hard_one() {
        let hard = descriptor_limits().unwrap().rlim_max;
        assert!(descriptors_max().unwrap() <= hard);
        assert_eq!(raise_descriptors_max(), Some(hard));
        assert_eq!(descriptors_max(), Some(hard));
    }
}

//! `epoll_wait` with a timeout in nanoseconds, if the kernel supports it. rustix has it only for
//! kernels that are sure to support it.

use std::os::fd::{AsRawFd, BorrowedFd};
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use rustix::event::{Timespec, epoll};
use rustix::io::Errno;

/// The longest timeout that every kernel accepts: 24 days.
const LONGEST: Duration = Duration::from_millis(i32::MAX as u64);

/// Waits for events of `epoll`, at most `timeout` (`None`: no limit), and returns the number of
/// events put into `into`. The timeout is in nanoseconds if the kernel has `epoll_pwait2` (5.11),
/// else in milliseconds, rounded up: a deadline must have passed when the wait returns, or callers
/// would spin.
pub(crate) fn epoll_wait(
    epoll: BorrowedFd<'_>,
    into: &mut [epoll::Event],
    timeout: Option<Duration>,
) -> Result<usize, Errno> {
    static NO_PWAIT2: AtomicBool = AtomicBool::new(false);
    if let Some(time) = timeout
        && time.subsec_nanos() % 1_000_000 != 0
        && !NO_PWAIT2.load(Ordering::Relaxed)
    {
        match epoll_pwait2(epoll, into, &timespec(time)) {
            // EPERM: the answer of sandboxes that do not know the call.
            Err(Errno::NOSYS | Errno::PERM) => NO_PWAIT2.store(true, Ordering::Relaxed),
            answer => return answer,
        }
    }
    in_milliseconds(epoll, into, timeout)
}

fn in_milliseconds(
    epoll: BorrowedFd<'_>,
    into: &mut [epoll::Event],
    timeout: Option<Duration>,
) -> Result<usize, Errno> {
    // Rustix rounds up.
    epoll::wait(epoll, into, timeout.map(|time| timespec(time.min(LONGEST))).as_ref())
}

/// A duration in the kernel's format; one that is too long becomes the longest.
pub(crate) fn timespec(time: Duration) -> Timespec {
    Timespec {
        tv_sec: i64::try_from(time.as_secs()).unwrap_or(i64::MAX),
        tv_nsec: i64::from(time.subsec_nanos()),
    }
}

fn epoll_pwait2(
    epoll: BorrowedFd<'_>,
    into: &mut [epoll::Event],
    timeout: &Timespec,
) -> Result<usize, Errno> {
    let time = libc::timespec { tv_sec: timeout.tv_sec, tv_nsec: timeout.tv_nsec };
    // SAFETY: the kernel's signature is (epfd, events, maxevents, timeout, sigmask, sigsetsize);
    // rustix's event is the kernel's; `into` and `time` outlive the call and no signal mask is
    // given. Called by number since older C libraries lack the wrapper.
    let count = unsafe {
        libc::syscall(
            libc::SYS_epoll_pwait2,
            epoll.as_raw_fd(),
            into.as_mut_ptr(),
            into.len() as libc::c_int,
            &raw const time,
            std::ptr::null::<libc::sigset_t>(),
            0usize,
        )
    };
    match count {
        0.. => Ok(count as usize),
        _ => Err(Errno::from_io_error(&std::io::Error::last_os_error()).unwrap_or(Errno::IO)),
    }
}

#[cfg(test)]
mod tests {
    use std::os::fd::AsFd;
    use std::time::Instant;

    use riopipe_platform::EventFd;

    use super::*;

    type Wait = fn(BorrowedFd<'_>, &mut [epoll::Event], Option<Duration>) -> Result<usize, Errno>;
    const BOTH: [Wait; 2] = [epoll_wait, in_milliseconds];

    #[test]
    fn a_wait_is_never_shorter_than_asked_with_either_call() {
        let epoll = epoll::create(epoll::CreateFlags::CLOEXEC).unwrap();
        let nothing =
            epoll::Event { flags: epoll::EventFlags::empty(), data: epoll::EventData::new_u64(0) };
        for wait in BOTH {
            for time in [0, 1, 300_000, 1_000_000, 1_000_001].map(Duration::from_nanos) {
                let begun = Instant::now();
                assert_eq!(wait(epoll.as_fd(), &mut [nothing; 2], Some(time)), Ok(0));
                assert!(begun.elapsed() >= time, "{time:?}");
            }
        }
    }

    #[test]
    fn no_timeout_is_too_long() {
        let epoll = epoll::create(epoll::CreateFlags::CLOEXEC).unwrap();
        let event = EventFd::new().unwrap();
        event.signal();
        let data = epoll::EventData::new_u64(7);
        epoll::add(&epoll, &event, data, epoll::EventFlags::IN).unwrap();
        let nothing =
            epoll::Event { flags: epoll::EventFlags::empty(), data: epoll::EventData::new_u64(0) };
        for wait in BOTH {
            for time in [None, Some(Duration::MAX), Some(Duration::from_secs(1 << 40))] {
                let mut events = [nothing; 2];
                assert_eq!(wait(epoll.as_fd(), &mut events, time), Ok(1), "{time:?}");
                assert_eq!({ events[0].data }.u64(), 7);
            }
        }
    }
}

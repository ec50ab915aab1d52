//! `epoll_wait` with a timeout in nanoseconds, if the kernel supports it. `rustix` offers such a call only
//! to programs that require a kernel with support for it.

use std::os::fd::{AsRawFd, BorrowedFd};
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use rustix::event::{Timespec, epoll};
use rustix::io::Errno;

/// The longest timeout that every kernel accepts: about 24 days.
const TIMEOUT_MAX: Duration = Duration::from_millis(i32::MAX as u64);

/// Waits for events of `epoll`, for `timeout` at most (`None`: no limit). Writes the events to `into`,
/// and returns their number.
///
/// If the kernel has `epoll_pwait2` (Linux 5.11), the timeout is exact. Otherwise it is rounded up to
/// milliseconds. It is never shorter, because a caller whose deadline has not passed would wait again
/// and again.
pub(crate) fn epoll_wait(
    epoll: BorrowedFd<'_>,
    into: &mut [epoll::Event],
    timeout: Option<Duration>,
) -> Result<usize, Errno> {
    static LACKS_PWAIT2: AtomicBool = AtomicBool::new(false);
    if let Some(time) = timeout
        && has_part_of_ms(time)
        && !LACKS_PWAIT2.load(Ordering::Relaxed)
    {
        match epoll_pwait2(epoll, into, &timespec(time)) {
            // A sandbox that does not know the call answers with EPERM.
            Err(Errno::NOSYS | Errno::PERM) => LACKS_PWAIT2.store(true, Ordering::Relaxed),
            result => return result,
        }
    }
    epoll_wait_ms(epoll, into, timeout)
}

/// Whether the duration is not a whole number of milliseconds.
fn has_part_of_ms(time: Duration) -> bool {
    !time.subsec_nanos().is_multiple_of(1_000_000)
}

/// Waits with a timeout in milliseconds. `rustix` rounds the timeout up.
fn epoll_wait_ms(
    epoll: BorrowedFd<'_>,
    into: &mut [epoll::Event],
    timeout: Option<Duration>,
) -> Result<usize, Errno> {
    let timeout = timeout.map(|time| timespec(time.min(TIMEOUT_MAX)));
    epoll::wait(epoll, into, timeout.as_ref())
}

/// The duration in the kernel's format. A duration that is too long becomes the longest possible one.
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
    // The call is made by its number, because older C libraries lack the function.
    // SAFETY: the arguments are those of the kernel: epfd, events, maxevents, timeout, sigmask,
    // sigsetsize. The event of `rustix` has the layout of the kernel's event. `into` and `time` outlive
    // the call, and there is no signal mask.
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
    const BOTH: [Wait; 2] = [epoll_wait, epoll_wait_ms];

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

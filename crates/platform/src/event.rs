//! Event descriptors (`eventfd`): one thread, or the kernel, wakes another that waits for
//! descriptors.

use std::io;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd, RawFd};

use rustix::event::{EventfdFlags, eventfd};

/// A descriptor that is readable from the first [`signal`](Self::signal) until
/// [`clear`](Self::clear). Non-blocking, and closed in programs that this one starts.
#[derive(Debug)]
pub struct EventFd(OwnedFd);

impl EventFd {
    /// A descriptor that is not readable yet.
    ///
    /// # Errors
    /// The process or the system has no descriptors left.
    pub fn new() -> io::Result<Self> {
        Ok(Self(eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK)?))
    }

    /// Makes the descriptor readable.
    pub fn signal(&self) {
        // The only possible failure is a full counter (EAGAIN), and then it is readable anyway.
        let _ = rustix::io::write(&self.0, &1u64.to_ne_bytes());
    }

    /// Makes the descriptor unreadable until the next [`signal`](Self::signal).
    pub fn clear(&self) {
        // The only possible failure is an empty counter (EAGAIN), which is the intended result.
        let _ = rustix::io::read(&self.0, &mut [0u8; 8]);
    }
}

impl AsFd for EventFd {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.0.as_fd()
    }
}

impl AsRawFd for EventFd {
    fn as_raw_fd(&self) -> RawFd {
        self.0.as_raw_fd()
    }
}

#[cfg(test)]
mod tests {
    use rustix::event::{PollFd, PollFlags, Timespec, poll};

    use super::*;

    fn is_readable(event: &EventFd) -> bool {
        let now = Timespec { tv_sec: 0, tv_nsec: 0 };
        poll(&mut [PollFd::new(event, PollFlags::IN)], Some(&now)).unwrap() == 1
    }

    #[test]
    fn it_is_readable_until_it_is_cleared() {
        let event = EventFd::new().unwrap();
        assert!(!is_readable(&event));
        event.clear();
        event.signal();
        event.signal();
        assert!(is_readable(&event) && is_readable(&event));
        event.clear();
        assert!(!is_readable(&event));
        event.signal();
        assert!(is_readable(&event));
    }
}

//! Event descriptors: how a completion wakes a sleeping reactor.

use std::io;
use std::os::fd::OwnedFd;

use rustix::event::{EventfdFlags, eventfd};

/// A nonblocking event descriptor with count 0.
pub(crate) fn new() -> io::Result<OwnedFd> {
    Ok(eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK)?)
}

/// Makes it readable.
pub(crate) fn signal(fd: &OwnedFd) {
    // The only possible failure is a full counter (EAGAIN), and then it is readable anyway.
    let _ = rustix::io::write(fd, &1u64.to_ne_bytes());
}

//! Event descriptors: how a completion wakes a sleeping reactor.

use std::io;
use std::os::fd::{AsRawFd, FromRawFd, OwnedFd};

/// A nonblocking event descriptor with count 0.
pub(crate) fn new() -> io::Result<OwnedFd> {
    // SAFETY: no pointers.
    let fd = unsafe { libc::eventfd(0, libc::EFD_CLOEXEC | libc::EFD_NONBLOCK) };
    if fd < 0 {
        return Err(io::Error::last_os_error());
    }
    // SAFETY: a descriptor just made, and nobody else's.
    Ok(unsafe { OwnedFd::from_raw_fd(fd) })
}

/// Makes it readable.
pub(crate) fn signal(fd: &OwnedFd) {
    let one = 1u64.to_ne_bytes();
    // SAFETY: eight readable bytes. The only possible failure is a full counter (EAGAIN), and
    // then it is readable anyway.
    unsafe { libc::write(fd.as_raw_fd(), one.as_ptr().cast(), one.len()) };
}

//! What [`owned`](super::owned) and [`wake`](super::wake) are made of; their model checks put a
//! checker's in its place.

use std::cell::UnsafeCell;
use std::io;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, FromRawFd, OwnedFd};
pub(crate) use std::sync::atomic::{AtomicBool, Ordering};

/// The value of an [`Owned`](super::owned::Owned).
#[derive(Debug)]
pub(crate) struct Cell<T>(UnsafeCell<T>);

impl<T> Cell<T> {
    pub(crate) const fn new(value: T) -> Self {
        Self(UnsafeCell::new(value))
    }

    #[inline]
    pub(crate) const fn access(&self) -> Access<T> {
        Access(self.0.get())
    }
}

/// A use of the value.
#[derive(Debug)]
pub(crate) struct Access<T>(*mut T);

impl<T> Access<T> {
    #[inline]
    pub(crate) const fn get(&self) -> *mut T {
        self.0
    }
}

/// Waits a little for another thread's turn to end: at first as on another core, then as on this.
#[inline]
pub(crate) fn relax(turns: u32) {
    if turns < 64 {
        std::hint::spin_loop();
    } else {
        std::thread::yield_now();
    }
}

/// Readable from the first [`ring`](Self::ring) until [`silence`](Self::silence).
#[derive(Debug)]
pub(crate) struct Event(OwnedFd);

impl Event {
    pub(crate) fn new() -> io::Result<Self> {
        // SAFETY: takes two numbers, returns a new descriptor or -1.
        let fd = unsafe { libc::eventfd(0, libc::EFD_CLOEXEC | libc::EFD_NONBLOCK) };
        if fd < 0 {
            return Err(io::Error::last_os_error());
        }
        // SAFETY: new, hence nobody else's.
        Ok(Self(unsafe { OwnedFd::from_raw_fd(fd) }))
    }

    pub(crate) fn ring(&self) {
        let one = 1u64.to_ne_bytes();
        // SAFETY: the descriptor is open and the eight bytes outlive the call. It can only fail
        // when the counter is full, and then it rings.
        unsafe { libc::write(self.0.as_raw_fd(), one.as_ptr().cast(), one.len()) };
    }

    pub(crate) fn silence(&self) {
        let mut count = [0u8; 8];
        // SAFETY: the descriptor is open and the eight bytes outlive the call. An empty counter
        // (EAGAIN) is fine.
        unsafe { libc::read(self.0.as_raw_fd(), count.as_mut_ptr().cast(), count.len()) };
    }
}

impl AsFd for Event {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.0.as_fd()
    }
}

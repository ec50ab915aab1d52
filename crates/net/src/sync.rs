//! The primitives below [`owned`](super::owned) and [`wake`](super::wake). Their model checks
//! replace them by those of a checker.

use std::cell::UnsafeCell;
pub(crate) use std::sync::atomic::{AtomicBool, AtomicU8, Ordering};

pub(crate) use riopipe_platform::EventFd as Event;

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

/// Access to the value.
#[derive(Debug)]
pub(crate) struct Access<T>(*mut T);

impl<T> Access<T> {
    #[inline]
    pub(crate) const fn get(&self) -> *mut T {
        self.0
    }
}

/// Waits briefly for another thread's turn to end: at first as if it ran on another core, then as
/// if on this one.
#[inline]
pub(crate) fn relax(turns: u32) {
    if turns < 64 {
        std::hint::spin_loop();
    } else {
        std::thread::yield_now();
    }
}

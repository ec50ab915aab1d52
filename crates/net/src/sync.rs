//! The primitives of [`owned`](super::owned) and [`wake`](super::wake). A model check compiles those
//! files with the primitives of a model checker instead.

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

/// A pointer to the value. While one exists, the model checker reports accesses of other threads.
#[derive(Debug)]
pub(crate) struct Access<T>(*mut T);

impl<T> Access<T> {
    #[inline]
    pub(crate) const fn get(&self) -> *mut T {
        self.0
    }
}

/// The number of attempts for which [`relax`] assumes that the other thread runs on another core.
const SPIN_ATTEMPTS: u32 = 64;

/// Pauses between two attempts to take the value; `attempts` is the number of attempts so far. The
/// first pauses leave the core to no other thread. If the other thread has not ended its turn by then,
/// it may need this core, so the later pauses yield the core.
#[inline]
pub(crate) fn relax(attempts: u32) {
    if attempts < SPIN_ATTEMPTS {
        std::hint::spin_loop();
    } else {
        std::thread::yield_now();
    }
}

//! What [`owned`](super::owned) is made of; its model check puts a checker's in its place.

use std::cell::UnsafeCell;
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

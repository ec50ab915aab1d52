//! A value that threads use in turns: one flag says whether it is taken.
//!
//! The owner takes it for each of its calls; a background thread takes it only when it is free.
//! Unlike with a mutex, no thread ever sleeps for it: each releases it after a bounded turn. Taking
//! is one compare-and-swap, releasing one store.
//!
//! `tests/owned.rs` compiles this file with a model checker's atomics and tries every
//! interleaving.

use super::sync::{Access, AtomicBool, Cell, Ordering, relax};

/// A `T` behind an ownership flag.
#[derive(Debug)]
pub struct Owned<T> {
    taken: AtomicBool,
    value: Cell<T>,
}

// SAFETY: a reference to the value exists only within a `Taken`; `taken` lets there be one at a
// time (acquired by compare-and-swap), and what one thread did with the value happens before the
// next thread's turn (release store, acquire load). So sharing an `Owned` is sending the value
// back and forth, which `T: Send` allows.
unsafe impl<T: Send> Sync for Owned<T> {}

impl<T> Owned<T> {
    /// A value that no thread has taken.
    pub fn new(value: T) -> Self {
        Self { taken: AtomicBool::new(false), value: Cell::new(value) }
    }

    /// Takes the value if it is free.
    #[inline]
    pub fn try_take(&self) -> Option<Taken<'_, T>> {
        let claimed =
            self.taken.compare_exchange(false, true, Ordering::Acquire, Ordering::Relaxed);
        claimed.is_ok().then(|| Taken { owned: self, access: Some(self.value.access()) })
    }

    /// Takes the value; waits until the thread that has it ends its turn.
    #[inline]
    pub fn take(&self) -> Taken<'_, T> {
        let mut turns = 0;
        loop {
            if let Some(taken) = self.try_take() {
                return taken;
            }
            relax(turns);
            turns += 1;
        }
    }
}

/// The value during a turn; dropping this releases it.
#[derive(Debug)]
#[must_use = "dropped at once, it is given back at once"]
pub struct Taken<'a, T> {
    owned: &'a Owned<T>,
    /// `Some` until the drop.
    access: Option<Access<T>>,
}

impl<T> core::ops::Deref for Taken<'_, T> {
    type Target = T;

    #[inline]
    fn deref(&self) -> &T {
        let access = self.access.as_ref().expect("there until the drop");
        // SAFETY: the flag is ours (see `Sync` above), so no other reference to the value exists
        // but those derived from this `Taken`, which Rust's own rules keep apart.
        unsafe { &*access.get() }
    }
}

impl<T> core::ops::DerefMut for Taken<'_, T> {
    #[inline]
    fn deref_mut(&mut self) -> &mut T {
        let access = self.access.as_ref().expect("there until the drop");
        // SAFETY: as in `deref`; `&mut self` is the only way to this reference.
        unsafe { &mut *access.get() }
    }
}

impl<T> Drop for Taken<'_, T> {
    #[inline]
    fn drop(&mut self) {
        // The access ends before another thread can begin one.
        self.access = None;
        self.owned.taken.store(false, Ordering::Release);
    }
}

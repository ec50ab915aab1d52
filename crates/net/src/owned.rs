//! A value that threads use in turns: one flag shows whether it is taken.
//!
//! The owner takes it for each of its calls; a background thread takes it only when it is free.
//! Unlike with a mutex, no thread ever sleeps for it: each releases it after a bounded turn. Taking
//! is one compare-and-swap, releasing one swap.
//!
//! A thread that finds the value taken may leave a request. The thread that has the value learns of
//! the request at the end of its turn, and informs the other thread.
//!
//! `tests/owned.rs` compiles this file with a model checker's atomics and tries every
//! interleaving.

use super::sync::{Access, AtomicU8, Cell, Ordering, relax};

/// No thread has the value.
const FREE: u8 = 0;
/// A thread has it.
const TAKEN: u8 = 1;
/// A thread has it, and another has left a request.
const ASKED_FOR: u8 = 2;

/// A `T` behind an ownership flag.
#[derive(Debug)]
pub struct Owned<T> {
    state: AtomicU8,
    value: Cell<T>,
}

// SAFETY: a reference to the value exists only within a `Taken`; `state` lets there be one at a
// time (acquired by compare-and-swap), and what one thread did with the value happens before the
// next thread's turn (release swap, acquire load). So sharing an `Owned` is sending the value
// back and forth, which `T: Send` allows.
unsafe impl<T: Send> Sync for Owned<T> {}

impl<T> Owned<T> {
    /// A value that no thread has taken.
    pub fn new(value: T) -> Self {
        Self { state: AtomicU8::new(FREE), value: Cell::new(value) }
    }

    /// Takes the value if it is free.
    #[inline]
    pub fn try_take(&self) -> Option<Taken<'_, T>> {
        let claimed =
            self.state.compare_exchange(FREE, TAKEN, Ordering::Acquire, Ordering::Relaxed);
        claimed.is_ok().then(|| Taken { owned: self, access: Some(self.value.access()) })
    }

    /// Takes the value if it is free; otherwise leaves a request for the thread that has it:
    /// [`Taken::end`] returns true there, at the end of the present turn.
    pub fn take_or_ask(&self) -> Option<Taken<'_, T>> {
        loop {
            if let Some(taken) = self.try_take() {
                return Some(taken);
            }
            let asked =
                self.state.compare_exchange(TAKEN, ASKED_FOR, Ordering::AcqRel, Ordering::Acquire);
            // It may have become free in between. Any other state is a request, left now or before.
            if asked != Err(FREE) {
                return None;
            }
        }
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

/// The value during a turn. Dropping this releases it, and forgets a request that was left.
#[derive(Debug)]
#[must_use = "dropped at once, it is free at once"]
pub struct Taken<'a, T> {
    owned: &'a Owned<T>,
    /// `Some` until the drop.
    access: Option<Access<T>>,
}

impl<T> Taken<'_, T> {
    /// Ends the turn. Returns whether another thread has left a request meanwhile
    /// ([`Owned::take_or_ask`]). That thread is to be informed that the value is free.
    #[inline]
    #[must_use = "another thread may have to be informed"]
    pub fn end(mut self) -> bool {
        self.release()
    }

    #[inline]
    fn release(&mut self) -> bool {
        // The access ends before another thread can begin one; and it ends once.
        self.access.take().is_some() && self.owned.state.swap(FREE, Ordering::AcqRel) == ASKED_FOR
    }
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
        self.release();
    }
}

//! A value that threads use in turns. An *ownership flag* shows whether a thread has taken it.
//!
//! The owner takes the value for each of its calls. A background thread takes it only while it is
//! free. In contrast to a mutex, no thread sleeps until the value is free: a thread that must wait
//! spins, because each turn is bounded. To take the value costs one compare-and-swap, to release it
//! one swap.
//!
//! A thread that finds the value taken may leave a request. At the end of the present turn,
//! [`Taken::end`] reports the request, and the caller informs the other thread.
//!
//! ```text
//!           take                take_or_request
//!   FREE ─────────▶ TAKEN ──────────────────────▶ REQUESTED
//!     ▲  end, drop    │                               │
//!     └───────────────┴───────────────────────────────┘
//! ```
//!
//! A model checker compiles this file with its own atomics, and tries every interleaving
//! (`tests/owned.rs`).

use super::sync::{Access, AtomicU8, Cell, Ordering, relax};

/// No thread has the value.
const FREE: u8 = 0;
/// A thread has it.
const TAKEN: u8 = 1;
/// A thread has it, and another thread has left a request.
const REQUESTED: u8 = 2;

/// A `T` behind an ownership flag.
#[derive(Debug)]
pub struct Owned<T> {
    flag: AtomicU8,
    value: Cell<T>,
}

// SAFETY: a reference to the value exists only within a `Taken`, and the flag allows one `Taken` at a
// time. The accesses of one turn happen before the next turn, because the swap at the end of a turn
// releases, and the compare-and-swap at the beginning of a turn acquires. So sharing an `Owned` is the
// same as sending the value between threads, which `T: Send` allows.
unsafe impl<T: Send> Sync for Owned<T> {}

impl<T> Owned<T> {
    /// A value that no thread has taken.
    pub fn new(value: T) -> Self {
        Self { flag: AtomicU8::new(FREE), value: Cell::new(value) }
    }

    /// Takes the value if it is free.
    #[inline]
    pub fn try_take(&self) -> Option<Taken<'_, T>> {
        let taken = self.flag.compare_exchange(FREE, TAKEN, Ordering::Acquire, Ordering::Relaxed);
        taken.is_ok().then(|| Taken { owned: self, access: Some(self.value.access()) })
    }

    /// Takes the value if it is free. Otherwise leaves a request: [`Taken::end`] of the present turn
    /// then returns true.
    pub fn take_or_request(&self) -> Option<Taken<'_, T>> {
        loop {
            if let Some(taken) = self.try_take() {
                return Some(taken);
            }
            let requested =
                self.flag.compare_exchange(TAKEN, REQUESTED, Ordering::AcqRel, Ordering::Acquire);
            // The exchange fails if the value has become free since `try_take`, or if there is a
            // request already. Only in the first case the loop tries again.
            let has_become_free = requested == Err(FREE);
            if !has_become_free {
                return None;
            }
        }
    }

    /// Takes the value. If another thread has it, spins until that thread ends its turn.
    #[inline]
    pub fn take(&self) -> Taken<'_, T> {
        let mut attempts = 0;
        loop {
            if let Some(taken) = self.try_take() {
                return taken;
            }
            relax(attempts);
            attempts += 1;
        }
    }
}

/// The value during a turn. Its drop ends the turn, and ignores a request.
#[derive(Debug)]
#[must_use = "dropped at once, it is free at once"]
pub struct Taken<'a, T> {
    owned: &'a Owned<T>,
    /// `Some` until the end of the turn.
    access: Option<Access<T>>,
}

impl<T> Taken<'_, T> {
    /// Ends the turn. Returns whether another thread has left a request during the turn
    /// ([`Owned::take_or_request`]). The caller must inform that thread that the value is free.
    #[inline]
    #[must_use = "another thread may have to be informed"]
    pub fn end(mut self) -> bool {
        self.release()
    }

    #[inline]
    fn release(&mut self) -> bool {
        // This ends the access before the swap, because the next turn may begin right after the swap.
        let is_first_call = self.access.take().is_some();
        // `end` and `drop` both call this. Only the first call may release the value, because another
        // thread may have it by the second call.
        is_first_call && self.owned.flag.swap(FREE, Ordering::AcqRel) == REQUESTED
    }
}

impl<T> core::ops::Deref for Taken<'_, T> {
    type Target = T;

    #[inline]
    fn deref(&self) -> &T {
        let access = self.access.as_ref().expect("there until the end of the turn");
        // SAFETY: only this `Taken` has the flag (see `Sync` above). So all references to the value come
        // from this `Taken`, and the borrow of `self` keeps them apart.
        unsafe { &*access.get() }
    }
}

impl<T> core::ops::DerefMut for Taken<'_, T> {
    #[inline]
    fn deref_mut(&mut self) -> &mut T {
        let access = self.access.as_ref().expect("there until the end of the turn");
        // SAFETY: only this `Taken` has the flag (see `Sync` above). `&mut self` shows that no other
        // reference from this `Taken` is in use.
        unsafe { &mut *access.get() }
    }
}

impl<T> Drop for Taken<'_, T> {
    #[inline]
    fn drop(&mut self) {
        self.release();
    }
}

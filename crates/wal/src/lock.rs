//! The lock of state that threads share.

use std::sync::{Mutex, MutexGuard, PoisonError};

/// Locks. A panic of another thread that held the lock leaves the value consistent here.
pub(crate) fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

//! The locks and atomic numbers of the file system. This is the only module that names the standard
//! library.
//!
//! A thread that panics while it has a lock poisons nothing: the structures that the locks protect
//! are changed in steps that can't panic, or are checked again by their next user.
//!
//! With the feature `shuttle` they are those of the crate of that name, which decides at each of
//! their calls which thread goes on. They work in its tests only (`tests/shuttle`).

extern crate std;

#[cfg(feature = "shuttle")]
#[path = "sync/scheduled.rs"]
mod imp;
#[cfg(not(feature = "shuttle"))]
#[path = "sync/system.rs"]
mod imp;

use std::sync::{PoisonError, TryLockError};

#[cfg(all(debug_assertions, not(feature = "shuttle")))]
pub use self::imp::pause_at_locks;
pub use self::imp::{MutexGuard, ReadGuard, WriteGuard, atomic};

/// A lock for one thread at a time.
#[derive(Debug, Default)]
pub struct Mutex<T>(imp::Mutex<T>);

impl<T> Mutex<T> {
    /// A lock of `value`.
    pub const fn new(value: T) -> Self {
        Self(imp::Mutex::new(value))
    }

    /// Waits for the lock.
    pub fn lock(&self) -> MutexGuard<'_, T> {
        imp::maybe_pause();
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// The value, of a lock that no other thread has.
    pub fn get_mut(&mut self) -> &mut T {
        self.0.get_mut().unwrap_or_else(PoisonError::into_inner)
    }

    /// The value itself.
    pub fn into_inner(self) -> T {
        self.0.into_inner().unwrap_or_else(PoisonError::into_inner)
    }
}

/// A lock for many readers or one writer.
#[derive(Debug, Default)]
pub struct RwLock<T>(imp::RwLock<T>);

impl<T> RwLock<T> {
    /// A lock of `value`.
    pub const fn new(value: T) -> Self {
        Self(imp::RwLock::new(value))
    }

    /// Waits until no thread writes. It may also wait for a thread that waits to write, so a thread
    /// that has the lock must not take it again.
    pub fn read(&self) -> ReadGuard<'_, T> {
        imp::maybe_pause();
        self.0.read().unwrap_or_else(PoisonError::into_inner)
    }

    /// As [`read`](Self::read), without waiting; `None`: another thread writes, or waits to write.
    pub fn try_read(&self) -> Option<ReadGuard<'_, T>> {
        match self.0.try_read() {
            Ok(guard) => Some(guard),
            Err(TryLockError::Poisoned(poisoned)) => Some(poisoned.into_inner()),
            Err(TryLockError::WouldBlock) => None,
        }
    }

    /// Waits until no other thread reads or writes.
    pub fn write(&self) -> WriteGuard<'_, T> {
        imp::maybe_pause();
        self.0.write().unwrap_or_else(PoisonError::into_inner)
    }
}

//! The locks of the file system. This is the only module that names the standard library.
//!
//! A thread that panics while it has a lock poisons nothing: the structures that the locks protect
//! are changed in steps that can't panic, or are checked again by their next user.

extern crate std;

#[cfg(debug_assertions)]
use core::sync::atomic::{AtomicU64, Ordering};
pub use std::sync::Arc;
use std::sync::{self, PoisonError};

/// The pauses of [`pause_at_locks`], and a random number; 0: there are none.
#[cfg(debug_assertions)]
static PAUSES: AtomicU64 = AtomicU64::new(0);

/// From now on threads pause at random before they take a lock, so that tests with many threads see
/// more orders of events; with seed 0 they do not any more. Only builds with debug assertions have
/// it.
#[cfg(debug_assertions)]
pub fn pause_at_locks(seed: u64) {
    PAUSES.store(if seed == 0 { 0 } else { seed | 1 }, Ordering::Relaxed);
}

fn maybe_pause() {
    #[cfg(debug_assertions)]
    {
        let random = PAUSES.load(Ordering::Relaxed);
        if random == 0 {
            return;
        }
        let random = random.wrapping_mul(0x5851_f42d_4c95_7f2d).wrapping_add(0x1405_7b7e_f767_814e);
        PAUSES.store(random | 1, Ordering::Relaxed);
        match random >> 54 {
            0..8 => std::thread::sleep(std::time::Duration::from_micros(random >> 40 & 0xff)),
            8..128 => std::thread::yield_now(),
            _ => {}
        }
    }
}

/// A lock for one thread at a time.
#[derive(Debug, Default)]
pub struct Mutex<T>(sync::Mutex<T>);

/// The guard of a [`Mutex`].
pub type MutexGuard<'a, T> = sync::MutexGuard<'a, T>;

impl<T> Mutex<T> {
    /// A lock of `value`.
    pub const fn new(value: T) -> Self {
        Self(sync::Mutex::new(value))
    }

    /// Waits for the lock.
    pub fn lock(&self) -> MutexGuard<'_, T> {
        maybe_pause();
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
pub struct RwLock<T>(sync::RwLock<T>);

/// The guard of a reader.
pub type ReadGuard<'a, T> = sync::RwLockReadGuard<'a, T>;
/// The guard of the writer.
pub type WriteGuard<'a, T> = sync::RwLockWriteGuard<'a, T>;

impl<T> RwLock<T> {
    /// A lock of `value`.
    pub const fn new(value: T) -> Self {
        Self(sync::RwLock::new(value))
    }

    /// Waits until no thread writes.
    pub fn read(&self) -> ReadGuard<'_, T> {
        maybe_pause();
        self.0.read().unwrap_or_else(PoisonError::into_inner)
    }

    /// As [`read`](Self::read), without waiting; `None`: another thread writes.
    pub fn try_read(&self) -> Option<ReadGuard<'_, T>> {
        match self.0.try_read() {
            Ok(guard) => Some(guard),
            Err(sync::TryLockError::Poisoned(poisoned)) => Some(poisoned.into_inner()),
            Err(sync::TryLockError::WouldBlock) => None,
        }
    }

    /// Waits until no other thread reads or writes.
    pub fn write(&self) -> WriteGuard<'_, T> {
        maybe_pause();
        self.0.write().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Wakes threads that wait for a change under a [`Mutex`].
#[derive(Debug, Default)]
pub struct Condvar(sync::Condvar);

impl Condvar {
    /// No thread waits.
    #[must_use]
    pub const fn new() -> Self {
        Self(sync::Condvar::new())
    }

    /// Releases the lock, waits for a notification, and takes the lock again.
    pub fn wait<'a, T>(&self, guard: MutexGuard<'a, T>) -> MutexGuard<'a, T> {
        self.0.wait(guard).unwrap_or_else(PoisonError::into_inner)
    }

    /// Wakes all threads that wait.
    pub fn notify_all(&self) {
        self.0.notify_all();
    }
}

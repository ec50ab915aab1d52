//! The locks of `shuttle`: a scheduler of its own decides which thread goes on.

use core::sync::atomic::AtomicUsize;
use core::sync::atomic::Ordering::Relaxed;
use std::sync::{LockResult, TryLockResult};

pub(super) use shuttle::sync::Mutex;
pub use shuttle::sync::{
    MutexGuard, RwLockReadGuard as ReadGuard, RwLockWriteGuard as WriteGuard, atomic,
};

use super::std;

/// Each call of a lock is a point of the schedule already.
pub(super) const fn maybe_pause() {}

/// A lock for many readers or one writer. As with that of the system, a reader may wait behind a
/// writer that waits itself, or overtake it: chance decides. So deadlocks that only occur in one of
/// the ways are found.
#[derive(Debug, Default)]
pub(super) struct RwLock<T> {
    lock: shuttle::sync::RwLock<T>,
    /// The writers that wait, and the one that has the lock. It changes between points of the
    /// schedule only.
    writers: AtomicUsize,
    /// A writer that waits for the readers has it.
    turn: Mutex<()>,
}

impl<T> RwLock<T> {
    pub(super) const fn new(value: T) -> Self {
        let lock = shuttle::sync::RwLock::new(value);
        Self { lock, writers: AtomicUsize::new(0), turn: Mutex::new(()) }
    }

    pub(super) fn read(&self) -> LockResult<ReadGuard<'_, T>> {
        use shuttle::rand::Rng;
        if self.writers.load(Relaxed) > 0 && shuttle::rand::thread_rng().r#gen() {
            drop(self.turn.lock());
        }
        self.lock.read()
    }

    pub(super) fn try_read(&self) -> TryLockResult<ReadGuard<'_, T>> {
        self.lock.try_read()
    }

    pub(super) fn write(&self) -> LockResult<WriteGuard<'_, T>> {
        self.writers.fetch_add(1, Relaxed);
        let turn = self.turn.lock();
        let guard = self.lock.write();
        self.writers.fetch_sub(1, Relaxed);
        drop(turn);
        guard
    }
}

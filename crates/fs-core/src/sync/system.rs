//! The locks of the system.

#[cfg(debug_assertions)]
use core::sync::atomic::{AtomicU64, Ordering};
pub(super) use std::sync::{Mutex, RwLock};
pub use std::sync::{
    MutexGuard, RwLockReadGuard as ReadGuard, RwLockWriteGuard as WriteGuard, atomic,
};

use super::std;

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

pub(super) fn maybe_pause() {
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

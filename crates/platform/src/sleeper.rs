//! A thread that waits for a [`Waker`](std::task::Waker), and the wakes themselves.

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::{Arc, Condvar, Mutex, PoisonError};
use std::task::{Wake, Waker};
use std::time::Duration;

/// The sleep of a thread that blocks in a wait. It does not use park and unpark: other code may park
/// the same thread, and depend on each unpark.
///
/// `Waker::from(sleeper)`, with the sleeper in an [`Arc`], is the waker that ends the sleep.
#[derive(Debug, Default)]
pub struct Sleeper {
    woken: Mutex<bool>,
    changed: Condvar,
}

impl Sleeper {
    /// Sleeps until it is woken, for `most` at most; `None` means without limit. A wake before the
    /// call ends the sleep at once. Several wakes before that count as one.
    pub fn sleep(&self, most: Option<Duration>) {
        let woken = self.woken.lock().unwrap_or_else(PoisonError::into_inner);
        let sleeps = |woken: &mut bool| !*woken;
        let mut woken = match most {
            None => self.changed.wait_while(woken, sleeps).unwrap_or_else(PoisonError::into_inner),
            Some(most) => {
                let waited = self.changed.wait_timeout_while(woken, most, sleeps);
                waited.unwrap_or_else(PoisonError::into_inner).0
            }
        };
        *woken = false;
    }
}

impl Wake for Sleeper {
    fn wake(self: Arc<Self>) {
        *self.woken.lock().unwrap_or_else(PoisonError::into_inner) = true;
        self.changed.notify_one();
    }
}

/// Wakes waiters, and returns the number of wakers that have panicked. A waker may run any code, so
/// the caller must have no lock. A waker that panics affects neither the other waiters nor this
/// thread.
#[must_use = "the program's log must tell of wakers that have panicked"]
pub fn wake_all(waiters: impl IntoIterator<Item = Waker>) -> usize {
    // By value: a waker may also panic when it is dropped.
    let panics = |waiter: Waker| catch_unwind(AssertUnwindSafe(|| waiter.wake())).is_err();
    waiters.into_iter().map(panics).filter(|panicked| *panicked).count()
}

#[cfg(test)]
mod tests {
    use std::thread;
    use std::time::Instant;

    use super::*;

    const LONG: Duration = Duration::from_secs(60);
    const SHORT: Duration = Duration::from_millis(20);

    #[test]
    fn a_sleep_ends_with_a_wake_or_with_its_time() {
        let sleeper = Arc::new(Sleeper::default());
        let waker = Waker::from(Arc::clone(&sleeper));
        let since = Instant::now();
        waker.wake_by_ref();
        waker.wake_by_ref();
        sleeper.sleep(None);
        // Both wakes were one: the next sleep lasts.
        sleeper.sleep(Some(SHORT));
        assert!(since.elapsed() >= SHORT);
        for most in [None, Some(LONG)] {
            let waker = waker.clone();
            let other = thread::spawn(move || {
                thread::sleep(SHORT);
                waker.wake();
            });
            sleeper.sleep(most);
            other.join().unwrap();
        }
        // Other code's unpark neither ends a sleep nor is taken by one.
        thread::current().unpark();
        let before = Instant::now();
        sleeper.sleep(Some(SHORT));
        assert!(before.elapsed() >= SHORT);
        thread::park_timeout(LONG);
        assert!(since.elapsed() < LONG, "the token was lost");
    }

    struct Panicking;

    impl Wake for Panicking {
        fn wake(self: Arc<Self>) {
            panic!("a waker that panics on purpose");
        }
    }

    #[test]
    fn a_waker_that_panics_affects_no_other_waiter() {
        let sleeper = Arc::new(Sleeper::default());
        let panicking = Waker::from(Arc::new(Panicking));
        let all = [panicking.clone(), Waker::from(Arc::clone(&sleeper)), panicking];
        assert_eq!(wake_all(all), 2);
        sleeper.sleep(None);
    }
}

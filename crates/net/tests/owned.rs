//! The ownership flag under a model checker: every interleaving of two threads, and every value
//! that the memory model allows a load to return. The file under test is compiled unchanged, with
//! the checker's atomics.

#[allow(unreachable_pub)]
#[path = "../src/owned.rs"]
mod owned;

mod sync {
    pub(crate) use loom::sync::atomic::{AtomicU8, Ordering};

    #[derive(Debug)]
    pub(crate) struct Cell<T>(loom::cell::UnsafeCell<T>);

    impl<T> Cell<T> {
        pub(crate) fn new(value: T) -> Self {
            Self(loom::cell::UnsafeCell::new(value))
        }

        pub(crate) fn access(&self) -> Access<T> {
            Access(self.0.get_mut())
        }
    }

    /// The checker stops on two accesses at a time, or on one that does not happen after the last.
    #[derive(Debug)]
    pub(crate) struct Access<T>(loom::cell::MutPtr<T>);

    impl<T> Access<T> {
        pub(crate) fn get(&self) -> *mut T {
            self.0.with(|pointer| pointer)
        }
    }

    pub(crate) fn relax(_: u32) {
        loom::thread::yield_now();
    }
}

use loom::sync::Arc;
use loom::thread;
use owned::Owned;

/// Each turn sees the writes of the one before, by either thread; one of them takes the value only
/// when it is free.
#[test]
fn turns_never_overlap_and_follow_one_another() {
    loom::model(|| {
        let owned = Arc::new(Owned::new((0u32, 0u32)));
        let caretaker = {
            let owned = Arc::clone(&owned);
            thread::spawn(move || {
                let mut turns = 0;
                for _ in 0..2 {
                    if let Some(mut pair) = owned.try_take() {
                        assert_eq!(pair.0, pair.1, "an unfinished turn");
                        pair.0 += 1;
                        pair.1 += 1;
                        turns += 1;
                    }
                }
                turns
            })
        };
        for _ in 0..2 {
            let mut pair = owned.take();
            assert_eq!(pair.0, pair.1, "an unfinished turn");
            pair.0 += 1;
            pair.1 += 1;
        }
        let turns = caretaker.join().unwrap();
        assert_eq!(*owned.take(), (2 + turns, 2 + turns));
    });
}

/// A thread that leaves a request is informed at the end of the present turn, or has taken the
/// value.
#[test]
fn p8_a_request_that_was_left_is_found_at_the_end_of_the_turn() {
    loom::model(|| {
        let owned = Arc::new(Owned::new(0));
        let informed = Arc::new(loom::sync::atomic::AtomicBool::new(false));
        let owner = {
            let (owned, informed) = (Arc::clone(&owned), Arc::clone(&informed));
            thread::spawn(move || {
                for _ in 0..2 {
                    let mut value = owned.take();
                    *value += 1;
                    if value.end() {
                        informed.store(true, loom::sync::atomic::Ordering::Release);
                    }
                }
            })
        };
        let took = owned.take_or_request().map(|taken| {
            assert!(!taken.end(), "no other thread leaves a request");
        });
        owner.join().unwrap();
        assert_ne!(took.is_some(), informed.load(loom::sync::atomic::Ordering::Acquire));
        assert_eq!(*owned.take(), 2);
    });
}

/// A turn that ends in a panic is over, too: the next one may begin.
#[test]
fn a_panic_releases_the_value() {
    loom::model(|| {
        let owned = Owned::new(1);
        let panicked = std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| {
            let _taken = owned.take();
            assert!(owned.try_take().is_none());
            std::panic::resume_unwind(Box::new(()));
        }));
        assert!(panicked.is_err());
        assert_eq!(*owned.take(), 1);
    });
}

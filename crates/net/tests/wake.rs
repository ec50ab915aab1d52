//! The waker under a model checker, with a mailbox beside it as threads use the two: every
//! interleaving of two that leave something and one that takes it.

#[allow(unreachable_pub)]
#[path = "../src/wake.rs"]
mod wake;

mod sync {
    pub(crate) use loom::sync::atomic::{AtomicBool, Ordering};

    /// An event that a thread can sleep on; a descriptor in an epoll instance, else.
    #[derive(Debug)]
    pub(crate) struct Event(loom::sync::Mutex<bool>, loom::sync::Condvar);

    impl Event {
        pub(crate) fn new() -> Self {
            Self(loom::sync::Mutex::new(false), loom::sync::Condvar::new())
        }

        pub(crate) fn ring(&self) {
            *self.0.lock().unwrap() = true;
            self.1.notify_one();
        }

        pub(crate) fn silence(&self) {
            *self.0.lock().unwrap() = false;
        }

        pub(crate) fn wait(&self) {
            let mut rings = self.0.lock().unwrap();
            while !*rings {
                rings = self.1.wait(rings).unwrap();
            }
        }
    }
}

use loom::sync::{Arc, Mutex};
use loom::thread;
use sync::Event;
use wake::Wake;

/// Nothing that was left before a call is overlooked, and the listener never sleeps for good while
/// something lies there: the checker would find all threads asleep.
#[test]
fn no_call_is_lost() {
    let mut model = loom::model::Builder::new();
    model.preemption_bound = Some(3);
    model.check(|| {
        let wake = Arc::new(Wake::new(Event::new()));
        let mail = Arc::new(Mutex::new(Vec::new()));
        let posters = [&[0][..], &[1, 2]].map(|letters| {
            let (wake, mail) = (Arc::clone(&wake), Arc::clone(&mail));
            thread::spawn(move || {
                for letter in letters {
                    mail.lock().unwrap().push(*letter);
                    wake.call();
                }
            })
        });
        let mut taken = Vec::new();
        while taken.len() < 3 {
            // A busy listener looks, and does not sleep.
            if !(taken.is_empty() && wake.is_called()) {
                wake.event().wait();
            }
            wake.hear();
            taken.append(&mut mail.lock().unwrap());
        }
        taken.sort_unstable();
        assert_eq!(taken, [0, 1, 2]);
        for poster in posters {
            poster.join().unwrap();
        }
    });
}

//! The waker under a model checker, together with a mailbox, as threads use the two: every
//! interleaving of two senders and one receiver.

#[allow(unreachable_pub)]
#[path = "../src/wake.rs"]
mod wake;

mod sync {
    pub(crate) use loom::sync::atomic::{AtomicBool, Ordering};

    /// An event on which a thread can sleep; in the product a descriptor in an epoll instance.
    #[derive(Debug)]
    pub(crate) struct Event(loom::sync::Mutex<bool>, loom::sync::Condvar);

    impl Event {
        pub(crate) fn new() -> Self {
            Self(loom::sync::Mutex::new(false), loom::sync::Condvar::new())
        }

        pub(crate) fn signal(&self) {
            *self.0.lock().unwrap() = true;
            self.1.notify_one();
        }

        pub(crate) fn clear(&self) {
            *self.0.lock().unwrap() = false;
        }

        pub(crate) fn wait(&self) {
            let mut signalled = self.0.lock().unwrap();
            while !*signalled {
                signalled = self.1.wait(signalled).unwrap();
            }
        }
    }
}

use loom::sync::{Arc, Mutex};
use loom::thread;
use sync::Event;
use wake::Wake;

/// No message sent before a notification is missed, and the receiver never sleeps for good while
/// there is one: the checker would find all threads asleep.
#[test]
fn no_notification_is_lost() {
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
                    wake.notify();
                }
            })
        });
        let mut taken = Vec::new();
        while taken.len() < 3 {
            // A busy receiver checks, and does not sleep.
            if !(taken.is_empty() && wake.is_pending()) {
                wake.event().wait();
            }
            wake.receive();
            taken.append(&mut mail.lock().unwrap());
        }
        taken.sort_unstable();
        assert_eq!(taken, [0, 1, 2]);
        for poster in posters {
            poster.join().unwrap();
        }
    });
}

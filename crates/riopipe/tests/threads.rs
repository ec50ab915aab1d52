//! What crosses threads, under a model checker: every interleaving, and every value that the
//! memory model lets a load return. The files under test are compiled as they are, with the
//! checker's atomics. (The ownership flag alone, and the waker with a mailbox beside it, are
//! checked where they live, in `riopipe-net`.)

#[allow(unreachable_pub)]
#[path = "../../net/src/owned.rs"]
mod owned;
#[path = "../src/watched.rs"]
mod watched;

mod sync {
    pub(crate) use loom::sync::atomic::{AtomicBool, AtomicU64, Ordering};

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

use loom::sync::{Arc, Notify};
use loom::thread;
use owned::Owned;
use riopipe::{Marks, Seq};
use riopipe_session::initiator::stream_driver::Attention;
use watched::Watched;

fn marks(complete: u64, durable: u64) -> Marks {
    Marks { complete: Seq(complete), durable: Seq(durable) }
}

/// The owner and the background thread publish by turns; a watching thread never sees durable ahead of
/// complete, nor a mark go back, nor a mark before what it stands for.
#[test]
fn t1_marks_are_handed_over_whole() {
    let mut model = loom::model::Builder::new();
    model.preemption_bound = Some(3);
    model.check(|| {
        let watched = Arc::new(Watched::new(Seq(0)));
        let written = Arc::new(loom::cell::UnsafeCell::new(0));
        let owned = Arc::new(Owned::new(0u64));
        let watcher = {
            let (watched, written) = (Arc::clone(&watched), Arc::clone(&written));
            thread::spawn(move || {
                let first = watched.marks();
                assert!(first.durable <= first.complete);
                if first.complete >= Seq(1) {
                    // SAFETY: who sees the mark sees what was done before it, and nothing is done
                    // to it afterwards; the checker fails where that is not so.
                    written.with(|value| assert_eq!(unsafe { *value }, 7));
                }
                let second = watched.marks();
                assert!(second.durable <= second.complete);
                assert!(second.complete >= first.complete && second.durable >= first.durable);
            })
        };
        let background = {
            let (watched, owned) = (Arc::clone(&watched), Arc::clone(&owned));
            thread::spawn(move || {
                if let Some(mut complete) = owned.try_take()
                    && *complete == 1
                {
                    *complete = 2;
                    watched.publish(marks(2, 1));
                }
            })
        };
        {
            let mut complete = owned.take();
            // SAFETY: nobody reads it before the mark.
            written.with_mut(|value| unsafe { *value = 7 });
            *complete = 1;
            watched.publish(marks(1, 1));
        }
        watcher.join().unwrap();
        background.join().unwrap();
    });
}

/// A reopened stream's marks go back, and still durable is never seen ahead of complete.
#[test]
fn durable_is_never_ahead_when_a_stream_is_reopened() {
    loom::model(|| {
        let watched = Arc::new(Watched::new(Seq(3)));
        let watcher = {
            let watched = Arc::clone(&watched);
            thread::spawn(move || {
                let seen = watched.marks();
                assert!(seen.durable <= seen.complete);
                let _ = watched.has_failed();
            })
        };
        watched.publish(marks(9, 8));
        watched.publish_released(Seq(8));
        assert_eq!(watched.released(), Seq(8));
        watched.fail();
        watched.restart(Seq(5));
        assert_eq!(watched.released(), Seq(5));
        watched.publish(marks(6, 6));
        watcher.join().unwrap();
        assert!(!watched.has_failed());
        assert_eq!(watched.marks(), marks(6, 6));
    });
}

/// What both threads share of a stream.
#[derive(Default)]
struct Stream {
    attention: Attention,
    /// Left by the owner; whoever tends the stream does it.
    undone: u32,
    /// The owner will not call again.
    left: bool,
}

/// Whatever an owner leaves behind, the background thread finds, though it sleeps for good once it
/// looks after a stream that has nothing to do: an owner that calls then wakes it.
#[test]
fn p8_what_an_owner_leaves_is_found() {
    let mut model = loom::model::Builder::new();
    model.preemption_bound = Some(3);
    model.check(|| {
        let stream = Arc::new(Owned::new(Stream::default()));
        let bell = Arc::new(Notify::new());
        let owner = {
            let (stream, bell) = (Arc::clone(&stream), Arc::clone(&bell));
            thread::spawn(move || {
                for call in 0..2 {
                    let mut stream = stream.take();
                    let wake = stream.attention.called();
                    stream.undone += 1;
                    stream.left = call == 1;
                    drop(stream);
                    if wake {
                        bell.notify();
                    }
                }
            })
        };
        let mut seen = 0;
        let mut minds = false;
        loop {
            if minds {
                bell.wait();
            } else {
                // The time after which an owner is taken to be elsewhere.
                thread::yield_now();
            }
            minds = false;
            let Some(mut stream) = stream.try_take() else { continue };
            if let Some(calls) = stream.attention.look(seen) {
                seen = calls;
                continue;
            }
            stream.undone = 0;
            if stream.left {
                break;
            }
            stream.attention.mind();
            minds = true;
        }
        owner.join().unwrap();
        assert_eq!(stream.take().undone, 0);
    });
}

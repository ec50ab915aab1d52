//! State that threads share, under a model checker: it runs every interleaving, with every value that
//! the memory model allows a load to return. The files under test are compiled unchanged, with the
//! checker's atomics. (Tests in `riopipe-net` check the ownership flag alone, and the waker with a
//! mailbox beside it.)

#[allow(unreachable_pub)]
#[path = "../../net/src/owned.rs"]
mod owned;
#[allow(dead_code, reason = "some of its functions need no model check")]
#[path = "../src/published_marks.rs"]
mod published_marks;

mod sync {
    pub(crate) use loom::sync::atomic::{AtomicBool, AtomicU8, AtomicU64, Ordering, fence};
    pub(crate) use loom::sync::{Mutex, MutexGuard};

    pub(crate) fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
        mutex.lock().expect("nothing panics under it")
    }

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
use published_marks::{MarksEnd, WaitState};
use riopipe::{Marks, Seq};
use riopipe_session::initiator::stream_driver::{Attention, Mark, StreamIncarnation};
use std::task::{Wake, Waker};

/// Here a failure has no content.
type PublishedMarks = published_marks::PublishedMarks<()>;

/// The sleep of a waiter.
#[derive(Default)]
struct Sleeper(Notify);

impl Wake for Sleeper {
    fn wake(self: std::sync::Arc<Self>) {
        self.0.notify();
    }
}

/// Waits as a blocked thread does; `wake_background` wakes the background thread.
fn wait(
    published: &PublishedMarks,
    seq: u64,
    wake_background: impl Fn(),
) -> Result<Marks, MarksEnd<()>> {
    let sleeper = std::sync::Arc::new(Sleeper::default());
    let waker = Waker::from(std::sync::Arc::clone(&sleeper));
    let (mut at, incarnation) = (None, published.incarnation());
    loop {
        match published.poll_wait(Mark::Durable, Seq(seq), incarnation, at, &waker) {
            WaitState::Reached(marks) => return Ok(marks),
            WaitState::Ended(over) => return Err(over),
            WaitState::Waiting { place, wake_background: is_first, wake_driver } => {
                at = Some(place);
                if is_first || wake_driver {
                    wake_background();
                }
                sleeper.0.wait();
            }
        }
    }
}

fn wake(due: Vec<Waker>) {
    due.into_iter().for_each(Waker::wake);
}

fn marks(complete: u64, durable: u64) -> Marks {
    Marks { complete: Seq(complete), durable: Seq(durable) }
}

/// The owner and the background thread publish by turns. A watching thread never reads a durable mark
/// ahead of the complete one, a mark that goes back, or a mark before the writes that it stands for.
#[test]
fn t1_marks_are_published_whole() {
    let mut model = loom::model::Builder::new();
    model.preemption_bound = Some(3);
    model.check(|| {
        let published = Arc::new(PublishedMarks::new(Seq(0)));
        let written = Arc::new(loom::cell::UnsafeCell::new(0));
        let owned = Arc::new(Owned::new(0u64));
        let watcher = {
            let (published, written) = (Arc::clone(&published), Arc::clone(&written));
            thread::spawn(move || {
                let first = published.marks();
                assert!(first.durable <= first.complete);
                if first.complete >= Seq(1) {
                    // SAFETY: the mark is read, so the write before it has happened, and no write
                    // comes after that; the checker fails if this is not true.
                    written.with(|value| assert_eq!(unsafe { *value }, 7));
                }
                let second = published.marks();
                assert!(second.durable <= second.complete);
                assert!(second.complete >= first.complete && second.durable >= first.durable);
            })
        };
        let background = {
            let (published, owned) = (Arc::clone(&published), Arc::clone(&owned));
            thread::spawn(move || {
                if let Some(mut complete) = owned.try_take()
                    && *complete == 1
                {
                    *complete = 2;
                    wake(published.publish(marks(2, 1)));
                }
            })
        };
        {
            let mut complete = owned.take();
            // SAFETY: no thread reads it before the mark.
            written.with_mut(|value| unsafe { *value = 7 });
            *complete = 1;
            wake(published.publish(marks(1, 1)));
        }
        watcher.join().unwrap();
        background.join().unwrap();
    });
}

/// A reopened stream's marks go back. Even then no thread reads durable ahead of complete.
#[test]
fn durable_is_never_ahead_when_a_stream_is_reopened() {
    let mut model = loom::model::Builder::new();
    model.preemption_bound = Some(3);
    model.check(|| {
        let published = Arc::new(PublishedMarks::new(Seq(3)));
        let watcher = {
            let published = Arc::clone(&published);
            thread::spawn(move || {
                let incarnation = published.incarnation();
                let seen = published.marks();
                assert!(seen.durable <= seen.complete);
                let _ = published.has_failed();
                // In the second incarnation, which continues after group 5, this seq is another group
                // (P2).
                if let Some(marks) = published.marks_if_reached(Mark::Durable, Seq(6), incarnation)
                {
                    assert!(
                        marks.durable
                            >= Seq(if incarnation == StreamIncarnation(0) { 8 } else { 6 })
                    );
                }
            })
        };
        wake(published.publish(marks(9, 8)));
        published.publish_released(Seq(8));
        assert_eq!(published.released(), Seq(8));
        wake(published.record_end(MarksEnd::Failed(())));
        published.begin_incarnation(Seq(5));
        assert_eq!(published.released(), Seq(5));
        wake(published.publish(marks(6, 6)));
        watcher.join().unwrap();
        assert!(!published.has_failed());
        assert_eq!(published.marks(), marks(6, 6));
    });
}

/// A waiter enters the list while the marks reach its group: one of the two threads sees the other's
/// store, and the waiter does not sleep for ever. It also sees all stores before the mark.
#[test]
fn p8_a_mark_that_comes_while_a_waiter_enters_is_not_missed() {
    let mut model = loom::model::Builder::new();
    model.preemption_bound = Some(3);
    model.check(|| {
        let published = Arc::new(PublishedMarks::new(Seq(0)));
        let waiter = {
            let published = Arc::clone(&published);
            thread::spawn(move || {
                let seen = wait(&published, 1, || ()).unwrap();
                assert!(seen.durable >= Seq(1) && published.released() >= Seq(1));
            })
        };
        published.publish_released(Seq(1));
        wake(published.publish(marks(1, 1)));
        waiter.join().unwrap();
        assert!(!published.is_awaited());
    });
}

/// As above, for the end of the stream. A mark that was reached before the end counts.
#[test]
fn p8_the_end_of_a_stream_is_not_missed_by_a_waiter_that_enters() {
    for seq in [1, 2] {
        let mut model = loom::model::Builder::new();
        model.preemption_bound = Some(2);
        model.check(move || {
            let published = Arc::new(PublishedMarks::new(Seq(0)));
            let waiter = {
                let published = Arc::clone(&published);
                thread::spawn(move || wait(&published, seq, || ()))
            };
            wake(published.publish(marks(1, 1)));
            wake(published.record_end(MarksEnd::Dropped));
            match waiter.join().unwrap() {
                Ok(marks) => assert_eq!((seq, marks.durable), (1, Seq(1))),
                Err(over) => assert!(seq == 2 && matches!(over, MarksEnd::Dropped)),
            }
        });
    }
}

/// The part of a stream that both threads share.
#[derive(Default)]
struct Stream {
    attention: Attention,
    /// Work that the owner has left; the thread that tends the stream next does it.
    undone: u32,
    /// The owner will not call again.
    left: bool,
}

/// The background thread finds all work that an owner leaves, although it sleeps without limit while
/// it drives a stream without work: an owner that calls then wakes it.
#[test]
fn p8_work_that_an_owner_leaves_is_found() {
    let mut model = loom::model::Builder::new();
    model.preemption_bound = Some(3);
    model.check(|| {
        let stream = Arc::new(Owned::new(Stream::default()));
        let background = Arc::new(Notify::new());
        let owner = {
            let (stream, background) = (Arc::clone(&stream), Arc::clone(&background));
            thread::spawn(move || {
                for call in 0..2 {
                    let mut stream = stream.take();
                    let wake = stream.attention.called();
                    stream.undone += 1;
                    stream.left = call == 1;
                    drop(stream);
                    if wake {
                        background.notify();
                    }
                }
            })
        };
        let mut seen = 0;
        let mut minds = false;
        loop {
            if minds {
                background.wait();
            } else {
                // The time after which an owner counts as not calling.
                thread::yield_now();
            }
            minds = false;
            let Some(mut stream) = stream.try_take() else { continue };
            if let Some(calls) = stream.attention.check(seen) {
                seen = calls;
                continue;
            }
            stream.undone = 0;
            if stream.left {
                break;
            }
            stream.attention.take_over();
            minds = true;
        }
        owner.join().unwrap();
        assert_eq!(stream.take().undone, 0);
    });
}

/// A waiter comes while the owner is in its last call: the background thread is woken, and finds the
/// work that the owner has left, without any timer. It sleeps while there is no work.
#[test]
fn p8_an_awaited_stream_is_taken_over_at_once() {
    let mut model = loom::model::Builder::new();
    model.preemption_bound = Some(3);
    model.check(|| {
        let stream = Arc::new(Owned::new(Stream::default()));
        let published = Arc::new(PublishedMarks::new(Seq(0)));
        let background = Arc::new(Notify::new());
        let owner = {
            let (stream, background) = (Arc::clone(&stream), Arc::clone(&background));
            thread::spawn(move || {
                let mut stream = stream.take();
                let wake = stream.attention.called();
                stream.undone = 1;
                if stream.end() || wake {
                    background.notify();
                }
            })
        };
        let waiter = {
            let (published, background) = (Arc::clone(&published), Arc::clone(&background));
            thread::spawn(move || {
                wait(&published, 1, || background.notify()).unwrap();
            })
        };
        let mut seen = 0;
        loop {
            background.wait();
            if !published.is_awaited() {
                continue;
            }
            let Some(mut stream) = stream.take_or_request() else { continue };
            if let Some(calls) = stream.attention.check(seen) {
                seen = calls;
            }
            stream.attention.take_over();
            if std::mem::take(&mut stream.undone) == 1 {
                wake(published.publish(marks(1, 1)));
                break;
            }
        }
        waiter.join().unwrap();
        owner.join().unwrap();
    });
}

//! The writers during a claim of a volume, under a model checker: every interleaving of a
//! connection that writes to a namespace for the first time, and a claim that asks only the
//! connections that it finds noted. The file under test is compiled as it is.

extern crate alloc;

#[path = "../src/target/writers.rs"]
mod writers;

mod ids {
    #[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
    pub(super) struct ConnId(pub(super) u64);
}

use ids::ConnId;
use loom::cell::UnsafeCell;
use loom::sync::atomic::{AtomicU64, Ordering};
use loom::sync::{Arc, Condvar, Mutex};
use loom::thread;
use writers::{NotedNamespaces, Writers};

const WRITER: ConnId = ConnId(1);

/// The state that connections share behind the lock.
#[derive(Default)]
struct Shared {
    writers: Writers,
    asked: bool,
    acknowledged: bool,
}

struct Target {
    shared: Mutex<Shared>,
    answered: Condvar,
    /// 0 while every host may write.
    guard: AtomicU64,
    /// The checker reports two accesses without an order between them.
    drive: UnsafeCell<u64>,
}

impl Target {
    /// A connection between two commands.
    fn answer(&self) {
        let mut shared = self.shared.lock().unwrap();
        if shared.asked {
            shared.acknowledged = true;
            self.answered.notify_one();
        }
    }
}

/// Either the claim finds the connection and waits for its write, or the write finds the guard.
#[test]
fn t28_a_first_write_is_waited_for_or_refused() {
    loom::model(|| {
        let target = Arc::new(Target {
            shared: Mutex::default(),
            answered: Condvar::new(),
            guard: AtomicU64::new(0),
            drive: UnsafeCell::new(0),
        });
        let writer = {
            let target = Arc::clone(&target);
            thread::spawn(move || {
                let mut noted = NotedNamespaces::default();
                for _ in 0..2 {
                    let guard_allows = || target.guard.load(Ordering::Acquire) == 0;
                    let note = || target.shared.lock().unwrap().writers.note(0, WRITER);
                    if noted.may_write(0, guard_allows, note) {
                        // SAFETY: the checker fails the test if another thread may be here.
                        target.drive.with_mut(|drive| unsafe { *drive += 1 });
                    }
                    target.answer();
                }
                // It is drained: none of its operations is in flight any more.
                let mut shared = target.shared.lock().unwrap();
                shared.writers.remove(WRITER);
                shared.acknowledged = true;
                target.answered.notify_one();
            })
        };
        let mut shared = target.shared.lock().unwrap();
        target.guard.store(7, Ordering::SeqCst);
        if !shared.writers.of([0].into_iter()).is_empty() {
            shared.asked = true;
            while !shared.acknowledged {
                shared = target.answered.wait(shared).unwrap();
            }
        }
        drop(shared);
        // SAFETY: as above.
        target.drive.with_mut(|drive| unsafe { *drive += 10 });
        writer.join().unwrap();
    });
}

#[test]
fn t28_a_connection_takes_the_lock_for_its_first_write_only() {
    let mut noted = NotedNamespaces::default();
    for (ns_index, is_first) in [(2, true), (2, false), (0, true), (2, false), (0, false)] {
        let mut notes = 0;
        assert!(noted.may_write(ns_index, || true, || notes += 1));
        assert_eq!(notes, usize::from(is_first));
    }
}

#[test]
fn t28_a_connection_that_is_drained_is_not_remembered() {
    const OTHER: ConnId = ConnId(2);
    let mut writers = Writers::default();
    for ns_index in [0, 1] {
        writers.note(ns_index, WRITER);
    }
    writers.note(1, OTHER);
    writers.remove(WRITER);
    assert_eq!(writers.of([0].into_iter()).len(), 0);
    assert_eq!(Vec::from_iter(writers.of([0, 1].into_iter())), [OTHER]);
}

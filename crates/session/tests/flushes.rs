//! The FLUSHes of one drive on several cores, under a model checker: every interleaving, and every
//! value that the memory model lets a load return (T29). The file under test is compiled as it is,
//! with the checker's atomics.

#[allow(unreachable_pub)]
#[path = "../src/target/flushes.rs"]
mod flushes;

mod sync {
    pub(super) use loom::sync::atomic::{AtomicU64, Ordering};
}

use flushes::{Doubt, DriveFlushes};
use loom::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use loom::sync::{Arc, Mutex, Notify};
use loom::thread;

/// A drive and what the cores share of it.
struct Shared {
    board: DriveFlushes,
    /// What the kernel keeps of a failed write-back until the first FLUSH has been told of it.
    error: AtomicBool,
    /// Whether the first FLUSH has not come back.
    under_way: AtomicUsize,
    /// Cores that wait for others.
    waiting: Mutex<Vec<usize>>,
    bells: Vec<Notify>,
}

impl Shared {
    fn new(cores: usize, error: bool) -> Arc<Self> {
        Arc::new(Self {
            board: DriveFlushes::new(),
            error: AtomicBool::new(error),
            under_way: AtomicUsize::new(0),
            waiting: Mutex::new(Vec::new()),
            bells: (0..cores).map(|_| Notify::new()).collect(),
        })
    }

    fn wake(&self) {
        let waiting = std::mem::take(&mut *self.waiting.lock().unwrap());
        waiting.into_iter().for_each(|core| self.bells[core].notify());
    }

    /// A core's FLUSH, with all that belongs to it; whether the drive called it good.
    fn flush(&self, core: usize) -> bool {
        let ticket = self.board.begin();
        // The kernel's part: exact, whatever the cores' loads may see.
        let good = !self.error.swap(false, Ordering::SeqCst);
        if !good {
            self.board.fail();
        }
        let doubt = self.board.end(ticket, || self.wake());
        if let Some(doubt) = doubt.filter(|_| good) {
            self.wait(core, doubt);
        }
        good
    }

    fn wait(&self, core: usize, doubt: Doubt) {
        while self.board.wait(doubt, || self.waiting.lock().unwrap().push(core)) {
            self.bells[core].wait();
        }
    }
}

/// Whoever is told that its FLUSH was good knows by then of every one that has taken the kernel's
/// only word of what was lost; and nobody waits for good, which the checker would find.
#[test]
fn t29_no_success_is_believed_before_a_failure_is_counted() {
    let mut model = loom::model::Builder::new();
    model.preemption_bound = Some(2);
    model.check(|| {
        let shared = Shared::new(3, true);
        let others: Vec<_> = (1..3)
            .map(|core| {
                let shared = Arc::clone(&shared);
                thread::spawn(move || {
                    let good = shared.flush(core);
                    assert_eq!(shared.board.failures(), 1, "core {core}: its FLUSH good: {good}");
                })
            })
            .collect();
        shared.flush(0);
        assert_eq!(shared.board.failures(), 1);
        others.into_iter().for_each(|other| other.join().unwrap());
    });
}

/// FLUSHes that begin later do not keep an earlier one in doubt: though one is always under way, it
/// is believed once those that were under way when it was heard of have come back, and not before.
#[test]
fn t29_a_doubt_ends_though_new_flushes_begin() {
    let mut model = loom::model::Builder::new();
    model.preemption_bound = Some(3);
    model.check(|| {
        let shared = Shared::new(1, false);
        let (first, mine) = (shared.board.begin(), shared.board.begin());
        shared.under_way.store(1, Ordering::SeqCst);
        let doubt = shared.board.end(mine, || shared.wake()).expect("the first may have failed");
        let other = {
            let shared = Arc::clone(&shared);
            thread::spawn(move || {
                let next = shared.board.begin();
                shared.under_way.store(0, Ordering::SeqCst);
                let _ = shared.board.end(first, || shared.wake());
                let last = shared.board.begin();
                let _ = shared.board.end(next, || shared.wake());
                last
            })
        };
        shared.wait(0, doubt);
        assert_eq!(shared.under_way.load(Ordering::SeqCst), 0, "believed too early");
        let last = other.join().unwrap();
        assert!(shared.board.end(last, || shared.wake()).is_none());
    });
}

/// Whoever ends amid two rounds waits for the FLUSHes of both.
#[test]
fn t29_the_end_of_one_round_is_not_enough_for_two() {
    loom::model(|| {
        let board = DriveFlushes::new();
        let [older, first] = [board.begin(), board.begin()];
        assert!(board.end(first, || ()).is_some());
        // The first end closed a round: `older` belongs to the one before these.
        let [newer, mine] = [board.begin(), board.begin()];
        let doubt = board.end(mine, || ()).expect("two others are under way");
        let _ = board.end(older, || ());
        assert!(board.wait(doubt, || ()), "the newer one may have failed");
        let mut woken = false;
        let _ = board.end(newer, || woken = true);
        assert!(woken && !board.wait(doubt, || ()));
    });
}

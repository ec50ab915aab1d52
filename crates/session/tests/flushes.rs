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

/// A drive, and the state of it that the cores share.
struct Shared {
    flushes: DriveFlushes,
    /// The kernel's record of a failed write-back, kept until the first FLUSH has received it.
    error: AtomicBool,
    /// Whether the first FLUSH has not come back.
    in_flight: AtomicUsize,
    /// Cores that wait for others.
    waiting: Mutex<Vec<usize>>,
    bells: Vec<Notify>,
}

impl Shared {
    fn new(cores: usize, error: bool) -> Arc<Self> {
        Arc::new(Self {
            flushes: DriveFlushes::new(),
            error: AtomicBool::new(error),
            in_flight: AtomicUsize::new(0),
            waiting: Mutex::new(Vec::new()),
            bells: (0..cores).map(|_| Notify::new()).collect(),
        })
    }

    fn wake(&self) {
        let waiting = std::mem::take(&mut *self.waiting.lock().unwrap());
        waiting.into_iter().for_each(|core| self.bells[core].notify());
    }

    /// A core's FLUSH with all its steps. Returns whether the drive reported success.
    fn flush(&self, core: usize) -> bool {
        let ticket = self.flushes.begin();
        // The kernel's part. It is exact, in any order of the cores' loads.
        let good = !self.error.swap(false, Ordering::SeqCst);
        if !good {
            self.flushes.count_failure();
        }
        let doubt = self.flushes.end(ticket, || self.wake());
        if let Some(doubt) = doubt.filter(|_| good) {
            self.wait(core, doubt);
        }
        good
    }

    fn wait(&self, core: usize, doubt: Doubt) {
        while self.flushes.is_still_in_doubt(doubt, || self.waiting.lock().unwrap().push(core)) {
            self.bells[core].wait();
        }
    }
}

/// A core that accepts its FLUSH as a success knows by then of every FLUSH that has taken the
/// kernel's only report of lost data. And no core waits for ever, which the checker would find.
#[test]
fn t29_no_success_is_accepted_before_a_failure_is_counted() {
    let mut model = loom::model::Builder::new();
    model.preemption_bound = Some(2);
    model.check(|| {
        let shared = Shared::new(3, true);
        let others: Vec<_> = (1..3)
            .map(|core| {
                let shared = Arc::clone(&shared);
                thread::spawn(move || {
                    let good = shared.flush(core);
                    assert_eq!(shared.flushes.failures(), 1, "core {core}: its FLUSH good: {good}");
                })
            })
            .collect();
        shared.flush(0);
        assert_eq!(shared.flushes.failures(), 1);
        others.into_iter().for_each(|other| other.join().unwrap());
    });
}

/// FLUSHes that begin later do not keep an earlier one in doubt. Although one is always in flight,
/// its success is accepted once those that were in flight when it was received have come back, and
/// not before.
#[test]
fn t29_a_doubt_ends_though_new_flushes_begin() {
    let mut model = loom::model::Builder::new();
    model.preemption_bound = Some(3);
    model.check(|| {
        let shared = Shared::new(1, false);
        let (first, mine) = (shared.flushes.begin(), shared.flushes.begin());
        shared.in_flight.store(1, Ordering::SeqCst);
        let doubt = shared.flushes.end(mine, || shared.wake()).expect("the first may have failed");
        let other = {
            let shared = Arc::clone(&shared);
            thread::spawn(move || {
                let next = shared.flushes.begin();
                shared.in_flight.store(0, Ordering::SeqCst);
                let _ = shared.flushes.end(first, || shared.wake());
                let last = shared.flushes.begin();
                let _ = shared.flushes.end(next, || shared.wake());
                last
            })
        };
        shared.wait(0, doubt);
        assert_eq!(shared.in_flight.load(Ordering::SeqCst), 0, "accepted too early");
        let last = other.join().unwrap();
        assert!(shared.flushes.end(last, || shared.wake()).is_none());
    });
}

/// A FLUSH that ends amid two rounds waits for the FLUSHes of both.
#[test]
fn t29_the_end_of_one_round_is_not_enough_for_two() {
    loom::model(|| {
        let flushes = DriveFlushes::new();
        let [older, first] = [flushes.begin(), flushes.begin()];
        assert!(flushes.end(first, || ()).is_some());
        // The first end closed a round: `older` belongs to the one before these.
        let [newer, mine] = [flushes.begin(), flushes.begin()];
        let doubt = flushes.end(mine, || ()).expect("two others are in flight");
        let _ = flushes.end(older, || ());
        assert!(flushes.is_still_in_doubt(doubt, || ()), "the newer one may have failed");
        let mut woken = false;
        let _ = flushes.end(newer, || woken = true);
        assert!(woken && !flushes.is_still_in_doubt(doubt, || ()));
    });
}

/// The end of a round wakes the connections if one of them waits for it, and only then. The number
/// of a round has nine bits, so it is 0 again after 512 rounds.
#[test]
fn t29_each_round_wakes_its_own_waiters_only() {
    let mut model = loom::model::Builder::new();
    model.max_branches = 100_000;
    model.check(|| {
        let flushes = DriveFlushes::new();
        // Three rounds end in each pass, so rounds of every number are waited for.
        for pass in 0..1024 {
            let waits = pass % 5 > 0;
            let [mine, other] = [flushes.begin(), flushes.begin()];
            let doubt = flushes.end(mine, || panic!("nobody waits")).expect("another in flight");
            if waits {
                assert!(flushes.is_still_in_doubt(doubt, || ()));
            }
            let mut woken = false;
            assert!(flushes.end(other, || woken = true).is_none());
            assert_eq!(woken, waits, "pass {pass}");
            let alone = flushes.begin();
            assert!(flushes.end(alone, || panic!("nobody waits any more")).is_none());
        }
    });
}

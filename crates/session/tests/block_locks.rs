//! The locks of blocks under a model checker: every interleaving of a connection that writes a block
//! and a command that locks it, as [`Shared`] and the connections use the files under test, which are
//! compiled as they are.
//!
//! [`Shared`]: riopipe_session::target::Shared

extern crate alloc;

#[allow(dead_code, unreachable_pub, reason = "the session uses the rest")]
#[path = "../src/target/block_locks.rs"]
mod block_locks;
#[allow(dead_code, reason = "the session uses the rest")]
#[path = "../src/target/writers.rs"]
mod writers;

mod ids {
    #[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
    pub(super) struct ConnId(pub(super) u64);
}

use block_locks::{BlockLocks, GrantedLock, LockKind, LockTicket};
use ids::ConnId;
use loom::cell::UnsafeCell;
use loom::sync::atomic::{AtomicU64, Ordering};
use loom::sync::{Arc, Condvar, Mutex};
use loom::thread;
use writers::{NotedNamespaces, Writers};

const WRITER: ConnId = ConnId(1);
const LOCKER: ConnId = ConnId(2);

/// The state that connections share behind the lock.
#[derive(Default)]
struct Shared {
    writers: Writers,
    locks: BlockLocks,
    must_drain: bool,
    has_drained: bool,
    /// The connection that has waited for the block may go on.
    may_go_on: bool,
}

struct Target {
    shared: Mutex<Shared>,
    changed: Condvar,
    lock_count: AtomicU64,
    /// The checker reports two accesses without an order between them.
    block: UnsafeCell<u64>,
}

impl Target {
    fn new() -> Arc<Self> {
        Arc::new(Self {
            shared: Mutex::default(),
            changed: Condvar::new(),
            lock_count: AtomicU64::new(0),
            block: UnsafeCell::new(0),
        })
    }

    fn publish(&self, shared: &Shared) {
        self.lock_count.store(shared.locks.exclusive_count() as u64, Ordering::SeqCst);
    }

    fn change(&self, by: u64) {
        // SAFETY: the checker fails the test if another thread may be here.
        self.block.with_mut(|block| unsafe { *block += by });
    }

    /// A connection writes the block twice. Between its commands it reads its notices.
    fn write_twice(&self) {
        let mut noted = NotedNamespaces::default();
        for number in 0..2 {
            let note = || self.shared.lock().unwrap().writers.note(0, WRITER);
            assert!(noted.may_write(0, || true, note));
            let is_locked = self.lock_count.load(Ordering::Acquire) > 0;
            let ticket = LockTicket::new(100 + number);
            let must_wait =
                is_locked && self.shared.lock().unwrap().locks.must_wait(ticket, WRITER, 5..6);
            if must_wait {
                let mut shared = self.shared.lock().unwrap();
                loop {
                    // It has no operation in flight.
                    shared.has_drained |= shared.must_drain;
                    self.changed.notify_one();
                    if shared.may_go_on {
                        break;
                    }
                    shared = self.changed.wait(shared).unwrap();
                }
            }
            self.change(1);
            let mut shared = self.shared.lock().unwrap();
            if must_wait {
                assert_eq!(shared.locks.release(ticket), []);
            }
            shared.has_drained |= shared.must_drain;
            self.changed.notify_one();
        }
    }

    /// A command locks the block, changes it, and releases it.
    fn lock_and_change(&self) {
        let ticket = LockTicket::new(1);
        let mut shared = self.shared.lock().unwrap();
        let is_granted = shared.locks.request(ticket, LOCKER, 5..6);
        self.publish(&shared);
        assert!(is_granted, "nothing stands against it: no other command locks first");
        if !shared.writers.of([0].into_iter()).is_empty() {
            shared.must_drain = true;
            while !shared.has_drained {
                shared = self.changed.wait(shared).unwrap();
            }
        }
        drop(shared);
        self.change(10);
        let mut shared = self.shared.lock().unwrap();
        let granted = shared.locks.release(ticket);
        self.publish(&shared);
        shared.may_go_on = !granted.is_empty();
        self.changed.notify_one();
    }
}

#[test]
fn no_write_is_in_flight_while_a_block_is_locked() {
    let mut model = loom::model::Builder::new();
    model.preemption_bound = Some(3);
    model.check(|| {
        let target = Target::new();
        let writer = {
            let target = Arc::clone(&target);
            thread::spawn(move || {
                target.write_twice();
                // It is drained: none of its operations is in flight any more.
                let mut shared = target.shared.lock().unwrap();
                shared.writers.remove(WRITER);
                shared.has_drained = true;
                target.changed.notify_one();
            })
        };
        target.lock_and_change();
        writer.join().unwrap();
        // SAFETY: the other thread has ended.
        assert_eq!(target.block.with(|block| unsafe { *block }), 12);
    });
}

#[test]
fn locks_are_granted_in_the_order_of_the_requests() {
    let ticket = LockTicket::new;
    let granted =
        |number, kind, blocks, conn| GrantedLock { ticket: ticket(number), kind, blocks, conn };
    let mut locks = BlockLocks::default();
    assert!(!locks.must_wait(ticket(1), WRITER, 0..9), "nothing is locked");
    assert!(locks.request(ticket(2), LOCKER, 5..6));
    assert!(locks.request(ticket(3), LOCKER, 6..7), "another block");
    assert!(locks.must_wait(ticket(4), WRITER, 0..6));
    assert!(!locks.must_wait(ticket(5), WRITER, 0..5));
    assert!(!locks.request(ticket(6), LOCKER, 5..6), "behind the write that waits");
    assert!(locks.must_wait(ticket(7), WRITER, 5..6), "behind the lock that waits");
    assert_eq!(locks.exclusive_count(), 3);
    assert_eq!(locks.release(ticket(2)), [granted(4, LockKind::Shared, 0..6, WRITER)]);
    assert_eq!(locks.release(ticket(4)), [granted(6, LockKind::Exclusive, 5..6, LOCKER)]);
    assert_eq!(locks.release(ticket(3)), []);
    // Those of a connection that has ended.
    assert_eq!(locks.remove(LOCKER), [granted(7, LockKind::Shared, 5..6, WRITER)]);
    assert_eq!(locks.exclusive_count(), 0);
}

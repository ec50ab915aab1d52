//! Wakers that run any code, and a blocking wait beside other code of its thread.

use std::sync::{Arc, Mutex, mpsc};
use std::task::{Poll, Wake, Waker};
use std::thread;
use std::time::{Duration, Instant};

use riopipe::{EngineKind, Volume};
use riopipe_testkit::{Flag, Panicking, Task, poll};
use riopipe_wal::{DurableError, Lsn, Wal, WalPlace};

use crate::site::{Drive, PLACE, SOON, Site, options, soon};

/// The time limit of waits that must not succeed.
const SHORT: Duration = Duration::from_millis(30);

/// A full log with a record that does not become durable before a trim. Returns its Lsn, too.
fn full_log(volume: &Volume) -> (Wal, Lsn) {
    let wal = Wal::create(volume, WalPlace { blocks: 17, ..PLACE }, &options()).unwrap();
    let lsns: Vec<_> = (0..40).map(|_| wal.append(&[1; 3000]).unwrap()).collect();
    (wal, lsns[39])
}

/// Dropping a waker may drop any value: also another wait for the same log.
#[test]
fn a_waker_that_is_dropped_may_drop_other_waits() {
    let site = Site::rio();
    let (volume, _) = site.open();
    let (wal, never) = full_log(&volume);
    let wal = Arc::new(wal);
    let (done, is_done) = mpsc::channel();
    let shared = Arc::clone(&wal);
    thread::spawn(move || {
        let task = || {
            let mut other = shared.durable(never);
            assert!(poll(&mut other, Waker::noop()).is_pending());
            Task::waker(Mutex::new(vec![other]))
        };
        let mut wait = shared.durable(never);
        assert!(poll(&mut wait, &task()).is_pending());
        assert!(poll(&mut wait, &task()).is_pending(), "the first task is dropped");
        drop(wait);
        done.send(()).unwrap();
    });
    is_done.recv_timeout(SOON).expect("no wait hangs");
}

/// A waker that panics affects neither other waiters nor the log.
#[test]
fn a_waker_that_panics_affects_no_other_waiter() {
    let site = Site::new(Drive::Volatile, EngineKind::Rio);
    let (volume, _) = site.open();
    let (wal, last) = full_log(&volume);
    let panicking = Waker::from(Arc::new(Panicking));
    let waits = |lsn| {
        let mut waits = [wal.durable(lsn), wal.durable(lsn)];
        let flag = Arc::new(Flag::default());
        assert!(poll(&mut waits[0], &panicking).is_pending());
        assert!(poll(&mut waits[1], &Waker::from(Arc::clone(&flag))).is_pending());
        (waits, flag)
    };
    let (mut done, flag) = waits(last);
    soon("the other waiter is woken", || {
        wal.trim(wal.stat().durable).expect("the log goes on");
        flag.is_set()
    });
    for wait in &mut done {
        assert_eq!(poll(wait, Waker::noop()), Poll::Ready(Ok(())));
    }
    // Now the end of the log wakes them.
    let again: Vec<_> = (0..40).map(|_| wal.append(&[1; 3000]).unwrap()).collect();
    let (mut lost, flag) = waits(again[39]);
    drop(wal);
    assert!(flag.is_set());
    for wait in &mut lost {
        assert!(matches!(poll(wait, Waker::noop()), Poll::Ready(Err(DurableError::Over(_)))));
    }
}

/// A task of a runtime that has ended: when it is woken, it drops itself and its log.
#[derive(Default)]
struct Dropping {
    wal: Mutex<Option<Wal>>,
    /// The time that the drop took.
    took: Mutex<Option<Duration>>,
}

impl Wake for Dropping {
    fn wake(self: Arc<Self>) {
        let since = Instant::now();
        drop(self.wal.lock().unwrap().take());
        *self.took.lock().unwrap() = Some(since.elapsed());
    }
}

/// The log's own thread calls the waker, so dropping the log can't wait for that thread.
#[test]
fn a_waker_may_drop_the_log() {
    let site = Site::rio();
    let (volume, recovery) = site.open();
    let mut wal = Wal::create(&volume, PLACE, &options()).unwrap();
    let task = Arc::new(Dropping::default());
    loop {
        let mut wait = wal.durable(wal.append(b"a record").unwrap());
        *task.wal.lock().unwrap() = Some(wal);
        if poll(&mut wait, &Waker::from(Arc::clone(&task))).is_pending() {
            soon("the log is dropped", || task.took.lock().unwrap().is_some());
            assert_eq!(poll(&mut wait, Waker::noop()), Poll::Ready(Ok(())));
            break;
        }
        wal = task.wal.lock().unwrap().take().unwrap();
    }
    let took = task.took.lock().unwrap().unwrap();
    assert!(took < Duration::from_secs(4), "the thread has waited {took:?} for itself");
    soon("the log can be opened again", || {
        Wal::open(&volume, &recovery, PLACE, &options()).is_ok()
    });
}

/// A blocking wait does not consume the token by which other code unparks its thread.
#[test]
fn a_blocking_wait_takes_no_unpark_of_other_code() {
    let site = Site::rio();
    let (volume, _) = site.open();
    let (wal, never) = full_log(&volume);
    thread::current().unpark();
    let error = wal.wait_durable(never, Some(SHORT)).unwrap_err();
    assert!(matches!(error, DurableError::Deadline { .. }), "{error}");
    let since = Instant::now();
    thread::park_timeout(SOON / 4);
    assert!(since.elapsed() < SOON / 4, "the token was lost");
}

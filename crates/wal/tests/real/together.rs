//! Many threads, waiting and waking.

use std::collections::BTreeMap;
use std::future::Future;
use std::pin::Pin;
use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::mpsc::{Sender, channel};
use std::sync::{Arc, Mutex};
use std::task::{Context, Poll, Wake, Waker};
use std::time::Duration;

use riopipe::EngineKind;
use riopipe_wal::{DurableError, Lsn, Wal, WalFailure, WalPlace};

use crate::site::{Drive, PLACE, SOON, Site, options, read, reopen, soon};

#[test]
fn confirmed_records_of_many_threads_are_durable_in_the_order_of_their_lsns() {
    for drive in [Drive::Protected, Drive::Volatile] {
        let site = Site::new(drive, EngineKind::Rio);
        let (volume, recovery) = site.open();
        let wal = Wal::create(&volume, PLACE, &options()).unwrap();
        let all = Mutex::new(BTreeMap::new());
        std::thread::scope(|scope| {
            for thread in 0..8u64 {
                let (wal, all) = (&wal, &all);
                scope.spawn(move || {
                    let mut before = None;
                    for number in 0..40u64 {
                        let bytes = [thread.to_le_bytes(), number.to_le_bytes()].concat();
                        let lsn = wal.append(&bytes).unwrap();
                        assert!(before < Some(lsn), "records of one thread are in order");
                        before = Some(lsn);
                        wal.wait_durable(lsn, Some(SOON)).unwrap();
                        assert!(wal.stat().durable > lsn);
                        assert_eq!(all.lock().unwrap().insert(lsn, bytes), None);
                    }
                });
            }
        });
        // Its owner dies; all confirmed records remain.
        drop(wal);
        let (wal, _) = reopen(&volume, &recovery, PLACE);
        let all: Vec<_> = all.into_inner().unwrap().into_iter().collect();
        assert!(read(&wal, Lsn(0)) == all);
        wal.close(Some(SOON)).unwrap();
    }
}

#[test]
fn several_logs_of_a_volume_are_independent() {
    let site = Site::rio();
    let (volume, recovery) = site.open();
    let places = [0u16, 1, 2].map(|stream| {
        let (lba, blocks) = (u64::from(stream) * 100, 100);
        WalPlace { stream, lba, blocks }
    });
    let logs = places.map(|place| Wal::create(&volume, place, &options()).unwrap());
    for number in 0..50u64 {
        for (wal, place) in logs.iter().zip(places) {
            let lsn = wal.append(&[place.stream as u8; 900]).unwrap();
            if number == 49 {
                wal.wait_durable(lsn, Some(SOON)).unwrap();
            }
        }
    }
    drop(logs);
    for place in places {
        let (wal, _) = reopen(&volume, &recovery, place);
        let records = read(&wal, Lsn(0));
        assert_eq!(records.len(), 50);
        assert!(records.iter().all(|(_, bytes)| bytes == &[place.stream as u8; 900]));
        wal.close(Some(SOON)).unwrap();
    }
}

/// A task of a runtime without timers or I/O.
struct Task(Sender<()>, AtomicU32);

impl Wake for Task {
    fn wake(self: Arc<Self>) {
        self.1.fetch_add(1, Ordering::SeqCst);
        let _ = self.0.send(());
    }
}

#[test]
fn a_future_is_woken_and_polled_only_once() {
    let mut site = Site::rio();
    let (volume, _) = site.open();
    let wal = Wal::create(&volume, PLACE, &options()).unwrap();
    // Nothing can become durable meanwhile.
    site.kill();
    let lsn = wal.append(b"a record").unwrap();
    let (sender, receiver) = channel();
    let task = Arc::new(Task(sender, AtomicU32::new(0)));
    let waker = Waker::from(Arc::clone(&task));
    let mut context = Context::from_waker(&waker);
    let mut durable = wal.durable(lsn);
    assert_eq!(Pin::new(&mut durable).poll(&mut context), Poll::Pending);
    assert_eq!(durable.is_durable(), Ok(false));
    // A dropped one is not woken.
    let mut dropped = wal.durable(lsn);
    assert_eq!(Pin::new(&mut dropped).poll(&mut context), Poll::Pending);
    drop(dropped);
    site.start();
    receiver.recv_timeout(SOON).unwrap();
    assert_eq!(Pin::new(&mut durable).poll(&mut context), Poll::Ready(Ok(())));
    assert_eq!(durable.is_durable(), Ok(true));
    assert_eq!(task.1.load(Ordering::SeqCst), 1);
}

#[test]
fn a_wait_ends_at_its_deadline_and_the_record_may_still_become_durable() {
    let mut site = Site::rio();
    let (volume, _) = site.open();
    let wal = Wal::create(&volume, PLACE, &options()).unwrap();
    site.kill();
    let lsn = wal.append(b"late").unwrap();
    let error = wal.wait_durable(lsn, Some(Duration::from_millis(30))).unwrap_err();
    assert!(matches!(error, DurableError::Deadline { .. }) && error.is_retryable(), "{error}");
    // So does closing it.
    let error = wal.close(Some(Duration::from_millis(30))).unwrap_err();
    assert!(error.is_retryable(), "{error}");
    assert_eq!(wal.append(b"later"), Err(WalFailure::Closed.into()), "no more records");
    site.start();
    wal.wait_durable(lsn, Some(SOON)).unwrap();
    wal.close(Some(SOON)).unwrap();
    wal.wait_durable(lsn, None).unwrap();
}

#[test]
fn all_waits_end_when_a_log_ends() {
    let mut site = Site::rio();
    let (volume, _) = site.open();
    let wal = Wal::create(&volume, PLACE, &options()).unwrap();
    site.kill();
    let lsn = wal.append(b"never").unwrap();
    let durable = wal.durable(lsn);
    let waiting = std::thread::spawn(move || durable.wait(None));
    soon("the log has begun to write", || wal.stat().queued_bytes == 0);
    drop(wal);
    assert_eq!(waiting.join().unwrap(), Err(WalFailure::Closed.into()));
}

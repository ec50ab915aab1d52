//! Many threads on one stream.

use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;

use riopipe_fs_core::storage::{GroupSeq, Storage, StreamNo};

use crate::support::{FREE, Mounted, group, new_image};

#[test]
fn threads_that_wait_on_one_stream_all_end() {
    const THREADS: u64 = 6;
    const GROUPS: u64 = 150;
    let (_dir, path) = new_image();
    let mounted = Mounted::open(&path).unwrap();
    let mut seqs: Vec<u64> = thread::scope(|scope| {
        let write = |thread: u64| {
            let mounted = &mounted;
            move || -> Vec<u64> {
                let groups = (0..GROUPS).map(|n| {
                    let at = FREE + thread * GROUPS + n;
                    let seq = mounted.write(1, at, at, thread < 4);
                    match thread % 3 {
                        0 => mounted.storage.wait_durable(StreamNo(1), seq).unwrap(),
                        1 => mounted.storage.wait_complete(StreamNo(1), seq).unwrap(),
                        // These only submit, and wait for some of the groups.
                        _ if n % 50 == 0 => {
                            mounted.storage.wait_durable(StreamNo(1), seq).unwrap();
                        }
                        _ => {}
                    }
                    let marks = mounted.storage.marks(StreamNo(1));
                    assert!(marks.released <= marks.durable && marks.durable <= marks.complete);
                    seq.0
                });
                groups.collect()
            }
        };
        let threads: Vec<_> = (0..THREADS).map(|thread| scope.spawn(write(thread))).collect();
        threads.into_iter().flat_map(|thread| thread.join().unwrap()).collect()
    });
    seqs.sort_unstable();
    seqs.dedup();
    // There may be more groups: a wait for one without a flush adds a flush if none follows.
    assert_eq!(seqs.len() as u64, THREADS * GROUPS);
    let last = GroupSeq(*seqs.last().unwrap());
    for at in FREE..FREE + THREADS * GROUPS {
        // The last groups of some threads may not be complete.
        mounted.storage.wait_complete(StreamNo(1), last).unwrap();
        assert_eq!(mounted.number(at), at);
    }
    mounted.close();
}

#[test]
fn a_thread_that_waits_is_not_kept_from_its_group_by_threads_that_submit() {
    let (_dir, path) = new_image();
    let mounted = Mounted::open(&path).unwrap();
    let has_ended = AtomicBool::new(false);
    thread::scope(|scope| {
        let submits = || {
            let last = std::cell::Cell::new(0);
            for n in 0.. {
                // The blocks are fresh again when their old group is released.
                if n % 1000 == 0 && n > 0 {
                    mounted.storage.wait_durable(StreamNo(1), GroupSeq(last.get())).unwrap();
                }
                last.set(mounted.write(1, FREE + n % 1000, n, false).0);
                if has_ended.load(Ordering::Relaxed) {
                    break;
                }
            }
        };
        scope.spawn(submits);
        for n in 0..100 {
            let seq = mounted.write(1, FREE + 2000 + n, n, true);
            mounted.storage.wait_durable(StreamNo(1), seq).unwrap();
            assert!(mounted.storage.marks(StreamNo(1)).durable >= seq);
        }
        has_ended.store(true, Ordering::Relaxed);
    });
    mounted.close();
}

#[test]
fn a_wait_makes_groups_durable_that_asked_for_no_flush() {
    let (_dir, path) = new_image();
    let mounted = Mounted::open(&path).unwrap();
    for n in 1..=3 {
        mounted.write(0, FREE + n, n, false);
    }
    mounted.storage.wait_durable(StreamNo(0), GroupSeq(2)).unwrap();
    assert!(mounted.storage.marks(StreamNo(0)).durable >= GroupSeq(2));
    // A group without writes is a flush.
    let seq = mounted.storage.submit(StreamNo(0), group(&[], true)).unwrap();
    mounted.storage.wait_durable(StreamNo(0), seq).unwrap();
    assert_eq!(mounted.storage.marks(StreamNo(0)).released, seq);

    // The marks of a stream without a caller move on.
    let last = mounted.write(0, FREE, 9, true);
    while mounted.storage.marks(StreamNo(0)).released < last {
        thread::yield_now();
    }
    let error = mounted.storage.wait_durable(StreamNo(0), GroupSeq(99)).unwrap_err();
    assert!(error.to_string().contains("99"), "{error}");
    let storage = std::sync::Arc::clone(&mounted.storage);
    mounted.close();
    assert!(storage.submit(StreamNo(0), group(&[(FREE, 1)], true)).is_err());
    assert!(storage.wait_durable(StreamNo(0), GroupSeq(99)).is_err());
}

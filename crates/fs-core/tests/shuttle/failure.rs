//! A storage that fails while threads wait for it.

use std::sync::Mutex;

use riopipe_fs_core::FsError;

use crate::enumerate::NOW;
use crate::explore::{Run, below, explore, file, later, root, usual};

/// Whether a call was done; else it has failed, as it may.
fn is_done<T>(result: Result<T, FsError>) -> bool {
    match result {
        Ok(_) => true,
        Err(FsError::Io(_) | FsError::ReadOnly) => false,
        Err(error) => panic!("{error:?}"),
    }
}

fn fail_while_threads_wait(run: Run) {
    let fs = &run.fs;
    let (a, x, y) = (run.find("a"), run.find("a/x"), run.find("b/y"));
    run.storage.fail_after(below(40) as u32);
    let synced = Mutex::new(1_u8);
    let sync = || {
        for round in 2..4_u8 {
            let done = is_done(fs.write(&root(), x, 0, &[round; 4096], NOW))
                && is_done(fs.fsync(x, false, NOW));
            if done {
                *synced.lock().unwrap() = round;
            }
        }
    };
    let order = || {
        if is_done(fs.write(&root(), y, 0, &[2; 6000], NOW)) {
            is_done(fs.barrier(y, false, NOW));
        }
        is_done(fs.write(&root(), x, 4096, &[2; 10], NOW));
        is_done(fs.fsync(x, true, NOW));
    };
    let make = || {
        if is_done(fs.create(&root(), a, b"n", &file(), NOW)) {
            is_done(fs.unlink(&root(), a, b"n", NOW));
        }
        is_done(fs.sync(NOW));
    };
    let tick = || {
        is_done(fs.tick(later(10)));
    };
    run.threads(&[&sync, &order, &make, &tick]);
    let has_failed = run.storage.has_failed();
    let synced = synced.into_inner().unwrap();
    if has_failed {
        // Nothing may seem to be durable any more.
        let is_new = is_done(fs.write(&root(), x, 0, &[9; 4096], NOW));
        assert!(!is_new || !is_done(fs.fsync(x, false, NOW)), "a sync after the failure");
        assert!(fs.unmount(later(20)).is_err());
        assert!(fs.failure().is_some());
    }
    run.crash(&|tree| assert!(run.byte(tree, "a/x", 0) >= synced));
    if !has_failed {
        run.end();
    }
}

#[test]
fn all_calls_end_when_the_storage_fails() {
    explore("fail_while_threads_wait", usual(), 10, fail_while_threads_wait);
}

//! An unmount while calls are in progress.

use std::sync::Mutex;

use riopipe_fs_core::FsError;

use crate::enumerate::NOW;
use crate::explore::{Run, below, explore, file, later, node, root, usual};

/// Whether a call was done before the unmount.
fn is_done<T>(result: Result<T, FsError>) -> bool {
    match result {
        Ok(_) => true,
        Err(FsError::ReadOnly) => false,
        Err(error) => panic!("{error:?}"),
    }
}

fn unmount_under_load(run: Run) {
    let fs = &run.fs;
    let (a, x, y) = (run.find("a"), run.find("a/x"), run.find("b/y"));
    let synced = Mutex::new((1_u8, false));
    let write = || {
        for round in 2..4_u8 {
            let done = is_done(fs.write(&root(), x, 0, &[round; 6000], NOW))
                && is_done(fs.fsync(x, below(2) == 0, NOW));
            if done {
                synced.lock().unwrap().0 = round;
            }
        }
    };
    let make = || {
        if is_done(fs.create(&root(), a, b"n", &file(), NOW)) && is_done(fs.fsync(a, false, NOW)) {
            synced.lock().unwrap().1 = true;
        }
    };
    let order = || {
        if is_done(fs.write(&root(), y, 0, &[2; 4096], NOW)) && is_done(fs.barrier(y, false, NOW)) {
            is_done(fs.tick(later(10)));
        }
    };
    let unmount = || fs.unmount(later(20)).unwrap();
    run.threads(&[&write, &make, &order, &unmount]);
    assert_eq!(fs.failure(), None);
    run.check();
    let (least, is_made) = synced.into_inner().unwrap();
    let tree = run.recover(&run.storage.current());
    assert!(run.byte(&tree, "a/x", 0) >= least, "{least} was synced");
    assert!(!is_made || node(&tree, "a/n").is_some(), "the name was synced");
}

#[test]
fn what_a_call_has_synced_during_an_unmount_is_there() {
    explore("unmount_under_load", usual(), 40, unmount_under_load);
}

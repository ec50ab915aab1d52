//! The limit of the pages in memory: each write submits pages of all files, and waits for them, while
//! other threads sync, order and commit.

use riopipe_fs_core::fs::MountOptions;

use crate::enumerate::NOW;
use crate::enumerate::world::options;
use crate::explore::{Run, below, explore_with, file, later, root, usual};

/// The limit of the scenario, in pages.
const LIMIT: usize = 2;
/// The pages of a write.
const STEP: usize = 2;

fn write_at_the_limit(run: Run) {
    let fs = &run.fs;
    let (a, x, y) = (run.find("a"), run.find("a/x"), run.find("b/y"));
    let write = |ino, byte: u8| {
        assert_eq!(fs.write(&root(), ino, 0, &[byte; STEP * 4096], NOW), Ok(STEP * 4096));
    };
    let overwrite_and_sync = || {
        for byte in [2, 3] {
            write(x, byte);
            fs.fsync(x, below(2) == 0, NOW).unwrap();
            run.crash(&|tree| assert_eq!(run.byte(tree, "a/x", 1), byte));
        }
    };
    let order = || {
        write(y, 2);
        fs.barrier(y, below(2) == 0, NOW).unwrap();
        write(y, 3);
    };
    // Nothing refers to the file between the calls, so it may leave the memory.
    let make_and_forget = || {
        let made = fs.create(&root(), a, b"new", &file(), NOW).unwrap().ino;
        write(made, 4);
        fs.forget(made, 1);
        fs.tick(later(10)).unwrap();
        let found = run.find("a/new");
        fs.fsync(found, true, NOW).unwrap();
        run.crash(&|tree| assert_eq!(run.byte(tree, "a/new", 1), 4));
        fs.forget(found, 1);
    };
    let commit = || fs.sync(NOW).unwrap();
    run.threads(&[&overwrite_and_sync, &order, &make_and_forget, &commit]);
    assert!(fs.load().pages as usize <= LIMIT + 3 * STEP);
    run.end();
}

#[test]
fn writes_at_the_limit_of_memory_end_and_lose_nothing() {
    let options = MountOptions { pages_max: LIMIT, ..options(1) };
    explore_with("write_at_the_limit", usual(), options, 20, write_at_the_limit);
}

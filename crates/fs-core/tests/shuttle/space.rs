//! A full file system: threads wait for space that a commit frees.

use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, OnceLock};

use riopipe_fs_core::fs::mode;
use riopipe_fs_core::{FsError, Ino};

use crate::enumerate::NOW;
use crate::enumerate::world::World;
use crate::explore::{Run, explore, file, later, root, world};

/// File `big` has 30 blocks, and root can get 10 more.
fn full() -> &'static Arc<World> {
    static WORLD: OnceLock<Arc<World>> = OnceLock::new();
    WORLD.get_or_init(|| {
        world(|fs| {
            let make = |name| fs.create(&root(), Ino::ROOT, name, &file(), NOW).unwrap().ino;
            let [big, rest, _] = [b"big", b"all", b"new"].map(|name| make(name));
            fs.write(&root(), big, 0, &[1; 30 * 4096], NOW).unwrap();
            fs.sync(NOW).unwrap();
            // By halves, so that metadata of the file counts, too.
            let mut at = 0;
            while fs.statfs().blocks_available > 10 {
                let len = ((fs.statfs().blocks_available - 10) / 2).max(1) * 4096;
                fs.fallocate(rest, mode::KEEP_SIZE, at, len, NOW).unwrap();
                at += len;
            }
            fs.sync(NOW).unwrap();
        })
    })
}

fn wait_for_space(run: Run) {
    let fs = &run.fs;
    let (big, new) = (run.find("big"), run.find("new"));
    let is_free = AtomicBool::new(false);
    let write = || {
        let is_free = is_free.load(Ordering::Relaxed);
        match fs.write(&root(), new, 0, &[2; 20 * 4096], NOW) {
            // What was accepted has its space.
            Ok(done) => {
                assert!(done == 20 * 4096 || !is_free, "{done} bytes");
                fs.fsync(new, false, NOW).unwrap();
                run.crash(&|tree| assert_eq!(run.byte(tree, "new", done / 4096 - 1), 2));
            }
            Err(FsError::NoSpace) => assert!(!is_free, "there is space"),
            Err(error) => panic!("write: {error:?}"),
        }
    };
    let unlink = || {
        fs.unlink(&root(), Ino::ROOT, b"big", NOW).unwrap();
        fs.forget(big, 1);
        is_free.store(true, Ordering::Relaxed);
    };
    let commit = || {
        fs.sync(NOW).unwrap();
        fs.tick(later(10)).unwrap();
    };
    run.threads(&[&write, &unlink, &commit]);
    run.end();
}

#[test]
fn a_write_gets_the_space_that_an_unlink_has_freed() {
    explore("wait_for_space", full(), 40, wait_for_space);
}

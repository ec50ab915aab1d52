//! All calls at once, on few names.

use std::ops::ControlFlow;

use riopipe_fs_core::fs::{RENAME_EXCHANGE, SetAttr, mode};
use riopipe_fs_core::xattr::SetMode;
use riopipe_fs_core::{FsError, Ino};

use crate::enumerate::NOW;
use crate::explore::{Run, below, dir, explore, file, later, root, usual};

/// The calls of a thread.
const CALLS: usize = 4;

/// One of the names that all threads use.
fn name() -> &'static [u8] {
    [&b"x"[..], b"y", b"n"][below(3) as usize]
}

fn call(run: &Run, dirs: [Ino; 2]) -> Result<(), FsError> {
    let fs = &run.fs;
    let parent = dirs[below(2) as usize];
    // A call with an inode, which is referenced meanwhile.
    let with = |call: &dyn Fn(Ino) -> Result<(), FsError>| {
        let found = fs.lookup(&root(), parent, name())?.ino;
        let done = call(found);
        fs.forget(found, 1);
        done
    };
    match below(18) {
        kind @ 0..3 => {
            let new = if kind == 0 { dir() } else { file() };
            fs.create(&root(), parent, name(), &new, NOW).map(|made| fs.forget(made.ino, 1))
        }
        3 => fs.unlink(&root(), parent, name(), NOW),
        4 => fs.rmdir(&root(), parent, name(), NOW),
        5 | 6 => {
            let (to, flags) = (dirs[below(2) as usize], [0, RENAME_EXCHANGE][below(2) as usize]);
            fs.rename(&root(), parent, name(), to, name(), flags, NOW)
        }
        7 => with(&|ino| {
            fs.link(&root(), ino, dirs[below(2) as usize], name(), NOW).map(|_| fs.forget(ino, 1))
        }),
        8..11 => with(&|ino| {
            let at = below(3) * 4096 + 7;
            fs.write(&root(), ino, at, &[5; 5000], NOW)?;
            if below(2) == 0 { fs.fsync(ino, below(2) == 0, NOW) } else { Ok(()) }
        }),
        11 => with(&|ino| {
            let size = Some(below(9000));
            fs.set_attr(&root(), ino, &SetAttr { size, ..SetAttr::default() }, NOW).map(drop)
        }),
        12 => with(&|ino| {
            let how = [mode::KEEP_SIZE, mode::KEEP_SIZE | mode::PUNCH_HOLE, mode::ZERO_RANGE];
            fs.fallocate(ino, how[below(3) as usize], below(2) * 4096, 6000, NOW)
        }),
        13 => with(&|ino| {
            let value = vec![3; 200 + below(2) as usize * 600];
            fs.set_xattr(&root(), ino, b"user.a", &value, SetMode::Any, NOW)
        }),
        14 => with(&|ino| fs.barrier(ino, below(2) == 0, NOW)),
        15 => with(&|ino| {
            let mut data = [0xee; 9000];
            let read = fs.read(ino, 0, &mut data, NOW)?;
            let is_good = data[..read].iter().all(|byte| matches!(byte, 0 | 1 | 5));
            assert!(is_good, "data that was never written");
            Ok(())
        }),
        16 => fs.read_dir(parent, 0, &mut |_| ControlFlow::Continue(())),
        _ => fs.sync(NOW),
    }
}

fn all_calls(run: Run) {
    let dirs = [run.find("a"), run.find("b")];
    let calls = || {
        for _ in 0..CALLS {
            match call(&run, dirs) {
                Ok(())
                | Err(
                    FsError::Exists
                    | FsError::NotFound
                    | FsError::NotDirectory
                    | FsError::IsDirectory
                    | FsError::NotEmpty
                    | FsError::NotPermitted
                    | FsError::Invalid
                    | FsError::Stale(_),
                ) => {}
                Err(error) => panic!("{error:?}"),
            }
        }
    };
    let tick = || {
        for seconds in [1, 10, 20] {
            run.fs.tick(later(seconds)).unwrap();
        }
    };
    run.threads(&[&calls, &calls, &calls, &tick]);
    run.judge_cuts(&|_| ());
    run.end();
}

#[test]
fn any_calls_at_once_leave_a_whole_file_system() {
    explore("all_calls", usual(), 10, all_calls);
}

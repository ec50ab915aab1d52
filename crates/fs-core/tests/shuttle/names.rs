//! Names: threads find, make, rename and remove the same ones.

use std::ops::ControlFlow;
use std::sync::Mutex;

use riopipe_fs_core::FsError;
use riopipe_fs_core::fs::RENAME_EXCHANGE;

use crate::enumerate::NOW;
use crate::explore::{Run, dir, explore, file, later, root, usual};

fn find_and_make(run: Run) {
    let fs = &run.fs;
    let a = run.find("a");
    let make = || {
        for _ in 0..2 {
            let made = fs.create(&root(), a, b"n", &file(), NOW).unwrap();
            fs.forget(made.ino, 1);
            fs.unlink(&root(), a, b"n", NOW).unwrap();
            // Its number may be used again.
            fs.sync(NOW).unwrap();
        }
    };
    let find = || {
        for _ in 0..3 {
            match fs.lookup(&root(), a, b"n") {
                Ok(found) => {
                    assert_eq!(found.links, 1);
                    fs.forget(found.ino, 1);
                }
                Err(FsError::NotFound) => {}
                Err(error) => panic!("lookup: {error:?}"),
            }
        }
    };
    let tick = || {
        fs.tick(later(10)).unwrap();
    };
    run.threads(&[&make, &find, &tick]);
    assert_eq!(fs.lookup(&root(), a, b"n"), Err(FsError::NotFound));
    run.end();
}

/// Inodes leave the memory, and their numbers are used again.
#[test]
fn a_name_is_found_or_not_while_it_is_made_and_removed() {
    explore("find_and_make", usual(), 10, find_and_make);
}

/// The number of the removed file is used again while a thread finds the name.
fn find_a_number_that_is_used_again(run: Run) {
    let fs = &run.fs;
    let a = run.find("a");
    let make = || fs.forget(fs.create(&root(), a, b"n", &file(), NOW).unwrap().ino, 1);
    make();
    let replace = || {
        fs.unlink(&root(), a, b"n", NOW).unwrap();
        fs.sync(NOW).unwrap();
        make();
    };
    let find = || match fs.lookup(&root(), a, b"n") {
        Ok(found) => fs.forget(found.ino, 1),
        Err(error) => assert_eq!(error, FsError::NotFound),
    };
    run.threads_on_eager(&[&replace, &find]);
    run.end();
}

#[test]
fn a_number_that_is_used_again_is_no_damage() {
    explore("find_a_number_that_is_used_again", usual(), 100, find_a_number_that_is_used_again);
}

fn move_crosswise(run: Run) {
    let fs = &run.fs;
    let (a, b) = (run.find("a"), run.find("b"));
    let d = fs.create(&root(), a, b"d", &dir(), NOW).unwrap().ino;
    let e = fs.create(&root(), b, b"e", &dir(), NOW).unwrap().ino;
    let moved = Mutex::new(0);
    let rename = |parent, name: &[u8], new_parent, new_name: &[u8], flags| {
        match fs.rename(&root(), parent, name, new_parent, new_name, flags, NOW) {
            Ok(()) => true,
            // Into itself; below the other one already.
            Err(FsError::Invalid | FsError::NotFound | FsError::NotEmpty) => false,
            Err(error) => panic!("rename: {error:?}"),
        }
    };
    let count = |is_moved| *moved.lock().unwrap() += u32::from(is_moved);
    let first = || count(rename(a, b"d", e, b"d", 0));
    let second = || count(rename(b, b"e", d, b"e", 0));
    let exchange = || {
        rename(a, b"x", b, b"y", RENAME_EXCHANGE);
        rename(b, b"y", a, b"x", 0);
    };
    let commit = || fs.sync(NOW).unwrap();
    run.threads(&[&first, &second, &exchange, &commit]);
    assert_eq!(moved.into_inner().unwrap(), 1, "a circle, or no move at all");
    run.end();
}

#[test]
fn directories_that_cross_make_no_circle() {
    explore("move_crosswise", usual(), 10, move_crosswise);
}

/// Within a directory no mutex keeps renames apart.
fn rename_over_and_find(run: Run) {
    let fs = &run.fs;
    let a = run.find("a");
    fs.create(&root(), a, b"z", &file(), NOW).unwrap();
    let replace = || {
        for _ in 0..2 {
            fs.rename(&root(), a, b"x", a, b"z", 0, NOW).unwrap();
            let made = fs.create(&root(), a, b"x", &file(), NOW).unwrap();
            fs.forget(made.ino, 1);
        }
    };
    let find = || {
        for _ in 0..3 {
            let found = fs.lookup(&root(), a, b"z").expect("the name is there all the time");
            fs.forget(found.ino, 1);
            let mut names = Vec::new();
            fs.read_dir(a, 0, &mut |item| {
                names.push(item.name.to_vec());
                ControlFlow::Continue(())
            })
            .unwrap();
            assert_eq!(names.iter().filter(|name| *name == b"z").count(), 1);
        }
    };
    let link = || match fs.rename(&root(), a, b"z", a, b"y", RENAME_EXCHANGE, NOW) {
        Err(FsError::NotFound) => {}
        other => panic!("an exchange with a name that is not there: {other:?}"),
    };
    let commit = || {
        fs.sync(NOW).unwrap();
        fs.tick(later(10)).unwrap();
    };
    run.threads(&[&replace, &find, &link, &commit]);
    run.end();
}

#[test]
fn a_name_that_is_replaced_is_never_missing() {
    explore("rename_over_and_find", usual(), 10, rename_over_and_find);
}

/// Directories are removed while names come into them.
fn fill_and_remove(run: Run) {
    let fs = &run.fs;
    let (a, b) = (run.find("a"), run.find("b"));
    let d = fs.create(&root(), a, b"d", &dir(), NOW).unwrap().ino;
    let is_made = Mutex::new(false);
    let fill = || match fs.create(&root(), d, b"n", &file(), NOW) {
        Ok(made) => {
            *is_made.lock().unwrap() = true;
            fs.forget(made.ino, 1);
        }
        Err(FsError::NotFound | FsError::Stale(_)) => {}
        Err(error) => panic!("create: {error:?}"),
    };
    let remove = || {
        let done = fs.rmdir(&root(), a, b"d", NOW);
        fs.forget(d, 1);
        match done {
            Ok(()) | Err(FsError::NotEmpty | FsError::NotFound) => {}
            Err(error) => panic!("rmdir: {error:?}"),
        }
    };
    let away = || match fs.rename(&root(), a, b"d", b, b"d", 0, NOW) {
        Ok(()) | Err(FsError::NotFound) => {}
        Err(error) => panic!("rename: {error:?}"),
    };
    let commit = || {
        fs.sync(NOW).unwrap();
        fs.tick(later(10)).unwrap();
    };
    run.threads(&[&fill, &remove, &away, &commit]);
    let is_there = run.try_find("a/d/n").is_ok() || run.try_find("b/d/n").is_ok();
    assert_eq!(is_there, is_made.into_inner().unwrap());
    run.end();
}

#[test]
fn a_directory_is_removed_or_gets_a_name() {
    explore("fill_and_remove", usual(), 10, fill_and_remove);
}

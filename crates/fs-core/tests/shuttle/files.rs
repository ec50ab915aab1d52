//! The data of files: writes, syncs, truncates and deletions at once.

use riopipe_fs_core::FsError;
use riopipe_fs_core::fs::SetAttr;
use riopipe_fs_core::xattr::SetMode;

use crate::enumerate::NOW;
use crate::explore::{Run, below, explore, file, later, node, root, usual};

fn size(size: u64) -> SetAttr {
    SetAttr { size: Some(size), ..SetAttr::default() }
}

fn owner(uid: u32) -> SetAttr {
    SetAttr { uid: Some(uid), ..SetAttr::default() }
}

/// Reads at most `len` bytes.
fn read(run: &Run, ino: riopipe_fs_core::Ino, len: usize) -> Result<Vec<u8>, FsError> {
    let mut data = vec![0xee; len];
    let read = run.fs.read(ino, 0, &mut data, NOW)?;
    data.truncate(read);
    Ok(data)
}

/// A removed file lives as long as it is open.
fn write_truncate_and_unlink(run: Run) {
    let fs = &run.fs;
    let (a, x) = (run.find("a"), run.find("a/x"));
    for _ in 0..2 {
        fs.open(x).unwrap();
    }
    let write = || {
        for round in 2..4 {
            assert_eq!(fs.write(&root(), x, 4096, &[round; 5000], NOW), Ok(5000));
            fs.fsync(x, round == 3, NOW).unwrap();
        }
        fs.forget(x, 1);
    };
    let cut = || {
        for to in [0, 4100] {
            fs.set_attr(&root(), x, &size(to), NOW).unwrap();
        }
        let data = read(&run, x, 20_000).unwrap();
        // Zeroes, or one of the contents; nothing else.
        assert!(data.iter().all(|byte| matches!(byte, 0 | 2 | 3)), "{data:?}");
        assert!(matches!(data.len(), 4100 | 9096), "{}", data.len());
        fs.forget(x, 1);
    };
    let unlink = || {
        fs.unlink(&root(), a, b"x", NOW).unwrap();
        // That of `find`.
        fs.forget(x, 1);
    };
    let commit = || {
        fs.sync(NOW).unwrap();
        fs.tick(later(10)).unwrap();
    };
    run.threads(&[&write, &cut, &unlink, &commit]);
    assert_eq!(fs.attr(x), Err(FsError::Stale(x)));
    run.end();
}

#[test]
fn an_open_file_without_a_name_is_written_cut_and_deleted() {
    explore("write_truncate_and_unlink", usual(), 10, write_truncate_and_unlink);
}

/// The caller does not refer to the file, so it may be deleted at any moment.
fn use_without_a_reference(run: Run) {
    let fs = &run.fs;
    let (a, x) = (run.find("a"), run.find("a/x"));
    let write = || {
        for _ in 0..2 {
            match fs.write(&root(), x, 0, &[2; 5000], NOW) {
                Ok(done) => assert_eq!(done, 5000),
                Err(error) => assert_eq!(error, FsError::Stale(x)),
            }
            match fs.set_attr(&root(), x, &owner(7), NOW).and_then(|_| fs.fsync(x, false, NOW)) {
                Ok(()) => {}
                Err(error) => assert_eq!(error, FsError::Stale(x)),
            }
        }
    };
    let remove = || {
        fs.unlink(&root(), a, b"x", NOW).unwrap();
        fs.forget(x, 1);
    };
    run.threads_on_eager(&[&write, &remove]);
    run.end();
}

#[test]
fn a_file_that_is_deleted_during_a_call_stays_deleted() {
    explore("use_without_a_reference", usual(), 40, use_without_a_reference);
}

/// Two threads write a page each of one file, and sync.
fn sync_one_file(run: Run) {
    let fs = &run.fs;
    let x = run.find("a/x");
    let write = |page: usize| {
        for round in 2..4_u8 {
            let at = page as u64 * 4096;
            assert_eq!(fs.write(&root(), x, at, &[round; 1900], NOW), Ok(1900));
            fs.fsync(x, below(2) == 0, NOW).unwrap();
            run.crash(&|tree| {
                let found = run.byte(tree, "a/x", page);
                assert_eq!(found, round, "page {page} was synced");
            });
        }
    };
    let commit = || {
        if below(2) == 0 {
            fs.sync(NOW).unwrap();
        } else {
            fs.tick(later(10)).unwrap();
        }
    };
    run.threads(&[&|| write(0), &|| write(1), &commit]);
    run.end();
}

#[test]
fn what_a_thread_has_synced_is_there_after_a_crash() {
    explore("sync_one_file", usual(), 10, sync_one_file);
}

/// New files, and names of them, while main commits take place.
fn sync_new_files(run: Run) {
    let fs = &run.fs;
    let (a, b) = (run.find("a"), run.find("b"));
    let make = |name: &str, byte: u8| {
        let made = fs.create(&root(), a, name.as_bytes(), &file(), NOW).unwrap();
        assert_eq!(fs.write(&root(), made.ino, 0, &[byte; 5000], NOW), Ok(5000));
        fs.fsync(made.ino, false, NOW).unwrap();
        run.crash(&|tree| assert_eq!(run.byte(tree, &format!("a/{name}"), 1), byte));
        fs.forget(made.ino, 1);
    };
    let link = || {
        let x = run.find("a/x");
        fs.link(&root(), x, b, b"l", NOW).unwrap();
        fs.fsync(x, false, NOW).unwrap();
        run.crash(&|tree| assert!(node(tree, "b/l").is_some()));
        fs.unlink(&root(), a, b"x", NOW).unwrap();
        fs.fsync(a, false, NOW).unwrap();
        run.crash(&|tree| assert!(node(tree, "a/x").is_none()));
    };
    let commit = || fs.sync(NOW).unwrap();
    run.threads(&[&|| make("n", 2), &|| make("m", 3), &link, &commit]);
    run.judge_cuts(&|_| ());
    run.end();
}

#[test]
fn a_new_file_that_was_synced_is_there_after_a_crash() {
    explore("sync_new_files", usual(), 10, sync_new_files);
}

/// The log is more than half full, so that commits and ticks write blocks home.
fn sync_and_checkpoint(run: Run) {
    let fs = &run.fs;
    let (a, x) = (run.find("a"), run.find("a/x"));
    let y = run.find("b/y");
    for round in 0..155 {
        for ino in [x, y] {
            let value = [round; 900];
            fs.set_xattr(&root(), ino, b"user.a", &value, SetMode::Any, NOW).unwrap();
        }
        fs.set_attr(&root(), a, &owner(round.into()), NOW).unwrap();
        fs.sync(NOW).unwrap();
    }
    let before = fs.stat().checkpoint_blocks;
    let write = || {
        for round in 2..4_u8 {
            assert_eq!(fs.write(&root(), x, 0, &[round; 8000], NOW), Ok(8000));
            fs.fsync(x, false, NOW).unwrap();
            run.crash(&|tree| assert_eq!(run.byte(tree, "a/x", 1), round));
        }
    };
    let change = || {
        let made = fs.create(&root(), a, b"n", &file(), NOW).unwrap();
        fs.sync(NOW).unwrap();
        run.crash(&|tree| assert!(node(tree, "a/n").is_some()));
        fs.forget(made.ino, 1);
        fs.unlink(&root(), a, b"n", NOW).unwrap();
        fs.sync(NOW).unwrap();
        run.crash(&|tree| assert!(node(tree, "a/n").is_none()));
    };
    let tick = || {
        fs.tick(later(10)).unwrap();
    };
    run.threads(&[&write, &change, &tick]);
    assert!(fs.stat().checkpoint_blocks > before, "blocks were written home");
    run.judge_cuts(&|_| ());
    run.end();
}

#[test]
fn blocks_are_written_home_while_files_are_synced() {
    explore("sync_and_checkpoint", usual(), 10, sync_and_checkpoint);
}

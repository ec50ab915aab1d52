//! Blocks leave the cache all the time, and attributes are in a block of two inodes.

use std::ops::ControlFlow;
use std::sync::{Arc, Mutex, OnceLock};

use riopipe_fs_core::fs::{MountOptions, SetAttr, mode};
use riopipe_fs_core::{FsError, Ino};

use crate::enumerate::NOW;
use crate::enumerate::world::{World, options};
use crate::explore::{Run, below, explore_with, file, later, root, world};

/// The name of a file.
fn name(n: u64) -> Vec<u8> {
    format!("n{n}").into_bytes()
}

/// The files of the directory.
const FILES: u64 = 14;

/// Directory `d` has files in two blocks of the inode table, and file `f` an extent node.
fn large() -> &'static Arc<World> {
    static WORLD: OnceLock<Arc<World>> = OnceLock::new();
    WORLD.get_or_init(|| {
        world(|fs| {
            let d = fs.create(&root(), Ino::ROOT, b"d", &crate::explore::dir(), NOW).unwrap().ino;
            for n in 0..FILES {
                fs.create(&root(), d, &name(n), &file(), NOW).unwrap();
            }
            let f = fs.create(&root(), Ino::ROOT, b"f", &file(), NOW).unwrap().ino;
            for page in 0..6 {
                fs.fallocate(f, mode::KEEP_SIZE, page * 8192, 4096, NOW).unwrap();
            }
        })
    })
}

fn read_and_change(run: Run) {
    let fs = &run.fs;
    let (d, f) = (run.find("d"), run.find("f"));
    let find = || {
        for _ in 0..3 {
            let n = below(FILES - 2);
            let found = fs.lookup(&root(), d, &name(n)).unwrap();
            fs.forget(found.ino, 1);
        }
        let mut count = 0;
        fs.read_dir(d, 0, &mut |_| {
            count += 1;
            ControlFlow::Continue(())
        })
        .unwrap();
        assert!((FILES..=FILES + 4).contains(&count), "{count} entries");
    };
    let change = || {
        for n in [FILES - 2, FILES - 1] {
            fs.unlink(&root(), d, &name(n), NOW).unwrap();
            let made = fs.create(&root(), d, &name(n + 2), &file(), NOW).unwrap();
            fs.forget(made.ino, 1);
        }
    };
    let write = || {
        for round in 0..2_u8 {
            for page in 0..3_u8 {
                let at = u64::from(page) * 8192;
                fs.write(&root(), f, at, &[round * 16 + page + 1; 100], NOW).unwrap();
            }
            fs.fsync(f, false, NOW).unwrap();
            for page in 0..3_u8 {
                let mut data = [0; 100];
                fs.read(f, u64::from(page) * 8192, &mut data, NOW).unwrap();
                assert_eq!(data, [round * 16 + page + 1; 100], "page {page}");
            }
        }
    };
    let commit = || {
        for _ in 0..2 {
            fs.sync(NOW).unwrap();
            fs.tick(later(10)).unwrap();
        }
    };
    run.threads(&[&find, &change, &write, &commit]);
    run.end();
}

fn tiny() -> MountOptions {
    MountOptions { cached_blocks_max: 1, ..options(1) }
}

#[test]
fn blocks_that_leave_the_cache_come_back_as_they_were() {
    explore_with("read_and_change", large(), tiny(), 10, read_and_change);
}

/// Another thread reads an inode while it changes and leaves the memory, and while its block does.
fn read_what_leaves(run: Run) {
    let fs = &run.fs;
    let names = [name(0), name(1)];
    let d = run.find("d");
    let kept = Mutex::new(Vec::new());
    let find = || {
        for _ in 0..2 {
            let found = fs.lookup(&root(), d, &names[below(2) as usize]).unwrap();
            kept.lock().unwrap().push(found.ino);
        }
    };
    let change = || {
        for name in &names {
            let found = fs.lookup(&root(), d, name).unwrap();
            let set = SetAttr { mode: Some(0o600), ..SetAttr::default() };
            fs.set_attr(&root(), found.ino, &set, NOW).unwrap();
            fs.sync(NOW).unwrap();
            fs.forget(found.ino, 1);
        }
        // Other blocks come into the cache.
        let f = run.find("f");
        fs.write(&root(), f, 0, &[1; 10], NOW).unwrap();
        drop(fs.get_xattr(f, b"user.none"));
        fs.fsync(f, false, NOW).unwrap();
    };
    run.threads_on_eager(&[&find, &change]);
    for name in &names {
        let found = fs.lookup(&root(), d, name).unwrap();
        assert_eq!(found.mode & 0o777, 0o600, "the change is forgotten");
        fs.forget(found.ino, 1);
    }
    kept.into_inner().unwrap().into_iter().for_each(|ino| fs.forget(ino, 1));
    run.end();
}

#[test]
fn an_inode_that_leaves_the_memory_is_read_as_it_was_last() {
    explore_with("read_what_leaves", large(), tiny(), 100, read_what_leaves);
}

/// The attribute in the block of both.
const SHARED: &[u8] = b"user.shared";

/// Files `one` and `two` share the block with their attributes.
fn sharing() -> &'static Arc<World> {
    static WORLD: OnceLock<Arc<World>> = OnceLock::new();
    WORLD.get_or_init(|| {
        let world = world(|fs| {
            for name in [&b"one"[..], b"two"] {
                let made = fs.create(&root(), Ino::ROOT, name, &file(), NOW).unwrap().ino;
                if name == b"one" {
                    fs.set_xattr(&root(), made, SHARED, &[7; 900], Default::default(), NOW)
                        .unwrap();
                }
            }
        });
        crate::shared_block::share(&world, "one", "two")
    })
}

fn change_shared_attributes(run: Run) {
    let fs = &run.fs;
    let [one, two] = ["one", "two"].map(|name| run.find(name));
    let set = |ino, value: u8| {
        fs.set_xattr(&root(), ino, b"user.own", &[value; 500], Default::default(), NOW).unwrap();
        assert_eq!(fs.get_xattr(ino, SHARED), Ok(vec![7; 900]));
        assert_eq!(fs.get_xattr(ino, b"user.own"), Ok(vec![value; 500]));
    };
    let second = || {
        if below(2) == 0 {
            set(two, 2);
        } else {
            fs.unlink(&root(), Ino::ROOT, b"two", NOW).unwrap();
            fs.forget(two, 1);
        }
    };
    run.threads(&[&|| set(one, 1), &second, &|| fs.sync(NOW).unwrap()]);
    assert_eq!(fs.get_xattr(one, SHARED), Ok(vec![7; 900]));
    match fs.get_xattr(two, SHARED) {
        Ok(value) => assert_eq!(value, vec![7; 900]),
        Err(error) => assert_eq!(error, FsError::Stale(two)),
    }
    run.end();
}

#[test]
fn inodes_that_share_a_block_of_attributes_change_at_once() {
    explore_with("change_shared_attributes", sharing(), options(1), 10, change_shared_attributes);
}

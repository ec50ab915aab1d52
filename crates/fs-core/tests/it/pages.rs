//! The limit of the pages of all files in memory.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use riopipe_fs_core::Ino;
use riopipe_fs_core::fs::{Fs, MountOptions};

use crate::calls::{Mounted, NOW, file, options, root};
use crate::delayed::Delayed;
use crate::memory::{Memory, check_clean, image_of};

const BLOCKS: u64 = 65_536;
/// The limit of the tests, in pages.
const LIMIT: usize = 256;
/// The pages of one write.
const STEP: usize = 8;

fn limited() -> MountOptions {
    MountOptions { pages_max: LIMIT, commit_seconds: 300, ..options() }
}

fn content(n: u64) -> Vec<u8> {
    vec![n as u8 ^ 0x5a; STEP * 4096]
}

/// Many files, written by threads that sync some of them, on a storage that is slow.
#[test]
fn many_files_that_are_not_synced_take_bounded_memory() {
    const THREADS: u64 = 3;
    const FILES: u64 = 100;
    let (storage, advancing) = Delayed::new(image_of(BLOCKS, &[]), BLOCKS, 3, 7);
    let (fs, _) = Fs::mount(storage.clone(), limited(), NOW).unwrap();
    let most = AtomicU64::new(0);
    std::thread::scope(|scope| {
        for thread in 0..THREADS {
            let (fs, most) = (&fs, &most);
            scope.spawn(move || {
                for n in (0..FILES).map(|n| thread * FILES + n) {
                    let name = format!("f{n}");
                    let f = fs.create(&root(), Ino::ROOT, name.as_bytes(), &file(0o600), NOW);
                    let ino = f.unwrap().ino;
                    fs.write(&root(), ino, 0, &content(n), NOW).unwrap();
                    most.fetch_max(fs.load().pages, Ordering::Relaxed);
                    match n % 10 {
                        0 => fs.fsync(ino, false, NOW).unwrap(),
                        3 => fs.barrier(ino, false, NOW).unwrap(),
                        7 => fs.forget(ino, 1),
                        _ => {}
                    }
                }
            });
        }
    });
    let most = most.into_inner() as usize;
    assert!(most <= LIMIT + THREADS as usize * STEP, "{most} pages");
    for n in 0..THREADS * FILES {
        let f = fs.lookup(&root(), Ino::ROOT, format!("f{n}").as_bytes()).unwrap();
        let mut data = vec![0; STEP * 4096];
        fs.read(f.ino, 0, &mut data, NOW).unwrap();
        assert!(data == content(n), "file {n}");
    }
    fs.unmount(NOW).unwrap();
    assert_eq!(fs.load().dirty_pages, 0);
    storage.stop();
    advancing.join().unwrap();
    check_clean(&storage.image(), BLOCKS);
}

/// A page that was dropped from the memory may not be durable yet. Its file is not forgotten: an
/// `fsync` must wait for the write.
#[test]
fn a_file_whose_pages_were_dropped_is_still_made_durable_by_fsync() {
    let memory = Arc::new(Memory::new(image_of(BLOCKS, &[]), BLOCKS, 3));
    let (fs, _) = Fs::mount(memory.clone(), limited(), NOW).unwrap();
    let f = fs.create(&root(), Ino::ROOT, b"f", &file(0o600), NOW).unwrap();
    fs.write(&root(), f.ino, 0, &[1; 4096], NOW).unwrap();
    fs.sync(NOW).unwrap();
    // An overwrite, in no transaction that is durable.
    fs.write(&root(), f.ino, 0, &[2; 4096], NOW).unwrap();
    fs.forget(f.ino, 1);
    for n in 0..LIMIT / STEP + 1 {
        let name = format!("other {n}");
        let other = fs.create(&root(), Ino::ROOT, name.as_bytes(), &file(0o600), NOW).unwrap();
        fs.write(&root(), other.ino, 0, &content(1), NOW).unwrap();
    }
    assert!(fs.load().pages as usize <= LIMIT / 2, "the limit was reached");
    // Nothing refers to the file any more, and then something does again.
    let f = fs.lookup(&root(), Ino::ROOT, b"f").unwrap();
    fs.forget(f.ino, 1);
    let f = fs.lookup(&root(), Ino::ROOT, b"f").unwrap();
    fs.fsync(f.ino, true, NOW).unwrap();
    let again = Mounted::of(memory.durable_image(), BLOCKS);
    let f = again.fs.lookup(&root(), Ino::ROOT, b"f").unwrap();
    assert!(again.read_all(f.ino) == [2; 4096]);
    again.check();
}

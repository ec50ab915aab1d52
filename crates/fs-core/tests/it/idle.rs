//! Inodes that leave the memory.

use std::sync::Mutex;

use riopipe_fs_core::fs::{Fs, MountOptions, mode};
use riopipe_fs_core::storage::{GroupSeq, StreamMarks, StreamNo};
use riopipe_fs_core::{FsError, Ino};

use crate::calls::{NOW, dir, file, options, root};
use crate::hooked::{Hooked, Hooks};
use crate::memory::{check_clean, image_of};

const BLOCKS: u64 = 65_536;

/// While a replay is in progress, groups become durable, but not released.
#[derive(Default)]
struct Replay {
    /// The last released group of each stream when the replay began.
    released: Mutex<Option<[GroupSeq; 3]>>,
}

impl Hooks for Replay {
    fn change_marks(&self, stream: StreamNo, marks: &mut StreamMarks) {
        if let Some(released) = *self.released.lock().unwrap() {
            marks.released = released[usize::from(stream.0)];
        }
    }
}

/// The blocks of a deleted file are used again only when the last write to them is released. The
/// inode has the number of that write, so it does not leave the memory before.
#[test]
fn an_inode_is_not_forgotten_before_its_last_write_is_released() {
    let storage = Hooked::<Replay>::new(image_of(BLOCKS, &[]), BLOCKS);
    // Pages leave the memory when the drive has them, and not when they are released.
    let options = MountOptions { pages_max: 4, ..options() };
    let (fs, _) = Fs::mount(storage.clone(), options, NOW).unwrap();
    let make = |name| fs.create(&root(), Ino::ROOT, name, &file(0o600), NOW).unwrap().ino;
    let [old, fill] = [make(b"old"), make(b"fill")];
    *storage.hooks.released.lock().unwrap() = Some([GroupSeq(0); 3]);
    fs.write(&root(), old, 0, &[1; 5 * 4096], NOW).unwrap();
    fs.sync(NOW).unwrap();
    assert_eq!(fs.load().pages, 0);
    // Nothing refers to it, and all of it is durable.
    fs.forget(old, 1);
    fs.tick(NOW).unwrap();
    fs.unlink(&root(), Ino::ROOT, b"old", NOW).unwrap();
    fs.sync(NOW).unwrap();
    assert_eq!(fs.attr(old).map(drop), Err(FsError::Stale(old)));

    let mut end = 0;
    assert!(extend(&fs, fill, &mut end, 1 << 20) + extend(&fs, fill, &mut end, 4096) > BLOCKS / 2);
    *storage.hooks.released.lock().unwrap() = None;
    assert_eq!(extend(&fs, fill, &mut end, 4096), 5, "the blocks of the deleted file");
    fs.unmount(NOW).unwrap();
    check_clean(&storage.memory.image(), BLOCKS);
}

/// Extends a file by `len` bytes as often as there is space. Returns the number of new blocks.
fn extend(fs: &Fs, ino: Ino, end: &mut u64, len: u64) -> u64 {
    let before = *end;
    while fs.fallocate(ino, mode::KEEP_SIZE, *end, len, NOW).is_ok() {
        *end += len;
    }
    (*end - before) / 4096
}

/// The blocks of a removed directory are used again only when the main stream has released them: a
/// write home that is redirected, or is sent again, would land on the data of a file.
#[test]
fn t15_the_blocks_of_a_removed_directory_are_not_used_before_they_are_released() {
    let storage = Hooked::<Replay>::new(image_of(BLOCKS, &[]), BLOCKS);
    let (fs, _) = Fs::mount(storage.clone(), options(), NOW).unwrap();
    let fill = fs.create(&root(), Ino::ROOT, b"fill", &file(0o600), NOW).unwrap().ino;
    let removed = fs.create(&root(), Ino::ROOT, b"dir", &dir(0o700), NOW).unwrap().ino;
    fs.sync(NOW).unwrap();
    fs.forget(removed, 1);
    *storage.hooks.released.lock().unwrap() = Some([GroupSeq(0); 3]);
    fs.rmdir(&root(), Ino::ROOT, b"dir", NOW).unwrap();
    fs.sync(NOW).unwrap();

    let mut end = 0;
    extend(&fs, fill, &mut end, 1 << 20);
    extend(&fs, fill, &mut end, 4096);
    *storage.hooks.released.lock().unwrap() = None;
    assert_eq!(extend(&fs, fill, &mut end, 4096), 1, "the block of the directory");
    fs.unmount(NOW).unwrap();
    check_clean(&storage.memory.image(), BLOCKS);
}

//! Bounds: a transaction fits into the log however a file lies on the drive, and no call becomes slower
//! with what was done before.

use riopipe_fs_core::fs::{SetAttr, mode};
use riopipe_fs_core::{FsError, Ino};

use crate::calls::{Mounted, NOW, dir, file, root};

const BLOCKS: u64 = 65_536;
/// Those of [`scattered`].
const SCATTERED: u64 = 524_288;

/// A file system with 2048 small groups, in which each group has one free block or a few, and a file
/// with a block in most of them. Each block that it frees changes another bitmap.
fn scattered() -> (Mounted, Ino) {
    let options = ["-J", "size=9", "-m", "0", "-g", "256", "-N", "32768", "-O", "^resize_inode"];
    let m = Mounted::new(SCATTERED, &options);
    let fs = &m.fs;
    let fill = fs.create(&root(), Ino::ROOT, b"fill", &file(0o644), NOW).unwrap().ino;
    let mut end = 0;
    // The last blocks lie in pieces.
    for step in [1 << 20, 4096] {
        while fs.fallocate(fill, mode::KEEP_SIZE, end, step, NOW).is_ok() {
            end += step;
        }
    }
    assert!(end > 1 << 30, "{end} bytes");
    // A hole each 200 blocks is in each group, or nearly.
    for hole in (0..end).step_by(200 << 12) {
        fs.fallocate(fill, mode::PUNCH_HOLE | mode::KEEP_SIZE, hole, 4096, NOW).unwrap();
    }
    fs.sync(NOW).unwrap();
    let many = fs.create(&root(), Ino::ROOT, b"many", &file(0o644), NOW).unwrap().ino;
    // Extents with holes between them.
    for n in 0..2100 {
        fs.write(&root(), many, n * 8192, b"a block", NOW).unwrap();
    }
    fs.sync(NOW).unwrap();
    (m, many)
}

#[test]
fn a_file_with_a_block_in_each_group_is_removed_in_steps_that_fit_into_the_log() {
    let (m, many) = scattered();
    let fs = &m.fs;
    let before = fs.stat().commits;
    // A part is punched out, a part is truncated, and the rest is deleted.
    let punch = mode::PUNCH_HOLE | mode::KEEP_SIZE;
    fs.fallocate(many, punch, 0, 700 * 8192, NOW).unwrap();
    let set = SetAttr { size: Some(1400 * 8192), ..SetAttr::default() };
    fs.set_attr(&root(), many, &set, NOW).unwrap();
    fs.unlink(&root(), Ino::ROOT, b"many", NOW).unwrap();
    fs.forget(many, 1);
    fs.sync(NOW).unwrap();
    assert_eq!(fs.failure(), None);
    assert!(fs.stat().commits > before + 2, "it took several transactions");
    m.check();
}

/// After a crash in the middle of such a removal, the next mount goes on with it.
#[test]
fn a_removal_in_steps_is_finished_after_a_crash() {
    let (m, many) = scattered();
    m.memory.record_cuts(40, 5);
    let set = SetAttr { size: Some(8192), ..SetAttr::default() };
    m.fs.set_attr(&root(), many, &set, NOW).unwrap();
    m.fs.sync(NOW).unwrap();
    let cuts = m.memory.take_cuts();
    for cut in [&cuts[0], &cuts[cuts.len() / 2], &cuts[cuts.len() - 1]] {
        Mounted::of(cut.clone(), SCATTERED).check();
    }
}

#[test]
fn threads_that_create_at_once_do_not_outgrow_the_smallest_log() {
    const THREADS: u32 = 24;
    let options = ["-J", "size=9", "-g", "512", "-N", "32768", "-O", "^resize_inode"];
    let m = Mounted::new(BLOCKS, &options);
    let fs = &m.fs;
    std::thread::scope(|scope| {
        for thread in 0..THREADS {
            scope.spawn(move || {
                let name = format!("thread {thread}");
                let d = fs.create(&root(), Ino::ROOT, name.as_bytes(), &dir(0o755), NOW).unwrap();
                for n in 0..150_u32 {
                    // Directories lie in other groups than their parents, when these are crowded.
                    let name = format!("{n:0>200}");
                    let new = if n % 3 == 0 { dir(0o755) } else { file(0o644) };
                    let made = fs.create(&root(), d.ino, name.as_bytes(), &new, NOW).unwrap();
                    if n % 3 != 0 {
                        fs.write(&root(), made.ino, 0, &[7; 5000], NOW).unwrap();
                        if n % 10 == 0 {
                            fs.fsync(made.ino, false, NOW).unwrap();
                        }
                        if n % 4 == 0 {
                            fs.unlink(&root(), d.ino, name.as_bytes(), NOW).unwrap();
                        }
                    }
                    fs.forget(made.ino, 1);
                }
            });
        }
    });
    assert_eq!(fs.failure(), None);
    m.check();
}

/// A create and an unlink read no more of the drive in a large directory than in a small one.
#[test]
fn calls_in_a_large_directory_read_as_little_as_in_a_small_one() {
    let m = Mounted::new(131_072, &["-N", "100000"]);
    let (fs, memory) = (&m.fs, &m.memory);
    let d = fs.create(&root(), Ino::ROOT, b"dir", &dir(0o755), NOW).unwrap().ino;
    let name = |n: u32| format!("a name as programs have them {n}").into_bytes();
    let mut reads = Vec::new();
    for n in 0..60_000 {
        if n % 10_000 == 0 {
            reads.push(memory.reads());
        }
        let made = fs.create(&root(), d, &name(n), &file(0o644), NOW).unwrap();
        fs.forget(made.ino, 1);
    }
    reads.push(memory.reads());
    // Bitmaps and blocks of the inode table are read once for many files.
    let most = reads.windows(2).map(|pair| pair[1] - pair[0]).max().unwrap();
    assert!(most < 3000, "reads in 10,000 creates: {reads:?}");
    for n in 0..60_000 {
        fs.unlink(&root(), d, &name(n), NOW).unwrap();
    }
    let all = memory.reads() - reads[6];
    assert!(all < 20_000, "{all} reads in 60,000 unlinks");
    m.check();
}

#[test]
fn a_deep_tree_and_the_longest_names_work() {
    const DEPTH: u32 = 1500;
    let m = Mounted::new(BLOCKS, &[]);
    let fs = &m.fs;
    let name = |n: u32| format!("{n:x<255}").into_bytes();
    let mut at = Ino::ROOT;
    let mut path = Vec::new();
    for n in 0..DEPTH {
        let made = fs.create(&root(), at, &name(n), &dir(0o755), NOW).unwrap();
        path.push((at, made.ino));
        at = made.ino;
    }
    let too_long = [b'x'; 256];
    let made = fs.create(&root(), at, &too_long, &file(0o644), NOW);
    assert_eq!(made.map(|made| made.ino), Err(FsError::NameTooLong));
    let f = fs.create(&root(), at, &name(0), &file(0o644), NOW).unwrap();
    fs.write(&root(), f.ino, 0, b"deep", NOW).unwrap();
    // The record contains all directories on the way, or the commit does.
    fs.fsync(f.ino, false, NOW).unwrap();
    // A directory can't move below itself, however deep.
    let moved = fs.rename(&root(), Ino::ROOT, &name(0), at, b"x", 0, NOW);
    assert_eq!(moved, Err(FsError::Invalid));
    let (above, _) = path[700];
    fs.rename(&root(), above, &name(700), Ino::ROOT, b"half", 0, NOW).unwrap();
    m.check();
}

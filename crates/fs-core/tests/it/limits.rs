//! Limits: transactions near the size of the log, sizes of files, numbers of links and entries, a
//! full file system.

use std::sync::Arc;

use riopipe_fs_core::fs::{Caller, Fs, JournalMode, SeekTo, SetAttr, mode};
use riopipe_fs_core::{FsError, Ino};

use crate::calls::{Mounted, NOW, dir, file, options, root};
use crate::memory::{Image, Memory, check_clean, image_of};

const BLOCKS: u64 = 65_536;

fn small_journal() -> Image {
    // Half of it is the log: a little more than the 1024 blocks of the smallest one.
    image_of(BLOCKS, &["-J", "size=9", "-N", "20000"])
}

#[test]
fn a_transaction_stays_smaller_than_the_smallest_log() {
    for mode in [JournalMode::Rio, JournalMode::Ext4] {
        let memory = Arc::new(Memory::new(small_journal(), BLOCKS, 3));
        let mut options = options();
        options.mode = mode;
        let (fs, _) = Fs::mount(memory.clone(), options, NOW).unwrap();
        let mut made = Vec::new();
        for n in 0..300_u32 {
            let d = fs.create(&root(), Ino::ROOT, format!("d{n}").as_bytes(), &dir(0o755), NOW);
            let d = d.unwrap().ino;
            for f in 0..60_u32 {
                let name = format!("{f}{}", "long".repeat(50));
                let f = fs.create(&root(), d, name.as_bytes(), &file(0o644), NOW).unwrap();
                fs.forget(f.ino, 1);
                made.push((d, name));
            }
            fs.forget(d, 1);
        }
        for (d, name) in made {
            fs.unlink(&root(), d, name.as_bytes(), NOW).unwrap();
        }
        assert!(fs.stat().commits >= 8, "{} commits", fs.stat().commits);
        fs.unmount(NOW).unwrap();
        check_clean(&memory.image(), BLOCKS);
    }
}

#[test]
fn an_operation_that_no_transaction_can_have_is_refused() {
    const MANY: u64 = 100_000;
    let memory = Arc::new(Memory::new(small_journal(), BLOCKS, 3));
    let (fs, _) = Fs::mount(memory.clone(), options(), NOW).unwrap();
    let f = fs.create(&root(), Ino::ROOT, b"file", &file(0o644), NOW).unwrap().ino;
    // A node of the extent tree has 340 extents.
    let blocks = MANY.min(fs.statfs().blocks_available / 2);
    for page in 0..blocks {
        fs.fallocate(f, mode::KEEP_SIZE, page * 8192, 4096, NOW).unwrap();
    }
    fs.set_attr(&root(), f, &SetAttr { size: Some(blocks * 8192), ..SetAttr::default() }, NOW)
        .unwrap();
    let nodes = blocks / 340;
    let shifted = fs.fallocate(f, mode::INSERT_RANGE, 0, 4096, NOW);
    println!("{blocks} extents, {nodes} nodes: {shifted:?}");
    // The last part of it is small enough.
    let at = (blocks - 20_000) * 8192;
    fs.fallocate(f, mode::INSERT_RANGE, at, 4096, NOW).unwrap();
    fs.unmount(NOW).unwrap();
    check_clean(&memory.image(), BLOCKS);
}

#[test]
fn a_sparse_file_may_have_the_largest_size() {
    const LIMIT: u64 = (u32::MAX as u64) * 4096;
    let m = Mounted::new(BLOCKS, &[]);
    let fs = &m.fs;
    let f = fs.create(&root(), Ino::ROOT, b"file", &file(0o644), NOW).unwrap().ino;
    for gib in [0, 1, 50, 99] {
        fs.write(&root(), f, gib << 30, b"data", NOW).unwrap();
    }
    fs.sync(NOW).unwrap();
    assert_eq!(fs.seek(f, 4096, SeekTo::Data), Ok(1 << 30));
    assert_eq!(fs.seek(f, 50 << 30, SeekTo::Hole), Ok((50 << 30) + 4096));
    assert_eq!(fs.write(&root(), f, LIMIT - 4, b"123456", NOW), Ok(4), "what fits");
    assert_eq!(fs.attr(f).unwrap().size, LIMIT);
    assert_eq!(fs.write(&root(), f, LIMIT, b"1", NOW), Err(FsError::FileTooLarge));
    let set = |size| SetAttr { size: Some(size), ..SetAttr::default() };
    let too_large = fs.set_attr(&root(), f, &set(LIMIT + 1), NOW);
    assert_eq!(too_large, Err(FsError::FileTooLarge));
    assert_eq!(fs.fallocate(f, 0, LIMIT - 1, 2, NOW), Err(FsError::FileTooLarge));
    let inserted = fs.fallocate(f, mode::INSERT_RANGE, 0, 4096, NOW);
    assert_eq!(inserted, Err(FsError::FileTooLarge));
    let mut end = [0; 10];
    assert_eq!(fs.read(f, LIMIT - 6, &mut end, NOW), Ok(6));
    assert_eq!(&end[..6], b"\0\x001234");
    assert_eq!(fs.read(f, u64::MAX - 3, &mut end, NOW), Ok(0));
    fs.fsync(f, false, NOW).unwrap();
    fs.set_attr(&root(), f, &set(LIMIT - 5000), NOW).unwrap();
    fs.set_attr(&root(), f, &set(100 << 30), NOW).unwrap();
    let again = Mounted::of(
        {
            m.fs.unmount(NOW).unwrap();
            check_clean(&m.memory.image(), BLOCKS);
            m.memory.image()
        },
        BLOCKS,
    );
    let f = again.fs.lookup(&root(), Ino::ROOT, b"file").unwrap();
    assert_eq!(f.size, 100 << 30);
    let mut data = [0; 4];
    again.fs.read(f.ino, 99 << 30, &mut data, NOW).unwrap();
    assert_eq!(&data, b"data");
    again.check();
}

#[test]
fn a_directory_may_have_more_subdirectories_than_links() {
    const MANY: u32 = 65_100;
    const BLOCKS: u64 = 131_072;
    let m = Mounted::new(BLOCKS, &["-N", "80000", "-O", "dir_nlink"]);
    let fs = &m.fs;
    let d = fs.create(&root(), Ino::ROOT, b"dir", &dir(0o755), NOW).unwrap().ino;
    for n in 0..MANY {
        let made = fs.create(&root(), d, format!("{n}").as_bytes(), &dir(0o755), NOW).unwrap();
        fs.forget(made.ino, 1);
        if n == 64_990 {
            assert_eq!(fs.attr(d).unwrap().links, 64_993);
        }
    }
    assert_eq!(fs.attr(d).unwrap().links, 1, "too many to be counted");
    m.fs.sync(NOW).unwrap();
    for n in (0..MANY).step_by(7) {
        fs.rmdir(&root(), d, format!("{n}").as_bytes(), NOW).unwrap();
    }
    assert_eq!(fs.attr(d).unwrap().links, 1);
    m.check();
}

#[test]
fn a_file_has_65000_links_at_most() {
    let m = Mounted::new(BLOCKS, &[]);
    let fs = &m.fs;
    let f = fs.create(&root(), Ino::ROOT, b"file", &file(0o644), NOW).unwrap().ino;
    for n in 1..65_000 {
        fs.link(&root(), f, Ino::ROOT, format!("{n}").as_bytes(), NOW).unwrap();
    }
    assert_eq!(fs.attr(f).unwrap().links, 65_000);
    assert_eq!(fs.link(&root(), f, Ino::ROOT, b"more", NOW), Err(FsError::TooManyLinks));
    fs.unlink(&root(), Ino::ROOT, b"7", NOW).unwrap();
    fs.link(&root(), f, Ino::ROOT, b"more", NOW).unwrap();
    m.check();
}

#[test]
fn without_dir_nlink_subdirectories_are_limited() {
    const BLOCKS: u64 = 131_072;
    let m = Mounted::new(BLOCKS, &["-N", "80000", "-O", "^dir_nlink"]);
    let fs = &m.fs;
    let d = fs.create(&root(), Ino::ROOT, b"dir", &dir(0o755), NOW).unwrap().ino;
    for n in 0..64_998 {
        let made = fs.create(&root(), d, format!("{n}").as_bytes(), &dir(0o755), NOW).unwrap();
        fs.forget(made.ino, 1);
    }
    assert_eq!(fs.attr(d).unwrap().links, 65_000);
    let more = fs.create(&root(), d, b"more", &dir(0o755), NOW);
    assert_eq!(more.map(|made| made.ino), Err(FsError::TooManyLinks));
    fs.create(&root(), Ino::ROOT, b"other", &dir(0o755), NOW).unwrap();
    let moved = fs.rename(&root(), Ino::ROOT, b"other", d, b"more", 0, NOW);
    assert_eq!(moved, Err(FsError::TooManyLinks));
    m.check();
}

/// Fills the file system with small files. Returns their number.
fn fill(fs: &Fs, caller: &Caller, len: usize) -> u32 {
    for n in 0.. {
        let name = format!("file {n}");
        let made = match fs.create(caller, Ino::ROOT, name.as_bytes(), &file(0o644), NOW) {
            Err(FsError::NoSpace) => return n,
            made => made.unwrap(),
        };
        let written = fs.write(caller, made.ino, 0, &vec![n as u8; len], NOW);
        fs.forget(made.ino, 1);
        match written {
            Err(FsError::NoSpace) => return n + 1,
            Ok(done) if done < len => return n + 1,
            written => drop(written.unwrap()),
        }
    }
    unreachable!("it ends when the file system is full")
}

#[test]
fn a_full_file_system_writes_what_it_has_accepted_and_gets_its_space_back() {
    const BLOCKS: u64 = 16_384;
    for (caller, options) in [
        (root(), &["-J", "size=16"]),
        (Caller { uid: 1000, gid: 1000, ..root() }, &["-J", "size=16"]),
    ] {
        let m = Mounted::new(BLOCKS, options);
        let fs = &m.fs;
        let empty = fs.statfs();
        let mut before = None;
        for round in 0..4 {
            let files = fill(fs, &caller, 20_000 + round * 1000);
            let figures = fs.statfs();
            if caller.uid != 0 {
                assert!(figures.blocks_available < 10, "{figures:?}");
                assert!(figures.blocks_free > 700, "5 % are root's: {figures:?}");
            }
            // All that was accepted has blocks.
            fs.sync(NOW).unwrap();
            for n in 0..files {
                fs.unlink(&root(), Ino::ROOT, format!("file {n}").as_bytes(), NOW).unwrap();
            }
            // The space is there at once for all that wants it. The directory keeps its blocks.
            let figures = fs.statfs();
            assert!(figures.blocks_free + 100 >= empty.blocks_free, "{figures:?} {empty:?}");
            assert_eq!(figures.inodes_free, empty.inodes_free);
            let expected = *before.get_or_insert(files);
            assert!(files.abs_diff(expected) <= expected / 3, "{files} files after {expected}");
        }
        m.check();
    }
}

#[test]
fn without_free_inodes_nothing_can_be_made() {
    let m = Mounted::new(BLOCKS, &["-N", "256"]);
    let fs = &m.fs;
    for _ in 0..3 {
        let files = fill(fs, &root(), 0);
        assert!(files > 100, "{files} files");
        assert_eq!(fs.statfs().inodes_free, 0);
        let made = fs.create(&root(), Ino::ROOT, b"more", &dir(0o644), NOW);
        assert_eq!(made.map(|made| made.ino), Err(FsError::NoSpace));
        for n in 0..files {
            fs.unlink(&root(), Ino::ROOT, format!("file {n}").as_bytes(), NOW).unwrap();
        }
    }
    m.check();
}

//! States that other programs leave behind: flags of inodes, errors in the journal, numbers near
//! their end, read-only mounts.

use std::sync::Arc;

use riopipe_fs_core::format::inode::Time;
use riopipe_fs_core::format::superblock::{State, Superblock};
use riopipe_fs_core::fs::{Fs, MountError, SetAttr, mode};
use riopipe_fs_core::journal::format::JournalSuperblock;
use riopipe_fs_core::storage::Storage as _;
use riopipe_fs_core::xattr::SetMode;
use riopipe_fs_core::{Block, BlockNo, FsError, Ino};
use riopipe_nvme::digest::soft;

use crate::calls::{Mounted, NOW, dir, file, options, root};
use crate::image;
use crate::memory::{Image, Memory, check_clean};

const BLOCKS: u64 = 65_536;

/// An image with the blocks of its journal.
fn image_and_journal() -> (image::Image, Vec<u64>) {
    let made = image::Image::new((BLOCKS * 4096) >> 20, &["-J", "size=32"]);
    let text = made.debugfs("blocks <8>\n");
    let numbers = |line: &str| line.split_whitespace().map(|n| n.parse().ok()).collect();
    let found = text.lines().filter_map(numbers).find(|found: &Vec<u64>| !found.is_empty());
    (made, found.expect("the journal"))
}

fn change_journal(
    made: &image::Image,
    journal: &[u64],
    change: impl FnOnce(&mut JournalSuperblock),
) {
    let (at, layout) = (BlockNo(journal[0]), made.layout());
    let mut superblock =
        JournalSuperblock::decode(&layout, &made.read(at), journal.len() as u32).unwrap();
    change(&mut superblock);
    made.write(at, &superblock.encode(&layout));
}

fn load(made: &image::Image) -> Image {
    Image::of_file(&made.path())
}

/// The main journal has 32 bits of a transaction's number, a record has 64.
#[test]
fn obsolete_records_are_known_when_the_numbers_of_transactions_wrap() {
    let (made, journal) = image_and_journal();
    for before in [0xffff_fff0_u32, 0xffff_fffd, 0xffff_ffff] {
        change_journal(&made, &journal, |superblock| superblock.set_sequence(before));
        let m = Mounted::of(load(&made), BLOCKS);
        let fs = &m.fs;
        for n in 0..25 {
            let name = format!("{n}");
            let f = fs.create(&root(), Ino::ROOT, name.as_bytes(), &file(0o644), NOW).unwrap().ino;
            fs.write(&root(), f, 0, name.as_bytes(), NOW).unwrap();
            fs.fsync(f, false, NOW).unwrap();
            assert_eq!(fs.stat().fallbacks.iter().map(|(_, count)| count).sum::<u64>(), 0);
            // The record is obsolete as soon as the commit is durable, and must not come back.
            fs.rename(&root(), Ino::ROOT, name.as_bytes(), Ino::ROOT, b"renamed", 0, NOW).unwrap();
            fs.sync(NOW).unwrap();
        }
        let last = fs.create(&root(), Ino::ROOT, b"last", &file(0o644), NOW).unwrap().ino;
        fs.fsync(last, false, NOW).unwrap();
        let memory = Arc::new(Memory::new(m.memory.crash(&mut |n| n - 1), BLOCKS, 3));
        let (fs, report) = Fs::mount(memory.clone(), options(), NOW).unwrap();
        assert_eq!(report.records, 1, "only the last one, after {before:#x}");
        let again = Mounted { memory, fs };
        assert_eq!(again.names(Ino::ROOT), [".", "..", "last", "lost+found", "renamed"]);
        again.check();
    }
}

/// A kernel puts the error into the journal when it aborts it.
#[test]
fn the_error_of_an_aborted_journal_goes_into_the_superblock() {
    let (made, journal) = image_and_journal();
    change_journal(&made, &journal, |superblock| superblock.set_errno(-5_i32 as u32));
    let memory = Arc::new(Memory::new(load(&made), BLOCKS, 3));
    let (fs, report) = Fs::mount(memory.clone(), options(), NOW).unwrap();
    assert!(report.has_error);
    fs.unmount(NOW).unwrap();
    let block = |at: u64| -> Block {
        let mut block = [0; 4096];
        memory.read(BlockNo(at), &mut block).unwrap();
        block
    };
    let superblock = Superblock::decode(&block(0), soft).unwrap();
    assert!(superblock.state().contains(State::ERROR), "e2fsck checks everything");
    let journal = JournalSuperblock::decode(&made.layout(), &block(journal[0]), 8192).unwrap();
    assert_eq!(journal.errno(), 0, "it counts once");
}

#[test]
fn times_that_the_format_lacks_become_the_nearest_ones_at_once() {
    let m = Mounted::new(BLOCKS, &[]);
    let f = m.fs.create(&root(), Ino::ROOT, b"file", &file(0o644), NOW).unwrap().ino;
    let time = |seconds| Some(Time { seconds, nanos: 7 });
    let set = SetAttr { atime: time(i64::MAX), mtime: time(i64::MIN), ..SetAttr::default() };
    let now = m.fs.set_attr(&root(), f, &set, NOW).unwrap();
    let last = Time { seconds: 15_032_385_535, nanos: 0 };
    assert_eq!((now.times.atime, now.times.mtime.seconds), (last, -2_147_483_648));
    m.fs.unmount(NOW).unwrap();
    let again = Mounted::of(m.memory.image(), BLOCKS);
    assert_eq!(again.fs.attr(f).unwrap().times.atime, last);
    again.check();
}

#[test]
fn immutable_and_append_only_files_keep_what_they_have() {
    let made = image::Image::new((BLOCKS * 4096) >> 20, &["-J", "size=32"]);
    let content = made.dir().join("content");
    std::fs::write(&content, b"content").unwrap();
    let content = content.to_str().unwrap();
    let mut commands = String::new();
    for name in ["immutable", "append"] {
        commands += &format!("mkdir {name}d\nwrite {content} {name}\nwrite {content} {name}d/in\n");
    }
    // The last one of the names below belongs to an immutable directory.
    for (name, flag) in [("immutable", 0x10), ("append", 0x20)] {
        commands += &format!("sif {name} flags {:#x}\n", 0x8_0000 | flag);
        commands += &format!("sif {name}d flags {:#x}\n", 0x8_0000 | flag);
    }
    made.debugfs(&commands);
    let m = Mounted::of(load(&made), BLOCKS);
    let fs = &m.fs;
    let ino = |parent, name: &[u8]| fs.lookup(&root(), parent, name).unwrap().ino;
    let refused = Err(FsError::NotPermitted);
    for name in [&b"immutable"[..], b"append"] {
        let is_append = name == b"append";
        let f = ino(Ino::ROOT, name);
        assert_eq!(fs.write(&root(), f, 0, b"x", NOW).map(drop), refused);
        let appended = fs.write(&root(), f, 7, b" and more", NOW).map(drop);
        assert_eq!(appended, if is_append { Ok(()) } else { refused.clone() });
        let set = SetAttr { size: Some(3), ..SetAttr::default() };
        assert_eq!(fs.set_attr(&root(), f, &set, NOW).map(drop), refused);
        let set = SetAttr { mode: Some(0o600), ..SetAttr::default() };
        assert_eq!(fs.set_attr(&root(), f, &set, NOW).map(drop), refused);
        let punched = fs.fallocate(f, mode::PUNCH_HOLE | mode::KEEP_SIZE, 0, 4096, NOW);
        assert_eq!(punched, refused);
        let set = fs.set_xattr(&root(), f, b"user.a", b"b", SetMode::Any, NOW);
        assert_eq!(set, refused);
        assert_eq!(fs.unlink(&root(), Ino::ROOT, name, NOW), refused);
        assert_eq!(fs.rename(&root(), Ino::ROOT, name, Ino::ROOT, b"x", 0, NOW), refused);
        assert_eq!(fs.link(&root(), f, Ino::ROOT, b"x", NOW).map(drop), refused);
        let other = fs.create(&root(), Ino::ROOT, b"other", &file(0o644), NOW).unwrap();
        assert_eq!(fs.rename(&root(), Ino::ROOT, b"other", Ino::ROOT, name, 0, NOW), refused);
        fs.unlink(&root(), Ino::ROOT, b"other", NOW).unwrap();
        fs.forget(other.ino, 1);

        let d = ino(Ino::ROOT, &[name, b"d"].concat());
        let new = fs.create(&root(), d, b"new", &dir(0o755), NOW).map(drop);
        assert_eq!(new, if is_append { Ok(()) } else { refused.clone() });
        assert_eq!(fs.unlink(&root(), d, b"in", NOW), refused);
        assert_eq!(fs.rename(&root(), d, b"in", Ino::ROOT, b"x", 0, NOW), refused);
        let inside = ino(d, b"in");
        fs.write(&root(), inside, 0, b"the flag is the directory's", NOW).unwrap();
    }
    m.check();
}

#[test]
fn a_read_only_mount_writes_nothing() {
    let m = Mounted::new(BLOCKS, &[]);
    let fs = &m.fs;
    let d = fs.create(&root(), Ino::ROOT, b"dir", &dir(0o755), NOW).unwrap().ino;
    let f = fs.create(&root(), d, b"file", &file(0o644), NOW).unwrap().ino;
    fs.write(&root(), f, 0, &[7; 10_000], NOW).unwrap();
    fs.sync(NOW).unwrap();
    let dirty = m.memory.image();
    fs.unmount(NOW).unwrap();
    let read_only = || {
        let mut options = options();
        options.read_only = true;
        options
    };
    let memory = Arc::new(Memory::new(dirty, BLOCKS, 3));
    memory.fail_after(0);
    let mounted = Fs::mount(memory, read_only(), NOW).map(drop);
    assert_eq!(mounted, Err(MountError::NeedsRecovery), "and it has not tried to write");

    let memory = Arc::new(Memory::new(m.memory.image(), BLOCKS, 3));
    memory.fail_after(0);
    let (fs, _) = Fs::mount(memory.clone(), read_only(), NOW).unwrap();
    let later = Time { seconds: NOW.seconds + 1_000_000, nanos: 0 };
    let mut content = [0; 10_000];
    fs.read(f, 0, &mut content, later).unwrap();
    assert_eq!(content, [7; 10_000]);
    let refused = Err(FsError::ReadOnly);
    assert_eq!(fs.write(&root(), f, 0, b"x", later).map(drop), refused);
    assert_eq!(fs.create(&root(), d, b"x", &file(0o644), later).map(drop), refused);
    assert_eq!(fs.unlink(&root(), d, b"file", later), refused);
    assert_eq!(fs.fsync(f, false, later), Ok(()));
    fs.sync(later).unwrap();
    fs.tick(later).unwrap();
    fs.unmount(later).unwrap();
    check_clean(&memory.image(), BLOCKS);
}

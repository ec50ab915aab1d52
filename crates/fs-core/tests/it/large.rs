//! Large file systems, which are sparse in memory. One of 20 TiB has block numbers of more than 32
//! bits.

use std::fs::File;
use std::os::fd::AsRawFd;

use riopipe_fs_core::fs::{Fs, MountReport, mode};
use riopipe_fs_core::{BLOCK_BYTES, Block, FsError, Ino};
use rustix::fs::{MemfdFlags, memfd_create};

use crate::calls::{Mounted, NOW, dir, file, options, root};
use crate::memory::Image;

const TIB: u64 = 1 << 40;
const BYTES: u64 = 20 * TIB;
const BLOCKS: u64 = BYTES / BLOCK_BYTES as u64;
/// Directories of the root, which lie in groups all over the file system.
const DIRECTORIES: u64 = 64;

/// An image that mke2fs makes, in a file in memory: no file of ext4 can be so large. Few inodes keep
/// it small.
fn image(bytes: u64) -> Image {
    let file = File::from(memfd_create("riofs", MemfdFlags::empty()).unwrap());
    file.set_len(bytes).unwrap();
    let path = format!("/proc/{}/fd/{}", std::process::id(), file.as_raw_fd());
    let options = ["-q", "-F", "-t", "ext4", "-b", "4096", "-I", "256", "-J", "size=32"];
    let features = ["-O", "64bit,metadata_csum,^resize_inode"];
    let rest = ["-E", "lazy_itable_init=1", "-i", "1048576", &path];
    let made = crate::image::run("mke2fs", &[&options[..], &features, &rest].concat(), None);
    assert_eq!(made.code, 0, "{}", made.output);
    Image::from_file(&file)
}

/// Checks the files that lie all over the file system.
fn check_files(fs: &Fs) {
    for n in 0..DIRECTORIES {
        let d = fs.lookup(&root(), Ino::ROOT, format!("d{n}").as_bytes()).unwrap();
        let f = fs.lookup(&root(), d.ino, b"f").unwrap();
        let mut data = [0; BLOCK_BYTES];
        assert_eq!(fs.read(f.ino, 0, &mut data, NOW).unwrap(), BLOCK_BYTES);
        assert_eq!(data, content(n));
    }
}

fn content(n: u64) -> Block {
    let mut block = [n as u8; BLOCK_BYTES];
    block[..8].copy_from_slice(b"content!");
    block
}

#[test]
fn a_file_system_of_20_tib_works_beyond_32_bits_and_after_a_crash() {
    let m = Mounted::of(image(BYTES), BLOCKS);
    let fs = &m.fs;
    assert!(fs.statfs().blocks > 1 << 32);
    for n in 0..DIRECTORIES {
        let d = fs.create(&root(), Ino::ROOT, format!("d{n}").as_bytes(), &dir(0o755), NOW);
        let f = fs.create(&root(), d.unwrap().ino, b"f", &file(0o644), NOW).unwrap();
        fs.write(&root(), f.ino, 0, &content(n), NOW).unwrap();
        fs.fsync(f.ino, false, NOW).unwrap();
    }
    let image = m.memory.image();
    let has_content = |(_, block): &(u64, &Block)| block.starts_with(b"content!");
    let places: Vec<u64> = image.blocks().filter(has_content).map(|(at, _)| at).collect();
    assert_eq!(places.len() as u64, DIRECTORIES);
    assert!(places.iter().any(|at| *at > 1 << 32), "one is beyond 16 TiB: {places:?}");
    assert!(places.iter().any(|at| *at < 1 << 28), "one is at the beginning: {places:?}");

    // By records only, and then by the log only.
    let again = Mounted::of(m.memory.durable_image(), BLOCKS);
    check_files(&again.fs);
    let fs = &again.fs;
    let huge = fs.create(&root(), Ino::ROOT, b"huge", &file(0o644), NOW).unwrap();
    fs.fallocate(huge.ino, mode::KEEP_SIZE, 0, TIB / 64, NOW).unwrap();
    fs.write(&root(), huge.ino, 15 * TIB, b"far", NOW).unwrap();
    fs.sync(NOW).unwrap();
    let again = Mounted::of(again.memory.durable_image(), BLOCKS);
    check_files(&again.fs);
    let huge = again.fs.lookup(&root(), Ino::ROOT, b"huge").unwrap();
    assert_eq!(huge.size, 15 * TIB + 3);
    let mut far = [0; 3];
    again.fs.read(huge.ino, 15 * TIB, &mut far, NOW).unwrap();
    assert_eq!(&far, b"far");
    again.fs.unlink(&root(), Ino::ROOT, b"huge", NOW).unwrap();
    again.fs.unmount(NOW).unwrap();

    let (fs, report) = Fs::mount(again.memory.clone(), options(), NOW).unwrap();
    assert_eq!(report, MountReport::default(), "nothing to recover");
    check_files(&fs);
}

/// A removal takes many transactions. What another thread needs of the space comes step by step.
#[test]
fn a_file_gets_the_space_of_a_huge_one_that_is_being_removed() {
    const BYTES: u64 = TIB / 4;
    const BLOCKS: u64 = BYTES / BLOCK_BYTES as u64;
    // Neither fits beside the other.
    const HUGE: u64 = BYTES / 16 * 9;
    let m = Mounted::of(image(BYTES), BLOCKS);
    let fs = &m.fs;
    let make = |name| fs.create(&root(), Ino::ROOT, name, &file(0o600), NOW).unwrap().ino;
    for round in 0..3 {
        let [old, new] = [make(b"old"), make(b"new")];
        fs.fallocate(old, mode::KEEP_SIZE, 0, HUGE, NOW).unwrap();
        assert_eq!(fs.fallocate(new, mode::KEEP_SIZE, 0, HUGE, NOW), Err(FsError::NoSpace));
        fs.sync(NOW).unwrap();
        let before = (fs.statfs().blocks_free, fs.stat().commits);
        std::thread::scope(|scope| {
            scope.spawn(|| {
                fs.unlink(&root(), Ino::ROOT, b"old", NOW).unwrap();
                fs.forget(old, 1);
            });
            // It has begun.
            while fs.statfs().blocks_free == before.0 {
                std::thread::yield_now();
            }
            fs.fallocate(new, mode::KEEP_SIZE, 0, HUGE, NOW).unwrap();
        });
        assert!(fs.stat().commits > before.1 + 2, "round {round}: several transactions");
        assert_eq!(fs.attr(old).map(drop), Err(FsError::Stale(old)));
        fs.unlink(&root(), Ino::ROOT, b"new", NOW).unwrap();
        fs.forget(new, 1);
    }
    m.fs.unmount(NOW).unwrap();
}

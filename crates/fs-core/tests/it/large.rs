//! A file system of 20 TiB, which has block numbers of more than 32 bits. It is sparse in memory.

use std::fs::File;
use std::os::fd::AsRawFd;

use riopipe_fs_core::fs::{Fs, MountReport, mode};
use riopipe_fs_core::{BLOCK_BYTES, Block, Ino};
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
fn image() -> Image {
    let file = File::from(memfd_create("riofs", MemfdFlags::empty()).unwrap());
    file.set_len(BYTES).unwrap();
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
    let m = Mounted::of(image(), BLOCKS);
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

//! The limit of the pages of all files in memory.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use std::ops::ControlFlow;

use riopipe_fs_core::fs::{Fs, MountOptions};
use riopipe_fs_core::{BLOCK_BYTES, BlockNo, Ino};

use crate::calls::{Mounted, NOW, dir, file, options, root};
use crate::delayed::Delayed;
use crate::hooked::{Hooked, Hooks};
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

/// Damages a block on the drive: from then on a read of it returns another byte.
#[derive(Default)]
struct Damage {
    /// 0: none.
    block: AtomicU64,
}

impl Hooks for Damage {
    fn on_read(&self, first: BlockNo, into: &mut [u8]) {
        let block = self.block.load(Ordering::Relaxed);
        if block > 0
            && let Some(index) = block.checked_sub(first.0)
            && let Some(block) = into.as_chunks_mut::<BLOCK_BYTES>().0.get_mut(index as usize)
        {
            block[100] ^= 1;
        }
    }
}

/// Dirty pages of a file whose extent tree is damaged can't be written. Other files go on.
#[test]
fn a_damaged_file_does_not_keep_others_below_the_limit() {
    let m = Mounted::new(BLOCKS, &[]);
    let f = m.fs.create(&root(), Ino::ROOT, b"damaged", &file(0o600), NOW).unwrap();
    // More extents than the inode has space for.
    for page in (0..20).step_by(2) {
        m.fs.write(&root(), f.ino, page * 4096, b"data", NOW).unwrap();
    }
    let d = m.fs.create(&root(), Ino::ROOT, b"d", &dir(0o700), NOW).unwrap();
    for n in 0..6000 {
        let name = format!("{n:0>200}");
        m.fs.create(&root(), d.ino, name.as_bytes(), &file(0o600), NOW).unwrap();
    }
    m.fs.unmount(NOW).unwrap();
    let image = m.memory.image();
    let is_node = |(_, block): &(u64, &[u8; BLOCK_BYTES])| block.starts_with(&[0x0a, 0xf3]);
    let nodes: Vec<u64> = image.blocks().filter(is_node).map(|(at, _)| at).collect();

    let storage = Hooked::<Damage>::new(image, BLOCKS);
    let options = MountOptions { cached_blocks_max: 1, ..limited() };
    let (fs, _) = Fs::mount(storage.clone(), options, NOW).unwrap();
    let damaged = fs.lookup(&root(), Ino::ROOT, b"damaged").unwrap().ino;
    fs.write(&root(), damaged, 4096, b"more", NOW).unwrap();
    // The node leaves the memory, because others come.
    fs.read_dir(d.ino, 0, &mut |_| ControlFlow::Continue(())).unwrap();
    let read = |node| {
        storage.hooks.block.store(node, Ordering::Relaxed);
        fs.seek(damaged, 8192, riopipe_fs_core::fs::SeekTo::Hole)
    };
    let node = nodes.into_iter().find(|&node| read(node).is_err_and(|error| error.is_damage()));
    node.expect("a node of the file");

    for n in 0..3 * LIMIT / STEP {
        let name = format!("other {n}");
        let other = fs.create(&root(), Ino::ROOT, name.as_bytes(), &file(0o600), NOW).unwrap();
        fs.write(&root(), other.ino, 0, &content(1), NOW).unwrap();
        assert!(fs.load().pages as usize <= LIMIT, "{} pages", fs.load().pages);
    }
    let error = fs.fsync(damaged, false, NOW).unwrap_err();
    assert!(error.is_damage() && fs.failure().is_none(), "{error}");
    assert_eq!(fs.load().dirty_pages as usize % STEP, 1, "the page is still there");
    // It was the drive.
    storage.hooks.block.store(0, Ordering::Relaxed);
    fs.fsync(damaged, false, NOW).unwrap();
    let mut data = [0; 4];
    fs.read(damaged, 4096, &mut data, NOW).unwrap();
    assert_eq!(&data, b"more");
    fs.unmount(NOW).unwrap();
    check_clean(&storage.memory.image(), BLOCKS);
}

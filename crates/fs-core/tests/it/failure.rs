//! An error that makes the file system read-only is recorded on the drive, as far as the storage
//! still works.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use riopipe_fs_core::format::superblock::{State, Superblock};
use riopipe_fs_core::fs::{Fs, JournalMode, MountOptions};
use riopipe_fs_core::storage::{StorageError, StreamNo};
use riopipe_fs_core::{FsError, Ino};

use crate::calls::{Mounted, NOW, file, options, root};
use crate::hooked::{Hooked, Hooks};
use crate::memory::{Image, Memory, image_of};

const BLOCKS: u64 = 65_536;

/// Makes the data streams fail, or all of them.
#[derive(Default)]
struct Failing {
    is_data: AtomicBool,
    is_main: AtomicBool,
}

impl Hooks for Failing {
    fn before(&self, stream: StreamNo) -> Result<(), StorageError> {
        let is_failing = if stream == StreamNo(0) { &self.is_main } else { &self.is_data };
        match is_failing.load(Ordering::Relaxed) {
            true => Err(StorageError("the stream was made to fail".to_owned())),
            false => Ok(()),
        }
    }
}

fn failing(image: Image) -> Arc<Hooked<Failing>> {
    Hooked::new(image, BLOCKS)
}

fn superblock(image: &Image) -> Superblock {
    Superblock::decode(&image.read(0), riopipe_nvme::digest::soft).unwrap()
}

/// By the background, or by an unmount that comes before it.
#[test]
fn an_error_is_recorded_in_both_superblocks_and_the_next_mount_has_it() {
    for is_by_tick in [true, false] {
        let storage = failing(image_of(BLOCKS, &[]));
        let (fs, report) = Fs::mount(storage.clone(), options(), NOW).unwrap();
        assert!(!report.has_error);
        let f = fs.create(&root(), Ino::ROOT, b"before", &file(0o600), NOW).unwrap();
        fs.write(&root(), f.ino, 0, b"data", NOW).unwrap();
        // The log has a superblock without the error. Its replay comes after the error.
        fs.sync(NOW).unwrap();
        storage.hooks.is_data.store(true, Ordering::Relaxed);
        fs.write(&root(), f.ino, 0, b"lost", NOW).unwrap();
        let error = fs.fsync(f.ino, false, NOW).unwrap_err();
        assert!(matches!(error, FsError::Io(_)) && fs.is_read_only(), "{error}");
        match is_by_tick {
            true => drop(fs.tick(NOW).unwrap()),
            false => assert_eq!(fs.unmount(NOW), Err(FsError::ReadOnly)),
        }
        assert_eq!(fs.load().errors, 1);
        // Once.
        fs.unmount(NOW).unwrap_err();
        let image = storage.memory.durable_image();
        let found = superblock(&image);
        assert!(found.state().contains(State::ERROR));
        assert_eq!((found.error_count(), fs.load().errors), (1, 1));

        let storage = failing(image);
        let (fs, report) = Fs::mount(storage.clone(), options(), NOW).unwrap();
        assert!(report.has_error && report.replayed > 0, "{report:?}");
        let before = fs.lookup(&root(), Ino::ROOT, b"before").unwrap();
        let mut data = [0; 4];
        fs.read(before.ino, 0, &mut data, NOW).unwrap();
        assert_eq!(&data, b"data");
        fs.unmount(NOW).unwrap();
        // Only a check clears it.
        let image = storage.memory.image();
        let found = superblock(&image);
        assert!(found.state().contains(State::ERROR) && found.error_count() == 1);
        let (_, report) = Fs::mount(failing(image), options(), NOW).unwrap();
        assert!(report.has_error);
    }
}

/// Mode `ext4` sets no private bit, so e2fsck may come before the next mount: it replays the log, and
/// takes the error from its superblock.
#[test]
fn e2fsck_reports_a_recorded_error_and_clears_it() {
    for is_mounted_between in [false, true] {
        let storage = failing(image_of(BLOCKS, &[]));
        let ext4 = MountOptions { mode: JournalMode::Ext4, ..options() };
        let (fs, _) = Fs::mount(storage.clone(), ext4, NOW).unwrap();
        let f = fs.create(&root(), Ino::ROOT, b"before", &file(0o600), NOW).unwrap();
        fs.write(&root(), f.ino, 0, b"data", NOW).unwrap();
        fs.fsync(f.ino, false, NOW).unwrap();
        fs.write(&root(), f.ino, 0, b"lost", NOW).unwrap();
        storage.hooks.is_main.store(true, Ordering::Relaxed);
        fs.fsync(f.ino, false, NOW).unwrap_err();
        storage.hooks.is_main.store(false, Ordering::Relaxed);
        fs.tick(NOW).unwrap();
        let mut left = storage.memory.durable_image();
        if is_mounted_between {
            let again = Mounted::of(left, BLOCKS);
            again.fs.unmount(NOW).unwrap();
            left = again.memory.image();
        }

        let image = crate::image::Image::new(BLOCKS >> 8, &[]);
        left.save(&image.path(), BLOCKS);
        let checked = image.tool("e2fsck", &["-n"]);
        assert!(checked.output.contains("with errors, check forced"), "{}", checked.output);
        assert!(image.superblock().error_count() > 0, "it has changed nothing");
        let repaired = image.repair();
        assert!(matches!(repaired.code, 0 | 1), "{}", repaired.output);
        let found = image.superblock();
        assert!(!found.state().contains(State::ERROR), "{}", repaired.output);
        assert_eq!(found.error_count(), 0);
        image.assert_clean();
        let storage = failing(Image::of_file(&image.path()));
        let (fs, report) = Fs::mount(storage.clone(), options(), NOW).unwrap();
        assert!(!report.has_error && fs.load().errors == 0, "{report:?}");
        let before = fs.lookup(&root(), Ino::ROOT, b"before").unwrap();
        let mut data = [0; 4];
        fs.read(before.ino, 0, &mut data, NOW).unwrap();
        // An overwrite is there or not, as on ext4.
        assert!(matches!(&data, b"data" | b"lost"));
    }
}

#[test]
fn a_storage_that_fails_for_good_keeps_the_error_in_memory() {
    let memory = Arc::new(Memory::new(image_of(BLOCKS, &[]), BLOCKS, 3));
    let (fs, _) = Fs::mount(memory.clone(), options(), NOW).unwrap();
    let f = fs.create(&root(), Ino::ROOT, b"f", &file(0o600), NOW).unwrap();
    memory.fail_after(0);
    fs.fsync(f.ino, false, NOW).unwrap_err();
    fs.tick(NOW).unwrap();
    assert_eq!(fs.unmount(NOW), Err(FsError::ReadOnly));
    assert!(fs.failure().is_some() && fs.load().errors == 1);
}

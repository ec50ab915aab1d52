//! An error that makes the file system read-only is recorded on the drive, as far as the storage
//! still works.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use riopipe_fs_core::format::superblock::{State, Superblock};
use riopipe_fs_core::fs::Fs;
use riopipe_fs_core::storage::{
    GroupSeq, Storage, StorageError, StreamMarks, StreamNo, WriteGroup,
};
use riopipe_fs_core::{BlockNo, FsError, Ino};

use crate::calls::{NOW, file, options, root};
use crate::memory::{Image, Memory, image_of};

const BLOCKS: u64 = 65_536;

/// A storage whose data streams can be made to fail. The main stream works.
struct WithoutData {
    memory: Memory,
    is_failing: AtomicBool,
}

impl WithoutData {
    fn new(image: Image) -> Arc<Self> {
        Arc::new(Self { memory: Memory::new(image, BLOCKS, 3), is_failing: AtomicBool::new(false) })
    }

    fn check(&self, stream: StreamNo) -> Result<(), StorageError> {
        match stream != StreamNo(0) && self.is_failing.load(Ordering::Relaxed) {
            true => Err(StorageError("the stream was made to fail".to_owned())),
            false => Ok(()),
        }
    }
}

impl Storage for WithoutData {
    fn blocks(&self) -> u64 {
        self.memory.blocks()
    }

    fn streams(&self) -> u16 {
        self.memory.streams()
    }

    fn read(&self, first: BlockNo, into: &mut [u8]) -> Result<(), StorageError> {
        self.memory.read(first, into)
    }

    fn submit(&self, stream: StreamNo, group: WriteGroup) -> Result<GroupSeq, StorageError> {
        self.check(stream)?;
        self.memory.submit(stream, group)
    }

    fn marks(&self, stream: StreamNo) -> StreamMarks {
        self.memory.marks(stream)
    }

    fn wait_complete(&self, stream: StreamNo, seq: GroupSeq) -> Result<(), StorageError> {
        self.check(stream)?;
        self.memory.wait_complete(stream, seq)
    }

    fn wait_durable(&self, stream: StreamNo, seq: GroupSeq) -> Result<(), StorageError> {
        self.check(stream)?;
        self.memory.wait_durable(stream, seq)
    }
}

fn superblock(image: &Image) -> Superblock {
    Superblock::decode(&image.read(0), riopipe_nvme::digest::soft).unwrap()
}

/// By the background, or by an unmount that comes before it.
#[test]
fn an_error_is_recorded_in_both_superblocks_and_the_next_mount_has_it() {
    for is_by_tick in [true, false] {
        let storage = WithoutData::new(image_of(BLOCKS, &[]));
        let (fs, report) = Fs::mount(storage.clone(), options(), NOW).unwrap();
        assert!(!report.has_error);
        let f = fs.create(&root(), Ino::ROOT, b"before", &file(0o600), NOW).unwrap();
        fs.write(&root(), f.ino, 0, b"data", NOW).unwrap();
        // The log has a superblock without the error. Its replay comes after the error.
        fs.sync(NOW).unwrap();
        storage.is_failing.store(true, Ordering::Relaxed);
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

        let storage = WithoutData::new(image);
        let (fs, report) = Fs::mount(storage.clone(), options(), NOW).unwrap();
        assert!(report.has_error && report.replayed > 0, "{report:?}");
        let before = fs.lookup(&root(), Ino::ROOT, b"before").unwrap();
        let mut data = [0; 4];
        fs.read(before.ino, 0, &mut data, NOW).unwrap();
        assert_eq!(&data, b"data");
        fs.unmount(NOW).unwrap();
        // Only e2fsck clears it.
        let image = storage.memory.image();
        let found = superblock(&image);
        assert!(found.state().contains(State::ERROR) && found.error_count() == 1);
        let (_, report) = Fs::mount(WithoutData::new(image), options(), NOW).unwrap();
        assert!(report.has_error);
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

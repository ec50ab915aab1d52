//! The moment at which a mount lets the storage forget a crash: its own recovery is durable then.

use std::sync::{Arc, Mutex};

use riopipe_fs_core::fs::{Fs, MountOptions, MountReport};
use riopipe_fs_core::storage::{
    GroupSeq, Storage, StorageError, StreamMarks, StreamNo, WriteGroup,
};
use riopipe_fs_core::{BlockNo, Ino};

use crate::calls::{Mounted, NOW, file, options, root};
use crate::memory::{Image, Memory, image_of};

const BLOCKS: u64 = 16_384;

/// A storage that keeps the worst state after a crash at each of these moments.
struct Watched {
    memory: Memory,
    moments: Mutex<Vec<Image>>,
}

impl Watched {
    fn new(image: Image) -> Arc<Self> {
        Arc::new(Self { memory: Memory::new(image, BLOCKS, 3), moments: Mutex::default() })
    }
}

impl Storage for Watched {
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
        self.memory.submit(stream, group)
    }

    fn marks(&self, stream: StreamNo) -> StreamMarks {
        self.memory.marks(stream)
    }

    fn wait_complete(&self, stream: StreamNo, seq: GroupSeq) -> Result<(), StorageError> {
        self.memory.wait_complete(stream, seq)
    }

    fn wait_durable(&self, stream: StreamNo, seq: GroupSeq) -> Result<(), StorageError> {
        self.memory.wait_durable(stream, seq)
    }

    fn recovered(&self) -> Result<(), StorageError> {
        self.moments.lock().unwrap().push(self.memory.crash(&mut |_| 0));
        Ok(())
    }
}

#[test]
fn the_storage_may_forget_a_crash_once_the_recovery_is_durable() {
    let m = Mounted::of(image_of(BLOCKS, &[]), BLOCKS);
    let fs = &m.fs;
    // A transaction, a file without a name, and records.
    let f = fs.create(&root(), Ino::ROOT, b"orphan", &file(0o600), NOW).unwrap();
    fs.unlink(&root(), Ino::ROOT, b"orphan", NOW).unwrap();
    fs.sync(NOW).unwrap();
    assert!(fs.attr(f.ino).is_ok(), "the kernel still refers to it");
    for name in [b"a", b"b"] {
        let f = fs.create(&root(), Ino::ROOT, name, &file(0o600), NOW).unwrap();
        fs.write(&root(), f.ino, 0, b"data", NOW).unwrap();
        fs.fsync(f.ino, false, NOW).unwrap();
    }
    let storage = Watched::new(m.memory.crash(&mut |_| 0));
    let (_, report) = Fs::mount(storage.clone(), options(), NOW).unwrap();
    let all = MountReport { records: 2, orphans: 1, ..report };
    assert!(report.replayed > 0 && report == all, "{report:?}");

    let moments = std::mem::take(&mut *storage.moments.lock().unwrap());
    let [moment] = moments.try_into().expect("once for a mount");
    let storage = Watched::new(moment);
    let (fs, report) = Fs::mount(storage.clone(), options(), NOW).unwrap();
    assert_eq!(report, MountReport::default(), "nothing is left to recover");
    for name in [b"a", b"b"] {
        fs.lookup(&root(), Ino::ROOT, name).unwrap();
    }
    fs.unmount(NOW).unwrap();

    let storage = Watched::new(storage.memory.image());
    let options = MountOptions { read_only: true, ..options() };
    Fs::mount(storage.clone(), options, NOW).unwrap();
    assert!(storage.moments.lock().unwrap().is_empty(), "a read-only mount recovers nothing");
}
